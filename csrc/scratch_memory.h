// Memory that a call works in and that is kept for the next one, since the system would have to give it anew each time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace kvist {

// Lends pieces of memory, as many as calls run at the same time, whatever the threads that make them. The system gets
// back what is not worth keeping. It is never destroyed: threads may be calling while the process ends.
class ScratchPool {
    // An engine makes one call at a time. Another engine beside it is common, more are not.
    static constexpr std::size_t kMostIdle = 2;
    // A call that works in more computes for so long that asking the system for memory is nothing beside it.
    static constexpr std::size_t kMostIdleBytes = std::size_t{128} << 20;

    class Piece {
    public:
        std::uint8_t* at_least(std::size_t bytes) {
            if (bytes > size_) {
                memory_.reset();
                size_ = 0;
                memory_.reset(static_cast<std::uint8_t*>(::operator new(bytes, kAlignment)));
                size_ = bytes;
            }
            return memory_.get();
        }

        std::size_t size() const { return size_; }

    private:
        static constexpr std::align_val_t kAlignment{64};

        struct Free {
            void operator()(std::uint8_t* memory) const { ::operator delete(memory, kAlignment); }
        };

        std::unique_ptr<std::uint8_t, Free> memory_;
        std::size_t size_ = 0;
    };

public:
    // A piece, for as long as this lives.
    class Lease {
    public:
        explicit Lease(ScratchPool& pool) : pool_(pool), piece_(pool.take()) {}
        ~Lease() { pool_.give_back(std::move(piece_)); }
        Lease(const Lease&) = delete;
        Lease& operator=(const Lease&) = delete;

        // So many bytes at least, aligned to 64. What was in them is gone. std::bad_alloc if the system refuses them.
        std::uint8_t* at_least(std::size_t bytes) { return piece_.at_least(bytes); }

    private:
        ScratchPool& pool_;
        Piece piece_;
    };

private:
    // The piece that was given back last: it is nearest to the caches.
    Piece take() {
        const std::lock_guard lock(mutex_);
        if (num_idle_ == 0) return {};
        return std::move(idle_[--num_idle_]);
    }

    void give_back(Piece piece) {
        const std::lock_guard lock(mutex_);
        if (num_idle_ < kMostIdle && piece.size() <= kMostIdleBytes) idle_[num_idle_++] = std::move(piece);
    }

    std::mutex mutex_;
    Piece idle_[kMostIdle];
    std::size_t num_idle_ = 0;
};

}  // namespace kvist
