/* t_recompute.c - tests recomputing, which runs forwards again during backward.  Every operator must repeat its recorded
 * plan, wherever it runs.  GPT-2 must train to the same bits with and without recomputing.  Other tests cover the cast
 * cache, threads, nesting, and invalid calls. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "../examples/gpt_files.h"
#include "golden.h"
#include "test.h"
#include "recording_backend.h"
#include <pthread.h>

static amp_context *open_context(amp_dtype dtype, const amp_backend *backend) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    desc.backend = backend;
    desc.seed = 11;
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}

/* A region of this dtype, everything else inherited. */
static void begin(amp_context *amp, amp_dtype dtype) {
    amp_autocast_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    CHECK_OK(amp_autocast_begin(amp, &desc));
}
static void begin_island(amp_context *amp) {
    amp_autocast_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.disable = 1;
    CHECK_OK(amp_autocast_begin(amp, &desc));
}
static void begin_inference(amp_context *amp) {
    amp_autocast_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mode = AMP_MODE_INFERENCE;
    CHECK_OK(amp_autocast_begin(amp, &desc));
}
static void end(amp_context *amp) { CHECK_OK(amp_autocast_end(amp)); }

static int64_t random_offset(const amp_context *amp) {
    amp_state *state = NULL;
    int64_t values[2] = {0, -1};
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_random_save(amp, state, "a"));
    CHECK_OK(amp_state_get(state, "a.random", AMP_I64, values, 2));
    amp_state_destroy(state);
    return values[1];
}

/* ---- Every operator.  Inputs and parameters lie in `in`, everything a forward writes in `out`. */

enum { BATCH = 2, SEQ = 7, HEADS = 2, DIM = 12, C = HEADS * DIM, ROWS = BATCH * SEQ, HIDDEN = 19, VOCAB = 23, ROOM = 1 << 13 };

static float in[ROOM], out[ROOM];
static int64_t in_used, out_used;
static int32_t ids[ROWS];
static amp_param weight, bias, norm_weight, norm_bias, table, positions;
static amp_context *amp;

static struct {
    amp_linear_op linear;
    amp_matmul_op matmul;
    amp_attention_op attention;
    amp_norm_op layernorm, rmsnorm;
    amp_softmax_op softmax;
    amp_activation_op activation;
    amp_swiglu_op swiglu;
    amp_cross_entropy_op cross_entropy;
    amp_mse_op mse;
    amp_embedding_op embedding;
    amp_dropout_op dropout;
    amp_rope_op rope;
} ops;

static amp_result run_linear(void) { return amp_linear(amp, &ops.linear); }
static amp_result run_matmul(void) { return amp_matmul(amp, &ops.matmul); }
static amp_result run_attention(void) { return amp_attention(amp, &ops.attention); }
static amp_result run_layernorm(void) { return amp_layernorm(amp, &ops.layernorm); }
static amp_result run_rmsnorm(void) { return amp_rmsnorm(amp, &ops.rmsnorm); }
static amp_result run_softmax(void) { return amp_softmax(amp, &ops.softmax); }
static amp_result run_activation(void) { return amp_activation(amp, &ops.activation); }
static amp_result run_swiglu(void) { return amp_swiglu(amp, &ops.swiglu); }
static amp_result run_cross_entropy(void) { return amp_cross_entropy(amp, &ops.cross_entropy); }
static amp_result run_mse(void) { return amp_mse(amp, &ops.mse); }
static amp_result run_embedding(void) { return amp_embedding(amp, &ops.embedding); }
static amp_result run_dropout(void) { return amp_dropout(amp, &ops.dropout); }
/* In place: what it turns is written before each run, as by the layer before it, and taken back if it does not. */
static amp_result run_rope(void) {
    static float before[2 * ROWS * C];
    float *q = (float *)ops.rope.q.data;            /* k follows it */
    amp_result result;
    memcpy(before, q, sizeof before);
    memcpy(q, ops.attention.q.data, sizeof before / 2);
    memcpy(ops.rope.k.data, ops.attention.k.data, sizeof before / 2);
    result = amp_rope(amp, &ops.rope);
    if (result != AMP_OK) memcpy(q, before, sizeof before);
    return result;
}

