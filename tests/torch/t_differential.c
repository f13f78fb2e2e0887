/* t_differential.c - replays a corpus of random programs and compares each call with PyTorch's result.  The programs are
 * scaler calls in all orders, presets side by side, and autocast regions in several threads.
 *
 *     gcc -O2 -Itests tests/torch/t_differential.c -o t_differential -lm -lpthread && ./t_differential [CORPUS]
 *
 * tests/torch/oracle/fuzz_logic.py writes corpora.  Its head says where amp.h differs from PyTorch on purpose.  Without an
 * argument, the small corpus in tests/torch/golden is replayed.  `make differential` makes a large one. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "golden.h"
#include "test.h"
#include "trace.h"
#include <pthread.h>

/* ---- The corpus: a line is words, then "=" and what must come of it */

enum { WORDS = 20, TEXT = 1200 };
typedef struct corpus_line { char text[TEXT], *word[WORDS]; int n, result, number; } corpus_line;

static const char *corpus_path = AMPT_GOLDEN "/fuzz_logic.txt";

static FILE *corpus_open(void) {
    FILE *f = fopen(corpus_path, "r");
    if (f == NULL) { printf("no %s (run from the project root)\n", corpus_path); exit(2); }
    return f;
}

static int corpus_next(FILE *f, corpus_line *l) {
    char *w;
    if (fgets(l->text, TEXT, f) == NULL) return 0;
    l->number++;
    l->n = l->result = 0;
    for (w = strtok(l->text, " \n"); w != NULL && l->n < WORDS; w = strtok(NULL, " \n")) {
        if (strcmp(w, "=") == 0) l->result = l->n;
        else l->word[l->n++] = w;
    }
    while (l->n < WORDS) l->word[l->n++] = l->text + TEXT - 1;     /* absent words are empty */
    return 1;
}

static int is(const corpus_line *l, const char *word) { return strcmp(l->word[0], word) == 0; }
static int integer(const corpus_line *l, int i) { return atoi(l->word[i]); }
static uint32_t hex32(const corpus_line *l, int i) { return (uint32_t)strtoul(l->word[i], NULL, 16); }
static double hex64(const corpus_line *l, int i) {
    uint64_t b = strtoull(l->word[i], NULL, 16);
    double x;
    memcpy(&x, &b, 8);
    return x;
}
/* The i-th word after "=". */
static const char *outcome(const corpus_line *l, int i) { return l->word[l->result + i]; }

/* For the record. */
static void counted(const char *name, int64_t n) { printf("counted replayed_%s %lld\n", name, (long long)n); }

static uint32_t canonical(float x) { return is_nan_bits(bits(x)) ? 0x7fc00000u : bits(x); }

/* ---- Scaler programs */

enum { OPTIMIZERS = 4, PARAMS = 3, LENGTH = 4, SCALERS = 2, MISSING = 3 };

/* One of PyTorch's optimizers: an SGD, or, kind range, a set of gradients.  has: a gradient exists.  fresh: it is the
   same as PyTorch's (one that was only read, or is written unscaled there alone, is not). */
typedef struct sgd {
    int is_range, n, fresh, has[PARAMS], length[PARAMS];
    amp_dtype dtype[PARAMS];
    float w[PARAMS][LENGTH];
    union { float f[LENGTH]; double d[LENGTH]; uint16_t h[LENGTH]; } g[PARAMS];
    amp_param p[PARAMS];
    amp_grad_set *set;
    amp_optimizer *o;
} sgd;

typedef struct scaler_program {
    amp_context *amp;
    amp_scaler *s[SCALERS];
    sgd o[OPTIMIZERS];
    int scalers, optimizers, wrong;
    amp_scaler_preset preset;
    amp_state *saved;
} scaler_program;

static float traced_value(rng *r) { return (float)((double)((int)below(r, 2001) - 1000) * 0.37); }

static double bad_value(int kind) { return kind == 1 ? INFINITY : kind == 2 ? NAN : -INFINITY; }

static void set_weights(sgd *o, uint64_t seed) {
    rng r;
    r.x = seed;
    for (int i = 0; i < o->n; i++)
        for (int k = 0; k < o->length[i]; k++) o->w[i][k] = traced_value(&r);
}

