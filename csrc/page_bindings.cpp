#include "page_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "page_layout.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvist {

namespace {

constexpr std::int64_t kMostThreads = 1024;
constexpr std::int64_t kMostKvHeads = 1 << 16;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
constexpr auto kSlots = static_cast<std::int64_t>(kPageSlots);

std::string number(std::int64_t value) { return std::to_string(value); }

std::string shape_of(const AnyArray& array) {
    std::string text = "[";
    for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
    return text + "]";
}

Storage storage_named(const char* side, const std::string& name) {
    for (std::size_t i = 0; i < std::size(kStorageFormats); ++i) {
        if (name == kStorageFormats[i].name) return static_cast<Storage>(i);
    }
    throw nb::value_error((std::string(side) + " is '" + name + "': that is no storage format").c_str());
}

const StorageFormat& format_of(Storage storage) { return kStorageFormats[static_cast<std::size_t>(storage)]; }

void check_on_cpu(const char* name, const AnyArray& array) {
    check(array.device_type() == nb::device::cpu::value, [&] { return std::string(name) + " must be on the CPU"; });
}

// A contiguous float32 array of a shape.
const float* check_floats(const char* name, const AnyArray& array, const std::vector<std::size_t>& shape) {
    check_on_cpu(name, array);
    check(array.dtype() == nb::dtype<float>(), [&] { return std::string(name) + " must have dtype float32"; });
    std::string wanted = "[";
    bool fits = array.ndim() == shape.size();
    for (std::size_t i = 0; i < shape.size(); ++i) {
        wanted += (i ? ", " : "") + std::to_string(shape[i]);
        fits = fits && array.shape(i) == shape[i];
    }
    check(fits,
          [&] { return std::string(name) + " has the shape " + shape_of(array) + ": it must be " + wanted + "]"; });
    std::int64_t stride = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
        check(shape[i] < 2 || array.stride(i) == stride, [&] { return std::string(name) + " must be contiguous"; });
        stride *= static_cast<std::int64_t>(shape[i]);
    }
    check(reinterpret_cast<std::uintptr_t>(array.data()) % alignof(float) == 0,
          [&] { return std::string(name) + " must be aligned to 4 bytes"; });
    return static_cast<const float*>(array.data());
}

void copy_floats(const char* name, const AnyArray& array, const std::vector<std::size_t>& shape,
                 std::vector<float>& to) {
    const float* from = check_floats(name, array, shape);
    std::size_t count = 1;
    for (std::size_t size : shape) count *= size;
    to.assign(from, from + count);
}

}  // namespace

