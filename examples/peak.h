/* peak.h - how fast this CPU can multiply and copy: loops that do nothing else, on all threads.
 *
 * Include after amp.h.  The rate of a product means something only relative to such a peak.  The sums are named
 * variables that the compiler must keep in registers: an array would spill, and make the "peak" too low.  No core does
 * more than two FMAs a cycle; bench_gemm.c checks the loops against the clock. */
#ifndef PEAK_H
#define PEAK_H

#include <pthread.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define PEAK_X86 1
#if defined(__clang__) || __GNUC__ >= 10
#define PEAK_DOT 1
#endif
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define PEAK_AMX 1
#endif
#define PEAK_14(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define PEAK_28(X) PEAK_14(X) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27)

/* The asm hides that all sums are equal: otherwise the compiler would keep only one. */
#define PEAK_SUM512(i) __m512 s##i = _mm512_setzero_ps(); __asm__("" : "+v"(s##i));
#define PEAK_SUM256(i) __m256 s##i = _mm256_setzero_ps(); __asm__("" : "+x"(s##i));
#define PEAK_FMA512(i) s##i = _mm512_fmadd_ps(x, x, s##i);
#define PEAK_FMA256(i) s##i = _mm256_fmadd_ps(x, x, s##i);
#define PEAK_DOT512(i) s##i = _mm512_dpbf16_ps(s##i, (__m512bh)x, (__m512bh)x);
#define PEAK_USE512(i) __asm__ volatile("" : : "v"(s##i));
#define PEAK_USE256(i) __asm__ volatile("" : : "x"(s##i));

__attribute__((target("avx512f"))) static void peak_fma512(long n) {
    __m512 x = _mm512_setzero_ps();
    PEAK_28(PEAK_SUM512)
    for (; n > 0; n--) { PEAK_28(PEAK_FMA512) __asm__ volatile("" : "+v"(x)); }
    PEAK_28(PEAK_USE512)
}
__attribute__((target("avx2,fma"))) static void peak_fma256(long n) {
    __m256 x = _mm256_setzero_ps();
    PEAK_14(PEAK_SUM256)
    for (; n > 0; n--) { PEAK_14(PEAK_FMA256) __asm__ volatile("" : "+x"(x)); }
    PEAK_14(PEAK_USE256)
}
#ifdef PEAK_DOT
__attribute__((target("avx512f,avx512bf16"))) static void peak_dot512(long n) {
    __m512 x = _mm512_setzero_ps();
    PEAK_28(PEAK_SUM512)
    for (; n > 0; n--) { PEAK_28(PEAK_DOT512) __asm__ volatile("" : "+v"(x)); }
    PEAK_28(PEAK_USE512)
}
#endif
#ifdef PEAK_AMX
/* Eight tiles of 16 rows of 64 bytes; four sums. */
__attribute__((target("amx-tile,amx-bf16"))) static void peak_tiles(long n) {
    static const struct { uint8_t palette, start, zero[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } config = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}
    };
    _tile_loadconfig(&config);
    for (; n > 0; n--) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}
#endif
#endif

/* A loop and the floating point operations of one round of it; loop NULL: not known for this CPU. */
typedef struct peak_loop { void (*loop)(long n); double flops; const char *name; } peak_loop;

/* The instruction that the kernels of `path` multiply `compute` with. */
static __attribute__((unused)) peak_loop peak_of_path(amp_cpu_path path, amp_dtype compute) {
    peak_loop p = {NULL, 0, "unknown"};
#ifdef PEAK_X86
    if (path >= AMP_CPU_AVX512) { p.loop = peak_fma512; p.flops = 28 * 2 * 16; p.name = "AVX-512 FMA"; }
    if (path == AMP_CPU_AVX2) { p.loop = peak_fma256; p.flops = 14 * 2 * 8; p.name = "AVX2 FMA"; }
#ifdef PEAK_DOT
    if (path == AMP_CPU_AVX512_BF16 && compute == AMP_BF16) {
        p.loop = peak_dot512;
        p.flops = 28 * 4 * 16;
        p.name = "vdpbf16ps";
    }
#endif
#ifdef PEAK_AMX
    if (path == AMP_CPU_AMX && compute == AMP_BF16) {
        p.loop = peak_tiles;
        p.flops = 4 * 2 * 16 * 16 * 32;
        p.name = "AMX tdpbf16ps";
    }
#endif
#endif
    (void)path; (void)compute;
    return p;
}

