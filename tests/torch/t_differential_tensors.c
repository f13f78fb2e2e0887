/* t_differential_tensors.c - compares operators, the scaler's check and the optimizers with PyTorch on random tensors.
 *
 *     t_differential_tensors [corpus]        default: tests/torch/golden/fuzz_tensors.bin
 *
 * tests/torch/oracle/fuzz_tensors.py wrote the corpus.  It has cases with 16 seeds each, and PyTorch's results.  The head
 * of that script says what is compared, and what PyTorch leaves undefined.  Inputs are made again from the same random
 * numbers.  A reference in fp64, written here, must agree with PyTorch's fp64 run through a random projection.  The errors
 * of amp.h against that reference are then measured element by element, on every path of this CPU.
 *
 * The bar is per output.  The root mean square over the seeds of the relative error (golden.h) may be 1.2 times the sum of
 * two terms:
 *   - PyTorch's own error, when it stores everything in the case's dtype.  If it is larger, the error of the fp64 result
 *     rounded once to the output's dtype is used instead, because no implementation can be better.  For gradients, which
 *     may cancel, that is the error of all gradients of that dtype.
 *   - The largest error over the seeds of the textbook formula with every operation rounded to fp32.  This allows fp32 sums
 *     in another order, and is negligible compared with 16-bit rounding.
 *
 * A finite sample adds an allowance.  The root mean square of n errors scatters by 1 / (2 sqrt n), and the ratio of two by
 * 0.7 / sqrt n.  Four times that is allowed.  This is much where a case has few errors, as with one key, whose gradient
 * PyTorch computes as exactly 0 on some processors.  In gradients, fp32's unit roundoff is not counted as an error.  Over
 * all cases of a family, dtype and region together, the 16-bit errors may be 1.2 times PyTorch's without any such
 * allowance.  Where PyTorch's own error is above 1/2, no digit is right, and nothing is compared. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "golden.h"
#include <math.h>

enum { SEEDS = 16, PATHS = 6, OUTPUTS = 16, RESULTS = 32, BLOCKS = 512, DTYPES = AMP_FP8 + 1, UNDEFINED = 9 };

/* ---- A case, and what is known of its outputs */

typedef struct field {                  /* a matrix: its storage with gaps between rows, and fp64 values without */
    amp_dtype dtype;
    int64_t rows, cols, ld;
    char *data;
    double *x;                          /* what went in, or what should come out ... */
    double *plain;                      /* ... and what the same formula gives in fp32 */
    int shared;                         /* 1: the gaps are others' rows */
} field;

typedef struct statistic {
    const char *name;
    amp_dtype dtype;
    double theirs, projection, norm;    /* of the corpus */
    const double *patterns[SEEDS];      /* [count, packed classes] per seed */
    double ours[PATHS], fourth[PATHS], rounded, plain, mine, square;
                                        /* sums over the seeds; fourth: of fourth powers; mine: the reference's projection */
} statistic;

typedef struct kase {
    const char *name;
    uint32_t base, seed;
    int s;
    const double *numbers;
    int64_t count, at;
    int outputs;
    statistic stat[OUTPUTS];
    const field *out[OUTPUTS];
    double layer_rounded[DTYPES];       /* all gradients of a dtype rounded once: sum over the seeds */
    amp_dtype dtype, region;            /* the storage; what the region computes in, 0: no region */
    int recipe, which, low, high, least, rare;
    int bitwise;                        /* 1: PyTorch's bits are promised, so its error to the last digit */
    int results;                        /* fields that a reference fills */
    double *result[RESULTS][2];         /* their x and plain */
    int64_t result_count[RESULTS];
    int used;
    void *blocks[BLOCKS];
} kase;

static amp_context *of_all[PATHS], **contexts = of_all;     /* by path */
static struct { int64_t elements, undefined, compared; } totals;
/* Of a family: the largest error over its bar; squares of 16-bit errors over PyTorch's, by dtype, region and path. */
typedef struct pooled { double sum, n; } pooled;
static pooled pools[DTYPES][DTYPES][PATHS];
static double over_bar;

/* The next number of the case's description. */
static double number(kase *k) {
    CHECK_MSG(k->at < k->count, "%s has too few numbers", k->name);
    return k->at < k->count ? k->numbers[k->at++] : 0;
}
static int64_t integer(kase *k) { return (int64_t)number(k); }
static int small(kase *k) { return (int)number(k); }

static void *room(kase *k, int64_t bytes) {
    void *p = malloc((size_t)bytes + 64);
    if (p == NULL || k->used == BLOCKS) { printf("out of memory\n"); exit(2); }
    memset(p, 0x5a, (size_t)bytes + 64);
    return k->blocks[k->used++] = p;
}

static double *numbers(kase *k, int64_t n) {
    double *x = (double *)room(k, 8 * n);
    for (int64_t i = 0; i < n; i++) x[i] = 0;
    return x;
}

static void *floats(kase *k, int64_t n) { return room(k, 4 * n); }

/* ---- Values */

static float special_value(const kase *k, uint32_t which) {
    int mantissa = k->dtype == AMP_F16 ? 10 : k->dtype == AMP_BF16 ? 7 : 23;
    double largest = ldexp(2 - ldexp(1, -mantissa), k->high), low = ldexp(1, k->low), least = ldexp(1, k->least), table[11];
    table[0] = 0; table[1] = -0.0; table[2] = HUGE_VAL; table[3] = -HUGE_VAL; table[4] = (double)NAN;
    table[5] = largest; table[6] = -largest; table[7] = low; table[8] = -low; table[9] = least; table[10] = low - least;
    return (float)table[which % 11];
}

/* A stream of the case's random numbers, as values() of the oracle. */
static void values(const kase *k, float *out, int64_t n, uint32_t stream, double scale, double shift) {
    enum { WIDE = 1, SPECIAL = 2, WIDE_SPECIAL = 3 };
    ampt_uniform(out, n, k->seed, stream, (float)scale, (float)shift);
    if (stream > 30 || !(k->which >> stream & 1)) return;
    for (int64_t i = 0; i < n; i++) {
        if (k->recipe == WIDE || k->recipe == WIDE_SPECIAL) {
            uint32_t w = ampt_word(k->seed, stream, i);
            uint64_t e = ((uint64_t)ampt_word(k->seed, stream + 64, i) * (uint64_t)(k->high - k->low)) >> 32;
            double magnitude = ldexp(1 + ldexp((double)(w & 0x7fffff), -23), (int)e + k->low);
            out[i] = (float)(w >> 31 ? -magnitude : magnitude);
        }
        if (k->recipe == SPECIAL || k->recipe == WIDE_SPECIAL) {
            uint32_t w = ampt_word(k->seed, stream + 128, i);
            if (w >> (32 - k->rare) == 0) out[i] = special_value(k, w & 0xffff);
        }
    }
}

static char *element(const field *f, int64_t row) { return f->data + row * f->ld * (int64_t)amp_dtype_size(f->dtype); }

/* Storage and fp64 values, with `gap` unused elements behind each row. */
static field empty(kase *k, int64_t rows, int64_t cols, int64_t gap, amp_dtype dtype) {
    field f;
    f.dtype = dtype; f.rows = rows; f.cols = cols; f.ld = cols + gap; f.shared = 0;
    f.data = (char *)room(k, rows * f.ld * (int64_t)amp_dtype_size(dtype));
    f.x = numbers(k, rows * cols);
    f.plain = NULL;
    return f;
}

/* What a reference fills. */
static field result(kase *k, int64_t rows, int64_t cols, int64_t gap, amp_dtype dtype) {
    field f = empty(k, rows, cols, gap, dtype);
    if (k->results == RESULTS) { printf("too many results\n"); exit(2); }
    f.plain = numbers(k, rows * cols);
    k->result[k->results][0] = f.x; k->result[k->results][1] = f.plain;
    k->result_count[k->results++] = rows * cols;
    return f;
}

/* 1 while a reference rounds every number to fp32. */
static int in_fp32;
static double r(double x) { return in_fp32 ? (double)(float)x : x; }

/* Runs a reference in fp32, one operation after the other as the formula is written, and then in fp64. */
static void refer(kase *k, void (*reference)(kase *k, void *arg), void *arg) {
    in_fp32 = 1;
    reference(k, arg);
    in_fp32 = 0;
    for (int i = 0; i < k->results; i++)
        for (int64_t j = 0; j < k->result_count[i]; j++) { k->result[i][1][j] = k->result[i][0][j]; k->result[i][0][j] = 0; }
    reference(k, arg);
}

static void store(const field *f, const float *from) {
    for (int64_t i = 0; i < f->rows; i++) {
        CHECK_OK(amp_convert(element(f, i), f->dtype, from + i * f->cols, AMP_F32, f->cols, NULL, NULL));
        CHECK_OK(amp_convert(f->x + i * f->cols, AMP_F64, element(f, i), f->dtype, f->cols, NULL, NULL));
    }
}

static void draw_into(kase *k, const field *f, uint32_t stream, double scale, double shift) {
    float *x = (float *)floats(k, f->rows * f->cols);
    values(k, x, f->rows * f->cols, stream, scale, shift);
    store(f, x);
}

static field draw(kase *k, uint32_t stream, int64_t rows, int64_t cols, int64_t gap, amp_dtype dtype, double scale, double shift) {
    field f = empty(k, rows, cols, gap, dtype);
    draw_into(k, &f, stream, scale, shift);
    return f;
}

static int32_t *draw_integers(kase *k, uint32_t stream, int64_t n, int64_t below) {
    int32_t *x = (int32_t *)floats(k, n);
    ampt_integers(x, n, k->seed, stream, (int32_t)below);
    return x;
}

/* An input's storage as it was drawn, for those a call overwrites. */
static void restore(const field *f) {
    for (int64_t i = 0; i < f->rows; i++) CHECK_OK(amp_convert(element(f, i), f->dtype, f->x + i * f->cols, AMP_F64, f->cols, NULL, NULL));
}

static amp_tensor view(const field *f) {
    amp_tensor t = amp_tensor2(f->data, f->dtype, f->rows, f->cols);
    t.stride[0] = f->ld; t.stride[1] = 1;
    return t;
}

