#include "linear_bindings.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "dispatch.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvist {

namespace {

constexpr std::int64_t kMostThreads = 1024;
constexpr std::int64_t kMostRows = std::int64_t{1} << 40;
constexpr nb::dlpack::dtype kBf16{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};

// Quantised rows of one slice of the input: what stays in a core's second cache beside a panel of weights.
constexpr std::size_t kSliceBytes = std::size_t{1} << 20;
constexpr std::size_t kLeastSliceRows = 48;
// Numbers of the input, and products, below which waking other threads costs more than it saves.
constexpr std::size_t kLeastInputToShare = std::size_t{1} << 14;
constexpr std::size_t kLeastProductsToShare = std::size_t{1} << 17;

Weights weights_named(const std::string& name) {
    for (std::size_t i = 0; i < std::size(kWeightFormats); ++i) {
        if (name == kWeightFormats[i].name) return static_cast<Weights>(i);
    }
    throw nb::value_error(("format is '" + name + "': that is no format of weights").c_str());
}

// Every product passes here: messages are only made where they are needed.
void check_rows(const char* name, const AnyArray& array, std::size_t columns) {
    const auto fail = [&](const std::string& what) { check(false, std::string(name) + " " + what); };
    if (array.device_type() != nb::device::cpu::value) fail("must be on the CPU");
    const bool is_float = array.dtype() == nb::dtype<float>();
    if (!is_float && array.dtype() != kBf16) fail("must have dtype float32 or bfloat16");
    if (array.ndim() != 2) fail("has " + std::to_string(array.ndim()) + " dimensions: it must have 2");
    if (array.shape(1) != columns) {
        fail("has " + std::to_string(array.shape(1)) + " columns: it must have " + std::to_string(columns));
    }
    if (columns > 1 && array.stride(1) != 1) fail("must have contiguous columns");
    if (array.shape(0) > 1 && array.stride(0) < 0) fail("must not have negative strides");
    if (reinterpret_cast<std::uintptr_t>(array.data()) % (is_float ? 4 : 2) != 0) fail("must be aligned");
}

std::size_t row_stride(const AnyArray& array) {
    return array.shape(0) > 1 ? static_cast<std::size_t>(array.stride(0)) : 0;
}

// The bytes from an array's first element to behind its last.
std::pair<std::uintptr_t, std::uintptr_t> extent(const AnyArray& array) {
    const auto start = reinterpret_cast<std::uintptr_t>(array.data());
    const std::size_t elements = (array.shape(0) - 1) * row_stride(array) + array.shape(1);
    return {start, start + elements * (array.dtype().bits / 8u)};
}

struct ParallelProduct {
    const KernelTable& table;
    LinearTask task;
};

void quantise_part(void* context, int part, int parts) {
    const auto& product = *static_cast<ParallelProduct*>(context);
    product.table.quantise_rows(product.task, part, parts);
}

void multiply_part(void* context, int part, int parts) {
    const auto& product = *static_cast<ParallelProduct*>(context);
    product.table.multiply_rows(product.task, part, parts);
}

void run_job(int num_threads, PartFunction function, ParallelProduct& product) {
    if (num_threads == 1) return function(&product, 0, 1);
    run_parallel(num_threads, function, &product);
}

std::uint8_t* advanced(const void* data, std::size_t elements, bool is_bf16) {
    return static_cast<std::uint8_t*>(const_cast<void*>(data)) + elements * (is_bf16 ? 2u : 4u);
}

void run_linear(const KernelTable& table, const LinearTask& whole, int num_threads) {
    const WeightMatrix& weight = *whole.weight;
    const std::size_t row_bytes = table.linear_sizes(weight, whole.num_rows).row;
    const std::size_t slice_rows = std::max(kLeastSliceRows, kSliceBytes / row_bytes);
    const std::size_t num_slices = (whole.num_rows + slice_rows - 1) / slice_rows;
    const std::size_t most_rows = (whole.num_rows + num_slices - 1) / num_slices;
    const std::size_t scratch_bytes = table.linear_sizes(weight, most_rows).scratch;

    const std::size_t rows_bytes = (most_rows * row_bytes + 63) / 64 * 64;
    const auto memory = std::make_unique_for_overwrite<std::uint8_t[]>(
        64 + rows_bytes + scratch_bytes * static_cast<std::size_t>(num_threads));
    std::uint8_t* aligned = memory.get() + (64 - reinterpret_cast<std::uintptr_t>(memory.get()) % 64);

    ParallelProduct product{table, whole};
    LinearTask& task = product.task;
    task.rows = aligned;
    task.scratch = aligned + rows_bytes;
    const std::size_t columns = weight.num_groups * kGroupColumns;
    for (std::size_t slice = 0; slice < num_slices; ++slice) {
        const std::size_t first = whole.num_rows * slice / num_slices;
        task.num_rows = whole.num_rows * (slice + 1) / num_slices - first;
        task.x.data = advanced(whole.x.data, first * whole.x.stride, whole.x.is_bf16);
        task.out.data = advanced(whole.out.data, first * whole.out.stride, whole.out.is_bf16);
        const std::size_t numbers = task.num_rows * columns;
        run_job(numbers < kLeastInputToShare ? 1 : num_threads, quantise_part, product);
        run_job(numbers * weight.num_rows < kLeastProductsToShare ? 1 : num_threads, multiply_part, product);
    }
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
    check_between("num_threads", num_threads, 1, kMostThreads);
    if (x.shape(0) == 0) return;
    check(out.shape(0) < 2 || row_stride(written) >= out.shape(1), "out must not overlap itself");
    const auto [x_start, x_stop] = extent(x);
    const auto [out_start, out_stop] = extent(written);
    check(x_stop <= out_start || out_stop <= x_start, "x and out must not overlap");
    LinearTask task{};
    task.weight = &matrix;
    task.x = {x.data(), row_stride(x), x.dtype() == kBf16};
    task.out = {out.data(), row_stride(written), out.dtype() == kBf16};
    task.num_rows = x.shape(0);
    const KernelTable& table = kernels();
    nb::gil_scoped_release release;
    run_linear(table, task, static_cast<int>(num_threads));
}

}  // namespace