/* The gradients of a range set: whole numbers that every dtype holds, and perhaps a bad one. */
static void fill_ranges(sgd *o, uint64_t seed, int left) {
    rng r;
    r.x = seed;
    for (int i = 0; i < o->n; i++) {
        double g[LENGTH];
        for (int k = 0; k < o->length[i]; k++) {
            int whole = (int)below(&r, 255) - 127;
            g[k] = ldexp((double)whole, (int)below(&r, 8) - 4);
        }
        if (left) { g[below(&r, (uint32_t)o->length[i])] = bad_value(left); left = 0; }
        for (int k = 0; k < o->length[i]; k++) {
            float x = (float)g[k];
            if (o->dtype[i] == AMP_F64) o->g[i].d[k] = g[k];
            else if (o->dtype[i] == AMP_F32) o->g[i].f[k] = x;
            else CHECK_OK(amp_convert(&o->g[i].h[k], o->dtype[i], &x, AMP_F32, 1, NULL, NULL));
        }
    }
}

/* "optimizer KIND LR SEED N {DTYPE LENGTH}" */
static void make_optimizer(scaler_program *t, const corpus_line *l) {
    static const char *const names[PARAMS] = {"a", "b", "c"};
    sgd *o = &t->o[t->optimizers++];
    amp_range ranges[PARAMS];
    amp_grad_set_desc set;
    amp_optimizer_desc desc;
    memset(o, 0, sizeof *o);
    memset(ranges, 0, sizeof ranges);
    memset(&set, 0, sizeof set);
    memset(&desc, 0, sizeof desc);
    o->is_range = strcmp(l->word[1], "range") == 0;
    o->n = integer(l, 4);
    o->fresh = 1;
    for (int i = 0; i < o->n; i++) {
        CHECK_OK(amp_dtype_parse(l->word[5 + 2 * i], &o->dtype[i]));
        o->length[i] = integer(l, 6 + 2 * i);
        o->p[i].name = ranges[i].name = names[i];
        o->p[i].weight = amp_tensor1(o->w[i], AMP_F32, o->length[i]);
        o->p[i].grad = amp_tensor1(&o->g[i], AMP_F32, o->length[i]);
        ranges[i].data = &o->g[i]; ranges[i].count = o->length[i]; ranges[i].dtype = o->dtype[i];
        o->has[i] = o->is_range;
    }
    set.ranges = ranges; set.n_ranges = o->n;
    desc.kind = AMP_SGD; desc.lr = (double)of_bits(hex32(l, 2)); desc.params = o->p; desc.n_params = o->n;
    desc.apply_nonfinite = 1;                       /* as PyTorch without a scaler */
    if (o->is_range) {
        fill_ranges(o, 1, 0);
        CHECK_OK(amp_grad_set_create(t->amp, &o->set, &set));
        return;
    }
    set_weights(o, (uint64_t)integer(l, 3));
    CHECK_OK(amp_optimizer_create(t->amp, &o->o, &desc));
    o->set = amp_optimizer_grad_set(o->o);
}

static void create_scaler(scaler_program *t, int i, float scale, double growth, double backoff, int interval, int enabled) {
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = t->preset; d.disable = !enabled; d.init_scale = scale; d.growth_factor = growth;
    d.backoff_factor = backoff; d.growth_interval = interval;
    CHECK_OK(amp_scaler_create(t->amp, &t->s[i], &d));
}

static void close_program(scaler_program *t) {
    for (int i = 0; i < t->optimizers; i++) {
        if (t->o[i].is_range) amp_grad_set_destroy(t->o[i].set);
        amp_optimizer_destroy(t->o[i].o);
    }
    for (int i = 0; i < t->scalers; i++) amp_scaler_destroy(t->s[i]);
    amp_state_destroy(t->saved);
    t->optimizers = t->scalers = t->wrong = 0;
    t->saved = NULL;
}

static double gradient(const sgd *o, int i, int k) {
    float x;
    if (o->dtype[i] == AMP_F64) return o->g[i].d[k];
    if (o->dtype[i] == AMP_F32) return (double)o->g[i].f[k];
    CHECK_OK(amp_convert(&x, AMP_F32, &o->g[i].h[k], o->dtype[i], 1, NULL, NULL));
    return (double)x;
}

/* Every weight, and every gradient that must be PyTorch's. */
static uint32_t hash_of(const scaler_program *t) {
    uint64_t h = hash_start;
    for (int j = 0; j < t->optimizers; j++) {
        const sgd *o = &t->o[j];
        for (int i = 0; i < o->n; i++) {
            for (int k = 0; !o->is_range && k < o->length[i]; k++) hash_add(&h, canonical(o->w[i][k]));
            for (int k = 0; o->fresh && o->has[i] && k < o->length[i]; k++) {
                double g = gradient(o, i, k);
                uint64_t b;
                memcpy(&b, &g, 8);
                hash_add(&h, isnan(g) ? 1 : b);
            }
        }
    }
    return (uint32_t)(h >> 32 ^ h);
}

