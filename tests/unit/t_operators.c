/* t_operators.c - tests the operators through a context, on the CPU backend and on another one.  Gradients are compared
 * with finite differences.  Other tests cover parameters whose gradients are overwritten or accumulated, and invalid calls. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#define AMPT_TRAPS
#include "test.h"
#include <math.h>
#include "recording_backend.h"

enum { ROOM = 4096 };

static amp_context *amp;
static float loss_weights[ROOM];        /* the scalar whose gradient is checked: sum of weights times output */

static float noise(int i) { return (float)(((unsigned)i * 2654435761u) >> 8) / 8388608.0f - 1.0f; }
static void fill(float *x, int n, int seed) { for (int i = 0; i < n; i++) x[i] = noise(i + 977 * seed); }

static double scalar(const float *y, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)loss_weights[i] * (double)y[i];
    return sum;
}

/* Central differences of f at x against the gradient dx, along each coordinate, in units of the largest gradient.
 * fp32 outputs carry errors of about 2^-24 of their size, so with step h the difference quotient errs by about
 * 2^-24 / h + h^2; h = 2^-7 balances the two at 1e-4 of the size of the values involved. */
static void check_gradient(const char *what, float *x, const float *dx, int n, double (*f)(void *), void *arg) {
    const double h = 1.0 / 128;
    double largest = 1e-3, worst = 0;
    for (int i = 0; i < n; i++) if (fabs((double)dx[i]) > largest) largest = fabs((double)dx[i]);
    for (int i = 0; i < n; i++) {
        float keep = x[i];
        x[i] = (float)(keep + h); double up = f(arg);
        x[i] = (float)(keep - h); double down = f(arg);
        x[i] = keep;
        double error = fabs((up - down) / (2 * h) - (double)dx[i]) / largest;
        if (error > worst) worst = error;
    }
    CHECK_MSG(worst < 2e-3, "%s: gradient is off by %g of the largest", what, worst);
}

static amp_param make_param(const char *name, float *w, float *dw, int64_t rows, int64_t cols) {
    amp_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.weight = cols ? amp_tensor2(w, AMP_F32, rows, cols) : amp_tensor1(w, AMP_F32, rows);
    if (dw) p.grad = cols ? amp_tensor2(dw, AMP_F32, rows, cols) : amp_tensor1(dw, AMP_F32, rows);
    return p;
}

/* ---- linear */

static float x[ROOM], y[ROOM], pre[ROOM], w[ROOM], b[ROOM], dy[ROOM], dx[ROOM], dw[ROOM], db[ROOM];

static double run_linear(void *arg) {
    amp_linear_op *op = (amp_linear_op *)arg;
    CHECK_OK(amp_linear(amp, op));
    return scalar((const float *)op->y.data, (int)amp_tensor_count(&op->y));
}

static void linear_case(amp_activation_kind act) {
    amp_param weight = make_param("w", w, dw, 5, 3), bias = make_param("b", b, db, 5, 0);
    amp_linear_op op;
    fill(x, 21, 1); fill(w, 15, 2); fill(b, 5, 3);
    memset(&op, 0, sizeof op);
    op.x = amp_tensor2(x, AMP_F32, 7, 3);
    op.y = amp_tensor2(y, AMP_F32, 7, 5);
    op.pre = amp_tensor2(pre, AMP_F32, 7, 5);
    op.weight = &weight; op.bias = &bias; op.act = act;
    run_linear(&op);
    memcpy(dy, loss_weights, sizeof dy);
    op.dy = amp_tensor2(dy, AMP_F32, 7, 5);
    op.dx = amp_tensor2(dx, AMP_F32, 7, 3);
    CHECK_OK(amp_linear_backward(amp, &op));
    check_gradient("linear dx", x, dx, 21, run_linear, &op);
    check_gradient("linear dw", w, dw, 15, run_linear, &op);
    check_gradient("linear db", b, db, 5, run_linear, &op);
}
TEST(linear) { linear_case(AMP_ACT_NONE); linear_case(AMP_ACT_GELU); linear_case(AMP_ACT_GELU_ERF); }

/* Two layers: the second one's backward goes through the first one's activation, in its own pass. */
typedef struct two_layers { amp_linear_op first, second; } two_layers;
static float hidden_w[ROOM], hidden_b[ROOM], hidden[ROOM], hidden_dw[ROOM], hidden_db[ROOM], dhidden[ROOM];

static double run_two_layers(void *arg) {
    two_layers *both = (two_layers *)arg;
    CHECK_OK(amp_linear(amp, &both->first));
    return run_linear(&both->second);
}

static void two_layers_case(amp_activation_kind act, int with_pre) {
    amp_param w1 = make_param("w1", hidden_w, hidden_dw, 6, 3), b1 = make_param("b1", hidden_b, hidden_db, 6, 0);
    amp_param w2 = make_param("w2", w, dw, 5, 6), b2 = make_param("b2", b, db, 5, 0);
    amp_desc settings = {0};
    float apart[42];
    two_layers both;
    fill(x, 21, 1); fill(hidden_w, 18, 2); fill(hidden_b, 6, 3); fill(w, 30, 4); fill(b, 5, 5);
    memset(&both, 0, sizeof both);
    both.first.x = amp_tensor2(x, AMP_F32, 7, 3);
    both.first.y = both.second.x = amp_tensor2(hidden, AMP_F32, 7, 6);
    if (with_pre) both.first.pre = both.second.x_pre = amp_tensor2(pre, AMP_F32, 7, 6);
    both.first.weight = &w1; both.first.bias = &b1; both.first.act = both.second.x_act = act;
    both.second.y = amp_tensor2(y, AMP_F32, 7, 5);
    both.second.weight = &w2; both.second.bias = &b2;
    run_two_layers(&both);
    memcpy(dy, loss_weights, sizeof dy);
    both.second.dy = amp_tensor2(dy, AMP_F32, 7, 5);
    both.second.dx = both.first.dy = amp_tensor2(dhidden, AMP_F32, 7, 6);
    both.first.dx = amp_tensor2(dx, AMP_F32, 7, 3);
    CHECK_OK(amp_linear_backward(amp, &both.second));
    both.first.dy_before_act = 1;
    CHECK_OK(amp_linear_backward(amp, &both.first));
    check_gradient("two layers dx", x, dx, 21, run_two_layers, &both);
    check_gradient("two layers dw1", hidden_w, hidden_dw, 18, run_two_layers, &both);
    check_gradient("two layers db1", hidden_b, hidden_db, 6, run_two_layers, &both);
    check_gradient("two layers dw2", w, dw, 30, run_two_layers, &both);
    check_gradient("two layers db2", b, db, 5, run_two_layers, &both);
    memcpy(apart, dhidden, sizeof apart);
    both.second.x_act = AMP_ACT_NONE;
    both.first.dy_before_act = 0;
    CHECK_OK(amp_linear_backward(amp, &both.second));
    CHECK_OK(amp_linear_backward(amp, &both.first));        /* leaves in dhidden what the one pass gave */
    CHECK_OK(amp_query(amp, &settings));
    for (int i = 0; i < 42; i++) CHECK(fabsf(apart[i] - dhidden[i]) <= 4e-6f * (1 + fabsf(dhidden[i])));
    if (settings.backend->host_visible) CHECK(memcmp(apart, dhidden, sizeof apart) == 0);   /* on the CPU the same bits */
}
TEST(linear_through_activations) {
    two_layers_case(AMP_ACT_GELU, 1); two_layers_case(AMP_ACT_GELU_ERF, 1); two_layers_case(AMP_ACT_RELU, 1); two_layers_case(AMP_ACT_RELU, 0);
}

