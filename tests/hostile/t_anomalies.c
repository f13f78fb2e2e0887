/* t_anomalies.c - makes every call to the system fail in turn, in every public function and in a short training.  These
 * calls are the allocations, file calls, threads and clock readings of amp.h.  After each failure, the function must return
 * the right result, and the last-error text must say what failed and where.  Outputs and objects must be unchanged, and the
 * same call must succeed when it is repeated.  At the end, all bits must be those of a run without failures, and no
 * resource may be left.
 *
 *     t_anomalies                      some of the calls, in a few seconds
 *     t_anomalies --all --record FILE  every call of every kind in every style; counts go to FILE as JSON
 *     t_anomalies --only SCENARIO      one of them
 *
 *     gcc -O2 -Itests tests/hostile/t_anomalies.c -o t_anomalies -lm -lpthread && ./t_anomalies     (from the project root) */
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

enum { ARENA_BYTES = 1 << 21, PARAMS = 8 };

typedef struct env {
    /* objects */
    amp_context *amp;
    amp_state *state, *loaded;
    amp_grad_set *set;
    amp_scaler *scaler;
    amp_optimizer *optimizer;
    amp_graph *graph;
    amp_loader *loader;
    amp_monitor *monitor;
    amp_tensor_stats *numerics;
    amp_recovery *recovery;
    amp_model *model;
    amp_tape *tape;
    amp_value value, other;
    amp_adapt *adapt;
    amp_ranks *ranks;
    amp_reducer reducer;
    void *memory[8];
    size_t memory_bytes[8];
    amp_mask_view views[3];
    int32_t own_op;
    /* what calls write to beside the arena; as it was after a call that failed */
    struct {
        amp_param params[PARAMS];
        amp_linear_op linear[2];
        amp_matmul_op matmul;
        amp_attention_op attention;
        amp_norm_op layernorm, rmsnorm;
        amp_softmax_op softmax;
        amp_activation_op activation;
        amp_swiglu_op swiglu;
        amp_cross_entropy_op cross_entropy;
        amp_mse_op mse;
        amp_linear_cross_entropy_op head;
        amp_embedding_op embedding;
        amp_dropout_op dropout;
        amp_rope_op rope;
        amp_tensor cast;
        amp_batch batch;
        amp_settings settings;
    } out;
    int variant;
    unsigned char *arena;
    int64_t used;
    uint64_t digest;                /* of all that was noted */
    int told;                       /* messages of the log */
    int unfinished;                 /* 1: a call that failed is to be called again, and has changed what it was to change */
    int fallen_back;                /* 1: a failure was allowed to change what comes after */
    amp_step_result outcome;
    amp_step_record record;
    int has_record;
    char path[2][256];
} env;

typedef struct scenario {
    const char *name;
    int variant;
    amp_result also[2];             /* results that tell of a failure inside: of the host's step, of a file of results */
    amp_result (*step)(env *e, int i);
    void (*close)(env *e);
    uint64_t (*observe)(env *e);    /* what the objects hold; NULL: nothing that a failure could change */
    void (*after)(env *e);          /* notes what closing has left in files; NULL: nothing */
} scenario;

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t n) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t word;
    for (; n >= 8; n -= 8, p += 8) {
        memcpy(&word, p, 8);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 32;
    }
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
static void *numbers(env *e, amp_dtype dtype, int64_t n) {
    float x;
    char *p = (char *)room(e, n * (int64_t)amp_dtype_size(dtype));
    int64_t i;
    for (i = 0; i < n; i++) {
        x = 2 * amp_random_uniform(7, (uint64_t)(e->used + i)) - 1;
        amp_convert(p + i * (int64_t)amp_dtype_size(dtype), dtype, &x, AMP_F32, 1, NULL, NULL);
    }
    return p;
}
static amp_tensor matrix(env *e, amp_dtype dtype, int64_t rows, int64_t cols) {
    return amp_tensor2(numbers(e, dtype, rows * cols), dtype, rows, cols);
}
static int32_t *integers(env *e, int64_t n, int32_t below) {
    int32_t *p = (int32_t *)room(e, n * 4);
    int64_t i;
    for (i = 0; i < n; i++) p[i] = (int32_t)(amp_random_u32(9, (uint64_t)(e->used + i)) % (uint32_t)below);
    return p;
}
/* cols 0: a vector */
static amp_param *parameter(env *e, int i, const char *name, amp_dtype dtype, int64_t rows, int64_t cols) {
    amp_param *p = e->out.params + i;
    int64_t n = rows * (cols ? cols : 1);
    p->name = name;
    p->weight = amp_tensor2(numbers(e, dtype, n), dtype, rows, cols);
    p->grad = amp_tensor2(numbers(e, AMP_F32, n), AMP_F32, rows, cols);
    p->weight.ndim = p->grad.ndim = cols ? 2 : 1;
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
    if (e->variant == 1) d.backend = recording_backend();
    return d;
}
static amp_result open_host(env *e, amp_dtype dtype) {
    amp_desc d = host_desc(e, dtype);
    return created(amp_open(&e->amp, &d), &e->amp);
}

/* ---- One run of a scenario */

static struct {
    int all;
    const char *record, *only;
    int64_t runs, failures, absorbed;
    const scenario *s;
    const fault *f;
    int64_t n;
    fault_style style;
    int step;
    uint64_t random;
    char rows[8000];                /* of the record */
} now;

static const char *here(void) {
    static const char *const styles[] = {"once", "from then on", "for good"};
    static char text[900];
    snprintf(text, sizeof text, "%s, step %d, %s %lld %s: %s", now.s->name, now.step, now.f ? now.f->name : "no fault",
             (long long)now.n, styles[now.style], amp_last_error());
    return text;
}

/* The last-error text is this failure's, has a detail behind the function, and says what to do: itself or by the hint. */
static int says_what(amp_result r) {
    char begin[16];
    const char *text = amp_last_error(), *detail = strstr(text, ": "), *hint = strstr(text, amp_result_hint(r));
    snprintf(begin, sizeof begin, "AMP%04d ", (int)r);
    return strncmp(text, begin, strlen(begin)) == 0 && detail != NULL && (hint != NULL || ampt_says_what_to_do(text)) &&
           (hint != NULL ? (size_t)(hint - detail) : strlen(detail)) > 6;
}

