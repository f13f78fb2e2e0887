/* amp_tcp.h - processes on one machine or on many train one model together, over TCP.
 *
 *     amp_tcp ranks;
 *     amp_tcp_desc tcp = {.rank = 1, .world = 4, .address = "10.0.0.1", .port = 29500};
 *     if (amp_tcp_open(&ranks, &tcp) != AMP_OK) return fprintf(stderr, "%s\n", ranks.why), 1;
 *     desc.reducer = amp_tcp_reducer(&ranks);
 *     amp_open(&amp, &desc); ...; amp_close(amp);
 *     amp_tcp_close(&ranks);
 *
 * Each rank holds the whole model and reads its own batches (a loader takes rank and world from the context).  Sums are
 * taken in the order of ranks in fp64 and rounded once: all ranks get the same bits, in every run.  A device's memory
 * goes through the host.
 *
 * A rank that dies is noticed as its connections close, one that hangs after timeout_ms; every rank's call then fails,
 * and all later ones, with a text that names it.  One thread at a time makes calls, in the same order on all ranks:
 * contexts that train at once need an amp_tcp each.
 * There is no password and no encryption: this is for networks that you trust. */
#ifndef EXAMPLE_AMP_TCP
#define EXAMPLE_AMP_TCP
#include "../amp.h"
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct amp_tcp_desc {
    int32_t rank, world;        /* world: 1 to 1024 */
    /* Of rank 0's machine, a name or a number; the same on all ranks.  A name that leads to loopback there, as Debian's
       /etc/hosts has it, and is not localhost: rank 0 listens on all its addresses. */
    const char *address;
    int32_t port;               /* rank 0 listens on it, and the others connect to it */
    const char *file;           /* instead of both: one that all ranks see, in which rank 0 writes where it listens */
    const char *job;            /* up to 63 bytes that tell this job from others, and from its own restarts; or NULL */
    int32_t timeout_ms;         /* how long a rank waits for another, also at the start; default 60000 */
} amp_tcp_desc;

/* The first bytes of a connection. */
typedef enum amp_tcp_purpose { amp_tcp_joins = 1, amp_tcp_brings_data = 2, amp_tcp_brings_words = 3 } amp_tcp_purpose;
typedef struct amp_tcp_hello {
    uint32_t magic;             /* also tells another byte order */
    int32_t rank, world, port, purpose, reserved;
    uint64_t key;               /* a number of this job that rank 0 gives to all who join */
    char job[64];
} amp_tcp_hello;

/* What a rank tells another beside data. */
typedef enum amp_tcp_kind {
    amp_tcp_welcome = 1, amp_tcp_other_job = 2, amp_tcp_failed = 3, amp_tcp_bye = 4
} amp_tcp_kind;
typedef struct amp_tcp_word { uint32_t magic; int32_t kind; uint64_t key; char text[240]; } amp_tcp_word;

typedef struct amp_tcp_place { char host[60]; int32_t port; } amp_tcp_place;

/* Precedes the data of an exchange; the peer's must be the same. */
typedef struct amp_tcp_call { uint64_t number; int64_t count; int32_t kind, dtype, op, root; } amp_tcp_call;

typedef struct amp_tcp_peer {
    int data, words;            /* sockets; -1: none */
    int said_bye;
    amp_tcp_word word;          /* that is coming in: so far `heard` bytes */
    size_t heard;
    amp_tcp_call call;          /* of the exchange under way */
    const char *out;
    char *in;
    size_t n_out, n_in, sent, received;     /* bytes; sent and received count the call too */
} amp_tcp_peer;

typedef struct amp_tcp {
    int32_t rank, world, timeout_ms, busy;      /* busy: a call is under way */
    uint64_t key;
    amp_tcp_call call;
    amp_tcp_peer *peers;        /* by rank */
    struct pollfd *polls;
    char *parts;                /* world * piece bytes that the others sent */
    size_t piece;
    char why[240];              /* why every call fails from now on; "": they do not */
} amp_tcp;

static const uint32_t amp_tcp_magic = 0x414d5054;

/* ---- Failing: the first reason stays, and all ranks hear it */

