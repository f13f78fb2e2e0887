/* t_adopt.c - tests the functions that a program with its own training loop uses.  These are the scaler over plain arrays,
 * a found_inf that the program computes itself, amp_gemm without a region, and settings from the environment.
 *
 *     gcc -O2 -Itests tests/unit/t_adopt.c -o t_adopt -lm -lpthread && ./t_adopt      (from the project root) */
#if !defined(_GNU_SOURCE)
#  define _GNU_SOURCE
#endif
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <math.h>
#include <unistd.h>

typedef struct words { int n; char last[600]; } words;

static void hear(void *user, amp_log_level level, int id, const char *text) {
    words *w = (words *)user;
    (void)level; (void)id;
    w->n++;
    snprintf(w->last, sizeof w->last, "%s", text);
}

static amp_context *open_as(amp_dtype dtype, words *w, int gemm_always) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(w, 0, sizeof *w);
    desc.dtype = dtype;
    desc.gemm_always = gemm_always;
    desc.logger.write = hear;
    desc.logger.user = w;
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}

static amp_scaler *scaler_at(amp_context *amp, float scale, int32_t interval) {
    amp_scaler *scaler = NULL;
    amp_scaler_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.init_scale = scale;
    desc.growth_interval = interval;
    CHECK_OK(amp_scaler_create(amp, &scaler, &desc));
    return scaler;
}

/* ---- amp_scaler_unscale */

enum { COUNT = 1000 };

static void fill(float *x, uint16_t *y, double *z, float scale) {
    for (int i = 0; i < COUNT; i++) {
        x[i] = scale * (float)(i - 500) / 64;
        y[i] = amp_bf16_from_f32(x[i], 0);
        z[i] = (double)x[i] / 3;
    }
}

/* The same calls as with a set and its parts: same bits, same scale, whatever the step brings. */
TEST(unscale_is_check_and_update_in_one) {
    static float x[2][COUNT];
    static uint16_t y[2][COUNT];
    static double z[2][COUNT];
    words w;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler *one = scaler_at(amp, 1e12f, 3), *parts = scaler_at(amp, 1e12f, 3);
    amp_range ranges[2][3];
    amp_grad_set_desc desc;
    amp_grad_set *set;
    int applied = 0;
    for (int k = 0; k < 2; k++) {
        memset(ranges[k], 0, sizeof ranges[k]);
        ranges[k][0].data = x[k]; ranges[k][0].dtype = AMP_F32; ranges[k][0].count = COUNT; ranges[k][0].name = "x";
        ranges[k][1].data = y[k]; ranges[k][1].dtype = AMP_BF16; ranges[k][1].count = COUNT;
        ranges[k][2].data = z[k]; ranges[k][2].dtype = AMP_F64; ranges[k][2].count = COUNT; ranges[k][2].name = "z";
    }
    memset(&desc, 0, sizeof desc);
    desc.ranges = ranges[1]; desc.n_ranges = 3;
    CHECK_OK(amp_grad_set_create(amp, &set, &desc));
    for (int step = 0; step < 40; step++) {
        amp_grad_stats stats;
        amp_k_scaler a, b;
        int32_t apply = 7;
        float scale = amp_scaler_scale(one);
        for (int k = 0; k < 2; k++) {
            fill(x[k], y[k], z[k], scale);
            if (scale > 65536 || step % 7 == 3) x[k][step * 11 % COUNT] = step % 2 ? INFINITY : NAN;
        }
        CHECK_OK(amp_scaler_unscale(one, ranges[0], 3, &apply));
        CHECK_OK(amp_scaler_check(parts, set, AMP_CHECK_UNSCALE));
        CHECK_OK(amp_grad_set_stats(set, &stats));
        CHECK_OK(amp_scaler_update(parts));
        CHECK_EQ(apply, !stats.found_inf);
        CHECK(memcmp(x[0], x[1], sizeof x[0]) == 0 && memcmp(y[0], y[1], sizeof y[0]) == 0 && memcmp(z[0], z[1], sizeof z[0]) == 0);
        CHECK_OK(amp_scaler_get(one, &a));
        CHECK_OK(amp_scaler_get(parts, &b));
        CHECK(memcmp(&a, &b, sizeof a) == 0);
        if (apply && scale <= 65536) CHECK(fabsf(x[0][600] - 100.0f / 64) < 1e-6f);
        applied += apply;
    }
    CHECK(applied > 5 && applied < 20);         /* 1e12 came down to 65536 in 24 steps */
    amp_grad_set_destroy(set);
    amp_scaler_destroy(one);
    amp_scaler_destroy(parts);
    amp_close(amp);
    CHECK_EQ(w.n, 0);
}

