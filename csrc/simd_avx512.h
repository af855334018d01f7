// AVX-512: a line is one register. For simd.h alone, which says what is what.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvist::KVIST_ISA {
namespace {

struct Words {
    static constexpr std::size_t kLanes = 8;
    __m512i v;

    static Words zero() { return {_mm512_setzero_si512()}; }
    static Words load(const std::uint64_t* from) { return {_mm512_loadu_si512(from)}; }
    void store(std::uint64_t* to) const { _mm512_storeu_si512(to, v); }
    friend Words operator+(Words a, Words b) { return {_mm512_add_epi64(a.v, b.v)}; }
};

using FloatPart = __m512;
using IntPart = __m512i;
constexpr std::size_t kPartLanes = 16;

inline FloatPart float_load(const float* from) { return _mm512_loadu_ps(from); }
inline void float_store(float* to, FloatPart a) { _mm512_storeu_ps(to, a); }
inline FloatPart float_all(float a) { return _mm512_set1_ps(a); }
inline FloatPart float_add(FloatPart a, FloatPart b) { return _mm512_add_ps(a, b); }
inline FloatPart float_sub(FloatPart a, FloatPart b) { return _mm512_sub_ps(a, b); }
inline FloatPart float_mul(FloatPart a, FloatPart b) { return _mm512_mul_ps(a, b); }
inline FloatPart float_div(FloatPart a, FloatPart b) { return _mm512_div_ps(a, b); }
inline FloatPart float_max(FloatPart a, FloatPart b) { return _mm512_max_ps(a, b); }
inline FloatPart float_min(FloatPart a, FloatPart b) { return _mm512_min_ps(a, b); }
inline FloatPart float_fma(FloatPart a, FloatPart b, FloatPart c) { return _mm512_fmadd_ps(a, b, c); }
inline FloatPart float_round(FloatPart a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline FloatPart float_from(IntPart a) { return _mm512_cvtepi32_ps(a); }
inline FloatPart float_bits(IntPart a) { return _mm512_castsi512_ps(a); }
inline IntPart int_bits(FloatPart a) { return _mm512_castps_si512(a); }
inline IntPart int_rounded(FloatPart a) { return _mm512_cvtps_epi32(a); }
inline IntPart int_load(const void* from) { return _mm512_loadu_si512(from); }
inline void int_store(void* to, IntPart a) { _mm512_storeu_si512(to, a); }
inline IntPart int_all(std::int32_t a) { return _mm512_set1_epi32(a); }
inline IntPart int_add(IntPart a, IntPart b) { return _mm512_add_epi32(a, b); }
inline IntPart int_and(IntPart a, IntPart b) { return _mm512_and_si512(a, b); }
inline IntPart int_max_unsigned(IntPart a, IntPart b) { return _mm512_max_epu32(a, b); }
template <int kBits>
inline IntPart int_shift_left(IntPart a) {
    return _mm512_slli_epi32(a, kBits);
}
inline IntPart int_shift_left(IntPart a, int bits) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
template <int kBits>
inline IntPart int_shift_right(IntPart a) {
    return _mm512_srli_epi32(a, kBits);
}
inline IntPart int_min_unsigned(IntPart a, IntPart b) { return _mm512_min_epu32(a, b); }
// 16 fp16 numbers.
inline FloatPart float_load_halves(const std::uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline IntPart int_load_words(const std::uint16_t* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

}  // namespace
}  // namespace kvist::KVIST_ISA
