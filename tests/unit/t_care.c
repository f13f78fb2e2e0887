/* t_care.c - tests advice, tuning and recovery: the choices with their reasons, the order of timings, and restored
 * trainings.  A training that was restored must continue bit for bit like one that began there.
 *
 *     gcc -O2 -Itests tests/unit/t_care.c -o t_care -lm -lpthread && ./t_care      (from the project root) */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#define AMPT_TRAPS
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
    int64_t drift, each;            /* added to each step's: drift times its number, and each */
    int64_t batch, room;            /* the most that prepare makes ready */
    int64_t room_of[12];            /* the most a dtype's step has memory for; 0: any */
    amp_dtype broken;               /* fails */
    int steps, prepared[40], n_prepared;
    char order[400];                /* a letter for each step, P for prepare */
} timed;

static int timed_step(void *user, amp_context *amp) {
    timed *t = (timed *)user;
    amp_dtype dtype = ampi_dtype(amp);
    size_t n = strlen(t->order);
    if (n + 1 < sizeof t->order) t->order[n] = dtype == AMP_F32 ? 's' : dtype == AMP_TF32 ? 't' : dtype == AMP_F16 ? 'h' : 'b';
    host.now += t->cost[dtype] * (t->batch ? t->batch : 1) + t->drift * t->steps++ + t->each;
    if (dtype == t->broken) {
        CHECK_OK(amp_autocast_begin(amp, NULL));        /* and leaves its region open */
        return 77;
    }
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
    CHECK(ampi_dtype(amp) == AMP_BF16);
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
    amp_choice before, after;
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
    CHECK_OK(amp_query_choice(amp, &before));
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_OK(amp_query_choice(amp, &after));
    CHECK(strcmp(after.reason, before.reason) == 0);
    CHECK(!amp_autocast_active(amp, NULL));
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

TEST(tune_is_shown_as_a_table) {
    static amp_tune_report r;
    char text[1024];
    r.n_rows = 2;
    r.best = 1;
    r.rows[0].dtype = AMP_F32; r.rows[0].batch = 8; r.rows[0].seconds = 0.5; r.rows[0].rate = 16; r.rows[0].speedup = 1;
    r.rows[0].verdict = AMP_VERDICT_PASS; r.rows[0].peak = 3 << 20;
    r.rows[1] = r.rows[0];
    r.rows[1].dtype = AMP_BF16; r.rows[1].seconds = 0.25; r.rows[1].rate = 32; r.rows[1].speedup = 2; r.rows[1].verdict = (amp_verdict)9;
    CHECK_EQ(amp_tune_text(&r, text, sizeof text), strlen(text));
    CHECK(strstr(text, "\n  fp32         8      500.000         16.0     1.00        3.0  pass\n") != NULL);
    CHECK(strstr(text, "\n* bf16         8      250.000         32.0     2.00        3.0  ?\n") != NULL);
    CHECK(strstr(text, "rates") == NULL);                   /* a device's */
    r.n_rows = 4;
    r.cpu_path = AMP_CPU_AVX512_BF16;
    r.rows[3] = r.rows[2] = r.rows[1];                      /* the second has not passed */
    r.rows[2].verdict = r.rows[3].verdict = AMP_VERDICT_PASS;
    r.rows[3].dtype = AMP_F16; r.rows[3].speedup = 0.6249;
    CHECK_EQ(amp_tune_text(&r, text, sizeof text), strlen(text));
    CHECK_MSG(strstr(text, "\n  rates = avx512_bf16 bf16 2, avx512_bf16 fp16 0.625\n") != NULL, "%s", text);
    CHECK_EQ(ampi_rates_count(strstr(text, "rates = ") + 8), -1);       /* with its line's end */
    strstr(text, "rates = ")[strlen(strstr(text, "rates = ")) - 1] = 0;
    CHECK_EQ(ampi_rates_count(strstr(text, "rates = ") + 8), 2);
    CHECK_EQ(amp_tune_text(NULL, text, sizeof text), 0);
    CHECK_EQ(amp_advice_text(NULL, text, sizeof text), 0);
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
    CHECK_EQ(t.n_prepared, 2);              /* at the end the first batch is asked for again */
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
    amp_dtype dtype = ampi_dtype(amp);
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
    static const amp_dtype fewer[] = {AMP_F32, AMP_F16};
    const amp_backend *other_machine;
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
    other_machine = device();
    lacks_bf16 = 1;
    { amp_desc desc = host_desc(other_machine, AMP_F32); CHECK_OK(amp_open(&amp, &desc)); }
    d.dtypes = fewer;
    d.n_dtypes = 2;
    CHECK_OK(amp_tune(amp, &d, &again));
    CHECK_EQ(again.from_file, 0);
    lacks_bf16 = 0;
    amp_close(amp);
    amp = open_host(device(), AMP_F32);
    CHECK_OK(amp_tune(amp, &d, &again));    /* the same but for the machine */
    CHECK_EQ(again.from_file, 0);
    CHECK_OK(amp_tune(amp, &d, &again));
    CHECK_EQ(again.from_file, 1);
    amp_close(amp);
    CHECK_EQ(host.blocks, 0);
    remove(path);
}

/* The best batch of the file, 4, no longer fits: timed anew, and the file has that. */
TEST(tune_times_anew_what_no_longer_fits) {
    amp_context *amp = open_host(device(), AMP_F32);
    amp_tune_report r;
    timed t;
    amp_tune_desc d = tune_desc(&t);
    int i;
    remove(scratch_file());
    d.file = scratch_file();
    d.prepare = timed_prepare;
    d.max_batch = 4;
    t.each = 10000;
    for (i = 0; i < 4; i++) {
        t.room = i < 2 ? 0 : 2;
        CHECK_OK(amp_tune(amp, &d, &r));
        CHECK_EQ(r.from_file, i % 2);
        CHECK_EQ(r.rows[r.best].batch, i < 2 ? 4 : 2);
        CHECK(t.prepared[t.n_prepared - 1] == r.rows[r.best].batch);
    }
    CHECK(host.warnings == 1 && strstr(host.last, "batch 4") != NULL);
    amp_close(amp);
    remove(scratch_file());
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
#if !defined(_WIN32)
    CHECK(mkfifo(path, 0600) == 0);                 /* nor is a pipe waited for */
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK(host.warnings == 2 && strstr(host.last, "left alone") != NULL && strstr(host.last, "must be a regular file") != NULL);
#endif
    remove(path);
    d.file = "/nowhere/at/all/tune";
    CHECK_ERR(amp_tune(amp, &d, &r), AMP_ERR_WRITE);
    CHECK(r.best == 2 && r.n_rows == 4 && strstr(amp_last_error(), "the results are valid") != NULL);
    CHECK(ampi_dtype(amp) == AMP_F32);
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
    REFUSED(d.n_dtypes = 6, AMP_ERR_RANGE, ".n_dtypes");
    REFUSED(d.n_dtypes = 1, AMP_ERR_NULL, ".dtypes");
    REFUSED((d.dtypes = wrong, d.n_dtypes = 2), AMP_ERR_DTYPE, ".dtypes[1]");
    REFUSED((d.dtypes = twice, d.n_dtypes = 3), AMP_ERR_RANGE, "twice");
    REFUSED(d.batch = -1, AMP_ERR_RANGE, ".batch");
    REFUSED(d.max_batch = -1, AMP_ERR_RANGE, ".max_batch");
    REFUSED((d.batch = 4, d.max_batch = 3), AMP_ERR_RANGE, ".max_batch");
    REFUSED(d.iterations = -1, AMP_ERR_RANGE, ".iterations");
    REFUSED(d.iterations = 1001, AMP_ERR_RANGE, ".iterations");
    REFUSED(d.warmup = -2, AMP_ERR_RANGE, ".warmup");
    REFUSED(d.warmup = 1001, AMP_ERR_RANGE, ".warmup");
    REFUSED(d.file = "", AMP_ERR_RANGE, ".file");
#undef REFUSED
    CHECK_ERR(amp_tune(NULL, &good, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_tune(amp, NULL, &r), AMP_ERR_NULL);
    CHECK_ERR(amp_tune(amp, &good, NULL), AMP_ERR_NULL);
    CHECK_OK(amp_set_enabled(amp, 0));
    CHECK_ERR(amp_tune(amp, &good, &r), AMP_ERR_STATE);
    CHECK_OK(amp_set_enabled(amp, 1));
    CHECK(memcmp(&r, &untouched, sizeof r) == 0);
    CHECK_EQ(t.steps, 0);
    amp_close(amp);
}

/* A linear model whose step is verified: fp16 loses the gradients of a tiny loss, and the host makes bf16's infinite. */
typedef struct judged { amp_param p; amp_optimizer *o; float x[6 * 4], y[6 * 3], dy[6 * 3], w[12], g[12]; float small; amp_dtype infinite; timed clock; } judged;

static int judged_step(void *user, amp_context *amp) {
    judged *j = (judged *)user;
    amp_linear_op op;
    int i;
    memset(&op, 0, sizeof op);
    op.x = amp_tensor2(j->x, AMP_F32, 6, 4); op.y = amp_tensor2(j->y, AMP_F32, 6, 3); op.dy = amp_tensor2(j->dy, AMP_F32, 6, 3); op.weight = &j->p;
    if (amp_autocast_begin(amp, NULL) || amp_linear(amp, &op) || amp_autocast_end(amp)) return AMP_ERR_STATE;
    for (i = 0; i < 18; i++) j->dy[i] = j->y[i] * j->small;
    if (amp_linear_backward(amp, &op)) return AMP_ERR_STATE;
    if (ampi_dtype(amp) == j->infinite) j->g[5] = INFINITY;
    return timed_step(&j->clock, amp);
}
static int judged_train(void *user, amp_context *amp) {
    int code = judged_step(user, amp);
    return code ? code : (int)amp_step(((judged *)user)->o, NULL);
}

TEST(tune_heeds_verification) {
    amp_context *amp = open_host(NULL, AMP_BF16);
    static const amp_dtype dtypes[] = {AMP_F32, AMP_F16, AMP_BF16};
    static judged j;
    amp_optimizer_desc o;
    amp_verify_desc v;
    amp_tune_report r;
    float before[12];
    amp_tune_desc d = tune_desc(&j.clock);
    memset(&v, 0, sizeof v);
    memset(&o, 0, sizeof o);
    ampt_uniform(j.x, 24, 1, 1, 1, 0);
    ampt_uniform(j.w, 12, 1, 2, 1, 0);
    j.small = 1e-9f;
    j.p.name = "head.weight";
    j.p.weight = amp_tensor2(j.w, AMP_F32, 3, 4);
    j.p.grad = amp_tensor2(j.g, AMP_F32, 3, 4);
    o.params = &j.p; o.n_params = 1;
    CHECK_OK(amp_param_register(amp, &j.p, 1));
    CHECK_OK(amp_optimizer_create(amp, &j.o, &o));
    v.step = judged_step; v.user = &j; v.params = &j.p; v.n_params = 1; v.optimizer = j.o;
    d.step = judged_train; d.user = &j; d.verify = &v; d.dtypes = dtypes; d.n_dtypes = 3;
    memcpy(before, j.w, sizeof before);
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK_MSG(r.rows[0].verdict == AMP_VERDICT_PASS && r.rows[1].verdict == AMP_VERDICT_INACCURATE && r.rows[2].verdict == AMP_VERDICT_PASS, "%d %d %d %s",
              (int)r.rows[0].verdict, (int)r.rows[1].verdict, (int)r.rows[2].verdict, r.rows[2].reason);
    CHECK(r.rows[1].rate > r.rows[2].rate && strstr(r.rows[1].reason, "loss scaler") != NULL && r.rows[2].reason[0] == 0);
    CHECK_EQ(r.best, 2);
    CHECK(memcmp(before, j.w, sizeof before) == 0 && j.o->attempts == 0 && ampi_dtype(amp) == AMP_BF16);
    j.infinite = AMP_BF16;
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK(r.rows[2].verdict == AMP_VERDICT_NONFINITE && r.best == 0 && r.rows[2].seconds > 0);
    j.clock.broken = AMP_F16;                   /* is not timed */
    memset(j.clock.order, 0, sizeof j.clock.order);
    CHECK_OK(amp_tune(amp, &d, &r));
    CHECK(r.rows[1].verdict == AMP_VERDICT_FAILED && strstr(r.rows[1].reason, "77") != NULL);
    CHECK_MSG(strchr(j.clock.order, 'h') != NULL && strchr(j.clock.order, 'h') == strrchr(j.clock.order, 'h'), "%s", j.clock.order);
    j.infinite = AMP_F32;                       /* nothing can be held against this */
    memset(&r, 0x5a, sizeof r);
    CHECK_ERR(amp_tune(amp, &d, &r), AMP_ERR_RANGE);
    CHECK(r.best == 0x5a5a5a5a5a5a5a5a && memcmp(before, j.w, sizeof before) == 0);
    amp_optimizer_destroy(j.o);
    amp_close(amp);
    CHECK_EQ(host.blocks, 0);
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
    CHECK(a.settings.use_scaler == AMP_SCALER_USE_AUTO && strstr(a.scaler_reason, "needs no scaler") != NULL);
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
    amp_tensor cast;
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
    CHECK_OK(amp_param_register(amp, &b.p, 1));     /* kept casts do not grow with the batch either */
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_autocast_cast(amp, &b.p, AMP_BF16, &cast));
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK_EQ(a.batch, (900000 - fixed - 2000) * 10 / (info.peak - fixed - 2000));
    CHECK_OK(amp_autocast_end(amp));
    amp_cast_cache_clear(amp);
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
    CHECK(a.batch == 0 && strstr(a.batch_reason, "does not report") != NULL && a.settings.level == AMP_LEVEL_O1);
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
    amp_grad_set_desc d;
    amp_grad_set *set;
    amp_scaler *scaler;
    void *memory;
    int i;
    size_t k;
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_alloc(amp, &memory, 4));
    range.data = memory;
    d.ranges = &range;
    d.n_ranges = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    CHECK_OK(amp_scaler_create(amp, &scaler, desc));
    for (i = 0; i < times; i++)
        for (k = 0; history[k]; k++) {
            value = history[k] == 'x' ? INFINITY : 1;
            CHECK_OK(amp_copy(amp, memory, &value, 4, AMP_COPY_TO_DEVICE));
            CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
            CHECK_OK(amp_scaler_update(scaler));
        }
    amp_grad_set_destroy(set);
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
    CHECK(a.settings.scaler.init_scale == 65536 && strstr(a.scaler_reason, "0 of 400 steps skipped, scale 65536: unchanged") != NULL);
    a = scaler_advice(0, 0, 0, "xxx...................................................................................................", 10, 1);
    CHECK(strstr(a.scaler_reason, "30 of 1020") != NULL && a.settings.scaler.backoff_factor == 0.25);   /* 2.9%: down to its floor of 1 */
    CHECK(a.settings.scaler.init_scale == 1);
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

/* Losses of a training, by kind; noise: the share of each that is random. */
static void losses_of(double *x, int n, const char *kind, double noise) {
    for (int i = 0; i < n; i++) {
        double t = (double)i / n, v = 3;
        if (!strcmp(kind, "healthy")) v = 1.5 + 2.5 * exp(-5 * t);
        if (!strcmp(kind, "slow")) v = 3 - 0.09 * t;
        if (!strcmp(kind, "slowest")) v = 3 - 0.003 * t;
        if (!strcmp(kind, "flattening")) v = 3 - 0.1 * (1 - exp(-6 * t));
        if (!strcmp(kind, "rising")) v = t < 0.5 ? 4 - 4 * t : 2 + 1.2 * (t - 0.5);
        if (!strcmp(kind, "diverging")) v = t < 0.5 ? 4 - 4 * t : 2 + 20 * (t - 0.5);
        if (!strcmp(kind, "jumping")) v = (4 - 2 * t) * (i % 20 == 7 ? 1.5 : 1);
        if (!strcmp(kind, "one jump")) v = (4 - 2 * t) * (i == n / 2 ? 1.5 : 1);
        if (!strcmp(kind, "negative")) v = -3 - 0.09 * t;
        if (!strcmp(kind, "exploding")) v = 2 + exp(0.3 * (i - n / 2));
        if (!strcmp(kind, "exploding late")) v = 2 * (i < n - 12 ? 1 : pow(1.4, i - n + 13));
        x[i] = v * (1 + noise * (2 * amp_random_uniform(5, (uint64_t)i) - 1));
    }
}

TEST(advice_on_the_learning_rate) {
    static const struct { const char *kind; double noise, low, high; const char *says; } rows[] = {
        {"healthy", 0, 1, 1, "unchanged: 200 losses went from"}, {"healthy", 0.1, 1, 1, "unchanged"},
        {"flat", 0, 1, 1, "unchanged"}, {"flat", 0.3, 1, 1, "unchanged"},
        {"slow", 0.0003, 1.4, 1.45, "slow: 200 losses fell by 2.3% from 2.989"}, {"slowest", 0.000001, 1.49, 1.5, "slow: 200 losses fell by 0.075%"},
        {"slow", 0.05, 1, 1, "unchanged"}, {"slowest", 0.001, 1, 1, "unchanged"},       /* the noise hides it */
        {"flattening", 0.00001, 1, 1, "unchanged"}, {"negative", 0.0003, 1.4, 1.45, "slow"},
        {"rising", 0.02, 0.6, 0.75, "unstable: the last quarter of 200 losses has mean 2.4"}, {"diverging", 0.02, 0.5, 0.5, "unstable"},
        {"exploding", 0.01, 0.5, 0.5, "unstable: each of the last 10 of 200 losses is above"}, {"exploding late", 0.02, 0.5, 0.5, "unstable: each of"},
        {"jumping", 0.01, 0.6, 0.7, "unstable: 10 of 200 losses jump"}, {"one jump", 0.01, 1, 1, "1 jumps"}};
    double x[256];
    budget b;
    amp_context *amp = open_budget(&b);
    amp_optimizer_desc od;
    amp_advise_desc d;
    amp_advice a;
    char text[4000];
    int hints;
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_optimizer_set_lr(b.o, 0.004));
    d.losses = x;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int optimizer = 0; optimizer < 2; optimizer++) {
            losses_of(x, 200, rows[i].kind, rows[i].noise);
            d.n_losses = 200;
            d.optimizer = optimizer ? b.o : NULL;
            CHECK_OK(amp_advise(amp, &d, &a));
            CHECK_MSG(a.lr_factor >= rows[i].low && a.lr_factor <= rows[i].high, "%s: %g: %s", rows[i].kind, a.lr_factor, a.lr_reason);
            CHECK_MSG(strstr(a.lr_reason, rows[i].says) != NULL, "%s: %s", rows[i].kind, a.lr_reason);
            CHECK(a.lr == (optimizer ? 0.004 * a.lr_factor : 0));
            CHECK(amp_advice_text(&a, text, sizeof text) < sizeof text && strstr(text, a.lr_reason) != NULL);
            for (int k = 0; k < 39; k++) {              /* the scale of the losses does not matter */
                for (int n = 0; n < 200; n++) x[n] *= 2;
                if (k < 38) continue;
                amp_advice scaled;
                CHECK_OK(amp_advise(amp, &d, &scaled));
                CHECK(fabs(scaled.lr_factor - a.lr_factor) < 1e-9);
            }
        }
    for (int bad = 0; bad < 3; bad++) {                 /* not finite, anywhere: half */
        losses_of(x, 200, "healthy", 0.01);
        x[bad * 99] = bad == 1 ? (double)amp_f32_from_f16(0x7c00) : (double)amp_f32_from_f16(0x7e00);
        CHECK_OK(amp_advise(amp, &d, &a));
        CHECK(a.lr_factor == 0.5 && a.lr == 0.002 && strstr(a.lr_reason, "1 of 200 losses are not finite") != NULL);
    }
    losses_of(x, 200, "healthy", 0.01);                 /* of no fp32 training either, and squares of it are infinite */
    x[150] = -1e160; x[160] = 1e300;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.lr_factor == 0.5 && strstr(a.lr_reason, "2 of 200 losses are not finite") != NULL);
    CHECK_OK(amp_optimizer_query(b.o, &od));
    CHECK(od.lr == 0.004);                              /* advice alone changes nothing */
    CHECK_OK(amp_advice_apply(&a, amp, NULL, b.o));
    CHECK_OK(amp_advice_apply(&a, amp, NULL, b.o));            /* twice is as once */
    CHECK_OK(amp_optimizer_query(b.o, &od));
    CHECK(od.lr == 0.002);
    losses_of(x, 200, "diverging", 0);                  /* too short for any word, and said so; the shortest that is not */
    for (d.n_losses = 0; d.n_losses < AMP_ADVISE_LOSSES; d.n_losses++) {
        CHECK_OK(amp_advise(amp, &d, &a));
        snprintf(text, sizeof text, "unknown from %lld losses: needs 100 in .losses", (long long)d.n_losses);
        CHECK(a.lr_factor == 0 && a.lr == 0 && strcmp(a.lr_reason, text) == 0);
    }
    CHECK_OK(amp_advice_apply(&a, amp, NULL, b.o));
    CHECK_OK(amp_optimizer_query(b.o, &od));
    CHECK(od.lr == 0.002);
    losses_of(x, 103, "diverging", 0);
    d.n_losses = 103;
    CHECK_OK(amp_advise(amp, &d, &a));
    CHECK(a.lr_factor == 0.5);
    for (int i = hints = 0; i < 600; i++) {             /* what is right is left alone, though neighbours' noise is alike */
        double noise = 0;
        for (int k = 0; k < 200; k++) {
            noise = (i & 1 ? 0.7 * noise : 0) + 0.2 * (2 * amp_random_uniform(7, (uint64_t)(200 * i + k)) - 1);
            x[k] = 3 * (i & 2 ? 1 : 0.4 + 0.6 * exp(-4 * k / 200.0)) * (1 + noise);
        }
        d.n_losses = 200;
        CHECK_OK(amp_advise(amp, &d, &a));
        hints += a.lr_factor != 1;
    }
    CHECK_MSG(hints <= 12, "%d hints in 600 healthy histories", hints);
    d.n_losses = -1;
    CHECK_ERR(amp_advise(amp, &d, &a), AMP_ERR_RANGE);
    d.n_losses = 150; d.losses = NULL;
    CHECK_ERR(amp_advise(amp, &d, &a), AMP_ERR_NULL);
    CHECK(strstr(amp_last_error(), ".losses") != NULL);
    close_budget(amp, &b);
}