/* depends 1: the region, or the state of the random numbers, shows in the output's bits. */
static const struct op_case { const char *name; amp_result (*run)(void); amp_plan *plan; int depends; } cases[] = {
    {"amp_linear", run_linear, &ops.linear.plan, 1},
    {"amp_matmul", run_matmul, &ops.matmul.plan, 1},
    {"amp_attention", run_attention, &ops.attention.plan, 1},
    {"amp_layernorm", run_layernorm, &ops.layernorm.plan, 0},
    {"amp_rmsnorm", run_rmsnorm, &ops.rmsnorm.plan, 0},
    {"amp_softmax", run_softmax, &ops.softmax.plan, 0},
    {"amp_activation", run_activation, &ops.activation.plan, 0},
    {"amp_swiglu", run_swiglu, &ops.swiglu.plan, 0},
    {"amp_cross_entropy", run_cross_entropy, &ops.cross_entropy.plan, 0},
    {"amp_mse", run_mse, &ops.mse.plan, 0},
    {"amp_embedding", run_embedding, &ops.embedding.plan, 0},
    {"amp_dropout", run_dropout, &ops.dropout.plan, 1},
    {"amp_rope", run_rope, &ops.rope.plan, 0},
};
enum { CASES = sizeof cases / sizeof *cases };

static float *take(float *from, int64_t *used, int64_t n) {
    float *p = from + *used;
    *used += n;
    if (*used > ROOM) exit(2);
    return p;
}
static amp_tensor input(int64_t rows, int64_t cols) { return amp_tensor2(take(in, &in_used, rows * cols), AMP_F32, rows, cols); }
static amp_tensor output(int64_t rows, int64_t cols) { return amp_tensor2(take(out, &out_used, rows * cols), AMP_F32, rows, cols); }
static float *output_row(int64_t n) { return take(out, &out_used, n); }

static amp_param make_param(const char *name, int64_t rows, int64_t cols) {
    amp_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.weight = input(rows, cols);
    if (cols == 1) p.weight = amp_tensor1(p.weight.data, AMP_F32, rows);
    return p;
}

static amp_tensor heads_of(amp_tensor t) { return amp_tensor4(t.data, AMP_F32, BATCH, SEQ, HEADS, DIM); }

static void set_norm(amp_norm_op *op, int rms) {
    op->x = input(ROWS, C); op->residual = input(ROWS, C);
    op->sum = output(ROWS, C); op->y = output(ROWS, C);
    op->weight = &norm_weight;
    if (!rms) { op->bias = &norm_bias; op->mean = output_row(ROWS); }
    op->rstd = output_row(ROWS);
}

static void set_losses(void) {
    ops.cross_entropy.logits = input(ROWS, VOCAB); ops.cross_entropy.dlogits = output(ROWS, VOCAB);
    ops.cross_entropy.labels = ids; ops.cross_entropy.loss = output_row(1);
    ops.mse.x = input(ROWS, C); ops.mse.target = input(ROWS, C); ops.mse.dx = output(ROWS, C);
    ops.mse.loss = output_row(1);
}

