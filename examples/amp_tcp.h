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
 *
 * A run has a secret, which all its ranks show when they connect; who does not know it is turned away, and can neither
 * join, delay nor end the run.  It is .secret, or AMP_TCP_SECRET in the environment; with .file rank 0 makes one up and
 * writes it there, readable for its owner alone.  Without a secret ranks meet on the loopback addresses of one machine
 * only.  Nothing is encrypted, the secret neither: this is for networks on which you trust those who can listen. */
#ifndef EXAMPLE_AMP_TCP
#define EXAMPLE_AMP_TCP
#include "../amp.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(_WIN32)
#  include <winsock2.h>
#  include <ws2tcpip.h>
#  include <windows.h>
#  undef near
#  undef far
#else
#  include <netdb.h>
#  include <netinet/in.h>
#  include <netinet/tcp.h>
#  include <poll.h>
#  include <sys/resource.h>
#  include <sys/socket.h>
#endif

typedef struct amp_tcp_desc {
    int32_t rank, world;        /* world: 1 to 1024 */
    /* Of rank 0's machine, a name or a number; the same on all ranks.  A name that leads to loopback there, as Debian's
       /etc/hosts has it, and is not localhost: rank 0 listens on all its addresses. */
    const char *address;
    int32_t port;               /* rank 0 listens on it, and the others connect to it */
    const char *file;           /* instead of both: one that all ranks see, in which rank 0 writes where it listens */
    const char *job;            /* up to 63 bytes that tell this job from others, and from its own restarts; or NULL */
    int32_t timeout_ms;         /* how long a rank waits for another, also at the start; default 60000 */
    const char *secret;         /* up to 63 bytes, the same on all ranks; default AMP_TCP_SECRET in the environment */
} amp_tcp_desc;

