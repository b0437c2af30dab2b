// The engine's side of decode steps: what a router chose is pinned, uploaded, or left to the CPU; then waited for.
#include "engine.h"

#include <algorithm>
#include <utility>

namespace spo {

namespace {

constexpr int stale_after = 64; // steps with misses, but none uploaded, or none computed: measure it again
constexpr int admitted    = 2;  // experts on their way, beyond which what the CPU computes is not uploaded

void average(float & of, float newest) { of = of > 0 ? of + timing_step * (newest - of) : newest; }

bool on_cpu(const layer_step & step, int expert) {
    return std::any_of(step.wanted.begin(), step.wanted.end(),
                       [expert](const pinned & w) { return w.on_cpu && w.expert == expert; });
}

} // namespace

bool engine::decodes(const moe_layer & layer, int64_t n_used, int64_t n_tokens) const {
    return n_tokens <= n_parallel_ &&
           std::min<int64_t>(layer.n_expert, n_used * n_tokens) <= pools_[layer.pool].table.size();
}

void engine::release(layer_step & step) {
    for (const pinned & p : step.pins) {
        slot_table & table = pools_[p.pool].table;
        const slot & s     = table.at(p.slot);
        if (s.pins > 0 && s.layer == p.layer && s.expert == p.expert) { // a failed upload has let go already
            table.unpin(p.slot);
        }
    }
    step.layer = -1;
    step.wanted.clear();
    step.pins.clear();
    step.n_cpu    = 0;
    step.n_demand = 0;
}

// Nodes of a graph run in order: whoever computes this layer has finished with the one before. Its first layers
// follow the last ones of the graph before only where they share a device.
void engine::pass(int layer_index) {
    const auto on = [&](const layer_step & step) { return device_of_[layers_[step.layer].pool]; };
    device *   at = device_of_[layers_[layer_index].pool];
    if (tail_.layer >= 0 && on(tail_) == at) {
        release(tail_);
    }
    if (now_.layer > layer_index && on(now_) != at) {
        release(tail_);
        std::swap(now_, tail_);
    }
    release(now_);
}

void engine::request(int layer_index, const id_view & ids) {
    lock held(mutex_);
    if (layer_index == acquired_ + 1) {
        const uint64_t window = now_ns() - acquired_ns_;
        stats_.window_ns += window;
        trace_.span(SPO_SPAN_COMPUTE, acquired_ns_, layers_[acquired_].block, -1);
        window_us_ += timing_step * (1e-3f * float(window) - window_us_);
    }
    pass(layer_index);
    drop_adoption();
    if (ahead_.layer == layer_index) {
        std::swap(now_, ahead_);
        return;
    }
    release(ahead_);
    ask(now_, layer_index, ids);
}

void engine::request_ahead(int layer_index, const id_view & ids) {
    lock held(mutex_);
    release(ahead_);
    // While the running layer still looks for slots, the next one must not take them.
    if (std::all_of(now_.wanted.begin(), now_.wanted.end(), [](const pinned & w) { return w.on_cpu || w.slot >= 0; })) {
        ask(ahead_, layer_index, ids);
    }
}

void engine::ask(layer_step & step, int layer_index, const id_view & ids) {
    const moe_layer & layer = layers_[layer_index];
    slot_pool &       pool  = pools_[layer.pool];
    slot_table &      table = pool.table;
    const int         pl    = layer.pool_layer;
    if (forget_) {
        table.forget_others(pl);
    }
    table.step(pl);
    step.layer = layer_index;
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            const int expert = ids.at(i, t);
            if (std::none_of(step.wanted.begin(), step.wanted.end(),
                             [&](const pinned & p) { return p.expert == expert; })) {
                step.wanted.push_back({ layer.pool, table.find(pl, expert), pl, expert });
            }
        }
    }
    judge_predictions(step);
    // First pin what is here, so that what is missing cannot take its place.
    std::vector<pinned *> late; // what is on its way, then what is not
    for (pinned & w : step.wanted) {
        table.use(pl, w.expert);
        if (w.slot >= 0 && table.at(w.slot).state == slot_state::ready) {
            hold(step, w);
            stats_.hits += 1;
        } else {
            late.insert(w.slot >= 0 ? late.begin() : late.end(), &w);
        }
    }
    table.settle(pl);
    stats_.requests += step.wanted.size();
    step.asked_ns = now_ns();
    step.n_cpu    = layer.cpu_misses ? share_misses(int(late.size())) : 0;
    step.n_demand = int(late.size()) - step.n_cpu;
    stats_.cpu_experts += uint64_t(step.n_cpu);
    // The likeliest are uploaded, as routers name them first: those come again soonest.
    std::for_each(late.end() - step.n_cpu, late.end(), [](pinned * w) {
        w->on_cpu = true;
        w->slot   = -1;
    });
    std::for_each(late.begin(), late.end() - step.n_cpu, [&](pinned * w) {
        if (w->slot >= 0) {
            hold(step, *w);
        }
    });
    std::for_each(late.begin(), late.end() - step.n_cpu, [&](pinned * w) {
        if (w->slot < 0) {
            request_missing(step, *w);
        }
    });
    for (const pinned & w : step.wanted) { // what was computed elsewhere may be asked for again
        if (w.on_cpu && in_flight_ < admitted * layer.n_copies() && table.find(pl, w.expert) < 0) {
            start_upload(layer_index, w.expert, /*predicted*/ false, /*urgent*/ false);
        }
    }
}

