#include "trace.h"

#include <algorithm>

namespace spo {

void trace_log::start(size_t capacity) {
    std::lock_guard lock(mutex_);
    spans_.clear();
    spans_.reserve(capacity);
    capacity_ = capacity;
}

void trace_log::span(int kind, uint64_t begin_ns, int block, int expert) {
    if (!on()) {
        return;
    }
    const uint64_t  end = now_ns();
    std::lock_guard lock(mutex_);
    if (spans_.size() < capacity_) {
        spans_.push_back({ begin_ns, end, kind, block, expert, 0 });
    }
}

size_t trace_log::take(spo_span * out, size_t n) {
    std::lock_guard lock(mutex_);
    const size_t    count = std::min(n, spans_.size());
    std::copy_n(spans_.begin(), count, out);
    spans_.clear();
    return count;
}

} // namespace spo
