/* bench_gemm.c - compares the rate of matrix products with the peak of the same instruction, measured in the same run.
 *
 *     cc -std=c99 -D_GNU_SOURCE -O2 -o bench_gemm tests/bench/bench_gemm.c -lm -lpthread
 *     ./bench_gemm [--threads N] [--rounds N] [--json FILE]
 *
 * Each round times the peak loops and every case in turn.  The figure of a case is the median over the rounds of its rate.
 * Its ratio is taken to the median peak (examples/peak.h) of the instruction that it uses.  The FMA peak is checked against
 * the clock: no core does more than two FMAs per cycle, and a loop whose sums spill stays far below one. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../../examples/peak.h"

#include <stdio.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- The clock, which bounds the peak: a chain of multiplications takes 3 cycles each */

#if AMPI_X86
static double clock_ghz(void) {
    double start = now();
    long i, x = 3;
    for (i = 0; i < 2000000; i++) __asm__ volatile("imul %0, %0\n\timul %0, %0\n\timul %0, %0\n\timul %0, %0" : "+r"(x));
    return 2000000 * 4 * 3 / (now() - start) * 1e-9;
}
#endif

/* ---- Cases */

typedef struct bench_case {
    const char *name;
    int64_t m, n, k;
    int trans_a, trans_b;
    amp_dtype a, b, c, compute;
    float beta;
    int packed, pairs, bias_gelu;
    double bar;                         /* of its peak; 0: none */
    /* filled in */
    amp_k_gemm g;
    double rates[64], median, best;
} bench_case;

#define S 1024
#define F AMP_F32
#define B AMP_BF16
#define H AMP_F16
static bench_case cases[] = {
    {"fp32 NN 1024^3",                         S, S, S, 0, 0, F, F, F, F, 0, 0, 0, 0, 0.80, {0}, {0}, 0, 0},
    {"fp32 NT 1024^3",                         S, S, S, 0, 1, F, F, F, F, 0, 0, 0, 0, 0.80, {0}, {0}, 0, 0},
    {"fp32 NT 1024^3 packed B",                S, S, S, 0, 1, F, F, F, F, 0, 1, 0, 0, 0.80, {0}, {0}, 0, 0},
    {"fp32 TN 1024^3 beta 1",                  S, S, S, 1, 0, F, F, F, F, 1, 0, 0, 0, 0.80, {0}, {0}, 0, 0},
    {"fp32 linear 256x3072x768 NT bias gelu",  256, 3072, 768, 0, 1, F, F, F, F, 0, 0, 0, 1, 0, {0}, {0}, 0, 0},
    {"fp32 dX 256x768x3072 NN",                256, 768, 3072, 0, 0, F, F, F, F, 0, 0, 0, 0, 0, {0}, {0}, 0, 0},
    {"fp32 dW 3072x768x256 TN beta 1",         3072, 768, 256, 1, 0, F, F, F, F, 1, 0, 0, 0, 0, {0}, {0}, 0, 0},
    {"bf16 NT 1024^3 from fp32, packed B",     S, S, S, 0, 1, F, F, F, B, 0, 1, 0, 0, 0.85, {0}, {0}, 0, 0},
    {"bf16 NT 1024^3 from fp32",               S, S, S, 0, 1, F, F, F, B, 0, 0, 0, 0, 0.80, {0}, {0}, 0, 0},
    {"bf16 NT 1024^3 from bf16, packed B",     S, S, S, 0, 1, B, B, B, B, 0, 1, 0, 0, 0.85, {0}, {0}, 0, 0},
    {"bf16 linear 256x3072x768 packed, gelu",  256, 3072, 768, 0, 1, B, F, B, B, 0, 1, 0, 1, 0, {0}, {0}, 0, 0},
    {"bf16 dX 256x768x3072 NN packed B",       256, 768, 3072, 0, 0, B, F, B, B, 0, 1, 0, 0, 0, {0}, {0}, 0, 0},
    {"bf16 dW 3072x768x256 TN beta 1",         3072, 768, 256, 1, 0, B, B, F, B, 1, 0, 0, 0, 0, {0}, {0}, 0, 0},
    {"fp16 NT 1024^3 from fp16, packed B",     S, S, S, 0, 1, H, H, H, H, 0, 1, 0, 0, 0, {0}, {0}, 0, 0},
    {"fp16 linear 256x3072x768 packed, gelu",  256, 3072, 768, 0, 1, H, F, H, H, 0, 1, 0, 1, 0, {0}, {0}, 0, 0},
    {"fp16 dX 256x768x3072 NN packed B",       256, 768, 3072, 0, 0, H, F, H, H, 0, 1, 0, 0, 0, {0}, {0}, 0, 0},
    {"fp16 dW 3072x768x256 TN beta 1",         3072, 768, 256, 1, 0, H, H, F, H, 1, 0, 0, 0, 0, {0}, {0}, 0, 0},
    {"vdpbf16ps NT 1024^3 from fp32, packed B", S, S, S, 0, 1, F, F, F, B, 0, 1, 1, 0, 0.85, {0}, {0}, 0, 0},
    {"vdpbf16ps NT 1024^3 from fp32",          S, S, S, 0, 1, F, F, F, B, 0, 0, 1, 0, 0.80, {0}, {0}, 0, 0},
    {"vdpbf16ps dW 3072x768x256 TN beta 1",    3072, 768, 256, 1, 0, B, B, F, B, 1, 0, 1, 0, 0, {0}, {0}, 0, 0},
};
enum { CASES = sizeof cases / sizeof *cases };
#undef S
#undef F
#undef B
#undef H

