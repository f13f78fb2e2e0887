/* cblas.c - see cblas.h. */
#include "cblas.h"

void cblas_sgemm(CBLAS_ORDER order, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    int i, j, p;
    (void)order;
    for (i = 0; i < m; i++, c += ldc) {
        for (j = 0; j < n; j++) c[j] = beta == 0 ? 0 : beta * c[j];
        for (p = 0; p < k; p++) {
            float x = alpha * (ta == CblasNoTrans ? a[i * lda + p] : a[p * lda + i]);
            if (tb == CblasNoTrans) for (j = 0; j < n; j++) c[j] += x * b[p * ldb + j];
            else for (j = 0; j < n; j++) c[j] += x * b[j * ldb + p];
        }
    }
}
