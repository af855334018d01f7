// Attention over pages: the work of one thread. csrc/attention.h says how it is dealt out, docs/kernels.md how it goes.
#include "attention.h"

#include "kernels/attention_ahead.h"
#include "kernels/attention_keys.h"
#include "kernels/attention_rows.h"
#include "kernels/attention_values.h"
#include "kernels/attention_weights.h"
#include "kernels/kernels.h"
#include "page_layout.h"
#include "simd.h"

namespace kvist::KVIST_ISA {

namespace {

static_assert(kSplitSlots == kSplitPages * kPageSlots);

const ScorePage* score_pages(Storage keys) {
    switch (keys) {
        case Storage::kFp32: return ScorePages<Storage::kFp32>::kFor;
        case Storage::kBf16: return ScorePages<Storage::kBf16>::kFor;
        case Storage::kInt8: return ScorePages<Storage::kInt8>::kFor;
        case Storage::kInt4: break;
    }
    return ScorePages<Storage::kInt4>::kFor;
}

const MixSplit* mix_splits(Storage values) {
    switch (values) {
        case Storage::kFp32: return MixSplits<Storage::kFp32>::kFor;
        case Storage::kBf16: return MixSplits<Storage::kBf16>::kFor;
        case Storage::kInt8: return MixSplits<Storage::kInt8>::kFor;
        case Storage::kInt4: break;
    }
    return MixSplits<Storage::kInt4>::kFor;
}

// The memory of one part.
struct Scratch {
    float* scores;       // [kMostRows, kSplitSlots]
    float* mixed;        // [kMostRows, padded], of the rows of a tile's block
    float* gathered;     // [kSpanTileRows, result_floats], of a tile
    std::uint8_t* rows;  // [kSpanTileRows], of a tile
};

Scratch scratch_at(std::uint8_t* memory, std::size_t head_dim) {
    Scratch scratch;
    scratch.scores = reinterpret_cast<float*>(memory);
    scratch.mixed = scratch.scores + kMostRows * kSplitSlots;
    scratch.gathered = scratch.mixed + kMostRows * result_floats(head_dim);
    scratch.rows = reinterpret_cast<std::uint8_t*>(scratch.gathered + kSpanTileRows * result_floats(head_dim));
    return scratch;
}

struct Worker {
    const AttentionTask& task;
    const ScorePage* score;
    const MixSplit* mix;
    Scratch scratch;
    std::size_t padded;

    // What a row sees of a split, counted from its start.
    void see(Block& block, std::size_t r, std::size_t split) const {
        const auto start = static_cast<std::int64_t>(split * kSplitSlots);
        const std::int64_t first = block.rows[r]->first_position - start, stop = block.rows[r]->position + 1 - start;
        const auto slots = static_cast<std::int64_t>(kSplitSlots);
        const bool nothing = stop <= 0 || first >= slots;
        block.first[r] = nothing || first < 0 ? 0 : static_cast<std::size_t>(first);
        block.stop[r] = nothing ? 0 : static_cast<std::size_t>(stop < slots ? stop : slots);
    }

    const std::uint8_t* head_bytes(const SpanPages& span, std::size_t kv_head, std::size_t number) const {
        const auto page = static_cast<std::size_t>(span.pages[number - static_cast<std::size_t>(span.first_number)]);
        return task.step->pool + page * task.step->stride + task.layer->offset + kv_head * task.layer->head_bytes;
    }

    // What is read of a split.
    Ahead::Heads heads(const SpanPages& span, std::size_t kv_head, std::size_t split) const {
        Ahead::Heads found;
        for (std::size_t i = 0; i < kSplitPages; ++i) {
            const std::size_t number = split * kSplitPages + i, first = static_cast<std::size_t>(span.first_number);
            if (number >= first && number < first + span.num_pages) found.of[i] = head_bytes(span, kv_head, number);
        }
        return found;
    }

    // Scores, weights and mixed values of a block in a split, of which it sees something.
    void run(Block& block, const SpanPages& span, std::size_t kv_head, std::size_t split, Ahead& ahead) const {
        const LayerPages& layer = *task.layer;
        block.scores = scratch.scores;
        block.first_of_any = kSplitSlots;
        block.stop_of_any = 0;
        for (std::size_t r = 0; r < block.num_rows; ++r) {
            for (std::size_t i = 0; i < padded; i += kLanes) store(block.mixed[r] + i, all_floats(0.0f));
            if (block.stop[r] == 0) continue;
            if (block.first[r] < block.first_of_any) block.first_of_any = block.first[r];
            if (block.stop[r] > block.stop_of_any) block.stop_of_any = block.stop[r];
        }
        const std::size_t first_page = block.first_of_any / kPageSlots;
        const std::size_t stop_page = (block.stop_of_any + kPageSlots - 1) / kPageSlots;
        HeadPage pages[kSplitPages];
        for (std::size_t i = first_page; i < stop_page; ++i) {
            const std::size_t number = split * kSplitPages + i;
            pages[i].bytes = head_bytes(span, kv_head, number);
            pages[i].turn = nullptr;
            if (layer.key_offset != nullptr)
                pages[i].turn = task.step->turns[layer.turns].turns + number * layer.head_dim;
        }
        for (std::size_t i = first_page; i < stop_page; ++i) {
            ahead.read_keys(i);
            score[block.num_rows - 1](task, block, pages[i], block.scores + i * kPageSlots, ahead);
        }
        weigh(task, block, ahead);
        mix[block.num_rows - 1](layer, block, pages, first_page, stop_page, ahead);
    }

