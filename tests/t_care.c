/* Advice, tuning and recovery: what is chosen and why, what is timed in which order, and that a training that was
 * restored goes on bit for bit as one that began there.
 *
 *     gcc -O2 -fopenmp tests/t_care.c -o t_care -lm -lpthread && ./t_care      (from the project root) */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "recording_backend.h"
#include "golden.h"

/* ---- A host whose clock, memory and log are watched */

static struct {
    int64_t now;                    /* nanoseconds */
    int64_t blocks;                 /* of memory that are out */
    int fail_alloc;                 /* n: the n-th allocation from now fails */
    int warnings;
    char last[512];                 /* of them */
} host;

static int64_t host_clock(void *user) { (void)user; return host.now; }
static void *host_alloc(void *user, size_t size, size_t align) {
    void *p = NULL;
    (void)user;
    if (host.fail_alloc > 0 && --host.fail_alloc == 0) return NULL;
    if (posix_memalign(&p, align < sizeof p ? sizeof p : align, size) != 0) return NULL;
    host.blocks++;
    return p;
}
static void host_free(void *user, void *p, size_t size) { (void)user; (void)size; host.blocks -= p != NULL; free(p); }
static void host_log(void *user, amp_log_level level, int id, const char *text) {
    (void)user;
    host.warnings += level == AMP_LOG_WARNING;
    snprintf(host.last, sizeof host.last, "%d %s", id, text);
}

static amp_desc host_desc(const amp_backend *backend, amp_dtype dtype) {
    amp_desc d;
    memset(&d, 0, sizeof d);
    memset(&host, 0, sizeof host);
    d.backend = backend;
    d.dtype = dtype;
    d.threads = 1;
    d.system.alloc = host_alloc;
    d.system.free = host_free;
    d.system.clock_ns = host_clock;
    d.logger.write = host_log;
    return d;
}