static int64_t allocations;
static void *counting(void *user, size_t size, size_t align) {
    void *p = NULL;
    (void)user;
    allocations++;
    return posix_memalign(&p, align < sizeof p ? sizeof p : align, size) == 0 ? p : NULL;
}
static void released(void *user, void *p, size_t size) { (void)user; (void)size; free(p); }

/* Arrays may move, grow and change between calls; the same ones again take no memory. */
TEST(ranges_may_change_from_call_to_call) {
    static float a[64], b[96];
    amp_context *amp;
    amp_desc desc;
    amp_scaler *scaler;
    amp_range range;
    int32_t apply;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_F16;
    desc.threads = 1;
    desc.system.alloc = counting;
    desc.system.free = released;
    CHECK_OK(amp_open(&amp, &desc));
    scaler = scaler_at(amp, 4, 0);
    memset(&range, 0, sizeof range);
    range.data = a; range.dtype = AMP_F32; range.count = 64;
    for (int step = 0; step < 4; step++) {
        int64_t before = allocations;
        a[5] = 8;
        CHECK_OK(amp_scaler_unscale(scaler, &range, 1, &apply));
        CHECK(apply == 1 && a[5] == 2);
        CHECK((step > 0) == (allocations == before));
    }
    range.data = b; range.count = 96;
    b[95] = 12;
    CHECK_OK(amp_scaler_unscale(scaler, &range, 1, &apply));
    CHECK(apply == 1 && b[95] == 3);
    range.count = -1;
    apply = 1;
    CHECK_ERR(amp_scaler_unscale(scaler, &range, 1, &apply), AMP_ERR_RANGE);
    CHECK_EQ(apply, 0);
    range.count = 96; range.dtype = AMP_I32;
    CHECK_ERR(amp_scaler_unscale(scaler, &range, 1, &apply), AMP_ERR_DTYPE);
    range.dtype = AMP_F32;
    CHECK_ERR(amp_scaler_unscale(scaler, &range, 0, &apply), AMP_ERR_RANGE);
    CHECK_ERR(amp_scaler_unscale(scaler, NULL, 1, &apply), AMP_ERR_NULL);
    CHECK_ERR(amp_scaler_unscale(scaler, &range, 1, NULL), AMP_ERR_NULL);
    b[95] = 12;
    CHECK_OK(amp_scaler_unscale(scaler, &range, 1, &apply));
    CHECK(apply == 1 && b[95] == 3);            /* what was refused changed nothing */
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* torch's preset refuses fp16 gradients, and leaves them as they are. */
TEST(torch_takes_no_fp16) {
    uint16_t x[2] = {0x3c00, 0x4000};
    amp_range range;
    words w;
    int32_t apply = 1;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler_desc desc;
    amp_scaler *scaler;
    memset(&range, 0, sizeof range);
    memset(&desc, 0, sizeof desc);
    range.data = x; range.count = 2; range.dtype = AMP_F16;
    desc.preset = AMP_SCALER_TORCH;
    CHECK_OK(amp_scaler_create(amp, &scaler, &desc));
    CHECK_ERR(amp_scaler_unscale(scaler, &range, 1, &apply), AMP_ERR_GRAD_16BIT);
    CHECK(apply == 0 && x[0] == 0x3c00 && x[1] == 0x4000);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* ---- The host's own found_inf */

TEST(found_inf_of_the_host) {
    words w;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler *scaler = scaler_at(amp, 1024, 2);
    static const struct { int32_t found; float scale; } steps[] = {{1, 512}, {0, 512}, {0, 1024}, {1, 512}, {0, 512}, {1, 256}, {0, 256}, {0, 512}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        CHECK_OK(amp_scaler_update_with(scaler, steps[i].found));
        CHECK(amp_scaler_scale(scaler) == steps[i].scale);
    }
    CHECK_ERR(amp_scaler_update_with(scaler, 2), AMP_ERR_RANGE);
    CHECK_ERR(amp_scaler_update(scaler), AMP_ERR_NO_CHECK);
    CHECK(amp_scaler_scale(scaler) == 512);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* What a check found counts, too. */
TEST(found_inf_of_host_and_check) {
    float x[4] = {1, 2, INFINITY, 4};
    words w;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler *scaler = scaler_at(amp, 8, 2);
    amp_range range = {NULL, x, 4, AMP_F32};
    amp_grad_set_desc desc;
    amp_grad_set *set;
    memset(&desc, 0, sizeof desc);
    desc.ranges = &range; desc.n_ranges = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &desc));
    CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
    CHECK_OK(amp_scaler_update_with(scaler, 0));
    CHECK(amp_scaler_scale(scaler) == 4);
    CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));        /* ready again */
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* ---- No scaler */