    // Rows as even blocks: `visit(first, count)` for each.
    template <typename Visit>
    void each_block(std::size_t rows, Visit visit) const {
        const std::size_t blocks = (rows + kMostRows - 1) / kMostRows;
        for (std::size_t i = 0, first = 0; i < blocks; ++i) {
            const std::size_t count = (rows - first + blocks - i - 1) / (blocks - i);
            visit(first, count);
            first += count;
        }
    }

    // A tile of one span's rows, split by split.
    void run_tile(const AttentionItem& item, std::size_t kv_head) const {
        Ahead ahead(*task.layer);  // pages that many blocks read are in the cache without it
        const SpanPages& span = task.step->spans[item.first];
        const std::size_t row_bytes = prepared_bytes(task.layer->head_dim);
        const auto row = [&](std::size_t i) { return reinterpret_cast<Row*>(scratch.rows + i * row_bytes); };
        const auto result = [&](std::size_t i) { return scratch.gathered + i * result_floats(task.layer->head_dim); };
        const auto token = [&](std::size_t i) { return span.row_start + (item.begin + i) / task.group_size; };
        const auto head = [&](std::size_t i) { return kv_head * task.group_size + (item.begin + i) % task.group_size; };
        for (std::size_t i = 0; i < item.count; ++i) {
            prepare_row(task, token(i), head(i), *row(i));
            start(task, head(i), padded, *reinterpret_cast<Gathered*>(result(i)), result(i) + kLanes);
        }
        const auto first_split = static_cast<std::size_t>(row(0)->first_position) / kSplitSlots;
        const auto last_split = static_cast<std::size_t>(row(item.count - 1)->position) / kSplitSlots;
        for (std::size_t split = first_split; split <= last_split; ++split) {
            each_block(item.count, [&](std::size_t first, std::size_t count) {
                Block block;
                Gathered gathered[kMostRows];
                block.num_rows = count;
                bool sees = false;
                for (std::size_t r = 0; r < count; ++r) {
                    block.rows[r] = row(first + r);
                    block.mixed[r] = scratch.mixed + r * padded;
                    block.gathered[r] = gathered + r;
                    see(block, r, split);
                    sees = sees || block.stop[r] != 0;
                }
                if (!sees) return;
                run(block, span, kv_head, split, ahead);
                for (std::size_t r = 0; r < count; ++r) {
                    float* to = result(first + r);
                    merge(padded, *reinterpret_cast<Gathered*>(to), to + kLanes, gathered[r], block.mixed[r]);
                }
            });
        }
        for (std::size_t i = 0; i < item.count; ++i) {
            float* to = result(i);
            finish(task, token(i), head(i), reinterpret_cast<Gathered*>(to)->total, to + kLanes);
        }
    }

    const Row* prepared(std::size_t span, std::size_t token, std::size_t head) const {
        const std::size_t at = task.splits[span].first_row + token * task.num_heads + head;
        return reinterpret_cast<const Row*>(task.prepared + at * prepared_bytes(task.layer->head_dim));
    }

    float* result(std::size_t span, std::size_t split, std::size_t kv_head, std::size_t row) const {
        const SplitSpan& splits = task.splits[span];
        const std::size_t rows = task.step->spans[span].num_tokens * task.group_size;
        const std::size_t at = ((split - splits.first_split) * task.layer->num_kv_heads + kv_head) * rows + row;
        return task.results + (splits.first_result + at) * result_floats(task.layer->head_dim);
    }

