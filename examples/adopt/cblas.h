/* cblas.h - cblas_sgemm through amp.h: an unchanged program's products in bf16, fp16 or tf32, by an include path.
 *
 *     gcc -O2 -Iexamples/adopt program.c -o program -lm -lpthread         and the libraries it had before
 *     AMP_DTYPE=bf16 ./program
 *
 * Operands are rounded to AMP_DTYPE, products and sums are fp32, and so is C.  The variable is read once, at the first
 * product: fp32, tf32, bf16, fp16 or auto; unset or empty it means auto, the best of this machine (see amp_choose), which
 * is never fp16 on a CPU.  fp16 makes infinity of operands beyond 65504.  CBLAS_VERBOSE=1 says what was chosen, and why.
 *
 * Everything else of CBLAS comes from the cblas.h that the program had before, found behind this one in the include path,
 * and from its library.  Where there is no such header, or with -DAMP_CBLAS_ALONE, there is only cblas_sgemm: other calls do
 * not compile.
 *
 * What goes wrong is said on stderr, at most ten times.  A dtype that this machine lacks, or no dtype at all: fp32.  No
 * memory: that product in fp32 by a plain loop.  Bad arguments: nothing is computed, as in BLAS.
 *
 * Several files: each that includes this one gets a copy of its own, which is right but compiles amp.h again.  With
 * -DAMP_CBLAS_SHARED they only declare it, and cblas.c, compiled beside them, is the one copy; system headers then stay out
 * of the program's files as well.  A file that included amp.h before uses that.
 * May be called from several threads at once.  With -std=c99 it must be the first include, or shared. */
#if !defined(AMP_CBLAS_H_INCLUDED)
#define AMP_CBLAS_H_INCLUDED
#pragma GCC system_header       /* the program's warning flags are for the program */

/* AMP_CBLAS_API: how the one function, and what it needs, is compiled.  amp.h comes before system headers. */
#if defined(AMP_CBLAS_IMPLEMENTATION)
#  define AMP_IMPLEMENTATION
#  include "../../amp.h"
#  define AMP_CBLAS_API
#elif !defined(AMP_CBLAS_SHARED)
#  if !defined(AMP_H_INCLUDED)
#    define AMP_STATIC
#    define AMP_IMPLEMENTATION
#    include "../../amp.h"
#  endif
#  define AMP_CBLAS_API static __attribute__((unused))
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

#include <stdint.h>
#if defined(AMP_CBLAS_API)
#  include <pthread.h>
#  include <stdio.h>
#  include <stdlib.h>
#endif
#ifdef __cplusplus
extern "C" {
#endif
#if defined(AMP_CBLAS_IMPLEMENTATION) || defined(AMP_CBLAS_SHARED)
void amp_cblas_sgemm(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                     int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
#endif
#define cblas_sgemm amp_cblas_sgemm

#if defined(AMP_CBLAS_API)
static amp_context *amp_cblas_context;          /* NULL: not even fp32 could be opened */
static pthread_once_t amp_cblas_once = PTHREAD_ONCE_INIT;

static void amp_cblas_say(const char *before, const char *name, const char *why, const char *after) {
    static int said;
    if (__atomic_fetch_add(&said, 1, __ATOMIC_RELAXED) < 10)
        fprintf(stderr, "cblas.h: %s%s%s%s\n", before, name, why, after);
}

static void amp_cblas_open(void) {
    const char *name = getenv("AMP_DTYPE"), *verbose = getenv("CBLAS_VERBOSE");
    amp_desc desc;
    amp_choice choice;
    memset(&desc, 0, sizeof desc);
    if (name != NULL && *name != 0 &&
        (amp_dtype_parse(name, &desc.dtype) != AMP_OK || amp_open(&amp_cblas_context, &desc) != AMP_OK)) {
        amp_cblas_say("AMP_DTYPE=", name, ": computing in fp32: ", amp_last_error());
        desc.dtype = AMP_F32;
    }
    if (amp_cblas_context == NULL && amp_open(&amp_cblas_context, &desc) != AMP_OK)
        amp_cblas_say("every product by a plain loop", "", ": ", amp_last_error());
    else if (verbose != NULL && *verbose == '1' && amp_query_choice(amp_cblas_context, &choice) == AMP_OK)
        amp_cblas_say("cblas_sgemm computes in ", amp_dtype_name(choice.dtype), ": ", choice.reason);
}

/* The same product without any memory: element (i, p) of op(A) is at p * lda + i if A is stored by columns or transposed,
   but not both. */
static void amp_cblas_loop(int columns, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                           const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
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

/* C = alpha op(A) op(B) + beta C.  With alpha 0, A and B are not read; with beta 0, C is not. */
AMP_CBLAS_API void amp_cblas_sgemm(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                                   const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                                   int64_t ldc) {
    const int no_conjugate = 114;               /* OpenBLAS's CblasConjNoTrans */
    amp_result result;
    pthread_once(&amp_cblas_once, amp_cblas_open);
    if (trans_a == no_conjugate) trans_a = AMP_NO_TRANS;
    if (trans_b == no_conjugate) trans_b = AMP_NO_TRANS;
    if (alpha == 0) k = 0;
    result = amp_cblas_context == NULL ? AMP_ERR_MEMORY : amp_autocast_begin(amp_cblas_context, NULL);
    if (result == AMP_OK) {
        result = amp_gemm(amp_cblas_context, (amp_order)order, (amp_trans)trans_a, (amp_trans)trans_b, m, n, k, alpha, a,
                          lda, b, ldb, beta, c, ldc);
        amp_autocast_end(amp_cblas_context);
    }
    if (result == AMP_OK) return;
    if (amp_cblas_context != NULL) amp_cblas_say("cblas_sgemm: ", amp_last_error(), "", "");
    if (result == AMP_ERR_MEMORY)
        amp_cblas_loop(order == AMP_COL_MAJOR, trans_a != AMP_NO_TRANS, trans_b != AMP_NO_TRANS, m, n, k, alpha, a, lda, b,
                       ldb, beta, c, ldc);
}
#endif

#ifdef __cplusplus
}
#endif
#endif
