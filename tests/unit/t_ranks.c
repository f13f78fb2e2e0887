/* t_ranks.c - tests data-parallel training with several ranks, over the reduction hook and with amp_ranks.  The ranks of
 * the reduction hook are forked processes with shared memory, and those of amp_ranks are threads.  An overflow on one rank
 * must skip the step on all.  N ranks must reach the weights of one rank with N times the batch.  Ranks without gradients
 * must take part.  Shards must be disjoint and complete, and a run must resume with another number of ranks.  A failing
 * hook, and ranks that disagree, are late or have closed, must give an error on all ranks. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <math.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>
#if !defined(_WIN32)
#  include <sys/mman.h>
#  include <sys/wait.h>
#endif

enum { RANKS = 4, ROOM = 4096, IN = 6, OUT = 5, ROWS = 8, STEPS = 6 };

/* What the ranks share: a barrier, a buffer to reduce in, and what each of them found. */
typedef struct shared {
    int arrived, generation, calls_max[RANKS], calls_sum[RANKS], fail;
    double buffer[RANKS][ROOM];
    float weights[RANKS][IN * OUT], scale[RANKS];
    int64_t skipped[RANKS];
    int32_t samples[RANKS][64];
    int n_samples[RANKS], errors[RANKS];
} shared;
static shared *all;

typedef struct rank_info { int rank, world; } rank_info;

/* Waits until every rank is here; gives up after ten seconds, so that a broken test ends. */
static int barrier(int world) {
    const struct timespec pause = {0, 100000};
    int generation = __atomic_load_n(&all->generation, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&all->arrived, 1, __ATOMIC_SEQ_CST) == world) {
        __atomic_store_n(&all->arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&all->generation, 1, __ATOMIC_SEQ_CST);
        return 0;
    }
    for (int i = 0; i < 100000; i++) {
        if (__atomic_load_n(&all->generation, __ATOMIC_SEQ_CST) != generation) return 0;
        nanosleep(&pause, NULL);
    }
    return 1;
}

static int reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    const rank_info *me = (const rank_info *)user;
    double *mine = all->buffer[me->rank];
    (void)stream;
    if (count > ROOM || (dtype != AMP_F32 && dtype != AMP_F64)) return 1;
    if (__atomic_load_n(&all->fail, __ATOMIC_SEQ_CST)) return 1;
    *(op == AMP_REDUCE_MAX ? &all->calls_max[me->rank] : &all->calls_sum[me->rank]) += 1;
    for (int64_t i = 0; i < count; i++) mine[i] = dtype == AMP_F32 ? (double)((float *)data)[i] : ((double *)data)[i];
    if (barrier(me->world)) return 1;
    for (int64_t i = 0; i < count; i++) {
        double x = all->buffer[0][i];
        for (int r = 1; r < me->world; r++) {
            double y = all->buffer[r][i];
            x = op == AMP_REDUCE_SUM ? x + y : y > x ? y : x;
        }
        if (dtype == AMP_F32) ((float *)data)[i] = (float)x; else ((double *)data)[i] = x;
    }
    return barrier(me->world);
}

static float value(int64_t i) { return (float)((unsigned)(i * 2654435761u) >> 8) / 8388608.0f - 1.0f; }

static amp_ranks *together;     /* of threads of this process; NULL: the hook above */
static int on_a_device;         /* 1: a backend whose memory the host cannot see; what the reducer gets is in `staged` */
static amp_backend device;
static int staged;
static amp_result device_copy(void *dev, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream) {
    __atomic_fetch_add(&staged, kind == AMP_COPY_TO_HOST, __ATOMIC_RELAXED);
    return amp_cpu()->copy(dev, dst, src, bytes, kind, stream);
}

/* Trains on rows [rank * rows, ...) of a fixed problem; `bad_rank` meets an infinity in step 2,
   `idle_rank` has no gradients at all. */
static void train(int rank, int world, int rows, int bad_rank, int idle_rank) {
    rank_info me = {rank, world};
    amp_context *amp;
    amp_optimizer *opt;
    amp_scaler *scaler;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    amp_param p;
    amp_step_result outcome;
    float w[IN * OUT], g[IN * OUT], x[RANKS * ROWS * IN], t[RANKS * ROWS * OUT], y[RANKS * ROWS * OUT], loss;
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd); memset(&p, 0, sizeof p);
    desc.reducer.reduce = world > 1 ? reduce : NULL;
    desc.reducer.user = &me;
    desc.reducer.rank = rank; desc.reducer.world = world;
    desc.threads = 1;
    if (together) CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    if (on_a_device) desc.backend = &device;
    CHECK_OK(amp_open(&amp, &desc));
    for (int i = 0; i < IN * OUT; i++) w[i] = value(i);
    p.name = "w"; p.weight = amp_tensor2(w, AMP_F32, OUT, IN); p.grad = amp_tensor2(g, AMP_F32, OUT, IN);
    CHECK_OK(amp_param_register(amp, &p, 1));
    od.params = &p; od.n_params = 1; od.lr = 0.05f; od.clip_norm = 0.5f; od.result_lag = AMP_LAG_NONE;
    sd.init_scale = 1024;
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    CHECK_OK(amp_scaler_create(amp, &scaler, &sd));
    for (int step = 0; step < STEPS; step++) {
        amp_linear_op lin;
        amp_mse_op mse;
        memset(&lin, 0, sizeof lin); memset(&mse, 0, sizeof mse);
        for (int i = 0; i < rows * IN; i++) x[i] = value(1000 * step + (int64_t)rank * rows * IN + i);
        for (int i = 0; i < rows * OUT; i++) t[i] = value(7000 * step + (int64_t)rank * rows * OUT + i);
        if (rank == bad_rank && step == 2) x[0] = INFINITY;
        lin.x = amp_tensor2(x, AMP_F32, rows, IN); lin.y = amp_tensor2(y, AMP_F32, rows, OUT); lin.weight = &p;
        mse.x = lin.y; mse.dx = lin.y; mse.target = amp_tensor2(t, AMP_F32, rows, OUT);
        mse.loss = &loss; mse.grad_scale = amp_scaler_scale_ptr(scaler);
        CHECK_OK(amp_linear(amp, &lin));
        CHECK_OK(amp_mse(amp, &mse));
        lin.dy = mse.dx;
        if (rank != idle_rank) CHECK_OK(amp_linear_backward(amp, &lin));
        CHECK_OK(amp_step(opt, scaler));
        while (amp_step_result_next(opt, &outcome)) all->skipped[rank] += !outcome.applied;
    }
    memcpy(all->weights[rank], w, sizeof w);
    all->scale[rank] = amp_scaler_scale(scaler);
    amp_optimizer_destroy(opt);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* Runs `body(rank, world)` in `world` processes; failures of a child count here. */
static void fork_ranks(int world, void (*body)(int rank, int world)) {
    pid_t children[RANKS];
    memset(all, 0, sizeof *all);
    fflush(stdout);
    for (int r = 0; r < world; r++) {
        children[r] = fork();
        if (children[r] == 0) {
            ampt.failures = 0;
            body(r, world);
            all->errors[r] = ampt.failures;
            fflush(stdout);
            _exit(0);
        }
    }
    for (int r = 0; r < world; r++) {
        int status;
        waitpid(children[r], &status, 0);
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0 && all->errors[r] == 0, "rank %d: %d errors", r, all->errors[r]);
    }
}

static void clean_training(int rank, int world) { train(rank, world, ROWS, -1, -1); }
static void training_with_an_overflow(int rank, int world) { train(rank, world, ROWS, 1, -1); }

static void training_with_an_idle_rank(int rank, int world) { train(rank, world, ROWS, 0, 1); }

/* Sums in another order, so fp32 rounding apart: STEPS updates of relative size u = 2^-24 times the sums' length,
   amplified by AdamW's normalisation of small gradients. */
static void check_same_weights(const float *a, const float *b) {
    double error = 0, size = 0;
    for (int i = 0; i < IN * OUT; i++) { error += (a[i] - b[i]) * (double)(a[i] - b[i]); size += a[i] * (double)a[i]; }
    CHECK_MSG(sqrt(error / size) < STEPS * RANKS * ROWS * 6e-8, "relative difference %g", sqrt(error / size));
}

TEST(ranks_equal_one_process_with_the_whole_batch) {
    SKIP_ON_WINDOWS("fork");
    for (int world = 2; world <= RANKS; world += 2) {
        static float one[IN * OUT];
        memset(all, 0, sizeof *all);
        train(0, 1, ROWS * world, -1, -1);
        memcpy(one, all->weights[0], sizeof one);
        fork_ranks(world, clean_training);
        for (int r = 0; r < world; r++) {
            CHECK(memcmp(all->weights[0], all->weights[r], sizeof all->weights[0]) == 0);
            check_same_weights(one, all->weights[r]);
            CHECK_EQ(all->skipped[r], 0);
            CHECK_EQ(all->calls_sum[r], STEPS + 2);     /* two compare the ranks, before the first step only */
            CHECK_EQ(all->calls_max[r], STEPS);
        }
    }
}

TEST(an_overflow_on_one_rank_skips_on_all) {
    SKIP_ON_WINDOWS("fork");
    for (int world = 2; world <= RANKS; world += 2) {
        fork_ranks(world, training_with_an_overflow);
        for (int r = 0; r < world; r++) {
            CHECK_EQ(all->skipped[r], 1);
            CHECK(all->scale[r] == 512);
            CHECK(memcmp(all->weights[0], all->weights[r], sizeof all->weights[0]) == 0);
        }
    }
}

TEST(ranks_without_gradients_take_part) {
    SKIP_ON_WINDOWS("fork");
    fork_ranks(2, training_with_an_idle_rank);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(all->skipped[r], 1);
        CHECK(all->scale[r] == 512);
        CHECK_EQ(all->calls_sum[r], all->calls_sum[0]);
        CHECK(memcmp(all->weights[0], all->weights[r], sizeof all->weights[0]) == 0);
    }
    CHECK(all->weights[0][0] != value(0));
}

/* ---- loaders */

static char data_path[64];

static void read_shard(int rank, int world) {
    amp_context *amp;
    amp_loader *loader;
    amp_loader_desc desc;
    amp_loader_info info;
    amp_batch batch;
    memset(&desc, 0, sizeof desc);
    CHECK_OK(amp_open(&amp, NULL));
    desc.path = data_path; desc.format = AMP_TOKENS_BYTES; desc.batch = 3; desc.seq = 4; desc.shuffle = 1; desc.seed = 5;
    desc.rank = rank; desc.world = world; desc.epochs = 1;
    CHECK_OK(amp_loader_create(amp, &loader, &desc));
    CHECK_OK(amp_loader_info_get(loader, &info));
    for (int64_t i = 0; i < info.batches; i++) {
        CHECK_OK(amp_loader_next(loader, &batch));
        for (int64_t j = 0; j < batch.batch; j++) all->samples[rank][all->n_samples[rank]++] = batch.inputs[j * 4] / 4;
    }
    CHECK_ERR(amp_loader_next(loader, &batch), AMP_ERR_END);
    amp_loader_destroy(loader);
    amp_close(amp);
}

TEST(shards_are_disjoint_and_complete) {
    SKIP_ON_WINDOWS("fork");
    unsigned char bytes[49];                /* 12 samples of 4, and a last target */
    int fd;
    for (int i = 0; i < 49; i++) bytes[i] = (unsigned char)i;
    snprintf(data_path, sizeof data_path, "/tmp/amp_ranks_XXXXXX");
    fd = mkstemp(data_path);
    if (fd < 0 || write(fd, bytes, sizeof bytes) != sizeof bytes) SKIP("no temporary folder");
    close(fd);
    for (int world = 2; world <= RANKS; world += 2) {
        int seen[12] = {0}, count = 0;
        fork_ranks(world, read_shard);
        for (int r = 0; r < world; r++)
            for (int i = 0; i < all->n_samples[r]; i++) { seen[all->samples[r][i]]++; count++; }
        CHECK_EQ(count, 12);
        for (int i = 0; i < 12; i++) CHECK_EQ(seen[i], 1);
    }
    unlink(data_path);
}

/* ---- restarts */

/* Micro-batches first to last - 1 of a run with the loader, four a step, on gradients whose sums are exact in any order:
   the bits do not depend on the ranks.  Loads NAME.from before, if that is not -1, and saves NAME.rank after. */
