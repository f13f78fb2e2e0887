/* lora.c - adapters on a frozen base: a network learns a task, is frozen, and two thin matrices a layer learn another.
 *
 *     gcc -O2 examples/lora.c -o lora -lm -lpthread && ./lora [auto, fp32, bf16 or fp16]
 *
 * y = W x + B A x with W frozen, A [RANK, in] random and B [out, RANK] zero at first (Hu et al. 2021).  Frozen is a
 * parameter without a gradient; the optimizer gets the adapters alone. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 5000, IN = 16, HIDDEN = 128, CLASSES = 4, RANK = 4, BATCH = 100, STEPS = 600 };
static amp_context *amp; static amp_tape *tape;
static amp_param *weights[2], *down[2], *up[2];         /* W, A and B of the two layers; down NULL: no adapters yet */

static void check(amp_result result) {
    if (result != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); exit(1); }
}

static amp_value layer(int i, amp_value x) {
    amp_value y = amp_tape_linear(tape, x, weights[i], NULL, AMP_ACT_NONE);
    if (down[i] == NULL) return y;
    return amp_tape_add(tape, y,
                        amp_tape_linear(tape, amp_tape_linear(tape, x, down[i], NULL, AMP_ACT_NONE), up[i], NULL,
                                        AMP_ACT_NONE));
}

/* Trains these parameters; returns the last losses' mean. */
static double train(amp_model *model, amp_scaler *scaler, float x[][IN], int32_t *y) {
    amp_tensor arrays[2] = {amp_tensor2(x, AMP_F32, ROWS, IN), amp_tensor1(y, AMP_I32, ROWS)};
    amp_loader_desc data = {.tensors = arrays, .n_tensors = 2, .batch = BATCH, .shuffle = 1};
    amp_optimizer_desc desc = {.lr = 3e-3, .clip_norm = 1};
    amp_optimizer *adamw; amp_loader *loader; amp_batch batch; double mean = 0;
    check(amp_model_params(model, &desc.params, &desc.n_params));
    check(amp_optimizer_create(amp, &adamw, &desc)); check(amp_loader_create(amp, &loader, &data));
    for (int step = 0; step < STEPS; step++) {
        float loss;
        check(amp_loader_next(loader, &batch)); check(amp_tape_begin(tape, NULL));
        amp_tensor in = amp_tensor2((void *)(uintptr_t)batch.fields[0], AMP_F32, BATCH, IN);
        amp_value h = amp_tape_activation(tape, layer(0, amp_tape_input(tape, &in)), NULL, AMP_ACT_GELU);
        amp_value value = amp_tape_cross_entropy(tape, layer(1, h), (const int32_t *)batch.fields[1], NULL);
        check(amp_tape_backward(tape, value, amp_scaler_scale_ptr(scaler))); check(amp_step(adamw, scaler));
        check(amp_tape_read(tape, value, &loss, 1));
        if (step >= STEPS - 50) mean += (double)loss / 50;
    }
    amp_loader_destroy(loader); amp_optimizer_destroy(adamw);
    return mean;
}

static int64_t elements(amp_model *model) {
    amp_param *params; int64_t n, sum = 0;
    check(amp_model_params(model, &params, &n));
    for (int64_t i = 0; i < n; i++) sum += amp_tensor_count(&params[i].weight);
    return sum;
}

int main(int argc, char **argv) {
    static float x[ROWS][IN]; static int32_t y[ROWS], z[ROWS];
    amp_desc desc = {0}; amp_choice choice; amp_model *base, *adapters; amp_scaler *scaler;
    amp_param *frozen; int64_t n;
    for (int i = 0; i < ROWS * IN; i++) x[i / IN][i % IN] = 2 * amp_random_uniform(1, (uint64_t)i) - 1;
    for (int i = 0; i < ROWS; i++) {
        y[i] = (x[i][0] > x[i][1]) + 2 * (x[i][2] > x[i][3]);       /* the first task */
        z[i] = (x[i][4] > x[i][1]) + 2 * (x[i][2] > x[i][5]);       /* the second: other columns */
    }
    check(amp_dtype_parse(argc > 1 ? argv[1] : "auto", &desc.dtype));
    check(amp_open(&amp, &desc)); check(amp_query_choice(amp, &choice)); check(amp_tape_create(amp, &tape, NULL));
    amp_scaler_desc scaling = {.disable = !choice.scaler};
    check(amp_scaler_create(amp, &scaler, &scaling));
    check(amp_model_create(amp, &base, 1, 0)); check(amp_model_create(amp, &adapters, 2, 0));
    weights[0] = amp_model_param(base, "0.weight", HIDDEN, IN, AMP_INIT_KAIMING_NORMAL, 0);
    weights[1] = amp_model_param(base, "1.weight", CLASSES, HIDDEN, AMP_INIT_XAVIER_NORMAL, 0);
    printf("base:     %lld parameters, first task, loss %.3f\n", (long long)elements(base), train(base, scaler, x, y));

    check(amp_model_params(base, &frozen, &n));
    for (int64_t i = 0; i < n; i++) memset(&frozen[i].grad, 0, sizeof frozen[i].grad);      /* no gradient: frozen */
    down[0] = amp_model_param(adapters, "0.down", RANK, IN, AMP_INIT_KAIMING_NORMAL, 0);
    up[0] = amp_model_param(adapters, "0.up", HIDDEN, RANK, AMP_INIT_ZEROS, 0);
    down[1] = amp_model_param(adapters, "1.down", RANK, HIDDEN, AMP_INIT_KAIMING_NORMAL, 0);
    up[1] = amp_model_param(adapters, "1.up", CLASSES, RANK, AMP_INIT_ZEROS, 0);
    float before = ((float *)weights[0]->weight.data)[0];
    printf("adapters: %lld parameters, second task, loss %.3f", (long long)elements(adapters),
           train(adapters, scaler, x, z));
    printf("; the base %s\n", ((float *)weights[0]->weight.data)[0] - before == 0 ? "has not moved" : "HAS MOVED");
    amp_scaler_destroy(scaler); amp_tape_destroy(tape);
    amp_model_destroy(adapters); amp_model_destroy(base); amp_close(amp);
    return fflush(stdout) != 0 || ferror(stdout);
}
