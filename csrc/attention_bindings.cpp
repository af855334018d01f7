#include "attention_bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "attention_plan.h"
#include "checks.h"
#include "page_bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvist {

namespace {

// So that neither the cap nor its inverse leaves the numbers.
constexpr float kLeastSoftcap = 1e-30f, kMostSoftcap = 1e30f;

// [T, H, D] of bf16 or fp32, dims contiguous; T and D as the step and the layer have them.
void check_heads(const char* name, const AnyArray& array, const PageStep& step, const LayerPages& layer) {
    const std::size_t num_tokens = step.pages().num_tokens;
    check_numbers(name, array, 3);
    check(array.shape(0) == num_tokens && array.shape(2) == layer.head_dim, [&] {
        return std::string(name) + " has the shape " + shape_of(array) + ": it must be [" +
               std::to_string(num_tokens) + ", H, " + std::to_string(layer.head_dim) + "]";
    });
    check(array.shape(1) > 0 && array.shape(1) % layer.num_kv_heads == 0, [&] {
        return std::string(name) + " has " + std::to_string(array.shape(1)) + " heads: it must be a multiple of the " +
               std::to_string(layer.num_kv_heads) + " KV heads";
    });
    step.check_apart(name, extent(array));
}

// Whether no two elements of [T, H, D] share memory: the vectors of the nearer dimension lie within the farther's
// steps.
bool is_apart(const nb::ndarray<>& array) {
    std::size_t near = 1, far = 0;
    if (array.shape(0) > 1 && (array.shape(1) < 2 || array.stride(0) < array.stride(1))) std::swap(near, far);
    const auto dims = static_cast<std::int64_t>(array.shape(2)), count = static_cast<std::int64_t>(array.shape(near));
    if (count > 1 && array.stride(near) < dims) return false;
    return array.shape(far) < 2 || array.stride(far) >= (count > 1 ? (count - 1) * array.stride(near) : 0) + dims;
}

void attend(PageStep& step, const PageLayer& layer, const AnyArray& q, const nb::ndarray<>& out, double scale,
            std::optional<std::int64_t> window, std::optional<double> softcap, const std::optional<AnyArray>& sinks,
            std::int64_t num_threads) {
    const StepPages& pages = step.pages();
    step.check_layer(layer);
    const AnyArray written(out);
    check_heads("q", q, step, layer.pages());
    check_heads("out", written, step, layer.pages());
    check(q.dtype() == out.dtype() && q.shape(1) == out.shape(1), "q and out must have the same shape and dtype");
    const int threads = check_threads(num_threads);
    const std::int64_t sees = window.value_or(step.window());
    check(sees >= 1 && sees <= step.window(), [&] {
        return "window is " + std::to_string(sees) + ": it must be from 1 to the " + std::to_string(step.window()) +
               " of the step";
    });
    const auto fits = static_cast<float>(scale);
    check(fits - fits == 0, "scale must be finite");
    const auto cap = static_cast<float>(softcap.value_or(0));
    check(!softcap.has_value() || (cap >= kLeastSoftcap && cap <= kMostSoftcap), "softcap must be from 1e-30 to 1e30");
    if (pages.num_tokens == 0) return;
    for (std::size_t i = 0; i < 2; ++i) {
        check(q.stride(i) >= 0 && out.stride(i) >= 0, "q and out must not have negative strides");
    }
    check(is_apart(out), "out must not overlap itself");
    const Extent result = extent(written);
    check(!result.overlaps(extent(q)), "q and out must not overlap");
    AttentionTask task{};
    task.layer = &layer.pages();
    task.step = &pages;
    task.num_heads = q.shape(1);
    task.group_size = q.shape(1) / layer.pages().num_kv_heads;
    task.is_bf16 = is_bf16(q);
    task.q = q.data();
    task.q_token_stride = static_cast<std::size_t>(q.stride(0));
    task.q_head_stride = static_cast<std::size_t>(q.stride(1));
    task.out = out.data();
    task.out_token_stride = static_cast<std::size_t>(out.stride(0));
    task.out_head_stride = static_cast<std::size_t>(out.stride(1));
    task.scale = fits;
    task.softcap = cap;
    if (sinks.has_value()) {
        task.sinks = check_floats_of("sinks", *sinks, {task.num_heads});
        check(!result.overlaps(extent(*sinks)), "sinks and out must not overlap");
    }
    task.window = sees;
    const AttentionPlan& plan = step.plan(task.group_size, layer.pages().num_kv_heads, sees);
    nb::gil_scoped_release release;
    run_attention(plan, task, threads);
}

}  // namespace

void bind_attention() {
    nb::cpp_function_def(&attend, nb::scope(nb::type<PageStep>()), nb::name("attend"), nb::is_method(), "layer"_a,
                         "q"_a, "out"_a, nb::kw_only(), "scale"_a, "window"_a = nb::none(), "softcap"_a = nb::none(),
                         "sinks"_a = nb::none(), "num_threads"_a);
}

}  // namespace kvist
