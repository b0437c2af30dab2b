#include "loop.h"

#include <algorithm>

namespace spo {

namespace {

constexpr int wait_ms = 1000; // bounds how long a lost wake-up hurts, as in runtime/orchestrator.py

} // namespace

prediction_loop::prediction_loop(engine & owner, const spo_loop_layer * layers, int n, int n_embd) : owner_(owner) {
    for (int i = 0; i < n; ++i) {
        const predictor & made = layers_.emplace(layers[i].source, predictor(layers[i], n_embd)).first->second;
        ids_.resize(std::max(ids_.size(), size_t(made.n_ids())));
        weights_.resize(std::max(weights_.size(), size_t(made.n_used())));
    }
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
        const auto found = layers_.find(owner_.layer(newest.layer).block);
        if (found == layers_.end()) {
            continue;
        }
        predictor & next = found->second;
        if (next.route(newest.residual.data(), newest.shared.data(), newest.ids.data(), newest.weights.data(),
                       int(newest.ids.size()), ids_.data(), weights_.data())) {
            owner_.prefetch(next.block(), ids_.data(), next.n_ids());
        }
    }
}

} // namespace spo