static void env_open(env *e) {
    static unsigned char arena[ARENA_BYTES];
    memset(e, 0, sizeof *e);
    memset(arena, 0x3d, sizeof arena);
    e->arena = arena;
    e->variant = now.s->variant;
    e->digest = hash_begin;
    snprintf(e->path[0], sizeof e->path[0], "%s/amp_anomaly_%ld_a", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    snprintf(e->path[1], sizeof e->path[1], "%s/amp_anomaly_%ld_b", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
}

/* failed 0: before a call, where nothing can fail any more it is left out. */
static uint64_t observe(env *e, int failed) {
    uint64_t seen = 0;
    if (now.s->observe == NULL || faults.armed == NULL || (now.style == FAULT_ONCE && faults_fired() > 0 && !failed)) return 0;
    faults_pause(1);
    seen = now.s->observe(e);
    faults_pause(0);
    return seen;
}

/* What the library knows of when a weight was last multiplied by moves on; it only tells the cache what is worth keeping. */
static void copy_outputs(void *to, const env *e) {
    env copy = *e;
    int i;
    for (i = 0; i < PARAMS; i++) memset(copy.out.params[i].last_used, 0, sizeof copy.out.params[i].last_used);
    memcpy(to, &copy.out, sizeof copy.out);
}

/* A call failed: was it allowed to, and is everything as before? */
static void check_failure(env *e, amp_result r, const unsigned char *arena, int64_t used, const void *out, uint64_t seen) {
    static unsigned char outputs[sizeof e->out];
    copy_outputs(outputs, e);
    now.failures++;
    CHECK_MSG(faults_fired() > 0 && (fault_wants(now.f, r) || r == now.s->also[0] || r == now.s->also[1]), "returned %d: %s", (int)r, here());
    CHECK_MSG(says_what(r), "%s", here());
    ampt_provoked_text(amp_last_error());
    if (e->unfinished) return;
    CHECK_MSG(memcmp(arena, e->arena, (size_t)used) == 0, "memory has changed: %s", here());
    CHECK_MSG(memcmp(out, outputs, sizeof e->out) == 0, "a struct has changed: %s", here());
    CHECK_MSG(seen == 0 || observe(e, 1) == seen, "an object has changed: %s", here());
}

/* Runs the steps; returns 0 when the program gave up. */
static int run_steps(env *e) {
    static unsigned char arena[ARENA_BYTES];
    static unsigned char out[sizeof e->out];
    uint64_t seen;
    int64_t used;
    amp_result r;
    for (now.step = 0;; now.step++) {
        seen = observe(e, 0);
        used = e->used;
        memcpy(arena, e->arena, (size_t)used);
        copy_outputs(out, e);
        (void)amp_dtype_parse("?", NULL);           /* any other error's text */
        e->unfinished = 0;
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
    if (now.s->after != NULL && ended && !*closing) now.s->after(&e);
    remove(e.path[0]);
    remove(e.path[1]);
    return ended && !e.fallen_back ? e.digest : 0;
}

/* Whether the n-th call is to fail: all, or the first ones and a few of the rest; of these, half with sanitizers: those with
 * an even n fail in one style, those with an odd n in the next. */
static int chosen(fault_kind kind, int64_t n, int64_t calls, fault_style style) {
    if (AMPT_SANITIZED && !now.all && (n + (int64_t)style) % 2 != 0) return 0;
    int64_t first = style != FAULT_ONCE ? 3 : kind == FAULT_ALLOC ? 20 : 10, rest = style != FAULT_ONCE ? 3 : kind == FAULT_ALLOC ? 10 : 5;
    if (now.all || n <= first) return 1;
    return (int64_t)(amp_random_u32(20261121, now.random++) % (uint32_t)(calls - first)) < rest;
}

static void run_scenario(const scenario *s) {
    int64_t calls[FAULT_KINDS], runs = now.runs, failures = now.failures, absorbed = now.absorbed, n;
    int fired, closing, i, style, wrong = ampt.failures;
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
                if (n <= calls[all_faults[i].kind] && !chosen(all_faults[i].kind, n, calls[all_faults[i].kind], (fault_style)style)) continue;
                digest = run(all_faults + i, n, (fault_style)style, &fired, &closing);
                CHECK_MSG(digest == wanted || digest == 0 || closing, "other bits: %s", here());
                now.absorbed += fired && now.failures == failed;
            }
    runs = now.runs - runs; failures = now.failures - failures; absorbed = now.absorbed - absorbed;
    if (now.all) printf("%-18s %lld runs, %lld failed calls, %lld absorbed\n", s->name, (long long)runs, (long long)failures, (long long)absorbed);
    fflush(stdout);
    snprintf(now.rows + strlen(now.rows), sizeof now.rows - strlen(now.rows),
             "%s\n    {\"scenario\": \"%s\", \"allocations\": %lld, \"runs\": %lld, \"failed_calls\": %lld, \"absorbed\": %lld, \"wrong\": %d}",
             now.rows[0] ? "," : "", s->name, (long long)calls[FAULT_ALLOC], (long long)runs, (long long)failures, (long long)absorbed,
             ampt.failures - wrong);
}

/* absorbed: runs whose fault no call had to tell of: it was made up for, or met while closing. */
static void write_record(double seconds) {
    FILE *file = now.record ? fopen(now.record, "w") : NULL;
    amp_machine machine;
    if (file == NULL) { CHECK(now.record == NULL); return; }
    CHECK_OK(amp_machine_probe(&machine));
    fprintf(file, "{\n  \"command\": \"make anomalies\",\n  \"compiler\": \"%s\",\n  \"cpu\": \"%s\",\n  \"seed\": \"none: every call\",\n"
            "  \"faults\": %d,\n  \"styles\": [\"once\", \"from then on\", \"for good\"],\n  \"seconds\": %.0f,\n"
            "  \"runs\": %lld,\n  \"failed_calls\": %lld,\n  \"absorbed\": %lld,\n  \"wrong\": %d,\n  \"scenarios\": [%s\n  ]\n}\n",
            __VERSION__, machine.cpu.name, (int)ALL_FAULTS, seconds, (long long)now.runs, (long long)now.failures, (long long)now.absorbed,
            ampt.failures, now.rows);
    fclose(file);
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
    static unsigned char values[1 << 16];
    uint64_t hash = hash_begin;
    const char *key;
    int64_t i, n;
    for (i = 0; state != NULL && (key = amp_state_key(state, i)) != NULL; i++) {
        amp_dtype dtype;
        size_t bytes;
        n = amp_state_count(state, key, &dtype);
        bytes = (size_t)n * amp_dtype_size(dtype);
        CHECK(bytes <= sizeof values && amp_state_get(state, key, dtype, values, n) == AMP_OK);
        hash = hash_bytes(hash_bytes(hash, key, strlen(key) + 1), values, bytes);
    }
    return hash;
}
static uint64_t state_observe(env *e) {
    return hash_state(e->state) ^ 3 * hash_state(e->loaded) ^ 7 * files_observe(e);
}

/* ---- The context, on a backend that has plans and graphs: kernels run while a graph is captured, and a launch does
 * nothing */

static size_t plans_save(void *dev, void *buffer, size_t size) {
    (void)dev;
    if (size >= 100) memset(buffer, 7, 100);
    return 100;
}
static amp_result plans_load(void *dev, const void *buffer, size_t size) {
    (void)dev; (void)buffer;
    CHECK_EQ(size, 100);
    return AMP_OK;
}
static amp_result graph_begin(void *dev, void *stream) { (void)dev; (void)stream; return AMP_OK; }
static amp_result graph_end(void *dev, void *stream, void **graph) { (void)stream; *graph = dev; return AMP_OK; }
static amp_result graph_launch(void *dev, void *graph, void *stream) { (void)dev; (void)graph; (void)stream; return AMP_OK; }
static void graph_destroy(void *dev, void *graph) { (void)dev; (void)graph; }

static amp_result open_with_plans(env *e) {
    static amp_backend table;
    amp_desc d = host_desc(e, AMP_F32);
    table = *(e->variant == 1 ? recording_backend() : amp_cpu());
    table.plans_save = plans_save;     table.plans_load = plans_load;
    table.graph_begin = graph_begin;   table.graph_end = graph_end;
    table.graph_launch = graph_launch; table.graph_destroy = graph_destroy;
    d.backend = &table;
    d.autotune = AMP_AUTOTUNE_ON;
    d.autotune_file = e->path[0];
    return created(amp_open(&e->amp, &d), &e->amp);
}

static void context_close(env *e) {
    amp_graph_destroy(e->graph);
    if (e->amp != NULL) {
        amp_param_forget(e->amp, e->out.params, 2);
        amp_free(e->amp, e->memory[0]);
        amp_free(e->amp, e->memory[1]);
    }
    amp_state_destroy(e->state);
    amp_close(e->amp);
    amp_ranks_destroy(e->ranks);
    e->amp = NULL;
}

static amp_result context_queries(env *e) {
    amp_desc desc;
    amp_machine machine;
    amp_choice choice;
    amp_memory_info memory;
    amp_result r = amp_query(e->amp, &desc);
    if (r == AMP_OK) r = amp_query_machine(e->amp, &machine);
    if (r == AMP_OK) r = amp_query_choice(e->amp, &choice);
    if (r == AMP_OK) r = amp_memory(e->amp, &memory);
    if (r != AMP_OK) return r;
    amp_memory_reset_peak(e->amp);
    note_text(e, choice.reason);
    note_number(e, memory.allocated);
    note_number(e, (int64_t)amp_param_dtype(e->amp, 0));
    return AMP_OK;
}

static amp_result ranks_create(env *e) {
    amp_ranks_desc d;
    memset(&d, 0, sizeof d);
    d.world = 2;
    d.system = *faults_system();
    return created(amp_ranks_create(&e->ranks, &d), &e->ranks);
}

static amp_result context_step(env *e, int i) {
    int64_t freed = 0;
    switch (i) {
        case 0: return open_with_plans(e);
        case 1: amp_close(e->amp); e->amp = NULL; return AMP_OK;
        case 2: return open_with_plans(e);
        case 3: return amp_alloc(e->amp, &e->memory[0], 1000);
        case 4: return amp_alloc(e->amp, &e->memory[1], 2000);
        case 5: return amp_fill(e->amp, e->memory[0], 7, 1000);
        case 6: return amp_copy(e->amp, e->memory[1], e->memory[0], 1000, AMP_COPY_ON_DEVICE);
        case 7: return amp_sync(e->amp);
        case 8: note(e, e->memory[1], 1000); return AMP_OK;
        case 9: return amp_event_record(e->amp, e->memory[0]);
        case 10: return amp_event_wait(e->amp, e->memory[0]);
        case 11: return context_queries(e);
        case 12: parameter(e, 0, "w", AMP_F32, 6, 4); parameter(e, 1, "b", AMP_F32, 6, 0); return AMP_OK;
        case 13: return amp_param_register(e->amp, e->out.params, 2);
        case 14: amp_param_changed(e->out.params); note_number(e, amp_param_accumulate(e->out.params)); e->out.params[0].grad_live = 0; return AMP_OK;
        case 15: return amp_graph_begin(e->amp);
        case 16: return amp_fill(e->amp, e->memory[1], 9, 500);
        case 17: return created(amp_graph_end(e->amp, &e->graph), &e->graph);
        case 18: return amp_graph_launch(e->graph);
        case 19: amp_graph_destroy(e->graph); e->graph = NULL; return AMP_OK;
        case 20: return amp_set_dtype(e->amp, AMP_BF16);
        case 21: return amp_set_enabled(e->amp, 1);
        case 22: return created(amp_state_create(&e->state, faults_system()), &e->state);
        case 23: return amp_random_save(e->amp, e->state, "here");
        case 24: return amp_random_load(e->amp, e->state, "here");
        case 25: return amp_cleanup(e->amp, &freed);
        case 26: return ranks_create(e);
        case 27: return amp_ranks_reducer(e->ranks, 1, &e->reducer);
        default: return DONE;
    }
}
static uint64_t context_observe(env *e) { return hash_state(e->state); }

/* ---- Masks, regions and casts */

static amp_result masks_step(env *e, int i) {
    amp_cache_info info;
    amp_mask mask;
    memset(&mask, 0, sizeof mask);
    mask.kind = AMP_MASK_WINDOW;
    mask.window = 3;
    switch (i) {
        case 0: return open_host(e, AMP_F32);
        case 1: e->memory[2] = integers(e, 2, 5); return AMP_OK;
        case 2: return amp_mask_get(e->amp, &mask, 2, 7, 9, AMP_U8, &e->views[0]);
        case 3: mask.lengths = (const int32_t *)e->memory[2]; return amp_mask_get(e->amp, &mask, 2, 7, 9, AMP_BF16, &e->views[1]);
        case 4: return amp_mask_get(e->amp, &mask, 2, 7, 9, AMP_U8, &e->views[2]);
        case 5: note(e, e->views[2].tensor.data, 63); note(e, e->views[1].tensor.data, 2 * 63 * 2); return AMP_OK;
        case 6: amp_mask_release(e->amp, &e->views[0]); amp_mask_cache_drop(e->amp, AMP_MASK_WINDOW); return AMP_OK;
        case 7: return amp_mask_cache_info(e->amp, &info);
        case 8: return amp_mask_get(e->amp, &mask, 1, 30, 40, AMP_F32, &e->views[0]);
        case 9: note(e, e->views[0].tensor.data, 30 * 40 * 4); return AMP_OK;
        default: return DONE;
    }
}
static void masks_close(env *e) {
    int i;
    for (i = 0; i < 3 && e->amp != NULL; i++) if (e->views[i].tensor.data != NULL) amp_mask_release(e->amp, &e->views[i]);
    if (e->amp != NULL) amp_mask_cache_clear(e->amp);
    amp_close(e->amp);
}
static uint64_t masks_observe(env *e) {
    amp_cache_info info;
    if (e->amp == NULL || amp_mask_cache_info(e->amp, &info) != AMP_OK) return 0;
    return (uint64_t)info.entries * 1000000 + (uint64_t)info.bytes + hash_bytes(hash_begin, e->views, sizeof e->views);
}

static amp_result open_and_tell(env *e) {
    amp_desc d = host_desc(e, AMP_BF16);
    d.logger.level = AMP_LOG_DEBUG;
    return created(amp_open(&e->amp, &d), &e->amp);
}

static amp_result autocast_decisions(env *e) {
    static const amp_dtype inputs[2] = {AMP_F32, AMP_BF16};
    amp_autocast_desc active;
    amp_plan plan;
    amp_result r = amp_autocast_decide(e->amp, AMP_OP_LINEAR, "fc.weight", inputs, 2, &plan);
    if (r != AMP_OK) return r;
    note_number(e, amp_autocast_active(e->amp, &active));
    note_number(e, (int64_t)plan.compute * 100 + (int64_t)plan.result);
    note_number(e, (int64_t)amp_autocast_compute(e->amp, e->own_op, NULL, AMP_F32, AMP_F32));
    note_number(e, (int64_t)amp_autocast_result(e->amp, AMP_OP_SOFTMAX, NULL, AMP_F32, AMP_BF16));
    note_number(e, (int64_t)amp_autocast_input(e->amp, AMP_F32));
    note_number(e, (int64_t)amp_autocast_output(e->amp, AMP_BF16));
    return AMP_OK;
}

static amp_result autocast_step(env *e, int i) {
    static const char *const patterns[] = {"a*", "b*", "c*", "d*", "e*", "f*", "g*", "h*", "*.head", "h.?.fc"};
    amp_cache_info info;
    if (i >= 20 && i < 30) return amp_layer_override(e->amp, patterns[i - 20], AMP_F32);
    switch (i) {
        case 0: return open_and_tell(e);
        case 1: parameter(e, 0, "fc.weight", AMP_F32, 24, 40); parameter(e, 1, "fc.bias", AMP_F32, 24, 0); return AMP_OK;
        case 2: return amp_param_register(e->amp, e->out.params, 2);
        case 3: return amp_operator_register(e->amp, "my_conv", AMP_CAST_LOWER, &e->own_op);
        case 4: return amp_operator_override(e->amp, AMP_OP_SOFTMAX, AMP_CAST_FP32);
        case 5: return amp_autocast_begin(e->amp, NULL);
        case 6: return amp_autocast_cast(e->amp, e->out.params, AMP_BF16, &e->out.cast);
        case 7: note(e, e->out.cast.data, 24 * 40 * 2); return AMP_OK;
        case 8: return amp_autocast_cast(e->amp, e->out.params + 1, AMP_F16, &e->out.cast);
        case 9: return autocast_decisions(e);
        case 10: return amp_cast_cache_info(e->amp, &info);
        case 11: return amp_recompute_begin(e->amp);
        case 12: return amp_recompute_end(e->amp);
        case 13: return amp_autocast_end(e->amp);
        case 14: amp_cast_cache_clear(e->amp); memset(&e->out.cast, 0, sizeof e->out.cast); return AMP_OK;
        case 15: case 16: case 17: case 18: case 19: return AMP_OK;
        default: return DONE;
    }
}
static void autocast_close(env *e) {
    while (amp_recompute_end(e->amp) == AMP_OK || amp_autocast_end(e->amp) == AMP_OK) {}
    if (e->amp != NULL) amp_param_forget(e->amp, e->out.params, PARAMS);
    amp_close(e->amp);
}

/* ---- Operators: fp32 in a bf16 region, and bf16 on a device whose memory the host cannot see */

enum { ROWS = 17, COLS = 72, WIDE = 136 };

static void operators_describe_first(env *e, amp_dtype dtype) {
    amp_linear_op *linear = e->out.linear;
    amp_matmul_op *matmul = &e->out.matmul;
    amp_attention_op *a = &e->out.attention;
    linear->x = matrix(e, dtype, ROWS, COLS); linear->y = matrix(e, dtype, ROWS, WIDE); linear->pre = matrix(e, dtype, ROWS, WIDE);
    linear->weight = parameter(e, 0, "fc.weight", dtype, WIDE, COLS);
    linear->bias = parameter(e, 1, "fc.bias", dtype, WIDE, 0);
    linear->act = AMP_ACT_GELU;
    linear->dy = matrix(e, dtype, ROWS, WIDE); linear->dx = matrix(e, dtype, ROWS, COLS);
    matmul->a = matrix(e, dtype, ROWS, COLS); matmul->b = matrix(e, dtype, WIDE, COLS); matmul->y = matrix(e, dtype, ROWS, WIDE);
    matmul->trans_b = 1;
    matmul->dy = matrix(e, dtype, ROWS, WIDE); matmul->da = matrix(e, dtype, ROWS, COLS); matmul->db = matrix(e, dtype, WIDE, COLS);
    a->q = amp_tensor4(numbers(e, dtype, 2 * 9 * 2 * 16), dtype, 2, 9, 2, 16);
    a->k = a->v = a->o = a->d_o = a->dq = a->dk = a->dv = a->q;
    a->k.data = numbers(e, dtype, 576); a->v.data = numbers(e, dtype, 576); a->o.data = numbers(e, dtype, 576);
    a->d_o.data = numbers(e, dtype, 576); a->dq.data = numbers(e, dtype, 576);
    a->dk.data = numbers(e, dtype, 576); a->dv.data = numbers(e, dtype, 576);
    a->lse = (float *)numbers(e, AMP_F32, 2 * 2 * 9);
    a->mask.kind = AMP_MASK_CAUSAL;
}

/* A linear layer in fp8 with delayed scaling, its records and their state. */
static amp_result fp8_step(env *e, int i) {
    amp_linear_op *linear = e->out.linear;
    amp_fp8_stats stats;
    amp_desc d = host_desc(e, AMP_FP8);
    amp_result r;
    switch (i) {
        case 0: d.fp8.scaling = AMP_FP8_DELAYED; d.fp8.history = 4; return created(amp_open(&e->amp, &d), &e->amp);
        case 1:
            linear->x = matrix(e, AMP_F32, ROWS, COLS); linear->y = matrix(e, AMP_F32, ROWS, WIDE);
            linear->weight = parameter(e, 0, "fc.weight", AMP_F32, WIDE, COLS);
            linear->dy = matrix(e, AMP_F32, ROWS, WIDE); linear->dx = matrix(e, AMP_F32, ROWS, COLS);
            return AMP_OK;
        case 2: return amp_param_register(e->amp, e->out.params, 1);
        case 3: return amp_autocast_begin(e->amp, NULL);
        case 4: return amp_linear(e->amp, linear);
        case 5: return amp_autocast_end(e->amp);
        case 6: return amp_linear_backward(e->amp, linear);
        case 7:
            r = amp_fp8_stats_get(e->amp, e->out.params, AMP_FP8_DY, &stats);
            if (r == AMP_OK) note_number(e, stats.values);
            return r;
        case 8: return created(amp_state_create(&e->state, faults_system()), &e->state);
        case 9: return amp_fp8_save(e->amp, e->state, "here");
        case 10: return amp_fp8_load(e->amp, e->state, "here");
        default: return DONE;
    }
}

static void fp8_close(env *e) { amp_state_destroy(e->state); autocast_close(e); }

static void operators_describe_norms(env *e, amp_dtype dtype) {
    amp_norm_op *norm = &e->out.layernorm;
    norm->x = matrix(e, dtype, ROWS, COLS); norm->residual = matrix(e, dtype, ROWS, COLS);
    norm->sum = matrix(e, dtype, ROWS, COLS); norm->y = matrix(e, dtype, ROWS, COLS);
    norm->weight = parameter(e, 2, "ln.weight", AMP_F32, COLS, 0); norm->bias = parameter(e, 3, "ln.bias", AMP_F32, COLS, 0);
    norm->mean = (float *)numbers(e, AMP_F32, ROWS); norm->rstd = (float *)numbers(e, AMP_F32, ROWS);
    norm->dy = matrix(e, dtype, ROWS, COLS); norm->dx = matrix(e, dtype, ROWS, COLS);
    e->out.rmsnorm = *norm;
    e->out.rmsnorm.residual.data = e->out.rmsnorm.sum.data = NULL;
    e->out.rmsnorm.y = matrix(e, dtype, ROWS, COLS); e->out.rmsnorm.dx = matrix(e, dtype, ROWS, COLS);
    e->out.rmsnorm.bias = NULL; e->out.rmsnorm.mean = NULL;
    e->out.rmsnorm.rstd = (float *)numbers(e, AMP_F32, ROWS);
    e->out.rmsnorm.weight = parameter(e, 4, "rms.weight", AMP_F32, COLS, 0);
}

static void operators_describe_rest(env *e, amp_dtype dtype) {
    amp_softmax_op *softmax = &e->out.softmax;
    amp_activation_op *act = &e->out.activation;
    amp_swiglu_op *glu = &e->out.swiglu;
    amp_cross_entropy_op *ce = &e->out.cross_entropy;
    softmax->x = amp_tensor4(numbers(e, dtype, 2 * 2 * 9 * 11), dtype, 2, 2, 9, 11);
    softmax->y = softmax->dy = softmax->dx = softmax->x;
    softmax->y.data = numbers(e, dtype, 396); softmax->dy.data = numbers(e, dtype, 396); softmax->dx.data = numbers(e, dtype, 396);
    softmax->mask.lengths = integers(e, 2, 11);
    act->x = matrix(e, dtype, ROWS, WIDE); act->y = matrix(e, dtype, ROWS, WIDE);
    act->dy = matrix(e, dtype, ROWS, WIDE); act->dx = matrix(e, dtype, ROWS, WIDE);
    act->act = AMP_ACT_SILU;
    act->bias = e->out.params + 1;
    glu->gate = matrix(e, dtype, ROWS, WIDE); glu->up = matrix(e, dtype, ROWS, WIDE); glu->y = matrix(e, dtype, ROWS, WIDE);
    glu->dy = matrix(e, dtype, ROWS, WIDE); glu->dgate = matrix(e, dtype, ROWS, WIDE); glu->dup = matrix(e, dtype, ROWS, WIDE);
    glu->gate_bias = glu->up_bias = e->out.params + 1;
    ce->logits = matrix(e, dtype, ROWS, WIDE); ce->dlogits = matrix(e, dtype, ROWS, WIDE);
    ce->labels = integers(e, ROWS, WIDE);
    ce->loss = (float *)numbers(e, AMP_F32, 1);
    e->out.mse.x = matrix(e, dtype, ROWS, COLS); e->out.mse.target = matrix(e, dtype, ROWS, COLS);
    e->out.mse.dx = matrix(e, dtype, ROWS, COLS); e->out.mse.loss = (float *)numbers(e, AMP_F32, 1);
    e->out.head.x = matrix(e, dtype, ROWS, COLS); e->out.head.dx = matrix(e, dtype, ROWS, COLS);
    e->out.head.weight = e->out.linear->weight; e->out.head.labels = ce->labels; e->out.head.chunk = 3;
    e->out.head.loss = (float *)numbers(e, AMP_F32, 1);
    e->out.embedding.ids = integers(e, ROWS, 20);
    e->out.embedding.table = parameter(e, 5, "wte", dtype, 20, COLS); e->out.embedding.positions = parameter(e, 6, "wpe", dtype, 11, COLS);
    e->out.embedding.seq = 11;
    e->out.embedding.y = matrix(e, dtype, ROWS, COLS); e->out.embedding.dy = matrix(e, dtype, ROWS, COLS);
    e->out.dropout.x = matrix(e, dtype, ROWS, COLS); e->out.dropout.y = matrix(e, dtype, ROWS, COLS); e->out.dropout.p = 0.25f;
    e->out.dropout.dy = matrix(e, dtype, ROWS, COLS); e->out.dropout.dx = matrix(e, dtype, ROWS, COLS);
    e->out.rope.q = e->out.rope.k = e->out.rope.dq = e->out.rope.dk = e->out.attention.q;
    e->out.rope.q.data = numbers(e, dtype, 576); e->out.rope.k.data = numbers(e, dtype, 576);
    e->out.rope.dq.data = numbers(e, dtype, 576); e->out.rope.dk.data = numbers(e, dtype, 576);
}

static amp_result operators_forward(env *e, int i) {
    amp_tensor a, b, y;
    switch (i) {
        case 0: return amp_linear(e->amp, e->out.linear);
        case 1: return amp_matmul(e->amp, &e->out.matmul);
        case 2: return amp_attention(e->amp, &e->out.attention);
        case 3: return amp_layernorm(e->amp, &e->out.layernorm);
        case 4: return amp_rmsnorm(e->amp, &e->out.rmsnorm);
        case 5: return amp_softmax(e->amp, &e->out.softmax);
        case 6: return amp_activation(e->amp, &e->out.activation);
        case 7: return amp_swiglu(e->amp, &e->out.swiglu);
        case 8: return amp_cross_entropy(e->amp, &e->out.cross_entropy);
        case 9: return amp_mse(e->amp, &e->out.mse);
        case 10: return amp_embedding(e->amp, &e->out.embedding);
        case 11: return amp_dropout(e->amp, &e->out.dropout);
        case 12: a = e->out.matmul.a; b = e->out.mse.x; y = e->out.mse.dx; return amp_add(e->amp, &a, &b, &y);
        case 13: a = e->out.matmul.a; y = amp_tensor2(e->memory[0], AMP_F16, ROWS, COLS); return amp_cast(e->amp, &a, &y);
        case 14:
            return amp_gemm(e->amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, ROWS, WIDE, COLS, 0.5f, (const float *)e->memory[1], COLS,
                            (const float *)e->memory[2], COLS, 0.25f, (float *)e->memory[3], WIDE);
        case 15: return amp_rope(e->amp, &e->out.rope);
        default:
            return amp_gemm_f64(e->amp, AMP_COL_MAJOR, AMP_TRANS, AMP_NO_TRANS, ROWS, 2, COLS, 0.5, (const double *)e->memory[4], COLS,
                                (const double *)e->memory[4], COLS, 0.25, (double *)e->memory[5], ROWS);
    }
}

static amp_result operators_backward(env *e, int i) {
    switch (i) {
        case 0: return amp_linear_backward(e->amp, e->out.linear);
        case 1: return amp_matmul_backward(e->amp, &e->out.matmul);
        case 2: return amp_attention_backward(e->amp, &e->out.attention);
        case 3: return amp_layernorm_backward(e->amp, &e->out.layernorm);
        case 4: return amp_rmsnorm_backward(e->amp, &e->out.rmsnorm);
        case 5: return amp_softmax_backward(e->amp, &e->out.softmax);
        case 6: return amp_activation_backward(e->amp, &e->out.activation);
        case 7: return amp_swiglu_backward(e->amp, &e->out.swiglu);
        case 8: return amp_embedding_backward(e->amp, &e->out.embedding);
        case 9: return amp_rope_backward(e->amp, &e->out.rope);
        default: return amp_dropout_backward(e->amp, &e->out.dropout);
    }
}

/* On a device whose kernels fail one by one, a backward of several kernels leaves gradients half done when one of them
 * fails; on the CPU it does not. */
static amp_result operators_step(env *e, int i) {
    amp_dtype dtype = e->variant == 1 ? AMP_BF16 : AMP_F32;
    if (e->variant == 1 && (i == 20 || i == 22 || i == 23 || i == 28 || i == 29 || i == 33)) return AMP_OK;
    switch (i) {
        case 0: return open_host(e, AMP_BF16);
        case 1:
            operators_describe_first(e, dtype); operators_describe_norms(e, dtype); operators_describe_rest(e, dtype);
            e->memory[0] = room(e, ROWS * COLS * 2);
            e->memory[1] = numbers(e, AMP_F32, ROWS * COLS); e->memory[2] = numbers(e, AMP_F32, WIDE * COLS);
            e->memory[3] = numbers(e, AMP_F32, ROWS * WIDE);
            e->memory[4] = numbers(e, AMP_F64, ROWS * COLS); e->memory[5] = numbers(e, AMP_F64, ROWS * 2);
            return AMP_OK;
        case 2: return amp_param_register(e->amp, e->out.params, 7);
        case 3: return amp_autocast_begin(e->amp, NULL);
        case 21: return amp_autocast_end(e->amp);
        case 33: return amp_linear_cross_entropy(e->amp, &e->out.head);
        default: return i < 21 ? operators_forward(e, i - 4) : i < 33 ? operators_backward(e, i - 22) : DONE;
    }
}

/* A failed call takes no random numbers.  Every call finds the pool of scratch memory empty. */
static uint64_t operators_observe(env *e) {
    amp_state *state = NULL;
    uint64_t hash;
    if (e->amp != NULL) (void)amp_cleanup(e->amp, NULL);
    if (e->amp == NULL || amp_state_create(&state, faults_system()) != AMP_OK) return 0;
    (void)amp_random_save(e->amp, state, "here");
    hash = hash_state(state);
    amp_state_destroy(state);
    return hash;
}

/* ---- Sets, scalers and optimizers: variant 1 on a device, variant 2 with fp32 masters of bf16 weights by remainders */

static amp_result gradients_create(env *e, int i) {
    static const amp_param_group groups[] = {{"*.bias", 0.5, AMP_EXPLICIT_ZERO, AMP_MASTER_DEFAULT, AMP_DTYPE_DEFAULT}};
    static const amp_param_group eight_bit = {"*", 0, 0, AMP_MASTER_DEFAULT, AMP_MOMENTS_8BIT};
    amp_optimizer_desc o;
    amp_scaler_desc sc;
    amp_grad_set_desc set;
    amp_range ranges[2];
    memset(&o, 0, sizeof o); memset(&sc, 0, sizeof sc); memset(&set, 0, sizeof set); memset(ranges, 0, sizeof ranges);
    if (i == 0) {
        sc.growth_interval = 2;
        return created(amp_scaler_create(e->amp, &e->scaler, &sc), &e->scaler);
    }
    if (i == 1) {
        ranges[0].name = "a"; ranges[0].data = e->memory[2]; ranges[0].count = 50; ranges[0].dtype = AMP_F32;
        ranges[1].name = "b"; ranges[1].data = e->memory[3]; ranges[1].count = 30; ranges[1].dtype = AMP_F32;
        set.ranges = ranges; set.n_ranges = 2; set.clip_norm = 0.5;
        return created(amp_grad_set_create(e->amp, &e->set, &set), &e->set);
    }
    o.params = e->out.params; o.n_params = 3;
    o.groups = groups; o.n_groups = 1;
    o.lr = 0.01; o.weight_decay = 0.1; o.clip_norm = 1; o.result_lag = AMP_LAG_NONE;
    if (e->variant == 2) { o.master = AMP_MASTER_REMAINDER; o.moments = AMP_BF16; }
    if (e->variant == 3) { o.kind = AMP_SGD; o.momentum = 0.9; o.nesterov = 1; }
    if (e->variant == 4) { o.kind = AMP_LION; o.sync_every = 1; o.sync_wire = AMP_BF16; }
    if (e->variant == 5) o.groups = &eight_bit;
    return created(amp_optimizer_create(e->amp, &e->optimizer, &o), &e->optimizer);
}

static amp_result gradients_unscale(env *e) {
    amp_range range;
    int32_t apply = 0;
    amp_result r;
    memset(&range, 0, sizeof range);
    range.name = "a"; range.data = e->memory[2]; range.count = 50; range.dtype = AMP_F32;
    r = amp_scaler_unscale(e->scaler, &range, 1, &apply);
    if (r == AMP_OK) note_number(e, apply + 2 * amp_scaler_enabled(e->scaler));
    return r;
}

static amp_result gradients_outcome(env *e) {
    amp_step_result outcome;
    amp_grad_stats found;
    amp_result r = amp_grad_set_stats(amp_optimizer_grad_set(e->optimizer), &found);
    memset(&outcome, 0, sizeof outcome);
    if (r != AMP_OK) return r;
    note_number(e, amp_step_result_next(e->optimizer, &outcome));
    note(e, &outcome.norm, sizeof outcome.norm);
    note_number(e, outcome.applied * 100 + outcome.growth_tracker);
    note(e, &found.norm, sizeof found.norm);
    return AMP_OK;
}

static amp_result gradients_query(env *e) {
    amp_scaler_desc scaler;
    amp_optimizer_desc optimizer;
    amp_parameter_bytes bytes;
    amp_k_scaler state;
    amp_result r = amp_scaler_query(e->scaler, &scaler);
    if (r == AMP_OK) r = amp_optimizer_query(e->optimizer, &optimizer);
    if (r == AMP_OK) r = amp_optimizer_bytes(e->optimizer, &bytes);
    if (r == AMP_OK) r = amp_scaler_get(e->scaler, &state);
    if (r != AMP_OK) return r;
    note_number(e, scaler.growth_interval + bytes.parameters + (int64_t)amp_scaler_scale(e->scaler) + state.growth_tracker);
    CHECK(amp_scaler_scale_ptr(e->scaler) != NULL && amp_scaler_device(e->scaler) != NULL && amp_grad_set_device(e->set) != NULL);
    return AMP_OK;
}

/* New gradients, as a backward pass leaves them. */
static void gradients_fill(env *e, int step) {
    int i;
    int64_t k;
    for (i = 0; i < 3; i++) {
        amp_tensor *g = &e->out.params[i].grad;
        for (k = 0; k < amp_tensor_count(g); k++) ((float *)g->data)[k] = 65536 * (amp_random_uniform((uint64_t)step, (uint64_t)(100 * i + k)) - 0.5f);
        (void)amp_param_accumulate(&e->out.params[i]);
    }
}

static amp_result gradients_open(env *e, int i) {
    amp_dtype dtype = e->variant == 2 ? AMP_BF16 : AMP_F32;
    switch (i) {
        case 0: return open_host(e, e->variant == 2 ? AMP_BF16 : AMP_F32);
        case 1:
            parameter(e, 0, "fc.weight", dtype, 12, 9); parameter(e, 1, "fc.bias", dtype, 12, 0); parameter(e, 2, "out.weight", dtype, 7, 12);
            e->memory[2] = numbers(e, AMP_F32, 50); e->memory[3] = numbers(e, AMP_F32, 30);
            return AMP_OK;
        case 2: return amp_param_register(e->amp, e->out.params, 3);
        case 3: return gradients_create(e, 0);
        case 4: return gradients_create(e, 1);
        default: return gradients_create(e, 2);
    }
}

static amp_result gradients_step(env *e, int i) {
    if (i < 6) return gradients_open(e, i);
    switch (i) {
        case 6: gradients_fill(e, 1); return amp_params_broadcast(e->amp, e->out.params, 3);
        case 7: return amp_step(e->optimizer, e->scaler);
        case 8: return gradients_outcome(e);
        case 9: gradients_fill(e, 2); return AMP_OK;
        case 10: return amp_scaler_check(e->scaler, e->set, AMP_CHECK_UNSCALE);
        case 11: return amp_grad_set_apply(e->set);
        case 12: return amp_scaler_check(e->scaler, amp_optimizer_grad_set(e->optimizer), AMP_CHECK_READ);
        case 13: return amp_optimizer_step(e->optimizer, e->scaler);
        case 14: return amp_scaler_update(e->scaler);
        case 15: return gradients_outcome(e);
        case 16: return amp_scaler_rescale(e->scaler, e->set, 0);
        case 17: return amp_optimizer_set_lr(e->optimizer, 0.02);
        case 18: return amp_optimizer_set_clip(e->optimizer, 0.75);
        case 19: { amp_result r = amp_optimizer_set_accumulation(e->optimizer, 2); return r == AMP_OK ? amp_optimizer_zero_grad(e->optimizer) : r; }
        case 20: gradients_fill(e, 3); return AMP_OK;
        case 21: return amp_step(e->optimizer, e->scaler);
        case 22: return created(amp_state_create(&e->state, faults_system()), &e->state);
        case 23: return amp_optimizer_save(e->optimizer, e->state, "opt");
        case 24: return amp_scaler_save(e->scaler, e->state, "scaler");
        case 25: gradients_fill(e, 4); return amp_step(e->optimizer, e->scaler);
        case 26: return gradients_outcome(e);
        case 27: return amp_optimizer_load(e->optimizer, e->state, "opt");
        case 28: return amp_scaler_load(e->scaler, e->state, "scaler");
        case 29: gradients_fill(e, 5); return AMP_OK;
        case 30: return amp_step(e->optimizer, e->scaler);
        case 31: return amp_step_result_flush(e->optimizer);
        case 32: return gradients_outcome(e);
        case 33: return amp_optimizer_rebuild_masters(e->optimizer);
        case 34: return amp_scaler_set_rule(e->scaler, 4, 0.25, 3);
        case 35: return amp_scaler_set_scale(e->scaler, 4096);
        case 36: return gradients_query(e);
        case 37: return amp_optimizer_set_weight(e->optimizer, &e->out.params[0], (const float *)e->out.params[0].grad.data);
        case 38: gradients_fill(e, 6); return AMP_OK;
        case 39: return gradients_unscale(e);
        case 40: return amp_scaler_update_with(e->scaler, amp_scaler_found(e->scaler, NULL, AMP_F32, 0) == 0);
        case 41: return amp_grad_set_save(e->set);
        case 42: gradients_fill(e, 7); return AMP_OK;
        case 43: return amp_grad_set_restore(e->set);
        case 44: return amp_state_save_ranks(e->amp, e->state, e->path[0]);
        case 45: return amp_state_load_ranks(e->amp, &e->loaded, e->path[0]);
        default: return DONE;
    }
}
static void gradients_close(env *e) {
    amp_grad_set_destroy(e->set);
    amp_optimizer_destroy(e->optimizer);
    amp_scaler_destroy(e->scaler);
    amp_state_destroy(e->state);
    amp_state_destroy(e->loaded);
    for (int save = 1; save < 3; save++) {
        char part[300];
        snprintf(part, sizeof part, "%s.%d.0", e->path[0], save);
        remove(part);
    }
    if (e->amp != NULL) amp_param_forget(e->amp, e->out.params, PARAMS);
    amp_close(e->amp);
}

/* All that optimizer and scaler would save, and what has been saved. */
static uint64_t gradients_observe(env *e) {
    amp_state *state = NULL;
    uint64_t hash = hash_state(e->state);
    if (amp_state_create(&state, faults_system()) != AMP_OK) return 0;
    if (e->optimizer != NULL) (void)amp_optimizer_save(e->optimizer, state, "o");
    if (e->scaler != NULL) (void)amp_scaler_save(e->scaler, state, "s");
    hash ^= 3 * hash_state(state);
    amp_state_destroy(state);
    return hash;
}

/* ---- Files that all scenarios read */

static char fixture[256];           /* what their paths begin with */

static const char *fixture_path(const char *name) {
    static char paths[4][300];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, 300, "%s_%s", fixture, name);
    return path;
}
static void fixture_file(const char *name, const void *data, size_t bytes) {
    CHECK_OK(amp_file_write_atomic(NULL, fixture_path(name), data, bytes));
}
/* 30 rows of `row` values whose bytes are a function of their place. */
static void fixture_npy(const char *name, const char *descr, int row, size_t size) {
    unsigned char file[4096];
    size_t i, n = 30 * (size_t)row * size;
    memset(file, ' ', 128);
    memcpy(file, "\x93NUMPY\x01\x00\x76\x00", 10);
    snprintf((char *)file + 10, 100, "{'descr': '%s', 'fortran_order': False, 'shape': (30, %d), }", descr, row);
    file[strlen((char *)file)] = ' ';
    file[127] = '\n';
    for (i = 0; i < n; i++) file[128 + i] = (unsigned char)(i * 7 % 64);
    fixture_file(name, file, 128 + n);
}
static void fixtures_write(void) {
    static const char settings[] = "dtype = bf16\nclip_norm = 1.5\n# a comment\ngrowth_interval = 5\n";
    uint16_t tokens[700];
    char name[16];
    int i, k;
    snprintf(fixture, sizeof fixture, "%s/amp_anomaly_%ld", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    for (i = 0; i < 3; i++) {
        for (k = 0; k < 700; k++) tokens[k] = (uint16_t)(amp_random_u32((uint64_t)i, (uint64_t)k) % 60);
        snprintf(name, sizeof name, "tok%d.bin", i);
        fixture_file(name, tokens, sizeof tokens - (size_t)i * 100);
    }
    fixture_npy("x.npy", "<f4", 5, 4);
    fixture_npy("y.npy", "<i4", 1, 4);
    fixture_file("settings", settings, sizeof settings - 1);
}
static void fixtures_remove(void) {
    static const char *const names[] = {"tok0.bin", "tok1.bin", "tok2.bin", "x.npy", "y.npy", "settings"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; i++) remove(fixture_path(names[i]));
}

/* ---- Data.  variant 0: a pattern of token files, shuffled, two workers; 1: the same to a device; 2: one file, no
 * workers; 3: arrays; 4: a callback */

static int callback_read(void *user, const amp_sample *sample, void *const *fields) {
    int32_t i;
    (void)user;
    for (i = 0; i < 6; i++) ((float *)fields[0])[i] = (float)(sample->sample * 10 + i);
    ((int32_t *)fields[1])[0] = (int32_t)sample->sample;
    return 0;
}

static amp_result data_create(env *e) {
    static float rows[40 * 6];
    amp_tensor tensors[2];
    const char *arrays[2];
    amp_loader_desc d;
    amp_source source;
    memset(&d, 0, sizeof d);
    memset(&source, 0, sizeof source);
    d.batch = 4;
    d.workers = e->variant == 2 ? AMP_NO_WORKERS : 2;
    d.shuffle = e->variant != 2;
    d.seed = 11;
    d.timeout_ms = 30000;
    if (e->variant <= 2) {
        d.path = fixture_path(e->variant == 2 ? "tok1.bin" : "tok?.bin");
        d.format = AMP_TOKENS_U16;
        d.seq = 8;
        d.vocab = 64;
        d.last_batch = AMP_LAST_PAD;
    } else if (e->variant == 3) {
        arrays[0] = fixture_path("x.npy"); arrays[1] = fixture_path("y.npy");
        d.arrays = arrays;
        d.n_arrays = 2;
    } else if (e->variant == 5) {
        tensors[0] = amp_tensor2(rows, AMP_F32, 40, 6);
        tensors[1] = amp_tensor1(rows, AMP_I32, 40);
        d.tensors = tensors;
        d.n_tensors = 2;
    } else {
        source.read = callback_read;
        source.samples = 40;
        source.fields[0].dtype = AMP_F32; source.fields[0].count = 6;
        source.fields[1].dtype = AMP_I32; source.fields[1].count = 1;
        source.n_fields = 2;
        d.source = &source;
    }
    return created(amp_loader_create(e->amp, &e->loader, &d), &e->loader);
}

static amp_result data_next(env *e) {
    amp_batch *b = &e->out.batch;
    amp_result r = amp_loader_next(e->loader, b);
    if (r != AMP_OK) return r;
    note_number(e, b->epoch * 1000 + b->index);
    note(e, b->fields[0], (size_t)(b->batch * b->seq * 4));
    note(e, b->fields[1], (size_t)(b->batch * 4));
    return AMP_OK;
}

static amp_result data_info(env *e) {
    amp_loader_info info;
    amp_loader_desc d;
    amp_result r = amp_loader_info_get(e->loader, &info);
    if (r == AMP_OK) r = amp_loader_query(e->loader, &d);
    if (r != AMP_OK) return r;
    note_number(e, info.samples * 1000 + info.batches + d.prefetch);
    note_number(e, (int64_t)info.hash);
    return AMP_OK;
}

/* What fails cannot keep a loader from being stopped. */
static amp_result data_stop(env *e) {
    amp_loader_stop(e->loader);
    CHECK_ERR(amp_loader_next(e->loader, &e->out.batch), AMP_ERR_STATE);
    return AMP_OK;
}

static amp_result data_step(env *e, int i) {
    switch (i) {
        case 0: return open_host(e, AMP_F32);
        case 1: return data_create(e);
        case 10: return amp_loader_seek(e->loader, 1, 2);
        case 13: return created(amp_state_create(&e->state, faults_system()), &e->state);
        case 14: return amp_loader_save(e->loader, e->state, "data");
        case 16: return amp_loader_load(e->loader, e->state, "data");
        case 17: return data_info(e);
        case 20: return data_stop(e);
        default: return i < 20 ? data_next(e) : DONE;
    }
}
static void data_close(env *e) {
    amp_loader_destroy(e->loader);
    amp_state_destroy(e->state);
    amp_close(e->amp);
}
static uint64_t data_observe(env *e) {
    amp_loader_info info;
    if (e->loader == NULL || amp_loader_info_get(e->loader, &info) != AMP_OK) return 0;
    return (uint64_t)(info.epoch * 1000 + info.index) ^ hash_state(e->state);
}

/* ---- Settings and the monitor */

/* Of the host's system nothing is asked. */
static amp_result settings_open_env(void) {
    amp_context *amp = NULL;
    amp_scaler *scaler = NULL;
    amp_result r = amp_open_env(&amp, &scaler);
    amp_scaler_destroy(scaler);
    amp_close(amp);
    return r;
}

static amp_result settings_step(env *e, int i) {
    static const char text[] = "nan_action = stop\nmax_skips = 7\n";
    amp_settings *s = &e->out.settings;
    char all[4096];
    switch (i) {
        case 0: return amp_settings_read_file(s, faults_system(), fixture_path("settings"));
        case 1: return amp_settings_read_text(s, "here", text, sizeof text - 1);
        case 2: return amp_settings_read_env(s);
        case 3: return amp_settings_set(s, "memory_interval", "50");
        case 4: return amp_settings_check(s);
        case 5: note_number(e, (int64_t)amp_settings_text(s, all, sizeof all)); note_text(e, all); return AMP_OK;
        case 6: return settings_open_env();
        default: return DONE;
    }
}
static void settings_close(env *e) { (void)e; }

/* Lines that cannot be written are kept: the call did what it was to do. */
static amp_result kept(env *e, amp_result r) {
    e->unfinished = 1;
    if (r != AMP_ERR_WRITE || now.style == FAULT_FOREVER) return r;
    now.failures++;
    CHECK_MSG(faults_fired() > 0 && fault_wants(now.f, r), "returned %d: %s", (int)r, here());
    CHECK_MSG(says_what(r) && strstr(amp_last_error(), "amp_anomaly") != NULL, "%s", here());
    faults_disarm();
    return AMP_OK;
}

static amp_result watch_open(env *e, int i) {
    static const char torn[] = "{\"event\": \"host\"}\n{\"event\": \"to";
    amp_monitor_desc m;
    amp_tensor_stats_desc n;
    memset(&m, 0, sizeof m);
    memset(&n, 0, sizeof n);
    switch (i) {
        case 0: return gradients_create(e, 0);
        case 1: return gradients_create(e, 2);
        case 2: return amp_file_write_atomic(NULL, e->path[1], torn, sizeof torn - 1);
        case 3:
            m.path = e->path[1];
            m.append = 1;
            m.optimizer = e->optimizer; m.scaler = e->scaler;
            m.log_interval = m.memory_interval = 1;
            m.cleanup_interval = 2;
            return created(amp_monitor_create(e->amp, &e->monitor, &m), &e->monitor);
        default:
            n.params = e->out.params; n.n_params = 3;
            n.scaler = e->scaler;
            n.dtype = AMP_F16;
            n.interval = 1;
            return created(amp_tensor_stats_create(e->amp, &e->numerics, &n), &e->numerics);
    }
}

static amp_result watch_numerics(env *e) {
    amp_tensor_stats_report report;
    char text[2000];
    amp_result r = amp_tensor_stats_step(e->numerics, &report);
    if (r != AMP_OK) return r;
    note_number(e, (int64_t)amp_tensor_stats_text(&report, text, sizeof text));
    CHECK(amp_tensor_stats_find(&report, report.rows[0].name, report.rows[0].gradient) == report.rows);
    note_text(e, text);
    return AMP_OK;
}

static amp_result watch_records(env *e) {
    amp_step_record record;
    while (amp_monitor_next(e->monitor, &record) == 1) {
        note_number(e, record.result.step * 10 + record.result.applied);
        note(e, &record.loss, sizeof record.loss);
    }
    return AMP_OK;
}

static amp_result watch_iteration(env *e, int phase, int step) {
    amp_step_info info;
    memset(&info, 0, sizeof info);
    info.loss = 1.0 / (1 + step);
    info.tokens = 100;
    switch (phase) {
        case 0: return amp_monitor_phase(e->monitor, AMP_PHASE_DATA);
        case 1: amp_profile_push(e->amp, "here"); gradients_fill(e, step); amp_profile_pop(e->amp); return AMP_OK;
        case 2: return amp_monitor_phase(e->monitor, AMP_PHASE_BACKWARD);
        case 3: return watch_numerics(e);
        case 4: return amp_monitor_phase(e->monitor, AMP_PHASE_OPTIMIZER);
        case 5: return amp_step(e->optimizer, e->scaler);
        case 6: return kept(e, amp_monitor_step(e->monitor, &info));
        default: return watch_records(e);
    }
}

static amp_result watch_status(env *e) {
    amp_status status;
    char text[8192];
    amp_result r = amp_status_get(e->amp, e->scaler, 0, &status);
    if (r != AMP_OK) return r;
    CHECK(amp_status_text(&status, text, sizeof text) > 0 && amp_status_json(&status, text, sizeof text) > 0);
    note(e, &status.scale, sizeof status.scale);
    note_number(e, amp_machine_text(&status.machine, text, sizeof text) > 0);
    return AMP_OK;
}

static amp_result watch_settings(env *e, int apply) {
    amp_optimizer_desc o;
    amp_scaler_desc s;
    amp_monitor_desc m;
    amp_loader_desc l;
    amp_desc d;
    memset(&o, 0, sizeof o); memset(&s, 0, sizeof s); memset(&m, 0, sizeof m); memset(&d, 0, sizeof d);
    if (apply) return amp_settings_apply(&e->out.settings, e->amp, e->scaler, e->optimizer, e->monitor);
    memset(&l, 0, sizeof l);
    CHECK_OK(amp_settings_fill_loader(&e->out.settings, &l));
    return amp_settings_fill(&e->out.settings, e->amp, &d, &s, &o, &m);
}

static amp_result watch_end(env *e, int i) {
    amp_epoch_record epoch;
    amp_epoch_summary summary;
    amp_monitor_desc desc;
    char text[2000];
    memset(&epoch, 0, sizeof epoch);
    switch (i) {
        case 0: return kept(e, amp_monitor_write(e->monitor, "{\"event\": \"mine\"}"));
        case 1: return kept(e, amp_monitor_flush(e->monitor));
        case 2: return watch_records(e);
        case 3: return kept(e, amp_monitor_epoch(e->monitor, &epoch));
        case 4: return amp_monitor_summary(e->monitor, &summary) == AMP_OK && amp_epoch_summary_text(&summary, text, sizeof text) > 0 ? AMP_OK : AMP_ERR_STATE;
        case 5: return amp_monitor_query(e->monitor, &desc);
        case 6: return watch_status(e);
        case 7: return watch_settings(e, 0);
        case 8: return amp_settings_set(&e->out.settings, "clip_norm", "0.25");
        case 9: return watch_settings(e, 1);
        default: return DONE;
    }
}

static amp_result watch_step(env *e, int i) {
    if (i < 3) return gradients_open(e, i);
    if (i < 8) return watch_open(e, i - 3);
    if (i < 8 + 4 * 8) return watch_iteration(e, (i - 8) % 8, (i - 8) / 8);
    return watch_end(e, i - 40);
}
static void watch_close(env *e) {
    amp_tensor_stats_destroy(e->numerics);
    amp_monitor_destroy(e->monitor);
    gradients_close(e);
}
/* Of each line what does not depend on time. */
static void watch_after(env *e) {
    char *line, *text;
    void *data = NULL;
    size_t bytes = 0;
    if (amp_file_read_all(NULL, e->path[1], &data, &bytes) != AMP_OK) { note_text(e, "no file"); return; }
    for (line = (char *)data; *line != 0; line = text + 1) {
        size_t n;
        text = strchr(line, '\n');
        CHECK_MSG(text != NULL, "a torn line: %s: %s", line, here());
        if (text == NULL) break;
        for (n = 0; line + n < text && strncmp(line + n, "tokens_per_s", 12) != 0; n++) {}
        note(e, line, n);
    }
    amp_file_free(NULL, data, bytes);
}

/* ---- Care.  The host's step is a linear layer and a loss; what it computes lies outside the watched memory */

enum { SAMPLES = 16, FEATURES = 8, CLASSES = 10 };
static struct {
    float x[SAMPLES * FEATURES], y[SAMPLES * CLASSES], dx[SAMPLES * FEATURES], loss;
    int32_t labels[SAMPLES];
    amp_linear_op linear;
    amp_cross_entropy_op ce;
} model;

static void model_describe(env *e) {
    int i;
    memset(&model, 0, sizeof model);
    for (i = 0; i < SAMPLES * FEATURES; i++) model.x[i] = 2 * amp_random_uniform(3, (uint64_t)i) - 1;
    for (i = 0; i < SAMPLES; i++) model.labels[i] = i * 7 % CLASSES;
    model.linear.x = amp_tensor2(model.x, AMP_F32, SAMPLES, FEATURES);
    model.linear.y = amp_tensor2(model.y, AMP_F32, SAMPLES, CLASSES);
    model.linear.dx = amp_tensor2(model.dx, AMP_F32, SAMPLES, FEATURES);
    model.linear.dy = model.linear.y;
    model.linear.weight = parameter(e, 0, "fc.weight", AMP_F32, CLASSES, FEATURES);
    model.linear.bias = parameter(e, 1, "fc.bias", AMP_F32, CLASSES, 0);
    model.ce.logits = model.ce.dlogits = model.linear.y;
    model.ce.labels = model.labels;
    model.ce.loss = &model.loss;
    parameter(e, 2, "out.weight", AMP_F32, 3, 4);           /* takes no part */
    e->out.params[2].grad.data = NULL;
}

static int model_forward(void *user, amp_context *amp) {
    env *e = (env *)user;
    amp_result r = amp_autocast_begin(amp, NULL), end;
    if (r != AMP_OK) return (int)r;
    model.ce.grad_scale = e->scaler ? amp_scaler_scale_ptr(e->scaler) : NULL;
    r = amp_linear(amp, &model.linear);
    if (r == AMP_OK) r = amp_cross_entropy(amp, &model.ce);
    end = amp_autocast_end(amp);
    return (int)(r == AMP_OK ? end : r);
}
static int model_step(void *user, amp_context *amp) {
    int r = model_forward(user, amp);
    return r == 0 ? (int)amp_linear_backward(amp, &model.linear) : r;
}

/* y = x weight^T with a frozen weight, for finite differences. */
static amp_linear_op plain;
static amp_param plain_weight;
static int linear_forward(void *user, amp_context *amp) {
    amp_result r = amp_autocast_begin(amp, NULL), end;
    (void)user;
    if (r != AMP_OK) return (int)r;
    r = amp_linear(amp, &plain);
    end = amp_autocast_end(amp);
    return (int)(r == AMP_OK ? end : r);
}
static int linear_backward(void *user, amp_context *amp) { (void)user; return (int)amp_linear_backward(amp, &plain); }

static amp_verify_desc care_verify_desc(env *e) {
    static amp_range output;
    amp_verify_desc d;
    output.name = "loss"; output.data = &model.loss; output.count = 1; output.dtype = AMP_F32;
    memset(&d, 0, sizeof d);
    d.step = model_step; d.user = e;
    d.params = e->out.params; d.n_params = 3;
    d.outputs = &output; d.n_outputs = 1;
    d.optimizer = e->optimizer; d.scaler = e->scaler;
    return d;
}

static amp_result care_verify(env *e) {
    amp_verify_desc d = care_verify_desc(e);
    amp_verify_report report;
    char text[4000];
    amp_result r = amp_verify(e->amp, &d, &report);
    if (r == AMP_OK) CHECK(amp_verify_text(&report, text, sizeof text) > 0);
    return r;
}

static amp_result care_gradcheck(env *e) {
    static amp_range in, in_grad, out, out_grad;
    static float grad[SAMPLES * CLASSES];
    amp_gradcheck_desc d;
    amp_gradcheck_report report;
    char text[400];
    amp_result r;
    memset(&d, 0, sizeof d);
    in.name = "x"; in.data = model.x; in.count = SAMPLES * FEATURES; in.dtype = AMP_F32;
    in_grad = in; in_grad.data = model.dx;
    out.name = "y"; out.data = model.y; out.count = SAMPLES * CLASSES; out.dtype = AMP_F32;
    out_grad = out; out_grad.data = grad;
    plain = model.linear;
    plain_weight = *model.linear.weight;
    plain_weight.grad.data = NULL;
    plain_weight.id = 0;
    plain.weight = &plain_weight;
    plain.bias = NULL;
    plain.dy.data = grad;
    d.forward = linear_forward; d.backward = linear_backward; d.user = e;
    d.inputs = &in; d.input_grads = &in_grad; d.n_inputs = 1;
    d.outputs = &out; d.output_grads = &out_grad; d.n_outputs = 1;
    d.directions = 2;
    r = amp_gradcheck(e->amp, &d, &report);
    if (r == AMP_OK) CHECK(amp_gradcheck_text(&report, text, sizeof text) > 0);
    return r;
}

static int care_prepare(void *user, amp_context *amp, int64_t batch) { (void)user; (void)amp; (void)batch; return 0; }

static amp_result care_tune(env *e) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16};
    amp_verify_desc verify = care_verify_desc(e);
    amp_tune_desc d;
    amp_tune_report report;
    char text[8000];
    amp_result r;
    memset(&d, 0, sizeof d);
    d.step = model_step; d.prepare = care_prepare; d.user = e;
    d.dtypes = dtypes; d.n_dtypes = 2;
    d.max_batch = 2;
    d.iterations = 2; d.warmup = 1;
    d.verify = &verify;
    d.file = e->path[0]; d.model = "small";
    r = amp_tune(e->amp, &d, &report);
    if (r == AMP_OK) CHECK(amp_tune_text(&report, text, sizeof text) > 0 && strstr(text, "nan") == NULL);
    return r;
}

