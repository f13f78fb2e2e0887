/* t_data.c - tests the loader: order, sharding, resuming, file formats, failing files and memory, and blocked workers.  It
 * also runs the loader with a device that does its work as late as is allowed. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <dirent.h>
#include <setjmp.h>

/* Whether times mean anything in this build. */
#if defined(__has_feature)
#  if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#    define SANITIZED 1
#  endif
#endif
#if defined(SANITIZED) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
#  define SLOW_BUILD 1
#else
#  define SLOW_BUILD 0
#endif

enum { SEQ = 7, N_TOKENS = 60 * SEQ + 1 + 3 };      /* 60 samples and a rest */

static char folder[64];
static amp_context *amp;

static const char *in_folder(const char *name) {
    static char paths[16][336];
    static int turn;
    char *path = paths[turn++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static const char *write_file(const char *name, const void *head, size_t head_bytes, const void *data, size_t bytes) {
    const char *path = in_folder(name);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    if (file == NULL) return path;
    if (head_bytes > 0) CHECK(fwrite(head, 1, head_bytes, file) == head_bytes);
    if (bytes > 0) CHECK(fwrite(data, 1, bytes, file) == bytes);
    fclose(file);
    return path;
}

/* n tokens from `from` on as u16: a token is its own place, so a batch shows where it comes from. */
static const char *write_u16(const char *name, int from, int n) {
    uint8_t bytes[4096];
    int i;
    for (i = 0; i < n; i++) { bytes[2 * i] = (uint8_t)(from + i); bytes[2 * i + 1] = (uint8_t)((from + i) >> 8); }
    return write_file(name, NULL, 0, bytes, (size_t)n * 2);
}

static const char *write_npy(const char *name, const char *descr, const char *shape, const void *data, size_t bytes) {
    char head[256];
    int n =
        snprintf(head + 10, sizeof head - 10, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }", descr, shape);
    while ((n + 11) % 64 != 0) head[10 + n++] = ' ';
    head[10 + n++] = '\n';
    memcpy(head, "\x93NUMPY\1\0", 8);
    head[8] = (char)n;
    head[9] = 0;
    return write_file(name, head, (size_t)n + 10, data, bytes);
}

static amp_loader_desc token_desc(const char *path) {
    amp_loader_desc d;
    memset(&d, 0, sizeof d);
    d.path = path;
    d.format = AMP_TOKENS_U16;
    d.batch = 4;
    d.seq = SEQ;
    d.workers = AMP_NO_WORKERS;
    return d;
}

static amp_loader *opened(const amp_loader_desc *d) {
    amp_loader *l = NULL;
    CHECK_OK(amp_loader_create(amp, &l, d));
    return l;
}

/* A batch in which every token is its place in the file; gives the samples' numbers, -1 for padding. */
static void check_rows(const amp_batch *b, int64_t *ids) {
    int64_t i, j;
    for (i = 0; i < b->batch; i++) {
        const int32_t *x = b->inputs + i * b->seq, *y = b->targets + i * b->seq;
        if (i >= b->valid) {
            for (j = 0; j < b->seq; j++) CHECK(x[j] == 0 && y[j] == -100);
            ids[i] = -1;
            continue;
        }
        for (j = 0; j < b->seq; j++) CHECK(x[j] == x[0] + j && y[j] == x[j] + 1);
        ids[i] = x[0] / SEQ;
        CHECK_EQ(x[0] % SEQ, 0);
    }
}

/* Sample numbers of the next n batches, at most `room` of them; -2 between batches. */
static int data_take(amp_loader *l, int batches, int64_t *ids, int room) {
    int i, n = 0;
    for (i = 0; i < batches; i++) {
        amp_batch b;
        CHECK_OK(amp_loader_next(l, &b));
        if (n + (int)b.batch + 1 > room) break;
        check_rows(&b, ids + n);
        n += (int)b.batch;
        ids[n++] = -2;
    }
    return n;
}

static void wait_ms(int ms) {
    struct timespec t;
    t.tv_sec = ms / 1000;
    t.tv_nsec = ms % 1000 * 1000000L;
    nanosleep(&t, NULL);
}

static int wait_until_ready(const amp_loader *l, int n) {
    amp_loader_info info;
    int i;
    memset(&info, 0, sizeof info);
    for (i = 0; i < 2000; i++) {
        CHECK_OK(amp_loader_info_get(l, &info));
        if (info.ready >= n) break;
        wait_ms(1);
    }
    return info.ready;
}

/* ---- Order */

static int64_t order_at(const ampi_order *order, int64_t place) {
    int64_t sample;
    ampi_order_at(order, place, 1, &sample);
    return sample;
}

TEST(order_is_a_bijection) {
    static const int64_t sizes[] = {255, 256, 257, 1000, 4095, 4096, 4097, 65537};
    static uint8_t seen[65537];
    int64_t n, i;
    size_t k;
    for (n = 1; n < 200 + (int64_t)(sizeof sizes / sizeof *sizes); n++) {
        int64_t size = n < 200 ? n : sizes[n - 200];
        int epoch;
        for (epoch = 0; epoch < 3; epoch++) {
            ampi_order order;
            int twice = 0;
            ampi_order_init(&order, size, (uint64_t)(n * 31), epoch);
            memset(seen, 0, sizeof seen);
            for (i = 0; i < size; i++) {
                int64_t abreast[AMPI_PIECES], x = order_at(&order, i), count = AMPI_MIN(size - i, AMPI_PIECES), j;
                CHECK(x >= 0 && x < size);
                if (x >= 0 && x < size) twice += seen[x]++;
                if (i % AMPI_PIECES != 0) continue;
                ampi_order_at(&order, i, count, abreast);
                for (j = 0; j < count; j++) CHECK_EQ(abreast[j], order_at(&order, i + j));
            }
            CHECK_EQ(twice, 0);
        }
    }
    for (k = 0; k < 2; k++) {                       /* far beyond 32 bits */
        ampi_order order;
        int64_t size = k ? INT64_MAX : ((int64_t)1 << 40) + 12345;
        ampi_order_init(&order, size, 1, 2);
        for (i = 0; i < 1000; i++)
            CHECK(order_at(&order, size - 1 - i) >= 0 && order_at(&order, size - 1 - i) < size);
    }
}

/* Each place is equally likely to get each sample, and neighbours scatter: chi squared with 9 and 99 degrees of
   freedom stays below its 99.9% quantiles, 27.9 and 148.2. */
TEST(order_is_random) {
    int counts[10] = {0}, pairs[100] = {0}, epoch, i;
    double one = 0, two = 0;
    for (epoch = 0; epoch < 20000; epoch++) {
        ampi_order order;
        ampi_order_init(&order, 10, 42, epoch);
        counts[order_at(&order, 3)]++;
        ampi_order_init(&order, 100, 42, epoch);
        pairs[(order_at(&order, 51) - order_at(&order, 50) + 100) % 100]++;
    }
    for (i = 0; i < 10; i++) one += (counts[i] - 2000.0) * (counts[i] - 2000.0) / 2000.0;
    CHECK_MSG(one < 27.9, "chi squared %g", one);
    for (i = 1; i < 100; i++) two += (pairs[i] - 20000.0 / 99) * (pairs[i] - 20000.0 / 99) / (20000.0 / 99);
    CHECK_MSG(two < 148.2, "chi squared %g", two);
    CHECK_EQ(pairs[0], 0);
}

/* A saved position means the same samples in every later version. */
TEST(order_never_changes) {
    static const int64_t expected[10] = {446, 572, 121, 506, 123, 334, 929, 139, 482, 818};
    ampi_order order;
    int i;
    ampi_order_init(&order, 1000, 1234, 5);
    for (i = 0; i < 10; i++) CHECK_EQ(order_at(&order, i), expected[i]);
    CHECK_EQ(ampi_epoch_random(1234, 5, 8), UINT64_C(0x6eb156e60e8bf2a8));
}

enum { DATA_SAMPLES = 59 };                             /* leaves a rest that no rank count divides */

/* Every rank count, worker count, order and last-batch policy: each sample exactly once per epoch, fewer only where
   they are dropped; and the same batches for any number of workers. */
static void check_epoch(int world, int shuffle, amp_last_batch last_batch) {
    static const int workers[] = {AMP_NO_WORKERS, 1, 4};
    int seen[2][DATA_SAMPLES] = {{0}}, w, rank, epoch, i, total;
    int64_t reference[3][200];
    int n_reference[3];
    for (w = 0; w < 3; w++) {
        memset(seen, 0, sizeof seen);
        for (rank = 0; rank < world; rank++) {
            amp_loader_desc d = token_desc(in_folder("tokens.u16"));
            amp_loader_info info;
            amp_loader *l;
            int64_t ids[200];
            int n, at = 0;
            d.shuffle = shuffle; d.last_batch = last_batch; d.world = world; d.rank = rank; d.workers = workers[w];
            d.seed = 3; d.batch = 7; d.last = DATA_SAMPLES * SEQ + 1;
            l = opened(&d);
            CHECK_OK(amp_loader_info_get(l, &info));
            CHECK_EQ(info.samples, DATA_SAMPLES);
            CHECK_EQ(info.batches,
                     last_batch == AMP_LAST_DROP ? DATA_SAMPLES / (7 * world) : (DATA_SAMPLES + 7 * world - 1) / (7 * world));
            n = data_take(l, 2 * (int)info.batches, ids, 200);
            for (i = 0, epoch = 0; i < n; i++) {
                if (ids[i] >= 0) seen[epoch][ids[i]]++;
                if (ids[i] == -2 && ++at == info.batches) epoch++;
            }
            if (w == 0) { memcpy(reference[rank], ids, sizeof ids); n_reference[rank] = n; }
            else CHECK(n == n_reference[rank] && memcmp(ids, reference[rank], (size_t)n * sizeof *ids) == 0);
            amp_loader_destroy(l);
        }
        for (epoch = 0; epoch < 2; epoch++) {
            for (i = total = 0; i < DATA_SAMPLES; i++) { CHECK(seen[epoch][i] <= 1); total += seen[epoch][i]; }
            CHECK_EQ(total, last_batch == AMP_LAST_DROP ? DATA_SAMPLES / (7 * world) * 7 * world : DATA_SAMPLES);
        }
    }
}

TEST(each_sample_once) {
    int world, shuffle, last_batch;
    for (world = 1; world <= 3; world++)
        for (shuffle = 0; shuffle < 2; shuffle++)
            for (last_batch = AMP_LAST_DROP; last_batch <= AMP_LAST_PAD; last_batch++)
                check_epoch(world, shuffle, (amp_last_batch)last_batch);
}

TEST(epochs_that_come_out_even) {
    int policy;
    for (policy = AMP_LAST_DROP; policy <= AMP_LAST_PAD; policy++) {
        amp_loader_desc d = token_desc(in_folder("tokens.u16"));
        amp_loader_info info;
        amp_loader *l;
        d.batch = 4;
        d.world = 3;
        d.last = 12 * SEQ + 1;
        d.last_batch = (amp_last_batch)policy; /* 12 samples: nothing is left for a last batch */
        l = opened(&d);
        CHECK_OK(amp_loader_info_get(l, &info));
        CHECK_EQ(info.batches, 1);
        amp_loader_destroy(l);
    }
}

/* More ranks than samples remain: the last batch is empty on some, and padded it has nothing valid. */
TEST(empty_last_batch) {
    int rank, policy;
    for (policy = AMP_LAST_PARTIAL; policy <= AMP_LAST_PAD; policy++)
        for (rank = 0; rank < 3; rank++) {
            amp_loader_desc d = token_desc(in_folder("tokens.u16"));
            amp_loader *l;
            amp_batch b;
            int64_t ids[8];
            d.batch = 4;
            d.world = 3;
            d.rank = rank;
            d.last = 13 * SEQ + 1;
            d.last_batch = (amp_last_batch)policy; /* 13 samples: 12 and one */
            l = opened(&d);
            CHECK_OK(amp_loader_next(l, &b));
            CHECK_EQ(b.valid, 4);
            CHECK_OK(amp_loader_next(l, &b));
            CHECK_EQ(b.index, 1);
            CHECK_EQ(b.valid, rank == 0);
            CHECK_EQ(b.batch, policy == AMP_LAST_PAD ? 4 : rank == 0);
            check_rows(&b, ids);
            if (rank == 0) CHECK_EQ(ids[0], 12);
            CHECK_OK(amp_loader_next(l, &b));
            CHECK_EQ(b.epoch, 1);
            amp_loader_destroy(l);
        }
}

TEST(shuffle) {
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    int64_t a[200], b[200];
    int i, same = 0;
    amp_loader *l;
    d.shuffle = 1; d.seed = 11;
    l = opened(&d);
    data_take(l, 30, a, 200);                            /* two epochs of 15 batches */
    amp_loader_destroy(l);
    for (i = 0; i < 75; i++) same += a[i] == a[75 + i] && a[i] >= 0;
    CHECK(same < 12);                               /* 1 expected */
    l = opened(&d);
    data_take(l, 30, b, 200);
    amp_loader_destroy(l);
    CHECK(memcmp(a, b, 150 * sizeof *a) == 0);
    d.seed = 12;
    l = opened(&d);
    data_take(l, 30, b, 200);
    amp_loader_destroy(l);
    for (i = same = 0; i < 75; i++) same += a[i] == b[i] && a[i] >= 0;
    CHECK(same < 12);
}

/* ---- Resume */

/* Saves after `at` batches, loads into a new loader with other workers, twice: the same sequence as uninterrupted. */
static void check_resume(int at, int then, int shuffle) {
    static const int workers[] = {1, AMP_NO_WORKERS, 3};
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    amp_state *state = NULL, *copy = NULL;
    int64_t whole[400], ids[400];
    int n, m = 0, part;
    amp_loader *l;
    d.shuffle = shuffle; d.batch = 9; d.last_batch = AMP_LAST_PARTIAL;     /* 7 batches an epoch */
    l = opened(&d);
    n = data_take(l, 22, whole, 400);
    amp_loader_destroy(l);
    for (part = 0; part < 3; part++) {
        void *data;
        size_t bytes;
        amp_loader_info info;
        d.workers = workers[part];
        d.prefetch = 1 + 2 * part;
        l = opened(&d);
        if (part > 0) {
            CHECK_OK(amp_loader_load(l, copy, "train"));
            amp_state_destroy(copy);
        }
        m += data_take(l, part == 0 ? at : part == 1 ? then : 22 - at - then, ids + m, 400 - m);
        CHECK_OK(amp_loader_info_get(l, &info));
        if (part == 0) CHECK(info.epoch == at / 7 && info.index == at % 7);
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_loader_save(l, state, "train"));
        CHECK_OK(amp_state_encode(state, &data, &bytes));
        copy = NULL;
        CHECK_OK(amp_state_decode(&copy, NULL, data, bytes));
        amp_file_free(NULL, data, bytes);
        amp_state_destroy(state);
        amp_loader_destroy(l);
    }
    amp_state_destroy(copy);
    CHECK(m == n && memcmp(ids, whole, (size_t)n * sizeof *ids) == 0);
}

TEST(resume_at_every_position) {
    int at;
    for (at = 0; at <= 16; at++) {
        check_resume(at, 0, at % 2);
        check_resume(at, 1 + at % 5, 1);
    }
}

/* Load replaces what a running loader has read ahead, and save after load says the same. */
TEST(resume_in_place) {
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    amp_state *state = NULL, *again = NULL;
    int64_t whole[128], ids[128], a[AMPI_POSITION_COUNT], b[AMPI_POSITION_COUNT];
    amp_loader *l;
    int round;
    d.workers = 3; d.prefetch = 5; d.shuffle = 1;
    l = opened(&d);
    CHECK_OK(amp_state_create(&state, NULL));
    data_take(l, 3, ids, 128);
    CHECK_OK(amp_loader_save(l, state, "x"));
    data_take(l, 15, whole, 128);
    for (round = 0; round < 50; round++) {
        CHECK_OK(amp_loader_load(l, state, "x"));
        CHECK_OK(amp_state_create(&again, NULL));
        CHECK_OK(amp_loader_save(l, again, "x"));
        CHECK_OK(amp_state_get(state, "x.loader", AMP_I64, a, AMPI_POSITION_COUNT));
        CHECK_OK(amp_state_get(again, "x.loader", AMP_I64, b, AMPI_POSITION_COUNT));
        CHECK(memcmp(a, b, sizeof a) == 0);
        amp_state_destroy(again);
        data_take(l, 1 + round % 15, ids, 128);
        CHECK(memcmp(ids, whole, (size_t)(1 + round % 15) * 5 * sizeof *ids) == 0);
    }
    amp_loader_destroy(l);
    amp_state_destroy(state);
}

/* The samples of `n` global batches from where a state of that world, or none, stands: rank after rank. */
static int take_ranks(amp_loader_desc d, int world, int n, const amp_state *state, amp_state *saved, int64_t *ids) {
    amp_loader *l[4];
    int i, r, at = 0;
    d.world = world;
    d.batch /= world;
    for (r = 0; r < world; r++) {
        d.rank = r;
        l[r] = opened(&d);
        if (state != NULL) CHECK_OK(amp_loader_load(l[r], state, "x"));
    }
    for (i = 0; i < n; i++)
        for (r = 0; r < world; r++) {
            at += data_take(l[r], 1, ids + at, 400 - at);
            at -= ids[at - 1] == -2;                /* the mark of a batch's end */
        }
    CHECK_OK(amp_loader_save(l[world - 1], saved, "x"));
    for (r = 0; r < world; r++) amp_loader_destroy(l[r]);
    return at;
}

/* A state fits another number of ranks where the global batch is the same: the samples are those of an uninterrupted run,
   each step's in the same order, the remainder at an epoch's end included. */
TEST(resume_in_another_world) {
    static const int worlds[] = {1, 2, 4};
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    int64_t whole[400], ids[400];
    int from, to, n, at, cut;
    amp_state *state = NULL, *end = NULL;
    d.shuffle = 1; d.seed = 5; d.batch = 8; d.last_batch = AMP_LAST_PARTIAL;
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_state_create(&end, NULL));
    n = take_ranks(d, 1, 20, NULL, end, whole);
    for (cut = 1; cut < 20; cut += 3)
        for (from = 0; from < 3; from++)
            for (to = 0; to < 3; to++) {
                at = take_ranks(d, worlds[from], cut, NULL, state, ids);
                at += take_ranks(d, worlds[to], 20 - cut, state, end, ids + at);
                CHECK_MSG(at == n && memcmp(ids, whole, (size_t)n * sizeof *ids) == 0, "%d to %d ranks after %d batches",
                          worlds[from], worlds[to], cut);
            }
    amp_state_destroy(state);
    amp_state_destroy(end);
}

