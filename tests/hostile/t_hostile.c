/* t_hostile.c - tests the public functions with extreme and invalid inputs.  These are NaN payloads, subnormal numbers and
 * -0, norms at both ends of the range, tensors of size zero and of 2^31 + 1 elements, scales at both ends, labels out of
 * range, lengths of zero, and strides that overlap. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1               /* MAP_ANONYMOUS */
#endif
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <errno.h>
#include <math.h>
#if !defined(_WIN32)
#  include <sys/mman.h>
#endif
#include <unistd.h>

#if defined(__has_feature)
#  if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#    define SANITIZED 1
#  endif
#endif

enum { PATHS = 5 };
static amp_context *contexts[PATHS];        /* scalar and every instruction set this CPU has */
static int n_contexts;

static amp_context *open_context(amp_cpu_path path) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.cpu_path = path;
    desc.threads = 1;
    desc.dtype = AMP_F32;
    desc.logger.level = AMP_LOG_OFF;
    return amp_open(&amp, &desc) == AMP_OK ? amp : NULL;
}

static uint32_t bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static float of_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* ---- Single numbers through everything that passes numbers on */

static const uint32_t odd[] = {
    0x7f800001, 0xff800001, 0x7fa55555, 0x7fc00000, 0xffc12345, 0x7fffffff, 0xffffffff,     /* NaN, signalling and quiet */
    0x00000001, 0x80000001, 0x007fffff, 0x807fffff, 0x00400000,                             /* subnormal */
    0x80000000, 0x00000000, 0x7f800000, 0xff800000, 0x00800000, 0x7f7fffff, 0xff7fffff,
    0x33000000, 0x33000001, 0x387fc000, 0x477fefff, 0x477ff000, 0x7f7f7fff, 0x7f7f8000};    /* at fp16's and bf16's ends */
enum { ODD = sizeof odd / sizeof *odd };

static int is_nan(uint32_t b) { return (b & 0x7fffffffu) > 0x7f800000u; }

/* One number, as dtype, by the scalar functions, whose bits t_numbers compares with ml_dtypes and PyTorch. */
static uint32_t narrowed(uint32_t b, amp_dtype dtype) {
    float x = of_bits(b);
    return dtype == AMP_F32 ? b : dtype == AMP_F16 ? amp_f16_from_f32(x, 0) : amp_bf16_from_f32(x, 0);
}
static uint32_t element(const void *data, amp_dtype dtype, int i) {
    return dtype == AMP_F32 ? ((const uint32_t *)data)[i] : ((const uint16_t *)data)[i];
}

/* Payload, sign, subnormals and -0 come through a cast; at every place, so in vectors and in what is left over. */
TEST(casts_keep_what_the_format_can_hold) {
    static const amp_dtype to[] = {AMP_F32, AMP_F16, AMP_BF16};
    uint32_t in[ODD + 40], out[ODD + 40];
    for (int c = 0; c < n_contexts; c++)
        for (int d = 0; d < 3; d++)
            for (int shift = 0; shift < 40; shift += 13) {
                amp_tensor src = amp_tensor1(in, AMP_F32, ODD + shift), dst = amp_tensor1(out, to[d], ODD + shift);
                for (int i = 0; i < ODD + shift; i++) in[i] = odd[(i + shift) % ODD];
                CHECK_OK(amp_cast(contexts[c], &src, &dst));
                for (int i = 0; i < ODD + shift; i++)
                    CHECK_MSG(element(out, to[d], i) == narrowed(in[i], to[d]), "%08x to %s: %x", in[i], amp_dtype_name(to[d]), element(out, to[d], i));
            }
}

/* y = x where nothing is to be done, and relu: -0, subnormals and infinities as they are, NaN as NaN. */
TEST(identities_change_no_bit) {
    uint32_t in[ODD], zeros[ODD], out[ODD];
    memcpy(in, odd, sizeof in);
    memset(zeros, 0, sizeof zeros);
    for (int c = 0; c < n_contexts; c++) {
        amp_tensor x = amp_tensor1(in, AMP_F32, ODD), y = amp_tensor1(out, AMP_F32, ODD), zero = amp_tensor1(zeros, AMP_F32, ODD);
        amp_dropout_op drop;
        amp_activation_op relu;
        memset(&drop, 0, sizeof drop);
        memset(&relu, 0, sizeof relu);
        drop.x = x; drop.y = y;
        relu.x = x; relu.y = y; relu.act = AMP_ACT_RELU;
        CHECK_OK(amp_dropout(contexts[c], &drop));
        for (int i = 0; i < ODD; i++) CHECK_MSG(out[i] == in[i] || (is_nan(in[i]) && is_nan(out[i])), "dropout of %08x: %08x", in[i], out[i]);
        CHECK_OK(amp_add(contexts[c], &x, &zero, &y));
        for (int i = 0; i < ODD; i++) CHECK_MSG(is_nan(in[i]) ? is_nan(out[i]) : out[i] == (in[i] == 0x80000000u ? 0 : in[i]), "%08x + 0: %08x", in[i], out[i]);
        CHECK_OK(amp_add(contexts[c], &x, &x, &y));
        for (int i = 0; i < ODD; i++) CHECK_MSG(is_nan(in[i]) ? is_nan(out[i]) : out[i] == bits(of_bits(in[i]) * 2), "twice %08x: %08x", in[i], out[i]);
        CHECK_OK(amp_activation(contexts[c], &relu));
        for (int i = 0; i < ODD; i++)
            CHECK_MSG(is_nan(in[i]) ? is_nan(out[i]) : in[i] >> 31 ? (out[i] & 0x7fffffffu) == 0 : out[i] == in[i], "relu of %08x: %08x", in[i], out[i]);
    }
}

/* ---- Gradients */

static amp_scaler *make_scaler(amp_context *amp, float scale) {
    amp_scaler_desc d;
    amp_scaler *s = NULL;
    memset(&d, 0, sizeof d);
    d.init_scale = scale;
    d.min_scale = AMP_NO_FLOOR;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    return s;
}
static amp_grad_set *make_set(amp_context *amp, amp_range *ranges, int n, double clip) {
    amp_grad_set_desc d;
    amp_grad_set *set = NULL;
    memset(&d, 0, sizeof d);
    d.ranges = ranges;
    d.n_ranges = n;
    d.clip_norm = clip;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    return set;
}
static amp_range range_of(const char *name, void *data, int64_t count, amp_dtype dtype) {
    amp_range r;
    r.name = name; r.data = data; r.count = count; r.dtype = dtype;
    return r;
}
static amp_grad_stats found_in(amp_context *amp, amp_range *ranges, int n, float scale, amp_check_mode mode) {
    amp_scaler *s = make_scaler(amp, scale);
    amp_grad_set *set = make_set(amp, ranges, n, 0);
    amp_grad_stats f;
    memset(&f, 0, sizeof f);
    CHECK_OK(amp_scaler_check(s, set, mode));
    CHECK_OK(amp_grad_set_stats(set, &f));
    f.first_bad = NULL;             /* goes with the set */
    amp_grad_set_destroy(set);
    amp_scaler_destroy(s);
    return f;
}