static amp_param parameter(const field *w, const field *grad) {
    amp_param p;
    memset(&p, 0, sizeof p);
    p.name = "parameter";
    p.weight = w->rows == 1 ? amp_tensor1(w->data, w->dtype, w->cols) : amp_tensor2(w->data, w->dtype, w->rows, w->cols);
    p.grad = p.weight;
    p.grad.data = grad->data; p.grad.dtype = grad->dtype;
    return p;
}

/* ---- Errors */

/* 0 finite, 1 inf, 2 -inf, 3 NaN, by the bits: also right under -Ofast. */
static int class_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    if ((bits >> 52 & 0x7ff) != 0x7ff) return 0;
    return bits << 12 ? 3 : bits >> 63 ? 2 : 1;
}

static int class_at(const double *pattern, int64_t i) {
    if (pattern[0] <= 0) return 0;
    return (int)((uint64_t)pattern[1 + i / 26] >> (2 * (i % 26)) & 3);
}

typedef struct outcome { double *got, *rounded; char *fine; int64_t n; } outcome;

static void round_to(kase *k, amp_dtype dtype, double *to, const double *from, int64_t n) {
    char *narrow = (char *)room(k, 8 * n);
    CHECK_OK(amp_convert(narrow, dtype, from, AMP_F64, n, NULL, NULL));
    CHECK_OK(amp_convert(to, AMP_F64, narrow, dtype, n, NULL, NULL));
}

/* The numbers in an output, what they should be when rounded once, and which of them count: those on whose class PyTorch,
   fp64 and the plain formula agree.  Up to fp16's smallest number nothing is an error: what is left where sums cancel. */
static outcome take(kase *k, int at) {
    const field *f = k->out[at];
    const double *pattern = k->stat[at].patterns[k->s];
    outcome o;
    o.n = f->rows * f->cols;
    o.got = numbers(k, o.n); o.rounded = numbers(k, o.n); o.fine = (char *)room(k, o.n);
    double *plain = numbers(k, o.n);
    for (int64_t i = 0; i < f->rows; i++)
        CHECK_OK(amp_convert(o.got + i * f->cols, AMP_F64, element(f, i), f->dtype, f->cols, NULL, NULL));
    round_to(k, f->dtype, o.rounded, f->x, o.n);
    round_to(k, f->dtype, plain, f->plain, o.n);
    for (int64_t i = 0; i < o.n; i++) {
        int theirs = class_at(pattern, i), exact = class_of(o.rounded[i]);
        o.fine[i] = (char)(theirs != exact || class_of(plain[i]) != exact ? UNDEFINED : theirs);
        if (!k->bitwise && f->dtype == AMP_F16 && fabs(o.got[i] - f->x[i]) <= 0x1p-24) o.got[i] = f->x[i];
    }
    return o;
}

/* The slopes of GELU where its input, or a power of it, is infinite are 1 and 0 here; PyTorch, whose terms are infinity times
   0 there, has NaN.  Set by the reference of a case with such an input. */
static int slopes_at_infinity;
static int is_slope_at_infinity(const kase *k, const outcome *o, int64_t i) {
    return slopes_at_infinity && strncmp(k->name, "linear", 6) == 0 && o->fine[i] == class_of(NAN);
}

static void check_classes(const kase *k, int at, const outcome *o, int path) {
    for (int64_t i = 0; i < o->n; i++) {
        if (is_slope_at_infinity(k, o, i)) o->fine[i] = UNDEFINED;
        totals.undefined += o->fine[i] == UNDEFINED;
        if (o->fine[i] != UNDEFINED)
            CHECK_MSG(class_of(o->got[i]) == o->fine[i], "%s seed %d, path %d: %s[%lld] is %g, fp64 %g", k->name, k->s, path,
                      k->stat[at].name, (long long)i, o->got[i], k->out[at]->x[i]);
    }
    totals.elements += o->n;
}

static int is_gradient(const statistic *s) { return s->name[0] == 'd'; }

/* The part of the fp64 result that counts: square of its norm. */
static double square(const kase *k, int at, const outcome *o) {
    double sum = 0;
    for (int64_t i = 0; i < o->n; i++) if (o->fine[i] == 0) sum += k->out[at]->x[i] * k->out[at]->x[i];
    return sum;
}

/* The square of the relative error; *fourth: the sum of the fourth powers of the elements' shares in it. */
static double relative(const double *got, const double *exact, const outcome *o, double own, double floor_square, double *fourth) {
    double sum = 0;
    *fourth = 0;
    if (own < floor_square) own = floor_square;
    if (!(own > 0)) own = 1;
    for (int64_t i = 0; i < o->n; i++) {
        double d = (got[i] - exact[i]) * (got[i] - exact[i]) / own;
        if (o->fine[i] != 0) continue;
        sum += d;
        *fourth += d * d;
    }
    return class_of(sum) ? 1e60 : sum;
}

/* What is known of the reference's results: the projection and norm, and the errors of rounding them once and of the plain
   formula.  A gradient's rounding counts at least as that of its layer. */
static void measure_reference(kase *k, const outcome *o, const double *own, const double *at_least) {
    double layer[DTYPES] = {0}, size[DTYPES] = {0}, fourth;
    for (int i = 0; i < k->outputs; i++) {
        statistic *s = &k->stat[i];
        const double *exact = k->out[i]->x;
        double once = relative(o[i].rounded, exact, &o[i], own[i], at_least[i], &fourth), worst;
        if (is_gradient(s)) { layer[s->dtype] += once * (own[i] > at_least[i] ? own[i] : at_least[i]); size[s->dtype] += own[i]; }
        s->rounded += once;
        double *plain = numbers(k, o[i].n);
        for (int64_t j = 0; j < o[i].n; j++) plain[j] = class_of(k->out[i]->plain[j]) ? exact[j] : k->out[i]->plain[j];
        worst = relative(plain, exact, &o[i], own[i], at_least[i], &fourth);
        if (worst > s->plain) s->plain = worst;
        float *weights = (float *)floats(k, o[i].n);
        ampt_uniform(weights, o[i].n, k->seed, (uint32_t)(200 + i), 1, 0);
        for (int64_t j = 0; j < o[i].n; j++)
            if (class_of(exact[j]) == 0) { s->mine += (double)weights[j] * exact[j]; s->square += exact[j] * exact[j]; }
    }
    for (int i = 0; i < DTYPES; i++) k->layer_rounded[i] += size[i] > 0 ? layer[i] / size[i] : 0;
}

/* Adds what a path computed to the statistics; the first path also what belongs to the reference. */
static void measure(kase *k, int path, int first) {
    outcome o[OUTPUTS];
    double own[OUTPUTS], at_least[OUTPUTS], layer = 0, count = 0, fourth;
    for (int i = 0; i < k->outputs; i++) {
        o[i] = take(k, i);
        check_classes(k, i, &o[i], path);
        own[i] = square(k, i, &o[i]);
        if (is_gradient(&k->stat[i])) { layer += own[i]; count += (double)o[i].n; }
    }
    for (int i = 0; i < k->outputs; i++) {
        at_least[i] = is_gradient(&k->stat[i]) && count > 0 ? layer * (double)o[i].n / count : 0;
        k->stat[i].ours[path] += relative(o[i].got, k->out[i]->x, &o[i], own[i], at_least[i], &fourth);
        k->stat[i].fourth[path] += fourth;
    }
    if (first) measure_reference(k, o, own, at_least);
}

/* Nothing was written between the rows of an output. */
static void check_gaps(const kase *k, const field *f, const char *what) {
    int64_t size = (int64_t)amp_dtype_size(f->dtype), bad = 0;
    for (int64_t r = 0; r + 1 < f->rows && !f->shared; r++)
        for (int64_t j = f->cols * size; j < f->ld * size; j++) bad += (unsigned char)element(f, r)[j] != 0x5a;
    CHECK_MSG(bad == 0, "%s: %s: written between rows", k->name, what);
}

/* An output of this case; in the oracle's order. */
static void output(kase *k, const char *name, const field *f) {
    if (k->outputs == OUTPUTS) { printf("too many outputs\n"); exit(2); }
    k->stat[k->outputs].name = name;
    k->stat[k->outputs].dtype = f->dtype;
    k->out[k->outputs++] = f;
}

/* ---- Masks */

typedef struct mask_numbers { amp_mask m; int64_t lengths, documents, per_batch, per_head, density; } mask_numbers;

static mask_numbers read_mask(kase *k) {
    mask_numbers n;
    memset(&n, 0, sizeof n);
    n.m.kind = (amp_mask_kind)small(k); n.m.bidirectional = small(k); n.m.window = integer(k); n.m.global = integer(k);
    n.lengths = integer(k); n.documents = integer(k); n.per_batch = integer(k); n.per_head = integer(k); n.density = integer(k);
    return n;
}

static void sort(int32_t *x, int64_t n) {
    for (int64_t i = 1; i < n; i++)
        for (int64_t j = i; j > 0 && x[j] < x[j - 1]; j--) { int32_t t = x[j]; x[j] = x[j - 1]; x[j - 1] = t; }
}

static amp_mask make_mask(kase *k, const mask_numbers *n, int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
    amp_mask m = n->m;
    if (m.kind == AMP_MASK_PREFIX) m.prefix = draw_integers(k, 40, batch, keys + 2);
    if (m.kind == AMP_MASK_ARBITRARY) {
        int64_t all = (n->per_batch ? batch : 1) * (n->per_head ? heads : 1) * queries * keys;
        int32_t *drawn = draw_integers(k, 41, all, 4);
        uint8_t *allowed = (uint8_t *)room(k, all);
        for (int64_t i = 0; i < all; i++) allowed[i] = drawn[i] < n->density;
        m.allowed = allowed;
        m.allowed_head_stride = n->per_head ? queries * keys : 0;
        m.allowed_batch_stride = n->per_batch ? queries * keys * (n->per_head ? heads : 1) : 0;
    }
    if (n->lengths) m.lengths = draw_integers(k, 42, batch, keys + 2);
    if (n->documents) {
        int32_t *documents = draw_integers(k, 43, batch * keys, 3);
        for (int64_t b = 0; b < batch && n->documents == 2; b++) sort(documents + b * keys, keys);
        m.documents = documents;
    }
    return m;
}

