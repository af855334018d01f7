// Attention of one step over the pages of one layer: what a kernel is told. See docs/kernels.md.
//
// A row is one query head of one token. Its context is cut into splits of 256 positions, at absolute places. Each split
// gives a row its largest score, the sum of its weights and the mixed values; these are merged in ascending order. So a
// row's bits depend on itself and on what it sees, whichever way the work below is dealt out:
//
//   span of few rows    an item is a split, for all rows of all spans that have the same pages there; what the splits
//                       gave is kept apart, and whoever finishes the last one of a span merges them
//   span of many rows   an item is a tile of its rows, which meets its splits one after another
//
// Each item is work for every KV head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lines.h"
#include "pages.h"

namespace kvist {

constexpr std::size_t kSplitPages = 4;
constexpr std::size_t kSplitSlots = 64 * kSplitPages;
constexpr std::size_t kSpanTileRows = 48;

// Of a span or of spans that share pages: the rows of one KV head are counted by token, then by head in the group.
struct AttentionItem {
    bool is_tile;
    std::size_t first;  // tile: the span; split: the first of its members in `AttentionTask::members`
    std::size_t count;  // tile: how many rows; split: how many members
    std::size_t begin;  // tile: the first row; split: which split
};

// Where a span keeps what its splits gave. Spans that are computed in tiles have no splits.
struct SplitSpan {
    std::size_t first_split;
    std::size_t num_splits;
    std::size_t first_result;  // for the first split and KV head: [splits, K, rows]
    std::size_t first_row;     // of its prepared rows: [tokens, H]
};

struct AttentionTask {
    const LayerPages* layer;
    const StepPages* step;
    std::size_t num_heads;
    std::size_t group_size;

    // [T, H, D] in bf16 or fp32; strides in elements, dims are contiguous.
    bool is_bf16;
    const void* q;
    std::size_t q_token_stride, q_head_stride;
    void* out;
    std::size_t out_token_stride, out_head_stride;

    float scale;
    float softcap;        // 0: none
    const float* sinks;   // [H] or null
    std::int64_t window;  // tokens that a row sees, its own included

    const AttentionItem* items;
    std::size_t num_items;
    const std::size_t* members;  // spans
    const SplitSpan* splits;     // of each span

    // Memory. Each size below is enough for every instruction set.
    std::uint8_t* prepared;  // rows of spans with splits, `prepared_bytes` each
    float* results;          // of splits, `result_floats` each
    std::int32_t* waiting;   // [spans, K]: how many splits are not finished
    std::uint8_t* scratch;   // `scratch_bytes` for each part
    std::size_t scratch_bytes;
    std::size_t* next;  // the work that nobody has taken yet; item by item, the KV heads of each in a row
};

namespace {  // internal linkage: the kernels include this too, and must share nothing between instruction sets

// A prepared row: a header; units of the query; its products with the offset; sums of its codes per group.
constexpr std::size_t prepared_bytes(std::size_t head_dim) { return 64 + 3 * whole_lines(4 * head_dim); }

// Largest score and sum of weights, then the mixed values, both from a whole line on.
constexpr std::size_t result_floats(std::size_t head_dim) { return 16 + whole_lines(4 * head_dim) / 4; }

}  // namespace
}  // namespace kvist
