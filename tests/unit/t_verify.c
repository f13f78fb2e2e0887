/* t_verify.c - tests amp_verify, amp_gradcheck and placement.  Correct models must pass amp_verify, and errors in broken
 * ones must be found by name.  Training must continue as if amp_verify had not been called.  amp_gradcheck is tested on
 * correct and wrong operators.
 *
 *     gcc -O2 -Itests tests/unit/t_verify.c -o t_verify -lm -lpthread && ./t_verify      (from the project root) */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#define AMPT_TRAPS
#include "test.h"
#include "recording_backend.h"
#include <math.h>

/* ---- A model: embedding, linear with GELU, dropout, layer norm, attention, linear, cross-entropy */

enum { VERIFY_BATCH = 4, VERIFY_SEQ = 8, VERIFY_ROWS = VERIFY_BATCH * VERIFY_SEQ, DIM = 32, HEADS = 2, VERIFY_WIDE = 64, VOCAB = 50, VERIFY_PARAMS = 14 };
enum { BREAK_NOTHING, BREAK_BITS, BREAK_GRADIENT, BREAK_OVERFLOW, BREAK_FAIL, BREAK_NAN, BREAK_REGION, BREAK_LOST };

typedef struct verify_model {
    amp_context *amp;
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    amp_param params[VERIFY_PARAMS];
    float weights[VERIFY_PARAMS][VERIFY_WIDE * VERIFY_WIDE], grads[VERIFY_PARAMS][VERIFY_WIDE * VERIFY_WIDE];
    float act[24][VERIFY_ROWS * VERIFY_WIDE];
    float logits[VERIFY_ROWS * VOCAB], loss, lse[VERIFY_BATCH * HEADS * VERIFY_SEQ], mean[VERIFY_ROWS], rstd[VERIFY_ROWS];
    int32_t ids[VERIFY_ROWS], labels[VERIFY_ROWS];
    int broken, always;             /* in precisions below tf32; always 1: in all */
    int steps;                      /* 1: the step steps the optimizer; 2: it has arrays of its own unscaled, and saves its set */
    int calls;
    float dropout;
} verify_model;
static verify_model a_model;
static int accumulation = 1;

enum { TABLE, FC_W, FC_B, LN_W, LN_B, Q_W, K_W, V_W, Q_B, K_B, V_B, OUT_W, OUT_B, FROZEN };
static const struct { const char *name; int64_t rows, cols; float size; } verify_shapes[VERIFY_PARAMS] = {
    {"table", VOCAB, DIM, 1}, {"fc.weight", VERIFY_WIDE, DIM, 0.2f}, {"fc.bias", VERIFY_WIDE, 0, 0.1f},
    {"ln.weight", VERIFY_WIDE, 0, 0}, {"ln.bias", VERIFY_WIDE, 0, 0.1f}, {"wq", VERIFY_WIDE, VERIFY_WIDE, 0.3f}, {"wk", VERIFY_WIDE, VERIFY_WIDE, 0.3f},
    {"wv", VERIFY_WIDE, VERIFY_WIDE, 0.15f}, {"bq", VERIFY_WIDE, 0, 0.1f}, {"bk", VERIFY_WIDE, 0, 0.1f}, {"bv", VERIFY_WIDE, 0, 0.1f},
    {"head.weight", VOCAB, VERIFY_WIDE, 0.2f}, {"head.bias", VOCAB, 0, 0}, {"frozen", DIM, 0, 1}
};

static void fill_model(verify_model *m, amp_context *amp, uint64_t seed) {
    amp_dtype stored = amp_param_dtype(amp, 0);
    int64_t i, k;
    memset(m, 0, sizeof *m);
    m->amp = amp;
    m->dropout = 0.1f;
    for (i = 0; i < VERIFY_PARAMS; i++) {
        amp_param *p = &m->params[i];
        int64_t rows = verify_shapes[i].rows, cols = verify_shapes[i].cols, n = rows * (cols ? cols : 1);
        amp_dtype dtype = i == LN_W || i == LN_B ? AMP_F32 : stored;
        static float w[VERIFY_WIDE * VERIFY_WIDE];
        for (k = 0; k < n; k++)
            w[k] = verify_shapes[i].size * (2 * amp_random_uniform(seed * VERIFY_PARAMS + (uint64_t)i, (uint64_t)k) - 1) + (i == LN_W ? 1.0f : 0.0f);
        CHECK_OK(amp_convert(m->weights[i], dtype, w, AMP_F32, n, NULL, NULL));
        p->name = verify_shapes[i].name;
        p->weight = cols ? amp_tensor2(m->weights[i], dtype, rows, cols) : amp_tensor1(m->weights[i], dtype, rows);
        if (i != FROZEN) p->grad = cols ? amp_tensor2(m->grads[i], AMP_F32, rows, cols) : amp_tensor1(m->grads[i], AMP_F32, rows);
    }
    for (i = 0; i < VERIFY_ROWS; i++) {
        m->ids[i] = (int32_t)(amp_random_u32(seed, (uint64_t)i) % VOCAB);
        m->labels[i] = (int32_t)(amp_random_u32(seed + 1, (uint64_t)i) % VOCAB);
    }
    CHECK_OK(amp_param_register(amp, m->params, VERIFY_PARAMS));
}

/* Keeps `bits` of the mantissas of what is stored as fp32 or bf16 or fp16. */
static void lose_bits(const amp_tensor *t, int bits) {
    int64_t i, n = amp_tensor_count(t);
    for (i = 0; i < n; i++) {
        float x;
        uint32_t b;
        CHECK_OK(amp_convert(&x, AMP_F32, ampi_at(t->data, t->dtype, i), t->dtype, 1, NULL, NULL));
        memcpy(&b, &x, 4);
        b &= ~(uint32_t)0 << (23 - bits);
        memcpy(&x, &b, 4);
        CHECK_OK(amp_convert(ampi_at_mut(t->data, t->dtype, i), t->dtype, &x, AMP_F32, 1, NULL, NULL));
    }
}
static void times(const amp_tensor *t, float factor) {
    int64_t i, n = amp_tensor_count(t);
    for (i = 0; i < n; i++) {
        float x;
        CHECK_OK(amp_convert(&x, AMP_F32, ampi_at(t->data, t->dtype, i), t->dtype, 1, NULL, NULL));
        x *= factor;
        CHECK_OK(amp_convert(ampi_at_mut(t->data, t->dtype, i), t->dtype, &x, AMP_F32, 1, NULL, NULL));
    }
}

#define TRY(call) do { int r_ = (int)(call); if (r_ != 0) return r_; } while (0)

/* Forward and backward, as a program writes it; activations are stored as the region says. */
/* Other ranges at each call: what a scaler and a set made for themselves is theirs, whatever verify puts back. */
static void unscale_own(verify_model *m) {
    static float own[2][8];
    amp_range range;
    int32_t apply;
    memset(&range, 0, sizeof range);
    range.name = "own"; range.data = own[m->calls % 2]; range.count = 8; range.dtype = AMP_F32;
    CHECK_OK(amp_scaler_unscale(m->scaler, &range, 1, &apply));
    CHECK_OK(amp_grad_set_save(amp_optimizer_grad_set(m->optimizer)));
    CHECK_OK(amp_grad_set_restore(amp_optimizer_grad_set(m->optimizer)));
}

