/* t_tcp.c - tests examples/amp_tcp.h and ranks.h: processes that connect over TCP, and their sums.  Further tests have a
 * rank that is wrong, late or dead.  Ranks are forked from this program.  Each writes its result to shared memory. */
#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE 1         /* MAP_ANONYMOUS */
#endif
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include <netdb.h>

/* A machine's own name as Debian's /etc/hosts has it. */
static const char own_name[] = "own-name";
static int find_address(const char *name, const char *port, const struct addrinfo *hints, struct addrinfo **found) {
    return getaddrinfo(name != NULL && strcmp(name, own_name) == 0 ? "127.0.1.1" : name, port, hints, found);
}
#define getaddrinfo find_address
#include "../../examples/ranks.h"
#include "../test.h"
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { MOST = 5, NUMBERS = 70000, LIMIT = 1500 };

typedef struct outcome {
    int result, went_on;            /* went_on: ranks that stop or die have come to where they do */
    double seconds;
    char why[300];
    char data[NUMBERS * 8];
} outcome;
static outcome *outcomes;           /* by process */
static char file[64];

typedef struct work {
    amp_tcp_desc desc;
    int (*run)(amp_tcp *t, outcome *out);       /* once all have joined; NULL: nothing */
} work;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A port that nobody listens on. */
static int32_t free_port(void) {
    const char *why = NULL;
    int fd = amp_tcp_listen("127.0.0.1", 0, &why);
    amp_tcp_place place;
    amp_tcp_end(fd, 0, &place);
    close(fd);
    return place.port;
}

static void child(const work *w, outcome *out) {
    amp_tcp t;
    double began = now();
    memset(out, 0, sizeof *out);
    out->result = (int)amp_tcp_open(&t, &w->desc);
    if (out->result == 0 && w->run != NULL) out->result = w->run(&t, out);
    snprintf(out->why, sizeof out->why, "%s", t.why);
    amp_tcp_close(&t);
    out->seconds = now() - began;
    _exit(0);
}

/* Runs n processes; those in `stopped` are not waited for, but killed at the end. */
static void run_all(const work *w, int n, unsigned stopped) {
    pid_t pid[MOST + 1];
    int i;
    fflush(stdout);
    for (i = 0; i < n; i++) if ((pid[i] = fork()) == 0) child(&w[i], &outcomes[i]);
    for (i = 0; i < n; i++) if ((stopped >> i & 1) == 0) waitpid(pid[i], NULL, 0);
    for (i = 0; i < n; i++) if ((stopped >> i & 1) != 0) { kill(pid[i], SIGKILL); waitpid(pid[i], NULL, 0); }
}

/* world ranks that do the same; by a file, or by an address. */
static void describe(work *w, int world, int by_file, int (*run)(amp_tcp *, outcome *)) {
    int32_t port = by_file ? 0 : free_port();
    int i;
    memset(w, 0, sizeof *w * (MOST + 1));
    for (i = 0; i <= MOST; i++) {
        w[i].desc.rank = i;
        w[i].desc.world = world;
        w[i].desc.address = by_file ? NULL : "127.0.0.1";
        w[i].desc.port = port;
        w[i].desc.file = by_file ? file : NULL;
        w[i].desc.job = "a job";
        w[i].desc.timeout_ms = 20000;
        w[i].run = run;
    }
    if (by_file) (void)remove(file);
}

/* All n processes but `except` failed within the limit and some slack, with this in their text. */
static void check_failed(int n, int except, const char *text, double most) {
    int i;
    for (i = 0; i < n; i++) {
        if (i == except) continue;
        CHECK_MSG(outcomes[i].result != 0 && strstr(outcomes[i].why, text) != NULL, "process %d: %d \"%s\", not \"%s\"",
                  i, outcomes[i].result, outcomes[i].why, text);
        CHECK_MSG(outcomes[i].seconds < most, "process %d took %.2f s, at most %.2f are allowed", i, outcomes[i].seconds,
                  most);
    }
}

/* ---- Sums */

/* Number k of rank r: magnitudes far apart, so that another order gives other bits. */
static double number(int rank, int64_t k) {
    return ldexp((double)amp_random_uniform((uint64_t)rank + 1, (uint64_t)k) - 0.4, (int)(k % 7) * 4);
}

static const amp_dtype dtypes[] = {AMP_F32, AMP_F64, AMP_BF16, AMP_F16};

