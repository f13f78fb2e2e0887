/* t_cuda_gemm.cpp - compares the matrix products of amp_cuda.cu with the CPU backend, for every layout, dtype and epilogue.
 * It also tests which implementation each product uses, plans that are made once, autotuning and its file, and calls of
 * cuBLASLt that fail. */
#include "test_cuda.h"
#include "../gemm_parts.h"
#include <atomic>
#include <cublasLt.h>
#include <thread>
#include <unistd.h>

/* ---- One product; what is 0 is not asked for */

struct gemm_case {
    const char *name;
    int64_t m, n, k, batch = 1;
    int trans_a = 0, trans_b = 0;
    amp_dtype a = AMP_F32, b = AMP_F32, c = AMP_F32, compute = AMP_F32;
    float alpha = 1, beta = 0;
    amp_dtype bias = AMP_DTYPE_DEFAULT;
    amp_activation_kind act = AMP_ACT_NONE;
    amp_dtype pre = AMP_DTYPE_DEFAULT;
    int backward = 0;
    amp_dtype column_sum = AMP_DTYPE_DEFAULT, row_sum = AMP_DTYPE_DEFAULT;
    int add = 0;
    int64_t pad_a = 0, pad_b = 0, pad_c = 0, pad_pre = 0;       /* elements between rows */
    int64_t offset = 0;             /* elements that the starts are behind aligned addresses */
    int matmuls = 0, launches = 0;  /* calls of cublasLtMatmul and launches of kernels; launches -1: not counted */
};

static int64_t rows_a(const gemm_case &x) { return x.trans_a ? x.k : x.m; }
static int64_t cols_a(const gemm_case &x) { return x.trans_a ? x.m : x.k; }
static int64_t rows_b(const gemm_case &x) { return x.trans_b ? x.n : x.k; }
static int64_t cols_b(const gemm_case &x) { return x.trans_b ? x.k : x.n; }

/* What goes in: fp32 numbers, rounded to storage. */
struct gemm_numbers {
    std::vector<float> a, b, c, bias, pre, column, row;
    explicit gemm_numbers(const gemm_case &x)
        : a(cuda_random(x.batch * x.m * x.k, 1)), b(cuda_random(x.batch * x.k * x.n, 2)), c(cuda_random(x.batch * x.m * x.n, 3)),
          bias(cuda_random(x.n, 4)), pre(cuda_random(x.m * x.n, 5, -4, 4)), column(cuda_random(x.n, 6)), row(cuda_random(x.m, 7)) {}
};

static size_t offset_of(const gemm_case &x, amp_dtype dtype) { return (size_t)x.offset * amp_dtype_size(dtype); }

/* A batch of matrices, one below the other. */
static amp_mat put_batch(cuda_side &s, const gemm_case &x, const std::vector<float> &values, amp_dtype dtype, int64_t rows, int64_t cols,
                         int64_t pad) {
    return s.put_matrix(cuda_stored(values, dtype).data(), dtype, x.batch * rows, cols, cols + pad, offset_of(x, dtype));
}
static void *put_vector(cuda_side &s, const gemm_case &x, const std::vector<float> &values, amp_dtype dtype) {
    std::string stored = cuda_stored(values, dtype);
    return s.put(stored.data(), stored.size(), offset_of(x, dtype));
}

/* The arguments, on one side.  out: c, pre, sums. */
struct gemm_arguments {
    amp_k_gemm g;
    amp_mat a, b, c, pre;
    gemm_arguments(cuda_side &s, const gemm_case &x) {
        gemm_numbers in(x);
        memset(&g, 0, sizeof g);
        memset(&pre, 0, sizeof pre);
        a = put_batch(s, x, in.a, x.a, rows_a(x), cols_a(x), x.pad_a);
        b = put_batch(s, x, in.b, x.b, rows_b(x), cols_b(x), x.pad_b);
        c = put_batch(s, x, in.c, x.c, x.m, x.n, x.pad_c);
        g.m = x.m, g.n = x.n, g.k = x.k, g.batch = x.batch;
        g.a = a.data, g.b = b.data, g.c = c.data;
        g.a_dtype = x.a, g.b_dtype = x.b, g.c_dtype = x.c, g.compute = x.compute;
        g.trans_a = x.trans_a, g.trans_b = x.trans_b;
        g.lda = a.ld, g.ldb = b.ld, g.ldc = c.ld;
        g.stride_a = rows_a(x) * a.ld, g.stride_b = rows_b(x) * b.ld, g.stride_c = x.m * c.ld;
        g.alpha = x.alpha, g.beta = x.beta, g.act = x.act, g.backward = x.backward;
        vectors(s, x);
        if (x.pre) {
            pre = s.put_matrix(x.backward ? cuda_stored(in.pre, x.pre).data() : NULL, x.pre, x.m, x.n, x.n + x.pad_pre, offset_of(x, x.pre));
            g.pre = pre.data, g.pre_dtype = x.pre, g.ld_pre = pre.ld;
        }
    }
    void vectors(cuda_side &s, const gemm_case &x) {
        gemm_numbers in(x);
        if (x.bias) g.bias = put_vector(s, x, in.bias, x.bias), g.bias_dtype = x.bias;
        if (x.column_sum) g.column_sum = {put_vector(s, x, in.column, x.column_sum), x.column_sum, x.add};
        if (x.row_sum) g.row_sum = {put_vector(s, x, in.row, x.row_sum), x.row_sum, x.add};
    }
    void get(cuda_side &s, std::string *out) {
        s.get_matrix(out, c);
        if (g.pre) s.get_matrix(out, pre);
        if (g.column_sum.data) s.get(out, g.column_sum.data, (size_t)g.n * amp_dtype_size(g.column_sum.dtype));
        if (g.row_sum.data) s.get(out, g.row_sum.data, (size_t)g.m * amp_dtype_size(g.row_sum.dtype));
    }
};

/* ---- How far two backends may be apart */

static double rounded(float x, amp_dtype dtype) {
    if (dtype == AMP_F16) return amp_f32_from_f16(amp_f16_from_f32(x, 0));
    if (dtype == AMP_BF16) return amp_f32_from_bf16(amp_bf16_from_f32(x, 0));
    return dtype == AMP_TF32 ? amp_tf32_from_f32(x, 0) : x;
}

/* Operands of TF32: rounded here, and there rounded or cut, so that a product's two factors are up to 2^-10 apart each.
   Each element of c and pre before its rounding: sums of k + 3 terms in another order; a bias that is rounded to c's
   dtype first, and on a GPU the product before its epilogue and beta c.  Activations' slopes are at most 1.13, and change by at most 0.8 a unit; exponentials are within 16 units,
   the tanh of a product's epilogue, which only 16-bit results see, within 2^-11 (and GELU's slope 2^-10 (1 + |x|)). */
struct gemm_bounds {
    std::vector<double> c, pre, column, row;
    gemm_bounds(const gemm_case &x) : c((size_t)(x.batch * x.m * x.n)), pre((size_t)(x.m * x.n)), column((size_t)x.n), row((size_t)x.m) {
        gemm_numbers in(x);
        for (int64_t i = 0; i < x.batch * x.m; i++)
            for (int64_t j = 0; j < x.n; j++) element(x, in, i, j);
        for (int64_t i = 0; i < x.m && x.row_sum; i++) {
            double size = fabs((double)in.row[(size_t)i]), off = 0;
            for (int64_t p = 0; p < x.k; p++) {
                float v = in.a[(size_t)(x.trans_a ? p * x.m + i : i * x.k + p)];
                size += fabs((double)v);
                if (x.compute == AMP_TF32) off += ldexp(fabs((double)v), -10);
                else if (x.compute != x.a) off += fabs(rounded(v, x.compute) - (double)v);
            }
            row[(size_t)i] = off + cuda_sum_bound(x.k + 2, size);
        }
    }

private:
    void element(const gemm_case &x, const gemm_numbers &in, int64_t i, int64_t j) {
        const float *a = in.a.data() + i / x.m * x.m * x.k, *b = in.b.data() + i / x.m * x.k * x.n;
        int64_t r = i % x.m;
        size_t at = (size_t)(i * x.n + j);
        double sum = 0, size = 0, off;
        for (int64_t p = 0; p < x.k; p++) {
            double u = rounded(a[x.trans_a ? p * x.m + r : r * x.k + p], x.compute);
            double v = rounded(b[x.trans_b ? j * x.k + p : p * x.n + j], x.compute);
            sum += u * v, size += fabs(u * v);
        }
        sum *= (double)x.alpha, size *= fabs((double)x.alpha);
        double of_tf32 = x.compute == AMP_TF32 ? size * ldexp(2 + ldexp(1, -10), -10) : 0;
        double bias = x.bias && !x.backward ? (double)in.bias[(size_t)j] : 0, units = ldexp(28, -24);
        off = of_tf32 + cuda_sum_bound(x.k + 3, size + fabs(bias)) + ldexp(1, -126);
        if (x.c != AMP_F32) off += cuda_spacing(x.c, bias) / 2;
        if (!CUDA_IS_MODEL && x.c != AMP_F32) off += cuda_spacing(x.c, fabs(sum) + off) / 2;
        sum += bias;
        bool library = x.act == AMP_ACT_GELU && x.c != AMP_F32;
        if (x.backward) {
            double g = (double)in.pre[at];
            off = 1.13 * off + fabs(sum) * (1 + fabs(g)) * (library ? ldexp(1, -10) : units);
            sum *= 1.13;
        } else {
            pre[(size_t)(at % pre.size())] = off;
            if (x.act != AMP_ACT_NONE) off = 1.13 * off + fabs(sum) * (library ? ldexp(1, -12) : units);
        }
        if (x.beta != 0) off += ldexp(fabs(sum) + 2 * fabs((double)x.beta), -23);
        c[at] = off;
        size = fabs(sum) + fabs((double)x.beta) + off;
        column[(size_t)j] += off + cuda_spacing(x.c, size) + cuda_sum_bound(x.m + 2, size);
    }
};

static void check_once(const gemm_case &x) {
    gemm_bounds bounds(x);
    coc_counts before = {}, after = {};
    cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) {
        gemm_arguments first(s, x), args(s, x);
        if (s.gpu) CHECK(s.backend->gemm(s.dev, &first.g, NULL) == AMP_OK);     /* it may measure */
        if (CUDA_IS_MODEL && s.gpu) before = coc_count();
        CHECK((s.gpu ? s.backend->gemm(s.dev, &args.g, NULL) : gemm_parts(s.dev, &args.g)) == AMP_OK);
        if (CUDA_IS_MODEL && s.gpu) after = coc_count();
        args.get(s, out);
    });
    auto within = [&](const std::vector<double> &off, amp_dtype dtype) {
        return [&off, dtype](int64_t i, double value) {
            return off[(size_t)i] + cuda_spacing(dtype, fabs(value) + off[(size_t)i]);
        };
    };
    int failures = ampt.failures;
    size_t at = both.check_within(0, x.c, (int64_t)bounds.c.size(), within(bounds.c, x.c), "c");
    if (x.pre) at = both.check_within(at, x.pre, x.m * x.n, within(bounds.pre, x.pre), "pre");
    if (x.column_sum) at = both.check_within(at, x.column_sum, x.n, within(bounds.column, x.column_sum), "column_sum");
    if (x.row_sum) at = both.check_within(at, x.row_sum, x.m, within(bounds.row, x.row_sum), "row_sum");
    CHECK_EQ(at, both.expected.size());
    if (CUDA_IS_MODEL && x.launches >= 0) {
        CHECK_EQ(after.blas_matmuls - before.blas_matmuls, x.matmuls);
        CHECK_EQ(after.launches - before.launches, x.launches);
    }
    if (ampt.failures > failures) printf("      in %s\n", x.name);
}

/* Tensor cores that round operands of TF32, and such as cut them. */
static void check_case(const gemm_case &x) {
    for (int cuts = 0; cuts <= (x.compute == AMP_TF32); cuts++) {
        coc_set_blas_cuts_tf32(cuts);
        check_once(x);
    }
    coc_set_blas_cuts_tf32(0);
}

