/* t_attention.c - compares vector math, attention and softmax of the CPU backend with fp64 references, on every path of
 * this CPU.
 *
 * The references are written here, and the bounds are derived from them.  Beside each exact value, the reference carries
 * how far rounding may have moved it.  U = 2^-24 is the relative error of one fp32 operation.  A sum of n terms adds n U
 * times the sum of magnitudes.  exp is documented to be within 1.03 ulp, which is less than 2.5 U.  Rounding to a compute
 * or storage format adds half an ulp of it. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "parallel.h"
#include "test.h"

static const double ATTENTION_U = 1.0 / 16777216.0;
static const amp_dtype attention_storages[] = {AMP_F32, AMP_F16, AMP_BF16}, attention_computes[] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};

/* ---- Numbers, tested by their bits because this program is also built with -Ofast */

static uint32_t bits_of(float x) { return ampi_bits_f32(x); }
static float from_bits(uint32_t b) { return ampi_f32_of_bits(b); }
static int attention_is_nan(double x) { uint64_t b; memcpy(&b, &x, 8);
return (b & ~((uint64_t)1 << 63)) > (uint64_t)0x7ff << 52; }
static int is_finite(double x) { uint64_t b; memcpy(&b, &x, 8); return (b >> 52 & 0x7ff) != 0x7ff; }
static const uint32_t nan_bits = 0x7fc00000u, inf_bits = 0x7f800000u, lowest_bits = 0xff800000u;

/* Half an ulp of a format: relative, and absolute where it runs out of exponents (flushed to zero under -Ofast). */
static double attention_unit(amp_dtype d) { return d == AMP_F16 || d == AMP_TF32 ? 1.0 / 2048 : d == AMP_BF16 ? 1.0 / 256 : ATTENTION_U; }
static double attention_tiny(amp_dtype d) { return d == AMP_F16 ? ldexp(1.0, -25) : ldexp(1.0, -126); }
/* ... of rounding an operand of a product: fp32 stays as it is. */
static double unit_of_product(amp_dtype d) { return d == AMP_F32 ? 0 : attention_unit(d); }

static uint64_t random_state = 1;
static uint32_t random_u32(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}
static int64_t pick(int64_t n) { return (int64_t)(random_u32() % (uint32_t)n); }
static float random_normal(void) {                  /* sum of uniforms: near enough */
    double s = 0;
    for (int i = 0; i < 6; i++) s += (double)(random_u32() % 65536u) / 65536.0 - 0.5;
    return (float)(s * 1.4);
}

/* ---- A CPU device whose memory is counted */

static size_t memory_now, memory_peak;
static void *count_alloc(void *user, size_t size, size_t align) {
    void *p = NULL;
    (void)user;
    if (posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, size) != 0) return NULL;
    memset(p, 0xff, size);                          /* NaN wherever a kernel reads what it did not write */
    memory_now += size;
    if (memory_now > memory_peak) memory_peak = memory_now;
    return p;
}
static void count_free(void *user, void *p, size_t size) { (void)user; memory_now -= size; free(p); }

static ampi_cpu attention_device(amp_cpu_path path, int threads) {
    ampi_cpu cpu;
    memset(&cpu, 0, sizeof cpu);
    cpu.host.alloc = count_alloc;
    cpu.host.free = count_free;
    cpu.host.parallel = ampt_parallel;
    cpu.threads = threads;
    cpu.path = path;
    return cpu;
}
static amp_cpu_path attention_best_path(void) {
    amp_machine machine;
    return amp_machine_probe(&machine) == AMP_OK ? machine.cpu.path : AMP_CPU_SCALAR;
}
/* Path number n of this CPU, from 0 on, and how many it has. */
static amp_cpu_path attention_path(int64_t n) {
    amp_cpu_path path = AMP_CPU_SCALAR;
    for (; n > 0; n--) path = AMPT_NEXT_PATH(path);
    return path;
}
static int attention_paths(void) {
    int n = 1;
    while (attention_path(n) <= attention_best_path()) n++;
    return n;
}

/* ---- Elementary functions */

typedef void (*lanes)(const float *x, float *y);
#define AMPT_LANES(function, pass, target) \
    target static void lanes_##function##pass(const float *x, float *y) { \
        ampi_vfloat##pass v; \
        memcpy(&v, x, sizeof v); \
        v = function##pass(v); \
        memcpy(y, &v, sizeof v); \
    }
#define AMPT_PASS(pass, target) \
    AMPT_LANES(ampi_exp, pass, target) AMPT_LANES(ampi_log, pass, target) AMPT_LANES(ampi_tanh, pass, target) \
    AMPT_LANES(ampi_erf, pass, target) AMPT_LANES(ampi_sqrt, pass, target)
#define AMPT_TABLE(pass) \
    {lanes_ampi_exp##pass, lanes_ampi_log##pass, lanes_ampi_tanh##pass, lanes_ampi_erf##pass, lanes_ampi_sqrt##pass}
AMPT_PASS(_scalar, )
#if AMPI_X86
AMPT_PASS(_avx2, __attribute__((target("avx2,fma,f16c"))))
AMPT_PASS(_avx512, __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))))
static const lanes functions[][5] = {AMPT_TABLE(_scalar), AMPT_TABLE(_avx2), AMPT_TABLE(_avx512)};
#elif AMPI_NEON
AMPT_PASS(_neon, )
static const lanes functions[][5] = {AMPT_TABLE(_scalar), AMPT_TABLE(_neon)};
#else
static const lanes functions[][5] = {AMPT_TABLE(_scalar)};
#endif
static const int function_widths[] = {4, AMPI_X86 ? 8 : 4, 16};
/* How many of these rows this CPU has. */
static int function_passes(void) { return AMPI_MIN(attention_paths(), (int)(sizeof functions / sizeof *functions)); }
static const char *function_names[] = {"exp", "log", "tanh", "erf", "sqrt"};
/* What the comments in amp.h promise, in ulp. */
static const double promised[] = {1.03, 0.79, 1.3, 1.16, 0.5};

static long double attention_exact(int f, long double x) {
    return f == 0 ? expl(x) : f == 1 ? logl(x) : f == 2 ? tanhl(x) : f == 3 ? erfl(x) : sqrtl(x);
}

