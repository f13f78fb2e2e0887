/* t_concurrency.c - tests the loader and regions with several threads and random delays at every lock, wait, read and
 * allocation.  The delays come from a layer around these calls that yields and sleeps at random, from one seed after
 * another.  Further tests close objects from another thread, open and close a thousand times without leaving anything
 * behind, and measure memory over ten thousand batches.
 *
 * The layer itself synchronises nothing.  Therefore ThreadSanitizer sees only the synchronisation of the library. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

#if defined(__has_feature)
#  if __has_feature(thread_sanitizer)
#    define THREAD_SANITIZER 1
#  elif __has_feature(address_sanitizer)
#    define ADDRESS_SANITIZER 1
#  endif
#endif
#if defined(__SANITIZE_THREAD__)
#  define THREAD_SANITIZER 1
#elif defined(__SANITIZE_ADDRESS__)
#  define ADDRESS_SANITIZER 1
#endif
#if defined(THREAD_SANITIZER)
enum { SEEDS = 1000 };
#else
enum { SEEDS = 60 };
#endif
#if defined(THREAD_SANITIZER) || defined(ADDRESS_SANITIZER)
enum { OWN_HEAP = 1 };              /* the sanitizer's: it keeps what was freed */
#else
enum { OWN_HEAP = 0 };
#endif

/* ---- The schedule: each thread draws from a sequence of its own, begun anew with each seed */

static uint64_t schedule_seed;      /* 0: nobody interferes */
static uint32_t schedule_threads;

static uint64_t mix(uint64_t x) {   /* the finaliser of SplitMix64 */
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint32_t chance(void) {
    static __thread uint64_t state, of_seed;
    uint64_t seed = __atomic_load_n(&schedule_seed, __ATOMIC_RELAXED);
    if (of_seed != seed) {
        of_seed = seed;
        state = mix(seed) + (uint64_t)__atomic_fetch_add(&schedule_threads, 1, __ATOMIC_RELAXED);
    }
    state += UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)(mix(state) >> 32);
}

static void sleep_ns(long ns) {
    struct timespec t;
    t.tv_sec = 0;
    t.tv_nsec = ns;
    nanosleep(&t, NULL);
}

static void interfere(void) {
    uint32_t x;
    if (__atomic_load_n(&schedule_seed, __ATOMIC_RELAXED) == 0) return;
    x = chance();
    if (x % 64 == 0) sleep_ns((long)(x >> 8) % 200000);
    else if (x % 4 == 0) sched_yield();
}

/* POSIX lets a wait end for no reason, and a signal wake several. */
static int for_no_reason(pthread_mutex_t *lock) {
    if (__atomic_load_n(&schedule_seed, __ATOMIC_RELAXED) == 0 || chance() % 8 != 0) return 0;
    pthread_mutex_unlock(lock);
    interfere();
    pthread_mutex_lock(lock);
    return 1;
}
static int tried_lock(pthread_mutex_t *lock) { int r; interfere(); r = pthread_mutex_lock(lock); interfere(); return r; }
static int tried_unlock(pthread_mutex_t *lock) { int r; interfere(); r = pthread_mutex_unlock(lock); interfere(); return r; }
static int tried_wait(pthread_cond_t *c, pthread_mutex_t *lock) { return for_no_reason(lock) ? 0 : pthread_cond_wait(c, lock); }
static int tried_timedwait(pthread_cond_t *c, pthread_mutex_t *lock, const struct timespec *until) {
    return for_no_reason(lock) ? 0 : pthread_cond_timedwait(c, lock, until);
}
static int tried_signal(pthread_cond_t *c) {
    interfere();
    return chance() % 4 == 0 ? pthread_cond_broadcast(c) : pthread_cond_signal(c);
}
#define pthread_mutex_lock tried_lock
#define pthread_mutex_unlock tried_unlock
#define pthread_cond_wait tried_wait
#define pthread_cond_timedwait tried_timedwait
#define pthread_cond_signal tried_signal
#define AMP_IMPLEMENTATION
#include "../amp.h"
#undef pthread_mutex_lock
#undef pthread_mutex_unlock
#undef pthread_cond_wait
#undef pthread_cond_timedwait
#undef pthread_cond_signal
#include "test.h"
#include "recording_backend.h"
#if defined(__GLIBC__)
#  include <malloc.h>
#endif

/* ---- The machine: memory, files and threads, counted.  A block's size stands before it. */

static struct { int64_t live, peak, wrong, files, threads, read_gate, in_gate; } machine;

static int64_t count(int64_t *what, int64_t by) { return __atomic_add_fetch(what, by, __ATOMIC_RELAXED); }
static int64_t counted(int64_t *what) { return __atomic_load_n(what, __ATOMIC_RELAXED); }

/* Whoever opens a gate is done with the loader behind it. */
static int shut(int64_t *gate) { return __atomic_load_n(gate, __ATOMIC_ACQUIRE) != 0; }
static void open_gate(int64_t *gate) { __atomic_store_n(gate, 0, __ATOMIC_RELEASE); }

static void *counting_alloc(void *user, size_t size, size_t align) {
    size_t head = align < 64 ? 64 : align;
    char *block = NULL;
    int64_t live;
    (void)user;
    interfere();
    if (posix_memalign((void **)&block, head, head + size) != 0) return NULL;
    memcpy(block + head - sizeof size, &size, sizeof size);
    memcpy(block + head - 2 * sizeof size, &head, sizeof head);
    live = count(&machine.live, (int64_t)size);
    if (live > counted(&machine.peak)) __atomic_store_n(&machine.peak, live, __ATOMIC_RELAXED);
    return block + head;
}
static void counting_free(void *user, void *ptr, size_t size) {
    size_t was, head;
    (void)user;
    interfere();
    memcpy(&was, (char *)ptr - sizeof was, sizeof was);
    memcpy(&head, (char *)ptr - 2 * sizeof head, sizeof head);
    if (was != size) count(&machine.wrong, 1);
    count(&machine.live, -(int64_t)was);
    free((char *)ptr - head);
}
static int counting_open(void *user, const char *path, int for_writing, intptr_t *file) {
    int r = ampi_os_open(user, path, for_writing, file);
    if (r == 0) count(&machine.files, 1);
    return r;
}
static int counting_close(void *user, intptr_t file) { count(&machine.files, -1); return ampi_os_close(user, file); }

/* Reads that come late, bring less, or hang while the gate is shut. */
static int64_t interfering_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    interfere();
    if (counted(&machine.read_gate)) {
        count(&machine.in_gate, 1);
        while (shut(&machine.read_gate)) sleep_ns(200000);
        count(&machine.in_gate, -1);
    }
    if (counted((int64_t *)&schedule_seed) && bytes > 1 && chance() % 4 == 0) bytes = 1 + chance() % (bytes - 1);
    return ampi_os_read(user, file, buffer, bytes, offset);
}
static int counting_start(void *user, void **thread, void (*run)(void *arg), void *arg) {
    int r = ampi_os_thread_start(user, thread, run, arg);
    interfere();
    if (r == 0) count(&machine.threads, 1);
    return r;
}
static int counting_join(void *user, void *thread) { count(&machine.threads, -1); interfere(); return ampi_os_thread_join(user, thread); }
static int counting_detach(void *user, void *thread) { count(&machine.threads, -1); interfere(); return ampi_os_thread_detach(user, thread); }

