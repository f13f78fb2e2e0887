/* gpt_parts.h - what gpt.h's model has besides its graph: a step, logits alone, initial weights, and a Llama as a
 * gpt.  gpt.h includes it. */
#ifndef EXAMPLES_GPT_PARTS_H
#define EXAMPLES_GPT_PARTS_H

static const char *const gpt_tensor_names[GPT_TENSORS] = {"stream", "norm", "attention", "mlp", "branch"};

/* ---- A step */

/* The loss of a batch; with backward for gpt_backward, which must follow, and from *grad_scale (see
   amp_scaler_scale_ptr; NULL: 1). */
static inline amp_result gpt_forward_loss(gpt *g, const amp_batch *batch, const float *grad_scale, int backward) {
    EX_TRY(model_tape_begin(g->tape, backward));
    gpt_record(g, batch->inputs, batch->targets, batch->batch, batch->seq);
    return model_tape_forward(g->tape, g->loss, grad_scale, backward, &g->loss_value);
}
/* All gradients. */
static inline amp_result gpt_backward(gpt *g) { return amp_tape_backward(g->tape, g->loss, NULL); }
/* The loss on the host.  Waits for the device. */
static inline amp_result gpt_loss_read(const gpt *g, float *out) { return amp_tape_read(g->tape, g->loss, out, 1); }

/* The logits of ids [batch, seq], or with last 1 of the last token of each sequence: g->logits, for amp_tape_read. */
static inline amp_result gpt_forward(gpt *g, const int32_t *ids, int64_t batch, int64_t seq, int last) {
    amp_value x;
    EX_TRY(model_tape_begin(g->tape, 0));
    x = g->config.kv_heads > 0 ? gpt_llama_body(g, ids, batch, seq) : gpt_body(g, ids, batch, seq);
    gpt_head(g, last ? amp_tape_split(g->tape, x, 1, seq - 1, 1) : x);
    return amp_tape_finish(g->tape);
}

/* ---- Weights */

/* 1 for Hugging Face's Conv1D weights: the matrices of GPT-2's blocks. */
static inline int gpt_is_conv1d(const gpt *g, int64_t i) {
    return g->config.kv_heads == 0 && i >= 2 && i < g->n_params - 2 && g->params[i].weight.ndim == 2;
}

static inline amp_result gpt_set(gpt *g, int64_t i, const float *values) {
    return model_param_set(g->amp, g->optimizer, &g->params[i], values);
}
static inline amp_result gpt_get(gpt *g, int64_t i,
                                 float *values) { return model_param_get(g->amp, &g->params[i], values); }

/* GPT-2's initialisation: normal with deviation 0.02, the projections into the residual stream divided by
   sqrt(2 layers), biases 0, LayerNorm weights 1. */
static inline amp_result gpt_init(gpt *g, uint64_t seed) {
    int64_t i, k, count, largest = 0;
    float *values;
    amp_result result = AMP_OK;
    for (i = 0; i < g->n_params; i++) if ((count = amp_tensor_count(&g->params[i].weight)) > largest) largest = count;
    values = (float *)malloc((size_t)largest * sizeof *values);
    if (values == NULL) return ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 4);
    for (i = 0; i < g->n_params && result == AMP_OK; i++) {
        const char *name = g->params[i].name;
        count = amp_tensor_count(&g->params[i].weight);
        if (g->params[i].weight.ndim == 2) {
            double deviation = strstr(name, "c_proj") != NULL ? 0.02 / sqrt(2.0 * (double)g->config.layers) : 0.02;
            ex_normal(values, count, seed, (uint64_t)i + 1, (float)deviation);
        } else {
            int norm = strstr(name, "ln_") != NULL || strstr(name, "norm") != NULL;
            float value = norm && strstr(name, ".weight") != NULL ? 1.0f : 0.0f;
            for (k = 0; k < count; k++) values[k] = value;
        }
        result = gpt_set(g, i, values);
    }
    free(values);
    return result;
}

/* ---- A Llama as a gpt */

static inline llama_config gpt_as_llama(const gpt_config *c) {
    llama_config like;
    like.vocab = c->vocab; like.positions = c->positions; like.channels = c->channels; like.hidden = c->hidden;
    like.layers = c->layers; like.heads = c->heads; like.kv_heads = c->kv_heads;
    like.base = c->base; like.eps = (double)c->eps;
    return like;
}
static inline int gpt_llama_is_valid(const gpt_config *c) {
    llama_config like = gpt_as_llama(c);
    return llama_is_valid(&like);
}
static inline void gpt_llama_describe(gpt *g) {
    int64_t shape[2], i;
    char name[80];
    g->as_llama.config = gpt_as_llama(&g->config);
    g->as_llama.amp = g->amp;
    for (i = 0; i < llama_count(&g->as_llama.config); i++) {
        llama_describe(&g->as_llama.config, i, name, shape);
        model_params_add(&g->own, shape[1] == 0, shape[0], shape[1], "%s", name)->embedding = i == 0;
    }
    g->as_llama.params = g->own.at; g->as_llama.n_params = g->own.n;
}
static inline amp_value gpt_llama_body(gpt *g, const int32_t *ids, int64_t batch, int64_t seq) {
    amp_tensor tokens = amp_tensor2((void *)(uintptr_t)ids, AMP_I32, batch, seq);
    g->as_llama.stream = gpt_dtype(&g->config, GPT_STREAM);
    g->as_llama.inner = g->config.activations;
    g->as_llama.recompute = g->config.recompute;
    return llama_body(&g->as_llama, g->tape, &tokens);
}

#endif
