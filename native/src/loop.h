// The prediction loop without Python, to know what Python costs: taps in, uploads queued.
#pragma once

#include "engine.h"
#include "gate.h"

#include <memory>
#include <string>
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
    struct predicted_layer {
        int                   block;
        std::unique_ptr<gate> router;
        const float *         default_vectors; // of the source, [n_expert][n_embd], borrowed, or null
        std::vector<int32_t>  ids;
        std::vector<float>    weights;
    };

    void run();

    engine &                                 owner_;
    std::unordered_map<int, predicted_layer> layers_; // by source
    std::vector<float>                       add_;    // [n_embd]
    std::thread                              thread_;
};

} // namespace spo
