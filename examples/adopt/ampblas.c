/* ampblas.c - replaces cblas_sgemm and Fortran's sgemm_ by name: for existing binaries, and for programs without
 * cblas.h.
 *
 *     make libampblas
 *     AMP_DTYPE=bf16 LD_PRELOAD=build/libampblas.so ./program
 *
 *     before the program's own BLAS on the command line, which --no-as-needed keeps:
 *     gfortran program.f90 -Lbuild -lampblas -Wl,-rpath,$PWD/build -Wl,--no-as-needed -lopenblas
 *
 * Settings, errors, threads and fork are as in cblas.h.  With no AMP_... in the environment, each caller's own BLAS
 * computes.  Linked with --as-needed, a common default, a program that only uses sgemm loses its BLAS, and amp.h
 * computes in fp32.
 *
 * Calls from within a library that has cblas_sgemm, sgemm_ or sgetrf_ stay with their BLAS: LAPACK does not expect
 * 16-bit operands.  LAPACK within the program itself is not recognised.
 *
 * Not replaced: cblas_sgemm_batch, cblas_sgemv, cblas_ssyrk and all others (numpy uses gemv for vectors and syrk for
 * A @ A.T); names with a suffix (cblas_sgemm64_, scipy_cblas_sgemm: numpy from PyPI); a BLAS that is part of the
 * program, or opened with RTLD_DEEPBIND; one with 64-bit integers under the same names.  AMP_DEBUG=1 logs the precision
 * of products: no log line means no product through this library. */
#define _GNU_SOURCE             /* dladdr, RTLD_NEXT */
#define AMP_STATIC
#define AMP_CBLAS_IMPLEMENTATION
#define AMP_CBLAS_ALONE
#include "cblas.h"
#undef cblas_sgemm
#include <dlfcn.h>

/* A caller, and the BLAS functions it would have called without this library; NULL for those it lacks. */
typedef struct amp_cblas_caller {
    const void *at;
    int is_blas;
    void (*cblas_sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                        const float *b, int ldb, float beta, float *c, int ldc);
    void (*sgemm)(const char *trans_a, const char *trans_b, const int *m, const int *n, const int *k,
                  const float *alpha, const float *a, const int *lda, const float *b, const int *ldb,
                  const float *beta, float *c, const int *ldc, size_t length_a, size_t length_b);
} amp_cblas_caller;

static const void *amp_cblas_object(const void *address) {
    Dl_info info;
    return dladdr((void *)address, &info) ? info.dli_fbase : NULL;
}
/* Looks in the caller's own object and its libraries; for the program itself, after this library. */
static void *amp_cblas_find(amp_cblas_caller *caller, void *handle, const char *name) {
    void *found = handle != NULL ? dlsym(handle, name) : NULL;
    if (found == NULL || amp_cblas_object(found) == amp_cblas_object(&amp_cblas_once)) return dlsym(RTLD_NEXT, name);
    if (amp_cblas_object(found) == amp_cblas_object(caller->at)) caller->is_blas = 1;
    return found;
}
/* The caller at this address if its products stay with its own BLAS, else NULL.  Each thread remembers some, as a
   look-up takes microseconds; handles are kept, so that the functions found stay loaded. */
static const amp_cblas_caller *amp_cblas_own(const void *at) {
    static __thread amp_cblas_caller callers[16];
    amp_cblas_caller *caller = &callers[((uintptr_t)at >> 3) % 16];
    Dl_info info;
    if (caller->at != at) {
        void *handle = dladdr((void *)at, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        memset(caller, 0, sizeof *caller);
        caller->at = at;
        *(void **)&caller->cblas_sgemm = amp_cblas_find(caller, handle, "cblas_sgemm");
        *(void **)&caller->sgemm = amp_cblas_find(caller, handle, "sgemm_");
        (void)amp_cblas_find(caller, handle, "sgetrf_");
    }
    return amp_cblas_context() == NULL || caller->is_blas ? caller : NULL;
}

__attribute__((visibility("default")))
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    const amp_cblas_caller *own = amp_cblas_own(__builtin_return_address(0));
    if (own != NULL && own->cblas_sgemm != NULL)
        own->cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    else amp_cblas_product(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

static int amp_cblas_trans(char c) {
    switch (c) {
    case 'N': case 'n': return AMP_NO_TRANS;
    case 'T': case 't': return AMP_TRANS;
    case 'C': case 'c': return AMP_CONJ_TRANS;
    }
    return 0;
}
__attribute__((visibility("default")))
void sgemm_(const char *trans_a, const char *trans_b, const int *m, const int *n, const int *k, const float *alpha,
            const float *a, const int *lda, const float *b, const int *ldb, const float *beta, float *c,
            const int *ldc) {
    const amp_cblas_caller *own = amp_cblas_own(__builtin_return_address(0));
    if (own != NULL && own->sgemm != NULL)
        own->sgemm(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, 1, 1);
    else
        amp_cblas_product(AMP_COL_MAJOR, amp_cblas_trans(*trans_a), amp_cblas_trans(*trans_b), *m, *n, *k, *alpha, a,
                          *lda, b, *ldb, *beta, c, *ldc);
}
