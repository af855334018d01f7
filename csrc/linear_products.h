// Products of the same rows with some matrices: rows are quantised or widened once for all matrices that take them alike,
// and threads start and wait once for all products.
#pragma once

#include <cstddef>

#include "linear.h"

namespace kvist {

constexpr std::size_t kMostProducts = 3;

struct Product {
    const WeightMatrix* weight;
    OutputRows out;  // overlaps neither the rows nor another's
};

// From 1 to `kMostProducts`, whose matrices have as many columns as `x`. Input and output rows are [num_rows, ...].
// std::bad_alloc if the system refuses memory.
void run_products(const Product* products, std::size_t count, const InputRows& x, std::size_t num_rows,
                  int num_threads);

}  // namespace kvist
