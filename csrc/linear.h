// Products with weights: the bytes of a packed matrix, and what the kernels are told.
//
// A matrix of bf16 is what it is elsewhere, [N, K] row by row. What follows is of quantised weights.
//
// 16 rows of the matrix are a tile, one row to a lane of 4 bytes. A tile's bytes lie in the order in which a product over
// all columns reads them, in lines of 64 bytes; src/kvist/kernels/weight_codec.py packs them and says what codes mean.
//
//   int8, int4    | steps of groups 0 and 1 | codes of group 0 | codes of group 1 | steps of groups 2 and 3 | ...
//   int4_min      | steps, minima of group 0 | codes of group 0 | steps, minima of group 1 | ...
//
//   scalars       16 fp16 for the 16 rows; of two groups, or the steps and the minima of one
//   int8 codes    8 lines; lane r of line i: the codes of row r, columns 4 i to 4 i + 3
//   int4 codes    4 lines; lane r of line i: in the low nibbles columns 8 i to 8 i + 3, in the high ones the next four
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvist {

enum class Weights { kInt8, kInt4, kInt4Min, kBf16 };

namespace {  // internal linkage: the kernels include this too, and must share nothing between instruction sets

constexpr std::size_t kGroupColumns = 32;
constexpr std::size_t kTileRows = 16;
constexpr std::size_t kTileLineBytes = 64;
// Four columns, that meet in a lane.
constexpr std::size_t kGroupUnits = kGroupColumns / 4;

struct WeightFormat {
    const char* name;
    std::size_t bits;   // of a code
    std::int32_t zero;  // the code that stands for 0, where there is no minimum
    bool has_minimum;

    constexpr std::size_t groups_per_block() const { return has_minimum ? 1 : 2; }
    constexpr std::size_t code_bytes() const { return kTileRows * kGroupColumns * bits / 8; }
    constexpr std::size_t block_bytes() const { return kTileLineBytes + groups_per_block() * code_bytes(); }
    constexpr std::size_t tile_bytes(std::size_t num_groups) const {
        return (num_groups + groups_per_block() - 1) / groups_per_block() * kTileLineBytes + num_groups * code_bytes();
    }
};

constexpr WeightFormat kWeightFormats[] = {
    {"int8", 8, 128, false},
    {"int4", 4, 8, false},
    {"int4_min", 4, 0, true},
    {"bf16", 16, 0, false},  // no codes and no tiles
};

constexpr const WeightFormat& format_of(Weights weights) { return kWeightFormats[static_cast<std::size_t>(weights)]; }

}  // namespace

// `W` of y = x W^T.
struct WeightMatrix {
    Weights format;
    std::size_t num_rows;
    std::size_t num_groups;    // of columns
    const std::uint8_t* data;  // tiles, aligned to 64 bytes; or rows of bf16, aligned to 2
    bool fine_rows;            // whether rows that meet it are quantised twice: they, and what that left of them
};

namespace {

constexpr std::size_t codings(const WeightMatrix& weight) { return weight.fine_rows ? 2 : 1; }

constexpr std::size_t num_tiles(const WeightMatrix& weight) { return (weight.num_rows + kTileRows - 1) / kTileRows; }
constexpr std::size_t tile_bytes(const WeightMatrix& weight) {
    return format_of(weight.format).tile_bytes(weight.num_groups);
}

}  // namespace

// [T, K] or [T, N] of fp32 or bf16; columns are contiguous.
struct InputRows {
    const void* data;
    std::size_t stride;  // of rows, in elements
    bool is_bf16;
};

struct OutputRows {
    void* data;
    std::size_t stride;
    bool is_bf16;
};

// One product. Its rows, quantised or widened to fp32, and its scratch have the sizes that `LinearSizes` says.
struct LinearTask {
    const WeightMatrix* weight;
    InputRows x;
    OutputRows out;
    std::size_t num_rows;   // T
    std::uint8_t* rows;     // that input, aligned to 64 bytes
    std::uint8_t* scratch;  // for each part, aligned to 64 bytes; not needed for few rows
};

// Bytes, multiples of 64.
struct LinearSizes {
    std::size_t row;      // of such a row, in all its codings
    std::size_t scratch;  // of a part
};

}  // namespace kvist
