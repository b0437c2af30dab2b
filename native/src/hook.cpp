#include "hook.h"

#include "engine.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace spo {

namespace {

constexpr const char * request_name = "spo_request";
constexpr const char * slots_name   = "spo_slots-%d"; // with the block's number, by which on_graph finds the layer

id_view view(const ggml_tensor * ids) {
    return { static_cast<const char *>(ids->data), ids->ne[0], ids->ne[1], ids->nb[0], ids->nb[1] };
}

void copy_ids(const id_view & ids, void * to) {
    auto * out = static_cast<int32_t *>(to);
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            *out++ = ids.at(i, t);
        }
    }
}

int index_of(const moe_layer & layer) { return int(&layer - &layer.owner->layer(0)); }

// --- operations inside graphs. Every compute thread comes by, whatever the number of tasks says; only
// the first one acts.

// Sources of a slots operation. Residual and shared may be absent.
enum slots_source { src_ids, src_weights, src_residual, src_shared };

// The router has chosen: ids in, the same ids out, uploads on their way.
void request_op(ggml_tensor * dst, int ith, int, void * data) {
    if (ith != 0) {
        return;
    }
    auto &        layer = *static_cast<const moe_layer *>(data);
    const id_view ids   = view(dst->src[0]);
    copy_ids(ids, dst->data);
    try {
        layer.owner->request(index_of(layer), ids);
    } catch (const std::exception & e) {
        layer.owner->fail(e.what());
    }
}

void write_taps(const moe_layer & layer, const ggml_tensor * dst) {
    tap_box &           taps     = layer.owner->taps();
    const ggml_tensor * ids      = dst->src[src_ids];
    const ggml_tensor * weights  = dst->src[src_weights];
    const ggml_tensor * residual = dst->src[src_residual];
    const ggml_tensor * shared   = dst->src[src_shared];
    if (!taps.is_open() || !residual || residual->ne[0] != taps.n_embd()) {
        return;
    }
    const auto row = [](const ggml_tensor * tensor, size_t stride, int64_t t) {
        return reinterpret_cast<const float *>(static_cast<const char *>(tensor->data) + size_t(t) * stride);
    };
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        const auto * chosen = reinterpret_cast<const int32_t *>(row(ids, ids->nb[1], t));
        taps.write(index_of(layer), row(residual, residual->nb[1], t), shared ? row(shared, shared->nb[1], t) : nullptr,
                   chosen, row(weights, weights->nb[2], t), int(ids->ne[0]));
    }
}

// Slot numbers out, once what they hold is there.
void slots_op(ggml_tensor * dst, int ith, int, void * data) {
    if (ith != 0) {
        return;
    }
    auto & layer = *static_cast<const moe_layer *>(data);
    try {
        if (!layer.shared) {
            layer.owner->request(index_of(layer), view(dst->src[src_ids]));
        }
        write_taps(layer, dst); // before the wait: what is predicted from it follows the demand without a gap
        layer.owner->acquire(index_of(layer), view(dst->src[src_ids]), static_cast<int32_t *>(dst->data));
    } catch (const std::exception & e) {
        layer.owner->fail(e.what());
        std::memset(dst->data, 0, ggml_nbytes(dst));
    }
}

// Prompts: ids stay ids, but leave only when the experts they name are in the stage.
void stage_op(ggml_tensor * dst, int ith, int, void * data) {
    if (ith != 0) {
        return;
    }
    auto &        m   = *static_cast<const matrix *>(data);
    const id_view ids = view(dst->src[0]);
    try {
        m.owner->stream(m, ids);
    } catch (const std::exception & e) {
        m.owner->fail(e.what());
    }
    copy_ids(ids, dst->data);
}

ggml_tensor * ids_op(ggml_context * ctx, ggml_cgraph * gf, std::initializer_list<ggml_tensor *> sources,
                     ggml_custom_op_t op, const void * data) {
    ggml_tensor *       args[GGML_MAX_SRC] = {};
    const ggml_tensor * ids                = *sources.begin();
    std::copy(sources.begin(), sources.end(), args);
    ggml_tensor * result = ggml_custom_4d(ctx, GGML_TYPE_I32, ids->ne[0], ids->ne[1], 1, 1, args, int(sources.size()),
                                          op, 1, const_cast<void *>(data));
    ggml_build_forward_expand(gf, result);
    return result;
}

// --- while a graph is built

// The residual behind a router's input mul(rms_norm(r), w); null where the pattern does not hold.
ggml_tensor * residual_of(ggml_tensor * cur) {
    while (cur && (cur->op == GGML_OP_RESHAPE || cur->op == GGML_OP_CONT)) {
        cur = cur->src[0];
    }
    if (!cur || cur->op != GGML_OP_MUL || !cur->src[0] || cur->src[0]->op != GGML_OP_RMS_NORM) {
        return nullptr;
    }
    ggml_tensor * residual = cur->src[0]->src[0];
    return residual->type == GGML_TYPE_F32 && residual->nb[0] == sizeof(float) ? residual : nullptr;
}

// The block whose slots operation a node is, or -1.
int block_of(const ggml_tensor & node) {
    int block = -1;
    return node.op == GGML_OP_CUSTOM && std::sscanf(node.name, slots_name, &block) == 1 ? block : -1;
}