/* ---- Every combination of dtypes and layouts */

CUDA_TEST(layouts_and_dtypes) {
    static const struct { amp_dtype a, b, c, compute; int matmuls, launches; } types[] = {
        {AMP_F32, AMP_F32, AMP_F32, AMP_F32, 1, 0},    {AMP_F32, AMP_F32, AMP_F32, AMP_TF32, 1, 0},
        {AMP_F16, AMP_F16, AMP_F16, AMP_F16, 1, 0},    {AMP_F16, AMP_F16, AMP_F32, AMP_F16, 1, 0},
        {AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16, 1, 0},{AMP_BF16, AMP_BF16, AMP_F32, AMP_BF16, 1, 0},
        {AMP_F32, AMP_F32, AMP_F32, AMP_BF16, 1, 2},   {AMP_BF16, AMP_F32, AMP_BF16, AMP_BF16, 1, 1},
        {AMP_F32, AMP_F16, AMP_F32, AMP_F32, 1, 1},    {AMP_F32, AMP_F32, AMP_F16, AMP_F32, 1, 1},
        {AMP_F16, AMP_BF16, AMP_F32, AMP_TF32, 1, 2},  {AMP_BF16, AMP_BF16, AMP_F16, AMP_BF16, 1, 1},
    };
    int turn = 0;
    for (const auto &t : types)
        for (int layout = 0; layout < 4; layout++, turn++) {
            static const int64_t sizes[][3] = {{24, 40, 16}, {9, 33, 17}, {64, 8, 72}, {5, 7, 130}};
            const int64_t *size = sizes[turn % 4];
            gemm_case x = {"layouts_and_dtypes", size[0], size[1], size[2], 1, layout & 1, layout >> 1};
            x.a = t.a, x.b = t.b, x.c = t.c, x.compute = t.compute, x.alpha = 0.5f, x.beta = turn % 3 == 1 ? 1.0f : 0.0f;
            x.matmuls = t.matmuls, x.launches = t.launches;
            check_case(x);
        }
}

/* ---- Shapes, paddings and alignments */

CUDA_TEST(shapes) {
    const amp_dtype f = AMP_F32, h = AMP_BF16;
    gemm_case cases[] = {
        {"one row", 1, 40, 24, 1, 0, 1, h, h, h, h, 1},         {"one column", 40, 1, 24, 1, 0, 0, h, h, h, h, 1},
        {"one element", 1, 1, 1, 1, 0, 0, f, f, f, f, 1},       {"k of one", 8, 8, 1, 1, 1, 0, h, h, f, h, 1},
        {"padded rows", 16, 24, 32, 1, 0, 0, h, h, h, h, 1},    {"rows apart by odd numbers", 16, 24, 32, 1, 0, 1, h, h, h, h, 1},
        {"odd starts", 16, 24, 32, 1, 0, 0, h, h, h, h, 1},     {"odd starts, fp32", 16, 24, 32, 1, 1, 0, f, f, f, f, 1},
        {"a batch", 16, 8, 24, 3, 0, 0, h, h, h, h, 1},         {"an odd batch", 5, 7, 9, 4, 1, 1, f, f, f, f, 2, 1},
        {"a batch that is cast", 8, 8, 16, 3, 0, 0, f, h, h, h, 1},     {"a padded batch that is cast", 8, 8, 16, 3, 0, 0, f, h, h, h, 1},
    };
    cases[4].pad_a = cases[4].pad_b = cases[4].pad_c = 8;
    cases[5].pad_a = 3, cases[5].pad_b = 1, cases[5].pad_c = 5;
    cases[6].offset = cases[7].offset = 1;
    cases[11].pad_a = 4;
    for (gemm_case &x : cases) {
        x.matmuls = 1;
        x.launches = &x < &cases[10] ? 0 : x.pad_a ? 3 : 1;
        check_case(x);
        if (x.batch == 1) x.beta = 0.5f, check_case(x);
    }
}

/* How far apart the rows of a matrix of one row are, and the items of a batch of one, is nobody's business. */
CUDA_TEST(distances_without_use) {
    gemm_case x = {"one row", 1, 24, 40, 1, 0, 1, AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16};
    cuda_compare c;
    for (std::string *out : {&c.expected, &c.actual}) {
        cuda_side gpu(amp_cuda());
        gemm_arguments args(gpu, x);
        if (out == &c.actual) args.g.lda = args.g.ldc = 1, args.g.stride_a = args.g.stride_c = -7;
        CHECK_EQ(gpu.backend->gemm(gpu.dev, &args.g, NULL), AMP_OK);
        if (CUDA_IS_MODEL) CHECK_EQ(coc_count().blas_matmuls, out == &c.expected ? 1 : 2);
        args.get(gpu, out);
    }
    c.check_same_bits();
}

/* What no product is in: k of 0, alpha of 0; and nothing at all. */
CUDA_TEST(nothing_to_multiply) {
    const amp_dtype f = AMP_F32, h = AMP_BF16;
    gemm_case cases[] = {
        {"k of 0", 9, 12, 0, 1, 0, 0, h, h, h, h, 1, 1, f, AMP_ACT_RELU},     {"alpha of 0", 9, 12, 5, 1, 0, 0, f, f, f, f, 0, 0.5f},
        {"no rows", 0, 12, 5, 1, 0, 0, f, f, f, f, 1},          {"no columns", 9, 0, 5, 1, 1, 0, f, f, f, f, 1},
        {"k of 0, backward", 9, 12, 0, 1, 0, 0, h, h, h, h, 1, 1, AMP_DTYPE_DEFAULT, AMP_ACT_GELU, h, 1},
    };
    for (gemm_case &x : cases) {
        x.launches = x.m == 0 || x.n == 0 ? 0 : x.backward ? 2 : 1;
        check_case(x);
    }
    cases[2].column_sum = cases[3].row_sum = f;
    cases[2].launches = cases[3].launches = 1;
    check_case(cases[2]);
    check_case(cases[3]);
}

/* ---- Epilogues */

CUDA_TEST(epilogues_of_the_library) {
    const amp_dtype f = AMP_F32, h = AMP_BF16, no = AMP_DTYPE_DEFAULT;
    const amp_activation_kind gelu = AMP_ACT_GELU, relu = AMP_ACT_RELU, none = AMP_ACT_NONE;
    gemm_case cases[] = {
        /* name, m, n, k, batch, ta, tb, a, b, c, compute, alpha, beta, bias, act, pre, backward, columns, rows */
        {"bias", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h},
        {"bias, added to c", 16, 24, 32, 1, 0, 1, h, h, f, h, 1, 1, f},
        {"fp32 bias for bf16", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, f},
        {"relu", 16, 24, 32, 1, 0, 1, f, f, f, f, 1, 0, no, relu},
        {"bias and relu", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, relu},
        {"gelu", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, no, gelu},
        {"bias and gelu", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, gelu},
        {"gelu with its input", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, no, gelu, h},
        {"bias and gelu with its input", 16, 24, 32, 1, 0, 1, AMP_F16, AMP_F16, AMP_F16, AMP_F16, 1, 0, AMP_F16, gelu, AMP_F16},
        {"gelu backward", 16, 24, 32, 1, 0, 0, h, h, h, h, 1, 0, no, gelu, h, 1},
        {"gelu backward with a bias gradient", 16, 24, 32, 1, 0, 0, h, h, h, h, 1, 0, no, gelu, h, 1, h},
        {"weight and bias gradient", 24, 32, 16, 1, 1, 0, h, h, f, h, 1, 0, no, none, no, 0, no, f},
        {"weight and bias gradient, added", 24, 32, 16, 1, 1, 0, h, h, f, h, 1, 1, no, none, no, 0, no, f, 1},
        {"bias gradient to 16 bits", 24, 32, 16, 1, 1, 0, h, h, f, h, 1, 0, no, none, no, 0, no, h},
        {"sums of rows as they lie", 24, 32, 16, 1, 0, 0, h, h, f, h, 1, 0, no, none, no, 0, no, f},
    };
    for (gemm_case &x : cases) {
        x.matmuls = 1;
        x.launches = (x.bias && x.bias != x.c) || x.row_sum ? 1 : 0;       /* sums of rows are taken apart */
        check_case(x);
    }
}

CUDA_TEST(epilogues_of_our_own) {
    const amp_dtype f = AMP_F32, h = AMP_BF16, no = AMP_DTYPE_DEFAULT;
    const amp_activation_kind gelu = AMP_ACT_GELU, erf = AMP_ACT_GELU_ERF, relu = AMP_ACT_RELU, none = AMP_ACT_NONE;
    gemm_case cases[] = {
        {"gelu's exact form", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, f, erf, h},
        {"gelu in fp32", 16, 24, 32, 1, 0, 1, f, f, f, f, 1, 0, f, gelu, f},
        {"gelu, added to c", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0.5f, h, gelu, h},
        {"relu with its input", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, relu, h},
        {"its input in another dtype", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, gelu, f},
        {"its input in rows that do not fit", 16, 23, 32, 1, 0, 1, h, h, h, h, 1, 0, h, gelu, h},
        {"relu backward", 16, 24, 32, 1, 0, 0, h, h, h, h, 1, 0, no, relu, h, 1},
        {"gelu backward in fp32", 16, 24, 32, 1, 0, 0, f, f, f, f, 1, 0, no, gelu, f, 1},
        {"gelu backward, added to c", 16, 24, 32, 1, 0, 0, h, h, h, h, 1, 1, no, gelu, h, 1},
        {"backward through the exact form", 16, 24, 32, 1, 0, 0, h, h, f, h, 1, 0, no, erf, h, 1},
        {"bias that is not aligned", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, none},
        {"fp16 out of bf16", 16, 24, 32, 1, 0, 1, h, h, AMP_F16, h, 1, 0.5f, f, gelu},
        {"backward with fp32 bias gradient", 16, 24, 32, 1, 0, 0, h, h, h, h, 1, 0, no, gelu, h, 1, f, no, 1},
        {"sums of columns alone", 16, 24, 32, 1, 0, 0, h, h, h, h, 1, 0, no, none, no, 0, f},
        {"both sums", 24, 32, 16, 1, 1, 0, h, h, f, h, 1, 1, no, none, no, 0, f, f, 1},
        {"both sums, rows as they lie", 24, 32, 16, 1, 0, 0, h, h, h, h, 1, 0, no, none, no, 0, h, h},
    };
    cases[5].launches = 1;
    cases[10].offset = 1;           /* copied */
    for (gemm_case &x : cases) {
        x.matmuls = 1;
        x.launches = x.offset ? 0 : x.column_sum && x.row_sum ? 2 : 1;
        check_case(x);
    }
}

/* What a product of the backward passes takes, alone: launches of kernels and calls of cuBLASLt. */
struct taken { long launches, matmuls; };
static taken take(void *dev, const gemm_case &x, std::string *out) {
    cuda_side memory(amp_cuda());
    gemm_arguments args(memory, x);
    memory.sync();
    coc_reset_counts();
    CHECK_EQ(amp_cuda()->gemm(dev, &args.g, NULL), AMP_OK);
    taken t = {coc_count().launches, coc_count().blas_matmuls};
    CHECK_EQ(amp_cuda()->stream_sync(dev, NULL), AMP_OK);
    if (out) args.get(memory, out);
    return t;
}

/* Where act's input is kept in fp32, the product and its bias go there at once, and a map reads that and writes c: 12 bytes
   an element in place of 16, because the map wrote both before.  The bits are those of the plain product with a map, which
   is what remains where cuBLASLt lacks the epilogue. */
