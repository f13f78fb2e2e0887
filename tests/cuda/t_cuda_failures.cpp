/* t_cuda_failures.cpp - tests the operators of amp_cuda.cu when calls of CUDA or cuBLASLt fail, one call after another.
 * The operator must return that error and free the device memory that it took.  The next call must succeed. */
#include "test_cuda.h"
#include <cublasLt.h>

/* ---- Operators in small sizes, by way of as many of their kernels as fit in one call.  Each lambda runs once more for each
   call that fails, on the same operands. */

typedef std::function<amp_result()> work;
struct operator_case { const char *name; std::function<work(cuda_side &)> prepare; };

static amp_mat matrix(cuda_side &s, amp_dtype dtype, int64_t rows, int64_t cols, uint64_t seed) {
    return s.put_matrix(cuda_stored(cuda_random(rows * cols, seed), dtype).data(), dtype, rows, cols, cols);
}
template <class T> static T *numbers(cuda_side &s, size_t n, T value) { return s.put(std::vector<T>(n, value)); }

static work cast(cuda_side &s, amp_rounding rounding) {
    amp_k_cast k = {};
    k.src = matrix(s, AMP_F32, 3, 50, 1).data, k.src_dtype = AMP_F32;
    k.dst = s.room(300), k.dst_dtype = AMP_BF16, k.n = 150;
    k.how.rounding = rounding;
    return [&s, k] { return s.backend->cast(s.dev, &k, NULL); };
}
static work column_sum(cuda_side &s) {
    amp_k_column_sum k = {matrix(s, AMP_BF16, 600, 9, 2), s.room(36), AMP_F32, 0};
    return [&s, k] { return s.backend->column_sum(s.dev, &k, NULL); };
}
static work norm(cuda_side &s, int64_t cols) {
    amp_k_norm k = {};
    k.x = matrix(s, AMP_BF16, 5, cols, 3);
    k.dy = matrix(s, AMP_BF16, 5, cols, 4);
    k.y = matrix(s, AMP_BF16, 5, cols, 5);
    k.dx = matrix(s, AMP_BF16, 5, cols, 6);
    k.weight = numbers(s, (size_t)cols, 1.0f), k.weight_dtype = AMP_F32;
    k.mean = (float *)s.room(20), k.rstd = (float *)s.room(20);
    k.dweight = {s.room((size_t)cols * 4), AMP_F32, 0};
    k.dbias = {s.room((size_t)cols * 4), AMP_F32, 0};
    return [&s, k] {
        amp_result result = s.backend->norm(s.dev, &k, NULL);
        return result != AMP_OK ? result : s.backend->norm_backward(s.dev, &k, NULL);
    };
}
static work cross_entropy(cuda_side &s) {
    amp_k_cross_entropy k = {};
    k.logits = matrix(s, AMP_BF16, 4, 30, 7);
    k.dlogits = matrix(s, AMP_BF16, 4, 30, 8);
    k.classes = 30, k.ignore_index = -100, k.factor = 1;
    k.labels = numbers(s, 4, (int32_t)2);
    k.bad_label = numbers(s, 1, (int32_t)0);
    k.loss = (float *)s.room(4);
    return [&s, k] { return s.backend->cross_entropy(s.dev, &k, NULL); };
}
static work mse(cuda_side &s) {
    amp_k_mse k = {};
    k.x = matrix(s, AMP_F32, 4, 30, 9).data, k.target = matrix(s, AMP_F32, 4, 30, 10).data, k.x_dtype = k.target_dtype = AMP_F32;
    k.n = 120, k.factor = 1;
    k.loss = (float *)s.room(4);
    return [&s, k] { return s.backend->mse(s.dev, &k, NULL); };
}
/* Numbers of rows that take one pass of the sort, and two. */
static work embedding_backward(cuda_side &s, int64_t rows) {
    amp_k_embedding k = {};
    k.ids = numbers(s, 20, (int32_t)3);
    k.n = 20, k.seq = 5;
    k.dy = matrix(s, AMP_BF16, 20, 8, 11);
    k.dtable = matrix(s, AMP_F32, rows, 8, 12);
    k.dpositions = matrix(s, AMP_F32, 9, 8, 13);
    k.bad_id = numbers(s, 1, (int32_t)0);
    return [&s, k] { return s.backend->embedding_backward(s.dev, &k, NULL); };
}
static work multi_tensor(cuda_side &s, int which) {
    std::vector<amp_k_tensor> rows(2);
    amp_k_grad_stats found = {};
    for (amp_k_tensor &row : rows) {
        row.weight = matrix(s, AMP_F32, 1, 40, 14).data, row.weight_dtype = AMP_F32;
        row.grad = matrix(s, AMP_F32, 1, 40, 15).data, row.grad_dtype = AMP_F32;
        row.m = numbers(s, 40, 0.0f), row.v = numbers(s, 40, 0.0f);
        row.steps = s.put(std::vector<amp_k_steps>(1));
        row.count = 40, row.live = 1, row.lr_scale = 1;
    }
    found.first_bad = -1, found.multiplier = found.factor = 1, found.lr = 1e-3;
    amp_k_tensor *table = s.put(rows);
    amp_k_grad_stats *on = s.put(std::vector<amp_k_grad_stats>(1, found));
    if (which == 0) {
        amp_k_check k = {table, 2, NULL, on};
        return [&s, k] { return s.backend->check(s.dev, &k, NULL); };
    }
    if (which == 1) {
        amp_k_inspect k = {};
        k.table = table, k.tensors = 2, k.dtype = AMP_F16;
        k.out = (amp_k_inspected *)s.room(2 * sizeof(amp_k_inspected));
        return [&s, k] { return s.backend->inspect(s.dev, &k, NULL); };
    }
    amp_k_adamw k = {};
    k.table = table, k.tensors = 2, k.found = on, k.beta1 = 0.9, k.beta2 = 0.999, k.eps = 1e-8;
    return [&s, k] { return s.backend->adamw(s.dev, &k, NULL); };
}
static work attention(cuda_side &s, amp_dtype dtype, int64_t dim, bool arbitrary, amp_dtype compute = AMP_DTYPE_DEFAULT) {
    const int64_t n = 16, stride[3] = {n * dim, dim, dim};
    amp_k_attention k = {};
    auto operand = [&](uint64_t seed) { return matrix(s, dtype, n, dim, seed).data; };
    k.batch = k.heads = 1, k.queries = k.keys = n, k.dim = dim, k.dtype = k.compute = dtype, k.scale = 0.3f;
    if (compute != AMP_DTYPE_DEFAULT) k.compute = compute;
    k.q = operand(16), k.k = operand(17), k.v = operand(18), k.o = operand(19);
    k.d_o = operand(20), k.dq = operand(21), k.dk = operand(22), k.dv = operand(23);
    for (int64_t (*to)[3] : {&k.q_stride, &k.k_stride, &k.v_stride, &k.o_stride, &k.do_stride, &k.dq_stride, &k.dk_stride, &k.dv_stride})
        memcpy(*to, stride, sizeof stride);
    k.lse = (float *)s.room(n * 4);
    if (arbitrary) k.mask.kind = AMP_MASK_ARBITRARY, k.mask.allowed = numbers(s, n * n, (uint8_t)1);
    return [&s, k] {
        amp_result result = s.backend->attention(s.dev, &k, NULL);
        return result != AMP_OK ? result : s.backend->attention_backward(s.dev, &k, NULL);
    };
}