static struct { int first, last, from, refused; } part;
static void train_part(int rank, int world) {
    rank_info me = {rank, world};
    amp_context *amp;
    amp_optimizer *opt;
    amp_scaler *scaler;
    amp_loader *loader;
    amp_state *state = NULL;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    amp_loader_desc ld;
    amp_param p;
    amp_batch batch;
    char path[100];
    static float w[IN * OUT], g[IN * OUT];
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd); memset(&p, 0, sizeof p);
    memset(&ld, 0, sizeof ld);
    desc.reducer.reduce = world > 1 ? reduce : NULL; desc.reducer.user = &me;
    desc.reducer.rank = rank; desc.reducer.world = world; desc.threads = 1;
    CHECK_OK(amp_open(&amp, &desc));
    for (int i = 0; i < IN * OUT; i++) w[i] = value(i);
    p.name = "w"; p.weight = amp_tensor2(w, AMP_F32, OUT, IN); p.grad = amp_tensor2(g, AMP_F32, OUT, IN);
    CHECK_OK(amp_param_register(amp, &p, 1));
    od.params = &p; od.n_params = 1; od.lr = 0.05f; od.accumulation = 4;
    sd.init_scale = 1024;
    ld.path = data_path; ld.format = AMP_TOKENS_BYTES; ld.batch = 4 / world; ld.seq = 4; ld.shuffle = 1; ld.workers = AMP_NO_WORKERS;
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    CHECK_OK(amp_scaler_create(amp, &scaler, &sd));
    CHECK_OK(amp_loader_create(amp, &loader, &ld));
    if (part.from >= 0) {
        snprintf(path, sizeof path, "%s.%d", data_path, part.from);
        CHECK_OK(amp_state_load(&state, NULL, path));
        CHECK_OK(amp_state_get(state, "w", AMP_F32, w, IN * OUT));
        CHECK_OK(amp_scaler_load(scaler, state, "s"));
        CHECK_OK(amp_loader_load(loader, state, "s"));
        CHECK_OK(amp_random_load(amp, state, "s"));
        CHECK_ERR(amp_optimizer_load(opt, state, "o"), part.refused && rank != part.from ? AMP_ERR_MISMATCH : AMP_OK);
        amp_state_destroy(state);
    }
    for (int micro = part.first; micro < part.last; micro++) {
        float scale = amp_scaler_scale(scaler);
        int add = amp_param_accumulate(&p);
        CHECK_OK(amp_loader_next(loader, &batch));
        for (int i = 0; i < IN * OUT; i++) {
            float sum = 0;
            for (int64_t j = 0; j < batch.batch; j++) sum += (float)((batch.inputs[j * 4] * 37 + i * 11) % 64 - 32);
            g[i] = (add ? g[i] : 0) + sum * scale / (float)(batch.batch * 64);
        }
        CHECK_OK(amp_step(opt, scaler));
    }
    memcpy(all->weights[rank], w, sizeof w);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_state_put(state, "w", AMP_F32, w, IN * OUT));
    CHECK_OK(amp_scaler_save(scaler, state, "s"));
    CHECK_OK(amp_loader_save(loader, state, "s"));
    CHECK_OK(amp_random_save(amp, state, "s"));
    CHECK_OK(amp_optimizer_save(opt, state, "o"));
    snprintf(path, sizeof path, "%s.%d", data_path, rank);
    CHECK_OK(amp_state_save(state, path));
    amp_state_destroy(state);
    amp_loader_destroy(loader);
    amp_optimizer_destroy(opt);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

static void train_part_with_own_state(int rank, int world) {
    if (part.from >= 0) part.from = rank;
    train_part(rank, world);
}

static void run_part(int first, int last, int from, int refused, int world, void (*body)(int rank, int world)) {
    part.first = first; part.last = last; part.from = from; part.refused = refused;
    fork_ranks(world, body);
}

/* In a run of 24 micro-batches of 4 samples: between two steps rank 0's state goes on with 1, 2 and 4 ranks; inside a cycle
   each rank's own does, and no other rank's is taken. */
TEST(restarts_with_ranks) {
    SKIP_ON_WINDOWS("fork");
    unsigned char bytes[81];                /* 20 samples of 4, and a last target: 5 batches an epoch */
    float whole[IN * OUT];
    char path[100];
    int fd;
    for (int i = 0; i < 81; i++) bytes[i] = (unsigned char)(i * 7);
    snprintf(data_path, sizeof data_path, "/tmp/amp_ranks_XXXXXX");
    fd = mkstemp(data_path);
    if (fd < 0 || write(fd, bytes, sizeof bytes) != sizeof bytes) SKIP("no temporary folder");
    close(fd);
    run_part(0, 24, -1, 0, 1, train_part);
    memcpy(whole, all->weights[0], sizeof whole);
    CHECK(whole[0] != value(0));
    for (int from = 1; from <= RANKS; from *= 2)
        for (int to = 1; to <= RANKS; to *= 2) {
            run_part(0, 12, -1, 0, from, train_part);
            run_part(12, 24, 0, 0, to, train_part);
            for (int r = 0; r < to; r++) CHECK_MSG(memcmp(whole, all->weights[r], sizeof whole) == 0, "%d to %d ranks, rank %d", from, to, r);
        }
    for (int world = 1; world <= RANKS; world *= 2)
        for (int cut = 9; cut < 12; cut++) {
            run_part(0, cut, -1, 0, world, train_part);
            run_part(cut, cut, 0, 1, world, train_part);            /* rank 0's for all: refused, but by rank 0 */
            run_part(0, cut, -1, 0, world, train_part);
            run_part(cut, 24, 0, 0, world, train_part_with_own_state);
            for (int r = 0; r < world; r++) CHECK_MSG(memcmp(whole, all->weights[r], sizeof whole) == 0, "cut %d, rank %d of %d", cut, r, world);
        }
    for (int r = 0; r < RANKS; r++) {
        snprintf(path, sizeof path, "%s.%d", data_path, r);
        unlink(path);
    }
    unlink(data_path);
}

/* ---- a hook that fails */

static int failing_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    (void)user; (void)data; (void)count; (void)dtype; (void)op; (void)stream;
    return 7;
}

TEST(a_failing_hook_is_an_error_and_changes_nothing) {
    amp_context *amp;
    amp_optimizer *opt;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_param p;
    float w[2] = {1, 2}, g[2] = {3, 4};
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(&p, 0, sizeof p);
    desc.reducer.reduce = failing_reduce;
    desc.reducer.world = 2;
    CHECK_OK(amp_open(&amp, &desc));
    p.name = "w"; p.weight = amp_tensor1(w, AMP_F32, 2); p.grad = amp_tensor1(g, AMP_F32, 2); p.grad_live = 1;
    od.params = &p; od.n_params = 1;
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    p.grad_live = 1;
    CHECK_ERR(amp_step(opt, NULL), AMP_ERR_REDUCE);
    CHECK(w[0] == 1 && w[1] == 2);
    amp_optimizer_destroy(opt);
    amp_close(amp);
}

/* ---- Ranks of one process */

typedef struct thread_rank { int rank, world; void (*body)(int rank, int world); pthread_t thread; } thread_rank;
static void *run_rank(void *arg) {
    const thread_rank *r = (const thread_rank *)arg;
    r->body(r->rank, r->world);
    return NULL;
}
static void thread_ranks(int world, void (*body)(int rank, int world)) {
    thread_rank ranks[RANKS];
    amp_ranks_desc d;
    memset(all, 0, sizeof *all); memset(&d, 0, sizeof d);
    d.world = world; d.timeout_ms = 10000;
    CHECK_OK(amp_ranks_create(&together, &d));
    for (int r = 0; r < world; r++) {
        ranks[r].rank = r; ranks[r].world = world; ranks[r].body = body;
        CHECK_EQ(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < world; r++) pthread_join(ranks[r].thread, NULL);
    amp_ranks_destroy(together);
    together = NULL;
}

static void check_same_ranks(const shared *processes, int world) {
    for (int r = 0; r < world; r++) {
        CHECK(memcmp(processes->weights[r], all->weights[r], sizeof all->weights[r]) == 0);
        CHECK(processes->scale[r] == all->scale[r]);
        CHECK_EQ(processes->skipped[r], all->skipped[r]);
    }
}

/* Also where the memory is a device's. */
TEST(threads_train_as_processes_do) {
    SKIP_ON_WINDOWS("fork");
    void (*const bodies[])(int, int) = {clean_training, training_with_an_overflow, training_with_an_idle_rank};
    static shared processes;
    device = *amp_cpu();
    device.name = "device"; device.host_visible = 0; device.copy = device_copy;
    for (int world = 2; world <= RANKS; world += 2)
        for (int b = 0; b < 3; b++) {
            fork_ranks(world, bodies[b]);
            processes = *all;
            thread_ranks(world, bodies[b]);
            check_same_ranks(&processes, world);
            on_a_device = 1;
            staged = 0;
            thread_ranks(world, bodies[b]);
            on_a_device = 0;
            check_same_ranks(&processes, world);
            CHECK(staged >= 2 * STEPS * world);         /* a gradient and a flag a step */
        }
}

/* ---- Ranks that do not agree: every rank is told what differs, and on which */

static const struct apart { const char *what, *says; } aparts[] = {
    {"lr", ".lr is 0.25 on rank 2 and 0.5 on rank 0"}, {"beta2", ".beta2 is 0.5 on rank 2"}, {"clip", ".clip_norm is 1 on rank 2"},
    {"kind", ".kind is 3 on rank 2 and 1 on rank 0"}, {"accumulation", ".accumulation is 2 on rank 2"},
    {"seed", "seed (high half) is 1 on rank 2"}, {"dtype", "rank 2 computes in fp32, rank 0 in bf16"}, {"level", "level is "},
    {"scale", "loss scale is 64 on rank 2 and 32 on rank 0"}, {"scaler", "loss scale is 0 on rank 2"}, {"fewer", "parameters is 1 on rank 2 and 2 on rank 0"},
    {"name", "parameter 1 ("}, {"shape", "parameter 0 (a) of rank 2 has another name, shape"}, {"group", "parameter 0 (a) of rank 2"},
    {"weight", "a of rank 2 has other values than rank 0's"}, {"sign", "a of rank 2 has other values"}, {"frozen", "of rank 2 has other values than rank 0's"},
    {"master", "a of rank 2 has other values"}, {"sync", ".sync_every is 4 on rank 2 and 0 on rank 0"}, {"steps", "steps done is 1 on rank 2 and 0 on rank 0"}, {"range", "parameter 0 (unnamed) of rank 2 has another"}
};
static struct { const struct apart *a; char why[RANKS][512]; int code[RANKS], again[RANKS]; float w[RANKS][4]; } told;

/* Rank 2 has something else, unless `a` is NULL; then the same again after amp_params_broadcast. */
static void step_apart(int rank, int world) {
    const char *what = told.a && rank == 2 ? told.a->what : "";
    amp_context *amp;
    amp_optimizer *opt;
    amp_scaler *scaler = NULL;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    amp_param_group group;
    amp_param p[2];
    float w[4] = {1, 2, 0, 4}, g[4] = {1, 1, 1, 1}, frozen[2] = {5, 6};
    uint16_t low[4];
    const float other[4] = {1, 2, 0, 4.0000005f};
    int o2 = told.a && strcmp(told.a->what, "master") == 0;
    (void)world;
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd); memset(p, 0, sizeof p); memset(&group, 0, sizeof group);
#define IS(word) (strcmp(what, word) == 0)
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    desc.threads = 1;
    desc.dtype = IS("dtype") ? AMP_F32 : AMP_BF16;
    desc.level = o2 || IS("level") ? AMP_LEVEL_O2 : AMP_LEVEL_O1;
    if (on_a_device) desc.backend = &device;
    CHECK_OK(amp_open(&amp, &desc));
    if (IS("weight")) w[3] = 4.0000005f;
    if (IS("sign")) w[2] = -0.0f;
    if (IS("frozen")) frozen[1] = 7;
    CHECK_OK(amp_convert(low, AMP_BF16, w, AMP_F32, 4, NULL, NULL));
    p[0].name = "a"; p[0].weight = p[0].grad = IS("shape") ? amp_tensor2(w, AMP_F32, 2, 2) : amp_tensor1(w, AMP_F32, 4);
    if (o2) p[0].weight = amp_tensor1(low, AMP_BF16, 4);
    p[0].grad.data = g;
    p[1].name = IS("name") ? "c" : "b"; p[1].weight = amp_tensor1(frozen, AMP_F32, 2);
    CHECK_OK(amp_param_register(amp, p, 2));
    group.match = "a"; group.lr_scale = 2;
    od.params = p; od.n_params = IS("fewer") ? 1 : 2; od.kind = IS("kind") ? AMP_LION : AMP_ADAMW; od.lr = IS("lr") ? 0.25 : 0.5; od.beta2 = IS("beta2") ? 0.5 : 0;
    od.clip_norm = IS("clip"); od.accumulation = IS("accumulation") ? 2 : 1; od.sync_every = IS("sync") ? 4 : 0; od.seed = IS("seed") ? (uint64_t)1 << 32 | 7 : 7;
    if (IS("kind")) od.beta2 = 0.999, od.eps = 0;
    if (IS("group")) { od.groups = &group; od.n_groups = 1; }
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    if (o2 && IS("master")) CHECK_OK(amp_optimizer_set_weight(opt, &p[0], other));
    sd.init_scale = IS("scale") ? 64 : 32;
    if (told.a && strncmp(told.a->what, "scale", 5) == 0 && !IS("scaler")) CHECK_OK(amp_scaler_create(amp, &scaler, &sd));
    for (int i = 0; i < (IS("accumulation") ? 2 : 1); i++) { p[0].grad_live = 1; told.code[rank] = (int)amp_step(opt, scaler); }
    snprintf(told.why[rank], sizeof told.why[rank], "%s", amp_last_error());
    CHECK_OK(amp_params_broadcast(amp, p, 2));
    p[0].grad_live = 1;
    told.again[rank] = (int)(scaler ? AMP_OK : amp_step(opt, NULL));
    if (o2) CHECK_OK(amp_convert(w, AMP_F32, low, AMP_BF16, 4, NULL, NULL));
    memcpy(told.w[rank], w, sizeof w);
    amp_optimizer_destroy(opt);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}
