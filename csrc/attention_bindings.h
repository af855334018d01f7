// Attention over the pages of a step, for Python.
#pragma once

namespace kvist {

// Adds `attend` to the class `PageStep`, which must be bound before.
void bind_attention();

}  // namespace kvist
