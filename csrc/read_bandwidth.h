// How fast this machine reads memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernel_table.h"

namespace kvist {

// The sum of all words modulo 2^64, each thread reading a run of its own.
std::uint64_t parallel_sum_words(const KernelTable& table, const std::uint64_t* words, std::size_t count, int num_threads);

// Bytes per second of each of `passes` passes over a fresh buffer. std::bad_alloc if the system refuses it.
std::vector<double> read_rates(const KernelTable& table, std::size_t buffer_bytes, int passes, int num_threads);

}  // namespace kvist
