/* t_adapt.c - tests amp_adapt, which finds the layers that fail in low precision.  It must find the failing layer and no
 * other.  An ordinary model must change to low precision and stay there.  A budget of 0 means fp32.  Decisions must be
 * reproducible, must survive saving and loading, and can be exported.
 *
 *     gcc -O2 -Itests tests/unit/t_adapt.c -o t_adapt -lm -lpthread && ./t_adapt      (from the project root) */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#define AMPT_TRAPS
#include "test.h"
#include <fenv.h>
#include <math.h>

/* ---- A model: eight layers x + relu(w x) / 2 and mean squared error */

enum { ROWS = 48, DIM = 48, LAYERS = 8, CELLS = ROWS * DIM, PLANTED = 3, TAIL = 20 };
enum { PLANT_NOTHING, PLANT_LARGE, PLANT_CANCEL, PLANT_OUTLIER };
enum { MOST_RECORDS = 256 };

typedef struct model {
    amp_context *amp;
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    amp_adapt *adapt;
    amp_param params[LAYERS];
    char names[LAYERS][16];
    float weights[LAYERS][DIM * DIM], grads[LAYERS][DIM * DIM];
    float x[LAYERS + 1][CELLS], in[LAYERS][CELLS], y[LAYERS][CELLS], dx[LAYERS + 1][CELLS], dy[CELLS], target[CELLS], loss;
    int plant, from;                /* what fails in layer PLANTED, from which step on */
    int step;
    double tail;                    /* the mean loss of the last TAIL steps */
    amp_adapt_record records[MOST_RECORDS];
    int n_records;
} model;

static float noise(int stream, int64_t i) { return 2 * amp_random_uniform((uint64_t)stream, (uint64_t)i) - 1; }

static void (*log_write)(void *user, amp_log_level level, int id, const char *text);    /* NULL: stderr */
static void open_model(model *m, amp_dtype dtype, int plant, int threads) {
    amp_desc desc;
    amp_optimizer_desc adam;
    amp_scaler_desc scaling;
    int i, k;
    memset(m, 0, sizeof *m);
    memset(&desc, 0, sizeof desc);
    memset(&adam, 0, sizeof adam);
    memset(&scaling, 0, sizeof scaling);
    m->plant = plant;
    desc.dtype = dtype;
    desc.threads = threads;
    desc.logger.level = log_write ? AMP_LOG_WARNING : AMP_LOG_ERROR;        /* layers overflow on purpose */
    desc.logger.write = log_write;
    CHECK_OK(amp_open(&m->amp, &desc));
    for (i = 0; i < LAYERS; i++) {
        amp_param *p = &m->params[i];
        snprintf(m->names[i], sizeof m->names[i], "h.%d.weight", i);
        for (k = 0; k < DIM * DIM; k++) m->weights[i][k] = 0.25f * noise(i, k);
        p->name = m->names[i];
        p->weight = amp_tensor2(m->weights[i], AMP_F32, DIM, DIM);
        p->grad = amp_tensor2(m->grads[i], AMP_F32, DIM, DIM);
        if (i != PLANTED || plant < PLANT_CANCEL) continue;
        p->grad.data = NULL;        /* its weights stay: pairs of columns w and -w, or a column for a huge channel */
        for (k = 0; k < DIM * DIM && plant == PLANT_CANCEL; k += 2) m->weights[i][k + 1] = -m->weights[i][k];
        for (k = 0; k < DIM * DIM && plant == PLANT_OUTLIER; k += DIM) m->weights[i][k] *= 1e-6f;
    }
    CHECK_OK(amp_param_register(m->amp, m->params, LAYERS));
    adam.params = m->params; adam.n_params = LAYERS; adam.lr = 0.001;
    CHECK_OK(amp_optimizer_create(m->amp, &m->optimizer, &adam));
    CHECK_OK(amp_scaler_create(m->amp, &m->scaler, &scaling));
}
static void close_model(model *m) {
    amp_adapt_destroy(m->adapt);
    amp_scaler_destroy(m->scaler);
    amp_optimizer_destroy(m->optimizer);
    amp_close(m->amp);
}

static amp_adapt_desc adapt_desc(model *m, const amp_dtype *ladder) {
    amp_adapt_desc d;
    memset(&d, 0, sizeof d);
    d.params = m->params; d.n_params = LAYERS;
    d.ladder = ladder; d.n_ladder = ladder ? 2 : 0;
    d.scaler = m->scaler;
    return d;
}

/* The input of the planted layer: large, or two columns each that are nearly the same large number. */
static void plant_input(const model *m, int i, float *in) {
    int k, on = i == PLANTED && m->step >= m->from;
    memcpy(in, m->x[i], CELLS * sizeof *in);
    if (on && m->plant == PLANT_LARGE) for (k = 0; k < CELLS; k++) in[k] *= 1e6f;
    if (i == PLANTED && m->plant == PLANT_OUTLIER) for (k = 0; k < CELLS; k += DIM) in[k] *= on ? 1e6f : 1.0f;
    if (i == PLANTED && m->plant == PLANT_CANCEL) for (k = 0; k < CELLS; k++) {
        float large = m->step >= m->from ? 3000 * (1 + 0.3f * noise(99, k / 2)) : 0;
        in[k] = k % 2 == 0 ? large + m->x[i][k] : large;
    }
}

static void forward(model *m, amp_linear_op *ops) {
    int i, k;
    for (i = 0; i < LAYERS; i++) {
        amp_linear_op *op = &ops[i];
        float shrink = i == PLANTED && m->plant == PLANT_LARGE && m->step >= m->from ? 1e-6f : 1.0f;
        memset(op, 0, sizeof *op);
        plant_input(m, i, m->in[i]);
        op->x = amp_tensor2(m->in[i], AMP_F32, ROWS, DIM);
        op->y = amp_tensor2(m->y[i], AMP_F32, ROWS, DIM);
        op->weight = &m->params[i];
        op->act = AMP_ACT_RELU;
        CHECK_OK(amp_linear(m->amp, op));
        for (k = 0; k < CELLS; k++) m->x[i + 1][k] = m->x[i][k] + 0.5f * shrink * m->y[i][k];
    }
}

static void backward(model *m, amp_linear_op *ops) {
    int i, k;
    for (i = LAYERS - 1; i >= 0; i--) {
        int large = i == PLANTED && m->plant == PLANT_LARGE && m->step >= m->from;
        amp_linear_op *op = &ops[i];
        for (k = 0; k < CELLS; k++) m->dy[k] = 0.5f * (large ? 1e-6f : 1.0f) * m->dx[i + 1][k];
        op->dy = amp_tensor2(m->dy, AMP_F32, ROWS, DIM);
        op->dx = amp_tensor2(m->dx[i], AMP_F32, ROWS, DIM);
        CHECK_OK(amp_linear_backward(m->amp, op));
        for (k = 0; k < CELLS; k++) {
            float d = m->dx[i][k] * (large ? 1e6f : 1.0f);
            if (i == PLANTED && m->plant == PLANT_CANCEL && k % 2 == 1) d = 0;
            if (i == PLANTED && m->plant == PLANT_OUTLIER && k % DIM == 0) d *= m->step >= m->from ? 1e6f : 1.0f;
            m->dx[i][k] = m->dx[i + 1][k] + d;
        }
    }
}