/* The same sum as amp_ranks takes: in the order of ranks, in fp64, rounded once. */
static void expected(int world, int64_t first, int64_t n, amp_dtype dtype, amp_reduce_op op, void *out) {
    int64_t k;
    int r;
    for (k = 0; k < n; k++) {
        double sum = 0, x;
        for (r = 0; r < world; r++) {
            char rounded[8];
            x = number(r, first + k);
            amp_convert(rounded, dtype, &x, AMP_F64, 1, NULL, NULL);
            amp_convert(&x, AMP_F64, rounded, dtype, 1, NULL, NULL);
            sum = r == 0 ? x : op == AMP_REDUCE_SUM ? sum + x : x > sum ? x : sum;
        }
        amp_convert((char *)out + k * (int64_t)amp_dtype_size(dtype), dtype, &sum, AMP_F64, 1, NULL, NULL);
    }
}

static void fill(void *out, int rank, int64_t n, amp_dtype dtype) {
    int64_t k;
    for (k = 0; k < n; k++) {
        double x = number(rank, k);
        amp_convert((char *)out + k * (int64_t)amp_dtype_size(dtype), dtype, &x, AMP_F64, 1, NULL, NULL);
    }
}

static char *wanted, *brought;      /* of a child */

static int sum_some(amp_tcp *t, outcome *out, int64_t n, amp_dtype dtype, amp_reduce_op op) {
    size_t bytes = (size_t)n * amp_dtype_size(dtype);
    amp_reducer r = amp_tcp_reducer(t);
    fill(out->data, t->rank, n, dtype);
    if (r.reduce(r.user, out->data, n, dtype, op, NULL) != 0) return 1;
    expected(t->world, 0, n, dtype, op, wanted);
    return memcmp(wanted, out->data, bytes) != 0 ? 1000 + (int)dtype : 0;
}

static int scatter(amp_tcp *t, outcome *out, int64_t each, amp_dtype dtype) {
    amp_reducer r = amp_tcp_reducer(t);
    char *own = out->data + t->rank * each * (int64_t)amp_dtype_size(dtype);
    fill(out->data, t->rank, each * t->world, dtype);
    if (r.calls->reduce_scatter(r.user, out->data, own, each, dtype, AMP_REDUCE_SUM, NULL) != 0) return 1;
    expected(t->world, t->rank * each, each, dtype, AMP_REDUCE_SUM, wanted);
    return memcmp(wanted, own, (size_t)each * amp_dtype_size(dtype)) != 0 ? 2000 + (int)dtype : 0;
}

static int move_bytes(amp_tcp *t, int64_t each) {
    amp_reducer r = amp_tcp_reducer(t);
    int64_t k;
    int i, bad = 0;
    for (k = 0; k < each * t->world; k++) brought[k] = (char)(t->rank * 50 + k / each * 7 + k % 13);
    memset(wanted, 0, (size_t)(each * t->world));
    bad |= r.calls->all_gather(r.user, brought, wanted, each, NULL);
    for (i = 0; i < t->world; i++)
        for (k = 0; k < each; k++) bad |= wanted[i * each + k] != (char)(i * 50 + k % 13);
    bad |= r.calls->all_to_all(r.user, brought, wanted, each, NULL);
    for (i = 0; i < t->world; i++)
        for (k = 0; k < each; k++) bad |= wanted[i * each + k] != (char)(i * 50 + t->rank * 7 + (t->rank * each + k) % 13);
    for (i = 0; i < t->world; i++) {
        memset(wanted, t->rank + 1, (size_t)each);
        bad |= r.calls->broadcast(r.user, wanted, each, i, NULL);
        for (k = 0; k < each; k++) bad |= wanted[k] != (char)(i + 1);
    }
    return bad ? 3000 : 0;
}

static int all_exchanges(amp_tcp *t, outcome *out) {
    static const int64_t sizes[] = {1, 3, 511, 20011, NUMBERS};
    int i, k, bad = 0;
    wanted = (char *)malloc(NUMBERS * 8);
    brought = (char *)malloc(NUMBERS * 8);
    t->piece = 1 << 16;             /* several rounds */
    for (i = 0; i < 4 && !bad; i++)
        for (k = 0; k < 5 && !bad; k++) {
            bad = sum_some(t, out, sizes[k], dtypes[i], AMP_REDUCE_SUM);
            if (!bad) bad = sum_some(t, out, sizes[k], dtypes[i], AMP_REDUCE_MAX);
            if (!bad) bad = scatter(t, out, sizes[k] / t->world, dtypes[i]);
        }
    for (k = 0; k < 5 && !bad; k++) bad = move_bytes(t, sizes[k]);
    return bad;
}