/* A set of arrays of one's own, of which rank 2's has another size; and one of a loaded state, with another count of steps. */
static void check_apart(int rank, int world) {
    amp_context *amp;
    amp_scaler *scaler;
    amp_grad_set *set;
    amp_desc desc;
    amp_grad_set_desc sd;
    amp_range range;
    float g[3] = {1, 1, 1};
    (void)world;
    memset(&desc, 0, sizeof desc); memset(&sd, 0, sizeof sd); memset(&range, 0, sizeof range);
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    desc.threads = 1;
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    range.data = g; range.dtype = AMP_F32; range.count = rank == 2 ? 2 : 3;
    sd.ranges = &range; sd.n_ranges = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &sd));
    told.code[rank] = (int)amp_scaler_check(scaler, set, AMP_CHECK_UNSCALE);
    snprintf(told.why[rank], sizeof told.why[rank], "%s", amp_last_error());
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}
static void load_apart(int rank, int world) {
    amp_context *amp, *alone;
    amp_optimizer *opt;
    amp_state *state;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_param p, mine;
    float w[2] = {1, 2}, g[2] = {0, 0};
    (void)world;
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(&p, 0, sizeof p);
    p.name = "a"; p.weight = amp_tensor1(w, AMP_F32, 2); p.grad = amp_tensor1(g, AMP_F32, 2);
    mine = p;
    desc.threads = 1;
    CHECK_OK(amp_open(&alone, &desc));
    CHECK_OK(amp_param_register(alone, &mine, 1));
    od.params = &mine; od.n_params = 1;
    CHECK_OK(amp_optimizer_create(alone, &opt, &od));
    for (int i = 0; i < rank / 2; i++) { mine.grad_live = 1; CHECK_OK(amp_step(opt, NULL)); }
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(opt, state, "o"));
    amp_optimizer_destroy(opt);
    amp_close(alone);
    w[0] = 1; w[1] = 2;
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_param_register(amp, &p, 1));
    od.params = &p;
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    CHECK_OK(amp_optimizer_load(opt, state, "o"));
    p.grad_live = 1;
    told.code[rank] = (int)amp_step(opt, NULL);
    snprintf(told.why[rank], sizeof told.why[rank], "%s", amp_last_error());
    amp_state_destroy(state);
    amp_optimizer_destroy(opt);
    amp_close(amp);
}

TEST(ranks_that_differ_are_named) {
    device = *amp_cpu();
    device.name = "device"; device.host_visible = 0; device.copy = device_copy;
    for (size_t i = 0; i < 2 * sizeof aparts / sizeof *aparts; i++) {
        int weights;
        told.a = &aparts[i / 2];
        on_a_device = i % 2;
        thread_ranks(3, strcmp(told.a->what, "range") == 0 ? check_apart : strcmp(told.a->what, "steps") == 0 ? load_apart : step_apart);
        weights = strstr("weight sign frozen master", told.a->what) != NULL;
        for (int r = 0; r < 3; r++) {
            CHECK_MSG(told.code[r] == AMP_ERR_REDUCE && strstr(told.why[r], told.a->says), "%s, rank %d: %d, %s", told.a->what, r, told.code[r], told.why[r]);
            if (weights) CHECK_MSG(told.again[r] == AMP_OK && memcmp(told.w[r], told.w[0], sizeof told.w[0]) == 0, "%s, rank %d: %d", told.a->what, r, told.again[r]);
        }
        on_a_device = 0;
    }
    told.a = NULL;
    thread_ranks(3, step_apart);
    for (int r = 0; r < 3; r++) CHECK_EQ(told.code[r], 0);
}

/* All go on by rank 0's path, which has other bits than the one they would take; not one that chose its own. */
static struct { amp_cpu_path chosen[RANKS], now[RANKS]; int warned[RANKS]; float y[RANKS]; } by_path;
static void paths_log(void *user, amp_log_level level, int id, const char *text) {
    if (id == 1114 && level == AMP_LOG_WARNING && strstr(text, "rank 0 multiplies by scalar") != NULL) ++*(int *)user;
}
static void step_by_path(int rank, int world) {
    enum { N = 33 };
    static const uint64_t seed = 5;
    amp_context *amp;
    amp_optimizer *opt;
    amp_machine machine;
    amp_desc desc = {.threads = 1, .dtype = AMP_F32, .cpu_path = by_path.chosen[rank]};
    amp_param p = {.name = "a"};
    amp_optimizer_desc od = {.params = &p, .n_params = 1};
    float x[N], w[N * N], g[N * N] = {0}, y[N];
    (void)world;
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    desc.logger.write = paths_log;
    desc.logger.user = &by_path.warned[rank];
    CHECK_OK(amp_open(&amp, &desc));
    for (int i = 0; i < N * N; i++) w[i] = amp_random_uniform(seed, (uint64_t)i) - 0.5f;
    for (int i = 0; i < N; i++) x[i] = amp_random_uniform(seed, (uint64_t)(i + N * N)) - 0.5f;
    p.weight = amp_tensor2(w, AMP_F32, N, N);
    p.grad = amp_tensor2(g, AMP_F32, N, N);
    CHECK_OK(amp_param_register(amp, &p, 1));
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    for (int step = 0; step < 2; step++) { p.grad_live = 1; CHECK_OK(amp_step(opt, NULL)); }
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, N, N, 1, x, N, w, N, 0, y, N));
    for (int i = 0; i < N; i++) by_path.y[rank] += y[i];
    CHECK_OK(amp_query_machine(amp, &machine));
    by_path.now[rank] = machine.cpu.path;
    amp_optimizer_destroy(opt);
    amp_close(amp);
}
TEST(ranks_go_on_by_the_first_ones_path) {
    amp_machine machine;
    CHECK_OK(amp_machine_probe(&machine));
    if (machine.cpu.path == AMP_CPU_SCALAR) SKIP("this CPU has one path");
    memset(&by_path, 0, sizeof by_path);
    by_path.chosen[0] = AMP_CPU_SCALAR;
    by_path.chosen[2] = AMPT_NEXT_PATH(AMP_CPU_SCALAR);
    thread_ranks(3, step_by_path);
    CHECK(by_path.now[0] == AMP_CPU_SCALAR && by_path.now[1] == AMP_CPU_SCALAR && by_path.now[2] == by_path.chosen[2]);
    CHECK(by_path.warned[0] == 0 && by_path.warned[1] == 0 && by_path.warned[2] == 1);
    CHECK(memcmp(&by_path.y[0], &by_path.y[1], sizeof by_path.y[0]) == 0);
}

/* ---- Parameters that rest.  Gradients are small integers, so sums over 1, 2 and 4 ranks, and their means, have the same
   bits: N ranks must give those of one. */

enum { IDLE = 4, SIDE = 16, MANY = SIDE * SIDE, IDLE_STEPS = 6 };
enum { PLAIN_HOOK = 1, STAGED_DEVICE = 2, OWN_DEVICE = 4, NO_OVERLAP = 8, LATE_GATHER = 16, ORDERED = 32, NARROW = 64, BITS8 = 128, SCALED = 256, EACH = 512 };
typedef struct idle_run {
    const char *what; amp_optimizer_kind kind; double momentum, clip; amp_shard shard; int how; amp_dtype wire; int accumulation;
    int sync_every;
} idle_run;
static const idle_run idle_runs[] = {
    {"AdamW", AMP_ADAMW, 0, 0, AMP_SHARD_NONE, 0, AMP_F32, 1, 0},
    {"SGD with momentum, in the step", AMP_SGD, 0.9, 0, AMP_SHARD_NONE, NO_OVERLAP, AMP_F32, 1, 0},
    {"Lion, bf16 wire", AMP_LION, 0, 0, AMP_SHARD_NONE, 0, AMP_BF16, 1, 0},
    {"sharded states", AMP_ADAMW, 0, 0.5, AMP_SHARD_STATES, 0, AMP_F32, 1, 0},
    {"sharded states of 8 bits", AMP_ADAMW, 0, 0, AMP_SHARD_STATES, BITS8, AMP_F32, 2, 0},
    {"sharded gradients, accumulated", AMP_SGD, 0.9, 0.5, AMP_SHARD_GRADIENTS, 0, AMP_F32, 2, 0},
    {"weights behind forward", AMP_ADAMW, 0, 0, AMP_SHARD_STATES, LATE_GATHER | NARROW, AMP_BF16, 1, 0},
    {"deterministic", AMP_ADAMW, 0, 0.5, AMP_SHARD_NONE, ORDERED | SCALED, AMP_F32, 2, 0},
    {"narrow weights, scaler", AMP_LION, 0, 0, AMP_SHARD_NONE, NARROW | SCALED, AMP_F32, 1, 0},
    {"a hook that only reduces", AMP_ADAMW, 0, 0, AMP_SHARD_STATES, PLAIN_HOOK, AMP_F32, 1, 0},
    {"a device and a reducer on the host", AMP_ADAMW, 0, 0.5, AMP_SHARD_NONE, STAGED_DEVICE | SCALED, AMP_F32, 2, 0},
    {"a device that sums by itself", AMP_SGD, 0.9, 0.5, AMP_SHARD_NONE, OWN_DEVICE, AMP_F32, 1, 0},
    {"a device that sums by itself, sharded", AMP_ADAMW, 0, 0, AMP_SHARD_STATES, OWN_DEVICE | SCALED | ORDERED, AMP_F32, 2, 0},
    {"clipped alone", AMP_ADAMW, 0, 0.5, AMP_SHARD_NONE, EACH, AMP_F32, 2, 0},
    {"loosely coupled", AMP_SGD, 0.9, 0, AMP_SHARD_NONE, 0, AMP_F32, 1, 2},
    {"loosely coupled, bf16 wire", AMP_ADAMW, 0, 0, AMP_SHARD_NONE, NARROW, AMP_BF16, 1, 2}};
static struct {
    const idle_run *run;
    int freeze_rank, freeze_step, thaw, checked;    /* freeze_rank -2: all */
    float w[RANKS][IDLE_STEPS][IDLE][MANY];
    int code[RANKS], failed_in[RANKS];
    char why[RANKS][512];
} idle;

/* Of parameter k in a micro-batch: how often its gradient counts; 0: it gets none. */
static float idle_uses(int k, int rank, int world, int step, int micro) {
    if (k == 0) return 1;
    if (k == 2) return (step < 2 || step == 4) && micro == idle.run->accumulation - 1 ? 1.0f : 0.0f;
    return k == 3 && rank == 0 && step != 3 ? (float)world : 0.0f;
}
static void idle_backward(amp_context *amp, amp_param *p, int k, int step, int micro, float factor) {
    amp_linear_op lin;
    float x[4 * SIDE], y[4 * SIDE], dy[4 * SIDE];
    memset(&lin, 0, sizeof lin);
    for (int i = 0; i < 4 * SIDE; i++) {
        x[i] = (float)((i * 7 + step * 3 + k) % 3 - 1);
        dy[i] = (float)((i * 5 + step + micro + k) % 5 - 2) * factor / 64;
    }
    lin.x = amp_tensor2(x, AMP_F32, 4, SIDE); lin.y = amp_tensor2(y, AMP_F32, 4, SIDE); lin.weight = &p[k]; lin.dy = amp_tensor2(dy, AMP_F32, 4, SIDE);
    CHECK_OK(amp_linear(amp, &lin));
    CHECK_OK(amp_linear_backward(amp, &lin));
}
static int idle_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    const amp_reducer *inner = (const amp_reducer *)user;
    return inner->reduce(inner->user, data, count, dtype, op, stream);
}
/* One step, with the micro-batches before it. */
static amp_result idle_step(amp_context *amp, amp_param *p, amp_optimizer *opt, amp_scaler *scaler, int rank, int world, int step) {
    amp_result result = AMP_OK;
    for (int micro = 0; micro < idle.run->accumulation && result == AMP_OK; micro++) {
        for (int k = 0; k < IDLE; k++) {
            float uses = idle_uses(k, rank, world, step, micro);
            if (uses > 0) idle_backward(amp, p, k, step, micro, uses * (scaler ? 4 : 1));
        }
        if (scaler && micro == idle.run->accumulation - 1) result = amp_scaler_check(scaler, amp_optimizer_grad_set(opt), AMP_CHECK_READ);
        if (result == AMP_OK && idle.checked && step == 1) p[2].grad_live = 0;
        if (result == AMP_OK) result = amp_step(opt, scaler);
    }
    return result;
}
static void idle_train(int rank, int world) {
    const idle_run *run = idle.run;
    amp_context *amp;
    amp_optimizer *opt;
    amp_scaler *scaler = NULL;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    amp_param_group group;
    amp_param p[IDLE];
    amp_reducer inner;
    float *w = malloc(IDLE * MANY * 4), *g = malloc(IDLE * MANY * 4);
    const amp_dtype dtype = run->how & NARROW ? AMP_BF16 : AMP_F32;
    static const char *const names[IDLE] = {"used", "unused", "sometimes", "of rank 0"};
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(p, 0, sizeof p); memset(&sd, 0, sizeof sd); memset(&group, 0, sizeof group);
    if (together) CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    inner = desc.reducer;
    if (together && run->how & PLAIN_HOOK) { desc.reducer.reduce = idle_reduce; desc.reducer.user = &inner; desc.reducer.calls = NULL; }
    if (run->how & (STAGED_DEVICE | OWN_DEVICE)) desc.backend = &device;
    if (run->how & OWN_DEVICE) desc.reducer.on_host = 0;
    desc.threads = 1; desc.dtype = dtype; desc.level = run->how & NARROW ? AMP_LEVEL_O2 : AMP_LEVEL_O1;
    CHECK_OK(amp_open(&amp, &desc));
    for (int k = 0; k < IDLE; k++) {
        float start[MANY];
        for (int i = 0; i < MANY; i++) start[i] = value(k * MANY + i);
        p[k].name = names[k]; p[k].weight = amp_tensor2(w + k * MANY, dtype, SIDE, SIDE); p[k].grad = amp_tensor2(g + k * MANY, AMP_F32, SIDE, SIDE);
        CHECK_OK(amp_convert(w + k * MANY, dtype, start, AMP_F32, MANY, NULL, NULL));
    }
    CHECK_OK(amp_param_register(amp, p, IDLE));
    group.match = "*"; group.moments = run->how & BITS8 ? AMP_MOMENTS_8BIT : AMP_F32;
    od.params = p; od.n_params = IDLE; od.groups = &group; od.n_groups = 1;
    od.kind = run->kind; od.momentum = run->momentum; od.clip_norm = run->clip; od.lr = 0.1; od.weight_decay = 0.1;
    od.shard = run->shard; od.accumulation = run->accumulation; od.sync_every = run->sync_every; od.bucket_bytes = 2 * MANY * 4;
    *(run->sync_every ? &od.sync_wire : &od.wire) = run->wire;
    od.no_overlap = (run->how & NO_OVERLAP) != 0; od.overlap_param_gather = (run->how & LATE_GATHER) != 0; od.deterministic = (run->how & ORDERED) != 0;
    od.clip_each = (run->how & EACH) != 0;
    sd.init_scale = 4;
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    if (run->how & SCALED) CHECK_OK(amp_scaler_create(amp, &scaler, &sd));
    for (int step = 0; step < IDLE_STEPS; step++) {
        int freezes = step == idle.freeze_step && (rank == idle.freeze_rank || idle.freeze_rank == -2);
        amp_result result;
        if (freezes) p[1].grad.data = NULL;
        result = idle_step(amp, p, opt, scaler, rank, world, step);
        if (result != AMP_OK && idle.code[rank] == 0) {
            idle.code[rank] = (int)result;
            idle.failed_in[rank] = step;
            snprintf(idle.why[rank], sizeof idle.why[rank], "%s", amp_last_error());
            if (!idle.thaw) break;
            p[1].grad.data = g + MANY;
            /* a device that sums by itself has said it late, of a step before: this one has not begun */
            result = run->how & OWN_DEVICE ? amp_step(opt, scaler) : idle_step(amp, p, opt, scaler, rank, world, step);
        }
        CHECK_OK(result);
        CHECK_OK(amp_sync(amp));
        for (int k = 0; k < IDLE; k++) CHECK_OK(amp_convert(idle.w[rank][step][k], AMP_F32, w + k * MANY, dtype, MANY, NULL, NULL));
    }
    amp_optimizer_destroy(opt);
    amp_scaler_destroy(scaler);
    amp_close(amp);
    free(w); free(g);
}
static void idle_go(int world, const idle_run *run) {
    idle.run = run;
    memset(idle.code, 0, sizeof idle.code);
    if (world > 1) thread_ranks(world, idle_train);
    else idle_train(0, 1);
}
static void idle_reset(void) {
    memset(&idle, 0, sizeof idle);
    idle.freeze_rank = idle.freeze_step = -1;
    device = *amp_cpu();
    device.name = "device"; device.host_visible = 0; device.copy = device_copy;
}

