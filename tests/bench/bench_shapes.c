/* bench_shapes.c - compares amp_gemm with a BLAS library, in fp32 and bf16: on the small and thin products that programs call,
 * or on large ones.
 *
 *     cc -std=c99 -D_GNU_SOURCE -O2 -o bench_shapes tests/bench/bench_shapes.c -lm -lpthread -ldl
 *     ./bench_shapes [--set small|large] [--blas libopenblas.so.0|libmkl_rt.so.2] [--threads N] [--rounds N] [--us N]
 *                    [--only 1x10x784] [--form NN]
 *
 * Each shape runs as NN, NT and TN, and as amp_linear with a registered weight, in fp32, in bf16 from fp32, and in bf16
 * from bf16.  The large shapes are squares, and the products of a layer of GPT-2 for 256 tokens.  In each round, every
 * contestant is called for some microseconds on the same operands, after some calls that do not count.  The first
 * contestant changes from round to round.  A time is the median over the rounds, and a ratio is the median of the rounds'
 * ratios.  The library is loaded at run time and has the same number of threads.  Its threads spin for some time after a
 * call, and the pause before the next contestant is at least as long.
 *
 * Other programs on the machine take part of its speed.  Before and after each round, a loop of FMAs is timed on one
 * thread.  A round is quiet if both times are within 3% of the shortest time of the row.  If at least three rounds are,
 * the ratio to the library is also given over the quiet rounds alone. */
#define AMP_IMPLEMENTATION
#include "bench.h"
#include "../../examples/peak.h"
#include <dlfcn.h>

typedef struct shape { const char *from; int64_t m, n, k; } shape;
static const shape small_shapes[] = {
    {"MLP", 1, 10, 10},       {"MLP", 1, 10, 1024},     {"MLP", 1, 64, 784},      {"MLP", 1, 256, 256},
    {"MLP", 1, 1024, 1024},   {"MLP", 16, 10, 10},      {"MLP", 16, 10, 256},     {"MLP", 16, 64, 64},      {"MLP", 16, 256, 784},
    {"MLP", 32, 10, 128},     {"MLP", 32, 32, 32},      {"MLP", 32, 128, 784},    {"MLP", 32, 1, 64},
    {"MLP", 64, 10, 1024},    {"MLP", 64, 64, 64},      {"MLP", 64, 256, 256},    {"MLP", 64, 1024, 1024},
    {"network", 32, 10, 100}, {"network", 32, 100, 784}, {"network", 64, 10, 128}, {"network", 64, 128, 784},
    {"network", 128, 10, 256}, {"network", 128, 256, 784}, {"network", 256, 10, 128}, {"network", 256, 128, 128},
    {"network", 256, 512, 256}, {"network", 10, 128, 64}, {"network", 784, 128, 64}, {"network", 10, 512, 256},
    {"convolution", 8, 676, 9}, {"convolution", 16, 784, 25}, {"convolution", 32, 576, 9}, {"convolution", 64, 196, 576},
    {"convolution", 128, 49, 1152}, {"convolution", 3136, 64, 147}, {"convolution", 32, 288, 576},
    {"all", 64, 10, 1},       {"all", 128, 128, 1},     {"all", 4, 4, 4},         {"all", 8, 8, 8},
};
static const shape large_shapes[] = {
    {"square", 64, 64, 64},     {"square", 128, 128, 128},  {"square", 256, 256, 256},  {"square", 512, 512, 512},
    {"square", 1024, 1024, 1024}, {"square", 2048, 2048, 2048}, {"square", 4096, 4096, 4096},
    {"GPT-2 qkv", 256, 2304, 768}, {"GPT-2 proj", 256, 768, 768}, {"GPT-2 fc", 256, 3072, 768}, {"GPT-2 mlp", 256, 768, 3072},
    {"GPT-2 dX", 256, 768, 2304}, {"GPT-2 dW", 2304, 768, 256}, {"GPT-2 dW", 768, 768, 256}, {"GPT-2 dW", 3072, 768, 256},
    {"GPT-2 dW", 768, 3072, 256},
};
typedef struct shape_set { const char *name; const shape *shapes; size_t n; } shape_set;
static const shape_set sets[] = {
    {"small", small_shapes, sizeof small_shapes / sizeof *small_shapes},
    {"large", large_shapes, sizeof large_shapes / sizeof *large_shapes},
};

typedef enum form { NN, NT, TN, LINEAR, FORMS } form;
static const char *const form_names[FORMS] = {"NN", "NT", "TN", "linear"};
static const shape *now;
static form now_form;

/* Stored from first to last: in fp32, rounded to bf16. */
static float *a, *b, *c;
static uint16_t *a16, *c16;
static amp_context *in_f32, *in_bf16;
static amp_param weights[2];                    /* one of each context */
static amp_linear_op linear[3];
static void (*blas)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *x, int ldx,
                    const float *y, int ldy, float beta, float *z, int ldz);

