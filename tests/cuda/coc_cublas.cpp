/* coc_cublas.cpp - a model of cuBLASLt: it computes matrix products on the CPU in stream order, and checks the documented
 * rules.
 *
 * D = act(alpha op(A) op(B) + beta C + bias) in fp32, summed over k in an order that is fixed per algorithm, and rounded
 * once.  Calls that the documents forbid return an error.  So do calls that no document mentions (empty matrices, a C of
 * NULL), so that no code relies on them.  Features that the model lacks (complex, integer, fp4, vectors of alpha) return
 * NOT_SUPPORTED.
 *
 * With fp8 operands, D = sD act(alpha sA sB op(A) op(B) + beta sC C + bias).  With scales per block of k, each block's sum
 * is multiplied by both of its scales.
 *
 * Sources, as comments name them:
 *     [H]   the comments of cublasLt.h, cuBLAS 13.1
 *     [M]   cublasLtMatmul() in docs.nvidia.com/cuda/cublas: its text and its table of types
 *     [C]   cublasLtCreate(), cublasLtDestroy() there
 *     [N]   Narrow Precision Data Types Usage there: modes of scales, their GPUs, layouts and formulas
 *     [T]   Tensor Core Usage there: the alignment that fp8 needs
 *     [R]   the behaviour of the real library 13.1 without a GPU: sizes and defaults of attributes, NULL arguments
 *     [TE]  TransformerEngine's common/gemm/cublaslt_gemm.cu
 *     [MN]  marian-nmt's tensors/gpu/prod.cpp
 * tests/cuda/cublas_rules.h has a case for each, which `make gpu` confirms or disproves. */
#include "amp.h"
#include "cublas_v2.h"
#include "cublasLt.h"
#include "coc_internal.h"
#include <algorithm>
#include <limits.h>
#include <map>
#include <set>

struct cublasLtContext { int device; };

namespace {

/* ---- What the opaque structures hold.  `magic` tells a descriptor that was never made, or is gone. */

enum : uint32_t { LAYOUT = 0x4c41594f, DESC = 0x44455343, PREFERENCE = 0x50524546, ALGORITHM = 0x414c474f };

struct layout {
    uint32_t magic, type;
    int32_t order;
    int32_t batch;
    uint64_t rows, cols;
    int64_t ld, stride, plane;
    uint32_t batch_mode;
};
struct matmul_desc {
    uint32_t magic;
    int32_t compute, scale, pointer_mode, trans_a, trans_b, trans_c, fill;
    uint32_t epilogue;
    void *bias, *aux;
    int64_t bias_stride, aux_ld, aux_stride, alpha_stride;
    int32_t sm_count, aux_type, bias_type;
    void *scales[4], *amax_d, *aux_scale, *aux_amax;    /* of fp8 */
    int32_t modes[4];                                   /* of these scales */
    int8_t fast_accum;
};
struct preference {
    uint32_t magic, search, schemes;
    uint32_t align[4];                          /* of A, B, C, D */
    float waves;
    uint64_t workspace, implementations;
};
struct algorithm {                              /* and the problem it is for */
    uint32_t magic, version;
    int32_t id, compute, scale, trans_a, trans_b;
    uint32_t epilogue;
    uint8_t types[4], modes[2], fast_accum, none;
};
static_assert(sizeof(layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "layouts fit");
static_assert(sizeof(matmul_desc) <= sizeof(cublasLtMatmulDescOpaque_t), "descriptors fit");
static_assert(sizeof(preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "preferences fit");
static_assert(sizeof(algorithm) <= sizeof(cublasLtMatmulAlgo_t), "algorithms fit");
static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == 96, "the toolkit's size");

/* align: of the matrices in bytes, and of their leading dimensions and strides; 0: that of an element. */
struct algorithm_kind { uint32_t align, scheme; int parts, block; const char *name; };
const algorithm_kind kinds[COC_BLAS_ALGORITHMS] = {
    {16, CUBLASLT_REDUCTION_SCHEME_NONE, 1, 32, "cublasLt wide"},
    {16, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 2, 0, "cublasLt split"},
    {16, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, 2, 0, "cublasLt rounded"},
    {4, CUBLASLT_REDUCTION_SCHEME_NONE, 1, 0, "cublasLt narrow"},
    {0, CUBLASLT_REDUCTION_SCHEME_NONE, 1, 16, "cublasLt scalar"},
};
const double times[COC_BLAS_ALGORITHMS] = {10, 12, 13, 15, 30};

struct blas_state {
    std::set<cublasLtContext *> handles;
    std::map<void *, void (*)(void *)> objects; /* made by Create -> how to release them */
    std::string fail_function;
    int fail_in = 0, fail_status = 0;
    double time[COC_BLAS_ALGORITHMS], epilogue_time = 0, drift = 0, power[COC_BLAS_ALGORITHMS] = {};
    int warm = 0;                               /* products since the drift was set */
    int wrong = COC_BLAS_ALGORITHMS, least = 1;
    int cuts_tf32 = 0, lacks = -1;
    uint32_t asked_schemes = 0;
    size_t version = CUBLAS_VERSION;
    blas_state() { std::copy(times, times + COC_BLAS_ALGORITHMS, time); }
};
blas_state &state() {
    static blas_state *s = new blas_state;
    return *s;
}

enum { SYNCHRONISES = 1, NEVER_FAILS = 2 };

/* A call: coc_library_call, and the failure that a test has ordered. */
struct blas_call {
    coc_library_call call;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    blas_call(const char *function, unsigned traits) : call(function, traits & SYNCHRONISES) {
        blas_state &s = state();
        if (traits & NEVER_FAILS) return;
        if (s.fail_in > 0 && (s.fail_function.empty() || s.fail_function == function) && --s.fail_in == 0)
            status = (cublasStatus_t)s.fail_status;
    }
};
#define BLAS_CALL(traits) \
    blas_call call(__func__, traits); \
    if (call.status != CUBLAS_STATUS_SUCCESS) return call.status

template <class T> T *opened(void *object, uint32_t magic) {
    T *p = (T *)object;
    return p != nullptr && p->magic == magic ? p : nullptr;
}
layout *opened(cublasLtMatrixLayout_t p) { return opened<layout>(p, LAYOUT); }
matmul_desc *opened(cublasLtMatmulDesc_t p) { return opened<matmul_desc>(p, DESC); }

/* ---- Attributes: [H] a size that is not the attribute's own is INVALID_VALUE; sizes and defaults [R]. */

struct attribute { int id; size_t offset, size; };
#define FIELD(type, id, field) {id, offsetof(type, field), sizeof(((type *)0)->field)}

const attribute layout_attributes[] = {
    FIELD(layout, CUBLASLT_MATRIX_LAYOUT_TYPE, type), FIELD(layout, CUBLASLT_MATRIX_LAYOUT_ORDER, order),
    FIELD(layout, CUBLASLT_MATRIX_LAYOUT_ROWS, rows), FIELD(layout, CUBLASLT_MATRIX_LAYOUT_COLS, cols),
    FIELD(layout, CUBLASLT_MATRIX_LAYOUT_LD, ld), FIELD(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch),
    FIELD(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride),
    FIELD(layout, CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, plane), FIELD(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, batch_mode),
};
const attribute desc_attributes[] = {
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, compute), FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_SCALE_TYPE, scale),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, pointer_mode),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_TRANSA, trans_a), FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_TRANSB, trans_b),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_TRANSC, trans_c), FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_FILL_MODE, fill),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue), FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, bias_stride),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_ld),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, aux_stride),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_ALPHA_VECTOR_BATCH_STRIDE, alpha_stride),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sm_count),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales[0]),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales[1]),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, scales[2]),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, scales[3]),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, amax_d),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, aux_type),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER, aux_scale),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_AMAX_POINTER, aux_amax),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, modes[0]), FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, modes[1]),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_C_SCALE_MODE, modes[2]), FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_D_SCALE_MODE, modes[3]),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast_accum),
    FIELD(matmul_desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type),
};
const attribute preference_attributes[] = {
    FIELD(preference, CUBLASLT_MATMUL_PREF_SEARCH_MODE, search),
    FIELD(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace),
    FIELD(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes),
    FIELD(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align[0]),
    FIELD(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align[1]),
    FIELD(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align[2]),
    FIELD(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align[3]),
    FIELD(preference, CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, waves),
    FIELD(preference, CUBLASLT_MATMUL_PREF_IMPL_MASK, implementations),
};

