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
constexpr const char * guess_name   = "spo_guess-%d";

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

// Sources of a slots operation; residual and shared may be absent. On a device the first three leave as one
// tensor [n_input + n_embd + 2 n_used, n_tokens] F32 in the place of ids: each transfer back would wait for
// the device. Where misses are computed on the CPU it begins with the experts' input.
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

const float * row(const ggml_tensor * tensor, size_t stride, int64_t t) {
    return reinterpret_cast<const float *>(static_cast<const char *>(tensor->data) + size_t(t) * stride);
}

bool is_packed(const ggml_tensor * slots) { return slots->src[src_ids]->type != GGML_TYPE_I32; }

// The length of the residual that a slots operation is given, 0 without one.
int64_t residual_size(const moe_layer & layer, const ggml_tensor * slots) {
    if (is_packed(slots)) {
        return slots->src[src_ids]->ne[0] - 2 * slots->ne[0] - layer.n_input;
    }
    return slots->src[src_residual] ? slots->src[src_residual]->ne[0] : 0;
}

// What a slots operation is given, token by token.
struct step_input {
    step_input(const moe_layer & layer, const ggml_tensor * slots) :
        n_used(slots->ne[0]),
        n_tokens(slots->ne[1]),
        n_embd(residual_size(layer, slots)),
        n_input_(layer.n_input),
        first_(slots->src[src_ids]),
        slots_(slots) {
        if (is_packed(slots)) {
            packed_ids_.resize(size_t(n_used * n_tokens));
            for (int64_t t = 0; t < n_tokens; ++t) {
                const float * as_floats = row(first_, first_->nb[1], t) + first_->ne[0] - n_used;
                std::transform(as_floats, as_floats + n_used, &packed_ids_[size_t(t * n_used)],
                               [](float id) { return int32_t(id); });
            }
        }
    }

    id_view ids() const {
        return packed_ids_.empty() ? view(first_)
                                   : id_view{ reinterpret_cast<const char *>(packed_ids_.data()), n_used, n_tokens,
                                              sizeof(int32_t), size_t(n_used) * sizeof(int32_t) };
    }
    const int32_t * ids(int64_t t) const {
        return reinterpret_cast<const int32_t *>(ids().data + size_t(t) * ids().nb1);
    }
    const float * weights(int64_t t) const {
        return packed_ids_.empty() ? row(slots_->src[src_weights], slots_->src[src_weights]->nb[2], t)
                                   : row(first_, first_->nb[1], t) + first_->ne[0] - 2 * n_used;
    }
    // Its length is n_embd; null where the graph does not show it.
    const float * residual(int64_t t) const {
        if (n_embd == 0) {
            return nullptr;
        }
        return packed_ids_.empty() ? row(slots_->src[src_residual], slots_->src[src_residual]->nb[1], t)
                                   : row(first_, first_->nb[1], t) + n_input_;
    }
    const float * shared(int64_t t) const {
        const ggml_tensor * of = slots_->src[src_shared];
        return of ? row(of, of->nb[1], t) : nullptr;
    }

    const int64_t n_used;
    const int64_t n_tokens;
    const int64_t n_embd;

private:
    const int64_t        n_input_;
    const ggml_tensor *  first_;
    const ggml_tensor *  slots_;
    std::vector<int32_t> packed_ids_;
};

void write_taps(const moe_layer & layer, const step_input & in) {
    tap_box & taps = layer.owner->taps();
    for (int64_t t = 0; taps.is_open() && in.n_embd == taps.n_embd() && t < in.n_tokens; ++t) {
        taps.write(index_of(layer), in.residual(t), in.shared(t), in.ids(t), in.weights(t), int(in.n_used));
    }
}

