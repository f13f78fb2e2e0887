/* t_cuda_fp8.cpp - tests the fp8 products of amp_cuda.cu.  It tests the bits, scales and places of rounded operands, and
 * operands that are rounded once for two products.  Products are compared with the CPU backend, on GPUs whose cuBLASLt has
 * fp8 products and on those where bf16 replaces them. */
#include "test_cuda.h"
#include "../gemm_parts.h"
#include <cublasLt.h>
#include <map>

/* While it lives the model has GPUs of this compute capability. */
struct gpu_kind {
    explicit gpu_kind(int capability, int image = 0) { set(capability, image); }
    ~gpu_kind() { set(90, 0); }
    static void set(int capability, int image) {
        cuda_test_end();
        if (CUDA_IS_MODEL) coc_set_devices(2, (size_t)1 << 30, 4, capability, image);
    }
};

struct recipe { amp_fp8_scaling scaling; amp_dtype dtype; int32_t square; };
static const recipe recipes[] = {
    {AMP_FP8_CURRENT, AMP_E4M3, 0}, {AMP_FP8_CURRENT, AMP_E5M2, 0}, {AMP_FP8_BLOCK, AMP_E4M3, 0}, {AMP_FP8_BLOCK, AMP_E5M2, 0},
    {AMP_FP8_BLOCK, AMP_E4M3, 1}, {AMP_FP8_MX, AMP_E4M3, 0}, {AMP_FP8_MX, AMP_E5M2, 0},
};

static amp_k_fp8 how_of(const recipe &r, amp_k_fp8_slot *slot = NULL) {
    amp_k_fp8 how = {};
    how.dtype = r.dtype, how.scaling = r.scaling, how.square = r.square, how.slot = slot, how.record = slot != NULL;
    return how;
}

/* ---- An operand as it must be: element (outer, k) of `outer` rows, by amp.h's scalar functions */

struct rounded_operand {
    int64_t outer, k;
    std::vector<uint8_t> q;
    std::vector<double> value;      /* with the scales undone */
    std::map<int64_t, uint32_t> amax;       /* of blocks, by place */
    amp_k_fp8_count count = {};
    recipe how;
    float scale = 1;                /* of a tensor */
    int64_t block(int64_t i, int64_t p) const {
        if (how.scaling == AMP_FP8_CURRENT) return 0;
        int64_t size = how.scaling == AMP_FP8_MX ? 32 : 128, row = how.square ? i / 128 : i;
        return row * 4096 + p / size;
    }
    rounded_operand(const recipe &r, const std::function<float(int64_t, int64_t)> &x, int64_t n, int64_t depth)
        : outer(n), k(depth), q((size_t)(n * depth)), value((size_t)(n * depth)), how(r) {
        for (int64_t i = 0; i < n; i++)
            for (int64_t p = 0; p < k; p++) {
                uint32_t bits = ampi_bits_f32(x(i, p)) & 0x7fffffffu, &most = amax[block(i, p)];
                most = most > bits ? most : bits;
            }
        if (r.scaling == AMP_FP8_CURRENT) scale = ampi_fp8_scale(amax[0], r.dtype);
        for (int64_t i = 0; i < n; i++)
            for (int64_t p = 0; p < k; p++) element((size_t)(i * k + p), x(i, p), amax[block(i, p)]);
    }
    double inverse(uint32_t most) const {       /* of a block */
        if (how.scaling == AMP_FP8_CURRENT) return (double)ampi_inverse(scale);
        if (how.scaling == AMP_FP8_BLOCK) return 1 / (double)ampi_fp8_block_scale(most, how.dtype);
        int e = ampi_fp8_mx_scale(most, how.dtype);
        return e == 255 ? NAN : ldexp(1, e - 127);
    }
    void element(size_t at, float x, uint32_t most) {
        double undo = inverse(most);
        float by = how.scaling == AMP_FP8_CURRENT ? scale : (float)(1 / undo), y = x * by;
        bool bad = !isfinite(x) || y != y, e4m3 = how.dtype == AMP_E4M3;
        float from = !isfinite(x) ? x : y != y ? ampi_f32_of_bits(0x7fc00000u) : y;
        q[at] = e4m3 ? amp_e4m3_from_f32(from, isfinite(x)) : amp_e5m2_from_f32(from, isfinite(x));
        float back = e4m3 ? amp_f32_from_e4m3(q[at]) : amp_f32_from_e5m2(q[at]);
        float open = e4m3 ? amp_f32_from_e4m3(amp_e4m3_from_f32(from, 0)) : amp_f32_from_e5m2(amp_e5m2_from_f32(from, 0));
        value[at] = (double)back * undo;
        count.values++, count.nonfinite += bad, count.saturated += !bad && !isfinite(open);
        count.underflowed += !bad && x != 0 && back == 0;
    }
};

/* ---- The bits and places of rounded operands: what gemm_pack leaves */

