#include "layer_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <iterator>
#include <utility>

#include "attention_plan.h"
#include "page_layout.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvist {

namespace {

constexpr const char* kMatrixNames[] = {"q", "k", "v", "o", "gate", "up", "down"};
constexpr const char* kRowNames[] = {"x", "cos", "sin"};

std::string text(std::size_t value) { return std::to_string(value); }

float check_eps(double eps) {
    const auto fits = static_cast<float>(eps);
    check(fits >= 0 && fits - fits == 0, "eps must be finite and 0 at least");
    return fits;
}

float check_finite(const char* name, double value) {
    const float fits = static_cast<float>(value);
    check(fits - fits == 0, [&] { return std::string(name) + " must be finite"; });
    return fits;
}

Activation activation_named(const std::string& name) {
    if (name == "silu") return Activation::kSilu;
    check(name == "gelu_tanh", "activation is '" + name + "': it must be silu or gelu_tanh");
    return Activation::kGeluTanh;
}

}  // namespace

HiddenRows::HiddenRows(const nb::ndarray<>& x, AnyArray cos, AnyArray sin)
    : x_(x), cos_(std::move(cos)), sin_(std::move(sin)) {
    const AnyArray written(x_);
    check_floats("x", written, 2);
    states_ = {static_cast<float*>(x_.data()), check_floats("cos", cos_, 3), check_floats("sin", sin_, 3), x_.shape(0)};
    embed_dim_ = x_.shape(1);
    head_dim_ = cos_.shape(2);
    extents_[0] = extent(written);
    const auto check_table = [&](const char* name, const AnyArray& table, Extent& kept) {
        check_shape(name, table, {states_.num_rows, 1, head_dim_});
        kept = extent(table);
        kvist::check_apart("x", extents_[0], name, kept);
    };
    check_table("cos", cos_, extents_[1]);
    check_table("sin", sin_, extents_[2]);
}

void HiddenRows::norm(const AnyArray& weight, const nb::ndarray<>& out, double offset, double eps,
                      std::int64_t num_threads) const {
    const float* norm = check_vector<float>("weight", weight, "float32");
    check(weight.shape(0) == embed_dim(), [&] {
        return "weight has " + text(weight.shape(0)) + " elements: it must have " + text(embed_dim());
    });
    const AnyArray written(out);
    check_floats_of("out", written, {states_.num_rows, embed_dim_});
    check_apart("out", extent(written));
    kvist::check_apart("out", extent(written), "weight", extent(weight));
    const NormNumbers numbers{check_eps(eps), check_finite("offset", offset)};
    const int threads = check_threads(num_threads);
    nb::gil_scoped_release release;
    run_norm(states_, embed_dim_, norm, numbers, static_cast<float*>(out.data()), threads);
}

void HiddenRows::check_apart(const PageStep& step) const {
    for (std::size_t i = 0; i < std::size(extents_); ++i) step.check_apart(kRowNames[i], extents_[i]);
}

void HiddenRows::check_apart(const char* name, const Extent& of) const {
    for (std::size_t i = 0; i < std::size(extents_); ++i) kvist::check_apart(name, of, kRowNames[i], extents_[i]);
}

