#include "check.h"
#include "replay.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

using namespace spo;

// One expert per layer and token unless n_used says otherwise; nothing is warm.
static spo_replay_params trace(const std::vector<int32_t> & ids, int n_layers, int n_used, int n_expert,
                               const std::vector<int32_t> & pool_of, const std::vector<int32_t> & pools, int policy) {
    spo_replay_params p{};
    p.ids       = ids.data();
    p.pool_of   = pool_of.data();
    p.pools     = pools.data();
    p.n_tokens  = int64_t(ids.size()) / n_layers / n_used;
    p.n_layers  = n_layers;
    p.n_used    = n_used;
    p.n_expert  = n_expert;
    p.n_pools   = int32_t(pools.size());
    p.policy    = policy;
    p.half_life = 16;
    return p;
}

static const std::vector<int32_t> one_layer = { 0 };

TEST(a_hit_is_an_expert_that_was_there_before) {
    const std::vector<int32_t> ids = { 0, 1, 0, 2, 0, 1 }, slots = { 2 };
    const spo_replay_counts    c = replay(trace(ids, 1, 1, 3, one_layer, slots, SPO_POLICY_LRU));
    CHECK(c.requests == 6 && c.hits == 2 && c.uploads == 4); // 2 takes the place of 1
}

TEST(warm_tokens_fill_slots_and_do_not_count) {
    const std::vector<int32_t> ids = { 0, 1, 0, 2, 0, 1 }, slots = { 2 };
    spo_replay_params          p = trace(ids, 1, 1, 3, one_layer, slots, SPO_POLICY_LRU);
    p.n_warm                     = 2;
    const spo_replay_counts c    = replay(p);
    CHECK(c.requests == 4 && c.hits == 2);
}

TEST(the_clairvoyant_keeps_what_is_needed_soonest) {
    const std::vector<int32_t> ids = { 0, 1, 2, 0, 1, 2, 0, 1, 2 }, slots = { 2 };
    CHECK(replay(trace(ids, 1, 1, 3, one_layer, slots, SPO_POLICY_LRU)).hits == 0);
    CHECK(replay(trace(ids, 1, 1, 3, one_layer, slots, SPO_REPLAY_CLAIRVOYANT)).hits == 4);
}

TEST(the_clairvoyant_takes_the_experts_of_a_step_as_one_set) {
    // 0 is still there when the second step asks, and 1 stays after it, whichever is named first.
    for (const auto & ids : { std::vector<int32_t>{ 0, -1, 1, 0, 1, -1 }, { 0, -1, 0, 1, 1, -1 } }) {
        const std::vector<int32_t> slots = { 1 };
        CHECK(replay(trace(ids, 1, 2, 2, one_layer, slots, SPO_REPLAY_CLAIRVOYANT)).hits == 2);
    }
}

TEST(the_clairvoyant_keeps_nothing_for_warm_tokens) {
    const std::vector<int32_t> ids = { 0, 1, 1, 1, 0 }, slots = { 1 };
    spo_replay_params          p = trace(ids, 1, 1, 2, one_layer, slots, SPO_REPLAY_CLAIRVOYANT);
    CHECK(replay(p).hits == 2); // of 1
    p.n_warm = 4;
    CHECK(replay(p).hits == 1); // of 0
}

TEST(a_cycle_too_long_for_lru_is_learned) {
    std::vector<int32_t> ids;
    for (int i = 0; i < 400; ++i) {
        ids.push_back(i % 4);
    }
    const std::vector<int32_t> slots = { 3 };
    spo_replay_params          p     = trace(ids, 1, 1, 4, one_layer, slots, SPO_POLICY_LRU);
    p.n_warm                         = 200;
    CHECK(replay(p).hits == 0);
    p.policy = SPO_POLICY_LEARNED;
    CHECK(replay(p).hits >= 120); // the clairvoyant gets 133 of 200
}

TEST(unrecorded_and_repeated_experts_are_not_asked_for) {
    const std::vector<int32_t> ids = { 1, 1, -1, 1, 1, -1, 1, 2, 2 }, slots = { 3 };
    const spo_replay_counts    c = replay(trace(ids, 1, 3, 3, one_layer, slots, SPO_POLICY_LRU));
    CHECK(c.requests == 4 && c.hits == 2);
}