// Predicts what the next layer will execute, and starts on it.
void speculate(const moe_layer & layer, const step_input & in) {
    engine &          owner = *layer.owner;
    speculation *     how   = owner.speculating();
    const moe_layer * next  = how ? owner.find_layer(how->target(layer.block)) : nullptr;
    if (!next || in.n_embd == 0 || !how->covers(next->block, in.n_used, in.n_tokens)) {
        return;
    }
    const uint64_t begin = now_ns();
    for (int64_t t = 0; t < in.n_tokens; ++t) {
        if (!how->predict(layer.block, t, in.residual(t), in.shared(t), in.ids(t), in.weights(t), int(in.n_used))) {
            owner.fail("layer " + std::to_string(next->block) + ": its prediction is not finite; use --mode exact");
            return;
        }
    }
    owner.trace().span(SPO_SPAN_PREDICT, begin, next->block, -1);
    owner.request_ahead(index_of(*next), { reinterpret_cast<const char *>(how->ids(next->block)), in.n_used,
                                           in.n_tokens, sizeof(int32_t), size_t(in.n_used) * sizeof(int32_t) });
}

// The prediction in the router's place. Sources are only what must come before.
void guess_ids_op(ggml_tensor * dst, int ith, int, void * data) {
    auto & layer = *static_cast<const moe_layer *>(data);
    if (ith == 0) {
        std::memcpy(dst->data, layer.owner->speculating()->ids(layer.block), ggml_nbytes(dst));
    }
}

void guess_weights_op(ggml_tensor * dst, int ith, int, void * data) {
    auto & layer = *static_cast<const moe_layer *>(data);
    if (ith == 0) {
        std::memcpy(dst->data, layer.owner->speculating()->weights(layer.block), ggml_nbytes(dst));
    }
}

// Taps go before any wait: what is predicted from them follows the demand without a gap.
void leave(const moe_layer & layer, const step_input & in) {
    write_taps(layer, in);
    speculate(layer, in);
}

// Slot numbers out, once what they hold is there.
void slots_op(ggml_tensor * dst, int ith, int, void * data) {
    if (ith != 0) {
        return;
    }
    auto &              layer = *static_cast<const moe_layer *>(data);
    const ggml_tensor * first = dst->src[src_ids];
    try {
        const step_input in(layer, dst);
        if (std::strcmp(first->name, request_name) != 0 || first->op != GGML_OP_CUSTOM) {
            layer.owner->request(index_of(layer), in.ids());
        }
        leave(layer, in);
        layer.owner->acquire(index_of(layer), in.ids(), static_cast<int32_t *>(dst->data));
    } catch (const std::exception & e) {
        layer.owner->fail(e.what());
        std::memset(dst->data, 0, ggml_nbytes(dst));
    }
}

// The same in three operations where the CPU computes misses: the first decides; ids out. Then which of them
// are computed here, and last, when they are, slot numbers.
void decide_op(ggml_tensor * dst, int ith, int, void * data) {
    if (ith != 0) {
        return;
    }
    auto & layer = *static_cast<const moe_layer *>(data);
    try {
        const step_input in(layer, dst);
        copy_ids(in.ids(), dst->data);
        layer.owner->request(index_of(layer), in.ids());
        leave(layer, in);
    } catch (const std::exception & e) {
        layer.owner->fail(e.what());
        std::memset(dst->data, 0, ggml_nbytes(dst));
    }
}

void missing_op(ggml_tensor * dst, int ith, int, void * data) {
    if (ith == 0) {
        static_cast<const moe_layer *>(data)->owner->missing(view(dst->src[0]), static_cast<int32_t *>(dst->data));
    }
}

void wait_op(ggml_tensor * dst, int ith, int, void * data) {
    if (ith != 0) {
        return;
    }
    auto & layer = *static_cast<const moe_layer *>(data);
    try {
        layer.owner->acquire(index_of(layer), view(dst->src[0]), static_cast<int32_t *>(dst->data));
    } catch (const std::exception & e) {
        layer.owner->fail(e.what());
        std::memset(dst->data, 0, ggml_nbytes(dst));
    }
}