TEST(sums_are_those_of_the_order_of_ranks) {
    work w[MOST + 1];
    int world, i;
    for (world = 1; world <= MOST; world++) {
        if (AMPT_SANITIZED && world > 2 && world < MOST) continue;     /* the same memory, with fewer ranks */
        describe(w, world, world % 2, all_exchanges);
        run_all(w, world, 0);
        for (i = 0; i < world; i++) CHECK_MSG(outcomes[i].result == 0, "rank %d of %d: %d %s", i, world, outcomes[i].result, outcomes[i].why);
    }
    CHECK(access(file, F_OK) != 0);             /* rank 0 has removed it */
}

static int largest_of_nan(amp_tcp *t, outcome *out) {
    const uint32_t nan = 0x7fc00000u;
    float x = 3;
    (void)out;
    if (t->rank == 1) memcpy(&x, &nan, sizeof x);
    if (amp_tcp_reduce(t, &x, 1, AMP_F32, AMP_REDUCE_MAX, NULL) != 0) return 1;
    return amp_is_finite_f32(&x) ? 2 : 0;
}
TEST(nan_is_the_largest) {
    work w[MOST + 1];
    int i;
    describe(w, 3, 0, largest_of_nan);
    run_all(w, 3, 0);
    for (i = 0; i < 3; i++) CHECK_EQ(outcomes[i].result, 0);
}

/* ---- Bad starts: every process fails within the limit, by name */

static void limit(work *w) {
    int i;
    for (i = 0; i <= MOST; i++) w[i].desc.timeout_ms = LIMIT;
}
static const double in_time = LIMIT * 1e-3 + 1.5;

TEST(too_few_ranks) {
    work w[MOST + 1];
    describe(w, 4, 0, NULL);
    limit(w);
    run_all(w, 3, 0);
    check_failed(3, -1, "rank 3 has not joined within 1500 ms: 3 of 4 ranks are here", in_time);
    describe(w, 3, 1, NULL);
    limit(w);
    run_all(&w[1], 2, 0);                       /* rank 0 does not come */
    check_failed(2, -1, "no file yet", in_time);
}

TEST(one_rank_twice) {
    work w[MOST + 1];
    const char *loser;
    int tries, taken = 0;
    describe(w, 4, 0, NULL);
    w[3].desc.rank = 1;
    run_all(w, 4, 0);
    check_failed(4, -1, "two processes were started as rank 1", in_time);
    for (tries = 0; tries < 8 && !taken; tries++) {     /* two of rank 0: one of them finds its port taken */
        describe(w, 2, 0, NULL);
        limit(w);
        w[2].desc.rank = 0;
        run_all(w, 3, 0);
        CHECK((outcomes[0].result != 0) != (outcomes[2].result != 0));
        loser = outcomes[outcomes[0].result == 0 ? 2 : 0].why;
        taken = strstr(loser, "is in use, by another program or another rank 0") != NULL;
        /* on a busy machine it may come when the others have met, and then waits in vain */
        CHECK_MSG(taken || strstr(loser, "1 of 2 ranks are here") != NULL, "%s", loser);
    }
    CHECK(taken);
    CHECK_EQ(outcomes[1].result, 0);
    describe(w, 2, 1, NULL);
    limit(w);
    w[2].desc.rank = 0;
    run_all(w, 3, 0);                           /* by the file: at most one of them has rank 1 */
    CHECK(outcomes[0].result != 0 || outcomes[2].result != 0);
    CHECK(outcomes[0].seconds < 2 * in_time && outcomes[1].seconds < 2 * in_time && outcomes[2].seconds < 2 * in_time);
}

TEST(another_world) {
    work w[MOST + 1];
    describe(w, 3, 0, NULL);
    w[2].desc.world = 4;
    run_all(w, 3, 0);
    check_failed(3, -1, "rank 2 was started as one of 4, rank 0 as one of 3", in_time);
}

