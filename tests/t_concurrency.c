/* t_concurrency.c - threads that meet at the worst moments: the loader and regions under a layer that yields, sleeps and
 * wakes at random around every lock, wait, read and allocation, seed by seed; closing from another thread; what opening
 * and closing a thousand times leaves behind; memory over ten thousand batches.
 *
 * The layer synchronises nothing itself, so that ThreadSanitizer sees the library's own order only. */
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
enum { SEEDS = 300 };
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
#include <malloc.h>

/* ---- The machine: memory, files and threads, counted.  A block's size stands before it. */

static struct { int64_t live, peak, wrong, files, threads, read_gate, in_gate; } machine;

static int64_t count(int64_t *what, int64_t by) { return __atomic_add_fetch(what, by, __ATOMIC_RELAXED); }
static int64_t counted(int64_t *what) { return __atomic_load_n(what, __ATOMIC_RELAXED); }

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
    int r = ampi_posix_open(user, path, for_writing, file);
    if (r == 0) count(&machine.files, 1);
    return r;
}
static int counting_close(void *user, intptr_t file) { count(&machine.files, -1); return ampi_posix_close(user, file); }

/* Reads that come late, bring less, or hang while the gate is shut. */
static int64_t interfering_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    interfere();
    if (counted(&machine.read_gate)) {
        count(&machine.in_gate, 1);
        while (counted(&machine.read_gate)) sleep_ns(200000);
        count(&machine.in_gate, -1);
    }
    if (counted((int64_t *)&schedule_seed) && bytes > 1 && chance() % 4 == 0) bytes = 1 + chance() % (bytes - 1);
    return ampi_posix_read(user, file, buffer, bytes, offset);
}
static int counting_start(void *user, void **thread, void (*run)(void *arg), void *arg) {
    int r = ampi_posix_thread_start(user, thread, run, arg);
    interfere();
    if (r == 0) count(&machine.threads, 1);
    return r;
}
static int counting_join(void *user, void *thread) { count(&machine.threads, -1); interfere(); return ampi_posix_thread_join(user, thread); }
static int counting_detach(void *user, void *thread) { count(&machine.threads, -1); interfere(); return ampi_posix_thread_detach(user, thread); }

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

static amp_context *open_counted(const amp_desc *changed) {
    amp_desc d = counted_desc();
    amp_context *amp = NULL;
    CHECK_OK(amp_open(&amp, changed ? changed : &d));
    return amp;
}

static int nothing_left(void) { return counted(&machine.live) == 0 && counted(&machine.files) == 0 && counted(&machine.threads) == 0; }

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
        while (counted(&source_gate)) sleep_ns(200000);
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
        amp_context *amp = open_counted(NULL);
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

static void *destroy_loader(void *arg) { amp_loader_destroy((amp_loader *)arg); return NULL; }

/* Destroyed by one thread while another waits inside: for a callback, for a read that hangs, or for the callback of a
   loader without workers, which it is in itself.  With workers the call ends although nothing came back. */
TEST(destroy_while_a_call_waits) {
    for (int round = 0; round < 8; round++) {
        amp_context *amp = open_counted(NULL);
        int kind = round % 4 < 3 ? 2 : 0, workers = round % 4 == 1 ? AMP_NO_WORKERS : 1 + round % 3, seeks = round % 4 == 2;
        int64_t *gate = kind == 2 ? &source_gate : &machine.read_gate, *inside = kind == 2 ? &in_source : &machine.in_gate;
        amp_loader *l;
        amp_loader_info info;
        consumer c;
        pthread_t closer;
        begin_schedule((uint64_t)round + 1);
        if (kind == 2) count(gate, 1);
        l = open_loader(amp, kind, workers, 2);
        if (kind != 2) count(gate, 1);      /* opening reads too; what is ahead already is taken first */
        memset(&c, 0, sizeof c);
        if (seeks) wait_for(inside, 1);
        c.loader = l; c.kind = kind; c.seeks = seeks;
        if (pthread_create(&c.id, NULL, consume_until_told, &c) != 0) exit(2);
        wait_for(inside, 1);
        if (workers != AMP_NO_WORKERS && !seeks)
            do { CHECK_OK(amp_loader_info_get(l, &info)); sleep_ns(500000); } while (info.waits == 0);
        sleep_ns(5000000);
        if (pthread_create(&closer, NULL, destroy_loader, l) != 0) exit(2);
        if (workers != AMP_NO_WORKERS) wait_for(&c.ended, 1);
        else sleep_ns(5000000);
        count(gate, -1);
        pthread_join(closer, NULL);
        pthread_join(c.id, NULL);
        check_told(&c, seeks ? "amp_loader_seek" : "amp_loader_next");
        begin_schedule(0);
        amp_close(amp);
        for (int i = 0; i < 2000 && !nothing_left(); i++) sleep_ns(1000000);     /* a worker left behind in its read */
        CHECK(nothing_left());
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    if (!ampt.list) {
        if (mkdtemp(folder) == NULL) return 2;
        write_files();
        find_expected();
    }
    RUN(loader_under_adversarial_schedules); RUN(stop_at_any_moment); RUN(destroy_while_a_call_waits);
    if (!ampt.list) { remove(token_file); remove(log_file); remove(saved_file); rmdir(folder); }
    return TEST_END();
}