static amp_context *open_host(const amp_backend *backend, amp_dtype dtype) {
    amp_desc d = host_desc(backend, dtype);
    amp_context *amp = NULL;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

/* A device of 1 GiB with every format, or what `features` leaves of it. */
static int lacks_bf16, lacks_fp16;
static int64_t device_bytes;
static amp_result device_describe(void *dev, amp_device *out) {
    amp_result result = recording_describe(dev, out);
    out->bf16 = !lacks_bf16;
    out->fp16 = !lacks_fp16;
    out->cc_major = lacks_bf16 ? 7 : 9;
    return result;
}
static amp_result device_memory(void *dev, amp_memory_info *out) { (void)dev; out->device_total = device_bytes; return AMP_OK; }
static const amp_backend *device(void) {
    static amp_backend table;
    table = *recording_backend();
    table.describe = device_describe;
    table.memory = device_memory;
    lacks_bf16 = lacks_fp16 = 0;
    device_bytes = (int64_t)1 << 30;
    return &table;
}

static const char *scratch_file(void) {
    static char path[256];
    snprintf(path, sizeof path, "%s/amp_t_care_%ld", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    return path;
}

/* ---- Tuning: a step that takes the time it is told to */

typedef struct timed {
    int64_t cost[12];               /* nanoseconds of a step, by dtype */
    int64_t drift;                  /* added to each step's, times its number */
    int64_t batch, room;            /* the most that prepare makes ready */
    int64_t room_of[12];            /* the most a dtype's step has memory for; 0: any */
    amp_dtype broken;               /* fails */
    int steps, prepared[40], n_prepared;
    char order[400];                /* a letter for each step, P for prepare */
} timed;

static int timed_step(void *user, amp_context *amp) {
    timed *t = (timed *)user;
    amp_dtype dtype = ampi_settings(amp)->dtype;
    size_t n = strlen(t->order);
    if (n + 1 < sizeof t->order) t->order[n] = dtype == AMP_F32 ? 's' : dtype == AMP_TF32 ? 't' : dtype == AMP_F16 ? 'h' : 'b';
    host.now += t->cost[dtype] * (t->batch ? t->batch : 1) + t->drift * t->steps++;
    if (dtype == t->broken) return 77;
    return t->room_of[dtype] && t->batch > t->room_of[dtype] ? AMP_ERR_MEMORY : 0;
}

static int timed_prepare(void *user, amp_context *amp, int64_t batch) {
    timed *t = (timed *)user;
    size_t n = strlen(t->order);
    (void)amp;
    if (n + 1 < sizeof t->order) t->order[n] = 'P';
    t->prepared[t->n_prepared++] = (int)batch;
    t->batch = batch;
    return t->room && batch > t->room ? AMP_ERR_MEMORY : 0;
}

static amp_tune_desc tune_desc(timed *t) {
    amp_tune_desc d;
    memset(&d, 0, sizeof d);
    memset(t, 0, sizeof *t);
    t->cost[AMP_F32] = 8000; t->cost[AMP_TF32] = 4000; t->cost[AMP_F16] = 2000; t->cost[AMP_BF16] = 2500;
    d.step = timed_step;
    d.user = t;
    d.iterations = 4;
    d.warmup = 2;
    return d;
}

static int close_to(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); }

/* The drift makes step k of the run take k more: the median of the four timed ones lies between the middle two. */
TEST(tune_takes_medians_and_the_highest_rate) {
    amp_context *amp = open_host(device(), AMP_BF16);
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    t.drift = 2;
    d.batch = 3;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK(strcmp(t.order, "sssssstttttthhhhhhbbbbbb") == 0);
    CHECK_EQ(r.n_rows, 4);
    CHECK_EQ(r.best, 2);
    CHECK_EQ(r.from_file, 0);
    CHECK(r.rows[0].dtype == AMP_F32 && r.rows[1].dtype == AMP_TF32 && r.rows[2].dtype == AMP_F16 && r.rows[3].dtype == AMP_BF16);
    CHECK(close_to(r.rows[0].seconds, 1e-9 * (8000 + 2 * 3.5)));
    CHECK(close_to(r.rows[2].seconds, 1e-9 * (2000 + 2 * 15.5)));
    CHECK(close_to(r.rows[2].rate, 3 / r.rows[2].seconds));
    CHECK(close_to(r.rows[2].speedup, r.rows[0].seconds / r.rows[2].seconds));
    CHECK(close_to(r.rows[0].speedup, 1));
    CHECK(ampi_settings(amp)->dtype == AMP_BF16);
    amp_close(amp);
    CHECK_EQ(host.blocks, 0);
}

/* An odd number has a middle; outliers do not move it. */
static int outlier_step(void *user, amp_context *amp) {
    static const int64_t cost[8] = {900, 5, 9, 1000000, 7, 6, 0, 0};
    (void)amp;
    host.now += cost[*(int *)user % 6];
    ++*(int *)user;
    return 0;
}

TEST(tune_ignores_outliers) {
    static const amp_dtype dtypes[] = {AMP_F32};
    amp_context *amp = open_host(NULL, AMP_F32);
    amp_tune_report r;
    amp_tune_desc d;
    int step = 0;
    memset(&d, 0, sizeof d);
    d.step = outlier_step;
    d.user = &step;
    d.dtypes = dtypes;
    d.n_dtypes = 1;
    d.iterations = 5;
    d.warmup = 1;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_EQ(r.n_rows, 1);
    CHECK(close_to(r.rows[0].seconds, 7e-9));
    amp_close(amp);
}

/* Precisions take turns of five; each turn begins with a step that is not timed. */
TEST(tune_alternates) {
    static const amp_dtype dtypes[] = {AMP_F16, AMP_F32};
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    d.dtypes = dtypes;
    d.n_dtypes = 2;
    d.iterations = 12;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_MSG(strcmp(t.order, "hhhhhhhsssssss" "hhhhhhssssss" "hhhsss") == 0, "%s", t.order);
    CHECK_EQ(r.best, 0);
    amp_close(amp);
}

TEST(tune_breaks_ties_by_order) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    t.cost[AMP_F16] = t.cost[AMP_BF16] = t.cost[AMP_TF32] = 4096;
    d.prepare = timed_prepare;
    d.max_batch = 4;
    CHECK_OK(amp_tune(amp, &d, &r));        /* time in proportion to the batch: every rate but fp32's is the same */
    CHECK_EQ(r.n_rows, 12);
    CHECK_EQ(r.best, 1);
    amp_close(amp);
}

TEST(tune_doubles_the_batch_until_memory_ends) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    int64_t i;
    d.prepare = timed_prepare;
    d.batch = 2;
    d.max_batch = 1000;
    t.room = 8;
    t.room_of[AMP_F32] = 4;                 /* which ends it for fp32 alone */
    t.broken = AMP_TF32;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_EQ(t.n_prepared, 5);              /* 2, 4, 8, 16 does not fit, and the best once more */
    for (i = 0; i < 4; i++) CHECK_EQ(t.prepared[i], 2 << i);
    CHECK_EQ(t.prepared[4], 2);             /* the same rate at every batch: the first */
    CHECK_EQ(r.n_rows, 4 + 3 + 3 + 2);
    CHECK(r.rows[1].dtype == AMP_TF32 && r.rows[1].verdict == AMP_VERDICT_FAILED && strstr(r.rows[1].reason, "77") != NULL);
    CHECK(r.rows[4].dtype == AMP_F32 && r.rows[4].verdict == AMP_VERDICT_PASS && r.rows[4].batch == 4);
    CHECK(r.rows[7].dtype == AMP_F32 && r.rows[7].verdict == AMP_VERDICT_FAILED && strstr(r.rows[7].reason, "out of memory") != NULL);
    CHECK(r.rows[8].dtype == AMP_F16 && r.rows[8].verdict == AMP_VERDICT_PASS && r.rows[8].batch == 8 && r.rows[8].speedup == 0);
    for (i = 10; i < 12; i++) CHECK(r.rows[i].verdict == AMP_VERDICT_FAILED && r.rows[i].batch == 16 && strstr(r.rows[i].reason, "prepare") != NULL);
    CHECK_EQ(r.best, 2);
    amp_close(amp);
}