/* Error of y = f(x) in ulp of the exact result. */
static double error_in_ulp(int f, float x, float y) {
    long double e = attention_exact(f, (long double)x);
    double magnitude = fabs((double)e);
    int exponent = 0;
    if (magnitude > 3.4028235677973366e38) return (bits_of(y) & 0x7fffffffu) == inf_bits ? 0 : 1e9;
    frexp(magnitude, &exponent);
    if (!is_finite((double)y)) return 1e9;
    return fabs((double)((long double)y - e)) / ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

TEST(functions_are_accurate) {
    int passes = function_passes();
    for (int f = 0; f < 5; f++) {
        for (int p = 0; p < passes; p++) {
            double worst = 0;
            float at = 0, x[16], y[16];
            /* every normal exponent, both signs; and the smallest numbers */
            for (uint32_t b = 0x00800000u; b < inf_bits - 16 * 2477u; b += 16 * 2477u) {
                for (uint32_t sign = 0; sign < (f == 1 || f == 4 ? 1u : 2u); sign++) {
                    for (uint32_t i = 0; i < 16; i++) x[i] = from_bits((b + i * 2477u) | sign << 31);
                    functions[p][f](x, y);
                    for (int i = 0; i < function_widths[p]; i++) {
                        double e = error_in_ulp(f, x[i], y[i]);
                        if (f == 0 && attention_exact(f, x[i]) < 1.2193e-38L) continue;   /* below exp(-87.3): 0 */
                        if (e > worst) { worst = e; at = x[i]; }
                    }
                }
            }
            CHECK_MSG(worst <= promised[f] + 0.005, "%s, path %d: %.3f ulp at %.9g", function_names[f], p + 1, worst,
                (double)at);
        }
    }
}

/* Values around the places where a formula changes, and where results leave the normal range. */
TEST(functions_at_their_seams) {
    static const float seams[] = {0.625f, 0.92f, 10.0f, 4.0f, 1.0f, 0.70710678f, 1.41421356f, 88.7228394f, 87.2f,
        87.3f, 0.34657359f, 2.0f};
    int passes = function_passes();
    for (int f = 0; f < 4; f++) {
        for (int p = 0; p < passes; p++) {
            for (size_t s = 0; s < sizeof seams / sizeof *seams; s++) {
                for (int sign = 0; sign < (f == 1 ? 1 : 2); sign++) {
                    float x[16], y[16];
                    for (uint32_t i = 0; i < 16; i++)
                        x[i] = from_bits((bits_of(seams[s]) - 8 + i) | (uint32_t)sign << 31);
                    functions[p][f](x, y);
                    for (int i = 0; i < function_widths[p]; i++) {
                        double e = error_in_ulp(f, x[i], y[i]);
                        if (f == 0 && attention_exact(f, x[i]) < 1.2193e-38L) continue;
                        CHECK_MSG(e <= promised[f] + 0.005, "%s(%.9g) = %.9g: %.2f ulp, path %d", function_names[f],
                            (double)x[i], (double)y[i], e, p + 1);
                    }
                }
            }
        }
    }
}

/* Special values by their bits: in, then exp, log, tanh, erf.  1: any NaN. */
TEST(functions_of_special_values) {
    static const uint32_t table[][5] = {
        {0x7f800000u, 0x7f800000u, 0x7f800000u, 0x3f800000u, 0x3f800000u},      /* inf */
        {0xff800000u, 0x00000000u, 1, 0xbf800000u, 0xbf800000u},
        {0x7fc00000u, 1, 1, 1, 1}, {0xffc00000u, 1, 1, 1, 1}, {0x7f800001u, 1, 1, 1, 1}, {0xffffffffu, 1, 1, 1, 1},
        {0x00000000u, 0x3f800000u, 0xff800000u, 0x00000000u, 0x00000000u},      /* 0 */
        {0x80000000u, 0x3f800000u, 0xff800000u, 0x80000000u, 0x80000000u},
        {0x7f7fffffu, 0x7f800000u, 0x42b17218u, 0x3f800000u, 0x3f800000u},      /* the largest */
        {0xff7fffffu, 0x00000000u, 1, 0xbf800000u, 0xbf800000u},
        {0x3f800000u, 0x402df854u, 0x00000000u, 0x3f42f7d6u, 0x3f57bb3du},      /* 1 */
        {0xbf800000u, 0x3ebc5ab2u, 1, 0xbf42f7d6u, 0xbf57bb3du},
        {0x00000001u, 0x3f800000u, 0xc2ce8ed0u, 2, 2}, {0x80000001u, 0x3f800000u, 1, 2, 2},     /* 2: not checked */
        {0xc2d20000u, 0x00000000u, 1, 0xbf800000u, 0xbf800000u},                /* -105 */
        {0xc2ae999bu, 0x00000000u, 1, 0xbf800000u, 0xbf800000u},                /* just below -87.3 */
        {0xc2ae999au, 0x0084c38bu, 1, 0xbf800000u, 0xbf800000u},                /* -87.3 */
    };
    int passes = function_passes();
    for (size_t r = 0; r < sizeof table / sizeof *table; r++) {
        for (int f = 0; f < 4; f++) {
            for (int p = 0; p < passes; p++) {
                uint32_t expected = table[r][1 + f], got;
                float x[16], y[16];
                int ok;
                for (int i = 0; i < 16; i++) x[i] = from_bits(table[r][0]);
                functions[p][f](x, y);
                got = bits_of(y[0]);
                ok = expected == 2 || (expected == 1 ? (got & 0x7fffffffu) > inf_bits : got - expected + 1u <= 2u);
                if (expected == inf_bits || expected == lowest_bits || expected == 0) ok = got == expected;
                CHECK_MSG(ok, "%s(%08x) = %08x, expected %08x, path %d", function_names[f], (unsigned)table[r][0],
                    (unsigned)got, (unsigned)expected, p + 1);
            }
        }
    }
}

/* ---- Masks, straight from the words of amp_mask */

static int sees(const amp_mask *m, int64_t b, int64_t h, int64_t i, int64_t j, int64_t queries, int64_t keys) {
    int64_t p = i + keys - queries, distance = p > j ? p - j : j - p;
    int causal = j <= p, seen = 1;
    switch (m->kind) {
        case AMP_MASK_CAUSAL: seen = causal; break;
        case AMP_MASK_WINDOW: seen = distance < m->window && (causal || m->bidirectional); break;
        case AMP_MASK_WINDOW_GLOBAL:
            seen = distance < m->window || j < m->global || (p >= 0 && p < m->global);
            seen = seen && (causal || m->bidirectional);
            break;
        case AMP_MASK_PREFIX: seen = causal || j < m->prefix[b]; break;
        case AMP_MASK_ARBITRARY:
            seen = m->allowed[b * m->allowed_batch_stride + h * m->allowed_head_stride + i * keys + j] != 0; break;
        default: break;
    }
    if (m->lengths && j >= m->lengths[b]) seen = 0;
    if (m->documents && (p < 0 || m->documents[b * keys + j] != m->documents[b * keys + p])) seen = 0;
    return seen;
}

typedef struct mask_data { int32_t prefix[8], lengths[8], documents[4096]; uint8_t allowed[1 << 19]; } mask_data;
static mask_data mask_room;

static amp_mask random_mask(amp_mask_kind kind, int padding, int documents, int64_t batch, int64_t heads,
    int64_t queries, int64_t keys) {
    amp_mask m;
    memset(&m, 0, sizeof m);
    m.kind = kind;
    m.bidirectional = kind == AMP_MASK_WINDOW || kind == AMP_MASK_WINDOW_GLOBAL ? (int32_t)pick(2) : 0;
    m.window = 1 + pick(keys + 3);
    m.global = pick(keys / 2 + 2);
    for (int64_t b = 0; b < batch; b++) {
        int32_t document = 0;
        mask_room.prefix[b] = (int32_t)pick(keys + 2);
        mask_room.lengths[b] = (int32_t)pick(keys + 2);
        for (int64_t j = 0; j < keys; j++) {
            if (pick(20) == 0) document = documents == 1 ? document + 1 : (int32_t)pick(3);
            mask_room.documents[b * keys + j] = document;
        }
    }
    if (kind == AMP_MASK_PREFIX) m.prefix = mask_room.prefix;
    if (padding) m.lengths = mask_room.lengths;
    if (documents) m.documents = mask_room.documents;
    if (kind == AMP_MASK_ARBITRARY) {
        int64_t per_head = pick(2), per_batch = pick(2), density = 1 + pick(4);
        m.allowed = mask_room.allowed;
        m.allowed_head_stride = per_head * queries * keys;
        m.allowed_batch_stride = per_batch * queries * keys * (per_head ? heads : 1);
        for (int64_t i = 0; i < batch * heads * queries * keys; i++) mask_room.allowed[i] = pick(4) < density;
        for (int64_t i = 0; i < AMPI_MIN(keys, (int64_t)40); i++) mask_room.allowed[i] = 0;
             /* one row sees little */
    }
    return m;
}

/* ---- One attention problem: tensors with strides, as the kernel takes them, and fp64 copies */

typedef struct tensor { void *data; int64_t rows, stride[3], count; amp_dtype dtype; } tensor;

typedef struct attention_problem {
    amp_k_attention x;
    tensor q, k, v, o, d_o, dq, dk, dv;
} attention_problem;

/* [batch, rows, heads, dim] with `gap` elements behind each position, filled with a pattern that nothing may change. */
static tensor make_tensor(const amp_k_attention *x, int64_t rows, int64_t gap) {
    tensor t;
    t.dtype = x->dtype;
    t.rows = rows;
    t.stride[2] = x->dim + (gap > 8 ? 8 : 0);
    t.stride[1] = t.stride[2] * x->heads + gap;
    t.stride[0] = t.stride[1] * rows;
    t.count = t.stride[0] * x->batch;
    t.data = malloc((size_t)t.count * 4 + 64);
    memset(t.data, 0x35, (size_t)t.count * 4 + 64);
    return t;
}
static double at(const tensor *t, int64_t b, int64_t i, int64_t h, int64_t d) {
    float f;
    ampi_convert_fast(&f, AMP_F32, ampi_at(t->data, t->dtype,
        b * t->stride[0] + i * t->stride[1] + h * t->stride[2] + d), t->dtype, 1, AMP_CPU_SCALAR);
    return (double)f;
}
static void attention_put(tensor *t, int64_t b, int64_t i, int64_t h, int64_t d, float value) {
    ampi_convert_fast(ampi_at_mut(t->data, t->dtype, b * t->stride[0] + i * t->stride[1] + h * t->stride[2] + d),
        t->dtype, &value, AMP_F32, 1, AMP_CPU_SCALAR);
}
static void attention_fill(const amp_k_attention *x, tensor *t) {
    for (int64_t b = 0; b < x->batch; b++)
        for (int64_t i = 0; i < t->rows; i++)
            for (int64_t h = 0; h < x->heads; h++)
                for (int64_t d = 0; d < x->dim; d++) attention_put(t, b, i, h, d, random_normal());
}
/* How many elements outside [batch, rows, heads, dim] lost the pattern. */
static int64_t spilled(const amp_k_attention *x, const tensor *t) {
    int64_t size = (int64_t)amp_dtype_size(t->dtype), bad = 0;
    for (int64_t i = 0; i < t->count * size + 64; i++) {
        int64_t e = i / size % t->stride[1];
        int inside = i < t->count * size && e / t->stride[2] < x->heads && e % t->stride[2] < x->dim;
        if (!inside && ((unsigned char *)t->data)[i] != 0x35) bad++;
    }
    return bad;
}

static attention_problem make_problem(int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t dim, amp_dtype dtype,
    amp_dtype compute) {
    attention_problem p;
    int64_t gap = pick(3) * 8;
    memset(&p, 0, sizeof p);
    p.x.batch = batch; p.x.heads = heads; p.x.queries = queries; p.x.keys = keys; p.x.dim = dim;
    p.x.dtype = dtype; p.x.compute = compute;
    p.x.scale = (float)(1 / sqrt((double)dim));
    p.q = make_tensor(&p.x, queries, gap); p.k = make_tensor(&p.x, keys, gap); p.v = make_tensor(&p.x, keys, 0);
    p.o = make_tensor(&p.x, queries, 0); p.d_o = make_tensor(&p.x, queries, gap);
    p.dq = make_tensor(&p.x, queries, gap); p.dk = make_tensor(&p.x, keys, 0); p.dv = make_tensor(&p.x, keys, gap);
    attention_fill(&p.x, &p.q); attention_fill(&p.x, &p.k); attention_fill(&p.x, &p.v); attention_fill(&p.x, &p.d_o);
    p.x.lse = (float *)malloc((size_t)(batch * heads * queries) * sizeof(float));
    p.x.q = p.q.data; p.x.k = p.k.data; p.x.v = p.v.data; p.x.o = p.o.data;
    p.x.d_o = p.d_o.data; p.x.dq = p.dq.data; p.x.dk = p.dk.data; p.x.dv = p.dv.data;
    memcpy(p.x.q_stride, p.q.stride, sizeof p.q.stride); memcpy(p.x.k_stride, p.k.stride, sizeof p.k.stride);
    memcpy(p.x.v_stride, p.v.stride, sizeof p.v.stride); memcpy(p.x.o_stride, p.o.stride, sizeof p.o.stride);
    memcpy(p.x.do_stride, p.d_o.stride, sizeof p.d_o.stride); memcpy(p.x.dq_stride, p.dq.stride, sizeof p.dq.stride);
    memcpy(p.x.dk_stride, p.dk.stride, sizeof p.dk.stride); memcpy(p.x.dv_stride, p.dv.stride, sizeof p.dv.stride);
    return p;
}
static void drop_problem(attention_problem *p) {
    free(p->q.data); free(p->k.data); free(p->v.data); free(p->o.data); free(p->d_o.data);
    free(p->dq.data); free(p->dk.data); free(p->dv.data); free(p->x.lse);
}

/* ---- The reference: one head in fp64, with the bound of each result.  See the head of this file. */

typedef struct head {
    double *q, *k, *v, *d_o;                        /* rounded to the compute dtype */
    double *o, *o_bound, *lse, *lse_bound;
    double *dq, *dq_bound, *dk, *dk_bound, *dv, *dv_bound;
    double *p, *p_error;                            /* [queries, keys]: probability and its relative error */
} head;

static double *zeros(int64_t n) { return (double *)calloc((size_t)AMPI_MAX(n, (int64_t)1), sizeof(double)); }

static double *head_of(const attention_problem *p, const tensor *t, int64_t b, int64_t h) {
    double *out = zeros(t->rows * p->x.dim);
    for (int64_t i = 0; i < t->rows; i++) {
        for (int64_t d = 0; d < p->x.dim; d++) {
            float f = (float)at(t, b, i, h, d);
            if (p->x.compute == AMP_TF32) f = amp_tf32_from_f32(f, 0);
            else {
                if (p->x.compute == AMP_F16) f = amp_f32_from_f16(amp_f16_from_f32(f, 0));
                if (p->x.compute == AMP_BF16) f = amp_f32_from_bf16(amp_bf16_from_f32(f, 0));
            }
            out[i * p->x.dim + d] = (double)f;
        }
    }
    return out;
}

static double dot(const double *a, const double *b, int64_t n, double *magnitude) {
    double s = 0;
    *magnitude = 0;
    for (int64_t i = 0; i < n; i++) { s += a[i] * b[i]; *magnitude += fabs(a[i] * b[i]); }
    return s;
}
static double stored(const attention_problem *p, double value, double error) {
    return error + attention_unit(p->x.dtype) * (fabs(value) + error) + attention_tiny(p->x.dtype);
}

/* Row i of the head: probabilities, o, lse.  Error of a probability relative to it, to first order and then made safe
   by expm1: its score (dim products and the scale), the subtraction of the maximum, exp, and one exp, subtraction
   and product for each tile of keys that may move the maximum. */
static void forward_row(const attention_problem *p, head *r, int64_t b, int64_t h, int64_t i) {
    const amp_k_attention *x = &p->x;
    double *s = zeros(x->keys), *e = zeros(x->keys), max = 0, sum = 0, worst = 0, reach = 0, magnitude;
    double tiles = (double)(x->keys / 64 + 1), scale = (double)x->scale, narrow = unit_of_product(x->compute);
    int any = 0;
    for (int64_t j = 0; j < x->keys; j++) {
        if (!sees(&x->mask, b, h, i, j, x->queries, x->keys)) continue;
        s[j] = scale * dot(r->q + i * x->dim, r->k + j * x->dim, x->dim, &magnitude);
        e[j] = (double)(x->dim + 1) * ATTENTION_U * fabs(scale) * magnitude;
        if (!any || s[j] > max) max = s[j];
        if (fabs(s[j]) + e[j] > reach) reach = fabs(s[j]) + e[j];
        any = 1;
    }
    for (int64_t j = 0; j < x->keys; j++) {
        if (!sees(&x->mask, b, h, i, j, x->queries, x->keys)) continue;
        e[j] = expm1(e[j] + 2 * reach * ATTENTION_U + 3 * ATTENTION_U + tiles * (2 * reach * ATTENTION_U + 5 * ATTENTION_U));
        if (e[j] > worst) worst = e[j];
        sum += r->p[i * x->keys + j] = exp(s[j] - max);
    }
    worst += (double)x->keys * ATTENTION_U;                   /* of the sum */
    r->lse[i] = any ? max + log(sum) : 0;
    r->lse_bound[i] = any ? worst + 4 * ATTENTION_U * (reach + log(sum) + 1) : 0;
    for (int64_t j = 0; j < x->keys && any; j++) {
        double pj, error;
        if (!sees(&x->mask, b, h, i, j, x->queries, x->keys)) continue;         /* its value may be infinite or NaN */
        pj = r->p[i * x->keys + j] /= sum;
        error = (1 + e[j]) * (1 + worst) * (1 + narrow) * (1 + ((double)x->keys + tiles + 4) * ATTENTION_U) - 1;
        r->p_error[i * x->keys + j] = expm1(e[j] + r->lse_bound[i] + 4 * ATTENTION_U * (2 * reach + 3));
             /* as backward makes it */
        for (int64_t d = 0; d < x->dim; d++) {
            double v = r->v[j * x->dim + d];
            r->o[i * x->dim + d] += pj * v;
            r->o_bound[i * x->dim + d] += fabs(pj * v) * error;
            r->o_bound[i * x->dim + d] += fabs(v) * attention_tiny(x->compute);
        }
    }
    for (int64_t d = 0; d < x->dim; d++) r->o_bound[i * x->dim + d] = stored(p, r->o[i * x->dim + d],
        r->o_bound[i * x->dim + d]);
    free(s);
    free(e);
}

/* Row i: dp = do v^T, ds = p (dp - delta), and what it adds to dq, dk, dv. */
static void backward_row(const attention_problem *p, head *r, int64_t b, int64_t h, int64_t i) {
    const amp_k_attention *x = &p->x;
    const double *d_o = r->d_o + i * x->dim, *q = r->q + i * x->dim;
    double magnitude, delta_error = 0, scale = (double)x->scale, n = (double)AMPI_MAX(x->queries, x->keys) + 4;
    double narrow = unit_of_product(x->compute), small = attention_tiny(x->compute);
    double delta = dot(d_o, r->o + i * x->dim, x->dim, &magnitude);
    for (int64_t d = 0; d < x->dim; d++) delta_error += fabs(d_o[d]) * r->o_bound[i * x->dim + d];
    delta_error += (double)x->dim * ATTENTION_U * (magnitude + delta_error);
    for (int64_t j = 0; j < x->keys; j++) {
        double pj = r->p[i * x->keys + j], pe = r->p_error[i * x->keys + j], dp, ds, ds_error, p_error;
        if (!sees(&x->mask, b, h, i, j, x->queries, x->keys)) continue;
        dp = dot(d_o, r->v + j * x->dim, x->dim, &magnitude);
        ds = pj * (dp - delta);
        ds_error = (double)x->dim * ATTENTION_U * magnitude + delta_error;
        ds_error = pj * (1 + pe) * (ds_error + 2 * ATTENTION_U * (fabs(dp - delta) + ds_error)) + pj * pe * fabs(dp - delta);
        ds_error += narrow * (fabs(ds) + ds_error) + small + n * ATTENTION_U * (fabs(ds) + ds_error);
        p_error = pj * pe;
        p_error += (narrow + n * ATTENTION_U) * (pj + p_error) + small;
        for (int64_t d = 0; d < x->dim; d++) {
            r->dq[i * x->dim + d] += scale * ds * r->k[j * x->dim + d];
            r->dq_bound[i * x->dim + d] += fabs(scale * r->k[j * x->dim + d]) * ds_error;
            r->dk[j * x->dim + d] += scale * ds * q[d];
            r->dk_bound[j * x->dim + d] += fabs(scale * q[d]) * ds_error;
            r->dv[j * x->dim + d] += pj * d_o[d];
            r->dv_bound[j * x->dim + d] += fabs(d_o[d]) * p_error;
        }
    }
}

/* The largest error over its bound in a head of t. */
static double worst_ratio(const attention_problem *p, const tensor *t, int64_t b, int64_t h, const double *exact_value,
    const double *bound) {
    double worst = 0;
    for (int64_t i = 0; i < t->rows; i++) {
        for (int64_t d = 0; d < p->x.dim; d++) {
            double got = at(t, b, i, h, d), e = exact_value[i * p->x.dim + d];
            double ratio = is_finite(got) ? fabs(got - e) / (bound[i * p->x.dim + d] + 1e-300) : 1e9;
            if (!is_finite(ratio)) ratio = 1e9;                                 /* a reference that is not finite checks nothing */
            if (ratio > worst) worst = ratio;
        }
    }
    return worst;
}

typedef struct accuracy { double o, dq, dk, dv, lse; } accuracy;

/* Runs forward and backward and compares every head; error over bound. */
static accuracy compare(attention_problem *p, ampi_cpu *cpu) {
    const amp_k_attention *x = &p->x;
    accuracy a = {0, 0, 0, 0, 0};
    int64_t nq = x->queries * x->dim, nk = x->keys * x->dim;
    CHECK_OK(ampi_cpu_attention(cpu, x, NULL));
    CHECK_OK(ampi_cpu_attention_backward(cpu, x, NULL));
    for (int64_t b = 0; b < x->batch; b++) {
        for (int64_t h = 0; h < x->heads; h++) {
            head r = {head_of(p, &p->q, b, h), head_of(p, &p->k, b, h), head_of(p, &p->v, b, h), head_of(p, &p->d_o,
                b, h),
                      zeros(nq), zeros(nq), zeros(x->queries), zeros(x->queries), zeros(nq), zeros(nq), zeros(nk),
                          zeros(nk), zeros(nk), zeros(nk),
                      zeros(x->queries * x->keys), zeros(x->queries * x->keys)};
            for (int64_t i = 0; i < x->queries; i++) {
                float lse = x->lse[(b * x->heads + h) * x->queries + i];
                int any = 0;
                forward_row(p, &r, b, h, i);
                backward_row(p, &r, b, h, i);
                for (int64_t j = 0; j < x->keys; j++) any |= sees(&x->mask, b, h, i, j, x->queries, x->keys);
                if (!any) a.lse = AMPI_MAX(a.lse, bits_of(lse) == lowest_bits ? 0 : 1e9);
                else a.lse = AMPI_MAX(a.lse,
                    is_finite((double)lse) ? fabs((double)lse - r.lse[i]) / r.lse_bound[i] : 1e9);
                for (int64_t d = 0; d < x->dim && !any; d++) CHECK(at(&p->o, b, i, h, d) == 0 && at(&p->dq, b, i, h,
                    d) == 0);
            }
            for (int64_t i = 0; i < nq; i++) r.dq_bound[i] = stored(p, r.dq[i], r.dq_bound[i]);
            for (int64_t i = 0; i < nk; i++) { r.dk_bound[i] = stored(p, r.dk[i], r.dk_bound[i]);
            r.dv_bound[i] = stored(p, r.dv[i], r.dv_bound[i]); }
            a.o = AMPI_MAX(a.o, worst_ratio(p, &p->o, b, h, r.o, r.o_bound));
            a.dq = AMPI_MAX(a.dq, worst_ratio(p, &p->dq, b, h, r.dq, r.dq_bound));
            a.dk = AMPI_MAX(a.dk, worst_ratio(p, &p->dk, b, h, r.dk, r.dk_bound));
            a.dv = AMPI_MAX(a.dv, worst_ratio(p, &p->dv, b, h, r.dv, r.dv_bound));
            free(r.q); free(r.k); free(r.v); free(r.d_o); free(r.o); free(r.o_bound); free(r.lse); free(r.lse_bound);
            free(r.dq); free(r.dq_bound); free(r.dk); free(r.dk_bound); free(r.dv); free(r.dv_bound); free(r.p);
            free(r.p_error);
        }
    }
    CHECK_EQ(spilled(x, &p->o) + spilled(x, &p->dq) + spilled(x, &p->dk) + spilled(x, &p->dv), 0);
    return a;
}

static void check_problem(attention_problem *p, ampi_cpu *cpu, const char *what) {
    accuracy a = compare(p, cpu);
    const amp_k_attention *x = &p->x;
    int ok = a.o <= 1 && a.dq <= 1 && a.dk <= 1 && a.dv <= 1 && a.lse <= 1;
    CHECK_MSG(ok, "%s: q %d k %d dim %d %s/%s mask %d%s%s%s path %d: error over bound o %.3g lse %.3g dq %.3g dk %.3g dv %.3g", what,
              (int)x->queries, (int)x->keys, (int)x->dim, amp_dtype_name(x->dtype), amp_dtype_name(x->compute),
                  (int)x->mask.kind,
              x->mask.bidirectional ? " both ways" : "", x->mask.lengths ? " padded" : "", x->mask.documents ? " documents" : "",
              (int)cpu->path, a.o, a.lse, a.dq, a.dk, a.dv);
}

static const int64_t sizes[] = {1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 129, 150}, dims[] = {1, 5, 16, 64, 80, 128};

TEST(every_dtype_and_path) {
    for (int path = 1; path <= (int)attention_best_path(); path = AMPT_NEXT_PATH(path)) {
        ampi_cpu cpu = attention_device((amp_cpu_path)path, 2);
        for (int s = 0; s < 3; s++) {
            for (int c = 0; c < 4; c++) {
                attention_problem p = make_problem(2, 2, 70, 90, 20, attention_storages[s], attention_computes[c]);
                p.x.mask.kind = AMP_MASK_CAUSAL;
                check_problem(&p, &cpu, "dtypes");
                drop_problem(&p);
            }
        }
    }
}

TEST(odd_shapes) {
    ampi_cpu cpu = attention_device(attention_best_path(), 2);
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        for (int n = 0; n < 6; n++) {
            attention_problem p = make_problem(1 + pick(2), 1 + pick(3), sizes[pick(12)], sizes[pick(12)], dims[d],
                attention_storages[pick(3)], AMP_F32);
            p.x.mask.kind = pick(2) ? AMP_MASK_CAUSAL : AMP_MASK_NONE;
            if (n == 0) p.x.scale = -0.7f;
            check_problem(&p, &cpu, "shapes");
            drop_problem(&p);
        }
    }
}

