// Sixteen floats side by side, as many as a line of a page has lanes, at every instruction set: the same operations in
// the same order, so the same bits. The vectors are GCC's and Clang's own, as wide as the registers; no intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>

#include "page_layout.h"

namespace kvist::KVIST_ISA {
namespace {  // internal linkage: these must not be shared between instruction sets

#if defined(KVIST_ISA_AVX512)
constexpr std::size_t kVectorBytes = 64;
#elif defined(KVIST_ISA_AVX2)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

constexpr std::size_t kLaneVectors = kLineBytes / kVectorBytes;

typedef float FloatVector __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t IntVector __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t WordVector __attribute__((vector_size(kVectorBytes)));

// The same in memory, aligned as a float is. (Deduced types lose that: no `auto` for it.)
typedef float LooseVector __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
static_assert(alignof(LooseVector) == alignof(float));

struct Mask {
    IntVector v[kLaneVectors];  // -1 where it holds, else 0
};

struct Lanes {
    FloatVector v[kLaneVectors];

    static Lanes load(const float* from) {
        const LooseVector* vectors = reinterpret_cast<const LooseVector*>(from);
        Lanes lanes;
        for (std::size_t i = 0; i < kLaneVectors; ++i) lanes.v[i] = vectors[i];
        return lanes;
    }
    static Lanes all(float x) {
        Lanes lanes;
        for (FloatVector& v : lanes.v) v = x - FloatVector{};
        return lanes;
    }
    void store(float* to) const {
        LooseVector* vectors = reinterpret_cast<LooseVector*>(to);
        for (std::size_t i = 0; i < kLaneVectors; ++i) vectors[i] = v[i];
    }
};

#define KVIST_LANES_OPERATOR(symbol, Result)                                                             \
    inline Result operator symbol(const Lanes& a, const Lanes& b) {                                      \
        Result result;                                                                                   \
        for (std::size_t i = 0; i < kLaneVectors; ++i) result.v[i] = a.v[i] symbol b.v[i];               \
        return result;                                                                                   \
    }
KVIST_LANES_OPERATOR(+, Lanes)
KVIST_LANES_OPERATOR(-, Lanes)
KVIST_LANES_OPERATOR(*, Lanes)
KVIST_LANES_OPERATOR(/, Lanes)
KVIST_LANES_OPERATOR(<, Mask)
KVIST_LANES_OPERATOR(<=, Mask)
KVIST_LANES_OPERATOR(==, Mask)
#undef KVIST_LANES_OPERATOR

inline Mask operator&(const Mask& a, const Mask& b) {
    Mask result;
    for (std::size_t i = 0; i < kLaneVectors; ++i) result.v[i] = a.v[i] & b.v[i];
    return result;
}

inline Lanes select(const Mask& mask, const Lanes& yes, const Lanes& no) {
    Lanes result;
    for (std::size_t i = 0; i < kLaneVectors; ++i) result.v[i] = mask.v[i] ? yes.v[i] : no.v[i];
    return result;
}

// Where both are zero, or one is no number, the second.
inline Lanes least(const Lanes& a, const Lanes& b) { return select(a < b, a, b); }
inline Lanes greatest(const Lanes& a, const Lanes& b) { return select(b < a, a, b); }

// What is no number stays so.
inline Lanes clamped(const Lanes& x, float low, float high) {
    return least(Lanes::all(high), greatest(Lanes::all(low), x));
}

// To the nearest whole number, ties to even; beyond 2^22 anything that is about as large. -0 becomes 0.
inline Lanes rounded(const Lanes& x) {
    const Lanes magic = Lanes::all(0x1.8p23f);  // from here on floats are whole numbers
    return (x + magic) - magic;
}

// To the nearest number of bf16, ties to even. What is no number stays so.
inline Lanes as_bf16(const Lanes& x) {
    Lanes result;
    for (std::size_t i = 0; i < kLaneVectors; ++i) {
        const auto bits = __builtin_bit_cast(WordVector, x.v[i]);
        result.v[i] = __builtin_bit_cast(FloatVector, (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u);
    }
    return select(x == x, result, x);
}

}  // namespace
}  // namespace kvist::KVIST_ISA
