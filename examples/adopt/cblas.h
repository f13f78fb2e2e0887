/* cblas.h - a program's cblas_sgemm in bf16, fp16 or tf32 through amp.h, by an include path and one file.
 *
 *     gcc -O2 -c examples/adopt/cblas.c                                        once: this shim and all of amp.h
 *     gcc -O2 -Iexamples/adopt program.c cblas.o -o program -lm -lpthread      and the libraries that it had before
 *     AMP_DTYPE=bf16 ./program
 *
 * Installed: gcc -O2 -c $(pkg-config --variable=source amp-cblas); then $(pkg-config --cflags --libs amp-cblas).
 * Copied: cblas.h, cblas.c and amp.h in one folder.
 *
 * WHAT IS COMPUTED  Operands are rounded to AMP_DTYPE; products and sums are fp32, and so is C.  Every setting AMP_...
 * counts as in amp_open_env, so AMP_THREADS=2 computes on two threads; AMP_DTYPE=auto, or an empty one, is the best of
 * this machine, which is never fp16 on a CPU.  With no AMP_... in the environment, the program's own BLAS computes, as
 * before; without one, amp.h in fp32.
 *
 * THE REST OF CBLAS  (cblas_dgemm, cblas_sgemv, cblas_sgemm_batch) is declared by the program's previous cblas.h, found
 * after this one in the include path, and comes from its library.  Without such a header, or with -DAMP_CBLAS_ALONE,
 * other calls do not compile.
 *
 * WITH AMP.H  This header includes it.  The program may use amp_cblas_context() and amp_cblas_scaler(), too: for a
 * scaled loss in fp16, islands, anything that takes a context.  cblas.c also holds amp.h's implementation: the program
 * must not have another.
 *
 * ERRORS  On stderr, ten lines at most.  A refused setting (AMP_DTYPE=fp8_e4m3): products are computed as if none were
 * set.  Bad arguments: nothing is computed, as in BLAS.  No memory: a plain loop computes.  Any thread may call, and
 * fork.
 *
 * TRAPS  The shim cannot detect any of these.  AMP_DEBUG=1 with AMP_DTYPE logs the precision of products: no log line
 * means no product through the shim.
 * - The program finds another cblas.h first: put this -I before all others.
 * - It declares cblas_sgemm or sgemm_ by hand, or includes mkl.h or Accelerate.h: see ampblas.c, which replaces the
 *   functions by name.
 * - It calls cblas_sgemm through a pointer: that remains its BLAS's.
 * - It calls CBLAS only if configured (#ifdef CBLAS, USE_BLAS=1), and has loops otherwise: set the switch.
 * - `undefined reference to cblas_sgemm`: there is a cblas.h, but no BLAS is linked: -DAMP_CBLAS_ALONE, or link it.
 * - `undefined reference to amp_cblas_context`: cblas.o is missing.
 * - The shim is part of a plugin that is unloaded: link that with -Wl,-z,nodelete, for amp.h's threads run on.
 *
 * ONE FILE  -DAMP_CBLAS_IMPLEMENTATION, or #define it before this #include, instead of cblas.c; with -std=c99 that must
 * be the first include.  After AMP_IMPLEMENTATION and amp.h it adds the shim alone. */
#if !defined(AMP_CBLAS_H_INCLUDED)
#define AMP_CBLAS_H_INCLUDED
#pragma GCC system_header       /* the program's warning flags are for the program */

#if !defined(AMP_H_INCLUDED)
#  if defined(AMP_CBLAS_IMPLEMENTATION)
#    define AMP_IMPLEMENTATION
#  endif
#  if __has_include("amp.h")            /* copied beside it */
#    include "amp.h"
#  elif __has_include("../amp.h")       /* installed */
#    include "../amp.h"
#  else                                 /* where it comes from */
#    include "../../amp.h"
#  endif
#  if !defined(AMP_H_INCLUDED)
#    error "cblas.h: another amp.h than the mixed-precision library's comes first in the include path"
#  endif
#endif

#if defined(__has_include_next) && !defined(AMP_CBLAS_ALONE)
#  if __has_include_next(<cblas.h>)
#    include_next <cblas.h>
#    define AMP_CBLAS_BESIDE 1
#  endif
#endif
#if !defined(AMP_CBLAS_BESIDE)
typedef enum CBLAS_ORDER { CblasRowMajor = 101, CblasColMajor = 102 } CBLAS_ORDER;
typedef CBLAS_ORDER CBLAS_LAYOUT;
typedef enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112, CblasConjTrans = 113 } CBLAS_TRANSPOSE;
#  if !defined(__cplusplus)
#    pragma GCC diagnostic error "-Wimplicit-function-declaration"     /* a linked BLAS would get wrong arguments */
#  endif
#endif

