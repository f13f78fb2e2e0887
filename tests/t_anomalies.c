/* Anomalies: every allocation, file call, thread and clock reading that amp.h asks its host for fails in turn, in every
 * public function and in a short training.  After each failure the result is the right one, the last-error text says
 * what and where, outputs and objects are as they were, the same call works, and in the end all bits are those of a run
 * without failures, and nothing is left over.
 *
 *     t_anomalies                      some of the calls, in a few seconds
 *     t_anomalies --all --record FILE  every call of every kind in every style; counts go to FILE as JSON
 *
 *     gcc -O2 -fopenmp tests/t_anomalies.c -o t_anomalies -lm -lpthread && ./t_anomalies     (from the project root) */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "faults.h"
#include "recording_backend.h"
#include <stdarg.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- Scenarios.  A scenario is a list of calls; a call that fails is called once more. */

#define DONE ((amp_result)-1)       /* there is no such step */

enum { ARENA_BYTES = 1 << 18, PARAMS = 8 };

typedef struct env {
    /* objects */
    amp_context *amp;
    amp_state *state, *loaded;
    void *memory[8];
    size_t memory_bytes[8];
    /* what calls write to beside the arena; as it was after a call that failed */
    struct {
        amp_param params[PARAMS];
        float scalars[8];
    } out;
    unsigned char *arena;
    int64_t used;
    uint64_t digest;                /* of all that was noted */
    int told;                       /* messages of the log */
    char path[2][256];
} env;

typedef struct scenario {
    const char *name;
    amp_result (*step)(env *e, int i);
    void (*close)(env *e);
    uint64_t (*observe)(env *e);    /* what the objects hold; NULL: nothing that a failure could change */
    void (*after)(env *e);          /* notes what closing has left in files; NULL: nothing */
} scenario;

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t n) {
    const unsigned char *p = (const unsigned char *)data;
    for (; n > 0; n--) hash = (hash ^ *p++) * UINT64_C(0x100000001b3);
    return hash;
}
static const uint64_t hash_begin = UINT64_C(0xcbf29ce484222325);

static void note(env *e, const void *data, size_t n) { e->digest = hash_bytes(e->digest, data, n); }
static void note_number(env *e, int64_t x) { note(e, &x, sizeof x); }
static void note_text(env *e, const char *text) { note(e, text, strlen(text) + 1); }
static void note_file(env *e, const char *path) {
    void *data;
    size_t bytes;
    if (amp_file_read_all(NULL, path, &data, &bytes) != AMP_OK) { note_text(e, "no file"); return; }
    note(e, data, bytes);
    amp_file_free(NULL, data, bytes);
}

/* A failed creation leaves NULL, and no success does. */
static amp_result created(amp_result r, const void *where) {
    const void *object;
    memcpy(&object, where, sizeof object);
    CHECK((object != NULL) == (r == AMP_OK));
    return r;
}

/* Memory of the caller's, watched, filled with bytes that are small numbers in every dtype. */
static void *room(env *e, int64_t bytes) {
    unsigned char *p = e->arena + e->used;
    e->used += (bytes + 63) / 64 * 64;
    if (e->used > ARENA_BYTES) { printf("the arena is too small\n"); exit(1); }
    return p;
}
static float *floats(env *e, int64_t n, float scale) {
    float *p = (float *)room(e, n * 4);
    int64_t i;
    for (i = 0; i < n; i++) p[i] = scale * (amp_random_uniform(7, (uint64_t)(e->used + i)) - 0.5f);
    return p;
}

static void heard(void *user, amp_log_level level, int id, const char *text) {
    (void)level;
    CHECK(id != 0 && text[0] != 0);
    ++*(int *)user;
}
static amp_desc host_desc(env *e, amp_dtype dtype) {
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = dtype;
    d.threads = 1;
    d.seed = 5;
    d.system = *faults_system();
    d.logger.write = heard;
    d.logger.user = &e->told;
    return d;
}
static amp_result open_host(env *e, amp_dtype dtype) {
    amp_desc d = host_desc(e, dtype);
    return created(amp_open(&e->amp, &d), &e->amp);
}

/* ---- One run of a scenario */

static struct {
    int all;
    const char *record;
    int64_t runs, failures, absorbed;
    const scenario *s;
    const fault *f;
    int64_t n;
    fault_style style;
    int step;
    uint64_t random;
} now;

static const char *here(void) {
    static const char *const styles[] = {"once", "from then on", "for good"};
    static char text[900];
    snprintf(text, sizeof text, "%s, step %d, %s %lld %s: %s", now.s->name, now.step, now.f ? now.f->name : "no fault",
             (long long)now.n, styles[now.style], amp_last_error());
    return text;
}

/* The last-error text is this failure's, and has a detail between function and hint. */
static int says_what(amp_result r) {
    char begin[16];
    const char *text = amp_last_error(), *detail = strstr(text, ": "), *hint = strstr(text, amp_result_hint(r));
    snprintf(begin, sizeof begin, "AMP%04d ", (int)r);
    return strncmp(text, begin, strlen(begin)) == 0 && detail != NULL && hint != NULL && hint - detail > 6;
}