static amp_result care_advise(env *e, int apply) {
    amp_advise_desc d;
    amp_advice advice;
    char text[4000];
    double losses[128];
    amp_result r;
    int i;
    memset(&d, 0, sizeof d);
    for (i = 0; i < 128; i++) losses[i] = 3 - 0.01 * i;
    d.losses = losses; d.n_losses = 128;
    d.optimizer = e->optimizer; d.scaler = e->scaler;
    r = amp_advise(e->amp, &d, &advice);
    if (r == AMP_OK) CHECK(amp_advice_text(&advice, text, sizeof text) > 0);
    return r == AMP_OK && apply ? amp_advice_apply(&advice, e->amp, e->scaler, e->optimizer) : r;
}

static int own_save(void *user, amp_state *state) { int32_t x = 7; (void)user; return (int)amp_state_put(state, "mine", AMP_I32, &x, 1); }
static int own_load(void *user, const amp_state *state) { int32_t x; (void)user; return (int)amp_state_get(state, "mine", AMP_I32, &x, 1); }

static amp_result care_recovery(env *e) {
    amp_recovery_desc d;
    memset(&d, 0, sizeof d);
    d.params = e->out.params; d.n_params = 3;
    d.optimizer = e->optimizer; d.scaler = e->scaler;
    d.loader = e->loader;
    d.interval = 1;
    d.save = own_save; d.load = own_load; d.user = e;
    return created(amp_recovery_create(e->amp, &e->recovery, &d), &e->recovery);
}

