// The engine's side of prompts: whole matrices stream through staging, slots are left alone.
#include "engine.h"

#include <algorithm>

namespace spo {

namespace {

constexpr size_t stage_chunk = size_t(4) << 20; // one read of neighbouring experts

} // namespace

void engine::stream(const matrix & m, const id_view & ids) {
    std::vector<uint8_t> needed(m.n_expert, 0);
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            needed[ids.at(i, t)] = 1;
        }
    }
    const moe_layer & layer = layers_[m.layer];
    lock              held(mutex_);
    pass(m.layer);
    release(ahead_);
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
        copy(pool.banks[m.position], a.slot, staging_->bank_of(m.index), a.expert, m, a.expert);
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
    const uint64_t begin = now_ns();
    const target   whole{ &staging_->bank_of(m.index), expert, count };
    const bool     done = fill(&whole, 1, m, m.file, m.offset + uint64_t(expert) * m.shape.bytes(), expert);
    trace_.span(SPO_SPAN_STAGED, begin, layers_[m.layer].block, expert);
    if (done) {
        lock held(mutex_);
        stats_.uploaded_bytes += size_t(count) * m.shape.bytes();
        stats_.staged_bytes += size_t(count) * m.shape.bytes();
    }
    stage_landed(m, expert, count, done);
}

void engine::stage_copy(const matrix & m, int expert, int slot_index) {
    slot_pool & pool = pools_[layers_[m.layer].pool];
    const bool  done = copy(staging_->bank_of(m.index), expert, pool.banks[m.position], slot_index, m, expert);
    {
        lock held(mutex_);
        pool.table.unpin(slot_index);
    }
    stage_landed(m, expert, 1, done);
}

// A device that is lost throws, here on a thread that nobody catches anything on.
bool engine::copy(bank & to, int i, const bank & from, int j, const matrix & m, int expert) {
    try {
        to.copy(i, from, j);
        return true;
    } catch (const std::exception & e) {
        fail_upload(m, expert, e);
        return false;
    }
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

} // namespace spo