static void check_refused(amp_state *state, const amp_loader_desc *d, const char *word) {
    amp_loader *l = opened(d);
    amp_loader_info before, after;
    amp_batch b;
    CHECK_OK(amp_loader_next(l, &b));
    CHECK_OK(amp_loader_info_get(l, &before));
    CHECK_ERR(amp_loader_load(l, state, "x"), AMP_ERR_MISMATCH);
    CHECK_MSG(strstr(amp_last_error(), word) != NULL, "%s", amp_last_error());
    CHECK_OK(amp_loader_info_get(l, &after));
    CHECK(after.epoch == before.epoch && after.index == before.index);
    amp_loader_destroy(l);
}

/* What is saved is what the consumer took, and the epoch, however much was read ahead. */
TEST(state_counts_what_was_consumed) {
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    int64_t values[AMPI_POSITION_COUNT], ids[256];
    amp_state *state = NULL;
    amp_loader *l;
    d.workers = 2; d.prefetch = 6;
    l = opened(&d);
    CHECK_OK(amp_state_create(&state, NULL));
    data_take(l, 15 + 4, ids, 256);
    CHECK(wait_until_ready(l, 6) >= 6);
    CHECK_OK(amp_loader_save(l, state, "x"));
    CHECK_OK(amp_state_get(state, "x.loader", AMP_I64, values, AMPI_POSITION_COUNT));
    CHECK(values[0] == 1 && values[1] == 4);
    amp_state_destroy(state);
    amp_loader_destroy(l);
}

TEST(resume_refuses_what_differs) {
    amp_loader_desc good = token_desc(in_folder("tokens.u16")), d;
    amp_state *state = NULL;
    int64_t values[AMPI_POSITION_COUNT], bad[AMPI_POSITION_COUNT];
    amp_loader *l = opened(&good);
    char longest[80];
    int i;
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_loader_save(l, state, "x"));
    CHECK_ERR(amp_loader_load(l, state, "y"), AMP_ERR_NAME);
    memset(longest, 'p', 41);
    longest[41] = 0;
    CHECK_ERR(amp_loader_save(l, state, longest), AMP_ERR_RANGE);
    CHECK_ERR(amp_loader_load(l, state, longest), AMP_ERR_RANGE);
    CHECK_ERR(amp_loader_save(l, state, ""), AMP_ERR_RANGE);
    CHECK_ERR(amp_loader_load(l, state, ""), AMP_ERR_RANGE);
    longest[40] = 0;
    CHECK_OK(amp_loader_save(l, state, longest));
    CHECK_ERR(amp_loader_save(l, NULL, "x"), AMP_ERR_NULL);
    CHECK_ERR(amp_loader_save(l, state, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_loader_load(NULL, state, "x"), AMP_ERR_NULL);
    d = good;
    d.path = write_u16("copy.u16", 0, N_TOKENS);
    d.epochs = 2;
    d.workers = 2;
    d.prefetch = 3;
    d.vocab = 5000;
    d.timeout_ms = 1000;
    amp_loader_destroy(l);
    l = opened(&d);
    CHECK_OK(amp_loader_load(l, state, "x"));       /* the same data elsewhere, and what does not change the order */
    d = good; d.batch = 3;                     check_refused(state, &d, ".batch x .world");
    d = good; d.seed = 9;                      check_refused(state, &d, ".seed");
    d = good; d.world = 2;                     check_refused(state, &d, ".batch x .world");
    d = good; d.shuffle = 1;                   check_refused(state, &d, ".shuffle");
    d = good; d.last_batch = AMP_LAST_PAD;     check_refused(state, &d, ".last_batch");
    d = good; d.seq = 5;                       check_refused(state, &d, "samples");
    d = good; d.first = 1;                     check_refused(state, &d, ".first");
    d = good; d.last = N_TOKENS - 1;           check_refused(state, &d, ".last");
    d = good; d.path = write_u16("other.u16", 0, N_TOKENS + 1);     check_refused(state, &d, "hash");
    d = good; d.path = write_u16("other.u16", 1, N_TOKENS);         check_refused(state, &d, "hash");
    CHECK_OK(amp_state_get(state, "x.loader", AMP_I64, values, AMPI_POSITION_COUNT));
    for (i = 0; i < 4; i++) {
        memcpy(bad, values, sizeof bad);
        bad[i % 2] = i < 2 ? -1 : i == 2 ? INT64_MAX : 15;
        CHECK_OK(amp_state_put(state, "x.loader", AMP_I64, bad, AMPI_POSITION_COUNT));
        CHECK_ERR(amp_loader_load(l, state, "x"), AMP_ERR_MISMATCH);
    }
    for (i = 0; i < 4; i++) {                       /* worlds and batches that no loader has */
        memcpy(bad, values, sizeof bad);
        bad[i % 2 ? 4 : 7] = i < 2 ? 0 : INT64_MAX;
        CHECK_OK(amp_state_put(state, "x.loader", AMP_I64, bad, AMPI_POSITION_COUNT));
        CHECK_ERR(amp_loader_load(l, state, "x"), AMP_ERR_MISMATCH);
    }
    CHECK_OK(amp_state_put(state, "x.loader", AMP_I64, values, 5));
    CHECK_ERR(amp_loader_load(l, state, "x"), AMP_ERR_MISMATCH);
    amp_loader_destroy(l);
    amp_state_destroy(state);
}

TEST(seek_and_end) {
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    int64_t whole[256], ids[8];
    amp_loader *l;
    amp_batch b;
    int i, at = 0;
    d.shuffle = 1; d.epochs = 3; d.workers = 2;
    l = opened(&d);
    data_take(l, 45, whole, 256);
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_END);
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_END);
    for (i = 0; i < 60; i++) {
        at = (at * 17 + 5) % 45;
        CHECK_OK(amp_loader_seek(l, at / 15, at % 15));
        CHECK_OK(amp_loader_next(l, &b));
        CHECK(b.epoch == at / 15 && b.index == at % 15);
        check_rows(&b, ids);
        CHECK(memcmp(ids, whole + at * 5, 4 * sizeof *ids) == 0);
    }
    CHECK_ERR(amp_loader_seek(l, 0, 15), AMP_ERR_RANGE);
    CHECK_ERR(amp_loader_seek(l, -1, 0), AMP_ERR_RANGE);
    CHECK_ERR(amp_loader_seek(l, 0, -1), AMP_ERR_RANGE);
    CHECK_ERR(amp_loader_seek(l, 3, 1), AMP_ERR_RANGE);
    CHECK_ERR(amp_loader_seek(l, INT64_MAX / 2, 0), AMP_ERR_RANGE);
    CHECK_OK(amp_loader_seek(l, 3, 0));
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_END);
    CHECK_ERR(amp_loader_seek(NULL, 0, 0), AMP_ERR_NULL);
    amp_loader_destroy(l);
}

/* ---- Formats */

TEST(token_range) {
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    amp_loader_info info;
    amp_loader *l;
    amp_batch b;
    d.first = 10; d.last = 10 + 9 * SEQ + 1;        /* 9 samples: 2 batches */
    l = opened(&d);
    CHECK_OK(amp_loader_info_get(l, &info));
    CHECK(info.samples == 9 && info.batches == 2 && info.tokens == N_TOKENS && info.format == AMP_TOKENS_U16 &&
          info.n_files == 1);
    CHECK_OK(amp_loader_next(l, &b));
    CHECK(b.inputs[0] == 10 && b.targets[0] == 11 && b.inputs[3 * SEQ] == 10 + 3 * SEQ && b.seq == SEQ &&
          b.batch == 4 && b.valid == 4);
    amp_loader_destroy(l);
    d.last--;                                       /* the last target is missing: 8 samples */
    l = opened(&d);
    CHECK_OK(amp_loader_info_get(l, &info));
    CHECK_EQ(info.samples, 8);
    CHECK_OK(amp_loader_query(l, &d));
    CHECK(d.first == 10 && d.prefetch == 2 && d.timeout_ms == 60000 && d.world == 1 && d.last_batch == AMP_LAST_DROP &&
          strcmp(d.path, in_folder("tokens.u16")) == 0);
    amp_loader_destroy(l);
    d = token_desc(in_folder("tokens.u16"));
    d.first = N_TOKENS + 1;
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d.first = 0; d.last = N_TOKENS + 1;
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    CHECK(l == NULL);
}

/* The same 200 tokens (below 256) in every format, found out by content where that is possible. */
TEST(token_formats) {
    static const struct { const char *name; int size; amp_token_format format, found; } cases[] = {
        {"f.bytes", 1, AMP_TOKENS_DEFAULT, AMP_TOKENS_BYTES}, {"f.u16", 2, AMP_TOKENS_U16, AMP_TOKENS_U16},
        {"f.llmc", 2, AMP_TOKENS_DEFAULT, AMP_TOKENS_LLMC}, {"f.llama", 4, AMP_TOKENS_DEFAULT, AMP_TOKENS_LLMC},
        {"f.u1.npy", 1, AMP_TOKENS_DEFAULT, AMP_TOKENS_NPY}, {"f.u2.npy", 2, AMP_TOKENS_DEFAULT, AMP_TOKENS_NPY},
        {"f.u4.npy", 4, AMP_TOKENS_NPY, AMP_TOKENS_NPY}, {"f.i4.npy", 4, AMP_TOKENS_DEFAULT, AMP_TOKENS_NPY},
        {"f.i8.npy", 8, AMP_TOKENS_DEFAULT, AMP_TOKENS_NPY}};
    size_t c;
    for (c = 0; c < sizeof cases / sizeof *cases; c++) {
        uint8_t raw[1600], head[1024];
        char descr[4] = "<u2";
        amp_loader_desc d = token_desc(in_folder(cases[c].name));
        amp_loader_info info;
        amp_loader *l;
        int i, j, batch;
        memset(raw, 0, sizeof raw);
        memset(head, 0, sizeof head);
        for (i = 0; i < 200; i++) raw[i * cases[c].size] = (uint8_t)(i + 3);
        ampi_store_le32(head, cases[c].size == 2 ? 20240520 : 20240801);
        ampi_store_le32(head + 4, cases[c].size == 2 ? 1 : 7);
        ampi_store_le32(head + 8, 200);
        memcpy(descr + 1, cases[c].name + 2, 2);
        if (cases[c].found == AMP_TOKENS_NPY)
            write_npy(cases[c].name, descr, "(200,)", raw, 200 * (size_t)cases[c].size);
        else
            write_file(cases[c].name, head, cases[c].found == AMP_TOKENS_LLMC ? 1024 : 0, raw,
                       200 * (size_t)cases[c].size);
        d.format = cases[c].format;
        d.vocab = 203;
        d.shuffle = c % 2 != 0;
        l = opened(&d);
        if (l == NULL) continue;
        CHECK_OK(amp_loader_info_get(l, &info));
        CHECK(info.format == cases[c].found && info.tokens == 200 && info.samples == 28 && info.batches == 7);
        for (batch = 0; batch < 7; batch++) {
            amp_batch b;
            CHECK_OK(amp_loader_next(l, &b));
            for (i = 0; i < 4; i++)
                for (j = 0; j < SEQ; j++)
                    CHECK(b.inputs[i * SEQ + j] == b.inputs[i * SEQ] + j &&
                          b.targets[i * SEQ + j] == b.inputs[i * SEQ + j] + 1 && b.inputs[i * SEQ] % SEQ == 3);
        }
        amp_loader_destroy(l);
        d.shuffle = 0;
        d.batch = 28;
        for (d.vocab = 200; d.vocab >= 199; d.vocab--) {    /* the last token used is 3 + 28 * 7 = 199 */
            amp_batch b;
            l = opened(&d);
            CHECK_EQ(amp_loader_next(l, &b), d.vocab == 200 ? AMP_OK : AMP_ERR_LABEL);
            if (d.vocab == 199) CHECK(strstr(amp_last_error(), "token 199 at offset") && strstr(amp_last_error(), d.path));
            amp_loader_destroy(l);
        }
    }
}

/* Tokens that are negative or beyond int32 in wide formats are refused also without a vocabulary. */
TEST(impossible_tokens) {
    uint8_t raw[400];
    amp_loader_desc d = token_desc(NULL);
    amp_loader *l;
    amp_batch b;
    d.format = AMP_TOKENS_NPY; d.batch = 1; d.last_batch = AMP_LAST_DROP;
    memset(raw, 0, sizeof raw);
    ampi_store_le64(raw + 8 * 5, UINT64_C(0x100000000));
    d.path = write_npy("wide.npy", "<i8", "(50,)", raw, 400);
    l = opened(&d);
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_LABEL);
    CHECK(strstr(amp_last_error(), "token 4294967296 at offset 168") != NULL);     /* 128 + 5 * 8 */
    amp_loader_destroy(l);
    ampi_store_le64(raw + 8 * 5, (uint64_t)-3);
    d.path = write_npy("wide.npy", "<i8", "(50,)", raw, 400);
    l = opened(&d);
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_LABEL);
    CHECK(strstr(amp_last_error(), "token -3 ") != NULL);
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_LABEL);
    amp_loader_destroy(l);
}

/* The last token below .vocab, and .vocab itself, at each place of a sample: first, inside, last target. */
TEST(tokens_at_the_vocabulary) {
    static const char *const types[] = {"|u1", "<u2", "<i4", "<i8"};
    static const int size[] = {1, 2, 4, 8}, places[] = {0, 5, SEQ - 1, SEQ};
    uint8_t raw[8 * (SEQ + 1)];
    char shape[16];
    amp_loader_desc d = token_desc(NULL);
    amp_batch b;
    int type, place, token;
    d.format = AMP_TOKENS_NPY; d.batch = 1; d.last_batch = AMP_LAST_DROP; d.vocab = 7;
    snprintf(shape, sizeof shape, "(%d,)", SEQ + 1);
    for (type = 0; type < 4; type++) for (place = 0; place < 4; place++) for (token = 6; token < 8; token++) {
        amp_loader *l;
        memset(raw, 0, sizeof raw);
        raw[size[type] * places[place]] = (uint8_t)token;
        d.path = write_npy("edge.npy", types[type], shape, raw, (size_t)(size[type] * (SEQ + 1)));
        l = opened(&d);
        CHECK_MSG(amp_loader_next(l, &b) == (token == 6 ? AMP_OK : AMP_ERR_LABEL), "%s, place %d, token %d", types[type], places[place], token);
        amp_loader_destroy(l);
    }
}

