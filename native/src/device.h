// A device's memory as a place for banks, and the ways into it: lanes, each a backend instance of its own
// on that device, so that copies run beside the graphs of others.
#pragma once

#include "bank.h"

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace spo {

struct ggml_backend_delete {
    void operator()(ggml_backend_t b) const { ggml_backend_free(b); }
};
using backend_ptr = std::unique_ptr<ggml_backend, ggml_backend_delete>;

class device {
public:
    // `name` as ggml registers it. A lane stages up to lane_bytes at a time, in memory the device reads by
    // itself where there is some. Throws std::invalid_argument for an unknown name, std::bad_alloc.
    device(const char * name, int n_lanes, size_t lane_bytes);
    ~device();
    device(const device &)             = delete;
    device & operator=(const device &) = delete;

    ggml_backend_buffer_type_t buft() const { return ggml_backend_dev_buffer_type(dev_); }
    // What such memory is made of; null where the device reads none.
    ggml_backend_buffer_type_t host_buft() const { return ggml_backend_dev_host_buffer_type(dev_); }
    bool                       pinned() const { return pinned_; } // lanes stage in pinned memory
    bool                       async() const { return async_; }   // copies of a lane run beside graphs

    // Whether the device that ggml registers so fails at a small copy and a small graph.
    static bool is_lost(const char * name);

    using reader = std::function<void(size_t at, size_t n, void * to)>;
    // Fills bytes [offset, offset + size) of `to` with what `read` brings, through the staging of a lane, or
    // with what lies in memory that the device reads by itself, and returns once they are in device memory.
    // Any thread. What `read` throws leaves.
    void upload(ggml_tensor * to, size_t offset, size_t size, const reader & read);
    void upload(ggml_tensor * to, size_t offset, size_t size, const void * pinned);

private:
    struct lane {
        backend_ptr backend;
        buffer_ptr  memory;
        void *      staging = nullptr;
        bool        busy    = false;
    };
    struct held_lane;
    lane & take();
    void   give(lane & l);

    ggml_backend_dev_t      dev_;
    size_t                  lane_bytes_;
    bool                    pinned_ = false;
    bool                    async_  = false;
    std::vector<lane>       lanes_;
    std::mutex              mutex_; // guards busy
    std::condition_variable freed_;
};

} // namespace spo
