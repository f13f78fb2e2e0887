/* gpt.h - GPT-2 on amp.h's tape, as Hugging Face's GPT2LMHeadModel: learned positions, LayerNorm before attention and
 * MLP, output weights tied to the embedding.  The residual stream is fp32 unless `stored` says otherwise; everything
 * else is stored in `activations`.  Linear weights are [out, in]; Hugging Face's Conv1D has [in, out] and is transposed
 * at loading and saving.  With kv_heads it is a Llama of llama.h instead.  What a model has besides: gpt_parts.h;
 * files: gpt_files.h; text: sample.h. */
#ifndef EXAMPLES_GPT_H
#define EXAMPLES_GPT_H

#include "llama.h"
#include "model.h"

/* Tensors that can have their own storage dtype, each with its gradient: the residual stream; LayerNorms' results; q,
   k, v and attention's result; the inside of the MLP; the branches added to the stream. */
typedef enum gpt_tensor { GPT_STREAM, GPT_NORM, GPT_ATTENTION, GPT_MLP, GPT_BRANCH, GPT_LOGITS } gpt_tensor;
enum { GPT_TENSORS = GPT_LOGITS, GPT_PARTS = 12 };

typedef struct gpt_config {
    int64_t vocab, positions, channels, heads, layers;
    int64_t batch, seq;             /* of a training step; seq at most positions */
    /* F32, F16 or BF16; default: as autocast decides; tensor by tensor and logits as activations, the stream F32 */
    amp_dtype activations, stored[GPT_TENSORS], logits;
    int32_t fused_loss;             /* 1: the head and the loss in one, by chunks: no logits but those of a sample */
    float dropout;                  /* on the embedding and on both residual branches; 0: none */
    int32_t recompute;              /* 1: backward computes all blocks but the last again */
    amp_activation_kind act;        /* inside the MLP; 0: AMP_ACT_GELU */
    float eps;                      /* of LayerNorm; 0: 1e-5 */
    /* unscaled: scores are not divided by sqrt(channels / heads); by_layer: also divided by the number of the block */
    int32_t unscaled, by_layer;
    int64_t hidden, kv_heads; double base;  /* kv_heads not 0: a Llama of llama.h instead, with these */
} gpt_config;

typedef struct gpt {
    gpt_config config;
    model_params own;                 /* wte, wpe, 12 for each block, ln_f.weight, ln_f.bias */
    amp_param *params; int64_t n_params;    /* the same */
    llama as_llama; amp_param *head;        /* if it is one; the output weights */
    amp_context *amp; amp_tape *tape;
    int64_t memory_bytes;                   /* of the tape, in a training step */
    amp_value logits, loss; float *loss_value;      /* of the last pass; where that loss lies */
    amp_optimizer *optimizer;       /* sets weights, so that masters keep full precision; or NULL */
    char *json;                     /* the config.json it came with, or NULL */
} gpt;

/* The parameters of a block in units of channels: weights [rows C, cols C], vectors cols 0. */
typedef struct gpt_part { const char *name; int32_t rows, cols; } gpt_part;
static const gpt_part gpt_parts[GPT_PARTS] = {
    {"ln_1.weight", 1, 0},      {"ln_1.bias", 1, 0},     {"attn.c_attn.weight", 3, 1}, {"attn.c_attn.bias", 3, 0},
    {"attn.c_proj.weight", 1, 1}, {"attn.c_proj.bias", 1, 0}, {"ln_2.weight", 1, 0},   {"ln_2.bias", 1, 0},
    {"mlp.c_fc.weight", 4, 1},  {"mlp.c_fc.bias", 4, 0}, {"mlp.c_proj.weight", 1, 4},  {"mlp.c_proj.bias", 1, 0}};

static inline amp_dtype gpt_dtype(const gpt_config *c, gpt_tensor which) {
    amp_dtype own = which == GPT_LOGITS ? c->logits : c->stored[which];
    return own != AMP_DTYPE_DEFAULT ? own : which == GPT_STREAM ? AMP_F32 : c->activations;
}

