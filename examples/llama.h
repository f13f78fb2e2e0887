/* llama.h - a decoder in the shape of Llama on amp.h's tape: RMSNorm, SwiGLU, rotary positions, grouped key and value
 * heads, an untied head.  Parameters have Hugging Face's names.  Include amp.h and common.h first; model files:
 * llama_files.h. */
#ifndef EXAMPLES_LLAMA_H
#define EXAMPLES_LLAMA_H

typedef struct llama_config {
    int64_t vocab, positions, channels, hidden, layers, heads, kv_heads;
    double base, eps;
} llama_config;

enum { LLAMA_Q, LLAMA_K, LLAMA_V, LLAMA_O, LLAMA_GATE, LLAMA_UP, LLAMA_DOWN, LLAMA_NORM1, LLAMA_NORM2, LLAMA_WEIGHTS };

typedef struct llama {
    llama_config config;
    amp_context *amp;
    amp_model *model;
    amp_param *params, *embed, *norm, *head, *(*blocks)[LLAMA_WEIGHTS];
    int64_t n_params;
} llama;

static inline void llama_free(llama *m) {
    amp_model_destroy(m->model);
    free(m->blocks);
    memset(m, 0, sizeof *m);
}

static inline amp_result llama_create(llama *m, amp_context *amp, llama_config c, uint64_t seed) {
    static const char *const names[LLAMA_WEIGHTS] = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "input_layernorm", "post_attention_layernorm"};
    int64_t n = c.channels, kv = n / c.heads * c.kv_heads, i, k;
    int64_t sizes[LLAMA_WEIGHTS][2] = {{n, n}, {kv, n}, {kv, n}, {n, n}, {c.hidden, n}, {c.hidden, n}, {n, c.hidden},
                                       {n, 0}, {n, 0}};
    char name[96];
    amp_result result;
    memset(m, 0, sizeof *m);
    m->config = c;
    m->amp = amp;
    m->blocks = (amp_param *(*)[LLAMA_WEIGHTS])calloc((size_t)c.layers, sizeof *m->blocks);
    if (m->blocks == NULL) return example_fail(AMP_ERR_MEMORY, "no memory for %lld layers", (long long)c.layers);
    result = amp_model_create(amp, &m->model, seed, 0);
    if (result != AMP_OK) { llama_free(m); return result; }
    m->embed = amp_model_param(m->model, "model.embed_tokens.weight", c.vocab, n, AMP_INIT_NORMAL, 0.02);
    for (i = 0; i < c.layers; i++)
        for (k = 0; k < LLAMA_WEIGHTS; k++) {
            snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)i, names[k]);
            m->blocks[i][k] = amp_model_param(m->model, name, sizes[k][0], sizes[k][1],
                                              sizes[k][1] > 0 ? AMP_INIT_NORMAL : AMP_INIT_NORM_WEIGHT,
                                              sizes[k][1] > 0 ? 0.02 : 0);
        }
    m->norm = amp_model_param(m->model, "model.norm.weight", n, 0, AMP_INIT_NORM_WEIGHT, 0);
    m->head = amp_model_param(m->model, "lm_head.weight", c.vocab, n, AMP_INIT_NORMAL, 0.02);
    result = amp_model_params(m->model, &m->params, &m->n_params);
    if (result != AMP_OK) llama_free(m);
    return result;
}

/* Records the decoder on tokens [batch, positions]; returns the logits [batch, positions, vocab]. */
static inline amp_value llama_logits(const llama *m, amp_tape *tape, const amp_tensor *ids) {
    const llama_config *c = &m->config;
    float eps = (float)c->eps;
    amp_attention_op causal;
    amp_rope_op turn;
    amp_value x = amp_tape_embedding(tape, ids, m->embed, NULL);
    int64_t i;
    memset(&causal, 0, sizeof causal);
    memset(&turn, 0, sizeof turn);
    causal.mask.kind = AMP_MASK_CAUSAL;
    turn.base = (float)c->base;
    for (i = 0; i < c->layers; i++) {
        amp_param **w = m->blocks[i];
        amp_value h = amp_tape_rmsnorm(tape, x, w[LLAMA_NORM1], eps);
        amp_value q = amp_tape_rope(tape, amp_tape_linear(tape, h, w[LLAMA_Q], NULL, AMP_ACT_NONE), c->heads, &turn);
        amp_value k = amp_tape_rope(tape, amp_tape_linear(tape, h, w[LLAMA_K], NULL, AMP_ACT_NONE), c->kv_heads, &turn);
        amp_value v = amp_tape_linear(tape, h, w[LLAMA_V], NULL, AMP_ACT_NONE);
        h = amp_tape_attention(tape, q, k, v, c->heads, &causal);
        x = amp_tape_add(tape, x, amp_tape_linear(tape, h, w[LLAMA_O], NULL, AMP_ACT_NONE));
        h = amp_tape_rmsnorm(tape, x, w[LLAMA_NORM2], eps);
        amp_value gate = amp_tape_linear(tape, h, w[LLAMA_GATE], NULL, AMP_ACT_NONE);
        amp_value up = amp_tape_linear(tape, h, w[LLAMA_UP], NULL, AMP_ACT_NONE);
        h = amp_tape_linear(tape, amp_tape_swiglu(tape, gate, up), w[LLAMA_DOWN], NULL, AMP_ACT_NONE);
        x = amp_tape_add(tape, x, h);
    }
    return amp_tape_linear(tape, amp_tape_rmsnorm(tape, x, m->norm, eps), m->head, NULL, AMP_ACT_NONE);
}

#endif
