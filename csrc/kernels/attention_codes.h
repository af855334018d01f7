// Weights as whole numbers, for quantised values: of a page and group of dims, the largest product of weight and step
// becomes the largest code. What a row does not see has a weight of zero and a step that is not looked at.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_keys.h"

namespace kvist::KVIST_ISA {
namespace {

constexpr std::size_t kMostGroups = kMostHeadDim / kStorageFormats[3].least_group_dims;
constexpr float kMiddleCode = 7.5f;
// Smaller products stand for zeros. What a code stands for, and a 256th of it, are then no denormals.
constexpr float kLeastProduct = 0x1p-100f;

// The weights of a block on one page, for each group of dims.
struct WeightCodes {
    static constexpr std::size_t kWords = kPageSlots / 4 * kUnitWords;

    alignas(64) std::int32_t units[kMostGroups][kMostRows][kWords];
    // Of int8 values, the low bytes of codes that are two units; there if `has_low` says so of some row.
    alignas(64) std::int32_t low[kMostRows][kWords];
    bool has_low;
    float step[kMostGroups][kMostRows];  // what a unit stands for
};

// The largest code, in units that take two bytes or one.
constexpr std::int32_t kMostCode = kUnitsAreBytes ? 255 : 255 * 128;

// In units of bytes: where one slot has as large a share of a row's weights in a split, the codes of its page have two
// bytes. What is lost by rounding them to one is of the order of the largest, and only many of the kind make it small
// beside the whole.
constexpr float kLargeShare = 1.0f / 16;

inline bool sees_all(const Block& block, std::size_t r, std::size_t page) {
    return block.first[r] <= page * kPageSlots && block.stop[r] >= (page + 1) * kPageSlots;
}

inline LaneMask seen_lanes(const Block& block, std::size_t r, std::size_t start) {
    const std::size_t first = block.first[r] > start ? block.first[r] - start : 0;
    const std::size_t stop = block.stop[r] > start ? block.stop[r] - start : 0;
    return lanes_between(first < kLanes ? first : kLanes, stop < kLanes ? stop : kLanes);
}

// The steps of a page's values in one group, and for int4 the values whose code would be in the middle.
struct PageSteps {
    Floats step[kPageTiles];
    Floats middle[kPageTiles];
};

template <Storage kValues>
inline PageSteps page_steps(const std::uint8_t* scales) {
    PageSteps of;
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPageTiles; ++i) {
        const Ints scalars = load_ints(scales + i * kLineBytes);
        if constexpr (kValues == Storage::kInt8) {
            of.step[i] = floats_of_bits(scalars);
        } else {
            of.step[i] = low_bf16(scalars);
            of.middle[i] = fma(of.step[i], all_floats(kMiddleCode), high_bf16(scalars));
        }
    }
    return of;
}

inline void store_zeros(std::int32_t* words, std::size_t count) {
    for (std::size_t i = 0; i < count; i += kLanes) store(words + i, all_ints(0));
}

// Row r's weights of one page, times the steps of one group, as codes. `floors` gathers what the floors add.
template <Storage kValues, bool kSeesAll>
KVIST_ALWAYS_INLINE void code_row(const Block& block, std::size_t r, std::size_t page, const PageSteps& steps,
                                  std::size_t group, Floats& floors, WeightCodes& to) {
    const float* weights = block.scores + r * kSplitSlots + page * kPageSlots;
    Floats products[kPageTiles], greatest = all_floats(0.0f);
    Ints most = all_ints(0);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPageTiles; ++i) {
        const Floats weight = load_floats(weights + i * kLanes);
        Floats step = steps.step[i], middle;
        if constexpr (kValues == Storage::kInt4) middle = steps.middle[i];
        if constexpr (!kSeesAll) {
            const LaneMask seen = seen_lanes(block, r, page * kPageSlots + i * kLanes);
            step = select(seen, step, all_floats(0.0f));
            if constexpr (kValues == Storage::kInt4) middle = select(seen, middle, all_floats(0.0f));
        }
        products[i] = weight * step;
        // Of numbers that are not negative the greater has the greater bits, and what is no number the greatest.
        most = max_unsigned(most, bits_of(products[i]));
        if constexpr (kValues == Storage::kInt4) {
            floors = fma(weight, middle, floors);
        } else if constexpr (kUnitsAreBytes) {
            greatest = max(weight, greatest);
        }
    }
    const float largest = __builtin_bit_cast(float, max_lane_unsigned(most));
    if (largest < kLeastProduct) {
        to.step[group][r] = 0;
        store_zeros(to.units[group][r], WeightCodes::kWords);
        if constexpr (kUnitsAreBytes && kValues == Storage::kInt8) store_zeros(to.low[r], WeightCodes::kWords);
        return;
    }
    const float step = largest * (1.0f / kMostCode);
    to.step[group][r] = step;
    Ints codes[kPageTiles];
    if constexpr (kUnitsAreBytes && kValues == Storage::kInt8) {
        if (is_less_anywhere(all_floats(kLargeShare * block.gathered[r]->total), greatest)) {
            const Floats inverse = all_floats(255 * 256 / largest);
            Ints low[kPageTiles];
#pragma GCC unroll 4
            for (std::size_t i = 0; i < kPageTiles; ++i) {
                const Ints code = rounded(products[i] * inverse);
                codes[i] = shift_right<8>(code);
                low[i] = code & all_ints(255);
            }
            store_unsigned_units(to.units[group][r], codes);
            store_unsigned_units(to.low[r], low);
            to.has_low = true;
            return;
        }
        store_zeros(to.low[r], WeightCodes::kWords);
    }
    const Floats inverse = all_floats(kMostCode / largest);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPageTiles; ++i) codes[i] = rounded(products[i] * inverse);
    if constexpr (kValues == Storage::kInt4) {
        // As if the codes of the values were counted from the middle: what weights lose by rounding then counts less.
        const Ints sum = (codes[0] + codes[1]) + (codes[2] + codes[3]);
        floors = fma(to_floats(sum), all_floats(-kMiddleCode * step), floors);
    }
    store_unsigned_units(to.units[group][r], codes);
}

// The weights of kRows rows on one page, for all groups. None waits for what came before: the long way from a product
// to its code is gone by several at once.
template <Storage kValues, std::size_t kRows>
inline void code_weights(const LayerPages& layer, const Block& block, const HeadPage& at, std::size_t page,
                         Floats (*floors)[kRows], WeightCodes& to) {
    to.has_low = false;
    const std::size_t groups = layer.head_dim / layer.value_group_dims;
    for (std::size_t group = 0; group < groups; ++group) {
        const PageSteps steps =
            page_steps<kValues>(at.bytes + layer.value_scales + group * kPageTiles * kLineBytes);
        for (std::size_t r = 0; r < kRows; ++r) {
            if (sees_all(block, r, page)) {
                code_row<kValues, true>(block, r, page, steps, group, floors[group][r], to);
            } else {
                code_row<kValues, false>(block, r, page, steps, group, floors[group][r], to);
            }
        }
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
