/* amp_bench.c - what mixed precision gains here, and what each of amp.h's features costs and saves.
 *
 *     gcc -O2 examples/amp_bench.c -o amp_bench -lm -lpthread
 *     ./amp_bench --precision         an encoder and a decoder in every precision: time, and memory by what it is for
 *     ./amp_bench --features          each feature on and off, in turn, in one run
 *     ./amp_bench --training FILE     a decoder learns this text in fp32, fp16 and bf16: speed, memory, losses
 *
 * On a GPU the encoder has the shape of BERT-base and the decoder that of GPT-2; on a CPU both are 4 layers of 256
 * channels with 8192 tokens, so that a run takes a minute; flags set any other size.  A feature that costs more than it
 * gains is called a loss.  Results also go into a JSON file: see --json. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "flags.h"
#include "metrics.h"
#include "progress.h"
#include "measure.h"

/* ==== Flags ====================================================================================== */

typedef struct settings {
    const char *device, *model, *dtype, *feature, *training, *out;
    int64_t precision, features, iterations, warmup, threads, help;
    int64_t layers, channels, heads, vocab, batch, seq;
} settings;

#define FIELD(name) offsetof(settings, name)

static const flag_row options[] = {
    {"What", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"precision", FLAG_SWITCH, FIELD(precision), "off", 0, 0, NULL,
     "Prints the table of precisions. This is the default."},
    {"features", FLAG_SWITCH, FIELD(features), "off", 0, 0, NULL, "Prints the table of features."},
    {"training", FLAG_TEXT, FIELD(training), "", 0, 0, NULL,
     "Trains the first steps of a decoder that learns this text, whose bytes are the tokens, in fp32, fp16 and "
     "bf16. If empty, it trains none."},
    {"model", FLAG_CHOICE, FIELD(model), "both", 0, 0, "both encoder decoder",
     "The models in the table of precisions."},
    {"feature", FLAG_CHOICE, FIELD(feature), "all", 0, 0,
     "all mask-cache cast-cache pinning workers prefetch memory-interval fused-step recompute fused-loss",
     "The one feature to measure, or all."},
    {"dtype", FLAG_CHOICE, FIELD(dtype), "auto", 0, 0, "auto fp32 tf32 fp16 bf16 fp8",
     "The precision in which features are measured."},

    {"Size", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"layers", FLAG_INTEGER, FIELD(layers), "auto", 1, 1000, "auto=0",
     "The number of blocks. With auto, it is 12 on a GPU and 4 on a CPU."},
    {"channels", FLAG_INTEGER, FIELD(channels), "auto", 1, 65536, "auto=0",
     "The width. With auto, it is 768 on a GPU and 256 on a CPU."},
    {"heads", FLAG_INTEGER, FIELD(heads), "auto", 1, 4096, "auto=0",
     "The number of attention heads, which must divide the channels. With auto, each head has 64 channels."},
    {"vocab", FLAG_INTEGER, FIELD(vocab), "auto", 2, 65536, "auto=0",
     "The number of tokens in the vocabulary. With auto, it is BERT's 30522 and GPT-2's 50257 on a GPU, and 8192 on "
     "a CPU."},
    {"batch", FLAG_INTEGER, FIELD(batch), "auto", 1, 1 << 20, "auto=0",
     "The number of sequences in a batch. With auto, it is 16 (encoder) and 8 (decoder) on a GPU, and 4 on a CPU."},
    {"seq", FLAG_INTEGER, FIELD(seq), "auto", 1, 1 << 20, "auto=0",
     "The number of tokens in a sequence. With auto, it is 512 (encoder) and 1024 (decoder) on a GPU, and 128 on a "
     "CPU."},

    {"Measuring", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"iterations", FLAG_INTEGER, FIELD(iterations), "50", 1, 1000, NULL, "The number of steps that are timed."},
    {"warmup", FLAG_INTEGER, FIELD(warmup), "3", 1, 1000, NULL, "The number of steps before the timed ones."},
    {"device", FLAG_TEXT, FIELD(device), "auto", 0, 0, NULL, flag_device_help},
    {"threads", FLAG_INTEGER, FIELD(threads), "all", 1, 1024, "all=0", "The number of CPU threads."},
    {"json", FLAG_TEXT, FIELD(out), "", 0, 0, NULL,
     "The file for the results as JSON. If empty, it is out/bench_precision.json, out/bench_features.json or "
     "out/bench_training.json. With none, no file is written."},
    {"help", FLAG_SWITCH, FIELD(help), "off", 0, 0, NULL, "Prints this text."},
};
static flag_program flag_given = {
    .program = "amp_bench",
    .summary = "measures what mixed precision and the features of amp.h gain here, and what they cost",
    .parts = {{options, FLAG_ROWS(options), 0}},
    .ending = "Exit codes: 0 done, 1 failed, 2 refused."
};

/* ==== The run ==================================================================================== */

typedef struct bench {
    settings set;
    amp_context *amp;               /* of the timings; memory is measured in contexts of its own */
    amp_machine machine;
    amp_desc desc;
    FILE *json;
    int64_t rows;                   /* in it */
    char json_path[PATH_MAX], part_path[PATH_MAX + 8];
} bench;

static amp_result open_context(const bench *b, amp_desc *desc, amp_context **out) {
    desc->threads = (int32_t)b->set.threads;
    return ex_device_open(out, desc, b->set.device);
}

