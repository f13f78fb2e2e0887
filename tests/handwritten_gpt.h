/* handwritten_gpt.h - the GPT-2 of examples/gpt.h, written by hand without the tape.  Every tensor is placed and every
 * operator is called by hand, and every backward in reverse order.  The tape must have the same bits, memory and calls.
 * Include examples/gpt.h first. */
#ifndef TESTS_HANDWRITTEN_GPT_H
#define TESTS_HANDWRITTEN_GPT_H

static inline float *arena_floats(model_arena *a, int64_t count) { return (float *)model_arena_take(a, count, AMP_F32); }

/* The mean cross-entropy of logits against labels, one a row, in *value; with backward the logits become their
   gradient, starting from *grad_scale (see amp_scaler_scale_ptr; NULL: 1). */
static inline amp_result mean_loss(amp_context *amp, amp_cross_entropy_op *op, amp_tensor logits, const int32_t *labels,
                                   float *value, int backward, const float *grad_scale) {
    memset(op, 0, sizeof *op);
    op->logits = logits;
    if (backward) op->dlogits = logits;
    op->labels = labels;
    op->grad_scale = grad_scale;
    op->loss = value;
    return amp_cross_entropy(amp, op);
}

/* If the gradient that `norm` writes is fp32 and `linear`, the branch's last layer, computes in 16 bits, the op that
   writes linear's dy, dropout or norm, writes it in that dtype, so that linear's two products need not round it.
   d_low: for it; without dropout the norm's own dx, if there is no room. */
static inline void pass_low(amp_norm_op *norm, amp_dropout_op *drop, amp_linear_op *linear, void *d_low) {
    amp_dtype low = linear->plan.compute;
    int wanted = norm->dx.dtype == AMP_F32 && (low == AMP_F16 || low == AMP_BF16) && d_low != norm->dx.data;
    linear->dy = norm->dx;
    if (wanted || drop != NULL) linear->dy.data = d_low;
    if (wanted) linear->dy.dtype = low;
    if (drop != NULL) drop->dx = linear->dy;
    else norm->dx_low = wanted ? linear->dy : amp_tensor2(NULL, AMP_F32, 0, 0);
}

/* y of `up`, which is x of `down`, is act(pre): computed by the linear layers or by a step between them. */
static inline void bind_activation(amp_activation_op *op, amp_activation_kind act, amp_linear_op *up,
                                   amp_linear_op *down, amp_tensor pre) {
    memset(op, 0, sizeof *op);
    if (model_is_fused(act)) {
        up->act = down->x_act = act;
        up->pre = down->x_pre = pre;
        up->dy_before_act = 1;              /* down's backward includes it, so up's does not */
        return;
    }
    op->act = act;
    op->x = pre; op->y = up->y;
    op->dy = op->dx = up->dy;
    up->y = pre;
}

/* One block: ops with their tensors, so that forward and backward only call them. */
typedef struct hand_block {
    amp_norm_op ln_1, ln_2;
    amp_linear_op c_attn, attn_proj, c_fc, mlp_proj;
    amp_attention_op attention;
    amp_activation_op act;          /* if not fused into c_fc */
    amp_dropout_op attn_drop, mlp_drop;
    void *norm_1, *qkv, *heads;     /* [rows, C], [rows, 3C], [rows, C] */
    void *norm_2, *fc_in, *fc_out;  /* [rows, C], [rows, 4C] before and after the activation */
    void *middle, *end;             /* the residual stream after attention and after the MLP: [rows, C] */
    float *mean_1, *rstd_1, *mean_2, *rstd_2, *lse;
} hand_block;

