/* t_fp8.c - tests linear layers in fp8: operands and scales against PyTorch's, bit for bit, and products against fp64.
 *
 *     gcc -O2 -Itests tests/unit/t_fp8.c -o t_fp8 -lm -lpthread && ./t_fp8      (from the project root) */
#if !defined(_GNU_SOURCE)
#  define _GNU_SOURCE
#endif
#define AMP_IMPLEMENTATION
#include "../amp.h"
#define AMPT_TRAPS
#include "test.h"
#include "alike.h"
#include "golden.h"
#include <fenv.h>
#include <stdlib.h>
#include <unistd.h>

enum { M = 136, K = 140, N = 132, SPECIAL = 96 };

static const amp_fp8_scaling scalings[] = {AMP_FP8_CURRENT, AMP_FP8_BLOCK, AMP_FP8_MX};
static const char *const modes[] = {"current", "block", "mx"};
static const amp_dtype formats[] = {AMP_E4M3, AMP_E5M2};
static const char *const fp8_names[] = {"e4m3", "e5m2"};
enum { MODES = sizeof scalings / sizeof *scalings };

static ampt_golden fp8_golden;

static float *fp8_room(int64_t n) { return (float *)calloc((size_t)n + 16, sizeof(float)); }

/* The oracle's inputs: numbers of very different sizes. */
static float *wide(uint32_t stream, int64_t rows, int64_t cols) {
    float *x = fp8_room(rows * cols);
    ampt_uniform(x, rows * cols, 8, stream, 1, 0);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) x[i * cols + j] = ldexpf(x[i * cols + j], -(int)((i * 7 + j * 3) % 13));
    return x;
}

static amp_context *open_fp8(amp_fp8_scaling scaling, amp_fp8_format format, amp_cpu_path path, int threads) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = AMP_FP8;
    d.fp8.scaling = scaling;
    d.fp8.format = format;
    d.cpu_path = path;
    d.threads = threads;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

/* ---- Operands and scales */

/* Holds an operand in all of a CPU's instruction sets against the oracle's patterns and scales. */
static void check_operand(const char *key, const float *x, int64_t rows, int64_t cols, amp_dtype dtype,
                          amp_fp8_scaling scaling, int along, int square) {
    char record[80];
    int64_t n, blocks;
    int32_t *packed = (int32_t *)ampt_golden_read(&fp8_golden, key, 3, &n);
    float *scales, *y = fp8_room(rows * cols);
    const uint8_t *q = (const uint8_t *)packed;
    int64_t size = scaling == AMP_FP8_CURRENT ? 0 : scaling == AMP_FP8_BLOCK ? 128 : 32;
    int64_t down = size == 0 ? rows : square || !along ? size : 1, across = size == 0 ? cols : square || along ? size : 1;
    int64_t in_a_row = (cols + across - 1) / across;
    snprintf(record, sizeof record, "%s/scales", key);
    scales = (float *)ampt_golden_read(&fp8_golden, record, 1, &blocks);
    for (int path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
        amp_context *amp = open_fp8(scaling, AMP_FP8_HYBRID, (amp_cpu_path)path, path % 2 + 1);
        amp_k_fp8 how = {square, 0, dtype, scaling, NULL, NULL, 0, 0};
        ampi_gemm_operand from = {x, AMP_F32, AMP_FP8, cols, along};
        ampi_fp8_job job = ampi_fp8_job_of((ampi_cpu *)amp->dev, &how, &from, along ? cols : rows, along ? rows : cols, y);
        int wrong = 0;
        ampi_fp8_cast((ampi_cpu *)amp->dev, &job);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++) {
                float scale = scales[i / down * in_a_row + j / across], back = job.spread;
                uint32_t pattern = q[i * cols + j], want, got = (uint32_t)((const uint16_t *)y)[i * cols + j] << 16;
                want = dtype == AMP_E4M3 ? ampi_bits_of_e4m3((uint8_t)pattern)
                                         : ampi_bits_of_f16((uint16_t)(pattern << 8));
                ampi_fp host = ampi_fp_begin();     /* a power of two, which bf16 undoes exactly */
                if (size > 0) back = (ampi_bits_f32(scale) & 0x7fffffffu) > 0x7f800000u ? 1 : 1 / scale;
                want = ampi_bits_f32(ampi_f32_of_bits(want) * back);
                ampi_fp_end(host);
                if ((want & 0x7fffffffu) > 0x7f800000u) wrong += (got & 0x7fffffffu) <= 0x7f800000u;
                else wrong += got != (uint32_t)amp_bf16_from_f32(ampi_f32_of_bits(want), 0) << 16;
            }
        CHECK_MSG(wrong == 0, "%s on path %d: %d of %d differ", key, path, wrong, (int)(rows * cols));
        if (size == 0) {
            ampi_fp host = ampi_fp_begin();
            uint32_t undoes = ampi_bits_f32(ampi_inverse(scales[0])), undone = ampi_bits_f32(job.factor * job.spread);
            ampi_fp_end(host);
            CHECK_MSG(ampi_bits_f32(job.scale) == ampi_bits_f32(scales[0]) && undone == undoes, "%s", key);
        }
        CHECK_EQ(job.count.values, rows * cols);
        amp_close(amp);
    }
    free(packed); free(scales); free(y);
}

TEST(operands_are_those_of_pytorch) {
    char key[64];
    float *data[3] = {wide(0, M, K), wide(1, N, K), wide(2, M, N)};
    static const char *const what[] = {"x", "w", "dy"};
    static const int64_t rows[] = {M, N, M}, cols[] = {K, K, N};
    for (int t = 0; t < 3; t++)
        for (int s = 0; s < MODES; s++)
            for (int along = s == 0 ? 1 : 0; along < 2; along++)
                for (int f = 0; f < (t == 2 ? 2 : 1); f++) {
                    snprintf(key, sizeof key, "%s/%s/%s/%d", what[t], modes[s], fp8_names[f], along);
                    check_operand(key, data[t], rows[t], cols[t], formats[f], scalings[s], along, t == 1 && s == 1);
                }
    for (int t = 0; t < 3; t++) free(data[t]);
}

TEST(scales_of_zero_tiny_infinite_and_nan) {
    static const char *const kinds[] = {"zeros", "tiny", "small", "huge", "infinite", "nan", "largest", "powers"};
    static const int power[] = {0, -140, -122, 127, 0, 0, 0, 0};
    float base[SPECIAL], x[SPECIAL];
    char key[64];
    ampt_uniform(base, SPECIAL, 9, 0, 1, 0);
    for (int t = 0; t < 8; t++) {
        ampi_fp host = ampi_fp_begin();
        for (int i = 0; i < SPECIAL; i++)
            x[i] = t == 0 ? ampi_f32_of_bits(ampi_bits_f32(base[i]) & 0x80000000u) : t == 7 ? ldexpf(1.75f, i % 40 - 20) : ldexpf(base[i], power[t]);
        if (t >= 4 && t <= 6) x[70] = ampi_f32_of_bits(t == 4 ? 0x7f800000u : t == 5 ? 0x7fc00000u : 0x7f7fffffu);
        ampi_fp_end(host);
        for (int s = 0; s < MODES; s++)
            for (int f = 0; f < 2; f++) {
                snprintf(key, sizeof key, "special/%s/%s/%s/1", kinds[t], modes[s], fp8_names[f]);
                check_operand(key, x, 1, SPECIAL, formats[f], scalings[s], 1, 0);
            }
    }
}

