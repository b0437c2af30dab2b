/* libspeculoe: expert slots between a GGUF file and ggml graphs.
 *
 * An engine owns the fast-tier memory of one model's routed experts: *pools* of slots that decoding
 * reads, *staging* that prompts stream through, the source they are filled from, and the threads that
 * upload. Attached to a llama_context, it swaps the expert weights of every graph for its own.
 *
 * The boundary is narrow on purpose: plan and policy choice come from the caller (runtime/), tokens
 * never pass here. Handles are opaque, errors are status codes with one line of text, and no C++
 * exception leaves. Strings returned live until the next call on the same engine.
 *
 * Threads: any thread may call any function, but graphs of contexts attached to one engine must not
 * run at the same time (runtime/engine.py holds a lock around llama_decode).
 */
#ifndef SPECULOE_H
#define SPECULOE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define SPO_API __declspec(dllexport)
#else
#define SPO_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define SPO_ABI_VERSION 7

typedef struct spo_engine spo_engine;
struct llama_context;

typedef enum {
    SPO_OK          = 0,
    SPO_ERR_INVALID = -1, /* the description contradicts itself */
    SPO_ERR_MEMORY  = -2, /* a bank or a staging buffer could not be allocated */
    SPO_ERR_SOURCE  = -3, /* opening or reading the file failed */
    SPO_ERR_DEVICE  = -4, /* a device is lost */
} spo_status;

typedef enum {
    SPO_SOURCE_BUFFERED = 0, /* pread through the page cache, no read-ahead */
    SPO_SOURCE_DIRECT   = 1, /* aligned reads around the page cache; buffered where the filesystem refuses */
    SPO_SOURCE_MAPPED   = 2, /* copies from a mapping of the file */
} spo_source;

typedef enum {
    SPO_POLICY_DECAYED = 0, /* least decayed use count leaves */
    SPO_POLICY_LRU     = 1, /* least recently used leaves */
    SPO_POLICY_LEARNED = 2, /* least expected use leaves: the default of runtime/ */
} spo_policy;

/* What decode steps do about experts that are not resident. All but the first compute some where their
 * bytes lie, from llama.cpp's mapping of the file: what is summed is the same, how it is rounded is not. */
typedef enum {
    SPO_MISSES_UPLOAD = 0, /* wait for their upload */
    SPO_MISSES_CPU    = 1, /* the CPU computes them; uploads for later steps are not waited for */
    SPO_MISSES_SPLIT  = 2, /* some of either, so that both are done soonest */
    SPO_MISSES_AUTO   = 3, /* the same, or all of one kind */
} spo_misses;

/* The matrices of one kind (gate, up, down or gate_up) of one layer: n_expert times [ne0, ne1]. */
typedef struct {
    const char * name;  /* tensor name, the key by which graphs are recognised */
    int32_t      layer; /* block number */
    int32_t      pool;  /* index into pools */
    int32_t      type;  /* enum ggml_type */
    int32_t      n_expert;
    int64_t      ne0;          /* row length */
    int64_t      ne1;          /* rows */
    int32_t      file;         /* index into files */
    int32_t      shared;       /* 1: the layer has a shared expert, which may run before the routed ones */
    uint64_t     offset;       /* byte of expert 0 in that file */
    uint64_t     expert_bytes; /* distance between two experts */
    /* Where uploads into slots read from: the same, or a file in which an expert's matrices follow each
     * other, in this order. Prompts stream whole matrices and read `file` always. */
    uint64_t slot_offset;
    uint64_t slot_stride; /* distance between two experts there */
    int32_t  slot_file;
    int32_t  packed; /* 1 in all matrices of a layer: one read fetches an expert */
} spo_matrix;

typedef struct {
    const char * const * files;
    const spo_matrix *   matrices; /* a layer's own in the order graphs use them: up, gate, down or gate_up, down */
    const int32_t *      pools;    /* slots of each pool */
    int32_t              n_files;
    int32_t              n_matrices;
    int32_t              n_pools;
    int32_t              n_used;       /* experts per token (k), the largest of all layers */
    int32_t              n_staging;    /* staging buffers per weight type, 1 or 2 */
    int32_t              source;       /* spo_source */
    int32_t              policy;       /* spo_policy */
    int32_t              half_life;    /* of a use count, in tokens */
    int32_t              n_workers;    /* upload threads, at least 1 */
    int32_t              n_parallel;   /* sequences decoded together; larger batches stream as prompts do */
    int32_t              forget;       /* 1: keep no expert from one layer to the next but predicted ones (bench) */
    int32_t              repack;       /* 1: keep weights in the layout llama.cpp would choose for this CPU */
    int32_t              misses;       /* spo_misses */
    const char *         device;       /* whose memory holds slots and staging, by ggml's name; NULL: main memory */
    double               link_rate;    /* modelled link, bytes per second; 0: none */
    double               link_latency; /* modelled link, seconds per copy */
    uint64_t             pin_bytes;    /* experts kept in memory that the device reads by itself, at most; 0: none */
    const char * const * pool_devices; /* [n_pools] the same for each pool, where they differ; or NULL */
} spo_params;

