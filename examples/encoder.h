/* encoder.h - BERT and its family on amp.h's tape, as Hugging Face's ...ForSequenceClassification of BERT, RoBERTa and
 * XLM-R, ELECTRA, Longformer and DeBERTa v2 and v3: word, position and token-type embeddings, LayerNorm, post-norm
 * layers, padding hidden by lengths, and a head of two linear layers over the first token.  Queries, keys and values
 * are one linear layer, stored in three pieces in files (encoder_files.h); DeBERTa's are three.  The stream between
 * layers is fp32; everything else is stored in `activations`.  Dropout acts on embeddings, branches and the head's
 * inner layer, not on attention's probabilities. */
#ifndef EXAMPLES_ENCODER_H
#define EXAMPLES_ENCODER_H

#include "deberta.h"

typedef enum encoder_family {
    ENCODER_BERT = 0,
    ENCODER_ROBERTA = 1,            /* and XLM-R */
    ENCODER_ELECTRA = 2,            /* the embeddings may be narrower than the layers */
    ENCODER_LONGFORMER = 3,         /* keys in a window; the first token sees all and is seen by all */
    ENCODER_DEBERTA = 4             /* v2 and v3: attention by distance; no positions or types among the embeddings */
} encoder_family;

/* first: the position of the first token; files have rows before it, which no token reads.
   dense and out: the head's layers; act: dense's activation. */
typedef struct encoder_kind {
    const char *name, *prefix, *dense, *out;
    int64_t first;
    amp_activation_kind act;
} encoder_kind;
static const encoder_kind encoder_kinds[] = {
    {"bert", "bert.", "bert.pooler.dense", "classifier", 0, AMP_ACT_TANH},
    {"roberta", "roberta.", "classifier.dense", "classifier.out_proj", 2, AMP_ACT_TANH},
    {"electra", "electra.", "classifier.dense", "classifier.out_proj", 0, AMP_ACT_GELU_ERF},
    {"longformer", "longformer.", "classifier.dense", "classifier.out_proj", 2, AMP_ACT_TANH},
    {"deberta-v2", "deberta.", "pooler.dense", "classifier", 0, AMP_ACT_GELU_ERF},
};
enum { ENCODER_KINDS = 5, ENCODER_WINDOW = 1 << 29, ENCODER_HEAD = 4 };   /* HEAD: parameters of the head */

typedef struct encoder_config {
    encoder_family family;
    int64_t vocab, positions, types, layers, heads, hidden, intermediate, classes;
    int64_t embedding;              /* width of the embeddings; 0: hidden */
    int64_t window;                 /* Longformer: keys seen on each side, half of Hugging Face's attention_window */
    const int64_t *windows;         /* the same of each layer; NULL: window in all */
    deberta_distances distances;    /* DeBERTa; .most 0: positions */
    int64_t batch, seq;             /* the largest for forward */
    amp_dtype activations;          /* F32, F16 or BF16; 0: F32 */
    float dropout;                  /* 0: none */
    float eps;                      /* of LayerNorm; 0: 1e-12 */
    amp_activation_kind act;        /* inside the layers; 0: AMP_ACT_GELU_ERF */
} encoder_config;

/* A batch in device memory: ids [batch, seq], lengths [batch]: tokens before the padding; types NULL: all 0. */
typedef struct encoder_input {
    const int32_t *ids, *types, *lengths; int64_t batch, seq;
    float weight;                   /* of the loss, and so of its gradients; 0: 1 */
} encoder_input;

typedef struct encoder {
    encoder_config config;          /* windows: as many as layers */
    char *json;                     /* the config.json that it came with; NULL: none */
    model_params own; amp_param *params; int64_t n_params;    /* the same, in the order of encoder_describe */
    amp_context *amp; amp_tape *tape;
    int64_t memory_bytes;                   /* of the tape, in a training step of config.batch x config.seq */
    int64_t *windows;                       /* config's */
    int32_t *no_types, *distances;          /* device: zeros; DeBERTa: rows of its table */
    amp_value tables[DEBERTA_SIDES];        /* DeBERTa: of the last pass, as are: */
    amp_value logits, loss;
    float *loss_value;                      /* where that loss lies */
    amp_optimizer *optimizer;               /* as a gpt's */
} encoder;

