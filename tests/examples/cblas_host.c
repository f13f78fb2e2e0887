/* cblas_host.c - a program that uses CBLAS, which tests/examples/shim.sh compiles against examples/adopt/cblas.h.  It
 * compiles unchanged against any BLAS.
 *
 *     cblas_host fp32|tf32|bf16|fp16    every form of cblas_sgemm against plain loops over operands rounded to that format
 *     cblas_host bits                   a number computed from all bits of those products
 *     cblas_host threads                the comparison of fp32 in four threads at once, which make the program's first products
 *     cblas_host fork                   in children, forked while other threads compute; the fork waits for these threads
 *     cblas_host exit                   ends while other threads compute
 *     cblas_host bad                    invalid arguments, and the memory that they could have overwritten
 *     cblas_host nan                    alpha and beta that are NaN, which must make the result NaN
 *     cblas_host others                 with -DOTHERS: functions other than sgemm
 *     cblas_host time                   the rate of a product of 1024 x 1024 matrices
 *
 * BY_HAND declares cblas_sgemm without a header.  FORTRAN calls sgemm_ instead.
 *
 * Sums of k products in fp32, in any order, are off by at most k u / (1 - k u) times the sum of the products' magnitudes
 * (Higham 2002, 3.1).  alpha, beta and the last addition round three times more. */
#if defined(BY_HAND) || defined(FORTRAN)
typedef enum { CblasRowMajor = 101, CblasColMajor = 102 } CBLAS_ORDER;
typedef enum { CblasNoTrans = 111, CblasTrans = 112 } CBLAS_TRANSPOSE;
#else
#include <cblas.h>
#endif
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(BY_HAND)
void cblas_sgemm(CBLAS_ORDER order, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc);
#elif defined(FORTRAN)
void sgemm_(char *ta, char *tb, int *m, int *n, int *k, float *alpha, const float *a, int *lda, const float *b, int *ldb,
            float *beta, float *c, int *ldc);
/* By rows, C^T = op(B)^T op(A)^T. */
static void cblas_sgemm(CBLAS_ORDER order, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha,
                        const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    char t[2];
    t[0] = ta == CblasTrans ? 'T' : 'n';
    t[1] = tb == CblasTrans ? 'c' : 'N';
    if (order == CblasRowMajor) sgemm_(&t[1], &t[0], &n, &m, &k, &alpha, b, &ldb, a, &lda, &beta, c, &ldc);
    else sgemm_(&t[0], &t[1], &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &ldc);
}
#endif

static __thread uint32_t random_state = 1;
static float number(void) {                             /* -1 to 1, of 24 bits, so that every format rounds it */
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 8) / 8388608.0f - 1;
}

/* To the nearest number with so many bits of mantissa; ties to even, or, for tf32, away from zero. */
static float rounded(float x, int mantissa, int away) {
    uint32_t bits, drop = (uint32_t)(23 - mantissa), half;
    memcpy(&bits, &x, sizeof bits);
    if (drop == 0) return x;
    half = 1u << (drop - 1);
    bits += away ? half : half - 1 + (bits >> drop & 1);
    bits &= ~((1u << drop) - 1);
    memcpy(&x, &bits, sizeof bits);
    return x;
}

static __thread uint32_t all_bits;
static void add_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    all_bits = (all_bits ^ bits) * 16777619u;
}

typedef struct product { int order, ta, tb, m, n, k, pad; float alpha, beta; } product;

/* Rows and columns as stored: the leading dimension, and how many of it. */
static int stored_rows(const product *p, int trans, int rows, int cols) {
    return (p->order == CblasRowMajor) == (trans == CblasNoTrans) ? rows : cols;
}
static float at(const product *p, int trans, const float *x, int ld, int i, int j) {
    return (p->order == CblasRowMajor) == (trans == CblasNoTrans) ? x[(size_t)i * (size_t)ld + (size_t)j]
                                                                   : x[(size_t)j * (size_t)ld + (size_t)i];
}

