/* cublas_rules.h - what amp_cuda.cu and the model take from cuBLASLt: a table of cases, each a product that must run and
 * be right, or a call that must be refused, with the document that says so.
 *
 * t_cublas.cpp holds the model to it, tests/gpu/t_models.cu the library on a GPU.  Sources as in coc_cublas.cpp: [H] the
 * header's comments, [M] cublasLtMatmul() and [C] cublasLtCreate() in docs.nvidia.com/cuda/cublas, [R] the library without
 * a GPU, [TE] TransformerEngine, [MN] marian-nmt; "stated nowhere": the model refuses what nobody promises. */
#ifndef CUBLAS_RULES_H
#define CUBLAS_RULES_H

#include <cuda_runtime.h>
#include <math.h>
#include <string>
#include <vector>
#include "amp.h"
#include <cublasLt.h>
#include "../test.h"

enum { BLAS_A, BLAS_B, BLAS_C, BLAS_D, BLAS_BIAS, BLAS_AUX, BLAS_WORKSPACE, BLAS_BUFFERS };

/* ---- A product; what a case changes of it is all that a case is. */

struct blas_product {
    int m = 40, n = 24, k = 48, batch = 1;
    cudaDataType type[4] = {CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF};
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    cudaDataType scale = CUDA_R_32F;
    cublasOperation_t trans[3] = {CUBLAS_OP_N, CUBLAS_OP_N, CUBLAS_OP_N};
    cublasLtOrder_t order[4] = {CUBLASLT_ORDER_COL, CUBLASLT_ORDER_COL, CUBLASLT_ORDER_COL, CUBLASLT_ORDER_COL};
    int64_t ld_more[4] = {};                    /* elements beyond the least ld */
    int64_t stride_more[4] = {};                /* elements beyond what the matrices take */
    int64_t b_rows_more = 0;
    bool repeat_a = false;                      /* A's stride is 0 */
    float alpha = 1, beta = 0;
    int pointer_mode = CUBLASLT_POINTER_MODE_HOST;
    bool in_place = true;                       /* C is D */
    bool nan_c = false;                         /* C holds NaN */
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int32_t bias_type = -1, aux_type = -1;
    int64_t aux_ld_more = 0;                    /* beyond the least that is divisible by 8 (a mask's: 128) */
    int64_t aux_stride_more = 0, bias_stride_more = 0;
    bool no_strides = false;                    /* of bias and aux: 0 */
    size_t offset[BLAS_BUFFERS] = {};           /* bytes behind a 256-byte aligned address */
    bool null[BLAS_BUFFERS] = {};
    size_t workspace = 1 << 20, workspace_given = 1 << 20;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    bool claims_256 = false;                    /* the heuristic is not told the true alignments */
    bool late_pointers = false;                 /* bias and aux are set after the heuristic was asked */
    int candidate = 0;                          /* which of the heuristic's results runs; -1: algo NULL */
    float *fp8_scale = NULL;
    float value = 0;                            /* not 0: every element of A and B */
};

static inline bool blas_has(const blas_product &x, unsigned bits) { return (unsigned)x.epilogue & bits; }
static inline bool blas_uses_bias(const blas_product &x) { return blas_has(x, 4 | 16 | 256 | 512); }
static inline bool blas_writes_bias(const blas_product &x) { return blas_has(x, 16 | 256 | 512); }
static inline bool blas_uses_aux(const blas_product &x) { return blas_has(x, 128); }
static inline bool blas_reads_aux(const blas_product &x) { return blas_has(x, 8 | 64); }
static inline bool blas_uses_mask(const blas_product &x) { return blas_uses_aux(x) && blas_has(x, 2 | 8); }

static inline size_t blas_size(cudaDataType t) { return t == CUDA_R_32F ? 4 : 2; }
static inline float blas_load(const void *data, cudaDataType t, int64_t i) {
    if (t == CUDA_R_32F) return ((const float *)data)[i];
    uint16_t bits = ((const uint16_t *)data)[i];
    return t == CUDA_R_16F ? amp_f32_from_f16(bits) : amp_f32_from_bf16(bits);
}
static inline void blas_store(void *data, cudaDataType t, int64_t i, float v) {
    if (t == CUDA_R_32F) ((float *)data)[i] = v;
    else ((uint16_t *)data)[i] = t == CUDA_R_16F ? amp_f16_from_f32(v, 0) : amp_bf16_from_f32(v, 0);
}

