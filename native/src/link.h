// A modelled link: transfers queue on it, each takes latency + bytes / rate, and that time passes.
// The bytes themselves are copied by the caller beforehand, so results stay real.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <sys/prctl.h>
#endif

namespace spo {

class modelled_link {
public:
    modelled_link(double rate, double latency) : rate_(rate), latency_(latency) {}

    bool off() const { return rate_ <= 0; }

    // Returns when the link has carried `bytes` that were handed over at `begin`.
    void pass(std::chrono::steady_clock::time_point begin, size_t bytes) {
        if (off()) {
            return;
        }
        using clock      = std::chrono::steady_clock;
        const auto takes = std::chrono::duration_cast<clock::duration>(
            std::chrono::duration<double>(latency_ + double(bytes) / rate_));
        clock::time_point done;
        {
            std::lock_guard lock(mutex_);
            free_at_ = std::max(free_at_, begin) + takes;
            done     = free_at_;
        }
        wake_on_time();
        std::this_thread::sleep_until(done);
    }

private:
    // Timers of a thread are 50 us late by default, which would add up over the copies of a token.
    static void wake_on_time() {
#ifdef __linux__
        thread_local const int once = prctl(PR_SET_TIMERSLACK, 1UL);
        (void) once;
#endif
    }

    const double                          rate_;
    const double                          latency_;
    std::mutex                            mutex_;
    std::chrono::steady_clock::time_point free_at_{}; // guarded by mutex_
};

} // namespace spo
