// What is read later, asked for in time.
//
// Reading takes longer than computing, so memory must be kept busy while scores become weights, too. Lines are asked
// for wherever there is work, in the order in which they will be read. They come into the second-level cache: measured,
// that is faster than to ask for them as far as the first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "page_layout.h"
#include "simd.h"

namespace kvist::KVIST_ISA {
namespace {

// The lines of one split after the other: the keys of each page, then the values of each page.
class Ahead {
public:
    // Where pages have the KV head in question; null where a page is not seen.
    struct Heads {
        const std::uint8_t* of[kSplitPages] = {};
    };

    explicit Ahead(const LayerPages& layer) : values_(layer.value_codes), bytes_(layer.head_bytes) {}

    // A split is worked on from now on, and then `next`. The split was the `next` before, if there was any.
    void begin(const Heads& heads, const Heads& next) {
        heads_[0] = heads;
        heads_[1] = next;
        if (place_ < kRegions) at_ = stop_;
        place_ = place_ < kRegions ? 0 : place_ - kRegions;
        if (at_ == stop_) find();
    }

    // The keys or the values of a page of the split are read from now on: what is asked for comes behind them.
    void read_keys(std::size_t page) { read(page); }
    void read_values(std::size_t page) { read(kSplitPages + page); }

    // Ask for some lines, of one region.
    template <std::size_t kCount>
    void ask() {
        if (at_ == stop_) return;
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kCount; ++i) prefetch_far(at_ + i * kLineBytes);
        at_ += kCount * kLineBytes;
        if (at_ >= stop_) {
            ++place_;
            find();
        }
    }

    // Lines of keys and values of a page.
    std::size_t page_lines() const { return bytes_ / kLineBytes; }

private:
    static constexpr std::size_t kRegions = 2 * kSplitPages;
    // How many regions lie between what is read and what is asked for, at the least.
    static constexpr std::size_t kLead = 2;

    void read(std::size_t region) {
        if (place_ >= region + kLead) return;
        place_ = region + kLead;
        find();
    }

    // The next region from `place_` on that there is.
    void find() {
        at_ = stop_;
        for (; place_ < 2 * kRegions; ++place_) {
            const std::uint8_t* head = heads_[place_ / kRegions].of[place_ % kSplitPages];
            if (head == nullptr) continue;
            const bool is_keys = place_ % kRegions < kSplitPages;
            at_ = head + (is_keys ? 0 : values_);
            stop_ = head + (is_keys ? values_ : bytes_);
            return;
        }
    }

    std::size_t values_, bytes_;
    Heads heads_[2];
    std::size_t place_ = 0;  // of the region that is asked for: of the split, then of the next one
    const std::uint8_t* at_ = nullptr;
    const std::uint8_t* stop_ = nullptr;
};

// Beside the reading of a line of each of kTiles tiles: for as many lines, but for one of eight, which is left to other
// work.
template <std::size_t kTiles>
inline void ask_beside(Ahead& ahead, std::size_t line) {
    if (line % (8 / kTiles) != 0) {
        ahead.ask<kTiles>();
    } else if constexpr (kTiles > 1) {
        ahead.ask<kTiles - 1>();
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