/* From the words of amp_mask. */
static int sees(const amp_mask *m, int64_t b, int64_t h, int64_t i, int64_t j, int64_t queries, int64_t keys) {
    int64_t at = i + keys - queries, distance = at > j ? at - j : j - at;
    int causal = j <= at;
    if (m->lengths && j >= m->lengths[b]) return 0;
    if (m->documents && m->documents[b * keys + j] != m->documents[b * keys + at]) return 0;
    if (m->kind == AMP_MASK_CAUSAL) return causal;
    if (m->kind == AMP_MASK_PREFIX) return causal || j < m->prefix[b];
    if (m->kind == AMP_MASK_ARBITRARY) return m->allowed[b * m->allowed_batch_stride + h * m->allowed_head_stride + i * keys + j] != 0;
    if (m->kind == AMP_MASK_NONE) return 1;
    if (!m->bidirectional && !causal) return 0;
    return distance < m->window || (m->kind == AMP_MASK_WINDOW_GLOBAL && (j < m->global || (at >= 0 && at < m->global)));
}

/* ---- Running on every path */

static void end_seed(kase *k) {
    while (k->used > 0) free(k->blocks[--k->used]);
    k->outputs = k->results = 0;
}

typedef void (*call)(kase *k, amp_context *amp, void *arg);

static void on_every_path(kase *k, call f, void *arg) {
    int first = 1;
    for (int path = 1; path < PATHS; path++) {
        if (contexts[path] == NULL) continue;
        f(k, contexts[path], arg);
        measure(k, path, first);
        for (int i = 0; i < k->outputs; i++) check_gaps(k, k->out[i], k->stat[i].name);
        first = 0;
    }
}

static void region_begin(amp_context *amp, amp_dtype dtype) {
    amp_autocast_desc d;
    if (dtype == AMP_DTYPE_DEFAULT) return;
    memset(&d, 0, sizeof d);
    d.dtype = dtype;
    CHECK_OK(amp_autocast_begin(amp, &d));
}

static void region_end(amp_context *amp, amp_dtype dtype) {
    if (dtype != AMP_DTYPE_DEFAULT) CHECK_OK(amp_autocast_end(amp));
}

static amp_dtype read_dtype(kase *k) { return (amp_dtype)small(k); }

/* The numbers that most cases end with. */
static void read_recipe(kase *k) {
    k->recipe = small(k); k->which = small(k); k->low = small(k); k->high = small(k); k->least = small(k); k->rare = small(k);
}

/* ---- Products in fp64 */

/* c[i][j] += sum over p of a[i][p] b[p][j]; steps: of a by i and p, of b by p and j. */
static void multiply(double *c, const double *a, const double *b, int64_t m, int64_t n, int64_t k,
                     int64_t ai, int64_t ap, int64_t bp, int64_t bj, double alpha) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t p = 0; p < k; p++) sum = r(sum + r(a[i * ai + p * ap] * b[p * bp + j * bj]));
            c[i * n + j] = r(c[i * n + j] + r(alpha * sum));
        }
}

/* sqrt(2 / pi) (x + 0.044715 x^3) */
static double gelu_argument(double x) { return r(0.79788456080286536 * r(x + r(0.044715 * r(x * r(x * x))))); }

static double act_value(amp_activation_kind act, double x) {
    if (act == AMP_ACT_GELU) return r(r(0.5 * x) * r(1 + r(tanh(gelu_argument(x)))));
    if (act == AMP_ACT_GELU_ERF) return r(r(0.5 * x) * r(1 + r(erf(r(x * 0.70710678118654752)))));
    return act == AMP_ACT_RELU && x < 0 ? 0 : x;
}

static double act_slope(amp_activation_kind act, double x) {
    if (act == AMP_ACT_GELU) {
        double t = r(tanh(gelu_argument(x))), inner = r(0.79788456080286536 * r(1 + r(3 * 0.044715 * r(x * x))));
        return r(r(0.5 * r(1 + t)) + r(r(r(0.5 * x) * r(1 - r(t * t))) * inner));
    }
    if (act == AMP_ACT_GELU_ERF)
        return r(r(0.5 * r(1 + r(erf(r(x * 0.70710678118654752))))) + r(r(x * r(exp(r(-0.5 * r(x * x))))) * 0.39894228040143268));
    return act == AMP_ACT_RELU && x <= 0 ? 0 : 1;
}

/* ---- linear */

typedef struct linear {
    amp_dtype region;
    amp_activation_kind act;
    int bias;
    field x, w, b, dy, y, pre, dx, dw, db;
} linear;

static void linear_reference(kase *k, void *arg) {
    linear *l = (linear *)arg;
    int64_t n = l->x.rows, in = l->x.cols, out = l->w.rows;
    double *dz = numbers(k, n * out);
    multiply(l->pre.x, l->x.x, l->w.x, n, out, in, in, 1, 1, in, 1);
    slopes_at_infinity = 0;
    for (int64_t i = 0; i < n * out; i++) {
        slopes_at_infinity |= (l->act == AMP_ACT_GELU || l->act == AMP_ACT_GELU_ERF) && !(fabs(l->pre.x[i]) < 1e4);
        if (l->bias) l->pre.x[i] = r(l->pre.x[i] + l->b.x[i % out]);
        l->y.x[i] = act_value(l->act, l->pre.x[i]);
        dz[i] = l->act ? r(l->dy.x[i] * act_slope(l->act, l->pre.x[i])) : l->dy.x[i];
        if (l->act == AMP_ACT_RELU && l->pre.x[i] <= 0) dz[i] = 0;
        l->db.x[i % out] = r(l->db.x[i % out] + dz[i]);
    }
    multiply(l->dx.x, dz, l->w.x, n, in, out, out, 1, in, 1, 1);
    multiply(l->dw.x, dz, l->x.x, out, in, n, 1, out, in, 1, 1);
}

static void linear_call(kase *k, amp_context *amp, void *arg) {
    linear *l = (linear *)arg;
    amp_param w = parameter(&l->w, &l->dw), b = parameter(&l->b, &l->db);
    amp_linear_op op;
    (void)k;
    w.weight.ndim = w.grad.ndim = 2;
    w.weight.shape[0] = w.grad.shape[0] = l->w.rows; w.weight.shape[1] = w.grad.shape[1] = l->w.cols;
    memset(&op, 0, sizeof op);
    restore(&l->dy);
    op.x = view(&l->x); op.y = view(&l->y);
    if (l->act) op.pre = view(&l->pre);
    op.weight = &w; op.bias = l->bias ? &b : NULL;
    op.act = l->act;
    region_begin(amp, l->region);
    CHECK_OK(amp_linear(amp, &op));
    region_end(amp, l->region);
    op.dy = view(&l->dy); op.dx = view(&l->dx);
    CHECK_OK(amp_linear_backward(amp, &op));
}

/* The rest of a case whose kind is read. */
static void finish_linear(kase *k, linear *l, int64_t rows, int64_t in, int64_t out, int64_t gap, double scale) {
    l->x = draw(k, 0, rows, in, gap, k->dtype, scale, 0);
    l->w = draw(k, 1, out, in, 0, k->dtype, 1, 0);
    l->b = draw(k, 2, 1, out, 0, k->dtype, 1, 0);
    l->dy = draw(k, 3, rows, out, l->act ? 0 : gap, k->dtype, 1, 0);   /* amp.h rewrites it in place */
    l->y = result(k, rows, out, gap, k->dtype); l->pre = result(k, rows, out, 0, k->dtype);
    l->dx = result(k, rows, in, gap, k->dtype); l->dw = result(k, out, in, 0, k->dtype); l->db = result(k, 1, out, 0, k->dtype);
    refer(k, linear_reference, l);
    output(k, "y", &l->y); output(k, "dx", &l->dx); output(k, "dw", &l->dw);
    if (l->bias) output(k, "db", &l->db);
    on_every_path(k, linear_call, l);
}

static void run_linear(kase *k) {
    linear l;
    k->dtype = read_dtype(k); l.region = k->region = read_dtype(k);
    int64_t rows = integer(k), in = integer(k), out = integer(k), gap;
    double scale;
    l.bias = small(k); l.act = (amp_activation_kind)small(k); gap = integer(k); scale = number(k);
    read_recipe(k);
    finish_linear(k, &l, rows, in, out, gap, scale);
}

/* ---- linear in fp8 */

static void open_contexts(amp_context **opened, const amp_fp8_recipe *recipe);

static amp_context *of_recipe[AMP_FP8_MX + 1][AMP_FP8_E4M3 + 1][PATHS];

/* Contexts of a recipe, opened when it first comes. */
static amp_context **contexts_of(amp_fp8_scaling scaling, amp_fp8_format format) {
    amp_fp8_recipe recipe;
    memset(&recipe, 0, sizeof recipe);
    recipe.scaling = scaling; recipe.format = format;
    if (of_recipe[scaling][format][1] == NULL) open_contexts(of_recipe[scaling][format], &recipe);
    return of_recipe[scaling][format];
}

static void run_fp8(kase *k) {
    linear l;
    k->dtype = read_dtype(k); l.region = k->region = AMP_FP8;
    amp_fp8_scaling scaling = (amp_fp8_scaling)small(k);
    amp_fp8_format format = (amp_fp8_format)small(k);
    int64_t rows = integer(k), in = integer(k), out = integer(k);
    l.bias = small(k); l.act = (amp_activation_kind)small(k);
    read_recipe(k);
    contexts = contexts_of(scaling, format);
    finish_linear(k, &l, rows, in, out, 0, 1);
    contexts = of_all;
}

/* ---- matmul */

typedef struct matmul {
    amp_dtype region;
    int64_t batch, m, n, k;
    int trans_a, trans_b;
    double alpha;
    field a, b, dy, y, da, db;
} matmul;

static void matmul_reference(kase *k_, void *arg) {
    matmul *p = (matmul *)arg;
    int64_t m = p->m, n = p->n, k = p->k;
    int64_t ai = p->trans_a ? 1 : k, ap = p->trans_a ? m : 1, bp = p->trans_b ? 1 : n, bj = p->trans_b ? k : 1;
    (void)k_;
    for (int64_t g = 0; g < p->batch; g++) {
        const double *a = p->a.x + g * m * k, *b = p->b.x + g * k * n, *dy = p->dy.x + g * m * n;
        multiply(p->y.x + g * m * n, a, b, m, n, k, ai, ap, bp, bj, p->alpha);
        if (p->trans_a) multiply(p->da.x + g * m * k, b, dy, k, m, n, bp, bj, 1, n, p->alpha);
        else multiply(p->da.x + g * m * k, dy, b, m, k, n, n, 1, bj, bp, p->alpha);
        if (p->trans_b) multiply(p->db.x + g * k * n, dy, a, n, k, m, 1, n, ai, ap, p->alpha);
        else multiply(p->db.x + g * k * n, a, dy, k, n, m, ap, ai, n, 1, p->alpha);
    }
}