/* A model of the given sizes, or of this device's. */
static workload_desc size_of(const bench *b, int encodes) {
    const settings *set = &b->set;
    int cpu = on_cpu(b->amp);
    workload_desc d;
    memset(&d, 0, sizeof d);
    d.encoder = encodes;
    d.layers = set->layers > 0 ? set->layers : cpu ? 4 : 12;
    d.channels = set->channels > 0 ? set->channels : cpu ? 256 : 768;
    d.heads = set->heads > 0 ? set->heads : d.channels >= 64 ? d.channels / 64 : 1;
    d.vocab = set->vocab > 0 ? set->vocab : cpu ? 8192 : encodes ? 30522 : 50257;
    d.batch = set->batch > 0 ? set->batch : cpu ? 4 : encodes ? 16 : 8;
    d.seq = set->seq > 0 ? set->seq : cpu ? 128 : encodes ? 512 : 1024;
    d.activations = AMP_F32;
    d.scaler = 1;
    return d;
}

static const char *named_shape(const workload_desc *d) {
    int base = d->layers == 12 && d->channels == 768 && d->heads == 12;
    if (base && d->encoder && d->vocab == 30522) return "BERT-base";
    if (base && !d->encoder && d->vocab == 50257) return "GPT-2";
    return d->encoder ? "encoder (BERT's kind)" : "decoder (GPT-2's kind)";
}

/* Where and how it was measured. */
static void json_head(bench *b, const char *event, int argc, char **argv) {
    char command[1024], date[32];
    size_t used = 0;
    time_t now = time(NULL);
    int i;
    command[0] = 0;
    for (i = 1; i < argc && used < sizeof command; i++)
        used += (size_t)snprintf(command + used, sizeof command - used, " %s", argv[i]);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    metrics_begin(b->json, event);
    metrics_text(b->json, "date", date);
    metrics_text(b->json, "version", AMP_VERSION_TEXT);
    metrics_text(b->json, "flags", command[0] != 0 ? command + 1 : "");
    metrics_text(b->json, "cpu", b->machine.cpu.name);
    metrics_text(b->json, "backend", b->desc.backend->name);
    metrics_text(b->json, "device", b->machine.device.name);
    metrics_integer(b->json, "threads", b->desc.threads);
    metrics_integer(b->json, "cpu_path", b->desc.cpu_path);
    metrics_text(b->json, "compiler", __VERSION__);
    metrics_integer(b->json, "iterations", b->set.iterations);
    if (b->json != NULL) fprintf(b->json, ", \"rows\": [\n");
}

/* Begins a row; the rows before it end with a comma. */
static void json_row(bench *b, const char *event) {
    if (b->json != NULL && b->rows++ > 0) fprintf(b->json, ",");
    metrics_begin(b->json, event);
}

static void json_size(bench *b, const workload_desc *d) {
    metrics_text(b->json, "model", d->encoder ? "encoder" : "decoder");
    metrics_integer(b->json, "layers", d->layers);
    metrics_integer(b->json, "channels", d->channels);
    metrics_integer(b->json, "heads", d->heads);
    metrics_integer(b->json, "vocab", d->vocab);
    metrics_integer(b->json, "batch", d->batch);
    metrics_integer(b->json, "seq", d->seq);
}

/* ==== Precisions ================================================================================= */

enum { WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, CAST_CACHE, WORKSPACE, PARTS };
static const char *const part_names[PARTS] = {
    "weights", "gradients", "optimizer", "activations", "cast cache", "workspace"};

typedef struct precision_row {
    int supported, emulated;
    double seconds;                 /* 0: not measured */
    amp_verdict verdict;
    int64_t parts[PARTS], total;
    char reason[200];
} precision_row;

/* A model's memory: the known parts, and as workspace the rest of the peak: kernels' scratch, the batch, and the
   library's own. */
static amp_result read_memory(const workload *w, int64_t cast_cache, precision_row *row) {
    amp_memory_info memory;
    int i;
    memset(&memory, 0, sizeof memory);
    EX_TRY(amp_memory(w->amp, &memory));
    row->parts[WEIGHTS] = w->desc.encoder ? w->bert.own.weights_bytes : w->gpt.own.weights_bytes;
    row->parts[GRADIENTS] = w->desc.encoder ? w->bert.own.grads_bytes : w->gpt.own.grads_bytes;
    row->parts[OPTIMIZER] = memory.optimizer;
    row->parts[ACTIVATIONS] = w->desc.encoder ? w->bert.memory_bytes : w->gpt.memory_bytes;
    row->parts[CAST_CACHE] = cast_cache;
    row->total = row->parts[WORKSPACE] = memory.peak;
    for (i = 0; i < WORKSPACE; i++) row->parts[WORKSPACE] -= row->parts[i];
    return AMP_OK;
}

/* Two steps in a context of their own.  The cast cache is largest before the optimizer changes the weights. */
static amp_result run_memory(workload *w, precision_row *row) {
    amp_memory_info memory;
    int64_t cast_cache = 0;
    int i;
    memset(&memory, 0, sizeof memory);
    amp_memory_reset_peak(w->amp);
    for (i = 0; i < 2; i++) {
        EX_TRY(workload_pass(w, NULL, NULL, !w->desc.inference));
        EX_TRY(amp_memory(w->amp, &memory));
        if (memory.cast_cache > cast_cache) cast_cache = memory.cast_cache;
        if (!w->desc.inference) EX_TRY(amp_step(w->optimizer, w->scaler));
    }
    return read_memory(w, cast_cache, row);
}

