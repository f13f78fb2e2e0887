/* t_optimizer.c - tests the optimizers and the step.  It compares them with PyTorch, and tests skipped steps, accumulation,
 * groups, master weights, outcomes, saving and loading.
 *
 *     gcc -O2 -Itests tests/unit/t_optimizer.c -o t_optimizer -lm -lpthread && ./t_optimizer      (from the project root)
 *
 * tests/torch/oracle/optimizer.py writes the golden data.  `t_optimizer --full` takes every fp32 pattern through a
 * remainder, not only those at edges. */
#define _POSIX_C_SOURCE 200809L
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "alike.h"
#include "golden.h"

enum { TENSORS = 5, ROOM = 400 };
static const int64_t shapes[TENSORS][2] = {{7, 13}, {33, 0}, {19, 17}, {1, 0}, {30, 5}};
static const char *const names[TENSORS] = {"a.weight", "a.bias", "b.weight", "b.bias", "c.weight"};

/* Five parameters with their weights and gradients, in any storage dtype. */
typedef struct model {
    float w[TENSORS][ROOM], g[TENSORS][ROOM];
    uint16_t w16[TENSORS][ROOM], g16[TENSORS][ROOM];
    amp_dtype weight, grad;
    amp_param p[TENSORS];
} model;

static int64_t count_of(int i) { return shapes[i][0] * (shapes[i][1] ? shapes[i][1] : 1); }

static amp_tensor view(const void *data, amp_dtype dtype, int i) {
    return shapes[i][1] ? amp_tensor2(data, dtype, shapes[i][0], shapes[i][1]) : amp_tensor1(data, dtype, shapes[i][0]);
}

static void model_init(model *m, amp_dtype weight, amp_dtype grad) {
    int i;
    memset(m, 0, sizeof *m);
    m->weight = weight;
    m->grad = grad;
    for (i = 0; i < TENSORS; i++) {
        ampt_uniform(m->w[i], count_of(i), 31, (uint32_t)i, 1, 0);
        if (weight != AMP_F32) CHECK_OK(amp_convert(m->w16[i], weight, m->w[i], AMP_F32, count_of(i), NULL, NULL));
        m->p[i].name = names[i];
        m->p[i].weight = weight == AMP_F32 ? view(m->w[i], weight, i) : view(m->w16[i], weight, i);
        m->p[i].grad = grad == AMP_F32 ? view(m->g[i], grad, i) : view(m->g16[i], grad, i);
    }
}

/* The gradients of a step, times factor; 16-bit ones are rounded, and m->g holds what they then are. */
static void model_backward(model *m, int step, float factor) {
    int64_t k;
    int i;
    for (i = 0; i < TENSORS; i++) {
        ampt_uniform(m->g[i], count_of(i), 32, (uint32_t)(16 * step + i), (float)(0.01 * (1 + step % 7)), 0.002f);
        for (k = 0; k < count_of(i); k++) m->g[i][k] *= factor;
        if (m->grad != AMP_F32) {
            CHECK_OK(amp_convert(m->g16[i], m->grad, m->g[i], AMP_F32, count_of(i), NULL, NULL));
            CHECK_OK(amp_convert(m->g[i], AMP_F32, m->g16[i], m->grad, count_of(i), NULL, NULL));
        }
        m->p[i].grad_live = 1;
    }
}

static amp_context *open_context(amp_cpu_path path, int threads, amp_level level) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.cpu_path = path;
    d.threads = threads;
    d.level = level;
    d.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

static amp_optimizer_desc adamw(model *m) {
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.params = m->p;
    d.n_params = TENSORS;
    d.lr = 0.01;
    d.weight_decay = 0.1;
    return d;
}

/* One of the optimizers; SGD with the momentum that it needs for moments. */
static void set_kind(amp_optimizer_desc *d, int kind) {
    d->kind = (amp_optimizer_kind)kind;
    d->momentum = kind == AMP_SGD ? 0.9 : 0;
}

static amp_optimizer *make(amp_context *amp, const amp_optimizer_desc *d) {
    amp_optimizer *o = NULL;
    CHECK_OK(amp_optimizer_create(amp, &o, d));
    return o;
}

static amp_scaler *make_scaler(amp_context *amp, float init, int32_t interval) {
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.init_scale = init;
    d.growth_interval = interval;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    return s;
}

/* ---- Against PyTorch */

typedef struct kase { const char *name; amp_optimizer_kind kind; double lr, beta1, beta2, eps, decay, momentum, dampening, clip; int nesterov, maximize, schedule, mixed; } kase;
static const kase cases[] = {
    {"adamw", AMP_ADAMW, 1e-3, 0, 0, 0, 0.1, 0, 0, 0.4, 0, 0, 0, 0},
    {"adamw_betas", AMP_ADAMW, 3e-3, 0.8, 0.95, 1e-6, 0, 0, 0, 0, 0, 0, 0, 0},
    {"adamw_maximize", AMP_ADAMW, 1e-2, 0, 0, 0, 0.01, 0, 0, 0, 0, 1, 1, 0},
    {"sgd", AMP_SGD, 0.05, 0, 0, 0, 0.02, 0, 0, 0.5, 0, 0, 0, 0},
    {"sgd_momentum", AMP_SGD, 0.02, 0, 0, 0, 0, 0.9, 0.1, 0, 0, 0, 1, 0},
    {"sgd_nesterov", AMP_SGD, 0.01, 0, 0, 0, 0.05, 0.9, 0, 0, 1, 1, 0, 0},
    {"lion", AMP_LION, 0, 0, 0, 0, 1, 0, 0, 0.4, 0, 0, 0, 0},
    {"lion_betas", AMP_LION, 3e-3, 0.95, 0.98, 0, 0, 0, 0, 0, 0, 1, 1, 0},
    {"lion_mixed", AMP_LION, 1e-3, 0, 0, 0, 0.3, 0, 0, 0, 0, 0, 0, 1}};
enum { CASES = sizeof cases / sizeof cases[0] };

static amp_optimizer_desc case_desc(model *m, const kase *c) {
    amp_optimizer_desc d = adamw(m);
    d.kind = c->kind; d.lr = c->lr; d.beta1 = c->beta1; d.beta2 = c->beta2; d.eps = c->eps; d.weight_decay = c->decay;
    d.momentum = c->momentum; d.dampening = c->dampening; d.clip_norm = c->clip; d.nesterov = c->nesterov; d.maximize = c->maximize;
    return d;
}

static double case_rate(const kase *c, int step) { return c->schedule ? c->lr * (0.25 + 0.75 * (step % 8) / 8) : c->lr; }

/* The distance of a tensor from the fp64 result, as a relative norm. */
static double distance(const float *w, const double *exact, int64_t n) {
    double off = 0, own = 0;
    int64_t k;
    for (k = 0; k < n; k++) {
        off += ((double)w[k] - exact[k]) * ((double)w[k] - exact[k]);
        own += exact[k] * exact[k];
    }
    return sqrt(off / own);
}

/* Our distance from the fp64 result may be 1.2 times that of PyTorch's fp32, per tensor; a tensor where PyTorch was
   lucky may be off by the one rounding to fp32 that every step ends with: sqrt(100) u / 2, as roundings add up like a
   random walk. */
static void compare_with_torch(const kase *c, amp_cpu_path path, const ampt_golden *golden) {
    static model m;
    amp_context *amp = open_context(path, 2, c->mixed ? AMP_LEVEL_O2 : AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d;
    amp_optimizer *o;
    char record[64];
    double *norms = NULL, u = ldexp(1, -24);
    int64_t n;
    int step, i;
    model_init(&m, c->mixed ? AMP_BF16 : AMP_F32, c->mixed ? AMP_BF16 : AMP_F32);
    d = case_desc(&m, c);
    o = make(amp, &d);
    snprintf(record, sizeof record, "%s/norms", c->name);
    if (c->clip > 0) norms = (double *)ampt_golden_read(golden, record, 2, &n);
    for (step = 0; step < 100; step++) {
        amp_grad_stats found;
        model_backward(&m, step, 1);
        if (c->lr > 0) CHECK_OK(amp_optimizer_set_lr(o, case_rate(c, step)));
        CHECK_OK(amp_step(o, NULL));
        CHECK_OK(amp_grad_set_stats(amp_optimizer_grad_set(o), &found));
        if (norms != NULL) CHECK_MSG(fabs((double)found.norm - norms[step]) <= 1.01 * u * norms[step], "%s step %d: norm %.9g, torch %.9g", c->name, step, (double)found.norm, norms[step]);
    }
    for (i = 0; i < TENSORS; i++) {
        double *exact, off, bound;
        snprintf(record, sizeof record, "%s/%d", c->name, i);
        exact = (double *)ampt_golden_read(golden, record, 2, &n);
        CHECK_EQ(n, count_of(i));
        snprintf(record, sizeof record, "%s/%d/torch", c->name, i);
        bound = 1.2 * ampt_golden_number(golden, record);
        if (bound < 5 * u) bound = 5 * u;
        off = distance(c->mixed ? (const float *)m.p[i].master : m.w[i], exact, n);
        CHECK_MSG(off <= bound, "%s, path %d, %s: off by %.2e, at most %.2e", c->name, (int)path, names[i], off, bound);
        snprintf(record, sizeof record, "%s, 100 steps, %s", ampi_optimizers[c->kind].name, c->mixed ? "bf16" : "fp32");
        ampt_figure(record, 1.2 * off / bound, 1.2);
        free(exact);
    }
    free(norms);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

TEST(hundred_steps_are_as_close_as_torchs) {
    ampt_golden golden = ampt_golden_open("optimizer.bin");
    int c, path;
    for (c = 0; c < CASES; c++)
        for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) compare_with_torch(&cases[c], (amp_cpu_path)path, &golden);
    free(golden.data);
}

/* A loss scale that is a power of two changes nothing, whatever way the gradients are unscaled. */
TEST(scale_does_not_change_the_weights) {
    static model m[3];
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s[3] = {NULL, NULL, NULL};
    amp_optimizer *o[3];
    int k, step;
    for (k = 0; k < 3; k++) {
        amp_optimizer_desc d;
        model_init(&m[k], AMP_F32, AMP_F32);
        d = adamw(&m[k]);
        o[k] = make(amp, &d);
        if (k) s[k] = make_scaler(amp, 1024, 5);
    }
    for (step = 0; step < 40; step++) {
        for (k = 0; k < 3; k++) {
            model_backward(&m[k], step, amp_scaler_scale(s[k]));
            if (k == 2) CHECK_OK(amp_scaler_check(s[k], amp_optimizer_grad_set(o[k]), AMP_CHECK_UNSCALE));
            CHECK_OK(amp_step(o[k], s[k]));
        }
        CHECK(memcmp(m[0].w, m[1].w, sizeof m[0].w) == 0);
        CHECK(memcmp(m[0].w, m[2].w, sizeof m[0].w) == 0);
    }
    CHECK(amp_scaler_scale(s[1]) == 1024 * 256);
    for (k = 0; k < 3; k++) { amp_optimizer_destroy(o[k]); amp_scaler_destroy(s[k]); }
    amp_close(amp);
}

/* A sign is 0 for either 0 and NaN for NaN, that of infinity too; the same for each place in a row, and on each path. */
TEST(lion_at_special_values) {
    enum { N = 37 };
    static const float gradients[5] = {0, -0.0f, 1e-37f, -1e-45f, 3e38f};     /* and then infinity and NaN */
    float w[N], g[N];
    amp_optimizer_desc d;
    amp_param p;
    int path, i;
    for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
        amp_context *amp = open_context((amp_cpu_path)path, 2, AMP_LEVEL_DEFAULT);
        amp_optimizer *o;
        memset(&d, 0, sizeof d);
        memset(&p, 0, sizeof p);
        for (i = 0; i < N; i++) {
            w[i] = 1;
            g[i] = i % 7 < 5 ? gradients[i % 7] : i % 7 == 5 ? -INFINITY : NAN;
        }
        p.name = "w"; p.weight = amp_tensor1(w, AMP_F32, N); p.grad = amp_tensor1(g, AMP_F32, N);
        p.grad_live = 1;
        d.params = &p; d.n_params = 1; d.kind = AMP_LION; d.lr = 0.25; d.apply_nonfinite = 1;
        o = make(amp, &d);
        CHECK_OK(amp_step(o, NULL));
        for (i = 0; i < N; i++) {
            /* a tenth of fp32's smallest number is 0 */
            float want = i % 7 == 2 || i % 7 == 4 ? 0.75f : i % 7 == 5 ? 1.25f : 1;
            uint32_t bits = ampi_bits_f32(w[i]);
            if (i % 7 == 6) CHECK_MSG((bits & 0x7fffffff) > 0x7f800000, "path %d, %d: %g", path, i, (double)w[i]);
            else CHECK_MSG(bits == ampi_bits_f32(want), "path %d, %d: %g, not %g", path, i, (double)w[i], (double)want);
        }
        amp_optimizer_destroy(o);
        amp_close(amp);
    }
}

/* ---- Storage */

/* Gradients in 16 bits are widened, so they do what the same numbers in fp32 do. */
TEST(sixteen_bit_gradients_and_masters) {
    static model a, b;
    static const amp_dtype kinds[2] = {AMP_F16, AMP_BF16};
    int kind, grad16, which, step, i, path;
    for (kind = 0; kind < 2; kind++) for (grad16 = 0; grad16 < 2; grad16++)
    for (which = AMP_ADAMW; which < AMPI_OPTIMIZERS; which++)
    for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
        amp_context *amp = open_context((amp_cpu_path)path, 1, AMP_LEVEL_O2);
        amp_optimizer_desc d;
        amp_optimizer *x, *y;
        model_init(&a, kinds[kind], grad16 ? kinds[kind] : AMP_F32);
        model_init(&b, AMP_F32, AMP_F32);
        for (i = 0; i < TENSORS; i++) CHECK_OK(amp_convert(b.w[i], AMP_F32, a.w16[i], kinds[kind], count_of(i), NULL, NULL));
        d = adamw(&a);
        set_kind(&d, which);
        x = make(amp, &d);
        d.params = b.p;
        y = make(amp, &d);
        for (step = 0; step < 12; step++) {
            model_backward(&a, step, 1);
            model_backward(&b, step, 1);
            memcpy(b.g, a.g, sizeof a.g);
            CHECK_OK(amp_step(x, NULL));
            CHECK_OK(amp_step(y, NULL));
            for (i = 0; i < TENSORS; i++) {
                uint16_t rounded[ROOM];
                CHECK_OK(amp_convert(rounded, kinds[kind], b.w[i], AMP_F32, count_of(i), NULL, NULL));
                CHECK(memcmp(a.p[i].master, b.w[i], (size_t)count_of(i) * 4) == 0);
                CHECK(memcmp(a.w16[i], rounded, (size_t)count_of(i) * 2) == 0);
            }
        }
        amp_optimizer_destroy(x);
        amp_optimizer_destroy(y);
        CHECK(a.p[0].master == NULL);
        amp_close(amp);
    }
}

/* O3 has no masters: the 16-bit weight is widened, updated and rounded to nearest. */
TEST(level_o3_updates_sixteen_bit_weights) {
    static model a, b;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O3);
    amp_optimizer_desc d;
    amp_optimizer *x, *y;
    int step, i;
    model_init(&a, AMP_BF16, AMP_F32);
    model_init(&b, AMP_F32, AMP_F32);
    for (i = 0; i < TENSORS; i++) CHECK_OK(amp_convert(b.w[i], AMP_F32, a.w16[i], AMP_BF16, count_of(i), NULL, NULL));
    d = adamw(&a);
    x = make(amp, &d);
    CHECK(a.p[0].master == NULL);
    d.params = b.p;
    y = make(amp, &d);
    for (step = 0; step < 20; step++) {
        model_backward(&a, step, 1);
        model_backward(&b, step, 1);
        CHECK_OK(amp_step(x, NULL));
        CHECK_OK(amp_step(y, NULL));
        for (i = 0; i < TENSORS; i++) {     /* b is rounded after each step too */
            uint16_t rounded[ROOM];
            CHECK_OK(amp_convert(rounded, AMP_BF16, b.w[i], AMP_F32, count_of(i), NULL, NULL));
            CHECK(memcmp(a.w16[i], rounded, (size_t)count_of(i) * 2) == 0);
            CHECK_OK(amp_convert(b.w[i], AMP_F32, rounded, AMP_BF16, count_of(i), NULL, NULL));
        }
    }
    amp_optimizer_destroy(x);
    amp_optimizer_destroy(y);
    amp_close(amp);
}

TEST(refresh_makes_masters_from_weights) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
    amp_optimizer_desc d;
    amp_optimizer *o;
    uint64_t version;
    float widened;
    model_init(&m, AMP_BF16, AMP_BF16);
    d = adamw(&m);
    o = make(amp, &d);
    model_backward(&m, 0, 1);
    CHECK_OK(amp_step(o, NULL));
    version = m.p[0].version;
    m.w16[0][3] = amp_bf16_from_f32(3.5f, 0);
    CHECK_OK(amp_optimizer_rebuild_masters(o));
    widened = 3.5f;
    CHECK(memcmp((float *)m.p[0].master + 3, &widened, 4) == 0);
    CHECK(m.p[0].version > version);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* ---- Storage policies */

/* What a 16-bit weight's rounded master must be: to nearest, ties away from zero. */
static uint16_t nearest_away(uint32_t bits) {
    uint16_t even = amp_bf16_from_f32(ampi_f32_of_bits(bits), 0);
    return (uint16_t)((bits & 0xffff) == 0x8000 && (bits & 0x7fffffff) < 0x7f800000 ? (bits >> 16) + 1 : even);
}

/* The master of element k of row i, put together from weight and remainder. */
static uint32_t joined(const model *m, const amp_optimizer *o, int i, int64_t k) {
    return ampi_bits_f32(amp_f32_join(m->w16[i][k], ((const uint16_t *)o->set->rows[i].master)[k]));
}

/* Weights through the optimizer: masters are the fp32 values, 16-bit weights their rounding, whatever holds the rest. */
TEST(weights_are_set_from_fp32) {
    static const struct { amp_dtype weight; amp_master_kind master; amp_level level; } kinds[] = {
        {AMP_F32, AMP_MASTER_DEFAULT, AMP_LEVEL_O1}, {AMP_BF16, AMP_MASTER_DEFAULT, AMP_LEVEL_O2}, {AMP_F16, AMP_MASTER_F32, AMP_LEVEL_O2},
        {AMP_BF16, AMP_MASTER_REMAINDER, AMP_LEVEL_O2}, {AMP_BF16, AMP_MASTER_NONE, AMP_LEVEL_O3}, {AMP_F16, AMP_MASTER_STOCHASTIC, AMP_LEVEL_O3}};
    static model m;
    static float values[ROOM];
    int k, i;
    int64_t j;
    for (k = 0; k < 6; k++) {
        amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, kinds[k].level);
        amp_optimizer_desc d;
        amp_optimizer *o;
        amp_param other;
        model_init(&m, kinds[k].weight, AMP_F32);
        m.p[3].grad.data = NULL;                                      /* a frozen one */
        d = adamw(&m);
        d.master = kinds[k].master;
        d.seed = 5;
        o = make(amp, &d);
        for (i = 0; i < TENSORS; i++) {
            uint64_t version = m.p[i].version;
            ampt_uniform(values, count_of(i), 77, (uint32_t)i, 3, 0);
            values[0] = 1.00390625f;                                  /* a tie in bf16 */
            if (count_of(i) > 4) { values[1] = INFINITY; values[2] = ampi_f32_of_bits(0x7fc01234u); values[3] = 1e-40f; }
            CHECK_OK(amp_optimizer_set_weight(o, &m.p[i], values));
            CHECK(m.p[i].version > version);
            for (j = 0; j < count_of(i); j++) {
                uint32_t bits = ampi_bits_f32(values[j]);
                int row = i - (i > 3);
                if (kinds[k].weight == AMP_F32) CHECK(ampi_bits_f32(m.w[i][j]) == bits);
                else if (kinds[k].weight == AMP_F16) CHECK_EQ(m.w16[i][j], amp_f16_from_f32(values[j], 0));
                else CHECK_EQ(m.w16[i][j], kinds[k].master == AMP_MASTER_REMAINDER && i != 3 ? nearest_away(bits) : amp_bf16_from_f32(values[j], 0));
                if (i == 3) continue;
                if (kinds[k].master == AMP_MASTER_REMAINDER) CHECK(ampi_bits_f32(amp_f32_join(m.w16[i][j], ((const uint16_t *)o->set->rows[row].master)[j])) == bits);
                else if (kinds[k].level == AMP_LEVEL_O2) CHECK(ampi_bits_f32(((const float *)m.p[i].master)[j]) == bits);
                else CHECK(m.p[i].master == NULL);
            }
        }
        values[0] = 1e30f;
        CHECK_ERR(amp_optimizer_set_weight(o, &m.p[0], values), kinds[k].weight == AMP_F16 ? AMP_ERR_RANGE : AMP_OK);
        if (kinds[k].weight == AMP_F16) CHECK(strstr(amp_last_error(), "infinite in fp16") != NULL && m.w16[0][0] == amp_f16_from_f32(1.00390625f, 0));
        memset(&other, 0, sizeof other);
        other.name = "other";
        CHECK_ERR(amp_optimizer_set_weight(o, &other, values), AMP_ERR_NAME);
        CHECK(strstr(amp_last_error(), "other") != NULL);
        CHECK_ERR(amp_optimizer_set_weight(NULL, &m.p[0], values), AMP_ERR_NULL);
        CHECK_ERR(amp_optimizer_set_weight(o, NULL, values), AMP_ERR_NULL);
        CHECK_ERR(amp_optimizer_set_weight(o, &m.p[0], NULL), AMP_ERR_NULL);
        amp_optimizer_destroy(o);
        amp_close(amp);
    }
}

