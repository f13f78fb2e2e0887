/* t_gemm.c - compares the CPU backend's matrix products with fp64, on every instruction set that this CPU has.
 *
 * The bound of the error is as follows.  A sum of k products of rounded operands, formed in fp32 in any order, differs from
 * the exact one by at most gamma(k) S, where S is the sum of |a b|, gamma(n) = n u / (1 - n u), and u = 2^-24 (Higham,
 * Accuracy and Stability of Numerical Algorithms, 3.1).  A few more roundings follow, and the last one is to the dtype of
 * C. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "parallel.h"
#include "test.h"

#include <math.h>

/* ---- The ways to multiply */

typedef struct way { const char *name; amp_cpu_path path; int bf16; } way;        /* bf16: has a product of its own for it */
static const way all_ways[] = {
    {"scalar", AMP_CPU_SCALAR, 0},
#if defined(__aarch64__)
    {"neon", AMP_CPU_NEON, 0}, {"neon_bf16", AMP_CPU_NEON_BF16, 1},
#else
    {"avx2", AMP_CPU_AVX2, 0}, {"avx512", AMP_CPU_AVX512, 0}, {"avx512_bf16", AMP_CPU_AVX512_BF16, 1}, {"amx", AMP_CPU_AMX, 1},
#endif
};
enum { WAYS = sizeof all_ways / sizeof *all_ways };
static amp_cpu_path best_path;
static int ways(void) { int n = 0; while (n < WAYS && all_ways[n].path <= best_path) n++; return n; }

static int64_t alloc_live;
static int gemm_alloc_fails;
static void *test_alloc(void *user, size_t size, size_t align) {
    void *p = NULL;
    (void)user;
    if (gemm_alloc_fails) return NULL;
    __atomic_fetch_add(&alloc_live, (int64_t)size, __ATOMIC_RELAXED);
    return posix_memalign(&p, align, size) == 0 ? p : NULL;
}
static void test_free(void *user, void *p, size_t size) {
    (void)user;
    __atomic_fetch_sub(&alloc_live, (int64_t)size, __ATOMIC_RELAXED);
    free(p);
}

static ampi_cpu cpu_of(const way *w, int threads) {
    ampi_cpu cpu;
    memset(&cpu, 0, sizeof cpu);
    cpu.host.alloc = test_alloc;
    cpu.host.free = test_free;
    cpu.host.parallel = ampt_parallel;
    cpu.threads = threads;
    cpu.path = w->path;
    return cpu;
}

/* ---- Data */

static uint64_t seed = 1;
static double uniform(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) / 9007199254740992.0 * 2 - 1;
}
static double gemm_get(const void *p, amp_dtype d, int64_t i) {
    uint16_t h;
    float f;
    if (d == AMP_F32) { memcpy(&f, (const char *)p + 4 * i, 4); return (double)f; }
    memcpy(&h, (const char *)p + 2 * i, 2);
    return (double)(d == AMP_F16 ? amp_f32_from_f16(h) : amp_f32_from_bf16(h));
}
static void put(void *p, amp_dtype d, int64_t i, double x) {
    uint16_t h = d == AMP_F16 ? amp_f16_from_f64(x, 0) : amp_bf16_from_f64(x, 0);
    float f = (float)x;
    if (d == AMP_F32) memcpy((char *)p + 4 * i, &f, 4);
    else memcpy((char *)p + 2 * i, &h, 2);
}
static double round_to(double x, amp_dtype d) {
    switch (d) {
        case AMP_F16: return (double)amp_f32_from_f16(amp_f16_from_f32((float)x, 0));
        case AMP_BF16: return (double)amp_f32_from_bf16(amp_bf16_from_f32((float)x, 0));
        case AMP_TF32: return (double)amp_tf32_from_f32((float)x, 0);
        default: return x;
    }
}
/* Unit roundoff, and half the smallest subnormal number. */
static double roundoff(amp_dtype d) { return d == AMP_F16 ? 0x1p-11 : d == AMP_BF16 ? 0x1p-8 : 0x1p-24; }
static double underflow(amp_dtype d) { return d == AMP_F16 ? 0x1p-25 : d == AMP_BF16 ? 0x1p-134 : 0x1p-126; }

/* Memory that lies one element off the alignment of any vector, and is freed by drop(). */
static void *gemm_heap[64];
static int heaps;
static void *keep(int64_t bytes) { return gemm_heap[heaps++] = malloc((size_t)bytes + 128); }
static void gemm_drop(void) { while (heaps > 0) free(gemm_heap[--heaps]); }
static void *gemm_fill(amp_dtype d, int64_t n) {
    char *p = (char *)keep(n * 4);
    int64_t i;
    p += (64 - (uintptr_t)p % 64) % 64 + amp_dtype_size(d);
    for (i = 0; i < n; i++) put(p, d, i, uniform());
    return p;
}

/* ---- One case: every number that a call can be given */

typedef struct test_case {
    int64_t m, n, k, batch;
    int trans_a, trans_b, slack;                    /* slack: how much longer rows are than needed */
    amp_dtype a, b, c, compute;
    double alpha, beta;
    int bias; amp_dtype bias_dtype;
    amp_activation_kind act;
    int pre; amp_dtype pre_dtype;
} test_case;