TEST(several_files) {
    amp_loader_desc d = token_desc(in_folder("shard_*.u16"));
    amp_loader_info info;
    amp_loader *l;
    int seen[64] = {0}, i, shuffle;
    write_u16("shard_b.u16", 10 * SEQ, 3 * SEQ + 1);        /* samples 10 to 12 */
    write_u16("shard_a.u16", 0, 2 * SEQ + 1 + 6);           /* 0 and 1, and a rest */
    write_u16("shard_c.u16", 40 * SEQ, SEQ);                /* none: the last target is missing */
    write_u16("shard_d.u16", 20 * SEQ, 4 * SEQ + 3);        /* 20 to 23 */
    d.batch = 3;
    for (shuffle = 0; shuffle < 2; shuffle++) {
        int64_t ids[16];
        d.shuffle = shuffle;
        l = opened(&d);
        CHECK_OK(amp_loader_info_get(l, &info));
        CHECK(info.n_files == 4 && info.samples == 9 && info.batches == 3 && info.tokens == 21 + 22 + 7 + 31);
        data_take(l, 3, ids, 16);
        for (i = 0; i < 12; i++) if (ids[i] >= 0) seen[ids[i]]++;
        if (!shuffle)
            CHECK(ids[0] == 0 && ids[1] == 1 && ids[2] == 10 && ids[4] == 11 && ids[6] == 20 && ids[10] == 23);
        amp_loader_destroy(l);
    }
    for (i = 0; i < 64; i++) CHECK_EQ(seen[i], i < 2 || (i >= 10 && i < 13) || (i >= 20 && i < 24) ? 2 : 0);
    d.shuffle = 0;
    d.first = 2 * SEQ; d.last = 21 + 22 + 7 + 2 * SEQ + 1;  /* cuts the first and the last file */
    l = opened(&d);
    CHECK_OK(amp_loader_info_get(l, &info));
    CHECK_EQ(info.samples, 0 + 3 + 0 + 2);
    amp_loader_destroy(l);
    d = token_desc(in_folder("none_*.u16"));
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_OPEN);
    CHECK(strstr(amp_last_error(), "none_*") != NULL);
    d = token_desc(write_u16("odd[1].u16", 0, N_TOKENS));   /* a file of that name is no pattern */
    l = opened(&d);
    amp_loader_destroy(l);
    d = token_desc(in_folder("f.*"));                       /* of different formats */
    d.format = AMP_TOKENS_DEFAULT;
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_FORMAT);
}

/* Which files a pattern names, as the first token of each. */
static void check_pattern(const char *pattern, const char *expected) {
    amp_loader_desc d = token_desc(in_folder(pattern));
    amp_loader *l = NULL;
    amp_batch b;
    char got[64];
    int n = 0;
    d.batch = 1;
    d.seq = 1;
    d.epochs = 1;
    if (amp_loader_create(amp, &l, &d) != AMP_OK) {
        CHECK_MSG(expected[0] == 0 && strstr(amp_last_error(), "no file matches") != NULL, "%s", amp_last_error());
        return;
    }
    while (n < 60 && amp_loader_next(l, &b) == AMP_OK) got[n++] = (char)b.inputs[0];
    got[n] = 0;
    CHECK_MSG(strcmp(got, expected) == 0, "%s: \"%s\", must be \"%s\"", pattern, got, expected);
    amp_loader_destroy(l);
}

TEST(patterns) {
    static const char *const names[] = {"p1/ab.tok", "p1/ac.tok", "p1/b.tok", "p1/.ad.tok", "p2/ab.tok", "p2/Z.tok",
                                        "p10/ab.tok", "p2/a]b", "p2/aXb"};
    int i;
    CHECK(mkdir(in_folder("p1"), 0777) == 0 && mkdir(in_folder("p2"), 0777) == 0 && mkdir(in_folder("p10"), 0777) == 0);
    for (i = 0; i < 9; i++) write_u16(names[i], 'a' + i, 2);
    check_pattern("p1/*.tok", "abc");               /* none that begins with a dot */
    check_pattern("p1/.*.tok", "d");
    check_pattern("p1/a?.tok", "ab");
    check_pattern("p?/ab.tok", "ae");
    check_pattern("p*/ab.tok", "age");              /* p1/ p10/ p2/: by bytes */
    check_pattern("p*//*b.tok", "acge");
    check_pattern("p[2-9]/[A-Z]*", "f");
    check_pattern("p2/[!aZ]*", "");
    check_pattern("p2/[!Z]*.tok", "e");
    check_pattern("p2/a[]x]b", "h");
    check_pattern("p2/a[X-Y]b", "i");
    check_pattern("p1/ab.tok/*", "");               /* a file is no folder */
    check_pattern("none/*", "");
    check_pattern("p*/none.tok", "");
    check_pattern("*/*Z*", "f");
    for (i = 0; i < 9; i++) remove(in_folder(names[i]));
    for (i = 0; i < 3; i++) rmdir(in_folder(i == 0 ? "p1" : i == 1 ? "p2" : "p10"));
}

/* Files that no disk has: names, sizes and contents all come through the system's table. */
static int memory_list(void *user, const char *path, int (*each)(void *arg, const char *name), void *arg) {
    int stopped;
    (void)user;
    if (strcmp(path, "mem/") != 0) return -ENOENT;
    stopped = each(arg, "b7");
    if (stopped == 0) stopped = each(arg, "none");
    return stopped != 0 ? stopped : each(arg, "a3");
}
static int memory_open(void *user, const char *path, int for_writing, intptr_t *file) {
    (void)user;
    if (for_writing || strncmp(path, "mem/", 4) != 0 || path[5] < '0' || path[5] > '9' || path[6] != 0) return -ENOENT;
    *file = path[5];
    return 0;
}
static int64_t memory_size(void *user, intptr_t file) { (void)user; (void)file; return 16 * SEQ; }
static int64_t memory_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    int64_t n = AMPI_MIN((int64_t)bytes, 16 * SEQ - offset);
    (void)user;
    if (n > 0) memset(buffer, (int)file, (size_t)n);
    return AMPI_MAX(n, 0);
}
static int memory_close(void *user, intptr_t file) { (void)user; (void)file; return 0; }

TEST(patterns_of_the_system) {
    amp_desc c;
    amp_context *a = NULL;
    amp_loader_desc d = token_desc("mem/*");
    amp_loader *l = NULL;
    amp_loader_info info;
    amp_batch b;
    memset(&c, 0, sizeof c);
    c.system.file_list = memory_list; c.system.file_open = memory_open; c.system.file_size = memory_size;
    c.system.file_read = memory_read; c.system.file_close = memory_close;
    CHECK_OK(amp_open(&a, &c));
    d.format = AMP_TOKENS_BYTES;
    CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_OPEN);          /* a name that cannot be opened */
    CHECK(strstr(amp_last_error(), "mem/none") != NULL);
    d.path = "mem/??";
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_OK(amp_loader_info_get(l, &info));
    CHECK_EQ(info.n_files, 2);
    CHECK_OK(amp_loader_next(l, &b));
    CHECK_EQ(b.inputs[0], '3');
    amp_loader_destroy(l);
    amp_close(a);
}

/* Fields of every dtype; sample i holds i in all of them. */
TEST(arrays) {
    static const struct { const char *descr, *shape; amp_dtype dtype; int size, row; } cases[] = {
        {"<f4", "(20, 3)", AMP_F32, 4, 3},    {"<f8", "(20,)", AMP_F64, 8, 1},
        {"<f2", "(20, 2, 2)", AMP_F16, 2, 4}, {"|u1", "(20, 5)", AMP_U8, 1, 5},
        {"<u2", "(20L, 1L)", AMP_U16, 2, 1},  {"<i4", "(20,2)", AMP_I32, 4, 2},
        {"<i8", "( 20 , )", AMP_I64, 8, 1},   {"|b1", "(20,)", AMP_U8, 1, 1}};
    const char *paths[8];
    amp_loader_desc d;
    amp_loader_info info;
    amp_loader *l;
    int c, i, k, shuffle;
    for (c = 0; c < 8; c++) {
        uint8_t raw[20 * 12];
        char name[16];
        for (i = 0; i < 20 * cases[c].row; i++)
            for (k = 0; k < cases[c].size; k++) raw[i * cases[c].size + k] = (uint8_t)(i / cases[c].row + k);
        snprintf(name, sizeof name, "a%d.npy", c);
        write_npy(name, cases[c].descr, cases[c].shape, raw, 20 * (size_t)(cases[c].row * cases[c].size));
    }
    for (c = 0; c < 8; c++) { char name[16]; snprintf(name, sizeof name, "a%d.npy", c); paths[c] = in_folder(name); }
    memset(&d, 0, sizeof d);
    d.arrays = paths; d.n_arrays = 8; d.batch = 6; d.last_batch = AMP_LAST_PAD; d.first = 1;
    for (shuffle = 0; shuffle < 2; shuffle++) {
        int seen[20] = {0}, batch;
        d.shuffle = shuffle;
        l = opened(&d);
        CHECK_OK(amp_loader_info_get(l, &info));
        CHECK(info.n_fields == 8 && info.samples == 19 && info.batches == 4 && info.format == AMP_TOKENS_DEFAULT);
        for (batch = 0; batch < 4; batch++) {
            amp_batch b;
            CHECK_OK(amp_loader_next(l, &b));
            CHECK(b.batch == 6 && b.valid == (batch < 3 ? 6 : 1) && b.inputs == NULL && b.targets == NULL &&
                  b.seq == 3);
            for (i = 0; i < 6; i++) {
                int id = ((const uint8_t *)b.fields[3])[i * 5];
                if (i < b.valid) seen[id]++;
                for (c = 0; c < 8; c++) {
                    const uint8_t *row = (const uint8_t *)b.fields[c] + i * cases[c].row * cases[c].size;
                    CHECK_EQ(info.fields[c].dtype, cases[c].dtype);
                    CHECK_EQ(info.fields[c].count, cases[c].row);
                    for (k = 0; k < cases[c].row * cases[c].size; k++)
                        CHECK_EQ(row[k], i < b.valid ? id + k % cases[c].size : 0);
                }
            }
        }
        for (i = 0; i < 20; i++) CHECK_EQ(seen[i], i >= 1);
        amp_loader_destroy(l);
    }
}

/* The same from memory: x is the first three columns of a table of four, id the last one; half is [ROWS, 2, 2]. */
enum { DATA_ROWS = 23 };
static struct { float table[DATA_ROWS][4]; uint16_t half[DATA_ROWS][4]; double wide[DATA_ROWS]; uint8_t bytes[DATA_ROWS][5]; int64_t longs[DATA_ROWS]; } held;

static amp_loader_desc tensor_desc(amp_tensor tensors[6]) {
    amp_loader_desc d;
    for (int i = 0; i < DATA_ROWS; i++) {
        for (int k = 0; k < 4; k++) { held.table[i][k] = (float)(k < 3 ? 10 * i + k : i); held.half[i][k] = (uint16_t)(256 * i + k); }
        for (int k = 0; k < 5; k++) held.bytes[i][k] = (uint8_t)(i + k);
        held.wide[i] = 0.5 * i;
        held.longs[i] = (int64_t)i << 40;
    }
    tensors[0] = amp_tensor2(held.table, AMP_F32, DATA_ROWS, 3);
    tensors[0].stride[0] = 4; tensors[0].stride[1] = 1;
    tensors[1] = amp_tensor1(&held.table[0][3], AMP_F32, DATA_ROWS);
    tensors[1].stride[0] = 4;
    tensors[2] = amp_tensor3(held.half, AMP_BF16, DATA_ROWS, 2, 2);
    tensors[3] = amp_tensor1(held.wide, AMP_F64, DATA_ROWS);
    tensors[4] = amp_tensor2(held.bytes, AMP_E4M3, DATA_ROWS, 5);
    tensors[5] = amp_tensor2(held.longs, AMP_I64, DATA_ROWS, 1);
    memset(&d, 0, sizeof d);
    d.tensors = tensors; d.n_tensors = 6; d.batch = 4;
    return d;
}
static void check_held(const amp_batch *b, int *seen) {
    for (int i = 0; i < b->batch; i++) {
        const float *x = (const float *)b->fields[0] + 3 * i;
        int id = (int)((const float *)b->fields[1])[i];
        if (i >= b->valid) { CHECK(id == 0 && x[1] == 0 && ((const double *)b->fields[3])[i] == 0); continue; }
        seen[id]++;
        CHECK(x[0] == (float)(10 * id) && x[1] == (float)(10 * id + 1) && x[2] == (float)(10 * id + 2));
        CHECK(memcmp((const uint16_t *)b->fields[2] + 4 * i, held.half[id], 8) == 0);
        CHECK(((const double *)b->fields[3])[i] == 0.5 * id);
        CHECK(memcmp((const uint8_t *)b->fields[4] + 5 * i, held.bytes[id], 5) == 0);
        CHECK(((const int64_t *)b->fields[5])[i] == (int64_t)id << 40);
    }
}

TEST(tensors) {
    amp_tensor tensors[6];
    amp_loader_desc d = tensor_desc(tensors), query;
    amp_loader_info info;
    d.first = 1;
    for (int c = 0; c < 18; c++) {
        int seen[DATA_ROWS] = {0}, last = c / 3 % 3 + 1, samples = last == AMP_LAST_DROP ? 20 : 22, got = 0;
        amp_batch b;
        amp_loader *l;
        d.shuffle = c / 9; d.last_batch = (amp_last_batch)last; d.seed = 3; d.epochs = 1;
        d.workers = c % 3 == 0 ? AMP_NO_WORKERS : 1 << c % 3;
        l = opened(&d);
        CHECK_OK(amp_loader_info_get(l, &info));
        CHECK(info.n_fields == 6 && info.samples == 22 && info.batches == (samples + 3) / 4 && info.n_files == 0);
        CHECK(info.fields[0].count == 3 && info.fields[2].count == 4 && info.fields[2].dtype == AMP_BF16 && info.fields[4].count == 5);
        CHECK_OK(amp_loader_query(l, &query));
        CHECK(query.n_tensors == 6 && query.tensors != tensors && query.tensors[2].ndim == 3 && query.source == NULL);
        for (int i = 0; i < info.batches; i++) {
            CHECK_OK(amp_loader_next(l, &b));
            CHECK(b.seq == 3 && b.inputs == NULL && b.valid == (i < 5 ? 4 : 2) && b.batch == (last == AMP_LAST_PAD ? 4 : b.valid));
            check_held(&b, seen);
            got += (int)b.valid;
        }
        CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_END);
        CHECK_EQ(got, samples);
        for (int i = 0; i < DATA_ROWS; i++) CHECK(seen[i] <= (i > 0) && (samples == 20 || seen[i] == (i > 0)));
        amp_loader_destroy(l);
    }
}

