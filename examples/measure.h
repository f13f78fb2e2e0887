/* measure.h - shared by amp_check and amp_bench: a GPT-2 that trains on made-up tokens, and order statistics.
 */
#ifndef MEASURE_H
#define MEASURE_H

#include "encoder_files.h"
#include "gpt.h"

/* ---- Order statistics */

static inline int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts values and returns the one below which `part` of them lie: 0.5 is the median. */
static inline double quantile(double *values, int64_t n, double part) {
    if (n < 1) return 0;
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return values[(int64_t)(part * (double)(n - 1) + 0.5)];
}

/* ---- The precisions, in the order of all tables */

enum { PRECISIONS = 5 };
static const amp_dtype precisions[PRECISIONS] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16, AMP_FP8};

static inline int precision_place(amp_dtype dtype) {
    int i;
    for (i = 0; i < PRECISIONS; i++) if (precisions[i] == dtype) return i;
    return 0;
}

/* The storage dtype of a precision. */
static inline amp_dtype storage_of(amp_dtype dtype) {
    return dtype == AMP_TF32 ? AMP_F32 : dtype == AMP_FP8 ? AMP_BF16 : dtype;
}

/* The dtype that regions compute in now. */
static inline amp_dtype dtype_now(const amp_context *amp) {
    amp_choice choice;
    memset(&choice, 0, sizeof choice);
    return amp_query_choice(amp, &choice) == AMP_OK ? choice.dtype : AMP_F32;
}

/* 1 if the context's device is the CPU. */
static inline int on_cpu(const amp_context *amp) {
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    return amp_query(amp, &desc) != AMP_OK || desc.backend->host_visible;
}

/* ---- Tokens that can be learned: each follows from the one before, except for a jump at every 64th */

static inline int32_t made_token(int64_t i, int64_t vocab) { return (int32_t)((i * 7 + i / 64 * 13) % vocab); }

/* The file of tokens, while there is one.  A signal that ends the program removes it too. */
static char tokens_path[PATH_MAX];
static inline void tokens_file_remove(void) {
    if (tokens_path[0] != 0) unlink(tokens_path);
    tokens_path[0] = 0;
}
static inline void tokens_file_interrupted(int signal_number) {
    if (tokens_path[0] != 0) unlink(tokens_path);
    _exit(128 + signal_number);
}

/* Makes the file: n raw 16-bit tokens in the temporary folder. */
static inline amp_result tokens_file_make(int64_t n, int64_t vocab) {
    const char *folder = getenv("TMPDIR");
    uint16_t piece[4096];
    int64_t i = 0;
    FILE *file;
    int fd, failed = 0;
    snprintf(tokens_path, sizeof tokens_path, "%.4000s/amp_tokens_XXXXXX",
             folder != NULL && *folder != 0 ? folder : "/tmp");
    fd = mkstemp(tokens_path);
    file = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (file == NULL) {
        amp_result result = ex_fail(AMP_ERR_OPEN, "%.200s: %s", tokens_path, strerror(errno));
        tokens_path[0] = 0;
        return result;
    }
    ex_on_ending_signals(tokens_file_interrupted, 0);
    while (i < n && !failed) {
        size_t k = 0;
        for (; k < sizeof piece / sizeof *piece && i < n; i++) piece[k++] = (uint16_t)made_token(i, vocab);
        failed = fwrite(piece, sizeof *piece, k, file) != k;
    }
    if (fclose(file) != 0 || failed) {
        amp_result result = ex_fail(AMP_ERR_WRITE, "%.200s: %s", tokens_path, strerror(errno));
        tokens_file_remove();
        return result;
    }
    return AMP_OK;
}

/* ---- A model that trains: a GPT-2 (decoder) or a BERT (encoder) with its optimizer, and a loss scaler */

typedef struct workload_desc {
    int encoder;                    /* 0: a decoder */
    int64_t layers, channels, heads, vocab, batch, seq;
    amp_dtype activations;          /* their widest storage */
    int recompute, fused_loss;      /* decoder */
    int scaler;                     /* 1: scales losses in every precision, so that gradients can be compared */
    int32_t accumulation;           /* micro-batches per optimizer step; 0: 1 */
    int inference;                  /* 1: no gradients, no optimizer */
} workload_desc;

