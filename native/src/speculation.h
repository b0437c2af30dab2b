// Decode steps that execute predictions instead of what the router would choose. Predictions are made on
// the compute thread, between a layer's router and its experts, so that answers never depend on timing.
#pragma once

#include "predictor.h"

#include <unordered_map>
#include <vector>

namespace spo {

class speculation {
public:
    // Room for n_tokens decoded together. Throws std::invalid_argument.
    speculation(const spo_loop_layer * layers, int n, int n_embd, int n_tokens, bool true_weights);

    // Predicted ids take the weights that the true router gives them.
    bool true_weights() const { return true_weights_; }
    int  n_embd() const { return n_embd_; }

    // While a graph is built, layer by layer: whether this one shows the residual to predict from ...
    void shows(int block, bool residual);
    // ... and so whether a layer of n_used experts per token executes a prediction.
    bool covers(int block, int64_t n_used, int64_t n_tokens) const;

    // The block that a tap of `source` predicts, or -1.
    int target(int source) const;
    // One token's prediction; see predictor::route.
    bool predict(int source, int64_t token, const float * residual, const float * shared, const int32_t * ids,
                 const float * weights, int n_used);

    // Of the newest prediction for a block, [n_tokens][n_used].
    const int32_t * ids(int block) const { return guesses_.at(block).ids.data(); }
    const float *   weights(int block) const { return guesses_.at(block).weights.data(); }

private:
    struct guess {
        predictor            by;
        bool                 fed = false; // the source shows its residual
        std::vector<int32_t> ids;
        std::vector<float>   weights;
    };

    int                            n_embd_;
    int                            n_tokens_;
    bool                           true_weights_;
    std::unordered_map<int, guess> guesses_; // by block
    std::unordered_map<int, int>   target_;  // by source
    std::vector<int32_t>           row_;     // scratch, [n_ids]
};

} // namespace spo
