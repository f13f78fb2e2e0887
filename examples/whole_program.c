/* whole_program.c - all parts of a training run, called by hand: parameters in your memory, operators and their
 * backward without a tape, a loader that calls you for its samples, validation, and a checkpoint.
 *
 *     gcc -O2 examples/whole_program.c -o whole_program -lm -lpthread
 *     ./whole_program [auto, fp32, tf32, fp16 or bf16] [checkpoint to resume from: program.state]
 *
 * It writes program.state at the end.  mlp.c and quickstart.c do the same with a tape, which calls backward for you. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <stdio.h>
#include <stdlib.h>

enum { IN = 8, HIDDEN = 64, BATCH = 32, STEPS = 600 };
static amp_context *amp;
static amp_scaler *scaler;
static amp_optimizer *optimizer;
static amp_loader *train, *valid;
static amp_param params[4];
static amp_tensor h, dh, logits, loss;

static void check(amp_result result) {
    if (result == AMP_OK) return;
    fprintf(stderr, "%s\n", amp_last_error());
    exit(1);
}

/* Copies n floats, also between CPU and GPU memory. */
static void copy(void *to, const void *from, int64_t n) {
    check(amp_copy(amp, to, from, 4 * n, AMP_COPY_DEFAULT));
    check(amp_sync(amp));
}

/* A tensor of zeros; with rows 0 a vector. */
static amp_tensor zeros(amp_dtype dtype, int64_t rows, int64_t cols) {
    int64_t bytes = (rows > 0 ? rows : 1) * cols * (int64_t)amp_dtype_size(dtype);
    void *data;
    check(amp_alloc(amp, &data, bytes));
    check(amp_fill(amp, data, 0, bytes));
    return rows > 0 ? amp_tensor2(data, dtype, rows, cols) : amp_tensor1(data, dtype, cols);
}

static amp_param param(const char *name, int64_t rows, int64_t cols) {
    amp_param p = {.name = name, .weight = zeros(AMP_F32, rows, cols), .grad = zeros(AMP_F32, rows, cols)};
    float start[HIDDEN * IN];
    for (int i = 0; i < rows * cols; i++) start[i] = amp_random_uniform((uint64_t)rows, (uint64_t)i) - 0.5f;
    copy(p.weight.data, start, rows * cols);
    return p;
}

/* The loader's threads call it.  A sample is eight numbers, and whether the first two have the same sign. */
static int read_sample(void *user, const amp_sample *sample, void *const *fields) {
    float *x = (float *)fields[0];
    int32_t *label = (int32_t *)fields[1];
    for (int i = 0; i < IN; i++) x[i] = amp_random_uniform(1, (uint64_t)(sample->sample * IN + i)) - 0.5f;
    *label = x[0] * x[1] > 0;
    return user != NULL;                /* 0: success */
}

/* One batch; returns its loss. */
static float run(amp_loader *loader, amp_mode mode) {
    amp_autocast_desc region = {.mode = mode};
    amp_batch batch;
    float value;
    check(amp_loader_next(loader, &batch));
    amp_linear_op fc1 = {.x = amp_tensor2(batch.fields[0], AMP_F32, BATCH, IN), .y = h, .weight = &params[0],
                         .bias = &params[1], .act = AMP_ACT_RELU, .dy = dh};
    amp_linear_op fc2 = {.x = h, .y = logits, .weight = &params[2], .bias = &params[3], .dy = logits, .dx = dh};
    amp_cross_entropy_op ce = {.logits = logits, .dlogits = logits, .labels = (const int32_t *)batch.fields[1],
                               .grad_scale = amp_scaler_scale_ptr(scaler), .loss = (float *)loss.data};
    check(amp_autocast_begin(amp, &region));
    check(amp_linear(amp, &fc1));
    check(amp_linear(amp, &fc2));
    check(amp_cross_entropy(amp, &ce));     /* the loss, and its gradient in place of the logits */
    check(amp_autocast_end(amp));
    if (mode == AMP_MODE_TRAINING) {
        check(amp_linear_backward(amp, &fc2));
        check(amp_linear_backward(amp, &fc1));
        check(amp_step(optimizer, scaler));
    }
    copy(&value, loss.data, 1);
    return value;
}