static int step(void *user, amp_context *amp) {
    verify_model *m = (verify_model *)user;
    amp_param *p = m->params;
    amp_embedding_op emb;
    amp_linear_op fc, qkv[3], head;
    amp_dropout_op drop;
    amp_norm_op ln;
    amp_attention_op at;
    amp_cross_entropy_op ce;
    amp_dtype h;
    int low, i;
    m->calls++;
    TRY(amp_autocast_begin(amp, NULL));
    h = amp_autocast_result(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32);
    low = m->always || h == AMP_F16 || h == AMP_BF16;
    if (m->broken == BREAK_FAIL && low) { TRY(amp_autocast_end(amp)); return (int)ampi_fail(AMP_ERR_MEMORY, "step", "no room for h"); }
    if (m->broken == BREAK_REGION && low) return 77;
    memset(&emb, 0, sizeof emb); memset(&fc, 0, sizeof fc); memset(qkv, 0, sizeof qkv); memset(&head, 0, sizeof head);
    memset(&drop, 0, sizeof drop); memset(&ln, 0, sizeof ln); memset(&at, 0, sizeof at); memset(&ce, 0, sizeof ce);
    emb.ids = m->ids; emb.table = &p[TABLE]; emb.y = amp_tensor2(m->act[1], h, VERIFY_ROWS, DIM);
    TRY(amp_embedding(amp, &emb));
    fc.x = emb.y; fc.weight = &p[FC_W]; fc.bias = &p[FC_B]; fc.act = AMP_ACT_GELU;
    fc.y = amp_tensor2(m->act[2], h, VERIFY_ROWS, VERIFY_WIDE); fc.pre = amp_tensor2(m->act[3], h, VERIFY_ROWS, VERIFY_WIDE);
    TRY(amp_linear(amp, &fc));
    if (m->broken == BREAK_BITS && low) lose_bits(&fc.y, 1);
    if (m->broken == BREAK_OVERFLOW && low) { times(&fc.y, 1e6f); times(&fc.y, 1e-6f); }
    drop.x = fc.y; drop.y = amp_tensor2(m->act[4], h, VERIFY_ROWS, VERIFY_WIDE); drop.p = m->dropout;
    TRY(amp_dropout(amp, &drop));
    ln.x = drop.y; ln.y = amp_tensor2(m->act[5], h, VERIFY_ROWS, VERIFY_WIDE); ln.weight = &p[LN_W]; ln.bias = &p[LN_B];
    ln.mean = m->mean; ln.rstd = m->rstd;
    TRY(amp_layernorm(amp, &ln));
    for (i = 0; i < 3; i++) {
        qkv[i].x = ln.y; qkv[i].weight = &p[Q_W + i]; qkv[i].bias = &p[Q_B + i]; qkv[i].y = amp_tensor2(m->act[15 + i], h, VERIFY_ROWS, VERIFY_WIDE);
        TRY(amp_linear(amp, &qkv[i]));
        *(i == 0 ? &at.q : i == 1 ? &at.k : &at.v) = amp_tensor4(m->act[15 + i], h, VERIFY_BATCH, VERIFY_SEQ, HEADS, VERIFY_WIDE / HEADS);
    }
    at.o = amp_tensor4(m->act[7], h, VERIFY_BATCH, VERIFY_SEQ, HEADS, VERIFY_WIDE / HEADS); at.lse = m->lse; at.mask.kind = AMP_MASK_CAUSAL;
    TRY(amp_attention(amp, &at));
    head.x = amp_tensor2(m->act[7], h, VERIFY_ROWS, VERIFY_WIDE); head.weight = &p[OUT_W]; head.bias = &p[OUT_B];
    head.y = amp_tensor2(m->logits, AMP_F32, VERIFY_ROWS, VOCAB);
    TRY(amp_linear(amp, &head));
    if (m->broken == BREAK_NAN && low) m->logits[7] = ampi_f32_of_bits(0x7fc00000u);
    ce.logits = head.y; ce.dlogits = amp_tensor2(m->act[8], h == AMP_F32 ? AMP_F32 : h, VERIFY_ROWS, VOCAB); ce.labels = m->labels; ce.loss = &m->loss;
    ce.grad_scale = amp_scaler_scale_ptr(m->scaler);
    TRY(amp_cross_entropy(amp, &ce));
    TRY(amp_autocast_end(amp));
    head.dy = ce.dlogits; head.dx = amp_tensor2(m->act[9], h, VERIFY_ROWS, VERIFY_WIDE);
    TRY(amp_linear_backward(amp, &head));
    if (m->broken == BREAK_GRADIENT && low) times(&head.dx, 1.5f);
    if (m->broken == BREAK_LOST && low) memset(m->act[9], 0, VERIFY_ROWS * VERIFY_WIDE * 2);
    at.d_o = amp_tensor4(m->act[9], h, VERIFY_BATCH, VERIFY_SEQ, HEADS, VERIFY_WIDE / HEADS);
    for (i = 0; i < 3; i++) {
        qkv[i].dy = amp_tensor2(m->act[18 + i], h, VERIFY_ROWS, VERIFY_WIDE);
        *(i == 0 ? &at.dq : i == 1 ? &at.dk : &at.dv) = amp_tensor4(m->act[18 + i], h, VERIFY_BATCH, VERIFY_SEQ, HEADS, VERIFY_WIDE / HEADS);
    }
    TRY(amp_attention_backward(amp, &at));
    for (i = 0; i < 3; i++) {
        qkv[i].dx = amp_tensor2(m->act[21 + i], h, VERIFY_ROWS, VERIFY_WIDE);
        TRY(amp_linear_backward(amp, &qkv[i]));
        if (i > 0) TRY(amp_add(amp, &qkv[0].dx, &qkv[i].dx, &qkv[0].dx));
    }
    ln.dy = qkv[0].dx; ln.dx = amp_tensor2(m->act[12], h, VERIFY_ROWS, VERIFY_WIDE);
    TRY(amp_layernorm_backward(amp, &ln));
    drop.dy = ln.dx; drop.dx = amp_tensor2(m->act[13], h, VERIFY_ROWS, VERIFY_WIDE);
    TRY(amp_dropout_backward(amp, &drop));
    fc.dy = drop.dx; fc.dx = amp_tensor2(m->act[14], h, VERIFY_ROWS, DIM);
    TRY(amp_linear_backward(amp, &fc));
    emb.dy = fc.dx;
    TRY(amp_embedding_backward(amp, &emb));
    if (m->steps == 2) unscale_own(m);
    return m->steps == 1 ? (int)amp_step(m->optimizer, m->scaler) : 0;
}

static amp_context *verify_open_context(amp_dtype dtype, amp_level level, const amp_backend *backend) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = dtype;
    d.level = level;
    d.backend = backend;
    d.threads = 1;
    d.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

static void add_training(verify_model *m, amp_optimizer_kind kind, amp_master_kind master, float scale) {
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    memset(&od, 0, sizeof od);
    memset(&sd, 0, sizeof sd);
    od.kind = kind;
    od.params = m->params; od.n_params = VERIFY_PARAMS;
    od.lr = 0.01; od.clip_norm = 1; od.weight_decay = 0.1; od.momentum = kind == AMP_SGD ? 0.9 : 0;
    od.master = master;
    od.accumulation = accumulation;
    CHECK_OK(amp_optimizer_create(m->amp, &m->optimizer, &od));
    sd.init_scale = scale;
    sd.growth_interval = 3;
    if (scale > 0) CHECK_OK(amp_scaler_create(m->amp, &m->scaler, &sd));
}

static void close_model(verify_model *m) {
    amp_optimizer_destroy(m->optimizer);
    amp_scaler_destroy(m->scaler);
    amp_close(m->amp);
}

static amp_range outputs[2];
static amp_verify_desc desc_of(verify_model *m) {
    amp_verify_desc d;
    memset(&d, 0, sizeof d);
    outputs[0].name = "logits"; outputs[0].data = m->logits; outputs[0].count = VERIFY_ROWS * VOCAB; outputs[0].dtype = AMP_F32;
    outputs[1].name = "loss"; outputs[1].data = &m->loss; outputs[1].count = 1; outputs[1].dtype = AMP_F32;
    d.step = step;
    d.user = m;
    d.params = m->params; d.n_params = VERIFY_PARAMS;
    d.outputs = outputs; d.n_outputs = 2;
    d.optimizer = m->optimizer;
    d.scaler = m->scaler;
    return d;
}

static amp_verify_report verify(verify_model *m, int broken) {
    amp_verify_report r;
    amp_verify_desc d = desc_of(m);
    m->broken = broken;
    memset(&r, 0, sizeof r);
    CHECK_OK(amp_verify(m->amp, &d, &r));
    CHECK_EQ(r.n_rows, 3);
    return r;
}

static void show(const amp_verify_report *r) {
    char text[4000];
    amp_verify_text(r, text, sizeof text);
    printf("%s", text);
}

/* ---- Right models pass, over many seeds, with the worst error far enough below its bound */

TEST(right_models_pass) {
    double worst = 0, ratio;
    int seed, i;
    for (seed = 0; seed < 40; seed++) {
        amp_verify_report r;
        fill_model(&a_model, verify_open_context(AMP_F32, seed % 4 == 3 ? AMP_LEVEL_O2 : AMP_LEVEL_O1, NULL), (uint64_t)seed);
        add_training(&a_model, AMP_ADAMW, AMP_MASTER_DEFAULT, 1024);
        r = verify(&a_model, BREAK_NOTHING);
        for (i = 0; i < 3; i++) {
            CHECK_MSG(r.rows[i].verdict == AMP_VERDICT_PASS, "seed %d, %s", seed, amp_dtype_name(r.rows[i].dtype));
            if (r.rows[i].verdict != AMP_VERDICT_PASS) show(&r);
            CHECK(strcmp(r.rows[i].advice, "good") == 0);
            CHECK(r.rows[i].output_error > 0 && r.rows[i].gradient_error > 0 && r.rows[i].seconds > 0);
            ratio = r.rows[i].output_error / r.rows[i].output_bound;
            if (ratio > worst) worst = ratio;
            ratio = r.rows[i].gradient_error / r.rows[i].gradient_bound;
            if (ratio > worst) worst = ratio;
        }
        close_model(&a_model);
    }
    ampt_figure("verify: error over bound of right models", worst, 1);
    if (getenv("SHOW")) printf("worst %g\n", worst);
}

