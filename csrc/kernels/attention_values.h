// Mixed values: the weights of a block of rows meet the values of a split, page by page.
//
// A tile of values is 16 dims, one to a lane; the weights of a row, one unit of slots after the other, stand for all
// lanes. Quantised values take whole numbers as weights. Plain values are multiplied as they are, and there zero times
// what is no number would be none: see `mix_hidden`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_codes.h"
#include "kernels/attention_keys.h"
#include "kernels/attention_nibbles.h"
#include "simd_codes.h"
#include "simd_lanes.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

constexpr std::size_t value_codes(Storage values) {
    return kStorageFormats[static_cast<std::size_t>(values)].codes_per_lane();
}
constexpr std::size_t value_lines(Storage values) { return kPageSlots / value_codes(values); }

// The products of kRows rows and kTiles tiles of int8 values, whose lines begin at `codes`, to `sums`.
template <bool kAsk, std::size_t kRows, std::size_t kTiles>
KVIST_ALWAYS_INLINE void add_bytes(const std::uint8_t* codes, const std::int32_t (*units)[WeightCodes::kWords],
                                   Ints (&sums)[kRows][kTiles], Ahead& ahead) {
    constexpr std::size_t kLines = value_lines(Storage::kInt8);
#pragma GCC unroll 1
    for (std::size_t line = 0; line < kLines; ++line) {
        Codes values[kTiles];
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) values[t] = signed_codes(codes + (t * kLines + line) * kLineBytes);
        if constexpr (kAsk) ask_beside<kTiles>(ahead, line);
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
            const Unit unit = load_unit(units[r] + line * kUnitWords);
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) add_products_of_signed(sums[r][t], values[t], unit);
        }
    }
}

// kRows rows with kTiles tiles of quantised values, whose lines begin at `codes` and whose dims begin at `dim`.
template <Storage kValues, std::size_t kRows, std::size_t kTiles>
KVIST_ALWAYS_INLINE void mix_codes(const std::uint8_t* codes, const WeightCodes& weights, std::size_t place,
                                   float* const* mixed, std::size_t dim, LaneMask lanes, Ahead& ahead) {
    Ints sums[kRows][kTiles];
    set_zeros(sums);
    if constexpr (kValues == Storage::kInt4) {
        const std::int32_t* units[kRows];
        for (std::size_t r = 0; r < kRows; ++r) units[r] = weights.units[place][r];
        add_nibbles<true>(codes, value_lines(kValues), 0, value_lines(kValues), units, sums, ahead);
    } else {
        add_bytes<true>(codes, weights.units[place], sums, ahead);
    }
    float factor = 1;
    if (kHasLowBytes<kValues> && weights.has_low) {
        // The sums of rows without low bytes become 256 times as large, and stay as precise.
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = shift_left<8>(sums[r][t]);
        }
        add_bytes<false>(codes, weights.low, sums, ahead);
        factor = 1.0f / 256;
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) {
        const Floats step = all_floats(weights.step[place][r] * factor);
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) {
            float* to = mixed[r] + dim + t * kLanes;
            const Floats before = load_floats(to);
            Floats after = fma(to_floats(sums[r][t]), step, before);
            if constexpr (kTiles == 1) after = select(lanes, after, before);
            store(to, after);
        }
    }
}

// kRows rows with kTiles tiles of plain values. The weights of a row are kSplitSlots from those of the next.
template <Storage kValues, std::size_t kRows, std::size_t kTiles>
inline void mix_numbers(const std::uint8_t* codes, const float* weights, float* const* mixed, std::size_t dim,
                        Ahead& ahead) {
    constexpr std::size_t kLines = value_lines(kValues), kNumbers = value_codes(kValues);
    Floats sums[kRows][kTiles];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = load_floats(mixed[r] + dim + t * kLanes);
    }
#pragma GCC unroll 1
    for (std::size_t line = 0; line < kLines; ++line) {
        Floats values[kTiles][kNumbers];
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) load_numbers(codes + (t * kLines + line) * kLineBytes, values[t]);
        ask_beside<kTiles>(ahead, line);
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (std::size_t n = 0; n < kNumbers; ++n) {
                const Floats weight = all_floats(weights[r * kSplitSlots + line * kNumbers + n]);
#pragma GCC unroll 4
                for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = fma(values[t][n], weight, sums[r][t]);
            }
        }
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) store(mixed[r] + dim + t * kLanes, sums[r][t]);
    }
}

