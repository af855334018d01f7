// The Hadamard rotation of src/kvist/kernels/rotation.py for one vector, to the same bits.
#pragma once

#include <cstddef>

#include "page_layout.h"
#include "simd.h"

namespace kvist::KVIST_ISA {
namespace {

typedef float Quad __attribute__((vector_size(16)));
constexpr std::size_t kQuad = 4;

inline Quad load_quad(const float* from) {
    Quad quad;
    __builtin_memcpy(&quad, from, sizeof quad);
    return quad;
}

inline void store_quad(float* to, Quad quad) { __builtin_memcpy(to, &quad, sizeof quad); }

// Sums and differences of neighbours, then of dims two apart. A difference is the sum with what was negated.
inline Quad butterflies(Quad x) {
    const Quad odd = {x[1], x[0], x[3], x[2]};
    x = odd + x * Quad{1.0f, -1.0f, 1.0f, -1.0f};
    const Quad far = {x[2], x[3], x[0], x[1]};
    return far + x * Quad{1.0f, 1.0f, -1.0f, -1.0f};
}

inline void butterfly(Quad& low, Quad& high) {
    const Quad total = low + high;
    high = low - high;
    low = total;
}

// The largest power of two that divides the head dim.
constexpr std::size_t rotation_block(std::size_t head_dim) { return head_dim & (~head_dim + 1); }

// block^-0.5, rounded once from double.
inline float rotation_factor(std::size_t block) {
    double factor = 1.0;
    std::size_t rest = block;
    for (; rest >= 4; rest /= 4) factor *= 0.5;
    return static_cast<float>(rest == 2 ? factor * 0.70710678118654752440 : factor);
}

// Rotate a vector in place, in blocks of `rotation_block`. The head dim is a multiple of 4.
inline void rotate(float* y, std::size_t head_dim) {
    const std::size_t block = rotation_block(head_dim);
    if (block >= kLanes) {
        for (std::size_t i = 0; i < head_dim; i += kLanes) {
            Quad q[kQuad];
            for (std::size_t j = 0; j < kQuad; ++j) q[j] = butterflies(load_quad(y + i + j * kQuad));
            butterfly(q[0], q[1]);
            butterfly(q[2], q[3]);
            butterfly(q[0], q[2]);
            butterfly(q[1], q[3]);
            for (std::size_t j = 0; j < kQuad; ++j) store_quad(y + i + j * kQuad, q[j]);
        }
        for (std::size_t apart = kLanes; apart < block; apart *= 2) {
            for (std::size_t start = 0; start < head_dim; start += 2 * apart) {
                for (std::size_t i = start; i < start + apart; i += kLanes) {
                    const Floats low = load_floats(y + i), high = load_floats(y + i + apart);
                    store(y + i, low + high);
                    store(y + i + apart, low - high);
                }
            }
        }
    } else {
        for (std::size_t i = 0; i < head_dim; i += kQuad) store_quad(y + i, butterflies(load_quad(y + i)));
        if (block == 2 * kQuad) {
            for (std::size_t i = 0; i < head_dim; i += 2 * kQuad) {
                Quad low = load_quad(y + i), high = load_quad(y + i + kQuad);
                butterfly(low, high);
                store_quad(y + i, low);
                store_quad(y + i + kQuad, high);
            }
        }
    }
    const float factor = rotation_factor(block);
    for (std::size_t i = 0; i < head_dim; ++i) y[i] *= factor;
}

}  // namespace
}  // namespace kvist::KVIST_ISA
