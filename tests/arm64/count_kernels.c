/* count_kernels.c - calls each vector kernel once, and makes a step of a small GPT, by the path in the first argument: scalar
 * or neon.  Before and after each it makes the call close(-1000), at which count_plugin.c prints how many instructions ran.
 * It prints the names in the same order. */
#define _GNU_SOURCE
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { N = 4096, K = 256, ROWS = 8, COLS = 8 };
static float x[2 * N], y[2 * N], z[2 * N], w[2 * N];
static double wide[N];
static uint32_t words[N];
static uint16_t halves[2 * N], more[2 * N];
static uint8_t bytes[N];

static void mark(void) { close(-1000); }
static void named(const char *group, const char *name) { mark(); printf("%s.%s\n", group, name); fflush(stdout); mark(); }

static void fill(void) {
    int i;
    for (i = 0; i < 2 * N; i++) {
        x[i] = sinf((float)i) * 3;
        y[i] = cosf((float)(3 * i));
        z[i] = 0.25f + fabsf(sinf((float)(7 * i)));
        halves[i] = amp_f16_from_f32(x[i], 0);
        more[i] = amp_bf16_from_f32(y[i], 0);
        if (i < N) { wide[i] = (double)x[i] * 1.0000001; bytes[i] = (uint8_t)(i % 120); words[i] = (uint32_t)i * 2654435761u; }
    }
}
static volatile float kept;
#define CALL(table, kernel, ...) do { fill(); mark(); (table->kernel)(__VA_ARGS__); named(#table, #kernel); } while (0)

#define KEPT(table, kernel, ...) do { fill(); mark(); kept = (table->kernel)(__VA_ARGS__); named(#table, #kernel); } while (0)

static void numbers_kernels(amp_cpu_path path) {
    const ampi_numbers_vec *numbers = AMPI_PICK(ampi_numbers_kernels, path);
    CALL(numbers, f32_from_f16, w, halves, N);
    CALL(numbers, f16_from_f32, halves, x, N);
    CALL(numbers, f32_from_bf16, w, more, N);
    CALL(numbers, bf16_from_f32, more, x, N);
    CALL(numbers, f64_from_f32, wide, x, N);
    CALL(numbers, f32_from_fp8, w, bytes, N, AMP_E4M3);
    CALL(numbers, fp8_from_f32, bytes, x, N, AMP_E4M3);
    CALL(numbers, f32_from_f64, w, wide, N);
    CALL(numbers, f32_odd_from_f64, w, wide, N);
    CALL(numbers, round, w, x, N, AMP_F16);
    CALL(numbers, clamp, w, x, N, 0x3f800000u);
    CALL(numbers, bf16_stochastic, more, x, N, words, 0);
    CALL(numbers, bf16_split, more, halves, x, N);
    CALL(numbers, f32_join, w, more, halves, N);
    CALL(numbers, count16, halves, N, 0x7c00u);
    CALL(numbers, count32, x, N, 0x7f800000u);
    CALL(numbers, random, words, N, 1, 0);
}

static void nothing(amp_activation_kind kind, const float *from, float *to, int64_t n) { (void)kind; (void)from; (void)to; (void)n; }
static void gemm_kernels(amp_cpu_path path) {
    const ampi_gemm_vec *gemm = AMPI_PICK(ampi_gemm_kernels, path);
    ampi_gemm_out out;
    int i;
    memset(&out, 0, sizeof out);
    out.alpha = 0.5f; out.bias = z; out.activation = nothing; out.c = w; out.c_dtype = AMP_BF16; out.ldc = 64;
    fill();
    mark();
    for (i = 0; i < ROWS; i += gemm->rows)          /* the same product on each path, in tiles of its size */
        (gemm->multiply)(AMPI_MIN(ROWS - i, gemm->rows), COLS, K, x + i * K, K, 1, y, COLS, NULL, 0, w + i * COLS, COLS);
    named("gemm", "multiply");
    CALL(gemm, rows_of, w, K, x, AMP_F32, AMP_BF16, K, K, ROWS);
    CALL(gemm, weave, w, COLS * 64, halves, AMP_F16, AMP_F16, 64, 64, 64);
    CALL(gemm, transpose, w, 64, x, 64, 64, 64);
    CALL(gemm, finish, &out, x, 64, 0, 8, 64);
    CALL(gemm, combine, w, x, y, 64, 64, 64);
    fill();
    mark();
    for (i = 0; i < 6; i += gemm->dot_rows) (gemm->dots)(AMPI_MIN(6 - i, gemm->dot_rows), 4, K, x + i * K, K, y, K, w + 4 * i);
    named("gemm", "dots");
    CALL(gemm, outer, 32, 64, x, 1, y, 1, w, 64);
}

