/* t_shards.c - tests gradient buckets that are summed during backward, and optimizer states that are sharded over ranks.
 * The ranks are threads of amp_ranks.  The tests check the following:
 *   - Sums during backward and in the step give the same bits.
 *   - Sharded states give the same weights, norms and scales as whole ones, bit for bit, for every optimizer, storage and
 *     number of ranks.
 *   - Each rank holds only its share of the bytes.
 *   - Buckets are sent in the order in which backward finishes them.
 *   - A gradient that was sent can no longer be added to.
 *   - Results of failed sums are not used as gradients.
 *   - A state that ranks saved together loads with any number of ranks, and files of two different saves are rejected. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MOST_RANKS = 4, PARAMS = 7, NUMBERS = 4096 + 64 + 12800 + 200 + 2000 + 10 + 33, STEPS = 5, ROWS = 8 };

static const struct { const char *name; int64_t rows, columns; } shapes[PARAMS] = {
    {"tied", 64, 64}, {"tied_bias", 64, 0}, {"wide", 200, 64}, {"wide_bias", 200, 0}, {"out", 10, 200}, {"out_bias", 10, 0}, {"frozen", 33, 0}};

/* A model in memory of its own, and the place of each parameter in it. */
typedef struct model {
    amp_param p[PARAMS];
    float w[NUMBERS + PARAMS], g[NUMBERS + PARAMS], y[5][ROWS * 200], dy[5][ROWS * 200], pre[ROWS * 64], t[ROWS * 10];
} model;

typedef struct setup {
    amp_optimizer_desc o;
    amp_desc d;
    amp_dtype weights, gradients;
    int by_hand, bad_rank, bad_step, unscale;
    int apart;                      /* 1: rank 1's weights and gradients have gaps between them */
    int extra;                      /* 1: one more backward of a tied layer in the last step */
    int hook;                       /* 1: the ranks are reached through a hook that can fail */
    int shared;                     /* 1: all ranks have rank 0's model */
    int gate;                       /* 1: gathers of weights wait until the test lets them pass, and can fail */
    int split;                      /* 1: the optimizer has the first two parameters */
    int ends;                       /* 1: the body ends with the optimizer and the context */
    int late;                       /* 1: two parameters get their gradients after the second step */
} setup;

/* What a rank ends with. */
typedef struct outcome {
    float w[NUMBERS], norm[STEPS], scale[STEPS];
    int applied;
    double states, gradient, seconds;
    int64_t optimizer_bytes;
    int zeros;
    char why[512];
} outcome;

typedef struct job {
    const setup *s; outcome *out; amp_ranks *ranks; int rank, world;
    void (*body)(struct job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler);
    const char *path;
    pthread_t thread;
} job;

/* A reducer of the user's own, which fails after `arm` calls, having done its work. */
typedef struct failing_hook { amp_reducer inner; int arm, calls; } failing_hook;
static failing_hook hooks[MOST_RANKS];
static int failing_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    failing_hook *h = (failing_hook *)user;
    int code = h->inner.reduce(h->inner.user, data, count, dtype, op, stream);
    h->calls++;
    return h->arm > 0 && --h->arm == 0 ? 7 : code;
}

/* A reducer of the user's own, whose gathers wait: .pass more may go, while `on`; number `fail` fails.  And whose sums wait
   while `held`. */
typedef struct gated_hook { amp_reducer inner; int on, pass, begun, ended, fail, held, summed; } gated_hook;
static gated_hook gates[MOST_RANKS];
static pthread_mutex_t gate_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_moved = PTHREAD_COND_INITIALIZER;
static int gated_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    const gated_hook *h = (const gated_hook *)user;
    return h->inner.reduce(h->inner.user, data, count, dtype, op, stream);
}
static int gated_to_all(void *user, const void *in, void *out, int64_t bytes_each, void *stream) {
    gated_hook *h = (gated_hook *)user;
    int code;
    pthread_mutex_lock(&gate_lock);
    while (h->held) pthread_cond_wait(&gate_moved, &gate_lock);
    pthread_mutex_unlock(&gate_lock);
    code = h->inner.calls->all_to_all(h->inner.user, in, out, bytes_each, stream);
    pthread_mutex_lock(&gate_lock);
    h->summed++;
    pthread_mutex_unlock(&gate_lock);
    return code;
}
static int gated_gather(void *user, const void *in, void *out, int64_t bytes_each, void *stream) {
    gated_hook *h = (gated_hook *)user;
    int code;
    pthread_mutex_lock(&gate_lock);
    h->begun++;
    pthread_cond_broadcast(&gate_moved);
    while (h->on && h->pass == 0) pthread_cond_wait(&gate_moved, &gate_lock);
    h->pass -= h->on;
    pthread_mutex_unlock(&gate_lock);
    code = h->inner.calls->all_gather(h->inner.user, in, out, bytes_each, stream);
    pthread_mutex_lock(&gate_lock);
    h->ended++;
    if (h->fail > 0 && --h->fail == 0) code = 7;
    pthread_mutex_unlock(&gate_lock);
    return code;
}
static const amp_exchanges gated_calls = {NULL, gated_gather, gated_to_all, NULL, NULL, NULL, NULL};
static void gate_set(int rank, int on, int pass) {
    pthread_mutex_lock(&gate_lock);
    gates[rank].on = on; gates[rank].pass = pass; gates[rank].begun = gates[rank].ended = 0;
    pthread_cond_broadcast(&gate_moved);
    pthread_mutex_unlock(&gate_lock);
}
static int gate_ended(int rank) {
    pthread_mutex_lock(&gate_lock);
    int n = gates[rank].ended;
    pthread_mutex_unlock(&gate_lock);
    return n;
}
static void gate_wait_begun(int rank, int n) {
    pthread_mutex_lock(&gate_lock);
    while (gates[rank].begun < n) pthread_cond_wait(&gate_moved, &gate_lock);
    pthread_mutex_unlock(&gate_lock);
}
/* Opens the gate of *rank a while after the thread that made it has gone on. */
static void *gate_open_later(void *rank) {
    const struct timespec a_while = {0, 20000000};
    nanosleep(&a_while, NULL);
    pthread_mutex_lock(&gate_lock);
    gates[*(int *)rank].on = gates[*(int *)rank].held = 0;
    pthread_cond_broadcast(&gate_moved);
    pthread_mutex_unlock(&gate_lock);
    return NULL;
}

static float value(int64_t i) { return (float)((unsigned)(i * 2654435761u) >> 8) / 8388608.0f - 1.0f; }

static void model_make(model *m, const setup *s) {
    int64_t at = 0;
    memset(m, 0, sizeof *m);
    for (int i = 0; i < PARAMS; i++) {
        int64_t n = shapes[i].rows * (shapes[i].columns ? shapes[i].columns : 1);
        amp_dtype w = shapes[i].columns ? s->weights : AMP_F32, g = shapes[i].columns ? s->gradients : AMP_F32;
        float x[12800];
        m->p[i].name = shapes[i].name;
        m->p[i].weight = shapes[i].columns ? amp_tensor2(m->w + at, w, shapes[i].rows, shapes[i].columns) : amp_tensor1(m->w + at, w, n);
        if (i < 6) m->p[i].grad = shapes[i].columns ? amp_tensor2(m->g + at, g, shapes[i].rows, shapes[i].columns) : amp_tensor1(m->g + at, g, n);
        for (int64_t k = 0; k < n; k++) x[k] = value(at + k) * 0.1f;
        CHECK_OK(amp_convert(m->w + at, w, x, AMP_F32, n, NULL, NULL));
        at += n;
    }
}

/* x -> tied -> GELU -> tied -> wide -> out -> mean squared error, forward and backward. */
static void run_model(amp_context *amp, model *m, const amp_scaler *scaler, int64_t seed, int extra, amp_result expected) {
    static const int64_t width[5] = {64, 64, 64, 200, 10};
    static const int of[4] = {0, 0, 2, 4};
    float (*y)[ROWS * 200] = m->y, (*dy)[ROWS * 200] = m->dy, *pre = m->pre, *t = m->t, loss;
    amp_linear_op lin[4];
    amp_mse_op mse;
    memset(lin, 0, sizeof lin); memset(&mse, 0, sizeof mse);
    for (int i = 0; i < ROWS * 64; i++) y[0][i] = value(seed * 1000 + i);
    for (int i = 0; i < ROWS * 10; i++) t[i] = value(seed * 7000 + i);
    for (int l = 0; l < 4; l++) {
        lin[l].x = amp_tensor2(y[l], AMP_F32, ROWS, width[l]); lin[l].y = amp_tensor2(y[l + 1], AMP_F32, ROWS, width[l + 1]);
        lin[l].weight = &m->p[of[l]]; lin[l].bias = &m->p[of[l] + 1];
        if (l == 0) { lin[l].act = AMP_ACT_GELU; lin[l].pre = amp_tensor2(pre, AMP_F32, ROWS, 64); }
        CHECK_OK(amp_linear(amp, &lin[l]));
    }
    mse.x = lin[3].y; mse.dx = amp_tensor2(dy[4], AMP_F32, ROWS, 10); mse.target = amp_tensor2(t, AMP_F32, ROWS, 10);
    mse.loss = &loss; mse.grad_scale = amp_scaler_scale_ptr(scaler);
    CHECK_OK(amp_mse(amp, &mse));
    for (int l = 3; l >= 0; l--) {
        lin[l].dy = amp_tensor2(dy[l + 1], AMP_F32, ROWS, width[l + 1]);
        if (l > 0) lin[l].dx = amp_tensor2(dy[l], AMP_F32, ROWS, width[l]);
        CHECK_OK(amp_linear_backward(amp, &lin[l]));
    }
    if (extra) { lin[2].dx.data = NULL; CHECK_EQ(amp_linear_backward(amp, &lin[2]), expected); }
}

