#include "layer.h"

#include <algorithm>
#include <chrono>

#include "append.h"
#include "attention_plan.h"
#include "dispatch.h"
#include "lines.h"
#include "linear_products.h"
#include "parallel.h"
#include "scratch_memory.h"

namespace kvist {

namespace {

// Rows of a long step that go through a layer's products together: their numbers stay in a core's second cache, nearly.
constexpr std::size_t kChunkBytes = std::size_t{2} << 20;
constexpr std::size_t kLeastChunkRows = 64;
// Numbers below which waking other threads costs more than it saves.
constexpr std::size_t kLeastNumbersToShare = std::size_t{1} << 14;

template <typename Task>
struct Job {
    void (*kernel)(const Task&, int, int);
    const Task& task;
};

template <typename Task>
void run_rows(void (*kernel)(const Task&, int, int), const Task& task, std::size_t numbers, int num_threads) {
    if (numbers < kLeastNumbersToShare || num_threads == 1) return kernel(task, 0, 1);
    Job<Task> job{kernel, task};
    run_parallel(
        num_threads,
        [](void* context, int part, int parts) {
            const auto& own = *static_cast<const Job<Task>*>(context);
            own.kernel(own.task, part, parts);
        },
        &job);
}

// Where the rows between the products lie: of all tokens, and of a chunk.
struct Buffers {
    float *q, *k, *v, *mixed;        // [T, H, D], [T, K, D] twice, [T, H, D]
    float *normed, *y, *gate, *up;  // [chunk, E] twice, [chunk, mlp_dim] twice
};

std::size_t chunk_rows(const Layer& layer) {
    const std::size_t row_bytes = 2 * (layer.embed_dim + layer.mlp_dim) * sizeof(float);
    return std::max(kLeastChunkRows, kChunkBytes / row_bytes);
}

Buffers buffers(const Layer& layer, std::size_t num_rows, std::size_t most_rows, ScratchPool::Lease& memory) {
    const std::size_t query_dims = layer.num_heads * layer.head_dim, key_dims = layer.num_kv_heads * layer.head_dim;
    Buffers to{};
    struct {
        float*& at;
        std::size_t numbers;
    } const wanted[] = {{to.q, num_rows * query_dims},
                        {to.k, num_rows * key_dims},
                        {to.v, num_rows * key_dims},
                        {to.mixed, num_rows * query_dims},
                        {to.normed, most_rows * layer.embed_dim},
                        {to.y, most_rows * layer.embed_dim},
                        {to.gate, most_rows * layer.mlp_dim},
                        {to.up, most_rows * layer.mlp_dim}};
    std::size_t bytes = 0;
    for (const auto& want : wanted) bytes += whole_lines(want.numbers * sizeof(float));
    std::uint8_t* at = memory.at_least(bytes);
    for (const auto& want : wanted) {
        want.at = reinterpret_cast<float*>(at);
        at += whole_lines(want.numbers * sizeof(float));
    }
    return to;
}

// Tells each stage the time since the one before.
class StageClock {
public:
    explicit StageClock(std::int64_t* stage_ns) : stage_ns_(stage_ns), last_(now()) {}

    void ends(LayerStage stage) {
        if (stage_ns_ == nullptr) return;
        const std::chrono::nanoseconds at = now();
        stage_ns_[static_cast<std::size_t>(stage)] += (at - last_).count();
        last_ = at;
    }

private:
    std::chrono::nanoseconds now() const {
        if (stage_ns_ == nullptr) return {};
        return std::chrono::steady_clock::now().time_since_epoch();
    }

    std::int64_t* stage_ns_;
    std::chrono::nanoseconds last_;
};

OutputRows rows_of(const LayerMatrix& matrix, float* data) { return {data, matrix.weight->num_rows, false}; }

void multiply(const LayerMatrix& matrix, const float* x, float* out, std::size_t num_rows, int num_threads) {
    const Product product{matrix.weight, rows_of(matrix, out)};
    run_products(&product, 1, {x, matrix.weight->num_groups * kGroupColumns, false}, num_rows, num_threads);
}

}  // namespace

void run_layer(const Layer& layer, const StepPages& step, const LayerPages& pages, const AttentionPlan& plan,
               const HiddenStates& hidden, int num_threads, std::int64_t* stage_ns) {
    StageClock clock(stage_ns);
    const KernelTable& table = kernels();
    const std::size_t num_rows = hidden.num_rows, embed_dim = layer.embed_dim, head_dim = layer.head_dim;
    const std::size_t query_dims = layer.num_heads * head_dim, key_dims = layer.num_kv_heads * head_dim;
    const std::size_t num_chunks = (num_rows + chunk_rows(layer) - 1) / chunk_rows(layer);
    static ScratchPool& pool = *new ScratchPool;
    ScratchPool::Lease memory(pool);
    const Buffers at = buffers(layer, num_rows, (num_rows + num_chunks - 1) / num_chunks, memory);
    const auto each_chunk = [&](auto run) {
        for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
            const std::size_t first = num_rows * chunk / num_chunks;
            run(first, num_rows * (chunk + 1) / num_chunks - first);
        }
    };