static int64_t filled(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static bool is_nan(amp_dtype dtype, uint8_t x) { return (x & 0x7f) > (dtype == AMP_E4M3 ? 0x7e : 0x7c); }

/* What cuBLASLt is given: numbers with k contiguous, filled up with zeros; at `head` what undoes a tensor's scale; then the
   scales of blocks as t_cublas's model reads them. */
static void check_packed(const rounded_operand &right, const std::string &packed) {
    const recipe &r = right.how;
    int64_t k = filled(right.k, r.scaling == AMP_FP8_MX ? 32 : 16), outer = filled(right.outer, 16), wrong = 0, scales_wrong = 0;
    size_t head = (size_t)filled(outer * k, 256), scales = head + 256;
    float inverse;
    for (int64_t i = 0; i < outer; i++)
        for (int64_t p = 0; p < k; p++) {
            bool inside = i < right.outer && p < right.k;
            uint8_t is = (uint8_t)packed[(size_t)(i * k + p)], want = inside ? right.q[(size_t)(i * right.k + p)] : 0;
            wrong += is != want && (CUDA_IS_MODEL || !is_nan(r.dtype, is) || !is_nan(r.dtype, want));    /* a GPU widens NaN without its sign */
        }
    CHECK_MSG(wrong == 0, "%lld numbers differ", (long long)wrong);
    memcpy(&inverse, packed.data() + head, 4);
    CHECK(inverse == (r.scaling == AMP_FP8_CURRENT ? ampi_inverse(right.scale) : 1.0f));
    int64_t tiles = (k + 127) / 128, padded = filled(tiles, 4);
    for (const auto &entry : right.amax) {
        int64_t i = entry.first / 4096, b = entry.first % 4096;
        float found = 0;
        if (r.scaling == AMP_FP8_CURRENT) continue;
        if (r.scaling == AMP_FP8_MX) {
            int e = (unsigned char)packed[scales + (size_t)((i / 128 * tiles + b / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + b % 4)];
            scales_wrong += e != ampi_fp8_mx_scale(entry.second, r.dtype);
            continue;
        }
        memcpy(&found, packed.data() + scales + (size_t)(r.square ? i * padded + b : b * outer + i) * 4, 4);
        scales_wrong += (double)found != right.inverse(entry.second);
    }
    CHECK_MSG(scales_wrong == 0, "%lld scales differ", (long long)scales_wrong);
}

/* Numbers of all sizes; every kind of special number in places apart. */
static std::vector<float> hostile(int64_t n, uint64_t seed, bool special) {
    std::vector<float> x = cuda_random(n, seed);
    for (int64_t i = 0; i < n; i++) x[(size_t)i] *= ldexpf(1, (int)(amp_random_u32(seed + 1, (uint64_t)i) % 24) - 16);
    if (!special) return x;
    static const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0, -0.0f, 1e-40f, 3e38f, -3e38f, 1e-30f};
    for (size_t i = 0; i < sizeof odd / sizeof *odd && n > 0; i++) x[(size_t)((int64_t)(i * 977 + 13) % n)] = odd[i];
    return x;
}

static void check_rounding(const recipe &r, amp_dtype dtype, int64_t k, int64_t n, int64_t pad, bool trans_b, bool special) {
    const int64_t rows = trans_b ? n : k, cols = trans_b ? k : n;
    std::string stored = cuda_stored(hostile(rows * cols, 5, special), dtype);
    rounded_operand right(r, [&](int64_t i, int64_t p) {
        return (float)cuda_value(stored.data(), dtype, (size_t)(trans_b ? i * cols + p : p * cols + i));
    }, n, k);
    std::string packed, orders = coc_every_order([&](std::string *out) {
        cuda_side s(amp_cuda());
        amp_k_fp8_slot none = {}, *slot = (amp_k_fp8_slot *)s.put(&none, sizeof none), found;
        amp_k_fp8 how = how_of(r, slot);
        amp_mat b = s.put_matrix(stored.data(), dtype, rows, cols, cols + pad);
        amp_k_pack pack = {};
        pack.b = b.data, pack.b_dtype = dtype, pack.compute = AMP_FP8, pack.trans_b = trans_b, pack.k = k, pack.n = n, pack.ldb = b.ld;
        pack.fp8 = &how;
        size_t bytes = s.backend->gemm_pack_size(s.dev, &pack);
        void *to = s.room(bytes);
        CHECK_OK(s.backend->gemm_pack(s.dev, &pack, to, NULL));
        s.get(out, to, bytes);
        packed = *out;
        s.read(&found, slot, sizeof found);
        CHECK(memcmp(&found.now, &right.count, sizeof found.now) == 0);
    });
    CHECK_MSG(orders.empty(), "%s", orders.c_str());
    check_packed(right, packed);
}

static void check_roundings() {
    static const struct { int64_t k, n, pad; } shapes[] = {{256, 128, 0}, {1, 1, 0}, {33, 19, 0}, {200, 150, 8}, {140, 260, 3}};
    static const amp_dtype dtypes[] = {AMP_BF16, AMP_F32, AMP_F16};
    int which = 0;
    for (const recipe &r : recipes)
        for (const auto &shape : shapes)
            for (int trans = 0; trans < 2; trans++, which++) {
                check_rounding(r, dtypes[which % 3], shape.k, shape.n, shape.pad, trans != 0, false);
                if (ampt.failures) {
                    CHECK_MSG(0, "scaling %d, %s, k %lld, n %lld, trans %d", (int)r.scaling, amp_dtype_name(r.dtype), (long long)shape.k,
                              (long long)shape.n, trans);
                    return;
                }
            }
    for (const recipe &r : recipes)
        for (amp_dtype dtype : dtypes) check_rounding(r, dtype, 130, 70, 0, true, true);
}

CUDA_TEST(rounding) { check_roundings(); }
/* The same bits without the instruction. */
CUDA_TEST(rounding_without_instructions) {
    gpu_kind old(90, 80);
    check_roundings();
}

/* ---- Products */

struct product {
    const char *name;
    int64_t m, n, k;
    int trans_a = 0, trans_b = 1;
    amp_dtype a = AMP_BF16, b = AMP_BF16, c = AMP_BF16;
    float alpha = 1, beta = 0;
    amp_dtype bias = AMP_DTYPE_DEFAULT;
    amp_activation_kind act = AMP_ACT_NONE;
    amp_dtype pre = AMP_DTYPE_DEFAULT;
    int backward = 0;
    amp_dtype row_sum = AMP_DTYPE_DEFAULT;
    int64_t pad = 0;
    int packed = 0;
    int fused = 0;              /* 1: cuBLASLt's epilogue does it all, if scales are of tensors */
};
static const product products[] = {
    {"forward", 48, 64, 96},
    {"forward, odd", 33, 19, 70},
    {"forward, packed, bias", 40, 72, 128, 0, 1, AMP_BF16, AMP_F32, AMP_BF16, 1, 0, AMP_F32, AMP_ACT_NONE, AMP_DTYPE_DEFAULT, 0, AMP_DTYPE_DEFAULT, 0, 1, 1},
    {"forward, gelu", 32, 48, 160, 0, 1, AMP_F32, AMP_F32, AMP_BF16, 1, 0, AMP_BF16, AMP_ACT_GELU, AMP_BF16},
    {"one row", 1, 40, 64},
    {"input's gradient", 48, 96, 64, 0, 0, AMP_BF16, AMP_BF16, AMP_BF16},
    {"input's gradient through gelu", 34, 80, 48, 0, 0, AMP_BF16, AMP_BF16, AMP_BF16, 1, 0, AMP_DTYPE_DEFAULT, AMP_ACT_GELU, AMP_BF16, 1},
    {"weight's gradient, added", 64, 96, 48, 1, 0, AMP_BF16, AMP_BF16, AMP_F32, 1, 1, AMP_DTYPE_DEFAULT, AMP_ACT_NONE, AMP_DTYPE_DEFAULT, 0, AMP_F32},
    {"weight's gradient, odd", 45, 37, 51, 1, 0, AMP_F32, AMP_F16, AMP_F32, 0.5f, 0, AMP_DTYPE_DEFAULT, AMP_ACT_NONE, AMP_DTYPE_DEFAULT, 0, AMP_DTYPE_DEFAULT, 5},
    {"blocks and parts of them", 144, 160, 272, 0, 1, AMP_BF16, AMP_BF16, AMP_F32},
    {"long k", 16, 16, 4112, 0, 1, AMP_BF16, AMP_BF16, AMP_F32},
    {"forward, bias, added", 32, 56, 64, 0, 1, AMP_BF16, AMP_BF16, AMP_F16, 0.5f, 1, AMP_F16, AMP_ACT_NONE, AMP_DTYPE_DEFAULT, 0, AMP_DTYPE_DEFAULT, 0, 0, 1},
    {"forward, bias of an fp32 result", 32, 56, 64, 0, 1, AMP_BF16, AMP_BF16, AMP_F32, 1, 0, AMP_F32},
    {"forward, relu", 48, 32, 64, 0, 1, AMP_BF16, AMP_BF16, AMP_F16, 1, 0, AMP_F32, AMP_ACT_RELU, AMP_DTYPE_DEFAULT, 0, AMP_DTYPE_DEFAULT, 0, 0, 1},
    {"forward, gelu, input not kept", 48, 40, 96, 0, 1, AMP_BF16, AMP_BF16, AMP_BF16, 1, 0, AMP_BF16, AMP_ACT_GELU, AMP_DTYPE_DEFAULT, 0, AMP_DTYPE_DEFAULT, 0, 0, 1},
    {"k is 0", 16, 16, 0, 0, 1, AMP_BF16, AMP_BF16, AMP_F32, 1, 1},
};

struct product_numbers {
    std::string a, b, c, bias, pre, sum;
    explicit product_numbers(const product &x)
        : a(cuda_stored(hostile(x.m * x.k, 1, false), x.a)), b(cuda_stored(hostile(x.n * x.k, 3, false), x.b)),
          c(cuda_stored(cuda_random(x.m * x.n, 7), x.c)), bias(cuda_stored(cuda_random(x.n, 8), x.bias ? x.bias : AMP_F32)),
          pre(cuda_stored(cuda_random(x.m * x.n, 9, -4, 4), x.pre ? x.pre : AMP_F32)), sum(cuda_stored(cuda_random(x.m, 10), AMP_F32)) {}
};

/* Operand a or b of a product, as it must be. */
static rounded_operand right_operand(const product &x, const product_numbers &in, const recipe &r, bool b) {
    const int64_t outer = b ? x.n : x.m;
    const bool along = b ? x.trans_b != 0 : x.trans_a == 0;
    const std::string &data = b ? in.b : in.a;
    const amp_dtype dtype = b ? x.b : x.a;
    return rounded_operand(r, [&, outer, along](int64_t i, int64_t p) {
        return (float)cuda_value(data.data(), dtype, (size_t)(along ? i * x.k + p : p * outer + i));
    }, outer, x.k);
}

/* c, pre, row sums and counts of one product. */
static void run_product(cuda_side &s, const product &x, const recipe *r, std::string *out) {
    product_numbers in(x);
    amp_k_fp8_slot none = {}, *slot[2];
    amp_k_fp8 how[2];
    amp_k_gemm g = {};
    for (int i = 0; i < 2; i++) slot[i] = (amp_k_fp8_slot *)s.put(&none, sizeof none), how[i] = how_of(r[i], slot[i]);
    amp_mat a = s.put_matrix(in.a.data(), x.a, x.trans_a ? x.k : x.m, x.trans_a ? x.m : x.k, (x.trans_a ? x.m : x.k) + x.pad);
    amp_mat b = s.put_matrix(in.b.data(), x.b, x.trans_b ? x.n : x.k, x.trans_b ? x.k : x.n, (x.trans_b ? x.k : x.n) + x.pad);
    amp_mat c = s.put_matrix(in.c.data(), x.c, x.m, x.n, x.n + x.pad), pre = {};
    g.m = x.m, g.n = x.n, g.k = x.k, g.batch = 1, g.a = a.data, g.b = b.data, g.c = c.data;
    g.a_dtype = x.a, g.b_dtype = x.b, g.c_dtype = x.c, g.compute = AMP_FP8, g.trans_a = x.trans_a, g.trans_b = x.trans_b;
    g.lda = a.ld, g.ldb = b.ld, g.ldc = c.ld, g.alpha = x.alpha, g.beta = x.beta, g.act = x.act, g.backward = x.backward;
    g.fp8[0] = &how[0], g.fp8[1] = &how[1];
    if (x.bias) g.bias = s.put(in.bias.data(), in.bias.size()), g.bias_dtype = x.bias;
    if (x.pre) {
        pre = s.put_matrix(x.backward ? in.pre.data() : NULL, x.pre, x.m, x.n, x.n);
        g.pre = pre.data, g.pre_dtype = x.pre, g.ld_pre = pre.ld;
    }
    void *sum = x.row_sum ? s.put(in.sum.data(), in.sum.size()) : NULL;
    if (sum) g.row_sum = {sum, AMP_F32, 1};
    if (x.packed) {
        amp_k_pack pack = {};
        pack.b = b.data, pack.b_dtype = x.b, pack.compute = AMP_FP8, pack.trans_b = x.trans_b, pack.k = x.k, pack.n = x.n, pack.ldb = b.ld;
        pack.fp8 = &how[1];
        void *packed = s.room(s.backend->gemm_pack_size(s.dev, &pack), 0);
        CHECK_OK(s.backend->gemm_pack(s.dev, &pack, packed, NULL));
        g.packed_b = packed;
        how[1].record = 0;
    }
    CHECK_OK(s.gpu ? s.backend->gemm(s.dev, &g, NULL) : gemm_parts(s.dev, &g));
    s.get_matrix(out, c);
    if (x.pre) s.get_matrix(out, pre);
    if (sum) s.get(out, sum, in.sum.size());
    for (int i = 0; i < 2; i++) s.get(out, &slot[i]->now, sizeof none.now);
}

/* Sums of k terms in another order, and with blocks times their scales before; then four roundings more.  Activations' slopes
   are at most 1.13, and their exponentials within 16 units.  A GPU's products of fp8: see blas_linear in cublas_rules.h. */
static void check_product(const product &x, const recipe *r, const cuda_compare &c) {
    product_numbers in(x);
    rounded_operand a = right_operand(x, in, r[0], false), b = right_operand(x, in, r[1], true);
    auto off = [&](int64_t at) {
        double size = 0;
        for (int64_t p = 0; p < x.k; p++) size += fabs(a.value[(size_t)(at / x.n * x.k + p)] * b.value[(size_t)(at % x.n * x.k + p)]);
        size = size * (double)fabsf(x.alpha) + 2;
        double bias = !x.fused || x.bias != AMP_F32 ? 0 : ldexp(1, x.c == AMP_BF16 ? -9 : -12);     /* rounded like c */
        return cuda_sum_bound(x.k + 3, size) + ldexp(size, CUDA_IS_MODEL ? -21 : -11) + bias;
    };
    auto of_c = [&](int64_t at, double e) {
        double act = x.act == AMP_ACT_NONE ? 0 : ldexp(fabs(e) + 1, -19);
        return 1.13 * off(at) * (x.backward ? 1.13 : 1) + act + cuda_spacing(x.c, e);
    };
    size_t at = c.check_within(0, x.c, x.m * x.n, of_c, x.name);
    if (x.pre) at = c.check_within(at, x.pre, x.m * x.n, [&](int64_t i, double e) { return off(i) + cuda_spacing(x.pre, e); }, "pre");
    if (x.row_sum) at = c.check_within(at, AMP_F32, x.m, [&](int64_t, double) { return cuda_sum_bound(x.k + 2, 2.0 * (double)x.k); }, "sum");
    for (int i = 0; i < 2; i++, at += sizeof(amp_k_fp8_count)) {
        amp_k_fp8_count here, right = i ? b.count : a.count;
        if (x.k == 0) continue;
        CHECK(c.expected.compare(at, sizeof here, c.actual, at, sizeof here) == 0);
        memcpy(&here, c.actual.data() + at, sizeof here);
        CHECK_MSG(memcmp(&here, &right, sizeof here) == 0, "%s: %lld values, %lld saturated, %lld underflowed", x.name, (long long)here.values,
                  (long long)here.saturated, (long long)here.underflowed);
    }
}

/* x or dy, and a weight or x; with E4M3 alone, and with a gradient in E5M2. */
static const recipe pairs[][2] = {
    {{AMP_FP8_CURRENT, AMP_E4M3, 0}, {AMP_FP8_CURRENT, AMP_E4M3, 0}}, {{AMP_FP8_CURRENT, AMP_E5M2, 0}, {AMP_FP8_CURRENT, AMP_E4M3, 0}},
    {{AMP_FP8_BLOCK, AMP_E4M3, 0}, {AMP_FP8_BLOCK, AMP_E4M3, 1}},     {{AMP_FP8_BLOCK, AMP_E5M2, 0}, {AMP_FP8_BLOCK, AMP_E4M3, 0}},
    {{AMP_FP8_MX, AMP_E4M3, 0}, {AMP_FP8_MX, AMP_E4M3, 0}},           {{AMP_FP8_MX, AMP_E5M2, 0}, {AMP_FP8_MX, AMP_E4M3, 0}},
};
enum { PAIRS = sizeof pairs / sizeof *pairs };

/* Whether cuBLASLt multiplies so on a GPU of this kind (its manual, Scaling Mode Support Overview). */
static bool has_products(int capability, amp_fp8_scaling scaling) {
    return scaling == AMP_FP8_BLOCK ? capability == 90 : capability >= (scaling == AMP_FP8_MX ? 100 : 89);
}

CUDA_TEST(products_beside_the_cpu) {
    for (int capability : {90, 75, 89, 100, 120}) {
        if (!CUDA_IS_MODEL && capability != 90) break;  /* the one here */
        gpu_kind kind(capability);
        for (const product &x : products)
            for (const recipe *r : pairs) {
                if (r[1].square && x.trans_a) continue;     /* a weight is no operand of its own gradient */
                coc_reset_counts();
                cuda_compare c = cuda_once_on_both([&](cuda_side &s, std::string *out) { run_product(s, x, r, out); });
                check_product(x, r, c);
                /* the library's products, and not bf16 in their stead */
                if (CUDA_IS_MODEL && x.k > 0)
                    CHECK_MSG((coc_kernel_launches("ampc_fp8_widen_kernel") == 0) == has_products(capability, r->scaling), "%d: %s",
                              capability, x.name);
                bool fused = x.fused && r->scaling == AMP_FP8_CURRENT && has_products(capability, r->scaling);
                if (CUDA_IS_MODEL && x.fused)
                    CHECK_MSG((coc_kernel_launches("ampc_map_kernel") == 0) == fused, "%d: %s", capability, x.name);
            }
    }
}

CUDA_TEST(products_in_every_order) {
    for (const recipe *r : pairs)
        for (const product *x : {&products[2], &products[3], &products[9]}) {
            cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) { run_product(s, *x, r, out); });
            check_product(*x, r, c);
        }
}