static test_case plain(int64_t m, int64_t n, int64_t k) {
    test_case t;
    memset(&t, 0, sizeof t);
    t.m = m; t.n = n; t.k = k; t.batch = 1;
    t.a = t.b = t.c = t.compute = t.bias_dtype = t.pre_dtype = AMP_F32;
    t.alpha = 1;
    return t;
}

/* Its matrices.  In C, the gaps between rows hold a number that must still be there afterwards. */
typedef struct problem {
    test_case t;
    amp_k_gemm g;
    int64_t c_count, pre_count;
    void *c_before;
} problem;
static const double GAP = 77;

static problem gemm_make(test_case t) {
    problem p;
    amp_k_gemm *g = &p.g;
    int64_t a_rows = t.trans_a ? t.k : t.m, b_rows = t.trans_b ? t.n : t.k, i, j, q;
    memset(&p, 0, sizeof p);
    p.t = t;
    g->m = t.m; g->n = t.n; g->k = t.k; g->batch = t.batch;
    g->a_dtype = t.a; g->b_dtype = t.b; g->c_dtype = t.c; g->compute = t.compute;
    g->trans_a = t.trans_a; g->trans_b = t.trans_b;
    g->lda = (t.trans_a ? t.m : t.k) + t.slack;
    g->ldb = (t.trans_b ? t.k : t.n) + 2 * t.slack;
    g->ldc = t.n + 3 * t.slack;
    g->stride_a = a_rows * g->lda + 5 * t.slack;
    g->stride_b = b_rows * g->ldb + 3 * t.slack;
    g->stride_c = t.m * g->ldc + t.slack;
    g->alpha = (float)t.alpha; g->beta = (float)t.beta;
    g->a = gemm_fill(t.a, t.batch * g->stride_a);
    g->b = gemm_fill(t.b, t.batch * g->stride_b);
    p.c_count = t.batch * g->stride_c;
    g->c = gemm_fill(t.c, p.c_count);
    for (i = 0; i < p.c_count; i++) {
        q = g->stride_c > 0 ? i % g->stride_c : 0;
        j = g->ldc > 0 ? q % g->ldc : 0;
        if (j >= t.n || q >= t.m * g->ldc) put(g->c, t.c, i, GAP);
        else if (t.beta == 0) put(g->c, t.c, i, (double)NAN);
    }
    p.c_before = keep(p.c_count * 4);
    memcpy(p.c_before, g->c, (size_t)p.c_count * amp_dtype_size(t.c));
    if (t.bias) { g->bias = gemm_fill(t.bias_dtype, t.n); g->bias_dtype = t.bias_dtype; }
    g->act = t.act;
    if (t.pre) {
        g->ld_pre = t.n + t.slack;
        p.pre_count = t.m * g->ld_pre;
        g->pre = gemm_fill(t.pre_dtype, p.pre_count);
        g->pre_dtype = t.pre_dtype;
        for (i = 0; i < p.pre_count; i++) put(g->pre, t.pre_dtype, i, GAP);
    }
    return p;
}

static double act_of(amp_activation_kind act, double x) {
    switch (act) {
        case AMP_ACT_GELU: return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
        case AMP_ACT_GELU_ERF: return 0.5 * x * (1 + erf(x / sqrt(2.0)));
        case AMP_ACT_RELU: return x > 0 ? x : 0;
        default: return x;
    }
}
/* Largest slope, and the error of one evaluation in u |x|: the argument of the sigmoid (or erf) has 4 roundings, its
   slope times its argument is below 1, its own error is below 1.5, and 2 multiplications follow. */
static double act_slope(amp_activation_kind act) { return act == AMP_ACT_GELU || act == AMP_ACT_GELU_ERF ? 1.13 : 1; }
static double gemm_act_error(amp_activation_kind act) { return act == AMP_ACT_GELU || act == AMP_ACT_GELU_ERF ? 7.5 : 0; }

/* Exact sum of products of the rounded operands, and the sum of their magnitudes. */
static void exact(const problem *p, int64_t item, int64_t i, int64_t j, double *sum, double *magnitude) {
    const amp_k_gemm *g = &p->g;
    int64_t q;
    *sum = *magnitude = 0;
    for (q = 0; q < g->k; q++) {
        int64_t at_a = item * g->stride_a + (g->trans_a ? q * g->lda + i : i * g->lda + q);
        int64_t at_b = item * g->stride_b + (g->trans_b ? j * g->ldb + q : q * g->ldb + j);
        double product = round_to(gemm_get(g->a, g->a_dtype, at_a), g->compute) * round_to(gemm_get(g->b, g->b_dtype, at_b), g->compute);
        *sum += product;
        *magnitude += fabs(product);
    }
}

/* NaN by its bits: -Ofast takes x != x for never true. */
static int gemm_is_nan(double x) { return (ampi_bits_f64(x) & ~((uint64_t)1 << 63)) > (uint64_t)0x7ff << 52; }

/* |got - want| in units of what is allowed; NaN and infinity are an excess too. */
static double excess(double got, double want, double allowed) {
    double e = fabs(got - want);
    return !amp_is_finite_f64(&e) ? 1e300 : e <= allowed ? 0 : e / allowed;
}

