/* t_cuda_nccl.cpp - tests ranks that reduce device memory with NCCL, on model GPUs.  These are 2 and 4 processes, and two
 * threads, each with a model GPU and the model of NCCL (coc_nccl.cpp), a library with NCCL's name.  All calls are compared
 * with sums computed here.  Training must give the weights of amp_ranks, also from a captured graph.  A library that is
 * missing or old, and ranks that are late or dead or that disagree, must give an error that says so.
 *
 * A rank in its own process is this program, started with --rank.  The data that ranks share, and the CPU-side reducer that
 * joins them, are in memory that they inherit.  On a GPU, one rank runs all calls with the installed NCCL. */
#include "test_cuda.h"
#include "coc_nccl.h"
#include <cublasLt.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

enum { RANKS = 4, HOST_ROOM = 8192, WEIGHTS = 4096, PATIENT_MS = 60000 };
/* Of ranks that wait for one that is gone: longer than a step takes here. */
#if defined(__SANITIZE_ADDRESS__)
enum { LIMIT_MS = 12000 };
#else
enum { LIMIT_MS = 4000 };
#endif

/* ---- What the processes share */

struct shared {
    std::atomic<uint64_t> came[RANKS], left[RANKS];
    std::atomic<int> gone[RANKS];               /* the process has ended */
    double host[RANKS][HOST_ROOM];
    char text[RANKS][600];                      /* the last error */
    int result[RANKS], steps[RANKS], failures[RANKS];
    double seconds[RANKS], travelled[RANKS];
    float weights[RANKS][WEIGHTS];
    char id[AMP_COMMUNICATOR_ID];
    std::atomic<int> has_id;
};

struct seat {
    shared *all;
    int rank, world, timeout_ms;
    uint64_t calls = 0;
    char why[100] = "";
};

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static void nap() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

/* Waits for all; 0: all have come. */
static int meet(seat *s, std::atomic<uint64_t> (&counts)[RANKS]) {
    const double end = now() + 1e-3 * s->timeout_ms;
    counts[s->rank] = s->calls;
    for (int r = 0; r < s->world; r++)
        while (counts[r] < s->calls) {
            if (s->all->gone[r] || now() > end) {
                snprintf(s->why, sizeof s->why, "rank %d %s", r, s->all->gone[r] ? "is gone" : "has not come");
                return 1;
            }
            nap();
        }
    return 0;
}
/* Sums in the order of ranks. */
static int host_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *) {
    seat *s = (seat *)user;
    if (count > HOST_ROOM || dtype != AMP_F32) return 1;
    s->calls++;
    for (int64_t i = 0; i < count; i++) s->all->host[s->rank][i] = (double)((float *)data)[i];
    if (meet(s, s->all->came) != 0) return 1;
    for (int64_t i = 0; i < count; i++) {
        double x = s->all->host[0][i];
        for (int r = 1; r < s->world; r++)
            x = op == AMP_REDUCE_SUM ? x + s->all->host[r][i] : std::max(x, s->all->host[r][i]);
        ((float *)data)[i] = (float)x;
    }
    return meet(s, s->all->left);
}
static const char *host_error(void *user) { return ((seat *)user)->why; }
static const amp_exchanges host_calls = {NULL, NULL, NULL, NULL, NULL, NULL, host_error};

static amp_reducer reducer_of(seat *s) {
    amp_reducer r = {};
    r.reduce = host_reduce;
    r.user = s;
    r.rank = s->rank;
    r.world = s->world;
    r.on_host = 1;
    r.one_thread = 1;
    r.calls = &host_calls;
    return r;
}

