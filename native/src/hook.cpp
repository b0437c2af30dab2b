#include "hook.h"

#include "engine.h"

#include <cstring>

namespace spo {

namespace {

constexpr const char * slots_name = "spo_slots";

id_view view(const ggml_tensor * ids) {
    return { static_cast<const char *>(ids->data), ids->ne[0], ids->ne[1], ids->nb[0], ids->nb[1] };
}

// Decoding: true expert ids in, slot numbers out.
void slots_op(ggml_tensor * dst, int ith, int, void * data) {
    if (ith != 0) {
        return; // every compute thread comes by, whatever the number of tasks says
    }
    auto & layer = *static_cast<const moe_layer *>(data);
    try {
        layer.owner->acquire(int(&layer - &layer.owner->layer(0)), view(dst->src[0]),
                             static_cast<int32_t *>(dst->data));
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
    auto * out = static_cast<int32_t *>(dst->data);
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            *out++ = ids.at(i, t);
        }
    }
}

ggml_tensor * ids_op(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * ids, ggml_custom_op_t op, const void * data) {
    ggml_tensor * result =
        ggml_custom_4d(ctx, GGML_TYPE_I32, ids->ne[0], ids->ne[1], 1, 1, &ids, 1, op, 1, const_cast<void *>(data));
    ggml_build_forward_expand(gf, result);
    return result;
}

// A layer's matrices share one slot op; the graph under construction is the only memory of it.
ggml_tensor * find_slots(ggml_cgraph * gf, const ggml_tensor * ids) {
    for (int i = ggml_graph_n_nodes(gf) - 1; i >= 0; --i) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        if (node == ids) {
            break;
        }
        if (node->op == GGML_OP_CUSTOM && node->src[0] == ids && std::strcmp(node->name, slots_name) == 0) {
            return node;
        }
    }
    return nullptr;
}

} // namespace

ggml_tensor * moe_hook(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * w, ggml_tensor * cur, ggml_tensor * ids,
                       void * data) {
    auto &         owner = *static_cast<engine *>(data);
    const matrix * m     = owner.find(w->name);
    if (!m) {
        return nullptr;
    }
    const moe_layer & layer = owner.layer(m->layer);
    slot_pool &       pool  = owner.pool_of(*m);
    if (owner.decodes(*m, ids->ne[0], ids->ne[1])) {
        ggml_tensor * slots = find_slots(gf, ids);
        if (!slots) {
            slots = ids_op(ctx, gf, ids, slots_op, &layer);
            ggml_set_name(slots, slots_name);
        }
        return ggml_mul_mat_id(ctx, pool.banks[m->position].tensor(), cur, slots);
    }
    ggml_tensor * ready   = ids_op(ctx, gf, ids, stage_op, m);
    ggml_tensor * product = ggml_mul_mat_id(ctx, owner.stages().bank_of(m->index).tensor(), cur, ready);
    // Fixes the order wait, product, wait, product: each wait may refill what the product before it read.
    ggml_build_forward_expand(gf, product);
    return product;
}

} // namespace spo