TEST(port_in_use) {
    work w[MOST + 1];
    const char *why = NULL;
    int fd;
    describe(w, 3, 0, NULL);
    limit(w);
    fd = amp_tcp_listen("127.0.0.1", w->desc.port, &why);
    CHECK(fd >= 0);
    run_all(w, 3, 0);
    CHECK(strstr(outcomes[0].why, "of this machine is in use, by another program") != NULL);
    CHECK(outcomes[0].seconds < 1);
    check_failed(3, 0, "what listens there is not rank 0 of this job", 2 * in_time);
    close(fd);
}

TEST(wrong_address) {
    work w[MOST + 1];
    int i;
    describe(w, 3, 0, NULL);
    limit(w);
    for (i = 0; i < 3; i++) w[i].desc.address = "203.0.113.7";      /* of nobody: for documentation */
    run_all(w, 3, 0);
    CHECK_MSG(strstr(outcomes[0].why, "203.0.113.7 is not an address of this machine, where rank 0 is") != NULL, "%s", outcomes[0].why);
    check_failed(3, 0, "did not reach rank 0 at 203.0.113.7, port ", in_time);
    for (i = 0; i < 3; i++) w[i].desc.address = "no-such-machine.invalid";
    run_all(w, 3, 0);
    check_failed(3, -1, "no-such-machine.invalid", 4 * in_time);
    w[1].desc.address = "127.0.0.1";            /* where nobody listens */
    run_all(&w[1], 1, 0);
    check_failed(1, -1, "did not reach rank 0 at 127.0.0.1, port ", in_time);
    CHECK(strstr(outcomes->why, "Connection refused") != NULL);
}

/* An address of this machine that is not on loopback, as a number; 0: it has none. */
static int outer_address(amp_tcp_place *out) {
    struct sockaddr_in far;
    int fd = socket(AF_INET, SOCK_DGRAM, 0), has;
    memset(&far, 0, sizeof far);
    far.sin_family = AF_INET;
    far.sin_port = htons(9);
    far.sin_addr.s_addr = htonl(0xcb007107);    /* 203.0.113.7; nothing is sent */
    has = connect(fd, (struct sockaddr *)&far, sizeof far) == 0;
    if (has) amp_tcp_end(fd, 0, out);
    close(fd);
    return has && !amp_tcp_is_loopback(out->host);
}

/* Ranks 0 and 1 are on a machine whose name leads to loopback there; rank 2 comes to them from outside. */
TEST(own_name_on_loopback) {
    work w[MOST + 1];
    amp_tcp_place outer;
    int i;
    if (!outer_address(&outer)) SKIP("this machine has no address but loopback");
    describe(w, 3, 0, all_exchanges);
    w[0].desc.address = w[1].desc.address = own_name;
    w[2].desc.address = outer.host;
    for (i = 0; i < 3; i++) w[i].desc.secret = "a word of their own";
    run_all(w, 3, 0);
    check_failed(3, -1, "the secret must have up to 63 bytes, without spaces", in_time);
    for (i = 0; i < 3; i++) w[i].desc.secret = "sesame";
    run_all(w, 3, 0);
    for (i = 0; i < 3; i++) CHECK_MSG(outcomes[i].result == 0, "rank %d: %d \"%s\"", i, outcomes[i].result, outcomes[i].why);
    limit(w);                                   /* on localhost nobody from outside is listened to */
    w[0].desc.address = w[1].desc.address = "localhost";
    run_all(w, 3, 0);
    check_failed(3, 0, "", in_time);
    CHECK(strstr(outcomes[2].why, "Connection refused") != NULL);
    for (i = 0; i < 3; i++) { w[i].desc.secret = NULL; w[i].desc.address = outer.host; }
    run_all(w, 3, 0);                           /* and without a secret nobody meets outside */
    check_failed(1, -1, "can be reached from other machines: set the environment variable AMP_TCP_SECRET", in_time);
}