/* Training in bf16 weights beside fp32 training with the same gradients: masters that begin as the fp32 weights stay with
   it to the bit, however they are kept; those made from the rounded weights never come back. */
TEST(masters_begin_as_fp32) {
    static model a, b;
    static const amp_master_kind kinds[] = {AMP_MASTER_F32, AMP_MASTER_REMAINDER};
    int k, i, step;
    for (k = 0; k < 4; k++) {
        amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
        amp_optimizer_desc d;
        amp_optimizer *x, *y;
        double off = 0;
        int64_t j;
        model_init(&a, AMP_F32, AMP_F32);
        model_init(&b, AMP_BF16, AMP_F32);
        d = adamw(&a);
        x = make(amp, &d);
        d.params = b.p;
        d.master = kinds[k % 2];
        y = make(amp, &d);
        for (i = 0; i < TENSORS && k < 2; i++) CHECK_OK(amp_optimizer_set_weight(y, &b.p[i], a.w[i]));
        for (step = 0; step < 20; step++) {
            model_backward(&a, step, 1);
            model_backward(&b, step, 1);
            CHECK_OK(amp_step(x, NULL));
            CHECK_OK(amp_step(y, NULL));
        }
        for (i = 0; i < TENSORS; i++)
            for (j = 0; j < count_of(i); j++) {
                float master = k % 2 ? ampi_f32_of_bits(joined(&b, y, i, j)) : ((const float *)b.p[i].master)[j];
                off = fmax(off, fabs((double)master - (double)a.w[i][j]));
            }
        CHECK_MSG(k < 2 ? !(off > 0) : off > 1e-4, "%s, %s: %g off", kinds[k % 2] == AMP_MASTER_F32 ? "fp32" : "remainder", k < 2 ? "set" : "as they were", off);
        amp_optimizer_destroy(x);
        amp_optimizer_destroy(y);
        amp_close(amp);
    }
}

/* Masters as remainders beside fp32 masters over 200 steps with overflows, skips and gradients of every size.  With
   `nonfinite` nothing is skipped, so that infinities and NaN go through the remainders too. */
static void compare_remainders(int kind, amp_cpu_path path, int nonfinite) {
    static model a, b;
    amp_context *amp = open_context(path, 2, AMP_LEVEL_O2);
    amp_scaler *s = nonfinite ? NULL : make_scaler(amp, 1024, 7), *t = nonfinite ? NULL : make_scaler(amp, 1024, 7);
    amp_optimizer_desc d;
    amp_optimizer *x, *y;
    int step, i, skips = 0;
    int64_t k, bad = 0;
    model_init(&a, AMP_BF16, AMP_BF16);
    model_init(&b, AMP_BF16, AMP_BF16);
    d = adamw(&a);
    d.apply_nonfinite = nonfinite;
    set_kind(&d, kind);
    if (kind == AMP_SGD) d.lr = 0.25;
    x = make(amp, &d);
    d.params = b.p;
    d.master = AMP_MASTER_REMAINDER;
    y = make(amp, &d);
    CHECK(b.p[0].master == NULL && a.p[0].master != NULL);
    for (step = 0; step < 200; step++) {
        float size = step % 13 == 5 ? 1e30f : step % 17 == 3 ? 1e-30f : 1;
        model_backward(&a, step, nonfinite ? size : size * amp_scaler_scale(s));
        if (step % 19 == 7 || nonfinite * step == 150) a.g16[2][step % 50] = step % 2 ? 0x7f80 : 0x7fc0;
        memcpy(b.g16, a.g16, sizeof a.g16);
        for (i = 0; i < TENSORS; i++) b.p[i].grad_live = 1;
        CHECK_OK(amp_step(x, s));
        CHECK_OK(amp_step(y, t));
        for (i = 0; i < TENSORS; i++) for (k = 0; k < count_of(i); k++) {
            uint32_t bits = ampi_bits_f32(((const float *)a.p[i].master)[k]);
            bad += (bits & 0x7f800000) == 0x7f800000;
            CHECK_MSG(joined(&b, y, i, k) == bits, "step %d, %s %d: %08x, master %08x", step, names[i], (int)k, (unsigned)joined(&b, y, i, k), (unsigned)bits);
            CHECK_MSG(b.w16[i][k] == nearest_away(bits), "step %d, %s %d: %04x of %08x", step, names[i], (int)k, b.w16[i][k], (unsigned)bits);
        }
        CHECK(memcmp(x->set->rows[1].m, y->set->rows[1].m, 33 * 4) == 0);
    }
    skips = (int)x->set->found->skips;
    CHECK_MSG((skips > 5) == !nonfinite && y->set->found->skips == skips, "%d skips", skips);
    CHECK_MSG((bad > 0) == nonfinite, "%d numbers that are not finite", (int)bad);
    amp_optimizer_destroy(x);
    amp_optimizer_destroy(y);
    amp_scaler_destroy(s);
    amp_scaler_destroy(t);
    amp_close(amp);
}

TEST(remainders_are_fp32_masters_bit_for_bit) {
    int kind, path;
    for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++) for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
        compare_remainders(kind, (amp_cpu_path)path, 0);
        compare_remainders(kind, (amp_cpu_path)path, 1);
    }
}

/* ---- Remainders of every pattern.  The optimizer loads a piece of fp32 masters, steps with gradients of 0 and a learning
   rate of 0, which joins and splits each master and moves none; then a step with an infinite gradient is skipped, and what
   is saved must be the masters again. */

enum { SWEEP = 1 << 15, SWEEP_TAIL = 5 };       /* a piece, and a few more numbers, so that the ends of loops are taken too */
static int every_pattern;
typedef struct remainder_sweep {
    pthread_t thread;
    amp_cpu_path path;
    amp_optimizer_kind kind;
    uint32_t first, step;                       /* pieces */
    int64_t patterns, lost, moved, failed;
    uint32_t in[SWEEP + SWEEP_TAIL], out[SWEEP + SWEEP_TAIL];
    uint16_t w[SWEEP + SWEEP_TAIL], g[SWEEP + SWEEP_TAIL], kept[2][SWEEP + SWEEP_TAIL];
} remainder_sweep;

static amp_optimizer *sweep_optimizer(remainder_sweep *s, amp_context *amp, amp_param *p) {
    amp_optimizer *o = NULL;
    amp_optimizer_desc d;
    memset(p, 0, sizeof *p);
    memset(&d, 0, sizeof d);
    p->name = "w";
    p->weight = amp_tensor1(s->w, AMP_BF16, SWEEP + SWEEP_TAIL);
    p->grad = amp_tensor1(s->g, AMP_BF16, SWEEP + SWEEP_TAIL);
    d.params = p; d.n_params = 1; d.kind = s->kind; d.lr = (double)AMP_EXPLICIT_ZERO; d.master = AMP_MASTER_REMAINDER;
    s->failed += amp_optimizer_create(amp, &o, &d) != AMP_OK;
    return o;
}

/* Those whose weight is not the pattern rounded to nearest, ties away from zero and NaN quiet, or whose remainder is not
   its lower half.  Integers without a branch: compilers make vectors of them. */
static int64_t lost_patterns(const remainder_sweep *s, const amp_optimizer *o) {
    const uint16_t *rest = (const uint16_t *)o->set->rows[0].master;
    uint32_t lost = 0;
    int i;
    for (i = 0; i < SWEEP + SWEEP_TAIL; i++) {
        uint32_t x = s->in[i], nan = (uint32_t)((x & 0x7fffffff) > 0x7f800000), rounded = (x + 0x8000 * (1 - nan)) >> 16 | nan << 6;
        lost += (uint32_t)((uint16_t)rounded != s->w[i]) | (uint32_t)((uint16_t)x != rest[i]);
    }
    return lost;
}

/* Those that are not saved as the pattern, NaN quiet. */
static int64_t lost_in_saving(remainder_sweep *s, const amp_optimizer *o, amp_state *state) {
    uint32_t lost = 0;
    int i;
    s->failed += amp_optimizer_save(o, state, "o") != AMP_OK;
    s->failed += amp_state_get(state, "o.master.0", AMP_F32, s->out, SWEEP + SWEEP_TAIL) != AMP_OK;
    for (i = 0; i < SWEEP + SWEEP_TAIL; i++) {
        uint32_t x = s->in[i], nan = (uint32_t)((x & 0x7fffffff) > 0x7f800000);
        lost += (uint32_t)(s->out[i] != (x | nan << 22));
    }
    return lost;
}

/* With every gradient at bf16's largest number but one, which is infinite: a step that is not skipped moves everything. */
static int64_t moved_by_a_skip(remainder_sweep *s, amp_optimizer *o, amp_param *p) {
    const void *rest = o->set->rows[0].master;
    int64_t i, skips = o->set->found->skips;
    memcpy(s->kept[0], s->w, sizeof s->w);
    memcpy(s->kept[1], rest, sizeof s->w);
    for (i = 0; i < SWEEP + SWEEP_TAIL; i++) s->g[i] = 0x7f7f;
    s->g[s->in[0] / 7 % SWEEP] = 0x7f80;
    p->grad_live = 1;
    s->failed += amp_optimizer_set_lr(o, 1) != AMP_OK || amp_step(o, NULL) != AMP_OK || amp_optimizer_set_lr(o, 0) != AMP_OK;
    memset(s->g, 0, sizeof s->g);
    return o->set->found->skips != skips + 1 || memcmp(s->kept[0], s->w, sizeof s->w) != 0 || memcmp(s->kept[1], rest, sizeof s->w) != 0;
}

static void sweep_piece(remainder_sweep *s, amp_optimizer *o, amp_param *p, amp_state *state, uint32_t piece) {
    static const uint32_t edges[8] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1234, 0xc0de};
    uint32_t i;
    for (i = 0; i < SWEEP + SWEEP_TAIL; i++) {
        uint32_t at = piece * SWEEP + i;
        s->in[i] = every_pattern ? at : at << 16 | edges[at >> 16 & 7];
    }
    s->failed += amp_state_put(state, "o.master.0", AMP_F32, s->in, SWEEP + SWEEP_TAIL) != AMP_OK;
    s->failed += amp_optimizer_load(o, state, "o") != AMP_OK;
    s->lost += lost_patterns(s, o);
    p->grad_live = 1;
    s->failed += amp_step(o, NULL) != AMP_OK;
    s->lost += lost_patterns(s, o);
    s->moved += moved_by_a_skip(s, o, p);
    s->lost += lost_in_saving(s, o, state);
    s->patterns += SWEEP;
}

static void *sweep_remainders(void *arg) {
    remainder_sweep *s = (remainder_sweep *)arg;
    uint32_t pieces = (every_pattern ? 1u << 31 : 1u << 18) / (SWEEP / 2), piece;      /* or all upper halves, with lower ones at edges */
    amp_context *amp = open_context(s->path, 1, AMP_LEVEL_O2);
    amp_state *state = NULL;
    amp_param p;
    amp_optimizer *o = sweep_optimizer(s, amp, &p);
    s->failed += amp_state_create(&state, NULL) != AMP_OK || amp_optimizer_save(o, state, "o") != AMP_OK;
    for (piece = s->first; piece < pieces; piece += s->step) sweep_piece(s, o, &p, state, piece);
    amp_state_destroy(state);
    amp_optimizer_destroy(o);
    amp_close(amp);
    return NULL;
}

/* Paths that differ in products of bf16 alone have the same conversions, and all optimizers join and split alike: every pattern goes through SGD on
   each path up to that, and through the others on the last; the short form goes through all on all. */
TEST(remainders_of_every_pattern) {
    enum { SWEEPERS = 8 };
    static remainder_sweep sweeps[SWEEPERS];
    int path, kind, t, last = (int)ampi_cpu_best_path();
    if (every_pattern) last = (int)AMPT_WIDEST_PATH((amp_cpu_path)last);
    for (path = AMP_CPU_SCALAR; path <= last; path = AMPT_NEXT_PATH(path)) for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++) {
        const char *name = ampi_optimizers[kind].name;
        int64_t patterns = 0, lost = 0, moved = 0, failed = 0;
        if (every_pattern && kind != AMP_SGD && path < last) continue;
        memset(sweeps, 0, sizeof sweeps);
        for (t = 0; t < SWEEPERS; t++) {
            sweeps[t].path = (amp_cpu_path)path; sweeps[t].kind = (amp_optimizer_kind)kind;
            sweeps[t].first = (uint32_t)t; sweeps[t].step = SWEEPERS;
            CHECK_EQ(pthread_create(&sweeps[t].thread, NULL, sweep_remainders, &sweeps[t]), 0);
        }
        for (t = 0; t < SWEEPERS; t++) {
            pthread_join(sweeps[t].thread, NULL);
            patterns += sweeps[t].patterns; lost += sweeps[t].lost; moved += sweeps[t].moved; failed += sweeps[t].failed;
        }
        CHECK_EQ(patterns, every_pattern ? (int64_t)1 << 32 : 1 << 19);
        CHECK_EQ(failed, 0);
        CHECK_MSG(lost == 0, "path %d, %s: %lld lost", path, name, (long long)lost);
        CHECK_MSG(moved == 0, "path %d, %s: %lld skipped steps moved something", path, name, (long long)moved);
        if (!every_pattern) continue;
        printf("  remainders, path %d, %s: %lld patterns, %lld lost, %lld moved by a skipped step\n", path, name,
               (long long)patterns, (long long)lost, (long long)moved);
        fflush(stdout);
    }
}

/* One row of `n` weights that SGD moves by exactly `update` in every step, in 16 bits. */
enum { WALKERS = 4000 };
static uint16_t walk_w[2][WALKERS], walk_g[2][WALKERS];
static amp_param walk_p[2];
static amp_optimizer *make_walk(amp_context *amp, amp_dtype dtype, amp_master_kind master, float update, uint64_t seed) {
    amp_optimizer_desc d;
    int64_t k;
    int i;
    memset(walk_p, 0, sizeof walk_p);
    memset(&d, 0, sizeof d);
    for (i = 0; i < 2; i++) {
        for (k = 0; k < WALKERS; k++) {
            walk_w[i][k] = dtype == AMP_BF16 ? amp_bf16_from_f32(1, 0) : amp_f16_from_f32(1, 0);
            walk_g[i][k] = dtype == AMP_BF16 ? amp_bf16_from_f32(-update, 0) : amp_f16_from_f32(-update, 0);
        }
        walk_p[i].name = i ? "two" : "one";
        walk_p[i].weight = amp_tensor1(walk_w[i], dtype, WALKERS);
        walk_p[i].grad = amp_tensor1(walk_g[i], dtype, WALKERS);
    }
    d.params = walk_p; d.n_params = 2; d.kind = AMP_SGD; d.lr = 1; d.master = master; d.seed = seed;
    return make(amp, &d);
}

static void walk_step(amp_optimizer *o) {
    walk_p[0].grad_live = walk_p[1].grad_live = 1;
    CHECK_OK(amp_step(o, NULL));
}

static double walk_mean(amp_dtype dtype) {
    double sum = 0;
    int64_t k;
    for (k = 0; k < WALKERS; k++)
        sum += (double)(dtype == AMP_BF16 ? amp_f32_from_bf16(walk_w[0][k]) : amp_f32_from_f16(walk_w[0][k]));
    return sum / WALKERS;
}

/* A rounding between neighbours u apart has a variance of at most u^2 / 4, so after `steps` of them the mean of n
   weights is off by more than 5 sqrt(steps / n) u / 2 once in two million seeds; the seed is fixed.  Rounded to nearest,
   weights stay where they are. */
TEST(stochastic_rounding_is_unbiased_where_nearest_stalls) {
    static const amp_dtype dtypes[2] = {AMP_BF16, AMP_F16};
    int kind, path, step;
    for (kind = 0; kind < 2; kind++) for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
        amp_context *amp = open_context((amp_cpu_path)path, 2, AMP_LEVEL_O2);
        float unit = ldexpf(1, kind ? -10 : -7), update = unit * 0.09375f;    /* 3 / 32 of a step; exact in both */
        amp_optimizer *o = make_walk(amp, dtypes[kind], AMP_MASTER_NONE, update, 0);
        double bound, off, want;
        for (step = 1; step <= 64; step++) walk_step(o);
        CHECK(walk_mean(dtypes[kind]) == 1);
        amp_optimizer_destroy(o);
        o = make_walk(amp, dtypes[kind], AMP_MASTER_STOCHASTIC, update, 5);
        for (step = 1; step <= 64; step++) {
            walk_step(o);
            want = 1 + step * (double)update;
            bound = 5 * sqrt((double)step / WALKERS) * (double)unit / 2;
            off = walk_mean(dtypes[kind]) - want;
            CHECK_MSG(fabs(off) <= bound, "step %d: mean off by %.3g, at most %.3g", step, off, bound);
        }
        CHECK(walk_mean(dtypes[kind]) > 1 + 5 * (double)unit);
        amp_optimizer_destroy(o);
        amp_close(amp);
    }
}

/* Every element takes the word that amp.h says, of its seed, step, row and place; a skipped step takes none. */
TEST(stochastic_rounding_takes_the_words_it_says) {
    static const amp_dtype dtypes[2] = {AMP_BF16, AMP_F16};
    static uint16_t expected[2][WALKERS];
    uint32_t words[4];
    int kind, path, step, i;
    int64_t k;
    amp_philox(77, 3, 5, words);                                      /* the block of the row in the step's stream */
    CHECK(ampi_row_seed(77, 3, 5) == (words[0] | (uint64_t)words[1] << 32));
    for (kind = 0; kind < 2; kind++) for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
        amp_context *amp = open_context((amp_cpu_path)path, 2, AMP_LEVEL_O2);
        float update = ldexpf(0.09375f, kind ? -10 : -7);
        uint16_t good;
        amp_optimizer *o = make_walk(amp, dtypes[kind], AMP_MASTER_STOCHASTIC, update, 77);
        memcpy(expected, walk_w, sizeof expected);
        for (step = 1; step <= 3; step++) {
            good = walk_g[1][WALKERS - 1];
            walk_g[1][WALKERS - 1] = 0x7fff;
            walk_step(o);                                             /* skipped */
            CHECK(memcmp(expected, walk_w, sizeof expected) == 0);
            walk_g[1][WALKERS - 1] = good;
            walk_step(o);
            for (i = 0; i < 2; i++) for (k = 0; k < WALKERS; k++) {
                uint32_t word = amp_random_u32(ampi_row_seed(77, step, i), (uint64_t)k);
                float w = kind ? amp_f32_from_f16(expected[i][k]) : amp_f32_from_bf16(expected[i][k]);
                expected[i][k] = kind ? amp_f16_stochastic(w + update, word, 0) : amp_bf16_stochastic(w + update, word, 0);
            }
            CHECK(memcmp(expected, walk_w, sizeof expected) == 0);
        }
        CHECK(memcmp(walk_w[0], walk_w[1], sizeof walk_w[0]) != 0);
        amp_optimizer_destroy(o);
        amp_close(amp);
    }
}

/* A NaN of all ones, as GPUs make it, comes from an fp32 gradient: rounded, it is one still. */
static void check_nan_gradients(amp_context *amp, amp_dtype dtype) {
    static float g[WALKERS];
    uint16_t top = dtype == AMP_F16 ? 0x7c00 : 0x7f80;
    uint32_t ones = 0x7fffffff;
    amp_param p;
    amp_optimizer_desc d;
    amp_optimizer *o;
    int64_t k;
    memset(&p, 0, sizeof p);
    memset(&d, 0, sizeof d);
    for (k = 0; k < WALKERS; k++) { walk_w[0][k] = 0; memcpy(&g[k], &ones, 4); }
    p.name = "w"; p.grad_live = 1;
    p.weight = amp_tensor1(walk_w[0], dtype, WALKERS);
    p.grad = amp_tensor1(g, AMP_F32, WALKERS);
    d.params = &p; d.n_params = 1; d.kind = AMP_SGD; d.lr = 1; d.master = AMP_MASTER_STOCHASTIC; d.apply_nonfinite = 1;
    o = make(amp, &d);
    CHECK_OK(amp_step(o, NULL));
    for (k = 0; k < WALKERS; k++) CHECK_MSG((walk_w[0][k] & 0x7fff) > top, "NaN became %04x", walk_w[0][k]);
    amp_optimizer_destroy(o);
}

/* Weights that no rounding may change, whatever word it draws: NaN of every kind, infinities, zeros, the largest and the
   smallest numbers.  One that goes a quarter of a step beyond the largest number becomes infinite once in four times. */
