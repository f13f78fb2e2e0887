/* cublas_rules.h - a table of what amp_cuda.cu and the model assume of cuBLASLt.  Each case is a product that must run and
 * be right, or a call that must return an error, with the document that says so.
 *
 * t_cublas.cpp tests the model with it, and tests/gpu/t_models.cu tests the library on a GPU.  Sources are as in
 * coc_cublas.cpp: [H] the header's comments, [M] cublasLtMatmul(), [C] cublasLtCreate(), [N] Narrow Precision Data Types
 * Usage and [T] Tensor Core Usage in docs.nvidia.com/cuda/cublas, [R] the library without a GPU, [TE] TransformerEngine,
 * [MN] marian-nmt.  "stated nowhere" means that no document promises it, and the model returns an error. */
#ifndef CUBLAS_RULES_H
#define CUBLAS_RULES_H

#include <cuda_runtime.h>
#include <math.h>
#include <string>
#include <vector>
#include "amp.h"
#include <cublasLt.h>
#include "../test.h"

enum { BLAS_A, BLAS_B, BLAS_C, BLAS_D, BLAS_BIAS, BLAS_AUX, BLAS_WORKSPACE, BLAS_BUFFERS, BLAS_CANDIDATES = 16 };

/* ---- A product.  A case is a change of this product. */

struct blas_product {
    int m = 40, n = 24, k = 48, batch = 1;
    cudaDataType type[4] = {CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF};
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    cudaDataType scale = CUDA_R_32F;
    cublasOperation_t trans[3] = {CUBLAS_OP_N, CUBLAS_OP_N, CUBLAS_OP_N};
    cublasFillMode_t fill = CUBLAS_FILL_MODE_FULL;
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
    int64_t aux_stride_more = 0;
    bool no_strides = false;                    /* of bias and aux: 0 */
    size_t offset[BLAS_BUFFERS] = {};           /* bytes behind a 256-byte aligned address */
    bool null[BLAS_BUFFERS] = {};
    size_t workspace = 1 << 20, workspace_given = 1 << 20;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;     /* not that of D, whose errors exceed the bounds */
    int64_t aux_ld = -1, c_ld = -1;             /* as they are if not -1 */
    int c_batch = -1;
    bool no_c_layout = false;
    bool claims_256 = false;                    /* the true alignments are not given to the heuristic */
    bool late_pointers = false;                 /* bias and aux are set after the heuristic was asked */
    int candidate = 0;                          /* which of the heuristic's results runs; -1: algo NULL */
    bool short_workspace = false;               /* one byte less than that of the first result that needs one */
    int32_t mode[2] = {CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F};     /* of A and B */
    bool scaled[4] = {};                        /* A, B, C, D have scales */
    size_t scale_offset = 0;                    /* bytes behind a 256-byte aligned address */
    bool amax = false;
    bool no_alpha = false;
    bool fast = false;                          /* fast accumulation */
    float value = 0;                            /* not 0: every element of A and B */
};

static inline bool blas_has(const blas_product &x, unsigned bits) { return (unsigned)x.epilogue & bits; }
static inline bool blas_uses_bias(const blas_product &x) { return blas_has(x, 4 | 16 | 256 | 512); }
static inline bool blas_writes_bias(const blas_product &x) { return blas_has(x, 16 | 256 | 512); }
static inline bool blas_uses_aux(const blas_product &x) { return blas_has(x, 128); }
static inline bool blas_reads_aux(const blas_product &x) { return blas_has(x, 8 | 64); }
static inline bool blas_uses_mask(const blas_product &x) { return blas_uses_aux(x) && blas_has(x, 2 | 8); }

static inline bool blas_is_fp8(cudaDataType t) { return t == CUDA_R_8F_E4M3 || t == CUDA_R_8F_E5M2; }
static inline size_t blas_size(cudaDataType t) { return t == CUDA_R_32F ? 4 : blas_is_fp8(t) ? 1 : 2; }
static inline cudaDataType blas_bias_type(const blas_product &x) {
    if (!blas_is_fp8(x.type[BLAS_A])) return x.type[BLAS_D];
    return x.type[BLAS_C] == CUDA_R_32F ? CUDA_R_16BF : x.type[BLAS_C];
}
static inline float blas_load(const void *data, cudaDataType t, int64_t i) {
    if (t == CUDA_R_32F) return ((const float *)data)[i];
    if (t == CUDA_R_8F_E4M3) return amp_f32_from_e4m3(((const uint8_t *)data)[i]);
    if (t == CUDA_R_8F_E5M2) return amp_f32_from_e5m2(((const uint8_t *)data)[i]);
    uint16_t bits = ((const uint16_t *)data)[i];
    return t == CUDA_R_16F ? amp_f32_from_f16(bits) : amp_f32_from_bf16(bits);
}
static inline void blas_store(void *data, cudaDataType t, int64_t i, float v) {
    if (t == CUDA_R_32F) ((float *)data)[i] = v;
    else if (t == CUDA_R_8F_E4M3) ((uint8_t *)data)[i] = amp_e4m3_from_f32(v, 0);
    else if (t == CUDA_R_8F_E5M2) ((uint8_t *)data)[i] = amp_e5m2_from_f32(v, 0);
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
    if (which == BLAS_C && x.c_ld >= 0) p.ld = x.c_ld;
    return p;
}
static inline int64_t blas_at(const blas_product &x, int which, int64_t item, int64_t i, int64_t j) {
    blas_place p = blas_place_of(x, which);
    return item * p.stride + (x.order[which] == CUBLASLT_ORDER_ROW ? i * p.ld + j : j * p.ld + i);
}
static inline int64_t blas_aux_ld(const blas_product &x) {
    if (x.aux_ld >= 0) return x.aux_ld;
    int64_t unit = blas_uses_mask(x) ? 128 : 8;
    return (x.m + unit - 1) / unit * unit;
}
static inline int64_t blas_aux_stride(const blas_product &x) {
    return x.no_strides ? 0 : blas_aux_ld(x) * x.n + x.aux_stride_more;
}
static inline int64_t blas_bias_length(const blas_product &x) { return blas_has(x, 512) ? x.n : x.m; }
static inline int64_t blas_bias_stride(const blas_product &x) {
    return x.no_strides ? 0 : blas_bias_length(x);
}

/* ---- Scales.  Each depends on its place only, so that a wrong layout gives wrong products. */

/* Elements along k that share a scale. */
static inline int64_t blas_block(const blas_product &x, int which) {
    int32_t mode = x.mode[which];
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 ? 32 : mode > CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F ? 128 : x.k;
}
/* The power of two that operand `which` has in row or column i and along k at q. */
static inline int blas_exponent(const blas_product &x, int which, int64_t i, int64_t q) {
    int32_t mode = x.mode[which];
    int64_t row = mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F ? 0 : mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F ? i / 128 : i;
    if (!x.scaled[which]) return 0;
    return (int)(amp_random_u32(31 + (uint64_t)which, (uint64_t)(row * 64 + q / blas_block(x, which))) % 8) - 4;
}
/* Operand `which`'s scales as the manual lays them out; zeros where no element lies. */
static inline std::vector<unsigned char> blas_scales(const blas_product &x, int which) {
    int32_t mode = x.mode[which];
    int64_t outer = which == BLAS_A ? x.m : x.n, tiles = (x.k + 127) / 128, padded = (tiles + 3) / 4 * 4;
    bool bytes = mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0, squares = mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    int64_t rows = mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F ? 1 : squares ? (outer + 127) / 128 : outer;
    int64_t block = blas_block(x, which);
    std::vector<unsigned char> out(bytes ? (size_t)((outer + 127) / 128 * tiles * 512) : (size_t)(rows * padded * 4 + 4));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t q = 0; q < x.k; q += block) {
            int e = blas_exponent(x, which, squares ? 128 * i : i, q);
            int64_t b = q / block, at = squares ? i * padded + b : b * outer + i;
            float scale = ldexpf(1, e);
            if (bytes) out[(size_t)((i / 128 * tiles + b / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + b % 4)] = (unsigned char)(127 + e);
            else memcpy(&out[(size_t)at * 4], &scale, 4);
        }
    return out;
}

/* ---- Buffers: host copies, and the same on the device, with 0xFF wherever no element lies */

enum { BLAS_ALPHA, BLAS_BETA, BLAS_SCALE_C, BLAS_SCALE_D, BLAS_AMAX, BLAS_SCALARS };

struct blas_buffers {
    std::vector<unsigned char> host[BLAS_BUFFERS];
    unsigned char *base[BLAS_BUFFERS] = {}, *scales[2] = {};
    float *scalars = NULL;
    blas_buffers() {}
    blas_buffers(const blas_buffers &) = delete;
    ~blas_buffers() {
        for (unsigned char *p : base) cudaFree(p);
        for (unsigned char *p : scales) cudaFree(p);
        cudaFree(scalars);
    }
    void *scale(const blas_product &x, int which) const {
        return which <= BLAS_B ? (void *)(scales[which] + x.scale_offset) : (void *)(scalars + (which == BLAS_C ? BLAS_SCALE_C : BLAS_SCALE_D));
    }
    void *device(const blas_product &x, int which) const {
        if (x.null[which]) return NULL;
        if (which == BLAS_C && x.in_place) which = BLAS_D;
        return base[which] + x.offset[which];
    }
};