/* A process that does not know the secret is turned away and told so, and the run goes on without it. */
TEST(another_secret) {
    work w[MOST + 1];
    struct stat info;
    char line[400] = "";
    FILE *f;
    pid_t pid;
    int i;
    describe(w, 3, 0, all_exchanges);
    for (i = 0; i < 3; i++) w[i].desc.secret = "sesame";
    w[3].desc.rank = 1;
    w[3].desc.world = 7;                        /* which would end a run if it were believed */
    w[3].desc.secret = "sesam";
    w[3].desc.timeout_ms = LIMIT;
    run_all(w, 4, 0);
    for (i = 0; i < 3; i++) CHECK_MSG(outcomes[i].result == 0, "%d %s", i, outcomes[i].why);
    CHECK(outcomes[3].result != 0 && outcomes[3].seconds < 2 * in_time);
    limit(w);
    w[1].desc.secret = NULL;                    /* rank 0 names the address of who was turned away */
    run_all(w, 3, 0);
    check_failed(1, -1, "rank 1 has not joined within 1500 ms: 2 of 3 ranks are here; turned away: 127.0.0.1, port ", in_time);
    CHECK_MSG(strstr(outcomes[0].why, "has another secret") != NULL, "%s", outcomes[0].why);
    CHECK_MSG(strstr(outcomes[1].why, "its secret (.secret, AMP_TCP_SECRET) is not that of rank 0") != NULL, "%s", outcomes[1].why);
    describe(w, 2, 1, NULL);                    /* the file has one, and is for its owner alone */
    fflush(stdout);
    if ((pid = fork()) == 0) child(w, outcomes);
    for (i = 0; i < 1000 && ((f = fopen(file, "r")) == NULL || fgets(line, sizeof line, f) == NULL); i++) amp_tcp_sleep(10);
    if (f != NULL) fclose(f);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    CHECK(stat(file, &info) == 0 && (info.st_mode & 0777) == 0600);
    CHECK_MSG(strlen(line) > 40, "%s", line);
}

/* More ranks than connections were once held at a time, in one process, while strangers connect and say nothing. */
enum { MANY = 48 };
static work many[MANY];
static int in_sum[MANY];
static void *rank_of_many(void *arg) {
    int i = (int)((work *)arg - many);
    float one = 1;
    amp_tcp t;
    in_sum[i] = amp_tcp_open(&t, &many[i].desc) == AMP_OK && amp_tcp_reduce(&t, &one, 1, AMP_F32, AMP_REDUCE_SUM, NULL) == 0 ? (int)one : 0;
    if (in_sum[i] == 0) printf("  rank %d: %s\n", i, t.why);
    amp_tcp_close(&t);
    return NULL;
}
TEST(many_ranks_beside_idle_strangers) {
    pthread_t threads[MANY];
    const char *why = NULL;
    int32_t port = free_port();
    pid_t pid;
    int i, made = 0;
    fflush(stdout);
    if ((pid = fork()) == 0) {
        for (i = 0; i < 400; i++) { (void)amp_tcp_connect("127.0.0.1", port, amp_tcp_now() + 100, &why); amp_tcp_sleep(2); }
        amp_tcp_sleep(20000);
        _exit(0);
    }
    for (i = 0; i < MANY; i++) {
        amp_tcp_desc d = {.rank = i, .world = MANY, .address = "127.0.0.1", .port = port, .timeout_ms = 60000};
        many[i].desc = d;
        if (pthread_create(&threads[i], NULL, rank_of_many, &many[i]) != 0) break;
        made++;
    }
    for (i = 0; i < made; i++) pthread_join(threads[i], NULL);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    CHECK_EQ(made, MANY);
    for (i = 0; i < MANY; i++) CHECK_EQ(in_sum[i], MANY);
}

/* A process of an older start of the job must not become a rank of the new one. */
TEST(another_job) {
    work w[MOST + 1];
    int i;
    describe(w, 3, 0, NULL);
    w[3].desc.rank = 1;
    w[3].desc.job = "an older job";
    w[3].desc.timeout_ms = LIMIT;
    run_all(w, 4, 0);
    for (i = 0; i < 3; i++) CHECK_MSG(outcomes[i].result == 0, "%d %s", i, outcomes[i].why);
    CHECK(outcomes[3].result != 0 && outcomes[3].seconds < in_time);
}

/* Strangers that connect, talk or stay silent do no harm. */
TEST(strangers) {
    work w[MOST + 1];
    pid_t pid;
    int i;
    describe(w, 3, 0, all_exchanges);
    fflush(stdout);
    if ((pid = fork()) == 0) {
        const char *why;
        char noise[2000];
        memset(noise, 'G', sizeof noise);
        for (i = 0; i < 200; i++) {
            int fd = amp_tcp_connect("127.0.0.1", w->desc.port, amp_tcp_now() + 100, &why);
            if (fd >= 0 && i % 3 == 0) (void)amp_tcp_send(fd, noise, sizeof noise);
            if (fd >= 0 && i % 3 == 1) close(fd);
            amp_tcp_sleep(1);
        }
        _exit(0);
    }
    run_all(w, 3, 0);
    waitpid(pid, NULL, 0);
    for (i = 0; i < 3; i++) CHECK_MSG(outcomes[i].result == 0, "%d %s", i, outcomes[i].why);
}