/* Gradients that no operator computed. */
static void fill_by_hand(const job *j, model *m, float scale, int64_t seed) {
    float x[12800];
    for (int i = 0; i < 6; i++) {
        int64_t n = amp_tensor_count(&m->p[i].weight);
        amp_dtype dtype = m->p[i].grad.dtype;
        int add;
        if (m->p[i].grad.data == NULL) continue;
        add = amp_param_accumulate(&m->p[i]);
        if (add) CHECK_OK(amp_convert(x, AMP_F32, m->p[i].grad.data, dtype, n, NULL, NULL));
        for (int64_t k = 0; k < n; k++) x[k] = (add ? x[k] : 0) + value(seed * 100000 + j->rank * 7919 + i * 131 + k) * scale;
        if (seed / 10 == j->s->bad_step && j->rank == j->s->bad_rank && i == 2) x[n - 1] = INFINITY;
        CHECK_OK(amp_convert(m->p[i].grad.data, dtype, x, AMP_F32, n, NULL, NULL));
    }
}

static void read_weights(const model *m, float *out) {
    int64_t at = 0;
    for (int i = 0; i < PARAMS; i++) {
        int64_t n = amp_tensor_count(&m->p[i].weight);
        CHECK_OK(amp_convert(out + at, AMP_F32, m->p[i].weight.data, m->p[i].weight.dtype, n, NULL, NULL));
        at += n;
    }
}

static void one_step(const job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler, int step) {
    const setup *s = j->s;
    int n = s->o.accumulation > 0 ? s->o.accumulation : 1;
    for (int micro = 0; micro < n; micro++) {
        int64_t seed = step * 10 + micro + 1;
        if (s->by_hand) fill_by_hand(j, m, scaler ? amp_scaler_scale(scaler) : 1, seed);
        else run_model(amp, m, scaler, seed * MOST_RANKS + j->rank, s->extra && step == STEPS - 1 && micro == n - 1, AMP_ERR_STATE);
        if (s->extra && step == STEPS - 1 && micro == n - 1) snprintf(j->out->why, sizeof j->out->why, "%s", amp_last_error());
        if (s->unscale && micro == n - 1) CHECK_OK(amp_scaler_check(scaler, amp_optimizer_grad_set(o), AMP_CHECK_UNSCALE));
        CHECK_OK(amp_step(o, scaler));
    }
}

static void train(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    amp_step_result r;
    for (int step = 0; step < STEPS; step++) {
        one_step(j, amp, m, o, scaler, step);
        CHECK_EQ(amp_step_result_next(o, &r), 1);
        j->out->norm[step] = r.norm;
        j->out->scale[step] = scaler ? amp_scaler_scale(scaler) : 1;
        j->out->applied += r.applied;
        j->out->seconds += r.ranks_seconds;
        CHECK(r.ranks_waited >= 0);
    }
}

/* Two parameters that were frozen get a gradient; what is saved then, by all ranks or by one, loads again. */
static void train_late(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    amp_step_result r;
    amp_state *state = NULL;
    for (int step = 0; step < STEPS; step++) {
        if (step == 2) {
            m->p[2].grad.data = m->g + 4096 + 64;
            m->p[5].grad.data = m->g + 4096 + 64 + 12800 + 200 + 2000;
        }
        if (step == 4 && j->path) {
            CHECK_OK(amp_sync(amp));
            CHECK_OK(amp_state_create(&state, NULL));
            CHECK_OK(amp_optimizer_save(o, state, "o"));
            CHECK_OK(amp_state_save_ranks(amp, state, j->path));
            amp_state_destroy(state);
            CHECK_OK(amp_state_load_ranks(amp, &state, j->path));
            CHECK_OK(amp_optimizer_load(o, state, "o"));
            amp_state_destroy(state);
        }
        one_step(j, amp, m, o, scaler, step);
        CHECK_EQ(amp_step_result_next(o, &r), 1);
        j->out->norm[step] = r.norm;
        j->out->scale[step] = 1;
        j->out->applied += r.applied;
    }
}

static float shared_weights[PARAMS * 16384];
static pthread_barrier_t shared_ready;

static void *run_job(void *arg) {
    job *j = (job *)arg;
    model *m = malloc(sizeof *m);
    amp_context *amp;
    amp_optimizer *o;
    amp_scaler *scaler = NULL;
    amp_scaler_desc sd;
    amp_desc d = j->s->d;
    amp_optimizer_desc od = j->s->o;
    amp_parameter_bytes bytes;
    amp_memory_info memory;
    memset(&sd, 0, sizeof sd);
    d.threads = 1;
    if (j->ranks) CHECK_OK(amp_ranks_reducer(j->ranks, j->rank, &d.reducer));
    if (j->s->d.reducer.one_thread) d.reducer.one_thread = 1;
    if (j->s->hook) {
        hooks[j->rank].inner = d.reducer;
        d.reducer.reduce = failing_reduce; d.reducer.calls = NULL; d.reducer.user = &hooks[j->rank];
    }
    if (j->s->gate) {
        memset(&gates[j->rank], 0, sizeof *gates);
        gates[j->rank].inner = d.reducer;
        d.reducer.reduce = gated_reduce; d.reducer.calls = &gated_calls; d.reducer.user = &gates[j->rank];
    }
    CHECK_OK(amp_open(&amp, &d));
    model_make(m, j->s);
    for (int i = PARAMS - 1; i >= 0 && j->s->apart && j->rank == 1; i--) {
        if (i < 6) m->p[i].grad.data = (float *)m->p[i].grad.data + i;
        m->p[i].weight.data = memmove((float *)m->p[i].weight.data + i, m->p[i].weight.data, (size_t)amp_tensor_count(&m->p[i].weight) * 4);
    }
    for (int i = 0; i < PARAMS && j->s->shared && j->rank > 0; i++) m->p[i].weight.data = shared_weights + i * 16384;
    for (int i = 0; i < PARAMS && j->s->shared && j->rank == 0; i++) {
        memcpy(shared_weights + i * 16384, m->p[i].weight.data, (size_t)amp_tensor_count(&m->p[i].weight) * 4);
        m->p[i].weight.data = shared_weights + i * 16384;
    }
    if (j->s->shared) pthread_barrier_wait(&shared_ready);
    CHECK_OK(amp_param_register(amp, m->p, PARAMS));
    if (j->s->late) m->p[2].grad.data = m->p[5].grad.data = NULL;
    od.params = m->p; od.n_params = j->s->split ? 2 : PARAMS;
    od.result_lag = AMP_LAG_NONE;
    CHECK_OK(amp_optimizer_create(amp, &o, &od));
    sd.init_scale = 128;
    if (j->s->gradients == AMP_F16 || j->s->unscale) CHECK_OK(amp_scaler_create(amp, &scaler, &sd));
    j->body(j, amp, m, o, scaler);
    if (j->s->ends) { free(m); return NULL; }
    CHECK_OK(amp_sync(amp));
    read_weights(m, j->out->w);
    CHECK_OK(amp_optimizer_bytes(o, &bytes));
    j->out->states = bytes.master + bytes.moments;
    j->out->gradient = bytes.gradient;
    CHECK_EQ(bytes.parameters, j->s->split ? 4096 + 64 : NUMBERS - 33);
    CHECK_OK(amp_memory(amp, &memory));
    j->out->optimizer_bytes = memory.optimizer;
    amp_optimizer_destroy(o);
    amp_scaler_destroy(scaler);
    amp_close(amp);
    free(m);
    return NULL;
}

static void run_ranks_with(const setup *s, int world, outcome *out, const char *path, void (*body)(job *, amp_context *, model *, amp_optimizer *, amp_scaler *)) {
    job jobs[MOST_RANKS];
    amp_ranks *ranks;
    amp_ranks_desc rd;
    memset(&rd, 0, sizeof rd); memset(jobs, 0, sizeof jobs); memset(out, 0, (size_t)world * sizeof *out);
    rd.world = world; rd.timeout_ms = 20000;
    CHECK_OK(amp_ranks_create(&ranks, &rd));
    for (int r = 0; r < world; r++) {
        jobs[r].s = s; jobs[r].out = &out[r]; jobs[r].ranks = ranks; jobs[r].rank = r; jobs[r].world = world; jobs[r].body = body; jobs[r].path = path;
        CHECK_EQ(pthread_create(&jobs[r].thread, NULL, run_job, &jobs[r]), 0);
    }
    for (int r = 0; r < world; r++) pthread_join(jobs[r].thread, NULL);
    amp_ranks_destroy(ranks);
}
static void run_ranks(const setup *s, int world, outcome *out) { run_ranks_with(s, world, out, NULL, train); }

static void same(const outcome *a, const outcome *b, const char *what, int world) {
    int64_t wrong = 0;
    for (int i = 0; i < NUMBERS; i++) wrong += memcmp(&a->w[i], &b->w[i], 4) != 0;
    CHECK_MSG(wrong == 0, "%s, %d ranks: %d of %d weights differ", what, world, (int)wrong, NUMBERS);
    for (int i = 0; i < STEPS; i++)
        CHECK_MSG(memcmp(&a->norm[i], &b->norm[i], 4) == 0 && memcmp(&a->scale[i], &b->scale[i], 4) == 0, "%s, %d ranks, step %d: norm %.9g and %.9g, scale %g and %g",
                  what, world, i, (double)a->norm[i], (double)b->norm[i], (double)a->scale[i], (double)b->scale[i]);
    CHECK_EQ(a->applied, b->applied);
}

static outcome one[MOST_RANKS], other[MOST_RANKS];