CUDA_TEST(products_into_the_kept_input) {
    const amp_dtype f = AMP_F32, t = AMP_TF32, h = AMP_BF16, no = AMP_DTYPE_DEFAULT;
    static const gemm_case cases[] = {
        {"fp32", 17, 24, 32, 1, 0, 1, f, f, f, f, 1, 0, f, AMP_ACT_GELU, f},
        {"tf32", 16, 24, 32, 1, 0, 1, f, f, f, t, 1, 0, f, AMP_ACT_GELU, f},
        {"tf32, alpha and beta", 16, 24, 32, 1, 0, 1, f, f, f, t, 2, 0.5f, f, AMP_ACT_GELU_ERF, f},
        {"tf32 without a bias", 16, 24, 32, 1, 0, 1, f, f, f, t, 1, 0, no, AMP_ACT_SILU, f},
        {"bf16 with its input in fp32", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, f, AMP_ACT_GELU, f},
    };
    for (const gemm_case &x : cases) {
        std::string out[2];
        for (int lacks = 0; lacks < 2; lacks++) {
            amp_backend_desc d = {};
            void *dev = NULL;
            if (lacks && !x.bias) continue;
            coc_set_blas_lacks(lacks ? CUBLASLT_EPILOGUE_BIAS : -1);
            CHECK_EQ(amp_cuda()->open(&dev, cuda_host(), &d), AMP_OK);
            taken once = take(dev, x, &out[lacks]);
            CHECK_MSG(once.launches == 1 && once.matmuls == 1, "%s: %ld launches, %ld products", x.name, once.launches, once.matmuls);
            CHECK_MSG(coc_kernel_launches("ampc_finish<1>") == !lacks && coc_kernel_launches("ampc_finish<2>") == lacks,
                      "%s: the map writes %d arrays", x.name, coc_kernel_launches("ampc_finish<2>") ? 2 : 1);
            amp_cuda()->close(dev);
        }
        coc_set_blas_lacks(-1);
        if (x.bias) CHECK_MSG(out[0] == out[1], "%s: other bits than in two steps", x.name);
    }
    for (gemm_case x : cases) x.matmuls = x.launches = 1, check_case(x);
}

/* ---- Transposed copies */

/* A product by a device of this capability and a copy of at most `limit` bytes; its results, and what it took. */
struct turned_run {
    std::string out, log;
    long turns = 0, matmuls = 0;
    size_t limit;
    static void *alloc(void *user, size_t bytes, int32_t, void *) {
        void *p = NULL;
        return bytes <= ((turned_run *)user)->limit && cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
    }
    static void free(void *, void *p, size_t, int32_t, void *) { (void)cudaFree(p); }
    static turned_run *running;
    static void write(void *, amp_log_level, int id, const char *text) { running->log += std::to_string(id) + " " + text + "\n"; }

    turned_run(const gemm_case &x, int capability, size_t most = SIZE_MAX, bool captured = false) : limit(most) {
        const amp_backend *b = amp_cuda();
        amp_backend_desc d = {};
        amp_host host = *cuda_host();
        void *dev = NULL, *graph = NULL;
        coc_reset();
        coc_set_devices(1, (size_t)1 << 30, 4, capability);
        running = this;
        host.log = write;
        if (limit != SIZE_MAX) d.memory.alloc = alloc, d.memory.free = free, d.memory.user = this;
        CHECK_EQ(b->open(&dev, &host, &d), AMP_OK);
        {
            cuda_side memory(b);
            gemm_arguments args(memory, x);
            memory.sync();
            coc_reset_counts();
            if (captured) CHECK_EQ(b->graph_begin(dev, NULL), AMP_OK);
            CHECK_EQ(b->gemm(dev, &args.g, NULL), AMP_OK);
            if (captured) {
                CHECK_EQ(b->graph_end(dev, NULL, &graph), AMP_OK);
                CHECK(b->graph_launch(dev, graph, NULL) == AMP_OK);
            }
            CHECK_EQ(b->stream_sync(dev, NULL), AMP_OK);
            turns = coc_kernel_launches("ampc_turn_kernel"), matmuls = coc_count().blas_matmuls;
            if (limit != SIZE_MAX) CHECK(b->gemm(dev, &args.g, NULL) == AMP_OK && b->stream_sync(dev, NULL) == AMP_OK);
            args.get(memory, &out);
            if (captured) b->graph_destroy(dev, graph);
        }
        b->close(dev);
        CHECK_EQ(coc_faults(), 0);
    }
};
turned_run *turned_run::running;

/* Large products in TF32 on Hopper copy the operands that are not contiguous along k, if that saves time: the classifier's
   and the linear layers' gradients, but no small product, none whose other sides are too short, no other dtype, and no
   other GPU.  The model multiplies and sums in one order, so the bits are the same, those of sums over rows too. */
CUDA_TEST(transposed_copies) {
    const amp_dtype f = AMP_F32, t = AMP_TF32, no = AMP_DTYPE_DEFAULT;
    const amp_activation_kind none = AMP_ACT_NONE;
    gemm_case cases[] = {
        {"NN", 1030, 130, 1001, 1, 0, 0, f, f, f, t},
        {"TN with sums", 259, 257, 1023, 1, 1, 0, f, f, f, t, 1, 1, no, none, no, 0, no, f, 1},
        {"TT", 300, 260, 500, 1, 1, 1, f, f, f, t},
        {"NN through GELU", 1030, 130, 1000, 1, 0, 0, f, f, f, t, 1, 0, no, AMP_ACT_GELU, f, 1},
        {"a small one", 64, 64, 64, 1, 1, 0, f, f, f, t},
        {"few rows", 16, 600, 2000, 1, 0, 0, f, f, f, t},
        {"NT", 1030, 130, 1000, 1, 0, 1, f, f, f, t},
        {"in fp32", 259, 257, 1023, 1, 1, 0, f, f, f, f},
        {"in bf16", 259, 257, 1023, 1, 1, 0, AMP_BF16, AMP_BF16, f, AMP_BF16},
    };
    const long turns[] = {1, 2, 1, 1, 0, 0, 0, 0, 0};
    cases[1].pad_a = 3, cases[1].pad_b = 4, cases[2].offset = 1;
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        turned_run direct(cases[i], 80), here(cases[i], 90);
        CHECK_MSG(direct.turns == 0, "%s", cases[i].name);
        CHECK_MSG(here.turns == turns[i] && here.matmuls == 1, "%s: %ld copies, %ld products", cases[i].name, here.turns, here.matmuls);
        CHECK_MSG(here.out == direct.out, "%s: other bits", cases[i].name);
        if (turns[i] == 0) continue;
        turned_run again(cases[i], 90), captured(cases[i], 90, SIZE_MAX, true);
        CHECK_MSG(again.out == here.out, "%s: other bits the second time", cases[i].name);
        CHECK_MSG(captured.turns == turns[i], "%s: %ld copies in a graph", cases[i].name, captured.turns);
        if (!cases[i].beta) CHECK_MSG(captured.out == here.out, "%s: other bits from a graph", cases[i].name);
    }
    coc_reset();
    coc_set_devices(2);
}

/* Without memory for a copy the product is computed directly, which is logged once. */
CUDA_TEST(transposed_copies_without_memory) {
    const gemm_case x = {"TN", 259, 257, 1023, 1, 1, 0, AMP_F32, AMP_F32, AMP_F32, AMP_TF32};
    turned_run direct(x, 80), room(x, 90, (size_t)64 << 20), tight(x, 90, 1 << 20);
    CHECK(room.turns == 2 && room.log.empty() && room.out == direct.out);
    CHECK_MSG(tight.turns == 0 && tight.out == direct.out, "%ld copies", tight.turns);
    CHECK_MSG(tight.log.find("5008 amp_cuda: no memory for 2113536 bytes") == 0 && tight.log.find('\n') == tight.log.size() - 1, "%s",
              tight.log.c_str());
    coc_reset();
    coc_set_devices(2);
}

/* Sums of rows with gaps between them, longer than a lane's chain of fp32 sums; of columns likewise. */
CUDA_TEST(sums_with_gaps) {
    const amp_dtype f = AMP_F32, h = AMP_BF16, no = AMP_DTYPE_DEFAULT;
    for (int trans_a = 0; trans_a < 2; trans_a++)
        for (amp_dtype a : {h, f})
            for (int64_t pad : {8, 3}) {
                gemm_case x = {"sums with gaps", 11, 8, 1100, 1, trans_a, 0, a, a, f, a == h ? h : f, 1, 0, no, AMP_ACT_NONE, no, 0, f, f, pad == 3};
                x.pad_a = x.pad_c = pad;
                x.matmuls = 1;
                x.launches = -1;
                check_case(x);
            }
}

/* ---- Without the library: it refuses what it is asked first, second, ... */

static amp_result run_once(const gemm_case &x, std::string *out) {
    cuda_side gpu(amp_cuda());
    gemm_arguments args(gpu, x);
    amp_result result = gpu.backend->gemm(gpu.dev, &args.g, NULL);
    args.get(gpu, out);
    return result;
}

/* What is refused is done by something else. */
CUDA_TEST(refused_products) {
    const amp_dtype h = AMP_BF16, no = AMP_DTYPE_DEFAULT;
    static const gemm_case cases[] = {
        {"forward", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, AMP_ACT_RELU}, {"sums", 16, 24, 32, 1, 1, 0, h, h, AMP_F32, h, 1, 0, no, AMP_ACT_NONE, no, 0, no, AMP_F32},
        {"backward", 16, 24, 32, 1, 0, 0, h, h, h, h, 1, 0, no, AMP_ACT_RELU, h, 1, h},
    };
    for (const gemm_case &x : cases)
        for (int status : {(int)CUBLAS_STATUS_NOT_SUPPORTED, (int)CUBLAS_STATUS_INVALID_VALUE}) {
            gemm_bounds bounds(x);
            std::string right, out;
            CHECK_EQ(run_once(x, &right), AMP_OK);
            for (int n = 1; n < 4; n++) {
                out.clear();
                coc_fail_blas("cublasLtMatmul", n == 3 ? 1 : n, status);
                if (n == 3) coc_fail_blas("cublasLtMatmulAlgoGetHeuristic", 1, status);
                CHECK_EQ(run_once(x, &out), AMP_OK);
                coc_fail_blas(NULL, 0, 0);
                cuda_compare both = {right, out, ""};
                both.check_within(0, x.c, x.m * x.n, [&](int64_t i, double value) {
                    return bounds.c[(size_t)i] + cuda_spacing(x.c, fabs(value) + bounds.c[(size_t)i]);
                }, x.name);
            }
        }
}

/* ---- Plans */

static const gemm_case &layer() {
    static const gemm_case x = {"a layer", 16, 24, 40, 1, 0, 1, AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16, 1, 0, AMP_BF16};
    return x;
}

/* The first call describes a product; the second makes, asks for and allocates nothing. */
CUDA_TEST(plans_are_made_once) {
    const gemm_case &x = layer();
    cuda_side gpu(amp_cuda());
    gemm_arguments args(gpu, x);
    amp_k_gemm other = args.g;
    auto counts = [&](amp_k_gemm &g) {
        CHECK(gpu.backend->gemm(gpu.dev, &g, NULL) == AMP_OK);
        coc_counts c = coc_count();
        coc_reset_counts();
        return c;
    };
    coc_reset_counts();
    coc_counts first = counts(args.g), second = counts(args.g);
    CHECK(first.blas_objects > 0 && first.blas_heuristics == 1 && first.blas_matmuls == 1);
    CHECK(second.blas_objects == 0 && second.blas_heuristics == 0 && second.blas_matmuls == 1);
    CHECK(second.allocations == 0 && second.synchronising == 0 && second.copies == 0);
    other.alpha = 3;                /* alpha is no part of it, and beta only if it is 0 */
    CHECK_EQ(counts(other).blas_heuristics, 0);
    other.n = 8;
    CHECK_EQ(counts(other).blas_heuristics, 1);
    other.bias = (const char *)other.bias + 16;
    CHECK_EQ(counts(other).blas_heuristics, 1);
    other.beta = 1;
    CHECK_EQ(counts(other).blas_heuristics, 1);
    other.beta = 2;
    CHECK_EQ(counts(other).blas_heuristics, 0);
    other.a = (const char *)other.a + 2, other.m = 8;
    CHECK_EQ(counts(other).blas_heuristics, 1);
}