static amp_tensor stacked(const field *f, int64_t batch) { return amp_tensor3(f->data, f->dtype, batch, f->rows / batch, f->cols); }

static void matmul_call(kase *k, amp_context *amp, void *arg) {
    matmul *p = (matmul *)arg;
    amp_matmul_op op;
    (void)k;
    memset(&op, 0, sizeof op);
    op.a = stacked(&p->a, p->batch); op.b = stacked(&p->b, p->batch); op.y = stacked(&p->y, p->batch);
    op.trans_a = p->trans_a; op.trans_b = p->trans_b; op.alpha = (float)p->alpha;
    region_begin(amp, p->region);
    CHECK_OK(amp_matmul(amp, &op));
    region_end(amp, p->region);
    op.dy = stacked(&p->dy, p->batch); op.da = stacked(&p->da, p->batch); op.db = stacked(&p->db, p->batch);
    CHECK_OK(amp_matmul_backward(amp, &op));
}

static void run_matmul(kase *k) {
    matmul p;
    k->dtype = read_dtype(k); p.region = k->region = read_dtype(k);
    p.batch = integer(k); p.m = integer(k); p.n = integer(k); p.k = integer(k);
    p.trans_a = small(k); p.trans_b = small(k); p.alpha = number(k);
    read_recipe(k);
    int64_t ar = p.batch * (p.trans_a ? p.k : p.m), ac = p.trans_a ? p.m : p.k;
    int64_t br = p.batch * (p.trans_b ? p.n : p.k), bc = p.trans_b ? p.k : p.n;
    p.a = draw(k, 0, ar, ac, 0, k->dtype, 1, 0); p.b = draw(k, 1, br, bc, 0, k->dtype, 1, 0);
    p.dy = draw(k, 2, p.batch * p.m, p.n, 0, k->dtype, 1, 0);
    p.y = result(k, p.batch * p.m, p.n, 0, k->dtype);
    p.da = result(k, ar, ac, 0, k->dtype); p.db = result(k, br, bc, 0, k->dtype);
    refer(k, matmul_reference, &p);
    output(k, "y", &p.y); output(k, "da", &p.da); output(k, "db", &p.db);
    on_every_path(k, matmul_call, &p);
}

/* ---- gemm */

typedef struct gemm {
    amp_dtype region;
    int columns, trans_a, trans_b;
    int64_t m, n, k;
    float alpha, beta;
    field a, b, c, y;
} gemm;

/* The stored matrix, row-major in the oracle, as amp_gemm is given it: by columns where that is the order. */
static void in_order(kase *k, field *f, int columns, int64_t gap) {
    float *x = (float *)floats(k, f->rows * f->cols);
    if (!columns) return;
    for (int64_t i = 0; i < f->rows; i++)
        for (int64_t j = 0; j < f->cols; j++) x[j * f->rows + i] = (float)f->x[i * f->cols + j];
    *f = empty(k, f->cols, f->rows, gap, f->dtype);
    store(f, x);
}

static const float *matrix(const field *f) { return (const float *)(const void *)f->data; }
static int64_t leading(const field *f) { return f->ld > 0 ? f->ld : 1; }

static void gemm_reference(kase *k, void *arg) {
    gemm *g = (gemm *)arg;
    int64_t m = g->m, n = g->n, p = g->k;
    (void)k;
    multiply(g->y.x, g->a.x, g->b.x, m, n, p, g->trans_a ? 1 : p, g->trans_a ? m : 1, g->trans_b ? 1 : n, g->trans_b ? p : 1, 1);
    for (int64_t i = 0; i < m * n; i++) {
        g->y.x[i] = r((double)g->alpha * g->y.x[i]);
        if (g->beta < 0 || g->beta > 0) g->y.x[i] = r(g->y.x[i] + r((double)g->beta * g->c.x[i]));
    }
}

static void gemm_call(kase *k, amp_context *amp, void *arg) {
    gemm *g = (gemm *)arg;
    restore(&g->c);
    region_begin(amp, g->region);
    CHECK_OK(amp_gemm(amp, g->columns ? AMP_COL_MAJOR : AMP_ROW_MAJOR, g->trans_a ? AMP_TRANS : AMP_NO_TRANS,
                      g->trans_b ? AMP_TRANS : AMP_NO_TRANS, g->m, g->n, g->k, g->alpha, matrix(&g->a), leading(&g->a),
                      matrix(&g->b), leading(&g->b), g->beta, (float *)(void *)g->c.data, leading(&g->c)));
    region_end(amp, g->region);
    check_gaps(k, &g->c, "c");
    for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++)
            memcpy(element(&g->y, i) + 4 * j, matrix(&g->c) + (g->columns ? j * g->c.ld + i : i * g->c.ld + j), 4);
}

static void run_gemm(kase *k) {
    gemm g;
    k->dtype = read_dtype(k); g.region = k->region = read_dtype(k);
    g.columns = small(k); g.trans_a = small(k); g.trans_b = small(k);
    g.m = integer(k); g.n = integer(k); g.k = integer(k);
    g.alpha = (float)number(k); g.beta = (float)number(k);
    int64_t gap = integer(k), m = g.m, n = g.n, p = g.k;
    read_recipe(k);
    g.a = draw(k, 0, g.trans_a ? p : m, g.trans_a ? m : p, gap, AMP_F32, 1, 0);
    g.b = draw(k, 1, g.trans_b ? n : p, g.trans_b ? p : n, gap, AMP_F32, 1, 0);
    g.c = draw(k, 2, m, n, gap, AMP_F32, 1, 0);
    g.y = result(k, m, n, 0, AMP_F32);
    refer(k, gemm_reference, &g);
    in_order(k, &g.a, g.columns, gap); in_order(k, &g.b, g.columns, gap); in_order(k, &g.c, g.columns, gap);
    output(k, "c", &g.y);
    on_every_path(k, gemm_call, &g);
}

/* ---- norms */

typedef struct norm {
    int rms, residual, weight, bias, dsum;
    float eps, *mean, *rstd;
    field x, r, w, b, dy, ds, y, sum, dx, dw, db;
} norm;

static void norm_row(norm *o, int64_t i) {
    int64_t n = o->x.cols, at = i * n;
    const double *dy = o->dy.x + at;
    double *sum = o->sum.x + at, mean = 0, variance = 0, rstd, a = 0, c = 0, count = (double)n;
    for (int64_t j = 0; j < n; j++) sum[j] = o->residual ? r(o->x.x[at + j] + o->r.x[at + j]) : o->x.x[at + j];
    for (int64_t j = 0; j < n && !o->rms; j++) mean = r(mean + sum[j]);
    mean = r(mean / count);
    for (int64_t j = 0; j < n; j++) { double d = r(sum[j] - mean); variance = r(variance + r(d * d)); }
    rstd = r(1 / r(sqrt(r(r(variance / count) + (double)o->eps))));
    for (int64_t j = 0; j < n; j++) {
        double hat = r(r(sum[j] - mean) * rstd), w = o->weight ? o->w.x[j] : 1, g = r(dy[j] * w);
        o->y.x[at + j] = r(r(hat * w) + (o->bias ? o->b.x[j] : 0));
        o->dw.x[j] = r(o->dw.x[j] + r(dy[j] * hat));
        o->db.x[j] = r(o->db.x[j] + dy[j]);
        a = r(a + g);
        c = r(c + r(g * hat));
    }
    a = o->rms ? 0 : r(a / count);
    c = r(c / count);
    for (int64_t j = 0; j < n; j++) {
        double hat = r(r(sum[j] - mean) * rstd), g = r(dy[j] * (o->weight ? o->w.x[j] : 1));
        o->dx.x[at + j] = r(r(rstd * r(r(g - a) - r(hat * c))) + (o->dsum ? o->ds.x[at + j] : 0));
    }
}

static void norm_reference(kase *k, void *arg) {
    norm *o = (norm *)arg;
    (void)k;
    for (int64_t i = 0; i < o->x.rows; i++) norm_row(o, i);
}

static void norm_call(kase *k, amp_context *amp, void *arg) {
    norm *o = (norm *)arg;
    amp_param w = parameter(&o->w, &o->dw), b = parameter(&o->b, &o->db);
    amp_norm_op op;
    (void)k;
    memset(&op, 0, sizeof op);
    op.x = view(&o->x); op.y = view(&o->y);
    if (o->residual) { op.residual = view(&o->r); op.sum = view(&o->sum); }
    op.weight = o->weight ? &w : NULL; op.bias = o->bias ? &b : NULL;
    op.eps = o->eps; op.mean = o->mean; op.rstd = o->rstd;
    CHECK_OK(o->rms ? amp_rmsnorm(amp, &op) : amp_layernorm(amp, &op));
    op.dy = view(&o->dy); op.dx = view(&o->dx);
    if (o->dsum) op.dsum = view(&o->ds);
    CHECK_OK(o->rms ? amp_rmsnorm_backward(amp, &op) : amp_layernorm_backward(amp, &op));
}

