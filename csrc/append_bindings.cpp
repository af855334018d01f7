#include "append_bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "append.h"
#include "checks.h"
#include "page_bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvist {

namespace {

AppendInput check_vectors(const char* name, const AnyArray& array, const PageStep& step, const LayerPages& layer) {
    check_numbers(name, array, 3);
    check_shape(name, array, {step.pages().num_tokens, layer.num_kv_heads, layer.head_dim});
    step.check_apart(name, extent(array));
    return {array.data(), static_cast<std::ptrdiff_t>(array.stride(0)), static_cast<std::ptrdiff_t>(array.stride(1)),
            is_bf16(array)};
}

void append(const PageStep& step, const PageLayer& layer, const AnyArray& k, const AnyArray& v,
            std::int64_t num_threads) {
    const int threads = check_threads(num_threads);
    step.check_layer(layer);
    const AppendJob job{&layer.pages(), &step.pages(), check_vectors("k", k, step, layer.pages()),
                        check_vectors("v", v, step, layer.pages())};
    if (step.pages().num_tokens == 0) return;

    nb::gil_scoped_release release;
    run_append(job, threads);
}

}  // namespace

void bind_append() {
    nb::cpp_function_def(&append, nb::scope(nb::type<PageStep>()), nb::name("append"), nb::is_method(), "layer"_a,
                         "k"_a, "v"_a, nb::kw_only(), "num_threads"_a);
}

}  // namespace kvist
