#include "engine.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <new>
#include <stdexcept>
#include <utility>

namespace spo {

namespace {

constexpr size_t stage_chunk        = size_t(4) << 20; // one read of neighbouring experts
constexpr size_t predicted_capacity = 256;

std::vector<std::string> paths_of(const spo_params & params) { return { params.files, params.files + params.n_files }; }

uint64_t now_ns() {
    return uint64_t(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
}

} // namespace

engine::engine(const spo_params & params) :
    n_parallel_(params.n_parallel),
    source_(paths_of(params), params.source),
    link_(params.link_rate, params.link_latency) {
    read_layout(params);
    make_pools(params);
    queue_ = std::make_unique<upload_queue>(params.n_workers, predicted_capacity);
}

void engine::read_layout(const spo_params & params) {
    if (params.n_matrices < 1 || params.n_pools < 1 || params.n_workers < 1 || params.n_used < 1 ||
        params.n_staging < 1 || params.half_life < 1 || params.n_parallel < 1) {
        throw std::invalid_argument("an engine needs matrices, pools, workers, staging and positive counts");
    }
    matrices_.reserve(params.n_matrices); // graphs keep pointers into both
    layers_.reserve(params.n_matrices);
    std::vector<int> pool_layers(params.n_pools, 0);
    for (int i = 0; i < params.n_matrices; ++i) {
        const spo_matrix & m = params.matrices[i];
        const matrix_shape shape{ ggml_type(m.type), m.ne0, m.ne1 };
        if (m.type < 0 || m.type >= GGML_TYPE_COUNT || m.ne0 < 1 || m.ne1 < 1 || m.n_expert < 1 || m.pool < 0 ||
            m.pool >= params.n_pools || m.file < 0 || m.file >= params.n_files || shape.bytes() != m.expert_bytes) {
            throw std::invalid_argument(std::string(m.name) + ": type, shape, pool, file or size do not fit together");
        }
        if (layers_.empty() || layers_.back().block != m.layer) {
            by_block_[m.layer] = int(layers_.size());
            layers_.push_back({ this, m.layer, m.pool, pool_layers[m.pool]++, i, 0, m.n_expert, 0 });
        }
        moe_layer & layer = layers_.back();
        if (layer.pool != m.pool || layer.n_expert != m.n_expert) {
            throw std::invalid_argument(std::string(m.name) + ": differs in pool or experts from its layer");
        }
        by_name_[m.name] = i;
        matrices_.push_back(
            { this, m.name, i, int(layers_.size()) - 1, layer.n_matrices, shape, m.n_expert, m.file, m.offset });
        bufts_.push_back(cpu_expert_buft(shape, m.n_expert, params.n_used, params.repack != 0));
        repacked_ += !ggml_backend_buft_is_host(bufts_.back());
        layer.n_matrices += 1;
        layer.expert_bytes += m.expert_bytes;
        staged_.emplace_back(m.n_expert, uint8_t(0));
    }
}

void engine::make_pools(const spo_params & params) {
    for (int p = 0; p < params.n_pools; ++p) {
        std::vector<const moe_layer *> members;
        for (const moe_layer & layer : layers_) {
            if (layer.pool == p) {
                members.push_back(&layer);
            }
        }
        const int n_slots = params.pools[p];
        if (members.empty() || n_slots < 1) {
            throw std::invalid_argument("pool " + std::to_string(p) + " has no layers or no slots");
        }
        const moe_layer & model = *members.front();
        for (const moe_layer * layer : members) {
            bool same = layer->n_matrices == model.n_matrices && layer->n_expert == model.n_expert;
            for (int i = 0; same && i < model.n_matrices; ++i) {
                same = matrices_[layer->first + i].shape == matrices_[model.first + i].shape;
            }
            if (!same) {
                throw std::invalid_argument("pool " + std::to_string(p) + " joins layers of different shapes");
            }
        }
        const int n_layers = int(members.size());
        slot_pool pool{
            slot_table(n_slots, std::max(0, (n_slots - params.n_used) / 4), n_layers, model.n_expert,
                       make_policy(params.policy, n_layers, model.n_expert, params.half_life)),
            {},
            {},
            std::vector<slot_pool::transfer>(n_slots),
        };
        for (int i = 0; i < model.n_matrices; ++i) {
            const matrix_shape & shape = matrices_[model.first + i].shape;
            const auto           buft  = bufts_[model.first + i];
            const size_t         bytes = bank::bytes_for(shape, n_slots + 1, buft);
            pool.memory.emplace_back(ggml_backend_buft_alloc_buffer(buft, bytes));
            if (!pool.memory.back()) {
                throw std::bad_alloc();
            }
            ggml_backend_buffer_set_usage(pool.memory.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            pool.banks.emplace_back(shape, n_slots + 1, pool.memory.back().get(), 0);
            stats_.bank_bytes += bytes;
        }
        pools_.push_back(std::move(pool));
    }
    std::vector<matrix_shape> shapes;
    std::vector<int>          experts;
    for (const matrix & m : matrices_) {
        shapes.push_back(m.shape);
        experts.push_back(m.n_expert);
    }
    staging_             = std::make_unique<staging>(shapes, experts, bufts_, params.n_staging);
    stats_.staging_bytes = staging_->bytes();
}

const matrix * engine::find(const char * tensor_name) const {
    const auto found = by_name_.find(tensor_name);
    return found == by_name_.end() ? nullptr : &matrices_[found->second];
}

bool engine::decodes(const matrix & m, int64_t n_used, int64_t n_tokens) const {
    const moe_layer &  layer = layers_[m.layer];
    const slot_table & table = pools_[layer.pool].table;
    return n_tokens <= n_parallel_ && std::min<int64_t>(m.n_expert, n_used * n_tokens) <= table.size();
}

// --- decoding

void engine::release_pins() {
    for (const pinned & p : pinned_) {
        slot_table & table = pools_[p.pool].table;
        const slot & s     = table.at(p.slot);
        if (s.pins > 0 && s.layer == p.layer && s.expert == p.expert) { // a failed upload has let go already
            table.unpin(p.slot);
        }
    }
    pinned_.clear();
}

void engine::acquire(int layer_index, const id_view & ids, int32_t * slots) {
    const moe_layer & layer = layers_[layer_index];
    slot_pool &       pool  = pools_[layer.pool];
    slot_table &      table = pool.table;
    const int         pl    = layer.pool_layer;

    lock held(mutex_);
    // Nodes of a graph run in order: whoever computes this one has finished with the layer before.
    release_pins();
    drop_adoption();
    table.step(pl);
    std::vector<pinned> wanted;
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            const int expert = ids.at(i, t);
            if (std::any_of(wanted.begin(), wanted.end(), [&](const pinned & p) { return p.expert == expert; })) {
                continue;
            }
            wanted.push_back({ layer.pool, table.find(pl, expert), pl, expert });
            table.use(pl, expert);
        }
    }
    // First pin what is here, so that what is missing cannot take its place.
    for (pinned & w : wanted) {
        if (w.slot >= 0) {
            table.pin(w.slot);
            pinned_.push_back(w);
            stats_.hits += table.at(w.slot).state == slot_state::ready;
        }
    }
    stats_.requests += wanted.size();
    for (pinned & w : wanted) {
        if (w.slot >= 0) {
            const uint64_t id = pool.transfers[w.slot].id;
            if (table.at(w.slot).state == slot_state::loading && queue_->remove_predicted(id)) {
                in_flight_ -= layer.n_matrices;
                enqueue(layer_index, w.expert, w.slot, /*predicted*/ false); // overtakes other predictions
            }
            continue;
        }
        wait(held, stats_.stall_ns, [&] {
            w.slot = start_upload(layer_index, w.expert, /*predicted*/ false);
            return w.slot >= 0;
        });
        if (w.slot >= 0) {
            table.pin(w.slot);
            pinned_.push_back(w);
        }
    }
    wait(held, stats_.stall_ns, [&] {
        return std::none_of(wanted.begin(), wanted.end(), [&](const pinned & w) {
            return w.slot >= 0 && table.at(w.slot).state == slot_state::loading;
        });
    });
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            const int found = table.find(pl, ids.at(i, t));
            *slots++        = found >= 0 ? found : table.size(); // the spare slot, in a graph about to end
        }
    }
}