/* ---- Products */

typedef struct layer {
    float *x, *w, *dy, *y, *dx, *dw;
    amp_param weight;
    amp_linear_op op;
} layer;

static void layer_make(layer *l) {
    memset(l, 0, sizeof *l);
    l->x = wide(0, M, K); l->w = wide(1, N, K); l->dy = wide(2, M, N);
    l->y = fp8_room(M * N); l->dx = fp8_room(M * K); l->dw = fp8_room(N * K);
    l->weight.name = "w";
    l->weight.weight = amp_tensor2(l->w, AMP_F32, N, K);
    l->weight.grad = amp_tensor2(l->dw, AMP_F32, N, K);
    l->op.weight = &l->weight;
    l->op.x = amp_tensor2(l->x, AMP_F32, M, K); l->op.y = amp_tensor2(l->y, AMP_F32, M, N);
    l->op.dy = amp_tensor2(l->dy, AMP_F32, M, N); l->op.dx = amp_tensor2(l->dx, AMP_F32, M, K);
}
static void layer_free(layer *l) {
    free(l->x); free(l->w); free(l->dy); free(l->y); free(l->dx); free(l->dw);
}

static void layer_run(amp_context *amp, layer *l) {
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_linear(amp, &l->op));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_EQ(l->op.plan.compute, AMP_FP8);
    CHECK_EQ(l->op.plan.result, AMP_BF16);
    l->weight.grad_live = 0;
    CHECK_OK(amp_linear_backward(amp, &l->op));
}

/* Each row's sum with random weights; a sum of k terms has at most k roundings, of which some beside the product's. */
static void check_product(const char *key, const float *got, int64_t rows, int64_t cols, int64_t k) {
    char record[80];
    int64_t n;
    float weights[K];
    double *want = (double *)ampt_golden_read(&fp8_golden, key, 2, &n), *terms, worst = 0;
    snprintf(record, sizeof record, "%s/terms", key);
    terms = (double *)ampt_golden_read(&fp8_golden, record, 2, &n);
    ampt_uniform(weights, cols, 10, (uint32_t)cols, 1, 0);
    CHECK_EQ(n, rows);
    for (int64_t i = 0; i < rows; i++) {
        double sum = 0;
        for (int64_t j = 0; j < cols; j++) sum += (double)got[i * cols + j] * (double)weights[j];
        worst = fmax(worst, fabs(sum - want[i]) / terms[i]);
    }
    CHECK_MSG(worst <= (double)(k + 2) * 0x1p-24, "%s: error %.3g of the terms", key, worst);
    ampt_figure(key, worst, (double)(k + 2) * 0x1p-24);
    free(want); free(terms);
}

TEST(products_are_those_of_fp64) {
    char key[64];
    layer l;
    for (int path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path))
        for (int s = 0; s < MODES; s++)
            for (int f = 0; f < 2; f++)
                for (int cached = 0; cached < 2; cached++) {
                    amp_context *amp = open_fp8(scalings[s], f ? AMP_FP8_HYBRID : AMP_FP8_E4M3, (amp_cpu_path)path, 2);
                    layer_make(&l);
                    if (cached) CHECK_OK(amp_param_register(amp, &l.weight, 1));
                    for (int again = 0; again <= cached; again++) layer_run(amp, &l);
                    snprintf(key, sizeof key, "y/%s", modes[s]);
                    check_product(key, l.y, M, N, K);
                    snprintf(key, sizeof key, "dx/%s/%s", modes[s], fp8_names[f]);
                    check_product(key, l.dx, M, K, N);
                    snprintf(key, sizeof key, "dw/%s/%s", modes[s], fp8_names[f]);
                    check_product(key, l.dw, N, K, M);
                    amp_close(amp);
                    layer_free(&l);
                }
}

static int same(const float *a, const float *b, int64_t n) { return memcmp(a, b, (size_t)n * sizeof *a) == 0; }

/* Threads, the cast cache and accumulation leave the bits. */
TEST(threads_and_the_cache_leave_the_bits) {
    for (int s = 0; s < MODES; s++) {
        layer first, other;
        amp_context *amp = open_fp8(scalings[s], AMP_FP8_HYBRID, AMP_CPU_DEFAULT, 1);
        amp_cache_info info;
        layer_make(&first);
        layer_run(amp, &first);
        amp_close(amp);
        for (int threads = 2; threads < 6; threads += 3) {
            amp = open_fp8(scalings[s], AMP_FP8_HYBRID, AMP_CPU_DEFAULT, threads);
            layer_make(&other);
            CHECK_OK(amp_param_register(amp, &other.weight, 1));
            for (int micro = 0; micro < 3; micro++) layer_run(amp, &other);
            CHECK(same(first.y, other.y, M * N) && same(first.dx, other.dx, M * K) && same(first.dw, other.dw, N * K));
            CHECK_OK(amp_cast_cache_info(amp, &info));      /* both orientations, written once */
            CHECK_MSG(info.misses == 2 && info.hits == 4, "%lld, %lld", (long long)info.misses, (long long)info.hits);
            other.w[5] += 1;
            amp_param_changed(&other.weight);
            layer_run(amp, &other);
            CHECK(!same(first.y, other.y, M * N));
            amp_close(amp);
            layer_free(&other);
        }
        layer_free(&first);
    }
}

/* One operand times 2^100, the other times 2^-100: the products are what they were, and rows of zeros stay zeros. */
TEST(magnitudes_far_apart) {
    layer l, far;
    amp_context *amp = open_fp8(AMP_FP8_CURRENT, AMP_FP8_HYBRID, AMP_CPU_DEFAULT, 2);
    layer_make(&l);
    layer_make(&far);
    for (int64_t j = 0; j < K; j++) l.x[j] = far.x[j] = 0;
    for (int sign = -1; sign <= 1; sign += 2) {
        for (int64_t i = 0; i < M * K; i++) far.x[i] = ldexpf(l.x[i], 100 * sign);
        for (int64_t i = 0; i < N * K; i++) far.w[i] = ldexpf(l.w[i], -100 * sign);
        layer_run(amp, &l);
        layer_run(amp, &far);
        CHECK(same(l.y, far.y, M * N));
    }
    for (int64_t i = 0; i < N * K; i++) far.w[i] = ldexpf(l.w[i], 100);     /* both beyond: infinite, but for zeros */
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_linear(amp, &far.op));
    CHECK_OK(amp_autocast_end(amp));
    for (int64_t j = 0; j < N; j++) CHECK(far.y[j] == 0);
    amp_close(amp);
    layer_free(&l);
    layer_free(&far);
}

#if defined(FE_UPWARD) && defined(FE_TOWARDZERO)
/* The rounding mode of the host has no say, neither when weights are packed nor in products. */
TEST(any_rounding) {
    static const int modes_of_c[] = {FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO};
    for (int s = 0; s < MODES; s++) {
        layer l[3];
        for (int m = 0; m < 3; m++) {
            amp_context *amp = open_fp8(scalings[s], AMP_FP8_HYBRID, AMP_CPU_DEFAULT, 2);
            layer_make(&l[m]);
            CHECK_OK(amp_param_register(amp, &l[m].weight, 1));
            fesetround(modes_of_c[m]);
            layer_run(amp, &l[m]);
            fesetround(FE_TONEAREST);
            CHECK(same(l[0].y, l[m].y, M * N) && same(l[0].dx, l[m].dx, M * K) && same(l[0].dw, l[m].dw, N * K));
            amp_close(amp);
        }
        for (int m = 0; m < 3; m++) layer_free(&l[m]);
    }
}
#else
TEST(any_rounding) { SKIP("no rounding modes"); }
#endif

