/* llama.h - a decoder in the shape of Llama on amp.h's tape: RMSNorm, SwiGLU, rotary positions, grouped key and value
 * heads, an untied head.  Parameters have Hugging Face's names.  It needs amp.h alone; model files: llama_files.h. */
#ifndef EXAMPLES_LLAMA_H
#define EXAMPLES_LLAMA_H

#include "../amp.h"
#include <stdio.h>
#include <string.h>

typedef struct llama_config {
    int64_t vocab, positions, channels, hidden, layers, heads, kv_heads;
    double base, eps;
} llama_config;

enum { LLAMA_Q, LLAMA_K, LLAMA_V, LLAMA_O, LLAMA_GATE, LLAMA_UP, LLAMA_DOWN, LLAMA_NORM1, LLAMA_NORM2, LLAMA_WEIGHTS };

/* The parameters: embedding, LLAMA_WEIGHTS for each layer, last norm, head. */
typedef struct llama {
    llama_config config;
    amp_context *amp;
    amp_model *model;               /* NULL: the parameters are somebody else's */
    amp_param *params; int64_t n_params;
    amp_dtype stream, inner;        /* storage of the residual stream, and of what is inside layers; 0: autocast's */
    int32_t recompute;              /* 1: backward computes all layers but the last again */
} llama;

static inline int llama_is_valid(const llama_config *c) {
    return c->hidden >= 1 && c->hidden <= 1 << 22 && c->kv_heads >= 1 && c->heads % c->kv_heads == 0 &&
           c->channels % (2 * c->heads) == 0 && c->base >= 1;
}
static inline int64_t llama_count(const llama_config *c) { return 3 + LLAMA_WEIGHTS * c->layers; }

/* Name and shape of parameter i: a weight [rows, cols], or a norm's, cols 0. */
static inline void llama_describe(const llama_config *c, int64_t i, char name[80], int64_t shape[2]) {
    static const char *const names[LLAMA_WEIGHTS] = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "input_layernorm", "post_attention_layernorm"};
    int64_t n = c->channels, kv = n / c->heads * c->kv_heads, layer = (i - 1) / LLAMA_WEIGHTS;
    int64_t sizes[LLAMA_WEIGHTS][2] = {{n, n}, {kv, n}, {kv, n}, {n, n}, {c->hidden, n}, {c->hidden, n}, {n, c->hidden},
                                       {n, 0}, {n, 0}};
    int64_t k = (i - 1) % LLAMA_WEIGHTS;
    int last = i == llama_count(c) - 1;
    shape[0] = c->vocab; shape[1] = n;
    if (i == 0 || last) snprintf(name, 80, last ? "lm_head.weight" : "model.embed_tokens.weight");
    else if (layer < c->layers) {
        snprintf(name, 80, "model.layers.%lld.%s.weight", (long long)layer, names[k]);
        shape[0] = sizes[k][0]; shape[1] = sizes[k][1];
    } else { snprintf(name, 80, "model.norm.weight"); shape[0] = n; shape[1] = 0; }
}

static inline void llama_free(llama *m) {
    amp_model_destroy(m->model);
    memset(m, 0, sizeof *m);
}

static inline amp_result llama_create(llama *m, amp_context *amp, llama_config c, uint64_t seed) {
    char name[80];
    int64_t shape[2], i;
    amp_result result;
    memset(m, 0, sizeof *m);
    m->config = c;
    m->amp = amp;
    result = amp_model_create(amp, &m->model, seed, llama_count(&c));
    if (result != AMP_OK) return result;
    for (i = 0; i < llama_count(&c); i++) {
        llama_describe(&c, i, name, shape);
        (void)amp_model_param(m->model, name, shape[0], shape[1], shape[1] > 0 ? AMP_INIT_NORMAL : AMP_INIT_NORM_WEIGHT,
                              shape[1] > 0 ? 0.02 : 0);
    }
    result = amp_model_params(m->model, &m->params, &m->n_params);
    if (result == AMP_OK) m->params[0].embedding = 1;
    else llama_free(m);
    return result;
}

/* The tape, whose next results are part of the stream, or inside a layer. */
static inline amp_tape *llama_stored(amp_tape *tape, amp_dtype dtype) {
    amp_tape_store(tape, dtype);
    return tape;
}
static inline amp_value llama_linear(amp_tape *tape, amp_value x, amp_param *weight) {
    return amp_tape_linear(tape, x, weight, NULL, AMP_ACT_NONE);
}

static inline amp_value llama_layer(const llama *m, amp_tape *tape, amp_value x, amp_param *w, const amp_rope_op *turn,
                                    const amp_attention_op *causal) {
    const llama_config *c = &m->config;
    float eps = (float)c->eps;
    amp_value h = amp_tape_rmsnorm(llama_stored(tape, m->inner), x, w + LLAMA_NORM1, eps);
    amp_value q = amp_tape_rope(tape, llama_linear(tape, h, w + LLAMA_Q), c->heads, turn);
    amp_value k = amp_tape_rope(tape, llama_linear(tape, h, w + LLAMA_K), c->kv_heads, turn);
    amp_value v = llama_linear(tape, h, w + LLAMA_V), gate, up;
    h = llama_linear(tape, amp_tape_attention(tape, q, k, v, c->heads, causal), w + LLAMA_O);
    x = amp_tape_add(llama_stored(tape, m->stream), x, h);
    h = amp_tape_rmsnorm(llama_stored(tape, m->inner), x, w + LLAMA_NORM2, eps);
    gate = llama_linear(tape, h, w + LLAMA_GATE);
    up = llama_linear(tape, h, w + LLAMA_UP);
    h = llama_linear(tape, amp_tape_swiglu(tape, gate, up), w + LLAMA_DOWN);
    return amp_tape_add(llama_stored(tape, m->stream), x, h);
}

/* Records everything before the head on tokens [batch, positions]. */
static inline amp_value llama_body(const llama *m, amp_tape *tape, const amp_tensor *ids) {
    const llama_config *c = &m->config;
    amp_attention_op causal;
    amp_rope_op turn;
    amp_value x = amp_tape_embedding(llama_stored(tape, m->stream), ids, m->params, NULL);
    int64_t i;
    memset(&causal, 0, sizeof causal);
    memset(&turn, 0, sizeof turn);
    causal.mask.kind = AMP_MASK_CAUSAL;
    turn.base = (float)c->base;
    for (i = 0; i < c->layers; i++) {
        if (m->recompute && i + 1 < c->layers) amp_tape_checkpoint_begin(tape);
        x = llama_layer(m, tape, x, m->params + 1 + LLAMA_WEIGHTS * i, &turn, &causal);
        if (m->recompute && i + 1 < c->layers) amp_tape_checkpoint_end(tape);
    }
    return amp_tape_rmsnorm(llama_stored(tape, m->inner), x, m->params + m->n_params - 2, (float)c->eps);
}

/* The logits [batch, positions, vocab]. */
static inline amp_value llama_logits(const llama *m, amp_tape *tape, const amp_tensor *ids) {
    return llama_linear(tape, llama_body(m, tape, ids), m->params + m->n_params - 1);
}

#endif
