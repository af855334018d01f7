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

constexpr std::int64_t kMostKvHeads = 1 << 16;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
constexpr auto kSlots = static_cast<std::int64_t>(kPageSlots);

std::string number(std::int64_t value) { return std::to_string(value); }

Storage storage_named(const char* side, const std::string& name) {
    for (std::size_t i = 0; i < std::size(kStorageFormats); ++i) {
        if (name == kStorageFormats[i].name) return static_cast<Storage>(i);
    }
    throw nb::value_error((std::string(side) + " is '" + name + "': that is no storage format").c_str());
}

const StorageFormat& format_of(Storage storage) { return kStorageFormats[static_cast<std::size_t>(storage)]; }

void copy_floats(const char* name, const AnyArray& array, std::initializer_list<std::size_t> shape,
                 std::vector<float>& to) {
    const float* from = check_floats_of(name, array, shape);
    to.assign(from, from + array.size());
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
    copy_floats("key_offset", *key_offset, {pages_.num_kv_heads, dims}, key_offset_);
    copy_floats("key_scale", *key_scale, {pages_.num_kv_heads, dims}, key_scale_);
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
    check_array("pool", AnyArray(pool), 2, pool.dtype() == nb::dtype<std::uint8_t>(), "uint8");
    pool_extent_ = extent(AnyArray(pool));
    check_between("page_bytes", page_bytes, 1, std::numeric_limits<std::int64_t>::max());
    check(static_cast<std::int64_t>(pool.shape(1)) >= page_bytes,
          "pool has rows of " + std::to_string(pool.shape(1)) + " bytes: a page has " + number(page_bytes));
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
              of + " has " + number(num_tokens[s]) + " tokens: it must have from 1 to " + number(kMostTokens));
        check(first_positions[s] >= 0 && first_positions[s] <= kMostTokens,
              of + " begins at position " + number(first_positions[s]) + ": it must be from 0 to " +
                  number(kMostTokens));
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
        const float* data = check_floats("a table of turns", table, 3);
        check_shape("a table of turns", table, {table.shape(0), 2, table.shape(2)});
        check_apart("a table of turns", extent(table));
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

void PageStep::check_apart(const char* name, const Extent& of) const {
    kvist::check_apart(name, of, "the pool", pool_extent_);
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
             "turns"_a, "window"_a = nb::none());
}

}  // namespace kvist