/* The sums of a gradient over its rows, computed by the operator that writes it, are what the layer would have added. */
static void check_sum(const char *what, const float *grad, float before, const float *d, int n_rows, int cols, int ld) {
    for (int j = 0; j < cols; j++) {
        double sum = (double)before, size = fabs(sum);
        for (int i = 0; i < n_rows; i++) { sum += (double)d[i * ld + j]; size += fabs((double)d[i * ld + j]); }
        CHECK_MSG(fabs((double)grad[j] - sum) <= 4e-6 * size, "%s: [%d] is %g, must be %g", what, j, (double)grad[j], sum);
    }
}
TEST(linear_sums_dx_for_the_layer_before) {
    amp_param weight = make_param("w2", w, dw, 5, 6), bias = make_param("b2", b, db, 5, 0), before = make_param("b1", hidden_b, hidden_db, 6, 0);
    amp_linear_op op, layer;
    fill(x, 42, 1); fill(w, 30, 4); fill(pre, 42, 2);
    memset(&op, 0, sizeof op);
    op.x = amp_tensor2(x, AMP_F32, 7, 6); op.y = amp_tensor2(y, AMP_F32, 7, 5); op.x_pre = amp_tensor2(pre, AMP_F32, 7, 6);
    op.weight = &weight; op.bias = &bias;
    for (int act = 0; act < 2; act++) {
        op.x_act = act ? AMP_ACT_GELU : AMP_ACT_NONE;
        op.dx_bias = NULL;
        run_linear(&op);
        memcpy(dy, loss_weights, sizeof dy);
        op.dy = amp_tensor2(dy, AMP_F32, 7, 5); op.dx = amp_tensor2(dx, AMP_F32, 7, 6); op.dx_bias = &before;
        CHECK_OK(amp_linear_backward(amp, &op));
        check_sum("the first sum", hidden_db, 0, dx, 7, 6, 6);
        CHECK(before.grad_live == 1);
        for (int j = 0; j < 6; j++) hidden_db[j] = 0.5f;
        CHECK_OK(amp_linear_backward(amp, &op));
        check_sum("the second is added", hidden_db, 0.5f, dx, 7, 6, 6);
        before.grad_live = 0;
    }
    layer = op;                                             /* the layer before: its own backward leaves the bias alone */
    layer.bias = &bias; layer.dy_summed = 1; layer.dx_bias = NULL;
    for (int j = 0; j < 5; j++) db[j] = 7;
    CHECK_OK(amp_linear_backward(amp, &layer));
    for (int j = 0; j < 5; j++) CHECK_MSG(memcmp(&db[j], &db[0], 4) == 0 && db[j] > 6.9f && db[j] < 7.1f, "db[%d] = %g", j, (double)db[j]);
    op.dx.data = NULL;
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_NULL);
    CHECK(strstr(amp_last_error(), ".dx_bias is given") != NULL);
    op.dx = amp_tensor2(dx, AMP_F32, 7, 6); op.dx_bias = &bias;
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_SHAPE);
    before.grad = amp_tensor1(db, AMP_F32, 6); op.dx_bias = &before;
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_CONFLICT);
}

/* The fields are checked before anything is computed. */
TEST(linear_refuses_half_an_activation) {
    amp_param weight = make_param("w", w, dw, 5, 3);
    amp_linear_op op;
    memset(&op, 0, sizeof op);
    fill(x, 21, 1); fill(w, 15, 2);
    op.x = amp_tensor2(x, AMP_F32, 7, 3); op.y = amp_tensor2(y, AMP_F32, 7, 5);
    op.weight = &weight;
    CHECK_OK(amp_linear(amp, &op));
    op.dy = amp_tensor2(loss_weights, AMP_F32, 7, 5); op.dx = amp_tensor2(dx, AMP_F32, 7, 3);
    op.x_act = AMP_ACT_TANH;
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), ".x_act = 3, must be AMP_ACT_NONE, AMP_ACT_GELU, AMP_ACT_GELU_ERF or AMP_ACT_RELU") != NULL);
    op.x_act = AMP_ACT_GELU;
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_NULL);
    CHECK(strstr(amp_last_error(), ".x_pre has no data") != NULL);
    op.x_pre = amp_tensor2(pre, AMP_F32, 7, 4);
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_SHAPE);
    op.x_pre = amp_tensor2(pre, AMP_BF16, 7, 3);
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_DTYPE);
    CHECK(weight.grad_live == 0);
}

TEST(gradients_overwrite_then_add) {
    amp_param weight = make_param("w", w, dw, 5, 3);
    amp_linear_op op;
    float first[15];
    fill(x, 21, 1); fill(w, 15, 2);
    memset(&op, 0, sizeof op);
    op.x = amp_tensor2(x, AMP_F32, 7, 3);
    op.y = amp_tensor2(y, AMP_F32, 7, 5);
    op.weight = &weight;
    CHECK_OK(amp_linear(amp, &op));
    op.dy = amp_tensor2(loss_weights, AMP_F32, 7, 5);
    for (int i = 0; i < 15; i++) dw[i] = NAN;
    CHECK_OK(amp_linear_backward(amp, &op));
    memcpy(first, dw, sizeof first);
    CHECK(first[0] == first[0]);
    CHECK_OK(amp_linear_backward(amp, &op));
    for (int i = 0; i < 15; i++) CHECK(fabsf(dw[i] - 2 * first[i]) <= 1e-6f * fabsf(first[i]));
    weight.grad_live = 0;
    CHECK_OK(amp_linear_backward(amp, &op));
    CHECK(memcmp(first, dw, sizeof first) == 0);
}

/* ---- matmul */

static double run_matmul(void *arg) {
    amp_matmul_op *op = (amp_matmul_op *)arg;
    CHECK_OK(amp_matmul(amp, op));
    return scalar((const float *)op->y.data, (int)amp_tensor_count(&op->y));
}

