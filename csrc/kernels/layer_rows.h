// What a decoder layer does to a row between its products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layer.h"
#include "simd.h"
#include "simd_lanes.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

// Sums that do not wait for one another.
constexpr std::size_t kSquareSums = 4;

// What a row is multiplied by to have a root mean square of 1. Squares are added to fixed lanes in a fixed order.
inline float norm_factor(const float* x, std::size_t dims, float eps) {
    Floats sums[kSquareSums];
    for (Floats& sum : sums) sum = all_floats(0.0f);
    std::size_t i = 0;
    for (; i + kSquareSums * kLineLanes <= dims; i += kSquareSums * kLineLanes) {
#pragma GCC unroll 4
        for (std::size_t s = 0; s < kSquareSums; ++s) {
            const Floats line = load_floats(x + i + s * kLineLanes);
            sums[s] = fma(line, line, sums[s]);
        }
    }
    for (; i + kLineLanes <= dims; i += kLineLanes) {
        const Floats line = load_floats(x + i);
        sums[0] = fma(line, line, sums[0]);
    }
    if (i < dims) {
        float rest[kLineLanes] = {};
        for (std::size_t lane = 0; i + lane < dims; ++lane) rest[lane] = x[i + lane];
        const Floats line = load_floats(rest);
        sums[1] = fma(line, line, sums[1]);
    }
    const float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    return 1 / __builtin_sqrtf(sum / static_cast<float>(dims) + eps);
}

// `out` may be `x`.
inline void norm_row(const float* x, const float* norm, NormNumbers numbers, std::size_t dims, float* out) {
    const float factor = norm_factor(x, dims, numbers.eps);
    const Floats all = all_floats(factor), offset = all_floats(numbers.offset);
    std::size_t i = 0;
    for (; i + kLineLanes <= dims; i += kLineLanes) {
        store(out + i, load_floats(x + i) * all * (load_floats(norm + i) + offset));
    }
    for (; i < dims; ++i) out[i] = x[i] * factor * (norm[i] + numbers.offset);
}

inline void add_row(float* x, const float* y, std::size_t dims) {
    std::size_t i = 0;
    for (; i + kLineLanes <= dims; i += kLineLanes) store(x + i, load_floats(x + i) + load_floats(y + i));
    for (; i < dims; ++i) x[i] += y[i];
}

// The halves of a head are the two coordinates of its planes. Products and sums are rounded as they are written.
inline void turn_head(float* x, const float* cos, const float* sin, std::size_t half) {
    std::size_t i = 0;
    for (; i + kLineLanes <= half; i += kLineLanes) {
        const Floats first = load_floats(x + i), second = load_floats(x + half + i);
        store(x + i, first * load_floats(cos + i) - second * load_floats(sin + i));
        store(x + half + i, second * load_floats(cos + half + i) + first * load_floats(sin + half + i));
    }
    for (; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[half + i] + first * sin[half + i];
    }
}

// x / (1 + e^-y), to about 1e-6 of the result. Where the power is more than 2^126 that is x * 0, which is NaN if x is
// infinite.
KVIST_ALWAYS_INLINE Floats times_sigmoid(Floats x, Floats y) {
    const Floats most = all_floats(126.0f), exponent = y * all_floats(-kLog2E);
    const Floats power = exp2(min(most, exponent));
    return select(less(most, exponent), x * all_floats(0.0f), x / (power + all_floats(1.0f)));
}

template <Activation kActivation>
inline Floats activated(Floats x) {
    if constexpr (kActivation == Activation::kSilu) return times_sigmoid(x, x);
    // x (1 + tanh(y)) / 2 is x / (1 + e^-2y), with y = sqrt(2 / pi) (x + 0.044715 x^3).
    const Floats factor = fma(x * x, all_floats(2 * 0.7978845608f * 0.044715f), all_floats(2 * 0.7978845608f));
    return times_sigmoid(x, x * factor);
}

template <Activation kActivation>
inline void gate_row(float* gate, const float* up, const float* gate_bias, const float* up_bias, std::size_t dims) {
    for (std::size_t i = 0; i < dims; i += kLineLanes) {
        Floats x = load_floats(gate + i), y = load_floats(up + i);
        if (gate_bias != nullptr) x = x + load_floats(gate_bias + i);
        if (up_bias != nullptr) y = y + load_floats(up_bias + i);
        store(gate + i, activated<kActivation>(x) * y);
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
