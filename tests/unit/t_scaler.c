/* t_scaler.c - tests the loss scaler: PyTorch's preset bit for bit, the other presets, stages, errors, saving and loading.
 *
 *     gcc -O2 -Itests tests/unit/t_scaler.c -o t_scaler -lm -lpthread && ./t_scaler      (from the project root)
 *
 * tests/torch/oracle/scaler.py writes the golden data. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "alike.h"
#include "trace.h"
#include <float.h>

#ifndef AMPT_GOLDEN
#define AMPT_GOLDEN "tests/torch/golden"
#endif

/* A program linked with -Ofast starts with subnormals flushed to zero; torch keeps them, so the comparison does too. */
static void scaler_keep_subnormals(void) {
#if defined(__SSE__)
    _mm_setcsr(_mm_getcsr() & ~0x8040u);
#endif
}

static FILE *golden(void) {
    FILE *f = fopen(AMPT_GOLDEN "/scaler.txt", "r");
    CHECK(f != NULL);
    return f;
}

static amp_context *scaler_open_context(amp_cpu_path path, int threads, amp_level level) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.cpu_path = path;
    d.threads = threads;
    d.level = level;
    d.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

static amp_scaler *scaler_make_scaler(amp_context *amp, amp_scaler_preset preset, float init, int32_t interval) {
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = preset;
    d.init_scale = init;
    d.growth_interval = interval;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    return s;
}

static amp_grad_set *range_set(amp_context *amp, void *data, int64_t n, amp_dtype dtype) {
    amp_grad_set *set = NULL;
    amp_range range;
    amp_grad_set_desc d;
    memset(&range, 0, sizeof range);
    memset(&d, 0, sizeof d);
    range.name = "g";
    range.data = data;
    range.count = n;
    range.dtype = dtype;
    d.ranges = &range;
    d.n_ranges = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    return set;
}

/* One update after a check that finds an overflow or not. */
static void drive(amp_scaler *s, amp_grad_set *set, float *g, int overflow) {
    *g = overflow ? of_bits(0x7f800000) : 1.0f;
    CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
    CHECK_OK(amp_scaler_update(s));
}

/* ---- Against PyTorch */

TEST(update_rule_is_torchs_bit_for_bit) {
    static const float found[] = {1, 2, NAN, INFINITY, -1};
    static const double growth[] = {2, 1.0001, 1.5, 16}, backoff[] = {0.5, 0.25, 0.9, 0.1};
    static const uint32_t interval[] = {1, 2, 3, 7, 2000}, rates[] = {2, 5, 50, 1000};
    static const float start[] = {65536.0f, 4.0f, 1e38f, 3.7e-38f, 1e-44f, 1.0f, 3.0f, 1.70141183460469231732e38f};
    FILE *f = golden();
    rng r = {1};
    int segment, events = 0, i;
    if (f == NULL) return;
    for (segment = 0; segment < 110; segment++) {
        amp_scaler_desc d;
        amp_k_scaler_rule rule;
        amp_k_scaler s;
        uint32_t rate, scale;
        uint64_t h = hash_start;
        unsigned long long sum;
        int number, tracker;
        memset(&d, 0, sizeof d);
        d.preset = AMP_SCALER_TORCH;
        d.init_scale = start[below(&r, 8)];
        d.growth_factor = growth[below(&r, 4)];
        d.backoff_factor = backoff[below(&r, 4)];
        d.growth_interval = (int32_t)interval[below(&r, 5)];
        rate = rates[below(&r, 4)];
        ampi_scaler_defaults(&d);
        rule = ampi_scaler_rule(&d);
        s = ampi_scaler_start(&d);
        s.growth_tracker = (int32_t)below(&r, (uint32_t)d.growth_interval + 2);
        for (i = 0; i < 1000; i++, events++) {
            s.found_inf = 0;
            if (below(&r, rate) == 0) s.found_inf = found[below(&r, 5)];
            ampi_rule_update(&s, &rule);
            hash_add(&h, (uint64_t)bits(s.scale) << 32 | bits(s.inv_scale));
            hash_add(&h, (uint64_t)s.growth_tracker);
        }
        CHECK(fscanf(f, "update %d %x %d %llx\n", &number, &scale, &tracker, &sum) == 4);
        CHECK_MSG(number == segment && scale == bits(s.scale) && tracker == s.growth_tracker && sum == h, "segment %d: scale %08x, torch %08x", segment, bits(s.scale), scale);
    }
    CHECK(events >= 100000);
    fclose(f);
}

/* Calls of one event on one optimizer; step unscales first, as PyTorch's does on a plain optimizer. */
static void attempt(uint64_t *h, amp_result result) { hash_add(h, result != AMP_OK); }
static amp_result unscale_and_step(amp_scaler *s, amp_optimizer *o) {
    amp_result checked = amp_scaler_check(s, amp_optimizer_grad_set(o), AMP_CHECK_UNSCALE);
    (void)checked;
    return amp_optimizer_step(o, s);
}

typedef struct { amp_scaler *s; amp_optimizer *o[2]; float g[2][3]; amp_param p[2]; rng r; uint64_t h; } trace;

static void trace_event(trace *t) {
    static const double growth[] = {2, 1.0001, 1.5, 16}, backoff[] = {0.5, 0.25, 0.9, 0.1};
    uint32_t op = below(&t->r, 16), i, k;
    amp_k_scaler state;
    for (i = 0; i < 2; i++) {
        uint32_t n = i == 0 ? 3 : 2, kind = below(&t->r, 12);
        for (k = 0; k < n; k++) t->g[i][k] = (float)((double)below(&t->r, 1000) * 0.37);
        if (kind < 2) t->g[i][below(&t->r, n)] = kind == 0 ? INFINITY : NAN;
        t->p[i].grad_live = 1;
    }
    if (op < 9) {
        for (i = 0; i < 2; i++) {
            if (below(&t->r, 2)) attempt(&t->h, amp_scaler_check(t->s, amp_optimizer_grad_set(t->o[i]), AMP_CHECK_UNSCALE));
            attempt(&t->h, unscale_and_step(t->s, t->o[i]));
        }
        attempt(&t->h, amp_scaler_update(t->s));
    } else if (op == 9) {
        attempt(&t->h, amp_scaler_set_scale(t->s, ldexpf(1, (int)below(&t->r, 40) - 10)));
    } else if (op == 10) {
        CHECK_OK(amp_scaler_set_rule(t->s, 0, 0, 1 + (int32_t)below(&t->r, 5)));
    } else if (op == 11) {
        double a = growth[below(&t->r, 4)], b = backoff[below(&t->r, 4)];
        CHECK_OK(amp_scaler_set_rule(t->s, a, b, 0));
    } else if (op == 12) {
        attempt(&t->h, amp_scaler_check(t->s, amp_optimizer_grad_set(t->o[below(&t->r, 2)]), AMP_CHECK_UNSCALE));
        attempt(&t->h, amp_scaler_update(t->s));
    } else if (op == 13) {
        amp_optimizer *o = t->o[below(&t->r, 2)];
        attempt(&t->h, amp_scaler_check(t->s, amp_optimizer_grad_set(o), AMP_CHECK_UNSCALE));
        attempt(&t->h, amp_scaler_check(t->s, amp_optimizer_grad_set(o), AMP_CHECK_UNSCALE));
        attempt(&t->h, unscale_and_step(t->s, o));
        attempt(&t->h, amp_scaler_check(t->s, amp_optimizer_grad_set(o), AMP_CHECK_UNSCALE));
        attempt(&t->h, unscale_and_step(t->s, o));
        attempt(&t->h, amp_scaler_update(t->s));
        attempt(&t->h, amp_scaler_update(t->s));
    } else if (op == 14) {
        attempt(&t->h, amp_scaler_check(t->s, amp_optimizer_grad_set(t->o[below(&t->r, 2)]), AMP_CHECK_UNSCALE));
    } else {
        attempt(&t->h, amp_scaler_update(t->s));
    }
    CHECK_OK(amp_scaler_get(t->s, &state));
    hash_add(&t->h, (uint64_t)bits(state.scale) << 32 | (uint32_t)state.growth_tracker);
    for (i = 0; i < 2; i++)
        for (k = 0; k < (i == 0 ? 3u : 2u); k++) hash_add(&t->h, is_nan_bits(bits(t->g[i][k])) ? 1 : bits(t->g[i][k]));
}

static void make_trace(trace *t, amp_context *amp, float weights[2][3]) {
    static const char *names[] = {"a", "b"};
    int i;
    memset(t, 0, sizeof *t);
    t->r.x = 7;
    t->h = hash_start;
    t->s = scaler_make_scaler(amp, AMP_SCALER_TORCH, 1024, 3);
    for (i = 0; i < 2; i++) {
        amp_optimizer_desc d;
        memset(&d, 0, sizeof d);
        t->p[i].name = names[i];
        t->p[i].weight = amp_tensor1(weights[i], AMP_F32, i == 0 ? 3 : 2);
        t->p[i].grad = amp_tensor1(t->g[i], AMP_F32, i == 0 ? 3 : 2);
        d.kind = AMP_SGD;
        d.lr = (double)AMP_EXPLICIT_ZERO;
        d.params = &t->p[i];
        d.n_params = 1;
        CHECK_OK(amp_optimizer_create(amp, &t->o[i], &d));
    }
}

TEST(scaler_trace_is_torchs_bit_for_bit) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float weights[2][3] = {{0}};
    char line[128];
    FILE *f = golden();
    trace t;
    int event = 0, at, tracker;
    uint32_t scale;
    unsigned long long sum;
    make_trace(&t, amp, weights);
    while (f != NULL && fgets(line, sizeof line, f)) {
        if (sscanf(line, "scaler %d %x %d %llx", &at, &scale, &tracker, &sum) != 4) continue;
        for (; event < at; event++) trace_event(&t);
        CHECK_MSG(sum == t.h, "event %d: scale %08x, torch %08x", at, bits(amp_scaler_scale(t.s)), scale);
        if (sum != t.h) break;
    }
    CHECK_EQ(event, 20000);
    if (f != NULL) fclose(f);
    amp_optimizer_destroy(t.o[0]);
    amp_optimizer_destroy(t.o[1]);
    amp_scaler_destroy(t.s);
    amp_close(amp);
}

