#include "append.h"

#include "dispatch.h"
#include "lines.h"
#include "parallel.h"
#include "scratch_memory.h"

namespace kvist {

namespace {

// Vectors of a step below which waking other threads costs more than it saves.
constexpr std::size_t kLeastVectorsToShare = 32;

struct ParallelAppend {
    const KernelTable& table;
    const AppendJob& job;
    std::uint8_t* scratch;
    std::size_t scratch_bytes;  // of each part
};

void append_part(void* context, int part, int parts) {
    const ParallelAppend& append = *static_cast<ParallelAppend*>(context);
    std::uint8_t* scratch = append.scratch + append.scratch_bytes * static_cast<std::size_t>(part);
    append.table.append(append.job, reinterpret_cast<float*>(scratch), part, parts);
}

}  // namespace

void run_append(const AppendJob& job, int num_threads) {
    static ScratchPool& pool = *new ScratchPool;
    ScratchPool::Lease memory(pool);
    const KernelTable& table = kernels();
    const bool shared = job.step->num_tokens * job.layer->num_kv_heads >= kLeastVectorsToShare;
    const int parts = shared ? num_threads : 1;
    const std::size_t scratch_bytes = whole_lines(table.append_scratch_floats(job.layer->head_dim) * sizeof(float));
    ParallelAppend parallel{table, job, memory.at_least(scratch_bytes * static_cast<std::size_t>(parts)),
                            scratch_bytes};
    if (parts == 1) return append_part(&parallel, 0, 1);
    run_parallel(parts, append_part, &parallel);
}

}  // namespace kvist
