#include "device.h"

#include <algorithm>
#include <new>
#include <stdexcept>

namespace spo {

namespace {

// Whether all that was sent through a backend has come to an end; false: it throws.
bool settles(ggml_backend_t backend) {
    try {
        ggml_backend_synchronize(backend);
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

} // namespace

device::device(const char * name, int n_lanes, size_t lane_bytes) :
    dev_(ggml_backend_dev_by_name(name)), lane_bytes_(lane_bytes), lanes_(size_t(n_lanes)) {
    if (!dev_) {
        throw std::invalid_argument("device " + std::string(name) + " is not there; see `speculoe-local doctor`");
    }
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev_, &props);
    async_                                  = props.caps.async;
    const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(dev_);
    const ggml_backend_dev_t         cpu    = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    pinned_                                 = pinned != nullptr;
    for (lane & l : lanes_) {
        l.backend.reset(ggml_backend_dev_init(dev_, nullptr));
        if (!l.backend) {
            throw std::bad_alloc();
        }
        if (pinned) {
            l.memory.reset(ggml_backend_buft_alloc_buffer(pinned, lane_bytes));
        }
        if (!l.memory) { // drivers limit pinned memory; what is not pinned is copied once more, by the driver
            l.memory.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(cpu), lane_bytes));
        }
        if (!l.memory) {
            throw std::bad_alloc();
        }
        // Backends hand out ordinary memory, without a word, where pinned memory is short.
        pinned_ &= ggml_backend_buffer_get_type(l.memory.get()) == pinned;
        l.staging = ggml_backend_buffer_get_base(l.memory.get());
    }
}

device::~device() {
    for (lane & l : lanes_) {
        if (!settles(l.backend.get())) {
            l.backend.release(); // of a lost device: its destructor would throw
        }
    }
}

bool device::is_lost(const char * name) {
    const ggml_backend_dev_t dev = ggml_backend_dev_by_name(name);
    if (!dev) {
        return true;
    }
    backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    try {
        const ggml_init_params params = { 2 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        const context_ptr      context(ggml_init(params));
        ggml_tensor *          in    = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 64);
        ggml_tensor *          out   = ggml_scale(context.get(), in, 0.5f);
        ggml_cgraph *          graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, out);
        const buffer_ptr memory(backend ? ggml_backend_alloc_ctx_tensors(context.get(), backend.get()) : nullptr);
        if (!memory) {
            return false; // short of memory is not lost
        }
        return ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS;
    } catch (const std::exception &) {
        if (!settles(backend.get())) {
            backend.release();
        }
        return true;
    }
}

struct device::held_lane {
    explicit held_lane(device & of) : owner(of), l(of.take()) {}
    ~held_lane() { owner.give(l); }
    device & owner;
    lane &   l;
};

void device::upload(ggml_tensor * to, size_t offset, size_t size, const reader & read) {
    const held_lane held(*this);
    for (size_t at = 0; at < size; at += lane_bytes_) {
        const size_t n = std::min(lane_bytes_, size - at);
        read(at, n, held.l.staging);
        ggml_backend_tensor_set_async(held.l.backend.get(), to, held.l.staging, offset + at, n);
        ggml_backend_synchronize(held.l.backend.get());
    }
}

void device::upload(ggml_tensor * to, size_t offset, size_t size, const void * pinned) {
    const held_lane held(*this);
    ggml_backend_tensor_set_async(held.l.backend.get(), to, pinned, offset, size);
    ggml_backend_synchronize(held.l.backend.get());
}

device::lane & device::take() {
    std::unique_lock lock(mutex_);
    lane *           found = nullptr;
    freed_.wait(lock, [&] {
        const auto at = std::find_if(lanes_.begin(), lanes_.end(), [](const lane & l) { return !l.busy; });
        found         = at == lanes_.end() ? nullptr : &*at;
        return found != nullptr;
    });
    found->busy = true;
    return *found;
}

void device::give(lane & l) {
    {
        std::lock_guard lock(mutex_);
        l.busy = false;
    }
    freed_.notify_one();
}

} // namespace spo