/* One block is kept for the next call, as a context keeps its scratch memory. */
static void *spare;
static size_t spare_size;
static void *bench_alloc(void *user, size_t size, size_t align) {
    void *p = NULL;
    (void)user;
    if (spare != NULL && spare_size >= size) { p = spare; spare = NULL; return p; }
    return posix_memalign(&p, align, size) == 0 ? p : NULL;
}
static void bench_free(void *user, void *p, size_t size) {
    (void)user;
    free(spare);
    spare = p;
    spare_size = size;
}
/* user: the pool */
static void bench_parallel(void *user, int32_t n, void (*run)(void *arg, int32_t i), void *arg) { ampi_threads_run((ampi_threads *)user, n, run, arg); }

static void *numbers(amp_dtype dtype, int64_t n) {
    char *p = (char *)bench_alloc(NULL, (size_t)n * 4, 64);
    int64_t i;
    for (i = 0; i < n; i++) {
        float x = (float)(i * 7919 % 1009) / 1009.0f - 0.5f;
        uint16_t h = dtype == AMP_F16 ? amp_f16_from_f32(x, 0) : amp_bf16_from_f32(x, 0);
        if (dtype == AMP_F32) memcpy(p + 4 * i, &x, 4);
        else memcpy(p + 2 * i, &h, 2);
    }
    return p;
}

static const ampi_gemm_vec *table_of(const bench_case *c, const ampi_cpu *cpu) {
#if AMPI_GEMM_BF16
    if (c->pairs) return cpu->path == AMP_CPU_AMX ? &ampi_gemm_kernels_bf16 : NULL;
#endif
    return c->pairs ? NULL : ampi_gemm_pick(cpu, c->compute);
}