/* Infinity and NaN of an operand reach c, so that a scaler sees them. */
CUDA_TEST(special_numbers_reach_the_result) {
    for (int capability : {90, 75, 100}) {
        if (!CUDA_IS_MODEL && capability != 90) break;  /* the one here */
        gpu_kind kind(capability);
        for (const recipe *r : pairs)
            for (float special : {INFINITY, -INFINITY, NAN}) {
                cuda_side s(amp_cuda());
                std::vector<float> a((size_t)32 * 64, 1.0f), b((size_t)32 * 64, 1.0f), c((size_t)32 * 32);
                a[5 * 64 + 7] = special;
                amp_k_fp8 how[2] = {how_of(r[0]), how_of(r[1])};
                amp_k_gemm g = {};
                void *to = s.room(c.size() * 4);
                g.m = g.n = g.ldc = 32, g.k = g.lda = g.ldb = 64, g.batch = 1, g.alpha = 1, g.trans_b = 1;
                g.a = s.put(a), g.b = s.put(b), g.c = to, g.a_dtype = g.b_dtype = g.c_dtype = AMP_F32, g.compute = AMP_FP8;
                g.fp8[0] = &how[0], g.fp8[1] = &how[1];
                CHECK_OK(s.backend->gemm(s.dev, &g, NULL));
                s.read(c.data(), to, c.size() * 4);
                for (int64_t i = 0; i < 32 * 32; i++) CHECK(i / 32 == 5 ? !isfinite(c[(size_t)i]) : c[(size_t)i] == 64);
            }
    }
}

