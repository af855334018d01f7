// Weights: what a split's scores become, row by row.
#pragma once

#include <cstddef>

#include "kernels/attention_keys.h"
#include "simd_lanes.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {
namespace {

// tanh through 2^x: to about 1e-7, which scores of some ten do not feel.
KVIST_ALWAYS_INLINE Floats tanh(Floats x) {
    const Floats one = all_floats(1.0f), two = all_floats(2.0f);
    const Floats power = exp2(min(all_floats(126.0f), x * all_floats(2 * kLog2E)));
    const Floats quotient = one - two / (power + one);
    // Near 0 the quotient loses digits to the 1 that it is taken from, and a large cap multiplies what is lost. There
    // the first terms of the series are as good as they can be.
    const Floats square = x * x;
    Floats series = fma(square, all_floats(-17.0f / 315), all_floats(2.0f / 15));
    series = x * fma(square, fma(square, series, all_floats(-1.0f / 3)), one);
    return select(less(square, all_floats(1.0f / 16)), series, quotient);
}

// The lines of a row's scores in a split, of which it sees the slots from the first to before the last.
template <bool kSeesAll>
struct ScoreLines {
    static constexpr bool kAll = kSeesAll;
    std::size_t first_slot, stop_slot;

    std::size_t first() const { return kSeesAll ? 0 : first_slot / kLanes; }
    std::size_t stop() const { return kSeesAll ? kSplitSlots / kLanes : (stop_slot + kLanes - 1) / kLanes; }
    Floats seen(std::size_t line, Floats x, Floats hidden) const {
        if constexpr (kSeesAll) return x;
        const std::size_t start = line * kLanes;
        return select(lanes_between(first_slot > start ? first_slot - start : 0,
                                    stop_slot < start + kLanes ? stop_slot - start : kLanes),
                      x, hidden);
    }
};

// As many lines at once as pages have, so that none waits for the one before.
constexpr std::size_t kLinesAtOnce = kPageSlots / kLanes;
static_assert(kSplitSlots / kLanes % kLinesAtOnce == 0);

inline void cap_row(float softcap, float* scores, std::size_t first, std::size_t stop) {
    for (std::size_t line = first; line < stop; ++line) {
        const Floats x = load_floats(scores + line * kLanes);
        store(scores + line * kLanes, tanh(x * all_floats(1 / softcap)) * all_floats(softcap * kLog2E));
    }
}

// `visit(line, place)` for each line in turn, of those at once the places from 0 on.
template <bool kSeesAll, typename Visit>
inline void each_line(const ScoreLines<kSeesAll>& lines, std::size_t asks, Ahead& ahead, Visit visit) {
    const std::size_t stop = lines.stop();
    std::size_t line = lines.first();
    for (; line + kLinesAtOnce <= stop; line += kLinesAtOnce) {
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kLinesAtOnce; ++i) visit(line + i, i);
        for (std::size_t i = 0; i < asks * kLinesAtOnce; ++i) ahead.ask<1>();
    }
    if constexpr (kSeesAll) return;
    for (; line < stop; ++line) visit(line, 0);
}

// The largest score of a row.
template <bool kSeesAll>
inline float top_of_row(const float* scores, const ScoreLines<kSeesAll>& lines, std::size_t asks, Ahead& ahead) {
    const Floats least = all_floats(kLeastScore);
    Floats most[kLinesAtOnce];
    for (Floats& of_place : most) of_place = least;
    each_line(lines, asks, ahead, [&](std::size_t line, std::size_t place) {
        most[place] = max(lines.seen(line, load_floats(scores + line * kLanes), least), most[place]);
    });
    for (std::size_t i = 1; i < kLinesAtOnce; ++i) most[0] = max(most[i], most[0]);
    return max_lane(most[0]);
}

// Scores to weights, in place, and their sum; zeros where a slot is hidden.
template <bool kSeesAll, int kDegree>
inline float weigh_row(float top, float* scores, const ScoreLines<kSeesAll>& lines, std::size_t asks, Ahead& ahead) {
    Floats totals[kLinesAtOnce];
    for (Floats& of_place : totals) of_place = all_floats(0.0f);
    each_line(lines, asks, ahead, [&](std::size_t line, std::size_t place) {
        const Floats score = load_floats(scores + line * kLanes);
        const Floats weight = lines.seen(line, exp2<kDegree>(score - all_floats(top)), all_floats(0.0f));
        store(scores + line * kLanes, weight);
        totals[place] = totals[place] + weight;
    });
    for (std::size_t i = 1; i < kLinesAtOnce; ++i) totals[0] = totals[0] + totals[i];
    return sum_lanes(totals[0]);
}

// Scores to weights, on all pages that the block sees.
template <int kDegree>
inline void weigh(float softcap, Block& block, Ahead& ahead) {
    // What was not asked for beside keys and values, evenly over the lines that are gone through twice.
    const std::size_t visits = 2 * kLinesAtOnce * block.num_rows;
    const std::size_t asks = (ahead.page_lines() / 8 + visits - 1) / visits;
    const auto each_row = [&](auto visit) {
        for (std::size_t r = 0; r < block.num_rows; ++r) {
            const std::size_t first = block.first[r], stop = block.stop[r];
            if (first == 0 && stop == kSplitSlots) {
                visit(r, ScoreLines<true>{first, stop});
            } else {
                visit(r, ScoreLines<false>{first, stop});
            }
        }
    };
    each_row([&](std::size_t r, auto lines) {
        float* scores = block.scores + r * kSplitSlots;
        if (softcap != 0) cap_row(softcap, scores, lines.first(), lines.stop());
        block.gathered[r]->top = top_of_row(scores, lines, asks, ahead);
    });
    each_row([&](std::size_t r, auto lines) {
        const float top = block.gathered[r]->top;
        block.gathered[r]->total =
            weigh_row<decltype(lines)::kAll, kDegree>(top, block.scores + r * kSplitSlots, lines, asks, ahead);
    });
    for (std::size_t r = 0; r < block.num_rows; ++r) {
        float* scores = block.scores + r * kSplitSlots;
        const std::size_t first = block.first[r], stop = block.stop[r];
        const std::size_t pages_first = block.first_of_any / kPageSlots * kPageSlots;
        const std::size_t pages_stop = (block.stop_of_any + kPageSlots - 1) / kPageSlots * kPageSlots;
        const std::size_t first_line = first / kLanes * kLanes, stop_line = (stop + kLanes - 1) / kLanes * kLanes;
        const Floats zero = all_floats(0.0f);
        for (std::size_t i = pages_first; i < first_line && i < pages_stop; i += kLanes) store(scores + i, zero);
        for (std::size_t i = stop_line > pages_first ? stop_line : pages_first; i < pages_stop; i += kLanes) {
            store(scores + i, zero);
        }
    }
}

// Weights that become codes may be off by as little as a hundredth of a code's step.
inline void weigh(const AttentionTask& task, Block& block, Ahead& ahead) {
    if (is_quantised(task.layer->values)) {
        weigh<3>(task.softcap, block, ahead);
    } else {
        weigh<5>(task.softcap, block, ahead);
    }
}

}  // namespace
}  // namespace kvist::KVIST_ISA
