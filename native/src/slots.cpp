#include "slots.h"

namespace spo {

slot_table::slot_table(int n_slots, int probation, int n_layers, int n_expert, std::unique_ptr<policy> order) :
    probation_(probation),
    n_layers_(n_layers),
    n_expert_(n_expert),
    slots_(size_t(n_slots)),
    slot_of_(size_t(n_layers) * n_expert, -1),
    order_(std::move(order)) {}

// Among equals, the layer that runs again last goes first: in a shared pool the experts of layers
// just executed have a whole token to come back, those of the next layers do not.
int slot_table::victim(int for_layer, bool predicted, bool spare_awaited) const {
    const bool only_predicted = predicted && predicted_ >= probation_;
    const auto distance       = [&](const slot & s) { return (s.layer - for_layer + n_layers_) % n_layers_; };
    int        best           = -1;
    double     worth          = 0;
    for (int i = 0; i < size(); ++i) {
        const slot & s = slots_[i];
        if (s.state == slot_state::empty && !only_predicted) {
            return i;
        }
        if (s.state == slot_state::empty || s.state == slot_state::loading || s.pins > 0 ||
            (only_predicted && !s.predicted) || (spare_awaited && s.awaited)) {
            continue;
        }
        const double w = order_->worth(s.layer, s.expert);
        if (best < 0 || w < worth || (w == worth && distance(s) > distance(slots_[best]))) {
            best  = i;
            worth = w;
        }
    }
    return best;
}

std::optional<int> slot_table::claim(int layer, int expert, bool predicted, slot * evicted) {
    int index = victim(layer, predicted, /*spare_awaited*/ true);
    if (index < 0 && !predicted) {
        index = victim(layer, predicted, /*spare_awaited*/ false);
    }
    if (index < 0) {
        return std::nullopt;
    }
    slot & s = slots_[index];
    if (evicted) {
        *evicted = s;
    }
    unbind(s);
    s.state     = slot_state::loading;
    s.layer     = layer;
    s.expert    = expert;
    s.predicted = predicted;
    s.awaited   = predicted;
    bound_ += 1;
    predicted_ += predicted;
    slot_of_[size_t(layer) * n_expert_ + expert] = index;
    return index;
}

void slot_table::ready(int index) { slots_[index].state = slot_state::ready; }

void slot_table::abandon(int index) { unbind(slots_[index]); }

void slot_table::judged(int layer, int expert) {
    const int index = find(layer, expert);
    if (index >= 0) {
        slots_[index].awaited = false;
    }
}

void slot_table::awaited(int layer, int expert) {
    const int index = find(layer, expert);
    if (index >= 0) {
        slots_[index].awaited = slots_[index].predicted;
    }
}

void slot_table::forget_others(int layer) {
    for (slot & s : slots_) {
        if (s.state == slot_state::ready && s.pins == 0 && !s.predicted && s.layer != layer) {
            unbind(s);
        }
    }
}

void slot_table::unbind(slot & s) {
    if (s.state != slot_state::empty) {
        slot_of_[size_t(s.layer) * n_expert_ + s.expert] = -1;
        bound_ -= 1;
    }
    predicted_ -= s.predicted;
    s = slot{};
}

void slot_table::use(int layer, int expert) {
    order_->use(layer, expert);
    const int index = find(layer, expert);
    if (index >= 0) {
        asked(index);
    }
}

void slot_table::asked(int index) {
    slot & s = slots_[index];
    predicted_ -= s.predicted;
    s.predicted = s.awaited = false;
}

std::string slot_table::check() const {
    int bound = 0, predicted = 0;
    for (int i = 0; i < size(); ++i) {
        const slot & s = slots_[i];
        if (s.state == slot_state::empty) {
            if (s.pins != 0) {
                return "empty slot " + std::to_string(i) + " is pinned";
            }
            continue;
        }
        bound += 1;
        predicted += s.predicted;
        if (s.awaited && !s.predicted) {
            return "slot " + std::to_string(i) + " awaits what nobody predicted";
        }
        if (s.pins < 0) {
            return "slot " + std::to_string(i) + " has " + std::to_string(s.pins) + " pins";
        }
        if (find(s.layer, s.expert) != i) {
            return "slot " + std::to_string(i) + " is not where its expert is looked up";
        }
    }
    if (bound != bound_) {
        return "count of bound slots is off";
    }
    for (const int index : slot_of_) {
        bound -= index >= 0;
    }
    if (bound != 0) {
        return "an expert is looked up in a slot that is not its own";
    }
    return predicted == predicted_ ? "" : "count of predicted slots is off";
}

} // namespace spo
