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
    explicit upload_queue(int n_workers);
    ~upload_queue(); // drops what is queued, joins the threads
    upload_queue(const upload_queue &)             = delete;
    upload_queue & operator=(const upload_queue &) = delete;

    void demand(upload u);
    void predict(upload u);
    // What is left of a queued prediction becomes demand, behind the demand already queued.
    void promote(uint64_t id);
    // Takes a prediction out if none of its `copies` has started; one that has may as well land.
    bool drop(uint64_t id, int copies);
    // Run one queued demand copy on the calling thread; false when there is none.
    bool help();

private:
    void work();

    std::mutex               mutex_;
    std::condition_variable  filled_;
    std::deque<upload>       demand_;       // guarded by mutex_
    std::deque<upload>       predicted_;    // guarded by mutex_
    bool                     stop_ = false; // guarded by mutex_
    std::vector<std::thread> workers_;
};

} // namespace spo