enum { BLAS_SLACK = 1 << 16 };      /* bytes that a call may touch that should have returned an error */

static inline size_t blas_bytes(const blas_product &x, int which) {
    if (which <= BLAS_D) {
        blas_place p = blas_place_of(x, which);
        return (size_t)(p.rows && p.cols ? blas_at(x, which, x.batch - 1, p.rows - 1, p.cols - 1) + 1 : 0) * blas_size(x.type[which]);
    }
    if (which == BLAS_BIAS) return (size_t)(x.batch * blas_bias_length(x)) * blas_size(blas_bias_type(x));
    if (which == BLAS_AUX) {
        size_t elements = (size_t)(x.batch * (blas_aux_ld(x) * x.n + x.aux_stride_more));
        return blas_uses_mask(x) ? (elements + 7) / 8 : elements * blas_size(x.type[BLAS_D]);
    }
    return x.workspace_given;
}

static inline void blas_fill_matrix(const blas_product &x, int which, std::vector<unsigned char> *host) {
    blas_place p = blas_place_of(x, which);
    if (which == BLAS_C && x.c_ld == 0) p.cols = 1;
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
            for (int64_t e = 0; e < (int64_t)(b->host[i].size() / blas_size(blas_bias_type(x))); e++)
                blas_store(b->host[i].data(), blas_bias_type(x), e, 4 * amp_random_uniform(21, (uint64_t)e) - 2);
        if (i == BLAS_AUX && !blas_uses_mask(x))
            for (int64_t e = 0; e < (int64_t)(b->host[i].size() / blas_size(x.type[BLAS_D])); e++)
                blas_store(b->host[i].data(), x.type[BLAS_D], e, 8 * amp_random_uniform(22, (uint64_t)e) - 4);
        if (i == BLAS_AUX && blas_uses_mask(x))
            for (size_t e = 0; e < b->host[i].size(); e++) b->host[i][e] = (unsigned char)amp_random_u32(23, e);
        if (cudaMalloc((void **)&b->base[i], b->host[i].size() + x.offset[i] + BLAS_SLACK) != cudaSuccess) return false;
        if (cudaMemcpy(b->base[i] + x.offset[i], b->host[i].data(), b->host[i].size(), cudaMemcpyHostToDevice) != cudaSuccess)
            return false;
    }
    for (int i = 0; i < 2; i++) {
        std::vector<unsigned char> scales;
        if (!x.scaled[i]) continue;
        scales = blas_scales(x, i);
        if (cudaMalloc((void **)&b->scales[i], scales.size() + x.scale_offset) != cudaSuccess ||
            cudaMemcpy(b->scales[i] + x.scale_offset, scales.data(), scales.size(), cudaMemcpyHostToDevice) != cudaSuccess)
            return false;
    }
    float scalars[BLAS_SCALARS] = {x.alpha, x.beta, 2, 0.25f, NAN};
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

/* The first failure of several calls. */
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
    if (x.fast) blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, (int8_t)1);
    if (blas_uses_bias(x)) blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (blas_uses_aux(x)) blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
}

static inline void blas_describe(const blas_product &x, const blas_buffers &b, blas_objects *o, blas_status *s) {
    *s << cublasLtMatmulDescCreate(&o->desc, x.compute, x.scale);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)x.trans[0]);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)x.trans[1]);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_TRANSC, (int32_t)x.trans[2]);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_FILL_MODE, (int32_t)x.fill);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, (int32_t)x.pointer_mode);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)x.epilogue);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, x.bias_type);
    blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, x.aux_type);
    for (int i = 0; i < 4; i++)
        if (x.scaled[i])
            blas_set(s, o->desc, (cublasLtMatmulDescAttributes_t)(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER + i), b.scale(x, i));
    for (int i = 0; i < 2; i++)
        if (x.mode[i]) blas_set(s, o->desc, (cublasLtMatmulDescAttributes_t)(CUBLASLT_MATMUL_DESC_A_SCALE_MODE + i), x.mode[i]);
    if (x.amax) blas_set(s, o->desc, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, (void *)(b.scalars + BLAS_AMAX));
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
        blas_set(s, o->layout[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (int32_t)(i == BLAS_C && x.c_batch >= 0 ? x.c_batch : x.batch));
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

/* Makes all calls up to the product in the stream.  Returns the first status that is no success. */
static inline cublasStatus_t blas_call_product(cublasLtHandle_t handle, const blas_product &x, blas_buffers *b,
                                               cudaStream_t stream = 0) {
    blas_objects o;
    blas_status s;
    cublasLtMatmulHeuristicResult_t found[BLAS_CANDIDATES];
    int count = 0, pick = x.candidate;
    size_t given = x.workspace_given;
    blas_describe(x, *b, &o, &s);
    cublasLtMatrixLayout_t c_layout = x.no_c_layout ? NULL : o.layout[2];
    if (s.first != CUBLAS_STATUS_SUCCESS) return s.first;
    if (pick >= 0) {
        s << cublasLtMatmulAlgoGetHeuristic(handle, o.desc, o.layout[0], o.layout[1], c_layout, o.layout[3], o.preference,
                                            BLAS_CANDIDATES, found, &count);
        while (x.short_workspace && pick < count && found[pick].workspaceSize == 0) pick++;
        if (s.first == CUBLAS_STATUS_SUCCESS && pick >= count) s << CUBLAS_STATUS_NOT_SUPPORTED;
        if (s.first != CUBLAS_STATUS_SUCCESS) return s.first;
        if (x.short_workspace) given = found[pick].workspaceSize - 1;
    }
    if (x.late_pointers) blas_describe_epilogue(x, *b, &o, &s);
    const void *alpha = &x.alpha, *beta = &x.beta;
    if (x.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) alpha = b->scalars, beta = b->scalars + 1;
    s << cublasLtMatmul(handle, o.desc, x.no_alpha ? NULL : alpha, b->device(x, BLAS_A), o.layout[0], b->device(x, BLAS_B),
                        o.layout[1], beta, b->device(x, BLAS_C), c_layout, b->device(x, BLAS_D), o.layout[3],
                        pick >= 0 ? &found[pick].algo : NULL, b->device(x, BLAS_WORKSPACE), given, stream);
    return s.first;
}

/* ---- The exact result, in fp64, and the bound of the error */

static bool blas_rounds_first;                  /* the library at hand may round alpha AB to D before its epilogue */

static inline double blas_gelu(double v) { return 0.5 * v * (1 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))); }
static inline double blas_gelu_slope(double v) {
    double t = tanh(0.7978845608028654 * (v + 0.044715 * v * v * v));
    return 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * v * v);
}

/* A value and the largest error of a computation of it. */
struct blas_value { double v, off; };

/* alpha AB + beta C + bias.  Each of k products and sums in fp32 is off by 2^-24 of at most the sum of magnitudes, in any
   order, or by 2^-23 in tensor cores, which cut off (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021); so are
   the three operations after them.  TF32 operands are off by 2^-10 at most, cut off or rounded.  Products of fp8 on Hopper keep
   about 14 bits, and are added to fp32 sums after 128 of k at most (DeepSeek-V3 technical report, 3.3.2): four sums of 32;
   with fast accumulation at the end.  Some algorithms round alpha AB to a D of 16 bits before their epilogue, and
   what that leaves before they add beta C (seen in cuBLASLt 13.1 on an H100). */
static inline blas_value blas_linear(const blas_product &x, const blas_buffers &b, int64_t item, int64_t i, int64_t j) {
    double sum = 0, size = 0;
    double operand = x.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? ldexp(1, -10) : 0;
    for (int64_t q = 0; q < x.k; q++) {
        float u = blas_load(b.host[BLAS_A].data(), x.type[BLAS_A], blas_at(x, BLAS_A, item, x.trans[0] ? q : i, x.trans[0] ? i : q));
        float w = blas_load(b.host[BLAS_B].data(), x.type[BLAS_B], blas_at(x, BLAS_B, item, x.trans[1] ? j : q, x.trans[1] ? q : j));
        u *= ldexpf(1, blas_exponent(x, BLAS_A, i, q)), w *= ldexpf(1, blas_exponent(x, BLAS_B, j, q));
        sum += (double)u * (double)w, size += fabs((double)u * (double)w);
    }
    sum *= (double)x.alpha, size *= fabs((double)x.alpha);
    double rest = 0;
    if (x.beta != 0) {
        int from = x.in_place ? BLAS_D : BLAS_C;
        rest = (double)x.beta * (double)blas_load(b.host[from].data(), x.type[BLAS_C], blas_at(x, from, item, i, j));
        if (x.scaled[BLAS_C]) rest *= 2;
    }
    const bool first = blas_rounds_first && (rest != 0 || x.epilogue != CUBLASLT_EPILOGUE_DEFAULT) && (x.type[BLAS_D] == CUDA_R_16F || x.type[BLAS_D] == CUDA_R_16BF);
    double bias = blas_has(x, 4) ? (double)blas_load(b.host[BLAS_BIAS].data(), blas_bias_type(x), item * blas_bias_stride(x) + i) : 0;
    double off = size * operand * (2 + operand) + (blas_is_fp8(x.type[BLAS_A]) ? ldexp(size, -11) : 0);
    if (first) off += ldexp(fabs(sum) + fabs(bias), x.type[BLAS_D] == CUDA_R_16F ? -11 : -8);
    if (x.fast) off += ldexp(size, -13) * (double)((x.k + 31) / 32);
    size += fabs(rest) + fabs(bias);
    double unit = x.type[BLAS_A] == CUDA_R_32F && operand == 0 ? ldexp(1, -24) : ldexp(1, -23);
    return {sum + rest + bias, off + (x.k + 4) * unit * size * (1 + ldexp(1, -8))};
}

