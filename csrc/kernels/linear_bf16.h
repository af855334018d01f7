// Products with weights of bf16, which are read where and as they lie: rows of the matrix one after another.
//
// Lanes go along the columns. A line of weights is 32 columns; shifting and masking make of it two lines of fp32, its even
// columns and its odd ones. Rows of the input are stored in fp32 in that order, once for all outputs:
//
//   row       | columns 0 2 ... 30 | columns 1 3 ... 31 | columns 32 34 ... 62 | ...
//
// An output of a row has one sum in 16 lanes, to which lines are added in this order, each product and sum rounded at
// once where the instruction set can; its lanes are added at the end, always in the same tree. So its bits depend on the
// row and the weights alone, whichever of the blocks below it is in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/linear_rows.h"
#include "linear.h"
#include "simd.h"
#include "simd_lanes.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

static_assert(kGroupColumns == 2 * kLineLanes);

constexpr std::size_t kWeightLineBytes = kGroupColumns * sizeof(std::uint16_t);

// Rows and outputs whose sums are in registers together; outputs enough for the latency of `fma`.
constexpr std::size_t kMostBf16Rows = kLineRegisters == 1 ? 6 : 3;
constexpr std::size_t block_outputs(std::size_t rows) {
    if (kLineRegisters == 1) return rows <= 3 ? 8 : 4;
    return rows == 1 ? 4 : 2;
}
// What blocks of rows meet, one after another: weights that stay in the second cache. Few rows read them once or twice.
constexpr std::size_t kFewestOutputs = 8;
constexpr std::size_t kPanelWeightBytes = std::size_t{128} << 10;

constexpr std::size_t bf16_row_bytes(const WeightMatrix& weight) {
    return weight.num_groups * kGroupColumns * sizeof(float);
}

constexpr std::size_t weight_row_bytes(const WeightMatrix& weight) { return weight.num_groups * kWeightLineBytes; }

inline void widen_row(const LinearTask& task, std::size_t row) {
    const std::size_t at = row * task.x.stride;
    auto* to = reinterpret_cast<float*>(task.rows + row * bf16_row_bytes(*task.weight));
    for (std::size_t group = 0; group < task.weight->num_groups; ++group, to += kGroupColumns) {
        const std::size_t from = at + group * kGroupColumns;
        Floats even, odd;
        if (task.x.is_bf16) {
            const Ints pairs = load_ints(static_cast<const std::uint16_t*>(task.x.data) + from);
            even = low_bf16(pairs);
            odd = high_bf16(pairs);
        } else {
            load_alternate(static_cast<const float*>(task.x.data) + from, even, odd);
        }
        store(to, even);
        store(to + kLineLanes, odd);
    }
}

template <std::size_t kOutputs>
inline void store_totals(float* to, const Floats (&sums)[kOutputs]) {
    if constexpr (kOutputs % 4 == 0) {
        for (std::size_t o = 0; o < kOutputs; o += 4) {
            store_sums_of_lanes(to + o, sums[o], sums[o + 1], sums[o + 2], sums[o + 3]);
        }
    } else {
        for (std::size_t o = 0; o < kOutputs; ++o) to[o] = sum_lanes(sums[o]);
    }
}

template <std::size_t kOutputs>
inline void store_outputs(const LinearTask& task, std::size_t row, std::size_t first, const Floats (&sums)[kOutputs]) {
    const std::size_t left = task.weight->num_rows - first, count = left < kOutputs ? left : kOutputs;
    const std::size_t at = row * task.out.stride + first;
    if (count == kOutputs && !task.out.is_bf16) return store_totals(static_cast<float*>(task.out.data) + at, sums);
    float totals[kLineLanes] = {};
    store_totals(totals, sums);
    if (task.out.is_bf16) {
        std::uint16_t rounded_totals[kLineLanes];
        store_bf16(rounded_totals, load_floats(totals));
        for (std::size_t o = 0; o < count; ++o) static_cast<std::uint16_t*>(task.out.data)[at + o] = rounded_totals[o];
    } else {
        for (std::size_t o = 0; o < count; ++o) static_cast<float*>(task.out.data)[at + o] = totals[o];
    }
}