static amp_result measure_memory(const bench *b, const workload_desc *size, amp_dtype dtype, precision_row *row) {
    workload_desc d = *size;
    amp_desc desc;
    amp_context *amp = NULL;
    workload w;
    amp_result result;
    memset(&desc, 0, sizeof desc);
    memset(&w, 0, sizeof w);
    desc.dtype = dtype;
    d.activations = storage_of(dtype);
    d.scaler = dtype == AMP_F16 && !d.inference;
    EX_TRY(open_context(b, &desc, &amp));
    result = workload_open(&w, amp, &d);
    if (result == AMP_OK) result = run_memory(&w, row);
    workload_close(&w);
    amp_close(amp);
    return result;
}

static int forward_step(void *user, amp_context *amp) {
    (void)amp;
    return (int)workload_pass((workload *)user, NULL, NULL, 0);
}
static int backward_step(void *user, amp_context *amp) {
    (void)amp;
    return (int)workload_pass((workload *)user, NULL, NULL, 1);
}
static int full_step(void *user, amp_context *amp) {
    (void)amp;
    return (int)workload_step((workload *)user, NULL, NULL);
}

/* Times all precisions in turn, and compares their gradients with fp32's. */
static amp_result time_rows(const bench *b, workload *w, precision_row rows[PRECISIONS]) {
    amp_dtype dtypes[PRECISIONS];
    amp_tune_desc desc;
    amp_verify_desc verify;
    amp_tune_report report;
    amp_range loss;
    int64_t i;
    memset(&desc, 0, sizeof desc);
    memset(&verify, 0, sizeof verify);
    loss.name = "loss"; loss.data = w->loss; loss.count = 1; loss.dtype = AMP_F32;
    verify.step = backward_step;
    verify.user = w;
    verify.params = w->params; verify.n_params = w->n_params;
    verify.outputs = &loss; verify.n_outputs = 1;
    verify.optimizer = w->optimizer; verify.scaler = w->scaler;
    desc.step = w->desc.inference ? forward_step : full_step;
    desc.user = w;
    desc.batch = w->desc.batch;
    desc.dtypes = dtypes;
    for (i = 0; i < PRECISIONS; i++) if (rows[i].supported) dtypes[desc.n_dtypes++] = precisions[i];
    desc.iterations = (int32_t)b->set.iterations;
    desc.warmup = (int32_t)b->set.warmup;
    if (!w->desc.inference) desc.verify = &verify;
    EX_TRY(amp_tune(b->amp, &desc, &report));
    for (i = 0; i < report.n_rows; i++) {
        precision_row *row = &rows[precision_place(report.rows[i].dtype)];
        row->seconds = report.rows[i].seconds;
        row->verdict = report.rows[i].verdict;
        if (row->verdict != AMP_VERDICT_PASS) snprintf(row->reason, sizeof row->reason, "%s", report.rows[i].reason);
    }
    return AMP_OK;
}

/* "gain", "loss" or "even" for a ratio; above 1 is a gain. */
static const char *gain_text(double ratio) { return ratio >= 1.005 ? "gain" : ratio <= 0.995 ? "loss" : "even"; }

static void print_row(bench *b, const workload_desc *size, amp_dtype dtype, const precision_row *row,
                      const precision_row *full) {
    static const char *const verdicts[] = {"", "pass", "inaccurate", "not finite", "failed"};
    double speedup = full->seconds > 0 && row->seconds > 0 ? full->seconds / row->seconds : 0;
    double reduction = full->total > 0 ? 1 - (double)row->total / (double)full->total : 0;
    char name[32];
    int i;
    snprintf(name, sizeof name, "%s%s", amp_dtype_name(dtype), row->emulated ? " emulated" : "");
    printf("  %-14s %10.2f %8.2f %-5s %10.1f %9.1f%% %-5s", name, 1e3 * row->seconds, speedup,
           row == full || speedup <= 0 ? "" : gain_text(speedup), (double)row->total / 1048576, 100 * reduction,
           row == full ? "" : gain_text(1 / (1 - reduction)));
    for (i = 0; i < PARTS; i++) printf(" %11.1f", (double)row->parts[i] / 1048576);
    printf("%s%s\n", row->reason[0] != 0 ? "  " : "", row->reason);
    json_row(b, "precision");
    json_size(b, size);
    metrics_text(b->json, "pass", size->inference ? "forward" : "step");
    metrics_text(b->json, "precision", amp_dtype_name(dtype));
    metrics_integer(b->json, "emulated", row->emulated);
    metrics_number(b->json, "ms", 1e3 * row->seconds);
    metrics_number(b->json, "speedup", speedup);
    metrics_integer(b->json, "bytes", row->total);
    metrics_number(b->json, "reduction", reduction);
    for (i = 0; i < PARTS; i++) metrics_integer(b->json, part_names[i], row->parts[i]);
    if (!size->inference) metrics_text(b->json, "verified", verdicts[row->verdict]);
    if (row->reason[0] != 0) metrics_text(b->json, "reason", row->reason);
    metrics_end(b->json);
}

static void print_table(bench *b, const workload_desc *d, precision_row rows[PRECISIONS]) {
    int i;
    printf("\n%s, %s: %lld layers, %lld channels, vocabulary %lld, batch %lld x %lld, median of %lld\n", named_shape(d),
           d->inference ? "forward only" : "full step", (long long)d->layers, (long long)d->channels,
           (long long)d->vocab, (long long)d->batch, (long long)d->seq, (long long)b->set.iterations);
    printf("  %-14s %10s %8s %-5s %10s %10s %-5s", "", "ms", "speedup", "", "MiB", "reduction", "");
    for (i = 0; i < PARTS; i++) printf(" %11s", part_names[i]);
    printf("\n");
    for (i = 0; i < PRECISIONS; i++) {
        if (rows[i].supported) print_row(b, d, precisions[i], &rows[i], &rows[0]);
        else printf("  %-14s n/a: %s\n", amp_dtype_name(precisions[i]), rows[i].reason);
    }
    fflush(stdout);
}