static float *numbers(int n, float scale) {
    float *x = (float *)malloc((size_t)n * sizeof *x);
    int i;
    for (i = 0; i < n; i++) x[i] = scale * number();
    return x;
}

/* The largest error of one product, in units of its bound; beyond 1 it is wrong. */
static double worst_of(const product *p, int mantissa, int away) {
    int ra = stored_rows(p, p->ta, p->m, p->k), rb = stored_rows(p, p->tb, p->k, p->n),
        rc = stored_rows(p, CblasNoTrans, p->m, p->n), i, j, q;
    int lda = p->m + p->k - ra + p->pad, ldb = p->k + p->n - rb + p->pad, ldc = p->m + p->n - rc + p->pad;
    float *a = numbers(ra * lda + 1, 1), *b = numbers(rb * ldb + 1, 1), *c = numbers(rc * ldc + 1, 1);
    float *before = (float *)malloc((size_t)(rc * ldc + 1) * sizeof *before);
    double worst = 0, u = ldexp(1, -24), gamma = (p->k + 3) * u / (1 - (p->k + 3) * u);
    memcpy(before, c, (size_t)(rc * ldc + 1) * sizeof *before);
    if (p->beta == 0) for (i = 0; i < rc * ldc; i++) c[i] = NAN;        /* must not be read */
    cblas_sgemm((CBLAS_ORDER)p->order, (CBLAS_TRANSPOSE)p->ta, (CBLAS_TRANSPOSE)p->tb, p->m, p->n, p->k, p->alpha, a, lda,
                b, ldb, p->beta, c, ldc);
    for (i = 0; i < p->m; i++) for (j = 0; j < p->n; j++) add_bits(at(p, CblasNoTrans, c, ldc, i, j));
    for (i = 0; i < p->m; i++)
        for (j = 0; j < p->n; j++) {
            double sum = 0, size = 0, old = at(p, CblasNoTrans, before, ldc, i, j), error;
            for (q = 0; q < p->k; q++) {
                double x = (double)rounded(at(p, p->ta, a, lda, i, q), mantissa, away) *
                           (double)rounded(at(p, p->tb, b, ldb, q, j), mantissa, away);
                sum += x;
                size += fabs(x);
            }
            error = fabs(p->alpha * sum + p->beta * old - at(p, CblasNoTrans, c, ldc, i, j));
            size = fabs(p->alpha) * size + fabs(p->beta * old);
            if (!(error <= gamma * size)) return error / (gamma * size > 0 ? gamma * size : 1e-30) + 1;
            if (size > 0 && error / (gamma * size) > worst) worst = error / (gamma * size);
        }
    if (p->beta != 0)                                   /* what lies between the rows stays */
        for (i = 0; i < rc; i++)
            for (j = p->m + p->n - rc; j < ldc; j++)
                if (c[i * ldc + j] != before[i * ldc + j]) return 1e30;
    free(a); free(b); free(c); free(before);
    return worst;
}

static int compare(int mantissa, int away) {
    static const int sizes[][3] = {{1, 1, 1}, {5, 7, 3}, {1, 33, 17}, {64, 1, 40}, {37, 41, 1}, {65, 66, 131}, {4, 4, 0}};
    static const float factors[][2] = {{1, 0}, {1, 1}, {-0.5f, 2}, {0, 0.75f}};
    double worst = 0;
    int form, s, f, n = 0, wrong = 0;
    for (form = 0; form < 8; form++)
        for (s = 0; s < (int)(sizeof sizes / sizeof *sizes); s++)
            for (f = 0; f < 4; f++) {
                product p = {form & 1 ? CblasRowMajor : CblasColMajor, form & 2 ? CblasTrans : CblasNoTrans,
                             form & 4 ? CblasTrans : CblasNoTrans, sizes[s][0], sizes[s][1], sizes[s][2],
                             f * 3 + (sizes[s][2] == 0), factors[f][0], factors[f][1]};
                double one = worst_of(&p, mantissa, away);
                if (one > 1 && ++wrong <= 3)
                    printf("form %d, %d x %d x %d, alpha %g, beta %g: %g of the bound\n", form, p.m, p.n, p.k, (double)p.alpha,
                           (double)p.beta, one);
                if (one > worst) worst = one;
                n++;
            }
    printf("%d products, largest error %.3f of its bound\n", n, worst);
    return worst > 1;
}

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void time_products(void) {
    enum { SIZE = 1024 };
    float *a = numbers(SIZE * SIZE, 1), *b = numbers(SIZE * SIZE, 1), *c = numbers(SIZE * SIZE, 1);
    double best = 1e30;
    int i;
    for (i = 0; i < 12; i++) {
        double began = seconds();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, SIZE, SIZE, SIZE, 1, a, SIZE, b, SIZE, 0, c, SIZE);
        if (seconds() - began < best) best = seconds() - began;
    }
    printf("%.1f GFLOP/s\n", 2e-9 * SIZE * SIZE * SIZE / best);
    free(a); free(b); free(c);
}

