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

#define SPO_ABI_VERSION 1

typedef struct spo_engine spo_engine;
struct llama_context;

typedef enum {
    SPO_OK          = 0,
    SPO_ERR_INVALID = -1, /* the description contradicts itself */
    SPO_ERR_MEMORY  = -2, /* a bank or a staging buffer could not be allocated */
    SPO_ERR_SOURCE  = -3, /* opening or reading the file failed */
} spo_status;

typedef enum {
    SPO_SOURCE_BUFFERED = 0, /* pread through the page cache, no read-ahead */
    SPO_SOURCE_DIRECT   = 1, /* aligned reads around the page cache; buffered where the filesystem refuses */
    SPO_SOURCE_MAPPED   = 2, /* copies from a mapping of the file */
} spo_source;

typedef enum {
    SPO_POLICY_DECAYED = 0, /* least decayed use count leaves */
    SPO_POLICY_LRU     = 1, /* least recently used leaves */
} spo_policy;

/* The matrices of one kind (gate, up, down or gate_up) of one layer: n_expert times [ne0, ne1]. */
typedef struct {
    const char * name;  /* tensor name, the key by which graphs are recognised */
    int32_t      layer; /* block number */
    int32_t      pool;  /* index into pools */
    int32_t      type;  /* enum ggml_type */
    int32_t      n_expert;
    int64_t      ne0;  /* row length */
    int64_t      ne1;  /* rows */
    int32_t      file; /* index into files */
    int32_t      reserved;
    uint64_t     offset;       /* byte of expert 0 in that file */
    uint64_t     expert_bytes; /* distance between two experts */
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
    int32_t              repack;       /* 1: keep weights in the layout llama.cpp would choose for this CPU */
    double               link_rate;    /* modelled link, bytes per second; 0: none */
    double               link_latency; /* modelled link, seconds per upload */
} spo_params;

typedef struct {
    uint64_t requests;       /* experts asked for while decoding, distinct per layer and step */
    uint64_t hits;           /* of these, resident before they were asked for */
    uint64_t uploads;        /* experts brought into slots */
    uint64_t uploaded_bytes; /* into slots and staging, demand and predicted */
    uint64_t staged_bytes;   /* of these, through staging (prompts) */
    uint64_t predicted;      /* predicted uploads accepted */
    uint64_t wasted_bytes;   /* predicted uploads that were evicted unused */
    uint64_t stall_ns;       /* compute thread waiting for uploads, decoding and prompts */
    uint64_t bank_bytes;     /* memory of slots */
    uint64_t staging_bytes;  /* memory of staging */
    int32_t  source;         /* spo_source really in use */
    int32_t  repacked;       /* matrices kept in a repacked layout */
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

/* Queue predicted uploads for a layer, most certain first. Already resident or queued ones are
 * ignored, and nothing warm is evicted. Returns how many were accepted. */
SPO_API int32_t spo_engine_prefetch(spo_engine * engine, int32_t layer, const int32_t * experts, int32_t n);

SPO_API void spo_engine_get_stats(spo_engine * engine, spo_stats * out);

/* Invariants of every slot table; SPO_OK or SPO_ERR_INVALID with the line in spo_engine_reset. For tests and idle time.
 */
SPO_API spo_status spo_engine_check(spo_engine * engine);

#ifdef __cplusplus
}
#endif

#endif