static void env_open(env *e) {
    static unsigned char arena[ARENA_BYTES];
    memset(e, 0, sizeof *e);
    memset(arena, 0x3d, sizeof arena);
    e->arena = arena;
    e->digest = hash_begin;
    snprintf(e->path[0], sizeof e->path[0], "%s/amp_anomaly_%ld_a", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    snprintf(e->path[1], sizeof e->path[1], "%s/amp_anomaly_%ld_b", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
}

static uint64_t observe(env *e) {
    uint64_t seen = 0;
    if (now.s->observe == NULL) return 0;
    faults_pause(1);
    seen = now.s->observe(e);
    faults_pause(0);
    return seen;
}

/* A call failed: was it allowed to, and is everything as before? */
static void check_failure(env *e, amp_result r, const unsigned char *arena, int64_t used, const void *out, uint64_t seen) {
    now.failures++;
    CHECK_MSG(faults_fired() > 0 && fault_wants(now.f, r), "returned %d: %s", (int)r, here());
    CHECK_MSG(says_what(r), "%s", here());
    CHECK_MSG(memcmp(arena, e->arena, (size_t)used) == 0, "memory has changed: %s", here());
    CHECK_MSG(memcmp(out, &e->out, sizeof e->out) == 0, "a struct has changed: %s", here());
    CHECK_MSG(observe(e) == seen, "an object has changed: %s", here());
}

/* Runs the steps; returns 0 when the program gave up. */
static int run_steps(env *e) {
    static unsigned char arena[ARENA_BYTES];
    static unsigned char out[sizeof e->out];
    uint64_t seen;
    int64_t used;
    amp_result r;
    for (now.step = 0;; now.step++) {
        seen = observe(e);
        used = e->used;
        memcpy(arena, e->arena, (size_t)used);
        memcpy(out, &e->out, sizeof e->out);
        (void)amp_dtype_parse("?", NULL);           /* any other error's text */
        r = now.s->step(e, now.step);
        if (r == DONE) return 1;
        if (r == AMP_OK) continue;
        check_failure(e, r, arena, used, out, seen);
        if (now.style == FAULT_FOREVER) return 0;
        faults_disarm();
        r = now.s->step(e, now.step);
        CHECK_MSG(r == AMP_OK, "the next call returned %d: %s", (int)r, here());
        if (r != AMP_OK) return 0;
    }
}

/* Returns the digest of a run that came to its end, 0 of one that gave up.  *fired: whether the fault was met;
 * *closing: only when everything was closed. */
static uint64_t run(const fault *f, int64_t n, fault_style style, int *fired, int *closing) {
    env e;
    int ended;
    now.f = f; now.n = n; now.style = style;
    now.runs += f != NULL;
    env_open(&e);
    faults_arm(f, n, style);
    ended = run_steps(&e);
    if (ended) note(&e, e.arena, (size_t)e.used);
    *closing = faults_fired() == 0;
    now.s->close(&e);
    *fired = faults_fired() > 0;
    *closing = *closing && *fired;
    faults_disarm();
    CHECK_MSG(faults_balanced(), "left over: %lld blocks, %lld bytes, %lld files, %lld threads, %lld damaged: %s",
              (long long)faults.blocks, (long long)faults.bytes, (long long)faults.files, (long long)faults.threads,
              (long long)faults.damaged, here());
    faults_forget();
    if (now.s->after != NULL && !*closing) now.s->after(&e);
    remove(e.path[0]);
    remove(e.path[1]);
    return ended ? e.digest : 0;
}

/* Whether the n-th call is to fail: all, or the first ones and a few of the rest. */
static int chosen(int64_t n, int64_t calls, fault_style style) {
    int64_t first = style == FAULT_ONCE ? 20 : 4, rest = style == FAULT_ONCE ? 12 : 4;
    if (now.all || n <= first) return 1;
    return (int64_t)(amp_random_u32(20261121, now.random++) % (uint32_t)(calls - first)) < rest;
}

static void run_scenario(const scenario *s) {
    int64_t calls[FAULT_KINDS], runs = now.runs, failures = now.failures, absorbed = now.absorbed, n;
    int fired, closing, i, style;
    uint64_t wanted, digest;
    now.s = s;
    now.random = 0;
    wanted = run(NULL, 0, FAULT_ONCE, &fired, &closing);
    memcpy(calls, faults.calls, sizeof calls);
    CHECK_MSG(wanted == run(NULL, 0, FAULT_ONCE, &fired, &closing), "two runs differ: %s", here());
    for (i = 0; i < ALL_FAULTS; i++)
        for (style = 0; style < FAULT_STYLES; style++)
            for (n = 1, fired = 1; fired && calls[all_faults[i].kind] > 0; n++) {
                int64_t failed = now.failures;
                if (n <= calls[all_faults[i].kind] && !chosen(n, calls[all_faults[i].kind], (fault_style)style)) continue;
                digest = run(all_faults + i, n, (fault_style)style, &fired, &closing);
                CHECK_MSG(digest == wanted || digest == 0 || closing, "other bits: %s", here());
                now.absorbed += fired && now.failures == failed;
            }
    runs = now.runs - runs; failures = now.failures - failures; absorbed = now.absorbed - absorbed;
    if (now.all) printf("%-12s %lld runs, %lld failed calls, %lld absorbed\n", s->name, (long long)runs, (long long)failures, (long long)absorbed);
}

/* ---- Files and state */

static amp_result files_step(env *e, int i) {
    static const char text[] = "what a file holds";
    switch (i) {
        case 0: return amp_file_write_atomic(faults_system(), e->path[0], text, 5);
        case 1: return amp_file_write_atomic(faults_system(), e->path[0], text, sizeof text);
        case 2: return amp_file_read_all(faults_system(), e->path[0], &e->memory[0], &e->memory_bytes[0]);
        case 3: note(e, e->memory[0], e->memory_bytes[0]); return AMP_OK;
        case 4: note_file(e, e->path[0]); return AMP_OK;
        default: return DONE;
    }
}
static void files_close(env *e) { amp_file_free(faults_system(), e->memory[0], e->memory_bytes[0]); }

/* Every failure left the old file or the new one. */
static uint64_t files_observe(env *e) {
    env seen;
    seen.digest = hash_begin;
    note_file(&seen, e->path[0]);
    note_number(&seen, e->memory[0] != NULL);
    return seen.digest;
}

static amp_result state_step(env *e, int i) {
    double values[40];
    char key[16];
    int k;
    for (k = 0; k < 40; k++) values[k] = i + 0.5 * k;
    snprintf(key, sizeof key, "record %d", i);
    if (i > 0 && i < 20) return amp_state_put(e->state, key, AMP_F64, values, i % 40);
    switch (i) {
        case 0: return created(amp_state_create(&e->state, faults_system()), &e->state);
        case 20: return amp_state_put(e->state, "record 7", AMP_F64, values, 30);
        case 21: return amp_state_encode(e->state, &e->memory[0], &e->memory_bytes[0]);
        case 22: note(e, e->memory[0], e->memory_bytes[0]); return AMP_OK;
        case 23: return amp_state_decode(&e->loaded, faults_system(), e->memory[0], e->memory_bytes[0]);
        case 24: amp_state_destroy(e->loaded); e->loaded = NULL; return AMP_OK;
        case 25: return amp_state_save(e->state, e->path[0]);
        case 26: return amp_state_save(e->state, e->path[0]);
        case 27: return amp_state_load(&e->loaded, faults_system(), e->path[0]);
        case 28: return amp_state_get(e->loaded, "record 7", AMP_F64, values, 30);
        case 29: note_number(e, amp_state_count(e->loaded, "record 9", NULL)); note_text(e, amp_state_key(e->loaded, 3)); return AMP_OK;
        case 30: note_file(e, e->path[0]); return AMP_OK;
        default: return DONE;
    }
}
static void state_close(env *e) {
    amp_state_destroy(e->state);
    amp_state_destroy(e->loaded);
    amp_file_free(faults_system(), e->memory[0], e->memory_bytes[0]);
}
static uint64_t hash_state(const amp_state *state) {
    void *data = NULL;
    size_t bytes = 0;
    uint64_t hash = hash_begin;
    if (state == NULL || amp_state_encode(state, &data, &bytes) != AMP_OK) return 0;
    hash = hash_bytes(hash, data, bytes);
    amp_file_free(faults_system(), data, bytes);
    return hash;
}
static uint64_t state_observe(env *e) {
    return hash_state(e->state) ^ 3 * hash_state(e->loaded) ^ 7 * files_observe(e);
}

/* ---- The context */

static amp_result context_step(env *e, int i) {
    switch (i) {
        case 0: return open_host(e, AMP_BF16);
        case 1: return amp_alloc(e->amp, &e->memory[0], 1000);
        case 2: return amp_alloc(e->amp, &e->memory[1], 2000);
        case 3: return amp_fill(e->amp, e->memory[0], 7, 1000);
        case 4: return amp_copy(e->amp, e->memory[1], e->memory[0], 1000, AMP_COPY_ON_DEVICE);
        case 5: return amp_sync(e->amp);
        case 6: note(e, e->memory[1], 1000); return AMP_OK;
        default: return DONE;
    }
}
static void context_close(env *e) {
    if (e->amp == NULL) return;
    amp_free(e->amp, e->memory[0]);
    amp_free(e->amp, e->memory[1]);
    amp_close(e->amp);
}

static const scenario scenarios[] = {
    {"files", files_step, files_close, files_observe, NULL},
    {"state", state_step, state_close, state_observe, NULL},
    {"context", context_step, context_close, NULL, NULL},
};

TEST(scenarios) {
    size_t i;
    for (i = 0; i < sizeof scenarios / sizeof *scenarios; i++) run_scenario(scenarios + i);
}

int main(int argc, char **argv) {
    int i;
    TEST_BEGIN(argc, argv);
    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--all")) now.all = 1;
        if (!strcmp(argv[i], "--record") && i + 1 < argc) now.record = argv[++i];
    }
    RUN(scenarios);
    return TEST_END();
}