/* ---- Where the elements lie */

struct blas_place { int64_t rows, cols, ld, stride; };

static inline blas_place blas_place_of(const blas_product &x, int which) {
    blas_place p = {x.m, x.n, 0, 0};
    if (which == BLAS_A) p.rows = x.trans[0] ? x.k : x.m, p.cols = x.trans[0] ? x.m : x.k;
    if (which == BLAS_B) p.rows = (x.trans[1] ? x.n : x.k) + x.b_rows_more, p.cols = x.trans[1] ? x.k : x.n;
    bool column = x.order[which] != CUBLASLT_ORDER_ROW;
    p.ld = (column ? p.rows : p.cols) + x.ld_more[which];
    p.stride = (column ? p.cols : p.rows) * p.ld + x.stride_more[which];
    if (which == BLAS_A && x.repeat_a) p.stride = 0;
    return p;
}
static inline int64_t blas_at(const blas_product &x, int which, int64_t item, int64_t i, int64_t j) {
    blas_place p = blas_place_of(x, which);
    return item * p.stride + (x.order[which] == CUBLASLT_ORDER_ROW ? i * p.ld + j : j * p.ld + i);
}
static inline int64_t blas_aux_ld(const blas_product &x) {
    int64_t unit = blas_uses_mask(x) ? 128 : 8;
    return (x.m + unit - 1) / unit * unit + x.aux_ld_more;
}
static inline int64_t blas_aux_stride(const blas_product &x) {
    return x.no_strides ? 0 : blas_aux_ld(x) * x.n + x.aux_stride_more;
}
static inline int64_t blas_bias_length(const blas_product &x) { return blas_has(x, 512) ? x.n : x.m; }
static inline int64_t blas_bias_stride(const blas_product &x) { return x.no_strides ? 0 : blas_bias_length(x) + x.bias_stride_more; }

/* ---- Buffers: host copies, and the same on the device, with 0xFF wherever no element lies */

struct blas_buffers {
    std::vector<unsigned char> host[BLAS_BUFFERS];
    unsigned char *base[BLAS_BUFFERS] = {};
    float *scalars = NULL;
    blas_buffers() {}
    blas_buffers(const blas_buffers &) = delete;
    ~blas_buffers() {
        for (unsigned char *p : base) cudaFree(p);
        cudaFree(scalars);
    }
    void *device(const blas_product &x, int which) const {
        if (x.null[which]) return NULL;
        if (which == BLAS_C && x.in_place) which = BLAS_D;
        return base[which] + x.offset[which];
    }
};

static inline size_t blas_bytes(const blas_product &x, int which) {
    if (which <= BLAS_D) return (size_t)((x.batch * blas_place_of(x, which).stride + blas_place_of(x, which).ld *
                                          (x.repeat_a ? x.k + x.m : 0))) * blas_size(x.type[which]);
    if (which == BLAS_BIAS) return (size_t)(x.batch * (blas_bias_length(x) + x.bias_stride_more)) * blas_size(x.type[BLAS_D]);
    if (which == BLAS_AUX) {
        size_t elements = (size_t)(x.batch * (blas_aux_ld(x) * x.n + x.aux_stride_more));
        return blas_uses_mask(x) ? (elements + 7) / 8 : elements * blas_size(x.type[BLAS_D]);
    }
    return x.workspace_given;
}

static inline void blas_fill_matrix(const blas_product &x, int which, std::vector<unsigned char> *host) {
    blas_place p = blas_place_of(x, which);
    for (int64_t item = 0; item < (p.stride ? x.batch : 1); item++)
        for (int64_t i = 0; i < p.rows; i++)
            for (int64_t j = 0; j < p.cols; j++) {
                float v = 2 * amp_random_uniform(11 + (uint64_t)which, (uint64_t)((item * p.rows + i) * p.cols + j)) - 1;
                if (which <= BLAS_B && x.value != 0) v = x.value;
                if (which >= BLAS_C && x.nan_c) v = NAN;
                blas_store(host->data(), x.type[which], blas_at(x, which, item, i, j), v);
            }
}