static amp_desc counted_desc(void) {
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = AMP_BF16; d.allow_fallback = 1;
    d.threads = 1;
    d.system.alloc = counting_alloc; d.system.free = counting_free;
    d.system.file_open = counting_open; d.system.file_close = counting_close; d.system.file_read = interfering_read;
    d.system.thread_start = counting_start; d.system.thread_join = counting_join; d.system.thread_detach = counting_detach;
    return d;
}

/* A device of its own gets batches by copies. */
static amp_context *open_device(void) {
    amp_desc d = counted_desc();
    amp_context *amp = NULL;
    d.backend = recording_backend();
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

static amp_context *open_counted(const amp_desc *changed) {
    amp_desc d = counted_desc();
    amp_context *amp = NULL;
    CHECK_OK(amp_open(&amp, changed ? changed : &d));
    return amp;
}

/* Whether everything was given back; a worker that was left behind in a read may do that a little later. */
static int nothing_left(void) {
    for (int i = 0; i < 10000; i++) {
        if (counted(&machine.live) == 0 && counted(&machine.files) == 0 && counted(&machine.threads) == 0) return 1;
        sleep_ns(1000000);
    }
    return 0;
}

static void begin_schedule(uint64_t seed) {
    __atomic_store_n(&schedule_threads, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&schedule_seed, seed, __ATOMIC_RELAXED);
}

/* ---- Data: 60 samples in batches of 4, the j-th token of sample s is SEQ s + j */

enum { SEQ = 7, SAMPLES = 60, BATCH = 4, PER_EPOCH = SAMPLES / BATCH, EPOCHS = 3, KINDS = 3 };

static char folder[] = "/tmp/t_concurrency_XXXXXX", token_file[64], log_file[64], saved_file[64];
static int64_t source_gate, in_source;

static int read_sample(void *user, const amp_sample *sample, void *const *fields) {
    (void)user;
    interfere();
    if (counted(&source_gate)) {
        count(&in_source, 1);
        while (shut(&source_gate)) sleep_ns(200000);
        count(&in_source, -1);
    }
    for (int j = 0; j < SEQ; j++) {
        ((int32_t *)fields[0])[j] = (int32_t)sample->sample * SEQ + j;
        ((int32_t *)fields[1])[j] = (int32_t)sample->sample * SEQ + j + 1;
    }
    return 0;
}

/* kind 0: a token file in order, 1: shuffled, through the cache, 2: a shuffled callback. */
static amp_loader *open_loader(amp_context *amp, int kind, int workers, int prefetch) {
    amp_loader *l = NULL;
    amp_loader_desc d;
    amp_source source;
    memset(&d, 0, sizeof d); memset(&source, 0, sizeof source);
    d.batch = BATCH; d.workers = workers; d.prefetch = prefetch;
    d.shuffle = kind > 0; d.seed = 3;
    source.read = read_sample; source.samples = SAMPLES; source.n_fields = 2;
    source.fields[0].dtype = source.fields[1].dtype = AMP_I32;
    source.fields[0].count = source.fields[1].count = SEQ;
    if (kind == 2) d.source = &source;
    else { d.path = token_file; d.format = AMP_TOKENS_U16; d.seq = SEQ; }
    CHECK_OK(amp_loader_create(amp, &l, &d));
    return l;
}

static int32_t expected[KINDS][EPOCHS * PER_EPOCH][BATCH];      /* first tokens */

static void write_files(void) {
    uint8_t bytes[2 * (SAMPLES * SEQ + 1)];
    FILE *file;
    snprintf(token_file, sizeof token_file, "%s/tokens.u16", folder);
    snprintf(log_file, sizeof log_file, "%s/log.jsonl", folder);
    snprintf(saved_file, sizeof saved_file, "%s/state", folder);
    for (int i = 0; i < SAMPLES * SEQ + 1; i++) { bytes[2 * i] = (uint8_t)i; bytes[2 * i + 1] = (uint8_t)(i >> 8); }
    file = fopen(token_file, "wb");
    if (file == NULL || fwrite(bytes, sizeof bytes, 1, file) != 1 || fclose(file) != 0) exit(2);
}

/* The order, from a loader without threads. */
static void find_expected(void) {
    amp_context *amp = open_counted(NULL);
    for (int kind = 0; kind < KINDS; kind++) {
        amp_loader *l = open_loader(amp, kind, AMP_NO_WORKERS, 0);
        for (int n = 0; n < EPOCHS * PER_EPOCH; n++) {
            amp_batch b;
            if (amp_loader_next(l, &b) != AMP_OK) exit(2);
            for (int i = 0; i < BATCH; i++) expected[kind][n][i] = b.inputs[i * SEQ];
        }
        amp_loader_destroy(l);
    }
    amp_close(amp);
}

/* How many values are not those of batch `number`. */
static int wrong_values(const amp_batch *b, int kind, int64_t number) {
    int wrong = b->batch != BATCH || b->epoch * PER_EPOCH + b->index != number;
    for (int i = 0; i < BATCH && !wrong; i++)
        for (int j = 0; j < SEQ; j++) {
            int32_t token = expected[kind][number][i] + j;
            wrong += b->inputs[i * SEQ + j] != token || b->targets[i * SEQ + j] != token + 1;
        }
    return wrong;
}

/* ---- The loader */

typedef struct observer { amp_loader *loader; int64_t stop; int wrong; pthread_t id; } observer;

static void *observe(void *arg) {
    observer *o = (observer *)arg;
    while (!counted(&o->stop)) {
        amp_loader_info info;
        o->wrong += amp_loader_info_get(o->loader, &info) != AMP_OK || info.samples != SAMPLES || info.ready < 0;
        sleep_ns(100000);
    }
    return NULL;
}

/* A consumer that takes batches, looks at them or drops them, goes elsewhere, saves and resumes, and stops when it
   likes; while another thread asks how far it is. */
static void consume(amp_loader *l, int kind, uint64_t program) {
    int64_t number = 0, steps = 5 + (int64_t)(program % 40);
    for (int64_t i = 0; i < steps; i++) {
        uint64_t x = mix(program + (uint64_t)i);
        amp_batch b;
        if (x % 16 == 0 || number == EPOCHS * PER_EPOCH) {
            number = (int64_t)(x >> 8) % (EPOCHS * PER_EPOCH);
            CHECK_OK(amp_loader_seek(l, number / PER_EPOCH, number % PER_EPOCH));
        } else if (x % 16 == 1) {
            amp_state *state = NULL;
            CHECK_OK(amp_state_create(&state, NULL));
            CHECK_OK(amp_loader_save(l, state, "l"));
            CHECK_OK(amp_loader_next(l, &b));
            CHECK_OK(amp_loader_load(l, state, "l"));
            amp_state_destroy(state);
        } else {
            CHECK_OK(amp_loader_next(l, &b));
            if (x % 4) CHECK_EQ(wrong_values(&b, kind, number), 0);
            number++;
        }
    }
}

TEST(loader_under_adversarial_schedules) {
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        uint64_t x = mix(seed);
        amp_context *amp = open_counted(NULL);
        int kind = (int)(x % KINDS), observed = (x >> 4) % 2 == 0;
        amp_loader *l;
        observer o;
        begin_schedule(seed);
        l = open_loader(amp, kind, 1 + (int)((x >> 8) % 5), 1 + (int)((x >> 16) % 6));
        memset(&o, 0, sizeof o);
        o.loader = l;
        if (observed && pthread_create(&o.id, NULL, observe, &o) != 0) exit(2);
        consume(l, kind, x);
        count(&o.stop, 1);
        if (observed) pthread_join(o.id, NULL);
        CHECK_EQ(o.wrong, 0);
        amp_loader_destroy(l);
        begin_schedule(0);
        amp_close(amp);
        CHECK_MSG(nothing_left() && machine.wrong == 0, "seed %d leaves %d bytes, %d files, %d threads", (int)seed,
                  (int)machine.live, (int)machine.files, (int)machine.threads);
    }
}

