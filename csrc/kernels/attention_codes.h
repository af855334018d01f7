// Weights as whole numbers, for quantised values: of a page and group of dims, the largest product of weight and step
// becomes the largest code. What a row does not see has a weight of zero and a step that is not looked at.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_keys.h"
#include "simd_codes.h"
#include "simd_lanes.h"

namespace kvist::KVIST_ISA {
namespace {

constexpr std::size_t kMostGroups = kMostHeadDim / kStorageFormats[3].least_group_dims;
// From which codes of int4 values are counted.
constexpr float kMiddleCode = 8;
// Smaller products stand for zeros. What a code stands for, and a 256th of it, are then no denormals.
constexpr float kLeastProduct = 0x1p-100f;

// Groups of a page whose weights are coded together, so that what is slow about one is done while another goes on.
constexpr std::size_t kMostGroupsAtOnce = 2;
template <Storage kValues>
constexpr std::size_t kGroupsAtOnce = kValues == Storage::kInt4 ? kMostGroupsAtOnce : 1;

// Codes of int8 values' weights, one group a page, can have a second byte where a unit holds only one.
template <Storage kValues>
constexpr bool kHasLowBytes = kUnitsAreBytes && kValues == Storage::kInt8;

// The weights of a block on one page, for some groups of dims.
struct WeightCodes {
    static constexpr std::size_t kWords = kPageSlots / 4 * kUnitWords;

    alignas(64) std::int32_t units[kMostGroupsAtOnce][kMostRows][kWords];
    // The low bytes of codes that are two units; there if `has_low` says so of some row.
    static_assert(kGroupsAtOnce<Storage::kInt8> == 1);
    alignas(64) std::int32_t low[kMostRows][kWords];
    bool has_low;
    float step[kMostGroupsAtOnce][kMostRows];  // what a unit stands for
};

// The largest code, in units that take one byte or two.
template <Storage kValues>
constexpr bool kHasByteUnits = kUnitsAreBytes || (kHasWordSums && kValues == Storage::kInt4);
template <Storage kValues>
constexpr std::int32_t kMostCode = kHasByteUnits<kValues> ? 255 : 255 * 128;

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

// In units of bytes: where one product of weight and step is as large a share of the row's weights in a split times the
// page's typical step, the codes have two bytes. What is lost by rounding them to one is of the order of the largest, and
// only many of the kind make it small beside the whole.
constexpr float kLargeShare = 1.0f / 16;

// The slots of a page that a row sees, from `first` to before `stop`.
struct SeenSlots {
    std::size_t first, stop;

