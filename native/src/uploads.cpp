#include "uploads.h"

#include <algorithm>

namespace spo {

upload_queue::upload_queue(int n_workers) {
    workers_.reserve(size_t(n_workers));
    for (int i = 0; i < n_workers; ++i) {
        workers_.emplace_back([this] { work(); });
    }
}

upload_queue::~upload_queue() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    filled_.notify_all();
    for (std::thread & worker : workers_) {
        worker.join();
    }
}

void upload_queue::demand(upload u) {
    {
        std::lock_guard lock(mutex_);
        demand_.push_back(std::move(u));
    }
    filled_.notify_one();
}

void upload_queue::predict(upload u) {
    {
        std::lock_guard lock(mutex_);
        predicted_.push_back(std::move(u));
    }
    filled_.notify_one();
}

void upload_queue::promote(uint64_t id) {
    std::lock_guard lock(mutex_);
    for (auto it = predicted_.begin(); it != predicted_.end();) {
        if (it->id == id) {
            demand_.push_back(std::move(*it));
            it = predicted_.erase(it);
        } else {
            ++it;
        }
    }
}

bool upload_queue::drop(uint64_t id, int copies) {
    std::lock_guard lock(mutex_);
    const auto      same = [id](const upload & u) { return u.id == id; };
    if (std::count_if(predicted_.begin(), predicted_.end(), same) != copies) {
        return false;
    }
    predicted_.erase(std::remove_if(predicted_.begin(), predicted_.end(), same), predicted_.end());
    return true;
}

bool upload_queue::help() {
    upload next;
    {
        std::lock_guard lock(mutex_);
        if (demand_.empty()) {
            return false;
        }
        next = std::move(demand_.front());
        demand_.pop_front();
    }
    next.run();
    return true;
}

void upload_queue::work() {
    for (;;) {
        upload next;
        {
            std::unique_lock lock(mutex_);
            filled_.wait(lock, [this] { return stop_ || !demand_.empty() || !predicted_.empty(); });
            if (stop_) {
                return;
            }
            std::deque<upload> & from = demand_.empty() ? predicted_ : demand_;
            next                      = std::move(from.front());
            from.pop_front();
        }
        next.run();
    }
}

} // namespace spo
