/* gpt.c - a GPT from a text to a sample, whole: the model, one visible loop, and what it writes.
 *
 *     gcc -O2 examples/gpt.c -o gpt -lm -lpthread
 *     ./gpt [text file, default amp.h] [auto, fp32, bf16 or fp16] [steps, default 400]
 *
 * The tokens are bytes.  The loop is the one of every trainer: next, begin, forward, loss, end, backward, step.  The
 * model alone, with every option of GPT-2, is gpt.h; a trainer with all that a long run needs is train_gpt.c. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { VOCAB = 256, LAYERS = 3, HEADS = 4, CHANNELS = 96, SEQ = 96, BATCH = 8, SAMPLE = 300 };

static void check(amp_result result) {
    if (result != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); exit(1); }
}

/* ---- The model */

typedef struct block { amp_param *norm1, *shift1, *qkv, *out, *norm2, *shift2, *up, *down; } block;
typedef struct gpt {
    amp_model *parameters;
    amp_param *tokens, *positions, *norm, *shift;
    block blocks[LAYERS];
} gpt;

static amp_param *matrix(gpt *g, const char *name, int layer, int64_t rows, int64_t cols, double deviation) {
    char full[64];
    snprintf(full, sizeof full, "%d.%s", layer, name);          /* the model copies it */
    return amp_model_param(g->parameters, full, rows, cols, AMP_INIT_NORMAL, deviation);
}
static amp_param *vector(gpt *g, const char *name, int layer, amp_init init) {
    char full[64];
    snprintf(full, sizeof full, "%d.%s", layer, name);
    return amp_model_param(g->parameters, full, CHANNELS, 0, init, 0);
}

static void gpt_open(gpt *g, amp_context *amp) {
    const double last = 0.02 / sqrt(2.0 * LAYERS);      /* of what is added to the stream, as GPT-2 has it */
    int i;
    check(amp_model_create(amp, &g->parameters, 1, 0));
    g->tokens = matrix(g, "tokens", 0, VOCAB, CHANNELS, 0.02);
    g->positions = matrix(g, "positions", 0, SEQ, CHANNELS, 0.02);
    g->tokens->embedding = g->positions->embedding = 1;
    for (i = 0; i < LAYERS; i++) {
        block *b = &g->blocks[i];
        b->norm1 = vector(g, "norm1", i, AMP_INIT_NORM_WEIGHT); b->shift1 = vector(g, "shift1", i, AMP_INIT_NORM_BIAS);
        b->norm2 = vector(g, "norm2", i, AMP_INIT_NORM_WEIGHT); b->shift2 = vector(g, "shift2", i, AMP_INIT_NORM_BIAS);
        b->qkv = matrix(g, "qkv", i, 3 * CHANNELS, CHANNELS, 0.02);
        b->out = matrix(g, "out", i, CHANNELS, CHANNELS, last);
        b->up = matrix(g, "up", i, 4 * CHANNELS, CHANNELS, 0.02);
        b->down = matrix(g, "down", i, CHANNELS, 4 * CHANNELS, last);
    }
    g->norm = vector(g, "norm", LAYERS, AMP_INIT_NORM_WEIGHT); g->shift = vector(g, "shift", LAYERS,
                                                                                 AMP_INIT_NORM_BIAS);
}

/* Records the logits [batch, seq, VOCAB] of ids [batch, seq]. */
static amp_value gpt_forward(const gpt *g, amp_tape *t, const int32_t *ids, int64_t batch, int64_t seq) {
    amp_tensor tensor = amp_tensor2((void *)(uintptr_t)ids, AMP_I32, batch, seq);
    amp_attention_op causal = {.mask = {.kind = AMP_MASK_CAUSAL}};
    amp_value x = amp_tape_embedding(t, &tensor, g->tokens, g->positions), h, qkv[3];
    int i, k;
    for (i = 0; i < LAYERS; i++) {
        const block *b = &g->blocks[i];
        h = amp_tape_layernorm(t, x, b->norm1, b->shift1, 1e-5f);
        h = amp_tape_linear(t, h, b->qkv, NULL, AMP_ACT_NONE);
        for (k = 0; k < 3; k++) qkv[k] = amp_tape_split(t, h, 2, k * CHANNELS, CHANNELS);
        h = amp_tape_attention(t, qkv[0], qkv[1], qkv[2], HEADS, &causal);
        x = amp_tape_add(t, x, amp_tape_linear(t, h, b->out, NULL, AMP_ACT_NONE));
        h = amp_tape_layernorm(t, x, b->norm2, b->shift2, 1e-5f);
        h = amp_tape_linear(t, h, b->up, NULL, AMP_ACT_GELU);
        x = amp_tape_add(t, x, amp_tape_linear(t, h, b->down, NULL, AMP_ACT_NONE));
    }
    x = amp_tape_layernorm(t, x, g->norm, g->shift, 1e-5f);
    return amp_tape_linear(t, x, g->tokens, NULL, AMP_ACT_NONE);        /* the output weights are the embedding */
}

/* ---- The text: its first nine tenths to train on, the rest to validate */

static void open_text(amp_context *amp, const char *path, amp_loader **train, amp_loader **valid) {
    amp_loader_desc first = {.path = path, .format = AMP_TOKENS_BYTES, .batch = BATCH, .seq = SEQ,
                             .shuffle = 1}, last = first;
    amp_loader_info info;
    amp_loader *all;
    check(amp_loader_create(amp, &all, &first));
    check(amp_loader_info_get(all, &info));
    amp_loader_destroy(all);
    first.last = last.first = info.tokens / 10 * 9;
    check(amp_loader_create(amp, train, &first));
    check(amp_loader_create(amp, valid, &last));
}