TEST(advice_is_applied) {
    budget b;
    amp_context *amp = open_budget(&b);
    amp_scaler_desc s;
    amp_optimizer_desc od;
    amp_scaler *scaler;
    amp_desc d;
    amp_advice a;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_scaler_create(amp, &scaler, &s));
    CHECK_OK(amp_advise(amp, NULL, &a));
    a.settings.dtype = AMP_F16;
    a.settings.level = AMP_LEVEL_O2;
    a.settings.memory_efficient = 1;
    a.settings.scaler.backoff_factor = 0.25;
    a.settings.scaler.growth_interval = 77;
    a.settings.scaler.hysteresis = 3;
    CHECK_OK(amp_advice_apply(&a, amp, scaler, b.o));
    CHECK_OK(amp_query(amp, &d));
    CHECK(d.dtype == AMP_F16 && d.allow_tf32 == 1 && d.memory_efficient == 1 && d.level == AMP_LEVEL_O1);
    CHECK(host.warnings == 1 && strstr(host.last, "O2 is advised") != NULL);
    CHECK_OK(amp_scaler_query(scaler, &s));
    CHECK(s.backoff_factor == 0.25 && s.growth_interval == 77 && s.growth_factor == 2 && s.hysteresis == 3);
    CHECK_OK(amp_optimizer_query(b.o, &od));
    CHECK(od.clip_norm == 1.5 && od.accumulation == 3);
    CHECK_OK(amp_advise(amp, NULL, &a));            /* knows nothing of the scaler, and leaves its rule */
    a.settings.dtype = AMP_F16;
    amp->desc.logger.level = AMP_LOG_DEBUG;
    b.o->desc.apply_nonfinite = 1;
    CHECK_OK(amp_advice_apply(&a, amp, scaler, b.o));
    CHECK_OK(amp_scaler_query(scaler, &s));
    CHECK(s.backoff_factor == 0.25 && s.growth_interval == 77 && s.hysteresis == 3 && !s.disable);
    CHECK(amp->desc.logger.level == AMP_LOG_DEBUG && b.o->desc.apply_nonfinite == 1);
    a.settings.dtype = AMP_BF16;
    CHECK_OK(amp_advice_apply(&a, amp, scaler, b.o));
    CHECK_OK(amp_scaler_query(scaler, &s));
    CHECK(s.disable);
    a.settings.use_scaler = AMP_SCALER_USE_ON;
    CHECK_OK(amp_advice_apply(&a, amp, scaler, b.o));
    CHECK_OK(amp_scaler_query(scaler, &s));
    CHECK(!s.disable && s.growth_interval == 77);
    CHECK_ERR(amp_advice_apply(NULL, amp, scaler, b.o), AMP_ERR_NULL);
    CHECK_ERR(amp_advice_apply(&a, NULL, scaler, b.o), AMP_ERR_NULL);
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

/* ---- Recovery: a perceptron with dropout, a shuffling loader and a scaler, into which anomaly is put */

enum { ROWS = 8, IN = 12, HIDDEN = 16, OUT = 10, SAMPLES = 96, PARAMS = 4, EVENTS = 32, LOSSES = 256 };
static const int64_t param_shape[PARAMS][2] = {{HIDDEN, IN}, {HIDDEN, 0}, {OUT, HIDDEN}, {OUT, 0}};
static const char *const param_names[PARAMS] = {"net.a.weight", "net.a.bias", "net.b.weight", "net.b.bias"};