typedef struct workload {
    workload_desc desc;
    amp_context *amp;
    gpt gpt;
    encoder bert;
    amp_param *params; int64_t n_params;
    amp_optimizer *optimizer;
    amp_scaler *scaler;             /* NULL: none */
    int32_t *tokens;                /* device: a batch, one token more; an encoder's lengths and labels after that */
    float *loss;                    /* device */
} workload;

static inline void workload_close(workload *w) {
    if (w->amp == NULL) return;
    amp_optimizer_destroy(w->optimizer);
    amp_scaler_destroy(w->scaler);
    amp_free(w->amp, w->tokens);
    amp_free(w->amp, w->loss);
    gpt_destroy(&w->gpt);
    encoder_destroy(&w->bert);
    memset(w, 0, sizeof *w);
}

/* A batch of made tokens; lengths of an eighth less from sequence to sequence, down to half; labels in turn. */
static inline amp_result workload_tokens(workload *w) {
    int64_t batch = w->desc.batch, seq = w->desc.seq, tokens = batch * seq + 1, n = tokens + 2 * batch, i;
    int32_t *host = (int32_t *)malloc((size_t)n * sizeof *host);
    void *memory = NULL;
    amp_result result = host != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for a batch");
    for (i = 0; i < tokens && result == AMP_OK; i++) host[i] = made_token(i, w->desc.vocab);
    for (i = 0; i < batch && result == AMP_OK; i++) {
        host[tokens + i] = (int32_t)(seq - seq * (i % 5) / 8);
        host[tokens + batch + i] = (int32_t)(i % 2);
    }
    if (result == AMP_OK) result = amp_alloc(w->amp, &memory, n * (int64_t)sizeof *host);
    if (result == AMP_OK) result = amp_copy(w->amp, memory, host, n * (int64_t)sizeof *host, AMP_COPY_TO_DEVICE);
    if (result == AMP_OK) result = amp_sync(w->amp);
    free(host);
    w->tokens = (int32_t *)memory;
    return result;
}

static inline amp_result workload_decoder(workload *w) {
    const workload_desc *d = &w->desc;
    gpt_config c;
    memset(&c, 0, sizeof c);
    c.vocab = d->vocab;
    c.positions = c.seq = d->seq;
    c.channels = d->channels;
    c.heads = d->heads;
    c.layers = d->layers;
    c.batch = d->batch; c.activations = d->activations; c.recompute = d->recompute; c.fused_loss = d->fused_loss;
    EX_TRY(gpt_create(&w->gpt, w->amp, &c));
    w->params = w->gpt.params;
    w->n_params = w->gpt.n_params;
    return gpt_init(&w->gpt, 1);
}

static inline amp_result workload_encoder(workload *w) {
    const workload_desc *d = &w->desc;
    encoder_config c;
    memset(&c, 0, sizeof c);
    c.vocab = d->vocab; c.positions = c.seq = d->seq; c.hidden = d->channels; c.heads = d->heads; c.layers = d->layers;
    c.intermediate = 4 * d->channels;
    c.types = c.classes = 2;
    c.batch = d->batch; c.activations = d->activations;
    EX_TRY(encoder_create(&w->bert, w->amp, &c));
    w->params = w->bert.params;
    w->n_params = w->bert.n_params;
    return encoder_init(&w->bert, 1);
}

/* The batch of an encoder; *labels: its classes. */
static inline encoder_input workload_input(const workload *w, const int32_t *inputs, const int32_t **labels) {
    encoder_input in;
    memset(&in, 0, sizeof in);
    in.ids = inputs;
    in.lengths = w->tokens + w->desc.batch * w->desc.seq + 1;
    in.batch = w->desc.batch; in.seq = w->desc.seq;
    *labels = in.lengths + in.batch;
    return in;
}

