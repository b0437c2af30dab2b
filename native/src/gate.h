// One layer's router: which experts a residual leads to, with what weights.
#pragma once

#include "speculoe/speculoe.h"

#include <cstdint>
#include <vector>

namespace spo {

// One thread at a time: scratch memory is kept, so that a route allocates nothing. The arrays of the
// parameters are borrowed; runtime/gate.py is the same thing to read.
class gate {
public:
    explicit gate(const spo_gate_params & params); // throws std::invalid_argument

    // False, and nothing written, if a logit is not finite.
    bool route(const float * residual, const float * add, int32_t * ids, float * weights, float * probs);

private:
    bool logits(const float * residual, const float * add);
    void add_network();
    void gate_logits();
    void score();
    void keep_best_groups();
    void rank(int32_t * ids, const float * scores, int n);

    const spo_gate_params p_;
    const spo_gate_mlp    mlp_;    // all null without one
    std::vector<float>    input_;  // [n_embd] normed
    std::vector<float>    state_;  // [width] of the network
    std::vector<float>    change_; // [width]
    std::vector<float>    hidden_; // [hidden]
    std::vector<float>    logits_; // [n_expert]
    std::vector<float>    probs_;
    std::vector<float>    scores_;
    std::vector<int32_t>  order_;
    std::vector<float>    group_worth_; // [n_groups]
    std::vector<int32_t>  group_order_;
};

} // namespace spo