static inline int64_t amp_tcp_now(void) {       /* milliseconds */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static inline int amp_tcp_would_wait(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

static inline ssize_t amp_tcp_send(int socket, const void *data, size_t bytes) {
#if defined(MSG_NOSIGNAL)
    return send(socket, data, bytes, MSG_NOSIGNAL);     /* an error, not a signal, if the peer has closed */
#else
    return send(socket, data, bytes, 0);
#endif
}

static inline void amp_tcp_say(const amp_tcp *t, int socket, amp_tcp_kind kind, const char *text) {
    amp_tcp_word word;
    memset(&word, 0, sizeof word);
    word.magic = amp_tcp_magic;
    word.kind = (int32_t)kind;
    word.key = t->key;
    snprintf(word.text, sizeof word.text, "%s", text);
    if (socket >= 0 && amp_tcp_send(socket, &word, sizeof word) < 0) return;    /* who is gone needs no word */
}

static inline amp_result amp_tcp_fail(amp_tcp *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline amp_result amp_tcp_fail(amp_tcp *t, const char *format, ...) {
    va_list args;
    int32_t i;
    if (t->why[0] != 0) return AMP_ERR_REDUCE;
    va_start(args, format);
    vsnprintf(t->why, sizeof t->why, format, args);
    va_end(args);
    for (i = 0; i < t->world && t->peers != NULL; i++) amp_tcp_say(t, t->peers[i].words, amp_tcp_failed, t->why);
    return AMP_ERR_REDUCE;
}

static inline amp_result amp_tcp_refuse(amp_tcp *t, amp_result result, const char *text) {
    (void)amp_tcp_fail(t, "%s", text);
    return result;
}

/* Takes what rank i says; 0: it has closed without a word. */
static inline int amp_tcp_take_word(amp_tcp *t, int32_t i) {
    amp_tcp_peer *p = &t->peers[i];
    ssize_t n = recv(p->words, (char *)&p->word + p->heard, sizeof p->word - p->heard, 0);
    if (n < 0 && amp_tcp_would_wait()) return 1;
    if (n <= 0) {
        close(p->words);
        p->words = -1;
        return p->said_bye;
    }
    p->heard += (size_t)n;
    if (p->heard < sizeof p->word) return 1;
    p->heard = 0;
    p->said_bye = 1;
    if (p->word.kind == (int32_t)amp_tcp_failed) (void)amp_tcp_fail(t, "%.*s", (int)sizeof t->why - 1, p->word.text);
    return 1;
}

/* Rank i is gone.  It may have been told of another's end, and others may tell of that: they have a moment to do so. */
static inline amp_result amp_tcp_gone(amp_tcp *t, int32_t i, const char *why) {
    int64_t deadline = amp_tcp_now() + (t->timeout_ms < 2000 ? t->timeout_ms / 4 : 500);
    int32_t k;
    while (t->why[0] == 0 && amp_tcp_now() < deadline) {
        for (k = 0; k < t->world && t->why[0] == 0; k++) if (t->peers[k].words >= 0) (void)amp_tcp_take_word(t, k);
        (void)poll(NULL, 0, 2);
    }
    return amp_tcp_fail(t, "rank %d is gone: %s", (int)i, why);
}

static inline void amp_tcp_hear(amp_tcp *t, int32_t i) {
    if (!amp_tcp_take_word(t, i)) (void)amp_tcp_gone(t, i, "its connection has closed");
}

/* ---- Exchanges, between every two ranks at once */

/* Sends or receives what it can; 0: the peer has closed. */
static inline int amp_tcp_move(amp_tcp *t, amp_tcp_peer *p, int sends) {
    const size_t head = sizeof p->call;
    size_t *done = sends ? &p->sent : &p->received, end = head + (sends ? p->n_out : p->n_in), at, n;
    ssize_t moved = 1;
    while (moved > 0 && *done < end) {
        at = *done < head ? *done : *done - head;
        n = (*done < head ? head : end) - *done;
        if (sends) moved = amp_tcp_send(p->data, (*done < head ? (const char *)&t->call : p->out) + at, n);
        else moved = recv(p->data, (*done < head ? (char *)&p->call : p->in) + at, n, 0);
        if (moved > 0) *done += (size_t)moved;
        if (!sends && *done == head && memcmp(&p->call, &t->call, head) != 0) return 1;
    }
    return moved > 0 || (moved < 0 && amp_tcp_would_wait());
}

static inline int amp_tcp_owes(const amp_tcp_peer *p) { return p->received < sizeof p->call + p->n_in; }
static inline int amp_tcp_waits(const amp_tcp_peer *p) { return p->sent < sizeof p->call + p->n_out; }

static inline const char *amp_tcp_call_text(const amp_tcp_call *c, char text[80]) {
    static const char *const verbs[] = {"waits for all", "reduces", "scatters", "gathers", "exchanges", "broadcasts"};
    const char *verb = c->kind >= 0 && c->kind < 6 ? verbs[c->kind] : "does something else";
    if (c->kind == 1 || c->kind == 2)
        snprintf(text, 80, "%s %lld x %s (%s)", verb, (long long)c->count, amp_dtype_name((amp_dtype)c->dtype),
                 c->op == (int32_t)AMP_REDUCE_SUM ? "sum" : "max");
    else snprintf(text, 80, "%s, %lld bytes, root %d", verb, (long long)c->count, (int)c->root);
    return text;
}

/* 1: rank i and this one have something to exchange. */
static inline int amp_tcp_busy(const amp_tcp *t, int32_t i) {
    return i != t->rank && (amp_tcp_owes(&t->peers[i]) || amp_tcp_waits(&t->peers[i]));
}

/* Fills t->polls: what ranks say, then data.  Returns the rank that is furthest behind, or -1: all is done. */
static inline int32_t amp_tcp_polls(amp_tcp *t) {
    int32_t i, late = -1;
    for (i = 0; i < t->world; i++) {
        const amp_tcp_peer *p = &t->peers[i];
        struct pollfd *words = &t->polls[i], *data = &t->polls[t->world + i];
        words->fd = p->words;
        words->events = POLLIN;
        data->fd = amp_tcp_busy(t, i) ? p->data : -1;
        data->events = (short)((amp_tcp_owes(p) ? POLLIN : 0) | (amp_tcp_waits(p) ? POLLOUT : 0));
        words->revents = data->revents = 0;
        if (amp_tcp_busy(t, i) && (late < 0 || p->received < t->peers[late].received)) late = i;
    }
    return late;
}

/* Handles what poll reported of rank i. */
static inline amp_result amp_tcp_serve(amp_tcp *t, int32_t i) {
    amp_tcp_peer *p = &t->peers[i];
    int data = t->polls[t->world + i].revents;
    char mine[80], theirs[80];
    if (t->polls[i].revents != 0) amp_tcp_hear(t, i);
    if (((data & POLLOUT) != 0 && !amp_tcp_move(t, p, 1)) || ((data & ~POLLOUT) != 0 && !amp_tcp_move(t, p, 0))) {
        close(p->data);             /* why will be said, or that connection closes too */
        p->data = -1;
    }
    if (p->received >= sizeof p->call && memcmp(&p->call, &t->call, sizeof t->call) != 0)
        return amp_tcp_fail(t, "rank %d %s, rank %d %s", (int)t->rank, amp_tcp_call_text(&t->call, mine), (int)i,
                            amp_tcp_call_text(&p->call, theirs));
    if (p->data < 0 && p->said_bye && amp_tcp_busy(t, i)) return amp_tcp_fail(t, "rank %d has left", (int)i);
    return t->why[0] == 0 ? AMP_OK : AMP_ERR_REDUCE;
}

/* Moves all that the peers' out, in, n_out and n_in describe. */
static inline amp_result amp_tcp_exchange(amp_tcp *t) {
    int64_t deadline = amp_tcp_now() + t->timeout_ms, left;
    int32_t i, late;
    t->call.number++;
    for (i = 0; i < t->world; i++) t->peers[i].sent = t->peers[i].received = 0;
    while (t->why[0] == 0 && (late = amp_tcp_polls(t)) >= 0) {
        left = deadline - amp_tcp_now();
        if (poll(t->polls, (nfds_t)t->world * 2, left > 0 ? (int)left : 0) > 0) {
            for (i = 0; i < t->world; i++) if (amp_tcp_serve(t, i) != AMP_OK) return AMP_ERR_REDUCE;
            deadline = amp_tcp_now() + t->timeout_ms;
        } else if (left <= 0)
            return amp_tcp_fail(t, "rank %d has not answered within %d ms", (int)late, (int)t->timeout_ms);
    }
    return t->why[0] == 0 ? AMP_OK : AMP_ERR_REDUCE;
}

/* Describes what goes to rank i and comes from it. */
static inline void amp_tcp_pair(amp_tcp *t, int32_t i, const void *out, size_t n_out, void *in, size_t n_in) {
    amp_tcp_peer *p = &t->peers[i];
    p->out = (const char *)out;
    p->in = (char *)in;
    p->n_out = i != t->rank ? n_out : 0;
    p->n_in = i != t->rank ? n_in : 0;
}

/* A call begins, unless it is refused; amp_tcp_end_call ends it. */
static inline amp_result amp_tcp_begin(amp_tcp *t, int kind, int64_t count, int32_t dtype, int32_t op, int32_t root) {
    if (t->peers == NULL || t->why[0] != 0) return AMP_ERR_REDUCE;
    if (__atomic_exchange_n(&t->busy, 1, __ATOMIC_ACQUIRE))
        return amp_tcp_fail(t, "two threads of rank %d make calls at once: each needs an amp_tcp of its own",
                            (int)t->rank);
    t->call.kind = kind;
    t->call.count = count;
    t->call.dtype = dtype;
    t->call.op = op;
    t->call.root = root;
    return AMP_OK;
}
static inline int amp_tcp_end_call(amp_tcp *t, amp_result result) {
    __atomic_store_n(&t->busy, 0, __ATOMIC_RELEASE);
    return (int)result;
}

/* ---- Sums */

/* NaN, by its bits, counts as the largest. */
static inline double amp_tcp_larger(double a, double b) {
    const uint64_t inf = (uint64_t)0x7ff0 << 48;
    uint64_t x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    if (x << 1 > inf << 1) return a;
    return y << 1 > inf << 1 || b > a ? b : a;
}

/* out = the sum, or the largest, of n numbers at `mine` and at t->parts + i * t->piece of each other rank i. */
static inline amp_result amp_tcp_combine(amp_tcp *t, void *out, const void *mine, int64_t n, amp_dtype dtype, int op) {
    enum { BLOCK = 512 };
    const size_t size = amp_dtype_size(dtype);
    double sum[BLOCK], x[BLOCK];
    int64_t at, k, i;
    int32_t rank;
    for (at = 0; at < n; at += k) {
        k = n - at < BLOCK ? n - at : (int64_t)BLOCK;
        for (rank = 0; rank < t->world; rank++) {
            const char *from = rank == t->rank ? (const char *)mine : t->parts + (size_t)rank * t->piece;
            if (amp_convert(rank == 0 ? sum : x, AMP_F64, from + (size_t)at * size, dtype, k, NULL, NULL) != AMP_OK)
                return amp_tcp_fail(t, "rank %d: %s", (int)t->rank, amp_last_error());
            if (rank > 0 && op == (int)AMP_REDUCE_SUM) for (i = 0; i < k; i++) sum[i] += x[i];
            else if (rank > 0) for (i = 0; i < k; i++) sum[i] = amp_tcp_larger(sum[i], x[i]);
        }
        (void)amp_convert((char *)out + (size_t)at * size, dtype, sum, AMP_F64, k, NULL, NULL);
    }
    return AMP_OK;
}

/* All send all: one exchange, for what is small. */
static inline amp_result amp_tcp_reduce_small(amp_tcp *t, char *data, int64_t n, amp_dtype dtype, int op) {
    size_t bytes = (size_t)n * amp_dtype_size(dtype);
    amp_result result;
    int32_t i;
    for (i = 0; i < t->world; i++) amp_tcp_pair(t, i, data, bytes, t->parts + (size_t)i * t->piece, bytes);
    result = amp_tcp_exchange(t);
    return result == AMP_OK ? amp_tcp_combine(t, data, data, n, dtype, op) : result;
}

/* Each rank sums one part and sends the sums to all. */
static inline amp_result amp_tcp_reduce_parts(amp_tcp *t, char *data, int64_t n, amp_dtype dtype, int op) {
    const int64_t size = (int64_t)amp_dtype_size(dtype), world = t->world;
    const int64_t first = n * t->rank / world, end = n * (t->rank + 1) / world;
    const size_t mine = (size_t)((end - first) * size);
    amp_result result;
    int32_t i;
    for (i = 0; i < t->world; i++)
        amp_tcp_pair(t, i, data + n * i / world * size, (size_t)((n * (i + 1) / world - n * i / world) * size),
                     t->parts + (size_t)i * t->piece, mine);
    result = amp_tcp_exchange(t);
    if (result == AMP_OK)
        result = amp_tcp_combine(t, data + first * size, data + first * size, end - first, dtype, op);
    if (result != AMP_OK) return result;
    for (i = 0; i < t->world; i++)
        amp_tcp_pair(t, i, data + first * size, mine, data + n * i / world * size,
                     (size_t)((n * (i + 1) / world - n * i / world) * size));
    return amp_tcp_exchange(t);
}

static inline int amp_tcp_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op,
                                 void *stream) {
    enum { SMALL = 1 << 14 };
    amp_tcp *t = (amp_tcp *)user;
    const int64_t size = (int64_t)amp_dtype_size(dtype), most = (int64_t)t->piece / size * t->world;
    char *at = (char *)data;
    amp_result result = AMP_OK;
    int64_t n;
    (void)stream;
    if (amp_tcp_begin(t, 1, count, (int32_t)dtype, (int32_t)op, 0) != AMP_OK) return (int)AMP_ERR_REDUCE;
    for (; count > 0 && result == AMP_OK; count -= n, at += n * size) {
        n = count < most ? count : most;
        if (n * size <= SMALL) result = amp_tcp_reduce_small(t, at, n, dtype, (int)op);
        else result = amp_tcp_reduce_parts(t, at, n, dtype, (int)op);
    }
    return amp_tcp_end_call(t, result);
}

static inline int amp_tcp_reduce_scatter(void *user, const void *in, void *out, int64_t count_each, amp_dtype dtype,
                                         amp_reduce_op op, void *stream) {
    amp_tcp *t = (amp_tcp *)user;
    const int64_t size = (int64_t)amp_dtype_size(dtype), most = (int64_t)t->piece / size;
    const char *from = (const char *)in;
    amp_result result = AMP_OK;
    int64_t at, n;
    int32_t i;
    (void)stream;
    if (amp_tcp_begin(t, 2, count_each, (int32_t)dtype, (int32_t)op, 0) != AMP_OK) return (int)AMP_ERR_REDUCE;
    for (at = 0; at < count_each && result == AMP_OK; at += n) {
        n = count_each - at < most ? count_each - at : most;
        for (i = 0; i < t->world; i++)
            amp_tcp_pair(t, i, from + (i * count_each + at) * size, (size_t)(n * size), t->parts + (size_t)i * t->piece,
                         (size_t)(n * size));
        result = amp_tcp_exchange(t);
        if (result == AMP_OK)
            result = amp_tcp_combine(t, (char *)out + at * size, from + (t->rank * count_each + at) * size, n, dtype,
                                     (int)op);
    }
    return amp_tcp_end_call(t, result);
}

/* ---- Bytes: also before there is a reducer, to hand round an id */

static inline int amp_tcp_broadcast(void *user, void *data, int64_t bytes, int32_t root, void *stream) {
    amp_tcp *t = (amp_tcp *)user;
    int32_t i;
    (void)stream;
    if (amp_tcp_begin(t, 5, bytes, 0, 0, root) != AMP_OK) return (int)AMP_ERR_REDUCE;
    for (i = 0; i < t->world; i++)
        amp_tcp_pair(t, i, data, t->rank == root ? (size_t)bytes : 0, data, i == root ? (size_t)bytes : 0);
    return amp_tcp_end_call(t, amp_tcp_exchange(t));
}

static inline int amp_tcp_all_gather(void *user, const void *in, void *out, int64_t bytes_each, void *stream) {
    amp_tcp *t = (amp_tcp *)user;
    int32_t i;
    (void)stream;
    if (amp_tcp_begin(t, 3, bytes_each, 0, 0, 0) != AMP_OK) return (int)AMP_ERR_REDUCE;
    memmove((char *)out + t->rank * bytes_each, in, (size_t)bytes_each);
    for (i = 0; i < t->world; i++)
        amp_tcp_pair(t, i, in, (size_t)bytes_each, (char *)out + i * bytes_each, (size_t)bytes_each);
    return amp_tcp_end_call(t, amp_tcp_exchange(t));
}

static inline int amp_tcp_all_to_all(void *user, const void *in, void *out, int64_t bytes_each, void *stream) {
    amp_tcp *t = (amp_tcp *)user;
    const int64_t own = t->rank * bytes_each;
    int32_t i;
    (void)stream;
    if (amp_tcp_begin(t, 4, bytes_each, 0, 0, 0) != AMP_OK) return (int)AMP_ERR_REDUCE;
    memcpy((char *)out + own, (const char *)in + own, (size_t)bytes_each);
    for (i = 0; i < t->world; i++)
        amp_tcp_pair(t, i, (const char *)in + i * bytes_each, (size_t)bytes_each, (char *)out + i * bytes_each,
                     (size_t)bytes_each);
    return amp_tcp_end_call(t, amp_tcp_exchange(t));
}

/* Returns when all ranks have called it. */
static inline int amp_tcp_barrier(amp_tcp *t) {
    int32_t i;
    if (amp_tcp_begin(t, 0, 0, 0, 0, 0) != AMP_OK) return (int)AMP_ERR_REDUCE;
    for (i = 0; i < t->world; i++) amp_tcp_pair(t, i, NULL, 0, NULL, 0);
    return amp_tcp_end_call(t, amp_tcp_exchange(t));
}

/* ---- Sockets */

/* Sets what all our sockets have; returns -1, and closes it, if that fails. */
static inline int amp_tcp_prepare(int fd) {
    int one = 1;
    if (fd < 0) return -1;
    if (fcntl(fd, F_SETFL, O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) { close(fd); return -1; }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
#if defined(SO_NOSIGPIPE)
    (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &one, sizeof one);
#endif
    return fd;
}

/* Waits until fd is ready; 0: not before the deadline. */
static inline int amp_tcp_ready(int fd, int events, int64_t deadline) {
    struct pollfd one;
    int64_t left;
    one.fd = fd;
    one.events = (short)events;
    do {
        left = deadline - amp_tcp_now();
        if (poll(&one, 1, left > 0 ? (int)left : 0) > 0) return 1;
    } while (left > 0);
    return 0;
}

/* All bytes of a short message, or 0. */
static inline int amp_tcp_receive(int fd, void *data, size_t bytes, int64_t deadline) {
    size_t done = 0;
    ssize_t n;
    while (done < bytes && amp_tcp_ready(fd, POLLIN, deadline)) {
        n = recv(fd, (char *)data + done, bytes - done, 0);
        if (n == 0 || (n < 0 && !amp_tcp_would_wait())) return 0;
        if (n > 0) done += (size_t)n;
    }
    return done == bytes;
}

/* The addresses of a name, or NULL with why. */
static inline struct addrinfo *amp_tcp_find(const char *host, int32_t port, const char **why) {
    struct addrinfo hints, *found = NULL;
    char digits[16];
    int error;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = host == NULL ? AI_PASSIVE : 0;
    snprintf(digits, sizeof digits, "%d", (int)port);
    error = getaddrinfo(host, digits, &hints, &found);
    *why = error != 0 ? gai_strerror(error) : NULL;
    return error != 0 ? NULL : found;
}

/* host NULL: every address of this machine.  port 0: any.  -1: errno or *why says why not. */
static inline int amp_tcp_listen(const char *host, int32_t port, const char **why) {
    struct addrinfo *found = amp_tcp_find(host, port, why), *a;
    int fd = -1, one = 1, error = 0;
    for (a = found; a != NULL && fd < 0; a = a->ai_next) {
        fd = amp_tcp_prepare(socket(a->ai_family, a->ai_socktype, a->ai_protocol));
        if (fd >= 0) (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (fd >= 0 && (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, 4096) != 0)) {
            error = errno;
            close(fd);
            fd = -1;
        } else if (fd < 0) error = errno;
    }
    if (found != NULL) freeaddrinfo(found);
    if (found != NULL && fd < 0) *why = strerror(error);
    errno = error;
    return fd;
}

/* One attempt; -1 with *why. */
static inline int amp_tcp_connect(const char *host, int32_t port, int64_t deadline, const char **why) {
    struct addrinfo *found = amp_tcp_find(host, port, why), *a;
    int fd = -1, error;
    socklen_t size = sizeof error;
    for (a = found; a != NULL && fd < 0; a = a->ai_next) {
        fd = amp_tcp_prepare(socket(a->ai_family, a->ai_socktype, a->ai_protocol));
        error = fd < 0 || (connect(fd, a->ai_addr, a->ai_addrlen) != 0 && errno != EINPROGRESS) ? errno : 0;
        if (error == 0 && !amp_tcp_ready(fd, POLLOUT, deadline)) error = ETIMEDOUT;
        if (error == 0) (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error == 0) break;
        *why = strerror(error);
        if (fd >= 0) close(fd);
        fd = -1;
    }
    if (found != NULL) freeaddrinfo(found);
    return fd;
}

/* Address and port of one end of a connection. */
static inline void amp_tcp_end(int fd, int peer, amp_tcp_place *out) {
    struct sockaddr_storage a;
    socklen_t size = sizeof a;
    char digits[16] = "0";
    memset(out, 0, sizeof *out);
    memset(&a, 0, sizeof a);
    if ((peer ? getpeername(fd, (struct sockaddr *)&a, &size) : getsockname(fd, (struct sockaddr *)&a, &size)) != 0)
        return;
    if (getnameinfo((struct sockaddr *)&a, size, out->host, sizeof out->host, digits, sizeof digits,
                    NI_NUMERICHOST | NI_NUMERICSERV) == 0) out->port = atoi(digits);
}

static inline int amp_tcp_is_loopback(const char *host) {
    return strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0;
}

static inline void amp_tcp_sleep(int milliseconds) { (void)poll(NULL, 0, milliseconds); }

/* ---- Joining.  All connect to rank 0, which waits until all are there, and tells each where the others listen.  Then
   every rank connects to those below it, once for data and once for words. */

enum { amp_tcp_most_guests = 64 };
typedef struct amp_tcp_guest { int fd; size_t heard; amp_tcp_hello hello; } amp_tcp_guest;  /* has not said hello */

typedef struct amp_tcp_join {
    amp_tcp *t;
    const amp_tcp_desc *desc;
    int64_t deadline;
    int listener;
    amp_tcp_place *places;      /* of all ranks */
    amp_tcp_place master;       /* rank 0, as this rank reaches it */
    amp_tcp_guest guests[amp_tcp_most_guests];
    int n_guests;
    int32_t came;               /* connections that are as they should be */
    int32_t met;                /* ranks that rank 0 has heard of, and told if something is wrong */
} amp_tcp_join;

/* 1: ranks of other machines may come, so that listening at `host` alone, an address of this one, does not do. */
static inline int amp_tcp_listens_wide(const amp_tcp_join *j, const char *host) {
    const char *name = j->desc->address;
    if (j->desc->file != NULL) return 1;
    return amp_tcp_is_loopback(host) && !amp_tcp_is_loopback(name) && strstr(name, "localhost") == NULL;
}

static inline amp_tcp_hello amp_tcp_greeting(const amp_tcp_join *j, amp_tcp_purpose purpose, int32_t port) {
    amp_tcp_hello hello;
    memset(&hello, 0, sizeof hello);
    hello.magic = amp_tcp_magic;
    hello.rank = j->t->rank;
    hello.world = j->t->world;
    hello.port = port;
    hello.purpose = (int32_t)purpose;
    hello.key = j->t->key;
    snprintf(hello.job, sizeof hello.job, "%s", j->desc->job != NULL ? j->desc->job : "");
    return hello;
}

/* A rank asks rank 0 to join. */
static inline void amp_tcp_admit(amp_tcp_join *j, amp_tcp_guest *g) {
    const amp_tcp_hello *h = &g->hello, mine = amp_tcp_greeting(j, amp_tcp_joins, 0);
    amp_tcp *t = j->t;
    char text[200];
    if (memcmp(h->job, mine.job, sizeof mine.job) != 0) {
        snprintf(text, sizeof text, "rank 0 of the job \"%.63s\" listens there, this is \"%.63s\"", mine.job, h->job);
        amp_tcp_say(t, g->fd, amp_tcp_other_job, text);
        close(g->fd);
        return;
    }
    j->met++;
    if (h->world != t->world)
        (void)amp_tcp_fail(t, "rank %d was started as one of %d, rank 0 as one of %d", (int)h->rank, (int)h->world,
                           (int)t->world);
    else if (h->rank < 1 || h->rank >= t->world || t->peers[h->rank].words >= 0)
        (void)amp_tcp_fail(t, "two processes were started as rank %d", (int)h->rank);
    if (t->why[0] != 0) {
        amp_tcp_say(t, g->fd, amp_tcp_failed, t->why);
        close(g->fd);
        return;
    }
    t->peers[h->rank].words = g->fd;
    amp_tcp_end(g->fd, 1, &j->places[h->rank]);
    j->places[h->rank].port = h->port;
    j->came++;
}

/* A rank of this job connects. */
static inline void amp_tcp_accept_peer(amp_tcp_join *j, amp_tcp_guest *g) {
    const amp_tcp_hello *h = &g->hello;
    int *place = NULL;
    if (h->key == j->t->key && h->rank > j->t->rank && h->rank < j->t->world)
        place = h->purpose == (int32_t)amp_tcp_brings_data ? &j->t->peers[h->rank].data
                                                           : &j->t->peers[h->rank].words;
    if (place == NULL || *place >= 0) { close(g->fd); return; }
    *place = g->fd;
    j->came++;
}

/* Reads a guest's hello; 0: it is not done.  Who is not one of us is sent away. */
static inline int amp_tcp_greet(amp_tcp_join *j, amp_tcp_guest *g) {
    ssize_t n = recv(g->fd, (char *)&g->hello + g->heard, sizeof g->hello - g->heard, 0);
    if (n < 0 && amp_tcp_would_wait()) return 0;
    if (n > 0 && (g->heard += (size_t)n) < sizeof g->hello) return 0;
    if (n <= 0 || g->hello.magic != amp_tcp_magic) close(g->fd);
    else if (g->hello.purpose == (int32_t)amp_tcp_joins) {
        if (j->t->rank == 0 && j->places != NULL) amp_tcp_admit(j, g);
        else close(g->fd);
    } else amp_tcp_accept_peer(j, g);
    return 1;
}

/* Waits 5 ms for someone to come, and hears what those who have come say. */
static inline void amp_tcp_receive_guests(amp_tcp_join *j) {
    int k, fd;
    (void)amp_tcp_ready(j->listener, POLLIN, amp_tcp_now() + 5);
    while ((fd = amp_tcp_prepare(accept(j->listener, NULL, NULL))) >= 0) {
        if (j->n_guests == amp_tcp_most_guests) { close(j->guests->fd); *j->guests = j->guests[--j->n_guests]; }
        memset(&j->guests[j->n_guests], 0, sizeof *j->guests);
        j->guests[j->n_guests++].fd = fd;
    }
    for (k = 0; k < j->n_guests; k++)
        if (amp_tcp_greet(j, &j->guests[k])) j->guests[k--] = j->guests[--j->n_guests];
}

/* Accepts until `wanted` connections are there, or the deadline.  The words of ranks that have joined are heard. */
static inline void amp_tcp_accept(amp_tcp_join *j, int32_t wanted) {
    amp_tcp *t = j->t;
    int32_t i;
    j->came = 0;
    while (t->why[0] == 0 && j->came < wanted && amp_tcp_now() < j->deadline) {
        amp_tcp_receive_guests(j);
        for (i = 0; i < t->world && t->why[0] == 0; i++) if (t->peers[i].words >= 0) amp_tcp_hear(t, i);
    }
}

/* All of a message that may be longer than the system buffers. */
static inline int amp_tcp_send_all(int fd, const void *data, size_t bytes, int64_t deadline) {
    size_t done = 0;
    ssize_t n;
    while (done < bytes && amp_tcp_ready(fd, POLLOUT, deadline)) {
        n = amp_tcp_send(fd, (const char *)data + done, bytes - done);
        if (n < 0 && !amp_tcp_would_wait()) return 0;
        if (n > 0) done += (size_t)n;
    }
    return done == bytes;
}

/* The file: a line with the host's name, the port and the job. */
static inline void amp_tcp_file_line(const amp_tcp_join *j, const char *host, int32_t port, char line[400]) {
    snprintf(line, 400, "amp_tcp %.255s %d %.63s\n", host, (int)port, j->desc->job != NULL ? j->desc->job : "");
}
static inline int amp_tcp_file_read(const amp_tcp_join *j, char line[400]) {
    FILE *f = fopen(j->desc->file, "r");
    int whole = f != NULL && fgets(line, 400, f) != NULL && strchr(line, '\n') != NULL;
    if (f != NULL) fclose(f);
    return whole;
}
static inline amp_result amp_tcp_file_write(amp_tcp_join *j, const char *line) {
    char path[4200];
    FILE *f;
    int bad;
    snprintf(path, sizeof path, "%.4000s.tmp.%ld", j->desc->file, (long)getpid());
    f = fopen(path, "w");
    bad = f == NULL || fputs(line, f) < 0;
    if (f != NULL && fclose(f) != 0) bad = 1;
    if (bad || rename(path, j->desc->file) != 0)
        return amp_tcp_fail(j->t, "%.150s: %s", j->desc->file, strerror(errno));
    return AMP_OK;
}
static inline void amp_tcp_own_name(char name[256]) {
    if (gethostname(name, 256) != 0) name[0] = 0;
    name[255] = 0;
}

static inline uint64_t amp_tcp_new_key(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return ((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec) * UINT64_C(0x9e3779b97f4a7c15) ^ (uint64_t)getpid();
}

/* Rank 0: waits for the others, then tells them of each other.  If something is wrong, it waits to tell all. */
static inline amp_result amp_tcp_lead(amp_tcp_join *j) {
    amp_tcp *t = j->t;
    const char *file = j->desc->file, *why = NULL;
    char name[256], line[400] = "", now[400] = "";
    amp_tcp_place own;
    int32_t i;
    j->listener = amp_tcp_listen(file != NULL ? NULL : j->desc->address, file != NULL ? 0 : j->desc->port, &why);
    if (j->listener >= 0) amp_tcp_end(j->listener, 0, &own);
    if (j->listener >= 0 && file == NULL && amp_tcp_listens_wide(j, own.host)) {
        close(j->listener);
        j->listener = amp_tcp_listen(NULL, j->desc->port, &why);
    }
    if (j->listener < 0 && errno == EADDRINUSE)
        return amp_tcp_fail(t, "port %d of this machine is in use, by another program or another rank 0",
                            (int)j->desc->port);
    if (j->listener < 0 && errno == EADDRNOTAVAIL)
        return amp_tcp_fail(t, "%.100s is not an address of this machine, where rank 0 is", j->desc->address);
    if (j->listener < 0)
        return amp_tcp_fail(t, "rank 0 cannot listen at %.100s, port %d: %s", file != NULL ? "any" : j->desc->address,
                            (int)j->desc->port, why);
    if (file != NULL) {
        amp_tcp_own_name(name);
        amp_tcp_file_line(j, name, own.port, line);
        if (amp_tcp_file_write(j, line) != AMP_OK) return AMP_ERR_REDUCE;
    }
    amp_tcp_accept(j, t->world - 1);
    while (t->why[0] != 0 && j->met < t->world - 1 && amp_tcp_now() < j->deadline) amp_tcp_receive_guests(j);
    if (file != NULL && amp_tcp_file_read(j, now) && strcmp(now, line) == 0) (void)remove(file);
    else if (file != NULL) (void)amp_tcp_fail(t, "%.150s was written by another rank 0", file);
    for (i = 1; i < t->world && t->why[0] == 0; i++)
        if (t->peers[i].words < 0)
            return amp_tcp_fail(t, "rank %d has not come within %d ms: %d of %d ranks are here", (int)i,
                                (int)t->timeout_ms, (int)j->came + 1, (int)t->world);
    t->key = amp_tcp_new_key();
    j->deadline = amp_tcp_now() + t->timeout_ms;
    for (i = 1; i < t->world && t->why[0] == 0; i++) {
        amp_tcp_say(t, t->peers[i].words, amp_tcp_welcome, "");
        if (!amp_tcp_send_all(t->peers[i].words, j->places, (size_t)t->world * sizeof *j->places, j->deadline))
            (void)amp_tcp_gone(t, i, "its connection has closed");
    }
    amp_tcp_accept(j, t->world - 1);            /* for data */
    return t->why[0] != 0 ? AMP_ERR_REDUCE : AMP_OK;
}

/* Where rank 0 listens; 0: not known yet. */
static inline int amp_tcp_find_master(const amp_tcp_join *j, amp_tcp_place *out, char host[256]) {
    char line[400], name[256];
    int port;
    snprintf(host, 256, "%s", j->desc->file == NULL ? j->desc->address : "");
    out->port = j->desc->port;
    if (j->desc->file == NULL) return 1;
    if (!amp_tcp_file_read(j, line) || sscanf(line, "amp_tcp %255s %d", host, &port) != 2) return 0;
    amp_tcp_own_name(name);
    if (strcmp(name, host) == 0) snprintf(host, 256, "localhost");
    out->port = port;
    return 1;
}

/* One attempt to join; 1: done, else *why. */
static inline int amp_tcp_knock(amp_tcp_join *j, const char *host, int32_t port, amp_tcp_word *word, const char **why) {
    amp_tcp *t = j->t;
    amp_tcp_hello hello;
    amp_tcp_place own;
    int fd = amp_tcp_connect(host, port, j->deadline, why);
    if (fd < 0) return 0;
    amp_tcp_end(fd, 0, &own);
    if (j->listener < 0) j->listener = amp_tcp_listen(amp_tcp_listens_wide(j, own.host) ? NULL : own.host, 0, why);
    if (j->listener < 0) { close(fd); return 0; }
    amp_tcp_end(j->listener, 0, &own);
    hello = amp_tcp_greeting(j, amp_tcp_joins, own.port);
    *why = "what listens there is not rank 0 of this job";
    if (amp_tcp_send_all(fd, &hello, sizeof hello, j->deadline) &&
        amp_tcp_receive(fd, word, sizeof *word, amp_tcp_now() + t->timeout_ms + 500) && word->magic == amp_tcp_magic) {
        word->text[sizeof word->text - 1] = 0;
        amp_tcp_end(fd, 1, &j->master);
        if (word->kind == (int32_t)amp_tcp_welcome) { t->peers[0].words = fd; return 1; }
        *why = word->text;
        if (word->kind == (int32_t)amp_tcp_failed) (void)amp_tcp_fail(t, "%.*s", (int)sizeof t->why - 1, word->text);
    }
    close(fd);
    return 0;
}

/* Connects to a rank below this one. */
static inline int amp_tcp_reach(const amp_tcp_join *j, int32_t rank, amp_tcp_purpose purpose) {
    const amp_tcp_place *p = rank == 0 ? &j->master : &j->places[rank];
    int here = amp_tcp_is_loopback(p->host);    /* on rank 0's machine, as that sees it */
    amp_tcp_hello hello = amp_tcp_greeting(j, purpose, 0);
    const char *why = NULL;
    int fd = amp_tcp_connect(here ? j->master.host : p->host, p->port, j->deadline, &why);
    if (fd >= 0 && amp_tcp_send_all(fd, &hello, sizeof hello, j->deadline)) return fd;
    if (fd >= 0) close(fd);
    (void)amp_tcp_gone(j->t, rank, fd >= 0 ? "its connection has closed" : why);
    return -1;
}

/* Every other rank. */
static inline amp_result amp_tcp_follow(amp_tcp_join *j) {
    amp_tcp *t = j->t;
    char host[256] = "";
    const char *why = "no file yet";
    amp_tcp_word word;
    int32_t i;
    while (t->peers[0].words < 0 && t->why[0] == 0) {
        if (amp_tcp_find_master(j, &j->master, host) && amp_tcp_knock(j, host, j->master.port, &word, &why)) break;
        if (amp_tcp_now() >= j->deadline && t->why[0] == 0)
            return amp_tcp_fail(t, "rank %d did not reach rank 0 at %.100s, port %d, within %d ms: %s", (int)t->rank,
                                host[0] != 0 ? host : j->desc->file, (int)j->master.port, (int)t->timeout_ms, why);
        amp_tcp_sleep(20);
    }
    if (t->why[0] != 0) return AMP_ERR_REDUCE;
    t->key = word.key;
    j->deadline = amp_tcp_now() + t->timeout_ms;
    if (!amp_tcp_receive(t->peers[0].words, j->places, (size_t)t->world * sizeof *j->places, j->deadline))
        return amp_tcp_gone(t, 0, "its connection has closed");
    for (i = 0; i < t->rank && t->why[0] == 0; i++) {
        t->peers[i].data = amp_tcp_reach(j, i, amp_tcp_brings_data);
        if (i > 0 && t->why[0] == 0) t->peers[i].words = amp_tcp_reach(j, i, amp_tcp_brings_words);
    }
    amp_tcp_accept(j, 2 * (t->world - 1 - t->rank));
    return t->why[0] != 0 ? AMP_ERR_REDUCE : AMP_OK;
}

/* ---- Opening and closing */

/* Closes the connections; the others are told that this rank is done, unless something failed. */
static inline void amp_tcp_close(amp_tcp *t) {
    int32_t i;
    for (i = 0; i < t->world && t->peers != NULL; i++) {
        if (t->why[0] == 0) amp_tcp_say(t, t->peers[i].words, amp_tcp_bye, "");
        if (t->peers[i].words >= 0) close(t->peers[i].words);
        if (t->peers[i].data >= 0) close(t->peers[i].data);
    }
    free(t->peers);
    free(t->polls);
    free(t->parts);
    t->peers = NULL;
    t->polls = NULL;
    t->parts = NULL;
    if (t->why[0] == 0) snprintf(t->why, sizeof t->why, "rank %d has closed its connections", (int)t->rank);
}

static inline amp_result amp_tcp_check(amp_tcp *t, const amp_tcp_desc *d) {
    if (d->world < 1 || d->world > 1024) return amp_tcp_refuse(t, AMP_ERR_RANGE, ".world must be 1 to 1024");
    if (d->rank < 0 || d->rank >= d->world) return amp_tcp_refuse(t, AMP_ERR_RANGE, ".rank must be 0 to .world - 1");
    if (d->timeout_ms < 0) return amp_tcp_refuse(t, AMP_ERR_RANGE, ".timeout_ms must be 1 or more, or 0 for 60000");
    if (d->job != NULL && strlen(d->job) > 63) return amp_tcp_refuse(t, AMP_ERR_RANGE, ".job has over 63 bytes");
    if (d->world > 1 && (d->address != NULL) == (d->file != NULL))
        return amp_tcp_refuse(t, AMP_ERR_CONFLICT, "one of .address and .file must be set");
    if (d->address != NULL && (d->port < 1 || d->port > 65535))
        return amp_tcp_refuse(t, AMP_ERR_RANGE, ".port must be 1 to 65535");
    return AMP_OK;
}

static inline amp_result amp_tcp_make(amp_tcp *t, amp_tcp_join *j) {
    const size_t most = (size_t)256 << 20, piece = (size_t)1 << 20;
    int32_t i;
    t->piece = (size_t)t->world * piece < most ? piece : most / (size_t)t->world / 4096 * 4096;
    t->peers = (amp_tcp_peer *)calloc((size_t)t->world, sizeof *t->peers);
    t->polls = (struct pollfd *)calloc((size_t)t->world, 2 * sizeof *t->polls);
    t->parts = (char *)malloc((size_t)t->world * t->piece);
    j->places = (amp_tcp_place *)calloc((size_t)t->world, sizeof *j->places);
    for (i = 0; i < t->world && t->peers != NULL; i++) t->peers[i].data = t->peers[i].words = -1;
    if (t->peers != NULL && t->polls != NULL && t->parts != NULL && j->places != NULL) return AMP_OK;
    return amp_tcp_refuse(t, AMP_ERR_MEMORY, "no memory for the ranks' buffers");
}

/* Joins the other ranks, and returns when all are there: AMP_ERR_REDUCE, with t->why, if one does not come in time, is
   there twice, or belongs to another world; if rank 0's port is taken, or its address is not its own. */
static inline amp_result amp_tcp_open(amp_tcp *t, const amp_tcp_desc *desc) {
    amp_tcp_join *j = (amp_tcp_join *)calloc(1, sizeof *j);
    amp_result result;
    int k;
    memset(t, 0, sizeof *t);
    if (j == NULL) return amp_tcp_refuse(t, AMP_ERR_MEMORY, "no memory");
    result = amp_tcp_check(t, desc);
    if (result != AMP_OK) { free(j); return result; }
    t->rank = desc->rank;
    t->world = desc->world;
    t->timeout_ms = desc->timeout_ms > 0 ? desc->timeout_ms : 60000;
    j->t = t;
    j->desc = desc;
    j->listener = -1;
    j->deadline = amp_tcp_now() + t->timeout_ms;
    result = amp_tcp_make(t, j);
    if (result == AMP_OK && t->world > 1) result = t->rank == 0 ? amp_tcp_lead(j) : amp_tcp_follow(j);
    for (k = 0; k < j->n_guests; k++) close(j->guests[k].fd);
    if (j->listener >= 0) close(j->listener);
    free(j->places);
    free(j);
    if (result == AMP_OK && amp_tcp_barrier(t) != 0) result = AMP_ERR_REDUCE;
    if (result != AMP_OK) amp_tcp_close(t);
    return result;
}

static inline const char *amp_tcp_why(void *user) { return ((amp_tcp *)user)->why; }

static inline amp_reducer amp_tcp_reducer(amp_tcp *t) {
    static const amp_exchanges calls = {amp_tcp_reduce_scatter, amp_tcp_all_gather, amp_tcp_all_to_all,
                                        amp_tcp_broadcast, NULL, NULL, amp_tcp_why};
    amp_reducer r;
    memset(&r, 0, sizeof r);
    r.reduce = amp_tcp_reduce;
    r.user = t;
    r.rank = t->rank;
    r.world = t->world;
    r.on_host = 1;
    r.calls = &calls;
    return r;
}
#endif
