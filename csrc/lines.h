// Cache lines: what memory for the kernels is aligned to.
#pragma once

#include <cstddef>

namespace kvist {
namespace {  // internal linkage: the kernels include this too, and must share nothing between instruction sets

constexpr std::size_t whole_lines(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace
}  // namespace kvist
