// The inner loop of products with quantised weights: a block of rows meets a few tiles.
//
// For each group of columns sums of products of codes stay in registers; they are then multiplied by both steps and added
// to a total in fp32. Per output there is one total and groups come in ascending order, each product and sum rounded by
// itself: the bits are those of src/kvist/kernels/linear.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/linear_rows.h"
#include "kernels/linear_weights.h"
#include "simd.h"
#include "simd_codes.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

// A sum times the step of the weights, rounded once. With fma the sum is read as the float whose last bits it is; the
// product of its start with a step of 11 bits is exact, so that taking it off is no rounding either.
inline Floats scaled_sum(Ints sum, const TileScalars& scalars) {
    if constexpr (kFmaRoundsOnce) return fma(floats_of_bits(sum), scalars.step, scalars.start);
    return to_floats(sum) * scalars.step;
}

// Adds the products of kRows rows with one group of columns of kTiles tiles to `totals`, [kRows, kTiles, 16].
template <std::size_t kRows, typename Tiles>
inline void add_group(const typename Tiles::Group& group, const std::uint8_t* rows, float* totals) {
    constexpr std::size_t kTiles = Tiles::kTiles, kWords = group_words(Tiles::kInWords);
    constexpr std::size_t kUnitStep = kWords / kGroupUnits;
    const auto* units = reinterpret_cast<const std::int32_t*>(rows);
    const auto* terms = reinterpret_cast<const GroupTerms*>(units + kRows * kWords);
    Ints sums[kRows][kTiles];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = all_ints(Tiles::kInWords ? 0 : terms[r].start);
    }
#pragma GCC unroll 8
    for (std::size_t unit = 0; unit < kGroupUnits; ++unit) {
        if constexpr (Tiles::kInWords) {
            Ints codes[kTiles];
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) codes[t] = group.codes(unit, t);
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
                for (std::size_t t = 0; t < kTiles; ++t) {
                    add_products_in_words(sums[r][t], codes[t], units[r * kWords + unit]);
                    keep_order(sums[r][t]);
                }
            }
        } else {
            Codes codes[kTiles];
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) codes[t] = unsigned_codes(group.codes(unit, t));
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) {
                const Unit of_row = load_unit(units + r * kWords + unit * kUnitStep);
#pragma GCC unroll 4
                for (std::size_t t = 0; t < kTiles; ++t) {
                    add_products_of_unsigned(sums[r][t], codes[t], of_row);
                    keep_order(sums[r][t]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (std::size_t t = 0; t < kTiles; ++t) {
        const TileScalars scalars = group.scalars(t);
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
            Ints sum = sums[r][t];
            if constexpr (Tiles::kInWords) sum = sum_words_of_lanes(sum) + all_ints(terms[r].start);
            Floats term = scaled_sum(sum, scalars);
            // Exact: 11 bits times 12.
            if constexpr (Tiles::kHasMinimum) term = fma(scalars.minimum, all_floats(terms[r].sum), term);
            float* total = totals + (r * kTiles + t) * kTileRows;
            store(total, load_floats(total) + term * all_floats(terms[r].step));
        }
    }
}

// Rows `first_row` of the input on, from their block, times the tiles from `first_tile` on, of which `num_tiles` are in
// the matrix. The totals of a row that is quantised twice are added.
template <std::size_t kRows, typename Tiles>
inline void multiply_block(const LinearTask& task, const Tiles& tiles, std::size_t first_tile, std::size_t num_tiles,
                           const std::uint8_t* rows, std::size_t first_row) {
    constexpr std::size_t kTiles = Tiles::kTiles;
    alignas(64) float totals[kRows * kTiles * kTileRows];
    for (std::size_t i = 0; i < kRows * kTiles; ++i) store(totals + i * kTileRows, all_floats(0));
    const std::size_t num_groups = task.weight->num_groups;
    for (std::size_t group = 0; group < num_groups; ++group, rows += kRows * group_row_bytes(Tiles::kInWords)) {
        // Where the registers are for the sums, the compiler must not keep totals there too, and spill both.
        if constexpr (kRows * kTiles > 8) __asm__ volatile("" : : "r"(totals) : "memory");
        add_group<kRows, Tiles>(tiles.group(group), rows, totals);
    }

    const std::size_t of_row = codings(*task.weight);
    for (std::size_t r = 0; r < kRows; r += of_row) {
        for (std::size_t t = 0; t < num_tiles; ++t) {
            const std::size_t column = (first_tile + t) * kTileRows;
            const std::size_t left = task.weight->num_rows - column;
            const std::size_t at = (first_row + r / of_row) * task.out.stride + column;
            Floats total = load_floats(totals + (r * kTiles + t) * kTileRows);
            if constexpr (kRows % 2 == 0) {
                if (of_row == 2) total = total + load_floats(totals + ((r + 1) * kTiles + t) * kTileRows);
            }
            if (task.out.is_bf16) {
                std::uint16_t* out = static_cast<std::uint16_t*>(task.out.data) + at;
                if (left >= kTileRows) {
                    store_bf16(out, total);
                    continue;
                }
                std::uint16_t last[kTileRows];
                store_bf16(last, total);
                for (std::size_t i = 0; i < left; ++i) out[i] = last[i];
            } else {
                float* out = static_cast<float*>(task.out.data) + at;
                if (left >= kTileRows) {
                    store(out, total);
                    continue;
                }
                float last[kTileRows];
                store(last, total);
                for (std::size_t i = 0; i < left; ++i) out[i] = last[i];
            }
        }
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
