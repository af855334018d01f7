// The weights of a product as the inner loop reads them: a tile as it is stored, or a panel of tiles with their codes
// widened to bytes, which serves many rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/linear_rows.h"
#include "linear.h"
#include "simd.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

// What a group of a tile multiplies sums by, and adds.
struct TileScalars {
    Floats step;
    Floats start;  // that a sum began with, in steps, less than zero
    Floats minimum;
};

// The place of one group of columns in a tile.
template <Weights kWeights>
struct TileGroup {
    static constexpr WeightFormat kFormat = kWeightFormats[static_cast<std::size_t>(kWeights)];

    const std::uint8_t* codes;
    const std::uint16_t* scalars;

    TileGroup(const std::uint8_t* tile, std::size_t group) {
        const std::uint8_t* block = tile + group / kFormat.groups_per_block() * kFormat.block_bytes();
        const std::size_t in_block = group % kFormat.groups_per_block();
        codes = block + kTileLineBytes + in_block * kFormat.code_bytes();
        scalars = reinterpret_cast<const std::uint16_t*>(block) + in_block * kTileRows;
    }

    TileScalars load_scalars() const {
        TileScalars loaded;
        loaded.step = load_halves(scalars);
        loaded.start = loaded.step * all_floats(-kSumStartValue);
        loaded.minimum = kFormat.has_minimum ? load_halves(scalars + kTileRows) : all_floats(0);
        return loaded;
    }

    // The codes of four columns, `unit` from 0 to 7.
    Ints load_bytes(std::size_t unit) const {
        if constexpr (kFormat.bits == 8) return load_ints(codes + unit * kTileLineBytes);
        const Ints line = load_ints(codes + unit / 2 * kTileLineBytes);
        return (unit % 2 == 0 ? line : shift_right<4>(line)) & all_ints(0x0f0f0f0f);
    }
};

// One tile, read as it is stored.
template <Weights kWeights>
struct StoredTile {
    static constexpr std::size_t kTiles = 1;
    static constexpr bool kHasMinimum = TileGroup<kWeights>::kFormat.has_minimum;
    static constexpr bool kInWords = sums_in_words(TileGroup<kWeights>::kFormat.bits);

    const std::uint8_t* data;

    struct Group {
        TileGroup<kWeights> place;
        Ints codes(std::size_t unit, std::size_t) const { return place.load_bytes(unit); }
        TileScalars scalars(std::size_t) const { return place.load_scalars(); }
    };
    Group group(std::size_t index) const {
        const TileGroup<kWeights> place(data, index);
        // Few rows take less time than the bytes need to come: they are asked for long before. The hardware stops at
        // the end of a 4 KiB page; the far request finds the page, the near one brings lines close. Tiles follow one
        // another.
        constexpr std::size_t kNear = 4096, kFar = 16384;
        constexpr std::size_t kBlockBytes = TileGroup<kWeights>::kFormat.block_bytes();
        if (index % TileGroup<kWeights>::kFormat.groups_per_block() == 0) {
            const auto* block = reinterpret_cast<const std::uint8_t*>(place.scalars);
            for (std::size_t line = 0; line < kBlockBytes; line += kTileLineBytes) {
                prefetch(block + kNear + line);
                prefetch_far(block + kFar + line);
            }
        }
        return {place};
    }
};

// Tiles that lie side by side, as many as the registers hold sums for with a block of rows. For each group: the codes of
// four columns of each tile, of the next four, and so on; then the scalars of each tile.
template <bool kMinimum, bool kWords>
struct Panel {
    static constexpr std::size_t kTiles = kLineRegisters == 1 ? 4 : 1;
    static constexpr bool kHasMinimum = kMinimum;
    static constexpr bool kInWords = kWords;
    static constexpr std::size_t kScalarLines = kMinimum ? 3 : 2;
    static constexpr std::size_t kGroupBytes = kTiles * (kGroupUnits + kScalarLines) * kTileLineBytes;

    const std::uint8_t* data;

    struct Group {
        const std::uint8_t* bytes;
        Ints codes(std::size_t unit, std::size_t tile) const {
            return load_ints(bytes + (unit * kTiles + tile) * kTileLineBytes);
        }
        TileScalars scalars(std::size_t tile) const {
            const auto* lines = reinterpret_cast<const float*>(bytes) +
                                (kGroupUnits * kTiles + tile * kScalarLines) * kTileRows;
            TileScalars loaded;
            loaded.step = load_floats(lines);
            loaded.start = load_floats(lines + kTileRows);
            loaded.minimum = kMinimum ? load_floats(lines + 2 * kTileRows) : all_floats(0);
            return loaded;
        }
    };
    Group group(std::size_t index) const { return {data + index * kGroupBytes}; }
};

template <Weights kWeights>
using PanelOf = Panel<TileGroup<kWeights>::kFormat.has_minimum, sums_in_words(TileGroup<kWeights>::kFormat.bits)>;

// A panel of the tiles from `first` on, `count` of them; the others of the panel are zeros.
template <Weights kWeights>
inline void unpack_panel(const WeightMatrix& weight, std::size_t first, std::size_t count, std::uint8_t* panel) {
    using To = PanelOf<kWeights>;
    const std::size_t stride = tile_bytes(weight);
    for (std::size_t index = 0; index < weight.num_groups; ++index, panel += To::kGroupBytes) {
        for (std::size_t tile = 0; tile < To::kTiles; ++tile) {
            auto* lines = reinterpret_cast<float*>(panel) +
                          (kGroupUnits * To::kTiles + tile * To::kScalarLines) * kTileRows;
            const auto code_line = [&](std::size_t unit) {
                return reinterpret_cast<std::int32_t*>(panel) + (unit * To::kTiles + tile) * kTileRows;
            };
            if (tile >= count) {
                for (std::size_t unit = 0; unit < kGroupUnits; ++unit) store(code_line(unit), all_ints(0));
                for (std::size_t i = 0; i < To::kScalarLines; ++i) store(lines + i * kTileRows, all_floats(0));
                continue;
            }
            const TileGroup<kWeights> group(weight.data + (first + tile) * stride, index);
#pragma GCC unroll 8
            for (std::size_t unit = 0; unit < kGroupUnits; ++unit) store(code_line(unit), group.load_bytes(unit));
            const TileScalars scalars = group.load_scalars();
            store(lines, scalars.step);
            store(lines + kTileRows, scalars.start);
            if constexpr (To::kHasMinimum) store(lines + 2 * kTileRows, scalars.minimum);
        }
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