/* What a backward pass adds: one rounding per product and per sum. */
static void accumulate(float *g, int has, float x) {
    volatile float sum = has ? *g + x : x;
    *g = sum;
}
static float scaled(float c, float scale) { volatile float product = c * scale; return product; }

/* "b SCALER SEED LOSSES BAD JOINT".  A joint pass adds up the losses before it adds them to the gradients. */
static void backward(scaler_program *t, const corpus_line *l) {
    float scale = *amp_scaler_scale_ptr(t->s[integer(l, 1)]), sum[OPTIMIZERS][PARAMS][LENGTH] = {{{0}}};
    int losses = integer(l, 3), left = integer(l, 4), joint = integer(l, 5), met[OPTIMIZERS][PARAMS] = {{0}};
    rng r;
    r.x = strtoull(l->word[2], NULL, 10);
    for (int loss = 0; loss < losses; loss++) {
        for (int j = 0; j < t->optimizers; j++) {
            sgd *o = &t->o[j];
            for (int i = 0; i < o->n; i++) {
                float c[LENGTH];
                if (o->is_range || !o->fresh || below(&r, 5) == 0) continue;
                for (int k = 0; k < o->length[i]; k++) c[k] = traced_value(&r);
                if (left) { c[below(&r, (uint32_t)o->length[i])] = (float)bad_value(left); left = 0; }
                for (int k = 0; k < o->length[i]; k++) {
                    if (joint) accumulate(&sum[j][i][k], met[j][i], scaled(c[k], scale));
                    else accumulate(&o->g[i].f[k], o->has[i], scaled(c[k], scale));
                }
                if (joint) met[j][i] = 1;
                else o->has[i] = 1;
            }
        }
    }
    for (int j = 0; j < t->optimizers; j++) {
        sgd *o = &t->o[j];
        for (int i = 0; i < o->n; i++) {
            for (int k = 0; met[j][i] && k < o->length[i]; k++) accumulate(&o->g[i].f[k], o->has[i], sum[j][i][k]);
            if (met[j][i]) o->has[i] = 1;
        }
    }
}

static void set_live(scaler_program *t) {
    for (int j = 0; j < t->optimizers; j++)
        for (int i = 0; i < t->o[j].n; i++) t->o[j].p[i].grad_live = t->o[j].has[i];
}

/* amp_scaler_check and amp_optimizer_step, as PyTorch's step unscales first where nobody did. */
static amp_result step(scaler_program *t, amp_scaler *s, sgd *o, int how) {
    amp_result checked = how == 't' ? amp_scaler_check(s, o->set, AMP_CHECK_UNSCALE) : AMP_OK;
    (void)checked;
    (void)t;
    if (how == 'a') return amp_step(o->o, s);
    return amp_optimizer_step(o->o, s);
}

static amp_result save(scaler_program *t, amp_scaler *s, const char *slot) {
    if (t->saved == NULL) CHECK_OK(amp_state_create(&t->saved, NULL));
    return amp_scaler_save(s, t->saved, slot);
}

static amp_result load(scaler_program *t, amp_scaler *s, const char *slot) {
    if (t->saved == NULL) CHECK_OK(amp_state_create(&t->saved, NULL));
    return amp_scaler_load(s, t->saved, slot);
}

/* Saves into a state, and another scaler of the same preset goes on from it. */
static amp_result restart(scaler_program *t, int i) {
    amp_scaler *old = t->s[i];
    amp_state *state = NULL;
    amp_scaler_desc d;
    amp_result r;
    CHECK_OK(amp_scaler_query(old, &d));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_scaler_save(old, state, "scaler"));
    create_scaler(t, i, 2, 3, 0.75, 5, !d.disable);
    r = amp_scaler_load(t->s[i], state, "scaler");
    amp_scaler_destroy(old);
    amp_state_destroy(state);
    return r;
}

/* "q SCALER ENABLED GROWTH BACKOFF INTERVAL": all getters. */
static amp_result getters(amp_scaler *s, const corpus_line *l) {
    amp_scaler_desc d;
    CHECK_OK(amp_scaler_query(s, &d));
    CHECK_EQ(d.disable, !integer(l, 2));
    if (d.disable) return AMP_OK;
    CHECK(d.growth_factor == hex64(l, 3) && d.backoff_factor == hex64(l, 4));
    CHECK_EQ(d.growth_interval, integer(l, 5));
    return AMP_OK;
}