static amp_context *open_context(amp_dtype dtype, int64_t threads) {
    amp_context *amp;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    desc.allow_fallback = desc.gemm_always = 1;
    desc.threads = (int32_t)threads;
    bench_need(amp_open(&amp, &desc), "amp_open");
    return amp;
}

/* Opens the library on `threads` threads, and returns 0 if there is none. */
static int open_blas(const char *path, int64_t threads) {
    static const char *const setters[] = {"openblas_set_num_threads", "MKL_Set_Num_Threads"};
    void *library, *symbol, *set = NULL;
    void (*set_threads)(int n);
    size_t i;
    setenv("OPENBLAS_THREAD_TIMEOUT", "20", 1);         /* its threads wait for 2^20 cycles */
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return 0;
    symbol = dlsym(library, "cblas_sgemm");
    for (i = 0; i < sizeof setters / sizeof *setters && set == NULL; i++) set = dlsym(library, setters[i]);
    if (symbol == NULL || set == NULL) return 0;
    memcpy(&blas, &symbol, sizeof symbol);
    memcpy(&set_threads, &set, sizeof set);
    set_threads((int)threads);
    return 1;
}

static float *numbers(int64_t n, uint64_t state) {
    float *x = (float *)bench_memory((size_t)n * sizeof *x);
    int64_t i;
    for (i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)(state >> 40) / 16777216.0f - 0.5f;
    }
    return x;
}

static void prepare_linear(amp_linear_op *op, amp_param *weight, int bf16) {
    memset(op, 0, sizeof *op);
    op->weight = weight;
    op->x = amp_tensor2(bf16 ? (void *)a16 : (void *)a, bf16 ? AMP_BF16 : AMP_F32, now->m, now->k);
    op->y = amp_tensor2(bf16 ? (void *)c16 : (void *)c, bf16 ? AMP_BF16 : AMP_F32, now->m, now->n);
}
static void prepare(void) {
    int64_t m = now->m, n = now->n, k = now->k;
    int i;
    a = numbers(m * k, 1);
    b = numbers(k * n, 2);
    c = numbers(m * n, 3);
    a16 = (uint16_t *)bench_memory((size_t)(m * k) * 2);
    c16 = (uint16_t *)bench_memory((size_t)(m * n) * 2);
    bench_need(amp_convert(a16, AMP_BF16, a, AMP_F32, m * k, NULL, NULL), "amp_convert");
    if (now_form != LINEAR) return;
    memset(weights, 0, sizeof weights);
    for (i = 0; i < 2; i++) {
        weights[i].name = "weight";
        weights[i].weight = amp_tensor2(b, AMP_F32, n, k);
        bench_need(amp_param_register(i ? in_bf16 : in_f32, &weights[i], 1), "amp_param_register");
    }
    for (i = 0; i < 3; i++) prepare_linear(&linear[i], &weights[i > 0], i == 2);
}
static void drop(void) {
    if (now_form == LINEAR) {
        amp_param_forget(in_f32, &weights[0], 1);
        amp_param_forget(in_bf16, &weights[1], 1);
    }
    free(a); free(b); free(c); free(a16); free(c16);
}

/* ---- Contestants */

typedef enum contestant { FP32, BLAS, BF16, BF16_FROM_BF16, CONTESTANTS } contestant;

static int takes_part(contestant who) {
    if (now_form == LINEAR) return who != BLAS;
    return who == BLAS ? blas != NULL : who != BF16_FROM_BF16;
}

static void calls(contestant who, int64_t count) {
    int ta = now_form == TN ? 112 : 111, tb = now_form == NT ? 112 : 111;
    int64_t m = now->m, n = now->n, k = now->k, lda = now_form == TN ? m : k, ldb = now_form == NT ? k : n, i;
    amp_context *amp = who == FP32 ? in_f32 : in_bf16;
    amp_result result = AMP_OK;
    for (i = 0; i < count && result == AMP_OK; i++) {
        if (now_form == LINEAR) result = amp_linear(amp, &linear[who == FP32 ? 0 : who == BF16 ? 1 : 2]);
        else if (who == BLAS) blas(101, ta, tb, (int)m, (int)n, (int)k, 1, a, (int)lda, b, (int)ldb, 0, c, (int)n);
        else result = amp_gemm(amp, AMP_ROW_MAJOR, (amp_trans)ta, (amp_trans)tb, m, n, k, 1, a, lda, b, ldb, 0, c, n);
    }
    bench_need(result, "product");
}

static double seconds_of(contestant who, int64_t count, int64_t threads) {
    double start;
    if (threads > 1) bench_sleep(1e-3);
    calls(who, count / 4 + 1);
    start = ex_seconds();
    calls(who, count);
    return (ex_seconds() - start) / (double)count;
}