/* Ops and activations of a model on the tape, whose config and parameters it has. */
typedef struct hand_gpt {
    gpt_config config;
    amp_context *amp;
    amp_param *params;
    int64_t n_params;
    void *memory;                   /* one allocation holds all activations */
    int64_t memory_bytes;
    hand_block *blocks;
    amp_embedding_op embedding;
    amp_dropout_op embedding_drop;
    amp_norm_op ln_f;
    amp_linear_op head;
    amp_cross_entropy_op loss;
    amp_linear_cross_entropy_op fused;  /* the two, with config.fused_loss */
    void *start;                    /* the residual stream at the beginning */
    void *branch, *norm_f, *logits; /* [rows, C], [rows, C], [rows, vocab]; branch is what is added to the stream */
    float *mean_f, *rstd_f, *loss_value;
    void *d_stream, *d_branch;      /* gradients; d_branch is d_stream unless there is dropout */
    /* d_branch in the dtype that the branch's last layer computes in; see pass_low */
    void *d_low;
    void *d_norm, *d_heads, *d_qkv, *d_fc;
    int64_t batch, seq, rows;       /* what the ops are bound to */
} hand_gpt;

static inline void hand_place_activations(hand_gpt *g, model_arena *a) {
    const gpt_config *c = &g->config;
    int64_t rows = c->batch * c->seq, C = c->channels, layer;
    amp_dtype stream = gpt_dtype(c, GPT_STREAM), norm = gpt_dtype(c, GPT_NORM), attention = gpt_dtype(c, GPT_ATTENTION),
              mlp = gpt_dtype(c, GPT_MLP);
    for (layer = 0; layer < c->layers; layer++) {
        hand_block *b = &g->blocks[layer];
        if (layer > 0 && c->recompute) *b = b[-1];
        b->end = model_arena_take(a, rows * C, stream);
        if (layer > 0 && c->recompute) continue;        /* its own is only the next block's input */
        b->norm_1 = model_arena_take(a, rows * C, norm);   b->qkv = model_arena_take(a, rows * 3 * C, attention);
        b->heads = model_arena_take(a, rows * C, attention); b->norm_2 = model_arena_take(a, rows * C, norm);
        b->fc_in = model_arena_take(a, rows * 4 * C, mlp); b->fc_out = model_arena_take(a, rows * 4 * C, mlp);
        b->middle = model_arena_take(a, rows * C, stream);
        b->mean_1 = arena_floats(a, rows);           b->rstd_1 = arena_floats(a, rows);
        b->mean_2 = arena_floats(a, rows);           b->rstd_2 = arena_floats(a, rows);
        b->lse = arena_floats(a, rows * c->heads);
    }
    g->start = model_arena_take(a, rows * C, stream);
    g->branch = model_arena_take(a, rows * C, gpt_dtype(c, GPT_BRANCH));
    g->norm_f = model_arena_take(a, rows * C, norm);
    g->logits = model_arena_take(a, (c->fused_loss ? 1 : rows) * c->vocab, gpt_dtype(&g->config, GPT_LOGITS));
    g->mean_f = arena_floats(a, rows);
    g->rstd_f = arena_floats(a, rows);
    g->loss_value = arena_floats(a, 1);
    g->d_stream = model_arena_take(a, rows * C, stream);
    g->d_branch = c->dropout > 0 ? model_arena_take(a, rows * C, stream) : g->d_stream;
    g->d_low = c->dropout > 0 || stream != AMP_F32 || c->activations == AMP_F32 ? g->d_branch
                                                                                : model_arena_take(a, rows * C, AMP_BF16);
    g->d_norm = model_arena_take(a, rows * C, norm);
    g->d_heads = model_arena_take(a, rows * C, attention);
    g->d_qkv = model_arena_take(a, rows * 3 * C, attention);
    g->d_fc = model_arena_take(a, rows * 4 * C, mlp);
}

static inline amp_tensor hand_matrix(const hand_gpt *g, gpt_tensor which, void *data, int64_t cols) {
    return amp_tensor2(data, gpt_dtype(&g->config, which), g->rows, cols);
}
static inline amp_tensor hand_stream(const hand_gpt *g, void *data) {
    return hand_matrix(g, GPT_STREAM, data, g->config.channels);
}

