#include "loop.h"

namespace spo {

namespace {

constexpr int wait_ms = 1000; // bounds how long a lost wake-up hurts, as in runtime/orchestrator.py

} // namespace

prediction_loop::prediction_loop(engine & owner, const spo_loop_layer * layers, int n, int n_embd) :
    owner_(owner), add_(size_t(n_embd)) {
    for (int i = 0; i < n; ++i) {
        const spo_gate_params & params = *layers[i].gate;
        layers_[layers[i].source]      = { layers[i].block, std::make_unique<gate>(params), layers[i].default_vectors,
                                           std::vector<int32_t>(params.n_ids), std::vector<float>(params.n_used) };
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
        predicted_layer & next = found->second;
        add_                   = newest.shared;
        for (size_t i = 0; next.default_vectors && i < newest.ids.size(); ++i) {
            const float * mean = next.default_vectors + size_t(newest.ids[i]) * add_.size();
            for (size_t j = 0; j < add_.size(); ++j) {
                add_[j] += newest.weights[i] * mean[j];
            }
        }
        if (next.router->route(newest.residual.data(), add_.data(), next.ids.data(), next.weights.data(), nullptr)) {
            owner_.prefetch(next.block, next.ids.data(), int(next.ids.size()));
        }
    }
}

} // namespace spo