struct gemm_case { amp_dtype a, c, compute; amp_activation_kind act; int pre, backward, sums, bias, offset; int64_t n; };
static work gemm(cuda_side &s, const gemm_case &x) {
    amp_k_gemm g = {};
    g.m = 16, g.n = x.n, g.k = 24, g.batch = 1;
    g.a = matrix(s, x.a, 24, 16, 30).data, g.a_dtype = x.a, g.lda = 16, g.trans_a = 1;
    g.b = matrix(s, x.a, 24, x.n, 31).data, g.b_dtype = x.a, g.ldb = x.n;
    g.c = matrix(s, x.c, 16, x.n, 32).data, g.c_dtype = x.c, g.ldc = x.n;
    g.compute = x.compute, g.alpha = 1, g.act = x.act, g.backward = x.backward;
    if (x.pre) g.pre = matrix(s, x.c, 16, x.n, 33).data, g.pre_dtype = x.c, g.ld_pre = x.n;
    if (x.bias) g.bias = (char *)s.put(cuda_random(x.n, 34), (size_t)x.offset), g.bias_dtype = AMP_F32;
    if (x.sums & 1) g.column_sum = {numbers(s, (size_t)x.n, 0.0f), AMP_F32, 1};
    if (x.sums & 2) g.row_sum = {numbers(s, 16, 0.0f), AMP_F32, 1};
    return [&s, g] { return s.backend->gemm(s.dev, &g, NULL); };
}

