#include "append_bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <string>

#include "append.h"
#include "checks.h"
#include "dispatch.h"
#include "page_bindings.h"
#include "page_layout.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvist {

namespace {

constexpr std::int64_t kMostThreads = 1024;
// Vectors of a step below which waking other threads costs more than it saves.
constexpr std::size_t kLeastVectorsToShare = 32;
constexpr nb::dlpack::dtype kBf16{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};

// Every token passes here for every layer: messages are only made where they are needed.
AppendInput check_vectors(const char* name, const AnyArray& array, const StepPages& step, const LayerPages& layer) {
    const auto fail = [&](const std::string& what) { check(false, std::string(name) + " " + what); };
    const bool is_bf16 = array.dtype() == kBf16;
    if (array.device_type() != nb::device::cpu::value) fail("must be on the CPU");
    if (!is_bf16 && array.dtype() != nb::dtype<float>()) fail("must have dtype float32 or bfloat16");
    if (array.ndim() != 3) fail("has " + std::to_string(array.ndim()) + " dimensions: it must have 3");
    const std::size_t sizes[] = {step.num_tokens, layer.num_kv_heads, layer.head_dim};
    for (std::size_t dim = 0; dim < 3; ++dim) {
        if (array.shape(dim) == sizes[dim]) continue;
        fail("has size " + std::to_string(array.shape(dim)) + " in dimension " + std::to_string(dim) +
             ": it must have " + std::to_string(sizes[dim]));
    }
    if (layer.head_dim > 1 && array.stride(2) != 1) {
        fail("has stride " + std::to_string(array.stride(2)) + " in its last dimension: it must be 1");
    }
    const std::size_t bytes = is_bf16 ? 2 : 4;
    if (reinterpret_cast<std::uintptr_t>(array.data()) % bytes != 0) {
        fail("must be aligned to " + std::to_string(bytes) + " bytes");
    }
    return {array.data(), static_cast<std::ptrdiff_t>(array.stride(0)), static_cast<std::ptrdiff_t>(array.stride(1)),
            is_bf16};
}

struct ParallelAppend {
    const KernelTable& table;
    AppendJob job;
    float* scratch;
    std::size_t scratch_floats;  // of each part
};

void append_part(void* context, int part, int parts) {
    const ParallelAppend& append = *static_cast<ParallelAppend*>(context);
    float* scratch = append.scratch + append.scratch_floats * static_cast<std::size_t>(part);
    append.table.append(append.job, scratch, part, parts);
}

void append(const PageStep& step, const PageLayer& layer, const AnyArray& k, const AnyArray& v,
            std::int64_t num_threads) {
    check_between("num_threads", num_threads, 1, kMostThreads);
    step.check_layer(layer);
    const AppendJob job{&layer.pages(), &step.pages(), check_vectors("k", k, step.pages(), layer.pages()),
                        check_vectors("v", v, step.pages(), layer.pages())};
    if (step.pages().num_tokens == 0) return;

    nb::gil_scoped_release release;
    run_append(job, static_cast<int>(num_threads));
}

}  // namespace

void run_append(const AppendJob& job, int num_threads) {
    const KernelTable& table = kernels();
    const bool shared = job.step->num_tokens * job.layer->num_kv_heads >= kLeastVectorsToShare;
    const int parts = shared ? num_threads : 1;
    const std::size_t scratch_floats = table.append_scratch_floats(job.layer->head_dim);
    constexpr std::size_t kLineFloats = kLineBytes / sizeof(float);
    const auto memory =
        std::make_unique_for_overwrite<float[]>(scratch_floats * static_cast<std::size_t>(parts) + kLineFloats);
    const auto misalignment = reinterpret_cast<std::uintptr_t>(memory.get()) % kLineBytes / sizeof(float);
    ParallelAppend parallel{table, job, memory.get() + (kLineFloats - misalignment), scratch_floats};
    if (parts == 1) return append_part(&parallel, 0, 1);
    run_parallel(parts, append_part, &parallel);
}

void bind_append() {
    nb::cpp_function_def(&append, nb::scope(nb::type<PageStep>()), nb::name("append"), nb::is_method(), "layer"_a,
                         "k"_a, "v"_a, nb::kw_only(), "num_threads"_a);
}

}  // namespace kvist