/* Steps are kept for calls alike, and for no others: on one device, each call twice, the bits of a device that saw nothing
   else. */
CUDA_TEST(kept_steps) {
    const amp_dtype f = AMP_F32, h = AMP_BF16, no = AMP_DTYPE_DEFAULT;
    const amp_activation_kind none = AMP_ACT_NONE, gelu = AMP_ACT_GELU, relu = AMP_ACT_RELU;
    const gemm_case cases[] = {
        {"plain", 16, 24, 32, 1, 0, 1, h, h, f, h},                             {"fp32 a", 16, 24, 32, 1, 0, 1, f, h, f, h},
        {"fp32 b", 16, 24, 32, 1, 0, 1, h, f, f, h},                            {"fp32 a, sums", 16, 24, 32, 1, 0, 1, f, h, f, h, 1, 0, no, none, no, 0, no, f},
        {"sums of rows", 16, 24, 32, 1, 0, 1, h, h, f, h, 1, 0, no, none, no, 0, no, f},
        {"in 16 bits", 16, 24, 32, 1, 0, 1, h, h, f, h, 1, 0, no, none, no, 0, no, h},
        {"added", 16, 24, 32, 1, 0, 1, h, h, f, h, 1, 0, no, none, no, 0, no, f, 1},
        {"sums of columns", 16, 24, 32, 1, 0, 1, h, h, f, h, 1, 0, no, none, no, 0, f},
        {"columns in 16 bits", 16, 24, 32, 1, 0, 1, h, h, f, h, 1, 0, no, none, no, 0, h},
        {"both", 16, 24, 32, 1, 0, 1, h, h, f, h, 1, 0, no, none, no, 0, f, f},
        {"bias", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h},                     {"fp32 bias", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, f},
        {"relu", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, relu},               {"gelu", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, gelu, h},
        {"fp32 pre", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, h, gelu, f},        {"backward", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, no, gelu, h, 1},
        {"backward, fp32 pre", 16, 24, 32, 1, 0, 1, h, h, h, h, 1, 0, no, gelu, f, 1},
    };
    cuda_side gpu(amp_cuda());
    for (int turn = 0; turn < 2; turn++)
        for (const gemm_case &x : cases) {
            std::string right, out;
            CHECK_EQ(run_once(x, &right), AMP_OK);
            gemm_arguments args(gpu, x);
            CHECK_EQ(gpu.backend->gemm(gpu.dev, &args.g, NULL), AMP_OK);
            args.get(gpu, &out);
            CHECK_MSG(out == right, "%s, turn %d", x.name, turn);
        }
    if (!CUDA_IS_MODEL) return;
    /* what is refused later on is done otherwise from then on */
    gemm_arguments args(gpu, cases[12]);
    coc_fail_blas("cublasLtMatmul", 1, CUBLAS_STATUS_NOT_SUPPORTED);
    for (int i = 0; i < 3; i++) {
        coc_reset_counts();
        CHECK_EQ(gpu.backend->gemm(gpu.dev, &args.g, NULL), AMP_OK);
        CHECK_EQ(coc_count().launches, 1);
        CHECK_EQ(coc_count().blas_matmuls, 1);
    }
}

/* Threads share plans and the device. */
CUDA_TEST(several_threads) {
    cuda_side gpu(amp_cuda());
    std::vector<gemm_arguments> all;
    std::vector<std::string> right(4);
    std::vector<std::thread> threads;
    std::vector<amp_result> results(4, AMP_OK);
    std::vector<void *> streams(4);
    for (size_t i = 0; i < 4; i++) {
        gemm_case x = layer();
        x.m = 8 * (int64_t)(1 + i);
        CHECK_EQ(run_once(x, &right[i]), AMP_OK);
        all.emplace_back(gpu, x);
        CHECK_OK(gpu.backend->stream_create(gpu.dev, &streams[i]));
    }
    for (size_t i = 0; i < 4; i++)
        threads.emplace_back([&, i] {
            for (int round = 0; round < 8; round++)
                if (gpu.backend->gemm(gpu.dev, &all[i].g, streams[i]) != AMP_OK) results[i] = AMP_ERR_DEVICE;
            if (gpu.backend->stream_sync(gpu.dev, streams[i]) != AMP_OK) results[i] = AMP_ERR_DEVICE;
        });
    for (std::thread &t : threads) t.join();
    for (size_t i = 0; i < 4; i++) {
        std::string out;
        all[i].get(gpu, &out);
        CHECK(results[i] == AMP_OK && out == right[i]);
        gpu.backend->stream_destroy(gpu.dev, streams[i]);
    }
}

/* What the host brings is called without a lock, so that it may wait for another thread's call; else this never ends. */
struct calling_back {
    cuda_side *gpu = NULL;
    gemm_arguments *args = NULL;
    std::atomic<int> busy{0}, calls{0}, products{0};

    void call() {
        CHECK_EQ(coc_locks_held(), 0);
        calls++;
        if (gpu == NULL || gpu->dev == NULL || busy.exchange(1)) return;
        std::thread([this] {
            amp_memory_info info = {};
            void *p = NULL;
            CHECK_EQ(gpu->backend->alloc(gpu->dev, &p, 3000), AMP_OK);
            CHECK_EQ(gpu->backend->gemm(gpu->dev, &args->g, NULL), AMP_OK);
            CHECK_EQ(gpu->backend->memory(gpu->dev, &info), AMP_OK);
            gpu->backend->free(gpu->dev, p, 3000);
            products++;
        }).join();
        busy = 0;
    }
    static amp_result fail(void *user, amp_result result, const char *text) {
        ((calling_back *)user)->call();
        return cuda_host_fail(NULL, result, text);
    }
    static void log(void *user, amp_log_level, int, const char *) { ((calling_back *)user)->call(); }
    static void *alloc(void *user, size_t size, size_t align) {
        ((calling_back *)user)->call();
        return cuda_host_alloc(NULL, size, align);
    }
    static void free(void *user, void *p, size_t) {
        ((calling_back *)user)->call();
        ::free(p);
    }
    static void *memory_alloc(void *user, size_t bytes, int32_t, void *) {
        void *p = NULL;
        ((calling_back *)user)->call();
        return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
    }
    static void memory_free(void *user, void *p, size_t, int32_t, void *) {
        ((calling_back *)user)->call();
        (void)cudaFree(p);
    }
};

CUDA_TEST(callbacks_may_wait_for_other_threads) {
    calling_back host;
    amp_backend_desc d = {};
    d.threads = 1;
    d.autotune = 1;
    d.memory.alloc = host.memory_alloc, d.memory.free = host.memory_free, d.memory.user = &host;
    amp_host table = *cuda_host();
    table.user = &host, table.fail = host.fail, table.log = host.log, table.alloc = host.alloc, table.free = host.free;
    cuda_side gpu(amp_cuda());
    gpu.sync();
    gpu.backend->close(gpu.dev);
    gpu.dev = NULL;
    CHECK(gpu.backend->open(&gpu.dev, &table, &d) == AMP_OK);
    alarm(300);
    {
        std::string right, out;
        gemm_case x = layer(), y = layer();
        y.m = 8;
        CHECK_EQ(run_once(x, &right), AMP_OK);
        gemm_arguments args(gpu, x), others(gpu, y);
        host.args = &others;
        host.gpu = &gpu;
        CHECK_EQ(gpu.backend->gemm(gpu.dev, &args.g, NULL), AMP_OK);
        if (CUDA_IS_MODEL) {
            coc_fail_blas("cublasLtMatmul", 1, CUBLAS_STATUS_INTERNAL_ERROR);
            CHECK_EQ(gpu.backend->gemm(gpu.dev, &args.g, NULL), AMP_ERR_DEVICE);
        }
        CHECK_EQ(gpu.backend->gemm(gpu.dev, &args.g, NULL), AMP_OK);
        args.get(gpu, &out);
        CHECK(out == right);
        CHECK_MSG(host.products > 8, "%d products within %d calls", (int)host.products, (int)host.calls);
        host.gpu = NULL;
    }
    alarm(0);
}

/* The host's own handle serves, and stays. */
CUDA_TEST(the_hosts_handle) {
    cublasLtHandle_t handle = NULL;
    amp_desc d = {};
    CHECK(cudaSetDevice(0) == cudaSuccess && cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    long made = coc_calls("cublasLtCreate");
    d.blas = handle;
    amp_context *amp = cuda_context(&d);
    void *x = NULL;
    CHECK_OK(amp_alloc(amp, &x, 3 * 64 * 4));
    float *a = (float *)x;
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 8, 8, 8, 1, a, 8, a + 64, 8, 0, a + 128, 8));
    amp_free(amp, x);
    amp_close(amp);
    CHECK_EQ(coc_calls("cublasLtCreate"), made);
    CHECK(cublasLtDestroy(handle) == CUBLAS_STATUS_SUCCESS);
}

/* In a captured stream a product is planned, but not measured. */
CUDA_TEST(captured) {
    amp_backend_desc d = {};
    void *dev = NULL, *graph = NULL;
    const amp_backend *b = amp_cuda();
    std::string right, out;
    d.autotune = 1;
    CHECK_EQ(run_once(layer(), &right), AMP_OK);
    CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
    {
        cuda_side memory(b);
        gemm_arguments args(memory, layer());
        memory.sync();
        coc_reset_counts();
        CHECK_EQ(b->graph_begin(dev, NULL), AMP_OK);
        CHECK_EQ(b->gemm(dev, &args.g, NULL), AMP_OK);
        CHECK_EQ(b->graph_end(dev, NULL, &graph), AMP_OK);
        CHECK(coc_count().blas_heuristics == 1 && coc_count().blas_matmuls == 1);
        CHECK_EQ(b->graph_launch(dev, graph, NULL), AMP_OK);
        CHECK_EQ(b->stream_sync(dev, NULL), AMP_OK);
        args.get(memory, &out);
        CHECK(out == right);
        b->graph_destroy(dev, graph);
        CHECK_EQ(b->gemm(dev, &args.g, NULL), AMP_OK);
        CHECK(coc_count().blas_heuristics > 1);         /* now it is */
        CHECK_EQ(b->stream_sync(dev, NULL), AMP_OK);
    }
    b->close(dev);
}

/* An algorithm that needs workspace gets 32 MiB on sm_90 and 4 MiB below, in the stream's own memory or the graph's. */
CUDA_TEST(workspace) {
    for (int capability : {90, 80}) {
        amp_backend_desc d = {};
        amp_memory_info info = {};
        void *dev = NULL, *graph = NULL;
        const amp_backend *b = amp_cuda();
        gemm_case x = layer();
        int64_t mib = capability == 90 ? 32 : 4, before;
        coc_reset();
        coc_set_devices(1, (size_t)1 << 30, 4, capability);
        coc_set_modelled_clock(1);
        coc_set_blas_time(COC_BLAS_SPLIT, 1);
        d.autotune = 1;
        CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
        {
            cuda_side cpu(amp_cpu()), memory(b);
            gemm_arguments there(cpu, x), args(memory, x);
            gemm_bounds bounds(x);
            cuda_compare both;
            memory.sync();
            CHECK_EQ(amp_cpu()->gemm(cpu.dev, &there.g, NULL), AMP_OK);
            CHECK_EQ(b->gemm(dev, &args.g, NULL), AMP_OK);
            CHECK_EQ(b->gemm(dev, &args.g, NULL), AMP_OK);
            CHECK_EQ(b->memory(dev, &info), AMP_OK);
            before = info.reserved >> 20;
            CHECK(before >= mib && before < 2 * mib);
            CHECK_EQ(b->graph_begin(dev, NULL), AMP_OK);
            CHECK_EQ(b->gemm(dev, &args.g, NULL), AMP_OK);
            CHECK_EQ(b->gemm(dev, &args.g, NULL), AMP_OK);
            CHECK_EQ(b->graph_end(dev, NULL, &graph), AMP_OK);
            CHECK_EQ(b->memory(dev, &info), AMP_OK);
            CHECK_EQ(info.reserved >> 20, before + mib);
            CHECK(b->graph_launch(dev, graph, NULL) == AMP_OK && b->gemm(dev, &args.g, NULL) == AMP_OK);
            CHECK_EQ(b->stream_sync(dev, NULL), AMP_OK);
            there.get(cpu, &both.expected);
            args.get(memory, &both.actual);
            both.check_within(0, x.c, x.m * x.n, [&](int64_t i, double value) {
                return bounds.c[(size_t)i] + cuda_spacing(x.c, fabs(value) + bounds.c[(size_t)i]);
            });
            b->graph_destroy(dev, graph);
        }
        b->close(dev);
    }
}