/* "! WHAT SCALER ..." : what PyTorch takes and amp.h refuses. */
static amp_result refused(scaler_program *t, const corpus_line *l) {
    amp_scaler *s = t->s[integer(l, 2)];
    sgd *o = &t->o[(unsigned)integer(l, 3) % OPTIMIZERS];
    if (strcmp(l->word[1], "rule") == 0) return amp_scaler_set_rule(s, hex64(l, 3), hex64(l, 4), integer(l, 5));
    if (strcmp(l->word[1], "scale") == 0) return amp_scaler_set_scale(s, of_bits(hex32(l, 3)));
    if (strcmp(l->word[1], "load") == 0) return load(t, s, l->word[3]);
    if (strcmp(l->word[1], "step") == 0) return amp_optimizer_step(o->o, s);
    if (strcmp(l->word[1], "update") == 0) return amp_scaler_update(s);
    if (strcmp(l->word[1], "foreign") == 0 && !o->is_range) CHECK_ERR(amp_optimizer_step(o->o, s), AMP_ERR_STATE);
    return amp_scaler_check(s, o->set, AMP_CHECK_UNSCALE);
}

/* "n SCALER OPTIMIZER": without any gradient. */
static amp_result step_on_nothing(scaler_program *t, amp_scaler *s, sgd *o) {
    amp_result r = amp_scaler_check(s, o->set, AMP_CHECK_UNSCALE);
    return r != AMP_OK ? r : step(t, s, o, 'T');
}

/* Calls that have no scaler: gradients and weights. */
static amp_result change_arrays(sgd *o, const corpus_line *l) {
    switch (l->word[0][0]) {
        case 'z': memset(o->has, 0, sizeof o->has); o->fresh = 1; break;
        case 'g': fill_ranges(o, strtoull(l->word[2], NULL, 10), integer(l, 3)); break;
        case 'x': o->g[0].f[integer(l, 2)] = (float)bad_value(integer(l, 3)); break;
        default: set_weights(o, strtoull(l->word[2], NULL, 10)); break;
    }
    return AMP_OK;
}

/* One call.  A check that only reads leaves gradients that PyTorch has unscaled, and so does a step that checks. */
static amp_result scaler_call(scaler_program *t, const corpus_line *l) {
    int how = l->word[0][0];
    amp_scaler *s = t->s[(unsigned)integer(l, 1) % SCALERS];
    sgd *o = &t->o[(unsigned)integer(l, 2) % OPTIMIZERS];
    amp_result r;
    switch (how) {
        case 'z': case 'g': case 'x': case 'w': return change_arrays(&t->o[integer(l, 1)], l);
        case 'b': backward(t, l); return AMP_OK;
        case 'u': return amp_scaler_check(s, o->set, AMP_CHECK_UNSCALE);
        case 'r':
            r = amp_scaler_check(s, o->set, AMP_CHECK_READ);
            if (r == AMP_OK) o->fresh = 0;
            return r;
        case 't': case 'T': case 'a':
            if (strcmp(outcome(l, 4), "stale") == 0) o->fresh = 0;
            return step(t, s, o, how);
        case 'n': return step_on_nothing(t, s, o);
        case 'U': return amp_scaler_update(s);
        case 'N': return amp_scaler_set_scale(s, of_bits(hex32(l, 2)));
        case 'f': return amp_scaler_set_rule(s, hex64(l, 2), 0, 0);
        case 'k': return amp_scaler_set_rule(s, 0, hex64(l, 2), 0);
        case 'i': return amp_scaler_set_rule(s, 0, 0, integer(l, 2));
        case 'q': return getters(s, l);
        case 's':
            CHECK_EQ(canonical(scaled(of_bits(hex32(l, 2)), *amp_scaler_scale_ptr(s))), strtoul(outcome(l, 4), NULL, 16));
            return AMP_OK;
        case 'v': return save(t, s, l->word[2]);
        case 'l': return load(t, s, l->word[2]);
        case 'p': return restart(t, integer(l, 1));
        case '!': return refused(t, l);
        default: CHECK_MSG(0, "line %d: unknown call %s", l->number, l->word[0]); return AMP_OK;
    }
}