static void find_precisions(const bench *b, precision_row rows[PRECISIONS]) {
    int i;
    memset(rows, 0, PRECISIONS * sizeof *rows);
    for (i = 0; i < PRECISIONS; i++) {
        amp_choice choice;
        memset(&choice, 0, sizeof choice);
        rows[i].supported = amp_choose(&b->machine, precisions[i], 0, &choice) == AMP_OK;
        rows[i].emulated = choice.emulated;
        if (!rows[i].supported) snprintf(rows[i].reason, sizeof rows[i].reason, "%.199s", amp_last_error());
    }
}

static amp_result bench_pass(bench *b, int encodes, int inference) {
    workload_desc size = size_of(b, encodes);
    precision_row rows[PRECISIONS];
    workload w;
    amp_result result;
    int i;
    size.inference = inference;
    find_precisions(b, rows);
    result = workload_open(&w, b->amp, &size);
    if (result == AMP_OK) result = time_rows(b, &w, rows);
    workload_close(&w);
    for (i = 0; i < PRECISIONS && result == AMP_OK; i++)
        if (rows[i].supported) result = measure_memory(b, &size, precisions[i], &rows[i]);
    if (result == AMP_OK) print_table(b, &size, rows);
    return result;
}

static amp_result bench_precision(bench *b) {
    int encodes, inference;
    for (encodes = 1; encodes >= 0; encodes--) {
        if (strcmp(b->set.model, encodes ? "decoder" : "encoder") == 0) continue;
        for (inference = 1; inference >= 0; inference--) EX_TRY(bench_pass(b, encodes, inference));
    }
    printf("\n  speedup and reduction: relative to fp32; workspace: kernels' scratch, the batch and the library's own "
           "memory\n");
    return AMP_OK;
}

/* ==== The first steps of training in each precision ============================================== */

typedef struct training_row {
    double rate, peak, training, validation;
    int64_t skips;
    int32_t emulated, scaler;
} training_row;

/* A loader of the text's first nine tenths, or of the last, in order. */
static amp_result open_text(const bench *b, workload *w, int held, amp_loader **out) {
    amp_loader_desc desc;
    amp_loader_info info;
    memset(&desc, 0, sizeof desc);
    desc.path = b->set.training;
    desc.format = AMP_TOKENS_BYTES;
    desc.batch = w->desc.batch;
    desc.seq = w->desc.seq;
    desc.seed = 1;
    if (amp_loader_create(w->amp, out, &desc) != AMP_OK) return flag_refuse("training", "%s", amp_last_error());
    EX_TRY(amp_loader_info_get(*out, &info));
    amp_loader_destroy(*out);
    *out = NULL;
    desc.first = held ? info.tokens / 10 * 9 : 0;
    desc.last = held ? info.tokens : info.tokens / 10 * 9;
    desc.shuffle = !held;
    desc.epochs = held;
    if (amp_loader_create(w->amp, out, &desc) != AMP_OK) return flag_refuse("training", "%s", amp_last_error());
    return AMP_OK;
}

/* --iterations steps; row->training: the mean loss of the last ten. */
static amp_result train_text(const bench *b, workload *w, amp_loader *text, training_row *row) {
    int64_t step, steps = b->set.iterations, counted = steps < 10 ? steps : 10;
    double began = ex_seconds();
    amp_step_result record;
    amp_batch batch;
    float loss;
    for (step = 0; step < steps; step++) {
        EX_TRY(amp_loader_next(text, &batch));
        EX_TRY(workload_step(w, batch.inputs, batch.targets));
        if (step + counted < steps) continue;
        EX_TRY(workload_loss(w, &loss));
        row->training += (double)loss / (double)counted;
    }
    EX_TRY(amp_sync(w->amp));
    row->rate = (double)(steps * w->desc.batch * w->desc.seq) / (ex_seconds() - began);
    EX_TRY(amp_step_result_flush(w->optimizer));
    while (amp_step_result_next(w->optimizer, &record)) row->skips = record.total_skips;
    return AMP_OK;
}

/* The mean loss of at most 64 batches that were not trained on. */
static amp_result validate_text(workload *w, amp_loader *text, double *loss) {
    amp_result result = AMP_OK;
    amp_batch batch;
    float one;
    int n = 0;
    for (*loss = 0; n < 64 && result == AMP_OK; n++) {
        result = amp_loader_next(text, &batch);
        if (result == AMP_OK) result = workload_pass(w, batch.inputs, batch.targets, 0);
        if (result == AMP_OK) result = workload_loss(w, &one);
        if (result != AMP_OK) break;
        *loss += (double)one;
    }
    *loss /= n > 0 ? n : 1;
    return result == AMP_ERR_END ? AMP_OK : result;
}

