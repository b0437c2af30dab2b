#include "check.h"
#include "policy.h"

#include <initializer_list>
#include <random>

using namespace spo;

TEST(a_use_count_halves_after_its_half_life) {
    decayed_policy policy(1, 2, 4);
    policy.step(0);
    policy.use(0, 1);
    const double fresh = policy.worth(0, 1);
    for (int i = 0; i < 4; ++i) {
        policy.step(0);
    }
    CHECK(fresh == 1);
    CHECK(policy.worth(0, 1) > 0.499 && policy.worth(0, 1) < 0.501);
    CHECK(policy.worth(0, 0) == 0);
}

TEST(time_passes_only_for_the_layer_that_steps) {
    decayed_policy policy(2, 1, 1);
    policy.step(0);
    policy.use(0, 0);
    policy.step(1);
    policy.step(1);
    CHECK(policy.worth(0, 0) == 1);
}

TEST(the_last_use_counts_for_lru_alone) {
    lru_policy policy(1, 3);
    for (const int expert : { 0, 0, 0, 1 }) {
        policy.step(0);
        policy.use(0, expert);
    }
    CHECK(policy.worth(0, 1) > policy.worth(0, 0));
    CHECK(policy.worth(0, 0) > policy.worth(0, 2));
}

static void decode(policy & of, int layer, std::initializer_list<int> experts) {
    of.step(layer);
    for (const int expert : experts) {
        of.use(layer, expert);
    }
    of.settle(layer);
}

TEST(before_anything_is_learned_the_rate_of_use_decides) {
    learned_policy policy(1, 4, 16);
    decode(policy, 0, { 0, 1 });
    decode(policy, 0, { 0, 2 });
    CHECK(policy.worth(0, 0) > policy.worth(0, 2));
    CHECK(policy.worth(0, 2) > policy.worth(0, 1));
    CHECK(policy.worth(0, 1) > policy.worth(0, 3));
    CHECK(policy.worth(0, 3) == 0);
}

TEST(an_expert_that_follows_is_worth_more_than_one_as_frequent) {
    learned_policy policy(1, 4, 16);
    for (int i = 0; i < 100; ++i) { // 0, 1, 2, 3, 0, ...
        decode(policy, 0, { i % 4 });
    }
    decode(policy, 0, { 0 });
    CHECK(policy.worth(0, 1) > policy.worth(0, 2));
    CHECK(policy.worth(0, 2) > policy.worth(0, 3));
}

TEST(layers_before_speak_for_those_after_them) {
    // What layer 0 picks is what layer 1 picks one token later, after 0 or 1 as chance has it.
    const auto train = [](learned_policy & policy) {
        std::mt19937 random(3);
        int          picked = 0;
        for (int i = 0; i < 1000; ++i) {
            const int before = picked;
            picked           = int(random() % 2);
            decode(policy, 0, { picked });
            decode(policy, 1, { before });
        }
    };
    for (const int expert : { 0, 1 }) {
        learned_policy policy(2, 2, 16);
        train(policy);
        decode(policy, 0, { expert });
        decode(policy, 1, { 1 - expert });
        CHECK(policy.worth(1, expert) > policy.worth(1, 1 - expert));
    }
}

TEST(what_is_learned_stays_within_the_worth_of_constant_use) {
    std::mt19937 random(5);
    for (int round = 0; round < 20; ++round) {
        const int      n_layers = 1 + int(random() % 4), n_expert = 2 + int(random() % 30);
        learned_policy policy(n_layers, n_expert, 1 + int(random() % 64));
        for (int i = 0; i < 2000; ++i) {
            const int layer = i % n_layers;
            policy.step(layer);
            for (int e = int(random() % 2); e < n_expert; e += 1 + int(random() % n_expert)) {
                policy.use(layer, e);
            }
            policy.settle(layer);
            for (int e = 0; e < n_expert; ++e) {
                const double worth = policy.worth(layer, e);
                CHECK(worth >= 0 && worth <= 10); // used in every step from now on: 1 / (1 - 0.8) = 5
            }
        }
    }
}
