// The Python objects behind `LayerPages` and `StepPages`: they own what those point to.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "checks.h"
#include "pages.h"

namespace kvist {

// `LayerPages` of Python. The statics are copied.
class PageLayer {
public:
    PageLayer(const std::string& keys, const std::string& values, std::int64_t head_dim, std::int64_t num_kv_heads,
              std::int64_t offset, const std::optional<AnyArray>& key_offset, const std::optional<AnyArray>& key_scale,
              const std::optional<AnyArray>& key_feedback, std::int64_t turns);
    PageLayer(const PageLayer&) = delete;
    PageLayer& operator=(const PageLayer&) = delete;

    const LayerPages& pages() const { return pages_; }
    std::size_t end() const { return pages_.offset + pages_.num_kv_heads * pages_.head_bytes; }

private:
    LayerPages pages_{};
    std::vector<float> key_offset_, key_scale_, key_feedback_;
};

// `StepPages` of Python. Keeps the pool's memory and the tables of turns alive; page tables are copied.
class PageStep {
public:
    // pool: [P, stride] uint8. page_tables: for each span a vector of int64, page ids from number `first_numbers` on.
    // turns: for each distinct set of frequencies [numbers, 2, D / 2] float32.
    PageStep(const nanobind::ndarray<>& pool, std::int64_t page_bytes, std::vector<std::int64_t> num_tokens,
             std::vector<std::int64_t> first_positions, std::vector<std::int64_t> first_numbers,
             const std::vector<AnyArray>& page_tables, std::vector<AnyArray> turns, std::optional<std::int64_t> window);
    PageStep(const PageStep&) = delete;
    PageStep& operator=(const PageStep&) = delete;

    const StepPages& pages() const { return pages_; }
    std::int64_t window() const { return window_; }  // tokens that a query sees, itself included; INT64_MAX: all

    // Throws unless the layer lies in this step's pages and its table of turns is there and long enough.
    void check_layer(const PageLayer& layer) const;

    // Throws unless an array and the pool lie apart: what is written to one would change the other.
    void check_apart(const char* name, const Extent& of) const;

    // How attention is divided; kept, since the layers of a step are alike. The GIL must be held.
    const AttentionPlan& plan(std::size_t group_size, std::size_t num_kv_heads, std::int64_t window);

private:
    StepPages pages_{};
    nanobind::ndarray<> pool_;
    Extent pool_extent_;
    std::vector<AnyArray> turn_arrays_;
    std::vector<TurnTable> turns_;
    std::vector<SpanPages> spans_;
    std::vector<std::int64_t> page_ids_, row_positions_, row_pages_;
    std::vector<std::unique_ptr<AttentionPlan>> plans_;
    std::int64_t window_ = 0;
    std::int64_t numbers_stop_ = 0;  // one more than the greatest page number
};

void bind_pages(nanobind::module_& m);

}  // namespace kvist