/* ---- Closing from another thread */

typedef struct consumer {
    amp_loader *loader;
    int kind, seeks, wrong;
    int64_t taken, ended;
    amp_result result;
    char error[256];
    pthread_t id;
} consumer;

static void *consume_until_told(void *arg) {
    consumer *c = (consumer *)arg;
    amp_batch b;
    do {
        memset(&b, 1, sizeof b);
        c->result = c->seeks ? amp_loader_seek(c->loader, 0, 5) : amp_loader_next(c->loader, &b);
        if (c->seeks || c->result != AMP_OK) continue;
        if (c->taken < EPOCHS * PER_EPOCH) c->wrong += wrong_values(&b, c->kind, c->taken) != 0;
        c->taken++;
    } while (c->result == AMP_OK);
    if (!c->seeks) c->wrong += b.batch != 0x0101010101010101;    /* outputs stay as they were */
    snprintf(c->error, sizeof c->error, "%s", amp_last_error());
    count(&c->ended, 1);
    return NULL;
}

static void start_consumer(consumer *c, amp_loader *l, int kind) {
    memset(c, 0, sizeof *c);
    c->loader = l;
    c->kind = kind;
    if (pthread_create(&c->id, NULL, consume_until_told, c) != 0) exit(2);
}

static void check_told(const consumer *c, const char *function) {
    CHECK_EQ(c->result, AMP_ERR_STATE);
    CHECK_EQ(c->wrong, 0);
    CHECK_MSG(strstr(c->error, "stopped") != NULL && strstr(c->error, function) != NULL, "%s", c->error);
}

/* The loader stops at some moment of a busy consumer: what was taken is what is saved. */
TEST(stop_at_any_moment) {
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        uint64_t x = mix(seed + 1000);
        amp_context *amp = (x >> 40) % 4 == 0 ? open_device() : open_counted(NULL);
        int kind = (int)(x % KINDS), workers = (int)((x >> 4) % 4);
        amp_loader *l, *again;
        amp_state *state = NULL;
        amp_loader_info info;
        amp_batch b;
        consumer c;
        begin_schedule(seed);
        l = open_loader(amp, kind, workers ? workers : AMP_NO_WORKERS, 1 + (int)((x >> 8) % 4));
        start_consumer(&c, l, kind);
        sleep_ns((long)((x >> 16) % 3000000));
        amp_loader_stop(l);
        pthread_join(c.id, NULL);
        check_told(&c, "amp_loader_next");
        CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_STATE);
        CHECK_ERR(amp_loader_seek(l, 0, 0), AMP_ERR_STATE);
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_loader_save(l, state, "l"));
        CHECK_ERR(amp_loader_load(l, state, "l"), AMP_ERR_STATE);
        amp_loader_destroy(l);
        begin_schedule(0);
        again = open_loader(amp, kind, AMP_NO_WORKERS, 0);
        CHECK_OK(amp_loader_load(again, state, "l"));
        CHECK_OK(amp_loader_info_get(again, &info));
        CHECK_EQ(info.epoch * PER_EPOCH + info.index, c.taken);
        amp_loader_destroy(again);
        amp_state_destroy(state);
        amp_close(amp);
        CHECK(nothing_left());
    }
    amp_loader_stop(NULL);
}

static void wait_for(int64_t *what, int64_t at_least) {
    for (int i = 0; i < 20000 && counted(what) < at_least; i++) sleep_ns(500000);
    CHECK(counted(what) >= at_least);
}

/* Inside and waiting for what a worker has only begun, so that the call cannot end; and told to stop. */
static int waits_inside(amp_loader *l) {
    int inside;
    pthread_mutex_lock(&l->lock);
    inside = l->calls > 0 && l->waiting > 0 && ampi_slot_of(l, l->consumed)->state == AMPI_SLOT_FILLING;
    pthread_mutex_unlock(&l->lock);
    return inside;
}
static int is_stopped(amp_loader *l) {
    int stop;
    pthread_mutex_lock(&l->lock);
    stop = l->stop;
    pthread_mutex_unlock(&l->lock);
    return stop;
}

static void *destroy_loader(void *arg) { amp_loader_destroy((amp_loader *)arg); return NULL; }

/* Destroyed by one thread while another waits inside: for a callback, for a read that hangs, or for the callback of a
   loader without workers, which it is in itself.  With workers the call ends although nothing came back; in every second
   round they come back at the moment at which the loader is gone if nobody waits for the call. */