LinearWeight::LinearWeight(const std::string& format, std::int64_t num_rows, std::int64_t num_columns, AnyArray data)
    : data_(std::move(data)) {
    matrix_.format = weights_named(format);
    check_between("num_rows", num_rows, 1, kMostRows);
    check_between("num_columns", num_columns, 1, kMostRows);
    check(num_columns % static_cast<std::int64_t>(kGroupColumns) == 0, [&] {
        return "num_columns is " + std::to_string(num_columns) + ": it must be a multiple of " +
               std::to_string(kGroupColumns);
    });
    matrix_.num_rows = static_cast<std::size_t>(num_rows);
    matrix_.num_groups = static_cast<std::size_t>(num_columns) / kGroupColumns;
    check(data_.device_type() == nb::device::cpu::value, "data must be on the CPU");
    check(data_.dtype() == nb::dtype<std::uint8_t>(), "data must have dtype uint8");
    check(data_.ndim() == 2 && data_.shape(0) == num_tiles(matrix_) && data_.shape(1) == tile_bytes(matrix_), [&] {
        return "data must have the shape [" + std::to_string(num_tiles(matrix_)) + ", " +
               std::to_string(tile_bytes(matrix_)) + "] for " + format + " weights of " + std::to_string(num_rows) +
               " rows and " + std::to_string(num_columns) + " columns";
    });
    check(data_.stride(1) == 1 &&
              (data_.shape(0) < 2 || data_.stride(0) == static_cast<std::int64_t>(tile_bytes(matrix_))),
          "data must be contiguous");
    check(reinterpret_cast<std::uintptr_t>(data_.data()) % kTileLineBytes == 0, "data must be aligned to 64 bytes");
    matrix_.data = static_cast<const std::uint8_t*>(data_.data());
}

void bind_linear(nb::module_& m) {
    nb::class_<LinearWeight>(m, "LinearWeight")
        .def(nb::init<const std::string&, std::int64_t, std::int64_t, AnyArray>(), "format"_a, "num_rows"_a,
             "num_columns"_a, "data"_a)
        .def("apply", &apply, "x"_a, "out"_a, nb::kw_only(), "num_threads"_a);
}

}  // namespace kvist