/* bad 1: the record says that the loss was not finite. */
static amp_result care_record(env *e, int bad) {
    amp_step_record record;
    amp_recovery_event event;
    amp_result r;
    int told = e->told;
    memset(&record, 0, sizeof record);
    record.result = e->outcome;
    record.dtype = AMP_F32;
    if (bad) { record.anomaly = AMP_ANOMALY_LOSS; record.action = AMP_NAN_RECOVER; record.loss = (double)amp_f32_from_f16(0x7e00); }
    e->unfinished = bad;
    r = amp_recovery_step(e->recovery, &record, &event);
    if (r != AMP_OK) return r;
    note_number(e, (int64_t)event.action);
    e->fallen_back |= !bad && e->told > told;       /* no room for this snapshot: the one before stays, with a warning */
    return AMP_OK;
}

static amp_result care_train(env *e) {
    amp_result r = amp_step(e->optimizer, e->scaler);
    if (r == AMP_OK) CHECK_EQ(amp_step_result_next(e->optimizer, &e->outcome), 1);
    return r;
}

static amp_result care_memory(env *e) {
    amp_recovery_event event;
    amp_result r = amp_recovery_memory(e->recovery, &event);
    if (r == AMP_OK) note_number(e, (int64_t)event.action);
    return r;
}

