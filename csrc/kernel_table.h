// One function pointer per operation. Each instruction set fills a table of its own; `dispatch.cpp` picks one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvist {

struct KernelTable {
    const char* isa;

    // The sum of `count` words modulo 2^64. `words` is aligned to 8 bytes.
    std::uint64_t (*sum_words)(const std::uint64_t* words, std::size_t count);
};

}  // namespace kvist
