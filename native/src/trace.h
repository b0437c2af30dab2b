// What happened when, for one answer: a bounded list of spans that callers take out afterwards.
#pragma once

#include "speculoe/speculoe.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace spo {

inline uint64_t now_ns() {
    return uint64_t(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
}

class trace_log {
public:
    // Forgets what is there; keeps up to `capacity` spans from now on, 0: none.
    void start(size_t capacity);
    // From now on `on()` says whether anybody will look.
    bool on() const { return capacity_ > 0; }
    // Ends now. Drops it when the list is full: the beginning of an answer is what one looks at.
    void span(int kind, uint64_t begin_ns, int block, int expert);
    // Copies out up to n spans, oldest first, and forgets all.
    size_t take(spo_span * out, size_t n);

private:
    std::atomic<size_t>   capacity_{ 0 };
    std::mutex            mutex_;
    std::vector<spo_span> spans_; // guarded by mutex_
};

} // namespace spo
