// A decoder layer over the tokens of a step, for models whose weights are quantised or in bf16.
//
//   h = norm(x)                    q, k, v = products of h, + bias; heads of q and k normed, if they are; turned by rope
//   append k, v;  mixed = attention of q over the pages
//   x += norm(o product of mixed, + bias)                                 that norm is Gemma's alone
//   h = norm(x)                    x += norm(down product of (activation(gate product of h) * up product of h))
//
// Rows do not see one another except through attention, whose rows have the same bits however they are computed. So a
// token's bits depend neither on the other tokens of its step nor on threads nor on how rows are cut.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"
#include "pages.h"

namespace kvist {

struct AttentionPlan;

enum class Activation : std::uint8_t { kSilu, kGeluTanh };

struct LayerMatrix {
    const WeightMatrix* weight;
    const float* bias;  // [N] or null
};

// x (weight + offset) / sqrt(mean(x^2) + eps)
struct NormNumbers {
    float eps;
    float offset;  // 1 where weights are kept less 1
};

// Made once. Norms are their weights; null where the layer has none.
struct Layer {
    LayerMatrix q, k, v, o, gate, up, down;
    const float* input_norm;             // [E]
    const float* q_norm;                 // [D]
    const float* k_norm;                 // [D]
    const float* attention_output_norm;  // [E]
    const float* mlp_input_norm;         // [E]
    const float* mlp_output_norm;        // [E]
    NormNumbers norms;                   // of all
    std::size_t embed_dim;               // E, a multiple of 32, as `num_heads * head_dim` and `mlp_dim` are
    std::size_t num_heads;               // H
    std::size_t num_kv_heads;            // K
    std::size_t head_dim;                // D, even
    std::size_t mlp_dim;
    Activation activation;
    float scale;  // of scores
};

// The tokens of a step. Contiguous rows of fp32.
struct HiddenStates {
    float* x;  // [T, E]; layers change it in place
    const float* cos;  // [T, D]
    const float* sin;
    std::size_t num_rows;  // T
};

// What a layer does, in parts whose time can be asked for.
enum class LayerStage : std::uint8_t { kNorms, kProducts, kHeads, kAppend, kAttention, kGate, kResiduals };
constexpr const char* kLayerStageNames[] = {"norms",     "products with weights", "rope, heads apart", "append to the cache",
                                            "attention", "gate",                  "residuals"};
constexpr std::size_t kLayerStages = sizeof(kLayerStageNames) / sizeof(kLayerStageNames[0]);

// `plan` is for `step` and the layer's heads and window. Nanoseconds that each stage takes are added to `stage_ns`,
// unless it is null. std::bad_alloc if the system refuses memory.
void run_layer(const Layer& layer, const StepPages& step, const LayerPages& pages, const AttentionPlan& plan,
               const HiddenStates& hidden, int num_threads, std::int64_t* stage_ns);

// `out` is the norm of all rows.
void run_norm(const HiddenStates& hidden, std::size_t embed_dim, const float* norm, NormNumbers numbers, float* out,
              int num_threads);

// --- what the kernels between the products are told: rows of fp32, contiguous ---

struct NormTask {
    const float* x;
    float* out;
    const float* norm;
    NormNumbers numbers;
    std::size_t num_rows, dims;
};

// Heads of queries, keys or values, in place. What is null is left out.
struct HeadsTask {
    float* rows;        // [T, heads, D]
    const float* bias;  // [heads, D]
    const float* norm;  // [D]
    NormNumbers numbers;
    const float* cos;  // [T, D], with `sin`
    const float* sin;
    std::size_t num_rows, num_heads, head_dim;
};

// x += norm(y + bias); then `normed`, if it is not null, is the norm of x.
struct AddTask {
    float* x;
    float* y;  // is overwritten
    const float* bias;      // or null
    const float* y_norm;    // or null
    float* normed;          // or null
    const float* x_norm;
    NormNumbers numbers;
    std::size_t num_rows, dims;
};

// gate = activation(gate + bias) * (up + bias)
struct GateTask {
    float* gate;
    const float* up;
    const float* gate_bias;  // or null
    const float* up_bias;
    Activation activation;
    std::size_t num_rows, dims;
};

}  // namespace kvist