/* The worst excess over all elements of C and pre, and 1e300 where something was written between rows. */
static double worst_excess(const problem *p) {
    const amp_k_gemm *g = &p->g;
    double u = 0x1p-24, n = (double)g->k + 4, gamma = n * u / (1 - n * u), worst = 0;
    int64_t x;
    for (x = 0; x < p->c_count; x++) {
        int64_t item = x / g->stride_c, rest = x % g->stride_c, i = rest / g->ldc, j = rest % g->ldc;
        double sum, magnitude, pre, error, value, before, got = gemm_get(g->c, g->c_dtype, x);
        if (j >= g->n || i >= g->m) { if (got != GAP) return 1e300; continue; }
        exact(p, item, i, j, &sum, &magnitude);
        pre = (double)g->alpha * sum + (g->bias ? gemm_get(g->bias, g->bias_dtype, j) : 0);
        error = gamma * (fabs((double)g->alpha) * magnitude + fabs(pre)) + n * 0x1p-126;
        if (g->pre) worst = AMPI_MAX(worst, excess(gemm_get(g->pre, g->pre_dtype, i * g->ld_pre + j), pre,
                                     error + roundoff(g->pre_dtype) * (fabs(pre) + error) + underflow(g->pre_dtype)));
        before = g->beta != 0 ? (double)g->beta * gemm_get(p->c_before, g->c_dtype, x) : 0;
        value = act_of(g->act, pre) + before;
        error = act_slope(g->act) * error + gemm_act_error(g->act) * u * fabs(pre) + (double)(p->g.k / 256 + 3) * u * (fabs(before) + fabs(value));
        worst = AMPI_MAX(worst, excess(got, value, error + roundoff(g->c_dtype) * (fabs(value) + error) + underflow(g->c_dtype)));
    }
    for (x = 0; x < p->pre_count; x++)
        if (x % g->ld_pre >= g->n && gemm_get(g->pre, g->pre_dtype, x) != GAP) return 1e300;
    return worst;
}

static const char *describe(const way *w, const test_case *t) {
    static char text[400];
    snprintf(text, sizeof text, "%s m %d n %d k %d batch %d trans %d%d slack %d %s x %s -> %s in %s alpha %g beta %g bias %d act %d pre %d",
             w->name, (int)t->m, (int)t->n, (int)t->k, (int)t->batch, t->trans_a, t->trans_b, t->slack, amp_dtype_name(t->a),
             amp_dtype_name(t->b), amp_dtype_name(t->c), amp_dtype_name(t->compute), t->alpha, t->beta, t->bias, (int)t->act, t->pre);
    return text;
}

/* Computes the case with 1 thread and checks it; then with 2 and 3 threads and with packed B: the same bits. */
static void compute_case(const way *w, test_case t) {
    problem p = gemm_make(t);
    size_t bytes = (size_t)p.c_count * amp_dtype_size(t.c), pre_bytes = (size_t)p.pre_count * amp_dtype_size(t.pre_dtype);
    void *c = keep((int64_t)bytes), *pre = keep((int64_t)pre_bytes), *packed;
    ampi_cpu cpu = cpu_of(w, 1);
    amp_k_pack pack;
    double worst;
    int threads;
    CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
    worst = worst_excess(&p);
    CHECK_MSG(worst == 0, "%s: error is %.3g of what is allowed", describe(w, &t), worst);
    memcpy(c, p.g.c, bytes);
    if (p.g.pre) memcpy(pre, p.g.pre, pre_bytes);
    for (threads = 2; threads <= 3; threads++) {
        memcpy(p.g.c, p.c_before, bytes);
        cpu.threads = threads;
        CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
        CHECK_MSG(memcmp(c, p.g.c, bytes) == 0, "%s: %d threads give other bits", describe(w, &t), threads);
        CHECK_MSG(!p.g.pre || memcmp(pre, p.g.pre, pre_bytes) == 0, "%s: %d threads give another pre", describe(w, &t), threads);
    }
    if (t.batch == 0) { gemm_drop(); return; }       /* no B to pack */
    memset(&pack, 0, sizeof pack);
    pack.b = p.g.b; pack.b_dtype = t.b; pack.compute = t.compute; pack.trans_b = t.trans_b;
    pack.k = t.k; pack.n = t.n; pack.ldb = p.g.ldb; pack.repeated = 1;
    packed = keep((int64_t)AMPI_MAX(ampi_cpu_gemm_pack_size(&cpu, &pack), 1));
    CHECK_OK(ampi_cpu_gemm_pack(&cpu, &pack, packed, NULL));
    p.g.packed_b = packed;
    memcpy(p.g.c, p.c_before, bytes);
    CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
    CHECK_MSG(memcmp(c, p.g.c, bytes) == 0, "%s: packed B gives other bits", describe(w, &t));
    CHECK_EQ(alloc_live, 0);
    gemm_drop();
}

/* Under -Ofast, whose kernels are the same in every case, one in eight is computed, drawn by Fibonacci hashing. */
static int is_left_out(void) {
#if defined(__FAST_MATH__)
    static uint32_t cases;
    return cases++ * 2654435761u >> 29 != 0;
#else
    return 0;
#endif
}

static void check_case(const way *w, test_case t) { if (!is_left_out()) compute_case(w, t); }

/* ---- The tests */

static const amp_dtype gemm_dtypes[] = {AMP_F32, AMP_F16, AMP_BF16};
static const amp_dtype gemm_computes[] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};