static inline bool blas_make(const blas_product &x, blas_buffers *b) {
    for (int i = 0; i < BLAS_BUFFERS; i++) {
        b->host[i].assign(blas_bytes(x, i), 0xFF);
        if (i <= BLAS_D) blas_fill_matrix(x, i, &b->host[i]);
        if (i == BLAS_BIAS)
            for (int64_t e = 0; e < (int64_t)(b->host[i].size() / blas_size(x.type[BLAS_D])); e++)
                blas_store(b->host[i].data(), x.type[BLAS_D], e, 4 * amp_random_uniform(21, (uint64_t)e) - 2);
        if (i == BLAS_AUX && !blas_uses_mask(x))
            for (int64_t e = 0; e < (int64_t)(b->host[i].size() / blas_size(x.type[BLAS_D])); e++)
                blas_store(b->host[i].data(), x.type[BLAS_D], e, 8 * amp_random_uniform(22, (uint64_t)e) - 4);
        if (i == BLAS_AUX && blas_uses_mask(x))
            for (size_t e = 0; e < b->host[i].size(); e++) b->host[i][e] = (unsigned char)amp_random_u32(23, e);
        if (cudaMalloc((void **)&b->base[i], b->host[i].size() + x.offset[i] + 1) != cudaSuccess) return false;
        if (cudaMemcpy(b->base[i] + x.offset[i], b->host[i].data(), b->host[i].size(), cudaMemcpyHostToDevice) != cudaSuccess)
            return false;
    }
    float scalars[2] = {x.alpha, x.beta};
    return cudaMalloc((void **)&b->scalars, sizeof scalars) == cudaSuccess &&
           cudaMemcpy(b->scalars, scalars, sizeof scalars, cudaMemcpyHostToDevice) == cudaSuccess;
}

/* ---- The call */

struct blas_objects {
    cublasLtMatmulDesc_t desc = NULL;
    cublasLtMatrixLayout_t layout[4] = {};
    cublasLtMatmulPreference_t preference = NULL;
    blas_objects() {}
    blas_objects(const blas_objects &) = delete;
    ~blas_objects() {
        cublasLtMatmulDescDestroy(desc);
        for (cublasLtMatrixLayout_t l : layout) cublasLtMatrixLayoutDestroy(l);
        cublasLtMatmulPreferenceDestroy(preference);
    }
};

/* The first failure of a row of calls. */
struct blas_status {
    cublasStatus_t first = CUBLAS_STATUS_SUCCESS;
    void operator<<(cublasStatus_t status) {
        if (first == CUBLAS_STATUS_SUCCESS) first = status;
    }
};
template <class T> void blas_set(blas_status *s, cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t id, const T &value) {
    *s << cublasLtMatmulDescSetAttribute(d, id, &value, sizeof value);
}
template <class T> void blas_set(blas_status *s, cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t id, const T &value) {
    *s << cublasLtMatrixLayoutSetAttribute(l, id, &value, sizeof value);
}
template <class T>
void blas_set(blas_status *s, cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t id, const T &value) {
    *s << cublasLtMatmulPreferenceSetAttribute(p, id, &value, sizeof value);
}

static inline uint32_t blas_alignment(const void *p) {
    uint32_t bytes = 256;
    while ((uintptr_t)p % bytes != 0) bytes /= 2;
    return bytes;
}

static inline void blas_describe_epilogue(const blas_product &x, const blas_buffers &b, blas_objects *o, blas_status *s) {
    void *bias = b.device(x, BLAS_BIAS), *aux = b.device(x, BLAS_AUX);
    if (blas_uses_bias(x)) blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (blas_uses_aux(x)) blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
}