/* Calls after the connections are closed, or were never there, and from two threads at once. */
typedef struct second_thread { amp_tcp *t; float *x; } second_thread;
static void *call_too(void *arg) {
    second_thread *s = (second_thread *)arg;
    while (__atomic_load_n(&s->t->busy, __ATOMIC_ACQUIRE) == 0) {}
    (void)amp_tcp_reduce(s->t, s->x, 4, AMP_F32, AMP_REDUCE_SUM, NULL);
    return NULL;
}
static int call_twice_at_once(amp_tcp *t, outcome *out) {
    static float x[2][4];
    second_thread second;
    pthread_t thread;
    (void)out;
    if (t->rank == 1) { (void)poll(NULL, 0, 300); return amp_tcp_reduce(t, x[0], 4, AMP_F32, AMP_REDUCE_SUM, NULL); }
    second.t = t; second.x = x[1];
    if (pthread_create(&thread, NULL, call_too, &second) != 0) return 99;
    (void)amp_tcp_reduce(t, x[0], 4, AMP_F32, AMP_REDUCE_SUM, NULL);
    pthread_join(thread, NULL);
    return t->why[0] != 0;
}
static int call_after_close(amp_tcp *t, outcome *out) {
    amp_reducer r = amp_tcp_reducer(t);
    float x[4] = {1, 2, 3, 4};
    (void)out;
    amp_tcp_close(t);
    return r.reduce(r.user, x, 4, AMP_F32, AMP_REDUCE_SUM, NULL);
}
TEST(calls_that_cannot_be) {
    work w[MOST + 1];
    amp_tcp t;
    amp_tcp_desc d;
    float x = 1;
    describe(w, 2, 0, call_after_close);
    run_all(w, 2, 0);
    check_failed(2, -1, "has closed its connections", 5);
    describe(w, 2, 0, call_twice_at_once);
    limit(w);
    run_all(w, 2, 0);
    check_failed(2, -1, "two threads of rank 0 make calls at once", 5);
    memset(&d, 0, sizeof d);
    CHECK(amp_tcp_open(&t, &d) != AMP_OK);
    CHECK(amp_tcp_reduce(&t, &x, 1, AMP_F32, AMP_REDUCE_SUM, NULL) != 0 && amp_tcp_broadcast(&t, &x, 4, 0, NULL) != 0 && amp_tcp_barrier(&t) != 0);
    CHECK_MSG(strstr(t.why, ".world must be 1 to 1024") != NULL, "%s", t.why);
}

/* What launchers say in the environment: NAME=VALUE, and what comes of it; want NULL: rank `rank` of `world`. */
TEST(launchers) {
    static const struct { const char *set[6], *want; int rank, world; } rows[] = {
        {{NULL}, NULL, 0, 1},
        {{"RANK=2", "WORLD_SIZE=4"}, NULL, 2, 4},
        {{"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2"}, NULL, 1, 2},
        {{"PMI_RANK=1", "PMI_SIZE=3"}, NULL, 1, 3},
        {{"SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2"}, NULL, 1, 2},
        {{"SLURM_PROCID=0"}, NULL, 0, 1},                                                   /* in a batch script */
        {{"RANK=9", "WORLD_SIZE=16", "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2"}, NULL, 9, 16},     /* srun torchrun */
        {{"OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_SIZE=8", "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2"}, NULL, 5, 8},
        {{"RANK=0"}, "RANK is set, and WORLD_SIZE is not", 0, 0},
        {{"WORLD_SIZE=2"}, "WORLD_SIZE is set, and RANK is not", 0, 0},
        {{"RANK=2", "WORLD_SIZE=2"}, "RANK=2, must be 0 to 1", 0, 0},
        {{"RANK=", "WORLD_SIZE=2"}, "RANK=, must be 0 to 1", 0, 0},
        {{"RANK=0", "WORLD_SIZE=0"}, "WORLD_SIZE=0, must be 1 to 1024", 0, 0},
        {{"RANK=0", "WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4"},
         "OMPI_COMM_WORLD_SIZE=4, but WORLD_SIZE=1: unset RANK and WORLD_SIZE", 0, 0},
        {{"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=1", "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2"},
         "SLURM_STEP_NUM_TASKS=2, but OMPI_COMM_WORLD_SIZE=1", 0, 0},
    };
    size_t i;
    int k;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        int status = 0;
        pid_t pid;
        memset(outcomes, 0, sizeof *outcomes);
        fflush(stdout);
        if ((pid = fork()) == 0) {
            for (k = 0; k < ranks_n_launchers; k++) { unsetenv(ranks_launchers[k].rank); unsetenv(ranks_launchers[k].world); }
            for (k = 0; rows[i].set[k] != NULL; k++) putenv((char *)(uintptr_t)rows[i].set[k]);
            outcomes->result = (int)ranks_begin(NULL, NULL);
            outcomes->went_on = ranks.world * 100 + ranks.rank;
            snprintf(outcomes->why, sizeof outcomes->why, "%.299s", outcomes->result != 0 ? ex_error() : "");
            _exit(0);
        }
        waitpid(pid, &status, 0);
        CHECK_MSG(status == 0 && (outcomes->result != 0) == (rows[i].want != NULL), "row %d: %s", (int)i, outcomes->why);
        if (rows[i].want != NULL) CHECK_MSG(strstr(outcomes->why, rows[i].want) != NULL, "row %d: %s", (int)i, outcomes->why);
        else CHECK_EQ(outcomes->went_on, rows[i].world * 100 + rows[i].rank);
    }
}