/* Rounding to the type of D: half a unit in the last place, at least of the smallest normal number. */
static inline double blas_rounding(cudaDataType t, double v) {
    if (t == CUDA_R_32F) return ldexp(fabs(v), -24) + ldexp(1, -149);
    if (t == CUDA_R_8F_E4M3) return ldexp(fabs(v), -4) + ldexp(1, -10);
    if (t == CUDA_R_8F_E5M2) return ldexp(fabs(v), -3) + ldexp(1, -17);
    return t == CUDA_R_16F ? ldexp(fabs(v), -11) + ldexp(1, -25) : ldexp(fabs(v), -8) + ldexp(1, -134);
}

/* The hardware's tanh is within 2^-11 (PTX ISA, tanh.approx.f32), and GELU's slope at most 1.13. */
static inline blas_value blas_activated(const blas_product &x, const blas_buffers &b, int64_t item, int64_t i, int64_t j,
                                        blas_value in) {
    const unsigned char *aux = b.host[BLAS_AUX].data();
    int64_t at = item * blas_aux_stride(x) + j * blas_aux_ld(x) + i;
    if (blas_has(x, 2)) return {fmax(in.v, 0), in.off};
    if (blas_has(x, 32)) return {blas_gelu(in.v), 1.13 * in.off + ldexp(fabs(in.v) + 1, -11)};
    if (blas_has(x, 8)) return {aux[at / 8] >> (at % 8) & 1 ? in.v : 0, in.off};
    if (blas_has(x, 64)) {
        double g = (double)blas_load(aux, x.type[BLAS_D], at), slope = blas_gelu_slope(g);
        double of_tanh = 0.5 + fabs(g) * 0.7978845608028654 * (1 + 3 * 0.044715 * g * g);   /* d slope / d tanh, at most */
        return {in.v * slope, 1.13 * in.off + (fabs(in.v) + in.off) * ldexp(of_tanh + 1, -11)};
    }
    return in;
}

/* Returns "" or what is wrong. */
static inline std::string blas_compare(const char *what, int64_t i, int64_t j, double found, double right, double room) {
    char text[256];
    if (fabs(found - right) <= room) return "";
    snprintf(text, sizeof text, "%s(%lld, %lld) is %.9g, not %.9g within %.3g", what, (long long)i, (long long)j, found, right, room);
    return text;
}

typedef std::vector<unsigned char> blas_bytes_of;

/* The element of the aux matrix that forward writes: what goes into the activation, or its sign. */
static inline std::string blas_check_aux(const blas_product &x, const blas_bytes_of &aux, int64_t item, int64_t i, int64_t j,
                                         blas_value before) {
    int64_t at = item * blas_aux_stride(x) + j * blas_aux_ld(x) + i;
    cudaDataType t = x.type[BLAS_D];
    if (blas_uses_mask(x))
        return blas_compare("mask", i, j, aux[(size_t)(at / 8)] >> (at % 8) & 1, before.v > 0, fabs(before.v) <= before.off);
    return blas_compare("aux", i, j, (double)blas_load(aux.data(), t, at), before.v, before.off + blas_rounding(t, fabs(before.v) + before.off));
}

/* The result that BGRADA or BGRADB must have: sums over k. */
static inline blas_value blas_input_sum(const blas_product &x, const blas_buffers &b, int64_t item, int64_t i) {
    int which = blas_has(x, 256) ? BLAS_A : BLAS_B;
    bool swapped = which == BLAS_A ? x.trans[0] != CUBLAS_OP_N : x.trans[1] == CUBLAS_OP_N;
    double sum = 0, size = 0;
    for (int64_t q = 0; q < x.k; q++) {
        double v = (double)blas_load(b.host[which].data(), x.type[which], blas_at(x, which, item, swapped ? q : i, swapped ? i : q));
        sum += v, size += fabs(v);
    }
    return {sum, (x.k + 1) * ldexp(size, x.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? -10 : -24)};
}

/* The bias gradient.  row_sums are sums of D, from its values before or after rounding. */
static inline std::string blas_check_gradient(const blas_product &x, const blas_buffers &b, const blas_bytes_of &bias,
                                              const std::vector<blas_value> &row_sums) {
    std::string wrong;
    cudaDataType t = x.type[BLAS_D];
    for (int64_t item = 0; item < x.batch; item++)
        for (int64_t i = 0; i < blas_bias_length(x) && wrong.empty(); i++) {
            blas_value right = blas_has(x, 16) ? row_sums[(size_t)(item * x.m + i)] : blas_input_sum(x, b, item, i);
            double found = (double)blas_load(bias.data(), t, item * blas_bias_stride(x) + i);
            wrong = blas_compare("bias gradient", i, item, found, right.v, right.off + blas_rounding(t, fabs(right.v) + right.off));
        }
    return wrong;
}

/* Returns "" or what is wrong with the device's buffers.  b.host has their content before the call. */
static inline std::string blas_check(const blas_product &x, const blas_buffers &b) {
    blas_bytes_of now[BLAS_BUFFERS], expected = b.host[BLAS_D];     /* with what was found at D's elements */
    std::vector<blas_value> row_sums((size_t)(x.batch * x.m), blas_value{0, 0});
    blas_value most = {0, 0};
    float amax = 0;
    cudaDataType t = x.type[BLAS_D];
    for (int i : {(int)BLAS_D, (int)BLAS_BIAS, (int)BLAS_AUX}) {
        now[i] = b.host[i];
        if (cudaMemcpy(now[i].data(), b.base[i] + x.offset[i], now[i].size(), cudaMemcpyDeviceToHost) != cudaSuccess) return "copy";
    }
    for (int64_t item = 0; item < x.batch; item++)
        for (int64_t j = 0; j < x.n; j++)
            for (int64_t i = 0; i < x.m; i++) {
                blas_value before = blas_linear(x, b, item, i, j), right = blas_activated(x, b, item, i, j, before);
                most = {fmax(most.v, fabs(right.v)), fmax(most.off, right.off)};
                if (x.scaled[BLAS_D]) right.v *= 0.25, right.off *= 0.25;
                int64_t at = blas_at(x, BLAS_D, item, i, j);
                float found = blas_load(now[BLAS_D].data(), t, at);
                double room = right.off + blas_rounding(t, fabs(right.v) + right.off);
                blas_value &sum = row_sums[(size_t)(item * x.m + i)];
                sum.v += right.v, sum.off += room + (double)x.n * ldexp(fabs(right.v) + room, -24);
                blas_store(expected.data(), t, at, found);
                std::string wrong = blas_compare("D", i, j, (double)found, right.v, room);
                if (wrong.empty() && blas_uses_aux(x) && !blas_reads_aux(x))
                    wrong = blas_check_aux(x, now[BLAS_AUX], item, i, j, before);
                if (!wrong.empty()) return wrong;
            }
    if (expected != now[BLAS_D]) return "bytes between D's columns changed";
    if (x.amax && cudaMemcpy(&amax, b.scalars + BLAS_AMAX, 4, cudaMemcpyDeviceToHost) != cudaSuccess) return "copy";
    if (x.amax) return blas_compare("the maximum", 0, 0, (double)amax, most.v, most.off + ldexp(most.v, -23));
    return blas_writes_bias(x) ? blas_check_gradient(x, b, now[BLAS_BIAS], row_sums) : "";
}

/* ---- The table.  Each line changes some fields of a product of 40 x 24 over k = 48 in bf16. */

struct blas_case {
    const char *rule, *source;
    bool runs;                                  /* runs and is right; else returns an error */
    void (*change)(blas_product *x);
    bool alone = false;                         /* a GPU may fault on it, so no other case runs after it in its process */
    int from = 0, to = 999;                     /* the compute capabilities to which it applies, 10 major + minor */
};

static inline void blas_types(blas_product *x, cudaDataType in, cudaDataType out) {
    x->type[0] = x->type[1] = in, x->type[2] = x->type[3] = out;
}
static inline void blas_rows(blas_product *x) {
    for (cublasLtOrder_t &o : x->order) o = CUBLASLT_ORDER_ROW;
}

/* fp8: A^T B, sizes of multiples of 16, each operand with one scale. */
static inline void blas_fp8(blas_product *x, cudaDataType a = CUDA_R_8F_E4M3, cudaDataType b = CUDA_R_8F_E4M3, cudaDataType d = CUDA_R_16BF,
                            cudaDataType c = CUDA_R_16BF) {
    x->m = 48, x->n = 32, x->k = 288, x->trans[0] = CUBLAS_OP_T;
    x->type[0] = a, x->type[1] = b, x->type[2] = blas_is_fp8(d) ? c : d, x->type[3] = d, x->in_place = !blas_is_fp8(d);
    x->scaled[0] = x->scaled[1] = true, x->scaled[3] = blas_is_fp8(d);
}
static inline void blas_modes(blas_product *x, int32_t a, int32_t b, cudaDataType d = CUDA_R_16BF) {
    blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, d);
    x->m = 160, x->n = 144, x->k = 704, x->mode[0] = a, x->mode[1] = b;     /* more than one square, and parts of them */
}
enum {
    BLAS_OUTER = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F, BLAS_ROWS = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
    BLAS_SQUARES = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F, BLAS_MX = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0,
    BLAS_ADA = 89, BLAS_HOPPER = 90, BLAS_BLACKWELL = 100, BLAS_GEFORCE = 120, BLAS_NEWEST = 999
};

