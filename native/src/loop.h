// The prediction loop without Python, to know what Python costs: taps in, uploads queued.
#pragma once

#include "engine.h"
#include "predictor.h"

#include <thread>
#include <unordered_map>
#include <vector>

namespace spo {

// A prediction for each tap that has one, queued. One thread at a time.
class prediction_steps {
public:
    prediction_steps(const spo_loop_layer * layers, int n, int n_embd); // throws std::invalid_argument

    // Of a tap of `block`: how many uploads were started, -1 where nothing is predicted from it, -2 where a
    // logit is not finite.
    int step(engine & owner, int block, const float * residual, const float * shared, const int32_t * ids,
             const float * weights, int n_used);

private:
    std::unordered_map<int, predictor> layers_; // by source
    std::vector<int32_t>               ids_;    // scratch
    std::vector<float>                 weights_;
};

class prediction_loop {
public:
    // Runs until it goes out of scope; the engine outlives it. Throws std::exception.
    prediction_loop(engine & owner, const spo_loop_layer * layers, int n, int n_embd);
    ~prediction_loop();
    prediction_loop(const prediction_loop &)             = delete;
    prediction_loop & operator=(const prediction_loop &) = delete;

private:
    void run();

    engine &         owner_;
    prediction_steps steps_;
    std::thread      thread_;
};

} // namespace spo
