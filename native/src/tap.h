// What leaves a graph for whoever predicts: one layer's residual and what its router chose. The
// compute thread writes and never waits; the reader gets the newest and misses what it was too slow for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace spo {

struct tap {
    int                  layer = -1;
    std::vector<float>   residual; // [n_embd], input of the layer's FFN norm
    std::vector<float>   shared;   // [n_embd], output of the shared expert; zeros without one
    std::vector<int32_t> ids;      // [n_used]
    std::vector<float>   weights;  // [n_used]
};

class tap_box {
public:
    // Reserves memory; from now on taps are kept.
    void open(int n_embd);
    void close(); // wakes the reader for good
    bool is_open() const { return n_embd_ > 0; }
    int  n_embd() const { return n_embd_; } // 0: closed

    // `shared` may be null.
    void write(int layer, const float * residual, const float * shared, const int32_t * ids, const float * weights,
               int n_used);
    // The newest tap that was not read yet; false after `timeout_ms` or once closed.
    bool read(tap & out, int timeout_ms);

private:
    std::atomic<int>        n_embd_{ 0 };
    bool                    fresh_ = false;
    tap                     newest_;
    std::mutex              mutex_;
    std::condition_variable written_;
};

} // namespace spo