TEST(no_scaler_is_a_scale_of_1) {
    float x[2] = {3, INFINITY};
    amp_range range = {NULL, x, 2, AMP_F32};
    amp_k_scaler state;
    int32_t apply = 0;
    memset(&state, 0x55, sizeof state);
    CHECK(amp_scaler_scale(NULL) == 1 && amp_scaler_scale_ptr(NULL) == NULL && !amp_scaler_enabled(NULL));
    CHECK_OK(amp_scaler_get(NULL, &state));
    CHECK(state.scale == 1 && state.inv_scale == 1 && state.found_inf == 0 && state.skips == 0);
    CHECK_OK(amp_scaler_unscale(NULL, &range, 1, &apply));
    CHECK(apply == 1 && x[0] == 3);
    CHECK_OK(amp_scaler_update(NULL));
    CHECK_OK(amp_scaler_update_with(NULL, 1));
    CHECK_ERR(amp_scaler_update_with(NULL, -1), AMP_ERR_RANGE);
    CHECK_OK(amp_scaler_check(NULL, NULL, AMP_CHECK_READ));
    CHECK_OK(amp_scaler_rescale(NULL, NULL, 0));
    amp_scaler_destroy(NULL);
    amp_close(NULL);
}

TEST(enabled) {
    words w;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler *on = scaler_at(amp, 2, 0), *off;
    amp_scaler_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.disable = 1;
    CHECK_OK(amp_scaler_create(amp, &off, &desc));
    CHECK(amp_scaler_enabled(on) == 1 && amp_scaler_enabled(off) == 0);
    amp_scaler_destroy(off);
    amp_close(amp);
    CHECK(amp_scaler_enabled(on) == 0);
    amp_scaler_destroy(on);
}

/* ---- amp_gemm everywhere */

enum { N = 24 };
static float left[N * N], right[N * N];

static void product(amp_context *amp, float *c) {
    for (int i = 0; i < N * N; i++) { left[i] = (float)(i % 37) / 31 - 0.5f; right[i] = (float)(i % 41) / 29 - 0.7f; }
    memset(c, 0, N * N * sizeof *c);
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, N, N, N, 1, left, N, right, N, 0, c, N));
}

TEST(gemm_always_needs_no_region) {
    static float plain[N * N], inside[N * N], c[N * N];
    words w, silent;
    amp_context *amp = open_as(AMP_BF16, &w, 0), *always = open_as(AMP_BF16, &silent, 1);
    amp_autocast_desc island;
    memset(&island, 0, sizeof island);
    island.disable = 1;
    product(amp, plain);
    CHECK(w.n == 1 && strstr(w.last, "gemm_always") && strstr(w.last, "bf16"));
    product(amp, c);
    CHECK_EQ(w.n, 1);                           /* once */
    CHECK_OK(amp_autocast_begin(amp, NULL));
    product(amp, inside);
    CHECK_OK(amp_autocast_end(amp));
    CHECK(memcmp(plain, inside, sizeof plain) != 0 && memcmp(plain, c, sizeof plain) == 0);
    product(always, c);
    CHECK(memcmp(inside, c, sizeof c) == 0);
    CHECK_OK(amp_autocast_begin(always, &island));
    product(always, c);
    CHECK(memcmp(plain, c, sizeof c) == 0);
    CHECK_OK(amp_autocast_end(always));
    CHECK_OK(amp_set_enabled(always, 0));
    product(always, c);
    CHECK(memcmp(plain, c, sizeof c) == 0);
    CHECK_EQ(silent.n, 0);
    amp_close(amp);
    amp_close(always);
    amp = open_as(AMP_F32, &w, 0);
    product(amp, c);
    CHECK(w.n == 0 && memcmp(plain, c, sizeof c) == 0);
    amp_close(amp);
}

