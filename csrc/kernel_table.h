// One function pointer per operation. Each instruction set fills a table of its own; `dispatch.cpp` picks one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvist {

struct AddTask;
struct AppendJob;
struct AttentionTask;
struct GateTask;
struct HeadsTask;
struct LinearSizes;
struct LinearTask;
struct NormTask;
struct WeightMatrix;

struct KernelTable {
    const char* isa;

    // The sum of `count` words modulo 2^64. `words` is aligned to 8 bytes.
    std::uint64_t (*sum_words)(const std::uint64_t* words, std::size_t count);

    // Attention over pages: one part of each of two jobs, the second begun when all parts of the first are done.
    void (*prepare_queries)(const AttentionTask& task, int part, int parts);
    void (*attend)(const AttentionTask& task, int part, int parts);
    // The bytes of scratch that a part of `attend` needs.
    std::size_t (*attention_scratch_bytes)(std::size_t head_dim);

    // Write a step's keys and values into its pages: one part of the job. `scratch` is aligned to 64 bytes and has as many
    // floats as the second function says.
    void (*append)(const AppendJob& job, float* scratch, int part, int parts);
    std::size_t (*append_scratch_floats)(std::size_t head_dim);

    // A product with weights: one part of each of two jobs, the second begun when all parts of the first are done. The
    // first quantises rows, or widens them.
    void (*quantise_rows)(const LinearTask& task, int part, int parts);
    void (*multiply_rows)(const LinearTask& task, int part, int parts);
    LinearSizes (*linear_sizes)(const WeightMatrix& weight, std::size_t num_rows);

    // What a decoder layer does to rows between its products: one part of each job.
    void (*norm_rows)(const NormTask& task, int part, int parts);
    void (*prepare_heads)(const HeadsTask& task, int part, int parts);
    void (*add_rows)(const AddTask& task, int part, int parts);
    void (*gate_rows)(const GateTask& task, int part, int parts);
};

}  // namespace kvist