/* The elements of one unscale case, as the oracle makes them. */
static void unscale_words(uint64_t *words, int n, int width, uint64_t exponent, int finite, int k) {
    rng r;
    int i, j;
    r.x = (uint64_t)(100 + k);
    for (i = 0; i < n; i++) {
        uint64_t w = 0;
        for (j = 0; j < width / 16; j++) w = w << 16 | below(&r, 65536);
        if (i % 16 == 0) {
            uint64_t special[4];
            special[0] = 0; special[1] = 1; special[2] = exponent - 1; special[3] = exponent;
            w = special[below(&r, 4)] | (w & (uint64_t)1 << (width - 1));
        }
        if (finite && (w & exponent) == exponent) w &= ~((uint64_t)1 << (width - 2));
        words[i] = w;
    }
}

/* Little-endian elements of width bits at any address. */
static void put_word(char *p, uint64_t w, int width) { int i; for (i = 0; i < width / 8; i++) p[i] = (char)(w >> 8 * i); }
static uint64_t get_word(const char *p, int width) {
    uint64_t w = 0;
    int i;
    for (i = width / 8 - 1; i >= 0; i--) w = w << 8 | (uint8_t)p[i];
    return w;
}

static uint64_t unscale_once(amp_context *amp, char *data, int n, amp_dtype dtype, const uint64_t *words, int width, uint64_t exponent,
                             float inverse, float *found_inf, double *sum_sq) {
    void *dev, *stream;
    const amp_backend *backend = ampi_backend(amp, &dev, &stream);
    amp_k_tensor row;
    amp_k_grad_stats found;
    amp_k_check args;
    uint64_t h = hash_start, magnitude = ((uint64_t)1 << (width - 1)) - 1;
    int i;
    for (i = 0; i < n; i++) put_word(data + i * width / 8, words[i], width);
    memset(&row, 0, sizeof row);
    memset(&found, 0, sizeof found);
    memset(&args, 0, sizeof args);
    row.grad = data;
    row.grad_dtype = dtype;
    row.count = n;
    row.live = 1;
    found.first_bad = -1;
    found.found_inf = *found_inf;
    args.table = &row;
    args.tensors = 1;
    args.multiply = &inverse;
    args.found = &found;
    CHECK_OK(backend->check(dev, &args, stream));
    *found_inf = found.found_inf;
    *sum_sq = found.sum_sq;
    for (i = 0; i < n; i++) {
        uint64_t w = get_word(data + i * width / 8, width);
        hash_add(&h, (w & magnitude) > exponent ? 1 : w);
    }
    return h;
}

TEST(unscale_kernel_is_torchs_bit_for_bit) {
    enum { N = 4099 };
    static const float inverses[] = {1.0f, 0.25f, 1.0f / 65536, 1.0f / 3, 1048576.0f, 0, INFINITY, 0.0f, NAN};
    static const struct { const char *name; amp_dtype dtype; int width; uint64_t exponent; } kinds[] = {
        {"f32", AMP_F32, 32, 0x7f800000}, {"f64", AMP_F64, 64, 0x7ff0000000000000}, {"f16", AMP_F16, 16, 0x7c00}, {"bf16", AMP_BF16, 16, 0x7f80}};
    static uint64_t words[N];
    static char data[N * 8 + 1];
    FILE *f = golden();
    char line[128], name[16];
    int finite, k, inf, cases = 0, kind, path;
    unsigned long long sum;
    if (f == NULL) return;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "unscale %15s %d %d %d %llx", name, &finite, &k, &inf, &sum) != 5) continue;
        for (kind = 0; strcmp(kinds[kind].name, name) != 0; kind++) {}
        unscale_words(words, N, kinds[kind].width, kinds[kind].exponent, finite, k);
        for (path = AMP_CPU_SCALAR; path <= (int)ampi_cpu_best_path(); path = AMPT_NEXT_PATH(path)) {
            amp_context *amp = scaler_open_context((amp_cpu_path)path, 2, AMP_LEVEL_DEFAULT);
            float inverse = k == 5 ? ldexpf(1, -140) : inverses[k], found = 0, sticky = 1;
            double sum_sq;
            int odd = path & 1;     /* unaligned too */
            CHECK_MSG(unscale_once(amp, data + odd, N, kinds[kind].dtype, words, kinds[kind].width, kinds[kind].exponent, inverse, &found, &sum_sq) == sum,
                      "%s, inverse %d, path %d", name, k, path);
            CHECK_EQ(found != 0, inf);
            unscale_once(amp, data, N, kinds[kind].dtype, words, kinds[kind].width, kinds[kind].exponent, inverse, &sticky, &sum_sq);
            CHECK(bits(sticky) == bits(1.0f));
            amp_close(amp);
        }
        cases++;
    }
    CHECK_EQ(cases, 72);
    fclose(f);
}

/* ---- Presets */

TEST(presets_follow_their_rules) {
    static const uint32_t rates[] = {2, 4, 7, 12, 40, 700, 1000000};
    FILE *f = golden();
    char line[128];
    int preset, window, k, i, cases = 0;
    uint32_t scale;
    unsigned long long sum;
    if (f == NULL) return;
    while (fgets(line, sizeof line, f)) {
        amp_scaler_desc d;
        amp_k_scaler_rule rule;
        amp_k_scaler s;
        uint64_t h = hash_start;
        rng r;
        if (sscanf(line, "preset %d %d %d %x %llx", &preset, &window, &k, &scale, &sum) != 5) continue;
        memset(&d, 0, sizeof d);
        d.preset = preset == 60 ? AMP_SCALER_FAIRSEQ : (amp_scaler_preset)preset;
        d.tolerance = preset == 60 ? 0.25 : 0;
        d.growth_interval = window;
        ampi_scaler_defaults(&d);
        CHECK_OK(ampi_check_scaler("test", &d));
        rule = ampi_scaler_rule(&d);
        s = ampi_scaler_start(&d);
        r.x = (uint64_t)(1000 + k);
        for (i = 0; i < 3000; i++) {
            s.found_inf = below(&r, rates[k]) == 0 ? 1.0f : 0.0f;
            ampi_rule_update(&s, &rule);
            hash_add(&h, bits(s.scale));
        }
        CHECK_MSG(scale == bits(s.scale) && sum == h, "preset %d, window %d, rate %d: %g, oracle %g", preset, window, k, (double)s.scale, (double)of_bits(scale));
        cases++;
    }
    CHECK_EQ(cases, 10 * 5 * 7);
    fclose(f);
}

/* The table "behaviour compared": interval 10, scale 2^10, X an overflow. */
TEST(presets_behave_as_compared) {
    static const char *five = "....X....X....X....X....X....X", *alternate = "X.X.X.X.X.X.", *four = "XXXX", *pairs = "XX....XX....XX....";
    static const struct { amp_scaler_preset preset; double tolerance; int clean, five, alternate, four, pairs; } rows[] = {
        {AMP_SCALER_DEFAULT, 0, 10, 4, 4, 6, 4}, {AMP_SCALER_TORCH, 0, 10, 4, 4, 6, 4}, {AMP_SCALER_APEX, 0, 10, 4, 4, 6, 4},
        {AMP_SCALER_KERAS, 0, 10, 4, 4, 6, 4}, {AMP_SCALER_FAIRSEQ, 0, 10, 4, 4, 6, 4}, {AMP_SCALER_FLAX, 0, 11, 4, 4, 6, 4},
        {AMP_SCALER_DEEPSPEED_FUSED, 0, 11, 4, 4, 6, 4}, {AMP_SCALER_MEGATRON, 0, 10, 5, 5, 7, 5}, {AMP_SCALER_DEEPSPEED, 0, 10, 5, 5, 7, 5},
        {AMP_SCALER_FAIRSEQ, 0.25, 10, 10, 4, 6, 6}};
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    size_t i;
    int column;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (column = 0; column < 5; column++) {
            const char *events = column == 1 ? five : column == 2 ? alternate : column == 3 ? four : pairs, *e;
            int want = column == 1 ? rows[i].five : column == 2 ? rows[i].alternate : column == 3 ? rows[i].four : rows[i].pairs, n;
            amp_scaler *s = NULL;
            amp_scaler_desc d;
            memset(&d, 0, sizeof d);
            d.preset = rows[i].preset;
            d.tolerance = rows[i].tolerance;
            d.init_scale = 1024;
            d.growth_interval = 10;
            CHECK_OK(amp_scaler_create(amp, &s, &d));
            if (column == 0) {
                for (n = 0; amp_scaler_scale(s) < 2048 && n < 20; n++) drive(s, set, &g, 0);
                CHECK_EQ(n, rows[i].clean);
            } else {
                for (e = events; *e; e++) drive(s, set, &g, *e == 'X');
                CHECK_MSG(amp_scaler_scale(s) == ldexpf(1, want), "row %d column %d: %g, must be 2^%d", (int)i, column, (double)amp_scaler_scale(s), want);
            }
            amp_scaler_destroy(s);
        }
    }
    amp_grad_set_destroy(set);
    amp_close(amp);
}