TEST(every_mask_and_combination) {
    for (int n = 0; n < 3; n++) {
        for (int kind = 0; kind <= AMP_MASK_ARBITRARY; kind++) {
            for (int combination = 0; combination < 6; combination++) {
                ampi_cpu cpu = attention_device(attention_path(pick(attention_paths())), 2);
                int64_t queries = sizes[pick(12)], keys = n == 0 ? queries : sizes[pick(12)];
                attention_problem p = make_problem(2, 2, queries, keys, 12, AMP_F32, attention_computes[pick(4)]);
                p.x.mask = random_mask((amp_mask_kind)kind, combination % 2, combination / 2, 2, 2, queries, keys);
                check_problem(&p, &cpu, "masks");
                drop_problem(&p);
            }
        }
    }
}

/* Windows and documents over many tiles: hidden tiles are skipped, seen ones are not. */
TEST(long_sparse_masks) {
    ampi_cpu cpu = attention_device(attention_best_path(), 2);
    for (int kind = AMP_MASK_CAUSAL; kind <= AMP_MASK_PREFIX; kind++) {
        attention_problem p = make_problem(1, 1, 600, 600, 8, AMP_F32, AMP_F32);
        p.x.mask = random_mask((amp_mask_kind)kind, 0, kind == AMP_MASK_CAUSAL, 1, 1, 600, 600);
        p.x.mask.window = 40;
        p.x.mask.global = 3;
        check_problem(&p, &cpu, "long");
        drop_problem(&p);
    }
}