/* How many calls take so many microseconds. */
static int64_t calls_for(contestant who, int64_t us) {
    double start = ex_seconds();
    int64_t count = 1;
    for (;; count *= 2) {
        start = ex_seconds();
        calls(who, count);
        if (ex_seconds() - start > 0.25e-6 * (double)us) break;
    }
    return (int64_t)((double)count * 1e-6 * (double)us / (ex_seconds() - start)) + 1;
}

/* ---- A row of the table */

enum { MOST_ROUNDS = 1000, LEAST_QUIET = 3 };
typedef struct row { double ns[CONTESTANTS], over_blas, over_blas_quiet, over_f32, over_f32_from_bf16; int64_t quiet; } row;

static double ratio(double times[CONTESTANTS][MOST_ROUNDS], contestant of, contestant to, int64_t rounds) {
    double values[MOST_ROUNDS];
    int64_t i;
    if (!takes_part(of) || !takes_part(to)) return 0;
    for (i = 0; i < rounds; i++) values[i] = times[of][i] / times[to][i];
    return bench_median(values, rounds);
}

/* Seconds of a loop of FMAs on this thread, some tenths of a millisecond. */
static double probe(void) {
    amp_desc desc;
    peak_loop loop;
    double start;
    bench_need(amp_query(in_f32, &desc), "amp_query");
    loop = peak_of_path(desc.cpu_path, AMP_F32);
    if (loop.loop == NULL) return 1;
    start = ex_seconds();
    loop.loop(100000);
    return ex_seconds() - start;
}

/* Leaves the quiet rounds of `times`, and returns their number.  probes[r] was timed before round r. */
static int64_t keep_quiet(double times[CONTESTANTS][MOST_ROUNDS], const double *probes, int64_t rounds) {
    double best = probes[0];
    int64_t r, n = 0;
    int who;
    for (r = 1; r <= rounds; r++) best = AMPI_MIN(best, probes[r]);
    for (r = 0; r < rounds; r++) {
        if (AMPI_MAX(probes[r], probes[r + 1]) > 1.03 * best) continue;
        for (who = 0; who < CONTESTANTS; who++) times[who][n] = times[who][r];
        n++;
    }
    return n;
}

static row measure(int64_t rounds, int64_t us, int64_t threads) {
    static double times[CONTESTANTS][MOST_ROUNDS], probes[MOST_ROUNDS + 1];
    int64_t count[CONTESTANTS] = {0}, r;
    int who, i;
    row out;
    memset(&out, 0, sizeof out);
    for (who = 0; who < CONTESTANTS; who++) if (takes_part((contestant)who)) count[who] = calls_for((contestant)who, us);
    probes[0] = probe();
    for (r = 0; r < rounds; r++) {
        for (i = 0; i < CONTESTANTS; i++) {
            who = (int)((i + r) % CONTESTANTS);
            if (takes_part((contestant)who)) times[who][r] = seconds_of((contestant)who, count[who], threads);
        }
        probes[r + 1] = probe();
    }
    out.over_blas = ratio(times, FP32, BLAS, rounds);
    out.over_f32 = ratio(times, BF16, FP32, rounds);
    out.over_f32_from_bf16 = ratio(times, BF16_FROM_BF16, FP32, rounds);
    for (who = 0; who < CONTESTANTS; who++) if (takes_part((contestant)who)) out.ns[who] = 1e9 * bench_median(times[who], rounds);
    out.quiet = keep_quiet(times, probes, rounds);
    if (out.quiet >= LEAST_QUIET) out.over_blas_quiet = ratio(times, FP32, BLAS, out.quiet);
    return out;
}

static void print_value(double value, const char *format) {
    if (value > 0) fprintf(stderr, format, value);
    else fprintf(stderr, "%10s", "-");
}
static void print_row(const row *r) {
    static const char *const keys[CONTESTANTS] = {"fp32_ns", "blas_ns", "bf16_ns", "bf16_from_bf16_ns"};
    int who;
    fprintf(stderr, "%-12s%6lld%6lld%6lld  %-6s", now->from, (long long)now->m, (long long)now->n, (long long)now->k,
            form_names[now_form]);
    for (who = 0; who < CONTESTANTS; who++) print_value(r->ns[who], "%10.0f");
    print_value(r->over_blas, "%10.2f"); print_value(r->over_blas_quiet, "%10.2f"); print_value(r->over_f32, "%10.2f"); print_value(r->over_f32_from_bf16, "%10.2f");
    fprintf(stderr, "\n");
    metrics_begin(stdout, "shape");
    metrics_text(stdout, "from", now->from);
    metrics_integer(stdout, "m", now->m); metrics_integer(stdout, "n", now->n); metrics_integer(stdout, "k", now->k);
    metrics_text(stdout, "form", form_names[now_form]);
    for (who = 0; who < CONTESTANTS; who++) if (r->ns[who] > 0) metrics_number(stdout, keys[who], r->ns[who]);
    if (r->over_blas > 0) metrics_number(stdout, "fp32_over_blas", r->over_blas);
    if (r->over_blas_quiet > 0) metrics_number(stdout, "fp32_over_blas_quiet", r->over_blas_quiet);
    metrics_integer(stdout, "quiet_rounds", r->quiet);
    metrics_number(stdout, "bf16_over_fp32", r->over_f32);
    if (r->over_f32_from_bf16 > 0) metrics_number(stdout, "bf16_from_bf16_over_fp32", r->over_f32_from_bf16);
    metrics_end(stdout);
}