static int prepare(bench_case *c, ampi_cpu *cpu) {
    amp_k_pack pack;
    void *packed;
    if (table_of(c, cpu) == NULL) return 0;
    c->g.m = c->m; c->g.n = c->n; c->g.k = c->k; c->g.batch = 1;
    c->g.a = numbers(c->a, c->m * c->k); c->g.a_dtype = c->a; c->g.trans_a = c->trans_a; c->g.lda = c->trans_a ? c->m : c->k;
    c->g.b = numbers(c->b, c->n * c->k); c->g.b_dtype = c->b; c->g.trans_b = c->trans_b; c->g.ldb = c->trans_b ? c->k : c->n;
    c->g.c = numbers(c->c, c->m * c->n); c->g.c_dtype = c->c; c->g.ldc = c->n;
    c->g.compute = c->compute; c->g.alpha = 1; c->g.beta = c->beta;
    if (c->bias_gelu) { c->g.bias = numbers(AMP_F32, c->n); c->g.bias_dtype = AMP_F32; c->g.act = AMP_ACT_GELU; }
    if (!c->packed) return 1;
    memset(&pack, 0, sizeof pack);
    pack.b = c->g.b; pack.b_dtype = c->b; pack.compute = c->compute; pack.trans_b = c->trans_b;
    pack.k = c->k; pack.n = c->n; pack.ldb = c->g.ldb;
    packed = bench_alloc(NULL, (size_t)(c->k + 64) * (size_t)(c->n + 64) * 4, 64);
    c->g.packed_b = packed;
    return ampi_gemm_pack_with(cpu, table_of(c, cpu), &pack, packed) == AMP_OK;
}

/* CALLS calls after one that is not timed. */
enum { CALLS = 4 };
static double case_rate(const bench_case *c, ampi_cpu *cpu) {
    double start = 0, flops = 2.0 * (double)c->m * (double)c->n * (double)c->k * CALLS;
    int i;
    for (i = 0; i <= CALLS; i++) {
        if (i == 1) start = now();
        if (ampi_gemm_with(cpu, table_of(c, cpu), &c->g) != AMP_OK) exit(1);
    }
    return flops / (now() - start) * 1e-9;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *x, int n) { qsort(x, (size_t)n, sizeof *x, compare); return x[n / 2]; }

/* The median rates of the instructions, GFLOP/s; 0: not here. */
typedef struct peak_set { double fma, dot, amx; } peak_set;
static double peak_of(const bench_case *c, const peak_set *p) {
    if (c->compute != AMP_BF16) return p->fma;
    if (c->pairs || p->amx == 0) return p->dot > 0 ? p->dot : p->fma;
    return p->amx;
}

static void write_json(const char *path, const amp_cpu_info *info, int threads, int rounds, const peak_set *peaks) {
    FILE *f = fopen(path, "w");
    int i;
    if (f == NULL) { fprintf(stderr, "cannot write %s\n", path); exit(1); }
    fprintf(f, "{\"bench\": \"gemm\", \"cpu\": \"%s\", \"compiler\": \"%s\", \"threads\": %d, \"rounds\": %d,\n", info->name, __VERSION__, threads, rounds);
    fprintf(f, " \"peak_fma\": %.1f, \"peak_vdpbf16ps\": %.1f, \"peak_amx\": %.1f, \"unit\": \"GFLOP/s\", \"cases\": [\n", peaks->fma, peaks->dot, peaks->amx);
    for (i = 0; i < CASES; i++) {
        const char *comma = i + 1 < CASES ? "," : "";
        fprintf(f, "  {\"name\": \"%s\", \"median\": %.1f, \"best\": %.1f, \"peak\": %.1f, \"bar\": %.2f}%s\n", cases[i].name, cases[i].median, cases[i].best, peak_of(&cases[i], peaks), cases[i].bar, comma);
    }
    fprintf(f, "]}\n");
    fclose(f);
}