TEST(destroy_while_a_call_waits) {
    for (int round = 0; round < 32; round++) {
        amp_context *amp = round < 24 ? open_counted(NULL) : open_device();
        int kind = round % 4 < 3 ? 2 : 0, workers = round % 4 == 1 ? AMP_NO_WORKERS : kind == 0 ? 1 : 1 + round % 3, seeks = round % 4 == 2;
        int64_t *gate = kind == 2 ? &source_gate : &machine.read_gate, *inside = kind == 2 ? &in_source : &machine.in_gate;
        amp_loader *l;
        consumer c;
        pthread_t closer;
        begin_schedule((uint64_t)round + 1);
        if (kind == 2) count(gate, 1);
        l = open_loader(amp, kind, workers, 2);
        if (kind != 2) count(gate, 1);      /* opening reads too; what is ahead already is taken first */
        memset(&c, 0, sizeof c);
        if (seeks) wait_for(inside, workers);
        c.loader = l; c.kind = kind; c.seeks = seeks;
        if (pthread_create(&c.id, NULL, consume_until_told, &c) != 0) exit(2);
        wait_for(inside, AMPI_MAX(workers, 1));     /* no worker is on its way with a batch */
        while (workers != AMP_NO_WORKERS && !waits_inside(l)) sleep_ns(500000);
        if (pthread_create(&closer, NULL, destroy_loader, l) != 0) exit(2);
        /* While a callback is held, and only then, the loader cannot be gone; without workers the call itself is in it. */
        if (workers != AMP_NO_WORKERS && (kind != 2 || round % 8 < 4)) wait_for(&c.ended, 1);
        else while (!is_stopped(l)) sleep_ns(50000);
        open_gate(gate);
        pthread_join(closer, NULL);
        pthread_join(c.id, NULL);
        check_told(&c, seeks ? "amp_loader_seek" : "amp_loader_next");
        begin_schedule(0);
        amp_close(amp);
        CHECK(nothing_left());
    }
}

/* ---- Regions in 16 threads, which share weights, cached casts and masks */

enum { THREADS = 16, WEIGHTS = 3, DTYPES = 4, MASKS = 3, ROWS = 9, IN = 40, OUT = 48, HEADS = 2, QUERIES = 11, DIM = 8 };
enum { HEAD = QUERIES * HEADS * DIM };

static const amp_dtype dtypes[DTYPES] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
static float weights[WEIGHTS][OUT * IN], x_in[ROWS * IN], dy_in[ROWS * OUT], qkv[3][HEAD];
static int32_t mask_lengths[MASKS] = {QUERIES, 7, 3};

typedef struct answers {
    float y[ROWS * OUT], dx[ROWS * IN], product[ROWS * OUT], o[HEAD];
    uint16_t cast[OUT * IN];
    uint8_t mask[QUERIES * QUERIES];
} answers;
static answers truth[DTYPES][WEIGHTS];
static amp_param shared[WEIGHTS];

static void fill(float *x, int n, uint64_t seed) {
    for (int i = 0; i < n; i++) x[i] = (float)(mix(seed * 1000003 + (uint64_t)i) >> 40) * (1.0f / 4194304) - 2;
}

static void make_inputs(void) {
    fill(x_in, ROWS * IN, 1);
    fill(dy_in, ROWS * OUT, 2);
    for (int i = 0; i < 3; i++) fill(qkv[i], HEAD, (uint64_t)(3 + i));
    for (int i = 0; i < WEIGHTS; i++) fill(weights[i], OUT * IN, (uint64_t)(6 + i));
}

/* Without gradients: threads that share a parameter must not both write its gradient. */
static void register_shared(amp_context *amp) {
    static const char *const names[WEIGHTS] = {"a", "b", "c"};
    memset(shared, 0, sizeof shared);
    for (int i = 0; i < WEIGHTS; i++) {
        shared[i].name = names[i];
        shared[i].weight = amp_tensor2(weights[i], AMP_F32, OUT, IN);
    }
    CHECK_OK(amp_param_register(amp, shared, WEIGHTS));
}

static int begin_region(amp_context *amp, amp_dtype dtype, int disable, int disable_cache) {
    amp_autocast_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = dtype; d.disable = disable; d.disable_cache = disable_cache;
    return amp_autocast_begin(amp, &d) != AMP_OK;
}

static int run_linear(amp_context *amp, int w, amp_linear_op *op, answers *out) {
    memset(op, 0, sizeof *op);
    op->x = amp_tensor2(x_in, AMP_F32, ROWS, IN);
    op->weight = &shared[w];
    op->y = amp_tensor2(out->y, AMP_F32, ROWS, OUT);
    return amp_linear(amp, op) != AMP_OK;
}

/* Outside of the region: backward obeys the plan. */
static int run_linear_backward(amp_context *amp, amp_linear_op *op, answers *out) {
    static const size_t bytes = sizeof dy_in;
    float dy[ROWS * OUT];
    memcpy(dy, dy_in, bytes);
    op->dy = amp_tensor2(dy, AMP_F32, ROWS, OUT);
    op->dx = amp_tensor2(out->dx, AMP_F32, ROWS, IN);
    return amp_linear_backward(amp, op) != AMP_OK;
}

/* Attention over a mask from the cache, which stays while it is held. */
static int run_masked(amp_context *amp, int m, answers *out) {
    amp_attention_op op;
    amp_mask mask;
    amp_mask_view view;
    float lse[HEADS * QUERIES];
    int wrong = 0;
    memset(&op, 0, sizeof op); memset(&mask, 0, sizeof mask);
    mask.kind = AMP_MASK_CAUSAL;
    mask.lengths = &mask_lengths[m];
    wrong += amp_mask_get(amp, &mask, 1, QUERIES, QUERIES, AMP_U8, &view) != AMP_OK;
    op.q = amp_tensor4(qkv[0], AMP_F32, 1, QUERIES, HEADS, DIM); op.k = amp_tensor4(qkv[1], AMP_F32, 1, QUERIES, HEADS, DIM);
    op.v = amp_tensor4(qkv[2], AMP_F32, 1, QUERIES, HEADS, DIM); op.o = amp_tensor4(out->o, AMP_F32, 1, QUERIES, HEADS, DIM);
    op.lse = lse;
    op.mask = view.mask;
    wrong += amp_attention(amp, &op) != AMP_OK;
    memcpy(out->mask, view.tensor.data, sizeof out->mask);
    amp_mask_release(amp, &view);
    return wrong;
}

/* Threads share the sequence of random numbers: which of them a call gets is chance. */
static int run_dropout(amp_context *amp) {
    amp_dropout_op op;
    float y[ROWS * IN];
    int wrong;
    memset(&op, 0, sizeof op);
    op.p = 0.5f;
    op.x = amp_tensor1(x_in, AMP_F32, ROWS * IN); op.y = amp_tensor1(y, AMP_F32, ROWS * IN);
    wrong = amp_dropout(amp, &op) != AMP_OK;
    for (int i = 0; i < ROWS * IN; i++) wrong += y[i] != 0 && y[i] != 2 * x_in[i];
    return wrong;
}

/* All that a thread computes in a region of dtypes[d] with weight w; `cached`: casts may be handed out. */
static int compute(amp_context *amp, int d, int w, int cached, answers *out, amp_linear_op *op) {
    amp_tensor cast;
    void *memory = NULL;
    int wrong = run_linear(amp, w, op, out);
    wrong += amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, ROWS, OUT, IN, 1, x_in, IN, weights[w], IN, 0, out->product, OUT) != AMP_OK;
    wrong += run_masked(amp, w % MASKS, out) + run_dropout(amp);
    wrong += amp_alloc(amp, &memory, 1000 + 64 * d) != AMP_OK;
    if (cached) {
        wrong += amp_autocast_cast(amp, &shared[w], d % 2 ? AMP_BF16 : AMP_F16, &cast) != AMP_OK;
        interfere();
        memcpy(out->cast, cast.data, sizeof out->cast);
    }
    amp_free(amp, memory);
    return wrong;
}