TEST(matmul) {
    for (int flags = 0; flags < 4; flags++) {
        amp_matmul_op op;
        memset(&op, 0, sizeof op);
        fill(x, 24, 4); fill(w, 40, 5);
        op.trans_a = flags & 1; op.trans_b = flags >> 1; op.alpha = 0.5f;
        op.a = op.trans_a ? amp_tensor3(x, AMP_F32, 2, 4, 3) : amp_tensor3(x, AMP_F32, 2, 3, 4);
        op.b = op.trans_b ? amp_tensor3(w, AMP_F32, 2, 5, 4) : amp_tensor3(w, AMP_F32, 2, 4, 5);
        op.y = amp_tensor3(y, AMP_F32, 2, 3, 5);
        run_matmul(&op);
        op.dy = amp_tensor3(loss_weights, AMP_F32, 2, 3, 5);
        op.da = op.a; op.da.data = dx;
        op.db = op.b; op.db.data = dw;
        CHECK_OK(amp_matmul_backward(amp, &op));
        check_gradient("matmul da", x, dx, 24, run_matmul, &op);
        check_gradient("matmul db", w, dw, 40, run_matmul, &op);
    }
}

/* ---- norms */

static float residual[ROOM], sum[ROOM], mean[64], rstd[64];
static int rms_norm;

static double run_norm(void *arg) {
    amp_norm_op *op = (amp_norm_op *)arg;
    CHECK_OK(rms_norm ? amp_rmsnorm(amp, op) : amp_layernorm(amp, op));
    return scalar(y, 28);
}

TEST(norms) {
    for (rms_norm = 0; rms_norm < 2; rms_norm++) {
        amp_param weight = make_param("g", w, dw, 7, 0), bias = make_param("b", b, db, 7, 0);
        amp_norm_op op;
        memset(&op, 0, sizeof op);
        fill(x, 28, 6); fill(residual, 28, 7); fill(w, 7, 8); fill(b, 7, 9);
        op.x = amp_tensor2(x, AMP_F32, 4, 7); op.residual = amp_tensor2(residual, AMP_F32, 4, 7);
        op.sum = amp_tensor2(sum, AMP_F32, 4, 7); op.y = amp_tensor2(y, AMP_F32, 4, 7);
        op.weight = &weight; op.bias = rms_norm ? NULL : &bias;
        op.mean = mean; op.rstd = rstd;
        run_norm(&op);
        op.dy = amp_tensor2(loss_weights, AMP_F32, 4, 7);
        op.dx = amp_tensor2(dx, AMP_F32, 4, 7);
        CHECK_OK(rms_norm ? amp_rmsnorm_backward(amp, &op) : amp_layernorm_backward(amp, &op));
        check_gradient("norm dx", x, dx, 28, run_norm, &op);
        check_gradient("norm dresidual", residual, dx, 28, run_norm, &op);
        check_gradient("norm dweight", w, dw, 7, run_norm, &op);
        if (!rms_norm) check_gradient("norm dbias", b, db, 7, run_norm, &op);
    }
}

/* A second dx in 16 bits for the next product, whose gradients are those of a linear layer that rounds an fp32 dy itself. */
TEST(norm_dx_low) {
    static const amp_dtype low[] = {AMP_F16, AMP_BF16};
    static uint16_t narrow[28], rounded[28];
    static float from_wide[2][35], from_low[2][35];
    int i, way;
    for (i = 0; i < 4; i++) {
        amp_param weight = make_param("g", w, dw, 7, 0);
        amp_norm_op op;
        amp_linear_op linear;
        amp_autocast_desc region;
        memset(&op, 0, sizeof op);
        fill(x, 28, 6); fill(w, 7, 8); fill(loss_weights, 28, 9); fill(dx, 28, 10);
        op.x = amp_tensor2(x, AMP_F32, 4, 7); op.y = amp_tensor2(y, AMP_F32, 4, 7);
        op.weight = &weight;
        op.mean = mean; op.rstd = rstd;
        rms_norm = i / 2;
        run_norm(&op);
        op.dy = amp_tensor2(loss_weights, AMP_F32, 4, 7);
        op.dsum = op.dx = amp_tensor2(dx, AMP_F32, 4, 7);
        op.dx_low = amp_tensor2(narrow, low[i % 2], 4, 7);
        CHECK_OK(rms_norm ? amp_rmsnorm_backward(amp, &op) : amp_layernorm_backward(amp, &op));
        CHECK_OK(amp_convert(rounded, low[i % 2], dx, AMP_F32, 28, NULL, NULL));
        CHECK(memcmp(narrow, rounded, sizeof rounded) == 0);
        {
            static float layer_b[7], layer_db[7];
            amp_param layer = make_param("b", layer_b, layer_db, 7, 0), wide = make_param("b", layer_b, layer_db, 6, 0);
            fill(dx, 28, 10);
            op.dx_bias = &layer;
            CHECK_OK(rms_norm ? amp_rmsnorm_backward(amp, &op) : amp_layernorm_backward(amp, &op));
            check_sum("a norm's dx", layer_db, 0, dx, 4, 7, 7);
            CHECK(layer.grad_live == 1);
            op.dx_bias = &wide;
            CHECK_ERR(amp_layernorm_backward(amp, &op), AMP_ERR_SHAPE);
            op.dx_bias = NULL;
        }

        op.dx_low.dtype = AMP_F32;
        CHECK_ERR(amp_layernorm_backward(amp, &op), AMP_ERR_DTYPE);
        CHECK(strstr(amp_last_error(), ".dx_low is fp32") != NULL);
        op.dx_low = amp_tensor2(narrow, low[i % 2], 7, 4);
        CHECK_ERR(amp_layernorm_backward(amp, &op), AMP_ERR_SHAPE);
        CHECK(strstr(amp_last_error(), ".dx_low") != NULL);
        op.dx_low = amp_tensor2(dx, low[i % 2], 4, 7);
        CHECK_ERR(amp_layernorm_backward(amp, &op), AMP_ERR_CONFLICT);
        CHECK(strstr(amp_last_error(), ".dx_low") != NULL);
        op.dsum.data = NULL;
        op.dx.dtype = AMP_BF16;
        op.dx_low = amp_tensor2(narrow, low[i % 2], 4, 7);
        CHECK_ERR(amp_layernorm_backward(amp, &op), AMP_ERR_DTYPE);
        CHECK(strstr(amp_last_error(), "beside .dx in bf16") != NULL);

        for (way = 0; way < 2; way++) {
            float *grad = way ? from_low[0] : from_wide[0], *back = way ? from_low[1] : from_wide[1];
            amp_param matrix = make_param("m", w, grad, 7, 5);
            memset(&linear, 0, sizeof linear);
            memset(&region, 0, sizeof region);
            fill(w, 35, 11); fill(residual, 20, 12);
            region.dtype = low[i % 2];
            linear.x = amp_tensor2(residual, AMP_F32, 4, 5); linear.y = amp_tensor2(y, AMP_F32, 4, 7);
            linear.weight = &matrix;
            linear.dy = way ? amp_tensor2(narrow, low[i % 2], 4, 7) : amp_tensor2(dx, AMP_F32, 4, 7);
            linear.dx = amp_tensor2(back, AMP_F32, 4, 5);
            CHECK_OK(amp_autocast_begin(amp, &region));
            CHECK_OK(amp_linear(amp, &linear));
            CHECK_OK(amp_autocast_end(amp));
            CHECK_EQ(linear.plan.compute, low[i % 2]);
            CHECK_OK(amp_linear_backward(amp, &linear));
        }
        CHECK(memcmp(from_low, from_wide, sizeof from_wide) == 0);
    }
}

