#include "attention_plan.h"

#include <algorithm>

#include "dispatch.h"
#include "parallel.h"
#include "scratch_memory.h"

namespace kvist {

namespace {

// Spans of up to as many rows for a KV head keep what their splits gave, so that several threads can share them.
constexpr std::size_t kMostSplitRows = kSpanTileRows;
// More rows of spans that share pages are several items.
constexpr std::size_t kMostSharedRows = 96;
// Queries are prepared by one thread where that takes less than waking the others.
constexpr std::size_t kFewQueryDims = 16384;

constexpr std::size_t kSlots = kSplitSlots / kSplitPages;

struct Range {
    std::size_t first, stop;
};

// The splits, and the pages of one of them, that a span's rows see.
Range seen_pages(const SpanPages& span, std::int64_t window) {
    const std::int64_t first = span.first_position < window ? 0 : span.first_position - window + 1;
    const std::size_t stop = static_cast<std::size_t>(span.first_position) + span.num_tokens;
    return {static_cast<std::size_t>(first) / kSlots, (stop + kSlots - 1) / kSlots};
}

Range pages_in_split(const Range& pages, std::size_t split) {
    return {std::max(pages.first, split * kSplitPages), std::min(pages.stop, (split + 1) * kSplitPages)};
}

// A span in a split, by the pages that it sees there; absent ones are -1.
struct Member {
    std::size_t split;
    std::int64_t pages[kSplitPages];
    std::size_t span;

    bool same_pages(const Member& other) const {
        return split == other.split && std::equal(pages, pages + kSplitPages, other.pages);
    }
    bool operator<(const Member& other) const {
        if (split != other.split) return split < other.split;
        for (std::size_t i = 0; i < kSplitPages; ++i) {
            if (pages[i] != other.pages[i]) return pages[i] < other.pages[i];
        }
        return span < other.span;
    }
};

void plan_splits(const StepPages& step, std::vector<Member>& found, AttentionPlan& plan) {
    std::sort(found.begin(), found.end());
    for (std::size_t i = 0; i < found.size();) {
        AttentionItem item{false, plan.members.size(), 0, found[i].split};
        std::size_t rows = 0;
        std::size_t j = i;
        for (; j < found.size() && found[j].same_pages(found[i]); ++j) {
            rows += step.spans[found[j].span].num_tokens * plan.group_size;
            if (j > i && rows > kMostSharedRows) break;
            plan.members.push_back(found[j].span);
            ++item.count;
        }
        plan.items.push_back(item);
        i = j;
    }
}

struct Job {
    const KernelTable& kernels;
    const AttentionTask& task;
};

}  // namespace

AttentionPlan plan_attention(const StepPages& step, std::size_t group_size, std::size_t num_kv_heads,
                             std::int64_t window) {
    AttentionPlan plan{group_size, num_kv_heads, window, {}, {}, {}, 0, 0};
    plan.splits.assign(step.num_spans, SplitSpan{});
    std::vector<Member> found;
    for (std::size_t s = 0; s < step.num_spans; ++s) {
        const SpanPages& span = step.spans[s];
        const std::size_t rows = span.num_tokens * group_size;
        const Range pages = seen_pages(span, window);
        if (rows > kMostSplitRows) {
            // The last rows see most: they come first.
            const std::size_t tiles = (rows + kSpanTileRows - 1) / kSpanTileRows;
            for (std::size_t tile = tiles; tile-- > 0;) {
                const std::size_t begin = tile * kSpanTileRows;
                plan.items.push_back({true, s, std::min(kSpanTileRows, rows - begin), begin});
            }
            continue;
        }
        const std::size_t first = pages.first / kSplitPages, stop = (pages.stop + kSplitPages - 1) / kSplitPages;
        plan.splits[s] = {first, stop - first, plan.num_results, plan.num_prepared};
        plan.num_results += (stop - first) * num_kv_heads * rows;
        plan.num_prepared += rows * num_kv_heads;
        for (std::size_t split = first; split < stop; ++split) {
            Member member{split, {-1, -1, -1, -1}, s};
            const Range seen = pages_in_split(pages, split);
            for (std::size_t number = seen.first; number < seen.stop; ++number) {
                member.pages[number % kSplitPages] = span.pages[number - static_cast<std::size_t>(span.first_number)];
            }
            found.push_back(member);
        }
    }
    plan_splits(step, found, plan);
    return plan;
}

void run_attention(const AttentionPlan& plan, AttentionTask task, int num_threads) {
    static ScratchPool& pool = *new ScratchPool;
    if (plan.items.empty()) return;
    ScratchPool::Lease memory(pool);
    const KernelTable& table = kernels();
    const std::size_t head_dim = task.layer->head_dim, num_kv_heads = plan.num_kv_heads;
    const std::size_t work = plan.items.size() * num_kv_heads;
    const std::size_t parts = std::min(static_cast<std::size_t>(num_threads), work);

    const std::size_t scratch_bytes = whole_lines(table.attention_scratch_bytes(head_dim));
    const std::size_t row_bytes = plan.num_prepared * prepared_bytes(head_dim);
    const std::size_t result_bytes = plan.num_results * result_floats(head_dim) * sizeof(float);
    const std::size_t waiting = plan.splits.size() * num_kv_heads;
    std::uint8_t* at =
        memory.at_least(parts * scratch_bytes + row_bytes + result_bytes + whole_lines(waiting * sizeof(std::int32_t)));
    task.scratch = at;
    task.scratch_bytes = scratch_bytes;
    task.prepared = at + parts * scratch_bytes;
    task.results = reinterpret_cast<float*>(task.prepared + row_bytes);
    task.waiting = reinterpret_cast<std::int32_t*>(task.prepared + row_bytes + result_bytes);
    for (std::size_t i = 0; i < waiting; ++i) {
        task.waiting[i] = static_cast<std::int32_t>(plan.splits[i / num_kv_heads].num_splits);
    }
    alignas(64) std::size_t next = 0;
    task.next = &next;
    task.items = plan.items.data();
    task.num_items = plan.items.size();
    task.members = plan.members.data();
    task.splits = plan.splits.data();

    Job job{table, task};
    if (plan.num_prepared * head_dim <= kFewQueryDims) {
        table.prepare_queries(task, 0, 1);
    } else {
        run_parallel(
            static_cast<int>(parts),
            [](void* context, int part, int of) {
                const Job& own = *static_cast<const Job*>(context);
                own.kernels.prepare_queries(own.task, part, of);
            },
            &job);
    }
    run_parallel(
        static_cast<int>(parts),
        [](void* context, int part, int of) {
            const Job& own = *static_cast<const Job*>(context);
            own.kernels.attend(own.task, part, of);
        },
        &job);
}

}  // namespace kvist
