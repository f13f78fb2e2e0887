/* t_tensor_stats.c - tests the statistics that say how well values fit a format.  Counts are compared with a plain loop.
 * Recommendations are tested at their thresholds, and bad input must return an error.
 *
 *     gcc -O2 -Itests tests/unit/t_tensor_stats.c -o t_tensor_stats -lm -lpthread && ./t_tensor_stats      (from the project root) */
#define _POSIX_C_SOURCE 200809L
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "parallel.h"
#define AMPT_TRAPS
#include "test.h"
#include <math.h>

static const amp_dtype storages[] = {AMP_F32, AMP_F16, AMP_BF16, AMP_F64};
static const amp_dtype formats[] = {AMP_F16, AMP_BF16, AMP_E4M3, AMP_E5M2};

static amp_context *open_context(amp_dtype dtype) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = dtype;
    d.threads = 1;
    d.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

/* ---- Counts */

/* A format by its numbers: mantissa bits, exponents of the smallest normal number and of the last binade, largest. */
typedef struct { int mantissa, low, high; double largest; } shape;
static shape shape_of(amp_dtype format) {
    shape f16 = {10, -14, 15, 65504}, bf16 = {7, -126, 127, 0}, e4m3 = {3, -6, 8, 448}, e5m2 = {2, -14, 15, 57344};
    bf16.largest = ldexp(255, 120);
    return format == AMP_F16 ? f16 : format == AMP_BF16 ? bf16 : format == AMP_E4M3 ? e4m3 : e5m2;
}

/* Value of a bit pattern, whose kind is 0: finite, 1: infinite, 2: NaN; nonzero by its bits, as flushing may hide a number. */
static int value_of(const void *data, amp_dtype dtype, int64_t i, double *x, int *nonzero) {
    uint64_t b = 0, magnitude, fraction;
    int size = (int)amp_dtype_size(dtype), m = dtype == AMP_F64 ? 52 : dtype == AMP_F32 ? 23 : dtype == AMP_F16 ? 10 : 7, e;
    int bias = dtype == AMP_F64 ? 1023 : dtype == AMP_F16 ? 15 : 127, most = 2 * bias + 1;
    memcpy(&b, (const char *)data + i * size, (size_t)size);
    magnitude = b & (((uint64_t)1 << (8 * size - 1)) - 1);
    e = (int)(magnitude >> m);
    fraction = magnitude & (((uint64_t)1 << m) - 1);
    *nonzero = magnitude != 0;
    *x = 0;
    if (e == most) return fraction ? 2 : 1;
    if (e > 0) *x = ldexp((double)(fraction | (uint64_t)1 << m), e - bias - m);
    else if (dtype != AMP_F64) *x = ldexp((double)fraction, 1 - bias - m);      /* fp64's own are below all formats */
    return 0;
}

/* Ties go to even: down at the last number before 0, subnormal and E4M3's NaN, up at the borders of binades. */
static void count_plainly(const void *data, amp_dtype dtype, int64_t n, amp_dtype format, amp_k_inspected *out) {
    shape f = shape_of(format);
    double zero = ldexp(1, f.low - f.mantissa - 1), normal = ldexp(1, f.low) - zero;
    double last = ldexp(1, f.high) - ldexp(1, f.high - f.mantissa - 2), over = f.largest + ldexp(1, f.high - f.mantissa - 1);
    double largest = 0, x;
    int64_t i;
    memset(out, 0, sizeof *out);
    for (i = 0; i < n; i++) {
        int nonzero, kind = value_of(data, dtype, i, &x, &nonzero);
        out->nonzero += nonzero;
        out->nan += kind == 2;
        out->infinite += kind == 1;
        if (kind != 0 || !nonzero) continue;
        if (x > largest) largest = x;
        if (x <= zero) out->underflow++;
        else if (x < normal) out->subnormal++;
        else if (format == AMP_E4M3 ? x > over : x >= over) out->overflow++;
        else if (x >= last) out->saturated++;
    }
    out->largest = ampi_f32_of_bits(ampi_to_f32(ampi_bits_f64(largest), 1));
}

static int same_counts(const amp_k_inspected *a, const amp_k_inspected *b) {
    return a->nan == b->nan && a->infinite == b->infinite && a->nonzero == b->nonzero && a->underflow == b->underflow &&
           a->subnormal == b->subnormal && a->overflow == b->overflow && a->saturated == b->saturated &&
           memcmp(&a->largest, &b->largest, 4) == 0;
}