static setup plain(void) {
    setup s;
    memset(&s, 0, sizeof s);
    s.weights = s.gradients = AMP_F32;
    s.bad_rank = s.bad_step = -1;
    s.d.dtype = AMP_F32;
    s.o.lr = 0.01; s.o.clip_norm = 0.5; s.o.weight_decay = 0.1;
    s.o.bucket_bytes = 20000;
    return s;
}

TEST(parameters_that_come_later) {
    static outcome start[MOST_RANKS];
    char place[] = "/tmp/amp_shards_XXXXXX", path[80], command[100];
    if (mkdtemp(place) == NULL) SKIP("no temporary folder");
    snprintf(path, sizeof path, "%s/s", place);
    for (int kind = AMP_ADAMW; kind <= AMP_LION; kind++) for (int world = 2; world <= 3; world++) {
        setup s = plain();
        s.by_hand = s.late = 1;
        s.o.kind = (amp_optimizer_kind)kind;
        s.o.momentum = kind == AMP_SGD ? 0.9 : 0;
        s.o.deterministic = 1;
        s.d.logger.level = AMP_LOG_OFF;
        run_ranks_with(&s, world, one, NULL, train_late);
        s.o.shard = AMP_SHARD_STATES;
        run_ranks_with(&s, world, other, NULL, train_late);
        same(&one[0], &other[0], "parts of states", world);
        same(&one[0], &other[world - 1], "parts of states", world);
        CHECK(other[0].states < 0.7 * one[0].states);
        run_ranks_with(&s, world, other, path, train_late);
        same(&one[0], &other[0], "saved and loaded", world);
        s.o.overlap_param_gather = 1;
        run_ranks_with(&s, world, other, NULL, train_late);
        same(&one[0], &other[0], "gathered late", world);
        s.late = 0;
        run_ranks_with(&s, world, start, NULL, train);
        CHECK(memcmp(one[0].w + 4160, start[0].w + 4160, 12800 * 4) != 0);
    }
    snprintf(command, sizeof command, "rm -r %s", place);
    CHECK_EQ(system(command), 0);
}

/* With threads, in the training thread, in the step, as one bucket; on all ranks. */
TEST(sums_during_backward) {
    for (int world = 2; world <= MOST_RANKS; world++)
        for (int accumulation = 1; accumulation <= 2; accumulation++) {
            setup s = plain();
            s.o.accumulation = accumulation;
            s.o.no_overlap = 1;
            run_ranks(&s, world, one);
            for (int how = 0; how < 4; how++) {
                s = plain();
                s.o.accumulation = accumulation;
                if (how == 1) s.d.reducer.one_thread = 1;
                if (how == 2) s.o.bucket_bytes = 0;
                if (how == 3) s.o.bucket_bytes = 1;
                run_ranks(&s, world, other);
                for (int r = 0; r < world; r++) same(&one[0], &other[r], how == 0 ? "thread" : how == 1 ? "one thread" : how == 2 ? "one bucket" : "small buckets", world);
                CHECK(other[0].seconds > 0);
            }
        }
}

/* ---- The order of buckets: six layers, a bucket each, that run in the order of `runs`. */

enum { LAYERS = 6, SIDE = 32 };
typedef struct chain {
    int runs[LAYERS], by_hand, sums[LAYERS], first;   /* sums when backward of runs[i] has run; and in the first cycle */
    amp_reducer inner; int calls;
    float w[LAYERS][SIDE * SIDE], g[LAYERS][SIDE * SIDE], y[LAYERS + 1][SIDE * SIDE], dy[LAYERS + 1][SIDE * SIDE];
} chain;

static int counting_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    chain *c = (chain *)user;
    c->calls++;
    return c->inner.reduce(c->inner.user, data, count, dtype, op, stream);
}
static void run_chain(amp_context *amp, chain *c, amp_param *p, int *in_backward) {
    amp_linear_op lin[LAYERS];
    memset(lin, 0, sizeof lin);
    for (int i = 0; i < LAYERS; i++) {
        lin[i].x = amp_tensor2(c->y[i], AMP_F32, SIDE, SIDE); lin[i].y = amp_tensor2(c->y[i + 1], AMP_F32, SIDE, SIDE);
        lin[i].dy = amp_tensor2(c->dy[i + 1], AMP_F32, SIDE, SIDE); lin[i].dx = amp_tensor2(c->dy[i], AMP_F32, SIDE, SIDE);
        lin[i].weight = &p[c->runs[i]];
        CHECK_OK(amp_linear(amp, &lin[i]));
    }
    c->calls = 0;
    for (int i = LAYERS - 1; i >= 0; i--) {
        if (c->by_hand == c->runs[i]) amp_param_accumulate(&p[c->by_hand]);
        CHECK_OK(amp_linear_backward(amp, &lin[i]));
        c->sums[i] = c->calls;
    }
    *in_backward = c->calls;
}
static void *train_chain(void *arg) {
    job *j = (job *)arg;
    chain *c = (chain *)(void *)j->out;
    static const char *const names[LAYERS] = {"a", "b", "c", "d", "e", "f"};
    amp_context *amp;
    amp_optimizer *o;
    amp_desc d;
    amp_optimizer_desc od;
    amp_param p[LAYERS];
    int later;
    memset(&d, 0, sizeof d); memset(&od, 0, sizeof od); memset(p, 0, sizeof p);
    d.dtype = AMP_F32; d.threads = 1;
    CHECK_OK(amp_ranks_reducer(j->ranks, j->rank, &c->inner));
    d.reducer = c->inner;
    d.reducer.reduce = counting_reduce; d.reducer.user = c; d.reducer.calls = NULL; d.reducer.one_thread = 1;
    CHECK_OK(amp_open(&amp, &d));
    for (int i = 0; i < LAYERS; i++) {
        p[i].name = names[i];
        p[i].weight = amp_tensor2(c->w[i], AMP_F32, SIDE, SIDE); p[i].grad = amp_tensor2(c->g[i], AMP_F32, SIDE, SIDE);
        for (int k = 0; k < SIDE * SIDE; k++) { c->w[i][k] = value(i * 5000 + k) * 0.3f; c->y[0][k] = value(j->rank * 777 + k); c->dy[LAYERS][k] = value(j->rank * 333 + k); }
    }
    CHECK_OK(amp_param_register(amp, p, LAYERS));
    od.params = p; od.n_params = LAYERS; od.bucket_bytes = 1;
    CHECK_OK(amp_optimizer_create(amp, &o, &od));
    for (int step = 0; step < 3; step++) {
        run_chain(amp, c, p, step == 0 ? &c->first : &later);
        CHECK_OK(amp_step(o, NULL));
    }
    amp_optimizer_destroy(o);
    amp_close(amp);
    return NULL;
}
TEST(buckets_go_as_backward_finishes_them) {
    static const int forwards[LAYERS] = {0, 1, 2, 3, 4, 5}, backwards[LAYERS] = {5, 4, 3, 2, 1, 0}, mixed[LAYERS] = {2, 5, 0, 4, 1, 3};
    const int *const order[] = {forwards, backwards, mixed, mixed, mixed};
    static chain c[2];
    for (int way = 0; way < 5; way++) {
        job jobs[2];
        amp_ranks *ranks;
        amp_ranks_desc rd;
        memset(&rd, 0, sizeof rd); memset(jobs, 0, sizeof jobs);
        rd.world = 2; rd.timeout_ms = 20000;
        CHECK_OK(amp_ranks_create(&ranks, &rd));
        for (int r = 0; r < 2; r++) {
            memset(&c[r], 0, sizeof c[r]);
            memcpy(c[r].runs, way == 4 && r == 1 ? backwards : order[way], sizeof c[r].runs);
            c[r].by_hand = way == 3 ? 4 : -1;
            jobs[r].ranks = ranks; jobs[r].rank = r; jobs[r].out = (outcome *)(void *)&c[r];
            CHECK_EQ(pthread_create(&jobs[r].thread, NULL, train_chain, &jobs[r]), 0);
        }
        for (int r = 0; r < 2; r++) pthread_join(jobs[r].thread, NULL);
        amp_ranks_destroy(ranks);
        for (int i = 0; i < LAYERS; i++) CHECK_MSG(memcmp(c[0].w[i], c[1].w[i], sizeof c[0].w[i]) == 0, "way %d: weight %d differs", way, i);
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(c[r].first, 0);
            for (int i = LAYERS - 1; i >= 0 && (way < 4 || r == 0); i--)    /* runs[3] is the one by hand */
                CHECK_MSG(c[r].sums[i] == LAYERS - i - (way == 3 && i <= 3), "way %d, rank %d: %d sums when %d layers are done", way, r, c[r].sums[i], LAYERS - i);
        }
        if (way == 4) CHECK(c[1].sums[0] >= 1);     /* rank 0's order on both */
    }
}

/* Each rank has its own memory: buckets of gradients, and of weights, that it need not copy have the order and bytes of
   those that it must. */
TEST(what_lies_apart_on_one_rank) {
    for (int way = 0; way < 3; way++)
        for (int world = 2; world <= MOST_RANKS; world++) {
            setup s = plain();
            s.o.deterministic = way == 2;
            s.o.shard = way > 0 ? AMP_SHARD_STATES : AMP_SHARD_NONE;
            run_ranks(&s, world, one);
            s.apart = 1;
            run_ranks(&s, world, other);
            for (int r = 0; r < world; r++) same(&one[0], &other[r], way == 0 ? "gaps on rank 1" : way == 1 ? "gaps on rank 1, shards" : "gaps on rank 1, shards, deterministic", world);
            if (way > 0 && world == 2) CHECK(other[0].optimizer_bytes < other[1].optimizer_bytes);  /* no room for copies */
        }
}