/* Shapes at the edges of tiles (6, 14, 16 and 32 rows, 8, 16 and 32 columns), of groups of panels and of blocks of k. */
TEST(shapes) {
    static const int64_t shapes[][3] = {
        {0, 5, 5}, {5, 0, 5}, {5, 5, 0}, {1, 1, 1}, {1, 1, 300}, {1, 33, 17}, {33, 1, 17}, {2, 3, 1}, {40, 50, 1},
        {2, 2, 2}, {3, 5, 7}, {6, 8, 4}, {7, 9, 5}, {13, 15, 16}, {14, 16, 31}, {15, 17, 33}, {14, 32, 64}, {28, 64, 8},
        {29, 65, 63}, {31, 31, 31}, {16, 270, 20}, {5, 300, 255}, {17, 40, 256}, {19, 33, 257}, {9, 35, 513}, {12, 37, 1029},
        {170, 40, 30}, {400, 33, 9}, {33, 32, 32}, {64, 64, 1100}, {48, 96, 544}, {70, 130, 300}, {40, 9, 150}, {20, 9, 1031}, {1, 1100, 70}, {1100, 1, 70}, {1, 200, 1500},
    };
    size_t s;
    int w, trans, slack;
    for (w = 0; w < ways(); w++)
        for (s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (trans = 0; trans < 4; trans++)
                for (slack = 0; slack < 2; slack++) {
                    if (AMPT_SANITIZED && ((int)s + trans + slack) % 2 != 0) continue;     /* each layout, with half of the shapes */
                    test_case t = plain(shapes[s][0], shapes[s][1], shapes[s][2]);
                    t.trans_a = trans & 1;
                    t.trans_b = trans >> 1;
                    t.slack = slack * 3;
                    if (all_ways[w].bf16) { t.a = gemm_dtypes[s % 3]; t.b = gemm_dtypes[(s / 3 + (size_t)trans) % 3]; t.compute = AMP_BF16; }
                    check_case(&all_ways[w], t);
                }
}

/* Every product of one to nine rows, columns and values of k, in all layouts and formats, with odd distances between rows;
   and thin ones, longer than a block of k. */
TEST(small_and_thin_shapes) {
    static const int64_t thin[][3] = {{1, 10, 1024}, {1, 33, 700}, {1, 150, 131}, {1, 64, 1100}, {10, 1, 515}, {65, 1, 129}, {130, 10, 7}, {20, 10, 530}, {8, 70, 9}, {3, 161, 33}, {33, 20, 40}};
    static const amp_activation_kind acts[] = {AMP_ACT_NONE, AMP_ACT_RELU, AMP_ACT_GELU};
    int64_t shape;
    uint32_t draw = 1;
    int w, trans;
    for (w = 0; w < ways(); w++)
        for (shape = 0; shape < 729 + 4 * 11; shape++)
            for (trans = 0; trans < 4; trans++) {
                const int64_t *long_one = shape < 729 ? NULL : thin[(shape - 729) / 4];
                test_case t = long_one ? plain(long_one[0], long_one[1], long_one[2]) : plain(shape / 81 + 1, shape / 9 % 9 + 1, shape % 9 + 1);
                t.trans_a = trans & 1;
                t.trans_b = trans >> 1;
                draw = draw * 1664525u + 1013904223u;
                t.slack = (int)(draw >> 8 & 1);
                t.alpha = draw >> 9 & 1 ? 1 : -0.5;
                t.beta = (double)(draw >> 10 & 3) / 2;
                t.a = gemm_dtypes[(draw >> 12) % 3];
                t.b = gemm_dtypes[(draw >> 14) % 3];
                t.c = gemm_dtypes[(draw >> 16) % 3];
                t.compute = all_ways[w].bf16 && (draw >> 18 & 1) ? AMP_BF16 : gemm_computes[draw >> 19 & 3];
                t.bias = (int)(draw >> 21 & 1);
                t.bias_dtype = gemm_dtypes[(draw >> 22) % 3];
                t.act = acts[(draw >> 24) % 3];
                t.pre = (int)(draw >> 26 & 1);
                if (draw >> 27 & 1) {           /* as those have it that go their own way */
                    t.alpha = 1; t.beta = (double)(draw >> 10 & 1); t.bias = t.pre = 0; t.act = AMP_ACT_NONE;
                    if (draw >> 28 & 1) t.a = t.b = t.c = AMP_F32;
                    if (t.compute != AMP_BF16) t.compute = AMP_F32;
                }
                check_case(&all_ways[w], t);
            }
}

/* Rows times rows of fp32, in bf16: by dot products of two to six rows at a time, and of one where threads cut. */
TEST(rows_times_rows) {
    int64_t m;
    int w, k;
    for (w = 0; w < ways(); w++) {
        test_case t = plain(7, 30, 2501);
        t.trans_b = 1;
        if (all_ways[w].bf16) t.compute = AMP_BF16;
        check_case(&all_ways[w], t);
        for (m = 2; m < 8; m++)
            for (k = 40; k < 1000; k = 2 * k + 1) {
                t.m = m; t.n = m % 3 + 2; t.k = k;
                check_case(&all_ways[w], t);
            }
    }
}

TEST(dtype_mixes) {
    int w, a, b, c, compute, trans;
    for (w = 0; w < ways(); w++)
        for (a = 0; a < 3; a++) for (b = 0; b < 3; b++) for (c = 0; c < 3; c++) for (compute = 0; compute < 4; compute++)
            for (trans = 0; trans < 4; trans++) {
                test_case t = plain(trans == 1 ? 1 : 17, 35, trans == 3 ? 300 : 41);
                t.a = gemm_dtypes[a]; t.b = gemm_dtypes[b]; t.c = gemm_dtypes[c]; t.compute = gemm_computes[compute];
                t.trans_a = trans & 1;
                t.trans_b = trans >> 1;
                t.slack = (a + b + c) % 3;
                check_case(&all_ways[w], t);
            }
}

/* alpha, beta, bias, activation and pre, in one block of k and in several. */
TEST(epilogues) {
    static const double alphas[] = {1, 0.5, 0}, betas[] = {0, 1, -1.5};
    static const amp_activation_kind acts[] = {AMP_ACT_NONE, AMP_ACT_GELU, AMP_ACT_GELU_ERF, AMP_ACT_RELU};
    static const int64_t shapes[][3] = {{20, 45, 30}, {20, 45, 700}, {1, 45, 30}, {45, 1, 30}, {5, 6, 0}};
    int w, alpha, beta, act, bias, pre, s, c;
    for (w = 0; w < ways(); w++)
        for (alpha = 0; alpha < 3; alpha++) for (beta = 0; beta < 3; beta++) for (act = 0; act < 4; act++)
            for (bias = 0; bias < 2; bias++) for (pre = 0; pre < 2; pre++) for (s = 0; s < 5; s++) for (c = 0; c < 3; c++) {
                test_case t = plain(shapes[s][0], shapes[s][1], shapes[s][2]);
                if (AMPT_SANITIZED && (alpha + beta + act + s + c) % 3 != 0) continue;      /* a third touches the same memory */
                t.alpha = alphas[alpha]; t.beta = betas[beta];
                t.bias = bias; t.bias_dtype = gemm_dtypes[(s + c) % 3];
                t.act = acts[act];
                t.pre = pre; t.pre_dtype = gemm_dtypes[(s + act) % 3];
                t.c = gemm_dtypes[c];
                t.slack = c;
                t.trans_b = act & 1;
                if (all_ways[w].bf16) t.compute = AMP_BF16;
                check_case(&all_ways[w], t);
            }
}

TEST(batches) {
    static const int64_t shapes[][3] = {{17, 35, 41}, {64, 64, 128}, {1, 90, 33}, {90, 1, 33}, {100, 100, 300}};
    int w, s, trans, batch;
    for (w = 0; w < ways(); w++)
        for (s = 0; s < 5; s++) for (trans = 0; trans < 4; trans++) for (batch = 0; batch <= 5; batch += 5) {
            test_case t = plain(shapes[s][0], shapes[s][1], shapes[s][2]);
            t.batch = batch;
            t.trans_a = trans & 1;
            t.trans_b = trans >> 1;
            t.slack = trans;
            t.beta = trans == 2 ? 1 : 0;
            t.c = gemm_dtypes[s % 3];
            if (all_ways[w].bf16) t.compute = AMP_BF16;
            check_case(&all_ways[w], t);
        }
}

/* One packed B for all items of a batch. */
TEST(shared_b) {
    int w;
    for (w = 0; w < ways(); w++) {
        test_case t = plain(20, 40, 50);
        problem p;
        ampi_cpu cpu = cpu_of(&all_ways[w], 2);
        amp_k_pack pack;
        t.batch = 3;
        p = gemm_make(t);
        p.g.stride_b = 0;
        memset(&pack, 0, sizeof pack);
        pack.b = p.g.b; pack.b_dtype = pack.compute = AMP_F32; pack.k = t.k; pack.n = t.n; pack.ldb = p.g.ldb; pack.repeated = 1;
        p.g.packed_b = keep((int64_t)ampi_cpu_gemm_pack_size(&cpu, &pack));
        CHECK_OK(ampi_cpu_gemm_pack(&cpu, &pack, (void *)(uintptr_t)p.g.packed_b, NULL));
        CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
        CHECK(worst_excess(&p) == 0);
        gemm_drop();
    }
}

/* Large enough that blocks of rows and of columns occur; compared with a plain product on a sample of elements. */
TEST(large) {
    static const int64_t shapes[][3] = {{430, 600, 300}, {30, 1100, 520}};
    int w, s, kind, x;
    for (w = 0; w < ways(); w++)
        for (s = 0; s < 2; s++) for (kind = 0; kind < 2; kind++) {
            test_case t = plain(shapes[s][0], shapes[s][1], shapes[s][2]);
            ampi_cpu cpu = cpu_of(&all_ways[w], 3);
            problem p;
            t.compute = t.a = t.b = kind ? AMP_BF16 : AMP_F32;
            t.c = kind ? AMP_BF16 : AMP_F32;
            t.trans_a = s;
            t.trans_b = kind;
            p = gemm_make(t);
            CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
            for (x = 0; x < 3000; x++) {
                int64_t i = (int64_t)((uniform() + 1) / 2 * (double)t.m), j = (int64_t)((uniform() + 1) / 2 * (double)t.n);
                double sum, magnitude, n = (double)t.k * 0x1p-24, error;
                exact(&p, 0, i, j, &sum, &magnitude);
                error = n / (1 - n) * magnitude;
                CHECK(excess(gemm_get(p.g.c, t.c, i * p.g.ldc + j), sum, error + roundoff(t.c) * (fabs(sum) + error)) == 0);
            }
            gemm_drop();
        }
}

/* Several blocks of rows share the panels that the first one packed, and get the bits of a B that gemm_pack packed: with
   one block of k and with several, for each dtype of the operands, in either order, and for a C that is not fp32. */
TEST(kept_panels) {
    static const int64_t depth[] = {90, 700};
    int w, kind, d, trans;
    for (w = 0; w < ways(); w++)
        for (kind = 0; kind < 3; kind++) for (d = 0; d < 2; d++) for (trans = 0; trans < 2; trans++) {
            test_case t = plain(430, 300, depth[d]);
            ampi_cpu cpu = cpu_of(&all_ways[w], 1);
            int64_t bytes = t.m * t.n * (kind ? 2 : 4);
            amp_k_pack pack;
            void *kept;
            problem p;
            t.compute = t.a = t.c = kind == 0 ? AMP_F32 : kind == 1 ? AMP_BF16 : AMP_F16;
            t.b = trans ? AMP_F32 : t.compute;
            t.trans_b = trans;
            p = gemm_make(t);
            CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
            kept = keep(bytes);
            memcpy(kept, p.g.c, (size_t)bytes);
            memset(&pack, 0, sizeof pack);
            pack.b = p.g.b; pack.b_dtype = t.b; pack.compute = t.compute; pack.trans_b = trans; pack.k = t.k; pack.n = t.n;
            pack.ldb = p.g.ldb; pack.repeated = 1;
            p.g.packed_b = keep((int64_t)ampi_cpu_gemm_pack_size(&cpu, &pack));
            CHECK_OK(ampi_cpu_gemm_pack(&cpu, &pack, (void *)(uintptr_t)p.g.packed_b, NULL));
            CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
            CHECK(memcmp(kept, p.g.c, (size_t)bytes) == 0);
            gemm_drop();
        }
}

/* A C far larger than A and B, in whole cache lines, is written past the caches: the same bits as one that is not
   aligned, for one thread and for three, with a panel that is not whole and with nothing written between its rows. */
TEST(past_the_caches) {
    enum { M = 1024, N = 1044, K = 5, LD = 1056 };
    int w, kind, shift, threads;
    for (w = 0; w < ways(); w++)
        for (kind = 0; kind < 2; kind++) {
            test_case t = plain(M, N, K);
            float *aligned = (float *)keep(4 * M * LD), *other = (float *)keep(4 * M * LD);
            problem p;
            t.compute = kind ? AMP_BF16 : AMP_F32;
            t.trans_a = 1;
            t.slack = LD - N;
            p = gemm_make(t);
            p.g.ldc = LD;
            aligned += (64 - (uintptr_t)aligned % 64) % 64 / sizeof *aligned;
            other += (64 - (uintptr_t)other % 64) % 64 / sizeof *other + 1;
            for (threads = 1; threads <= 3; threads += 2) {
                ampi_cpu cpu = cpu_of(&all_ways[w], threads);
                int64_t i;
                for (shift = 0; shift < 2; shift++) {
                    float *c = shift ? other : aligned;
                    for (i = 0; i < M * LD - shift; i++) c[i] = (float)GAP;
                    p.g.c = c;
                    CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
                }
                CHECK(memcmp(aligned, other, 4 * (M * LD - 1)) == 0);
                for (i = 0; i < M; i++) CHECK(aligned[i * LD + N] == (float)GAP && aligned[i * LD + N - 1] != (float)GAP);
            }
            gemm_drop();
        }
}

/* Infinite and NaN operands come through where they belong, and only there: NaN in row i of A, infinity in column j of B. */
static void check_special(const way *w, const int64_t shape[3], int trans, amp_dtype storage, amp_dtype compute) {
    test_case t = plain(shape[0], shape[1], shape[2]);
    ampi_cpu cpu = cpu_of(w, 1);
    int64_t i = t.m > 2 ? 2 : t.m, j = t.n > 7 ? 7 : t.n - 1, x;     /* of one row none is NaN */
    problem p;
    t.trans_a = trans & 1;
    t.trans_b = trans >> 1;
    t.a = t.b = storage;
    t.compute = compute;
    p = gemm_make(t);
    for (x = 0; x < t.m * t.k; x++) put((void *)(uintptr_t)p.g.a, storage, x, 1);
    for (x = 0; x < t.n * t.k; x++) put((void *)(uintptr_t)p.g.b, storage, x, 1);
    if (i < t.m) put((void *)(uintptr_t)p.g.a, storage, t.trans_a ? (t.k - 1) * t.m + i : i * t.k + t.k - 1, (double)NAN);
    put((void *)(uintptr_t)p.g.b, storage, t.trans_b ? j * t.k : j, (double)INFINITY);
    CHECK_OK(ampi_cpu_gemm(&cpu, &p.g, NULL));
    for (x = 0; x < t.m * t.n; x++) {
        double got = gemm_get(p.g.c, AMP_F32, x);
        if (x / t.n == i) CHECK(gemm_is_nan(got));
        else if (x % t.n == j) CHECK(!amp_is_finite_f64(&got) && !gemm_is_nan(got) && ampi_bits_f64(got) >> 63 == 0);
        else CHECK(got == (double)t.k);
    }
    gemm_drop();
}
TEST(special_values) {
    static const int64_t shapes[][3] = {{16, 40, 50}, {1, 10, 33}, {1, 70, 7}, {9, 1, 35}, {5, 9, 1}, {4, 4, 4}, {30, 10, 51}, {3, 300, 9}};
    size_t s;
    int w, compute, trans, storage;
    for (w = 0; w < ways(); w++)
        for (s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (compute = 0; compute < 4; compute++) for (trans = 0; trans < 4; trans++) for (storage = 0; storage < 3; storage++)
                check_special(&all_ways[w], shapes[s], trans, gemm_dtypes[storage], gemm_computes[compute]);
}

/* Values that fp16 cannot hold are counted while packing, once each. */
TEST(pack_counts_new_inf) {
    int w, trans;
    for (w = 0; w < ways(); w++)
        for (trans = 0; trans < 2; trans++) {
            ampi_cpu cpu = cpu_of(&all_ways[w], 2);
            int64_t k = 300, n = 450, found = 5;
            float *b = (float *)gemm_fill(AMP_F32, k * n);
            amp_k_pack pack;
            memset(&pack, 0, sizeof pack);
            b[3] = 65520.0f; b[1000] = -1e9f; b[k * n - 1] = 1e30f; b[17] = 65519.0f; b[500] = (float)INFINITY;
            pack.b = b; pack.b_dtype = AMP_F32; pack.compute = AMP_F16; pack.trans_b = trans;
            pack.k = k; pack.n = n; pack.ldb = trans ? k : n; pack.new_inf = &found; pack.repeated = 1;
            CHECK_OK(ampi_cpu_gemm_pack(&cpu, &pack, keep((int64_t)ampi_cpu_gemm_pack_size(&cpu, &pack)), NULL));
            CHECK_EQ(found, 8);
            gemm_drop();
        }
}

/* A beta or alpha that is subnormal is not 0, though the host flushes such numbers. */
TEST(subnormal_factors) {
#if AMPI_X86
    enum { N = 40 };
    static float a[N * N], b[N * N], c[N * N];
    unsigned before = __builtin_ia32_stmxcsr();
    amp_context *amp;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_F32;
    CHECK_OK(amp_open(&amp, &desc));
    for (int n = 4; n <= N; n += 36)
        for (int trans = 0; trans < 2; trans++) {
            for (int i = 0; i < N * N; i++) { a[i] = 1e30f; b[i] = 1e6f; c[i] = 100; }
            __builtin_ia32_ldmxcsr(before | 0x8040);
            CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, trans ? AMP_TRANS : AMP_NO_TRANS, n, n, n, ampi_f32_of_bits(71362), a, N, b, N, ampi_f32_of_bits(71362), c, N));
            __builtin_ia32_ldmxcsr(before);
            CHECK_MSG(c[0] > 0.9e-4f * (float)n && c[0] < 1.1e-4f * (float)n, "%d: %g", n, (double)c[0]);      /* 1e-40 * 1e36 n */
        }
    amp_close(amp);
#else
    SKIP("no MXCSR on this CPU");
#endif
}