/* Zeroed ops over fresh tensors. */
static void set_ops(void) {
    memset(&ops, 0, sizeof ops);
    in_used = out_used = 0;
    weight = make_param("weight", HIDDEN, C); bias = make_param("bias", HIDDEN, 1);
    norm_weight = make_param("norm.weight", C, 1); norm_bias = make_param("norm.bias", C, 1);
    table = make_param("table", VOCAB, C); positions = make_param("positions", SEQ, C);
    ops.linear.x = input(ROWS, C); ops.linear.y = output(ROWS, HIDDEN); ops.linear.pre = output(ROWS, HIDDEN);
    ops.linear.weight = &weight; ops.linear.bias = &bias; ops.linear.act = AMP_ACT_GELU;
    ops.matmul.a = input(ROWS, C); ops.matmul.b = input(HIDDEN, C); ops.matmul.y = output(ROWS, HIDDEN);
    ops.matmul.trans_b = 1;
    ops.attention.q = heads_of(input(ROWS, C)); ops.attention.k = heads_of(input(ROWS, C));
    ops.attention.v = heads_of(input(ROWS, C)); ops.attention.o = heads_of(output(ROWS, C));
    ops.attention.lse = output_row(ROWS * HEADS); ops.attention.mask.kind = AMP_MASK_CAUSAL;
    set_norm(&ops.layernorm, 0);
    set_norm(&ops.rmsnorm, 1);
    ops.softmax.x = input(ROWS, C); ops.softmax.y = output(ROWS, C);
    ops.activation.x = input(ROWS, C); ops.activation.y = output(ROWS, C); ops.activation.act = AMP_ACT_GELU;
    ops.swiglu.gate = input(ROWS, C); ops.swiglu.up = input(ROWS, C); ops.swiglu.y = output(ROWS, C);
    set_losses();
    ops.embedding.ids = ids; ops.embedding.table = &table; ops.embedding.positions = &positions;
    ops.embedding.seq = SEQ; ops.embedding.y = output(ROWS, C);
    ops.dropout.x = input(ROWS, C); ops.dropout.y = output(ROWS, C); ops.dropout.p = 0.3f;
    ops.rope.q = heads_of(output(ROWS, C)); ops.rope.k = heads_of(output(ROWS, C));
    ampt_uniform(in, in_used, 5, 0, 1, 0);
    ampt_integers(ids, ROWS, 5, 1, VOCAB);
}

/* Opens the region that a forward runs again in; what must be closed again afterwards is returned. */
enum { OUTSIDE, OTHER_DTYPE, ISLAND, INFERENCE, SWITCHED, OVERRIDDEN, NESTED, PLACES };
static int enter(int place, amp_dtype other) {
    switch (place) {
        case OTHER_DTYPE: begin(amp, other); return 1;
        case ISLAND: begin_island(amp); return 1;
        case INFERENCE: begin_inference(amp); return 1;
        case SWITCHED: CHECK_OK(amp_set_dtype(amp, other)); begin(amp, AMP_DTYPE_DEFAULT); return 1;
        case OVERRIDDEN:
            CHECK_OK(amp_layer_override(amp, "*", other));
            for (int32_t op = AMP_OP_LINEAR; op < AMPI_BUILTIN_OPS; op++)
                CHECK_OK(amp_operator_override(amp, op, op % 2 ? AMP_CAST_BANNED : AMP_CAST_FP32));
            begin(amp, other);
            return 1;
        default: return 0;
    }
}
static void leave(int open) {
    if (open) end(amp);
    CHECK_OK(amp_layer_override(amp, "*", AMP_DTYPE_DEFAULT));
    for (int32_t op = AMP_OP_LINEAR; op < AMPI_BUILTIN_OPS; op++) CHECK_OK(amp_operator_override(amp, op, AMP_CAST_DEFAULT));
}

/* The forward again, in this place, over outputs that hold something else. */
static void run_again(const struct op_case *c, int place, amp_dtype other) {
    int open = enter(place, other);
    for (int64_t i = 0; i < out_used; i++) out[i] = (float)place - 1000;
    CHECK_OK(amp_recompute_begin(amp));
    if (place == NESTED) {
        CHECK_OK(amp_recompute_begin(amp));
        begin(amp, other);
    }
    CHECK_OK(c->run());
    if (place == NESTED) {
        end(amp);
        CHECK_OK(amp_recompute_end(amp));
    }
    CHECK_OK(amp_recompute_end(amp));
    leave(open);
}