/* Where 400 growths without an overflow end. */
TEST(presets_at_their_ceiling) {
    static const struct { amp_scaler_preset preset; uint32_t end; } rows[] = {
        {AMP_SCALER_TORCH, 0x7f000000}, {AMP_SCALER_KERAS, 0x7f000000}, {AMP_SCALER_FLAX, 0x7f7fffff}, {AMP_SCALER_APEX, 0x4b800000},
        {AMP_SCALER_MEGATRON, 0x7f800000}, {AMP_SCALER_DEEPSPEED, 0x7f800000}, {AMP_SCALER_DEEPSPEED_FUSED, 0x7f800000},
        {AMP_SCALER_FAIRSEQ, 0x7f800000}, {AMP_SCALER_DEFAULT, 0x7e800000}};
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    size_t i;
    int n;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        amp_scaler *s = scaler_make_scaler(amp, rows[i].preset, 1024, 1);
        amp_k_scaler state;
        for (n = 0; n < 400 + 400 * (rows[i].preset == AMP_SCALER_FLAX); n++) drive(s, set, &g, 0);
        CHECK_OK(amp_scaler_get(s, &state));
        CHECK_MSG(bits(state.scale) == rows[i].end, "preset %d ends at %g", (int)rows[i].preset, (double)state.scale);
        amp_scaler_destroy(s);
    }
    amp_grad_set_destroy(set);
    amp_close(amp);
}

TEST(presets_at_their_floor) {
    static const struct { amp_scaler_preset preset; float floor; } rows[] = {
        {AMP_SCALER_DEFAULT, 1}, {AMP_SCALER_MEGATRON, 1}, {AMP_SCALER_DEEPSPEED, 1}, {AMP_SCALER_DEEPSPEED_FUSED, 1}, {AMP_SCALER_KERAS, 1},
        {AMP_SCALER_FAIRSEQ, 1.0f / 8192}, {AMP_SCALER_METASEQ, 0.03125f}, {AMP_SCALER_FLAX, 1.17549435e-38f}};
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    size_t i;
    int n;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        amp_scaler *s = scaler_make_scaler(amp, rows[i].preset, 0, 0);
        amp_k_scaler state;
        for (n = 0; n < 300; n++) drive(s, set, &g, 1);
        CHECK_OK(amp_scaler_get(s, &state));
        CHECK_MSG(state.scale == rows[i].floor && state.at_floor == 1, "preset %d stands at %g", (int)rows[i].preset, (double)state.scale);
        CHECK_EQ(state.skips, 300);
        CHECK_EQ(state.consecutive_skips, 300);
        drive(s, set, &g, 0);
        CHECK_OK(amp_scaler_get(s, &state));
        CHECK(state.at_floor == 0 && state.consecutive_skips == 0);
        amp_scaler_destroy(s);
    }
    amp_grad_set_destroy(set);
    amp_close(amp);
}

/* Without a floor torch falls to 0, where its inverse is infinite and a step writes NaN; the guard skips there. */
TEST(guard_skips_where_torch_steps_with_nan) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    int preset, n;
    for (preset = AMP_SCALER_TORCH; preset <= AMP_SCALER_APEX; preset++) {
        amp_scaler *s = scaler_make_scaler(amp, (amp_scaler_preset)preset, 0, 0);
        for (n = 0; n < 166; n++) drive(s, set, &g, 1);
        CHECK(amp_scaler_scale(s) == 0);
        g = 0;
        CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
        CHECK_EQ(amp_grad_set_device(set)->skip, preset != AMP_SCALER_TORCH);
        CHECK(amp_grad_set_device(set)->found_inf == 0);
        amp_scaler_destroy(s);
    }
    amp_grad_set_destroy(set);
    amp_close(amp);
}

/* torch takes any scale: a negative one moves as a positive one does, and is kept where growth would overflow. */
TEST(negative_scales_are_torchs) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    amp_scaler *s = scaler_make_scaler(amp, AMP_SCALER_TORCH, -1024, 1);
    drive(s, set, &g, 1);
    CHECK(amp_scaler_scale(s) == -512);
    drive(s, set, &g, 0);
    CHECK(amp_scaler_scale(s) == -1024);
    CHECK_OK(amp_scaler_set_scale(s, -ldexpf(1, 127)));
    drive(s, set, &g, 0);
    CHECK(amp_scaler_scale(s) == -ldexpf(1, 127));
    amp_scaler_destroy(s);
    amp_grad_set_destroy(set);
    amp_close(amp);
}

/* ---- Hysteresis and the rate rule */

TEST(rate_rule_ends_livelock) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    double tolerance[2] = {(double)AMP_EXPLICIT_ZERO, 0};
    float end[2];
    int i, n;
    /* Every clean update grows the scale and refills the hysteresis: alternating overflows then never shrink it. */
    for (i = 0; i < 2; i++) {
        amp_scaler *s = NULL;
        amp_scaler_desc d;
        memset(&d, 0, sizeof d);
        d.init_scale = 1024;
        d.growth_interval = 1;
        d.hysteresis = 2;
        d.tolerance = tolerance[i];
        CHECK_OK(amp_scaler_create(amp, &s, &d));
        for (n = 0; n < 60; n++) drive(s, set, &g, n % 2 == 0);
        end[i] = amp_scaler_scale(s);
        CHECK_OK(amp_scaler_query(s, &d));
        CHECK(d.tolerance == (i == 0 ? (double)AMP_EXPLICIT_ZERO : 0.25));
        amp_scaler_destroy(s);
    }
    CHECK(end[0] == ldexpf(1, 40));
    CHECK(end[1] == 1024);
    amp_grad_set_destroy(set);
    amp_close(amp);
}

TEST(hysteresis_is_refilled_on_growth) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    amp_k_scaler state;
    const char *e;
    memset(&d, 0, sizeof d);
    d.init_scale = 1024;
    d.growth_interval = 4;
    d.hysteresis = 3;
    d.tolerance = (double)AMP_EXPLICIT_ZERO;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    for (e = "...X...X"; *e; e++) drive(s, set, &g, *e == 'X');      /* an overflow with the tracker at interval - 1 */
    CHECK_OK(amp_scaler_get(s, &state));
    CHECK(state.scale == 1024 && state.hysteresis_left == 1 && state.growth_tracker == 0);
    for (e = "...."; *e; e++) drive(s, set, &g, 0);
    CHECK_OK(amp_scaler_get(s, &state));
    CHECK(state.scale == 2048 && state.hysteresis_left == 3);
    for (e = "XXX"; *e; e++) drive(s, set, &g, 1);
    CHECK(amp_scaler_scale(s) == 1024);
    drive(s, set, &g, 1);                                             /* spent: every further overflow shrinks */
    CHECK(amp_scaler_scale(s) == 512);
    amp_scaler_destroy(s);
    amp_grad_set_destroy(set);
    amp_close(amp);
}

/* ---- Stages, errors, settings */

static int stage_of(amp_grad_set *set) { return (int)set->stage; }

/* Brings a set to a stage: 0 ready, 1 checked, 2 stepped. */
static void bring(amp_scaler *s, amp_optimizer *o, amp_param *p, int stage) {
    p->grad_live = 1;
    CHECK_OK(amp_scaler_set_scale(s, 1024));
    CHECK_EQ(stage_of(amp_optimizer_grad_set(o)), 0);
    if (stage >= 1) CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(o), AMP_CHECK_READ));
    if (stage >= 2) CHECK_OK(amp_optimizer_step(o, s));
    CHECK_EQ(stage_of(amp_optimizer_grad_set(o)), stage);
    p->grad_live = 1;
}

/* A disabled scaler keeps the stages too: a loop that is right without fp16 is right with it. */
static void stage_table(int off) {
    static const amp_result check[3] = {AMP_OK, AMP_ERR_UNSCALED, AMP_ERR_STEPPED};
    static const amp_result step[3] = {AMP_OK, AMP_OK, AMP_ERR_STEPPED};
    static const amp_result update[3] = {AMP_ERR_NO_CHECK, AMP_OK, AMP_OK};
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = NULL, *other = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 1024, 0);
    amp_scaler_desc scaling;
    float w[2] = {1, 2}, g[2] = {1024, 2048}, g16[1] = {0};
    uint16_t half = 0x3c00;
    amp_grad_set *set16 = range_set(amp, &half, 1, AMP_F16), *empty = range_set(amp, g16, 0, AMP_F32);
    amp_optimizer *o = NULL;
    amp_optimizer_desc d;
    amp_param p;
    amp_grad_set *set;
    int stage;
    memset(&scaling, 0, sizeof scaling);
    scaling.init_scale = 1024;
    scaling.disable = off;
    CHECK_OK(amp_scaler_create(amp, &s, &scaling));
    memset(&d, 0, sizeof d);
    memset(&p, 0, sizeof p);
    p.name = "w";
    p.weight = amp_tensor1(w, AMP_F32, 2);
    p.grad = amp_tensor1(g, AMP_F32, 2);
    d.params = &p;
    d.n_params = 1;
    CHECK_OK(amp_optimizer_create(amp, &o, &d));
    set = amp_optimizer_grad_set(o);
    for (stage = 0; stage < 3; stage++) {
        float before[2];
        bring(s, o, &p, stage);
        CHECK_ERR(amp_scaler_check(s, set, AMP_CHECK_READ), check[stage]);
        CHECK_EQ(stage_of(set), check[stage] == AMP_OK ? 1 : stage);
        bring(s, o, &p, stage);
        memcpy(before, w, sizeof w);
        CHECK_ERR(amp_optimizer_step(o, s), step[stage]);
        CHECK_EQ(stage_of(set), 2);
        CHECK_EQ(memcmp(before, w, sizeof w) != 0, step[stage] == AMP_OK);
        bring(s, o, &p, stage);
        CHECK_ERR(amp_step(o, s), step[stage]);
        bring(s, o, &p, stage);
        CHECK_ERR(amp_scaler_update(s), update[stage]);
        CHECK_EQ(stage_of(set), 0);
        bring(s, o, &p, stage);
        CHECK_OK(amp_scaler_set_scale(s, 2048));
        CHECK_EQ(stage_of(set), 0);
        /* another scaler, or none, may not come in between */
        bring(s, o, &p, stage);
        CHECK_ERR(amp_scaler_check(other, set, AMP_CHECK_READ), stage == 0 ? AMP_OK : AMP_ERR_STATE);
        if (stage == 0) CHECK_OK(amp_scaler_update(other));
        else CHECK_ERR(amp_optimizer_step(o, NULL), AMP_ERR_STATE);
    }
    CHECK_OK(amp_scaler_set_scale(s, 1024));
    /* an empty set counts as checked; a mode must be one */
    CHECK_OK(amp_scaler_check(s, empty, AMP_CHECK_UNSCALE));
    CHECK_OK(amp_scaler_update(s));
    CHECK_ERR(amp_scaler_check(s, set, (amp_check_mode)3), AMP_ERR_RANGE);
    CHECK_ERR(amp_scaler_check(s, NULL, AMP_CHECK_READ), AMP_ERR_NULL);
    CHECK_OK(amp_scaler_check(s, set16, AMP_CHECK_UNSCALE));
    CHECK_EQ(half, off ? 0x3c00 : 0x1400);                            /* 2^-10 */
    amp_scaler_destroy(s);                                            /* with a set in flight: it is ready again */
    CHECK_EQ(stage_of(set16), 0);
    amp_optimizer_destroy(o);
    amp_grad_set_destroy(set16);
    amp_grad_set_destroy(empty);
    amp_scaler_destroy(other);
    amp_close(amp);
}

