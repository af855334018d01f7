// The vectors that are encoded together, and what each side loads of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "append.h"
#include "kernels/encode.h"
#include "kernels/rotation.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

// Vectors that are encoded together: one to a lane.
constexpr std::size_t kAppendVectors = kLanes;

// What is known of one vector: its token and KV head, and the bytes that its head has in the token's page.
struct Vector {
    std::size_t row;
    std::size_t head;
    std::size_t slot;
    std::size_t number;  // of the page in its sequence
    std::uint8_t* bytes;
};

struct Chunk {
    Vector vectors[kAppendVectors];
    std::size_t count = 0;
    bool one_head = false;  // all vectors are of the same KV head
};

// A part's own memory, `padded` floats for each vector and array. Codes that do not fill it end with zeros.
struct Scratch {
    std::size_t padded;       // the head dim up to the next multiple of 16
    float* y;                 // [vector, padded]
    void* codes;              // [vector, padded] of 1, 2 or 4 bytes each
    std::uint32_t* words;     // lanes of key codes: [vector, line], or [line, vector]
    std::uint32_t* scalars;   // [vector, group]
    float* offset;            // of the page that is being looked at
    FitScratch fit;
    float* targets;           // [16, dims of a group]

    static constexpr std::size_t kArrays = 9;

    Scratch(float* memory, std::size_t head_dim) : padded(padded_dims(head_dim)) {
        const std::size_t size = kAppendVectors * padded;
        y = memory;
        codes = memory + size;
        words = reinterpret_cast<std::uint32_t*>(memory + 2 * size);
        scalars = reinterpret_cast<std::uint32_t*>(memory + 3 * size);
        offset = memory + 4 * size;
        fit = {memory + 5 * size, memory + 6 * size, memory + 7 * size, memory + 8 * size};
        targets = fit.target;  // a block is fed back in one way or the other
    }

    template <typename Code>
    Code* codes_as() const { return static_cast<Code*>(codes); }
};

// --- loading ---------------------------------------------------------------------------------------------------------

inline void load_floats(const AppendInput& input, const Vector& vector, std::size_t dims, float* y) {
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(vector.row) * input.row_stride +
                              static_cast<std::ptrdiff_t>(vector.head) * input.head_stride;
    if (input.is_bf16) {
        const auto* from = static_cast<const std::uint16_t*>(input.data) + at;
        for (std::size_t i = 0; i < dims; ++i) y[i] = widened(from[i]);
    } else {
        __builtin_memcpy(y, static_cast<const float*>(input.data) + at, dims * sizeof(float));
    }
}

// The codes of bf16: of a bf16 number its own bits.
inline void load_bf16(const AppendInput& input, const Vector& vector, std::size_t dims, std::uint16_t* codes) {
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(vector.row) * input.row_stride +
                              static_cast<std::ptrdiff_t>(vector.head) * input.head_stride;
    if (input.is_bf16) {
        __builtin_memcpy(codes, static_cast<const std::uint16_t*>(input.data) + at, dims * sizeof(std::uint16_t));
    } else {
        const auto* from = static_cast<const float*>(input.data) + at;
        for (std::size_t i = 0; i < dims; ++i) codes[i] = bf16_bits(from[i]);
    }
}

// The offset of position 0 turned by rope to a page's first position, as `PageTurns.turn` does.
inline void turn_offset(const LayerPages& layer, const TurnTable& table, std::size_t head, std::size_t number,
                        float* offset) {
    const std::size_t half = layer.head_dim / 2;
    const float* first = layer.key_offset + head * layer.head_dim;
    const float* second = first + half;
    const float* cosines = table.turns + number * 2 * half;
    const float* sines = cosines + half;
    for (std::size_t i = 0; i < half; ++i) {
        offset[i] = first[i] * cosines[i] - second[i] * sines[i];
        offset[half + i] = second[i] * cosines[i] + first[i] * sines[i];
    }
}

// Quantised vectors as they are coded: moved, scaled, rotated.
inline void load_rotated(const AppendJob& job, const AppendInput& input, const Chunk& chunk, bool moved,
                         Scratch& scratch) {
    const LayerPages& layer = *job.layer;
    const Vector* turned_for = nullptr;
    for (std::size_t v = 0; v < chunk.count; ++v) {
        const Vector& vector = chunk.vectors[v];
        float* y = scratch.y + v * scratch.padded;
        load_floats(input, vector, layer.head_dim, y);
        if (moved) {
            if (turned_for == nullptr || turned_for->head != vector.head || turned_for->number != vector.number) {
                turn_offset(layer, job.step->turns[layer.turns], vector.head, vector.number, scratch.offset);
                turned_for = &vector;
            }
            const float* scale = layer.key_scale + vector.head * layer.head_dim;
            for (std::size_t i = 0; i < layer.head_dim; ++i) y[i] = (y[i] - scratch.offset[i]) * scale[i];
        }
        rotate(y, layer.head_dim);
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