/* A Llama as a gpt: at the end of this file. */
static inline int gpt_llama_is_valid(const gpt_config *c);
static inline void gpt_llama_describe(gpt *g);
static inline amp_value gpt_llama_body(gpt *g, const int32_t *ids, int64_t batch, int64_t seq);

/* ---- Recording: [batch, seq, ...] */

/* The tape, whose next results are stored as this tensor. */
static inline amp_tape *gpt_tape(const gpt *g, gpt_tensor which) {
    amp_tape_store(g->tape, gpt_dtype(&g->config, which));
    return g->tape;
}
static inline amp_value gpt_linear(gpt *g, gpt_tensor which, amp_value x, amp_param *weight, amp_activation_kind act) {
    return amp_tape_linear(gpt_tape(g, which), x, weight, weight + 1, act);
}
static inline amp_value gpt_norm(gpt *g, amp_value x, amp_param *weight) {
    return amp_tape_layernorm(gpt_tape(g, GPT_NORM), x, weight, weight + 1, g->config.eps);
}
static inline amp_value gpt_dropout(gpt *g, amp_value x) {
    return g->config.dropout > 0 ? amp_tape_dropout(g->tape, x, g->config.dropout) : x;
}
/* The stream with a branch, the result of a linear layer, added to it. */
static inline amp_value gpt_join(gpt *g, amp_value stream, amp_value x, amp_param *weight) {
    amp_value branch = gpt_dropout(g, gpt_linear(g, GPT_BRANCH, x, weight, AMP_ACT_NONE));
    return amp_tape_add(gpt_tape(g, GPT_STREAM), branch, stream);
}

static inline amp_value gpt_block(gpt *g, amp_value x, amp_param *p, const amp_attention_op *causal) {
    const gpt_config *c = &g->config;
    int fused = model_is_fused(c->act), i;
    amp_value h = gpt_linear(g, GPT_ATTENTION, gpt_norm(g, x, p), p + 2, AMP_ACT_NONE), qkv[3];
    for (i = 0; i < 3; i++) qkv[i] = amp_tape_split(g->tape, h, 2, i * c->channels, c->channels);
    x = gpt_join(g, x, amp_tape_attention(g->tape, qkv[0], qkv[1], qkv[2], c->heads, causal), p + 4);
    h = gpt_linear(g, GPT_MLP, gpt_norm(g, x, p + 6), p + 8, fused ? c->act : AMP_ACT_NONE);
    if (!fused) h = amp_tape_activation(g->tape, h, NULL, c->act);
    return gpt_join(g, x, h, p + 10);
}

/* Everything before the output weights. */
static inline amp_value gpt_body(gpt *g, const int32_t *ids, int64_t batch, int64_t seq) {
    const gpt_config *c = &g->config;
    amp_tensor tokens = amp_tensor2((void *)(uintptr_t)ids, AMP_I32, batch, seq);
    amp_param *p = g->params;
    amp_attention_op causal;
    amp_value x = gpt_dropout(g, amp_tape_embedding(gpt_tape(g, GPT_STREAM), &tokens, p, p + 1));
    int64_t layer;
    memset(&causal, 0, sizeof causal);
    causal.mask.kind = AMP_MASK_CAUSAL;
    for (layer = 1, p += 2; layer <= c->layers; layer++, p += GPT_PARTS) {
        double scale = c->unscaled ? 1 : 1 / sqrt((double)(c->channels / c->heads));
        if (c->unscaled || c->by_layer) causal.scale = (float)(scale / (c->by_layer ? (double)layer : 1));
        if (c->recompute && layer < c->layers) amp_tape_checkpoint_begin(g->tape);
        x = gpt_block(g, x, p, &causal);
        if (c->recompute && layer < c->layers) amp_tape_checkpoint_end(g->tape);
    }
    return gpt_norm(g, x, p);
}

/* The logits of what gpt_body returns. */
static inline amp_value gpt_head(gpt *g, amp_value x) {
    return g->logits = amp_tape_linear(gpt_tape(g, GPT_LOGITS), x, g->head, NULL, AMP_ACT_NONE);
}

