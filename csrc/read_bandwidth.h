// How fast this machine reads memory.
#pragma once

#include <cstddef>
#include <vector>

#include "kernel_table.h"

namespace kvist {

// Bytes per second of each of `passes` passes over a fresh buffer. std::bad_alloc if the system refuses it. `between` is
// called after each pass, and may throw.
std::vector<double> read_rates(const KernelTable& table, std::size_t buffer_bytes, int passes, int num_threads,
                               void (*between)());

}  // namespace kvist