static amp_result care_placement(env *e) {
    amp_range range;
    memset(&range, 0, sizeof range);
    range.name = "x"; range.data = model.x; range.count = 4; range.dtype = AMP_F32;
    return amp_verify_placement(e->amp, &range, 1);
}

static amp_result care_step(env *e, int i) {
    switch (i) {
        case 0: return open_host(e, AMP_F32);
        case 1: model_describe(e); return AMP_OK;
        case 2: return amp_param_register(e->amp, e->out.params, 3);
        case 3: return gradients_create(e, 0);
        case 4: return gradients_create(e, 2);
        case 5: return care_verify(e);
        case 6: return e->variant == 1 ? AMP_OK : care_placement(e);
        case 7: return care_tune(e);
        case 8: return care_advise(e, 0);
        case 9: return care_recovery(e);
        case 10: case 13: return (amp_result)model_step(e, e->amp);
        case 11: case 14: return care_train(e);
        case 12: case 15: return care_record(e, 0);
        case 16: return care_record(e, 1);
        case 17: return care_memory(e);
        case 18: return amp_recovery_batch(e->recovery, NULL);
        case 19: return care_advise(e, 1);
        case 20: return care_gradcheck(e);
        default: return DONE;
    }
}
static void care_close(env *e) {
    amp_recovery_destroy(e->recovery);
    gradients_close(e);
}