TEST(bad_numbers) {
    amp_tcp t;
    amp_tcp_desc good, d;
    memset(&good, 0, sizeof good);
    good.world = 2;
    good.address = "127.0.0.1";
    good.port = 29500;
#define REFUSED(field, value, text) \
    d = good; d.field = value; CHECK(amp_tcp_open(&t, &d) != AMP_OK); CHECK_MSG(strstr(t.why, text) != NULL, "%s", t.why); amp_tcp_close(&t)
    REFUSED(world, 0, ".world must be 1 to 1024");
    REFUSED(world, 1025, ".world must be 1 to 1024");
    REFUSED(rank, 2, ".rank must be 0 to .world - 1");
    REFUSED(rank, -1, ".rank must be 0 to .world - 1");
    REFUSED(port, 0, ".port must be 1 to 65535");
    REFUSED(port, 65536, ".port must be 1 to 65535");
    REFUSED(timeout_ms, -1, ".timeout_ms must be 1 or more");
    REFUSED(address, NULL, "one of .address and .file must be set");
    REFUSED(file, file, "one of .address and .file must be set");
    REFUSED(job, "0123456789012345678901234567890123456789012345678901234567890123", ".job has over 63 bytes");
}

/* ---- A rank that goes away */

static int64_t rounds(amp_tcp *t, outcome *out, int64_t n, int64_t most) {
    int64_t i;
    memset(out->data, 0, (size_t)n * 4);
    for (i = 0; i < most; i++) {
        out->went_on = (int)i;
        if (amp_tcp_reduce(t, out->data, n, AMP_F32, AMP_REDUCE_SUM, NULL) != 0) break;
    }
    return i;
}
static int reduce_for_ever(amp_tcp *t, outcome *out) {
    (void)rounds(t, out, NUMBERS, INT64_MAX);
    return amp_tcp_reduce(t, out->data, 1, AMP_F32, AMP_REDUCE_SUM, NULL);      /* it stays so */
}
static int dies(amp_tcp *t, outcome *out) {
    (void)rounds(t, out, NUMBERS, 20);
    kill(getpid(), SIGKILL);
    return 0;
}
static int hangs(amp_tcp *t, outcome *out) {
    (void)rounds(t, out, NUMBERS, 20);
    kill(getpid(), SIGSTOP);
    return 0;
}
static int leaves(amp_tcp *t, outcome *out) { return (int)rounds(t, out, NUMBERS, 20) - 20; }
static int gives_up(amp_tcp *t, outcome *out) {
    (void)rounds(t, out, NUMBERS, 20);
    return (int)amp_tcp_fail(t, "rank %d: no more batches", (int)t->rank);
}
static int other_size(amp_tcp *t, outcome *out) {
    (void)rounds(t, out, NUMBERS, 20);
    return amp_tcp_reduce(t, out->data, NUMBERS - 1, AMP_F32, AMP_REDUCE_SUM, NULL);
}