/* The CPU backend's kernel, on a device of its own. */
static void *host_alloc(void *user, size_t size, size_t align) {
    void *p = NULL;
    (void)user;
    return posix_memalign(&p, align < sizeof p ? sizeof p : align, size) == 0 ? p : NULL;
}
static void host_free(void *user, void *p, size_t size) { (void)user; (void)size; free(p); }
static void *open_device(int threads, amp_cpu_path path) {
    amp_backend_desc d;
    amp_host host;
    void *dev = NULL;
    memset(&d, 0, sizeof d);
    memset(&host, 0, sizeof host);
    host.alloc = host_alloc;
    host.free = host_free;
    host.parallel = ampt_parallel;
    d.threads = threads;
    d.cpu_path = path;
    CHECK_OK(amp_cpu()->open(&dev, &host, &d));
    return dev;
}
static void inspect(void *dev, const amp_k_tensor *table, int64_t n, amp_dtype format, amp_k_inspected *out) {
    amp_k_inspect args;
    memset(&args, 0, sizeof args);
    args.table = table;
    args.tensors = n;
    args.dtype = format;
    args.out = out;
    CHECK_OK(amp_cpu()->inspect(dev, &args, NULL));
}
static amp_cpu_path best_path(void) {
    amp_machine machine;
    return amp_machine_probe(&machine) == AMP_OK ? machine.cpu.path : AMP_CPU_SCALAR;
}

/* Bits of any kind; those of fp64 with exponents near the formats', or all would lie outside. */
static void fill_bits(void *data, amp_dtype dtype, int64_t n, uint64_t seed) {
    int size = (int)amp_dtype_size(dtype);
    int64_t i;
    for (i = 0; i < n; i++) {
        uint64_t b = amp_random_u32(seed, (uint64_t)(2 * i)) | (uint64_t)amp_random_u32(seed, (uint64_t)(2 * i + 1)) << 32;
        if (dtype == AMP_F64 && b % 16 != 0) b = (b & ~((uint64_t)0x7ff << 52)) | (1023 - 140 + b % 270) << 52;
        if (dtype == AMP_F32 && b % 4 != 0) b = (b & ~((uint64_t)0xff << 23)) | (127 - 30 + b % 50) << 23;
        if (b % 61 == 0) b = b % 3 == 0 ? 0 : (uint64_t)1 << (8 * size - 1);
        memcpy((char *)data + i * size, &b, (size_t)size);
    }
}

enum { N = 70000 };                 /* more than four chunks of the CPU's */
static union { double align; unsigned char bytes[N * 8 + 64]; } memory;

static void counts_of(const void *data, amp_dtype storage, int64_t n, const char *what) {
    static const int threads[] = {1, 3};
    amp_k_tensor row;
    amp_k_inspected expected, got;
    size_t f, t;
    int path;
    memset(&row, 0, sizeof row);
    memcpy(&row.grad, &data, sizeof data);
    row.grad_dtype = storage;
    row.count = n;
    row.live = 1;
    for (path = AMP_CPU_SCALAR; path <= (int)best_path(); path = AMPT_NEXT_PATH(path))
        for (t = 0; t < 2; t++) {
            void *dev = open_device(threads[t], (amp_cpu_path)path);
            for (f = 0; f < 4; f++) {
                count_plainly(data, storage, n, formats[f], &expected);
                memset(&got, 0x55, sizeof got);
                inspect(dev, &row, 1, formats[f], &got);
                CHECK_MSG(same_counts(&got, &expected), "%s: %s held against %s, path %d, %d threads", what,
                          amp_dtype_name(storage), amp_dtype_name(formats[f]), path, threads[t]);
            }
            amp_cpu()->close(dev);
        }
}

TEST(counts) {
    static const int64_t sizes[] = {0, 1, 3, 5, 17, 255, 257, 16383, 16385, N};
    size_t s, k;
    for (s = 0; s < 4; s++) {
        fill_bits(memory.bytes, storages[s], N, 7 + s);
        for (k = 0; k < sizeof sizes / sizeof *sizes; k++) counts_of(memory.bytes, storages[s], sizes[k], "random");
        fill_bits(memory.bytes + amp_dtype_size(storages[s]), storages[s], 1000, 70 + s);
        counts_of(memory.bytes + amp_dtype_size(storages[s]), storages[s], 1000, "not aligned");
    }
}