static void save(const char *path) {
    amp_state *state;
    float values[HIDDEN * IN];
    check(amp_state_create(&state, NULL));
    for (int i = 0; i < 4; i++) {
        int64_t n = amp_tensor_count(&params[i].weight);
        copy(values, params[i].weight.data, n);
        check(amp_state_put(state, params[i].name, AMP_F32, values, n));
    }
    check(amp_optimizer_save(optimizer, state, "adamw"));
    check(amp_scaler_save(scaler, state, "scaler"));
    check(amp_loader_save(train, state, "train"));
    check(amp_state_save(state, path));
    amp_state_destroy(state);
}

/* Weights first, then what goes with them. */
static void load(const char *path) {
    amp_state *state;
    float values[HIDDEN * IN];
    check(amp_state_load(&state, NULL, path));
    for (int i = 0; i < 4; i++) {
        int64_t n = amp_tensor_count(&params[i].weight);
        check(amp_state_get(state, params[i].name, AMP_F32, values, n));
        copy(params[i].weight.data, values, n);
        amp_param_changed(&params[i]);
    }
    check(amp_optimizer_load(optimizer, state, "adamw"));
    check(amp_scaler_load(scaler, state, "scaler"));
    check(amp_loader_load(train, state, "train"));
    amp_state_destroy(state);
}

/* The precision, parameters, activations, data, scaler and optimizer. */
static void open_all(const char *precision) {
    amp_desc desc = {.level = AMP_LEVEL_O1};    /* weights in fp32, which operators cast */
    amp_choice choice;
    check(amp_dtype_parse(precision, &desc.dtype));
#if defined(USE_CUDA)
    desc.backend = amp_cuda();
#endif
    check(amp_open(&amp, &desc));
    check(amp_query_choice(amp, &choice));
    printf("%s: %s\n", amp_dtype_name(choice.dtype), choice.reason);
    params[0] = param("fc1.weight", HIDDEN, IN);
    params[1] = param("fc1.bias", 0, HIDDEN);
    params[2] = param("fc2.weight", 2, HIDDEN);
    params[3] = param("fc2.bias", 0, 2);
    check(amp_param_register(amp, params, 4));
    amp_dtype store = choice.dtype == AMP_TF32 ? AMP_F32 : choice.dtype == AMP_FP8 ? AMP_BF16 : choice.dtype;
    h = zeros(store, BATCH, HIDDEN);
    dh = zeros(store, BATCH, HIDDEN);
    logits = zeros(AMP_F32, BATCH, 2);
    loss = zeros(AMP_F32, 0, 1);
    amp_source source = {.read = read_sample, .samples = 4096,
                         .fields = {{.dtype = AMP_F32, .count = IN}, {.dtype = AMP_I32, .count = 1}}, .n_fields = 2};
    amp_loader_desc first = {.source = &source, .shuffle = 1, .batch = BATCH, .last = 3840};
    amp_loader_desc rest = {.source = &source, .batch = BATCH, .first = 3840};
    amp_scaler_desc scaling = {.disable = !choice.scaler};      /* only fp16 needs one */
    amp_optimizer_desc adamw = {.params = params, .n_params = 4, .lr = 0.01, .weight_decay = 0.01, .clip_norm = 1};
    check(amp_loader_create(amp, &train, &first));
    check(amp_loader_create(amp, &valid, &rest));
    check(amp_scaler_create(amp, &scaler, &scaling));
    check(amp_optimizer_create(amp, &optimizer, &adamw));
}

int main(int argc, char **argv) {
    open_all(argc > 1 ? argv[1] : "auto");
    if (argc > 2) load(argv[2]);
    for (int step = 1; step <= STEPS; step++) {
        float value = run(train, AMP_MODE_TRAINING), mean = 0;
        if (step % 200 != 0) continue;
        for (int i = 0; i < 8; i++) mean += run(valid, AMP_MODE_INFERENCE) / 8;
        printf("step %d: loss %.3f, validation %.3f\n", step, (double)value, (double)mean);
    }
    save("program.state");
    amp_optimizer_destroy(optimizer);
    amp_scaler_destroy(scaler);
    amp_loader_destroy(train);
    amp_loader_destroy(valid);
    amp_close(amp);                     /* frees what amp_alloc gave, too */
    return fflush(stdout) != 0 || ferror(stdout);
}