TEST(a_rank_goes_away) {
    static const struct { int (*run)(amp_tcp *, outcome *); const char *text; int hangs; } ways[] = {
        {dies, "rank %d is gone: its connection has closed", 0},
        {hangs, "rank %d has not answered within 1500 ms", 1},
        {leaves, "rank %d has left", 0},
        {gives_up, "rank %d: no more batches", 0},
        {other_size, "rank %d reduces 69999 x fp32 (sum)", 0},
    };
    work w[MOST + 1];
    char text[100];
    int way, who, i;
    for (way = 0; way < 5; way++)
        for (who = 0; who < 4; who += 3 - way % 2) {
            describe(w, 4, 0, reduce_for_ever);
            limit(w);
            w[who].run = ways[way].run;
            run_all(w, 4, ways[way].hangs ? 1u << who : 0);
            snprintf(text, sizeof text, "rank %d reduces 69999 x", who);
            if (way != 4) {
                snprintf(text, sizeof text, ways[way].text, who);
                check_failed(4, who, text, in_time + 1);
            }
            for (i = 0; i < 4 && way == 4; i++) CHECK_MSG(outcomes[i].result != 0 && strstr(outcomes[i].why, text) != NULL, "%s", outcomes[i].why);
            CHECK_EQ(outcomes[who].went_on, 19);
        }
}

/* The hook's text reaches amp_last_error. */
static int in_a_context(amp_tcp *t, outcome *out) {
    float w[64], g[64];
    amp_context *amp;
    amp_optimizer *optimizer;
    amp_desc desc;
    amp_param p;
    amp_optimizer_desc adamw;
    int i, step;
    (void)out;
    memset(&desc, 0, sizeof desc);
    memset(&p, 0, sizeof p);
    memset(&adamw, 0, sizeof adamw);
    desc.reducer = amp_tcp_reducer(t);
    desc.threads = 1;
    if (amp_open(&amp, &desc) != AMP_OK) return 1;
    for (i = 0; i < 64; i++) w[i] = (float)i;
    p.name = "w";
    p.weight = amp_tensor1(w, AMP_F32, 64);
    p.grad = amp_tensor1(g, AMP_F32, 64);
    adamw.params = &p;
    adamw.n_params = 1;
    if (amp_param_register(amp, &p, 1) != AMP_OK || amp_optimizer_create(amp, &optimizer, &adamw) != AMP_OK) return 2;
    for (step = 0;; step++) {
        amp_result result;
        for (i = 0; i < 64; i++) g[i] = (float)(t->rank + i);
        if (t->rank == 2 && step == 3) kill(getpid(), SIGKILL);
        result = amp_step(optimizer, NULL);
        if (result == AMP_OK) continue;
        snprintf(t->why, sizeof t->why, "%s", amp_last_error());
        return step == 2 || step == 3 ? (int)result : 1000 + step;    /* 2: the end of it was not answered */
    }
}
TEST(the_error_names_the_rank) {
    work w[MOST + 1];
    int i;
    describe(w, 3, 0, in_a_context);
    run_all(w, 3, 0);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(outcomes[i].result, AMP_ERR_REDUCE);
        CHECK_MSG(strstr(outcomes[i].why, "AMP0503") != NULL && strstr(outcomes[i].why, "rank 2 is gone") != NULL, "%s", outcomes[i].why);
    }
}

int main(int argc, char **argv) {
    void *memory = mmap(NULL, sizeof *outcomes * (MOST + 1), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TEST_BEGIN(argc, argv);
    if (memory == MAP_FAILED) { perror("mmap"); return 2; }
    outcomes = (outcome *)memory;
    snprintf(file, sizeof file, "/tmp/amp_tcp_%ld", (long)getpid());
    RUN(sums_are_those_of_the_order_of_ranks);
    RUN(nan_is_the_largest);
    RUN(too_few_ranks);
    RUN(one_rank_twice);
    RUN(another_world);
    RUN(port_in_use);
    RUN(wrong_address);
    RUN(own_name_on_loopback);
    RUN(another_job);
    RUN(another_secret);
    RUN(many_ranks_beside_idle_strangers);
    RUN(strangers);
    RUN(calls_that_cannot_be);
    RUN(launchers);
    RUN(bad_numbers);
    RUN(a_rank_goes_away);
    RUN(the_error_names_the_rank);
    (void)remove(file);
    return TEST_END();
}
