// Products with quantised weights: which rows meet which tiles, when, and on which thread. Weights of bf16 are no tiles:
// linear_bf16.h has them.
//
// Few rows: each thread has some tiles, reads each once as it is stored, and meets it with all rows while it is in the
// cache. Many rows: tiles are unpacked, a panel at a time, and blocks of rows stream over a panel that stays in the cache.
#include "linear.h"

#include "kernels/kernels.h"
#include "kernels/linear_bf16.h"
#include "kernels/linear_block.h"

namespace kvist::KVIST_ISA {

namespace {

// Rows that meet a stored tile at once, and at most; those that meet a panel, whose sums fit into the registers.
constexpr std::size_t kFewRows = kLineRegisters == 1 ? 8 : 4;
constexpr std::size_t kMostFewRows = 2 * kFewRows;
constexpr std::size_t kPanelRows = kLineRegisters == 1 ? 6 : 4;
constexpr std::size_t kPanelTiles = PanelOf<Weights::kInt8>::kTiles;

// A row that is quantised twice is two in a block, side by side.
static_assert(kFewRows % 2 == 0 && kPanelRows % 2 == 0);

bool are_few(const WeightMatrix& weight, std::size_t num_rows) { return num_rows * codings(weight) <= kMostFewRows; }

std::size_t num_blocks(const WeightMatrix& weight, std::size_t num_rows) {
    const std::size_t most = (are_few(weight, num_rows) ? kFewRows : kPanelRows) / codings(weight);
    return (num_rows + most - 1) / most;
}

std::size_t row_bytes(const WeightMatrix& weight) {
    return weight.num_groups * codings(weight) * group_row_bytes(sums_in_words(format_of(weight.format).bits));
}

std::size_t panel_bytes(const WeightMatrix& weight) {
    const bool has_minimum = format_of(weight.format).has_minimum;
    return weight.num_groups *
           (has_minimum ? PanelOf<Weights::kInt4Min>::kGroupBytes : PanelOf<Weights::kInt4>::kGroupBytes);
}

// The block's count of quantised rows as a constant.
template <typename Tiles, std::size_t kRows>
void multiply_any_block(const LinearTask& task, const Tiles& tiles, std::size_t first_tile, std::size_t num_tiles,
                        const RowBlock& block) {
    if (block.count * codings(*task.weight) == kRows) {
        const std::uint8_t* rows = task.rows + block.first * row_bytes(*task.weight);
        multiply_block<kRows>(task, tiles, first_tile, num_tiles, rows, block.first);
    } else if constexpr (kRows > 1) {
        multiply_any_block<Tiles, kRows - 1>(task, tiles, first_tile, num_tiles, block);
    }
}

template <Weights kWeights>
void multiply_few(const LinearTask& task, int part, int parts) {
    const WeightMatrix& weight = *task.weight;
    const std::size_t blocks = num_blocks(weight, task.num_rows), stride = tile_bytes(weight);
    const Range tiles = share(num_tiles(weight), part, parts);
    for (std::size_t tile = tiles.begin; tile < tiles.end; ++tile) {
        const StoredTile<kWeights> stored{weight.data + tile * stride};
        for (std::size_t b = 0; b < blocks; ++b) {
            multiply_any_block<StoredTile<kWeights>, kFewRows>(task, stored, tile, 1,
                                                               row_block(task.num_rows, blocks, b));
        }
    }
}

template <Weights kWeights>
void multiply_many(const LinearTask& task, int part, int parts) {
    using Tiles = PanelOf<kWeights>;
    const WeightMatrix& weight = *task.weight;
    const std::size_t blocks = num_blocks(weight, task.num_rows);
    const std::size_t num_panels = (num_tiles(weight) + kPanelTiles - 1) / kPanelTiles;
    std::uint8_t* scratch = task.scratch + static_cast<std::size_t>(part) * panel_bytes(weight);
    // Shares are cut between blocks, not panels, of which there may be few.
    const Range items = share(num_panels * blocks, part, parts);
    for (std::size_t item = items.begin; item < items.end;) {
        const std::size_t panel = item / blocks, first_tile = panel * kPanelTiles;
        const std::size_t left = num_tiles(weight) - first_tile;
        const std::size_t count = left < kPanelTiles ? left : kPanelTiles;
        unpack_panel<kWeights>(weight, first_tile, count, scratch);
        const Tiles tiles{scratch};
        for (; item < items.end && item / blocks == panel; ++item) {
            multiply_any_block<Tiles, kPanelRows>(task, tiles, first_tile, count,
                                                  row_block(task.num_rows, blocks, item % blocks));
        }
    }
}

}  // namespace

LinearSizes linear_sizes(const WeightMatrix& weight, std::size_t num_rows) {
    if (weight.format == Weights::kBf16) return {bf16_row_bytes(weight), 0};
    return {row_bytes(weight), are_few(weight, num_rows) ? 0 : panel_bytes(weight)};
}

void quantise_rows(const LinearTask& task, int part, int parts) {
    if (task.weight->format == Weights::kBf16) return widen_rows(task, part, parts);
    const std::size_t blocks = num_blocks(*task.weight, task.num_rows), bytes = row_bytes(*task.weight);
    const Range share_of_blocks = share(blocks, part, parts);
    for (std::size_t b = share_of_blocks.begin; b < share_of_blocks.end; ++b) {
        const RowBlock block = row_block(task.num_rows, blocks, b);
        for (std::size_t r = 0; r < block.count; ++r) {
            quantise_row(task, block.first + r, r, block.count, task.rows + block.first * bytes);
        }
    }
}

void multiply_rows(const LinearTask& task, int part, int parts) {
    const bool few = are_few(*task.weight, task.num_rows);
    switch (task.weight->format) {
        case Weights::kInt8:
            return few ? multiply_few<Weights::kInt8>(task, part, parts)
                       : multiply_many<Weights::kInt8>(task, part, parts);
        case Weights::kInt4:
            return few ? multiply_few<Weights::kInt4>(task, part, parts)
                       : multiply_many<Weights::kInt4>(task, part, parts);
        case Weights::kInt4Min:
            return few ? multiply_few<Weights::kInt4Min>(task, part, parts)
                       : multiply_many<Weights::kInt4Min>(task, part, parts);
        case Weights::kBf16:
            return multiply_bf16(task, part, parts);
    }
}

}  // namespace kvist::KVIST_ISA
