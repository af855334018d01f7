// Weights as whole numbers, for quantised values: of a page and group of dims, the largest product of weight and step
// becomes the largest code. What a row does not see has a weight of zero and a step that is not looked at.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_keys.h"

namespace kvist::KVIST_ISA {
namespace {

constexpr std::size_t kMostGroups = kMostHeadDim / kStorageFormats[3].least_group_dims;
// From which codes of int4 values are counted, so that what weights lose by rounding counts less: by how they are
// unpacked, or with a sum of the weights' codes.
constexpr float kMiddleCode = kCentresNibbles ? 8.0f : 7.5f;
// What a unit of unpacked codes is, in codes.
constexpr float kNibbleUnit = kCentresNibbles ? 1.0f / 16 : 1.0f;
// Smaller products stand for zeros. What a code stands for, and a 256th of it, are then no denormals.
constexpr float kLeastProduct = 0x1p-100f;

// Groups of a page whose weights are coded together, so that what is slow about one is done while another goes on.
constexpr std::size_t kMostGroupsAtOnce = 2;
template <Storage kValues>
constexpr std::size_t kGroupsAtOnce = kValues == Storage::kInt4 ? kMostGroupsAtOnce : 1;

// The weights of a block on one page, for some groups of dims.
struct WeightCodes {
    static constexpr std::size_t kWords = kPageSlots / 4 * kUnitWords;

    alignas(64) std::int32_t units[kMostGroupsAtOnce][kMostRows][kWords];
    // Of int8 values, which have one group, the low bytes of codes that are two units; there if `has_low` says so of
    // some row.
    static_assert(kGroupsAtOnce<Storage::kInt8> == 1);
    alignas(64) std::int32_t low[kMostRows][kWords];
    bool has_low;
    float step[kMostGroupsAtOnce][kMostRows];  // what a unit stands for
};

// The largest code, in units that take two bytes or one.
constexpr std::int32_t kMostCode = kUnitsAreBytes ? 255 : 255 * 128;

// What is added to products before they are rounded to codes, less than half a code up or down, by slot. Of equal
// products some are then rounded up and others down, so that their sum stays, and what is small beside one large
// product is not lost as a whole. Zero stays zero, and the largest code itself. Any few slots in a row have numbers that
// lie evenly: the bits of the slot in reverse. For int4 values: those of int8 are so exact that its noise is felt.
struct Rounding {
    alignas(64) float added[kPageSlots];

