// One model's experts in the fast tier: who is where, what is on its way, and the waiting of the
// compute thread. Everything that graphs, uploads and callers share meets here, under one lock.
#pragma once

#include "bank.h"
#include "device.h"
#include "link.h"
#include "misses.h"
#include "pinned.h"
#include "slots.h"
#include "source.h"
#include "speculation.h"
#include "speculoe/speculoe.h"
#include "staging.h"
#include "tap.h"
#include "trace.h"
#include "uploads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace spo {

class engine;

constexpr float timing_step = 0.05f; // weight of the newest duration in a moving average

// One expert tensor of the model.
struct matrix {
    engine *     owner;
    std::string  name;
    int          index;    // among all matrices
    int          layer;    // index into layers
    int          position; // within its layer, in the order graphs use them
    matrix_shape shape;
    int          n_expert;
    int          file;
    uint64_t     offset;
    int          slot_file; // uploads into slots read here
    uint64_t     slot_offset;
    uint64_t     slot_stride;
};

struct moe_layer {
    engine * owner;
    int      block; // number in tensor names
    int      pool;
    int      pool_layer; // index within the pool
    int      first;      // its first matrix
    int      n_matrices;
    int      n_expert;
    size_t   expert_bytes;
    bool     packed;             // in slot_file its matrices follow each other: one read fetches an expert
    bool     shared;             // has a shared expert, which may run between request and acquire
    bool     cpu_misses = false; // its graph can compute misses on the CPU
    int64_t  n_input    = 0;     // floats of what leaves the device for its operation that are its experts' input

    int n_copies() const { return packed ? 1 : n_matrices; } // that bring one expert
};

// What was guessed for the next step of a layer, most certain first, and how such guesses fared.
struct prediction {
    std::vector<int>     experts;
    std::vector<uint8_t> was_resident; // of each guess, when it was made
    std::vector<uint8_t> resident;     // of each expert, when it was made, predictions in slots not counted
    std::vector<float>   precision;    // by rank, moving average
};

// Slots of one or more layers of the same shapes.
struct slot_pool {
    struct transfer { // what is on its way into a slot
        uint64_t id        = 0;
        int      remaining = 0;
        bool     failed    = false;
    };

    slot_table              table;
    std::vector<buffer_ptr> memory;    // one per position
    std::vector<bank>       banks;     // one per position, n_slots + 1 experts: CUDA reads past the last
    std::vector<transfer>   transfers; // one per slot
};

// ids of a router, as a strided view into its tensor
struct id_view {
    const char * data;
    int64_t      n_used;
    int64_t      n_tokens;
    size_t       nb0;
    size_t       nb1;

    int32_t at(int64_t i, int64_t t) const { return *reinterpret_cast<const int32_t *>(data + i * nb0 + t * nb1); }
};

struct pinned {
    int  pool, slot, layer, expert; // layer within the pool
    bool on_cpu = false;            // no slot is waited for: it is computed where its bytes lie
};

// What one layer of the running graph asked for, and the slots it holds until it is computed.
struct layer_step {
    int                 layer = -1;
    std::vector<pinned> wanted;
    std::vector<pinned> pins;
    int                 n_cpu    = 0; // of what is wanted
    int                 n_demand = 0; // uploads that are waited for
    uint64_t            asked_ns = 0;
};

class engine {
public:
    explicit engine(const spo_params & params);   // throws std::exception
    ~engine()                          = default; // the queue goes first and joins its threads
    engine(const engine &)             = delete;
    engine & operator=(const engine &) = delete;

    // --- graph building (hook.cpp)
    const matrix *    find(const char * tensor_name) const;
    const moe_layer * find_layer(int block) const;
    const moe_layer & layer(int index) const { return layers_[index]; }
    slot_pool &       pool_of(const matrix & m) { return pools_[layers_[m.layer].pool]; }
    staging &         stages() { return *staging_; }
    bool              on_device() const { return !devices_.empty(); }
    // Whether a graph of so many tokens reads slots; others stream, and leave the slots alone.
    bool decodes(const moe_layer & layer, int64_t n_used, int64_t n_tokens) const;

    // --- misses that the CPU computes; null: all are uploaded
    miss_branch * misses() { return branch_.get(); }
    void          set_misses(std::unique_ptr<miss_branch> branch) { branch_ = std::move(branch); }
    bool          shares_misses() const { return misses_ != miss_mode::upload; }
    // A matrix's experts in main memory, `mapped` if nothing nearer.
    ggml_tensor * in_memory(const matrix & m, ggml_tensor * mapped);
    // While a graph is built.
    void allow_cpu(int layer, bool can) { layers_[layer].cpu_misses = can; }
    void set_input(int layer, int64_t n) { layers_[layer].n_input = n; }

    // --- compute thread, inside a graph
    // The router of a decode step has chosen: pins what is resident, starts on what is missing.
    void request(int layer, const id_view & ids);
    // The same for the next layer while this one waits and computes: its prediction will be executed.
    void request_ahead(int layer, const id_view & ids);
    // After request: for each choice the expert that the CPU is to compute, or -1; packed.
    void missing(const id_view & ids, int32_t * experts);
    // Waits until all else is resident; writes the slots, packed.
    void acquire(int layer, const id_view & ids, int32_t * slots);
    // Makes the experts of one matrix present in its stage, and starts on the next matrix.
    void stream(const matrix & m, const id_view & ids);
    // True when the graph should end: interrupted, or an upload failed.
    bool should_abort() const { return interrupted_.load() || failed_.load(); }

