// Sums of products of codes: whole numbers of 8 bits or 4.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace kvist::KVIST_ISA {
namespace {

// --- sums of products of 8-bit codes ---
//
// A line of codes meets a unit: 4 codes that stand for all lanes. One of the two has signed codes, the other unsigned.
// Without an instruction for it the bytes are widened to words first, since the one that exists would saturate; the
// unit's codes may then have two bytes. Sums wrap around.

#if defined(KVIST_ISA_AVX512)

constexpr std::size_t kUnitWords = 1;  // of 4 bytes
// Whole numbers of two bytes are two units, of the high bytes and of the low ones.
constexpr bool kUnitsAreBytes = true;

struct Codes {
    __m512i bytes;
};

struct Unit {
    __m512i bytes;
};

inline Codes unsigned_codes(const std::uint8_t* line) { return {_mm512_loadu_si512(line)}; }
inline Codes signed_codes(const std::uint8_t* line) { return {_mm512_loadu_si512(line)}; }
inline Codes unsigned_codes(Ints line) { return {line.part[0]}; }
inline Unit load_unit(const std::int32_t* words) { return {_mm512_set1_epi32(*words)}; }

// Unsigned codes in the line, signed ones in the unit; and the other way round.
// As assembly, since GCC 12 copies the sums of the intrinsic twice in a loop and then spills them.
inline void add_products_of_unsigned(Ints& sum, Codes line, Unit unit) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.part[0]) : "v"(line.bytes), "v"(unit.bytes));
}
inline void add_products_of_signed(Ints& sum, Codes line, Unit unit) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.part[0]) : "v"(unit.bytes), "v"(line.bytes));
}

// The units of 16 codes from -128 to 127.
inline void store_signed_units(std::int32_t* words, const std::int32_t* codes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words), _mm512_cvtepi32_epi8(_mm512_loadu_si512(codes)));
}

// The units of 64 codes from 0 to 255.
inline void store_unsigned_units(std::int32_t* to, const Ints (&a)[4]) {
    const __m512i low = _mm512_packus_epi32(a[0].part[0], a[1].part[0]);
    const __m512i high = _mm512_packus_epi32(a[2].part[0], a[3].part[0]);
    // Packing stays within quarters of a register: four bytes of each of the four, and then the next.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
}

#else

constexpr std::size_t kUnitWords = 2;
// What meets a line of bytes may be of two bytes as well.
constexpr bool kUnitsAreBytes = false;

struct Codes {
    Ints even, odd;
};

struct Unit {
    IntPart even, odd;
};

inline Codes unsigned_codes(Ints line) {
    Codes codes;
    for (std::size_t i = 0; i < kParts; ++i) {
        codes.even.part[i] = even_unsigned(line.part[i]);
        codes.odd.part[i] = odd_unsigned(line.part[i]);
    }
    return codes;
}
inline Codes unsigned_codes(const std::uint8_t* line) { return unsigned_codes(load_ints(line)); }
inline Codes signed_codes(const std::uint8_t* bytes) {
    const Ints line = load_ints(bytes);
    Codes codes;
    for (std::size_t i = 0; i < kParts; ++i) {
        codes.even.part[i] = even_signed(line.part[i]);
        codes.odd.part[i] = odd_signed(line.part[i]);
    }
    return codes;
}
inline Unit load_unit(const std::int32_t* words) { return {int_all(words[0]), int_all(words[1])}; }

inline void add_products_of_unsigned(Ints& sum, Codes line, Unit unit) {
    for (std::size_t i = 0; i < kParts; ++i) {
        sum.part[i] = int_add(sum.part[i], int_add(multiply_words(line.even.part[i], unit.even),
                                                   multiply_words(line.odd.part[i], unit.odd)));
    }
}
inline void add_products_of_signed(Ints& sum, Codes line, Unit unit) { add_products_of_unsigned(sum, line, unit); }

// The units of 16 codes, each from -32768 to 32767: the first and third of four side by side, and the others.
inline void store_signed_units(std::int32_t* words, const std::int32_t* codes) {
    constexpr std::uint64_t kLowWords = 0x0000ffff0000ffff;
    for (std::size_t i = 0; i < 16; i += 4, words += kUnitWords) {
        std::uint64_t two[2];
        __builtin_memcpy(two, codes + i, sizeof two);
        two[0] = (two[0] & kLowWords) | (two[1] & kLowWords) << 16;
        __builtin_memcpy(words, two, sizeof two[0]);
    }
}
// The units of 64 codes from 0 to 32767.
inline void store_unsigned_units(std::int32_t* words, const Ints (&a)[4]) {
    for (std::size_t i = 0; i < 4; ++i) {
        std::int32_t codes[kLineLanes];
        store(codes, a[i]);
        store_signed_units(words + 4 * i * kUnitWords, codes);
    }
}

#endif

// --- sums of products of codes of 4 bits ---
//
// A line has 8 codes in each lane, 4 in the low nibbles and 4 in the high ones, from 0 to 15. Keys are taken as they are,
// with a unit of signed codes; values less 8, with one of unsigned codes, so that what is lost by rounding those counts
// less.

#if defined(KVIST_ISA_AVX2) || defined(KVIST_ISA_BASELINE)

// The instruction that would saturate for codes of 8 bits has room here, for units of bytes, and takes half as many steps.
constexpr bool kHasWordSums = true;

struct Nibbles {
    Ints bytes;
};
struct NibbleUnit {
    IntPart bytes;
};
constexpr std::size_t kNibbleUnitWords = 1;