/* ---- Broken ones are found */

static void check_row(const amp_verify_report *r, int row, amp_verdict verdict, const char *advice) {
    CHECK_MSG(r->rows[row].verdict == verdict, "%s: verdict %d", amp_dtype_name(r->rows[row].dtype), (int)r->rows[row].verdict);
    CHECK_MSG(strstr(r->rows[row].advice, advice) != NULL, "%s: %s", amp_dtype_name(r->rows[row].dtype), r->rows[row].advice);
    if (r->rows[row].verdict != verdict) show(r);
}

static void open_broken(float scale) {
    fill_model(&a_model, verify_open_context(AMP_BF16, AMP_LEVEL_O1, NULL), 5);
    add_training(&a_model, AMP_ADAMW, AMP_MASTER_DEFAULT, scale);
}

TEST(lost_bits) {
    amp_verify_report r;
    open_broken(1024);
    r = verify(&a_model, BREAK_BITS);
    check_row(&r, 0, AMP_VERDICT_PASS, "good");
    check_row(&r, 1, AMP_VERDICT_INACCURATE, "set its layer to fp32 by amp_layer_override");
    check_row(&r, 2, AMP_VERDICT_INACCURATE, "check its operator in bf16");
    CHECK(r.rows[2].output_error > r.rows[2].output_bound && strcmp(r.rows[2].worst_output, "logits") == 0);
    close_model(&a_model);
}

/* A gradient times 1.5 behind the head: outputs are right, and so is the head's gradient. */
TEST(wrong_gradient) {
    amp_verify_report r;
    int i;
    open_broken(1024);
    r = verify(&a_model, BREAK_GRADIENT);
    check_row(&r, 0, AMP_VERDICT_PASS, "good");
    for (i = 1; i < 3; i++) {
        check_row(&r, i, AMP_VERDICT_INACCURATE, r.rows[i].worst_gradient);
        CHECK(r.rows[i].output_error <= r.rows[i].output_bound && r.rows[i].gradient_error > r.rows[i].gradient_bound);
        CHECK(strncmp(r.rows[i].worst_gradient, "head", 4) != 0);
        CHECK(r.rows[i].gradient_error > 0.4 && r.rows[i].gradient_error < 0.6);
    }
    close_model(&a_model);
}

/* Gradients lost below the head, as by underflow: with fp16 and no scaler that is the first thing to think of. */
TEST(lost_gradient) {
    amp_verify_report r;
    open_broken(0);
    r = verify(&a_model, BREAK_LOST);
    check_row(&r, 1, AMP_VERDICT_INACCURATE, "train with a loss scaler");
    check_row(&r, 2, AMP_VERDICT_INACCURATE, "check its operator in bf16");
    r = verify(&a_model, BREAK_NOTHING);
    check_row(&r, 1, AMP_VERDICT_PASS, "train with a loss scaler");
    check_row(&r, 2, AMP_VERDICT_PASS, "good");
    close_model(&a_model);
}

TEST(overflow) {
    amp_verify_report r;
    open_broken(1024);
    r = verify(&a_model, BREAK_OVERFLOW);
    check_row(&r, 1, AMP_VERDICT_NONFINITE, "logits overflows: train in bf16");
    CHECK(strcmp(r.rows[1].first_bad, "logits") == 0);
    check_row(&r, 2, AMP_VERDICT_PASS, "good");
    CHECK(r.rows[2].first_bad[0] == 0);
    r = verify(&a_model, BREAK_NAN);
    check_row(&r, 0, AMP_VERDICT_PASS, "good");
    check_row(&r, 2, AMP_VERDICT_NONFINITE, "bf16 has fp32's range");
    CHECK(strcmp(r.rows[2].first_bad, "logits") == 0);
    close_model(&a_model);
}

/* Scaled gradients overflow fp16: the scale that the scaler would come to is tried, and the scaler left alone. */
TEST(scale_too_large) {
    amp_verify_report r;
    open_broken(0x1p30f);
    r = verify(&a_model, BREAK_NOTHING);
    check_row(&r, 0, AMP_VERDICT_PASS, "good");
    check_row(&r, 1, AMP_VERDICT_PASS, "good at loss scale ");
    check_row(&r, 2, AMP_VERDICT_PASS, "good");
    CHECK(amp_scaler_scale(a_model.scaler) == 0x1p30f);
    close_model(&a_model);
}

TEST(failing_step) {
    amp_verify_report r;
    int i;
    open_broken(1024);
    r = verify(&a_model, BREAK_FAIL);
    check_row(&r, 0, AMP_VERDICT_PASS, "good");
    for (i = 1; i < 3; i++) check_row(&r, i, AMP_VERDICT_FAILED, "the step returned 301. AMP0301 step: no room for h");
    r = verify(&a_model, BREAK_REGION);             /* with a region left open */
    check_row(&r, 0, AMP_VERDICT_PASS, "good");
    check_row(&r, 2, AMP_VERDICT_FAILED, "the step returned 77.");
    CHECK(ampi_thread.regions == 0 && amp_autocast_active(a_model.amp, NULL) == 0);
    close_model(&a_model);
}

/* ---- A training with a look in between goes on with the same bits */

static uint64_t add_hash(uint64_t h, const void *data, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; i++) h = (h ^ ((const unsigned char *)data)[i]) * 0x100000001B3u;
    return h;
}

static uint64_t state_hash(uint64_t h, verify_model *m) {
    amp_state *state = NULL;
    void *data = NULL;
    size_t bytes = 0;
    amp_step_result outcome;
    int i;
    for (i = 0; i < VERIFY_PARAMS; i++) {
        h = add_hash(h, m->weights[i], sizeof m->weights[i]);
        h = add_hash(h, m->grads[i], sizeof m->grads[i]);
        h = add_hash(h, &m->params[i].grad_live, sizeof m->params[i].grad_live);
    }
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(m->optimizer, state, "o"));
    if (m->scaler) CHECK_OK(amp_scaler_save(m->scaler, state, "s"));
    CHECK_OK(amp_random_save(m->amp, state, "r"));
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    h = add_hash(h, data, bytes);
    amp_file_free(NULL, data, bytes);
    amp_state_destroy(state);
    while (amp_step_result_next(m->optimizer, &outcome)) h = add_hash(h, &outcome.norm, sizeof outcome.norm) + (uint64_t)outcome.step;
    return add_hash(h, &m->loss, sizeof m->loss);
}

/* 8 micro-batches, 2 to a step; looks 1: amp_verify stands between some of them. */
static uint64_t train(const amp_backend *backend, amp_level level, amp_dtype dtype, amp_optimizer_kind kind, amp_master_kind master,
                      float scale, int looks, int broken, int steps) {
    verify_model *m = &a_model;
    uint64_t h = 0xCBF29CE484222325u;
    int i;
    fill_model(m, verify_open_context(dtype, level, backend), 11);
    accumulation = 2;
    add_training(m, kind, master, scale);
    accumulation = 1;
    for (i = 0; i < 8; i++) {
        m->broken = BREAK_NOTHING;
        m->steps = 1;
        CHECK_OK(step(m, m->amp));
        h = state_hash(h, m);
        if (looks && (i == 2 || i == 5)) {
            amp_verify_report r;
            amp_verify_desc d = desc_of(m);
            uint64_t before = state_hash(1, m);
            float loss = m->loss;
            amp_dtype kept = ampi_dtype(m->amp);
            m->broken = broken;
            m->steps = steps;
            CHECK_OK(amp_verify(m->amp, &d, &r));
            m->loss = loss;         /* an output */
            CHECK(kept == ampi_dtype(m->amp) && before == state_hash(1, m));
        }
    }
    close_model(m);
    return h;
}

