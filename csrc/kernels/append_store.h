// Codes and scalars into the slots of pages: csrc/page_layout.h has the drawing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/append_load.h"
#include "page_layout.h"

namespace kvist::KVIST_ISA {
namespace {

inline void store_scalars(const Chunk& chunk, std::size_t region, std::size_t num_groups,
                          const std::uint32_t* scalars) {
    for (std::size_t v = 0; v < chunk.count; ++v) {
        std::uint8_t* lane = chunk.vectors[v].bytes + region + chunk.vectors[v].slot * kLaneBytes;
        for (std::size_t group = 0; group < num_groups; ++group) {
            __builtin_memcpy(lane + group * kPageSlots * kLaneBytes, scalars + v * num_groups + group, kLaneBytes);
        }
    }
}

// Lanes of key codes: word `line` of vector v is words[v * vector_stride + line * line_stride].
inline void store_keys(const Chunk& chunk, std::size_t region, std::size_t num_lines, const std::uint32_t* words,
                std::size_t vector_stride, std::size_t line_stride) {
    for (std::size_t v = 0; v < chunk.count; ++v) {
        const std::size_t slot = chunk.vectors[v].slot;
        std::uint8_t* lane =
            chunk.vectors[v].bytes + region + slot / kLanes * num_lines * kLineBytes + slot % kLanes * kLaneBytes;
        const std::uint32_t* word = words + v * vector_stride;
        for (std::size_t line = 0; line < num_lines; ++line) {
            __builtin_memcpy(lane + line * kLineBytes, word + line * line_stride, kLaneBytes);
        }
    }
}

// Words of 8 codes each from codes of a byte each.
inline void pack_int4_keys(const Chunk& chunk, std::size_t head_dim, Scratch& scratch) {
    for (std::size_t v = 0; v < chunk.count; ++v) {
        const std::uint8_t* codes = scratch.codes_as<std::uint8_t>() + v * scratch.padded;
        std::uint32_t* words = scratch.words + v * scratch.padded;
        for (std::size_t line = 0; line < head_dim / 8; ++line) {
            std::uint32_t low, high;
            __builtin_memcpy(&low, codes + line * 8, sizeof low);
            __builtin_memcpy(&high, codes + line * 8 + sizeof low, sizeof high);
            words[line] = low | high << 4;
        }
    }
}

// Value codes [vector, padded] of `Code`, each beside those of other tokens in its lane.
template <typename Code>
void store_values(const Chunk& chunk, std::size_t region, std::size_t bits, const Code* codes, std::size_t padded) {
    const std::size_t in_lane = 8 * kLaneBytes / bits, num_lines = kPageSlots / in_lane;
    for (std::size_t first = 0, stop = 0; first < chunk.count; first = stop) {
        // The vectors whose codes share lanes with the first one's.
        const Vector& vector = chunk.vectors[first];
        const std::size_t line = vector.slot / in_lane;
        while (stop < chunk.count && chunk.vectors[stop].bytes == vector.bytes &&
               chunk.vectors[stop].slot / in_lane == line) {
            ++stop;
        }
        std::uint32_t shifts[8] = {};
        std::uint32_t written = 0;
        for (std::size_t v = first; v < stop; ++v) {
            const std::size_t index = chunk.vectors[v].slot % in_lane;
            const std::size_t shift = bits == 4 ? 8 * (index % kLaneBytes) + 4 * (index / kLaneBytes) : bits * index;
            shifts[v - first] = static_cast<std::uint32_t>(shift);
            written |= static_cast<std::uint32_t>((std::uint64_t{1} << bits) - 1) << shift;
        }
        for (std::size_t tile = 0; tile < padded / kLanes; ++tile) {
            std::uint8_t* to = vector.bytes + region + (tile * num_lines + line) * kLineBytes;
            std::uint32_t lanes[kLanes];
            __builtin_memcpy(lanes, to, kLineBytes);
            for (std::size_t i = 0; i < kLanes; ++i) lanes[i] &= ~written;
            for (std::size_t v = first; v < stop; ++v) {
                const Code* from = codes + v * padded + tile * kLanes;
                for (std::size_t i = 0; i < kLanes; ++i) lanes[i] |= std::uint32_t{from[i]} << shifts[v - first];
            }
            __builtin_memcpy(to, lanes, kLineBytes);
        }
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