typedef struct {
    uint64_t requests;                   /* experts asked for while decoding, distinct per layer and step */
    uint64_t hits;                       /* of these, resident before they were asked for */
    uint64_t uploads;                    /* experts brought into slots */
    uint64_t reads;                      /* of the source, for uploads into slots */
    uint64_t uploaded_bytes;             /* into slots and staging, demand and predicted */
    uint64_t staged_bytes;               /* of these, through staging (prompts) */
    uint64_t predicted;                  /* predicted uploads accepted */
    uint64_t wasted_bytes;               /* predicted uploads that were evicted unused */
    uint64_t true_experts;               /* asked for in layers that had a prediction */
    uint64_t true_predicted;             /* of these, predicted */
    uint64_t true_nonresident;           /* of true_experts, not resident when predicted */
    uint64_t true_nonresident_predicted; /* of these, predicted */
    uint64_t predicted_nonresident;      /* predictions of experts not resident then, uploaded or not */
    uint64_t cpu_experts;                /* of requests, not resident and computed by the CPU instead of waited for */
    uint64_t cpu_ns;                     /* that this took */
    uint64_t stall_ns;                   /* compute thread waiting for uploads, decoding and prompts */
    uint64_t window_ns;                  /* from one layer having its experts to the next layer asking for its own */
    uint64_t bank_bytes;                 /* memory of slots */
    uint64_t staging_bytes;              /* memory of staging */
    uint64_t pinned_bytes;               /* experts that uploads take from pinned memory without reading a file */
    int32_t  source;                     /* spo_source really in use */
    int32_t  repacked;                   /* matrices kept in a repacked layout */
    int32_t  pinned;                     /* 1: uploads to a device leave from pinned memory */
    int32_t  overlaps;                   /* 1: uploads to a device run beside its graphs */
} spo_stats;

SPO_API int32_t spo_abi_version(void);

/* On failure *out is NULL and `error` (if not NULL) holds one line. */
SPO_API spo_status spo_engine_new(const spo_params * params, spo_engine ** out, char * error, size_t error_size);

/* Joins the upload threads. Detach every context first. */
SPO_API void spo_engine_free(spo_engine * engine);

/* Graphs of `ctx` use the engine from the next one on; also sets ctx's abort callback, which ends a
 * graph within one node of a cancellation or a failed upload (llama_decode then returns 2). */
SPO_API spo_status spo_engine_attach(spo_engine * engine, struct llama_context * ctx);
SPO_API void       spo_engine_detach(spo_engine * engine, struct llama_context * ctx);

/* Ends the running graph within one node, and every later one until spo_engine_reset. */
SPO_API void spo_engine_interrupt(spo_engine * engine);

/* What went wrong since the last reset, or "". Waits for copies that still run, drops those that are
 * queued, and clears error and interruption: the next graph starts afresh. Not while a graph runs. */
SPO_API const char * spo_engine_reset(spo_engine * engine);

/* The prediction for a layer's next step, most certain first. Starts uploads of what is not resident,
 * behind all demand and into slots on probation, for the ranks that have been right often enough.
 * Returns how many were started. Predict the whole top-k: what it was worth is counted by it. */
SPO_API int32_t spo_engine_prefetch(spo_engine * engine, int32_t layer, const int32_t * experts, int32_t n);

/* From now on decode steps leave taps; n_embd as the model's. Close before freeing the engine. */
SPO_API void spo_tap_open(spo_engine * engine, int32_t n_embd);
SPO_API void spo_tap_close(spo_engine * engine);

/* Waits for the newest tap: residual[n_embd], shared[n_embd], ids[*n_used], weights[*n_used] (room for
 * n_used of spo_params). Returns its layer's block number, -1 after timeout_ms, -2 once closed. */
SPO_API int32_t spo_tap_next(spo_engine * engine, float * residual, float * shared, int32_t * ids, float * weights,
                             int32_t * n_used, int32_t timeout_ms);

SPO_API void spo_engine_get_stats(spo_engine * engine, spo_stats * out);

/* Waits for what `ctx` has sent to its devices. SPO_ERR_DEVICE if one of them fails; then `ctx` must not be used
 * any more, nor freed: its destructor would end the process. */