static const blas_case blas_cases[] = {
    /* types */
    {"bf16 x bf16 to bf16", "[M] types", true, [](blas_product *) {}},
    {"fp16 x fp16 to fp16", "[M] types", true, [](blas_product *x) { blas_types(x, CUDA_R_16F, CUDA_R_16F); }},
    {"bf16 x bf16 to fp32", "[M] types", true, [](blas_product *x) { blas_types(x, CUDA_R_16BF, CUDA_R_32F); }},
    {"fp16 x fp16 to fp32", "[M] types", true, [](blas_product *x) { blas_types(x, CUDA_R_16F, CUDA_R_32F); }},
    {"fp32", "[M] types", true, [](blas_product *x) { blas_types(x, CUDA_R_32F, CUDA_R_32F); }},
    {"TF32", "[M] types", true, [](blas_product *x) {
        blas_types(x, CUDA_R_32F, CUDA_R_32F), x->compute = CUBLAS_COMPUTE_32F_FAST_TF32; }},
    {"bf16 x fp16 is refused", "[M] types", false, [](blas_product *x) { x->type[1] = CUDA_R_16F; }},
    {"bf16 to fp16 is refused", "[M] types", false, [](blas_product *x) { x->type[2] = x->type[3] = CUDA_R_16F; }},
    {"fp32 to bf16 is refused", "[M] types", false, [](blas_product *x) { blas_types(x, CUDA_R_32F, CUDA_R_16BF); }},
    {"FAST_TF32 of bf16 is refused", "[M] types", false, [](blas_product *x) { x->compute = CUBLAS_COMPUTE_32F_FAST_TF32; }},
    {"C fp32 and D bf16 is refused", "[M] C and D have the same type", false, [](blas_product *x) {
        x->type[2] = CUDA_R_32F, x->in_place = false; }},
    {"a scale type of bf16 is refused", "[M] types", false, [](blas_product *x) { x->scale = CUDA_R_16BF; }},
    {"a scale for A that is not fp8 is refused", "[H] A_SCALE_POINTER", false, [](blas_product *x) { x->scaled[0] = true; }},
    /* fp8: types */
    {"fp8 before 8.9 is refused", "[N] Tensorwide scaling, 8.9+", false, [](blas_product *x) { blas_fp8(x); }, false, 0, BLAS_ADA - 1},
    {"E4M3 x E4M3 to bf16", "[M] FP8 types", true, [](blas_product *x) { blas_fp8(x); }, false, BLAS_ADA},
    {"E4M3 x E4M3 to fp16", "[M] FP8 types", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_16F); }, false, BLAS_ADA},
    {"E4M3 x E4M3 to fp32, beta 1", "[M] FP8 types", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F), x->beta = 1; }, false, BLAS_ADA},
    {"E4M3 x E5M2 to bf16", "[M] FP8 types", true, [](blas_product *x) { blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2); }, false, BLAS_ADA},
    {"E5M2 x E4M3 to bf16", "[M] FP8 types", true, [](blas_product *x) { blas_fp8(x, CUDA_R_8F_E5M2, CUDA_R_8F_E4M3); }, false, BLAS_ADA},
    {"E4M3 x E5M2 to fp32", "[M] FP8 types", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_32F); }, false, BLAS_ADA},
    {"E5M2 x E4M3 to fp32", "[M] FP8 types", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E5M2, CUDA_R_8F_E4M3, CUDA_R_32F); }, false, BLAS_ADA},
    {"E5M2 x E5M2 is refused", "[M] FP8 types", false, [](blas_product *x) { blas_fp8(x, CUDA_R_8F_E5M2, CUDA_R_8F_E5M2); }, false, BLAS_ADA},
    {"E4M3 x bf16 is refused", "[M] types", false, [](blas_product *x) { blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_16BF); }, false, BLAS_ADA},
    {"E4M3 x E4M3 to E4M3, C bf16, with the maximum", "[M] FP8 types, [N] D = scale_D D_temp", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3), x->amax = true; }, false, BLAS_ADA},
    {"E4M3 x E5M2 to E5M2, C fp16", "[M] FP8 types", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_8F_E5M2, CUDA_R_16F); }, false, BLAS_ADA},
    {"E4M3 x E4M3 to E5M2 is refused", "[M] FP8 types", false, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2); }, false, BLAS_ADA},
    {"an fp8 C is refused", "[M] FP8 types", false, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3); }, false, BLAS_ADA},
    {"fp8 with FAST_TF32 is refused", "[M] must be CUBLAS_COMPUTE_32F", false, [](blas_product *x) {
        blas_fp8(x), x->compute = CUBLAS_COMPUTE_32F_FAST_TF32; }, false, BLAS_ADA},
    /* fp8: scales */
    {"no scales: 1", "[H] A_SCALE_POINTER", true, [](blas_product *x) { blas_fp8(x), x->scaled[0] = x->scaled[1] = false; }, false, BLAS_ADA},
    {"a scale for a bf16 C", "[N] the one exception", true, [](blas_product *x) {
        blas_fp8(x), x->beta = 0.5f, x->scaled[2] = true; }, false, BLAS_ADA},
    {"a scale for a bf16 D is refused", "[N] cuBLAS will return an error", false, [](blas_product *x) {
        blas_fp8(x), x->scaled[3] = true; }, false, BLAS_ADA},
    {"the maximum of a bf16 D is refused", "[H] AMAX_D_POINTER", false, [](blas_product *x) { blas_fp8(x), x->amax = true; }, false, BLAS_ADA},
    /* fp8: layouts */
    {"fp8 with A not transposed is refused before 10.0", "[M] the TN format", false, [](blas_product *x) {
        blas_fp8(x), x->trans[0] = CUBLAS_OP_N; }, false, BLAS_ADA, BLAS_BLACKWELL - 1},
    {"fp8 with B transposed is refused before 10.0", "[M] the TN format", false, [](blas_product *x) {
        blas_fp8(x), x->trans[1] = CUBLAS_OP_T; }, false, BLAS_ADA, BLAS_BLACKWELL - 1},
    {"fp8 with A not transposed", "[M] the TN format: 8.9, 9.0, 12.x", true, [](blas_product *x) {
        blas_fp8(x), x->trans[0] = CUBLAS_OP_N; }, false, BLAS_BLACKWELL, BLAS_GEFORCE - 1},
    {"fp8 with both transposed", "[M] the TN format: 8.9, 9.0, 12.x", true, [](blas_product *x) {
        blas_fp8(x), x->trans[1] = CUBLAS_OP_T; }, false, BLAS_BLACKWELL, BLAS_GEFORCE - 1},
    {"fp8 with A not transposed is refused on 12.x", "[M] the TN format", false, [](blas_product *x) {
        blas_fp8(x), x->trans[0] = CUBLAS_OP_N; }, false, BLAS_GEFORCE},
    {"fp8 with k not a multiple of 16 is refused", "[T] (k AtypeSize) % 16 == 0", false, [](blas_product *x) {
        blas_fp8(x), x->k = 56, x->ld_more[0] = x->ld_more[1] = 8; }, false, BLAS_ADA},
    {"fp8 with m not a multiple of 8 for bf16 is refused", "[T] (m CtypeSize) % 16 == 0", false, [](blas_product *x) {
        blas_fp8(x), x->m = 36, x->ld_more[2] = x->ld_more[3] = 4; }, false, BLAS_ADA},
    {"fp8 with n odd", "[T]", true, [](blas_product *x) { blas_fp8(x), x->n = 19; }, false, BLAS_ADA},
    {"fp8 with lda not a multiple of 16 is refused", "[T] (lda AtypeSize) % 16 == 0", false, [](blas_product *x) {
        blas_fp8(x), x->ld_more[0] = 8; }, false, BLAS_ADA},
    {"fp8 with larger leading dimensions", "[T]", true, [](blas_product *x) {
        blas_fp8(x);
        for (int64_t &more : x->ld_more) more = 16; }, false, BLAS_ADA},
    {"fp8 with A aligned to 8 bytes is refused", "[T] intptr_t(A) % 16 == 0", false, [](blas_product *x) {
        blas_fp8(x), x->offset[BLAS_A] = 8; }, false, BLAS_ADA},
    {"a batch in fp8", "[H] BATCH_COUNT", true, [](blas_product *x) { blas_fp8(x), x->batch = 2; }, false, BLAS_ADA},
    {"fp8 in row order is refused", "stated nowhere", false, [](blas_product *x) { blas_fp8(x), blas_rows(x); }, false, BLAS_ADA},
    {"fp8 with fast accumulation", "[H] FAST_ACCUM", true, [](blas_product *x) { blas_fp8(x), x->fast = true; }, false, BLAS_ADA},
    {"fp8 to fp32 with fast accumulation, long k", "[H] FAST_ACCUM", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_32F), x->k = 2048, x->fast = true; }, false, BLAS_ADA},
    /* fp8: epilogues */
    {"fp8, BIAS of bf16", "[M] FP8 types", true, [](blas_product *x) { blas_fp8(x), x->epilogue = CUBLASLT_EPILOGUE_BIAS; }, false, BLAS_ADA},
    {"fp8 to fp32, BIAS of bf16", "[M] FP8 types", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F), x->epilogue = CUBLASLT_EPILOGUE_BIAS; }, false, BLAS_ADA},
    {"fp8 to fp32, BIAS of fp32 is refused", "[M] FP8 types", false, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F);
        x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->bias_type = CUDA_R_32F; }, false, BLAS_ADA},
    {"fp8 to fp16, BIAS, beta 1", "[M] FP8 types", true, [](blas_product *x) {
        blas_fp8(x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_16F), x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->beta = 1; }, false, BLAS_ADA},
    {"fp8, RELU_BIAS", "[H]", true, [](blas_product *x) { blas_fp8(x), x->epilogue = CUBLASLT_EPILOGUE_RELU_BIAS; }, false, BLAS_ADA},
    {"fp8, GELU", "[H]", true, [](blas_product *x) { blas_fp8(x), x->epilogue = CUBLASLT_EPILOGUE_GELU; }, false, BLAS_ADA},
    {"fp8, GELU_BIAS", "[H]", true, [](blas_product *x) { blas_fp8(x), x->epilogue = CUBLASLT_EPILOGUE_GELU_BIAS; }, false, BLAS_ADA},
    {"fp8, GELU_AUX_BIAS is refused", "[TE]; stated nowhere", false, [](blas_product *x) {
        blas_fp8(x), x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }, false, BLAS_ADA},
    {"fp8, BGRADB is refused", "stated nowhere", false, [](blas_product *x) { blas_fp8(x), x->epilogue = CUBLASLT_EPILOGUE_BGRADB; }, false, BLAS_ADA},
    /* fp8: modes of scales */
    {"outer vectors", "[N] Outer vector scaling, 9.0", true, [](blas_product *x) { blas_modes(x, BLAS_OUTER, BLAS_OUTER); }, false, BLAS_HOPPER, BLAS_HOPPER},
    {"rows of 128 x rows of 128", "[N] 128-element 1D, 9.0", true, [](blas_product *x) { blas_modes(x, BLAS_ROWS, BLAS_ROWS); }, false, BLAS_HOPPER, BLAS_HOPPER},
    {"rows of 128 x squares", "[N] 128x128 2D, 9.0", true, [](blas_product *x) { blas_modes(x, BLAS_ROWS, BLAS_SQUARES); }, false, BLAS_HOPPER, BLAS_HOPPER},
    {"squares x rows of 128, to fp32, beta 1", "[N] 128x128 2D, 9.0", true, [](blas_product *x) {
        blas_modes(x, BLAS_SQUARES, BLAS_ROWS, CUDA_R_32F), x->beta = 1; }, false, BLAS_HOPPER, BLAS_HOPPER},
    {"squares x squares is refused", "[N] supported combinations", false, [](blas_product *x) { blas_modes(x, BLAS_SQUARES, BLAS_SQUARES); }, false, BLAS_ADA},
    {"rows of 128 x outer vectors is refused", "[N] supported combinations", false, [](blas_product *x) { blas_modes(x, BLAS_ROWS, BLAS_OUTER); }, false, BLAS_ADA},
    {"rows of 128 x one scale is refused", "[N] supported combinations", false, [](blas_product *x) { blas_modes(x, BLAS_ROWS, 0); }, false, BLAS_ADA},
    {"rows of 128 are refused on 8.9", "[N] 9.0", false, [](blas_product *x) { blas_modes(x, BLAS_ROWS, BLAS_ROWS); }, false, BLAS_ADA, BLAS_ADA},
    {"squares are refused from 10.0 on", "[N] 9.0", false, [](blas_product *x) { blas_modes(x, BLAS_SQUARES, BLAS_ROWS); }, false, BLAS_BLACKWELL},
    {"rows of 128 to E4M3 is refused", "[M] note 8", false, [](blas_product *x) { blas_modes(x, BLAS_ROWS, BLAS_ROWS, CUDA_R_8F_E4M3); }, false, BLAS_ADA},
    {"rows of 128 with n not a multiple of 4 is refused", "[N] M and N must be multiples of 4", false, [](blas_product *x) {
        blas_modes(x, BLAS_ROWS, BLAS_ROWS), x->n = 146; }, false, BLAS_ADA},
    {"rows of 128 at 8 bytes is refused", "[N] must be 16B aligned", false, [](blas_product *x) {
        blas_modes(x, BLAS_ROWS, BLAS_ROWS), x->scale_offset = 8; }, false, BLAS_ADA},
    {"rows of 128 without scales is refused", "stated nowhere", false, [](blas_product *x) {
        blas_modes(x, BLAS_ROWS, BLAS_ROWS), x->scaled[0] = false; }, false, BLAS_ADA},
    {"rows of 128 with BIAS is refused", "CUDA 12.9 notes: limited support for fused epilogues", false, [](blas_product *x) {
        blas_modes(x, BLAS_ROWS, BLAS_ROWS), x->epilogue = CUBLASLT_EPILOGUE_BIAS; }, false, BLAS_ADA},
    {"MX", "[N] 32-element 1D, 10.0+", true, [](blas_product *x) { blas_modes(x, BLAS_MX, BLAS_MX); }, false, BLAS_BLACKWELL},
    {"MX to fp32, beta 1", "[N] 32-element 1D, 10.0+", true, [](blas_product *x) {
        blas_modes(x, BLAS_MX, BLAS_MX, CUDA_R_32F), x->beta = 1; }, false, BLAS_BLACKWELL},
    {"MX, neither transposed: the scales stay", "[N] does not allow transposition", true, [](blas_product *x) {
        blas_modes(x, BLAS_MX, BLAS_MX), x->trans[0] = CUBLAS_OP_N; }, false, BLAS_BLACKWELL, BLAS_GEFORCE - 1},
    {"MX is refused before 10.0", "[N] 10.0+", false, [](blas_product *x) { blas_modes(x, BLAS_MX, BLAS_MX); }, false, BLAS_ADA, BLAS_BLACKWELL - 1},
    {"MX x rows of 128 is refused", "[N] mixing", false, [](blas_product *x) { blas_modes(x, BLAS_MX, BLAS_ROWS); }, false, BLAS_ADA},
    {"MX at 8 bytes is refused", "[N] must be 16B aligned", false, [](blas_product *x) { blas_modes(x, BLAS_MX, BLAS_MX), x->scale_offset = 8; }, false, BLAS_ADA},
    /* shapes and layouts */
    {"A transposed", "[H] TRANSA", true, [](blas_product *x) { x->trans[0] = CUBLAS_OP_T; }},
    {"B transposed", "[H] TRANSB", true, [](blas_product *x) { x->trans[1] = CUBLAS_OP_T; }},
    {"both transposed", "[H]", true, [](blas_product *x) { x->trans[0] = x->trans[1] = CUBLAS_OP_T; }},
    {"C transposed is refused", "[H] TRANSC", false, [](blas_product *x) { x->trans[2] = CUBLAS_OP_T; }},
    {"a triangle of bf16 is refused", "[M] FILL_MODE", false, [](blas_product *x) { x->fill = CUBLAS_FILL_MODE_LOWER; }},
    {"odd sizes", "[H] MIN_ALIGNMENT", true, [](blas_product *x) { x->m = 33, x->n = 19, x->k = 65; }},
    {"odd sizes, A transposed", "[H]", true, [](blas_product *x) { x->m = 33, x->n = 19, x->k = 65, x->trans[0] = CUBLAS_OP_T; }},
    {"one row", "[H]", true, [](blas_product *x) { x->m = 1; }},
    {"one column", "[H]", true, [](blas_product *x) { x->n = 1; }},
    {"k = 1", "[H]", true, [](blas_product *x) { x->k = 1; }},
    {"long k", "[H]", true, [](blas_product *x) { x->k = 2048; }},
    {"larger leading dimensions", "[H] LD", true, [](blas_product *x) { for (int64_t &more : x->ld_more) more = 8; }},
    {"an ld below the rows is refused", "[H] LD", false, [](blas_product *x) { x->ld_more[BLAS_A] = -8; }},
    {"k that differs between A and B is refused", "[H] INVALID_VALUE", false, [](blas_product *x) { x->b_rows_more = 8; }},
    {"k = 0 is refused", "[TE] checks k > 0; stated nowhere", false, [](blas_product *x) { x->k = 0; }},
    {"m = 0 is refused", "[TE] returns before; stated nowhere", false, [](blas_product *x) { x->m = 0; }},
    {"all in row order", "[H] ORDER", true, blas_rows},
    {"row order, transposed, larger ld", "[H] ORDER", true, [](blas_product *x) {
        blas_rows(x), x->trans[0] = x->trans[1] = CUBLAS_OP_T;
        for (int64_t &more : x->ld_more) more = 8; }},
    {"A in row order", "[H] ORDER", true, [](blas_product *x) { x->order[0] = CUBLASLT_ORDER_ROW; }},
    {"C and D in different orders is refused", "[M] the same memory order", false, [](blas_product *x) {
        x->order[2] = CUBLASLT_ORDER_ROW, x->in_place = false; }},
    {"strided batch", "[H] BATCH_COUNT", true, [](blas_product *x) { x->batch = 3; }},
    {"strided batch, A repeated", "[H] STRIDED_BATCH_OFFSET", true, [](blas_product *x) { x->batch = 3, x->repeat_a = true; }},
    {"strided batch between the columns of a wider matrix", "[H] STRIDED_BATCH_OFFSET", true, [](blas_product *x) {
        x->batch = 3;
        for (int i : {0, 2, 3}) {               /* item b takes rows b m ... of a matrix of 3 m rows */
            int64_t columns = i ? x->n : x->k;
            x->ld_more[i] = 2 * x->m, x->stride_more[i] = x->m - columns * 3 * x->m;
        } }},
    {"a batch into one D is refused", "stated nowhere", false, [](blas_product *x) {
        x->batch = 3, x->stride_more[2] = x->stride_more[3] = -x->m * x->n; }},
    {"different batch counts are refused", "[M] the same batch size", false, [](blas_product *x) {
        x->batch = 3, x->c_batch = 2, x->in_place = false; }},
    /* alpha, beta, C */
    {"alpha 0.5, beta 1, in place", "[M]", true, [](blas_product *x) { x->alpha = 0.5f, x->beta = 1; }},
    {"beta -2, C apart", "[M]", true, [](blas_product *x) { x->beta = -2, x->in_place = false; }},
    {"C with an ld of its own", "[M]", true, [](blas_product *x) { x->beta = 1, x->in_place = false, x->ld_more[2] = 16; }},
    {"C of ld 0 is one column repeated", "[M]", true, [](blas_product *x) { x->beta = 1, x->in_place = false, x->c_ld = 0; }},
    {"no layout of C: that of D", "[M]", true, [](blas_product *x) { x->beta = 1, x->no_c_layout = true; }},
    {"in place with another ld is refused", "[M] Cdesc == Ddesc", false, [](blas_product *x) { x->beta = 1, x->c_ld = 48; }},
    {"beta 0 does not read C", "cublas<t>gemm() in the manual", true, [](blas_product *x) { x->nan_c = true; }},
    {"beta 0 does not read C, fp32", "cublas<t>gemm() in the manual", true, [](blas_product *x) {
        x->nan_c = true, blas_types(x, CUDA_R_16BF, CUDA_R_32F); }},
    {"alpha and beta on the device", "[H] POINTER_MODE", true, [](blas_product *x) {
        x->alpha = 0.5f, x->beta = 1, x->pointer_mode = CUBLASLT_POINTER_MODE_DEVICE; }},
    {"beta 0 on the device does not read C", "cublas<t>gemm() in the manual", true, [](blas_product *x) {
        x->nan_c = true, x->pointer_mode = CUBLASLT_POINTER_MODE_DEVICE; }},
    {"no alpha is refused", "[M] unexpectedly NULL", false, [](blas_product *x) { x->no_alpha = true; }},
    {"no A is refused", "[M] unexpectedly NULL", false, [](blas_product *x) { x->null[BLAS_A] = true; }, true},
    {"no D is refused", "[M] unexpectedly NULL", false, [](blas_product *x) { x->null[BLAS_D] = true, x->in_place = false; }, true},
    {"no C, though beta is 0, is refused", "stated nowhere", false, [](blas_product *x) { x->null[BLAS_C] = true; }, true},
    /* epilogues */
    {"BIAS", "[H] epilogues", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_BIAS; }},
    {"BIAS, fp16", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_BIAS, blas_types(x, CUDA_R_16F, CUDA_R_16F); }},
    {"BIAS, bf16 to fp32: an fp32 bias", "[M] types", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->bias_type = CUDA_R_32F, blas_types(x, CUDA_R_16BF, CUDA_R_32F); }},
    {"BIAS, TF32, A transposed", "[M] types", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->trans[0] = CUBLAS_OP_T, x->compute = CUBLAS_COMPUTE_32F_FAST_TF32;
        blas_types(x, CUDA_R_32F, CUDA_R_32F); }},
    {"BIAS and beta 1", "[M]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->beta = 1; }},
    {"BIAS per item of a batch", "[H] BIAS_BATCH_STRIDE", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->batch = 2; }},
    {"one BIAS for a batch: stride 0", "[H] BIAS_BATCH_STRIDE", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->batch = 2, x->no_strides = true; }},
    {"a BIAS of fp32 for a D of bf16 is refused", "[M] types", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->bias_type = CUDA_R_32F; }},
    {"BIAS without a pointer is refused", "[M] unexpectedly NULL", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->null[BLAS_BIAS] = true; }, true},
    {"RELU", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_RELU; }},
    {"RELU_BIAS", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_RELU_BIAS; }},
    {"RELU_AUX", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_RELU_AUX; }},
    {"RELU_AUX_BIAS", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_RELU_AUX_BIAS; }},
    {"DRELU", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_DRELU; }},
    {"DRELU_BGRAD", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_DRELU_BGRAD; }},
    {"GELU", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_GELU; }},
    {"GELU_BIAS", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_GELU_BIAS; }},
    {"GELU_AUX", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX; }},
    {"GELU_AUX_BIAS", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }},
    {"GELU_AUX_BIAS, A transposed", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x->trans[0] = CUBLAS_OP_T; }},
    {"GELU_AUX_BIAS, fp16", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, blas_types(x, CUDA_R_16F, CUDA_R_16F); }},
    {"GELU_AUX_BIAS, fp32", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, blas_types(x, CUDA_R_32F, CUDA_R_32F); }},
    {"GELU_AUX_BIAS, TF32, A transposed", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x->trans[0] = CUBLAS_OP_T, x->compute = CUBLAS_COMPUTE_32F_FAST_TF32;
        blas_types(x, CUDA_R_32F, CUDA_R_32F); }},
    {"DGELU", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_DGELU; }},
    {"DGELU, fp32", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_DGELU, blas_types(x, CUDA_R_32F, CUDA_R_32F); }},
    {"DGELU_BGRAD", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD; }},
    {"DGELU_BGRAD, fp16", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD, blas_types(x, CUDA_R_16F, CUDA_R_16F); }},
    {"DGELU_BGRAD, fp32", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD, blas_types(x, CUDA_R_32F, CUDA_R_32F); }},
    {"BGRADA", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_BGRADA; }},
    {"BGRADB", "[H]", true, [](blas_product *x) { x->epilogue = CUBLASLT_EPILOGUE_BGRADB; }},
    {"BGRADA, B transposed, to fp32 with beta 1", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BGRADA, x->trans[1] = CUBLAS_OP_T, x->beta = 1, blas_types(x, CUDA_R_16BF, CUDA_R_32F); }},
    {"BGRADB, B transposed, to fp32 with beta 1", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BGRADB, x->trans[1] = CUBLAS_OP_T, x->beta = 1, blas_types(x, CUDA_R_16BF, CUDA_R_32F); }},
    {"BGRADB, B transposed, fp32", "[H]", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BGRADB, x->trans[1] = CUBLAS_OP_T, blas_types(x, CUDA_R_32F, CUDA_R_32F); }},
    {"GELU_AUX_BIAS with batch strides", "[H] EPILOGUE_AUX_BATCH_STRIDE", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x->batch = 2; }},
    {"BGRADB of a batch", "[H] BIAS_BATCH_STRIDE", true, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BGRADB, x->batch = 2; }},
    {"bias gradients of a batch in one place are refused", "stated nowhere", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BGRADB, x->batch = 2, x->no_strides = true; }},
    {"an epilogue of no name is refused", "[H] cublasLtEpilogue_t", false, [](blas_product *x) {
        x->epilogue = (cublasLtEpilogue_t)3; }},
    {"BIAS where D is in row order is refused", "[M] note", false, [](blas_product *x) {
        blas_rows(x), x->epilogue = CUBLASLT_EPILOGUE_BIAS; }},
    {"GELU_AUX_BIAS where D is in row order is refused", "[M] note", false, [](blas_product *x) {
        blas_rows(x), x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }},
    {"an aux ld not divisible by 8 is refused", "[H] EPILOGUE_AUX_LD", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x->aux_ld = 44; }},
    {"an aux ld below D's rows is refused", "[H] EPILOGUE_AUX_LD", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x->aux_ld = 32; }},
    {"an aux matrix without its ld is refused", "[H] EPILOGUE_AUX_POINTER", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_DGELU, x->aux_ld = 0; }},
    {"a mask's ld not divisible by 128 is refused", "[H] EPILOGUE_AUX_LD", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_RELU_AUX, x->aux_ld = 64; }},
    {"an aux stride not divisible by 8 is refused", "[H] EPILOGUE_AUX_BATCH_STRIDE", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x->batch = 2, x->aux_stride_more = 4; }},
    {"an aux type that is not D's is refused", "[H] EPILOGUE_AUX_DATA_TYPE", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x->aux_type = CUDA_R_32F; }},
    /* alignment and workspace */
    {"pointers aligned to 2 bytes, as the heuristic is told", "[H] MIN_ALIGNMENT", true, [](blas_product *x) {
        for (int i = 0; i < 4; i++) x->offset[i] = 2; }},
    {"pointers aligned to 4 bytes, fp32", "[H] MIN_ALIGNMENT", true, [](blas_product *x) {
        blas_types(x, CUDA_R_32F, CUDA_R_32F);
        for (int i = 0; i < 4; i++) x->offset[i] = 4; }},
    {"a pointer less aligned than the heuristic was told is refused", "[H] AlgoCheck: \"will fail\"", false, [](blas_product *x) {
        x->claims_256 = true, x->offset[BLAS_A] = 2; }, true},
    {"a bias aligned to 8 bytes is refused", "[MN]; stated nowhere", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->offset[BLAS_BIAS] = 8; }, true},
    {"an aux matrix aligned to 8 bytes is refused", "stated nowhere", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x->offset[BLAS_AUX] = 8; }, true},
    {"a bias set after the heuristic was asked, less aligned, is refused", "[H] BIAS_POINTER", false, [](blas_product *x) {
        x->epilogue = CUBLASLT_EPILOGUE_BIAS, x->offset[BLAS_BIAS] = 2, x->late_pointers = true; }, true},
    {"no workspace", "[H] MAX_WORKSPACE_BYTES", true, [](blas_product *x) {
        x->workspace = x->workspace_given = 0, x->null[BLAS_WORKSPACE] = true; }},
    {"algo NULL", "[M] algo", true, [](blas_product *x) { x->candidate = -1; }},
    {"a workspace aligned to 128 bytes is refused", "[M] workspace", false, [](blas_product *x) { x->offset[BLAS_WORKSPACE] = 128; }},
    {"a workspace that is too small is refused", "[H] INVALID_VALUE", false, [](blas_product *x) {
        x->k = 4096, x->short_workspace = true; }},
};
enum { BLAS_CASES = sizeof blas_cases / sizeof blas_cases[0] };