/* One step on a batch of its own; the target is a fixed function of the input. */
static void step(model *m, int steps) {
    amp_linear_op ops[LAYERS];
    amp_mse_op mse;
    int k;
    for (k = 0; k < CELLS; k++) m->x[0][k] = noise(1000 + m->step, k);
    for (k = 0; k < CELLS; k++) m->target[k] = 2 * m->x[0][k] * m->x[0][(k + 1) % CELLS] + m->x[0][(k + 7) % CELLS];
    memset(&mse, 0, sizeof mse);
    CHECK_OK(amp_autocast_begin(m->amp, NULL));
    forward(m, ops);
    mse.x = amp_tensor2(m->x[LAYERS], AMP_F32, ROWS, DIM);
    mse.target = amp_tensor2(m->target, AMP_F32, ROWS, DIM);
    mse.dx = amp_tensor2(m->dx[LAYERS], AMP_F32, ROWS, DIM);
    mse.loss = &m->loss;
    mse.grad_scale = amp_scaler_scale_ptr(m->scaler);
    CHECK_OK(amp_mse(m->amp, &mse));
    CHECK_OK(amp_autocast_end(m->amp));
    backward(m, ops);
    CHECK_OK(amp_step(m->optimizer, m->scaler));
    if (m->adapt != NULL) {
        CHECK_OK(amp_adapt_step(m->adapt));
        while (m->n_records < MOST_RECORDS && amp_adapt_next(m->adapt, &m->records[m->n_records])) m->n_records++;
    }
    if (++m->step > steps - TAIL) m->tail += (double)m->loss / TAIL;
}
static void train(model *m, int steps) { for (m->tail = 0; m->step < steps;) step(m, steps); }

static amp_dtype dtype_of(const model *m, int layer) {
    amp_adapt_record r;
    CHECK_OK(amp_adapt_layer(m->adapt, layer, &r));
    CHECK(r.from == r.to);
    return r.to;
}

static model a_model, another;

/* ---- Proof */

/* Within 200 steps the planted layer, and no other, is high; the loss is fp32's within 1%; at least 85% of the
 * multiply-adds run low. */
static void find_planted(int plant, amp_dtype low) {
    model *m = &a_model, *exact = &another;
    amp_dtype ladder[2];
    amp_adapt_desc d;
    amp_adapt_record r;
    double work = 0, at_low = 0;
    int i;
    ladder[0] = low; ladder[1] = AMP_F32;
    open_model(exact, AMP_F32, plant, 1);
    train(exact, 300);
    open_model(m, AMP_F32, plant, 1);
    d = adapt_desc(m, ladder);
    CHECK_OK(amp_adapt_create(m->amp, &m->adapt, &d));
    train(m, 200);
    for (i = 0; i < LAYERS; i++) {
        CHECK_OK(amp_adapt_layer(m->adapt, i, &r));
        CHECK_MSG(r.to == (i == PLANTED && plant ? AMP_F32 : low), "%s is in %s: errors %g %g", r.layer, amp_dtype_name(r.to),
                  r.output_error, r.gradient_error);
        if (i == PLANTED && plant) CHECK_MSG(r.output_error > 0.25, "%g", r.output_error);
        work += r.multiply_adds;
        if (r.to == low) at_low += r.multiply_adds;
    }
    CHECK(work > 0);
    CHECK_MSG(at_low >= 0.85 * work, "%g", at_low / work);
    train(m, 300);
    CHECK_MSG(fabs(m->tail - exact->tail) < 0.01 * exact->tail, "%g, in fp32 %g", m->tail, exact->tail);
    for (i = 0; i < m->n_records; i++) CHECK(m->records[i].to == low);
    CHECK_EQ(m->n_records, plant ? LAYERS - 1 : LAYERS);
    close_model(m);
    close_model(exact);
}

TEST(large_activations_in_fp16) { find_planted(PLANT_LARGE, AMP_F16); }
TEST(cancelling_sums_in_bf16) { find_planted(PLANT_CANCEL, AMP_BF16); }
TEST(an_outlier_channel_in_fp8) { find_planted(PLANT_OUTLIER, AMP_FP8); }
TEST(an_ordinary_model_goes_low_and_stays) {
    find_planted(PLANT_NOTHING, AMP_BF16);
    find_planted(PLANT_NOTHING, AMP_F16);
    find_planted(PLANT_NOTHING, AMP_FP8);
}

/* With three rungs each layer takes the steps it can: the planted one stops in bf16. */
TEST(a_ladder_of_three) {
    static const amp_dtype ladder[3] = {AMP_FP8, AMP_BF16, AMP_F32};
    model *m = &a_model;
    amp_adapt_desc d;
    int i;
    open_model(m, AMP_F32, PLANT_OUTLIER, 1);
    d = adapt_desc(m, ladder);
    d.n_ladder = 3;
    CHECK_OK(amp_adapt_create(m->amp, &m->adapt, &d));
    train(m, 200);
    for (i = 0; i < LAYERS; i++) CHECK_EQ(dtype_of(m, i), i == PLANTED ? AMP_BF16 : AMP_FP8);
    CHECK_EQ(m->n_records, 2 * LAYERS - 1);
    train(m, 400);
    CHECK_EQ(m->n_records, 2 * LAYERS - 1);
    close_model(m);
}

/* A layer that begins to fail while it is low moves up in the first step that shows it, and stays up. */
static void goes_up(int plant, amp_dtype low) {
    model *m = &a_model;
    amp_dtype ladder[2];
    amp_adapt_desc d;
    int i, ups = 0;
    ladder[0] = low; ladder[1] = AMP_F32;
    open_model(m, AMP_F32, plant, 1);
    m->from = 150;
    d = adapt_desc(m, ladder);
    CHECK_OK(amp_adapt_create(m->amp, &m->adapt, &d));
    train(m, 150);
    for (i = 0; i < LAYERS; i++) CHECK_EQ(dtype_of(m, i), low);
    train(m, 400);
    for (i = 0; i < LAYERS; i++) CHECK_EQ(dtype_of(m, i), i == PLANTED ? AMP_F32 : low);
    for (i = 0; i < m->n_records; i++) {
        const amp_adapt_record *r = &m->records[i];
        if (r->to != AMP_F32) continue;
        ups++;
        CHECK(strcmp(r->layer, m->names[PLANTED]) == 0 && r->from == low);
        CHECK_MSG(r->step >= 150 && r->step < 150 + 20, "step %lld", (long long)r->step);
        CHECK(r->output_error > 0.1);
    }
    CHECK_EQ(ups, 1);
    close_model(m);
}
TEST(a_failing_layer_goes_up_at_once) {
    goes_up(PLANT_LARGE, AMP_F16);
    goes_up(PLANT_CANCEL, AMP_BF16);
}

/* With a budget of 0 nothing moves, and every weight is that of a run without amp_adapt. */
TEST(a_budget_of_0_is_fp32) {
    model *m = &a_model, *exact = &another;
    amp_adapt_desc d;
    open_model(exact, AMP_F32, PLANT_NOTHING, 1);
    train(exact, 100);
    open_model(m, AMP_F32, PLANT_NOTHING, 1);
    d = adapt_desc(m, NULL);
    d.budget = AMP_EXPLICIT_ZERO;
    CHECK_OK(amp_adapt_create(m->amp, &m->adapt, &d));
    train(m, 100);
    CHECK_EQ(m->n_records, 0);
    CHECK(memcmp(m->weights, exact->weights, sizeof m->weights) == 0);
    CHECK(memcmp(&m->loss, &exact->loss, sizeof m->loss) == 0);
    close_model(m);
    close_model(exact);
}