/* A registered weight in another dtype is cast once for all products, forward and backward, until it changes. */
CUDA_TEST(weights_are_cast_once) {
    amp_desc d = {};
    d.dtype = AMP_BF16;
    amp_context *amp = cuda_context(&d);
    void *memory[6];
    amp_param w = {};
    amp_linear_op op = {};
    for (void *&p : memory) {
        CHECK_OK(amp_alloc(amp, &p, 32 * 32 * 4));
        CHECK_OK(amp_fill(amp, p, 0, 32 * 32 * 4));
    }
    w.name = "w", w.weight = amp_tensor2(memory[0], AMP_F32, 24, 16), w.grad = amp_tensor2(memory[1], AMP_F32, 24, 16);
    CHECK_OK(amp_param_register(amp, &w, 1));
    op.weight = &w, op.x = amp_tensor2(memory[2], AMP_BF16, 32, 16), op.y = amp_tensor2(memory[3], AMP_BF16, 32, 24);
    op.dy = amp_tensor2(memory[4], AMP_BF16, 32, 24), op.dx = amp_tensor2(memory[5], AMP_BF16, 32, 16);
    auto step = [&] {
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_OK(amp_linear(amp, &op));
        CHECK_OK(amp_autocast_end(amp));
        CHECK_OK(amp_linear_backward(amp, &op));
    };
    coc_reset_counts();
    step();
    step();
    CHECK(coc_kernel_launches("ampc_cast_kernel") == 1 && coc_count().blas_matmuls == 6);
    amp_param_changed(&w);
    step();
    CHECK_EQ(coc_kernel_launches("ampc_cast_kernel"), 2);
    amp_param_forget(amp, &w, 1);
    for (void *p : memory) amp_free(amp, p);
    amp_close(amp);
}

/* Both products of a backward read dy, and cast it once where it is not in their dtype.  Each product alone: the same bits. */
struct backward_case {
    const char *name;
    amp_dtype dy, compute;
    int64_t batch = 0, ld = 24;     /* batch 0: a linear layer's */
    amp_activation_kind act = AMP_ACT_NONE, x_act = AMP_ACT_NONE;
    int trans = 0, saved = 1;       /* saved: launches, beside each product alone */
};
enum { BACKWARD_WEIGHT = 1, BACKWARD_X = 2 };

struct backward_pass {
    enum { M = 32, N = 24, K = 16, EACH = 2048, BUFFERS = 9 };
    amp_context *amp;
    char *memory = NULL;
    amp_param params[2] = {};
    amp_linear_op linear = {};
    amp_matmul_op matmul = {};
    bool batched;

    void *at(int i, amp_dtype dtype) {      /* buffer i, filled */
        std::string numbers = cuda_stored(cuda_random(EACH, 11 + (uint64_t)i), dtype);
        CHECK_OK(amp_copy(amp, memory + i * EACH * 4, numbers.data(), numbers.size(), AMP_COPY_TO_DEVICE));
        CHECK_OK(amp_sync(amp));
        return memory + i * EACH * 4;
    }
    backward_pass(const backward_case &c, int products) : batched(c.batch > 0) {
        amp_desc d = {};
        amp_dtype h = c.compute == AMP_TF32 ? AMP_F32 : c.compute;
        d.dtype = c.compute;
        amp = cuda_context(&d);
        CHECK_OK(amp_alloc(amp, (void **)&memory, BUFFERS * EACH * 4));
        CHECK_OK(amp_fill(amp, memory, 0, BUFFERS * EACH * 4));
        params[0].name = "w", params[0].weight = amp_tensor2(at(0, AMP_F32), AMP_F32, N, K);
        params[1].name = "b", params[1].weight = amp_tensor1(at(1, AMP_F32), AMP_F32, N);
        if (products & BACKWARD_WEIGHT) {
            params[0].grad = amp_tensor2(at(2, AMP_F32), AMP_F32, N, K);
            params[1].grad = amp_tensor1(at(3, AMP_F32), AMP_F32, N);
        }
        CHECK_OK(amp_param_register(amp, params, 2));
        amp_tensor dy = amp_tensor2(at(4, c.dy), c.dy, M, N);
        linear.weight = &params[0], linear.bias = &params[1], linear.act = c.act, linear.x_act = c.x_act;
        linear.x = amp_tensor2(at(5, h), h, M, K), linear.y = amp_tensor2(at(6, c.dy), c.dy, M, N);
        linear.dy = dy, linear.dy.stride[0] = c.ld, linear.dy.stride[1] = 1;
        if (c.act) linear.pre = amp_tensor2(at(7, c.dy), c.dy, M, N);
        if (c.x_act) linear.x_pre = amp_tensor2(at(7, h), h, M, K);
        if (products & BACKWARD_X) linear.dx = amp_tensor2(at(8, h), h, M, K);
        matmul.trans_a = matmul.trans_b = c.trans;
        matmul.a = c.trans ? amp_tensor3(linear.x.data, h, c.batch, K, 8) : amp_tensor3(linear.x.data, h, c.batch, 8, K);
        matmul.b = c.trans ? amp_tensor3(at(0, h), h, c.batch, N, K) : amp_tensor3(at(0, h), h, c.batch, K, N);
        matmul.y = amp_tensor3(linear.y.data, c.dy, c.batch, 8, N);
        matmul.dy = matmul.y, matmul.dy.data = dy.data;
        if (products & BACKWARD_X) matmul.da = matmul.a, matmul.da.data = linear.dx.data;
        if (products & BACKWARD_WEIGHT) matmul.db = matmul.b, matmul.db.data = params[0].grad.data;
        if (batched) linear.x_act = AMP_ACT_NONE;
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_OK(batched ? amp_matmul(amp, &matmul) : amp_linear(amp, &linear));
        CHECK_OK(amp_autocast_end(amp));
    }
    backward_pass(const backward_pass &) = delete;
    ~backward_pass() {
        amp_param_forget(amp, params, 2);
        amp_free(amp, memory);
        amp_close(amp);
    }
    amp_result backward() { return batched ? amp_matmul_backward(amp, &matmul) : amp_linear_backward(amp, &linear); }
    /* How many kernels a backward launches, when all of its products are measured. */
    long launches() {
        for (int i = 0; i < 2; i++) CHECK_OK(backward());
        CHECK_OK(amp_sync(amp));
        coc_reset_counts();
        CHECK_OK(backward());
        return coc_count().launches;
    }
    std::string bits(int buffer) {
        std::string out(EACH * 4, 0);
        CHECK_OK(amp_copy(amp, &out[0], memory + buffer * EACH * 4, out.size(), AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
        return out;
    }
};

static const backward_case linear_backward = {"linear", AMP_F32, AMP_BF16};

CUDA_TEST(gradients_are_cast_once) {
    const amp_dtype f = AMP_F32, h = AMP_BF16;
    const amp_activation_kind none = AMP_ACT_NONE, gelu = AMP_ACT_GELU;
    const backward_case cases[] = {
        linear_backward,                                {"linear in fp16", f, AMP_F16},
        {"rows that are apart", f, h, 0, 40},           {"GELU's gradient behind it", f, h, 0, 24, none, gelu},
        {"its own GELU, in place", f, h, 0, 24, gelu, none, 0, 2},      {"dy in 16 bits", h, h, 0, 24, none, none, 0, 0},
        {"fp32", f, f, 0, 24, none, none, 0, 0},        {"16-bit dy for TF32", h, AMP_TF32},
        {"a batch", f, h, 3},                           {"a batch, transposed", f, h, 3, 24, none, none, 1},
        {"a batch in 16 bits", h, h, 3, 24, none, none, 0, 0},
    };
    for (const backward_case &c : cases) {
        backward_pass both(c, BACKWARD_WEIGHT | BACKWARD_X), weight(c, BACKWARD_WEIGHT), x(c, BACKWARD_X);
        long together = both.launches(), apart = weight.launches() + x.launches();
        CHECK_MSG(together == apart - c.saved, "%s: %ld launches, %ld apart", c.name, together, apart);
        for (int i : {2, 3, 8}) CHECK_MSG(both.bits(i) == (i == 8 ? x : weight).bits(i), "%s: buffer %d", c.name, i);
    }
    backward_pass both(linear_backward, BACKWARD_WEIGHT | BACKWARD_X);
    (void)both.launches();
    CHECK_EQ(coc_kernel_launches("ampc_cast_kernel"), 1);
}

/* The memory of the copy belongs to the products until the release.  What is allocated in between is other memory. */
CUDA_TEST(gradients_are_cast_once_in_held_memory) {
    const gemm_case weight = {"weight", 24, 16, 32, 1, 1, 0, AMP_F32, AMP_BF16, AMP_F32, AMP_BF16};
    const gemm_case inputs = {"inputs", 32, 16, 24, 1, 0, 0, AMP_F32, AMP_BF16, AMP_F32, AMP_BF16};
    const size_t bytes = 32 * 24 * 2;
    std::string right, out;
    cuda_side side(amp_cuda());
    gemm_arguments first(side, weight), second(side, inputs);
    amp_k_gemm both[] = {first.g, second.g};
    void *other = NULL;
    both[1].a = both[0].a;
    for (amp_k_gemm &g : both) CHECK_EQ(side.backend->gemm(side.dev, &g, NULL), AMP_OK);
    first.get(side, &right), second.get(side, &right);
    CHECK_EQ(side.backend->gemm_reserve(side.dev, both, 2), AMP_OK);
    CHECK_EQ(side.backend->alloc(side.dev, &other, bytes), AMP_OK);
    CHECK_EQ(side.backend->gemm(side.dev, &both[0], NULL), AMP_OK);       /* casts dy for both */
    CHECK_EQ(side.backend->fill(side.dev, other, 1, bytes, NULL), AMP_OK);
    CHECK_EQ(side.backend->gemm(side.dev, &both[1], NULL), AMP_OK);
    side.backend->gemm_release(side.dev, both);
    side.backend->free(side.dev, other, bytes);
    first.get(side, &out), second.get(side, &out);
    CHECK(out == right);
}

/* A graph keeps the memory of its cast: what is allocated later stays as it is when the graph runs. */
CUDA_TEST(gradients_are_cast_once_captured) {
    const gemm_case weight = {"weight", 24, 16, 32, 1, 1, 0, AMP_F32, AMP_BF16, AMP_F32, AMP_BF16};
    const gemm_case inputs = {"inputs", 32, 16, 24, 1, 0, 0, AMP_F32, AMP_BF16, AMP_F32, AMP_BF16};
    const amp_backend *b = amp_cuda();
    const std::string ones(32 * 24 * 2, 1);
    std::string right, out;
    std::vector<void *> others(8);
    void *dev = NULL, *graph = NULL;
    amp_backend_desc d = {};
    CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
    {
        cuda_side memory(b);
        gemm_arguments first(memory, weight), second(memory, inputs);
        amp_k_gemm both[] = {first.g, second.g};
        both[1].a = both[0].a;
        for (amp_k_gemm &g : both) CHECK_EQ(memory.backend->gemm(memory.dev, &g, NULL), AMP_OK);
        first.get(memory, &right), second.get(memory, &right);
        for (gemm_arguments *x : {&first, &second}) CHECK_EQ(b->fill(memory.dev, x->g.c, 0, (size_t)(x->g.m * x->g.n) * 4, NULL), AMP_OK);
        memory.sync();
        coc_reset_counts();
        CHECK_EQ(b->graph_begin(dev, NULL), AMP_OK);
        CHECK_EQ(b->gemm_reserve(dev, both, 2), AMP_OK);
        for (amp_k_gemm &g : both) CHECK_EQ(b->gemm(dev, &g, NULL), AMP_OK);
        b->gemm_release(dev, both);
        CHECK_EQ(b->graph_end(dev, NULL, &graph), AMP_OK);
        for (void *&p : others) CHECK(b->alloc(dev, &p, ones.size()) == AMP_OK && b->fill(dev, p, 1, ones.size(), NULL) == AMP_OK);
        CHECK_EQ(b->graph_launch(dev, graph, NULL), AMP_OK);
        if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_cast_kernel"), 1);
        for (void *p : others) {
            std::string now = ones;
            CHECK_EQ(b->copy(dev, &now[0], p, now.size(), AMP_COPY_TO_HOST, NULL), AMP_OK);
            CHECK_EQ(b->stream_sync(dev, NULL), AMP_OK);
            CHECK(now == ones);
            b->free(dev, p, ones.size());
        }
        first.get(memory, &out), second.get(memory, &out);
        CHECK(out == right);
        b->graph_destroy(dev, graph);
    }
    b->close(dev);
}

/* ---- Failures: each call of cuBLASLt in turn.  The text names it, nothing is half done, the next try succeeds. */

/* Whether the call happened. */
static bool failing_call(const gemm_case &x, const std::string &right, const char *call, int n) {
    std::string before, after;
    cuda_side gpu(amp_cuda());
    gemm_arguments args(gpu, x);
    args.get(gpu, &before);
    coc_fail_blas(call, n, CUBLAS_STATUS_INTERNAL_ERROR);
    amp_result result = gpu.backend->gemm(gpu.dev, &args.g, NULL);
    bool happened = !coc_fail_blas_pending();
    coc_fail_blas(NULL, 0, 0);
    if (!happened) return false;
    const char *text = cuda_error_text();
    CHECK_EQ(result, AMP_ERR_DEVICE);
    CHECK_MSG(strstr(text, "cublasLt") && strstr(text, "CUBLAS_STATUS_INTERNAL_ERROR") && strstr(text, "c[16, 24] of k = 40"), "%s", text);
    args.get(gpu, &after);
    CHECK(after == before);
    long products = coc_count().blas_matmuls;
    CHECK_EQ(gpu.backend->gemm(gpu.dev, &args.g, NULL), AMP_OK);
    CHECK_EQ(coc_count().blas_matmuls - products, 1);
    after.clear();
    args.get(gpu, &after);
    CHECK_MSG(after == right, "after failure %d of %s", n, call);
    return true;
}

CUDA_TEST(failing_calls) {
    gemm_case x = layer();
    std::string right, after;
    CHECK_EQ(run_once(x, &right), AMP_OK);
    for (const char *call : {"cublasLtMatmulDescInit_internal", "cublasLtMatmulDescSetAttribute", "cublasLtMatrixLayoutCreate",
                             "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceSetAttribute",
                             "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"}) {
        int n = 1;
        while (n < 30 && failing_call(x, right, call, n)) n++;
        CHECK_MSG(n > 1 && n < 30, "%s, call %d", call, n);
    }
    coc_fail_blas("cublasLtCreate", 1, CUBLAS_STATUS_NOT_INITIALIZED);
    amp_context *amp = NULL;
    amp_desc d = {};
    d.backend = amp_cuda();
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_DEVICE);
    CHECK_MSG(strstr(amp_last_error(), "cublasLtCreate") && strstr(amp_last_error(), "CUBLAS_STATUS_NOT_INITIALIZED"), "%s", amp_last_error());
    coc_fail_blas("cublasLtMatmul", 1, CUBLAS_STATUS_ALLOC_FAILED);
    CHECK_EQ(run_once(x, &after), AMP_ERR_MEMORY);
}

/* ---- Autotuning */

static std::string autotune_log;
static void autotune_logs(void *, amp_log_level, int, const char *text) { autotune_log += text; }

struct tuning {
    std::string log, file;
    amp_context *amp = NULL;
    float *memory = NULL;

