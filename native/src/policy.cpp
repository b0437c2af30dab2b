#include "policy.h"

#include "speculoe/speculoe.h"

#include <cmath>

namespace spo {

lru_policy::lru_policy(int n_layers, int n_expert) : n_expert_(n_expert), last_(size_t(n_layers) * n_expert, 0.0) {}

void lru_policy::step(int) { now_ += 1; }

void lru_policy::use(int layer, int expert) { last_[size_t(layer) * n_expert_ + expert] = now_; }

double lru_policy::worth(int layer, int expert) const { return last_[size_t(layer) * n_expert_ + expert]; }

decayed_policy::decayed_policy(int n_layers, int n_expert, double half_life) :
    n_expert_(n_expert),
    decay_(std::log(2.0) / half_life),
    steps_(size_t(n_layers), 0),
    counts_(size_t(n_layers) * n_expert) {}

void decayed_policy::step(int layer) { steps_[layer] += 1; }

void decayed_policy::use(int layer, int expert) {
    count & c = counts_[size_t(layer) * n_expert_ + expert];
    c.value   = worth(layer, expert) + 1;
    c.at      = steps_[layer];
}

double decayed_policy::worth(int layer, int expert) const {
    const count & c = counts_[size_t(layer) * n_expert_ + expert];
    return c.value * std::exp(-decay_ * double(steps_[layer] - c.at));
}

std::unique_ptr<policy> make_policy(int kind, int n_layers, int n_expert, double half_life) {
    if (kind == SPO_POLICY_LRU) {
        return std::make_unique<lru_policy>(n_layers, n_expert);
    }
    return std::make_unique<decayed_policy>(n_layers, n_expert, half_life);
}

} // namespace spo