/* ---- Regions */

static amp_plan decided(amp_context *amp, int32_t op, const char *name) {
    amp_dtype in[2] = {AMP_F32, AMP_F32};
    amp_plan plan;
    CHECK_OK(amp_autocast_decide(amp, op, name, in, 2, &plan));
    return plan;
}

TEST(only_linear_layers_compute_in_fp8) {
    static const amp_policy policies[] = {AMP_POLICY_FUSED, AMP_POLICY_TORCH};
    amp_context *amp = open_fp8(AMP_FP8_SCALING_DEFAULT, AMP_FP8_FORMAT_DEFAULT, AMP_CPU_DEFAULT, 1);
    amp_desc now;
    memset(&now, 0, sizeof now);
    CHECK_OK(amp_query(amp, &now));
    CHECK(now.fp8.scaling == AMP_FP8_CURRENT && now.fp8.format == AMP_FP8_HYBRID);
    for (int p = 0; p < 2; p++) {
        amp_autocast_desc region;
        memset(&region, 0, sizeof region);
        region.policy = policies[p];
        CHECK_OK(amp_autocast_begin(amp, &region));
        CHECK_EQ(decided(amp, AMP_OP_LINEAR, NULL).compute, AMP_FP8);
        CHECK_EQ(decided(amp, AMP_OP_LINEAR, NULL).result, AMP_BF16);
        CHECK_EQ(decided(amp, AMP_OP_MATMUL, NULL).compute, AMP_BF16);
        CHECK_EQ(decided(amp, AMP_OP_GEMM, NULL).compute, AMP_BF16);
        CHECK_EQ(decided(amp, AMP_OP_ATTENTION, NULL).compute, AMP_BF16);
        CHECK_EQ(decided(amp, AMP_OP_LINEAR_CROSS_ENTROPY, NULL).compute, AMP_BF16);
        CHECK_EQ(decided(amp, AMP_OP_LAYERNORM, NULL).compute, AMP_F32);
        CHECK_OK(amp_layer_override(amp, "head*", AMP_BF16));
        CHECK_EQ(decided(amp, AMP_OP_LINEAR, "head.weight").compute, AMP_BF16);
        CHECK_OK(amp_autocast_end(amp));
    }
    CHECK_OK(amp_set_dtype(amp, AMP_BF16));
    CHECK_OK(amp_layer_override(amp, "body*", AMP_FP8));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(decided(amp, AMP_OP_LINEAR, "other").compute, AMP_BF16);
    CHECK_EQ(decided(amp, AMP_OP_LINEAR, "body.1").compute, AMP_FP8);
    CHECK_EQ(decided(amp, AMP_OP_MATMUL, "body.1").compute, AMP_BF16);
    CHECK_OK(amp_autocast_end(amp));
    amp_close(amp);
}

TEST(the_choice_says_emulated_and_never_takes_it_by_itself) {
    amp_machine machine;
    amp_choice choice = {0};
    CHECK_OK(amp_machine_probe(&machine));
    CHECK_OK(amp_choose(&machine, AMP_FP8, 0, &choice));
    CHECK(choice.dtype == AMP_FP8 && choice.emulated && !choice.scaler && strstr(choice.reason, "emulated") != NULL);
    machine.device.fp8 = 1;
    CHECK_OK(amp_choose(&machine, AMP_FP8, 0, &choice));
    CHECK(!choice.emulated);
    CHECK_OK(amp_choose(&machine, AMP_DTYPE_DEFAULT, 0, &choice));
    CHECK(choice.dtype != AMP_FP8);
    snprintf(machine.device.kind, sizeof machine.device.kind, "cuda");
    machine.device.fp8 = 0;
    machine.device.bf16 = 1; machine.device.cc_major = 8;
    CHECK_ERR(amp_choose(&machine, AMP_FP8, 0, &choice), AMP_ERR_UNSUPPORTED);
    CHECK_OK(amp_choose(&machine, AMP_FP8, 1, &choice));
    CHECK(choice.dtype == AMP_BF16 && choice.fell_back);
}

/* amp_tune and amp_verify try it by themselves, and amp_advise advises it, only where the device has it. */
TEST(care_takes_it_only_from_hardware) {
    amp_context *amp = open_fp8(AMP_FP8_CURRENT, AMP_FP8_HYBRID, AMP_CPU_DEFAULT, 1);
    amp_verify_report v;
    amp_advise_desc d;
    amp_advice a;
    memset(&v, 0, sizeof v);
    memset(&d, 0, sizeof d);
    d.verified = &v;
    v.n_rows = 1;
    v.rows[0].dtype = AMP_FP8;
    v.rows[0].verdict = AMP_VERDICT_PASS;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.settings.dtype != AMP_FP8);
    amp->machine.device.fp8 = 1;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.settings.dtype == AMP_FP8 && strstr(a.dtype_reason, "verified") != NULL);
    v.rows[0].verdict = AMP_VERDICT_INACCURATE;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.settings.dtype != AMP_FP8);
    v.n_rows = 0;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.settings.dtype != AMP_FP8);
    amp_close(amp);
}

/* Levels O2 and O3 store weights in bf16, O0 computes in fp32. */
TEST(levels) {
    static const amp_dtype stored[] = {AMP_F32, AMP_F32, AMP_BF16, AMP_BF16};
    for (int level = 0; level < 4; level++) {
        amp_context *amp = NULL;
        amp_choice choice = {0};
        amp_desc d;
        memset(&d, 0, sizeof d);
        d.dtype = AMP_FP8;
        d.level = (amp_level)(AMP_LEVEL_O0 + level);
        CHECK_OK(amp_open(&amp, &d));
        CHECK_OK(amp_query_choice(amp, &choice));
        CHECK_EQ(choice.dtype, level == 0 ? AMP_F32 : AMP_FP8);
        CHECK_EQ(amp_param_dtype(amp, 0), stored[level]);
        CHECK_EQ(amp_param_dtype(amp, 1), level == 3 ? AMP_BF16 : AMP_F32);
        if (level >= 2) {
            CHECK_OK(amp_set_dtype(amp, AMP_BF16));
            CHECK_ERR(amp_set_dtype(amp, AMP_F16), AMP_ERR_CONFLICT);
            CHECK(strstr(amp_last_error(), "weights in bf16") != NULL);
        }
        amp_close(amp);
    }
}

TEST(fp8_refusals) {
    amp_context *amp = NULL;
    amp_backend other = *amp_cpu();
    amp_desc d;
    CHECK_ERR(amp_fp8_stats_get(NULL, NULL, AMP_FP8_X, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_fp8_save(NULL, NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_fp8_load(NULL, NULL, NULL), AMP_ERR_NULL);
    memset(&d, 0, sizeof d);
    d.fp8.scaling = (amp_fp8_scaling)17;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), ".fp8.scaling") != NULL);
    memset(&d, 0, sizeof d);
    d.fp8.format = (amp_fp8_format)-1;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_RANGE);
    other.quantizes = 0;
    memset(&d, 0, sizeof d);
    d.backend = &other;
    d.dtype = AMP_FP8;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
    d.allow_fallback = 1;
    d.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&amp, &d));
    amp_close(amp);
}

