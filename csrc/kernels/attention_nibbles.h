// Products with codes of 4 bits, of keys and of values: a block of rows meets some lines of a few tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_ahead.h"
#include "page_layout.h"
#include "simd_codes.h"

namespace kvist::KVIST_ISA {
namespace {

// Lines whose products words hold: two units each of two products of codes up to 15 with 127, or up to 8 with 255.
constexpr std::size_t kWordLines = 4;

template <std::size_t kRows, std::size_t kTiles>
KVIST_ALWAYS_INLINE void set_zeros(Ints (&sums)[kRows][kTiles]) {
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = all_ints(0);
    }
}

// Lines from `first` to before `stop` of tiles that have `tile_lines` each.
template <bool kAreValues, std::size_t kRows, std::size_t kTiles>
KVIST_ALWAYS_INLINE void add_nibble_lines(const std::uint8_t* codes, std::size_t tile_lines, std::size_t first,
                                          std::size_t stop, const std::int32_t* const (&units)[kRows],
                                          Ints (&sums)[kRows][kTiles], Ahead& ahead) {
#pragma GCC unroll 1
    for (std::size_t line = first; line < stop; ++line) {
        Nibbles low[kTiles], high[kTiles];
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) {
            const Ints nibbles = load_ints(codes + (t * tile_lines + line) * kLineBytes);
            low[t] = kAreValues ? low_value_nibbles(nibbles) : low_nibbles(nibbles);
            high[t] = kAreValues ? high_value_nibbles(nibbles) : high_nibbles(nibbles);
        }
        ask_beside<kTiles>(ahead, line);
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
            const std::int32_t* of_row = units[r] + 2 * line * kNibbleUnitWords;
            const NibbleUnit of_low = load_nibble_unit(of_row);
            const NibbleUnit of_high = load_nibble_unit(of_row + kNibbleUnitWords);
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) {
                if constexpr (kAreValues) {
                    add_products_of_values(sums[r][t], low[t], of_low);
                    add_products_of_values(sums[r][t], high[t], of_high);
                } else {
                    add_products_of_keys(sums[r][t], low[t], of_low);
                    add_products_of_keys(sums[r][t], high[t], of_high);
                }
            }
        }
    }
}

// The same, whatever a sum of products is kept in meanwhile.
template <bool kAreValues, std::size_t kRows, std::size_t kTiles>
KVIST_ALWAYS_INLINE void add_nibbles(const std::uint8_t* codes, std::size_t tile_lines, std::size_t first,
                                     std::size_t stop, const std::int32_t* const (&units)[kRows],
                                     Ints (&sums)[kRows][kTiles], Ahead& ahead) {
    if constexpr (kHasWordSums) {
        for (std::size_t line = first; line < stop; line += kWordLines) {
            const std::size_t until = stop - line < kWordLines ? stop : line + kWordLines;
            Ints words[kRows][kTiles];
            set_zeros(words);
            add_nibble_lines<kAreValues>(codes, tile_lines, line, until, units, words, ahead);
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
                for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = sums[r][t] + sum_words_of_lanes(words[r][t]);
            }
        }
    } else {
        add_nibble_lines<kAreValues>(codes, tile_lines, first, stop, units, sums, ahead);
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