/* ---- Adaptive precision: every step is a check, and the first that fits moves the layer down */

static amp_result adapt_create(env *e) {
    amp_adapt_desc d;
    memset(&d, 0, sizeof d);
    d.params = e->out.params; d.n_params = 3;
    d.scaler = e->scaler;
    d.interval = 1; d.checks = 1;
    return created(amp_adapt_create(e->amp, &e->adapt, &d), &e->adapt);
}

/* A check that finds no memory is left out, with a warning. */
static amp_result adapt_train(env *e) {
    int told = e->told;
    amp_result r = (amp_result)model_step(e, e->amp);
    e->fallen_back |= e->told > told;
    return r;
}

static amp_result adapt_look(env *e) {
    amp_adapt_record record;
    amp_adapt_desc d;
    char text[1000];
    while (amp_adapt_next(e->adapt, &record)) {
        CHECK(amp_adapt_json(&record, text, sizeof text) < sizeof text);
        note_text(e, text);
    }
    CHECK(amp_adapt_text(e->adapt, text, sizeof text) < sizeof text);
    note_text(e, text);
    CHECK_OK(amp_adapt_query(e->adapt, &d));
    return amp_adapt_layer(e->adapt, 0, &record);
}

static amp_result adapt_step(env *e, int i) {
    switch (i) {
        case 0: return open_host(e, AMP_F32);
        case 1: model_describe(e); return AMP_OK;
        case 2: return amp_param_register(e->amp, e->out.params, 3);
        case 3: return gradients_create(e, 0);
        case 4: return gradients_create(e, 2);
        case 5: return adapt_create(e);
        case 6: case 9: case 16: return adapt_train(e);
        case 7: case 10: case 17: return amp_adapt_step(e->adapt);
        case 8: case 11: case 18: return adapt_look(e);
        case 12: return created(amp_state_create(&e->state, faults_system()), &e->state);
        case 13: return amp_adapt_save(e->adapt, e->state, "adapt");
        case 14: return amp_adapt_load(e->adapt, e->state, "adapt");
        case 15: return amp_adapt_freeze(e->adapt, 1);
        default: return DONE;
    }
}
static void adapt_close(env *e) {
    amp_adapt_destroy(e->adapt);
    gradients_close(e);
}

/* ---- A short training: tokens from a loader, an embedding and a linear layer, in bf16, with scaler, monitor and
 * recovery, saved and loaded in the middle, and brought back from a loss that is not finite */

enum { VOCAB = 64, WIDTH = 24, TOKENS = 32, ITERATION = 13, ITERATIONS = 5 };

static struct { float x[TOKENS * WIDTH], logits[TOKENS * VOCAB], dx[TOKENS * WIDTH], loss; } net;

static void training_describe(env *e) {
    amp_linear_op *linear = &e->out.linear[0];
    memset(&net, 0, sizeof net);
    e->out.embedding.table = parameter(e, 0, "wte", AMP_F32, VOCAB, WIDTH);
    linear->weight = parameter(e, 1, "head.weight", AMP_F32, VOCAB, WIDTH);
    linear->bias = parameter(e, 2, "head.bias", AMP_F32, VOCAB, 0);
    e->out.embedding.y = linear->x = amp_tensor2(net.x, AMP_F32, TOKENS, WIDTH);
    linear->y = linear->dy = e->out.cross_entropy.logits = e->out.cross_entropy.dlogits = amp_tensor2(net.logits, AMP_F32, TOKENS, VOCAB);
    linear->dx = e->out.embedding.dy = amp_tensor2(net.dx, AMP_F32, TOKENS, WIDTH);
    e->out.cross_entropy.loss = &net.loss;
}

static amp_result training_open(env *e, int i) {
    amp_monitor_desc m;
    switch (i) {
        case 0: return open_host(e, AMP_BF16);
        case 1: training_describe(e); return AMP_OK;
        case 2: return amp_param_register(e->amp, e->out.params, 3);
        case 3: return gradients_create(e, 0);
        case 4: return gradients_create(e, 2);
        case 5: return data_create(e);
        case 6:
            memset(&m, 0, sizeof m);
            m.path = e->path[1];
            m.optimizer = e->optimizer; m.scaler = e->scaler;
            m.log_interval = m.memory_interval = 1;
            m.nan_action = AMP_NAN_RECOVER;
            return created(amp_monitor_create(e->amp, &e->monitor, &m), &e->monitor);
        default: return care_recovery(e);
    }
}

/* Records are taken one at a time, so that recovery can be called again with the same one. */
static amp_result training_recover(env *e) {
    amp_recovery_event event;
    amp_result r;
    int told = e->told;
    while (e->has_record || amp_monitor_next(e->monitor, &e->record) == 1) {
        e->has_record = 1;
        e->unfinished = e->record.anomaly != AMP_ANOMALY_NONE;
        r = amp_recovery_step(e->recovery, &e->record, &event);
        if (r != AMP_OK) return r;
        e->fallen_back |= !e->unfinished && e->told > told;
        e->has_record = 0;
        note_number(e, e->record.result.step * 100 + (int64_t)event.action);
    }
    return AMP_OK;
}