PageLayer::PageLayer(const std::string& keys, const std::string& values, std::int64_t head_dim,
                     std::int64_t num_kv_heads, std::int64_t offset, const std::optional<AnyArray>& key_offset,
                     const std::optional<AnyArray>& key_scale, const std::optional<AnyArray>& key_feedback,
                     std::int64_t turns) {
    pages_.keys = storage_named("keys", keys);
    pages_.values = storage_named("values", values);
    const StorageFormat& key_format = format_of(pages_.keys);
    const StorageFormat& value_format = format_of(pages_.values);
    check_between("head_dim", head_dim, 1, kMostHeadDim);
    const auto dims = static_cast<std::size_t>(head_dim);
    for (const StorageFormat* format : {&key_format, &value_format}) {
        check(takes_head_dim(*format, dims), "head_dim is " + number(head_dim) + ": " + format->name +
                                                 " takes multiples of " + std::to_string(format->codes_per_lane()));
    }
    check_between("num_kv_heads", num_kv_heads, 1, kMostKvHeads);
    check_between("offset", offset, 0, std::numeric_limits<std::int32_t>::max());
    check(offset % static_cast<std::int64_t>(kLineBytes) == 0,
          "offset is " + number(offset) + ": it must be a multiple of 64");
    check_between("turns", turns, 0, kMostKvHeads);

    const HeadLayout head = head_layout(key_format, value_format, dims);
    pages_.head_dim = dims;
    pages_.num_kv_heads = static_cast<std::size_t>(num_kv_heads);
    pages_.offset = static_cast<std::size_t>(offset);
    pages_.head_bytes = head.bytes;
    pages_.key_codes = head.key_codes;
    pages_.key_scales = head.key_scales;
    pages_.value_codes = head.value_codes;
    pages_.value_scales = head.value_scales;
    pages_.key_group_dims = key_format.scalars == 0 ? dims : key_format.group_dims(dims);
    pages_.value_group_dims = value_format.scalars == 0 ? dims : value_format.group_dims(dims);
    pages_.turns = static_cast<std::size_t>(turns);

    check(key_offset.has_value() == key_scale.has_value() && (key_offset.has_value() || !key_feedback.has_value()),
          "key_offset, key_scale and key_feedback go together");
    if (!key_offset.has_value()) return;
    check(is_quantised(pages_.keys), "keys of " + keys + " are coded as they are: they take no offset and scale");
    check(dims % 2 == 0, "head_dim is " + number(head_dim) + ": keys with an offset have planes of two dims");
    const std::vector<std::size_t> shape{pages_.num_kv_heads, dims};
    copy_floats("key_offset", *key_offset, shape, key_offset_);
    copy_floats("key_scale", *key_scale, shape, key_scale_);
    pages_.key_offset = key_offset_.data();
    pages_.key_scale = key_scale_.data();
    if (pages_.keys != Storage::kInt4) return;
    check(key_feedback.has_value(), "int4 keys with an offset take key_feedback too");
    const std::size_t group = pages_.key_group_dims;
    copy_floats("key_feedback", *key_feedback, {pages_.num_kv_heads, dims / group, group, group}, key_feedback_);
    pages_.key_feedback = key_feedback_.data();
}