/* Whose state a line reports. */
static amp_scaler *reported(const scaler_program *t, const corpus_line *l) {
    if (strchr("zgxw", l->word[0][0])) return t->s[0];
    return t->s[integer(l, l->word[0][0] == '!' ? 2 : 1)];
}

static void scaler_event(scaler_program *t, const corpus_line *l, int64_t *events) {
    amp_result r;
    amp_k_scaler state;
    uint32_t scale = hex32(l, l->result + 1), hash = hex32(l, l->result + 3), now;
    if (t->wrong) return;                           /* one difference makes many */
    set_live(t);
    r = scaler_call(t, l);
    CHECK_OK(amp_scaler_get(reported(t, l), &state));
    now = hash_of(t);
    t->wrong = !((int)r == atoi(outcome(l, 0)) && canonical(state.scale) == scale &&
                 state.growth_tracker == atoi(outcome(l, 2)) && now == hash);
    CHECK_MSG(!t->wrong, "line %d, %s %s %s: result %d, PyTorch %s; scale %08x, PyTorch %08x; tracker %d, PyTorch %s; "
              "arrays %s", l->number, l->word[0], l->word[1], l->word[2], (int)r, outcome(l, 0), canonical(state.scale), scale,
              state.growth_tracker, outcome(l, 2), now == hash ? "alike" : "differ");
    ++*events;
}

TEST(scaler_programs) {
    scaler_program *t = (scaler_program *)calloc(1, sizeof *t);
    corpus_line *l = (corpus_line *)calloc(1, sizeof *l);
    int64_t events = 0, programs = 0;
    FILE *f = corpus_open();
    amp_desc desc;
    int inside = 0;
    if (t == NULL || l == NULL) exit(2);
    memset(&desc, 0, sizeof desc);
    desc.threads = 1; desc.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&t->amp, &desc));
    while (corpus_next(f, l)) {
        if (is(l, "program")) {
            close_program(t);
            t->preset = strcmp(l->word[2], "torch") == 0 ? AMP_SCALER_TORCH : AMP_SCALER_DEFAULT;
            inside = 1;
            programs++;
        } else if (is(l, "preset") || is(l, "together") || is(l, "autocast")) inside = 0;
        else if (!inside) continue;
        else if (is(l, "optimizer")) make_optimizer(t, l);
        else if (is(l, "scaler")) {
            create_scaler(t, t->scalers, of_bits(hex32(l, 1)), hex64(l, 2), hex64(l, 3), integer(l, 4), integer(l, 5));
            t->scalers++;
        } else scaler_event(t, l, &events);
    }
    close_program(t);
    amp_close(t->amp);
    fclose(f);
    free(t);
    free(l);
    CHECK(programs > 0 && events > 1000);
    counted("scaler_programs", programs);
    counted("scaler_events", events);
}

/* ---- Presets */

/* By the number of amp_scaler_preset; 60: fairseq with tolerance 0.25; 40: DeepSpeed without hysteresis.  Scale 0 and
   window 0 mean the preset's. */
static amp_scaler *preset_scaler(amp_context *amp, int preset, int window, float scale) {
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = preset == 60 ? AMP_SCALER_FAIRSEQ : preset == 40 ? AMP_SCALER_DEEPSPEED : (amp_scaler_preset)preset;
    d.tolerance = preset == 60 ? 0.25 : 0;
    d.hysteresis = preset == 40;
    d.growth_interval = window;
    d.init_scale = scale;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    return s;
}

typedef struct preset_program { amp_context *amp; amp_grad_set *set[5]; amp_scaler *s[5]; float g[5]; int n; } preset_program;

static void preset_drive(preset_program *t, int i, int overflow) {
    t->g[i] = overflow ? INFINITY : 1.0f;
    CHECK_OK(amp_scaler_check(t->s[i], t->set[i], AMP_CHECK_READ));
    CHECK_OK(amp_scaler_update(t->s[i]));
}

static void preset_is(const preset_program *t, int i, const corpus_line *l) {
    amp_k_scaler state;
    CHECK_OK(amp_scaler_get(t->s[i], &state));
    CHECK_MSG(bits(state.scale) == hex32(l, l->result), "line %d: scale %08x, the rule has %s", l->number,
              bits(state.scale), outcome(l, 0));
}

static void preset_release(preset_program *t) {
    while (t->n > 0) amp_scaler_destroy(t->s[--t->n]);
}