static void attention_kernels(amp_cpu_path path) {
    const ampi_attention_vec *attention = AMPI_PICK(ampi_attention_kernels, path);
    ampi_product p = {64, AMPI_STRIP, 32, x, 32, 1, y, AMPI_STRIP, w, AMPI_STRIP, 0, 1, NULL};
    ampi_tile_mask mask;
    memset(&mask, 0, sizeof mask);
    CALL(attention, product, &p);
    CALL(attention, product_weighted, &p, 1);
    CALL(attention, hide, x, 64, &mask, -1);
    CALL(attention, soften, x, 64, y, z, w, AMP_BF16);
    CALL(attention, slopes, x, y, 64, z, w);
    CALL(attention, finish, y, z, w, w + AMPI_STRIP);
    KEPT(attention, dot, x, y, N);
    CALL(attention, has_nan, x, N);
    CALL(attention, softmax_backward, z, y, 1, w, N);
}

static void rows_kernels(amp_cpu_path path) {
    const ampi_pointwise_vec *rows = AMPI_PICK(ampi_pointwise_kernels, path);
    const void *list[8];
    amp_k_fp8_count count;
    float sums[2] = {0.5f, 0.25f};
    int i;
    memset(&count, 0, sizeof count);
    for (i = 0; i < 8; i++) list[i] = halves + 512 * i;
    CALL(rows, activation, AMP_ACT_GELU, x, w, N);
    CALL(rows, activation_backward, AMP_ACT_GELU, x, y, w, N);
    CALL(rows, tanh_backward, y, x, w, N);
    CALL(rows, swiglu, x, y, w, N);
    CALL(rows, swiglu_backward, x, y, z, w, w + N, N);
    CALL(rows, sum_rows, w, list, AMP_F16, 8, 512);
    CALL(rows, widen, wide, x, N);
    CALL(rows, narrow, w, wide, N);
    CALL(rows, sum, x, N);
    CALL(rows, sum_squares, x, 0.5f, N);
    CALL(rows, normalize, x, 0.5f, 2, y, z, w, N);
    CALL(rows, norm_sums, x, y, z, 0.5f, 2, w, w + N, sums, N);
    CALL(rows, norm_dx, x, y, z, NULL, 0.5f, 2, sums, w, N);
    KEPT(rows, row_max, x, N);
    CALL(rows, exp_sum, x, 3, w, N);
    CALL(rows, squared_error, x, y, 1, w, N);
    CALL(rows, scale_shift, x, 2, 1, w, N);
    CALL(rows, add, x, 2, y, 1, w, N);
    CALL(rows, magnitudes, words, x, N);
    CALL(rows, dropout, x, w, N, 1 << 20, 2, 1, 0);
    CALL(rows, rope, x, 8, 64, y, z, 64, 0);
    CALL(rows, fp8, x, z, z, w, N, AMP_E4M3, &count);
}

static void multi_kernels(amp_cpu_path path) {
    const ampi_multi_vec *multi = AMPI_PICK(ampi_multi_kernels, path);
    ampi_adamw_step adamw = {0};
    ampi_sgd_step sgd = {0};
    ampi_lion_step lion = {0};
    ampi_fit fit;
    int64_t above[AMPI_FIT_LIMITS] = {0};
    uint32_t largest = 0;
    int32_t bad = 0;
    memset(&fit, 0, sizeof fit);
    CALL(multi, check, x, N, NULL, &bad);
    CALL(multi, scale, x, N, 0.5f);
    CALL(multi, adamw, w, x, y, z, N, &adamw);
    CALL(multi, sgd, w, x, y, NULL, N, &sgd);
    CALL(multi, lion, w, x, y, NULL, N, &lion);
    CALL(multi, inspect, x, N, &fit, above, &largest);
}

/* ---- A step: one block of a GPT */