TEST(training_goes_on) {
    static const int broken[] = {BREAK_NOTHING, BREAK_FAIL, BREAK_NAN, BREAK_REGION, BREAK_OVERFLOW};
    int i, steps;
    for (i = 0; i < 5; i++) {
        const amp_backend *backend = i % 2 ? recording_backend() : NULL;
        amp_level level = i == 3 || i == 4 ? AMP_LEVEL_O2 : AMP_LEVEL_O1;
        amp_dtype dtype = i % 2 ? AMP_BF16 : AMP_F16;
        amp_optimizer_kind kind = i == 1 ? AMP_SGD : AMP_ADAMW;
        amp_master_kind master = i == 3 ? AMP_MASTER_REMAINDER : AMP_MASTER_DEFAULT;
        float scale = i % 2 ? 0 : i == 2 ? 0x1p30f : 4096.0f;
        uint64_t plain = train(backend, level, dtype, kind, master, scale, 0, 0, 0);
        CHECK(plain != train(backend, level, dtype, kind, master, scale * 2 + (float)(i % 2), 0, 0, 0));
        for (steps = 0; steps < 3; steps++)
            CHECK_MSG(train(backend, level, dtype, kind, master, scale, 1, broken[i], steps) == plain, "case %d, steps %d", i, steps);
    }
}

/* ---- Whatever fails, nothing has changed */

static struct { long calls, fail_at; } memory;
static void *failing_alloc(void *user, size_t size, size_t align) {
    void *p = NULL;
    (void)user;
    if (__atomic_add_fetch(&memory.calls, 1, __ATOMIC_RELAXED) == memory.fail_at) return NULL;
    return posix_memalign(&p, align < sizeof p ? sizeof p : align, size) == 0 ? p : NULL;
}
static void plain_free(void *user, void *p, size_t size) { (void)user; (void)size; free(p); }

TEST(out_of_memory) {
    amp_desc desc;
    amp_context *amp = NULL;
    amp_verify_report r;
    amp_verify_desc d;
    uint64_t before;
    long calls, k;
    float loss;
    int refused = 0;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_F16;
    desc.threads = 1;
    desc.logger.level = AMP_LOG_OFF;
    desc.system.alloc = failing_alloc;
    desc.system.free = plain_free;
    CHECK_OK(amp_open(&amp, &desc));
    fill_model(&a_model, amp, 3);
    add_training(&a_model, AMP_ADAMW, AMP_MASTER_DEFAULT, 256);
    a_model.steps = 1;
    CHECK_OK(step(&a_model, amp));
    CHECK_OK(step(&a_model, amp));
    state_hash(1, &a_model);        /* takes the outcomes */
    before = state_hash(1, &a_model);
    loss = a_model.loss;            /* an output */
    d = desc_of(&a_model);
    memory.calls = 0;
    CHECK_OK(amp_verify(amp, &d, &r));
    calls = memory.calls;
    for (k = 1; k <= calls; k++) {
        amp_result result;
        memory.calls = 0;
        memory.fail_at = k;
        result = amp_verify(amp, &d, &r);
        memory.fail_at = 0;
        CHECK_MSG(result == AMP_OK || result == AMP_ERR_MEMORY, "allocation %ld: %s", k, amp_last_error());
        refused += result != AMP_OK;
        a_model.loss = loss;
        CHECK_MSG(state_hash(1, &a_model) == before, "allocation %ld", k);
    }
    CHECK_MSG(refused > 5, "%d of %ld", refused, calls);
    close_model(&a_model);
}

static amp_result describe_without_bf16(void *dev, amp_device *out) {
    amp_result r = recording_describe(dev, out);
    out->bf16 = 0;
    return r;
}

TEST(device_without_bf16) {
    static const amp_dtype dtypes[] = {AMP_BF16, AMP_F32};
    amp_backend backend = *recording_backend();
    amp_verify_report r;
    amp_verify_desc d;
    backend.describe = describe_without_bf16;
    fill_model(&a_model, verify_open_context(AMP_F32, AMP_LEVEL_O1, &backend), 9);
    d = desc_of(&a_model);
    CHECK_OK(amp_verify(a_model.amp, &d, &r));
    CHECK(r.n_rows == 2 && r.rows[0].dtype == AMP_TF32 && r.rows[1].dtype == AMP_F16);
    d.dtypes = dtypes;
    d.n_dtypes = 2;
    a_model.calls = 0;
    CHECK_OK(amp_verify(a_model.amp, &d, &r));
    CHECK(r.n_rows == 2 && r.rows[0].verdict == AMP_VERDICT_FAILED && strstr(r.rows[0].advice, "bf16") != NULL);
    CHECK(r.rows[1].verdict == AMP_VERDICT_PASS && !(r.rows[1].gradient_error > 0) && r.rows[1].gradient_bound > 0);
    CHECK_EQ(a_model.calls, 1 + 2 + 3);
    close_model(&a_model);
}

/* What is fp32 for the candidates is not so for the reference, nor the other way round. */
TEST(overrides) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16};
    amp_verify_report r;
    amp_verify_desc d;
    fill_model(&a_model, verify_open_context(AMP_F16, AMP_LEVEL_O1, NULL), 4);
    d = desc_of(&a_model);
    d.dtypes = dtypes;
    d.n_dtypes = 2;
    CHECK_OK(amp_layer_override(a_model.amp, "fc.*", AMP_BF16));
    CHECK_OK(amp_set_enabled(a_model.amp, 0));
    CHECK_OK(amp_verify(a_model.amp, &d, &r));
    CHECK(r.rows[0].output_error > 1e-4);           /* fp32 but for one layer, against fp32 throughout */
    CHECK(r.rows[1].verdict == AMP_VERDICT_PASS);
    CHECK(amp_autocast_active(a_model.amp, NULL) == 0 && a_model.amp->desc.disable == 1 && a_model.amp->n_layers == 1);
    CHECK(ampi_dtype(a_model.amp) == AMP_F16);
    CHECK_OK(amp_layer_override(a_model.amp, "*", AMP_F32));
    CHECK_OK(amp_verify(a_model.amp, &d, &r));
    CHECK(!(r.rows[0].output_error > 0) && r.rows[1].output_error > 1e-4);      /* stored in bf16 all the same */
    close_model(&a_model);
}

TEST(bad_input) {
    static const amp_dtype bad_dtypes[] = {AMP_BF16, AMP_E4M3};
    amp_context *other = verify_open_context(AMP_F32, AMP_LEVEL_O1, NULL);
    amp_verify_desc d, good;
    amp_verify_report r;
    amp_optimizer *own;
    amp_param frozen;
    char *name;
    open_broken(64);
    good = d = desc_of(&a_model);
    r.n_rows = 77;
    CHECK_ERR(amp_verify(NULL, &d, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_verify(a_model.amp, NULL, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_verify(a_model.amp, &d, NULL), AMP_ERR_NULL);
#define REFUSED(change, result) do { d = good; change; CHECK_ERR(amp_verify(a_model.amp, &d, &r), result); } while (0)
    REFUSED(d.step = NULL, AMP_ERR_NULL);
    REFUSED(d.params = NULL, AMP_ERR_NULL);
    REFUSED(d.outputs = NULL, AMP_ERR_NULL);
    REFUSED(d.n_dtypes = 1, AMP_ERR_NULL);
    REFUSED((d.n_outputs = 0, d.n_params = 0), AMP_ERR_NULL);
    frozen = *good.params;
    memset(&frozen.grad, 0, sizeof frozen.grad);
    REFUSED((d.n_outputs = 0, d.params = &frozen, d.n_params = 1), AMP_ERR_NULL);
    CHECK(strstr(amp_last_error(), "no parameter has a gradient") != NULL);
    REFUSED(d.n_params = -1, AMP_ERR_RANGE);
    REFUSED(d.n_outputs = -1, AMP_ERR_RANGE);
    REFUSED(d.n_dtypes = -1, AMP_ERR_RANGE);
    REFUSED((d.dtypes = bad_dtypes, d.n_dtypes = AMP_VERIFY_ROWS + 1), AMP_ERR_RANGE);
    REFUSED((d.dtypes = bad_dtypes, d.n_dtypes = 2), AMP_ERR_DTYPE);
    CHECK(strstr(amp_last_error(), ".dtypes[1] = fp8_e4m3") != NULL);
    REFUSED(d.allowance = -1, AMP_ERR_RANGE);
    REFUSED(d.allowance = ampi_f64_of_bits((uint64_t)0x7ff8 << 48), AMP_ERR_RANGE);
    REFUSED(d.allowance = ampi_f64_of_bits((uint64_t)0x7ff0 << 48), AMP_ERR_RANGE);
    REFUSED(outputs[1].dtype = AMP_I32, AMP_ERR_DTYPE);
    outputs[1].dtype = AMP_F32;
    REFUSED(outputs[1].count = -1, AMP_ERR_RANGE);
    outputs[1].count = 1;
    REFUSED(outputs[0].data = NULL, AMP_ERR_NULL);
    outputs[0].data = a_model.logits;
    memcpy(&name, &a_model.params[1].name, sizeof name);
    REFUSED(a_model.params[1].name = "table", AMP_ERR_NAME);
    REFUSED(a_model.params[1].name = NULL, AMP_ERR_NULL);
    a_model.params[1].name = name;
    REFUSED(a_model.params[1].weight.dtype = AMP_F64, AMP_ERR_SHAPE);
    a_model.params[1].weight.dtype = AMP_F32;
    own = a_model.optimizer;
    a_model.amp->desc.level = AMP_LEVEL_O0;
    REFUSED(d.allowance = 1, AMP_ERR_CONFLICT);
    a_model.amp->desc.level = AMP_LEVEL_O1;
    d = good;
    CHECK_ERR(amp_verify(other, &d, &r), AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "the optimizer belongs to another context") != NULL);
    CHECK_OK(amp_scaler_check(a_model.scaler, amp_optimizer_grad_set(own), AMP_CHECK_READ));
    REFUSED(d.allowance = 1, AMP_ERR_STATE);
    CHECK_OK(amp_scaler_update(a_model.scaler));
    CHECK_EQ(r.n_rows, 77);
    a_model.always = 1;
    a_model.broken = BREAK_NAN;
    REFUSED(d.allowance = 1, AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "logits is infinite or NaN in fp32 already") != NULL);
    a_model.broken = BREAK_FAIL;
    REFUSED(d.allowance = 1, AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "the step must succeed in fp32 first, and fails with 301: AMP0301 step: no room for h") != NULL);
    a_model.broken = BREAK_REGION;
    REFUSED(d.allowance = 1, AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "with 77") != NULL && ampi_thread.regions == 0);
    a_model.always = a_model.broken = 0;
    CHECK_EQ(r.n_rows, 77);
    CHECK_OK(amp_verify(a_model.amp, &good, &r));
    CHECK_EQ(amp_verify_text(NULL, NULL, 0), 0);
    CHECK(amp_verify_text(&r, NULL, 0) > 100);
    close_model(&a_model);
    amp_close(other);
}