    constexpr Rounding() : added() {
        for (std::size_t slot = 0; slot < kPageSlots; ++slot) {
            std::size_t reversed = 0;
            for (std::size_t bit = 1; bit < kPageSlots; bit *= 2) reversed = 2 * reversed + (slot & bit ? 1 : 0);
            added[slot] = (static_cast<float>(reversed) + 0.5f) / kPageSlots - 0.5f;
        }
    }
};
constexpr Rounding kRounding;

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

inline const float* page_weights(const Block& block, std::size_t r, std::size_t page) {
    return block.scores + r * kSplitSlots + page * kPageSlots;
}

// Row r's weights of one page times the steps of one group; `most` is the largest in each lane, and `floors` gathers
// what the middles add.
template <Storage kValues, bool kSeesAll>
KVIST_ALWAYS_INLINE void multiply_row(const Block& block, std::size_t r, std::size_t page, const PageSteps& steps,
                                      Floats (&products)[kPageTiles], Ints& most, [[maybe_unused]] Floats& floors) {
    const float* weights = page_weights(block, r, page);
    Ints greatest = all_ints(0);
    Floats floor = floors;
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
        const Floats product = weight * step;
        products[i] = product;
        // Of numbers that are not negative the greater has the greater bits, and what is no number the greatest.
        greatest = max_unsigned(greatest, bits_of(product));
        if constexpr (kValues == Storage::kInt4) floor = fma(weight, middle, floor);
    }
    most = greatest;
    if constexpr (kValues == Storage::kInt4) floors = floor;
}

// Whether one slot of the page has a large share of the row's weights in the split.
inline bool has_large_share(const Block& block, std::size_t r, std::size_t page) {
    const float* weights = page_weights(block, r, page);
    Floats greatest = load_floats(weights);
#pragma GCC unroll 4
    for (std::size_t i = 1; i < kPageTiles; ++i) greatest = max(load_floats(weights + i * kLanes), greatest);
    return is_less_anywhere(all_floats(kLargeShare * block.gathered[r]->total), greatest);
}

// A row's products as codes: one code stands for `step`, and `inverse` is 1 / `step`.
template <Storage kValues>
KVIST_ALWAYS_INLINE void code_row(const Block& block, std::size_t r, std::size_t page,
                                  const Floats (&products)[kPageTiles], [[maybe_unused]] float step, float inverse,
                                  std::size_t group, [[maybe_unused]] Floats& floors, WeightCodes& to) {
    Ints codes[kPageTiles];
    if constexpr (kUnitsAreBytes && kValues == Storage::kInt8) {
        if (has_large_share(block, r, page)) {
            const Floats finer = all_floats(inverse * 256);
            Ints low[kPageTiles];
#pragma GCC unroll 4
            for (std::size_t i = 0; i < kPageTiles; ++i) {
                const Ints code = rounded(products[i] * finer);
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
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPageTiles; ++i) {
        if constexpr (kValues == Storage::kInt4) {
            codes[i] = rounded(fma(products[i], all_floats(inverse), load_floats(kRounding.added + i * kLanes)));
        } else {
            codes[i] = rounded(products[i] * all_floats(inverse));
        }
    }
    if constexpr (kValues == Storage::kInt4 && !kCentresNibbles) {
        const Ints sum = (codes[0] + codes[1]) + (codes[2] + codes[3]);
        floors = fma(to_floats(sum), all_floats(-kMiddleCode * step), floors);
    }
    store_unsigned_units(to.units[group][r], codes);
}

// The weights of kRows rows on one page times the steps of some groups, and what a code of each will stand for.
template <Storage kValues, std::size_t kRows>
struct GroupProducts {
    static constexpr std::size_t kMost = kGroupsAtOnce<kValues> * kRows;

    // [groups, rows]
    Floats products[kMost][kPageTiles];
    alignas(64) float step[kLanes];
    alignas(64) float inverse[kLanes];
    static_assert(kMost <= kLanes);
};

template <Storage kValues, std::size_t kRows>
inline void multiply_groups(const LayerPages& layer, const Block& block, const HeadPage& at, std::size_t page,
                            std::size_t first_group, std::size_t num_groups, Floats (*floors)[kRows],
                            GroupProducts<kValues, kRows>& to) {
    constexpr std::size_t kMost = GroupProducts<kValues, kRows>::kMost;
    Ints most[(kMost + 3) / 4 * 4];
    for (std::size_t i = num_groups * kRows; i < sizeof most / sizeof *most; ++i) most[i] = all_ints(0);
    for (std::size_t g = 0; g < num_groups; ++g) {
        const std::size_t group = first_group + g;
        const PageSteps steps = page_steps<kValues>(at.bytes + layer.value_scales + group * kPageTiles * kLineBytes);
        for (std::size_t r = 0; r < kRows; ++r) {
            const std::size_t i = g * kRows + r;
            if (sees_all(block, r, page)) {
                multiply_row<kValues, true>(block, r, page, steps, to.products[i], most[i], floors[group][r]);
            } else {
                multiply_row<kValues, false>(block, r, page, steps, to.products[i], most[i], floors[group][r]);
            }
        }
    }
    const Floats largest = floats_of_bits(max_lanes_unsigned(most));
    const Floats most_code = all_floats(kMostCode);
    const LaneMask is_nothing = less(largest, all_floats(kLeastProduct));
    store(to.step, select(is_nothing, all_floats(0.0f), largest * all_floats(1.0f / kMostCode)));
    store(to.inverse, select(is_nothing, all_floats(0.0f), most_code / largest));
}

template <Storage kValues, std::size_t kRows>
inline void code_groups(const Block& block, std::size_t page, std::size_t first_group, std::size_t num_groups,
                        const GroupProducts<kValues, kRows>& from, Floats (*floors)[kRows], WeightCodes& to) {
    to.has_low = false;
    for (std::size_t g = 0; g < num_groups; ++g) {
        for (std::size_t r = 0; r < kRows; ++r) {
            const std::size_t i = g * kRows + r;
            to.step[g][r] = kValues == Storage::kInt4 ? from.step[i] * kNibbleUnit : from.step[i];
            code_row<kValues>(block, r, page, from.products[i], from.step[i], from.inverse[i], g,
                              floors[first_group + g][r], to);
        }
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
