// Rows of attention: how a query is prepared for the format of the keys, and how splits are merged.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "kernels/numbers.h"
#include "kernels/rotation.h"
#include "page_layout.h"
#include "simd.h"
#include "simd_codes.h"
#include "simd_lanes.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

// The largest score of a split of which nothing is seen. It is finite, so that differences stay numbers.
constexpr float kLeastScore = -3.40282346638528859812e38f;
// Smaller steps of codes stand for zeros: what divides by them stays finite.
constexpr float kLeastUnit = 0x1p-118f;

// The bytes of a prepared row: this, then three regions of whole lines.
struct Row {
    float step;                   // of the query's codes; 1 where it has none. Scores are multiplied by it
    std::int32_t excess;          // what the bias of int8 keys adds to the sum of products
    std::int64_t position;        // of its token
    std::int64_t first_position;  // that it sees

    const std::int32_t* units() const { return reinterpret_cast<const std::int32_t*>(bytes() + 64); }
    // With cosines and sines side by side, their product is that of the query and the turned offset.
    const float* turned(std::size_t head_dim) const {
        return reinterpret_cast<const float*>(bytes() + 64 + whole_lines(4 * head_dim));
    }
    const float* group_sums(std::size_t head_dim) const {
        return reinterpret_cast<const float*>(bytes() + 64 + 2 * whole_lines(4 * head_dim));
    }
    std::int32_t* units() { return reinterpret_cast<std::int32_t*>(bytes() + 64); }
    float* turned(std::size_t head_dim) { return reinterpret_cast<float*>(bytes() + 64 + whole_lines(4 * head_dim)); }
    float* group_sums(std::size_t head_dim) {
        return reinterpret_cast<float*>(bytes() + 64 + 2 * whole_lines(4 * head_dim));
    }

private:
    const char* bytes() const { return reinterpret_cast<const char*>(this); }
    char* bytes() { return reinterpret_cast<char*>(this); }
};
static_assert(sizeof(Row) <= 64);

// The bits of a query's codes below the high byte. Those that meet int8 keys have two bytes, since one would lose as
// much as the keys' own rounding does; to int4 keys it makes no difference. Sums of products fit into 32 bits, once
// they are without the excess.
constexpr int low_bits(Storage keys, std::size_t head_dim) {
    if (keys != Storage::kInt8) return 0;
    return head_dim <= 512 ? 8 : 7;
}

// Codes of a vector, padded with zeros to whole lines, from -`most` to `most`. Returns their step.
inline float code_query(const float* x, std::size_t padded, std::int32_t most, std::int32_t* codes) {
    Ints bits = all_ints(0);
    for (std::size_t i = 0; i < padded; i += kLanes) {
        bits = max_unsigned(bits, bits_of(load_floats(x + i)) & all_ints(0x7fffffff));
    }
    const float largest = __builtin_bit_cast(float, max_lane_unsigned(bits));
    const float step = largest / static_cast<float>(most);
    if (!(step < __builtin_inff()) || step < kLeastUnit) {
        for (std::size_t i = 0; i < padded; i += kLanes) store(codes + i, all_ints(0));
        return step < kLeastUnit ? 0.0f : __builtin_nanf("");
    }
    const Floats inverse = all_floats(1 / step);
    for (std::size_t i = 0; i < padded; i += kLanes) store(codes + i, rounded(load_floats(x + i) * inverse));
    return step;
}

inline void load_query(const AttentionTask& task, std::size_t token, std::size_t head, float* x) {
    const std::size_t head_dim = task.layer->head_dim;
    const std::size_t at = token * task.q_token_stride + head * task.q_head_stride;
    if (task.is_bf16) {
        const std::uint16_t* q = static_cast<const std::uint16_t*>(task.q) + at;
        for (std::size_t i = 0; i < head_dim; ++i) x[i] = widened(q[i]);
    } else {
        const float* q = static_cast<const float*>(task.q) + at;
        for (std::size_t i = 0; i < head_dim; ++i) x[i] = q[i];
    }
    for (std::size_t i = head_dim; i < padded_dims(head_dim); ++i) x[i] = 0;
}