#if defined(AMP_CBLAS_IMPLEMENTATION)
#  include <pthread.h>
#  include <stdio.h>
#  include <stdlib.h>
#  include <time.h>
#endif
#if defined(AMP_STATIC)
#  define AMP_CBLAS_API static __attribute__((unused))
#else
#  define AMP_CBLAS_API extern
#endif
#ifdef __cplusplus
extern "C" {
#endif
/* The context of products: NULL if no AMP_... is set, or one is refused; the scaler also with only an empty AMP_DTYPE.
   The shim owns both and never closes them. */
AMP_CBLAS_API amp_context *amp_cblas_context(void);
AMP_CBLAS_API amp_scaler *amp_cblas_scaler(void);

/* C = alpha op(A) op(B) + beta C in that context; if it is NULL, in fp32. */
AMP_CBLAS_API void amp_cblas_product(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                                     const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                                     int64_t ldc);

AMPI_INLINE void amp_cblas_sgemm(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                                 const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                                 int64_t ldc) {
#if defined(AMP_CBLAS_BESIDE)
    if (amp_cblas_context() == NULL) {
#  if defined(__cplusplus)
        cblas_sgemm((CBLAS_ORDER)order, (CBLAS_TRANSPOSE)trans_a, (CBLAS_TRANSPOSE)trans_b, m, n, k, alpha, a, lda, b,
                    ldb, beta, c, ldc);
#  else
        cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
#  endif
        return;
    }
#endif
    amp_cblas_product(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
#undef cblas_sgemm                      /* a BLAS with 64-bit integers may have made it a macro */
#define cblas_sgemm(...) amp_cblas_sgemm(__VA_ARGS__)

#if defined(AMP_CBLAS_IMPLEMENTATION)
static amp_context *amp_cblas_asked;    /* amp_cblas_context */
static amp_context *amp_cblas_used;     /* that one, or one in fp32; NULL: no memory for it */
static amp_scaler *amp_cblas_scale;
static int amp_cblas_scaled;            /* the scaler was fetched, or its absence reported */
static pthread_once_t amp_cblas_once = PTHREAD_ONCE_INIT;

static void amp_cblas_say(const char *what, const char *why) {
    static int said;
    if (__atomic_fetch_add(&said, 1, __ATOMIC_RELAXED) < 10) fprintf(stderr, "cblas.h: %s%s\n", what, why);
}

/* A fork waits for running products and delays new ones: its child has no threads that could finish them. */
static pthread_mutex_t amp_cblas_gate = PTHREAD_MUTEX_INITIALIZER;
static int amp_cblas_inside;
static void amp_cblas_enter(void) {
    pthread_mutex_lock(&amp_cblas_gate);
    __atomic_fetch_add(&amp_cblas_inside, 1, __ATOMIC_ACQUIRE);
    pthread_mutex_unlock(&amp_cblas_gate);
}
static void amp_cblas_leave(void) { __atomic_fetch_sub(&amp_cblas_inside, 1, __ATOMIC_RELEASE); }
static void amp_cblas_before_fork(void) {
    const struct timespec pause = {0, 20000};
    pthread_mutex_lock(&amp_cblas_gate);
    while (__atomic_load_n(&amp_cblas_inside, __ATOMIC_ACQUIRE) > 0) nanosleep(&pause, NULL);
}
static void amp_cblas_after_fork(void) { pthread_mutex_unlock(&amp_cblas_gate); }
static __attribute__((constructor)) void amp_cblas_watch_forks(void) {
    pthread_atfork(amp_cblas_before_fork, amp_cblas_after_fork, amp_cblas_after_fork);
}

/* Never closed: at exit, other threads may still compute. */
static void amp_cblas_open(void) {
    amp_result result;
    amp_desc desc;
    amp_cblas_enter();
    result = amp_open_env(&amp_cblas_asked, &amp_cblas_scale);
    memset(&desc, 0, sizeof desc);
    desc.gemm_always = 1;
    if (result == AMP_OK && amp_cblas_asked == NULL && getenv("AMP_DTYPE") != NULL)     /* empty: auto */
        result = amp_open(&amp_cblas_asked, &desc);
    desc.dtype = AMP_F32;
    if (result != AMP_OK) amp_cblas_say("products are unchanged: ", amp_last_error());
    amp_cblas_used = amp_cblas_asked;
    if (amp_cblas_asked == NULL && amp_open(&amp_cblas_used, &desc) != AMP_OK)
        amp_cblas_say("plain loops: ", amp_last_error());
    amp_cblas_leave();
}
AMP_CBLAS_API amp_context *amp_cblas_context(void) {
    pthread_once(&amp_cblas_once, amp_cblas_open);
    return amp_cblas_asked;
}
AMP_CBLAS_API amp_scaler *amp_cblas_scaler(void) {
    __atomic_store_n(&amp_cblas_scaled, 1, __ATOMIC_RELAXED);
    return amp_cblas_context() != NULL ? amp_cblas_scale : NULL;
}

/* Bad arguments are found here, not by amp_gemm, because some products never reach it. */
static int amp_cblas_is_legal(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k) {
    char text[120];
    if (order != AMP_ROW_MAJOR && order != AMP_COL_MAJOR)
        snprintf(text, sizeof text, "order = %d, must be 101 (row major) or 102 (column major)", order);
    else if (trans_a < AMP_NO_TRANS || trans_a > AMP_CONJ_TRANS || trans_b < AMP_NO_TRANS || trans_b > AMP_CONJ_TRANS)
        snprintf(text, sizeof text, "trans_a = %d, trans_b = %d, must be 111, 112 or 113", trans_a, trans_b);
    else if (m < 0 || n < 0 || k < 0)
        snprintf(text, sizeof text, "m = %lld, n = %lld, k = %lld, must be 0 or more", (long long)m, (long long)n,
                 (long long)k);
    else return 1;
    amp_cblas_say("sgemm: ", text);
    return 0;
}
/* The same for a matrix of `lines`, each of `length` elements, that are `ld` elements apart. */
static int amp_cblas_is_apart(const char *name, int64_t ld, int64_t lines, int64_t length) {
    const int64_t least = length > 1 ? length : 1, most = (int64_t)1 << 56;     /* elements, beyond any memory */
    char text[120];
    if (ld < least)
        snprintf(text, sizeof text, "%s = %lld, must be at least %lld", name, (long long)ld, (long long)least);
    else if (lines > 0 && ld > most / lines)
        snprintf(text, sizeof text, "%s = %lld, times %lld, exceeds any memory", name, (long long)ld, (long long)lines);
    else return 1;
    amp_cblas_say("sgemm: ", text);
    return 0;
}

static int amp_cblas_is_finite(float x) {       /* with -Ofast, too */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}
/* Without memory, and for factors that amp_gemm refuses: element (i, p) of op(A) is at p * lda + i if A is stored by
   columns or transposed, but not both. */
static void amp_cblas_loop(int columns, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                           const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                           int64_t ldc) {
    int64_t i, j, p;
    for (i = 0; i < m; i++)
        for (j = 0; j < n; j++) {
            float *out = columns ? c + j * ldc + i : c + i * ldc + j, sum = 0;
            for (p = 0; p < k; p++)
                sum += (columns != trans_a ? a[p * lda + i] : a[i * lda + p]) *
                       (columns != trans_b ? b[j * ldb + p] : b[p * ldb + j]);
            *out = alpha * sum + (beta != 0 ? beta * *out : 0);
        }
}

/* With alpha 0, A and B are not read; with beta 0, C is not. */
AMP_CBLAS_API void amp_cblas_product(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                                     const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                                     int64_t ldc) {
    const int no_conjugate = 114;               /* OpenBLAS's CblasConjNoTrans */
    const int columns = order == AMP_COL_MAJOR;
    int by_k, by_n;
    amp_result result = AMP_ERR_MEMORY;
    (void)amp_cblas_context();
    if (trans_a == no_conjugate) trans_a = AMP_NO_TRANS;
    if (trans_b == no_conjugate) trans_b = AMP_NO_TRANS;
    by_k = columns != (trans_a != AMP_NO_TRANS);        /* a line of A has m elements, and there are k of them */
    by_n = columns != (trans_b != AMP_NO_TRANS);        /* a line of B has k elements, and there are n of them */
    if (!amp_cblas_is_legal(order, trans_a, trans_b, m, n, k) ||
        !amp_cblas_is_apart("lda", lda, by_k ? k : m, by_k ? m : k) ||
        !amp_cblas_is_apart("ldb", ldb, by_n ? n : k, by_n ? k : n) ||
        !amp_cblas_is_apart("ldc", ldc, columns ? n : m, columns ? m : n))
        return;
    if (alpha == 0) k = 0;
    if (m == 0 || n == 0) return;
    if (c == NULL || (k > 0 && (a == NULL || b == NULL))) {
        amp_cblas_say("sgemm: ", "a, b or c is NULL");
        return;
    }
    if (amp_scaler_enabled(amp_cblas_scale) && !__atomic_exchange_n(&amp_cblas_scaled, 1, __ATOMIC_RELAXED))
        amp_cblas_say("fp16 without amp_cblas_scaler(): gradients below 6e-8 become 0", "");
    if (amp_cblas_used != NULL && amp_cblas_is_finite(alpha) && amp_cblas_is_finite(beta)) {
        amp_cblas_enter();
        result = amp_gemm(amp_cblas_used, (amp_order)order, (amp_trans)trans_a, (amp_trans)trans_b, m, n, k, alpha, a,
                          lda, b, ldb, beta, c, ldc);
        amp_cblas_leave();
        if (result != AMP_OK) amp_cblas_say("sgemm: ", amp_last_error());
    }
    if (result == AMP_ERR_MEMORY)
        amp_cblas_loop(columns, trans_a != AMP_NO_TRANS, trans_b != AMP_NO_TRANS, m, n, k, alpha, a, lda,
                       b, ldb, beta, c, ldc);
}
#endif

#ifdef __cplusplus
}
#endif
#endif
