// Reading memory as fast as it comes.
#include "kernels/kernels.h"
#include "simd.h"

namespace kvist::KVIST_ISA {

namespace {

// Enough independent sums that no load waits for an addition.
constexpr std::size_t kSums = 8;
constexpr std::size_t kStep = kSums * Words::kLanes;

// The hardware prefetcher stops at the end of each 4 KiB page; asking one page ahead keeps it fed across the border.
constexpr std::size_t kCacheLineWords = 8;
constexpr std::size_t kPrefetchWords = 4096 / sizeof(std::uint64_t);

}  // namespace

std::uint64_t sum_words(const std::uint64_t* words, std::size_t count) {
    Words sums[kSums];
    for (Words& sum : sums) sum = Words::zero();
    std::size_t i = 0;
    for (; i + kStep <= count; i += kStep) {
        for (std::size_t line = 0; line < kStep; line += kCacheLineWords) prefetch(words + i + line + kPrefetchWords);
        for (std::size_t s = 0; s < kSums; ++s) sums[s] = sums[s] + Words::load(words + i + s * Words::kLanes);
    }
    std::uint64_t total = 0;
    for (const Words& sum : sums) {
        std::uint64_t lanes[Words::kLanes];
        sum.store(lanes);
        for (std::uint64_t lane : lanes) total += lane;
    }
    for (; i < count; ++i) total += words[i];
    return total;
}

}  // namespace kvist::KVIST_ISA