static void run_norm(kase *k) {
    norm o;
    k->dtype = read_dtype(k);
    amp_dtype weights = small(k) ? AMP_F32 : k->dtype;
    o.rms = small(k);
    int64_t rows = integer(k), cols = integer(k);
    o.residual = small(k); o.weight = small(k); o.bias = small(k); o.eps = (float)number(k); o.dsum = small(k);
    int64_t gap = integer(k);
    double scale = number(k), shift = number(k);
    read_recipe(k);
    o.x = draw(k, 0, rows, cols, gap, k->dtype, scale, shift); o.r = draw(k, 1, rows, cols, 0, k->dtype, scale, 0);
    o.w = draw(k, 2, 1, cols, 0, weights, 0.5, 1); o.b = draw(k, 3, 1, cols, 0, weights, 1, 0);
    o.dy = draw(k, 4, rows, cols, 0, k->dtype, 1, 0); o.ds = draw(k, 5, rows, cols, gap, k->dtype, 1, 0);
    o.y = result(k, rows, cols, gap, k->dtype); o.sum = result(k, rows, cols, gap, k->dtype); o.dx = result(k, rows, cols, gap, k->dtype);
    o.dw = result(k, 1, cols, 0, weights); o.db = result(k, 1, cols, 0, weights);
    o.mean = (float *)floats(k, rows); o.rstd = (float *)floats(k, rows);
    refer(k, norm_reference, &o);
    output(k, "y", &o.y);
    if (o.residual) output(k, "sum", &o.sum);
    output(k, "dx", &o.dx);
    if (o.weight) output(k, "dweight", &o.dw);
    if (o.bias) output(k, "dbias", &o.db);
    on_every_path(k, norm_call, &o);
}

/* ---- softmax and attention */

/* p = softmax of the scores that are seen; zeros where none is. */
static void softmax_row(double *p, const double *score, const char *seen, int64_t keys) {
    double most = -HUGE_VAL, sum = 0;
    int nan = 0, any = 0;
    for (int64_t j = 0; j < keys; j++) {
        if (!seen[j]) continue;
        any |= class_of(score[j]) != 2;
        nan |= class_of(score[j]) == 3;
        if (score[j] > most) most = score[j];
    }
    for (int64_t j = 0; j < keys; j++) p[j] = seen[j] && any ? nan ? (double)NAN : r(exp(r(score[j] - most))) : 0;
    for (int64_t j = 0; j < keys; j++) sum = r(sum + p[j]);
    for (int64_t j = 0; j < keys && any; j++) p[j] = seen[j] ? r(p[j] / sum) : 0;
}

static int spoiled(const double *p, int64_t n) {
    for (int64_t j = 0; j < n; j++) if (class_of(p[j])) return 1;
    return 0;
}

typedef struct softmax {
    int64_t batch, heads, queries, keys;
    double scale;
    int in_place;
    mask_numbers numbers;
    amp_mask mask;
    field x, y, dy, dx;
} softmax;

static void softmax_reference(kase *k, void *arg) {
    softmax *o = (softmax *)arg;
    char *seen = (char *)room(k, o->keys);
    double *score = numbers(k, o->keys);
    for (int64_t row = 0; row < o->x.rows; row++) {
        int64_t i = row % o->queries, h = row / o->queries % o->heads, b = row / o->queries / o->heads, at = row * o->keys;
        double *p = o->y.x + at, *dx = o->dx.x + at, dot = 0;
        const double *dy = o->dy.x + at;
        for (int64_t j = 0; j < o->keys; j++) {
            seen[j] = (char)sees(&o->mask, b, h, i, j, o->queries, o->keys);
            score[j] = r(o->scale * o->x.x[at + j]);
        }
        softmax_row(p, score, seen, o->keys);
        for (int64_t j = 0; j < o->keys; j++) if (seen[j]) dot = r(dot + r(p[j] * dy[j]));
        for (int64_t j = 0; j < o->keys; j++)
            dx[j] = seen[j] ? r(o->scale * r(p[j] * r(dy[j] - dot))) : spoiled(p, o->keys) ? (double)NAN : 0;
    }
}

static amp_tensor four(const field *f, const softmax *o) { return amp_tensor4(f->data, f->dtype, o->batch, o->heads, o->queries, o->keys); }

static void softmax_call(kase *k, amp_context *amp, void *arg) {
    softmax *o = (softmax *)arg;
    amp_softmax_op op;
    (void)k;
    memset(&op, 0, sizeof op);
    if (o->in_place) memcpy(o->y.data, o->x.data, (size_t)(o->x.rows * o->x.ld) * amp_dtype_size(o->x.dtype));
    op.x = o->in_place ? four(&o->y, o) : four(&o->x, o);
    op.y = four(&o->y, o);
    op.scale = (float)o->scale; op.mask = o->mask;
    CHECK_OK(amp_softmax(amp, &op));
    if (o->in_place) memcpy(o->dx.data, o->dy.data, (size_t)(o->x.rows * o->x.ld) * amp_dtype_size(o->x.dtype));
    op.dy = o->in_place ? four(&o->dx, o) : four(&o->dy, o);
    op.dx = four(&o->dx, o);
    CHECK_OK(amp_softmax_backward(amp, &op));
}

static void run_softmax(kase *k) {
    softmax o;
    k->dtype = read_dtype(k);
    o.batch = integer(k); o.heads = integer(k); o.queries = integer(k); o.keys = integer(k);
    o.scale = number(k); o.in_place = small(k);
    o.numbers = read_mask(k);
    read_recipe(k);
    int64_t rows = o.batch * o.heads * o.queries;
    o.x = draw(k, 0, rows, o.keys, 0, k->dtype, 4, 0); o.dy = draw(k, 1, rows, o.keys, 0, k->dtype, 1, 0);
    o.y = result(k, rows, o.keys, 0, k->dtype); o.dx = result(k, rows, o.keys, 0, k->dtype);
    o.mask = make_mask(k, &o.numbers, o.batch, o.heads, o.queries, o.keys);
    refer(k, softmax_reference, &o);
    output(k, "y", &o.y); output(k, "dx", &o.dx);
    on_every_path(k, softmax_call, &o);
}

typedef struct attention {
    amp_dtype region;
    int64_t batch, heads, queries, keys, dim;
    double scale;
    mask_numbers numbers;
    amp_mask mask;
    float *lse;
    field q, k, v, d_o, o, dq, dk, dv;
} attention;

/* One query of one head: its output, and what it adds to the gradients. */
static void attention_query(attention *a, int64_t b, int64_t h, int64_t i, char *seen, double *score, double *p) {
    int64_t d = a->dim, step = a->heads * d, own = (b * a->queries + i) * step + h * d;
    double factor = class_of(a->scale) || a->scale > 0 ? a->scale : 1 / sqrt((double)d), dot = 0;
    for (int64_t j = 0; j < a->keys; j++) {
        const double *key = a->k.x + (b * a->keys + j) * step + h * d;
        seen[j] = (char)sees(&a->mask, b, h, i, j, a->queries, a->keys);
        score[j] = 0;
        for (int64_t c = 0; c < d; c++) score[j] = r(score[j] + r(a->q.x[own + c] * key[c]));
        score[j] = r(factor * score[j]);
    }
    softmax_row(p, score, seen, a->keys);
    for (int64_t j = 0; j < a->keys; j++) {
        int64_t at = (b * a->keys + j) * step + h * d;
        if (!seen[j]) continue;
        score[j] = 0;
        for (int64_t c = 0; c < d; c++) {
            a->o.x[own + c] = r(a->o.x[own + c] + r(p[j] * a->v.x[at + c]));
            a->dv.x[at + c] = r(a->dv.x[at + c] + r(p[j] * a->d_o.x[own + c]));
            score[j] = r(score[j] + r(a->d_o.x[own + c] * a->v.x[at + c]));
        }
    }
    for (int64_t c = d - 1; c >= 0; c--) dot = r(dot + r(a->d_o.x[own + c] * a->o.x[own + c]));      /* from the end: no luck */
    for (int64_t j = 0; j < a->keys; j++) {
        int64_t at = (b * a->keys + j) * step + h * d;
        double ds = r(factor * r(p[j] * r(score[j] - dot)));
        for (int64_t c = 0; c < d && seen[j]; c++) {
            a->dq.x[own + c] = r(a->dq.x[own + c] + r(ds * a->k.x[at + c]));
            a->dk.x[at + c] = r(a->dk.x[at + c] + r(ds * a->q.x[own + c]));
        }
    }
}

static void attention_reference(kase *k, void *arg) {
    attention *a = (attention *)arg;
    char *seen = (char *)room(k, a->keys);
    double *score = numbers(k, a->keys), *p = numbers(k, a->keys);
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t h = 0; h < a->heads; h++)
            for (int64_t i = 0; i < a->queries; i++) attention_query(a, b, h, i, seen, score, p);
}

static amp_tensor heads_of(const field *f, const attention *a, int64_t positions) {
    amp_tensor t = amp_tensor4(f->data, f->dtype, a->batch, positions, a->heads, a->dim);
    t.stride[0] = positions * f->ld; t.stride[1] = f->ld; t.stride[2] = a->dim; t.stride[3] = 1;
    return t;
}

static void attention_call(kase *k, amp_context *amp, void *arg) {
    attention *a = (attention *)arg;
    amp_attention_op op;
    (void)k;
    memset(&op, 0, sizeof op);
    op.q = heads_of(&a->q, a, a->queries); op.k = heads_of(&a->k, a, a->keys);
    op.v = heads_of(&a->v, a, a->keys); op.o = heads_of(&a->o, a, a->queries);
    op.lse = a->lse; op.scale = (float)a->scale; op.mask = a->mask;
    region_begin(amp, a->region);
    CHECK_OK(amp_attention(amp, &op));
    region_end(amp, a->region);
    op.d_o = heads_of(&a->d_o, a, a->queries); op.dq = heads_of(&a->dq, a, a->queries);
    op.dk = heads_of(&a->dk, a, a->keys); op.dv = heads_of(&a->dv, a, a->keys);
    CHECK_OK(amp_attention_backward(amp, &op));
}

/* q, k and v, or their gradients, as parts of one buffer [batch, position, 3, heads, dim]. */
static void pack(kase *k, field *q, field *key, field *v) {
    field all = empty(k, q->rows, 3 * q->cols, 0, q->dtype);
    int64_t size = (int64_t)amp_dtype_size(q->dtype);
    field *parts[3];
    parts[0] = q; parts[1] = key; parts[2] = v;
    for (int64_t i = 0; i < 3; i++) {
        parts[i]->ld = all.ld; parts[i]->shared = 1;
        parts[i]->data = all.data + i * q->cols * size;
        restore(parts[i]);
    }
}