/* ---- Rules of moving */

static amp_adapt *adapt_of(model *m, const amp_adapt_desc *d) {
    CHECK_OK(amp_adapt_create(m->amp, &m->adapt, d));
    return m->adapt;
}

/* At most .changes layers move down in an interval, in the order of the parameters, after .checks intervals. */
TEST(at_most_so_many_move_at_once) {
    model *m = &a_model;
    amp_adapt_desc d;
    int i;
    open_model(m, AMP_F32, PLANT_NOTHING, 1);
    d = adapt_desc(m, NULL);
    d.changes = 3; d.interval = 5; d.checks = 4;
    adapt_of(m, &d);
    CHECK_OK(amp_adapt_query(m->adapt, &d));
    CHECK(d.changes == 3 && d.n_ladder == 2 && d.ladder[0] == AMP_BF16 && d.ladder[1] == AMP_F32 && d.rows == 8);
    train(m, 40);
    CHECK_EQ(m->n_records, LAYERS);
    for (i = 0; i < LAYERS; i++) {
        CHECK(strcmp(m->records[i].layer, m->names[i]) == 0);
        CHECK_EQ(m->records[i].step, 19 + 5 * (i / 3));
    }
    close_model(m);
}

/* Steps without a forward give no evidence, which is said once. */
static int warned_1310;
static void count_1310(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level; (void)text;
    warned_1310 += id == 1310;
}
TEST(no_evidence_is_said_once) {
    model *m = &a_model;
    amp_adapt_desc d;
    int i;
    log_write = count_1310;
    open_model(m, AMP_F32, PLANT_NOTHING, 1);
    log_write = NULL;
    d = adapt_desc(m, NULL);
    d.interval = 5;
    adapt_of(m, &d);
    for (i = 0; i < 20; i++) CHECK_OK(amp_adapt_step(m->adapt));
    CHECK_EQ(warned_1310, 1);
    CHECK_EQ(m->n_records, 0);
    close_model(m);
}

/* Decisions are the same with any number of threads, and from run to run. */
TEST(decisions_repeat) {
    model *m = &a_model, *again = &another;
    amp_adapt_desc d;
    open_model(m, AMP_F32, PLANT_CANCEL, 1);
    open_model(again, AMP_F32, PLANT_CANCEL, 3);
    m->from = again->from = 90;
    d = adapt_desc(m, NULL);
    adapt_of(m, &d);
    d = adapt_desc(again, NULL);
    adapt_of(again, &d);
    train(m, 130);
    train(again, 130);
    CHECK(m->n_records > LAYERS);
    CHECK(m->n_records == again->n_records && memcmp(m->records, again->records, sizeof m->records) == 0);
    CHECK(memcmp(m->weights, again->weights, sizeof m->weights) == 0);
    close_model(m);
    close_model(again);
}

/* A layer that an override names is left alone: one that was there before, and one that came later. */
TEST(overrides_of_others_hold) {
    model *m = &a_model;
    amp_adapt_desc d;
    amp_adapt_record r;
    open_model(m, AMP_F32, PLANT_NOTHING, 1);
    CHECK_OK(amp_layer_override(m->amp, "h.1.*", AMP_F16));
    d = adapt_desc(m, NULL);
    adapt_of(m, &d);
    train(m, 140);
    CHECK_OK(amp_adapt_layer(m->adapt, 1, &r));
    CHECK(r.fixed == 1 && r.from == AMP_F16 && r.to == AMP_F16);
    CHECK_EQ(dtype_of(m, 2), AMP_BF16);
    CHECK_OK(amp_layer_override(m->amp, "h.2.*", AMP_TF32));
    train(m, 300);
    CHECK_OK(amp_adapt_layer(m->adapt, 2, &r));
    CHECK(r.fixed == 1 && r.to == AMP_TF32);
    CHECK_EQ(amp_autocast_compute(m->amp, AMP_OP_LINEAR, "h.1.weight", AMP_F32, AMP_F32), AMP_F32);     /* no region is open */
    CHECK_EQ(dtype_of(m, 3), AMP_BF16);
    close_model(m);
}

/* While frozen, nothing is looked at and nothing moves; afterwards, counting begins anew. */
TEST(freezing) {
    model *m = &a_model;
    amp_adapt_desc d;
    int i;
    open_model(m, AMP_F32, PLANT_CANCEL, 1);
    m->from = 110;
    d = adapt_desc(m, NULL);
    adapt_of(m, &d);
    train(m, 70);
    CHECK_EQ(m->n_records, 3);          /* a third of them */
    CHECK_OK(amp_adapt_freeze(m->adapt, 1));
    train(m, 160);
    CHECK_EQ(m->n_records, 3);
    CHECK_OK(amp_adapt_freeze(m->adapt, 0));
    train(m, 200);
    CHECK_EQ(m->n_records, 3);
    train(m, 300);
    for (i = 0; i < LAYERS; i++) CHECK_EQ(dtype_of(m, i), i == PLANTED ? AMP_F32 : AMP_BF16);
    close_model(m);
}

static int trial(void *user, amp_context *amp) {
    model *m = (model *)user;
    amp_linear_op ops[LAYERS];
    (void)amp;
    CHECK_ERR(amp_adapt_step(m->adapt), AMP_ERR_STATE);
    CHECK_OK(amp_autocast_begin(m->amp, NULL));
    forward(m, ops);
    CHECK_OK(amp_autocast_end(m->amp));
    backward(m, ops);
    return 0;
}

/* Trials of amp_verify and inference are not looked at: what follows is as if they had not been. */
TEST(trials_and_inference_do_not_count) {
    model *m = &a_model, *twin = &another;
    amp_adapt_desc d;
    amp_verify_desc v;
    static amp_verify_report report;
    open_model(m, AMP_F32, PLANT_LARGE, 1);
    open_model(twin, AMP_F32, PLANT_LARGE, 1);
    m->from = twin->from = 1000;
    d = adapt_desc(m, NULL);
    adapt_of(m, &d);
    d = adapt_desc(twin, NULL);
    adapt_of(twin, &d);
    train(m, 70);
    train(twin, 70);
    memset(&v, 0, sizeof v);
    v.step = trial; v.user = m;
    v.params = m->params; v.n_params = LAYERS;
    m->from = 0;
    CHECK_OK(amp_verify(m->amp, &v, &report));
    {
        amp_linear_op ops[LAYERS];
        amp_autocast_desc region;
        memset(&region, 0, sizeof region);
        region.mode = AMP_MODE_INFERENCE;
        CHECK_OK(amp_autocast_begin(m->amp, &region));
        forward(m, ops);
        CHECK_OK(amp_autocast_end(m->amp));
    }
    m->from = 1000;
    train(m, 140);
    train(twin, 140);
    CHECK(m->n_records == LAYERS && memcmp(m->records, twin->records, sizeof m->records) == 0);
    CHECK(memcmp(m->weights, twin->weights, sizeof m->weights) == 0);
    close_model(m);
    close_model(twin);
}

/* ---- What evidence is */

/* One layer y = x w and its gradients, at each step. */
typedef struct one {
    amp_context *amp;
    amp_adapt *adapt;
    amp_param w;
    float weight[32 * 32], grad[32 * 32], x[32 * 32], y[32 * 32], dy[32 * 32], dx[32 * 32];
} one;
static one single;