PageStep::PageStep(const nb::ndarray<>& pool, std::int64_t page_bytes, std::vector<std::int64_t> num_tokens,
                   std::vector<std::int64_t> first_positions, std::vector<std::int64_t> first_numbers,
                   const std::vector<AnyArray>& page_tables, std::vector<AnyArray> turns,
                   std::optional<std::int64_t> window)
    : pool_(pool), turn_arrays_(std::move(turns)) {
    check_on_cpu("pool", AnyArray(pool));
    check(pool.dtype() == nb::dtype<std::uint8_t>(), "pool must have dtype uint8");
    check(pool.ndim() == 2, "pool has " + std::to_string(pool.ndim()) + " dimensions: it must have 2");
    check_between("page_bytes", page_bytes, 1, std::numeric_limits<std::int64_t>::max());
    check(static_cast<std::int64_t>(pool.shape(1)) >= page_bytes,
          "pool has rows of " + std::to_string(pool.shape(1)) + " bytes: a page has " + number(page_bytes));
    check(pool.shape(1) < 2 || pool.stride(1) == 1, "pool must have contiguous rows");
    const std::int64_t stride = pool.shape(0) < 2 ? static_cast<std::int64_t>(pool.shape(1)) : pool.stride(0);
    check(pool.shape(0) < 2 || (stride >= page_bytes && stride % static_cast<std::int64_t>(kLineBytes) == 0),
          "pool has rows that are " + number(stride) + " bytes apart: it must be a multiple of 64, a page at least");
    check(reinterpret_cast<std::uintptr_t>(pool.data()) % kLineBytes == 0, "pool must be aligned to 64 bytes");
    pages_.pool = static_cast<std::uint8_t*>(pool.data());
    pages_.stride = static_cast<std::size_t>(stride);
    pages_.page_bytes = static_cast<std::size_t>(page_bytes);

    window_ = window.value_or(std::numeric_limits<std::int64_t>::max());
    check(window_ >= 1, "window is " + number(window_) + ": it must be 1 at least");
    const std::size_t num_spans = num_tokens.size();
    check(first_positions.size() == num_spans && first_numbers.size() == num_spans && page_tables.size() == num_spans,
          "num_tokens, first_positions, first_numbers and page_tables must have one element for each span");
    std::size_t num_ids = 0;
    for (const AnyArray& table : page_tables) num_ids += table.ndim() == 1 ? table.shape(0) : 0;
    page_ids_.reserve(num_ids);
    std::int64_t row = 0;
    for (std::size_t s = 0; s < num_spans; ++s) {
        const std::string of = "span " + std::to_string(s);
        check(num_tokens[s] >= 1 && num_tokens[s] <= kMostTokens,
              of + " has " + number(num_tokens[s]) + " tokens: it must have 1 at least");
        check(first_positions[s] >= 0 && first_positions[s] <= kMostTokens,
              of + " begins at position " + number(first_positions[s]));
        const std::int64_t* ids = check_vector<std::int64_t>("a page table", page_tables[s], "int64");
        const auto count = static_cast<std::int64_t>(page_tables[s].shape(0));
        const std::int64_t end = first_positions[s] + num_tokens[s];
        const std::int64_t seen = first_positions[s] < window_ ? 0 : first_positions[s] - window_ + 1;
        check(first_numbers[s] >= 0 && first_numbers[s] <= seen / kSlots,
              of + " has pages from number " + number(first_numbers[s]) + " on: it sees page " + number(seen / kSlots));
        check(first_numbers[s] + count >= (end + kSlots - 1) / kSlots,
              of + " has " + number(count) + " pages from number " + number(first_numbers[s]) +
                  " on: its tokens end at " + number(end));
        numbers_stop_ = std::max(numbers_stop_, (end + kSlots - 1) / kSlots);
        for (std::int64_t i = 0; i < count; ++i) {
            check(ids[i] >= 0 && ids[i] < static_cast<std::int64_t>(pool.shape(0)),
                  of + " has page " + number(ids[i]) + ": the pool has " + std::to_string(pool.shape(0)));
        }
        const std::size_t at = page_ids_.size();
        page_ids_.insert(page_ids_.end(), ids, ids + count);
        spans_.push_back({static_cast<std::size_t>(row), static_cast<std::size_t>(num_tokens[s]), first_positions[s],
                          first_numbers[s], page_ids_.data() + at, static_cast<std::size_t>(count)});
        row += num_tokens[s];
    }

    // The runs of slots that are written, page by page: no two may overlap.
    struct Written {
        std::int64_t page, first, stop;
    };
    std::vector<Written> written;
    row_positions_.reserve(static_cast<std::size_t>(row));
    row_pages_.reserve(static_cast<std::size_t>(row));
    for (const SpanPages& span : spans_) {
        const std::int64_t end = span.first_position + static_cast<std::int64_t>(span.num_tokens);
        for (std::int64_t position = span.first_position; position < end;) {
            const std::int64_t stop = std::min(end, (position / kSlots + 1) * kSlots);
            const std::int64_t page = span.pages[position / kSlots - span.first_number];
            written.push_back({page, position % kSlots, position % kSlots + stop - position});
            for (; position < stop; ++position) {
                row_positions_.push_back(position);
                row_pages_.push_back(page);
            }
        }
    }
    std::sort(written.begin(), written.end(), [](const Written& a, const Written& b) {
        return a.page != b.page ? a.page < b.page : a.first < b.first;
    });
    for (std::size_t i = 1; i < written.size(); ++i) {
        check(written[i].page != written[i - 1].page || written[i].first >= written[i - 1].stop,
              "two tokens are written to the same slot of page " + number(written[i].page));
    }

    for (const AnyArray& table : turn_arrays_) {
        check(table.ndim() == 3,
              "a table of turns has " + std::to_string(table.ndim()) + " dimensions: it must have 3");
        const float* data = check_floats("a table of turns", table, {table.shape(0), 2, table.shape(2)});
        turns_.push_back({data, table.shape(0), table.shape(2)});
    }

    pages_.spans = spans_.data();
    pages_.num_spans = spans_.size();
    pages_.num_tokens = static_cast<std::size_t>(row);
    pages_.turns = turns_.data();
    pages_.num_turns = turns_.size();
    pages_.row_positions = row_positions_.data();
    pages_.row_pages = row_pages_.data();
}

