// The engine's side of predictions: which are worth an upload, and what they were worth.
#include "engine.h"

#include <algorithm>

namespace spo {

namespace {

constexpr float precision_step = 0.02f; // weight of the newest outcome, right or wrong

} // namespace

int engine::prefetch(int block, const int32_t * experts, int n) {
    const auto found = by_block_.find(block);
    if (found == by_block_.end()) {
        return 0;
    }
    const moe_layer & layer    = layers_[found->second];
    const uint64_t    begin    = now_ns();
    int               accepted = 0;
    lock              held(mutex_);
    slot_table &      table = pools_[layer.pool].table;
    const float       least = least_precision();
    prediction &      guess = predictions_[found->second];
    for (const int expert : guess.experts) { // its step never came
        table.judged(layer.pool_layer, expert);
    }
    guess.experts.clear();
    guess.was_resident.clear();
    for (int rank = 0; rank < n; ++rank) {
        const int expert = experts[rank];
        if (expert < 0 || expert >= layer.n_expert) {
            continue;
        }
        const bool resident = table.find(layer.pool_layer, expert) >= 0;
        table.awaited(layer.pool_layer, expert);
        guess.experts.push_back(expert);
        guess.was_resident.push_back(resident);
        const size_t r = guess.experts.size() - 1;
        if (guess.precision.size() <= r) {
            guess.precision.push_back(1.0f); // innocent until measured
        }
        if (!resident && guess.precision[r] >= least &&
            start_upload(found->second, expert, /*predicted*/ true, /*urgent*/ false) >= 0) {
            accepted += 1;
        }
    }
    guess.resident.assign(layer.n_expert, 0);
    for (int e = 0; e < layer.n_expert; ++e) {
        const int slot    = table.find(layer.pool_layer, e);
        guess.resident[e] = slot >= 0 && !table.at(slot).predicted;
    }
    stats_.predicted += uint64_t(accepted);
    trace_.span(SPO_SPAN_PREDICT, begin, block, -1);
    return accepted;
}

// From which precision a predicted copy is worth starting. Right, it hides what fits into the window
// between a layer having its experts and the next one asking; wrong, demand waits for what is left of
// the one matrix that cannot be called back.
float engine::least_precision() const {
    const float gain = std::min(window_us_, copy_us_), loss = std::max(copy_us_ - window_us_, 0.25f * copy_us_);
    return gain + loss > 0 ? loss / (gain + loss) : 0.5f;
}

// The router has spoken: count what the prediction was worth, and let go of what it got wrong.
void engine::judge_predictions(const layer_step & step) {
    const int         layer_index = step.layer;
    const moe_layer & layer       = layers_[layer_index];
    slot_pool &       pool        = pools_[layer.pool];
    prediction &      guess       = predictions_[layer_index];
    if (guess.experts.empty()) {
        return;
    }
    const auto asked = [&](int expert) {
        return std::any_of(step.wanted.begin(), step.wanted.end(),
                           [&](const pinned & w) { return w.expert == expert; });
    };
    for (const pinned & w : step.wanted) {
        const bool right = std::find(guess.experts.begin(), guess.experts.end(), w.expert) != guess.experts.end();
        stats_.true_experts += 1;
        stats_.true_predicted += right;
        stats_.true_nonresident += !guess.resident[w.expert];
        stats_.true_nonresident_predicted += right && !guess.resident[w.expert];
    }
    for (size_t rank = 0; rank < guess.experts.size(); ++rank) {
        const int  expert = guess.experts[rank];
        const bool right  = asked(expert);
        if (!guess.was_resident[rank]) { // where a cache already holds what is likely, the rest is less so
            stats_.predicted_nonresident += 1;
            guess.precision[rank] += precision_step * (float(right) - guess.precision[rank]);
        }
        pool.table.judged(layer.pool_layer, expert);
        const int slot = pool.table.find(layer.pool_layer, expert);
        if (!right && slot >= 0 && pool.table.at(slot).predicted && pool.table.at(slot).state == slot_state::loading) {
            drop_upload(layer_index, slot);
        }
    }
    guess.experts.clear();
}

// A late prediction that has not started will not.
void engine::drop_upload(int layer_index, int slot_index) {
    const moe_layer & layer = layers_[layer_index];
    slot_pool &       pool  = pools_[layer.pool];
    if (queue_->drop(pool.transfers[slot_index].id, layer.n_copies())) {
        in_flight_ -= layer.n_copies();
        pool.table.abandon(slot_index);
    }
}

} // namespace spo