    bool are_all() const { return first == 0 && stop == kPageSlots; }
    LaneMask lanes(std::size_t tile) const {
        const std::size_t start = tile * kLanes;
        const auto lane = [&](std::size_t slot) {
            return slot <= start ? 0 : slot - start < kLanes ? slot - start : kLanes;
        };
        return lanes_between(lane(first), lane(stop));
    }
};

inline SeenSlots seen_slots(const Block& block, std::size_t r, std::size_t page) {
    const std::size_t start = page * kPageSlots;
    const auto slot = [&](std::size_t position) {
        return position <= start ? 0 : position - start < kPageSlots ? position - start : kPageSlots;
    };
    return {slot(block.first[r]), slot(block.stop[r])};
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

// About the geometric mean of the steps of the seen slots, which a few large ones hardly move: the mean of the bits of
// numbers is near that of their logarithms.
inline float typical_step(const PageSteps& steps, SeenSlots seen) {
    constexpr int kSpareBits = 8;  // of the sum
    Ints sum = all_ints(0);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPageTiles; ++i) {
        const Floats step = select(seen.lanes(i), steps.step[i], all_floats(0.0f));
        sum = sum + shift_right<kSpareBits>(bits_of(step));
    }
    if (seen.first >= seen.stop) return 0;
    const auto mean = static_cast<std::uint32_t>(sum_lanes(sum)) / static_cast<std::uint32_t>(seen.stop - seen.first);
    return __builtin_bit_cast(float, mean << kSpareBits);
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
KVIST_ALWAYS_INLINE void multiply_row(const Block& block, std::size_t r, std::size_t page, SeenSlots seen,
                                      const PageSteps& steps, Floats (&products)[kPageTiles], Ints& most,
                                      [[maybe_unused]] Floats& floors) {
    const float* weights = page_weights(block, r, page);
    Ints greatest = all_ints(0);
    Floats floor = floors;
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPageTiles; ++i) {
        const Floats weight = load_floats(weights + i * kLanes);
        Floats step = steps.step[i], middle;
        if constexpr (kValues == Storage::kInt4) middle = steps.middle[i];
        if constexpr (!kSeesAll) {
            const LaneMask lanes = seen.lanes(i);
            step = select(lanes, step, all_floats(0.0f));
            if constexpr (kValues == Storage::kInt4) middle = select(lanes, middle, all_floats(0.0f));
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

// A row's products as codes; `inverse` is 1 over what a code stands for.
template <Storage kValues>
KVIST_ALWAYS_INLINE void code_row(const Floats (&products)[kPageTiles], float inverse,
                                  [[maybe_unused]] bool has_large_share, std::size_t group, std::size_t r,
                                  WeightCodes& to) {
    Ints codes[kPageTiles];
    if constexpr (kHasLowBytes<kValues>) {
        if (has_large_share) {
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
    if constexpr (kHasByteUnits<kValues>) {
        store_unsigned_bytes(to.units[group][r], codes);
    } else {
        store_unsigned_units(to.units[group][r], codes);
    }
}

// The weights of kRows rows on one page times the steps of some groups, and what a code of each will stand for.
template <Storage kValues, std::size_t kRows>
struct GroupProducts {
    static constexpr std::size_t kMost = kGroupsAtOnce<kValues> * kRows;

    // [groups, rows]
    Floats products[kMost][kPageTiles];
    alignas(64) float step[kLanes];
    alignas(64) float inverse[kLanes];
    // With low bytes: the product from which on one has a large share.
    float large[kRows];
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
        [[maybe_unused]] float typical;
        if constexpr (kHasLowBytes<kValues>) typical = typical_step(steps, {0, kPageSlots});
        for (std::size_t r = 0; r < kRows; ++r) {
            const std::size_t i = g * kRows + r;
            const SeenSlots seen = seen_slots(block, r, page);
            if (seen.are_all()) {
                multiply_row<kValues, true>(block, r, page, seen, steps, to.products[i], most[i], floors[group][r]);
            } else {
                multiply_row<kValues, false>(block, r, page, seen, steps, to.products[i], most[i], floors[group][r]);
            }
            if constexpr (kHasLowBytes<kValues>) {
                const float row_typical = seen.are_all() ? typical : typical_step(steps, seen);
                to.large[r] = kLargeShare * block.gathered[r]->total * row_typical;
            }
        }
    }
    const Floats largest = floats_of_bits(max_lanes_unsigned(most));
    const Floats most_code = all_floats(kMostCode<kValues>);
    const LaneMask is_nothing = less(largest, all_floats(kLeastProduct));
    store(to.step, select(is_nothing, all_floats(0.0f), largest * all_floats(1.0f / kMostCode<kValues>)));
    store(to.inverse, select(is_nothing, all_floats(0.0f), most_code / largest));
}

template <Storage kValues, std::size_t kRows>
inline void code_groups(const GroupProducts<kValues, kRows>& from, std::size_t num_groups, WeightCodes& to) {
    to.has_low = false;
    for (std::size_t g = 0; g < num_groups; ++g) {
        for (std::size_t r = 0; r < kRows; ++r) {
            const std::size_t i = g * kRows + r;
            to.step[g][r] = kValues == Storage::kInt4 ? from.step[i] * (1 / kValueNibble) : from.step[i];
            [[maybe_unused]] bool has_large_share = false;
            if constexpr (kHasLowBytes<kValues>) has_large_share = from.large[r] < from.step[i] * kMostCode<kValues>;
            code_row<kValues>(from.products[i], from.inverse[i], has_large_share, g, r, to);
        }
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