static void run_attention(kase *k) {
    attention a;
    k->dtype = read_dtype(k); a.region = k->region = read_dtype(k);
    a.batch = integer(k); a.heads = integer(k); a.queries = integer(k); a.keys = integer(k); a.dim = integer(k);
    a.scale = (double)(float)number(k);
    int packed = small(k);
    int64_t gap = integer(k), width = a.heads * a.dim, qs = a.batch * a.queries, ks = a.batch * a.keys;
    a.numbers = read_mask(k);
    read_recipe(k);
    a.q = draw(k, 0, qs, width, gap, k->dtype, 1, 0); a.k = draw(k, 1, ks, width, gap, k->dtype, 1, 0);
    a.v = draw(k, 2, ks, width, gap, k->dtype, 1, 0); a.d_o = draw(k, 3, qs, width, gap, k->dtype, 1, 0);
    a.o = result(k, qs, width, gap, k->dtype); a.dq = result(k, qs, width, gap, k->dtype);
    a.dk = result(k, ks, width, gap, k->dtype); a.dv = result(k, ks, width, gap, k->dtype);
    if (packed) { pack(k, &a.q, &a.k, &a.v); pack(k, &a.dq, &a.dk, &a.dv); }
    a.lse = (float *)floats(k, qs * a.heads);
    a.mask = make_mask(k, &a.numbers, a.batch, a.heads, a.queries, a.keys);
    refer(k, attention_reference, &a);
    output(k, "o", &a.o); output(k, "dq", &a.dq); output(k, "dk", &a.dk); output(k, "dv", &a.dv);
    on_every_path(k, attention_call, &a);
}

/* ---- cross-entropy */

typedef struct entropy {
    int64_t classes;
    int ignore, sum, in_place;
    double smoothing;
    float factor, seed;
    int32_t *labels;
    field x, dx, losses, loss;
} entropy;

/* The gradient is (1 - smoothing) (p - target) + smoothing (p - 1 / classes), times `share`. */
static void entropy_row(entropy *e, int64_t i, double *p, const char *seen, double share) {
    int64_t n = e->classes;
    int32_t label = e->labels[i];
    const double *x = e->x.x + i * e->x.cols;
    double *dx = e->dx.x + i * e->x.cols, most = -HUGE_VAL, total = 0, mean = 0, lse, s = e->smoothing;
    softmax_row(p, x, seen, n);
    for (int64_t j = 0; j < n; j++) if (x[j] > most) most = x[j];
    for (int64_t j = 0; j < n && class_of(most) == 2; j++) p[j] = (double)NAN;     /* all logits are -inf */
    for (int64_t j = 0; j < n; j++) total = r(total + r(exp(r(x[j] - most))));
    lse = r(most + r(log(total)));
    for (int64_t j = 0; j < n; j++) mean = r(mean + r(lse - x[j]));
    e->losses.x[i] = r(r((1 - s) * r(lse - x[label])) + (s > 0 ? r(s * r(mean / (double)n)) : 0));
    for (int64_t j = 0; j < n; j++)
        dx[j] = r(r(r((1 - s) * r(p[j] - (j == label))) + (s > 0 ? r(s * r(p[j] - r(1 / (double)n))) : 0)) * share);
}

static void entropy_reference(kase *k, void *arg) {
    entropy *e = (entropy *)arg;
    int64_t counted = 0;
    char *seen = (char *)room(k, e->classes);
    double *p = numbers(k, e->classes), start = (double)(e->factor * e->seed);
    memset(seen, 1, (size_t)e->classes);
    for (int64_t i = 0; i < e->x.rows; i++) counted += e->labels[i] != e->ignore;
    for (int64_t i = 0; i < e->x.rows; i++) {
        if (e->labels[i] == e->ignore) continue;
        entropy_row(e, i, p, seen, e->sum ? start : r(start / (double)counted));
        e->loss.x[0] = r(e->loss.x[0] + e->losses.x[i]);
    }
    if (!e->sum) e->loss.x[0] = counted ? r(e->loss.x[0] / (double)counted) : (double)NAN;
}

static void entropy_call(kase *k, amp_context *amp, void *arg) {
    entropy *e = (entropy *)arg;
    amp_cross_entropy_op op;
    (void)k;
    memset(&op, 0, sizeof op);
    if (e->in_place) { field same = e->dx; same.x = e->x.x; restore(&same); }
    op.logits = e->in_place ? view(&e->dx) : view(&e->x);
    op.dlogits = view(&e->dx);
    op.labels = e->labels; op.classes = e->classes;
    op.ignore_index = e->ignore;
    op.reduction = e->sum ? AMP_REDUCTION_SUM : AMP_REDUCTION_MEAN;
    op.label_smoothing = (float)e->smoothing; op.factor = e->factor; op.grad_scale = &e->seed;
    op.loss = (float *)(void *)e->loss.data; op.losses = (float *)(void *)e->losses.data;
    CHECK_OK(amp_cross_entropy(amp, &op));
}

static void run_entropy(kase *k) {
    entropy e;
    k->dtype = read_dtype(k);
    int64_t rows = integer(k);
    e.classes = integer(k);
    int64_t cols = e.classes + integer(k);
    e.ignore = small(k);
    int ignored = small(k);
    e.sum = small(k); e.smoothing = number(k); e.factor = (float)number(k); e.seed = (float)number(k); e.in_place = small(k);
    int64_t gap = integer(k);
    double scale = number(k);
    read_recipe(k);
    e.x = draw(k, 0, rows, cols, gap, k->dtype, scale, 0);
    e.labels = draw_integers(k, 10, rows, e.classes);
    int32_t *dice = draw_integers(k, 11, rows, 4);
    for (int64_t i = 0; i < rows; i++) {
        if (dice[i] < ignored) e.labels[i] = e.ignore;
        if (e.ignore >= e.classes && e.labels[i] == e.ignore) e.labels[i] = 0;
    }
    e.dx = result(k, rows, cols, gap, k->dtype); e.losses = result(k, 1, rows, 0, AMP_F32); e.loss = result(k, 1, 1, 0, AMP_F32);
    refer(k, entropy_reference, &e);
    output(k, "losses", &e.losses); output(k, "loss", &e.loss); output(k, "dx", &e.dx);
    on_every_path(k, entropy_call, &e);
}

/* ---- unscale, norm, clip */

typedef struct unscale { int tensors, read; double clip; float scale; field g[5], got[5], norm; amp_range ranges[5]; } unscale;
static const char *const gradient_names[] = {"g0", "g1", "g2", "g3", "g4"};

static void unscale_reference(kase *k, void *arg) {
    unscale *u = (unscale *)arg;
    double inverse = (double)(float)(1.0 / (double)u->scale), sum = 0, coef = 1;
    (void)k;
    for (int i = 0; i < u->tensors; i++)
        for (int64_t j = 0; j < u->g[i].cols; j++) {
            u->got[i].x[j] = r(u->g[i].x[j] * inverse);
            sum += u->got[i].x[j] * u->got[i].x[j];
        }
    u->norm.x[0] = r(sqrt(sum));
    if (u->clip > 0) coef = r(u->clip / r(u->norm.x[0] + 1e-6));
    if (coef > 1 || class_of(coef) == 3) coef = 1;
    for (int i = 0; i < u->tensors; i++)
        for (int64_t j = 0; j < u->g[i].cols; j++) u->got[i].x[j] = r(u->got[i].x[j] * coef);
}

static void unscale_call(kase *k, amp_context *amp, void *arg) {
    unscale *u = (unscale *)arg;
    amp_scaler_desc sd;
    amp_grad_set_desc d;
    amp_scaler *scaler = NULL;
    amp_grad_set *set = NULL;
    amp_grad_stats found;
    int bad = 0;
    (void)k;
    memset(&d, 0, sizeof d);
    memset(&sd, 0, sizeof sd);
    for (int i = 0; i < u->tensors; i++) {
        memcpy(u->got[i].data, u->g[i].data, (size_t)u->g[i].cols * amp_dtype_size(u->g[i].dtype));
        for (int64_t j = 0; j < u->g[i].cols; j++) bad |= class_of(u->g[i].x[j]) != 0;
    }
    d.ranges = u->ranges; d.n_ranges = u->tensors; d.clip_norm = u->clip;
    sd.preset = u->g[0].dtype == AMP_F32 || u->g[0].dtype == AMP_F64 ? AMP_SCALER_TORCH : AMP_SCALER_DEFAULT;
    sd.init_scale = u->scale;
    if (sd.preset == AMP_SCALER_DEFAULT) sd.min_scale = AMP_NO_FLOOR;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    CHECK_OK(amp_scaler_create(amp, &scaler, &sd));
    CHECK_OK(amp_scaler_check(scaler, set, u->read ? AMP_CHECK_READ : AMP_CHECK_UNSCALE));
    CHECK_OK(amp_grad_set_stats(set, &found));
    CHECK_EQ(found.found_inf, bad);
    memcpy(u->norm.data, &found.norm, sizeof found.norm);
    CHECK_OK(amp_grad_set_apply(set));
    CHECK_OK(amp_scaler_update(scaler));
    CHECK(bad ? amp_scaler_scale(scaler) < u->scale : amp_scaler_scale(scaler) >= u->scale);
    amp_scaler_destroy(scaler);
    amp_grad_set_destroy(set);
}

static void run_unscale(kase *k) {
    unscale u;
    k->dtype = read_dtype(k); u.tensors = small(k); u.scale = (float)number(k); u.read = small(k); u.clip = number(k);
    int64_t n[5];
    for (int i = 0; i < 5; i++) n[i] = integer(k);
    double scale = number(k);
    read_recipe(k);
    k->bitwise = !(u.clip > 0);
    for (int i = 0; i < u.tensors; i++) {
        u.g[i] = draw(k, (uint32_t)i, 1, n[i], 0, k->dtype, scale, 0);
        u.got[i] = result(k, 1, n[i], 0, k->dtype);
        u.ranges[i].name = gradient_names[i]; u.ranges[i].data = u.got[i].data; u.ranges[i].count = n[i]; u.ranges[i].dtype = k->dtype;
        output(k, gradient_names[i], &u.got[i]);
    }
    u.norm = result(k, 1, 1, 0, AMP_F32);
    output(k, "norm", &u.norm);
    refer(k, unscale_reference, &u);
    on_every_path(k, unscale_call, &u);
}

/* ---- optimizers */

