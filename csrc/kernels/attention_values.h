// Mixed values: the weights of a block of rows meet the values of one page.
//
// A tile of values is 16 dims, one to a lane; the weights of a row, one unit of slots after the other, stand for all
// lanes. Quantised values take whole numbers as weights: of a page and group of dims, the largest product of weight and
// step becomes 255. What a row does not see has a weight of zero and a step that is not looked at. Plain values are
// multiplied as they are, and there zero times what is no number would be none: see `mix_hidden`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_keys.h"

namespace kvist::KVIST_ISA {
namespace {

constexpr float kMiddleCode = 7.5f;

// The weights of a block for one page and group of dims.
struct Weights {
    // What a row's units begin at, and for quantised values what a unit stands for and what the floors add.
    alignas(64) std::int32_t units[kMostRows][kPageSlots * 2];
    float step[kMostRows];
    float floor[kMostRows];
    // Of int8 values, the low bytes of the codes, and whether any row has some.
    alignas(64) std::int32_t low[kMostRows][kPageSlots / 4 * kUnitWords];
    bool has_low;
};

// Where one slot has as large a share of a row's weights in a split, its codes have two bytes: what is lost by rounding
// them to one is of the order of the largest, and only many of the kind make it small beside the whole.
constexpr float kLargeShare = 1.0f / 16;

inline bool sees_all(const Block& block, std::size_t r, std::size_t page) {
    return block.first[r] <= page * kPageSlots && block.stop[r] >= (page + 1) * kPageSlots;
}

inline LaneMask seen_lanes(const Block& block, std::size_t r, std::size_t start) {
    const std::size_t first = block.first[r] > start ? block.first[r] - start : 0;
    const std::size_t stop = block.stop[r] > start ? block.stop[r] - start : 0;
    return lanes_between(first < kLanes ? first : kLanes, stop < kLanes ? stop : kLanes);
}

// Whether one of a page's weights is greater.
inline bool has_greater(const float* weights, float than) {
    Floats most = load_floats(weights);
    for (std::size_t i = kLanes; i < kPageSlots; i += kLanes) most = max(load_floats(weights + i), most);
    return is_less_anywhere(all_floats(than), most);
}

// Row r's weights, times the steps of one group, as codes.
template <Storage kValues, bool kSeesAll>
inline void code_weights(const Block& block, std::size_t r, std::size_t page, const std::uint8_t* scales, Weights& to) {
    const float* weights = block.scores + r * kSplitSlots + page * kPageSlots;
    Floats products[kPageTiles];
    Ints most = all_ints(0);
    Floats floors = all_floats(0.0f);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPageTiles; ++i) {
        const Floats weight = load_floats(weights + i * kLanes);
        const Ints scalars = load_ints(scales + i * kLineBytes);
        Floats step = kValues == Storage::kInt8 ? floats_of_bits(scalars) : low_bf16(scalars);
        Floats floor = high_bf16(scalars);
        if constexpr (!kSeesAll) {
            const LaneMask seen = seen_lanes(block, r, page * kPageSlots + i * kLanes);
            step = select(seen, step, all_floats(0.0f));
            if constexpr (kValues == Storage::kInt4) floor = select(seen, floor, all_floats(0.0f));
        }
        products[i] = weight * step;
        // Of numbers that are not negative the greater has the greater bits, and what is no number the greatest.
        most = max_unsigned(most, bits_of(products[i]));
        if constexpr (kValues == Storage::kInt4) {
            floors = fma(weight, floor, floors);
            floors = fma(products[i], all_floats(kMiddleCode), floors);
        }
    }
    const float largest = __builtin_bit_cast(float, max_lane_unsigned(most));
    if (largest < kLeastUnit) {
        to.step[r] = 0;
        to.floor[r] = sum_lanes(floors);
        for (std::int32_t& unit : to.units[r]) unit = 0;
        for (std::int32_t& unit : to.low[r]) unit = 0;
        return;
    }
    if constexpr (kValues == Storage::kInt8) {
        to.step[r] = largest * (1.0f / (255 * 256));
        const float share = kLargeShare * block.gathered[r]->total;
        if (has_greater(weights, share)) {
            const Floats inverse = all_floats(255 * 256 / largest);
            Ints high[kPageTiles], low[kPageTiles];
#pragma GCC unroll 4
            for (std::size_t i = 0; i < kPageTiles; ++i) {
                const Ints code = rounded(products[i] * inverse);
                high[i] = shift_right<8>(code);
                low[i] = code & all_ints(255);
            }
            store_unsigned_units(to.units[r], high);
            store_unsigned_units(to.low[r], low);
            to.has_low = true;
            return;
        }
        for (std::int32_t& unit : to.low[r]) unit = 0;
    } else {
        to.step[r] = largest * (1.0f / 255);
    }
    const Floats inverse = all_floats(255 / largest);
    Ints codes[kPageTiles];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kPageTiles; ++i) codes[i] = rounded(products[i] * inverse);
    if constexpr (kValues == Storage::kInt4) {
        // As if the codes of the values were counted from the middle: what weights lose by rounding then counts less.
        const Ints sum = (codes[0] + codes[1]) + (codes[2] + codes[3]);
        to.floor[r] = sum_lanes(fma(to_floats(sum), all_floats(-kMiddleCode * to.step[r]), floors));
    }
    store_unsigned_units(to.units[r], codes);
}

