#include "kernel_table.h"
#include "kernels/kernels.h"

#define KVIST_QUOTE(text) #text
#define KVIST_QUOTE_VALUE(macro) KVIST_QUOTE(macro)

namespace kvist::KVIST_ISA {

extern const KernelTable table;
constinit const KernelTable table = {
    .isa = KVIST_QUOTE_VALUE(KVIST_ISA),
    .sum_words = sum_words,
    .prepare_queries = prepare_queries,
    .attend = attend,
    .attention_scratch_bytes = attention_scratch_bytes,
    .append = append,
    .append_scratch_floats = append_scratch_floats,
    .quantise_rows = quantise_rows,
    .multiply_rows = multiply_rows,
    .linear_sizes = linear_sizes,
    .norm_rows = norm_rows,
    .prepare_heads = prepare_heads,
    .add_rows = add_rows,
    .gate_rows = gate_rows,
};

}  // namespace kvist::KVIST_ISA
