// Memory that a thread keeps from one call to the next, since the system would have to give it anew each time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace kvist {

class ScratchMemory {
public:
    // So many bytes at least, aligned to 64. What was in them is gone. std::bad_alloc if the system refuses them.
    std::uint8_t* at_least(std::size_t bytes) {
        if (bytes > size_) {
            memory_.reset();
            size_ = 0;
            memory_.reset(static_cast<std::uint8_t*>(::operator new(bytes, kAlignment)));
            size_ = bytes;
        }
        return memory_.get();
    }

private:
    static constexpr std::align_val_t kAlignment{64};

    struct Free {
        void operator()(std::uint8_t* memory) const { ::operator delete(memory, kAlignment); }
    };

    std::unique_ptr<std::uint8_t, Free> memory_;
    std::size_t size_ = 0;
};

}  // namespace kvist
