/* bench_convert.c - compares the time of amp_convert from and to fp64 with that of memcpy of the larger side.
 *
 *     cc -std=c99 -D_GNU_SOURCE -O2 -o bench_convert tests/bench/bench_convert.c -lm -lpthread
 *     ./bench_convert [--rounds N] [--us N] [--only fp16]
 *
 * It measures every dtype that stores numbers, in both directions, on one thread, in three sizes: in the first cache, in
 * the second cache, and in memory.  Each round calls amp_convert and then memcpy for some microseconds, at least once.  A
 * time is the median over the rounds, and a ratio is the median of the rounds' ratios. */
#define AMP_IMPLEMENTATION
#include "bench.h"

enum { MOST_ROUNDS = 1000, SIZES = 3 };
static const struct { const char *name; int64_t n; } sizes[SIZES] = {{"first cache", 1024}, {"second cache", 16384}, {"memory", 1 << 23}};
static const amp_dtype dtypes[] = {AMP_F32, AMP_F16, AMP_BF16, AMP_E4M3, AMP_E5M2};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

typedef struct job { void *to; const void *from; amp_dtype to_dtype, from_dtype; int64_t n; int stochastic; } job;

static void convert(const job *j) {
    amp_convert_desc how;
    memset(&how, 0, sizeof how);
    how.rounding = j->stochastic ? AMP_ROUND_STOCHASTIC : AMP_ROUND_DEFAULT;
    bench_need(amp_convert(j->to, j->to_dtype, j->from, j->from_dtype, j->n, &how, NULL), "amp_convert");
}
static void copy(const job *j) {
    memcpy(j->to, j->from, (size_t)j->n * 8);
    __asm__ volatile("" : : "r"(j->to) : "memory");
}

/* Nanoseconds of a call. */
static double time_of(void (*call)(const job *j), const job *j, int64_t us) {
    double start = ex_seconds(), seconds = 0;
    int64_t calls = 0, each = 1;
    for (; calls == 0 || seconds < 1e-6 * (double)us; calls += each, seconds = ex_seconds() - start) {
        int64_t i;
        if (calls > 0) each = AMPI_MAX((int64_t)1, (int64_t)((double)calls * 1e-7 * (double)us / seconds));
        for (i = 0; i < each; i++) call(j);
    }
    return 1e9 * seconds / (double)calls;
}

static void measure(const job *j, const job *copied, int size, int64_t rounds, int64_t us) {
    static double times[MOST_ROUNDS], copies[MOST_ROUNDS], ratios[MOST_ROUNDS];
    double n = (double)j->n;
    int64_t r;
    convert(j);
    copy(copied);
    for (r = 0; r < rounds; r++) {
        times[r] = time_of(convert, j, us);
        copies[r] = time_of(copy, copied, us);
        ratios[r] = times[r] / copies[r];
    }
    metrics_begin(stdout, "convert");
    metrics_text(stdout, "from", amp_dtype_name(j->from_dtype));
    metrics_text(stdout, "to", amp_dtype_name(j->to_dtype));
    metrics_integer(stdout, "stochastic", j->stochastic);
    metrics_text(stdout, "where", sizes[size].name);
    metrics_integer(stdout, "elements", j->n);
    metrics_number(stdout, "ns_per_element", bench_median(times, rounds) / n);
    metrics_number(stdout, "copy_ns_per_element", bench_median(copies, rounds) / n);
    metrics_number(stdout, "over_copy", bench_median(ratios, rounds));
    metrics_end(stdout);
    fprintf(stderr, "%-9s -> %-9s %-11s %-13s %8.3f ns, %5.2f copies\n", amp_dtype_name(j->from_dtype), amp_dtype_name(j->to_dtype),
            j->stochastic ? "stochastic" : "nearest", sizes[size].name, times[rounds / 2] / n, ratios[rounds / 2]);
}

int main(int argc, char **argv) {
    int64_t rounds = 21, us = 200, most = sizes[SIZES - 1].n, i;
    const char *only = "";
    const bench_flag flags[] = {
        {"rounds", &rounds, NULL, "rounds, at most 1000"},
        {"us", &us, NULL, "microseconds of each in a round"},
        {"only", NULL, &only, "one dtype"},
    };
    amp_context *amp;
    /* From three places in a page: loads wait for stores that lie a whole number of pages away. */
    double *from = (double *)bench_memory((size_t)most * 8), *target = (double *)bench_memory((size_t)most * 8 + 4096), *to = target + 160;
    double *narrowed = (double *)bench_memory((size_t)most * 8 + 4096), *narrow = narrowed + 320;
    int size, d, way;
    bench_flags(argc, argv, flags, (int)(sizeof flags / sizeof *flags));
    rounds = AMPI_MIN(AMPI_MAX(rounds, (int64_t)1), (int64_t)MOST_ROUNDS);
    bench_need(amp_open(&amp, NULL), "amp_open");
    bench_begin("conversions", amp);
    metrics_end(stdout);
    amp_close(amp);
    for (i = 0; i < most; i++) from[i] = 4 * (double)amp_random_uniform(1, (uint64_t)i) - 2 + 1e-9 * (double)amp_random_uniform(2, (uint64_t)i);
    for (size = 0; size < SIZES; size++)
        for (d = 0; d < DTYPES; d++)
            for (way = 0; way < 3; way++) {         /* from fp64, stochastically too, and to it */
                job j, copied;
                if ((*only != 0 && strcmp(only, amp_dtype_name(dtypes[d])) != 0) || (way == 1 && dtypes[d] == AMP_F32)) continue;
                memset(&j, 0, sizeof j);
                j.n = sizes[size].n;
                j.stochastic = way == 1;
                copied = j;
                copied.from = from; copied.to = to;
                j.from = way == 2 ? narrow : from; j.to = way == 2 ? to : narrow;
                j.from_dtype = way == 2 ? dtypes[d] : AMP_F64; j.to_dtype = way == 2 ? AMP_F64 : dtypes[d];
                if (way == 2) bench_need(amp_convert(narrow, dtypes[d], from, AMP_F64, j.n, NULL, NULL), "amp_convert");
                measure(&j, &copied, size, rounds, us);
            }
    free(from); free(target); free(narrowed);
    return 0;
}