TEST(placement_here) {
    static float x[4];
    amp_context *amp = verify_open_context(AMP_F32, AMP_LEVEL_O1, NULL);
    amp_range ranges[3];
    memset(ranges, 0, sizeof ranges);
    ranges[0].data = x; ranges[0].count = 4; ranges[0].name = "x";
    CHECK_OK(amp_verify_placement(amp, ranges, 3));     /* of no elements: nowhere */
    CHECK_OK(amp_verify_placement(amp, NULL, 0));
    ranges[2].count = 1;
    ranges[2].name = "y";
    CHECK_ERR(amp_verify_placement(amp, ranges, 3), AMP_ERR_SHAPE);
    CHECK(strstr(amp_last_error(), "y, number 2, has no data") != NULL);
    CHECK_ERR(amp_verify_placement(amp, ranges, -1), AMP_ERR_RANGE);
    CHECK_ERR(amp_verify_placement(NULL, ranges, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_verify_placement(amp, NULL, 1), AMP_ERR_NULL);
    amp_close(amp);
}

/* ---- An operator of the host's own: y = softplus(s), s[t] = decay s[t - 1] + w x[t] for each of some columns */

enum { T = 12, C = 20, RIGHT = 0, WRONG_SIGN, WRONG_FACTOR, MISSING_TERM, WRONG_ELEMENT, NO_BACKWARD, BAD_GRADIENT, NOT_FINITE, FAILS };
typedef struct scan {
    amp_context *amp;
    int32_t op;
    amp_param w;
    float x[T * C], weight[C], dx[T * C], dw[C], s[T * C];
    uint16_t y16[T * C], dy16[T * C];
    float y[T * C], dy[T * C];
    amp_dtype dtype;                /* of y, dy */
    amp_dtype compute;              /* of the last forward */
    amp_dropout_op drop;
    float dropped[T * C];
    int wrong, calls;
    float decay, factor;            /* factor: of WRONG_FACTOR */
} scan;
static scan a_scan;

static float rounded(float x, amp_dtype dtype) {
    return dtype == AMP_BF16 ? amp_f32_from_bf16(amp_bf16_from_f32(x, 0)) : dtype == AMP_F16 ? amp_f32_from_f16(amp_f16_from_f32(x, 0))
           : dtype == AMP_TF32 ? amp_tf32_from_f32(x, 0) : x;
}

static int scan_forward(void *user, amp_context *amp) {
    scan *s = (scan *)user;
    amp_tensor w;
    float weight[C];
    int t, c;
    s->calls++;
    if (s->wrong == FAILS && s->calls > 3) return (int)ampi_fail(AMP_ERR_MEMORY, "scan", "nothing left");
    s->compute = amp_autocast_compute(amp, s->op, "scan", AMP_F32, AMP_F32);
    memset(&s->drop, 0, sizeof s->drop);
    s->drop.x = amp_tensor1(s->x, AMP_F32, T * C);
    s->drop.y = amp_tensor1(s->dropped, AMP_F32, T * C);
    s->drop.p = 0.2f;
    TRY(amp_dropout(amp, &s->drop));
    TRY(amp_autocast_cast(amp, &s->w, s->compute == AMP_TF32 ? AMP_F32 : s->compute, &w));
    TRY(amp_convert(weight, AMP_F32, w.data, w.dtype, C, NULL, NULL));
    for (t = 0; t < T; t++)
        for (c = 0; c < C; c++) {
            int i = t * C + c;
            float wx = rounded(weight[c], s->compute) * rounded(s->dropped[i], s->compute);
            s->s[i] = rounded(wx + (t > 0 ? s->decay * s->s[i - C] : 0), s->compute);
            s->y[i] = logf(1 + expf(s->s[i]));
            if (s->wrong == NOT_FINITE && i == 17) s->y[i] = ampi_f32_of_bits(0x7f800000u);
        }
    if (s->dtype != AMP_F32) TRY(amp_convert(s->y16, s->dtype, s->y, AMP_F32, T * C, NULL, NULL));
    return 0;
}

static int scan_backward(void *user, amp_context *amp) {
    scan *s = (scan *)user;
    float ds[T * C], dy[T * C];
    int t, c, add = amp_param_accumulate(&s->w);
    (void)amp;
    if (s->dtype != AMP_F32) TRY(amp_convert(dy, AMP_F32, s->dy16, s->dtype, T * C, NULL, NULL));
    else memcpy(dy, s->dy, sizeof dy);
    for (c = 0; c < C && !add; c++) s->dw[c] = 0;
    for (t = T - 1; t >= 0; t--)
        for (c = 0; c < C; c++) {
            int i = t * C + c;
            ds[i] = dy[i] / (1 + expf(-s->s[i])) + (t < T - 1 && s->wrong != MISSING_TERM ? s->decay * ds[i + C] : 0);
            s->dx[i] = rounded(ds[i], s->compute) * rounded(s->weight[c], s->compute);
            if (s->wrong == WRONG_SIGN) s->dx[i] = -s->dx[i];
            if (s->wrong == WRONG_FACTOR) s->dx[i] *= s->factor;
            if (s->wrong == WRONG_ELEMENT && i == 33) s->dx[i] += 0.05f;
            s->dw[c] += rounded(ds[i], s->compute) * rounded(s->dropped[i], s->compute);
        }
    s->drop.dy = amp_tensor1(s->dx, AMP_F32, T * C);
    s->drop.dx = s->drop.dy;
    if (s->wrong == BAD_GRADIENT) s->dx[3] = ampi_f32_of_bits(0x7fc00000u);
    return s->wrong == NO_BACKWARD ? -5 : (int)amp_dropout_backward(amp, &s->drop);
}

static void open_scan(scan *s, uint64_t seed, amp_dtype dtype) {
    int i;
    memset(s, 0, sizeof *s);
    s->amp = verify_open_context(AMP_F32, AMP_LEVEL_O1, NULL);
    s->decay = 0.9f;
    s->factor = 1.01f;
    s->dtype = dtype;
    CHECK_OK(amp_operator_register(s->amp, "scan", AMP_CAST_LOWER, &s->op));
    for (i = 0; i < T * C; i++) s->x[i] = 4 * amp_random_uniform(seed, (uint64_t)i) - 2;
    for (i = 0; i < C; i++) s->weight[i] = 2 * amp_random_uniform(seed + 1000, (uint64_t)i) - 1;
    s->w.name = "w";
    s->w.weight = amp_tensor1(s->weight, AMP_F32, C);
    s->w.grad = amp_tensor1(s->dw, AMP_F32, C);
    CHECK_OK(amp_param_register(s->amp, &s->w, 1));
}

static amp_range scan_ranges[4][2];
static amp_gradcheck_desc scan_desc(scan *s, amp_dtype dtype, uint64_t seed) {
    amp_gradcheck_desc d;
    int narrow = s->dtype != AMP_F32;
    memset(&d, 0, sizeof d);
    memset(scan_ranges, 0, sizeof scan_ranges);
    scan_ranges[0][0].name = "x"; scan_ranges[0][0].data = s->x; scan_ranges[1][0].data = s->dx;
    scan_ranges[0][1].name = "w"; scan_ranges[0][1].data = s->weight; scan_ranges[1][1].data = s->dw;
    scan_ranges[2][0].name = "y"; scan_ranges[2][0].data = narrow ? (void *)s->y16 : (void *)s->y;
    scan_ranges[3][0].data = narrow ? (void *)s->dy16 : (void *)s->dy;
    scan_ranges[0][0].count = scan_ranges[1][0].count = scan_ranges[2][0].count = scan_ranges[3][0].count = T * C;
    scan_ranges[0][1].count = scan_ranges[1][1].count = C;
    scan_ranges[0][0].dtype = scan_ranges[0][1].dtype = scan_ranges[1][0].dtype = scan_ranges[1][1].dtype = AMP_F32;
    scan_ranges[2][0].dtype = scan_ranges[3][0].dtype = s->dtype;
    d.forward = scan_forward;
    d.backward = scan_backward;
    d.user = s;
    d.inputs = scan_ranges[0]; d.input_grads = scan_ranges[1]; d.n_inputs = 2;
    d.outputs = scan_ranges[2]; d.output_grads = scan_ranges[3]; d.n_outputs = 1;
    d.dtype = dtype;
    d.seed = seed;
    return d;
}

static const struct { amp_dtype compute, stored; } scans[] = {
    {AMP_F32, AMP_F32}, {AMP_TF32, AMP_F32}, {AMP_F16, AMP_F16}, {AMP_F16, AMP_F32}, {AMP_BF16, AMP_BF16}, {AMP_BF16, AMP_F32}
};
enum { SCANS = 6 };

TEST(right_gradients) {
    double worst = 0;
    int seed, k;
    for (k = 0; k < SCANS; k++)
        for (seed = 0; seed < 25; seed++) {
            amp_gradcheck_report r;
            amp_gradcheck_desc d;
            float x[T * C];
            open_scan(&a_scan, (uint64_t)seed, scans[k].stored);
            d = scan_desc(&a_scan, scans[k].compute, (uint64_t)seed);
            memcpy(x, a_scan.x, sizeof x);
            CHECK_OK(amp_gradcheck(a_scan.amp, &d, &r));
            CHECK_MSG(r.passed == 1, "%s, seed %d: %s: error %g, bound %g, expected %g, found %g", amp_dtype_name(scans[k].compute),
                      seed, r.worst, r.error, r.bound, r.expected, r.found);
            CHECK(r.error > 0 && r.bound > r.error && memcmp(x, a_scan.x, sizeof x) == 0 && a_scan.w.grad_live == 0);
            if (r.error / r.bound > worst) worst = r.error / r.bound;
            amp_close(a_scan.amp);
        }
    ampt_figure("gradcheck: error over bound of right operators", worst, 1);
    if (getenv("SHOW")) printf("worst %g\n", worst);
}

/* A region around the call changes nothing: what callbacks open begins as it would outside. */
TEST(regions_around_do_not_count) {
    amp_verify_report v[2];
    amp_gradcheck_report g[2];
    amp_gradcheck_desc d;
    amp_autocast_desc region, now;
    int k, i;
    memset(&region, 0, sizeof region);
    region.dtype = AMP_BF16;
    for (k = 0; k < 2; k++) {
        fill_model(&a_model, verify_open_context(AMP_F32, AMP_LEVEL_O1, NULL), 3);
        if (k) CHECK_OK(amp_autocast_begin(a_model.amp, &region));
        v[k] = verify(&a_model, BREAK_NOTHING);
        if (k) {
            CHECK(amp_autocast_active(a_model.amp, &now) && now.dtype == AMP_BF16);
            CHECK_OK(amp_autocast_end(a_model.amp));
        }
        close_model(&a_model);
        memset(&g[k], 0, sizeof g[k]);
        open_scan(&a_scan, 3, AMP_F32);
        d = scan_desc(&a_scan, AMP_F16, 3);
        if (k) CHECK_OK(amp_autocast_begin(a_scan.amp, &region));
        CHECK_OK(amp_gradcheck(a_scan.amp, &d, &g[k]));
        if (k) CHECK_OK(amp_autocast_end(a_scan.amp));
        amp_close(a_scan.amp);
    }
    for (i = 0; i < 3; i++) {
        CHECK(v[0].rows[i].output_error == v[1].rows[i].output_error);
        CHECK(v[0].rows[i].gradient_error == v[1].rows[i].gradient_error);
    }
    CHECK(g[0].passed == 1 && g[1].passed == 1 && g[0].error == g[1].error && g[0].found == g[1].found);
}

static amp_gradcheck_report check_wrong(int wrong, int k, int seed) {
    amp_gradcheck_report r;
    amp_gradcheck_desc d;
    memset(&r, 0, sizeof r);
    open_scan(&a_scan, (uint64_t)seed, scans[k].stored);
    a_scan.wrong = wrong;
    d = scan_desc(&a_scan, scans[k].compute, (uint64_t)seed);
    CHECK_OK(amp_gradcheck(a_scan.amp, &d, &r));
    amp_close(a_scan.amp);
    return r;
}

TEST(wrong_gradients) {
    int seed, k;
    for (seed = 0; seed < 10; seed++) {
        for (k = 0; k < SCANS; k++) {
            amp_gradcheck_report r = check_wrong(WRONG_SIGN, k, seed);
            CHECK_MSG(r.passed == 0 && strcmp(r.worst, "x") == 0 && r.error > r.bound, "sign, %d, seed %d: %g of %g", k, seed, r.error, r.bound);
            r = check_wrong(MISSING_TERM, k, seed);
            CHECK_MSG(r.passed == 0, "term, %d, seed %d: %g of %g", k, seed, r.error, r.bound);
        }
        CHECK(check_wrong(WRONG_FACTOR, 0, seed).passed == 0);
        CHECK(check_wrong(WRONG_ELEMENT, 0, seed).passed == 0);
    }
}

/* Leaky ReLU on the tape, with the slope that backward takes below 0; kinks lie on the way of most directions. */
typedef struct kinked { amp_param *w1, *b1, *w2; float x[40 * 8], slope; } kinked;
static amp_result kinked_forward(void *user, const amp_custom_call *c) {
    const float *x = (const float *)c->x[0].data;
    (void)user;
    for (int64_t i = 0; i < amp_tensor_count(&c->y); i++) ((float *)c->y.data)[i] = x[i] > 0 ? x[i] : 0.1f * x[i];
    return AMP_OK;
}
static amp_result kinked_backward(void *user, const amp_custom_call *c) {
    const float *x = (const float *)c->x[0].data, *dy = (const float *)c->dy.data;
    const kinked *k = (const kinked *)user;
    for (int64_t i = 0; c->dx[0].data != NULL && i < amp_tensor_count(&c->y); i++)
        ((float *)c->dx[0].data)[i] = x[i] > 0 ? dy[i] : k->slope * dy[i];
    return AMP_OK;
}
static amp_value kinked_record(void *user, amp_tape *t) {
    static const int32_t labels[40] = {0, 1, 2, 3, 0, 2};
    kinked *k = (kinked *)user;
    amp_custom_op op = {.layer = "leaky", .forward = kinked_forward, .backward = kinked_backward, .user = k};
    amp_tensor x = amp_tensor2(k->x, AMP_F32, 40, 8);
    amp_tape_store(t, AMP_F32);
    amp_value h = amp_tape_linear(t, amp_tape_input(t, &x), k->w1, k->b1, AMP_ACT_NONE);
    return amp_tape_cross_entropy(t, amp_tape_linear(t, amp_tape_custom(t, &h, 1, &op), k->w2, NULL, AMP_ACT_RELU), labels, NULL);
}
TEST(gradients_beside_kinks) {
    int64_t kinks = 0;
    static kinked k;
    for (int wrong = 0; wrong < 2; wrong++)
        for (int seed = 0; seed < 6; seed++) {
            amp_context *own;
            amp_model *m;
            amp_gradcheck_report r;
            amp_gradcheck_desc d;
            char text[400];
            memset(&d, 0, sizeof d);
            k.slope = wrong ? 0.2f : 0.1f;
            for (int i = 0; i < 40 * 8; i++) k.x[i] = amp_random_uniform((uint64_t)seed + 3, (uint64_t)i) - 0.5f;
            CHECK_OK(amp_open(&own, NULL));
            CHECK_OK(amp_model_create(own, &m, (uint64_t)seed, 0));
            k.w1 = amp_model_param(m, "first.weight", 32, 8, AMP_INIT_KAIMING_NORMAL, 0);
            k.b1 = amp_model_param(m, "first.bias", 32, 0, AMP_INIT_ZEROS, 0);
            k.w2 = amp_model_param(m, "second.weight", 4, 32, AMP_INIT_KAIMING_NORMAL, 0);
            d.record = kinked_record; d.user = &k; d.seed = (uint64_t)seed;
            CHECK_OK(amp_gradcheck(own, &d, &r));
            amp_gradcheck_text(&r, text, sizeof text);
            CHECK_MSG(r.passed == !wrong, "seed %d, slope %g: %s", seed, (double)k.slope, text);
            if (!wrong) kinks += r.kinks;
            amp_model_destroy(m);
            amp_close(own);
        }
    CHECK(kinks > 0);
}

/* Whatever the context and the region around compute in, a check that is not told a dtype runs in fp32; and what it reports
   as detectable is what it detects: an error of that size is at the bound. */
TEST(what_a_gradcheck_detects) {
    static const float factors[] = {1.0f, 1.01f, 1.1f, 1.5f};
    amp_autocast_desc region;
    double least = 1e9, most = 0, limit[SCANS];
    char text[400];
    int seed, k, i, seen[SCANS][4];
    memset(&region, 0, sizeof region);
    memset(seen, 0, sizeof seen);
    memset(limit, 0, sizeof limit);
    region.dtype = AMP_BF16;
    for (seed = 0; seed < 10; seed++)
        for (i = 0; i < 4; i++) {
            amp_gradcheck_report r;
            amp_gradcheck_desc d;
            open_scan(&a_scan, (uint64_t)seed, AMP_F32);
            a_scan.wrong = WRONG_FACTOR;
            a_scan.factor = factors[i];
            CHECK_OK(amp_set_dtype(a_scan.amp, AMP_BF16));
            d = scan_desc(&a_scan, AMP_DTYPE_DEFAULT, (uint64_t)seed);
            CHECK_OK(amp_autocast_begin(a_scan.amp, &region));
            CHECK_OK(amp_gradcheck(a_scan.amp, &d, &r));
            CHECK_OK(amp_autocast_end(a_scan.amp));
            CHECK_MSG(r.passed == (i == 0) && r.dtype == AMP_F32 && r.detectable > 0 && r.detectable < 0.008,
                      "seed %d, factor %g: passed %d in %s, detectable %g", seed, (double)factors[i], r.passed, amp_dtype_name(r.dtype), r.detectable);
            CHECK_EQ(ampi_dtype(a_scan.amp), AMP_BF16);
            amp_close(a_scan.amp);
            for (k = 0; k < SCANS; k++) {
                open_scan(&a_scan, (uint64_t)seed, scans[k].stored);
                a_scan.wrong = WRONG_FACTOR;
                a_scan.factor = factors[i];
                d = scan_desc(&a_scan, scans[k].compute, (uint64_t)seed);
                CHECK_OK(amp_gradcheck(a_scan.amp, &d, &r));
                CHECK_EQ(r.dtype, scans[k].compute);
                if (i == 0) limit[k] = r.detectable;
                else {
                    double excess = (double)factors[i] - 1;
                    if (excess > 1.5 * limit[k]) CHECK_MSG(!r.passed, "%s, seed %d: %g passed, %g is detectable", amp_dtype_name(scans[k].compute), seed, excess, limit[k]);
                    if (!r.passed && excess / limit[k] < least) least = excess / limit[k];
                    if (r.passed && excess / limit[k] > most) most = excess / limit[k];
                }
                seen[k][i] += !r.passed;
                if (k == 4 && i == 2 && seed == 0) {
                    size_t n = amp_gradcheck_text(&r, text, sizeof text);
                    CHECK(n == strlen(text) && n == amp_gradcheck_text(&r, NULL, 0) && strstr(text, "bf16") && strstr(text, "detect"));
                    if (getenv("SHOW")) printf("%s", text);
                }
                amp_close(a_scan.amp);
            }
        }
    if (getenv("SHOW")) {
        for (k = 0; k < SCANS; k++) printf("%s in %s: limit %.3g, found of 10: %d %d %d %d\n", amp_dtype_name(scans[k].compute),
                                           amp_dtype_name(scans[k].stored), limit[k], seen[k][0], seen[k][1], seen[k][2], seen[k][3]);
        printf("least found %g, most passed %g of the limit\n", least, most);
    }
    CHECK(least > 0.5);             /* and nothing much smaller */
    CHECK(seen[0][1] == 10 && seen[0][2] == 10);
    CHECK(seen[4][2] == 0 && limit[4] > 0.1);       /* in bf16 a tenth passes, and the report says that it would */
    CHECK_EQ(amp_gradcheck_text(NULL, NULL, 0), 0);
}

TEST(gradcheck_failures) {
    static const struct { int wrong; amp_result result; const char *text; } cases[] = {
        {NOT_FINITE, AMP_ERR_RANGE, "element 17 of output y is infinite or NaN"},
        {BAD_GRADIENT, AMP_ERR_RANGE, "element 3 of the gradient of x is infinite or NaN"},
        {FAILS, AMP_ERR_MEMORY, ".forward returned 301. AMP0301 scan: nothing left"},
        {NO_BACKWARD, (amp_result)-5, ".backward returned -5"}
    };
    int i;
    for (i = 0; i < 4; i++) {
        amp_gradcheck_report r;
        amp_gradcheck_desc d;
        uint64_t before;
        open_scan(&a_scan, 1, AMP_F32);
        a_scan.wrong = cases[i].wrong;
        d = scan_desc(&a_scan, AMP_BF16, 1);
        r.passed = 77;
        before = add_hash(add_hash(1, a_scan.x, sizeof a_scan.x), a_scan.weight, sizeof a_scan.weight);
        CHECK_ERR(amp_gradcheck(a_scan.amp, &d, &r), cases[i].result);
        CHECK_MSG(strstr(amp_last_error(), cases[i].text) != NULL, "%s", amp_last_error());
        CHECK(r.passed == 77 && ampi_thread.regions == 0 && ampi_dtype(a_scan.amp) == AMP_F32);
        CHECK(before == add_hash(add_hash(1, a_scan.x, sizeof a_scan.x), a_scan.weight, sizeof a_scan.weight));
        CHECK_EQ(a_scan.amp->random_offset, 0);
        amp_close(a_scan.amp);
    }
}

/* amp_gemm remembers what it decided, until the precision is another for a while. */
TEST(gemm_follows_the_precision) {
    const float x = 1 + 0x1p-12f, y = 1;
    amp_context *amp;
    amp_desc desc;
    int i;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_BF16;
    desc.gemm_always = desc.allow_fallback = 1;
    CHECK_OK(amp_open(&amp, &desc));
    for (i = 0; i < 3; i++) {
        ampi_precision p = ampi_precision_get(amp);
        float z = 0;
        p.autocast_dtype = i == 1 ? AMP_F32 : AMP_BF16;
        if (i > 0) ampi_precision_set(amp, &p);
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, &x, 1, &y, 1, 0, &z, 1));
        CHECK(i == 1 ? z > 1 : !(z > 1));
    }
    amp_close(amp);
}