/* Every 16-bit pattern; and for fp32 and fp64 the numbers around every border. */
TEST(counts_at_borders) {
    size_t s, f;
    int64_t i, n = 0;
    for (i = 0; i < 65536; i++) {
        uint16_t b = (uint16_t)i;
        memcpy(memory.bytes + 2 * i, &b, 2);
    }
    counts_of(memory.bytes, AMP_F16, 65536, "every pattern");
    counts_of(memory.bytes, AMP_BF16, 65536, "every pattern");
    for (s = 0; s < 4; s += 3, n = 0) {
        int wide = storages[s] == AMP_F64;
        size_t size = wide ? 8 : 4;
        for (f = 0; f < 4; f++) {
            shape x = shape_of(formats[f]);
            double borders[6];
            borders[0] = ldexp(1, x.low - x.mantissa - 1);
            borders[1] = ldexp(1, x.low) - borders[0];
            borders[2] = ldexp(1, x.high) - ldexp(1, x.high - x.mantissa - 2);
            borders[3] = x.largest + ldexp(1, x.high - x.mantissa - 1);
            borders[4] = x.largest;
            borders[5] = wide ? 1.7976931348623157e308 : 3.4028234663852886e38;
            for (i = 0; i < 6; i++) {
                uint64_t at = ampi_bits_f64(borders[i]), b;
                int step;
                if (!wide) at = ampi_to_f32(at, 0);
                for (step = -2; step <= 2; step++) {
                    b = at + (uint64_t)(int64_t)step;
                    if (step & 1) b |= (uint64_t)1 << (8 * size - 1);
                    memcpy(memory.bytes + size * (size_t)n++, &b, size);
                }
            }
        }
        for (i = 0; i < n; i++) counts_of(memory.bytes + size * (size_t)i, storages[s], 1, "border");
        counts_of(memory.bytes, storages[s], n, "borders");
    }
}

TEST(many_rows) {
    void *dev = open_device(2, best_path());
    amp_k_tensor rows[24];
    amp_k_inspected got[24], expected;
    int64_t at = 0, i;
    memset(rows, 0, sizeof rows);
    for (i = 0; i < 24; i++) {
        rows[i].grad_dtype = storages[i % 4];
        rows[i].count = i % 5 == 4 ? 0 : 1000 + 777 * (i % 3);
        rows[i].live = i % 7 != 3;
        rows[i].grad = memory.bytes + at;
        fill_bits(rows[i].grad, rows[i].grad_dtype, rows[i].count, (uint64_t)i);
        at += rows[i].count * (int64_t)amp_dtype_size(rows[i].grad_dtype);
        if ((at & 7) != 0) at += 8 - (at & 7);
    }
    memset(got, 0x55, sizeof got);
    inspect(dev, rows, 24, AMP_E5M2, got);
    for (i = 0; i < 24; i++) {
        count_plainly(rows[i].grad, rows[i].grad_dtype, rows[i].live ? rows[i].count : 0, AMP_E5M2, &expected);
        CHECK_MSG(same_counts(&got[i], &expected), "row %d", (int)i);
    }
    amp_cpu()->close(dev);
}

/* ---- Remedies */

enum { TENSORS = 8, SIZE = 1000 };
static float weights[TENSORS][SIZE], grads[TENSORS][SIZE];
static amp_param params[TENSORS];
static const char *const param_names[TENSORS] = {"a.0", "a.1", "b.0", "b.1", "c.0", "c.1", "d.0", "d.1"};

/* Weights of 0.5 and gradients that are `gradient` once the scale is out. */
static void fill_params(float gradient, float scale) {
    int t, i;
    for (t = 0; t < TENSORS; t++) {
        memset(&params[t], 0, sizeof params[t]);
        params[t].name = param_names[t];
        params[t].weight = amp_tensor1(weights[t], AMP_F32, SIZE);
        params[t].grad = amp_tensor1(grads[t], AMP_F32, SIZE);
        params[t].grad_live = 1;
        for (i = 0; i < SIZE; i++) { weights[t][i] = 0.5f; grads[t][i] = gradient * scale; }
    }
}
static void put(int t, int first, int n, float gradient, float scale) {
    int i;
    for (i = first; i < first + n; i++) grads[t][i] = gradient * scale;
}