TEST(gemm_out_of_memory) {
    int w, kind;
    for (w = 0; w < ways(); w++)
        for (kind = 0; kind < 2; kind++) {
            test_case t = plain(kind ? 1 : 100, kind ? 4000 : 100, 300);
            ampi_cpu cpu = cpu_of(&all_ways[w], 2);
            problem p = gemm_make(t);
            gemm_alloc_fails = 1;
            CHECK_ERR(ampi_cpu_gemm(&cpu, &p.g, NULL), AMP_ERR_MEMORY);
            gemm_alloc_fails = 0;
            CHECK(memcmp(p.g.c, p.c_before, (size_t)p.c_count * 4) == 0);
            CHECK(strstr(amp_last_error(), "scratch") != NULL);
            gemm_drop();
        }
}

/* Sums of columns: gamma of eight rows in pairs and of the eights, whatever the number of rows; what is added, and rounding. */
TEST(column_sums) {
    static const int64_t shapes[][2] = {{0, 5}, {1, 1}, {3, 40}, {64, 64}, {65, 33}, {1000, 130}, {263, 1100}};
    int w, s, x, out, add;
    for (w = 0; w < ways(); w++) for (s = 0; s < 7; s++) for (x = 0; x < 3; x++) for (out = 0; out < 3; out++) for (add = 0; add < 2; add++) {
        int64_t rows = shapes[s][0], cols = shapes[s][1], ld = cols + 3, i, j, threads;
        void *data = gemm_fill(gemm_dtypes[x], rows * ld), *before = gemm_fill(gemm_dtypes[out], cols), *first = keep(cols * 4), *result = keep(cols * 4);
        amp_k_column_sum args;
        memset(&args, 0, sizeof args);
        args.x.data = data; args.x.dtype = gemm_dtypes[x]; args.x.rows = rows; args.x.cols = cols; args.x.ld = ld;
        args.out = result; args.out_dtype = gemm_dtypes[out]; args.add = add;
        for (threads = 1; threads <= 3; threads++) {
            ampi_cpu cpu = cpu_of(&all_ways[w], (int)threads);
            memcpy(result, before, (size_t)cols * amp_dtype_size(gemm_dtypes[out]));
            CHECK_OK(ampi_cpu_column_sum(&cpu, &args, NULL));
            if (threads == 1) memcpy(first, result, (size_t)cols * amp_dtype_size(gemm_dtypes[out]));
            CHECK(memcmp(first, result, (size_t)cols * amp_dtype_size(gemm_dtypes[out])) == 0);
        }
        for (j = 0; j < cols; j++) {
            double sum = 0, magnitude = 0, n = (double)(3 + AMPI_SUM_ROWS / 8 + 7 + 2) * 0x1p-24, error;
            for (i = 0; i < rows; i++) { double v = gemm_get(data, gemm_dtypes[x], i * ld + j); sum += v; magnitude += fabs(v); }
            if (add) { sum += gemm_get(before, gemm_dtypes[out], j); magnitude += fabs(gemm_get(before, gemm_dtypes[out], j)); }
            error = n / (1 - n) * magnitude;
            CHECK(excess(gemm_get(result, gemm_dtypes[out], j), sum, error + roundoff(gemm_dtypes[out]) * (fabs(sum) + error) + underflow(gemm_dtypes[out])) == 0);
        }
        gemm_drop();
    }
}