/* Every kind of number that is not finite is found wherever it stands, and nothing else is. */
TEST(gradients_that_are_not_finite_are_found_everywhere) {
    enum { N = 83 };
    for (int c = 0; c < n_contexts; c++)
        for (int k = 0; k < ODD; k++)
            for (int at = 0; at < N; at += k % 7 + 1) {
                uint32_t grad[N];
                amp_range r = range_of("g", grad, N, AMP_F32);
                int bad = (odd[k] & 0x7f800000u) == 0x7f800000u;
                for (int i = 0; i < N; i++) grad[i] = i % 2 ? 0x80000000u : 0x00000001u;
                grad[at] = odd[k];
                amp_grad_stats f = found_in(contexts[c], &r, 1, 1, AMP_CHECK_READ);
                CHECK_MSG(f.found_inf == bad && f.first_bad_index == (bad ? 0 : -1) && grad[at] == odd[k], "%08x at %d", odd[k], at);
                CHECK(amp_is_finite_f32(&f.norm) == !bad);
            }
}

/* Unscaled in place: one rounding of the product, NaN stays NaN, subnormals and -0 are kept. */
TEST(unscaling_rounds_once_and_keeps_what_there_is) {
    static const float scales[] = {1, 2, 65536, 3, 0.5f};
    for (int c = 0; c < n_contexts; c++)
        for (size_t k = 0; k < sizeof scales / sizeof *scales; k++) {
            uint32_t grad[ODD];
            amp_range r = range_of("g", grad, ODD, AMP_F32);
            float inverse = (float)(1 / (double)scales[k]);
            memcpy(grad, odd, sizeof grad);
            found_in(contexts[c], &r, 1, scales[k], AMP_CHECK_UNSCALE);
            for (int i = 0; i < ODD; i++) {
                uint32_t want = scales[k] == 1 ? odd[i] : bits((float)((double)of_bits(odd[i]) * (double)inverse));
                CHECK_MSG(is_nan(odd[i]) ? is_nan(grad[i]) : grad[i] == want, "%08x / %g: %08x, must be %08x", odd[i], (double)scales[k], grad[i], want);
            }
        }
}

/* Norms of numbers whose squares fp32 cannot hold: |x| sqrt(n) within the roundings of a sum of n squares in fp64, of the
   root, and of the result to fp32. */
TEST(norms_at_both_ends_of_the_range) {
    enum { N = 1000 };
    static const struct { amp_dtype dtype; uint64_t x; } cases[] = {
        {AMP_F32, 0x7f7fffff}, {AMP_F32, 0x7b000000}, {AMP_F32, 0x00800000}, {AMP_F32, 0x00000001}, {AMP_F32, 0x007fffff},
        {AMP_F16, 0x7bff}, {AMP_F16, 0x0001}, {AMP_BF16, 0x7f7f}, {AMP_BF16, 0x0001},
        {AMP_F64, 0x47efffffe0000000}, {AMP_F64, 0x36a0000000000000}};
    static uint64_t data[N];
    for (int c = 0; c < n_contexts; c++)
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
            for (int n = 1; n <= N; n += 333) {
                amp_range r = range_of("g", data, n, cases[k].dtype);
                size_t size = amp_dtype_size(cases[k].dtype);
                double x, want;
                for (int i = 0; i < n; i++) memcpy((char *)data + (size_t)i * size, &cases[k].x, size);
                CHECK_OK(amp_convert(&x, AMP_F64, data, cases[k].dtype, 1, NULL, NULL));
                want = x * sqrt((double)n);
                amp_grad_stats f = found_in(contexts[c], &r, 1, 1, AMP_CHECK_READ);
                CHECK_EQ(f.found_inf, 0);
                if (want > 3.4028234e38) CHECK(bits(f.norm) == 0x7f800000u || f.norm > 3.4e38f);      /* more than fp32 holds */
                else CHECK_MSG(fabs((double)f.norm - want) <= want * (ldexp(1, -24) + (n + 3) * ldexp(1, -53)) + ldexp(1, -150),
                               "%d of %g: %.9g, must be %.9g", n, x, (double)f.norm, want);
            }
}

/* Clipping at norms that fp32 cannot hold: the direction stays, the norm becomes what was asked for. */
TEST(clipping_of_huge_and_tiny_norms) {
    enum { N = 64 };
    static const float sizes[] = {3e38f, 1e30f, 1e-30f, 1e-45f};
    for (int c = 0; c < n_contexts; c++)
        for (int k = 0; k < 4; k++) {
            float grad[N];
            amp_range r = range_of("g", grad, N, AMP_F32);
            amp_scaler *s = make_scaler(contexts[c], 1);
            amp_grad_set *set = make_set(contexts[c], &r, 1, 1.0);
            double norm = (double)sizes[k] * 8, clip = 1 / (norm + 1e-6);
            for (int i = 0; i < N; i++) grad[i] = i % 2 ? -sizes[k] : sizes[k];
            CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
            CHECK_OK(amp_grad_set_apply(set));
            /* The factor has one rounding to fp32, in its subnormal range an absolute one, and so has the product. */
            for (int i = 0; i < N; i++) {
                double want = (clip < 1 ? clip : 1) * (double)sizes[k];
                CHECK_MSG(fabs(fabs((double)grad[i]) - want) <= want * ldexp(1, -22) + ldexp(1, -149) * (double)sizes[k] + ldexp(1, -149) && (grad[i] < 0) == (i % 2),
                          "%g: %g, must be %g", (double)sizes[k], (double)grad[i], want);
            }
            amp_grad_set_destroy(set);
            amp_scaler_destroy(s);
        }
}

/* ---- Scales */