int main(int argc, char **argv) {
    amp_machine machine;
    ampi_cpu cpu;
    amp_system system = ampi_system(NULL);
    ampi_threads *pool = NULL;
    const char *json = NULL;
    double fma[64], dot[64], amx[64], ghz = 0;
    peak_set peaks;
    int rounds = 15, round, i, failed = 0;
    peak_loop loop, loop16, loop_amx;
    double lanes;
    memset(&cpu, 0, sizeof cpu);
    if (amp_machine_probe(&machine) != AMP_OK) return 1;
    cpu.host.alloc = bench_alloc;
    cpu.host.free = bench_free;
    cpu.threads = machine.cpu.cores;
    cpu.path = machine.cpu.path;
    for (i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--threads")) cpu.threads = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--rounds")) rounds = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--path")) cpu.path = (amp_cpu_path)atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--json")) json = argv[i + 1];
    }
    if (ampi_threads_open(&pool, &system, cpu.threads, machine.cpu.cores, 0) != AMP_OK) return 1;
    cpu.host.user = pool;
    cpu.host.parallel = bench_parallel;
    rounds = AMPI_MAX(1, AMPI_MIN(rounds, 63));
    loop = peak_of_path(cpu.path, AMP_F32);
    loop16 = peak_of_path(cpu.path >= AMP_CPU_AVX512_BF16 ? AMP_CPU_AVX512_BF16 : AMP_CPU_SCALAR, AMP_BF16);
    loop_amx = peak_of_path(cpu.path == AMP_CPU_AMX ? AMP_CPU_AMX : AMP_CPU_SCALAR, AMP_BF16);
    lanes = cpu.path >= AMP_CPU_AVX512 ? 16 : 8;
    if (loop.loop == NULL) { printf("skipped: this CPU has no FMA, there is no peak to compare with\n"); ampi_threads_close(pool); return 0; }
    for (i = 0; i < CASES; i++) if (!prepare(&cases[i], &cpu)) cases[i].g.m = 0;
    for (round = -1; round < rounds; round++) {             /* round -1 warms up */
        int at = AMPI_MAX(round, 0);
        fma[at] = peak_rate(loop, cpu.threads);
        dot[at] = peak_rate(loop16, cpu.threads);
        amx[at] = peak_rate(loop_amx, cpu.threads);
        for (i = 0; i < CASES; i++) if (cases[i].g.m) cases[i].rates[at] = case_rate(&cases[i], &cpu);
#if AMPI_X86
        ghz = AMPI_MAX(ghz, clock_ghz());
#endif
    }
    peaks.fma = median(fma, rounds);
    peaks.dot = median(dot, rounds);
    peaks.amx = median(amx, rounds);
    printf("%s, %d threads, %d rounds, %.2f GHz\n", machine.cpu.name, cpu.threads, rounds, ghz);
    printf("peak fp32 FMA    %7.1f GFLOP/s (best %.1f): %.2f FMAs of %d lanes a cycle and thread\n", peaks.fma, fma[rounds - 1],
           peaks.fma / ghz / (2 * lanes) / cpu.threads, (int)lanes);
    if (fma[rounds - 1] / ghz / (2 * lanes) / cpu.threads < 0.9) { printf("the peak loop is not credible: its sums spill\n"); failed = 1; }
    if (loop16.loop) printf("peak vdpbf16ps   %7.1f GFLOP/s (best %.1f)\n", peaks.dot, dot[rounds - 1]);
    if (loop_amx.loop) printf("peak tdpbf16ps   %7.1f GFLOP/s (best %.1f)\n", peaks.amx, amx[rounds - 1]);
    for (i = 0; i < CASES; i++) {
        bench_case *c = &cases[i];
        double of = peak_of(c, &peaks);
        if (!c->g.m) { printf("%-40s skipped: no instruction\n", c->name); continue; }
        c->median = median(c->rates, rounds);
        c->best = c->rates[rounds - 1];
        printf("%-40s %7.1f GFLOP/s (best %7.1f)  %5.1f%% of the peak", c->name, c->median, c->best, 100 * c->median / of);
        if (c->bar > 0) printf("  %s (bar %.0f%%)", c->median / of >= c->bar ? "ok" : "BELOW", 100 * c->bar);
        if (c->bar > 0 && c->median / of < c->bar) failed = 1;
        printf("\n");
    }
    if (json) write_json(json, &machine.cpu, cpu.threads, rounds, &peaks);
    ampi_threads_close(pool);
    return failed;
}
