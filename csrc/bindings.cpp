// The Python module kvist.kernels._native. Only src/kvist/kernels/native.py calls it, and states its types.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "read_bandwidth.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::int64_t kMostThreads = 1024;
constexpr std::int64_t kMostPasses = 1'000'000;
constexpr std::int64_t kLeastBufferBytes = std::int64_t{64} << 10;
constexpr std::int64_t kMostBufferBytes = std::int64_t{1} << 46;

std::vector<std::string> names(const std::vector<const kvist::KernelTable*>& tables) {
    std::vector<std::string> isas;
    for (const kvist::KernelTable* table : tables) isas.emplace_back(table->isa);
    return isas;
}

std::int64_t sum_words(const kvist::AnyArray& words, std::int64_t num_threads) {
    const auto* data = kvist::check_vector<std::int64_t>("words", words, "int64");
    kvist::check_between("num_threads", num_threads, 1, kMostThreads);
    const kvist::KernelTable& table = kvist::kernels();
    const std::size_t count = words.shape(0);
    nb::gil_scoped_release release;
    return static_cast<std::int64_t>(kvist::parallel_sum_words(
        table, reinterpret_cast<const std::uint64_t*>(data), count, static_cast<int>(num_threads)));
}

std::vector<double> read_rates(std::int64_t buffer_bytes, std::int64_t passes, std::int64_t num_threads) {
    kvist::check_between("buffer_bytes", buffer_bytes, kLeastBufferBytes, kMostBufferBytes);
    kvist::check_between("passes", passes, 1, kMostPasses);
    kvist::check_between("num_threads", num_threads, 1, kMostThreads);
    const kvist::KernelTable& table = kvist::kernels();
    nb::gil_scoped_release release;
    return kvist::read_rates(table, static_cast<std::size_t>(buffer_bytes), static_cast<int>(passes),
                             static_cast<int>(num_threads));
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("built_isas", [] { return names(kvist::built_tables()); });
    m.def("runnable_isas", [] { return names(kvist::runnable_tables()); });
    m.def("choose_isa", [](const std::string& max_isa) { return kvist::choose_kernels(max_isa).isa; }, "max_isa"_a);
    m.def("chosen_isa", [] { return kvist::kernels().isa; });
    m.def("sum_words", &sum_words, "words"_a, "num_threads"_a);
    m.def("read_rates", &read_rates, "buffer_bytes"_a, "passes"_a, "num_threads"_a);
}
