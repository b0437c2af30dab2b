#include "check.h"
#include "gate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

using namespace spo;

namespace {

// A gate over one input of exactly 1: the router's numbers are the logits.
struct table {
    std::vector<float> logits, norm{ 1 };
    spo_gate_params    params{};

    explicit table(std::vector<float> values, int n_used = 1) : logits(std::move(values)) {
        params.router   = logits.data();
        params.norm     = norm.data();
        params.n_expert = int32_t(logits.size());
        params.n_embd   = 1;
        params.n_used   = n_used;
        params.n_ids    = params.n_expert;
        params.gating   = SPO_GATING_SOFTMAX_WEIGHT;
    }
};

struct answer {
    std::vector<int32_t> ids;
    std::vector<float>   weights, probs;
    bool                 ok;
};

answer ask(const spo_gate_params & params, const std::vector<float> & residual, const float * add = nullptr) {
    gate   asked(params);
    answer a{ std::vector<int32_t>(params.n_ids, -1), std::vector<float>(params.n_used, -1),
              std::vector<float>(params.n_expert, -1), false };
    a.ok = asked.route(residual.data(), add, a.ids.data(), a.weights.data(), a.probs.data());
    return a;
}

bool near(float a, float b) { return std::fabs(a - b) < 1e-5f; }

std::string refusal(const spo_gate_params & params) {
    try {
        gate made(params);
        return "";
    } catch (const std::invalid_argument & e) {
        return e.what();
    }
}

} // namespace

TEST(a_gate_ranks_by_logits_and_weighs_the_chosen_alone) {
    table        t({ 0, 2, 1, -1 }, 2);
    const answer a = ask(t.params, { 1 });
    CHECK(a.ok);
    CHECK((a.ids == std::vector<int32_t>{ 1, 2, 0, 3 }));
    CHECK(near(a.weights[0], 1 / (1 + std::exp(-1.0f))));
    CHECK(near(a.weights[0] + a.weights[1], 1));
    CHECK(near(a.probs[0] + a.probs[1] + a.probs[2] + a.probs[3], 1));
}

TEST(every_gating_gives_its_function_of_the_logit) {
    table t({ 0, 2, 30 }, 3);
    t.params.gating = SPO_GATING_SIGMOID;
    CHECK(near(ask(t.params, { 1 }).probs[1], 1 / (1 + std::exp(-2.0f))));
    t.params.gating = SPO_GATING_SQRT_SOFTPLUS;
    CHECK(near(ask(t.params, { 1 }).probs[0], std::sqrt(std::log(2.0f))));
    CHECK(near(ask(t.params, { 1 }).probs[2], std::sqrt(30.0f)));
    t.params.gating = SPO_GATING_SOFTMAX;
    CHECK(near(ask(t.params, { 1 }).weights[0], 1));
}

TEST(a_selection_bias_changes_ids_and_no_weight) {
    table t({ 0, 2, 1 }, 1);
    t.params.gating               = SPO_GATING_SIGMOID;
    const std::vector<float> bias = { 5, 0, 0 };
    t.params.selection_bias       = bias.data();
    const answer a                = ask(t.params, { 1 });
    CHECK((a.ids == std::vector<int32_t>{ 0, 1, 2 }));
    CHECK(near(a.weights[0], 0.5f));
    t.params.selection = SPO_SELECT_LOGITS; // llama4 has no bias to add
    CHECK((ask(t.params, { 1 }).ids == std::vector<int32_t>{ 1, 2, 0 }));
}

TEST(only_the_groups_with_the_two_best_experts_count) {
    // Sums of two: 9, 10, 8, -1.
    table t({ 9, 0, 5, 5, 4, 4, -1, 0 }, 4);
    t.params.n_groups      = 4;
    t.params.n_groups_used = 2;
    const answer         a = ask(t.params, { 1 });
    std::vector<int32_t> first(a.ids.begin(), a.ids.begin() + 4);
    std::sort(first.begin(), first.end());
    CHECK((first == std::vector<int32_t>{ 0, 1, 2, 3 }));
    CHECK(a.ids[0] == 0);
}

