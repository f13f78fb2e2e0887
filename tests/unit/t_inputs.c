/* t_inputs.c - tests operands of products that are beyond a 16-bit format's range.  They must be counted by product and
 * operand, and reported once.  In a region that saturates its inputs, they must be cut to the range.
 *
 *     gcc -O2 -Itests tests/unit/t_inputs.c -o t_inputs -lm -lpthread && ./t_inputs      (from the project root) */
#if !defined(_GNU_SOURCE)
#  define _GNU_SOURCE
#endif
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <fenv.h>
#include <math.h>

typedef struct words { int warnings, infos; char warning[600], info[600]; } words;

static void hear(void *user, amp_log_level level, int id, const char *text) {
    words *w = (words *)user;
    if (id == 1011 || (id >= 1102 && id <= 1104)) { CHECK_EQ(level, AMP_LOG_WARNING); w->warnings++; snprintf(w->warning, sizeof w->warning, "%s", text); }
    if (id == 1012) { CHECK_EQ(level, AMP_LOG_INFO); w->infos++; snprintf(w->info, sizeof w->info, "%s", text); }
}

static amp_context *open_as(amp_dtype dtype, int saturate, amp_cpu_path path, words *w) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(w, 0, sizeof *w);
    desc.dtype = dtype;
    desc.saturate_inputs = saturate;
    desc.gemm_always = 1;
    desc.cpu_path = path;
    desc.logger.write = hear;
    desc.logger.user = w;
    desc.logger.level = AMP_LOG_INFO;
    return amp_open(&amp, &desc) == AMP_OK ? amp : NULL;
}

/* new_inf since the last call is `count`, the last of them in `where`. */
static int64_t counted;
static int counts(amp_context *amp, int64_t count, const char *where) {
    amp_status s;
    int64_t now;
    CHECK_OK(amp_status_get(amp, NULL, 0, &s));
    now = s.new_inf - counted;
    counted = s.new_inf;
    if (now == count && (count == 0 || strcmp(s.new_inf_in, where) == 0)) return 1;
    printf("%lld in \"%s\", not %lld in \"%s\"\n", (long long)now, s.new_inf_in, (long long)count, where);
    return 0;
}

static float value(int64_t i) { return (float)(i * 37 % 101 - 50) / 16; }
static void store(void *to, amp_dtype dtype, int64_t i, float x) {
    CHECK_OK(amp_convert((char *)to + i * (int64_t)amp_dtype_size(dtype), dtype, &x, AMP_F32, 1, NULL, NULL));
}

enum { ROWS = 5, IN = 24, OUT = 7 };
typedef struct layer { float x[ROWS * IN], w[OUT * IN], dw[OUT * IN], y[ROWS * OUT], dy[ROWS * OUT], dx[ROWS * IN]; amp_param weight; amp_linear_op op; } layer;

static void layer_begin(amp_context *amp, layer *l) {
    memset(l, 0, sizeof *l);
    for (int i = 0; i < ROWS * IN; i++) l->x[i] = value(i);
    for (int i = 0; i < OUT * IN; i++) l->w[i] = value(i + 5);
    for (int i = 0; i < ROWS * OUT; i++) l->dy[i] = value(i + 9);
    l->weight.name = "fc.weight";
    l->weight.weight = amp_tensor2(l->w, AMP_F32, OUT, IN);
    l->weight.grad = amp_tensor2(l->dw, AMP_F32, OUT, IN);
    CHECK_OK(amp_param_register(amp, &l->weight, 1));
    l->op.weight = &l->weight;
    l->op.x = amp_tensor2(l->x, AMP_F32, ROWS, IN); l->op.y = amp_tensor2(l->y, AMP_F32, ROWS, OUT);
    l->op.dx = amp_tensor2(l->dx, AMP_F32, ROWS, IN); l->op.dy = amp_tensor2(l->dy, AMP_F32, ROWS, OUT);
}
static void layer_forward(amp_context *amp, layer *l) {
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_linear(amp, &l->op));
    CHECK_OK(amp_autocast_end(amp));
}
static int64_t bad(const float *x, int64_t n) { return amp_count_nonfinite(x, AMP_F32, n, NULL); }

