#include "replay.h"

#include "slots.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace spo {

namespace {

void refuse_unless(bool holds, const std::string & line) {
    if (!holds) {
        throw std::invalid_argument(line);
    }
}

void validate(const spo_replay_params & p) {
    refuse_unless(p.ids && p.pool_of && p.pools, "a replay needs ids, pools and the pool of each layer");
    refuse_unless(p.n_tokens >= 1 && p.n_layers >= 1 && p.n_used >= 1 && p.n_expert >= 1 && p.n_pools >= 1 &&
                      p.half_life >= 1,
                  "a replay needs tokens, layers, experts, pools and a half life of at least 1");
    refuse_unless(p.n_warm >= 0 && p.n_warm < p.n_tokens,
                  "warm tokens " + std::to_string(p.n_warm) + " leave none to count of " + std::to_string(p.n_tokens));
    refuse_unless(p.policy >= SPO_REPLAY_CLAIRVOYANT && p.policy <= SPO_POLICY_LEARNED,
                  "policy " + std::to_string(p.policy) + " is not known");
    for (int i = 0; i < p.n_pools; ++i) {
        refuse_unless(p.pools[i] >= 1, "pool " + std::to_string(i) + " has no slots");
        refuse_unless(std::count(p.pool_of, p.pool_of + p.n_layers, i) > 0,
                      "pool " + std::to_string(i) + " has no layers");
    }
    for (int i = 0; i < p.n_layers; ++i) {
        refuse_unless(p.pool_of[i] >= 0 && p.pool_of[i] < p.n_pools,
                      "layer " + std::to_string(i) + " is in no pool: " + std::to_string(p.pool_of[i]));
    }
    const int64_t n = p.n_tokens * p.n_layers * p.n_used;
    for (int64_t i = 0; i < n; ++i) {
        refuse_unless(p.ids[i] >= -1 && p.ids[i] < p.n_expert, "expert " + std::to_string(p.ids[i]) + " is not in 0.." +
                                                                   std::to_string(p.n_expert - 1) +
                                                                   ", nor -1 for not recorded");
    }
}

// The distinct experts of one layer and token, in their order.
void read_step(const spo_replay_params & p, int64_t token, int layer, std::vector<int> & experts) {
    experts.clear();
    const int32_t * ids = p.ids + (token * p.n_layers + layer) * p.n_used;
    for (int i = 0; i < p.n_used; ++i) {
        if (ids[i] >= 0 && std::find(experts.begin(), experts.end(), ids[i]) == experts.end()) {
            experts.push_back(ids[i]);
        }
    }
}

// As engine::request() does it: what is resident is pinned before anything is brought.
spo_replay_counts run_engine(const spo_replay_params & p) {
    std::vector<int> members(p.n_pools, 0), pool_layer(p.n_layers);
    for (int layer = 0; layer < p.n_layers; ++layer) {
        pool_layer[layer] = members[p.pool_of[layer]]++;
    }
    std::vector<slot_table> tables;
    for (int i = 0; i < p.n_pools; ++i) {
        tables.emplace_back(p.pools[i], 0, members[i], p.n_expert,
                            make_policy(p.policy, members[i], p.n_expert, p.half_life));
    }
    spo_replay_counts counts{};
    std::vector<int>  wanted, missing, pinned;
    for (int64_t token = 0; token < p.n_tokens; ++token) {
        for (int layer = 0; layer < p.n_layers; ++layer) {
            slot_table & table = tables[p.pool_of[layer]];
            const int    pl    = pool_layer[layer];
            read_step(p, token, layer, wanted);
            missing.clear();
            pinned.clear();
            const auto pin = [&](int slot) {
                table.pin(slot);
                pinned.push_back(slot);
            };
            const auto unpin_all = [&] {
                std::for_each(pinned.begin(), pinned.end(), [&](int slot) { table.unpin(slot); });
                pinned.clear();
            };
            table.step(pl);
            for (const int expert : wanted) {
                table.use(pl, expert);
                const int slot = table.find(pl, expert);
                slot >= 0 ? pin(slot) : missing.push_back(expert);
            }
            table.settle(pl);
            for (const int expert : missing) {
                auto slot = table.claim(pl, expert, /*predicted*/ false);
                if (!slot) { // fewer slots than experts: those before have run
                    unpin_all();
                    slot = table.claim(pl, expert, /*predicted*/ false);
                }
                table.ready(*slot);
                pin(*slot);
            }
            unpin_all();
            if (token >= p.n_warm) {
                counts.requests += wanted.size();
                counts.hits += wanted.size() - missing.size();
                counts.uploads += missing.size();
            }
        }
    }
    return counts;
}

constexpr int64_t never = std::numeric_limits<int64_t>::max();

// The residents of one pool by their next use, latest on top. Entries of a past use stay below until
// there are many.
class soonest_kept {
public:
    soonest_kept(int n_slots, std::vector<int64_t> & next) : n_slots_(size_t(n_slots)), next_(next) {}