/* from, to: the kinds of tensor of x (and dx) and of y. */
static inline void hand_bind_linear(hand_gpt *g, amp_linear_op *op, amp_param *weight, gpt_tensor from, void *x,
                                   gpt_tensor to, void *y, void *dx) {
    memset(op, 0, sizeof *op);
    op->weight = weight;
    op->bias = weight + 1;
    op->x = hand_matrix(g, from, x, weight->weight.shape[1]);
    op->y = hand_matrix(g, to, y, weight->weight.shape[0]);
    op->dx = hand_matrix(g, from, dx, weight->weight.shape[1]);
}

/* y = LayerNorm(sum), sum = branch + stream; without sum it is LayerNorm(stream). */
static inline void hand_bind_norm(hand_gpt *g, amp_norm_op *op, amp_param *weight, void *stream, void *sum, void *y,
                                 float *mean, float *rstd) {
    memset(op, 0, sizeof *op);
    op->weight = weight;
    op->bias = weight + 1;
    op->x = hand_stream(g, stream);
    if (sum != NULL) {
        op->x = hand_matrix(g, GPT_BRANCH, g->branch, g->config.channels);
        op->residual = hand_stream(g, stream);
        op->sum = hand_stream(g, sum);
    }
    op->y = hand_matrix(g, GPT_NORM, y, g->config.channels);
    op->eps = g->config.eps;
    op->mean = mean;
    op->rstd = rstd;
    op->dy = hand_matrix(g, GPT_NORM, g->d_norm, g->config.channels);
    op->dx = hand_stream(g, g->d_stream);
    op->dsum = op->dx;
}

/* The part q (0), k (1) or v (2) of a packed [batch, seq, 3, heads, dim] buffer. */
static inline amp_tensor hand_part_of_qkv(const hand_gpt *g, void *qkv, int64_t part) {
    int64_t C = g->config.channels, dim = C / g->config.heads;
    amp_dtype type = gpt_dtype(&g->config, GPT_ATTENTION);
    amp_tensor t = amp_tensor4((char *)qkv + part * C * (int64_t)amp_dtype_size(type), type, g->batch, g->seq,
                               g->config.heads, dim);
    t.stride[0] = g->seq * 3 * C; t.stride[1] = 3 * C; t.stride[2] = dim; t.stride[3] = 1;
    return t;
}

static inline void hand_bind_attention(hand_gpt *g, int64_t layer) {
    hand_block *b = &g->blocks[layer];
    amp_attention_op *op = &b->attention;
    amp_dtype type = gpt_dtype(&g->config, GPT_ATTENTION);
    int64_t dim = g->config.channels / g->config.heads;
    memset(op, 0, sizeof *op);
    if (g->config.unscaled || g->config.by_layer)
        op->scale =
            (float)((g->config.unscaled ? 1 : 1 / sqrt((double)dim)) / (g->config.by_layer ? (double)(layer + 1) : 1));
    op->q = hand_part_of_qkv(g, b->qkv, 0);  op->dq = hand_part_of_qkv(g, g->d_qkv, 0);
    op->k = hand_part_of_qkv(g, b->qkv, 1);  op->dk = hand_part_of_qkv(g, g->d_qkv, 1);
    op->v = hand_part_of_qkv(g, b->qkv, 2);  op->dv = hand_part_of_qkv(g, g->d_qkv, 2);
    op->o = amp_tensor4(b->heads, type, g->batch, g->seq, g->config.heads, dim);
    op->d_o = amp_tensor4(g->d_heads, type, g->batch, g->seq, g->config.heads, dim);
    op->lse = b->lse;
    op->mask.kind = AMP_MASK_CAUSAL;
}

/* Dropout in place on data; its gradient goes from d_stream to dx. */
static inline void hand_bind_dropout(hand_gpt *g, amp_dropout_op *op, amp_tensor data, void *dx) {
    memset(op, 0, sizeof *op);
    op->x = op->y = data;
    op->p = g->config.dropout;
    op->dy = hand_stream(g, g->d_stream);
    op->dx = hand_stream(g, dx);
}