typedef enum fault_kind {
    FAULT_NONE, FAULT_WEIGHT, FAULT_DATA, FAULT_LOSS, FAULT_GRADIENT, FAULT_OVERFLOW
} fault_kind;

/* Happens in step `step`; `times` more often when that step comes again.  OVERFLOW: in every step from there on while fp16. */
typedef struct fault { fault_kind kind; int64_t step; int times; } fault;

typedef struct trainee {
    amp_context *amp;
    amp_param p[PARAMS];
    amp_optimizer *o;
    amp_scaler *scaler;
    amp_loader *loader;
    amp_recovery *recovery;
    amp_tensor x, hidden, kept, logits, dlogits, dkept, dhidden;
    int32_t *labels;
    float *loss;
    double losses[LOSSES];
    fault anomaly;
    int max_skips, lr_drops;
    int64_t host_count, saved_count;    /* of the host's own */
    int fail_save, fail_load;
    amp_recovery_event events[EVENTS], wish;
    int n_events, asked;
    void *memory[40];
    int n_memory;
} trainee;

static void *room(trainee *t, int64_t bytes) {
    void *p = NULL;
    CHECK_OK(amp_alloc(t->amp, &p, bytes));
    t->memory[t->n_memory++] = p;
    return p;
}
static amp_tensor matrix(trainee *t, amp_dtype dtype, int64_t rows, int64_t cols) {
    void *p = room(t, rows * (cols ? cols : 1) * (int64_t)amp_dtype_size(dtype));
    return cols ? amp_tensor2(p, dtype, rows, cols) : amp_tensor1(p, dtype, rows);
}

static int sample_read(void *user, const amp_sample *sample, void *const *fields) {
    (void)user;
    ampt_uniform((float *)fields[0], IN, 5, (uint32_t)sample->sample, 1, 0);
    *(int32_t *)fields[1] = (int32_t)(sample->sample % OUT);
    return 0;
}

typedef struct training_plan {
    amp_dtype dtype;
    amp_level level;
    amp_master_kind master;
    const amp_backend *backend;
    int scaler, lag, accumulation;
    float init_scale;
    int64_t interval;
    int retries, max_skips, no_loader;
    fault anomaly;
    void (*policy)(void *, amp_recovery_event *);
    int own_state;
} training_plan;

static int own_save(void *user, amp_state *state) {
    trainee *t = (trainee *)user;
    return t->fail_save ? t->fail_save : (int)amp_state_put(state, "mine", AMP_I64, &t->host_count, 1);
}
static int own_load(void *user, const amp_state *state) {
    trainee *t = (trainee *)user;
    return t->fail_load ? t->fail_load : (int)amp_state_get(state, "mine", AMP_I64, &t->host_count, 1);
}

static void trainee_loader(trainee *t) {
    amp_loader_desc d;
    amp_source source;
    memset(&d, 0, sizeof d);
    memset(&source, 0, sizeof source);
    source.read = sample_read;
    source.samples = SAMPLES;
    source.fields[0].dtype = AMP_F32; source.fields[0].count = IN;
    source.fields[1].dtype = AMP_I32; source.fields[1].count = 1;
    source.n_fields = 2;
    d.source = &source;
    d.batch = ROWS;
    d.shuffle = 1;
    d.workers = AMP_NO_WORKERS;
    CHECK_OK(amp_loader_create(t->amp, &t->loader, &d));
}

static void trainee_params(trainee *t) {
    int i;
    for (i = 0; i < PARAMS; i++) {
        amp_dtype dtype = amp_param_dtype(t->amp, 0);
        int64_t n = param_shape[i][0] * (param_shape[i][1] ? param_shape[i][1] : 1);
        float values[HIDDEN * IN + OUT * HIDDEN];
        uint16_t narrow[HIDDEN * IN + OUT * HIDDEN];
        ampt_uniform(values, n, 77, (uint32_t)i, 0.4f, 0);
        if (dtype != AMP_F32) CHECK_OK(amp_convert(narrow, dtype, values, AMP_F32, n, NULL, NULL));
        t->p[i].name = param_names[i];
        t->p[i].weight = matrix(t, dtype, param_shape[i][0], param_shape[i][1]);
        t->p[i].grad = matrix(t, i == 2 ? dtype : AMP_F32, param_shape[i][0], param_shape[i][1]);
        CHECK_OK(amp_copy(t->amp, t->p[i].weight.data, dtype == AMP_F32 ? (void *)values : (void *)narrow, n * (int64_t)amp_dtype_size(dtype), AMP_COPY_TO_DEVICE));
    }
    CHECK_OK(amp_sync(t->amp));
    CHECK_OK(amp_param_register(t->amp, t->p, PARAMS));
}

static void trainee_buffers(trainee *t) {
    t->x = matrix(t, AMP_F32, ROWS, IN);
    t->hidden = matrix(t, AMP_F32, ROWS, HIDDEN);
    t->kept = matrix(t, AMP_F32, ROWS, HIDDEN);
    t->logits = matrix(t, AMP_F32, ROWS, OUT);
    t->dlogits = matrix(t, AMP_F32, ROWS, OUT);
    t->dkept = matrix(t, AMP_F32, ROWS, HIDDEN);
    t->dhidden = matrix(t, AMP_F32, ROWS, HIDDEN);
    t->labels = (int32_t *)room(t, ROWS * 4);
    t->loss = (float *)room(t, 4);
}

/* recover 0: the same training without anyone to help it. */
static void trainee_open(trainee *t, const training_plan *plan, int recover) {
    amp_desc d = host_desc(plan->backend, plan->dtype);
    amp_optimizer_desc o;
    amp_scaler_desc s;
    amp_recovery_desc r;
    memset(t, 0, sizeof *t);
    memset(&o, 0, sizeof o);
    memset(&s, 0, sizeof s);
    memset(&r, 0, sizeof r);
    d.level = plan->level;
    d.seed = 3;
    CHECK_OK(amp_open(&t->amp, &d));
    trainee_params(t);
    trainee_buffers(t);
    o.params = t->p; o.n_params = PARAMS; o.lr = 0.01; o.weight_decay = 0.1; o.master = plan->master; o.result_lag = plan->lag;
    o.accumulation = plan->accumulation; o.clip_norm = 0.5;
    CHECK_OK(amp_optimizer_create(t->amp, &t->o, &o));
    s.init_scale = plan->init_scale;
    s.growth_interval = 3;
    if (plan->scaler) CHECK_OK(amp_scaler_create(t->amp, &t->scaler, &s));
    if (!plan->no_loader) trainee_loader(t);
    t->anomaly = plan->anomaly;
    t->max_skips = plan->max_skips ? plan->max_skips : 1000;
    if (!recover) { t->anomaly.kind = FAULT_NONE; return; }
    r.params = t->p; r.n_params = PARAMS; r.optimizer = t->o; r.scaler = t->scaler; r.loader = t->loader;
    r.interval = plan->interval; r.max_retries = plan->retries; r.policy = plan->policy; r.user = t;
    if (plan->own_state) { r.save = own_save; r.load = own_load; }
    CHECK_OK(amp_recovery_create(t->amp, &t->recovery, &r));
}

static void trainee_close(trainee *t) {
    int i;
    amp_recovery_destroy(t->recovery);
    amp_loader_destroy(t->loader);
    amp_scaler_destroy(t->scaler);
    amp_optimizer_destroy(t->o);
    for (i = 0; i < t->n_memory; i++) amp_free(t->amp, t->memory[i]);
    amp_close(t->amp);
}

static void poison(trainee *t, const amp_tensor *where, float value) {
    uint16_t narrow = ampi_bits_f32(value) << 1 > 0xff000000u ? 0x7fff : 0x7c00;
    CHECK_OK(amp_copy(t->amp, where->data, where->dtype == AMP_F32 ? (void *)&value : (void *)&narrow, where->dtype == AMP_F32 ? 4 : 2, AMP_COPY_TO_DEVICE));
    CHECK_OK(amp_sync(t->amp));
}

/* 1: the anomaly is due now. */
static int strikes(trainee *t, fault_kind kind) {
    fault *f = &t->anomaly;
    if (f->kind != kind) return 0;
    if (kind == FAULT_OVERFLOW) return ampi_dtype(t->amp) == AMP_F16 && t->o->attempts + 1 >= f->step;
    if (t->o->attempts + 1 != f->step || t->o->micro > 0) return 0;
    if (f->times-- == 0) f->kind = FAULT_NONE;
    return 1;
}

static void trainee_batch(trainee *t) {
    amp_batch batch;
    float x[ROWS * IN];
    int32_t labels[ROWS];
    int i;
    if (t->loader != NULL) {
        CHECK_OK(amp_loader_next(t->loader, &batch));
        CHECK_OK(amp_copy(t->amp, t->x.data, batch.fields[0], sizeof x, AMP_COPY_ON_DEVICE));
        CHECK_OK(amp_copy(t->amp, t->labels, batch.fields[1], sizeof labels, AMP_COPY_ON_DEVICE));
    } else {
        ampt_uniform(x, ROWS * IN, 9, (uint32_t)t->host_count, 1, 0);
        for (i = 0; i < ROWS; i++) labels[i] = i;
        CHECK_OK(amp_copy(t->amp, t->x.data, x, sizeof x, AMP_COPY_TO_DEVICE));
        CHECK_OK(amp_copy(t->amp, t->labels, labels, sizeof labels, AMP_COPY_TO_DEVICE));
    }
    CHECK_OK(amp_sync(t->amp));
    t->host_count++;
    if (strikes(t, FAULT_DATA)) poison(t, &t->x, NAN);
}

/* One call of amp_step. */
static void trainee_micro(trainee *t) {
    amp_linear_op a, b;
    amp_dropout_op drop;
    amp_cross_entropy_op ce;
    float loss;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    memset(&drop, 0, sizeof drop);
    memset(&ce, 0, sizeof ce);
    trainee_batch(t);
    if (strikes(t, FAULT_WEIGHT)) { poison(t, &t->p[2].weight, NAN); amp_param_changed(&t->p[2]); }
    a.x = t->x; a.weight = &t->p[0]; a.bias = &t->p[1]; a.y = t->hidden;
    drop.x = t->hidden; drop.y = t->kept; drop.p = 0.25f;
    b.x = t->kept; b.weight = &t->p[2]; b.bias = &t->p[3]; b.y = t->logits;
    ce.logits = t->logits; ce.dlogits = t->dlogits; ce.labels = t->labels; ce.loss = t->loss; ce.grad_scale = amp_scaler_scale_ptr(t->scaler);
    CHECK_OK(amp_autocast_begin(t->amp, NULL));
    CHECK_OK(amp_linear(t->amp, &a));
    CHECK_OK(amp_dropout(t->amp, &drop));
    CHECK_OK(amp_linear(t->amp, &b));
    CHECK_OK(amp_cross_entropy(t->amp, &ce));
    CHECK_OK(amp_autocast_end(t->amp));
    b.dy = t->dlogits; b.dx = t->dkept;
    drop.dy = t->dkept; drop.dx = t->dhidden;
    a.dy = t->dhidden;
    CHECK_OK(amp_linear_backward(t->amp, &b));
    CHECK_OK(amp_dropout_backward(t->amp, &drop));
    CHECK_OK(amp_linear_backward(t->amp, &a));
    if (strikes(t, FAULT_GRADIENT)) poison(t, &t->p[1].grad, NAN);
    if (strikes(t, FAULT_OVERFLOW)) poison(t, &t->p[2].grad, INFINITY);
    CHECK_OK(amp_copy(t->amp, &loss, t->loss, 4, AMP_COPY_TO_HOST));
    CHECK_OK(amp_sync(t->amp));
    if (strikes(t, FAULT_LOSS)) loss = INFINITY;
    t->losses[(t->o->attempts + 1) % LOSSES] = (double)loss;
    CHECK_OK(amp_step(t->o, t->scaler));
}

static int finite_double(double x) { return amp_is_finite_f64(&x); }

/* A record as a monitor makes it. */
static int trainee_record(trainee *t, amp_step_record *r) {
    int scaled = t->scaler != NULL && !t->scaler->desc.disable;
    memset(r, 0, sizeof *r);
    if (!amp_step_result_next(t->o, &r->result)) return 0;
    r->loss = t->losses[r->result.step % LOSSES];
    if (!finite_double(r->loss)) r->anomaly = AMP_ANOMALY_LOSS;
    else if (!finite_double((double)r->result.norm) && !scaled) r->anomaly = AMP_ANOMALY_GRADIENTS;
    else if (r->result.at_floor) r->anomaly = AMP_ANOMALY_FLOOR;
    else if (r->result.consecutive_skips >= t->max_skips) r->anomaly = AMP_ANOMALY_SKIPS;
    if (r->anomaly) r->action = AMP_NAN_RECOVER;
    return 1;
}

