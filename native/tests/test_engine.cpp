// The engine without graphs: a file of random bytes, random ids, and a look into the banks.
#include "check.h"
#include "engine.h"
#include "temp_file.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

using namespace spo;

namespace {

constexpr int    n_layers = 3, n_expert = 12, n_used = 3;
constexpr size_t rows = 4, row = 64, expert_bytes = rows * row * sizeof(float);

struct fixture {
    temp_file                file{ size_t(n_layers) * 3 * n_expert * expert_bytes + 77 };
    std::vector<std::string> names;
    std::vector<spo_matrix>  matrices;
    std::unique_ptr<engine>  made;

    explicit fixture(std::vector<int32_t> pools, int n_staging = 1, int source = SPO_SOURCE_BUFFERED) {
        const char * kinds[] = { "up", "gate", "down" };
        names.reserve(n_layers * 3);
        for (int l = 0; l < n_layers; ++l) {
            for (int k = 0; k < 3; ++k) {
                names.push_back("blk." + std::to_string(l) + ".ffn_" + kinds[k] + "_exps.weight");
                spo_matrix m{};
                m.name         = names.back().c_str();
                m.layer        = l;
                m.pool         = pools.size() == 1 ? 0 : l;
                m.type         = GGML_TYPE_F32;
                m.n_expert     = n_expert;
                m.ne0          = row;
                m.ne1          = rows;
                m.offset       = 77 + uint64_t(l * 3 + k) * n_expert * expert_bytes;
                m.expert_bytes = expert_bytes;
                m.slot_stride  = m.expert_bytes;
                m.slot_offset  = m.offset;
                matrices.push_back(m);
            }
        }
        const char * path = file.path.c_str();
        spo_params   params{};
        params.files      = &path;
        params.n_files    = 1;
        params.matrices   = matrices.data();
        params.n_matrices = int32_t(matrices.size());
        params.pools      = pools.data();
        params.n_pools    = int32_t(pools.size());
        params.n_used     = n_used;
        params.n_staging  = n_staging;
        params.source     = source;
        params.half_life  = 16;
        params.n_workers  = 2;
        params.n_parallel = 2;
        made              = std::make_unique<engine>(params);
    }

    const matrix & at(int layer, int position) { return *made->find(names[layer * 3 + position].c_str()); }

    bool holds(const void * memory, int layer, int position, int expert) {
        const spo_matrix & m = matrices[layer * 3 + position];
        return std::memcmp(memory, file.bytes.data() + m.offset + uint64_t(expert) * expert_bytes, expert_bytes) == 0;
    }

    std::vector<int32_t> acquire(int layer, std::vector<int32_t> ids) {
        std::vector<int32_t> slots(ids.size(), -1);
        const int64_t        n_tokens = int64_t(ids.size()) / n_used;
        const id_view        view{ reinterpret_cast<const char *>(ids.data()), n_used, n_tokens, 4, 4 * n_used };
        made->request(layer, view);
        made->acquire(layer, view, slots.data());
        return slots;
    }

    void stream(int layer, int position, const std::vector<int32_t> & ids) {
        const int64_t n_tokens = int64_t(ids.size()) / n_used;
        made->stream(at(layer, position),
                     { reinterpret_cast<const char *>(ids.data()), n_used, n_tokens, 4, 4 * n_used });
    }
};

std::vector<int32_t> distinct(std::mt19937 & random, int tokens) {
    std::vector<int32_t> ids;
    for (int t = 0; t < tokens; ++t) {
        std::vector<int32_t> all(n_expert);
        for (int e = 0; e < n_expert; ++e) {
            all[e] = e;
        }
        std::shuffle(all.begin(), all.end(), random);
        ids.insert(ids.end(), all.begin(), all.begin() + n_used);
    }
    return ids;
}

void decode_and_look(fixture & f, std::mt19937 & random, int tokens) {
    for (int layer = 0; layer < n_layers; ++layer) {
        const std::vector<int32_t> ids   = distinct(random, tokens);
        const std::vector<int32_t> slots = f.acquire(layer, ids);
        for (size_t i = 0; i < ids.size(); ++i) {
            for (int p = 0; p < 3; ++p) {
                slot_pool & pool = f.made->pool_of(f.at(layer, p));
                CHECK(slots[i] >= 0 && slots[i] < pool.table.size());
                CHECK(f.holds(pool.banks[p].plain(slots[i]), layer, p, ids[i]));
            }
        }
    }
}

void prompt_and_look(fixture & f, std::mt19937 & random, int tokens) {
    for (int layer = 0; layer < n_layers; ++layer) {
        const std::vector<int32_t> ids = distinct(random, tokens);
        for (int p = 0; p < 3; ++p) {
            f.stream(layer, p, ids);
            for (const int32_t id : ids) {
                CHECK(f.holds(f.made->stages().bank_of(f.at(layer, p).index).plain(id), layer, p, id));
            }
        }
    }
}

} // namespace

TEST(what_a_step_asks_for_is_there_whatever_the_pools) {
    for (const std::vector<int32_t> & pools : { std::vector<int32_t>{ 3 }, { 7 }, { 36 }, { 3, 5, 12 } }) {
        for (const int source : { SPO_SOURCE_BUFFERED, SPO_SOURCE_DIRECT, SPO_SOURCE_MAPPED }) {
            fixture      f(pools, 1, source);
            std::mt19937 random(3);
            for (int step = 0; step < 60; ++step) {
                decode_and_look(f, random, 1);
                CHECK(f.made->check() == "");
            }
            const spo_stats stats = f.made->stats();
            CHECK(stats.requests == 60u * n_layers * n_used && stats.hits <= stats.requests);
            CHECK(stats.uploads * 3 * expert_bytes == stats.uploaded_bytes);
        }
    }
}