static inline void hand_bind_block(hand_gpt *g, int64_t layer) {
    hand_block *b = &g->blocks[layer], *before = layer > 0 ? b - 1 : NULL;
    amp_param *p = g->params + 2 + GPT_PARTS * layer;
    amp_tensor branch = hand_matrix(g, GPT_BRANCH, g->branch, g->config.channels);
    amp_tensor d_branch = hand_stream(g, g->d_branch);
    hand_bind_norm(g, &b->ln_1, p, before ? before->middle : g->start, before ? before->end : NULL, b->norm_1,
                  b->mean_1, b->rstd_1);
    hand_bind_linear(g, &b->c_attn, p + 2, GPT_NORM, b->norm_1, GPT_ATTENTION, b->qkv, g->d_norm);
    b->c_attn.dy = hand_matrix(g, GPT_ATTENTION, g->d_qkv, 3 * g->config.channels);
    hand_bind_attention(g, layer);
    hand_bind_linear(g, &b->attn_proj, p + 4, GPT_ATTENTION, b->heads, GPT_BRANCH, g->branch, g->d_heads);
    b->attn_proj.dy = d_branch;
    hand_bind_dropout(g, &b->attn_drop, branch, g->d_branch);
    hand_bind_norm(g, &b->ln_2, p + 6, before ? before->end : g->start, b->middle, b->norm_2, b->mean_2, b->rstd_2);
    hand_bind_linear(g, &b->c_fc, p + 8, GPT_NORM, b->norm_2, GPT_MLP, b->fc_out, g->d_norm);
    b->c_fc.dy = hand_matrix(g, GPT_MLP, g->d_fc, 4 * g->config.channels);
    hand_bind_linear(g, &b->mlp_proj, p + 10, GPT_MLP, b->fc_out, GPT_BRANCH, g->branch, g->d_fc);
    b->mlp_proj.dy = d_branch;
    bind_activation(&b->act, g->config.act, &b->c_fc, &b->mlp_proj,
                    hand_matrix(g, GPT_MLP, b->fc_in, 4 * g->config.channels));
    hand_bind_dropout(g, &b->mlp_drop, branch, g->d_branch);
}

/* Sets every op for batch sequences of seq tokens.  Errors: AMP_ERR_RANGE, more than the model was created for. */
static inline amp_result hand_bind(hand_gpt *g, int64_t batch, int64_t seq) {
    const gpt_config *c = &g->config;
    hand_block *last = &g->blocks[c->layers - 1];
    int64_t layer;
    if (batch < 1 || seq < 1 || seq > c->seq || batch * seq > c->batch * c->seq)
        return ex_fail(AMP_ERR_RANGE, "a batch of %lld x %lld tokens, the model was created for %lld x %lld",
                            (long long)batch, (long long)seq, (long long)c->batch, (long long)c->seq);
    if (batch == g->batch && seq == g->seq) return AMP_OK;
    g->batch = batch; g->seq = seq; g->rows = batch * seq;
    memset(&g->embedding, 0, sizeof g->embedding);
    g->embedding.table = &g->params[0];
    g->embedding.positions = &g->params[1];
    g->embedding.seq = seq;
    g->embedding.y = hand_stream(g, g->start);
    g->embedding.dy = hand_stream(g, g->d_stream);
    hand_bind_dropout(g, &g->embedding_drop, hand_stream(g, g->start), g->d_stream);
    for (layer = 0; layer < c->layers; layer++) hand_bind_block(g, layer);
    hand_bind_norm(g, &g->ln_f, &g->params[g->n_params - 2], last->middle, last->end, g->norm_f, g->mean_f, g->rstd_f);
    memset(&g->ln_f.dsum, 0, sizeof g->ln_f.dsum);      /* the stream ends here */
    hand_bind_linear(g, &g->head, &g->params[0], GPT_NORM, g->norm_f, GPT_BRANCH, g->logits, g->d_norm);
    g->head.bias = NULL;
    g->head.y.dtype = gpt_dtype(&g->config, GPT_LOGITS);
    g->head.dy = g->head.y;                             /* the loss writes its gradient into the logits */
    return AMP_OK;
}