static amp_result training_run(const bench *b, amp_dtype dtype, training_row *row) {
    workload_desc d = size_of(b, 0);
    amp_loader *text = NULL, *held = NULL;
    amp_context *amp = NULL;
    amp_memory_info memory;
    amp_desc desc;
    workload w;
    amp_result result;
    memset(&desc, 0, sizeof desc);
    memset(&w, 0, sizeof w);
    memset(row, 0, sizeof *row);
    desc.dtype = dtype;
    d.vocab = 256;
    d.activations = storage_of(dtype);
    d.scaler = row->scaler = dtype == AMP_F16;
    EX_TRY(open_context(b, &desc, &amp));
    result = workload_open(&w, amp, &d);
    if (result == AMP_OK) result = open_text(b, &w, 0, &text);
    if (result == AMP_OK) result = open_text(b, &w, 1, &held);
    if (result == AMP_OK) result = train_text(b, &w, text, row);
    if (result == AMP_OK) result = amp_memory(amp, &memory);
    if (result == AMP_OK) row->peak = (double)memory.peak / 1048576;
    if (result == AMP_OK) result = validate_text(&w, held, &row->validation);
    amp_loader_destroy(text);
    amp_loader_destroy(held);
    workload_close(&w);
    amp_close(amp);
    return result;
}

static amp_result bench_training(bench *b) {
    static const amp_dtype three[] = {AMP_F32, AMP_F16, AMP_BF16};
    workload_desc d = size_of(b, 0);
    int i;
    d.vocab = 256;
    printf("\nThe first %lld steps in each precision: %lld layers, %lld heads, %lld channels, batch %lld x %lld\n",
           (long long)b->set.iterations, (long long)d.layers, (long long)d.heads, (long long)d.channels,
           (long long)d.batch, (long long)d.seq);
    printf("  %-26s %10s %10s %12s %12s %8s\n", "precision", "tokens/s", "peak MiB", "train loss", "valid. loss",
           "skipped");
    for (i = 0; i < 3; i++) {
        training_row row;
        amp_choice choice;
        char label[64], rate[32];
        memset(&choice, 0, sizeof choice);
        if (amp_choose(&b->machine, three[i], 0, &choice) != AMP_OK) {
            printf("  %-26s n/a: %s\n", amp_dtype_name(three[i]), amp_last_error());
            continue;
        }
        EX_TRY(training_run(b, three[i], &row));
        snprintf(label, sizeof label, "%s%s%s", amp_dtype_name(three[i]), row.scaler ? ", scaler" : "",
                 choice.emulated ? ", emulated" : "");
        printf("  %-26s %10s %10.1f %12.4f %12.4f %8lld\n", label,
               progress_grouped((int64_t)row.rate, rate, sizeof rate), row.peak, row.training, row.validation,
               (long long)row.skips);
        fflush(stdout);
        json_row(b, "training");
        json_size(b, &d);
        metrics_text(b->json, "precision", amp_dtype_name(three[i]));
        metrics_integer(b->json, "emulated", choice.emulated);
        metrics_integer(b->json, "steps", b->set.iterations);
        metrics_number(b->json, "tokens_per_s", row.rate);
        metrics_number(b->json, "peak_mib", row.peak);
        metrics_number(b->json, "train_loss", row.training);
        metrics_number(b->json, "validation_loss", row.validation);
        metrics_integer(b->json, "skips", row.skips);
        metrics_end(b->json);
    }
    return AMP_OK;
}

/* ==== Features =================================================================================== */

/* One side of a comparison, in its own context. */
typedef struct side {
    int on;
    amp_context *amp;
    workload work;
    amp_loader *loader;
    amp_monitor *monitor;
    float *scores;                  /* device: of the mask cache's softmax */
    int32_t *documents;             /* host: [batch, seq] */
    double *seconds;
    int64_t peak;
} side;

/* on, off: what each side does.  describe sets the context and the model, open makes the rest, before is not timed.
   Each may be NULL; step NULL: a training step on the same batch. */
typedef struct feature {
    const char *name, *on, *off;
    void (*describe)(int on, amp_desc *context, workload_desc *model);
    amp_result (*open)(side *s);
    amp_result (*before)(side *s);
    amp_result (*step)(side *s);
    int device_only;
} feature;

/* ---- Training steps that differ in their data */

static amp_result open_tokens(side *s, int32_t workers, int32_t prefetch, int ordinary) {
    amp_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = tokens_path;
    desc.format = AMP_TOKENS_U16;
    desc.batch = s->work.desc.batch;
    desc.seq = s->work.desc.seq;
    desc.shuffle = 1;
    desc.workers = workers;
    desc.prefetch = prefetch;
    desc.disable_pinned = ordinary;
    return amp_loader_create(s->amp, &s->loader, &desc);
}
static amp_result open_pinning(side *s) { return open_tokens(s, 0, 0, !s->on); }
static amp_result open_workers(side *s) { return open_tokens(s, s->on ? 0 : AMP_NO_WORKERS, 0, 0); }
static amp_result open_prefetch(side *s) { return open_tokens(s, 0, s->on ? 8 : 1, 0); }

static amp_result step_loader(side *s) {
    amp_batch batch;
    EX_TRY(amp_loader_next(s->loader, &batch));
    return workload_step(&s->work, batch.inputs, batch.targets);
}

/* ---- The library's own parts */

static amp_result step_own(side *s) { return workload_step(&s->work, NULL, NULL); }