TEST(which_operand_of_a_linear_layer) {
    static layer l;
    words w;
    amp_context *amp = open_as(AMP_F16, 0, AMP_CPU_DEFAULT, &w);
    counted = 0;
    layer_begin(amp, &l);
    layer_forward(amp, &l);
    CHECK_OK(amp_linear_backward(amp, &l.op));
    CHECK(counts(amp, 0, "") && w.warnings + w.infos == 0);
    l.dy[3] = 1e6f;                             /* a gradient: the scaler's business */
    layer_forward(amp, &l);
    CHECK_OK(amp_linear_backward(amp, &l.op));
    CHECK(counts(amp, 2, "amp_linear_backward: dy of fc.weight") && w.warnings == 0 && w.infos == 1);
    l.dy[3] = 0;
    l.x[4] = 65519; l.x[6] = 65520; l.x[7] = -1e30f;            /* the first rounds to 65504 */
    layer_forward(amp, &l);
    CHECK(counts(amp, 2, "amp_linear: x of fc.weight") && w.warnings == 1 && bad(l.y, ROWS * OUT) == OUT);
    CHECK(strstr(w.warning, "range of fp16: 2,") && strstr(w.warning, "AMP_SATURATE_INPUTS"));
    CHECK_OK(amp_linear_backward(amp, &l.op));
    CHECK(counts(amp, 2, "amp_linear_backward: x of fc.weight") && w.warnings == 1 && w.infos == 1);
    l.x[6] = INFINITY; l.x[7] = NAN;            /* was so before any cast */
    layer_forward(amp, &l);
    CHECK(counts(amp, 0, "") && bad(l.y, ROWS * OUT) == OUT);
    l.x[6] = l.x[7] = 0;
    l.x[8] = 1e6f;                              /* relu(-inf) is 0, and may not be what 1e6 gives */
    for (int i = 0; i < OUT; i++) l.w[i * IN + 8] = -1e-6f;
    amp_param_changed(&l.weight);
    l.op.act = AMP_ACT_RELU;
    layer_forward(amp, &l);
    CHECK(counts(amp, 1, "amp_linear: x of fc.weight"));
    l.op.act = AMP_ACT_NONE;
    l.x[8] = 0;
    l.w[11] = 7e4f;
    amp_param_changed(&l.weight);
    l.op.layer = "h.0";
    for (int i = 0; i < 3; i++) {               /* as it lies, and packed */
        layer_forward(amp, &l);
        CHECK(counts(amp, 1, "amp_linear: weight of h.0"));
    }
    amp_close(amp);
}

static float p[40 * 40], q[40 * 40], r[40 * 40], s[40 * 40], o[40 * 40], o2[40 * 40], lse[64];
static void fill_all(void) { for (int i = 0; i < 1600; i++) { p[i] = value(i); q[i] = value(i + 3); r[i] = value(i + 7); s[i] = value(i + 1); o[i] = 0; } }