/* The model lies beside this program, or a folder above.  Once it is loaded, its name finds it. */
static coc_nccl_state *load_nccl() {
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 32);
    if (n <= 0) return NULL;
    path[n] = 0;
    const std::string folder(path, strrchr(path, '/') + 1);
    void *library = dlopen((folder + "coc_nccl.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) library = dlopen((folder + "../coc_nccl.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    CHECK_MSG(library != NULL, "%s", dlerror());
    return library ? (coc_nccl_state *)dlsym(library, "coc_nccl") : NULL;
}

/* ---- All calls, at the backend's table */

struct linked {
    const amp_backend *backend = amp_cuda();
    void *dev = NULL;
    amp_reducer r = {};
    std::vector<void *> memory;

    amp_result open(int rank, int world, const void *id, int device = 0) {
        amp_backend_desc d = {};
        amp_k_communicator args = {};
        d.device = device;
        amp_result result = backend->open(&dev, cuda_host(), &d);
        args.rank = rank;
        args.world = world;
        args.timeout_ms = 20000;
        args.id = id;
        return result != AMP_OK ? result : backend->communicator(dev, &args, &r);
    }
    ~linked() {
        for (void *p : memory) backend->free(dev, p, 0);
        if (dev) backend->close(dev);
    }
    void *put(const void *data, size_t bytes) {
        void *p = NULL;
        CHECK(backend->alloc(dev, &p, bytes) == AMP_OK && backend->copy(dev, p, data, bytes, AMP_COPY_TO_DEVICE, NULL) == AMP_OK);
        memory.push_back(p);
        return p;
    }
    template <class T> T *put(const std::vector<T> &v) { return (T *)put(v.data(), v.size() * sizeof(T)); }
    std::string get(const void *p, size_t bytes) {
        std::string out(bytes, 0);
        CHECK(backend->copy(dev, &out[0], p, bytes, AMP_COPY_TO_HOST, NULL) == AMP_OK);
        CHECK_MSG(backend->stream_sync(dev, NULL) == AMP_OK, "%s", cuda_error_text());
        return out;
    }
};

static double number(int rank, int64_t i) { return (double)(amp_random_u32((uint64_t)rank + 3, (uint64_t)i) % 2001) / 16 - 62.5; }
static std::string stored(int rank, int64_t n, amp_dtype dtype) {
    std::vector<float> x((size_t)n);
    for (int64_t i = 0; i < n; i++) x[(size_t)i] = (float)number(rank, i);
    return cuda_stored(x, dtype);
}
/* The sum over ranks of what is stored, with the bound of one rounding a hop; the largest for MAX. */
static void check_numbers(const std::string &got, int64_t n, int64_t first, amp_dtype dtype, int world, int64_t all, bool largest) {
    for (int64_t i = 0; i < n; i++) {
        double expected = 0, magnitude = 0, x = cuda_value(got.data(), dtype, (size_t)i);
        for (int r = 0; r < world; r++) {
            double y = cuda_value(stored(r, all, dtype).data(), dtype, (size_t)(first + i));
            expected = largest ? (r == 0 ? y : std::max(expected, y)) : expected + y;
            magnitude += fabs(y);
        }
        double bound = largest ? 0 : (world - 1) * cuda_spacing(dtype, magnitude) / 2;
        CHECK_MSG(fabs(x - expected) <= bound, "%s number %lld: %.9g, not %.9g within %.3g", amp_dtype_name(dtype), (long long)(first + i),
                  x, expected, bound);
        if (fabs(x - expected) > bound) return;
    }
}

static void reduces(linked &l, int rank, int world) {
    for (amp_dtype dtype : {AMP_F32, AMP_F64, AMP_F16, AMP_BF16})
        for (amp_reduce_op op : {AMP_REDUCE_SUM, AMP_REDUCE_MAX})
            for (int64_t n : {(int64_t)1, (int64_t)77}) {
                const size_t size = amp_dtype_size(dtype);
                std::string mine = stored(rank, world * n, dtype);
                void *whole = l.put(mine.data(), mine.size()), *in = l.put(mine.data(), mine.size());
                void *part = (char *)in + (size_t)(rank * n) * size;
                CHECK_MSG(l.r.reduce(l.r.user, whole, world * n, dtype, op, NULL) == 0, "%s", cuda_error_text());
                CHECK(l.r.calls->reduce_scatter(l.r.user, in, part, n, dtype, op, NULL) == 0);
                check_numbers(l.get(whole, mine.size()), world * n, 0, dtype, world, world * n, op == AMP_REDUCE_MAX);
                check_numbers(l.get(part, (size_t)n * size), n, rank * n, dtype, world, world * n, op == AMP_REDUCE_MAX);
            }
    /* NaN is the largest, whoever has it; -0 is below 0, and infinities are numbers. */
    const float nan = NAN, inf = INFINITY;
    std::vector<float> odd = {rank == world - 1 ? nan : 5.0f, rank == 0 ? nan : inf, -(float)(rank + 2), rank == 0 ? -inf : -0.0f,
                              rank == 0 ? 0.0f : -0.0f};
    float *d = l.put(odd), got[5];
    CHECK(l.r.reduce(l.r.user, d, 5, AMP_F32, AMP_REDUCE_MAX, NULL) == 0);
    memcpy(got, l.get(d, sizeof got).data(), sizeof got);
    CHECK(got[0] != got[0] && got[1] != got[1] && got[2] == -2 && got[3] == (world > 1 ? 0 : -inf) && !signbit(got[4]));
}

static void moves(linked &l, int rank, int world) {
    const int64_t each = 45;
    const size_t all = (size_t)(world * each);
    std::vector<unsigned char> mine(all), whole(all, 0xEE);
    for (size_t i = 0; i < all; i++) mine[i] = (unsigned char)(rank * 50 + (int)i % 47);
    unsigned char *in = l.put(mine), *gathered = l.put(mine), *exchanged = l.put(whole), *cast = l.put(mine);
    CHECK(l.r.calls->all_gather(l.r.user, gathered + rank * each, gathered, each, NULL) == 0);
    CHECK(l.r.calls->all_to_all(l.r.user, in, exchanged, each, NULL) == 0);
    CHECK(l.r.calls->broadcast(l.r.user, cast, (int64_t)all, world - 1, NULL) == 0);
    std::string a = l.get(gathered, all), b = l.get(exchanged, all), c = l.get(cast, all);
    for (size_t i = 0; i < all; i++) {
        int from = (int)(i / (size_t)each), k = (int)(i % (size_t)each);
        CHECK_EQ((unsigned char)a[i], (unsigned char)(from * 50 + (from * (int)each + k) % 47));
        CHECK_EQ((unsigned char)b[i], (unsigned char)(from * 50 + (rank * (int)each + k) % 47));
        CHECK_EQ((unsigned char)c[i], (unsigned char)((world - 1) * 50 + (int)i % 47));
    }
}

/* More calls than go together at once, of every kind, on a stream of their own; then one that is empty. */
static void groups(linked &l, int rank, int world) {
    std::vector<float *> sums;
    void *stream = NULL;
    CHECK(l.backend->stream_sync(l.dev, NULL) == AMP_OK && l.backend->stream_create(l.dev, &stream) == AMP_OK);
    std::vector<float> one(9, (float)(rank + 1)), parts((size_t)(2 * world), (float)(rank + 1));
    float *gathered = l.put(parts), *largest = l.put(one);
    for (int i = 0; i < 90; i++) sums.push_back(l.put(one));
    CHECK(l.backend->stream_sync(l.dev, NULL) == AMP_OK);
    CHECK(l.r.calls->group_begin(l.r.user, stream) == 0);
    for (float *p : sums) CHECK(l.r.reduce(l.r.user, p, 9, AMP_F32, AMP_REDUCE_SUM, stream) == 0);
    CHECK(l.r.reduce(l.r.user, largest, 9, AMP_F32, AMP_REDUCE_MAX, stream) == 0);
    CHECK(l.r.calls->all_gather(l.r.user, gathered + 2 * rank, gathered, 8, stream) == 0);
    CHECK(l.r.reduce(l.r.user, largest, 0, AMP_F32, AMP_REDUCE_SUM, stream) == 0);
    CHECK(l.r.calls->group_end(l.r.user, stream) == 0);
    CHECK(l.r.calls->group_begin(l.r.user, stream) == 0 && l.r.calls->group_end(l.r.user, stream) == 0);
    CHECK(l.backend->stream_sync(l.dev, stream) == AMP_OK);
    for (float *p : sums) {
        float x[9];
        memcpy(x, l.get(p, sizeof x).data(), sizeof x);
        CHECK_EQ(x[0], world * (world + 1) / 2);
        CHECK_EQ(x[8], world * (world + 1) / 2);
    }
    float x[9], y[2 * RANKS];
    memcpy(x, l.get(largest, sizeof x).data(), sizeof x);
    memcpy(y, l.get(gathered, (size_t)(8 * world)).data(), (size_t)(8 * world));
    CHECK_EQ(x[4], world);
    for (int i = 0; i < 2 * world; i++) CHECK_EQ(y[i], i / 2 + 1);
    int32_t number = 1;
    CHECK(l.r.reduce(l.r.user, l.put(&number, 4), 1, AMP_I32, AMP_REDUCE_SUM, NULL) == AMP_ERR_DTYPE);
    CHECK_MSG(strstr(cuda_error_text(), "F16") != NULL, "%s", cuda_error_text());
    l.backend->stream_destroy(l.dev, stream);
}

/* ---- Training: two linears, cross-entropy, SGD with momentum and decay; a third weight that no rank uses */

enum { IN = 24, HIDDEN = 40, CLASSES = 10, ROWS = 6, STEPS = 3, SPARE = 5 };

#define TRY(call) do { amp_result tried = (call); if (tried != AMP_OK) return tried; } while (0)

/* A reducer in front of another that measures how far the mean gradient moves, and how much larger its parts are. */
struct measured {
    amp_reducer inner;
    double condition = 1, travelled = 0;
};
static double norm_of(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}
static int measured_reduce(void *user, void *data, int64_t n, amp_dtype dtype, amp_reduce_op op, void *stream) {
    measured *m = (measured *)user;
    double before = dtype == AMP_F32 ? norm_of((const float *)data, n) : 0;
    int code = m->inner.reduce(m->inner.user, data, n, dtype, op, stream);
    if (code != 0 || dtype != AMP_F32 || op != AMP_REDUCE_SUM || n < 8) return code;
    double after = norm_of((const float *)data, n);
    if (after > 0) m->condition = std::max(m->condition, m->inner.world * before / after);
    m->travelled += after / m->inner.world;
    return code;
}

struct plan {
    int steps = STEPS, limit_ms = PATIENT_MS;
    bool capture = false, sharded = false;      /* sharded: in several buckets, in the order of ranks */
    amp_dtype dtype = AMP_F32;                  /* of weights and gradients */
    int stop_rank = -1, stop_step = -1;         /* this rank's process ends there */
    bool sleeps = false;                        /* or hangs there instead */
    int other_rank = -1;                        /* this rank's first weight has a row more */
    std::function<void(int step)> before = [](int) {};
    int done = 0;                               /* steps that did not fail */
    std::vector<float> weights;
};

struct net {
    amp_context *amp = NULL;
    amp_optimizer *optimizer = NULL;
    amp_scaler *scaler = NULL;
    amp_graph *graph = NULL;
    amp_param params[3];
    amp_linear_op hidden, head;
    amp_cross_entropy_op loss;
    void *x = NULL, *labels = NULL;
    net() {
        memset((void *)params, 0, sizeof params), memset((void *)&hidden, 0, sizeof hidden);
        memset((void *)&head, 0, sizeof head), memset((void *)&loss, 0, sizeof loss);
    }
    net(const net &) = delete;
    net &operator=(const net &) = delete;
    ~net() {
        amp_graph_destroy(graph);
        amp_optimizer_destroy(optimizer);
        amp_scaler_destroy(scaler);
        amp_close(amp);
    }
    amp_result room(amp_tensor *t, amp_dtype dtype, int64_t rows, int64_t cols) {
        void *p;
        TRY(amp_alloc(amp, &p, rows * cols * (int64_t)amp_dtype_size(dtype)));
        *t = cols == 0 ? amp_tensor1(p, dtype, rows) : amp_tensor2(p, dtype, rows, cols);
        return AMP_OK;
    }
    amp_result parameter(int i, const char *name, int64_t rows, int64_t cols, amp_dtype dtype) {
        std::string values = cuda_stored(cuda_random(rows * cols, (uint64_t)i + 1, -0.3f, 0.3f), dtype);
        params[i].name = name;
        TRY(room(&params[i].weight, dtype, rows, cols));
        TRY(room(&params[i].grad, dtype, rows, cols));
        TRY(amp_copy(amp, params[i].weight.data, values.data(), (int64_t)values.size(), AMP_COPY_TO_DEVICE));
        return amp_sync(amp);
    }
    amp_result open(const amp_desc &d, const plan &p, int more) {
        amp_optimizer_desc o = {};
        amp_scaler_desc s = {};
        void *q;
        TRY(amp_open(&amp, &d));
        TRY(parameter(0, "hidden.weight", HIDDEN + more, IN, p.dtype));
        TRY(parameter(1, "head.weight", CLASSES, HIDDEN + more, p.dtype));
        TRY(parameter(2, "spare.weight", SPARE, SPARE, p.dtype));
        TRY(amp_param_register(amp, params, 3));
        TRY(room(&hidden.x, AMP_F32, ROWS, IN));
        TRY(room(&hidden.y, AMP_F32, ROWS, HIDDEN + more));
        TRY(room(&head.y, AMP_F32, ROWS, CLASSES));
        TRY(room(&loss.dlogits, AMP_F32, ROWS, CLASSES));
        TRY(room(&head.dx, AMP_F32, ROWS, HIDDEN + more));
        TRY(amp_alloc(amp, &labels, ROWS * 4));
        TRY(amp_alloc(amp, &q, 4));
        x = hidden.x.data;
        hidden.weight = &params[0], hidden.act = AMP_ACT_RELU;
        head.x = hidden.y, head.weight = &params[1], head.dy = loss.dlogits, hidden.dy = head.dx;
        loss.logits = head.y, loss.labels = (const int32_t *)labels, loss.loss = (float *)q;
        o.params = params, o.n_params = 3, o.lr = 0.1, o.kind = AMP_SGD, o.momentum = 0.5, o.result_lag = AMP_LAG_NONE;
        o.weight_decay = 0.01;
        if (p.sharded) o.shard = AMP_SHARD_STATES, o.deterministic = 1, o.bucket_bytes = 2048;
        s.init_scale = 256;
        TRY(amp_scaler_create(amp, &scaler, &s));
        return amp_optimizer_create(amp, &optimizer, &o);
    }
    amp_result batch(int step, int rank) {
        std::vector<float> rows = cuda_random(ROWS * IN, (uint64_t)(1000 + step * RANKS + rank));
        std::vector<int32_t> classes(ROWS);
        for (size_t i = 0; i < ROWS; i++) classes[i] = (int32_t)(rows[i * IN] < 0 ? i % 3 : 5 + i % 4);
        TRY(amp_copy(amp, x, rows.data(), ROWS * IN * 4, AMP_COPY_TO_DEVICE));
        TRY(amp_copy(amp, labels, classes.data(), ROWS * 4, AMP_COPY_TO_DEVICE));
        return amp_sync(amp);
    }
    amp_result step() {
        loss.grad_scale = amp_scaler_scale_ptr(scaler);
        TRY(amp_linear(amp, &hidden));
        TRY(amp_linear(amp, &head));
        TRY(amp_cross_entropy(amp, &loss));
        TRY(amp_linear_backward(amp, &head));
        TRY(amp_linear_backward(amp, &hidden));
        return amp_step(optimizer, scaler);
    }
    amp_result capture() {
        TRY(amp_graph_begin(amp));
        amp_result result = step(), ended = amp_graph_end(amp, &graph);
        return result != AMP_OK ? result : ended;
    }
    /* Of 16-bit weights the masters. */
    amp_result read(std::vector<float> *out) {
        for (int i = 0; i < 3; i++) {
            size_t at = out->size(), n = (size_t)amp_tensor_count(&params[i].weight);
            out->resize(at + n);
            TRY(amp_copy(amp, &(*out)[at], params[i].master ? params[i].master : params[i].weight.data, (int64_t)n * 4, AMP_COPY_TO_HOST));
        }
        return amp_sync(amp);
    }
};

static amp_result train(const amp_desc &d, plan *p) {
    const int rank = d.reducer.rank;
    amp_desc own = d;
    net n;
    if (p->dtype != AMP_F32) own.dtype = p->dtype, own.level = AMP_LEVEL_O2;
    TRY(n.open(own, *p, rank == p->other_rank ? 1 : 0));
    for (int step = 0; step < p->steps; step++) {
        if (rank == p->stop_rank && step == p->stop_step) {
            if (p->sleeps) sleep(3600);
            _exit(0);
        }
        p->before(step);
        TRY(n.batch(step, rank));
        if (p->capture && step == 1) TRY(n.capture());
        TRY(n.graph != NULL ? amp_graph_launch(n.graph) : n.step());
        for (amp_step_result o; amp_step_result_next(n.optimizer, &o);) CHECK(o.applied);
        TRY(amp_sync(n.amp));
        p->done++;
    }
    TRY(n.read(&p->weights));
    const std::string start = cuda_stored(cuda_random(SPARE * SPARE, 3, -0.3f, 0.3f), p->dtype);
    for (size_t i = 0; i < SPARE * SPARE; i++)
        CHECK_EQ(p->weights[p->weights.size() - SPARE * SPARE + i], cuda_value(start.data(), p->dtype, i));
    return AMP_OK;
}

static amp_desc on_gpu(const amp_reducer &r, int nccl_ms) {
    amp_desc d = {};
    d.backend = amp_cuda();
    d.dtype = AMP_F32;
    d.threads = 1;
    d.reducer = r;
    d.reduce_on_device = nccl_ms > 0;
    d.reduce_timeout_ms = nccl_ms;
    return d;
}

/* ---- What a process does */

struct rank_run {
    shared *all;
    int rank, world;
    coc_nccl_state *nccl;
    seat place;
    amp_reducer reducer() { return reducer_of(&place); }
    void save(amp_result result) {
        if (result != AMP_OK) snprintf(all->text[rank], sizeof all->text[rank], "%s", amp_last_error());
        all->result[rank] = (int)result;
    }
    void train_and_save(plan p) {
        const double began = now();
        place.timeout_ms = p.limit_ms;
        save(train(on_gpu(reducer(), p.limit_ms), &p));
        all->seconds[rank] = now() - began;
        all->steps[rank] = p.done;
        if (p.weights.size() <= WEIGHTS) std::copy(p.weights.begin(), p.weights.end(), all->weights[rank]);
    }
};

static void run_calls(rank_run &me) {
    linked l;
    char *id = me.all->id;
    if (me.rank == 0) {
        linked maker;
        amp_backend_desc d = {};
        CHECK(maker.backend->open(&maker.dev, cuda_host(), &d) == AMP_OK);
        CHECK_MSG(maker.backend->communicator_id(maker.dev, id) == AMP_OK, "%s", cuda_error_text());
        me.all->has_id = 1;
    }
    while (!me.all->has_id) nap();
    CHECK_MSG(l.open(me.rank, me.world, id) == AMP_OK, "%s", cuda_error_text());
    if (l.r.reduce == NULL) return;
    reduces(l, me.rank, me.world);
    moves(l, me.rank, me.world);
    groups(l, me.rank, me.world);
}
static void run_training(rank_run &me) { me.train_and_save(plan()); }
static void run_captured(rank_run &me) {
    plan p;
    p.capture = true;
    coc_set_schedule(COC_EAGER);
    me.train_and_save(p);
}
static void run_sharded(rank_run &me) {
    plan p;
    p.capture = p.sharded = true;
    me.train_and_save(p);
}
static void run_bf16(rank_run &me) {
    plan p;
    p.dtype = AMP_BF16;
    me.train_and_save(p);
}
static void run_dies(rank_run &me) {
    plan p;
    p.stop_rank = 1, p.stop_step = 2, p.limit_ms = LIMIT_MS;
    me.train_and_save(p);
}
static void run_dies_in_graph(rank_run &me) {
    plan p;
    p.stop_rank = 1, p.stop_step = 2, p.limit_ms = LIMIT_MS;
    p.capture = true;
    me.train_and_save(p);
}
static void run_hangs(rank_run &me) {
    plan p;
    p.stop_rank = 1, p.stop_step = 2, p.limit_ms = LIMIT_MS;
    p.sleeps = true;
    me.train_and_save(p);
}
static void run_disagrees(rank_run &me) {
    plan p;
    p.other_rank = 1;
    me.train_and_save(p);
}
/* NCCL's own report of a broken network, on rank 1. */
static void run_network(rank_run &me) {
    plan p;
    p.limit_ms = LIMIT_MS;
    p.before = [&](int step) { if (me.rank == 1 && step == 1) me.nccl->async_error = 6; };
    me.train_and_save(p);
}
/* Rank 1 takes the id and dies. */
static void run_never_joins(rank_run &me) {
    if (me.rank == 1) {
        float said[AMP_COMMUNICATOR_ID + 1] = {};
        me.place.calls = 0;
        (void)host_reduce(&me.place, said, AMP_COMMUNICATOR_ID + 1, AMP_F32, AMP_REDUCE_SUM, NULL);
        return;
    }
    plan p;
    p.limit_ms = LIMIT_MS;
    me.train_and_save(p);
}
static void run_no_id(rank_run &me) {
    me.nccl->fail_id = 1;
    me.train_and_save(plan());
}
static void run_old(rank_run &me) {
    me.nccl->version = me.rank == 0 ? 21304 : 2808;
    me.train_and_save(plan());
}
static void run_one_old(rank_run &me) {
    if (me.rank == 1) me.nccl->version = 21304;
    me.train_and_save(plan());
}
static void run_damaged(rank_run &me) { me.train_and_save(plan()); }

static const struct scenario { const char *name; void (*run)(rank_run &me); bool without; } scenarios[] = {
    {"calls", run_calls, false}, {"training", run_training, false}, {"captured", run_captured, false},
    {"sharded", run_sharded, false}, {"bf16", run_bf16, false}, {"dies", run_dies, false}, {"dies_in_graph", run_dies_in_graph, false},
    {"hangs", run_hangs, false}, {"disagrees", run_disagrees, false}, {"network", run_network, false},
    {"never_joins", run_never_joins, false}, {"no_id", run_no_id, false}, {"old", run_old, false},
    {"one_old", run_one_old, false}, {"damaged", run_damaged, true},
};

static int rank_main(const char *name, int rank, int world, int file) {
    void *p = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (p == MAP_FAILED) return 2;
    shared *all = (shared *)p;
    ampt.name = name;
    for (const scenario &s : scenarios) {
        if (strcmp(s.name, name) != 0) continue;
        coc_set_devices(1, (size_t)1 << 28, 1);
        rank_run me = {all, rank, world, s.without ? NULL : load_nccl(), {all, rank, world, PATIENT_MS}};
        s.run(me);
        coc_check_red_zones();
        if (all->result[rank] == AMP_OK) CHECK_MSG(coc_faults() == 0, "%s", coc_fault_text().c_str());
        if (me.nccl) CHECK_EQ(me.nccl->communicators, 0);
    }
    all->failures[rank] = ampt.failures;
    fflush(stdout);
    return ampt.failures != 0;
}

/* ---- Processes, and what they left */

struct family {
    shared *all;
    int world;
    double seconds;
    family(const char *name, int n) : world(n) {
        const double began = now();
        int file = (int)syscall(SYS_memfd_create, "ranks", 0u), left = n;
        pid_t children[RANKS];
        CHECK(file >= 0 && ftruncate(file, sizeof(shared)) == 0);
        all = (shared *)mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        pid_t first = 0;
        for (int r = 0; r < n; r++) {
            std::string rank = std::to_string(r), worlds = std::to_string(n), files = std::to_string(file);
            fflush(stdout);
            children[r] = fork();
            if (children[r] == 0) {
                setenv("OMP_NUM_THREADS", "1", 1);
                execl("/proc/self/exe", "t_cuda_nccl", "--rank", name, rank.c_str(), worlds.c_str(), files.c_str(), (char *)NULL);
                _exit(127);
            }
            if (r == 0) first = children[r];
        }
        while (left > 0) {
            int status;
            for (int r = 0; r < n; r++) {
                if (children[r] == 0 || waitpid(children[r], &status, WNOHANG) != children[r]) continue;
                all->gone[r] = 1;
                children[r] = 0;
                left--;
                CHECK_MSG(WIFSIGNALED(status) || WEXITSTATUS(status) == 0, "%s: rank %d failed %d checks, exit %d", name, r,
                          all->failures[r], WEXITSTATUS(status));
            }
            if (left > 0 && now() - began > 120) CHECK_MSG(false, "%s: a rank hangs", name);
            if ((left == 1 && !strcmp(name, "hangs")) || now() - began > 120)
                for (int r = 0; r < n; r++)
                    if (children[r] != 0) kill(children[r], SIGKILL);
            nap();
        }
        seconds = now() - began;
        unlink(("/dev/shm/coc_nccl_" + std::to_string(first) + "_0").c_str());      /* where not all have joined */
        close(file);
    }
    ~family() { munmap((void *)all, sizeof(shared)); }
    family(const family &) = delete;
    family &operator=(const family &) = delete;
    void check_all_same() const {
        for (int r = 0; r < world; r++) {
            CHECK_MSG(all->result[r] == AMP_OK, "rank %d: %s", r, all->text[r]);
            CHECK_EQ(all->steps[r], STEPS);
            CHECK_MSG(memcmp(all->weights[r], all->weights[0], sizeof all->weights[0]) == 0, "rank %d has other weights", r);
        }
        CHECK(norm_of(all->weights[0], WEIGHTS) > 1);
    }
    void check_error(int rank, amp_result result, const char *part) const {
        CHECK_MSG(all->result[rank] == (int)result && strstr(all->text[rank], part) != NULL, "rank %d: %d, \"%s\" has no \"%s\"",
                  rank, all->result[rank], all->text[rank], part);
    }
};

/* The same training over the host, by threads of this process. */
static std::vector<float> by_amp_ranks(int world, double *bound) {
    amp_ranks *ranks = NULL;
    amp_ranks_desc rd = {};
    std::vector<plan> plans((size_t)world);
    std::vector<measured> reducers((size_t)world);
    std::vector<std::thread> threads;
    coc_set_devices(world, (size_t)1 << 28, 1);
    rd.world = world;
    CHECK_OK(amp_ranks_create(&ranks, &rd));
    for (int r = 0; r < world; r++)
        threads.emplace_back([&, r] {
            measured *m = &reducers[(size_t)r];
            amp_reducer front = {};
            CHECK_OK(amp_ranks_reducer(ranks, r, &m->inner));
            front.reduce = measured_reduce, front.user = m, front.rank = r, front.world = world, front.on_host = 1;
            amp_desc d = on_gpu(front, 0);
            d.device = r;
            CHECK_OK(train(d, &plans[(size_t)r]));
        });
    for (std::thread &t : threads) t.join();
    amp_ranks_destroy(ranks);
    /* A sum of `world` numbers has world - 1 roundings, each of 2^-24 of the magnitudes that are summed; the rule multiplies
       by lr / (1 - momentum), and a step passes on at most as much again as it got. */
    const double lr = 0.1 / (1 - 0.5);
    *bound = 2 * (world - 1) * ldexp(1, -24) * reducers[0].condition * lr * reducers[0].travelled / 256;
    return plans[0].weights;
}

/* ---- Tests */

#define MODEL_ONLY() do { if (!CUDA_IS_MODEL) SKIP("one GPU is one rank: processes are the model's"); } while (0)

TEST(two_processes_call) { MODEL_ONLY(); family("calls", 2); }
TEST(four_processes_call) { MODEL_ONLY(); family("calls", 4); }

/* Two numbers have one sum: the same bits as over the host, however the work is ordered, and from a graph. */
TEST(two_processes_train) {
    MODEL_ONLY();
    double bound;
    std::vector<float> host = by_amp_ranks(2, &bound);
    for (const char *name : {"training", "captured", "sharded"}) {
        family f(name, 2);
        f.check_all_same();
        CHECK_MSG(memcmp(f.all->weights[0], host.data(), host.size() * 4) == 0, "%s: not the bits of amp_ranks", name);
    }
    coc_reset();
}
TEST(four_processes_train) {
    MODEL_ONLY();
    double bound;
    std::vector<float> host = by_amp_ranks(4, &bound);
    family f("captured", 4);
    std::vector<float> off(host.size());
    f.check_all_same();
    for (size_t i = 0; i < off.size(); i++) off[i] = f.all->weights[0][i] - host[i];
    double norm = norm_of(off.data(), (int64_t)off.size());
    CHECK_MSG(norm <= bound, "%.3g from amp_ranks, at most %.3g", norm, bound);
    ampt_figure("nccl_four_ranks", norm, bound);
    coc_reset();
}
/* 16-bit gradients are rounded at each hop, and on all ranks alike. */
TEST(bf16_gradients) {
    MODEL_ONLY();
    family f("bf16", 2);
    f.check_all_same();
}

/* Ranks that are threads of one process, each with a GPU, joined by amp_ranks. */
TEST(two_threads_train) {
    MODEL_ONLY();
    double bound;
    std::vector<float> host = by_amp_ranks(2, &bound);
    coc_nccl_state *nccl = load_nccl();
    amp_ranks *ranks = NULL;
    amp_ranks_desc rd = {};
    std::vector<std::thread> threads;
    std::vector<plan> plans(2);
    rd.world = 2;
    CHECK_OK(amp_ranks_create(&ranks, &rd));
    for (int r = 0; r < 2; r++)
        threads.emplace_back([&, r] {
            amp_reducer reducer;
            CHECK_OK(amp_ranks_reducer(ranks, r, &reducer));
            amp_desc d = on_gpu(reducer, PATIENT_MS);
            d.device = r;
            plans[(size_t)r].capture = true;
            CHECK_OK(train(d, &plans[(size_t)r]));
        });
    for (std::thread &t : threads) t.join();
    amp_ranks_destroy(ranks);
    for (const plan &p : plans)
        CHECK(p.weights.size() == host.size() && memcmp(p.weights.data(), host.data(), host.size() * 4) == 0);
    CHECK_EQ(nccl->communicators, 0);
    cuda_test_end();
}

static void check_ended(const char *name, int world, const char *told) {
    family f(name, world);
    for (int r = 0; r < world; r++) {
        if (r == 1) continue;
        f.check_error(r, AMP_ERR_REDUCE, told);
        CHECK_MSG(f.all->seconds[r] < 1e-3 * (2 * LIMIT_MS) + 20, "%s: rank %d took %.1f s", name, r, f.all->seconds[r]);
        CHECK_MSG(f.all->steps[r] >= 1 && f.all->steps[r] <= 2, "%s: rank %d made %d steps", name, r, f.all->steps[r]);
    }
}
TEST(a_rank_that_dies) {
    MODEL_ONLY();
    check_ended("dies", 4, "rank 1 is gone");
}
TEST(a_rank_that_dies_in_a_graph) { MODEL_ONLY(); check_ended("dies_in_graph", 2, "rank 1 is gone"); }
TEST(a_rank_that_hangs) { MODEL_ONLY(); check_ended("hangs", 2, "rank 1 has not come"); }
TEST(a_rank_that_never_joins) {
    MODEL_ONLY();
    family f("never_joins", 2);
    f.check_error(0, AMP_ERR_REDUCE, "not all ranks have come within");
    f.check_error(0, AMP_ERR_REDUCE, "rank 1 is gone");
}
TEST(ranks_that_disagree) {
    MODEL_ONLY();
    family f("disagrees", 2);
    for (int r = 0; r < 2; r++) f.check_error(r, AMP_ERR_REDUCE, "parameter 0 (hidden.weight) of rank 1");
}
TEST(a_network_that_breaks) {
    MODEL_ONLY();
    family f("network", 2);
    f.check_error(1, AMP_ERR_REDUCE, "network error (NCCL's error 6)");
    f.check_error(0, AMP_ERR_REDUCE, "rank 0 of 2");
}

/* What is found first cannot be loaded, wherever else there may be one. */
TEST(no_nccl) {
    MODEL_ONLY();
    char folder[] = "/tmp/amp_no_nccl_XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    const std::string file = std::string(folder) + "/libnccl.so.2", text(4096, 'x'), before = getenv("LD_LIBRARY_PATH") ? getenv("LD_LIBRARY_PATH") : "";
    CHECK_OK(amp_file_write_atomic(NULL, file.c_str(), text.data(), text.size()));
    setenv("LD_LIBRARY_PATH", folder, 1);
    family f("damaged", 2);
    if (before.empty()) unsetenv("LD_LIBRARY_PATH");
    else setenv("LD_LIBRARY_PATH", before.c_str(), 1);
    for (int r = 0; r < 2; r++) {
        f.check_error(r, AMP_ERR_UNSUPPORTED, file.c_str());
        f.check_error(r, AMP_ERR_UNSUPPORTED, "amp_open");
    }
    unlink(file.c_str());
    rmdir(folder);
}
TEST(an_old_nccl) {
    MODEL_ONLY();
    family f("old", 2), g("one_old", 2), h("no_id", 2);
    f.check_error(0, AMP_ERR_UNSUPPORTED, "NCCL 2.13.4, and 2.14 or later is needed");
    f.check_error(1, AMP_ERR_UNSUPPORTED, "NCCL before 2.9");
    g.check_error(0, AMP_ERR_REDUCE, "1 of 2 ranks");
    g.check_error(1, AMP_ERR_UNSUPPORTED, "NCCL 2.13.4");
    h.check_error(0, AMP_ERR_UNSUPPORTED, "ncclGetUniqueId");
    h.check_error(1, AMP_ERR_REDUCE, "1 of 2 ranks");
}

TEST(refusals) {
    seat s = {NULL, 0, 2, LIMIT_MS};
    amp_desc d = on_gpu(reducer_of(&s), LIMIT_MS);
    amp_context *amp;
    d.reducer.on_host = 0;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_CONFLICT);
    d.reducer.on_host = 1;
    d.backend = amp_cpu();
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
    d.reduce_on_device = 2;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_RANGE);
    d.reduce_on_device = 1;
    d.reduce_timeout_ms = -1;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_RANGE);
}