    static void write(void *user, amp_log_level, int id, const char *text) {
        ((tuning *)user)->log += std::to_string(id) + " " + text + "\n";
    }
    explicit tuning(const std::string &path, amp_autotune autotune = AMP_AUTOTUNE_ON) : file(path) {
        amp_desc d = {};
        d.dtype = AMP_F32;
        d.autotune = autotune;
        d.autotune_file = path.empty() ? NULL : file.c_str();
        d.logger.write = write, d.logger.user = this, d.logger.level = AMP_LOG_INFO;
        amp = cuda_context(&d);
        CHECK_OK(amp_alloc(amp, (void **)&memory, 4096 * 4));
        CHECK_OK(amp_fill(amp, memory, 0, 4096 * 4));
    }
    ~tuning() { close(); }
    tuning(const tuning &) = delete;
    void close() {
        if (amp) amp_free(amp, memory), amp_close(amp);
        amp = NULL;
    }
    /* c[16, 8] of ones, k = 40; returns whether it is k everywhere. */
    bool product() {
        std::vector<float> ones(960, 1.0f), c(128);
        float *a = memory, *b = memory + 640, *out = memory + 2048;
        CHECK_OK(amp_copy(amp, a, ones.data(), 960 * 4, AMP_COPY_TO_DEVICE));
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 16, 8, 40, 1, a, 40, b, 8, 0, out, 8));
        CHECK_OK(amp_copy(amp, c.data(), out, 128 * 4, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
        for (float v : c)
            if (v != 40) return false;
        return true;
    }
    bool logged(const char *text) const { return log.find(text) != std::string::npos; }
};

static bool fused(const taken &t) { return t.launches == 0 && t.matmuls == 1; }
static bool in_parts(const taken &t) { return t.launches == 1 && t.matmuls == 1; }

static const gemm_case gelu_gradient = {"gelu gradient", 24, 40, 32, 1, 0, 0, AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16, 1, 0, AMP_DTYPE_DEFAULT,
                                        AMP_ACT_GELU, AMP_BF16, 1};
static const gemm_case weight_gradient = {"weight gradient", 24, 40, 32, 1, 1, 0, AMP_BF16, AMP_BF16, AMP_F32, AMP_BF16, 1, 0,
                                          AMP_DTYPE_DEFAULT, AMP_ACT_NONE, AMP_DTYPE_DEFAULT, 0, AMP_DTYPE_DEFAULT, AMP_F32};

/* Without autotuning nothing is measured, however slow an epilogue is, so that every run has the same bits: GELU's gradient
   is fused, sums of rows are taken apart, and so is what is refused.  A captured stream does the same. */
CUDA_TEST(epilogues_without_autotune) {
    const gemm_case *cases[] = {&gelu_gradient, &weight_gradient};
    const amp_backend *b = amp_cuda();
    for (const gemm_case *x : cases) {
        amp_backend_desc d = {};
        void *dev = NULL, *graph = NULL;
        std::string right, out;
        coc_reset();
        coc_set_modelled_clock(1);
        CHECK_EQ(run_once(*x, &right), AMP_OK);
        for (double more : {0.0, 50.0}) {
            coc_set_blas_epilogue_time(more);
            CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
            for (int turn = 0; turn < 2; turn++) {
                taken t = take(dev, *x, NULL);
                CHECK_MSG(x == &gelu_gradient ? fused(t) : in_parts(t), "%s, %g us: %ld, %ld", x->name, more, t.launches, t.matmuls);
            }
            CHECK_EQ(b->plans_save(dev, NULL, 0), 0);
            b->close(dev);
        }
        CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
        {
            cuda_side memory(b);
            gemm_arguments args(memory, *x);
            memory.sync();
            coc_reset_counts();
            CHECK_EQ(b->graph_begin(dev, NULL), AMP_OK);
            CHECK_EQ(b->gemm(dev, &args.g, NULL), AMP_OK);
            CHECK_EQ(b->graph_end(dev, NULL, &graph), AMP_OK);
            CHECK(coc_count().blas_matmuls == 1 && coc_count().launches == (x == &weight_gradient));
            CHECK_EQ(b->graph_launch(dev, graph, NULL), AMP_OK);
            CHECK_EQ(b->stream_sync(dev, NULL), AMP_OK);
            b->graph_destroy(dev, graph);
        }
        b->close(dev);
        coc_set_blas_lacks(x == &gelu_gradient ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_BGRADB);
        CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
        CHECK(in_parts(take(dev, *x, &out)) && in_parts(take(dev, *x, NULL)));
        cuda_compare both = {right, out, ""};
        gemm_bounds bounds(*x);
        both.check_within(0, x->c, x->m * x->n, [&](int64_t i, double value) {
            return 2 * bounds.c[(size_t)i] + cuda_spacing(x->c, fabs(value) + bounds.c[(size_t)i]);
        }, x->name);
        coc_set_blas_lacks(-1);
        b->close(dev);
    }
}

/* Partial sums of a split k are kept in fp32.  Those in c's dtype are allowed only where that is fp32, and those that are
   added to c itself never, because they need not repeat.  Then the fastest is taken, and has the same bits each time. */
CUDA_TEST(split_sums_stay_in_fp32) {
    static const gemm_case cases[] = {
        {"fp32", 24, 40, 32},
        {"tf32 with a bias", 24, 40, 32, 1, 0, 1, AMP_F32, AMP_F32, AMP_F32, AMP_TF32, 1, 0, AMP_F32},
        {"bf16 into fp32", 24, 40, 32, 1, 1, 0, AMP_BF16, AMP_BF16, AMP_F32, AMP_BF16},
        {"bf16", 24, 40, 32, 1, 0, 1, AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16},
        {"fp16", 24, 40, 32, 1, 0, 1, AMP_F16, AMP_F16, AMP_F16, AMP_F16},
    };
    for (const gemm_case &x : cases)
        for (int autotune = 0; autotune < 2; autotune++) {
            amp_backend_desc d = {};
            void *dev = NULL;
            coc_reset();
            coc_set_modelled_clock(1);
            coc_set_blas_time(COC_BLAS_ROUNDED, 1);
            d.autotune = autotune;
            CHECK_EQ(amp_cuda()->open(&dev, cuda_host(), &d), AMP_OK);
            std::string first, again;
            (void)take(dev, x, &first);
            CHECK_EQ(coc_blas_schemes(), x.c == AMP_F32 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE
                                                        : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
            coc_reset_counts();
            (void)take(dev, x, &again);
            CHECK_MSG(first == again, "%s", x.name);
            CHECK_MSG((coc_kernel_launches("cublasLt rounded") > 0) == (autotune && x.c == AMP_F32), "%s", x.name);
            amp_cuda()->close(dev);
        }
}

/* Products that take the GPU less than a launch takes the host are still told apart. */
CUDA_TEST(autotune_measures_the_gpu) {
    for (double launch : {0.0, 6.0}) {
        coc_reset();
        coc_set_modelled_clock(1);
        coc_set_launch_time(launch);
        coc_set_blas_time(COC_BLAS_WIDE, 4);
        coc_set_blas_time(COC_BLAS_NARROW, 3);
        {
            tuning t("");
            CHECK(t.product());
            CHECK_MSG(t.logged("algorithm 3 of 5, 3.00 us"), "%s", t.log.c_str());
        }
    }
}

CUDA_TEST(autotune_takes_the_fastest) {
    coc_set_modelled_clock(1);
    {
        tuning t("");
        CHECK(t.product());
        CHECK_MSG(t.logged("algorithm 0 of 5, 10.00 us"), "%s", t.log.c_str());
    }
    coc_set_blas_time(COC_BLAS_NARROW, 5);
    tuning t("");
    CHECK(t.product());
    CHECK_MSG(t.logged("algorithm 3 of 5, 5.00 us"), "%s", t.log.c_str());
    coc_reset_counts();
    CHECK(t.product());
    CHECK(coc_count().blas_heuristics == 0 && coc_count().blas_matmuls == 1);
    t.close();
    coc_set_blas_time(COC_BLAS_NARROW, 9.9);            /* too little to leave the first */
    tuning same("");
    CHECK(same.product());
    CHECK_MSG(same.logged("algorithm 0 of 5"), "%s", same.log.c_str());
}

/* Algorithms take turns, so that none is timed on a colder GPU than the others: here each product takes longer than the one
   before, by 0.1%, and the heuristic's first algorithm, which is timed first, is 5% slower than the last. */
CUDA_TEST(autotune_takes_turns) {
    coc_set_modelled_clock(1);
    for (double drift : {0.0, 0.001}) {
        coc_set_blas_time(COC_BLAS_NARROW, 9.5);
        coc_set_blas_drift(drift);
        tuning t("");
        CHECK(t.product());
        CHECK_MSG(t.logged("algorithm 3 of 5"), "drift %g: %s", drift, t.log.c_str());
    }
}

/* Algorithms are timed on numbers that draw as much power as those of a training, and compared on whole numbers. */
CUDA_TEST(autotune_draws_power) {
    coc_set_modelled_clock(1);
    coc_set_blas_time(COC_BLAS_NARROW, 5);
    coc_set_blas_power(COC_BLAS_NARROW, 10);
    tuning t("");
    CHECK(t.product());
    CHECK_MSG(t.logged("algorithm 0 of 5, 10.00 us"), "%s", t.log.c_str());
}

/* The rounds of a product take about a quarter of a second: long products have fewer of them. */
CUDA_TEST(autotune_is_brief) {
    const struct { double us; const char *rounds; long matmuls; } cases[] = {
        {10, "7 rounds", 10 + 8 * 4 * 5}, {9000, "5 rounds", 10 + 4 * 5 + 5 * 5}, {300000, "3 rounds", 10 + 4 * 5 + 3 * 5}};
    coc_set_modelled_clock(1);
    for (const auto &x : cases) {
        for (int i = 0; i < COC_BLAS_ALGORITHMS; i++) coc_set_blas_time((coc_blas_algorithm)i, x.us);
        tuning t("");
        coc_reset_counts();
        CHECK(t.product());
        CHECK_MSG(t.logged(x.rounds), "%g us: %s", x.us, t.log.c_str());
        CHECK_EQ(coc_count().blas_matmuls, x.matmuls + 1);
    }
}

/* The log says once what was chosen for a shape, with the algorithm's attributes as cuBLASLt tells them, and whether the
   epilogue, which may be a bias gradient, is fused. */
CUDA_TEST(autotune_logs_its_choice) {
    const struct { const gemm_case *x; double more; const char *says; } cases[] = {
        {&gelu_gradient, 0, "c[24, 40] of k = 32, batch 1, NN of bf16 and bf16 into bf16 by bf16, epilogue DGELU: algorithm 0 of 4, "
                            "10.00 us (id 0, split 1, reduction 0, 7 rounds); epilogue fused, apart: 15.00 us"},
        {&weight_gradient, 0, "c[24, 40] of k = 32, batch 1, TN of bf16 and bf16 into fp32 by bf16, epilogue BGRADB: algorithm 0 of 5, "
                              "10.00 us (id 0, split 1, reduction 0, 7 rounds); bias gradient fused, apart: 15.00 us"},
        {&weight_gradient, 50, "epilogue BGRADB: algorithm 0 of 5, 60.00 us (id 0, split 1, reduction 0, 7 rounds); bias gradient apart: "
                               "15.00 us"},
    };
    for (const auto &c : cases) {
        amp_backend_desc d = {};
        amp_host host = *cuda_host();
        void *dev = NULL;
        coc_reset();
        coc_set_modelled_clock(1);
        coc_set_blas_epilogue_time(c.more);
        autotune_log.clear();
        host.log = autotune_logs;
        d.autotune = 1;
        CHECK_EQ(amp_cuda()->open(&dev, &host, &d), AMP_OK);
        (void)take(dev, *c.x, NULL);
        CHECK_MSG(autotune_log.find(c.says) != std::string::npos, "%s: %s", c.says, autotune_log.c_str());
        autotune_log.clear();
        (void)take(dev, *c.x, NULL);
        CHECK_MSG(autotune_log.empty(), "%s", autotune_log.c_str());
        amp_cuda()->close(dev);
    }
}

/* An algorithm that loses the end of k is not used, even if the heuristic names it first. */
CUDA_TEST(autotune_finds_wrong_algorithms) {
    coc_set_modelled_clock(1);
    coc_set_blas_wrong(COC_BLAS_WIDE);
    {
        tuning t("", AMP_AUTOTUNE_OFF);
        CHECK(!t.product());        /* the model is wrong indeed */
    }
    tuning t("");
    CHECK(t.product());
    CHECK_MSG(t.logged("5002 amp_cuda: autotune: c[16, 8] of k = 40, batch 1, NN of fp32 and fp32 into fp32 by fp32, epilogue DEFAULT: "
                       "algorithm 0 of cuBLASLt gives wrong results"), "%s", t.log.c_str());
    CHECK_MSG(t.logged("algorithm 1 of 5, 12.00 us"), "%s", t.log.c_str());
}

/* An epilogue that takes longer than a kernel of ours is left to that. */
CUDA_TEST(autotune_times_epilogues) {
    const gemm_case gelu = {"gelu", 16, 24, 32, 1, 0, 1, AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16, 1, 0, AMP_BF16, AMP_ACT_GELU, AMP_BF16};
    const gemm_case weight = {"weight", 24, 32, 16, 1, 1, 0, AMP_BF16, AMP_BF16, AMP_F32, AMP_BF16, 1, 1, AMP_DTYPE_DEFAULT, AMP_ACT_NONE,
                              AMP_DTYPE_DEFAULT, 0, AMP_DTYPE_DEFAULT, AMP_F32, 1};
    const gemm_case *cases[] = {&gelu, &weight};
    coc_set_modelled_clock(1);
    for (double more : {0.0, 50.0})
        for (const gemm_case *x : cases) {
            amp_backend_desc d = {};
            void *dev = NULL;
            std::string right, out;
            coc_set_blas_epilogue_time(more);
            CHECK_EQ(run_once(*x, &right), AMP_OK);
            d.autotune = 1;
            CHECK_EQ(amp_cuda()->open(&dev, cuda_host(), &d), AMP_OK);
            {
                cuda_side memory(amp_cuda());
                gemm_arguments args(memory, *x);
                memory.sync();
                CHECK_EQ(amp_cuda()->gemm(dev, &args.g, NULL), AMP_OK);
                CHECK_EQ(amp_cuda()->stream_sync(dev, NULL), AMP_OK);
                args.get(memory, &out);
                cuda_compare both = {right, out, ""};
                gemm_bounds bounds(*x);
                both.check_within(0, x->c, x->m * x->n, [&](int64_t i, double value) {
                    return bounds.c[(size_t)i] + cuda_spacing(x->c, fabs(value) + bounds.c[(size_t)i]);
                }, x->name);
                long launches = coc_count().launches;
                CHECK_EQ(amp_cuda()->gemm(dev, &args.g, NULL), AMP_OK);
                CHECK_EQ(coc_count().launches - launches, more > 0 || x == &weight);     /* one adds the sums to what is there */
                CHECK_EQ(amp_cuda()->stream_sync(dev, NULL), AMP_OK);
            }
            amp_cuda()->close(dev);
        }
}

/* Memory that does not suffice for measuring leaves the heuristic's choice; so does any call of CUDA that fails. */
CUDA_TEST(autotune_that_fails) {
    coc_set_modelled_clock(1);
    coc_set_blas_time(COC_BLAS_NARROW, 5);
    for (const char *call : {"cudaMalloc", "cudaMallocAsync", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventElapsedTime"})
        for (int n = 1; n < 30; n += 4) {
            tuning t("");
            coc_fail(call, n, cudaErrorMemoryAllocation);
            bool right = t.product();
            bool happened = !coc_fail_pending();
            coc_fail_clear();
            CHECK_MSG(right, "%s, call %d", call, n);
            if (!happened) break;
        }
}

/* Measures a product of c[16, 8], k = 40, in fp32, whose rows are far apart in a and in c, so that its buffers are large.
   Returns the bytes that this takes beyond the operands.  The log is left in autotune_log. */
static int64_t autotune_takes(int64_t lda, int64_t ldc, bool pools) {
    const amp_backend *b = amp_cuda();
    amp_backend_desc d = {};
    amp_host host = *cuda_host();
    amp_k_gemm g = {};
    amp_memory_info before = {}, after = {};
    cudaStream_t other = NULL;
    void *dev = NULL;
    bool ran = false;
    coc_set_pools(pools);
    autotune_log.clear();
    host.log = autotune_logs;
    d.autotune = 1;
    CHECK_EQ(b->open(&dev, &host, &d), AMP_OK);
    CHECK_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    {
        cuda_side memory(b);
        g.m = 16, g.n = 8, g.k = 40, g.batch = 1, g.alpha = 1;
        g.a = memory.room((size_t)(15 * lda + 40) * 4), g.b = memory.room(40 * 8 * 4), g.c = memory.room((size_t)(15 * ldc + 8) * 4);
        g.a_dtype = g.b_dtype = g.c_dtype = g.compute = AMP_F32;
        g.lda = lda, g.ldb = 8, g.ldc = ldc;
        CHECK_EQ(cudaLaunchHostFunc(other, [](void *user) { *(bool *)user = true; }, &ran), cudaSuccess);
        CHECK_EQ(b->memory(dev, &before), AMP_OK);
        CHECK_EQ(b->gemm(dev, &g, NULL), AMP_OK);
        CHECK_EQ(b->stream_sync(dev, NULL), AMP_OK);
        CHECK_EQ(b->memory(dev, &after), AMP_OK);
        CHECK_MSG(ran == !pools, "measuring %s for another stream's work", ran ? "waits" : "does not wait");
        CHECK_MSG(after.reserved == before.reserved, "%lld bytes more reserved", (long long)(after.reserved - before.reserved));
        CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    b->close(dev);
    CHECK_EQ(cudaStreamDestroy(other), cudaSuccess);
    return after.peak;
}
/* Its buffers take at most a quarter of the GPU's memory, besides what any product takes.  It has large inputs once, and
   gives its memory back without waiting for other streams, unless CUDA cannot.  In rows of 2^21 numbers, a and c have 126 MB
   each. */
CUDA_TEST(autotune_memory) {
    const int64_t row = (int64_t)1 << 21, matrix = 15 * row * 4, quarter = (int64_t)1 << 28, others = 33 << 20;
    auto logged = [](const char *text) { return autotune_log.find(text) != std::string::npos; };
    coc_set_modelled_clock(1);
    for (bool pools : {true, false}) {
        int64_t inputs = autotune_takes(row, 8, pools);
        CHECK_MSG(inputs > matrix && inputs < matrix * 3 / 2, "large inputs: %lld bytes", (long long)inputs);
        CHECK_MSG(logged("algorithm 0 of 5"), "%s", autotune_log.c_str());
    }
    int64_t outputs = autotune_takes(40, row, true);
    CHECK_MSG(outputs > 2 * matrix && outputs <= quarter + others, "large results: %lld bytes", (long long)outputs);
    CHECK_MSG(logged("algorithm 0 of 5"), "%s", autotune_log.c_str());
    int64_t refused = autotune_takes(40, 2 * row, true);
    CHECK_MSG(refused < matrix, "too large results: %lld bytes", (long long)refused);
    CHECK_MSG(logged("not measured, for lack of memory"), "%s", autotune_log.c_str());
    coc_set_pools(1);
}

/* Whatever is chosen is right: this one runs on a GPU too. */
CUDA_TEST(autotune_is_right) {
    const amp_dtype h = AMP_BF16, no = AMP_DTYPE_DEFAULT;
    static const gemm_case cases[] = {
        {"linear", 24, 40, 32, 1, 0, 1, h, h, h, h, 1, 0, h},
        {"gelu", 24, 40, 32, 1, 0, 1, h, h, h, h, 1, 0, h, AMP_ACT_GELU, h},
        {"gelu backward", 24, 40, 32, 1, 0, 0, h, h, h, h, 1, 0, no, AMP_ACT_GELU, h, 1},
        {"weight gradient", 24, 40, 32, 1, 1, 0, h, h, AMP_F32, h, 1, 1, no, AMP_ACT_NONE, no, 0, no, AMP_F32, 1},
        {"a batch in fp32", 9, 17, 20, 3, 0, 0, AMP_F32, AMP_F32, AMP_F32, AMP_F32},
        {"a bias in fp32", 24, 40, 48, 1, 0, 1, h, h, h, h, 1, 0, AMP_F32},
        {"its bf16 copy", 24, 40, 64, 1, 0, 1, h, h, h, h, 1, 0, AMP_F32},
        {"a bias of odd address", 24, 40, 80, 1, 0, 1, h, h, h, h, 1, 0, h},
        {"sums of odd address", 24, 40, 96, 1, 1, 0, h, h, AMP_F32, h, 1, 1, no, AMP_ACT_NONE, no, 0, no, AMP_F32, 1},
    };
    amp_backend_desc d = {};
    void *dev = NULL, *again = NULL;
    d.autotune = 1;
    amp_host host = *cuda_host();
    host.log = autotune_logs;
    CHECK_EQ(amp_cuda()->open(&dev, &host, &d), AMP_OK);
    CHECK_EQ(amp_cuda()->open(&again, cuda_host(), &d), AMP_OK);
    for (const gemm_case &x : cases) {
        gemm_bounds bounds(x);
        cuda_compare both;
        cuda_side cpu(amp_cpu()), gpu(amp_cuda());
        gemm_arguments there(cpu, x), here(gpu, x);
        if (strstr(x.name, "odd address")) {
            gemm_case odd = x;
            odd.offset = 1;
            here.vectors(gpu, odd);
        }
        if (strstr(x.name, "copy")) here.g.bias_copy = put_vector(gpu, x, gemm_numbers(x).bias, x.c);
        gpu.sync();
        CHECK_EQ(gemm_parts(cpu.dev, &there.g), AMP_OK);
        autotune_log.clear();
        CHECK_EQ(amp_cuda()->gemm(dev, &here.g, NULL), AMP_OK);
        CHECK_MSG(autotune_log.find("is wrong") == std::string::npos, "%s: %s", x.name, autotune_log.c_str());
        CHECK_EQ(amp_cuda()->stream_sync(dev, NULL), AMP_OK);
        there.get(cpu, &both.expected);
        here.get(gpu, &both.actual);
        both.check_within(0, x.c, x.batch * x.m * x.n, [&](int64_t i, double value) {
            return bounds.c[(size_t)i] + cuda_spacing(x.c, fabs(value) + bounds.c[(size_t)i]);
        }, x.name);
    }
    std::string plans(amp_cuda()->plans_save(dev, NULL, 0), 0), same;
    CHECK(plans.size() > 0 && amp_cuda()->plans_save(dev, &plans[0], plans.size()) == plans.size());
    CHECK_EQ(amp_cuda()->plans_load(again, plans.data(), plans.size()), AMP_OK);
    CHECK_EQ(amp_cuda()->plans_save(again, NULL, 0), 0);
    amp_cuda()->close(dev);
    amp_cuda()->close(again);
}

/* ---- The file */

static std::string plans_path() {
    char name[] = "/tmp/amp_plans_XXXXXX";
    int file = mkstemp(name);
    if (file >= 0) close(file);
    remove(name);
    return name;
}

CUDA_TEST(autotune_file) {
    std::string path = plans_path();
    coc_set_modelled_clock(1);
    coc_set_blas_time(COC_BLAS_NARROW, 5);
    {
        tuning t(path);
        CHECK(t.product());
    }
    coc_set_blas_time(COC_BLAS_NARROW, 50);             /* what it says is believed, not measured again */
    for (amp_autotune autotune : {AMP_AUTOTUNE_ON, AMP_AUTOTUNE_OFF}) {
        tuning t(path, autotune);
        coc_reset_counts();
        CHECK(t.product());
        CHECK(coc_count().blas_heuristics == 0 && coc_calls("cublasLtMatmulAlgoCheck") == 1);
        CHECK_MSG(t.log.empty(), "%s", t.log.c_str());
    }
    coc_set_blas_version(130200);
    {
        tuning t(path, AMP_AUTOTUNE_OFF);
        CHECK_MSG(t.logged("5004 amp_cuda: tuned plans ignored: they are of another version of cuBLASLt, 130100, and this is 130200"), "%s", t.log.c_str());
        CHECK(t.product());
        CHECK(coc_count().blas_heuristics > 0);
    }
    coc_set_blas_version(130100);
    tuning t(path, AMP_AUTOTUNE_OFF);
    CHECK_MSG(t.log.empty(), "nothing new was found, so nothing was written: %s", t.log.c_str());
    t.close();
    remove(path.c_str());
}

/* A file is read on GPUs of the kind that it was made on: the same name, compute capability and number of multiprocessors.
   Elsewhere a warning names both, the products are right, and without autotuning the file stays as it is. */
CUDA_TEST(autotune_file_of_another_gpu) {
    std::string path = plans_path(), before, after;
    const struct { int multiprocessors, capability; const char *says; } others[] = {
        {4, 80, "another kind of GPU, model of compute capability 9.0 with 4 multiprocessors, and this is model of 8.0 with 4"},
        {6, 90, "another kind of GPU, model of compute capability 9.0 with 4 multiprocessors, and this is model of 9.0 with 6"}};
    auto bytes_of = [&](std::string *out) {
        void *data = NULL;
        size_t bytes = 0;
        CHECK_OK(amp_file_read_all(NULL, path.c_str(), &data, &bytes));
        out->assign((char *)data, bytes);
        amp_file_free(NULL, data, bytes);
    };
    coc_set_devices(2);
    coc_set_modelled_clock(1);
    { tuning t(path); CHECK(t.product()); }
    bytes_of(&before);
    for (const auto &other : others) {
        coc_reset();
        coc_set_modelled_clock(1);
        coc_set_devices(2, (size_t)1 << 30, other.multiprocessors, other.capability);
        tuning t(path, AMP_AUTOTUNE_OFF);
        CHECK_MSG(t.logged("5004 amp_cuda: tuned plans ignored: they are of ") && t.logged(other.says), "%s", t.log.c_str());
        CHECK(t.product() && coc_count().blas_heuristics > 0);
        t.close();
        bytes_of(&after);
        CHECK(before == after);
    }
    coc_reset();
    coc_set_devices(1);
    coc_set_modelled_clock(1);
    {
        tuning t(path, AMP_AUTOTUNE_OFF);       /* another GPU of this kind */
        CHECK_MSG(t.log.empty(), "%s", t.log.c_str());
        coc_reset_counts();
        CHECK(t.product() && coc_count().blas_heuristics == 0);
    }
    coc_reset();
    coc_set_devices(2);
    remove(path.c_str());
}

/* A GPU that has another name is another kind. */
CUDA_TEST(autotune_plans_of_another_name) {
    amp_backend_desc d = {};
    amp_host host = *cuda_host();
    void *dev = NULL;
    d.autotune = 1;
    coc_set_modelled_clock(1);
    host.log = autotune_logs;
    CHECK_EQ(amp_cuda()->open(&dev, &host, &d), AMP_OK);
    (void)take(dev, weight_gradient, NULL);
    std::string plans(amp_cuda()->plans_save(dev, NULL, 0), 0);
    CHECK_EQ(amp_cuda()->plans_save(dev, &plans[0], plans.size()), plans.size());
    amp_cuda()->close(dev);
    CHECK_EQ(amp_cuda()->open(&dev, &host, &d), AMP_OK);
    plans[0] = 'M';
    autotune_log.clear();
    CHECK_EQ(amp_cuda()->plans_load(dev, plans.data(), plans.size()), AMP_OK);
    CHECK_MSG(autotune_log.find("they are of another kind of GPU, Model of") != std::string::npos, "%s", autotune_log.c_str());
    amp_cuda()->close(dev);
}

/* A damaged file, one that ends early, one of something else: a warning, and training goes on; saved over. */
CUDA_TEST(autotune_file_damaged) {
    std::string path = plans_path();
    coc_set_modelled_clock(1);
    { tuning t(path); CHECK(t.product()); }
    void *data = NULL;
    size_t bytes = 0;
    CHECK_OK(amp_file_read_all(NULL, path.c_str(), &data, &bytes));
    for (size_t at : {(size_t)0, bytes / 2, bytes - 9, bytes}) {
        std::string copy((char *)data, at == bytes ? bytes - 40 : bytes);
        if (at < bytes) copy[at] = (char)(copy[at] ^ 0x20);
        CHECK_OK(amp_file_write_atomic(NULL, path.c_str(), copy.data(), copy.size()));
        {
            tuning t(path);
            CHECK_MSG(t.logged("1002 autotune_file ignored"), "byte %zu: %s", at, t.log.c_str());
            CHECK(t.product());
        }
        tuning again(path);
        CHECK_MSG(again.log.empty(), "%s", again.log.c_str());
    }
    amp_file_free(NULL, data, bytes);
    remove(path.c_str());
    amp_state *state = NULL;
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_state_put(state, "plans", AMP_U8, "short", 5));
    CHECK_OK(amp_state_save(state, path.c_str()));
    amp_state_destroy(state);
    {
        tuning t(path);
        CHECK_MSG(t.logged("5004 amp_cuda: tuned plans ignored: the file ends early"), "%s", t.log.c_str());
    }
    remove(path.c_str());
    tuning t("/no such folder/plans");
    CHECK(t.product() && !t.logged("1002"));
    amp_free(t.amp, t.memory), amp_close(t.amp);
    t.amp = NULL;
    CHECK_MSG(t.logged("1003 autotune_file not written"), "%s", t.log.c_str());
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(layouts_and_dtypes);
    RUN(shapes);
    RUN(distances_without_use);
    RUN(nothing_to_multiply);
    RUN(epilogues_of_the_library);
    RUN(epilogues_of_our_own);
    RUN(products_into_the_kept_input);
    RUN(transposed_copies);
    RUN(transposed_copies_without_memory);
    RUN(sums_with_gaps);
    RUN(refused_products);
    RUN(plans_are_made_once);
    RUN(kept_steps);
    RUN(several_threads);
    RUN(callbacks_may_wait_for_other_threads);
    RUN(the_hosts_handle);
    RUN(captured);
    RUN(workspace);
    RUN(weights_are_cast_once);
    RUN(gradients_are_cast_once);
    RUN(gradients_are_cast_once_in_held_memory);
    RUN(gradients_are_cast_once_captured);
    RUN(failing_calls);
    RUN(epilogues_without_autotune);
    RUN(split_sums_stay_in_fp32);
    RUN(autotune_measures_the_gpu);
    RUN(autotune_takes_the_fastest);
    RUN(autotune_takes_turns);
    RUN(autotune_draws_power);
    RUN(autotune_is_brief);
    RUN(autotune_logs_its_choice);
    RUN(autotune_finds_wrong_algorithms);
    RUN(autotune_times_epilogues);
    RUN(autotune_that_fails);
    RUN(autotune_memory);
    RUN(autotune_is_right);
    RUN(autotune_file);
    RUN(autotune_file_of_another_gpu);
    RUN(autotune_plans_of_another_name);
    RUN(autotune_file_damaged);
    return TEST_END();
}