/* One look at the parameters, and at ranges if there are any. */
static char worst[64], bad[64];
static amp_tensor_stats_report look(amp_context *amp, amp_scaler *scaler, amp_dtype format, const amp_range *ranges, int64_t n) {
    amp_tensor_stats_report report;
    amp_tensor_stats_desc d;
    amp_tensor_stats *m = NULL;
    memset(&d, 0, sizeof d);
    memset(&report, 0, sizeof report);
    d.params = params;
    d.n_params = TENSORS;
    d.ranges = ranges;
    d.n_ranges = n;
    d.scaler = scaler;
    d.dtype = format;
    CHECK_OK(amp_tensor_stats_create(amp, &m, &d));
    CHECK_OK(amp_tensor_stats_step(m, &report));
    CHECK(report.due == 1 && report.step == 1 && report.n_rows == 2 * TENSORS + n);
    if (report.worst != NULL) snprintf(worst, sizeof worst, "%s", report.worst);      /* names of ranges go with the object */
    if (report.worst != NULL) report.worst = worst;
    if (report.first_bad != NULL) snprintf(bad, sizeof bad, "%s", report.first_bad);
    if (report.first_bad != NULL) report.first_bad = bad;
    report.rows = NULL;
    amp_tensor_stats_destroy(m);
    return report;
}

static amp_scaler *make_scaler(amp_context *amp, float scale) {
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.init_scale = scale;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    return s;
}

/* tensor NULL: nobody. */
static int about(const amp_tensor_stats_report *r, const char *tensor) {
    return tensor == NULL || r->worst == NULL ? tensor == NULL && r->worst == NULL : strcmp(r->worst, tensor) == 0;
}
#define CHECK_REMEDY(r, what, tensor, scale) do { \
    CHECK_MSG((r).recommendation == (what), "recommendation %d: %s", (int)(r).recommendation, (r).text); \
    CHECK_MSG(about(&(r), tensor), "%s", (r).text); \
    CHECK_MSG((double)(r).wanted_scale == (double)(scale), "wanted %g: %s", (double)(r).wanted_scale, (r).text); } while (0)

TEST(nothing_to_mend) {
    amp_context *amp = open_context(AMP_F16);
    amp_scaler *s = make_scaler(amp, 1024);
    amp_tensor_stats_report r;
    fill_params(0.01f, 1024);
    r = look(amp, s, AMP_DTYPE_DEFAULT, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_NONE, NULL, 0);
    CHECK(r.first_bad == NULL);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* The largest scaled gradient in fp16: 65519 fits, 65520 does not; the scale to go to leaves it at most 16376. */
TEST(lower_the_scale) {
    amp_context *amp = open_context(AMP_F16);
    amp_scaler *s = make_scaler(amp, 65536);
    amp_tensor_stats_report r;
    fill_params(0.01f, 65536);
    grads[2][77] = 65519;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_NONE, NULL, 0);
    grads[2][77] = -65520;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOWER_SCALE, "b.0", 8192);
    grads[2][77] = 16376.0f * 16;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOWER_SCALE, "b.0", 4096);
    grads[2][77] = 16376.0f * 16 + 1;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOWER_SCALE, "b.0", 2048);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* At scale 4 the scale can still fall by 4, to its floor of 1, and no further. */
TEST(lower_to_the_floor) {
    amp_context *amp = open_context(AMP_F16);
    amp_scaler *s = make_scaler(amp, 8);
    amp_tensor_stats_report r;
    fill_params(0.01f, 8);
    grads[1][0] = 16376.0f * 8;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOWER_SCALE, "a.1", 1);
    grads[1][0] = 16376.0f * 8 + 1;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LAYER_FP32, "a.1", 0);
    CHECK(strstr(r.text, "amp_layer_override(amp, \"a.1\", AMP_F32)") != NULL);
    r = look(amp, NULL, AMP_F16, NULL, 0);          /* without a scaler the scale is 1 */
    CHECK_REMEDY(r, AMP_RECOMMEND_LAYER_FP32, "a.1", 0);
    grads[3][0] = 70000 * 8;
    r = look(amp, NULL, AMP_F16, NULL, 0);          /* 2 of 8 are a quarter */
    CHECK_REMEDY(r, AMP_RECOMMEND_BF16, "a.1", 0);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* 2^-25 becomes 0.  10 of 1000 values are 1%, which is not above the share. */