/* One rank alone: all calls, over the model's NCCL or the GPU's own. */
CUDA_TEST(one_rank) {
    if (CUDA_IS_MODEL) (void)load_nccl();
    linked l;
    char id[AMP_COMMUNICATOR_ID];
    linked maker;
    amp_backend_desc d = {};
    CHECK(maker.backend->open(&maker.dev, cuda_host(), &d) == AMP_OK);
    amp_result result = maker.backend->communicator_id(maker.dev, id);
    if (result == AMP_ERR_UNSUPPORTED && !CUDA_IS_MODEL) SKIP(cuda_error_text());
    CHECK_MSG(result == AMP_OK && l.open(0, 1, id) == AMP_OK, "%s", cuda_error_text());
    if (l.r.reduce == NULL) return;
    reduces(l, 0, 1);
    moves(l, 0, 1);
    groups(l, 0, 1);
    /* captured, and launched twice: a sum over one rank changes nothing, and a copy shows that it was there */
    std::vector<float> one(64, 3.0f);
    float *x = l.put(one), *y = l.put(std::vector<float>(64, 0.0f));
    void *graph = NULL;
    CHECK(l.backend->stream_sync(l.dev, NULL) == AMP_OK && l.backend->graph_begin(l.dev, NULL) == AMP_OK);
    CHECK(l.r.reduce(l.r.user, x, 64, AMP_F32, AMP_REDUCE_SUM, NULL) == 0);
    CHECK(l.r.calls->all_gather(l.r.user, x, y, 256, NULL) == 0);
    CHECK_MSG(l.backend->graph_end(l.dev, NULL, &graph) == AMP_OK, "%s", cuda_error_text());
    for (int i = 0; i < 2 && graph != NULL; i++) CHECK(l.backend->graph_launch(l.dev, graph, NULL) == AMP_OK);
    CHECK(l.get(y, 256) == std::string((const char *)one.data(), 256));
    l.backend->graph_destroy(l.dev, graph);
}