TEST(stochastic_rounding_of_special_weights) {
    static const uint16_t bf16[12] = {0x7fff, 0xffff, 0x7fc0, 0x7f81, 0xff81, 0x7f80, 0xff80, 0x0000, 0x8000, 0x7f7f, 0xff7f, 0x0080};
    static const uint16_t f16[12] = {0x7fff, 0xffff, 0x7e00, 0x7c01, 0xfc01, 0x7c00, 0xfc00, 0x0000, 0x8000, 0x7bff, 0xfbff, 0x0400};
    enum { STEPS = 17 };                                              /* times WALKERS words: more than 65536 */
    int kind, path, special, step;
    int64_t k, over;
    for (kind = 0; kind < 2; kind++) for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
        amp_context *amp = open_context((amp_cpu_path)path, 1, AMP_LEVEL_O2);
        amp_optimizer *o = make_walk(amp, kind ? AMP_F16 : AMP_BF16, AMP_MASTER_STOCHASTIC, 0, 3);
        uint16_t top = kind ? 0x7c00 : 0x7f80, quiet = kind ? 0x200 : 0x40, largest = (uint16_t)(top - 1);
        double p = 0.25, bound;
        memset(walk_g, 0, sizeof walk_g);
        for (special = 0; special < 12; special++) {
            uint16_t x = kind ? f16[special] : bf16[special];
            for (k = 0; k < WALKERS; k++) walk_w[0][k] = walk_w[1][k] = x;
            for (step = 0; step < STEPS; step++) walk_step(o);
            if ((x & 0x7fff) > top) x |= quiet;
            for (k = 0; k < WALKERS; k++) CHECK_MSG(walk_w[0][k] == x && walk_w[1][k] == x, "%04x became %04x", x, walk_w[0][k]);
        }
        for (over = 0, step = 0; step < STEPS; step++) {
            for (k = 0; k < WALKERS; k++) {
                walk_w[0][k] = walk_w[1][k] = largest;
                walk_g[0][k] = walk_g[1][k] = kind ? amp_f16_from_f32(-8, 0) : amp_bf16_from_f32(-ldexpf(1, 118), 0);
            }
            walk_step(o);
            for (k = 0; k < WALKERS; k++) {
                CHECK(walk_w[0][k] == largest || walk_w[0][k] == top);
                over += walk_w[0][k] == top;
            }
        }
        bound = 5 * sqrt(p * (1 - p) / (STEPS * WALKERS));            /* binomial: once in two million seeds */
        check_nan_gradients(amp, kind ? AMP_F16 : AMP_BF16);
        CHECK_MSG(fabs((double)over / (STEPS * WALKERS) - p) <= bound, "%g of them overflow, must be %g within %g", (double)over / (STEPS * WALKERS), p, bound);
        amp_optimizer_destroy(o);
        amp_close(amp);
    }
}

/* bf16 moments beside fp32 ones: gradients for 100 steps, then none for 300.  Rounding a moment x to one of two bf16
   neighbours, at most x / 128 apart, has a variance of at most (x / 256)^2 and no bias, and a step later counts beta
   times.  So the variances s^2 of the error follow s^2 = beta^2 s^2 + (x / 256)^2; x itself is off by 5 s at most, which
   stays below x / 2 here.  What is checked is the mean of error / s over n elements, at most 5 / sqrt(n), and the mean
   of its square, at most 1 by more than 5 sqrt(2 / n).  The 1.5^2 pays for the error of x. */
typedef struct { double variance[WALKERS]; } spread;
static void follow_moments(spread *s, const float *exact, const uint16_t *rounded, double beta, int step, const char *name) {
    double sum = 0, squares = 0, n = 0;
    int64_t k;
    for (k = 0; k < WALKERS; k++) {
        double x = (double)exact[k], off = (double)amp_f32_from_bf16(rounded[k]) - x;
        s->variance[k] = beta * beta * s->variance[k] + 1.5 * 1.5 * x * x / 65536;
        sum += off / sqrt(s->variance[k]);
        squares += off * off / s->variance[k];
        n++;
    }
    CHECK_MSG(fabs(sum / n) <= 5 / sqrt(n), "%s, step %d: bias %.3g, at most %.3g", name, step, sum / n, 5 / sqrt(n));
    CHECK_MSG(squares / n <= 1 + 5 * sqrt(2 / n), "%s, step %d: %.3g times the variance", name, step, squares / n);
}

static void compare_moments(amp_cpu_path path, int kind) {
    static spread m, v;
    static float w[2][WALKERS], g[WALKERS];
    amp_context *amp = open_context(path, 2, AMP_LEVEL_DEFAULT);
    amp_optimizer *o[2];
    amp_param p[2];
    amp_optimizer_desc d;
    int step, i;
    memset(&m, 0, sizeof m);
    memset(&v, 0, sizeof v);
    memset(w, 0, sizeof w);
    for (i = 0; i < 2; i++) {
        memset(&p[i], 0, sizeof p[i]);
        memset(&d, 0, sizeof d);
        p[i].name = "p";
        p[i].weight = amp_tensor1(w[i], AMP_F32, WALKERS);
        p[i].grad = amp_tensor1(g, AMP_F32, WALKERS);
        d.params = &p[i]; d.n_params = 1; d.moments = i ? AMP_BF16 : AMP_F32; d.beta2 = 0.999;
        set_kind(&d, kind);
        o[i] = make(amp, &d);
    }
    for (step = 0; step < 400; step++) {
        ampt_uniform(g, WALKERS, 70, (uint32_t)step, step < 100 ? 0.5f : 0, step < 100 ? 1.0f : 0);
        p[0].grad_live = p[1].grad_live = 1;
        CHECK_OK(amp_step(o[0], NULL));
        CHECK_OK(amp_step(o[1], NULL));
        for (i = 0; i < WALKERS && step == 0; i++) {                  /* until now they are the same but for the rounding */
            uint32_t word = amp_random_u32(ampi_row_seed(0, 1, 0), (uint64_t)i) << 16;
            CHECK(((const uint16_t *)o[1]->set->rows[0].m)[i] == amp_bf16_stochastic(((const float *)o[0]->set->rows[0].m)[i], word, 0));
            CHECK(kind != AMP_ADAMW || ((const uint16_t *)o[1]->set->rows[0].v)[i] == ampi_moment_round(((const float *)o[0]->set->rows[0].v)[i], word >> 16));
        }
        if (step < 150) follow_moments(&m, (const float *)o[0]->set->rows[0].m, (const uint16_t *)o[1]->set->rows[0].m, kind == AMP_LION ? 0.999 : 0.9, step, "m");
        if (kind == AMP_ADAMW) follow_moments(&v, (const float *)o[0]->set->rows[0].v, (const uint16_t *)o[1]->set->rows[0].v, 0.999, step, "v");
    }
    for (i = 0; i < 2; i++) amp_optimizer_destroy(o[i]);
    amp_close(amp);
}

TEST(bf16_moments_follow_fp32_ones) {
    int kind, path;
    for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path))
        for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++) compare_moments((amp_cpu_path)path, kind);
}

/* ---- Moments in 8 bits */

enum { EIGHT_ROWS = 33, EIGHT_COLS = 131, EIGHT = EIGHT_ROWS * EIGHT_COLS };  /* the last block is not full */

/* One parameter with moments in 8 bits, in any storage dtype. */
typedef struct eight_bit {
    float w[EIGHT], g[EIGHT];
    uint16_t w16[EIGHT], g16[EIGHT];
    amp_param p;
    amp_optimizer *o;
} eight_bit;

static void eight_init(eight_bit *e, amp_dtype weight, amp_dtype grad) {
    memset(e, 0, sizeof *e);
    ampt_uniform(e->w, EIGHT, 85, 0, 1, 0);
    CHECK_OK(amp_convert(e->w16, AMP_BF16, e->w, AMP_F32, EIGHT, NULL, NULL));
    if (weight == AMP_F16) CHECK_OK(amp_convert(e->w16, weight, e->w, AMP_F32, EIGHT, NULL, NULL));
    e->p.name = "w";
    e->p.weight = amp_tensor2(weight == AMP_F32 ? (void *)e->w : (void *)e->w16, weight, EIGHT_ROWS, EIGHT_COLS);
    e->p.grad = amp_tensor2(grad == AMP_F32 ? (void *)e->g : (void *)e->g16, grad, EIGHT_ROWS, EIGHT_COLS);
}
static void eight_backward(eight_bit *e, int step) {
    int64_t k;
    ampt_uniform(e->g, EIGHT, 84, (uint32_t)step, 0.05f, 0.002f);
    for (k = 0; k < EIGHT; k++) e->g[k] = ldexpf(e->g[k], -(int)(k / EIGHT_COLS % 9));
    if (e->p.grad.dtype != AMP_F32) CHECK_OK(amp_convert(e->g16, e->p.grad.dtype, e->g, AMP_F32, EIGHT, NULL, NULL));
    e->p.grad_live = 1;
}
static amp_optimizer_desc eight_desc(eight_bit *e, int kind, amp_dtype moments) {
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.params = &e->p; d.n_params = 1; d.moments = moments;
    set_kind(&d, kind);
    d.lr = kind == AMP_SGD ? 0.02 : kind == AMP_LION ? 1e-4 : 1e-3;
    d.weight_decay = kind == AMP_SGD ? 0 : kind == AMP_LION ? 1 : 0.1;
    return d;
}
static amp_k_tensor *row_of(const amp_optimizer *o, int i) { return &o->set->rows[i]; }

TEST(eight_bit_maps_codes_and_scales_are_those_of_bitsandbytes) {
    ampt_golden golden = ampt_golden_open("moments.bin");
    static ampi_moment_map map;
    static uint8_t codes[AMPI_MOMENT_BLOCK];
    float back[AMPI_MOMENT_BLOCK], scale;
    int which;
    for (which = 0; which < 2; which++) {
        char record[32];
        const char *kind = which == AMPI_M ? "m" : "v";
        int64_t n, i, k, count, off = 0;
        float *values, *x, *scales, *want;
        int32_t *expected;
#define READ(pointer, name, type) (snprintf(record, sizeof record, "%s/%s", kind, name), pointer = ampt_golden_read(&golden, record, type, &n))
        READ(values, "map", 1);
        CHECK_EQ(n, AMPI_MOMENT_CODES);
        ampi_moment_map_make(&map, which == AMPI_M);
        CHECK(memcmp(values, map.value, sizeof map.value) == 0);
        for (k = 0; k + 1 < AMPI_MOMENT_CODES; k++) CHECK(ampi_moment_piece(map.bound[k]) < ampi_moment_piece(map.bound[k + 1]));
        READ(expected, "codes", 3); READ(scales, "scales", 1); READ(want, "back", 1); READ(x, "numbers", 1);
        CHECK(n > 10 * AMPI_MOMENT_BLOCK && n % AMPI_MOMENT_BLOCK != 0);
        for (i = 0; i < n; i += AMPI_MOMENT_BLOCK) {
            count = n - i < AMPI_MOMENT_BLOCK ? n - i : AMPI_MOMENT_BLOCK;
            scale = ampi_moment_pack(&map, codes, x + i, count);
            CHECK(ampi_bits_f32(scale) == ampi_bits_f32(scales[i / AMPI_MOMENT_BLOCK]));
            ampi_moment_unpack(&map, codes, scale, back, count);
            for (k = 0; k < count; k++) {
                if (which != AMPI_M && x[i + k] > 0 && expected[i + k] == 0) {      /* what alone is done otherwise */
                    CHECK(codes[k] == 1 && back[k] == map.value[1] * scale);
                    continue;
                }
                off += codes[k] != expected[i + k] || ampi_bits_f32(back[k]) != ampi_bits_f32(want[i + k]);
                CHECK_MSG(codes[k] == expected[i + k], "%s[%d] = %.9g: code %d, bitsandbytes has %d", kind, (int)(i + k), (double)x[i + k], codes[k], expected[i + k]);
            }
        }
        CHECK_EQ(off, 0);
        free(values); free(expected); free(scales); free(want); free(x);
#undef READ
    }
    free(golden.data);
}

/* An infinity or a NaN shows in every number of its block, as a block without it cannot be told from the right one. */
TEST(a_block_with_a_number_that_is_not_finite_becomes_nan) {
    static ampi_moment_map map;
    static const uint32_t bad[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffffffffu, 0x7f800001u};
    float x[AMPI_MOMENT_BLOCK], scale;
    uint8_t codes[AMPI_MOMENT_BLOCK];
    size_t b;
    int i;
    ampi_moment_map_make(&map, 1);
    for (b = 0; b < sizeof bad / sizeof *bad; b++) {
        for (i = 0; i < AMPI_MOMENT_BLOCK; i++) x[i] = (float)i;
        x[200] = ampi_f32_of_bits(bad[b]);
        scale = ampi_moment_pack(&map, codes, x, AMPI_MOMENT_BLOCK);
        ampi_moment_unpack(&map, codes, scale, x, AMPI_MOMENT_BLOCK);
        for (i = 0; i < AMPI_MOMENT_BLOCK; i++) CHECK((ampi_bits_f32(x[i]) & 0x7fffffffu) > 0x7f800000u);
    }
    for (i = 0; i < AMPI_MOMENT_BLOCK; i++) x[i] = 0;
    CHECK(ampi_bits_f32(ampi_moment_pack(&map, codes, x, AMPI_MOMENT_BLOCK)) == 0);
    ampi_moment_unpack(&map, codes, 0, x, AMPI_MOMENT_BLOCK);
    for (i = 0; i < AMPI_MOMENT_BLOCK; i++) CHECK(ampi_bits_f32(x[i]) == 0);
    for (i = 0; i < AMPI_MOMENT_BLOCK; i += 16) {           /* nor does a scale whose inverse would be infinite */
        ampi_fp host = ampi_fp_begin();
        int k;
        memset(x, 0, sizeof x);
        x[i] = ampi_f32_of_bits(0x000116c2u);               /* 1e-40 */
        scale = ampi_moment_pack(&map, codes, x, AMPI_MOMENT_BLOCK);
        for (k = 0; k < AMPI_MOMENT_BLOCK; k++) CHECK_EQ(codes[k], ampi_moment_code(&map, k == i ? 0.01f : 0.0f));
        CHECK(ampi_bits_f32(scale) == 0x000116c2u);
        ampi_fp_end(host);
    }
}

/* Over 100 steps the distance from the exact rule is the rounding's, and so bitsandbytes' own. */
TEST(eight_bit_steps_are_as_close_as_those_of_bitsandbytes) {
    static const char *const golden_names[AMPI_OPTIMIZERS] = {NULL, "adamw", "sgd", "lion"};
    static eight_bit e;
    ampt_golden golden = ampt_golden_open("moments.bin");
    int kind, path, step;
    for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++)
        for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
            amp_context *amp = open_context((amp_cpu_path)path, 2, AMP_LEVEL_DEFAULT);
            amp_optimizer_desc d;
            double *exact, theirs, ours;
            char record[32];
            int64_t n;
            eight_init(&e, AMP_F32, AMP_F32);
            d = eight_desc(&e, kind, AMP_MOMENTS_8BIT);
            e.o = make(amp, &d);
            for (step = 1; step <= 100; step++) {
                eight_backward(&e, step);
                CHECK_OK(amp_step(e.o, NULL));
            }
            exact = (double *)ampt_golden_read(&golden, golden_names[kind], 2, &n);
            CHECK_EQ(n, EIGHT);
            snprintf(record, sizeof record, "%s/bitsandbytes", golden_names[kind]);
            theirs = ampt_golden_number(&golden, record);
            ours = distance(e.w, exact, n);
            CHECK_MSG(ours <= 1.2 * theirs && theirs <= 1.2 * ours, "%s, path %d: off by %.3e, bitsandbytes by %.3e", golden_names[kind], path, ours, theirs);
            snprintf(record, sizeof record, "%s, 100 steps, 8-bit", ampi_optimizers[kind].name);
            ampt_figure(record, ours / theirs, 1.2);
            free(exact);
            amp_optimizer_destroy(e.o);
            amp_close(amp);
        }
    free(golden.data);
}

/* What the 8-bit moments of a row stand for, by the map alone, and the other way: the nearest number, of two the lower, but
   never 0 for a v above 0. */
static void reference_unpack(const amp_k_tensor *row, void *moment, int is_signed, float *out) {
    const float *scales = (const float *)(void *)((char *)moment + (EIGHT + 255) / 256 * 256);
    ampi_fp host = ampi_fp_begin();             /* -Ofast flushes subnormal numbers, and reassociates products */
    volatile float value;
    int64_t i;
    for (i = 0; i < row->count; i++) {
        value = ampi_moment_value(((const uint8_t *)moment)[i], is_signed);
        out[i] = value * scales[i / 256];
    }
    ampi_fp_end(host);
}
static int reference_code(float y, const float *values) {
    int best = values[0] == 0 && y > 0, k;
    for (k = best + 1; k < 256; k++) if (fabs((double)y - (double)values[k]) < fabs((double)y - (double)values[best])) best = k;
    return best;
}
static void check_packed(const amp_k_tensor *row, void *moment, int is_signed, const float *exact) {
    const float *scales = (const float *)(void *)((char *)moment + (EIGHT + 255) / 256 * 256);
    float values[256];
    int64_t i, k;
    for (k = 0; k < 256; k++) values[k] = ampi_moment_value((int)k, is_signed);
    for (i = 0; i < row->count; i += 256) {
        float largest = 0;
        for (k = i; k < row->count && k < i + 256; k++) if (fabsf(exact[k]) > largest) largest = fabsf(exact[k]);
        CHECK(scales[i / 256] == largest);
        for (k = i; k < row->count && k < i + 256; k += 7) CHECK_EQ(((const uint8_t *)moment)[k], reference_code(exact[k] * (1.0f / largest), values));
    }
}

/* Gradients of a block that lie four and more decades apart: each step moves no weight by more than AdamW with fp32 moments
   can, (1 - beta1) / sqrt(1 - beta2) of the learning rate.  With v rounded to 0 a step was 31 times as far. */
TEST(eight_bit_moments_keep_small_gradients_bounded) {
    static float w[4096], g[4096], before[4096];
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_param p;
    amp_optimizer_desc d;
    amp_optimizer *o;
    double most = 0;
    int step, i;
    memset(&p, 0, sizeof p); memset(&d, 0, sizeof d); memset(w, 0, sizeof w);
    p.name = "w";
    p.weight = amp_tensor1(w, AMP_F32, 4096); p.grad = amp_tensor1(g, AMP_F32, 4096);
    d.params = &p; d.n_params = 1; d.lr = 0.01; d.moments = AMP_MOMENTS_8BIT;
    CHECK_OK(amp_optimizer_create(amp, &o, &d));
    for (step = 0; step < 30; step++) {
        for (i = 0; i < 4096; i++) g[i] = i % 256 == 0 ? 1.0f : ldexpf(step % 5 == 4 ? 0.01f : 1.0f, -(i % 29) - 4);
        memcpy(before, w, sizeof w);
        CHECK_OK(amp_param_accumulate(&p));
        CHECK_OK(amp_step(o, NULL));
        for (i = 0; i < 4096; i++) most = fmax(most, fabs((double)w[i] - (double)before[i]) / 0.01);
    }
    CHECK_MSG(most < 0.1 / sqrt(0.001), "a step moved a weight by %.2f of the learning rate", most);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* A step with 8-bit moments is a step with fp32 moments that were unpacked before it and are packed behind it, in every
   storage of the weights. */
static void eight_against_fp32(amp_cpu_path path, int kind, amp_dtype weight, amp_master_kind master) {
    static eight_bit e[2];
    static float before[2][EIGHT];
    amp_context *amp = open_context(path, 2, AMP_LEVEL_O2);
    int step, i;
    for (i = 0; i < 2; i++) {
        amp_optimizer_desc d;
        eight_init(&e[i], weight, weight);
        d = eight_desc(&e[i], kind, i ? AMP_MOMENTS_8BIT : AMP_F32);
        d.master = weight == AMP_F32 ? AMP_MASTER_DEFAULT : master;
        e[i].o = make(amp, &d);
    }
    CHECK(row_of(e[1].o, 0)->moment_dtype == AMP_MOMENTS_8BIT);
    for (step = 1; step <= 4; step++) {
        amp_k_tensor *fp32 = row_of(e[0].o, 0), *eight = row_of(e[1].o, 0);
        reference_unpack(eight, eight->m, 1, (float *)fp32->m);
        if (fp32->v != NULL) reference_unpack(eight, eight->v, 0, (float *)fp32->v);
        for (i = 0; i < 2; i++) {
            eight_backward(&e[i], step);
            if (step == 3) { e[i].g[5] = INFINITY; e[i].g16[5] = weight == AMP_F16 ? 0x7c00 : 0x7f80; }                 /* skipped */
            CHECK_OK(amp_step(e[i].o, NULL));
        }
        CHECK(memcmp(e[0].w, e[1].w, sizeof e[0].w) == 0 && memcmp(e[0].w16, e[1].w16, sizeof e[0].w16) == 0);
        if (fp32->master != NULL) CHECK(memcmp(fp32->master, eight->master, (size_t)ampi_array_bytes(eight, AMPI_MASTER)) == 0);
        if (step != 3) check_packed(eight, eight->m, 1, (const float *)fp32->m);
        if (step != 3 && fp32->v != NULL) check_packed(eight, eight->v, 0, (const float *)fp32->v);
        for (i = 0; i < 2; i++) {
            void *moment = i ? eight->v : eight->m;
            if (moment == NULL) continue;
            if (step == 3) CHECK(memcmp(before[i], moment, (EIGHT + 255) / 256 * 260) == 0);
            memcpy(before[i], moment, (EIGHT + 255) / 256 * 260);
        }
    }
    for (i = 0; i < 2; i++) amp_optimizer_destroy(e[i].o);
    amp_close(amp);
}

TEST(eight_bit_steps_are_fp32_steps_rounded) {
    static const amp_master_kind masters[] = {AMP_MASTER_F32, AMP_MASTER_REMAINDER, AMP_MASTER_STOCHASTIC, AMP_MASTER_NONE};
    int kind, path, m;
    for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++)
        for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
            eight_against_fp32((amp_cpu_path)path, kind, AMP_F32, AMP_MASTER_NONE);
            for (m = 0; m < 4; m++) {
                eight_against_fp32((amp_cpu_path)path, kind, AMP_BF16, masters[m]);
                if (masters[m] != AMP_MASTER_REMAINDER) eight_against_fp32((amp_cpu_path)path, kind, AMP_F16, masters[m]);
            }
        }
}

