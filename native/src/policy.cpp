#include "policy.h"

#include "speculoe/speculoe.h"

#include <algorithm>
#include <cmath>

namespace spo {

namespace {

// Of learned_policy. Found on routing traces of two models, where half or double the share or the pace
// costs at most 0.8 points of hit rate, and a future of 0.7 or 0.9 at most 1.3.
constexpr float future    = 0.8f; // worth of a use one step later
constexpr float own_share = 2.0f; // value of a rate of 1 before anything is learned
constexpr float pace      = 0.1f; // share of the error that a step corrects
// Value of a use by the last step, before anything is learned: routers repeat themselves. Without it a
// pool of many layers takes some hundred tokens to learn that. 0.1 to 0.4 differ by at most 2 points.
constexpr float repeated = 0.25f;
// Bounds memory to n_expert^2 or this many floats per layer, and time with it: many small routers
// speak to each other, one of 256 experts only to itself.
constexpr int most_weights = 1 << 16;

} // namespace

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

learned_policy::learned_policy(int n_layers, int n_expert, double half_life) :
    n_expert_(n_expert),
    reach_(std::clamp(int(most_weights / (int64_t(n_expert) * n_expert)), 1, n_layers)),
    decay_(float(std::exp2(-1 / half_life))),
    layers_(size_t(n_layers)),
    value_(size_t(n_expert)),
    error_(size_t(n_expert)) {
    for (layer_state & state : layers_) {
        state.rates.resize(n_expert);
        state.value.resize(n_expert);
        state.rows.resize(size_t(reach_) * n_expert * n_expert);
        for (int e = 0; e < n_expert; ++e) { // distance 0
            state.rows[size_t(e) * n_expert + e] = repeated;
        }
    }
}

void learned_policy::step(int layer) {
    layer_state & state = layers_[layer];
    state.used.clear();
    for (float & rate : state.rates) {
        rate *= decay_;
    }
}

void learned_policy::use(int layer, int expert) {
    layers_[layer].used.push_back(expert);
    layers_[layer].rates[expert] += 1 - decay_;
}

void learned_policy::gather(int layer) {
    context_.clear();
    for (int distance = 0; distance < reach_; ++distance) {
        const int before = (layer - distance + int(layers_.size())) % int(layers_.size());
        for (const int expert : layers_[before].used) {
            context_.push_back(distance * n_expert_ + expert);
        }
    }
}

void learned_policy::evaluate(const layer_state & of, std::vector<float> & value) const {
    for (int e = 0; e < n_expert_; ++e) {
        value[e] = own_share * of.rates[e];
    }
    for (const int row : context_) {
        const float * weights = &of.rows[size_t(row) * n_expert_];
        for (int e = 0; e < n_expert_; ++e) {
            value[e] += weights[e];
        }
    }
}

void learned_policy::settle(int layer) {
    layer_state & state = layers_[layer];
    gather(layer);
    evaluate(state, value_);
    // What the last step believed, against what came plus what is believed now.
    for (int e = 0; e < n_expert_; ++e) {
        error_[e] = future * value_[e] - state.value[e];
    }
    for (const int expert : state.used) {
        error_[expert] += 1;
    }
    const float share = pace / float(1 + state.context.size());
    for (const int row : state.context) {
        float * weights = &state.rows[size_t(row) * n_expert_];
        for (int e = 0; e < n_expert_; ++e) {
            weights[e] += share * error_[e];
        }
    }
    std::swap(state.value, value_);
    std::swap(state.context, context_);
}

// Of an expert long unused the rows know little, and their noise would decide: it is worth its rate.
double learned_policy::worth(int layer, int expert) const {
    const layer_state & state = layers_[layer];
    return std::max(state.value[expert], state.rates[expert]);
}

std::unique_ptr<policy> make_policy(int kind, int n_layers, int n_expert, double half_life) {
    if (kind == SPO_POLICY_LEARNED) {
        return std::make_unique<learned_policy>(n_layers, n_expert, half_life);
    }
    if (kind == SPO_POLICY_LRU) {
        return std::make_unique<lru_policy>(n_layers, n_expert);
    }
    return std::make_unique<decayed_policy>(n_layers, n_expert, half_life);
}

} // namespace spo
