/* convnet.c - an operator of your own on the tape: a convolution by im2col and amp_gemm, forward and backward.
 *
 *     gcc -O2 examples/convnet.c -o convnet -lm -lpthread && ./convnet [auto, fp32, bf16 or fp16]
 *
 * Two convolutions and a linear layer tell pictures of 16 x 16 noisy pixels apart: a bar that lies, stands, falls or
 * rises.  The products compute in the region's precision; im2col and its reverse are plain loops. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <stdio.h>
#include <stdlib.h>

enum { SIDE = 16, CLASSES = 4, ROWS = 2400, TRAIN = 2000, BATCH = 50, STEPS = 400 };
static amp_context *amp; static amp_tape *tape;

static void check(amp_result result) {
    if (result != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); exit(1); }
}

/* A 3 x 3 convolution with stride 2 and a border of zeros: x [batch, in, side, side], y [batch, out, side / 2, side
   / 2],
   weight [out, 9 in]. */
typedef struct conv {
    int64_t in, out, side;
    amp_param *weight;
    float *columns;                 /* [9 in, side / 2 * side / 2], of one picture */
} conv;

/* What each of the nine taps sees, one row a tap and channel; or, back 1, adds the rows to where they came from. */
static void im2col(const conv *c, float *x, int back) {
    int64_t half = c->side / 2, channel, tap, i, j;
    float *row = c->columns;
    for (channel = 0; channel < c->in; channel++)
        for (tap = 0; tap < 9; tap++, row += half * half)
            for (i = 0; i < half; i++)
                for (j = 0; j < half; j++) {
                    int64_t y = 2 * i + tap / 3 - 1, z = 2 * j + tap % 3 - 1;
                    int inside = y >= 0 && z >= 0 && y < c->side && z < c->side;
                    float *pixel = inside ? x + (channel * c->side + y) * c->side + z : NULL;
                    if (!back) row[i * half + j] = inside ? *pixel : 0;
                    else if (inside) *pixel += row[i * half + j];
                }
}

static amp_result conv_forward(void *user, const amp_custom_call *call) {
    const conv *c = (const conv *)user;
    int64_t pixels = c->side / 2 * (c->side / 2), k = 9 * c->in, b;
    for (b = 0; b < call->x[0].shape[0]; b++) {
        amp_result result;
        im2col(c, (float *)call->x[0].data + b * c->in * c->side * c->side, 0);
        result = amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, c->out, pixels, k, 1,
                          (const float *)c->weight->weight.data, k, c->columns, pixels, 0,
                          (float *)call->y.data + b * c->out * pixels, pixels);
        if (result != AMP_OK) return result;
    }
    return AMP_OK;
}

/* dweight += dy columns', and dx from weight' dy. */
static amp_result conv_backward(void *user, const amp_custom_call *call) {
    const conv *c = (const conv *)user;
    int64_t pixels = c->side / 2 * (c->side / 2), k = 9 * c->in, size = c->in * c->side * c->side, b;
    int add = amp_param_accumulate(c->weight);
    float *x = (float *)call->x[0].data, *dx = (float *)call->dx[0].data, *dy = (float *)call->dy.data;
    amp_result result = AMP_OK;
    if (dx != NULL) memset(dx, 0, (size_t)(call->x[0].shape[0] * size) * sizeof *dx);
    for (b = 0; b < call->x[0].shape[0] && result == AMP_OK; b++, dy += c->out * pixels) {
        im2col(c, x + b * size, 0);
        result = amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, c->out, k, pixels, 1, dy, pixels, c->columns,
                          pixels, add || b > 0 ? 1.0f : 0.0f, (float *)c->weight->grad.data, k);
        if (dx == NULL || result != AMP_OK) continue;
        result = amp_gemm(amp, AMP_ROW_MAJOR, AMP_TRANS, AMP_NO_TRANS, k, pixels, c->out, 1,
                          (const float *)c->weight->weight.data, k, dy, pixels, 0, c->columns, pixels);
        im2col(c, dx + b * size, 1);
    }
    return result;
}

static amp_value conv_record(conv *c, amp_value x, int64_t batch) {
    amp_custom_op op = {.layer = c->weight->name, .dtype = AMP_F32, .ndim = 4, .weight = c->weight, .user = c,
                        .shape = {batch, c->out, c->side / 2,
                                  c->side / 2}, .forward = conv_forward, .backward = conv_backward};
    return amp_tape_custom(tape, &x, 1, &op);
}
static void conv_open(conv *c, amp_model *model, const char *name, int64_t in, int64_t out, int64_t side) {
    c->in = in; c->out = out; c->side = side;
    c->weight = amp_model_param(model, name, out, 9 * in, AMP_INIT_KAIMING_NORMAL, 0);
    c->columns = (float *)malloc((size_t)(9 * in * side * side / 4) * sizeof(float));
    if (c->columns == NULL) check(AMP_ERR_MEMORY);
}