static void every_operator(amp_dtype dtype, const amp_backend *backend) {
    static float first[ROOM], again[ROOM];
    amp_dtype other = dtype == AMP_BF16 ? AMP_F32 : AMP_BF16;
    amp = open_context(dtype, backend);
    for (int i = 0; i < CASES; i++) {
        const struct op_case *c = &cases[i];
        amp_plan plan;
        int64_t offset;
        set_ops();
        memset(out, 0, sizeof out);
        begin(amp, dtype);
        CHECK_OK(c->run());
        end(amp);
        plan = *c->plan;
        offset = random_offset(amp);
        memcpy(first, out, sizeof first);
        for (int place = OUTSIDE; place < PLACES; place++) {
            run_again(c, place, other);
            memcpy(again, out, sizeof again);
            for (int64_t k = 0; k < out_used; k++)
                if (again[k] == (float)place - 1000) again[k] = 0;          /* not this operator's */
            CHECK_MSG(memcmp(first, again, sizeof first) == 0, "%s in %s, place %d: other bits", c->name, amp_dtype_name(dtype), place);
            CHECK_MSG(memcmp(&plan, c->plan, sizeof plan) == 0, "%s: the plan has changed", c->name);
            CHECK_EQ(random_offset(amp), offset);
        }
        memset(out, 0, sizeof out);
        begin(amp, other);
        CHECK_OK(c->run());                         /* a new forward: decided here, with new random numbers */
        end(amp);
        CHECK_MSG(!c->depends || memcmp(first, out, sizeof first) != 0, "%s: the region does not matter", c->name);
        CHECK_EQ(random_offset(amp), offset + (c->run == run_dropout ? ROWS * C : 0));
        CHECK_OK(amp_set_dtype(amp, dtype));
    }
    amp_close(amp);
}

TEST(every_operator_repeats_its_forward) {
    static const amp_dtype all[] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
    for (int d = 0; d < 4; d++) {
        every_operator(all[d], NULL);
        every_operator(all[d], recording_backend());
    }
}

/* ---- What is refused: by name, and nothing is written */

static void check_refused(const struct op_case *c, const char *why) {
    static float before[ROOM];
    amp_plan plan = *c->plan;
    memcpy(before, out, sizeof before);
    CHECK_OK(amp_recompute_begin(amp));
    CHECK_ERR(c->run(), AMP_ERR_STATE);
    CHECK_MSG(strstr(amp_last_error(), c->name) != NULL && strstr(amp_last_error(), why) != NULL, "%s", amp_last_error());
    CHECK_OK(amp_recompute_end(amp));
    CHECK(memcmp(before, out, sizeof before) == 0);
    CHECK(memcmp(&plan, c->plan, sizeof plan) == 0);
}

TEST(without_a_usable_plan_it_is_refused) {
    amp = open_context(AMP_BF16, NULL);
    set_ops();
    for (int i = 0; i < CASES; i++) {
        check_refused(&cases[i], "has not run");
        begin_inference(amp);
        CHECK_OK(cases[i].run());
        end(amp);
        check_refused(&cases[i], "inference");
    }
    amp_close(amp);
}

/* Each parameter of an operator counts. */
TEST(changed_parameters_are_refused) {
    static const struct { int op; amp_param *param; } changed[] = {
        {0, &weight}, {0, &bias}, {3, &norm_weight}, {3, &norm_bias}, {4, &norm_weight}, {10, &table}, {10, &positions}};
    amp = open_context(AMP_BF16, NULL);
    for (size_t i = 0; i < sizeof changed / sizeof *changed; i++) {
        const struct op_case *c = &cases[changed[i].op];
        set_ops();
        CHECK_OK(c->run());
        run_again(c, OUTSIDE, AMP_F32);
        amp_param_changed(changed[i].param);
        check_refused(c, "has changed since");
        CHECK_OK(c->run());
        run_again(c, OUTSIDE, AMP_F32);
    }
    amp_close(amp);
}