static inline void hand_destroy(hand_gpt *g) {
    if (g->amp != NULL) amp_free(g->amp, g->memory);
    free(g->blocks);
    memset(g, 0, sizeof *g);
}

/* For a model whose activations have a dtype of their own. */
static inline amp_result hand_create(hand_gpt *g, const gpt *model) {
    model_arena memory = {NULL, 0};
    amp_result result;
    memset(g, 0, sizeof *g);
    g->config = model->config;
    g->amp = model->amp;
    g->params = model->params; g->n_params = model->n_params;
    g->blocks = (hand_block *)calloc((size_t)g->config.layers, sizeof *g->blocks);
    if (g->blocks == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the model's tables");
    hand_place_activations(g, &memory);
    g->memory_bytes = memory.used;
    result = model_arena_allocate(g->amp, &memory);
    g->memory = memory.base;
    if (result == AMP_OK) hand_place_activations(g, &memory);
    if (result == AMP_OK) result = hand_bind(g, g->config.batch, g->config.seq);
    if (result != AMP_OK) hand_destroy(g);
    return result;
}

/* The MLP's first half. */
static inline amp_result hand_up(hand_gpt *g, hand_block *b) {
    EX_TRY(amp_linear(g->amp, &b->c_fc));
    return model_is_fused(g->config.act) ? AMP_OK : amp_activation(g->amp, &b->act);
}

/* Everything before the output weights. */
static inline amp_result hand_body(hand_gpt *g, const int32_t *ids, int64_t batch, int64_t seq) {
    amp_context *amp = g->amp;
    int drop = g->config.dropout > 0;
    int64_t layer;
    EX_TRY(hand_bind(g, batch, seq));
    g->embedding.ids = ids;
    EX_TRY(amp_embedding(amp, &g->embedding));
    if (drop) EX_TRY(amp_dropout(amp, &g->embedding_drop));
    for (layer = 0; layer < g->config.layers; layer++) {
        hand_block *b = &g->blocks[layer];
        EX_TRY(amp_layernorm(amp, &b->ln_1));
        EX_TRY(amp_linear(amp, &b->c_attn));
        EX_TRY(amp_attention(amp, &b->attention));
        EX_TRY(amp_linear(amp, &b->attn_proj));
        if (drop) EX_TRY(amp_dropout(amp, &b->attn_drop));
        EX_TRY(amp_layernorm(amp, &b->ln_2));
        EX_TRY(hand_up(g, b));
        EX_TRY(amp_linear(amp, &b->mlp_proj));
        if (drop) EX_TRY(amp_dropout(amp, &b->mlp_drop));
    }
    EX_TRY(amp_layernorm(amp, &g->ln_f));
    return AMP_OK;
}

/* The logits of `rows` rows from `first` on, into g->logits. */
static inline amp_result hand_head(hand_gpt *g, int64_t first, int64_t rows) {
    int64_t C = g->config.channels;
    amp_dtype type = gpt_dtype(&g->config, GPT_NORM);
    g->head.x = amp_tensor2((char *)g->norm_f + first * C * (int64_t)amp_dtype_size(type), type, rows, C);
    g->head.y = amp_tensor2(g->logits, gpt_dtype(&g->config, GPT_LOGITS), rows, g->config.vocab);
    EX_TRY(amp_linear(g->amp, &g->head));
    return AMP_OK;
}

/* Logits [batch * seq, vocab] of ids [batch, seq] (device memory), in g->logits. */
static inline amp_result hand_forward(hand_gpt *g, const int32_t *ids, int64_t batch, int64_t seq) {
    if (g->config.fused_loss) return ex_fail(AMP_ERR_STATE, "a model with a fused loss has no room for logits");
    EX_TRY(hand_body(g, ids, batch, seq));
    return hand_head(g, 0, g->rows);
}

/* The same loss of what hand_body left, without the logits; with backward also the gradients that the head's backward
   makes of them. */
static inline amp_result hand_fused_loss(hand_gpt *g, const int32_t *labels, int backward, const float *grad_scale) {
    amp_linear_cross_entropy_op *op = &g->fused;
    memset(op, 0, sizeof *op);
    op->x = hand_matrix(g, GPT_NORM, g->norm_f, g->config.channels);
    if (backward) op->dx = hand_matrix(g, GPT_NORM, g->d_norm, g->config.channels);
    op->weight = &g->params[0];
    op->labels = labels;
    op->grad_scale = grad_scale;
    op->loss = g->loss_value;
    op->logits = gpt_dtype(&g->config, GPT_LOGITS);
    EX_TRY(amp_linear_cross_entropy(g->amp, op));
    g->head.plan = op->plan;
    return AMP_OK;
}

/* The mean loss against labels [batch, seq], in g->loss_value.  With backward the logits become their
   gradient, starting from *grad_scale (see amp_scaler_scale_ptr; NULL: 1). */
static inline amp_result hand_loss(hand_gpt *g, const int32_t *labels, int backward, const float *grad_scale) {
    return mean_loss(g->amp, &g->loss, g->head.y, labels, g->loss_value, backward, grad_scale);
}

/* Forward and loss, by whichever of the two ways. */
static inline amp_result hand_forward_targets(hand_gpt *g, const int32_t *ids, const int32_t *labels, int64_t batch,
                                             int64_t seq, int backward, const float *grad_scale) {
    if (g->config.fused_loss) {
        EX_TRY(hand_body(g, ids, batch, seq));
        return hand_fused_loss(g, labels, backward, grad_scale);
    }
    EX_TRY(hand_forward(g, ids, batch, seq));
    return hand_loss(g, labels, backward, grad_scale);
}

/* The loss on the host.  Waits for the device. */
static inline amp_result hand_loss_read(hand_gpt *g, float *out) {
    EX_TRY(amp_copy(g->amp, out, g->loss_value, (int64_t)sizeof *out, AMP_COPY_TO_HOST));
    return amp_sync(g->amp);
}

/* Forward and loss of a batch in a region; with backward the logits become their gradient, from the scaler's scale
   (NULL: 1). */
static inline amp_result hand_forward_loss(hand_gpt *g, const amp_batch *batch, const float *grad_scale, int backward) {
    amp_autocast_desc region;
    amp_result result;
    memset(&region, 0, sizeof region);
    region.mode = backward ? AMP_MODE_TRAINING : AMP_MODE_INFERENCE;
    EX_TRY(amp_autocast_begin(g->amp, &region));
    result = hand_forward_targets(g, batch->inputs, batch->targets, batch->batch, batch->seq, backward, grad_scale);
    EX_TRY(amp_autocast_end(g->amp));
    return result;
}

/* Runs a block's forward again, as far as its backward needs.  Its input, the stream, was kept: ln_1 need not add to it
   again, and the last linear's result is not needed. */
static inline amp_result hand_recompute(hand_gpt *g, const hand_block *block) {
    hand_block b = *block;
    if (b.ln_1.sum.data != NULL) {
        b.ln_1.x = b.ln_1.sum;
        memset(&b.ln_1.residual, 0, sizeof b.ln_1.residual);
        memset(&b.ln_1.sum, 0, sizeof b.ln_1.sum);
    }
    EX_TRY(amp_layernorm(g->amp, &b.ln_1));
    EX_TRY(amp_linear(g->amp, &b.c_attn));
    EX_TRY(amp_attention(g->amp, &b.attention));
    EX_TRY(amp_linear(g->amp, &b.attn_proj));
    if (g->config.dropout > 0) EX_TRY(amp_dropout(g->amp, &b.attn_drop));
    EX_TRY(amp_layernorm(g->amp, &b.ln_2));
    return hand_up(g, &b);
}

/* Restores a block's activations, overwritten by another block's. */
static inline amp_result hand_recompute_block(hand_gpt *g, int64_t layer) {
    amp_result result;
    EX_TRY(amp_recompute_begin(g->amp));
    result = hand_recompute(g, &g->blocks[layer]);
    EX_TRY(amp_recompute_end(g->amp));
    return result;
}

static inline void hand_pass_low(hand_gpt *g, amp_norm_op *norm, amp_dropout_op *drop, amp_linear_op *linear) {
    pass_low(norm, g->config.dropout > 0 ? drop : NULL, linear, g->d_low);
}

/* On a backend with .sums, what writes the gradient of a layer's output also sums it for the layer's bias.  Dropout between
   the two writes it anew. */
static inline void hand_sum_biases(hand_gpt *g) {
    amp_desc desc;
    int64_t layer;
    if (amp_query(g->amp, &desc) != AMP_OK || !desc.backend->sums) return;
    for (layer = 0; layer < g->config.layers; layer++) {
        hand_block *b = &g->blocks[layer];
        b->attention.qkv_bias = b->c_attn.bias; b->c_attn.dy_summed = 1;
        if (g->config.dropout > 0) continue;
        b->ln_2.dx_bias = b->attn_proj.bias; b->attn_proj.dy_summed = 1;
        (layer + 1 < g->config.layers ? &b[1].ln_1 : &g->ln_f)->dx_bias = b->mlp_proj.bias; b->mlp_proj.dy_summed = 1;
    }
}

/* After hand_forward and hand_loss with backward: all gradients. */
static inline amp_result hand_backward(hand_gpt *g) {
    amp_context *amp = g->amp;
    int drop = g->config.dropout > 0;
    int64_t layer;
    if (!g->config.fused_loss) EX_TRY(amp_linear_backward(amp, &g->head));
    hand_sum_biases(g);
    for (layer = 0; layer < g->config.layers; layer++) {
        hand_block *b = &g->blocks[layer];
        hand_pass_low(g, &b->ln_2, &b->attn_drop, &b->attn_proj);
        hand_pass_low(g, layer + 1 < g->config.layers ? &b[1].ln_1 : &g->ln_f, &b->mlp_drop, &b->mlp_proj);
    }
    EX_TRY(amp_layernorm_backward(amp, &g->ln_f));
    for (layer = g->config.layers - 1; layer >= 0; layer--) {
        hand_block *b = &g->blocks[layer];
        if (g->config.recompute && layer < g->config.layers - 1)        /* the last block's still exist */
            EX_TRY(hand_recompute_block(g, layer));
        if (drop) EX_TRY(amp_dropout_backward(amp, &b->mlp_drop));
        EX_TRY(amp_linear_backward(amp, &b->mlp_proj));
        if (!model_is_fused(g->config.act))
            EX_TRY(amp_activation_backward(amp, &b->act));
        EX_TRY(amp_linear_backward(amp, &b->c_fc));
        EX_TRY(amp_layernorm_backward(amp, &b->ln_2));
        if (drop) EX_TRY(amp_dropout_backward(amp, &b->attn_drop));
        EX_TRY(amp_linear_backward(amp, &b->attn_proj));
        EX_TRY(amp_attention_backward(amp, &b->attention));
        EX_TRY(amp_linear_backward(amp, &b->c_attn));
        EX_TRY(amp_layernorm_backward(amp, &b->ln_1));
    }
    if (drop) EX_TRY(amp_dropout_backward(amp, &g->embedding_drop));
    EX_TRY(amp_embedding_backward(amp, &g->embedding));
    return AMP_OK;
}

#endif