static const struct { const char *name; amp_optimizer_kind kind; double momentum; amp_dtype weights, gradients; amp_master_kind master; amp_dtype moments; } storages[] = {
    {"AdamW", AMP_ADAMW, 0, AMP_F32, AMP_F32, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT},
    {"AdamW, bf16 moments", AMP_ADAMW, 0, AMP_F32, AMP_F32, AMP_MASTER_DEFAULT, AMP_BF16},
    {"AdamW, 8 bits", AMP_ADAMW, 0, AMP_F32, AMP_F32, AMP_MASTER_DEFAULT, AMP_MOMENTS_8BIT},
    {"SGD", AMP_SGD, 0, AMP_F32, AMP_F32, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT},
    {"SGD, momentum", AMP_SGD, 0.9, AMP_F32, AMP_F32, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT},
    {"Lion, 8 bits", AMP_LION, 0, AMP_F32, AMP_F32, AMP_MASTER_DEFAULT, AMP_MOMENTS_8BIT},
    {"fp16, masters", AMP_ADAMW, 0, AMP_F16, AMP_F16, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT},
    {"bf16, masters, fp32 gradients", AMP_ADAMW, 0, AMP_BF16, AMP_F32, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT},
    {"bf16, remainders", AMP_ADAMW, 0, AMP_BF16, AMP_BF16, AMP_MASTER_REMAINDER, AMP_DTYPE_DEFAULT},
    {"bf16, stochastic, bf16 moments", AMP_ADAMW, 0, AMP_BF16, AMP_BF16, AMP_MASTER_STOCHASTIC, AMP_BF16}};
enum { STORAGES = sizeof storages / sizeof *storages };

static setup stored(int i) {
    setup s = plain();
    s.o.kind = storages[i].kind; s.o.momentum = storages[i].momentum;
    s.weights = storages[i].weights; s.gradients = storages[i].gradients;
    s.o.master = storages[i].master; s.o.moments = storages[i].moments;
    s.o.seed = 7;
    if (s.weights != AMP_F32) { s.d.dtype = s.weights; s.d.level = AMP_LEVEL_O2; }
    s.by_hand = 1;
    return s;
}

#if defined(_WIN32)
enum { WAYS = 2 };                  /* it takes no pages back, which sharded gradients need */
#else
enum { WAYS = 4 };
#endif
TEST(sharded_states_give_the_same_bits) {
    static const amp_param_group group = {"wide*", 0.5, 0.01, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT};
    for (int i = 0; i < STORAGES; i++)
        for (int world = 2; world <= MOST_RANKS; world++) {
            setup s = stored(i);
            s.o.groups = &group; s.o.n_groups = 1;
            s.o.deterministic = 1;
            s.o.wire = i % 3 == 2 ? AMP_BF16 : AMP_F32;
            s.bad_rank = 1; s.bad_step = 2;
            s.o.accumulation = 1 + world % 2;
            s.unscale = i % 4 == 1 || i == 8;
            run_ranks(&s, world, one);
            for (int r = 1; r < world; r++) same(&one[0], &one[r], storages[i].name, world);
            CHECK_EQ(one[0].applied, STEPS - 1);
            for (int way = 0; way < WAYS; way++) {
                s.o.shard = way < 2 ? AMP_SHARD_STATES : AMP_SHARD_GRADIENTS;
                s.o.overlap_param_gather = way % 2;
                run_ranks(&s, world, other);
                for (int r = 0; r < world; r++) same(&one[0], &other[r], storages[i].name, world);
            }
        }
}

/* ---- Weights that are gathered behind the next forward.  Buckets of plain(): out and both biases, wide, tied; backward
   finishes wide before its bias, so its weights come last. */

enum { WEIGHT_BUCKETS = 3 };
static setup late(void) {
    setup s = plain();
    s.o.shard = AMP_SHARD_STATES;
    s.o.deterministic = 1;
    s.o.overlap_param_gather = 1;
    return s;
}

/* Operators read what has come: in one piece and in parts, fp32 and 16-bit weights with casts of them. */
TEST(weights_behind_forward_give_the_same_bits) {
    for (int way = 0; way < 5; way++)
        for (int world = 2; world <= MOST_RANKS; world++) {
            setup s = late();
            if (way == 1) { s.weights = s.gradients = AMP_BF16; s.d.dtype = AMP_BF16; s.d.level = AMP_LEVEL_O2; }
            if (way == 2) s.d.dtype = AMP_BF16;
            if (way == 3) s.o.accumulation = 2;
            if (way == 4) s.d.reducer.one_thread = 1;
            s.apart = way == 3;
            s.o.overlap_param_gather = 0;
            run_ranks(&s, world, one);
            s.o.overlap_param_gather = 1;
            run_ranks(&s, world, other);
            for (int r = 0; r < world; r++) same(&one[0], &other[r], "weights behind forward", world);
        }
}

static amp_result layer(amp_context *amp, model *m, amp_param *weight, amp_param *bias, int64_t in, int64_t out) {
    amp_linear_op lin;
    memset(&lin, 0, sizeof lin);
    lin.x = amp_tensor2(m->y[0], AMP_F32, ROWS, in); lin.y = amp_tensor2(m->y[1], AMP_F32, ROWS, out);
    lin.weight = weight; lin.bias = bias;
    return amp_linear(amp, &lin);
}
/* A step whose gathers wait at the gate once `pass` have gone. */
static void step_to_gate(job *j, amp_context *amp, model *m, amp_optimizer *o, int pass) {
    run_model(amp, m, NULL, 7, 0, AMP_OK);
    gate_set(j->rank, 1, pass);
    CHECK_OK(amp_step(o, NULL));
}
static void first_layer_early(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    amp_param copy;
    pthread_t opener;
    one_step(j, amp, m, o, scaler, 0);
    CHECK_OK(amp_sync(amp));
    step_to_gate(j, amp, m, o, 1);                      /* it returns: no gather has passed, or one */
    CHECK_OK(layer(amp, m, &m->p[0], &m->p[1], 64, 64));
    gate_wait_begun(j->rank, 2);
    CHECK_EQ(gate_ended(j->rank), 1);
    CHECK_OK(layer(amp, m, &m->p[0], &m->p[1], 64, 64));
    CHECK_EQ(gate_ended(j->rank), 1);
    gate_set(j->rank, 1, 1);                            /* the second may pass, the last not */
    copy = m->p[4]; copy.id = 0;                        /* the same memory */
    CHECK_OK(layer(amp, m, &copy, NULL, 200, 10));
    CHECK_EQ(gate_ended(j->rank), 1);
    CHECK_EQ(pthread_create(&opener, NULL, gate_open_later, &j->rank), 0);
    CHECK_OK(layer(amp, m, &m->p[2], &m->p[3], 64, 200));
    CHECK_EQ(gate_ended(j->rank), 2);
    pthread_join(opener, NULL);
}
TEST(the_first_layer_begins_before_the_last_gather_ends) {
    setup s = late();
    s.gate = 1;
    run_ranks_with(&s, 2, one, NULL, first_layer_early);
}

/* Whatever reads, writes or frees a weight, or uses the reducer, does so after the last gather. */
enum { SYNC, ACTIVATION, CAST, SAVE, SET_WEIGHT, REBUILD, BROADCAST, FLUSH, STATUS, SAVE_RANKS, STEP, CREATE, FREE, FORGET, DESTROY, CLOSE, WAITS };
static int waiting;
static amp_result call_that_waits(job *j, amp_context *amp, model *m, amp_optimizer *o) {
    static const float values[10] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    amp_result result = AMP_OK;
    amp_activation_op act;
    amp_optimizer_desc d;
    amp_optimizer *second;
    amp_status status;
    amp_tensor cast;
    amp_state *state = NULL;
    memset(&act, 0, sizeof act);
    CHECK_OK(amp_state_create(&state, NULL));
    switch (waiting) {
        case SYNC: result = amp_sync(amp); break;
        case ACTIVATION:
            act.x = act.y = amp_tensor2(m->y[0], AMP_F32, ROWS, 10);
            act.act = AMP_ACT_RELU; act.bias = &m->p[5];
            result = amp_activation(amp, &act);
            break;
        case CAST: result = amp_autocast_cast(amp, &m->p[2], AMP_BF16, &cast); break;
        case SAVE: result = amp_optimizer_save(o, state, "o"); break;
        case SET_WEIGHT: result = amp_optimizer_set_weight(o, &m->p[5], values); break;
        case REBUILD: result = amp_optimizer_rebuild_masters(o); break;
        case BROADCAST: result = amp_params_broadcast(amp, m->p, PARAMS); break;
        case FLUSH: result = amp_step_result_flush(o); break;
        case STATUS: result = amp_status_get(amp, NULL, 0, &status); break;
        case SAVE_RANKS: result = amp_state_save_ranks(amp, state, j->path); break;
        case STEP: result = amp_step(o, NULL); break;
        case CREATE:
            memset(&d, 0, sizeof d);
            d.params = m->p; d.n_params = PARAMS;
            result = amp_optimizer_create(amp, &second, &d);
            amp_optimizer_destroy(second);
            break;
        case FREE: amp_free(amp, m); break;
        case FORGET: amp_param_forget(amp, m->p, PARAMS); break;
        case DESTROY: amp_optimizer_destroy(o); break;
        default: amp_close(amp);
    }
    amp_state_destroy(state);
    return result;
}
static void wait_and_end(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    pthread_t opener;
    one_step(j, amp, m, o, scaler, 0);
    CHECK_OK(amp_sync(amp));
    step_to_gate(j, amp, m, o, 0);
    CHECK_EQ(gate_ended(j->rank), 0);
    CHECK_EQ(pthread_create(&opener, NULL, gate_open_later, &j->rank), 0);
    CHECK_MSG(call_that_waits(j, amp, m, o) == AMP_OK, "call %d: %s", waiting, amp_last_error());
    CHECK_MSG(gate_ended(j->rank) >= WEIGHT_BUCKETS - (waiting == ACTIVATION), "call %d returned after %d gathers", waiting, gate_ended(j->rank));
    pthread_join(opener, NULL);
    if (waiting == STEP || waiting == ACTIVATION) CHECK_OK(amp_sync(amp));  /* the step's own gathers; the bucket after the bias's */
    read_weights(m, j->out->w);
    if (waiting < DESTROY) amp_optimizer_destroy(o);
    if (waiting < CLOSE) amp_close(amp);
    else amp_optimizer_destroy(o);
}
TEST(what_waits_for_gathered_weights) {
    SKIP_ON_WINDOWS("pages that it takes back, which sharded gradients need");
    char place[] = "/tmp/amp_waits_XXXXXX", path[80], command[100];
    setup s = late();
    if (mkdtemp(place) == NULL) SKIP("no temporary folder");
    snprintf(path, sizeof path, "%s/s", place);
    snprintf(command, sizeof command, "rm -r %s", place);
    s.gate = s.ends = 1;
    for (waiting = 0; waiting < WAITS; waiting++) {
        run_ranks_with(&s, 2, one, path, wait_and_end);
        if (waiting != SET_WEIGHT) CHECK(memcmp(one[0].w, one[1].w, sizeof one[0].w) == 0);
    }
    CHECK_EQ(system(command), 0);
}

