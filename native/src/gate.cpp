#include "gate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace spo {

namespace {

// A float sum has an order, which the compiler may not change: sixteen partial sums let it use
// vectors, and four rows at a time read the input once.
constexpr int n_lanes = 16;
constexpr int n_rows  = 4;

float sum(const float * lanes) {
    float total = 0;
    for (int i = 0; i < n_lanes; ++i) {
        total += lanes[i];
    }
    return total;
}

template <int rows>
void dot_rows(const float * weights, const float * x, int n, float * out) {
    float lanes[rows][n_lanes] = {};
    int   i                    = 0;
    for (; i + n_lanes <= n; i += n_lanes) {
        for (int r = 0; r < rows; ++r) {
            const float * w = weights + size_t(r) * n + i;
            for (int j = 0; j < n_lanes; ++j) {
                lanes[r][j] += w[j] * x[i + j];
            }
        }
    }
    for (int r = 0; r < rows; ++r) {
        out[r] = sum(lanes[r]);
        for (int j = i; j < n; ++j) {
            out[r] += weights[size_t(r) * n + j] * x[j];
        }
    }
}

// out[rows] = weights[rows][n] times x, plus bias[rows] if there is one.
void product(const float * weights, const float * bias, const float * x, int rows, int n, float * out) {
    int r = 0;
    for (; r + n_rows <= rows; r += n_rows) {
        dot_rows<n_rows>(weights + size_t(r) * n, x, n, out + r);
    }
    for (; r < rows; ++r) {
        dot_rows<1>(weights + size_t(r) * n, x, n, out + r);
    }
    for (r = 0; bias && r < rows; ++r) {
        out[r] += bias[r];
    }
}

// In double, as ggml sums it.
double sum_of_squares(const float * x, int n) {
    double lanes[n_lanes] = {};
    int    i              = 0;
    for (; i + n_lanes <= n; i += n_lanes) {
        for (int j = 0; j < n_lanes; ++j) {
            lanes[j] += double(x[i + j] * x[i + j]);
        }
    }
    for (int j = i; j < n; ++j) {
        lanes[j - i] += double(x[j] * x[j]);
    }
    return std::accumulate(lanes, lanes + n_lanes, 0.0);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// As ggml has it: exact for large x, and 0 where exp(x) vanishes beside 1.
float softplus(float x) { return x > 20.0f ? x : std::log(1.0f + std::exp(x)); }

// Softmax of n values in place.
void softmax(float * values, int n) {
    const float top   = *std::max_element(values, values + n);
    float       total = 0;
    for (int i = 0; i < n; ++i) {
        values[i] = std::exp(values[i] - top);
        total += values[i];
    }
    for (int i = 0; i < n; ++i) {
        values[i] /= total;
    }
}

void need(bool fits, const char * line) {
    if (!fits) {
        throw std::invalid_argument(line);
    }
}

bool finite(const float * values, int n) {
    return !values || std::all_of(values, values + n, [](float v) { return std::isfinite(v); });
}

} // namespace

gate::gate(const spo_gate_params & params) : p_(params), mlp_(params.mlp ? *params.mlp : spo_gate_mlp{}) {
    need(p_.router && p_.norm, "a gate has no router or no norm; both are needed");
    need(p_.n_embd >= 1 && p_.n_expert >= 1, "a gate has no experts or no input; one of each is needed");
    need(1 <= p_.n_used && p_.n_used <= p_.n_ids && p_.n_ids <= p_.n_expert,
         "a gate's counts must be 1 <= n_used <= n_ids <= n_expert");
    need(SPO_GATING_SOFTMAX <= p_.gating && p_.gating <= SPO_GATING_SQRT_SOFTPLUS, "a gate's gating is unknown");
    need(SPO_SELECT_PROBS <= p_.selection && p_.selection <= SPO_SELECT_SIGMOID, "a gate's selection is unknown");
    need(p_.n_groups >= 0, "a gate's groups are fewer than none");
    if (p_.n_groups > 1) {
        need(p_.n_expert % p_.n_groups == 0 && p_.n_expert / p_.n_groups >= 2,
             "a gate's groups must be equal, with two experts at least");
        need(1 <= p_.n_groups_used && p_.n_groups_used < p_.n_groups, "a gate must use some but not all groups");
        group_worth_.resize(size_t(p_.n_groups));
        group_order_.resize(size_t(p_.n_groups));
    }
    need(finite(p_.bias, p_.n_expert) && finite(p_.selection_bias, p_.n_expert), "a gate's bias is not finite");
    if (p_.mlp) {
        need(mlp_.width >= 1 && mlp_.hidden >= 1, "a gate's network has no width or no hidden one; both are needed");
        for (const float * part : { mlp_.narrow, mlp_.embedding, mlp_.expand, mlp_.expand_bias, mlp_.contract,
                                    mlp_.contract_bias, mlp_.norm, mlp_.norm_bias, mlp_.head, mlp_.head_bias }) {
            need(part, "a gate's network lacks an array; all are needed");
        }
        state_.resize(size_t(mlp_.width));
        change_.resize(size_t(mlp_.width));
        hidden_.resize(size_t(mlp_.hidden));
    }
    input_.resize(size_t(p_.n_embd));
    logits_.resize(size_t(p_.n_expert));
    probs_.resize(size_t(p_.n_expert));
    scores_.resize(size_t(p_.n_expert));
    order_.resize(size_t(p_.n_expert));
}

bool gate::route(const float * residual, const float * add, int32_t * ids, float * weights, float * probs) {
    if (!logits(residual, add)) {
        return false;
    }
    gate_logits();
    score();
    rank(order_.data(), scores_.data(), p_.n_expert);
    std::copy_n(order_.begin(), p_.n_ids, ids);

    const bool after = p_.gating == SPO_GATING_SOFTMAX_WEIGHT;
    for (int i = 0; i < p_.n_used; ++i) {
        weights[i] = (after ? logits_ : probs_)[order_[i]];
    }
    if (after) {
        softmax(weights, p_.n_used);
    }
    float factor = p_.scale != 0.0f ? p_.scale : 1.0f;
    if (p_.norm_weights) {
        // The smallest normal number of a half, as in llama.cpp: all weights may be 0.
        factor /= std::max(std::accumulate(weights, weights + p_.n_used, 0.0f), 6.103515625e-5f);
    }
    for (int i = 0; i < p_.n_used; ++i) {
        weights[i] *= factor;
    }
    if (probs) {
        std::copy(probs_.begin(), probs_.end(), probs);
    }
    return true;
}

// Router(RMSNorm(residual + add)); false if one is not finite, for what follows sorts them.
bool gate::logits(const float * residual, const float * add) {
    for (int i = 0; i < p_.n_embd; ++i) {
        input_[i] = residual[i] + (add ? add[i] : 0.0f);
    }
    const double squares = sum_of_squares(input_.data(), p_.n_embd);
    const float  scale   = 1.0f / std::sqrt(float(squares / p_.n_embd) + p_.eps);
    for (int i = 0; i < p_.n_embd; ++i) {
        input_[i] = input_[i] * scale * p_.norm[i] + (p_.norm_bias ? p_.norm_bias[i] : 0.0f);
    }
    if (!p_.mlp || mlp_.adds) {
        product(p_.router, p_.bias, input_.data(), p_.n_expert, p_.n_embd, logits_.data());
    } else if (p_.bias) {
        std::copy_n(p_.bias, p_.n_expert, logits_.begin());
    } else {
        std::fill(logits_.begin(), logits_.end(), 0.0f);
    }
    if (p_.mlp) {
        add_network();
    }
    return finite(logits_.data(), p_.n_expert);
}

// What the network says of the input; runtime/mlp.py is the same thing to read.
void gate::add_network() {
    const int w = mlp_.width;
    product(mlp_.narrow, mlp_.embedding, input_.data(), w, p_.n_embd, state_.data());
    product(mlp_.expand, mlp_.expand_bias, state_.data(), mlp_.hidden, w, hidden_.data());
    for (float & value : hidden_) {
        value *= sigmoid(value);
    }
    product(mlp_.contract, mlp_.contract_bias, hidden_.data(), w, mlp_.hidden, change_.data());
    for (int i = 0; i < w; ++i) {
        state_[i] += change_[i];
    }
    const float mean = float(std::accumulate(state_.begin(), state_.end(), 0.0) / w);
    for (float & value : state_) {
        value -= mean;
    }
    const float scale = 1.0f / std::sqrt(float(sum_of_squares(state_.data(), w) / w) + SPO_MLP_EPS);
    for (int i = 0; i < w; ++i) {
        state_[i] = state_[i] * scale * mlp_.norm[i] + mlp_.norm_bias[i];
    }
    product(mlp_.head, mlp_.head_bias, state_.data(), p_.n_expert, w, scores_.data());
    for (int e = 0; e < p_.n_expert; ++e) {
        logits_[e] += mlp_.scale * scores_[e];
    }
}

void gate::gate_logits() {
    if (p_.gating == SPO_GATING_SOFTMAX || p_.gating == SPO_GATING_SOFTMAX_WEIGHT) {
        probs_ = logits_;
        softmax(probs_.data(), p_.n_expert);
        return;
    }
    for (int e = 0; e < p_.n_expert; ++e) {
        probs_[e] = p_.gating == SPO_GATING_SIGMOID ? sigmoid(logits_[e]) : std::sqrt(softplus(logits_[e]));
    }
}

// What experts are ranked by.
void gate::score() {
    const bool raw = p_.selection == SPO_SELECT_LOGITS || p_.gating == SPO_GATING_SOFTMAX_WEIGHT;
    for (int e = 0; e < p_.n_expert; ++e) {
        scores_[e] = p_.selection == SPO_SELECT_SIGMOID ? sigmoid(logits_[e]) : raw ? logits_[e] : probs_[e];
        if (p_.selection == SPO_SELECT_PROBS && p_.selection_bias) {
            scores_[e] += p_.selection_bias[e];
        }
    }
    if (p_.n_groups > 1) {
        keep_best_groups();
    }
}

// A group is worth its two best experts; those of the others fall to -inf.
void gate::keep_best_groups() {
    const int size = p_.n_expert / p_.n_groups;
    for (int g = 0; g < p_.n_groups; ++g) {
        const float * of    = &scores_[size_t(g) * size];
        float         first = std::max(of[0], of[1]), second = std::min(of[0], of[1]);
        for (int i = 2; i < size; ++i) {
            second = std::max(second, std::min(first, of[i]));
            first  = std::max(first, of[i]);
        }
        group_worth_[g] = first + second;
    }
    rank(group_order_.data(), group_worth_.data(), p_.n_groups);
    for (int i = p_.n_groups_used; i < p_.n_groups; ++i) {
        std::fill_n(&scores_[size_t(group_order_[i]) * size], size, -std::numeric_limits<float>::infinity());
    }
}

// Best first. The same sort and comparison as ggml's argsort, so that ties fall as they do there.
void gate::rank(int32_t * ids, const float * scores, int n) {
    std::iota(ids, ids + n, 0);
    std::sort(ids, ids + n, [scores](int32_t a, int32_t b) { return scores[a] > scores[b]; });
}

} // namespace spo