/* ---- Delayed scaling */

TEST(delayed_scales_are_those_of_transformer_engine) {
    static const float amaxes[] = {3.0f, 1.0f, 0.25f, 0.0f, 0.5f, 7e4f, 1e-3f, 0.125f, 1e-40f, 0.1f, 0.2f, 1e-44f, 2e-45f,
                                   1e-45f, 3e-45f, 5.0f};
    char key[32];
    for (int recent = 0; recent < 2; recent++)
        for (int margin = 0; margin < 4; margin += 3) {
            amp_k_fp8_slot slot;
            uint32_t history[4] = {0}, amax;
            amp_k_fp8_update u = {&slot, 1, 1, &amax, history, 4, recent, margin, {AMP_E4M3, AMP_E4M3, AMP_E5M2}};
            int64_t n;
            float *want;
            memset(&slot, 0, sizeof slot);
            snprintf(key, sizeof key, "delayed/%d/%d", recent, margin);
            want = (float *)ampt_golden_read(&fp8_golden, key, 1, &n);
            CHECK_EQ(n, (int64_t)(sizeof amaxes / sizeof *amaxes));
            for (int i = 0; i < n; i++) {
                amax = ampi_bits_f32(amaxes[i]);
                CHECK_OK(amp_cpu()->fp8_update(NULL, &u, NULL));
                CHECK_MSG(ampi_bits_f32(slot.scale) == ampi_bits_f32(want[i]), "%s, step %d: %g, not %g", key, i,
                          (double)slot.scale, (double)want[i]);
                CHECK_EQ(amax, 0);
            }
            free(want);
        }
}

/* A magnitude is in the scale for as many steps as the history has places, in whichever of them it stands; what lay
   there before the history was filled does not count, nor does a step without a tensor. */
TEST(every_place_of_a_history_counts) {
    for (int length = 1; length <= 5; length++)
        for (int first = 0; first < 2 * length; first++) {
            uint32_t history[5], amax = 0;
            amp_k_fp8_slot slot;
            amp_k_fp8_update u = {&slot, 1, 1, &amax, history, length, 0, 0, {AMP_E4M3, AMP_E4M3, AMP_E5M2}};
            memset(&slot, 0, sizeof slot);
            for (int i = 0; i < length; i++) history[i] = ampi_bits_f32(1e30f);
            for (int step = 0; step < first + 2 * length; step++) {
                float largest = step >= first && step < first + length ? 7.0f : 1.0f;
                amax = ampi_bits_f32(step == first ? 7.0f : 1.0f);
                ampi_fp8_update(&u, 0, &slot, &amax);
                CHECK_MSG(slot.scale == 448 / largest, "length %d, largest in step %d: in step %d the scale is %g", length, first,
                          step, (double)slot.scale);
                ampi_fp8_update(&u, 0, &slot, &amax);
                CHECK(slot.scale == 448 / largest && slot.updates == step + 1);
            }
        }
}

/* A context with delayed scaling, a layer and its optimizer, whose step changes nothing but versions. */
typedef struct trainer { amp_context *amp; amp_optimizer *optimizer; layer l; float planted; } trainer;

static float other_rank;
static int raise_all(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    float *x = (float *)data;
    (void)user; (void)stream;
    for (int64_t i = 0; dtype == AMP_F32 && op == AMP_REDUCE_MAX && count == 3 && i < 3; i++)
        if (x[i] < other_rank && x[i] != (float)(int)x[i]) x[i] = other_rank;       /* of histories, not flags or rows */
    return 0;
}

static void trainer_of(trainer *t, const amp_fp8_recipe *recipe, int world) {
    amp_optimizer_desc o;
    amp_desc d;
    memset(t, 0, sizeof *t);
    memset(&d, 0, sizeof d);
    memset(&o, 0, sizeof o);
    d.dtype = AMP_FP8;
    d.threads = 2;
    d.logger.level = AMP_LOG_ERROR;
    d.fp8 = *recipe;
    d.reducer.world = world;
    d.reducer.reduce = raise_all; d.reducer.calls = &alike;
    CHECK_OK(amp_open(&t->amp, &d));
    layer_make(&t->l);
    CHECK_OK(amp_param_register(t->amp, &t->l.weight, 1));
    o.kind = AMP_SGD;
    o.params = &t->l.weight; o.n_params = 1;
    o.lr = 1e-3f;
    CHECK_OK(amp_optimizer_create(t->amp, &t->optimizer, &o));
}
static void trainer_open(trainer *t, int history, amp_fp8_amax amax, int world) {
    const amp_fp8_recipe recipe = {.format = AMP_FP8_HYBRID, .scaling = AMP_FP8_DELAYED, .amax = amax, .history = history};
    trainer_of(t, &recipe, world);
}
static void trainer_close(trainer *t) {
    amp_optimizer_destroy(t->optimizer);
    amp_close(t->amp);
    layer_free(&t->l);
}

/* Forward and backward, or a step, with x's first channel times `planted`. */
static void trainer_pass(trainer *t, float planted) {
    float *x = wide(0, M, K);
    for (int64_t i = 0; i < M * K; i++) t->l.x[i] = i % K == 0 ? x[i] * planted : x[i];
    free(x);
    CHECK_OK(amp_autocast_begin(t->amp, NULL));
    CHECK_OK(amp_linear(t->amp, &t->l.op));
    CHECK_OK(amp_autocast_end(t->amp));
    CHECK_OK(amp_linear_backward(t->amp, &t->l.op));
}
static void trainer_step(trainer *t, float planted) {
    trainer_pass(t, planted);
    CHECK_OK(amp_step(t->optimizer, NULL));
}
static amp_fp8_stats stats_of(trainer *t, amp_fp8_tensor tensor) {
    amp_fp8_stats s;
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_fp8_stats_get(t->amp, &t->l.weight, tensor, &s));
    return s;
}

static float largest_of(const float *x, int64_t n) {
    float most = 0;
    for (int64_t i = 0; i < n; i++) if (fabsf(x[i]) > most) most = fabsf(x[i]);
    return most;
}