/* ---- Recording: [batch, seq, ...]; p: a layer's weight and bias, and what follows */

/* The tape, whose next results are stored in this dtype. */
static inline amp_tape *encoder_tape(const encoder *e, amp_dtype stored) {
    amp_tape_store(e->tape, stored);
    return e->tape;
}
static inline amp_value encoder_linear(const encoder *e, amp_value x, amp_param *p, amp_activation_kind act) {
    return amp_tape_linear(encoder_tape(e, e->config.activations), x, p, p + 1, act);
}
static inline amp_value encoder_dropout(const encoder *e, amp_value x) {
    return e->config.dropout > 0 ? amp_tape_dropout(e->tape, x, e->config.dropout) : x;
}
static inline amp_value encoder_norm(const encoder *e, amp_value x, amp_param *p) {
    return amp_tape_layernorm(encoder_tape(e, AMP_F32), x, p, p + 1, e->config.eps);
}
/* The norm of the stream with a branch, the result of a linear layer, added to it.  p: that layer, the norm. */
static inline amp_value encoder_join(const encoder *e, amp_value stream, amp_value x, amp_param *p) {
    amp_value branch = encoder_dropout(e, encoder_linear(e, x, p, AMP_ACT_NONE));
    return encoder_norm(e, amp_tape_add(encoder_tape(e, AMP_F32), branch, stream), p + 2);
}

/* Longformer's first token sees all tokens by its own projections. */
static inline amp_value encoder_global(const encoder *e, amp_value x, amp_param *p, const amp_attention_op *seen) {
    int64_t C = e->config.hidden;
    amp_value q = encoder_linear(e, amp_tape_split(e->tape, x, 1, 0, 1), p, AMP_ACT_NONE);
    amp_value kv = encoder_linear(e, x, p + 2, AMP_ACT_NONE), k = amp_tape_split(e->tape, kv, 2, 0, C);
    return amp_tape_attention(e->tape, q, k, amp_tape_split(e->tape, kv, 2, C, C), e->config.heads, seen);
}

static inline amp_value encoder_attention(const encoder *e, amp_value x, amp_param *p, int64_t layer,
                                          const encoder_input *in) {
    const encoder_config *c = &e->config;
    amp_value qkv[3], first = 0, y;
    amp_attention_op seen;
    const deberta_shape shape = {in->batch, in->seq, c->heads, c->hidden / c->heads};
    int64_t i;
    if (c->family == ENCODER_DEBERTA)
        return deberta_attention(encoder_tape(e, c->activations), x, p, e->tables, &shape, in->lengths);
    memset(&seen, 0, sizeof seen);
    seen.mask.lengths = in->lengths;
    if (c->family == ENCODER_LONGFORMER) {
        first = encoder_global(e, x, p + 2, &seen);
        seen.mask.kind = AMP_MASK_WINDOW_GLOBAL;
        seen.mask.bidirectional = 1;
        seen.mask.window = e->windows[layer] + 1;       /* a key counts itself: |i - j| < window + 1 */
        seen.mask.global = 1;
    }
    y = encoder_linear(e, x, p, AMP_ACT_NONE);
    for (i = 0; i < 3; i++) qkv[i] = amp_tape_split(e->tape, y, 2, i * c->hidden, c->hidden);
    y = amp_tape_attention(e->tape, qkv[0], qkv[1], qkv[2], c->heads, &seen);
    if (first == 0 || in->seq == 1) return first != 0 ? first : y;
    return amp_tape_concat(e->tape, first, amp_tape_split(e->tape, y, 1, 1, in->seq - 1), 1);
}

/* *params: moves on to those of the next layer. */
static inline amp_value encoder_layer(const encoder *e, amp_value x, amp_param **params, int64_t layer,
                                      const encoder_input *in) {
    amp_activation_kind act = e->config.act;
    int separate = e->config.family == ENCODER_LONGFORMER || e->config.family == ENCODER_DEBERTA;
    amp_param *p = *params + (separate ? 6 : 2);        /* what follows attention's own */
    amp_value h = encoder_attention(e, x, *params, layer, in);
    x = encoder_join(e, x, h, p);
    h = encoder_linear(e, x, p + 4, model_is_fused(act) ? act : AMP_ACT_NONE);
    if (!model_is_fused(act)) h = amp_tape_activation(e->tape, h, NULL, act);
    *params = p + 10;
    return encoder_join(e, x, h, p + 6);
}