static void trainee_feed(trainee *t, const amp_step_record *record) {
    amp_recovery_event e;
    CHECK_OK(amp_recovery_step(t->recovery, record, &e));
    if (e.action == AMP_RECOVERY_RESTORED) CHECK(t->recovery->candidate.training == NULL);
    if (e.action != AMP_RECOVERY_NONE && t->n_events < EVENTS) t->events[t->n_events++] = e;
}

/* Trains until `target` steps are done, or an event stops it. */
static void trainee_run(trainee *t, int64_t target) {
    amp_step_record record;
    int calls = 0;
    while (t->o->attempts < target && ++calls < 500) {
        trainee_micro(t);
        while (trainee_record(t, &record)) {
            if (t->recovery != NULL) trainee_feed(t, &record);
            if (t->n_events > 0 && t->events[t->n_events - 1].action == AMP_RECOVERY_STOP) return;
        }
    }
    CHECK(calls < 500);
}

/* Everything that the next step depends on, as one blob. */
static void *trainee_blob(trainee *t, size_t *bytes) {
    amp_state *state;
    amp_step_result o;
    amp_dtype dtype = ampi_dtype(t->amp);
    uint8_t values[4 * HIDDEN * IN + 4 * OUT * HIDDEN];
    char key[32];
    void *data;
    int i;
    CHECK_OK(amp_step_result_flush(t->o));
    while (amp_step_result_next(t->o, &o)) {}
    CHECK_OK(amp_state_create(&state, NULL));
    for (i = 0; i < PARAMS; i++) {
        int64_t size = amp_tensor_count(&t->p[i].weight) * (int64_t)amp_dtype_size(t->p[i].weight.dtype);
        CHECK_OK(amp_copy(t->amp, values, t->p[i].weight.data, size, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(t->amp));
        snprintf(key, sizeof key, "w%d", i);
        CHECK_OK(amp_state_put(state, key, AMP_U8, values, size));
    }
    CHECK_OK(amp_optimizer_save(t->o, state, "o"));
    if (t->scaler) CHECK_OK(amp_scaler_save(t->scaler, state, "s"));
    if (t->loader) CHECK_OK(amp_loader_save(t->loader, state, "l"));
    CHECK_OK(amp_random_save(t->amp, state, "r"));
    CHECK_OK(amp_state_put(state, "dtype", AMP_U8, &dtype, 1));
    CHECK_OK(amp_state_encode(state, &data, bytes));
    amp_state_destroy(state);
    return data;
}

static int same_training(trainee *a, trainee *b) {
    size_t na, nb;
    void *da = trainee_blob(a, &na), *db = trainee_blob(b, &nb);
    int same = na == nb && memcmp(da, db, na) == 0;
    amp_file_free(NULL, da, na);
    amp_file_free(NULL, db, nb);
    return same;
}

/* What a host does that knows the mitigation beforehand. */
static void cure_by_hand(trainee *t, amp_dtype dtype, const char *layer) {
    amp_settings s;
    if (layer != NULL) CHECK_OK(amp_layer_override(t->amp, layer, AMP_F32));
    if (dtype == AMP_DTYPE_DEFAULT) return;
    memset(&s, 0, sizeof s);
    s.dtype = dtype;
    s.clip_norm = 0.5;
    CHECK_OK(amp_settings_apply(&s, t->amp, t->scaler, t->o, NULL));
}

/* One anomaly, one recovery: from the snapshot on, the run is a twin's that was cured there by hand. */
static void recovers(const training_plan *plan, amp_anomaly anomaly, int64_t snapshot, amp_mitigation mitigation, amp_dtype dtype, const char *layer) {
    static trainee t, twin;
    trainee_open(&t, plan, 1);
    trainee_run(&t, 24);
    CHECK_EQ(t.n_events, 1);
    CHECK_MSG(t.events[0].action == AMP_RECOVERY_RESTORED && t.events[0].anomaly == anomaly && t.events[0].mitigation == mitigation,
              "action %d, anomaly %d, mitigation %d: %s", (int)t.events[0].action, (int)t.events[0].anomaly, (int)t.events[0].mitigation, t.events[0].text);
    CHECK_EQ(t.events[0].step, snapshot);
    CHECK_EQ(t.events[0].retries, 1);
    CHECK(t.events[0].dtype == (dtype ? dtype : plan->dtype));
    if (layer != NULL) CHECK(strcmp(t.events[0].layer, layer) == 0 && strstr(t.events[0].text, layer) != NULL);
    CHECK(host.warnings >= 1 && strstr(host.last, "1303 step ") == host.last);
    trainee_open(&twin, plan, 0);
    trainee_run(&twin, snapshot);
    cure_by_hand(&twin, dtype, layer);
    trainee_run(&twin, 24);
    CHECK(same_training(&t, &twin));
    trainee_close(&t);
    trainee_close(&twin);
}

static training_plan plan_of(amp_dtype dtype, fault_kind kind, int64_t step) {
    training_plan p;
    memset(&p, 0, sizeof p);
    p.dtype = dtype;
    p.scaler = dtype == AMP_F16;
    p.interval = 4;
    p.anomaly.kind = kind;
    p.anomaly.step = step;
    return p;
}

/* A snapshot of 6 steps is taken when the record of step 4 comes, two steps late, and proven by that of step 7: anomaly in
   step 7 goes back to the beginning, in step 8 to 6. */
TEST(recovery_from_a_loss_that_is_not_finite) {
    static const amp_dtype dtypes[] = {AMP_F16, AMP_BF16, AMP_F32};
    static const fault_kind kinds[] = {FAULT_WEIGHT, FAULT_DATA, FAULT_LOSS};
    int i, k;
    for (i = 0; i < 3; i++)
        for (k = 0; k < 3; k++) {
            training_plan p = plan_of(dtypes[i], kinds[k], 8);
            amp_mitigation mitigation = dtypes[i] == AMP_F32 ? AMP_MITIGATE_NONE : AMP_MITIGATE_DTYPE;
            amp_dtype then = dtypes[i] == AMP_F16 ? AMP_BF16 : dtypes[i] == AMP_BF16 ? AMP_F32 : AMP_DTYPE_DEFAULT;
            recovers(&p, AMP_ANOMALY_LOSS, 6, mitigation, then, NULL);
            p.anomaly.step = 7;
            recovers(&p, AMP_ANOMALY_LOSS, 0, mitigation, then, NULL);
        }
}

TEST(recovery_from_gradients_that_are_not_finite) {
    training_plan p = plan_of(AMP_BF16, FAULT_GRADIENT, 8);
    recovers(&p, AMP_ANOMALY_GRADIENTS, 6, AMP_MITIGATE_LAYERS, AMP_DTYPE_DEFAULT, "net.a.*");
    p = plan_of(AMP_F32, FAULT_GRADIENT, 8);
    recovers(&p, AMP_ANOMALY_GRADIENTS, 6, AMP_MITIGATE_NONE, AMP_DTYPE_DEFAULT, NULL);
    p = plan_of(AMP_TF32, FAULT_GRADIENT, 8);
    p.backend = device();
    recovers(&p, AMP_ANOMALY_GRADIENTS, 6, AMP_MITIGATE_LAYERS, AMP_DTYPE_DEFAULT, "net.a.*");
}

/* The scale grew to 4 in six steps; the first overflows shrink it, and the third finds it at its floor. */
TEST(recovery_from_a_scale_at_its_floor) {
    training_plan p = plan_of(AMP_F16, FAULT_OVERFLOW, 9);
    p.init_scale = 1;
    recovers(&p, AMP_ANOMALY_FLOOR, 6, AMP_MITIGATE_DTYPE, AMP_BF16, NULL);
}

/* Five skips in a row are anomaly; the layer is tried first, and then the format. */
TEST(recovery_from_skips) {
    static trainee t, twin;
    training_plan p = plan_of(AMP_F16, FAULT_OVERFLOW, 10);
    p.max_skips = 5;
    trainee_open(&t, &p, 1);
    trainee_run(&t, 24);
    CHECK_EQ(t.n_events, 2);
    CHECK(t.events[0].anomaly == AMP_ANOMALY_SKIPS && t.events[0].mitigation == AMP_MITIGATE_LAYERS && strcmp(t.events[0].layer, "net.b.*") == 0);
    CHECK(t.events[0].dtype == AMP_F16 && t.events[0].step == 6 && t.events[0].retries == 1 && t.events[0].left == 2);
    CHECK(t.events[1].anomaly == AMP_ANOMALY_SKIPS && t.events[1].mitigation == AMP_MITIGATE_DTYPE && t.events[1].dtype == AMP_BF16);
    CHECK(t.events[1].step == 6 && t.events[1].retries == 2 && t.events[1].left == 1);
    trainee_open(&twin, &p, 0);
    trainee_run(&twin, 6);
    cure_by_hand(&twin, AMP_BF16, "net.b.*");
    trainee_run(&twin, 24);
    CHECK(same_training(&t, &twin));
    trainee_close(&t);
    trainee_close(&twin);
}

/* bf16 is passed over where the device has none; levels that store 16-bit weights keep their format; whatever masters and
   remainders there are come back. */
TEST(recovery_by_device_and_level) {
    static const struct { amp_level level; amp_dtype dtype; amp_master_kind master; } stored[] = {
        {AMP_LEVEL_O2, AMP_F16, AMP_MASTER_F32}, {AMP_LEVEL_O2, AMP_BF16, AMP_MASTER_REMAINDER},
        {AMP_LEVEL_O2, AMP_BF16, AMP_MASTER_STOCHASTIC}, {AMP_LEVEL_O3, AMP_BF16, AMP_MASTER_NONE}};
    training_plan p = plan_of(AMP_F16, FAULT_WEIGHT, 8);
    size_t i;
    p.backend = device();
    recovers(&p, AMP_ANOMALY_LOSS, 6, AMP_MITIGATE_DTYPE, AMP_BF16, NULL);
    p.backend = device();
    lacks_bf16 = 1;
    recovers(&p, AMP_ANOMALY_LOSS, 6, AMP_MITIGATE_DTYPE, AMP_F32, NULL);
    lacks_bf16 = 0;
    for (i = 0; i < sizeof stored / sizeof stored[0]; i++) {
        p = plan_of(stored[i].dtype, FAULT_WEIGHT, 8);
        p.level = stored[i].level;
        p.master = stored[i].master;
        recovers(&p, AMP_ANOMALY_LOSS, 6, AMP_MITIGATE_LAYERS, AMP_DTYPE_DEFAULT, "net.a.*");
    }
}

TEST(recovery_with_any_lag_and_accumulation) {
    static const int lags[] = {AMP_LAG_NONE, 1, 5};
    static const int64_t snapshots[] = {4, 5, 9};
    int i;
    for (i = 0; i < 3; i++) {
        training_plan p = plan_of(AMP_BF16, FAULT_DATA, snapshots[i] + 2);
        p.lag = lags[i];
        recovers(&p, AMP_ANOMALY_LOSS, snapshots[i], AMP_MITIGATE_DTYPE, AMP_F32, NULL);
        p.anomaly.step = snapshots[i] + 1;          /* the step that would prove it */
        recovers(&p, AMP_ANOMALY_LOSS, 0, AMP_MITIGATE_DTYPE, AMP_F32, NULL);
    }
}


/* Records that the host holds of steps that are undone: they change nothing, whatever is in them. */
TEST(recovery_passes_over_undone_records) {
    static trainee t, twin;
    amp_step_record held[EVENTS];
    training_plan p = plan_of(AMP_BF16, FAULT_WEIGHT, 12);
    int i, n = 0;
    p.lag = 5;
    trainee_open(&t, &p, 1);
    trainee_run(&t, 15);                        /* records up to 10 */
    CHECK_EQ(t.n_events, 0);
    CHECK_OK(amp_step_result_flush(t.o));
    while (trainee_record(&t, &held[n])) n++;
    CHECK_EQ(n, 5);
    CHECK(held[0].anomaly == AMP_ANOMALY_NONE && held[1].anomaly == AMP_ANOMALY_LOSS && held[4].anomaly == AMP_ANOMALY_LOSS);
    for (i = 0; i < 3; i++) trainee_feed(&t, &held[i]);
    CHECK(t.n_events == 1 && t.events[0].step == 9);
    CHECK_EQ(t.o->attempts, 9);
    trainee_micro(&t);                          /* two of the undone come only after the next step */
    for (; i < n; i++) trainee_feed(&t, &held[i]);
    CHECK_EQ(t.n_events, 1);
    trainee_run(&t, 40);
    CHECK_EQ(t.n_events, 1);
    CHECK(t.recovery->good.applied > 20);       /* the new run's records count */
    trainee_open(&twin, &p, 0);
    trainee_run(&twin, 9);
    cure_by_hand(&twin, AMP_F32, NULL);
    trainee_run(&twin, 40);
    CHECK(same_training(&t, &twin));
    trainee_close(&t);
    trainee_close(&twin);
}

/* The same with a monitor, whose epoch ends between the anomaly and its record: it then holds records of undone steps. */
TEST(recovery_from_a_monitors_records) {
    static trainee t, twin;
    training_plan p = plan_of(AMP_F16, FAULT_WEIGHT, 12);
    amp_monitor_desc m;
    amp_monitor *monitor = NULL;
    amp_step_record record;
    amp_epoch_record epoch;
    int calls = 0;
    p.lag = 5;
    memset(&m, 0, sizeof m);
    trainee_open(&t, &p, 1);
    m.optimizer = t.o;
    m.scaler = t.scaler;
    m.nan_action = AMP_NAN_RECOVER;
    CHECK_OK(amp_monitor_create(t.amp, &monitor, &m));
    while (t.o->attempts < 30 && ++calls < 100) {
        amp_step_info info;
        memset(&info, 0, sizeof info);
        trainee_micro(&t);
        info.loss = t.losses[t.o->attempts % LOSSES];
        CHECK_OK(amp_monitor_step(monitor, &info));
        if (calls == 15 || calls == 25) CHECK_OK(amp_monitor_epoch(monitor, &epoch));
        while (amp_monitor_next(monitor, &record)) trainee_feed(&t, &record);
    }
    CHECK_EQ(t.n_events, 1);
    CHECK(t.events[0].anomaly == AMP_ANOMALY_LOSS && t.events[0].step == 9 && t.events[0].dtype == AMP_BF16);
    CHECK_EQ(calls, 15 + 30 - 9);
    amp_monitor_destroy(monitor);
    trainee_open(&twin, &p, 0);
    trainee_run(&twin, 9);
    cure_by_hand(&twin, AMP_BF16, NULL);
    trainee_run(&twin, 30);
    CHECK(same_training(&t, &twin));
    trainee_close(&t);
    trainee_close(&twin);
}

/* The same anomaly, whatever is done: three recoveries, then the good snapshot is left in place. */
TEST(recovery_is_bounded) {
    static trainee t, twin;
    training_plan p = plan_of(AMP_F32, FAULT_DATA, 8);
    int i;
    p.anomaly.times = 100;
    trainee_open(&t, &p, 1);
    trainee_run(&t, 24);
    CHECK_EQ(t.n_events, 4);
    for (i = 0; i < 3; i++) CHECK(t.events[i].action == AMP_RECOVERY_RESTORED && t.events[i].retries == i + 1 && t.events[i].left == 2 - i);
    CHECK(t.events[3].action == AMP_RECOVERY_STOP && t.events[3].left == 0 && t.events[3].step == 6 && t.events[3].mitigation == AMP_MITIGATE_NONE);
    CHECK(strstr(t.events[3].text, "stop") != NULL);
    trainee_open(&twin, &p, 0);
    trainee_run(&twin, 6);
    CHECK(same_training(&t, &twin));
    trainee_close(&t);
    p.retries = AMP_NO_RETRIES;
    trainee_open(&t, &p, 1);
    trainee_run(&t, 24);
    CHECK(t.n_events == 1 && t.events[0].action == AMP_RECOVERY_STOP && t.events[0].step == 6);
    CHECK(same_training(&t, &twin));
    trainee_close(&t);
    trainee_close(&twin);
}

/* Retries count anew after .interval good steps: a later anomaly has all of them. */
TEST(recovery_counts_anew_after_good_steps) {
    static trainee t;
    training_plan p = plan_of(AMP_F32, FAULT_LOSS, 8);
    int step;
    p.retries = 1;
    trainee_open(&t, &p, 1);
    for (step = 1; step <= 24; step++) {
        trainee_run(&t, step);
        CHECK(t.recovery->streak < t.recovery->desc.interval || t.recovery->retries == 0);
    }
    CHECK_EQ(t.n_events, 1);
    CHECK_EQ(t.recovery->good.applied, 20);     /* due at 6 + 4, 14, 18: each two steps late, and that of 24 is not proven */
    t.anomaly.kind = FAULT_LOSS;
    t.anomaly.step = 26;
    t.anomaly.times = 0;
    trainee_run(&t, 36);
    CHECK(t.n_events == 2 && t.events[1].action == AMP_RECOVERY_RESTORED);
    trainee_close(&t);
    p.anomaly.times = 1;                        /* twice within fewer steps: no */
    trainee_open(&t, &p, 1);
    trainee_run(&t, 30);
    CHECK(t.n_events == 2 && t.events[1].action == AMP_RECOVERY_STOP);
    trainee_close(&t);
}

/* A record that comes in the middle of a cycle makes no snapshot: the next one between two steps does. */
TEST(snapshots_are_of_whole_cycles) {
    static trainee t;
    amp_step_record record;
    training_plan p = plan_of(AMP_F32, FAULT_NONE, 0);
    int i;
    p.accumulation = 3;
    trainee_open(&t, &p, 1);
    trainee_run(&t, 5);
    for (i = 0; i < 4; i++) trainee_micro(&t);
    CHECK(t.o->attempts == 6 && t.o->micro == 1 && trainee_record(&t, &record) && record.result.step == 4);
    trainee_feed(&t, &record);
    CHECK(t.recovery->candidate.training == NULL);
    trainee_run(&t, 7);
    CHECK(t.recovery->candidate.training != NULL && t.recovery->candidate.attempts == 7);
    trainee_close(&t);
}

/* Trouble that the host only wants reported is no recovery, and no proof. */
TEST(recovery_waits_to_be_asked) {
    static trainee t;
    amp_step_record record;
    amp_recovery_event e;
    training_plan p = plan_of(AMP_F32, FAULT_LOSS, 7);
    trainee_open(&t, &p, 1);
    while (t.o->attempts < 9) {
        trainee_micro(&t);
        while (trainee_record(&t, &record)) {
            if (record.anomaly) record.action = AMP_NAN_SKIP;
            CHECK_OK(amp_recovery_step(t.recovery, &record, &e));
            CHECK(e.action == AMP_RECOVERY_NONE && e.retries == 0 && e.left == 3);
        }
    }
    CHECK(t.recovery->good.applied == 0 && t.recovery->candidate.training == NULL);
    trainee_run(&t, 14);
    CHECK(t.recovery->good.applied == 10);      /* taken with the record of step 8 */
    trainee_close(&t);
}

/* A copy of a weight that was made in the meantime, by an evaluation say, is not taken for one of the restored weight. */
TEST(recovery_drops_casts) {
    static trainee t;
    amp_step_record record;
    amp_recovery_event e;
    amp_autocast_desc region;
    amp_tensor cast;
    uint16_t expected[OUT * HIDDEN];
    training_plan p = plan_of(AMP_F32, FAULT_WEIGHT, 2);
    memset(&region, 0, sizeof region);
    memset(&record, 0, sizeof record);
    region.dtype = AMP_BF16;
    trainee_open(&t, &p, 1);
    CHECK_OK(amp_convert(expected, AMP_BF16, t.p[2].weight.data, AMP_F32, OUT * HIDDEN, NULL, NULL));
    CHECK_OK(amp_autocast_begin(t.amp, &region));
    trainee_micro(&t);
    trainee_micro(&t);
    CHECK_OK(amp_autocast_cast(t.amp, &t.p[2], AMP_BF16, &cast));
    CHECK(memcmp(cast.data, expected, sizeof expected) != 0);
    record.anomaly = AMP_ANOMALY_LOSS;
    record.action = AMP_NAN_RECOVER;
    record.result.step = 2;
    CHECK_OK(amp_recovery_step(t.recovery, &record, &e));
    CHECK(e.action == AMP_RECOVERY_RESTORED && e.step == 0);
    CHECK_OK(amp_autocast_cast(t.amp, &t.p[2], AMP_BF16, &cast));
    CHECK(memcmp(cast.data, expected, sizeof expected) == 0);
    CHECK_OK(amp_autocast_end(t.amp));
    trainee_close(&t);
}

/* ---- The host's policy */

static void wish_policy(void *user, amp_recovery_event *event) {
    trainee *t = (trainee *)user;
    t->asked++;
    CHECK(event->text[0] != 0);
    if (t->wish.action) event->action = t->wish.action;
    if ((int)t->wish.mitigation >= 0) event->mitigation = t->wish.mitigation;
    if (t->wish.layer[0]) memcpy(event->layer, t->wish.layer, sizeof event->layer);
    if (t->lr_drops) CHECK_OK(amp_optimizer_set_lr(t->o, t->o->desc.lr / 2));
}

static void wishes(trainee *t, training_plan *p, amp_recovery_action action, int mitigation, const char *layer) {
    p->policy = wish_policy;
    trainee_open(t, p, 1);
    t->wish.action = action;
    t->wish.mitigation = (amp_mitigation)mitigation;
    snprintf(t->wish.layer, sizeof t->wish.layer, "%s", layer);
    trainee_run(t, 20);
}

TEST(recovery_asks_the_policy) {
    static trainee t, twin;
    training_plan p = plan_of(AMP_BF16, FAULT_DATA, 8);
    trainee_open(&twin, &p, 0);
    trainee_run(&twin, 6);
    wishes(&t, &p, AMP_RECOVERY_STOP, -1, "");
    CHECK(t.asked == 1 && t.n_events == 1 && t.events[0].action == AMP_RECOVERY_STOP && t.events[0].mitigation == AMP_MITIGATE_NONE);
    CHECK(same_training(&t, &twin));
    trainee_close(&t);
    wishes(&t, &p, AMP_RECOVERY_NONE, AMP_MITIGATE_LAYERS, "net.b.*");
    CHECK(t.n_events == 1 && t.events[0].mitigation == AMP_MITIGATE_LAYERS && t.events[0].dtype == AMP_BF16);
    cure_by_hand(&twin, AMP_DTYPE_DEFAULT, "net.b.*");
    trainee_run(&twin, 20);
    CHECK(same_training(&t, &twin));
    trainee_close(&t);
    trainee_close(&twin);
    wishes(&t, &p, (amp_recovery_action)99, 99, "");        /* nonsense is as if nothing was said */
    CHECK(t.n_events == 1 && t.events[0].action == AMP_RECOVERY_RESTORED && t.events[0].mitigation == AMP_MITIGATE_DTYPE && t.events[0].dtype == AMP_F32);
    trainee_close(&t);
    wishes(&t, &p, AMP_RECOVERY_HALVE_BATCH, AMP_MITIGATE_NONE, "");    /* no answer to this question */
    CHECK(t.n_events == 1 && t.events[0].action == AMP_RECOVERY_RESTORED && t.o->desc.accumulation == 1);
    trainee_close(&t);
    p = plan_of(AMP_F32, FAULT_DATA, 8);
    wishes(&t, &p, AMP_RECOVERY_NONE, AMP_MITIGATE_DTYPE, "");  /* there is no wider one */
    CHECK(t.n_events == 1 && t.events[0].mitigation == AMP_MITIGATE_NONE && t.events[0].dtype == AMP_F32);
    trainee_close(&t);
    wishes(&t, &p, AMP_RECOVERY_NONE, AMP_MITIGATE_LAYERS, "");
    CHECK(t.n_events == 1 && t.events[0].mitigation == AMP_MITIGATE_NONE && t.amp->n_layers == 0);
    trainee_close(&t);
    p = plan_of(AMP_F16, FAULT_OVERFLOW, 10);       /* the scaler stays in fp16, and at its scale */
    p.max_skips = 5;
    wishes(&t, &p, AMP_RECOVERY_NONE, AMP_MITIGATE_NONE, "");
    CHECK(t.n_events == 4 && t.events[3].action == AMP_RECOVERY_STOP && !t.scaler->desc.disable && amp_scaler_scale(t.scaler) == 262144);
    trainee_close(&t);
}

/* NONE: go on with what is there. */
static void shrug_policy(void *user, amp_recovery_event *event) { ((trainee *)user)->asked++; event->action = AMP_RECOVERY_NONE; }

TEST(recovery_can_be_declined) {
    static trainee t, twin;
    training_plan p = plan_of(AMP_F32, FAULT_LOSS, 8);
    p.policy = shrug_policy;
    trainee_open(&t, &p, 1);
    trainee_open(&twin, &p, 0);
    trainee_run(&t, 20);
    trainee_run(&twin, 20);
    CHECK(t.asked == 1 && t.n_events == 0 && same_training(&t, &twin) && t.recovery->retries == 0);
    trainee_close(&t);
    trainee_close(&twin);
}

/* A learning rate that the policy sets stays; one that it leaves comes back with the snapshot. */
TEST(recovery_keeps_the_policys_learning_rate) {
    static trainee t, twin;
    training_plan p = plan_of(AMP_F32, FAULT_DATA, 8);
    int drop;
    for (drop = 0; drop < 2; drop++) {
        p.policy = wish_policy;
        trainee_open(&t, &p, 1);
        t.wish.mitigation = (amp_mitigation)-1;
        t.lr_drops = drop;
        trainee_run(&t, 7);
        CHECK_OK(amp_optimizer_set_lr(t.o, 0.004));
        trainee_run(&t, 20);
        CHECK_EQ(t.n_events, 1);
        trainee_open(&twin, &p, 0);
        trainee_run(&twin, 6);
        if (drop) CHECK_OK(amp_optimizer_set_lr(twin.o, 0.002));
        trainee_run(&twin, 20);
        CHECK(same_training(&t, &twin));
        trainee_close(&t);
        trainee_close(&twin);
    }
}

/* ---- What the host wants restored too */

TEST(recovery_restores_what_is_the_hosts) {
    static trainee t, twin;
    training_plan p = plan_of(AMP_BF16, FAULT_WEIGHT, 8);
    amp_step_record record;
    amp_recovery_event e;
    amp_recovery_desc d;
    p.own_state = 1;
    p.no_loader = 1;                            /* whose data are a function of its own count */
    trainee_open(&t, &p, 1);
    trainee_run(&t, 20);
    CHECK_EQ(t.n_events, 1);
    CHECK_EQ(t.host_count, 20);
    trainee_open(&twin, &p, 0);
    trainee_run(&twin, 6);
    cure_by_hand(&twin, AMP_F32, NULL);
    trainee_run(&twin, 20);
    CHECK(same_training(&t, &twin));
    trainee_close(&twin);
    t.fail_save = 77;                           /* keeps the snapshot before */
    host.warnings = 0;
    trainee_run(&t, 60);
    CHECK(t.recovery->good.applied < 30 && host.warnings > 1 && strstr(host.last, "77") != NULL);
    t.fail_save = 0;
    trainee_run(&t, 70);
    CHECK(t.recovery->good.applied > 50);
    t.fail_load = AMP_ERR_READ;
    memset(&record, 0, sizeof record);
    record.result.step = 69;
    record.anomaly = AMP_ANOMALY_LOSS;
    record.action = AMP_NAN_RECOVER;
    memset(&e, 0x5a, sizeof e);
    CHECK_ERR(amp_recovery_step(t.recovery, &record, &e), AMP_ERR_READ);
    CHECK(strstr(amp_last_error(), "load") != NULL && e.action == AMP_RECOVERY_NONE);
    t.fail_load = 0;
    CHECK_OK(amp_recovery_step(t.recovery, &record, &e));
    CHECK(e.action == AMP_RECOVERY_RESTORED && t.host_count == e.step);
    memset(&d, 0, sizeof d);
    d.params = t.p; d.n_params = PARAMS; d.optimizer = t.o; d.save = own_save; d.load = own_load; d.user = &t;
    t.fail_save = 1234;
    amp_recovery_destroy(t.recovery);
    CHECK_ERR(amp_recovery_create(t.amp, &t.recovery, &d), AMP_ERR_STATE);
    CHECK(t.recovery == NULL && strstr(amp_last_error(), "save returned 1234") != NULL);
    trainee_close(&t);
}

/* ---- Memory */

/* Whichever allocation of a snapshot fails, the one before stays, and recovery works from it. */
TEST(snapshots_survive_failing_allocations) {
    static trainee t;
    training_plan p = plan_of(AMP_BF16, FAULT_NONE, 0);
    amp_step_record record;
    int64_t blocks;
    int n, done = 0;
    for (n = 1; !done && n < 400; n++) {
        trainee_open(&t, &p, 1);
        trainee_run(&t, 5);                     /* records up to 3 */
        trainee_micro(&t);
        CHECK(trainee_record(&t, &record));
        blocks = host.blocks;
        host.fail_alloc = n;
        trainee_feed(&t, &record);
        done = host.fail_alloc > 0;
        host.fail_alloc = 0;
        CHECK(t.recovery->good.training != NULL && t.recovery->good.applied == 0);
        CHECK((t.recovery->candidate.training != NULL) == done);
        CHECK(done || (host.blocks == blocks && host.warnings == 1 && strstr(host.last, "1304") != NULL));
        trainee_run(&t, 12);
        CHECK(t.recovery->good.applied == (done ? 6 : 0));
        trainee_run(&t, 14);
        CHECK(t.recovery->good.applied == 10);  /* the next one */
        trainee_close(&t);
        CHECK_EQ(host.blocks, 0);
    }
    CHECK(done && n > 10);
}

/* Ten steps, up to the record of the eighth. */
static void trainee_until_anomaly(trainee *t, const training_plan *p, amp_step_record *record) {
    trainee_open(t, p, 1);
    while (t->o->attempts < 10) {
        trainee_micro(t);
        while (t->o->attempts < 10 && trainee_record(t, record)) trainee_feed(t, record);
    }
    CHECK(trainee_record(t, record));
}

TEST(recovery_survives_failing_allocations) {
    static trainee t, twin;
    training_plan p = plan_of(AMP_BF16, FAULT_WEIGHT, 8);
    amp_step_record record;
    amp_recovery_event e;
    trainee_open(&twin, &p, 0);
    trainee_run(&twin, 6);
    cure_by_hand(&twin, AMP_F32, NULL);
    trainee_until_anomaly(&t, &p, &record);
    CHECK(record.anomaly == AMP_ANOMALY_LOSS);
    host.fail_alloc = 1;                        /* going back takes no memory */
    CHECK_OK(amp_recovery_step(t.recovery, &record, &e));
    CHECK_EQ(host.fail_alloc, 1);
    host.fail_alloc = 0;
    CHECK(e.action == AMP_RECOVERY_RESTORED && e.step == 6 && e.dtype == AMP_F32 && same_training(&t, &twin));
    trainee_close(&t);
    p = plan_of(AMP_BF16, FAULT_GRADIENT, 8);
    trainee_until_anomaly(&t, &p, &record);
    CHECK(record.anomaly == AMP_ANOMALY_GRADIENTS);
    host.fail_alloc = 1;                        /* what the layer's override needs */
    CHECK_ERR(amp_recovery_step(t.recovery, &record, &e), AMP_ERR_MEMORY);
    CHECK_OK(amp_recovery_step(t.recovery, &record, &e));       /* once more, as the manual says */
    CHECK(e.action == AMP_RECOVERY_RESTORED && e.step == 6 && e.mitigation == AMP_MITIGATE_LAYERS);
    trainee_close(&t);
    trainee_close(&twin);
}

/* A step whose activations need memory that is not there before the micro-batch was halved twice.  Its gradients are
   those of the whole batch: sums over the batch in another order, so each differs by at most (terms) u times the sum of
   magnitudes from the exact one, and SGD with learning rate 1 writes it into the weight with one rounding more. */
enum { WHOLE = 16, WIDE = 5, TALL = 3 };
typedef struct halving { amp_context *amp; amp_param p; amp_optimizer *o; void *w, *g; float x[WHOLE * WIDE], dy[WHOLE * TALL]; int64_t most; int refused; } halving;

static void halving_open(halving *h, const amp_backend *backend) {
    amp_optimizer_desc d;
    float w[TALL * WIDE];
    memset(h, 0, sizeof *h);
    memset(&d, 0, sizeof d);
    h->amp = open_host(backend, AMP_F32);
    CHECK_OK(amp_alloc(h->amp, &h->w, sizeof w));
    CHECK_OK(amp_alloc(h->amp, &h->g, sizeof w));
    ampt_uniform(w, TALL * WIDE, 1, 1, 1, 0);
    ampt_uniform(h->x, WHOLE * WIDE, 1, 2, 1, 0);
    ampt_uniform(h->dy, WHOLE * TALL, 1, 3, 1, 0);
    CHECK_OK(amp_copy(h->amp, h->w, w, sizeof w, AMP_COPY_TO_DEVICE));
    CHECK_OK(amp_sync(h->amp));
    h->p.name = "w";
    h->p.weight = amp_tensor2(h->w, AMP_F32, TALL, WIDE);
    h->p.grad = amp_tensor2(h->g, AMP_F32, TALL, WIDE);
    d.kind = AMP_SGD; d.lr = 1; d.params = &h->p; d.n_params = 1;
    CHECK_OK(amp_param_register(h->amp, &h->p, 1));
    CHECK_OK(amp_optimizer_create(h->amp, &h->o, &d));
}

static void halving_close(halving *h) {
    amp_optimizer_destroy(h->o);
    amp_free(h->amp, h->w);
    amp_free(h->amp, h->g);
    amp_close(h->amp);
}

static amp_result halving_work(halving *h, int from, int n, void **x, void **y, void **dy) {
    amp_linear_op op;
    float scaled[WHOLE * TALL];
    amp_result r;
    int i;
    for (i = 0; i < n * TALL; i++) scaled[i] = h->dy[from * TALL + i] / (float)n;
    AMPI_TRY(amp_alloc(h->amp, x, n * WIDE * 4));
    AMPI_TRY(amp_alloc(h->amp, y, n * TALL * 4));
    AMPI_TRY(amp_alloc(h->amp, dy, n * TALL * 4));
    AMPI_TRY(amp_copy(h->amp, *x, h->x + from * WIDE, n * WIDE * 4, AMP_COPY_TO_DEVICE));
    AMPI_TRY(amp_copy(h->amp, *dy, scaled, n * TALL * 4, AMP_COPY_TO_DEVICE));
    AMPI_TRY(amp_sync(h->amp));
    memset(&op, 0, sizeof op);
    op.x = amp_tensor2(*x, AMP_F32, n, WIDE);
    op.y = amp_tensor2(*y, AMP_F32, n, TALL);
    op.dy = amp_tensor2(*dy, AMP_F32, n, TALL);
    op.weight = &h->p;
    AMPI_TRY(amp_autocast_begin(h->amp, NULL));
    r = amp_linear(h->amp, &op);
    AMPI_TRY(amp_autocast_end(h->amp));
    if (r == AMP_OK) r = amp_linear_backward(h->amp, &op);
    return r == AMP_OK ? amp_step(h->o, NULL) : r;
}

/* Samples from..from + n: the mean over them. */
static amp_result halving_micro(halving *h, int from, int n) {
    void *x = NULL, *y = NULL, *dy = NULL;
    amp_result r = n > h->most ? AMP_ERR_MEMORY : halving_work(h, from, n, &x, &y, &dy);
    h->refused += r != AMP_OK;
    amp_free(h->amp, x);
    amp_free(h->amp, y);
    amp_free(h->amp, dy);
    return r;
}

/* A step in as many micro-batches as it takes; returns how often it was out of memory. */
static int halving_step(halving *h, amp_recovery *recovery, int *micro, const amp_recovery_action *expected) {
    amp_recovery_event e;
    int events = 0, i;
    while (events < 6) {
        amp_result r = AMP_OK;
        for (i = 0; i < WHOLE && r == AMP_OK; i += *micro) r = halving_micro(h, i, *micro);
        if (r == AMP_OK) return events;
        CHECK_ERR(r, AMP_ERR_MEMORY);
        CHECK_OK(amp_recovery_memory(recovery, &e));
        CHECK(e.action == expected[events] && strstr(e.text, "out of memory") != NULL);
        events++;
        if (e.action == AMP_RECOVERY_HALVE_BATCH) *micro /= 2;
        CHECK_EQ(h->o->desc.accumulation, WHOLE / *micro);
    }
    return events;
}

static void mean_over(void *user, amp_recovery_event *event) {
    trainee *t = (trainee *)user;
    t->asked++;
    CHECK(event->action == AMP_RECOVERY_HALVE_BATCH);
}

enum { LATE = 3, LATE_NUMBERS = 20 };
static void late_step(amp_optimizer *o, amp_param *p, int step, int frozen) {
    float g[LATE_NUMBERS];
    int i, k;
    for (i = 0; i < LATE; i++) {
        if (i == 1 && frozen) continue;
        for (k = 0; k < LATE_NUMBERS; k++) g[k] = amp_random_uniform((uint64_t)step, (uint64_t)(i * 100 + k)) - 0.5f;
        (void)amp_param_accumulate(&p[i]);
        memcpy(p[i].grad.data, g, sizeof g);
    }
    CHECK_OK(amp_step(o, NULL));
}
/* Going back to before a parameter was unfrozen restores it too, and the same steps give the same bits. */
TEST(recovery_goes_back_to_before_a_parameter_was_unfrozen) {
    amp_desc c = host_desc(NULL, AMP_F32);
    amp_context *amp;
    amp_model *m;
    amp_param *p;
    amp_optimizer_desc d;
    amp_optimizer *o;
    amp_recovery_desc rd;
    amp_recovery *r;
    amp_recovery_event e;
    amp_step_record record;
    int64_t n;
    float start[LATE][LATE_NUMBERS], end[LATE][LATE_NUMBERS];
    int i, step, turn;
    CHECK_OK(amp_open(&amp, &c));
    CHECK_OK(amp_model_create(amp, &m, 1, 0));
    for (i = 0; i < LATE; i++) (void)amp_model_param(m, i == 1 ? "late" : i ? "c" : "a", LATE_NUMBERS, 0, AMP_INIT_NORMAL, 1);
    CHECK_OK(amp_model_params(m, &p, &n));
    CHECK_OK(amp_model_freeze(m, "late", 1));
    memset(&d, 0, sizeof d);
    d.params = p; d.n_params = n; d.lr = 0.01;
    CHECK_OK(amp_optimizer_create(amp, &o, &d));
    memset(&rd, 0, sizeof rd);
    rd.params = p; rd.n_params = 1; rd.optimizer = o;
    CHECK_OK(amp_recovery_create(amp, &r, &rd));
    for (i = 0; i < LATE; i++) memcpy(start[i], p[i].weight.data, sizeof start[i]);
    for (turn = 0; turn < 2; turn++) {
        for (step = 0; step < 5; step++) {
            if (step == 2 && turn == 0) CHECK_OK(amp_model_freeze(m, "late", 0));
            late_step(o, p, step, step < 2);
        }
        for (i = 0; i < LATE; i++) CHECK(memcmp(start[i], p[i].weight.data, sizeof start[i]) != 0);
        for (i = 0; i < LATE && turn == 1; i++) CHECK(memcmp(end[i], p[i].weight.data, sizeof end[i]) == 0);
        for (i = 0; i < LATE; i++) memcpy(end[i], p[i].weight.data, sizeof end[i]);
        memset(&record, 0, sizeof record);
        record.result.step = 100 + turn;
        record.anomaly = AMP_ANOMALY_LOSS;
        record.action = AMP_NAN_RECOVER;
        CHECK_OK(amp_recovery_step(r, &record, &e));
        CHECK(e.action == AMP_RECOVERY_RESTORED);
        for (i = 0; i < LATE; i++) CHECK(memcmp(start[i], p[i].weight.data, sizeof start[i]) == 0);
    }
    amp_recovery_destroy(r);
    amp_optimizer_destroy(o);
    amp_model_destroy(m);
    amp_close(amp);
    CHECK_EQ(host.blocks, 0);
}

TEST(memory_recovery_halves_the_batch) {
    static halving whole, h;
    static trainee host_side;
    amp_recovery_desc d;
    amp_recovery *recovery;
    amp_recovery_event e;
    float before[TALL * WIDE], a[TALL * WIDE], b[TALL * WIDE];
    int micro = WHOLE, i, k, events;
    static const amp_recovery_action expected[] = {AMP_RECOVERY_RETRY, AMP_RECOVERY_HALVE_BATCH, AMP_RECOVERY_HALVE_BATCH};
    halving_open(&whole, NULL);
    whole.most = WHOLE;
    memcpy(before, whole.w, sizeof before);
    CHECK_OK(halving_micro(&whole, 0, WHOLE));
    memcpy(a, whole.w, sizeof a);
    halving_close(&whole);
    halving_open(&h, NULL);
    memset(&d, 0, sizeof d);
    d.params = &h.p; d.n_params = 1; d.optimizer = h.o; d.policy = mean_over; d.user = &host_side;
    host_side.asked = 0;
    CHECK_OK(amp_recovery_create(h.amp, &recovery, &d));
    h.most = WHOLE / 4;
    events = halving_step(&h, recovery, &micro, expected);
    CHECK(events == 3 && host_side.asked == 2 && micro == WHOLE / 4 && h.refused == 3);
    CHECK_EQ(h.o->attempts, 1);
    memcpy(b, h.w, sizeof b);
    for (i = 0; i < TALL; i++)
        for (k = 0; k < WIDE; k++) {
            double sum = 0, u = ldexp(1, -24), bound;
            int s;
            for (s = 0; s < WHOLE; s++) sum += fabs((double)h.dy[s * TALL + i] * (double)h.x[s * WIDE + k]) / WHOLE;
            bound = 2 * (WHOLE + 1) * u * sum + u * (fabs((double)a[i * WIDE + k]) + fabs((double)b[i * WIDE + k]));
            CHECK_MSG(fabs((double)a[i * WIDE + k] - (double)b[i * WIDE + k]) <= bound, "%d %d: %g and %g", i, k, (double)a[i * WIDE + k], (double)b[i * WIDE + k]);
            CHECK(a[i * WIDE + k] != before[i * WIDE + k]);
        }
    CHECK_OK(amp_recovery_memory(recovery, &e));        /* another step: first a cleanup again */
    CHECK_EQ(e.action, AMP_RECOVERY_RETRY);
    CHECK_EQ(h.o->desc.accumulation, 4);
    amp_recovery_destroy(recovery);
    halving_close(&h);
    CHECK_EQ(host.blocks, 0);
}

/* Doubled again the step has the bits of one that was never halved; the policy may decline, and then it waits as long again. */
static int64_t doubling_declined;
static void doubling_policy(void *user, amp_recovery_event *event) {
    (void)user;
    if (event->action != AMP_RECOVERY_DOUBLE_BATCH) return;
    CHECK(strstr(event->text, "twice its size again") != NULL);
    if (doubling_declined-- > 0) event->action = AMP_RECOVERY_NONE;
}

TEST(memory_recovery_doubles_the_batch_again) {
    static const amp_recovery_action expected[] = {AMP_RECOVERY_RETRY, AMP_RECOVERY_HALVE_BATCH, AMP_RECOVERY_HALVE_BATCH};
    static halving whole, h;
    amp_recovery_desc d;
    amp_recovery *recovery, *resumed;
    amp_recovery_event e;
    amp_step_record record;
    amp_state *state;
    float a[TALL * WIDE], b[TALL * WIDE];
    int64_t numbers[6], bad[6];
    int micro = WHOLE, step, doubled = 0;
    memset(&d, 0, sizeof d);
    memset(&record, 0, sizeof record);
    halving_open(&whole, NULL);
    halving_open(&h, NULL);
    whole.most = WHOLE;
    d.params = &h.p; d.n_params = 1; d.optimizer = h.o; d.policy = doubling_policy;
    d.batch_growth_interval = -2;
    CHECK_ERR(amp_recovery_create(h.amp, &recovery, &d), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), ".batch_growth_interval = -2") != NULL);
    d.batch_growth_interval = 2;
    CHECK_OK(amp_recovery_create(h.amp, &recovery, &d));
    doubling_declined = 1;
    h.most = WHOLE / 4;
    CHECK_EQ(halving_step(&h, recovery, &micro, expected), 3);
    h.most = WHOLE;                             /* there is room again */
    for (step = 1; step <= 8; step++) {
        record.result.step = record.result.applied_steps = step;
        record.result.applied = 1;
        CHECK_OK(amp_recovery_step(recovery, &record, &e));
        CHECK_EQ(e.action, step == 4 || step == 6 ? AMP_RECOVERY_DOUBLE_BATCH : AMP_RECOVERY_NONE);     /* 2: declined */
        if (e.action == AMP_RECOVERY_DOUBLE_BATCH) {
            CHECK(strstr(host.last, "1307") != NULL);
            micro *= 2;
            doubled++;
        }
        CHECK_EQ(h.o->desc.accumulation, WHOLE / micro);
        CHECK_EQ(halving_step(&h, recovery, &micro, expected), 0);
    }
    CHECK(doubled == 2 && micro == WHOLE);
    CHECK_OK(amp_copy(h.amp, whole.w, h.w, sizeof a, AMP_COPY_ON_DEVICE));      /* from here on the two are one */
    for (step = 0; step < 2; step++) { CHECK_OK(halving_micro(&whole, 0, WHOLE)); CHECK_OK(halving_micro(&h, 0, WHOLE)); }
    memcpy(a, whole.w, sizeof a);
    memcpy(b, h.w, sizeof b);
    CHECK(memcmp(a, b, sizeof a) == 0);
    /* Saved and loaded it goes on counting; numbers that no recovery saved are refused. */
    h.most = WHOLE / 2;
    CHECK_EQ(halving_step(&h, recovery, &micro, expected), 2);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_recovery_save(recovery, state, "run"));
    CHECK_OK(amp_state_get(state, "run.recovery", AMP_I64, numbers, 6));
    CHECK(numbers[0] == 1 && numbers[1] == 0 && numbers[2] == 1 && numbers[3] == 0);
    CHECK_OK(amp_recovery_create(h.amp, &resumed, &d));
    CHECK_OK(amp_recovery_load(resumed, state, "run"));
    for (step = 1; step <= 4; step++) {         /* a doubling failed, so it takes twice as long */
        record.result.step = record.result.applied_steps = 20 + step;
        CHECK_OK(amp_recovery_step(resumed, &record, &e));
        CHECK_EQ(e.action, step == 4 ? AMP_RECOVERY_DOUBLE_BATCH : AMP_RECOVERY_NONE);
    }
    CHECK_ERR(amp_recovery_load(resumed, state, "other"), AMP_ERR_NAME);
    for (int i = 0; i < 12; i++) {
        amp_state *wrong;
        memcpy(bad, numbers, sizeof bad);
        bad[i % 6] = i >= 6 ? INT64_MAX : i == 3 ? 2 : -1;
        CHECK_OK(amp_state_create(&wrong, NULL));
        CHECK_OK(amp_state_put(wrong, "run.recovery", AMP_I64, bad, 6));
        CHECK_ERR(amp_recovery_load(resumed, wrong, "run"), AMP_ERR_MISMATCH);
        amp_state_destroy(wrong);
    }
    CHECK_ERR(amp_recovery_save(recovery, state, ""), AMP_ERR_RANGE);
    CHECK_ERR(amp_recovery_save(recovery, state, "a-prefix-that-is-longer-than-forty-bytes-is"), AMP_ERR_RANGE);
    CHECK_ERR(amp_recovery_load(resumed, state, ""), AMP_ERR_RANGE);
    CHECK_ERR(amp_recovery_load(resumed, state, "a-prefix-that-is-longer-than-forty-bytes-is"), AMP_ERR_RANGE);
    CHECK_ERR(amp_recovery_save(NULL, state, "run"), AMP_ERR_NULL);
    CHECK_ERR(amp_recovery_load(resumed, NULL, "run"), AMP_ERR_NULL);
    CHECK_ERR(amp_recovery_batch(NULL, NULL), AMP_ERR_NULL);
    CHECK_OK(amp_optimizer_set_accumulation(h.o, 2));
    CHECK_OK(halving_micro(&h, 0, WHOLE / 2));
    CHECK_ERR(amp_recovery_batch(resumed, NULL), AMP_ERR_STATE);
    CHECK_OK(halving_micro(&h, WHOLE / 2, WHOLE / 2));
    CHECK_OK(amp_recovery_batch(resumed, NULL));
    amp_state_destroy(state);
    amp_recovery_destroy(resumed);
    amp_recovery_destroy(recovery);
    halving_close(&h);
    halving_close(&whole);
}

