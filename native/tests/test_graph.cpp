// Whole graphs through libllama: the model in SPECULOE_TEST_MODEL with and without slots, while
// another thread predicts at random. One compute thread, so that a sanitizer need not know OpenMP.
#include "check.h"
#include "gguf.h"
#include "hook.h"
#include "llama.h"
#include "speculoe/speculoe.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>

namespace {

struct described {
    std::string              path;
    std::vector<std::string> names;
    std::vector<spo_matrix>  matrices;
    int                      n_layers = 0;

    explicit described(const char * file) : path(file) {
        ggml_context *   meta   = nullptr;
        gguf_init_params params = { /*no_alloc*/ true, &meta };
        gguf_context *   gguf   = gguf_init_from_file(file, params);
        CHECK(gguf && meta);
        std::map<int, std::vector<spo_matrix>> by_layer;
        names.reserve(size_t(gguf_get_n_tensors(gguf)));
        for (const char * kind : { "gate_up", "up", "gate", "down" }) {
            for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
                const std::string name  = gguf_get_tensor_name(gguf, i);
                int               block = -1;
                if (std::sscanf(name.c_str(), "blk.%d.", &block) != 1 ||
                    name != "blk." + std::to_string(block) + ".ffn_" + kind + "_exps.weight") {
                    continue;
                }
                names.push_back(name);
                const ggml_tensor * t = ggml_get_tensor(meta, name.c_str());
                spo_matrix          m{};
                m.name         = names.back().c_str();
                m.layer        = block;
                m.type         = t->type;
                m.n_expert     = int32_t(t->ne[2]);
                m.ne0          = t->ne[0];
                m.ne1          = t->ne[1];
                m.offset       = gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i);
                m.expert_bytes = t->nb[2];
                m.slot_stride  = m.expert_bytes;
                m.slot_offset  = m.offset;
                by_layer[m.layer].push_back(m);
            }
        }
        for (auto & [layer, list] : by_layer) {
            for (spo_matrix & m : list) {
                m.pool = n_layers;
                matrices.push_back(m);
            }
            n_layers += 1;
        }
        gguf_free(gguf);
        ggml_free(meta);
    }

    spo_engine * engine(int n_slots, int misses) const {
        const char *               file = path.c_str();
        const std::vector<int32_t> pools(size_t(n_layers), n_slots);
        spo_params                 params{};
        params.files      = &file;
        params.n_files    = 1;
        params.matrices   = matrices.data();
        params.n_matrices = int32_t(matrices.size());
        params.pools      = pools.data();
        params.n_pools    = n_layers;
        params.n_used     = 2;
        params.n_staging  = 2;
        params.half_life  = 16;
        params.n_workers  = 2;
        params.n_parallel = 1;
        params.repack     = misses == SPO_MISSES_UPLOAD; // the CPU computes what lies in the file
        params.misses     = misses;
        char         error[256];
        spo_engine * out = nullptr;
        CHECK(spo_engine_new(&params, &out, error, sizeof(error)) == SPO_OK);
        return out;
    }
};

llama_context * context(llama_model * model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 256;
    params.n_threads = params.n_threads_batch = 1;
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

std::vector<float> answer(llama_model * model, llama_context * ctx) {
    const int                n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<float>       logits;
    std::vector<llama_token> tokens;
    for (int i = 0; i < 24; ++i) {
        tokens.push_back(10 + i * 7);
    }
    for (int step = 0; step < 12; ++step) {
        CHECK(llama_decode(ctx, llama_batch_get_one(tokens.data(), int32_t(tokens.size()))) == 0);
        const float * row = llama_get_logits_ith(ctx, -1);
        logits.insert(logits.end(), row, row + n_vocab);
        tokens = { llama_token(std::max_element(row, row + n_vocab) - row) };
    }
    return logits;
}

using model_ptr = std::unique_ptr<llama_model, decltype(&llama_model_free)>;

model_ptr load(const char * path, bool repack) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = 0;
    params.use_extra_bufts    = repack;
    model_ptr model(llama_model_load_from_file(path, params), llama_model_free);
    CHECK(model);
    return model;
}

void expect_equal_logits(int misses) {
    const char * path = std::getenv("SPECULOE_TEST_MODEL");
    CHECK(path);
    const described          file(path);
    const model_ptr          model    = load(path, misses == SPO_MISSES_UPLOAD);
    llama_context *          plain    = context(model.get());
    const std::vector<float> expected = answer(model.get(), plain);
    llama_free(plain);

    for (const int n_slots : { 2, 5, 8 }) {
        spo_engine *      engine = file.engine(n_slots, misses);
        llama_context *   ctx    = context(model.get());
        std::atomic<bool> stop{ false };
        spo_engine_attach(engine, ctx);
        std::thread              guesser([&] {
            std::mt19937 random(1);
            while (!stop) {
                const int32_t guess = int32_t(random() % 8);
                spo_engine_prefetch(engine, int32_t(random() % 4), &guess, 1);
            }
        });
        const std::vector<float> got = answer(model.get(), ctx);
        stop                         = true;
        guesser.join();
        CHECK(got.size() == expected.size() &&
              std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0);
        CHECK(spo_engine_check(engine) == SPO_OK);
        spo_stats stats;
        spo_engine_get_stats(engine, &stats);
        CHECK((stats.cpu_experts > 0) == (misses != SPO_MISSES_UPLOAD && stats.hits < stats.requests));
        spo_engine_detach(engine, ctx);
        llama_free(ctx);
        spo_engine_free(engine);
    }
}

} // namespace

TEST(graphs_with_slots_give_the_same_logits_bit_for_bit) { expect_equal_logits(SPO_MISSES_UPLOAD); }

TEST(misses_computed_where_they_lie_give_the_same_logits_bit_for_bit) {
    for (const int misses : { SPO_MISSES_CPU, SPO_MISSES_SPLIT, SPO_MISSES_AUTO }) {
        expect_equal_logits(misses);
    }
}
