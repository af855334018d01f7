// Decoder layers, for Python.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "layer.h"
#include "linear_bindings.h"
#include "page_bindings.h"

namespace kvist {

// `HiddenStates` of Python. Keeps the arrays' memory alive.
class HiddenRows {
public:
    // x: [T, E] float32, contiguous. cos, sin: [T, 1, D] float32, contiguous.
    HiddenRows(const nanobind::ndarray<>& x, AnyArray cos, AnyArray sin);
    HiddenRows(const HiddenRows&) = delete;
    HiddenRows& operator=(const HiddenRows&) = delete;

    // out: [T, E] float32, contiguous: the rows normed, and multiplied by `multiplier` [E].
    void norm(const AnyArray& multiplier, double eps, const nanobind::ndarray<>& out, std::int64_t num_threads) const;

    // Whether the arrays lie apart from the pages of a step.
    void check_apart(const PageStep& step) const;

    const HiddenStates& states() const { return states_; }
    std::size_t embed_dim() const { return x_.shape(1); }
    std::size_t head_dim() const { return cos_.shape(2); }

private:
    nanobind::ndarray<> x_;
    AnyArray cos_, sin_;
    HiddenStates states_{};
};

// `Layer` of Python. Keeps the matrices alive; biases and norms are copied.
class DecoderLayer {
public:
    // matrices, biases: of q, k, v, o, gate, up and down. norms: before attention, of q, of k, after attention, before
    // the MLP, after it. window: tokens that a query sees.
    DecoderLayer(std::vector<nanobind::object> matrices, const std::vector<std::optional<AnyArray>>& biases,
                 const std::vector<std::optional<AnyArray>>& norms, double eps, std::int64_t head_dim, double scale,
                 std::optional<std::int64_t> window, const std::string& activation);
    DecoderLayer(const DecoderLayer&) = delete;
    DecoderLayer& operator=(const DecoderLayer&) = delete;

    // Checks that these belong together; null where there is nothing to do.
    const AttentionPlan* plan(PageStep& step, const PageLayer& pages, const HiddenRows& hidden) const;

    const Layer& layer() const { return layer_; }

private:
    const float* copied(const std::string& name, const std::optional<AnyArray>& array, std::size_t size);

    Layer layer_{};
    std::optional<std::int64_t> window_;
    std::vector<nanobind::object> matrices_;
    std::vector<std::vector<float>> vectors_;
};

void bind_layer(nanobind::module_& m);

}  // namespace kvist