/* An allocator that fails once, at any call of a step: after a cleanup the same step has the same bits. */
TEST(memory_recovery_from_any_failing_allocation) {
    static const amp_recovery_action expected[] = {AMP_RECOVERY_RETRY, AMP_RECOVERY_STOP};
    static halving whole, h;
    amp_recovery_desc d;
    amp_recovery *recovery;
    float a[TALL * WIDE];
    int n, done = 0, events, failures = 0;
    halving_open(&whole, NULL);
    whole.most = WHOLE;
    CHECK_OK(halving_micro(&whole, 0, WHOLE));
    memcpy(a, whole.w, sizeof a);
    halving_close(&whole);
    for (n = 1; !done && n < 200; n++) {
        int micro = WHOLE;
        halving_open(&h, NULL);
        h.most = WHOLE;
        memset(&d, 0, sizeof d);
        d.params = &h.p; d.n_params = 1; d.optimizer = h.o;
        CHECK_OK(amp_recovery_create(h.amp, &recovery, &d));
        host.fail_alloc = n;
        events = halving_step(&h, recovery, &micro, expected);
        done = host.fail_alloc > 0;
        host.fail_alloc = 0;
        CHECK(events <= (done ? 0 : 1) && micro == WHOLE && h.o->attempts == 1);     /* some do without */
        failures += events;
        CHECK(memcmp(a, h.w, sizeof a) == 0);
        amp_recovery_destroy(recovery);
        halving_close(&h);
        CHECK_EQ(host.blocks, 0);
    }
    CHECK(done && failures >= 3);
}

