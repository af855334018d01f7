// Scores: a block of rows meets the keys of one page.
//
// A tile of keys is 16 slots, one to a lane; the dims of a query, one unit after the other, stand for all lanes. The
// sums of a few rows and tiles stay in registers while dims go by.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_ahead.h"
#include "kernels/attention_nibbles.h"
#include "kernels/attention_rows.h"
#include "simd_codes.h"
#include "simd_lanes.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

// Rows whose sums with four tiles fit into the registers.
constexpr std::size_t kMostRows = 6;
constexpr std::size_t kPageTiles = kPageSlots / kLanes;

// A block of rows in one split.
struct Block {
    std::size_t num_rows;
    const Row* rows[kMostRows];
    // Slots of the split that each sees, and that any sees.
    std::size_t first[kMostRows], stop[kMostRows];
    std::size_t first_of_any, stop_of_any;

    float* scores;  // [rows, kSplitSlots], then weights
    float* mixed[kMostRows];
    Gathered* gathered[kMostRows];
};

// A page as one KV head of one layer sees it.
struct HeadPage {
    const std::uint8_t* bytes;  // of the head
    const float* turn;          // of the page's number: cosines, then sines; null where keys have no offset
};

// What scores are multiplied by, and where the products of offsets with queries are multiplied too.
struct ScoreTerms {
    float factor[kMostRows];
    float shift[kMostRows];
};

inline ScoreTerms score_terms(const AttentionTask& task, const Block& block, const HeadPage& page) {
    const std::size_t head_dim = task.layer->head_dim;
    // Scores are kept in powers of two; those to be capped only afterwards.
    const float scale = task.softcap == 0 ? task.scale * kLog2E : task.scale;
    ScoreTerms terms;
    for (std::size_t r = 0; r < block.num_rows; ++r) {
        terms.factor[r] = block.rows[r]->step * scale;
        terms.shift[r] = 0;
        if (page.turn == nullptr) continue;
        const float* turned = block.rows[r]->turned(head_dim);
        Floats sums = all_floats(0.0f);
        std::size_t i = 0;
        for (; i + kLanes <= head_dim; i += kLanes)
            sums = fma(load_floats(turned + i), load_floats(page.turn + i), sums);
        float sum = sum_lanes(sums);
        for (; i < head_dim; ++i) sum += turned[i] * page.turn[i];
        terms.shift[r] = sum * scale;
    }
    return terms;
}

// Scores of kRows rows with kTiles tiles from `tile` on.
template <Storage kKeys, std::size_t kRows, std::size_t kTiles>
inline void score_tiles(const LayerPages& layer, const Block& block, const HeadPage& page, const ScoreTerms& terms,
                        std::size_t tile, float* scores, Ahead& ahead) {
    constexpr StorageFormat kFormat = kStorageFormats[static_cast<std::size_t>(kKeys)];
    const std::size_t lines = layer.head_dim / kFormat.codes_per_lane();
    const std::uint8_t* codes = page.bytes + layer.key_codes + tile * lines * kLineBytes;
    const std::uint8_t* scales = page.bytes + layer.key_scales + tile * kLineBytes;
    const std::int32_t* units[kRows];
    for (std::size_t r = 0; r < kRows; ++r) units[r] = block.rows[r]->units();
    const auto put = [&](std::size_t r, std::size_t t, Floats sum) {
        store(scores + r * kSplitSlots + (tile + t) * kLanes,
              fma(sum, all_floats(terms.factor[r]), all_floats(terms.shift[r])));
    };

    if constexpr (kKeys == Storage::kInt8) {
        // Of the queries' codes the high bytes and the low ones, or both together.
        constexpr std::size_t kByteParts = kUnitsAreBytes ? 2 : 1;
        Ints sums[kByteParts][kRows][kTiles];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) {
                sums[0][r][t] = all_ints(0);
                sums[kByteParts - 1][r][t] = all_ints(-block.rows[r]->excess);
            }
        }
#pragma GCC unroll 1
        for (std::size_t line = 0; line < lines; ++line) {
            Codes keys[kTiles];
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) {
                keys[t] = unsigned_codes(codes + (t * lines + line) * kLineBytes);
            }
            ask_beside<kTiles>(ahead, line);
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
                for (std::size_t p = 0; p < kByteParts; ++p) {
                    const Unit unit = load_unit(units[r] + (p * lines + line) * kUnitWords);
#pragma GCC unroll 4
                    for (std::size_t t = 0; t < kTiles; ++t) add_products_of_unsigned(sums[p][r][t], keys[t], unit);
                }
            }
        }
        const bool is_byte = low_bits(kKeys, layer.head_dim) == 8;