enum { TENSORS = 4, STEPS = 12 };
typedef struct optimizer {
    amp_dtype gradient_dtype;
    amp_optimizer_desc d;
    amp_param_group groups[2];                /* of the second and the fourth tensor */
    int tensors, steps, schedule, bad_step, grouped, frozen, wide;
    double loss_scale, group_rate, group_decay, gradient;
    int64_t rows[TENSORS], cols[TENSORS];
    field before[TENSORS], w[TENSORS], master[TENSORS], g[TENSORS];
    double *steps_of[STEPS][TENSORS], *m[TENSORS], *v[TENSORS];
    amp_param p[TENSORS];
} optimizer;
static const char *const weight_names[] = {"w0", "w1", "w2", "w3"};
static const char *const master_names[] = {"master0", "master1", "master2", "master3"};

static void read_optimizer(kase *k, optimizer *o) {
    memset(o, 0, sizeof *o);
    k->dtype = read_dtype(k); o->gradient_dtype = read_dtype(k);
    o->d.kind = (amp_optimizer_kind)small(k); o->d.master = (amp_master_kind)small(k);
    o->tensors = small(k); o->steps = small(k); o->d.lr = number(k); o->schedule = small(k);
    o->d.beta1 = number(k); o->d.beta2 = number(k); o->d.eps = number(k); o->d.weight_decay = number(k); o->d.decay_vectors = small(k);
    o->d.momentum = number(k); o->d.dampening = number(k); o->d.nesterov = small(k); o->d.maximize = small(k); o->d.clip_norm = number(k);
    o->d.accumulation = small(k); o->loss_scale = number(k); o->bad_step = small(k);
    o->grouped = small(k); o->group_rate = number(k); o->group_decay = number(k); o->frozen = small(k);
    for (int i = 0; i < TENSORS; i++) { o->rows[i] = integer(k); o->cols[i] = integer(k); }
    o->gradient = number(k);
    read_recipe(k);
    o->wide = small(k);
}

static int is_live(const optimizer *o, int i) { return !(o->frozen && i == o->tensors - 1 && i > 0); }
static double rate_at(const optimizer *o, int step) { return o->d.lr * (o->schedule ? 0.25 + 0.75 * (step % 8) / 8 : 1); }

/* Gradients of every step, rounded to their dtype, before scaling. */
static void draw_gradients(kase *k, optimizer *o) {
    uint32_t seed = k->seed;
    for (int step = 0; step < o->steps; step++) {
        k->seed = seed + 0x10000u * (uint32_t)(step + 1);
        for (int i = 0; i < o->tensors; i++) {
            k->which = o->wide ? 1 << (i + 8) : 0;
            draw_into(k, &o->g[i], (uint32_t)(i + 8), (double)(float)o->gradient, 0);
            int64_t n = o->g[i].rows * o->g[i].cols;
            o->steps_of[step][i] = numbers(k, n);
            memcpy(o->steps_of[step][i], o->g[i].x, sizeof(double) * (size_t)n);
        }
    }
    k->which = 0;
    k->seed = seed;
}

/* One tensor's step as torch.optim's documentation has it. */
static void reference_step(optimizer *o, int i, int step, int applied, double coef) {
    double rate = rate_at(o, step), decay = o->cols[i] || o->d.decay_vectors ? o->d.weight_decay : 0, sign = o->d.maximize ? -1 : 1;
    double c1 = 1 - pow(o->d.beta1, applied), c2 = 1 - pow(o->d.beta2, applied);
    if (o->grouped && i % 2 == 1) {
        if (o->group_rate > 0) rate *= o->group_rate;
        if (o->group_decay < 0) decay = 0;
        else if (o->group_decay > 0) decay = o->group_decay;
    }
    for (int64_t j = 0; j < o->w[i].rows * o->w[i].cols; j++) {
        double g = r(sign * coef * o->steps_of[step][i][j]), *w = &o->w[i].x[j], *m = &o->m[i][j], *v = &o->v[i][j];
        if (o->d.kind == AMP_ADAMW) {
            *w = r(*w * r(1 - rate * decay));
            *m = r(r(o->d.beta1 * *m) + r((1 - o->d.beta1) * g));
            *v = r(r(o->d.beta2 * *v) + r(r((1 - o->d.beta2) * g) * g));
            *w = r(*w - r(r(rate / c1 * *m) / r(r(r(sqrt(*v)) / r(sqrt(c2))) + o->d.eps)));
        } else {
            g = r(g + r(decay * *w));
            *m = applied == 1 ? g : r(r(o->d.momentum * *m) + r((1 - o->d.dampening) * g));
            *w = r(*w - r(rate * (o->d.momentum > 0 ? o->d.nesterov ? r(g + r(o->d.momentum * *m)) : *m : g)));
        }
    }
}

static void optimizer_reference(kase *k, void *arg) {
    optimizer *o = (optimizer *)arg;
    int applied = 0;
    for (int i = 0; i < o->tensors; i++) {
        int64_t n = o->w[i].rows * o->w[i].cols;
        o->m[i] = numbers(k, n); o->v[i] = numbers(k, n);
        memcpy(o->w[i].x, o->before[i].x, sizeof(double) * (size_t)n);
    }
    for (int step = 0; step < o->steps; step++) {
        double sum = 0, coef = 1;
        if (step == o->bad_step) continue;
        applied++;
        for (int i = 0; i < o->tensors; i++)
            for (int64_t j = 0; is_live(o, i) && j < o->w[i].rows * o->w[i].cols; j++)
                sum += o->steps_of[step][i][j] * o->steps_of[step][i][j];
        if (o->d.clip_norm > 0) coef = o->d.clip_norm / (sqrt(sum) + 1e-6);
        for (int i = 0; i < o->tensors; i++) if (is_live(o, i)) reference_step(o, i, step, applied, coef < 1 ? coef : 1);
    }
    for (int i = 0; i < o->tensors; i++) memcpy(o->master[i].x, o->w[i].x, sizeof(double) * (size_t)(o->w[i].rows * o->w[i].cols));
}

/* What backward would leave: `parts` equal micro-batches added up, times the loss scale; both are powers of two. */
static void backward(kase *k, optimizer *o, int step, int parts, double scale) {
    for (int i = 0; i < o->tensors; i++) {
        int64_t n = o->g[i].rows * o->g[i].cols;
        float *x = (float *)malloc(sizeof(float) * (size_t)(n + 1));
        for (int64_t j = 0; j < n; j++) x[j] = (float)(o->steps_of[step][i][j] * scale * parts);
        if (step == o->bad_step && i == 0) x[0] = HUGE_VALF;
        CHECK_OK(amp_convert(o->g[i].data, o->gradient_dtype, x, AMP_F32, n, NULL, NULL));
        o->p[i].grad_live = is_live(o, i);
        free(x);
    }
    (void)k;
}

static void optimizer_steps(kase *k, optimizer *o, amp_optimizer *opt, amp_scaler *scaler) {
    for (int step = 0; step < o->steps; step++) {
        double scale = (double)amp_scaler_scale(scaler);
        CHECK_OK(amp_optimizer_set_lr(opt, rate_at(o, step)));
        for (int part = 1; part <= o->d.accumulation; part++) {
            backward(k, o, step, part == o->d.accumulation ? part : 1, scale);
            CHECK_OK(amp_step(opt, scaler));
        }
    }
}

static void optimizer_call(kase *k, amp_context *amp, void *arg) {
    optimizer *o = (optimizer *)arg;
    amp_optimizer_desc d = o->d;
    amp_optimizer *opt = NULL;
    amp_scaler *scaler = NULL;
    amp_scaler_desc sd;
    memset(&sd, 0, sizeof sd);
    for (int i = 0; i < o->tensors; i++) {
        field w = o->w[i];
        w.x = o->before[i].x;
        restore(&w);
        o->p[i] = parameter(&o->w[i], &o->g[i]);
        o->p[i].weight.ndim = o->p[i].grad.ndim = o->cols[i] ? 2 : 1;
        o->p[i].weight.shape[0] = o->p[i].grad.shape[0] = o->rows[i];
        o->p[i].weight.shape[1] = o->p[i].grad.shape[1] = o->cols[i];
        o->p[i].name = weight_names[i];
    }
    if (!(d.beta1 > 0)) d.beta1 = AMP_EXPLICIT_ZERO;
    d.params = o->p; d.n_params = o->tensors;
    for (int i = 0; i < 2; i++) {
        o->groups[i].match = weight_names[2 * i + 1];
        o->groups[i].lr_scale = o->group_rate; o->groups[i].weight_decay = o->group_decay < 0 ? (double)AMP_EXPLICIT_ZERO : o->group_decay;
    }
    if (o->grouped) { d.groups = o->groups; d.n_groups = o->tensors / 2; if (d.n_groups > 2) d.n_groups = 2; }   /* those that are there */
    CHECK_OK(amp_optimizer_create(amp, &opt, &d));
    sd.init_scale = (float)o->loss_scale;
    if (o->loss_scale > 0) CHECK_OK(amp_scaler_create(amp, &scaler, &sd));
    optimizer_steps(k, o, opt, scaler);
    for (int i = 0; i < o->tensors; i++)
        if (o->p[i].master && d.master == AMP_MASTER_F32)
            memcpy(o->master[i].data, o->p[i].master, 4 * (size_t)(o->w[i].rows * o->w[i].cols));
    amp_scaler_destroy(scaler);
    amp_optimizer_destroy(opt);
}

static void run_optimizer(kase *k) {
    static optimizer o;
    read_optimizer(k, &o);
    for (int i = 0; i < o.tensors; i++) {
        int64_t rows = o.cols[i] ? o.rows[i] : 1, cols = o.cols[i] ? o.cols[i] : o.rows[i];
        k->which = 0;
        o.before[i] = draw(k, (uint32_t)i, rows, cols, 0, k->dtype, 1, 0);
        o.w[i] = result(k, rows, cols, 0, k->dtype);
        o.master[i] = result(k, rows, cols, 0, AMP_F32);
        o.g[i] = empty(k, rows, cols, 0, o.gradient_dtype);
        output(k, weight_names[i], &o.w[i]);
        if (k->dtype != AMP_F32 && o.d.master == AMP_MASTER_F32) output(k, master_names[i], &o.master[i]);
    }
    draw_gradients(k, &o);
    refer(k, optimizer_reference, &o);
    on_every_path(k, optimizer_call, &o);
}

/* ---- The corpus: [first seed, numbers of the case, outputs, then per output: PyTorch's error, projection, norm, and the
   patterns of the seeds] */

