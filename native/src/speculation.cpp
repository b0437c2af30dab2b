#include "speculation.h"

#include <algorithm>
#include <stdexcept>

namespace spo {

speculation::speculation(const spo_loop_layer * layers, int n, int n_embd, int n_tokens, bool true_weights) :
    n_embd_(n_embd), n_tokens_(n_tokens), true_weights_(true_weights) {
    for (int i = 0; i < n; ++i) {
        if (!layers[i].gate || layers[i].gate->n_embd != n_embd) {
            throw std::invalid_argument("a prediction to execute has no gate, or one of another width");
        }
        guess        next{ predictor(layers[i], n_embd), false, {}, {} };
        const size_t room = size_t(n_tokens) * next.by.n_used();
        next.ids.resize(room);
        next.weights.resize(room);
        row_.resize(std::max(row_.size(), size_t(next.by.n_ids())));
        target_[layers[i].source] = layers[i].block;
        guesses_.emplace(layers[i].block, std::move(next));
    }
}

void speculation::shows(int block, bool residual) {
    const auto found = target_.find(block);
    if (found != target_.end()) {
        guesses_.at(found->second).fed = residual;
    }
}

bool speculation::covers(int block, int64_t n_used, int64_t n_tokens) const {
    const auto found = guesses_.find(block);
    return found != guesses_.end() && found->second.fed && found->second.by.n_used() == n_used && n_tokens <= n_tokens_;
}

int speculation::target(int source) const {
    const auto found = target_.find(source);
    return found == target_.end() ? -1 : found->second;
}

bool speculation::predict(int source, int64_t token, const float * residual, const float * shared, const int32_t * ids,
                          const float * weights, int n_used) {
    guess &      next = guesses_.at(target_.at(source));
    const size_t k    = size_t(next.by.n_used());
    if (!next.by.route(residual, shared, ids, weights, n_used, row_.data(), &next.weights[token * k])) {
        return false;
    }
    std::copy_n(row_.begin(), k, next.ids.begin() + token * k);
    return true;
}

} // namespace spo
