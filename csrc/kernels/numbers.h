// Single numbers and their bits.
#pragma once

#include <cstdint>

namespace kvist::KVIST_ISA {
namespace {

constexpr std::uint32_t kInfinityBits = 0x7F800000u;
constexpr std::uint32_t kNanBits = 0x7FC00000u;
constexpr std::uint32_t kBf16NanBits = kNanBits >> 16;

inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float widened(std::uint16_t bf16) { return float_of(std::uint32_t{bf16} << 16); }

// Ties to even. What is no number has one pattern, whatever it was.
inline std::uint16_t bf16_bits(float x) {
    const std::uint32_t bits = bits_of(x);
    const std::uint32_t rounded_bits = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > kInfinityBits ? kBf16NanBits : rounded_bits);
}

}  // namespace
}  // namespace kvist::KVIST_ISA