/* The mean loss of ids [batch, seq] against labels of the same shape. */
static inline amp_value gpt_record(gpt *g, const int32_t *ids, const int32_t *labels, int64_t batch, int64_t seq) {
    amp_linear_cross_entropy_op fused;
    amp_value x = g->config.kv_heads > 0 ? gpt_llama_body(g, ids, batch, seq) : gpt_body(g, ids, batch, seq);
    memset(&fused, 0, sizeof fused);
    fused.logits = gpt_dtype(&g->config, GPT_LOGITS);
    if (!g->config.fused_loss) return g->loss = amp_tape_cross_entropy(g->tape, gpt_head(g, x), labels, NULL);
    return g->loss = amp_tape_linear_cross_entropy(g->tape, x, g->head, NULL, labels, &fused);
}

/* ---- The model */

static inline void gpt_destroy(gpt *g) {
    amp_tape_destroy(g->tape);
    model_params_free(&g->own);
    free(g->json);
    memset(g, 0, sizeof *g);
}

static inline void gpt_describe(gpt *g) {
    int64_t layer, C = g->config.channels;
    const gpt_part *part;
    model_params_add(&g->own, 0, g->config.vocab, C, "transformer.wte.weight")->embedding = 1;
    model_params_add(&g->own, 0, g->config.positions, C, "transformer.wpe.weight")->embedding = 1;
    for (layer = 0; layer < g->config.layers; layer++)
        for (part = gpt_parts; part < gpt_parts + GPT_PARTS; part++)
            model_params_add(&g->own, strncmp(part->name, "ln_", 3) == 0, part->rows * C, part->cols * C,
                           "transformer.h.%lld.%s", (long long)layer, part->name);
    model_params_add(&g->own, 1, C, 0, "transformer.ln_f.weight");
    model_params_add(&g->own, 1, C, 0, "transformer.ln_f.bias");
}

/* Another batch size, or storage of activations, from the next pass on.  The tape's memory is given back. */
static inline amp_result gpt_reshape(gpt *g, int64_t batch, amp_dtype activations) {
    int32_t none = 0;
    g->config.batch = batch;
    g->config.activations = activations;
    amp_tape_destroy(g->tape);
    EX_TRY(amp_tape_create(g->amp, &g->tape, NULL));
    EX_TRY(amp_tape_begin(g->tape, NULL));
    return amp_tape_plan(g->tape, gpt_record(g, &none, &none, batch, g->config.seq), &g->memory_bytes);
}

/* Allocates a model.  Its weights are not set yet: see gpt_init and gpt_file_load. */
static inline amp_result gpt_create(gpt *g, amp_context *amp, const gpt_config *config) {
    gpt_config *c = &g->config;
    amp_result result;
    memset(g, 0, sizeof *g);
    *c = *config;
    if (c->act == AMP_ACT_NONE) c->act = AMP_ACT_GELU;
    if (!(c->eps > 0)) c->eps = 1e-5f;
    g->amp = amp;
    if (c->vocab < 1 || c->positions < 1 || c->channels < 1 || c->heads < 1 || c->layers < 1 || c->batch < 1 ||
        c->seq < 1 || c->vocab > INT32_MAX || c->positions > INT32_MAX || c->channels > 1 << 20 || c->layers > 10000 ||
        c->batch > INT32_MAX / c->seq || (c->kv_heads != 0 && !gpt_llama_is_valid(c)))
        return ex_fail(AMP_ERR_RANGE, "a dimension of the model is outside its range");
    EX_TRY(model_params_open(&g->own, amp, 4 + GPT_PARTS * c->layers));
    if (c->kv_heads > 0) gpt_llama_describe(g);
    else gpt_describe(g);
    g->head = &g->own.at[c->kv_heads > 0 ? g->own.n - 1 : 0];
    g->params = g->own.at; g->n_params = g->own.n;
    result = model_params_allocate(&g->own);
    if (result == AMP_OK) result = gpt_reshape(g, c->batch, c->activations);
    if (result == AMP_OK) result = model_params_check(&g->own, g->memory_bytes, c->recompute ? "" : ", or recompute");
    if (result != AMP_OK) gpt_destroy(g);
    return result;
}

#include "gpt_parts.h"

#endif