inline Nibbles low_nibbles(Ints line) { return {line & all_ints(0x0f0f0f0f)}; }
inline Nibbles high_nibbles(Ints line) { return {shift_right<4>(line) & all_ints(0x0f0f0f0f)}; }
inline Nibbles less_eight(Nibbles of) {
    for (std::size_t i = 0; i < kParts; ++i) of.bytes.part[i] = bytes_sub(of.bytes.part[i], int_all(0x08080808));
    return of;
}
inline Nibbles low_value_nibbles(Ints line) { return less_eight(low_nibbles(line)); }
inline Nibbles high_value_nibbles(Ints line) { return less_eight(high_nibbles(line)); }
inline NibbleUnit load_nibble_unit(const std::int32_t* words) { return {int_all(*words)}; }
inline void add_products_of_keys(Ints& sums, Nibbles line, NibbleUnit unit) {
    for (std::size_t i = 0; i < kParts; ++i) {
        sums.part[i] = words_add(sums.part[i], multiply_bytes(line.bytes.part[i], unit.bytes));
    }
}
inline void add_products_of_values(Ints& sums, Nibbles line, NibbleUnit unit) {
    for (std::size_t i = 0; i < kParts; ++i) {
        sums.part[i] = words_add(sums.part[i], multiply_bytes(unit.bytes, line.bytes.part[i]));
    }
}
inline void add_products_in_words(Ints& sums, Ints line, std::int32_t unit) {
    add_products_of_keys(sums, {line}, load_nibble_unit(&unit));
}
// The sum of the two words of each lane.
inline Ints sum_words_of_lanes(Ints a) {
    KVIST_EACH_PART(Ints, multiply_words(a.part[i], int_all(0x00010001)));
}

#else

constexpr bool kHasWordSums = false;
inline void add_products_in_words(Ints&, Ints, std::int32_t) {}
inline Ints sum_words_of_lanes(Ints a) { return a; }

using Nibbles = Codes;
using NibbleUnit = Unit;
constexpr std::size_t kNibbleUnitWords = kUnitWords;

#if defined(KVIST_ISA_AVX512)
inline Nibbles low_nibbles(Ints line) { return {_mm512_and_si512(line.part[0], _mm512_set1_epi8(0x0f))}; }
inline Nibbles high_nibbles(Ints line) {
    return {_mm512_and_si512(_mm512_srli_epi16(line.part[0], 4), _mm512_set1_epi8(0x0f))};
}
// 16 times that, in one step of bits and without a subtraction.
inline Nibbles low_value_nibbles(Ints line) {
    return {_mm512_ternarylogic_epi32(_mm512_slli_epi16(line.part[0], 4), _mm512_set1_epi8(-16),
                                      _mm512_set1_epi8(-128), 0x6a)};
}
inline Nibbles high_value_nibbles(Ints line) {
    return {_mm512_ternarylogic_epi32(line.part[0], _mm512_set1_epi8(-16), _mm512_set1_epi8(-128), 0x6a)};
}
#else
inline Nibbles low_nibbles(Ints line) { return unsigned_codes(line & all_ints(0x0f0f0f0f)); }
inline Nibbles high_nibbles(Ints line) { return unsigned_codes(shift_right<4>(line) & all_ints(0x0f0f0f0f)); }
inline Nibbles less_eight(Nibbles of) {
    for (std::size_t i = 0; i < kParts; ++i) {
        of.even.part[i] = words_sub(of.even.part[i], int_all(0x00080008));
        of.odd.part[i] = words_sub(of.odd.part[i], int_all(0x00080008));
    }
    return of;
}
inline Nibbles low_value_nibbles(Ints line) { return less_eight(low_nibbles(line)); }
inline Nibbles high_value_nibbles(Ints line) { return less_eight(high_nibbles(line)); }
#endif
inline NibbleUnit load_nibble_unit(const std::int32_t* words) { return load_unit(words); }
inline void add_products_of_keys(Ints& sums, Nibbles line, NibbleUnit unit) {
    add_products_of_unsigned(sums, line, unit);
}
inline void add_products_of_values(Ints& sums, Nibbles line, NibbleUnit unit) {
    add_products_of_signed(sums, line, unit);
}

#endif

// What a value's unpacked code is, in codes.
#if defined(KVIST_ISA_AVX512)
constexpr float kValueNibble = 16;
#else
constexpr float kValueNibble = 1;
#endif

// Units of bytes: of 16 codes from -128 to 127, and of 64 codes from 0 to 255.
inline void store_signed_bytes(std::int32_t* words, const std::int32_t* codes) {
    std::int8_t bytes[kLineLanes];
    for (std::size_t i = 0; i < kLineLanes; ++i) bytes[i] = static_cast<std::int8_t>(codes[i]);
    __builtin_memcpy(words, bytes, sizeof bytes);
}
inline void store_unsigned_bytes(std::int32_t* words, const Ints (&a)[4]) {
#if defined(KVIST_ISA_AVX512)
    store_unsigned_units(words, a);
#else
    for (std::size_t i = 0; i < 4; ++i) store_line_as_bytes(words + 4 * i, a[i].part);
#endif
}

// After an addition: the compiler adds whole numbers in any order otherwise, and then holds more of them at once than there
// are registers.
inline void keep_order([[maybe_unused]] Ints& sum) {
#if defined(KVIST_ISA_AVX2) || defined(KVIST_ISA_BASELINE)
    for (std::size_t i = 0; i < kParts; ++i) __asm__("" : "+x"(sum.part[i]));
#endif
}

}  // namespace
}  // namespace kvist::KVIST_ISA