static void open_one(one *o, const amp_dtype *ladder) {
    amp_adapt_desc d;
    amp_desc desc;
    int i;
    memset(o, 0, sizeof *o);
    memset(&d, 0, sizeof d);
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_F32; desc.threads = 1; desc.logger.level = AMP_LOG_ERROR;
    CHECK_OK(amp_open(&o->amp, &desc));
    for (i = 0; i < 32 * 32; i++) { o->weight[i] = noise(1, i); o->x[i] = noise(2, i); o->dy[i] = noise(3, i); }
    o->w.name = "w";
    o->w.weight = amp_tensor2(o->weight, AMP_F32, 32, 32);
    o->w.grad = amp_tensor2(o->grad, AMP_F32, 32, 32);
    CHECK_OK(amp_param_register(o->amp, &o->w, 1));
    d.params = &o->w; d.n_params = 1; d.ladder = ladder; d.n_ladder = 2;
    d.interval = 4;
    CHECK_OK(amp_adapt_create(o->amp, &o->adapt, &d));
}
static void use_one(one *o, const char *layer, int backward) {
    amp_linear_op op;
    memset(&op, 0, sizeof op);
    op.x = amp_tensor2(o->x, AMP_F32, 32, 32);
    op.y = amp_tensor2(o->y, AMP_F32, 32, 32);
    op.weight = &o->w;
    op.layer = layer;
    CHECK_OK(amp_autocast_begin(o->amp, NULL));
    CHECK_OK(amp_linear(o->amp, &op));
    CHECK_OK(amp_autocast_end(o->amp));
    if (!backward) return;
    op.dy = amp_tensor2(o->dy, AMP_F32, 32, 32);
    op.dx = amp_tensor2(o->dx, AMP_F32, 32, 32);
    CHECK_OK(amp_linear_backward(o->amp, &op));
}
static void run_one(one *o, int steps, int backward) {
    while (steps-- > 0) { use_one(o, NULL, backward); CHECK_OK(amp_adapt_step(o->adapt)); }
}
static amp_dtype dtype_of_one(const one *o) {
    amp_adapt_record r;
    CHECK_OK(amp_adapt_layer(o->adapt, 0, &r));
    return r.to;
}
static void close_one(one *o) { amp_adapt_destroy(o->adapt); amp_close(o->amp); }
static const amp_dtype to_bf16[2] = {AMP_BF16, AMP_F32}, to_fp8[2] = {AMP_FP8, AMP_F32};

/* Where fp32 is not finite nothing was measured, and nothing moves; such an interval breaks the row. */
TEST(what_cannot_be_measured_does_not_count) {
    static const uint32_t bits[2] = {0x7fc00000u, 0x7f800000u};
    one *o = &single;
    amp_adapt_record r;
    int i, k;
    for (k = 0; k < 2; k++) {
        open_one(o, to_bf16);
        for (i = 0; i < 32 * 32; i++) memcpy(&o->x[i], &bits[k], sizeof *bits);
        run_one(o, 40, 1);
        CHECK_OK(amp_adapt_layer(o->adapt, 0, &r));
        CHECK_MSG(r.to == AMP_F32 && r.overflow > 0 && r.checks == 0, "%s, overflow %g", amp_dtype_name(r.to), r.overflow);
        for (i = 0; i < 32 * 32; i++) o->x[i] = noise(2, i);
        run_one(o, 8, 1);
        memcpy(&o->dy[5], &bits[k], sizeof *bits);
        run_one(o, 4, 1);
        CHECK_OK(amp_adapt_layer(o->adapt, 0, &r));
        CHECK(r.to == AMP_F32 && r.checks == 0);
        o->dy[5] = 1;
        run_one(o, 8, 1);
        CHECK(dtype_of_one(o) == AMP_F32);
        run_one(o, 4, 1);
        CHECK(dtype_of_one(o) == AMP_BF16);
        close_one(o);
    }
}

/* A layer that had a backward is judged by it. */
TEST(a_backward_is_waited_for) {
    one *o = &single;
    open_one(o, to_bf16);
    run_one(o, 4, 1);
    run_one(o, 40, 0);
    CHECK_EQ(dtype_of_one(o), AMP_F32);
    run_one(o, 8, 1);
    CHECK_EQ(dtype_of_one(o), AMP_BF16);
    close_one(o);
    open_one(o, to_bf16);
    run_one(o, 12, 0);
    CHECK_EQ(dtype_of_one(o), AMP_BF16);
    close_one(o);
}

/* Rows are scaled in fp8 as the operand is, not by themselves. */
TEST(fp8_is_scaled_by_the_whole_operand) {
    one *o = &single;
    amp_adapt_record r;
    int i;
    open_one(o, to_fp8);
    for (i = 0; i < 32; i++) o->x[17 * 32 + i] *= 3e6f;     /* its turn does not come in the first intervals */
    run_one(o, 4, 1);
    CHECK_OK(amp_adapt_layer(o->adapt, 0, &r));
    CHECK_MSG(r.underflow > 0.9 && r.output_error > 0.9, "%g, %g", r.underflow, r.output_error);
    run_one(o, 40, 1);
    CHECK_EQ(dtype_of_one(o), AMP_F32);
    for (i = 0; i < 32; i++) o->x[17 * 32 + i] *= 1 / 3e6f;
    run_one(o, 12, 1);
    CHECK_EQ(dtype_of_one(o), AMP_FP8);
    for (i = 0; i < 32; i++) o->dy[19 * 32 + i] *= 3e14f;
    run_one(o, 4, 1);
    CHECK_EQ(dtype_of_one(o), AMP_F32);
    close_one(o);
}

/* A weight of two names stays in fp32 under both. */
TEST(a_weight_of_two_names_stays) {
    one *o = &single;
    amp_adapt_record r;
    int i, late;
    for (late = 0; late < 2; late++) {
        open_one(o, to_bf16);
        if (late) { for (i = 0; i < 12; i++) { use_one(o, "in", 1); CHECK_OK(amp_adapt_step(o->adapt)); }
                    CHECK_EQ(dtype_of_one(o), AMP_BF16); }
        for (i = 0; i < 40; i++) {
            use_one(o, "in", 1);
            use_one(o, "out", 1);
            CHECK_OK(amp_adapt_step(o->adapt));
        }
        CHECK_OK(amp_adapt_layer(o->adapt, 0, &r));
        CHECK(r.to == AMP_F32 && r.fixed == 1);
        CHECK_OK(amp_autocast_begin(o->amp, NULL));
        CHECK_EQ(amp_autocast_compute(o->amp, AMP_OP_LINEAR, "in", AMP_F32, AMP_F32), AMP_F32);
        CHECK_EQ(amp_autocast_compute(o->amp, AMP_OP_LINEAR, "out", AMP_F32, AMP_F32), AMP_F32);
        CHECK_OK(amp_autocast_end(o->amp));
        close_one(o);
    }
}

/* Decisions are the same under the host's rounding and traps. */
TEST(the_host_rounding_does_not_decide) {
    SKIP_ON_WINDOWS("printf that works while inexact results trap");
    static one plain, rounded;
    amp_adapt_record r[2];
    open_one(&plain, to_bf16);
    open_one(&rounded, to_bf16);
    memset(plain.x, 0, 32 * sizeof *plain.x);
    memcpy(plain.x, "\1\0\0", 4);                  /* becomes 0: one of 225 values */
    memcpy(rounded.x, plain.x, sizeof plain.x);
    run_one(&plain, 30, 1);
    fesetround(FE_UPWARD);
#if defined(__x86_64__) && !defined(__FAST_MATH__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() & ~0x1000u);        /* what is not exact traps */
#endif
    run_one(&rounded, 30, 1);
#if defined(__x86_64__) && !defined(__FAST_MATH__)
    __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~0x3fu) | 0x1000u);
