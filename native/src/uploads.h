// Bounded queue of copies and the threads that run them. Demand goes before predicted; within each,
// first come, first served. What a copy does is the caller's business.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace spo {

struct upload {
    uint64_t              id;  // for removal; several copies of one upload share it
    std::function<void()> run; // must not throw
};

class upload_queue {
public:
    upload_queue(int n_workers, size_t predicted_capacity);
    ~upload_queue(); // drops what is queued, joins the threads
    upload_queue(const upload_queue &)             = delete;
    upload_queue & operator=(const upload_queue &) = delete;

    void demand(upload u);
    // false: the queue of predictions is full and `u` is dropped; a missed guess costs one stall,
    // a queue that grows costs every later one.
    bool predict(upload u);
    // true: a queued prediction with this id was taken out and will not run.
    bool remove_predicted(uint64_t id);
    // Run one queued demand copy on the calling thread; false when there is none.
    bool help();

private:
    void work();

    const size_t             capacity_;
    std::mutex               mutex_;
    std::condition_variable  filled_;
    std::deque<upload>       demand_;       // guarded by mutex_
    std::deque<upload>       predicted_;    // guarded by mutex_
    bool                     stop_ = false; // guarded by mutex_
    std::vector<std::thread> workers_;
};

} // namespace spo
