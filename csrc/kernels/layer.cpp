// What a decoder layer does between its products, over the rows of a part.
#include "layer.h"

#include "kernels/kernels.h"
#include "kernels/layer_rows.h"

namespace kvist::KVIST_ISA {

namespace {

template <typename Row>
void each_row(std::size_t num_rows, int part, int parts, Row row) {
    const auto p = static_cast<std::size_t>(part), n = static_cast<std::size_t>(parts);
    const std::size_t stop = num_rows * (p + 1) / n;
    for (std::size_t i = num_rows * p / n; i < stop; ++i) row(i);
}

}  // namespace

void norm_rows(const NormTask& task, int part, int parts) {
    each_row(task.num_rows, part, parts, [&](std::size_t row) {
        const std::size_t at = row * task.dims;
        norm_row(task.x + at, task.norm, task.numbers, task.dims, task.out + at);
    });
}

void prepare_heads(const HeadsTask& task, int part, int parts) {
    each_row(task.num_rows, part, parts, [&](std::size_t row) {
        for (std::size_t head = 0; head < task.num_heads; ++head) {
            float* x = task.rows + (row * task.num_heads + head) * task.head_dim;
            const std::size_t at = row * task.head_dim;
            if (task.bias != nullptr) add_row(x, task.bias + head * task.head_dim, task.head_dim);
            if (task.norm != nullptr) norm_row(x, task.norm, task.numbers, task.head_dim, x);
            if (task.cos != nullptr) turn_head(x, task.cos + at, task.sin + at, task.head_dim / 2);
        }
    });
}

void add_rows(const AddTask& task, int part, int parts) {
    each_row(task.num_rows, part, parts, [&](std::size_t row) {
        float* x = task.x + row * task.dims;
        float* y = task.y + row * task.dims;
        if (task.bias != nullptr) add_row(y, task.bias, task.dims);
        if (task.y_norm != nullptr) norm_row(y, task.y_norm, task.numbers, task.dims, y);
        add_row(x, y, task.dims);
        if (task.normed != nullptr) norm_row(x, task.x_norm, task.numbers, task.dims, task.normed + row * task.dims);
    });
}

void gate_rows(const GateTask& task, int part, int parts) {
    const auto function =
        task.activation == Activation::kSilu ? gate_row<Activation::kSilu> : gate_row<Activation::kGeluTanh>;
    each_row(task.num_rows, part, parts, [&](std::size_t row) {
        const std::size_t at = row * task.dims;
        function(task.gate + at, task.up + at, task.gate_bias, task.up_bias, task.dims);
    });
}

}  // namespace kvist::KVIST_ISA
