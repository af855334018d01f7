// The smallest vector wrapper that the kernels need, in the namespace of the instruction set that is being compiled.
// Intrinsics live only here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(KVIST_ISA_AVX512) || defined(KVIST_ISA_AVX2) || defined(KVIST_ISA_BASELINE)
#include <immintrin.h>
#elif !defined(KVIST_ISA_GENERIC)
#error "compile the kernels through CMakeLists.txt, which defines one KVIST_ISA_* for each instruction set"
#endif

namespace kvist::KVIST_ISA {
namespace {  // internal linkage: these must not be shared between instruction sets

#if defined(KVIST_ISA_AVX512)

struct Words {
    static constexpr std::size_t kLanes = 8;
    __m512i v;

    static Words zero() { return {_mm512_setzero_si512()}; }
    static Words load(const std::uint64_t* from) { return {_mm512_loadu_si512(from)}; }
    void store(std::uint64_t* to) const { _mm512_storeu_si512(to, v); }
    friend Words operator+(Words a, Words b) { return {_mm512_add_epi64(a.v, b.v)}; }
};

#elif defined(KVIST_ISA_AVX2)

struct Words {
    static constexpr std::size_t kLanes = 4;
    __m256i v;

    static Words zero() { return {_mm256_setzero_si256()}; }
    static Words load(const std::uint64_t* from) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))}; }
    void store(std::uint64_t* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
    friend Words operator+(Words a, Words b) { return {_mm256_add_epi64(a.v, b.v)}; }
};

#elif defined(KVIST_ISA_BASELINE)

struct Words {
    static constexpr std::size_t kLanes = 2;
    __m128i v;

    static Words zero() { return {_mm_setzero_si128()}; }
    static Words load(const std::uint64_t* from) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))}; }
    void store(std::uint64_t* to) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), v); }
    friend Words operator+(Words a, Words b) { return {_mm_add_epi64(a.v, b.v)}; }
};

#else

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

#endif

// Ask for a cache line. Any address is allowed, past the end of the data too.
inline void prefetch(const void* address) { __builtin_prefetch(address); }

}  // namespace
}  // namespace kvist::KVIST_ISA