/* Powers of two in the operands only move the result's exponent, whatever that makes of their scales; zeros stay zeros. */
CUDA_TEST(magnitudes_far_apart) {
    enum { SIDE = 32, K = 64 };
    const struct { int a, b; bool anywhere; } shifts[] = {{0, 0, true}, {100, -100, true}, {-100, 100, true}, {-57, -57, false}};
    for (int capability : {90, 75}) {
        if (!CUDA_IS_MODEL && capability != 90) break;  /* the one here */
        gpu_kind kind(capability);
        const recipe current = {AMP_FP8_CURRENT, AMP_E4M3, 0};
        std::vector<float> x = cuda_random(SIDE * K, 3), w = cuda_random(SIDE * K, 5), first((size_t)SIDE * SIDE);
        for (size_t i = 0; i < K; i++) x[i] = 0;
        auto shifted = [](std::vector<float> v, int by) {
            for (float &one : v) one = ldexpf(one, by);
            return v;
        };
        auto multiply = [&](int a, int b) {
            cuda_side s(amp_cuda());
            amp_k_fp8 how[2] = {how_of(current), how_of(current)};
            std::vector<float> c(first.size());
            amp_k_gemm g = {};
            g.m = g.n = g.ldc = SIDE, g.k = g.lda = g.ldb = K, g.batch = 1, g.alpha = 1, g.trans_b = 1;
            void *to = s.room(c.size() * 4);
            g.a = s.put(shifted(x, a)), g.b = s.put(shifted(w, b)), g.c = to;
            g.a_dtype = g.b_dtype = g.c_dtype = AMP_F32, g.compute = AMP_FP8, g.fp8[0] = &how[0], g.fp8[1] = &how[1];
            CHECK_OK(s.backend->gemm(s.dev, &g, NULL));
            s.read(c.data(), to, c.size() * 4);
            return c;
        };
        for (auto &by : shifts) {
            if (capability == 90 && !by.anywhere) continue;
            std::vector<float> c = multiply(by.a, by.b);
            if (by.a == 0) first = c;
            for (size_t i = 0; i < c.size(); i++) CHECK(c[i] == ldexpf(first[i], by.a + by.b));
        }
        if (capability == 90) {         /* the product of the scales is subnormal */
            std::vector<float> c = multiply(-57, -57);
            for (size_t i = 0; i < c.size(); i++)       /* the model flushes nothing */
                CHECK(fabs((double)c[i] - ldexp((double)first[i], -114)) <= K * ldexp(1, CUDA_IS_MODEL ? -132 : -108));
        }
        std::vector<float> c = multiply(100, 100);      /* beyond fp32 */
        for (size_t i = 0; i < c.size(); i++) CHECK(i < SIDE && capability == 75 ? c[i] == 0 : !isfinite(c[i]));
    }
}