/* A context whose stream and handle are the program's is closed before it has made any object, as when amp_open fails
   late. */
CUDA_TEST(close_leaves_the_communicator) {
    MODEL_ONLY();
    const coc_nccl_state *nccl = load_nccl();
    const amp_backend *backend = amp_cuda();
    linked maker;
    char id[AMP_COMMUNICATOR_ID];
    amp_backend_desc d = {};
    amp_k_communicator args = {};
    amp_reducer r = {};
    void *dev = NULL;
    cudaStream_t stream;
    cublasLtHandle_t blas;
    CHECK(maker.backend->open(&maker.dev, cuda_host(), &d) == AMP_OK);
    CHECK(maker.backend->communicator_id(maker.dev, id) == AMP_OK);
    CHECK(cudaStreamCreate(&stream) == cudaSuccess && cublasLtCreate(&blas) == CUBLAS_STATUS_SUCCESS);
    d.stream = stream;
    d.blas = blas;
    CHECK(backend->open(&dev, cuda_host(), &d) == AMP_OK);
    args.world = 1;
    args.timeout_ms = 20000;
    args.id = id;
    CHECK_MSG(backend->communicator(dev, &args, &r) == AMP_OK, "%s", cuda_error_text());
    const int before = nccl->communicators;
    backend->close(dev);
    CHECK(before > 0);
    CHECK_EQ(nccl->communicators, before - 1);
    cublasLtDestroy(blas);
    cudaStreamDestroy(stream);
}