/* Every order and transposition against loops, with room between the rows; what lies between them stays. */
TEST(gemm_of_fp64) {
    enum { M = 5, K = 7, WIDE = 9 };
    double a[WIDE * WIDE], b[WIDE * WIDE], c[WIDE * WIDE];
    words w;
    amp_backend device;
    amp_desc desc;
    amp_context *amp = open_as(AMP_F32, &w, 0);
    int column = 3;                             /* of B and C */
    for (int form = 0; form < 8; form++) {
        int col = form & 1, ta = form >> 1 & 1, tb = form >> 2;
        for (int i = 0; i < WIDE * WIDE; i++) { a[i] = 1.0 / (i + 3); b[i] = (i % 11 - 5) / 3.0; c[i] = 1e-12 * i; }
        CHECK_OK(amp_gemm_f64(amp, col ? AMP_COL_MAJOR : AMP_ROW_MAJOR, ta ? AMP_TRANS : AMP_NO_TRANS, tb ? AMP_TRANS : AMP_NO_TRANS, M, column, K,
                              0.5, a, WIDE, b, WIDE, form % 3 ? 2 : 0, c, WIDE));
        for (int at = 0; at < WIDE * WIDE; at++) {
            int i = col ? at % WIDE : at / WIDE, j = col ? at / WIDE : at % WIDE;
            double before = 1e-12 * at, sum = 0;
            if (i >= M || j >= column) { CHECK(c[at] == before); continue; }
            for (int p = 0; p < K; p++) sum += a[col != ta ? p * WIDE + i : i * WIDE + p] * b[col != tb ? j * WIDE + p : p * WIDE + j];
            CHECK(fabs(c[at] - 0.5 * sum - (form % 3 ? 2 * before : 0)) < 1e-6);
        }
    }
    c[0] = 1e-30;                               /* beta C is fp64: it does not pass through fp32 */
    CHECK_OK(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 0, 1, NULL, 1, NULL, 1, 1.0 + 1e-12, c, 1));
    CHECK(c[0] == 1e-30 * (1.0 + 1e-12));
    a[0] = (double)NAN;                         /* alpha 0 reads neither */
    CHECK_OK(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 0, a, 1, NULL, 1, 0, c, 1));
    CHECK(c[0] == 0);
    a[0] = 4; b[0] = 8;                         /* alpha is fp64, too: 2^-200 and 2^200 */
    for (int i = -1; i < 2; i += 2) {
        CHECK_OK(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, ldexp(1, 200 * i), a, 1, b, 1, 0, c, 1));
        CHECK(c[0] == ldexp(1, 200 * i + 5));
    }
    CHECK_ERR(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 0, 1, 1, (double)NAN, a, 1, b, 1, 0, c, 1), AMP_ERR_RANGE);
    CHECK_ERR(amp_gemm_f64(NULL, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, a, 1, b, 1, 0, c, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, NULL, 1, b, 1, 0, c, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, 1, a, 1, b, 2, 0, c, 2), AMP_ERR_RANGE);
    CHECK_ERR(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, (double)INFINITY, a, 1, b, 1, 0, c, 1), AMP_ERR_RANGE);
    CHECK_ERR(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, a, 1, b, 1, (double)NAN, c, 1), AMP_ERR_RANGE);
    CHECK_ERR(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, 1, a, 2, b, 2, 0, a + 3, 2), AMP_ERR_CONFLICT);
    amp_close(amp);
    device = *amp_cpu();
    device.name = "device"; device.host_visible = 0;
    memset(&desc, 0, sizeof desc);
    desc.backend = &device;
    CHECK_OK(amp_open(&amp, &desc));
    c[0] = 0;
    CHECK_ERR(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, a, 1, b, 1, 0, c, 1), AMP_ERR_UNSUPPORTED);
    CHECK(c[0] == 0);
    amp_close(amp);
}

/* ---- What the program finds before its own sums */