/* A packed qkv buffer [batch, seq, 3, heads, dim], and gradients into one of the same form. */
TEST(packed_qkv) {
    enum { B = 2, T = 37, H = 3, D = 16, N = B * T * 3 * H * D };
    ampi_cpu cpu = attention_device(attention_best_path(), 2);
    attention_problem p = make_problem(B, H, T, T, D, AMP_F32, AMP_F32);
    amp_k_attention x = p.x;
    float *qkv = (float *)malloc(N * sizeof(float)), *grad = (float *)malloc(N * sizeof(float));
    int64_t stride[3] = {T * 3 * H * D, 3 * H * D, D}, different = 0;
    tensor *from[] = {&p.q, &p.k, &p.v}, *to[] = {&p.dq, &p.dk, &p.dv};
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < T; i++)
            for (int64_t c = 0; c < 3 * H * D; c++)
                qkv[(b * T + i) * 3 * H * D + c] = (float)at(from[c / (H * D)], b, i, c / D % H, c % D);
    x.mask.kind = p.x.mask.kind = AMP_MASK_CAUSAL;
    CHECK_OK(ampi_cpu_attention(&cpu, &p.x, NULL));
    CHECK_OK(ampi_cpu_attention_backward(&cpu, &p.x, NULL));
    x.q = qkv; x.k = qkv + H * D; x.v = qkv + 2 * H * D;
    x.dq = grad; x.dk = grad + H * D; x.dv = grad + 2 * H * D;
    memcpy(x.q_stride, stride, sizeof stride); memcpy(x.k_stride, stride, sizeof stride); memcpy(x.v_stride, stride,
        sizeof stride);
    memcpy(x.dq_stride, stride, sizeof stride); memcpy(x.dk_stride, stride, sizeof stride); memcpy(x.dv_stride,
        stride, sizeof stride);
    CHECK_OK(ampi_cpu_attention(&cpu, &x, NULL));
    CHECK_OK(ampi_cpu_attention_backward(&cpu, &x, NULL));
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < T; i++)
            for (int64_t c = 0; c < 3 * H * D; c++)
                different += bits_of(grad[(b * T + i) * 3 * H * D + c]) != bits_of((float)at(to[c / (H * D)], b, i,
                    c / D % H, c % D));
    CHECK_EQ(different, 0);
    free(qkv);
    free(grad);
    drop_problem(&p);
}