// Whether all plain numbers of some lines are finite.
template <Storage kValues>
inline bool are_finite(const std::uint8_t* codes, std::size_t lines) {
    constexpr std::int32_t kInfinity = 0x7f800000;
    Ints most = all_ints(0);
#pragma GCC unroll 1
    for (std::size_t line = 0; line < lines; ++line) {
        const Ints bits = load_ints(codes + line * kLineBytes);
        most = max_unsigned(most, bits & all_ints(0x7fffffff));
        if constexpr (kValues == Storage::kBf16) most = max_unsigned(most, shift_left<16>(bits) & all_ints(0x7fffffff));
    }
    return max_lane_unsigned(most) < static_cast<std::uint32_t>(kInfinity);
}

// As `mix_numbers` does, for a page of plain values of which some that a row does not see are not finite: they are
// taken as zeros, which is what they come to where they are finite.
template <Storage kValues>
inline void mix_hidden(const std::uint8_t* codes, const Block& block, std::size_t page, std::size_t tiles,
                       Ahead& ahead) {
    constexpr std::size_t kCodes = value_codes(kValues), kLines = value_lines(kValues);
    alignas(64) std::int32_t seen[kLines * kLanes];
    for (std::size_t r = 0; r < block.num_rows; ++r) {
        for (std::size_t tile = 0; tile < tiles; ++tile) {
            for (std::size_t line = 0; line < kLines; ++line) {
                std::uint32_t mask = 0;
                for (std::size_t i = 0; i < kCodes; ++i) {
                    const std::size_t slot = page * kPageSlots + line * kCodes + i;
                    if (slot >= block.first[r] && slot < block.stop[r])
                        mask |= (kCodes == 1 ? 0xffffffffu : 0xffffu) << (16 * i);
                }
                const Ints bits = load_ints(codes + (tile * kLines + line) * kLineBytes);
                store(seen + line * kLanes, bits & all_ints(static_cast<std::int32_t>(mask)));
            }
            mix_numbers<kValues, 1, 1>(reinterpret_cast<const std::uint8_t*>(seen),
                                       block.scores + r * kSplitSlots + page * kPageSlots, block.mixed + r,
                                       tile * kLanes, ahead);
        }
    }
}

template <Storage kValues, std::size_t kRows>
constexpr std::size_t value_tiles_at_once() {
    if constexpr (kLineRegisters > 1) return 1;
    return kValues == Storage::kInt4 || (kValues == Storage::kBf16 && kRows > 3) ? 2 : 4;
}

// The tiles of quantised values whose dims are in one group, that of the weights' `place`.
template <Storage kValues, std::size_t kRows>
inline void mix_group(const LayerPages& layer, const std::uint8_t* codes, const Block& block,
                      const WeightCodes& weights, std::size_t place, std::size_t group, Ahead& ahead) {
    constexpr std::size_t kTiles = value_tiles_at_once<kValues, kRows>();
    constexpr std::size_t kTileBytes = value_lines(kValues) * kLineBytes;
    const LaneMask all = lanes_between(0, kLanes);
    std::size_t dim = group * layer.value_group_dims;
    const std::size_t end = dim + layer.value_group_dims, stop = end == layer.head_dim ? padded_dims(end) : end;
    // Tiles that the group shares with its neighbours count in its own lanes alone.
    const auto shared = [&](std::size_t until) {
        const std::size_t tile = dim / kLanes;
        mix_codes<kValues, kRows, 1>(codes + tile * kTileBytes, weights, place, block.mixed, tile * kLanes,
                                     lanes_between(dim % kLanes, until - tile * kLanes), ahead);
        dim = until;
    };
    const std::size_t next_tile = dim / kLanes * kLanes + kLanes;
    if (dim % kLanes != 0) shared(next_tile < stop ? next_tile : stop);
    for (; dim + kTiles * kLanes <= stop; dim += kTiles * kLanes) {
        mix_codes<kValues, kRows, kTiles>(codes + dim / kLanes * kTileBytes, weights, place, block.mixed, dim, all,
                                          ahead);
    }
    for (; dim + kLanes <= stop; dim += kLanes) {
        mix_codes<kValues, kRows, 1>(codes + dim / kLanes * kTileBytes, weights, place, block.mixed, dim, all, ahead);
    }
    if (dim < stop) shared(stop);
}