/* Unused everywhere, in some steps, or on all ranks but one. */
TEST(parameters_that_no_rank_uses_rest) {
    if (!AMPI_DISCARDS) SKIP("this system takes no pages back, which sharded gradients need");
    static float want[IDLE_STEPS][IDLE][MANY];
    idle_reset();
    for (size_t i = 0; i < sizeof idle_runs / sizeof *idle_runs; i++) {
        const idle_run *run = &idle_runs[i];
        idle_go(1, run);
        memcpy(want, idle.w[0], sizeof want);
        CHECK(memcmp(want[0][1], want[IDLE_STEPS - 1][1], sizeof want[0][1]) == 0);
        CHECK(memcmp(want[1][2], want[3][2], sizeof want[1][2]) == 0 && memcmp(want[3][2], want[4][2], sizeof want[3][2]) != 0);
        for (int world = 2; world <= RANKS; world += 2) {
            idle_go(world, run);
            for (int r = 0; r < world; r++)
                for (int step = 0; step < IDLE_STEPS; step++)
                    for (int k = 0; k < IDLE; k++) {
                        int same = memcmp(idle.w[r][step][k], want[step][k], sizeof want[step][k]) == 0;
                        if (run->how & EACH && k != 1) same = memcmp(idle.w[r][step][k], idle.w[0][step][k], sizeof want[step][k]) == 0;
                        if (run->sync_every > 0 && k == 3) same = step % 2 == 0 || memcmp(idle.w[r][step][k], idle.w[0][step][k], sizeof want[step][k]) == 0;
                        CHECK_MSG(same, "%s, rank %d of %d, step %d: parameter %d moved otherwise than on one rank", run->what, r, world, step, k);
                    }
        }
    }
}

/* On one rank alone, before the first step and later, it is an error of all; on all ranks it is none. */
TEST(parameters_frozen_on_one_rank_are_named) {
    if (!AMPI_DISCARDS) SKIP("this system takes no pages back, which sharded gradients need");
    static float want[2][IDLE_STEPS][IDLE][MANY];
    for (size_t i = 0; i < sizeof idle_runs / sizeof *idle_runs; i++) {
        const idle_run *run = &idle_runs[i];
        int late = run->how & OWN_DEVICE ? 3 : run->sync_every > 0 ? 1 : 0;     /* steps until the error */
        idle_reset();
        idle_go(2, run);
        memcpy(want, idle.w, sizeof want);
        for (int step = 0; step < 4; step += 2) {
            idle.freeze_rank = 1; idle.freeze_step = step; idle.thaw = step > 0;
            idle_go(2, run);
            for (int r = 0; r < 2; r++) {
                CHECK_MSG(idle.code[r] == AMP_ERR_REDUCE && strstr(idle.why[r], "unused is frozen on rank 1 and not on rank 0"), "%s, rank %d: %d %s", run->what, r, idle.code[r], idle.why[r]);
                CHECK_EQ(idle.failed_in[r], step == 0 ? 0 : step + late);
                if (step > 0 && run->sync_every == 0) CHECK_MSG(memcmp(idle.w[r], want[r], sizeof want[r]) == 0, "%s, rank %d: it goes on otherwise", run->what, r);
            }
        }
        idle.freeze_rank = -2;
        idle_go(2, run);
        for (int r = 0; r < 2; r++) CHECK_MSG(idle.code[r] == 0 && memcmp(idle.w[r], want[r], sizeof want[r]) == 0, "%s, rank %d: %d %s", run->what, r, idle.code[r], idle.why[r]);
    }
}

/* What ranks agreed on in the check stands until the step. */
TEST(gradients_that_change_after_the_check_are_refused) {
    for (size_t i = 0; i < sizeof idle_runs / sizeof *idle_runs; i++) {
        if (!(idle_runs[i].how & SCALED)) continue;
        idle_reset();
        idle.checked = 1;
        idle_go(2, &idle_runs[i]);
        for (int r = 0; r < 2; r++) CHECK_MSG(idle.code[r] == AMP_ERR_STATE && strstr(idle.why[r], "sometimes: "), "%s, rank %d: %d %s", idle_runs[i].what, r, idle.code[r], idle.why[r]);
    }
}

/* A host's own set: on the CPU it is told by grad_live what rests; a device that sums by itself says only what is frozen. */
static void idle_set(int rank, int world) {
    amp_context *amp;
    amp_scaler *scaler;
    amp_grad_set *set;
    amp_desc desc;
    amp_grad_set_desc gd;
    amp_grad_stats stats;
    amp_param p[3];
    float w[6] = {1, 2, 3, 4, 5, 6}, g[6] = {1, 1, 7, 7, 1, 1};
    static const char *const names[3] = {"by all", "by none", "of rank 0"};
    (void)world;
    memset(&desc, 0, sizeof desc); memset(&gd, 0, sizeof gd); memset(p, 0, sizeof p);
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    desc.threads = 1; desc.dtype = AMP_F32;
    if (on_a_device) { desc.backend = &device; desc.reducer.on_host = 0; }
    CHECK_OK(amp_open(&amp, &desc));
    for (int i = 0; i < 3; i++) { p[i].name = names[i]; p[i].weight = amp_tensor1(w + 2 * i, AMP_F32, 2); p[i].grad = amp_tensor1(g + 2 * i, AMP_F32, 2); }
    CHECK_OK(amp_param_register(amp, p, 3));
    gd.params = p; gd.n_params = 3;
    CHECK_OK(amp_grad_set_create(amp, &set, &gd));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    p[0].grad_live = 1; p[2].grad_live = rank == 0;
    CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
    CHECK_OK(amp_grad_set_stats(set, &stats));
    CHECK(g[0] == 2 && g[2] == 0 && g[4] == 1 && p[0].grad_live && p[1].grad_live == on_a_device && p[2].grad_live);
    CHECK_OK(amp_scaler_update(scaler));
    if (rank == 1) p[1].grad.data = NULL;
    if (!on_a_device) CHECK_EQ(amp_scaler_check(scaler, set, AMP_CHECK_READ), AMP_ERR_REDUCE);
    else {
        CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
        if (rank == 0) CHECK_ERR(amp_grad_set_stats(set, &stats), AMP_ERR_REDUCE);
        else CHECK_EQ(amp_grad_set_stats(set, &stats), AMP_ERR_REDUCE);
    }
    CHECK(strstr(amp_last_error(), "by none is frozen on rank 1 and not on rank 0") != NULL);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}
TEST(sets_of_the_host_are_told_what_rests) {
    idle_reset();
    for (on_a_device = 0; on_a_device < 2; on_a_device++) thread_ranks(2, idle_set);
    on_a_device = 0;
}

/* ---- Loose coupling.  The inner optimizer is SGD on numbers that make its steps exact, so the whole is known to the bit. */

enum { LOOSE = 5, LOOSE_H = 3 };
static struct {
    int steps, from, save, wire, master, level, nan_rank, other_state, other_period, graph;
    float w[RANKS][8 * STEPS][LOOSE], last[RANKS][LOOSE];
    int code[RANKS], calls[RANKS];
    int64_t bytes[RANKS];
    char why[RANKS][512];
    amp_state *state[RANKS];
} loose;
static float loose_gradient(int rank, int step, int i) { return (float)((rank * 7 + step * 5 + i * 3) % 16 - 8) / 64; }

/* What goes over the wire, of threads. */
typedef struct counted { amp_reducer inner; int rank; } counted;
static int count_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    const counted *c = (const counted *)user;
    loose.calls[c->rank]++;
    loose.bytes[c->rank] += count * (int64_t)amp_dtype_size(dtype);
    return c->inner.reduce(c->inner.user, data, count, dtype, op, stream);
}

static void loose_train(int rank, int world) {
    amp_context *amp;
    amp_optimizer *opt;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_param p[3];
    float w[LOOSE] = {1, 2, 3, 4, 5}, g[LOOSE], frozen = 7;
    uint16_t low[LOOSE];
    counted c;
    int narrow = loose.level == AMP_LEVEL_O2 || loose.level == AMP_LEVEL_O3;
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(p, 0, sizeof p); memset(&c, 0, sizeof c);
    loose.calls[rank] = 0; loose.bytes[rank] = 0;
    if (world > 1) {
        CHECK_OK(amp_ranks_reducer(together, rank, &c.inner));
        c.rank = rank;
        desc.reducer = c.inner; desc.reducer.calls = NULL; desc.reducer.user = &c; desc.reducer.reduce = count_reduce;
    }
    desc.threads = 1; desc.level = (amp_level)loose.level; desc.dtype = narrow ? AMP_BF16 : AMP_F32;
    if (on_a_device) desc.backend = &device;
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_convert(low, AMP_BF16, w, AMP_F32, LOOSE, NULL, NULL));
    p[0].name = "a"; p[0].weight = p[0].grad = amp_tensor1(w, AMP_F32, 2); p[0].grad.data = g;
    p[1].name = "frozen"; p[1].weight = amp_tensor1(&frozen, AMP_F32, 1);
    p[2].name = "b"; p[2].weight = p[2].grad = amp_tensor1(w + 2, AMP_F32, 3); p[2].grad.data = g + 2;
    if (narrow) { p[0].weight = amp_tensor1(low, AMP_BF16, 2); p[2].weight = amp_tensor1(low + 2, AMP_BF16, 3); }
    CHECK_OK(amp_param_register(amp, p, 3));
    od.params = p; od.n_params = 3; od.kind = AMP_SGD; od.lr = 0.25; od.sync_every = loose.other_period ? loose.other_period : LOOSE_H; od.master = (amp_master_kind)loose.master;
    if (loose.wire) od.sync_wire = AMP_BF16;
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    if (loose.from > 0) {
        const amp_state *state = loose.state[loose.other_state ? 0 : rank];
        CHECK_OK(amp_state_get(state, "w", AMP_F32, w, LOOSE));
        CHECK_OK(amp_convert(low, AMP_BF16, w, AMP_F32, LOOSE, NULL, NULL));
        loose.code[rank] = (int)amp_optimizer_load(opt, state, "o");
        snprintf(loose.why[rank], sizeof loose.why[rank], "%s", amp_last_error());
    }
    for (int step = loose.from; step < loose.steps && loose.code[rank] == 0; step++) {
        for (int i = 0; i < LOOSE; i++) g[i] = loose_gradient(rank, step, i);
        p[0].grad_live = p[2].grad_live = 1;
        if (rank == loose.nan_rank && step == 4) *(narrow ? (float *)p[2].master : w + 2) = NAN;
        loose.code[rank] = (int)amp_step(opt, NULL);
        if (loose.code[rank]) snprintf(loose.why[rank], sizeof loose.why[rank], "%s", amp_last_error());
        if (narrow) CHECK_OK(amp_convert(w, AMP_F32, low, AMP_BF16, LOOSE, NULL, NULL));
        memcpy(loose.w[rank][step], w, sizeof w);
        if (loose.code[rank]) break;
    }
    if (loose.save) {
        CHECK_OK(amp_state_create(&loose.state[rank], NULL));
        CHECK_OK(amp_state_put(loose.state[rank], "w", AMP_F32, w, LOOSE));
        CHECK_OK(amp_optimizer_save(opt, loose.state[rank], "o"));
    }
    if (p[0].master) { memcpy(loose.last[rank], p[0].master, 8); memcpy(loose.last[rank] + 2, p[2].master, 12); }
    else memcpy(loose.last[rank], w, sizeof w);
    CHECK(frozen == 7);
    amp_optimizer_destroy(opt);
    amp_close(amp);
}
static void loose_run(int world, int from, int steps, int save) {
    loose.from = from; loose.steps = steps; loose.save = save;
    if (world > 1) thread_ranks(world, loose_train);
    else { memset(all, 0, sizeof *all); loose_train(0, 1); }
}
static void loose_reset(void) {
    for (int r = 0; r < RANKS; r++) amp_state_destroy(loose.state[r]);
    memset(&loose, 0, sizeof loose);
    loose.nan_rank = -1;
}
static float rounded(float x, int wire) {
    uint16_t low;
    if (!wire) return x;
    (void)amp_convert(&low, AMP_BF16, &x, AMP_F32, 1, NULL, NULL);
    (void)amp_convert(&x, AMP_F32, &low, AMP_BF16, 1, NULL, NULL);
    return x;
}
/* SGD with Nesterov momentum on the mean change, as torch.optim.SGD has it. */
static void loose_by_hand(int world, int steps, int wire, float out[RANKS][8 * STEPS][LOOSE]) {
    for (int i = 0; i < LOOSE; i++) {
        float anchor = (float)(i + 1), momentum = 0, w[RANKS];
        for (int r = 0; r < world; r++) w[r] = anchor;
        for (int step = 0; step < steps; step++) {
            for (int r = 0; r < world; r++) w[r] -= 0.25f * loose_gradient(r, step, i);
            if ((step + 1) % LOOSE_H == 0) {
                double sum = 0, change;
                for (int r = 0; r < world; r++) sum += (double)rounded(anchor - w[r], wire);
                change = (double)rounded((float)sum, wire) / world;
                momentum = (float)(0.9 * (double)momentum + change);
                anchor = (float)((double)anchor - 0.7 * (change + 0.9 * (double)momentum));
                for (int r = 0; r < world; r++) w[r] = anchor;
            }
            for (int r = 0; r < world; r++) out[r][step][i] = w[r];
        }
    }
}