/* An outlier saturates in the step that brings it, and is in the scale of the next ones until the history forgets it. */
TEST(delayed_saturates_and_recovers) {
    trainer t;
    amp_fp8_stats s;
    amp_status status;
    char text[4096];
    float usual;
    trainer_open(&t, 3, AMP_FP8_AMAX_DEFAULT, 0);
    trainer_step(&t, 1);
    s = stats_of(&t, AMP_FP8_X);
    usual = 448 / largest_of(t.l.x, M * K);
    CHECK(s.values == M * K && s.saturated == 0 && s.nonfinite == 0 && s.updates == 1);
    CHECK_MSG(s.scale == usual, "%g, not %g", (double)s.scale, (double)usual);
    s = stats_of(&t, AMP_FP8_DY);
    CHECK(s.values == M * N && s.scale == 57344 / largest_of(t.l.dy, M * N));
    CHECK_EQ(stats_of(&t, AMP_FP8_WEIGHT).values, N * K);
    trainer_step(&t, 1000);
    s = stats_of(&t, AMP_FP8_X);
    CHECK_MSG(s.saturated > M / 2 && s.saturated <= M, "%lld", (long long)s.saturated);
    CHECK(s.scale == 448 / largest_of(t.l.x, M * K) && s.scale < usual / 100);
    memset(&status, 0, sizeof status);
    CHECK_OK(amp_status_get(t.amp, NULL, 0, &status));
    CHECK(status.fp8_tensors == 3 && strcmp(status.fp8_saturated_in, "x of w") == 0);
    CHECK(fabs(status.fp8_saturated - (double)s.saturated / (M * K)) < 1e-15 && status.fp8_underflowed >= 0);
    CHECK(amp_status_text(&status, text, sizeof text) < sizeof text && strstr(text, "% saturated in x of w, at most") != NULL);
    CHECK(amp_status_json(&status, text, sizeof text) < sizeof text && strstr(text, "\"fp8_saturated_in\": \"x of w\"") != NULL);
    trainer_step(&t, 1);
    s = stats_of(&t, AMP_FP8_X);
    CHECK(s.saturated == 0 && s.scale < usual / 100 && s.underflowed > 0);
    for (int i = 0; i < 2; i++) trainer_step(&t, 1);
    CHECK(stats_of(&t, AMP_FP8_X).scale == usual);
    trainer_close(&t);
    trainer_open(&t, 3, AMP_FP8_AMAX_RECENT, 0);
    for (int i = 0; i < 3; i++) trainer_step(&t, i == 1 ? 1000 : 1);
    CHECK(stats_of(&t, AMP_FP8_X).scale == usual);
    trainer_close(&t);
}

/* The errors of a step with x's first channel times `planted`, relative to the product in fp64: of y, of the weight's
   whole gradient, and of its gradient but for the first channel. */
typedef struct step_errors { double y, dw, others; } step_errors;
static step_errors step_of(trainer *t, float planted) {
    double sums[3] = {0, 0, 0}, norms[3] = {0, 0, 0};
    float *w = fp8_room(N * K);
    step_errors e;
    memcpy(w, t->l.w, N * K * sizeof *w);
    trainer_step(t, planted);
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            double sum = 0;
            for (int64_t k = 0; k < K; k++) sum += (double)t->l.x[i * K + k] * (double)w[j * K + k];
            sums[0] += pow((double)t->l.y[i * N + j] - sum, 2); norms[0] += sum * sum;
        }
    for (int64_t j = 0; j < N; j++)
        for (int64_t k = 0; k < K; k++) {
            double sum = 0, error;
            for (int64_t i = 0; i < M; i++) sum += (double)t->l.dy[i * N + j] * (double)t->l.x[i * K + k];
            error = pow((double)t->l.dw[j * K + k] - sum, 2);
            sums[1] += error; norms[1] += sum * sum;
            if (k > 0) { sums[2] += error; norms[2] += sum * sum; }
        }
    e.y = sqrt(sums[0] / norms[0]); e.dw = sqrt(sums[1] / norms[1]); e.others = sqrt(sums[2] / norms[2]);
    free(w);
    return e;
}

/* Delayed scaling clips an outlier channel in the step that brings it, whose gradient is lost, and has it in the next.
   The other recipes keep the step; with blocks, which for the weight's gradient lie down a channel, the others' gradients
   stay as they are, bit for bit. */
TEST(an_outlier_channel_does_not_lose_the_step) {
    static const amp_fp8_scaling all[] = {AMP_FP8_CURRENT, AMP_FP8_BLOCK, AMP_FP8_MX, AMP_FP8_DELAYED};
    static const char *const called[] = {"current", "block", "mx", "delayed"};
    for (int s = 0; s < 4; s++)
        for (int f = AMP_FP8_HYBRID; f <= AMP_FP8_E4M3; f++) {
            const amp_fp8_recipe recipe = {.format = (amp_fp8_format)f, .scaling = all[s]};
            step_errors clean, outlier, next;
            float *dw = fp8_room(N * K);
            int64_t changed = 0, lost = 0;
            const char *name = called[s];
            amp_fp8_stats now;
            float scale;
            trainer t;
            trainer_of(&t, &recipe, 0);
            clean = step_of(&t, 1);
            memcpy(dw, t.l.dw, N * K * sizeof *dw);
            outlier = step_of(&t, 1000);
            for (int64_t i = 0; i < N * K; i++) changed += i % K > 0 && !same(&dw[i], &t.l.dw[i], 1);
            next = step_of(&t, 1000);
            now = stats_of(&t, AMP_FP8_X);
            scale = 448 / largest_of(t.l.x, M * K);
            for (int64_t i = 0; i < M * K; i++) lost += t.l.x[i] != 0 && fabsf(t.l.x[i]) * scale <= 0x1p-10f;
            if (all[s] == AMP_FP8_BLOCK || all[s] == AMP_FP8_MX) {
                CHECK_MSG(changed == 0, "%s: %d of the others' gradients changed", name, (int)changed);
                CHECK_MSG(now.underflowed < lost / 4, "%s: %d underflowed", name, (int)now.underflowed);
            } else CHECK_MSG(now.saturated == 0 && now.underflowed == lost && lost > 0, "%s: %d underflowed", name,
                             (int)now.underflowed);
            CHECK_MSG(all[s] == AMP_FP8_DELAYED ? outlier.y > 0.9 && outlier.dw > 0.9
                                                : outlier.y < 1.5 * clean.y && outlier.dw < 1.5 * clean.dw,
                      "%s: %g, %g", name, outlier.y, outlier.dw);
            CHECK_MSG(outlier.others < 1.1 * clean.others && next.others < 1.1 * clean.others, "%s: %g", name, outlier.others);
            CHECK_MSG(next.y < 1.5 * clean.y && next.dw < 1.5 * clean.dw, "%s, the next step: %g, %g", name, next.y, next.dw);
            CHECK_MSG(clean.y < 0.1 && clean.dw < 0.1, "%s: %g, %g", name, clean.y, clean.dw);
            trainer_close(&t);
            free(dw);
        }
}

/* The number behind "key": of the line of a step and tensor; -1: there is none. */
static double in_record(const char *lines, int step, const char *tensor, const char *key) {
    char begin[128], field[32];
    const char *line, *at, *end;
    snprintf(begin, sizeof begin, "{\"event\": \"fp8\", \"step\": %d, \"weight\": \"w\", \"tensor\": \"%s\", ", step, tensor);
    snprintf(field, sizeof field, "\"%s\": ", key);
    line = strstr(lines, begin);
    end = line ? strchr(line, '\n') : NULL;
    at = line ? strstr(line, field) : NULL;
    return at && end && at < end ? atof(at + strlen(field)) : -1;
}