TEST(which_operand_of_the_others) {
    words w;
    amp_context *amp = open_as(AMP_F16, 0, AMP_CPU_DEFAULT, &w);
    amp_matmul_op mm;
    amp_attention_op a;
    counted = 0;
    for (int col = 0; col < 2; col++)
        for (int b = 0; b < 2; b++) {
            fill_all();
            (b ? q : p)[17] = 1e5f;
            CHECK_OK(amp_gemm(amp, col ? AMP_COL_MAJOR : AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, 9, 9, 9, 1, p, 40, q, 40, 0, o, 40));
            CHECK(counts(amp, 0, ""));      /* that lies between the rows */
            (b ? q : p)[8] = -1e5f;
            CHECK_OK(amp_gemm(amp, col ? AMP_COL_MAJOR : AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, 18, 18, 9, 1, p, 40, q, 40, 0, o, 40));
            CHECK(counts(amp, 1 + col, b ? "amp_gemm: b" : "amp_gemm: a"));
            CHECK_OK(amp_gemm(amp, col ? AMP_COL_MAJOR : AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, 18, 18, 9, 0, p, 40, q, 40, 0, o, 40));
            CHECK(counts(amp, 0, "") && bad(o, 1600) == 0);                     /* alpha 0 reads neither */
        }
    CHECK(w.warnings == 0 && w.infos == 1 && strstr(w.info, "amp_gemm: a: "));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    memset(&mm, 0, sizeof mm);
    fill_all();
    mm.a = amp_tensor3(p, AMP_F32, 3, 4, 8); mm.b = amp_tensor3(q, AMP_F32, 3, 8, 5); mm.y = amp_tensor3(o, AMP_F32, 3, 4, 5);
    mm.dy = amp_tensor3(r, AMP_F32, 3, 4, 5); mm.da = amp_tensor3(s, AMP_F32, 3, 4, 8); mm.db = amp_tensor3(o2, AMP_F32, 3, 8, 5);
    mm.layer = "scores";
    q[50] = 2e5f;
    CHECK_OK(amp_matmul(amp, &mm));
    CHECK(counts(amp, 1, "amp_matmul: b of scores") && w.warnings == 1);
    q[50] = 1; r[7] = 1e9f;
    CHECK_OK(amp_matmul_backward(amp, &mm));
    CHECK(counts(amp, 2, "amp_matmul_backward: dy of scores"));
    for (int i = 0; i < 4; i++) {               /* heads of 2 x 3 positions x 2 x 8 */
        static const char *const names[] = {"amp_attention: q", "amp_attention: k", "amp_attention: v", "amp_attention_backward: d_o"};
        float *in[] = {p, q, r, s};
        fill_all();
        memset(&a, 0, sizeof a);
        a.q = amp_tensor4(p, AMP_F32, 2, 3, 2, 8); a.k = a.v = a.o = a.dq = a.dk = a.dv = a.d_o = a.q;
        a.k.data = q; a.v.data = r; a.d_o.data = s; a.o.data = o; a.dq.data = o2; a.dk.data = o2 + 200; a.dv.data = o2 + 400;
        a.lse = lse;
        in[i][20] = 3e5f; in[i][21] = -3e5f;
        CHECK_OK(amp_attention(amp, &a));
        if (i < 3) CHECK(counts(amp, 2, names[i]));
        else {
            CHECK(counts(amp, 0, ""));
            CHECK_OK(amp_attention_backward(amp, &a));
            CHECK(counts(amp, 2, names[i]));
        }
    }
    CHECK_OK(amp_autocast_end(amp));
    CHECK_EQ(w.warnings, 1);
    amp_close(amp);
}

/* Nothing is lost in bf16, nor in fp32, nor in an island. */
TEST(only_what_fp16_makes_infinite) {
    static layer l;
    words w;
    amp_autocast_desc island;
    amp_context *amp = open_as(AMP_BF16, 0, AMP_CPU_DEFAULT, &w);
    counted = 0;
    layer_begin(amp, &l);
    l.x[0] = 1e30f;
    layer_forward(amp, &l);
    CHECK(counts(amp, 0, ""));
    amp_param_forget(amp, &l.weight, 1);
    amp_close(amp);
    amp = open_as(AMP_F16, 1, AMP_CPU_DEFAULT, &w);
    memset(&island, 0, sizeof island);
    island.disable = 1;
    layer_begin(amp, &l);
    l.x[0] = 1e30f;
    CHECK_OK(amp_autocast_begin(amp, &island));
    CHECK_OK(amp_linear(amp, &l.op));
    CHECK(l.op.plan.saturate == 0 && fabsf(l.y[0]) > 1e29f && counts(amp, 0, ""));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_EQ(w.warnings, 0);
    amp_close(amp);
}