TEST(scales_at_both_ends) {
    static const struct { uint32_t scale; amp_result result; } cases[] = {
        {0x7e800000, AMP_OK}, {0x00800000, AMP_OK},                     /* 2^126 and 2^-126: the inverse is normal */
        {0x7e800001, AMP_ERR_SCALE}, {0x7f000000, AMP_ERR_SCALE}, {0x7f7fffff, AMP_ERR_SCALE}, {0x007fffff, AMP_ERR_SCALE},
        {0x00000001, AMP_ERR_SCALE}, {0x7f800000, AMP_ERR_SCALE}, {0x7fc00000, AMP_ERR_SCALE}, {0xbf800000, AMP_ERR_SCALE},
        {0x80000000, AMP_ERR_SCALE}, {0x00000000, AMP_ERR_SCALE}};
    amp_context *amp = contexts[n_contexts - 1];
    amp_scaler *s = make_scaler(amp, 1024), *torch = NULL;
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = AMP_SCALER_TORCH;
    CHECK_OK(amp_scaler_create(amp, &torch, &d));
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        float scale = of_bits(cases[k].scale), before = amp_scaler_scale(s);
        CHECK_MSG(amp_scaler_set_scale(s, scale) == cases[k].result, "scale %08x: %s", cases[k].scale, amp_last_error());
        CHECK(bits(amp_scaler_scale(s)) == bits(cases[k].result == AMP_OK ? scale : before));
        CHECK_OK(amp_scaler_set_scale(torch, scale));           /* as PyTorch takes it */
        CHECK(bits(amp_scaler_scale(torch)) == cases[k].scale);
        if (cases[k].result != AMP_OK) continue;
        for (int i = 0; i < 3; i++) {                           /* 1 comes back, and so does the largest that does not overflow */
            float grad[2], ends[3];
            amp_range r = range_of("g", grad, 2, AMP_F32);
            amp_grad_set *set = make_set(amp, &r, 1, 0);
            ends[0] = 1; ends[1] = -1.5f; ends[2] = 0x1.fffffep0f;
            grad[0] = ends[i] * scale; grad[1] = -grad[0];
            CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_UNSCALE));
            CHECK(grad[0] == ends[i] && grad[1] == -ends[i]);
            CHECK_OK(amp_scaler_update(s));
            CHECK(bits(amp_scaler_scale(s)) == cases[k].scale);
            amp_grad_set_destroy(set);
        }
    }
    amp_scaler_destroy(s);
    amp_scaler_destroy(torch);
}

/* Falling without a floor, the scale stops where its inverse would no longer be a normal number, and steps are skipped. */
TEST(a_scale_without_floor_falls_to_the_smallest_usable) {
    amp_context *amp = contexts[0];
    amp_scaler *s = make_scaler(amp, of_bits(0x00800000));
    float grad = of_bits(0x7f800000);
    amp_range r = range_of("g", &grad, 1, AMP_F32);
    amp_grad_set *set = make_set(amp, &r, 1, 0);
    for (int i = 0; i < 200; i++) {
        amp_grad_stats f;
        CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
        CHECK_OK(amp_grad_set_stats(set, &f));
        CHECK(f.found_inf == 1 && amp_grad_set_device(set)->skip == 1);
        CHECK_OK(amp_scaler_update(s));
    }
    grad = 1;                       /* a step with such a scale is not taken: its inverse is no number to multiply by */
    CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
    CHECK(amp_scaler_scale(s) >= of_bits(0x00800000) || amp_grad_set_device(set)->skip == 1);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(s);
}

/* ---- Tensors without elements: legal, and nothing is written */

static float in[512], out[512], more[512];
static int32_t ids[64];

static void fresh(void) {
    for (int i = 0; i < 512; i++) { in[i] = (float)(i % 13) - 6; out[i] = more[i] = 77; }
    memset(ids, 0, sizeof ids);
}
static int untouched(const float *p, int from) {
    for (int i = from; i < 512; i++) if (p[i] != 77) return 0;
    return 1;
}
static amp_param param_of(const char *name, float *w, float *g, int64_t rows, int64_t cols) {
    amp_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.weight = cols < 0 ? amp_tensor1(w, AMP_F32, rows) : amp_tensor2(w, AMP_F32, rows, cols);
    if (g != NULL) p.grad = cols < 0 ? amp_tensor1(g, AMP_F32, rows) : amp_tensor2(g, AMP_F32, rows, cols);
    return p;
}

TEST(products_without_elements) {
    static const int64_t shapes[][3] = {{0, 3, 4}, {2, 0, 4}, {2, 3, 0}, {0, 0, 0}};
    for (int c = 0; c < n_contexts; c++)
        for (int k = 0; k < 4; k++) {
            const int64_t m = shapes[k][0], n = shapes[k][1], depth = shapes[k][2];
            amp_param w = param_of("w", in, more, n, depth), b = param_of("b", in, NULL, n, -1);
            amp_linear_op lin;
            amp_matmul_op mm;
            fresh();
            memset(&lin, 0, sizeof lin);
            lin.x = lin.dx = amp_tensor2(in, AMP_F32, m, depth); lin.y = lin.dy = amp_tensor2(out, AMP_F32, m, n);
            lin.dx.data = more + 256;
            lin.weight = &w; lin.bias = &b;
            CHECK_OK(amp_linear(contexts[c], &lin));
            for (int i = 0; i < m * n; i++) CHECK(depth > 0 || out[i] == in[i % n]);        /* no inputs: the bias alone */
            CHECK(untouched(out, (int)(m * n)));
            CHECK_OK(amp_linear_backward(contexts[c], &lin));
            for (int i = 0; i < n * depth; i++) CHECK(m > 0 || more[i] == 0);               /* no rows: gradients are 0 */
            fresh();
            memset(&mm, 0, sizeof mm);
            mm.a = amp_tensor3(in, AMP_F32, 2, m, depth); mm.b = amp_tensor3(in, AMP_F32, 2, depth, n); mm.y = amp_tensor3(out, AMP_F32, 2, m, n);
            CHECK_OK(amp_matmul(contexts[c], &mm));
            for (int i = 0; i < 2 * m * n; i++) CHECK(depth > 0 || out[i] == 0);
            CHECK(untouched(out, (int)(2 * m * n)));
            mm.a.shape[0] = mm.b.shape[0] = mm.y.shape[0] = 0;
            fresh();
            CHECK_OK(amp_matmul(contexts[c], &mm));
            CHECK(untouched(out, 0));
            CHECK_OK(amp_gemm(contexts[c], AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, m, n, depth, 1, in, depth + 1, in, n + 1, 1, out, n + 1));
            CHECK(untouched(out, 0));                                                       /* beta 1 and no product */
        }
}

TEST(attention_and_softmax_without_elements) {
    static const int64_t shapes[][5] = {{0, 2, 3, 2, 4}, {1, 0, 3, 2, 4}, {1, 2, 3, 0, 4}, {1, 2, 0, 2, 4}};   /* batch queries keys heads dim */
    for (int c = 0; c < n_contexts; c++)
        for (int k = 0; k < 4; k++) {
            const int64_t *s = shapes[k], count = s[0] * s[1] * s[3] * s[4];
            amp_attention_op op;
            amp_softmax_op soft;
            fresh();
            memset(&op, 0, sizeof op);
            op.q = amp_tensor4(in, AMP_F32, s[0], s[1], s[3], s[4]); op.k = op.v = amp_tensor4(in, AMP_F32, s[0], s[2], s[3], s[4]);
            op.o = amp_tensor4(out, AMP_F32, s[0], s[1], s[3], s[4]);
            op.lse = more;
            CHECK_OK(amp_attention(contexts[c], &op));
            for (int i = 0; i < count; i++) CHECK_EQ(out[i], 0);                            /* only where there are no keys */
            CHECK(untouched(out, (int)count));
            op.o = op.d_o = op.q; op.dq = op.q; op.dk = op.dv = op.k;
            op.dq.data = out; op.dk.data = out + 128; op.dv.data = out + 256;
            CHECK_OK(amp_attention_backward(contexts[c], &op));
            for (int i = 0; i < count; i++) CHECK_EQ(out[i], 0);
            fresh();
            memset(&soft, 0, sizeof soft);
            soft.x = amp_tensor4(in, AMP_F32, s[0], s[3], s[1], s[2]); soft.y = amp_tensor4(out, AMP_F32, s[0], s[3], s[1], s[2]);
            soft.dy = soft.x; soft.dx = soft.y;
            CHECK_OK(amp_softmax(contexts[c], &soft));
            CHECK(untouched(out, 0));
            CHECK_OK(amp_softmax_backward(contexts[c], &soft));
            CHECK(untouched(out, 0));
        }
}

