/* measure.h - what amp_check and amp_bench share: a GPT-2 that trains on tokens made here, and order statistics.
 *
 * Include after common.h. */
#ifndef MEASURE_H
#define MEASURE_H

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

/* ---- The four precisions, in the order of all tables */

enum { PRECISIONS = 4 };
static const amp_dtype precisions[PRECISIONS] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};

static inline int precision_place(amp_dtype dtype) {
    int i;
    for (i = 0; i < PRECISIONS; i++) if (precisions[i] == dtype) return i;
    return 0;
}

/* What values of a precision are kept in. */
static inline amp_dtype storage_of(amp_dtype dtype) { return dtype == AMP_TF32 ? AMP_F32 : dtype; }

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

/* ---- Tokens that can be learned: each one follows from the one before, but for a jump at every 64th */

static inline int32_t made_token(int64_t i, int64_t vocab) { return (int32_t)((i * 7 + i / 64 * 13) % vocab); }

/* A file of n raw 16-bit tokens in the temporary folder; path gets its name.  The caller removes it. */
static inline amp_result tokens_file_make(char *path, size_t size, int64_t n, int64_t vocab) {
    const char *folder = getenv("TMPDIR");
    uint16_t piece[4096];
    int64_t i = 0;
    FILE *file;
    int fd, failed = 0;
    snprintf(path, size, "%.4000s/amp_tokens_XXXXXX", folder != NULL && *folder != 0 ? folder : "/tmp");
    fd = mkstemp(path);
    file = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (file == NULL) return example_fail(AMP_ERR_OPEN, "%.200s: %s", path, strerror(errno));
    while (i < n && !failed) {
        size_t k = 0;
        for (; k < sizeof piece / sizeof *piece && i < n; i++) piece[k++] = (uint16_t)made_token(i, vocab);
        failed = fwrite(piece, sizeof *piece, k, file) != k;
    }
    if (fclose(file) != 0 || failed) {
        amp_result result = example_fail(AMP_ERR_WRITE, "%.200s: %s", path, strerror(errno));
        unlink(path);
        return result;
    }
    return AMP_OK;
}

/* ---- A GPT-2 with its optimizer, and a scaler for fp16 */

typedef struct workload {
    amp_context *amp;
    gpt model;
    amp_optimizer *optimizer;
    amp_scaler *scaler;             /* NULL: none */
    int32_t *tokens;                /* device: a batch, and one token more */
} workload;

static inline void workload_close(workload *w) {
    if (w->amp == NULL) return;
    amp_optimizer_destroy(w->optimizer);
    amp_scaler_destroy(w->scaler);
    amp_free(w->amp, w->tokens);
    gpt_destroy(&w->model);
    memset(w, 0, sizeof *w);
}

/* A batch of made tokens on the device. */
static inline amp_result tokens_place(amp_context *amp, int64_t n, int64_t vocab, int32_t **out) {
    int32_t *host = (int32_t *)malloc((size_t)n * sizeof *host);
    void *memory = NULL;
    int64_t i;
    amp_result result = host != NULL ? AMP_OK : example_fail(AMP_ERR_MEMORY, "no memory for a batch");
    for (i = 0; i < n && result == AMP_OK; i++) host[i] = made_token(i, vocab);
    if (result == AMP_OK) result = amp_alloc(amp, &memory, n * (int64_t)sizeof *host);
    if (result == AMP_OK) result = amp_copy(amp, memory, host, n * (int64_t)sizeof *host, AMP_COPY_TO_DEVICE);
    if (result == AMP_OK) result = amp_sync(amp);
    free(host);
    *out = (int32_t *)memory;
    return result;
}

static inline amp_result optimizer_open(amp_context *amp, amp_param *params, int64_t n, amp_optimizer **out) {
    amp_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.params = params;
    desc.n_params = n;
    desc.lr = 1e-3;
    desc.weight_decay = 0.1;
    desc.clip_norm = 1;
    return amp_optimizer_create(amp, out, &desc);
}

/* with_scaler 1: with one, which steps in fp16 use. */
static inline amp_result workload_open(workload *w, amp_context *amp, const gpt_config *shape, int with_scaler) {
    amp_scaler_desc scaler;
    memset(w, 0, sizeof *w);
    memset(&scaler, 0, sizeof scaler);
    w->amp = amp;
    scaler.init_scale = 1024;       /* nothing of this size overflows: every step is applied */
    TRY(gpt_create(&w->model, amp, shape));
    TRY(gpt_init(&w->model, 1));
    TRY(optimizer_open(amp, w->model.params, w->model.n_params, &w->optimizer));
    if (with_scaler) TRY(amp_scaler_create(amp, &w->scaler, &scaler));
    return tokens_place(amp, shape->batch * shape->seq + 1, shape->vocab, &w->tokens);
}

/* The scaler of a step that runs now. */
static inline amp_scaler *workload_scaler(const workload *w) { return dtype_now(w->amp) == AMP_F16 ? w->scaler : NULL; }

/* Forward and loss in a region; with backward all gradients. */
static inline amp_result workload_pass(workload *w, const int32_t *inputs, const int32_t *targets, int backward) {
    const float *seed = amp_scaler_seed(workload_scaler(w));
    amp_autocast_desc region;
    amp_result result;
    memset(&region, 0, sizeof region);
    region.mode = backward ? AMP_MODE_TRAINING : AMP_MODE_INFERENCE;
    TRY(amp_autocast_begin(w->amp, &region));
    result = gpt_forward(&w->model, inputs, w->model.config.batch, w->model.config.seq);
    if (result == AMP_OK) result = gpt_loss(&w->model, targets, backward, seed);
    TRY(amp_autocast_end(w->amp));
    TRY(result);
    return backward ? gpt_backward(&w->model) : AMP_OK;
}

static inline amp_result workload_step(workload *w, const int32_t *inputs, const int32_t *targets) {
    TRY(workload_pass(w, inputs, targets, 1));
    return amp_step(w->optimizer, workload_scaler(w));
}

#endif