/* Gives the gradients' memory back; what is left to a tape is the forward. */
static inline amp_result workload_freeze(workload *w) {
    model_params *own = w->desc.encoder ? &w->bert.own : &w->gpt.own;
    const int32_t *labels;
    encoder_input in = workload_input(w, w->tokens, &labels);
    int64_t i;
    amp_free(w->amp, own->grads);
    own->grads = NULL;
    own->grads_bytes = 0;
    for (i = 0; i < w->n_params; i++) memset(&w->params[i].grad, 0, sizeof w->params[i].grad);
    if (w->desc.encoder) {
        EX_TRY(model_tape_begin(w->bert.tape, 0));
        (void)amp_tape_cross_entropy(w->bert.tape, encoder_record(&w->bert, &in), labels, NULL);
        return amp_tape_plan(w->bert.tape, 0, &w->bert.memory_bytes);
    }
    EX_TRY(model_tape_begin(w->gpt.tape, 0));
    gpt_record(&w->gpt, w->tokens, w->tokens + 1, w->desc.batch, w->desc.seq);
    return amp_tape_plan(w->gpt.tape, 0, &w->gpt.memory_bytes);
}

static inline amp_result workload_training(workload *w) {
    amp_optimizer_desc optimizer;
    amp_scaler_desc scaler;
    memset(&optimizer, 0, sizeof optimizer);
    memset(&scaler, 0, sizeof scaler);
    optimizer.params = w->params;
    optimizer.n_params = w->n_params;
    optimizer.lr = 1e-3;
    optimizer.weight_decay = 0.1;
    optimizer.clip_norm = 1;
    optimizer.accumulation = w->desc.accumulation;
    scaler.init_scale = 1024;       /* nothing of this size overflows: every step is applied */
    EX_TRY(amp_optimizer_create(w->amp, &w->optimizer, &optimizer));
    return w->desc.scaler ? amp_scaler_create(w->amp, &w->scaler, &scaler) : AMP_OK;
}

/* Must be closed even after a failure. */
static inline amp_result workload_open(workload *w, amp_context *amp, const workload_desc *desc) {
    void *loss;
    memset(w, 0, sizeof *w);
    w->desc = *desc;
    w->amp = amp;
    EX_TRY(amp_alloc(amp, &loss, (int64_t)sizeof(float)));
    w->loss = (float *)loss;
    EX_TRY(desc->encoder ? workload_encoder(w) : workload_decoder(w));
    EX_TRY(workload_tokens(w));
    return desc->inference ? workload_freeze(w) : workload_training(w);
}

/* All of a pass of the encoder: forward and loss, and with backward all gradients. */
static inline amp_result workload_encode(workload *w, const int32_t *inputs, int backward) {
    const int32_t *labels;
    encoder_input in = workload_input(w, inputs, &labels);
    EX_TRY(encoder_forward(&w->bert, &in, labels, amp_scaler_scale_ptr(w->scaler), backward));
    if (backward) EX_TRY(encoder_backward(&w->bert));
    return amp_copy(w->amp, w->loss, w->bert.loss_value, (int64_t)sizeof *w->loss, AMP_COPY_ON_DEVICE);
}

/* Forward and loss; with backward all gradients.  inputs NULL: the workload's own batch. */
static inline amp_result workload_pass(workload *w, const int32_t *inputs, const int32_t *targets, int backward) {
    amp_batch batch;
    if (inputs == NULL) { inputs = w->tokens; targets = w->tokens + 1; }
    w->bert.config.activations = w->gpt.config.activations = storage_of(dtype_now(w->amp));
    if (w->desc.encoder) return workload_encode(w, inputs, backward);
    memset(&batch, 0, sizeof batch);
    batch.inputs = inputs; batch.targets = targets;
    batch.batch = w->desc.batch; batch.seq = w->desc.seq;
    EX_TRY(gpt_forward_loss(&w->gpt, &batch, amp_scaler_scale_ptr(w->scaler), backward));
    if (backward) EX_TRY(gpt_backward(&w->gpt));
    return amp_copy(w->amp, w->loss, w->gpt.loss_value, (int64_t)sizeof *w->loss, AMP_COPY_ON_DEVICE);
}

/* Steps after the last of `accumulation` calls. */
static inline amp_result workload_step(workload *w, const int32_t *inputs, const int32_t *targets) {
    EX_TRY(workload_pass(w, inputs, targets, 1));
    return amp_step(w->optimizer, w->scaler);
}

static inline amp_result workload_loss(workload *w, float *out) {
    EX_TRY(amp_copy(w->amp, out, w->loss, (int64_t)sizeof *out, AMP_COPY_TO_HOST));
    return amp_sync(w->amp);
}

#endif