/* What the first layer gets. */
static inline amp_value encoder_embed(encoder *e, const encoder_input *in, amp_param **params) {
    const encoder_config *c = &e->config;
    amp_tensor ids = amp_tensor2((void *)(uintptr_t)in->ids, AMP_I32, in->batch, in->seq), types = ids;
    int deberta = c->family == ENCODER_DEBERTA;
    amp_param *p = *params, *norm = p + (deberta ? 1 : 3);
    amp_value x = amp_tape_embedding(encoder_tape(e, AMP_F32), &ids, p, deberta ? NULL : p + 1);
    types.data = in->types != NULL ? (void *)(uintptr_t)in->types : e->no_types;
    if (!deberta) x = amp_tape_add(e->tape, x, amp_tape_embedding(e->tape, &types, p + 2, NULL));
    x = encoder_dropout(e, encoder_norm(e, x, norm));
    *params = norm + (deberta ? 5 : c->embedding != c->hidden ? 4 : 2);
    if (deberta) deberta_tables(e->tape, e->distances, c->seq, in->seq, norm + 2, norm + 3, c->eps, e->tables);
    return c->embedding == c->hidden ? x : amp_tape_linear(e->tape, x, norm + 2, norm + 3, AMP_ACT_NONE);
}

/* The logits [batch, classes]. */
static inline amp_value encoder_record(encoder *e, const encoder_input *in) {
    const encoder_config *c = &e->config;
    amp_param *p = e->params;
    amp_value x = encoder_embed(e, in, &p);
    const int64_t shape[2] = {in->batch, c->classes};
    int64_t layer;
    for (layer = 0; layer < c->layers; layer++) x = encoder_layer(e, x, &p, layer, in);
    x = encoder_linear(e, amp_tape_split(e->tape, x, 1, 0, 1), p, AMP_ACT_NONE);
    x = encoder_dropout(e, amp_tape_activation(e->tape, x, NULL, encoder_kinds[c->family].act));
    x = amp_tape_reshape(e->tape, encoder_linear(e, x, p + 2, AMP_ACT_NONE), shape, 2);
    return e->logits = amp_tape_keep(e->tape, x);
}

/* ---- The model */

static inline void encoder_destroy(encoder *e) {
    amp_tape_destroy(e->tape);
    if (e->amp != NULL) { amp_free(e->amp, e->no_types); amp_free(e->amp, e->distances); }
    model_params_free(&e->own);
    free(e->windows); free(e->json);
    memset(e, 0, sizeof *e);
}

/* <name>.weight [rows, cols] and <name>.bias [rows] of a layer; layer -1: of none.  prefix "": the name stands for
   itself. */
static inline void encoder_add(encoder *e, const char *prefix, int64_t layer, const char *name, int64_t rows,
                               int64_t cols) {
    static const char *const last[] = {"weight", "bias"};
    char before[64];
    int norm = strstr(name, "LayerNorm") != NULL, i;
    snprintf(before, sizeof before, layer < 0 ? "%s" : "%sencoder.layer.%lld.", prefix, (long long)layer);
    for (i = 0; i < 2; i++) model_params_add(&e->own, norm, rows, i == 0 ? cols : 0, "%s%s.%s", before, name, last[i]);
}

static inline void encoder_add_table(encoder *e, const char *prefix, const char *name, int64_t rows, int64_t cols) {
    model_params_add(&e->own, 0, rows, cols, "%s%s.weight", prefix, name)->embedding = 1;
}

