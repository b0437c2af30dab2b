#include "pinned.h"

#include <new>

namespace spo {

pinned_experts::pinned_experts(ggml_backend_buffer_type_t buft, const file_source & source,
                               const std::vector<range> & wanted, size_t most, size_t slice) {
    uint8_t * at   = nullptr; // in the newest slice
    size_t    left = 0;
    for (size_t i = 0; i < wanted.size() && bytes_ + wanted[i].size <= most; ++i) {
        const range & r = wanted[i];
        if (r.size > left) { // what follows shares a slice while it fits
            size_t ask = 0;
            for (size_t n = i; n < wanted.size() && (n == i || ask + wanted[n].size <= slice) &&
                               bytes_ + ask + wanted[n].size <= most;
                 ++n) {
                ask += wanted[n].size;
            }
            buffer_ptr memory(ggml_backend_buft_alloc_buffer(buft, ask));
            // Backends hand out ordinary memory, without a word, where pinned memory is short.
            if (!memory || ggml_backend_buffer_get_type(memory.get()) != buft) {
                return;
            }
            at   = static_cast<uint8_t *>(ggml_backend_buffer_get_base(memory.get()));
            left = ask;
            ggml_backend_buffer_set_usage(memory.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            slices_.push_back(std::move(memory));
        }
        source.read(r.file, r.offset, r.size, at);
        source.forget(r.file, r.offset, r.size);
        places_[{ r.file, r.offset }] = { r.size, at, slices_.back().get(), nullptr, nullptr };
        at += r.size;
        left -= r.size;
        bytes_ += r.size;
    }
}

const uint8_t * pinned_experts::find(int file, uint64_t offset, size_t size) const {
    auto found = places_.upper_bound({ file, offset });
    if (found == places_.begin()) {
        return nullptr;
    }
    --found;
    const uint64_t skip = offset - found->first.second;
    return found->first.first == file && skip + size <= found->second.size ? found->second.data + skip : nullptr;
}

ggml_tensor * pinned_experts::tensor(int file, uint64_t offset, const matrix_shape & shape, int n_expert) {
    const auto found = places_.find({ file, offset });
    if (found == places_.end()) {
        return nullptr;
    }
    place & p = found->second;
    if (!p.tensor) {
        const ggml_init_params params = { ggml_tensor_overhead(), nullptr, /*no_alloc*/ true };
        p.context.reset(ggml_init(params));
        ggml_tensor * made =
            p.context ? ggml_new_tensor_3d(p.context.get(), shape.type, shape.ne0, shape.ne1, n_expert) : nullptr;
        if (!made || ggml_backend_tensor_alloc(p.memory, made, p.data) != GGML_STATUS_SUCCESS) {
            throw std::bad_alloc();
        }
        p.tensor = made;
    }
    return p.tensor;
}

} // namespace spo