TEST(an_optimizer_step_changes_parameters) {
    static float dw[HIDDEN * C];
    amp_optimizer *optimizer = NULL;
    amp_optimizer_desc od;
    amp = open_context(AMP_BF16, NULL);
    set_ops();
    weight.grad = amp_tensor2(dw, AMP_F32, HIDDEN, C);
    CHECK_OK(amp_param_register(amp, &weight, 1));
    memset(&od, 0, sizeof od);
    od.params = &weight; od.n_params = 1; od.accumulation = 2;
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &od));
    CHECK_OK(run_linear());
    amp_param_accumulate(&weight);
    CHECK_OK(amp_step(optimizer, NULL));            /* the first of two micro-batches: no step yet */
    run_again(&cases[0], OUTSIDE, AMP_F32);
    CHECK_OK(amp_step(optimizer, NULL));
    check_refused(&cases[0], "weight has changed since");
    amp_optimizer_destroy(optimizer);
    amp_param_forget(amp, &weight, 1);
    amp_close(amp);
}

TEST(begin_and_end_must_match) {
    amp_context *other = open_context(AMP_F32, NULL);
    int depth = 0;
    amp = open_context(AMP_BF16, NULL);
    CHECK_ERR(amp_recompute_begin(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_recompute_end(amp), AMP_ERR_STATE);
    begin(amp, AMP_BF16);
    CHECK_ERR(amp_recompute_end(amp), AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "amp_autocast_begin") != NULL);
    CHECK_OK(amp_recompute_begin(amp));
    CHECK_ERR(amp_autocast_end(amp), AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "amp_recompute_begin") != NULL);
    CHECK_ERR(amp_recompute_end(other), AMP_ERR_STATE);
    CHECK_OK(amp_recompute_end(amp));
    end(amp);
    while (depth < 100 && amp_recompute_begin(amp) == AMP_OK) depth++;
    CHECK_EQ(depth, 32);
    CHECK_ERR(amp_recompute_begin(amp), AMP_ERR_STATE);
    CHECK_ERR(amp_autocast_begin(amp, NULL), AMP_ERR_STATE);
    while (depth-- > 0) CHECK_OK(amp_recompute_end(amp));
    CHECK_ERR(amp_recompute_end(amp), AMP_ERR_STATE);
    amp_close(amp);
    amp_close(other);
}

/* Another context, and another thread, go on deciding for themselves. */
static void *decide_elsewhere(void *wrong) {
    CHECK_ERR(amp_recompute_end(amp), AMP_ERR_STATE);
    begin(amp, AMP_F16);
    *(int *)wrong += run_linear() != AMP_OK || ops.linear.plan.compute != AMP_F16;
    end(amp);
    return NULL;
}

TEST(threads_and_contexts_keep_apart) {
    amp_context *mine = open_context(AMP_BF16, NULL), *other = open_context(AMP_F16, NULL);
    pthread_t thread;
    int wrong = 0;
    set_ops();
    CHECK_OK(amp_recompute_begin(other));
    amp = mine;
    CHECK_OK(run_linear());                         /* of this context nothing is recomputed */
    CHECK_EQ(ops.linear.plan.compute, AMP_F32);
    amp = other;
    if (pthread_create(&thread, NULL, decide_elsewhere, &wrong) != 0) exit(2);
    pthread_join(thread, NULL);
    CHECK_EQ(wrong, 0);
    CHECK_OK(run_linear());
    CHECK_EQ(ops.linear.plan.compute, AMP_F16);
    CHECK_OK(amp_recompute_end(other));
    amp_close(mine);
    amp_close(other);
}

/* ---- What keeps no record: the BLAS-shaped entry and a host's own kernels ask their region, opened again */

static amp_result sgemm(float *c) {
    return amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, ROWS, HIDDEN, C, 1, (const float *)ops.matmul.a.data, C,
                    (const float *)ops.matmul.b.data, C, 0, c, HIDDEN);
}