/* Rows of norms, activations, losses and the rest: none, or of no columns. */
TEST(rows_without_elements) {
    static const int64_t shapes[][2] = {{0, 5}, {3, 0}, {0, 0}};
    for (int c = 0; c < n_contexts; c++)
        for (int k = 0; k < 3; k++) {
            const int64_t rows = shapes[k][0], cols = shapes[k][1];
            amp_tensor x = amp_tensor2(in, AMP_F32, rows, cols), y = amp_tensor2(out, AMP_F32, rows, cols);
            amp_param w = param_of("w", in, more, cols, -1), table = param_of("t", in, more, 4, cols);
            amp_context *amp = contexts[c];
            amp_norm_op norm;
            amp_activation_op act;
            amp_swiglu_op glu;
            amp_mse_op mse;
            amp_embedding_op emb;
            amp_dropout_op drop;
            float stats[8], loss = 5;
            fresh();
            memset(&norm, 0, sizeof norm); memset(&act, 0, sizeof act); memset(&glu, 0, sizeof glu);
            memset(&mse, 0, sizeof mse); memset(&emb, 0, sizeof emb); memset(&drop, 0, sizeof drop);
            norm.x = norm.dy = x; norm.y = norm.dx = y; norm.weight = &w; norm.mean = stats; norm.rstd = stats + 4;
            CHECK_OK(amp_layernorm(amp, &norm)); CHECK_OK(amp_layernorm_backward(amp, &norm));
            CHECK_OK(amp_rmsnorm(amp, &norm)); CHECK_OK(amp_rmsnorm_backward(amp, &norm));
            act.x = act.dy = x; act.y = act.dx = y; act.act = AMP_ACT_GELU;
            CHECK_OK(amp_activation(amp, &act)); CHECK_OK(amp_activation_backward(amp, &act));
            glu.gate = glu.up = glu.dy = x; glu.y = glu.dgate = glu.dup = y;
            CHECK_OK(amp_swiglu(amp, &glu)); CHECK_OK(amp_swiglu_backward(amp, &glu));
            drop.x = drop.dy = x; drop.y = drop.dx = y; drop.p = 0.5f;
            CHECK_OK(amp_dropout(amp, &drop)); CHECK_OK(amp_dropout_backward(amp, &drop));
            emb.ids = ids; emb.table = &table; emb.y = y; emb.dy = x;
            CHECK_OK(amp_embedding(amp, &emb)); CHECK_OK(amp_embedding_backward(amp, &emb));
            CHECK_OK(amp_add(amp, &x, &x, &y)); CHECK_OK(amp_cast(amp, &x, &y));
            mse.x = mse.target = x; mse.dx = y; mse.loss = &loss; mse.reduction = AMP_REDUCTION_SUM;
            CHECK_OK(amp_mse(amp, &mse));
            CHECK_EQ(loss, 0);
            mse.reduction = AMP_REDUCTION_MEAN;
            CHECK_OK(amp_mse(amp, &mse));
            CHECK(is_nan(bits(loss)));                                                      /* the mean of nothing, as in PyTorch */
            CHECK(untouched(out, 0));
        }
}

TEST(losses_of_no_rows_and_of_ignored_rows) {
    static int32_t labels[3] = {-100, -100, -100};
    for (int c = 0; c < n_contexts; c++)
        for (int rows = 0; rows < 4; rows += 3) {
            amp_cross_entropy_op ce;
            float loss = 5;
            fresh();
            memset(&ce, 0, sizeof ce);
            ce.logits = amp_tensor2(in, AMP_F32, rows, 5); ce.dlogits = amp_tensor2(out, AMP_F32, rows, 5);
            ce.labels = labels; ce.loss = &loss;
            CHECK_OK(amp_cross_entropy(contexts[c], &ce));
            CHECK(is_nan(bits(loss)));
            for (int i = 0; i < rows * 5; i++) CHECK_EQ(out[i], 0);
            CHECK(untouched(out, rows * 5));
            ce.reduction = AMP_REDUCTION_SUM;
            CHECK_OK(amp_cross_entropy(contexts[c], &ce));
            CHECK_EQ(loss, 0);
        }
}

/* Sets, steps, looks, conversions and records of nothing. */
TEST(training_of_no_elements) {
    for (int c = 0; c < n_contexts; c++) {
        amp_context *amp = contexts[c];
        amp_param p[2];
        amp_range none = range_of("none", NULL, 0, AMP_F32);
        amp_optimizer_desc od;
        amp_optimizer *opt = NULL;
        amp_tensor_stats_desc nd;
        amp_tensor_stats *numerics = NULL;
        amp_tensor_stats_report report;
        amp_step_result outcome;
        int64_t first = 3, new_inf = 3;
        float dummy = 1;
        fresh();
        p[0] = param_of("a", in, out, 0, 4); p[1] = param_of("b", in, out, 3, 0);
        memset(&od, 0, sizeof od);
        memset(&nd, 0, sizeof nd);
        od.params = p; od.n_params = 2; od.clip_norm = 1; od.result_lag = AMP_LAG_NONE;
        CHECK_OK(amp_optimizer_create(amp, &opt, &od));
        (void)amp_param_accumulate(&p[0]);
        CHECK_OK(amp_step(opt, NULL));
        CHECK(amp_step_result_next(opt, &outcome) == 1 && outcome.applied == 1 && outcome.norm == 0 && outcome.clip_coef == 1);
        amp_optimizer_destroy(opt);
        CHECK(untouched(out, 0));
        amp_grad_stats f = found_in(amp, &none, 1, 1024, AMP_CHECK_UNSCALE);
        CHECK(f.found_inf == 0 && f.norm == 0 && f.first_bad_index == -1);
        nd.ranges = &none; nd.n_ranges = 1; nd.dtype = AMP_F16;
        CHECK_OK(amp_tensor_stats_create(amp, &numerics, &nd));
        CHECK_OK(amp_tensor_stats_step(numerics, &report));
        CHECK(report.recommendation == AMP_RECOMMEND_NONE && report.rows[0].count == 0 && report.rows[0].largest == 0);
        amp_tensor_stats_destroy(numerics);
        CHECK_OK(amp_convert(&dummy, AMP_F32, &dummy, AMP_BF16, 0, NULL, &new_inf));
        CHECK(new_inf == 0 && dummy == 1 && amp_count_nonfinite(&dummy, AMP_F32, 0, &first) == 0 && first == -1);
    }
}

