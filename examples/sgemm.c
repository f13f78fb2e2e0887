/* sgemm.c - a matrix product: one line of a program replaced by amp.h, which computes it in the precision asked for.
 *
 *     gcc -O2 examples/sgemm.c -o sgemm -lm -lpthread && ./sgemm [auto, fp32, bf16 or fp16] */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { M = 512, N = 512, K = 512 };
static float a[M * K], b[K * N], c[M * N], d[M * N];

static void check(amp_result result) {
    if (result != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); exit(1); }
}
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The program as it was: D = A B in loops; or cblas_sgemm(CblasRowMajor, CblasNoTrans, ...). */
static void multiply(void) {
    for (int i = 0; i < M; i++)
        for (int k = 0; k < K; k++)
            for (int j = 0; j < N; j++) d[i * N + j] += a[i * K + k] * b[k * N + j];
}

int main(int argc, char **argv) {
    amp_context *amp;
    amp_desc desc = {.gemm_always = 1};                 /* amp_gemm computes in .dtype outside of regions too */
    double began, seconds = 0, loops, worst = 0, most = 0;
    for (int i = 0; i < M * K; i++) a[i] = amp_random_uniform(1, (uint64_t)i) - 0.5f;
    for (int i = 0; i < K * N; i++) b[i] = amp_random_uniform(2, (uint64_t)i) - 0.5f;
    check(amp_dtype_parse(argc > 1 ? argv[1] : "auto", &desc.dtype));
    check(amp_open(&amp, &desc));

    began = now();
    multiply();
    loops = now() - began;
    for (int twice = 0; twice < 2; twice++) {           /* the first call also starts the threads */
        began = now();
        check(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, M, N, K, 1, a, K, b, N, 0, c, N));
        seconds = now() - began;
    }

    for (int i = 0; i < M * N; i++) {
        worst = fmax(worst, fabs((double)c[i] - (double)d[i]));
        most = fmax(most, fabs((double)d[i]));
    }
    printf("loops %.1f ms, amp_gemm %.1f ms; largest difference %.2g, largest element %.2g\n", 1e3 * loops,
           1e3 * seconds, worst, most);
    amp_close(amp);
    return fflush(stdout) != 0 || ferror(stdout);
}