SPO_API spo_status spo_synchronize(struct llama_context * ctx);

/* 1 if a device, by ggml's name, does not compute any more. Does a little work on it to find out. */
SPO_API int32_t spo_device_is_lost(const char * device);

/* Invariants of every slot table; SPO_OK or SPO_ERR_INVALID with the line in spo_engine_reset. For tests and idle time.
 */
SPO_API spo_status spo_engine_check(spo_engine * engine);

/* A gate is one layer's router with the norm before it: asked with a residual, it says which experts
 * that leads to. It belongs to no engine; one thread at a time may use it. */
typedef struct spo_gate spo_gate;

typedef enum {
    SPO_GATING_SOFTMAX        = 1, /* the numbers of expert_gating_func in a GGUF */
    SPO_GATING_SIGMOID        = 2,
    SPO_GATING_SOFTMAX_WEIGHT = 3, /* selection by logits, softmax over the selected ones alone */
    SPO_GATING_SQRT_SOFTPLUS  = 4,
} spo_gating;

typedef enum {
    SPO_SELECT_PROBS   = 0, /* plus selection_bias; for SOFTMAX_WEIGHT logits stand for probabilities */
    SPO_SELECT_LOGITS  = 1,
    SPO_SELECT_SIGMOID = 2, /* of the logits, whatever the gating */
} spo_selection;

/* A network that estimates router logits, or what a router's product lacks: narrow(input) + embedding,
 * plus contract(silu(expand(.) + expand_bias)) + contract_bias of that, through a layer norm (epsilon
 * SPO_MLP_EPS) and the head. All arrays are needed, and borrowed as those of a gate. */
typedef struct {
    const float * narrow;        /* [width][n_embd] */
    const float * embedding;     /* [width], the layer's own; the rest may serve many layers */
    const float * expand;        /* [hidden][width] */
    const float * expand_bias;   /* [hidden] */
    const float * contract;      /* [width][hidden] */
    const float * contract_bias; /* [width] */
    const float * norm;          /* [width] */
    const float * norm_bias;     /* [width] */
    const float * head;          /* [n_expert][width] */
    const float * head_bias;     /* [n_expert] */
    int32_t       width;
    int32_t       hidden;
    float         scale; /* the layer's own, of the logits */
    int32_t       adds;  /* 1: to the router's product; 0: stands in its place */
} spo_gate_mlp;

#define SPO_MLP_EPS 1e-5f

/* Arrays are borrowed until spo_gate_free. */
typedef struct {
    const float *        router;         /* [n_expert][n_embd] */
    const float *        norm;           /* [n_embd], weighs the RMS norm */
    const float *        norm_bias;      /* [n_embd] or NULL */
    const float *        bias;           /* [n_expert] or NULL, added to logits */
    const float *        selection_bias; /* [n_expert] or NULL, added to what ranks */
    float                eps;
    float                scale; /* of the weights; 0: 1 */
    int32_t              n_expert;
    int32_t              n_embd;
    int32_t              n_used;    /* experts executed per token, which get weights */
    int32_t              n_ids;     /* ids written, n_used to n_expert */
    int32_t              gating;    /* spo_gating */
    int32_t              selection; /* spo_selection */
    int32_t              n_groups;  /* equal runs of experts, of which the best n_groups_used count; 0: no groups */
    int32_t              n_groups_used;
    int32_t              norm_weights; /* 1: weights sum to one before they are scaled */
    const spo_gate_mlp * mlp;          /* or NULL; with it logits are its own, or added to the router's */
} spo_gate_params;

/* On failure *out is NULL and `error` (if not NULL) holds one line. */
SPO_API spo_status spo_gate_new(const spo_gate_params * params, spo_gate ** out, char * error, size_t error_size);
SPO_API void       spo_gate_free(spo_gate * gate);

/* Route RMSNorm(residual + add), `add` may be NULL. Writes ids[n_ids], best first as llama.cpp orders
 * them, weights[n_used], and, if not NULL, probs[n_expert]: what the gating gives each expert without
 * selection bias. Allocates nothing. SPO_ERR_INVALID, and nothing written, if a logit is not finite. */
SPO_API spo_status spo_gate_route(spo_gate * gate, const float * residual, const float * add, int32_t * ids,
                                  float * weights, float * probs);