TEST(without_a_record_the_region_is_opened_again) {
    static float first[ROWS * HIDDEN], again[ROWS * HIDDEN];
    amp_plan plan;
    amp = open_context(AMP_BF16, NULL);
    set_ops();
    begin(amp, AMP_F16);
    CHECK_OK(sgemm(first));
    CHECK_OK(amp_recompute_begin(amp));             /* the region around it may be another one */
    memset(again, 0, sizeof again);
    CHECK_ERR(sgemm(again), AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "gemm") != NULL && again[0] == 0);
    CHECK_ERR(amp_autocast_decide(amp, AMP_OP_LINEAR, NULL, NULL, 0, &plan), AMP_ERR_STATE);
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32), AMP_DTYPE_DEFAULT);
    begin(amp, AMP_F16);
    CHECK_OK(sgemm(again));
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32), AMP_F16);
    end(amp);
    CHECK_OK(amp_recompute_end(amp));
    end(amp);
    CHECK(memcmp(first, again, sizeof first) == 0);
    amp_close(amp);
}

/* A region within inherits what it would have inherited without. */
TEST(settings_are_inherited_through) {
    amp_autocast_desc desc, got;
    amp = open_context(AMP_BF16, NULL);
    CHECK_OK(amp_recompute_begin(amp));
    CHECK_EQ(amp_autocast_active(amp, NULL), 0);
    CHECK_OK(amp_recompute_end(amp));
    memset(&desc, 0, sizeof desc);
    desc.policy = AMP_POLICY_TORCH;
    desc.mode = AMP_MODE_INFERENCE;
    CHECK_OK(amp_autocast_begin(amp, &desc));
    CHECK_OK(amp_recompute_begin(amp));
    CHECK_EQ(amp_autocast_active(amp, NULL), 1);
    begin(amp, AMP_F16);
    CHECK_EQ(amp_autocast_active(amp, &got), 1);
    CHECK(got.policy == AMP_POLICY_TORCH && got.mode == AMP_MODE_INFERENCE && got.dtype == AMP_F16);
    end(amp);
    CHECK_OK(amp_recompute_end(amp));
    end(amp);
    CHECK_OK(amp_recompute_begin(amp));
    begin(amp, AMP_DTYPE_DEFAULT);
    CHECK_EQ(amp_autocast_active(amp, &got), 1);
    CHECK(got.policy == AMP_POLICY_FUSED && got.mode == AMP_MODE_TRAINING && got.dtype == AMP_BF16);
    end(amp);
    CHECK_OK(amp_recompute_end(amp));
    amp_close(amp);
}

/* ---- The cast cache: no copy is made for the last use of a weight, one that is there is used */

TEST(the_cache_gives_and_does_not_grow) {
    amp_cache_info info;
    amp = open_context(AMP_BF16, NULL);
    set_ops();
    CHECK_OK(amp_param_register(amp, &weight, 1));
    for (int uses = 1; uses < 4; uses++) {
        amp_param_changed(&weight);
        begin(amp, AMP_BF16);
        for (int i = 0; i < uses; i++) CHECK_OK(run_linear());
        end(amp);
        for (int i = 0; i < 2; i++) {
            run_again(&cases[0], OUTSIDE, AMP_F32);
            CHECK_OK(amp_cast_cache_info(amp, &info));
            CHECK_EQ(info.entries, uses > 1);
            CHECK_EQ(info.misses, uses - 1);        /* one copy of each version that was multiplied by twice */
        }
    }
    CHECK_EQ(info.hits, 0 + 2 + 3);                 /* by recomputing twice, and a third forward */
    amp_param_forget(amp, &weight, 1);
    amp_close(amp);
}

/* ---- A failing device: the plan stays what it was, and the forward can be run again after all */

