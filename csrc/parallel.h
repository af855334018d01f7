// The one place that knows where threads come from.
#pragma once

namespace kvist {

// One part of a job: called with its own number and the number of parts that there are.
using PartFunction = void (*)(void* context, int part, int parts);

// Call `function` once for each part, each on a thread of its own, and wait for all of them.
//
// The number of parts is `num_threads`, or fewer where the system grants fewer: the work must be divided by the `parts`
// that the function is told. `function` must not throw.
void run_parallel(int num_threads, PartFunction function, void* context);

}  // namespace kvist
