// Checks at the border with Python: each says which argument is wrong, what it is and what it must be.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace kvist {

using AnyArray = nanobind::ndarray<nanobind::ro>;

// OptionError and friends are for users and are raised in Python; these are for callers that got the contract wrong.
inline void check(bool holds, const char* message) {
    if (!holds) throw nanobind::value_error(message);
}
inline void check(bool holds, const std::string& message) {
    if (!holds) throw nanobind::value_error(message.c_str());
}

// The same where making the message would cost a call more than it may: `message()` gives it.
template <typename Message>
    requires requires(Message message) { std::string(message()); }
inline void check(bool holds, Message message) {
    if (!holds) throw nanobind::value_error(std::string(message()).c_str());
}

inline void check_between(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    check(value >= least && value <= most, [&] {
        return std::string(name) + " is " + std::to_string(value) + ": it must be from " + std::to_string(least) +
               " to " + std::to_string(most);
    });
}

inline int check_threads(std::int64_t num_threads) {
    check_between("num_threads", num_threads, 1, 1024);
    return static_cast<int>(num_threads);
}

// --- arrays ----------------------------------------------------------------------------------------------------------

inline bool is_float(const AnyArray& array) { return array.dtype() == nanobind::dtype<float>(); }

inline bool is_bf16(const AnyArray& array) {
    constexpr auto kBfloat = static_cast<std::uint8_t>(nanobind::dlpack::dtype_code::Bfloat);
    return array.dtype() == nanobind::dlpack::dtype{kBfloat, 16, 1};
}

// What holds for every array: it is on the CPU, has a dtype that the caller looked at and so many dimensions, of which
// the last is contiguous, and is aligned as its elements are.
inline void check_array(const char* name, const AnyArray& array, std::size_t num_dims, bool has_dtype,
                        const char* dtypes) {
    const auto fail = [&](const std::string& what) { check(false, std::string(name) + " " + what); };
    if (array.device_type() != nanobind::device::cpu::value) fail("must be on the CPU");
    if (!has_dtype) fail(std::string("must have dtype ") + dtypes);
    if (array.ndim() != num_dims) {
        fail("has " + std::to_string(array.ndim()) + " dimensions: it must have " + std::to_string(num_dims));
    }
    if (array.shape(num_dims - 1) > 1 && array.stride(num_dims - 1) != 1) {
        fail("has stride " + std::to_string(array.stride(num_dims - 1)) + " in its last dimension: it must be 1");
    }
    const std::size_t bytes = array.dtype().bits / 8u;
    if (reinterpret_cast<std::uintptr_t>(array.data()) % bytes != 0) {
        fail("must be aligned to " + std::to_string(bytes) + " bytes");
    }
}

// Such an array of fp32 or bf16.
inline void check_numbers(const char* name, const AnyArray& array, std::size_t num_dims) {
    check_array(name, array, num_dims, is_float(array) || is_bf16(array), "float32 or bfloat16");
}

inline std::string shape_of(const AnyArray& array) {
    std::string text = "[";
    for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
    return text + "]";
}

// Of an array with as many dimensions.
inline void check_shape(const char* name, const AnyArray& array, std::initializer_list<std::size_t> shape) {
    std::size_t dim = 0;
    bool fits = true;
    for (std::size_t size : shape) fits = fits && array.shape(dim++) == size;
    check(fits, [&] {
        std::string wanted;
        for (std::size_t size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
        return std::string(name) + " has the shape " + shape_of(array) + ": it must be [" + wanted + "]";
    });
}

// The numbers of a contiguous array of fp32 with so many dimensions.
inline const float* check_floats(const char* name, const AnyArray& array, std::size_t num_dims) {
    check_array(name, array, num_dims, is_float(array), "float32");
    std::int64_t stride = 1;
    for (std::size_t i = num_dims; i-- > 0;) {
        check(array.shape(i) < 2 || array.size() == 0 || array.stride(i) == stride,
              [&] { return std::string(name) + " must be contiguous"; });
        stride *= static_cast<std::int64_t>(array.shape(i));
    }
    return static_cast<const float*>(array.data());
}

inline const float* check_floats_of(const char* name, const AnyArray& array,
                                    std::initializer_list<std::size_t> shape) {
    const float* floats = check_floats(name, array, shape.size());
    check_shape(name, array, shape);
    return floats;
}

// The elements of a vector of T.
template <typename T>
const T* check_vector(const char* name, const AnyArray& array, const char* dtype) {
    check_array(name, array, 1, array.dtype() == nanobind::dtype<T>(), dtype);
    return static_cast<const T*>(array.data());
}

// The bytes from the first element of an array to behind the last.
struct Extent {
    std::uintptr_t start = 0, stop = 0;

    bool overlaps(const Extent& other) const { return start < other.stop && other.start < stop; }
};

// Throws unless an array that is written to and another lie apart.
inline void check_apart(const char* name, const Extent& of, const char* other_name, const Extent& other) {
    check(!of.overlaps(other), [&] { return std::string(name) + " and " + other_name + " must not overlap"; });
}

inline Extent extent(const AnyArray& array) {
    if (array.size() == 0) return {};
    std::int64_t first = 0, last = 0;
    for (std::size_t i = 0; i < array.ndim(); ++i) {
        const std::int64_t way = static_cast<std::int64_t>(array.shape(i) - 1) * array.stride(i);
        (way < 0 ? first : last) += way;
    }
    const std::int64_t bytes = array.dtype().bits / 8u;
    const auto at = reinterpret_cast<std::uintptr_t>(array.data());
    return {at + static_cast<std::uintptr_t>(first * bytes), at + static_cast<std::uintptr_t>((last + 1) * bytes)};
}

}  // namespace kvist