/* The paper's rule, for 1 to 4 ranks, on fp32 and bf16 wires; ranks differ between outer steps, and agree after them; what
   is on the wire is counted. */
TEST(ranks_that_step_alone_follow_the_rule) {
    static float want[RANKS][8 * STEPS][LOOSE];
    device = *amp_cpu();
    device.name = "device"; device.host_visible = 0; device.copy = device_copy;
    for (int k = 0; k < 2 * 2 * RANKS; k++) {
        int world = k / 4 + 1, steps = 4 * LOOSE_H + 1;
        loose_reset();
        on_a_device = k & 1;
        loose.wire = k >> 1 & 1;
        loose_run(world, 0, steps, 0);
        on_a_device = 0;
        loose_by_hand(world, steps, loose.wire, want);
        for (int r = 0; r < world; r++) {
            CHECK_EQ(loose.code[r], 0);
            for (int step = 0; step < steps; step++) {
                CHECK_MSG(memcmp(loose.w[r][step], want[r][step], sizeof want[r][step]) == 0, "%d ranks, rank %d, step %d: %.9g, %.9g", world, r, step,
                          (double)loose.w[r][step][0], (double)want[r][step][0]);
                if (r > 0) CHECK_EQ(memcmp(loose.w[r][step], loose.w[0][step], sizeof want[r][step]) == 0, (step + 1) % LOOSE_H == 0);
            }
            /* two to compare the ranks; four outer steps of a flag and the changes, in bf16 parts and their sums; nothing else */
            if (world > 1) CHECK_EQ(loose.calls[r], 2 + (loose.wire ? 3 : 2) * 4);
        }
    }
}

/* Masters, remainders (to the masters' bits), and 16-bit weights alone. */
/* The outer step's sums are of the order in which they stand; under -Ofast each of four may round elsewhere. */
#if defined(__FAST_MATH__)
#define LOOSE_BOUND (4 * 0x1p-23f)
#else
#define LOOSE_BOUND 0
#endif
TEST(ranks_that_step_alone_with_16_bit_weights) {
    static const int kinds[] = {AMP_MASTER_F32, AMP_MASTER_REMAINDER, AMP_MASTER_NONE};
    static float want[RANKS][8 * STEPS][LOOSE], masters[RANKS][LOOSE];
    for (int k = 0; k < 3; k++) {
        loose_reset();
        loose.level = kinds[k] == AMP_MASTER_NONE ? AMP_LEVEL_O3 : AMP_LEVEL_O2;
        loose.master = kinds[k];
        loose_run(2, 0, 4 * LOOSE_H, 1);
        loose_by_hand(2, 4 * LOOSE_H, 0, want);
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(loose.code[r], 0);
            for (int i = 0; i < LOOSE; i++) {
                float is = loose.last[r][i], should = want[r][4 * LOOSE_H - 1][i];
                if (kinds[k] == AMP_MASTER_F32) CHECK_MSG(fabsf(is - should) <= LOOSE_BOUND * fabsf(should), "%.9g, %.9g", (double)is, (double)should);
                /* without masters every step rounds to 8 bits, half a step of 2^-8 each, and momentum sums some ten of them */
                else if (kinds[k] == AMP_MASTER_NONE) CHECK_MSG(fabsf(is - should) < 0.2f, "%g, %g", (double)is, (double)should);
            }
            if (kinds[k] == AMP_MASTER_REMAINDER) {             /* saved as masters */
                float saved[LOOSE];
                CHECK_OK(amp_state_get(loose.state[r], "o.master.0", AMP_F32, saved, 2));
                CHECK_OK(amp_state_get(loose.state[r], "o.master.1", AMP_F32, saved + 2, 3));
                CHECK(memcmp(saved, masters[r], sizeof saved) == 0);
            }
            memcpy(masters[r], loose.last[r], sizeof masters[r]);
        }
        CHECK(memcmp(loose.w[0][4 * LOOSE_H - 1], loose.w[1][4 * LOOSE_H - 1], sizeof want[0][0]) == 0);
    }
}

/* Any cut, resumed with each rank's own state, goes on to the bit; another rank's is taken after an outer step only, then
   also by more or fewer ranks. */
TEST(ranks_that_step_alone_resume) {
    static float whole[RANKS][8 * STEPS][LOOSE];
    enum { END = 3 * LOOSE_H + 1 };
    loose_reset();
    loose_run(2, 0, END, 0);
    memcpy(whole, loose.w, sizeof whole);
    for (int cut = 1; cut < END; cut++) {
        int whole_period = cut % LOOSE_H == 0;
        loose_reset();
        loose_run(2, 0, cut, 1);
        loose_run(2, cut, END, 0);
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(loose.code[r], 0);
            for (int step = cut; step < END; step++) CHECK_MSG(memcmp(whole[r][step], loose.w[r][step], sizeof whole[r][step]) == 0, "cut %d, step %d", cut, step);
        }
        loose.other_state = 1;
        for (int period = 0; period <= cut; period += cut) {    /* another period, of which the cut is a multiple, changes nothing */
            loose.other_period = period;
            loose_run(whole_period ? 3 : 2, cut, whole_period ? END : cut, 0);
            for (int r = 0; r < 2 + whole_period; r++)
                CHECK_MSG(loose.code[r] == (whole_period || r == 0 ? 0 : AMP_ERR_MISMATCH) && (loose.code[r] == 0 || strstr(loose.why[r], "between two outer steps by rank 0 of 2")),
                          "cut %d, period %d, rank %d: %d, %s", cut, period, r, loose.code[r], loose.why[r]);
        }
    }
    loose_reset();
}

/* Weights that are not finite on one rank reach no other. */
TEST(a_rank_with_spoiled_weights_is_named) {
    for (int k = 0; k < 2; k++) {
        loose_reset();
        loose.nan_rank = 1;
        loose.level = k ? AMP_LEVEL_O2 : 0;
        loose_run(3, 0, 2 * LOOSE_H, 0);
        for (int r = 0; r < 3; r++) {
            CHECK_MSG(loose.code[r] == AMP_ERR_REDUCE && strstr(loose.why[r], "weights of rank 1 are infinite or NaN"), "rank %d: %d, %s", r, loose.code[r], loose.why[r]);
            if (r != 1) for (int i = 0; i < LOOSE; i++) CHECK(isfinite(loose.last[r][i]));
        }
    }
    loose_reset();
}

/* Each has its own scale, also when an optimizer's functions have set weights. */
static float alone_scale[RANKS], alone_w[RANKS];
static void alone_rank(int rank, int world) {
    amp_context *amp;
    amp_optimizer *opt;
    amp_scaler *scaler;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_param p;
    float w = 1, g, set = 3;
    (void)world;
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(&p, 0, sizeof p);
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    desc.threads = 1;
    CHECK_OK(amp_open(&amp, &desc));
    p.name = "w"; p.weight = amp_tensor1(&w, AMP_F32, 1); p.grad = amp_tensor1(&g, AMP_F32, 1);
    CHECK_OK(amp_param_register(amp, &p, 1));
    od.params = &p; od.n_params = 1; od.kind = AMP_SGD; od.lr = 0.25; od.sync_every = 2;
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    for (int step = 0; step < 6; step++) {
        g = rank == 1 && step == 0 ? INFINITY : 65536.0f * (float)(rank + 1);
        p.grad_live = 1;
        CHECK_OK(amp_step(opt, scaler));
        if (step == 1) CHECK_OK(amp_optimizer_set_weight(opt, &p, &set));
        if (step == 3) CHECK_OK(amp_optimizer_rebuild_masters(opt));
    }
    alone_scale[rank] = amp_scaler_scale(scaler); alone_w[rank] = w;
    amp_optimizer_destroy(opt);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}
TEST(ranks_that_step_alone_scale_alone) {
    thread_ranks(2, alone_rank);
    CHECK(alone_scale[0] == 65536 && alone_scale[1] == 32768);
    CHECK(alone_w[0] == alone_w[1] && alone_w[0] < 3);
}

TEST(loose_coupling_that_cannot_be) {
    amp_context *amp;
    amp_optimizer *opt = NULL;
    amp_recovery *recovery;
    amp_optimizer_desc good, d, query;
    amp_recovery_desc rd;
    amp_param p;
    float w[2] = {1, 2}, g[2] = {1, 1};
    memset(&good, 0, sizeof good); memset(&p, 0, sizeof p); memset(&rd, 0, sizeof rd);
    CHECK_OK(amp_open(&amp, NULL));
    p.name = "w"; p.weight = amp_tensor1(w, AMP_F32, 2); p.grad = amp_tensor1(g, AMP_F32, 2);
    CHECK_OK(amp_param_register(amp, &p, 1));
    good.params = &p; good.n_params = 1;
#define LOOSE_REFUSED(change, error) do { d = good; change; CHECK_ERR(amp_optimizer_create(amp, &opt, &d), error); } while (0)
    LOOSE_REFUSED(d.outer_lr = 0.7, AMP_ERR_CONFLICT); LOOSE_REFUSED(d.outer_momentum = 0.9, AMP_ERR_CONFLICT);
    LOOSE_REFUSED(d.sync_wire = AMP_BF16, AMP_ERR_CONFLICT); LOOSE_REFUSED(d.sync_every = -1, AMP_ERR_RANGE);
    good.sync_every = 2;
    LOOSE_REFUSED(d.outer_momentum = 1, AMP_ERR_RANGE); LOOSE_REFUSED(d.outer_lr = -1, AMP_ERR_RANGE); LOOSE_REFUSED(d.outer_lr = NAN, AMP_ERR_RANGE);
    LOOSE_REFUSED(d.sync_wire = AMP_F16, AMP_ERR_DTYPE); LOOSE_REFUSED(d.sharded = 1, AMP_ERR_CONFLICT);
    LOOSE_REFUSED(d.shard = AMP_SHARD_STATES, AMP_ERR_CONFLICT);
#undef LOOSE_REFUSED
    CHECK_OK(amp_optimizer_create(amp, &opt, &good));
    CHECK_OK(amp_optimizer_query(opt, &query));
    CHECK(query.sync_every == 2 && query.sync_wire == AMP_F32 && query.outer_lr == 0.7 && query.outer_momentum == 0.9);
    rd.params = &p; rd.n_params = 1; rd.optimizer = opt;
    CHECK_ERR(amp_recovery_create(amp, &recovery, &rd), AMP_ERR_CONFLICT);
    amp_optimizer_destroy(opt);
    CHECK_OK(amp_optimizer_create(amp, &opt, &query));                /* what a query says makes the same again */
    amp_optimizer_destroy(opt);
    amp_close(amp);
}

/* ---- Care: what one rank finds decides for all */

typedef struct cared {
    int rank, fail_rank, huge_rank, calls, slow_rank;
    amp_dtype fail_dtype;
    amp_context *amp;
    amp_linear_op lin;
    amp_param p;
    float w[4], g[4], x[2], y[2], dy[2];
} cared;
static int alone_in_steps;
static struct { cared base; amp_verify_report verified[RANKS]; amp_tune_report tuned[RANKS]; int calls[RANKS], code[RANKS]; char why[RANKS][512]; int mode; } care;

