#include "read_bandwidth.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>

#include "parallel.h"

namespace kvist {

namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Memory of its own, in huge pages where the system has them, so that reading it costs few address translations. It is not
// touched here: the thread that writes a page first decides which memory it lies in.
class Buffer {
public:
    explicit Buffer(std::size_t bytes) : mapped_bytes_(bytes + kHugePageBytes) {
        mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapping_ == MAP_FAILED) throw std::bad_alloc();
        const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
        aligned_ = (address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
#if defined(MADV_HUGEPAGE)
        madvise(reinterpret_cast<void*>(aligned_), bytes, MADV_HUGEPAGE);  // advice: small pages do as well
#endif
    }
    ~Buffer() { munmap(mapping_, mapped_bytes_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::uint64_t* words() const { return reinterpret_cast<std::uint64_t*>(aligned_); }

private:
    std::size_t mapped_bytes_;
    void* mapping_;
    std::uintptr_t aligned_;
};

struct Run {
    std::size_t begin, end;
};

// Part `part` of `count` words. Runs begin at whole cache lines and leave out none.
Run run_of(std::size_t count, int part, int parts) {
    constexpr std::size_t kCacheLineWords = 8;
    const auto at = [&](int index) {
        const std::size_t lines = (count + kCacheLineWords - 1) / kCacheLineWords;
        const auto numerator = static_cast<std::size_t>(index), denominator = static_cast<std::size_t>(parts);
        const std::size_t line = lines / denominator * numerator + lines % denominator * numerator / denominator;
        return std::min(count, line * kCacheLineWords);
    };
    return {at(part), at(part + 1)};
}

struct FillJob {
    std::uint64_t* words;
    std::size_t count;
};

// Word i becomes i, so that the sum tells whether every word was read once.
void fill_part(void* context, int part, int parts) {
    const FillJob& job = *static_cast<FillJob*>(context);
    const Run run = run_of(job.count, part, parts);
    for (std::size_t i = run.begin; i < run.end; ++i) job.words[i] = i;
}

struct SumJob {
    const KernelTable& table;
    const std::uint64_t* words;
    std::size_t count;
    std::atomic<std::uint64_t> total = 0;
};

void sum_part(void* context, int part, int parts) {
    SumJob& job = *static_cast<SumJob*>(context);
    const Run run = run_of(job.count, part, parts);
    job.total += job.table.sum_words(job.words + run.begin, run.end - run.begin);
}

// The sum of all words modulo 2^64, each thread reading a run of its own.
std::uint64_t sum_words(const KernelTable& table, const std::uint64_t* words, std::size_t count, int num_threads) {
    SumJob job{table, words, count};
    run_parallel(num_threads, sum_part, &job);
    return job.total;
}

}  // namespace

std::vector<double> read_rates(const KernelTable& table, std::size_t buffer_bytes, int passes, int num_threads,
                               void (*between)()) {
    const std::size_t count = buffer_bytes / sizeof(std::uint64_t);
    const Buffer buffer(count * sizeof(std::uint64_t));
    FillJob fill{buffer.words(), count};
    run_parallel(num_threads, fill_part, &fill);  // divided as the reading is: each thread reads what it touched first

    const std::uint64_t expected = count % 2 == 0 ? count / 2 * (count - 1) : (count - 1) / 2 * count;
    std::vector<double> rates;
    for (int pass = 0; pass < passes; ++pass) {
        const auto start = std::chrono::steady_clock::now();
        const std::uint64_t total = sum_words(table, buffer.words(), count, num_threads);
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        if (total != expected) throw std::runtime_error("the read-bandwidth probe did not read what it wrote");
        rates.push_back(static_cast<double>(count * sizeof(std::uint64_t)) / elapsed.count());
        between();
    }
    return rates;
}

}  // namespace kvist