/* One thread, no cache, nobody interferes. */
static void find_truth(void) {
    amp_desc desc = counted_desc();
    amp_context *amp;
    desc.disable_cache = 1;
    amp = open_counted(&desc);
    register_shared(amp);
    for (int d = 0; d < DTYPES; d++)
        for (int w = 0; w < WEIGHTS; w++) {
            amp_linear_op op;
            CHECK_EQ(begin_region(amp, dtypes[d], 0, 0) + compute(amp, d, w, 1, &truth[d][w], &op), 0);
            CHECK_OK(amp_autocast_end(amp));
            CHECK_EQ(run_linear_backward(amp, &op, &truth[d][w]), 0);
        }
    amp_close(amp);
}

typedef struct worker { amp_context *amp; int index, rounds, wrong; pthread_t id; } worker;

static int wrong_error_text(int index) {
    char name[32], text[64];
    amp_dtype dtype;
    snprintf(name, sizeof name, "thread%d", index);
    snprintf(text, sizeof text, "\"%s\"", name);
    if (amp_dtype_parse(name, &dtype) != AMP_ERR_NAME) return 1;
    interfere();
    return strstr(amp_last_error(), name) == NULL;
}

/* Regions inside of each other, each of another dtype, islands and regions without a cache among them. */
static void *work(void *arg) {
    worker *t = (worker *)arg;
    for (int round = 0; round < t->rounds; round++) {
        int depth = 1 + (t->index + round) % 7, d = (t->index * 3 + round) % DTYPES, w = (t->index + round / 2) % WEIGHTS;
        int off = (t->index + round) % 5 == 0;
        answers got;
        amp_linear_op op;
        memset(&got, 0, sizeof got);
        if (off) memcpy(got.cast, truth[d][w].cast, sizeof got.cast);
        for (int i = 1; i < depth; i++) t->wrong += begin_region(t->amp, dtypes[(d + i) % DTYPES], i % 3 == 2, 0);
        t->wrong += begin_region(t->amp, dtypes[d], 0, off);
        t->wrong += compute(t->amp, d, w, !off, &got, &op);
        t->wrong += begin_region(t->amp, dtypes[d], 1, 0) || amp_autocast_active(t->amp, NULL) || amp_autocast_end(t->amp) != AMP_OK;
        for (int i = 0; i < depth; i++) t->wrong += amp_autocast_end(t->amp) != AMP_OK;
        t->wrong += amp_autocast_end(t->amp) != AMP_ERR_STATE;
        t->wrong += wrong_error_text(t->index);
        t->wrong += run_linear_backward(t->amp, &op, &got);
        t->wrong += memcmp(&got, &truth[d][w], sizeof got) != 0;
    }
    return NULL;
}

/* Meanwhile someone looks and cleans up. */
typedef struct cleaner { amp_context *amp; int64_t stop; int wrong; pthread_t id; } cleaner;
static void *clean(void *arg) {
    cleaner *c = (cleaner *)arg;
    while (!counted(&c->stop)) {
        amp_cache_info info;
        amp_memory_info memory;
        int64_t freed;
        c->wrong += amp_cast_cache_info(c->amp, &info) != AMP_OK || info.bytes < 0;
        c->wrong += amp_mask_cache_info(c->amp, &info) != AMP_OK || info.bytes < 0;
        c->wrong += amp_memory(c->amp, &memory) != AMP_OK || memory.allocated < 0;
        c->wrong += amp_cleanup(c->amp, &freed) != AMP_OK;
        sleep_ns(300000);
    }
    return NULL;
}

/* Whether the caches have no limit, a limit of about two entries, or are emptied with the last region. */
static void regions_in_16_threads(int variant, int cleaned) {
    amp_desc desc = counted_desc();
    amp_context *amp;
    worker workers[THREADS];
    cleaner c;
    desc.threads = 2;
    desc.cache_limit = variant == 1 ? 2 * OUT * IN * 4 : 0;
    desc.mask_limit = variant == 1 ? 2 * QUERIES * QUERIES : 0;
    desc.memory_efficient = variant == 2;
    amp = open_counted(&desc);
    register_shared(amp);
    begin_schedule((uint64_t)(100 + variant));
    memset(&c, 0, sizeof c);
    c.amp = amp;
    if (cleaned && pthread_create(&c.id, NULL, clean, &c) != 0) exit(2);
    for (int i = 0; i < THREADS; i++) {
        worker w;
        memset(&w, 0, sizeof w);
        w.amp = amp; w.index = i; w.rounds = 24;
        workers[i] = w;
        if (pthread_create(&workers[i].id, NULL, work, &workers[i]) != 0) exit(2);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(workers[i].id, NULL);
        CHECK_MSG(workers[i].wrong == 0, "variant %d, thread %d: %d wrong", variant, i, workers[i].wrong);
    }
    count(&c.stop, 1);
    if (cleaned) pthread_join(c.id, NULL);
    CHECK_EQ(c.wrong, 0);
    begin_schedule(0);
    amp_close(amp);
    CHECK(nothing_left() && machine.wrong == 0);
}

TEST(regions_in_sixteen_threads) {
    make_inputs();
    find_truth();
    for (int variant = 0; variant < 3; variant++)
        for (int cleaned = 0; cleaned < 2; cleaned++) regions_in_16_threads(variant, cleaned);
}

/* ---- Models on one context, each trained by a thread of its own */

enum { MODELS = 2, MODEL_STEPS = 8, WIDE = 16 };

/* Two layers that the optimizer steps, and one between them that no optimizer has. */
typedef struct pupil {
    amp_context *amp;
    amp_model *model;
    amp_tape *tape;
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    amp_param *first, *last, frozen;
    char name[3][16];
    float between[WIDE * WIDE], x[MODEL_STEPS][WIDE * WIDE];
    int32_t labels[WIDE];
    int index, failed;
    pthread_t id;
} pupil;