/* Old weights beside new ones are told of by everything that waits, until the optimizer is destroyed. */
static void fail_to_gather(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    amp_optimizer_desc d;
    amp_state *state;
    CHECK_OK(amp_state_create(&state, NULL));
    one_step(j, amp, m, o, scaler, 0);
    CHECK_OK(amp_sync(amp));
    gates[j->rank].fail = 2;
    step_to_gate(j, amp, m, o, 9);
    CHECK_EQ(layer(amp, m, &m->p[4], &m->p[5], 200, 10), AMP_ERR_REDUCE);
    if (j->rank == 0) {
        CHECK_ERR(amp_sync(amp), AMP_ERR_REDUCE);
        CHECK_MSG(strstr(amp_last_error(), "were not gathered whole") && strstr(amp_last_error(), "your callback returned 7"), "%s", amp_last_error());
    }
    for (int again = 0; again < 2; again++) {
        CHECK_EQ(layer(amp, m, &m->p[0], &m->p[1], 64, 64), AMP_ERR_REDUCE);
        CHECK(strncmp(amp_last_error(), "AMP0503 amp_linear: ", 20) == 0);
        CHECK_EQ(amp_step(o, NULL), AMP_ERR_REDUCE);
        CHECK_EQ(amp_optimizer_save(o, state, "o"), AMP_ERR_REDUCE);
        CHECK_EQ(amp_params_broadcast(amp, m->p, PARAMS), AMP_ERR_REDUCE);
    }
    gate_set(j->rank, 0, 0);
    amp_optimizer_destroy(o);
    memset(&d, 0, sizeof d);
    d.params = m->p; d.n_params = PARAMS;
    d.shard = AMP_SHARD_STATES; d.deterministic = d.overlap_param_gather = 1;
    CHECK_OK(amp_sync(amp));
    CHECK_OK(amp_optimizer_create(amp, &o, &d));
    CHECK_OK(amp_params_broadcast(amp, m->p, PARAMS));
    run_model(amp, m, NULL, 3, 0, AMP_OK);
    CHECK_OK(amp_step(o, NULL));
    CHECK_OK(amp_sync(amp));
    amp_state_destroy(state);
    amp_optimizer_destroy(o);
    amp_close(amp);
}
TEST(a_gather_that_fails_is_told) {
    setup s = late();
    s.gate = s.ends = 1;
    run_ranks_with(&s, 2, one, NULL, fail_to_gather);
}

/* The steps of two optimizers one after the other: the second's sums come after the first's weights. */
static void train_two(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    amp_optimizer_desc d = j->s->o;
    amp_optimizer *second;
    d.params = m->p + 2; d.n_params = PARAMS - 2;
    CHECK_OK(amp_optimizer_create(amp, &second, &d));
    for (int step = 0; step < STEPS; step++) {
        run_model(amp, m, scaler, step * MOST_RANKS + j->rank, 0, AMP_OK);
        CHECK_OK(amp_step(o, scaler));
        CHECK_OK(amp_step(second, scaler));
    }
    amp_optimizer_destroy(second);
}
TEST(two_optimizers_gather_weights) {
    for (int world = 2; world <= MOST_RANKS; world++) {
        setup s = late();
        s.split = 1;
        s.o.overlap_param_gather = 0;
        run_ranks_with(&s, world, one, NULL, train_two);
        s.o.overlap_param_gather = 1;
        run_ranks_with(&s, world, other, NULL, train_two);
        for (int r = 0; r < world; r++) same(&one[0], &other[r], "two optimizers", world);
    }
}

TEST(where_weights_are_not_gathered_behind_forward) {
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_context *amp;
    amp_desc open;
    static model m;
    setup s = plain();
    memset(&d, 0, sizeof d); memset(&open, 0, sizeof open);
    open.dtype = AMP_F32; open.threads = 1;
    CHECK_OK(amp_open(&amp, &open));
    model_make(&m, &s);
    d.params = m.p; d.n_params = PARAMS;
    d.overlap_param_gather = 1;
    CHECK_ERR(amp_optimizer_create(amp, &o, &d), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), ".overlap_param_gather needs .shard = AMP_SHARD_STATES") != NULL);
    d.shard = AMP_SHARD_STATES; d.no_overlap = 1;
    CHECK_ERR(amp_optimizer_create(amp, &o, &d), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), ".overlap_param_gather does not go with .no_overlap") != NULL);
    d.no_overlap = 0; d.overlap_param_gather = 2;
    CHECK_ERR(amp_optimizer_create(amp, &o, &d), AMP_ERR_RANGE);
    d.overlap_param_gather = 1;
    CHECK_OK(amp_optimizer_create(amp, &o, &d));        /* one rank has nothing to gather */
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* ---- Sharded gradients */

#if defined(__linux__)
/* After the last step: how many numbers of "wide"'s gradient are 0, as pages are that came back from the system. */
static void train_and_count(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    const float *gradient = (const float *)m->p[2].grad.data;
    train(j, amp, m, o, scaler);
    for (int i = 0; i < 12800; i++) j->out->zeros += gradient[i] == 0;
}
TEST(gradients_that_are_summed_take_no_memory) {
    SKIP_ON_WINDOWS("pages that it takes back, which sharded gradients need");
    for (int way = 0; way < 8; way++) {
        setup s = plain();
        s.o.deterministic = way & 1;
        s.o.no_overlap = way >> 1 & 1;
        s.apart = way >> 2;
        s.o.shard = AMP_SHARD_STATES;
        run_ranks_with(&s, 2, one, NULL, train_and_count);
        s.o.shard = AMP_SHARD_GRADIENTS;
        run_ranks_with(&s, 2, other, NULL, train_and_count);
        for (int r = 0; r < 2; r++) {
            same(&one[0], &other[r], "gradients that were summed", 2);
            CHECK_MSG(one[r].zeros < 100, "%d zeros in a gradient", one[r].zeros);
            CHECK_EQ(one[r].gradient, 4);
            CHECK_MSG(other[r].gradient > 1 && other[r].gradient < 3, "%g bytes of gradients a parameter", other[r].gradient);
            CHECK_MSG(other[r].zeros >= 10 * 1024, "%d numbers of 12800 were given back", other[r].zeros);
        }
    }
}

/* Backward ends when all buckets but one are summed. */
static void hold_the_sums(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    pthread_t opener;
    train(j, amp, m, o, scaler);
    pthread_mutex_lock(&gate_lock);
    gates[j->rank].held = 1;
    gates[j->rank].summed = 0;
    pthread_mutex_unlock(&gate_lock);
    CHECK_EQ(pthread_create(&opener, NULL, gate_open_later, &j->rank), 0);
    run_model(amp, m, scaler, 77 + j->rank, 0, AMP_OK);
    pthread_mutex_lock(&gate_lock);
    j->out->zeros = gates[j->rank].summed;
    pthread_mutex_unlock(&gate_lock);
    CHECK_OK(amp_step(o, scaler));
    pthread_join(opener, NULL);
}
TEST(backward_waits_for_sums_of_gradients) {
    setup s = late();
    s.gate = 1;
    s.o.overlap_param_gather = 0;
    s.o.shard = AMP_SHARD_GRADIENTS;
    run_ranks_with(&s, 2, one, NULL, hold_the_sums);
    for (int r = 0; r < 2; r++) CHECK_MSG(one[r].zeros >= WEIGHT_BUCKETS - 1, "%d buckets are summed", one[r].zeros);
}
#endif

/* Ranks that differ get rank 0's weights after their optimizers were created: whole and sharded masters follow. */
static void broadcast_and_train(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    if (j->rank > 0) memset(m->w, 0, sizeof m->w);
    CHECK_OK(amp_optimizer_rebuild_masters(o));
    CHECK_OK(amp_params_broadcast(amp, m->p, PARAMS));
    train(j, amp, m, o, scaler);
}
TEST(masters_follow_a_broadcast) {
    for (int i = 6; i < STORAGES; i++) {
        setup s = stored(i);
        s.o.deterministic = 1;
        run_ranks(&s, 2, one);
        for (int shard = 0; shard < 2; shard++) {
            s.o.shard = shard ? AMP_SHARD_STATES : AMP_SHARD_NONE;
            run_ranks_with(&s, 2, other, NULL, broadcast_and_train);
            for (int r = 0; r < 2; r++) same(&one[0], &other[r], storages[i].name, 2);
        }
    }
}