/* A dimension of 0 beside others whose product no integer holds. */
TEST(sizes_that_overflow_are_refused) {
    static const int64_t big = INT64_MAX, shapes[][4] = {{0, INT64_MAX, INT64_MAX, 1}, {INT64_MAX, INT64_MAX, 0, 1}, {(int64_t)1 << 40, (int64_t)1 << 40, 1, 1}, {-1, 1, 1, 1}, {1, 1, 1, INT64_MIN}};
    for (int k = 0; k < 5; k++) {
        amp_tensor t = amp_tensor4(in, AMP_F32, shapes[k][0], shapes[k][1], shapes[k][2], shapes[k][3]);
        CHECK_EQ(amp_tensor_count(&t), -1);
        fresh();
        amp_tensor y = t;
        y.data = out;
        CHECK_ERR(amp_cast(contexts[0], &t, &y), AMP_ERR_SHAPE);
        CHECK(untouched(out, 0));
    }
    amp_tensor t = amp_tensor2(in, AMP_F32, 0, big / 16);
    CHECK_EQ(amp_tensor_count(&t), 0);
    t.ndim = 0;
    CHECK_EQ(amp_tensor_count(&t), -1);
    t.ndim = 5;
    CHECK_EQ(amp_tensor_count(&t), -1);
}

/* ---- Labels and ids out of range: refused by name and place, and nothing is written */

TEST(labels_and_ids_out_of_range) {
    static const int32_t bad[] = {-1, 5, INT32_MIN, INT32_MAX, -99, -101, 1 << 20};
    for (int c = 0; c < n_contexts; c++)
        for (size_t k = 0; k < sizeof bad / sizeof *bad; k++)
            for (int at = 0; at < 40; at += 13) {
                amp_cross_entropy_op ce;
                amp_embedding_op emb;
                amp_param table = param_of("t", in, more, 5, 4);
                char wanted[64];
                float loss = 5;
                fresh();
                ids[at] = bad[k];
                memset(&ce, 0, sizeof ce);
                memset(&emb, 0, sizeof emb);
                ce.logits = amp_tensor2(in, AMP_F32, 40, 5); ce.dlogits = amp_tensor2(out, AMP_F32, 40, 5);
                ce.labels = ids; ce.loss = &loss;
                CHECK_ERR(amp_cross_entropy(contexts[c], &ce), AMP_ERR_LABEL);
                snprintf(wanted, sizeof wanted, ".labels[%d] = %d, must be 0 to 4", at, bad[k]);
                CHECK_MSG(strstr(amp_last_error(), wanted) != NULL, "%s", amp_last_error());
                CHECK(loss == 5 && untouched(out, 0));
                emb.ids = ids; emb.table = &table; emb.y = amp_tensor2(out, AMP_F32, 40, 4);
                CHECK_ERR(amp_embedding(contexts[c], &emb), AMP_ERR_LABEL);
                snprintf(wanted, sizeof wanted, ".ids[%d] = %d, must be 0 to 4", at, bad[k]);
                CHECK_MSG(strstr(amp_last_error(), wanted) != NULL, "%s", amp_last_error());
                CHECK(untouched(out, 0));
                ids[at] = 0;
                CHECK_OK(amp_embedding(contexts[c], &emb));
                ids[at] = bad[k];
                emb.dy = emb.y;
                CHECK_ERR(amp_embedding_backward(contexts[c], &emb), AMP_ERR_LABEL);
                CHECK(untouched(more, 0) && table.grad_live == 0);
            }
}

/* ---- Masks with numbers at and beyond their ends: what is written out, and attention by it and by the description */

enum { B = 4, T = 6, H = 2, D = 4 };

/* Whether query i of sequence b sees key j, as the header says it. */
static int sees(const amp_mask *m, int64_t b, int64_t i, int64_t j) {
    int64_t length = m->lengths == NULL ? T : m->lengths[b];
    if (j >= length) return 0;
    if (m->documents != NULL && m->documents[b * T + i] != m->documents[b * T + j]) return 0;
    switch (m->kind) {
        case AMP_MASK_CAUSAL: return j <= i;
        case AMP_MASK_PREFIX: return j <= i || j < m->prefix[b];
        case AMP_MASK_WINDOW: return m->bidirectional ? (i > j ? i - j : j - i) < m->window : j <= i && i - j < m->window;
        case AMP_MASK_WINDOW_GLOBAL:
            if (!m->bidirectional && j > i) return 0;
            return (i > j ? i - j : j - i) < m->window || i < m->global || j < m->global;
        default: return 1;
    }
}

static void attend(amp_context *amp, const amp_mask *mask, float *o, float *lse) {
    amp_attention_op op;
    memset(&op, 0, sizeof op);
    op.q = amp_tensor4(in, AMP_F32, B, T, H, D); op.k = amp_tensor4(in + 192, AMP_F32, B, T, H, D); op.v = amp_tensor4(in + 64, AMP_F32, B, T, H, D);
    op.o = amp_tensor4(o, AMP_F32, B, T, H, D);
    op.lse = lse;
    op.mask = *mask;
    CHECK_OK(amp_attention(amp, &op));
}

static void mask_is_exact(amp_context *amp, const amp_mask *mask) {
    static float by_rule[B * T * H * D], by_tensor[B * T * H * D], lse[2][B * H * T];
    amp_mask_view view;
    fresh();
    CHECK_OK(amp_mask_get(amp, mask, B, T, T, AMP_U8, &view));
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < T; i++)
            for (int64_t j = 0; j < T; j++) {
                int64_t at = (view.tensor.shape[0] == 1 ? 0 : b) * T * T + i * T + j;
                CHECK_MSG(((const uint8_t *)view.tensor.data)[at] == sees(mask, b, i, j), "kind %d: sequence %d, query %d, key %d", (int)mask->kind, (int)b, (int)i, (int)j);
            }
    attend(amp, mask, by_rule, lse[0]);
    attend(amp, &view.mask, by_tensor, lse[1]);
    CHECK(memcmp(by_rule, by_tensor, sizeof by_rule) == 0 && memcmp(lse[0], lse[1], sizeof lse[0]) == 0);
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < T; i++) {
            int any = 0;
            for (int64_t j = 0; j < T; j++) any |= sees(mask, b, i, j);
            for (int64_t e = 0; e < H * D && !any; e++) CHECK_EQ(by_rule[(b * T + i) * H * D + e], 0);      /* sees nothing */
        }
    amp_mask_release(amp, &view);
}

