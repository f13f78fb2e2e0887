/* quickstart.c - a classifier for Fashion-MNIST with all that a real run has: the machine's precision, a loss scaler
 * where that needs one, clipping, a schedule, evaluation, and after each epoch a checkpoint, from which another run
 * goes on exactly.
 *
 *     gcc -O2 examples/quickstart.c -o quickstart -lm -lpthread
 *     ./quickstart [folder of the IDX files] [checkpoint to go on from: quickstart.state]
 *
 * Built with -DUSE_CUDA and amp_cuda.o it runs on the GPU.  The files are those of Debian's package
 * dataset-fashion-mnist; without them it learns synthetic pictures. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "mnist.h"
enum { PIXELS = 784, HIDDEN = 256, CLASSES = 10, BATCH = 100, EPOCHS = 8 };
#define CHECK(call) do { if ((call) != AMP_OK) { fprintf(stderr, "%s\n", ex_error()); exit(1); } } while (0)
static amp_context *amp; static amp_tape *tape; static amp_param *w1, *b1, *w2, *b2;

static void open_loader(amp_loader **loader, const mnist *p, int shuffle) {
    amp_tensor arrays[2] = {amp_tensor2(p->x, AMP_F32, p->n, PIXELS), amp_tensor1(p->y, AMP_I32, p->n)};
    amp_loader_desc desc = {.tensors = arrays, .n_tensors = 2, .batch = BATCH, .shuffle = shuffle};
    CHECK(amp_loader_create(amp, loader, &desc));
}

/* Records the network on the next batch, and returns its logits. */
static amp_value network(amp_loader *loader, amp_batch *batch, amp_mode mode) {
    amp_autocast_desc region = {.mode = mode};
    CHECK(amp_loader_next(loader, batch)); CHECK(amp_tape_begin(tape, &region));
    amp_tensor x = amp_tensor2(batch->fields[0], AMP_F32, batch->batch, PIXELS);
    amp_value hidden = amp_tape_linear(tape, amp_tape_input(tape, &x), w1, b1, AMP_ACT_RELU);
    return amp_tape_linear(tape, hidden, w2, b2, AMP_ACT_NONE);
}

static double accuracy(amp_loader *tests, const mnist *p) {
    int64_t right = 0, i; float scores[BATCH * CLASSES]; amp_batch batch;
    for (i = 0; i + BATCH <= p->n; i += BATCH) {
        amp_value logits = network(tests, &batch, AMP_MODE_INFERENCE);
        CHECK(amp_tape_finish(tape)); CHECK(amp_tape_read(tape, logits, scores, BATCH * CLASSES));
        for (int row = 0; row < BATCH; row++) right += ex_largest(scores + row * CLASSES, CLASSES) == p->y[i + row];
    }
    return (double)right / (double)i;
}

int main(int argc, char **argv) {
    mnist train, test; amp_loader *data, *tests; amp_batch batch; amp_state *s; amp_loader_info at; double lr;
    amp_desc desc = {0}; amp_choice choice; amp_model *model; amp_scaler *scaler; amp_optimizer *adamw; float value;
    ex_begin(); CHECK(mnist_find(&train, &test, argc > 1 ? argv[1] : "/usr/share/datasets/fashion-mnist"));
    CHECK(ex_device_open(&amp, &desc, "auto")); CHECK(amp_query_choice(amp, &choice));
    printf("%s: %s\n", amp_dtype_name(choice.dtype), choice.reason);
    CHECK(amp_model_create(amp, &model, 1, 0)); CHECK(amp_tape_create(amp, &tape, NULL));
    w1 = amp_model_param(model, "first.weight", HIDDEN, PIXELS, AMP_INIT_KAIMING_NORMAL, 0);
    b1 = amp_model_param(model, "first.bias", HIDDEN, 0, AMP_INIT_ZEROS, 0);
    w2 = amp_model_param(model, "second.weight", CLASSES, HIDDEN, AMP_INIT_KAIMING_NORMAL, 0);
    b2 = amp_model_param(model, "second.bias", CLASSES, 0, AMP_INIT_ZEROS, 0);
    amp_optimizer_desc rule = {.clip_norm = 1}; amp_scaler_desc scaling = {.disable = !choice.scaler};  /* fp16's */
    CHECK(amp_model_params(model, &rule.params, &rule.n_params)); CHECK(amp_optimizer_create(amp, &adamw, &rule));
    CHECK(amp_scaler_create(amp, &scaler, &scaling)); open_loader(&data, &train, 1); open_loader(&tests, &test, 0);
    if (argc > 2) {
        CHECK(amp_state_load(&s, NULL, argv[2])); CHECK(amp_model_load(model, s, "model"));
        CHECK(amp_optimizer_load(adamw, s, "adamw")); CHECK(amp_scaler_load(scaler, s, "scaler"));
        CHECK(amp_loader_load(data, s, "data")); amp_state_destroy(s);
    }
    CHECK(amp_loader_info_get(data, &at)); amp_schedule plan = {.lr = 2e-3, .warmup = 99, .steps = EPOCHS * at.batches};
    for (int64_t step = at.epoch * at.batches + at.index; step < plan.steps; step++) {
        CHECK(amp_schedule_lr(&plan, step, &lr)); CHECK(amp_optimizer_set_lr(adamw, lr));
        amp_value logits = network(data, &batch, AMP_MODE_TRAINING);
        amp_value loss = amp_tape_cross_entropy(tape, logits, (const int32_t *)batch.fields[1], NULL);
        CHECK(amp_tape_backward(tape, loss, amp_scaler_scale_ptr(scaler))); CHECK(amp_step(adamw, scaler));
        if ((step + 1) % at.batches != 0) continue;
        CHECK(amp_tape_read(tape, loss, &value, 1));
        printf("step %lld: loss %.4f, accuracy %.4f\n", (long long)step + 1, (double)value, accuracy(tests, &test));
        CHECK(amp_state_create(&s, NULL)); CHECK(amp_model_save(model, s, "model"));
        CHECK(amp_optimizer_save(adamw, s, "adamw")); CHECK(amp_scaler_save(scaler, s, "scaler"));
        CHECK(amp_loader_save(data, s, "data")); CHECK(amp_state_save(s, "quickstart.state")); amp_state_destroy(s);
    }
}
