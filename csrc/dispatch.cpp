#include "dispatch.h"

#include <atomic>
#include <initializer_list>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvist {

#define KVIST_DECLARE_TABLE(isa)     \
    namespace isa {                  \
    extern const KernelTable table;  \
    }

#if defined(KVIST_WITH_GENERIC)
KVIST_DECLARE_TABLE(generic)
#endif
#if defined(KVIST_WITH_BASELINE)
KVIST_DECLARE_TABLE(baseline)
#endif
#if defined(KVIST_WITH_AVX2)
KVIST_DECLARE_TABLE(avx2)
#endif
#if defined(KVIST_WITH_AVX512)
KVIST_DECLARE_TABLE(avx512)
#endif

namespace {

#if defined(__x86_64__)

enum Register { kEax, kEbx, kEcx, kEdx };

// A feature flag: CPUID leaf and subleaf, the register it answers in, and the bit there.
struct Feature {
    unsigned leaf, subleaf;
    Register reg;
    unsigned bit;
};

constexpr Feature kSse3{1, 0, kEcx, 0}, kSsse3{1, 0, kEcx, 9}, kFma{1, 0, kEcx, 12}, kCx16{1, 0, kEcx, 13},
    kSse41{1, 0, kEcx, 19}, kSse42{1, 0, kEcx, 20}, kMovbe{1, 0, kEcx, 22}, kPopcnt{1, 0, kEcx, 23},
    kOsxsave{1, 0, kEcx, 27}, kAvx{1, 0, kEcx, 28}, kF16c{1, 0, kEcx, 29}, kBmi1{7, 0, kEbx, 3}, kAvx2{7, 0, kEbx, 5},
    kBmi2{7, 0, kEbx, 8}, kAvx512f{7, 0, kEbx, 16}, kAvx512dq{7, 0, kEbx, 17}, kAvx512cd{7, 0, kEbx, 28},
    kAvx512bw{7, 0, kEbx, 30}, kAvx512vl{7, 0, kEbx, 31}, kAvx512vnni{7, 0, kEcx, 11}, kLahf{0x80000001, 0, kEcx, 0},
    kLzcnt{0x80000001, 0, kEcx, 5};

// Register files that the operating system saves at a task switch, as bits of XCR0: where it does not, an instruction
// that the CPU has faults all the same.
constexpr unsigned kXmmYmm = 0x6, kXmmYmmOpmaskZmm = 0xe6;

bool has(const Feature& feature) {
    unsigned regs[4] = {};
    if (!__get_cpuid_count(feature.leaf, feature.subleaf, &regs[0], &regs[1], &regs[2], &regs[3])) return false;
    return (regs[feature.reg] >> feature.bit) & 1;
}

bool has_all(std::initializer_list<Feature> features) {
    for (const Feature& feature : features) {
        if (!has(feature)) return false;
    }
    return true;
}

bool system_saves(unsigned register_files) {
    if (!has(kOsxsave)) return false;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & register_files) == register_files;
}

// What `-march=x86-64-v2`, `-v3` and `-v4` plus VNNI let the compiler use: see CMakeLists.txt.
bool runs_baseline() { return has_all({kSse3, kSsse3, kSse41, kSse42, kPopcnt, kCx16, kLahf}); }

bool runs_avx2() {
    return runs_baseline() && system_saves(kXmmYmm) &&
           has_all({kAvx, kAvx2, kFma, kF16c, kBmi1, kBmi2, kLzcnt, kMovbe});
}

bool runs_avx512() {
    return runs_avx2() && system_saves(kXmmYmmOpmaskZmm) &&
           has_all({kAvx512f, kAvx512bw, kAvx512cd, kAvx512dq, kAvx512vl, kAvx512vnni});
}

#endif

bool runs(std::string_view isa) {
#if defined(__x86_64__)
    if (isa == "avx512") return runs_avx512();
    if (isa == "avx2") return runs_avx2();
    if (isa == "baseline") return runs_baseline();
#endif
    return isa == "generic";
}

std::string names(const std::vector<const KernelTable*>& tables) {
    std::string joined;
    for (const KernelTable* table : tables) joined += (joined.empty() ? "" : ", ") + std::string(table->isa);
    return joined;
}

std::atomic<const KernelTable*> chosen = nullptr;

}  // namespace

const std::vector<const KernelTable*>& built_tables() {
    static const std::vector<const KernelTable*> tables = {
#if defined(KVIST_WITH_GENERIC)
        &generic::table,
#endif
#if defined(KVIST_WITH_BASELINE)
        &baseline::table,
#endif
#if defined(KVIST_WITH_AVX2)
        &avx2::table,
#endif
#if defined(KVIST_WITH_AVX512)
        &avx512::table,
#endif
    };
    return tables;
}

std::vector<const KernelTable*> runnable_tables() {
    std::vector<const KernelTable*> runnable;
    for (const KernelTable* table : built_tables()) {
        if (runs(table->isa)) runnable.push_back(table);
    }
    return runnable;
}

const KernelTable& choose_kernels(std::string_view max_isa) {
    const KernelTable* best = nullptr;
    bool known = max_isa.empty();
    for (const KernelTable* table : built_tables()) {
        if (runs(table->isa)) best = table;
        if (table->isa == max_isa) {
            known = true;
            break;
        }
    }
    const std::string built = names(built_tables());
    if (!known) {
        throw std::invalid_argument("this build has no instruction set '" + std::string(max_isa) + "' but " + built);
    }
    if (best == nullptr) {
        throw std::runtime_error("this CPU runs none of the instruction sets of this build, which has " + built);
    }
    chosen = best;
    return *best;
}

const KernelTable& kernels() {
    const KernelTable* table = chosen;
    if (table == nullptr) throw std::logic_error("no instruction set has been chosen yet");
    return *table;
}

}  // namespace kvist