TEST(weights_are_made_to_sum_to_the_scale) {
    table t({ -3, -3, -200 }, 2);
    t.params.gating       = SPO_GATING_SIGMOID;
    t.params.norm_weights = 1;
    t.params.scale        = 2.5f;
    const answer a        = ask(t.params, { 1 });
    CHECK(near(a.weights[0] + a.weights[1], 2.5f));
    table none({ -200, -200, -200 }, 2); // their sum is 0 in float
    none.params.gating       = SPO_GATING_SIGMOID;
    none.params.norm_weights = 1;
    CHECK(ask(none.params, { 1 }).weights[0] == 0);
}

TEST(logits_are_the_router_times_the_norm_of_the_sum) {
    std::mt19937                    random(1);
    std::normal_distribution<float> normal;
    const auto                      some = [&](size_t n) {
        std::vector<float> v(n);
        std::generate(v.begin(), v.end(), [&] { return normal(random); });
        return v;
    };
    for (const int n_embd : { 1, 3, 15, 16, 17, 64, 100 }) {
        for (const int n_expert : { 1, 3, 4, 5, 9 }) {
            const auto router = some(size_t(n_embd) * n_expert), norm = some(n_embd), norm_bias = some(n_embd),
                       bias = some(n_expert), residual = some(n_embd), add = some(n_embd);
            spo_gate_params p{};
            p.router    = router.data();
            p.norm      = norm.data();
            p.norm_bias = norm_bias.data();
            p.bias      = bias.data();
            p.eps       = 1e-5f;
            p.n_expert  = n_expert;
            p.n_embd    = n_embd;
            p.n_used = p.n_ids   = n_expert;
            p.gating             = SPO_GATING_SQRT_SOFTPLUS; // one to one: probabilities tell logits
            const answer a       = ask(p, residual, add.data());
            double       squares = 0;
            for (int i = 0; i < n_embd; ++i) {
                squares += std::pow(double(residual[i]) + double(add[i]), 2);
            }
            for (int e = 0; e < n_expert; ++e) {
                double logit = bias[e];
                for (int i = 0; i < n_embd; ++i) {
                    const double x = (residual[i] + add[i]) / std::sqrt(squares / n_embd + 1e-5);
                    logit += router[size_t(e) * n_embd + i] * (x * norm[i] + norm_bias[i]);
                }
                const double expected = std::sqrt(logit > 20 ? logit : std::log1p(std::exp(logit)));
                CHECK(std::fabs(a.probs[e] - expected) < 1e-3);
            }
        }
    }
}

TEST(what_is_not_finite_is_refused_before_it_is_sorted) {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    table       t(std::vector<float>(64, 1), 2);
    for (const float bad : { nan, inf, -inf }) {
        const answer a = ask(t.params, { bad });
        CHECK(!a.ok);
        CHECK(a.ids[0] == -1 && a.weights[0] == -1 && a.probs[0] == -1);
    }
    CHECK(ask(t.params, { 1 }).ok);
    t.logits[40] = nan; // the router's own
    CHECK(!ask(t.params, { 1 }).ok);
    const std::vector<float> bias(64, nan);
    t.params.bias = bias.data();
    CHECK(refusal(t.params) == "a gate's bias is not finite");
}

TEST(probabilities_may_be_left_out) {
    table   t({ 0, 2, 1 });
    gate    asked(t.params);
    int32_t ids[3];
    float   weight = 0, one = 1;
    CHECK(asked.route(&one, nullptr, ids, &weight, nullptr));
    CHECK(ids[0] == 1 && weight == 1);
}