TEST(masks_at_and_beyond_their_ends) {
    static const int32_t lengths[B] = {0, -5, INT32_MAX, 3}, prefixes[B] = {0, INT32_MIN, INT32_MAX, 4};
    static int32_t documents[B * T];
    static const int64_t windows[] = {1, T, INT32_MAX, INT64_MAX}, globals[] = {0, 1, T, INT64_MAX};
    for (int i = 0; i < B * T; i++) documents[i] = i % 3 == 0 ? INT32_MIN : i % 3 == 1 ? INT32_MAX : -1;
    for (int c = 0; c < n_contexts; c++)
        for (int kind = AMP_MASK_NONE; kind < AMP_MASK_ARBITRARY; kind++)
            for (int rest = 0; rest < 4; rest++)
                for (int w = 0; w < 8; w++) {
                    amp_mask m;
                    int windowed = kind == AMP_MASK_WINDOW || kind == AMP_MASK_WINDOW_GLOBAL;
                    memset(&m, 0, sizeof m);
                    m.kind = (amp_mask_kind)kind;
                    if (rest & 1) m.lengths = lengths;
                    if (rest & 2) m.documents = documents;
                    if (kind == AMP_MASK_PREFIX) m.prefix = prefixes;
                    if (windowed) { m.window = windows[w / 2]; m.bidirectional = w % 2; }
                    if (kind == AMP_MASK_WINDOW_GLOBAL) m.global = globals[w / 2];
                    if (windowed || w == 0) mask_is_exact(contexts[c], &m);
                }
}

/* ---- Strides */

static amp_tensor strided(float *data, int64_t rows, int64_t cols, int64_t stride) {
    amp_tensor t = amp_tensor2(data, AMP_F32, rows, cols);
    t.stride[0] = stride;
    t.stride[1] = 1;
    return t;
}

/* Rows that overlap, repeat or run backwards are refused by name wherever rows are taken, and nothing is written. */
TEST(rows_that_overlap_are_refused) {
    static const int64_t strides[] = {0, 1, 3, -4};
    amp_context *amp = contexts[n_contexts - 1];
    for (int k = 0; k < 4; k++)
        for (int part = 0; part < 2; part++) {          /* 0: the input overlaps; 1: the output does */
            amp_tensor apart_in = amp_tensor2(in, AMP_F32, 4, 4), apart_out = amp_tensor2(out + 64, AMP_F32, 4, 4);
            amp_tensor x = part ? apart_in : strided(in + 64, 4, 4, strides[k]), y = part ? strided(out + 64, 4, 4, strides[k]) : apart_out;
            amp_param w = param_of("w", in, NULL, 4, 4);
            amp_linear_op lin;
            amp_norm_op norm;
            amp_swiglu_op glu;
            amp_matmul_op mm;
            amp_cross_entropy_op ce;
            amp_embedding_op emb;
            amp_softmax_op soft;
            float stats[8], loss;
            fresh();
            memset(&lin, 0, sizeof lin); memset(&norm, 0, sizeof norm); memset(&glu, 0, sizeof glu); memset(&mm, 0, sizeof mm);
            memset(&ce, 0, sizeof ce); memset(&emb, 0, sizeof emb); memset(&soft, 0, sizeof soft);
            lin.x = x; lin.y = y; lin.weight = &w;
            CHECK_ERR(amp_linear(amp, &lin), AMP_ERR_SHAPE);
            CHECK_MSG(strstr(amp_last_error(), part ? ".y: rows" : ".x: rows") != NULL &&
                          strstr(amp_last_error(), strides[k] < 0 ? "run backwards" : "overlap") != NULL, "%s", amp_last_error());
            norm.x = x; norm.y = y; norm.mean = stats; norm.rstd = stats + 4;
            CHECK_ERR(amp_layernorm(amp, &norm), AMP_ERR_SHAPE);
            CHECK_ERR(amp_rmsnorm(amp, &norm), AMP_ERR_SHAPE);
            glu.gate = x; glu.up = x; glu.y = y;
            CHECK_ERR(amp_swiglu(amp, &glu), AMP_ERR_SHAPE);
            mm.a = x; mm.b = apart_in; mm.y = y;
            CHECK_ERR(amp_matmul(amp, &mm), AMP_ERR_SHAPE);
            ce.logits = x; ce.dlogits = y; ce.labels = ids; ce.loss = &loss;
            CHECK_ERR(amp_cross_entropy(amp, &ce), AMP_ERR_SHAPE);
            soft.x = x; soft.y = y;
            CHECK_ERR(amp_softmax(amp, &soft), AMP_ERR_SHAPE);
            CHECK_ERR(amp_cast(amp, &x, &y), AMP_ERR_SHAPE);
            emb.ids = ids; emb.table = &w; emb.y = y;
            if (part) CHECK_ERR(amp_embedding(amp, &emb), AMP_ERR_SHAPE);
            CHECK(untouched(out, 0));
        }
    CHECK_ERR(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 4, 4, 4, 1, in, 3, in, 4, 0, out, 4), AMP_ERR_RANGE);
    CHECK_ERR(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 4, 4, 4, 1, in, 4, in, 4, 0, out, 0), AMP_ERR_RANGE);
}

/* Sizes that no memory holds, near 2^62 and where their products wrap around, are refused before anything is read. */
TEST(sizes_beyond_any_memory) {
    static const int64_t big[] = {INT64_MAX, (int64_t)1 << 62, ((int64_t)1 << 62) + 1, (int64_t)1 << 61, (int64_t)1 << 57,
                                  (int64_t)1 << 32, (int64_t)1 << 29};
    const int n_big = (int)(sizeof big / sizeof *big);
    amp_context *amp = contexts[n_contexts - 1];
    double x = 1, y = 2;
    for (int i = 0; i < n_big; i++)
        for (int where = 0; where < 7; where++)
            for (int order = AMP_ROW_MAJOR; order <= AMP_COL_MAJOR; order++) {
                /* m, n and k one by one, two at a time and all, with strides that fit */
                const int64_t m = where != 1 && where != 2 && where != 5 ? big[i] : 1;
                const int64_t n = where != 0 && where != 2 && where != 4 ? big[i] : 1;
                const int64_t k = where != 0 && where != 1 && where != 3 ? big[i] : 1, ld = big[i];
                if (ld < (int64_t)1 << 56 && (m == 1 || n == 1) && (m == 1 || k == 1) && (n == 1 || k == 1)) continue;
                CHECK_ERR(amp_gemm(amp, (amp_order)order, AMP_NO_TRANS, AMP_TRANS, m, n, k, 1, in, ld, in, ld, 0, out, ld),
                          AMP_ERR_SIZE);
                CHECK(untouched(out, 0));
                CHECK_ERR(amp_gemm_f64(amp, (amp_order)order, AMP_NO_TRANS, AMP_NO_TRANS, m, n, k, 1, &x, ld, &x, ld, 0, &y, ld),
                          AMP_ERR_SIZE);
                CHECK(y == 2);
            }
    for (int i = 0; i < 4; i++) {
        amp_range range;
        amp_scaler *scaler;
        int32_t apply;
        CHECK_ERR(amp_convert(out, AMP_F32, in, AMP_F32, big[i], NULL, NULL), AMP_ERR_SIZE);
        CHECK_ERR(amp_convert(out, AMP_F32, in, AMP_BF16, big[i], NULL, NULL), AMP_ERR_SIZE);
        CHECK_ERR(amp_convert(out, AMP_F16, in, AMP_F32, big[i], NULL, NULL), AMP_ERR_SIZE);
        memset(&range, 0, sizeof range);
        range.data = out; range.count = big[i]; range.dtype = AMP_F32;
        CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
        CHECK_ERR(amp_scaler_unscale(scaler, &range, 1, &apply), AMP_ERR_SIZE);
        amp_scaler_destroy(scaler);
    }
}