TEST(every_cell_of_the_stage_table) {
    stage_table(0);
    stage_table(1);
}

/* Two weights under SGD with a learning rate of 1. */
typedef struct pair { float w[2], g[2]; amp_param p[2]; amp_optimizer *o; } pair;
static void make_pair(pair *t, amp_context *amp) {
    static const char *names[] = {"a", "b"};
    amp_optimizer_desc d;
    int i;
    memset(t, 0, sizeof *t);
    memset(&d, 0, sizeof d);
    for (i = 0; i < 2; i++) {
        t->w[i] = 8;
        t->g[i] = 1024;
        t->p[i].name = names[i];
        t->p[i].weight = amp_tensor1(&t->w[i], AMP_F32, 1);
        t->p[i].grad = amp_tensor1(&t->g[i], AMP_F32, 1);
        t->p[i].grad_live = 1;
    }
    d.kind = AMP_SGD; d.lr = 1; d.params = t->p; d.n_params = 2; d.apply_nonfinite = 1;
    CHECK_OK(amp_optimizer_create(amp, &t->o, &d));
}

/* PyTorch steps with the gradients of the step, whatever there was at unscale_; one that came since is not unscaled. */
TEST(gradients_come_and_go_between_check_and_step) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = scaler_make_scaler(amp, AMP_SCALER_TORCH, 1024, 0);
    pair t;
    make_pair(&t, amp);
    t.p[1].grad_live = 0;
    CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(t.o), AMP_CHECK_UNSCALE));
    t.p[0].grad_live = 0;
    t.p[1].grad_live = 1;
    t.g[1] = 3;
    CHECK_OK(amp_optimizer_step(t.o, s));
    CHECK(t.w[0] == 8 && t.w[1] == 5);
    amp_optimizer_destroy(t.o);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* A disabled scaler is none: what .apply_nonfinite says holds, with a check before the step and without. */
TEST(disabled_scaler_applies_nonfinite) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    int checked;
    memset(&d, 0, sizeof d);
    d.disable = 1;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    for (checked = 0; checked < 2; checked++) {
        pair t;
        make_pair(&t, amp);
        t.g[0] = INFINITY;
        t.g[1] = 3;
        if (checked) CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(t.o), AMP_CHECK_UNSCALE));
        CHECK_OK(amp_optimizer_step(t.o, s));
        CHECK(bits(t.w[0]) == bits(-INFINITY) && t.w[1] == 5);
        t.g[0] = 1;                                 /* an infinite weight stays what it is */
        t.p[0].grad_live = 1;
        CHECK_OK(amp_scaler_update(s));
        CHECK_OK(amp_optimizer_step(t.o, NULL));
        CHECK(bits(t.w[0]) == bits(-INFINITY));
        amp_optimizer_destroy(t.o);
    }
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* torch's unscale_ takes bf16: product in fp32, rounded once. */
TEST(torch_preset_refuses_fp16_gradients_alone) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = scaler_make_scaler(amp, AMP_SCALER_TORCH, 1024, 0);
    float g = 1024;
    uint16_t h[2] = {0x7c00, 0x3c00}, b[3] = {0x4480, 0x3f81, 0x7f80};     /* inf, 1; 1024, 1.0078125, inf */
    amp_range ranges[2];
    amp_grad_set_desc d;
    amp_grad_set *set = NULL;
    memset(ranges, 0, sizeof ranges);
    memset(&d, 0, sizeof d);
    ranges[0].data = &g; ranges[0].count = 1; ranges[0].dtype = AMP_F32;
    ranges[1].name = "sixteen"; ranges[1].data = h; ranges[1].count = 2; ranges[1].dtype = AMP_F16;
    d.ranges = ranges;
    d.n_ranges = 2;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    CHECK_ERR(amp_scaler_check(s, set, AMP_CHECK_UNSCALE), AMP_ERR_GRAD_16BIT);
    CHECK(strstr(amp_last_error(), "sixteen") != NULL);
    CHECK(g == 1024 && h[1] == 0x3c00);                               /* nothing was touched, and the set is ready */
    CHECK_EQ(stage_of(set), 0);
    CHECK_ERR(amp_scaler_update(s), AMP_ERR_NO_CHECK);
    amp_grad_set_destroy(set);
    ranges[1].data = b; ranges[1].count = 3; ranges[1].dtype = AMP_BF16;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_UNSCALE));
    CHECK(g == 1 && b[0] == 0x3f80 && b[1] == 0x3a81 && b[2] == 0x7f80);
    CHECK_EQ(amp_grad_set_device(set)->skip, 1);
    CHECK_OK(amp_scaler_update(s));
    CHECK(amp_scaler_scale(s) == 512);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* A state says -1 where a desc says AMP_EXPLICIT_ZERO, as the first states did. */
TEST(zero_in_a_state) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler_desc d;
    amp_scaler *s = NULL, *t = NULL;
    amp_state *state = NULL;
    double factors[6];
    memset(&d, 0, sizeof d);
    d.hysteresis = 2;
    CHECK_OK(amp_scaler_create(amp, &t, &d));
    d.tolerance = (double)AMP_EXPLICIT_ZERO;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_scaler_save(s, state, "s"));
    CHECK_OK(amp_state_get(state, "s.factors", AMP_F64, factors, 6));
    CHECK(factors[2] == -1);
    CHECK_OK(amp_scaler_load(t, state, "s"));
    CHECK_OK(amp_scaler_query(t, &d));
    CHECK(d.tolerance == (double)AMP_EXPLICIT_ZERO);
    amp_state_destroy(state);
    amp_scaler_destroy(s); amp_scaler_destroy(t);
    amp_close(amp);
}

TEST(settings_are_checked) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler_desc good, d;
    amp_scaler *s = NULL, *t = NULL;
    int preset;
    memset(&good, 0, sizeof good);