/* What is saved of 8-bit moments is themselves; fp32 ones load what they stand for, and 8-bit ones any others rounded. */
static void eight_states(int kind, amp_dtype from, amp_dtype to) {
    static eight_bit e[2];
    static float values[EIGHT];
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 2, AMP_LEVEL_DEFAULT);
    amp_state *state = NULL;
    amp_k_tensor *rows[2];
    amp_optimizer_desc d;
    int64_t bytes;
    int step, i, which;
    for (i = 0; i < 2; i++) {
        eight_init(&e[i], AMP_F32, AMP_F32);
        d = eight_desc(&e[i], kind, i ? to : from);
        e[i].o = make(amp, &d);
        rows[i] = row_of(e[i].o, 0);
    }
    CHECK_OK(amp_state_create(&state, NULL));
    for (step = 1; step <= 6; step++) {
        if (step == 4) {
            CHECK_OK(amp_optimizer_save(e[0].o, state, "o"));
            if (to == AMP_BF16) {
                CHECK_ERR(amp_optimizer_load(e[1].o, state, "o"), AMP_ERR_MISMATCH);
                CHECK(strstr(amp_last_error(), "w: record o.m.0") != NULL && strstr(amp_last_error(), "bf16") != NULL);
                break;
            }
            memcpy(e[1].w, e[0].w, sizeof e[0].w);
            CHECK_OK(amp_optimizer_load(e[1].o, state, "o"));
            for (which = AMPI_M; which <= AMPI_V2; which++) {
                void *saved = *ampi_row_array(rows[0], which), *loaded = *ampi_row_array(rows[1], which);
                if (saved == NULL) continue;
                bytes = ampi_array_bytes(rows[0], which);
                if (from == to) CHECK(memcmp(saved, loaded, (size_t)bytes) == 0);
                if (from == AMP_F32) memcpy(values, saved, sizeof values);
                if (from == AMP_BF16) CHECK_OK(amp_convert(values, AMP_F32, saved, AMP_BF16, EIGHT, NULL, NULL));
                if (to == AMP_MOMENTS_8BIT && from != to) check_packed(rows[1], loaded, which == AMPI_M, values);
                if (to != AMP_F32) continue;
                reference_unpack(rows[0], saved, which == AMPI_M, values);
                CHECK(memcmp(values, loaded, sizeof values) == 0);
            }
        }
        for (i = 0; i < 2; i++) {
            eight_backward(&e[i], step);
            CHECK_OK(amp_step(e[i].o, NULL));
        }
    }
    if (from == to) CHECK(memcmp(e[0].w, e[1].w, sizeof e[0].w) == 0);
    for (i = 0; i < 2; i++) amp_optimizer_destroy(e[i].o);
    amp_state_destroy(state);
    amp_close(amp);
}
TEST(eight_bit_states_load_and_convert) {
    int kind;
    for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++) {
        eight_states(kind, AMP_MOMENTS_8BIT, AMP_MOMENTS_8BIT);
        eight_states(kind, AMP_MOMENTS_8BIT, AMP_F32);
        eight_states(kind, AMP_F32, AMP_MOMENTS_8BIT);
        eight_states(kind, AMP_BF16, AMP_MOMENTS_8BIT);
        eight_states(kind, AMP_MOMENTS_8BIT, AMP_BF16);
    }
}

TEST(eight_bit_states_that_do_not_fit_are_refused_whole) {
    enum { BLOCKS = (EIGHT + 255) / 256 };
    static const struct { const char *key; amp_dtype dtype; int64_t count; amp_result error; } spoils[] = {
        {"o.m_scales.0", AMP_F32, (EIGHT + 2047) / 2048, AMP_ERR_MISMATCH},           /* bitsandbytes' blocks of old */
        {"o.v_scales.0", AMP_F32, (EIGHT + 127) / 128, AMP_ERR_MISMATCH},             /* torchao's */
        {"o.v_scales.0", AMP_F64, BLOCKS, AMP_ERR_MISMATCH},
        {"o.m.0", AMP_U8, EIGHT - 1, AMP_ERR_MISMATCH},
        {"o.v.0", AMP_U16, EIGHT, AMP_ERR_MISMATCH}};
    static eight_bit e;
    static uint8_t zeros[8 * EIGHT], before[2][BLOCKS * 260];
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_state *state = NULL, *without = NULL;
    amp_optimizer_desc d;
    size_t k;
    int64_t i;
    eight_init(&e, AMP_F32, AMP_F32);
    d = eight_desc(&e, AMP_ADAMW, AMP_MOMENTS_8BIT);
    e.o = make(amp, &d);
    eight_backward(&e, 1);
    CHECK_OK(amp_step(e.o, NULL));
    memcpy(before[0], row_of(e.o, 0)->m, sizeof before[0]);
    memcpy(before[1], row_of(e.o, 0)->v, sizeof before[1]);
    for (k = 0; k < sizeof spoils / sizeof *spoils; k++) {
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_optimizer_save(e.o, state, "o"));
        CHECK_OK(amp_state_put(state, spoils[k].key, spoils[k].dtype, zeros, spoils[k].count));
        CHECK_ERR(amp_optimizer_load(e.o, state, "o"), spoils[k].error);
        CHECK_MSG(strstr(amp_last_error(), "w: record ") != NULL && strstr(amp_last_error(), spoils[k].key) != NULL, "%s", amp_last_error());
        if (k < 2) CHECK(strstr(amp_last_error(), "each block of 256 elements") != NULL);
        CHECK(memcmp(before[0], row_of(e.o, 0)->m, sizeof before[0]) == 0 && memcmp(before[1], row_of(e.o, 0)->v, sizeof before[1]) == 0);
        amp_state_destroy(state);
    }
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_state_create(&without, NULL));
    CHECK_OK(amp_optimizer_save(e.o, state, "o"));
    for (i = 0; amp_state_key(state, i) != NULL; i++) {               /* all but one record */
        const char *key = amp_state_key(state, i);
        amp_dtype dtype;
        int64_t n = amp_state_count(state, key, &dtype);
        CHECK_OK(amp_state_get(state, key, dtype, zeros, n));
        if (strcmp(key, "o.v_scales.0") != 0) CHECK_OK(amp_state_put(without, key, dtype, zeros, n));
    }
    CHECK_ERR(amp_optimizer_load(e.o, without, "o"), AMP_ERR_NAME);
    CHECK(strstr(amp_last_error(), "o.v_scales.0") != NULL);
    CHECK(memcmp(before[0], row_of(e.o, 0)->m, sizeof before[0]) == 0 && memcmp(before[1], row_of(e.o, 0)->v, sizeof before[1]) == 0);
    amp_state_destroy(state);
    amp_state_destroy(without);
    amp_optimizer_destroy(e.o);
    amp_close(amp);
}

TEST(small_parameters_and_embeddings_keep_fp32_moments) {
    enum { N = 4, ROOMY = 8192 };
    static const struct { const char *name; int64_t count; int embedding; amp_dtype moments; } rows[N] = {
        {"small", 4095, 0, AMP_F32}, {"least", 4096, 0, AMP_MOMENTS_8BIT}, {"table", ROOMY, 1, AMP_F32}, {"large", ROOMY, 0, AMP_MOMENTS_8BIT}};
    static uint16_t w[N][ROOMY], g[N][ROOMY];
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
    amp_param_group groups[2];
    amp_parameter_bytes bytes;
    amp_param p[N];
    amp_optimizer_desc d;
    amp_optimizer *o;
    int i;
    memset(p, 0, sizeof p);
    memset(&d, 0, sizeof d);
    memset(groups, 0, sizeof groups);
    for (i = 0; i < N; i++) {
        p[i].name = rows[i].name;
        p[i].embedding = rows[i].embedding;
        p[i].weight = amp_tensor1(w[i], AMP_BF16, rows[i].count);
        p[i].grad = amp_tensor1(g[i], AMP_BF16, rows[i].count);
    }
    d.params = p; d.n_params = N; d.moments = AMP_MOMENTS_8BIT; d.master = AMP_MASTER_REMAINDER;
    o = make(amp, &d);
    for (i = 0; i < N; i++) CHECK_EQ(row_of(o, i)->moment_dtype, rows[i].moments);
    amp_optimizer_destroy(o);
    d.params = &p[3]; d.n_params = 1;                                 /* 2 + 2 + 2, and a scale of 4 bytes for 256 of m and v */
    o = make(amp, &d);
    CHECK_OK(amp_optimizer_bytes(o, &bytes));
    CHECK(bytes.weight == 2 && bytes.gradient == 2 && bytes.master == 2 && bytes.moments == 2 + 8.0 / 256 && bytes.total == 8 + 8.0 / 256);
    amp_optimizer_destroy(o);
    d.params = p; d.n_params = N;                                     /* a group's own words hold */
    groups[0].match = "table"; groups[0].moments = AMP_MOMENTS_8BIT;
    groups[1].match = "l*"; groups[1].moments = AMP_BF16;
    d.groups = groups; d.n_groups = 2;
    o = make(amp, &d);
    CHECK(row_of(o, 0)->moment_dtype == AMP_F32 && row_of(o, 1)->moment_dtype == AMP_BF16);
    CHECK(row_of(o, 2)->moment_dtype == AMP_MOMENTS_8BIT && row_of(o, 3)->moment_dtype == AMP_BF16);
    amp_optimizer_destroy(o);
    p[2].embedding = 2;
    CHECK_ERR(amp_param_register(amp, p, N), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), ".embedding = 2") != NULL);
    amp_close(amp);
}

/* fp32 masters and remainders load into each other, ties included, and go on with the same bits. */
TEST(masters_and_remainders_load_into_each_other) {
    static model a, b;
    int back;
    for (back = 0; back < 2; back++) {
        amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
        amp_state *state = NULL;
        amp_optimizer_desc d;
        amp_optimizer *x, *y;
        float master[91];
        int step, i;
        int64_t k;
        model_init(&a, AMP_BF16, AMP_F32);
        model_init(&b, AMP_BF16, AMP_F32);
        d = adamw(&a);
        d.master = back ? AMP_MASTER_REMAINDER : AMP_MASTER_F32;
        x = make(amp, &d);
        d.params = b.p;
        d.master = back ? AMP_MASTER_F32 : AMP_MASTER_REMAINDER;
        y = make(amp, &d);
        for (step = 0; step < 20; step++) {
            if (step == 9) {
                CHECK_OK(amp_state_create(&state, NULL));
                CHECK_OK(amp_optimizer_save(x, state, "o"));
                CHECK_OK(amp_state_get(state, "o.master.0", AMP_F32, master, 91));
                for (k = 0; k < 91; k++) master[k] = ampi_f32_of_bits((ampi_bits_f32(master[k]) & 0xffff0000u) | 0x8000u);   /* ties, even and odd */
                CHECK_OK(amp_state_put(state, "o.master.0", AMP_F32, master, 91));
                memcpy(b.w16, a.w16, sizeof a.w16);
                CHECK_OK(amp_optimizer_load(x, state, "o"));
                CHECK_OK(amp_optimizer_load(y, state, "o"));
                amp_state_destroy(state);
            }
            model_backward(&a, step, 1);
            model_backward(&b, step, 1);
            if (step != 9) { CHECK_OK(amp_step(x, NULL)); CHECK_OK(amp_step(y, NULL)); }
            if (step < 9) continue;
            for (i = 0; i < TENSORS; i++) for (k = 0; k < count_of(i); k++) {
                uint32_t own = back ? joined(&a, x, i, k) : ampi_bits_f32(((const float *)a.p[i].master)[k]);
                uint32_t other = back ? ampi_bits_f32(((const float *)b.p[i].master)[k]) : joined(&b, y, i, k);
                CHECK(own == other);
                if (step == 9 && i == 0) CHECK(memcmp(&own, &master[k], 4) == 0);
            }
        }
        amp_optimizer_destroy(x);
        amp_optimizer_destroy(y);
        amp_close(amp);
    }
}

/* bf16 moments are fp32 ones too, but not the other way round. */
TEST(moments_load_where_that_is_exact) {
    static model a, b;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O3);
    amp_state *state = NULL;
    amp_optimizer_desc d;
    amp_optimizer *x, *y;
    int64_t k;
    model_init(&a, AMP_BF16, AMP_F32);
    model_init(&b, AMP_BF16, AMP_F32);
    d = adamw(&a);
    d.moments = AMP_BF16;
    d.master = AMP_MASTER_STOCHASTIC;
    x = make(amp, &d);
    d.params = b.p;
    d.moments = AMP_F32;
    d.master = AMP_MASTER_NONE;
    y = make(amp, &d);
    model_backward(&a, 0, 1);
    CHECK_OK(amp_step(x, NULL));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(x, state, "o"));
    CHECK_OK(amp_optimizer_load(y, state, "o"));
    for (k = 0; k < count_of(2); k++) {
        float m = amp_f32_from_bf16(((const uint16_t *)x->set->rows[2].m)[k]), v = amp_f32_from_bf16(((const uint16_t *)x->set->rows[2].v)[k]);
        CHECK(memcmp((const float *)y->set->rows[2].m + k, &m, 4) == 0 && memcmp((const float *)y->set->rows[2].v + k, &v, 4) == 0);
        CHECK(amp_is_finite_f32(&m) && m != 0);
    }
    CHECK_OK(amp_optimizer_save(y, state, "o"));
    CHECK_ERR(amp_optimizer_load(x, state, "o"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "a.weight") != NULL && strstr(amp_last_error(), "bf16") != NULL);
    amp_state_destroy(state);
    amp_optimizer_destroy(x);
    amp_optimizer_destroy(y);
    amp_close(amp);
}

/* A state from before there were seeds: the optimizer keeps its own. */
TEST(a_state_without_a_seed_loads) {
    static model m;
    static uint8_t values[8 * ROOM];
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
    amp_state *state = NULL, *old = NULL;
    amp_optimizer_desc d;
    amp_optimizer *o;
    const char *key;
    int64_t i, n, copied = 0;
    int64_t wrong = 0;
    model_init(&m, AMP_BF16, AMP_F32);
    d = adamw(&m);
    d.seed = 3;
    o = make(amp, &d);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_state_create(&old, NULL));
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    for (i = 0; (key = amp_state_key(state, i)) != NULL; i++) {
        amp_dtype dtype = AMP_DTYPE_DEFAULT;
        n = amp_state_count(state, key, &dtype);
        CHECK_OK(amp_state_get(state, key, dtype, values, n));
        if (strcmp(key, "o.seed") == 0) { CHECK(n == 1 && dtype == AMP_I64 && values[0] == 3); continue; }
        CHECK_OK(amp_state_put(old, key, dtype, values, n));
        copied++;
    }
    CHECK_EQ(copied, i - 1);
    amp_optimizer_destroy(o);
    d.seed = 4;
    o = make(amp, &d);
    CHECK_OK(amp_optimizer_load(o, old, "o"));
    CHECK_OK(amp_optimizer_query(o, &d));
    CHECK_EQ(d.seed, 4);
    CHECK_OK(amp_optimizer_load(o, state, "o"));
    CHECK_OK(amp_optimizer_query(o, &d));
    CHECK_EQ(d.seed, 3);
    CHECK_OK(amp_state_put(state, "o.seed", AMP_U8, &wrong, 1));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_MISMATCH);
    amp_state_destroy(state);
    amp_state_destroy(old);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* After a host loaded weights: masters are the weights, and nothing of the old ones is left. */
TEST(refresh_clears_remainders) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
    amp_optimizer_desc d;
    amp_optimizer *o;
    int i;
    int64_t k;
    model_init(&m, AMP_BF16, AMP_BF16);
    d = adamw(&m);
    d.master = AMP_MASTER_REMAINDER;
    o = make(amp, &d);
    model_backward(&m, 0, 1);
    CHECK_OK(amp_step(o, NULL));
    CHECK(joined(&m, o, 0, 0) != (uint32_t)m.w16[0][0] << 16);
    for (k = 0; k < count_of(0); k++) m.w16[0][k] = 0;
    CHECK_OK(amp_optimizer_rebuild_masters(o));
    for (i = 0; i < TENSORS; i++) for (k = 0; k < count_of(i); k++) CHECK(joined(&m, o, i, k) == (uint32_t)m.w16[i][k] << 16);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

TEST(bytes_per_parameter) {
    static const struct { amp_dtype weight, grad; amp_optimizer_kind kind; amp_master_kind master; amp_dtype moments; double bytes[5]; } rows[] = {
        {AMP_F32, AMP_F32, AMP_ADAMW, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT, {4, 4, 0, 8, 16}},
        {AMP_F32, AMP_F32, AMP_ADAMW, AMP_MASTER_DEFAULT, AMP_BF16, {4, 4, 0, 4, 12}},
        {AMP_BF16, AMP_BF16, AMP_ADAMW, AMP_MASTER_F32, AMP_F32, {2, 2, 4, 8, 16}},
        {AMP_BF16, AMP_F32, AMP_ADAMW, AMP_MASTER_DEFAULT, AMP_F32, {2, 4, 4, 8, 18}},
        {AMP_BF16, AMP_BF16, AMP_ADAMW, AMP_MASTER_REMAINDER, AMP_F32, {2, 2, 2, 8, 14}},
        {AMP_BF16, AMP_BF16, AMP_ADAMW, AMP_MASTER_REMAINDER, AMP_BF16, {2, 2, 2, 4, 10}},
        {AMP_BF16, AMP_BF16, AMP_ADAMW, AMP_MASTER_STOCHASTIC, AMP_F32, {2, 2, 0, 8, 12}},
        {AMP_F16, AMP_F16, AMP_ADAMW, AMP_MASTER_STOCHASTIC, AMP_BF16, {2, 2, 0, 4, 8}},
        {AMP_BF16, AMP_BF16, AMP_SGD, AMP_MASTER_F32, AMP_BF16, {2, 2, 4, 2, 10}},
        {AMP_F32, AMP_F32, AMP_LION, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT, {4, 4, 0, 4, 12}},
        {AMP_BF16, AMP_BF16, AMP_LION, AMP_MASTER_REMAINDER, AMP_BF16, {2, 2, 2, 2, 8}}};
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
    amp_param_group group;
    amp_parameter_bytes bytes;
    amp_optimizer_desc d;
    amp_optimizer *o;
    int64_t before, all = 0;
    size_t r;
    int i;
    for (i = 0; i < TENSORS; i++) all += count_of(i);
    for (r = 0; r < sizeof rows / sizeof *rows; r++) {
        const double *want = rows[r].bytes;
        amp_memory_info info;
        model_init(&m, rows[r].weight, rows[r].grad);
        d = adamw(&m);
        set_kind(&d, rows[r].kind);
        d.master = rows[r].master; d.moments = rows[r].moments;
        CHECK_OK(amp_memory(amp, &info));
        before = info.optimizer;
        o = make(amp, &d);
        CHECK_OK(amp_optimizer_bytes(o, &bytes));
        CHECK_EQ(bytes.parameters, all);
        CHECK(bytes.weight == want[0] && bytes.gradient == want[1] && bytes.master == want[2] && bytes.moments == want[3] && bytes.total == want[4]);
        CHECK_OK(amp_memory(amp, &info));                             /* three arrays per row at multiples of 256 bytes, table and counters */
        CHECK((double)(info.optimizer - before) >= (want[2] + want[3]) * (double)all);
        CHECK((double)(info.optimizer - before) <= (want[2] + want[3]) * (double)all + 3 * TENSORS * 256 + 16384);
        amp_optimizer_destroy(o);
    }
    model_init(&m, AMP_BF16, AMP_BF16);                               /* a group has its own */
    d = adamw(&m);
    memset(&group, 0, sizeof group);
    group.match = "b.*"; group.master = AMP_MASTER_STOCHASTIC; group.moments = AMP_BF16;
    d.groups = &group; d.n_groups = 1; d.master = AMP_MASTER_REMAINDER;
    o = make(amp, &d);
    CHECK(o->set->rows[2].master == NULL && o->set->rows[2].moment_dtype == AMP_BF16 && o->set->rows[3].master == NULL);
    CHECK(o->set->rows[0].master != NULL && o->set->rows[0].moment_dtype == AMP_F32);
    CHECK_OK(amp_optimizer_bytes(o, &bytes));
    CHECK(bytes.master == 2.0 * (double)(all - count_of(2) - count_of(3)) / (double)all);
    CHECK_ERR(amp_optimizer_bytes(o, NULL), AMP_ERR_NULL);
    model_backward(&m, 0, 1);
    CHECK_OK(amp_step(o, NULL));
    amp_optimizer_destroy(o);
    amp_close(amp);
}

