// Rows of attention: how a query is prepared for the format of the keys, and how splits are merged.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "kernels/rotation.h"
#include "page_layout.h"
#include "simd.h"

namespace kvist::KVIST_ISA {
namespace {

// The largest score of a split of which nothing is seen. It is finite, so that differences stay numbers.
constexpr float kLeastScore = -3.40282346638528859812e38f;
constexpr float kLog2E = 1.44269504088896340736f;
// Smaller steps of codes stand for zeros: what divides by them stays finite.
constexpr float kLeastUnit = 0x1p-118f;

constexpr std::size_t padded_dims(std::size_t head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

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

inline float bf16_to_float(std::uint16_t bits) { return __builtin_bit_cast(float, std::uint32_t{bits} << 16); }

inline std::uint16_t float_to_bf16(float x) {
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// How many of a row's units hold the high parts of its numbers: behind them are as many of the low parts, where the
// instruction set rounds units to bf16 and the query is not of bf16.
inline bool has_low_parts(const AttentionTask& task) { return kPairUnitsAreRounded && !task.is_bf16; }

// The bits of a query's codes below the high byte. Those that meet int8 keys have two bytes, since one would lose as
// much as the keys' own rounding does; to int4 keys it makes no difference. Sums of products fit into 32 bits.
constexpr int low_bits(Storage keys, std::size_t head_dim) {
    if (keys != Storage::kInt8) return 0;
    return head_dim <= 512 ? 8 : 7;
}

// Codes of a vector, padded with zeros to whole lines: high bytes from -127 to 127, and what they leave. Returns the
// step of what they are together.
inline float code_query(const float* x, std::size_t padded, int low, std::uint8_t* high_bytes,
                        std::uint8_t* low_bytes) {
    Ints most = all_ints(0);
    for (std::size_t i = 0; i < padded; i += kLanes) {
        most = max_unsigned(most, bits_of(load_floats(x + i)) & all_ints(0x7fffffff));
    }
    const float largest = __builtin_bit_cast(float, max_lane_unsigned(most));
    const std::int32_t parts = 1 << low;
    const float step = largest / static_cast<float>(127 * parts);
    if (!(step < __builtin_inff()) || step < kLeastUnit) {
        for (std::size_t i = 0; i < padded; ++i) high_bytes[i] = low_bytes[i] = 0;
        return step < kLeastUnit ? 0.0f : __builtin_nanf("");
    }
    const Floats inverse = all_floats(1 / step);
    for (std::size_t i = 0; i < padded; i += kLanes) {
        std::int32_t codes[kLanes];
        store(codes, rounded(load_floats(x + i) * inverse));
        for (std::size_t j = 0; j < kLanes; ++j) {
            const std::int32_t high = (codes[j] + parts / 2) >> low;
            high_bytes[i + j] = static_cast<std::uint8_t>(high);
            low_bytes[i + j] = static_cast<std::uint8_t>(codes[j] - high * parts);
        }
    }
    return step;
}

inline void load_query(const AttentionTask& task, std::size_t token, std::size_t head, float* x) {
    const std::size_t head_dim = task.layer->head_dim;
    const std::size_t at = token * task.q_token_stride + head * task.q_head_stride;
    if (task.is_bf16) {
        const std::uint16_t* q = static_cast<const std::uint16_t*>(task.q) + at;
        for (std::size_t i = 0; i < head_dim; ++i) x[i] = bf16_to_float(q[i]);
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
    if (layer.keys == Storage::kFp32) {
        __builtin_memcpy(units, x, head_dim * sizeof(float));
        return;
    }
    if (layer.keys == Storage::kBf16) {
        const std::size_t words = head_dim / 2 * kPairUnitWords;
        std::int32_t stored[kMostHeadDim / 2 * kPairUnitWords];
        for (std::size_t i = 0; i < padded; i += kLanes) {
            store_pair_units(stored + i / 2 * kPairUnitWords, load_floats(x + i));
        }
        __builtin_memcpy(units, stored, words * 4);
        if (has_low_parts(task)) {
            for (std::size_t i = 0; i < padded; i += kLanes) {
                std::int32_t* pairs = stored + i / 2 * kPairUnitWords;
                store_pair_units(pairs, load_floats(x + i) - load_pair_units(pairs));
            }
            __builtin_memcpy(units + words, stored, words * 4);
        }
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
    std::uint8_t high[kMostHeadDim], rest[kMostHeadDim];
    const int low = low_bits(layer.keys, head_dim);
    row.step = code_query(x, padded, low, high, rest);
    const std::size_t words = head_dim / 4 * kUnitWords;
    // Whole lines are stored: what is beyond the vector is stored over, or not looked at.
    for (std::size_t i = 0; i < padded; i += kLanes) store_signed_units(units + i / 4 * kUnitWords, high + i);
    const auto sum = [](const std::uint8_t* codes, std::size_t count) {
        std::int32_t total = 0;
        for (std::size_t i = 0; i < count; ++i) total += static_cast<std::int8_t>(codes[i]);
        return total;
    };
    if (layer.keys == Storage::kInt8) {
        for (std::size_t i = 0; i < padded; i += kLanes)
            store_signed_units(units + words + i / 4 * kUnitWords, rest + i);
        row.excess = kInt8KeyBias * (sum(high, head_dim) * (1 << low) + sum(rest, head_dim));
    } else {
        const std::size_t dims = layer.key_group_dims;
        for (std::size_t group = 0; group < head_dim / dims; ++group) {
            row.group_sums(head_dim)[group] = static_cast<float>(sum(high + group * dims, dims));
        }
    }
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
    const float top = from.top > to.top ? from.top : to.top;
    const Floats kept = exp2(all_floats(to.top - top)), taken = exp2(all_floats(from.top - top));
    to.top = top;
    to.total = to.total * first_lane(kept) + from.total * first_lane(taken);
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
        for (std::size_t i = 0; i < head_dim; ++i) out[i] = float_to_bf16(mixed[i]);
    } else {
        __builtin_memcpy(static_cast<float*>(task.out) + at, mixed, head_dim * sizeof(float));
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