/* Rounding the operands first changes no bit: that is what computing in a dtype means. */
TEST(operands_are_rounded_to_the_compute_dtype) {
    for (int path = 1; path <= (int)attention_best_path(); path = AMPT_NEXT_PATH(path)) {
        for (int c = 1; c < 4; c++) {
            ampi_cpu cpu = attention_device((amp_cpu_path)path, 1);
            attention_problem p = make_problem(1, 2, 40, 70, 24, AMP_F32, attention_computes[c]);
            tensor *in[] = {&p.q, &p.k, &p.v, &p.d_o}, *out[] = {&p.dq, &p.dk, &p.dv, &p.o};
            unsigned char *before[4];
            int64_t changed = 0, different = 0;
            CHECK_OK(ampi_cpu_attention(&cpu, &p.x, NULL));
            CHECK_OK(ampi_cpu_attention_backward(&cpu, &p.x, NULL));
            for (int t = 0; t < 4; t++) {
                before[t] = (unsigned char *)malloc((size_t)out[t]->count * 4);
                memcpy(before[t], out[t]->data, (size_t)out[t]->count * 4);
                for (int64_t b = 0, h = 0; h < 2; h++) {
                    double *rounded = head_of(&p, in[t], b, h);
                    for (int64_t i = 0; i < in[t]->rows * 24; i++) {
                        changed += fabs(rounded[i] - at(in[t], b, i / 24, h, i % 24)) > 0;
                        attention_put(in[t], b, i / 24, h, i % 24, (float)rounded[i]);
                    }
                    free(rounded);
                }
            }
            CHECK_OK(ampi_cpu_attention(&cpu, &p.x, NULL));
            CHECK_OK(ampi_cpu_attention_backward(&cpu, &p.x, NULL));
            for (int t = 0; t < 4; t++) {
                different += memcmp(before[t], out[t]->data, (size_t)out[t]->count * 4) != 0;
                free(before[t]);
            }
            CHECK(changed > 1000);
            CHECK_EQ(different, 0);
            drop_problem(&p);
        }
    }
}