enum { MICRO_BATCHES = 4 };
static void describe_cast_cache(int on, amp_desc *context, workload_desc *model) {
    context->disable_cache = !on;
    if (context->dtype == AMP_DTYPE_DEFAULT) context->dtype = AMP_BF16;     /* fp32, a CPU's choice, casts nothing */
    context->allow_fallback = 1;            /* older GPUs have fp16 alone */
    /* the same weights are used several times: the cache has something to keep */
    model->accumulation = MICRO_BATCHES;
}
static amp_result step_accumulated(side *s) {
    int i;
    for (i = 0; i < MICRO_BATCHES; i++) EX_TRY(workload_step(&s->work, NULL, NULL));
    return AMP_OK;
}
static void describe_recompute(int on, amp_desc *context, workload_desc *model) {
    (void)context;
    model->recompute = on;
}
static void describe_fused_loss(int on, amp_desc *context, workload_desc *model) {
    (void)context;
    model->fused_loss = on;
}
static void describe_fused(int on, amp_desc *context, workload_desc *model) {
    (void)on;
    context->dtype = AMP_F16;       /* with a scaler, which checks and unscales */
    model->scaler = 1;
}

static amp_result pass_alone(side *s) { return workload_pass(&s->work, NULL, NULL, 1); }
static amp_result step_fused(side *s) {
    workload *w = &s->work;
    if (s->on) return amp_step(w->optimizer, w->scaler);
    EX_TRY(amp_scaler_check(w->scaler, amp_optimizer_grad_set(w->optimizer), AMP_CHECK_UNSCALE));
    EX_TRY(amp_optimizer_step(w->optimizer, w->scaler));
    return amp_scaler_update(w->scaler);
}

static amp_result open_monitor(side *s) {
    amp_monitor_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.optimizer = s->work.optimizer;
    desc.scaler = s->work.scaler;
    desc.memory_interval = s->on ? 100 : 1;
    return amp_monitor_create(s->amp, &s->monitor, &desc);
}
static amp_result step_monitored(side *s) {
    amp_step_info info;
    amp_step_record record;
    memset(&info, 0, sizeof info);
    info.no_loss = 1;
    info.tokens = s->work.desc.batch * s->work.desc.seq;
    EX_TRY(workload_step(&s->work, NULL, NULL));
    EX_TRY(amp_monitor_step(s->monitor, &info));
    while (amp_monitor_next(s->monitor, &record)) { }
    return AMP_OK;
}

/* ---- Masks: softmax over a program's own scores, with a mask of documents written out */