// Rows from `first_row` on times the outputs from `first` to before `stop`. `is_first` where these weights come from
// memory.
template <std::size_t kRows>
inline void multiply_bf16_block(const LinearTask& task, std::size_t first_row, std::size_t first, std::size_t stop,
                                bool is_first) {
    constexpr std::size_t kOutputs = block_outputs(kRows);
    const WeightMatrix& weight = *task.weight;
    const std::size_t num_lines = weight.num_groups, weight_bytes = weight_row_bytes(weight);
    const std::size_t row_floats = num_lines * kGroupColumns;
    const auto* rows = reinterpret_cast<const float*>(task.rows) + first_row * row_floats;
    for (; first < stop; first += kOutputs) {
        const std::uint8_t* of_output[kOutputs];
        for (std::size_t o = 0; o < kOutputs; ++o) {
            const std::size_t output = first + o < weight.num_rows ? first + o : weight.num_rows - 1;
            of_output[o] = weight.data + output * weight_bytes;
        }
        Floats sums[kRows][kOutputs];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (std::size_t o = 0; o < kOutputs; ++o) sums[r][o] = all_floats(0);
        }
        const std::uint8_t* ahead = of_output[0];
        for (std::size_t line = 0; line < num_lines; ++line) {
            if (is_first) {
                // In the order in which they lie, though lines of several outputs are read in turn.
                constexpr std::size_t kNear = 4096, kFar = 16384;
#pragma GCC unroll 8
                for (std::size_t o = 0; o < kOutputs; ++o, ahead += kWeightLineBytes) {
                    prefetch(ahead + kNear);
                    prefetch_far(ahead + kFar);
                }
            }
            const float* x = rows + line * kGroupColumns;
#pragma GCC unroll 2
            for (std::size_t half = 0; half < 2; ++half) {
                Floats weights[kOutputs];
#pragma GCC unroll 8
                for (std::size_t o = 0; o < kOutputs; ++o) {
                    const Ints pairs = load_ints(of_output[o] + line * kWeightLineBytes);
                    weights[o] = half == 0 ? low_bf16(pairs) : high_bf16(pairs);
                }
#pragma GCC unroll 8
                for (std::size_t r = 0; r < kRows; ++r) {
                    const Floats numbers = load_floats(x + r * row_floats + half * kLineLanes);
#pragma GCC unroll 8
                    for (std::size_t o = 0; o < kOutputs; ++o) sums[r][o] = fma(weights[o], numbers, sums[r][o]);
                }
                // Pairs are loaded again: the registers are for the sums.
                if constexpr (kRows * kOutputs > 8) __asm__ volatile("" : : : "memory");
            }
        }
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) store_outputs(task, first_row + r, first, sums[r]);
    }
}

// The block's count of rows as a constant.
template <std::size_t kRows>
inline void multiply_any_bf16_block(const LinearTask& task, const RowBlock& block, std::size_t first, std::size_t stop,
                                    bool is_first) {
    if (block.count == kRows) {
        multiply_bf16_block<kRows>(task, block.first, first, stop, is_first);
    } else if constexpr (kRows > 1) {
        multiply_any_bf16_block<kRows - 1>(task, block, first, stop, is_first);
    }
}

inline void widen_rows(const LinearTask& task, int part, int parts) {
    const Range own = share(task.num_rows, part, parts);
    for (std::size_t row = own.begin; row < own.end; ++row) widen_row(task, row);
}

inline void multiply_bf16(const LinearTask& task, int part, int parts) {
    const WeightMatrix& weight = *task.weight;
    const std::size_t blocks = (task.num_rows + kMostBf16Rows - 1) / kMostBf16Rows;
    std::size_t panel = kFewestOutputs;
    if (blocks > 2) {
        const std::size_t fitting = kPanelWeightBytes / weight_row_bytes(weight) / kFewestOutputs * kFewestOutputs;
        panel = fitting > panel ? fitting : panel;
    }
    const std::size_t num_panels = (weight.num_rows + panel - 1) / panel;
    const Range items = share(num_panels * blocks, part, parts);
    for (std::size_t item = items.begin; item < items.end; ++item) {
        const std::size_t first = item / blocks * panel, end = first + panel;
        const std::size_t stop = end < weight.num_rows ? end : weight.num_rows;
        const bool is_first = item == items.begin || item % blocks == 0;
        multiply_any_bf16_block<kMostBf16Rows>(task, row_block(task.num_rows, blocks, item % blocks), first, stop,
                                               is_first);
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
