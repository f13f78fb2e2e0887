/* t_threads.c - tests the thread pool.  It tests which threads are waited for, several callers, calls within calls, fork,
 * threads that cannot be started, a program's own pool, and contexts that share a pool.
 *
 *     gcc -O2 -Itests tests/unit/t_threads.c -o t_threads -lm -lpthread && ./t_threads      (from the project root) */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "parallel.h"
#include "test.h"
#if !defined(_WIN32)
#  include <sys/wait.h>
#endif

#if defined(__has_feature)
#  if __has_feature(thread_sanitizer)
#    define THREAD_SANITIZER 1
#  endif
#endif
#if defined(__SANITIZE_THREAD__)
#  define THREAD_SANITIZER 1
#endif

enum { SIZE = 192 };                /* a product of this size is shared out */

static float a[SIZE * SIZE], b[SIZE * SIZE], want[SIZE * SIZE];

static amp_result multiply(amp_context *amp, float *c) {
    return amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, SIZE, SIZE, SIZE, 1, a, SIZE, b, SIZE, 0, c, SIZE);
}

/* 1: a product on this context gives the bits that one thread gives. */
static int same_bits(amp_context *amp) {
    static __thread float c[SIZE * SIZE];
    memset(c, 0, sizeof c);
    CHECK_OK(multiply(amp, c));
    return memcmp(c, want, sizeof c) == 0;
}

static amp_context *threads_open_with(amp_desc desc) {
    amp_context *amp = NULL;
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}

static amp_desc threads_of(int32_t threads) {
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    return desc;
}

static void prepare(void) {
    amp_context *amp;
    int i;
    for (i = 0; i < SIZE * SIZE; i++) {
        a[i] = amp_random_uniform(1, (uint64_t)i) - 0.5f;
        b[i] = amp_random_uniform(2, (uint64_t)i) - 0.5f;
    }
    amp = threads_open_with(threads_of(1));
    CHECK_OK(multiply(amp, want));
    amp_close(amp);
}

/* ---- The pool itself */

static ampi_threads *pool_of(int32_t threads) {
    amp_system system = ampi_system(NULL);
    ampi_threads *pool = NULL;
    CHECK_OK(ampi_threads_open(&pool, &system, threads, threads, 0));
    return pool;
}

typedef struct count { ampi_threads *pool; int32_t seen[16], inner; } count;

static void count_number(void *arg, int32_t i) {
    count *c = (count *)arg;
    __atomic_add_fetch(&c->seen[i], 1, __ATOMIC_RELAXED);
    sched_yield();
}

/* Each number at most once, 0 always. */
TEST(numbers_are_handed_out_once) {
    ampi_threads *pool = pool_of(8);
    int round, i;
    for (round = 0; round < 2000; round++) {
        count c;
        memset(&c, 0, sizeof c);
        ampi_threads_run(pool, 8, count_number, &c);
        CHECK_EQ(c.seen[0], 1);
        for (i = 1; i < 8; i++) CHECK(c.seen[i] <= 1);
        CHECK_EQ(c.seen[8], 0);
    }
    CHECK_EQ(ampi_threads_running, 0);
    ampi_threads_close(pool);
}

static void count_inner(void *arg, int32_t i) {
    (void)i;
    __atomic_add_fetch(&((count *)arg)->inner, 1, __ATOMIC_RELAXED);
}
static void nest(void *arg, int32_t i) {
    count *c = (count *)arg;
    __atomic_add_fetch(&c->seen[i], 1, __ATOMIC_RELAXED);
    ampi_threads_run(c->pool, 4, count_inner, c);
}

TEST(calls_within_calls_return) {
    count c;
    int round;
    memset(&c, 0, sizeof c);
    c.pool = pool_of(4);
    for (round = 0; round < 500; round++) ampi_threads_run(c.pool, 4, nest, &c);
    CHECK_EQ(c.seen[0], 500);
    CHECK(c.inner >= 500 + c.seen[1] + c.seen[2] + c.seen[3]);
    ampi_threads_close(c.pool);
}

/* A worker that is asleep in its first instruction has not begun, and nobody waits for it. */
static int64_t late_ns;
static struct { void (*run)(void *); void *arg; } late;
static void run_late(void *arg) {
    struct timespec t;
    (void)arg;
    t.tv_sec = 0;
    t.tv_nsec = (long)late_ns;
    nanosleep(&t, NULL);
    late.run(late.arg);
}
static int start_late(void *user, void **thread, void (*run)(void *), void *arg) {
    late.run = run;
    late.arg = arg;
    return ampi_os_thread_start(user, thread, run_late, NULL);
}
static amp_system late_system(void) {
    amp_system system;
    amp_system_default(&system);
    system.thread_start = start_late;
    return system;
}