/* A loader that goes on from a saved position gives what the first would have given; other data is refused. */
TEST(tensors_resume) {
    amp_tensor tensors[6];
    amp_loader_desc d = tensor_desc(tensors);
    d.shuffle = 1; d.seed = 9; d.last_batch = AMP_LAST_PARTIAL;
    for (int at = 0; at < 14; at++) {
        amp_loader *first = opened(&d), *then;
        amp_state *state;
        amp_batch a, b;
        CHECK_OK(amp_state_create(&state, NULL));
        for (int i = 0; i < at; i++) CHECK_OK(amp_loader_next(first, &a));
        CHECK_OK(amp_loader_save(first, state, "x"));
        d.workers = at % 2 ? AMP_NO_WORKERS : 3;
        then = opened(&d);
        CHECK_OK(amp_loader_load(then, state, "x"));
        for (int i = 0; i < 8; i++) {
            CHECK_OK(amp_loader_next(first, &a));
            CHECK_OK(amp_loader_next(then, &b));
            CHECK(a.epoch == b.epoch && a.index == b.index && a.batch == b.batch);
            CHECK(memcmp(a.fields[1], b.fields[1], (size_t)b.batch * 4) == 0 && memcmp(a.fields[0], b.fields[0], (size_t)b.batch * 12) == 0);
        }
        amp_loader_destroy(then);
        amp_loader_destroy(first);              /* its workers read the data that changes now */
        held.bytes[11][2] ^= 1;
        then = opened(&d);
        CHECK_ERR(amp_loader_load(then, state, "x"), AMP_ERR_MISMATCH);
        CHECK(strstr(amp_last_error(), "hash of the data") != NULL);
        amp_loader_destroy(then);
        held.bytes[11][2] ^= 1;
        amp_state_destroy(state);
    }
}

/* Floats in the dtype of regions, as other sources have them. */
TEST(tensors_cast) {
    amp_tensor tensors[6];
    amp_loader_desc d = tensor_desc(tensors);
    amp_desc desc;
    amp_context *a;
    amp_loader *l = NULL;
    amp_batch b;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_BF16; desc.cast_inputs = AMP_IO_REGION;
    CHECK_OK(amp_open(&a, &desc));
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_OK(amp_loader_next(l, &b));
    for (int i = 0; i < 12; i++) CHECK(((const uint16_t *)b.fields[0])[i] == amp_bf16_from_f32((float)(10 * (i / 3) + i % 3), 0));
    amp_loader_destroy(l);
    amp_close(a);
}

static void tensors_refused(const amp_loader_desc *d, amp_result result, const char *text) {
    amp_loader *l = NULL;
    CHECK_ERR(amp_loader_create(amp, &l, d), result);
    CHECK_MSG(l == NULL && strstr(amp_last_error(), text) != NULL, "\"%s\" lacks \"%s\"", amp_last_error(), text);
}
TEST(bad_tensors) {
    static const char *const paths[1] = {"x"};
    amp_tensor tensors[6];
    amp_loader_desc good = tensor_desc(tensors), d = good;
    d.arrays = paths; d.n_arrays = 1;
    tensors_refused(&d, AMP_ERR_CONFLICT, "set exactly one of .path, .arrays, .tensors and .source; 2 are set");
    d = good; d.tensors = NULL;
    tensors_refused(&d, AMP_ERR_NULL, "set exactly one of .path, .arrays, .tensors and .source; 0 are set");
    d = good; d.n_tensors = 0;
    tensors_refused(&d, AMP_ERR_RANGE, ".n_tensors = 0, must be 1 to 8");
    d.n_tensors = 9;
    tensors_refused(&d, AMP_ERR_RANGE, ".n_tensors = 9");
    d = good; d.tensors = NULL; d.path = "x";
    tensors_refused(&d, AMP_ERR_NULL, ".n_tensors is given, and .tensors is NULL");
    d = good; d.batch = 24;
    tensors_refused(&d, AMP_ERR_RANGE, ".tensors: 23 samples are less than one batch of 24");
    d = good; d.seq = 3;
    tensors_refused(&d, AMP_ERR_CONFLICT, ".seq");
    tensors[1].shape[0]--;
    tensors_refused(&good, AMP_ERR_SHAPE, ".tensors[0] has 23 rows, .tensors[1] has 22");
    tensors[1].shape[0] = 0;
    tensors_refused(&good, AMP_ERR_SHAPE, ".tensors[1] is [0] fp32: must have rows");
    good = tensor_desc(tensors); tensors[2].shape[2] = 0;
    tensors_refused(&good, AMP_ERR_SHAPE, ".tensors[2] is [23, 2, 0] bf16");
    good = tensor_desc(tensors); tensors[0].ndim = 5;
    tensors_refused(&good, AMP_ERR_SHAPE, ".tensors[0]");
    good = tensor_desc(tensors); tensors[0].stride[1] = 2;
    tensors_refused(&good, AMP_ERR_SHAPE, ".tensors[0]: its rows are not contiguous");
    good = tensor_desc(tensors); tensors[0].stride[0] = INT64_MAX; tensors[0].stride[1] = 1;
    tensors_refused(&good, AMP_ERR_SHAPE, ".tensors[0] has stride 9223372036854775807, which exceeds any memory");
    good = tensor_desc(tensors); tensors[5].data = NULL;
    tensors_refused(&good, AMP_ERR_NULL, ".tensors[5] has no data");
    good = tensor_desc(tensors); tensors[3].dtype = AMP_TF32;
    tensors_refused(&good, AMP_ERR_DTYPE, ".tensors[3].dtype = tf32");
    tensors[3].dtype = AMP_DTYPE_DEFAULT;
    tensors_refused(&good, AMP_ERR_DTYPE, ".tensors[3].dtype = default");
}

static amp_result array_result(const char *path) {
    const char *paths[2];
    amp_loader_desc d;
    amp_loader *l = NULL;
    amp_result r;
    memset(&d, 0, sizeof d);
    paths[0] = paths[1] = path;
    d.arrays = paths; d.n_arrays = 2; d.batch = 1; d.workers = AMP_NO_WORKERS;
    r = amp_loader_create(amp, &l, &d);
    if (r != AMP_OK) CHECK(l == NULL && strstr(amp_last_error(), path) != NULL);
    amp_loader_destroy(l);
    return r;
}

TEST(bad_arrays) {
    uint8_t raw[256], head[300];
    const char *paths[2];
    amp_loader_desc d;
    amp_loader *l;
    uint32_t seed = 7;
    int round, i, n;
    memset(raw, 1, sizeof raw);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(8, 2)", raw, 64)), AMP_OK);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(8, 2)", raw, 63)), AMP_ERR_TRUNCATED);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(8, 2)", raw, 65)), AMP_ERR_FORMAT);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(8, 2)", raw, 0)), AMP_ERR_TRUNCATED);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(0, 2)", raw, 0)), AMP_ERR_RANGE);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "()", raw, 4)), AMP_ERR_FORMAT);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(8, 0)", raw, 0)), AMP_ERR_FORMAT);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(9223372036854775807, 2)", raw, 64)), AMP_ERR_FORMAT);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(900000000000000000, 2)", raw, 64)), AMP_ERR_TRUNCATED);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(8, 1099511627776, 1099511627776)", raw, 64)), AMP_ERR_FORMAT);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4", "(8, -2)", raw, 64)), AMP_ERR_FORMAT);
    CHECK_EQ(array_result(write_npy("bad.npy", ">f4", "(8, 2)", raw, 64)), AMP_ERR_DTYPE);
    CHECK_EQ(array_result(write_npy("bad.npy", "<u4", "(8, 2)", raw, 64)), AMP_ERR_DTYPE);
    CHECK_EQ(array_result(write_npy("bad.npy", "<c8", "(8,)", raw, 64)), AMP_ERR_DTYPE);
    CHECK_EQ(array_result(write_npy("bad.npy", "", "(8,)", raw, 64)), AMP_ERR_DTYPE);
    CHECK_EQ(array_result(write_npy("bad.npy", "<f4', 'descr': '<f4<f4<f4", "(8, 2)", raw, 64)), AMP_ERR_FORMAT);
    CHECK_EQ(array_result(write_file("bad.npy", NULL, 0, raw, 200)), AMP_ERR_FORMAT);
    CHECK_EQ(array_result(write_file("bad.npy", NULL, 0, raw, 0)), AMP_ERR_FORMAT);
    memcpy(head, "\x93NUMPY\2\0\377\377\377\377", 12);
    CHECK_EQ(array_result(write_file("bad.npy", head, 12, raw, 100)), AMP_ERR_TRUNCATED);
    memcpy(head, "\x93NUMPY\4\0\1\0\0\0", 12);
    CHECK_EQ(array_result(write_file("bad.npy", head, 12, raw, 100)), AMP_ERR_FORMAT);
    n = snprintf((char *)head + 12, sizeof head - 12, "{\"shape\":(8,2),\"fortran_order\":False,\"descr\":\"<f4\"}");
    memcpy(head, "\x93NUMPY\3\0", 8);
    ampi_store_le32(head + 8, (uint32_t)n);
    CHECK_EQ(array_result(write_file("bad.npy", head, (size_t)n + 12, raw, 64)),
             AMP_OK);                               /* version 3, other quotes and order */
    for (round = 0; round < 20000; round++) {       /* damaged headers are refused or read, and touch nothing else */
        uint8_t *exact = (uint8_t *)malloc((size_t)n + 12);
        ampi_data_file f;
        memset(&f, 0, sizeof f);
        f.path = folder;
        f.bytes = n + 12 + 64;
        memcpy(exact, head, (size_t)n + 12);
        for (i = 0; i < 1 + round % 4; i++) {
            seed = seed * 1664525u + 1013904223u;
            exact[6 + (seed >> 8) % (uint32_t)(n + 6)] = (uint8_t)(seed >> 20);
        }
        (void)ampi_npy_header(&f, exact, round % 3 ? n + 12 : (int64_t)((seed >> 9) % (uint32_t)(n + 13)), round % 2);
        free(exact);
    }
    memset(&d, 0, sizeof d);
    paths[0] = write_npy("one.npy", "<f4", "(8, 2)", raw, 64);
    paths[1] = write_npy("two.npy", "<f4", "(7, 2)", raw, 56);
    d.arrays = paths; d.n_arrays = 2; d.batch = 1;
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_SHAPE);
    paths[1] = NULL;
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_NULL);
}

typedef struct callback_state {
    int fail_sample, block;
    uint32_t workers;
    uint64_t random[64];
    amp_loader *stops;              /* at sample 25; NULL: none */
    pthread_mutex_t lock;
    pthread_cond_t go;
} callback_state;

static int callback_read(void *user, const amp_sample *s, void *const *fields) {
    callback_state *c = (callback_state *)user;
    int result = 0, k;
    pthread_mutex_lock(&c->lock);
    while (c->block) pthread_cond_wait(&c->go, &c->lock);
    c->workers |= 1u << s->worker;
    c->random[s->sample] = s->random;
    if (s->sample == c->fail_sample) { snprintf(s->error, (size_t)s->error_size, "picture is torn"); result = -7; }
    if (s->sample == 25) amp_loader_stop(c->stops);
    pthread_mutex_unlock(&c->lock);
    ((float *)fields[0])[0] = (float)s->sample;
    ((float *)fields[0])[1] = (float)s->epoch;
    for (k = 0; k < 3; k++) ((int32_t *)fields[1])[k] = (int32_t)s->sample * 10 + k;
    return result;
}

static amp_source callback_source(callback_state *c) {
    amp_source s;
    memset(&s, 0, sizeof s);
    memset(c, 0, sizeof *c);
    c->fail_sample = -1;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->go, NULL);
    s.read = callback_read; s.user = c; s.samples = 50; s.n_fields = 2;
    s.fields[0].dtype = AMP_F32; s.fields[0].count = 2;
    s.fields[1].dtype = AMP_I32; s.fields[1].count = 3;
    return s;
}

TEST(callback) {
    static const int workers[] = {AMP_NO_WORKERS, 1, 4};
    callback_state c;
    amp_source source = callback_source(&c);
    uint64_t first[64];
    int w, i, k, batch;
    for (w = 0; w < 3; w++) {
        amp_loader_desc d;
        amp_loader *l;
        amp_batch b;
        int seen[50] = {0};
        memset(&d, 0, sizeof d);
        d.source = &source; d.batch = 10; d.shuffle = 1; d.seed = 5; d.workers = workers[w]; d.epochs = 1;
        c.workers = 0;
        l = opened(&d);
        for (batch = 0; batch < 5; batch++) {
            CHECK_OK(amp_loader_next(l, &b));
            CHECK(b.inputs == NULL && b.targets == b.fields[1] && b.batch == 10);
            for (i = 0; i < 10; i++) {
                int id = (int)((const float *)b.fields[0])[2 * i];
                seen[id]++;
                for (k = 0; k < 3; k++) CHECK_EQ(((const int32_t *)b.fields[1])[3 * i + k], id * 10 + k);
            }
        }
        CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_END);
        for (i = 0; i < 50; i++) CHECK_EQ(seen[i], 1);
        amp_loader_destroy(l);
        CHECK(c.workers >> AMPI_MAX(workers[w], 1) == 0);
        if (w == 0) memcpy(first, c.random, sizeof first);
        else CHECK(memcmp(first, c.random, 50 * sizeof *first) == 0);       /* whoever read it */
        for (i = 1; i < 50; i++) CHECK(c.random[i] != c.random[i - 1]);
    }
}

TEST(callback_stops_its_loader) {
    callback_state c;
    amp_source source = callback_source(&c);
    amp_loader_desc d;
    amp_loader *l;
    amp_batch b;
    amp_result r = AMP_OK;
    int w, i;
    memset(&d, 0, sizeof d);
    d.source = &source; d.batch = 10;
    for (w = -1; w < 4; w += 2) {
        d.workers = w;
        l = opened(&d);
        pthread_mutex_lock(&c.lock);
        c.stops = l;
        pthread_mutex_unlock(&c.lock);
        for (i = 0; i < 1000 && (r = amp_loader_next(l, &b)) == AMP_OK; i++) {}
        CHECK_EQ(r, AMP_ERR_STATE);
        CHECK(w > 0 || i == 2);
        pthread_mutex_lock(&c.lock);
        c.stops = NULL;
        pthread_mutex_unlock(&c.lock);
        amp_loader_destroy(l);
    }
}

/* A callback that leaves the call by longjmp, or destroys its loader. */
typedef struct leaving { jmp_buf out; int64_t leaves; amp_loader *destroys; } leaving;
static int leaving_read(void *user, const amp_sample *s, void *const *fields) {
    leaving *v = (leaving *)user;
    if (s->sample == v->leaves) { v->leaves = -1; longjmp(v->out, 1); }
    amp_loader_destroy(v->destroys);
    *(int32_t *)fields[0] = (int32_t)s->sample;
    return 0;
}
static amp_loader *leaving_loader(leaving *v, int64_t leaves) {
    amp_source source;
    amp_loader_desc d;
    memset(&source, 0, sizeof source);
    memset(&d, 0, sizeof d);
    memset(v, 0, sizeof *v);
    v->leaves = leaves;
    source.read = leaving_read; source.user = v; source.samples = 64; source.n_fields = 1;
    source.fields[0].dtype = AMP_I32; source.fields[0].count = 1;
    d.source = &source; d.batch = 4; d.workers = AMP_NO_WORKERS; d.prefetch = 4;
    return opened(&d);
}
/* 1: the call was left. */
static int next_is_left(leaving *v, amp_loader *l, amp_batch *b) {
    if (setjmp(v->out) != 0) return 1;
    CHECK_OK(amp_loader_next(l, b));
    return 0;
}

TEST(callback_leaves_by_longjmp) {
    leaving v;
    amp_loader *l;
    amp_batch b;
    amp_state *state;
    int i, left;
    for (left = 0; left < 3; left++) {          /* batches before that */
        l = leaving_loader(&v, 4 * left + 1);
        for (i = 0; i < left; i++) CHECK(!next_is_left(&v, l, &b) && b.index == i);
        CHECK(next_is_left(&v, l, &b));
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_loader_save(l, state, "l"));
        for (; i < 6; i++) {                    /* it goes on with the same batch */
            CHECK(!next_is_left(&v, l, &b) && b.index == i);
            CHECK_EQ(*(const int32_t *)b.fields[0], 4 * i);
        }
        v.leaves = 4 * i + 2;
        CHECK(next_is_left(&v, l, &b));
        CHECK_OK(amp_loader_load(l, state, "l"));
        CHECK(!next_is_left(&v, l, &b) && b.index == left);
        amp_state_destroy(state);
        amp_loader_destroy(l);
        l = leaving_loader(&v, 1);              /* destroyed, with no call after it */
        CHECK(next_is_left(&v, l, &b));
        amp_loader_destroy(l);
    }
}

static char destroy_said[512];
static void destroy_log(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level; (void)id;
    snprintf(destroy_said, sizeof destroy_said, "%s", text);
}