/* ---- attention and softmax */

static float qkv[ROOM], dqkv[ROOM], lse[64];

static double run_attention(void *arg) {
    CHECK_OK(amp_attention(amp, (amp_attention_op *)arg));
    return scalar(y, 2 * 5 * 2 * 3);
}

static amp_tensor qkv_view(float *data, int which) {
    amp_tensor t = amp_tensor4(data + which * 6, AMP_F32, 2, 5, 2, 3);
    t.stride[0] = 5 * 18; t.stride[1] = 18; t.stride[2] = 3; t.stride[3] = 1;
    return t;
}

/* [1, positions, heads, dim] of a cache with room for more positions. */
static amp_tensor cached(float *data, int64_t positions, int64_t heads, int64_t dim, int64_t room) {
    amp_tensor t = amp_tensor4(data, AMP_F32, 1, positions, heads, dim);
    t.stride[0] = room * heads * dim; t.stride[1] = heads * dim; t.stride[2] = dim; t.stride[3] = 1;
    return t;
}

/* What the manual says of decoding, and of heads that share keys and values. */
TEST(attention_from_a_cache_of_grouped_heads) {
    enum { T = 6, HEADS = 4, GROUPS = 2, D = 8, CAPACITY = 9 };
    static float q[T * HEADS * D], k[2][CAPACITY * HEADS * D], few[2][CAPACITY * GROUPS * D], whole[T * HEADS * D], o[T * HEADS * D], sums[HEADS * T];
    amp_attention_op op;
    fill(q, T * HEADS * D, 21);
    for (int kv = 0; kv < 2; kv++) {
        fill(few[kv], CAPACITY * GROUPS * D, 22 + (uint64_t)kv);
        for (int i = 0; i < CAPACITY * HEADS * D; i++) k[kv][i] = few[kv][(i / (HEADS * D) * GROUPS + i / D % HEADS / (HEADS / GROUPS)) * D + i % D];
    }
    memset(&op, 0, sizeof op);                  /* every head with keys of its own, all queries at once */
    op.q = amp_tensor4(q, AMP_F32, 1, T, HEADS, D); op.o = amp_tensor4(whole, AMP_F32, 1, T, HEADS, D);
    op.k = cached(k[0], T, HEADS, D, CAPACITY); op.v = cached(k[1], T, HEADS, D, CAPACITY);
    op.lse = sums; op.mask.kind = AMP_MASK_CAUSAL;
    CHECK_OK(amp_attention(amp, &op));
    for (int t = 0; t < T; t++)                 /* one query at a time, a call per group */
        for (int g = 0; g < GROUPS; g++) {
            int64_t at = (t * HEADS + g * (HEADS / GROUPS)) * D;
            memset(&op, 0, sizeof op);
            op.q = amp_tensor4(q + at, AMP_F32, 1, 1, HEADS / GROUPS, D); op.o = amp_tensor4(o + at, AMP_F32, 1, 1, HEADS / GROUPS, D);
            op.k = cached(few[0] + g * D, t + 1, GROUPS, D, CAPACITY); op.v = cached(few[1] + g * D, t + 1, GROUPS, D, CAPACITY);
            op.k.shape[2] = op.v.shape[2] = HEADS / GROUPS;
            op.k.stride[2] = op.v.stride[2] = 0;
            op.lse = sums; op.mask.kind = AMP_MASK_CAUSAL;
            CHECK_OK(amp_attention(amp, &op));
        }
    for (int i = 0; i < T * HEADS * D; i++) CHECK_MSG(fabs((double)o[i] - (double)whole[i]) < 1e-6, "[%d] %g, all at once %g", i, (double)o[i], (double)whole[i]);
}

/* Attention on one buffer of q, k and v, with its gradients in another. */
static void bind_packed(amp_attention_op *op, amp_mask_kind kind) {
    memset(op, 0, sizeof *op);
    fill(qkv, 180, 10);
    op->q = qkv_view(qkv, 0); op->k = qkv_view(qkv, 1); op->v = qkv_view(qkv, 2);
    op->o = amp_tensor4(y, AMP_F32, 2, 5, 2, 3);
    op->lse = lse;
    op->mask.kind = kind;
    op->d_o = amp_tensor4(loss_weights, AMP_F32, 2, 5, 2, 3);
    op->dq = qkv_view(dqkv, 0); op->dk = qkv_view(dqkv, 1); op->dv = qkv_view(dqkv, 2);
}

TEST(attention_sums_its_gradients) {
    static float qkv_b[18], qkv_db[18];
    amp_param bias = make_param("qkv", qkv_b, qkv_db, 18, 0);
    amp_attention_op op;
    bind_packed(&op, AMP_MASK_CAUSAL);
    run_attention(&op);
    op.qkv_bias = &bias;
    CHECK_OK(amp_attention_backward(amp, &op));
    check_sum("attention", qkv_db, 0, dqkv, 10, 18, 18);
    CHECK(bias.grad_live == 1);
    CHECK_OK(amp_attention_backward(amp, &op));
    for (int j = 0; j < 18; j++) qkv_db[j] /= 2;
    check_sum("twice", qkv_db, 0, dqkv, 10, 18, 18);
    op.dv = amp_tensor4(dx, AMP_F32, 2, 5, 2, 3);
    op.dv.stride[0] = 60; op.dv.stride[1] = 12; op.dv.stride[2] = 4; op.dv.stride[3] = 1;
    CHECK_ERR(amp_attention_backward(amp, &op), AMP_ERR_SHAPE);
    CHECK(strstr(amp_last_error(), ".dv: its heads must lie beside each other") != NULL);
}

TEST(attention_on_packed_qkv) {
    for (int kind = AMP_MASK_NONE; kind <= AMP_MASK_WINDOW; kind++) {
        static const int32_t lengths[2] = {4, 5};
        amp_attention_op op;
        bind_packed(&op, (amp_mask_kind)kind);
        op.mask.window = 2; op.mask.lengths = lengths;
        run_attention(&op);
        CHECK_OK(amp_attention_backward(amp, &op));
        check_gradient("attention", qkv, dqkv, 180, run_attention, &op);
    }
}