TEST(storage_that_cannot_be_is_refused) {
    static model m;
    amp_context *o2 = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2), *o3 = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O3);
    amp_optimizer_desc good, d;
    amp_optimizer *o = NULL;
    amp_param_group group;
    memset(&group, 0, sizeof group);
    group.match = "nothing";
#define REFUSED(context, change, error, text) do { d = good; change; CHECK_ERR(amp_optimizer_create(context, &o, &d), error); \
        CHECK(o == NULL && strstr(amp_last_error(), text) != NULL); } while (0)
    model_init(&m, AMP_F32, AMP_F32);
    good = adamw(&m);
    REFUSED(o2, d.master = AMP_MASTER_REMAINDER, AMP_ERR_CONFLICT, "AMP_MASTER_REMAINDER");
    REFUSED(o2, d.master = AMP_MASTER_STOCHASTIC, AMP_ERR_CONFLICT, "fp32");
    REFUSED(o2, d.master = (amp_master_kind)5, AMP_ERR_RANGE, ".master");
    REFUSED(o2, d.moments = AMP_F16, AMP_ERR_DTYPE, "fp16");
    REFUSED(o2, (d.moments = AMP_BF16, d.kind = AMP_SGD), AMP_ERR_CONFLICT, "momentum");
    REFUSED(o2, (d.moments = AMP_MOMENTS_8BIT, d.kind = AMP_SGD), AMP_ERR_CONFLICT, "momentum");
    REFUSED(o2, d.moments = AMP_E4M3, AMP_ERR_DTYPE, "AMP_MOMENTS_8BIT");
    REFUSED(o2, (group.moments = AMP_F64, d.groups = &group, d.n_groups = 1), AMP_ERR_DTYPE, "a group's .moments");
    group.moments = AMP_DTYPE_DEFAULT;
    model_init(&m, AMP_F16, AMP_F32);
    good = adamw(&m);
    REFUSED(o2, d.master = AMP_MASTER_REMAINDER, AMP_ERR_CONFLICT, "a.weight");
    model_init(&m, AMP_BF16, AMP_F32);
    good = adamw(&m);
    REFUSED(o3, d.master = AMP_MASTER_F32, AMP_ERR_CONFLICT, "O2");
    REFUSED(o3, d.master = AMP_MASTER_REMAINDER, AMP_ERR_CONFLICT, "O2");
    REFUSED(o3, (group.master = AMP_MASTER_F32, d.groups = &group, d.n_groups = 1), AMP_ERR_CONFLICT, "a group's .master");
    /* two optimizers that would step the same masters */
    for (int kind = AMP_MASTER_F32; kind <= AMP_MASTER_REMAINDER; kind++) {
        amp_optimizer *first;
        d = good;
        d.master = (amp_master_kind)kind;
        CHECK_OK(amp_optimizer_create(o2, &first, &d));
        REFUSED(o2, d.lr = 0.5, AMP_ERR_CONFLICT, "a.weight has its master in another optimizer");
        amp_optimizer_destroy(first);
    }
#undef REFUSED
    d = good;
    CHECK_OK(amp_optimizer_create(o3, &o, &d));
    CHECK_OK(amp_optimizer_query(o, &d));
    CHECK(d.master == AMP_MASTER_NONE && d.moments == AMP_F32);
    amp_optimizer_destroy(o);
    CHECK_OK(amp_optimizer_create(o3, &o, &d));                       /* effective settings make the same again */
    amp_optimizer_destroy(o);
    amp_close(o2);
    amp_close(o3);
}

/* ---- Skips */

typedef struct { float w[TENSORS][ROOM]; float arrays[3][TENSORS][ROOM]; int64_t step; double power1, power2; } snapshot;
static void take(snapshot *s, const model *m, const amp_optimizer *o) {
    int i, a;
    memset(s, 0, sizeof *s);
    for (i = 0; i < TENSORS; i++) {
        memcpy(s->w[i], m->weight == AMP_F32 ? (const void *)m->w[i] : (const void *)m->w16[i], (size_t)count_of(i) * amp_dtype_size(m->weight));
        for (a = 0; a < AMPI_ARRAYS; a++) {
            amp_k_tensor *row = &o->set->rows[i];
            const void *array = *ampi_row_array(row, a);
            if (array != NULL) memcpy(s->arrays[a][i], array, (size_t)ampi_array_bytes(row, a));
        }
    }
    s->step = o->set->found->step;
    s->power1 = o->set->rows[0].steps ? ((amp_k_steps *)o->set->rows[0].steps)->beta1_power : 0;
    s->power2 = o->set->rows[0].steps ? ((amp_k_steps *)o->set->rows[0].steps)->beta2_power : 0;
}

TEST(a_skip_leaves_everything_bit_for_bit) {
    static model m;
    static snapshot before, after;
    int kind, bad, scaled;
    for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++) for (bad = 0; bad < 3; bad++) for (scaled = 0; scaled < 2; scaled++) {
        amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
        amp_optimizer_desc d;
        amp_optimizer *o;
        amp_scaler *s = scaled ? make_scaler(amp, 1024, 0) : NULL;
        amp_step_result out;
        int step;
        model_init(&m, kind == AMP_ADAMW ? AMP_F32 : AMP_BF16, AMP_F32);
        d = adamw(&m);
        set_kind(&d, kind);
        d.result_lag = AMP_LAG_NONE;
        o = make(amp, &d);
        for (step = 0; step < 3; step++) {
            model_backward(&m, step, scaled ? 1024.0f : 1.0f);
            CHECK_OK(amp_step(o, s));
            CHECK(amp_step_result_next(o, &out) == 1 && out.applied == 1);
        }
        take(&before, &m, o);
        model_backward(&m, step, scaled ? 1024.0f : 1.0f);
        m.g[3][0] = bad == 0 ? INFINITY : bad == 1 ? -INFINITY : NAN;
        CHECK_OK(amp_step(o, s));
        take(&after, &m, o);
        CHECK(memcmp(&before, &after, sizeof before) == 0);
        CHECK(m.p[0].grad_live == 0);                                 /* the cycle is over all the same */
        CHECK(amp_step_result_next(o, &out) == 1);
        CHECK(out.applied == 0 && out.step == 4 && out.applied_steps == 3 && out.total_skips == 1 && out.consecutive_skips == 1);
        CHECK(out.first_bad != NULL && strcmp(out.first_bad, "b.bias") == 0);
        CHECK(out.scale == (scaled ? 1024 : 1) && out.at_floor == 0);
        if (scaled) CHECK(amp_scaler_scale(s) == 512);
        model_backward(&m, 4, scaled ? 512.0f : 1.0f);
        CHECK_OK(amp_step(o, s));
        CHECK(amp_step_result_next(o, &out) == 1 && out.applied == 1 && out.applied_steps == 4 && out.consecutive_skips == 0 && out.total_skips == 1);
        CHECK_EQ(o->set->found->step, 4);
        amp_optimizer_destroy(o);
        amp_scaler_destroy(s);
        amp_close(amp);
    }
}

/* A skipped step is as if it had never been: the run goes on like one without it. */
TEST(a_skip_leaves_no_trace) {
    static model a, b;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d;
    amp_optimizer *x, *y;
    int step;
    model_init(&a, AMP_F32, AMP_F32);
    model_init(&b, AMP_F32, AMP_F32);
    d = adamw(&a);
    x = make(amp, &d);
    d.params = b.p;
    y = make(amp, &d);
    for (step = 0; step < 10; step++) {
        model_backward(&a, step, 1);
        CHECK_OK(amp_step(x, NULL));
        if (step % 3 == 0) {
            model_backward(&b, step, 1);
            b.g[2][5] = NAN;
            CHECK_OK(amp_step(y, NULL));
        }
        model_backward(&b, step, 1);
        CHECK_OK(amp_step(y, NULL));
    }
    CHECK(memcmp(a.w, b.w, sizeof a.w) == 0);
    amp_optimizer_destroy(x);
    amp_optimizer_destroy(y);
    amp_close(amp);
}

TEST(apply_nonfinite_steps_without_a_scaler_only) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = make_scaler(amp, 1024, 0);
    amp_optimizer_desc d;
    amp_optimizer *o;
    float before;
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    d.apply_nonfinite = 1;
    o = make(amp, &d);
    before = m.w[0][0];
    model_backward(&m, 0, 1);
    m.g[3][0] = NAN;
    CHECK_OK(amp_step(o, s));
    CHECK(memcmp(&before, &m.w[0][0], 4) == 0);
    m.p[0].grad_live = m.p[1].grad_live = m.p[2].grad_live = m.p[3].grad_live = m.p[4].grad_live = 1;
    CHECK_OK(amp_step(o, NULL));
    CHECK(memcmp(&before, &m.w[0][0], 4) != 0);
    CHECK(!amp_is_finite_f32(&m.w[3][0]));
    amp_optimizer_destroy(o);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* Two optimizers share a scaler: only the one that overflowed skips, and the scale shrinks once. */
TEST(only_the_offender_skips) {
    static model a, b;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = make_scaler(amp, 1024, 0);
    amp_optimizer_desc d;
    amp_optimizer *x, *y;
    float wa, wb;
    model_init(&a, AMP_F32, AMP_F32);
    model_init(&b, AMP_F32, AMP_F32);
    d = adamw(&a);
    x = make(amp, &d);
    d.params = b.p;
    y = make(amp, &d);
    model_backward(&a, 0, 1024);
    model_backward(&b, 0, 1024);
    b.g[0][0] = INFINITY;
    wa = a.w[0][0]; wb = b.w[0][0];
    CHECK_OK(amp_optimizer_step(y, s));
    CHECK_OK(amp_optimizer_step(x, s));
    CHECK_ERR(amp_optimizer_step(x, s), AMP_ERR_STEPPED);
    CHECK_OK(amp_scaler_update(s));
    CHECK(memcmp(&wa, &a.w[0][0], 4) != 0 && memcmp(&wb, &b.w[0][0], 4) == 0);
    CHECK(amp_scaler_scale(s) == 512);
    amp_optimizer_destroy(x);
    amp_optimizer_destroy(y);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* ---- Accumulation, clipping, groups */

/* Four micro-batches whose gradients were added are one batch of the average; sums of this kind are exact here. */
TEST(accumulation_is_one_big_batch) {
    static model a, b;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = make_scaler(amp, 256, 0);
    amp_optimizer_desc d;
    amp_optimizer *x, *y;
    int step, micro, i, k;
    model_init(&a, AMP_F32, AMP_F32);
    model_init(&b, AMP_F32, AMP_F32);
    d = adamw(&a);
    d.clip_norm = 0.3;
    d.accumulation = 4;
    x = make(amp, &d);
    d.params = b.p;
    d.accumulation = 1;
    y = make(amp, &d);
    for (step = 0; step < 6; step++) {
        model_backward(&b, step, 1);
        for (micro = 0; micro < 4; micro++) {
            float before[TENSORS][ROOM];
            memcpy(before, a.w, sizeof before);
            for (i = 0; i < TENSORS; i++) {
                int add = amp_param_accumulate(&a.p[i]);
                CHECK_EQ(add, micro > 0);
                for (k = 0; k < count_of(i); k++) a.g[i][k] = (add ? a.g[i][k] : 0) + b.g[i][k] * 256;
            }
            CHECK_OK(amp_step(x, s));
            CHECK_EQ(memcmp(before, a.w, sizeof before) != 0, micro == 3);
        }
        CHECK_OK(amp_step(y, NULL));
        CHECK(memcmp(a.w, b.w, sizeof a.w) == 0);
    }
    CHECK_EQ(amp_scaler_device(s)->updates, 6);
    amp_optimizer_destroy(x);
    amp_optimizer_destroy(y);
    amp_scaler_destroy(s);
    amp_close(amp);
}

TEST(clip_each_clips_the_running_sum) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = make_scaler(amp, 64, 0);
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_step_result out;
    double norm = 0, want;
    int i, k;
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    d.clip_norm = 0.01;
    d.clip_each = 1;
    d.accumulation = 2;
    d.result_lag = AMP_LAG_NONE;
    o = make(amp, &d);
    model_backward(&m, 3, 64);
    for (i = 0; i < TENSORS; i++) for (k = 0; k < count_of(i); k++) norm += (double)m.g[i][k] * (double)m.g[i][k];
    norm = sqrt(norm);
    CHECK(norm / 64 / 2 > 0.02);
    CHECK_OK(amp_step(o, s));
    for (want = 0, i = 0; i < TENSORS; i++) for (k = 0; k < count_of(i); k++) want += (double)m.g[i][k] * (double)m.g[i][k];
    CHECK_MSG(fabs(sqrt(want) / 64 / 2 - 0.01) < 2e-6, "the running sum has norm %g", sqrt(want) / 64 / 2);
    CHECK_EQ(amp_step_result_next(o, &out), 0);
    CHECK_OK(amp_step(o, s));           /* nothing added: the norm is the clipped one */
    CHECK_EQ(amp_step_result_next(o, &out), 1);
    CHECK(out.applied == 1 && fabs((double)out.norm - 0.01) < 2e-6);
    /* an overflow in the first micro-batch skips the whole step */
    model_backward(&m, 0, 64);
    m.g[4][7] = INFINITY;
    CHECK_OK(amp_step(o, s));
    CHECK_OK(amp_step(o, s));
    CHECK_EQ(amp_step_result_next(o, &out), 1);
    CHECK(out.applied == 0 && strcmp(out.first_bad, "c.weight") == 0 && amp_scaler_scale(s) == 32);
    amp_optimizer_destroy(o);
    amp_scaler_destroy(s);
    amp_close(amp);
}

TEST(groups_by_name) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_param_group groups[4];
    amp_optimizer_desc d;
    amp_optimizer *o;
    char pattern[] = "a.*";
    int i;
    memset(groups, 0, sizeof groups);
    groups[0].match = "?.bias"; groups[0].weight_decay = 0.5;
    groups[1].match = pattern; groups[1].lr_scale = 2;
    groups[2].match = "b*"; groups[2].lr_scale = (double)AMP_EXPLICIT_ZERO; groups[2].weight_decay = (double)AMP_EXPLICIT_ZERO;
    groups[3].match = "*"; groups[3].lr_scale = 4;
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    d.groups = groups;
    d.n_groups = 4;
    o = make(amp, &d);
    pattern[0] = 'z';                                                 /* patterns are copied */
    memset(groups, 0xff, sizeof groups);
    {
        static const double scale[TENSORS] = {2, 1, 0, 1, 4}, decay[TENSORS] = {0.1, 0.5, 0, 0.5, 0.1};
        for (i = 0; i < TENSORS; i++) {
            CHECK_MSG(o->set->rows[i].lr_scale == scale[i], "%s: lr_scale %g", names[i], o->set->rows[i].lr_scale);
            CHECK_MSG(o->set->rows[i].weight_decay == decay[i], "%s: weight_decay %g", names[i], o->set->rows[i].weight_decay);
        }
    }
    model_backward(&m, 0, 1);
    {
        float before[2];
        before[0] = m.w[2][0]; before[1] = m.w[0][0];
        CHECK_OK(amp_step(o, NULL));
        CHECK(memcmp(&before[0], &m.w[2][0], 4) == 0);                /* learning rate 0 */
        /* the first AdamW step is w (1 - 2 lr decay) - 2 lr sign(g) */
        CHECK(fabs((double)m.w[0][0] - ((double)before[1] * (1 - 0.02 * 0.1) - (m.g[0][0] > 0 ? 0.02 : -0.02))) < 1e-6);
    }
    amp_optimizer_destroy(o);
    memset(groups, 0, sizeof groups);
    d.n_groups = 0; d.groups = NULL;
    o = make(amp, &d);                                                /* decay on matrices only ... */
    for (i = 0; i < TENSORS; i++) CHECK(o->set->rows[i].weight_decay == (shapes[i][1] ? 0.1 : 0));
    amp_optimizer_destroy(o);
    d.decay_vectors = 1;
    o = make(amp, &d);                                                /* ... unless asked for */
    for (i = 0; i < TENSORS; i++) CHECK(o->set->rows[i].weight_decay == 0.1);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* A group that matches no parameter is refused with the nearest name; one that earlier groups leave nothing is warned about. */
static char group_warning[400];
static void keep_warning(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level; (void)id;
    snprintf(group_warning, sizeof group_warning, "%s", text);
}
TEST(groups_that_match_nothing) {
    static model m;
    static const struct { const char *match, *nearest; } cases[] = {
        {"a.wieght", "the nearest is a.weight"}, {"b.bais*", "the nearest is b.bias"}, {"?.Bias", "the nearest is a.bias"}, {"*.gamma", "a."}, {"", "nearest"}};
    amp_context *amp;
    amp_param_group groups[2];
    amp_optimizer_desc d;
    amp_optimizer *o = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = 1; desc.logger.write = keep_warning;
    CHECK_OK(amp_open(&amp, &desc));
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    memset(groups, 0, sizeof groups);
    groups[0].match = "*.bias";
    d.groups = groups; d.n_groups = 2;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        groups[1].match = cases[i].match;
        CHECK_ERR(amp_optimizer_create(amp, &o, &d), AMP_ERR_NAME);
        CHECK_MSG(o == NULL && strstr(amp_last_error(), ".groups[1].match = \"") && strstr(amp_last_error(), cases[i].nearest), "%s", amp_last_error());
    }
    d.sharded = 1;                                  /* another rank may have it */
    o = make(amp, &d);
    amp_optimizer_destroy(o);
    d.sharded = 0;
    CHECK(group_warning[0] == 0);
    groups[1].match = "a.bias";
    o = make(amp, &d);
    CHECK_MSG(strstr(group_warning, ".groups[1].match = \"a.bias\" has no effect") != NULL, "%s", group_warning);
    amp_optimizer_destroy(o);
    for (int i = 0; i < TENSORS; i++) if (!strcmp(m.p[i].name, "a.weight")) m.p[i].grad.data = NULL;
    groups[1].match = "a.weight";                   /* frozen, but there */
    group_warning[0] = 0;
    o = make(amp, &d);
    CHECK(group_warning[0] == 0);
    amp_optimizer_destroy(o);
    d.n_params = 0;
    CHECK_ERR(amp_optimizer_create(amp, &o, &d), AMP_ERR_NAME);
    CHECK(strstr(amp_last_error(), "there are none") != NULL);
    amp_close(amp);
}

TEST(parameters_without_a_gradient_are_passed_over) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d;
    amp_optimizer *o;
    float w0[ROOM], w1[ROOM];
    uint64_t version;
    int step;
    model_init(&m, AMP_F32, AMP_F32);
    m.p[4].grad.data = NULL;                                          /* frozen */
    d = adamw(&m);
    o = make(amp, &d);
    CHECK_EQ(o->set->n, 4);
    memcpy(w1, m.w[4], sizeof w1);
    for (step = 0; step < 6; step++) {
        model_backward(&m, step, 1);
        m.g[2][0] = NAN;
        m.p[2].grad_live = step % 2 == 0 ? 0 : 1;                     /* its NaN does not count in even steps */
        memcpy(w0, m.w[2], sizeof w0);
        version = m.p[2].version;
        CHECK_OK(amp_step(o, NULL));
        CHECK(memcmp(w0, m.w[2], sizeof w0) == 0);
        CHECK_EQ(m.p[2].version, version + (step % 2 == 0 ? 0 : 1));
    }
    CHECK_EQ(o->set->found->step, 3);
    CHECK_EQ(o->set->found->skips, 3);
    CHECK(memcmp(w1, m.w[4], sizeof w1) == 0);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* Sets whose gradients count in a step: each parameter's come and go at random, the last's first in step 9. */
static int has_gradient(int step, int i) { return i == 4 ? step >= 9 : amp_random_u32(70, (uint64_t)(step * 8 + i)) % 3 != 0; }

/* A parameter moves as if its optimizer had it alone, and stepped only when it has a gradient: steps that are skipped
   count for none. */