/* The first bytes of a connection.  amp_tcp_welcome answers it. */
typedef enum amp_tcp_purpose { amp_tcp_joins = 1, amp_tcp_brings_data = 2, amp_tcp_brings_words = 3 } amp_tcp_purpose;
typedef struct amp_tcp_hello {
    uint32_t magic;             /* also tells another byte order */
    int32_t rank, world, port, purpose, reserved;
    uint64_t key;               /* a number of this run that rank 0 gives to all who join */
    char job[64], secret[64];
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

/* ---- Sockets of POSIX, and Windows', whose functions have other names and leave their errors elsewhere. */

#if defined(_WIN32)
typedef struct amp_tcp_error { int number, error; const char *text; } amp_tcp_error;
static const amp_tcp_error amp_tcp_errors[] = {
    {WSAEWOULDBLOCK, EWOULDBLOCK, "it would wait"}, {WSAEINTR, EINTR, "interrupted"},
    {WSAECONNREFUSED, ECONNREFUSED, "Connection refused"}, {WSAETIMEDOUT, ETIMEDOUT, "Connection timed out"},
    {WSAEADDRINUSE, EADDRINUSE, "Address already in use"}, {WSAEMFILE, EMFILE, "Too many open files"},
    {WSAEADDRNOTAVAIL, EADDRNOTAVAIL, "Cannot assign requested address"},
    {WSAECONNRESET, ECONNRESET, "Connection reset by peer"}, {WSAEHOSTUNREACH, EHOSTUNREACH, "No route to host"},
    {WSAENETUNREACH, ENETUNREACH, "Network is unreachable"}, {WSAEACCES, EACCES, "Permission denied"}
};
enum { amp_tcp_n_errors = sizeof amp_tcp_errors / sizeof *amp_tcp_errors };
/* A call's result; sets errno if it has failed. */
static inline int amp_tcp_noted(int result) {
    int i, error = WSAGetLastError();
    if (result >= 0) return result;
    errno = EIO;
    for (i = 0; i < amp_tcp_n_errors; i++) if (amp_tcp_errors[i].number == error) errno = amp_tcp_errors[i].error;
    return -1;
}
static inline const char *amp_tcp_error_text(int error) {
    int i;
    for (i = 0; i < amp_tcp_n_errors; i++)
        if (amp_tcp_errors[i].error == error || amp_tcp_errors[i].number == error) return amp_tcp_errors[i].text;
    return strerror(error);
}
static inline int amp_tcp_begun(void) {
    WSADATA data;
    return WSAStartup(MAKEWORD(2, 2), &data) == 0;
}
static inline int amp_tcp_size(size_t bytes) { return bytes < 1 << 30 ? (int)bytes : 1 << 30; }
static inline ssize_t amp_tcp_send(int fd, const void *data, size_t bytes) {
    return amp_tcp_noted(send((SOCKET)fd, (const char *)data, amp_tcp_size(bytes), 0));
}
static inline ssize_t amp_tcp_recv(int fd, void *data, size_t bytes) {
    return amp_tcp_noted(recv((SOCKET)fd, (char *)data, amp_tcp_size(bytes), 0));
}
static inline void amp_tcp_drop(int fd) { (void)closesocket((SOCKET)fd); }
static inline void amp_tcp_sleep(int milliseconds) { Sleep((DWORD)milliseconds); }
/* poll leaves out descriptors of -1, and WSAPoll calls them invalid. */
static inline int amp_tcp_poll(struct pollfd *polls, size_t n, int milliseconds) {
    enum { MOST = 4096 };           /* for a world of 1024, and who is about to join */
    struct pollfd some[MOST];
    size_t i, kept = 0;
    int ready;
    for (i = 0; i < n && kept < MOST; i++) if (polls[i].fd != (SOCKET)-1) some[kept++] = polls[i];
    if (kept == 0) { Sleep((DWORD)milliseconds); ready = 0; }
    else ready = WSAPoll(some, (ULONG)kept, milliseconds);
    for (i = kept = 0; i < n; i++)
        polls[i].revents = polls[i].fd != (SOCKET)-1 && kept < MOST ? some[kept++].revents : 0;
    return ready;
}
static inline int amp_tcp_unblock(int fd) {
    u_long on = 1;
    return ioctlsocket((SOCKET)fd, (long)FIONBIO, &on);
}
static inline int amp_tcp_raise_limit(void) { return 0; }
/* SO_REUSEADDR would let another program take the port. */
static const int amp_tcp_reuse = ~SO_REUSEADDR, amp_tcp_in_progress = EWOULDBLOCK;
static inline int amp_tcp_replace(const char *from, const char *to) {
    amp_system s;
    amp_system_default(&s);
    errno = -s.file_rename(s.user, from, to);
    return errno == 0 ? 0 : -1;
}
BOOLEAN NTAPI SystemFunction036(PVOID buffer, ULONG bytes);         /* RtlGenRandom */
static inline int amp_tcp_random(void *data, size_t bytes) { return SystemFunction036(data, (ULONG)bytes) != 0; }
#else
static inline int amp_tcp_noted(int result) { return result; }
static inline const char *amp_tcp_error_text(int error) { return strerror(error); }
static inline int amp_tcp_begun(void) { return 1; }
static inline ssize_t amp_tcp_send(int fd, const void *data, size_t bytes) {
#if defined(MSG_NOSIGNAL)
    return send(fd, data, bytes, MSG_NOSIGNAL);         /* an error, not a signal, if the peer has closed */
#else
    return send(fd, data, bytes, 0);
#endif
}
static inline ssize_t amp_tcp_recv(int fd, void *data, size_t bytes) { return recv(fd, data, bytes, 0); }
static inline void amp_tcp_drop(int fd) { close(fd); }
static inline void amp_tcp_sleep(int milliseconds) { (void)poll(NULL, 0, milliseconds); }
static inline int amp_tcp_poll(struct pollfd *polls, size_t n, int milliseconds) {
    return poll(polls, (nfds_t)n, milliseconds);
}
static inline int amp_tcp_unblock(int fd) {
    return fcntl(fd, F_SETFL, O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0 ? -1 : 0;
}
/* A world of 1024 needs 2046 connections, more than the usual soft limit on open files: 1 if that could be raised. */
static inline int amp_tcp_raise_limit(void) {
    struct rlimit files;
    if (errno != EMFILE || getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == files.rlim_max) return 0;
    files.rlim_cur = files.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &files) == 0;
}
static const int amp_tcp_reuse = SO_REUSEADDR, amp_tcp_in_progress = EINPROGRESS;
static inline int amp_tcp_replace(const char *from, const char *to) { return rename(from, to); }
/* Random bytes for a secret.  Returns 0 if the system has none. */
static inline int amp_tcp_random(void *data, size_t bytes) {
    FILE *f = fopen("/dev/urandom", "rb");
    size_t n = f != NULL ? fread(data, 1, bytes, f) : 0;
    if (f != NULL) fclose(f);
    return n == bytes;
}
#endif

/* ---- Failing: the first reason stays, and all ranks hear it */

static inline int64_t amp_tcp_now(void) {       /* milliseconds */
    amp_system s;
    amp_system_default(&s);
    return s.clock_ns(s.user) / 1000000;
}

static inline int amp_tcp_would_wait(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

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
    ssize_t n = amp_tcp_recv(p->words, (char *)&p->word + p->heard, sizeof p->word - p->heard);
    if (n < 0 && amp_tcp_would_wait()) return 1;
    if (n <= 0) {
        amp_tcp_drop(p->words);
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
        amp_tcp_sleep(2);
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
        else moved = amp_tcp_recv(p->data, (*done < head ? (char *)&p->call : p->in) + at, n);
        if (moved > 0) *done += (size_t)moved;
        if (!sends && *done == head && memcmp(&p->call, &t->call, head) != 0) return 1;
    }
    return moved > 0 || (moved < 0 && amp_tcp_would_wait());
}

static inline int amp_tcp_owes(const amp_tcp_peer *p) { return p->received < sizeof p->call + p->n_in; }
static inline int amp_tcp_waits(const amp_tcp_peer *p) { return p->sent < sizeof p->call + p->n_out; }

static inline const char *amp_tcp_call_text(const amp_tcp_call *c, char text[80]) {
    static const char *const verbs[] = {"waits for all ranks", "reduces", "scatters",
                                        "gathers", "exchanges", "broadcasts"};
    const char *verb = c->kind >= 0 && c->kind < 6 ? verbs[c->kind] : "makes another call";
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

/* Fills t->polls: what ranks say, if that is listened to, then data.  Returns the rank that is furthest behind, or -1:
   all is done. */
static inline int32_t amp_tcp_polls(amp_tcp *t, int listens) {
    int32_t i, late = -1;
    for (i = 0; i < t->world; i++) {
        const amp_tcp_peer *p = &t->peers[i];
        struct pollfd *words = &t->polls[i], *data = &t->polls[t->world + i];
        words->fd = listens ? p->words : -1;
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
        amp_tcp_drop(p->data);             /* why will be said, or that connection closes too */
        p->data = -1;
    }
    if (p->received >= sizeof p->call && memcmp(&p->call, &t->call, sizeof t->call) != 0)
        return amp_tcp_fail(t, "rank %d %s, rank %d %s", (int)t->rank, amp_tcp_call_text(&t->call, mine), (int)i,
                            amp_tcp_call_text(&p->call, theirs));
    if (p->data < 0 && p->said_bye && amp_tcp_busy(t, i)) return amp_tcp_fail(t, "rank %d has left", (int)i);
    return t->why[0] == 0 ? AMP_OK : AMP_ERR_REDUCE;
}

/* 1: some peer that data must come from or go to has closed that connection. */
static inline int amp_tcp_lost_data(const amp_tcp *t) {
    int32_t i;
    for (i = 0; i < t->world; i++) if (amp_tcp_busy(t, i) && t->peers[i].data < 0) return 1;
    return 0;
}

/* Moves all that the peers' out, in, n_out and n_in describe.  What is short is sent before anything is waited for, and
   what ranks say is listened to only when data has been slow: with many ranks each wait costs time for every
   connection in it. */
static inline amp_result amp_tcp_exchange(amp_tcp *t) {
    enum { SLOW = 20 };         /* milliseconds */
    int64_t deadline = amp_tcp_now() + t->timeout_ms, left;
    int32_t i, late;
    int listens = 0;
    t->call.number++;
    for (i = 0; i < t->world; i++) t->peers[i].sent = t->peers[i].received = 0;
    for (i = 0; i < t->world; i++)
        if (amp_tcp_busy(t, i) && t->peers[i].data >= 0 && !amp_tcp_move(t, &t->peers[i], 1)) listens = 1;
    while (t->why[0] == 0 && (late = amp_tcp_polls(t, listens)) >= 0) {
        left = deadline - amp_tcp_now();
        if (!listens && left > SLOW) left = SLOW;
        if (amp_tcp_poll(t->polls, (size_t)t->world * 2, left > 0 ? (int)left : 0) > 0) {
            for (i = 0; i < t->world; i++) if (amp_tcp_serve(t, i) != AMP_OK) return AMP_ERR_REDUCE;
            deadline = amp_tcp_now() + t->timeout_ms;
            listens = amp_tcp_lost_data(t);
        } else if (!listens) listens = 1;
        else if (left <= 0)
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
        return amp_tcp_fail(t, "two threads of rank %d make calls at once: each thread needs its own amp_tcp",
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

/* ---- Connections */

static inline int amp_tcp_socket(const struct addrinfo *a) {
    int fd = amp_tcp_noted((int)socket(a->ai_family, a->ai_socktype, a->ai_protocol));
    if (fd >= 0 || !amp_tcp_raise_limit()) return fd;
    return amp_tcp_noted((int)socket(a->ai_family, a->ai_socktype, a->ai_protocol));
}

/* Sets what all our sockets have; returns -1, and closes it, if that fails.  SO_REUSEADDR also on those that connect:
   ports of a run that has just ended are then no obstacle to listening. */
static inline int amp_tcp_prepare(int fd) {
    int one = 1;
    if (fd < 0) return -1;
    (void)setsockopt(fd, SOL_SOCKET, amp_tcp_reuse, (const char *)&one, sizeof one);
    if (amp_tcp_unblock(fd) != 0) { amp_tcp_drop(fd); return -1; }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, (const char *)&one, sizeof one);
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
        if (amp_tcp_poll(&one, 1, left > 0 ? (int)left : 0) > 0) return 1;
    } while (left > 0);
    return 0;
}

/* All bytes of a short message, or 0. */
static inline int amp_tcp_receive(int fd, void *data, size_t bytes, int64_t deadline) {
    size_t done = 0;
    ssize_t n;
    while (done < bytes && amp_tcp_ready(fd, POLLIN, deadline)) {
        n = amp_tcp_recv(fd, (char *)data + done, bytes - done);
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
    int fd = -1, error = 0;
    for (a = found; a != NULL && fd < 0; a = a->ai_next) {
        fd = amp_tcp_prepare(amp_tcp_socket(a));
        if (fd >= 0 && (amp_tcp_noted(bind(fd, a->ai_addr, a->ai_addrlen)) != 0 ||
                        amp_tcp_noted(listen(fd, 4096)) != 0)) {
            error = errno;
            amp_tcp_drop(fd);
            fd = -1;
        } else if (fd < 0) error = errno;
    }
    if (found != NULL) freeaddrinfo(found);
    if (found != NULL && fd < 0) *why = amp_tcp_error_text(error);
    errno = error;
    return fd;
}

/* One attempt; -1 with *why. */
static inline int amp_tcp_connect(const char *host, int32_t port, int64_t deadline, const char **why) {
    struct addrinfo *found = amp_tcp_find(host, port, why), *a;
    int fd = -1, error;
    socklen_t size = sizeof error;
    for (a = found; a != NULL && fd < 0; a = a->ai_next) {
        fd = amp_tcp_prepare(amp_tcp_socket(a));
        error = fd < 0 || (amp_tcp_noted(connect(fd, a->ai_addr, a->ai_addrlen)) != 0 && errno != amp_tcp_in_progress)
                    ? errno : 0;
        if (error == 0 && !amp_tcp_ready(fd, POLLOUT, deadline)) error = ETIMEDOUT;
        if (error == 0) (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, (char *)&error, &size);
        if (error == 0) break;
        *why = amp_tcp_error_text(error);
        if (fd >= 0) amp_tcp_drop(fd);
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

/* ---- Joining.  All connect to rank 0, which waits until all are there, and tells each where the others listen.  Then
   every rank connects to those below it, once for data and once for words, while it accepts those above it.  A
   connection counts when it has been answered; until then its rank tries again. */

/* Who has connected and has not said a whole hello yet. */
typedef struct amp_tcp_guest { int fd; int64_t since; size_t heard; amp_tcp_hello hello; } amp_tcp_guest;

typedef struct amp_tcp_join {
    amp_tcp *t;
    const amp_tcp_desc *desc;
    char secret[64];            /* padded with 0 */
    int64_t deadline;
    int listener;
    amp_tcp_place *places;      /* of all ranks */
    amp_tcp_place master;       /* rank 0, as this rank reaches it */
    amp_tcp_guest *guests;
    int n_guests, most_guests;  /* when more come, the one that has been silent longest is sent away */
    struct pollfd *polls;       /* the listener, an answer and the guests; or the words of all ranks */
    int64_t listened;           /* when those were last read */
    int32_t met;                /* ranks that rank 0 has heard of, and told if something is wrong */
    int32_t turned_away;        /* connections that were not of this run */
    char stranger[120];         /* the last of them, and why; "": there was none */
    char told[240];             /* why rank 0 sent this rank away, or "" */
} amp_tcp_join;

/* 1: ranks of other machines may come, so that listening at `host` alone, an address of this one, does not do. */
static inline int amp_tcp_listens_wide(const amp_tcp_join *j, const char *host) {
    const char *name = j->desc->address;
    if (j->desc->file != NULL) return 1;
    return j->secret[0] != 0 && amp_tcp_is_loopback(host) && !amp_tcp_is_loopback(name) &&
           strstr(name, "localhost") == NULL;
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
    memcpy(hello.secret, j->secret, sizeof hello.secret);
    return hello;
}

/* Takes the same time wherever they differ, so that a secret cannot be found byte by byte. */
static inline int amp_tcp_same_secret(const char *a, const char *b) {
    volatile unsigned char differs = 0;
    size_t i;
    for (i = 0; i < 64; i++) differs = (unsigned char)(differs | (a[i] ^ b[i]));
    return differs == 0;
}

/* Closes the connection of someone who is not of this run; errors name the last such address. */
static inline void amp_tcp_turn_away(amp_tcp_join *j, amp_tcp_guest *g, const char *why) {
    amp_tcp_place from;
    amp_tcp_end(g->fd, 1, &from);
    amp_tcp_drop(g->fd);
    j->turned_away++;
    snprintf(j->stranger, sizeof j->stranger, "%s, port %d, %s", from.host[0] != 0 ? from.host : "an unknown address",
             (int)from.port, why);
}

/* "; turned away: ..." for an error's text, or "". */
static inline const char *amp_tcp_strangers(const amp_tcp_join *j, char text[160]) {
    text[0] = 0;
    if (j->turned_away > 0)
        snprintf(text, 160, "; turned away: %s%s", j->stranger, j->turned_away > 1 ? ", and others" : "");
    return text;
}

/* A rank asks rank 0 to join. */
static inline void amp_tcp_admit(amp_tcp_join *j, amp_tcp_guest *g) {
    const amp_tcp_hello *h = &g->hello, mine = amp_tcp_greeting(j, amp_tcp_joins, 0);
    amp_tcp *t = j->t;
    char text[200];
    if (memcmp(h->job, mine.job, sizeof mine.job) != 0) {
        snprintf(text, sizeof text, "rank 0 of the job \"%.63s\" listens there, and this rank is of the job "
                                    "\"%.63s\"", mine.job, h->job);
        amp_tcp_say(t, g->fd, amp_tcp_other_job, text);
        amp_tcp_turn_away(j, g, "belongs to another job");
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
        amp_tcp_drop(g->fd);
        return;
    }
    t->peers[h->rank].words = g->fd;
    amp_tcp_end(g->fd, 1, &j->places[h->rank]);
    j->places[h->rank].port = h->port;
}

/* A rank of this run connects.  Comes it again, the answer to the connection before did not reach it. */
static inline void amp_tcp_accept_peer(amp_tcp_join *j, amp_tcp_guest *g) {
    const amp_tcp_hello *h = &g->hello;
    int *place;
    if (h->key != j->t->key || h->rank <= j->t->rank || h->rank >= j->t->world) {
        amp_tcp_turn_away(j, g, "belongs to another run of this job");
        return;
    }
    place = h->purpose == (int32_t)amp_tcp_brings_data ? &j->t->peers[h->rank].data : &j->t->peers[h->rank].words;
    if (*place >= 0) amp_tcp_drop(*place);
    *place = g->fd;
    amp_tcp_say(j->t, g->fd, amp_tcp_welcome, "");
    j->deadline = amp_tcp_now() + j->t->timeout_ms;     /* many ranks take their time, but none may hang */
}

/* Reads a guest's hello; 0: it is not done.  Who is not one of us is sent away. */
static inline int amp_tcp_greet(amp_tcp_join *j, amp_tcp_guest *g) {
    ssize_t n = amp_tcp_recv(g->fd, (char *)&g->hello + g->heard, sizeof g->hello - g->heard);
    if (n < 0 && amp_tcp_would_wait()) return 0;
    if (n > 0 && (g->heard += (size_t)n) < sizeof g->hello) return 0;
    g->hello.job[sizeof g->hello.job - 1] = 0;
    if (n <= 0) amp_tcp_turn_away(j, g, "closed its connection before it sent anything");
    else if (g->hello.magic != amp_tcp_magic) amp_tcp_turn_away(j, g, "does not use the protocol of amp_tcp");
    else if (!amp_tcp_same_secret(g->hello.secret, j->secret)) {
        amp_tcp_say(j->t, g->fd, amp_tcp_other_job, "its secret (.secret, AMP_TCP_SECRET) is not that of rank 0");
        amp_tcp_turn_away(j, g, "has another secret");
    } else if (g->hello.purpose != (int32_t)amp_tcp_joins) amp_tcp_accept_peer(j, g);
    else if (j->t->rank == 0 && j->t->key == 0) amp_tcp_admit(j, g);
    else amp_tcp_turn_away(j, g, "tried to join after all ranks had joined");
    return 1;
}

/* Takes who has come.  A hello is usually there at once. */
static inline void amp_tcp_take_guests(amp_tcp_join *j) {
    int fd, k, oldest;
    errno = 0;
    while ((fd = amp_tcp_prepare(amp_tcp_noted((int)accept(j->listener, NULL, NULL)))) >= 0 || amp_tcp_raise_limit()) {
        amp_tcp_guest *g;
        if (fd < 0) continue;
        if (j->n_guests == j->most_guests) {
            for (k = oldest = 0; k < j->n_guests; k++) if (j->guests[k].since < j->guests[oldest].since) oldest = k;
            amp_tcp_turn_away(j, &j->guests[oldest], "sent nothing");
            j->guests[oldest] = j->guests[--j->n_guests];
        }
        g = &j->guests[j->n_guests];
        memset(g, 0, sizeof *g);
        g->fd = fd;
        g->since = amp_tcp_now();
        if (!amp_tcp_greet(j, g)) j->n_guests++;
    }
    if (errno == EMFILE || errno == ENFILE)
        (void)amp_tcp_fail(j->t, "rank %d cannot open more files, and a world of %d needs %d connections: raise "
                           "ulimit -n", (int)j->t->rank, (int)j->t->world, 2 * (int)j->t->world - 2);
}

/* Reads what ranks say that have joined: one may tell of a failure. */
static inline void amp_tcp_listen_to_all(amp_tcp_join *j) {
    amp_tcp *t = j->t;
    int32_t i;
    j->listened = amp_tcp_now();
    for (i = 0; i < t->world; i++) {
        j->polls[i].fd = t->peers[i].words;
        j->polls[i].events = POLLIN;
        j->polls[i].revents = 0;
    }
    if (amp_tcp_poll(j->polls, (size_t)t->world, 0) <= 0) return;
    for (i = 0; i < t->world && t->why[0] == 0; i++) if (j->polls[i].revents != 0) amp_tcp_hear(t, i);
}

/* Waits up to so many milliseconds for connections, for what those who connected say, and for `fd` (-1: none).  Ranks
   that have joined are listened to from time to time: their connections in each wait would cost more than the rest. */
static inline void amp_tcp_receive_guests(amp_tcp_join *j, int fd, int milliseconds) {
    enum { BETWEEN = 100 };     /* milliseconds */
    struct pollfd *guests = j->polls + 2;
    int n = 2 + j->n_guests, i;
    for (i = 0; i < n; i++) {
        j->polls[i].fd = i == 0 ? j->listener : i == 1 ? fd : j->guests[i - 2].fd;
        j->polls[i].events = POLLIN;
        j->polls[i].revents = 0;
    }
    if (amp_tcp_poll(j->polls, (size_t)n, milliseconds) > 0) {
        int came = j->polls[0].revents != 0;
        for (i = j->n_guests - 1; i >= 0; i--)
            if (guests[i].revents != 0 && amp_tcp_greet(j, &j->guests[i])) j->guests[i] = j->guests[--j->n_guests];
        if (came) amp_tcp_take_guests(j);
    }
    if (j->t->why[0] == 0 && amp_tcp_now() - j->listened >= BETWEEN) amp_tcp_listen_to_all(j);
}

/* Milliseconds to wait now: a part of a second, and not beyond the deadline. */
static inline int amp_tcp_a_while(const amp_tcp_join *j) {
    int64_t left = j->deadline - amp_tcp_now();
    return left < 0 ? 0 : left < 100 ? (int)left : 100;
}

/* The first rank above this one that has not connected, or 0.  joining: to rank 0, to join. */
static inline int32_t amp_tcp_missing(const amp_tcp *t, int joining) {
    int32_t i;
    for (i = t->rank + 1; i < t->world; i++)
        if (t->peers[i].words < 0 || (!joining && t->peers[i].data < 0)) return i;
    return 0;
}

/* Accepts the ranks above this one until all are there, something fails, or the deadline. */
static inline void amp_tcp_accept(amp_tcp_join *j, int joining) {
    amp_tcp *t = j->t;
    while (t->why[0] == 0 && amp_tcp_missing(t, joining) > 0 && amp_tcp_now() < j->deadline)
        amp_tcp_receive_guests(j, -1, amp_tcp_a_while(j));
}

/* As amp_tcp_accept; it is an error if one does not come. */
static inline amp_result amp_tcp_accept_all(amp_tcp_join *j) {
    amp_tcp *t = j->t;
    int32_t missing;
    char strangers[160];
    amp_tcp_accept(j, 0);
    missing = amp_tcp_missing(t, 0);
    if (t->why[0] == 0 && missing > 0)
        return amp_tcp_fail(t, "rank %d has not connected to rank %d within %d ms%s", (int)missing, (int)t->rank,
                            (int)t->timeout_ms, amp_tcp_strangers(j, strangers));
    return t->why[0] != 0 ? AMP_ERR_REDUCE : AMP_OK;
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

/* The file: a line with the name of rank 0's machine, the port, the run's secret and the job. */
static inline void amp_tcp_file_line(const amp_tcp_join *j, const char *host, int32_t port, char line[400]) {
    snprintf(line, 400, "amp_tcp %.250s %d %.63s %.63s\n", host, (int)port, j->secret,
             j->desc->job != NULL ? j->desc->job : "");
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
    int fd, bad;
    snprintf(path, sizeof path, "%.4000s.tmp.%ld", j->desc->file, (long)getpid());
    (void)remove(path);
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);         /* it holds the secret */
    f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (f == NULL && fd >= 0) close(fd);
    bad = f == NULL || fputs(line, f) < 0;
    if (f != NULL && fclose(f) != 0) bad = 1;
    if (bad || amp_tcp_replace(path, j->desc->file) != 0)
        return amp_tcp_fail(j->t, "%.150s: %s", j->desc->file, strerror(errno));
    return AMP_OK;
}
static inline void amp_tcp_own_name(char name[256]) {
    if (gethostname(name, 256) != 0) name[0] = 0;
    name[255] = 0;
}

/* The number of this run, not 0. */
static inline uint64_t amp_tcp_new_key(void) {
    uint64_t key = 0;
    amp_system s;
    amp_system_default(&s);
    if (!amp_tcp_random(&key, sizeof key))
        key = ((uint64_t)time(NULL) * 1000000000u ^ (uint64_t)s.clock_ns(s.user)) * UINT64_C(0x9e3779b97f4a7c15);
    return key | 1;
}

/* Rank 0, with a file and no secret: makes one up, of 32 hexadecimal digits. */
static inline amp_result amp_tcp_make_secret(amp_tcp_join *j) {
    unsigned char bytes[16];
    int i;
    if (j->secret[0] != 0) return AMP_OK;
    if (!amp_tcp_random(bytes, sizeof bytes))
        return amp_tcp_fail(j->t, "/dev/urandom gives no random numbers for a secret: set AMP_TCP_SECRET on all ranks");
    for (i = 0; i < 16; i++) snprintf(j->secret + 2 * i, 3, "%02x", bytes[i]);
    return AMP_OK;
}

/* Without a secret only loopback will do. */
static inline amp_result amp_tcp_check_reach(const amp_tcp_join *j, const char *host) {
    if (j->secret[0] != 0 || amp_tcp_is_loopback(host)) return AMP_OK;
    return amp_tcp_fail(j->t, "%.60s can be reached from other machines: set the environment variable AMP_TCP_SECRET "
                        "(or .secret) to the same word on all ranks, or let them meet at 127.0.0.1", host);
}

/* Rank 0: waits for the others, then tells them of each other.  If something is wrong, it waits to tell all. */
static inline amp_result amp_tcp_lead(amp_tcp_join *j) {
    amp_tcp *t = j->t;
    const char *file = j->desc->file, *why = NULL;
    char name[256], line[400] = "", now[400] = "", strangers[160];
    amp_tcp_place own;
    int32_t i;
    if (file != NULL && amp_tcp_make_secret(j) != AMP_OK) return AMP_ERR_REDUCE;
    j->listener = amp_tcp_listen(file != NULL ? NULL : j->desc->address, file != NULL ? 0 : j->desc->port, &why);
    if (j->listener >= 0) amp_tcp_end(j->listener, 0, &own);
    if (j->listener >= 0 && file == NULL && amp_tcp_check_reach(j, own.host) != AMP_OK) return AMP_ERR_REDUCE;
    if (j->listener >= 0 && file == NULL && amp_tcp_listens_wide(j, own.host)) {
        amp_tcp_drop(j->listener);
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
    amp_tcp_accept(j, 1);
    while (t->why[0] != 0 && j->met < t->world - 1 && amp_tcp_now() < j->deadline)
        amp_tcp_receive_guests(j, -1, amp_tcp_a_while(j));
    if (file != NULL && amp_tcp_file_read(j, now) && strcmp(now, line) == 0) (void)remove(file);
    else if (file != NULL) (void)amp_tcp_fail(t, "%.150s was written by another rank 0", file);
    for (i = 1; i < t->world && t->why[0] == 0; i++)
        if (t->peers[i].words < 0)
            return amp_tcp_fail(t, "rank %d has not joined within %d ms: %d of %d ranks are here%s", (int)i,
                                (int)t->timeout_ms, (int)j->met + 1, (int)t->world, amp_tcp_strangers(j, strangers));
    t->key = amp_tcp_new_key();
    j->deadline = amp_tcp_now() + t->timeout_ms;
    for (i = 1; i < t->world && t->why[0] == 0; i++) {
        amp_tcp_say(t, t->peers[i].words, amp_tcp_welcome, "");
        if (!amp_tcp_send_all(t->peers[i].words, j->places, (size_t)t->world * sizeof *j->places, j->deadline))
            (void)amp_tcp_gone(t, i, "its connection has closed");
    }
    return t->why[0] != 0 ? AMP_ERR_REDUCE : amp_tcp_accept_all(j);
}

/* Where rank 0 listens; 0: not known yet. */
static inline int amp_tcp_find_master(amp_tcp_join *j, amp_tcp_place *out, char host[256]) {
    char line[400], name[256], secret[64] = "";
    int port;
    snprintf(host, 256, "%s", j->desc->file == NULL ? j->desc->address : "");
    out->port = j->desc->port;
    if (j->desc->file == NULL) return 1;
    if (!amp_tcp_file_read(j, line) || sscanf(line, "amp_tcp %255s %d %63s", host, &port, secret) != 3) return 0;
    memset(j->secret, 0, sizeof j->secret);
    snprintf(j->secret, sizeof j->secret, "%s", secret);
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
    if (amp_tcp_check_reach(j, own.host) != AMP_OK) { amp_tcp_drop(fd); return 0; }
    if (j->listener < 0) j->listener = amp_tcp_listen(amp_tcp_listens_wide(j, own.host) ? NULL : own.host, 0, why);
    if (j->listener < 0) { amp_tcp_drop(fd); return 0; }
    amp_tcp_end(j->listener, 0, &own);
    hello = amp_tcp_greeting(j, amp_tcp_joins, own.port);
    *why = "what listens there is not rank 0 of this job";
    if (amp_tcp_send_all(fd, &hello, sizeof hello, j->deadline) &&
        amp_tcp_receive(fd, word, sizeof *word, amp_tcp_now() + t->timeout_ms + 500) && word->magic == amp_tcp_magic) {
        word->text[sizeof word->text - 1] = 0;
        amp_tcp_end(fd, 1, &j->master);
        if (word->kind == (int32_t)amp_tcp_welcome) { t->peers[0].words = fd; return 1; }
        snprintf(j->told, sizeof j->told, "%s", word->text);
        if (word->kind == (int32_t)amp_tcp_failed) (void)amp_tcp_fail(t, "%.*s", (int)sizeof t->why - 1, word->text);
    }
    amp_tcp_drop(fd);
    return 0;
}

/* Reads the answer to a hello, while others are accepted.  -1: the connection has closed; 0: not answered in time. */
static inline int amp_tcp_answered(amp_tcp_join *j, int fd) {
    amp_tcp_word word;
    size_t heard = 0;
    ssize_t n;
    while (j->t->why[0] == 0 && amp_tcp_now() < j->deadline) {
        n = amp_tcp_recv(fd, (char *)&word + heard, sizeof word - heard);
        if (n == 0 || (n < 0 && !amp_tcp_would_wait())) return -1;
        if (n > 0 && (heard += (size_t)n) == sizeof word)
            return word.magic == amp_tcp_magic && word.kind == (int32_t)amp_tcp_welcome ? 1 : -1;
        if (n < 0) amp_tcp_receive_guests(j, fd, amp_tcp_a_while(j));
    }
    return 0;
}

/* Connects to a rank below this one, again until that has answered or the deadline. */
static inline int amp_tcp_reach(amp_tcp_join *j, int32_t rank, amp_tcp_purpose purpose) {
    const amp_tcp_place *p = rank == 0 ? &j->master : &j->places[rank];
    int here = amp_tcp_is_loopback(p->host);    /* on rank 0's machine, as that sees it */
    amp_tcp_hello hello = amp_tcp_greeting(j, purpose, 0);
    const char *why = "no answer";
    while (j->t->why[0] == 0 && amp_tcp_now() < j->deadline) {
        int fd = amp_tcp_connect(here ? j->master.host : p->host, p->port, j->deadline, &why), answer = -1;
        if (fd >= 0 && amp_tcp_send_all(fd, &hello, sizeof hello, j->deadline)) answer = amp_tcp_answered(j, fd);
        if (answer > 0) { j->deadline = amp_tcp_now() + j->t->timeout_ms; return fd; }
        if (fd >= 0) { amp_tcp_drop(fd); why = answer < 0 ? "its connection has closed" : "no answer"; }
        amp_tcp_receive_guests(j, -1, 20);
    }
    if (j->t->why[0] == 0)
        (void)amp_tcp_fail(j->t, "rank %d did not reach rank %d at %.60s, port %d, within %d ms: %s", (int)j->t->rank,
                           (int)rank, here ? j->master.host : p->host, (int)p->port, (int)j->t->timeout_ms, why);
    return -1;
}

/* Every other rank. */
static inline amp_result amp_tcp_follow(amp_tcp_join *j) {
    amp_tcp *t = j->t;
    char host[256] = "";
    const char *why = "there is no file yet";
    amp_tcp_word word;
    int32_t i;
    while (t->peers[0].words < 0 && t->why[0] == 0) {
        if (amp_tcp_find_master(j, &j->master, host) && amp_tcp_knock(j, host, j->master.port, &word, &why)) break;
        if (amp_tcp_now() >= j->deadline && t->why[0] == 0)
            return amp_tcp_fail(t, "rank %d did not reach rank 0 at %.100s, port %d, within %d ms: %s", (int)t->rank,
                                host[0] != 0 ? host : j->desc->file, (int)j->master.port, (int)t->timeout_ms,
                                j->told[0] != 0 ? j->told : why);
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
    return t->why[0] != 0 ? AMP_ERR_REDUCE : amp_tcp_accept_all(j);
}

/* ---- Opening and closing */

/* Closes the connections; the others are told that this rank is done, unless something failed. */
static inline void amp_tcp_close(amp_tcp *t) {
    int32_t i;
    for (i = 0; i < t->world && t->peers != NULL; i++) {
        if (t->why[0] == 0) amp_tcp_say(t, t->peers[i].words, amp_tcp_bye, "");
        if (t->peers[i].words >= 0) amp_tcp_drop(t->peers[i].words);
        if (t->peers[i].data >= 0) amp_tcp_drop(t->peers[i].data);
    }
    free(t->peers);
    free(t->polls);
    free(t->parts);
    t->peers = NULL;
    t->polls = NULL;
    t->parts = NULL;
    if (t->why[0] == 0) snprintf(t->why, sizeof t->why, "rank %d has closed its connections", (int)t->rank);
}

static inline const char *amp_tcp_secret_of(const amp_tcp_desc *d) {
    return d->secret != NULL ? d->secret : getenv("AMP_TCP_SECRET");
}

static inline amp_result amp_tcp_check(amp_tcp *t, const amp_tcp_desc *d) {
    const char *secret = amp_tcp_secret_of(d);
    if (d->world < 1 || d->world > 1024) return amp_tcp_refuse(t, AMP_ERR_RANGE, ".world must be 1 to 1024");
    if (d->rank < 0 || d->rank >= d->world) return amp_tcp_refuse(t, AMP_ERR_RANGE, ".rank must be 0 to .world - 1");
    if (d->timeout_ms < 0) return amp_tcp_refuse(t, AMP_ERR_RANGE, ".timeout_ms must be 1 or more, or 0 for 60000");
    if (d->job != NULL && strlen(d->job) > 63) return amp_tcp_refuse(t, AMP_ERR_RANGE, ".job has over 63 bytes");
    if (secret != NULL && (strlen(secret) > 63 || strpbrk(secret, " \t\r\n") != NULL))
        return amp_tcp_refuse(t, AMP_ERR_RANGE, "the secret must have up to 63 bytes, without spaces");
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
    j->most_guests = 2 * t->world + 64;
    j->guests = (amp_tcp_guest *)calloc((size_t)j->most_guests, sizeof *j->guests);
    j->polls = (struct pollfd *)calloc((size_t)(2 + j->most_guests), sizeof *j->polls);
    for (i = 0; i < t->world && t->peers != NULL; i++) t->peers[i].data = t->peers[i].words = -1;
    if (t->peers != NULL && t->polls != NULL && t->parts != NULL && j->places != NULL && j->guests != NULL &&
        j->polls != NULL) return AMP_OK;
    return amp_tcp_refuse(t, AMP_ERR_MEMORY, "no memory for the ranks' buffers");
}

/* Joins the other ranks, and returns when all are there: AMP_ERR_REDUCE, with t->why, if one does not come in time, is
   there twice, or belongs to another world; if rank 0's port is taken, or its address is not its own. */
static inline amp_result amp_tcp_open(amp_tcp *t, const amp_tcp_desc *desc) {
    amp_tcp_join *j = (amp_tcp_join *)calloc(1, sizeof *j);
    const char *secret = amp_tcp_secret_of(desc);
    amp_result result;
    int k;
    memset(t, 0, sizeof *t);
    if (j == NULL) return amp_tcp_refuse(t, AMP_ERR_MEMORY, "no memory");
    if (!amp_tcp_begun()) { free(j); return amp_tcp_refuse(t, AMP_ERR_REDUCE, "Windows has no sockets here"); }
    result = amp_tcp_check(t, desc);
    if (result != AMP_OK) { free(j); return result; }
    t->rank = desc->rank;
    t->world = desc->world;
    t->timeout_ms = desc->timeout_ms > 0 ? desc->timeout_ms : 60000;
    j->t = t;
    j->desc = desc;
    snprintf(j->secret, sizeof j->secret, "%s", secret != NULL ? secret : "");
    j->listener = -1;
    j->deadline = amp_tcp_now() + t->timeout_ms;
    result = amp_tcp_make(t, j);
    if (result == AMP_OK && t->world > 1) result = t->rank == 0 ? amp_tcp_lead(j) : amp_tcp_follow(j);
    for (k = 0; k < j->n_guests; k++) amp_tcp_drop(j->guests[k].fd);
    if (j->listener >= 0) amp_tcp_drop(j->listener);
    free(j->places);
    free(j->guests);
    free(j->polls);
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
