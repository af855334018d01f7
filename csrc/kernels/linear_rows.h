// The input of a product with quantised weights: rows as codes, steps and sums, for each group of 32 columns.
//
// Rows that are multiplied together are a block, and lie so that a walk over the groups reads one run of bytes:
//
//   block     | group 0 | group 1 | ...
//   group     | units of row 0 | units of row 1 | ... | terms of row 0 | terms of row 1 | ...
//
// Blocks are as nearly of one size as can be, and follow one another. A row that is quantised twice is two of a block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"
#include "simd.h"
#include "simd_codes.h"
#include "simd_lanes.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

// Smaller steps stand for zeros: their inverse must stay finite.
constexpr float kLeastRowStep = 0x1p-100f;
// The bits of 1.5 * 2^23: whole numbers added to them are added to the float, and a sum that begins there needs no
// conversion. Only where one rounding then takes the start off again.
constexpr std::int32_t kSumStart = kFmaRoundsOnce ? 0x4b400000 : 0;
constexpr float kSumStartValue = 0x1.8p23f;

// What a row's group of columns gives besides its codes.
struct GroupTerms {
    std::int32_t start;  // of a sum of products with the codes of a weight: what takes off the code that stands for 0
    float step;
    float sum;  // of the codes
};

// Whether products with codes of so many bits are summed in words, where the units are plain bytes.
constexpr bool sums_in_words(std::size_t code_bits) { return kHasWordSums && code_bits == 4; }

constexpr std::size_t group_words(bool in_words) { return kGroupUnits * (in_words ? 1 : kUnitWords); }
constexpr std::size_t group_row_bytes(bool in_words) {
    return group_words(in_words) * sizeof(std::int32_t) + sizeof(GroupTerms);
}

// What one of `parts` threads does of so much.
struct Range {
    std::size_t begin, end;
};

inline Range share(std::size_t count, int part, int parts) {
    const auto p = static_cast<std::size_t>(part), n = static_cast<std::size_t>(parts);
    return {count * p / n, count * (p + 1) / n};
}

struct RowBlock {
    std::size_t first, count;
};

inline RowBlock row_block(std::size_t num_rows, std::size_t num_blocks, std::size_t block) {
    const std::size_t first = num_rows * block / num_blocks;
    return {first, num_rows * (block + 1) / num_blocks - first};
}

// A group of columns of one row, from fp32, which becomes what the codes leave of it. `zero` is the weights' code that
// stands for 0.
inline void quantise_group(Floats& low, Floats& high, std::int32_t zero, bool in_words, std::int32_t* units,
                           GroupTerms* to) {
    const Ints size = all_ints(0x7fffffff);
    const std::uint32_t most = max_lane_unsigned(max_unsigned(bits_of(low) & size, bits_of(high) & size));
    float step = __builtin_bit_cast(float, most) / 127;
    float inverse = 0;
    if (most >= 0x7f800000u) {
        step = __builtin_nanf("");
        low = high = all_floats(0);
    } else if (step < kLeastRowStep) {
        step = 0;
    } else {
        inverse = 1 / step;
    }
    // At most 127: the product is off by a few units in the last place.
    const Ints low_codes = rounded(low * all_floats(inverse)), high_codes = rounded(high * all_floats(inverse));
    std::int32_t codes[kGroupColumns];
    store(codes, low_codes);
    store(codes + kLineLanes, high_codes);
    if (in_words) {
        store_signed_bytes(units, codes);
        store_signed_bytes(units + kGroupUnits / 2, codes + kLineLanes);
    } else {
        store_signed_units(units, codes);
        store_signed_units(units + kGroupUnits / 2 * kUnitWords, codes + kLineLanes);
    }
    const std::int32_t sum = sum_lanes(low_codes + high_codes);
    const GroupTerms terms{kSumStart - zero * sum, step, static_cast<float>(sum)};
    __builtin_memcpy(to, &terms, sizeof terms);
    low = low - to_floats(low_codes) * all_floats(step);
    high = high - to_floats(high_codes) * all_floats(step);
}

// Row `row` of the input as row `place` of the `count` of a block; places and counts are of rows of the input.
inline void quantise_row(const LinearTask& task, std::size_t row, std::size_t place, std::size_t count,
                         std::uint8_t* block) {
    const WeightFormat& format = format_of(task.weight->format);
    const bool in_words = sums_in_words(format.bits);
    const std::size_t words = group_words(in_words), at = row * task.x.stride, of_row = codings(*task.weight);
    count *= of_row;
    place *= of_row;
    for (std::size_t group = 0; group < task.weight->num_groups; ++group, block += count * group_row_bytes(in_words)) {
        auto* units = reinterpret_cast<std::int32_t*>(block) + place * words;
        auto* terms = reinterpret_cast<GroupTerms*>(block + count * words * sizeof(std::int32_t)) + place;
        const std::size_t from = at + group * kGroupColumns;
        Floats low, high;
        if (task.x.is_bf16) {
            const auto* x = static_cast<const std::uint16_t*>(task.x.data) + from;
            low = load_bf16(x);
            high = load_bf16(x + kLineLanes);
        } else {
            const auto* x = static_cast<const float*>(task.x.data) + from;
            low = load_floats(x);
            high = load_floats(x + kLineLanes);
        }
        for (std::size_t i = 0; i < of_row; ++i) {
            quantise_group(low, high, format.zero, in_words, units + i * words, terms + i);
        }
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