// kRows rows with kTiles tiles, whose lines begin at `codes` and whose dims begin at `dim`.
template <Storage kValues, std::size_t kRows, std::size_t kTiles>
inline void mix_tiles(const std::uint8_t* codes, const Weights& weights, float* const* mixed, std::size_t dim,
                      LaneMask lanes, const std::uint8_t* coming) {
    constexpr StorageFormat kFormat = kStorageFormats[static_cast<std::size_t>(kValues)];
    constexpr std::size_t kLines = kPageSlots / kFormat.codes_per_lane();
    if constexpr (is_quantised(kValues)) {
        Ints sums[kRows][kTiles];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = all_ints(0);
        }
#pragma GCC unroll 1
        for (std::size_t line = 0; line < kLines; ++line) {
            Codes low[kTiles], high[kTiles];
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) {
                const std::uint8_t* from = codes + (t * kLines + line) * kLineBytes;
                if constexpr (kValues == Storage::kInt8) {
                    low[t] = signed_codes(from);
                } else {
                    const Ints nibbles = load_ints(from);
                    low[t] = low_nibbles(nibbles);
                    high[t] = high_nibbles(nibbles);
                }
                if (coming != nullptr) prefetch(coming + (line * kTiles + t) * kLineBytes);
            }
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) {
                if constexpr (kValues == Storage::kInt8) {
                    const Unit unit = load_unit(weights.units[r] + line * kUnitWords);
#pragma GCC unroll 4
                    for (std::size_t t = 0; t < kTiles; ++t) add_products_of_signed(sums[r][t], low[t], unit);
                } else {
                    const Unit first = load_unit(weights.units[r] + 2 * line * kUnitWords);
                    const Unit second = load_unit(weights.units[r] + (2 * line + 1) * kUnitWords);
#pragma GCC unroll 4
                    for (std::size_t t = 0; t < kTiles; ++t) {
                        add_products_of_signed(sums[r][t], low[t], first);
                        add_products_of_signed(sums[r][t], high[t], second);
                    }
                }
            }
        }
        if constexpr (kValues == Storage::kInt8) {
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
                for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = shift_left<8>(sums[r][t]);
            }
            if (weights.has_low) {
#pragma GCC unroll 1
                for (std::size_t line = 0; line < kLines; ++line) {
                    Codes values[kTiles];
#pragma GCC unroll 4
                    for (std::size_t t = 0; t < kTiles; ++t) {
                        values[t] = signed_codes(codes + (t * kLines + line) * kLineBytes);
                    }
#pragma GCC unroll 8
                    for (std::size_t r = 0; r < kRows; ++r) {
                        const Unit unit = load_unit(weights.low[r] + line * kUnitWords);
#pragma GCC unroll 4
                        for (std::size_t t = 0; t < kTiles; ++t) add_products_of_signed(sums[r][t], values[t], unit);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) {
                float* to = mixed[r] + dim + t * kLanes;
                const Floats before = load_floats(to);
                Floats after = fma(to_floats(sums[r][t]), all_floats(weights.step[r]), before);
                if constexpr (kValues == Storage::kInt4) after = after + all_floats(weights.floor[r]);
                if constexpr (kTiles == 1) after = select(lanes, after, before);
                store(to, after);
            }
        }
    } else {
        Floats sums[kRows][kTiles];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = load_floats(mixed[r] + dim + t * kLanes);
        }
