// How the attention of a step is divided: into items of work, whatever layer of the group it is for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace kvist {

struct AttentionPlan {
    std::size_t group_size;
    std::size_t num_kv_heads;
    std::int64_t window;

    std::vector<AttentionItem> items;
    std::vector<std::size_t> members;
    std::vector<SplitSpan> splits;  // of each span
    std::size_t num_results;        // of all splits
    std::size_t num_prepared;       // rows of spans with splits
};

// `window` is at most the one that the step's page tables were checked for.
AttentionPlan plan_attention(const StepPages& step, std::size_t group_size, std::size_t num_kv_heads,
                             std::int64_t window);

// Do it. `task` has all but the plan and the memory. std::bad_alloc if the system refuses the latter.
void run_attention(const AttentionPlan& plan, AttentionTask task, int num_threads);

}  // namespace kvist
