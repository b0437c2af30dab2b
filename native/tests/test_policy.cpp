#include "check.h"
#include "policy.h"

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