TEST(a_thread_that_has_not_begun_is_not_waited_for) {
    amp_desc desc = threads_of(2);
    amp_context *amp;
    int64_t begin;
    amp_cpu_info cpu;
    ampi_probe_cpu(&cpu);
    if (cpu.cores < 2) SKIP("one core");
    late_ns = 500000000;
    desc.system = late_system();
    amp = threads_open_with(desc);
    begin = ampi_os_clock(NULL);
    CHECK(same_bits(amp));
    CHECK(ampi_os_clock(NULL) - begin < late_ns / 2);
    amp_close(amp);
}

/* ---- Contexts */

typedef struct caller { pthread_t thread; amp_context *amp; int same; } caller;
static void *call_often(void *arg) {
    caller *c = (caller *)arg;
    int round;
    for (c->same = 1, round = 0; round < 50; round++) c->same &= same_bits(c->amp);
    return NULL;
}
static void call_from_several(amp_context *first, amp_context *second) {
    caller callers[4];
    int i;
    for (i = 0; i < 4; i++) {
        callers[i].amp = i % 2 ? second : first;
        CHECK_EQ(pthread_create(&callers[i].thread, NULL, call_often, &callers[i]), 0);
    }
    for (i = 0; i < 4; i++) {
        pthread_join(callers[i].thread, NULL);
        CHECK(callers[i].same);
    }
    CHECK_EQ(ampi_threads_running, 0);
}

TEST(several_callers_on_one_context) {
    amp_context *amp = threads_open_with(threads_of(3));
    call_from_several(amp, amp);
    amp_close(amp);
}

TEST(two_contexts_at_work) {
    amp_context *one = threads_open_with(threads_of(0)), *two = threads_open_with(threads_of(0));
    call_from_several(one, two);
    amp_close(one);
    CHECK(same_bits(two));
    amp_close(two);
}

TEST(contexts_share_threads) {
    amp_context *one = threads_open_with(threads_of(3)), *two, *none;
    amp_desc desc = threads_of(0), shown;
    desc.share_threads = one;
    two = threads_open_with(desc);
    CHECK_OK(amp_query(two, &shown));
    CHECK_EQ(shown.threads, 3);
    CHECK(two->threads == one->threads);
    call_from_several(one, two);
    desc.threads = 4;
    CHECK_ERR(amp_open(&none, &desc), AMP_ERR_CONFLICT);
    desc.threads = 0;
    desc.parallel.parallel = ampt_parallel;
    CHECK_ERR(amp_open(&none, &desc), AMP_ERR_CONFLICT);
    amp_close(one);
    CHECK(same_bits(two));
    amp_close(two);
}