/* The loader is in use: it stays, and says so. */
TEST(callback_destroys_its_loader) {
    amp_context *own = amp;
    leaving v;
    amp_loader *l;
    amp_batch b;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.logger.write = destroy_log;
    CHECK_OK(amp_open(&amp, &d));
    l = leaving_loader(&v, -1);
    v.destroys = l;
    CHECK(!next_is_left(&v, l, &b) && b.index == 0);
    CHECK(strstr(destroy_said, "amp_loader_destroy: called from within the loader's read") != NULL);
    v.destroys = NULL;
    CHECK(!next_is_left(&v, l, &b) && b.index == 1);
    amp_loader_destroy(l);
    amp_close(amp);
    amp = own;
}

TEST(callback_errors) {
    callback_state c;
    amp_source source = callback_source(&c);
    amp_loader_desc d;
    amp_loader *l;
    amp_batch b;
    int w;
    memset(&d, 0, sizeof d);
    d.source = &source; d.batch = 10;
    for (w = -1; w < 4; w += 2) {
        d.workers = w;
        c.fail_sample = 25;
        l = opened(&d);
        CHECK_OK(amp_loader_next(l, &b));
        CHECK_OK(amp_loader_next(l, &b));
        CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_SOURCE);
        CHECK(strstr(amp_last_error(), "sample 25") != NULL && strstr(amp_last_error(), "picture is torn") != NULL &&
              strstr(amp_last_error(), "-7") != NULL);
        pthread_mutex_lock(&c.lock);
        c.fail_sample = -1;
        pthread_mutex_unlock(&c.lock);
        CHECK_OK(amp_loader_next(l, &b));           /* tried again only now */
        CHECK(b.index == 2 && ((const int32_t *)b.fields[1])[0] == 200);
        CHECK_OK(amp_loader_next(l, &b));
        CHECK(((const int32_t *)b.fields[1])[0] == 300);
        amp_loader_destroy(l);
    }
    d.workers = 1; d.timeout_ms = 30;
    c.block = 1;
    l = opened(&d);
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_TIMEOUT);
    CHECK(strstr(amp_last_error(), "worker 0 is in your callback with sample 0") != NULL);
    pthread_mutex_lock(&c.lock);
    c.block = 0;
    pthread_cond_broadcast(&c.go);
    pthread_mutex_unlock(&c.lock);
    amp_loader_destroy(l);
    d.workers = AMP_NO_WORKERS;
    source.n_fields = 0;              CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    source.n_fields = 9;              CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    source.n_fields = 2; source.samples = 0; CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    source.samples = 50; source.fields[1].count = 0; CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    source.fields[1].count = INT64_MAX / 2; CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_SIZE);
    source.fields[1].count = 3;
    source.fields[1].dtype = AMP_DTYPE_DEFAULT;
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_DTYPE);
    source.read = NULL;               CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_NULL);
}

TEST(bad_settings) {
    static const char *const none[1] = {NULL};
    amp_loader_desc good = token_desc(in_folder("tokens.u16")), d;
    amp_source source;
    amp_loader *l = (amp_loader *)(uintptr_t)8;
    amp_batch b;
    amp_loader_info info;
    CHECK_ERR(amp_loader_create(NULL, &l, &good), AMP_ERR_NULL);
    CHECK(l == NULL);
    CHECK_ERR(amp_loader_create(amp, NULL, &good), AMP_ERR_NULL);
    CHECK_ERR(amp_loader_create(amp, &l, NULL), AMP_ERR_NULL);
    d = good; d.path = NULL;                    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_NULL);
    d = good; d.source = &source;               CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_CONFLICT);
    d = good; d.path = NULL; d.arrays = none;   CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_CONFLICT);
    d = good; d.seq = 0;                        CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), ".seq = 0, must be 1 to") != NULL);
    d = good; d.batch = 0;                      CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.batch = -1;                     CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.batch = 61;                     CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "60 samples") != NULL && strstr(amp_last_error(), d.path) != NULL);
    d = good; d.batch = INT64_MAX;              CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good;
    d.batch = INT64_MAX;
    d.last_batch = AMP_LAST_PAD;
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_SIZE);
    d = good; d.seq = INT64_MAX / 16;           CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.workers = 65;                   CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.workers = -2;                   CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.prefetch = 1025;                CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.timeout_ms = -1;                CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.epochs = -1;                    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.vocab = -1;                     CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.shuffle = 2;                    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.format = (amp_token_format)5;   CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.last_batch = (amp_last_batch)4; CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.world = 2; d.rank = 2;          CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    d = good; d.rank = 1;                       CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
    CHECK_ERR(amp_loader_next(NULL, &b), AMP_ERR_NULL);
    CHECK_ERR(amp_loader_info_get(NULL, &info), AMP_ERR_NULL);
    CHECK_ERR(amp_loader_query(NULL, &d), AMP_ERR_NULL);
    l = opened(&good);
    CHECK_ERR(amp_loader_next(l, NULL), AMP_ERR_NULL);
    amp_loader_destroy(l);
    amp_loader_destroy(NULL);
}

static amp_result file_result(const char *path, amp_token_format format) {
    amp_loader_desc d = token_desc(path);
    amp_loader *l = NULL;
    amp_result r;
    d.format = format;
    d.batch = 1;
    r = amp_loader_create(amp, &l, &d);
    if (r != AMP_OK) CHECK_MSG(l == NULL && strstr(amp_last_error(), path) != NULL, "%s", amp_last_error());
    amp_loader_destroy(l);
    return r;
}

TEST(bad_files) {
    uint8_t head[1024], raw[64];
    memset(head, 0, sizeof head);
    memset(raw, 0, sizeof raw);
    ampi_store_le32(head, 20240520);
    ampi_store_le32(head + 4, 1);
    ampi_store_le32(head + 8, 32);
    CHECK_EQ(file_result(write_file("x.bin", head, 1024, raw, 64), AMP_TOKENS_LLMC), AMP_OK);
    CHECK_EQ(file_result(write_file("x.bin", head, 1024, raw, 63), AMP_TOKENS_DEFAULT), AMP_ERR_TRUNCATED);
    CHECK_EQ(file_result(write_file("x.bin", head, 1000, raw, 0), AMP_TOKENS_DEFAULT), AMP_ERR_TRUNCATED);
    CHECK_EQ(file_result(write_file("x.bin", head, 1024, raw, 62), AMP_TOKENS_LLMC), AMP_ERR_TRUNCATED);
    ampi_store_le32(head + 8, 31);
    CHECK_EQ(file_result(write_file("x.bin", head, 1024, raw, 64), AMP_TOKENS_LLMC), AMP_ERR_FORMAT);
    ampi_store_le32(head + 8, 0x80000000u);
    CHECK_EQ(file_result(write_file("x.bin", head, 1024, raw, 64), AMP_TOKENS_LLMC), AMP_ERR_FORMAT);
    CHECK(strstr(amp_last_error(), "2147483648 tokens, must be at most 2147483647") != NULL && strstr(amp_last_error(), "version") == NULL);
    ampi_store_le32(head + 8, 0);
    CHECK_EQ(file_result(write_file("x.bin", head, 1024, raw, 0), AMP_TOKENS_LLMC), AMP_ERR_RANGE);
    ampi_store_le32(head + 4, 2);
    CHECK_EQ(file_result(write_file("x.bin", head, 1024, raw, 64), AMP_TOKENS_LLMC), AMP_ERR_FORMAT);
    CHECK(strstr(amp_last_error(), "version 2, must be 1") != NULL);
    ampi_store_le32(head, 20240326);
    CHECK_EQ(file_result(write_file("x.bin", head, 1024, raw, 64), AMP_TOKENS_LLMC), AMP_ERR_FORMAT);
    CHECK_EQ(file_result(write_file("x.bin", NULL, 0, raw, 0), AMP_TOKENS_LLMC), AMP_ERR_TRUNCATED);
    CHECK_EQ(file_result(write_file("x.bin", NULL, 0, raw, 0), AMP_TOKENS_DEFAULT), AMP_ERR_RANGE);
    CHECK_EQ(file_result(write_file("x.bin", NULL, 0, raw, 1), AMP_TOKENS_BYTES), AMP_ERR_RANGE);
    CHECK_EQ(file_result(write_file("x.bin", NULL, 0, raw, SEQ), AMP_TOKENS_BYTES), AMP_ERR_RANGE);
    CHECK_EQ(file_result(write_file("x.bin", NULL, 0, raw, SEQ + 1), AMP_TOKENS_BYTES), AMP_OK);
    CHECK_EQ(file_result(write_file("x.bin", NULL, 0, raw, 33), AMP_TOKENS_U16), AMP_ERR_TRUNCATED);
    CHECK_EQ(file_result(write_npy("x.npy", "<u2", "(4, 8)", raw, 64), AMP_TOKENS_DEFAULT), AMP_ERR_FORMAT);
    CHECK_EQ(file_result(write_npy("x.npy", "<f4", "(16,)", raw, 64), AMP_TOKENS_DEFAULT), AMP_ERR_DTYPE);
    CHECK_EQ(file_result(in_folder("missing"), AMP_TOKENS_DEFAULT), AMP_ERR_OPEN);
    CHECK(strstr(amp_last_error(), "No such file") != NULL);
    CHECK_EQ(file_result(folder, AMP_TOKENS_DEFAULT), AMP_ERR_READ);
}

TEST(beyond_4_gib) {
    enum { TAIL = 20 * SEQ + 1 };
    const int64_t bytes = ((int64_t)5 << 30) + 2;
    const char *path = in_folder("sparse.u16");
    amp_loader_desc d = token_desc(path);
    uint8_t tail[2 * TAIL];
    amp_loader *l;
    amp_batch b;
    int64_t ids[16];
    int i, fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0666);
    for (i = 0; i < TAIL; i++) { tail[2 * i] = (uint8_t)i; tail[2 * i + 1] = (uint8_t)(i >> 8); }
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
        if (fd >= 0) close(fd);
        remove(path);
        SKIP("no sparse file of 5 GiB here");
    }
    CHECK(pwrite(fd, tail, sizeof tail, (off_t)(bytes - 2 * TAIL)) == 2 * TAIL);
    d.first = bytes / 2 - TAIL;
    d.shuffle = 1; d.workers = 2;
    l = opened(&d);
    for (i = 0; i < 10; i++) {
        CHECK_OK(amp_loader_next(l, &b));
        check_rows(&b, ids);
    }
    amp_loader_destroy(l);
    d.first = 0; d.shuffle = 0; d.vocab = 1;        /* from the front to the first token that is not 0 */
    l = opened(&d);
    CHECK_OK(amp_loader_seek(l, 0, (bytes / 2 - 1) / (4 * SEQ) - 1));
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_LABEL);
    CHECK(strstr(amp_last_error(), "at offset 5368") != NULL);
    amp_loader_destroy(l);
    close(fd);
    remove(path);
}

/* ---- Failing systems */

typedef struct faults {
    amp_system posix;
    pthread_mutex_t lock;
    pthread_cond_t go;
    int64_t live, allocs, fail_alloc, reads;
    int threads, fail_thread, fail_open, fail_size, fail_list, lists;
    int64_t fail_from;              /* reads at this offset and beyond give fail_error; -1: none */
    int fail_error, shorten, interrupt, block, blocked, pass;   /* pass: calls that do not hang yet */
    struct { pthread_t handle; void (*run)(void *); void *arg; int live; } pool[256];
} faults;

static void *f_alloc(void *user, size_t size, size_t align) {
    faults *f = (faults *)user;
    void *ptr = NULL;
    pthread_mutex_lock(&f->lock);
    if (size > 0 && ++f->allocs != f->fail_alloc) ptr = f->posix.alloc(NULL, size, align);
    if (ptr) { f->live += (int64_t)size; memset(ptr, 0xa5, size); }
    pthread_mutex_unlock(&f->lock);
    return ptr;
}
static void f_free(void *user, void *ptr, size_t size) {
    faults *f = (faults *)user;
    pthread_mutex_lock(&f->lock);
    f->live -= (int64_t)size;
    pthread_mutex_unlock(&f->lock);
    memset(ptr, 0x5a, size);        /* whoever still uses it is found out */
    f->posix.free(NULL, ptr, size);
}
/* Called with the lock held. */
static void f_hang(faults *f, int64_t offset) {
    if (f->pass > 0) { f->pass--; return; }
    f->blocked++;
    while (f->block && offset >= f->fail_from) pthread_cond_wait(&f->go, &f->lock);
    f->blocked--;
}
static void f_hang_alone(faults *f) {
    pthread_mutex_lock(&f->lock);
    f_hang(f, 0);
    pthread_mutex_unlock(&f->lock);
}
static int f_open(void *user, const char *path, int for_writing, intptr_t *file) {
    faults *f = (faults *)user;
    f_hang_alone(f);
    return f->fail_open ? -f->fail_open : f->posix.file_open(NULL, path, for_writing, file);
}
static int f_list(void *user, const char *path, int (*each)(void *arg, const char *name), void *arg) {
    faults *f = (faults *)user;
    f_hang_alone(f);
    f->lists++;
    return f->fail_list ? -f->fail_list : f->posix.file_list(NULL, path, each, arg);
}
static int64_t f_size(void *user, intptr_t file) {
    faults *f = (faults *)user;
    int fail;
    pthread_mutex_lock(&f->lock);
    f_hang(f, 0);
    fail = f->fail_size;
    pthread_mutex_unlock(&f->lock);
    return fail ? -EIO : f->posix.file_size(NULL, file);
}
static int64_t f_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    faults *f = (faults *)user;
    int64_t result = 0;
    pthread_mutex_lock(&f->lock);
    f->reads++;
    f_hang(f, offset);
    if (f->interrupt && ++f->interrupt % 3 == 0) result = -EINTR;
    else if (f->fail_error && offset + (int64_t)bytes > f->fail_from) result = -f->fail_error;
    if (f->shorten && bytes > 5) bytes = 5;
    pthread_mutex_unlock(&f->lock);
    return result != 0 ? result : f->posix.file_read(NULL, file, buffer, bytes, offset);
}
static void *f_thread_main(void *arg) {
    int slot = *(int *)arg;
    faults *f = *(faults **)((char *)arg + 8);
    free(arg);
    f->pool[slot].run(f->pool[slot].arg);
    return NULL;
}
static int f_thread_start(void *user, void **thread, void (*run)(void *arg), void *arg) {
    faults *f = (faults *)user;
    char *hand = (char *)malloc(16);
    int slot = 0;
    if (++f->threads == f->fail_thread) { free(hand); return -EAGAIN; }
    while (f->pool[slot].live) slot++;
    f->pool[slot].live = 1;
    f->pool[slot].run = run;
    f->pool[slot].arg = arg;
    memcpy(hand, &slot, sizeof slot);
    memcpy(hand + 8, &f, sizeof f);
    *thread = &f->pool[slot];
    return -pthread_create(&f->pool[slot].handle, NULL, f_thread_main, hand);
}
static int f_thread_join(void *user, void *thread) {
    faults *f = (faults *)user;
    size_t slot = (size_t)((char *)thread - (char *)f->pool) / sizeof f->pool[0];
    int error = pthread_join(f->pool[slot].handle, NULL);
    f->pool[slot].live = 0;
    return -error;
}

/* The test itself joins what was left behind, to see what that frees. */
static int f_thread_detach(void *user, void *thread) {
    faults *f = (faults *)user;
    size_t slot = (size_t)((char *)thread - (char *)f->pool) / sizeof f->pool[0];
    CHECK_EQ(f->pool[slot].live, 1);
    f->pool[slot].live = 2;
    return 0;
}
static void join_detached(faults *f, int expected) {
    int i, n = 0;
    for (i = 0; i < 256; i++) {
        if (f->pool[i].live == 0) continue;
        CHECK_EQ(f->pool[i].live, 2);
        CHECK_EQ(pthread_join(f->pool[i].handle, NULL), 0);
        f->pool[i].live = 0;
        n++;
    }
    CHECK_EQ(n, expected);
}

/* A context of its own on a system that can fail. */
static amp_context *faulty(faults *f) {
    amp_desc d;
    amp_context *a = NULL;
    memset(f, 0, sizeof *f);
    memset(&d, 0, sizeof d);
    amp_system_default(&f->posix);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->go, NULL);
    d.system.user = f;
    d.system.alloc = f_alloc; d.system.free = f_free;
    d.system.file_open = f_open; d.system.file_size = f_size; d.system.file_read = f_read;
    d.system.thread_start = f_thread_start; d.system.thread_join = f_thread_join;
    d.system.thread_detach = f_thread_detach; d.system.file_list = f_list;
    d.threads = 1;
    CHECK_OK(amp_open(&a, &d));
    return a;
}

