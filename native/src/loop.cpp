#include "loop.h"

#include <algorithm>

namespace spo {

namespace {

constexpr int wait_ms = 1000; // bounds how long a lost wake-up hurts, as in runtime/orchestrator.py

} // namespace

prediction_steps::prediction_steps(const spo_loop_layer * layers, int n, int n_embd) {
    for (int i = 0; i < n; ++i) {
        const predictor & made = layers_.emplace(layers[i].source, predictor(layers[i], n_embd)).first->second;
        ids_.resize(std::max(ids_.size(), size_t(made.n_ids())));
        weights_.resize(std::max(weights_.size(), size_t(made.n_used())));
    }
}

int prediction_steps::step(engine & owner, int block, const float * residual, const float * shared, const int32_t * ids,
                           const float * weights, int n_used) {
    const auto found = layers_.find(block);
    if (found == layers_.end()) {
        return -1;
    }
    predictor & next = found->second;
    if (!next.route(residual, shared, ids, weights, n_used, ids_.data(), weights_.data())) {
        return -2;
    }
    return owner.prefetch(next.block(), ids_.data(), next.n_ids());
}

prediction_loop::prediction_loop(engine & owner, const spo_loop_layer * layers, int n, int n_embd) :
    owner_(owner), steps_(layers, n, n_embd) {
    owner_.taps().open(n_embd);
    thread_ = std::thread([this] { run(); });
}

prediction_loop::~prediction_loop() {
    owner_.taps().close();
    thread_.join();
}

void prediction_loop::run() {
    tap newest;
    while (owner_.taps().is_open()) {
        if (!owner_.taps().read(newest, wait_ms)) {
            continue;
        }
        steps_.step(owner_, owner_.layer(newest.layer).block, newest.residual.data(), newest.shared.data(),
                    newest.ids.data(), newest.weights.data(), int(newest.ids.size()));
    }
}

} // namespace spo