/* x as `compute` shall see it; infinities and NaN stay. */
static float cut(float x, amp_dtype compute) {
    uint32_t bits, most = compute == AMP_F16 ? 0x477fe000u : compute == AMP_BF16 ? 0x7f7f0000u : 0x7f7fe000u;
    memcpy(&bits, &x, sizeof bits);             /* -Ofast knows no infinity */
    if ((bits & 0x7fffffffu) > most && (bits & 0x7fffffffu) < 0x7f800000u) bits = (bits & 0x80000000u) | most;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* On every path, for every shape and storage: the product of operands that the test cuts itself, bit for bit. */
TEST(saturated_products_are_products_of_what_was_cut) {
    static const int shapes[][3] = {{1, 33, 17}, {33, 1, 17}, {4, 4, 4}, {37, 19, 40}, {1, 1, 1}, {16, 32, 1}};
    static const amp_dtype dtypes[] = {AMP_F16, AMP_BF16, AMP_TF32};
    int done = 0;
    for (int path = AMP_CPU_SCALAR; path < AMP_CPU_PATHS; path++)
        for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
            words w[2];
            amp_context *saturate = open_as(dtypes[t], 1, (amp_cpu_path)path, &w[0]), *plain = open_as(dtypes[t], 0, (amp_cpu_path)path, &w[1]);
            if (saturate == NULL) continue;
            for (size_t form = 0; form < 4 * sizeof shapes / sizeof *shapes; form++) {
                int m = shapes[form / 4][0], n = shapes[form / 4][1], k = shapes[form / 4][2], ta = form & 1, tb = form >> 1 & 1;
                float most = dtypes[t] == AMP_F16 ? 1e5f : 3.4028e38f;
                fill_all();
                p[0] = most; p[39] = -most; p[41] = 65510; q[0] = -most; q[81] = 9e4f; q[2] = INFINITY; p[82] = NAN;
                memset(o2, 0, sizeof o2);
                CHECK_OK(amp_gemm(saturate, AMP_ROW_MAJOR, ta ? AMP_TRANS : AMP_NO_TRANS, tb ? AMP_TRANS : AMP_NO_TRANS, m, n, k, 0.5f, p, 40, q, 40, 0, o, 40));
                for (int i = 0; i < 1600; i++) { p[i] = cut(p[i], dtypes[t]); q[i] = cut(q[i], dtypes[t]); }
                CHECK_OK(amp_gemm(plain, AMP_ROW_MAJOR, ta ? AMP_TRANS : AMP_NO_TRANS, tb ? AMP_TRANS : AMP_NO_TRANS, m, n, k, 0.5f, p, 40, q, 40, 0, o2, 40));
                CHECK(memcmp(o, o2, sizeof o) == 0);
                done++;
            }
            counted = 0;
            CHECK(counts(plain, 0, ""));
            CHECK(w[0].warnings == 1 && strstr(w[0].warning, "the loss scaler does not see"));
            amp_close(saturate);
            amp_close(plain);
        }
    CHECK(done >= 3 * 24);
}

/* In every storage dtype, by every operator; a gradient that overflows still does. */
TEST(inputs_are_cut_and_gradients_are_not) {
    static layer l, same;
    words w, v;
    amp_context *amp = open_as(AMP_F16, 1, AMP_CPU_DEFAULT, &w), *plain = open_as(AMP_F16, 0, AMP_CPU_DEFAULT, &v);
    amp_attention_op a;
    layer_begin(amp, &l);
    layer_begin(plain, &same);
    l.x[5] = 1e7f; same.x[5] = 65504;
    l.w[6] = -7e4f; same.w[6] = -65504;
    counted = 0;
    for (int i = 0; i < 4; i++) {               /* as it lies, and packed */
        layer_forward(amp, &l); layer_forward(plain, &same);
        CHECK(l.op.plan.saturate == 1 && memcmp(l.y, same.y, sizeof l.y) == 0 && bad(l.y, ROWS * OUT) == 0);
        CHECK_OK(amp_linear_backward(amp, &l.op)); CHECK_OK(amp_linear_backward(plain, &same.op));
        CHECK(memcmp(l.dx, same.dx, sizeof l.dx) == 0 && memcmp(l.dw, same.dw, sizeof l.dw) == 0 && bad(l.dw, OUT * IN) == 0);
        l.weight.grad_live = same.weight.grad_live = 0;
        CHECK(counts(amp, 4, "amp_linear_backward: weight of fc.weight"));
    }
    CHECK(w.warnings == 1 && strstr(w.warning, "cut by saturate_inputs") && l.x[5] == 1e7f && l.w[6] == -7e4f);
    l.dy[2] = same.dy[2] = 1e6f;
    layer_forward(amp, &l); layer_forward(plain, &same);
    CHECK_OK(amp_linear_backward(amp, &l.op)); CHECK_OK(amp_linear_backward(plain, &same.op));
    CHECK(bad(l.dx, ROWS * IN) == IN && bad(l.dw, OUT * IN) == IN);
    CHECK(counts(amp, 4 + 2, "amp_linear_backward: dy of fc.weight"));

    for (int dtype = AMP_F32; dtype <= AMP_BF16; dtype += AMP_BF16 - AMP_F32) {
        float big[2] = {1e6f, 65504}, out[2][96], dv_out[2][96];
        for (int k = 0; k < 2; k++) {           /* heads side by side in one buffer, as qkv has them */
            static uint32_t qkv[3 * 96 * 2], y[96 * 2], dy[96], dq[96], dk[96], dv[96];
            memset(&a, 0, sizeof a);
            for (int i = 0; i < 3 * 96; i++) store(qkv, (amp_dtype)dtype, i, i == 100 || i == 6 ? big[k] : value(i));
            for (int i = 0; i < 96; i++) store(dy, (amp_dtype)dtype, i, value(i + 2));
            if (k && dtype == AMP_BF16) { store(qkv, AMP_BF16, 100, 65280); store(qkv, AMP_BF16, 6, 65280); }   /* the next in bf16 is 65536 */
            a.q = amp_tensor4(qkv, (amp_dtype)dtype, 2, 3, 2, 8);
            a.q.stride[0] = 144; a.q.stride[1] = 48; a.q.stride[2] = 8; a.q.stride[3] = 1;
            a.k = a.v = a.q;
            a.k.data = (char *)qkv + 16 * amp_dtype_size((amp_dtype)dtype); a.v.data = (char *)qkv + 32 * amp_dtype_size((amp_dtype)dtype);
            a.o = amp_tensor4(y, (amp_dtype)dtype, 2, 3, 2, 8);
            a.d_o = a.dq = a.dk = a.dv = a.o;
            a.d_o.data = dy; a.dq.data = dq; a.dk.data = dk; a.dv.data = dv;
            a.lse = lse;
            CHECK_OK(amp_autocast_begin(k ? plain : amp, NULL));
            CHECK_OK(amp_attention(k ? plain : amp, &a));
            CHECK_OK(amp_autocast_end(k ? plain : amp));
            CHECK_OK(amp_attention_backward(k ? plain : amp, &a));
            CHECK_OK(amp_convert(out[k], AMP_F32, y, (amp_dtype)dtype, 96, NULL, NULL));
            CHECK(bad(out[k], 96) == 0);
            if (k) CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
            CHECK_OK(amp_convert(dv_out[k], AMP_F32, dv, (amp_dtype)dtype, 96, NULL, NULL));
        }
        CHECK(memcmp(dv_out[0], dv_out[1], sizeof dv_out[0]) == 0 && bad(dv_out[0], 96) == 0);
    }
    amp_close(amp);
    amp_close(plain);
}

