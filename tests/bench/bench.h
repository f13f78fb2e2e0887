/* bench.h - what the benchmarks share: flags, order statistics, a counting allocator, and JSON lines.
 *
 * A benchmark defines AMP_IMPLEMENTATION and includes this file.  It prints one JSON object per line on the standard
 * output, each with an "event".  Text for people goes to the standard error. */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include "../../examples/gpt.h"
#include "../../examples/metrics.h"
#include "../../examples/profile.h"

/* ---- Ending */

/* Ends the benchmark when a call failed. */
static inline void bench_need(amp_result result, const char *what) {
    if (result == AMP_OK) return;
    fprintf(stderr, "%s: %s\n", what, ex_error());
    exit(1);
}

static inline void *bench_memory(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes > 0 ? bytes : 64) == 0) return memory;
    fprintf(stderr, "no memory for %zu bytes\n", bytes);
    exit(1);
}

/* ---- Flags: --name number, or --name word */

typedef struct bench_flag {
    const char *name;
    int64_t *number;                /* one of number and text is NULL */
    const char **text;
    const char *help;
} bench_flag;

static inline void bench_usage(const char *program, const bench_flag *flags, int n) {
    int i;
    fprintf(stderr, "usage: %s\n", program);
    for (i = 0; i < n; i++) {
        fprintf(stderr, "  --%-10s %s (default ", flags[i].name, flags[i].help);
        if (flags[i].number != NULL) fprintf(stderr, "%lld)\n", (long long)*flags[i].number);
        else fprintf(stderr, "%s)\n", *flags[i].text);
    }
    exit(2);
}

/* Reads the command line; an unknown flag or a bad number ends the program with the list of flags. */
static inline void bench_flags(int argc, char **argv, const bench_flag *flags, int n) {
    int a, i;
    for (a = 1; a < argc; a += 2) {
        const bench_flag *found = NULL;
        char *end = NULL;
        for (i = 0; i < n && strncmp(argv[a], "--", 2) == 0; i++)
            if (strcmp(argv[a] + 2, flags[i].name) == 0) found = &flags[i];
        if (found == NULL || a + 1 == argc) bench_usage(argv[0], flags, n);
        if (found->text != NULL) { *found->text = argv[a + 1]; continue; }
        *found->number = strtoll(argv[a + 1], &end, 10);
        if (end == argv[a + 1] || *end != 0) bench_usage(argv[0], flags, n);
    }
}

/* The dtype of "fp32", "tf32", "fp16" or "bf16"; ends the program on another word. */
static inline amp_dtype bench_dtype(const char *name) {
    static const struct { const char *name; amp_dtype dtype; } known[] = {
        {"fp32", AMP_F32}, {"tf32", AMP_TF32}, {"fp16", AMP_F16}, {"bf16", AMP_BF16}};
    size_t i;
    for (i = 0; i < sizeof known / sizeof *known; i++) if (strcmp(known[i].name, name) == 0) return known[i].dtype;
    fprintf(stderr, "%s: the precision is fp32, tf32, fp16 or bf16\n", name);
    exit(2);
}

/* ---- Order statistics */

static inline int bench_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts values and returns the one below which `part` of them lie: 0.5 is the median. */
static inline double bench_quantile(double *values, int64_t n, double part) {
    int64_t at = (int64_t)(part * (double)(n - 1) + 0.5);
    if (n < 1) return 0;
    qsort(values, (size_t)n, sizeof *values, bench_compare);
    return values[at];
}
static inline double bench_median(double *values, int64_t n) { return bench_quantile(values, n, 0.5); }

/* ---- Time */

/* CPU time of this thread, in seconds, which does not include waiting. */
static inline double bench_thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static inline void bench_sleep(double seconds) {
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    nanosleep(&t, NULL);
}

/* ---- A counting allocator, for amp_desc.system.  The library calls it from any thread. */

typedef struct bench_counts { int64_t allocations, bytes, peak; } bench_counts;

static inline void *bench_count_alloc(void *user, size_t size, size_t align) {
    bench_counts *counts = (bench_counts *)user;
    void *memory = NULL;
    int64_t bytes, peak;
    if (posix_memalign(&memory, align < sizeof(void *) ? sizeof(void *) : align, size) != 0) return NULL;
    __atomic_add_fetch(&counts->allocations, 1, __ATOMIC_RELAXED);
    bytes = __atomic_add_fetch(&counts->bytes, (int64_t)size, __ATOMIC_RELAXED);
    peak = __atomic_load_n(&counts->peak, __ATOMIC_RELAXED);
    while (bytes > peak &&
           !__atomic_compare_exchange_n(&counts->peak, &peak, bytes, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { }
    return memory;
}
static inline void bench_count_free(void *user, void *memory, size_t size) {
    bench_counts *counts = (bench_counts *)user;
    __atomic_sub_fetch(&counts->bytes, (int64_t)size, __ATOMIC_RELAXED);
    free(memory);
}
static inline void bench_count_into(amp_desc *desc, bench_counts *counts) {
    memset(counts, 0, sizeof *counts);
    desc->system.user = counts;
    desc->system.alloc = bench_count_alloc;
    desc->system.free = bench_count_free;
}

/* ---- JSON lines */

/* The kernels' instruction set, as amp_machine_text names it. */
static inline const char *bench_path_name(amp_cpu_path path) {
    static const char *const names[] = {"default", "scalar", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"};
    return names[path >= AMP_CPU_DEFAULT && path <= AMP_CPU_AMX ? path : 0];
}

/* Begins a line that says where and how it was measured. */
static inline void bench_begin(const char *event, const amp_context *amp) {
    amp_desc desc;
    amp_machine machine;
    memset(&desc, 0, sizeof desc);
    memset(&machine, 0, sizeof machine);
    metrics_begin(stdout, event);
    metrics_text(stdout, "who", "amp.h");
    metrics_text(stdout, "version", AMP_VERSION_TEXT);
    if (amp_query(amp, &desc) != AMP_OK || amp_query_machine(amp, &machine) != AMP_OK) return;
    metrics_text(stdout, "cpu", machine.cpu.name);
    metrics_text(stdout, "path", bench_path_name(desc.cpu_path));
    metrics_integer(stdout, "amx", machine.cpu.amx_bf16);
    metrics_text(stdout, "compiler", __VERSION__);
    metrics_integer(stdout, "threads", desc.threads);
}

#endif
