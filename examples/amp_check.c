/* amp_check.c - what mixed precision can do on this machine, and whether it works: the first thing to run on a new one.
 *
 *     gcc -O2 examples/amp_check.c -o amp_check -lm -lpthread
 *     ./amp_check                     about 15 seconds; --quick: about 3; --help lists every flag
 *     ./amp_check --json > check.json the same facts as one JSON object
 *
 * It prints the machine, a table of the precisions with measured rates, a checklist, and recommended settings.  Each
 * line of the checklist says PASS, FAIL or n/a; the exit code is 0 unless one says FAIL. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "flags.h"
#include "metrics.h"
#include "progress.h"
#include "measure.h"
#include "peak.h"

/* ==== Flags ====================================================================================== */

typedef struct settings {
    const char *device;
    int64_t threads, quick, json, size, copies, layers, channels, batch, seq, help;
    double seconds, min_utilisation;
} settings;

#define FIELD(name) offsetof(settings, name)

static const flag_row options[] = {
    {"device", FLAG_TEXT, FIELD(device), "auto", 0, 0, NULL, flag_device_help},
    {"threads", FLAG_INTEGER, FIELD(threads), "all", 1, 1024, "all=0", "The number of CPU threads."},
    {"quick", FLAG_SWITCH, FIELD(quick), "off", 0, 0, NULL, "Measures smaller sizes, and for a shorter time."},
    {"size", FLAG_INTEGER, FIELD(size), "auto", 64, 16384, "auto=0",
     "The size of the products, which are of size x size matrices. With auto, it is 1024 on a CPU and 8192 on a "
     "GPU, or half of that with --quick."},
    {"copies", FLAG_INTEGER, FIELD(copies), "auto", 1, 65536, "auto=0",
     "The MiB of fp32 values to copy. With auto, it is the size of the last cache, at least 16, and with --quick at "
     "most 64. Copies to a device have 64 MiB."},
    {"layers", FLAG_INTEGER, FIELD(layers), "auto", 1, 1000, "auto=0",
     "The number of blocks of the GPT-2 that is trained. With auto, it is 2 on a CPU and 8 on a GPU."},
    {"channels", FLAG_INTEGER, FIELD(channels), "auto", 64, 65536, "auto=0",
     "The width of this GPT-2, whose heads have 64 channels each. With auto, it is 256 on a CPU and 1024 on a GPU."},
    {"batch", FLAG_INTEGER, FIELD(batch), "auto", 1, 65536, "auto=0",
     "The number of sequences in its batch. With auto, it is 4 on a CPU and 32 on a GPU."},
    {"seq", FLAG_INTEGER, FIELD(seq), "auto", 1, 65536, "auto=0",
     "The number of tokens in a sequence. With auto, it is 128 on a CPU and 512 on a GPU."},
    {"seconds", FLAG_NUMBER, FIELD(seconds), "auto", 0.1, 3600, "auto=0",
     "The number of seconds to train. With auto, it is 4, or 1 with --quick."},
    {"min-utilisation", FLAG_NUMBER, FIELD(min_utilisation), "0.8", 0, 2, NULL,
     "The share of the device that training must use to pass. If it is above 1, nothing passes."},
    {"json", FLAG_SWITCH, FIELD(json), "off", 0, 0, NULL, "Prints one JSON object instead of text."},
    {"help", FLAG_SWITCH, FIELD(help), "off", 0, 0, NULL, "Prints this text."},
};
static flag_program flag_given = {
    .program = "amp_check", .summary = "says what mixed precision can do on this machine, and whether it works",
    .parts = {{options, FLAG_ROWS(options), 0}},
    .ending = "Exit codes: 0 nothing failed, 1 a line says FAIL, 2 refused."
};

/* ==== Findings =================================================================================== */

typedef enum verdict { NOT_HERE, PASS, FAIL } verdict;
static const char *const verdict_names[] = {"n/a", "PASS", "FAIL"};

typedef struct line { char name[24]; verdict verdict; char value[48], meaning[240]; } line;

/* One precision.  Rates are 0 where they were not measured. */
typedef struct precision_row {
    int supported, emulated;
    double gemm, peak, cast;        /* GFLOP/s of the product and of the instruction, GB/s of casts from fp32 */
    char reason[200];
} precision_row;

enum { MOST_LINES = 24, MOST_ADVICE = 16 };
typedef struct check {
    settings set;
    int64_t size;
    amp_context *amp;
    amp_machine machine;
    amp_choice choice;
    precision_row precisions[PRECISIONS];
    line lines[MOST_LINES];
    int n_lines;
    char advice[MOST_ADVICE][240];
    int n_advice;
    workload work;                  /* the model that trains */
    double pinned, ordinary;        /* GB/s to the device; 0: not measured */
    char rates[400];                /* amp_desc.rates, measured; "" on a GPU */
    double disturbed;               /* share of the CPU's time that others took meanwhile; -1: unknown */
    double loader_rate;             /* tokens/s, without training */
    double train_rate, wait_share, utilisation, temperature, power;     /* the last three: -1 unknown */
    amp_verify_report verified;
} check;

static int64_t given_or(int64_t value, int64_t otherwise) { return value > 0 ? value : otherwise; }