    // --- executing predictions: null, or what decode graphs built from now on do
    speculation * speculating() { return speculates_ ? speculation_.get() : nullptr; }
    void          set_speculation(std::unique_ptr<speculation> how) { speculation_ = std::move(how); }
    void          set_speculating(bool on) { speculates_ = on; } // between graphs
    int           n_parallel() const { return n_parallel_; }
    // While a graph is built: what replaced choices have left without a reader, as far as is known.
    std::vector<ggml_tensor *> & unused() { return unused_; }

    // --- callers
    void        interrupt();
    tap_box &   taps() { return taps_; }
    trace_log & trace() { return trace_; }
    std::string reset();
    void        fail(const std::string & line);
    int         prefetch(int block, const int32_t * experts, int n);
    spo_stats   stats();
    std::string check();

private:
    using lock = std::unique_lock<std::mutex>;

    void  read_layout(const spo_params & params);
    void  open_devices(const spo_params & params);
    void  pin(uint64_t most);
    void  make_pools(const spo_params & params);
    void  ask(layer_step & step, int layer, const id_view & ids); // under the lock
    bool  request_missing(layer_step & step, pinned & wanted);    // under the lock
    void  hold(layer_step & step, const pinned & wanted);         // under the lock
    int   share_misses(int misses);                               // under the lock
    void  measure(const layer_step & step);                       // under the lock
    void  judge_predictions(const layer_step & step);             // under the lock
    float least_precision() const;                                // under the lock
    void  drop_upload(int layer, int slot);                       // under the lock
    void  release(layer_step & step);                             // under the lock
    void  pass(int layer);                                        // under the lock
    void  drop_adoption();                                        // under the lock
    void  adopt(const moe_layer & layer, const id_view & ids);    // under the lock
    void  copy_adopted(const matrix & m, lock & held);
    bool  copy(bank & to, int i, const bank & from, int j, const matrix & m, int expert); // false: failed
    void  fail_upload(const matrix & m, int expert, const std::exception & e);
    // Under the lock; the slot or -1. Urgent: before all predictions.
    int  start_upload(int layer, int expert, bool predicted, bool urgent);
    void enqueue(int layer, int expert, int slot, bool urgent); // under the lock
    // Any thread, without the lock: `n` matrices from `m` on, all in one read, of one expert.
    void fill_slot(const matrix & m, int n, int expert, int slot);
    // A bank's experts [i, i + count) are one piece of what is read.
    struct target {
        bank * to;
        int    i;
        int    count;
    };
    bool fill(const target * targets, int n, const matrix & m, int file, uint64_t offset,
              int expert); // false: failed or given up
    void wait(lock & held, uint64_t & stall_ns, const std::function<bool()> & done);

    void fill_stage(const matrix & m, const std::vector<uint8_t> & needed); // under the lock
    void stage_read(const matrix & m, int expert, int count);
    void stage_copy(const matrix & m, int expert, int slot);
    void stage_landed(const matrix & m, int expert, int count, bool done);

    std::vector<matrix>                     matrices_;
    std::vector<moe_layer>                  layers_;
    std::unordered_map<std::string, int>    by_name_;
    std::unordered_map<int, int>            by_block_;
    std::vector<ggml_backend_buffer_type_t> bufts_; // [matrix]
    int                                     repacked_ = 0;
    int                                     n_parallel_;
    bool                                    forget_; // nothing stays from one layer to the next but predictions
    miss_mode                               misses_;
    std::unique_ptr<miss_branch>            branch_;
    file_source                             source_;
    std::vector<std::unique_ptr<device>>    devices_;   // none: main memory
    std::vector<device *>                   device_of_; // [pool]; null: main memory
    std::unique_ptr<pinned_experts>         pinned_;
    modelled_link                           link_;

    std::mutex                        mutex_;
    std::condition_variable           landed_;
    std::vector<slot_pool>            pools_;       // guarded by mutex_ (tables, transfers)
    std::unique_ptr<staging>          staging_;     // guarded by mutex_ (stages)
    std::vector<std::vector<uint8_t>> staged_;      // [matrix][expert] 1: there or on its way
    layer_step                        now_;         // of the layer that runs
    layer_step                        ahead_;       // of the one after it, where predictions are executed
    layer_step                        tail_;        // of the last layer of the graph before, on another device
    std::vector<prediction>           predictions_; // [layer]
    std::vector<pinned>               adopted_;     // slots that a prompt's layer is filling
    spo_stats                         stats_{};
    std::string                       error_;
    int                               acquired_    = -2; // the layer that last had its experts
    uint64_t                          acquired_ns_ = 0;
    float                             window_us_   = 0; // moving averages, see least_precision
    float                             copy_us_     = 0;
    float                             upload_us_   = 0; // the same of an expert that was waited for ...
    float                             cpu_us_      = 0; // ... and of one that the CPU computed, see cpu_share
    int                               without_cpu_ = 0, without_upload_ = 0; // steps with misses since the last one
    uint64_t                          landed_ns_ = 0; // when the newest upload that is waited for was complete
    uint64_t                          cpu_ns_    = 0; // when the CPU began
    uint64_t                          next_id_   = 1;
    int                               in_flight_ = 0; // copies queued or running

    tap_box                       taps_;
    std::unique_ptr<speculation>  speculation_;
    bool                          speculates_ = false;
    std::vector<ggml_tensor *>    unused_;
    trace_log                     trace_;
    std::atomic<bool>             interrupted_{ false };
    std::atomic<bool>             failed_{ false };
    std::unique_ptr<upload_queue> queue_; // last: joins before anything it uses goes
};

} // namespace spo