/* What a part of a cycle left in the gradients does not count: the second try begins with the first micro-batch. */
static amp_result halving_cast(halving *h) {
    amp_tensor cast;
    amp_result r;
    CHECK_OK(amp_autocast_begin(h->amp, NULL));
    r = amp_autocast_cast(h->amp, &h->p, AMP_BF16, &cast);
    CHECK_OK(amp_autocast_end(h->amp));
    return r;
}

TEST(memory_recovery_drops_the_cycle) {
    amp_cache_info cache;
    static halving whole, h;
    amp_recovery_desc d;
    amp_recovery *recovery;
    amp_recovery_event e;
    int i;
    halving_open(&whole, NULL);
    halving_open(&h, NULL);
    whole.most = h.most = WHOLE;
    CHECK_OK(amp_optimizer_set_accumulation(whole.o, 2));
    CHECK_OK(amp_optimizer_set_accumulation(h.o, 2));
    memset(&d, 0, sizeof d);
    d.params = &h.p; d.n_params = 1; d.optimizer = h.o;
    CHECK_OK(amp_recovery_create(h.amp, &recovery, &d));
    CHECK_OK(halving_micro(&h, 4, 8));
    CHECK_OK(halving_cast(&h));
    CHECK_OK(amp_cast_cache_info(h.amp, &cache));
    CHECK(cache.bytes > 0);
    CHECK_OK(amp_recovery_memory(recovery, &e));
    CHECK_EQ(e.action, AMP_RECOVERY_RETRY);
    CHECK_OK(amp_cast_cache_info(h.amp, &cache));
    CHECK(cache.bytes == 0 && strstr(e.text, "step 1:") != NULL && strstr(host.last, "1305") != NULL);
    CHECK(h.o->micro == 0 && h.p.grad_live == 0 && h.o->desc.accumulation == 2);
    for (i = 0; i < WHOLE; i += 8) { CHECK_OK(halving_micro(&whole, i, 8)); CHECK_OK(halving_micro(&h, i, 8)); }
    CHECK(memcmp(whole.w, h.w, sizeof(float) * TALL * WIDE) == 0);
    amp_recovery_destroy(recovery);
    halving_close(&whole);
    halving_close(&h);
}

