// Weights: what a split's scores become, row by row.
#pragma once

#include <cstddef>

#include "kernels/attention_keys.h"

namespace kvist::KVIST_ISA {
namespace {

// tanh through 2^x: to about 1e-7, which scores of some ten do not feel.
inline Floats tanh(Floats x) {
    const Floats one = all_floats(1.0f), two = all_floats(2.0f);
    const Floats power = exp2(min(all_floats(126.0f), x * all_floats(2 * kLog2E)));
    return one - two / (power + one);
}

// Scores to weights, in place, and what they gather; zeros where a slot is hidden, on all pages that the block sees.
template <bool kSeesAll>
inline void weigh_row(float softcap, float* scores, std::size_t first, std::size_t stop, Gathered& to) {
    const std::size_t first_line = kSeesAll ? 0 : first / kLanes;
    const std::size_t stop_line = kSeesAll ? kSplitSlots / kLanes : (stop + kLanes - 1) / kLanes;
    const Floats least = all_floats(kLeastScore);
    const auto seen = [&](std::size_t line) {
        const std::size_t start = line * kLanes;
        return lanes_between(first > start ? first - start : 0, stop < start + kLanes ? stop - start : kLanes);
    };
    Floats most = least;
    for (std::size_t line = first_line; line < stop_line; ++line) {
        Floats x = load_floats(scores + line * kLanes);
        if (softcap != 0) {
            x = tanh(x * all_floats(1 / softcap)) * all_floats(softcap * kLog2E);
            store(scores + line * kLanes, x);
        }
        if constexpr (!kSeesAll) x = select(seen(line), x, least);
        most = max(x, most);
    }
    to.top = max_lane(most);
    const Floats top = all_floats(to.top);
    Floats total = all_floats(0.0f);
    for (std::size_t line = first_line; line < stop_line; ++line) {
        Floats weight = exp2(load_floats(scores + line * kLanes) - top);
        if constexpr (!kSeesAll) weight = select(seen(line), weight, all_floats(0.0f));
        store(scores + line * kLanes, weight);
        total = total + weight;
    }
    to.total = sum_lanes(total);
}

inline void weigh(const AttentionTask& task, Block& block) {
    for (std::size_t r = 0; r < block.num_rows; ++r) {
        float* scores = block.scores + r * kSplitSlots;
        const std::size_t first = block.first[r], stop = block.stop[r];
        if (first == 0 && stop == kSplitSlots) {
            weigh_row<true>(task.softcap, scores, first, stop, *block.gathered[r]);
            continue;
        }
        weigh_row<false>(task.softcap, scores, first, stop, *block.gathered[r]);
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

}  // namespace
}  // namespace kvist::KVIST_ISA