#define REFUSED(field, value, error) do { d = good; d.field = value; CHECK_ERR(amp_scaler_create(amp, &s, &d), error); \
        CHECK(s == NULL); CHECK(strstr(amp_last_error(), #field) != NULL); } while (0)
    REFUSED(preset, (amp_scaler_preset)10, AMP_ERR_RANGE);
    REFUSED(init_scale, -1.0f, AMP_ERR_SCALE);
    REFUSED(init_scale, INFINITY, AMP_ERR_SCALE);
    REFUSED(init_scale, NAN, AMP_ERR_SCALE);
    REFUSED(init_scale, 1e-40f, AMP_ERR_SCALE);
    REFUSED(init_scale, 1.7e38f, AMP_ERR_SCALE);                      /* its inverse is subnormal */
    REFUSED(init_scale, 0.5f, AMP_ERR_RANGE);                         /* below the floor */
    REFUSED(growth_factor, 1.0, AMP_ERR_RANGE);
    REFUSED(growth_factor, INFINITY, AMP_ERR_RANGE);
    REFUSED(growth_factor, NAN, AMP_ERR_RANGE);
    REFUSED(backoff_factor, 1.0, AMP_ERR_RANGE);
    REFUSED(backoff_factor, -0.5, AMP_ERR_RANGE);
    REFUSED(backoff_factor, NAN, AMP_ERR_RANGE);
    REFUSED(growth_interval, -2, AMP_ERR_RANGE);
    REFUSED(hysteresis, -1, AMP_ERR_RANGE);
    REFUSED(min_scale, -2.0f, AMP_ERR_SCALE);
    REFUSED(max_scale, 3e38f, AMP_ERR_SCALE);
    REFUSED(tolerance, 1.5, AMP_ERR_RANGE);
    REFUSED(tolerance, NAN, AMP_ERR_RANGE);
#undef REFUSED
    CHECK_ERR(amp_scaler_create(NULL, &s, &good), AMP_ERR_NULL);
    /* torch takes any scale; what query returns makes the same scaler */
    d = good;
    d.preset = AMP_SCALER_TORCH;
    d.init_scale = INFINITY;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    CHECK_OK(amp_scaler_set_scale(s, 0));
    amp_scaler_destroy(s);
    for (preset = 0; preset <= AMP_SCALER_KERAS; preset++) {
        amp_scaler_desc again;
        d = good;
        d.preset = (amp_scaler_preset)preset;
        CHECK_OK(amp_scaler_create(amp, &s, &d));
        CHECK_OK(amp_scaler_query(s, &d));
        CHECK_OK(amp_scaler_create(amp, &t, &d));
        CHECK_OK(amp_scaler_query(t, &again));
        CHECK(memcmp(&d, &again, sizeof d) == 0);
        if (preset != AMP_SCALER_TORCH) CHECK_ERR(amp_scaler_set_scale(s, 2e38f), AMP_ERR_SCALE);
        amp_scaler_destroy(s);
        amp_scaler_destroy(t);
    }
    amp_close(amp);
}

TEST(set_rule_and_set_scale) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    amp_scaler *s = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 1024, 10), *torch = scaler_make_scaler(amp, AMP_SCALER_TORCH, 1024, 10);
    amp_k_scaler state;
    int n;
    for (n = 0; n < 5; n++) { drive(s, set, &g, 0); drive(torch, set, &g, 0); }
    CHECK_OK(amp_scaler_set_scale(s, 4096));
    CHECK_OK(amp_scaler_get(s, &state));
    CHECK(state.scale == 4096 && state.inv_scale == 1.0f / 4096 && state.growth_tracker == 5 && state.previous_scale == 1024);
    CHECK_ERR(amp_scaler_set_rule(s, 0.5, 0, 0), AMP_ERR_RANGE);
    CHECK_ERR(amp_scaler_set_rule(s, 0, 1, 0), AMP_ERR_RANGE);
    CHECK_ERR(amp_scaler_set_rule(s, 0, 0, -2), AMP_ERR_RANGE);
    CHECK_OK(amp_scaler_set_rule(s, 4, 0.25, 3));                     /* below the tracker: the count restarts */
    CHECK_OK(amp_scaler_set_rule(torch, 4, 0.25, 3));                 /* torch's == is never met again */
    for (n = 0; n < 3; n++) { drive(s, set, &g, 0); drive(torch, set, &g, 0); }
    CHECK(amp_scaler_scale(s) == 16384);
    for (n = 0; n < 100; n++) drive(torch, set, &g, 0);
    CHECK(amp_scaler_scale(torch) == 1024);
    drive(s, set, &g, 1);
    CHECK(amp_scaler_scale(s) == 4096);
    for (n = 0; n < 2; n++) drive(s, set, &g, 0);
    CHECK_OK(amp_scaler_set_rule(s, 0, 0, 2));                        /* at the tracker: here, too */
    CHECK_OK(amp_scaler_get(s, &state));
    CHECK_EQ(state.growth_tracker, 0);
    CHECK_OK(amp_scaler_set_rule(s, 0, 0, AMP_NO_INTERVAL));
    for (n = 0; n < 50; n++) drive(s, set, &g, 0);
    CHECK(amp_scaler_scale(s) == 4096);
    CHECK_OK(amp_scaler_set_scale(s, 0x1p126f));                      /* both ends, and the numbers beside them */
    CHECK_OK(amp_scaler_set_scale(s, 0x1p-126f));
    CHECK_ERR(amp_scaler_set_scale(s, 0x1.000002p126f), AMP_ERR_SCALE);
    CHECK_ERR(amp_scaler_set_scale(s, 0x1.fffffcp-127f), AMP_ERR_SCALE);
    CHECK_OK(amp_scaler_set_scale(s, 0.5f));                          /* below the floor: an overflow does not raise it */
    drive(s, set, &g, 1);
    CHECK_OK(amp_scaler_get(s, &state));
    CHECK(state.scale == 0.5f && state.at_floor == 1);
    amp_scaler_destroy(s);
    amp_scaler_destroy(torch);
    amp_grad_set_destroy(set);
    amp_close(amp);
}

TEST(disabled_and_frozen) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT), *o0 = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_O0);
    float g = NAN;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    amp_grad_stats found;
    amp_k_scaler state;
    memset(&d, 0, sizeof d);
    d.disable = 1;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    CHECK_ERR(amp_scaler_update(s), AMP_ERR_NO_CHECK);
    CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_UNSCALE));
    CHECK_ERR(amp_scaler_check(s, set, AMP_CHECK_UNSCALE), AMP_ERR_UNSCALED);
    CHECK_OK(amp_grad_set_stats(set, &found));
    CHECK(found.found_inf == 1 && found.first_bad_index == 0 && strcmp(found.first_bad, "g") == 0);
    CHECK_OK(amp_scaler_update(s));
    CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
    CHECK_OK(amp_scaler_set_scale(s, 77));                            /* makes every set ready, and the scale stays */
    CHECK_EQ(stage_of(set), 0);
    CHECK(amp_scaler_scale(s) == 1 && *amp_scaler_scale_ptr(s) == 1);
    amp_scaler_destroy(s);
    CHECK(amp_scaler_scale(NULL) == 1 && amp_scaler_scale_ptr(NULL) == NULL);
    /* level O0 disables it */
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_scaler_create(o0, &s, &d));
    CHECK_OK(amp_scaler_query(s, &d));
    CHECK(d.disable == 1 && *amp_scaler_scale_ptr(s) == 1);
    amp_scaler_destroy(s);
    /* frozen: the scale stays, skips are counted */
    memset(&d, 0, sizeof d);
    d.frozen = 1;
    d.init_scale = 128;
    d.growth_interval = 1;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    drive(s, set, &g, 1);
    drive(s, set, &g, 0);
    drive(s, set, &g, 1);
    CHECK_OK(amp_scaler_get(s, &state));
    CHECK(state.scale == 128 && state.skips == 2 && state.updates == 3 && state.consecutive_skips == 1 && state.at_floor == 0);
    amp_scaler_destroy(s);
    amp_grad_set_destroy(set);
    amp_close(amp);
    amp_close(o0);
}

/* ---- Norm, clipping, sets */

TEST(check_finds_the_first_bad_range_and_the_norm) {
    enum { N = 100000 };
    static float a[N], b[N];
    static uint16_t c[N];
    amp_context *one = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT), *two = scaler_open_context(AMP_CPU_DEFAULT, 2, AMP_LEVEL_DEFAULT);
    amp_context *contexts[2];
    amp_range ranges[4];
    double exact = 0;
    float norms[2] = {0, 0};
    uint16_t kept;
    rng r = {5};
    int i, k;
    contexts[0] = one; contexts[1] = two;
    memset(ranges, 0, sizeof ranges);
    for (i = 0; i < N; i++) {
        a[i] = (float)below(&r, 1000) * 1e-3f * ldexpf(1, 40);
        b[i] = -a[i];
        c[i] = (uint16_t)below(&r, 0x4000);
        exact += 2.0 * (double)a[i] * (double)a[i] + (double)amp_f32_from_bf16(c[i]) * (double)amp_f32_from_bf16(c[i]);
    }
    ranges[0].name = "a"; ranges[0].data = a; ranges[0].count = N; ranges[0].dtype = AMP_F32;
    ranges[1].name = "none"; ranges[1].dtype = AMP_F32;
    ranges[2].name = "b"; ranges[2].data = b; ranges[2].count = N; ranges[2].dtype = AMP_F32;
    ranges[3].name = "c"; ranges[3].data = c; ranges[3].count = N; ranges[3].dtype = AMP_BF16;
    for (k = 0; k < 2; k++) {
        amp_scaler *s = scaler_make_scaler(contexts[k], AMP_SCALER_DEFAULT, ldexpf(1, 20), 0);
        amp_grad_set_desc d;
        amp_grad_set *set = NULL;
        amp_grad_stats f;
        double want = sqrt(exact) * ldexp(1, -20);
        memset(&d, 0, sizeof d);
        d.ranges = ranges;
        d.n_ranges = 4;
        d.clip_norm = want / 4;
        CHECK_OK(amp_grad_set_create(contexts[k], &set, &d));
        CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
        CHECK_OK(amp_grad_set_stats(set, &f));
        /* fp64 sums of N terms: N 2^-53 at most, rounded to fp32 (2^-24) */
        CHECK_MSG(fabs((double)f.norm - want) <= want * (ldexp(1, -24) + 3.0 * (double)N * ldexp(1, -53)), "norm %.9g, must be %.9g", (double)f.norm, want);
        CHECK(fabs((double)f.clip_coef - 0.25) < 1e-6 && f.found_inf == 0 && f.first_bad == NULL && f.first_bad_index == -1);
        CHECK_OK(amp_scaler_update(s));
        norms[k] = f.norm;
        kept = c[0];
        b[N - 1] = INFINITY;
        c[0] = 0x7fff;
        CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
        CHECK_OK(amp_grad_set_stats(set, &f));
        CHECK(f.found_inf == 1 && f.first_bad_index == 2 && strcmp(f.first_bad, "b") == 0);
        CHECK(!amp_is_finite_f32(&f.norm));
        b[N - 1] = -a[N - 1];
        c[0] = kept;
        amp_grad_set_destroy(set);
        amp_scaler_destroy(s);
    }
    CHECK(bits(norms[0]) == bits(norms[1]));
    amp_close(one);
    amp_close(two);
}