#endif
    fesetround(FE_TONEAREST);
    CHECK(amp_adapt_next(plain.adapt, &r[0]) == 1 && amp_adapt_next(rounded.adapt, &r[1]) == 1);
    CHECK(memcmp(&r[0], &r[1], sizeof *r) == 0);
    close_one(&plain);
    close_one(&rounded);
}

/* The operator of a head computes fp8 in bf16: its layer leaves that rung out. */
TEST(a_head_has_no_fp8) {
    static const amp_dtype ladder[3] = {AMP_FP8, AMP_BF16, AMP_F32};
    static int32_t targets[32];
    one *o = &single;
    amp_adapt_desc d;
    amp_linear_cross_entropy_op op;
    float loss;
    int i, rungs;
    for (rungs = 2; rungs <= 3; rungs++) {
        open_one(o, to_fp8);
        CHECK_OK(amp_adapt_query(o->adapt, &d));
        amp_adapt_destroy(o->adapt);
        d.ladder = rungs == 2 ? to_fp8 : ladder; d.n_ladder = rungs;
        CHECK_OK(amp_adapt_create(o->amp, &o->adapt, &d));
        for (i = 0; i < 60; i++) {
            memset(&op, 0, sizeof op);
            op.x = amp_tensor2(o->x, AMP_F32, 32, 32);
            op.dx = amp_tensor2(o->dx, AMP_F32, 32, 32);
            op.weight = &o->w;
            op.labels = targets; op.classes = 32;
            op.loss = &loss;
            CHECK_OK(amp_autocast_begin(o->amp, NULL));
            CHECK_OK(amp_linear_cross_entropy(o->amp, &op));
            CHECK_OK(amp_autocast_end(o->amp));
            CHECK_OK(amp_adapt_step(o->adapt));
        }
        CHECK_EQ(dtype_of_one(o), rungs == 2 ? AMP_F32 : AMP_BF16);
        close_one(o);
    }
}

/* ---- State */

static amp_dtype computes(amp_context *amp, const char *layer) {
    amp_dtype dtype;
    CHECK_OK(amp_autocast_begin(amp, NULL));
    dtype = amp_autocast_compute(amp, AMP_OP_LINEAR, layer, AMP_F32, AMP_F32);
    CHECK_OK(amp_autocast_end(amp));
    return dtype;
}

/* Loading an earlier state takes back what was decided since; a user's overrides hold. */
TEST(an_earlier_state_rolls_back) {
    one *o = &single;
    amp_adapt_record r;
    amp_state *state;
    open_one(o, to_bf16);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_adapt_save(o->adapt, state, "a"));
    run_one(o, 12, 1);
    CHECK(dtype_of_one(o) == AMP_BF16 && computes(o->amp, "w") == AMP_BF16);
    CHECK_OK(amp_adapt_load(o->adapt, state, "a"));
    CHECK(dtype_of_one(o) == AMP_F32 && computes(o->amp, "w") == AMP_F32);
    run_one(o, 12, 1);
    CHECK_OK(amp_adapt_layer(o->adapt, 0, &r));
    CHECK(r.to == AMP_BF16 && r.fixed == 0 && computes(o->amp, "w") == AMP_BF16);
    CHECK_OK(amp_adapt_save(o->adapt, state, "a"));             /* in bf16 */
    close_one(o);
    open_one(o, to_bf16);
    CHECK_OK(amp_layer_override(o->amp, "w", AMP_TF32));        /* made before resuming */
    CHECK_OK(amp_adapt_load(o->adapt, state, "a"));
    CHECK_OK(amp_adapt_layer(o->adapt, 0, &r));
    CHECK(r.to == AMP_TF32 && r.fixed == 1 && computes(o->amp, "w") == AMP_TF32);
    CHECK_OK(amp_adapt_save(o->adapt, state, "a"));             /* overridden */
    close_one(o);
    open_one(o, to_bf16);
    CHECK_OK(amp_adapt_load(o->adapt, state, "a"));
    CHECK_OK(amp_adapt_layer(o->adapt, 0, &r));
    CHECK(r.to == AMP_F32 && r.fixed == 0 && computes(o->amp, "w") == AMP_F32);
    run_one(o, 16, 1);
    CHECK_EQ(dtype_of_one(o), AMP_BF16);
    close_one(o);
    amp_state_destroy(state);
}


static void save(model *m, amp_state *state) {
    CHECK_OK(amp_state_put(state, "weights", AMP_F32, m->weights, sizeof m->weights / 4));
    CHECK_OK(amp_optimizer_save(m->optimizer, state, "adamw"));
    CHECK_OK(amp_scaler_save(m->scaler, state, "scaler"));
    CHECK_OK(amp_adapt_save(m->adapt, state, "adapt"));
}
static void load(model *m, const amp_state *state) {
    int i;
    CHECK_OK(amp_state_get(state, "weights", AMP_F32, m->weights, sizeof m->weights / 4));
    for (i = 0; i < LAYERS; i++) amp_param_changed(&m->params[i]);
    CHECK_OK(amp_optimizer_load(m->optimizer, state, "adamw"));
    CHECK_OK(amp_scaler_load(m->scaler, state, "scaler"));
    CHECK_OK(amp_adapt_load(m->adapt, state, "adapt"));
}

/* A run that is saved at any point, in the middle of an interval too, and resumed is the uninterrupted one. */
TEST(a_resumed_run_decides_the_same) {
    static const int points[] = {7, 60, 71, 118};
    model *m = &a_model, *resumed = &another;
    size_t i;
    for (i = 0; i < sizeof points / sizeof *points; i++) {
        amp_state *state;
        amp_adapt_desc d;
        int before;
        open_model(m, AMP_F32, PLANT_CANCEL, 1);
        m->from = 90;
        d = adapt_desc(m, NULL);
        adapt_of(m, &d);
        train(m, points[i]);
        CHECK_OK(amp_state_create(&state, NULL));
        save(m, state);
        before = m->n_records;
        train(m, 150);
        open_model(resumed, AMP_F32, PLANT_CANCEL, 1);
        resumed->from = 90;
        resumed->step = points[i];
        d = adapt_desc(resumed, NULL);
        adapt_of(resumed, &d);
        load(resumed, state);
        train(resumed, 150);
        CHECK_EQ(resumed->n_records, m->n_records - before);
        CHECK(memcmp(resumed->records, m->records + before, (size_t)resumed->n_records * sizeof *m->records) == 0);
        CHECK(memcmp(m->weights, resumed->weights, sizeof m->weights) == 0);
        amp_state_destroy(state);
        close_model(m);
        close_model(resumed);
    }
}