TEST(tune_stops_at_the_largest_batch_and_at_full_tables) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    d.prepare = timed_prepare;
    d.batch = 3;
    d.max_batch = 23;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_EQ(r.n_rows, 12);
    CHECK_EQ(r.rows[11].batch, 12);
    d = tune_desc(&t);
    d.prepare = timed_prepare;
    d.max_batch = INT64_MAX;
    d.iterations = d.warmup = 1;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_EQ(r.n_rows, AMP_TUNE_ROWS);
    CHECK_EQ(r.rows[AMP_TUNE_ROWS - 1].batch, 1 << 15);
    amp_close(amp);
}

TEST(tune_reports_when_nothing_works) {
    amp_context *amp = open_host(device(), AMP_F32);
    char text[4096];
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    d.prepare = timed_prepare;
    d.batch = 9;
    t.room = 4;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_EQ(r.best, -1);
    CHECK_EQ(r.n_rows, 4);
    CHECK_EQ(amp_tune_text(&r, text, sizeof text), strlen(text));
    CHECK(strstr(text, "failed: prepare returned 301: out of memory") != NULL && strchr(text, '*') == NULL);
    CHECK_EQ(amp_tune_text(&r, NULL, 0), strlen(text));
    CHECK_EQ(amp_tune_text(&r, text, 20), amp_tune_text(&r, NULL, 0));
    CHECK_EQ(strlen(text), 19);
    amp_close(amp);
}

/* What the device lacks is a row, also where the context may fall back. */
TEST(tune_has_a_row_for_what_the_device_lacks) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16};
    const amp_backend *backend = device();
    amp_desc desc = host_desc(backend, AMP_F32);
    amp_context *amp;
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    lacks_bf16 = 1;
    desc.allow_fallback = 1;
    CHECK_OK(amp_open(&amp, &desc));
    d.dtypes = dtypes;
    d.n_dtypes = 2;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK(r.rows[1].verdict == AMP_VERDICT_FAILED && strstr(r.rows[1].reason, "bf16") != NULL);
    CHECK(strcmp(t.order, "ssssss") == 0);
    CHECK_EQ(r.best, 0);
    d.dtypes = NULL;
    d.n_dtypes = 0;
    CHECK_OK(amp_tune(amp, &d, &r));        /* by default only what it has */
    CHECK_EQ(r.n_rows, 3);
    amp_close(amp);
}

/* The peak is that of the dtype's own steps. */
static void *tune_memory[2];
static int hungry_step(void *user, amp_context *amp) {
    amp_dtype dtype = ampi_settings(amp)->dtype;
    void *p = NULL;
    if (amp_alloc(amp, &p, dtype == AMP_F32 ? 40000 : dtype == AMP_F16 ? 30000 : 10000) != AMP_OK) return AMP_ERR_MEMORY;
    amp_free(amp, p);
    return timed_step(user, amp);
}

TEST(tune_measures_memory) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    CHECK_OK(amp_alloc(amp, &tune_memory[0], 1000));
    d.step = hungry_step;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_EQ(r.rows[0].peak, 41000);
    CHECK_EQ(r.rows[1].peak, 11000);
    CHECK_EQ(r.rows[2].peak, 31000);
    CHECK_EQ(r.rows[3].peak, 11000);
    amp_free(amp, tune_memory[0]);
    amp_close(amp);
}

static int same_rows(const amp_tune_report *a, const amp_tune_report *b) {
    return a->n_rows == b->n_rows && a->best == b->best && memcmp(a->rows, b->rows, sizeof a->rows) == 0;
}