// `pages` are those of the split, of which the block sees some from `first` to before `stop`.
template <Storage kValues, std::size_t kRows>
void mix_split_codes(const LayerPages& layer, const Block& block, const HeadPage* pages, std::size_t first,
                     std::size_t stop, Ahead& ahead) {
    const std::size_t dims = layer.value_group_dims, groups = layer.head_dim / dims;
    Floats floors[kMostGroups][kRows];
    for (std::size_t group = 0; group < groups; ++group) {
        for (std::size_t r = 0; r < kRows; ++r) floors[group][r] = all_floats(0.0f);
    }
    WeightCodes weights;
    GroupProducts<kValues, kRows> products;
    for (std::size_t page = first; page < stop; ++page) {
        ahead.read_values(page);
        for (std::size_t group = 0; group < groups; group += kGroupsAtOnce<kValues>) {
            const std::size_t left = groups - group;
            const std::size_t count = left < kGroupsAtOnce<kValues> ? left : kGroupsAtOnce<kValues>;
            multiply_groups<kValues, kRows>(layer, block, pages[page], page, group, count, floors, products);
            code_groups<kValues, kRows>(products, count, weights);
            for (std::size_t g = 0; g < count; ++g) {
                mix_group<kValues, kRows>(layer, pages[page].bytes + layer.value_codes, block, weights, g, group + g,
                                          ahead);
            }
        }
    }
    if constexpr (kValues == Storage::kInt4) {
        for (std::size_t r = 0; r < kRows; ++r) {
            for (std::size_t group = 0; group < groups; ++group) {
                const Floats floor = all_floats(sum_lanes(floors[group][r]));
                std::size_t dim = group * dims;
                for (; dim % kLanes != 0 && dim < (group + 1) * dims; ++dim) block.mixed[r][dim] += first_lane(floor);
                for (; dim + kLanes <= (group + 1) * dims; dim += kLanes) {
                    store(block.mixed[r] + dim, load_floats(block.mixed[r] + dim) + floor);
                }
                for (; dim < (group + 1) * dims; ++dim) block.mixed[r][dim] += first_lane(floor);
            }
        }
    }
}

template <Storage kValues, std::size_t kRows>
void mix_split_numbers(const LayerPages& layer, const Block& block, const HeadPage* pages, std::size_t first,
                       std::size_t stop, Ahead& ahead) {
    constexpr std::size_t kTiles = value_tiles_at_once<kValues, kRows>();
    constexpr std::size_t kTileBytes = value_lines(kValues) * kLineBytes;
    const std::size_t tiles = padded_dims(layer.head_dim) / kLanes;
    for (std::size_t page = first; page < stop; ++page) {
        ahead.read_values(page);
        const std::uint8_t* codes = pages[page].bytes + layer.value_codes;
        bool hides = false;
        for (std::size_t r = 0; r < kRows; ++r) hides = hides || !seen_slots(block, r, page).are_all();
        if (hides && !are_finite<kValues>(codes, tiles * value_lines(kValues))) {
            mix_hidden<kValues>(codes, block, page, tiles, ahead);
            continue;
        }
        const float* weights = block.scores + page * kPageSlots;
        std::size_t tile = 0;
        for (; tile + kTiles <= tiles; tile += kTiles) {
            mix_numbers<kValues, kRows, kTiles>(codes + tile * kTileBytes, weights, block.mixed, tile * kLanes, ahead);
        }
        for (; tile < tiles; ++tile) {
            mix_numbers<kValues, kRows, 1>(codes + tile * kTileBytes, weights, block.mixed, tile * kLanes, ahead);
        }
    }
}

template <Storage kValues, std::size_t kRows>
void mix_split_rows(const LayerPages& layer, const Block& block, const HeadPage* pages, std::size_t first,
                    std::size_t stop, Ahead& ahead) {
    if constexpr (is_quantised(kValues)) {
        mix_split_codes<kValues, kRows>(layer, block, pages, first, stop, ahead);
    } else {
        mix_split_numbers<kValues, kRows>(layer, block, pages, first, stop, ahead);
    }
}

using MixSplit = void (*)(const LayerPages& layer, const Block& block, const HeadPage* pages, std::size_t first,
                          std::size_t stop, Ahead& ahead);

template <Storage kValues>
struct MixSplits {
    static constexpr MixSplit kFor[kMostRows] = {
        mix_split_rows<kValues, 1>, mix_split_rows<kValues, 2>, mix_split_rows<kValues, 3>,
        mix_split_rows<kValues, 4>, mix_split_rows<kValues, 5>, mix_split_rows<kValues, 6>,
    };
};

}  // namespace
}  // namespace kvist::KVIST_ISA