/* Strides of what has no elements mean nothing: those of PyTorch's empty tensors, and of slices, are taken. */
TEST(strides_of_nothing) {
    static const int64_t first[] = {4, 20, 1};
    amp_param w = param_of("w", in, NULL, 4, 4);
    for (int k = 0; k < 3; k++) {
        amp_linear_op lin;
        memset(&lin, 0, sizeof lin);
        lin.x = amp_tensor3(in, AMP_F32, 3, 0, 4);
        lin.x.stride[0] = first[k]; lin.x.stride[1] = 4; lin.x.stride[2] = 1;
        lin.y = amp_tensor3(out, AMP_F32, 3, 0, 4);
        lin.weight = &w;
        CHECK_OK(amp_linear(contexts[n_contexts - 1], &lin));
    }
}

/* Keys and values shared by all heads, matrices shared by all batches: as if each had its own copy.  As outputs refused. */
TEST(inputs_may_repeat_and_outputs_may_not) {
    for (int c = 0; c < n_contexts; c++) {
        static float copies[B * T * H * D], want[B * T * H * D], got[B * T * H * D], lse[B * H * T];
        amp_context *amp = contexts[c];
        amp_attention_op op;
        amp_matmul_op mm;
        fresh();
        for (int i = 0; i < B * T * H * D; i++) copies[i] = in[64 + i / (H * D) * D + i % D];
        memset(&op, 0, sizeof op);
        op.q = amp_tensor4(in, AMP_F32, B, T, H, D); op.k = op.v = amp_tensor4(copies, AMP_F32, B, T, H, D);
        op.o = amp_tensor4(want, AMP_F32, B, T, H, D); op.lse = lse;
        CHECK_OK(amp_attention(amp, &op));
        op.k.data = in + 64;
        op.k.stride[0] = T * D; op.k.stride[1] = D; op.k.stride[2] = 0; op.k.stride[3] = 1;
        op.v = op.k;
        op.o.data = got;
        CHECK_OK(amp_attention(amp, &op));
        CHECK(memcmp(got, want, sizeof want) == 0);
        op.d_o = op.q; op.dq = op.o; op.dv = amp_tensor4(copies, AMP_F32, B, T, H, D);
        op.dk = op.k;
        op.dk.data = out;
        CHECK_ERR(amp_attention_backward(amp, &op), AMP_ERR_SHAPE);
        CHECK_MSG(strstr(amp_last_error(), ".dk: elements overlap, dimension 2 has stride 0") != NULL && untouched(out, 0), "%s", amp_last_error());
        op.o = op.k;
        op.o.data = out;
        CHECK_ERR(amp_attention(amp, &op), AMP_ERR_SHAPE);
        memset(&mm, 0, sizeof mm);
        mm.a = amp_tensor3(in, AMP_F32, 3, 4, 5); mm.b = amp_tensor3(in + 9, AMP_F32, 3, 5, 4); mm.y = amp_tensor3(got, AMP_F32, 3, 4, 4);
        mm.a.stride[0] = 0; mm.a.stride[1] = 5; mm.a.stride[2] = 1;
        CHECK_OK(amp_matmul(amp, &mm));
        for (int i = 0; i < 3; i++) {
            mm.a = amp_tensor2(in, AMP_F32, 4, 5); mm.b = amp_tensor2(in + 9 + 20 * i, AMP_F32, 5, 4); mm.y = amp_tensor2(want, AMP_F32, 4, 4);
            CHECK_OK(amp_matmul(amp, &mm));
            CHECK(memcmp(want, got + 16 * i, 16 * sizeof *want) == 0);
        }
        mm.a = amp_tensor3(in, AMP_F32, 3, 4, 5); mm.b = amp_tensor3(in + 9, AMP_F32, 3, 5, 4); mm.y = amp_tensor3(out, AMP_F32, 3, 4, 4);
        mm.y.stride[0] = 8; mm.y.stride[1] = 4; mm.y.stride[2] = 1;
        CHECK_ERR(amp_matmul(amp, &mm), AMP_ERR_SHAPE);
        mm.y.stride[0] = (int64_t)1 << 60;
        CHECK_ERR(amp_matmul(amp, &mm), AMP_ERR_SHAPE);
        CHECK_MSG(strstr(amp_last_error(), ".y: dimension 0 has stride 1152921504606846976") != NULL, "%s", amp_last_error());
        mm.y = amp_tensor1(out, AMP_F32, 48);
        CHECK_ERR(amp_matmul(amp, &mm), AMP_ERR_SHAPE);
        CHECK_MSG(strstr(amp_last_error(), ".y has 1 dimensions") != NULL, "%s", amp_last_error());
        CHECK(untouched(out, 0));
    }
}

/* ---- 2^31 + 1 elements: one piece of memory mapped again and again, with the last element alone in a page */

#define MANY (((int64_t)1 << 31) + 1)
enum { PIECE = 1 << 21, PAGE = 1 << 16 };

/* 2^32 bytes of bf16 ones, and `tail` behind them; NULL where the system does not do that. */
#if defined(_WIN32)
static uint8_t *many_ones(uint16_t **tail) { *tail = NULL; return NULL; }
#else
static __attribute__((unused)) uint8_t *many_ones(uint16_t **tail) {
    FILE *file = tmpfile();
    size_t bytes = ((size_t)1 << 32) + PAGE, at;
    uint8_t *all = (uint8_t *)mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *piece;
    int fd = file == NULL ? -1 : fileno(file);
    if (fd < 0 || all == (uint8_t *)MAP_FAILED || ftruncate(fd, PIECE + PAGE) != 0) return NULL;
    for (at = 0; at < bytes; at += PIECE)
        if (mmap(all + at, at + PIECE < bytes ? PIECE : PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, at + PIECE < bytes ? 0 : PIECE) == MAP_FAILED) return NULL;
    for (piece = all, at = 0; at < PIECE / 2; at++) ((uint16_t *)(void *)piece)[at] = 0x3f80;
    *tail = (uint16_t *)(void *)(all + bytes - PAGE);
    fclose(file);
    return all;
}
#endif

