// What crosses lanes: sums and largest of a line, alternate numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace kvist::KVIST_ISA {
namespace {

#if !defined(KVIST_ISA_GENERIC)
inline float sum_of_four(__m128 four) {
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
#endif

#if defined(KVIST_ISA_AVX512)

inline bool is_less_anywhere(Floats a, Floats b) { return less(a, b) != 0; }
inline float first_lane(Floats a) { return _mm512_cvtss_f32(a.part[0]); }
inline float max_lane(Floats a) { return _mm512_reduce_max_ps(a.part[0]); }
inline std::uint32_t max_lane_unsigned(Ints a) { return _mm512_reduce_max_epu32(a.part[0]); }
inline float sum_lanes(Floats a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.part[0]), _mm512_extractf32x8_ps(a.part[0], 1));
    return sum_of_four(_mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)));
}

// `sum_lanes` of each of four.
inline void store_sums_of_lanes(float* to, Floats a, Floats b, Floats c, Floats d) {
    const auto halves_added = [](Floats x, Floats y) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(x.part[0], y.part[0], 0x44),
                             _mm512_shuffle_f32x4(x.part[0], y.part[0], 0xee));
    };
    const __m512 ab = halves_added(a, b), cd = halves_added(c, d);
    __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    four = _mm512_add_ps(four, _mm512_permute_ps(four, 0x0e));
    four = _mm512_add_ps(four, _mm512_movehdup_ps(four));
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, four)));
}

// Of 32 numbers the first, the third and so on, and the others.
inline void load_alternate(const float* from, Floats& even, Floats& odd) {
    const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + kLineLanes);
    const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = {{_mm512_permutex2var_ps(low, first, high)}};
    odd = {{_mm512_permutex2var_ps(low, _mm512_add_epi32(first, _mm512_set1_epi32(1)), high)}};
}

// Of four lines, in the first four lanes. They are folded together, which takes half as long as each by itself.
inline __m128i max_lanes_of_four(const Ints* lines) {
    const auto folded = [](__m512i a, __m512i b) {
        return _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i first = folded(lines[0].part[0], lines[1].part[0]);
    const __m512i second = folded(lines[2].part[0], lines[3].part[0]);
    const __m512i sixteen =
        _mm512_max_epu32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m256i eight = _mm256_max_epu32(_mm512_castsi512_si256(sixteen), _mm512_extracti64x4_epi64(sixteen, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
}
// Lane i is the largest of line i; lanes without a line are zero.
template <std::size_t kLines>
inline Ints max_lanes_unsigned(const Ints (&lines)[kLines]) {
    static_assert(kLines % 4 == 0 && kLines <= kLineLanes);
    __m512i found = _mm512_zextsi128_si512(max_lanes_of_four(lines));
    if constexpr (kLines > 4) found = _mm512_inserti32x4(found, max_lanes_of_four(lines + 4), 1);
    if constexpr (kLines > 8) found = _mm512_inserti32x4(found, max_lanes_of_four(lines + 8), 2);
    if constexpr (kLines > 12) found = _mm512_inserti32x4(found, max_lanes_of_four(lines + 12), 3);
    return {{found}};
}

#else

inline bool is_less_anywhere(Floats a, Floats b) {
    std::int32_t lanes[kLineLanes];
    const LaneMask mask = less(a, b);
    for (std::size_t i = 0; i < kParts; ++i) int_store(lanes + i * kPartLanes, mask.part[i]);
    std::int32_t any = 0;
    for (std::int32_t lane : lanes) any |= lane;
    return any != 0;
}
inline float first_lane(Floats a) {
    float lanes[kPartLanes];
    float_store(lanes, a.part[0]);
    return lanes[0];
}
inline float max_lane(Floats a) {
    FloatPart most = a.part[0];
    for (std::size_t i = 1; i < kParts; ++i) most = float_max(most, a.part[i]);
    float lanes[kPartLanes];
    float_store(lanes, most);
    float greatest = lanes[0];
    for (std::size_t i = 1; i < kPartLanes; ++i) greatest = lanes[i] > greatest ? lanes[i] : greatest;
    return greatest;
}
inline std::uint32_t max_lane_unsigned(Ints a) {
    IntPart most = a.part[0];
    for (std::size_t i = 1; i < kParts; ++i) most = int_max_unsigned(most, a.part[i]);
    std::uint32_t lanes[kPartLanes];
    int_store(lanes, most);
    std::uint32_t greatest = lanes[0];
    for (std::size_t i = 1; i < kPartLanes; ++i) greatest = lanes[i] > greatest ? lanes[i] : greatest;
    return greatest;
}
inline float sum_lanes(Floats a) {
    FloatPart total = a.part[0];
    for (std::size_t i = 1; i < kParts; ++i) total = float_add(total, a.part[i]);
#if defined(KVIST_ISA_AVX2)
    return sum_of_four(_mm_add_ps(_mm256_castps256_ps128(total), _mm256_extractf128_ps(total, 1)));
#elif defined(KVIST_ISA_BASELINE)
    return sum_of_four(total);
#else
    float lanes[kPartLanes];
    float_store(lanes, total);
    for (std::size_t half = kPartLanes / 2; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
#endif
}
inline void store_sums_of_lanes(float* to, Floats a, Floats b, Floats c, Floats d) {
    to[0] = sum_lanes(a);
    to[1] = sum_lanes(b);
    to[2] = sum_lanes(c);
    to[3] = sum_lanes(d);
}
inline void load_alternate(const float* from, Floats& even, Floats& odd) {
    float lanes[2][kLineLanes];
    for (std::size_t i = 0; i < kLineLanes; ++i) {
        lanes[0][i] = from[2 * i];
        lanes[1][i] = from[2 * i + 1];
    }
    even = load_floats(lanes[0]);
    odd = load_floats(lanes[1]);
}

template <std::size_t kLines>
inline Ints max_lanes_unsigned(const Ints (&lines)[kLines]) {
    static_assert(kLines % 4 == 0 && kLines <= kLineLanes);
    std::uint32_t found[kLineLanes] = {};
    for (std::size_t i = 0; i < kLines; ++i) found[i] = max_lane_unsigned(lines[i]);
    return load_ints(found);
}

#endif

inline std::int32_t sum_lanes(Ints a) {
#if defined(KVIST_ISA_AVX512)
    return _mm512_reduce_add_epi32(a.part[0]);
#else
    IntPart total = a.part[0];
    for (std::size_t i = 1; i < kParts; ++i) total = int_add(total, a.part[i]);
    std::int32_t lanes[kPartLanes], sum = 0;
    int_store(lanes, total);
    for (std::int32_t lane : lanes) sum += lane;
    return sum;
#endif
}

}  // namespace
}  // namespace kvist::KVIST_ISA