template <size_t N> const attribute *find_attribute(const attribute (&list)[N], int id) {
    for (const attribute &a : list)
        if (a.id == id) return &a;
    return nullptr;
}
cublasStatus_t set_field(void *object, const attribute *a, const void *value, size_t bytes) {
    if (object == nullptr || a == nullptr || value == nullptr || bytes != a->size) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy((char *)object + a->offset, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t get_value(const void *from, size_t size, void *value, size_t bytes, size_t *written) {
    if (bytes == 0 ? written == nullptr : value == nullptr || bytes != size) return CUBLAS_STATUS_INVALID_VALUE;
    if (bytes != 0) memcpy(value, from, size);
    if (written != nullptr) *written = size;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t get_field(const void *object, const attribute *a, void *value, size_t bytes, size_t *written) {
    if (object == nullptr || a == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    return get_value((const char *)object + a->offset, a->size, value, bytes, written);
}

template <class T> void init_object(void *memory, size_t size, const T &value) {
    memset(memory, 0, size);
    memcpy(memory, &value, sizeof value);
}
/* Create: the opaque structure on the heap, counted and known to be alive. */
template <class O, class T> cublasStatus_t create_object(O **out, const T &value) {
    if (out == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    *out = new O;
    init_object(*out, sizeof **out, value);
    state().objects[*out] = [](void *p) { delete (O *)p; };
    coc_counts_now()->blas_objects++;
    return CUBLAS_STATUS_SUCCESS;
}
/* [R] Destroying NULL is no error. */
template <class O> cublasStatus_t destroy_object(O *object, const char *function) {
    if (object == nullptr) return CUBLAS_STATUS_SUCCESS;
    auto found = state().objects.find(object);
    if (found == state().objects.end()) {
        coc_fault("%s: not a descriptor that is alive", function);
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memset((void *)object, 0, sizeof *object);
    found->second(object);
    state().objects.erase(found);
    return CUBLAS_STATUS_SUCCESS;
}

layout new_layout(cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    layout l = {};
    l.magic = LAYOUT, l.type = (uint32_t)type, l.batch = 1, l.rows = rows, l.cols = cols, l.ld = ld;
    return l;
}
matmul_desc new_desc(cublasComputeType_t compute, cudaDataType scale) {
    matmul_desc d = {};
    d.magic = DESC, d.compute = compute, d.scale = scale, d.fill = CUBLAS_FILL_MODE_FULL;
    d.epilogue = CUBLASLT_EPILOGUE_DEFAULT, d.aux_type = d.bias_type = -1;
    return d;
}
preference new_preference() {
    preference p = {};
    p.magic = PREFERENCE, p.schemes = CUBLASLT_REDUCTION_SCHEME_MASK, p.implementations = ~(uint64_t)0;
    for (uint32_t &bytes : p.align) bytes = 256;        /* [H] the default, whatever the pointers are */
    return p;
}

/* ---- A product as it is asked for */

enum matrix_name { A, B, C, D };

struct problem {
    matmul_desc desc;
    layout of[4];
    int64_t m, n, k, batch;
};

bool is_fp8(uint32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
bool is_fp8(const problem &p) { return is_fp8(p.of[A].type); }
size_t type_size(uint32_t type) { return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2; }
bool has_bias(uint32_t e) { return e & CUBLASLT_EPILOGUE_BIAS; }
bool has_bias_gradient(uint32_t e) { return e & (16u | CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB); }
bool has_aux(uint32_t e) { return e & 128u; }
bool reads_aux(uint32_t e) { return has_aux(e) && e & (8u | 64u); }
bool has_mask(uint32_t e) { return has_aux(e) && e & (2u | 8u); }

bool is_epilogue(uint32_t e) {
    static const std::set<uint32_t> known = {1, 2, 4, 6, 130, 134, 136, 152, 32, 36, 160, 164, 192, 208, 256, 512};
    return known.count(e) != 0;
}

/* [M] "See the table below when using FP8 kernels": an E5M2 operand meets an E4M3 one; D in 8 bits is E4M3, or E5M2 if an
   operand is, its C fp16 or bf16; else C is like D. */
bool fp8_types_are_known(const problem &p) {
    uint32_t a = p.of[A].type, b = p.of[B].type, c = p.of[C].type, d = p.of[D].type;
    bool wide = a == CUDA_R_8F_E5M2 || b == CUDA_R_8F_E5M2, narrow = a == CUDA_R_8F_E4M3 || b == CUDA_R_8F_E4M3;
    if (!is_fp8(a) || !is_fp8(b) || !narrow || p.desc.compute != CUBLAS_COMPUTE_32F) return false;
    if (is_fp8(d)) return (c == CUDA_R_16F || c == CUDA_R_16BF) && (d == CUDA_R_8F_E4M3 || wide);
    return c == d && (d == CUDA_R_32F || d == CUDA_R_16F || d == CUDA_R_16BF);
}

/* [M] the same tables' column of bias types: that of D, for fp16 and bf16 inputs also where D is fp32; for fp8 inputs C's, and
   bf16 where that is fp32. */
uint32_t bias_type_of(const problem &p) {
    return !is_fp8(p) ? p.of[D].type : p.of[C].type == CUDA_R_32F ? (uint32_t)CUDA_R_16BF : p.of[C].type;
}

/* [M] the table of types; compute 16F and FAST_16F, FAST_16BF are not modelled. */
bool types_are_known(const problem &p) {
    uint32_t a = p.of[A].type, d = p.of[D].type;
    if (is_fp8(a) || is_fp8(p.of[B].type)) return p.desc.scale == CUDA_R_32F && fp8_types_are_known(p);
    if (p.desc.scale != CUDA_R_32F || p.of[B].type != a || p.of[C].type != d) return false;
    if (p.desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32) return a == CUDA_R_32F && d == CUDA_R_32F;
    if (p.desc.compute != CUBLAS_COMPUTE_32F && p.desc.compute != CUBLAS_COMPUTE_32F_PEDANTIC) return false;
    if (a == CUDA_R_32F) return d == CUDA_R_32F;
    return (a == CUDA_R_16F || a == CUDA_R_16BF) && (d == a || d == CUDA_R_32F);
}

/* [H] rows and columns within int32, an ld that keeps columns (rows) apart; [M] C's ld may be 0: a column repeated. */
cublasStatus_t check_layout(const layout &l, bool repeats, bool written) {
    if (l.order != CUBLASLT_ORDER_COL && l.order != CUBLASLT_ORDER_ROW) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (l.batch_mode != CUBLASLT_BATCH_MODE_STRIDED || l.plane != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (l.rows == 0 || l.cols == 0 || l.batch < 1) return CUBLAS_STATUS_INVALID_VALUE;
    if (l.rows > INT_MAX || l.cols > INT_MAX) return CUBLAS_STATUS_NOT_SUPPORTED;
    int64_t least = (int64_t)(l.order == CUBLASLT_ORDER_COL ? l.rows : l.cols);
    if (l.ld < least && !(repeats && l.ld == 0)) return CUBLAS_STATUS_INVALID_VALUE;
    if (l.stride < 0 || (written && l.batch > 1 && l.stride == 0)) return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_shapes(problem *p) {
    const layout *l = p->of;
    bool ta = p->desc.trans_a != CUBLAS_OP_N, tb = p->desc.trans_b != CUBLAS_OP_N;
    for (int i = A; i <= D; i++) {
        cublasStatus_t status = check_layout(l[i], i == C, i == D);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        if (l[i].batch != l[D].batch) return CUBLAS_STATUS_INVALID_VALUE;
    }
    p->m = (int64_t)l[D].rows, p->n = (int64_t)l[D].cols, p->batch = l[D].batch;
    p->k = (int64_t)(ta ? l[A].rows : l[A].cols);
    uint64_t a_rows = ta ? l[A].cols : l[A].rows, b_rows = tb ? l[B].cols : l[B].rows, b_cols = tb ? l[B].rows : l[B].cols;
    bool same = a_rows == l[D].rows && b_rows == (uint64_t)p->k && b_cols == l[D].cols;
    /* [M] out of place: C and D have the same type, rows, columns, batch size and order. */
    same = same && l[C].rows == l[D].rows && l[C].cols == l[D].cols && l[C].order == l[D].order;
    return same ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

/* [H] the aux matrix: ld and stride divisible by 8 (a mask's by 128), ld no less than D's rows; its type D's. */
cublasStatus_t check_aux(const problem &p) {
    const matmul_desc &d = p.desc;
    int64_t unit = has_mask(d.epilogue) ? 128 : 8;
    if (d.aux_ld % unit != 0 || d.aux_ld < p.m || d.aux_stride % unit != 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (p.batch > 1 && !reads_aux(d.epilogue) && d.aux_stride == 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (!has_mask(d.epilogue) && d.aux_type != -1 && d.aux_type != (int32_t)p.of[D].type) return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_epilogue(const problem &p) {
    const matmul_desc &d = p.desc;
    if (!is_epilogue(d.epilogue)) return CUBLAS_STATUS_INVALID_VALUE;
    /* [M] note: ReLU, dReLU, GELU, dGELU and bias epilogues are not supported when D is in row order; the newest manual says
       so of those that combine an activation with a bias. */
    if (d.epilogue != CUBLASLT_EPILOGUE_DEFAULT && p.of[D].order == CUBLASLT_ORDER_ROW) return CUBLAS_STATUS_NOT_SUPPORTED;
    if ((has_bias(d.epilogue) || has_bias_gradient(d.epilogue)) && d.bias_type != -1 && d.bias_type != (int32_t)bias_type_of(p))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (has_bias_gradient(d.epilogue) && p.batch > 1 && d.bias_stride == 0) return CUBLAS_STATUS_INVALID_VALUE;
    return has_aux(d.epilogue) ? check_aux(p) : CUBLAS_STATUS_SUCCESS;
}

/* ---- fp8 */

bool is_128_mode(int32_t mode) {
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}
/* Elements along k that share a scale; 0: all of them. */
int64_t block_of(int32_t mode) { return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 ? 32 : is_128_mode(mode) ? 128 : 0; }

/* [N] "Scaling Mode Support Overview": the GPUs of each mode.  The releases: the toolkit's notes for 12.8 and 12.9. */
bool mode_is_supported(int32_t mode) {
    int cc = coc_capability();
    size_t version = state().version;
    switch (mode) {
        case CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F: return cc >= 89;
        case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0: return cc >= 100 && version >= 120800;
        case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F:
        case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F:
        case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F: return cc == 90 && version >= 120900;
        default: return false;
    }
}

/* [N] both operands have vectors of 32, outer vectors, or blocks of 128, of which one at most is a square; C and D stay as
   they are.  Squares and vectors of 128: M and N multiples of 4.  Scales of blocks begin at multiples of 16 bytes.  That they
   must be given, and that there is one item: stated nowhere. */
cublasStatus_t check_modes(const problem &p) {
    const matmul_desc &d = p.desc;
    int32_t a = d.modes[A], b = d.modes[B];
    bool squares = a == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F && b == a;
    if (!mode_is_supported(a) || !mode_is_supported(b) || d.modes[C] != 0 || d.modes[D] != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (a != b && !(is_128_mode(a) && is_128_mode(b))) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (a == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return CUBLAS_STATUS_SUCCESS;
    /* [M] note 8: no fp8 D with vectors and blocks of fp32 scales; with MX the model has none. */
    if (squares || is_fp8(p.of[D].type) || p.batch != 1) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_128_mode(a) && (p.m % 4 != 0 || p.n % 4 != 0)) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (int i : {(int)A, (int)B})
        if (d.scales[i] == nullptr || (block_of(a) && (uintptr_t)d.scales[i] % 16 != 0)) return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

/* [M] "To use tensor- or block-scaled FP8 kernels". */
cublasStatus_t check_fp8(const problem &p) {
    const matmul_desc &d = p.desc;
    int cc = coc_capability();
    bool tn = d.trans_a != CUBLAS_OP_N && d.trans_b == CUBLAS_OP_N, plain = d.epilogue == CUBLASLT_EPILOGUE_DEFAULT;
    /* [N] "Scales are only applicable to narrow precisions matmuls ... tensors", and to C in any precision.  [H] so is the
       maximum of D, "set for an unsupported matrix data ... combination"; those of an aux matrix the model has not. */
    if (!is_fp8(p)) {
        for (int i = A; i <= D; i++)
            if (d.scales[i] != nullptr || d.modes[i] != 0) return CUBLAS_STATUS_INVALID_VALUE;
        return d.amax_d || d.aux_scale || d.aux_amax ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
    }
    if (d.aux_scale || d.aux_amax) return CUBLAS_STATUS_INVALID_VALUE;
    if (!is_fp8(p.of[D].type) && (d.scales[D] != nullptr || d.amax_d != nullptr)) return CUBLAS_STATUS_INVALID_VALUE;
    if (!tn && (cc < 100 || cc >= 120)) return CUBLAS_STATUS_NOT_SUPPORTED;
    /* Stated nowhere: rows in order, sums and aux matrices; the toolkit's notes for 12.9, of blocks: "limited support for
       fused epilogues". */
    for (const layout &l : p.of)
        if (l.order != CUBLASLT_ORDER_COL) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (has_aux(d.epilogue) || has_bias_gradient(d.epilogue) || (is_128_mode(d.modes[A]) && !plain)) return CUBLAS_STATUS_NOT_SUPPORTED;
    return check_modes(p);
}

bool is_operation(int32_t op) { return op == CUBLAS_OP_N || op == CUBLAS_OP_T || op == CUBLAS_OP_C; }

/* Everything but pointers and alignments. */
cublasStatus_t make_problem(cublasLtMatmulDesc_t desc, const cublasLtMatrixLayout_t layouts[4], problem *p) {
    const matmul_desc *d = opened(desc);
    if (d == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    p->desc = *d;
    for (int i = A; i <= D; i++) {
        /* [M] "If Cdesc is omitted, this function assumes it to be equal to Ddesc." */
        const layout *l = opened(layouts[i == C && layouts[C] == nullptr ? D : i]);
        if (l == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
        p->of[i] = *l;
    }
    if (!is_operation(d->trans_a) || !is_operation(d->trans_b)) return CUBLAS_STATUS_INVALID_VALUE;
    /* [H] "Currently only CUBLAS_OP_N is supported." */
    if (d->trans_c != CUBLAS_OP_N || d->fill != CUBLAS_FILL_MODE_FULL) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (d->pointer_mode != CUBLASLT_POINTER_MODE_HOST && d->pointer_mode != CUBLASLT_POINTER_MODE_DEVICE)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!types_are_known(*p)) return CUBLAS_STATUS_NOT_SUPPORTED;
    cublasStatus_t status = check_shapes(p);
    if (status == CUBLAS_STATUS_SUCCESS) status = check_fp8(*p);
    return status == CUBLAS_STATUS_SUCCESS ? check_epilogue(*p) : status;
}

/* ---- Algorithms */

uint32_t align_of(const problem &p, int id, int matrix) {
    return std::max(kinds[id].align, (uint32_t)type_size(p.of[matrix].type));
}

/* [T] fp8 needs 16 bytes of what is contiguous in op(A), op(B) and C, too.  Blocks with scales are summed in one piece. */
bool serves_fp8(const problem &p, int id) {
    size_t of_a = (size_t)(p.desc.trans_a == CUBLAS_OP_N ? p.m : p.k), of_b = (size_t)(p.desc.trans_b == CUBLAS_OP_N ? p.k : p.n);
    size_t of_c = (size_t)p.m * type_size(p.of[C].type), of_d = (size_t)p.m * type_size(p.of[D].type);
    if (kinds[id].align != 16 || (kinds[id].parts != 1 && block_of(p.desc.modes[A]))) return false;
    return (of_a | of_b | of_c | of_d) % 16 == 0;
}

/* [H] an algorithm's alignment is required of the pointer, the leading dimension and the strides. */
bool layouts_are_aligned(const problem &p, int id) {
    if (is_fp8(p) && !serves_fp8(p, id)) return false;
    for (int i = A; i <= D; i++) {
        size_t size = type_size(p.of[i].type), align = align_of(p, id, i);
        if ((size_t)p.of[i].ld * size % align != 0) return false;
        if (p.batch > 1 && (size_t)p.of[i].stride * size % align != 0) return false;
    }
    return true;
}

/* [MN] the bias must be 16-byte aligned on sm_80; taken for the aux matrix too. */
bool epilogue_is_aligned(const problem &p) {
    const matmul_desc &d = p.desc;
    uintptr_t bits = 0;
    if (has_bias(d.epilogue) || has_bias_gradient(d.epilogue)) bits |= (uintptr_t)d.bias;
    if (has_aux(d.epilogue)) bits |= (uintptr_t)d.aux;
    return bits % 16 == 0;
}

size_t workspace_of(const problem &p, int id) {
    const algorithm_kind &kind = kinds[id];
    if (kind.parts == 1) return 0;
    size_t size = kind.scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE ? type_size(p.of[D].type) : 4;
    return (size_t)kind.parts * (size_t)p.m * (size_t)p.n * (size_t)p.batch * size;
}

algorithm algorithm_for(const problem &p, int id) {
    algorithm a = {};
    a.magic = ALGORITHM, a.version = (uint32_t)state().version, a.id = id;
    a.compute = p.desc.compute, a.scale = p.desc.scale, a.trans_a = p.desc.trans_a, a.trans_b = p.desc.trans_b;
    a.epilogue = p.desc.epilogue;
    for (int i = A; i <= D; i++) a.types[i] = (uint8_t)p.of[i].type;
    for (int i : {(int)A, (int)B}) a.modes[i] = (uint8_t)p.desc.modes[i];
    a.fast_accum = (uint8_t)p.desc.fast_accum;
    return a;
}

/* [H] AlgoCheck: INVALID_VALUE if layouts or operation do not match the algorithm. */
cublasStatus_t check_algorithm(const problem &p, const cublasLtMatmulAlgo_t *algo, int *id) {
    const algorithm *a = opened<algorithm>((void *)algo, ALGORITHM);
    if (a == nullptr || a->id < 0 || a->id >= COC_BLAS_ALGORITHMS) return CUBLAS_STATUS_INVALID_VALUE;
    algorithm own = algorithm_for(p, a->id);
    if (memcmp(a, &own, sizeof own) != 0 || !layouts_are_aligned(p, a->id)) return CUBLAS_STATUS_INVALID_VALUE;
    *id = a->id;
    return CUBLAS_STATUS_SUCCESS;
}

cublasLtMatmulHeuristicResult_t result_for(const problem &p, int id) {
    cublasLtMatmulHeuristicResult_t r;
    memset(&r, 0, sizeof r);
    init_object(&r.algo, sizeof r.algo, algorithm_for(p, id));
    r.workspaceSize = workspace_of(p, id);
    r.state = CUBLAS_STATUS_SUCCESS;
    r.wavesCount = 1;
    return r;
}

/* What the preference leaves, in the order of their estimated times. */
bool is_preferred(const problem &p, const preference &want, int id) {
    for (int i = A; i <= D; i++)
        if (want.align[i] % align_of(p, id, i) != 0) return false;
    if (kinds[id].scheme != CUBLASLT_REDUCTION_SCHEME_NONE && !(want.schemes & kinds[id].scheme)) return false;
    return workspace_of(p, id) <= want.workspace && layouts_are_aligned(p, id);
}

/* ---- The product */

typedef float vec4 __attribute__((vector_size(16)));

float load(const void *data, uint32_t type, int64_t i) {
    if (type == CUDA_R_32F) return ((const float *)data)[i];
    if (type == CUDA_R_8F_E4M3) return amp_f32_from_e4m3(((const uint8_t *)data)[i]);
    if (type == CUDA_R_8F_E5M2) return amp_f32_from_e5m2(((const uint8_t *)data)[i]);
    uint16_t bits = ((const uint16_t *)data)[i];
    return type == CUDA_R_16F ? amp_f32_from_f16(bits) : amp_f32_from_bf16(bits);
}
void store(void *data, uint32_t type, int64_t i, float x) {
    if (type == CUDA_R_32F) ((float *)data)[i] = x;
    else if (is_fp8(type)) ((uint8_t *)data)[i] = type == CUDA_R_8F_E4M3 ? amp_e4m3_from_f32(x, 1) : amp_e5m2_from_f32(x, 1);
    else ((uint16_t *)data)[i] = type == CUDA_R_16F ? amp_f16_from_f32(x, 0) : amp_bf16_from_f32(x, 0);
}
float rounded(float x, uint32_t type) {
    float place;
    store(&place, type, 0, x);
    return load(&place, type, 0);
}

int64_t element(const layout &l, int64_t i, int64_t j) { return l.order == CUBLASLT_ORDER_COL ? j * l.ld + i : i * l.ld + j; }
size_t bytes_of(const layout &l) {
    int64_t last = element(l, (int64_t)l.rows - 1, (int64_t)l.cols - 1) + (l.batch - 1) * l.stride;
    return ((size_t)last + 1) * type_size(l.type);
}

struct execution {
    problem p;
    const void *a, *b, *c;
    void *d, *workspace;
    const float *alpha_at, *beta_at;            /* device pointer mode */
    float alpha, beta;
    int id, device;
    bool wrong;
};

/* ---- Scales of fp8: [N] "1D Block Scaling Factors Layout" and "Scaling factors layouts".  i: of op(A)'s rows or op(B)'s
   columns, of which there are `outer`; block: along k. */

int64_t scale_at(const problem &p, matrix_name which, int64_t i, int64_t block) {
    int64_t outer = which == A ? p.m : p.n, blocks = (p.k + 127) / 128, padded = (blocks + 3) / 4 * 4;
    switch (p.desc.modes[which]) {
        case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: return i;
        case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F: return block * outer + i;
        case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F: return i / 128 * padded + block;
        case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0:  /* tiles of 128 x 4 bytes, one for 128 x 128 elements */
            return (i / 128 * blocks + block / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + block % 4;
        default: return 0;
    }
}
float scale_of(const problem &p, matrix_name which, int64_t i, int64_t block) {
    const void *scales = p.desc.scales[which];
    int64_t at = scale_at(p, which, i, block);
    if (scales == nullptr) return 1;
    if (p.desc.modes[which] != CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0) return ((const float *)scales)[at];
    int e = ((const uint8_t *)scales)[at];              /* 2^(e - 127); 255 is NaN */
    return e == 255 ? NAN : ldexpf(1, e - 127);
}
size_t scale_bytes(const problem &p, matrix_name which) {
    int64_t outer = which == A ? p.m : p.n;
    bool bytes = p.desc.modes[which] == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    if (bytes) return (size_t)((outer + 127) / 128 * ((p.k + 127) / 128) * 512);        /* whole tiles */
    return ((size_t)scale_at(p, which, outer - 1, (p.k - 1) / 128) + 1) * 4;
}

enum { LANES = 8, COLUMNS = 4 };

/* op(A) as [m / LANES][k][LANES], op(B) as [n / COLUMNS][k][COLUMNS], fp32, zeros beyond; TF32 operands rounded to nearest,
   ties away from zero, or, as tensor cores given raw fp32 may, cut: how is stated nowhere. */
void pack(const execution &e, matrix_name which, int64_t item, std::vector<float> *out) {
    const problem &p = e.p;
    const layout &l = p.of[which];
    bool outer_rows = which == A ? p.desc.trans_a == CUBLAS_OP_N : p.desc.trans_b != CUBLAS_OP_N;
    int64_t outer = which == A ? p.m : p.n, width = which == A ? LANES : COLUMNS, groups = (outer + width - 1) / width;
    const char *data = (const char *)(which == A ? e.a : e.b) + (size_t)(item * l.stride) * type_size(l.type);
    bool tf32 = p.desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32, cut = state().cuts_tf32 != 0;
    auto narrow = [cut](float v) { return cut ? ampi_f32_of_bits(ampi_bits_f32(v) & 0xffffe000u) : amp_tf32_from_f32(v, 0); };
    out->assign((size_t)(groups * p.k * width), 0.0f);
#pragma omp parallel for if (outer * p.k > 1 << 15)
    for (int64_t g = 0; g < groups; g++)
        for (int64_t x = g * width; x < std::min(outer, (g + 1) * width); x++)
            for (int64_t q = 0; q < p.k; q++) {
                float v = load(data, l.type, outer_rows ? element(l, x, q) : element(l, q, x));
                (*out)[(size_t)((g * p.k + q) * width + x % width)] = tf32 ? narrow(v) : v;
            }
}

/* sum[j] += over [from, to) of a tile of LANES rows and COLUMNS columns: one product and one sum at a time, in order. */
void tile(const float *a, const float *b, int64_t from, int64_t to, vec4 sum[COLUMNS][2]) {
    for (int64_t q = from; q < to; q++) {
        vec4 low, high;
        memcpy(&low, a + q * LANES, sizeof low);
        memcpy(&high, a + q * LANES + 4, sizeof high);
        for (int j = 0; j < COLUMNS; j++) {
            float x = b[q * COLUMNS + j];
            sum[j][0] += low * x;
            sum[j][1] += high * x;
        }
    }
}

/* [H] FAST_ACCUM: "intermediate results will not periodically be promoted to a higher precision"; on Hopper they keep about 14
   bits (DeepSeek-V3 technical report, 3.3.2), and [TE] names it for 8.9 and 9.0 alone.  The model cuts after every 32 of k. */
bool is_fast(const problem &p) { return is_fp8(p) && p.desc.fast_accum && !block_of(p.desc.modes[A]) && coc_capability() < 100; }
float with_14_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0xfffffc00u;
    memcpy(&x, &bits, 4);
    return x;
}

/* The sums over k as the algorithm makes them: parts (or blocks), each from 0, added up in order.  (row, column): the tile's;
   blocks with scales are multiplied by both of them. */
void sum_tile(const execution &e, const float *a, const float *b, int64_t row, int64_t column, float out[COLUMNS][LANES]) {
    const problem &p = e.p;
    const int64_t scaled = block_of(p.desc.modes[A]);
    const algorithm_kind &kind = kinds[e.id];
    int64_t k = e.wrong ? e.p.k / 32 * 32 : e.p.k;
    const bool fast = is_fast(p);
    int64_t step = fast ? 32 : scaled ? scaled : kind.parts > 1 ? (k + kind.parts - 1) / kind.parts : kind.block ? kind.block : k;
    vec4 total[COLUMNS][2] = {};
    for (int64_t from = 0; from < k; from += step) {
        vec4 sum[COLUMNS][2] = {};
        tile(a, b, from, std::min(k, from + step), sum);
        for (int j = 0; j < COLUMNS; j++)
            for (int i = 0; i < LANES; i++) {
                float part = sum[j][i / 4][i % 4];
                if (kind.scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE) part = rounded(part, p.of[D].type);
                if (scaled && row + i < p.m && column + j < p.n)
                    part *= scale_of(p, A, row + i, from / step) * scale_of(p, B, column + j, from / step);
                part += total[j][i / 4][i % 4];
                total[j][i / 4][i % 4] = fast ? with_14_bits(part) : part;
            }
    }
    for (int j = 0; j < COLUMNS; j++)
        for (int i = 0; i < LANES; i++) out[j][i] = total[j][i / 4][i % 4];
}

/* The tanh form, as GPT-2's: x sigmoid(2 u), 2 u = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
float gelu(float x) { return (float)((double)x / (1 + exp(-1.5957691216057308 * ((double)x + 0.044715 * pow((double)x, 3))))); }
float gelu_slope(float v) {
    double x = (double)v, s = 1 / (1 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
    return (float)(s + x * s * (1 - s) * 1.5957691216057308 * (1 + 3 * 0.044715 * x * x));
}
/* What is left of an infinity: the slope's limits are 0 and 1. */
float gelu_backward(float x) { return fabsf(x) < 20 ? gelu_slope(x) : x > 0 ? 1.0f : x < 0 ? 0.0f : x; }
float gelu_forward(float x) { return fabsf(x) < 20 ? gelu(x) : x > 0 ? x : x < 0 ? -0.0f : x; }

bool mask_bit(const void *mask, int64_t bit) { return ((const unsigned char *)mask)[bit / 8] >> (bit % 8) & 1; }
void set_mask_bit(void *mask, int64_t bit, bool on) {
    unsigned char *byte = (unsigned char *)mask + bit / 8, one = (unsigned char)(1u << (bit % 8));
    *byte = (unsigned char)(on ? *byte | one : *byte & ~one);
}

/* x = alpha AB + beta C of row i and column j -> D's value before rounding; writes the aux matrix. */
float epilogue(const execution &e, int64_t item, int64_t i, int64_t j, float x) {
    const matmul_desc &d = e.p.desc;
    uint32_t type = e.p.of[D].type, kind = d.epilogue;
    int64_t at = item * d.aux_stride + j * d.aux_ld + i;
    if (has_bias(kind)) x += load(d.bias, bias_type_of(e.p), item * d.bias_stride + i);
    if (kind & CUBLASLT_EPILOGUE_RELU) {
        if (has_aux(kind)) set_mask_bit(d.aux, at, x > 0);
        return fmaxf(x, 0.0f);                  /* [H] max(x, 0): NaN is 0 in CUDA's */
    }
    if (kind & CUBLASLT_EPILOGUE_GELU) {
        if (has_aux(kind)) store(d.aux, type, at, x);
        return gelu_forward(x);
    }
    if (reads_aux(kind)) return has_mask(kind) ? (mask_bit(d.aux, at) ? x : 0.0f) : x * gelu_backward(load(d.aux, type, at));
    return x;
}

/* D's columns [first, first + COLUMNS) of one item from their sums over k, which become what D is rounded from. */
void finish_columns(const execution &e, int64_t item, int64_t first, float *sums) {
    const problem &p = e.p;
    const layout &lc = p.of[C], &ld = p.of[D];
    const char *c = (const char *)e.c + (size_t)(item * lc.stride) * type_size(lc.type);
    char *d = (char *)e.d + (size_t)(item * ld.stride) * type_size(ld.type);
    const bool blocks = block_of(p.desc.modes[A]) != 0;
    float of_c = p.desc.scales[C] ? *(const float *)p.desc.scales[C] : 1, of_d = p.desc.scales[D] ? *(const float *)p.desc.scales[D] : 1;
    for (int64_t j = first; j < std::min(p.n, first + COLUMNS); j++)
        for (int64_t i = 0; i < p.m; i++) {
            float *x = &sums[(j - first) * p.m + i];
            *x *= is_fp8(p) && !blocks ? e.alpha * (scale_of(p, A, i, 0) * scale_of(p, B, j, 0)) : e.alpha;
            if (e.beta != 0) *x += e.beta * of_c * load(c, lc.type, element(lc, i, j));
            *x = epilogue(e, item, i, j, *x);
            store(d, ld.type, element(ld, i, j), of_d * *x);
        }
}

/* Sums over D's columns before their rounding, or over k of op(A)'s rows or op(B)'s columns; overwrites. */
void bias_gradient(const execution &e, int64_t item, const std::vector<float> &before) {
    const problem &p = e.p;
    const matmul_desc &d = p.desc;
    bool of_a = d.epilogue == CUBLASLT_EPILOGUE_BGRADA, of_b = d.epilogue == CUBLASLT_EPILOGUE_BGRADB;
    const layout &l = p.of[of_a ? A : B];
    bool transposed = of_a ? d.trans_a != CUBLAS_OP_N : d.trans_b == CUBLAS_OP_N;
    int64_t length = of_b ? p.n : p.m, over = of_a || of_b ? p.k : p.n;
    for (int64_t i = 0; i < length; i++) {
        float sum = 0;
        for (int64_t q = 0; q < over; q++)
            sum += !of_a && !of_b ? before[(size_t)(q * p.m + i)]
                   : load(of_a ? e.a : e.b, l.type, item * l.stride + (transposed ? element(l, q, i) : element(l, i, q)));
        store(d.bias, p.of[D].type, item * d.bias_stride + i, sum);
    }
}

void multiply(const execution &e) {
    const problem &p = e.p;
    int64_t columns = (p.n + COLUMNS - 1) / COLUMNS * COLUMNS;
    std::vector<float> a, b, sums((size_t)(p.m * columns));
    for (int64_t item = 0; item < p.batch; item++) {
        pack(e, A, item, &a);
        pack(e, B, item, &b);
#pragma omp parallel for schedule(dynamic) if (p.m * p.n * p.k > 1 << 18)
        for (int64_t j = 0; j < columns; j += COLUMNS) {
            for (int64_t i = 0; i < p.m; i += LANES) {
                float out[COLUMNS][LANES];
                sum_tile(e, &a[(size_t)(i * p.k)], &b[(size_t)(j * p.k)], i, j, out);
                for (int64_t y = 0; y < COLUMNS; y++)
                    for (int64_t x = i; x < std::min(p.m, i + LANES); x++) sums[(size_t)((j + y) * p.m + x)] = out[y][x - i];
            }
            finish_columns(e, item, j, &sums[(size_t)(j * p.m)]);
        }
        if (has_bias_gradient(p.desc.epilogue)) bias_gradient(e, item, sums);
        if (p.desc.amax_d == nullptr) continue;
        float most = item == 0 ? 0 : *(float *)p.desc.amax_d;
        for (int64_t i = 0; i < p.m * p.n; i++) most = fmaxf(most, fabsf(sums[(size_t)i]));
        *(float *)p.desc.amax_d = most;
    }
}

/* ---- Memory that a product touches */

struct range { const char *name; const void *data; size_t bytes; };

std::vector<range> ranges_of(const execution &e) {
    const problem &p = e.p;
    const matmul_desc &d = p.desc;
    size_t size = type_size(p.of[D].type);
    bool reads_c = d.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE || e.beta != 0;
    std::vector<range> all = {{"A", e.a, bytes_of(p.of[A])}, {"B", e.b, bytes_of(p.of[B])}, {"D", e.d, bytes_of(p.of[D])}};
    if (reads_c) all.push_back({"C", e.c, bytes_of(p.of[C])});
    if (e.alpha_at) all.push_back({"alpha", e.alpha_at, 4}), all.push_back({"beta", e.beta_at, 4});
    if (has_bias(d.epilogue) || has_bias_gradient(d.epilogue)) {
        int64_t length = d.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p.n : p.m;
        all.push_back({"the bias", d.bias, (size_t)(length + (p.batch - 1) * d.bias_stride) * type_size(bias_type_of(p))});
    }
    if (has_aux(d.epilogue)) {
        size_t elements = (size_t)((p.batch - 1) * d.aux_stride + (p.n - 1) * d.aux_ld + p.m);
        all.push_back({"the aux matrix", d.aux, has_mask(d.epilogue) ? (elements + 7) / 8 : elements * size});
    }
    for (int i = A; i <= D; i++)
        if (d.scales[i]) all.push_back({"a scale", d.scales[i], i <= B ? scale_bytes(p, (matrix_name)i) : 4});
    if (d.amax_d) all.push_back({"the maximum", d.amax_d, 4});
    if (size_t bytes = workspace_of(p, e.id)) all.push_back({"the workspace", e.workspace, bytes});
    return all;
}

bool memory_is_usable(const execution &e, const char *when) {
    for (const range &r : ranges_of(e))
        if (!coc_usable(r.data, r.bytes, e.device)) {
            coc_fault("cublasLtMatmul, %s: %zu bytes of %s are not in memory of device %d: %s", when, r.bytes, r.name, e.device,
                      coc_describe(r.data).c_str());
            return false;
        }
    return true;
}

/* Products are written while others are read: D apart from everything, C where it is not D. */
bool overlaps(const range &x, const range &y) {
    const char *a = (const char *)x.data, *b = (const char *)y.data;
    return a < b + y.bytes && b < a + x.bytes;
}
bool outputs_are_apart(const execution &e) {
    std::vector<range> all = ranges_of(e);
    const range *d = nullptr;
    for (const range &r : all)
        if (!strcmp(r.name, "D")) d = &r;
    for (const range &r : all)
        if (&r != d && !(!strcmp(r.name, "C") && e.c == e.d) && overlaps(*d, r)) {
            coc_fault("cublasLtMatmul: D overlaps %s", r.name);
            return false;
        }
    return true;
}

/* Whether A has many values, as the numbers of a training have. */
bool draws_power(const execution &e) {
    std::set<float> values;
    for (int64_t i = 0; i < std::min<int64_t>(e.p.of[A].cols, 64); i++) values.insert(load(e.a, e.p.of[A].type, i * e.p.of[A].ld));
    return values.size() > 5;
}
double seconds_of(const execution &e) {
    blas_state &s = state();
    double time = s.time[e.id] + (e.p.desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT ? s.epilogue_time : 0);
    if (s.power[e.id] > 0 && draws_power(e)) time += s.power[e.id];
    return 1e-6 * time * (1 + s.drift * s.warm++);
}

cudaError_t execute(execution e) {
    coc_expose(e.device);
    if (!memory_is_usable(e, "when it runs")) return cudaErrorIllegalAddress;
    if (e.alpha_at) e.alpha = *e.alpha_at, e.beta = *e.beta_at;
    multiply(e);
    if (e.workspace) memset(e.workspace, 0xFF, workspace_of(e.p, e.id));
    coc_pass_time(seconds_of(e));
    return cudaSuccess;
}

/* ---- Pointers, as the call gives them */

cublasStatus_t check_pointers(const execution &e, size_t workspace_bytes) {
    const problem &p = e.p;
    const matmul_desc &d = p.desc;
    const void *pointers[4] = {e.a, e.b, e.c, e.d};
    for (int i = A; i <= D; i++)                /* [H] AlgoCheck: "will fail if e.g. buffers are not correctly aligned" */
        if (pointers[i] == nullptr || (uintptr_t)pointers[i] % align_of(p, e.id, i) != 0) return CUBLAS_STATUS_INVALID_VALUE;
    /* [M] in place: C == D and Cdesc == Ddesc */
    if (e.c == e.d && (p.of[C].ld != p.of[D].ld || p.of[C].stride != p.of[D].stride)) return CUBLAS_STATUS_INVALID_VALUE;
    if ((has_bias(d.epilogue) || has_bias_gradient(d.epilogue)) && d.bias == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (has_aux(d.epilogue) && d.aux == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (!epilogue_is_aligned(p)) return CUBLAS_STATUS_INVALID_VALUE;
    /* [H] INVALID_VALUE "when workspaceSizeInBytes is less than workspace required"; [M] 256-byte aligned. */
    size_t needed = workspace_of(p, e.id);
    if ((uintptr_t)e.workspace % 256 != 0 || workspace_bytes < needed) return CUBLAS_STATUS_INVALID_VALUE;
    return needed != 0 && e.workspace == nullptr ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}

/* [C] a context is tied to the device that was current, which must be current at each call (a note on cublasLtHandle_t, since
   12.8, drops this; the stricter is kept); a cublasHandle_t may stand for it. */
cublasStatus_t check_handle(cublasLtHandle_t handle, const char *function) {
    if (state().handles.count(handle) == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (handle->device == coc_device_now()) return CUBLAS_STATUS_SUCCESS;
    coc_fault("%s: a handle of device %d while device %d is current", function, handle->device, coc_device_now());
    return CUBLAS_STATUS_INVALID_VALUE;
}

/* [M] algo NULL: a query with default preferences; here, of what the pointers allow. */
cublasStatus_t default_algorithm(execution *e, size_t workspace_bytes) {
    coc_counts_now()->blas_heuristics++;
    for (e->id = 0; e->id < COC_BLAS_ALGORITHMS; e->id++)
        if (kinds[e->id].parts == 1 && layouts_are_aligned(e->p, e->id) && check_pointers(*e, workspace_bytes) == CUBLAS_STATUS_SUCCESS)
            return CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t create_handle(cublasLtContext **handle) {
    if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    *handle = nullptr;
    if (coc_device_error(coc_device_now()) != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = new cublasLtContext{coc_device_now()};
    state().handles.insert(*handle);
    coc_counts_now()->blas_objects++;
    return CUBLAS_STATUS_SUCCESS;
}
/* [C] Destroy waits for the device.  [R] NULL is INVALID_VALUE. */
cublasStatus_t destroy_handle(cublasLtContext *handle) {
    if (state().handles.erase(handle) == 0) return CUBLAS_STATUS_INVALID_VALUE;
    coc_wait_for_device(handle->device);
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

/* ---- The library */

#define COC_STATUSES(X) \
    X(SUCCESS, "success") X(NOT_INITIALIZED, "the library was not initialized") \
    X(ALLOC_FAILED, "the resource allocation failed") \
    X(INVALID_VALUE, "an unsupported value or parameter was passed to the function") \
    X(ARCH_MISMATCH, "the function requires an architectural feature absent from the device") \
    X(MAPPING_ERROR, "an access to GPU memory space failed") \
    X(EXECUTION_FAILED, "the function failed to launch on the GPU") X(INTERNAL_ERROR, "an internal operation failed") \
    X(NOT_SUPPORTED, "the requested functionality is not supported") X(LICENSE_ERROR, "the license check failed")
#define STATUS_NAME(name, text) case CUBLAS_STATUS_##name: return "CUBLAS_STATUS_" #name;
#define STATUS_TEXT(name, text) case CUBLAS_STATUS_##name: return text;

extern "C" {

const char *cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) { COC_STATUSES(STATUS_NAME) default: return "unrecognized status"; }
}
const char *cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) { COC_STATUSES(STATUS_TEXT) default: return "unrecognized status"; }
}
size_t cublasLtGetVersion(void) { return state().version; }
size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    BLAS_CALL(0);
    return create_handle(handle);
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    BLAS_CALL(SYNCHRONISES | NEVER_FAILS);
    return destroy_handle(handle);
}
cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    BLAS_CALL(0);
    return create_handle((cublasLtContext **)handle);
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    BLAS_CALL(SYNCHRONISES | NEVER_FAILS);
    return destroy_handle((cublasLtContext *)handle);
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t l, size_t size, cudaDataType type, uint64_t rows,
                                                 uint64_t cols, int64_t ld) {
    BLAS_CALL(0);
    if (l == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (size < sizeof *l) return CUBLAS_STATUS_ALLOC_FAILED;
    init_object(l, sizeof *l, new_layout(type, rows, cols, ld));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
    BLAS_CALL(0);
    return create_object(l, new_layout(type, rows, cols, ld));
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    BLAS_CALL(NEVER_FAILS);
    return destroy_object(l, __func__);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t id,
                                                const void *value, size_t bytes) {
    BLAS_CALL(0);
    return set_field(opened(l), find_attribute(layout_attributes, id), value, bytes);
}
cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t id, void *value,
                                                size_t bytes, size_t *written) {
    BLAS_CALL(0);
    return get_field(opened(l), find_attribute(layout_attributes, id), value, bytes, written);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t d, size_t size, cublasComputeType_t compute,
                                               cudaDataType scale) {
    BLAS_CALL(0);
    if (d == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (size < sizeof *d) return CUBLAS_STATUS_ALLOC_FAILED;
    init_object(d, sizeof *d, new_desc(compute, scale));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute, cudaDataType scale) {
    BLAS_CALL(0);
    return create_object(d, new_desc(compute, scale));
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    BLAS_CALL(NEVER_FAILS);
    return destroy_object(d, __func__);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t id, const void *value,
                                              size_t bytes) {
    BLAS_CALL(0);
    return set_field(opened(d), find_attribute(desc_attributes, id), value, bytes);
}
cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t id, void *value,
                                              size_t bytes, size_t *written) {
    BLAS_CALL(0);
    return get_field(opened(d), find_attribute(desc_attributes, id), value, bytes, written);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t p, size_t size) {
    BLAS_CALL(0);
    if (p == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (size < sizeof *p) return CUBLAS_STATUS_ALLOC_FAILED;
    init_object(p, sizeof *p, new_preference());
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    BLAS_CALL(0);
    return create_object(p, new_preference());
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
    BLAS_CALL(NEVER_FAILS);
    return destroy_object(p, __func__);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t id,
                                                    const void *value, size_t bytes) {
    BLAS_CALL(0);
    return set_field(opened<preference>(p, PREFERENCE), find_attribute(preference_attributes, id), value, bytes);
}
cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t id,
                                                    void *value, size_t bytes, size_t *written) {
    BLAS_CALL(0);
    return get_field(opened<preference>(p, PREFERENCE), find_attribute(preference_attributes, id), value, bytes, written);
}

/* [H] INVALID_VALUE for a count below 1, NOT_SUPPORTED where nothing fits; the best first.  The values of the bias and aux
   pointers count for their alignment. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t want, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int *returned) {
    BLAS_CALL(0);
    coc_counts_now()->blas_heuristics++;
    const preference *wanted = opened<preference>(want, PREFERENCE);
    const cublasLtMatrixLayout_t layouts[4] = {a, b, c, d};
    problem p;
    if (returned != nullptr) *returned = 0;
    cublasStatus_t status = check_handle(handle, __func__);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (requested < 1 || results == nullptr || returned == nullptr || wanted == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (wanted->search != CUBLASLT_SEARCH_BEST_FIT) return CUBLAS_STATUS_NOT_SUPPORTED;
    if ((status = make_problem(desc, layouts, &p)) != CUBLAS_STATUS_SUCCESS) return status;
    state().asked_schemes = wanted->schemes;
    bool served = (int)p.desc.epilogue != state().lacks && std::min({p.m, p.n, p.k}) >= state().least;
    if (!epilogue_is_aligned(p) || !served) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (int id = 0; id < COC_BLAS_ALGORITHMS && *returned < requested; id++)
        if (is_preferred(p, *wanted, id)) results[(*returned)++] = result_for(p, id);
    return *returned ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result) {
    BLAS_CALL(0);
    const cublasLtMatrixLayout_t layouts[4] = {a, b, c, d};
    problem p;
    int id = 0;
    cublasStatus_t status = check_handle(handle, __func__);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (result == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if ((status = make_problem(desc, layouts, &p)) != CUBLAS_STATUS_SUCCESS) return status;
    if ((status = check_algorithm(p, algo, &id)) != CUBLAS_STATUS_SUCCESS) return status;
    cublasLtMatmulAlgo_t kept = result->algo;   /* [H] "algo field is never updated" */
    *result = result_for(p, id);
    result->algo = kept;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoCapAttributes_t id,
                                                 void *value, size_t bytes, size_t *written) {
    BLAS_CALL(0);
    const algorithm *a = opened<algorithm>((void *)algo, ALGORITHM);
    if (a == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    uint32_t found = kinds[a->id].scheme;
    int matrix = (int)id - (int)CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES;
    if (matrix >= A && matrix <= D) found = std::max(kinds[a->id].align, (uint32_t)type_size(a->types[matrix]));
    else if (id != CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK) return CUBLAS_STATUS_NOT_SUPPORTED;
    return get_value(&found, sizeof found, value, bytes, written);
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t id,
                                                    void *value, size_t bytes, size_t *written) {
    BLAS_CALL(0);
    const algorithm *a = opened<algorithm>((void *)algo, ALGORITHM);
    if (a == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    int32_t found = a->id;
    if (id == CUBLASLT_ALGO_CONFIG_SPLITK_NUM) found = kinds[a->id].parts;
    else if (id == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) found = (int32_t)kinds[a->id].scheme;
    else if (id != CUBLASLT_ALGO_CONFIG_ID) return CUBLAS_STATUS_NOT_SUPPORTED;
    return get_value(&found, sizeof found, value, bytes, written);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    BLAS_CALL(0);
    coc_counts_now()->blas_matmuls++;
    const cublasLtMatrixLayout_t layouts[4] = {a_layout, b_layout, c_layout, d_layout};
    execution e = {};
    cublasStatus_t status = check_handle(handle, __func__);
    if (status == CUBLAS_STATUS_SUCCESS && (alpha == nullptr || beta == nullptr)) status = CUBLAS_STATUS_INVALID_VALUE;
    if (status == CUBLAS_STATUS_SUCCESS) status = make_problem(desc, layouts, &e.p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    e.a = a, e.b = b, e.c = c, e.d = d, e.workspace = workspace, e.device = handle->device;
    if (e.p.desc.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) e.alpha_at = (const float *)alpha, e.beta_at = (const float *)beta;
    else e.alpha = *(const float *)alpha, e.beta = *(const float *)beta;
    if (algo == nullptr) status = default_algorithm(&e, workspace_bytes);
    else if ((status = check_algorithm(e.p, algo, &e.id)) == CUBLAS_STATUS_SUCCESS) status = check_pointers(e, workspace_bytes);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    e.wrong = e.id == state().wrong;
    if (coc_device_error(e.device) != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!memory_is_usable(e, "when it is called") || !outputs_are_apart(e)) {
        coc_lose_device(e.device, cudaErrorIllegalAddress);
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    cudaError_t error = coc_enqueue(kinds[e.id].name, stream, {workspace, workspace_of(e.p, e.id)}, [e] { return execute(e); });
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

} // extern "C"

/* ---- What tests set and ask */

void coc_fail_blas(const char *function, int n, int status) {
    coc_library_call call(__func__);
    state().fail_function = function ? function : "";
    state().fail_in = n;
    state().fail_status = status;
}
int coc_fail_blas_pending() { return state().fail_in > 0; }
void coc_set_blas_time(coc_blas_algorithm algorithm, double microseconds) { state().time[algorithm] = microseconds; }
void coc_set_blas_epilogue_time(double microseconds) { state().epilogue_time = microseconds; }
void coc_set_blas_power(coc_blas_algorithm algorithm, double microseconds) { state().power[algorithm] = microseconds; }
void coc_set_blas_drift(double share) { state().drift = share, state().warm = 0; }
void coc_set_blas_wrong(coc_blas_algorithm algorithm) { state().wrong = algorithm; }
void coc_set_blas_lacks(int epilogue) { state().lacks = epilogue; }
void coc_set_blas_cuts_tf32(int cuts) { state().cuts_tf32 = cuts; }
void coc_set_blas_least(int side) { state().least = side; }
void coc_set_blas_version(size_t version) { state().version = version; }
unsigned coc_blas_schemes() { return state().asked_schemes; }

long coc_blas_living() { return (long)(state().handles.size() + state().objects.size()); }

void coc_blas_reset() {
    for (cublasLtContext *handle : state().handles) delete handle;
    for (auto &entry : state().objects) entry.second(entry.first);
    state() = blas_state();
}