DecoderLayer::DecoderLayer(std::vector<nb::object> matrices, std::vector<std::optional<AnyArray>> biases,
                           std::vector<std::optional<AnyArray>> norms, double norm_offset, double eps,
                           std::int64_t head_dim, double scale, std::optional<std::int64_t> window,
                           const std::string& activation)
    : window_(window), matrices_(std::move(matrices)), biases_(std::move(biases)), norms_(std::move(norms)) {
    LayerMatrix* const places[] = {&layer_.q, &layer_.k, &layer_.v, &layer_.o, &layer_.gate, &layer_.up, &layer_.down};
    check(matrices_.size() == std::size(places) && biases_.size() == std::size(places),
          "matrices and biases must have 7 elements each: of q, k, v, o, gate, up and down");
    check(norms_.size() == 6,
          "norms must have 6 elements: before attention, of q, of k, after attention, before the MLP, after it");
    for (std::size_t i = 0; i < std::size(places); ++i) {
        const auto& weight = nb::cast<const LinearWeight&>(matrices_[i]);
        places[i]->weight = &weight.matrix();
        reads_.push_back({kMatrixNames[i], weight.bytes()});
    }
    check_between("head_dim", head_dim, 2, kMostHeadDim);
    check(head_dim % 2 == 0, "head_dim is " + std::to_string(head_dim) + ": it must be even");
    layer_.head_dim = static_cast<std::size_t>(head_dim);
    layer_.embed_dim = layer_.q.weight->num_groups * kGroupColumns;
    layer_.mlp_dim = layer_.gate.weight->num_rows;
    const std::size_t query_dims = layer_.q.weight->num_rows, key_dims = layer_.k.weight->num_rows;
    const std::size_t shapes[][2] = {{query_dims, layer_.embed_dim},     {key_dims, layer_.embed_dim},
                                     {key_dims, layer_.embed_dim},       {layer_.embed_dim, query_dims},
                                     {layer_.mlp_dim, layer_.embed_dim}, {layer_.mlp_dim, layer_.embed_dim},
                                     {layer_.embed_dim, layer_.mlp_dim}};
    for (std::size_t i = 0; i < std::size(places); ++i) {
        const std::size_t rows = places[i]->weight->num_rows, columns = places[i]->weight->num_groups * kGroupColumns;
        check(rows == shapes[i][0] && columns == shapes[i][1], [&] {
            return std::string(kMatrixNames[i]) + " has the shape [" + text(rows) + ", " + text(columns) +
                   "]: it must be [" + text(shapes[i][0]) + ", " + text(shapes[i][1]) + "]";
        });
        places[i]->bias = kept(std::string("the bias of ") + kMatrixNames[i], biases_[i], rows);
    }
    layer_.num_heads = query_dims / layer_.head_dim;
    layer_.num_kv_heads = key_dims / layer_.head_dim;
    check(query_dims % layer_.head_dim == 0 && key_dims % layer_.head_dim == 0 &&
              layer_.num_heads % layer_.num_kv_heads == 0,
          [&] {
              return "q and k have " + text(query_dims) + " and " + text(key_dims) +
                     " rows: they must be heads of head_dim " + std::to_string(head_dim) +
                     ", those of q a multiple of those of k";
          });

    check(norms_[0].has_value() && norms_[4].has_value(),
          "the norms before attention and before the MLP must be there");
    check(norms_[1].has_value() == norms_[2].has_value(), "the norms of q and k go together");
    layer_.input_norm = kept("the norm before attention", norms_[0], layer_.embed_dim);
    layer_.q_norm = kept("the norm of q", norms_[1], layer_.head_dim);
    layer_.k_norm = kept("the norm of k", norms_[2], layer_.head_dim);
    layer_.attention_output_norm = kept("the norm after attention", norms_[3], layer_.embed_dim);
    layer_.mlp_input_norm = kept("the norm before the MLP", norms_[4], layer_.embed_dim);
    layer_.mlp_output_norm = kept("the norm after the MLP", norms_[5], layer_.embed_dim);
    layer_.norms = {check_eps(eps), check_finite("norm_offset", norm_offset)};
    layer_.scale = check_finite("scale", scale);
    check(!window.has_value() || *window >= 1, "window must be 1 at least");
    layer_.activation = activation_named(activation);
}

const float* DecoderLayer::kept(std::string name, const std::optional<AnyArray>& array, std::size_t size) {
    if (!array.has_value()) return nullptr;
    const float* data = check_vector<float>(name.c_str(), *array, "float32");
    check(array->shape(0) == size,
          [&] { return name + " has " + text(array->shape(0)) + " elements: it must have " + text(size); });
    reads_.push_back({std::move(name), extent(*array)});
    return data;
}

void DecoderLayer::check_apart(const char* name, const Extent& of) const {
    for (const Read& read : reads_) kvist::check_apart(name, of, read.name.c_str(), read.extent);
}

const AttentionPlan* DecoderLayer::plan(PageStep& step, const PageLayer& pages, const HiddenRows& hidden) const {
    step.check_layer(pages);
    const LayerPages& of = pages.pages();
    check(of.head_dim == layer_.head_dim && of.num_kv_heads == layer_.num_kv_heads, [&] {
        return "the pages have " + text(of.num_kv_heads) + " KV heads of " + text(of.head_dim) +
               " dims: those of this layer are " + text(layer_.num_kv_heads) + " of " + text(layer_.head_dim);
    });
    check(hidden.embed_dim() == layer_.embed_dim && hidden.head_dim() == layer_.head_dim, [&] {
        return "the rows have " + text(hidden.embed_dim()) + " dims, turned in heads of " + text(hidden.head_dim()) +
               ": those of this layer are " + text(layer_.embed_dim) + " and " + text(layer_.head_dim);
    });
    check(hidden.states().num_rows == step.pages().num_tokens, [&] {
        return "there are " + text(hidden.states().num_rows) + " rows: the step has " + text(step.pages().num_tokens) +
               " tokens";
    });
    const std::int64_t window = window_.value_or(step.window());
    check(window <= step.window(), [&] {
        return "the layer's window is " + std::to_string(window) + ": that of the step is " +
               std::to_string(step.window());
    });
    hidden.check_apart(step);
    check_apart("x", hidden.x());
    if (hidden.states().num_rows == 0) return nullptr;
    return &step.plan(layer_.num_heads / layer_.num_kv_heads, layer_.num_kv_heads, window);
}

