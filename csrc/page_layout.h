// The bytes of a page: 64 token slots of the layers of one layer group. Python reads these constants and sizes through
// the bindings, and docs/page_format.md explains them. All numbers are little-endian. A page means the same in every
// process: it can be written to a file, mapped, shared and compared. Any change of meaning takes a new version.
//
//   page    | layer 0 of the group                | layer 1 | ...
//   layer   | KV head 0 | KV head 1 | ...
//   head    | key codes | key scales | value codes | value scales |      each starts at a multiple of 64 bytes
//
// Codes lie in lines of 64 bytes: 16 lanes of 4 bytes, each lane holding n = 1 (fp32), 2 (bf16), 4 (int8) or 8 (int4)
// codes. A tile of keys is 16 slots, one per lane, and its lines walk over the dims, so that a query meets 16 keys at
// once and no sum runs across lanes. A tile of values is 16 dims, one per lane, and its lines walk over the slots.
//
//   key codes       lane 0               lane 1               lane 15
//   tile 0 line 0   slot 0, dims 0..n-1  slot 1, dims 0..n-1  ...  slot 15, dims 0..n-1
//          line 1   slot 0, dims n..2n-1 ...
//   tile 1 line 0   slot 16, dims 0..n-1 ...                                            head_dim / n lines in a tile
//
//   value codes     lane 0               lane 1               lane 15
//   tile 0 line 0   dim 0, slots 0..n-1  dim 1, slots 0..n-1  ...  dim 15, slots 0..n-1
//          line 1   dim 0, slots n..2n-1 ...
//   tile 1 line 0   dim 16, slots 0..n-1 ...                                            64 / n lines in a tile
//
//   a lane of int4  byte 0  byte 1  byte 2  byte 3
//     low nibble    c0      c1      c2      c3       so that one mask and one shift give 4 int8 codes in order
//     high nibble   c4      c5      c6      c7
//
// Where head_dim is no multiple of 16, the last tile of values is as long as the others; its spare lanes hold zeros.
//
// A quantised token has a lane of scalars for each group of consecutive dims. The lanes of a group lie in the order of
// the slots, so that those of a tile of keys are one line:
//
//   int8 scales     lane 0              lane 1   ...  lane 63
//   one group       slot 0: fp32 step   slot 1                    value = code * step, code from -127 to 127;
//                                                                 keys hold code + 128, values two's complement
//   int4 scales     lane 0              lane 1   ...  lane 63
//   group 0         slot 0: bf16 step,  slot 1                    value = floor + code * step, code from 0 to 15
//                   then bf16 floor
//   group 1         ...                                           32 dims, or more where 32 does not divide head_dim
//
// Before they are coded, vectors are rotated and keys moved and scaled too: see src/kvist/kernels/codec.py.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvist {
namespace {  // internal linkage: the kernels include this too, and must share nothing between instruction sets

constexpr int kPageLayoutVersion = 1;
constexpr std::size_t kPageSlots = 64;
constexpr std::size_t kLanes = 16;
constexpr std::size_t kLaneBytes = 4;
constexpr std::size_t kLineBytes = kLanes * kLaneBytes;
constexpr std::size_t kMostHeadDim = 1024;

// How the vectors of one side, keys or values, are stored.
struct StorageFormat {
    const char* name;
    std::size_t bits;             // of a code
    std::size_t scalars;          // per group and token: none, a step, or a step and a floor
    std::size_t scalar_bytes;     // of each: 4 for fp32, 2 for bf16
    std::size_t least_group_dims;

    constexpr std::size_t codes_per_lane() const { return 8 * kLaneBytes / bits; }