/* A state of another ladder or model, and one that is damaged, is refused, and nothing has changed. */
TEST(foreign_states_are_refused) {
    static const char *const records[] = {"a.adapt", "a.adapt_model", "a.adapt_layers", "a.adapt_evidence", "a.adapt_names"};
    model *m = &a_model, *other = &another;
    amp_dtype ladder[2] = {AMP_F16, AMP_F32};
    amp_state *state, *spoiled, *before, *after;
    void *blob[2];
    size_t bytes[2], i;
    amp_adapt_desc d;
    char text[2][4000];
    open_model(m, AMP_F32, PLANT_NOTHING, 1);
    d = adapt_desc(m, NULL);
    adapt_of(m, &d);
    train(m, 75);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_adapt_save(m->adapt, state, "a"));
    open_model(other, AMP_F32, PLANT_NOTHING, 1);
    d = adapt_desc(other, ladder);
    adapt_of(other, &d);
    train(other, 75);
    CHECK_OK(amp_state_create(&before, NULL));
    CHECK_OK(amp_adapt_save(other->adapt, before, "b"));
    amp_adapt_text(other->adapt, text[0], sizeof text[0]);
    CHECK_ERR(amp_adapt_load(other->adapt, state, "a"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "ladder") != NULL);
    CHECK_ERR(amp_adapt_load(other->adapt, state, "nothing"), AMP_ERR_NAME);
    CHECK_OK(amp_state_create(&after, NULL));
    CHECK_OK(amp_adapt_save(other->adapt, after, "b"));
    CHECK_OK(amp_state_encode(before, &blob[0], &bytes[0]));
    CHECK_OK(amp_state_encode(after, &blob[1], &bytes[1]));
    CHECK(bytes[0] == bytes[1] && memcmp(blob[0], blob[1], bytes[0]) == 0);
    amp_adapt_text(other->adapt, text[1], sizeof text[1]);
    CHECK(strcmp(text[0], text[1]) == 0);
    amp_file_free(NULL, blob[0], bytes[0]);
    amp_file_free(NULL, blob[1], bytes[1]);
    amp_state_destroy(before);
    amp_state_destroy(after);
    amp_adapt_destroy(other->adapt);
    d = adapt_desc(other, NULL);
    d.n_params = LAYERS - 1;
    adapt_of(other, &d);
    CHECK_ERR(amp_adapt_load(other->adapt, state, "a"), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "model") != NULL);
    amp_adapt_destroy(other->adapt);
    other->params[5].name = "other.weight";
    d = adapt_desc(other, NULL);
    adapt_of(other, &d);
    CHECK_ERR(amp_adapt_load(other->adapt, state, "a"), AMP_ERR_MISMATCH);
    CHECK_MSG(strstr(amp_last_error(), "other.weight") != NULL, "%s", amp_last_error());
    other->params[5].name = other->names[5];
    for (i = 0; i < sizeof records / sizeof *records; i++) {
        amp_dtype dtype;
        int64_t n = amp_state_count(state, records[i], &dtype);
        unsigned char values[8 * LAYERS * 18];
        CHECK_OK(amp_state_save(state, "build/t_adapt.state"));
        CHECK_OK(amp_state_load(&spoiled, NULL, "build/t_adapt.state"));
        CHECK(n * (int64_t)amp_dtype_size(dtype) <= (int64_t)sizeof values);
        CHECK_OK(amp_state_get(spoiled, records[i], dtype, values, n));
        memset(values, dtype == AMP_U8 ? 'x' : 0xff, (size_t)n * amp_dtype_size(dtype));        /* NaN, -1, no end */
        CHECK_OK(amp_state_put(spoiled, records[i], dtype, values, n));
        CHECK_ERR(amp_adapt_load(m->adapt, spoiled, "a"), AMP_ERR_MISMATCH);
        CHECK_OK(amp_state_put(spoiled, records[i], dtype, values, n - 1));
        CHECK_ERR(amp_adapt_load(m->adapt, spoiled, "a"), AMP_ERR_MISMATCH);
        amp_state_destroy(spoiled);
    }
    remove("build/t_adapt.state");
    CHECK_OK(amp_adapt_load(m->adapt, state, "a"));
    amp_state_destroy(state);
    close_model(m);
    close_model(other);
}

/* ---- Texts */

/* What layers came to is a file of settings: with it, a context computes them so from the start. */
TEST(the_text_is_a_file_of_settings) {
    static amp_settings settings, back;
    model *m = &a_model;
    amp_context *amp;
    amp_adapt_desc d;
    amp_desc desc;
    char text[4000], all[8000];
    int i;
    size_t n;
    open_model(m, AMP_F32, PLANT_CANCEL, 1);
    d = adapt_desc(m, NULL);
    adapt_of(m, &d);
    train(m, 200);
    n = amp_adapt_text(m->adapt, text, sizeof text);
    CHECK(n > 0 && n < sizeof text && n == strlen(text));
    CHECK(strstr(text, "layers = h.0.weight bf16, h.1.weight bf16, h.2.weight bf16, h.4.weight") != NULL && strstr(text, "91.3% of their multiply-adds below fp32") != NULL);
    memset(&settings, 0, sizeof settings);
    CHECK_OK(amp_settings_read_text(&settings, "layers.conf", text, n));
    CHECK(strstr(settings.layers, "h.3") == NULL && settings.dtype == AMP_F32);
    amp_settings_text(&settings, all, sizeof all);
    memset(&back, 0, sizeof back);
    CHECK_OK(amp_settings_read_text(&back, "again", all, strlen(all)));
    CHECK(strcmp(settings.layers, back.layers) == 0);
    memset(&desc, 0, sizeof desc);
    CHECK_OK(amp_settings_fill(&settings, NULL, &desc, NULL, NULL, NULL));
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_query(amp, &desc));
    CHECK(desc.layers == NULL);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    for (i = 0; i < LAYERS; i++)
        CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, m->names[i], AMP_F32, AMP_F32), i == PLANTED ? AMP_F32 : AMP_BF16);
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_settings_set(&settings, "layers", "h.3.* tf32"));
    CHECK_OK(amp_settings_apply(&settings, amp, NULL, NULL, NULL));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, "h.3.weight", AMP_F32, AMP_F32), AMP_TF32);
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, "h.2.weight", AMP_F32, AMP_F32), AMP_BF16);
    CHECK_OK(amp_autocast_end(amp));
    amp_close(amp);
    close_model(m);
}

/* What a file of settings cannot have is left out with a word: the rest can be read. */
TEST(a_text_that_does_not_fit_says_so) {
    static amp_settings settings;
    static amp_param many[40];
    static char names[40][100];
    static const char *const odd[3] = {"a b", "a#1", "a,b"};
    one *o = &single;
    amp_adapt_desc d;
    char text[12000];
    int i, k;
    size_t n;
    for (i = 0; i < 4; i++) {
        open_one(o, to_bf16);
        CHECK_OK(amp_adapt_query(o->adapt, &d));
        amp_adapt_destroy(o->adapt);
        for (k = 0; k < 40; k++) {
            snprintf(names[k], sizeof names[k], "%d.%090d", k, k);
            many[k] = o->w;
            many[k].id = 0;
            many[k].name = i < 3 ? odd[i] : names[k];
        }
        d.n_params = i < 3 ? 1 : 40;
        CHECK_OK(amp_param_register(o->amp, many, d.n_params));
        d.params = many; d.changes = 40; d.interval = 1; d.ladder = to_bf16;
        CHECK_OK(amp_adapt_create(o->amp, &o->adapt, &d));
        for (n = 0; n < 10; n++) {
            for (k = 0; k < d.n_params; k++) {
                amp_linear_op op;
                memset(&op, 0, sizeof op);
                op.x = amp_tensor2(o->x, AMP_F32, 32, 32);
                op.y = amp_tensor2(o->y, AMP_F32, 32, 32);
                op.weight = &many[k];
                CHECK_OK(amp_autocast_begin(o->amp, NULL));
                CHECK_OK(amp_linear(o->amp, &op));
                CHECK_OK(amp_autocast_end(o->amp));
            }
            CHECK_OK(amp_adapt_step(o->adapt));
        }
        CHECK_EQ(dtype_of_one(o), AMP_BF16);
        n = amp_adapt_text(o->adapt, text, sizeof text);
        CHECK(n < sizeof text && strstr(text, "# \"layers\" is left out: at ") != NULL);
        CHECK(strstr(text, i < 3 ? "a character is one" : "it becomes too long") != NULL);
        memset(&settings, 0, sizeof settings);
        CHECK_OK(amp_settings_read_text(&settings, "layers.conf", text, n));
        CHECK(settings.layers[0] == 0 && settings.dtype == AMP_F32);
        close_one(o);
    }
}