/* The GPU's compute capability. */
static inline int blas_capability() {
    cudaDeviceProp prop;
    return cudaGetDeviceProperties(&prop, 0) == cudaSuccess ? 10 * prop.major + prop.minor : 0;
}

/* Runs a case.  Returns "" if it is as the table says or does not apply to this GPU, else what was found. */
static inline std::string blas_run(cublasLtHandle_t handle, const blas_case &c) {
    blas_product x;
    blas_buffers b;
    int capability = blas_capability();
    if (capability < c.from || capability > c.to) return "";
    c.change(&x);
    if (!blas_make(x, &b)) return "no memory";
    cublasStatus_t status = blas_call_product(handle, x, &b);
    cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return std::string("the device: ") + cudaGetErrorName(error);
    if (!c.runs) return status == CUBLAS_STATUS_SUCCESS ? "it runs" : "";
    return status == CUBLAS_STATUS_SUCCESS ? blas_check(x, b) : cublasLtGetStatusName(status);
}

/* ---- Rules that are not about one product.  holds() returns "" or what was found instead. */

struct blas_fact {
    const char *rule, *source;
    std::string (*holds)(cublasLtHandle_t handle);
    bool needed;                                /* amp_cuda.cu needs this rule; else it only allows for it */
};

/* A product with its buffers, descriptors and the heuristic's results. */
struct blas_asked {
    blas_product x;
    blas_buffers b;
    blas_objects o;
    cublasLtMatmulHeuristicResult_t found[BLAS_CANDIDATES];
    int count = 0;
    blas_status s;
    blas_asked(cublasLtHandle_t handle, const blas_product &product) : x(product) {
        if (!blas_make(x, &b)) s << CUBLAS_STATUS_ALLOC_FAILED;
        blas_describe(x, b, &o, &s);
        s << cublasLtMatmulAlgoGetHeuristic(handle, o.desc, o.layout[0], o.layout[1], o.layout[2], o.layout[3], o.preference,
                                            BLAS_CANDIDATES, found, &count);
    }
    cublasStatus_t multiply(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t *algo, cudaStream_t stream) const {
        return cublasLtMatmul(handle, o.desc, &x.alpha, b.device(x, BLAS_A), o.layout[0], b.device(x, BLAS_B), o.layout[1],
                              &x.beta, b.device(x, BLAS_C), o.layout[2], b.device(x, BLAS_D), o.layout[3], algo,
                              b.device(x, BLAS_WORKSPACE), x.workspace_given, stream);
    }
    cublasStatus_t check(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result) const {
        return cublasLtMatmulAlgoCheck(handle, o.desc, o.layout[0], o.layout[1], o.layout[2], o.layout[3], algo, result);
    }
    std::vector<unsigned char> result() const {
        std::vector<unsigned char> bytes(b.host[BLAS_D].size());
        if (cudaMemcpy(bytes.data(), b.base[BLAS_D] + x.offset[BLAS_D], bytes.size(), cudaMemcpyDeviceToHost) != cudaSuccess)
            bytes.clear();
        return bytes;
    }
};