static int cared_step(void *user, amp_context *amp) {
    cared *c = (cared *)user;
    const struct timespec pause = {0, 3000000};
    amp_choice choice;
    float sum = 1;
    c->calls++;
    (void)amp_query_choice(amp, &choice);
    if (c->rank == c->fail_rank && choice.dtype == c->fail_dtype) return 7;
    if (c->rank == c->slow_rank && choice.dtype == AMP_BF16) nanosleep(&pause, NULL);
    for (int i = 0; i < 2; i++) { c->x[i] = c->rank == c->huge_rank ? 1e6f : 0.5f; c->dy[i] = 1; }
    if (amp_autocast_begin(amp, NULL) != AMP_OK || amp_linear(amp, &c->lin) != AMP_OK || amp_autocast_end(amp) != AMP_OK) return 1;
    if (amp_linear_backward(amp, &c->lin) != AMP_OK) return 2;
    /* the ranks must come here equally often */
    return alone_in_steps ? 0 : c->lin.x.data == NULL || ampi_settings(amp)->reducer.reduce(ampi_settings(amp)->reducer.user, &sum, 1, AMP_F32, AMP_REDUCE_SUM, NULL) != 0;
}

static void care_rank(int rank, int world) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_F16, AMP_BF16};
    cared c = care.base;
    amp_desc desc;
    amp_range out;
    (void)world;
    memset(&desc, 0, sizeof desc); memset(&out, 0, sizeof out); memset(&c.p, 0, sizeof c.p); memset(&c.lin, 0, sizeof c.lin);
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    desc.threads = 1; desc.logger.level = AMP_LOG_ERROR;
    CHECK_OK(amp_open(&c.amp, &desc));
    c.rank = rank; c.calls = 0;
    for (int i = 0; i < 4; i++) c.w[i] = 1.5f + (float)i;
    c.p.name = "fc.weight"; c.p.weight = amp_tensor2(c.w, AMP_F32, 2, 2); c.p.grad = amp_tensor2(c.g, AMP_F32, 2, 2);
    c.lin.x = amp_tensor2(c.x, AMP_F32, 1, 2); c.lin.y = amp_tensor2(c.y, AMP_F32, 1, 2); c.lin.dy = amp_tensor2(c.dy, AMP_F32, 1, 2);
    c.lin.weight = &c.p;
    CHECK_OK(amp_param_register(c.amp, &c.p, 1));
    out.name = "y"; out.data = c.y; out.dtype = AMP_F32; out.count = 2;
    if (care.mode == 0) {
        amp_verify_desc d;
        memset(&d, 0, sizeof d);
        d.step = cared_step; d.user = &c; d.params = &c.p; d.n_params = 1; d.outputs = &out; d.n_outputs = 1; d.dtypes = dtypes + 1; d.n_dtypes = 2;
        care.code[rank] = (int)amp_verify(c.amp, &d, &care.verified[rank]);
    } else {
        amp_tune_desc d;
        memset(&d, 0, sizeof d);
        d.step = cared_step; d.user = &c; d.dtypes = dtypes; d.n_dtypes = care.mode == 2 && rank == 1 ? 2 : 3; d.iterations = 4; d.warmup = 1;
        care.code[rank] = (int)amp_tune(c.amp, &d, &care.tuned[rank]);
    }
    snprintf(care.why[rank], sizeof care.why[rank], "%s", amp_last_error());
    care.calls[rank] = c.calls;
    amp_close(c.amp);
}
static void care_run(int mode, int fail_rank, amp_dtype fail_dtype, int huge_rank, int slow_rank) {
    memset(&care, 0, sizeof care);
    care.mode = mode;
    care.base.fail_rank = fail_rank; care.base.fail_dtype = fail_dtype; care.base.huge_rank = huge_rank; care.base.slow_rank = slow_rank;
    thread_ranks(3, care_rank);
    for (int r = 0; r < 3; r++) CHECK_MSG(care.calls[r] == care.calls[0] && care.code[r] == care.code[0], "rank %d: %d steps, %d", r, care.calls[r], care.code[r]);
}

TEST(ranks_verify_together) {
    care_run(0, -1, AMP_F32, -1, -1);
    for (int r = 0; r < 3; r++) {
        CHECK_MSG(care.code[r] == 0 && care.verified[r].n_rows == 2 && memcmp(&care.verified[r], &care.verified[0], sizeof care.verified[0]) == 0, "%s", care.why[r]);
        CHECK(care.verified[r].rows[0].verdict == AMP_VERDICT_PASS && care.verified[r].rows[1].verdict == AMP_VERDICT_PASS);
    }
    care_run(0, -1, AMP_F32, 2, -1);                       /* one rank's data overflow */
    for (int r = 0; r < 3; r++) {
        CHECK(care.code[r] == 0 && memcmp(&care.verified[r], &care.verified[0], sizeof care.verified[0]) == 0);
        CHECK_MSG(care.verified[r].rows[0].verdict == AMP_VERDICT_NONFINITE && strcmp(care.verified[r].rows[0].first_bad, "y") == 0, "%s", care.verified[r].rows[0].advice);
        CHECK(care.verified[r].rows[1].verdict == AMP_VERDICT_PASS);
    }
}
TEST(a_step_that_fails_on_one_rank_fails_on_all) {
    for (int k = 0; k < 2; k++) {
        memset(&care, 0, sizeof care);
        care.base.fail_rank = 1; care.base.fail_dtype = k ? AMP_F32 : AMP_BF16; care.base.huge_rank = care.base.slow_rank = -1;
        care.mode = 0;
        alone_in_steps = 1;                                /* no reduction inside, which the failing rank would not come to */
        thread_ranks(3, care_rank);
        alone_in_steps = 0;
        for (int r = 0; r < 3; r++) {
            CHECK_EQ(care.calls[r], care.calls[0]);
            if (k) CHECK_MSG(care.code[r] == AMP_ERR_RANGE, "rank %d: %d, %s", r, care.code[r], care.why[r]);
            else CHECK_MSG(care.code[r] == 0 && care.verified[r].rows[1].verdict == AMP_VERDICT_FAILED && care.verified[r].rows[0].verdict == AMP_VERDICT_PASS,
                           "rank %d: %d, %s", r, care.code[r], care.why[r]);
        }
    }
}
TEST(ranks_tune_together) {
    care_run(1, -1, AMP_F32, -1, 1);                       /* rank 1 is slow in bf16 */
    for (int r = 0; r < 3; r++) {
        CHECK_MSG(care.code[r] == 0 && care.tuned[r].n_rows == 3, "%s", care.why[r]);
        for (int i = 0; i < 3; i++) CHECK(care.tuned[r].rows[i].seconds == care.tuned[0].rows[i].seconds && care.tuned[r].rows[i].peak == care.tuned[0].rows[i].peak);
        CHECK(care.tuned[r].best == care.tuned[0].best && care.tuned[r].rows[care.tuned[r].best].dtype != AMP_BF16);
        CHECK(care.tuned[r].rows[2].dtype == AMP_BF16 && care.tuned[r].rows[2].seconds >= 3e-3);
    }
    alone_in_steps = 1;
    care_run(1, 2, AMP_F16, -1, -1);                       /* rank 2 cannot run fp16 */
    alone_in_steps = 0;
    for (int r = 0; r < 3; r++) CHECK(care.code[r] == 0 && care.tuned[r].rows[1].verdict == AMP_VERDICT_FAILED && care.tuned[r].rows[0].verdict == AMP_VERDICT_PASS);
    care_run(2, -1, AMP_F32, -1, -1);
    for (int r = 0; r < 3; r++) CHECK_MSG(care.code[r] == AMP_ERR_REDUCE && strstr(care.why[r], "rank 1 would try other dtypes"), "%d: %s", care.code[r], care.why[r]);
}

/* Layers a and b of 2 x 2; rank 1's input of a is huge from a step on, rank 0 never runs b; one rank differs as .what says. */
enum { ADAPT_STEPS = 24, ADAPT_HUGE = 12, ADAPT_RECORDS = 16 };
typedef struct adapted { amp_adapt_record records[ADAPT_RECORDS]; int n, code; amp_dtype dtypes[2]; char why[512]; } adapted;
typedef enum adapt_apart { ADAPT_ALIKE, ADAPT_BUDGET, ADAPT_BAD, ADAPT_NAME, ADAPT_LADDER, ADAPT_FROZEN, ADAPT_LOADED, ADAPT_OVERRIDDEN } adapt_apart;
static struct { adapt_apart what; int huge, from, to; adapted found[RANKS]; amp_state *states[RANKS]; } adapting;

static void adapt_linear(amp_context *amp, amp_param *p, int huge) {
    amp_linear_op op;
    float x[4], y[4], dx[4], dy[4] = {1, 0.5f, 0.25f, 1};
    for (int i = 0; i < 4; i++) x[i] = (huge ? 1e6f : 0.5f) * (float)(i + 1);
    memset(&op, 0, sizeof op);
    op.x = amp_tensor2(x, AMP_F32, 2, 2); op.y = amp_tensor2(y, AMP_F32, 2, 2); op.weight = p;
    op.dx = amp_tensor2(dx, AMP_F32, 2, 2); op.dy = amp_tensor2(dy, AMP_F32, 2, 2);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_linear(amp, &op));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_linear_backward(amp, &op));
}
static amp_result adapt_steps(amp_context *amp, amp_adapt *adapt, amp_param *p, int rank, adapted *found) {
    for (int step = adapting.from; step < adapting.to; step++) {
        amp_result result;
        adapt_linear(amp, &p[0], rank == 1 && step >= adapting.huge);
        if (rank > 0) adapt_linear(amp, &p[1], 0);
        if (rank == 1 && step == 6 && adapting.what == ADAPT_FROZEN) CHECK_OK(amp_adapt_freeze(adapt, 1));
        if (rank == 1 && step == 6 && adapting.what == ADAPT_OVERRIDDEN) CHECK_OK(amp_layer_override(amp, "a.weight", AMP_BF16));
        result = amp_adapt_step(adapt);
        if (result != AMP_OK) return result;
        while (found->n < ADAPT_RECORDS && amp_adapt_next(adapt, &found->records[found->n])) found->n++;
    }
    return AMP_OK;
}
static void adapt_rank(int rank, int world) {
    static const amp_dtype ladders[2][2] = {{AMP_F16, AMP_F32}, {AMP_BF16, AMP_F32}};
    adapted *found = &adapting.found[rank];
    int apart = rank == world - 1;
    amp_context *amp;
    amp_adapt *adapt;
    amp_adapt_desc d;
    amp_desc desc;
    amp_param p[2];
    float w[2][4] = {{1.5f, -2, 0.75f, 1}, {1, 0.5f, -1, 2}}, g[2][4];
    memset(&desc, 0, sizeof desc); memset(&d, 0, sizeof d); memset(p, 0, sizeof p);
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    desc.threads = 1; desc.dtype = AMP_F32; desc.logger.level = AMP_LOG_ERROR;
    CHECK_OK(amp_open(&amp, &desc));
    for (int i = 0; i < 2; i++) {
        p[i].name = i ? apart && adapting.what == ADAPT_NAME ? "c.weight" : "b.weight" : "a.weight";
        p[i].weight = amp_tensor2(w[i], AMP_F32, 2, 2); p[i].grad = amp_tensor2(g[i], AMP_F32, 2, 2);
    }
    CHECK_OK(amp_param_register(amp, p, 2));
    d.params = p; d.n_params = 2; d.interval = 3; d.checks = 1; d.changes = 2;
    d.ladder = ladders[apart && adapting.what == ADAPT_LADDER]; d.n_ladder = 2;
    d.budget = apart && adapting.what == ADAPT_BUDGET ? 0.2 : 0.1;
    if (apart && adapting.what == ADAPT_BAD) d.checks = -1;
    found->code = (int)amp_adapt_create(amp, &adapt, &d);
    if (found->code == 0 && adapting.from > 0 && !(apart && adapting.what == ADAPT_LOADED))
        CHECK_OK(amp_adapt_load(adapt, adapting.states[rank], "adapt"));
    if (found->code == 0) found->code = (int)adapt_steps(amp, adapt, p, rank, found);
    snprintf(found->why, sizeof found->why, "%s", amp_last_error());
    for (int i = 0; found->code == 0 && i < 2; i++) {
        amp_adapt_record r;
        CHECK_OK(amp_adapt_layer(adapt, i, &r));
        found->dtypes[i] = r.to;
        if (adapting.what == ADAPT_OVERRIDDEN && i == 0) CHECK_EQ(r.fixed, 1);
    }
    if (found->code == 0 && adapting.from == 0) CHECK_OK(amp_adapt_save(adapt, adapting.states[rank], "adapt"));
    amp_adapt_destroy(adapt);
    amp_close(amp);
}
static void adapt_run(int world, adapt_apart what, int from, int to) {
    adapting.what = what; adapting.from = from; adapting.to = to;
    memset(adapting.found, 0, sizeof adapting.found);
    for (int r = 0; r < world && from == 0; r++) {
        amp_state_destroy(adapting.states[r]);
        CHECK_OK(amp_state_create(&adapting.states[r], NULL));
    }
    thread_ranks(world, adapt_rank);
    for (int r = 1; r < world; r++) {
        const adapted *a = &adapting.found[0], *b = &adapting.found[r];
        if (what == ADAPT_BAD) continue;
        CHECK_MSG(a->code == b->code && a->n == b->n, "rank %d: %d, %d decisions, %s", r, b->code, b->n, b->why);
        CHECK(memcmp(a->records, b->records, sizeof a->records) == 0);
    }
}
static void adapt_close(void) {
    for (int r = 0; r < RANKS; r++) { amp_state_destroy(adapting.states[r]); adapting.states[r] = NULL; }
}