TEST(raise_the_scale) {
    amp_context *amp = open_context(AMP_F16);
    amp_scaler *s = make_scaler(amp, 1);
    amp_tensor_stats_report r;
    fill_params(0.25f, 1);
    put(5, 0, 10, 0x1p-26f, 1);
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_NONE, NULL, 0);
    put(5, 0, 11, 0x1p-26f, 1);
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_RAISE_SCALE, "c.1", 32768);
    CHECK(strstr(r.text, "amp_scaler_set_scale") != NULL);
    r = look(amp, NULL, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_RAISE_SCALE, "c.1", 32768);
    CHECK(strstr(r.text, "train with a loss scaler") != NULL);
    put(5, 0, 11, 0, 1);            /* zeros are no underflow */
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_NONE, NULL, 0);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* Underflow with the largest gradient just below and just above where the scale could be doubled. */
TEST(room_above) {
    amp_context *amp = open_context(AMP_F16);
    amp_scaler *s = make_scaler(amp, 1024);
    amp_tensor_stats_report r;
    fill_params(0.01f, 1024);
    put(0, 0, 20, 0x1p-36f, 1024);
    grads[7][0] = 16376.0f / 2;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_RAISE_SCALE, "a.0", 2048);
    grads[7][0] = 16376.0f / 2 + 0.5f;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LAYER_FP32, "a.0", 0);
    put(1, 0, 20, 0x1p-36f, 1024);
    r = look(amp, s, AMP_F16, NULL, 0);             /* 2 of 8 */
    CHECK_REMEDY(r, AMP_RECOMMEND_BF16, "a.0", 0);
    CHECK(strstr(r.text, "use bf16, which has the range") != NULL);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* Overflow and underflow together: no scale serves both. */
TEST(too_wide_a_spread) {
    amp_context *amp = open_context(AMP_F16);
    amp_scaler *s = make_scaler(amp, 1024);
    amp_tensor_stats_report r;
    fill_params(0.01f, 1024);
    put(4, 0, 20, 0x1p-36f, 1024);
    put(4, 500, 1, 100, 1024);
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LAYER_FP32, "c.0", 0);
    put(4, 0, 20, 0.01f, 1024);
    put(6, 0, 20, 0x1p-36f, 1024);
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_BF16, "c.0", 0);
    params[6].grad_live = 0;        /* not a gradient of this step */
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOWER_SCALE, "c.0", 128);
    amp_scaler_destroy(s);
    amp_close(amp);
}

TEST(infinities_and_nan) {
    amp_context *amp = open_context(AMP_F16);
    amp_scaler *s = make_scaler(amp, 65536);
    amp_tensor_stats_report r;
    float inf = ampi_f32_of_bits(0x7f800000u), nan = ampi_f32_of_bits(0x7fc00000u);
    fill_params(0.01f, 65536);
    grads[3][5] = -inf;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOWER_SCALE, "b.1", 8192);
    CHECK(r.first_bad != NULL && strcmp(r.first_bad, "b.1") == 0);
    grads[3][5] = nan;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOWER_SCALE, "b.1", 16384);
    r = look(amp, s, AMP_BF16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOOK, "b.1", 0);
    CHECK_OK(amp_scaler_set_scale(s, 2));
    r = look(amp, s, AMP_F16, NULL, 0);             /* a quarter of 2 is below the floor */
    CHECK_REMEDY(r, AMP_RECOMMEND_LOOK, "b.1", 0);
    r = look(amp, NULL, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOOK, "b.1", 0);
    fill_params(0.01f, 1);
    weights[6][999] = nan;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOOK, "d.0", 0);
    CHECK(r.first_bad != NULL && strcmp(r.first_bad, "d.0") == 0);
    weights[6][999] = inf;
    r = look(amp, s, AMP_F16, NULL, 0);
    CHECK_REMEDY(r, AMP_RECOMMEND_LOOK, "d.0", 0);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* Weights and ranges carry no scale: they overflow or fit, and what underflows counts for nothing. */