static inline std::string blas_expect(cublasStatus_t found, cublasStatus_t wanted, const char *what) {
    if (found == wanted) return "";
    return std::string(what) + ": " + cublasLtGetStatusName(found);
}

static inline std::string blas_attribute_sizes(cublasLtHandle_t) {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t layout;
    cublasLtMatmulPreferenceOpaque_t preference;
    int64_t value = 0;
    blas_status made;
    made << cublasLtMatmulDescInit(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    made << cublasLtMatrixLayoutInit(&layout, CUDA_R_32F, 8, 8, 8);
    made << cublasLtMatmulPreferenceInit(&preference);
    if (made.first != CUBLAS_STATUS_SUCCESS) return "a descriptor in the caller's memory cannot be made";
    cublasStatus_t all[] = {
        cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_TRANSA, &value, 8),
        cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &value, 4),
        cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, NULL, 8),
        cublasLtMatmulDescSetAttribute(&desc, (cublasLtMatmulDescAttributes_t)9, &value, 4),
        cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &value, 4),
        cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &value, 8),
        cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &value, 4),
        cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &value, 8),
    };
    for (cublasStatus_t status : all)
        if (status != CUBLAS_STATUS_INVALID_VALUE) return blas_expect(status, CUBLAS_STATUS_INVALID_VALUE, "set");
    return "";
}

