// Writing a step's keys and values into the slots of its pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pages.h"

namespace kvist {

// Vectors [T, K, D] of a step, the dims one after another.
struct AppendInput {
    const void* data;
    std::ptrdiff_t row_stride, head_stride;  // in elements
    bool is_bf16;                            // else fp32
};

struct AppendJob {
    const LayerPages* layer;
    const StepPages* step;
    AppendInput keys, values;
};

// Do it. std::bad_alloc if the system refuses memory.
void run_append(const AppendJob& job, int num_threads);

}  // namespace kvist
