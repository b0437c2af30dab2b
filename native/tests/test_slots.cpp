#include "check.h"
#include "slots.h"
#include "speculoe/speculoe.h"

#include <algorithm>
#include <random>

using namespace spo;

static slot_table table(int n_slots, int n_layers, int n_expert, int policy = SPO_POLICY_LRU, int probation = 1) {
    return slot_table(n_slots, probation, n_layers, n_expert, make_policy(policy, n_layers, n_expert, 16));
}

static int bring(slot_table & t, int layer, int expert, bool predicted = false) {
    const int slot = t.claim(layer, expert, predicted).value();
    t.ready(slot);
    return slot;
}

TEST(empty_slots_are_taken_before_anyone_leaves) {
    slot_table t = table(2, 1, 4);
    CHECK(bring(t, 0, 0) != bring(t, 0, 1));
    CHECK(t.find(0, 0) >= 0 && t.find(0, 1) >= 0 && !t.has_empty());
}

TEST(the_least_recently_used_leaves) {
    slot_table t = table(2, 1, 4);
    bring(t, 0, 0);
    bring(t, 0, 1);
    t.step(0);
    t.use(0, 1);
    t.step(0);
    t.use(0, 0);
    bring(t, 0, 2);
    CHECK(t.find(0, 1) < 0 && t.find(0, 0) >= 0);
}

TEST(pinned_and_loading_slots_never_leave) {
    slot_table t = table(2, 1, 4);
    t.pin(bring(t, 0, 0));
    CHECK(t.claim(0, 1, false).has_value()); // loading
    CHECK(!t.claim(0, 2, false).has_value());
    t.unpin(t.find(0, 0));
    CHECK(t.claim(0, 2, false).has_value() && t.find(0, 0) < 0);
}

TEST(predictions_displace_each_other_once_probation_is_full) {
    slot_table t = table(3, 1, 8, SPO_POLICY_LRU, /*probation*/ 1);
    for (const int expert : { 0, 1, 2 }) {
        bring(t, 0, expert);
        t.step(0);
        t.use(0, expert);
    }
    bring(t, 0, 3, /*predicted*/ true);
    CHECK(t.predicted() == 1 && t.find(0, 0) < 0); // the least worthy made room for the first
    CHECK(!t.claim(0, 4, true).has_value());       // its step is still to come
    t.judged(0, 3);
    bring(t, 0, 4, true);
    CHECK(t.find(0, 3) < 0 && t.find(0, 1) >= 0 && t.find(0, 2) >= 0);
    t.pin(t.find(0, 4));
    CHECK(!t.claim(0, 5, true).has_value());
    t.unpin(t.find(0, 4));
    t.judged(0, 4);
    t.use(0, 4); // now it is as warm as any other
    CHECK(t.predicted() == 0 && t.claim(0, 5, true).has_value());
}

TEST(what_is_awaited_leaves_only_when_nothing_else_can) {
    slot_table t = table(3, 1, 8, SPO_POLICY_LRU, /*probation*/ 2);
    for (const int expert : { 0, 1, 2 }) {
        bring(t, 0, expert);
        t.step(0);
        t.use(0, expert);
    }
    bring(t, 0, 3, /*predicted*/ true); // never used, so the least worthy of all
    bring(t, 0, 4);
    CHECK(t.find(0, 3) >= 0 && t.find(0, 1) < 0);
    t.pin(t.find(0, 2));
    t.pin(t.find(0, 4));
    CHECK(!t.claim(0, 5, true).has_value());
    CHECK(t.claim(0, 5, false).has_value() && t.find(0, 3) < 0);
    t.abandon(t.find(0, 5));
    bring(t, 0, 6, true);
    t.unpin(t.find(0, 4));
    t.judged(0, 6); // wrong
    bring(t, 0, 7);
    CHECK(t.find(0, 6) < 0 && t.find(0, 4) >= 0 && t.check().empty());
}

TEST(an_abandoned_upload_leaves_no_trace) {
    slot_table t = table(1, 1, 2);
    t.abandon(t.claim(0, 1, true).value());
    CHECK(t.find(0, 1) < 0 && t.has_empty() && t.predicted() == 0 && t.check().empty());
}

TEST(a_shared_pool_smaller_than_one_token_keeps_the_hot_experts) {
    // 4 layers x k = 2 want 8 slots; there are 6. One expert of each layer is asked for by every token.
    // LRU, swept by each token, hits nothing; use counts keep what is hot.
    for (const int policy : { SPO_POLICY_LRU, SPO_POLICY_DECAYED }) {
        slot_table   t = table(6, 4, 16, policy);
        std::mt19937 random(1);
        int          hits = 0;
        for (int token = 0; token < 200; ++token) {
            for (int layer = 0; layer < 4; ++layer) {
                t.step(layer);
                const int wanted[] = { 0, 1 + int(random() % 15) };
                for (const int expert : wanted) {
                    hits += token >= 100 && t.find(layer, expert) >= 0;
                    t.use(layer, expert);
                    if (t.find(layer, expert) >= 0) {
                        t.pin(t.find(layer, expert));
                    }
                }
                for (const int expert : wanted) {
                    if (t.find(layer, expert) < 0) {
                        t.pin(bring(t, layer, expert));
                    }
                }
                for (const int expert : wanted) {
                    t.unpin(t.find(layer, expert));
                }
            }
        }
        CHECK(policy == SPO_POLICY_LRU ? hits < 40 : hits >= 400); // of 800; 400 are the hot ones
    }
}

TEST(any_sequence_of_calls_keeps_the_invariants) {
    std::mt19937 random(7);
    for (int round = 0; round < 50; ++round) {
        const int  n_slots = 1 + int(random() % 6), n_layers = 1 + int(random() % 3), n_expert = 1 + int(random() % 8);
        slot_table t = table(n_slots, n_layers, n_expert, int(random() % 3));
        std::vector<int> pinned;
        for (int i = 0; i < 400; ++i) {
            const int layer = int(random() % n_layers), expert = int(random() % n_expert);
            const int slot = t.find(layer, expert);
            switch (random() % 5) {
                case 0:
                    t.step(layer);
                    t.use(layer, expert);
                    t.settle(layer);
                    break;
                case 1:
                    if (slot < 0) {
                        t.claim(layer, expert, random() % 2 == 0);
                    }
                    break;
                case 2:
                    if (slot >= 0 && t.at(slot).state == slot_state::loading) {
                        random() % 4 ? t.ready(slot) : t.abandon(slot);
                        if (t.at(slot).state == slot_state::empty) {
                            pinned.erase(std::remove(pinned.begin(), pinned.end(), slot), pinned.end());
                        }
                    }
                    break;
                case 3:
                    if (slot >= 0) {
                        t.pin(slot);
                        pinned.push_back(slot);
                    }
                    break;
                default:
                    if (!pinned.empty()) {
                        t.unpin(pinned.back());
                        pinned.pop_back();
                    }
                    break;
            }
            CHECK(t.check() == "");
            for (const int p : pinned) {
                CHECK(t.at(p).state != slot_state::empty);
            }
        }
    }
}