TEST(found_before_a_sum) {
    float g[4] = {1, INFINITY, 2, 3};
    const double nan = NAN;
    amp_range range = {"g", g, 4, AMP_F32};
    amp_grad_set_desc ranges;
    amp_grad_set *set = NULL;
    amp_scaler_desc d;
    amp_scaler *scaler = NULL;
    int32_t apply = 1;
    words w;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    memset(&d, 0, sizeof d);
    memset(&ranges, 0, sizeof ranges);
    d.init_scale = 1024;
    ranges.ranges = &range; ranges.n_ranges = 1;
    CHECK_OK(amp_scaler_create(amp, &scaler, &d));
    CHECK_OK(amp_grad_set_create(amp, &set, &ranges));
    CHECK_EQ(amp_scaler_found(NULL, g, AMP_F32, 4), 0);
    CHECK_EQ(amp_scaler_found(scaler, g, AMP_F32, 1), 0);           /* the infinity is the second */
    CHECK_EQ(amp_scaler_found(scaler, g, AMP_I32, 4), 0);
    CHECK_ERR(amp_scaler_update(scaler), AMP_ERR_NO_CHECK);
    CHECK_EQ(amp_scaler_found(scaler, g, AMP_F32, 4), 1);
    CHECK_EQ(amp_scaler_found(scaler, g, AMP_F32, 1), 1);           /* remembered */
    CHECK_ERR(amp_scaler_check(scaler, set, AMP_CHECK_READ), AMP_ERR_STATE);
    CHECK_OK(amp_scaler_update_with(scaler, 0));
    CHECK(amp_scaler_scale(scaler) == 512 && !amp_scaler_found(scaler, NULL, AMP_F32, 0));
    CHECK_EQ(amp_scaler_found(scaler, &nan, AMP_F64, 1), 1);
    CHECK_OK(amp_scaler_update(scaler));                            /* a finding is as good as a check */
    CHECK(amp_scaler_scale(scaler) == 256);
    g[1] = 2;
    CHECK_EQ(amp_scaler_found(scaler, &nan, AMP_F64, 1), 1);
    CHECK_OK(amp_scaler_unscale(scaler, &range, 1, &apply));
    CHECK(apply == 0 && amp_scaler_scale(scaler) == 128 && g[0] == 1 && g[3] == 3);
    CHECK_OK(amp_scaler_unscale(scaler, &range, 1, &apply));
    CHECK(apply == 1 && amp_scaler_scale(scaler) == 128 && g[3] == 3.0f / 128);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
    CHECK_EQ(amp_scaler_found(NULL, NULL, AMP_F32, 0), 0);
}

/* ---- From the environment */

