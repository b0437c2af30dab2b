// Which resident expert leaves when a slot is needed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace spo {

// Counts uses of every expert of every layer, resident or not, and ranks them by what they are
// still worth. Time is counted in steps of the expert's own layer, so that layers compare fairly.
class policy {
public:
    virtual ~policy() = default;

    // A step of `layer` begins.
    virtual void step(int layer) = 0;
    // The running step of `layer` asks for `expert`, once.
    virtual void use(int layer, int expert) = 0;
    // The running step of `layer` has asked for all its experts.
    virtual void settle(int /*layer*/) {}
    // What keeping it is worth; the lowest leaves first.
    virtual double worth(int layer, int expert) const = 0;
};

// Least recently used, in steps of all layers together.
class lru_policy : public policy {
public:
    lru_policy(int n_layers, int n_expert);
    void   step(int layer) override;
    void   use(int layer, int expert) override;
    double worth(int layer, int expert) const override;

private:
    int                 n_expert_;
    double              now_ = 0;
    std::vector<double> last_;
};

// Use counts that halve every `half_life` steps. Shared by many layers it keeps the hot experts where
// LRU, swept by one token's worth of layers x k experts, would keep nothing.
class decayed_policy : public policy {
public:
    decayed_policy(int n_layers, int n_expert, double half_life);
    void   step(int layer) override;
    void   use(int layer, int expert) override;
    double worth(int layer, int expert) const override;

private:
    struct count {
        double   value = 0;
        uint64_t at    = 0; // step of the layer when `value` held
    };

    int                   n_expert_;
    double                decay_;
    std::vector<uint64_t> steps_;  // per layer
    std::vector<count>    counts_; // [layer][expert]
};

// How often each expert will be asked for, uses to come counting less the later they come. Two parts:
// the rate of the expert's own uses, and what it was worth to follow the experts that this layer and
// the layers before it have just used. The second is learned from every step (temporal differences,
// linear in those experts), starts at a little for the expert itself, and needs no sequence to begin or end.
class learned_policy : public policy {
public:
    learned_policy(int n_layers, int n_expert, double half_life);
    void   step(int layer) override;
    void   use(int layer, int expert) override;
    void   settle(int layer) override;
    double worth(int layer, int expert) const override;

private:
    struct layer_state {
        std::vector<int>   used;    // by the running step
        std::vector<int>   context; // rows that spoke when the last step settled
        std::vector<float> rates;   // [expert] uses per step, decayed
        std::vector<float> value;   // [expert] as of the last settled step
        std::vector<float> rows;    // [distance][expert that was used][expert that follows]
    };

    void gather(int layer);
    void evaluate(const layer_state & of, std::vector<float> & value) const;

    int                      n_expert_;
    int                      reach_; // layers whose experts speak, the layer itself and those before it
    float                    decay_; // of rates, per step
    std::vector<layer_state> layers_;
    std::vector<int>         context_; // scratch
    std::vector<float>       value_;   // scratch
    std::vector<float>       error_;   // scratch
};

std::unique_ptr<policy> make_policy(int kind, int n_layers, int n_expert, double half_life);

} // namespace spo
