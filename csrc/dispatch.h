// Which instruction set runs.
#pragma once

#include <string_view>
#include <vector>

#include "kernel_table.h"

namespace kvist {

// The tables of this build, from the plainest instruction set to the richest.
const std::vector<const KernelTable*>& built_tables();

// Those of them that this CPU and its operating system can run.
std::vector<const KernelTable*> runnable_tables();

// Make `kernels()` the richest runnable table that is not above `max_isa`; an empty `max_isa` caps nothing.
// std::invalid_argument if `max_isa` is none of the build's, std::runtime_error if this CPU can run none.
const KernelTable& choose_kernels(std::string_view max_isa);

// The table chosen last. std::logic_error before the first choice.
const KernelTable& kernels();

}  // namespace kvist