// The slot stays until the step has been computed; what is left of a prediction overtakes the others.
void engine::hold(layer_step & step, const pinned & wanted) {
    slot_pool & pool = pools_[wanted.pool];
    pool.table.pin(wanted.slot);
    step.pins.push_back(wanted);
    queue_->promote(pool.transfers[wanted.slot].id);
}

// How many of so many that are not there the CPU computes. Either way is tried again once in a while.
int engine::share_misses(int misses) {
    int on_cpu = cpu_share(misses_, misses, upload_us_, cpu_us_);
    if (misses_ != miss_mode::automatic || misses == 0) {
        return on_cpu;
    }
    if (on_cpu == 0 && ++without_cpu_ > stale_after) {
        on_cpu = 1;
    } else if (on_cpu == misses && ++without_upload_ > stale_after) {
        on_cpu = misses - 1;
    }
    without_cpu_    = on_cpu > 0 ? 0 : without_cpu_;
    without_upload_ = on_cpu < misses ? 0 : without_upload_;
    return on_cpu;
}

void engine::missing(const id_view & ids, int32_t * experts) {
    lock held(mutex_);
    cpu_ns_ = now_ns();
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            const int expert = ids.at(i, t);
            *experts++       = on_cpu(now_, expert) ? expert : -1;
        }
    }
}

// What one expert takes here and there while both go on beside each other: they share the memory's bandwidth.
void engine::measure(const layer_step & step) {
    if (step.n_demand > 0 && landed_ns_ > step.asked_ns) {
        average(upload_us_, 1e-3f * float(landed_ns_ - step.asked_ns) / float(step.n_demand));
    }
}

bool engine::request_missing(layer_step & step, pinned & wanted) {
    slot_pool & pool = pools_[wanted.pool];
    wanted.slot      = pool.table.find(wanted.layer, wanted.expert);
    if (wanted.slot >= 0) { // predicted since the step asked for it in vain
        pool.table.asked(wanted.slot);
        queue_->promote(pool.transfers[wanted.slot].id);
    } else {
        wanted.slot = start_upload(step.layer, wanted.expert, /*predicted*/ false, /*urgent*/ true);
    }
    if (wanted.slot < 0) {
        return false; // every slot is pinned or loading; acquire() tries again
    }
    pool.table.pin(wanted.slot);
    step.pins.push_back(wanted);
    return true;
}

void engine::acquire(int layer_index, const id_view & ids, int32_t * slots) {
    const moe_layer & layer = layers_[layer_index];
    slot_table &      table = pools_[layer.pool].table;
    const uint64_t    begin = now_ns();
    lock              held(mutex_);
    if (now_.n_cpu > 0) {
        average(cpu_us_, 1e-3f * float(begin - cpu_ns_) / float(now_.n_cpu));
        stats_.cpu_ns += begin - cpu_ns_;
        trace_.span(SPO_SPAN_CPU, cpu_ns_, layer.block, -1);
    }
    wait(held, stats_.stall_ns, [&] {
        bool all = true;
        for (pinned & w : now_.wanted) {
            all = w.on_cpu ? all
                           : (w.slot >= 0 || request_missing(now_, w)) &&
                                 table.at(w.slot).state != slot_state::loading && all;
        }
        return all;
    });
    trace_.span(SPO_SPAN_STALL, begin, layer.block, -1);
    measure(now_);
    acquired_    = layer_index;
    acquired_ns_ = now_ns();
    for (int64_t t = 0; t < ids.n_tokens; ++t) {
        for (int64_t i = 0; i < ids.n_used; ++i) {
            const int found = table.find(layer.pool_layer, ids.at(i, t));
            // The spare slot: the CPU has computed it, or the graph is about to end.
            *slots++ = found >= 0 && !on_cpu(now_, ids.at(i, t)) ? found : table.size();
        }
    }
}

} // namespace spo
