// The operations of one instruction set, for `table.cpp`.
//
// Everything in this folder is compiled once per instruction set, with KVIST_ISA naming it. Nothing here may be a symbol
// that two of these builds share: the linker would keep one of them, perhaps the one that this CPU cannot run. So all
// of it lives in namespace kvist::KVIST_ISA, helpers are in an unnamed namespace within, and no std template is used.
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
}

#ifndef KVIST_ISA
#error "compile the kernels through CMakeLists.txt, which defines KVIST_ISA for each instruction set"
#endif

namespace kvist::KVIST_ISA {

std::uint64_t sum_words(const std::uint64_t* words, std::size_t count);
void prepare_queries(const AttentionTask& task, int part, int parts);
void attend(const AttentionTask& task, int part, int parts);
std::size_t attention_scratch_bytes(std::size_t head_dim);
void append(const AppendJob& job, float* scratch, int part, int parts);
std::size_t append_scratch_floats(std::size_t head_dim);
void quantise_rows(const LinearTask& task, int part, int parts);
void multiply_rows(const LinearTask& task, int part, int parts);
LinearSizes linear_sizes(const WeightMatrix& weight, std::size_t num_rows);
void norm_rows(const NormTask& task, int part, int parts);
void prepare_heads(const HeadsTask& task, int part, int parts);
void add_rows(const AddTask& task, int part, int parts);
void gate_rows(const GateTask& task, int part, int parts);

}  // namespace kvist::KVIST_ISA