/* Threads that launch graphs with reductions at the same time, each its own: every launch has an event to itself. */
CUDA_TEST(threads_launch_reductions) {
    MODEL_ONLY();
    enum { THREADS = 4, LAUNCHES = 40 };
    (void)load_nccl();
    linked maker, l;
    char id[AMP_COMMUNICATOR_ID];
    amp_backend_desc d = {};
    CHECK(maker.backend->open(&maker.dev, cuda_host(), &d) == AMP_OK);
    CHECK(maker.backend->communicator_id(maker.dev, id) == AMP_OK && l.open(0, 1, id) == AMP_OK);
    if (l.r.reduce == NULL) return;
    float *x = l.put(std::vector<float>(8, 3.0f));
    void *graphs[THREADS] = {}, *streams[THREADS] = {};
    CHECK(l.backend->stream_sync(l.dev, NULL) == AMP_OK);
    for (int i = 0; i < THREADS; i++) {
        CHECK(l.backend->stream_create(l.dev, &streams[i]) == AMP_OK && l.backend->graph_begin(l.dev, NULL) == AMP_OK);
        CHECK(l.r.reduce(l.r.user, x, 8, AMP_F32, AMP_REDUCE_SUM, NULL) == 0);
        CHECK(l.backend->graph_end(l.dev, NULL, &graphs[i]) == AMP_OK);
    }
    std::vector<std::thread> threads;
    std::vector<int> failed(THREADS);
    coc_set_yielding(1);
    for (int i = 0; i < THREADS; i++)
        threads.emplace_back([&, i] {
            for (int k = 0; k < LAUNCHES; k++) {
                failed[(size_t)i] += l.backend->graph_launch(l.dev, graphs[i], streams[i]) != AMP_OK;
                if (k % 8 == 7) failed[(size_t)i] += l.backend->stream_sync(l.dev, streams[i]) != AMP_OK;
            }
        });
    for (std::thread &t : threads) t.join();
    coc_set_yielding(0);
    for (int i = 0; i < THREADS; i++) {
        CHECK_EQ(failed[(size_t)i], 0);
        l.backend->stream_destroy(l.dev, streams[i]);
        l.backend->graph_destroy(l.dev, graphs[i]);
    }
}

int main(int argc, char **argv) {
    if (argc == 6 && !strcmp(argv[1], "--rank")) return rank_main(argv[2], atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    TEST_BEGIN(argc, argv);
    RUN(two_processes_call);
    RUN(four_processes_call);
    RUN(two_processes_train);
    RUN(four_processes_train);
    RUN(bf16_gradients);
    RUN(two_threads_train);
    RUN(a_rank_that_dies);
    RUN(a_rank_that_dies_in_a_graph);
    RUN(a_rank_that_hangs);
    RUN(a_rank_that_never_joins);
    RUN(ranks_that_disagree);
    RUN(a_network_that_breaks);
    RUN(no_nccl);
    RUN(an_old_nccl);
    RUN(refusals);
    RUN(one_rank);
    RUN(close_leaves_the_communicator);
    RUN(threads_launch_reductions);
    return TEST_END();
}
