#include "predictor.h"

#include <algorithm>

namespace spo {

predictor::predictor(const spo_loop_layer & layer, int n_embd) :
    block_(layer.block),
    source_(layer.source),
    n_ids_(layer.gate->n_ids),
    n_used_(layer.gate->n_used),
    gate_(std::make_unique<gate>(*layer.gate)),
    default_vectors_(layer.default_vectors),
    add_(size_t(n_embd)) {}

bool predictor::route(const float * residual, const float * shared, const int32_t * ids, const float * weights,
                      int n_used, int32_t * out_ids, float * out_weights) {
    if (shared) {
        std::copy_n(shared, add_.size(), add_.begin());
    } else {
        std::fill(add_.begin(), add_.end(), 0.0f);
    }
    for (int i = 0; default_vectors_ && i < n_used; ++i) {
        const float * mean = default_vectors_ + size_t(ids[i]) * add_.size();
        for (size_t j = 0; j < add_.size(); ++j) {
            add_[j] += weights[i] * mean[j];
        }
    }
    return gate_->route(residual, add_.data(), out_ids, out_weights, nullptr);
}

} // namespace spo