/* The policy may stop, or go back in another precision, instead of halving. */
TEST(memory_recovery_asks_the_policy) {
    static trainee t, twin;
    amp_recovery_event e;
    training_plan p = plan_of(AMP_F16, FAULT_NONE, 0);
    int restored;
    p.policy = wish_policy;
    trainee_open(&t, &p, 1);                    /* before any record came there is none to pass over */
    t.wish.action = AMP_RECOVERY_RESTORED;
    trainee_run(&t, 2);
    CHECK_OK(amp_recovery_memory(t.recovery, &e));
    CHECK_OK(amp_recovery_memory(t.recovery, &e));
    CHECK(e.action == AMP_RECOVERY_RESTORED && t.o->attempts == 0);
    trainee_run(&t, 3);
    CHECK_EQ(t.recovery->seen, 1);
    trainee_close(&t);
    for (restored = 0; restored < 2; restored++) {
        trainee_open(&t, &p, 1);
        trainee_run(&t, 11);
        t.wish.action = restored ? AMP_RECOVERY_RESTORED : AMP_RECOVERY_STOP;
        t.wish.mitigation = restored ? AMP_MITIGATE_DTYPE : (amp_mitigation)-1;
        CHECK_OK(amp_recovery_memory(t.recovery, &e));
        CHECK(e.action == AMP_RECOVERY_RETRY && t.asked == 0);
        CHECK_OK(amp_recovery_memory(t.recovery, &e));
        CHECK(e.action == t.wish.action && t.asked == 1 && e.step == 6 && t.o->attempts == 6 && t.o->desc.accumulation == 1);
        trainee_open(&twin, &p, 0);
        trainee_run(&twin, 6);
        if (restored) cure_by_hand(&twin, AMP_BF16, NULL);
        CHECK(same_training(&t, &twin));
        t.wish.mitigation = AMP_MITIGATE_NONE;
        CHECK_OK(amp_recovery_memory(t.recovery, &e));      /* and once more, before a record came */
        CHECK_OK(amp_recovery_memory(t.recovery, &e));
        CHECK(e.action == t.wish.action && t.o->attempts == 6);
        trainee_run(&t, 9);
        CHECK_EQ(t.recovery->seen, 7);
        trainee_run(&t, 18);
        trainee_run(&twin, 18);
        CHECK(t.n_events == 0 && same_training(&t, &twin) && t.recovery->good.applied > 6);
        trainee_close(&t);
        trainee_close(&twin);
    }
}

