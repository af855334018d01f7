// The smallest vector wrapper that the kernels need, in the namespace of the instruction set that is being compiled.
// Intrinsics live only here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(KVIST_ISA_AVX512) || defined(KVIST_ISA_AVX2) || defined(KVIST_ISA_BASELINE)
// GCC 12 takes what these headers leave undefined on purpose for a mistake.
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif !defined(KVIST_ISA_GENERIC)
#error "compile the kernels through CMakeLists.txt, which defines one KVIST_ISA_* for each instruction set"
#endif

// `Words`: as many numbers of 8 bytes as a register holds. Parts: one register of 4-byte lanes.
#if defined(KVIST_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(KVIST_ISA_AVX2)
#include "simd_avx2.h"
#elif defined(KVIST_ISA_BASELINE)
#include "simd_baseline.h"
#else
#include "simd_generic.h"
#endif

// For what a call would cost too much: all vectors of a loop would go through memory.
#define KVIST_ALWAYS_INLINE inline __attribute__((always_inline))

namespace kvist::KVIST_ISA {
namespace {  // internal linkage: these must not be shared between instruction sets

// --- lines: 16 lanes of 4 bytes, in as many parts as the instruction set needs ---------------------------------------

constexpr std::size_t kLineLanes = 16;
constexpr std::size_t kParts = kLineLanes / kPartLanes;
constexpr std::size_t kLineRegisters = kParts;

struct Floats {
    FloatPart part[kParts];
};

struct Ints {
    IntPart part[kParts];
};

#define KVIST_EACH_PART(Result, expression)    \
    Result result;                             \
    for (std::size_t i = 0; i < kParts; ++i) { \
        result.part[i] = expression;           \
    }                                          \
    return result

inline Floats load_floats(const float* from) { KVIST_EACH_PART(Floats, float_load(from + i * kPartLanes)); }
inline Floats all_floats(float a) { KVIST_EACH_PART(Floats, float_all(a)); }
inline Floats operator+(Floats a, Floats b) { KVIST_EACH_PART(Floats, float_add(a.part[i], b.part[i])); }
inline Floats operator-(Floats a, Floats b) { KVIST_EACH_PART(Floats, float_sub(a.part[i], b.part[i])); }
inline Floats operator*(Floats a, Floats b) { KVIST_EACH_PART(Floats, float_mul(a.part[i], b.part[i])); }
inline Floats operator/(Floats a, Floats b) { KVIST_EACH_PART(Floats, float_div(a.part[i], b.part[i])); }
// Where one is no number, the second.
inline Floats max(Floats a, Floats b) { KVIST_EACH_PART(Floats, float_max(a.part[i], b.part[i])); }
inline Floats min(Floats a, Floats b) { KVIST_EACH_PART(Floats, float_min(a.part[i], b.part[i])); }
// a * b + c, rounded once where the instruction set can.
inline Floats fma(Floats a, Floats b, Floats c) { KVIST_EACH_PART(Floats, float_fma(a.part[i], b.part[i], c.part[i])); }
inline Floats to_floats(Ints a) { KVIST_EACH_PART(Floats, float_from(a.part[i])); }
inline Floats floats_of_bits(Ints a) { KVIST_EACH_PART(Floats, float_bits(a.part[i])); }
inline Ints bits_of(Floats a) { KVIST_EACH_PART(Ints, int_bits(a.part[i])); }
inline Ints rounded(Floats a) { KVIST_EACH_PART(Ints, int_rounded(a.part[i])); }
inline Ints load_ints(const void* from) {
    KVIST_EACH_PART(Ints, int_load(static_cast<const char*>(from) + i * kPartLanes * 4));
}
inline Ints all_ints(std::int32_t a) { KVIST_EACH_PART(Ints, int_all(a)); }
inline Ints operator+(Ints a, Ints b) { KVIST_EACH_PART(Ints, int_add(a.part[i], b.part[i])); }
inline Ints operator&(Ints a, Ints b) { KVIST_EACH_PART(Ints, int_and(a.part[i], b.part[i])); }
inline Ints max_unsigned(Ints a, Ints b) { KVIST_EACH_PART(Ints, int_max_unsigned(a.part[i], b.part[i])); }
template <int kBits>
inline Ints shift_left(Ints a) {
    KVIST_EACH_PART(Ints, int_shift_left<kBits>(a.part[i]));
}
template <int kBits>
inline Ints shift_right(Ints a) {
    KVIST_EACH_PART(Ints, int_shift_right<kBits>(a.part[i]));
}
inline Ints shift_left(Ints a, int bits) { KVIST_EACH_PART(Ints, int_shift_left(a.part[i], bits)); }
inline void store(float* to, Floats a) {
    for (std::size_t i = 0; i < kParts; ++i) float_store(to + i * kPartLanes, a.part[i]);
}
inline void store(std::int32_t* to, Ints a) {
    for (std::size_t i = 0; i < kParts; ++i) int_store(to + i * kPartLanes, a.part[i]);
}
// The fp32 numbers that are the low and the high bf16 half of each lane.
inline Floats low_bf16(Ints a) { return floats_of_bits(shift_left<16>(a)); }
inline Floats high_bf16(Ints a) { return floats_of_bits(a & all_ints(static_cast<std::int32_t>(0xffff0000))); }

// --- lanes apart ---

#if !defined(KVIST_ISA_GENERIC)
inline float sum_of_four(__m128 four) {
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
#endif

#if defined(KVIST_ISA_AVX512)

using LaneMask = __mmask16;

// The lanes from `first` to before `stop`, each from 0 to 16.
inline LaneMask lanes_between(std::size_t first, std::size_t stop) {
    return static_cast<LaneMask>(((1u << stop) - 1) & ~((1u << first) - 1));
}
inline LaneMask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.part[0], b.part[0], _CMP_LT_OQ); }
inline Floats select(LaneMask mask, Floats yes, Floats no) {
    return {{_mm512_mask_blend_ps(mask, no.part[0], yes.part[0])}};
}

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

// The units of 64 codes from 0 to 255.
inline void store_unsigned_units(std::int32_t* to, const Ints (&a)[4]) {
    const __m512i low = _mm512_packus_epi32(a[0].part[0], a[1].part[0]);
    const __m512i high = _mm512_packus_epi32(a[2].part[0], a[3].part[0]);
    // Packing stays within quarters of a register: four bytes of each of the four, and then the next.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
}

#else

using LaneMask = Ints;

inline Ints lane_numbers() {
    alignas(64) static constexpr std::int32_t kNumbers[kLineLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                                      8, 9, 10, 11, 12, 13, 14, 15};
    return load_ints(kNumbers);
}
inline Ints greater(Ints a, Ints b) { KVIST_EACH_PART(Ints, int_greater(a.part[i], b.part[i])); }
inline LaneMask lanes_between(std::size_t first, std::size_t stop) {
    const Ints lane = lane_numbers();
    return greater(lane, all_ints(static_cast<std::int32_t>(first) - 1)) &
           greater(all_ints(static_cast<std::int32_t>(stop)), lane);
}
inline LaneMask less(Floats a, Floats b) { KVIST_EACH_PART(Ints, float_less(a.part[i], b.part[i])); }
inline Floats select(LaneMask mask, Floats yes, Floats no) {
    KVIST_EACH_PART(Floats, select_part(mask.part[i], yes.part[i], no.part[i]));
}

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

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x, through a polynomial, and exactly 1 for 0 and 0 below -126. `x` is at most 127, or no number.
template <int kDegree = 5>
inline Floats exp2(Floats x) {
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
// 8 codes of 4 bits: the first 4 in the low nibbles, the others in the high ones.
inline Codes low_nibbles(Ints line) { return {_mm512_and_si512(line.part[0], _mm512_set1_epi8(0x0f))}; }
inline Codes high_nibbles(Ints line) {
    return {_mm512_and_si512(_mm512_srli_epi16(line.part[0], 4), _mm512_set1_epi8(0x0f))};
}
// What values make of them: 16 times the code less 8, in one step of bits and without a subtraction.
constexpr bool kCentresNibbles = true;
inline Codes low_value_nibbles(Ints line) {
    return {_mm512_ternarylogic_epi32(_mm512_slli_epi16(line.part[0], 4), _mm512_set1_epi8(-16),
                                      _mm512_set1_epi8(-128), 0x6a)};
}
inline Codes high_value_nibbles(Ints line) {
    return {_mm512_ternarylogic_epi32(line.part[0], _mm512_set1_epi8(-16), _mm512_set1_epi8(-128), 0x6a)};
}
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
inline Codes low_nibbles(Ints line) { return unsigned_codes(line & all_ints(0x0f0f0f0f)); }
inline Codes high_nibbles(Ints line) { return unsigned_codes(shift_right<4>(line) & all_ints(0x0f0f0f0f)); }
constexpr bool kCentresNibbles = false;
inline Codes low_value_nibbles(Ints line) { return low_nibbles(line); }
inline Codes high_value_nibbles(Ints line) { return high_nibbles(line); }
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

// --- sums of products of codes from 0 to 15 with signed ones, in words ---
//
// 16 products of codes up to 15 and 127 fit into a word: the instruction that saturates then does not, and takes half as
// many steps. Words hold the sums of 8 units.

#if defined(KVIST_ISA_AVX2) || defined(KVIST_ISA_BASELINE)

constexpr bool kHasWordSums = true;

inline void add_products_in_words(Ints& sums, Ints line, std::int32_t unit) {
    for (std::size_t i = 0; i < kParts; ++i) {
#if defined(KVIST_ISA_AVX2)
        sums.part[i] = _mm256_add_epi16(sums.part[i], _mm256_maddubs_epi16(line.part[i], int_all(unit)));
#else
        sums.part[i] = _mm_add_epi16(sums.part[i], _mm_maddubs_epi16(line.part[i], int_all(unit)));
#endif
    }
}
// The sum of the two words of each lane.
inline Ints sum_words_of_lanes(Ints a) {
    KVIST_EACH_PART(Ints, multiply_words(a.part[i], int_all(0x00010001)));
}

#else

constexpr bool kHasWordSums = false;
inline void add_products_in_words(Ints&, Ints, std::int32_t) {}
inline Ints sum_words_of_lanes(Ints a) { return a; }

#endif

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
inline Floats load_halves(const std::uint16_t* from) {
    KVIST_EACH_PART(Floats, float_load_halves(from + i * kPartLanes));
}
#else
inline Floats load_halves(const std::uint16_t* from) {
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
inline Ints bf16_words(Floats a) {
    const Ints bits = bits_of(a);
    // What is no number has one pattern, which rounding does not carry into the sign.
    const Ints size = min_unsigned(bits & all_ints(0x7fffffff), all_ints(0x7fc00000));
    const Ints odd = shift_right<16>(size) & all_ints(1);
    const Ints sign = shift_left<15>(shift_right<31>(bits));
    return shift_right<16>(size + all_ints(0x7fff) + odd) + sign;
}

inline void store_bf16(std::uint16_t* to, Floats a) {
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

// After an addition: the compiler adds whole numbers in any order otherwise, and then holds more of them at once than there
// are registers.
inline void keep_order([[maybe_unused]] Ints& sum) {
#if defined(KVIST_ISA_AVX2) || defined(KVIST_ISA_BASELINE)
    for (std::size_t i = 0; i < kParts; ++i) __asm__("" : "+x"(sum.part[i]));
#endif
}

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

#undef KVIST_EACH_PART

// Ask for a cache line. Any address is allowed, past the end of the data too.
inline void prefetch(const void* address) { __builtin_prefetch(address); }
// The same into the second cache, of which more can be on their way at once.
inline void prefetch_far(const void* address) { __builtin_prefetch(address, 0, 2); }

}  // namespace
}  // namespace kvist::KVIST_ISA
