/* cblas.c - see cblas.h. */
#include "cblas.h"

#if defined(LAPACK)
void sgetrf_(float *a) {
    const int one = 1;
    const float alpha = 1;
    float copy = *a;
    sgemm_("N", "N", &one, &one, &one, &alpha, &copy, &one, &copy, &one, &alpha, a, &one);
}
#else
static void multiply(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha, const float *a, int lda,
                     const float *b, int ldb, float beta, float *c, int ldc) {
    int i, j, p;
    for (i = 0; i < m; i++, c += ldc) {
        for (j = 0; j < n; j++) c[j] = beta == 0 ? 0 : beta * c[j];
        for (p = 0; p < k; p++) {
            float x = alpha * (ta == CblasNoTrans ? a[i * lda + p] : a[p * lda + i]);
            if (tb == CblasNoTrans) for (j = 0; j < n; j++) c[j] += x * b[p * ldb + j];
            else for (j = 0; j < n; j++) c[j] += x * b[j * ldb + p];
        }
    }
}

void cblas_sgemm(CBLAS_ORDER order, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    if (order == CblasRowMajor) multiply(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    else multiply(tb, ta, n, m, k, alpha, b, ldb, a, lda, beta, c, ldc);
}
void sgemm_(const char *ta, const char *tb, const int *m, const int *n, const int *k, const float *alpha, const float *a,
            const int *lda, const float *b, const int *ldb, const float *beta, float *c, const int *ldc) {
    cblas_sgemm(CblasColMajor, *ta == 'N' || *ta == 'n' ? CblasNoTrans : CblasTrans,
                *tb == 'N' || *tb == 'n' ? CblasNoTrans : CblasTrans, *m, *n, *k, *alpha, a, *lda, b, *ldb, *beta, c, *ldc);
}

void cblas_dgemm(CBLAS_ORDER order, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, double alpha,
                 const double *a, int lda, const double *b, int ldb, double beta, double *c, int ldc) {
    (void)order; (void)ta; (void)tb; (void)m; (void)n; (void)k; (void)lda; (void)ldb; (void)ldc;
    *c = alpha * *a * *b + beta * *c;
}
void cblas_sgemv(CBLAS_ORDER order, CBLAS_TRANSPOSE ta, int m, int n, float alpha, const float *a, int lda, const float *x,
                 int incx, float beta, float *y, int incy) {
    (void)order; (void)ta; (void)m; (void)n; (void)lda; (void)incx; (void)incy;
    *y = alpha * *a * *x + beta * *y;
}
#endif