static double validate(const gpt *g, amp_tape *tape, amp_loader *loader) {
    amp_autocast_desc inference = {.mode = AMP_MODE_INFERENCE};
    double sum = 0;
    amp_batch batch;
    float loss;
    int i;
    for (i = 0; i < 8; i++) {
        check(amp_loader_next(loader, &batch));
        check(amp_tape_begin(tape, &inference));
        amp_value value = amp_tape_cross_entropy(tape, gpt_forward(g, tape, batch.inputs, BATCH, SEQ), batch.targets,
                                                 NULL);
        check(amp_tape_finish(tape));
        check(amp_tape_read(tape, value, &loss, 1));
        sum += (double)loss;
    }
    return sum / i;
}

/* ---- Training */

static void train(gpt *g, amp_context *amp, amp_tape *tape, const char *path, int64_t steps) {
    amp_schedule schedule = {.kind = AMP_SCHEDULE_COSINE, .lr = 3e-3, .min_lr = 3e-4, .warmup = steps / 10,
                             .steps = steps};
    amp_optimizer_desc adamw = {.weight_decay = 0.1, .beta2 = 0.95, .clip_norm = 1};
    amp_loader *text, *held;
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    amp_choice choice;
    amp_batch batch;
    double lr;
    float loss;
    int64_t step;
    check(amp_query_choice(amp, &choice));
    amp_scaler_desc scaling = {.disable = !choice.scaler};      /* fp16 needs one */
    check(amp_model_params(g->parameters, &adamw.params, &adamw.n_params));
    check(amp_optimizer_create(amp, &optimizer, &adamw));
    check(amp_scaler_create(amp, &scaler, &scaling));
    open_text(amp, path, &text, &held);
    printf("%s: %s\n", amp_dtype_name(choice.dtype), choice.reason);

    for (step = 1; step <= steps; step++) {
        check(amp_schedule_lr(&schedule, step - 1, &lr));
        check(amp_optimizer_set_lr(optimizer, lr));
        check(amp_loader_next(text, &batch));                                               /* next */
        check(amp_tape_begin(tape, NULL));                                                  /* begin */
        amp_value logits = gpt_forward(g, tape, batch.inputs, BATCH, SEQ);                  /* forward */
        amp_value value = amp_tape_cross_entropy(tape, logits, batch.targets, NULL);        /* loss */
        check(amp_tape_forward(tape, value, amp_scaler_scale_ptr(scaler)));                 /* end */
        check(amp_tape_backward(tape, value, NULL));                                        /* backward */
        check(amp_step(optimizer, scaler));                                                 /* step */
        check(amp_tape_read(tape, value, &loss, 1));
        if (step % 100 == 0 || step == steps)
            printf("step %lld: loss %.3f, of text not seen %.3f\n", (long long)step, (double)loss,
                   validate(g, tape, held));
    }
    amp_loader_destroy(text); amp_loader_destroy(held);
    amp_scaler_destroy(scaler); amp_optimizer_destroy(optimizer);
}

/* ---- The sample: byte after byte, each drawn from the softmax of the last logits at temperature 0.8 */

static void sample(const gpt *g, amp_context *amp, amp_tape *tape) {
    static float logits[VOCAB];
    amp_autocast_desc inference = {.mode = AMP_MODE_INFERENCE};
    int32_t text[SEQ + SAMPLE] = {'\n'};
    void *ids;
    int n, k;
    check(amp_alloc(amp, &ids, SEQ * (int64_t)sizeof(int32_t)));
    for (n = 1; n < SAMPLE; n++) {
        int seq = n < SEQ ? n : SEQ;
        float most = -1e30f, sum = 0, at;
        check(amp_copy(amp, ids, text + n - seq, seq * (int64_t)sizeof(int32_t), AMP_COPY_TO_DEVICE));
        check(amp_tape_begin(tape, &inference));
        amp_value y = gpt_forward(g, tape, (const int32_t *)ids, 1, seq);
        y = amp_tape_split(tape, y, 1, seq - 1, 1);
        check(amp_tape_finish(tape));
        check(amp_tape_read(tape, y, logits, VOCAB));
        for (k = 0; k < VOCAB; k++) if (logits[k] > most) most = logits[k];
        for (k = 0; k < VOCAB; k++) sum += logits[k] = expf((logits[k] - most) / 0.8f);
        if (!(sum >= 1)) { fprintf(stderr, "the model's output is NaN or infinite\n"); exit(1); }
        at = amp_random_uniform(7, (uint64_t)n) * sum;
        for (k = 0; k < VOCAB - 1 && at >= logits[k]; k++) at -= logits[k];
        text[n] = k;
        putchar(k >= ' ' && k < 127 ? k : k == '\n' ? '\n' : '?');
    }
    putchar('\n');
    amp_free(amp, ids);
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "amp.h";
    char *end = "";
    int64_t steps = argc > 3 ? strtoll(argv[3], &end, 10) : 400;
    amp_desc desc = {0};
    amp_context *amp;
    amp_tape *tape;
    gpt model;
    if (steps < 1 || steps > 1000000000 || *end != 0)
        return fprintf(stderr, "steps: \"%s\" must be a number from 1 to 1000000000\n", argv[3]), 2;
    check(amp_dtype_parse(argc > 2 ? argv[2] : "auto", &desc.dtype));
    check(amp_open(&amp, &desc));
    check(amp_tape_create(amp, &tape, NULL));
    gpt_open(&model, amp);
    train(&model, amp, tape, path, steps);
    sample(&model, amp, tape);
    amp_tape_destroy(tape);
    amp_model_destroy(model.parameters);
    amp_close(amp);
    return fflush(stdout) != 0 || ferror(stdout);
}
