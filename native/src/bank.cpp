#include "bank.h"

#include <cstring>
#include <new>
#include <stdexcept>

namespace spo {

namespace {

context_ptr make_context(int n_tensors) {
    ggml_init_params params = { ggml_tensor_overhead() * size_t(n_tensors), nullptr, /*no_alloc*/ true };
    context_ptr      context(ggml_init(params));
    if (!context) {
        throw std::bad_alloc();
    }
    return context;
}

bool supports(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft, const matrix_shape & shape, int n_expert,
              int n_used) {
    const context_ptr context = make_context(8);
    ggml_tensor *     w       = ggml_new_tensor_3d(context.get(), shape.type, shape.ne0, shape.ne1, n_expert);
    ggml_tensor *     b       = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, shape.ne0, n_used, 512);
    ggml_tensor *     ids     = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, n_used, 512);
    ggml_tensor *     op      = ggml_mul_mat_id(context.get(), w, b, ids);
    const buffer_ptr  dummy(ggml_backend_buft_alloc_buffer(buft, 0));
    w->buffer = dummy.get();
    return ggml_backend_dev_supports_op(device, op);
}

} // namespace

ggml_backend_buffer_type_t cpu_expert_buft(const matrix_shape & shape, int n_expert, int n_used, bool repack) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!cpu) {
        throw std::runtime_error("ggml has no CPU device");
    }
    if (repack) {
        ggml_backend_reg_t reg   = ggml_backend_dev_backend_reg(cpu);
        auto *             extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
        for (ggml_backend_buffer_type_t * buft = extra ? extra(cpu) : nullptr; buft && *buft; ++buft) {
            if (supports(cpu, *buft, shape, n_expert, n_used)) {
                return *buft;
            }
        }
    }
    return ggml_backend_dev_buffer_type(cpu);
}

size_t bank::bytes_for(const matrix_shape & shape, int n, ggml_backend_buffer_type_t buft) {
    const context_ptr context = make_context(1);
    return ggml_backend_buft_get_alloc_size(buft,
                                            ggml_new_tensor_3d(context.get(), shape.type, shape.ne0, shape.ne1, n));
}

bank::bank(const matrix_shape & shape, int n, ggml_backend_buffer_t memory, size_t offset) : shape_(shape) {
    const ggml_backend_buffer_type_t buft  = ggml_backend_buffer_get_type(memory);
    const bool                       plain = ggml_backend_buft_is_host(buft);
    const ggml_backend_dev_t         dev   = ggml_backend_buft_get_device(buft);
    host_       = plain || !dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
    context_    = make_context(plain ? 1 : n + 1);
    tensor_     = ggml_new_tensor_3d(context_.get(), shape.type, shape.ne0, shape.ne1, n);
    auto * base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(memory)) + offset;
    if (ggml_backend_tensor_alloc(memory, tensor_, base) != GGML_STATUS_SUCCESS) {
        throw std::bad_alloc();
    }
    for (int i = 0; !plain && i < n; ++i) {
        experts_.push_back(ggml_new_tensor_2d(context_.get(), shape.type, shape.ne0, shape.ne1));
        if (ggml_backend_tensor_alloc(memory, experts_.back(), base + size_t(i) * expert_bytes()) !=
            GGML_STATUS_SUCCESS) {
            throw std::bad_alloc();
        }
    }
}

void * bank::plain(int i) const {
    return experts_.empty() ? static_cast<uint8_t *>(tensor_->data) + size_t(i) * expert_bytes() : nullptr;
}

void bank::write(int i, int count, const void * bytes) {
    if (void * to = plain(i)) {
        std::memcpy(to, bytes, size_t(count) * expert_bytes());
        return;
    }
    for (int n = 0; n < count; ++n) {
        ggml_backend_tensor_set(experts_[i + n], static_cast<const uint8_t *>(bytes) + size_t(n) * expert_bytes(), 0,
                                expert_bytes());
    }
}

void bank::copy(int i, const bank & from, int j) {
    if (host_) { // repacked layouts are host memory too, and the same for the same shape
        std::memcpy(static_cast<uint8_t *>(tensor_->data) + size_t(i) * expert_bytes(),
                    static_cast<const uint8_t *>(from.tensor_->data) + size_t(j) * expert_bytes(), expert_bytes());
        return;
    }
    ggml_backend_tensor_copy(from.experts_[j], experts_[i]);
}

} // namespace spo