TEST(ranks_adapt_together) {
    static adapted whole;
    for (int world = 2; world <= 3; world++) {
        adapting.huge = 0;                                  /* a overflows fp16 on rank 1 from the start */
        adapt_run(world, ADAPT_ALIKE, 0, ADAPT_STEPS);
        for (int r = 0; r < world; r++) {
            const adapted *f = &adapting.found[r];
            CHECK_MSG(f->code == 0 && f->n == 1, "rank %d: %d, %d decisions, %s", r, f->code, f->n, f->why);
            CHECK(f->dtypes[0] == AMP_F32 && f->dtypes[1] == AMP_F16);
        }
        adapting.huge = ADAPT_HUGE;                         /* both go low, and a comes back */
        adapt_run(world, ADAPT_ALIKE, 0, ADAPT_STEPS);
        whole = adapting.found[0];
        CHECK_MSG(whole.code == 0 && whole.n == 3 && whole.records[2].to == AMP_F32, "%d decisions, %s", whole.n, whole.why);
        CHECK(whole.records[2].step >= ADAPT_HUGE && whole.records[2].step < ADAPT_HUGE + 3);
        for (int r = 0; r < world; r++) CHECK(adapting.found[r].dtypes[0] == AMP_F32 && adapting.found[r].dtypes[1] == AMP_F16);
        adapt_run(world, ADAPT_ALIKE, 0, 10);               /* saved in the middle of an interval, and resumed */
        for (int r = 0; r < world; r++) CHECK(adapting.found[r].n == 2 && adapting.found[r].dtypes[0] == AMP_F16);
        adapt_run(world, ADAPT_ALIKE, 10, ADAPT_STEPS);
        for (int r = 0; r < world; r++)
            CHECK(adapting.found[r].n == 1 && memcmp(adapting.found[r].records, &whole.records[2], sizeof *whole.records) == 0);
    }
    adapting.huge = ADAPT_STEPS;                            /* an override on one rank is left alone on all */
    adapt_run(3, ADAPT_OVERRIDDEN, 0, ADAPT_STEPS);
    for (int r = 0; r < 3; r++) CHECK_MSG(adapting.found[r].code == 0, "%s", adapting.found[r].why);
    adapt_close();
}

/* Every rank is told, and none waits for another. */
TEST(ranks_that_would_adapt_apart) {
    static const struct { adapt_apart what; const char *call, *says; } rows[] = {
        {ADAPT_BUDGET, "amp_adapt_create", "budget is 0.2"}, {ADAPT_NAME, "amp_adapt_create", ".params"},
        {ADAPT_LADDER, "amp_adapt_create", ".ladder"}, {ADAPT_FROZEN, "amp_adapt_step", "freezing"}, {ADAPT_LOADED, "amp_adapt_step", "the step"}};
    adapting.huge = ADAPT_STEPS;
    for (int world = 2; world <= 3; world++) {
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            if (rows[i].what == ADAPT_LOADED) adapt_run(world, ADAPT_ALIKE, 0, 10);
            adapt_run(world, rows[i].what, rows[i].what == ADAPT_LOADED ? 10 : 0, ADAPT_STEPS);
            for (int r = 0; r < world; r++) {
                const adapted *f = &adapting.found[r];
                CHECK_MSG(f->code == AMP_ERR_REDUCE && strstr(f->why, rows[i].says) != NULL, "rank %d: %d, %s", r, f->code, f->why);
                ampt_named(rows[i].call, f->code, f->why, __FILE__, __LINE__);
            }
        }
        adapt_run(world, ADAPT_BAD, 0, ADAPT_STEPS);        /* what one alone is refused */
        for (int r = 0; r < world; r++) CHECK_EQ(adapting.found[r].code, r == world - 1 ? AMP_ERR_RANGE : AMP_ERR_REDUCE);
    }
    adapt_close();
}

/* Rank 1 alone has a loss that is not finite, in step 5 of 8; rank 0's policy sets a learning rate, the others' another. */
static amp_optimizer *back_optimizers[RANKS];
static struct { float w[RANKS][2]; int action[RANKS], code[RANKS], fail_save; double lr[RANKS]; } back;
static void back_policy(void *user, amp_recovery_event *event) {
    const thread_rank *me = (const thread_rank *)user;
    (void)event;
    CHECK_OK(amp_optimizer_set_lr(back_optimizers[me->rank], me->rank == 0 ? 0.125 : 0.5));
}
static int back_save(void *user, amp_state *state) { (void)state; return ((const thread_rank *)user)->rank == 1 && back.fail_save ? 9 : 0; }
static int back_load(void *user, const amp_state *state) { (void)user; (void)state; return 0; }
static void back_rank(int rank, int world) {
    thread_rank me = {rank, world, NULL, 0};
    amp_context *amp;
    amp_optimizer *opt;
    amp_recovery *recovery;
    amp_recovery_event event;
    amp_step_record record;
    amp_desc desc;
    amp_optimizer_desc od;
    amp_recovery_desc rd;
    amp_param p;
    float w[2] = {1, 2}, g[2];
    memset(&desc, 0, sizeof desc); memset(&od, 0, sizeof od); memset(&rd, 0, sizeof rd); memset(&p, 0, sizeof p);
    CHECK_OK(amp_ranks_reducer(together, rank, &desc.reducer));
    desc.threads = 1; desc.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&amp, &desc));
    p.name = "w"; p.weight = amp_tensor1(w, AMP_F32, 2); p.grad = amp_tensor1(g, AMP_F32, 2);
    CHECK_OK(amp_param_register(amp, &p, 1));
    od.params = &p; od.n_params = 1; od.kind = AMP_SGD; od.lr = 0.25; od.result_lag = AMP_LAG_NONE;
    CHECK_OK(amp_optimizer_create(amp, &opt, &od));
    back_optimizers[rank] = opt;
    rd.params = &p; rd.n_params = 1; rd.optimizer = opt; rd.interval = 2; rd.policy = back_policy; rd.save = back_save; rd.load = back_load; rd.user = &me;
    back.code[rank] = (int)amp_recovery_create(amp, &recovery, &rd);
    for (int step = 1; back.code[rank] == 0 && step <= 5; step++) {
        memset(&record, 0, sizeof record);
        g[0] = 1; g[1] = 2; p.grad_live = 1;
        CHECK_OK(amp_step(opt, NULL));
        CHECK_EQ(amp_step_result_next(opt, &record.result), 1);
        record.loss = 1;
        if (step == 5 && rank == 1) { record.loss = NAN; record.anomaly = AMP_ANOMALY_LOSS; record.action = AMP_NAN_RECOVER; }
        CHECK_OK(amp_recovery_step(recovery, &record, &event));
        if (step < 5) CHECK_EQ(event.action, AMP_RECOVERY_NONE);
    }
    if (back.code[rank] == 0) {
        amp_optimizer_desc now;
        CHECK_OK(amp_optimizer_query(opt, &now));
        back.action[rank] = (int)event.action; back.lr[rank] = now.lr;
        memcpy(back.w[rank], w, sizeof w);
        CHECK_ERR(amp_recovery_memory(recovery, &event), AMP_ERR_CONFLICT);
        amp_recovery_destroy(recovery);
    }
    amp_optimizer_destroy(opt);
    amp_close(amp);
}
TEST(ranks_go_back_together) {
    memset(&back, 0, sizeof back);
    thread_ranks(3, back_rank);
    for (int r = 0; r < 3; r++) {
        CHECK_MSG(back.code[r] == 0 && back.action[r] == AMP_RECOVERY_RESTORED && back.lr[r] == 0.125, "rank %d: action %d, lr %g", r, back.action[r], back.lr[r]);
        /* the snapshot after step 2 was good once step 3 was: 1 - 2 / 4 and 2 - 2 * 2 / 4 */
        CHECK_MSG(back.w[r][0] == 0.5f && back.w[r][1] == 1, "rank %d: %g %g", r, (double)back.w[r][0], (double)back.w[r][1]);
    }
    back.fail_save = 1;
    thread_ranks(3, back_rank);
    for (int r = 0; r < 3; r++) CHECK(back.code[r] != 0);
}

/* One reduction in a thread of its own, without a context. */
typedef struct one { amp_reducer reducer; void *data; int64_t count; amp_dtype dtype; amp_reduce_op op; int code; char why[512]; pthread_t thread; } one;
static void *run_one(void *arg) {
    one *o = (one *)arg;
    o->code = o->reducer.reduce(o->reducer.user, o->data, o->count, o->dtype, o->op, NULL);
    snprintf(o->why, sizeof o->why, "%s", o->code ? o->reducer.calls->error(o->reducer.user) : "");
    return NULL;
}
static void run_all(amp_ranks *ranks, one *ones, int n) {
    for (int r = 0; r < n; r++) {
        CHECK_OK(amp_ranks_reducer(ranks, r, &ones[r].reducer));
        CHECK_EQ(pthread_create(&ones[r].thread, NULL, run_one, &ones[r]), 0);
    }
    for (int r = 0; r < n; r++) pthread_join(ones[r].thread, NULL);
}
static amp_ranks *ranks_of(int world, int timeout_ms) {
    amp_ranks_desc d;
    amp_ranks *out;
    memset(&d, 0, sizeof d);
    d.world = world; d.timeout_ms = timeout_ms;
    CHECK_OK(amp_ranks_create(&out, &d));
    return out;
}

/* Every dtype and size: sums in the order of ranks, rounded once; NaN stays. */
TEST(sums_and_maxima) {
    enum { WORLD = 3, MOST = 1300 };
    static const amp_dtype dtypes[] = {AMP_F32, AMP_F64, AMP_F16, AMP_BF16};
    static const int64_t counts[] = {1, 2, 3, 511, 513, MOST};
    static double x[WORLD][MOST], data[WORLD][MOST], got[MOST], want[MOST];
    amp_ranks *ranks = ranks_of(WORLD, 0);
    one ones[WORLD];
    for (int t = 0; t < 4 * 6 * 2; t++) {
        amp_dtype dtype = dtypes[t % 4];
        int64_t n = counts[t / 4 % 6];
        amp_reduce_op op = t < 24 ? AMP_REDUCE_SUM : AMP_REDUCE_MAX;
        memset(ones, 0, sizeof ones);
        for (int r = 0; r < WORLD; r++) {
            for (int64_t i = 0; i < n; i++) x[r][i] = (double)value(i * 7 + r * 1000 + t) * (i % 5 ? 1 : 300);
            if (n > 2) x[r][n / 2] = r == 1 ? NAN : 1;
            CHECK_OK(amp_convert(data[r], dtype, x[r], AMP_F64, n, NULL, NULL));
            CHECK_OK(amp_convert(x[r], AMP_F64, data[r], dtype, n, NULL, NULL));
            ones[r].data = data[r]; ones[r].count = n; ones[r].dtype = dtype; ones[r].op = op;
        }
        for (int64_t i = 0; i < n; i++) {
            double both = op == AMP_REDUCE_SUM ? x[0][i] + x[1][i] : x[1][i] > x[0][i] ? x[1][i] : x[0][i];
            want[i] = op == AMP_REDUCE_SUM ? both + x[2][i] : x[2][i] > both ? x[2][i] : both;
        }
        if (n > 2) want[n / 2] = NAN;
        CHECK_OK(amp_convert(got, dtype, want, AMP_F64, n, NULL, NULL));
        memcpy(want, got, (size_t)n * amp_dtype_size(dtype));
        run_all(ranks, ones, WORLD);
        for (int r = 0; r < WORLD; r++) {
            CHECK_EQ(ones[r].code, 0);
            CHECK_MSG(memcmp(data[r], want, (size_t)n * amp_dtype_size(dtype)) == 0, "%s, %d elements, rank %d", amp_dtype_name(dtype), (int)n, r);
        }
    }
    amp_ranks_destroy(ranks);
}

/* All ranks are told the same, and nothing works any more. */
static void fails(int world, one *ones, int n, const char *why) {
    amp_ranks *ranks = ranks_of(world, 50);
    amp_context *amp;
    amp_desc d;
    run_all(ranks, ones, n);
    for (int r = 0; r < n; r++) CHECK_MSG(ones[r].code != 0 && strstr(ones[r].why, why), "rank %d: %d, %s", r, ones[r].code, ones[r].why);
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_ranks_reducer(ranks, 0, &d.reducer));
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_REDUCE);
    amp_ranks_destroy(ranks);
}
TEST(ranks_that_disagree) {
    float x[2][8] = {{1, 2, 3}, {4, 5, 6}};
    one ones[2];
    for (int t = 0; t < 6; t++) {
        static const char *const why[] = {"rank 0 reduces 4 x fp32 (sum), rank 1 reduces 3 x fp32 (sum)", "rank 1 reduces 4 x bf16", "(max)",
                                          "ranks 0 and 1 use the same memory", "ranks 0 and 1 use the same memory",
                                          "rank 1 has not come within 50 ms"};
        memset(ones, 0, sizeof ones);
        for (int r = 0; r < 2; r++) { ones[r].data = x[r]; ones[r].count = 4; ones[r].dtype = AMP_F32; ones[r].op = AMP_REDUCE_SUM; }
        if (t == 0) ones[1].count = 3;
        if (t == 1) ones[1].dtype = AMP_BF16;
        if (t == 2) ones[1].op = AMP_REDUCE_MAX;
        if (t == 3) ones[1].data = x[0];
        if (t == 4) ones[1].data = x[0] + 3;
        fails(2, ones, t == 5 ? 1 : 2, why[t]);
    }
    CHECK(x[0][0] == 1 && x[1][2] == 6);
}

