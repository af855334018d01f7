// Writing a step's keys and values, for Python.
#pragma once

namespace kvist {

// Adds `append` to the class `PageStep`, which must be bound before.
void bind_append();

}  // namespace kvist
