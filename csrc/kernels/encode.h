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

#include "kernels/lanes.h"

namespace kvist::KVIST_ISA {
namespace {

constexpr float kLeastStep = 0x1p-100f;
constexpr std::uint32_t kInfinityBits = 0x7F800000u;
constexpr std::uint32_t kNanBits = 0x7FC00000u;
constexpr std::uint32_t kBf16NanBits = kNanBits >> 16;
constexpr float kMagic = 0x1.8p23f;  // as in `rounded`: its last bits then hold the whole number

inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float widened(std::uint16_t bf16) { return float_of(std::uint32_t{bf16} << 16); }

// Ties to even. What is no number has one pattern, whatever it was.
inline std::uint16_t bf16_bits(float x) {
    const std::uint32_t bits = bits_of(x);
    const std::uint32_t rounded_bits = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > kInfinityBits ? kBf16NanBits : rounded_bits);
}

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

inline Lanes load_lanes(const float* z, std::size_t dim) { return Lanes::load(z + dim * kLanes); }

inline Lanes inverse(const Lanes& step) {
    return select(Lanes::all(0) < step, Lanes::all(1) / step, Lanes::all(0));
}

inline Lanes nearest(const Lanes& x, const Lanes& floor, const Lanes& factor) {
    return clamped(rounded((x - floor) * factor), 0, 15);
}

// The sum of `count` terms, two at least: the upper half onto the lower, again and again.
template <typename Term>
inline Lanes paired_sum(std::size_t count, float* sums, Term term) {
    std::size_t half = 1;
    while (2 * half < count) half *= 2;
    const std::size_t pairs = count - half;
    for (std::size_t i = 0; i < pairs; ++i) (term(i) + term(half + i)).store(sums + i * kLanes);
    for (std::size_t i = pairs; i < half; ++i) term(i).store(sums + i * kLanes);
    for (half /= 2; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) {
            (load_lanes(sums, i) + load_lanes(sums, half + i)).store(sums + i * kLanes);
        }
    }
    return load_lanes(sums, 0);
}

inline std::uint32_t lanes_of(const Mask& mask) {
    std::int32_t lanes[kLanes];
    __builtin_memcpy(lanes, &mask, sizeof lanes);
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < kLanes; ++i) bits |= static_cast<std::uint32_t>(lanes[i] & 1) << i;
    return bits;
}

inline Fit fit_int4(const FitScratch& scratch, std::size_t dims) {
    const float* z = scratch.z;
    Lanes low = load_lanes(z, 0), high = low;
    for (std::size_t i = 1; i < dims; ++i) {
        const Lanes x = load_lanes(z, i);
        low = least(x, low);
        high = greatest(x, high);
    }
    low = low + Lanes::all(0);  // not -0, or the order of the dims would show
    Lanes step = as_bf16((high - low) / Lanes::all(15)), floor = as_bf16(low);
    const Lanes infinity = Lanes::all(__builtin_inff());
    const Mask finite = (step < infinity) & (floor < infinity) & (Lanes::all(-__builtin_inff()) < floor);
    step = select(step < Lanes::all(kLeastStep), Lanes::all(0), step);

    const Lanes factor = inverse(step);
    const Lanes count = Lanes::all(static_cast<float>(dims));
    for (std::size_t i = 0; i < dims; ++i) {
        nearest(load_lanes(z, i), floor, factor).store(scratch.codes + i * kLanes);
    }
    const auto code_of = [&](std::size_t i) { return load_lanes(scratch.codes, i); };
    const auto z_of = [&](std::size_t i) { return load_lanes(z, i); };
    const Lanes mean_code = paired_sum(dims, scratch.sums, code_of) / count;
    const Lanes mean = paired_sum(dims, scratch.sums, z_of) / count;
    const Lanes joint = paired_sum(dims, scratch.sums, [&](std::size_t i) {
        return (code_of(i) - mean_code) * (z_of(i) - mean);
    });
    const Lanes spread = paired_sum(dims, scratch.sums, [&](std::size_t i) {
        const Lanes centred = code_of(i) - mean_code;
        return centred * centred;
    });
    const Lanes slope = as_bf16(joint / greatest(Lanes::all(1), spread));
    const Lanes base = as_bf16(mean - slope * mean_code);
    const Lanes slope_factor = inverse(slope);
    const Lanes fitted_error = paired_sum(dims, scratch.sums, [&](std::size_t i) {
        const Lanes x = z_of(i), error = base + nearest(x, base, slope_factor) * slope - x;
        return error * error;
    });
    const Lanes error = paired_sum(dims, scratch.sums, [&](std::size_t i) {
        const Lanes off = floor + code_of(i) * step - z_of(i);
        return off * off;
    });
    const Mask better = (fitted_error < error) & (Lanes::all(kLeastStep) <= slope);

    Fit fit;
    select(better, slope, step).store(fit.step);
    select(better, base, floor).store(fit.floor);
    fit.finite = lanes_of(finite);
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
                (Lanes::load(from + i) - Lanes::load(row + i) * Lanes::all(error)).store(group.target + i);
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
    const Lanes step = Lanes::load(fit.step), floor = Lanes::load(fit.floor), factor = inverse(step);
    const float* from = z;
    WordVector lane_words[kLaneVectors] = {};
    for (std::size_t dim = dims; dim-- > 0;) {
        const Lanes code = nearest(load_lanes(from, dim), floor, factor);
        const Lanes error = floor + code * step - load_lanes(z, dim);
        const float* row = factors + dim * dims;
        for (std::size_t i = 0; i < dim; ++i) {
            (load_lanes(from, i) - Lanes::all(row[i]) * error).store(target + i * kLanes);
        }
        from = target;

        const std::size_t in_lane = dim % 8;
        const auto shift = static_cast<std::uint32_t>(8 * (in_lane % kLaneBytes) + 4 * (in_lane / kLaneBytes));
        const Lanes number = select(code == code, code, Lanes::all(0)) + Lanes::all(kMagic);
        for (std::size_t i = 0; i < kLaneVectors; ++i) {
            const WordVector nibble = (__builtin_bit_cast(WordVector, number.v[i]) & 15u) << shift;
            lane_words[i] = in_lane == 7 ? nibble : lane_words[i] | nibble;
        }
        if (in_lane == 0) __builtin_memcpy(words + dim / 8 * kLanes, lane_words, sizeof lane_words);
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