TEST(each_parameter_counts_its_own_steps) {
    static model all, one;
    static const amp_cpu_path paths[] = {AMP_CPU_SCALAR, AMP_CPU_DEFAULT};
    int kind, storage, path, i, step;
    for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++) for (storage = 0; storage < 4; storage++) for (path = 0; path < 2; path++) {
        amp_context *amp = open_context(paths[path], 1, AMP_LEVEL_O2), *alone = open_context(paths[path], 1, AMP_LEVEL_O2);
        amp_optimizer_desc d;
        amp_optimizer *o, *p[TENSORS];
        amp_param_group group;
        memset(&group, 0, sizeof group);
        model_init(&all, storage == 0 ? AMP_F32 : AMP_BF16, AMP_F32);
        model_init(&one, all.weight, AMP_F32);
        d = adamw(&all);
        set_kind(&d, kind);
        if (kind == AMP_SGD) { d.dampening = storage % 2 ? 0 : 0.3; d.nesterov = storage % 2; }
        if (storage == 2) d.master = AMP_MASTER_REMAINDER;
        group.match = "*";
        group.moments = AMP_MOMENTS_8BIT;
        if (storage == 3) { d.groups = &group; d.n_groups = 1; }
        o = make(amp, &d);
        for (i = 0; i < TENSORS; i++) { d.params = &one.p[i]; d.n_params = 1; p[i] = make(alone, &d); }
        for (step = 0; step < 24; step++) {
            model_backward(&all, step, 1);
            memcpy(one.g, all.g, sizeof one.g);
            if (step % 6 == 5) all.g[0][0] = NAN;
            for (i = 0; i < TENSORS; i++) all.p[i].grad_live = has_gradient(step, i) || (i == 0 && step % 6 == 5);
            CHECK_OK(amp_step(o, NULL));
            for (i = 0; i < TENSORS && step % 6 != 5; i++) {
                one.p[i].grad_live = has_gradient(step, i);
                if (has_gradient(step, i)) CHECK_OK(amp_step(p[i], NULL));
            }
            CHECK_MSG(memcmp(all.w, one.w, sizeof all.w) == 0 && memcmp(all.w16, one.w16, sizeof all.w16) == 0, "kind %d, storage %d, step %d", kind, storage, step);
        }
        CHECK_EQ(o->set->found->step, 20);
        if (kind != AMP_LION) CHECK_EQ(((amp_k_steps *)o->set->rows[4].steps)->count, 12);      /* 9 to 23 but 11, 17 and 23 */
        else CHECK(o->set->rows[4].steps == NULL);
        for (i = 0; i < TENSORS; i++) amp_optimizer_destroy(p[i]);
        amp_optimizer_destroy(o);
        amp_close(amp);
        amp_close(alone);
    }
}

/* PyTorch's numbers: AdamW's first step moves a weight by the learning rate, whenever it comes. */
TEST(a_late_first_gradient_moves_by_the_learning_rate) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_step_result r;
    int step, i;
    float before[ROOM];
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    d.weight_decay = 0;
    d.lr = 1e-3;
    d.result_lag = AMP_LAG_NONE;
    o = make(amp, &d);
    for (step = 0; step < 200; step++) {
        model_backward(&m, step, 1);
        m.p[1].grad_live = 0;
        CHECK_OK(amp_step(o, NULL));
        CHECK(amp_step_result_next(o, &r) == 1 && r.applied_steps == step + 1);
    }
    memcpy(before, m.w[1], sizeof before);
    model_backward(&m, step, 1);
    CHECK_OK(amp_step(o, NULL));
    for (i = 0; i < count_of(1); i++) CHECK_MSG(fabs(fabs(before[i] - m.w[1][i]) - 1e-3) < 2e-6, "element %d moved by %g", i, before[i] - m.w[1][i]);
    CHECK(amp_step_result_next(o, &r) == 1 && r.applied == 1 && r.applied_steps == 201);
    for (i = 0; i < TENSORS; i++) m.p[i].grad_live = 0;              /* a step with no gradient at all counts for none */
    CHECK_OK(amp_step(o, NULL));
    CHECK(amp_step_result_next(o, &r) == 1 && r.applied == 0 && r.step == 202 && r.applied_steps == 201 && r.total_skips == 1);
    CHECK(r.first_bad == NULL && r.at_floor == 0);
    CHECK_EQ(((amp_k_steps *)o->set->rows[0].steps)->count, 201);
    CHECK_EQ(((amp_k_steps *)o->set->rows[1].steps)->count, 1);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* ---- Parameters that are frozen at first */

static void encode_state(const amp_optimizer *o, const amp_system *system, void **blob, size_t *bytes) {
    amp_state *state = NULL;
    CHECK_OK(amp_state_create(&state, system));
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    CHECK_OK(amp_state_encode(state, blob, bytes));
    amp_state_destroy(state);
}

/* A parameter that gets its gradient later has from then on what one has that was there all the time: the same weights,
   norms, results and saved states, bit for bit. */
TEST(a_parameter_that_gets_a_gradient_later_trains) {
    static model late, there;
    int variant, step, i;
    for (variant = 0; variant < 6; variant++) {
        amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
        amp_optimizer_desc d;
        amp_optimizer *o[2];
        amp_step_result r[2];
        amp_parameter_bytes held[2];
        void *blob[2];
        size_t bytes[2];
        model_init(&late, variant ? AMP_BF16 : AMP_F32, AMP_F32);
        model_init(&there, late.weight, AMP_F32);
        d = adamw(&late);
        set_kind(&d, variant % 3 + 1);
        if (variant == 2) d.master = AMP_MASTER_REMAINDER;
        if (variant == 4) d.moments = AMP_MOMENTS_8BIT;
        if (variant == 5) { d.sync_every = 2; d.master = AMP_MASTER_NONE; }
        d.clip_norm = 0.05;
        d.accumulation = variant == 3 ? 2 : 1;
        d.result_lag = 5;
        late.p[1].grad.data = late.p[3].grad.data = NULL;
        o[0] = make(amp, &d);
        CHECK_OK(amp_optimizer_bytes(o[0], &held[0]));
        d.params = there.p;
        o[1] = make(amp, &d);
        for (step = 0; step < 24; step++) {
            if (step == 10) { late.p[1].grad = view(late.g[1], AMP_F32, 1); late.p[3].grad = view(late.g[3], AMP_F32, 3); }
            model_backward(&late, step, 1);
            memcpy(there.g, late.g, sizeof there.g);
            if (step == 8) late.g[4][0] = there.g[4][0] = NAN;       /* its result is delivered after the rows moved */
            for (i = 0; i < TENSORS; i++) there.p[i].grad_live = step >= 10 || i % 2 == 0;
            if (step < 10) late.p[1].grad_live = late.p[3].grad_live = 0;
            CHECK_OK(amp_step(o[0], NULL));
            CHECK_OK(amp_step(o[1], NULL));
            CHECK_EQ(o[0]->set->n, step < 10 ? 3 : 5);
            CHECK_MSG(memcmp(late.w, there.w, sizeof late.w) == 0 && memcmp(late.w16, there.w16, sizeof late.w16) == 0, "variant %d, step %d", variant, step);
            while (amp_step_result_next(o[0], &r[0])) {
                CHECK(amp_step_result_next(o[1], &r[1]) == 1);
                CHECK(r[0].norm == r[1].norm || r[0].step == 9 || variant == 3);
                CHECK(r[0].applied == r[1].applied && (r[0].applied || strcmp(r[0].first_bad, r[1].first_bad) == 0));
            }
        }
        encode_state(o[0], NULL, &blob[0], &bytes[0]);
        encode_state(o[1], NULL, &blob[1], &bytes[1]);
        CHECK(bytes[0] == bytes[1] && memcmp(blob[0], blob[1], bytes[0]) == 0);
        CHECK_OK(amp_optimizer_bytes(o[1], &held[1]));
        CHECK(held[0].parameters < held[1].parameters);
        CHECK_OK(amp_optimizer_bytes(o[0], &held[0]));
        CHECK(memcmp(&held[0], &held[1], sizeof held[0]) == 0);
        for (i = 0; i < 2; i++) { amp_file_free(NULL, blob[i], bytes[i]); amp_optimizer_destroy(o[i]); }
        amp_close(amp);
    }
}

/* Another optimizer's parameters are not taken in, nor those whose gradient does not count, and what is wrong with one
   is an error that names it. */
TEST(who_gets_a_parameter_that_comes_later) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d;
    amp_optimizer *first, *second;
    amp_grad_set_desc set_desc;
    amp_grad_set *set = NULL;
    amp_scaler *s = make_scaler(amp, 4, 0);
    amp_grad_stats stats;
    float other[ROOM];
    model_init(&m, AMP_F32, AMP_F32);
    m.p[0].grad.data = m.p[4].grad.data = NULL;
    d = adamw(&m);
    first = make(amp, &d);
    m.p[0].grad = view(m.g[0], AMP_F32, 0);
    d.params = m.p;
    d.n_params = 1;
    second = make(amp, &d);
    model_backward(&m, 0, 1);
    CHECK_OK(amp_step(first, NULL));
    CHECK_EQ(first->set->n, 3);                                       /* the second has [0]; [4] has no gradient */
    CHECK(m.p[0].grad_live == 1);
    CHECK_OK(amp_step(second, NULL));
    m.p[4].grad = amp_tensor1(m.g[4], AMP_F32, 2);
    m.p[4].grad_live = 1;
    CHECK_ERR(amp_step(first, NULL), AMP_ERR_SHAPE);
    CHECK(strstr(amp_last_error(), "amp_step") != NULL && strstr(amp_last_error(), names[4]) != NULL);
    m.p[4].grad = view(m.g[4], AMP_F32, 4);
    m.p[4].grad_live = 0;
    model_backward(&m, 1, 1);
    m.p[4].grad_live = 0;
    CHECK_OK(amp_step(first, NULL));
    CHECK_EQ(first->set->n, 3);
    m.p[4].grad.data = NULL;
    memset(&set_desc, 0, sizeof set_desc);
    set_desc.params = m.p;
    set_desc.n_params = TENSORS;
    CHECK_OK(amp_grad_set_create(amp, &set, &set_desc));              /* the same for a set without an optimizer */
    model_backward(&m, 2, 4);
    m.p[4].grad = view(m.g[4], AMP_F32, 4);
    memcpy(other, m.g[4], sizeof other);
    m.g[4][3] = INFINITY;
    CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_UNSCALE));
    CHECK_OK(amp_grad_set_stats(set, &stats));
    CHECK(stats.found_inf == 1 && strcmp(stats.first_bad, names[4]) == 0 && stats.first_bad_element == 3);
    CHECK(m.g[4][0] == other[0] / 4);
    CHECK_OK(amp_scaler_update(s));
    amp_grad_set_destroy(set);
    amp_optimizer_destroy(first);
    amp_optimizer_destroy(second);
    amp_scaler_destroy(s);
    amp_close(amp);
}

typedef struct { int count, id; char text[256]; } heard;
static void hear(void *user, amp_log_level level, int id, const char *text) {
    heard *h = (heard *)user;
    if (level != AMP_LOG_WARNING) return;
    h->count++;
    h->id = id;
    snprintf(h->text, sizeof h->text, "%s", text);
}

/* A state loads where more or fewer parameters are frozen, with a warning that names them; the others go on bit for bit. */
TEST(states_load_where_other_parameters_are_frozen) {
    static model a, b;
    int way, kind, step, i;
    for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++) for (way = 0; way < 4; way++) {
        int frozen_then = way & 1 ? 1 : -1, frozen_now = way & 2 ? 3 : -1;
        heard h = {0, 0, ""};
        amp_context *amp = NULL;
        amp_desc c;
        amp_optimizer_desc d;
        amp_optimizer *x, *y;
        amp_state *state = NULL;
        memset(&c, 0, sizeof c);
        c.logger.write = hear;
        c.logger.user = &h;
        CHECK_OK(amp_open(&amp, &c));
        model_init(&a, AMP_F32, AMP_F32);
        model_init(&b, AMP_F32, AMP_F32);
        if (frozen_then >= 0) a.p[frozen_then].grad.data = NULL;
        if (frozen_now >= 0) b.p[frozen_now].grad.data = NULL;
        d = adamw(&a);
        set_kind(&d, kind);
        x = make(amp, &d);
        d.params = b.p;
        y = make(amp, &d);
        for (step = 0; step < 3; step++) {                            /* the other has states of its own, which go */
            model_backward(&a, step, 1);
            if (frozen_then >= 0) a.p[frozen_then].grad_live = 0;
            CHECK_OK(amp_step(x, NULL));
            model_backward(&b, step + 5, 1);
            if (frozen_now >= 0) b.p[frozen_now].grad_live = 0;
            CHECK_OK(amp_step(y, NULL));
        }
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_optimizer_save(x, state, "o"));
        CHECK_OK(amp_optimizer_load(y, state, "o"));
        CHECK_EQ(h.count, (frozen_then >= 0) + (frozen_now >= 0));
        CHECK(way == 0 || h.id == 1112);
        if (frozen_then >= 0) CHECK(strstr(h.text, names[frozen_then]) != NULL);
        if (way == 2) CHECK(strstr(h.text, names[frozen_now]) != NULL);
        memcpy(b.w, a.w, sizeof b.w);
        if (frozen_then >= 0) a.p[frozen_then].grad = view(a.g[frozen_then], AMP_F32, frozen_then);
        for (step = 9; step < 12; step++) {
            model_backward(&a, step, 1);
            model_backward(&b, step, 1);
            if (frozen_now >= 0) b.p[frozen_now].grad_live = 0;
            CHECK_OK(amp_step(x, NULL));
            CHECK_OK(amp_step(y, NULL));
            for (i = 0; i < TENSORS; i++) CHECK_MSG(i == frozen_now || memcmp(a.w[i], b.w[i], sizeof a.w[i]) == 0, "kind %d, way %d: %s", kind, way, names[i]);
        }
        a.p[2].name = "other";                                        /* not the same parameters: refused by name */
        CHECK_OK(amp_optimizer_save(x, state, "p"));
        amp_optimizer_destroy(x);
        d.params = a.p;
        x = make(amp, &d);
        CHECK_ERR(amp_optimizer_load(x, state, "o"), AMP_ERR_MISMATCH);
        CHECK(strstr(amp_last_error(), "other") != NULL && strstr(amp_last_error(), names[2]) != NULL);
        a.p[2].name = names[2];
        amp_optimizer_destroy(x);
        amp_optimizer_destroy(y);
        amp_state_destroy(state);
        amp_close(amp);
    }
}

/* As 0.2 wrote it. */
static amp_state *without_counts(const amp_state *from) {
    static uint8_t values[8 * ROOM];
    const char *key;
    amp_state *to = NULL;
    int64_t i, n;
    CHECK_OK(amp_state_create(&to, NULL));
    for (i = 0; (key = amp_state_key(from, i)) != NULL; i++) {
        amp_dtype dtype = AMP_DTYPE_DEFAULT;
        n = amp_state_count(from, key, &dtype);
        if (strcmp(key, "o.counts") == 0 || strcmp(key, "o.powers") == 0 || strcmp(key, "o.frozen") == 0) continue;
        CHECK_OK(amp_state_get(from, key, dtype, values, n));
        CHECK_OK(amp_state_put(to, key, dtype, values, n));
    }
    return to;
}

/* The counts of a state are checked; 0.2 has one for all, and loads the largest. */
TEST(counts_of_a_state) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_state *state = NULL, *old;
    int64_t counts[TENSORS], bad, i;
    double powers[2 * TENSORS], settings[3];
    int step;
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    o = make(amp, &d);
    for (step = 0; step < 4; step++) {
        model_backward(&m, step, 1);
        m.p[2].grad_live = step == 3;
        CHECK_OK(amp_step(o, NULL));
    }
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    CHECK_OK(amp_state_get(state, "o.counts", AMP_I64, counts, TENSORS));
    CHECK_OK(amp_state_get(state, "o.powers", AMP_F64, powers, 2 * TENSORS));
    CHECK_OK(amp_state_get(state, "o.settings", AMP_F64, settings, 3));
    for (i = 0; i < TENSORS; i++) CHECK_EQ(counts[i], i == 2 ? 1 : 4);
    CHECK(powers[4] == 0.9 && powers[5] == 0.999 && powers[0] == 0.9 * 0.9 * 0.9 * 0.9);
    CHECK(settings[0] == powers[0] && settings[1] == powers[1]);
    for (bad = 0; bad < 4; bad++) {
        int64_t wrong[TENSORS];
        double beyond[2 * TENSORS];
        memcpy(wrong, counts, sizeof wrong);
        memcpy(beyond, powers, sizeof beyond);
        if (bad < 2) wrong[3] = bad ? 5 : -1;
        else beyond[3] = bad == 2 ? 1.5 : NAN;
        CHECK_OK(amp_state_put(state, "o.counts", AMP_I64, wrong, TENSORS));
        CHECK_OK(amp_state_put(state, "o.powers", AMP_F64, beyond, 2 * TENSORS));
        CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_RANGE);
    }
    CHECK_OK(amp_state_put(state, "o.counts", AMP_I64, counts, TENSORS - 1));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_MISMATCH);
    CHECK_OK(amp_state_put(state, "o.frozen", AMP_U8, "junk", 4));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "o.frozen is no list") != NULL);
    old = without_counts(state);
    CHECK_OK(amp_optimizer_load(o, old, "o"));
    for (i = 0; i < TENSORS; i++) {
        const amp_k_steps *k = (const amp_k_steps *)o->set->rows[i].steps;
        CHECK(k->count == 4 && k->beta1_power == powers[0] && k->beta2_power == powers[1]);
    }
    amp_state_destroy(old);
    amp_state_destroy(state);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* ---- Outcomes */

TEST(outcomes_come_at_a_fixed_lag) {
    static model m;
    static const int lags[4] = {0, AMP_LAG_NONE, 5, 63};
    int l, step;
    for (l = 0; l < 4; l++) {
        amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
        amp_scaler *s = make_scaler(amp, 4, 0);
        amp_optimizer_desc d;
        amp_optimizer *o;
        amp_step_result out;
        int lag = lags[l] == AMP_LAG_NONE ? 0 : lags[l] == 0 ? 2 : lags[l], got = 0;
        model_init(&m, AMP_F32, AMP_F32);
        d = adamw(&m);
        d.result_lag = lags[l];
        o = make(amp, &d);
        CHECK_EQ(amp_step_result_next(o, &out), 0);
        for (step = 1; step <= 80; step++) {
            model_backward(&m, step, amp_scaler_scale(s));
            if (step % 8 == 0 || step > 60) m.g[1][0] = NAN;
            CHECK_OK(amp_optimizer_set_lr(o, 1e-3 * step));
            CHECK_OK(amp_step(o, s));
            while (amp_step_result_next(o, &out)) {
                got++;
                CHECK_EQ(out.step, got);
                CHECK_EQ(out.step, step - lag);
                CHECK_EQ(out.applied, !(got % 8 == 0 || got > 60));
                CHECK(out.lr == 1e-3 * got);
                CHECK_EQ(out.at_floor, got > 16 && out.applied == 0);     /* 4, 2, 1, and then it stays */
                CHECK(out.first_bad == NULL || strcmp(out.first_bad, "a.bias") == 0);
            }
        }
        CHECK_EQ(got, 80 - lag);
        CHECK_OK(amp_step_result_flush(o));
        while (amp_step_result_next(o, &out)) CHECK_EQ(out.step, ++got);
        CHECK_EQ(got, 80);
        CHECK(lag == 0 || (out.total_skips == 27 && out.consecutive_skips == 20 && out.applied_steps == 53));
        amp_optimizer_destroy(o);
        amp_scaler_destroy(s);
        amp_close(amp);
    }
}

TEST(an_overflow_at_the_floor_is_logged) {
    static model m;
    heard h;
    amp_context *amp = NULL;
    amp_desc c;
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_scaler *s;
    amp_step_result out;
    int step;
    memset(&h, 0, sizeof h);
    memset(&c, 0, sizeof c);
    c.logger.write = hear;
    c.logger.user = &h;
    CHECK_OK(amp_open(&amp, &c));
    h.count = 0;
    s = make_scaler(amp, 2, 0);
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    d.result_lag = AMP_LAG_NONE;
    o = make(amp, &d);
    for (step = 0; step < 2; step++) {
        model_backward(&m, step, 1);
        m.g[2][1] = NAN;
        CHECK_OK(amp_step(o, s));
        CHECK_EQ(amp_step_result_next(o, &out), 1);
        CHECK_EQ(h.count, step);
        CHECK_EQ(out.at_floor, step);
    }
    CHECK(h.id == 1101 && strstr(h.text, "b.weight") != NULL);
    amp_optimizer_destroy(o);
    amp_scaler_destroy(s);
    amp_close(amp);
}

TEST(the_last_64_outcomes_are_kept) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_step_result out;
    int step, got = 0;
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    o = make(amp, &d);
    for (step = 0; step < 150; step++) { model_backward(&m, step, 1); CHECK_OK(amp_step(o, NULL)); }
    CHECK_OK(amp_step_result_flush(o));
    while (amp_step_result_next(o, &out)) { CHECK_EQ(out.step, 87 + got); got++; }
    CHECK_EQ(got, 64);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* ---- Save and load */

/* Takes every outcome that is due, and checks that the other optimizer, if any, delivers the same. */
static int deliver(amp_optimizer *x, amp_optimizer *y) {
    amp_step_result p, q;
    int n = 0;
    for (; amp_step_result_next(x, &p); n++) {
        if (y == NULL) continue;
        CHECK_EQ(amp_step_result_next(y, &q), 1);
        CHECK_MSG(memcmp(&p, &q, sizeof p) == 0, "outcome %d, not %d", (int)q.step, (int)p.step);
    }
    if (y != NULL) CHECK_EQ(amp_step_result_next(y, &q), 0);
    return n;
}