/* Operators, threads, a tied weight: with whole states, sharded, and by the reducer's own sums within their rounding. */
TEST(sharded_states_of_a_model) {
    for (int world = 2; world <= MOST_RANKS; world++) {
        setup s = plain();
        s.o.deterministic = 1;
        run_ranks(&s, world, one);
        s.o.shard = AMP_SHARD_STATES;
        run_ranks(&s, world, other);
        for (int r = 0; r < world; r++) same(&one[0], &other[r], "deterministic", world);
        s.o.no_overlap = 1;
        run_ranks(&s, world, other);
        for (int r = 0; r < world; r++) same(&one[0], &other[r], "deterministic, in the step", world);
        s.o.deterministic = 0;
        for (int wire = 0; wire < 2; wire++) {
            s.o.shard = AMP_SHARD_NONE; s.o.no_overlap = 0; s.o.wire = wire ? AMP_BF16 : AMP_F32;
            run_ranks(&s, world, one);
            s.o.shard = AMP_SHARD_STATES;
            run_ranks(&s, world, other);
            for (int r = 0; r < world; r++) {
                double error = 0, size = 0;
                for (int i = 0; i < NUMBERS; i++) { error += (one[0].w[i] - other[r].w[i]) * (double)(one[0].w[i] - other[r].w[i]); size += one[0].w[i] * (double)one[0].w[i]; }
                CHECK_MSG(sqrt(error / size) < STEPS * 1e-6, "%d ranks, rank %d: %g", world, r, sqrt(error / size));
                CHECK(memcmp(other[0].w, other[r].w, sizeof other[r].w) == 0);
            }
        }
    }
}

TEST(each_rank_has_its_share) {
    for (int i = 0; i < STORAGES; i++) {
        setup s = stored(i);
        run_ranks(&s, 4, one);
        s.o.shard = AMP_SHARD_STATES;
        run_ranks(&s, 4, other);
        double sum = 0;
        for (int r = 0; r < 4; r++) sum += other[r].states;
        CHECK_MSG(fabs(sum - one[0].states) < 1e-9 + 0.01 * one[0].states, "%s: %g and %g bytes per parameter", storages[i].name, sum, one[0].states);
        for (int r = 0; r < 4; r++) CHECK_MSG(other[r].states <= one[0].states / 4 * 1.2, "%s, rank %d: %g of %g", storages[i].name, r, other[r].states, one[0].states);
    }
}

/* One backward more than any cycle before. */
TEST(a_gradient_that_was_sent_takes_no_more) {
    setup s = plain();
    s.extra = 1;
    run_ranks(&s, 2, one);
    for (int r = 0; r < 2; r++) CHECK_MSG(strstr(one[r].why, "wide: its gradient is being summed over the ranks") != NULL, "%s", one[r].why);
    CHECK(memcmp(one[0].w, one[1].w, sizeof one[0].w) == 0);
}

/* A norm that clips is compared once it has changed; one rank that changes it alone is an error, too. */
static double clips[2];
static void clip_and_train(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    one_step(j, amp, m, o, scaler, 0);
    if (clips[j->rank] > 0) CHECK_OK(amp_optimizer_set_clip(o, clips[j->rank]));
    run_model(amp, m, scaler, j->rank, 0, AMP_OK);
    j->out->applied = amp_step(o, scaler);
    snprintf(j->out->why, sizeof j->out->why, "%s", amp_last_error());
}
TEST(ranks_that_clip_alone) {
    static const char *const why[] = {"", ".clip_norm is 0.25 on rank 1 and 0.125 on rank 0", "all must call the same in the same order"};
    for (int t = 0; t < 3; t++) {
        setup s = plain();
        clips[0] = t == 0 ? 0.25 : t == 1 ? 0.125 : 0;
        clips[1] = 0.25;
        run_ranks_with(&s, 2, one, NULL, clip_and_train);
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(one[r].applied, t == 0 ? AMP_OK : AMP_ERR_REDUCE);
            CHECK_MSG(t == 0 || strstr(one[r].why, why[t]) != NULL, "%s", one[r].why);
        }
    }
}

/* Gradients that were summed are not summed again: the step that failed is told, and a whole cycle begins. */
static int arm_at;
static void fail_and_train(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    one_step(j, amp, m, o, scaler, 0);
    one_step(j, amp, m, o, scaler, 1);
    if (arm_at > 0) {
        hooks[j->rank].arm = arm_at;
        run_model(amp, m, scaler, 7, 0, AMP_OK);
        CHECK_OK(amp_step(o, scaler));
        run_model(amp, m, scaler, 8, 0, AMP_OK);
        CHECK_EQ(amp_step(o, scaler), AMP_ERR_REDUCE);
        CHECK_EQ(amp_step(o, scaler), AMP_ERR_STATE);
        snprintf(j->out->why, sizeof j->out->why, "%s", amp_last_error());
    }
    one_step(j, amp, m, o, scaler, 2);
}
TEST(sums_that_failed_are_dropped) {
    setup s = plain();
    s.hook = 1;
    s.o.accumulation = 2;
    arm_at = 0;
    run_ranks_with(&s, 2, one, NULL, fail_and_train);
    for (arm_at = 1; arm_at <= 2; arm_at++) {           /* the sum of gradients, and that of flags after it */
        run_ranks_with(&s, 2, other, NULL, fail_and_train);
        for (int r = 0; r < 2; r++) {
            CHECK_MSG(strstr(other[r].why, "call backward for a whole cycle") != NULL, "%s", other[r].why);
            CHECK(memcmp(one[0].w, other[r].w, sizeof one[0].w) == 0);
        }
    }
}

/* zero_grad before each backward costs nothing and changes nothing; after a backward, whose buckets are on their way, it drops
   what comes back, also where one rank's backward ended early; and if that fails. */
enum { DROP_NOTHING, DROP_BEFORE, DROP_AFTER, DROP_APART, DROP_FAILS };
static int dropping;
static void drop_and_train(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    hooks[j->rank].calls = 0;
    for (int step = 0; step < STEPS; step++) {
        amp_linear_op last = {.x = amp_tensor2(m->y[3], AMP_F32, ROWS, 200), .y = amp_tensor2(m->y[4], AMP_F32, ROWS, 10), .weight = &m->p[4], .bias = &m->p[5],
                              .dy = amp_tensor2(m->dy[4], AMP_F32, ROWS, 10)};
        int again = dropping >= DROP_AFTER && step == 3;
        hooks[j->rank].arm = again && dropping == DROP_FAILS;
        if (again && dropping == DROP_APART && j->rank == 1) {
            CHECK_OK(amp_linear(amp, &last));
            CHECK_OK(amp_linear_backward(amp, &last));
        } else if (again) run_model(amp, m, scaler, 99, 0, AMP_OK);
        if (again && dropping == DROP_FAILS) {
            if (j->rank == 0) CHECK_ERR(amp_optimizer_zero_grad(o), AMP_ERR_REDUCE);
            else CHECK_EQ(amp_optimizer_zero_grad(o), AMP_ERR_REDUCE);
        } else if (again || dropping == DROP_BEFORE) CHECK_OK(amp_optimizer_zero_grad(o));
        one_step(j, amp, m, o, scaler, step);
    }
    j->out->applied = hooks[j->rank].calls;
}
TEST(gradients_on_their_way_are_dropped) {
    setup s = plain();
    s.hook = 1;
    s.d.reducer.one_thread = 1;
    run_ranks_with(&s, 2, one, NULL, drop_and_train);
    for (dropping = DROP_BEFORE; dropping <= DROP_FAILS; dropping++) {
        s.d.reducer.one_thread = dropping != DROP_AFTER;
        run_ranks_with(&s, 2, other, NULL, drop_and_train);
        for (int r = 0; r < 2; r++) CHECK_MSG(memcmp(one[0].w, other[r].w, sizeof one[0].w) == 0, "case %d, rank %d", dropping, r);
        CHECK_MSG(dropping == DROP_BEFORE ? other[0].applied == one[0].applied : other[0].applied > one[0].applied, "case %d: %d calls, %d", dropping, other[0].applied, one[0].applied);
    }
    dropping = DROP_NOTHING;
}

/* Calls of all ranks at once; rank 0's are told to errors.sh. */
static char unwritable[] = "/nonexistent.folder/state";
static void refuse_and_train(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    amp_param apart = m->p[0];
    amp_state *state;
    CHECK_OK(amp_state_create(&state, NULL));
    one_step(j, amp, m, o, scaler, 0);
    one_step(j, amp, m, o, scaler, 1);
    run_model(amp, m, scaler, 7, 0, AMP_OK);            /* its gradients are on their way */
    if (j->rank == 0) {
        CHECK_ERR(amp_params_broadcast(amp, m->p, PARAMS), AMP_ERR_STATE);
        CHECK_ERR(amp_state_save_ranks(amp, state, unwritable), AMP_ERR_STATE);
    }
    CHECK_OK(amp_step(o, scaler));
    apart.weight.stride[1] = 2;
    if (j->rank == 0) CHECK_ERR(amp_params_broadcast(amp, &apart, 1), AMP_ERR_SHAPE);
    hooks[j->rank].arm = 1;
    if (j->rank == 0) CHECK_ERR(amp_params_broadcast(amp, m->p, PARAMS), AMP_ERR_REDUCE);
    else CHECK_EQ(amp_params_broadcast(amp, m->p, PARAMS), AMP_ERR_REDUCE);
    if (j->rank == 0) CHECK_ERR(amp_state_save_ranks(amp, state, j->path), AMP_ERR_REDUCE);
    else CHECK_EQ(amp_state_save_ranks(amp, state, unwritable), AMP_ERR_OPEN);
    amp_state_destroy(state);
}
TEST(calls_of_all_ranks_refuse) {
    setup s = plain();
    s.hook = 1;
    run_ranks_with(&s, 2, one, "t_shards_refused", refuse_and_train);
    CHECK(access("t_shards_refused", F_OK) != 0);
}