/* Settings cannot take the ladder's dtype away under it. */
TEST(settings_that_would_break_the_ladder) {
    static amp_settings s;
    one *o = &single;
    open_one(o, to_bf16);
    memset(&s, 0, sizeof s);
    s.dtype = AMP_BF16;
    CHECK_ERR(amp_settings_apply(&s, o->amp, NULL, NULL, NULL), AMP_ERR_CONFLICT);
    s.dtype = AMP_F32; s.disable = 1;
    CHECK_ERR(amp_settings_apply(&s, o->amp, NULL, NULL, NULL), AMP_ERR_CONFLICT);
    s.disable = 0;
    CHECK_OK(amp_settings_apply(&s, o->amp, NULL, NULL, NULL));
    CHECK_ERR(amp_set_dtype(o->amp, AMP_BF16), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), "bf16, but an amp_adapt has a ladder that ends in fp32") != NULL);
    CHECK_OK(amp_set_dtype(o->amp, AMP_F32));
    CHECK_ERR(amp_set_enabled(o->amp, 0), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), "disabled, but an amp_adapt") != NULL);
    CHECK_OK(amp_set_enabled(o->amp, 1));
    amp_adapt_destroy(o->adapt);
    o->adapt = NULL;
    s.dtype = AMP_BF16;
    CHECK_OK(amp_settings_apply(&s, o->amp, NULL, NULL, NULL));
    CHECK_OK(amp_set_dtype(o->amp, AMP_F32));
    CHECK_OK(amp_set_enabled(o->amp, 0));
    close_one(o);
}

/* A backend that cannot multiply in fp8 has no such rung, fallback or dtype. */
TEST(a_backend_without_fp8) {
    amp_backend backend = *amp_cpu();
    one *o = &single;
    amp_adapt *adapt = NULL;
    amp_adapt_desc d;
    amp_context *amp;
    amp_desc desc;
    backend.quantizes = 0;
    open_one(o, to_bf16);
    CHECK_OK(amp_adapt_query(o->adapt, &d));
    memset(&desc, 0, sizeof desc);
    desc.backend = &backend; desc.dtype = AMP_F32; desc.fallback = AMP_FP8;
    CHECK_ERR(amp_open(&amp, &desc), AMP_ERR_UNSUPPORTED);
    desc.fallback = AMP_DTYPE_DEFAULT;
    CHECK_OK(amp_open(&amp, &desc));
    o->w.id = 0;
    CHECK_OK(amp_param_register(amp, &o->w, 1));
    d.params = &o->w; d.n_params = 1; d.ladder = to_fp8; d.n_ladder = 2;
    CHECK_ERR(amp_adapt_create(amp, &adapt, &d), AMP_ERR_UNSUPPORTED);
    CHECK(adapt == NULL && strstr(amp_last_error(), "fp8") != NULL);
    amp_close(amp);
    close_one(o);
}

/* Overrides in settings: what they take, and refuse by name. */
TEST(layers_in_settings) {
    static const char *const wrong[] = {"h.1", "* bf16 fp16", "* int8", "* fp64", "* auto", "h bf16 g fp32", ", ,x", "",
                                       "a#1 bf16", "a\nb bf16"};
    static amp_settings s;
    amp_context *amp;
    amp_desc desc;
    char text[3000];
    size_t i;
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_settings_set(&s, "layers", "h.* bf16 ,  head fp32"));
    CHECK_OK(amp_settings_check(&s));
    for (i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_ERR(amp_settings_set(&s, "layers", wrong[i]), AMP_ERR_RANGE);
        CHECK(strstr(amp_last_error(), ".layers") != NULL && strcmp(s.layers, "h.* bf16 ,  head fp32") == 0);
    }
    memset(text, 'a', sizeof text);
    snprintf(text + 130, sizeof text - 130, " bf16");
    CHECK_ERR(amp_settings_set(&s, "layers", text), AMP_ERR_RANGE);             /* a pattern of 130 bytes */
    for (i = 0; i + 8 < sizeof text; i += 8) memcpy(text + i, "ab bf16,", 8);
    text[i] = 0;
    CHECK_ERR(amp_settings_set(&s, "layers", text), AMP_ERR_RANGE);             /* too long */
    text[2040] = 0;
    CHECK_OK(amp_settings_set(&s, "layers", text));
    CHECK_OK(amp_settings_set(&s, "layers", "none"));
    CHECK_EQ(s.layers[0], 0);
    memset(s.layers, 'x', sizeof s.layers);         /* without an end */
    CHECK(amp_settings_text(&s, text, sizeof text) > sizeof s.layers);
    CHECK_OK(amp_settings_set(&s, "layers", "default"));
    CHECK_EQ(s.layers[0], 0);
    CHECK_EQ(s.dtype, AMP_DTYPE_DEFAULT);
    strcpy(s.layers, "* nothing");
    CHECK_ERR(amp_settings_check(&s), AMP_ERR_RANGE);
    memset(s.layers, 'x', sizeof s.layers);
    CHECK_ERR(amp_settings_check(&s), AMP_ERR_RANGE);
    memset(&desc, 0, sizeof desc);
    desc.layers = "h.1";
    CHECK_ERR(amp_open(&amp, &desc), AMP_ERR_RANGE);
    CHECK(amp == NULL && strstr(amp_last_error(), ".layers") != NULL);
}

/* ---- Refusals */