int engine::start_upload(int layer_index, int expert, bool predicted) {
    const moe_layer & layer = layers_[layer_index];
    slot_pool &       pool  = pools_[layer.pool];
    slot              evicted;
    const auto        claimed = pool.table.claim(layer.pool_layer, expert, predicted, &evicted);
    if (!claimed) {
        return -1;
    }
    if (evicted.predicted) {
        stats_.wasted_bytes += layer.expert_bytes;
    }
    enqueue(layer_index, expert, *claimed, predicted);
    return *claimed;
}

void engine::enqueue(int layer_index, int expert, int slot_index, bool predicted) {
    const moe_layer & layer                  = layers_[layer_index];
    const uint64_t    id                     = next_id_++;
    pools_[layer.pool].transfers[slot_index] = { id, layer.n_matrices, false };
    if (predicted) {
        auto run = [this, &layer, expert, slot_index] {
            for (int i = 0; i < layer.n_matrices; ++i) {
                fill_slot(matrices_[layer.first + i], expert, slot_index);
            }
        };
        in_flight_ += layer.n_matrices;
        if (!queue_->predict({ id, run })) {
            in_flight_ -= layer.n_matrices;
            pools_[layer.pool].table.abandon(slot_index);
        }
        return;
    }
    in_flight_ += layer.n_matrices;
    for (int i = 0; i < layer.n_matrices; ++i) { // apart, so that several threads can share one expert
        queue_->demand({ id, [this, &layer, i, expert, slot_index] {
                            fill_slot(matrices_[layer.first + i], expert, slot_index);
                        } });
    }
}