static void step_and_tell(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    fill_by_hand(j, m, 1, 1);
    (void)amp;
    j->out->applied = amp_step(o, scaler);
    snprintf(j->out->why, sizeof j->out->why, "%s", amp_last_error());
    pthread_barrier_wait(&shared_ready);
}
TEST(ranks_of_threads_share_no_memory) {
    setup s = plain();
    s.shared = 1;
    CHECK_EQ(pthread_barrier_init(&shared_ready, NULL, 2), 0);
    run_ranks_with(&s, 2, one, NULL, step_and_tell);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(one[r].applied, AMP_ERR_REDUCE);
        CHECK_MSG(strstr(one[r].why, "ranks 0 and 1 share a weight of tied:") != NULL, "%s", one[r].why);
    }
    pthread_barrier_destroy(&shared_ready);
}

/* ---- Checkpoints */

static char folder[64];

static void save_all(const job *j, amp_context *amp, const model *m, const amp_optimizer *o, const char *path) {
    amp_state *state;
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    CHECK_OK(amp_state_put(state, "w", AMP_F32, m->w, NUMBERS));
    CHECK_OK(amp_state_put(state, "rank", AMP_I32, &j->rank, 1));
    CHECK_OK(amp_state_save_ranks(amp, state, path));
    amp_state_destroy(state);
}
static void train_and_save(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    for (int save = 0; save < 2; save++) {
        for (int step = 0; step < 2; step++) one_step(j, amp, m, o, scaler, 2 * save + step);
        save_all(j, amp, m, o, j->path);
    }
    one_step(j, amp, m, o, scaler, 4);
}
/* What was saved goes through the ranks' memory to another file. */
static void load_and_save(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    char path[128];
    amp_state *state;
    int32_t rank;
    CHECK_OK(amp_state_load_ranks(amp, &state, j->path));
    CHECK_OK(amp_state_get(state, "w", AMP_F32, m->w, NUMBERS));
    CHECK_OK(amp_state_get(state, "rank", AMP_I32, &rank, 1));
    CHECK_EQ(rank, j->world == 4 ? j->rank : 0);
    CHECK_OK(amp_optimizer_rebuild_masters(o));
    CHECK_OK(amp_optimizer_load(o, state, "o"));
    amp_state_destroy(state);
    snprintf(path, sizeof path, "%s.again", j->path);
    save_all(j, amp, m, o, path);
    (void)scaler;
}

/* All of `a` is in `b`, but for what belongs to a rank. */
static void same_states(const amp_state *a, const amp_state *b, const char *what, int world) {
    static char x[NUMBERS * 8], y[NUMBERS * 8];
    const char *key;
    for (int64_t i = 0; (key = amp_state_key(a, i)) != NULL; i++) {
        amp_dtype dtype = AMP_F32, kind = AMP_F32;
        int64_t n = amp_state_count(a, key, &dtype), m = amp_state_count(b, key, &kind);
        if (strcmp(key, "rank") == 0 || strcmp(key, "o.cycle") == 0) continue;
        CHECK_MSG(n == m && dtype == kind, "%s, %d ranks, %s: %d and %d", what, world, key, (int)n, (int)m);
        if (n != m || dtype != kind || n * (int64_t)amp_dtype_size(dtype) > (int64_t)sizeof x) continue;
        CHECK_OK(amp_state_get(a, key, dtype, x, n));
        CHECK_OK(amp_state_get(b, key, dtype, y, n));
        CHECK_MSG(memcmp(x, y, (size_t)n * amp_dtype_size(dtype)) == 0, "%s, %d ranks: %s differs", what, world, key);
    }
}
static amp_state *joined(const char *path) {
    amp_context *amp;
    amp_state *state = NULL;
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_OK(amp_state_load_ranks(amp, &state, path));
    amp_close(amp);
    return state;
}
static int files_in_folder(void) {
    char command[128], text[16] = "";
    FILE *f;
    snprintf(command, sizeof command, "ls %s | wc -l", folder);
    f = popen(command, "r");
    if (f != NULL) { if (!fgets(text, sizeof text, f)) text[0] = 0; pclose(f); }
    return atoi(text);
}

TEST(states_go_from_any_world_to_any) {
    SKIP_ON_WINDOWS("ls and wc");
    char path[80], again[100];
    snprintf(folder, sizeof folder, "/tmp/amp_shards_XXXXXX");
    if (mkdtemp(folder) == NULL) SKIP("no temporary folder");
    snprintf(path, sizeof path, "%s/s", folder);
    snprintf(again, sizeof again, "%s.again", path);
    for (int i = 0; i < STORAGES; i++) {
        setup s = stored(i);
        amp_state *whole, *state;
        s.o.deterministic = 1;
        run_ranks_with(&s, 4, one, path, train_and_save);
        whole = joined(path);
        s.o.shard = AMP_SHARD_STATES;
        run_ranks_with(&s, 4, one, path, train_and_save);
        CHECK_EQ(files_in_folder(), i == 0 ? 5 : 10);           /* an index and four parts, of each path */
        state = joined(path);
        same_states(whole, state, storages[i].name, 4);
        amp_state_destroy(state);
        for (int world = 1; world <= 4; world++)
            for (int shard = AMP_SHARD_NONE; shard <= AMP_SHARD_STATES; shard++) {
                s.o.shard = (amp_shard)shard;
                run_ranks_with(&s, world, other, path, load_and_save);
                state = joined(again);
                same_states(whole, state, storages[i].name, world);
                amp_state_destroy(state);
            }
        amp_state_destroy(whole);
    }
    { char command[100]; snprintf(command, sizeof command, "rm -r %s", folder); CHECK_EQ(system(command), 0); }
}

/* Parameters whose sizes are no multiples of a block of 8-bit moments, and small ones: parts of ranks that are empty,
 * begin behind a parameter, or end within its last block. */
enum { ODD = 5, ODD_WORLDS = 5, ODD_NUMBERS = 4160 + 300 + 8205 + 1 + 4097 };
static const struct { const char *name; int64_t n; } odd[ODD] = {{"a", 4160}, {"b", 300}, {"c", 8205}, {"d", 1}, {"e", 4097}};
static const struct { amp_dtype weights, moments; amp_master_kind master; int64_t bucket; } odd_kinds[] = {
    {AMP_F32, AMP_F32, AMP_MASTER_DEFAULT, 1 << 20},      {AMP_F32, AMP_MOMENTS_8BIT, AMP_MASTER_DEFAULT, 1 << 20},
    {AMP_BF16, AMP_BF16, AMP_MASTER_F32, 1 << 20},        {AMP_BF16, AMP_MOMENTS_8BIT, AMP_MASTER_REMAINDER, 20000},
    {AMP_BF16, AMP_F32, AMP_MASTER_REMAINDER, 1 << 20},   {AMP_BF16, AMP_BF16, AMP_MASTER_STOCHASTIC, 20000}};
typedef struct odd_job {
    amp_ranks *ranks; const char *path; const amp_state *whole; amp_state *state; int rank, world, kind, shard, load;
    float w[ODD_NUMBERS], g[ODD_NUMBERS];
    pthread_t thread;
} odd_job;

/* A rank's records are the parts of `whole` that its part record names. */
static void check_parts(const amp_state *whole, const amp_state *own, const odd_job *j) {
    static const struct { const char *name; int64_t block; } arrays[] = {{"m", 1}, {"v", 1}, {"master", 1}, {"m_scales", 256}, {"v_scales", 256}};
    int64_t part[2 * ODD + 2] = {0};
    int parts = amp_state_get(own, "o.part", AMP_I64, part, 2 * ODD + 2) == AMP_OK;
    char *a = malloc(ODD_NUMBERS * 4), *b = malloc(ODD_NUMBERS * 4);
    for (int i = 0; i < 5 * ODD; i++) {
        char key[40];
        int row = i % ODD;
        int64_t block = arrays[i / ODD].block, n, first = parts ? part[2 * row + 2] : 0, count = parts ? part[2 * row + 3] : odd[row].n;
        amp_dtype dtype = AMP_F32, kind = AMP_F32;
        snprintf(key, sizeof key, "o.%s.%d", arrays[i / ODD].name, row);
        n = amp_state_count(whole, key, &dtype);
        CHECK_EQ(amp_state_count(own, key, &kind), n < 0 ? -1 : (count + block - 1) / block);
        CHECK_EQ(kind, dtype);
        if (n < 0 || count == 0) continue;
        CHECK_OK(amp_state_get(whole, key, dtype, a, n));
        CHECK_OK(amp_state_get(own, key, dtype, b, (count + block - 1) / block));
        CHECK_MSG(memcmp(a + (size_t)(first / block) * amp_dtype_size(dtype), b, (size_t)((count + block - 1) / block) * amp_dtype_size(dtype)) == 0,
                  "storage %d, rank %d of %d: %s differs", j->kind, j->rank, j->world, key);
    }
    free(a); free(b);
}