TEST(fewer_slots_than_experts_run_them_in_turn) {
    const std::vector<int32_t> ids = { 0, 1, 2, 2, 1, 0 }, slots = { 2 };
    for (const int policy : { SPO_POLICY_LRU, SPO_POLICY_DECAYED, SPO_POLICY_LEARNED }) {
        const spo_replay_counts c = replay(trace(ids, 1, 3, 3, one_layer, slots, policy));
        CHECK(c.requests == 6 && c.hits == 2);
    }
}

TEST(a_layer_keeps_to_its_pool) {
    // Layer 1 would sweep a slot that it shared with layer 0.
    const std::vector<int32_t> ids = { 0, 0, 0, 1, 0, 2, 0, 3 }, pool_of = { 0, 1 }, slots = { 1, 1 };
    CHECK(replay(trace(ids, 2, 1, 4, pool_of, slots, SPO_POLICY_LRU)).hits == 3);
    const std::vector<int32_t> together = { 0, 0 }, one = { 1 };
    CHECK(replay(trace(ids, 2, 1, 4, together, one, SPO_POLICY_LRU)).hits == 0);
}

TEST(no_policy_beats_the_clairvoyant) {
    std::mt19937 random(11);
    for (int round = 0; round < 300; ++round) {
        const int            n_layers = 1 + int(random() % 3), n_expert = 2 + int(random() % 7);
        const int            n_used = 1 + int(random() % 3), n_tokens = 1 + int(random() % 60);
        const int            n_warm = int(random() % n_tokens);
        std::vector<int32_t> ids(size_t(n_tokens) * n_layers * n_used);
        for (int32_t & id : ids) {
            id = int32_t(std::min(random() % n_expert, random() % n_expert));
        }
        const bool           shared = random() % 2 == 0;
        std::vector<int32_t> pool_of(n_layers, 0), pools(shared ? 1 : n_layers);
        for (int i = 0; !shared && i < n_layers; ++i) {
            pool_of[i] = i;
        }
        for (int32_t & slots : pools) {
            slots = 1 + int32_t(random() % (n_expert + 2));
        }
        spo_replay_params p = trace(ids, n_layers, n_used, n_expert, pool_of, pools, SPO_REPLAY_CLAIRVOYANT);
        p.n_warm            = n_warm;
        const auto bound    = replay(p);
        for (const int policy : { SPO_POLICY_LRU, SPO_POLICY_DECAYED, SPO_POLICY_LEARNED }) {
            p.policy     = policy;
            const auto c = replay(p);
            CHECK(c.requests == bound.requests && c.hits <= bound.hits && c.hits + c.uploads == c.requests);
        }
    }
}

TEST(contradictions_are_refused) {
    const std::vector<int32_t> ids = { 0, 1 }, slots = { 1 };
    const auto                 good    = trace(ids, 1, 1, 2, one_layer, slots, SPO_POLICY_LRU);
    const auto                 refused = [](const spo_replay_params & p) {
        try {
            replay(p);
            return false;
        } catch (const std::invalid_argument & e) {
            return std::string(e.what()).size() > 10;
        }
    };
    CHECK(!refused(good));
    spo_replay_params bad = good;
    bad.n_expert          = 1; // expert 1
    CHECK(refused(bad));
    bad        = good;
    bad.n_warm = 2;
    CHECK(refused(bad));
    bad        = good;
    bad.policy = 3;
    CHECK(refused(bad));
    bad     = good;
    bad.ids = nullptr;
    CHECK(refused(bad));
    const std::vector<int32_t> elsewhere = { 1 }, none = { 0 }, two = { 1, 1 };
    bad         = good;
    bad.pool_of = elsewhere.data();
    CHECK(refused(bad));
    bad       = good;
    bad.pools = none.data();
    CHECK(refused(bad));
    bad         = good;
    bad.pools   = two.data();
    bad.n_pools = 2;
    CHECK(refused(bad));
}
