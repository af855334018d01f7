// Writing a step's keys and values, for Python.
#pragma once

#include "append.h"

namespace kvist {

// Do it. std::bad_alloc if the system refuses memory.
void run_append(const AppendJob& job, int num_threads);

// Adds `append` to the class `PageStep`, which must be bound before.
void bind_append();

}  // namespace kvist