TEST(tune_keeps_results_in_a_file) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r, again;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    const char *path = scratch_file();
    remove(path);
    d.file = path;
    d.model = "one";
    d.prepare = timed_prepare;
    d.max_batch = 2;
    t.broken = AMP_TF32;
    t.cost[AMP_F16] = 2001;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_EQ(host.warnings, 0);
    t.steps = t.n_prepared = 0;
    CHECK_OK(amp_tune(amp, &d, &again));
    CHECK(again.from_file == 1 && same_rows(&r, &again));
    CHECK_EQ(t.steps, 0);
    CHECK(t.n_prepared == 1 && t.prepared[0] == r.rows[r.best].batch);
    d.model = "two";                        /* is timed, beside the first */
    CHECK_OK(amp_tune(amp, &d, &again));
    CHECK(again.from_file == 0 && t.steps > 0);
    d.model = "one";
    CHECK_OK(amp_tune(amp, &d, &again));
    CHECK(again.from_file == 1 && same_rows(&r, &again));
    d.iterations = 5;
    CHECK_OK(amp_tune(amp, &d, &again));
    CHECK_EQ(again.from_file, 0);
    d.iterations = 4;
    amp_close(amp);
    lacks_bf16 = 1;                         /* another machine */
    { amp_desc desc = host_desc(device(), AMP_F32); lacks_bf16 = 1; CHECK_OK(amp_open(&amp, &desc)); }
    CHECK_OK(amp_tune(amp, &d, &again));
    CHECK_EQ(again.from_file, 0);
    amp_close(amp);
    CHECK_EQ(host.blocks, 0);
    remove(path);
}

/* Every bit of the file that is flipped leads to the same rows, from the file or anew. */
TEST(tune_survives_damaged_files) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r, again;
    const char *path = scratch_file();
    uint8_t *data, *copy;
    size_t bytes, i;
    void *memory;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    remove(path);
    d.file = path;
    d.iterations = d.warmup = 1;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_OK(amp_file_read_all(NULL, path, &memory, &bytes));
    data = (uint8_t *)memory;
    copy = (uint8_t *)malloc(bytes);
    for (i = 8; i < bytes; i += i < 400 ? 1 : 37) {
        memcpy(copy, data, bytes);
        copy[i] ^= (uint8_t)(1 << (i % 8));
        CHECK_OK(amp_file_write_atomic(NULL, path, copy, bytes));
        host.warnings = 0;
        CHECK_OK(amp_tune(amp, &d, &again));
        CHECK_MSG(again.from_file == 0 && host.warnings == 1 && same_rows(&r, &again), "byte %zu: %s", i, host.last);
        CHECK_OK(amp_tune(amp, &d, &again));
        CHECK(again.from_file == 1);        /* it was written again */
    }
    for (i = 0; i < bytes; i += 97) {       /* cut short */
        CHECK_OK(amp_file_write_atomic(NULL, path, data, i));
        CHECK_OK(amp_tune(amp, &d, &again));
        CHECK(again.from_file == 0 && same_rows(&r, &again));
    }
    free(copy);
    amp_file_free(NULL, memory, bytes);
    amp_close(amp);
    remove(path);
}

/* Records that are whole and impossible. */
TEST(tune_refuses_impossible_rows) {
    static const double bad[][2] = {{0, 99}, {0, NAN}, {1, 0}, {1, 7}, {2, 0}, {3, -1}, {4, INFINITY}, {5, -2}, {6, 1e300}};
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r, again;
    const char *path = scratch_file();
    double numbers[4 * AMPI_TUNE_NUMBERS];
    char key[64];
    amp_state *state;
    timed t;
    size_t i;
    amp_tune_desc d = tune_desc(&t);
    remove(path);
    d.file = path;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_OK(amp_state_load(&state, NULL, path));
    snprintf(key, sizeof key, "%s", amp_state_key(state, 0));
    CHECK_OK(amp_state_get(state, key, AMP_F64, numbers, 4 * AMPI_TUNE_NUMBERS));
    for (i = 0; i < sizeof bad / sizeof bad[0] + 2; i++) {
        double changed[4 * AMPI_TUNE_NUMBERS];
        memcpy(changed, numbers, sizeof numbers);
        if (i < sizeof bad / sizeof bad[0]) changed[AMPI_TUNE_NUMBERS + (int)bad[i][0]] = bad[i][1];
        if (i < sizeof bad / sizeof bad[0] + 1) CHECK_OK(amp_state_put(state, key, AMP_F64, changed, i < sizeof bad / sizeof bad[0] ? 4 * AMPI_TUNE_NUMBERS : 3));
        else CHECK_OK(amp_state_put(state, key, AMP_F64, changed, 3 * AMPI_TUNE_NUMBERS));      /* not as many as texts */
        CHECK_OK(amp_state_save(state, path));
        host.warnings = 0;
        CHECK_OK(amp_tune(amp, &d, &again));
        CHECK_MSG(again.from_file == 0 && host.warnings == 1 && same_rows(&r, &again), "case %zu", i);
    }
    amp_state_destroy(state);
    amp_close(amp);
    remove(path);
}