bool engine::fill(bank & to, int i, const matrix & m, int expert, int count) {
    if (should_abort()) {
        return false; // nobody waits for it any more
    }
    const size_t   bytes  = size_t(count) * m.shape.bytes();
    const uint64_t offset = m.offset + uint64_t(expert) * m.shape.bytes();
    const auto     begin  = std::chrono::steady_clock::now();
    try {
        if (void * plain = to.plain(i)) {
            source_.read(m.file, offset, bytes, plain);
        } else {
            thread_local std::vector<uint8_t> bounce;
            bounce.resize(bytes);
            source_.read(m.file, offset, bytes, bounce.data());
            to.write(i, count, bounce.data());
        }
    } catch (const std::exception & e) {
        fail("layer " + std::to_string(layers_[m.layer].block) + ", expert " + std::to_string(expert) + ": " +
             e.what());
        return false;
    }
    link_.pass(begin, bytes);
    return true;
}

void engine::fill_slot(const matrix & m, int expert, int slot_index) {
    slot_pool & pool   = pools_[layers_[m.layer].pool];
    const bool  failed = !fill(pool.banks[m.position], slot_index, m, expert, 1);
    {
        lock                  held(mutex_);
        slot_pool::transfer & t = pool.transfers[slot_index];
        in_flight_ -= 1;
        t.failed |= failed;
        t.remaining -= 1;
        stats_.uploaded_bytes += failed ? 0 : m.shape.bytes();
        if (t.remaining == 0 && t.failed) {
            pool.table.abandon(slot_index);
        } else if (t.remaining == 0) {
            pool.table.ready(slot_index);
            stats_.uploads += 1;
        }
    }
    landed_.notify_all();
}

// The compute thread does not just sleep: it takes queued demand copies itself.
void engine::wait(lock & held, uint64_t & stall_ns, const std::function<bool()> & done) {
    if (should_abort() || done()) {
        return;
    }
    const uint64_t begin = now_ns();
    while (!should_abort() && !done()) {
        held.unlock();
        const bool helped = queue_->help();
        held.lock();
        if (!helped && !should_abort() && !done()) {
            landed_.wait(held);
        }
    }
    stall_ns += now_ns() - begin;
}

// --- prompts

void engine::stream(const matrix & m, const id_view & ids) {
    std::vector<uint8_t> needed(m.n_expert, 0);
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            needed[ids.at(i, t)] = 1;
        }
    }
    const moe_layer & layer = layers_[m.layer];
    lock              held(mutex_);
    release_pins();
    if (m.position == 0) {
        drop_adoption();
        adopt(layer, ids);
    }
    staging_->use(-1); // the product before this one is computed, its stage may be refilled
    stage & here = staging_->of(m.index);
    fill_stage(m, needed);
    staging_->use(m.index);
    if (m.position + 1 < layer.n_matrices) {
        const matrix & next = matrices_[m.index + 1];
        if (staging_->free_for(next.index)) {
            fill_stage(next, needed);
        }
    }
    wait(held, stats_.stall_ns, [&] { return here.pending == 0; });
    if (!should_abort()) {
        copy_adopted(m, held);
    }
}

// What a prompt streams may as well stay, newest tokens first, where a slot is empty anyway: the first
// answer then does not start cold. Nothing is evicted for it.
void engine::adopt(const moe_layer & layer, const id_view & ids) {
    slot_table & table = pools_[layer.pool].table;
    table.step(layer.pool_layer);
    for (int64_t t = ids.n_tokens - 1; t >= 0 && table.has_empty(); --t) {
        for (int64_t i = 0; i < ids.n_used && table.has_empty(); ++i) {
            const int expert = ids.at(i, t);
            if (table.find(layer.pool_layer, expert) < 0) {
                adopted_.push_back({ layer.pool, *table.claim(layer.pool_layer, expert, /*predicted*/ false),
                                     layer.pool_layer, expert });
                table.use(layer.pool_layer, expert);
            }
        }
    }
}

void engine::copy_adopted(const matrix & m, lock & held) {
    slot_pool & pool = pools_[layers_[m.layer].pool];
    held.unlock(); // nobody else touches slots that are loading without a transfer
    for (const pinned & a : adopted_) {
        pool.banks[m.position].copy(a.slot, staging_->bank_of(m.index), a.expert);
    }
    held.lock();
    if (m.position + 1 == layers_[m.layer].n_matrices) {
        for (const pinned & a : adopted_) {
            pool.table.ready(a.slot);
        }
        adopted_.clear();
    }
}