static inline std::string blas_defaults(cublasLtHandle_t) {
    cublasLtMatmulPreferenceOpaque_t p;
    cublasLtMatmulDescOpaque_t d;
    uint64_t workspace = 1;
    uint32_t align = 0, schemes = 0, epilogue = 0;
    int32_t bias_type = 0;
    int64_t aux_ld = 1;
    int8_t fast = 1;
    blas_status s;
    s << cublasLtMatmulPreferenceInit(&p);
    s << cublasLtMatmulDescInit(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    s << cublasLtMatmulPreferenceGetAttribute(&p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, 8, NULL);
    s << cublasLtMatmulPreferenceGetAttribute(&p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align, 4, NULL);
    s << cublasLtMatmulPreferenceGetAttribute(&p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, 4, NULL);
    s << cublasLtMatmulDescGetAttribute(&d, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, 4, NULL);
    s << cublasLtMatmulDescGetAttribute(&d, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, 4, NULL);
    s << cublasLtMatmulDescGetAttribute(&d, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld, 8, NULL);
    s << cublasLtMatmulDescGetAttribute(&d, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, 1, NULL);
    bool same = fast == 0 && workspace == 0 && align == 256 && schemes == 7 && epilogue == 1 && bias_type == -1 && aux_ld == 0;
    return s.first == CUBLAS_STATUS_SUCCESS && same ? "" : "other defaults";
}

static inline std::string blas_no_count(cublasLtHandle_t handle) {
    blas_asked a(handle, blas_product());
    int count = 0;
    return blas_expect(cublasLtMatmulAlgoGetHeuristic(handle, a.o.desc, a.o.layout[0], a.o.layout[1], a.o.layout[2], a.o.layout[3],
                                                      a.o.preference, 0, a.found, &count),
                       CUBLAS_STATUS_INVALID_VALUE, "a count of 0");
}

static inline std::string blas_default_workspace(cublasLtHandle_t handle) {
    blas_product x;
    x.k = 4096, x.workspace = 0;
    blas_asked a(handle, x);
    for (int i = 0; i < a.count; i++)
        if (a.found[i].workspaceSize != 0) return "a result needs workspace";
    return a.count ? "" : "no result";
}

static inline std::string blas_check_repeats(cublasLtHandle_t handle) {
    blas_asked a(handle, blas_product());
    for (int i = 0; i < a.count; i++) {
        cublasLtMatmulHeuristicResult_t r;
        unsigned char blob[sizeof(cublasLtMatmulAlgo_t)];
        cublasLtMatmulAlgo_t restored;
        memcpy(blob, &a.found[i].algo, sizeof blob);
        memcpy(&restored, blob, sizeof blob);
        memset(&r, 0, sizeof r);
        cublasStatus_t status = a.check(handle, &restored, &r);
        if (status != CUBLAS_STATUS_SUCCESS) return blas_expect(status, CUBLAS_STATUS_SUCCESS, "AlgoCheck");
        if (r.workspaceSize != a.found[i].workspaceSize) return "another workspace than the heuristic's";
    }
    return a.count ? "" : "no result";
}

static inline std::string blas_check_refuses(cublasLtHandle_t handle) {
    blas_product x;
    blas_types(&x, CUDA_R_32F, CUDA_R_32F);
    blas_asked a(handle, blas_product()), other(handle, x);
    cublasLtMatmulHeuristicResult_t r;
    cublasLtMatmulAlgo_t nothing;
    memset(&nothing, 0, sizeof nothing);
    if (!a.count || !other.count) return "no result";
    if (a.check(handle, &other.found[0].algo, &r) == CUBLAS_STATUS_SUCCESS) return "the algorithm of other types";
    return a.check(handle, &nothing, &r) == CUBLAS_STATUS_SUCCESS ? "64 bytes of 0" : "";
}

/* Each result of the heuristic, for sizes that are no multiples of anything: with ones, every element is k. */
static inline std::string blas_ones(cublasLtHandle_t handle) {
    static const int sizes[][3] = {{40, 24, 48}, {64, 64, 1000}, {33, 17, 77}, {128, 8, 4100}, {200, 120, 515}};
    for (const int *size : sizes)
        for (int type = 0; type < 2; type++) {
            blas_product x;
            x.m = size[0], x.n = size[1], x.k = size[2], x.value = 1, x.trans[0] = CUBLAS_OP_T;
            blas_types(&x, type ? CUDA_R_32F : CUDA_R_16BF, CUDA_R_32F);
            blas_asked a(handle, x);
            for (int i = 0; i < a.count; i++) {
                if (a.multiply(handle, &a.found[i].algo, 0) != CUBLAS_STATUS_SUCCESS) return "a result of the heuristic is refused";
                std::vector<unsigned char> d = a.result();
                for (int64_t e = 0; e < (int64_t)x.m * x.n; e++)
                    if (blas_load(d.data(), CUDA_R_32F, e) != (float)x.k)
                        return "result " + std::to_string(i) + " for k = " + std::to_string(x.k) + " gives " +
                               std::to_string(blas_load(d.data(), CUDA_R_32F, e));
            }
            if (!a.count) return "no result";
        }
    return "";
}

static inline std::string blas_same_bits(cublasLtHandle_t handle) {
    blas_product x;
    x.k = 4096, x.m = 128, x.n = 64;
    blas_types(&x, CUDA_R_16BF, CUDA_R_32F);
    blas_asked a(handle, x);
    for (int i = 0; i < a.count; i++) {
        std::vector<unsigned char> d[2];
        for (std::vector<unsigned char> &result : d) {
            if (a.multiply(handle, &a.found[i].algo, 0) != CUBLAS_STATUS_SUCCESS) return "refused";
            result = a.result();
        }
        if (d[0] != d[1]) return "result " + std::to_string(i) + " of the heuristic gives other bits the second time";
    }
    return a.count ? "" : "no result";
}

static inline std::string blas_graph(cublasLtHandle_t handle) {
    blas_product x;
    x.beta = 1;
    blas_types(&x, CUDA_R_16BF, CUDA_R_32F);
    blas_asked a(handle, x), eager(handle, x);
    cudaStream_t stream = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    if (!a.count || cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return "no result";
    std::string found;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    if (a.multiply(handle, &a.found[0].algo, stream) != CUBLAS_STATUS_SUCCESS) found = "it cannot be captured";
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess || cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) found = "no graph";
    for (int i = 0; i < 2 && found.empty(); i++) {
        if (cudaGraphLaunch(exec, stream) != cudaSuccess) found = "no launch";
        if (eager.multiply(handle, &eager.found[0].algo, stream) != CUBLAS_STATUS_SUCCESS) found = "refused";
    }
    if (cudaStreamSynchronize(stream) != cudaSuccess) found = "an error of the device";
    if (found.empty() && a.result() != eager.result()) found = "other bits than eager";
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return found;
}

/* What a product makes of each number, fp32: they are A's first column, and B's first row is ones, with 0 elsewhere.  n = k = 64:
   no heuristic must serve a product of one column. */
static inline std::vector<float> blas_image(cublasLtHandle_t handle, blas_product x, const std::vector<float> &in) {
    enum { SIDE = 64 };
    size_t m = in.size();
    std::vector<float> out(m, NAN), first(m * SIDE, 0.0f), ones(SIDE * SIDE, 0.0f);
    memcpy(first.data(), in.data(), 4 * m);
    for (size_t col = 0; col < SIDE; col++) ones[col * SIDE] = 1;
    x.m = (int)m, x.n = x.k = SIDE;
    blas_types(&x, CUDA_R_32F, CUDA_R_32F);
    blas_asked a(handle, x);
    if (!a.count || cudaMemcpy(a.b.base[BLAS_A], first.data(), 4 * first.size(), cudaMemcpyHostToDevice) != cudaSuccess ||
        cudaMemcpy(a.b.base[BLAS_B], ones.data(), 4 * ones.size(), cudaMemcpyHostToDevice) != cudaSuccess ||
        a.multiply(handle, &a.found[0].algo, 0) != CUBLAS_STATUS_SUCCESS)
        return out;
    std::vector<unsigned char> d = a.result();
    if (d.size() >= 4 * m) memcpy(out.data(), d.data(), 4 * m);
    return out;
}

static inline std::string blas_gelu_form(cublasLtHandle_t handle) {
    std::vector<float> in(512);
    double from_tanh = 0, from_erf = 0;
    for (size_t i = 0; i < in.size(); i++) in[i] = -4.0f + (float)i / 64;
    blas_product x;
    x.epilogue = CUBLASLT_EPILOGUE_GELU;
    std::vector<float> out = blas_image(handle, x, in);
    for (size_t i = 0; i < in.size(); i++) {
        double v = (double)in[i], y = (double)out[i];
        from_tanh += fabs(y - blas_gelu(v));
        from_erf += fabs(y - 0.5 * v * (1 + erf(v * sqrt(0.5))));
    }
    return from_tanh < 0.25 * from_erf ? "" : from_erf < 0.25 * from_tanh ? "it is the erf form" : "it is neither form";
}

/* 1 + 2^-11 lies between two TF32 numbers, 1 + 3 2^-12 above their middle.  The conversion (cvt.rna) rounds ties away; tensor
   cores given raw fp32 may cut.  Either is off by 2^-10 at most, which is what all tests hold. */
static inline std::string blas_tf32_rounding(cublasLtHandle_t handle) {
    blas_product x;
    x.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
    std::vector<float> in = {1 + ldexpf(1, -11), 1 + 3 * ldexpf(1, -12), 1 + ldexpf(1, -12), 1}, out;
    in.resize(64, 1.0f);
    out = blas_image(handle, x, in);
    float up = 1 + ldexpf(1, -10);
    if (out[0] == up && out[1] == up && out[2] == 1) return "";
    if (out[0] == 1 && out[1] == up && out[2] == 1) return "to nearest, ties to even";
    if (out[0] == 1 && out[1] == 1 && out[2] == 1) return "";
    return out[0] == in[0] ? "not rounded" : "otherwise";
}

static inline std::string blas_relu_nan(cublasLtHandle_t handle) {
    blas_product x;
    x.epilogue = CUBLASLT_EPILOGUE_RELU;
    std::vector<float> out = blas_image(handle, x, std::vector<float>(64, NAN));
    return out[0] == 0 ? "" : out[0] != out[0] ? "it is NaN" : "it is neither 0 nor NaN";
}

static inline std::string blas_nothing_destroyed(cublasLtHandle_t) {
    blas_status s;
    s << cublasLtMatmulDescDestroy(NULL);
    s << cublasLtMatrixLayoutDestroy(NULL);
    s << cublasLtMatmulPreferenceDestroy(NULL);
    if (s.first != CUBLAS_STATUS_SUCCESS) return "a descriptor of NULL";
    return cublasLtDestroy(NULL) == CUBLAS_STATUS_SUCCESS ? "a handle of NULL is taken" : "";
}

static inline std::string blas_no_handle(cublasLtHandle_t handle) {
    blas_asked a(handle, blas_product());
    int count = 0;
    return blas_expect(cublasLtMatmulAlgoGetHeuristic(NULL, a.o.desc, a.o.layout[0], a.o.layout[1], a.o.layout[2], a.o.layout[3],
                                                      a.o.preference, 1, a.found, &count),
                       CUBLAS_STATUS_NOT_INITIALIZED, "no handle");
}

static const blas_fact blas_facts[] = {
    {"an attribute of another size, or unknown, is refused", "[H] SetAttribute, [R]", blas_attribute_sizes, true},
    {"defaults: no workspace, 256-byte alignment, all reductions, no bias type, no fast accumulation", "[H], [R]", blas_defaults, true},
    {"asking for no algorithm is refused", "[H] AlgoGetHeuristic", blas_no_count, false},
    {"without workspace no result needs any", "[H] MAX_WORKSPACE_BYTES", blas_default_workspace, true},
    {"an algorithm restored from its bytes is accepted, with the same workspace", "[H] cublasLtMatmulAlgo_t", blas_check_repeats, true},
    {"an algorithm for other types, or none, is refused", "[H] AlgoCheck", blas_check_refuses, false},
    {"each result of the heuristic sums all of k", "cuBLASLt dropped k's tail: facebookexperimental/triton#2767", blas_ones, false},
    {"an algorithm gives the same bits again", "[M]", blas_same_bits, true},
    {"a captured product repeats, with the bits of an eager one", "[M] stream", blas_graph, true},
    {"GELU is the tanh form", "[M] cublasLtEpilogue_t, note", blas_gelu_form, true},
    {"TF32 rounds ties away from zero, or cuts", "stated nowhere", blas_tf32_rounding, false},
    {"RELU of NaN is 0", "[H] max(x, 0)", blas_relu_nan, false},
    {"destroying NULL: no error for descriptors, one for a handle", "[R]", blas_nothing_destroyed, false},
    {"a call without a handle is refused", "[H] NOT_INITIALIZED", blas_no_handle, false},
};

#endif