static void clean(void) {
    static const char *const names[] = {"AMP_DTYPE", "AMP_SCALER", "AMP_INIT_SCALE", "AMP_CLIP_NORM", "AMP_DTYP", "AMP_LEVEL", "AMP_THREADS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

TEST(nothing_in_the_environment) {
    amp_context *amp = (amp_context *)&amp;
    amp_scaler *scaler = (amp_scaler *)&amp;
    float c = 5;
    amp_linear_op op;
    clean();
    CHECK_OK(amp_open_env(&amp, &scaler));
    CHECK(amp == NULL && scaler == NULL);
    CHECK_ERR(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, &c, 1, &c, 1, 0, &c, 1), AMP_ERR_NULL);
    memset(&op, 0, sizeof op);
    CHECK_ERR(amp_linear(amp, &op), AMP_ERR_NULL);
    CHECK(c == 5);
}

TEST(opened_from_the_environment) {
    static float inside[N * N], c[N * N];
    amp_context *amp, *other;
    amp_scaler *scaler;
    amp_choice choice;
    words w;
    clean();
    setenv("AMP_DTYPE", "bf16", 1);
    CHECK_OK(amp_open_env(&amp, &scaler));
    CHECK_OK(amp_query_choice(amp, &choice));
    CHECK(choice.dtype == AMP_BF16 && scaler != NULL && !amp_scaler_enabled(scaler));
    product(amp, c);
    other = open_as(AMP_BF16, &w, 1);
    product(other, inside);
    CHECK(memcmp(inside, c, sizeof c) == 0);
    amp_close(other);
    amp_scaler_destroy(scaler);
    amp_close(amp);

    setenv("AMP_DTYPE", "fp16", 1);
    setenv("AMP_INIT_SCALE", "1024", 1);
    CHECK_OK(amp_open_env(&amp, &scaler));
    CHECK_OK(amp_query_choice(amp, &choice));
    CHECK(choice.dtype == AMP_F16 && amp_scaler_enabled(scaler) && amp_scaler_scale(scaler) == 1024);
    amp_scaler_destroy(scaler);
    amp_close(amp);

    setenv("AMP_DTYPE", "", 1);                 /* empty: not set */
    unsetenv("AMP_INIT_SCALE");
    CHECK_OK(amp_open_env(&amp, &scaler));
    CHECK(amp == NULL && scaler == NULL);
#if !defined(_WIN32)                            /* which has no empty variables */
    setenv("AMP_DTYP", "", 1);                  /* but not another name */
    CHECK_ERR(amp_open_env(&amp, &scaler), AMP_ERR_NAME);
#endif
    clean();
}

TEST(wrong_environments) {
    amp_context *amp = (amp_context *)&amp;
    amp_context *const kept = amp;
    amp_scaler *scaler = (amp_scaler *)&amp, *const kept_scaler = scaler;
    clean();
    CHECK_ERR(amp_open_env(NULL, &scaler), AMP_ERR_NULL);
    setenv("AMP_DTYP", "bf16", 1);
    CHECK_ERR(amp_open_env(&amp, &scaler), AMP_ERR_NAME);
    CHECK(amp == kept && scaler == kept_scaler && strstr(amp_last_error(), "AMP_DTYPE"));   /* NULL would look like "off" */
    clean();
    setenv("AMP_DTYPE", "bf17", 1);
    CHECK_ERR(amp_open_env(&amp, &scaler), AMP_ERR_RANGE);
    setenv("AMP_DTYPE", "fp16", 1);
    setenv("AMP_LEVEL", "O0", 1);
    CHECK_ERR(amp_open_env(&amp, &scaler), AMP_ERR_CONFLICT);
    unsetenv("AMP_LEVEL");
    setenv("AMP_CLIP_NORM", "1", 1);            /* of an optimizer, which is not opened here */
    CHECK_OK(amp_open_env(&amp, &scaler));
    amp_scaler_destroy(scaler);
    amp_close(amp);
    amp = kept;
    scaler = kept_scaler;
    setenv("AMP_LEVEL", "O0", 1);
    CHECK_ERR(amp_open_env(&amp, &scaler), AMP_ERR_CONFLICT);
    CHECK(amp == kept && scaler == kept_scaler);
    clean();
}

/* A program with products alone asks for no scaler; where the environment wants one, it says so. */
TEST(products_only) {
    SKIP_ON_WINDOWS("stderr that can be read back through a second descriptor");
    static const struct { const char *dtype, *scaler; int warned; } rows[] = {
        {"bf16", "", 0}, {"fp16", "", 1}, {"fp16", "off", 0}, {"bf16", "on", 1}};
    static float inside[N * N], c[N * N];
    amp_context *amp = (amp_context *)&amp, *other;
    words w;
    clean();
    CHECK_OK(amp_open_env(&amp, NULL));
    CHECK(amp == NULL);
    for (int i = 0; i < 4; i++) {
        char said[1024] = "";
        FILE *file = tmpfile();
        int saved = dup(2);
        CHECK(file != NULL && saved >= 0 && dup2(fileno(file), 2) == 2);
        setenv("AMP_DTYPE", rows[i].dtype, 1);
        setenv("AMP_SCALER", rows[i].scaler, 1);
        CHECK_OK(amp_open_env(&amp, NULL));
        CHECK(dup2(saved, 2) == 2 && close(saved) == 0);
        rewind(file);
        said[fread(said, 1, sizeof said - 1, file)] = 0;
        CHECK_MSG((strstr(said, "loss scaler") != NULL) == rows[i].warned, "%s: %s", rows[i].dtype, said);
        fclose(file);
        product(amp, c);
        other = open_as(i == 0 || i == 3 ? AMP_BF16 : AMP_F16, &w, 1);
        product(other, inside);
        CHECK(memcmp(inside, c, sizeof c) == 0);
        amp_close(other);
        amp_close(amp);
    }
    clean();
}

TEST(threads_from_the_environment) {
    amp_context *amp;
    amp_desc d;
    clean();
    setenv("AMP_DTYPE", "bf16", 1);
    setenv("AMP_THREADS", "1", 1);
    CHECK_OK(amp_open_env(&amp, NULL));
    CHECK_OK(amp_query(amp, &d));
    CHECK_EQ(d.threads, 1);
    amp_close(amp);
    setenv("AMP_THREADS", "0", 1);
    CHECK_ERR(amp_open_env(&amp, NULL), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "AMP_THREADS = 0, must be a whole number from 1 to 1024, or all") != NULL);
    clean();
}

/* ---- What goes on for ever is said once */

