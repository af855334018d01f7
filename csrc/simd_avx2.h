// AVX2 with FMA: a line is two registers. For simd.h alone, which says what is what.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvist::KVIST_ISA {
namespace {

struct Words {
    static constexpr std::size_t kLanes = 4;
    __m256i v;

    static Words zero() { return {_mm256_setzero_si256()}; }
    static Words load(const std::uint64_t* from) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
    }
    void store(std::uint64_t* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
    friend Words operator+(Words a, Words b) { return {_mm256_add_epi64(a.v, b.v)}; }
};

using FloatPart = __m256;
using IntPart = __m256i;
constexpr std::size_t kPartLanes = 8;

inline FloatPart float_load(const float* from) { return _mm256_loadu_ps(from); }
inline void float_store(float* to, FloatPart a) { _mm256_storeu_ps(to, a); }
inline FloatPart float_all(float a) { return _mm256_set1_ps(a); }
inline FloatPart float_add(FloatPart a, FloatPart b) { return _mm256_add_ps(a, b); }
inline FloatPart float_sub(FloatPart a, FloatPart b) { return _mm256_sub_ps(a, b); }
inline FloatPart float_mul(FloatPart a, FloatPart b) { return _mm256_mul_ps(a, b); }
inline FloatPart float_div(FloatPart a, FloatPart b) { return _mm256_div_ps(a, b); }
inline FloatPart float_max(FloatPart a, FloatPart b) { return _mm256_max_ps(a, b); }
inline FloatPart float_min(FloatPart a, FloatPart b) { return _mm256_min_ps(a, b); }
inline FloatPart float_fma(FloatPart a, FloatPart b, FloatPart c) { return _mm256_fmadd_ps(a, b, c); }
inline FloatPart float_round(FloatPart a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline FloatPart float_from(IntPart a) { return _mm256_cvtepi32_ps(a); }
inline FloatPart float_bits(IntPart a) { return _mm256_castsi256_ps(a); }
inline IntPart int_bits(FloatPart a) { return _mm256_castps_si256(a); }
inline IntPart int_rounded(FloatPart a) { return _mm256_cvtps_epi32(a); }
inline IntPart int_load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void int_store(void* to, IntPart a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }
inline IntPart int_all(std::int32_t a) { return _mm256_set1_epi32(a); }
inline IntPart int_add(IntPart a, IntPart b) { return _mm256_add_epi32(a, b); }
inline IntPart int_and(IntPart a, IntPart b) { return _mm256_and_si256(a, b); }
inline IntPart int_max_unsigned(IntPart a, IntPart b) { return _mm256_max_epu32(a, b); }
template <int kBits>
inline IntPart int_shift_left(IntPart a) {
    return _mm256_slli_epi32(a, kBits);
}
inline IntPart int_shift_left(IntPart a, int bits) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
template <int kBits>
inline IntPart int_shift_right(IntPart a) {
    return _mm256_srli_epi32(a, kBits);
}
// Of 16 bits each: the parts of bytes that a product of words takes.
inline IntPart even_unsigned(IntPart a) { return _mm256_and_si256(a, _mm256_set1_epi16(0xff)); }
inline IntPart odd_unsigned(IntPart a) { return _mm256_srli_epi16(a, 8); }
inline IntPart even_signed(IntPart a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
inline IntPart odd_signed(IntPart a) { return _mm256_srai_epi16(a, 8); }
inline IntPart multiply_words(IntPart a, IntPart b) { return _mm256_madd_epi16(a, b); }
inline IntPart words_add(IntPart a, IntPart b) { return _mm256_add_epi16(a, b); }
inline IntPart bytes_sub(IntPart a, IntPart b) { return _mm256_sub_epi8(a, b); }
// The first has unsigned bytes, the second signed ones; sums of two products, in words.
inline IntPart multiply_bytes(IntPart a, IntPart b) { return _mm256_maddubs_epi16(a, b); }
// 16 numbers from 0 to 255.
inline void store_line_as_bytes(void* to, const IntPart (&a)[2]) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a[0], a[1]), 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(static_cast<__m128i*>(to), bytes);
}
inline FloatPart select_part(IntPart mask, FloatPart yes, FloatPart no) {
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(mask));
}
inline IntPart int_greater(IntPart a, IntPart b) { return _mm256_cmpgt_epi32(a, b); }
inline IntPart float_less(FloatPart a, FloatPart b) { return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline IntPart int_min_unsigned(IntPart a, IntPart b) { return _mm256_min_epu32(a, b); }
inline FloatPart float_load_halves(const std::uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline IntPart int_load_words(const std::uint16_t* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

}  // namespace
}  // namespace kvist::KVIST_ISA
