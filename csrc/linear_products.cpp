#include "linear_products.h"

#include <algorithm>
#include <cstdint>

#include "dispatch.h"
#include "lines.h"
#include "parallel.h"
#include "scratch_memory.h"

namespace kvist {

namespace {

// Quantised rows of one slice of the input: what stays in a core's second cache beside a panel of weights.
constexpr std::size_t kSliceBytes = std::size_t{1} << 20;
constexpr std::size_t kLeastSliceRows = 48;
// Numbers of the input, and products, below which waking other threads costs more than it saves.
constexpr std::size_t kLeastInputToShare = std::size_t{1} << 14;
constexpr std::size_t kLeastProductsToShare = std::size_t{1} << 17;

struct Job {
    const KernelTable& table;
    LinearTask tasks[kMostProducts];
    std::size_t count;
    std::size_t quantised[kMostProducts];  // the tasks whose rows serve all that are quantised in the same way
    std::size_t num_quantised;
};

void quantise_part(void* context, int part, int parts) {
    const Job& job = *static_cast<const Job*>(context);
    for (std::size_t i = 0; i < job.num_quantised; ++i) {
        job.table.quantise_rows(job.tasks[job.quantised[i]], part, parts);
    }
}

void multiply_part(void* context, int part, int parts) {
    const Job& job = *static_cast<const Job*>(context);
    for (std::size_t i = 0; i < job.count; ++i) job.table.multiply_rows(job.tasks[i], part, parts);
}

void run_job(int num_threads, PartFunction function, Job& job) {
    if (num_threads == 1) return function(&job, 0, 1);
    run_parallel(num_threads, function, &job);
}

void* advanced(const void* data, std::size_t elements, bool is_bf16) {
    return static_cast<std::uint8_t*>(const_cast<void*>(data)) + elements * (is_bf16 ? 2u : 4u);
}

// The first task whose rows are quantised in the same way.
std::size_t first_alike(const Product* products, std::size_t index) {
    const WeightMatrix& own = *products[index].weight;
    std::size_t first = 0;
    for (;; ++first) {
        const WeightMatrix& other = *products[first].weight;
        if (other.format == own.format && other.fine_rows == own.fine_rows) return first;
    }
}

}  // namespace

void run_products(const Product* products, std::size_t count, const InputRows& x, std::size_t num_rows,
                  int num_threads) {
    static ScratchPool& pool = *new ScratchPool;
    ScratchPool::Lease memory(pool);
    const KernelTable& table = kernels();
    Job job{table, {}, count, {}, 0};
    std::size_t row_bytes = 0, products_of_row = 0;
    for (std::size_t i = 0; i < count; ++i) {
        row_bytes = std::max(row_bytes, table.linear_sizes(*products[i].weight, num_rows).row);
        const WeightMatrix& weight = *products[i].weight;
        products_of_row += weight.num_rows * weight.num_groups * kGroupColumns * codings(weight);
    }
    const std::size_t slice_rows = std::max(kLeastSliceRows, kSliceBytes / row_bytes);
    const std::size_t num_slices = (num_rows + slice_rows - 1) / slice_rows;
    const std::size_t most_rows = (num_rows + num_slices - 1) / num_slices;

    // Matrices whose rows are quantised alike share them, and scratch, since their parts of it are of one size.
    std::size_t rows_at[kMostProducts], scratch_at[kMostProducts], bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t first = first_alike(products, i);
        if (first == i) {
            const LinearSizes sizes = table.linear_sizes(*products[i].weight, most_rows);
            rows_at[i] = bytes;
            scratch_at[i] = bytes + whole_lines(most_rows * sizes.row);
            bytes = scratch_at[i] + sizes.scratch * static_cast<std::size_t>(num_threads);
            job.quantised[job.num_quantised++] = i;
        }
        rows_at[i] = rows_at[first];
        scratch_at[i] = scratch_at[first];
    }
    std::uint8_t* at = memory.at_least(bytes);

    const std::size_t columns = products[0].weight->num_groups * kGroupColumns;
    for (std::size_t slice = 0; slice < num_slices; ++slice) {
        const std::size_t first = num_rows * slice / num_slices;
        const std::size_t rows = num_rows * (slice + 1) / num_slices - first;
        for (std::size_t i = 0; i < count; ++i) {
            const OutputRows& out = products[i].out;
            job.tasks[i] = {products[i].weight,
                            {advanced(x.data, first * x.stride, x.is_bf16), x.stride, x.is_bf16},
                            {advanced(out.data, first * out.stride, out.is_bf16), out.stride, out.is_bf16},
                            rows,
                            at + rows_at[i],
                            at + scratch_at[i]};
        }
        run_job(rows * columns < kLeastInputToShare ? 1 : num_threads, quantise_part, job);
        run_job(rows * products_of_row < kLeastProductsToShare ? 1 : num_threads, multiply_part, job);
    }
}

}  // namespace kvist