// What the experts of a packed step are given, and their weights.
void input_op(ggml_tensor * dst, int ith, int, void * data) {
    auto & layer = *static_cast<const moe_layer *>(data);
    for (int64_t t = 0; ith == 0 && t < dst->ne[1]; ++t) {
        std::copy_n(row(dst->src[0], dst->src[0]->nb[1], t), layer.n_input,
                    reinterpret_cast<float *>(static_cast<char *>(dst->data) + size_t(t) * dst->nb[1]));
    }
}

void weights_op(ggml_tensor * dst, int ith, int, void *) {
    const ggml_tensor * all = dst->src[0];
    for (int64_t t = 0; ith == 0 && t < dst->ne[2]; ++t) {
        std::copy_n(row(all, all->nb[1], t) + all->ne[0] - 2 * dst->ne[1], dst->ne[1],
                    reinterpret_cast<float *>(static_cast<char *>(dst->data) + size_t(t) * dst->nb[2]));
    }
}

void cpu_product_op(ggml_tensor * dst, int ith, int nth, void * data) {
    try {
        cpu_product(dst, ith, nth);
    } catch (const std::exception & e) {
        static_cast<engine *>(data)->fail(std::string("computing a missing expert: ") + e.what());
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

// An operation whose result has the shape of `like`.
ggml_tensor * op_like(ggml_context * ctx, ggml_cgraph * gf, const ggml_tensor * like,
                      std::initializer_list<ggml_tensor *> sources, ggml_custom_op_t op, const void * data) {
    ggml_tensor * args[GGML_MAX_SRC] = {};
    std::copy(sources.begin(), sources.end(), args);
    ggml_tensor * result = ggml_custom_4d(ctx, like->type, like->ne[0], like->ne[1], like->ne[2], 1, args,
                                          int(sources.size()), op, 1, const_cast<void *>(data));
    ggml_build_forward_expand(gf, result);
    return result;
}

ggml_tensor * ids_op(ggml_context * ctx, ggml_cgraph * gf, std::initializer_list<ggml_tensor *> sources,
                     ggml_custom_op_t op, const void * data) {
    return op_like(ctx, gf, *sources.begin(), sources, op, data);
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
ggml_tensor * find_slots(ggml_cgraph * gf, int block) {
    for (int i = ggml_graph_n_nodes(gf) - 1; i >= 0; --i) {
        if (block_of(*ggml_graph_node(gf, i)) == block) {
            return ggml_graph_node(gf, i);
        }
    }
    return nullptr;
}

// Residual, weights and ids in one tensor; ids are small enough for floats. `input` may be null.
ggml_tensor * pack(ggml_context * ctx, ggml_tensor * ids, ggml_tensor * weights, ggml_tensor * residual,
                   ggml_tensor * input) {
    ggml_tensor * all = ggml_concat(ctx, ggml_reshape_2d(ctx, ggml_cont(ctx, weights), ids->ne[0], ids->ne[1]),
                                    ggml_cast(ctx, ids, GGML_TYPE_F32), 0);
    all               = residual ? ggml_concat(ctx, residual, all, 0) : all;
    return input ? ggml_concat(ctx, input, all, 0) : all;
}

// The node that takes from all experts' probabilities those of the chosen ones, or null.
ggml_tensor * weights_of(ggml_tensor * weights, const ggml_tensor * ids) {
    while (weights && !(weights->op == GGML_OP_GET_ROWS && weights->src[1] == ids)) {
        weights = weights->src[0];
    }
    return weights;
}

// Replaces a router's choice by the prediction. With the router's weights only its ids are replaced, and
// on_graph puts the new ones before the node that reads them.
void execute_prediction(ggml_context * ctx, ggml_cgraph * gf, engine & owner, const moe_layer & layer,
                        ggml_tensor * cur, ggml_tensor ** ids, ggml_tensor ** weights) {
    if (owner.speculating()->true_weights()) {
        ggml_tensor * taken = weights_of(*weights, *ids);
        if (taken) {
            ggml_tensor * guess = op_like(ctx, gf, *ids, { taken->src[0] }, guess_ids_op, &layer);
            ggml_format_name(guess, guess_name, layer.block);
            owner.unused().push_back(*ids);
            taken->src[1] = guess;
            *ids          = guess;
        }
        return;
    }
    owner.unused().insert(owner.unused().end(), { *ids, *weights });
    *ids     = op_like(ctx, gf, *ids, { cur }, guess_ids_op, &layer);
    *weights = op_like(ctx, gf, *weights, { *ids }, guess_weights_op, &layer);
}

// The operations of a layer whose misses the CPU may compute; its products follow. Slots are not part of the
// graph yet: a product reads them first, after what the CPU computes.
void begin_misses(ggml_context * ctx, ggml_cgraph * gf, engine & owner, miss_branch & misses, const moe_layer & layer,
                  ggml_tensor * cur, ggml_tensor * ids, ggml_tensor * weights, ggml_tensor * residual) {
    const int     index  = index_of(layer);
    const bool    packed = owner.on_device() && ids->op != GGML_OP_CUSTOM;
    ggml_tensor * all    = packed ? pack(ctx, ids, weights, residual, cur) : nullptr;
    owner.set_input(index, packed ? cur->ne[0] : 0);
    owner.allow_cpu(index, false); // until the last product shows that it can
    const auto op = [&](const ggml_tensor * like, std::initializer_list<ggml_tensor *> sources, ggml_custom_op_t what) {
        return op_like(ctx, gf, like, sources, what, &layer);
    };
    ggml_tensor * decided = packed     ? op(ids, { all }, decide_op)
                            : residual ? op(ids, { ids, weights, residual }, decide_op)
                                       : op(ids, { ids, weights }, decide_op);
    ggml_format_name(decided, slots_name, layer.block);
    ggml_tensor * args[] = { decided };
    misses.begin(index, { cur, ids, weights, packed ? op(cur, { all }, input_op) : cur, packed ? decided : ids,
                          packed ? op(weights, { all }, weights_op) : weights, op(ids, { decided }, missing_op),
                          ggml_custom_4d(ctx, ids->type, ids->ne[0], ids->ne[1], 1, 1, args, 1, wait_op, 1,
                                         const_cast<moe_layer *>(&layer)) });
}

// A product with slots where the CPU may compute misses: of the layer's last one, the sum of both.
ggml_tensor * miss_product(ggml_context * ctx, ggml_cgraph * gf, engine & owner, miss_branch & misses, const matrix & m,
                           ggml_tensor * w, ggml_tensor * cur) {
    ggml_tensor * product = ggml_mul_mat_id(ctx, owner.pool_of(m).banks[m.position].tensor(), cur, misses.slots());
    if (m.position + 1 < owner.layer(m.layer).n_matrices) {
        misses.product(product, owner.in_memory(m, w));
        return product;
    }
    ggml_tensor * missing = misses.finish(ctx, cur, owner.in_memory(m, w));
    if (!missing) {
        return product;
    }
    owner.allow_cpu(m.layer, true);
    ggml_build_forward_expand(gf, missing); // here, so that uploads are waited for last
    return ggml_add(ctx, product, missing);
}

void on_router(ggml_context * ctx, ggml_cgraph * gf, int il, ggml_tensor * cur, ggml_tensor ** ids,
               ggml_tensor ** weights, void * data) {
    auto &            owner = *static_cast<engine *>(data);
    const moe_layer * layer = owner.find_layer(il);
    if (!layer || !owner.decodes(*layer, (*ids)->ne[0], (*ids)->ne[1])) {
        return;
    }
    ggml_tensor * residual = residual_of(cur);
    if (speculation * how = owner.speculating()) {
        if (how->covers(il, (*ids)->ne[0], (*ids)->ne[1])) {
            execute_prediction(ctx, gf, owner, *layer, cur, ids, weights);
        }
        how->shows(il, residual && residual->ne[0] == how->n_embd());
    }
    if (miss_branch * misses = owner.misses()) {
        begin_misses(ctx, gf, owner, *misses, *layer, cur, *ids, *weights, residual);
        return;
    }
    ggml_tensor * chosen = *ids;
    ggml_tensor * slots  = nullptr;
    if (owner.on_device() && chosen->op != GGML_OP_CUSTOM) {
        slots = op_like(ctx, gf, *ids, { pack(ctx, chosen, *weights, residual, nullptr) }, slots_op, layer);
    } else {
        if (layer->shared && !owner.on_device()) {
            chosen = ids_op(ctx, gf, { chosen }, request_op, layer);
            ggml_set_name(chosen, request_name);
        }
        slots = residual ? ids_op(ctx, gf, { chosen, *weights, residual }, slots_op, layer)
                         : ids_op(ctx, gf, { chosen, *weights }, slots_op, layer);
    }
    ggml_format_name(slots, slots_name, il);
}

ggml_tensor * on_product(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * w, ggml_tensor * cur, ggml_tensor * ids,
                         void * data) {
    auto &         owner = *static_cast<engine *>(data);
    const matrix * m     = owner.find(w->name);
    if (!m) {
        return nullptr;
    }
    ggml_tensor * slots = find_slots(gf, owner.layer(m->layer).block);
    if (slots && owner.misses() && owner.misses()->layer() == m->layer) {
        return miss_product(ctx, gf, owner, *owner.misses(), *m, w, cur);
    }
    if (slots) {
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
    if (shared->type == GGML_TYPE_F32 && shared->ne[0] == residual_size(layer, slots)) {
        slots->src[src_shared] = shared;
    }
}

// What nobody reads any more, and what only fed it, is not computed: a router whose choice was replaced.
void skip_unused(ggml_cgraph * gf, std::vector<ggml_tensor *> & unused) {
    std::unordered_map<const ggml_tensor *, int> readers;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        for (const ggml_tensor * source : ggml_graph_node(gf, i)->src) {
            readers[source] += 1;
        }
    }
    while (!unused.empty()) {
        ggml_tensor * t = unused.back();
        unused.pop_back();
        if (readers[t] > 0 || t->op == GGML_OP_NONE || (t->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            continue;
        }
        t->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
        for (ggml_tensor * source : t->src) {
            if (source && --readers[source] == 0) {
                unused.push_back(source);
            }
        }
    }
}

// Predicted ids whose reader, the true router's weights, was built before them move in front of it.
void move_guesses(ggml_cgraph * gf) {
    ggml_tensor ** nodes = ggml_graph_nodes(gf);
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * ids   = nodes[i]->op == GGML_OP_GET_ROWS ? nodes[i]->src[1] : nullptr;
        int           block = -1;
        if (ids && ids->op == GGML_OP_CUSTOM && std::sscanf(ids->name, guess_name, &block) == 1) {
            ggml_tensor ** at = std::find(nodes + i, nodes + ggml_graph_n_nodes(gf), ids);
            if (at < nodes + ggml_graph_n_nodes(gf)) {
                std::rotate(nodes + i, at, at + 1);
                ++i;
            }
        }
    }
}

void on_graph(ggml_cgraph * gf, void * data) {
    auto & owner = *static_cast<engine *>(data);
    if (owner.speculating()) {
        move_guesses(gf);
        skip_unused(gf, owner.unused());
    }
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

std::unique_ptr<miss_branch> make_miss_branch(engine & owner) {
    return std::make_unique<miss_branch>(cpu_product_op, &owner);
}

const llama_moe_hooks & moe_hooks() {
    static const llama_moe_hooks hooks = { on_router, on_product, on_graph };
    return hooks;
}

} // namespace spo