TEST(ranges) {
    static float h[4][100];
    static uint16_t half[100];
    amp_context *amp = open_context(AMP_F16);
    amp_range ranges[5];
    amp_tensor_stats_report r;
    char names[5][16];
    int i, k;
    fill_params(0.01f, 1);
    for (i = 0; i < 5; i++) {
        snprintf(names[i], sizeof names[i], "h.%d", i);
        ranges[i].name = names[i];
        ranges[i].data = i < 4 ? (void *)h[i] : (void *)half;
        ranges[i].count = 100;
        ranges[i].dtype = i < 4 ? AMP_F32 : AMP_F16;
        for (k = 0; k < 100 && i < 4; k++) h[i][k] = k % 2 ? 1e-9f : 1.0f;
    }
    for (k = 0; k < 100; k++) half[k] = 0x3c00;
    r = look(amp, NULL, AMP_F16, ranges, 5);
    CHECK_REMEDY(r, AMP_RECOMMEND_NONE, NULL, 0);
    h[2][7] = 1e5f;
    r = look(amp, NULL, AMP_F16, ranges, 5);
    CHECK_REMEDY(r, AMP_RECOMMEND_LAYER_FP32, "h.2", 0);
    h[1][7] = h[0][3] = h[0][4] = 1e5f;
    r = look(amp, NULL, AMP_F16, ranges, 5);        /* 3 of 13 */
    CHECK_REMEDY(r, AMP_RECOMMEND_LAYER_FP32, "h.0", 0);
    half[50] = 0xfc00;
    r = look(amp, NULL, AMP_F16, ranges, 5);        /* 4 of 13 */
    CHECK_REMEDY(r, AMP_RECOMMEND_BF16, "h.0", 0);
    CHECK(r.first_bad != NULL && strcmp(r.first_bad, "h.4") == 0);
    amp_close(amp);
}

/* ---- The object */

TEST(interval_and_rows) {
    amp_context *amp = open_context(AMP_BF16);
    amp_tensor_stats_report r;
    amp_tensor_stats_desc d;
    amp_tensor_stats *m = NULL;
    char text[8000];
    size_t length;
    int i;
    fill_params(0.25f, 1);
    params[7].grad.data = NULL;     /* frozen */
    params[1].grad_live = 0;
    memset(&d, 0, sizeof d);
    d.params = params;
    d.n_params = TENSORS;
    d.interval = 3;
    CHECK_OK(amp_tensor_stats_create(amp, &m, &d));
    for (i = 1; i <= 7; i++) {
        grads[0][0] = (float)i;
        CHECK_OK(amp_tensor_stats_step(m, &r));
        CHECK_EQ(r.step, i);
        CHECK_EQ(r.due, i % 3 == 1);
        CHECK(r.rows[0].largest == (float)((i - 1) / 3 * 3 + 1));
    }
    CHECK_EQ(r.n_rows, 7 + 8);
    CHECK(r.rows[0].gradient == 1 && r.rows[6].gradient == 1 && r.rows[7].gradient == 0);
    CHECK(strcmp(r.rows[6].name, "d.0") == 0 && strcmp(r.rows[7].name, "a.0") == 0 && strcmp(r.rows[14].name, "d.1") == 0);
    CHECK(r.rows[0].count == SIZE && r.rows[1].count == 0 && r.rows[14].count == SIZE);
    length = amp_tensor_stats_text(&r, text, sizeof text);
    CHECK(length == strlen(text) && strstr(text, "a.0") != NULL && strstr(text, "all tensors fit bf16") != NULL);
    CHECK(amp_tensor_stats_text(&r, NULL, 0) == length && amp_tensor_stats_text(&r, text, 10) == length && strlen(text) == 9);
    amp_tensor_stats_destroy(m);
    amp_tensor_stats_destroy(NULL);
    amp_close(amp);
}

