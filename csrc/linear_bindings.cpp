#include "linear_bindings.h"

#include <nanobind/stl/string.h>

#include <bit>
#include <cstring>
#include <iterator>
#include <utility>

#include "linear_products.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvist {

namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 40;

Weights weights_named(const std::string& name) {
    for (std::size_t i = 0; i < std::size(kWeightFormats); ++i) {
        if (name == kWeightFormats[i].name) return static_cast<Weights>(i);
    }
    throw nb::value_error(("format is '" + name + "': that is no format of weights").c_str());
}

void check_rows(const char* name, const AnyArray& array, std::size_t columns) {
    check_numbers(name, array, 2);
    check(array.shape(1) == columns, [&] {
        return std::string(name) + " has " + std::to_string(array.shape(1)) + " columns: it must have " +
               std::to_string(columns);
    });
    check(array.shape(0) < 2 || array.stride(0) >= 0,
          [&] { return std::string(name) + " must not have negative strides"; });
}

std::size_t row_stride(const AnyArray& array) {
    return array.shape(0) > 1 ? static_cast<std::size_t>(array.stride(0)) : 0;
}

void apply(const LinearWeight& weight, const AnyArray& x, const nb::ndarray<>& out, std::int64_t num_threads) {
    const WeightMatrix& matrix = weight.matrix();
    const AnyArray written(out);
    check_rows("x", x, matrix.num_groups * kGroupColumns);
    check_rows("out", written, matrix.num_rows);
    check(x.shape(0) == out.shape(0), [&] {
        return "out has " + std::to_string(out.shape(0)) + " rows: it must have the " + std::to_string(x.shape(0)) +
               " of x";
    });
    const int threads = check_threads(num_threads);
    if (x.shape(0) == 0) return;
    check(out.shape(0) < 2 || row_stride(written) >= out.shape(1), "out must not overlap itself");
    check(!extent(written).overlaps(extent(x)), "x and out must not overlap");
    check(!extent(written).overlaps(weight.bytes()), "out must not overlap the weights");
    const Product product{&matrix, {out.data(), row_stride(written), is_bf16(written)}};
    const InputRows rows{x.data(), row_stride(x), is_bf16(x)};
    nb::gil_scoped_release release;
    run_products(&product, 1, rows, x.shape(0), threads);
}

float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16, size = half & 0x7fffu;
    if (size < 0x0400) {  // a denormal number of fp16
        const float number = static_cast<float>(size) * 0x1p-24f;
        return sign == 0 ? number : -number;
    }
    const std::uint32_t bias = size >= 0x7c00 ? 224u << 23 : 112u << 23;
    return std::bit_cast<float>(sign | ((size << 13) + bias));
}

// One row of the matrix as numbers. Each product and sum is rounded by itself, as in the twin.
void decode_row(const WeightMatrix& weight, std::size_t row, float* to) {
    const WeightFormat& format = format_of(weight.format);
    if (weight.format == Weights::kBf16) {
        const std::size_t columns = weight.num_groups * kGroupColumns;
        const std::uint8_t* from = weight.data + row * columns * sizeof(std::uint16_t);
        for (std::size_t i = 0; i < columns; ++i, from += sizeof(std::uint16_t)) {
            std::uint16_t half;
            std::memcpy(&half, from, sizeof half);
            to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
        }
        return;
    }
    const std::size_t lane = row % kTileRows;
    const std::uint8_t* tile = weight.data + row / kTileRows * tile_bytes(weight);
    for (std::size_t group = 0; group < weight.num_groups; ++group, to += kGroupColumns) {
        const std::uint8_t* block = tile + group / format.groups_per_block() * format.block_bytes();
        const std::size_t in_block = group % format.groups_per_block();
        const auto scalar = [&](std::size_t index) {
            std::uint16_t half;
            std::memcpy(&half, block + (index * kTileRows + lane) * sizeof half, sizeof half);
            return half_to_float(half);
        };
        const float step = scalar(in_block), minimum = format.has_minimum ? scalar(1) : 0.0f;
        const std::uint8_t* codes = block + kTileLineBytes + in_block * format.code_bytes() + lane * 4;
        for (std::size_t i = 0; i < kGroupColumns; ++i) {
            const std::size_t unit = i / 4;
            std::int32_t code;
            if (format.bits == 8) {
                code = codes[unit * kTileLineBytes + i % 4];
            } else {
                code = codes[unit / 2 * kTileLineBytes + i % 4] >> (unit % 2 * 4) & 0x0f;
            }
            const float number = static_cast<float>(code - format.zero) * step;
            to[i] = format.has_minimum ? number + minimum : number;
        }
    }
}