/* Every call of a reducer, its own and built from reduce, on the host and on a device whose memory the reducer takes, does
   not take, or takes out of order: the same bits as the definition. */
enum { MOST_RANKS = 5, LONGEST = 70001, PLACE = LONGEST * MOST_RANKS * 8 };
typedef struct exchanger { amp_ranks *ranks[8]; int rank, world; unsigned char *in, *out; pthread_t thread; } exchanger;
static exchanger exchangers[MOST_RANKS];
static const amp_dtype summed[] = {AMP_F32, AMP_F64, AMP_F16, AMP_BF16};
static const int64_t lengths[] = {1, 2, 3, 1300, LONGEST};

static void exchange_input(unsigned char *in, int rank, const ampi_exchange *e, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        double x = (double)value(i * 7 + rank * 1000) * (i % 5 ? 1 : 300);
        if (e->dtype == AMP_U8) in[i] = (unsigned char)((i * 2654435761u + (unsigned)rank * 77u) >> 7);   /* any bits: NaN, -0 */
        else CHECK_OK(amp_convert(in + (size_t)i * amp_dtype_size(e->dtype), e->dtype, &x, AMP_F64, 1, NULL, NULL));
    }
}
/* Element i of what `rank` must get. */
static void exchange_expected(const exchanger *x, const ampi_exchange *e, int64_t i, unsigned char *want) {
    size_t size = amp_dtype_size(e->dtype);
    int64_t n = e->count;
    if (e->kind == AMPI_GATHER) memcpy(want, exchangers[i / n].in + (size_t)(i % n), 1);
    else if (e->kind == AMPI_TO_ALL) memcpy(want, exchangers[i / n].in + (size_t)(x->rank * n + i % n), 1);
    else if (e->kind == AMPI_BROADCAST) memcpy(want, exchangers[e->root].in + (size_t)i, 1);
    else {
        double sum = 0, y;
        for (int r = 0; r < x->world; r++) {
            CHECK_OK(amp_convert(&y, AMP_F64, exchangers[r].in + (size_t)(i + (e->kind == AMPI_SCATTER ? x->rank * n : 0)) * size, e->dtype, 1, NULL, NULL));
            sum = r == 0 ? y : e->op == AMP_REDUCE_SUM ? sum + y : y > sum ? y : sum;
        }
        CHECK_OK(amp_convert(want, e->dtype, &sum, AMP_F64, 1, NULL, NULL));
    }
}
static void exchange_once(const exchanger *x, amp_context *amp, ampi_exchange e, const char *how) {
    const int64_t in = e.count * ampi_parts_in(&e, x->world), out = e.count * ampi_parts_out(&e, x->world);
    int64_t wrong = 0;
    unsigned char want[8];
    exchange_input(x->in, x->rank, &e, in);
    e.in = x->in;
    e.out = x->out;
    if (e.kind == AMPI_REDUCE || e.kind == AMPI_BROADCAST) {
        memcpy(x->out, x->in, (size_t)in * amp_dtype_size(e.dtype));
        e.in = e.out;
    } else memset(x->out, 99, (size_t)out * amp_dtype_size(e.dtype));
    CHECK_OK(ampi_exchange_run(amp, &e, NULL));
    CHECK_OK(ampi_hook_reduce(amp, &(float){1}, 1, AMP_F32, AMP_REDUCE_SUM));         /* nobody goes on before all are done */
    for (int64_t i = 0; i < out; i++) {
        exchange_expected(x, &e, i, want);
        wrong += memcmp(x->out + (size_t)i * amp_dtype_size(e.dtype), want, amp_dtype_size(e.dtype)) != 0;
    }
    CHECK_MSG(wrong == 0, "%s, kind %d, %d x %s, rank %d of %d: %d wrong", how, (int)e.kind, (int)e.count, amp_dtype_name(e.dtype), x->rank, x->world, (int)wrong);
    CHECK_OK(ampi_hook_reduce(amp, &(float){1}, 1, AMP_F32, AMP_REDUCE_SUM));
}
static void exchange_all(const exchanger *x, amp_context *amp, const char *how) {
    for (int t = 0; t < 5 * 4 * 5; t++) {
        int kind = t / 20;
        ampi_exchange e = ampi_exchange_of((ampi_exchange_kind)kind, NULL, NULL, lengths[t % 5], kind >= AMPI_GATHER ? AMP_U8 : summed[t / 5 % 4]);
        if (kind >= AMPI_GATHER && t / 5 % 4 > 0) continue;
        e.op = t % 2 ? AMP_REDUCE_MAX : AMP_REDUCE_SUM;
        e.root = kind == AMPI_BROADCAST ? x->world / 2 : 0;
        if (e.count == LONGEST && e.dtype != AMP_U8 && e.dtype != AMP_BF16) continue;
        exchange_once(x, amp, e, how);
    }
}
static void *run_exchanges(void *arg) {
    const exchanger *x = (const exchanger *)arg;
    static const char *const how[] = {"its own", "built from reduce", "its own, device", "built, device", "its own, on_host", "built, on_host", "its own, unordered", "built, unordered"};
    for (int t = 0; t < 8; t++) {
        amp_context *amp;
        amp_desc d;
        memset(&d, 0, sizeof d);
        d.threads = 1;
        CHECK_OK(amp_ranks_reducer(x->ranks[t], x->rank, &d.reducer));
        if (t % 2) d.reducer.calls = NULL;
        if (t >= 2) d.backend = &device;
        d.reducer.on_host = t < 2 ? 1 : t / 2 - 1;
        CHECK_OK(amp_open(&amp, &d));
        if (x->world > 1) exchange_all(x, amp, how[t]);
        CHECK_OK(ampi_hook_reduce(amp, &(float){1}, 1, AMP_F32, AMP_REDUCE_SUM));
        if (x->world == 1) {
            unsigned char in[4] = {1, 2, 3, 4}, out[4] = {0};
            ampi_exchange e = ampi_exchange_of(AMPI_GATHER, in, out, 4, AMP_U8);
            CHECK_OK(ampi_exchange_run(amp, &e, NULL));
            CHECK(memcmp(in, out, 4) == 0);
        }
        amp_close(amp);
    }
    return NULL;
}
TEST(every_exchange) {
    device = *amp_cpu();
    device.name = "device"; device.host_visible = 0; device.copy = device_copy;
    for (int r = 0; r < MOST_RANKS; r++) {
        exchangers[r].in = malloc(PLACE);
        exchangers[r].out = malloc(PLACE);
        if (!exchangers[r].in || !exchangers[r].out) SKIP("no memory");
    }
    for (int world = 1; world <= MOST_RANKS; world++) {
        if (AMPT_SANITIZED && world > 2 && world < MOST_RANKS) continue;        /* the same memory, with fewer ranks */
        amp_ranks *ranks[8];
        for (int t = 0; t < 8; t++) ranks[t] = ranks_of(world, 0);
        for (int r = 0; r < world; r++) {
            memcpy(exchangers[r].ranks, ranks, sizeof ranks);
            exchangers[r].rank = r; exchangers[r].world = world;
            CHECK_EQ(pthread_create(&exchangers[r].thread, NULL, run_exchanges, &exchangers[r]), 0);
        }
        for (int r = 0; r < world; r++) pthread_join(exchangers[r].thread, NULL);
        for (int t = 0; t < 8; t++) amp_ranks_destroy(ranks[t]);
    }
    for (int r = 0; r < MOST_RANKS; r++) { free(exchangers[r].in); free(exchangers[r].out); }
}

/* A rank closes its context while another waits, and before it comes; a rank has one context at a time. */
static amp_ranks *waited;
static void wait_for_the_other(int rank, int world) {
    amp_context *amp;
    amp_desc d;
    one o;
    float x = 1;
    (void)world;
    memset(&d, 0, sizeof d); memset(&o, 0, sizeof o);
    d.threads = 1;
    CHECK_OK(amp_ranks_reducer(waited, rank, &d.reducer));
    CHECK_OK(amp_open(&amp, &d));
    o.reducer = d.reducer; o.data = &x; o.count = 1; o.dtype = AMP_F32; o.op = AMP_REDUCE_SUM;
    for (int i = 0; i < 2; i++) {
        run_one(&o);
        CHECK_MSG(o.code != 0 && strstr(o.why, "rank 1 has closed its context"), "%s", o.why);
    }
    amp_close(amp);
}
TEST(ranks_that_leave) {
    amp_context *amp, *twice;
    amp_desc d;
    for (int late = 0; late < 2; late++) {
        const struct timespec pause = {0, 20000000};
        thread_rank other = {0, 2, wait_for_the_other, 0};
        waited = ranks_of(2, 0);
        memset(&d, 0, sizeof d);
        d.threads = 1;
        CHECK_OK(amp_ranks_reducer(waited, 1, &d.reducer));
        CHECK_OK(amp_open(&amp, &d));
        CHECK_ERR(amp_open(&twice, &d), AMP_ERR_CONFLICT);
        if (late) amp_close(amp);
        CHECK_EQ(pthread_create(&other.thread, NULL, run_rank, &other), 0);
        if (!late) { nanosleep(&pause, NULL); amp_close(amp); }
        pthread_join(other.thread, NULL);
        amp_ranks_destroy(waited);
    }
    waited = ranks_of(2, 0);                    /* closed and opened again, destroyed before its contexts */
    CHECK_OK(amp_ranks_reducer(waited, 1, &d.reducer));
    for (int i = 0; i < 2; i++) { CHECK_OK(amp_open(&amp, &d)); if (i == 0) amp_close(amp); }
    amp_ranks_destroy(waited);
    amp_close(amp);
}

static int group(void *user, void *stream) { (void)user; (void)stream; return 0; }
TEST(ranks_that_cannot_be) {
    amp_ranks *ranks;
    amp_ranks_desc d;
    amp_reducer reducer;
    amp_context *amp;
    amp_desc open;
    amp_exchanges half;
    memset(&d, 0, sizeof d); memset(&open, 0, sizeof open); memset(&half, 0, sizeof half);
    CHECK_ERR(amp_ranks_create(&ranks, &d), AMP_ERR_RANGE);
    d.world = 1025;
    CHECK_ERR(amp_ranks_create(&ranks, &d), AMP_ERR_RANGE);
    d.world = 2; d.timeout_ms = -1;
    CHECK_ERR(amp_ranks_create(&ranks, &d), AMP_ERR_RANGE);
    CHECK_ERR(amp_ranks_create(NULL, &d), AMP_ERR_NULL);
    CHECK_ERR(amp_ranks_create(&ranks, NULL), AMP_ERR_NULL);
    d.timeout_ms = 0;
    CHECK_OK(amp_ranks_create(&ranks, &d));
    CHECK_ERR(amp_ranks_reducer(ranks, 2, &reducer), AMP_ERR_RANGE);
    CHECK_ERR(amp_ranks_reducer(ranks, -1, &reducer), AMP_ERR_RANGE);
    CHECK_ERR(amp_ranks_reducer(NULL, 0, &reducer), AMP_ERR_NULL);
    CHECK_ERR(amp_ranks_reducer(ranks, 0, NULL), AMP_ERR_NULL);
    CHECK_OK(amp_ranks_reducer(ranks, 0, &open.reducer));
    open.reducer.on_host = 3;
    CHECK_ERR(amp_open(&amp, &open), AMP_ERR_RANGE);
    open.reducer.on_host = 1; open.reducer.one_thread = 2;
    CHECK_ERR(amp_open(&amp, &open), AMP_ERR_RANGE);
    open.reducer.one_thread = 0; half.group_begin = group; open.reducer.calls = &half;
    CHECK_ERR(amp_open(&amp, &open), AMP_ERR_CONFLICT);
    amp_ranks_destroy(ranks);
    amp_ranks_destroy(NULL);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    all = (shared *)mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | 0x20 /* MAP_ANONYMOUS */, -1, 0);
    if (all == MAP_FAILED) { printf("no shared memory\n0 passed, 1 failed, 0 skipped\n"); return 1; }
    RUN(ranks_equal_one_process_with_the_whole_batch); RUN(an_overflow_on_one_rank_skips_on_all);
    RUN(ranks_without_gradients_take_part);
    RUN(shards_are_disjoint_and_complete); RUN(restarts_with_ranks); RUN(a_failing_hook_is_an_error_and_changes_nothing);
    RUN(threads_train_as_processes_do); RUN(ranks_that_differ_are_named); RUN(ranks_go_on_by_the_first_ones_path); RUN(ranks_that_step_alone_follow_the_rule);
    RUN(ranks_that_step_alone_with_16_bit_weights); RUN(ranks_that_step_alone_resume); RUN(a_rank_with_spoiled_weights_is_named); RUN(ranks_that_step_alone_scale_alone);
    RUN(loose_coupling_that_cannot_be); RUN(parameters_that_no_rank_uses_rest); RUN(parameters_frozen_on_one_rank_are_named);
    RUN(gradients_that_change_after_the_check_are_refused); RUN(sets_of_the_host_are_told_what_rests);
    RUN(ranks_verify_together); RUN(a_step_that_fails_on_one_rank_fails_on_all); RUN(ranks_tune_together);
    RUN(ranks_adapt_together); RUN(ranks_that_would_adapt_apart); RUN(ranks_go_back_together);
    RUN(sums_and_maxima); RUN(every_exchange); RUN(ranks_that_disagree); RUN(ranks_that_leave); RUN(ranks_that_cannot_be);
    return TEST_END();
}