/* With every value 1, o is the sum of the rounded probabilities over the sum of the exact ones: 1 to fp32 accuracy in
   fp32, visibly not 1 in bf16. */
TEST(probabilities_are_rounded_to_the_compute_dtype) {
    for (int path = 1; path <= (int)attention_best_path(); path = AMPT_NEXT_PATH(path)) {
        double off[2] = {0, 0};
        for (int bf16 = 0; bf16 < 2; bf16++) {
            ampi_cpu cpu = attention_device((amp_cpu_path)path, 1);
            attention_problem p = make_problem(1, 1, 40, 70, 8, AMP_F32, bf16 ? AMP_BF16 : AMP_F32);
            for (int64_t j = 0; j < 70; j++) for (int64_t d = 0; d < 8; d++) attention_put(&p.v, 0, j, 0, d, 1.0f);
            CHECK_OK(ampi_cpu_attention(&cpu, &p.x, NULL));
            for (int64_t i = 0; i < 40; i++) off[bf16] = AMPI_MAX(off[bf16], fabs(at(&p.o, 0, i, 0, 0) - 1));
            drop_problem(&p);
        }
        CHECK_MSG(off[0] <= 80 * ATTENTION_U, "%g", off[0]);          /* two sums of 70 positive terms, and a division */
        CHECK_MSG(off[1] > 80 * ATTENTION_U && off[1] <= 1.0 / 256 + 80 * ATTENTION_U, "%g", off[1]);
    }
}