/* What a host with an optimizer of its own does: check, then apply the rest. */
TEST(apply_and_rescale) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 1024, 1);
    float g[2];
    double d64[2] = {3e200, 4e200};
    amp_range range;
    amp_grad_set_desc d;
    amp_grad_set *set = NULL, *wide = range_set(amp, d64, 2, AMP_F64);
    int mode;
    memset(&range, 0, sizeof range);
    memset(&d, 0, sizeof d);
    range.data = g; range.count = 2; range.dtype = AMP_F32;
    d.ranges = &range; d.n_ranges = 1; d.clip_norm = 2.5;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    for (mode = AMP_CHECK_UNSCALE; mode <= AMP_CHECK_READ; mode++) {
        amp_grad_stats f;
        CHECK_OK(amp_scaler_set_scale(s, 1024));
        g[0] = 3 * 1024; g[1] = 4 * 1024;
        CHECK_OK(amp_scaler_check(s, set, (amp_check_mode)mode));
        CHECK(g[0] == (mode == AMP_CHECK_UNSCALE ? 3 : 3072));
        CHECK_OK(amp_grad_set_stats(set, &f));
        CHECK(f.norm == 5 && fabs((double)f.clip_coef - 0.5) < 1e-6);
        CHECK_OK(amp_grad_set_apply(set));
        CHECK(fabs((double)g[0] - 1.5) < 2e-6 && fabs((double)g[1] - 2) < 2e-6);
        CHECK(amp_grad_set_device(set)->multiplier == 1);
        CHECK_OK(amp_grad_set_apply(set));                                 /* nothing is left */
        CHECK(fabs((double)g[0] - 1.5) < 2e-6);
    }
    CHECK_ERR(amp_grad_set_apply(NULL), AMP_ERR_NULL);
    {   /* 16 bits: one multiplication in fp32, one rounding */
        uint16_t h[3] = {0x6000, 0x7800, 0x0001};                     /* 512, 32768, 2^-24 */
        amp_grad_set *narrow = range_set(amp, h, 3, AMP_F16);
        CHECK_OK(amp_scaler_set_scale(s, 1024));
        CHECK_OK(amp_scaler_check(s, narrow, AMP_CHECK_READ));
        CHECK_OK(amp_grad_set_apply(narrow));
        CHECK(h[0] == 0x3800 && h[1] == 0x5000 && h[2] == 0);
        CHECK_OK(amp_scaler_set_scale(s, 1024));
        amp_grad_set_destroy(narrow);
    }
    /* double gradients in double: neither the check nor the multiplication goes through fp32 */
    CHECK_OK(amp_scaler_check(s, wide, AMP_CHECK_UNSCALE));
    CHECK(amp_grad_set_device(wide)->found_inf == 0 && d64[0] == 3e200 / 1024);
    CHECK_OK(amp_scaler_set_scale(s, 1024));
    /* a buffer that holds values at the old scale follows the scale */
    g[0] = 1024; g[1] = 2048;
    CHECK_OK(amp_scaler_check(s, wide, AMP_CHECK_READ));
    CHECK_OK(amp_scaler_update(s));
    CHECK_OK(amp_scaler_rescale(s, set, 0));
    CHECK(g[0] == 2048 && g[1] == 4096);
    CHECK_OK(amp_scaler_check(s, wide, AMP_CHECK_READ));
    CHECK_OK(amp_scaler_update(s));
    CHECK_OK(amp_scaler_rescale(s, set, 0));                          /* from 2048 to 4096, not from 1024 */
    CHECK(g[0] == 4096 && g[1] == 8192);
    CHECK_OK(amp_scaler_rescale(s, set, 16384));
    CHECK(g[0] == 1024 && g[1] == 2048);
    CHECK_ERR(amp_scaler_rescale(s, set, -1), AMP_ERR_SCALE);
    amp_grad_set_destroy(set);
    amp_grad_set_destroy(wide);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1. */
TEST(clip_coefficient_is_torchs) {
    static const double clips[4] = {1e-6, 2e-6, 0.5e-6, 1}, want[4] = {0.5, 1, 0.25, 1};
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *s = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 1, 0);
    float g = 1e-6f;
    int i;
    for (i = 0; i < 4; i++) {
        amp_range range;
        amp_grad_set_desc d;
        amp_grad_set *set = NULL;
        memset(&range, 0, sizeof range);
        memset(&d, 0, sizeof d);
        range.data = &g; range.count = 1; range.dtype = AMP_F32;
        d.ranges = &range; d.n_ranges = 1; d.clip_norm = clips[i];
        CHECK_OK(amp_grad_set_create(amp, &set, &d));
        CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
        CHECK_MSG(fabs((double)amp_grad_set_device(set)->clip_coef - want[i]) < 1e-6, "%g", (double)amp_grad_set_device(set)->clip_coef);
        amp_grad_set_destroy(set);
    }
    amp_scaler_destroy(s);
    amp_close(amp);
}

TEST(sets_are_checked) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float w[4], g[4];
    amp_range range;
    amp_param p;
    amp_grad_set_desc d;
    amp_grad_set *set;
    memset(&range, 0, sizeof range);
    memset(&p, 0, sizeof p);
    memset(&d, 0, sizeof d);
    CHECK_ERR(amp_grad_set_create(amp, &set, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_NULL);
    d.ranges = &range; d.n_ranges = -1;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_RANGE);
    d.ranges = &range; d.n_ranges = 1; d.params = &p; d.n_params = 1;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_CONFLICT);
    d.params = NULL; d.n_params = 0;
    range.name = "r"; range.data = g; range.count = -1; range.dtype = AMP_F32;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_RANGE);
    range.count = (int64_t)1 << 62;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_SIZE);
    range.count = 4; range.dtype = AMP_I32;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_DTYPE);
    range.dtype = AMP_F32; range.data = NULL;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_NULL);
    range.data = g; d.clip_norm = -1;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_RANGE);
    d.clip_norm = NAN;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_RANGE);
    d.clip_norm = 0; d.ranges = NULL; d.n_ranges = 0; d.params = &p; d.n_params = 1;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_NULL);           /* no name */
    p.name = "p"; p.weight = amp_tensor2(w, AMP_F32, 2, 2); p.grad = amp_tensor1(g, AMP_F32, 3);
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_SHAPE);
    p.grad = amp_tensor2(g, AMP_F32, 2, 2); p.grad.stride[0] = 3; p.grad.stride[1] = 1;
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_SHAPE);
    p.grad = amp_tensor2(g, AMP_F16, 2, 2);
    CHECK_ERR(amp_grad_set_create(amp, &set, &d), AMP_ERR_DTYPE);
    CHECK(set == NULL);
    amp_grad_set_destroy(NULL);
    amp_close(amp);
}

/* ---- Save and load */

TEST(save_and_load_at_every_point) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32), *set2 = range_set(amp, &g, 1, AMP_F32);
    int preset, cut;
    for (preset = 0; preset <= AMP_SCALER_KERAS; preset++) {
        for (cut = 0; cut < 40; cut += 3) {
            amp_scaler *a = scaler_make_scaler(amp, (amp_scaler_preset)preset, 0, 3), *b = scaler_make_scaler(amp, (amp_scaler_preset)preset, 16384, 7);
            amp_state *state = NULL;
            amp_k_scaler x, y;
            rng r;
            int n;
            r.x = (uint64_t)cut;
            for (n = 0; n < cut; n++) drive(a, set, &g, below(&r, 4) == 0);
            if (cut % 2) {                                            /* also between check and update */
                g = cut % 4 == 1 ? INFINITY : 1;
                CHECK_OK(amp_scaler_check(a, set, AMP_CHECK_READ));
            }
            CHECK_OK(amp_state_create(&state, NULL));
            CHECK_OK(amp_scaler_save(a, state, "s"));
            CHECK_OK(amp_scaler_load(b, state, "s"));
            if (cut % 2) { CHECK_OK(amp_scaler_update(a)); CHECK_OK(amp_scaler_update(b)); }
            else CHECK_ERR(amp_scaler_update(b), AMP_ERR_NO_CHECK);
            for (n = 0; n < 40; n++) {
                int bad = below(&r, 4) == 0;
                drive(a, set, &g, bad);
                drive(b, set2, &g, bad);
                CHECK_OK(amp_scaler_get(a, &x));
                CHECK_OK(amp_scaler_get(b, &y));
                CHECK(memcmp(&x, &y, sizeof x) == 0);
            }
            amp_state_destroy(state);
            amp_scaler_destroy(a);
            amp_scaler_destroy(b);
        }
    }
    amp_grad_set_destroy(set);
    amp_grad_set_destroy(set2);
    amp_close(amp);
}

/* Whatever scale a preset's rule leads to: up to infinity where nothing stops growth, and down to 0. */
TEST(every_scale_that_is_reached_loads) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    int preset, bad, n;
    for (preset = 0; preset <= AMP_SCALER_KERAS; preset++)
        for (bad = 0; bad < 2; bad++) {
            amp_scaler *a = scaler_make_scaler(amp, (amp_scaler_preset)preset, 0, 1);
            amp_scaler *b = scaler_make_scaler(amp, (amp_scaler_preset)preset, 0, 1);
            amp_state *state = NULL;
            CHECK_OK(amp_state_create(&state, NULL));
            for (n = 0; n < 360; n++) {
                amp_k_scaler x, y;
                CHECK_OK(amp_scaler_update_with(a, bad));
                CHECK_OK(amp_scaler_save(a, state, "s"));
                CHECK_OK(amp_scaler_load(b, state, "s"));
                CHECK_OK(amp_scaler_get(a, &x));
                CHECK_OK(amp_scaler_get(b, &y));
                CHECK(memcmp(&x, &y, sizeof x) == 0);
            }
            amp_state_destroy(state);
            amp_scaler_destroy(a);
            amp_scaler_destroy(b);
        }
    amp_close(amp);
}

/* And no other: below the floor, above the ceiling, negative, NaN. */
TEST(no_other_scale_loads) {
    static const struct { amp_scaler_preset preset; float scale; amp_result result; } rows[] = {
        {AMP_SCALER_DEFAULT, 0x1p127f, AMP_ERR_SCALE}, {AMP_SCALER_DEFAULT, 0, AMP_ERR_SCALE},
        {AMP_SCALER_APEX, 0x1p127f, AMP_ERR_SCALE}, {AMP_SCALER_APEX, 0, AMP_OK},
        {AMP_SCALER_FLAX, 0x1p127f, AMP_OK}, {AMP_SCALER_FLAX, INFINITY, AMP_ERR_SCALE},
        {AMP_SCALER_FLAX, 0x1p-127f, AMP_ERR_SCALE}, {AMP_SCALER_KERAS, INFINITY, AMP_OK},
        {AMP_SCALER_KERAS, NAN, AMP_ERR_SCALE}, {AMP_SCALER_APEX, -1, AMP_ERR_SCALE},
        {AMP_SCALER_APEX, -0.0f, AMP_ERR_SCALE}, {AMP_SCALER_TORCH, -1, AMP_OK}};
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_scaler *s = scaler_make_scaler(amp, rows[i].preset, 0, 0);
        amp_state *state = NULL;
        float scales[3] = {0, 1, 0};
        scales[0] = rows[i].scale;
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_scaler_save(s, state, "s"));
        CHECK_OK(amp_state_put(state, "s.scale", AMP_F32, scales, 3));
        CHECK_ERR(amp_scaler_load(s, state, "s"), rows[i].result);
        amp_state_destroy(state);
        amp_scaler_destroy(s);
    }
    amp_close(amp);
}