static double run_softmax(void *arg) {
    CHECK_OK(amp_softmax(amp, (amp_softmax_op *)arg));
    return scalar(y, 18);
}

TEST(softmax) {
    amp_softmax_op op;
    memset(&op, 0, sizeof op);
    fill(x, 18, 11);
    op.x = amp_tensor4(x, AMP_F32, 1, 2, 3, 3); op.y = amp_tensor4(y, AMP_F32, 1, 2, 3, 3);
    op.scale = 0.7f; op.mask.kind = AMP_MASK_CAUSAL;
    run_softmax(&op);
    op.dy = amp_tensor4(loss_weights, AMP_F32, 1, 2, 3, 3);
    op.dx = amp_tensor4(dx, AMP_F32, 1, 2, 3, 3);
    CHECK_OK(amp_softmax_backward(amp, &op));
    check_gradient("softmax", x, dx, 18, run_softmax, &op);
}

/* ---- activations */

static double run_activation(void *arg) {
    CHECK_OK(amp_activation(amp, (amp_activation_op *)arg));
    return scalar(y, 19);
}

static double run_activation_4x5(void *arg) {
    CHECK_OK(amp_activation(amp, (amp_activation_op *)arg));
    return scalar(y, 20);
}

TEST(activations) {
    for (int act = AMP_ACT_GELU; act <= AMP_ACT_RELU; act++) {
        amp_activation_op op;
        memset(&op, 0, sizeof op);
        fill(x, 19, 12);
        for (int i = 0; i < 19; i++) x[i] *= 3;
        op.x = amp_tensor1(x, AMP_F32, 19); op.y = amp_tensor1(y, AMP_F32, 19); op.act = (amp_activation_kind)act;
        run_activation(&op);
        op.dy = amp_tensor1(loss_weights, AMP_F32, 19); op.dx = amp_tensor1(dx, AMP_F32, 19);
        CHECK_OK(amp_activation_backward(amp, &op));
        check_gradient("activation", x, dx, 19, run_activation, &op);
    }
}

TEST(activations_with_bias) {
    for (int act = AMP_ACT_GELU; act <= AMP_ACT_RELU; act++) {
        amp_param bias = make_param("bias", b, db, 5, 0);
        amp_activation_op op;
        memset(&op, 0, sizeof op);
        fill(x, 20, 12);
        fill(b, 5, 14);
        op.x = amp_tensor2(x, AMP_F32, 4, 5); op.y = amp_tensor2(y, AMP_F32, 4, 5); op.act = (amp_activation_kind)act;
        op.bias = &bias;
        CHECK_OK(amp_activation(amp, &op));
        op.dy = amp_tensor2(loss_weights, AMP_F32, 4, 5); op.dx = amp_tensor2(dx, AMP_F32, 4, 5);
        CHECK_OK(amp_activation_backward(amp, &op));
        CHECK(bias.grad_live == 1);
        for (int j = 0; j < 5; j++) CHECK(fabs((double)db[j] - (double)(dx[j] + dx[5 + j] + dx[10 + j] + dx[15 + j])) < 1e-6);
        op.y = amp_tensor2(y, AMP_F32, 4, 5);
        check_gradient("activation with bias", x, dx, 20, run_activation_4x5, &op);
        check_gradient("activation's bias", b, db, 5, run_activation_4x5, &op);
        amp_param_changed(&bias);             /* recomputing wants the bias of the forward */
        CHECK_OK(amp_recompute_begin(amp));
        CHECK_ERR(amp_activation(amp, &op), AMP_ERR_STATE);
        CHECK_OK(amp_recompute_end(amp));
        op.y = op.x;
        if (act != AMP_ACT_TANH) CHECK_ERR(amp_activation_backward(amp, &op), AMP_ERR_CONFLICT);
        bias.weight.shape[0] = 4;
        CHECK_ERR(amp_activation(amp, &op), AMP_ERR_SHAPE);
    }
}

static double run_swiglu(void *arg) {
    CHECK_OK(amp_swiglu(amp, (amp_swiglu_op *)arg));
    return scalar(y, 12);
}

TEST(swiglu_on_one_buffer) {
    amp_swiglu_op op;
    memset(&op, 0, sizeof op);
    fill(x, 24, 13);
    op.gate = amp_tensor2(x, AMP_F32, 3, 4); op.gate.stride[0] = 8; op.gate.stride[1] = 1;
    op.up = op.gate; op.up.data = x + 4;
    op.y = amp_tensor2(y, AMP_F32, 3, 4);
    run_swiglu(&op);
    op.dy = amp_tensor2(loss_weights, AMP_F32, 3, 4);
    op.dgate = op.gate; op.dgate.data = dx;
    op.dup = op.gate; op.dup.data = dx + 4;
    CHECK_OK(amp_swiglu_backward(amp, &op));
    check_gradient("swiglu", x, dx, 24, run_swiglu, &op);
}

/* Both biases, and each alone: without the other nothing else changes. */
TEST(swiglu_with_biases) {
    for (int which = 1; which <= 3; which++) {
        amp_param gate_bias = make_param("gate", b, db, 4, 0), up_bias = make_param("up", b + 4, db + 4, 4, 0);
        amp_swiglu_op op;
        memset(&op, 0, sizeof op);
        fill(x, 24, 13);
        fill(b, 8, 15);
        op.gate = amp_tensor2(x, AMP_F32, 3, 4); op.up = amp_tensor2(x + 12, AMP_F32, 3, 4); op.y = amp_tensor2(y, AMP_F32, 3, 4);
        if (which & 1) op.gate_bias = &gate_bias;
        if (which & 2) op.up_bias = &up_bias;
        run_swiglu(&op);
        op.dy = amp_tensor2(loss_weights, AMP_F32, 3, 4);
        op.dgate = amp_tensor2(dx, AMP_F32, 3, 4); op.dup = amp_tensor2(dx + 12, AMP_F32, 3, 4);
        CHECK_OK(amp_swiglu_backward(amp, &op));
        check_gradient("swiglu with biases", x, dx, 24, run_swiglu, &op);
        CHECK(gate_bias.grad_live == (which & 1) && up_bias.grad_live == which >> 1);
        if (which & 1) check_gradient("gate_bias", b, db, 4, run_swiglu, &op);
        if (which & 2) check_gradient("up_bias", b + 4, db + 4, 4, run_swiglu, &op);
        amp_param_changed(which & 1 ? &gate_bias : &up_bias);
        CHECK_OK(amp_recompute_begin(amp));
        CHECK_ERR(amp_swiglu(amp, &op), AMP_ERR_STATE);
        CHECK_OK(amp_recompute_end(amp));
        gate_bias.weight.shape[0] = up_bias.weight.shape[0] = 3;
        CHECK_ERR(amp_swiglu(amp, &op), AMP_ERR_SHAPE);
    }
}