    // The dims that share scalars: the fewest, `least_group_dims` at least, that fill whole lanes and divide the head.
    constexpr std::size_t group_dims(std::size_t head_dim) const {
        for (std::size_t dims = least_group_dims; dims < head_dim; dims += codes_per_lane()) {
            if (head_dim % dims == 0) return dims;
        }
        return head_dim;
    }
    constexpr std::size_t groups(std::size_t head_dim) const {
        return scalars == 0 ? 0 : head_dim / group_dims(head_dim);
    }
};

constexpr StorageFormat kStorageFormats[] = {
    {"fp32", 32, 0, 0, 1},
    {"bf16", 16, 0, 0, 2},
    {"int8", 8, 1, 4, kMostHeadDim},
    {"int4", 4, 2, 2, 32},
};

// Whether vectors of this head dim can be stored: a lane never holds parts of two tokens' keys.
constexpr bool takes_head_dim(const StorageFormat& format, std::size_t head_dim) {
    return head_dim > 0 && head_dim <= kMostHeadDim && head_dim % format.codes_per_lane() == 0;
}

// A head in whole lines of one dim to a lane.
constexpr std::size_t padded_dims(std::size_t head_dim) { return (head_dim + kLanes - 1) / kLanes * kLanes; }

// What is added to an int8 key's code: instructions that multiply bytes take the unsigned factor from memory there.
constexpr int kInt8KeyBias = 128;

// Where a code lies in its region: its byte, and for codes smaller than a byte its lowest bit there.
struct CodePlace {
    std::size_t byte;
    std::size_t bit;
};

constexpr CodePlace place_in_lane(const StorageFormat& format, std::size_t index) {
    if (format.bits == 4) return {index % kLaneBytes, 4 * (index / kLaneBytes)};
    return {index * format.bits / 8, 0};
}

constexpr CodePlace key_place(const StorageFormat& format, std::size_t head_dim, std::size_t slot, std::size_t dim) {
    const std::size_t codes = format.codes_per_lane();
    const std::size_t line = slot / kLanes * (head_dim / codes) + dim / codes;
    const CodePlace place = place_in_lane(format, dim % codes);
    return {line * kLineBytes + slot % kLanes * kLaneBytes + place.byte, place.bit};
}

constexpr CodePlace value_place(const StorageFormat& format, std::size_t slot, std::size_t dim) {
    const std::size_t codes = format.codes_per_lane();
    const std::size_t line = dim / kLanes * (kPageSlots / codes) + slot / codes;
    const CodePlace place = place_in_lane(format, slot % codes);
    return {line * kLineBytes + dim % kLanes * kLaneBytes + place.byte, place.bit};
}

// The byte of a scalar in its region of scales: a step is scalar 0, a floor is scalar 1.
constexpr std::size_t scalar_place(const StorageFormat& format, std::size_t slot, std::size_t group,
                                   std::size_t scalar) {
    return ((group * kPageSlots + slot) * format.scalars + scalar) * format.scalar_bytes;
}

constexpr std::size_t key_code_bytes(const StorageFormat& format, std::size_t head_dim) {
    return kPageSlots / kLanes * (head_dim / format.codes_per_lane()) * kLineBytes;
}

constexpr std::size_t value_code_bytes(const StorageFormat& format, std::size_t head_dim) {
    return padded_dims(head_dim) / kLanes * (kPageSlots / format.codes_per_lane()) * kLineBytes;
}

constexpr std::size_t scale_bytes(const StorageFormat& format, std::size_t head_dim) {
    return format.groups(head_dim) * format.scalars * kPageSlots * format.scalar_bytes;
}

// The regions of one KV head, in bytes from its start, and its size.
struct HeadLayout {
    std::size_t key_codes;
    std::size_t key_scales;
    std::size_t value_codes;
    std::size_t value_scales;
    std::size_t bytes;
};

constexpr HeadLayout head_layout(const StorageFormat& keys, const StorageFormat& values, std::size_t head_dim) {
    HeadLayout head{};
    head.key_codes = 0;
    head.key_scales = head.key_codes + key_code_bytes(keys, head_dim);
    head.value_codes = head.key_scales + scale_bytes(keys, head_dim);
    head.value_scales = head.value_codes + value_code_bytes(values, head_dim);
    head.bytes = head.value_scales + scale_bytes(values, head_dim);
    return head;
}

constexpr bool regions_are_aligned(std::size_t head_dim) {
    for (const StorageFormat& keys : kStorageFormats) {
        for (const StorageFormat& values : kStorageFormats) {
            if (!takes_head_dim(keys, head_dim) || !takes_head_dim(values, head_dim)) continue;
            const HeadLayout head = head_layout(keys, values, head_dim);
            if ((head.key_scales | head.value_codes | head.value_scales | head.bytes) % kLineBytes != 0) return false;
        }
    }
    return true;
}

static_assert(std::endian::native == std::endian::little, "pages are little-endian");
static_assert(kLineBytes == 64 && kPageSlots % kLanes == 0);
static_assert(kPageSlots % kStorageFormats[3].codes_per_lane() == 0, "a lane of values lies within one page");
static_assert(regions_are_aligned(64) && regions_are_aligned(80) && regions_are_aligned(96) &&
              regions_are_aligned(128) && regions_are_aligned(256) && regions_are_aligned(8) &&
              regions_are_aligned(20));
// The drawing, in numbers: the second code of the second lane of the second line of the second tile.
static_assert(key_place(kStorageFormats[0], 64, 17, 1).byte == 64 * 64 + 64 + 4);
static_assert(key_place(kStorageFormats[1], 64, 17, 3).byte == 32 * 64 + 64 + 4 + 2);
static_assert(key_place(kStorageFormats[2], 64, 17, 5).byte == 16 * 64 + 64 + 4 + 1);
static_assert(key_place(kStorageFormats[3], 64, 17, 9).byte == 8 * 64 + 64 + 4 + 1);
static_assert(value_place(kStorageFormats[1], 3, 17).byte == 32 * 64 + 64 + 4 + 2);
static_assert(value_place(kStorageFormats[2], 5, 17).byte == 16 * 64 + 64 + 4 + 1);
static_assert(value_place(kStorageFormats[3], 9, 17).byte == 8 * 64 + 64 + 4 + 1);
static_assert(value_place(kStorageFormats[3], 13, 17).byte == 8 * 64 + 64 + 4 + 1 &&
              value_place(kStorageFormats[3], 13, 17).bit == 4);
static_assert(head_layout(kStorageFormats[1], kStorageFormats[1], 64).bytes == 64 * 2 * 64 * 2);
static_assert(head_layout(kStorageFormats[2], kStorageFormats[2], 64).bytes == 64 * 2 * (64 + 4));
static_assert(head_layout(kStorageFormats[3], kStorageFormats[3], 64).bytes == 64 * 2 * (32 + 2 * 4));
static_assert(kStorageFormats[2].scalars * kStorageFormats[2].scalar_bytes == kLaneBytes &&
              kStorageFormats[3].scalars * kStorageFormats[3].scalar_bytes == kLaneBytes);
static_assert(scalar_place(kStorageFormats[3], 17, 1, 1) == 4 * 64 + 64 + 4 + 2);
static_assert(kStorageFormats[2].groups(256) == 1 && kStorageFormats[3].groups(256) == 8);
static_assert(kStorageFormats[3].group_dims(80) == 40 && kStorageFormats[3].group_dims(88) == 88 &&
              kStorageFormats[3].group_dims(24) == 24);

}  // namespace
}  // namespace kvist