/* One state serves many saves, and a scaler may be turned on or off in between. */
TEST(save_over_a_disabled_scalers) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *on = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 1024, 0), *other = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 2, 0), *off = NULL;
    amp_state *state = NULL;
    amp_scaler_desc d;
    int i;
    memset(&d, 0, sizeof d);
    d.disable = 1;
    CHECK_OK(amp_scaler_create(amp, &off, &d));
    CHECK_OK(amp_state_create(&state, NULL));
    for (i = 0; i < 2; i++) {
        CHECK_OK(amp_scaler_save(off, state, "s"));
        CHECK_ERR(amp_scaler_load(other, state, "s"), AMP_ERR_MISMATCH);
        CHECK_OK(amp_scaler_save(on, state, "s"));
        CHECK_OK(amp_scaler_load(other, state, "s"));
        CHECK(amp_scaler_scale(other) == 1024);
    }
    amp_state_destroy(state);
    amp_scaler_destroy(on);
    amp_scaler_destroy(other);
    amp_scaler_destroy(off);
    amp_close(amp);
}

/* Numbers that no scaler has saved, in the counters and in the rule. */
static const struct { int rule, at; int64_t value; amp_result result; } impossible[] = {
    {0, 0, (int64_t)INT32_MAX + 1, AMP_ERR_RANGE}, {0, 1, 0, AMP_ERR_RANGE}, {0, 2, 2, AMP_ERR_RANGE},
    {1, 0, AMP_SCALER_MEGATRON, AMP_ERR_MISMATCH}, {1, 0, -1, AMP_ERR_MISMATCH}, {1, 0, 99, AMP_ERR_MISMATCH},
    {1, 1, (int64_t)INT32_MIN - 1, AMP_ERR_RANGE}, {1, 1, (int64_t)INT32_MAX + 1, AMP_ERR_RANGE}, {1, 1, 0, AMP_ERR_RANGE},
    {1, 2, 0, AMP_ERR_RANGE}, {1, 2, (int64_t)INT32_MAX + 1, AMP_ERR_RANGE}};

/* Saved by its bits, also in a program that flushes subnormals to zero. */
TEST(save_keeps_a_subnormal_scale) {
#if defined(__SSE__)
    unsigned mode = _mm_getcsr();
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *a = NULL, *b = NULL;
    amp_state *state = NULL;
    amp_scaler_desc d;
    float scales[3] = {0, 0, 0}, again[3] = {0, 0, 0};
    uint32_t bits = 0;
    memset(&d, 0, sizeof d);
    d.preset = AMP_SCALER_TORCH;
    CHECK_OK(amp_scaler_create(amp, &a, &d));
    CHECK_OK(amp_scaler_create(amp, &b, &d));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_scaler_set_scale(a, 0x1p-130f));
    _mm_setcsr(mode | 0x8040u);
    CHECK_OK(amp_scaler_save(a, state, "s"));
    CHECK_OK(amp_scaler_load(b, state, "s"));
    CHECK_OK(amp_scaler_save(b, state, "t"));
    _mm_setcsr(mode);
    CHECK_OK(amp_state_get(state, "s.scale", AMP_F32, scales, 3));
    CHECK_OK(amp_state_get(state, "t.scale", AMP_F32, again, 3));
    memcpy(&bits, scales, 4);
    CHECK_EQ(bits, 1u << 19);
    CHECK(memcmp(scales, again, sizeof scales) == 0);
    amp_state_destroy(state);
    amp_scaler_destroy(b);
    amp_scaler_destroy(a);
    amp_close(amp);
#else
    SKIP("no MXCSR on this processor");
#endif
}

TEST(load_refuses_what_does_not_fit) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    amp_scaler *a = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 1024, 0), *torch = scaler_make_scaler(amp, AMP_SCALER_TORCH, 0, 0), *off = NULL;
    amp_scaler *same = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 1024, 0);
    amp_state *state = NULL, *other = NULL;
    amp_scaler_desc d;
    amp_k_scaler before, after;
    float scales[3] = {0, 1, 0};
    double factors[6];
    int64_t counters[10], i;
    memset(&d, 0, sizeof d);
    d.disable = 1;
    CHECK_OK(amp_scaler_create(amp, &off, &d));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_state_create(&other, NULL));
    CHECK_OK(amp_scaler_get(a, &before));
    CHECK_ERR(amp_scaler_load(a, state, "s"), AMP_ERR_NAME);
    CHECK_ERR(amp_scaler_save(a, state, ""), AMP_ERR_RANGE);
    CHECK_ERR(amp_scaler_save(a, state, "a-prefix-that-is-longer-than-forty-bytes-is"), AMP_ERR_RANGE);
    CHECK_ERR(amp_scaler_save(a, state, NULL), AMP_ERR_NULL);
    CHECK_OK(amp_scaler_save(a, state, "s"));
    CHECK_ERR(amp_scaler_load(torch, state, "s"), AMP_ERR_MISMATCH);
    CHECK_OK(amp_scaler_load(off, state, "s"));
    CHECK_OK(amp_scaler_save(off, other, "s"));
    CHECK_ERR(amp_scaler_load(a, other, "s"), AMP_ERR_MISMATCH);
    CHECK_OK(amp_scaler_load(off, other, "s"));
    CHECK_OK(amp_state_put(state, "s.scale", AMP_F32, scales, 3));
    CHECK_ERR(amp_scaler_load(a, state, "s"), AMP_ERR_SCALE);
    scales[0] = 1024;
    CHECK_OK(amp_state_put(state, "s.scale", AMP_F32, scales, 3));
    CHECK_OK(amp_state_get(state, "s.counters", AMP_I64, counters, 10));
    for (i = 0; i < 10; i++) {
        int64_t kept = counters[i];
        for (int k = 0; k < 2; k++) {
            counters[i] = k == 0 ? -5 : INT64_MAX;      /* from which nothing can be counted on */
            CHECK_OK(amp_state_put(state, "s.counters", AMP_I64, counters, 10));
            CHECK_ERR(amp_scaler_load(a, state, "s"), AMP_ERR_RANGE);
        }
        counters[i] = kept;
    }
    CHECK_OK(amp_state_put(state, "s.counters", AMP_I64, counters, 10));
    CHECK_OK(amp_state_get(state, "s.factors", AMP_F64, factors, 6));
    factors[1] = 2;
    CHECK_OK(amp_state_put(state, "s.factors", AMP_F64, factors, 6));
    CHECK_ERR(amp_scaler_load(a, state, "s"), AMP_ERR_RANGE);
    factors[1] = 0.5;
    CHECK_OK(amp_state_put(state, "s.factors", AMP_F64, factors, 6));
    for (i = 0; i < (int64_t)(sizeof impossible / sizeof *impossible); i++) {
        const char *key = impossible[i].rule ? "s.rule" : "s.counters";
        int64_t values[10], n = impossible[i].rule ? 3 : 10, kept;
        CHECK_OK(amp_state_get(state, key, AMP_I64, values, n));
        kept = values[impossible[i].at];
        values[impossible[i].at] = impossible[i].value;
        CHECK_OK(amp_state_put(state, key, AMP_I64, values, n));
        CHECK_ERR(amp_scaler_load(a, state, "s"), impossible[i].result);
        values[impossible[i].at] = kept;
        CHECK_OK(amp_state_put(state, key, AMP_I64, values, n));
    }
    CHECK_OK(amp_scaler_load(same, state, "s"));
    CHECK_OK(amp_state_put(state, "s.factors", AMP_F64, factors, 5));
    CHECK_ERR(amp_scaler_load(a, state, "s"), AMP_ERR_MISMATCH);
    CHECK_OK(amp_scaler_get(a, &after));
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    amp_state_destroy(state);
    amp_state_destroy(other);
    amp_scaler_destroy(a);
    amp_scaler_destroy(same);
    amp_scaler_destroy(torch);
    amp_scaler_destroy(off);
    amp_close(amp);
}

/* ---- Ranks, played one after the other: what the hook is asked for */

typedef struct { int sums, maxes, doubles, fail; int64_t elements; float flag; } rank_log;
static int log_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    rank_log *log = (rank_log *)user;
    (void)stream;
    if (log->fail) return 7;
    if (op == AMP_REDUCE_MAX) { log->maxes++; if (log->flag > *(float *)data) *(float *)data = log->flag; }
    else if (dtype == AMP_F64) { log->doubles++; *(double *)data *= 2; }
    else { int64_t i; log->sums++; log->elements += count; for (i = 0; i < count; i++) ((float *)data)[i] *= 2; }
    return 0;
}