static void preset_open(preset_program *t) {
    amp_desc desc;
    memset(t, 0, sizeof *t);
    memset(&desc, 0, sizeof desc);
    desc.threads = 1; desc.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&t->amp, &desc));
    for (int i = 0; i < 5; i++) {
        amp_range range;
        amp_grad_set_desc d;
        memset(&range, 0, sizeof range);
        memset(&d, 0, sizeof d);
        range.data = &t->g[i]; range.count = 1; range.dtype = AMP_F32;
        d.ranges = &range; d.n_ranges = 1;
        CHECK_OK(amp_grad_set_create(t->amp, &t->set[i], &d));
    }
}

static void preset_close(preset_program *t) {
    preset_release(t);
    for (int i = 0; i < 5; i++) amp_grad_set_destroy(t->set[i]);
    amp_close(t->amp);
}

/* "preset NUMBER WINDOW PATTERN = SCALE" from 1024 */
static void preset_cell(preset_program *t, const corpus_line *l) {
    t->s[0] = preset_scaler(t->amp, integer(l, 1), integer(l, 2), 1024);
    t->n = 1;
    for (const char *e = l->word[3]; *e; e++) preset_drive(t, 0, *e == 'X');
    preset_is(t, 0, l);
    preset_release(t);
}

/* Cells, and "together ID N {NUMBER WINDOW}" with its "o SCALER OVERFLOW = SCALE". */
TEST(presets) {
    corpus_line *l = (corpus_line *)calloc(1, sizeof *l);
    preset_program t;
    FILE *f = corpus_open();
    int64_t cells = 0, events = 0;
    if (l == NULL) exit(2);
    preset_open(&t);
    while (corpus_next(f, l)) {
        if (is(l, "preset")) {
            preset_cell(&t, l);
            cells++;
        } else if (is(l, "together")) {
            preset_release(&t);
            for (t.n = 0; t.n < integer(l, 2); t.n++)
                t.s[t.n] = preset_scaler(t.amp, integer(l, 3 + 2 * t.n), integer(l, 4 + 2 * t.n), 0);
        } else if (is(l, "o")) {
            preset_drive(&t, integer(l, 1), integer(l, 2));
            preset_is(&t, integer(l, 1), l);
            events++;
        } else if (is(l, "program")) break;
    }
    preset_close(&t);
    fclose(f);
    free(l);
    CHECK(cells == 88 && events > 100);
    counted("preset_cells", cells);
    counted("preset_events", events);
}

/* ---- Autocast programs.  Context 0 is PyTorch's "cuda", 1 its "cpu". */

enum { THREADS = 5, SLOTS = 4 };

typedef struct weight { amp_param p; float w, dw; } weight;

/* A linear of one number, that shows by what is left of x or w in which dtype it multiplied. */
typedef struct product { amp_linear_op op; weight own, *w; float x, y, dy, dx; } product;

struct autocast_program;
typedef struct worker {
    struct autocast_program *program;
    pthread_t thread;
    int index, alive, asked;                        /* asked: 1 do the line, 2 end */
} worker;

typedef struct autocast_program {
    amp_context *amp[2];
    worker workers[THREADS];
    weight shared[2];                               /* of each context, registered */
    product products[SLOTS];
    int context_of[SLOTS], wrong;
    corpus_line *line;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} autocast_program;

static void *work(void *arg);

static void spawn(autocast_program *t, int k) {
    worker *w = &t->workers[k];
    w->program = t; w->index = k; w->asked = 0; w->alive = 1;
    if (pthread_create(&w->thread, NULL, work, w) != 0) exit(2);
}

/* Has a thread do something, and waits until it is done. */
static void ask(autocast_program *t, int k, int what) {
    pthread_mutex_lock(&t->lock);
    t->workers[k].asked = what;
    pthread_cond_broadcast(&t->changed);
    while (t->workers[k].asked == what) pthread_cond_wait(&t->changed, &t->lock);
    pthread_mutex_unlock(&t->lock);
    if (what != 2) return;
    pthread_join(t->workers[k].thread, NULL);
    t->workers[k].alive = 0;
}

static void must_be(autocast_program *t, int ok, const char *got) {
    if (!ok) t->wrong = 1;
    CHECK_MSG(ok, "line %d, thread %s, %s %s %s %s: %s, PyTorch %s %s %s", t->line->number, t->line->word[0],
              t->line->word[1], t->line->word[2], t->line->result > 3 ? t->line->word[3] : "",
              t->line->result > 4 ? t->line->word[4] : "", got, outcome(t->line, 0), outcome(t->line, 1), outcome(t->line, 2));
}