/* A region alone; those nested within; recomputing obeys the plan. */
TEST(regions_that_saturate) {
    static layer l;
    words w;
    amp_autocast_desc d;
    amp_context *amp = open_as(AMP_F16, 0, AMP_CPU_DEFAULT, &w);
    memset(&d, 0, sizeof d);
    d.saturate_inputs = 1;
    layer_begin(amp, &l);
    l.x[5] = 1e7f;
    CHECK_OK(amp_autocast_begin(amp, &d));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK(amp_autocast_active(amp, &d) && d.saturate_inputs == 1);
    CHECK_OK(amp_linear(amp, &l.op));
    CHECK(bad(l.y, ROWS * OUT) == 0);
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_recompute_begin(amp));
    memset(l.y, 0, sizeof l.y);
    CHECK_OK(amp_linear(amp, &l.op));
    CHECK(bad(l.y, ROWS * OUT) == 0 && l.y[0] != 0);
    CHECK_OK(amp_recompute_end(amp));
    layer_forward(amp, &l);
    CHECK(bad(l.y, ROWS * OUT) == OUT);
    amp_close(amp);
}

TEST(a_setting) {
    amp_context *amp;
    amp_scaler *scaler;
    amp_settings settings;
    amp_desc desc;
    amp_backend device = *amp_cpu();
    amp_autocast_desc d;
    memset(&desc, 0, sizeof desc);
    memset(&d, 0, sizeof d);
    fill_all();
    p[0] = 1e7f;
    setenv("AMP_DTYPE", "fp16", 1);
    for (int on = 0; on < 2; on++) {
        setenv("AMP_SATURATE_INPUTS", on ? "true" : "off", 1);
        CHECK_OK(amp_open_env(&amp, &scaler));
        CHECK_OK(amp_query(amp, &desc));
        CHECK_EQ(desc.saturate_inputs, on);
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 8, 8, 8, 1, p, 8, q, 8, 0, o, 8));
        CHECK((bad(o, 64) > 0) == !on);
        memset(&settings, 0, sizeof settings);
        CHECK_OK(amp_settings_set(&settings, "dtype", "fp16"));
        CHECK_OK(amp_settings_set(&settings, "saturate_inputs", on ? "false" : "true"));
        CHECK_OK(amp_settings_apply(&settings, amp, scaler, NULL, NULL));
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 8, 8, 8, 1, p, 8, q, 8, 0, o, 8));
        CHECK((bad(o, 64) > 0) == on);
        amp_scaler_destroy(scaler);
        amp_close(amp);
    }
    unsetenv("AMP_DTYPE"); unsetenv("AMP_SATURATE_INPUTS");
    memset(&desc, 0, sizeof desc);              /* a device does not: it says so */
    device.name = "device"; device.host_visible = 0;
    desc.backend = &device; desc.dtype = AMP_F16; desc.saturate_inputs = 1;
    CHECK_ERR(amp_open(&amp, &desc), AMP_ERR_UNSUPPORTED);
    CHECK(strstr(amp_last_error(), "saturate_inputs"));
    desc.saturate_inputs = 0;
    CHECK_OK(amp_open(&amp, &desc));
    d.saturate_inputs = 1;
    CHECK_ERR(amp_autocast_begin(amp, &d), AMP_ERR_UNSUPPORTED);
    settings.saturate_inputs = 1;
    CHECK_ERR(amp_settings_apply(&settings, amp, NULL, NULL, NULL), AMP_ERR_UNSUPPORTED);
    amp_close(amp);
}