static void set_faults(faults *f, int64_t from, int error, int shorten, int interrupt, int block) {
    pthread_mutex_lock(&f->lock);
    f->fail_from = from; f->fail_error = error; f->shorten = shorten; f->interrupt = interrupt; f->block = block;
    pthread_cond_broadcast(&f->go);
    pthread_mutex_unlock(&f->lock);
}

/* Opening takes no longer than .timeout_ms, wherever it hangs: looking for the files, in open, in the size, in reads of
   the header and for the hash.  What is left behind gives everything back when it returns. */
TEST(opening_that_hangs) {
    const char *names[] = {"tokens.*", "tokens.u16"};
    faults f;
    amp_context *a = faulty(&f);
    int64_t live = f.live;
    int pattern, pass;
    for (pattern = 0; pattern < 2; pattern++)
        for (pass = 0; pass < 5; pass++) {
            amp_loader_desc d = token_desc(in_folder(pattern ? names[1] : names[0]));
            amp_loader *l = (amp_loader *)&d;
            int64_t began = ampi_os_clock(NULL);
            f.pass = pass;
            d.workers = 2;
            d.timeout_ms = 40;
            set_faults(&f, 0, 0, 0, 0, 1);
            CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_TIMEOUT);
            CHECK(l == NULL && strstr(amp_last_error(), "40 ms have passed while opening") != NULL && strstr(amp_last_error(), "tokens.") != NULL);
            CHECK(ampi_os_clock(NULL) - began < (int64_t)10 * 1000000000);
            set_faults(&f, 0, 0, 0, 0, 0);
            join_detached(&f, 1);
            CHECK_EQ(f.live, live);
        }
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

TEST(failing_reads) {
    static const int workers[] = {AMP_NO_WORKERS, 1, 3};
    faults f;
    amp_context *a = faulty(&f);
    int w, i;
    for (w = 0; w < 3; w++) {
        amp_loader_desc d = token_desc(in_folder("tokens.u16"));
        amp_loader *l = NULL;
        amp_batch b;
        int64_t ids[8];
        d.workers = workers[w];
        set_faults(&f, 0, 0, 1, 1, 0);              /* 5 bytes at a time, every third read interrupted */
        CHECK_OK(amp_loader_create(a, &l, &d));
        CHECK_OK(amp_loader_next(l, &b));
        check_rows(&b, ids);
        CHECK(ids[0] == 0 && ids[3] == 3);
        amp_loader_destroy(l);
        set_faults(&f, 17 * SEQ * 2, EIO, 0, 0, 0);
        CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_READ);      /* already the header or the hash */
        set_faults(&f, 0, 0, 0, 0, 0);
        CHECK_OK(amp_loader_create(a, &l, &d));
        CHECK_OK(amp_loader_seek(l, 0, 0));
        set_faults(&f, 40 * SEQ * 2, EIO, 0, 0, 0); /* the tenth batch */
        CHECK_OK(amp_loader_seek(l, 0, 5));
        for (i = 5; i < 9; i++) {
            CHECK_OK(amp_loader_next(l, &b));
            check_rows(&b, ids);
            CHECK_EQ(ids[0], i * 4);
        }
        for (i = 0; i < 3; i++) {
            CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_READ);
            CHECK(strstr(amp_last_error(), d.path) != NULL &&
                  strstr(amp_last_error(), "Input/output error at offset 504") != NULL &&
                  strstr(amp_last_error(), "worker ") != NULL);
        }
        set_faults(&f, 0, 0, 0, 0, 0);              /* mended: goes on with the same batch */
        CHECK_OK(amp_loader_next(l, &b));
        check_rows(&b, ids);
        CHECK(b.index == 9 && ids[0] == 36);
        for (i = 10; i < 40; i++) {
            CHECK_OK(amp_loader_next(l, &b));
            check_rows(&b, ids);
            CHECK_EQ(ids[0], i % 15 * 4);
        }
        amp_loader_destroy(l);
    }
    f.fail_open = EMFILE;
    { amp_loader_desc d = token_desc(in_folder("tokens.u16")); amp_loader *l;
      CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_OPEN);
      CHECK(strstr(amp_last_error(), "ulimit") != NULL);
      f.fail_open = 0; f.fail_list = EACCES; f.lists = 0;
      d.path = in_folder("shard_*.u16");
      CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_OPEN);
      CHECK(f.lists == 1 && strstr(amp_last_error(), folder) != NULL && strstr(amp_last_error(), "Permission") != NULL);
      f.fail_list = ENOENT;
      CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_OPEN);
      CHECK(strstr(amp_last_error(), "no file matches") != NULL);
      f.fail_list = 0; f.fail_size = 1;
      d.path = in_folder("tokens.u16");
      CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_READ);
      f.fail_size = 0; }
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

/* A file that shrinks while it is read. */
TEST(truncated_meanwhile) {
    amp_loader_desc d = token_desc(write_u16("shrinks.u16", 0, N_TOKENS));
    amp_loader *l = opened(&d);
    amp_batch b;
    int i;
    CHECK_EQ(truncate(d.path, 10 * SEQ * 2), 0);
    for (i = 0; i < 2; i++) CHECK_OK(amp_loader_next(l, &b));
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_TRUNCATED);
    CHECK(strstr(amp_last_error(), d.path) != NULL && strstr(amp_last_error(), "ended at offset 140") != NULL);
    amp_loader_destroy(l);
}

/* ---- The cache of shuffled short samples */

enum { BIG_TOKENS = 1 << 20, BIG_SEQ = 60 };      /* 2 MiB: 32 blocks, whose borders lie within samples */

/* Token i is i modulo 2^16. */
static const char *write_big(const char *name) {
    uint8_t *raw = (uint8_t *)malloc(2 * BIG_TOKENS);
    const char *path;
    int i;
    for (i = 0; i < BIG_TOKENS; i++) { raw[2 * i] = (uint8_t)i; raw[2 * i + 1] = (uint8_t)(i >> 8); }
    path = write_file(name, NULL, 0, raw, 2 * BIG_TOKENS);
    free(raw);
    return path;
}

static amp_loader_desc big_desc(const char *path) {
    amp_loader_desc d = token_desc(path);
    d.batch = 64;
    d.seq = BIG_SEQ;
    d.shuffle = 1;
    d.seed = 21;
    return d;
}

/* The samples that the order says, wherever they were kept. */
static void check_big(const amp_loader *l, const amp_batch *b) {
    amp_loader_info info;
    ampi_order order;
    int64_t i, j;
    CHECK_OK(amp_loader_info_get(l, &info));
    ampi_order_init(&order, info.samples, 21, b->epoch);
    for (i = 0; i < b->batch; i++) {
        int64_t first = order_at(&order, b->index * 64 + i) * BIG_SEQ, wrong = 0;
        for (j = 0; j < BIG_SEQ; j++) {
            wrong += b->inputs[i * BIG_SEQ + j] != ((first + j) & 65535);
            wrong += b->targets[i * BIG_SEQ + j] != ((first + j + 1) & 65535);
        }
        CHECK_EQ(wrong, 0);
    }
}

static int64_t count_reads(faults *f) {
    int64_t reads;
    pthread_mutex_lock(&f->lock);
    reads = f->reads;
    pthread_mutex_unlock(&f->lock);
    return reads;
}

/* Whole in the cache, half of it, several workers at once; and after one epoch of the whole nothing is read. */
TEST(cached_samples) {
    faults f;
    amp_context *a = faulty(&f);
    int mb, w;
    for (mb = AMP_NO_CACHE; mb <= 3; mb += 2)
        for (w = -1; w <= 3; w += 2) {
            amp_loader_desc d = big_desc(write_big("big.u16"));
            amp_loader *l = NULL;
            amp_loader_info info;
            amp_batch b;
            int64_t i, reads = 0;
            d.workers = w;
            d.cache_mb = mb;
            d.prefetch = 4;
            set_faults(&f, 0, 0, 0, 1, 0);          /* some reads are interrupted */
            CHECK_OK(amp_loader_create(a, &l, &d));
            CHECK_OK(amp_loader_info_get(l, &info));
            for (i = 0; i < 2 * info.batches; i++) {
                if (i == info.batches + 4) reads = count_reads(&f);         /* what was read ahead is past as well */
                CHECK_OK(amp_loader_next(l, &b));
                check_big(l, &b);
            }
            reads = count_reads(&f) - reads;
            if (mb == 3) CHECK_EQ(reads, 0);
            else CHECK(reads > 64 * info.batches / 3);    /* half the samples lie beyond the cache */
            amp_loader_destroy(l);
        }
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

/* A block with a bad place in it: the samples beside it are read for themselves, the one on it fails by offset. */
TEST(cache_beside_bad_places) {
    faults f;
    amp_context *a = faulty(&f);
    amp_loader_desc d = big_desc(write_big("big.u16"));
    amp_loader *l = NULL;
    amp_loader_info info;
    amp_batch b;
    int64_t from = 10 * 65536 + 5000, i, j, failed = 0;
    char place[32];
    ampi_order order;
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_OK(amp_loader_info_get(l, &info));
    set_faults(&f, from, EIO, 0, 0, 0);
    ampi_order_init(&order, info.samples, 21, 0);
    for (i = 0; i < 50; i++) {
        int64_t bad = -1;
        for (j = 63; j >= 0; j--)
            if (2 * (order_at(&order, i * 64 + j) * BIG_SEQ + BIG_SEQ + 1) > from) bad = order_at(&order, i * 64 + j);
        CHECK_OK(amp_loader_seek(l, 0, i));
        CHECK_EQ(amp_loader_next(l, &b), bad < 0 ? AMP_OK : AMP_ERR_READ);
        snprintf(place, sizeof place, "at offset %lld;", (long long)(bad * BIG_SEQ * 2));
        if (bad >= 0) { failed++; CHECK_MSG(strstr(amp_last_error(), place) != NULL, "%s", amp_last_error()); }
    }
    CHECK(failed > 40);
    set_faults(&f, 0, 0, 0, 0, 0);
    CHECK_OK(amp_loader_next(l, &b));
    check_big(l, &b);
    amp_loader_destroy(l);
    d.last = from / 2;                              /* only what can be read; its last block cannot, as a whole */
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_OK(amp_loader_info_get(l, &info));
    set_faults(&f, from, EIO, 0, 0, 0);
    for (i = 0; i < info.batches; i++) {
        CHECK_OK(amp_loader_next(l, &b));
        check_big(l, &b);
    }
    amp_loader_destroy(l);
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

/* Cut between two samples of one batch: the second is in the cache, and yet no part of the file any more. */
TEST(cached_file_is_cut_inside_a_batch) {
    amp_loader_desc d = big_desc(write_big("cut.u16"));
    amp_loader *l;
    amp_loader_info info;
    amp_batch b;
    ampi_order order;
    int64_t first = 0, second = 0, i;
    l = opened(&d);
    CHECK_OK(amp_loader_info_get(l, &info));
    amp_loader_destroy(l);
    for (d.seed = 1; second <= first + 1; d.seed++) {       /* the order of the second epoch begins upwards */
        ampi_order_init(&order, info.samples, d.seed, 1);
        first = order_at(&order, 0);
        second = order_at(&order, 1);
    }
    d.seed--;
    l = opened(&d);
    for (i = 0; i < info.batches; i++) CHECK_OK(amp_loader_next(l, &b));
    CHECK_EQ(truncate(d.path, (first + 1) * BIG_SEQ * 2 + 2), 0);
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_TRUNCATED);
    amp_loader_destroy(l);
}

/* What the cache holds is handed out only while the file holds it: a shorter file is an error where it ends, and one
   that another was renamed over is read on. */
TEST(cached_file_changes) {
    SKIP_ON_WINDOWS("replacing of an open file before version 10");
    faults f;
    amp_context *a = faulty(&f);
    amp_loader_desc d = big_desc(write_big("big.u16"));
    amp_loader *l = NULL;
    amp_loader_info info;
    amp_batch b;
    ampi_order order;
    int64_t end, i;
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_OK(amp_loader_info_get(l, &info));
    ampi_order_init(&order, info.samples, 21, 1);
    end = order_at(&order, 0) * BIG_SEQ * 2 + 51;   /* within the first sample of the second epoch */
    for (i = 0; i < info.batches; i++) CHECK_OK(amp_loader_next(l, &b));
    CHECK_EQ(truncate(d.path, end), 0);
    for (i = 0; i < 3; i++) {
        long long ended = -1, had = -1;
        CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_TRUNCATED);
        CHECK(strstr(amp_last_error(), d.path) != NULL && strstr(amp_last_error(), "ended at offset") != NULL);
        if (strstr(amp_last_error(), "ended at"))
            sscanf(strstr(amp_last_error(), "ended at"), "ended at offset %lld, and had %lld", &ended, &had);
        CHECK_EQ(ended, end);
        CHECK_EQ(had, 2 * BIG_TOKENS);
    }
    write_big("big.u16");
    CHECK_OK(amp_loader_next(l, &b));
    CHECK(b.epoch == 1 && b.index == 0);
    check_big(l, &b);
    CHECK_EQ(rename(write_u16("other.u16", 7, 100), d.path), 0);
    for (i = 0; i < info.batches; i++) { CHECK_OK(amp_loader_next(l, &b)); check_big(l, &b); }
    f.fail_size = 1;
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_READ);
    CHECK(strstr(amp_last_error(), "Input/output error at offset") != NULL);
    f.fail_size = 0;
    CHECK_OK(amp_loader_next(l, &b));
    amp_loader_destroy(l);
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

/* Every value of 16 bits at every place of a row, and each limit's neighbours; rows of int32 and of uint16. */
TEST(rows_of_16_bit_tokens) {
    uint8_t raw[2 * 40];
    int32_t in[39], out[39];
    uint16_t in16[39], out16[39];
    uint32_t vocab;
    int seq, at, i;
    for (seq = 1; seq < 40; seq++)
        for (at = 0; at <= seq; at++)
            for (vocab = 1; vocab <= 65536; vocab = vocab == 1 ? 32768 : vocab == 32768 ? 65535 : vocab + 1) {
                int over;
                memset(raw, 0, sizeof raw);
                for (over = 0; over < 2; over++) {
                    uint32_t token = vocab - 1 + (uint32_t)over;
                    if (token > 65535) continue;
                    raw[2 * at] = (uint8_t)token;
                    raw[2 * at + 1] = (uint8_t)(token >> 8);
                    CHECK_EQ(ampi_token_row(AMP_U16, raw, seq, (char *)in, (char *)out, 0, vocab) != 0, over);
                    CHECK_EQ(ampi_token_row(AMP_U16, raw, seq, (char *)in16, (char *)out16, 1, vocab) != 0, over);
                    CHECK_EQ(ampi_token_row(AMP_U16, raw, seq, (char *)in, (char *)out, 0, (uint32_t)1 << 31), 0);
                    for (i = 0; i <= seq; i++) {
                        if (i < seq) CHECK(in[i] == (i == at ? (int32_t)token : 0) && in16[i] == in[i]);
                        if (i > 0) CHECK(out[i - 1] == (i == at ? (int32_t)token : 0) && out16[i - 1] == out[i - 1]);
                    }
                }
            }
}

/* ---- Promises */

TEST(defaults) {
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    amp_loader *l;
    d.workers = 0;
    l = opened(&d);
    CHECK_OK(amp_loader_query(l, &d));
    CHECK(d.workers == 2 && d.prefetch == 2 && d.disable_pinned == 0 && d.timeout_ms == 60000 && d.cache_mb == 1024);
    amp_loader_destroy(l);
    d.cache_mb = -2;
    CHECK_ERR(amp_loader_create(amp, &l, &d), AMP_ERR_RANGE);
}