/* A resumed run against one that was not interrupted, with the cut at any micro-batch and outcomes under way. */
TEST(resume_is_bit_identical) {
    static model a, b;
    int cut, variant;
    for (variant = 0; variant < 8; variant++) for (cut = 1; cut < 14; cut += 2) {
        amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2), *again = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2);
        amp_scaler *s = make_scaler(amp, 1024, 3), *t = make_scaler(again, 2, 9);
        amp_dtype weight = variant == 1 || variant > 3 ? AMP_BF16 : AMP_F32;
        amp_optimizer_desc d;
        amp_optimizer *x, *y;
        amp_state *state = NULL, *decoded = NULL;
        void *blob;
        size_t bytes;
        int call, i, k;
        model_init(&a, weight, AMP_F32);
        model_init(&b, weight, AMP_F32);
        d = adamw(&a);
        if (variant == 2) { d.kind = AMP_SGD; d.momentum = 0.9; d.dampening = 0.2; }
        if (variant == 3) d.kind = AMP_SGD;
        if (variant == 6) { d.kind = AMP_SGD; d.momentum = 0.9; }
        if (variant == 7) d.kind = AMP_LION;
        if (variant > 3) { d.master = variant == 5 ? AMP_MASTER_STOCHASTIC : AMP_MASTER_REMAINDER; d.seed = 7; }
        if (variant > 4) d.moments = AMP_BF16;
        d.accumulation = 3;
        d.clip_norm = 0.5;
        x = make(amp, &d);
        d.params = b.p;
        d.seed = 8;                                                   /* the load brings the seed */
        y = make(again, &d);
        for (call = 0; call < 30; call++) {
            static float fresh[TENSORS][ROOM];
            if (call == cut) {
                CHECK_OK(amp_optimizer_set_lr(x, 0.02));
                CHECK_OK(amp_state_create(&state, NULL));
                CHECK_OK(amp_optimizer_save(x, state, "opt"));
                CHECK_OK(amp_scaler_save(s, state, "scaler"));
                CHECK_OK(amp_state_encode(state, &blob, &bytes));
                CHECK_OK(amp_state_decode(&decoded, NULL, blob, bytes));
                memcpy(b.w, a.w, sizeof a.w);
                memcpy(b.w16, a.w16, sizeof a.w16);
                CHECK_OK(amp_optimizer_load(y, decoded, "opt"));
                CHECK_OK(amp_scaler_load(t, decoded, "scaler"));
                amp_file_free(NULL, blob, bytes);
                amp_state_destroy(state);
                amp_state_destroy(decoded);
            }
            for (i = 0; i < TENSORS; i++) ampt_uniform(fresh[i], count_of(i), 60, (uint32_t)(16 * call + i), 1, 0.1f);
            if (call % 11 == 5) fresh[1][2] = INFINITY;
            for (k = 0; k < 2; k++) {
                model *m = k ? &b : &a;
                float scale = amp_scaler_scale(k ? t : s);
                int64_t j;
                if (k && call < cut) continue;
                for (i = 0; i < TENSORS; i++) {
                    int add = amp_param_accumulate(&m->p[i]);
                    for (j = 0; j < count_of(i); j++) m->g[i][j] = (add ? m->g[i][j] : 0) + fresh[i][j] * scale;
                }
                CHECK_OK(amp_step(k ? y : x, k ? t : s));
            }
            deliver(x, call >= cut ? y : NULL);
            if (call < cut) continue;
            CHECK_MSG(memcmp(a.w, b.w, sizeof a.w) == 0 && memcmp(a.w16, b.w16, sizeof a.w16) == 0, "variant %d, cut %d, call %d", variant, cut, call);
        }
        CHECK_OK(amp_step_result_flush(x));
        CHECK_OK(amp_step_result_flush(y));
        CHECK_EQ(deliver(x, y), 2);
        amp_optimizer_destroy(x);
        amp_optimizer_destroy(y);
        amp_scaler_destroy(s);
        amp_scaler_destroy(t);
        amp_close(amp);
        amp_close(again);
    }
}

TEST(load_refuses_other_storage) {
    static model m;
    amp_context *o2 = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O2), *o3 = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O3);
    amp_optimizer_desc d;
    amp_optimizer *x, *y;
    amp_state *state = NULL;
    model_init(&m, AMP_BF16, AMP_F32);
    d = adamw(&m);
    x = make(o2, &d);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(x, state, "o"));
    amp_optimizer_destroy(x);
    y = make(o3, &d);
    CHECK_ERR(amp_optimizer_load(y, state, "o"), AMP_ERR_MISMATCH);   /* masters were saved, there are none here */
    CHECK(strstr(amp_last_error(), "master") != NULL);
    amp_optimizer_destroy(y);
    amp_state_destroy(state);
    amp_close(o2);
    amp_close(o3);
}

TEST(load_refuses_other_parameters_by_name) {
    static model m;
    static snapshot before, after;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d;
    amp_optimizer *o, *other;
    amp_state *state = NULL;
    amp_scaler *s;
    static const struct { int at; double value; } columns[] = {{0, -2}, {1, 1e16}, {8, NAN}, {10, 2147483648.0}};
    float one[33] = {0};
    int64_t steps[8];
    double reals[3], outcome[11];
    int i;
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    o = make(amp, &d);
    model_backward(&m, 0, 1);
    CHECK_OK(amp_step(o, NULL));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_NAME);
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    amp_optimizer_destroy(o);
    /* another kind, another name, another size, one parameter less */
    d.kind = AMP_SGD;
    other = make(amp, &d);
    CHECK_ERR(amp_optimizer_load(other, state, "o"), AMP_ERR_MISMATCH);
    amp_optimizer_destroy(other);
    d.kind = AMP_ADAMW;
    m.p[2].name = "b.other";
    other = make(amp, &d);
    CHECK_ERR(amp_optimizer_load(other, state, "o"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "b.other") && strstr(amp_last_error(), "b.weight"));
    amp_optimizer_destroy(other);
    m.p[2].name = names[2];
    m.p[1].weight.shape[0] = m.p[1].grad.shape[0] = 32;
    other = make(amp, &d);
    CHECK_ERR(amp_optimizer_load(other, state, "o"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "a.bias") && strstr(amp_last_error(), "33"));
    amp_optimizer_destroy(other);
    m.p[1].weight.shape[0] = m.p[1].grad.shape[0] = 33;
    d.n_params = 4;
    other = make(amp, &d);
    CHECK_ERR(amp_optimizer_load(other, state, "o"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "c.weight"));
    amp_optimizer_destroy(other);
    d.n_params = 5;
    /* damaged records change nothing at all */
    o = make(amp, &d);
    take(&before, &m, o);
    CHECK_OK(amp_state_put(state, "o.v.1", AMP_F32, one, 32));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "a.bias") != NULL);
    CHECK_OK(amp_state_put(state, "o.v.1", AMP_F32, one, 33));
    CHECK_OK(amp_state_get(state, "o.step", AMP_I64, steps, 8));
    steps[5] = 7;
    CHECK_OK(amp_state_put(state, "o.step", AMP_I64, steps, 8));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_RANGE);
    steps[5] = -1;
    CHECK_OK(amp_state_put(state, "o.step", AMP_I64, steps, 8));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_RANGE);
    steps[5] = 1;
    for (i = 2; i < 8; i++) {                                     /* counters that no step could be added to */
        int64_t kept[8];
        memcpy(kept, steps, sizeof kept);
        steps[i] = steps[2] = INT64_MAX;
        steps[6] = steps[2] - steps[5];
        CHECK_OK(amp_state_put(state, "o.step", AMP_I64, steps, 8));
        CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_RANGE);
        memcpy(steps, kept, sizeof kept);
    }
    take(&after, &m, o);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK_OK(amp_state_put(state, "o.step", AMP_I64, steps, 8));
    s = make_scaler(amp, 4, 0);
    model_backward(&m, 0, 4);
    CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(o), AMP_CHECK_READ));
    CHECK_OK(amp_optimizer_load(o, state, "o"));
    CHECK_EQ(o->set->found->step, 1);
    CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(o), AMP_CHECK_READ));      /* a load makes the set ready */
    amp_scaler_destroy(s);
    steps[1] = 1;                                                     /* in the middle of a cycle, where there are no cycles */
    CHECK_OK(amp_state_put(state, "o.step", AMP_I64, steps, 8));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_MISMATCH);
    steps[1] = 0;
    CHECK_OK(amp_state_put(state, "o.step", AMP_I64, steps, 8));
    CHECK_OK(amp_state_get(state, "o.settings", AMP_F64, reals, 3));
    reals[2] = NAN;
    CHECK_OK(amp_state_put(state, "o.settings", AMP_F64, reals, 3));
    CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_RANGE);
    reals[2] = 0.001;
    CHECK_OK(amp_state_put(state, "o.settings", AMP_F64, reals, 3));
    CHECK_EQ(amp_state_count(state, "o.outcomes", NULL), 11);
    CHECK_OK(amp_state_get(state, "o.outcomes", AMP_F64, outcome, 11));
    for (i = 0; i < (int)(sizeof columns / sizeof *columns); i++) {
        double kept = outcome[columns[i].at];
        outcome[columns[i].at] = columns[i].value;
        CHECK_OK(amp_state_put(state, "o.outcomes", AMP_F64, outcome, 11));
        CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_RANGE);
        outcome[columns[i].at] = kept;
    }
    CHECK_OK(amp_state_put(state, "o.outcomes", AMP_F64, outcome, 11));
    for (i = 2; i < 8; i++) {
        int64_t kept = steps[i];
        steps[i] = i == 6 ? 1 : 9;              /* more than there were steps */
        CHECK_OK(amp_state_put(state, "o.step", AMP_I64, steps, 8));
        CHECK_MSG(amp_optimizer_load(o, state, "o") == AMP_ERR_RANGE || i == 2 || i == 7, "step record, number %d", i);
        steps[i] = kept;
    }
    CHECK_OK(amp_state_put(state, "o.step", AMP_I64, steps, 8));
    CHECK_OK(amp_optimizer_load(o, state, "o"));
    CHECK_ERR(amp_optimizer_save(o, state, "a-prefix-that-is-longer-than-forty-bytes-is"), AMP_ERR_RANGE);
    CHECK_ERR(amp_optimizer_load(o, NULL, "o"), AMP_ERR_NULL);
    amp_optimizer_destroy(o);
    amp_state_destroy(state);
    amp_close(amp);
}

/* ---- Settings, memory, ranks */

/* What a kind does not read is refused by name, unless it is the default, so that effective settings make the same again. */
TEST(what_is_not_read_is_refused) {
    static const struct { amp_optimizer_kind kind; size_t at; double value; const char *field; } cases_of[] = {
        {AMP_ADAMW, offsetof(amp_optimizer_desc, momentum), 0.9, ".momentum"}, {AMP_ADAMW, offsetof(amp_optimizer_desc, dampening), 0.1, ".dampening"},
        {AMP_SGD, offsetof(amp_optimizer_desc, beta1), 0.8, ".beta1"}, {AMP_SGD, offsetof(amp_optimizer_desc, beta2), 0.99, ".beta2"},
        {AMP_SGD, offsetof(amp_optimizer_desc, eps), 1e-6, ".eps"}, {AMP_SGD, offsetof(amp_optimizer_desc, eps), (double)AMP_EXPLICIT_ZERO, ".eps"},
        {AMP_LION, offsetof(amp_optimizer_desc, eps), 1e-8, ".eps"}, {AMP_LION, offsetof(amp_optimizer_desc, momentum), 0.9, ".momentum"},
        {AMP_LION, offsetof(amp_optimizer_desc, dampening), 0.1, ".dampening"}};
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc d, again;
    amp_optimizer *o = NULL;
    size_t i;
    int kind;
    model_init(&m, AMP_F32, AMP_F32);
    for (i = 0; i < sizeof cases_of / sizeof *cases_of; i++) {
        d = adamw(&m);
        d.kind = cases_of[i].kind;
        memcpy((char *)&d + cases_of[i].at, &cases_of[i].value, sizeof(double));
        CHECK_ERR(amp_optimizer_create(amp, &o, &d), AMP_ERR_CONFLICT);
        CHECK_MSG(o == NULL && strstr(amp_last_error(), cases_of[i].field) != NULL, "case %d: %s", (int)i, amp_last_error());
    }
    for (kind = AMP_ADAMW; kind < AMPI_OPTIMIZERS; kind++) {
        memset(&d, 0, sizeof d);
        d.params = m.p; d.n_params = TENSORS; d.kind = (amp_optimizer_kind)kind;
        o = make(amp, &d);
        CHECK_OK(amp_optimizer_query(o, &d));
        amp_optimizer_destroy(o);
        o = make(amp, &d);
        CHECK_OK(amp_optimizer_query(o, &again));
        CHECK(d.lr == again.lr && d.beta1 == again.beta1 && d.beta2 == again.beta2 && d.eps == again.eps && d.lr > 0);
        amp_optimizer_destroy(o);
    }
    amp_close(amp);
}

TEST(optimizer_settings_are_checked) {
    static model m;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_optimizer_desc good, d;
    amp_optimizer *o = NULL;
    amp_param_group group;
    model_init(&m, AMP_F32, AMP_F32);
    good = adamw(&m);
    memset(&group, 0, sizeof group);
#define REFUSED(field, value, error) do { d = good; d.field = value; CHECK_ERR(amp_optimizer_create(amp, &o, &d), error); CHECK(o == NULL); } while (0)
    REFUSED(kind, (amp_optimizer_kind)AMPI_OPTIMIZERS, AMP_ERR_RANGE);
    REFUSED(lr, -2.0, AMP_ERR_RANGE);
    REFUSED(lr, NAN, AMP_ERR_RANGE);
    REFUSED(lr, INFINITY, AMP_ERR_RANGE);
    REFUSED(beta1, 1.0, AMP_ERR_RANGE);
    REFUSED(beta2, 1.5, AMP_ERR_RANGE);
    REFUSED(eps, -0.5, AMP_ERR_RANGE);
    REFUSED(eps, 1e-46, AMP_ERR_RANGE);                               /* 0 in fp32 */
    REFUSED(lr, 1e31, AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "from 0 to 1e30") != NULL);
    REFUSED(weight_decay, -0.5, AMP_ERR_RANGE);
    REFUSED(momentum, 1.0, AMP_ERR_RANGE);
    REFUSED(dampening, -1.0, AMP_ERR_RANGE);
    REFUSED(clip_norm, -1.0, AMP_ERR_RANGE);
    REFUSED(accumulation, -1, AMP_ERR_RANGE);
    REFUSED(result_lag, 64, AMP_ERR_RANGE);
    REFUSED(result_lag, -2, AMP_ERR_RANGE);
    REFUSED(nesterov, 1, AMP_ERR_CONFLICT);
    REFUSED(n_params, -1, AMP_ERR_RANGE);
    REFUSED(params, NULL, AMP_ERR_NULL);
    REFUSED(n_groups, 1, AMP_ERR_NULL);
    d = good; d.groups = &group; d.n_groups = 1;
    CHECK_ERR(amp_optimizer_create(amp, &o, &d), AMP_ERR_NULL);
    group.match = "*"; group.lr_scale = -0.5;
    CHECK_ERR(amp_optimizer_create(amp, &o, &d), AMP_ERR_RANGE);
