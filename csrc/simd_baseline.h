// x86-64-v2: a line is four registers. For simd.h alone, which says what is what.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvist::KVIST_ISA {
namespace {

struct Words {
    static constexpr std::size_t kLanes = 2;
    __m128i v;

    static Words zero() { return {_mm_setzero_si128()}; }
    static Words load(const std::uint64_t* from) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))}; }
    void store(std::uint64_t* to) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), v); }
    friend Words operator+(Words a, Words b) { return {_mm_add_epi64(a.v, b.v)}; }
};

using FloatPart = __m128;
using IntPart = __m128i;
constexpr std::size_t kPartLanes = 4;

inline FloatPart float_load(const float* from) { return _mm_loadu_ps(from); }
inline void float_store(float* to, FloatPart a) { _mm_storeu_ps(to, a); }
inline FloatPart float_all(float a) { return _mm_set1_ps(a); }
inline FloatPart float_add(FloatPart a, FloatPart b) { return _mm_add_ps(a, b); }
inline FloatPart float_sub(FloatPart a, FloatPart b) { return _mm_sub_ps(a, b); }
inline FloatPart float_mul(FloatPart a, FloatPart b) { return _mm_mul_ps(a, b); }
inline FloatPart float_div(FloatPart a, FloatPart b) { return _mm_div_ps(a, b); }
inline FloatPart float_max(FloatPart a, FloatPart b) { return _mm_max_ps(a, b); }
inline FloatPart float_min(FloatPart a, FloatPart b) { return _mm_min_ps(a, b); }
inline FloatPart float_fma(FloatPart a, FloatPart b, FloatPart c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
inline FloatPart float_round(FloatPart a) { return _mm_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline FloatPart float_from(IntPart a) { return _mm_cvtepi32_ps(a); }
inline FloatPart float_bits(IntPart a) { return _mm_castsi128_ps(a); }
inline IntPart int_bits(FloatPart a) { return _mm_castps_si128(a); }
inline IntPart int_rounded(FloatPart a) { return _mm_cvtps_epi32(a); }
inline IntPart int_load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline void int_store(void* to, IntPart a) { _mm_storeu_si128(static_cast<__m128i*>(to), a); }
inline IntPart int_all(std::int32_t a) { return _mm_set1_epi32(a); }
inline IntPart int_add(IntPart a, IntPart b) { return _mm_add_epi32(a, b); }
inline IntPart int_and(IntPart a, IntPart b) { return _mm_and_si128(a, b); }
inline IntPart int_max_unsigned(IntPart a, IntPart b) { return _mm_max_epu32(a, b); }
template <int kBits>
inline IntPart int_shift_left(IntPart a) {
    return _mm_slli_epi32(a, kBits);
}
inline IntPart int_shift_left(IntPart a, int bits) { return _mm_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
template <int kBits>
inline IntPart int_shift_right(IntPart a) {
    return _mm_srli_epi32(a, kBits);
}
inline IntPart even_unsigned(IntPart a) { return _mm_and_si128(a, _mm_set1_epi16(0xff)); }
inline IntPart odd_unsigned(IntPart a) { return _mm_srli_epi16(a, 8); }
inline IntPart even_signed(IntPart a) { return _mm_srai_epi16(_mm_slli_epi16(a, 8), 8); }
inline IntPart odd_signed(IntPart a) { return _mm_srai_epi16(a, 8); }
inline IntPart multiply_words(IntPart a, IntPart b) { return _mm_madd_epi16(a, b); }
inline IntPart words_add(IntPart a, IntPart b) { return _mm_add_epi16(a, b); }
inline IntPart bytes_sub(IntPart a, IntPart b) { return _mm_sub_epi8(a, b); }
inline IntPart multiply_bytes(IntPart a, IntPart b) { return _mm_maddubs_epi16(a, b); }
inline void store_line_as_bytes(void* to, const IntPart (&a)[4]) {
    const __m128i bytes = _mm_packus_epi16(_mm_packus_epi32(a[0], a[1]), _mm_packus_epi32(a[2], a[3]));
    _mm_storeu_si128(static_cast<__m128i*>(to), bytes);
}
inline FloatPart select_part(IntPart mask, FloatPart yes, FloatPart no) {
    return _mm_blendv_ps(no, yes, _mm_castsi128_ps(mask));
}
inline IntPart int_greater(IntPart a, IntPart b) { return _mm_cmpgt_epi32(a, b); }
inline IntPart float_less(FloatPart a, FloatPart b) { return _mm_castps_si128(_mm_cmplt_ps(a, b)); }
inline IntPart int_min_unsigned(IntPart a, IntPart b) { return _mm_min_epu32(a, b); }
inline IntPart int_load_words(const std::uint16_t* from) {
    return _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

}  // namespace
}  // namespace kvist::KVIST_ISA