TEST(prompts_and_decoding_take_turns) {
    for (const int n_staging : { 1, 2 }) {
        fixture      f({ 4, 5, 6 }, n_staging);
        std::mt19937 random(4);
        for (int turn = 0; turn < 20; ++turn) {
            prompt_and_look(f, random, 5);
            for (int step = 0; step < 4; ++step) {
                decode_and_look(f, random, 1);
            }
            CHECK(f.made->check() == "");
        }
    }
}

TEST(a_prompt_fills_empty_slots_and_evicts_nobody) {
    fixture              f({ 6, 6, 6 });
    std::mt19937         random(5);
    std::vector<int32_t> warm = { 0, 1, 2 };
    f.acquire(0, warm);
    prompt_and_look(f, random, 8);
    const uint64_t hits = f.made->stats().hits;
    f.acquire(0, warm);
    CHECK(f.made->stats().hits == hits + 3);
    CHECK(!f.made->pool_of(f.at(0, 0)).table.has_empty());
    decode_and_look(f, random, 1);
}

// Predicts at random until it goes out of scope.
struct random_guesser {
    std::atomic<bool> stop{ false };
    std::thread       thread;

    explicit random_guesser(fixture & f) {
        thread = std::thread([this, &f] {
            std::mt19937 random(6);
            while (!stop) {
                const int32_t guess[] = { int32_t(random() % n_expert), int32_t(random() % n_expert) };
                f.made->prefetch(int(random() % n_layers), guess, 2);
            }
        });
    }
    ~random_guesser() {
        stop = true;
        thread.join();
    }
};

TEST(predictions_from_another_thread_change_no_bytes) {
    for (const std::vector<int32_t> & pools : { std::vector<int32_t>{ 16 }, { 8, 8, 8 } }) {
        fixture f(pools);
        {
            const random_guesser guesser(f);
            std::mt19937         random(7);
            for (int step = 0; step < 150; ++step) {
                decode_and_look(f, random, 1 + step % 2);
                if (step % 10 == 0) {
                    prompt_and_look(f, random, 4);
                }
            }
        }
        CHECK(f.made->check() == "");
        CHECK(f.made->stats().predicted > 0);
    }
}

TEST(what_is_asked_for_ahead_takes_nothing_from_the_layer_that_runs) {
    for (const std::vector<int32_t> & pools : { std::vector<int32_t>{ 3 }, { 5 }, { 7 }, { 36 }, { 3, 5, 12 } }) {
        fixture f(pools);
        {
            const random_guesser guesser(f);
            std::mt19937         random(10);
            for (int step = 0; step < 60; ++step) {
                std::vector<int32_t> ids = distinct(random, 1);
                for (int layer = 0; layer < n_layers; ++layer) {
                    const id_view view{ reinterpret_cast<const char *>(ids.data()), n_used, 1, 4, 4 * n_used };
                    f.made->request(layer, view);
                    const std::vector<int32_t> next = distinct(random, 1);
                    if (layer + 1 < n_layers && step % 5 != 4) { // now and then nobody asks ahead
                        f.made->request_ahead(
                            layer + 1, { reinterpret_cast<const char *>(next.data()), n_used, 1, 4, 4 * n_used });
                    }
                    std::vector<int32_t> slots(n_used, -1);
                    f.made->acquire(layer, view, slots.data());
                    for (int i = 0; i < n_used; ++i) {
                        for (int p = 0; p < 3; ++p) {
                            CHECK(f.holds(f.made->pool_of(f.at(layer, p)).banks[p].plain(slots[i]), layer, p, ids[i]));
                        }
                    }
                    ids = next;
                }
                if (step % 10 == 0) {
                    prompt_and_look(f, random, 4);
                }
            }
        }
        CHECK(f.made->check() == "");
    }
}

TEST(a_failed_read_ends_the_step_and_the_next_one_works) {
    fixture      f({ 4, 4, 4 });
    std::mt19937 random(8);
    decode_and_look(f, random, 1);
    f.file.truncate(100);
    for (int i = 0; i < 20 && !f.made->should_abort(); ++i) {
        f.acquire(i % n_layers, distinct(random, 1));
    }
    CHECK(f.made->should_abort());
    CHECK(f.made->reset().find("layer ") == 0 && !f.made->should_abort());
    f.stream(0, 0, distinct(random, 4));
    CHECK(f.made->should_abort());
    f.made->reset();
    CHECK(f.made->check() == "");
    std::FILE * again = std::fopen(f.file.path.c_str(), "wb");
    CHECK(again && std::fwrite(f.file.bytes.data(), 1, f.file.bytes.size(), again) == f.file.bytes.size());
    CHECK(std::fclose(again) == 0);
    for (int step = 0; step < 20; ++step) {
        decode_and_look(f, random, 1);
        prompt_and_look(f, random, 3);
    }
    CHECK(f.made->check() == "");
}

TEST(an_interrupted_engine_waits_for_nothing_and_starts_afresh_after_reset) {
    fixture f({ 4, 4, 4 });
    f.made->interrupt();
    f.acquire(0, { 0, 1, 2 });
    CHECK(f.made->should_abort());
    f.made->reset();
    std::mt19937 random(9);
    decode_and_look(f, random, 1);
}

TEST(descriptions_that_contradict_themselves_are_refused) {
    for (const std::vector<int32_t> & pools : { std::vector<int32_t>{ 0 }, { 4, 0, 4 } }) {
        try {
            fixture f(pools);
            CHECK(!"accepted");
        } catch (const std::invalid_argument &) {
        }
    }
}