TEST(a_failing_kernel_changes_no_plan) {
    amp = open_context(AMP_BF16, recording_backend());
    for (int i = 0; i < CASES; i++) {
        amp_plan plan;
        set_ops();
        CHECK_OK(cases[i].run());
        plan = *cases[i].plan;
        CHECK_OK(amp_recompute_begin(amp));
        recording.fail_at = 1;
        CHECK_ERR(cases[i].run(), AMP_ERR_DEVICE);
        CHECK_OK(cases[i].run());
        CHECK_OK(amp_recompute_end(amp));
        CHECK(memcmp(&plan, cases[i].plan, sizeof plan) == 0);
    }
    amp_close(amp);
}

/* ---- GPT-2: losses, gradients, weights and the scale, byte for byte, with all activations and with one block's */

typedef struct training {
    amp_dtype dtype;
    amp_level level;
    amp_cpu_path path;
    float dropout, first_scale;     /* 0: no scaler */
    int32_t accumulation, in_region;    /* in_region: backward runs in a region of another dtype */
    int32_t disable_cache, threads;
    int64_t cache_limit;
} training;

typedef struct trace { char *bytes; size_t n, room; } trace;

static void trace_add(trace *t, const void *data, size_t n) {
    if (t->n + n > t->room) t->bytes = (char *)realloc(t->bytes, t->room = 2 * (t->n + n));
    if (t->bytes == NULL) exit(2);
    memcpy(t->bytes + t->n, data, n);
    t->n += n;
}

static void train_micro(gpt *g, const training *how, const amp_scaler *scaler, int32_t *tokens, trace *t) {
    float loss = 0;
    const amp_batch batch = {.inputs = tokens, .targets = tokens + 1, .batch = g->config.batch, .seq = g->config.seq};
    CHECK_OK(gpt_forward_loss(g, &batch, amp_scaler_scale_ptr(scaler), 1));
    if (how->in_region) begin(amp, how->dtype == AMP_F32 ? AMP_BF16 : AMP_F32);
    CHECK_OK(gpt_backward(g));
    if (how->in_region) end(amp);
    CHECK_OK(gpt_loss_read(g, &loss));
    trace_add(t, &loss, sizeof loss);
    for (int64_t i = 0; i < g->n_params; i++)
        trace_add(t, g->params[i].grad.data, (size_t)amp_tensor_count(&g->params[i].grad) * amp_dtype_size(g->params[i].grad.dtype));
}

static void train_steps(gpt *g, const training *how, trace *t) {
    enum { STEPS = 3, TOKENS = 3 * 13 + 1 };
    int32_t tokens[TOKENS];
    amp_optimizer *optimizer = NULL;
    amp_scaler *scaler = NULL;
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd);
    od.params = g->params; od.n_params = g->n_params; od.lr = 1e-2; od.clip_norm = 1; od.accumulation = how->accumulation;
    sd.init_scale = how->first_scale;
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &od));
    if (how->first_scale > 0) CHECK_OK(amp_scaler_create(amp, &scaler, &sd));
    for (int32_t i = 0; i < STEPS * how->accumulation; i++) {
        float scale;
        ampt_integers(tokens, TOKENS, 3, (uint32_t)i, (int32_t)g->config.vocab);
        train_micro(g, how, scaler, tokens, t);
        CHECK_OK(amp_step(optimizer, scaler));
        scale = amp_scaler_scale(scaler);
        trace_add(t, &scale, sizeof scale);
    }
    for (int64_t i = 0; i < g->n_params; i++)
        trace_add(t, g->params[i].weight.data, (size_t)amp_tensor_count(&g->params[i].weight) * amp_dtype_size(g->params[i].weight.dtype));
    amp_optimizer_destroy(optimizer);
    amp_scaler_destroy(scaler);
}