#pragma GCC unroll 1
        for (std::size_t line = 0; line < kLines; ++line) {
            if (coming != nullptr) {
#pragma GCC unroll 4
                for (std::size_t t = 0; t < kTiles; ++t) prefetch(coming + (line * kTiles + t) * kLineBytes);
            }
            if constexpr (kValues == Storage::kBf16) {
                Pairs values[kTiles];
#pragma GCC unroll 4
                for (std::size_t t = 0; t < kTiles; ++t)
                    values[t] = load_pairs(codes + (t * kLines + line) * kLineBytes);
#pragma GCC unroll 8
                for (std::size_t r = 0; r < kRows; ++r) {
                    const PairUnit unit = load_pair_unit(weights.units[r] + line * kPairUnitWords);
#pragma GCC unroll 4
                    for (std::size_t t = 0; t < kTiles; ++t) add_products(sums[r][t], values[t], unit);
                }
            } else {
                Floats values[kTiles];
#pragma GCC unroll 4
                for (std::size_t t = 0; t < kTiles; ++t) {
                    values[t] = load_floats(reinterpret_cast<const float*>(codes + (t * kLines + line) * kLineBytes));
                }
#pragma GCC unroll 8
                for (std::size_t r = 0; r < kRows; ++r) {
                    const Floats unit = all_floats(__builtin_bit_cast(float, weights.units[r][line]));
#pragma GCC unroll 4
                    for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = fma(values[t], unit, sums[r][t]);
                }
            }
        }
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) store(mixed[r] + dim + t * kLanes, sums[r][t]);
        }
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

// As `mix_tiles` does, for one row and tile of plain values of which some that it does not see are not finite: they are
// taken as zeros, which is what they come to where they are finite.
template <Storage kValues>
inline void mix_hidden(const std::uint8_t* codes, const Block& block, std::size_t r, std::size_t page,
                       const Weights& weights, std::size_t dim) {
    constexpr StorageFormat kFormat = kStorageFormats[static_cast<std::size_t>(kValues)];
    constexpr std::size_t kCodes = kFormat.codes_per_lane(), kLines = kPageSlots / kCodes;
    alignas(64) std::int32_t seen[kLines * kLanes];
#pragma GCC unroll 1
    for (std::size_t line = 0; line < kLines; ++line) {
        std::uint32_t mask = 0;
        for (std::size_t i = 0; i < kCodes; ++i) {
            const std::size_t slot = page * kPageSlots + line * kCodes + i;
            if (slot >= block.first[r] && slot < block.stop[r])
                mask |= (kCodes == 1 ? 0xffffffffu : 0xffffu) << (16 * i);
        }
        store(seen + line * kLanes, load_ints(codes + line * kLineBytes) & all_ints(static_cast<std::int32_t>(mask)));
    }
    // One row's weights, where `mix_tiles` looks for the first row's.
    Weights own;
    __builtin_memcpy(own.units[0], weights.units[r], sizeof own.units[0]);
    mix_tiles<kValues, 1, 1>(reinterpret_cast<const std::uint8_t*>(seen), own, block.mixed + r, dim,
                             lanes_between(0, kLanes), nullptr);
}

template <Storage kValues, std::size_t kRows>
constexpr std::size_t value_tiles_at_once() {
    if constexpr (kLineRegisters > 1) return 1;
    return kValues == Storage::kInt4 ? 2 : 4;
}

// The tiles from `first` to before `stop`, all of whose dims are in one group.
template <Storage kValues, std::size_t kRows>
inline void mix_group(const std::uint8_t* codes, const Weights& weights, const Block& block, std::size_t first,
                      std::size_t stop, const std::uint8_t* coming) {
    constexpr std::size_t kTiles = value_tiles_at_once<kValues, kRows>();
    constexpr std::size_t kTileBytes =
        kPageSlots / kStorageFormats[static_cast<std::size_t>(kValues)].codes_per_lane() * kLineBytes;
    const LaneMask all = lanes_between(0, kLanes);
    std::size_t tile = first;
    const auto next = [&] { return coming == nullptr ? nullptr : coming + tile * kTileBytes; };
    for (; tile + kTiles <= stop; tile += kTiles) {
        mix_tiles<kValues, kRows, kTiles>(codes + tile * kTileBytes, weights, block.mixed, tile * kLanes, all, next());
    }
    for (; tile < stop; ++tile) {
        mix_tiles<kValues, kRows, 1>(codes + tile * kTileBytes, weights, block.mixed, tile * kLanes, all, next());
    }
}