/* A monitor's lines have the shares of each tensor, where memory is queried. */
TEST(records_have_the_shares_of_each_tensor) {
    static const char *const roles[] = {"x", "weight", "dy"};
    char path[200], lines[4096] = {0};
    for (int delayed = 0; delayed < 2; delayed++) {
        const amp_fp8_recipe recipe = {.scaling = delayed ? AMP_FP8_DELAYED : AMP_FP8_MX};
        amp_fp8_stats want[3];
        amp_monitor *monitor = NULL;
        amp_monitor_desc d;
        amp_step_info info;
        trainer t;
        FILE *file;
        trainer_of(&t, &recipe, 0);
        memset(&d, 0, sizeof d);
        memset(&info, 0, sizeof info);
        snprintf(path, sizeof path, "%s/t_fp8_%ld", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
        d.path = path;
        d.optimizer = t.optimizer;
        d.memory_interval = 2;
        CHECK_OK(amp_monitor_create(t.amp, &monitor, &d));
        for (int i = 1; i <= 3; i++) {
            trainer_step(&t, i == 2 ? 1000 : 1);
            CHECK_OK(amp_monitor_step(monitor, &info));
            for (int k = 0; i == 2 && k < 3; k++) want[k] = stats_of(&t, (amp_fp8_tensor)(k + 1));
        }
        amp_monitor_destroy(monitor);
        trainer_close(&t);
        file = fopen(path, "r");
        CHECK(file != NULL && fread(lines, 1, sizeof lines - 1, file) > 0);
        if (file != NULL) fclose(file);
        remove(path);
        CHECK(want[0].saturated > 0 && want[0].underflowed > 0);
        for (int k = 0; k < 3; k++) {
            double n = (double)want[k].values;
            CHECK(fabs(in_record(lines, 2, roles[k], "saturated") - (double)want[k].saturated / n) < 1e-8);
            CHECK(fabs(in_record(lines, 2, roles[k], "underflowed") - (double)want[k].underflowed / n) < 1e-8);
            CHECK(in_record(lines, 2, roles[k], "nonfinite") == 0);
            CHECK((in_record(lines, 2, roles[k], "scale") > 0) == delayed);
            CHECK(in_record(lines, 1, roles[k], "saturated") < 0 && in_record(lines, 3, roles[k], "saturated") < 0);
        }
    }
}

/* Infinity does not enter a history; what is computed from it is not finite. */
TEST(infinity_stays_in_sight_and_out_of_histories) {
    trainer t;
    float before;
    trainer_open(&t, 3, AMP_FP8_AMAX_DEFAULT, 0);
    trainer_step(&t, 1);
    before = stats_of(&t, AMP_FP8_X).scale;
    t.l.x[3] = ampi_f32_of_bits(0x7f800000u);
    CHECK_OK(amp_autocast_begin(t.amp, NULL));
    CHECK_OK(amp_linear(t.amp, &t.l.op));
    CHECK_OK(amp_autocast_end(t.amp));
    CHECK(ampt_has_nonfinite(t.l.y, N) && !ampt_has_nonfinite(t.l.y + N, (M - 1) * N));
    CHECK_OK(amp_linear_backward(t.amp, &t.l.op));
    CHECK_OK(amp_step(t.optimizer, NULL));
    CHECK(stats_of(&t, AMP_FP8_X).scale == before && stats_of(&t, AMP_FP8_X).nonfinite == 1);
    trainer_close(&t);
}

TEST(histories_are_combined_over_ranks) {
    trainer t;
    trainer_open(&t, 3, AMP_FP8_AMAX_DEFAULT, 2);
    other_rank = 1024;
    trainer_step(&t, 1);
    other_rank = 0;
    CHECK(stats_of(&t, AMP_FP8_X).scale == 448.0f / 1024 && stats_of(&t, AMP_FP8_DY).scale == 57344.0f / 1024);
    trainer_close(&t);
}

/* A resumed run has the bits of one that was not interrupted; the forward of validation leaves them too. */
/* What was learned since a state was saved is forgotten with it, also where the state has no history yet. */
TEST(states_take_back_what_came_after) {
    for (int before = 0; before < 2; before++) {
        trainer t;
        amp_state *state = NULL;
        float *w = fp8_room(N * K), *once = fp8_room(N * K);
        trainer_open(&t, 3, AMP_FP8_AMAX_DEFAULT, 0);
        for (int i = 0; i < before; i++) trainer_step(&t, 1);
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_fp8_save(t.amp, state, "here"));
        CHECK_OK(amp_optimizer_save(t.optimizer, state, "optimizer"));
        memcpy(w, t.l.w, N * K * sizeof *w);
        trainer_step(&t, 1);
        memcpy(once, t.l.w, N * K * sizeof *w);
        trainer_step(&t, 1e5f);
        memcpy(t.l.w, w, N * K * sizeof *w);
        amp_param_changed(&t.l.weight);
        CHECK_OK(amp_optimizer_load(t.optimizer, state, "optimizer"));
        CHECK_OK(amp_fp8_load(t.amp, state, "here"));
        trainer_step(&t, 1);
        CHECK(same(once, t.l.w, N * K));
        amp_state_destroy(state);
        trainer_close(&t);
        free(w); free(once);
    }
}

TEST(histories_resume_bit_for_bit) {
    trainer whole, part;
    amp_state *state = NULL;
    float *w;
    trainer_open(&whole, 3, AMP_FP8_AMAX_DEFAULT, 0);
    for (int i = 0; i < 6; i++) trainer_step(&whole, i == 2 ? 50 : 1);
    trainer_open(&part, 3, AMP_FP8_AMAX_DEFAULT, 0);
    for (int i = 0; i < 3; i++) {
        amp_autocast_desc quiet;
        trainer_step(&part, i == 2 ? 50 : 1);
        memset(&quiet, 0, sizeof quiet);
        quiet.mode = AMP_MODE_INFERENCE;
        part.l.x[7] = 1e6f;
        CHECK_OK(amp_autocast_begin(part.amp, &quiet));
        CHECK_OK(amp_linear(part.amp, &part.l.op));
        CHECK_OK(amp_autocast_end(part.amp));
    }
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_fp8_save(part.amp, state, "here"));
    CHECK_OK(amp_optimizer_save(part.optimizer, state, "optimizer"));
    w = fp8_room(N * K);
    memcpy(w, part.l.w, N * K * sizeof *w);
    trainer_close(&part);
    trainer_open(&part, 3, AMP_FP8_AMAX_DEFAULT, 0);
    memcpy(part.l.w, w, N * K * sizeof *w);
    amp_param_changed(&part.l.weight);
    CHECK_OK(amp_optimizer_load(part.optimizer, state, "optimizer"));
    CHECK_OK(amp_fp8_load(part.amp, state, "here"));
    for (int i = 3; i < 6; i++) trainer_step(&part, 1);
    CHECK(same(whole.l.w, part.l.w, N * K) && same(whole.l.y, part.l.y, M * N));
    CHECK(stats_of(&whole, AMP_FP8_X).scale == stats_of(&part, AMP_FP8_X).scale);
    trainer_close(&whole); trainer_close(&part);
    amp_state_destroy(state);
    free(w);
}

/* A trial's step, of an outlier that would stay in the scales; and its halves. */
static int trial_step(void *user, amp_context *amp) {
    (void)amp;
    trainer_step((trainer *)user, 1e4f);
    return 0;
}
static int trial_pass(void *user, amp_context *amp) {
    (void)amp;
    trainer_pass((trainer *)user, 1e4f);
    return 0;
}
static int trial_forward(void *user, amp_context *amp) { return (int)amp_linear(amp, &((trainer *)user)->l.op); }
static int trial_backward(void *user, amp_context *amp) { return (int)amp_linear_backward(amp, &((trainer *)user)->l.op); }