static const operator_case cases[] = {
    {"cast", [](cuda_side &s) { return cast(s, AMP_ROUND_DEFAULT); }},
    {"cast, stochastic", [](cuda_side &s) { return cast(s, AMP_ROUND_STOCHASTIC); }},
    {"column sums", column_sum},
    {"norm", [](cuda_side &s) { return norm(s, 40); }},
    {"norm of long rows", [](cuda_side &s) { return norm(s, 20000); }},
    {"cross-entropy", cross_entropy},
    {"mean squared error", mse},
    {"embedding, backward", [](cuda_side &s) { return embedding_backward(s, 200); }},
    {"embedding, backward, two passes", [](cuda_side &s) { return embedding_backward(s, 300); }},
    {"check", [](cuda_side &s) { return multi_tensor(s, 0); }},
    {"inspect", [](cuda_side &s) { return multi_tensor(s, 1); }},
    {"AdamW", [](cuda_side &s) { return multi_tensor(s, 2); }},
    {"attention", [](cuda_side &s) { return attention(s, AMP_F32, 23, false); }},
    {"attention in fp32 on tensor cores", [](cuda_side &s) { return attention(s, AMP_F32, 24, true); }},
    {"attention of operands that are cast", [](cuda_side &s) { return attention(s, AMP_F32, 24, true, AMP_BF16); }},
    {"attention on tensor cores", [](cuda_side &s) { return attention(s, AMP_BF16, 24, true); }},
    {"product", [](cuda_side &s) { return gemm(s, {AMP_BF16, AMP_F32, AMP_BF16, AMP_ACT_NONE, 0, 0, 0, 0, 0, 24}); }},
    {"product of operands that are cast", [](cuda_side &s) { return gemm(s, {AMP_F32, AMP_BF16, AMP_BF16, AMP_ACT_NONE, 0, 0, 0, 1, 0, 24}); }},
    {"product with an activation of ours", [](cuda_side &s) { return gemm(s, {AMP_BF16, AMP_BF16, AMP_BF16, AMP_ACT_GELU_ERF, 1, 0, 0, 1, 0, 24}); }},
    {"product with a bias that is copied", [](cuda_side &s) { return gemm(s, {AMP_F32, AMP_F32, AMP_F32, AMP_ACT_NONE, 0, 0, 0, 1, 4, 24}); }},
    {"product with sums", [](cuda_side &s) { return gemm(s, {AMP_BF16, AMP_F32, AMP_BF16, AMP_ACT_NONE, 0, 0, 3, 0, 0, 24}); }},
    {"product with GELU's gradient", [](cuda_side &s) { return gemm(s, {AMP_BF16, AMP_BF16, AMP_BF16, AMP_ACT_GELU, 1, 1, 1, 0, 0, 24}); }},
};

static const operator_case &case_of(const char *name) {
    const operator_case *x = cases;
    while (strcmp(x->name, name) != 0) x++;
    return *x;
}

