// Checks at the border with Python: each says which argument is wrong, what it is and what it must be.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
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

// The elements of a contiguous CPU vector of T, and that it is one.
template <typename T>
const T* check_vector(const char* name, const AnyArray& array, const char* dtype) {
    const std::string prefix = std::string(name) + " ";
    check(array.device_type() == nanobind::device::cpu::value, prefix + "must be on the CPU");
    check(array.dtype() == nanobind::dtype<T>(), prefix + "must have dtype " + dtype);
    check(array.ndim() == 1, prefix + "has " + std::to_string(array.ndim()) + " dimensions: it must have 1");
    check(array.shape(0) < 2 || array.stride(0) == 1,
          prefix + "has stride " + std::to_string(array.stride(0)) + ": it must be contiguous");
    check(reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0,
          prefix + "must be aligned to " + std::to_string(alignof(T)) + " bytes");
    return static_cast<const T*>(array.data());
}

}  // namespace kvist
