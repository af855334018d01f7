// The codec of src/kvist/kernels/codec.py for a few vectors, to the same bits: float32, each product and sum rounded by
// itself, in the order in which that file has them.
//
// int4 is fitted and fed back for 16 groups of dims at once, one to a lane:
//
//   z, [dims of a group][16 lanes]      lane l: a group of some vector's dims
//
// Where all lanes hold the same group of one KV head, they share the factors of the feedback. Else each lane has its
// own, and its targets are moved along the dims.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/numbers.h"
#include "page_layout.h"
#include "simd.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

constexpr float kLeastStep = 0x1p-100f;
constexpr float kMagic = 0x1.8p23f;  // as in `nearest`: its last bits then hold the whole number

// The largest absolute value; the bits of infinity or more if any number is not finite.
inline std::uint32_t largest_bits(const float* y, std::size_t dims) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < dims; ++i) {
        const std::uint32_t bits = bits_of(y[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

inline float inverse(float step) { return step > 0 ? 1 / step : 0.0f; }

// --- int8 ------------------------------------------------------------------------------------------------------------

// Codes plus `bias`, and the bits of the step.
inline std::uint32_t encode_int8(const float* y, std::size_t dims, int bias, std::uint8_t* codes) {
    const std::uint32_t largest = largest_bits(y, dims);
    if (largest >= kInfinityBits) {
        for (std::size_t i = 0; i < dims; ++i) codes[i] = static_cast<std::uint8_t>(bias);
        return kNanBits;
    }
    const float span = float_of(largest) / 127;
    const float step = span < kLeastStep ? 0.0f : span;
    const float factor = inverse(step);
    // No clamping: y * (1 / step) is off 127 by a few units in the last place at most.
    const std::uint32_t zero = bits_of(kMagic) - static_cast<std::uint32_t>(bias);
    for (std::size_t i = 0; i < dims; ++i) codes[i] = static_cast<std::uint8_t>(bits_of(y[i] * factor + kMagic) - zero);
    return bits_of(step);
}

// --- int4: step and floor --------------------------------------------------------------------------------------------

// Of the groups in 16 lanes.
struct Fit {
    alignas(kLineBytes) float step[kLanes];
    alignas(kLineBytes) float floor[kLanes];
    std::uint32_t finite;  // a bit for each lane
};

// What the fit of a block of lanes works in: as many lines as a group has dims, each.
struct FitScratch {
    float* z;
    float* codes;   // of the range's step and floor
    float* target;  // what the feedback has made of z
    float* sums;
};

inline Floats load_lanes(const float* z, std::size_t dim) { return load_floats(z + dim * kLanes); }

KVIST_ALWAYS_INLINE Floats inverse(Floats step) {
    const Floats zero = all_floats(0);
    return select(less(zero, step), all_floats(1) / step, zero);
}

// To the nearest number of bf16, ties to even. What is no number stays so.
KVIST_ALWAYS_INLINE Floats as_bf16(Floats x) { return low_bf16(bf16_words(x)); }

// The nearest code of numbers less their floor and over their step. Ties to even; -0 becomes 0; what is no number stays
// so.
KVIST_ALWAYS_INLINE Floats nearest(Floats x, Floats floor, Floats factor) {
    const Floats magic = all_floats(kMagic);  // from here on floats are whole numbers
    const Floats whole = ((x - floor) * factor + magic) - magic;
    return min(all_floats(15), max(all_floats(0), whole));
}

// The sum of `count` terms, two at least: the upper half onto the lower, again and again.
template <typename Term>
inline Floats paired_sum(std::size_t count, float* sums, Term term) {
    std::size_t half = 1;
    while (2 * half < count) half *= 2;
    const std::size_t pairs = count - half;
    for (std::size_t i = 0; i < pairs; ++i) store(sums + i * kLanes, term(i) + term(half + i));
    for (std::size_t i = pairs; i < half; ++i) store(sums + i * kLanes, term(i));
    for (half /= 2; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) {
            store(sums + i * kLanes, load_lanes(sums, i) + load_lanes(sums, half + i));
        }
    }
    return load_lanes(sums, 0);
}

// A bit for each lane in which both are finite.
inline std::uint32_t finite_lanes(Floats a, Floats b) {
    const Ints size = all_ints(0x7FFFFFFF);
    std::int32_t largest[kLanes];
    store(largest, max_unsigned(bits_of(a) & size, bits_of(b) & size));
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < kLanes; ++i) {
        bits |= (static_cast<std::uint32_t>(largest[i]) < kInfinityBits ? 1u : 0u) << i;
    }
    return bits;
}

inline Fit fit_int4(const FitScratch& scratch, std::size_t dims) {
    const float* z = scratch.z;
    Floats low = load_lanes(z, 0), high = low;
    for (std::size_t i = 1; i < dims; ++i) {
        const Floats x = load_lanes(z, i);
        low = min(x, low);
        high = max(x, high);
    }
    low = low + all_floats(0);  // not -0, or the order of the dims would show
    Floats step = as_bf16((high - low) / all_floats(15)), floor = as_bf16(low);
    Fit fit;
    fit.finite = finite_lanes(step, floor);
    step = select(less(step, all_floats(kLeastStep)), all_floats(0), step);

    const Floats factor = inverse(step);
    const Floats count = all_floats(static_cast<float>(dims));
    for (std::size_t i = 0; i < dims; ++i) {
        store(scratch.codes + i * kLanes, nearest(load_lanes(z, i), floor, factor));
    }
    const auto code_of = [&](std::size_t i) { return load_lanes(scratch.codes, i); };
    const auto z_of = [&](std::size_t i) { return load_lanes(z, i); };
    const Floats mean_code = paired_sum(dims, scratch.sums, code_of) / count;
    const Floats mean = paired_sum(dims, scratch.sums, z_of) / count;
    const Floats joint = paired_sum(dims, scratch.sums, [&](std::size_t i) {
        return (code_of(i) - mean_code) * (z_of(i) - mean);
    });
    const Floats spread = paired_sum(dims, scratch.sums, [&](std::size_t i) {
        const Floats centred = code_of(i) - mean_code;
        return centred * centred;
    });
    const Floats slope = as_bf16(joint / max(all_floats(1), spread));
    const Floats base = as_bf16(mean - slope * mean_code);
    const Floats slope_factor = inverse(slope);
    const Floats fitted_error = paired_sum(dims, scratch.sums, [&](std::size_t i) {
        const Floats x = z_of(i), error = base + nearest(x, base, slope_factor) * slope - x;
        return error * error;
    });
    const Floats error = paired_sum(dims, scratch.sums, [&](std::size_t i) {
        const Floats off = floor + code_of(i) * step - z_of(i);
        return off * off;
    });
    // A slope that is too small to divide by is no better.
    const Floats allowed = select(less(slope, all_floats(kLeastStep)), error, fitted_error);
    const LaneMask better = less(allowed, error);
    store(fit.step, select(better, slope, step));
    store(fit.floor, select(better, base, floor));
    return fit;
}

// --- int4: codes -----------------------------------------------------------------------------------------------------

// As `nearest`, of one number less its floor and over its step. What is no number stays so.
inline float nearest_code(float scaled) {
    const float code = (scaled + kMagic) - kMagic;
    const float above = code < 0 ? 0.0f : code;
    return above > 15 ? 15.0f : above;
}

// What is no number becomes 0.
inline std::uint8_t code_byte(float code) {
    return static_cast<std::uint8_t>(bits_of((code == code ? code : 0.0f) + kMagic) & 15u);
}

// The nearest codes of one group.
inline void nearest_int4(const float* y, std::size_t dims, float step, float floor, std::uint8_t* codes) {
    const float factor = inverse(step);
    for (std::size_t i = 0; i < dims; ++i) codes[i] = code_byte(nearest_code((y[i] - floor) * factor));
}

// One group of one vector, with factors of its own: dims stand one after another.
struct FedGroup {
    const float* y;
    const float* factors;  // [dims, dims]
    float* target;
    std::uint8_t* codes;
    float step, floor, step_inverse;
};

// Codes from the last dim to the first. The groups take turns, so that one computes while the others wait.
inline void feed_back_each(FedGroup* groups, std::size_t num_groups, std::size_t dims) {
    for (std::size_t dim = dims; dim-- > 0;) {
        for (std::size_t p = 0; p < num_groups; ++p) {
            const FedGroup& group = groups[p];
            const float* from = dim + 1 == dims ? group.y : group.target;
            const float code = nearest_code((from[dim] - group.floor) * group.step_inverse);
            group.codes[dim] = code_byte(code);
            const float error = group.floor + code * group.step - group.y[dim];
            // Whole vectors: what lies at `dim` and beyond is not looked at again.
            const float* row = group.factors + dim * dims;
            std::size_t i = 0;
            for (; i + kLanes <= dims && i < dim; i += kLanes) {
                store(group.target + i, load_floats(from + i) - load_floats(row + i) * all_floats(error));
            }
            for (; i < dim; ++i) group.target[i] = from[i] - row[i] * error;
        }
    }
}

// The same for 16 groups with the same factors, one to a lane. Words of 8 codes each, as the lanes of key codes hold
// them: [line, lane].
inline void feed_back_lanes(const FitScratch& scratch, const Fit& fit, const float* factors, std::size_t dims,
                            std::uint32_t* words) {
    const float* z = scratch.z;
    float* target = scratch.target;
    const Floats step = load_floats(fit.step), floor = load_floats(fit.floor), factor = inverse(step);
    const float* from = z;
    Ints lane_words = all_ints(0);
    for (std::size_t dim = dims; dim-- > 0;) {
        const Floats code = nearest(load_lanes(from, dim), floor, factor);
        const Floats error = floor + code * step - load_lanes(z, dim);
        const float* row = factors + dim * dims;
        for (std::size_t i = 0; i < dim; ++i) {
            store(target + i * kLanes, load_lanes(from, i) - all_floats(row[i]) * error);
        }
        from = target;

        const std::size_t in_lane = dim % 8;
        const auto shift = static_cast<int>(8 * (in_lane % kLaneBytes) + 4 * (in_lane / kLaneBytes));
        // What is no number becomes 0.
        const Floats number = max(code, all_floats(0)) + all_floats(kMagic);
        const Ints nibble = shift_left(bits_of(number) & all_ints(15), shift);
        lane_words = in_lane == 7 ? nibble : lane_words + nibble;
        if (in_lane == 0) store(reinterpret_cast<std::int32_t*>(words) + dim / 8 * kLanes, lane_words);
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
