#include "check.h"
#include "ggml-backend.h"
#include "misses.h"

using namespace spo;

TEST(misses_are_shared_so_that_both_sides_are_done_soonest) {
    CHECK(cpu_share(miss_mode::upload, 8, 100, 1) == 0);
    CHECK(cpu_share(miss_mode::cpu, 8, 1, 100) == 8);
    CHECK(cpu_share(miss_mode::split, 8, 100, 100) == 4);
    CHECK(cpu_share(miss_mode::split, 8, 300, 100) == 6); // 2 x 300 beside 6 x 100
    CHECK(cpu_share(miss_mode::automatic, 8, 1, 100) == 0);
    CHECK(cpu_share(miss_mode::automatic, 8, 100, 1) == 8);
}

TEST(a_split_gives_either_side_something_and_one_miss_to_the_faster) {
    CHECK(cpu_share(miss_mode::split, 8, 1, 100) == 1);
    CHECK(cpu_share(miss_mode::split, 8, 100, 1) == 7);
    CHECK(cpu_share(miss_mode::split, 1, 100, 1) == 1);
    CHECK(cpu_share(miss_mode::split, 1, 1, 100) == 0);
    CHECK(cpu_share(miss_mode::split, 0, 1, 1) == 0);
}

TEST(what_was_not_measured_yet_is_tried) {
    CHECK(cpu_share(miss_mode::automatic, 1, 100, 0) == 1);
    CHECK(cpu_share(miss_mode::automatic, 1, 0, 100) == 0);
    CHECK(cpu_share(miss_mode::split, 8, 0, 0) == 4);
}

namespace {

ggml_tensor * op_of(ggml_context * ctx, ggml_tensor * a) {
    const auto nothing = [](ggml_tensor *, int, int, void *) {};
    return ggml_custom_4d(ctx, a->type, a->ne[0], a->ne[1], a->ne[2], a->ne[3], &a, 1, nothing, 1, nullptr);
}

} // namespace

TEST(a_branch_repeats_what_lies_between_products_and_refuses_what_it_cannot) {
    const ggml_init_params params = { size_t(1) << 20, nullptr, /*no_alloc*/ false };
    const context_ptr      holder(ggml_init(params));
    ggml_context *         ctx     = holder.get();
    ggml_tensor *          w       = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 8, 8, 4);
    ggml_tensor *          x       = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 8, 1);
    ggml_tensor *          ids     = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, 1);
    ggml_tensor *          weights = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, 2, 1);
    miss_branch            branch(nullptr, nullptr);
    const auto             begin = [&] { branch.begin(0, { x, ids, weights, x, ids, weights, ids, ids }); };

    begin();
    ggml_tensor * product = ggml_mul_mat_id(ctx, w, ggml_reshape_3d(ctx, x, 8, 1, 1), ids);
    branch.product(product, w);
    ggml_tensor * half = ggml_view_3d(ctx, product, 4, 2, 1, product->nb[1], product->nb[2], 4 * sizeof(float));
    ggml_tensor * last = branch.finish(ctx, ggml_scale(ctx, half, 2.0f), w);
    CHECK(last && last->op == GGML_OP_CUSTOM);
    const ggml_tensor * scaled = last->src[1];
    CHECK(scaled->op == GGML_OP_SCALE && reinterpret_cast<const float *>(scaled->op_params)[0] == 2.0f);
    CHECK(scaled->src[0]->op == GGML_OP_VIEW && scaled->src[0]->view_offs == 4 * sizeof(float));
    CHECK(scaled->src[0]->view_src != product && scaled->src[0]->view_src->op == GGML_OP_CUSTOM);

    begin();
    branch.product(product, w);
    CHECK(branch.finish(ctx, op_of(ctx, product), w) == nullptr); // whose operation knows what else
    CHECK(branch.finish(ctx, ggml_mul_mat_id(ctx, w, x, ids), w) == nullptr);
    ggml_tensor * input = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 8, 2, 1); // in no buffer: a graph's input
    CHECK(branch.finish(ctx, ggml_add(ctx, product, input), w) == nullptr);
}