/* ---- The two backward products: dy is rounded once, in both directions, where its scale is the tensor's */

CUDA_TEST(gradients_share_dy) {
    enum { ROWS = 48, IN = 64, OUT = 80 };
    const recipe of_dy[] = {{AMP_FP8_CURRENT, AMP_E5M2, 0}, {AMP_FP8_MX, AMP_E5M2, 0}};
    for (const recipe &dy_recipe : of_dy) {
        recipe others = {dy_recipe.scaling, AMP_E4M3, 0};
        std::vector<float> dy = hostile(ROWS * OUT, 3, false), x = cuda_random(ROWS * IN, 4), w = cuda_random(OUT * IN, 5);
        std::string alone, pair;
        for (int together = 0; together < 2; together++) {
            cuda_side s(amp_cuda());
            amp_k_fp8_slot none = {}, *slot = (amp_k_fp8_slot *)s.put(&none, sizeof none), found;
            amp_k_fp8 how[4] = {how_of(dy_recipe, slot), how_of(others), how_of(dy_recipe), how_of(others)};
            amp_k_gemm g[2] = {};
            void *to[2] = {s.room(OUT * IN * 4), s.room(ROWS * IN * 4)};
            for (int i = 0; i < 2; i++) {
                g[i].a = s.put(dy), g[i].b = s.put(i ? w : x), g[i].c = to[i], g[i].batch = 1, g[i].alpha = 1;
                g[i].a_dtype = g[i].b_dtype = g[i].c_dtype = AMP_F32, g[i].compute = AMP_FP8;
                g[i].m = i ? ROWS : OUT, g[i].n = IN, g[i].k = i ? OUT : ROWS, g[i].trans_a = !i;
                g[i].lda = OUT, g[i].ldb = g[i].ldc = IN, g[i].fp8[0] = &how[2 * i], g[i].fp8[1] = &how[2 * i + 1];
            }
            g[1].a = g[0].a;
            if (together) CHECK_OK(s.backend->gemm_reserve(s.dev, g, 2));
            coc_reset_counts();
            for (amp_k_gemm &one : g) CHECK_OK(s.backend->gemm(s.dev, &one, NULL));
            s.sync();
            long launches = dy_recipe.scaling == AMP_FP8_CURRENT ? together ? 6 : 8 : 4;    /* one measures, one rounds */
            if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_fp8_kernel"), launches);
            for (amp_k_gemm &one : g) s.backend->gemm_release(s.dev, &one);
            s.get(together ? &pair : &alone, to[0], OUT * IN * 4), s.get(together ? &pair : &alone, to[1], ROWS * IN * 4);
            s.read(&found, slot, sizeof found);
            CHECK_EQ(found.now.values, ROWS * OUT);
        }
        CHECK(alone == pair);
    }
}