    // `key`, just used, is used again at `when`; keeps it or not. `resident` is by key.
    void use(int32_t key, int64_t when, std::vector<uint8_t> & resident) {
        if (resident[key] && next_[key] == when) {
            return; // as between warm uses, whose entries would pile up
        }
        next_[key] = when;
        if (!resident[key]) {
            if (n_kept_ == n_slots_) {
                drop_stale_top(resident);
                const auto [latest, leaving] = heap_.front();
                if (latest <= when) {
                    return; // used and not kept
                }
                resident[leaving] = 0;
                n_kept_ -= 1;
            }
            resident[key] = 1;
            n_kept_ += 1;
        }
        if (heap_.size() > 4 * n_slots_ + 64) {
            heap_.erase(std::remove_if(heap_.begin(), heap_.end(), [&](const entry & e) { return stale(e, resident); }),
                        heap_.end());
            std::make_heap(heap_.begin(), heap_.end());
        }
        heap_.emplace_back(when, key);
        std::push_heap(heap_.begin(), heap_.end());
    }

private:
    using entry = std::pair<int64_t, int32_t>; // next use, key

    bool stale(const entry & e, const std::vector<uint8_t> & resident) const {
        return !resident[e.second] || next_[e.second] != e.first;
    }

    void drop_stale_top(const std::vector<uint8_t> & resident) {
        while (stale(heap_.front(), resident)) {
            std::pop_heap(heap_.begin(), heap_.end());
            heap_.pop_back();
        }
    }

    size_t                 n_slots_;
    size_t                 n_kept_ = 0;
    std::vector<int64_t> & next_; // by key
    std::vector<entry>     heap_;
};

// Belady's MIN with bypass, a step's experts as one set: what is there when the step asks are its hits,
// then what is needed soonest stays, of the residents and the step's experts alike. Warm uses are worth
// nothing. So no policy that brings experts when they are asked for hits more of the counted tokens.
spo_replay_counts run_clairvoyant(const spo_replay_params & p) {
    const size_t         n_keys = size_t(p.n_layers) * p.n_expert, n_steps = size_t(p.n_tokens) * p.n_layers;
    const size_t         first_counted = size_t(p.n_warm) * p.n_layers; // step
    std::vector<int32_t> keys;                                          // of all requests, step after step
    std::vector<size_t>  begins{ 0 };                                   // of each step in `keys`, and the end
    std::vector<int>     experts;
    for (size_t step = 0; step < n_steps; ++step) {
        const int layer = int(step % p.n_layers);
        read_step(p, int64_t(step / p.n_layers), layer, experts);
        for (const int expert : experts) {
            keys.push_back(int32_t(layer * p.n_expert + expert));
        }
        begins.push_back(keys.size());
    }
    std::vector<int64_t> next(n_keys, never), again(keys.size()); // steps that count and use the key
    for (size_t step = n_steps; step-- > 0;) {
        for (size_t i = begins[step]; i < begins[step + 1]; ++i) {
            again[i]      = next[keys[i]];
            next[keys[i]] = step < first_counted ? again[i] : int64_t(step);
        }
    }
    std::vector<uint8_t>      resident(n_keys, 0);
    std::vector<soonest_kept> pools;
    for (int i = 0; i < p.n_pools; ++i) {
        pools.emplace_back(p.pools[i], next);
    }
    spo_replay_counts   counts{};
    std::vector<size_t> missing;
    for (size_t step = 0; step < n_steps; ++step) {
        soonest_kept & pool = pools[p.pool_of[step % p.n_layers]];
        missing.clear();
        for (size_t i = begins[step]; i < begins[step + 1]; ++i) {
            // Residents first: until they know their next use, they would seem needed right now.
            resident[keys[i]] ? pool.use(keys[i], again[i], resident) : missing.push_back(i);
        }
        for (const size_t i : missing) {
            pool.use(keys[i], again[i], resident);
        }
        if (step >= first_counted) {
            counts.requests += begins[step + 1] - begins[step];
            counts.uploads += missing.size();
        }
    }
    counts.hits = counts.requests - counts.uploads;
    return counts;
}

} // namespace

spo_replay_counts replay(const spo_replay_params & params) {
    validate(params);
    return params.policy == SPO_REPLAY_CLAIRVOYANT ? run_clairvoyant(params) : run_engine(params);
}

} // namespace spo