/* ---- What a call costs beside its product: a region and a product of one number by one */

static double overhead(amp_context *amp, int64_t rounds) {
    enum { CALLS = 1000 };
    static double times[MOST_ROUNDS];
    float x = 2, y = 3, z = 0;
    int64_t r, i;
    for (r = 0; r < rounds; r++) {
        double start = ex_seconds();
        for (i = 0; i < CALLS; i++) {
            bench_need(amp_autocast_begin(amp, NULL), "amp_autocast_begin");
            bench_need(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, &x, 1, &y, 1, 0, &z, 1), "amp_gemm");
            amp_autocast_end(amp);
        }
        times[r] = 1e9 * (ex_seconds() - start) / CALLS;
    }
    if (z < 6 || z > 6) exit(1);
    return bench_median(times, rounds);
}

int main(int argc, char **argv) {
    int64_t threads = 1, rounds = 31, us = 200;
    const char *only = "", *only_form = "", *library = "libopenblas.so.0", *set_name = "small";
    const shape_set *set = NULL;
    const bench_flag flags[] = {
        {"threads", &threads, NULL, "threads of each contestant"},
        {"rounds", &rounds, NULL, "rounds, at most 1000"},
        {"us", &us, NULL, "microseconds of a contestant in a round"},
        {"set", NULL, &set_name, "small or large products"},
        {"blas", NULL, &library, "file of the BLAS library"},
        {"only", NULL, &only, "one shape, MxNxK"},
        {"form", NULL, &only_form, "NN, NT, TN or linear"},
    };
    char name[80];
    size_t s;
    int f;
    bench_flags(argc, argv, flags, (int)(sizeof flags / sizeof *flags));
    rounds = AMPI_MIN(AMPI_MAX(rounds, (int64_t)1), (int64_t)MOST_ROUNDS);
    in_f32 = open_context(AMP_F32, threads);
    in_bf16 = open_context(AMP_BF16, threads);
    for (s = 0; s < sizeof sets / sizeof *sets; s++) if (strcmp(sets[s].name, set_name) == 0) set = &sets[s];
    if (set == NULL) return fprintf(stderr, "bench_shapes: --set %s, must be small or large\n", set_name), 2;
    if (!open_blas(library, threads)) fprintf(stderr, "BLAS: skipped, no %s\n", library);
    bench_begin("shapes", in_bf16);
    metrics_text(stdout, "blas", blas != NULL ? library : "");
    metrics_text(stdout, "set", set->name);
    metrics_number(stdout, "fp32_overhead_ns", overhead(in_f32, rounds));
    metrics_number(stdout, "bf16_overhead_ns", overhead(in_bf16, rounds));
    metrics_end(stdout);
    bench_need(amp_autocast_begin(in_f32, NULL), "amp_autocast_begin");
    bench_need(amp_autocast_begin(in_bf16, NULL), "amp_autocast_begin");
    fprintf(stderr, "%-12s%6s%6s%6s  %-6s%10s%10s%10s%10s%10s%10s%10s%10s\n", "from", "m", "n", "k", "form", "fp32 ns", "BLAS",
            "bf16", "from bf16", "fp32/BLAS", "quiet", "bf16/fp32", "from bf16");
    for (s = 0; s < set->n; s++)
        for (f = 0; f < FORMS; f++) {
            row r;
            now = &set->shapes[s];
            now_form = (form)f;
            snprintf(name, sizeof name, "%lldx%lldx%lld", (long long)now->m, (long long)now->n, (long long)now->k);
            if ((*only != 0 && strcmp(only, name) != 0) || (*only_form != 0 && strcmp(only_form, form_names[f]) != 0)) continue;
            prepare();
            r = measure(rounds, us, threads);
            print_row(&r);
            drop();
        }
    amp_autocast_end(in_bf16);
    amp_autocast_end(in_f32);
    amp_close(in_bf16);
    amp_close(in_f32);
    return 0;
}