TEST(more_elements_than_32_bits_count) {
#if defined(SANITIZED) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    SKIP("2^31 elements take a sanitizer half a minute");
#else
    uint16_t *tail = NULL;
    uint8_t *all = many_ones(&tail);
    amp_context *amp = contexts[n_contexts - 1];
    amp_range range = range_of("many", all, MANY, AMP_BF16);
    amp_tensor_stats_desc nd;
    amp_tensor_stats *numerics = NULL;
    amp_tensor_stats_report report;
    amp_mse_op mse;
    amp_grad_stats f;
    int64_t first = 0;
    float loss = 0;
    if (all == NULL) SKIP("no memory can be mapped so often");
    tail[0] = 0x7f80;
    CHECK(amp_count_nonfinite(all, AMP_BF16, MANY, &first) == 1 && first == MANY - 1);
    tail[0] = 0x7f7c;               /* as E5M2 infinity, behind bytes that are -0 and 1.75 */
    CHECK(amp_count_nonfinite((uint8_t *)tail - (MANY - 1), AMP_E5M2, MANY, &first) == 1 && first == MANY - 1);
    tail[0] = 0x3f80;
    f = found_in(amp, &range, 1, 1, AMP_CHECK_READ);
    CHECK_MSG(f.found_inf == 0 && f.norm == (float)sqrt((double)MANY), "norm %.9g", (double)f.norm);     /* every partial sum is an integer */
    tail[0] = 0x4380;               /* 256 */
    memset(&nd, 0, sizeof nd);
    nd.ranges = &range; nd.n_ranges = 1; nd.dtype = AMP_E4M3;
    CHECK_OK(amp_tensor_stats_create(amp, &numerics, &nd));
    CHECK_OK(amp_tensor_stats_step(numerics, &report));
    CHECK(report.rows[0].count == MANY && report.rows[0].largest == 256 && report.rows[0].saturation == 1 / (double)MANY);
    amp_tensor_stats_destroy(numerics);
    memset(&mse, 0, sizeof mse);    /* x[i] and x[i + 1]: the last two differ by 255 */
    tail[1] = 0x4380;
    mse.x = amp_tensor1(all, AMP_BF16, MANY); mse.target = amp_tensor1(all + 2, AMP_BF16, MANY);
    mse.loss = &loss;
    CHECK_OK(amp_mse(amp, &mse));
    CHECK_MSG(fabs((double)loss * (double)MANY - 255.0 * 255.0) <= 255.0 * 255.0 * ldexp(1, -23), "loss %.9g", (double)loss);
    CHECK_EQ(amp_tensor_count(&mse.x), MANY);
    CHECK_OK(amp_verify_placement(amp, &range, 1));
    munmap(all, ((size_t)1 << 32) + PAGE);
#endif
}

/* A file of 2^31 + 1 tokens that are made as they are read: token i is i mod 251. */
static int ramp_open(void *user, const char *path, int for_writing, intptr_t *file) { (void)user; (void)path; *file = 0; return for_writing ? -EACCES : 0; }
static int64_t ramp_size(void *user, intptr_t file) { (void)user; (void)file; return MANY; }
static int ramp_close(void *user, intptr_t file) { (void)user; (void)file; return 0; }
static int64_t ramp_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    int64_t n = (int64_t)bytes < MANY - offset ? (int64_t)bytes : MANY - offset;
    (void)user; (void)file;
    for (int64_t i = 0; i < n; i++) ((uint8_t *)buffer)[i] = (uint8_t)((offset + i) % 251);
    return n < 0 ? 0 : n;
}

TEST(more_tokens_than_32_bits_count) {
    amp_desc desc;
    amp_context *amp = NULL;
    amp_loader_desc d;
    amp_loader *l = NULL;
    amp_loader_info info;
    amp_batch b;
    memset(&desc, 0, sizeof desc);
    memset(&d, 0, sizeof d);
    desc.system.file_open = ramp_open; desc.system.file_size = ramp_size; desc.system.file_read = ramp_read; desc.system.file_close = ramp_close;
    CHECK_OK(amp_open(&amp, &desc));
    d.path = "tokens"; d.format = AMP_TOKENS_BYTES; d.batch = 4; d.seq = 1024; d.workers = AMP_NO_WORKERS;
    CHECK_OK(amp_loader_create(amp, &l, &d));
    CHECK_OK(amp_loader_info_get(l, &info));
    CHECK(info.tokens == MANY && info.samples == (MANY - 1) / 1024 && info.batches == info.samples / 4);
    CHECK_OK(amp_loader_seek(l, 0, info.batches - 1));
    CHECK_OK(amp_loader_next(l, &b));
    for (int64_t i = 0; i < 4 * 1024; i++) {
        int64_t place = (info.samples - 4) * 1024 + i;
        CHECK(b.inputs[i] == place % 251 && b.targets[i] == (place + 1) % 251);
    }
    amp_loader_destroy(l);
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    for (int path = AMP_CPU_SCALAR; path < AMP_CPU_PATHS; path++)
        if ((contexts[n_contexts] = open_context((amp_cpu_path)path)) != NULL) n_contexts++;
    RUN(casts_keep_what_the_format_can_hold);
    RUN(identities_change_no_bit);
    RUN(gradients_that_are_not_finite_are_found_everywhere);
    RUN(unscaling_rounds_once_and_keeps_what_there_is);
    RUN(norms_at_both_ends_of_the_range);
    RUN(clipping_of_huge_and_tiny_norms);
    RUN(scales_at_both_ends);
    RUN(a_scale_without_floor_falls_to_the_smallest_usable);
    RUN(products_without_elements);
    RUN(attention_and_softmax_without_elements);
    RUN(rows_without_elements);
    RUN(losses_of_no_rows_and_of_ignored_rows);
    RUN(training_of_no_elements);
    RUN(sizes_that_overflow_are_refused);
    RUN(labels_and_ids_out_of_range);
    RUN(masks_at_and_beyond_their_ends);
    RUN(rows_that_overlap_are_refused);
    RUN(sizes_beyond_any_memory);
    RUN(strides_of_nothing);
    RUN(inputs_may_repeat_and_outputs_may_not);
    RUN(more_elements_than_32_bits_count);
    RUN(more_tokens_than_32_bits_count);
    while (n_contexts > 0) amp_close(contexts[--n_contexts]);
    return TEST_END();
}