enum { VERIFY, TUNE, TUNE_AND_VERIFY, GRADCHECK, TRIALS };
static void trial(trainer *t, int which) {
    static const amp_dtype dtypes[] = {AMP_FP8, AMP_BF16};
    const amp_range x = {"x", t->l.x, M * K, AMP_F32}, dx = {"dx", t->l.dx, M * K, AMP_F32}, y = {"y", t->l.y, M * N, AMP_F32},
                    dy = {"dy", t->l.dy, M * N, AMP_F32};
    amp_verify_desc v;
    amp_tune_desc d;
    amp_gradcheck_desc g;
    amp_verify_report verified;
    amp_tune_report tuned;
    amp_gradcheck_report checked;
    memset(&v, 0, sizeof v);
    memset(&d, 0, sizeof d);
    memset(&g, 0, sizeof g);
    v.step = trial_step;
    v.user = t;
    v.params = &t->l.weight; v.n_params = 1;
    v.optimizer = t->optimizer;
    v.dtypes = dtypes; v.n_dtypes = 2;
    d.step = which == TUNE ? trial_pass : trial_step;
    d.user = t;
    d.dtypes = dtypes; d.n_dtypes = 2;
    d.iterations = d.warmup = 1;
    d.verify = which == TUNE_AND_VERIFY ? &v : NULL;
    g.forward = trial_forward; g.backward = trial_backward;
    g.user = t;
    g.inputs = &x; g.input_grads = &dx; g.n_inputs = 1;
    g.outputs = &y; g.output_grads = &dy; g.n_outputs = 1;
    g.dtype = AMP_FP8;
    g.directions = 1;
    if (which == VERIFY) CHECK_OK(amp_verify(t->amp, &v, &verified));
    else if (which == GRADCHECK) CHECK_OK(amp_gradcheck(t->amp, &g, &checked));
    else CHECK_OK(amp_tune(t->amp, &d, &tuned));
}

/* Trials leave histories, magnitudes of the step that has begun, and counts: before the first step, between two, and
   between a step's backward and its end. */
TEST(trials_leave_the_records) {
    for (int which = 0; which < TRIALS; which++)
        for (int at = 0; at < 3; at++) {
            trainer undisturbed, t;
            amp_state *want = NULL, *got = NULL;
            trainer_open(&undisturbed, 3, AMP_FP8_AMAX_DEFAULT, 0);
            trainer_open(&t, 3, AMP_FP8_AMAX_DEFAULT, 0);
            for (int i = 0; i < 3; i++) {
                if (i == at && which != GRADCHECK) {
                    trial(&t, which);
                    t.l.weight.grad_live = 0;                   /* amp_tune without .verify leaves a gradient */
                }
                trainer_step(&undisturbed, i == 1 ? 3.0f : 1.0f);
                trainer_pass(&t, i == 1 ? 3.0f : 1.0f);
                if (i == at && (which == TUNE || which == GRADCHECK)) {
                    float *dw = fp8_room(N * K), *dy = wide(2, M, N);  /* these two do not restore it, and the latter writes dy */
                    memcpy(dw, t.l.dw, N * K * sizeof *dw);
                    trial(&t, which);
                    memcpy(t.l.dw, dw, N * K * sizeof *dw);
                    memcpy(t.l.dy, dy, M * N * sizeof *dy);
                    t.l.weight.grad_live = 1;
                    free(dw); free(dy);
                }
                CHECK_OK(amp_step(t.optimizer, NULL));
                for (int tensor = AMP_FP8_X; tensor <= AMP_FP8_DY; tensor++) {
                    amp_fp8_stats a = stats_of(&undisturbed, (amp_fp8_tensor)tensor), b = stats_of(&t, (amp_fp8_tensor)tensor);
                    CHECK_MSG(memcmp(&a, &b, sizeof a) == 0,
                              "trial %d at step %d: after step %d tensor %d has %lld values, %lld updates, scale %g", which,
                              at, i, tensor, (long long)b.values, (long long)b.updates, (double)b.scale);
                }
            }
            CHECK(same(undisturbed.l.w, t.l.w, N * K));
            CHECK_OK(amp_state_create(&want, NULL));
            CHECK_OK(amp_state_create(&got, NULL));
            CHECK_OK(amp_fp8_save(undisturbed.amp, want, "x"));
            CHECK_OK(amp_fp8_save(t.amp, got, "x"));
            for (int r = 0; r < 4; r++) {
                static const char *const records[] = {"x.fp8_updates", "x.fp8_scales", "x.fp8_amax", "x.fp8_history"};
                static const amp_dtype kinds[] = {AMP_I64, AMP_F32, AMP_F32, AMP_F32};
                char a[72] = {0}, b[72] = {0};
                CHECK_OK(amp_state_get(want, records[r], kinds[r], a, r < 3 ? 3 : 9));
                CHECK_OK(amp_state_get(got, records[r], kinds[r], b, r < 3 ? 3 : 9));
                CHECK_MSG(memcmp(a, b, sizeof a) == 0, "trial %d at step %d: %s", which, at, records[r]);
            }
            amp_state_destroy(want);
            amp_state_destroy(got);
            trainer_close(&undisturbed); trainer_close(&t);
        }
}

/* What a recovery undoes leaves no magnitude in the histories; a weight that came since begins anew. */
TEST(recovery_restores_the_records) {
    trainer t;
    layer other;
    amp_recovery *recovery = NULL;
    amp_recovery_desc d;
    amp_recovery_event event;
    amp_step_record record;
    amp_fp8_stats before, after;
    trainer_open(&t, 3, AMP_FP8_AMAX_DEFAULT, 0);
    layer_make(&other);
    other.weight.name = "other";
    trainer_step(&t, 1);
    before = stats_of(&t, AMP_FP8_X);
    memset(&d, 0, sizeof d);
    d.params = &t.l.weight; d.n_params = 1;
    d.optimizer = t.optimizer;
    CHECK_OK(amp_recovery_create(t.amp, &recovery, &d));
    CHECK_OK(amp_param_register(t.amp, &other.weight, 1));
    layer_run(t.amp, &other);
    trainer_step(&t, 1e6f);
    CHECK(stats_of(&t, AMP_FP8_X).scale < before.scale / 1000);
    memset(&record, 0, sizeof record);
    record.result.step = 2;
    record.result.applied = 1;
    record.loss = (double)ampi_f32_of_bits(0x7fc00000u);
    record.anomaly = AMP_ANOMALY_LOSS;
    record.action = AMP_NAN_RECOVER;
    CHECK_OK(amp_recovery_step(recovery, &record, &event));
    CHECK_EQ(event.action, AMP_RECOVERY_RESTORED);
    after = stats_of(&t, AMP_FP8_X);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    CHECK_OK(amp_fp8_stats_get(t.amp, &other.weight, AMP_FP8_X, &after));
    CHECK(after.values == 0 && after.updates == 0 && after.scale == 0);
    CHECK_OK(amp_set_dtype(t.amp, AMP_FP8));            /* the recovery went on in another */
    trainer_step(&t, 1);
    CHECK(stats_of(&t, AMP_FP8_X).scale == before.scale && stats_of(&t, AMP_FP8_X).updates == 2);
    amp_recovery_destroy(recovery);
    trainer_close(&t);
    layer_free(&other);
}

static int64_t recipe_record[6];
static void check_load(trainer *t, amp_state *state, int field, int64_t value, amp_result result, const char *text) {
    int64_t changed[6];
    memcpy(changed, recipe_record, sizeof changed);
    changed[field] = value;
    CHECK_OK(amp_state_put(state, "x.fp8", AMP_I64, changed, 6));
    CHECK_ERR(amp_fp8_load(t->amp, state, "x"), result);
    CHECK_MSG(strstr(amp_last_error(), text) != NULL, "%s", amp_last_error());
    CHECK_OK(amp_state_put(state, "x.fp8", AMP_I64, recipe_record, 6));
}