/* ---- Scales, counts and numbers stay on the device: once its memory is there, a product waits for nothing, and a graph repeats
   it with the operands of then */

struct plain_product {
    amp_k_fp8_slot *slot;
    amp_k_fp8 how[2];
    amp_k_gemm g = {};
    plain_product(cuda_side &s, const recipe *r) {
        amp_k_fp8_slot none = {};
        slot = (amp_k_fp8_slot *)s.put(&none, sizeof none);
        how[0] = how_of(r[0], slot), how[1] = how_of(r[1]);
        g.m = g.n = g.ldc = 32, g.k = g.lda = g.ldb = 64, g.batch = 1, g.alpha = 1, g.trans_b = 1;
        g.a = s.put(hostile(32 * 64, 3, false)), g.b = s.put(hostile(32 * 64, 5, false)), g.c = s.room(32 * 32 * 4);
        g.a_dtype = g.b_dtype = g.c_dtype = AMP_F32, g.compute = AMP_FP8, g.fp8[0] = &how[0], g.fp8[1] = &how[1];
    }
};

CUDA_TEST(nothing_waits) {
    for (int capability : {90, 75}) {
        if (!CUDA_IS_MODEL) break;
        gpu_kind kind(capability);
        for (const recipe *r : pairs) {
            cuda_side s(amp_cuda());
            plain_product p(s, r);
            CHECK_OK(s.backend->gemm(s.dev, &p.g, NULL));
            coc_reset_counts();
            CHECK_OK(s.backend->gemm(s.dev, &p.g, NULL));
            CHECK_MSG(coc_count().synchronising == 0, "%s", coc_synchronising_calls().c_str());
        }
    }
}