static amp_result training_iteration(env *e, int phase, int step) {
    amp_step_info info;
    memset(&info, 0, sizeof info);
    info.loss = step == 3 ? (double)amp_f32_from_f16(0x7e00) : (double)net.loss;
    info.tokens = TOKENS;
    switch (phase) {
        case 0: return amp_monitor_phase(e->monitor, AMP_PHASE_DATA);
        case 1: return data_next(e);
        case 2: e->out.embedding.ids = e->out.batch.inputs; e->out.cross_entropy.labels = e->out.batch.targets; e->out.cross_entropy.grad_scale = amp_scaler_scale_ptr(e->scaler); return AMP_OK;
        case 3: return amp_autocast_begin(e->amp, NULL);
        case 4: return amp_embedding(e->amp, &e->out.embedding);
        case 5: return amp_linear(e->amp, &e->out.linear[0]);
        case 6: return amp_cross_entropy(e->amp, &e->out.cross_entropy);
        case 7: note(e, &net.loss, sizeof net.loss); return amp_autocast_end(e->amp);
        case 8: return amp_linear_backward(e->amp, &e->out.linear[0]);
        case 9: return amp_embedding_backward(e->amp, &e->out.embedding);
        case 10: return amp_step(e->optimizer, e->scaler);
        case 11: return kept(e, amp_monitor_step(e->monitor, &info));
        default: return training_recover(e);
    }
}

/* A checkpoint goes through a file, and comes back. */
static amp_result training_checkpoint(env *e, int i) {
    switch (i) {
        case 0: return created(amp_state_create(&e->state, faults_system()), &e->state);
        case 1: return amp_optimizer_save(e->optimizer, e->state, "opt");
        case 2: return amp_scaler_save(e->scaler, e->state, "scaler");
        case 3: return amp_loader_save(e->loader, e->state, "data");
        case 4: return amp_random_save(e->amp, e->state, "random");
        case 5: return amp_recovery_save(e->recovery, e->state, "run");
        case 6: return amp_state_save(e->state, e->path[0]);
        case 7: return amp_state_load(&e->loaded, faults_system(), e->path[0]);
        case 8: return amp_recovery_load(e->recovery, e->loaded, "run");
        case 9: return amp_random_load(e->amp, e->loaded, "random");
        case 10: return amp_loader_load(e->loader, e->loaded, "data");
        case 11: return amp_scaler_load(e->scaler, e->loaded, "scaler");
        default: return amp_optimizer_load(e->optimizer, e->loaded, "opt");
    }
}

static amp_result training_step(env *e, int i) {
    if (i < 8) return training_open(e, i);
    i -= 8;
    if (i < ITERATION) return training_iteration(e, i, 0);
    i -= ITERATION;
    if (i < 13) return training_checkpoint(e, i);
    i -= 13;
    if (i < ITERATION * (ITERATIONS - 1)) return training_iteration(e, i % ITERATION, 1 + i / ITERATION);
    switch (i - ITERATION * (ITERATIONS - 1)) {
        case 0: return kept(e, amp_monitor_flush(e->monitor));
        case 1: return training_recover(e);
        default: return DONE;
    }
}
static void training_close(env *e) {
    while (amp_autocast_end(e->amp) == AMP_OK) {}
    amp_recovery_destroy(e->recovery);
    amp_monitor_destroy(e->monitor);
    amp_loader_destroy(e->loader);
    gradients_close(e);
}

/* ---- Models and the tape.  A step that fails is recorded again. */

static amp_result tape_model(env *e) {
    amp_param *params;
    int64_t n;
    amp_result r = created(amp_model_create(e->amp, &e->model, 3, 8), &e->model);
    if (r != AMP_OK) return r;
    (void)amp_model_param(e->model, "fc1.weight", 12, 8, AMP_INIT_TRUNCATED_NORMAL, 0.5);
    (void)amp_model_param(e->model, "fc1.bias", 12, 0, AMP_INIT_UNIFORM, 0.5);
    (void)amp_model_param(e->model, "fc2.weight", 5, 12, AMP_INIT_XAVIER_UNIFORM, 0);
    (void)amp_model_param(e->model, "table", 6, 8, AMP_INIT_NORMAL, 0);
    (void)amp_model_param(e->model, "ln.weight", 8, 0, AMP_INIT_NORM_WEIGHT, 0);
    (void)amp_model_param(e->model, "ln.bias", 8, 0, AMP_INIT_NORM_BIAS, 0);
    (void)amp_model_param(e->model, "positions", 4, 8, AMP_INIT_NORMAL, 0.1);
    r = amp_model_params(e->model, &params, &n);
    if (r == AMP_OK) return AMP_OK;
    amp_model_destroy(e->model);
    e->model = NULL;
    return r;
}

static amp_result tape_train(env *e, int backward) {
    amp_tensor x = amp_tensor2(e->memory[0], AMP_F32, 9, 8), there;
    amp_autocast_desc region;
    amp_param *w;
    amp_value h;
    int64_t n, i;
    amp_result r = amp_model_params(e->model, &w, &n);
    if (r != AMP_OK) return r;
    memset(&region, 0, sizeof region);
    if (!backward) region.mode = AMP_MODE_INFERENCE;
    for (i = 0; i < n; i++) w[i].grad_live = 0;
    r = amp_tape_begin(e->tape, &region);
    if (r != AMP_OK) return r;
    h = amp_tape_linear(e->tape, amp_tape_input(e->tape, &x), w, w + 1, AMP_ACT_GELU);
    e->other = amp_tape_variable(e->tape, &x);
    h = amp_tape_keep(e->tape, amp_tape_linear(e->tape, amp_tape_add(e->tape, h, amp_tape_linear(e->tape, e->other, w, w + 1, AMP_ACT_RELU)),
                                               w + 2, NULL, AMP_ACT_NONE));
    e->value = amp_tape_cross_entropy(e->tape, h, (const int32_t *)e->memory[1], NULL);
    r = backward ? amp_tape_forward(e->tape, e->value, NULL) : amp_tape_finish(e->tape);
    if (r == AMP_OK && backward) r = amp_tape_backward(e->tape, e->value, NULL);
    if (r == AMP_OK) r = amp_tape_tensor(e->tape, h, &there);
    if (r == AMP_OK && e->variant == 0) note(e, there.data, 9 * 5 * 2);
    for (i = 0; i < n && r == AMP_OK && e->variant == 0; i++) note(e, w[i].grad.data, (size_t)amp_tensor_count(&w[i].grad) * 4);
    return r;
}

/* y = x, with memory of its own. */
static amp_result tape_copy(const amp_custom_call *call, const amp_tensor *from, const amp_tensor *to) {
    int64_t bytes = amp_tensor_count(from) * (int64_t)amp_dtype_size(from->dtype);
    void *scratch;
    amp_result r = amp_alloc(call->amp, &scratch, bytes);
    if (r != AMP_OK) return r;
    r = amp_copy(call->amp, scratch, from->data, bytes, AMP_COPY_ON_DEVICE);
    if (r == AMP_OK) r = amp_copy(call->amp, to->data, scratch, bytes, AMP_COPY_ON_DEVICE);
    amp_free(call->amp, scratch);
    return r;
}
static amp_result tape_copy_forward(void *user, const amp_custom_call *call) {
    (void)user;
    return tape_copy(call, &call->x[0], &call->y);
}
static amp_result tape_copy_backward(void *user, const amp_custom_call *call) {
    (void)user;
    return tape_copy(call, &call->dy, &call->dx[0]);
}

/* Less than tape_all takes when nothing is computed again. */
enum { TAPE_BUDGET = 4608 };

/* Every operator, on [2, 4, 8]. */
static amp_result tape_all(env *e) {
    static const int64_t flat[2] = {8, 8};
    amp_tensor x = amp_tensor3(e->memory[0], AMP_F32, 2, 4, 8), ids = amp_tensor2(e->memory[1], AMP_I32, 2, 4);
    amp_tape *t = e->tape;
    amp_param *w;
    amp_tape_node_info node;
    amp_value h, a, b, losses;
    int64_t n, i, bytes;
    char text[64];
    amp_custom_op copy;
    amp_result r = amp_model_params(e->model, &w, &n);
    if (r != AMP_OK) return r;
    memset(&copy, 0, sizeof copy);
    copy.forward = tape_copy_forward; copy.backward = tape_copy_backward;
    for (i = 0; i < n; i++) w[i].grad_live = 0;
    r = amp_tape_begin(t, NULL);
    if (r != AMP_OK) return r;
    (void)amp_tape_input(t, &x);
    r = amp_tape_plan(t, 0, &bytes);
    if (r == AMP_OK) r = amp_tape_time(t, 1);
    if (r == AMP_OK) r = amp_tape_begin(t, NULL);
    if (r != AMP_OK) return r;
    amp_tape_layer(t, "all");
    amp_tape_store(t, AMP_F32);
    amp_tape_store(t, AMP_DTYPE_DEFAULT);
    h = amp_tape_add(t, amp_tape_variable(t, &x), amp_tape_embedding(t, &ids, w + 3, w + 6));
    a = amp_tape_layernorm(t, h, w + 4, w + 5, 0);
    b = amp_tape_rmsnorm(t, h, w + 4, 0);
    h = amp_tape_attention(t, amp_tape_rope(t, a, 4, NULL), amp_tape_split(t, a, 2, 0, 4), amp_tape_split(t, a, 2, 4, 4), 4, NULL);
    h = amp_tape_swiglu(t, h, amp_tape_dropout(t, b, 0));
    amp_tape_checkpoint_begin(t);
    h = amp_tape_activation(t, amp_tape_scale(t, h, 2), w + 4, AMP_ACT_SILU);
    amp_tape_checkpoint_end(t);
    h = amp_tape_custom(t, &h, 1, &copy);
    a = amp_tape_softmax(t, amp_tape_matmul(t, h, b, 0, 1, 0.5f), NULL);
    h = amp_tape_matmul(t, amp_tape_transpose(t, a, 1, 2), h, 0, 0, 0);
    h = amp_tape_concat(t, h, b, 1);
    h = amp_tape_reshape(t, amp_tape_split(t, h, 1, 2, 4), flat, 2);
    losses = amp_tape_linear_cross_entropy(t, h, w + 3, NULL, (const int32_t *)e->memory[1], NULL);
    h = amp_tape_reshape(t, h, x.shape, 3);
    a = amp_tape_mean(t, h);
    losses = amp_tape_add(t, losses, amp_tape_mse(t, a, amp_tape_scale(t, a, 0.5f), AMP_REDUCTION_MEAN));
    r = amp_tape_backward(t, losses, NULL);
    if (r == AMP_OK) r = amp_tape_node(t, 0, &node);
    if (r == AMP_OK) r = amp_tape_text(t, text, sizeof text) > 0 && amp_tape_dot(t, text, sizeof text) > 0 ? AMP_OK : AMP_ERR_RANGE;
    for (i = 3; i < n && r == AMP_OK && e->variant == 0; i++)
        if (w[i].grad_live) note(e, w[i].grad.data, (size_t)amp_tensor_count(&w[i].grad) * 4);
    return r;
}

/* A model's weights into a state and back. */
static amp_result tape_save(env *e, int i) {
    static const int64_t shape[2] = {3, 5};
    amp_param *w = amp_model_find(e->model, "fc2.weight");
    amp_tensor t;
    amp_result r;
    switch (i) {
        case 0: return created(amp_state_create(&e->state, faults_system()), &e->state);
        case 1: return amp_model_save(e->model, e->state, "m");
        case 2: if (e->variant == 0) memset(w->weight.data, 0, 20); e->unfinished = 1; return amp_model_load(e->model, e->state, "m");
        case 3: if (e->variant == 0) note(e, w->weight.data, 240); note_number(e, amp_model_bytes(e->model, NULL)); r = amp_model_zero_grad(e->model); return r == AMP_OK ? amp_model_freeze(e->model, "fc1*", 1) : r;
        default:
            r = amp_tensor_create(e->amp, &t, AMP_F32, shape, 2);
            if (r == AMP_OK) amp_free(e->amp, t.data);
            return r;
    }
}

static amp_result tape_told(void *user, amp_param *p) {
    env *e = (env *)user;
    if (e->variant == 0) note(e, p->name, 3);
    return AMP_OK;
}

/* One function that records, for those who make a step of it. */
static amp_value tape_record(void *user, amp_tape *t) {
    env *e = (env *)user;
    amp_tensor x = amp_tensor2(e->memory[0], AMP_F32, 9, 8);
    amp_param *w = amp_model_find(e->model, "fc1.weight");
    amp_value h = amp_tape_linear(t, amp_tape_input(t, &x), w, NULL, AMP_ACT_GELU);
    return amp_tape_cross_entropy(t, amp_tape_linear(t, h, w + 2, NULL, AMP_ACT_NONE), (const int32_t *)e->memory[1], NULL);
}
static amp_result tape_check(env *e, int verify) {
    amp_gradcheck_desc gradcheck;
    amp_gradcheck_report checked;
    amp_verify_desc desc;
    amp_verify_report report;
    memset(&gradcheck, 0, sizeof gradcheck);
    memset(&desc, 0, sizeof desc);
    gradcheck.record = desc.record = tape_record;
    gradcheck.user = desc.user = e;
    gradcheck.directions = 1;
    return verify ? amp_verify(e->amp, &desc, &report) : amp_gradcheck(e->amp, &gradcheck, &checked);
}