/* Hidden keys, and queries that see nothing, may hold anything: the visible results keep every bit. */
static void attention_poison(attention_problem *p, int64_t b, int64_t row, int is_key) {
    static const uint32_t bad[] = {0x7fc00000u, 0x7f800000u, 0xff800000u};
    for (int64_t h = 0; h < p->x.heads; h++) {
        for (int64_t d = 0; d < p->x.dim; d++) {
            float value = from_bits(bad[(d + row) % 3]);
            attention_put(is_key ? &p->k : &p->q, b, row, h, d, value);
            attention_put(is_key ? &p->v : &p->d_o, b, row, h, d, value);
        }
    }
}
TEST(hidden_infinities_do_not_leak) {
    for (int path = 1; path <= (int)attention_best_path(); path = AMPT_NEXT_PATH(path)) {
        for (int n = 0; n < 12; n++) {
            ampi_cpu cpu = attention_device((amp_cpu_path)path, 2);
            int64_t queries = 70, keys = n < 4 ? 70 : 100;
            attention_problem p = make_problem(2, 2, queries, keys, 9, attention_storages[n % 3], n % 4 == 3 ? AMP_BF16 : AMP_F32);
            amp_mask_kind kind = n % 2 ? AMP_MASK_ARBITRARY : (amp_mask_kind)(n / 2);
            p.x.mask = random_mask(kind, 1, n % 3, 2, 2, queries, keys);
            for (int64_t b = 0; b < 2; b++) {
                int64_t hide = 10 + pick(20);
                mask_room.lengths[b] = (int32_t)(keys - pick(12));
                for (int64_t i = 0; kind == AMP_MASK_ARBITRARY && i < 2 * 2 * queries; i++)
                    mask_room.allowed[i * keys + hide] = 0;
                if (kind == AMP_MASK_ARBITRARY) attention_poison(&p, b, hide, 1);
                for (int64_t j = mask_room.lengths[b]; j < keys; j++) attention_poison(&p, b, j, 1);
                for (int64_t i = 0; i < queries; i++) {
                    int any = 0;
                    for (int64_t h = 0; h < 2; h++)
                        for (int64_t j = 0; j < keys; j++) any |= sees(&p.x.mask, b, h, i, j, queries, keys);
                    if (!any) attention_poison(&p, b, i, 0);
                }
            }
            check_problem(&p, &cpu, "hidden infinities");
            drop_problem(&p);
        }
    }
}

/* Causal: the last key is NaN, which only the last query sees.  Its row is NaN, and no other. */
TEST(seen_nan_spoils_its_rows_only) {
    for (int path = 1; path <= (int)attention_best_path(); path = AMPT_NEXT_PATH(path)) {
        ampi_cpu cpu = attention_device((amp_cpu_path)path, 1);
        attention_problem p = make_problem(1, 1, 50, 50, 8, AMP_F32, AMP_F32);
        p.x.mask.kind = AMP_MASK_CAUSAL;
        for (int64_t d = 0; d < 8; d++) attention_put(&p.v, 0, 49, 0, d, from_bits(nan_bits));
        attention_put(&p.k, 0, 49, 0, 3, from_bits(nan_bits));
        CHECK_OK(ampi_cpu_attention(&cpu, &p.x, NULL));
        CHECK_OK(ampi_cpu_attention_backward(&cpu, &p.x, NULL));
        for (int64_t i = 0; i < 50; i++) {
            for (int64_t d = 0; d < 8; d++) {
                CHECK(attention_is_nan(at(&p.o, 0, i, 0, d)) == (i == 49));
                CHECK(attention_is_nan(at(&p.dq, 0, i, 0, d)) == (i == 49));
            }
        }
        drop_problem(&p);
    }
}

TEST(nothing_to_see) {
    ampi_cpu cpu = attention_device(attention_best_path(), 2);
    attention_problem p = make_problem(2, 2, 40, 40, 8, AMP_F16, AMP_F16);
    static const int32_t none[2] = {0, 0};
    int64_t wrong = 0;
    p.x.mask.lengths = none;
    CHECK_OK(ampi_cpu_attention(&cpu, &p.x, NULL));
    CHECK_OK(ampi_cpu_attention_backward(&cpu, &p.x, NULL));
    for (int64_t b = 0; b < 2; b++)
        for (int64_t i = 0; i < 40; i++)
            for (int64_t h = 0; h < 2; h++)
                for (int64_t d = 0; d < 8; d++)
                    wrong += fabs(at(&p.o, b, i, h, d)) + fabs(at(&p.dq, b, i, h, d)) + fabs(at(&p.dk, b, i, h,
                        d)) + fabs(at(&p.dv, b, i, h, d)) > 0;
    CHECK_EQ(wrong, 0);
    for (int i = 0; i < 160; i++) CHECK_EQ(bits_of(p.x.lse[i]), lowest_bits);
    p.x.lse = (float *)realloc(p.x.lse, 160 * sizeof(float));
    p.x.queries = 0;                                /* and nobody to look */
    CHECK_OK(ampi_cpu_attention(&cpu, &p.x, NULL));
    drop_problem(&p);
}

/* Scratch: the forward pass needs the same whatever the length, the backward pass at most twice for twice the length
   (one head of dk and dv); a table of queries x keys would need 4 times. */
static size_t scratch_of(int64_t length, int backward) {
    ampi_cpu cpu = attention_device(attention_best_path(), 1);
    attention_problem p = make_problem(1, 1, length, length, 16, AMP_F32, AMP_F32);
    amp_result r;
    memory_now = memory_peak = 0;
    r = backward ? ampi_cpu_attention_backward(&cpu, &p.x, NULL) : ampi_cpu_attention(&cpu, &p.x, NULL);
    CHECK_OK(r);
    CHECK_EQ(memory_now, 0);
    drop_problem(&p);
    return memory_peak;
}
TEST(scratch_grows_at_most_linearly) {
    for (int64_t n = 128; n <= 1024; n *= 2) {
        size_t forward = scratch_of(n, 0), backward = scratch_of(n, 1);
        CHECK_EQ(scratch_of(2 * n, 0), forward);
        CHECK_MSG(scratch_of(2 * n, 1) <= 2 * backward, "%zu bytes at %d", backward, (int)n);
        CHECK(forward > 0 && backward < (size_t)(n * n * 4) + 600000);
    }
}

/* ---- Softmax */

static double load(const void *data, amp_dtype dtype, int64_t i) {
    float f;
    ampi_convert_fast(&f, AMP_F32, ampi_at(data, dtype, i), dtype, 1, AMP_CPU_SCALAR);
    return (double)f;
}

/* One row against fp64; returns the largest error over its bound.  y: keys U for the sum, the score's own error, exp,
   the product with 1 / sum.  dx: from the stored y and dy. */