/* A policy that fills every text to its end, and every number with nonsense. */
static void filling_policy(void *user, amp_recovery_event *event) {
    amp_recovery_action action = event->action;
    ((trainee *)user)->asked++;
    memset(event, 'x', sizeof *event);
    event->action = action;
    event->mitigation = AMP_MITIGATE_NONE;
}
TEST(recovery_ends_the_policys_texts) {
    static trainee t;
    amp_recovery_event e;
    training_plan p = plan_of(AMP_F16, FAULT_NONE, 0);
    p.policy = filling_policy;
    trainee_open(&t, &p, 1);
    trainee_run(&t, 2);
    CHECK_OK(amp_recovery_memory(t.recovery, &e));
    CHECK_OK(amp_recovery_memory(t.recovery, &e));
    CHECK(t.asked == 1 && e.action == AMP_RECOVERY_HALVE_BATCH && e.mitigation == AMP_MITIGATE_NONE);
    CHECK_EQ(strnlen(e.text, sizeof e.text), sizeof e.text - 1);
    CHECK_EQ(strnlen(e.layer, sizeof e.layer), sizeof e.layer - 1);
    CHECK(e.step == 0 && e.retries == 0 && e.left == t.recovery->desc.max_retries && e.dtype == AMP_F16 && e.anomaly == AMP_ANOMALY_NONE);
    trainee_close(&t);
}

/* Low precision that cannot start at all: fp32, and the log says why. */
TEST(training_starts_in_fp32_where_nothing_else_is) {
    static trainee t;
    const amp_backend *backend = device();
    amp_desc d = host_desc(backend, AMP_BF16);
    amp_context *amp = NULL;
    training_plan p;
    lacks_bf16 = lacks_fp16 = 1;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
    d.allow_fallback = 1;
    CHECK_OK(amp_open(&amp, &d));
    CHECK(ampi_dtype(amp) == AMP_F32 && host.warnings == 1 && strstr(host.last, "1001 bf16 requested") == host.last && strstr(host.last, "fp32 instead") != NULL);
    amp_close(amp);
    p = plan_of(AMP_F32, FAULT_NONE, 0);
    p.backend = backend;
    trainee_open(&t, &p, 1);
    trainee_run(&t, 60);
    CHECK(t.n_events == 0 && t.losses[60] < t.losses[1]);
    trainee_close(&t);
}

TEST(recovery_refuses_bad_input) {
    static trainee t;
    training_plan p = plan_of(AMP_F32, FAULT_NONE, 0);
    amp_recovery *made = NULL;
    amp_recovery_desc good, d;
    amp_recovery_event e;
    amp_step_record record;
    amp_param broken[PARAMS];
    amp_context *other = NULL;
    amp_scaler *foreign = NULL;
    amp_scaler_desc scaling;
    p.accumulation = 2;
    trainee_open(&t, &p, 0);
    memset(&good, 0, sizeof good);
    memset(&record, 0, sizeof record);
    good.params = t.p; good.n_params = PARAMS; good.optimizer = t.o;
#define REFUSED(change, result, field) do { d = good; change; made = (amp_recovery *)&made; CHECK_ERR(amp_recovery_create(t.amp, &made, &d), result); \
        CHECK(strstr(amp_last_error(), field) != NULL && made == NULL); } while (0)
    REFUSED(d.params = NULL, AMP_ERR_NULL, ".params");
    REFUSED(d.n_params = 0, AMP_ERR_RANGE, ".n_params");
    REFUSED(d.n_params = -4, AMP_ERR_RANGE, ".n_params");
    REFUSED(d.optimizer = NULL, AMP_ERR_NULL, ".optimizer");
    REFUSED(d.interval = -1, AMP_ERR_RANGE, ".interval");
    REFUSED(d.max_retries = -2, AMP_ERR_RANGE, ".max_retries");
    REFUSED(d.max_retries = 1001, AMP_ERR_RANGE, ".max_retries");
    REFUSED(d.save = own_save, AMP_ERR_CONFLICT, ".load");
    REFUSED(d.load = own_load, AMP_ERR_CONFLICT, ".load");
    memcpy(broken, t.p, sizeof broken);
    broken[2].weight.data = NULL;
    REFUSED(d.params = broken, AMP_ERR_NULL, "net.b.weight");
    memcpy(broken, t.p, sizeof broken);
    broken[0].weight.stride[0] = 50; broken[0].weight.stride[1] = 1;
    REFUSED(d.params = broken, AMP_ERR_SHAPE, "net.a.weight");
    memcpy(broken, t.p, sizeof broken);
    broken[1].weight.dtype = AMP_I32;
    REFUSED(d.params = broken, AMP_ERR_DTYPE, "net.a.bias");
    CHECK_OK(amp_open(&other, NULL));
    d = good;
    CHECK_ERR(amp_recovery_create(other, &made, &d), AMP_ERR_CONFLICT);
    memset(&scaling, 0, sizeof scaling);
    CHECK_OK(amp_scaler_create(other, &foreign, &scaling));
    REFUSED(d.scaler = foreign, AMP_ERR_CONFLICT, ".scaler belongs to another context");
    amp_scaler_destroy(foreign);
    amp_close(other);
    trainee_micro(&t);
    REFUSED((void)0, AMP_ERR_STATE, "micro-batches");
    trainee_micro(&t);
#undef REFUSED
    CHECK_ERR(amp_recovery_create(NULL, &made, &good), AMP_ERR_NULL);
    CHECK_ERR(amp_recovery_create(t.amp, NULL, &good), AMP_ERR_NULL);
    CHECK_ERR(amp_recovery_create(t.amp, &made, NULL), AMP_ERR_NULL);
    CHECK_OK(amp_recovery_create(t.amp, &made, &good));
    CHECK_ERR(amp_recovery_step(NULL, &record, &e), AMP_ERR_NULL);
    CHECK_ERR(amp_recovery_step(made, NULL, &e), AMP_ERR_NULL);
    CHECK_ERR(amp_recovery_step(made, &record, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_recovery_memory(NULL, &e), AMP_ERR_NULL);
    CHECK_ERR(amp_recovery_memory(made, NULL), AMP_ERR_NULL);
    amp_recovery_destroy(made);
    amp_recovery_destroy(NULL);
    trainee_close(&t);
}

/* Names without a dot, and names that are too long for a pattern. */
TEST(recovery_names_layers) {
    static const char *const cases[][2] = {
        {"blocks.0.attn.weight", "blocks.0.attn.*"}, {"weight", "weight"}, {"a.b", "a.*"},
        {"encoder.of.a.very.long.winded.model.with.a.name.that.does.not.end.weight", "encoder.of.a.very.long.winded.model.with.a.name.that.does.not.*"},
        {"encoderofaverylongwindedmodelwithanamethatdoesnotendandhasnodotsatall", "encoderofaverylongwindedmodelwithanamethatdoesnotendandhasnodo*"}};
    char pattern[64];
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ampi_layer_pattern(cases[i][0], pattern);
        CHECK_MSG(strcmp(pattern, cases[i][1]) == 0, "%s", pattern);
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(tune_takes_medians_and_the_highest_rate);
    RUN(tune_ignores_outliers);
    RUN(tune_alternates);
    RUN(tune_breaks_ties_by_order);
    RUN(tune_doubles_the_batch_until_memory_ends);
    RUN(tune_stops_at_the_largest_batch_and_at_full_tables);
    RUN(tune_is_shown_as_a_table);
    RUN(tune_reports_when_nothing_works);
    RUN(tune_has_a_row_for_what_the_device_lacks);
    RUN(tune_measures_memory);
    RUN(tune_keeps_results_in_a_file);
    RUN(tune_times_anew_what_no_longer_fits);
    RUN(tune_survives_damaged_files);
    RUN(tune_refuses_impossible_rows);
    RUN(tune_leaves_foreign_files_alone);
    RUN(tune_refuses_bad_input);
    RUN(tune_heeds_verification);
    RUN(advice_about_the_machine);
    RUN(advice_heeds_verification);
    RUN(advice_on_the_batch);
    RUN(advice_on_the_scaler);
    RUN(advice_on_the_learning_rate); RUN(advice_is_applied);
    RUN(advice_refuses_bad_input);
    RUN(recovery_from_a_loss_that_is_not_finite);
    RUN(recovery_from_gradients_that_are_not_finite);
    RUN(recovery_from_a_scale_at_its_floor);
    RUN(recovery_from_skips);
    RUN(recovery_by_device_and_level);
    RUN(recovery_with_any_lag_and_accumulation);
    RUN(recovery_passes_over_undone_records);
    RUN(recovery_from_a_monitors_records);
    RUN(recovery_is_bounded);
    RUN(recovery_counts_anew_after_good_steps);
    RUN(snapshots_are_of_whole_cycles);
    RUN(recovery_waits_to_be_asked);
    RUN(recovery_drops_casts);
    RUN(recovery_asks_the_policy);
    RUN(recovery_can_be_declined);
    RUN(recovery_keeps_the_policys_learning_rate);
    RUN(recovery_restores_what_is_the_hosts);
    RUN(snapshots_survive_failing_allocations);
    RUN(recovery_survives_failing_allocations);
    RUN(recovery_goes_back_to_before_a_parameter_was_unfrozen);
    RUN(memory_recovery_halves_the_batch); RUN(memory_recovery_doubles_the_batch_again);
    RUN(memory_recovery_from_any_failing_allocation);
    RUN(memory_recovery_drops_the_cycle);
    RUN(memory_recovery_asks_the_policy);
    RUN(recovery_ends_the_policys_texts);
    RUN(training_starts_in_fp32_where_nothing_else_is);
    RUN(recovery_refuses_bad_input);
    RUN(recovery_names_layers);
    return TEST_END();
}