TEST(a_gate_that_contradicts_itself_says_so) {
    const auto with = [](auto change) {
        table t({ 0, 1, 2, 3 });
        change(t.params);
        return refusal(t.params);
    };
    CHECK(with([](auto &) {}).empty());
    for (const std::string & line : {
             with([](auto & p) { p.router = nullptr; }),
             with([](auto & p) { p.norm = nullptr; }),
             with([](auto & p) { p.n_embd = 0; }),
             with([](auto & p) { p.n_used = 0; }),
             with([](auto & p) { p.n_ids = 5; }),
             with([](auto & p) { p.n_used = 3, p.n_ids = 2; }),
             with([](auto & p) { p.gating = 0; }),
             with([](auto & p) { p.gating = 5; }),
             with([](auto & p) { p.selection = 3; }),
             with([](auto & p) { p.n_groups = -1; }),
             with([](auto & p) { p.n_groups = 3, p.n_groups_used = 1; }),
             with([](auto & p) { p.n_groups = 4, p.n_groups_used = 1; }),
             with([](auto & p) { p.n_groups = 2, p.n_groups_used = 2; }),
         }) {
        CHECK(!line.empty());
    }
}

TEST(a_network_stands_in_for_the_router) {
    // Inputs of size 1 each; states (1 + 0.5, 1 - 0.5) stay apart through everything that follows.
    const std::vector<float> narrow = { 1, 0, 0, 1 }, embedding = { 0.5f, -0.5f }, ones = { 1, 1 }, none(8);
    const std::vector<float> head = { 0, 1, 1, 0, 1, 1 }, head_bias = { 0, 0, 0.25f }, router(6, NAN);
    spo_gate_mlp             net{};
    net.narrow      = narrow.data();
    net.embedding   = embedding.data();
    net.expand      = none.data();
    net.expand_bias = net.contract = net.contract_bias = net.norm_bias = none.data();
    net.norm                                                           = ones.data();
    net.head                                                           = head.data();
    net.head_bias                                                      = head_bias.data();
    net.width                                                          = 2;
    net.hidden                                                         = 4;
    net.scale                                                          = 2;
    spo_gate_params p{};
    p.router   = router.data();
    p.norm     = ones.data();
    p.n_embd   = 2;
    p.n_expert = p.n_ids = 3;
    p.n_used             = 1;
    p.gating             = SPO_GATING_SOFTMAX_WEIGHT;
    p.mlp                = &net;
    const answer a       = ask(p, { 1, 1 });
    CHECK((a.ids == std::vector<int32_t>{ 1, 2, 0 })); // logits 2 * (-1, 1, 0.25)
    CHECK(std::fabs(std::log(a.probs[1] / a.probs[0]) - 4) < 1e-3);
    CHECK(std::fabs(std::log(a.probs[1] / a.probs[2]) - 1.5) < 1e-3);
    net.head_bias = nullptr;
    CHECK(refusal(p) == "a gate's network lacks an array; all are needed");
    net.hidden = 0;
    CHECK(!refusal(p).empty());
}

TEST(the_c_boundary_hands_back_a_gate_or_one_line) {
    table      t({ 0, 2, 1 });
    spo_gate * gate = nullptr;
    char       error[64];
    CHECK(spo_gate_new(&t.params, &gate, error, sizeof error) == SPO_OK);
    float   one = 1, weight = 0, bad = std::numeric_limits<float>::quiet_NaN();
    int32_t ids[3];
    CHECK(spo_gate_route(gate, &one, nullptr, ids, &weight, nullptr) == SPO_OK);
    CHECK(ids[0] == 1 && ids[1] == 2 && ids[2] == 0);
    CHECK(spo_gate_route(gate, &bad, nullptr, ids, &weight, nullptr) == SPO_ERR_INVALID);
    spo_gate_free(gate);
    t.params.n_used = 0;
    CHECK(spo_gate_new(&t.params, &gate, error, sizeof error) == SPO_ERR_INVALID);
    CHECK(!gate && std::string(error).find("n_used") != std::string::npos);
    CHECK(spo_gate_new(&t.params, &gate, nullptr, 0) == SPO_ERR_INVALID);
}