TEST(states_of_another_recipe_or_model_are_refused) {
    trainer t;
    amp_state *state = NULL;
    amp_fp8_stats before;
    float bad[9] = {0};
    trainer_open(&t, 3, AMP_FP8_AMAX_DEFAULT, 0);
    trainer_step(&t, 1);
    before = stats_of(&t, AMP_FP8_X);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_ERR(amp_fp8_load(t.amp, state, "x"), AMP_ERR_NAME);
    CHECK_OK(amp_fp8_save(t.amp, state, "x"));
    CHECK_OK(amp_state_get(state, "x.fp8", AMP_I64, recipe_record, 6));
    check_load(&t, state, 0, 2, AMP_ERR_MISMATCH, ".fp8.format");
    check_load(&t, state, 1, 1, AMP_ERR_MISMATCH, ".fp8.scaling");
    check_load(&t, state, 2, 2, AMP_ERR_MISMATCH, ".fp8.amax");
    check_load(&t, state, 3, 4, AMP_ERR_MISMATCH, ".fp8.history");
    check_load(&t, state, 4, 1, AMP_ERR_MISMATCH, ".fp8.margin");
    check_load(&t, state, 5, 2, AMP_ERR_MISMATCH, "2 weights");
    check_load(&t, state, 5, -1, AMP_ERR_MISMATCH, "weights");
    CHECK_OK(amp_state_put(state, "x.fp8_names", AMP_U8, "v\n", 2));
    CHECK_ERR(amp_fp8_load(t.amp, state, "x"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "history of v") != NULL);
    CHECK_OK(amp_state_put(state, "x.fp8_names", AMP_U8, "w", 1));
    CHECK_ERR(amp_fp8_load(t.amp, state, "x"), AMP_ERR_MISMATCH);
    CHECK_OK(amp_state_put(state, "x.fp8_names", AMP_U8, "w\n", 2));
    bad[4] = -1;
    CHECK_OK(amp_state_put(state, "x.fp8_history", AMP_F32, bad, 9));
    CHECK_ERR(amp_fp8_load(t.amp, state, "x"), AMP_ERR_MISMATCH);
    CHECK_OK(amp_state_put(state, "x.fp8_history", AMP_F32, bad, 8));
    CHECK_ERR(amp_fp8_load(t.amp, state, "x"), AMP_ERR_MISMATCH);
    CHECK(stats_of(&t, AMP_FP8_X).scale == before.scale && stats_of(&t, AMP_FP8_X).updates == before.updates);
    CHECK_OK(amp_fp8_save(t.amp, state, "x"));
    CHECK_OK(amp_fp8_load(t.amp, state, "x"));
    amp_state_destroy(state);
    trainer_close(&t);
}

TEST(delayed_scaling_needs_registered_weights) {
    amp_context *amp = open_fp8(AMP_FP8_DELAYED, AMP_FP8_HYBRID, AMP_CPU_DEFAULT, 1);
    amp_fp8_stats s;
    layer l;
    layer_make(&l);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_ERR(amp_linear(amp, &l.op), AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "amp_param_register") != NULL);
    CHECK_ERR(amp_fp8_stats_get(amp, &l.weight, AMP_FP8_X, &s), AMP_ERR_STATE);
    CHECK_OK(amp_param_register(amp, &l.weight, 1));
    CHECK_ERR(amp_fp8_stats_get(amp, &l.weight, AMP_FP8_X, &s), AMP_ERR_STATE);
    CHECK_ERR(amp_fp8_stats_get(amp, &l.weight, (amp_fp8_tensor)4, &s), AMP_ERR_RANGE);
    CHECK_OK(amp_linear(amp, &l.op));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_fp8_stats_get(amp, &l.weight, AMP_FP8_X, &s));
    CHECK_EQ(s.values, M * K);
    amp_param_forget(amp, &l.weight, 1);
    CHECK_OK(amp_param_register(amp, &l.weight, 1));
    CHECK_ERR(amp_fp8_stats_get(amp, &l.weight, AMP_FP8_X, &s), AMP_ERR_STATE);
    amp_close(amp);
    layer_free(&l);
}

TEST(recipes_must_not_contradict_themselves) {
    static const char *const keys[] = {"fp8_amax", "fp8_history", "fp8_margin"}, *const values[] = {"recent", "16", "2"};
    amp_context *amp = NULL;
    for (int i = 0; i < 3; i++) {
        amp_settings s;
        amp_desc d;
        memset(&s, 0, sizeof s);
        memset(&d, 0, sizeof d);
        if (i == 0) d.fp8.amax = AMP_FP8_AMAX_RECENT;
        if (i == 1) d.fp8.history = 16;
        if (i == 2) d.fp8.margin = 2;
        CHECK_ERR(amp_open(&amp, &d), AMP_ERR_CONFLICT);
        CHECK(strstr(amp_last_error(), keys[i] + 4) != NULL);
        CHECK_OK(amp_settings_set(&s, keys[i], values[i]));
        CHECK_ERR(amp_settings_check(&s), AMP_ERR_CONFLICT);
        CHECK(strstr(amp_last_error(), keys[i]) != NULL);
        CHECK_OK(amp_settings_set(&s, "fp8_scaling", "delayed"));
        CHECK_OK(amp_settings_check(&s));
        CHECK_OK(amp_settings_fill(&s, NULL, &d, NULL, NULL, NULL));
        CHECK_OK(amp_open(&amp, &d));
        CHECK_OK(amp_query(amp, &d));
        CHECK(d.fp8.scaling == AMP_FP8_DELAYED && d.fp8.history == (i == 1 ? 16 : 1024) && d.fp8.margin == (i == 2 ? 2 : 0));
        CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
        CHECK_OK(amp_settings_set(&s, "fp8_margin", "7"));
        CHECK_ERR(amp_settings_apply(&s, amp, NULL, NULL, NULL), AMP_ERR_CONFLICT);
        amp_close(amp);
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    fp8_golden = ampt_golden_open("fp8.bin");
    RUN(operands_are_those_of_pytorch);
    RUN(scales_of_zero_tiny_infinite_and_nan);
    RUN(products_are_those_of_fp64);
    RUN(threads_and_the_cache_leave_the_bits);
    RUN(magnitudes_far_apart);
    RUN(any_rounding);
    RUN(only_linear_layers_compute_in_fp8);
    RUN(the_choice_says_emulated_and_never_takes_it_by_itself);
    RUN(care_takes_it_only_from_hardware);
    RUN(levels);
    RUN(fp8_refusals);
    RUN(delayed_scales_are_those_of_transformer_engine);
    RUN(every_place_of_a_history_counts);
    RUN(delayed_saturates_and_recovers);
    RUN(records_have_the_shares_of_each_tensor);
    RUN(an_outlier_channel_does_not_lose_the_step);
    RUN(infinity_stays_in_sight_and_out_of_histories);
    RUN(histories_are_combined_over_ranks);
    RUN(states_take_back_what_came_after); RUN(histories_resume_bit_for_bit);
    RUN(trials_leave_the_records);
    RUN(recovery_restores_the_records);
    RUN(states_of_another_recipe_or_model_are_refused);
    RUN(delayed_scaling_needs_registered_weights);
    RUN(recipes_must_not_contradict_themselves);
    free(fp8_golden.data);
    return TEST_END();
}
