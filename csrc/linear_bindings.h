// Products with weights, for Python.
#pragma once

#include <cstdint>
#include <string>

#include "checks.h"
#include "linear.h"

namespace kvist {

// A matrix of Python. Keeps its bytes alive.
class LinearWeight {
public:
    // data: [tiles, bytes of a tile] uint8, contiguous and aligned to 64 bytes; or, for bf16, the matrix, contiguous.
    LinearWeight(const std::string& format, std::int64_t num_rows, std::int64_t num_columns, AnyArray data,
                 bool fine_rows);
    LinearWeight(const LinearWeight&) = delete;
    LinearWeight& operator=(const LinearWeight&) = delete;

    const WeightMatrix& matrix() const { return matrix_; }
    const Extent& bytes() const { return bytes_; }

private:
    AnyArray data_;
    Extent bytes_;
    WeightMatrix matrix_{};
};

void bind_linear(nanobind::module_& m);

}  // namespace kvist