static inline void blas_describe(const blas_product &x, const blas_buffers &b, blas_objects *o, blas_status *s) {
    *s << cublasLtMatmulDescCreate(&o->desc, x.compute, x.scale);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)x.trans[0]);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)x.trans[1]);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_TRANSC, (int32_t)x.trans[2]);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, (int32_t)x.pointer_mode);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)x.epilogue);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, x.bias_type);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, x.aux_type);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (void *)x.fp8_scale);
    if (blas_uses_aux(x)) blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, blas_aux_ld(x));
    if (x.batch > 1) {
        blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, blas_aux_stride(x));
        blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, blas_bias_stride(x));
    }
    if (!x.late_pointers) blas_describe_epilogue(x, b, o, s);
    for (int i = 0; i < 4; i++) {
        blas_place p = blas_place_of(x, i);
        *s << cublasLtMatrixLayoutCreate(&o->layout[i], x.type[i], (uint64_t)p.rows, (uint64_t)p.cols, p.ld);
        blas_set(s, o->layout[i], CUBLASLT_MATRIX_LAYOUT_ORDER, (int32_t)x.order[i]);
        blas_set(s, o->layout[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (int32_t)x.batch);
        blas_set(s, o->layout[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, p.stride);
    }
    *s << cublasLtMatmulPreferenceCreate(&o->preference);
    blas_set(s, o->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)x.workspace);
    blas_set(s, o->preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, x.schemes);
    for (int i = 0; i < 4 && !x.claims_256; i++)
        blas_set(s, o->preference,
                 (cublasLtMatmulPreferenceAttributes_t)(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i),
                 blas_alignment(b.device(x, i)));
}

/* Everything up to the product in the stream: the first status that is no success. */
static inline cublasStatus_t blas_call_product(cublasLtHandle_t handle, const blas_product &x, blas_buffers *b) {
    blas_objects o;
    blas_status s;
    cublasLtMatmulHeuristicResult_t found[16];
    int count = 0;
    blas_describe(x, *b, &o, &s);
    if (s.first != CUBLAS_STATUS_SUCCESS) return s.first;
    if (x.candidate >= 0) {
        s << cublasLtMatmulAlgoGetHeuristic(handle, o.desc, o.layout[0], o.layout[1], o.layout[2], o.layout[3], o.preference,
                                            x.candidate + 1, found, &count);
        if (s.first != CUBLAS_STATUS_SUCCESS || count <= x.candidate) return s.first ? s.first : CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (x.late_pointers) blas_describe_epilogue(x, *b, &o, &s);
    const void *alpha = &x.alpha, *beta = &x.beta;
    if (x.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) alpha = b->scalars, beta = b->scalars + 1;
    s << cublasLtMatmul(handle, o.desc, alpha, b->device(x, BLAS_A), o.layout[0], b->device(x, BLAS_B), o.layout[1], beta,
                        b->device(x, BLAS_C), o.layout[2], b->device(x, BLAS_D), o.layout[3],
                        x.candidate >= 0 ? &found[x.candidate].algo : NULL, b->device(x, BLAS_WORKSPACE), x.workspace_given,
                        (cudaStream_t)0);
    return s.first;
}

/* ---- What is right, in fp64, and how far the result may be from it */

static inline double blas_gelu(double v) { return 0.5 * v * (1 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))); }
static inline double blas_gelu_slope(double v) {
    double t = tanh(0.7978845608028654 * (v + 0.044715 * v * v * v));
    return 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * v * v);
}

/* A value and the largest error of a computation of it. */
struct blas_value { double v, off; };

/* alpha AB + beta C + bias.  Each of k products and sums in fp32 rounds by 2^-24 of at most the sum of magnitudes, in any
   order; so do the three operations after them. */