typedef struct peak_thread { peak_loop peak; long n; } peak_thread;
static __attribute__((unused)) void *peak_run(void *arg) {
    const peak_thread *t = (const peak_thread *)arg;
    t->peak.loop(t->n);
    return NULL;
}

static __attribute__((unused)) double peak_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* GFLOP/s of `threads` threads together, once; 0 if the loop is not known. */
static __attribute__((unused)) double peak_rate(peak_loop peak, int threads) {
    pthread_t ids[256];
    peak_thread job;
    double start;
    int i, started = 0;
    if (peak.loop == NULL) return 0;
    job.peak = peak;
    job.n = 1000;
    do {                                        /* long enough to make starting threads negligible */
        job.n *= 2;
        start = peak_clock();
        peak.loop(job.n);
    } while (peak_clock() - start < 0.03);
    start = peak_clock();
    for (i = 1; i < threads && i < 256; i++) started += pthread_create(&ids[started], NULL, peak_run, &job) == 0;
    peak.loop(job.n);
    for (i = 0; i < started; i++) pthread_join(ids[i], NULL);
    return 1e-9 * peak.flops * (double)job.n * (started + 1) / (peak_clock() - start);
}

/* ---- Copies.  Each thread copies its own piece repeatedly, so that small ones come from its cache. */

typedef struct peak_copy_job { char *memory; size_t half; long n; } peak_copy_job;
static __attribute__((unused)) void *peak_copy_run(void *arg) {
    const peak_copy_job *job = (const peak_copy_job *)arg;
    long i;
    for (i = 0; i < job->n; i++) {
        memcpy(job->memory, job->memory + job->half, job->half);
        __asm__ volatile("" : : : "memory");
    }
    return NULL;
}

/* Seconds for `threads` threads together to read bytes / 2 and write as much, as a copy does; 0: no memory. */
static __attribute__((unused)) double peak_copy_once(double bytes, int threads) {
    const double most = 268435456;              /* beyond this, the time is proportional */
    double used = bytes < most ? bytes : most, start, seconds;
    peak_copy_job jobs[256];
    pthread_t ids[256];
    size_t half;
    int i, started = 0;
    threads = threads < 1 ? 1 : threads > 256 ? 256 : threads;
    half = ((size_t)(used / 2 / threads) + 64) / 64 * 64;
    for (i = 0; i < threads; i++) {
        jobs[i].memory = (char *)malloc(2 * half);
        jobs[i].half = half;
        jobs[i].n = 1 + (long)(3e7 / (double)half);
        if (jobs[i].memory == NULL) break;
        memset(jobs[i].memory, 1, 2 * half);
    }
    threads = i;
    start = peak_clock();
    for (i = 1; i < threads; i++) started += pthread_create(&ids[started], NULL, peak_copy_run, &jobs[i]) == 0;
    if (threads > 0) peak_copy_run(&jobs[0]);
    for (i = 0; i < started; i++) pthread_join(ids[i], NULL);
    seconds = peak_clock() - start;
    for (i = 0; i < threads; i++) free(jobs[i].memory);
    if (threads == 0) return 0;
    return seconds / (double)jobs[0].n * bytes / (2 * (double)half * (started + 1));
}

/* ---- The floor: the time of the arithmetic at its peak, plus that of a copy of as many bytes.  A yardstick, the same
   for all operators: a program that overlaps the two, reads far more than it writes, or finds its data in a cache can
   beat it. */

typedef struct peak_machine { peak_loop loop; double rate; int threads; } peak_machine;     /* GFLOP/s; 0: unknown */

/* The best of five. */
static __attribute__((unused)) peak_machine peak_measure(amp_cpu_path path, amp_dtype compute, int threads) {
    peak_machine m;
    int i;
    m.loop = peak_of_path(path, compute);
    m.rate = 0;
    m.threads = threads;
    for (i = 0; i < 5; i++) {
        double once = peak_rate(m.loop, threads);
        if (once > m.rate) m.rate = once;
    }
    return m;
}

/* Seconds for `flops` at the peak plus those of a copy that moves `bytes` in `calls` equal parts: the best of five.
   0: unknown. */
static __attribute__((unused)) double peak_floor(const peak_machine *m, double flops, double bytes, double calls) {
    double copy = 0;
    int i;
    if (m->rate <= 0 || calls <= 0) return 0;
    for (i = 0; i < 5; i++) {
        double once = peak_copy_once(bytes / calls, m->threads);
        if (once <= 0) return 0;
        if (i == 0 || once < copy) copy = once;
    }
    return 1e-9 * flops / m->rate + copy * calls;
}

#endif