static int32_t running_most;
static void note_running(void *arg, int32_t i) {
    int32_t now = __atomic_load_n(&ampi_threads_running, __ATOMIC_RELAXED), most = __atomic_load_n(&running_most, __ATOMIC_RELAXED);
    (void)arg; (void)i;
    while (now > most && !__atomic_compare_exchange_n(&running_most, &most, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    sched_yield();
}
static void *note_often(void *arg) {
    int round;
    for (round = 0; round < 2000; round++) ampi_threads_run((ampi_threads *)arg, 4, note_running, NULL);
    return NULL;
}

/* Two pools of two threads, two callers: each caller counts, and workers come only while there are cores. */
TEST(no_more_threads_run_than_there_are_cores) {
    ampi_threads *one = pool_of(2), *two = pool_of(2);
    pthread_t thread;
    running_most = 0;
    CHECK_EQ(pthread_create(&thread, NULL, note_often, two), 0);
    note_often(one);
    pthread_join(thread, NULL);
    CHECK_MSG(running_most <= 3, "%d threads at once", (int)running_most);      /* a caller may come after a worker */
    ampi_threads_close(one);
    ampi_threads_close(two);
}

TEST(pinned_threads_give_the_same_bits) {
    amp_desc desc = threads_of(3);
    amp_context *amp;
    desc.pin_threads = 1;
    amp = threads_open_with(desc);
    CHECK(same_bits(amp));
    amp_close(amp);
}

/* ---- A child of fork() */

TEST(a_child_computes_and_closes) {
    SKIP_ON_WINDOWS("fork");
    amp_context *amp = threads_open_with(threads_of(2));
    int status = -1, round;
    pid_t child;
#if defined(THREAD_SANITIZER)
    amp_close(amp);
    SKIP("this sanitizer allows no threads in a child");
#endif
    CHECK(same_bits(amp));
    child = fork();
    if (child == 0) {
        int same = 1;
        alarm(60);
        for (round = 0; round < 20; round++) same &= same_bits(amp);
        amp_close(amp);
        _exit(same ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(same_bits(amp));
    amp_close(amp);
}

/* ---- Threads that cannot be had */

static int starts_left, warnings;
static int start_few(void *user, void **thread, void (*run)(void *), void *arg) {
    return starts_left-- > 0 ? ampi_os_thread_start(user, thread, run, arg) : -EAGAIN;
}
static void count_warning(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level;
    if (id == 1009 && strstr(text, "out of threads") != NULL) warnings++;
}

TEST(out_of_threads) {
    amp_cpu_info cpu;
    int few;
    ampi_probe_cpu(&cpu);
    if (cpu.cores < 2) SKIP("one core");
    for (few = 0; few < 2; few++) {
        amp_desc desc = threads_of(0);
        amp_context *amp;
        int round;
        starts_left = few * (cpu.cores - 2);
        warnings = 0;
        amp_system_default(&desc.system);
        desc.system.thread_start = start_few;
        desc.logger.write = count_warning;
        amp = threads_open_with(desc);
        for (round = 0; round < 5; round++) CHECK(same_bits(amp));
        CHECK_EQ(warnings, 1);
        amp_close(amp);
    }
}

/* ---- A host's own pool: in any order, at the same time or not, and one that breaks its promise */

static void backwards(void *user, int32_t n, void (*run)(void *, int32_t), void *arg) {
    (void)user;
    while (n-- > 0) run(arg, n);
}
static void no_one(void *user, int32_t n, void (*run)(void *, int32_t), void *arg) { (void)user; (void)n; (void)run; (void)arg; }
static void too_often(void *user, int32_t n, void (*run)(void *, int32_t), void *arg) {
    int32_t i;
    (void)user;
    for (i = 0; i < 3 * n; i++) run(arg, i);
}
#if defined(_OPENMP)
static void openmp(void *user, int32_t n, void (*run)(void *, int32_t), void *arg) {
    int32_t i;
    (void)user;
    #pragma omp parallel for num_threads(n) schedule(static, 1)
    for (i = 0; i < n; i++) run(arg, i);
}
#endif

static void check_host_pool(void (*parallel)(void *, int32_t, void (*)(void *, int32_t), void *)) {
    amp_desc desc = threads_of(3);
    amp_context *amp;
    int round;
    desc.parallel.parallel = parallel;
    amp = threads_open_with(desc);
    for (round = 0; round < 10; round++) CHECK(same_bits(amp));
    CHECK_EQ(amp->threads->started, 0);
    amp_close(amp);
}

/* Sharing with a context that has the host's pool is using that. */
TEST(a_hosts_pool_is_shared) {
    amp_desc desc = threads_of(3);
    amp_context *one, *two;
    desc.parallel.parallel = ampt_parallel;
    one = threads_open_with(desc);
    desc = threads_of(0);
    desc.share_threads = one;
    two = threads_open_with(desc);
    CHECK(same_bits(two));
    CHECK_EQ(two->threads->started, 0);
    amp_close(two);
    amp_close(one);
}

/* A closed context that an object of its own still holds has no threads to share. */
TEST(a_closed_context_shares_nothing) {
    amp_desc desc = threads_of(2);
    amp_context *one, *none;
    amp_scaler *scaler = NULL;
    desc.logger.level = AMP_LOG_OFF;
    one = threads_open_with(desc);
    CHECK_OK(amp_scaler_create(one, &scaler, NULL));
    amp_close(one);
    desc.share_threads = one;
    CHECK_ERR(amp_open(&none, &desc), AMP_ERR_STATE);
    amp_scaler_destroy(scaler);
}

TEST(a_pool_of_the_hosts_own) {
    check_host_pool(ampt_parallel);
    check_host_pool(backwards);
    check_host_pool(no_one);
    check_host_pool(too_often);
#if defined(_OPENMP)
    check_host_pool(openmp);
#endif
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    prepare();
    RUN(numbers_are_handed_out_once); RUN(calls_within_calls_return); RUN(a_thread_that_has_not_begun_is_not_waited_for);
    RUN(several_callers_on_one_context); RUN(two_contexts_at_work);
    RUN(contexts_share_threads); RUN(no_more_threads_run_than_there_are_cores); RUN(pinned_threads_give_the_same_bits);
    RUN(a_child_computes_and_closes); RUN(out_of_threads); RUN(a_pool_of_the_hosts_own);
    RUN(a_hosts_pool_is_shared); RUN(a_closed_context_shares_nothing);
    return TEST_END();
}