    // One split, for all rows of the spans that have the same pages there.
    void run_split(const AttentionItem& item, std::size_t kv_head, Ahead& ahead) const {
        Block block;
        block.num_rows = 0;
        std::size_t rows = 0;
        for (std::size_t m = 0; m < item.count; ++m) {
            rows += task.step->spans[task.members[item.first + m]].num_tokens * task.group_size;
        }
        std::size_t member = 0, row = 0;
        each_block(rows, [&](std::size_t, std::size_t count) {
            block.num_rows = count;
            bool sees = false;
            for (std::size_t r = 0; r < count; ++r) {
                const std::size_t span = task.members[item.first + member];
                block.rows[r] =
                    prepared(span, row / task.group_size, kv_head * task.group_size + row % task.group_size);
                float* to = result(span, item.begin, kv_head, row);
                block.mixed[r] = to + kLanes;
                block.gathered[r] = reinterpret_cast<Gathered*>(to);
                see(block, r, item.begin);
                sees = sees || block.stop[r] != 0;
                if (++row == task.step->spans[span].num_tokens * task.group_size) {
                    row = 0;
                    ++member;
                }
            }
            if (sees) {
                run(block, task.step->spans[task.members[item.first]], kv_head, item.begin, ahead);
                return;
            }
            for (std::size_t r = 0; r < count; ++r) {
                *block.gathered[r] = {kLeastScore, 0.0f};
                for (std::size_t i = 0; i < padded; i += kLanes) store(block.mixed[r] + i, all_floats(0.0f));
            }
        });
        for (std::size_t m = 0; m < item.count; ++m) {
            const std::size_t span = task.members[item.first + m];
            std::int32_t* waiting = task.waiting + span * task.layer->num_kv_heads + kv_head;
            if (__atomic_sub_fetch(waiting, 1, __ATOMIC_ACQ_REL) == 0) merge_splits(span, kv_head);
        }
    }

    void merge_splits(std::size_t span, std::size_t kv_head) const {
        const SpanPages& of = task.step->spans[span];
        const SplitSpan& splits = task.splits[span];
        for (std::size_t row = 0; row < of.num_tokens * task.group_size; ++row) {
            const std::size_t head = kv_head * task.group_size + row % task.group_size;
            float* mixed = scratch.mixed;
            Gathered gathered;
            start(task, head, padded, gathered, mixed);
            for (std::size_t i = 0; i < splits.num_splits; ++i) {
                const float* from = result(span, splits.first_split + i, kv_head, row);
                merge(padded, gathered, mixed, *reinterpret_cast<const Gathered*>(from), from + kLanes);
            }
            finish(task, of.row_start + row / task.group_size, head, gathered.total, mixed);
        }
    }
};

}  // namespace

std::size_t attention_scratch_bytes(std::size_t head_dim) {
    return 4 * kMostRows * kSplitSlots + 4 * (kMostRows + kSpanTileRows) * result_floats(head_dim) +
           kSpanTileRows * prepared_bytes(head_dim);
}

void prepare_queries(const AttentionTask& task, int part, int parts) {
    const std::size_t bytes = prepared_bytes(task.layer->head_dim);
    for (std::size_t s = 0; s < task.step->num_spans; ++s) {
        const SpanPages& span = task.step->spans[s];
        if (task.splits[s].num_splits == 0) continue;
        const std::size_t rows = span.num_tokens * task.num_heads;
        for (std::size_t i = static_cast<std::size_t>(part); i < rows; i += static_cast<std::size_t>(parts)) {
            Row* row = reinterpret_cast<Row*>(task.prepared + (task.splits[s].first_row + i) * bytes);
            prepare_row(task, span.row_start + i / task.num_heads, i % task.num_heads, *row);
        }
    }
}

void attend(const AttentionTask& task, int part, int) {
    const std::size_t head_dim = task.layer->head_dim, num_kv_heads = task.layer->num_kv_heads;
    const Worker worker{task, score_pages(task.layer->keys), mix_splits(task.layer->values),
                        scratch_at(task.scratch + static_cast<std::size_t>(part) * task.scratch_bytes, head_dim),
                        padded_dims(head_dim)};
    const std::size_t all = task.num_items * num_kv_heads;
    const auto heads = [&](std::size_t work) {
        Ahead::Heads none;
        if (work >= all || task.items[work / num_kv_heads].is_tile) return none;
        const AttentionItem& item = task.items[work / num_kv_heads];
        return worker.heads(task.step->spans[task.members[item.first]], work % num_kv_heads, item.begin);
    };
    Ahead ahead(*task.layer);
    // The next work is taken before the last is done, so that its pages can be asked for.
    std::size_t work = __atomic_fetch_add(task.next, 1, __ATOMIC_RELAXED);
    while (work < all) {
        const std::size_t next = __atomic_fetch_add(task.next, 1, __ATOMIC_RELAXED);
        const AttentionItem& item = task.items[work / num_kv_heads];
        if (item.is_tile) {
            worker.run_tile(item, work % num_kv_heads);
        } else {
            ahead.begin(heads(work), heads(next));
            worker.run_split(item, work % num_kv_heads, ahead);
        }
        work = next;
    }
}

}  // namespace kvist::KVIST_ISA