static void pupil_open(pupil *p, amp_context *amp, int index) {
    amp_optimizer_desc d;
    memset(p, 0, sizeof *p); memset(&d, 0, sizeof d);
    p->amp = amp; p->index = index;
    for (int i = 0; i < 3; i++) snprintf(p->name[i], sizeof p->name[i], "%d.%d", index, i);
    for (int i = 0; i < WIDE * WIDE; i++) p->between[i] = amp_random_uniform(9, (uint64_t)i) - 0.5f;
    for (int s = 0; s < MODEL_STEPS; s++)
        for (int i = 0; i < WIDE * WIDE; i++) p->x[s][i] = (float)(1 + s % 3) * (amp_random_uniform((uint64_t)s, (uint64_t)i) - 0.5f);
    for (int i = 0; i < WIDE; i++) p->labels[i] = i % 4;
    p->failed += amp_model_create(amp, &p->model, 7, 0) != AMP_OK;
    p->first = amp_model_param(p->model, p->name[0], WIDE, WIDE, AMP_INIT_NORMAL, 0.3);
    p->last = amp_model_param(p->model, p->name[2], 4, WIDE, AMP_INIT_NORMAL, 0.3);
    p->frozen.name = p->name[1];
    p->frozen.weight = amp_tensor2(p->between, AMP_F32, WIDE, WIDE);
    p->failed += amp_param_register(amp, &p->frozen, 1) != AMP_OK;
    p->failed += amp_model_params(p->model, &d.params, &d.n_params) != AMP_OK;
    d.lr = 0.02;
    p->failed += amp_optimizer_create(amp, &p->optimizer, &d) != AMP_OK;
    p->failed += amp_scaler_create(amp, &p->scaler, NULL) != AMP_OK || amp_tape_create(amp, &p->tape, NULL) != AMP_OK;
}
static void pupil_close(pupil *p) {
    amp_tape_destroy(p->tape);
    amp_scaler_destroy(p->scaler);
    amp_optimizer_destroy(p->optimizer);
    amp_param_forget(p->amp, &p->frozen, 1);
    amp_model_destroy(p->model);
}

static void pupil_step(pupil *p, int step) {
    amp_tensor x = amp_tensor2(p->x[step], AMP_F32, WIDE, WIDE);
    amp_value h;
    p->failed += amp_tape_begin(p->tape, NULL) != AMP_OK;
    h = amp_tape_linear(p->tape, amp_tape_input(p->tape, &x), p->first, NULL, AMP_ACT_RELU);
    h = amp_tape_linear(p->tape, h, &p->frozen, NULL, AMP_ACT_NONE);
    h = amp_tape_linear(p->tape, h, p->last, NULL, AMP_ACT_NONE);
    h = amp_tape_cross_entropy(p->tape, h, p->labels, NULL);
    p->failed += amp_tape_backward(p->tape, h, amp_scaler_scale_ptr(p->scaler)) != AMP_OK;
    p->failed += amp_step(p->optimizer, p->scaler) != AMP_OK;
}
static void *pupil_train(void *arg) {
    for (int step = 0; step < MODEL_STEPS; step++) pupil_step((pupil *)arg, step);
    return NULL;
}

/* Meanwhile someone asks for the status, and sets the dtype of a layer that nobody has. */
static void *look_around(void *arg) {
    cleaner *c = (cleaner *)arg;
    for (int i = 0; !counted(&c->stop); i++) {
        amp_status status;
        c->wrong += amp_status_get(c->amp, NULL, 0, &status) != AMP_OK || status.fp8_tensors < 0;
        c->wrong += amp_layer_override(c->amp, "nobody.*", i % 2 ? AMP_BF16 : AMP_DTYPE_DEFAULT) != AMP_OK;
        sleep_ns(100000);
    }
    return NULL;
}

enum { ALONE, IN_TURNS, IN_THREADS };
/* The first model's weights and the scale of the layer that no optimizer has, after training. */
typedef struct taught { float first[WIDE * WIDE], last[4 * WIDE]; amp_fp8_stats between; } taught;

static taught teach(amp_fp8_scaling scaling, int how) {
    amp_desc desc = counted_desc();
    pupil *p = (pupil *)calloc(MODELS, sizeof *p);
    taught out;
    cleaner c;
    memset(&c, 0, sizeof c); memset(&out, 0, sizeof out);
    desc.dtype = AMP_FP8; desc.fp8.scaling = scaling;
    desc.logger.level = AMP_LOG_ERROR;
    c.amp = open_counted(&desc);
    for (int i = 0; i < MODELS; i++) pupil_open(&p[i], c.amp, i);
    if (how == IN_THREADS) {
        begin_schedule(77);
        if (pthread_create(&c.id, NULL, look_around, &c) != 0) exit(2);
        for (int i = 0; i < MODELS; i++) if (pthread_create(&p[i].id, NULL, pupil_train, &p[i]) != 0) exit(2);
        for (int i = 0; i < MODELS; i++) pthread_join(p[i].id, NULL);
        count(&c.stop, 1);
        pthread_join(c.id, NULL);
        begin_schedule(0);
    } else
        for (int step = 0; step < MODEL_STEPS; step++)
            for (int i = 0; i < (how == ALONE ? 1 : MODELS); i++) pupil_step(&p[i], step);
    memcpy(out.first, p[0].first->weight.data, sizeof out.first);
    memcpy(out.last, p[0].last->weight.data, sizeof out.last);
    CHECK_OK(amp_fp8_stats_get(c.amp, &p[0].frozen, AMP_FP8_X, &out.between));
    for (int i = 0; i < MODELS; i++) { CHECK_EQ(p[i].failed, 0); pupil_close(&p[i]); }
    CHECK_EQ(c.wrong, 0);
    amp_close(c.amp);
    free(p);
    CHECK(nothing_left());
    return out;
}

/* A step ends the step of its own model's tensors in fp8, whatever another model does meanwhile. */
TEST(models_in_threads_train_as_alone) {
    static const amp_fp8_scaling scalings[] = {AMP_FP8_CURRENT, AMP_FP8_DELAYED};
    for (int s = 0; s < 2; s++) {
        taught alone = teach(scalings[s], ALONE), turns = teach(scalings[s], IN_TURNS);
        CHECK(memcmp(&alone, &turns, sizeof alone) == 0);
        CHECK(alone.between.values == WIDE * WIDE && alone.between.updates == (s ? MODEL_STEPS : 0));
        for (int run = 0; run < 3; run++) {
            taught threads = teach(scalings[s], IN_THREADS);
            CHECK_MSG(memcmp(&alone, &threads, sizeof alone) == 0, "scaling %d, run %d: other bits", s, run);
        }
    }
}

/* ---- Opening and closing */

enum { FEATURES = SEQ, CLASSES = 5 };

/* A small training with everything that can be created from a context. */
typedef struct training {
    amp_context *amp;
    amp_loader *loader;
    amp_optimizer *opt;
    amp_scaler *scaler;
    amp_monitor *monitor;
    amp_tensor_stats *numerics;
    amp_recovery *recovery;
    amp_param p[2];
    float w[2][CLASSES * FEATURES], g[2][CLASSES * FEATURES], x[BATCH * FEATURES], y[BATCH * CLASSES], loss;
    int32_t labels[BATCH];
    int failed;
} training;