CUDA_TEST(graphs_repeat_it) {
    for (const recipe *r : pairs) {
        cuda_side s(amp_cuda());
        plain_product p(s, r);
        std::vector<float> other = hostile(32 * 64, 7, false);
        std::string eager, launched;
        void *graph = NULL;
        amp_k_fp8_slot found;
        CHECK_OK(s.backend->gemm(s.dev, &p.g, NULL));
        CHECK_OK(s.backend->graph_begin(s.dev, NULL));
        CHECK_OK(s.backend->gemm(s.dev, &p.g, NULL));
        CHECK_OK(s.backend->graph_end(s.dev, NULL, &graph));
        s.set(const_cast<void *>(p.g.a), other.data(), other.size() * 4);
        CHECK_OK(s.backend->graph_launch(s.dev, graph, NULL));
        s.get(&launched, p.g.c, 32 * 32 * 4);
        s.read(&found, p.slot, sizeof found);
        CHECK_EQ(found.now.values, 2 * 32 * 64);
        CHECK_OK(s.backend->gemm(s.dev, &p.g, NULL));
        s.get(&eager, p.g.c, 32 * 32 * 4);
        CHECK(eager == launched);
        s.backend->graph_destroy(s.dev, graph);
    }
}

/* ---- Delayed scaling: numbers are scaled by their history, of which each product leaves the next entry */

struct delayed_records {
    amp_k_fp8_slot slots[3];
    uint32_t amax[3], history[3][2];
};

CUDA_TEST(delayed_scaling) {
    enum { SIDE = 160 };
    cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) {
        delayed_records none = {}, found;
        delayed_records *records = (delayed_records *)s.put(&none, sizeof none);
        amp_k_fp8_update update = {};
        update.slots = records->slots, update.n = 3, update.due = 1, update.amax = records->amax, update.history = &records->history[0][0];
        update.length = 2, update.margin = 1, update.format[0] = update.format[1] = AMP_E4M3, update.format[2] = AMP_E5M2;
        void *a = s.room(SIDE * SIDE * 4), *b = s.put(hostile(SIDE * SIDE, 5, false)), *to = s.room(SIDE * SIDE * 4);
        for (int step = 0; step < 5; step++) {
            std::vector<float> x = hostile(SIDE * SIDE, 30 + (uint64_t)step, false);
            for (float &v : x) v *= step == 2 ? 1000.0f : 1.0f;       /* beyond what its history lets pass */
            if (step == 3) x[777] = INFINITY;                   /* never comes into the history */
            s.set(a, x.data(), x.size() * 4);
            amp_k_fp8 how[2] = {};
            for (int i = 0; i < 2; i++) {
                how[i].dtype = i ? AMP_E5M2 : AMP_E4M3, how[i].scaling = AMP_FP8_DELAYED, how[i].record = 1, how[i].margin = 1;
                how[i].slot = &records->slots[2 * i], how[i].amax = &records->amax[2 * i];
            }
            amp_k_gemm g = {};
            g.m = g.n = g.k = g.lda = g.ldb = g.ldc = SIDE, g.batch = 1, g.alpha = 1, g.trans_b = step % 2, g.trans_a = step % 2;
            g.a = a, g.b = b, g.c = to, g.a_dtype = g.b_dtype = g.c_dtype = AMP_F32, g.compute = AMP_FP8;
            g.fp8[0] = &how[0], g.fp8[1] = &how[1];
            CHECK_OK(s.backend->gemm(s.dev, &g, NULL));
            s.get(out, to, 4);
            s.get(out, records, sizeof none);
            CHECK_OK(s.backend->fp8_update(s.dev, &update, NULL));
            s.get(out, records, sizeof none);
            s.read(&found, records, sizeof found);
            CHECK_EQ(found.slots[0].last.saturated > 0, step == 2);
            CHECK_EQ(found.slots[0].last.nonfinite, step == 3);
            CHECK_EQ(found.slots[0].updates, step < 3 ? step + 1 : step);
        }
    });
    /* the records have the same bits; of the products, whose sums differ, one number a step is compared */
    c.check_orders();
    const size_t each = 4 + 2 * sizeof(delayed_records);
    CHECK_EQ(c.actual.size(), 5 * each);
    for (size_t at = 0; at < c.actual.size() && c.actual.size() == c.expected.size(); at += each) {
        CHECK(c.actual.compare(at + 4, each - 4, c.expected, at + 4, each - 4) == 0);
        c.check_within(at, AMP_F32, 1, [](int64_t, double e) {
            double size = 64.0 * SIDE * (fabs(e) > 1e4 ? 1000 : 1);
            return cuda_sum_bound(SIDE + 3, size) + ldexp(size, CUDA_IS_MODEL ? -21 : -11);
        });
    }
}

/* ---- A linear layer through the library: registered weights are rounded once for each direction, until they change */

enum { ROWS = 40, IN = 64, OUT = 48 };