#pragma GCC unroll 4
        for (std::size_t t = 0; t < kTiles; ++t) {
            const Floats steps = load_floats(reinterpret_cast<const float*>(scales + t * kLineBytes));
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) {
                Ints sum = sums[0][r][t];
                if constexpr (kByteParts == 2) {
                    sum = (is_byte ? shift_left<8>(sum) : shift_left<7>(sum)) + sums[1][r][t];
                }
                put(r, t, to_floats(sum) * steps);
            }
        }
    } else if constexpr (kKeys == Storage::kInt4) {
        const std::size_t group_lines = layer.key_group_dims / kFormat.codes_per_lane();
        Floats totals[kRows][kTiles];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) totals[r][t] = all_floats(0.0f);
        }
        for (std::size_t group = 0; group * group_lines < lines; ++group) {
            Ints sums[kRows][kTiles];
            set_zeros(sums);
            add_nibbles<false>(codes, lines, group * group_lines, (group + 1) * group_lines, units, sums, ahead);
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) {
                const Ints scalars = load_ints(scales + group * kPageTiles * kLineBytes + t * kLineBytes);
                const Floats steps = low_bf16(scalars), floors = high_bf16(scalars);
#pragma GCC unroll 8
                for (std::size_t r = 0; r < kRows; ++r) {
                    const Floats sum = all_floats(block.rows[r]->group_sums(layer.head_dim)[group]);
                    totals[r][t] = fma(floors, sum, fma(to_floats(sums[r][t]), steps, totals[r][t]));
                }
            }
        }
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) put(r, t, totals[r][t]);
        }
    } else {
        Floats sums[kRows][kTiles];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = all_floats(0.0f);
        }
        constexpr std::size_t kNumbers = kFormat.codes_per_lane();
#pragma GCC unroll 1
        for (std::size_t line = 0; line < lines; ++line) {
            Floats keys[kTiles][kNumbers];
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) load_numbers(codes + (t * lines + line) * kLineBytes, keys[t]);
            ask_beside<kTiles>(ahead, line);
#pragma GCC unroll 8
            for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
                for (std::size_t n = 0; n < kNumbers; ++n) {
                    const Floats unit = all_floats(reinterpret_cast<const float*>(units[r])[line * kNumbers + n]);
#pragma GCC unroll 4
                    for (std::size_t t = 0; t < kTiles; ++t) sums[r][t] = fma(keys[t][n], unit, sums[r][t]);
                }
            }
        }
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (std::size_t t = 0; t < kTiles; ++t) put(r, t, sums[r][t]);
        }
    }
}

// As many tiles at once as the registers hold.
template <Storage kKeys, std::size_t kRows>
constexpr std::size_t tiles_at_once() {
    if constexpr (kLineRegisters > 1) return 1;
    return kKeys != Storage::kFp32 && kRows > 3 ? 2 : 4;
}

template <Storage kKeys, std::size_t kRows>
void score_page_rows(const AttentionTask& task, const Block& block, const HeadPage& page, float* scores,
                     Ahead& ahead) {
    constexpr std::size_t kTiles = tiles_at_once<kKeys, kRows>();
    const ScoreTerms terms = score_terms(task, block, page);
    for (std::size_t tile = 0; tile < kPageTiles; tile += kTiles) {
        score_tiles<kKeys, kRows, kTiles>(*task.layer, block, page, terms, tile, scores, ahead);
    }
}

using ScorePage = void (*)(const AttentionTask& task, const Block& block, const HeadPage& page, float* scores,
                           Ahead& ahead);

template <Storage kKeys>
struct ScorePages {
    static constexpr ScorePage kFor[kMostRows] = {
        score_page_rows<kKeys, 1>, score_page_rows<kKeys, 2>, score_page_rows<kKeys, 3>,
        score_page_rows<kKeys, 4>, score_page_rows<kKeys, 5>, score_page_rows<kKeys, 6>,
    };
};

}  // namespace
}  // namespace kvist::KVIST_ISA