TEST(what_cannot_be_is_refused) {
    static const amp_dtype wrong[4][3] = {{AMP_F32, AMP_BF16}, {AMP_F16, AMP_BF16, AMP_F32}, {AMP_BF16, AMP_FP8}, {AMP_BF16, AMP_TF32, AMP_F32}};
    static const int lengths[4] = {2, 3, 2, 3};
    amp_dtype ladder[2] = {AMP_BF16, AMP_F32};
    model *m = &a_model, *other = &another;
    amp_adapt *adapt = NULL;
    amp_adapt_desc d, good;
    amp_adapt_record r;
    amp_param loose;
    int i;
    open_model(m, AMP_F32, PLANT_NOTHING, 1);
    open_model(other, AMP_BF16, PLANT_NOTHING, 1);
    good = adapt_desc(m, ladder);
#define REFUSED(change, result) do { d = good; change; CHECK_ERR(amp_adapt_create(m->amp, &adapt, &d), result); CHECK(adapt == NULL); } while (0)
    REFUSED(d.params = NULL, AMP_ERR_NULL);
    REFUSED(d.n_params = 0, AMP_ERR_RANGE);
    REFUSED(d.n_ladder = 1, AMP_ERR_RANGE);
    REFUSED(d.n_ladder = 4, AMP_ERR_RANGE);
    REFUSED(d.budget = -1, AMP_ERR_RANGE);
    REFUSED(d.budget = (double)amp_f32_from_f16(0x7e00), AMP_ERR_RANGE);
    REFUSED(d.hysteresis = 1.5, AMP_ERR_RANGE);
    REFUSED(d.interval = -1, AMP_ERR_RANGE);
    REFUSED(d.checks = 1001, AMP_ERR_RANGE);
    REFUSED(d.changes = -1, AMP_ERR_RANGE);
    REFUSED(d.rows = -8, AMP_ERR_RANGE);
    REFUSED(d.reserved = 1, AMP_ERR_RANGE);
    REFUSED(d.scaler = other->scaler, AMP_ERR_CONFLICT);
    REFUSED(d.params = other->params, AMP_ERR_STATE);
    for (i = 0; i < 4; i++) REFUSED((d.ladder = wrong[i], d.n_ladder = lengths[i]), AMP_ERR_DTYPE);
    loose = m->params[0];
    REFUSED((d.params = &loose, d.n_params = 1), AMP_ERR_STATE);
    loose.weight.shape[0] = -1;
    REFUSED((d.params = &loose, d.n_params = 1), AMP_ERR_SHAPE);
    ladder[1] = AMP_TF32;
    REFUSED((void)0, AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), "tf32") != NULL && strstr(amp_last_error(), "fp32") != NULL);
    ladder[1] = AMP_F32;
    CHECK_OK(amp_set_enabled(m->amp, 0));
    REFUSED((void)0, AMP_ERR_CONFLICT);
    CHECK_OK(amp_set_enabled(m->amp, 1));
    CHECK_ERR(amp_adapt_create(m->amp, NULL, &good), AMP_ERR_NULL);
    CHECK_ERR(amp_adapt_create(NULL, &adapt, &good), AMP_ERR_NULL);
    d = adapt_desc(other, NULL);
    CHECK_ERR(amp_adapt_create(other->amp, &adapt, &d), AMP_ERR_RANGE);         /* nothing below bf16 */
    m->adapt = NULL;
    CHECK_OK(amp_adapt_create(m->amp, &m->adapt, &good));
    REFUSED((void)0, AMP_ERR_STATE);
    CHECK_ERR(amp_adapt_layer(m->adapt, LAYERS, &r), AMP_ERR_RANGE);
    CHECK_ERR(amp_adapt_layer(m->adapt, -1, &r), AMP_ERR_RANGE);
    CHECK_ERR(amp_adapt_layer(m->adapt, 0, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_adapt_layer(NULL, 0, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_adapt_query(m->adapt, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_adapt_query(NULL, &d), AMP_ERR_NULL);
    CHECK_ERR(amp_adapt_freeze(m->adapt, 2), AMP_ERR_RANGE);
    CHECK_ERR(amp_adapt_freeze(NULL, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_adapt_step(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_adapt_save(NULL, NULL, "a"), AMP_ERR_NULL);
    CHECK_ERR(amp_adapt_load(m->adapt, NULL, "a"), AMP_ERR_NULL);
    CHECK(amp_adapt_next(NULL, &r) == 0 && amp_adapt_next(m->adapt, NULL) == 0 && amp_adapt_next(m->adapt, &r) == 0);
    CHECK(amp_adapt_text(NULL, NULL, 0) == 0 && amp_adapt_json(NULL, NULL, 0) == 0);
    amp_adapt_destroy(NULL);
#undef REFUSED
    close_model(m);
    close_model(other);
}

/* Level O0 ignores overrides; a device without fp16 or bf16 has no such rung. */
TEST(levels_and_devices_that_cannot) {
    amp_context *amp;
    amp_adapt *adapt;
    amp_adapt_desc d;
    amp_desc desc;
    amp_param p;
    float w[4] = {0, 0, 0, 0};
    memset(&desc, 0, sizeof desc);
    memset(&p, 0, sizeof p);
    memset(&d, 0, sizeof d);
    desc.level = AMP_LEVEL_O0;
    CHECK_OK(amp_open(&amp, &desc));
    p.name = "w"; p.weight = amp_tensor2(w, AMP_F32, 2, 2);
    CHECK_OK(amp_param_register(amp, &p, 1));
    d.params = &p; d.n_params = 1;
    CHECK_ERR(amp_adapt_create(amp, &adapt, &d), AMP_ERR_CONFLICT);
    amp_close(amp);
    p.id = 0;
    p.weight = amp_tensor1(w, AMP_F32, 4);
    desc.level = AMP_LEVEL_DEFAULT; desc.dtype = AMP_F32;
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_param_register(amp, &p, 1));
    CHECK_ERR(amp_adapt_create(amp, &adapt, &d), AMP_ERR_SHAPE);        /* no matrix */
    amp_close(amp);
}

/* After amp_close every call is an error, and destroying works. */
TEST(a_closed_context) {
    model *m = &a_model;
    amp_adapt_desc d;
    amp_adapt_record r;
    amp_state *state;
    char text[100];
    open_model(m, AMP_F32, PLANT_NOTHING, 1);
    d = adapt_desc(m, NULL);
    adapt_of(m, &d);
    train(m, 45);
    CHECK_OK(amp_state_create(&state, NULL));
    amp_close(m->amp);
    CHECK_ERR(amp_adapt_step(m->adapt), AMP_ERR_STATE);
    CHECK_ERR(amp_adapt_layer(m->adapt, 0, &r), AMP_ERR_STATE);
    CHECK_ERR(amp_adapt_query(m->adapt, &d), AMP_ERR_STATE);
    CHECK_ERR(amp_adapt_freeze(m->adapt, 1), AMP_ERR_STATE);
    CHECK_ERR(amp_adapt_save(m->adapt, state, "a"), AMP_ERR_STATE);
    CHECK_ERR(amp_adapt_load(m->adapt, state, "a"), AMP_ERR_STATE);
    CHECK(amp_adapt_next(m->adapt, &r) == 0 && amp_adapt_text(m->adapt, text, sizeof text) == 0);
    amp_state_destroy(state);
    m->amp = NULL;
    close_model(m);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(large_activations_in_fp16);
    RUN(cancelling_sums_in_bf16);
    RUN(an_outlier_channel_in_fp8);
    RUN(a_ladder_of_three);
    RUN(an_ordinary_model_goes_low_and_stays);
    RUN(a_failing_layer_goes_up_at_once);
    RUN(a_budget_of_0_is_fp32);
    RUN(at_most_so_many_move_at_once);
    RUN(no_evidence_is_said_once);
    RUN(decisions_repeat);
    RUN(overrides_of_others_hold);
    RUN(freezing);
    RUN(trials_and_inference_do_not_count);
    RUN(what_cannot_be_measured_does_not_count);
    RUN(a_backward_is_waited_for);
    RUN(fp8_is_scaled_by_the_whole_operand);
    RUN(a_weight_of_two_names_stays);
    RUN(the_host_rounding_does_not_decide);
    RUN(a_head_has_no_fp8);
    RUN(an_earlier_state_rolls_back);
    RUN(a_resumed_run_decides_the_same);
    RUN(foreign_states_are_refused);
    RUN(the_text_is_a_file_of_settings);
    RUN(a_text_that_does_not_fit_says_so);
    RUN(settings_that_would_break_the_ladder);
    RUN(a_backend_without_fp8);
    RUN(layers_in_settings);
    RUN(what_cannot_be_is_refused);
    RUN(levels_and_devices_that_cannot);
    RUN(a_closed_context);
    return TEST_END();
}
