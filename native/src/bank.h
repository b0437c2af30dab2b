// Memory that experts are computed from: a tensor [ne0, ne1, n] in any ggml buffer type, written one
// expert at a time. Slots of a pool and staging buffers are both made of these.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>
#include <memory>
#include <vector>

namespace spo {

struct ggml_context_free {
    void operator()(ggml_context * c) const { ggml_free(c); }
};
struct ggml_buffer_free {
    void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); }
};
using context_ptr = std::unique_ptr<ggml_context, ggml_context_free>;
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, ggml_buffer_free>;

// Shape and type of one expert's matrix, and where it lives.
struct matrix_shape {
    ggml_type type;
    int64_t   ne0;
    int64_t   ne1;

    size_t bytes() const { return ggml_row_size(type, ne0) * size_t(ne1); }
    bool   operator==(const matrix_shape & o) const { return type == o.type && ne0 == o.ne0 && ne1 == o.ne1; }
};

// The buffer type llama.cpp itself would choose for such an expert tensor on the CPU: a repacked
// layout where the CPU has kernels for one, plain memory otherwise
// (select_weight_buft in llama-model-loader.cpp).
ggml_backend_buffer_type_t cpu_expert_buft(const matrix_shape & shape, int n_expert, int n_used, bool repack);

class bank {
public:
    // `memory` is at least bytes_for(...) large and outlives the bank.
    bank(const matrix_shape & shape, int n, ggml_backend_buffer_t memory, size_t offset);

    static size_t bytes_for(const matrix_shape & shape, int n, ggml_backend_buffer_type_t buft);

    ggml_tensor * tensor() const { return tensor_; }
    size_t        expert_bytes() const { return shape_.bytes(); }

    // Where expert i's bytes may be written in the file's own layout, or null: then use write(), or, on a
    // device, upload to the tensor.
    void * plain(int i) const;
    // Whole experts [i, i + count) from bytes in the file's layout.
    void write(int i, int count, const void * bytes);
    // Expert j of another bank of the same shape and buffer type.
    void copy(int i, const bank & from, int j);

private:
    matrix_shape               shape_;
    context_ptr                context_;
    ggml_tensor *              tensor_ = nullptr;
    std::vector<ggml_tensor *> experts_; // 2-d tensors over each expert; empty when plain
    bool                       host_ = false;
};

} // namespace spo
