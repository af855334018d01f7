// Encoding a step's keys and values into pages: what `PageCodec.write` of src/kvist/cache/page_codec.py does, to the
// same bytes.
//
// Up to 16 vectors are encoded together: of one KV head and as many tokens where there are tokens enough, else of all
// heads of few tokens. A page's head is written by one part alone, since tokens share bytes of int4 values.
#include "append.h"

#include "kernels/append_load.h"
#include "kernels/append_store.h"
#include "kernels/encode.h"
#include "kernels/kernels.h"
#include "simd_numbers.h"

namespace kvist::KVIST_ISA {

namespace {

// Below this many tokens the lanes are filled with other heads and groups instead.
constexpr std::size_t kLeastTokensOfAHead = 4;

// --- quantised vectors -----------------------------------------------------------------------------------------------

void encode_int8(const Chunk& chunk, std::size_t head_dim, int bias, Scratch& scratch) {
    for (std::size_t v = 0; v < chunk.count; ++v) {
        const std::size_t at = v * scratch.padded;
        scratch.scalars[v] = encode_int8(scratch.y + at, head_dim, bias, scratch.codes_as<std::uint8_t>() + at);
    }
}

// One group of one vector of the chunk.
struct Problem {
    std::size_t vector;
    std::size_t group;
};

// Problem `index` of the chunk's: group after group of the vectors of one head, else vector after vector.
Problem problem_at(const Chunk& chunk, std::size_t num_groups, std::size_t index) {
    if (chunk.one_head) return {index % chunk.count, index / chunk.count};
    return {index / num_groups, index % num_groups};
}

// 16 groups side by side; lanes that are left over hold what the last one holds.
void load_lanes_of(const float* const* groups, std::size_t dims, float* z) {
    for (std::size_t dim = 0; dim < dims; dim += kQuad) {  // a group fills whole int4 lanes
        for (std::size_t lane = 0; lane < kLanes; lane += kQuad) {
            const Quad a = load_quad(groups[lane] + dim), b = load_quad(groups[lane + 1] + dim);
            const Quad c = load_quad(groups[lane + 2] + dim), d = load_quad(groups[lane + 3] + dim);
            float* to = z + dim * kLanes + lane;
            store_quad(to, Quad{a[0], b[0], c[0], d[0]});
            store_quad(to + kLanes, Quad{a[1], b[1], c[1], d[1]});
            store_quad(to + 2 * kLanes, Quad{a[2], b[2], c[2], d[2]});
            store_quad(to + 3 * kLanes, Quad{a[3], b[3], c[3], d[3]});
        }
    }
}

// The chunk's scalars and codes: codes [vector, padded], or words [line, vector] where this returns true.
//
// feedback: [K, groups, g, g], or null.
bool encode_int4(const Chunk& chunk, std::size_t head_dim, std::size_t group_dims, const float* feedback,
                 Scratch& scratch) {
    const std::size_t num_groups = head_dim / group_dims, num_problems = chunk.count * num_groups;
    const std::size_t block_size = chunk.one_head ? chunk.count : kLanes;
    const bool in_lanes = feedback != nullptr && chunk.one_head;

    bool finite[kAppendVectors];
    for (std::size_t v = 0; v < chunk.count; ++v) {
        finite[v] = largest_bits(scratch.y + v * scratch.padded, head_dim) < kInfinityBits;
    }
    for (std::size_t start = 0; start < num_problems; start += block_size) {
        const std::size_t count = num_problems - start < block_size ? num_problems - start : block_size;
        const float* groups[kLanes];
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const Problem problem = problem_at(chunk, num_groups, start + (lane < count ? lane : count - 1));
            groups[lane] = scratch.y + problem.vector * scratch.padded + problem.group * group_dims;
        }
        load_lanes_of(groups, group_dims, scratch.fit.z);
        const Fit fit = fit_int4(scratch.fit, group_dims);
        FedGroup fed[kLanes];
        for (std::size_t lane = 0; lane < count; ++lane) {
            const auto [vector, group] = problem_at(chunk, num_groups, start + lane);
            finite[vector] = finite[vector] && (fit.finite >> lane & 1u) != 0;
            scratch.scalars[vector * num_groups + group] =
                bf16_bits(fit.step[lane]) | std::uint32_t{bf16_bits(fit.floor[lane])} << 16;
            std::uint8_t* codes = scratch.codes_as<std::uint8_t>() + vector * scratch.padded + group * group_dims;
            if (feedback == nullptr) {
                nearest_int4(groups[lane], group_dims, fit.step[lane], fit.floor[lane], codes);
            } else if (!in_lanes) {
                const std::size_t of_head = chunk.vectors[vector].head * num_groups + group;
                fed[lane] = {groups[lane],
                             feedback + of_head * group_dims * group_dims,
                             scratch.targets + lane * group_dims,
                             codes,
                             fit.step[lane],
                             fit.floor[lane],
                             inverse(fit.step[lane])};
            }
        }
        if (in_lanes) {
            const std::size_t group = start / block_size;
            const std::size_t of_head = chunk.vectors[0].head * num_groups + group;
            feed_back_lanes(scratch.fit, fit, feedback + of_head * group_dims * group_dims, group_dims,
                            scratch.words + group * group_dims / 8 * kLanes);
        } else if (feedback != nullptr) {
            feed_back_each(fed, count, group_dims);
        }
    }
    for (std::size_t v = 0; v < chunk.count; ++v) {
        if (finite[v]) continue;
        for (std::size_t group = 0; group < num_groups; ++group) {
            scratch.scalars[v * num_groups + group] = kBf16NanBits | kBf16NanBits << 16;
        }
        __builtin_memset(scratch.codes_as<std::uint8_t>() + v * scratch.padded, 0, head_dim);
        if (in_lanes) {
            for (std::size_t line = 0; line < head_dim / 8; ++line) scratch.words[line * kLanes + v] = 0;
        }
    }
    return in_lanes;
}

// --- one side --------------------------------------------------------------------------------------------------------

void append_keys(const AppendJob& job, const Chunk& chunk, Scratch& scratch) {
    const LayerPages& layer = *job.layer;
    const std::size_t dims = layer.head_dim, padded = scratch.padded;
    const std::size_t num_lines = dims / kStorageFormats[static_cast<std::size_t>(layer.keys)].codes_per_lane();
    const auto store = [&](const void* codes, std::size_t vector_words, std::size_t line_words) {
        const auto* words = static_cast<const std::uint32_t*>(codes);
        store_keys(chunk, layer.key_codes, num_lines, words, vector_words, line_words);
    };
    switch (layer.keys) {
        case Storage::kFp32:
            for (std::size_t v = 0; v < chunk.count; ++v) {
                load_floats(job.keys, chunk.vectors[v], dims, scratch.y + v * padded);
            }
            store(scratch.y, padded, 1);
            break;
        case Storage::kBf16: {
            auto* codes = scratch.codes_as<std::uint16_t>();
            for (std::size_t v = 0; v < chunk.count; ++v) {
                load_bf16(job.keys, chunk.vectors[v], dims, codes + v * padded);
            }
            store(codes, padded / 2, 1);
            break;
        }
        case Storage::kInt8:
            load_rotated(job, job.keys, chunk, layer.key_offset != nullptr, scratch);
            encode_int8(chunk, dims, kInt8KeyBias, scratch);
            store(scratch.codes, padded / 4, 1);
            store_scalars(chunk, layer.key_scales, 1, scratch.scalars);
            break;
        case Storage::kInt4:
            load_rotated(job, job.keys, chunk, layer.key_offset != nullptr, scratch);
            if (encode_int4(chunk, dims, layer.key_group_dims, layer.key_feedback, scratch)) {
                store(scratch.words, 1, kLanes);
            } else {
                pack_int4_keys(chunk, dims, scratch);
                store(scratch.words, padded, 1);
            }
            store_scalars(chunk, layer.key_scales, dims / layer.key_group_dims, scratch.scalars);
            break;
    }
}

void append_values(const AppendJob& job, const Chunk& chunk, Scratch& scratch) {
    const LayerPages& layer = *job.layer;
    const std::size_t dims = layer.head_dim, padded = scratch.padded;
    // The spare lanes of the last tile get zeros.
    const auto fill = [&](auto* codes) {
        for (std::size_t v = 0; v < chunk.count; ++v) {
            for (std::size_t i = dims; i < padded; ++i) codes[v * padded + i] = 0;
        }
    };
    switch (layer.values) {
        case Storage::kFp32: {
            for (std::size_t v = 0; v < chunk.count; ++v) {
                load_floats(job.values, chunk.vectors[v], dims, scratch.y + v * padded);
            }
            auto* codes = scratch.codes_as<std::uint32_t>();
            __builtin_memcpy(codes, scratch.y, chunk.count * padded * sizeof(float));
            fill(codes);
            store_values(chunk, layer.value_codes, 32, codes, padded);
            break;
        }
        case Storage::kBf16: {
            auto* codes = scratch.codes_as<std::uint16_t>();
            for (std::size_t v = 0; v < chunk.count; ++v) {
                load_bf16(job.values, chunk.vectors[v], dims, codes + v * padded);
            }
            fill(codes);
            store_values(chunk, layer.value_codes, 16, codes, padded);
            break;
        }
        case Storage::kInt8:
            load_rotated(job, job.values, chunk, false, scratch);
            encode_int8(chunk, dims, 0, scratch);
            fill(scratch.codes_as<std::uint8_t>());
            store_values(chunk, layer.value_codes, 8, scratch.codes_as<std::uint8_t>(), padded);
            store_scalars(chunk, layer.value_scales, 1, scratch.scalars);
            break;
        case Storage::kInt4:
            load_rotated(job, job.values, chunk, false, scratch);
            encode_int4(chunk, dims, layer.value_group_dims, nullptr, scratch);
            fill(scratch.codes_as<std::uint8_t>());
            store_values(chunk, layer.value_codes, 4, scratch.codes_as<std::uint8_t>(), padded);
            store_scalars(chunk, layer.value_scales, dims / layer.value_group_dims, scratch.scalars);
            break;
    }
}

// --- chunks ----------------------------------------------------------------------------------------------------------

class Chunks {
public:
    Chunks(const AppendJob& job, Scratch& scratch, bool one_head) : job_(job), scratch_(scratch) {
        chunk_.one_head = one_head;
    }