typedef struct family { const char *name; void (*run)(kase *k); } family;
static const family families[] = {{"linear", run_linear}, {"matmul", run_matmul}, {"gemm", run_gemm}, {"norm", run_norm},
                                  {"softmax", run_softmax}, {"attention", run_attention}, {"entropy", run_entropy},
                                  {"unscale", run_unscale}, {"optimizer", run_optimizer}, {"fp8", run_fp8}};
static const char *corpus_path = AMPT_GOLDEN "/fuzz_tensors.bin";
static unsigned char *corpus;
static size_t corpus_bytes;

static int open_corpus(void) {
    FILE *f = fopen(corpus_path, "rb");
    size_t room_for = 1 << 20, got;
    corpus = (unsigned char *)malloc(room_for);
    while (f && corpus && (got = fread(corpus + corpus_bytes, 1, room_for - corpus_bytes, f)) > 0) {
        corpus_bytes += got;
        if (corpus_bytes == room_for) corpus = (unsigned char *)realloc(corpus, room_for *= 2);
    }
    if (f) fclose(f);
    return corpus && corpus_bytes > 12 && !memcmp(corpus, "AMPTGOLD", 8);
}

/* The record at *at: its name, and a copy of its numbers, which the caller frees. */
static double *next_record(size_t *at, char name[64], int64_t *count) {
    uint32_t length;
    uint64_t n;
    double *copy;
    if (*at + 16 > corpus_bytes) return NULL;
    memcpy(&length, corpus + *at, 4);
    memcpy(&n, corpus + *at + 8 + length, 8);
    if (length >= 64 || *at + 16 + length + 8 * n > corpus_bytes) return NULL;
    memcpy(name, corpus + *at + 4, length);
    name[length] = 0;
    copy = (double *)malloc(8 * (size_t)n + 8);
    if (copy) memcpy(copy, corpus + *at + 16 + length, 8 * (size_t)n);
    *count = (int64_t)n;
    *at += 16 + length + 8 * (size_t)n;
    return copy;
}

static int read_statistics(kase *k, const double *from, int64_t left) {
    int outputs = left > 0 ? (int)*from++ : -1;
    left--;
    if (outputs < 1 || outputs > OUTPUTS) return -1;
    for (int i = 0; i < outputs; i++) {
        statistic *s = &k->stat[i];
        if (left < 3) return -1;
        s->theirs = from[0]; s->projection = from[1]; s->norm = from[2];
        from += 3; left -= 3;
        for (int j = 0; j < SEEDS; j++) {
            int64_t n = left > 0 ? (int64_t)*from : -1;
            if (n < 0 || n >= left) return -1;
            s->patterns[j] = from;
            from += 1 + n; left -= 1 + n;
        }
    }
    return left == 0 ? outputs : -1;
}

/* ---- Verdicts */

/* The references of both sides agree so well that their difference cannot matter: to a thousandth of fp32's unit
   roundoff of the norm; of gradients, of the largest gradient's. */
static void check_reference(const kase *k, int outputs) {
    double layer = 0;
    for (int i = 0; i < outputs; i++) if (is_gradient(&k->stat[i]) && k->stat[i].norm > layer) layer = k->stat[i].norm;
    for (int i = 0; i < outputs; i++) {
        const statistic *s = &k->stat[i];
        double size = is_gradient(s) && s->norm < layer ? layer : s->norm, allowed = ldexp(size, -34);
        double off = fabs(s->mine - s->projection), longer = fabs(sqrt(s->square) - s->norm);
        CHECK_MSG(!(off > allowed) && !(longer > allowed), "%s: the references of %s differ by %.2g of its norm", k->name,
                  s->name, off / size);
    }
}

/* One output on one path.  `theirs` is PyTorch's error or that of one rounding. */
static void check_bar(const kase *k, const statistic *s, int path, double theirs, double plain) {
    double ours = sqrt(s->ours[path] / SEEDS), n = s->fourth[path] > 0 ? s->ours[path] * s->ours[path] / s->fourth[path] : 1;
    double bar = 1.2 * (theirs + plain) * (1 + 2.8 / sqrt(n));
    if (is_gradient(s) && bar < 0x1p-24) bar = 0x1p-24;
    CHECK_MSG(ours <= bar, "%s path %d: %s is off by %.3g, at most %.3g (PyTorch or one rounding %.3g, in fp32 %.3g, %.1f errors)",
              k->name, path, s->name, ours, bar, theirs, plain, n);
    if (k->bitwise && s->name[0] == 'g')
        CHECK_MSG(fabs(ours - s->theirs) <= 1e-12 * s->theirs, "%s path %d: %s is off by %.16g, PyTorch by %.16g", k->name, path, s->name, ours, s->theirs);
    totals.compared++;
    if (ours > over_bar * bar) over_bar = ours / bar;
    if (!(plain < 0.01 * theirs)) return;
    pooled *p = &pools[k->dtype][k->region][path];
    p->sum += ours * ours / (theirs * theirs);
    p->n++;
}

static void check_bars(const kase *k, int outputs) {
    for (int i = 0; i < outputs; i++) {
        const statistic *s = &k->stat[i];
        double layer = is_gradient(s) ? k->layer_rounded[s->dtype] : 0;
        double rounded = sqrt((layer > s->rounded ? layer : s->rounded) / SEEDS);
        if (s->theirs > 0.5) continue;
        for (int path = 1; path < PATHS; path++)
            if (contexts[path]) check_bar(k, s, path, rounded > s->theirs ? rounded : s->theirs, sqrt(s->plain));
    }
}

/* The 16-bit errors of a family, all cases together. */
static void check_pools(const char *name) {
    double most = 0;
    for (int dtype = 0; dtype < DTYPES; dtype++)
        for (int region = 0; region < DTYPES; region++)
            for (int path = 0; path < PATHS; path++) {
                pooled *p = &pools[dtype][region][path];
                double ratio = p->n > 0 ? sqrt(p->sum / p->n) : 0;
                CHECK_MSG(ratio <= 1.2, "%s, dtype %d, region %d, path %d: %.3f times PyTorch's errors", name, dtype, region, path, ratio);
                if (ratio > most) most = ratio;
            }
    if (most > 0) printf("counted %s.16bit_rms_error_over_pytorch %.3f\n", name, most);
}

static void replay(const family *f, const char *name, const double *record, int64_t count) {
    kase k;
    int64_t n = count > 2 ? (int64_t)record[1] : -1;
    memset(&k, 0, sizeof k);
    k.name = name;
    k.base = count > 0 ? (uint32_t)record[0] : 0;
    k.numbers = record + 2; k.count = n;
    int outputs = n > 0 && n < count - 2 ? read_statistics(&k, record + 2 + n, count - 2 - n) : -1;
    CHECK_MSG(outputs > 0, "%s: damaged record", name);
    for (k.s = 0; k.s < SEEDS && outputs > 0; k.s++) {
        k.seed = k.base + (uint32_t)k.s;
        k.at = 0;
        f->run(&k);
        CHECK_MSG(k.outputs == outputs && k.at == k.count, "%s: %d outputs and %d numbers, the corpus has %d and %d", name,
                  k.outputs, (int)k.at, outputs, (int)k.count);
        end_seed(&k);
    }
    if (outputs < 1) return;
    check_reference(&k, outputs);
    check_bars(&k, outputs);
}

static void run_family(const family *f) {
    size_t at = 12, length = strlen(f->name);
    char name[64];
    int64_t count, cases = 0;
    double *record;
    over_bar = 0;
    memset(pools, 0, sizeof pools);
    while ((record = next_record(&at, name, &count)) != NULL) {
        if (!strncmp(name, f->name, length) && name[length] == '/') { replay(f, name, record, count); cases++; }
        free(record);
    }
    CHECK_MSG(cases > 0, "no case of %s", f->name);
    printf("counted %s.cases %lld\ncounted %s.runs_per_path %lld\n", f->name, (long long)cases, f->name, (long long)cases * SEEDS);
    printf("counted %s.largest_error_over_bar %.3f\n", f->name, over_bar);
    check_pools(f->name);
}

TEST(linear) { run_family(&families[0]); }
TEST(matmul) { run_family(&families[1]); }
TEST(gemm) { run_family(&families[2]); }
TEST(norms) { run_family(&families[3]); }
TEST(softmax) { run_family(&families[4]); }
TEST(attention) { run_family(&families[5]); }
TEST(cross_entropy) { run_family(&families[6]); }
TEST(unscale_norm_clip) { run_family(&families[7]); }
TEST(optimizers) { run_family(&families[8]); }
TEST(linear_in_fp8) { run_family(&families[9]); }

static void open_contexts(amp_context **opened, const amp_fp8_recipe *recipe) {
    amp_machine machine;
    CHECK_OK(amp_machine_probe(&machine));
    for (int path = 1; path < PATHS && path <= (int)machine.cpu.path; path++) {
        amp_desc d;
        memset(&d, 0, sizeof d);
        d.cpu_path = (amp_cpu_path)path;
        d.threads = 1;
        d.allow_fallback = 1;
        d.logger.level = AMP_LOG_OFF;
        if (recipe) d.fp8 = *recipe;
        CHECK_OK(amp_open(&opened[path], &d));
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && argv[1][0] != '-') { corpus_path = argv[1]; argc--; argv++; }
    TEST_BEGIN(argc, argv);
    if (!open_corpus()) { printf("%s: missing or damaged (run from the project root)\n", corpus_path); return 2; }
    open_contexts(of_all, NULL);
    RUN(linear);
    RUN(matmul);
    RUN(gemm);
    RUN(norms);
    RUN(softmax);
    RUN(attention);
    RUN(cross_entropy);
    RUN(unscale_norm_clip);
    RUN(optimizers);
    RUN(linear_in_fp8);
    for (int path = 1; path < PATHS; path++) {
        amp_close(of_all[path]);
        for (int i = 0; i <= AMP_FP8_MX; i++)
            for (int j = 0; j <= AMP_FP8_E4M3; j++) amp_close(of_recipe[i][j][path]);
    }
    free(corpus);
    printf("counted errors %lld\ncounted elements %lld\n", (long long)totals.compared, (long long)totals.elements);
    printf("counted elements_left_out %lld\n", (long long)totals.undefined);
    return TEST_END();
}