static inline blas_value blas_linear(const blas_product &x, const blas_buffers &b, int64_t item, int64_t i, int64_t j) {
    double sum = 0, size = 0;
    bool tf32 = x.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    for (int64_t q = 0; q < x.k; q++) {
        float u = blas_load(b.host[BLAS_A].data(), x.type[BLAS_A], blas_at(x, BLAS_A, item, x.trans[0] ? q : i, x.trans[0] ? i : q));
        float w = blas_load(b.host[BLAS_B].data(), x.type[BLAS_B], blas_at(x, BLAS_B, item, x.trans[1] ? j : q, x.trans[1] ? q : j));
        if (tf32) u = amp_tf32_from_f32(u, 0), w = amp_tf32_from_f32(w, 0);
        sum += (double)u * (double)w, size += fabs((double)u * (double)w);
    }
    sum *= (double)x.alpha, size *= fabs((double)x.alpha);
    double rest = 0;
    if (x.beta != 0) {
        int from = x.in_place ? BLAS_D : BLAS_C;
        rest = (double)x.beta * (double)blas_load(b.host[from].data(), x.type[BLAS_C], blas_at(x, from, item, i, j));
    }
    double bias = blas_has(x, 4) ? (double)blas_load(b.host[BLAS_BIAS].data(), x.type[BLAS_D], item * blas_bias_stride(x) + i) : 0;
    size += fabs(rest) + fabs(bias);
    return {sum + rest + bias, (x.k + 4) * ldexp(1, -24) * size * (1 + ldexp(1, -10))};
}

/* Rounding to the type of D: half a unit in the last place, at least of the smallest normal number. */
static inline double blas_rounding(cudaDataType t, double v) {
    if (t == CUDA_R_32F) return ldexp(fabs(v), -24) + ldexp(1, -149);
    return t == CUDA_R_16F ? ldexp(fabs(v), -11) + ldexp(1, -25) : ldexp(fabs(v), -8) + ldexp(1, -134);
}

/* The hardware's tanh is within 2^-11 (PTX ISA, tanh.approx.f32); GELU's slope is at most 1.13, its slope's 0.8. */
static inline blas_value blas_activated(const blas_product &x, const blas_buffers &b, int64_t item, int64_t i, int64_t j,
                                        blas_value in) {
    const unsigned char *aux = b.host[BLAS_AUX].data();
    int64_t at = item * blas_aux_stride(x) + j * blas_aux_ld(x) + i;
    if (blas_has(x, 2)) return {fmax(in.v, 0), in.off};
    if (blas_has(x, 32)) return {blas_gelu(in.v), 1.13 * in.off + ldexp(fabs(in.v) + 1, -11)};
    if (blas_has(x, 8)) return {aux[at / 8] >> (at % 8) & 1 ? in.v : 0, in.off};
    if (blas_has(x, 64)) {
        double g = (double)blas_load(aux, x.type[BLAS_D], at), slope = blas_gelu_slope(g);
        return {in.v * slope, 1.13 * in.off + fabs(in.v) * ldexp(1 + fabs(g), -10)};
    }
    return in;
}