static amp_result open_scores(side *s) {
    int64_t batch = s->work.desc.batch, seq = s->work.desc.seq, n = batch * s->work.desc.heads * seq * seq, i;
    void *memory;
    EX_TRY(amp_alloc(s->amp, &memory, 2 * n * (int64_t)sizeof(float)));
    s->scores = (float *)memory;
    EX_TRY(amp_fill(s->amp, memory, 0, 2 * n * (int64_t)sizeof(float)));
    s->documents = (int32_t *)malloc((size_t)(batch * seq) * sizeof *s->documents);
    if (s->documents == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for documents");
    for (i = 0; i < batch * seq; i++) s->documents[i] = (int32_t)(i % seq * 4 / seq);
    return AMP_OK;
}
static amp_result step_masked(side *s) {
    int64_t batch = s->work.desc.batch, heads = s->work.desc.heads, seq = s->work.desc.seq;
    amp_mask_view view;
    amp_softmax_op op;
    amp_mask mask;
    amp_result result;
    memset(&mask, 0, sizeof mask);
    memset(&op, 0, sizeof op);
    mask.kind = AMP_MASK_CAUSAL;
    mask.documents = s->documents;
    if (!s->on) amp_mask_cache_clear(s->amp);
    EX_TRY(amp_mask_get(s->amp, &mask, batch, seq, seq, AMP_U8, &view));
    op.x = amp_tensor4(s->scores, AMP_F32, batch, heads, seq, seq);
    op.y = amp_tensor4(s->scores + batch * heads * seq * seq, AMP_F32, batch, heads, seq, seq);
    op.mask = view.mask;
    result = amp_softmax(s->amp, &op);
    amp_mask_release(s->amp, &view);
    return result;
}

static const feature features[] = {
    {"mask-cache", "mask kept", "written each time", NULL, open_scores, NULL, step_masked, 0},
    {"cast-cache", "casts kept", "cast at each use", describe_cast_cache, NULL, NULL, step_accumulated, 0},
    {"pinning", "pinned memory", "ordinary memory", NULL, open_pinning, NULL, step_loader, 1},
    {"workers", "2 threads read", "read when wanted", NULL, open_workers, NULL, step_loader, 0},
    {"prefetch", "8 batches ahead", "1 batch ahead", NULL, open_prefetch, NULL, step_loader, 0},
    {"memory-interval", "asked every 100th", "asked each step", NULL, open_monitor, NULL, step_monitored, 0},
    {"fused-step", "amp_step", "check, step, update", describe_fused, NULL, pass_alone, step_fused, 0},
    {"recompute", "forward again", "activations kept", describe_recompute, NULL, NULL, step_own, 0},
    {"fused-loss", "logits by chunks", "logits kept", describe_fused_loss, NULL, NULL, step_own, 0},
};
enum { FEATURES = (int)(sizeof features / sizeof *features) };

static void close_side(side *s) {
    amp_monitor_destroy(s->monitor);
    amp_loader_destroy(s->loader);
    if (s->amp != NULL) amp_free(s->amp, s->scores);
    workload_close(&s->work);
    amp_close(s->amp);
    free(s->documents);
    free(s->seconds);
    memset(s, 0, sizeof *s);
}

static amp_result open_side(side *s, const bench *b, const feature *f, int on) {
    amp_desc desc;
    workload_desc model = size_of(b, 0);
    memset(s, 0, sizeof *s);
    memset(&desc, 0, sizeof desc);
    s->on = on;
    s->seconds = (double *)malloc((size_t)b->set.iterations * sizeof *s->seconds);
    if (s->seconds == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the times");
    amp_dtype_parse(b->set.dtype, &desc.dtype);
    if (f->describe != NULL) f->describe(on, &desc, &model);
    EX_TRY(open_context(b, &desc, &s->amp));
    model.activations = storage_of(dtype_now(s->amp));
    model.scaler = dtype_now(s->amp) == AMP_F16;
    EX_TRY(workload_open(&s->work, s->amp, &model));
    return f->open != NULL ? f->open(s) : AMP_OK;
}

static amp_result time_side(side *s, const feature *f, double *seconds) {
    double began;
    if (f->before != NULL) EX_TRY(f->before(s));
    EX_TRY(amp_sync(s->amp));
    began = ex_seconds();
    EX_TRY(f->step(s));
    EX_TRY(amp_sync(s->amp));
    *seconds = ex_seconds() - began;
    return AMP_OK;
}

/* Runs the sides in turn, swapping their order each time, so that disturbances affect both alike. */
static amp_result run_sides(const bench *b, const feature *f, side sides[2]) {
    amp_memory_info memory;
    int64_t i;
    int k;
    memset(&memory, 0, sizeof memory);
    for (k = 0; k < 2; k++) amp_memory_reset_peak(sides[k].amp);
    for (i = -b->set.warmup; i < b->set.iterations; i++)
        for (k = 0; k < 2; k++) {
            side *s = &sides[(k + i) & 1];
            double seconds;
            EX_TRY(time_side(s, f, &seconds));
            if (i >= 0) s->seconds[i] = seconds;
        }
    for (k = 0; k < 2; k++) {
        EX_TRY(amp_memory(sides[k].amp, &memory));
        sides[k].peak = memory.peak;
    }
    return AMP_OK;
}

/* The ratio of neighbouring steps off / on: its quartiles tell an effect from noise. */
static amp_result report_feature(bench *b, const feature *f, side sides[2]) {
    int64_t n = b->set.iterations, i;
    double *ratios = (double *)malloc((size_t)n * sizeof *ratios), low, middle, high, on, off, memory;
    const char *time;
    if (ratios == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the ratios");
    for (i = 0; i < n; i++) ratios[i] = sides[0].seconds[i] / sides[1].seconds[i];
    low = quantile(ratios, n, 0.25);
    middle = quantile(ratios, n, 0.5);
    high = quantile(ratios, n, 0.75);
    free(ratios);
    off = quantile(sides[0].seconds, n, 0.5);
    on = quantile(sides[1].seconds, n, 0.5);
    memory = (double)sides[0].peak / (double)sides[1].peak;
    time = low > 1 || high < 1 ? gain_text(middle) : "even";
    printf("  %-16s %-18s %-20s %10.3f %10.3f %8.3f  %5.3f to %5.3f  %-5s %9.1f %9.1f %8.3f  %s\n", f->name, f->on,
           f->off, 1e3 * on, 1e3 * off, middle, low, high, time, (double)sides[1].peak / 1048576,
           (double)sides[0].peak / 1048576, memory, gain_text(memory));
    json_row(b, "feature");
    metrics_text(b->json, "name", f->name);
    metrics_text(b->json, "on", f->on);
    metrics_text(b->json, "off", f->off);
    json_size(b, &sides[0].work.desc);
    metrics_text(b->json, "precision", amp_dtype_name(dtype_now(sides[0].amp)));
    metrics_number(b->json, "on_ms", 1e3 * on);
    metrics_number(b->json, "off_ms", 1e3 * off);
    metrics_number(b->json, "speedup", middle);
    metrics_number(b->json, "speedup_low", low);
    metrics_number(b->json, "speedup_high", high);
    metrics_text(b->json, "time", time);
    metrics_integer(b->json, "on_bytes", sides[1].peak);
    metrics_integer(b->json, "off_bytes", sides[0].peak);
    metrics_text(b->json, "memory", gain_text(memory));
    metrics_end(b->json);
    fflush(stdout);
    return AMP_OK;
}

static amp_result bench_feature(bench *b, const feature *f) {
    side sides[2];
    amp_result result;
    int i;
    if (f->device_only && on_cpu(b->amp)) {
        printf("  %-16s n/a: the CPU reads batches in place\n", f->name);
        json_row(b, "feature");
        metrics_text(b->json, "name", f->name);
        metrics_text(b->json, "time", "n/a");
        metrics_end(b->json);
        return AMP_OK;
    }
    memset(sides, 0, sizeof sides);
    result = open_side(&sides[0], b, f, 0);
    if (result == AMP_OK) result = open_side(&sides[1], b, f, 1);
    if (result == AMP_OK) result = run_sides(b, f, sides);
    if (result == AMP_OK) result = report_feature(b, f, sides);
    for (i = 0; i < 2; i++) close_side(&sides[i]);
    return result;
}

static amp_result bench_features(bench *b) {
    workload_desc d = size_of(b, 0);
    int64_t tokens = 4 * d.batch * d.seq + 1;
    amp_result result;
    int i;
    EX_TRY(tokens_file_make(tokens < 1 << 20 ? 1 << 20 : tokens, d.vocab));
    printf("\n%s: %lld layers, %lld channels, vocabulary %lld, batch %lld x %lld, %lld steps of each side in turn\n",
           named_shape(&d), (long long)d.layers, (long long)d.channels, (long long)d.vocab, (long long)d.batch,
           (long long)d.seq, (long long)b->set.iterations);
    printf("  %-16s %-18s %-20s %10s %10s %8s  %-14s  %-5s %9s %9s %8s\n", "feature", "on", "off", "ms on", "ms off",
           "speedup", "quartiles", "time", "MiB on", "MiB off", "off/on");
    for (i = 0, result = AMP_OK; i < FEATURES && result == AMP_OK; i++)
        if (strcmp(b->set.feature, "all") == 0 || strcmp(b->set.feature, features[i].name) == 0)
            result = bench_feature(b, &features[i]);
    tokens_file_remove();
    EX_TRY(result);
    printf("\n  time: gain or loss where three quarters of the neighbouring steps agree, else even; mask-cache is one "
           "softmax,\n"
           "  cast-cache a step of %d micro-batches, fused-step the optimizer's part in fp16 with a scaler, all others "
           "training steps\n",
           MICRO_BATCHES);
    return AMP_OK;
}

/* ==== main ======================================================================================= */

static amp_result open_json(bench *b) {
    char why[400];
    if (strcmp(b->set.out, "none") == 0) return AMP_OK;
    snprintf(b->json_path, sizeof b->json_path, "%.4000s",
             *b->set.out != 0 ? b->set.out : *b->set.training != 0 ? "out/bench_training.json"
             : b->set.features ? "out/bench_features.json" : "out/bench_precision.json");
    snprintf(b->part_path, sizeof b->part_path, "%s.part", b->json_path);
    if (ex_folder_make(b->json_path) != AMP_OK) return flag_refuse("json", "%s", ex_because(why));
    b->json = fopen(b->part_path, "w");
    return b->json != NULL ? AMP_OK : flag_refuse("json", "%s: %s", b->part_path, strerror(errno));
}

/* The old file stays until all results are written. */
static amp_result close_json(bench *b, amp_result result) {
    int failed;
    if (b->json == NULL) return result;
    fprintf(b->json, "]}\n");
    failed = ferror(b->json);
    if (fclose(b->json) != 0) failed = 1;
    if (result != AMP_OK) unlink(b->part_path);
    else if (failed || rename(b->part_path, b->json_path) != 0)
        return ex_fail(AMP_ERR_WRITE, "%s: could not be written: %s", b->json_path, strerror(errno));
    else printf("\n  %s\n", b->json_path);
    return result;
}

enum { MOST_TOKENS = 1 << 22 };
static amp_result open_bench(bench *b) {
    const settings *set = &b->set;
    workload_desc d;
    amp_desc desc;
    char why[400];
    amp_result result;
    if (*set->training != 0 && (set->precision || set->features))
        return flag_refuse("training", "contradicts --%s: run one after the other",
                           set->precision ? "precision" : "features");
    if (*set->training != 0 && access(set->training, R_OK) != 0)
        return flag_refuse("training", "%s", strerror(errno));
    if (set->precision && set->features)
        return flag_refuse("features", "contradicts --precision: run one after the other");
    if (!set->features && flag_was_given("feature")) return flag_refuse("feature", "needs --features");
    if (!set->features && flag_was_given("dtype"))
        return flag_refuse("dtype", "needs --features; the table of precisions has them all");
    if (set->features && flag_was_given("model"))
        return flag_refuse("model", "needs --precision; features are measured on a decoder");
    memset(&desc, 0, sizeof desc);
    amp_dtype_parse(set->dtype, &desc.dtype);
    result = open_context(b, &desc, &b->amp);
    if (result == AMP_ERR_NAME || result == AMP_ERR_DEVICE) return flag_refuse("device", "%s", ex_because(why));
    if (result == AMP_ERR_UNSUPPORTED) return flag_refuse("dtype", "%s", ex_because(why));
    EX_TRY(result);
    if (on_cpu(b->amp)) b->set.device = "cpu";  /* also for later contexts */
    d = size_of(b, 0);
    if (d.channels % d.heads != 0)
        return flag_refuse(set->heads > 0 ? "heads" : "channels", "%lld heads do not divide %lld channels",
                      (long long)d.heads, (long long)d.channels);
    if (d.batch * d.seq > MOST_TOKENS)
        return flag_refuse(set->batch > 0 ? "batch" : "seq", "%lld x %lld tokens in a batch, at most %d",
                           (long long)d.batch,
                      (long long)d.seq, MOST_TOKENS);
    EX_TRY(amp_query(b->amp, &b->desc));
    EX_TRY(amp_query_machine(b->amp, &b->machine));
    return open_json(b);
}

int main(int argc, char **argv) {
    bench b;
    amp_result result;
    char text[4096];
    ex_begin();
    memset(&b, 0, sizeof b);
    result = flag_read(argc, argv);
    if (result == AMP_OK) result = flag_parse_all(&b.set);
    if (result == AMP_OK && b.set.help) return flag_print_help(), 0;
    if (result == AMP_OK) result = open_bench(&b);
    if (result != AMP_OK) {
        fprintf(stderr, "amp_bench: %s\n", ex_error());
        amp_close(b.amp);
        return 2;
    }
    json_head(&b, *b.set.training != 0 ? "training" : b.set.features ? "features" : "precisions", argc, argv);
    amp_machine_text(&b.machine, text, sizeof text);
    printf("%s", text);
    result = *b.set.training != 0 ? bench_training(&b) : b.set.features ? bench_features(&b) : bench_precision(&b);
    result = close_json(&b, result);
    if (result != AMP_OK) fprintf(stderr, "amp_bench: %s\n", ex_error());
    amp_close(b.amp);
    return result != AMP_OK;
}