TEST(gradcheck_bad_input) {
    amp_gradcheck_report r;
    amp_gradcheck_desc d, good;
    open_scan(&a_scan, 1, AMP_F32);
    good = d = scan_desc(&a_scan, AMP_F32, 1);
    CHECK_ERR(amp_gradcheck(NULL, &d, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_gradcheck(a_scan.amp, NULL, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_gradcheck(a_scan.amp, &d, NULL), AMP_ERR_NULL);
#undef REFUSED
#define REFUSED(change, result) do { d = good; change; CHECK_ERR(amp_gradcheck(a_scan.amp, &d, &r), result); scan_desc(&a_scan, AMP_F32, 1); } while (0)
    REFUSED(d.forward = NULL, AMP_ERR_NULL);
    REFUSED(d.backward = NULL, AMP_ERR_NULL);
    REFUSED(d.inputs = NULL, AMP_ERR_NULL);
    REFUSED(d.input_grads = NULL, AMP_ERR_NULL);
    REFUSED(d.outputs = NULL, AMP_ERR_NULL);
    REFUSED(d.output_grads = NULL, AMP_ERR_NULL);
    REFUSED(d.n_inputs = 0, AMP_ERR_RANGE);
    REFUSED(d.n_outputs = -1, AMP_ERR_RANGE);
    REFUSED(d.directions = -1, AMP_ERR_RANGE);
    REFUSED(d.directions = 1000001, AMP_ERR_RANGE);
    REFUSED(d.dtype = AMP_E4M3, AMP_ERR_UNSUPPORTED);
    REFUSED(d.dtype = AMP_I32, AMP_ERR_DTYPE);
    REFUSED(scan_ranges[0][1].count = C - 1, AMP_ERR_SHAPE);
    CHECK(strstr(amp_last_error(), "w 1 has 19 elements, and its gradient 20") != NULL);
    REFUSED(scan_ranges[2][0].count = 3, AMP_ERR_SHAPE);
    REFUSED(scan_ranges[0][0].dtype = AMP_BF16, AMP_ERR_DTYPE);
    REFUSED(scan_ranges[1][0].dtype = AMP_F64, AMP_ERR_DTYPE);
    REFUSED(scan_ranges[2][0].dtype = AMP_F64, AMP_ERR_DTYPE);
    REFUSED(scan_ranges[3][0].dtype = AMP_I32, AMP_ERR_DTYPE);
    REFUSED(scan_ranges[1][0].data = NULL, AMP_ERR_NULL);
    REFUSED(scan_ranges[0][0].count = -3, AMP_ERR_RANGE);
    d = scan_desc(&a_scan, AMP_DTYPE_DEFAULT, 1);
    d.directions = 1;
    CHECK_OK(amp_gradcheck(a_scan.amp, &d, &r));
    CHECK(r.passed == 1);
    amp_close(a_scan.amp);
}

/* ---- A row of ampi_tape_rows says what backward reads, so that the tape keeps it.  The operator's `prepare` says the
   same to the checks of memory.  The two must agree for each kind of call. */

enum { KEPT_ROWS = 8, KEPT_DIM = 16 };

/* Whether backward reads a value of an op struct, as `prepare` says.  A gradient may lie in the memory of a value, and its
   field begins with d. */
static int backward_reads(const ampi_places *at, const amp_tensor *t) {
    int i;
    for (i = 0; i < at->n; i++)
        if (at->place[i].low == (uintptr_t)t->data && at->place[i].field[1] != 'd' && !at->place[i].written) return 1;
    return 0;
}

/* Compares one node.  A loss writes its gradient in its forward and keeps nothing.  An input that forward wrote over with
   the output cannot be told from it.  RoPE's row has no ports, because it turns its input in place and backward reads no
   value. */
static void check_kept(const amp_tape *t, ampi_node *n) {
    static const int32_t flags[] = {AMPI_X, AMPI_Y, AMPI_Z};
    const ampi_tape_row *row = ampi_row_of(n);
    const ampi_operator *of = ampi_calls;
    const amp_tensor *x, *y = row->out.value ? ampi_at_port(n, row->out.value) : NULL;
    int32_t keeps = ampi_node_keeps(t, n);
    ampi_call c;
    int k;
    if (row->plan == 0 || (row->flags & AMPI_LOSS)) return;
    while (of->id != row->id) of++;
    memset(&c, 0, sizeof c);
    c.amp = t->object.amp; c.f = of->names[1]; c.op = &n->op; c.id = row->id; c.backward = 1;
    c.latest = c.at.place;
    for (k = 0; k < 2; k++) c.params[k] = n->key.params[k];
    CHECK_OK(of->prepare(&c));
    for (k = 0; k < AMPI_TAPE_INPUTS && row->in[k].value; k++) {
        x = ampi_at_port(n, row->in[k].value);
        if (x->data != y->data)
            CHECK_MSG(backward_reads(&c.at, x) == ((keeps & flags[k]) != 0), "%s: input %d", row->name, k);
    }
    if (y != NULL) CHECK_MSG(backward_reads(&c.at, y) == ((keeps & AMPI_OUT) != 0), "%s: output", row->name);
}

TEST(the_tape_keeps_what_backward_reads) {
    static const amp_activation_kind acts[] = {AMP_ACT_RELU, AMP_ACT_GELU, AMP_ACT_GELU_ERF, AMP_ACT_TANH, AMP_ACT_SILU};
    static const amp_activation_kind linear[] = {AMP_ACT_NONE, AMP_ACT_RELU, AMP_ACT_GELU, AMP_ACT_GELU_ERF};
    static const int64_t wide[] = {2, KEPT_ROWS / 2, KEPT_DIM}, flat[] = {KEPT_ROWS, KEPT_DIM};
    static float numbers[KEPT_ROWS * KEPT_DIM], weights[KEPT_DIM * KEPT_DIM], grads[3][KEPT_DIM * KEPT_DIM];
    static int32_t id[KEPT_ROWS] = {3, 1, 0, 7, 3, 2, 9, 15};
    amp_context *amp = verify_open_context(AMP_F32, AMP_LEVEL_O1, NULL);
    amp_tensor x = amp_tensor2(numbers, AMP_F32, KEPT_ROWS, KEPT_DIM), ids = amp_tensor1(id, AMP_I32, KEPT_ROWS);
    amp_param w, gain, table;
    amp_tape *t;
    amp_value h, q, loss;
    int64_t i, seen[AMPI_CUSTOM] = {0};
    int k;
    for (i = 0; i < KEPT_ROWS * KEPT_DIM; i++) numbers[i] = amp_random_uniform(5, (uint64_t)i) - 0.5f;
    for (i = 0; i < KEPT_DIM * KEPT_DIM; i++) weights[i] = amp_random_uniform(6, (uint64_t)i) - 0.5f;
    memset(&w, 0, sizeof w);
    w.weight = amp_tensor2(weights, AMP_F32, KEPT_DIM, KEPT_DIM); w.grad = amp_tensor2(grads[0], AMP_F32, KEPT_DIM, KEPT_DIM);
    table = w; table.grad.data = grads[1];
    memset(&gain, 0, sizeof gain);
    gain.weight = amp_tensor1(weights, AMP_F32, KEPT_DIM); gain.grad = amp_tensor1(grads[2], AMP_F32, KEPT_DIM);
    CHECK_OK(amp_tape_create(amp, &t, NULL));
    CHECK_OK(amp_tape_begin(t, NULL));
    h = amp_tape_add(t, amp_tape_variable(t, &x), amp_tape_embedding(t, &ids, &table, NULL));
    for (k = 0; k < (int)(sizeof acts / sizeof *acts); k++)
        h = amp_tape_activation(t, amp_tape_dropout(t, h, 0.1f), NULL, acts[k]);
    for (k = 0; k < (int)(sizeof linear / sizeof *linear); k++)
        h = amp_tape_scale(t, amp_tape_linear(t, h, &w, NULL, linear[k]), 2);
    h = amp_tape_rmsnorm(t, amp_tape_swiglu(t, amp_tape_layernorm(t, h, &gain, NULL, 0), h), &gain, 0);
    q = amp_tape_rope(t, amp_tape_reshape(t, h, wide, 3), 2, NULL);
    h = amp_tape_reshape(t, amp_tape_attention(t, q, q, amp_tape_reshape(t, h, wide, 3), 2, NULL), flat, 2);
    h = amp_tape_matmul(t, amp_tape_softmax(t, amp_tape_matmul(t, h, h, 0, 1, 0), NULL), h, 0, 0, 0);
    loss = amp_tape_mse(t, h, amp_tape_input(t, &x), AMP_REDUCTION_MEAN);
    CHECK_OK(amp_tape_backward(t, loss, NULL));
    for (i = 0; i < t->n; i++) {
        seen[t->nodes[i].key.kind]++;
        check_kept(t, &t->nodes[i]);
    }
    for (k = AMPI_LINEAR; k < AMPI_CROSS_ENTROPY; k++) CHECK_MSG(seen[k] > 0, "%s", ampi_tape_rows[k].name);
    amp_tape_destroy(t);
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(right_models_pass);
    RUN(lost_bits);
    RUN(wrong_gradient);
    RUN(lost_gradient);
    RUN(overflow);
    RUN(scale_too_large);
    RUN(failing_step);
    RUN(training_goes_on);
    RUN(out_of_memory);
    RUN(device_without_bf16);
    RUN(overrides);
    RUN(bad_input);
    RUN(placement_here);
    RUN(right_gradients);
    RUN(regions_around_do_not_count);
    RUN(wrong_gradients); RUN(gradients_beside_kinks);
    RUN(what_a_gradcheck_detects);
    RUN(gradcheck_failures);
    RUN(gemm_follows_the_precision);
    RUN(gradcheck_bad_input);
    RUN(the_tape_keeps_what_backward_reads);
    return TEST_END();
}