static double softmax_row(const amp_k_softmax *x, int64_t r, const float *in, const float *dy) {
    int64_t n = x->keys, b = r / (x->heads * x->queries), h = r / x->queries % x->heads, i = r % x->queries;
    double max = 0, sum = 0, total = 0, magnitude = 0, reach = 0, worst = 0;
    int any = 0;
    for (int64_t j = 0; j < n; j++) {
        double s = (double)x->scale * (double)in[r * n + j];
        if (!sees(&x->mask, b, h, i, j, x->queries, n)) continue;
        if (!any || s > max) max = s;
        if (fabs(s) > reach) reach = fabs(s);
        any = 1;
    }
    for (int64_t j = 0; j < n; j++)
        if (sees(&x->mask, b, h, i, j, x->queries, n)) sum += exp((double)x->scale * (double)in[r * n + j] - max);
    for (int64_t j = 0; j < n; j++) {
        int seen = sees(&x->mask, b, h, i, j, x->queries, n);
        double y = load(x->y, x->y_dtype, r * n + j), g = (double)dy[r * n + j];
        double e = seen ? exp((double)x->scale * (double)in[r * n + j] - max) / sum : 0;
        double bound = e * expm1((6 * reach + (double)n + 8) * ATTENTION_U), ratio;
        bound += attention_unit(x->y_dtype) * (e + bound) + attention_tiny(x->y_dtype);
        ratio = seen ? fabs(y - e) / bound : (fabs(y) > 0 ? 1e9 : 0);
        if (!is_finite(y)) ratio = 1e9;
        if (ratio > worst) worst = ratio;
        total += y * g;
        magnitude += fabs(y * g);
    }
    for (int64_t j = 0; j < n; j++) {
        double y = load(x->y, x->y_dtype, r * n + j), got = load(x->dx, x->x_dtype, r * n + j),
            g = (double)dy[r * n + j];
        double e = (double)x->scale * y * (g - total), bound, ratio;
        bound = fabs((double)x->scale * y) * (((double)n + 4) * ATTENTION_U * magnitude + 4 * ATTENTION_U * (fabs(g) + fabs(total)));
        bound += attention_unit(x->x_dtype) * (fabs(e) + bound) + attention_tiny(x->x_dtype);
        ratio = is_finite(got) ? fabs(got - e) / bound : 1e9;
        if (ratio > worst) worst = ratio;
    }
    return worst;
}

TEST(softmax_with_every_mask) {
    static const amp_dtype from[] = {AMP_F32, AMP_F16, AMP_BF16, AMP_F32, AMP_F16}, into[] = {AMP_F32, AMP_F16,
        AMP_BF16, AMP_BF16, AMP_F32};
    for (int n = 0; n < 120; n++) {
        ampi_cpu cpu = attention_device(attention_path(pick(attention_paths())), 1 + (int)pick(2));
        int64_t queries = sizes[pick(10)], keys = n % 3 ? sizes[pick(10)] : queries, count = 4 * queries * keys;
        amp_k_softmax x;
        float *in = (float *)malloc((size_t)count * 4), *dy = (float *)malloc((size_t)count * 4);
        void *room = malloc((size_t)count * 4), *grad = malloc((size_t)count * 4), *slope = malloc((size_t)count * 4);
        int pair = n % 5, in_place = n % 2 && from[pair] == into[pair];
        double worst = 0;
        memset(&x, 0, sizeof x);
        x.batch = 2; x.heads = 2; x.queries = queries; x.keys = keys;
        x.scale = n % 4 ? 1.0f : 0.3f;
        x.x_dtype = from[pair]; x.y_dtype = into[pair];
        x.mask = random_mask((amp_mask_kind)(n % 6), n / 6 % 2, n / 12 % 3, 2, 2, queries, keys);
        for (int64_t i = 0; i < count; i++) { in[i] = 3 * random_normal(); dy[i] = random_normal(); }
        ampi_convert_fast(room, x.x_dtype, in, AMP_F32, count, AMP_CPU_SCALAR);
        ampi_convert_fast(in, AMP_F32, room, x.x_dtype, count, AMP_CPU_SCALAR);
        ampi_convert_fast(slope, x.y_dtype, dy, AMP_F32, count, AMP_CPU_SCALAR);
        ampi_convert_fast(dy, AMP_F32, slope, x.y_dtype, count, AMP_CPU_SCALAR);
        x.x = room; x.y = in_place ? room : malloc((size_t)count * 4);
        x.dy = slope; x.dx = in_place ? slope : grad;
        CHECK_OK(ampi_cpu_softmax(&cpu, &x, NULL));
        CHECK_OK(ampi_cpu_softmax_backward(&cpu, &x, NULL));
        for (int64_t r = 0; r < 4 * queries; r++) {
            double ratio = softmax_row(&x, r, in, dy);
            if (ratio > worst) worst = ratio;
        }
        CHECK_MSG(worst <= 1, "case %d: q %d k %d mask %d, %s to %s, path %d: error over bound %.3g", n, (int)queries,
            (int)keys, n % 6,
                  amp_dtype_name(x.x_dtype), amp_dtype_name(x.y_dtype), (int)cpu.path, worst);
        if (!in_place) free(x.y);
        free(in); free(dy); free(room); free(grad); free(slope);
    }
}

TEST(softmax_of_special_values) {
    for (int path = 1; path <= (int)attention_best_path(); path = AMPT_NEXT_PATH(path)) {
        ampi_cpu cpu = attention_device((amp_cpu_path)path, 1);
        static const int32_t lengths[] = {20};
        float in[5][23], y[5][23];
        amp_k_softmax x;
        memset(&x, 0, sizeof x);
        for (int r = 0; r < 5; r++) for (int j = 0; j < 23; j++) in[r][j] = (float)(j % 7);
        in[0][3] = from_bits(lowest_bits);                              /* a seen -inf is a probability of 0 */
        for (int j = 0; j < 20; j++) in[1][j] = from_bits(lowest_bits);  /* nothing but -inf: zeros */
        in[2][5] = from_bits(nan_bits);                                 /* NaN spoils its row */
        in[3][21] = from_bits(nan_bits);                                /* unless it is hidden */
        in[4][6] = from_bits(inf_bits);                                 /* inf - inf */
        x.batch = x.heads = 1; x.queries = 5; x.keys = 23; x.scale = 1;
        x.x = in; x.y = y; x.x_dtype = x.y_dtype = AMP_F32;
        x.mask.lengths = lengths;
        CHECK_OK(ampi_cpu_softmax(&cpu, &x, NULL));
        CHECK_EQ(bits_of(y[0][3]), 0);
        for (int j = 0; j < 20; j++) {
            CHECK(is_finite((double)y[0][j]) && is_finite((double)y[3][j]) && y[3][j] > 0);
            CHECK_EQ(bits_of(y[1][j]), 0);
            CHECK(attention_is_nan((double)y[2][j]) && attention_is_nan((double)y[4][j]));
        }
        for (int r = 0; r < 5; r++) for (int j = 20; j < 23; j++) if (r != 2 && r != 4) CHECK_EQ(bits_of(y[r][j]), 0);
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
#if AMPI_X86
    _mm_setcsr(_mm_getcsr() & ~0x8040u);            /* libm's references need subnormals, which -Ofast switches off */
#endif
    RUN(functions_are_accurate);
    RUN(functions_at_their_seams);
    RUN(functions_of_special_values);
    RUN(every_dtype_and_path);
    RUN(odd_shapes);
    RUN(every_mask_and_combination);
    RUN(long_sparse_masks);
    RUN(packed_qkv);
    RUN(operands_are_rounded_to_the_compute_dtype);
    RUN(probabilities_are_rounded_to_the_compute_dtype);
    RUN(hidden_infinities_do_not_leak);
    RUN(seen_nan_spoils_its_rows_only);
    RUN(nothing_to_see);
    RUN(scratch_grows_at_most_linearly);
    RUN(softmax_with_every_mask);
    RUN(softmax_of_special_values);
    return TEST_END();
}
