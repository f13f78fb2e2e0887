/* gemm_parts.h - computes a product together with the operations that a fusing backend adds, by CPU kernels one after
 * another. */
#ifndef AMPT_GEMM_PARTS_H
#define AMPT_GEMM_PARTS_H

#include <stdlib.h>
#include <string.h>

/* c = act'(pre) * product + beta c.  The product is computed in fp32, and the rest row by row. */
static amp_result gemm_parts_backward(void *dev, const amp_k_gemm *args) {
    float *product = (float *)malloc((size_t)(args->m * args->n + args->n) * sizeof(float)), *pre = product + args->m * args->n;
    amp_k_gemm g = *args;
    amp_k_activation slope;
    amp_k_add sum;
    amp_result result;
    int64_t i, pre_row = args->ld_pre * (int64_t)amp_dtype_size(args->pre_dtype), c_row = args->ldc * (int64_t)amp_dtype_size(args->c_dtype);
    g.c = product; g.c_dtype = AMP_F32; g.ldc = g.n; g.beta = 0;
    g.pre = NULL; g.bias = NULL; g.act = AMP_ACT_NONE;
    memset(&slope, 0, sizeof slope);
    slope.act = args->act; slope.n = args->n; slope.x = pre;
    slope.x_dtype = slope.y_dtype = AMP_F32;
    memset(&sum, 0, sizeof sum);
    sum.a_dtype = AMP_F32; sum.b_dtype = sum.y_dtype = args->c_dtype;
    sum.n = args->n; sum.alpha = 1; sum.beta = args->beta;
    result = amp_cpu()->gemm(dev, &g, NULL);
    for (i = 0; i < args->m && result == AMP_OK; i++) {
        result = amp_convert(pre, AMP_F32, (const char *)args->pre + i * pre_row, args->pre_dtype, args->n, NULL, NULL);
        sum.a = slope.dy = slope.dx = product + i * args->n;
        sum.y = (char *)args->c + i * c_row;
        sum.b = args->beta != 0 ? sum.y : NULL;
        if (result == AMP_OK) result = amp_cpu()->activation_backward(dev, &slope, NULL);
        if (result == AMP_OK) result = amp_cpu()->add(dev, &sum, NULL);
    }
    free(product);
    return result;
}

/* The sums of a matrix's columns. */
static amp_result gemm_parts_sum(void *dev, const void *data, amp_dtype dtype, int64_t rows, int64_t cols, int64_t ld, const amp_k_gradient *out) {
    amp_k_column_sum s;
    memset(&s, 0, sizeof s);
    s.x.data = (void *)(uintptr_t)data; s.x.dtype = dtype; s.x.rows = rows; s.x.cols = cols; s.x.ld = ld;
    s.out = out->data; s.out_dtype = out->dtype; s.add = out->add;
    return amp_cpu()->column_sum(dev, &s, NULL);
}

/* The sums of the rows of op(a).  If a is stored transposed, these are sums of columns, otherwise a times ones. */
static amp_result gemm_parts_row_sum(void *dev, const amp_k_gemm *args) {
    float *ones;
    amp_k_gemm g;
    amp_result result;
    int64_t i;
    if (args->trans_a) return gemm_parts_sum(dev, args->a, args->a_dtype, args->k, args->m, args->lda, &args->row_sum);
    ones = (float *)malloc((size_t)(args->k + 1) * sizeof(float));
    for (i = 0; i < args->k; i++) ones[i] = 1;
    memset(&g, 0, sizeof g);
    g.m = args->m; g.n = 1; g.k = args->k; g.batch = 1;
    g.a = args->a; g.a_dtype = args->a_dtype; g.lda = args->lda;
    g.b = ones; g.b_dtype = AMP_F32; g.ldb = 1;
    g.c = args->row_sum.data; g.c_dtype = args->row_sum.dtype; g.ldc = 1;
    g.alpha = 1; g.beta = args->row_sum.add ? 1.0f : 0.0f; g.compute = AMP_F32;
    result = amp_cpu()->gemm(dev, &g, NULL);
    free(ones);
    return result;
}

/* Does the same as the gemm of a backend that fuses, on an open device of the CPU backend. */
static amp_result gemm_parts(void *dev, const amp_k_gemm *args) {
    amp_k_gemm g = *args;
    amp_result result;
    g.backward = 0;
    g.column_sum.data = g.row_sum.data = NULL;
    result = args->backward ? gemm_parts_backward(dev, &g) : amp_cpu()->gemm(dev, &g, NULL);
    if (result == AMP_OK && args->column_sum.data != NULL)
        result = gemm_parts_sum(dev, args->c, args->c_dtype, args->m, args->n, args->ldc, &args->column_sum);
    return result == AMP_OK && args->row_sum.data != NULL ? gemm_parts_row_sum(dev, args) : result;
}

#endif