/* What layers have, by family: rows and cols in widths of the layer; INNER: c->intermediate. */
enum { INNER = -1, ALL_FAMILIES = 31, OF_LONGFORMER = 1 << ENCODER_LONGFORMER, OF_DEBERTA = 1 << ENCODER_DEBERTA };
static const struct encoder_part { const char *name; int families, rows, cols; } encoder_parts[] = {
    {"attention.self.qkv", ALL_FAMILIES & ~OF_DEBERTA, 3, 1}, {"attention.self.query_proj", OF_DEBERTA, 1, 1},
    {"attention.self.key_proj", OF_DEBERTA, 1, 1}, {"attention.self.value_proj", OF_DEBERTA, 1, 1},
    {"attention.self.query_global", OF_LONGFORMER, 1, 1}, {"attention.self.kv_global", OF_LONGFORMER, 2, 1},
    {"attention.output.dense", ALL_FAMILIES, 1, 1}, {"attention.output.LayerNorm", ALL_FAMILIES, 1, 0},
    {"intermediate.dense", ALL_FAMILIES, INNER, 1}, {"output.dense", ALL_FAMILIES, 1, INNER},
    {"output.LayerNorm", ALL_FAMILIES, 1, 0}};

static inline void encoder_describe(encoder *e) {
    const encoder_config *c = &e->config;
    const encoder_kind *kind = &encoder_kinds[c->family];
    const char *prefix = kind->prefix;
    const struct encoder_part *part;
    int64_t layer, C = c->hidden, E = c->embedding, I = c->intermediate;
    encoder_add_table(e, prefix, "embeddings.word_embeddings", c->vocab, E);
    if (c->family != ENCODER_DEBERTA) {
        encoder_add_table(e, prefix, "embeddings.position_embeddings", c->positions - kind->first, E);
        encoder_add_table(e, prefix, "embeddings.token_type_embeddings", c->types, E);
    }
    encoder_add(e, prefix, -1, "embeddings.LayerNorm", E, 0);
    if (E != C) encoder_add(e, prefix, -1, "embeddings_project", C, E);
    if (c->family == ENCODER_DEBERTA) deberta_describe(&e->own, prefix, &c->distances, C);
    for (layer = 0; layer < c->layers; layer++)
        for (part = encoder_parts; part < encoder_parts + sizeof encoder_parts / sizeof *encoder_parts; part++)
            if (part->families >> c->family & 1)
                encoder_add(e, prefix, layer, part->name, part->rows < 0 ? I : part->rows * C,
                            part->cols < 0 ? I : part->cols * C);
    encoder_add(e, "", -1, kind->dense, C, C);
    encoder_add(e, "", -1, kind->out, c->classes, C);
}

static inline amp_result encoder_check_config(const encoder_config *c) {
    const int64_t most = (int64_t)1 << 31, first = encoder_kinds[c->family].first;
    int deberta = c->family == ENCODER_DEBERTA;
    if (c->vocab < 1 || c->positions <= first || (c->types < 1) != deberta || c->layers < 1 || c->heads < 1 ||
        c->hidden < 1 || c->intermediate < 1 || c->classes < 1 || c->embedding < 0 || c->batch < 1 || c->seq < 1 ||
        c->vocab > most || c->positions > most || c->types > 1 << 20 || c->layers > 10000 || c->hidden > 1 << 20 ||
        c->classes > 1 << 20 || c->intermediate > 1 << 22 || c->embedding > 1 << 20 || c->batch > most / c->seq ||
        (deberta && !deberta_is_valid(&c->distances)))
        return ex_fail(AMP_ERR_RANGE, "a dimension of the model is outside its range");
    if (c->hidden % c->heads != 0 || c->seq > c->positions - first ||
        (c->embedding != 0 && c->embedding != c->hidden && c->family != ENCODER_ELECTRA))
        return ex_fail(AMP_ERR_SHAPE, "%lld heads of %lld channels, embeddings of %lld, %lld tokens of %lld: they "
                            "do not fit", (long long)c->heads, (long long)c->hidden, (long long)c->embedding,
                            (long long)c->seq, (long long)(c->positions - first));
    return AMP_OK;
}