/* What only a backend that fuses takes along with a product is refused, and nothing is written. */
TEST(fused_products_are_refused) {
    ampi_cpu cpu = cpu_of(&all_ways[0], 1);
    problem p = gemm_make(plain(4, 5, 6));
    amp_k_gemm g[3] = {p.g, p.g, p.g};
    float sums[5] = {0};
    int i;
    g[0].backward = 1;
    g[1].column_sum.data = g[2].row_sum.data = sums;
    g[1].column_sum.dtype = g[2].row_sum.dtype = AMP_F32;
    CHECK_EQ(amp_cpu()->fuses, 0);
    for (i = 0; i < 3; i++) CHECK_ERR(ampi_cpu_gemm(&cpu, &g[i], NULL), AMP_ERR_UNSUPPORTED);
    CHECK(memcmp(p.g.c, p.c_before, (size_t)p.c_count * 4) == 0);
    for (i = 0; i < 5; i++) CHECK(sums[i] == 0);
    gemm_drop();
}

/* Four host threads, each with its own problem, on one device. */
typedef struct host_thread { ampi_cpu *cpu; problem p; void *want; int same; pthread_t id; } host_thread;
static void *host_thread_main(void *arg) {
    host_thread *h = (host_thread *)arg;
    int round;
    for (round = 0; round < 20; round++) {
        memcpy(h->p.g.c, h->p.c_before, (size_t)h->p.c_count * 4);
        if (ampi_cpu_gemm(h->cpu, &h->p.g, NULL) != AMP_OK) return NULL;
        if (memcmp(h->p.g.c, h->want, (size_t)h->p.c_count * 4) != 0) return NULL;
    }
    h->same = 1;
    return NULL;
}
TEST(four_host_threads) {
    ampi_cpu cpu = cpu_of(&all_ways[ways() - 1], 2);
    host_thread h[4];
    int i;
    memset(h, 0, sizeof h);
    for (i = 0; i < 4; i++) {
        test_case t = plain(60 + 17 * i, 90, 200);
        t.beta = 1;
        t.compute = gemm_computes[i];
        h[i].cpu = &cpu;
        h[i].p = gemm_make(t);
        CHECK_OK(ampi_cpu_gemm(&cpu, &h[i].p.g, NULL));
        CHECK(worst_excess(&h[i].p) == 0);
        h[i].want = keep(h[i].p.c_count * 4);
        memcpy(h[i].want, h[i].p.g.c, (size_t)h[i].p.c_count * 4);
    }
    for (i = 0; i < 4; i++) CHECK_EQ(pthread_create(&h[i].id, NULL, host_thread_main, &h[i]), 0);
    for (i = 0; i < 4; i++) pthread_join(h[i].id, NULL);
    for (i = 0; i < 4; i++) CHECK(h[i].same);
    CHECK_EQ(alloc_live, 0);
    gemm_drop();
}

int main(int argc, char **argv) {
    amp_machine machine;
    TEST_BEGIN(argc, argv);
    if (amp_machine_probe(&machine) != AMP_OK) return 1;
    for (int path = AMP_CPU_SCALAR; path < AMP_CPU_PATHS; path++)
        if (ampi_cpu_has(&machine.cpu, (amp_cpu_path)path)) best_path = (amp_cpu_path)path;
    RUN_LONG(shapes);
    RUN(small_and_thin_shapes);
    RUN(rows_times_rows);
    RUN_LONG(dtype_mixes);
    RUN_LONG(epilogues);
    RUN_LONG(batches);
    RUN(shared_b);
    RUN(large);
    RUN(kept_panels);
    RUN(past_the_caches);
    RUN(special_values);
    RUN(pack_counts_new_inf);
    RUN(subnormal_factors);
    RUN(gemm_out_of_memory);
    RUN(column_sums);
    RUN(fused_products_are_refused);
    RUN(four_host_threads);
    return TEST_END();
}