// A layer's matrices share one slots operation; the graph under construction is the only memory of it.
ggml_tensor * find_slots(ggml_cgraph * gf, const ggml_tensor * ids) {
    for (int i = ggml_graph_n_nodes(gf) - 1; i >= 0; --i) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        if (node == ids) {
            break;
        }
        if (block_of(*node) >= 0) {
            const ggml_tensor * source = node->src[src_ids];
            if (source == ids || (source->op == GGML_OP_CUSTOM && source->src[0] == ids)) {
                return node;
            }
        }
    }
    return nullptr;
}

void on_router(ggml_context * ctx, ggml_cgraph * gf, int il, ggml_tensor * cur, ggml_tensor ** ids,
               ggml_tensor ** weights, void * data) {
    auto &            owner = *static_cast<engine *>(data);
    const moe_layer * layer = owner.find_layer(il);
    if (!layer || !owner.decodes(*layer, (*ids)->ne[0], (*ids)->ne[1])) {
        return;
    }
    ggml_tensor * chosen = *ids;
    if (layer->shared) {
        chosen = ids_op(ctx, gf, { chosen }, request_op, layer);
        ggml_set_name(chosen, request_name);
    }
    ggml_tensor * residual = residual_of(cur);
    ggml_tensor * slots    = residual ? ids_op(ctx, gf, { chosen, *weights, residual }, slots_op, layer)
                                      : ids_op(ctx, gf, { chosen, *weights }, slots_op, layer);
    ggml_format_name(slots, slots_name, il);
}

ggml_tensor * on_product(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * w, ggml_tensor * cur, ggml_tensor * ids,
                         void * data) {
    auto &         owner = *static_cast<engine *>(data);
    const matrix * m     = owner.find(w->name);
    if (!m) {
        return nullptr;
    }
    if (ggml_tensor * slots = find_slots(gf, ids)) {
        return ggml_mul_mat_id(ctx, owner.pool_of(*m).banks[m->position].tensor(), cur, slots);
    }
    ggml_tensor * ready   = ids_op(ctx, gf, { ids }, stage_op, m);
    ggml_tensor * product = ggml_mul_mat_id(ctx, owner.stages().bank_of(m->index).tensor(), cur, ready);
    // Fixes the order wait, product, wait, product: each wait may refill what the product before it read.
    ggml_build_forward_expand(gf, product);
    return product;
}

// --- the whole graph

// The output of the shared expert of a block: the name that is last in its computation wins.
int find_shared(ggml_cgraph * gf, int from, int block) {
    for (const char * name : { "ffn_shexp_gated", "ffn_shared_out", "ffn_shexp_out", "ffn_shexp", "ffn_moe_shexp" }) {
        const std::string full = std::string(name) + "-" + std::to_string(block);
        for (int i = from; i < ggml_graph_n_nodes(gf); ++i) {
            if (full == ggml_graph_node(gf, i)->name) {
                return i;
            }
        }
    }
    return -1;
}

// Shared experts do not wait for the router: run them between request and slots, so that their time
// hides uploads, and let their output leave with the tap.
void run_shared_first(ggml_cgraph * gf, int slots_at, const moe_layer & layer) {
    ggml_tensor ** nodes = ggml_graph_nodes(gf);
    const int      last  = find_shared(gf, slots_at + 1, layer.block);
    if (last < 0) {
        return;
    }
    std::vector<const ggml_tensor *> needed = { nodes[last] };
    std::vector<ggml_tensor *>       first, rest;
    const auto                       wanted = [&](const ggml_tensor * t) {
        return std::find(needed.begin(), needed.end(), t) != needed.end();
    };
    for (int i = last; i >= slots_at; --i) {
        ggml_tensor * node = nodes[i];
        if (!wanted(node)) {
            rest.push_back(node);
            continue;
        }
        if (i == slots_at) {
            return; // it depends on the routed experts
        }
        first.push_back(node);
        for (const ggml_tensor * source : node->src) {
            if (source) {
                needed.push_back(source);
            }
        }
        if (node->view_src) {
            needed.push_back(node->view_src);
        }
    }
    ggml_tensor * shared = nodes[last];
    ggml_tensor * slots  = nodes[slots_at];
    std::copy(rest.rbegin(), rest.rend(), std::copy(first.rbegin(), first.rend(), nodes + slots_at));
    if (slots->src[src_residual] && shared->type == GGML_TYPE_F32 && shared->ne[0] == slots->src[src_residual]->ne[0]) {
        slots->src[src_shared] = shared;
    }
}

void on_graph(ggml_cgraph * gf, void * data) {
    auto & owner = *static_cast<engine *>(data);
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor *     node  = ggml_graph_node(gf, i);
        const moe_layer * layer = owner.find_layer(block_of(*node));
        if (layer && layer->shared) {
            run_shared_first(gf, i, *layer);
            while (ggml_graph_node(gf, i) != node) { // it has moved behind the shared expert
                ++i;
            }
        }
    }
}

} // namespace

const llama_moe_hooks & moe_hooks() {
    static const llama_moe_hooks hooks = { on_router, on_product, on_graph };
    return hooks;
}

} // namespace spo
