// Experts that are not resident may be computed where their bytes lie, by the CPU, instead of uploaded.
// Here: how many of a step's misses, and the nodes that do it, beside the products with slots. What the
// nodes compute is every row of a layer's experts, zero where the slots have it; slots of experts that are
// computed here hold zeros; both are summed.
#pragma once

#include "bank.h"

#include <cstdint>
#include <unordered_map>

struct ggml_cgraph;

namespace spo {

enum class miss_mode { upload, cpu, split, automatic };

// How many of a step's misses the CPU computes while the others are uploaded: the number after which both
// are done soonest, given the microseconds that one of either takes, 0 where not known yet.
int cpu_share(miss_mode mode, int misses, float upload_us, float cpu_us);

// One thread's part of a layer's product with experts in main memory. Sources of `dst`: weights
// [ne0, ne1, n_expert], input [ne0, 1 or n_used, n_tokens] F32, and [n_used, n_tokens] I32, the expert of
// each row or -1, for zeros. Plain vec_dot, as ggml_mul_mat_id does it for one row. Throws std::bad_alloc.
void cpu_product(ggml_tensor * dst, int ith, int nth);

// Repeats what a graph does between a layer's first product and its last, with other inputs. One per
// engine; used layer by layer while a graph is built.
class miss_branch {
public:
    // `op` is to call cpu_product, on all compute threads; `data` is its own.
    miss_branch(ggml_custom_op_t op, void * data) : op_(op), data_(data) {}

    // A layer begins. Its router's tensors, and what stands for them on the CPU.
    struct inputs {
        ggml_tensor * input; // [n_embd, n_tokens]
        ggml_tensor * ids;
        ggml_tensor * weights;
        ggml_tensor * cpu_input;
        ggml_tensor * cpu_ids;
        ggml_tensor * cpu_weights;
        ggml_tensor * missing; // [n_used, n_tokens] I32: the expert, or -1 where a slot has it
        ggml_tensor * slots;
    };
    void          begin(int layer, const inputs & with);
    int           layer() const { return layer_; }
    ggml_tensor * slots() const { return with_.slots; }

    // One of the layer's products: of `weights`, in main memory, whose slots gave `product`.
    void product(const ggml_tensor * product, ggml_tensor * weights);
    // The last one, of `input`: its rows for the missing experts. Null where the graph holds something
    // that cannot be repeated; the layer's misses then have to be uploaded.
    ggml_tensor * finish(ggml_context * ctx, ggml_tensor * input, ggml_tensor * weights);

private:
    struct leaf { // a weight that lives on a device, once more in main memory
        context_ptr   context;
        buffer_ptr    memory;
        ggml_tensor * tensor = nullptr;
    };

    ggml_tensor * repeat(ggml_context * ctx, ggml_tensor * t);
    ggml_tensor * rows(ggml_context * ctx, ggml_tensor * weights, ggml_tensor * input) const;
    ggml_tensor * on_cpu(const ggml_tensor * weight);

    ggml_custom_op_t                                       op_;
    void *                                                 data_;
    int                                                    layer_ = -1;
    inputs                                                 with_{};
    std::unordered_map<const ggml_tensor *, ggml_tensor *> products_; // with slots, to their weights
    std::unordered_map<const ggml_tensor *, ggml_tensor *> repeated_;
    std::unordered_map<const ggml_tensor *, leaf>          leaves_; // of the model, for all graphs
};

} // namespace spo