// A graph that ended early leaves slots half filled.
void engine::drop_adoption() {
    for (const pinned & a : adopted_) {
        pools_[a.pool].table.abandon(a.slot);
    }
    adopted_.clear();
}

void engine::fill_stage(const matrix & m, const std::vector<uint8_t> & needed) {
    stage & s = staging_->of(m.index);
    if (s.holds != m.index) {
        if (s.holds >= 0) {
            std::fill(staged_[s.holds].begin(), staged_[s.holds].end(), uint8_t(0));
        }
        s.holds = m.index;
    }
    std::vector<uint8_t> & have  = staged_[m.index];
    const moe_layer &      layer = layers_[m.layer];
    slot_pool &            pool  = pools_[layer.pool];
    const int              most  = std::max(1, int(stage_chunk / m.shape.bytes()));
    int                    run   = 0; // neighbours not resident, to be read at once
    const auto             read  = [&](int end) {
        if (run > 0) {
            s.pending += 1;
            in_flight_ += 1;
            queue_->demand({ 0, [this, &m, first = end - run, count = run] { stage_read(m, first, count); } });
            run = 0;
        }
    };
    for (int e = 0; e < m.n_expert; ++e) {
        if (!needed[e] || have[e] != 0) {
            read(e);
            continue;
        }
        have[e]        = 1;
        const int slot = pool.table.find(layer.pool_layer, e);
        if (slot >= 0 && pool.table.at(slot).state == slot_state::ready) {
            read(e);
            pool.table.pin(slot);
            s.pending += 1;
            in_flight_ += 1;
            queue_->demand({ 0, [this, &m, e, slot] { stage_copy(m, e, slot); } });
        } else if (++run == most) {
            read(e + 1);
        }
    }
    read(m.n_expert);
}

void engine::stage_read(const matrix & m, int expert, int count) {
    const bool done = fill(staging_->bank_of(m.index), expert, m, expert, count);
    if (done) {
        lock held(mutex_);
        stats_.uploaded_bytes += size_t(count) * m.shape.bytes();
        stats_.staged_bytes += size_t(count) * m.shape.bytes();
    }
    stage_landed(m, expert, count, done);
}

void engine::stage_copy(const matrix & m, int expert, int slot_index) {
    slot_pool & pool = pools_[layers_[m.layer].pool];
    staging_->bank_of(m.index).copy(expert, pool.banks[m.position], slot_index);
    {
        lock held(mutex_);
        pool.table.unpin(slot_index);
    }
    stage_landed(m, expert, 1, true);
}

void engine::stage_landed(const matrix & m, int expert, int count, bool done) {
    {
        lock held(mutex_);
        std::fill_n(staged_[m.index].begin() + expert, count, uint8_t(done));
        staging_->of(m.index).pending -= 1;
        in_flight_ -= 1;
    }
    landed_.notify_all();
}

// --- callers

void engine::fail(const std::string & line) {
    {
        lock held(mutex_);
        if (error_.empty()) {
            error_ = line;
        }
        failed_ = true;
    }
    landed_.notify_all();
}

void engine::interrupt() {
    interrupted_ = true;
    landed_.notify_all();
}

std::string engine::reset() {
    lock held(mutex_);
    // A copy of the graph that ended must not fail the next one: let all finish, or refuse to start.
    interrupted_ = true;
    while (in_flight_ > 0) {
        held.unlock();
        const bool helped = queue_->help();
        held.lock();
        if (!helped && in_flight_ > 0) {
            landed_.wait(held);
        }
    }
    release_pins();
    drop_adoption();
    interrupted_ = false;
    failed_      = false;
    return std::exchange(error_, "");
}

int engine::prefetch(int block, const int32_t * experts, int n) {
    const auto found = by_block_.find(block);
    if (found == by_block_.end()) {
        return 0;
    }
    const moe_layer & layer    = layers_[found->second];
    int               accepted = 0;
    lock              held(mutex_);
    slot_table &      table = pools_[layer.pool].table;
    for (int i = 0; i < n; ++i) {
        if (experts[i] < 0 || experts[i] >= layer.n_expert || table.find(layer.pool_layer, experts[i]) >= 0) {
            continue;
        }
        if (start_upload(found->second, experts[i], /*predicted*/ true) < 0) {
            break;
        }
        accepted += 1;
    }
    stats_.predicted += uint64_t(accepted);
    return accepted;
}

spo_stats engine::stats() {
    lock      held(mutex_);
    spo_stats out = stats_;
    out.source    = source_.kind();
    out.repacked  = repacked_;
    return out;
}

std::string engine::check() {
    lock held(mutex_);
    for (const slot_pool & pool : pools_) {
        const std::string broken = pool.table.check();
        if (!broken.empty()) {
            return broken;
        }
    }
    return "";
}

} // namespace spo
