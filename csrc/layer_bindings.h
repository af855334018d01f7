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

// `HiddenStates` of Python. Keeps the arrays' memory alive, and their sizes as they were checked.
class HiddenRows {
public:
    // x: [T, E] float32, contiguous. cos, sin: [T, 1, D] float32, contiguous.
    HiddenRows(const nanobind::ndarray<>& x, AnyArray cos, AnyArray sin);
    HiddenRows(const HiddenRows&) = delete;
    HiddenRows& operator=(const HiddenRows&) = delete;

    // out: [T, E] float32, contiguous: the rows normed, and multiplied by `weight` [E] + offset.
    void norm(const AnyArray& weight, const nanobind::ndarray<>& out, double offset, double eps,
              std::int64_t num_threads) const;

    // Throws unless the arrays lie apart from the pages of a step.
    void check_apart(const PageStep& step) const;

    // Throws unless they lie apart from another array.
    void check_apart(const char* name, const Extent& of) const;

    const HiddenStates& states() const { return states_; }
    const Extent& x() const { return extents_[0]; }
    std::size_t embed_dim() const { return embed_dim_; }
    std::size_t head_dim() const { return head_dim_; }

private:
    nanobind::ndarray<> x_;
    AnyArray cos_, sin_;
    HiddenStates states_{};
    std::size_t embed_dim_ = 0, head_dim_ = 0;
    Extent extents_[3];  // of x, cos and sin
};

// `Layer` of Python. Keeps matrices, biases and norms alive, and reads what is in them when it runs.
class DecoderLayer {
public:
    // matrices, biases: of q, k, v, o, gate, up and down. norms: before attention, of q, of k, after attention, before
    // the MLP, after it. norm_offset: what is added to them. window: tokens that a query sees.
    DecoderLayer(std::vector<nanobind::object> matrices, std::vector<std::optional<AnyArray>> biases,
                 std::vector<std::optional<AnyArray>> norms, double norm_offset, double eps, std::int64_t head_dim,
                 double scale, std::optional<std::int64_t> window, const std::string& activation);
    DecoderLayer(const DecoderLayer&) = delete;
    DecoderLayer& operator=(const DecoderLayer&) = delete;

    // Checks that these belong together; null where there is nothing to do.
    const AttentionPlan* plan(PageStep& step, const PageLayer& pages, const HiddenRows& hidden) const;

    // Throws unless an array that is written to lies apart from what the layer reads.
    void check_apart(const char* name, const Extent& of) const;

    const Layer& layer() const { return layer_; }

private:
    const float* kept(std::string name, const std::optional<AnyArray>& array, std::size_t size);

    struct Read {
        std::string name;
        Extent extent;
    };

    Layer layer_{};
    std::optional<std::int64_t> window_;
    std::vector<nanobind::object> matrices_;
    std::vector<std::optional<AnyArray>> biases_, norms_;
    std::vector<Read> reads_;
};

void bind_layer(nanobind::module_& m);

}  // namespace kvist