TEST(skips_at_the_floor) {
    float x = INFINITY;
    amp_range range = {NULL, &x, 1, AMP_F32};
    words w;
    int32_t apply;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler *scaler = scaler_at(amp, 4, 0), *quick, *never;
    amp_scaler_desc desc;
    for (int i = 0; i < 60; i++) {              /* two shrink the scale to its floor, 1; the 50th is warned about */
        CHECK_OK(amp_scaler_unscale(scaler, &range, 1, &apply));
        CHECK(apply == 0 && w.n == (i >= 49));
    }
    CHECK(strstr(w.last, "50 steps") && strstr(w.last, "floor, 1"));
    amp_scaler_destroy(scaler);
    amp_close(amp);

    amp = open_as(AMP_F16, &w, 0);
    memset(&desc, 0, sizeof desc);
    desc.skip_warning = -1;
    CHECK_OK(amp_scaler_create(amp, &never, &desc));
    for (int i = 0; i < 200; i++) CHECK_OK(amp_scaler_update_with(never, 1));
    CHECK_EQ(w.n, 0);
    desc.skip_warning = 3;
    desc.init_scale = 1;
    CHECK_OK(amp_scaler_create(amp, &quick, &desc));
    for (int i = 0; i < 10; i++) {
        CHECK_OK(amp_scaler_update_with(quick, i == 2 ? 0 : 1));
        CHECK_EQ(w.n, i >= 5);
    }
    desc.skip_warning = -2;
    amp_scaler_destroy(quick);
    CHECK_ERR(amp_scaler_create(amp, &quick, &desc), AMP_ERR_RANGE);
    amp_scaler_destroy(never);
    amp_close(amp);
}

TEST(sets_without_a_count) {
    float x[2] = {1, 2};
    amp_range range = {NULL, x, 2, AMP_F32};
    amp_param param;
    words w;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler *scaler = scaler_at(amp, 2, 0);
    amp_grad_set_desc desc;
    amp_grad_set *set;
    memset(&desc, 0, sizeof desc);
    desc.ranges = &range;
    CHECK_ERR(amp_grad_set_create(amp, &set, &desc), AMP_ERR_RANGE);
    desc.sharded = 1;                           /* this rank has nothing of it */
    CHECK_OK(amp_grad_set_create(amp, &set, &desc));
    CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
    CHECK_EQ(w.n, 0);
    CHECK_ERR(amp_grad_set_restore(set), AMP_ERR_STATE);
    CHECK_OK(amp_grad_set_save(set));
    CHECK_OK(amp_grad_set_restore(set));
    amp_grad_set_destroy(set);
    memset(&param, 0, sizeof param);
    param.name = "frozen";
    param.weight = amp_tensor1(x, AMP_F32, 2);
    CHECK_OK(amp_param_register(amp, &param, 1));
    memset(&desc, 0, sizeof desc);
    desc.params = &param;
    CHECK_ERR(amp_grad_set_create(amp, &set, &desc), AMP_ERR_RANGE);
    desc.n_params = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &desc));
    CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
    CHECK(w.n == 1 && strstr(w.last, "no gradients"));
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* ---- Gradient buffer = momentum buffer */

enum { WEIGHTS = 300, BATCH = 16 };

typedef struct host { float w[WEIGHTS], d[WEIGHTS]; } host;

/* d += S * gradient of a least-squares fit, as a host's backward pass adds it up: every product with S is exact. */
static void backward(host *h, int step, float scale, int overflow) {
    for (int b = 0; b < BATCH; b++) {
        float x[WEIGHTS], error = 0;
        for (int i = 0; i < WEIGHTS; i++) x[i] = (float)((i * 7 + b * 13 + step * 29) % 23 - 11) / 16;
        for (int i = 0; i < WEIGHTS; i++) error += (h->w[i] - (float)(i % 5)) * x[i];
        for (int i = 0; i < WEIGHTS; i++) h->d[i] += scale * error * x[i];
    }
    if (overflow) h->d[step % WEIGHTS] = step % 2 ? INFINITY : -NAN;
}
static void update(host *h, float rate, float decay, float scale) {
    float step = rate / scale, pull = decay * scale;
    for (int i = 0; i < WEIGHTS; i++) {
        h->d[i] += pull * h->w[i];
        h->w[i] -= step * h->d[i];
        h->d[i] *= 0.9f;
    }
}

