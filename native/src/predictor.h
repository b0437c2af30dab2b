// What one layer's tap says about the next MoE layer: the quasi-hidden state through a gate.
#pragma once

#include "gate.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace spo {

// One thread at a time, as the gate in it.
class predictor {
public:
    predictor(const spo_loop_layer & layer, int n_embd); // throws std::invalid_argument

    int block() const { return block_; }   // predicted
    int source() const { return source_; } // whose tap predicts it
    int n_ids() const { return n_ids_; }
    int n_used() const { return n_used_; }

    // `shared` may be null; ids and weights are what the source executed. Writes ids[n_ids], weights[n_used];
    // false, and nothing written, if a logit is not finite.
    bool route(const float * residual, const float * shared, const int32_t * ids, const float * weights, int n_used,
               int32_t * out_ids, float * out_weights);

private:
    int                   block_, source_, n_ids_, n_used_;
    std::unique_ptr<gate> gate_;
    const float *         default_vectors_; // of the source, [n_expert][n_embd], borrowed, or null
    std::vector<float>    add_;             // [n_embd]
};

} // namespace spo
