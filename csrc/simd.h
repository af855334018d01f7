// The smallest vector wrapper that the kernels need, in the namespace of the instruction set that is being compiled.
// `simd_lanes.h`, `simd_numbers.h` and `simd_codes.h` add to it; intrinsics live only in these.
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

// For what a call would cost too much: all vectors of a loop would go through memory, and where a line takes several
// registers, arguments and results do. So for every function of lines that compilers may find too long.
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

// --- masks of lanes ---

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

#endif

// Ask for a cache line. Any address is allowed, past the end of the data too.
inline void prefetch(const void* address) { __builtin_prefetch(address); }
// The same into the second cache, of which more can be on their way at once.
inline void prefetch_far(const void* address) { __builtin_prefetch(address, 0, 2); }

}  // namespace
}  // namespace kvist::KVIST_ISA