/* ---- losses and embedding */

static float loss;

static double run_cross_entropy(void *arg) {
    amp_cross_entropy_op op = *(amp_cross_entropy_op *)arg;
    op.dlogits.data = NULL;
    CHECK_OK(amp_cross_entropy(amp, &op));
    return (double)loss;
}

TEST(cross_entropy) {
    static const int32_t labels[5] = {3, 0, -100, 2, 1};
    amp_cross_entropy_op op;
    memset(&op, 0, sizeof op);
    fill(x, 25, 14);
    op.logits = amp_tensor2(x, AMP_F32, 5, 5); op.dlogits = amp_tensor2(dx, AMP_F32, 5, 5);
    op.labels = labels; op.classes = 4; op.label_smoothing = 0.1f; op.loss = &loss;
    CHECK_OK(amp_cross_entropy(amp, &op));
    check_gradient("cross entropy", x, dx, 25, run_cross_entropy, &op);
}

TEST(cross_entropy_seed_scales_the_gradient_only) {
    static const int32_t labels[2] = {1, 0};
    static const float seed = 1024;
    float plain[6], scaled[6], plain_loss;
    amp_cross_entropy_op op;
    memset(&op, 0, sizeof op);
    fill(x, 6, 15);
    op.logits = amp_tensor2(x, AMP_F32, 2, 3); op.dlogits = amp_tensor2(plain, AMP_F32, 2, 3);
    op.labels = labels; op.loss = &loss;
    CHECK_OK(amp_cross_entropy(amp, &op));
    plain_loss = loss;
    op.dlogits.data = scaled; op.grad_scale = &seed;
    CHECK_OK(amp_cross_entropy(amp, &op));
    CHECK(loss == plain_loss);
    for (int i = 0; i < 6; i++) CHECK(fabsf(scaled[i] - 1024 * plain[i]) <= 1e-6f * fabsf(scaled[i]));
}

static double run_mse(void *arg) {
    amp_mse_op op = *(amp_mse_op *)arg;
    op.dx.data = NULL;
    CHECK_OK(amp_mse(amp, &op));
    return (double)loss;
}

TEST(mse) {
    amp_mse_op op;
    memset(&op, 0, sizeof op);
    fill(x, 9, 16); fill(w, 9, 17);
    op.x = amp_tensor1(x, AMP_F32, 9); op.target = amp_tensor1(w, AMP_F32, 9); op.dx = amp_tensor1(dx, AMP_F32, 9);
    op.loss = &loss;
    CHECK_OK(amp_mse(amp, &op));
    check_gradient("mse", x, dx, 9, run_mse, &op);
}

static double run_embedding(void *arg) {
    CHECK_OK(amp_embedding(amp, (amp_embedding_op *)arg));
    return scalar(y, 24);
}

TEST(embedding) {
    static const int32_t ids[6] = {4, 0, 4, 1, 4, 4};
    amp_param table = make_param("t", w, dw, 5, 4), positions = make_param("p", b, db, 3, 4);
    amp_embedding_op op;
    memset(&op, 0, sizeof op);
    fill(w, 20, 18); fill(b, 12, 19);
    op.ids = ids; op.table = &table; op.positions = &positions; op.seq = 3;
    op.y = amp_tensor2(y, AMP_F32, 6, 4);
    run_embedding(&op);
    op.dy = amp_tensor2(loss_weights, AMP_F32, 6, 4);
    CHECK_OK(amp_embedding_backward(amp, &op));
    check_gradient("embedding table", w, dw, 20, run_embedding, &op);
    check_gradient("embedding positions", b, db, 12, run_embedding, &op);
}

/* ---- rope */

/* In place: what is turned is a copy. */
static double run_rope(void *arg) {
    amp_rope_op *op = (amp_rope_op *)arg;
    memcpy(y, x, 96 * sizeof *y);
    CHECK_OK(amp_rope(amp, op));
    return scalar(y, 96);
}

/* q of 3 heads and k of 1 side by side in one buffer, with v behind them, which stays. */
TEST(rope_backward_is_its_gradient) {
    for (int how = 0; how < 4; how++) {
        amp_rope_op op;
        memset(&op, 0, sizeof op);
        fill(x, 96, 23);
        op.q = amp_tensor4(y, AMP_F32, 2, 2, 3, 6 - how % 2 * 2);
        op.q.stride[0] = 48; op.q.stride[1] = 24; op.q.stride[2] = 6 - how % 2 * 2; op.q.stride[3] = 1;
        op.k = op.q; op.k.shape[2] = 1;
        op.k.data = y + 3 * op.q.stride[2];
        op.pairing = how < 2 ? AMP_ROPE_HALVES : AMP_ROPE_ADJACENT;
        op.rotary = how == 2 ? 4 : 0; op.base = 3; op.offset = how;
        run_rope(&op);
        if (how % 2) for (int i = 0; i < 96; i++) CHECK(i % 24 < 16 || y[i] == x[i]);
        memcpy(dx, loss_weights, 96 * sizeof *dx);
        op.dq = op.q; op.dq.data = dx;
        op.dk = op.k; op.dk.data = dx + 3 * op.q.stride[2];
        CHECK_OK(amp_rope_backward(amp, &op));
        check_gradient("rope", x, dx, 96, run_rope, &op);
    }
}

/* Token after token with .offset, with their numbers in .positions, or all at once: the same bits; and a score depends on
   the distance alone. */