TEST(tune_leaves_foreign_files_alone) {
    static const char letter[] = "Dear diary, this is no file of tuned results.";
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r;
    const char *path = scratch_file();
    size_t bytes;
    void *data;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    d.file = path;
    CHECK_OK(amp_file_write_atomic(NULL, path, letter, sizeof letter));
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK(r.best == 2 && host.warnings == 1 && strstr(host.last, "left alone") != NULL);
    CHECK_OK(amp_file_read_all(NULL, path, &data, &bytes));
    CHECK(bytes == sizeof letter && memcmp(data, letter, bytes) == 0);
    amp_file_free(NULL, data, bytes);
    remove(path);
    d.file = "/nowhere/at/all/tune";
    CHECK_ERR(amp_tune(amp, &d, &r), AMP_ERR_WRITE);
    CHECK(r.best == 2 && r.n_rows == 4 && strstr(amp_last_error(), "the results are there") != NULL);
    CHECK(ampi_settings(amp)->dtype == AMP_F32);
    amp_close(amp);
}

TEST(tune_refuses_bad_input) {
    static const amp_dtype wrong[] = {AMP_F32, AMP_F64}, twice[] = {AMP_F16, AMP_F32, AMP_F16};
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r, untouched;
    timed t;
    amp_tune_desc good = tune_desc(&t), d;
    memset(&r, 0x5a, sizeof r);
    memcpy(&untouched, &r, sizeof r);
#define REFUSED(change, result, field) do { d = good; change; CHECK_ERR(amp_tune(amp, &d, &r), result); CHECK(strstr(amp_last_error(), field) != NULL); } while (0)
    REFUSED(d.step = NULL, AMP_ERR_NULL, ".step");
    REFUSED(d.n_dtypes = -1, AMP_ERR_RANGE, ".n_dtypes");
    REFUSED(d.n_dtypes = 5, AMP_ERR_RANGE, ".n_dtypes");
    REFUSED(d.n_dtypes = 1, AMP_ERR_NULL, ".dtypes");
    REFUSED((d.dtypes = wrong, d.n_dtypes = 2), AMP_ERR_DTYPE, ".dtypes[1]");
    REFUSED((d.dtypes = twice, d.n_dtypes = 3), AMP_ERR_RANGE, "twice");
    REFUSED(d.batch = -1, AMP_ERR_RANGE, ".batch");
    REFUSED(d.max_batch = -1, AMP_ERR_RANGE, ".max_batch");
    REFUSED((d.batch = 4, d.max_batch = 3), AMP_ERR_RANGE, ".max_batch");
    REFUSED(d.iterations = -1, AMP_ERR_RANGE, ".iterations");
    REFUSED(d.iterations = 1001, AMP_ERR_RANGE, ".iterations");
    REFUSED(d.warmup = -1, AMP_ERR_RANGE, ".warmup");
    REFUSED(d.warmup = 1001, AMP_ERR_RANGE, ".warmup");
    REFUSED(d.file = "", AMP_ERR_RANGE, ".file");
#undef REFUSED
    CHECK_ERR(amp_tune(NULL, &good, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_tune(amp, NULL, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_tune(amp, &good, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_tune_v(amp, &good, &r, 1), AMP_ERR_VERSION);
    CHECK_OK(amp_set_enabled(amp, 0));
    CHECK_ERR(amp_tune(amp, &good, &r), AMP_ERR_STATE);
    CHECK(memcmp(&r, &untouched, sizeof r) == 0);
    CHECK_EQ(t.steps, 0);
    amp_close(amp);
}

/* Whichever allocation fails, memory and dtype are as before, and a failure leaves the report alone. */
TEST(tune_survives_failing_allocations) {
    amp_context *amp = open_host(device(), AMP_BF16);
    const char *path = scratch_file();
    int64_t blocks = host.blocks;
    int n, done = 0;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    d.file = path;
    d.iterations = d.warmup = 1;
    for (n = 1; !done && n < 1000; n++) {
        amp_tune_report r;
        amp_result result;
        remove(path);
        host.fail_alloc = n;
        result = amp_tune(amp, &d, &r);
        done = host.fail_alloc > 0;
        host.fail_alloc = 0;
        CHECK_MSG(result == AMP_OK || result == AMP_ERR_MEMORY || result == AMP_ERR_WRITE, "%d: %s", n, amp_last_error());
        if (result != AMP_ERR_MEMORY) CHECK(r.best == 2);
        CHECK_EQ(host.blocks, blocks);
        CHECK(ampi_settings(amp)->dtype == AMP_BF16);
    }
    CHECK(done && n > 3);
    amp_close(amp);
    remove(path);
}

/* ---- Advice */

TEST(advice_about_the_machine) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_machine machine;
    amp_choice choice;
    amp_advice a;
    char text[2048];
    CHECK_OK(amp_query_machine(amp, &machine));
    CHECK_OK(amp_choose(&machine, AMP_DTYPE_DEFAULT, 0, &choice));
    CHECK_OK(amp_advise(amp, NULL, &a));
    CHECK(a.settings.dtype == AMP_BF16 && strcmp(a.dtype_reason, choice.reason) == 0);
    CHECK(a.settings.level == AMP_LEVEL_O1 && a.settings.allow_tf32 == 1 && a.settings.autotune == AMP_AUTOTUNE_ON);
    CHECK(a.settings.memory_efficient == 0 && a.batch == 0);
    CHECK(a.settings.use_scaler == AMP_SCALER_USE_AUTO && strstr(a.scaler_reason, "none") != NULL);
    CHECK(a.level_reason[0] && a.tf32_reason[0] && a.batch_reason[0]);
    CHECK_EQ(amp_advice_text(&a, text, sizeof text), strlen(text));
    CHECK(strstr(text, choice.reason) != NULL && strstr(text, "batch    unknown") != NULL);
    CHECK_EQ(amp_advice_text(&a, text, 10), amp_advice_text(&a, NULL, 0));
    amp_close(amp);
    lacks_bf16 = 1;
    amp = open_host(NULL, AMP_F32);
    CHECK_OK(amp_advise(amp, NULL, &a));
    CHECK_OK(amp_query_machine(amp, &machine));
    CHECK(a.settings.dtype == (machine.device.bf16 ? AMP_BF16 : AMP_F32));
    CHECK(a.settings.allow_tf32 == 0 && a.settings.autotune == AMP_AUTOTUNE_OFF);
    amp_close(amp);
}

/* What failed verification is left out, one after the other. */
TEST(advice_heeds_verification) {
    static const amp_dtype order[] = {AMP_BF16, AMP_F16, AMP_TF32, AMP_F32};
    amp_context *amp = open_host(device(), AMP_F32);
    amp_verify_report v;
    amp_advise_desc d;
    amp_advice a;
    int i;
    memset(&d, 0, sizeof d);
    memset(&v, 0, sizeof v);
    d.verified = &v;
    for (i = 0; i < 4; i++) {
        CHECK_OK(amp_advise(amp, &d, &a));
        CHECK(a.settings.dtype == order[i]);
        CHECK(a.settings.allow_tf32 == (i < 3));
        if (i > 0) CHECK(strstr(a.dtype_reason, "bf16: verified not finite in head.weight; so") != NULL);
        if (i == 3) break;
        v.rows[i].dtype = order[i];
        v.rows[i].verdict = i == 0 ? AMP_VERDICT_NONFINITE : i == 1 ? AMP_VERDICT_INACCURATE : AMP_VERDICT_FAILED;
        snprintf(v.rows[i].first_bad, sizeof v.rows[i].first_bad, "head.weight");
        v.n_rows++;
    }
    v.rows[0].verdict = AMP_VERDICT_PASS;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.settings.dtype == AMP_BF16);
    amp_close(amp);
}

/* One parameter of 1000 fp32 elements: weight 4, gradient 4 and AdamW's moments 8 bytes of each are fixed. */
typedef struct budget {
    amp_param p;
    amp_optimizer *o;
    void *w, *g;
} budget;

static amp_context *open_budget(budget *b) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_optimizer_desc d;
    memset(b, 0, sizeof *b);
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_alloc(amp, &b->w, 4000));
    CHECK_OK(amp_alloc(amp, &b->g, 4000));
    b->p.name = "w";
    b->p.weight = amp_tensor1(b->w, AMP_F32, 1000);
    b->p.grad = amp_tensor1(b->g, AMP_F32, 1000);
    d.params = &b->p;
    d.n_params = 1;
    d.clip_norm = 1.5;
    d.accumulation = 3;
    CHECK_OK(amp_optimizer_create(amp, &b->o, &d));
    return amp;
}