    void add(std::size_t row, std::size_t head) {
        const auto position = static_cast<std::size_t>(job_.step->row_positions[row]);
        std::uint8_t* page = job_.step->pool + static_cast<std::size_t>(job_.step->row_pages[row]) * job_.step->stride;
        chunk_.vectors[chunk_.count++] = {row, head, position % kPageSlots, position / kPageSlots,
                                          page + job_.layer->offset + head * job_.layer->head_bytes};
        if (chunk_.count == kAppendVectors) write();
    }

    void write() {
        if (chunk_.count == 0) return;
        append_keys(job_, chunk_, scratch_);
        append_values(job_, chunk_, scratch_);
        chunk_.count = 0;
    }

private:
    const AppendJob& job_;
    Scratch& scratch_;
    Chunk chunk_;
};

}  // namespace

std::size_t append_scratch_floats(std::size_t head_dim) {
    return Scratch::kArrays * kAppendVectors * padded_dims(head_dim);
}

void append(const AppendJob& job, float* memory, int part, int parts) {
    const StepPages& step = *job.step;
    const std::size_t num_heads = job.layer->num_kv_heads;
    const auto is_own = [&](std::size_t row, std::size_t head) {
        const std::size_t sum = static_cast<std::size_t>(step.row_pages[row]) + head;
        return sum % static_cast<std::size_t>(parts) == static_cast<std::size_t>(part);
    };
    Scratch scratch(memory, job.layer->head_dim);
    if (step.num_tokens < kLeastTokensOfAHead) {
        Chunks chunks(job, scratch, false);
        for (std::size_t row = 0; row < step.num_tokens; ++row) {
            for (std::size_t head = 0; head < num_heads; ++head) {
                if (is_own(row, head)) chunks.add(row, head);
            }
        }
        chunks.write();
        return;
    }
    for (std::size_t head = 0; head < num_heads; ++head) {
        Chunks chunks(job, scratch, true);
        for (std::size_t row = 0; row < step.num_tokens; ++row) {
            if (is_own(row, head)) chunks.add(row, head);
        }
        chunks.write();
    }
}

}  // namespace kvist::KVIST_ISA