/* What is not a parameter: windows, zeros, rows of distances, and the tape, with the memory of a step planned. */
static inline amp_result encoder_prepare(encoder *e, const int64_t *windows) {
    const encoder_config *c = &e->config;
    int64_t tokens = c->batch * c->seq, layer;
    encoder_input in;
    void *zeros = NULL;
    amp_value loss;
    for (layer = 0; layer < c->layers; layer++) {
        e->windows[layer] = windows != NULL ? windows[layer] : c->window;
        if (e->windows[layer] < 0 || e->windows[layer] > ENCODER_WINDOW)
            return ex_fail(AMP_ERR_RANGE, "a window of %lld is outside its range", (long long)e->windows[layer]);
    }
    EX_TRY(amp_alloc(e->amp, &zeros, tokens * (int64_t)sizeof *e->no_types));
    e->no_types = (int32_t *)zeros;
    EX_TRY(amp_fill(e->amp, zeros, 0, tokens * (int64_t)sizeof *e->no_types));
    if (c->family == ENCODER_DEBERTA) EX_TRY(deberta_rows(e->amp, &c->distances, c->seq, &e->distances));
    EX_TRY(amp_tape_create(e->amp, &e->tape, NULL));
    EX_TRY(model_tape_begin(e->tape, 1));
    memset(&in, 0, sizeof in);
    in.ids = e->no_types; in.batch = c->batch; in.seq = c->seq;
    loss = amp_tape_cross_entropy(e->tape, encoder_record(e, &in), e->no_types, NULL);
    EX_TRY(amp_tape_plan(e->tape, loss, &e->memory_bytes));
    return model_params_check(&e->own, e->memory_bytes, "");
}

/* Allocates a model.  Its weights are not set yet: see encoder_init and encoder_file_load. */
static inline amp_result encoder_create(encoder *e, amp_context *amp, const encoder_config *config) {
    encoder_config *c = &e->config;
    amp_result result;
    memset(e, 0, sizeof *e);
    EX_TRY(encoder_check_config(config));
    *c = *config;
    if (c->activations == AMP_DTYPE_DEFAULT) c->activations = AMP_F32;
    if (c->embedding == 0) c->embedding = c->hidden;
    if (c->distances.most == 0) c->distances.most = c->positions;
    if (!(c->eps > 0)) c->eps = 1e-12f;
    if (c->act == AMP_ACT_NONE) c->act = AMP_ACT_GELU_ERF;
    e->amp = amp;
    EX_TRY(model_params_open(&e->own, amp, 11 + 16 * c->layers));
    encoder_describe(e);
    e->params = e->own.at; e->n_params = e->own.n;
    e->windows = (int64_t *)malloc((size_t)c->layers * sizeof *e->windows);
    result = e->windows != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for the model's tables");
    if (result == AMP_OK) result = model_params_allocate(&e->own);
    if (result == AMP_OK) result = encoder_prepare(e, config->windows);
    c->windows = e->windows;
    if (result != AMP_OK) encoder_destroy(e);
    return result;
}

/* ---- A step */

/* The logits of a batch and, unless labels is NULL, the mean loss against labels [batch]; with backward for
   encoder_backward, which must follow, and from *grad_scale (see amp_scaler_scale_ptr; NULL: 1). */
static inline amp_result encoder_forward(encoder *e, const encoder_input *in, const int32_t *labels,
                                         const float *grad_scale, int backward) {
    const encoder_config *c = &e->config;
    if (in->batch < 1 || in->seq < 1 || in->batch > c->batch || in->batch * in->seq > c->batch * c->seq ||
        in->seq > c->seq)
        return ex_fail(AMP_ERR_RANGE, "a batch of %lld x %lld tokens, but the model was created for %lld x %lld",
                            (long long)in->batch, (long long)in->seq, (long long)c->batch, (long long)c->seq);
    EX_TRY(model_tape_begin(e->tape, backward));
    (void)encoder_record(e, in);
    if (labels == NULL) return amp_tape_finish(e->tape);
    e->loss = amp_tape_cross_entropy(e->tape, e->logits, labels, NULL);
    if (in->weight > 0 && in->weight != 1) e->loss = amp_tape_scale(e->tape, e->loss, in->weight);
    return model_tape_forward(e->tape, e->loss, grad_scale, backward, &e->loss_value);
}
/* All gradients. */
static inline amp_result encoder_backward(encoder *e) { return amp_tape_backward(e->tape, e->loss, NULL); }
/* The loss on the host.  Waits for the device. */
static inline amp_result encoder_loss_read(encoder *e, float *out) { return amp_tape_read(e->tape, e->loss, out, 1); }

#endif