static void close_budget(amp_context *amp, budget *b) {
    amp_optimizer_destroy(b->o);
    amp_free(amp, b->w);
    amp_free(amp, b->g);
    amp_close(amp);
    CHECK_EQ(host.blocks, 0);
}

TEST(advice_on_the_batch) {
    budget b;
    amp_context *amp = open_budget(&b);
    amp_memory_info info;
    amp_advise_desc d;
    amp_advice a;
    void *activations;
    int64_t fixed = 16 * 1000, each;
    memset(&d, 0, sizeof d);
    d.optimizer = b.o;
    d.batch = 10;
    CHECK_OK(amp_alloc(amp, &activations, 100000));
    amp_free(amp, activations);
    CHECK_OK(amp_memory(amp, &info));
    each = (info.peak - fixed) / 10;
    device_bytes = 1000000;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK_EQ(a.batch, (900000 - fixed) * 10 / (info.peak - fixed));
    CHECK(a.batch > 80 && a.batch < 90 && each > 10000);
    CHECK(a.settings.level == AMP_LEVEL_O1);
    CHECK(a.settings.clip_norm == 1.5 && a.settings.accumulation == 3);
    device_bytes = info.peak * 10 / 9 - 12;         /* just below: memory is short */
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.settings.level == AMP_LEVEL_O2 && a.settings.memory_efficient == 1 && a.batch == 9);
    device_bytes = info.peak * 10 / 9 + 12;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.settings.level == AMP_LEVEL_O1 && a.settings.memory_efficient == 0 && a.batch == 10);
    device_bytes = 10000;                           /* not even the parameters fit */
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.batch == 0 && a.settings.level == AMP_LEVEL_O2);
    device_bytes = 0;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.batch == 0 && strstr(a.batch_reason, "does not tell") != NULL && a.settings.level == AMP_LEVEL_O1);
    device_bytes = 1000000;
    amp_free(amp, b.w);                             /* activations, weights and gradients are elsewhere */
    amp_free(amp, b.g);
    b.w = b.g = NULL;
    amp_memory_reset_peak(amp);
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.batch == 0 && strstr(a.batch_reason, "activations") != NULL);
    close_budget(amp, &b);
}