/* Loads `path`, or takes two steps and saves to it; then compares its state with `whole`, or else keeps it. */
static void *odd_rank(void *arg) {
    odd_job *j = (odd_job *)arg;
    amp_desc d;
    amp_optimizer_desc od;
    amp_param p[ODD];
    amp_context *amp;
    amp_optimizer *o;
    amp_state *state = NULL;
    int64_t at = 0;
    memset(&d, 0, sizeof d); memset(&od, 0, sizeof od); memset(p, 0, sizeof p);
    CHECK_OK(amp_ranks_reducer(j->ranks, j->rank, &d.reducer));
    d.threads = 1; d.dtype = AMP_F32;
    CHECK_OK(amp_open(&amp, &d));
    for (int i = 0; i < ODD; at += odd[i++].n) {
        p[i].name = odd[i].name;
        p[i].weight = amp_tensor1(j->w + at, odd_kinds[j->kind].weights, odd[i].n);
        p[i].grad = amp_tensor1(j->g + at, AMP_F32, odd[i].n);
    }
    CHECK_OK(amp_param_register(amp, p, ODD));
    od.params = p; od.n_params = ODD; od.deterministic = 1; od.shard = (amp_shard)j->shard; od.lr = 0.01;
    od.master = odd_kinds[j->kind].master; od.moments = odd_kinds[j->kind].moments; od.bucket_bytes = odd_kinds[j->kind].bucket;
    CHECK_OK(amp_optimizer_create(amp, &o, &od));
    for (int step = 0; step < 2 && !j->load; step++) {
        for (int i = 0; i < ODD; i++) amp_param_accumulate(&p[i]);
        for (int64_t i = 0; i < at; i++) j->g[i] = value(step * 7919 + j->rank * 131 + i);
        CHECK_OK(amp_step(o, NULL));
    }
    if (j->load) {
        CHECK_OK(amp_state_load_ranks(amp, &state, j->path));
        if (state != NULL) CHECK_OK(amp_optimizer_load(o, state, "o"));
        amp_state_destroy(state);
    }
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    if (j->whole != NULL) check_parts(j->whole, state, j);
    if (j->path != NULL && !j->load) CHECK_OK(amp_state_save_ranks(amp, state, j->path));
    if (j->rank == 0 && j->whole == NULL) j->state = state;
    else amp_state_destroy(state);
    amp_optimizer_destroy(o);
    amp_close(amp);
    return NULL;
}
static amp_state *odd_run(int kind, int world, int shard, const char *path, int load, const amp_state *whole) {
    static odd_job jobs[ODD_WORLDS];
    amp_ranks_desc rd;
    amp_ranks *ranks;
    memset(&rd, 0, sizeof rd); memset(jobs, 0, sizeof jobs);
    rd.world = world; rd.timeout_ms = 20000;
    CHECK_OK(amp_ranks_create(&ranks, &rd));
    for (int r = 0; r < world; r++) {
        jobs[r].ranks = ranks; jobs[r].rank = r; jobs[r].world = world; jobs[r].kind = kind; jobs[r].shard = shard;
        jobs[r].path = path; jobs[r].load = load; jobs[r].whole = whole;
        CHECK_EQ(pthread_create(&jobs[r].thread, NULL, odd_rank, &jobs[r]), 0);
    }
    for (int r = 0; r < world; r++) pthread_join(jobs[r].thread, NULL);
    amp_ranks_destroy(ranks);
    return jobs[0].state;
}
TEST(parts_of_every_world_load_in_every_other) {
    char path[80], what[80], command[100];
    snprintf(folder, sizeof folder, "/tmp/amp_shards_XXXXXX");
    if (mkdtemp(folder) == NULL) SKIP("no temporary folder");
    snprintf(path, sizeof path, "%s/s", folder);
    for (int kind = 0; kind < (int)(sizeof odd_kinds / sizeof *odd_kinds); kind++)
        for (int from = 1; from <= ODD_WORLDS; from++) {
            amp_state *whole = odd_run(kind, from, AMP_SHARD_NONE, NULL, 0, NULL), *state;
            amp_state_destroy(odd_run(kind, from, AMP_SHARD_STATES, path, 0, NULL));
            state = joined(path);
            snprintf(what, sizeof what, "storage %d", kind);
            same_states(whole, state, what, from);
            for (int to = 1; to <= ODD_WORLDS; to++) odd_run(kind, to, AMP_SHARD_STATES, path, 1, whole);
            amp_state_destroy(state);
            amp_state_destroy(whole);
        }
    for (int kind = 0; kind < 2; kind++) {              /* 8-bit moments become fp32 ones, and the other way round */
        amp_state *whole;
        amp_state_destroy(odd_run(!kind, 3, AMP_SHARD_STATES, path, 0, NULL));
        whole = odd_run(kind, 1, AMP_SHARD_NONE, path, 1, NULL);
        for (int to = 2; to <= ODD_WORLDS; to++) odd_run(kind, to, AMP_SHARD_STATES, path, 1, whole);
        amp_state_destroy(whole);
    }
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
}

/* A rank's file of an earlier save, renamed to be of this one: whole, but not what the index names. */
static void load_refused(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    amp_state *state = (amp_state *)j;
    if (j->rank == 0) CHECK_ERR(amp_state_load_ranks(amp, &state, j->path), AMP_ERR_CHECKSUM);
    else CHECK_EQ(amp_state_load_ranks(amp, &state, j->path), AMP_ERR_CHECKSUM);
    CHECK(state == NULL);
    snprintf(j->out->why, sizeof j->out->why, "%s", amp_last_error());
    (void)m; (void)o; (void)scaler;
}
static void load_taken(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    amp_state *state;
    int32_t rank;
    CHECK_OK(amp_state_load_ranks(amp, &state, j->path));
    CHECK_OK(amp_state_get(state, "rank", AMP_I32, &rank, 1));
    CHECK_EQ(rank, j->rank);
    amp_state_destroy(state);
    (void)m; (void)o; (void)scaler;
}
static void save_twice(job *j, amp_context *amp, model *m, amp_optimizer *o, amp_scaler *scaler) {
    one_step(j, amp, m, o, scaler, 0);
    save_all(j, amp, m, o, j->path);
    if (j->rank == 0) {                                 /* the other waits for it in its step */
        char from[100], to[100];
        snprintf(from, sizeof from, "%s.1.1", j->path);
        snprintf(to, sizeof to, "%s.kept", j->path);
        CHECK_EQ(link(from, to), 0);
    }
    one_step(j, amp, m, o, scaler, 1);
    save_all(j, amp, m, o, j->path);
}
TEST(files_of_two_saves_are_refused) {
    char path[80], part[100], kept[100], own[100], command[100];
    int64_t index[4];
    amp_state *state;
    setup s = plain();
    s.o.shard = AMP_SHARD_STATES;
    snprintf(folder, sizeof folder, "/tmp/amp_shards_XXXXXX");
    if (mkdtemp(folder) == NULL) SKIP("no temporary folder");
    snprintf(path, sizeof path, "%s/s", folder);
    snprintf(part, sizeof part, "%s.2.1", path);
    snprintf(kept, sizeof kept, "%s.kept", path);
    snprintf(own, sizeof own, "%s.own", path);
    run_ranks_with(&s, 2, one, path, save_twice);
    CHECK_EQ(rename(part, own), 0);
    CHECK_EQ(rename(kept, part), 0);
    run_ranks_with(&s, 2, other, path, load_refused);
    for (int r = 0; r < 2; r++)
        CHECK_MSG(strstr(other[r].why, part) != NULL && strstr(other[r].why, "was written by another save than") != NULL, "rank %d: %s", r, other[r].why);
    CHECK_OK(amp_state_load(&state, NULL, path));       /* an index without sums takes what is there */
    CHECK_OK(amp_state_get(state, "ranks.index", AMP_I64, index, 4));
    CHECK_OK(amp_state_put(state, "ranks.index", AMP_I64, index, 3));
    CHECK_OK(amp_state_save(state, path));
    { amp_state *none; CHECK_ERR(amp_state_load_ranks(NULL, &none, path), AMP_ERR_FORMAT); }
    CHECK_OK(amp_state_put(state, "ranks.index", AMP_I64, index, 2));
    CHECK_OK(amp_state_save(state, path));
    run_ranks_with(&s, 2, other, path, load_taken);
    CHECK_OK(amp_state_put(state, "ranks.index", AMP_I64, index, 4));
    CHECK_OK(amp_state_save(state, path));
    amp_state_destroy(state);
    CHECK_EQ(rename(own, part), 0);                     /* with its own file the checkpoint is whole again */
    run_ranks_with(&s, 2, other, path, load_taken);
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK_EQ(system(command), 0);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(parameters_that_come_later);
    RUN(sums_during_backward); RUN(what_lies_apart_on_one_rank); RUN(buckets_go_as_backward_finishes_them);
    RUN(sharded_states_give_the_same_bits); RUN(masters_follow_a_broadcast); RUN(sharded_states_of_a_model); RUN(each_rank_has_its_share);
    RUN(a_gradient_that_was_sent_takes_no_more); RUN(ranks_that_clip_alone); RUN(sums_that_failed_are_dropped); RUN(gradients_on_their_way_are_dropped);
    RUN(calls_of_all_ranks_refuse); RUN(ranks_of_threads_share_no_memory); RUN(states_go_from_any_world_to_any);
    RUN(files_of_two_saves_are_refused); RUN(parts_of_every_world_load_in_every_other);
    RUN(weights_behind_forward_give_the_same_bits); RUN(the_first_layer_begins_before_the_last_gather_ends); RUN(what_waits_for_gathered_weights);
    RUN(a_gather_that_fails_is_told); RUN(two_optimizers_gather_weights); RUN(where_weights_are_not_gathered_behind_forward);
#if defined(__linux__)
    RUN(gradients_that_are_summed_take_no_memory); RUN(backward_waits_for_sums_of_gradients);
#endif
    return TEST_END();
}