#undef REFUSED
    CHECK_ERR(amp_optimizer_create(amp, &o, NULL), AMP_ERR_NULL);
    m.p[4].name = m.p[0].name;
    CHECK_ERR(amp_optimizer_create(amp, &o, &good), AMP_ERR_NAME);
    m.p[4].name = NULL;
    CHECK_ERR(amp_optimizer_create(amp, &o, &good), AMP_ERR_NULL);
    m.p[4].name = names[4];
    m.p[4].weight.dtype = m.p[4].grad.dtype = AMP_F64;
    CHECK_ERR(amp_optimizer_create(amp, &o, &good), AMP_ERR_DTYPE);
    m.p[4].weight.dtype = m.p[4].grad.dtype = AMP_F32;
    d = good;
    d.lr = d.beta1 = d.eps = (double)AMP_EXPLICIT_ZERO;
    CHECK_OK(amp_optimizer_create(amp, &o, &d));
    CHECK_OK(amp_optimizer_query(o, &d));
    CHECK(d.lr == 0 && d.beta1 == 0 && d.beta2 == 0.999 && d.eps == 0 && d.accumulation == 1 && d.result_lag == 2 && d.kind == AMP_ADAMW);
    CHECK_ERR(amp_optimizer_set_lr(o, -1), AMP_ERR_RANGE);
    CHECK_ERR(amp_optimizer_set_lr(o, NAN), AMP_ERR_RANGE);
    CHECK_OK(amp_optimizer_set_lr(o, 0));
    model_backward(&m, 0, 1);
    {
        float before[TENSORS][ROOM];
        memcpy(before, m.w, sizeof before);
        CHECK_OK(amp_step(o, NULL));                                  /* 0 is a learning rate: nothing moves */
        CHECK(memcmp(before, m.w, sizeof before) == 0);
    }
    CHECK_ERR(amp_step(NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_optimizer_step(NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_optimizer_rebuild_masters(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_step_result_flush(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_optimizer_query(o, NULL), AMP_ERR_NULL);
    CHECK(amp_optimizer_grad_set(NULL) == NULL);
    amp_optimizer_destroy(o);
    amp_optimizer_destroy(NULL);
    amp_close(amp);
}

/* Up to the highest rate that is taken, the numbers that kernels compute from it are finite; beyond, create, set_lr and load
   refuse it. */
static int numbers_are_finite(amp_optimizer *o) {
    amp_k_adamw adamw_args;
    amp_k_sgd sgd_args;
    amp_k_lion lion_args;
    amp_k_grad_stats f = *o->set->found;
    int finite = 1;
    memset(&adamw_args, 0, sizeof adamw_args); memset(&sgd_args, 0, sizeof sgd_args); memset(&lion_args, 0, sizeof lion_args);
    amp_k_steps first = {1, o->desc.beta1, o->desc.beta2};
    f.lr = o->desc.lr; f.step = 1; f.multiplier = 1;
    adamw_args.found = sgd_args.found = lion_args.found = &f;
    adamw_args.beta1 = o->desc.beta1; adamw_args.beta2 = o->desc.beta2; adamw_args.eps = o->desc.eps;
    sgd_args.momentum = o->desc.momentum; sgd_args.dampening = o->desc.dampening;
    lion_args.beta1 = o->desc.beta1; lion_args.beta2 = o->desc.beta2;
    for (int64_t i = 0; i < o->set->n; i++) {
        amp_k_tensor row = o->set->table[i];
        row.steps = &first;
        ampi_adamw_step a = ampi_adamw_row(&adamw_args, &row);
        ampi_sgd_step b = ampi_sgd_row(&sgd_args, &row);
        ampi_lion_step c = ampi_lion_row(&lion_args, &row);
        if (o->desc.kind == AMP_ADAMW) finite &= isfinite(a.keep) && isfinite(a.rate) && isfinite(a.correction) && (a.eps > 0);
        if (o->desc.kind == AMP_SGD) finite &= isfinite(b.decay) && isfinite(b.rate) && isfinite(b.rest);
        if (o->desc.kind == AMP_LION) finite &= isfinite(c.keep) && isfinite(c.rate);
    }
    return finite;
}
TEST(rates_fit_in_fp32) {
    static const struct { amp_optimizer_kind kind; double beta1, decay, scale, group_decay, most; } rows[] = {
        {AMP_ADAMW, 0, 0, 1, 0, 1e30}, {AMP_SGD, 0, 1e30, 1, 1e30, 1e30}, {AMP_LION, 0, 0, 1, 0, 1e30},
        {AMP_ADAMW, 0, 0, 1e20, 0, 3.41e17}, {AMP_SGD, 0, 0, 1e20, 0, 3.41e18}, {AMP_LION, 0, 0, 1e30, 0, 3.41e8},
        {AMP_ADAMW, AMPI_BELOW_1, 0, 1, 0, 3.8e22}, {AMP_ADAMW, 0, 1e20, 1, 0, 3.41e18}, {AMP_LION, 0, 0, 1e5, 1e10, 3.41e23}};
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    static model m;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_optimizer *o = NULL, *other = NULL;
        amp_optimizer_desc d;
        amp_param_group group;
        amp_state *state = NULL;
        double most;
        model_init(&m, AMP_F32, AMP_F32);
        memset(&group, 0, sizeof group);
        d = adamw(&m);
        d.kind = rows[i].kind; d.beta1 = rows[i].beta1; d.beta2 = d.eps = 0; d.weight_decay = rows[i].decay;
        group.match = "*"; group.lr_scale = rows[i].scale; group.weight_decay = rows[i].group_decay;
        d.groups = &group; d.n_groups = 1;
        d.lr = 0.1;
        CHECK_OK(amp_optimizer_create(amp, &o, &d));
        most = ampi_lr_most(&o->desc);
        CHECK(most <= rows[i].most && most > 0.98 * rows[i].most);
        CHECK_OK(amp_optimizer_set_lr(o, most));
        CHECK(numbers_are_finite(o));
        CHECK_ERR(amp_optimizer_set_lr(o, most * 1.001), AMP_ERR_RANGE);
        CHECK(strstr(amp_last_error(), "amp_optimizer_set_lr: lr = ") != NULL && o->desc.lr == most);
        CHECK_ERR(amp_optimizer_set_lr(o, 1e39), AMP_ERR_RANGE);
        CHECK_ERR(amp_optimizer_set_lr(o, INFINITY), AMP_ERR_RANGE);
        CHECK_OK(amp_state_create(&state, NULL));
        o->desc.lr = most * 1.001;
        CHECK_OK(amp_optimizer_save(o, state, "o"));
        CHECK_ERR(amp_optimizer_load(o, state, "o"), AMP_ERR_RANGE);
        o->desc.lr = most;
        CHECK_OK(amp_optimizer_save(o, state, "o"));
        CHECK_OK(amp_optimizer_load(o, state, "o"));
        amp_state_destroy(state);
        amp_optimizer_destroy(o);
        d.lr = most * 1.001;
        CHECK_ERR(amp_optimizer_create(amp, &other, &d), AMP_ERR_RANGE);
        CHECK(strstr(amp_last_error(), ".lr = ") != NULL);
    }
    amp_close(amp);
}

/* An allocator whose k-th request fails. */
typedef struct { int64_t left, live; } meter;
static void *meter_alloc(void *user, size_t size, size_t align) {
    meter *m = (meter *)user;
    void *p = NULL;
    if (m->left-- == 0) return NULL;
    if (posix_memalign(&p, align < 8 ? 8 : align, size) != 0) return NULL;
    m->live++;
    return p;
}
static void meter_free(void *user, void *p, size_t size) { (void)size; ((meter *)user)->live--; free(p); }

TEST(every_failing_allocation_is_survived) {
    static model m;
    amp_context *amp = NULL;
    amp_desc c;
    meter heap = {1000000, 0};
    amp_param_group group;
    int64_t k, base;
    int done = 0;
    memset(&c, 0, sizeof c);
    memset(&group, 0, sizeof group);
    c.system.alloc = meter_alloc;
    c.system.free = meter_free;
    c.system.user = &heap;
    c.level = AMP_LEVEL_O2;
    CHECK_OK(amp_open(&amp, &c));
    model_init(&m, AMP_BF16, AMP_F32);
    base = heap.live;
    for (k = 0; k < 400 && !done; k++) {
        amp_optimizer *o = NULL;
        amp_scaler *s = NULL;
        amp_optimizer_desc d = adamw(&m);
        amp_state *state = NULL;
        amp_result r;
        group.match = "*bias";
        d.groups = &group;
        d.n_groups = 1;
        heap.left = k;
        r = amp_optimizer_create(amp, &o, &d);
        if (r == AMP_OK) r = amp_scaler_create(amp, &s, NULL);
        if (r == AMP_OK) { model_backward(&m, 0, 1); r = amp_step(o, s); }
        heap.left = 1000000;
        if (r == AMP_OK) {
            CHECK_OK(amp_state_create(&state, &c.system));
            heap.left = k / 4;
            r = amp_optimizer_save(o, state, "o");
            if (r == AMP_OK) r = amp_optimizer_load(o, state, "o");
            heap.left = 1000000;
            amp_state_destroy(state);
            done = r == AMP_OK;
        }
        CHECK(r == AMP_OK || r == AMP_ERR_MEMORY);
        amp_optimizer_destroy(o);
        amp_scaler_destroy(s);
        CHECK_EQ(heap.live, base + 1 * (heap.live > base));           /* the context may keep one grown table */
        base = heap.live;
    }
    CHECK(done && k > 60);
    amp_close(amp);
    CHECK_EQ(heap.live, 0);
}

/* amp_model_freeze makes the states that an optimizer lacks.  If memory fails all stays frozen and as it was, and it can
   be called again. */
TEST(unfreezing_makes_states_or_changes_nothing) {
    int64_t k, base, n;
    int done = 0, i, frozen, step;
    for (k = 0; k < 200 && !done; k++) {
        amp_context *amp = NULL;
        amp_desc c;
        meter heap = {1000000, 0};
        amp_model *m;
        amp_param *p;
        amp_optimizer_desc d;
        amp_optimizer *o;
        amp_scaler *s;
        amp_result r;
        float before[2][12], held[2][12];
        memset(&c, 0, sizeof c);
        memset(&d, 0, sizeof d);
        c.system.alloc = meter_alloc;
        c.system.free = meter_free;
        c.system.user = &heap;
        c.level = AMP_LEVEL_O2;
        c.dtype = AMP_BF16;
        CHECK_OK(amp_open(&amp, &c));
        s = make_scaler(amp, 1, 100);
        CHECK_OK(amp_model_create(amp, &m, 1, 8));
        for (i = 0; i < 4; i++) (void)amp_model_param(m, i % 2 ? i == 1 ? "back.1" : "back.3" : i ? "head.2" : "head.0", 3, 4, AMP_INIT_NORMAL, 1);
        CHECK_OK(amp_model_params(m, &p, &n));
        CHECK_OK(amp_model_freeze(m, "back.*", 1));
        d.params = p;
        d.n_params = n;
        d.sync_every = 3;
        o = make(amp, &d);
        for (step = 0; step < 2; step++) {
            for (i = 0; i < 4; i += 2) { (void)amp_param_accumulate(&p[i]); ampt_uniform((float *)p[i].grad.data, 12, 80, (uint32_t)(step * 4 + i), 1, 0.1f); }
            CHECK_OK(amp_step(o, s));
        }
        CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(o), AMP_CHECK_READ));
        CHECK_ERR(amp_model_freeze(m, "back.*", 0), AMP_ERR_STATE);
        CHECK(p[1].grad.data == NULL && o->set->n == 2);
        CHECK_OK(amp_scaler_update(s));
        for (i = 0; i < 2; i++) memcpy(before[i], p[2 * i].master, sizeof before[i]);
        base = heap.live;
        heap.left = k;
        r = amp_model_freeze(m, "back.*", 0);
        heap.left = 1000000;
        done = r == AMP_OK;
        frozen = !done;
        if (frozen) {
            CHECK_ERR(r, AMP_ERR_MEMORY);
            CHECK_EQ(heap.live, base);
            CHECK(p[1].grad.data == NULL && p[3].grad.data == NULL && p[1].master == NULL && o->set->n == 2);
            CHECK_OK(amp_model_freeze(m, "back.*", 0));
        }
        CHECK(o->set->n == 4 && p[1].grad.data != NULL && p[3].grad.data != NULL && p[1].master != NULL);
        for (i = 0; i < 2; i++) CHECK(memcmp(before[i], p[2 * i].master, sizeof before[i]) == 0);
        for (i = 0; i < 12; i++) CHECK(((float *)p[1].master)[i] == amp_f32_from_bf16(((uint16_t *)p[1].weight.data)[i]));
        for (i = 0; i < 2; i++) memcpy(held[i], p[2 * i + 1].master, sizeof held[i]);
        for (step = 2; step < 4; step++) {
            for (i = 0; i < 4; i++) { (void)amp_param_accumulate(&p[i]); ampt_uniform((float *)p[i].grad.data, 12, 80, (uint32_t)(step * 4 + i), 1, 0.1f); }
            CHECK_OK(amp_step(o, s));
        }
        for (i = 0; i < 2; i++) CHECK(memcmp(held[i], p[2 * i + 1].master, sizeof held[i]) != 0);
        CHECK_OK(amp_model_freeze(m, "back.1", 1));               /* frozen again it stays, states and all */
        memcpy(held[0], p[1].master, sizeof held[0]);
        for (i = 0; i < 4; i++) if (i != 1) (void)amp_param_accumulate(&p[i]);
        CHECK_OK(amp_step(o, s));
        CHECK(memcmp(held[0], p[1].master, sizeof held[0]) == 0 && o->set->n == 4);
        amp_optimizer_destroy(o);
        amp_scaler_destroy(s);
        amp_model_destroy(m);
        amp_close(amp);
        CHECK_EQ(heap.live, 0);
    }
    CHECK(done && k > 8);
}

/* Two ranks with the same gradients, one of which has none for one parameter: the hook doubles what it is given. */
static int twice(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    int64_t i;
    (void)stream;
    ++*(int *)user;
    if (op == AMP_REDUCE_SUM && dtype == AMP_F32) for (i = 0; i < count; i++) ((float *)data)[i] *= 2;
    return 0;
}

TEST(ranks_average_and_take_part_without_a_gradient) {
    static model a, b;
    amp_context *alone = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT), *two = NULL;
    amp_optimizer_desc d;
    amp_optimizer *x, *y;
    amp_desc c;
    int calls = 0, step, k;
    memset(&c, 0, sizeof c);
    c.reducer.reduce = twice;
    c.reducer.user = &calls;
    c.reducer.calls = &alike;
    c.reducer.world = 2;
    CHECK_OK(amp_open(&two, &c));
    model_init(&a, AMP_F32, AMP_F32);
    model_init(&b, AMP_F32, AMP_F32);
    d = adamw(&a);
    d.accumulation = 2;
    x = make(alone, &d);
    d.params = b.p;
    y = make(two, &d);
    for (step = 0; step < 5; step++) {
        model_backward(&a, step, 1);
        model_backward(&b, step, 1);
        for (k = 0; k < count_of(1); k++) a.g[1][k] = 0;              /* zeros here, no gradient there */
        b.p[1].grad_live = 0;
        calls = 0;
        CHECK_OK(amp_step(x, NULL));
        CHECK_OK(amp_step(y, NULL));
        CHECK_EQ(calls, 0);                                           /* once per cycle */
        CHECK_OK(amp_step(x, NULL));
        CHECK_OK(amp_step(y, NULL));
        CHECK_EQ(calls, 2);                                           /* one bucket, and the flags */
        CHECK(memcmp(a.w, b.w, sizeof a.w) == 0);
    }
    amp_optimizer_destroy(x);
    amp_optimizer_destroy(y);
    amp_close(alone);
    amp_close(two);
}

/* ---- States and ranks */

static amp_context *rank_context(int rank, int world, int *calls) {
    amp_context *amp = NULL;
    amp_desc c;
    memset(&c, 0, sizeof c);
    if (world > 1) c.reducer.reduce = twice;
    if (world > 1) c.reducer.calls = &alike;
    c.reducer.user = calls;
    c.reducer.rank = rank;
    c.reducer.world = world;
    c.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&amp, &c));
    return amp;
}

/* The state as 0.1.0 wrote it. */
static amp_state *without_the_cycle(const amp_state *state) {
    static uint8_t values[8 * ROOM];
    amp_state *old = NULL;
    const char *key;
    int64_t i;
    CHECK_OK(amp_state_create(&old, NULL));
    for (i = 0; (key = amp_state_key(state, i)) != NULL; i++) {
        amp_dtype dtype = AMP_DTYPE_DEFAULT;
        int64_t n = amp_state_count(state, key, &dtype);
        if (strcmp(key, "o.cycle") == 0 || strcmp(key, "o.live") == 0) continue;
        CHECK_OK(amp_state_get(state, key, dtype, values, n));
        CHECK_OK(amp_state_put(old, key, dtype, values, n));
    }
    return old;
}

/* Loads into an optimizer of that rank; "": it must be taken, else refused with these words. */
static void load_into(const amp_state *state, int rank, int world, int accumulation, int sharded, const char *words) {
    static model m;
    int calls = 0;
    amp_context *amp = rank_context(rank, world, &calls);
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_result r;
    model_init(&m, AMP_F32, AMP_F32);
    d = adamw(&m);
    d.accumulation = accumulation;
    d.sharded = sharded;
    o = make(amp, &d);
    r = amp_optimizer_load(o, state, "o");
    CHECK_MSG(r == (*words ? AMP_ERR_MISMATCH : AMP_OK) && (!*words || strstr(amp_last_error(), words) != NULL),
              "rank %d of %d: %d %s", rank, world, (int)r, r ? amp_last_error() : "");
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* Gradients in the middle of a cycle are one rank's sums: they fit no other rank, world or cycle.  Between two steps the
   state is the same on all ranks, and fits each, unless what they hold is sharded. */
TEST(states_in_a_cycle_are_of_their_rank) {
    static model m;
    int calls = 0, way;
    for (way = 0; way < 2; way++) {             /* amp_step counts the micro-batches, or the host does */
        amp_context *amp = rank_context(0, 2, &calls);
        amp_state *state = NULL, *old;
        amp_optimizer_desc d;
        amp_optimizer *o;
        model_init(&m, AMP_F32, AMP_F32);
        d = adamw(&m);
        d.accumulation = 4;
        o = make(amp, &d);
        CHECK_OK(amp_state_create(&state, NULL));
        model_backward(&m, 0, 1);
        if (way == 0) CHECK_OK(amp_step(o, NULL));
        CHECK_OK(amp_optimizer_save(o, state, "o"));
        load_into(state, 0, 2, 4, 0, "");
        load_into(state, 1, 2, 4, 0, "rank 0 of 2");
        load_into(state, 0, 4, 4, 0, "rank 0 of 2");
        load_into(state, 0, 1, 4, 0, "rank 0 of 2");
        load_into(state, 0, 2, 5, 0, way == 0 ? ".accumulation" : "");
        old = without_the_cycle(state);
        if (way == 0) load_into(old, 0, 2, 4, 0, "by a rank that the state does not name");
        load_into(old, 0, 1, 4, 0, "");
        amp_state_destroy(old);
        CHECK_OK(amp_optimizer_step(o, NULL));
        CHECK_OK(amp_optimizer_save(o, state, "o"));                  /* over the gradients of before, which no longer count */
        load_into(state, 0, 2, 4, 0, "");
        load_into(state, 1, 2, 4, 0, "");
        load_into(state, 3, 4, 2, 0, "");
        load_into(state, 0, 1, 1, 0, "");
        load_into(state, 0, 2, 4, 1, ".sharded");
        old = without_the_cycle(state);
        load_into(old, 1, 2, 4, 0, "");
        amp_state_destroy(old);
        amp_optimizer_destroy(o);
        d.sharded = 1;
        o = make(amp, &d);
        CHECK_OK(amp_optimizer_save(o, state, "o"));
        load_into(state, 0, 2, 4, 1, "");
        load_into(state, 1, 2, 4, 1, "rank 0 of 2");
        load_into(state, 0, 4, 4, 1, "rank 0 of 2");
        amp_state_destroy(state);
        amp_optimizer_destroy(o);
        amp_close(amp);
    }
}

/* Which gradients are in a cycle is the state's to say, whatever an earlier save left in it; and what a check may have
   multiplied and summed over ranks is not saved to be checked again. */
TEST(gradients_of_a_state) {
    static model m, n;
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = make_scaler(amp, 64, 0);
    amp_state *state = NULL;
    amp_optimizer_desc d;
    amp_optimizer *o, *p;
    int i;
    model_init(&m, AMP_F32, AMP_F32);
    model_init(&n, AMP_F32, AMP_F32);
    d = adamw(&m);
    d.accumulation = 3;
    o = make(amp, &d);
    d.params = n.p;
    p = make(amp, &d);
    CHECK_OK(amp_state_create(&state, NULL));
    model_backward(&m, 0, 1);
    CHECK_OK(amp_optimizer_save(o, state, "o"));                      /* before the first amp_step */
    CHECK_OK(amp_optimizer_load(p, state, "o"));
    for (i = 0; i < TENSORS; i++) CHECK(n.p[i].grad_live == 1 && memcmp(n.g[i], m.g[i], (size_t)count_of(i) * 4) == 0);
    CHECK_OK(amp_optimizer_step(o, NULL));
    CHECK_OK(amp_step(o, NULL));
    m.p[1].grad_live = 1;
    CHECK_OK(amp_optimizer_save(o, state, "o"));                      /* one of them, over all */
    CHECK_OK(amp_optimizer_load(p, state, "o"));
    for (i = 0; i < TENSORS; i++) CHECK_EQ(n.p[i].grad_live, i == 1);
    m.p[1].grad_live = 0;
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    CHECK_OK(amp_optimizer_load(p, state, "o"));
    for (i = 0; i < TENSORS; i++) CHECK_EQ(n.p[i].grad_live, 0);
    CHECK_OK(amp_step(o, NULL));
    model_backward(&m, 1, 1);
    CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(o), AMP_CHECK_UNSCALE));
    CHECK_ERR(amp_optimizer_save(o, state, "o"), AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "amp_optimizer_save") != NULL);
    CHECK_OK(amp_step(o, s));
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    amp_state_destroy(state);
    amp_optimizer_destroy(o);
    amp_optimizer_destroy(p);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* The next random number is the same on all ranks, but not where each has a seed of its own. */
TEST(random_numbers_of_another_rank) {
    static const struct { uint64_t saved, own; int rank; amp_result result; } seeds[] = {
        {7, 7, 1, AMP_OK}, {7, 0, 1, AMP_OK}, {7, 8, 0, AMP_OK}, {7, 8, 1, AMP_ERR_MISMATCH}};
    int i, k, calls = 0;
    for (i = 0; i < 4; i++) {
        amp_context *amp[2];
        amp_state *state = NULL;
        for (k = 0; k < 2; k++) {
            amp_desc c;
            memset(&c, 0, sizeof c);
            c.reducer.reduce = twice; c.reducer.user = &calls; c.reducer.world = 2;
            c.reducer.rank = k ? seeds[i].rank : 0;
            c.seed = k ? seeds[i].own : seeds[i].saved;
            CHECK_OK(amp_open(&amp[k], &c));
        }
        amp[0]->random_offset = 40;
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_random_save(amp[0], state, "r"));
        CHECK_ERR(amp_random_load(amp[1], state, "r"), seeds[i].result);
        if (seeds[i].result == AMP_OK) CHECK(amp[1]->desc.seed == 7 && amp[1]->random_offset == 40);
        else CHECK(amp[1]->desc.seed == 8 && amp[1]->random_offset == 0 && strstr(amp_last_error(), "rank 0 of 2 with seed 7") != NULL);
        amp_state_destroy(state);
        amp_close(amp[0]);
        amp_close(amp[1]);
    }
}

/* A program linked with -Ofast starts with subnormals flushed to zero, which would change masters that are some. */
static void keep_subnormals(void) {
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() & ~0x8040u);
#endif
}

int main(int argc, char **argv) {
    int i;
    for (i = 1; i < argc; i++) if (strcmp(argv[i], "--full") == 0) every_pattern = 1;
    TEST_BEGIN(argc, argv);
    keep_subnormals();
    RUN(hundred_steps_are_as_close_as_torchs);
    RUN(scale_does_not_change_the_weights);
    RUN(lion_at_special_values);
    RUN(sixteen_bit_gradients_and_masters);
    RUN(level_o3_updates_sixteen_bit_weights);
    RUN(refresh_makes_masters_from_weights);
    RUN(weights_are_set_from_fp32);
    RUN(masters_begin_as_fp32);
    RUN(remainders_are_fp32_masters_bit_for_bit);
    RUN(remainders_of_every_pattern);
    RUN(stochastic_rounding_is_unbiased_where_nearest_stalls);
    RUN(stochastic_rounding_takes_the_words_it_says);
    RUN(stochastic_rounding_of_special_weights);
    RUN(bf16_moments_follow_fp32_ones);
    RUN(eight_bit_maps_codes_and_scales_are_those_of_bitsandbytes);
    RUN(a_block_with_a_number_that_is_not_finite_becomes_nan);
    RUN(eight_bit_steps_are_as_close_as_those_of_bitsandbytes);
    RUN(eight_bit_steps_are_fp32_steps_rounded);
    RUN(eight_bit_moments_keep_small_gradients_bounded);
    RUN(eight_bit_states_load_and_convert);
    RUN(eight_bit_states_that_do_not_fit_are_refused_whole);
    RUN(small_parameters_and_embeddings_keep_fp32_moments);
    RUN(masters_and_remainders_load_into_each_other);
    RUN(moments_load_where_that_is_exact);
    RUN(a_state_without_a_seed_loads);
    RUN(refresh_clears_remainders);
    RUN(bytes_per_parameter);
    RUN(storage_that_cannot_be_is_refused);
    RUN(a_skip_leaves_everything_bit_for_bit);
    RUN(a_skip_leaves_no_trace);
    RUN(apply_nonfinite_steps_without_a_scaler_only);
    RUN(only_the_offender_skips);
    RUN(accumulation_is_one_big_batch);
    RUN(clip_each_clips_the_running_sum);
    RUN(groups_by_name); RUN(groups_that_match_nothing);
    RUN(parameters_without_a_gradient_are_passed_over);
    RUN(each_parameter_counts_its_own_steps);
    RUN(a_late_first_gradient_moves_by_the_learning_rate);
    RUN(a_parameter_that_gets_a_gradient_later_trains);
    RUN(who_gets_a_parameter_that_comes_later);
    RUN(states_load_where_other_parameters_are_frozen);
    RUN(counts_of_a_state);
    RUN(outcomes_come_at_a_fixed_lag);
    RUN(an_overflow_at_the_floor_is_logged);
    RUN(the_last_64_outcomes_are_kept);
    RUN(resume_is_bit_identical);
    RUN(load_refuses_other_storage);
    RUN(load_refuses_other_parameters_by_name);
    RUN(optimizer_settings_are_checked);
    RUN(rates_fit_in_fp32);
    RUN(what_is_not_read_is_refused);
    RUN(every_failing_allocation_is_survived);
    RUN(unfreezing_makes_states_or_changes_nothing);
    RUN(ranks_average_and_take_part_without_a_gradient);
    RUN(states_in_a_cycle_are_of_their_rank);
    RUN(gradients_of_a_state);
    RUN(random_numbers_of_another_rank);
    return TEST_END();
}