void PageStep::check_layer(const PageLayer& layer) const {
    const LayerPages& pages = layer.pages();
    check(layer.end() <= pages_.page_bytes, [&] {
        return "the layer ends at byte " + std::to_string(layer.end()) + " of its page: the pages of this step have " +
               std::to_string(pages_.page_bytes);
    });
    if (pages.key_offset == nullptr) return;
    check(pages.turns < turns_.size(), [&] {
        return "the layer's keys are turned by table " + std::to_string(pages.turns) + ": this step has " +
               std::to_string(turns_.size());
    });
    const TurnTable& table = turns_[pages.turns];
    check(table.num_planes == pages.head_dim / 2, [&] {
        return "the layer's table of turns has " + std::to_string(table.num_planes) + " planes: it must have " +
               std::to_string(pages.head_dim / 2);
    });
    check(static_cast<std::int64_t>(table.num_numbers) >= numbers_stop_, [&] {
        return "the layer's table of turns has " + std::to_string(table.num_numbers) + " pages: the step has " +
               number(numbers_stop_);
    });
}

namespace {

// [T, H, D] of bf16 or fp32, dims contiguous; T and D as the step and the layer have them.
void check_heads(const char* name, const AnyArray& array, const StepPages& step, const LayerPages& layer) {
    const std::string prefix = std::string(name) + " ";
    check_on_cpu(name, array);
    const bool is_float = array.dtype() == nb::dtype<float>();
    const nb::dlpack::dtype dtype = array.dtype();
    const bool is_bf16 =
        dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16 && dtype.lanes == 1;
    check(is_float || is_bf16, [&] { return prefix + "must have dtype bfloat16 or float32"; });
    check(array.ndim() == 3 && array.shape(0) == step.num_tokens && array.shape(2) == layer.head_dim, [&] {
        return prefix + "has the shape " + shape_of(array) + ": it must be [" + std::to_string(step.num_tokens) +
               ", H, " + std::to_string(layer.head_dim) + "]";
    });
    check(array.shape(1) > 0 && array.shape(1) % layer.num_kv_heads == 0, [&] {
        return prefix + "has " + std::to_string(array.shape(1)) + " heads: it must be a multiple of the " +
               std::to_string(layer.num_kv_heads) + " KV heads";
    });
    check(layer.head_dim < 2 || array.stride(2) == 1, [&] { return prefix + "must have contiguous dims"; });
    check(reinterpret_cast<std::uintptr_t>(array.data()) % (is_float ? 4 : 2) == 0,
          [&] { return prefix + "must be aligned"; });
}

// Whether no two elements of [T, H, D] share memory: the vectors of the nearer dimension lie within the farther's
// steps.
bool is_apart(const nb::ndarray<>& array) {
    std::size_t near = 1, far = 0;
    if (array.shape(0) > 1 && (array.shape(1) < 2 || array.stride(0) < array.stride(1))) std::swap(near, far);
    const auto dims = static_cast<std::int64_t>(array.shape(2)), count = static_cast<std::int64_t>(array.shape(near));
    if (count > 1 && array.stride(near) < dims) return false;
    return array.shape(far) < 2 || array.stride(far) >= (count > 1 ? (count - 1) * array.stride(near) : 0) + dims;
}

// The bytes from an array's first element to behind its last, given strides that are not negative.
std::pair<std::uintptr_t, std::uintptr_t> extent(const AnyArray& array) {
    std::uintptr_t last = 0;
    for (std::size_t i = 0; i < array.ndim(); ++i) {
        last += (array.shape(i) - 1) * static_cast<std::uintptr_t>(array.stride(i));
    }
    const std::uintptr_t item = array.dtype().bits / 8u;
    const auto start = reinterpret_cast<std::uintptr_t>(array.data());
    return {start, start + (last + 1) * item};
}

void attend(PageStep& step, const PageLayer& layer, const AnyArray& q, const nb::ndarray<>& out, double scale,
            std::optional<std::int64_t> window, std::optional<double> softcap, const std::optional<AnyArray>& sinks,
            std::int64_t num_threads) {
    const StepPages& pages = step.pages();
    step.check_layer(layer);
    const AnyArray written(out);
    check_heads("q", q, pages, layer.pages());
    check_heads("out", written, pages, layer.pages());
    check(q.dtype() == out.dtype() && q.shape(1) == out.shape(1), "q and out must have the same shape and dtype");
    check_between("num_threads", num_threads, 1, kMostThreads);
    const std::int64_t sees = window.value_or(step.window());
    check(sees >= 1 && sees <= step.window(), [&] {
        return "window is " + number(sees) + ": it must be from 1 to the " + number(step.window()) + " of the step";
    });
    const auto fits = static_cast<float>(scale);
    check(fits - fits == 0, "scale must be finite");
    const auto cap = static_cast<float>(softcap.value_or(0));
    check(!softcap.has_value() || (cap > 0 && cap - cap == 0), "softcap must be positive and finite");
    if (pages.num_tokens == 0) return;
    for (std::size_t i = 0; i < 2; ++i) {
        check(q.stride(i) >= 0 && out.stride(i) >= 0, "q and out must not have negative strides");
    }
    check(is_apart(out), "out must not overlap itself");
    const auto [q_start, q_stop] = extent(q);
    const auto [out_start, out_stop] = extent(written);
    check(q_stop <= out_start || out_stop <= q_start, "q and out must not overlap");
    AttentionTask task{};
    task.layer = &layer.pages();
    task.step = &pages;
    task.num_heads = q.shape(1);
    task.group_size = q.shape(1) / layer.pages().num_kv_heads;
    task.is_bf16 = q.dtype() != nb::dtype<float>();
    task.q = q.data();
    task.q_token_stride = static_cast<std::size_t>(q.stride(0));
    task.q_head_stride = static_cast<std::size_t>(q.stride(1));
    task.out = out.data();
    task.out_token_stride = static_cast<std::size_t>(out.stride(0));
    task.out_head_stride = static_cast<std::size_t>(out.stride(1));
    task.scale = fits;
    task.softcap = cap;
    if (sinks.has_value()) task.sinks = check_floats("sinks", *sinks, {task.num_heads});
    task.window = sees;
    const AttentionPlan& plan = step.plan(task.group_size, layer.pages().num_kv_heads, sees);
    nb::gil_scoped_release release;
    run_attention(plan, task, static_cast<int>(num_threads));
}

}  // namespace

