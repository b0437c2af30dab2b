// The C boundary: the only place where exceptions stop.

#include "device.h"
#include "engine.h"
#include "gate.h"
#include "hook.h"
#include "llama.h"
#include "loop.h"
#include "replay.h"
#include "speculoe/speculoe.h"

#include <algorithm>
#include <cstdio>
#include <new>
#include <stdexcept>

struct spo_engine {
    spo::engine                           engine;
    std::string                           text; // what the last call returned a pointer to
    std::unique_ptr<spo::prediction_loop> loop; // after the engine it watches, so gone before it

    explicit spo_engine(const spo_params & params) : engine(params) {
        if (engine.shares_misses()) {
            engine.set_misses(spo::make_miss_branch(engine));
        }
    }
};

struct spo_steps : spo::prediction_steps {
    using prediction_steps::prediction_steps;
};

struct spo_gate : spo::gate {
    using gate::gate;
};

namespace {

bool should_abort(void * data) { return static_cast<spo_engine *>(data)->engine.should_abort(); }

} // namespace

extern "C" {

int32_t spo_abi_version(void) { return SPO_ABI_VERSION; }

spo_status spo_engine_new(const spo_params * params, spo_engine ** out, char * error, size_t error_size) {
    *out              = nullptr;
    const auto refuse = [&](spo_status status, const char * line) {
        if (error && error_size > 0) {
            std::snprintf(error, error_size, "%s", line);
        }
        return status;
    };
    try {
        *out = new spo_engine(*params);
        return SPO_OK;
    } catch (const std::bad_alloc &) {
        return refuse(SPO_ERR_MEMORY, "expert slots do not fit into memory; use a smaller --expert-budget");
    } catch (const spo::source_error & e) {
        return refuse(SPO_ERR_SOURCE, e.what());
    } catch (const std::exception & e) {
        return refuse(SPO_ERR_INVALID, e.what());
    }
}

void spo_engine_free(spo_engine * engine) { delete engine; }

spo_status spo_engine_attach(spo_engine * engine, llama_context * ctx) {
    llama_set_moe_hooks(ctx, &spo::moe_hooks(), &engine->engine);
    llama_set_abort_callback(ctx, should_abort, engine);
    return SPO_OK;
}

void spo_engine_detach(spo_engine *, llama_context * ctx) {
    llama_set_moe_hooks(ctx, nullptr, nullptr);
    llama_set_abort_callback(ctx, nullptr, nullptr);
}

spo_status spo_synchronize(llama_context * ctx) {
    try {
        llama_synchronize(ctx);
        return SPO_OK;
    } catch (const std::exception &) { // backends throw through llama.cpp
        return SPO_ERR_DEVICE;
    }
}

int32_t spo_device_is_lost(const char * device) {
    try {
        return int32_t(spo::device::is_lost(device));
    } catch (const std::exception &) {
        return 1;
    }
}

void spo_engine_interrupt(spo_engine * engine) { engine->engine.interrupt(); }

const char * spo_engine_reset(spo_engine * engine) {
    engine->text = engine->engine.reset();
    return engine->text.c_str();
}

int32_t spo_engine_prefetch(spo_engine * engine, int32_t layer, const int32_t * experts, int32_t n) {
    try {
        return engine->engine.prefetch(layer, experts, n);
    } catch (const std::exception & e) {
        engine->engine.fail(e.what());
        return 0;
    }
}

void spo_tap_open(spo_engine * engine, int32_t n_embd) { engine->engine.taps().open(n_embd); }

void spo_tap_close(spo_engine * engine) { engine->engine.taps().close(); }

int32_t spo_tap_next(spo_engine * engine, float * residual, float * shared, int32_t * ids, float * weights,
                     int32_t * n_used, int32_t timeout_ms) {
    thread_local spo::tap newest;
    spo::tap_box &        taps = engine->engine.taps();
    if (!taps.read(newest, timeout_ms)) {
        return taps.is_open() ? -1 : -2;
    }
    std::copy(newest.residual.begin(), newest.residual.end(), residual);
    std::copy(newest.shared.begin(), newest.shared.end(), shared);
    std::copy(newest.ids.begin(), newest.ids.end(), ids);
    std::copy(newest.weights.begin(), newest.weights.end(), weights);
    *n_used = int32_t(newest.ids.size());
    return engine->engine.layer(newest.layer).block;
}

void spo_engine_get_stats(spo_engine * engine, spo_stats * out) { *out = engine->engine.stats(); }

spo_status spo_engine_check(spo_engine * engine) {
    const std::string broken = engine->engine.check();
    if (broken.empty()) {
        return SPO_OK;
    }
    engine->engine.fail(broken);
    return SPO_ERR_INVALID;
}

spo_status spo_gate_new(const spo_gate_params * params, spo_gate ** out, char * error, size_t error_size) {
    *out = nullptr;
    try {
        *out = new spo_gate(*params);
        return SPO_OK;
    } catch (const std::exception & e) {
        if (error && error_size > 0) {
            std::snprintf(error, error_size, "%s", e.what());
        }
        return dynamic_cast<const std::bad_alloc *>(&e) ? SPO_ERR_MEMORY : SPO_ERR_INVALID;
    }
}

void spo_gate_free(spo_gate * gate) { delete gate; }

spo_status spo_gate_route(spo_gate * gate, const float * residual, const float * add, int32_t * ids, float * weights,
                          float * probs) {
    return gate->route(residual, add, ids, weights, probs) ? SPO_OK : SPO_ERR_INVALID;
}

spo_status spo_replay(const spo_replay_params * params, spo_replay_counts * out, char * error, size_t error_size) {
    *out = {};
    try {
        *out = spo::replay(*params);
        return SPO_OK;
    } catch (const std::exception & e) {
        if (error && error_size > 0) {
            std::snprintf(error, error_size, "%s", e.what());
        }
        return dynamic_cast<const std::bad_alloc *>(&e) ? SPO_ERR_MEMORY : SPO_ERR_INVALID;
    }
}

spo_status spo_steps_new(const spo_loop_layer * layers, int32_t n, int32_t n_embd, spo_steps ** out, char * error,
                         size_t error_size) {
    *out = nullptr;
    try {
        *out = new spo_steps(layers, n, n_embd);
        return SPO_OK;
    } catch (const std::exception & e) {
        if (error && error_size > 0) {
            std::snprintf(error, error_size, "%s", e.what());
        }
        return SPO_ERR_INVALID;
    }
}

void spo_steps_free(spo_steps * steps) { delete steps; }

int32_t spo_steps_take(spo_steps * steps, spo_engine * engine, int32_t block, const float * residual,
                       const float * shared, const int32_t * ids, const float * weights, int32_t n_used) {
    try {
        return steps->step(engine->engine, block, residual, shared, ids, weights, n_used);
    } catch (const std::exception & e) {
        engine->engine.fail(e.what());
        return 0;
    }
}

spo_status spo_loop_start(spo_engine * engine, const spo_loop_layer * layers, int32_t n, int32_t n_embd, char * error,
                          size_t error_size) {
    try {
        engine->loop = std::make_unique<spo::prediction_loop>(engine->engine, layers, n, n_embd);
        return SPO_OK;
    } catch (const std::exception & e) {
        if (error && error_size > 0) {
            std::snprintf(error, error_size, "%s", e.what());
        }
        return SPO_ERR_INVALID;
    }
}

void spo_loop_stop(spo_engine * engine) { engine->loop.reset(); }

spo_status spo_speculation_set(spo_engine * engine, const spo_loop_layer * layers, int32_t n, int32_t n_embd,
                               int32_t true_weights, char * error, size_t error_size) {
    try {
        engine->engine.set_speculation(
            std::make_unique<spo::speculation>(layers, n, n_embd, engine->engine.n_parallel(), true_weights != 0));
        return SPO_OK;
    } catch (const std::exception & e) {
        if (error && error_size > 0) {
            std::snprintf(error, error_size, "%s", e.what());
        }
        return SPO_ERR_INVALID;
    }
}

void spo_speculation_switch(spo_engine * engine, llama_context * ctx, int32_t on) {
    engine->engine.set_speculating(on != 0);
    llama_set_moe_hooks(ctx, &spo::moe_hooks(), &engine->engine); // graphs built before are not used again
}

void spo_trace_start(spo_engine * engine, int64_t capacity) { engine->engine.trace().start(size_t(capacity)); }

int64_t spo_trace_take(spo_engine * engine, spo_span * out, int64_t n) {
    return int64_t(engine->engine.trace().take(out, size_t(n)));
}

} // extern "C"