TEST(shares) {
    static float x[8] = {0, 0x1p-30f, 0x1p-20f, 1, 40000, 70000, 0, 0};
    amp_context *amp = open_context(AMP_F32);
    amp_range range = {"x", x, 8, AMP_F32};
    amp_tensor_stats_report r;
    amp_tensor_stats_desc d;
    amp_tensor_stats *m = NULL;
    memset(&d, 0, sizeof d);
    d.ranges = &range;
    d.n_ranges = 1;
    CHECK_OK(amp_tensor_stats_create(amp, &m, &d));     /* fp32: held against fp16 */
    CHECK_OK(amp_tensor_stats_step(m, &r));
    CHECK(r.rows[0].underflow == 0.2 && r.rows[0].subnormal == 0.2 && r.rows[0].saturation == 0.2 && r.rows[0].overflow == 0.2);
    CHECK(r.rows[0].count == 8 && r.rows[0].largest == 70000);
    amp_tensor_stats_destroy(m);
    amp_close(amp);
}

/* Norms and zeros of weights and gradients, in every storage and on both sides of a chunk's length, against plain fp64
   sums: a sum of n positive terms is within n roundings. */
TEST(norms_by_name) {
    enum { MOST = 70001 };
    static const int64_t sizes[] = {1, 37, 65536, MOST};
    static float grads32[4][MOST], scratch[MOST];
    static double data[4][MOST];
    amp_context *amp = open_context(AMP_F16);
    amp_scaler *scaler = NULL;
    amp_scaler_desc scaling = {.init_scale = 512};
    amp_tensor_stats *m = NULL;
    amp_tensor_stats_report r;
    const amp_tensor_stats_row *row;
    char names[4][8];
    CHECK_OK(amp_scaler_create(amp, &scaler, &scaling));
    for (int s = 0; s < 4; s++) {               /* of the weights' storages; fp64 as a range */
        amp_param p[4];
        amp_range range = {"wide", data[3], sizes[s], AMP_F64};
        amp_tensor_stats_desc d;
        memset(p, 0, sizeof p);
        memset(&d, 0, sizeof d);
        for (int i = 0; i < 4; i++) {
            amp_dtype dtype = storages[i];
            int64_t n = sizes[s];
            for (int64_t k = 0; k < n; k++) scratch[k] = k % 5 == 3 ? 0 : amp_random_uniform((uint64_t)i, (uint64_t)k) - 0.25f;
            CHECK_OK(amp_convert(data[i], dtype, scratch, AMP_F32, n, NULL, NULL));
            for (int64_t k = 0; k < n; k++) grads32[i][k] = 3 * scratch[n - 1 - k];
            snprintf(names[i], sizeof names[i], "p%d", i);
            p[i].name = names[i];
            p[i].weight = amp_tensor1(data[i], dtype, n);
            p[i].grad = amp_tensor1(grads32[i], AMP_F32, n);
        }
        d.params = p; d.n_params = 3; d.scaler = scaler; d.ranges = &range; d.n_ranges = 1;
        CHECK_OK(amp_param_register(amp, p, 3));
        p[0].grad_live = p[2].grad_live = 1;
        CHECK_OK(amp_tensor_stats_create(amp, &m, &d));
        CHECK_OK(amp_tensor_stats_step(m, &r));
        for (int i = 0; i < 7; i++) {
            const char *name = i < 6 ? names[i % 3] : "wide";
            int64_t n = sizes[s], zeros = 0;
            double sum = 0, x, want;
            row = amp_tensor_stats_find(&r, name, i < 3);
            CHECK(row != NULL && strcmp(row->name, name) == 0 && row->gradient == (i < 3));
            if (row == NULL) continue;
            for (int64_t k = 0; k < n; k++) {
                int nonzero;
                (void)value_of(i < 3 ? (const void *)grads32[i] : data[i - 3], i < 3 ? AMP_F32 : storages[i - 3], k, &x, &nonzero);
                sum += x * x;
                zeros += !nonzero;
            }
            want = i == 1 ? 0 : sqrt(sum) / (i < 3 ? 512 : 1);
            CHECK_MSG(fabs(row->norm - want) <= (double)n * 0x1p-53 * want, "%s: %.17g, %.17g", name, row->norm, want);
            CHECK(i == 1 ? row->count == 0 && row->zero == 0 : fabs(row->zero * (double)n - (double)zeros) < 0.5);
        }
        CHECK(amp_tensor_stats_find(&r, "p9", 0) == NULL && amp_tensor_stats_find(&r, "wide", 1) == NULL);
        CHECK(amp_tensor_stats_find(NULL, "p0", 0) == NULL && amp_tensor_stats_find(&r, NULL, 0) == NULL);
        amp_tensor_stats_destroy(m);
        amp_param_forget(amp, p, 3);
    }
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

/* Infinities and NaN pass into the norm of their tensor alone. */
TEST(norms_not_finite) {
    static float x[3][4] = {{1, 2, 2, 0}, {1, 0, 0, 0}, {1, 1, 1, 1}};
    amp_context *amp = open_context(AMP_F32);
    amp_range ranges[3] = {{"x", x[0], 4, AMP_F32}, {"inf", x[1], 4, AMP_F32}, {"nan", x[2], 4, AMP_F32}};
    amp_tensor_stats_desc d = {.ranges = ranges, .n_ranges = 3, .interval = 1};
    amp_tensor_stats *m = NULL;
    amp_tensor_stats_report r;
    uint32_t bits[2] = {0x7f800000u, 0x7fc00000u};
    CHECK_OK(amp_tensor_stats_create(amp, &m, &d));
    CHECK_OK(amp_tensor_stats_step(m, &r));
    CHECK(r.rows[0].norm == 3 && r.rows[1].norm == 1 && r.rows[2].norm == 2 && r.rows[1].zero == 0.75);
    memcpy(&x[1][2], &bits[0], 4);
    memcpy(&x[2][3], &bits[1], 4);
    CHECK_OK(amp_tensor_stats_step(m, &r));
    CHECK(r.rows[0].norm == 3 && ampi_bits_f64(r.rows[1].norm) == (uint64_t)0x7ff << 52);
    CHECK((ampi_bits_f64(r.rows[2].norm) << 1) > (uint64_t)0x7ff << 53);
    amp_tensor_stats_destroy(m);
    amp_close(amp);
}

TEST(bad_input) {
    static float x[4];
    amp_context *amp = open_context(AMP_F16);
    amp_range range = {"x", x, 4, AMP_F32};
    amp_tensor_stats_desc good, d;
    amp_tensor_stats *m = NULL;
    amp_tensor_stats_report r;
    amp_param p;
    memset(&good, 0, sizeof good);
    memset(&p, 0, sizeof p);
    good.ranges = &range;
    good.n_ranges = 1;
    CHECK_ERR(amp_tensor_stats_create(NULL, &m, &good), AMP_ERR_NULL);
    CHECK_ERR(amp_tensor_stats_create(amp, NULL, &good), AMP_ERR_NULL);
    CHECK_ERR(amp_tensor_stats_create(amp, &m, NULL), AMP_ERR_NULL);
    d = good; d.n_ranges = 0;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_NULL);
    d = good; d.ranges = NULL;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_NULL);
    d = good; d.n_ranges = -1;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_RANGE);
    d = good; d.n_params = -1;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_RANGE);
    d = good; d.n_params = 1;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_NULL);
    d.params = &p;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_SHAPE);
    p.weight = amp_tensor1(x, AMP_F32, 4);
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_NULL);
    d = good; d.interval = -1;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), ".interval = -1") != NULL);
    d = good; d.dtype = AMP_F32;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_DTYPE);
    d.dtype = (amp_dtype)99;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &d), AMP_ERR_DTYPE);
    range.dtype = AMP_I32;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &good), AMP_ERR_DTYPE);
    range.dtype = AMP_F32; range.count = -4;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &good), AMP_ERR_RANGE);
    range.count = 4; range.data = NULL;
    CHECK_ERR(amp_tensor_stats_create(amp, &m, &good), AMP_ERR_NULL);
    CHECK(m == NULL);
    CHECK_ERR(amp_tensor_stats_step(NULL, &r), AMP_ERR_NULL);
    range.data = x;
    CHECK_OK(amp_tensor_stats_create(amp, &m, &good));
    CHECK_ERR(amp_tensor_stats_step(m, NULL), AMP_ERR_NULL);
    amp_tensor_stats_destroy(m);
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(counts);
    RUN(counts_at_borders);
    RUN(many_rows);
    RUN(nothing_to_mend);
    RUN(lower_the_scale);
    RUN(lower_to_the_floor);
    RUN(raise_the_scale);
    RUN(room_above);
    RUN(too_wide_a_spread);
    RUN(infinities_and_nan);
    RUN(ranges);
    RUN(interval_and_rows);
    RUN(shares);
    RUN(norms_by_name); RUN(norms_not_finite);
    RUN(bad_input);
    return TEST_END();
}