TEST(rope_positions) {
    enum { N = 7, DIM = 10 };
    static int32_t at[2 * N];
    amp_rope_op whole, token, given;
    double score[2] = {0, 0};
    memset(&whole, 0, sizeof whole);
    whole.q = amp_tensor4(y, AMP_F32, 2, N, 1, DIM);
    token = given = whole;
    fill(x, 2 * N * DIM, 24);
    memcpy(y, x, 2 * N * DIM * sizeof *y); memcpy(w, x, 2 * N * DIM * sizeof *w); memcpy(dx, x, 2 * N * DIM * sizeof *dx);
    CHECK_OK(amp_rope(amp, &whole));
    for (int i = 0; i < N; i++) {
        token.q = amp_tensor4(w + i * DIM, AMP_F32, 2, 1, 1, DIM);
        token.q.stride[0] = N * DIM; token.q.stride[1] = token.q.stride[2] = DIM; token.q.stride[3] = 1;
        token.offset = i; token.base = 10000; token.rotary = DIM; token.pairing = AMP_ROPE_HALVES;
        CHECK_OK(amp_rope(amp, &token));
    }
    CHECK(memcmp(y, w, 2 * N * DIM * sizeof *y) == 0);
    for (int i = 0; i < 2 * N; i++) at[i] = i % N - 3;
    given.q.data = dx; given.offset = 3; given.positions = amp_tensor2(at, AMP_I32, 2, N);
    CHECK_OK(amp_rope(amp, &given));
    CHECK(memcmp(y, dx, 2 * N * DIM * sizeof *y) == 0);
    memcpy(dx, x, 2 * N * DIM * sizeof *dx);
    for (int i = 0; i < 2 * N; i++) at[i] = i < N ? i : -1000;             /* [positions]: the second row is not read */
    given.offset = 0; given.positions = amp_tensor1(at, AMP_I32, N);
    CHECK_OK(amp_rope(amp, &given));
    CHECK(memcmp(y, dx, 2 * N * DIM * sizeof *y) == 0);
    for (int far = 0; far < 2; far++) {
        memcpy(y, x, 2 * DIM * sizeof *y);
        token.q = amp_tensor4(y, AMP_F32, 1, 1, 1, DIM); token.offset = far ? 1000003 : 3;
        CHECK_OK(amp_rope(amp, &token));
        token.q.data = y + DIM; token.offset -= 2;
        CHECK_OK(amp_rope(amp, &token));
        for (int i = 0; i < DIM; i++) score[far] += (double)y[i] * (double)y[DIM + i];
    }
    CHECK_MSG(fabs(score[0] - score[1]) < 1e-6 * DIM, "%.9g at the start, %.9g far away", score[0], score[1]);
}

/* 16-bit q is turned in fp32 and rounded once, whatever the region. */
TEST(rope_in_a_region) {
    static uint16_t low[2][12];
    amp_rope_op op;
    memset(&op, 0, sizeof op);
    fill(x, 12, 25);
    for (int i = 0; i < 12; i++) { low[0][i] = low[1][i] = amp_bf16_from_f32(x[i], 0); y[i] = amp_f32_from_bf16(low[0][i]); }
    op.q = amp_tensor4(y, AMP_F32, 1, 3, 1, 4); op.offset = 2;
    CHECK_OK(amp_rope(amp, &op));
    for (int region = 0; region < 2; region++) {
        amp_autocast_desc desc = {0};
        desc.dtype = AMP_BF16;
        if (region) CHECK_OK(amp_autocast_begin(amp, &desc));
        op.q = amp_tensor4(low[region], AMP_BF16, 1, 3, 1, 4);
        CHECK_OK(amp_rope(amp, &op));
        CHECK_EQ(op.plan.result, AMP_BF16);
        if (region) { CHECK_EQ(op.plan.compute, AMP_F32); CHECK_OK(amp_autocast_end(amp)); }
        for (int i = 0; i < 12; i++) CHECK_EQ(low[region][i], amp_bf16_from_f32(y[i], 0));
    }
}

/* ---- dropout, add, cast */

TEST(dropout_repeats_its_mask_in_backward) {
    amp_dropout_op op;
    int kept = 0;
    memset(&op, 0, sizeof op);
    for (int i = 0; i < 4000; i++) x[i] = dy[i] = 1;
    op.x = amp_tensor1(x, AMP_F32, 4000); op.y = amp_tensor1(y, AMP_F32, 4000); op.p = 0.25f;
    CHECK_OK(amp_dropout(amp, &op));
    op.dy = amp_tensor1(dy, AMP_F32, 4000); op.dx = amp_tensor1(dx, AMP_F32, 4000);
    CHECK_OK(amp_dropout_backward(amp, &op));
    CHECK(memcmp(y, dx, 4000 * sizeof *y) == 0);
    for (int i = 0; i < 4000; i++) kept += y[i] != 0;
    CHECK_MSG(abs(kept - 3000) < 5 * 28, "%d of 4000 kept", kept);      /* five standard deviations */
    memcpy(dx, y, sizeof dx);
    CHECK_OK(amp_dropout(amp, &op));
    CHECK(memcmp(y, dx, 4000 * sizeof *y) != 0);
}

TEST(add_and_cast) {
    static uint16_t low[8];
    amp_tensor a = amp_tensor1(x, AMP_F32, 8), c = amp_tensor1(w, AMP_F32, 8), z = amp_tensor1(y, AMP_F32, 8);
    amp_tensor l = amp_tensor1(low, AMP_BF16, 8);
    fill(x, 8, 20); fill(w, 8, 21);
    CHECK_OK(amp_add(amp, &a, &c, &z));
    for (int i = 0; i < 8; i++) CHECK(y[i] == x[i] + w[i]);
    CHECK_OK(amp_cast(amp, &a, &l));
    for (int i = 0; i < 8; i++) CHECK_EQ(low[i], amp_bf16_from_f32(x[i], 0));
}

TEST(gemm_is_blas_shaped) {
    float a[6] = {1, 2, 3, 4, 5, 6}, c[6] = {7, 8, 9, 10, 11, 12}, row[4] = {1, 1, 1, 1}, col[4] = {1, 1, 1, 1};
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 3, 1, a, 3, c, 2, 0, row, 2));
    CHECK(row[0] == 58 && row[1] == 64 && row[2] == 139 && row[3] == 154);
    CHECK_OK(amp_gemm(amp, AMP_COL_MAJOR, AMP_TRANS, AMP_TRANS, 2, 2, 3, 1, a, 3, c, 2, 0, col, 2));
    CHECK(col[0] == 58 && col[1] == 139 && col[2] == 64 && col[3] == 154);
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 3, 1, a, 3, c, 2, 2, row, 2));
    CHECK(row[0] == 174);
    CHECK_ERR(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 3, 1, a, 2, c, 2, 0, row, 2), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "lda = 2") != NULL);
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 0, 2, 3, 1, NULL, 3, NULL, 2, 0, NULL, 2));
}

/* ---- refusals leave everything as it was */

/* Rows with a gap behind each: taken by all operators but those that the head of >>operators names. */
static amp_tensor gapped(int k) {
    static float room[7][8 * 24];
    amp_tensor t = amp_tensor2(room[k], AMP_F32, 8, 16);
    t.stride[0] = 24;
    t.stride[1] = 1;
    return t;
}
#define TAKES(call, taken) do { \
        amp_result r_ = (call); \
        CHECK_MSG(r_ == ((taken) ? AMP_OK : AMP_ERR_SHAPE), "%s: %d %s", #call, (int)r_, amp_last_error()); \
        if (!(taken)) CHECK(strstr(amp_last_error(), "contiguous") != NULL); \
    } while (0)
