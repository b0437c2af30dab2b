// The prediction loop without Python, to know what Python costs: taps in, uploads queued.
#pragma once

#include "engine.h"
#include "predictor.h"

#include <thread>
#include <unordered_map>
#include <vector>

namespace spo {

class prediction_loop {
public:
    // Runs until it goes out of scope; the engine outlives it. Throws std::exception.
    prediction_loop(engine & owner, const spo_loop_layer * layers, int n, int n_embd);
    ~prediction_loop();
    prediction_loop(const prediction_loop &)             = delete;
    prediction_loop & operator=(const prediction_loop &) = delete;

private:
    void run();

    engine &                           owner_;
    std::unordered_map<int, predictor> layers_; // by source
    std::vector<int32_t>               ids_;    // scratch
    std::vector<float>                 weights_;
    std::thread                        thread_;
};

} // namespace spo
