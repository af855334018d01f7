// Any other instruction set: vectors that GCC and Clang have everywhere. For simd.h alone, which says what is what.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvist::KVIST_ISA {
namespace {

// Plain loops, which compilers turn into whatever vectors the architecture always has.
struct Words {
    static constexpr std::size_t kLanes = 2;
    std::uint64_t v[kLanes];

    static Words zero() { return {{0, 0}}; }
    static Words load(const std::uint64_t* from) { return {{from[0], from[1]}}; }
    void store(std::uint64_t* to) const {
        for (std::size_t i = 0; i < kLanes; ++i) to[i] = v[i];
    }
    friend Words operator+(Words a, Words b) { return {{a.v[0] + b.v[0], a.v[1] + b.v[1]}}; }
};

// The vectors that GCC and Clang have everywhere.
using FloatPart = float __attribute__((vector_size(16)));
using IntPart = std::int32_t __attribute__((vector_size(16)));
using UnsignedPart = std::uint32_t __attribute__((vector_size(16)));
using WordPart = std::int16_t __attribute__((vector_size(16)));
using UnsignedWordPart = std::uint16_t __attribute__((vector_size(16)));
constexpr std::size_t kPartLanes = 4;

inline FloatPart float_load(const float* from) {
    FloatPart a;
    __builtin_memcpy(&a, from, sizeof a);
    return a;
}
inline void float_store(float* to, FloatPart a) { __builtin_memcpy(to, &a, sizeof a); }
inline FloatPart float_all(float a) { return FloatPart{a, a, a, a}; }
inline FloatPart float_add(FloatPart a, FloatPart b) { return a + b; }
inline FloatPart float_sub(FloatPart a, FloatPart b) { return a - b; }
inline FloatPart float_mul(FloatPart a, FloatPart b) { return a * b; }
inline FloatPart float_div(FloatPart a, FloatPart b) { return a / b; }
inline FloatPart float_max(FloatPart a, FloatPart b) { return a > b ? a : b; }
inline FloatPart float_min(FloatPart a, FloatPart b) { return a < b ? a : b; }
inline FloatPart float_fma(FloatPart a, FloatPart b, FloatPart c) { return a * b + c; }
inline FloatPart float_from(IntPart a) { return __builtin_convertvector(a, FloatPart); }
inline FloatPart float_bits(IntPart a) { return reinterpret_cast<FloatPart>(a); }
inline IntPart int_bits(FloatPart a) { return reinterpret_cast<IntPart>(a); }
inline FloatPart float_round(FloatPart a) {
    // The addition drops what is behind the point; numbers of 2^23 and more, and what is none, are whole already.
    const FloatPart size = float_bits(int_bits(a) & 0x7fffffff), shift = float_all(8388608.0f);
    const FloatPart whole =
        float_bits(int_bits(size + shift - shift) | (int_bits(a) & static_cast<std::int32_t>(0x80000000)));
    return size < shift ? whole : a;
}
inline IntPart int_rounded(FloatPart a) {
    const FloatPart whole = float_round(a);
    const IntPart fits = (whole < float_all(2147483648.0f)) & (whole >= float_all(-2147483648.0f));
    return fits & __builtin_convertvector(float_bits(int_bits(whole) & fits), IntPart);
}
inline IntPart int_load(const void* from) {
    IntPart a;
    __builtin_memcpy(&a, from, sizeof a);
    return a;
}
inline void int_store(void* to, IntPart a) { __builtin_memcpy(to, &a, sizeof a); }
inline IntPart int_all(std::int32_t a) { return IntPart{a, a, a, a}; }
inline IntPart int_add(IntPart a, IntPart b) {
    return reinterpret_cast<IntPart>(reinterpret_cast<UnsignedPart>(a) + reinterpret_cast<UnsignedPart>(b));
}
inline IntPart int_and(IntPart a, IntPart b) { return a & b; }
inline IntPart int_max_unsigned(IntPart a, IntPart b) {
    return reinterpret_cast<UnsignedPart>(a) > reinterpret_cast<UnsignedPart>(b) ? a : b;
}
template <int kBits>
inline IntPart int_shift_left(IntPart a) {
    return a << kBits;
}
inline IntPart int_shift_left(IntPart a, int bits) { return a << bits; }
template <int kBits>
inline IntPart int_shift_right(IntPart a) {
    return reinterpret_cast<IntPart>(reinterpret_cast<UnsignedPart>(a) >> kBits);
}
inline IntPart even_unsigned(IntPart a) { return a & 0x00ff00ff; }
inline IntPart odd_unsigned(IntPart a) { return reinterpret_cast<IntPart>(reinterpret_cast<UnsignedWordPart>(a) >> 8); }
inline IntPart odd_signed(IntPart a) { return reinterpret_cast<IntPart>(reinterpret_cast<WordPart>(a) >> 8); }
inline IntPart even_signed(IntPart a) {
    return odd_signed(reinterpret_cast<IntPart>(reinterpret_cast<UnsignedWordPart>(a) << 8));
}
inline IntPart multiply_words(IntPart a, IntPart b) {
    // The low word of each lane, and the high one, in full width.
    const IntPart low = ((a << 16) >> 16) * ((b << 16) >> 16), high = (a >> 16) * (b >> 16);
    return low + high;
}
inline IntPart words_sub(IntPart a, IntPart b) {
    return reinterpret_cast<IntPart>(reinterpret_cast<UnsignedWordPart>(a) - reinterpret_cast<UnsignedWordPart>(b));
}
inline void store_line_as_bytes(void* to, const IntPart (&a)[4]) {
    std::uint8_t bytes[16];
    for (std::size_t i = 0; i < 16; ++i) bytes[i] = static_cast<std::uint8_t>(a[i / kPartLanes][i % kPartLanes]);
    __builtin_memcpy(to, bytes, sizeof bytes);
}
inline FloatPart select_part(IntPart mask, FloatPart yes, FloatPart no) { return mask != 0 ? yes : no; }
inline IntPart int_greater(IntPart a, IntPart b) { return a > b; }
inline IntPart float_less(FloatPart a, FloatPart b) { return a < b; }
inline IntPart int_min_unsigned(IntPart a, IntPart b) {
    return reinterpret_cast<UnsignedPart>(a) < reinterpret_cast<UnsignedPart>(b) ? a : b;
}
inline IntPart int_load_words(const std::uint16_t* from) { return IntPart{from[0], from[1], from[2], from[3]}; }

}  // namespace
}  // namespace kvist::KVIST_ISA