/* A scaler with a history: 'x' an overflow, '.' a clean step. */
static amp_scaler *lived_through(amp_context *amp, const amp_scaler_desc *desc, const char *history, int times) {
    float value = 0;
    amp_range range = {"g", NULL, 1, AMP_F32};
    amp_set_desc d;
    amp_set *set;
    amp_scaler *scaler;
    void *memory;
    int i;
    size_t k;
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_alloc(amp, &memory, 4));
    range.data = memory;
    d.ranges = &range;
    d.n_ranges = 1;
    CHECK_OK(amp_set_create(amp, &set, &d));
    CHECK_OK(amp_scaler_create(amp, &scaler, desc));
    for (i = 0; i < times; i++)
        for (k = 0; history[k]; k++) {
            value = history[k] == 'x' ? INFINITY : 1;
            CHECK_OK(amp_copy(amp, memory, &value, 4, AMP_COPY_TO_DEVICE));
            CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
            CHECK_OK(amp_scaler_update(scaler));
        }
    amp_set_destroy(set);
    amp_free(amp, memory);
    return scaler;
}

static amp_advice scaler_advice(float init, int32_t interval, int32_t hysteresis, const char *history, int times, int no_bf16) {
    amp_context *amp;
    amp_scaler_desc s;
    amp_advise_desc d;
    amp_desc desc;
    amp_advice a;
    const amp_backend *backend = device();
    lacks_bf16 = no_bf16;
    desc = host_desc(backend, AMP_F16);
    memset(&s, 0, sizeof s);
    memset(&d, 0, sizeof d);
    s.init_scale = init;
    s.growth_interval = interval;
    s.hysteresis = hysteresis;
    CHECK_OK(amp_open(&amp, &desc));
    d.scaler = lived_through(amp, &s, history, times);
    CHECK_OK(amp_advise(amp, &d, &a));
    amp_scaler_destroy((amp_scaler *)(uintptr_t)d.scaler);
    amp_close(amp);
    return a;
}

