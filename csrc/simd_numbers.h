// Numbers of 16 bits, and powers of two.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace kvist::KVIST_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x, through a polynomial, and exactly 1 for 0 and 0 below -126. `x` is at most 127, or no number.
template <int kDegree = 5>
KVIST_ALWAYS_INLINE Floats exp2(Floats x) {
    const Floats least = all_floats(-126.0f);
    const LaneMask underflows = less(x, least);
#if !defined(KVIST_ISA_AVX512)
    x = select(underflows, least, x);
#endif
    Floats whole;
    for (std::size_t i = 0; i < kParts; ++i) whole.part[i] = float_round(x.part[i]);
    const Floats rest = x - whole;
    // Exact at 0; off by 1e-7 of the result at most, before rounding, from -1/2 to 1/2, or by 1e-04.
    Floats power;
    if constexpr (kDegree == 5) {
        power = all_floats(1.326472630e-03f);
        power = fma(power, rest, all_floats(9.671513010e-03f));
        power = fma(power, rest, all_floats(5.550733749e-02f));
        power = fma(power, rest, all_floats(2.402224208e-01f));
        power = fma(power, rest, all_floats(6.931469776e-01f));
    } else {
        static_assert(kDegree == 3);
        power = all_floats(5.500893153e-02f);
        power = fma(power, rest, all_floats(2.422109648e-01f));
        power = fma(power, rest, all_floats(6.932829277e-01f));
    }
    power = fma(power, rest, all_floats(1.0f));
#if defined(KVIST_ISA_AVX512)
    return {{_mm512_maskz_scalef_ps(static_cast<LaneMask>(~underflows), power.part[0], whole.part[0])}};
#else
    return select(underflows, all_floats(0.0f), power * floats_of_bits(shift_left<23>(rounded(whole) + all_ints(127))));
#endif
}

// --- plain numbers, one of fp32 or two of bf16 to a lane ---

inline void load_numbers(const std::uint8_t* line, Floats (&numbers)[1]) {
    numbers[0] = floats_of_bits(load_ints(line));
}
// Products of bf16 numbers in fp32 take two instructions more for a line, and each of them half as long as the one that
// multiplies and sums pairs of bf16: Intel's cores start that every second cycle.
inline void load_numbers(const std::uint8_t* line, Floats (&numbers)[2]) {
    const Ints pairs = load_ints(line);
    numbers[0] = low_bf16(pairs);
    numbers[1] = high_bf16(pairs);
}

// --- 16 numbers of 16 bits ---

// Whether `fma` rounds once.
#if defined(KVIST_ISA_AVX512) || defined(KVIST_ISA_AVX2)
constexpr bool kFmaRoundsOnce = true;
#else
constexpr bool kFmaRoundsOnce = false;
#endif

inline Ints min_unsigned(Ints a, Ints b) { KVIST_EACH_PART(Ints, int_min_unsigned(a.part[i], b.part[i])); }
inline Ints load_words(const std::uint16_t* from) { KVIST_EACH_PART(Ints, int_load_words(from + i * kPartLanes)); }
inline Floats load_bf16(const std::uint16_t* from) { return low_bf16(load_words(from)); }

#if defined(KVIST_ISA_AVX512) || defined(KVIST_ISA_AVX2)
KVIST_ALWAYS_INLINE Floats load_halves(const std::uint16_t* from) {
    KVIST_EACH_PART(Floats, float_load_halves(from + i * kPartLanes));
}
#else
KVIST_ALWAYS_INLINE Floats load_halves(const std::uint16_t* from) {
    const Ints halves = load_words(from), size = halves & all_ints(0x7fff);
    const Ints sign = shift_left<16>(halves & all_ints(0x8000));
    // The exponent moves from a bias of 15 to one of 127, and once more to that of infinity and of what is no number.
    const Ints normal = shift_left<13>(size) + all_ints(112 << 23);
    Floats number = floats_of_bits(normal);
    number = select(greater(size, all_ints(0x7bff)), floats_of_bits(normal + all_ints(112 << 23)), number);
    number = select(greater(all_ints(0x0400), size), to_floats(size) * all_floats(0x1p-24f), number);
    return floats_of_bits(bits_of(number) + sign);
}
#endif

// The bits of bf16 in the low half of each lane, ties to even.
KVIST_ALWAYS_INLINE Ints bf16_words(Floats a) {
    const Ints bits = bits_of(a);
    // What is no number has one pattern, which rounding does not carry into the sign.
    const Ints size = min_unsigned(bits & all_ints(0x7fffffff), all_ints(0x7fc00000));
    const Ints odd = shift_right<16>(size) & all_ints(1);
    const Ints sign = shift_left<15>(shift_right<31>(bits));
    return shift_right<16>(size + all_ints(0x7fff) + odd) + sign;
}

KVIST_ALWAYS_INLINE void store_bf16(std::uint16_t* to, Floats a) {
    const Ints words = bf16_words(a);
#if defined(KVIST_ISA_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(words.part[0]));
#elif defined(KVIST_ISA_AVX2)
    const __m256i packed = _mm256_packus_epi32(words.part[0], words.part[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
#elif defined(KVIST_ISA_BASELINE)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(words.part[0], words.part[1]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm_packus_epi32(words.part[2], words.part[3]));
#else
    for (std::size_t i = 0; i < kLineLanes; ++i) {
        to[i] = static_cast<std::uint16_t>(words.part[i / kPartLanes][i % kPartLanes]);
    }
#endif
}

}  // namespace
}  // namespace kvist::KVIST_ISA