/* A scaler that is stuck says where numbers became infinite. */
TEST(a_stuck_scaler_points_there) {
    words w;
    amp_context *amp = open_as(AMP_F16, 0, AMP_CPU_DEFAULT, &w);
    amp_scaler *scaler;
    amp_range range = {"o", o, 64, AMP_F32};
    amp_status status;
    char text[4000];
    int32_t apply;
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    fill_all();
    q[3] = -1e6f;
    for (int i = 0; i < 80; i++) {
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 8, 8, 8, 1, p, 8, q, 8, 0, o, 8));
        CHECK_OK(amp_scaler_unscale(scaler, &range, 1, &apply));
        CHECK_EQ(apply, 0);
    }
    CHECK(w.warnings == 1 && w.infos == 1 && strstr(w.warning, "the last in amp_gemm: b:") && strstr(w.warning, "AMP_SATURATE_INPUTS"));
    CHECK_OK(amp_status_get(amp, scaler, 0, &status));
    amp_status_text(&status, text, sizeof text);
    CHECK(status.new_inf == 80 && strstr(text, "80 finite numbers beyond the range of fp16, the last in amp_gemm: b\n"));
    amp_status_json(&status, text, sizeof text);
    CHECK(strstr(text, "\"new_inf\": 80") || strstr(text, "\"new_inf\":80"));
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* A range given without its .count is nothing to unscale: said once. */
TEST(a_range_without_a_count) {
    words w;
    amp_context *amp = open_as(AMP_F16, 0, AMP_CPU_DEFAULT, &w);
    amp_scaler *scaler;
    amp_range range = {"o", o, 0, AMP_F32}, more[2] = {{"first", o, 4, AMP_F32}, {"second", o + 4, 0, AMP_F32}};
    int32_t apply;
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    for (int i = 0; i < 3; i++) CHECK_OK(amp_scaler_unscale(scaler, &range, 1, &apply));
    CHECK(w.warnings == 1 && strstr(w.warning, "no range a .count"));
    for (int i = 0; i < 3; i++) CHECK_OK(amp_scaler_unscale(scaler, more, 2, &apply));
    CHECK(w.warnings == 2 && strstr(w.warning, "range 1 (second) has .data and no .count"));
    amp_scaler_destroy(scaler);
    amp_close(amp);

    amp = open_as(AMP_F16, 0, AMP_CPU_DEFAULT, &w);
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    more[1].data = NULL;                    /* an empty array */
    CHECK_OK(amp_scaler_unscale(scaler, more, 2, &apply));
    CHECK_EQ(w.warnings, 0);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* What two arrays share would be unscaled or stepped twice. */
TEST(arrays_that_share_memory) {
    static float x[16], y[16];
    words w;
    amp_context *amp = open_as(AMP_F16, 0, AMP_CPU_DEFAULT, &w);
    amp_range ranges[3] = {{"a", x, 8, AMP_F32}, {"b", x + 8, 8, AMP_F32}, {"c", y, 8, AMP_F32}};
    amp_grad_set_desc desc = {.ranges = ranges, .n_ranges = 3};
    amp_param params[2] = {{.name = "embedding", .weight = amp_tensor1(x, AMP_F32, 8), .grad = amp_tensor1(y, AMP_F32, 8)},
                           {.name = "head", .weight = amp_tensor1(x + 8, AMP_F32, 8), .grad = amp_tensor1(y + 8, AMP_F32, 8)}};
    amp_optimizer_desc adamw = {.params = params, .n_params = 2, .lr = 0.1};
    amp_scaler *scaler;
    amp_grad_set *set;
    amp_optimizer *optimizer;
    int32_t apply;
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    CHECK_OK(amp_scaler_unscale(scaler, ranges, 3, &apply));        /* side by side */
    x[7] = 1;
    ranges[1].data = x + 7;
    CHECK_ERR(amp_scaler_unscale(scaler, ranges, 3, &apply), AMP_ERR_CONFLICT);
    CHECK(apply == 0 && x[7] == 1 && strstr(amp_last_error(), "gradients 0 (a) and 1 (b) share memory"));
    CHECK_ERR(amp_grad_set_create(amp, &set, &desc), AMP_ERR_CONFLICT);
    CHECK(set == NULL);
    ranges[1].count = 0;
    CHECK_OK(amp_grad_set_create(amp, &set, &desc));
    amp_grad_set_destroy(set);
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &adamw));
    amp_optimizer_destroy(optimizer);
    params[1].weight.data = x;
    CHECK_ERR(amp_optimizer_create(amp, &optimizer, &adamw), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), "weights 0 (embedding) and 1 (head) share memory"));
    params[1].weight.data = x + 8; params[1].grad.data = y + 4;     /* only read, but for a check that unscales */
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &adamw));
    set = amp_optimizer_grad_set(optimizer);
    CHECK_ERR(amp_scaler_check(scaler, set, AMP_CHECK_UNSCALE), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), "gradients 0 (embedding) and 1 (head) share memory"));
    CHECK_ERR(amp_grad_set_apply(set), AMP_ERR_CONFLICT);
    CHECK_ERR(amp_scaler_rescale(scaler, set, 2), AMP_ERR_CONFLICT);
    CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
    CHECK_OK(amp_optimizer_step(optimizer, scaler));
    CHECK_OK(amp_scaler_update(scaler));
    amp_optimizer_destroy(optimizer);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* Counting and cutting trap as little as products do. */