/* A bar through a random point, in one of four directions, under noise. */
static void draw(float *picture, int32_t *label, uint64_t n) {
    uint32_t r[4];
    amp_philox(1, 0, n, r);
    *label = (int32_t)(r[0] % CLASSES);
    for (int k = 0; k < SIDE * SIDE; k++) picture[k] = amp_random_uniform(2, n * SIDE * SIDE + (uint64_t)k) - 0.5f;
    for (int k = -4; k <= 4; k++) {
        int y = 4 + (int)(r[1] % 8) + (*label == 0 ? 0 : *label == 3 ? -k : k);
        int x = 4 + (int)(r[2] % 8) + (*label == 1 ? 0 : k);
        if (x >= 0 && y >= 0 && x < SIDE && y < SIDE) picture[y * SIDE + x] += 1;
    }
}

static conv first, second; static amp_param *head;
static amp_value network(const amp_batch *batch, amp_mode mode) {
    amp_autocast_desc region = {.mode = mode};
    amp_tensor pictures = amp_tensor4((void *)(uintptr_t)batch->fields[0], AMP_F32, batch->batch, 1, SIDE, SIDE);
    int64_t flat[2] = {batch->batch, 16 * SIDE / 4 * SIDE / 4};
    amp_value x;
    check(amp_tape_begin(tape, &region));
    amp_tape_store(tape, AMP_F32);                      /* the loops of im2col read fp32 */
    x = amp_tape_activation(tape, conv_record(&first, amp_tape_input(tape, &pictures), batch->batch), NULL,
                            AMP_ACT_RELU);
    x = amp_tape_activation(tape, conv_record(&second, x, batch->batch), NULL, AMP_ACT_RELU);
    return amp_tape_linear(tape, amp_tape_reshape(tape, x, flat, 2), head, NULL, AMP_ACT_NONE);
}

int main(int argc, char **argv) {
    static float x[ROWS][SIDE * SIDE], logits[(ROWS - TRAIN) * CLASSES]; static int32_t y[ROWS];
    amp_desc desc = {0}; amp_model *model; amp_optimizer *adamw; amp_scaler *scaler; amp_loader *train, *test;
    amp_choice choice; amp_batch batch; amp_optimizer_desc optimizer = {.lr = 3e-3, .clip_norm = 1}; int right = 0;
    for (int i = 0; i < ROWS; i++) draw(x[i], &y[i], (uint64_t)i);
    check(amp_dtype_parse(argc > 1 ? argv[1] : "auto", &desc.dtype));
    check(amp_open(&amp, &desc)); check(amp_query_choice(amp, &choice));
    check(amp_model_create(amp, &model, 1, 0)); check(amp_tape_create(amp, &tape, NULL));
    conv_open(&first, model, "first.weight", 1, 8, SIDE); conv_open(&second, model, "second.weight", 8, 16, SIDE / 2);
    head = amp_model_param(model, "head.weight", CLASSES, 16 * SIDE / 4 * SIDE / 4, AMP_INIT_XAVIER_NORMAL, 0);
    amp_scaler_desc scaling = {.disable = !choice.scaler};
    amp_tensor arrays[2] = {amp_tensor2(x, AMP_F32, ROWS, SIDE * SIDE), amp_tensor1(y, AMP_I32, ROWS)};
    amp_loader_desc some = {.tensors = arrays, .n_tensors = 2, .batch = BATCH, .last = TRAIN, .shuffle = 1};
    amp_loader_desc rest = {.tensors = arrays, .n_tensors = 2, .batch = ROWS - TRAIN, .first = TRAIN};
    check(amp_model_params(model, &optimizer.params, &optimizer.n_params));
    check(amp_optimizer_create(amp, &adamw, &optimizer)); check(amp_scaler_create(amp, &scaler, &scaling));
    check(amp_loader_create(amp, &train, &some)); check(amp_loader_create(amp, &test, &rest));
    for (int step = 1; step <= STEPS; step++) {
        float loss;
        check(amp_loader_next(train, &batch));
        amp_value value = amp_tape_cross_entropy(tape, network(&batch, AMP_MODE_TRAINING),
                                                 (const int32_t *)batch.fields[1], NULL);
        check(amp_tape_backward(tape, value, amp_scaler_scale_ptr(scaler)));
        check(amp_step(adamw, scaler)); check(amp_tape_read(tape, value, &loss, 1));
        if (step % 100 == 0) printf("step %d: loss %.4f\n", step, (double)loss);
    }
    check(amp_loader_next(test, &batch));
    amp_value out = network(&batch, AMP_MODE_INFERENCE);
    check(amp_tape_finish(tape)); check(amp_tape_read(tape, out, logits, (ROWS - TRAIN) * CLASSES));
    for (int i = 0; i < ROWS - TRAIN; i++) {
        int best = 0;
        for (int k = 1; k < CLASSES; k++) if (logits[i * CLASSES + k] > logits[i * CLASSES + best]) best = k;
        right += best == y[TRAIN + i];
    }
    printf("%s: %.1f%% of %d pictures that it has not seen\n", amp_dtype_name(choice.dtype),
           100.0 * right / (ROWS - TRAIN), ROWS - TRAIN);
    amp_loader_destroy(train); amp_loader_destroy(test); amp_optimizer_destroy(adamw); amp_scaler_destroy(scaler);
    amp_tape_destroy(tape); amp_model_destroy(model); free(first.columns); free(second.columns); amp_close(amp);
    return fflush(stdout) != 0 || ferror(stdout);
}