    each_chunk([&](std::size_t first, std::size_t count) {
        const float* x = hidden.x + first * embed_dim;
        run_rows(table.norm_rows, {x, at.normed, layer.input_norm, layer.norms, count, embed_dim}, count * embed_dim,
                 num_threads);
        clock.ends(LayerStage::kNorms);
        const Product products[] = {{layer.q.weight, rows_of(layer.q, at.q + first * query_dims)},
                                    {layer.k.weight, rows_of(layer.k, at.k + first * key_dims)},
                                    {layer.v.weight, rows_of(layer.v, at.v + first * key_dims)}};
        run_products(products, 3, {at.normed, embed_dim, false}, count, num_threads);
        clock.ends(LayerStage::kProducts);
    });

    const auto prepare = [&](float* rows, const LayerMatrix& matrix, const float* norm, bool turns) {
        const std::size_t dims = matrix.weight->num_rows;
        if (matrix.bias == nullptr && norm == nullptr && !turns) return;
        run_rows(table.prepare_heads,
                 {rows, matrix.bias, norm, layer.norms, turns ? hidden.cos : nullptr, turns ? hidden.sin : nullptr,
                  num_rows, dims / head_dim, head_dim},
                 num_rows * dims, num_threads);
    };
    prepare(at.q, layer.q, layer.q_norm, true);
    prepare(at.k, layer.k, layer.k_norm, true);
    prepare(at.v, layer.v, nullptr, false);
    clock.ends(LayerStage::kHeads);

    const auto stride = [](std::size_t dims) { return static_cast<std::ptrdiff_t>(dims); };
    run_append({&pages,
                &step,
                {at.k, stride(key_dims), stride(head_dim), false},
                {at.v, stride(key_dims), stride(head_dim), false}},
               num_threads);
    clock.ends(LayerStage::kAppend);
    AttentionTask task{};
    task.layer = &pages;
    task.step = &step;
    task.num_heads = layer.num_heads;
    task.group_size = plan.group_size;
    task.q = at.q;
    task.out = at.mixed;
    task.q_token_stride = task.out_token_stride = query_dims;
    task.q_head_stride = task.out_head_stride = head_dim;
    task.scale = layer.scale;
    task.window = plan.window;
    run_attention(plan, task, num_threads);
    clock.ends(LayerStage::kAttention);

    each_chunk([&](std::size_t first, std::size_t count) {
        float* x = hidden.x + first * embed_dim;
        multiply(layer.o, at.mixed + first * query_dims, at.y, count, num_threads);
        clock.ends(LayerStage::kProducts);
        run_rows(table.add_rows,
                 {x, at.y, layer.o.bias, layer.attention_output_norm, at.normed, layer.mlp_input_norm, layer.norms,
                  count, embed_dim},
                 count * embed_dim, num_threads);
        clock.ends(LayerStage::kResiduals);
        const Product products[] = {{layer.gate.weight, rows_of(layer.gate, at.gate)},
                                    {layer.up.weight, rows_of(layer.up, at.up)}};
        run_products(products, 2, {at.normed, embed_dim, false}, count, num_threads);
        clock.ends(LayerStage::kProducts);
        run_rows(table.gate_rows,
                 {at.gate, at.up, layer.gate.bias, layer.up.bias, layer.activation, count, layer.mlp_dim},
                 count * layer.mlp_dim, num_threads);
        clock.ends(LayerStage::kGate);
        multiply(layer.down, at.gate, at.y, count, num_threads);
        clock.ends(LayerStage::kProducts);
        run_rows(table.add_rows,
                 {x, at.y, layer.down.bias, layer.mlp_output_norm, nullptr, nullptr, layer.norms, count, embed_dim},
                 count * embed_dim, num_threads);
        clock.ends(LayerStage::kResiduals);
    });
}

void run_norm(const HiddenStates& hidden, std::size_t embed_dim, const float* norm, NormNumbers numbers, float* out,
              int num_threads) {
    run_rows(kernels().norm_rows, {hidden.x, out, norm, numbers, hidden.num_rows, embed_dim},
             hidden.num_rows * embed_dim, num_threads);
}

}  // namespace kvist