const AttentionPlan& PageStep::plan(std::size_t group_size, std::size_t num_kv_heads, std::int64_t window) {
    for (const auto& plan : plans_) {
        if (plan->group_size == group_size && plan->num_kv_heads == num_kv_heads && plan->window == window)
            return *plan;
    }
    plans_.push_back(std::make_unique<AttentionPlan>(plan_attention(pages_, group_size, num_kv_heads, window)));
    return *plans_.back();
}

void bind_pages(nb::module_& m) {
    nb::class_<PageLayer>(m, "PageLayer")
        .def(nb::init<const std::string&, const std::string&, std::int64_t, std::int64_t, std::int64_t,
                      const std::optional<AnyArray>&, const std::optional<AnyArray>&, const std::optional<AnyArray>&,
                      std::int64_t>(),
             "keys"_a, "values"_a, "head_dim"_a, "num_kv_heads"_a, "offset"_a, "key_offset"_a = nb::none(),
             "key_scale"_a = nb::none(), "key_feedback"_a = nb::none(), "turns"_a = 0);
    nb::class_<PageStep>(m, "PageStep")
        .def(nb::init<const nb::ndarray<>&, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>,
                      std::vector<std::int64_t>, const std::vector<AnyArray>&, std::vector<AnyArray>,
                      std::optional<std::int64_t>>(),
             "pool"_a, "page_bytes"_a, "num_tokens"_a, "first_positions"_a, "first_numbers"_a, "page_tables"_a,
             "turns"_a, "window"_a = nb::none())
        .def("attend", &attend, "layer"_a, "q"_a, "out"_a, nb::kw_only(), "scale"_a, "window"_a = nb::none(),
             "softcap"_a = nb::none(), "sinks"_a = nb::none(), "num_threads"_a);
}

}  // namespace kvist