static amp_dtype dtype_of(const char *name) {
    amp_dtype dtype = AMP_DTYPE_DEFAULT;
    if (strcmp(name, "default") != 0) CHECK_OK(amp_dtype_parse(name, &dtype));
    return dtype;
}

/* "THREAD a CONTEXT = ENABLED DTYPE CACHE" */
static void ask_active(autocast_program *t, amp_context *amp) {
    amp_autocast_desc d;
    char got[64];
    int active;
    memset(&d, 0, sizeof d);
    active = amp_autocast_active(amp, &d);
    snprintf(got, sizeof got, "%d %s %d", active, d.dtype ? amp_dtype_name(d.dtype) : "-", !d.disable_cache);
    must_be(t, active == atoi(outcome(t->line, 0)) && (d.disable_cache == 0) == atoi(outcome(t->line, 2)) &&
            strcmp(d.dtype ? amp_dtype_name(d.dtype) : "-", outcome(t->line, 1)) == 0, got);
}

/* "THREAD d CONTEXT OPERATOR INPUT,INPUT = RESULT" */
static void ask_decision(autocast_program *t, amp_context *amp) {
    char inputs[32], *name;
    amp_dtype dtypes[4];
    amp_plan plan;
    amp_result r;
    int n = 0;
    snprintf(inputs, sizeof inputs, "%s", t->line->word[4]);
    for (name = inputs; name != NULL && n < 4; n++) {
        char *comma = strchr(name, ',');
        if (comma != NULL) *comma++ = 0;
        dtypes[n] = dtype_of(name);
        name = comma;
    }
    r = amp_autocast_decide(amp, op_number(t->line->word[3]), NULL, dtypes, n, &plan);
    if (strcmp(outcome(t->line, 0), "error") == 0) must_be(t, r == AMP_ERR_UNSUPPORTED, "no error");
    else must_be(t, r == AMP_OK && strcmp(amp_dtype_name(plan.result), outcome(t->line, 0)) == 0, amp_dtype_name(plan.result));
}

static void weight_bind(weight *w, float value) {
    memset(w, 0, sizeof *w);
    w->w = value;
    w->p.name = "w";
    w->p.weight = amp_tensor2(&w->w, AMP_F32, 1, 1);
    w->p.grad = amp_tensor2(&w->dw, AMP_F32, 1, 1);
}

/* "THREAD l CONTEXT SLOT X SHARED = Y DTYPE" */
static void run_forward(autocast_program *t, int c) {
    product *p = &t->products[atoi(t->line->word[3])];
    char got[32];
    memset(p, 0, sizeof *p);
    p->x = of_bits(hex32(t->line, 4)); p->dy = 1;
    p->w = atoi(t->line->word[5]) ? &t->shared[c] : &p->own;
    if (p->w == &p->own) weight_bind(p->w, 1);
    p->op.weight = &p->w->p;
    p->op.x = amp_tensor2(&p->x, AMP_F32, 1, 1);
    p->op.y = amp_tensor2(&p->y, AMP_F32, 1, 1);
    p->op.dy = amp_tensor2(&p->dy, AMP_F32, 1, 1);
    p->op.dx = amp_tensor2(&p->dx, AMP_F32, 1, 1);
    t->context_of[atoi(t->line->word[3])] = c;
    CHECK_OK(amp_linear(t->amp[c], &p->op));
    snprintf(got, sizeof got, "%08x %s", bits(p->y), amp_dtype_name(p->op.plan.result));
    must_be(t, bits(p->y) == hex32(t->line, t->line->result) &&
            strcmp(amp_dtype_name(p->op.plan.result), outcome(t->line, 1)) == 0, got);
}

/* "THREAD g CONTEXT SLOT = DW DX": x and w as forward rounded them. */
static void run_backward(autocast_program *t) {
    product *p = &t->products[atoi(t->line->word[3])];
    char got[32];
    p->w->p.grad_live = 0;
    CHECK_OK(amp_linear_backward(t->amp[t->context_of[atoi(t->line->word[3])]], &p->op));
    snprintf(got, sizeof got, "%08x %08x", bits(p->w->dw), bits(p->dx));
    must_be(t, bits(p->w->dw) == hex32(t->line, t->line->result) && bits(p->dx) == hex32(t->line, t->line->result + 1), got);
}