enum { BATCH = 2, SEQ = 64, CHANNELS = 64, VOCAB = 256 };
static void check(amp_result result) {
    if (result != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); exit(1); }
}
static void step(amp_cpu_path path, amp_dtype dtype) {
    static int32_t ids[BATCH * SEQ], next[BATCH * SEQ];
    amp_desc desc = {.cpu_path = path, .dtype = dtype, .threads = 1};
    amp_attention_op causal = {.mask = {.kind = AMP_MASK_CAUSAL}};
    amp_autocast_desc region = {.mode = AMP_MODE_TRAINING};
    amp_tensor tokens = amp_tensor2(ids, AMP_I32, BATCH, SEQ);
    amp_optimizer_desc rule = {.clip_norm = 1};
    amp_context *amp;
    amp_model *model;
    amp_tape *tape;
    amp_optimizer *adamw;
    amp_param *p[8];
    static const int64_t shapes[8][2] = {{VOCAB, CHANNELS}, {CHANNELS, 0}, {CHANNELS, 0}, {3 * CHANNELS, CHANNELS},
        {CHANNELS, CHANNELS}, {4 * CHANNELS, CHANNELS}, {CHANNELS, 4 * CHANNELS}, {SEQ, CHANNELS}};
    int i, k;
    for (i = 0; i < BATCH * SEQ; i++) { ids[i] = i * 37 % VOCAB; next[i] = (i + 1) * 37 % VOCAB; }
    check(amp_open(&amp, &desc));
    check(amp_model_create(amp, &model, 1, 0));
    check(amp_tape_create(amp, &tape, NULL));
    for (i = 0; i < 8; i++) {
        char name[8] = {(char)('a' + i), 0};
        p[i] = amp_model_param(model, name, shapes[i][0], shapes[i][1], i == 1 ? AMP_INIT_ONES : i == 2 ? AMP_INIT_ZEROS : AMP_INIT_NORMAL, 0.02);
    }
    check(amp_model_params(model, &rule.params, &rule.n_params));
    check(amp_optimizer_create(amp, &adamw, &rule));
    for (i = 0; i < 3; i++) {
        amp_value stream, h, qkv[3], loss;
        float value;
        if (i == 2) mark();
        check(amp_tape_begin(tape, &region));
        stream = amp_tape_embedding(tape, &tokens, p[0], p[7]);
        h = amp_tape_linear(tape, amp_tape_layernorm(tape, stream, p[1], p[2], 1e-5f), p[3], NULL, AMP_ACT_NONE);
        for (k = 0; k < 3; k++) qkv[k] = amp_tape_split(tape, h, 2, k * CHANNELS, CHANNELS);
        h = amp_tape_attention(tape, qkv[0], qkv[1], qkv[2], 2, &causal);
        stream = amp_tape_add(tape, stream, amp_tape_linear(tape, h, p[4], NULL, AMP_ACT_NONE));
        h = amp_tape_linear(tape, amp_tape_layernorm(tape, stream, p[1], p[2], 1e-5f), p[5], NULL, AMP_ACT_GELU);
        stream = amp_tape_add(tape, stream, amp_tape_linear(tape, h, p[6], NULL, AMP_ACT_NONE));
        h = amp_tape_linear(tape, amp_tape_layernorm(tape, stream, p[1], p[2], 1e-5f), p[0], NULL, AMP_ACT_NONE);
        loss = amp_tape_cross_entropy(tape, h, next, NULL);
        check(amp_tape_backward(tape, loss, NULL));
        check(amp_step(adamw, NULL));
        check(amp_tape_read(tape, loss, &value, 1));
        if (i == 2) named("step", amp_dtype_name(dtype));
        fprintf(stderr, "# loss %.9g\n", (double)value);
    }
    amp_optimizer_destroy(adamw);
    amp_tape_destroy(tape);
    amp_model_destroy(model);
    amp_close(amp);
}

int main(int argc, char **argv) {
    amp_cpu_path path = argc > 1 && strcmp(argv[1], "scalar") == 0 ? AMP_CPU_SCALAR : AMP_CPU_NEON;
    ampi_fp host = ampi_fp_begin();
    if (argc > 1 && strcmp(argv[1], "neon_bf16") == 0) path = AMP_CPU_NEON_BF16;
    numbers_kernels(path);
    gemm_kernels(path);
    attention_kernels(path);
    rows_kernels(path);
    multi_kernels(path);
    step(path, AMP_F32);
    step(path, AMP_BF16);
    step(path, AMP_F16);
    ampi_fp_end(host);
    return 0;
}
