// The Python module kvist.kernels._native. Only src/kvist/kernels/native.py calls it; native_types.py states its types.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "append_bindings.h"
#include "attention_bindings.h"
#include "checks.h"
#include "dispatch.h"
#include "layer_bindings.h"
#include "linear_bindings.h"
#include "page_bindings.h"
#include "page_layout.h"
#include "read_bandwidth.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::int64_t kMostPasses = 1'000'000;
constexpr std::int64_t kLeastBufferBytes = std::int64_t{64} << 10;
constexpr std::int64_t kMostBufferBytes = std::int64_t{1} << 46;

std::vector<std::string> names(const std::vector<const kvist::KernelTable*>& tables) {
    std::vector<std::string> isas;
    for (const kvist::KernelTable* table : tables) isas.emplace_back(table->isa);
    return isas;
}

// Many passes take long: Ctrl-C must not wait for the last.
void raise_signals() {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

std::vector<double> read_rates(std::int64_t buffer_bytes, std::int64_t passes, std::int64_t num_threads) {
    kvist::check_between("buffer_bytes", buffer_bytes, kLeastBufferBytes, kMostBufferBytes);
    kvist::check_between("passes", passes, 1, kMostPasses);
    const int threads = kvist::check_threads(num_threads);
    const kvist::KernelTable& table = kvist::kernels();
    nb::gil_scoped_release release;
    return kvist::read_rates(table, static_cast<std::size_t>(buffer_bytes), static_cast<int>(passes),
                             threads, raise_signals);
}

// --- the bytes of a page ---------------------------------------------------------------------------------------------

const kvist::StorageFormat& storage_format(const std::string& name) {
    for (const kvist::StorageFormat& format : kvist::kStorageFormats) {
        if (name == format.name) return format;
    }
    throw nb::value_error(("'" + name + "' is no storage format").c_str());
}

nb::dict page_layout() {
    nb::dict formats;
    for (const kvist::StorageFormat& format : kvist::kStorageFormats) {
        nb::dict fields;
        fields["bits"] = format.bits;
        fields["codes_per_lane"] = format.codes_per_lane();
        fields["scalars"] = format.scalars;
        fields["scalar_bytes"] = format.scalar_bytes;
        formats[format.name] = fields;
    }
    nb::dict layout;
    layout["version"] = kvist::kPageLayoutVersion;
    layout["slots"] = kvist::kPageSlots;
    layout["lanes"] = kvist::kLanes;
    layout["lane_bytes"] = kvist::kLaneBytes;
    layout["int8_key_bias"] = kvist::kInt8KeyBias;
    layout["most_head_dim"] = kvist::kMostHeadDim;
    layout["formats"] = formats;
    return layout;
}

bool takes_head_dim(const std::string& name, std::int64_t head_dim) {
    return head_dim > 0 && kvist::takes_head_dim(storage_format(name), static_cast<std::size_t>(head_dim));
}

std::size_t check_head_dim(const kvist::StorageFormat& format, std::int64_t head_dim) {
    kvist::check_between("head_dim", head_dim, 1, kvist::kMostHeadDim);
    kvist::check(kvist::takes_head_dim(format, static_cast<std::size_t>(head_dim)),
                 "head_dim is " + std::to_string(head_dim) + ": " + format.name + " takes multiples of " +
                     std::to_string(format.codes_per_lane()));
    return static_cast<std::size_t>(head_dim);
}

std::size_t group_dims(const std::string& name, std::int64_t head_dim) {
    const kvist::StorageFormat& format = storage_format(name);
    return format.group_dims(check_head_dim(format, head_dim));
}

using HeadOffsets = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t>;

HeadOffsets head_layout(const std::string& keys, const std::string& values, std::int64_t head_dim) {
    const kvist::StorageFormat& key_format = storage_format(keys);
    const kvist::StorageFormat& value_format = storage_format(values);
    check_head_dim(key_format, head_dim);
    const kvist::HeadLayout head =
        kvist::head_layout(key_format, value_format, check_head_dim(value_format, head_dim));
    return {head.key_codes, head.key_scales, head.value_codes, head.value_scales, head.bytes};
}

std::tuple<std::size_t, std::size_t> code_place(const std::string& side, const std::string& name,
                                                std::int64_t head_dim, std::int64_t slot, std::int64_t dim) {
    kvist::check(side == "keys" || side == "values", "side is '" + side + "': it must be keys or values");
    const kvist::StorageFormat& format = storage_format(name);
    const std::size_t dims = check_head_dim(format, head_dim);
    kvist::check_between("slot", slot, 0, kvist::kPageSlots - 1);
    kvist::check_between("dim", dim, 0, head_dim - 1);
    const auto s = static_cast<std::size_t>(slot);
    const auto d = static_cast<std::size_t>(dim);
    const kvist::CodePlace place =
        side == "keys" ? kvist::key_place(format, dims, s, d) : kvist::value_place(format, s, d);
    return {place.byte, place.bit};
}

std::size_t scalar_place(const std::string& name, std::int64_t slot, std::int64_t group, std::int64_t scalar) {
    const kvist::StorageFormat& format = storage_format(name);
    kvist::check_between("slot", slot, 0, kvist::kPageSlots - 1);
    kvist::check_between("group", group, 0, kvist::kMostHeadDim);
    kvist::check_between("scalar", scalar, 0, static_cast<std::int64_t>(format.scalars) - 1);
    return kvist::scalar_place(format, static_cast<std::size_t>(slot), static_cast<std::size_t>(group),
                               static_cast<std::size_t>(scalar));
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("built_isas", [] { return names(kvist::built_tables()); });
    m.def("runnable_isas", [] { return names(kvist::runnable_tables()); });
    m.def("choose_isa", [](const std::string& max_isa) { return kvist::choose_kernels(max_isa).isa; }, "max_isa"_a);
    m.def("chosen_isa", [] { return kvist::kernels().isa; });
    m.def("read_rates", &read_rates, "buffer_bytes"_a, "passes"_a, "num_threads"_a);
    m.def("page_layout", &page_layout);
    m.def("takes_head_dim", &takes_head_dim, "format"_a, "head_dim"_a);
    m.def("group_dims", &group_dims, "format"_a, "head_dim"_a);
    m.def("head_layout", &head_layout, "keys"_a, "values"_a, "head_dim"_a);
    m.def("code_place", &code_place, "side"_a, "format"_a, "head_dim"_a, "slot"_a, "dim"_a);
    m.def("scalar_place", &scalar_place, "format"_a, "slot"_a, "group"_a, "scalar"_a);
    kvist::bind_pages(m);
    kvist::bind_append();
    kvist::bind_attention();
    kvist::bind_linear(m);
    kvist::bind_layer(m);
}