static amp_result tape_step(env *e, int i) {
    amp_tape_desc desc = {TAPE_BUDGET, tape_told, NULL};
    amp_tensor gradient;
    float value;
    amp_result r;
    switch (i) {
        case 0: return open_host(e, AMP_BF16);
        case 1: e->memory[0] = numbers(e, AMP_F32, 72); e->memory[1] = integers(e, 9, 5); return AMP_OK;
        case 2: return tape_model(e);
        case 3: desc.user = e; return created(amp_tape_create(e->amp, &e->tape, &desc), &e->tape);
        case 4: case 5: return tape_train(e, 1);
        case 6:
            r = amp_tape_gradient(e->tape, e->other, &gradient);
            if (r == AMP_OK && e->variant == 0) note(e, gradient.data, 72 * 4);
            return r;
        case 7: return tape_train(e, 0);
        case 8:
            r = amp_tape_read(e->tape, e->value, &value, 1);
            if (r == AMP_OK) note(e, &value, sizeof value);
            return r;
        case 9: case 10: return tape_all(e);
        case 11: case 12: case 13: case 14: case 15: return tape_save(e, i - 11);
        case 16: case 17: return tape_check(e, i - 16);
        default: return DONE;
    }
}
static void tape_close(env *e) {
    amp_tape_destroy(e->tape);
    amp_model_destroy(e->model);
    amp_state_destroy(e->state);
    amp_close(e->amp);
}

static const scenario scenarios[] = {
    {"files", 0, {AMP_OK}, files_step, files_close, files_observe, NULL},
    {"state", 0, {AMP_OK}, state_step, state_close, state_observe, NULL},
    {"context", 0, {AMP_OK}, context_step, context_close, context_observe, NULL},
    {"context, device", 1, {AMP_OK}, context_step, context_close, context_observe, NULL},
    {"masks", 0, {AMP_OK}, masks_step, masks_close, masks_observe, NULL},
    {"masks, device", 1, {AMP_OK}, masks_step, masks_close, masks_observe, NULL},
    {"autocast", 0, {AMP_OK}, autocast_step, autocast_close, NULL, NULL},
    {"autocast, device", 1, {AMP_OK}, autocast_step, autocast_close, NULL, NULL},
    {"fp8", 0, {AMP_OK}, fp8_step, fp8_close, context_observe, NULL},
    {"operators", 0, {AMP_OK}, operators_step, autocast_close, operators_observe, NULL},
    {"operators, device", 1, {AMP_OK}, operators_step, autocast_close, operators_observe, NULL},
    {"tape", 0, {AMP_ERR_RANGE, AMP_OK}, tape_step, tape_close, NULL, NULL},
    {"tape, device", 1, {AMP_ERR_RANGE, AMP_OK}, tape_step, tape_close, NULL, NULL},
    {"gradients", 0, {AMP_OK}, gradients_step, gradients_close, gradients_observe, NULL},
    {"gradients, device", 1, {AMP_OK}, gradients_step, gradients_close, gradients_observe, NULL},
    {"remainders", 2, {AMP_OK}, gradients_step, gradients_close, gradients_observe, NULL},
    {"sgd", 3, {AMP_OK}, gradients_step, gradients_close, gradients_observe, NULL},
    {"lion", 4, {AMP_OK}, gradients_step, gradients_close, gradients_observe, NULL},
    {"8-bit moments", 5, {AMP_OK}, gradients_step, gradients_close, gradients_observe, NULL},
    {"data", 0, {AMP_OK}, data_step, data_close, data_observe, NULL},
    {"data, device", 1, {AMP_OK}, data_step, data_close, data_observe, NULL},
    {"data, no workers", 2, {AMP_OK}, data_step, data_close, data_observe, NULL},
    {"arrays", 3, {AMP_OK}, data_step, data_close, data_observe, NULL},
    {"callback", 4, {AMP_OK}, data_step, data_close, data_observe, NULL},
    {"tensors", 5, {AMP_OK}, data_step, data_close, data_observe, NULL},
    {"settings", 0, {AMP_OK}, settings_step, settings_close, NULL, NULL},
    {"watch", 0, {AMP_OK}, watch_step, watch_close, NULL, watch_after},
    {"watch, device", 1, {AMP_OK}, watch_step, watch_close, NULL, watch_after},
    {"care", 0, {AMP_ERR_RANGE, AMP_ERR_WRITE}, care_step, care_close, gradients_observe, NULL},
    {"care, device", 1, {AMP_ERR_RANGE, AMP_ERR_WRITE}, care_step, care_close, gradients_observe, NULL},
    {"adapt", 0, {AMP_OK}, adapt_step, adapt_close, gradients_observe, NULL},
    {"adapt, device", 1, {AMP_OK}, adapt_step, adapt_close, gradients_observe, NULL},
    {"training", 0, {AMP_OK}, training_step, training_close, gradients_observe, watch_after},
};

TEST(scenarios) {
    int64_t begun = (int64_t)time(NULL);
    size_t i;
    for (i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        if (now.only == NULL || strcmp(now.only, scenarios[i].name) == 0) run_scenario(scenarios + i);
    write_record((double)((int64_t)time(NULL) - begun));
}

/* ---- What asks the host for nothing */

TEST(functions_without_a_host) {
    float x[2] = {1, 2}, y[2];
    amp_machine machine;
    amp_choice choice;
    amp_system posix;
    amp_schedule schedule = {.lr = 1, .steps = 1};
    double lr;
    int64_t first;
    CHECK(amp_version() == AMP_VERSION && amp_cpu() != NULL && amp_dtype_size(AMP_F32) == 4 && strcmp(amp_dtype_name(AMP_BF16), "bf16") == 0);
    CHECK(amp_result_text(AMP_ERR_MEMORY)[0] != 0 && amp_result_hint(AMP_ERR_MEMORY)[0] != 0);
    CHECK_OK(amp_machine_probe(&machine));
    CHECK_OK(amp_choose(&machine, AMP_F32, 1, &choice));
    CHECK_OK(amp_convert(y, AMP_F32, x, AMP_F32, 2, NULL, NULL));
    CHECK_EQ(amp_count_nonfinite(y, AMP_F32, 2, &first), 0);
    CHECK_OK(amp_schedule_lr(&schedule, 0, &lr));
    amp_system_default(&posix);
    CHECK(posix.alloc != NULL && posix.free != NULL && posix.file_open != NULL && posix.thread_start != NULL && posix.clock_ns != NULL);
}

/* ---- What no n-th call brings about */

static amp_result open_plain(env *e, const scenario *s) {
    now.s = s;
    now.f = NULL;
    env_open(e);
    return open_host(e, AMP_F32);
}

/* A callback that ends its thread: its batch fails by name, another worker makes it up; when none is left, every call
 * says so.  Nothing waits for the dead. */
static struct { int64_t at, times, asked; } deadly;
static int deadly_read(void *user, const amp_sample *sample, void *const *fields) {
    if (sample->sample >= deadly.at && __atomic_sub_fetch(&deadly.times, 1, __ATOMIC_SEQ_CST) >= 0) pthread_exit(NULL);
    return callback_read(user, sample, fields);
}

static amp_loader *deadly_loader(env *e, int workers) {
    amp_loader_desc d;
    amp_source source;
    amp_loader *loader = NULL;
    memset(&d, 0, sizeof d);
    memset(&source, 0, sizeof source);
    source.read = deadly_read;
    source.samples = 40;
    source.fields[0].dtype = AMP_F32; source.fields[0].count = 6;
    source.fields[1].dtype = AMP_I32; source.fields[1].count = 1;
    source.n_fields = 2;
    d.source = &source;
    d.batch = 4;
    d.workers = workers;
    d.timeout_ms = 20000;
    CHECK_OK(amp_loader_create(e->amp, &loader, &d));
    return loader;
}

TEST(worker_death) {
    static const scenario s = {"worker death", 0, {AMP_OK}, NULL, NULL, NULL, NULL};
    int workers, i, failed;
    amp_batch b;
    env e;
    for (workers = 1; workers <= 3; workers++) {
        CHECK_OK(open_plain(&e, &s));
        deadly.at = 10;
        deadly.times = workers == 3 ? 1 : 1000;
        e.loader = deadly_loader(&e, workers);
        for (i = failed = 0; i < 10; i++) {
            amp_result r = amp_loader_next(e.loader, &b);
            if (r != AMP_OK) {
                failed++;
                CHECK_EQ(r, AMP_ERR_SOURCE);
                CHECK_MSG(says_what(r) && strstr(amp_last_error(), "ended") != NULL, "%s", amp_last_error());
                if (workers == 3) i--;              /* the next call works */
            } else CHECK(((const int32_t *)b.fields[1])[0] == 4 * i);
        }
        CHECK(workers == 3 ? failed <= 1 : failed == 8);        /* read ahead, it is made up for without a word */
        if (workers < 3) CHECK_OK(amp_loader_seek(e.loader, 0, 0));
        data_close(&e);
        CHECK_MSG(faults_balanced(), "%lld blocks, %lld threads", (long long)faults.blocks, (long long)faults.threads);
        faults_forget();
    }
}

/* Token and array files are cut short, and others are renamed over them, while a loader has them open: what is there is
 * delivered as it was, what is not is an error by name, and when the bytes are back the same call works. */
static uint64_t read_changing(int variant, int change, int *failed) {
    static const scenario s = {"changing files", 0, {AMP_OK}, NULL, NULL, NULL, NULL};
    const char *names[2] = {"tok1.bin", "tok2.bin"}, *path;
    unsigned char junk[2000];
    void *data[2];
    size_t bytes[2];
    env e;
    int i, k;
    CHECK_OK(open_plain(&e, &s));
    e.variant = variant;
    if (variant == 3) { names[0] = "x.npy"; names[1] = "y.npy"; }
    memset(junk, 1, sizeof junk);
    for (k = 0; k < 2; k++) CHECK_OK(amp_file_read_all(NULL, fixture_path(names[k]), &data[k], &bytes[k]));
    CHECK_OK(data_create(&e));
    for (i = 0; i < 25; i++) {
        amp_result r;
        for (k = 0; k < 2 && i == 2; k++) {
            path = fixture_path(names[k]);
            if (change == 1 && i == 2) CHECK(truncate(path, (off_t)(bytes[k] / 3)) == 0);
            if (change == 2 && i == 2) CHECK_OK(amp_file_write_atomic(NULL, path, junk, sizeof junk));
            if (change == 3 && i == 2) CHECK(remove(path) == 0);
        }
        r = data_next(&e);
        if (r == AMP_OK) continue;
        ++*failed;
        CHECK_EQ(r, AMP_ERR_TRUNCATED);
        CHECK_MSG(says_what(r) && strstr(amp_last_error(), fixture) != NULL, "%s", amp_last_error());
        for (k = 0; k < 2; k++) {
            FILE *file = fopen(fixture_path(names[k]), "r+b");
            CHECK(file != NULL && fwrite(data[k], 1, bytes[k], file) == bytes[k] && fclose(file) == 0);
        }
        CHECK_OK(data_next(&e));
    }
    data_close(&e);
    for (k = 0; k < 2; k++) {
        CHECK_OK(amp_file_write_atomic(NULL, fixture_path(names[k]), data[k], bytes[k]));
        amp_file_free(NULL, data[k], bytes[k]);
    }
    CHECK(faults_balanced());
    return e.digest;
}

TEST(files_change_while_open) {
    static const int variants[] = {0, 2, 3};
    int i, change, failed;
    for (i = 0; i < 3; i++) {
        uint64_t wanted;
        failed = 0;
        wanted = read_changing(variants[i], 0, &failed);
        CHECK_EQ(failed, 0);
        for (change = 1; change <= 3; change++) {
            failed = 0;
            CHECK_MSG(read_changing(variants[i], change, &failed) == wanted, "other bits: variant %d, change %d", variants[i], change);
            CHECK_MSG((failed > 0) == (change == 1), "variant %d, change %d: %d calls failed", variants[i], change, failed);
        }
    }
}

int main(int argc, char **argv) {
    int i;
    TEST_BEGIN(argc, argv);
    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--all")) now.all = 1;
        if (!strcmp(argv[i], "--only") && i + 1 < argc) now.only = argv[++i];
        if (!strcmp(argv[i], "--record") && i + 1 < argc) now.record = argv[++i];
    }
    fixtures_write();
    RUN(scenarios);
    RUN(functions_without_a_host);
    RUN(worker_death);
    RUN(files_change_while_open);
    fixtures_remove();
    return TEST_END();
}