// A query as the keys take it.
inline void prepare_row(const AttentionTask& task, std::size_t token, std::size_t head, Row& row) {
    const LayerPages& layer = *task.layer;
    const std::size_t head_dim = layer.head_dim, padded = padded_dims(head_dim);
    float x[kMostHeadDim];
    load_query(task, token, head, x);
    row.position = task.step->row_positions[token];
    row.first_position = row.position < task.window ? 0 : row.position - task.window + 1;
    row.step = 1;
    row.excess = 0;
    std::int32_t* units = row.units();
    if (!is_quantised(layer.keys)) {
        __builtin_memcpy(units, x, head_dim * sizeof(float));
        return;
    }
    const std::size_t kv_head = head / task.group_size;
    if (layer.key_offset != nullptr) {
        const float* offset = layer.key_offset + kv_head * head_dim;
        const float* scale = layer.key_scale + kv_head * head_dim;
        float* turned = row.turned(head_dim);
        const std::size_t half = head_dim / 2;
        for (std::size_t i = 0; i < half; ++i) {
            turned[i] = x[i] * offset[i] + x[i + half] * offset[i + half];
            turned[i + half] = x[i + half] * offset[i] - x[i] * offset[i + half];
        }
        for (std::size_t i = 0; i < head_dim; ++i) x[i] /= scale[i];
    }
    rotate(x, head_dim);
    alignas(64) std::int32_t codes[kMostHeadDim];
    const std::int32_t parts = 1 << low_bits(layer.keys, head_dim);
    row.step = code_query(x, padded, 127 * parts, codes);
    const auto sum = [&](std::size_t first, std::size_t count) {
        std::int32_t total = 0;
        for (std::size_t i = first; i < first + count; ++i) total += codes[i];
        return total;
    };
    if (layer.keys == Storage::kInt8) {
        row.excess = kInt8KeyBias * sum(0, head_dim);
    } else {
        const std::size_t dims = layer.key_group_dims;
        for (std::size_t group = 0; group < head_dim / dims; ++group) {
            row.group_sums(head_dim)[group] = static_cast<float>(sum(group * dims, dims));
        }
    }
    // Whole lines are stored: what is beyond the vector is stored over, or not looked at.
    const auto store_units = [&](std::int32_t* words) {
        for (std::size_t i = 0; i < padded; i += kLanes) store_signed_units(words + i / 4 * kUnitWords, codes + i);
    };
    if (kHasWordSums && layer.keys == Storage::kInt4) {
        for (std::size_t i = 0; i < padded; i += kLanes) store_signed_bytes(units + i / 4, codes + i);
        return;
    }
    if (!kUnitsAreBytes || layer.keys != Storage::kInt8) {
        store_units(units);
        return;
    }
    alignas(64) std::int32_t low[kMostHeadDim];
    for (std::size_t i = 0; i < padded; ++i) {
        const std::int32_t high = (codes[i] + parts / 2) >> low_bits(layer.keys, head_dim);
        low[i] = codes[i] - high * parts;
        codes[i] = high;
    }
    store_units(units);
    for (std::size_t i = 0; i < padded; ++i) codes[i] = low[i];
    store_units(units + head_dim / 4 * kUnitWords);
}

// What a row has gathered: the largest score so far, in powers of two, and relative to it weights and weighted values.
struct Gathered {
    float top;
    float total;
};

inline void start(const AttentionTask& task, std::size_t head, std::size_t padded, Gathered& to, float* mixed) {
    to.top = task.sinks == nullptr ? kLeastScore : task.sinks[head] * kLog2E;
    to.total = task.sinks == nullptr ? 0.0f : 1.0f;
    for (std::size_t i = 0; i < padded; i += kLanes) store(mixed + i, all_floats(0.0f));
}

inline void merge(std::size_t padded, Gathered& to, float* mixed, const Gathered& from, const float* added) {
    // One of the two powers is that of zero.
    const bool is_higher = from.top > to.top;
    const float power = first_lane(exp2(all_floats(is_higher ? to.top - from.top : from.top - to.top)));
    const float of_kept = is_higher ? power : 1.0f, of_taken = is_higher ? 1.0f : power;
    const Floats kept = all_floats(of_kept), taken = all_floats(of_taken);
    if (is_higher) to.top = from.top;
    to.total = to.total * of_kept + from.total * of_taken;
    for (std::size_t i = 0; i < padded; i += kLanes) {
        store(mixed + i, fma(load_floats(added + i), taken, load_floats(mixed + i) * kept));
    }
}

// The weighted mean, rotated back where the values are rotated. Overwrites `mixed`.
inline void finish(const AttentionTask& task, std::size_t token, std::size_t head, float total, float* mixed) {
    const std::size_t head_dim = task.layer->head_dim;
    for (std::size_t i = 0; i < padded_dims(head_dim); i += kLanes) {
        store(mixed + i, load_floats(mixed + i) / all_floats(total));
    }
    if (is_quantised(task.layer->values)) rotate(mixed, head_dim);
    const std::size_t at = token * task.out_token_stride + head * task.out_head_stride;
    if (task.is_bf16) {
        std::uint16_t* out = static_cast<std::uint16_t*>(task.out) + at;
        for (std::size_t i = 0; i < head_dim; ++i) out[i] = bf16_bits(mixed[i]);
    } else {
        __builtin_memcpy(static_cast<float*>(task.out) + at, mixed, head_dim * sizeof(float));
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