/* "" or what is wrong with what the device holds; b.host is what it held before. */
static inline std::string blas_check(const blas_product &x, const blas_buffers &b) {
    std::vector<unsigned char> now[BLAS_BUFFERS];
    std::vector<double> gradient((size_t)(x.batch * x.m), 0), gradient_off = gradient;
    char text[256];
    for (int i : {(int)BLAS_D, (int)BLAS_BIAS, (int)BLAS_AUX}) {
        now[i] = b.host[i];
        if (cudaMemcpy(now[i].data(), b.base[i] + x.offset[i], now[i].size(), cudaMemcpyDeviceToHost) != cudaSuccess) return "copy";
    }
    cudaDataType t = x.type[BLAS_D];
    std::vector<unsigned char> expected = b.host[BLAS_D];       /* with what was found at D's elements */
    for (int64_t item = 0; item < x.batch; item++)
        for (int64_t j = 0; j < x.n; j++)
            for (int64_t i = 0; i < x.m; i++) {
                blas_value before = blas_linear(x, b, item, i, j), right = blas_activated(x, b, item, i, j, before);
                int64_t at = blas_at(x, BLAS_D, item, i, j), aux_at = item * blas_aux_stride(x) + j * blas_aux_ld(x) + i;
                double found = (double)blas_load(now[BLAS_D].data(), t, at);
                double bound = right.off + blas_rounding(t, fabs(right.v) + right.off);
                gradient[(size_t)(item * x.m + i)] += right.v;
                gradient_off[(size_t)(item * x.m + i)] += bound + (double)x.n * ldexp(fabs(right.v) + bound, -24);
                blas_store(expected.data(), t, at, (float)found);
                if (!(fabs(found - right.v) <= bound)) {
                    snprintf(text, sizeof text, "D(%d, %d) of item %d is %.9g, not %.9g within %.3g", (int)i, (int)j, (int)item,
                             found, right.v, bound);
                    return text;
                }
                if (!blas_uses_aux(x) || blas_reads_aux(x)) continue;
                double kept = blas_uses_mask(x) ? now[BLAS_AUX][(size_t)(aux_at / 8)] >> (aux_at % 8) & 1
                                                : (double)blas_load(now[BLAS_AUX].data(), t, aux_at);
                double wanted = blas_uses_mask(x) ? before.v > 0 : before.v;
                double room = blas_uses_mask(x) ? fabs(before.v) <= before.off : before.off + blas_rounding(t, fabs(before.v));
                if (!(fabs(kept - wanted) <= room)) {
                    snprintf(text, sizeof text, "aux(%d, %d) is %.9g, not %.9g within %.3g", (int)i, (int)j, kept, wanted, room);
                    return text;
                }
            }
    if (memcmp(expected.data(), now[BLAS_D].data(), expected.size()) != 0) return "bytes between D's columns changed";
    for (int64_t item = 0; item < x.batch && blas_writes_bias(x); item++)
        for (int64_t i = 0; i < blas_bias_length(x); i++) {
            double right = 0, size = 0, off = 0;
            int which = blas_has(x, 256) ? BLAS_A : BLAS_B;
            bool swapped = which == BLAS_A ? x.trans[0] != CUBLAS_OP_N : x.trans[1] == CUBLAS_OP_N;
            for (int64_t q = 0; q < x.k && !blas_has(x, 16); q++) {
                double v = (double)blas_load(b.host[which].data(), x.type[which], blas_at(x, which, item, swapped ? q : i, swapped ? i : q));
                right += v, size += fabs(v);
            }
            off = (x.k + 1) * ldexp(size, -24);
            if (blas_has(x, 16)) right = gradient[(size_t)(item * x.m + i)], off = gradient_off[(size_t)(item * x.m + i)];
            double found = (double)blas_load(now[BLAS_BIAS].data(), t, item * blas_bias_stride(x) + i);
            if (!(fabs(found - right) <= off + blas_rounding(t, fabs(right) + off))) {
                snprintf(text, sizeof text, "bias gradient %d is %.9g, not %.9g within %.3g", (int)i, found, right, off);
                return text;
            }
        }
    return "";
}

/* ---- The table */

struct blas_case {
    const char *rule, *source;
    bool runs;                                  /* else: is refused */
    void (*change)(blas_product *x);
};

static const blas_case blas_cases[] = {
    {"bf16 in, bf16 out", "[M] types", true, [](blas_product *) {}},
    {"fp16 in, fp16 out", "[M] types", true, [](blas_product *x) { for (cudaDataType &t : x->type) t = CUDA_R_16F; }},
    {"bf16 in, fp32 out", "[M] types", true, [](blas_product *x) { x->type[2] = x->type[3] = CUDA_R_32F; }},
    {"fp32", "[M] types", true, [](blas_product *x) { for (cudaDataType &t : x->type) t = CUDA_R_32F; }},
};

/* Runs a case: "" if it is as the table says, else what was found. */
static inline std::string blas_run(cublasLtHandle_t handle, const blas_case &c) {
    blas_product x;
    blas_buffers b;
    c.change(&x);
    if (!blas_make(x, &b)) return "no memory";
    cublasStatus_t status = blas_call_product(handle, x, &b);
    cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return std::string("the device: ") + cudaGetErrorName(error);
    if (!c.runs) return status == CUBLAS_STATUS_SUCCESS ? "it runs" : "";
    return status == CUBLAS_STATUS_SUCCESS ? blas_check(x, b) : cublasLtGetStatusName(status);
}

#endif
