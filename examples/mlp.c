/* mlp.c - a classifier from arrays in memory, whole: in 16 bits where this machine has them, clipped, and evaluated.
 *
 *     gcc -O2 examples/mlp.c -o mlp -lm -lpthread && ./mlp */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <stdio.h>
#include <stdlib.h>
#define CHECK(call) do { if ((call) != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); exit(1); } } while (0)
enum { ROWS = 6000, TRAIN = 5000, IN = 8, HIDDEN = 64, CLASSES = 4, STEPS = 1500 };
static amp_context *amp; static amp_tape *tape; static amp_param *w1, *b1, *w2, *b2;

/* Records the network and its loss on the next batch. */
static amp_value network(amp_loader *loader, amp_mode mode) {
    amp_autocast_desc region = {.mode = mode}; amp_batch batch;
    CHECK(amp_loader_next(loader, &batch)); CHECK(amp_tape_begin(tape, &region));
    amp_tensor x = amp_tensor2(batch.fields[0], AMP_F32, batch.batch, IN);
    amp_value h = amp_tape_linear(tape, amp_tape_input(tape, &x), w1, b1, AMP_ACT_RELU);
    h = amp_tape_linear(tape, h, w2, b2, AMP_ACT_NONE);
    return amp_tape_cross_entropy(tape, h, (const int32_t *)batch.fields[1], NULL);
}

int main(void) {
    static float x[ROWS][IN]; static int32_t y[ROWS]; amp_model *model; amp_optimizer *adamw; amp_loader *train, *test;
    for (int i = 0; i < ROWS * IN; i++) x[i / IN][i % IN] = amp_random_uniform(1, (uint64_t)i) - 0.5f;
    for (int i = 0; i < ROWS; i++) y[i] = (x[i][0] * x[i][1] > 0) + 2 * (x[i][2] > x[i][3]);
    CHECK(amp_open(&amp, NULL)); CHECK(amp_model_create(amp, &model, 1, 0)); CHECK(amp_tape_create(amp, &tape, NULL));
    w1 = amp_model_param(model, "first.weight", HIDDEN, IN, AMP_INIT_KAIMING_NORMAL, 0);
    b1 = amp_model_param(model, "first.bias", HIDDEN, 0, AMP_INIT_ZEROS, 0);
    w2 = amp_model_param(model, "second.weight", CLASSES, HIDDEN, AMP_INIT_KAIMING_NORMAL, 0);
    b2 = amp_model_param(model, "second.bias", CLASSES, 0, AMP_INIT_ZEROS, 0);
    amp_tensor arrays[2] = {amp_tensor2(x, AMP_F32, ROWS, IN), amp_tensor1(y, AMP_I32, ROWS)};
    amp_loader_desc first = {.tensors = arrays, .n_tensors = 2, .batch = 100, .last = TRAIN, .shuffle = 1};
    amp_loader_desc rest = {.tensors = arrays, .n_tensors = 2, .batch = ROWS - TRAIN, .first = TRAIN};
    amp_optimizer_desc desc = {.lr = 3e-3, .clip_norm = 1}; float loss;
    CHECK(amp_model_params(model, &desc.params, &desc.n_params)); CHECK(amp_optimizer_create(amp, &adamw, &desc));
    CHECK(amp_loader_create(amp, &train, &first)); CHECK(amp_loader_create(amp, &test, &rest));
    for (int step = 1; step <= STEPS; step++) {
        CHECK(amp_tape_backward(tape, network(train, AMP_MODE_TRAINING), NULL)); CHECK(amp_step(adamw, NULL));
        if (step % 500 != 0) continue;
        amp_value v = network(test, AMP_MODE_INFERENCE); CHECK(amp_tape_finish(tape));
        CHECK(amp_tape_read(tape, v, &loss, 1)); printf("step %d: validation loss %.4f\n", step, (double)loss);
    }
    amp_loader_destroy(train); amp_loader_destroy(test); amp_optimizer_destroy(adamw); amp_tape_destroy(tape);
    amp_model_destroy(model); amp_close(amp);
    return fflush(stdout) != 0 || ferror(stdout);
}