static void *compare_fp32(void *wrong) {
    *(int *)wrong = compare(23, 0);
    return NULL;
}
static int compare_in_threads(void) {
    pthread_t threads[4];
    int wrong[4], i, sum = 0;
    for (i = 0; i < 4; i++) if (pthread_create(&threads[i], NULL, compare_fp32, &wrong[i]) != 0) return 1;
    for (i = 0; i < 4; i++) { pthread_join(threads[i], NULL); sum += wrong[i]; }
    return sum > 0;
}

/* Two threads compute until `stop`. */
static int stop;
static void *compute(void *nothing) {
    float *x = numbers(128 * 128, 1), *c = numbers(128 * 128, 1);
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 128, 128, 128, 1, x, 128, x, 128, 0, c, 128);
    free(x); free(c);
    return nothing;
}
static int compute_beside(pthread_t threads[2]) {
    return pthread_create(&threads[0], NULL, compute, NULL) != 0 || pthread_create(&threads[1], NULL, compute, NULL) != 0;
}

static void *compare_large(void *wrong) {               /* large enough for several threads */
    product p = {CblasRowMajor, CblasNoTrans, CblasTrans, 160, 160, 160, 0, 1, 0};
    *(int *)wrong = worst_of(&p, 23, 0) > 1;
    return NULL;
}
/* A child has threads and children of its own. */
static int compare_in_child(int i) {
    pthread_t own;
    int status, wrong = 1;
    alarm(60);
    if (i % 2 == 0) {
        pid_t child = fork();
        if (child != 0) return waitpid(child, &status, 0) != child || status != 0;
        compare_large(&wrong);
    } else if (pthread_create(&own, NULL, compare_large, &wrong) != 0 || pthread_join(own, NULL) != 0) return 1;
    return wrong;
}
static int compare_in_children(void) {
    pthread_t threads[2];
    int i, status, wrong = 0;
    alarm(300);                                         /* should one hang */
    if (compute_beside(threads)) return 1;
    for (i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) _exit(compare_in_child(i));
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) wrong++;
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    return wrong;
}

/* A fork in the middle of a long product returns when that has ended.  Both: seconds from the product's beginning. */
static double long_product_ended;
static void *long_product(void *began) {
    enum { SIZE = 1024 };
    float *x = numbers(SIZE * SIZE, 1), *c = numbers(SIZE * SIZE, 1);
    *(double *)began = seconds();
    __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, SIZE, SIZE, SIZE, 1, x, SIZE, x, SIZE, 0, c, SIZE);
    long_product_ended = seconds() - *(double *)began;
    free(x); free(c);
    return NULL;
}
static int fork_waits(void) {
    pthread_t thread;
    double began, forked;
    struct timespec pause = {0, 1000000};
    pid_t child;
    int status;
    stop = 0;
    if (pthread_create(&thread, NULL, long_product, &began) != 0) return 1;
    while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) nanosleep(&pause, NULL);
    nanosleep(&pause, NULL);
    child = fork();
    if (child == 0) _exit(0);
    forked = seconds() - began;
    pthread_join(thread, NULL);
    if (forked > long_product_ended / 2 && waitpid(child, &status, 0) == child) return 0;
    printf("the fork returned after %g s, the product after %g s\n", forked, long_product_ended);
    return 1;
}