/* Resuming reads no more at the end of a late epoch than at the beginning, and allocates nothing. */
TEST(resume_costs_the_same_everywhere) {
    faults f;
    amp_context *a = faulty(&f);
    int shuffle;
    for (shuffle = 0; shuffle < 2; shuffle++) {
        static const int64_t places[][2] = {{0, 0}, {0, 14}, {1, 7}, {1000, 1}, {1000000000, 14}};
        amp_loader_desc d = token_desc(in_folder("tokens.u16"));
        amp_loader *l = NULL;
        amp_batch b;
        int i;
        d.shuffle = shuffle;
        CHECK_OK(amp_loader_create(a, &l, &d));
        CHECK_OK(amp_loader_next(l, &b));
        for (i = 0; i < 5; i++) {
            int64_t reads = f.reads, allocs = f.allocs;
            CHECK_OK(amp_loader_seek(l, places[i][0], places[i][1]));
            CHECK_OK(amp_loader_next(l, &b));
            CHECK(b.epoch == places[i][0] && b.index == places[i][1]);
            CHECK_EQ(f.reads - reads, shuffle ? 0 : 1);
            CHECK_EQ(f.allocs, allocs);
        }
        amp_loader_destroy(l);
    }
    amp_close(a);
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Steady next: at most 20 us of the consumer's CPU with a batch ready, in the median. */
TEST(next_is_cheap) {
    enum { CALLS = 201 };
    double times[CALLS];
    amp_loader_desc d = big_desc(write_big("big.u16"));
    amp_loader *l;
    amp_batch b;
    int i;
    if (SLOW_BUILD) SKIP("times of this build mean nothing");
    d.workers = 2;
    l = opened(&d);
    for (i = 0; i < CALLS; i++) {
        double begin;
        CHECK(wait_until_ready(l, 1) >= 1);
        begin = cpu_seconds();
        CHECK_OK(amp_loader_next(l, &b));
        times[i] = cpu_seconds() - begin;
    }
    amp_loader_destroy(l);
    qsort(times, CALLS, sizeof *times, compare_doubles);
    CHECK_MSG(times[CALLS / 2] <= 20e-6, "%g us", 1e6 * times[CALLS / 2]);
}

/* Half a billion tokens per second of a worker's CPU: here the consumer is the worker. */
TEST(half_a_billion_tokens) {
    int seq, shuffle;
    if (SLOW_BUILD) SKIP("times of this build mean nothing");
    for (seq = 64; seq <= 1024; seq *= 16)
        for (shuffle = 0; shuffle < 2; shuffle++) {
            amp_loader_desc d = big_desc(write_big("big.u16"));
            amp_loader *l;
            amp_batch b;
            double best = 0;
            int round, i;
            d.seq = seq;
            d.batch = 32768 / seq;
            d.shuffle = shuffle;
            l = opened(&d);
            for (round = 0; round < 200 && best < 0.5e9; round++) {
                double begin = cpu_seconds();
                for (i = 0; i < 30; i++) CHECK_OK(amp_loader_next(l, &b));
                best = AMPI_MAX(best, 30 * 32768 / (cpu_seconds() - begin));
            }
            CHECK_MSG(best >= 0.5e9, "%d tokens, shuffle %d: %g tokens/s", seq, shuffle, best);
            amp_loader_destroy(l);
        }
}

TEST(timeout) {
    faults f;
    amp_context *a = faulty(&f);
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    amp_loader *l = NULL;
    amp_loader_info info;
    amp_state *state;
    amp_batch b;
    int64_t ids[8], begin;
    d.workers = 2; d.timeout_ms = 200;
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_OK(amp_loader_seek(l, 0, 14));            /* drops what is read ahead */
    CHECK_OK(amp_loader_next(l, &b));
    wait_ms(10);
    set_faults(&f, 8 * SEQ * 2, 0, 0, 0, 1);        /* blocks from the third batch on */
    CHECK_OK(amp_loader_seek(l, 0, 0));
    CHECK_OK(amp_loader_next(l, &b));
    CHECK_OK(amp_loader_next(l, &b));
    begin = ampi_os_clock(NULL);
    CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_TIMEOUT);
    CHECK(ampi_os_clock(NULL) - begin >= 200000000);
    CHECK_MSG(strstr(amp_last_error(), "worker ") != NULL && strstr(amp_last_error(), d.path) != NULL &&
                  strstr(amp_last_error(), "at offset 112") != NULL,
              "%s", amp_last_error());
    CHECK_ERR(amp_loader_seek(l, 0, 0), AMP_ERR_TIMEOUT);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_loader_save(l, state, "here"));
    CHECK_ERR(amp_loader_load(l, state, "here"), AMP_ERR_TIMEOUT);
    amp_state_destroy(state);
    CHECK_OK(amp_loader_info_get(l, &info));
    CHECK(info.epoch == 0 && info.index == 2);      /* stands where it stood */
    set_faults(&f, 0, 0, 0, 0, 0);
    for (ids[7] = 2; ids[7] < 20; ids[7]++) {
        CHECK_OK(amp_loader_next(l, &b));
        check_rows(&b, ids);
        CHECK_EQ(ids[0], ids[7] % 15 * 4);
    }
    CHECK_OK(amp_loader_info_get(l, &info));
    CHECK(info.waits > 0 && info.wait_seconds >= 0.06);
    amp_loader_destroy(l);
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

TEST(failing_memory) {
    static const char *const paths[] = {"shard_*.u16"};
    faults f;
    amp_context *a = faulty(&f);
    const char *arrays[2];
    int kind;
    amp_tensor tensors[6];
    for (kind = 0; kind < 5; kind++) {
        amp_loader_desc d = token_desc(in_folder(paths[0]));
        amp_loader *l;
        int64_t n, live = f.live;
        int told = 0;
        d.batch = 1;
        arrays[0] = in_folder("a0.npy");
        arrays[1] = in_folder("a1.npy");
        if (kind == 1) { d.path = NULL; d.arrays = arrays; d.n_arrays = 2; d.seq = 0; d.format = AMP_TOKENS_DEFAULT; }
        if (kind == 2) d.workers = 3;
        if (kind == 3) d.shuffle = 1;
        if (kind == 4) d = tensor_desc(tensors);
        for (n = 1; n < 100; n++) {
            amp_result r;
            amp_batch b;
            f.allocs = 0;
            f.fail_alloc = n;
            r = amp_loader_create(a, &l, &d);
            f.fail_alloc = 0;
            if (r == AMP_OK) {
                CHECK_OK(amp_loader_next(l, &b));
                amp_loader_destroy(l);
                break;
            }
            CHECK_EQ(r, AMP_ERR_MEMORY);
            told += strstr(amp_last_error(), ".cache_mb = 1024") != NULL;
            CHECK(l == NULL);
            if (n > 3) CHECK(f.live <= live + 4096);     /* the context may have grown its own tables */
        }
        CHECK(n > 8 && n < 100);
        CHECK_EQ(told, kind == 3);
    }
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

TEST(failing_threads) {
    faults f;
    amp_context *a = faulty(&f);
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    amp_loader *l;
    int n;
    d.workers = 4;
    for (n = 1; n <= 5; n++) {
        f.threads = 0;
        f.fail_thread = n;
        CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_THREAD);
        CHECK(l == NULL && strstr(amp_last_error(), n == 1 ? "open files" : "worker ") != NULL);
    }
    f.threads = 0;
    f.fail_thread = 6;
    CHECK_OK(amp_loader_create(a, &l, &d));
    amp_loader_destroy(l);
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

TEST(nothing_allocated_per_batch) {
    faults f;
    amp_context *a = faulty(&f);
    int w;
    for (w = 0; w < 4; w++) {
        amp_loader_desc d = token_desc(in_folder("tokens.u16"));
        amp_loader *l = NULL;
        amp_batch b;
        int64_t before;
        int i;
        d.workers = w < 2 ? AMP_NO_WORKERS : 2;
        d.shuffle = w % 2;
        f.threads = 0;
        CHECK_OK(amp_loader_create(a, &l, &d));
        before = f.allocs;
        for (i = 0; i < 500; i++) CHECK_OK(amp_loader_next(l, &b));
        CHECK_EQ(f.allocs, before);
        CHECK_EQ(b.epoch, 33);
        CHECK_EQ(f.threads, w < 2 ? 0 : 3);         /* one to open the files, then the same workers through all epochs */
        amp_loader_destroy(l);
    }
    amp_close(a);
    CHECK_EQ(f.live, 0);
}

static int count_entries(const char *path) {
    DIR *dir = opendir(path);
    int n = 0;
    if (dir == NULL) return -1;
    while (readdir(dir) != NULL) n++;
    closedir(dir);
    return n;
}

/* Closes in every state of the queue: at once, while workers start, with the ring full, in the middle, after the
   end, after an error; leaves no thread and no file. */
TEST(open_and_close) {
    int fds = count_entries("/proc/self/fd"), tasks = count_entries("/proc/self/task"), late = 0, i, k;
    int64_t begin;
    for (i = 0; i < 210; i++) {
        amp_loader_desc d = token_desc(in_folder("tokens.u16"));
        amp_loader *l;
        amp_batch b;
        d.workers = i % 7 == 6 ? AMP_NO_WORKERS : 1 + i % 4;
        d.prefetch = 1 + i % 3 * 4;
        d.shuffle = i % 2;
        d.epochs = 1;
        if (i % 5 == 4) d.vocab = 30;
        l = opened(&d);
        for (k = 0; k < i % 6 * 3; k++) (void)amp_loader_next(l, &b);
        if (i % 10 == 9) wait_ms(2);
        if (i % 11 == 10) CHECK_OK(amp_loader_seek(l, 0, 3));
        begin = ampi_os_clock(NULL);
        amp_loader_destroy(l);
        late += ampi_os_clock(NULL) - begin > 100000000;
    }
    CHECK_MSG(late < 105, "%d of 210 closes took more than 100 ms", late);     /* half, on a busy machine */
    if (fds < 0) SKIP("no /proc");
    CHECK_EQ(count_entries("/proc/self/fd"), fds);
    for (i = 0; i < 100 && count_entries("/proc/self/task") > tasks; i++)
        wait_ms(5); /* a joined thread may still be listed */
    CHECK_EQ(count_entries("/proc/self/task"), tasks);
}

/* A read that never returned in time: the loader times out, is destroyed within 100 ms all the same, and the worker
   that was left behind frees the rest when its read returns.  With the machine's own threads. */
static struct { pthread_mutex_t lock; pthread_cond_t go; int hang; } hung = {PTHREAD_MUTEX_INITIALIZER,
                                                                             PTHREAD_COND_INITIALIZER, 0};
static void set_hung(int hang) {
    pthread_mutex_lock(&hung.lock);
    hung.hang = hang;
    pthread_cond_broadcast(&hung.go);
    pthread_mutex_unlock(&hung.lock);
}
static int64_t hung_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    (void)user;
    pthread_mutex_lock(&hung.lock);
    while (hung.hang) pthread_cond_wait(&hung.go, &hung.lock);
    pthread_mutex_unlock(&hung.lock);
    return ampi_os_read(NULL, file, buffer, bytes, offset);
}

TEST(destroy_after_timeout) {
    int tasks = count_entries("/proc/self/task"), fds = count_entries("/proc/self/fd"), round, i;
    int64_t best = INT64_MAX, begin;
    for (round = 0; round < 3; round++) {
        amp_desc c;
        amp_context *a = NULL;
        amp_loader_desc d = token_desc(in_folder("tokens.u16"));
        amp_loader *l = NULL;
        amp_batch b;
        amp_result r;
        memset(&c, 0, sizeof c);
        c.system.file_read = hung_read;
        c.threads = 1;
        CHECK_OK(amp_open(&a, &c));
        d.timeout_ms = 20;
        d.workers = 1 + round;
        d.prefetch = 1;
        CHECK_OK(amp_loader_create(a, &l, &d));
        while ((r = amp_loader_next(l, &b)) == AMP_ERR_TIMEOUT) {}      /* a busy machine */
        CHECK_OK(r);
        set_hung(1);
        for (i = 0; i < 5 && amp_loader_next(l, &b) == AMP_OK; i++) {}
        CHECK_ERR(amp_loader_next(l, &b), AMP_ERR_TIMEOUT);
        begin = ampi_os_clock(NULL);
        amp_loader_destroy(l);
        best = AMPI_MIN(best, ampi_os_clock(NULL) - begin);
        amp_close(a);
        CHECK(tasks < 0 || count_entries("/proc/self/task") > tasks);
        set_hung(0);
        for (i = 0; i < 400 && count_entries("/proc/self/task") > tasks; i++) wait_ms(5);
        CHECK_EQ(count_entries("/proc/self/task"), tasks);
        CHECK_EQ(count_entries("/proc/self/fd"), fds);
    }
    CHECK_MSG(best < 100000000, "%g ms", 1e-6 * (double)best);
}

/* Closes while reads hang: within 100 ms, with the buffers gone, and the rest freed when the reads return. */
TEST(close_while_blocked) {
    int64_t best = INT64_MAX;
    int round, i;
    for (round = 0; round < 3; round++) {
        faults f;
        amp_context *a = faulty(&f);
        amp_loader_desc d = token_desc(in_folder("tokens.u16"));
        amp_loader *l = NULL;
        amp_batch b;
        int64_t begin;
        d.workers = 3; d.prefetch = 6; d.shuffle = round == 1;
        CHECK_OK(amp_loader_create(a, &l, &d));
        for (i = 0; i < round * 5; i++) CHECK_OK(amp_loader_next(l, &b));
        CHECK(wait_until_ready(l, 6) >= 6);
        set_faults(&f, 0, 0, 0, 0, 1);
        for (i = 0; i < 5; i++)
            CHECK_OK(amp_loader_next(l, &b)); /* were read ahead; the free slots draw the workers into reads */
        for (i = 0; i < 2000; i++) {
            int blocked;
            pthread_mutex_lock(&f.lock);
            blocked = f.blocked;
            pthread_mutex_unlock(&f.lock);
            if (blocked == 3) break;
            wait_ms(1);
        }
        CHECK_EQ(f.blocked, 3);
        begin = ampi_os_clock(NULL);
        amp_loader_destroy(l);
        begin = ampi_os_clock(NULL) - begin;
        best = AMPI_MIN(best, begin);
        amp_close(a);
        CHECK(f.live > (int64_t)sizeof(amp_loader));        /* what the workers use */
        set_faults(&f, 0, 0, 0, 0, 0);
        join_detached(&f, 3);
        CHECK_EQ(f.live, 0);
    }
    CHECK_MSG(best < 100000000, "%g ms", 1e-6 * (double)best);      /* the best of three, on a busy machine */
}

/* ---- A device that does everything as late as it may, or at random times: queues of operations per stream */

typedef struct lazy_event { int64_t recorded, done; struct lazy_stream *stream; } lazy_event;
typedef struct lazy_op {
    int kind;
    void *dst;
    const void *src;
    size_t bytes;                   /* OP_WIDEN: elements */
    lazy_event *event;
    int64_t number;
} lazy_op;
typedef struct lazy_stream { lazy_op ops[4096]; int begin, end; } lazy_stream;
enum { OP_COPY, OP_RECORD, OP_WAIT, OP_WIDEN };

static struct {
    amp_backend table;
    lazy_stream compute, copies;
    uint32_t seed;
    int eager, pinned, fail_copy, fail_cast, syncs;
    size_t sent;                    /* bytes to the device */
    char calls[4096];               /* one letter per call on the copy stream: c copy, w widen, R record, W wait */
} lazy;