/* A routing trace, and the slots to run it through. */
typedef struct {
    const int32_t * ids;      /* [n_tokens][n_layers][n_used], -1: not recorded */
    const int32_t * pool_of;  /* [n_layers] */
    const int32_t * pools;    /* slots of each pool */
    int64_t         n_tokens; /* decoded one after another */
    int64_t         n_warm;   /* of these, not counted */
    int32_t         n_layers;
    int32_t         n_used;
    int32_t         n_expert;
    int32_t         n_pools;
    int32_t         policy;    /* spo_policy, or SPO_REPLAY_CLAIRVOYANT */
    int32_t         half_life; /* of a use count, in tokens */
} spo_replay_params;

/* Knows the future: keeps, of what is resident and what was just asked for, what is needed soonest. */
#define SPO_REPLAY_CLAIRVOYANT (-1)

typedef struct {
    uint64_t requests; /* experts asked for, distinct per layer and token */
    uint64_t hits;     /* of these, resident before they were asked for */
    uint64_t uploads;  /* the others */
} spo_replay_counts;

/* What the slots of an engine would have done, without its bytes: same slot tables, same policies. A
 * pool of fewer slots than n_used, which an engine refuses, runs a layer's experts in turn. On failure
 * `error` (if not NULL) holds one line. */
SPO_API spo_status spo_replay(const spo_replay_params * params, spo_replay_counts * out, char * error,
                              size_t error_size);

/* One layer that a native loop predicts. */
typedef struct {
    const spo_gate_params * gate;
    const float *           default_vectors; /* [n_expert][n_embd] of the source, borrowed; or NULL */
    int32_t                 block;           /* number of the layer predicted */
    int32_t                 source;          /* number of the layer whose tap predicts it */
} spo_loop_layer;

/* Predicts from taps that the caller takes, in one call each. One thread at a time. */
typedef struct spo_steps spo_steps;

/* What `layers` holds is borrowed until spo_steps_free. On failure *out is NULL. */
SPO_API spo_status spo_steps_new(const spo_loop_layer * layers, int32_t n, int32_t n_embd, spo_steps ** out,
                                 char * error, size_t error_size);
SPO_API void       spo_steps_free(spo_steps * steps);
/* The prediction that a tap of `block` gives, queued as by spo_engine_prefetch: what that returns, -1 where
 * nothing is predicted from this block, -2 where a logit is not finite. */
SPO_API int32_t spo_steps_take(spo_steps * steps, spo_engine * engine, int32_t block, const float * residual,
                               const float * shared, const int32_t * ids, const float * weights, int32_t n_used);

/* A thread of the library takes the taps, predicts and queues, instead of the caller. One per engine. */
SPO_API spo_status spo_loop_start(spo_engine * engine, const spo_loop_layer * layers, int32_t n, int32_t n_embd,
                                  char * error, size_t error_size);
SPO_API void       spo_loop_stop(spo_engine * engine);

/* Names the layers that can execute their prediction instead of what their router would choose, with the
 * prediction's weights or, with true_weights, the true router's over the predicted experts. Lossy. */
SPO_API spo_status spo_speculation_set(spo_engine * engine, const spo_loop_layer * layers, int32_t n, int32_t n_embd,
                                       int32_t true_weights, char * error, size_t error_size);
/* Whether decode graphs of ctx do so from now on; at first they do not, and prompts never should. Rebuilds
 * the graph. Between graphs only. */
SPO_API void spo_speculation_switch(spo_engine * engine, struct llama_context * ctx, int32_t on);

typedef enum {
    SPO_SPAN_COMPUTE   = 0, /* from a layer having its experts to the next layer asking */
    SPO_SPAN_STALL     = 1, /* the compute thread waiting for uploads of a layer */
    SPO_SPAN_DEMAND    = 2, /* one matrix on its way into a slot */
    SPO_SPAN_PREDICTED = 3, /* the same, before anybody asked */
    SPO_SPAN_STAGED    = 4, /* neighbouring experts of one matrix on their way into staging */
    SPO_SPAN_PREDICT   = 5, /* a prediction judged and queued; `block` is the layer predicted */
    SPO_SPAN_CPU       = 6, /* the CPU computing what is not resident */
} spo_span_kind;

/* Times on the clock that std::chrono::steady_clock reads. */
typedef struct {
    uint64_t begin_ns;
    uint64_t end_ns;
    int32_t  kind; /* spo_span_kind */
    int32_t  block;
    int32_t  expert; /* -1 where it is none's */
    int32_t  reserved;
} spo_span;

/* Keep up to `capacity` spans from now on; 0: none, as at the beginning. */
SPO_API void spo_trace_start(spo_engine * engine, int64_t capacity);
/* Copies out up to n spans in the order they ended and forgets all. Returns how many. */
SPO_API int64_t spo_trace_take(spo_engine * engine, spo_span * out, int64_t n);

#ifdef __cplusplus
}
#endif

#endif