/* What a line of an autocast program says, in the thread that it says. */
static void do_line(autocast_program *t) {
    const corpus_line *l = t->line;
    int c = l->word[1][0] == 'f' || l->word[1][0] == 'j' ? 0 : atoi(l->word[2]) % 2;
    amp_autocast_desc d;
    switch (l->word[1][0]) {
        case 'f': spawn(t, atoi(l->word[2])); break;
        case 'j': ask(t, atoi(l->word[2]), 2); break;
        case 'b':
            memset(&d, 0, sizeof d);
            d.dtype = dtype_of(l->word[3]); d.disable = atoi(l->word[4]); d.disable_cache = atoi(l->word[5]);
            must_be(t, amp_autocast_begin(t->amp[c], &d) == AMP_OK, amp_last_error());
            break;
        case 'e': must_be(t, (int)amp_autocast_end(t->amp[c]) == atoi(outcome(l, 0)), "otherwise"); break;
        case 'a': ask_active(t, t->amp[c]); break;
        case 'd': ask_decision(t, t->amp[c]); break;
        case 'l': run_forward(t, c); break;
        case 'g': run_backward(t); break;
        case 'w':
            t->shared[c].w = of_bits(hex32(l, 3));
            amp_param_changed(&t->shared[c].p);
            break;
        case 'c': amp_cast_cache_clear(t->amp[c]); break;
        case 's': must_be(t, amp_set_dtype(t->amp[c], dtype_of(l->word[3])) == AMP_OK, amp_last_error()); break;
        default: must_be(t, 0, "unknown call"); break;
    }
}

static void *work(void *arg) {
    worker *w = (worker *)arg;
    autocast_program *t = w->program;
    int what = 1;
    while (what == 1) {
        pthread_mutex_lock(&t->lock);
        while (w->asked == 0) pthread_cond_wait(&t->changed, &t->lock);
        what = w->asked;
        pthread_mutex_unlock(&t->lock);
        if (what == 1) do_line(t);
        pthread_mutex_lock(&t->lock);
        w->asked = 0;
        pthread_cond_broadcast(&t->changed);
        pthread_mutex_unlock(&t->lock);
    }
    return NULL;
}

static void autocast_begin_program(autocast_program *t) {
    static const amp_dtype dtypes[2] = {AMP_F16, AMP_BF16};         /* PyTorch's defaults */
    for (int c = 0; c < 2; c++) {
        amp_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.dtype = dtypes[c]; desc.level = AMP_LEVEL_O1; desc.policy = AMP_POLICY_TORCH; desc.threads = 1;
        desc.logger.level = AMP_LOG_OFF;
        CHECK_OK(amp_open(&t->amp[c], &desc));
        register_user_ops(t->amp[c]);
        weight_bind(&t->shared[c], 1.0f + 1.0f / 4096);
        CHECK_OK(amp_param_register(t->amp[c], &t->shared[c].p, 1));
    }
    t->wrong = 0;
    spawn(t, 0);
}

static void autocast_end_program(autocast_program *t) {
    for (int k = 0; k < THREADS; k++)
        if (t->workers[k].alive) ask(t, k, 2);
    for (int c = 0; c < 2; c++) {
        amp_param_forget(t->amp[c], &t->shared[c].p, 1);
        amp_close(t->amp[c]);
        t->amp[c] = NULL;
    }
}

TEST(autocast_programs) {
    autocast_program *t = (autocast_program *)calloc(1, sizeof *t);
    FILE *f = corpus_open();
    int64_t programs = 0, events = 0;
    int inside = 0;
    if (t == NULL || (t->line = (corpus_line *)calloc(1, sizeof *t->line)) == NULL) exit(2);
    if (pthread_mutex_init(&t->lock, NULL) != 0 || pthread_cond_init(&t->changed, NULL) != 0) exit(2);
    while (corpus_next(f, t->line)) {
        if (is(t->line, "autocast")) {
            if (inside) autocast_end_program(t);
            autocast_begin_program(t);
            inside = 1;
            programs++;
        } else if (inside && !t->wrong) {
            ask(t, integer(t->line, 0), 1);
            events++;
        }
    }
    if (inside) autocast_end_program(t);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->changed);
    fclose(f);
    free(t->line);
    free(t);
    CHECK(programs > 10 && events > 1000);
    counted("autocast_programs", programs);
    counted("autocast_events", events);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    if (argc > 1 && argv[1][0] != '-') corpus_path = argv[1];
    RUN(scaler_programs);
    RUN(presets);
    RUN(autocast_programs);
    return TEST_END();
}