TEST(strided_rows_where_the_manual_says) {
    const int32_t labels[8] = {0};
    float stats[16], total;
    amp_tensor a = gapped(0), c = gapped(1), d = gapped(2);
    amp_param weight = make_param("strided", w, dw, 16, 16);
    amp_linear_op linear = {.x = a, .y = c, .weight = &weight, .dy = gapped(3), .dx = gapped(4)};
    amp_linear_op relu = {.x = a, .y = c, .weight = &weight, .act = AMP_ACT_RELU, .dy = gapped(3), .dx = gapped(4)};
    amp_norm_op norm = {.x = a, .y = c, .mean = stats, .rstd = stats + 8, .dy = d, .dx = gapped(3)};
    amp_swiglu_op swiglu = {.gate = a, .up = c, .y = d, .dy = gapped(3), .dgate = gapped(4), .dup = gapped(5)};
    amp_matmul_op matmul = {.a = a, .b = c, .y = gapped(2), .trans_b = 1};
    amp_embedding_op embedding = {.ids = labels, .table = &weight, .y = c, .dy = d};
    amp_cross_entropy_op ce = {.logits = a, .dlogits = c, .labels = labels, .loss = &total};
    amp_linear_cross_entropy_op fused = {.x = a, .dx = c, .weight = &weight, .labels = labels, .loss = &total};
    amp_activation_op activation = {.x = a, .y = c, .act = AMP_ACT_GELU};
    amp_dropout_op dropout = {.x = a, .y = c, .p = 0.5f};
    amp_softmax_op softmax = {.x = a, .y = c};
    amp_mse_op mse = {.x = a, .target = c, .loss = &total};
    matmul.y.shape[1] = 8;
    CHECK_OK(amp_param_register(amp, &weight, 1));
    TAKES(amp_linear(amp, &linear), 1);
    TAKES(amp_linear_backward(amp, &linear), 1);
    TAKES(amp_linear(amp, &relu), 1);
    TAKES(amp_linear_backward(amp, &relu), 0);
    relu.dy_before_act = 1;
    TAKES(amp_linear_backward(amp, &relu), 1);
    TAKES(amp_layernorm(amp, &norm), 1);
    TAKES(amp_layernorm_backward(amp, &norm), 1);
    TAKES(amp_swiglu(amp, &swiglu), 1);
    TAKES(amp_swiglu_backward(amp, &swiglu), 1);
    TAKES(amp_matmul(amp, &matmul), 1);
    TAKES(amp_embedding(amp, &embedding), 1);
    TAKES(amp_cross_entropy(amp, &ce), 1);
    TAKES(amp_linear_cross_entropy(amp, &fused), 1);
    TAKES(amp_activation(amp, &activation), 0);
    TAKES(amp_dropout(amp, &dropout), 0);
    TAKES(amp_softmax(amp, &softmax), 0);
    TAKES(amp_mse(amp, &mse), 0);
    TAKES(amp_add(amp, &a, &c, &d), 0);
    TAKES(amp_cast(amp, &a, &c), 0);
    amp_param_forget(amp, &weight, 1);
}

TEST(refusals) {
    amp_param weight = make_param("w", w, dw, 5, 3);
    amp_linear_op op;
    memset(&op, 0, sizeof op);
    CHECK_ERR(amp_linear(NULL, &op), AMP_ERR_NULL);
    CHECK_ERR(amp_linear(amp, &op), AMP_ERR_NULL);
    op.weight = &weight;
    op.x = amp_tensor2(x, AMP_F32, 7, 4); op.y = amp_tensor2(y, AMP_F32, 7, 5);
    CHECK_ERR(amp_linear(amp, &op), AMP_ERR_SHAPE);
    CHECK(strstr(amp_last_error(), ".weight is [5, 3] fp32, must be [5, 4]: w") != NULL && amp_last_error()[strlen(amp_last_error()) - 1] == 'w');
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_STATE);
    op.x.dtype = AMP_F64;
    CHECK_ERR(amp_linear(amp, &op), AMP_ERR_DTYPE);
    {
        static const int32_t bad[2] = {0, 3};
        amp_cross_entropy_op ce;
        amp_desc settings = {0};
        memset(&ce, 0, sizeof ce);
        ce.logits = amp_tensor2(x, AMP_F32, 2, 3); ce.labels = bad; ce.loss = &loss;
        CHECK_OK(amp_query(amp, &settings));
        if (settings.backend->host_visible) {
            CHECK_ERR(amp_cross_entropy(amp, &ce), AMP_ERR_LABEL);
            CHECK(strstr(amp_last_error(), ".labels[1] = 3") != NULL);
        } else {                /* a device tells at the next wait, once */
            CHECK_OK(amp_cross_entropy(amp, &ce));
            CHECK_ERR(amp_sync(amp), AMP_ERR_LABEL);
            CHECK_OK(amp_sync(amp));
        }
    }
}

static void run_all(void) {
    RUN(linear); RUN(linear_through_activations); RUN(linear_refuses_half_an_activation); RUN(gradients_overwrite_then_add); RUN(matmul);
    RUN(norms);
    RUN(norm_dx_low); RUN(linear_sums_dx_for_the_layer_before); RUN(attention_sums_its_gradients); RUN(attention_from_a_cache_of_grouped_heads); RUN(attention_on_packed_qkv); RUN(softmax);
    RUN(activations); RUN(activations_with_bias); RUN(swiglu_on_one_buffer); RUN(swiglu_with_biases); RUN(cross_entropy); RUN(cross_entropy_seed_scales_the_gradient_only);
    RUN(mse); RUN(embedding); RUN(rope_backward_is_its_gradient); RUN(rope_positions); RUN(rope_in_a_region);
    RUN(dropout_repeats_its_mask_in_backward); RUN(add_and_cast); RUN(gemm_is_blas_shaped); RUN(strided_rows_where_the_manual_says); RUN(refusals);
}

TEST(every_kernel_went_through_the_table) {
    CHECK(recording.calls > 500);
    CHECK(recording.allocs == recording.frees);
}

TEST(a_failing_kernel_is_reported) {
    amp_desc desc;
    amp_tensor a = amp_tensor1(x, AMP_F32, 8);
    amp_context *other;
    memset(&desc, 0, sizeof desc);
    desc.backend = recording_backend();
    CHECK_OK(amp_open(&other, &desc));
    recording.fail_at = 1;
    CHECK_ERR(amp_add(other, &a, &a, &a), AMP_ERR_DEVICE);
    CHECK_OK(amp_add(other, &a, &a, &a));
    amp_close(other);
}

int main(int argc, char **argv) {
    amp_desc desc;
    TEST_BEGIN(argc, argv);
    fill(loss_weights, ROOM, 99);
    if (amp_open(&amp, NULL) != AMP_OK) { printf("%s\n", amp_last_error()); return 1; }
    run_all();
    amp_close(amp);
    memset(&desc, 0, sizeof desc);
    desc.backend = recording_backend();
    if (amp_open(&amp, &desc) != AMP_OK) { printf("%s\n", amp_last_error()); return 1; }
    run_all();
    amp_close(amp);
    RUN(every_kernel_went_through_the_table);
    RUN(a_failing_kernel_is_reported);
    return TEST_END();
}
