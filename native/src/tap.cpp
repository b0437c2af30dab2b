#include "tap.h"

#include <algorithm>
#include <chrono>

namespace spo {

void tap_box::open(int n_embd) {
    std::lock_guard lock(mutex_);
    newest_.residual.resize(n_embd);
    newest_.shared.resize(n_embd);
    fresh_  = false;
    n_embd_ = n_embd;
}

void tap_box::close() {
    {
        std::lock_guard lock(mutex_);
        n_embd_ = 0;
    }
    written_.notify_all();
}

void tap_box::write(int layer, const float * residual, const float * shared, const int32_t * ids, const float * weights,
                    int n_used) {
    {
        std::lock_guard lock(mutex_);
        if (!is_open()) {
            return;
        }
        fresh_        = true;
        newest_.layer = layer;
        std::copy_n(residual, n_embd(), newest_.residual.begin());
        if (shared) {
            std::copy_n(shared, n_embd(), newest_.shared.begin());
        } else {
            std::fill(newest_.shared.begin(), newest_.shared.end(), 0.0f);
        }
        newest_.ids.assign(ids, ids + n_used);
        newest_.weights.assign(weights, weights + n_used);
    }
    written_.notify_one();
}

bool tap_box::read(tap & out, int timeout_ms) {
    std::unique_lock lock(mutex_);
    written_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return fresh_ || !is_open(); });
    if (!fresh_ || !is_open()) {
        return false;
    }
    out    = newest_;
    fresh_ = false;
    return true;
}

} // namespace spo