static void add_line(check *c, verdict v, const char *name, const char *value, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
static void add_line(check *c, verdict v, const char *name, const char *value, const char *format, ...) {
    line *l = &c->lines[c->n_lines];
    va_list args;
    if (c->n_lines == MOST_LINES) return;
    c->n_lines++;
    l->verdict = v;
    snprintf(l->name, sizeof l->name, "%s", name);
    snprintf(l->value, sizeof l->value, "%s", value);
    va_start(args, format);
    vsnprintf(l->meaning, sizeof l->meaning, format, args);
    va_end(args);
}

static void advise(check *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void advise(check *c, const char *format, ...) {
    va_list args;
    if (c->n_advice == MOST_ADVICE) return;
    va_start(args, format);
    vsnprintf(c->advice[c->n_advice++], sizeof *c->advice, format, args);
    va_end(args);
}

/* A check that could not run has failed. */
static void add_error(check *c, const char *name) {
    add_line(c, FAIL, name, "error", "%s", ex_error());
    ex_text[0] = 0;
}

static int failures(const check *c) {
    int i, n = 0;
    for (i = 0; i < c->n_lines; i++) n += c->lines[i].verdict == FAIL;
    return n;
}

/* ==== Precisions ================================================================================= */

/* The reason of a choice without "requested", which is true of all. */
static const char *without_asked(const char *reason) {
    static const char asked[] = "requested; ";
    return strncmp(reason, asked, sizeof asked - 1) == 0 ? reason + sizeof asked - 1 : reason;
}

static void find_precisions(check *c) {
    int i;
    for (i = 0; i < PRECISIONS; i++) {
        precision_row *row = &c->precisions[i];
        amp_choice choice;
        memset(&choice, 0, sizeof choice);
        row->supported = amp_choose(&c->machine, precisions[i], 0, &choice) == AMP_OK;
        row->emulated = choice.emulated;
        snprintf(row->reason, sizeof row->reason, "%.199s",
                 row->supported ? without_asked(choice.reason) : amp_last_error());
    }
}

/* The precisions that this device has, for amp_tune. */
static int64_t supported(const check *c, amp_dtype dtypes[PRECISIONS]) {
    int64_t n = 0;
    int i;
    for (i = 0; i < PRECISIONS; i++) if (c->precisions[i].supported) dtypes[n++] = precisions[i];
    return n;
}

/* Runs a step in every precision; seconds[i]: the median, 0 where there is none. */
static amp_result time_precisions(check *c, amp_step_function step, void *user, double seconds[PRECISIONS]) {
    amp_dtype dtypes[PRECISIONS];
    amp_tune_desc desc;
    amp_tune_report report;
    int64_t i;
    memset(&desc, 0, sizeof desc);
    memset(&report, 0, sizeof report);
    memset(seconds, 0, PRECISIONS * sizeof *seconds);
    desc.step = step;
    desc.user = user;
    desc.dtypes = dtypes;
    desc.n_dtypes = supported(c, dtypes);
    desc.iterations = c->set.quick ? 5 : 10;
    desc.warmup = 2;
    EX_TRY(amp_tune(c->amp, &desc, &report));
    for (i = 0; i < report.n_rows; i++) {
        const amp_tune_row *row = &report.rows[i];
        if (row->verdict == AMP_VERDICT_PASS) seconds[precision_place(row->dtype)] = row->seconds;
        else return ex_fail(AMP_ERR_DEVICE, "%s: %s", amp_dtype_name(row->dtype), row->reason);
    }
    return AMP_OK;
}

/* A product as in a linear layer: x and y in the precision, the weight's cast from the cache. */
typedef struct product { int64_t n; amp_param weight; void *x[PRECISIONS], *y; } product;

static amp_result product_linear(product *p, amp_context *amp) {
    amp_dtype dtype = dtype_now(amp);
    amp_linear_op op;
    amp_result result;
    memset(&op, 0, sizeof op);
    op.weight = &p->weight;
    op.x = amp_tensor2(p->x[precision_place(dtype)], storage_of(dtype), p->n, p->n);
    op.y = amp_tensor2(p->y, storage_of(dtype), p->n, p->n);
    EX_TRY(amp_autocast_begin(amp, NULL));
    result = amp_linear(amp, &op);
    EX_TRY(amp_autocast_end(amp));
    return result;
}
static int product_step(void *user, amp_context *amp) { return (int)product_linear((product *)user, amp); }

/* Values on the device; 16-bit ones are cast there. */
static amp_result product_fill(check *c, product *p, float *weight) {
    int64_t count = p->n * p->n;
    amp_tensor x = amp_tensor1(p->x[0], AMP_F32, count);
    float *values = (float *)malloc((size_t)count * sizeof *values);
    amp_result result = values != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for the products");
    int i;
    if (result == AMP_OK) ex_normal(values, count, 1, 1, 1.0f);
    if (result == AMP_OK) result = amp_copy(c->amp, p->x[0], values, 4 * count, AMP_COPY_TO_DEVICE);
    if (result == AMP_OK) result = amp_copy(c->amp, weight, values, 4 * count, AMP_COPY_TO_DEVICE);
    if (result == AMP_OK) result = amp_sync(c->amp);
    for (i = 2; i < PRECISIONS && result == AMP_OK; i++) {
        amp_tensor to = amp_tensor1(p->x[i], storage_of(precisions[i]), count);
        result = amp_cast(c->amp, &x, &to);
    }
    free(values);
    return result;
}

static amp_result measure_products(check *c, double seconds[PRECISIONS]) {
    const int64_t bytes = c->size * c->size * 4;
    void *memory = NULL;
    product p;
    float *weight;
    amp_result result;
    memset(&p, 0, sizeof p);
    p.n = c->size;
    EX_TRY(amp_alloc(c->amp, &memory, 4 * bytes));
    p.x[0] = p.x[1] = memory;                           /* fp32 and TF32, then fp16, and bf16 and fp8 */
    p.x[2] = (char *)memory + bytes;
    p.x[3] = p.x[4] = (char *)p.x[2] + bytes / 2;
    p.y = (char *)memory + 2 * bytes;
    weight = (float *)(void *)((char *)memory + 3 * bytes);
    p.weight.name = "product.weight";
    p.weight.weight = amp_tensor2(weight, AMP_F32, p.n, p.n);
    result = product_fill(c, &p, weight);
    if (result == AMP_OK) result = amp_param_register(c->amp, &p.weight, 1);
    if (result == AMP_OK) {
        result = time_precisions(c, product_step, &p, seconds);
        amp_param_forget(c->amp, &p.weight, 1);
    }
    amp_free(c->amp, memory);
    return result;
}

/* fp32 values copied into a precision. */
typedef struct copying { int64_t n; void *from, *to; } copying;

static int copying_step(void *user, amp_context *amp) {
    const copying *m = (const copying *)user;
    amp_dtype storage = storage_of(dtype_now(amp));
    amp_tensor from = amp_tensor1(m->from, AMP_F32, m->n), to = amp_tensor1(m->to, storage, m->n);
    return (int)amp_cast(amp, &from, &to);
}

/* More than a cache holds, so that memory is measured. */
static amp_result measure_copies(check *c, double seconds[PRECISIONS], int64_t *n) {
    int64_t cached = on_cpu(c->amp) ? c->machine.cpu.l3 : (int64_t)256 << 20;
    void *memory = NULL;
    copying m;
    amp_result result;
    m.n = cached / 4 > 1 << 22 ? cached / 4 : 1 << 22;
    if (c->set.quick && m.n > 1 << 24) m.n = 1 << 24;
    if (c->set.copies > 0) m.n = c->set.copies << 18;
    *n = m.n;
    EX_TRY(amp_alloc(c->amp, &memory, 8 * m.n));
    m.from = memory;
    m.to = (char *)memory + 4 * m.n;
    result = amp_fill(c->amp, memory, 0, 8 * m.n);
    if (result == AMP_OK) result = time_precisions(c, copying_step, &m, seconds);
    amp_free(c->amp, memory);
    return result;
}

/* GFLOP/s of the CPU's instruction: the best of three.  0: not known. */
static double measure_peak(const check *c, amp_dtype dtype) {
    amp_desc desc;
    double best = 0;
    int i;
    memset(&desc, 0, sizeof desc);
    if (!on_cpu(c->amp) || amp_query(c->amp, &desc) != AMP_OK) return 0;
    for (i = 0; i < 3; i++) {
        double once = peak_rate(peak_of_path(desc.cpu_path, dtype), desc.threads);
        if (once > best) best = once;
    }
    return best;
}

/* Adds what a path reached to the line of rates. */
static void add_rates(check *c, amp_cpu_path path, const double products[PRECISIONS]) {
    static const char *const words[AMP_CPU_PATHS] = {"", "scalar", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"};
    int i;
    for (i = 0; i < PRECISIONS; i++) {
        size_t used = strlen(c->rates);
        if (precisions[i] != AMP_BF16 && precisions[i] != AMP_F16) continue;
        if (!(products[0] > 0) || !(products[i] > 0)) continue;
        snprintf(c->rates + used, sizeof c->rates - used, "%s%s %s %.2f", used > 0 ? ", " : "", words[path],
                 amp_dtype_name(precisions[i]), products[0] / products[i]);
    }
}

/* The same products by the other paths that could be chosen: those with the widest fp32 kernels. */
static amp_result measure_paths(check *c) {
    double products[PRECISIONS];
    amp_desc in_use, desc;
    int path;
    EX_TRY(amp_query(c->amp, &in_use));
    memset(&desc, 0, sizeof desc);
    desc.threads = in_use.threads;
    for (path = AMP_CPU_AVX512; path < AMP_CPU_PATHS; path++) {
        check other = *c;
        amp_result result;
        if (path == (int)in_use.cpu_path || !(c->machine.rates[path].bf16 > 0)) continue;
        desc.cpu_path = (amp_cpu_path)path;
        EX_TRY(amp_open(&other.amp, &desc));
        result = measure_products(&other, products);
        amp_close(other.amp);
        EX_TRY(result);
        add_rates(c, (amp_cpu_path)path, products);
    }
    return AMP_OK;
}

/* Seconds that all cores worked for anyone, or were taken by a hypervisor; -1: this system does not say. */
#if defined(_WIN32)
static double cores_here(void) { return (double)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS); }
static double cores_busy(void) {
    FILETIME t[3];                  /* idle, kernel with idle, user, in 100 ns */
    double seconds[3];
    int i;
    if (!GetSystemTimes(&t[0], &t[1], &t[2])) return -1;
    for (i = 0; i < 3; i++) seconds[i] = 1e-7 * (4294967296.0 * t[i].dwHighDateTime + t[i].dwLowDateTime);
    return seconds[1] + seconds[2] - seconds[0];
}
#else
static double cores_here(void) { return (double)sysconf(_SC_NPROCESSORS_ONLN); }
static double cores_busy(void) {
    double user, nice, system, idle, waits, interrupts, soft, stolen;
    FILE *file = fopen("/proc/stat", "r");
    int n;
    if (file == NULL) return -1;
    n = fscanf(file, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", &user, &nice, &system, &idle, &waits, &interrupts, &soft,
               &stolen);
    fclose(file);
    return n == 8 ? (user + nice + system + interrupts + soft + stolen) / (double)sysconf(_SC_CLK_TCK) : -1;
}
#endif

static void measure_rates(check *c) {
    double products[PRECISIONS], copies[PRECISIONS], n = (double)c->size, busy = cores_busy(), began = ex_seconds();
    double own = (double)clock() / CLOCKS_PER_SEC, others;
    int64_t values = 0;
    int i, counted = measure_products(c, products) == AMP_OK;
    if (!counted) add_error(c, "products");
    if (on_cpu(c->amp) && counted) {
        add_rates(c, c->machine.cpu.path, products);
        if (measure_paths(c) != AMP_OK) add_error(c, "products by other paths");
    }
    own = (double)clock() / CLOCKS_PER_SEC - own;
    others = (cores_busy() - busy - own) / ((ex_seconds() - began) * cores_here());
    c->disturbed = busy < 0 ? -1 : others < 0.05 ? 0 : others;      /* below that is the system itself */
    if (measure_copies(c, copies, &values) != AMP_OK) { add_error(c, "copies"); return; }
    for (i = 0; i < PRECISIONS; i++) {
        precision_row *row = &c->precisions[i];
        double bytes = (double)values * (4 + (double)amp_dtype_size(storage_of(precisions[i])));
        if (!row->supported) continue;
        if (counted && products[i] > 0) row->gemm = 2e-9 * n * n * n / products[i];
        if (copies[i] > 0) row->cast = 1e-9 * bytes / copies[i];
        row->peak = i == 0 || !row->emulated ? measure_peak(c, precisions[i]) : c->precisions[0].peak;
        if (row->peak < row->gemm) row->peak = 0;       /* disturbed by other programs: unknown */
    }
}

/* Checks that the regions' dtype is the faster one here, as measured.  A tenth more or less is noise. */
static void check_choice(check *c) {
    const precision_row *row = &c->precisions[precision_place(c->choice.dtype)];
    const precision_row *bf16 = &c->precisions[precision_place(AMP_BF16)];
    double fp32 = c->precisions[0].gemm, speedup = fp32 > 0 ? row->gemm / fp32 : 0;
    const char *because = c->disturbed > 0 ? ", but other programs used the cores: run it again" : "";
    char value[48];
    if (c->choice.dtype == AMP_F32 && fp32 > 0 && bf16->gemm > 1.1 * fp32) {
        snprintf(value, sizeof value, "fp32; bf16 %.2f x", bf16->gemm / fp32);
        add_line(c, NOT_HERE, "fast precision", value, "bf16 products are faster here than fp32 products%s", because);
    } else if (c->choice.dtype == AMP_F32)
        add_line(c, NOT_HERE, "fast precision", "fp32", "no fast 16-bit products: mixed precision saves memory here, "
                 "not time");
    else if (speedup > 0) {
        snprintf(value, sizeof value, "%s, %.2f x fp32", amp_dtype_name(c->choice.dtype), speedup);
        add_line(c, speedup >= 1 ? PASS : FAIL, "fast precision", value, "products in the chosen precision are %s than "
                 "in fp32%s", speedup >= 1 ? "faster" : "slower", speedup >= 1 ? "" : because);
    }
}

/* ==== Data ======================================================================================= */

/* One sample is a block of floats, written once, so that only the copy to the device takes time. */
enum { MOST_BLOCKS = 64 };
typedef struct block_source { int64_t floats; void *seen[MOST_BLOCKS]; int n; } block_source;

static int block_read(void *user, const amp_sample *sample, void *const *fields) {
    block_source *s = (block_source *)user;
    int i;
    (void)sample;
    for (i = 0; i < s->n; i++) if (s->seen[i] == fields[0]) return 0;
    memset(fields[0], 0, (size_t)s->floats * sizeof(float));
    if (s->n < MOST_BLOCKS) s->seen[s->n++] = fields[0];
    return 0;
}

/* GB/s of batches from host memory to the device. */
static amp_result measure_transfer(check *c, int ordinary, double *rate) {
    enum { WARM = 6, BATCHES = 24 };
    block_source blocks;
    amp_source source;
    amp_loader_desc desc;
    amp_loader *loader;
    amp_batch batch;
    amp_result result = AMP_OK;
    double began = 0;
    int i;
    memset(&blocks, 0, sizeof blocks);
    memset(&source, 0, sizeof source);
    memset(&desc, 0, sizeof desc);
    blocks.floats = given_or(c->set.copies, 64) << 18;
    source.read = block_read;
    source.user = &blocks;
    source.samples = BATCHES;
    source.n_fields = 1;
    source.fields[0].dtype = AMP_F32;
    source.fields[0].count = blocks.floats;
    desc.source = &source;
    desc.batch = desc.workers = 1;
    desc.disable_pinned = ordinary;
    EX_TRY(amp_loader_create(c->amp, &loader, &desc));
    for (i = 0; i < WARM + BATCHES && result == AMP_OK; i++) {
        if (i == WARM) began = ex_seconds();
        result = amp_loader_next(loader, &batch);
        if (result == AMP_OK) result = amp_sync(c->amp);
    }
    *rate = 4e-9 * (double)blocks.floats * BATCHES / (ex_seconds() - began);
    amp_loader_destroy(loader);
    return result;
}

static void check_pinned(check *c) {
    char value[48];
    if (on_cpu(c->amp)) {
        add_line(c, NOT_HERE, "pinned copies", "no device", "the CPU reads batches in place");
        return;
    }
    if (measure_transfer(c, 0, &c->pinned) != AMP_OK || measure_transfer(c, 1, &c->ordinary) != AMP_OK) {
        add_error(c, "pinned copies");
        return;
    }
    snprintf(value, sizeof value, "%.1f GB/s", c->pinned);
    add_line(c, c->pinned >= 0.95 * c->ordinary ? PASS : FAIL, "pinned copies", value,
             "batches to the device; from ordinary memory %.1f GB/s", c->ordinary);
}

enum { TOKENS_VOCAB = 256 };

static amp_result tokens_loader(const check *c, int64_t batch, int64_t seq, amp_loader **out) {
    amp_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = tokens_path;
    desc.format = AMP_TOKENS_U16;
    desc.batch = batch;
    desc.seq = seq;
    desc.shuffle = 1;
    desc.vocab = TOKENS_VOCAB;
    return amp_loader_create(c->amp, out, &desc);
}

static amp_result measure_loader(check *c) {
    const int64_t batch = 32, seq = 1024;
    const double seconds = c->set.quick ? 0.2 : 1;
    amp_loader *loader;
    amp_batch got;
    amp_result result;
    double began = 0, now = 0;
    int64_t taken = -4;                 /* the first batches only start the workers */
    EX_TRY(tokens_loader(c, batch, seq, &loader));
    do {
        result = amp_loader_next(loader, &got);
        if (++taken == 0) began = ex_seconds();
        now = ex_seconds();
    } while (result == AMP_OK && (taken <= 0 || now - began < seconds));
    c->loader_rate = (double)(taken * batch * seq) / (now - began);
    amp_loader_destroy(loader);
    return result;
}

/* ==== Self-tests ================================================================================= */

/* y = x through an identity weight, and dx = dy: the results show how a value was rounded. */
typedef struct identity {
    amp_context *amp;
    amp_param weight;
    float *memory;                  /* device: weight, gradient, x, y, dy, dx */
    amp_linear_op op;
} identity;
enum { SIDE = 16, CELLS = SIDE * SIDE };

static amp_result identity_open(identity *t, amp_context *amp, float value) {
    float host[6 * CELLS];
    void *memory;
    amp_tensor at[6];
    int i;
    memset(t, 0, sizeof *t);
    memset(host, 0, sizeof host);
    t->amp = amp;
    for (i = 0; i < CELLS; i++) {
        host[i] = i % (SIDE + 1) == 0 ? 1.0f : 0.0f;
        host[2 * CELLS + i] = host[4 * CELLS + i] = value;
    }
    EX_TRY(amp_alloc(amp, &memory, (int64_t)sizeof host));
    t->memory = (float *)memory;
    for (i = 0; i < 6; i++) at[i] = amp_tensor2(t->memory + i * CELLS, AMP_F32, SIDE, SIDE);
    t->weight.name = "identity.weight";
    t->weight.weight = at[0]; t->weight.grad = at[1];
    t->op.weight = &t->weight;
    t->op.x = at[2]; t->op.y = at[3]; t->op.dy = at[4]; t->op.dx = at[5];
    EX_TRY(amp_copy(amp, memory, host, (int64_t)sizeof host, AMP_COPY_TO_DEVICE));
    EX_TRY(amp_sync(amp));
    return amp_param_register(amp, &t->weight, 1);
}
static void identity_close(identity *t) {
    if (t->weight.id != 0) amp_param_forget(t->amp, &t->weight, 1);
    amp_free(t->amp, t->memory);
}

/* The first value of a tensor. */
static float first_of(amp_context *amp, const amp_tensor *t) {
    float value = -1;
    if (amp_copy(amp, &value, t->data, (int64_t)sizeof value, AMP_COPY_TO_HOST) != AMP_OK || amp_sync(amp) != AMP_OK)
        return -1;
    return value;
}

static amp_result identity_forward(identity *t, amp_dtype dtype, int island) {
    amp_autocast_desc region;
    amp_result result;
    memset(&region, 0, sizeof region);
    region.dtype = island ? AMP_DTYPE_DEFAULT : dtype;
    region.disable = island;
    EX_TRY(amp_autocast_begin(t->amp, &region));
    result = amp_linear(t->amp, &t->op);
    EX_TRY(amp_autocast_end(t->amp));
    return result;
}

/* Checks the region's dtype, and that of its backward, called outside.  *why: what is wrong, or NULL. */
static amp_result try_autocast(identity *t, amp_dtype dtype, float value, float rounded, const char **why) {
    *why = NULL;
    EX_TRY(identity_forward(t, dtype, 0));
    if (t->op.plan.compute != dtype || t->op.plan.rule != AMP_BY_REGION) *why = "the region did not choose the dtype";
    else if (first_of(t->amp, &t->op.y) != rounded) *why = "forward did not round its input to the region's dtype";
    EX_TRY(amp_linear_backward(t->amp, &t->op));
    if (*why == NULL && first_of(t->amp, &t->op.dx) != rounded) *why = "backward did not use forward's dtype";
    EX_TRY(identity_forward(t, dtype, 1));
    if (*why == NULL && first_of(t->amp, &t->op.y) != value) *why = "an fp32 island rounded its input";
    return AMP_OK;
}

/* 1 + 2^-12 is not a number of fp16 or bf16: each rounds it to 1. */
static void check_autocast(check *c, amp_dtype dtype) {
    const float value = 1.0f + 1.0f / 4096;
    const char *why = NULL;
    identity t;
    char name[24];
    amp_result result;
    snprintf(name, sizeof name, "autocast %s", amp_dtype_name(dtype));
    if (!c->precisions[precision_place(dtype)].supported) {
        add_line(c, NOT_HERE, name, "no", "%s", c->precisions[precision_place(dtype)].reason);
        return;
    }
    result = identity_open(&t, c->amp, value);
    if (result == AMP_OK) result = try_autocast(&t, dtype, value, 1.0f, &why);
    if (result != AMP_OK) add_error(c, name);
    else if (why != NULL) add_line(c, FAIL, name, "wrong", "%s", why);
    else add_line(c, PASS, name, "exact", "a region casts, its backward uses the same dtype, an island stays in fp32");
    identity_close(&t);
}

/* The gradient of every weight becomes `value`; a step follows.  *moved: the first weight changed. */
static amp_result scaler_try(identity *t, amp_optimizer *optimizer, amp_scaler *scaler, float value, int *moved,
                             amp_k_scaler *after) {
    float grads[CELLS], before = first_of(t->amp, &t->weight.weight);
    int i;
    for (i = 0; i < CELLS; i++) grads[i] = value;
    amp_param_accumulate(&t->weight);
    EX_TRY(amp_copy(t->amp, t->weight.grad.data, grads, (int64_t)sizeof grads, AMP_COPY_TO_DEVICE));
    EX_TRY(amp_step(optimizer, scaler));
    EX_TRY(amp_sync(t->amp));
    *moved = first_of(t->amp, &t->weight.weight) != before;
    return amp_scaler_get(scaler, after);
}

/* An overflow halves the scale and leaves the weights; two clean steps move them, and the scale is back. */
static amp_result try_scaler(identity *t, amp_optimizer *optimizer, amp_scaler *scaler, const char **why) {
    const float start = amp_scaler_scale(scaler), overflow = (float)HUGE_VAL;
    amp_k_scaler now;
    int moved;
    *why = NULL;
    EX_TRY(scaler_try(t, optimizer, scaler, overflow, &moved, &now));
    if (now.scale != 0.5f * start || now.skips != 1) *why = "an overflow did not halve the scale";
    else if (moved) *why = "a step with infinite gradients changed the weights";
    EX_TRY(scaler_try(t, optimizer, scaler, 1.0f, &moved, &now));
    if (*why == NULL && (!moved || now.scale != 0.5f * start)) *why = "a clean step did not change just the weights";
    EX_TRY(scaler_try(t, optimizer, scaler, 1.0f, &moved, &now));
    if (*why == NULL && now.scale != start) *why = "the scale did not grow after its interval of clean steps";
    return AMP_OK;
}

static void check_scaler(check *c) {
    identity t;
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    amp_optimizer *optimizer = NULL;
    amp_scaler *scaler = NULL;
    const char *why = NULL;
    amp_result result = identity_open(&t, c->amp, 1.0f);
    memset(&od, 0, sizeof od);
    memset(&sd, 0, sizeof sd);
    od.kind = AMP_SGD;
    od.params = &t.weight;
    od.n_params = 1;
    od.lr = 64;                     /* gradients of 1 at a scale of 65536 move a weight */
    sd.growth_interval = 2;
    if (result == AMP_OK) result = amp_optimizer_create(c->amp, &optimizer, &od);
    if (result == AMP_OK) result = amp_scaler_create(c->amp, &scaler, &sd);
    if (result == AMP_OK) result = try_scaler(&t, optimizer, scaler, &why);
    if (result != AMP_OK) add_error(c, "loss scaler");
    else if (why != NULL) add_line(c, FAIL, "loss scaler", "wrong", "%s", why);
    else
        add_line(c, PASS, "loss scaler", "exact",
                 "an overflow halves the scale and is skipped, clean steps let it grow");
    amp_optimizer_destroy(optimizer);
    amp_scaler_destroy(scaler);
    identity_close(&t);
}

/* ==== Training =================================================================================== */

/* Large enough that its kernels fill the device. */
static amp_result open_work(check *c) {
    int cpu = on_cpu(c->amp);
    workload_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.vocab = TOKENS_VOCAB;
    desc.layers = given_or(c->set.layers, cpu ? 2 : 8);
    desc.channels = given_or(c->set.channels, cpu ? 256 : 1024);
    desc.heads = desc.channels / 64;
    desc.seq = given_or(c->set.seq, cpu ? 128 : 512);
    desc.batch = given_or(c->set.batch, cpu ? 4 : 32);
    desc.activations = AMP_F32;
    desc.scaler = 1;
    return workload_open(&c->work, c->amp, &desc);
}

static int work_pass(void *user, amp_context *amp) {
    (void)amp;
    return (int)workload_pass((workload *)user, NULL, NULL, 1);
}

/* Compares a step of the GPT-2 in every precision with fp32. */
static void check_numerics(check *c) {
    amp_verify_desc desc;
    amp_range loss;
    int64_t i;
    memset(&desc, 0, sizeof desc);
    loss.name = "loss";
    loss.data = c->work.loss;
    loss.count = 1;
    loss.dtype = AMP_F32;
    desc.step = work_pass;
    desc.user = &c->work;
    desc.params = c->work.params;
    desc.n_params = c->work.n_params;
    desc.outputs = &loss;
    desc.n_outputs = 1;
    desc.optimizer = c->work.optimizer;
    desc.scaler = c->work.scaler;
    if (amp_verify(c->amp, &desc, &c->verified) != AMP_OK) { add_error(c, "numerics"); return; }
    for (i = 0; i < c->verified.n_rows; i++) {
        const amp_verify_row *row = &c->verified.rows[i];
        char name[24], value[48];
        snprintf(name, sizeof name, "numerics %s", amp_dtype_name(row->dtype));
        snprintf(value, sizeof value, "error %.1e", row->gradient_error);
        if (row->verdict == AMP_VERDICT_PASS)
            add_line(c, PASS, name, value, "worst gradient compared with fp32; up to %.1e is this precision's rounding",
                     row->gradient_bound);
        else add_line(c, FAIL, name, value, "%s", row->advice);
    }
}

/* The device's telemetry while training: sums and counts of the samples. */
typedef struct sampling { double sum[3]; int64_t n[3]; } sampling;

static void sample_device(const check *c, sampling *s) {
    amp_status status;
    float values[3];
    int i;
    if (amp_status_get(c->amp, c->work.scaler, 0, &status) != AMP_OK) return;
    values[0] = status.telemetry.utilization;
    values[1] = status.telemetry.temperature;
    values[2] = status.telemetry.power;
    for (i = 0; i < 3; i++) if (values[i] >= 0) { s->sum[i] += (double)values[i]; s->n[i]++; }
}

/* steps and seconds exclude the first step, which allocates and waits for the first batch. */
typedef struct trained { int64_t steps; float first_loss, last_loss; double seconds, waited; } trained;

static amp_result train_step(check *c, amp_loader *loader) {
    amp_batch batch;
    EX_TRY(amp_loader_next(loader, &batch));
    return workload_step(&c->work, batch.inputs, batch.targets);
}

/* The loss on the workload's own batch, which stays the same. */
static amp_result own_loss(check *c, float *out) {
    EX_TRY(workload_pass(&c->work, NULL, NULL, 0));
    return workload_loss(&c->work, out);
}

enum { LEAST_STEPS = 10 };

/* Trains for some seconds through the loader; samples the device four times a second. */
static amp_result train(check *c, amp_loader *loader, trained *t) {
    double seconds = c->set.seconds > 0 ? c->set.seconds : c->set.quick ? 1 : 4, began, now, asked;
    amp_loader_info before, after;
    sampling device;
    EX_TRY(own_loss(c, &t->first_loss));
    EX_TRY(train_step(c, loader));
    EX_TRY(amp_sync(c->amp));
    EX_TRY(amp_loader_info_get(loader, &before));
    memset(&device, 0, sizeof device);
    sample_device(c, &device);          /* a device reports on the time since the last sample */
    memset(&device, 0, sizeof device);
    began = asked = ex_seconds();
    do {
        EX_TRY(train_step(c, loader));
        if (++t->steps % 4 == 0) EX_TRY(amp_sync(c->amp));
        now = ex_seconds();
        if (now - asked > 0.25 || now - began >= seconds) { sample_device(c, &device); asked = now; }
    } while (now - began < seconds || t->steps < LEAST_STEPS);
    EX_TRY(amp_sync(c->amp));
    t->seconds = ex_seconds() - began;
    EX_TRY(amp_loader_info_get(loader, &after));
    EX_TRY(own_loss(c, &t->last_loss));
    t->waited = after.wait_seconds - before.wait_seconds;
    c->utilisation = device.n[0] > 0 ? device.sum[0] / (double)device.n[0] : -1;
    c->temperature = device.n[1] > 0 ? device.sum[1] / (double)device.n[1] : -1;
    c->power = device.n[2] > 0 ? device.sum[2] / (double)device.n[2] : -1;
    return AMP_OK;
}

static void check_utilisation(check *c) {
    char value[48], more[80] = "";
    if (c->utilisation < 0) {
        add_line(c, NOT_HERE, "utilisation", "unknown", "this device does not report its utilisation");
        return;
    }
    snprintf(value, sizeof value, "%.0f%%", 100 * c->utilisation);
    if (c->temperature >= 0 && c->power >= 0) snprintf(more, sizeof more, "; %.0f C, %.0f W", c->temperature, c->power);
    if (c->utilisation >= c->set.min_utilisation)
        add_line(c, PASS, "utilisation", value, "of the device, while training%s", more);
    else
        add_line(c, FAIL, "utilisation", value, "of the device while training, below %.0f%%: %s%s",
                 100 * c->set.min_utilisation,
                 c->wait_share > 0.05 ? "training waits for data"
                 : on_cpu(c->amp)     ? "other programs are running, or there are too many threads"
                                      : "steps are too small, or other programs are running",
                 more);
}

static void report_training(check *c, const trained *t) {
    char value[48], rate[32];
    double tokens = (double)(t->steps * c->work.desc.batch * c->work.desc.seq);
    c->train_rate = tokens / t->seconds;
    c->wait_share = t->waited / t->seconds;
    snprintf(value, sizeof value, "%s tokens/s", progress_grouped((int64_t)c->loader_rate, rate, sizeof rate));
    add_line(c, c->wait_share <= 0.05 ? PASS : FAIL, "loader", value,
             "training took %s of them, and waited %.1f%% of its time for data",
             progress_grouped((int64_t)c->train_rate, rate, sizeof rate), 100 * c->wait_share);
    snprintf(value, sizeof value, "loss %.2f to %.2f", (double)t->first_loss, (double)t->last_loss);
    add_line(c, t->last_loss < t->first_loss ? PASS : FAIL, "training", value, "%lld steps of a small GPT-2 in %s",
             (long long)t->steps + 1, amp_dtype_name(c->choice.dtype));
    check_utilisation(c);
}

static void check_training(check *c) {
    amp_loader *loader = NULL;
    trained t;
    amp_result result = tokens_file_make(c->set.quick ? 1 << 20 : 1 << 22, TOKENS_VOCAB);
    memset(&t, 0, sizeof t);
    if (result == AMP_OK) result = measure_loader(c);
    if (result != AMP_OK) { add_error(c, "loader"); tokens_file_remove(); return; }
    result = open_work(c);
    if (result == AMP_OK) check_numerics(c);
    if (result == AMP_OK) result = tokens_loader(c, c->work.desc.batch, c->work.desc.seq, &loader);
    if (result == AMP_OK) result = train(c, loader, &t);
    if (result == AMP_OK) report_training(c, &t);
    else add_error(c, "training");
    amp_loader_destroy(loader);
    tokens_file_remove();
}

/* ==== Recommendations ============================================================================ */

/* What was measured is worth a setting only where it would change the choice, and was not disturbed. */
static void recommend_rates(check *c) {
    amp_context *measured;
    amp_desc desc;
    amp_choice choice;
    memset(&desc, 0, sizeof desc);
    desc.rates = c->rates;
    if (c->rates[0] == 0) return;
    if (amp_open(&measured, &desc) != AMP_OK) { add_error(c, "rates"); return; }
    if (amp_query_choice(measured, &choice) == AMP_OK && choice.dtype != c->choice.dtype)
        advise(c,
               c->disturbed > 0 ? "rates: as measured they would choose %s, but other programs used the cores: run "
                                  "this again before you set them"
                                : "rates: as measured they choose %s: set the line above (amp_desc.rates, a file of "
                                  "settings, or AMP_RATES)",
               amp_dtype_name(choice.dtype));
    amp_close(measured);
}

static void recommend(check *c) {
    amp_advise_desc desc;
    amp_advice advice;
    int cpu = on_cpu(c->amp), i;
    memset(&desc, 0, sizeof desc);
    desc.batch = c->work.desc.batch;
    desc.optimizer = c->work.optimizer;
    desc.scaler = c->work.scaler;
    if (c->verified.n_rows > 0) desc.verified = &c->verified;
    if (c->work.optimizer != NULL && amp_advise(c->amp, &desc, &advice) == AMP_OK) {
        const char *const reasons[] = {advice.dtype_reason, advice.level_reason, advice.tf32_reason,
                                       advice.scaler_reason};
        static const char *const names[] = {"dtype", "level", "tf32", "scaler"};
        for (i = 0; i < 4; i++) if (reasons[i][0] != 0) advise(c, "%s: %s", names[i], reasons[i]);
    }
    recommend_rates(c);
    for (i = 2; i < PRECISIONS && (!c->precisions[i].supported || c->precisions[i].emulated); i++) { }
    if (i == PRECISIONS)
        advise(c, "16 bits: products in fp32 are the fastest on this CPU, so mixed precision saves memory, not time");
    if (c->wait_share > 0.05)
        advise(c, "workers: training waits for data: raise amp_loader_desc.workers, then .prefetch; or other programs "
                  "use the cores");
    if (!cpu && c->pinned > 1.05 * c->ordinary)
        advise(c, "pinning: leave it on: %.1f times the rate from ordinary memory", c->pinned / c->ordinary);
    if (c->utilisation >= 0 && c->utilisation < c->set.min_utilisation)
        advise(c, "utilisation: end other programs, or train with larger batches");
    if (!cpu) advise(c, "autotune: amp_desc.autotune, with a file, finds the fastest products once and keeps them");
    if (cpu && c->set.threads > 0 && c->set.threads < c->machine.cpu.cores)
        advise(c, "threads: this process may use %d cores, and --threads gave it %lld", (int)c->machine.cpu.cores,
               (long long)c->set.threads);
}

/* ==== Text and JSON ============================================================================== */

/* On a terminal, shows what takes the time. */
static void busy_with(const char *what) {
    if (!isatty(STDERR_FILENO)) return;
    if (what != NULL) fprintf(stderr, "\r\033[Kmeasuring %s ...", what);
    else fprintf(stderr, "\r\033[K");
}

static void number_or_dash(char *text, size_t size, double value, const char *format_unit) {
    if (value > 0) snprintf(text, size, "%.1f%s", value, format_unit);
    else snprintf(text, size, "-");
}

static void print_precisions(const check *c) {
    int i;
    printf("\nPrecisions: products of %lld x %lld matrices, and fp32 values copied into each\n", (long long)c->size,
           (long long)c->size);
    printf("  %-10s %-9s %10s %8s %8s %8s  %s\n", "", "support", "GFLOP/s", "x fp32", "of peak", "GB/s", "why");
    for (i = 0; i < PRECISIONS; i++) {
        const precision_row *row = &c->precisions[i];
        char gemm[32], times[32], peak[32], cast[32];
        number_or_dash(gemm, sizeof gemm, row->gemm, "");
        number_or_dash(times, sizeof times, c->precisions[0].gemm > 0 ? row->gemm / c->precisions[0].gemm : 0, "");
        number_or_dash(peak, sizeof peak, row->peak > 0 ? 100 * row->gemm / row->peak : 0, "%");
        number_or_dash(cast, sizeof cast, row->cast, "");
        printf("  %-10s %-9s %10s %8s %8s %8s  %s\n", amp_dtype_name(precisions[i]),
               !row->supported ? "no"
               : row->emulated ? "emulated"
                               : "native",
               gemm, times, peak, cast, row->reason);
    }
    if (c->rates[0] != 0) printf("  measured, as a line of settings:\n  rates = %s\n", c->rates);
    if (c->disturbed > 0)
        printf("  other programs took %.0f%% of the cores' time meanwhile: the figures are not this machine's best\n",
               100 * c->disturbed);
}

static void print_text(const check *c) {
    int i;
    print_precisions(c);
    printf("\nChecklist\n");
    for (i = 0; i < c->n_lines; i++)
        printf("  %-9s %-16s %-24s %s\n", verdict_names[c->lines[i].verdict], c->lines[i].name, c->lines[i].value,
               c->lines[i].meaning);
    printf("\nRecommended\n");
    for (i = 0; i < c->n_advice; i++) printf("  %s\n", c->advice[i]);
    printf("\n%s\n", failures(c) == 0 ? "Nothing failed." : "Some lines say FAIL.");
}

/* A rate, or null where it was not measured. */
static void json_rate(const char *key, double value) { metrics_number(stdout, key, value > 0 ? value : HUGE_VAL); }

static void print_json_rows(const check *c) {
    int i;
    printf(", \"precisions\": [");
    for (i = 0; i < PRECISIONS; i++) {
        const precision_row *row = &c->precisions[i];
        printf("%s{\"name\": \"%s\"", i > 0 ? ", " : "", amp_dtype_name(precisions[i]));
        metrics_text(stdout, "here", !row->supported ? "no" : row->emulated ? "emulated" : "native");
        json_rate("gemm_gflops", row->gemm);
        json_rate("peak_gflops", row->peak);
        json_rate("cast_gb_per_s", row->cast);
        metrics_text(stdout, "reason", row->reason);
        printf("}");
    }
    printf("], \"checks\": [");
    for (i = 0; i < c->n_lines; i++) {
        printf("%s{\"verdict\": \"%s\"", i > 0 ? ", " : "", verdict_names[c->lines[i].verdict]);
        metrics_text(stdout, "name", c->lines[i].name);
        metrics_text(stdout, "value", c->lines[i].value);
        metrics_text(stdout, "meaning", c->lines[i].meaning);
        printf("}");
    }
    printf("]");
    metrics_text(stdout, "rates", c->rates);
    metrics_number(stdout, "disturbed", c->disturbed >= 0 ? c->disturbed : HUGE_VAL);
    printf(", \"recommendations\": [");
    for (i = 0; i < c->n_advice; i++) {
        if (i > 0) printf(", ");
        metrics_string(stdout, c->advice[i]);
    }
    printf("]");
}

static void print_json(const check *c) {
    static char status_text[16384];
    amp_status status;
    metrics_begin(stdout, "check");
    metrics_text(stdout, "version", AMP_VERSION_TEXT);
    metrics_text(stdout, "compiler", __VERSION__);
    metrics_integer(stdout, "product_size", c->size);
    json_rate("pinned_gb_per_s", c->pinned);
    json_rate("ordinary_gb_per_s", c->ordinary);
    json_rate("loader_tokens_per_s", c->loader_rate);
    json_rate("training_tokens_per_s", c->train_rate);
    metrics_number(stdout, "wait_share", c->wait_share);
    metrics_number(stdout, "utilisation", c->utilisation >= 0 ? c->utilisation : HUGE_VAL);
    metrics_integer(stdout, "failed", failures(c));
    if (amp_status_get(c->amp, c->work.scaler, 0, &status) == AMP_OK &&
        amp_status_json(&status, status_text, sizeof status_text) < sizeof status_text)
        printf(", \"status\": %s", status_text);
    print_json_rows(c);
    metrics_end(stdout);
}

/* ==== main ======================================================================================= */

/* Opens the context and what is measured on it. */
static amp_result open_check(check *c) {
    amp_desc desc;
    char why[400];
    amp_result result;
    memset(&desc, 0, sizeof desc);
    desc.threads = (int32_t)c->set.threads;
    if (c->set.channels % 64 != 0) return flag_refuse("channels", "must be a multiple of 64");
    result = ex_device_open(&c->amp, &desc, c->set.device);
    if (result == AMP_ERR_NAME || result == AMP_ERR_DEVICE) return flag_refuse("device", "%s", ex_because(why));
    EX_TRY(result);
    EX_TRY(amp_query(c->amp, &desc));
    EX_TRY(amp_query_machine(c->amp, &c->machine));
    EX_TRY(amp_query_choice(c->amp, &c->choice));
    c->size = c->set.size;
    if (c->size == 0) c->size = !on_cpu(c->amp) ? 8192 : desc.cpu_path == AMP_CPU_SCALAR ? 512 : 1024;
    if (c->set.size == 0 && c->set.quick) c->size /= 2;
    c->utilisation = c->temperature = c->power = -1;
    return AMP_OK;
}

static void print_machine(const check *c) {
    char text[4096];
    amp_machine_text(&c->machine, text, sizeof text);
    printf("%s", text);
    printf("  regions compute in %s: %s\n", amp_dtype_name(c->choice.dtype), c->choice.reason);
}

int main(int argc, char **argv) {
    check c;
    int failed;
    ex_begin();
    memset(&c, 0, sizeof c);
    if (flag_read(argc, argv) != AMP_OK || flag_parse_all(&c.set) != AMP_OK ||
        (!c.set.help && open_check(&c) != AMP_OK)) {
        fprintf(stderr, "amp_check: %s\n", ex_error());
        return 2;
    }
    if (c.set.help) return flag_print_help(), 0;
    ex_text[0] = 0;
    if (!c.set.json) print_machine(&c);
    find_precisions(&c);
    busy_with("products and copies");
    measure_rates(&c);
    check_choice(&c);
    check_autocast(&c, AMP_F16);
    check_autocast(&c, AMP_BF16);
    check_scaler(&c);
    busy_with("copies to the device");
    check_pinned(&c);
    busy_with("a training");
    check_training(&c);
    recommend(&c);
    busy_with(NULL);
    if (c.set.json) print_json(&c);
    else print_text(&c);
    failed = failures(&c);
    workload_close(&c.work);
    amp_close(c.amp);
    return failed > 0;
}