static void training_objects(training *t, int kind, int recovers, const char *log) {
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    amp_monitor_desc md;
    amp_tensor_stats_desc nd;
    amp_recovery_desc rd;
    memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd); memset(&md, 0, sizeof md); memset(&nd, 0, sizeof nd);
    memset(&rd, 0, sizeof rd);
    t->p[0].name = "weight"; t->p[1].name = "bias";
    for (int i = 0; i < 2; i++) {
        t->p[i].weight = i ? amp_tensor1(t->w[i], AMP_F32, CLASSES) : amp_tensor2(t->w[i], AMP_F32, CLASSES, FEATURES);
        t->p[i].grad = t->p[i].weight;
        t->p[i].grad.data = t->g[i];
    }
    od.params = t->p; od.n_params = 2; od.lr = 0.001;
    t->failed += amp_param_register(t->amp, t->p, 2) != AMP_OK || amp_optimizer_create(t->amp, &t->opt, &od) != AMP_OK;
    t->failed += amp_scaler_create(t->amp, &t->scaler, &sd) != AMP_OK;
    md.path = log; md.optimizer = t->opt; md.scaler = t->scaler; md.log_interval = 50; md.append = kind % 2;
    t->failed += amp_monitor_create(t->amp, &t->monitor, &md) != AMP_OK;
    nd.params = t->p; nd.n_params = 2; nd.scaler = t->scaler;
    t->failed += amp_tensor_stats_create(t->amp, &t->numerics, &nd) != AMP_OK;
    rd.params = t->p; rd.n_params = 2; rd.optimizer = t->opt; rd.scaler = t->scaler; rd.interval = 100;
    if (recovers) t->failed += amp_recovery_create(t->amp, &t->recovery, &rd) != AMP_OK;
}

static void training_open(training *t, amp_context *amp, int kind, int workers, int recovers, const char *log) {
    memset(t, 0, sizeof *t);
    t->amp = amp;
    t->loader = open_loader(amp, kind, workers, 2);
    training_objects(t, kind, recovers, log);
}

static void training_step(training *t) {
    amp_linear_op lin;
    amp_cross_entropy_op ce;
    amp_batch b;
    amp_step_info info;
    amp_step_record record;
    amp_recovery_event event;
    amp_tensor_stats_report report;
    memset(&lin, 0, sizeof lin); memset(&ce, 0, sizeof ce); memset(&info, 0, sizeof info);
    t->failed += amp_loader_next(t->loader, &b) != AMP_OK;
    if (t->failed) return;
    for (int i = 0; i < BATCH * FEATURES; i++) t->x[i] = (float)b.inputs[i] * (1.0f / 512);
    for (int i = 0; i < BATCH; i++) t->labels[i] = b.inputs[i * SEQ] / SEQ % CLASSES;
    lin.x = amp_tensor2(t->x, AMP_F32, BATCH, FEATURES); lin.weight = &t->p[0]; lin.bias = &t->p[1];
    lin.y = amp_tensor2(t->y, AMP_F32, BATCH, CLASSES);
    ce.logits = ce.dlogits = lin.y; ce.labels = t->labels; ce.loss = &t->loss; ce.grad_scale = amp_scaler_scale_ptr(t->scaler);
    t->failed += amp_autocast_begin(t->amp, NULL) != AMP_OK || amp_linear(t->amp, &lin) != AMP_OK ||
                 amp_cross_entropy(t->amp, &ce) != AMP_OK || amp_autocast_end(t->amp) != AMP_OK;
    lin.dy = ce.dlogits;
    t->failed += amp_linear_backward(t->amp, &lin) != AMP_OK || amp_tensor_stats_step(t->numerics, &report) != AMP_OK;
    t->failed += amp_step(t->opt, t->scaler) != AMP_OK;
    info.loss = t->loss;
    t->failed += amp_monitor_step(t->monitor, &info) != AMP_OK;
    while (amp_monitor_next(t->monitor, &record))
        if (t->recovery) t->failed += amp_recovery_step(t->recovery, &record, &event) != AMP_OK;
}

static void training_close(training *t) {
    amp_recovery_destroy(t->recovery);
    amp_tensor_stats_destroy(t->numerics);
    amp_monitor_destroy(t->monitor);
    amp_loader_destroy(t->loader);
    amp_scaler_destroy(t->scaler);
    amp_optimizer_destroy(t->opt);
}

static int save_and_load(training *t, const char *path) {
    amp_state *state = NULL, *again = NULL;
    int wrong = amp_state_create(&state, NULL) != AMP_OK;
    wrong += amp_optimizer_save(t->opt, state, "o") != AMP_OK || amp_scaler_save(t->scaler, state, "s") != AMP_OK ||
             amp_loader_save(t->loader, state, "l") != AMP_OK || amp_state_save(state, path) != AMP_OK;
    wrong += amp_state_load(&again, NULL, path) != AMP_OK || amp_optimizer_load(t->opt, again, "o") != AMP_OK ||
             amp_scaler_load(t->scaler, again, "s") != AMP_OK || amp_loader_load(t->loader, again, "l") != AMP_OK;
    amp_state_destroy(state);
    amp_state_destroy(again);
    return wrong;
}

/* What cannot be opened leaves nothing either. */
static int refused(amp_context *amp) {
    amp_loader *l = NULL;
    amp_loader_desc d;
    memset(&d, 0, sizeof d);
    d.path = folder; d.batch = 4; d.seq = 3;
    return amp_loader_create(amp, &l, &d) == AMP_OK || l != NULL;
}

static int cycle(int i, const char *log, const char *state) {
    amp_desc desc = counted_desc();
    amp_context *amp = NULL;
    amp_autocast_desc region;
    training t;
    int failed;
    if (amp_open(&amp, &desc) != AMP_OK) return 1;
    training_open(&t, amp, i % KINDS, i % 5 == 4 ? AMP_NO_WORKERS : 1 + i % 4, i % 3 == 0, log);
    for (int k = 0; k < i % 4; k++) training_step(&t);
    if (i % 4 == 1) t.failed += save_and_load(&t, state);
    if (i % 4 == 2) t.failed += refused(amp);
    if (i % 7 == 3) amp_loader_stop(t.loader);
    failed = t.failed;
    training_close(&t);
    memset(&region, 0, sizeof region);
    if (i % 8 == 5) failed += amp_autocast_begin(amp, &region) != AMP_OK || amp_autocast_end(amp) != AMP_OK;
    amp_close(amp);
    return failed;
}

static int entries(const char *path) {
    DIR *dir = opendir(path);
    int n = 0;
    if (dir == NULL) return -1;
    while (readdir(dir) != NULL) n++;
    closedir(dir);
    return n;
}

/* Bytes that the process's heap has handed out; -1: unknown. */
static int64_t heap_bytes(void) {
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
    if (!OWN_HEAP) return (int64_t)mallinfo2().uordblks;
#endif
    return -1;
}