static int end_beside(void) {
    pthread_t threads[2];
    struct timespec pause = {0, 20000000};
    alarm(60);
    if (compute_beside(threads)) return 1;
    return nanosleep(&pause, NULL);
}

/* One wrong argument at a time, with every kind of factors: C stays as it is. */
static int bad_arguments(void) {
    static const float factors[][2] = {{1, 0}, {INFINITY, 0}, {NAN, 1}, {1, INFINITY}, {0, NAN}};
    float a[4] = {1, 1, 1, 1}, c[4] = {1, 2, 3, 4};
    size_t i;
    int failed = 0;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, 1, c, 1, c, 2, 0, c, 2);
    for (i = 0; i < sizeof factors / sizeof *factors; i++) {
        const float alpha = factors[i][0], beta = factors[i][1];
        const int off = 1000000000;
#if !defined(FORTRAN)
        cblas_sgemm(0, CblasNoTrans, CblasNoTrans, 2, 2, 2, alpha, a, 2, a, 2, beta, c, 2);
        cblas_sgemm(CblasColMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, alpha, a, 1, a, 2, beta, c, 2);
        cblas_sgemm(CblasRowMajor, 0, CblasNoTrans, 2, 2, 2, alpha, a, 2, a, 2, beta, c, 2);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, 0, 2, 2, 2, alpha, a, 2, a, 2, beta, c, 2);
#endif
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, -1, 2, alpha, a, 2, a, 2, beta, c, 2);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, alpha, a, 1, a, 2, beta, c, 2);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, 2, 2, 2, alpha, a, 2, a, -off, beta, c, 2);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, alpha, a, 2, a, 2, beta, c, -off);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, alpha, a, 2, a, 2, beta, NULL, 2);
        if (alpha != 0)
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, alpha, NULL, 2, a, 2, beta, c, 2);
        failed += c[0] != 1 || c[1] != 2 || c[2] != 3 || c[3] != 4;
    }
    return failed;
}

static int no_numbers(void) {
    float x[4] = {1, 2, 3, 4}, c[4] = {1, 1, 1, 1}, d[4] = {1, 1, 1, 1};
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, NAN, x, 2, x, 2, 0, c, 2);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, 1, x, 2, x, 2, INFINITY, d, 2);
    return !isnan(c[0]) || !isnan(c[3]) || !isinf(d[0]) || !isinf(d[3]);
}

#if defined(OTHERS)
static int others(void) {
    double x[1] = {3}, y[1] = {5}, z[1] = {1};
    float a[1] = {3}, b[1] = {5}, c[1] = {1};
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 2, x, 1, y, 1, 1, z, 1);
    cblas_sgemv(CblasRowMajor, CblasNoTrans, 1, 1, 2, a, 1, b, 1, 1, c, 1);
    return z[0] != 31 || c[0] != 31;
}
#endif

int main(int argc, char **argv) {
    const char *format = argc > 1 ? argv[1] : "fp32";
    if (strcmp(format, "time") == 0) return time_products(), 0;
    if (strcmp(format, "bad") == 0) return bad_arguments();
    if (strcmp(format, "nan") == 0) return no_numbers();
    if (strcmp(format, "threads") == 0) return compare_in_threads();
    if (strcmp(format, "fork") == 0) return compare_in_children() + fork_waits();
    if (strcmp(format, "exit") == 0) return end_beside();
#if defined(OTHERS)
    if (strcmp(format, "others") == 0) return others();
#endif
    if (strcmp(format, "bits") == 0) return compare(23, 0) | (printf("%08x\n", (unsigned)all_bits) < 0);
    return compare(strcmp(format, "bf16") == 0 ? 7 : strcmp(format, "fp32") == 0 ? 23 : 10, strcmp(format, "tf32") == 0);
}
