#include "misses.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

namespace spo {

int cpu_share(miss_mode mode, int misses, float upload_us, float cpu_us) {
    if (mode == miss_mode::upload || misses == 0) {
        return 0;
    }
    if (mode == miss_mode::cpu) {
        return misses;
    }
    const int least = mode == miss_mode::split && misses > 1 ? 1 : 0;
    if (upload_us <= 0 || cpu_us <= 0) { // both have to be seen before they can be compared
        return misses > 1 ? misses / 2 : int(cpu_us <= 0);
    }
    const auto done = [&](int n) { return std::max(float(misses - n) * upload_us, float(n) * cpu_us); };
    int        best = least;
    for (int n = least; n <= misses - least; ++n) {
        best = done(n) < done(best) ? n : best;
    }
    return best;
}

void cpu_product(ggml_tensor * dst, int ith, int nth) {
    const ggml_tensor *               weights = dst->src[0];
    const ggml_tensor *               input   = dst->src[1];
    const ggml_tensor *               missing = dst->src[2];
    const auto *                      of      = ggml_get_type_traits_cpu(weights->type);
    const auto *                      as      = ggml_get_type_traits_cpu(of->vec_dot_type);
    const int64_t                     n       = weights->ne[0];
    const int64_t                     first   = dst->ne[0] * ith / nth;
    const int64_t                     last    = dst->ne[0] * (ith + 1) / nth;
    thread_local std::vector<uint8_t> row; // the input as vec_dot takes it, once per thread: cheap beside the product
    row.resize(std::max(row.size(), ggml_row_size(of->vec_dot_type, n)));
    for (int64_t t = 0; t < dst->ne[2]; ++t) {
        for (int64_t i = 0; i < dst->ne[1]; ++i) {
            const auto expert = *reinterpret_cast<const int32_t *>(
                static_cast<const char *>(missing->data) + size_t(i) * missing->nb[0] + size_t(t) * missing->nb[1]);
            auto * out = reinterpret_cast<float *>(static_cast<char *>(dst->data) + size_t(i) * dst->nb[1] +
                                                   size_t(t) * dst->nb[2]);
            if (expert < 0) {
                std::fill(out + first, out + last, 0.0f);
                continue;
            }
            const auto * x =
                reinterpret_cast<const float *>(static_cast<const char *>(input->data) +
                                                size_t(i % input->ne[1]) * input->nb[1] + size_t(t) * input->nb[2]);
            const void * y = x;
            if (of->vec_dot_type != GGML_TYPE_F32) {
                as->from_float(x, row.data(), n);
                y = row.data();
            }
            const char * w = static_cast<const char *>(weights->data) + size_t(expert) * weights->nb[2];
            for (int64_t r = first; r < last; ++r) {
                of->vec_dot(int(n), out + r, 0, w + size_t(r) * weights->nb[1], 0, y, 0, 1);
            }
        }
    }
}

void miss_branch::begin(int layer, const inputs & with) {
    layer_ = layer;
    with_  = with;
    products_.clear();
    repeated_.clear();
    repeated_[with.input]   = with.cpu_input;
    repeated_[with.ids]     = with.cpu_ids;
    repeated_[with.weights] = with.cpu_weights;
}

void miss_branch::product(const ggml_tensor * product, ggml_tensor * weights) { products_[product] = weights; }

ggml_tensor * miss_branch::finish(ggml_context * ctx, ggml_tensor * input, ggml_tensor * weights) {
    ggml_tensor * x = repeat(ctx, input);
    return x ? rows(ctx, weights, x) : nullptr;
}

ggml_tensor * miss_branch::rows(ggml_context * ctx, ggml_tensor * weights, ggml_tensor * input) const {
    ggml_tensor * args[] = { weights, input, with_.missing };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, weights->ne[1], with_.missing->ne[0], with_.missing->ne[1], 1, args, 3,
                          op_, GGML_N_TASKS_MAX, data_);
}

ggml_tensor * miss_branch::repeat(ggml_context * ctx, ggml_tensor * t) {
    const auto done = repeated_.find(t);
    if (done != repeated_.end()) {
        return done->second;
    }
    ggml_tensor * copy    = nullptr;
    const auto    product = products_.find(t);
    if (product != products_.end()) {
        ggml_tensor * x = repeat(ctx, t->src[1]);
        copy            = x ? rows(ctx, product->second, x) : nullptr;
    } else if (t->op == GGML_OP_NONE) {
        copy = on_cpu(t);
    } else if (t->op != GGML_OP_CUSTOM && t->op != GGML_OP_MUL_MAT_ID) {
        copy     = ggml_new_tensor(ctx, t->type, GGML_MAX_DIMS, t->ne);
        copy->op = t->op;
        std::copy(std::begin(t->nb), std::end(t->nb), copy->nb);
        std::memcpy(copy->op_params, t->op_params, sizeof(copy->op_params));
        for (int i = 0; i < GGML_MAX_SRC && copy; ++i) {
            copy->src[i] = t->src[i] ? repeat(ctx, t->src[i]) : nullptr;
            if (t->src[i] && !copy->src[i]) {
                copy = nullptr;
            }
        }
        if (copy && t->view_src) { // a view of its first source, which may itself be one
            const ggml_tensor * from = t->src[0];
            ggml_tensor *       to   = copy->src[0];
            copy->view_src           = to->view_src ? to->view_src : to;
            copy->view_offs =
                t->view_offs - (from->view_src ? from->view_offs : 0) + (to->view_src ? to->view_offs : 0);
        }
    }
    repeated_[t] = copy;
    return copy;
}

ggml_tensor * miss_branch::on_cpu(const ggml_tensor * weight) {
    if (!weight->buffer || (weight->flags & GGML_TENSOR_FLAG_INPUT)) {
        return nullptr;
    }
    if (ggml_backend_buffer_is_host(weight->buffer)) {
        return const_cast<ggml_tensor *>(weight);
    }
    leaf & kept = leaves_[weight];
    if (!kept.tensor) {
        const ggml_init_params params = { ggml_tensor_overhead(), nullptr, /*no_alloc*/ true };
        kept.context.reset(ggml_init(params));
        if (!kept.context) {
            throw std::bad_alloc();
        }
        ggml_tensor * copy = ggml_dup_tensor(kept.context.get(), weight);
        kept.memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(kept.context.get(), ggml_backend_cpu_buffer_type()));
        if (!kept.memory) {
            throw std::bad_alloc();
        }
        ggml_backend_buffer_set_usage(kept.memory.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_get(weight, copy->data, 0, ggml_nbytes(weight));
        kept.tensor = copy;
    }
    return kept.tensor;
}

} // namespace spo
