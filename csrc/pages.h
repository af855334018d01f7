// What the kernels over pages are told: where a layer lies in the pages of its group, and which pages a step touches.
//
// Plain structs that own nothing. `page_bindings.h` has the objects that own what these point to and that checked it:
// a kernel may rely on every page number, length and alignment here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvist {

// The index of a format in `kStorageFormats` of page_layout.h.
enum class Storage : std::uint8_t { kFp32, kBf16, kInt8, kInt4 };

namespace {  // internal linkage: the kernels include this too, and must share nothing between instruction sets

constexpr bool is_quantised(Storage storage) { return storage == Storage::kInt8 || storage == Storage::kInt4; }

}  // namespace

// One layer in the pages of its group, and what its quantised keys are coded with. Made once with the cache.
struct LayerPages {
    Storage keys;
    Storage values;
    std::size_t head_dim;      // D
    std::size_t num_kv_heads;  // K
    std::size_t offset;        // of the layer in a page, in bytes
    std::size_t head_bytes;    // from one KV head to the next

    // The regions of a KV head, in bytes from its start: multiples of 64.
    std::size_t key_codes;
    std::size_t key_scales;
    std::size_t value_codes;
    std::size_t value_scales;

    // Dims of a group with scalars; D where the format has none.
    std::size_t key_group_dims;
    std::size_t value_group_dims;

    // KeyStatics of kernels/key_statics.py: null together where keys are coded as they are, and in plain formats.
    const float* key_offset;    // [K, D], of position 0
    const float* key_scale;     // [K, D], positive
    const float* key_feedback;  // [K, groups, g, g]; int4 keys only
    std::size_t turns;          // which of the step's tables turns this layer's offset; there if `key_offset` is
};

// Cosines and sines by which rope turns the first position of each page: `PageTurns` of kernels/key_statics.py.
struct TurnTable {
    const float* turns;       // [numbers, cosine or sine, planes]
    std::size_t num_numbers;  // one row for each page number, more than any of the step's pages has
    std::size_t num_planes;   // D / 2
};

// A run of consecutive new tokens of one sequence.
struct SpanPages {
    std::size_t row_start;        // its first row in T
    std::size_t num_tokens;       // one at least
    std::int64_t first_position;  // of its first token
    std::int64_t first_number;    // the page number of `pages[0]`; pages before it were dropped
    const std::int64_t* pages;    // where the pages lie in the pool, those of the span's own tokens included
    std::size_t num_pages;
};

// The pages of one layer group in one step. Made once per step and group.
struct StepPages {
    std::uint8_t* pool;      // pages at multiples of `stride` bytes, aligned to 64
    std::size_t stride;      // bytes
    std::size_t page_bytes;  // of all layers
    const SpanPages* spans;  // in the order of their rows, without gaps
    std::size_t num_spans;
    std::size_t num_tokens;  // T
    const TurnTable* turns;
    std::size_t num_turns;

    // For each row of T its position and the page that it is written to. Its slot is position % 64, its page's number
    // position / 64. No place occurs twice.
    const std::int64_t* row_positions;
    const std::int64_t* row_pages;
};

}  // namespace kvist