namespace {

struct LayerCall {
    const DecoderLayer* layer;
    PageStep* step;
    const PageLayer* pages;
    const HiddenRows* hidden;
    const AttentionPlan* plan;
};

template <typename T>
T* member(const nb::tuple& call, std::size_t index) {
    T* pointer = nullptr;
    if (call.size() != 4 || !nb::try_cast<T*>(call[index], pointer) || pointer == nullptr) {
        throw nb::type_error("a call must be a tuple of a DecoderLayer, a PageStep, a PageLayer and HiddenRows");
    }
    return pointer;
}

void run_layers(const nb::sequence& given, std::int64_t num_threads, const std::optional<nb::ndarray<>>& stage_ns) {
    const int threads = check_threads(num_threads);
    std::int64_t* stages = nullptr;
    Extent clocked;
    if (stage_ns.has_value()) {
        const AnyArray written(*stage_ns);
        check_vector<std::int64_t>("stage_ns", written, "int64");
        check(written.shape(0) == kLayerStages, "stage_ns must have an element for each of LAYER_STAGES");
        stages = static_cast<std::int64_t*>(stage_ns->data());
        clocked = extent(written);
    }
    // Tuples of our own hold all that runs until it has run: while other threads of Python work, the caller's list may
    // change, and a sequence that makes its elements when it is asked holds none of them.
    std::vector<nb::tuple> held;
    for (nb::handle call : nb::tuple(given)) held.emplace_back(nb::tuple(call));
    // All are checked before the first of them changes anything.
    std::vector<LayerCall> calls;
    calls.reserve(held.size());
    for (const nb::tuple& one : held) {
        LayerCall call{member<const DecoderLayer>(one, 0), member<PageStep>(one, 1), member<const PageLayer>(one, 2),
                       member<const HiddenRows>(one, 3), nullptr};
        call.plan = call.layer->plan(*call.step, *call.pages, *call.hidden);
        if (stages != nullptr) {
            call.step->check_apart("stage_ns", clocked);
            call.hidden->check_apart("stage_ns", clocked);
            call.layer->check_apart("stage_ns", clocked);
        }
        calls.push_back(call);
    }
    nb::gil_scoped_release release;
    for (const LayerCall& call : calls) {
        if (call.plan == nullptr) continue;
        run_layer(call.layer->layer(), call.step->pages(), call.pages->pages(), *call.plan, call.hidden->states(),
                  threads, stages);
    }
}

}  // namespace

void bind_layer(nb::module_& m) {
    m.attr("LAYER_STAGES") = nb::cast(std::vector<std::string>(std::begin(kLayerStageNames), std::end(kLayerStageNames)));
    nb::class_<HiddenRows>(m, "HiddenRows")
        .def(nb::init<const nb::ndarray<>&, AnyArray, AnyArray>(), "x"_a, "cos"_a, "sin"_a)
        .def("norm", &HiddenRows::norm, "weight"_a, "out"_a, nb::kw_only(), "offset"_a, "eps"_a, "num_threads"_a);
    nb::class_<DecoderLayer>(m, "DecoderLayer")
        .def(nb::init<std::vector<nb::object>, std::vector<std::optional<AnyArray>>,
                      std::vector<std::optional<AnyArray>>, double, double, std::int64_t, double,
                      std::optional<std::int64_t>, const std::string&>(),
             "matrices"_a, "biases"_a, "norms"_a, nb::kw_only(), "norm_offset"_a, "eps"_a, "head_dim"_a, "scale"_a,
             "window"_a, "activation"_a);
    m.def("run_layers", &run_layers, "calls"_a, nb::kw_only(), "num_threads"_a, "stage_ns"_a = nb::none());
}

}  // namespace kvist