/* Growth, skips and rescaling leave the weights of a run without a scale; momentum is S times its own. */
TEST(momentum_in_the_gradient_buffer) {
    static host plain, scaled;
    words w;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler *scaler = scaler_at(amp, 4096, 5);
    amp_range range;
    amp_grad_set_desc desc;
    amp_grad_set *set;
    amp_grad_stats stats;
    int skipped = 0, scales = 0;
    float last = 0;
    memset(&range, 0, sizeof range);
    memset(&desc, 0, sizeof desc);
    range.name = "d"; range.data = scaled.d; range.count = WEIGHTS; range.dtype = AMP_F32;
    desc.ranges = &range; desc.n_ranges = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &desc));
    CHECK_ERR(amp_grad_set_restore(set), AMP_ERR_STATE);
    for (int step = 0; step < 120; step++) {
        float s = amp_scaler_scale(scaler);
        int overflow = step % 17 == 4;
        scales += s != last;
        last = s;
        CHECK_OK(amp_grad_set_save(set));
        backward(&scaled, step, s, overflow);
        CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
        CHECK_OK(amp_grad_set_stats(set, &stats));
        CHECK_EQ(stats.found_inf, overflow);
        if (overflow) CHECK(strcmp(stats.first_bad, "d") == 0 && stats.first_bad_element == step % WEIGHTS);
        else CHECK(stats.first_bad == NULL && stats.first_bad_element == -1);
        if (stats.found_inf) { skipped++; CHECK_OK(amp_grad_set_restore(set)); }
        else {
            update(&scaled, 1e-4f, 1e-3f, s);
            backward(&plain, step, 1, 0);
            update(&plain, 1e-4f, 1e-3f, 1);
        }
        CHECK_OK(amp_scaler_update(scaler));
        CHECK_OK(amp_scaler_rescale(scaler, set, 0));
        s = amp_scaler_scale(scaler);
        CHECK(memcmp(plain.w, scaled.w, sizeof plain.w) == 0);
        for (int i = 0; i < WEIGHTS; i++) CHECK(scaled.d[i] == s * plain.d[i]);
    }
    CHECK(skipped == 7 && scales > 20 && fabsf(plain.w[3] - 3) < 3);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* The first bad element behind the pieces in which it is looked for, and in every dtype. */
TEST(the_first_bad_element) {
    enum { LONG = 70001 };
    static double x[LONG], zeros[LONG];
    static const amp_dtype dtypes[] = {AMP_F32, AMP_F16, AMP_BF16, AMP_F64};
    words w;
    amp_context *amp = open_as(AMP_F16, &w, 0);
    amp_scaler *scaler = scaler_at(amp, 2, 0);
    for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++)
        for (int64_t at = 0; at < LONG; at = at == 0 ? 1 : at * 5 + 3) {
            double bad = at % 2 ? -(double)INFINITY : (double)NAN;
            amp_range ranges[2];
            amp_grad_set_desc desc;
            amp_grad_set *set;
            amp_grad_stats stats;
            memset(x, 0, sizeof x);
            memset(ranges, 0, sizeof ranges);
            memset(&desc, 0, sizeof desc);
            CHECK_OK(amp_convert((char *)x + at * (int64_t)amp_dtype_size(dtypes[t]), dtypes[t], &bad, AMP_F64, 1, NULL, NULL));
            ranges[0].data = zeros; ranges[0].count = at; ranges[0].dtype = dtypes[t]; ranges[0].name = "clean";
            ranges[1].data = x; ranges[1].count = LONG; ranges[1].dtype = dtypes[t];
            desc.ranges = ranges; desc.n_ranges = 2;
            CHECK_OK(amp_grad_set_create(amp, &set, &desc));
            CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
            CHECK_OK(amp_grad_set_stats(set, &stats));
            CHECK_OK(amp_scaler_update(scaler));
            CHECK(stats.first_bad_index == 1 && stats.first_bad_element == at);
            amp_grad_set_destroy(set);
        }
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(unscale_is_check_and_update_in_one); RUN(ranges_may_change_from_call_to_call); RUN(torch_takes_no_fp16); RUN(found_inf_of_the_host);
    RUN(found_inf_of_host_and_check); RUN(no_scaler_is_a_scale_of_1); RUN(enabled); RUN(gemm_always_needs_no_region); RUN(gemm_of_fp64);
    RUN(nothing_in_the_environment); RUN(opened_from_the_environment); RUN(wrong_environments); RUN(products_only); RUN(found_before_a_sum); RUN(threads_from_the_environment); RUN(skips_at_the_floor);
    RUN(sets_without_a_count); RUN(momentum_in_the_gradient_buffer); RUN(the_first_bad_element);
    return TEST_END();
}