/* y, dx and the gradient of two passes over one weight. */
static void run_layer(const amp_backend *backend, amp_fp8_scaling scaling, std::string *out) {
    const struct { int64_t n; amp_dtype dtype; uint64_t seed; } arrays[] = {
        {OUT * IN, AMP_F32, 1}, {OUT * IN, AMP_F32, 0}, {ROWS * IN, AMP_BF16, 2}, {ROWS * OUT, AMP_BF16, 0}, {ROWS * OUT, AMP_BF16, 3},
        {ROWS * IN, AMP_BF16, 0},
    };
    void *memory[6];
    amp_desc d = {};
    amp_context *amp = NULL;
    amp_param w = {};
    amp_linear_op op = {};
    d.backend = backend, d.dtype = AMP_FP8, d.fp8.scaling = scaling;
    CHECK_OK(amp_open(&amp, &d));
    for (int i = 0; i < 6; i++) {
        size_t bytes = (size_t)arrays[i].n * amp_dtype_size(arrays[i].dtype);
        std::string data = cuda_stored(arrays[i].seed ? hostile(arrays[i].n, arrays[i].seed, false) : cuda_random(arrays[i].n, 9, 0, 0),
                                       arrays[i].dtype);
        CHECK_OK(amp_alloc(amp, &memory[i], bytes));
        CHECK_OK(amp_copy(amp, memory[i], data.data(), bytes, AMP_COPY_TO_DEVICE));
    }
    w.name = "w", w.weight = amp_tensor2(memory[0], AMP_F32, OUT, IN), w.grad = amp_tensor2(memory[1], AMP_F32, OUT, IN);
    CHECK_OK(amp_param_register(amp, &w, 1));
    op.weight = &w, op.x = amp_tensor2(memory[2], AMP_BF16, ROWS, IN), op.y = amp_tensor2(memory[3], AMP_BF16, ROWS, OUT);
    op.dy = amp_tensor2(memory[4], AMP_BF16, ROWS, OUT), op.dx = amp_tensor2(memory[5], AMP_BF16, ROWS, IN);
    for (int pass = 0; pass < 2; pass++) {
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_OK(amp_linear(amp, &op));
        CHECK_OK(amp_autocast_end(amp));
        CHECK_EQ(op.plan.compute, AMP_FP8);
        CHECK_OK(amp_linear_backward(amp, &op));
    }
    for (int i : {3, 5, 1}) {
        size_t bytes = (size_t)arrays[i].n * amp_dtype_size(arrays[i].dtype), at = out->size();
        out->resize(at + bytes);
        CHECK_OK(amp_copy(amp, &(*out)[at], memory[i], bytes, AMP_COPY_TO_HOST));
    }
    CHECK_OK(amp_sync(amp));
    amp_param_forget(amp, &w, 1);
    for (void *p : memory) amp_free(amp, p);
    amp_close(amp);
}

CUDA_TEST(layers_beside_the_cpu) {
    for (int capability : {90, 89, 100}) {
        if (!CUDA_IS_MODEL && capability != 90) break;  /* the one here */
        gpu_kind kind(capability);
        for (amp_fp8_scaling scaling : {AMP_FP8_CURRENT, AMP_FP8_DELAYED, AMP_FP8_BLOCK, AMP_FP8_MX}) {
            cuda_compare c;
            run_layer(amp_cpu(), scaling, &c.expected);
            coc_reset_counts();
            run_layer(amp_cuda(), scaling, &c.actual);
            /* x twice, dy twice, w once in each direction; a tensor's scale takes one launch more, blocks dy's and x's again */
            if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_fp8_kernel"), scaling == AMP_FP8_CURRENT || scaling == AMP_FP8_DELAYED
                                                                            ? 2 * (2 + 2 + 2 + 2) : 2 + 4 + 2 + 2);
            const std::vector<float> w = hostile(OUT * IN, 1, false), x = hostile(ROWS * IN, 2, false), dy = hostile(ROWS * OUT, 3, false);
            /* a result of n columns: sums over k of u v, whose places are steps apart along rows, columns and k */
            auto bound = [](amp_dtype dtype, int64_t n, int64_t k, double passes, const float *u, int64_t u_row, int64_t u_k,
                            const float *v, int64_t v_col, int64_t v_k) {
                return [=](int64_t i, double e) {
                    double size = 0;
                    for (int64_t p = 0; p < k; p++) size += passes * fabs((double)u[i / n * u_row + p * u_k] * (double)v[i % n * v_col + p * v_k]);
                    return cuda_sum_bound(k + 3, size) + ldexp(size, CUDA_IS_MODEL ? -21 : -11) + cuda_spacing(dtype, e);
                };
            };
            size_t at = c.check_within(0, AMP_BF16, ROWS * OUT, bound(AMP_BF16, OUT, IN, 1, x.data(), IN, 1, w.data(), IN, 1), "y");
            at = c.check_within(at, AMP_BF16, ROWS * IN, bound(AMP_BF16, IN, OUT, 1, dy.data(), OUT, 1, w.data(), 1, IN), "dx");
            c.check_within(at, AMP_F32, OUT * IN, bound(AMP_F32, IN, ROWS, 2, dy.data(), 1, OUT, x.data(), 1, IN), "dw");
        }
    }
}

/* ---- Where cuBLASLt declines after all, bf16 takes its place, and nothing waits */

CUDA_TEST(a_library_that_declines) {
    const product &x = products[0];
    for (int how = 0; how < 2; how++) {
        if (how == 0) coc_set_blas_least(1 << 20);
        coc_reset_counts();
        cuda_compare c = cuda_once_on_both([&](cuda_side &s, std::string *out) {
            if (s.gpu && how == 1) coc_fail_blas("cublasLtMatmul", 1, CUBLAS_STATUS_NOT_SUPPORTED);
            run_product(s, x, pairs[0], out);
        });
        check_product(x, pairs[0], c);
        coc_set_blas_least(1);
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(rounding);
    RUN_CI(rounding_without_instructions);
    RUN_CI(products_beside_the_cpu);
    RUN(products_in_every_order);
    RUN(special_numbers_reach_the_result);
    RUN(magnitudes_far_apart);
    RUN(gradients_share_dy);
    RUN(nothing_waits);
    RUN(graphs_repeat_it);
    RUN(delayed_scaling);
    RUN(layers_beside_the_cpu);
    RUN(a_library_that_declines);
    return TEST_END();
}