TEST(advice_on_the_scaler) {
    static const char clean[] = "....................";
    amp_advice a = scaler_advice(0, 0, 0, "", 0, 1);
    CHECK(a.settings.dtype == AMP_F16 && strstr(a.scaler_reason, "dynamic") != NULL);
    a = scaler_advice(0, 0, 0, clean, 20, 1);
    CHECK(a.settings.scaler.init_scale == 65536 && strstr(a.scaler_reason, "0 of 400 steps skipped, scale 65536: as it is") != NULL);
    a = scaler_advice(0, 0, 0, "xxx...................................................................................................", 10, 1);
    CHECK(strstr(a.scaler_reason, "30 of 1020") != NULL && a.settings.scaler.backoff_factor == 0.25);   /* 2.9%: scale 2^16 / 2^30, at the floor since */
    a = scaler_advice(65536, 0, 0, "xxxxx" "...............................................................................................", 1, 1);
    CHECK(a.settings.scaler.init_scale == 512 && strstr(a.scaler_reason, "5 of 100") != NULL);         /* 5% and 2048: a quarter */
    a = scaler_advice(65536, 200, 0, "x" "...................................................", 5, 1);
    CHECK(a.settings.scaler.growth_interval == 2000 && a.settings.scaler.init_scale == 2048);
    a = scaler_advice(65536, 0, 2, "xx" "...................................................", 5, 1);
    CHECK(a.settings.scaler.hysteresis == 1);
    { char calm[602]; memset(calm, '.', sizeof calm); calm[0] = calm[1] = calm[2] = 'x'; calm[601] = 0;
      a = scaler_advice(65536, 0, 0, calm, 1, 1); }
    CHECK(a.settings.scaler.init_scale == 8192 && a.settings.scaler.backoff_factor == 0.5 && strstr(a.scaler_reason, "from 65536 to 8192 in 3 skips") != NULL);
    a = scaler_advice(2, 0, 0, "xxxx", 1, 1);       /* at the floor: fp16 does not do, and there is no bf16 */
    CHECK(a.settings.dtype == AMP_TF32 && strstr(a.dtype_reason, "lowest scale 1") != NULL);
    a = scaler_advice(2, 0, 0, "xxxx", 1, 0);
    CHECK(a.settings.dtype == AMP_BF16);
}

TEST(advice_is_applied) {
    budget b;
    amp_context *amp = open_budget(&b);
    amp_scaler_desc s;
    amp_optimizer_desc od;
    amp_scaler *scaler;
    amp_desc d;
    amp_advice a;
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_scaler_create(amp, &scaler, &s));
    CHECK_OK(amp_advise(amp, NULL, &a));
    a.settings.dtype = AMP_F16;
    a.settings.level = AMP_LEVEL_O2;
    a.settings.memory_efficient = 1;
    a.settings.scaler.backoff_factor = 0.25;
    a.settings.scaler.growth_interval = 77;
    CHECK_OK(amp_apply(&a, amp, scaler, b.o));
    CHECK_OK(amp_query(amp, &d));
    CHECK(d.dtype == AMP_F16 && d.allow_tf32 == 1 && d.memory_efficient == 1 && d.level == AMP_LEVEL_O1);
    CHECK(host.warnings == 1 && strstr(host.last, "O2 is advised") != NULL);
    CHECK_OK(amp_scaler_query(scaler, &s));
    CHECK(s.backoff_factor == 0.25 && s.growth_interval == 77 && s.growth_factor == 2);
    CHECK_OK(amp_optimizer_query(b.o, &od));
    CHECK(od.clip_norm == 1.5 && od.accumulation == 3);
    CHECK_ERR(amp_apply(NULL, amp, scaler, b.o), AMP_ERR_NULL);
    CHECK_ERR(amp_apply(&a, NULL, scaler, b.o), AMP_ERR_NULL);
    amp_scaler_destroy(scaler);
    close_budget(amp, &b);
}

TEST(advice_refuses_bad_input) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_verify_report v;
    amp_advise_desc d;
    amp_advice a;
    memset(&d, 0, sizeof d);
    CHECK_ERR(amp_advise(NULL, NULL, &a), AMP_ERR_NULL);
    CHECK_ERR(amp_advise(amp, NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_advise_v(amp, NULL, &a, 3), AMP_ERR_VERSION);
    d.batch = -1;
    CHECK_ERR(amp_advise(amp, &d, &a), AMP_ERR_RANGE);
    d.batch = 0;
    memset(&v, 0, sizeof v);
    v.n_rows = AMP_VERIFY_ROWS + 1;
    d.verified = &v;
    CHECK_ERR(amp_advise(amp, &d, &a), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), ".verified") != NULL);
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(tune_takes_medians_and_the_highest_rate);
    RUN(tune_ignores_outliers);
    RUN(tune_alternates);
    RUN(tune_breaks_ties_by_order);
    RUN(tune_doubles_the_batch_until_memory_ends);
    RUN(tune_stops_at_the_largest_batch_and_at_full_tables);
    RUN(tune_reports_when_nothing_works);
    RUN(tune_has_a_row_for_what_the_device_lacks);
    RUN(tune_measures_memory);
    RUN(tune_keeps_results_in_a_file);
    RUN(tune_survives_damaged_files);
    RUN(tune_refuses_impossible_rows);
    RUN(tune_leaves_foreign_files_alone);
    RUN(tune_refuses_bad_input);
    RUN(tune_survives_failing_allocations);
    RUN(advice_about_the_machine);
    RUN(advice_heeds_verification);
    RUN(advice_on_the_batch);
    RUN(advice_on_the_scaler);
    RUN(advice_is_applied);
    RUN(advice_refuses_bad_input);
    return TEST_END();
}