template <Storage kValues, std::size_t kRows>
void mix_page_rows(const AttentionTask& task, const Block& block, const HeadPage& page, std::size_t number) {
    constexpr std::size_t kTileBytes =
        kPageSlots / kStorageFormats[static_cast<std::size_t>(kValues)].codes_per_lane() * kLineBytes;
    const LayerPages& layer = *task.layer;
    const std::uint8_t* codes = page.bytes + layer.value_codes;
    const std::size_t tiles = padded_dims(layer.head_dim) / kLanes;
    Weights weights;
    if constexpr (is_quantised(kValues)) {
        const std::size_t dims = layer.value_group_dims;
        for (std::size_t group = 0; group * dims < layer.head_dim; ++group) {
            const std::uint8_t* scales = page.bytes + layer.value_scales + group * kPageTiles * kLineBytes;
            weights.has_low = false;
            for (std::size_t r = 0; r < kRows; ++r) {
                if (sees_all(block, r, number)) {
                    code_weights<kValues, true>(block, r, number, scales, weights);
                } else {
                    code_weights<kValues, false>(block, r, number, scales, weights);
                }
            }
            // Whole tiles of the group; tiles that it shares with its neighbours count in its own lanes alone.
            std::size_t dim = group * dims;
            const std::size_t stop = dim + dims == layer.head_dim ? tiles * kLanes : dim + dims;
            const auto shared = [&](std::size_t until) {
                const std::size_t tile = dim / kLanes;
                mix_tiles<kValues, kRows, 1>(codes + tile * kTileBytes, weights, block.mixed, tile * kLanes,
                                             lanes_between(dim % kLanes, until - tile * kLanes), nullptr);
                dim = until;
            };
            if (dim % kLanes != 0)
                shared(dim / kLanes * kLanes + kLanes < stop ? dim / kLanes * kLanes + kLanes : stop);
            if (dim < stop / kLanes * kLanes) {
                mix_group<kValues, kRows>(codes, weights, block, dim / kLanes, stop / kLanes, page.coming);
                dim = stop / kLanes * kLanes;
            }
            if (dim < stop) shared(stop);
        }
    } else {
        bool hides = false;
        for (std::size_t r = 0; r < kRows; ++r) {
            const float* from = block.scores + r * kSplitSlots + number * kPageSlots;
            hides = hides || !sees_all(block, r, number);
            if constexpr (kValues == Storage::kFp32) {
                __builtin_memcpy(weights.units[r], from, kPageSlots * sizeof(float));
            } else {
                for (std::size_t i = 0; i < kPageSlots; i += kLanes) {
                    store_pair_units(weights.units[r] + i / 2 * kPairUnitWords, load_floats(from + i));
                }
            }
        }
        if (hides && !are_finite<kValues>(codes, tiles * kTileBytes / kLineBytes)) {
            for (std::size_t r = 0; r < kRows; ++r) {
                for (std::size_t tile = 0; tile < tiles; ++tile) {
                    mix_hidden<kValues>(codes + tile * kTileBytes, block, r, number, weights, tile * kLanes);
                }
            }
            return;
        }
        mix_group<kValues, kRows>(codes, weights, block, 0, tiles, page.coming);
    }
}

using MixPage = void (*)(const AttentionTask& task, const Block& block, const HeadPage& page, std::size_t number);

template <Storage kValues>
struct MixPages {
    static constexpr MixPage kFor[kMostRows] = {
        mix_page_rows<kValues, 1>, mix_page_rows<kValues, 2>, mix_page_rows<kValues, 3>,
        mix_page_rows<kValues, 4>, mix_page_rows<kValues, 5>, mix_page_rows<kValues, 6>,
    };
};

}  // namespace
}  // namespace kvist::KVIST_ISA