static void lazy_step(lazy_stream *s) {
    lazy_op op = s->ops[s->begin++];
    if (op.kind == OP_COPY) memcpy(op.dst, op.src, op.bytes);
    for (size_t i = 0; i < op.bytes && op.kind == OP_WIDEN; i++) ((int32_t *)op.dst)[i] = ((const uint16_t *)op.src)[i];
    if (op.kind == OP_RECORD) op.event->done = op.number;
    if (op.kind == OP_WAIT) while (op.event->done < op.number) lazy_step(op.event->stream);
}
static void lazy_drain(lazy_stream *s) {
    while (s->begin < s->end) lazy_step(s);
    s->begin = s->end = 0;
}
/* Sometimes the device gets on by itself; with eager 3 at once. */
static void lazy_progress(void) {
    lazy_stream *s;
    int steps;
    if (lazy.eager == 3) {
        lazy_drain(&lazy.compute);
        lazy_drain(&lazy.copies);
        return;
    }
    lazy.seed = lazy.seed * 1664525u + 1013904223u;
    s = lazy.seed >> 30 & 1 ? &lazy.compute : &lazy.copies;
    steps = lazy.eager == 2 ? 1000 : lazy.eager == 1 ? (int)(lazy.seed >> 20) % 4 : 0;
    while (steps-- > 0 && s->begin < s->end) lazy_step(s);
}
static void lazy_push(void *stream, int kind, void *dst, const void *src, size_t bytes, lazy_event *event,
                      int64_t number) {
    lazy_stream *s = stream ? (lazy_stream *)stream : &lazy.compute;
    lazy_op *op = &s->ops[s->end++];
    size_t calls = strlen(lazy.calls);
    if (s == &lazy.copies && calls + 1 < sizeof lazy.calls) lazy.calls[calls] = "cRWw"[kind];
    op->kind = kind; op->dst = dst; op->src = src; op->bytes = bytes; op->event = event; op->number = number;
    lazy_progress();
}
static amp_result lazy_copy(void *dev, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream) {
    (void)dev;
    if (lazy.fail_copy > 0 && --lazy.fail_copy == 0) return AMP_ERR_DEVICE;
    lazy.sent += kind == AMP_COPY_TO_DEVICE ? bytes : 0;
    lazy_push(stream, OP_COPY, dst, src, bytes, NULL, 0);
    return AMP_OK;
}
static amp_result lazy_cast(void *dev, const amp_k_cast *args, void *stream) {
    (void)dev;
    if (lazy.fail_cast > 0 && --lazy.fail_cast == 0) return AMP_ERR_DEVICE;
    CHECK(args->src_dtype == AMP_U16 && args->dst_dtype == AMP_I32);
    lazy_push(stream, OP_WIDEN, args->dst, args->src, (size_t)args->n, NULL, 0);
    return AMP_OK;
}
static amp_result lazy_alloc_pinned(void *dev, void **ptr, size_t bytes) {
    (void)dev;
    lazy.pinned++;
    *ptr = malloc(bytes);
    return AMP_OK;
}
static void lazy_free_pinned(void *dev, void *ptr, size_t bytes) { (void)dev; (void)bytes; lazy.pinned--; free(ptr); }
static amp_result lazy_stream_create(void *dev, void **stream) { (void)dev; *stream = &lazy.copies; return AMP_OK; }
static void lazy_stream_destroy(void *dev, void *stream) { (void)dev; lazy_drain((lazy_stream *)stream); }
static amp_result lazy_stream_sync(void *dev, void *stream) {
    (void)dev;
    lazy.syncs++;
    lazy_drain(stream ? (lazy_stream *)stream : &lazy.compute);
    return AMP_OK;
}
static amp_result lazy_event_create(void *dev, void **event, int32_t timed) {
    (void)dev; (void)timed;
    *event = calloc(1, sizeof(lazy_event));
    return AMP_OK;
}
static void lazy_event_destroy(void *dev, void *event) { (void)dev; free(event); }
static amp_result lazy_event_record(void *dev, void *event, void *stream) {
    lazy_event *e = (lazy_event *)event;
    (void)dev;
    e->stream = stream ? (lazy_stream *)stream : &lazy.compute;
    e->recorded++;
    lazy_push(stream, OP_RECORD, NULL, NULL, 0, e, e->recorded);
    return AMP_OK;
}
static amp_result lazy_event_wait(void *dev, void *event, void *stream) {
    (void)dev;
    lazy_push(stream, OP_WAIT, NULL, NULL, 0, (lazy_event *)event, ((lazy_event *)event)->recorded);
    return AMP_OK;
}
static amp_result lazy_event_done(void *dev, void *event, int32_t *done) {
    (void)dev;
    lazy_progress();
    *done = ((lazy_event *)event)->done == ((lazy_event *)event)->recorded;
    return AMP_OK;
}
static amp_result lazy_event_sync(void *dev, void *event) {
    lazy_event *e = (lazy_event *)event;
    (void)dev;
    lazy.syncs++;
    while (e->done < e->recorded) lazy_step(e->stream);
    return AMP_OK;
}

static amp_context *lazy_open(int eager) {
    amp_desc d;
    amp_context *a = NULL;
    memset(&lazy, 0, sizeof lazy);
    lazy.table = *amp_cpu();
    lazy.table.host_visible = 0;
    lazy.table.copy = lazy_copy;
    lazy.table.cast = lazy_cast;
    lazy.table.alloc_pinned = lazy_alloc_pinned; lazy.table.free_pinned = lazy_free_pinned;
    lazy.table.stream_create = lazy_stream_create;
    lazy.table.stream_destroy = lazy_stream_destroy;
    lazy.table.stream_sync = lazy_stream_sync;
    lazy.table.event_create = lazy_event_create;
    lazy.table.event_destroy = lazy_event_destroy;
    lazy.table.event_record = lazy_event_record;
    lazy.table.event_wait = lazy_event_wait;
    lazy.table.event_done = lazy_event_done;
    lazy.table.event_sync = lazy_event_sync;
    lazy.eager = eager;
    memset(&d, 0, sizeof d);
    d.backend = &lazy.table;
    d.threads = 1;
    CHECK_OK(amp_open(&a, &d));
    return a;
}

/* What the caller's kernels see, when they run at last, is the batch they were queued for. */
static void check_device(const amp_loader_desc *desc, int eager, int workers, int prefetch, int disable_pinned) {
    enum { BATCHES = 64 };
    static int32_t seen[BATCHES][2][4 * SEQ];
    static int64_t expected[BATCHES * 5];
    amp_loader_desc d = *desc;
    amp_context *a = lazy_open(eager);
    amp_loader *l;
    int i, j, k;
    d.shuffle = 1;
    l = opened(&d);
    data_take(l, BATCHES, expected, BATCHES * 5);
    amp_loader_destroy(l);
    d.workers = workers; d.prefetch = prefetch; d.disable_pinned = disable_pinned;
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_EQ(lazy.pinned, !disable_pinned);
    for (i = 0; i < BATCHES; i++) {
        amp_batch b;
        if (i == 20) CHECK_OK(amp_loader_seek(l, 3, 3));
        if (i == 21) CHECK_OK(amp_loader_seek(l, 1, 6));
        if (i == 30) lazy.fail_copy = 1 + workers % 2;
        if (i == 31) lazy.fail_cast = 1;
        while (amp_loader_next(l, &b) == AMP_ERR_DEVICE) CHECK(i >= 30 && i <= 33);
        CHECK(b.valid == 4 && b.batch == 4 && (i == 20 || b.epoch * 15 + b.index == i));
        lazy_push(NULL, OP_COPY, seen[i][0], b.inputs, sizeof seen[i][0], NULL, 0);
        lazy_push(NULL, OP_COPY, seen[i][1], b.targets, sizeof seen[i][1], NULL, 0);
        if (i % 16 == 15) wait_ms(1);
    }
    lazy_drain(&lazy.compute);
    amp_loader_destroy(l);
    amp_close(a);
    CHECK_EQ(lazy.pinned, 0);
    CHECK_EQ(strchr(lazy.calls, 'w') != NULL, desc->format == AMP_TOKENS_U16 || desc->vocab == 65536);
    for (i = 0; i < BATCHES; i++)
        for (j = 0; j < 4; j++)
            for (k = 0; k < SEQ; k++) {
                int64_t want = expected[(i == 20 ? 48 : i) * 5 + j] * SEQ + k;
                CHECK_EQ(seen[i][0][j * SEQ + k], want);
                CHECK_EQ(seen[i][1][j * SEQ + k], want + 1);
            }
}

TEST(device_copies) {
    static int32_t tokens[N_TOKENS];
    char shape[16];
    amp_loader_desc narrow = token_desc(in_folder("tokens.u16")), wide, memory;
    amp_tensor views[2] = {amp_tensor2(tokens, AMP_I32, (N_TOKENS - 1) / SEQ, SEQ),
                           amp_tensor2(tokens + 1, AMP_I32, (N_TOKENS - 1) / SEQ, SEQ)};
    int eager, workers, i;
    for (i = 0; i < N_TOKENS; i++) tokens[i] = i;
    snprintf(shape, sizeof shape, "(%d,)", (int)N_TOKENS);
    wide = token_desc(write_npy("device.npy", "<i4", shape, tokens, sizeof tokens));
    wide.format = AMP_TOKENS_NPY;
    memset(&memory, 0, sizeof memory);
    memory.tensors = views; memory.n_tensors = 2; memory.batch = wide.batch;
    for (eager = 0; eager < 3; eager++)
        for (workers = -1; workers < 4; workers++) {
            if (workers == 0) continue;
            check_device(&narrow, eager, workers, 1, 0);
            check_device(&narrow, eager, workers, 4, 1);
            wide.vocab = workers == 2 ? 65536 : 65537;
            check_device(&wide, eager, workers, 2, 0);
            check_device(&memory, eager, workers, 3, 0);
        }
}

static amp_result on_device(void *dev, const void *ptr, amp_memory_kind *out) {
    (void)dev; (void)ptr;
    *out = AMP_MEMORY_DEVICE;
    return AMP_OK;
}
TEST(tensors_of_the_device) {
    amp_tensor tensors[6];
    amp_loader_desc d = tensor_desc(tensors);
    amp_context *a = lazy_open(0);
    amp_loader *l = NULL;
    lazy.table.memory_kind = on_device;
    CHECK_ERR(amp_loader_create(a, &l, &d), AMP_ERR_CONFLICT);
    CHECK(l == NULL && strstr(amp_last_error(), ".tensors[0] is in device memory") != NULL);
    amp_close(a);
    CHECK_EQ(lazy.pinned, 0);
}

/* The kernel that widens them, as the CPU has it. */
TEST(cast_of_tokens) {
    static uint16_t tokens[65537];
    static int32_t wide[65537];
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(amp, &dev, &stream);
    amp_k_cast cast;
    int32_t i;
    for (i = 0; i < 65536; i++) tokens[i + 1] = (uint16_t)i;
    memset(&cast, 0, sizeof cast);
    cast.dst = wide; cast.src = tokens + 1;
    cast.dst_dtype = AMP_I32; cast.src_dtype = AMP_U16;
    cast.n = 65536;
    wide[65536] = -5;
    CHECK_OK(backend->cast(dev, &cast, stream));
    for (i = 0; i < 65536; i++) CHECK(wide[i] == i);
    CHECK_EQ(wide[65536], -5);
}

/* A device that keeps up: no call of the host waits; each batch is one wait for its slot, one copy in 16 bits, one
   widening and one event; the padding's targets take a copy more. */
TEST(device_calls) {
    amp_loader_desc d = token_desc(in_folder("tokens.u16"));
    amp_context *a = lazy_open(3);
    amp_loader *l = NULL;
    char expected[256] = "";
    int64_t ids[2 * 9];
    int i, wide;
    for (wide = 0; wide < 2; wide++) {
        size_t bytes = wide ? 4 : 2;
        d = token_desc(wide ? in_folder("device.npy") : in_folder("tokens.u16"));
        d.format = wide ? AMP_TOKENS_NPY : AMP_TOKENS_U16;
        d.batch = 8;
        d.last_batch = AMP_LAST_PAD;
        CHECK_OK(amp_loader_create(a, &l, &d));
        memset(lazy.calls, 0, sizeof lazy.calls);
        lazy.syncs = 0;
        lazy.sent = 0;
        for (i = 0; i < 16; i++) {
            amp_batch b;
            CHECK_OK(amp_loader_next(l, &b));
            CHECK_EQ(b.valid, i % 8 == 7 ? 4 : 8);
            check_rows(&b, ids);
            CHECK_EQ(ids[0], i % 8 * 8);
        }
        CHECK_EQ(lazy.syncs, 0);
        strcpy(expected, wide ? "WcR" : "WcwR");
        for (i = 1; i < 16; i++) strcat(expected, wide ? "WcR" : i % 8 == 7 ? "WcwcR" : "WcwR");
        CHECK_MSG(strcmp(lazy.calls, expected) == 0, "%s, not %s", lazy.calls, expected);
        CHECK_EQ(lazy.sent, 16 * 2 * ((8 * SEQ * bytes + 255) / 256 * 256) + (wide ? 0 : 2 * 4 * SEQ * 4));
        amp_loader_destroy(l);
    }
    amp_close(a);
    CHECK_EQ(lazy.pinned, 0);
}

/* world 0 takes rank and world from the context's reducer. */
static int no_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    (void)user; (void)data; (void)count; (void)dtype; (void)op; (void)stream;
    return 0;
}

TEST(ranks_of_the_context) {
    amp_desc c;
    amp_context *a = NULL;
    amp_loader_desc d = token_desc(in_folder("tokens.u16")), effective;
    amp_loader *l = NULL;
    amp_batch b;
    int64_t ids[8];
    memset(&c, 0, sizeof c);
    memset(&effective, 0, sizeof effective);
    c.reducer.reduce = no_reduce; c.reducer.rank = 2; c.reducer.world = 3;
    CHECK_OK(amp_open(&a, &c));
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_OK(amp_loader_next(l, &b));
    check_rows(&b, ids);
    CHECK_EQ(ids[0], 8);
    CHECK_OK(amp_loader_query(l, &effective));
    CHECK(effective.rank == 2 && effective.world == 3);
    amp_loader_destroy(l);
    d.world = 1;
    CHECK_OK(amp_loader_create(a, &l, &d));
    CHECK_OK(amp_loader_next(l, &b));
    check_rows(&b, ids);
    CHECK_EQ(ids[0], 0);
    amp_loader_destroy(l);
    amp_close(a);
}

static void remove_folder(void) {
    DIR *dir = opendir(folder);
    struct dirent *entry;
    while (dir != NULL && (entry = readdir(dir)) != NULL)
        if (entry->d_name[0] != '.') remove(in_folder(entry->d_name));
    if (dir) closedir(dir);
    rmdir(folder);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    snprintf(folder, sizeof folder, "/tmp/ampt_data_%ld", (long)getpid());
    if (mkdir(folder, 0777) != 0 || amp_open(&amp, NULL) != AMP_OK) {
        printf("no folder or no context: %s\n", amp_last_error());
        return 1;
    }
    write_u16("tokens.u16", 0, N_TOKENS);
    RUN(order_is_a_bijection);
    RUN(order_is_random);
    RUN(order_never_changes);
    RUN(each_sample_once);
    RUN(epochs_that_come_out_even); RUN(empty_last_batch);
    RUN(shuffle);
    RUN(resume_at_every_position);
    RUN(resume_in_place);
    RUN(resume_in_another_world);
    RUN(state_counts_what_was_consumed);
    RUN(resume_refuses_what_differs);
    RUN(seek_and_end);
    RUN(token_range);
    RUN(token_formats);
    RUN(impossible_tokens); RUN(tokens_at_the_vocabulary);
    RUN(several_files);
    RUN(patterns);
    RUN(patterns_of_the_system);
    RUN(arrays);
    RUN(bad_arrays);
    RUN(tensors); RUN(tensors_resume); RUN(tensors_cast); RUN(bad_tensors);
    RUN(callback);
    RUN(callback_leaves_by_longjmp);
    RUN(callback_destroys_its_loader);
    RUN(callback_errors);
    RUN(callback_stops_its_loader);
    RUN(bad_settings);
    RUN(bad_files);
    RUN(beyond_4_gib);
    RUN(opening_that_hangs); RUN(failing_reads);
    RUN(truncated_meanwhile);
    RUN(cached_samples);
    RUN(cache_beside_bad_places);
    RUN(cached_file_is_cut_inside_a_batch); RUN(cached_file_changes);
    RUN(rows_of_16_bit_tokens);
    RUN(defaults);
    RUN(resume_costs_the_same_everywhere);
    RUN(next_is_cheap);
    RUN(half_a_billion_tokens);
    RUN(timeout);
    RUN(failing_memory);
    RUN(failing_threads);
    RUN(nothing_allocated_per_batch);
    RUN(open_and_close);
    RUN(destroy_after_timeout);
    RUN(close_while_blocked);
    RUN(device_copies); RUN(tensors_of_the_device);
    RUN(cast_of_tokens);
    RUN(device_calls);
    RUN(ranks_of_the_context);
    amp_close(amp);
    remove_folder();
    return TEST_END();
}