TEST(ranks_sum_gradients_and_agree_on_overflow) {
    amp_context *amp = NULL;
    amp_desc c;
    rank_log log;
    float g[2] = {3, 4};
    amp_scaler *s = NULL;
    amp_grad_set *set, *sharded = NULL;
    amp_grad_set_desc d;
    amp_range range;
    int32_t apply = 1;
    amp_grad_stats f;
    memset(&c, 0, sizeof c);
    memset(&log, 0, sizeof log);
    memset(&d, 0, sizeof d);
    memset(&range, 0, sizeof range);
    c.reducer.reduce = log_reduce;
    c.reducer.user = &log;
    c.reducer.calls = &alike;
    c.reducer.world = 2;
    CHECK_OK(amp_open(&amp, &c));
    s = scaler_make_scaler(amp, AMP_SCALER_DEFAULT, 1, 0);
    set = range_set(amp, g, 2, AMP_F32);
    CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_UNSCALE));            /* both ranks have the same: the average is the gradient */
    CHECK(g[0] == 3 && g[1] == 4 && log.sums == 1 && log.maxes == 1 && log.doubles == 0 && log.elements == 2);
    CHECK_OK(amp_grad_set_stats(set, &f));
    CHECK(f.norm == 5);
    CHECK_OK(amp_scaler_update(s));
    log.flag = 1;                                                     /* the other rank overflowed */
    CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
    CHECK_EQ(amp_grad_set_device(set)->skip, 1);
    CHECK_OK(amp_scaler_update(s));
    CHECK_EQ(amp_scaler_device(s)->skips, 1);
    log.flag = 0;
    range.data = g; range.count = 2; range.dtype = AMP_F32;
    g[0] = 3; g[1] = 4;
    d.ranges = &range; d.n_ranges = 1; d.sharded = 1;
    CHECK_OK(amp_grad_set_create(amp, &sharded, &d));
    CHECK_OK(amp_scaler_check(s, sharded, AMP_CHECK_READ));
    CHECK_OK(amp_grad_set_stats(sharded, &f));
    CHECK(log.sums == 2 && log.doubles == 1 && g[0] == 3 && fabs((double)f.norm - sqrt(50)) < 1e-6);
    CHECK_OK(amp_scaler_update(s));
    log.fail = 1;
    CHECK_ERR(amp_scaler_check(s, set, AMP_CHECK_READ), AMP_ERR_REDUCE);
    CHECK_EQ(stage_of(set), 0);
    CHECK_ERR(amp_scaler_unscale(s, &range, 1, &apply), AMP_ERR_REDUCE);
    CHECK_EQ(apply, 0);
    amp_grad_set_destroy(set);
    amp_grad_set_destroy(sharded);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* A cycle of two micro-batches on two ranks, which have the same gradients: their sum is 2 x 8, the average 4, whoever asks
   for it how often. */
TEST(averages_are_taken_once) {
    int kind, mode;
    for (kind = 0; kind < 3; kind++) {                                /* enabled, disabled, disabled by level O0 */
        for (mode = AMP_CHECK_UNSCALE; mode <= AMP_CHECK_READ; mode++) {
            amp_context *amp = NULL;
            amp_desc c;
            amp_scaler_desc sd;
            amp_optimizer_desc od;
            amp_optimizer *o = NULL;
            amp_scaler *s = NULL, *other = NULL;
            amp_param p;
            amp_grad_stats found;
            rank_log log;
            float w = 16, g = 8, read = mode == AMP_CHECK_READ;
            memset(&c, 0, sizeof c); memset(&sd, 0, sizeof sd); memset(&od, 0, sizeof od); memset(&p, 0, sizeof p);
            memset(&log, 0, sizeof log);
            c.reducer.reduce = log_reduce; c.reducer.user = &log; c.reducer.calls = &alike; c.reducer.world = 2;
            if (kind == 2) c.level = AMP_LEVEL_O0;
            CHECK_OK(amp_open(&amp, &c));
            sd.init_scale = 4; sd.disable = kind == 1;
            CHECK_OK(amp_scaler_create(amp, &s, &sd));
            CHECK_OK(amp_scaler_create(amp, &other, &sd));
            if (kind == 0) g *= 4;
            p.name = "w"; p.weight = amp_tensor1(&w, AMP_F32, 1); p.grad = amp_tensor1(&g, AMP_F32, 1); p.grad_live = 1;
            od.kind = AMP_SGD; od.lr = 1; od.params = &p; od.n_params = 1; od.accumulation = 2;
            CHECK_OK(amp_optimizer_create(amp, &o, &od));
            /* what was checked before its cycle was whole cannot be added to */
            CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(o), AMP_CHECK_READ));
            g /= 2;                                                   /* the sum over ranks */
            CHECK_ERR(amp_step(o, s), AMP_ERR_STATE);
            CHECK(strstr(amp_last_error(), "micro-batch 1 of 2") != NULL);
            CHECK_OK(amp_scaler_update(s));
            CHECK_OK(amp_step(o, s));                                 /* the first micro-batch */
            CHECK_OK(amp_scaler_check(s, amp_optimizer_grad_set(o), (amp_check_mode)mode));
            CHECK(g == (read ? kind == 0 ? 64.0f : 16.0f : 4.0f));
            CHECK_ERR(amp_scaler_check(s, amp_optimizer_grad_set(o), (amp_check_mode)mode), AMP_ERR_UNSCALED);
            CHECK_ERR(amp_scaler_check(other, amp_optimizer_grad_set(o), (amp_check_mode)mode), AMP_ERR_STATE);
            CHECK_ERR(amp_optimizer_step(o, NULL), AMP_ERR_STATE);
            CHECK(g == (read ? kind == 0 ? 64.0f : 16.0f : 4.0f) && log.sums == 2);
            CHECK_OK(amp_grad_set_stats(amp_optimizer_grad_set(o), &found));
            CHECK(found.norm == 4);
            CHECK_OK(amp_optimizer_step(o, s));
            CHECK(w == 12);
            CHECK_ERR(amp_scaler_check(s, amp_optimizer_grad_set(o), (amp_check_mode)mode), AMP_ERR_STEPPED);
            CHECK_ERR(amp_optimizer_step(o, s), AMP_ERR_STEPPED);
            CHECK_ERR(amp_step(o, s), AMP_ERR_STEPPED);
            CHECK(w == 12);
            CHECK_OK(amp_scaler_update(s));
            amp_optimizer_destroy(o);
            amp_scaler_destroy(s);
            amp_scaler_destroy(other);
            amp_close(amp);
        }
    }
}

/* Settings that are applied make every set ready, so not between a check and its update: the step would check, and so
   unscale and average, once more. */
TEST(settings_wait_for_the_update) {
    int off;
    for (off = 0; off < 2; off++) {
        amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
        amp_settings settings;
        amp_scaler_desc d;
        amp_scaler *s = NULL;
        float g = 1024;
        amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
        memset(&settings, 0, sizeof settings);
        memset(&d, 0, sizeof d);
        d.init_scale = 1024;
        d.disable = off;
        CHECK_OK(amp_scaler_create(amp, &s, &d));
        CHECK_OK(amp_settings_apply(&settings, amp, s, NULL, NULL));
        CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_UNSCALE));
        CHECK_ERR(amp_settings_apply(&settings, amp, s, NULL, NULL), AMP_ERR_STATE);
        CHECK(strstr(amp_last_error(), "amp_scaler_update") != NULL);
        CHECK_EQ(stage_of(set), 1);
        CHECK_OK(amp_scaler_update(s));
        CHECK_OK(amp_settings_apply(&settings, amp, s, NULL, NULL));
        amp_grad_set_destroy(set);
        amp_scaler_destroy(s);
        amp_close(amp);
    }
}

/* Saved between check and update, a disabled scaler too may update after the load, as an enabled one. */
TEST(disabled_scalers_save_that_they_checked) {
    amp_context *amp = scaler_open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT);
    float g = 1;
    amp_grad_set *set = range_set(amp, &g, 1, AMP_F32);
    int from, checked;
    for (from = 0; from < 2; from++)
        for (checked = 0; checked < 2; checked++) {
            amp_scaler *s = NULL, *t = NULL;
            amp_state *state = NULL;
            amp_scaler_desc d;
            memset(&d, 0, sizeof d);
            d.disable = from;
            CHECK_OK(amp_scaler_create(amp, &s, &d));
            d.disable = 1;
            CHECK_OK(amp_scaler_create(amp, &t, &d));
            CHECK_OK(amp_state_create(&state, NULL));
            if (checked) CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
            CHECK_OK(amp_scaler_save(s, state, "s"));
            if (checked) CHECK_OK(amp_scaler_update(s));
            CHECK_OK(amp_scaler_check(t, set, AMP_CHECK_READ));
            CHECK_OK(amp_scaler_load(t, state, "s"));
            CHECK_EQ(stage_of(set), 0);
            CHECK_ERR(amp_scaler_update(t), checked ? AMP_OK : AMP_ERR_NO_CHECK);
            amp_state_destroy(state);
            amp_scaler_destroy(s);
            amp_scaler_destroy(t);
        }
    amp_grad_set_destroy(set);
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    scaler_keep_subnormals();
    RUN(update_rule_is_torchs_bit_for_bit);
    RUN(scaler_trace_is_torchs_bit_for_bit);
    RUN(unscale_kernel_is_torchs_bit_for_bit);
    RUN(presets_follow_their_rules);
    RUN(presets_behave_as_compared);
    RUN(presets_at_their_ceiling);
    RUN(presets_at_their_floor);
    RUN(guard_skips_where_torch_steps_with_nan);
    RUN(negative_scales_are_torchs);
    RUN(rate_rule_ends_livelock);
    RUN(hysteresis_is_refilled_on_growth);
    RUN(every_cell_of_the_stage_table);
    RUN(gradients_come_and_go_between_check_and_step);
    RUN(disabled_scaler_applies_nonfinite);
    RUN(torch_preset_refuses_fp16_gradients_alone);
    RUN(zero_in_a_state);
    RUN(settings_are_checked);
    RUN(set_rule_and_set_scale);
    RUN(disabled_and_frozen);
    RUN(check_finds_the_first_bad_range_and_the_norm);
    RUN(apply_and_rescale);
    RUN(clip_coefficient_is_torchs);
    RUN(sets_are_checked);
    RUN(save_and_load_at_every_point);
    RUN(every_scale_that_is_reached_loads);
    RUN(no_other_scale_loads);
    RUN(save_over_a_disabled_scalers);
    RUN(save_keeps_a_subnormal_scale);
    RUN(load_refuses_what_does_not_fit);
    RUN(ranks_sum_gradients_and_agree_on_overflow);
    RUN(averages_are_taken_once);
    RUN(settings_wait_for_the_update);
    RUN(disabled_scalers_save_that_they_checked);
    return TEST_END();
}