/* ---- Each call fails in turn */

static int64_t allocated(cuda_side &s) {
    amp_memory_info info = {};
    CHECK_EQ(s.backend->memory(s.dev, &info), AMP_OK);
    return info.allocated;
}

/* The n-th call of a function fails while an operator runs; whether it was made. */
static bool failing(const operator_case &x, int autotune, const char *function, int n, bool blas) {
    amp_backend_desc d = {};
    d.autotune = autotune;
    cuda_side s(amp_cuda(), d);
    work run = x.prepare(s);
    s.sync();
    int64_t before = allocated(s);
    cuda_error_text()[0] = 0;
    if (blas) coc_fail_blas(function, n, CUBLAS_STATUS_INTERNAL_ERROR);
    else coc_fail(function, n, cudaErrorUnknown);
    amp_result result = run();
    bool made = !(blas ? coc_fail_blas_pending() : coc_fail_pending());
    coc_fail_clear();
    coc_fail_blas(NULL, 0, 0);
    CHECK_MSG((result == AMP_OK) == (cuda_error_text()[0] == 0), "%s, call %d of %s: %d and \"%s\"", x.name, n, function, (int)result, cuda_error_text());
    if (made)
        CHECK_MSG(result == AMP_ERR_DEVICE && strstr(cuda_error_text(), blas ? "CUBLAS_STATUS_INTERNAL_ERROR" : "cudaErrorUnknown"),
                  "%s, call %d of %s failed: %d, %s", x.name, n, function, (int)result, cuda_error_text());
    else CHECK_MSG(result == AMP_OK, "%s: %s", x.name, cuda_error_text());
    CHECK_MSG(allocated(s) == before, "%s, call %d of %s: %lld bytes are lost", x.name, n, function, (long long)(allocated(s) - before));
    result = run();
    CHECK_MSG(result == AMP_OK, "%s, again after call %d of %s: %s", x.name, n, function, cuda_error_text());
    CHECK_MSG(allocated(s) == before, "%s, again after call %d of %s: %lld bytes are lost", x.name, n, function, (long long)(allocated(s) - before));
    return made;
}

CUDA_TEST(each_call_of_cuda) {
    for (const operator_case &x : cases)
        for (const char *function : {"cudaGetDevice", "cudaMalloc", "cudaLaunchKernel", "cudaMemsetAsync", "cudaEventCreateWithFlags",
                                     "cudaEventRecord", "cudaEventQuery", "cudaEventElapsedTime"}) {
            int n = 1;
            for (; n < 400 && failing(x, 0, function, n, false); n += n < 12 ? 1 : n / 2) {}
            CHECK_MSG(n < 400 && (n > 1 || strcmp(function, "cudaGetDevice") != 0), "%s, call %d of %s", x.name, n, function);
        }
}

/* Measuring makes many calls that are alike: a sample of them. */
CUDA_TEST(each_call_of_autotuning) {
    for (const char *name : {"product with sums"})
        for (const char *function : {"cudaMallocAsync", "cudaLaunchKernel", "cudaMemsetAsync", "cudaMemcpyAsync", "cudaStreamSynchronize",
                                     "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery", "cudaEventElapsedTime"}) {
            int n = 1;
            for (; n < 400 && failing(case_of(name), 1, function, n, false); n += n < 5 ? 1 : n) {}
            CHECK_MSG(n > 1, "%s: %s is not called", name, function);
        }
}

CUDA_TEST(each_call_of_cublas) {
    for (const char *name : {"product", "product with sums", "product with an activation of ours", "product with GELU's gradient"})
        for (int autotune = 0; autotune < 2; autotune++) {
            int n = 1;
            for (; n < 400 && failing(case_of(name), autotune, NULL, n, true); n += autotune ? n : 1) {}
            CHECK_MSG(n > 10, "%s makes %d calls", name, n);
        }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(each_call_of_cuda);
    RUN(each_call_of_autotuning);
    RUN(each_call_of_cublas);
    return TEST_END();
}
