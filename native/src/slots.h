// Which expert sits in which slot of a pool. Knows nothing about bytes: uploads bring them, banks
// hold them. Not thread-safe; the engine's lock guards it.
#pragma once

#include "policy.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace spo {

enum class slot_state { empty, loading, ready };

struct slot {
    slot_state state     = slot_state::empty;
    int        layer     = -1; // within the pool
    int        expert    = -1;
    int        pins      = 0;     // graphs or copies that read or will read it; never evicted above 0
    bool       predicted = false; // brought by a prediction and not asked for since
    bool       awaited   = false; // of these, the step it was brought for is still to come
};

class slot_table {
public:
    // Unused predictions may hold `probation` slots; the rest is the warm set, which they never evict.
    slot_table(int n_slots, int probation, int n_layers, int n_expert, std::unique_ptr<policy> order);

    int          size() const { return int(slots_.size()); }
    const slot & at(int index) const { return slots_[index]; }

    // The slot that holds or awaits the expert, or -1.
    int find(int layer, int expert) const { return slot_of_[size_t(layer) * n_expert_ + expert]; }

    // A free slot bound to the expert and `loading`; evicts the least worthy ready slot that is not
    // pinned, for a prediction beyond probation the least worthy unused prediction. What is awaited
    // leaves only for demand, and only when nothing else can: a predicted expert is seldom a worthy one,
    // and would be gone before its step came. nullopt when there is none. `evicted` (if not null) gets
    // what left.
    std::optional<int> claim(int layer, int expert, bool predicted, slot * evicted = nullptr);

    // Its bytes have landed.
    void ready(int index);
    // They never will: back to empty.
    void abandon(int index);

    // The step that a prediction was made for has come, or never will ...
    void judged(int layer, int expert);
    // ... or it is predicted again.
    void awaited(int layer, int expert);

    // Two layers' worth of buffers and no cache: everything leaves that is neither pinned, loading, of
    // this layer, nor an unused prediction.
    void forget_others(int layer);

    void step(int layer) { order_->step(layer); }
    void use(int layer, int expert);
    void asked(int index);                            // for what it holds, after use(): no prediction any more
    void settle(int layer) { order_->settle(layer); } // the step has asked for all
    void pin(int index) { slots_[index].pins += 1; }
    void unpin(int index) { slots_[index].pins -= 1; }

    bool has_empty() const { return bound_ < size(); }
    int  predicted() const { return predicted_; } // slots on probation

    // "" or the first broken invariant.
    std::string check() const;

private:
    int  victim(int for_layer, bool predicted, bool spare_awaited) const;
    void unbind(slot & s);

    int                     probation_;
    int                     n_layers_;
    int                     n_expert_;
    int                     bound_     = 0; // slots not empty
    int                     predicted_ = 0;
    std::vector<slot>       slots_;
    std::vector<int>        slot_of_; // [layer][expert]
    std::unique_ptr<policy> order_;
};

} // namespace spo