/* Returns the most memory it took. */
static int64_t train_traced(const training *how, int recompute, trace *t) {
    gpt_config config = {61, 13, 20, 4, 4, 3, 13, AMP_F32, {AMP_DTYPE_DEFAULT}, AMP_DTYPE_DEFAULT, 0, 0, AMP_ACT_NONE, 0, 0, 0, 0};
    amp_memory_info memory;
    amp_desc desc;
    int64_t offset;
    gpt g;
    memset(&desc, 0, sizeof desc); memset(&memory, 0, sizeof memory);
    desc.dtype = how->dtype; desc.level = how->level; desc.cpu_path = how->path; desc.seed = 4;
    desc.disable_cache = how->disable_cache; desc.threads = how->threads; desc.cache_limit = how->cache_limit;
    CHECK_OK(amp_open(&amp, &desc));
    config.activations = how->dtype == AMP_TF32 ? AMP_F32 : how->dtype;
    config.dropout = how->dropout;
    config.recompute = recompute;
    CHECK_OK(gpt_create(&g, amp, &config));
    CHECK_OK(gpt_init(&g, 9));
    train_steps(&g, how, t);
    offset = random_offset(amp);
    trace_add(t, &offset, sizeof offset);
    CHECK_OK(amp_memory(amp, &memory));
    gpt_destroy(&g);
    amp_close(amp);
    return memory.peak;
}

static void check_training(const training *how) {
    trace kept = {NULL, 0, 0}, again = {NULL, 0, 0};
    int64_t most = train_traced(how, 0, &kept), less = train_traced(how, 1, &again);
    CHECK_EQ(kept.n, again.n);
    CHECK_MSG(kept.n == again.n && memcmp(kept.bytes, again.bytes, kept.n) == 0,
              "%s, level %d, path %d, dropout %g, accumulation %d, in a region %d: other bits", amp_dtype_name(how->dtype),
              (int)how->level, (int)how->path, (double)how->dropout, (int)how->accumulation, (int)how->in_region);
    CHECK_MSG(less < most, "%lld bytes with recomputing, %lld without", (long long)less, (long long)most);
    free(kept.bytes);
    free(again.bytes);
}

static training usual(amp_dtype dtype) {
    training how;
    memset(&how, 0, sizeof how);
    how.dtype = dtype;
    how.accumulation = 3;
    how.dropout = 0.1f;
    how.threads = 2;
    if (dtype == AMP_F16) how.first_scale = 1024;
    return how;
}

TEST(training_has_the_same_bits) {
    static const amp_dtype all[] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
    amp_machine machine;
    CHECK_OK(amp_machine_probe(&machine));
    for (int d = 0; d < 4; d++) {
        for (int path = AMP_CPU_SCALAR; path <= (int)machine.cpu.path; path = AMPT_NEXT_PATH(path)) {
            training how = usual(all[d]);
            how.path = (amp_cpu_path)path;
            check_training(&how);
        }
        for (int variant = 0; variant < 5; variant++) {
            training how = usual(all[d]);
            if (variant == 0) how.dropout = 0, how.accumulation = 1;
            if (variant == 1) how.in_region = 1;
            if (variant == 2) how.disable_cache = 1;
            if (variant == 3) how.cache_limit = 4000;
            if (variant == 4) how.threads = 1, how.first_scale = 8589934592.0f;         /* every step overflows */
            check_training(&how);
        }
    }
}

TEST(levels_have_the_same_bits) {
    for (int level = AMP_LEVEL_O0; level <= AMP_LEVEL_O3; level++) {
        training how = usual(level == AMP_LEVEL_O0 ? AMP_F32 : AMP_BF16);
        how.level = (amp_level)level;
        check_training(&how);
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(every_operator_repeats_its_forward);
    RUN(without_a_usable_plan_it_is_refused);
    RUN(changed_parameters_are_refused);
    RUN(an_optimizer_step_changes_parameters);
    RUN(begin_and_end_must_match);
    RUN(threads_and_contexts_keep_apart);
    RUN(without_a_record_the_region_is_opened_again);
    RUN(settings_are_inherited_through);
    RUN(the_cache_gives_and_does_not_grow);
    RUN(a_failing_kernel_changes_no_plan);
    RUN(training_has_the_same_bits);
    RUN(levels_have_the_same_bits);
    return TEST_END();
}