void decode_rows(const LinearWeight& weight, const AnyArray& rows, const nb::ndarray<>& out) {
    const WeightMatrix& matrix = weight.matrix();
    const auto* indices = check_vector<std::int64_t>("rows", rows, "int64");
    const AnyArray written(out);
    check_rows("out", written, matrix.num_groups * kGroupColumns);
    check(is_float(written), "out must have dtype float32");
    check(out.shape(0) == rows.shape(0), [&] {
        return "out has " + std::to_string(out.shape(0)) + " rows: it must have " + std::to_string(rows.shape(0));
    });
    check(out.shape(0) < 2 || row_stride(written) >= out.shape(1), "out must not overlap itself");
    check(!extent(written).overlaps(extent(rows)), "rows and out must not overlap");
    check(!extent(written).overlaps(weight.bytes()), "out must not overlap the weights");
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
        check_between("a row", indices[i], 0, static_cast<std::int64_t>(matrix.num_rows) - 1);
    }
    auto* to = static_cast<float*>(out.data());
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
        decode_row(matrix, static_cast<std::size_t>(indices[i]), to + i * row_stride(written));
    }
}

}  // namespace

LinearWeight::LinearWeight(const std::string& format, std::int64_t num_rows, std::int64_t num_columns, AnyArray data,
                           bool fine_rows)
    : data_(std::move(data)) {
    matrix_.fine_rows = fine_rows;
    matrix_.format = weights_named(format);
    check_between("num_rows", num_rows, 1, kMostRows);
    check_between("num_columns", num_columns, 1, kMostRows);
    check(num_columns % static_cast<std::int64_t>(kGroupColumns) == 0, [&] {
        return "num_columns is " + std::to_string(num_columns) + ": it must be a multiple of " +
               std::to_string(kGroupColumns);
    });
    matrix_.num_rows = static_cast<std::size_t>(num_rows);
    matrix_.num_groups = static_cast<std::size_t>(num_columns) / kGroupColumns;
    const bool plain = matrix_.format == Weights::kBf16;
    const std::size_t rows = plain ? matrix_.num_rows : num_tiles(matrix_);
    const std::size_t columns = plain ? static_cast<std::size_t>(num_columns) : tile_bytes(matrix_);
    check_array("data", data_, 2, plain ? is_bf16(data_) : data_.dtype() == nb::dtype<std::uint8_t>(),
                plain ? "bfloat16" : "uint8");
    check(data_.shape(0) == rows && data_.shape(1) == columns, [&] {
        return "data must have the shape [" + std::to_string(rows) + ", " + std::to_string(columns) + "] for " +
               format + " weights of " + std::to_string(num_rows) + " rows and " + std::to_string(num_columns) +
               " columns";
    });
    check(data_.shape(0) < 2 || data_.stride(0) == static_cast<std::int64_t>(columns), "data must be contiguous");
    check(plain || reinterpret_cast<std::uintptr_t>(data_.data()) % kTileLineBytes == 0,
          "data must be aligned to 64 bytes");
    check(!plain || !fine_rows, "rows that meet bf16 weights are not quantised: they cannot be fine");
    matrix_.data = static_cast<const std::uint8_t*>(data_.data());
    bytes_ = extent(data_);
}

void bind_linear(nb::module_& m) {
    nb::class_<LinearWeight>(m, "LinearWeight")
        .def(nb::init<const std::string&, std::int64_t, std::int64_t, AnyArray, bool>(), "format"_a, "num_rows"_a,
             "num_columns"_a, "data"_a, "fine_rows"_a)
        .def("apply", &apply, "x"_a, "out"_a, nb::kw_only(), "num_threads"_a)
        .def("decode_rows", &decode_rows, "rows"_a, "out"_a);
}

}  // namespace kvist