TEST(with_traps) {
#if defined(__GLIBC__) && defined(__x86_64__)
    static layer l;
    double a[16], b[16], c[16];
    for (int saturate = 0; saturate < 2; saturate++) {
        words w;
        amp_context *amp = open_as(AMP_F16, saturate, AMP_CPU_DEFAULT, &w);
        amp_result result[4];
        layer_begin(amp, &l);
        l.x[5] = 1e7f; l.x[30] = INFINITY; l.w[6] = -7e4f; l.dy[2] = 1e6f;
        for (int i = 0; i < 16; i++) { a[i] = i == 3 ? 1e300 : i - 8; b[i] = 1e6 * (i - 3); c[i] = (double)INFINITY; }
        CHECK_OK(amp_autocast_begin(amp, NULL));
        feclearexcept(FE_ALL_EXCEPT);
        CHECK(feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW) >= 0);
        result[0] = amp_linear(amp, &l.op);
        result[1] = amp_linear_backward(amp, &l.op);
        result[2] = amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 4, 4, 4, -1, a, 4, b, 4, 0.5, c, 4);
        result[3] = amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 4, 4, 4, 1e300, a, 4, b, 4, 0, c, 4);
        feclearexcept(FE_ALL_EXCEPT);
        CHECK_EQ(fedisableexcept(FE_ALL_EXCEPT), FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
        for (int i = 0; i < 4; i++) CHECK_EQ(result[i], AMP_OK);
        CHECK_OK(amp_autocast_end(amp));
        amp_close(amp);
    }
#else
    SKIP("no feenableexcept here");
#endif
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(which_operand_of_a_linear_layer); RUN(which_operand_of_the_others); RUN(only_what_fp16_makes_infinite);
    RUN(saturated_products_are_products_of_what_was_cut); RUN(inputs_are_cut_and_gradients_are_not); RUN(regions_that_saturate);
    RUN(a_setting); RUN(a_stuck_scaler_points_there); RUN(a_range_without_a_count);
    RUN(arrays_that_share_memory); RUN(with_traps);
    return TEST_END();
}