/* Bytes of memory that the process occupies; -1: unknown. */
static int64_t resident_bytes(void) {
    FILE *file = OWN_HEAP ? NULL : fopen("/proc/self/statm", "r");
    long long size, resident = -1;
    if (file == NULL) return -1;
    if (fscanf(file, "%lld %lld", &size, &resident) != 2) resident = -1;
    fclose(file);
    return resident < 0 ? -1 : resident * sysconf(_SC_PAGESIZE);
}

enum { CYCLES = 1000, CYCLERS = 4 };
typedef struct cycler { int index, first, n, failed; pthread_t id; } cycler;

static void *run_cycles(void *arg) {
    cycler *c = (cycler *)arg;
    char log[96], state[96];
    snprintf(log, sizeof log, "%s.%d", log_file, c->index);
    snprintf(state, sizeof state, "%s.%d", saved_file, c->index);
    for (int i = c->first; i < c->first + c->n; i++) c->failed += cycle(i, log, state) != 0;
    remove(log);
    remove(state);
    return NULL;
}

static void cycles(int n) {
    cycler c[CYCLERS];
    for (int i = 0; i < CYCLERS; i++) {
        memset(&c[i], 0, sizeof c[i]);
        c[i].index = i; c[i].first = i * n / CYCLERS; c[i].n = n / CYCLERS;
        if (pthread_create(&c[i].id, NULL, run_cycles, &c[i]) != 0) exit(2);
    }
    for (int i = 0; i < CYCLERS; i++) {
        pthread_join(c[i].id, NULL);
        CHECK_EQ(c[i].failed, 0);
    }
}

/* Contexts with all that hangs on them, in four threads at once.  The first of them fill what the system's library
   keeps for itself; after those, less than the smallest block of its heap may remain per cycle, and less than a page. */
/* ---- A scaler's state, read by several threads */

static void say_nothing(void *user, amp_log_level level, int id, const char *text) {
    (void)level; (void)id; (void)text;
    __atomic_add_fetch((int *)user, 1, __ATOMIC_RELAXED);
}
static void *read_scale(void *arg) {
    const amp_scaler *scaler = (const amp_scaler *)arg;
    amp_scaler_desc d;
    amp_k_scaler state;
    intptr_t wrong = 0;
    for (int i = 0; i < 200; i++) {
        wrong += amp_scaler_scale(scaler) != 1 || !amp_scaler_enabled(scaler) || *amp_scaler_scale_ptr(scaler) != 1;
        wrong += amp_scaler_get(scaler, &state) != AMP_OK || state.updates != 4 || amp_scaler_device(scaler)->skips != 4;
        wrong += amp_scaler_query(scaler, &d) != AMP_OK || d.init_scale != 4;
    }
    return (void *)wrong;
}
/* At its floor for long, so that reading it warns, once. */
TEST(a_scale_read_in_four_threads) {
    amp_context *amp = NULL;
    amp_scaler *scaler = NULL;
    amp_desc desc;
    amp_scaler_desc d;
    pthread_t ids[4];
    int warnings = 0;
    memset(&desc, 0, sizeof desc);
    memset(&d, 0, sizeof d);
    desc.dtype = AMP_F16;
    desc.logger.write = say_nothing;
    desc.logger.user = &warnings;
    d.init_scale = 4;
    d.skip_warning = 4;
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_scaler_create(amp, &scaler, &d));
    for (int i = 0; i < 4; i++) CHECK_OK(amp_scaler_update_with(scaler, 1));
    for (int i = 0; i < 4; i++) if (pthread_create(&ids[i], NULL, read_scale, scaler) != 0) exit(2);
    for (int i = 0; i < 4; i++) {
        void *wrong;
        CHECK(pthread_join(ids[i], &wrong) == 0 && wrong == NULL);
    }
    CHECK_EQ(warnings, 1);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

TEST(a_thousand_open_and_close_cycles) {
    int fds, tasks, i;
    int64_t heap, resident;
    cycles(200);
    CHECK(nothing_left());
    fds = entries("/proc/self/fd");
    tasks = entries("/proc/self/task");
    heap = heap_bytes();
    resident = resident_bytes();
    cycles(CYCLES);
    CHECK_MSG(nothing_left(), "%d bytes, %d files, %d threads", (int)machine.live, (int)machine.files, (int)machine.threads);
    CHECK_EQ(machine.wrong, 0);
    CHECK_EQ(entries("/proc/self/fd"), fds);
    for (i = 0; i < 400 && entries("/proc/self/task") > tasks; i++) sleep_ns(5000000);  /* a joined thread may still be listed */
    CHECK_EQ(entries("/proc/self/task"), tasks);
    if (heap < 0 || resident < 0) return;
    CHECK_MSG(heap_bytes() - heap < 24 * CYCLES, "the heap grew by %lld bytes", (long long)(heap_bytes() - heap));
    CHECK_MSG(resident_bytes() - resident < 4096 * CYCLES, "memory grew by %lld bytes", (long long)(resident_bytes() - resident));
}

/* ---- Memory over many batches */

enum { BATCHES = 10000, SETTLED = 1000 };

/* What the library has allocated is the same to the byte after any number of batches; of what else the process has, less
   than the smallest block of its heap may be added per batch. */
TEST(memory_is_flat) {
    amp_context *amp = open_counted(NULL);
    training t;
    int64_t live = 0, peak = 0, heap = 0, resident = 0;
    training_open(&t, amp, 1, 2, 1, log_file);
    for (int i = 0; i < BATCHES && !t.failed; i++) {
        if (i == SETTLED) {
            live = counted(&machine.live); peak = counted(&machine.peak);
            heap = heap_bytes(); resident = resident_bytes();
        }
        training_step(&t);
    }
    CHECK_EQ(t.failed, 0);
    CHECK_EQ(counted(&machine.live), live);
    CHECK_EQ(counted(&machine.peak), peak);
    if (heap >= 0 && resident >= 0) {
        CHECK_MSG(heap_bytes() - heap < 24 * (BATCHES - SETTLED), "the heap grew by %lld bytes", (long long)(heap_bytes() - heap));
        CHECK_MSG(resident_bytes() - resident < 24 * (BATCHES - SETTLED), "memory grew by %lld bytes", (long long)(resident_bytes() - resident));
    }
    training_close(&t);
    amp_close(amp);
    CHECK(nothing_left());
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    if (!ampt.list) {
        if (mkdtemp(folder) == NULL) return 2;
        write_files();
        find_expected();
    }
    RUN(loader_under_adversarial_schedules); RUN(stop_at_any_moment); RUN(destroy_while_a_call_waits);
    RUN(regions_in_sixteen_threads); RUN(a_scale_read_in_four_threads);
    RUN(models_in_threads_train_as_alone); RUN(a_thousand_open_and_close_cycles); RUN(memory_is_flat);
    if (!ampt.list) { remove(token_file); remove(log_file); remove(saved_file); rmdir(folder); }
    return TEST_END();
}
