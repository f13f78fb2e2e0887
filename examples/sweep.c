/* sweep.c - searches precision, learning rate and batch size: short trainings of a small GPT on bytes, best first.
 *
 *     gcc -O2 examples/sweep.c -o sweep -lm -lpthread
 *     ./sweep                                                   a grid of twelve trials, about a minute
 *     ./sweep --search random --trials 30 --lrs 1e-4,1e-2       learning rates in between, evenly in their logarithm
 *
 * Each trial's record is written as a JSON line when it ends; run again, the search continues after the existing
 * records.  A trial that diverges, lacks memory or is refused has a record too, and the search continues. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "flags.h"
#include "gpt.h"
#include "metrics.h"
#include "progress.h"

/* ==== Settings =================================================================================== */

typedef struct settings {
    const char *data, *precisions, *lrs, *batches, *search, *out, *device;
    int64_t trials, steps, tokens, layers, heads, channels, seq, eval_batches, seed, threads, again, help;
    double validation;
} settings;

#define FIELD(name) offsetof(settings, name)
static const flag_row options[] = {
    {"Search", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"precisions", FLAG_TEXT, FIELD(precisions), "fp32,fp16,bf16", 0, 0, NULL,
     "The precisions to try: a list of fp32, tf32, fp16, bf16, fp8."},
    {"lrs", FLAG_TEXT, FIELD(lrs), "1e-3,4e-3", 0, 0, NULL,
     "The list of learning rates to try. A random search takes any from the lowest to the highest."},
    {"batches", FLAG_TEXT, FIELD(batches), "8,16", 0, 0, NULL, "The list of batch sizes to try, in sequences."},
    {"search", FLAG_CHOICE, FIELD(search), "grid", 0, 0, "grid random",
     "grid tries every combination, and random tries some of them."},
    {"trials", FLAG_INTEGER, FIELD(trials), "auto", 1, 100000, "auto=0",
     "The largest number of trials. With auto, it is the whole grid, or 20 with --search random."},
    {"steps", FLAG_INTEGER, FIELD(steps), "200", 2, 1e9, NULL, "The number of optimizer steps per trial."},
    {"tokens", FLAG_INTEGER, FIELD(tokens), "off", 1, 1e15, "off=0",
     "The number of tokens per trial, which replaces --steps, so that large batches do not learn from more tokens."},
    {"seed", FLAG_INTEGER, FIELD(seed), "1", 0, 1e15, NULL, "The seed of weights, data order and the random search."},

    {"Model and data", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"layers", FLAG_INTEGER, FIELD(layers), "2", 1, 1000, NULL, "The number of blocks."},
    {"heads", FLAG_INTEGER, FIELD(heads), "4", 1, 4096, NULL,
     "The number of attention heads, which must divide the channels."},
    {"channels", FLAG_INTEGER, FIELD(channels), "128", 1, 65536, NULL, "The width."},
    {"seq", FLAG_INTEGER, FIELD(seq), "64", 1, 1 << 20, NULL, "The number of tokens in a sequence."},
    {"data", FLAG_TEXT, FIELD(data), "amp.h", 0, 0, NULL,
     "The text to learn, read as bytes. A pattern in quotes means several files."},
    {"validation", FLAG_NUMBER, FIELD(validation), "0.1", 1e-6, 0.9, NULL,
     "The part of the data, at its end, that is kept for validation."},
    {"eval-batches", FLAG_INTEGER, FIELD(eval_batches), "16", 1, 1e9, NULL,
     "The largest number of batches, of 8 sequences each, in a validation."},

    {"Run", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"out", FLAG_TEXT, FIELD(out), "out/sweep.jsonl", 0, 0, NULL,
     "The file for the records, one JSON line per trial."},
    {"again", FLAG_SWITCH, FIELD(again), "off", 0, 0, NULL, "Deletes the existing records and starts over."},
    {"device", FLAG_TEXT, FIELD(device), "auto", 0, 0, NULL, flag_device_help},
    {"threads", FLAG_INTEGER, FIELD(threads), "all", 1, 1024, "all=0", "The number of CPU threads."},
    {"help", FLAG_SWITCH, FIELD(help), "off", 0, 0, NULL, "Prints this text."},
};
static flag_program flag_given = {
    .program = "sweep", .summary = "searches for the best precision, learning rate and batch size with amp.h",
    .parts = {{options, FLAG_ROWS(options), 0}},
    .ending = "Ctrl-C stops the search. Run the program again to continue it.\n"
              "Exit codes: 0 done, 1 no trial finished, 2 refused, 130 stopped by Ctrl-C."
};

/* ==== Trials ===================================================================================== */

typedef enum trial_result { TRIAL_DONE, TRIAL_DIVERGED, TRIAL_FAILED, TRIAL_REFUSED, TRIAL_RESULTS } trial_result;
static const char *const result_names[TRIAL_RESULTS] = {"done", "diverged", "failed", "refused"};

typedef struct trial {
    amp_dtype precision;
    double lr;
    int64_t batch;
    trial_result result;
    char reason[200];               /* of a result other than done */
    int64_t steps, skips;           /* steps made, and how many were skipped */
    double first, training, validation;     /* losses: of the first step, of the last steps, at the end */
    double rate, peak, seconds;     /* tokens/s, MiB */
    int known;                      /* 1: read from its record */
} trial;

/* The numbers or words of a list like "8,16,32" or "8 16 32", into out. */
enum { LONGEST_LIST = 64 };
typedef struct list { double x[LONGEST_LIST]; int n; } list;

static amp_result list_item(const char *flag, const char *word, const char *legal, double *x) {
    char *end;
    if (strcmp(flag, "precisions") == 0) {
        amp_dtype dtype;
        if (amp_dtype_parse(word, &dtype) != AMP_OK ||
            (dtype != AMP_F32 && dtype != AMP_TF32 && dtype != AMP_F16 && dtype != AMP_BF16 && dtype != AMP_FP8))
            return flag_refuse(flag, "%.20s is not valid: must be %s", word, legal);
        *x = (double)dtype;
        return AMP_OK;
    }
    *x = strtod(word, &end);
    if (*end != 0 || !amp_is_finite_f64(x) || *x <= 0 || *x > 1e6 || (strcmp(flag, "batches") == 0 && *x != floor(*x)))
        return flag_refuse(flag, "%.20s is not valid: must be %s", word, legal);
    return AMP_OK;
}

static amp_result read_list(const char *flag, const char *text, const char *legal, list *out) {
    const char *at = text;
    int i;
    out->n = 0;
    while (*(at += strspn(at, ", ")) != 0) {
        size_t length = strcspn(at, ", ");
        char word[400];
        if (out->n == LONGEST_LIST) return flag_refuse(flag, "has more than %d entries", LONGEST_LIST);
        if (length >= sizeof word) return flag_refuse(flag, "an entry has %zu characters: must be %s", length, legal);
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        EX_TRY(list_item(flag, word, legal, &out->x[out->n]));
        for (i = 0; i < out->n; i++) if (out->x[i] == out->x[out->n])
            return flag_refuse(flag, "%.20s is named twice", word);
        out->n++;
        at += length;
    }
    return out->n > 0 ? AMP_OK : flag_refuse(flag, "is empty: must be %s", legal);
}

/* All trials of the search, in order. */
typedef struct search {
    settings set;
    list precisions, lrs, batches;
    trial *trials;
    int64_t n, split, end;          /* tokens before split are trained on, those up to end are for validation */
    char settings_text[4 * PATH_MAX];   /* common to all trials: a record with others belongs to another search */
    FILE *file;
} search;

static double number_of(const search *s, int64_t i, int which) {
    return (double)amp_random_uniform((uint64_t)s->set.seed + 77, (uint64_t)(3 * i + which));
}

static amp_result make_trials(search *s) {
    const settings *set = &s->set;
    int64_t grid = (int64_t)s->precisions.n * s->lrs.n * s->batches.n, i;
    int at_random = strcmp(set->search, "random") == 0, k;
    double least = s->lrs.x[0], most = s->lrs.x[0];
    for (k = 1; k < s->lrs.n; k++) {
        if (s->lrs.x[k] < least) least = s->lrs.x[k];
        if (s->lrs.x[k] > most) most = s->lrs.x[k];
    }
    s->n = at_random                               ? (set->trials > 0 ? set->trials : 20)
           : set->trials > 0 && set->trials < grid ? set->trials
                                                   : grid;
    s->trials = (trial *)calloc((size_t)s->n, sizeof *s->trials);
    if (s->trials == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for %lld trials", (long long)s->n);
    for (i = 0; i < s->n; i++) {
        trial *t = &s->trials[i];
        int64_t p = i / s->lrs.n / s->batches.n, b = i % s->batches.n;
        if (at_random) {
            p = (int64_t)(number_of(s, i, 0) * s->precisions.n);
            b = (int64_t)(number_of(s, i, 1) * s->batches.n);
        }
        t->precision = (amp_dtype)s->precisions.x[p];
        t->batch = (int64_t)s->batches.x[b];
        t->lr = at_random ? least * pow(most / least, number_of(s, i, 2)) : s->lrs.x[i / s->batches.n % s->lrs.n];
    }
    return AMP_OK;
}

/* ==== Records ==================================================================================== */

/* The numbers that identify a trial, as written in its record. */
static void trial_texts(const trial *t, char lr[32], char batch[32]) {
    snprintf(lr, 32, "%.9g", t->lr);
    snprintf(batch, 32, "%lld", (long long)t->batch);
}

static amp_result write_record(search *s, const trial *t) {
    clearerr(s->file);
    metrics_begin(s->file, "trial");
    metrics_text(s->file, "precision", amp_dtype_name(t->precision));
    metrics_number(s->file, "lr", t->lr);
    metrics_integer(s->file, "batch", t->batch);
    metrics_text(s->file, "result", result_names[t->result]);
    metrics_text(s->file, "reason", t->reason);
    metrics_integer(s->file, "steps", t->steps);
    metrics_integer(s->file, "skips", t->skips);
    metrics_number(s->file, "first_loss", t->first);
    metrics_number(s->file, "train_loss", t->training);
    metrics_number(s->file, "validation_loss", t->validation);
    metrics_number(s->file, "tokens_per_s", t->rate);
    metrics_number(s->file, "peak_mib", t->peak);
    metrics_number(s->file, "seconds", t->seconds);
    metrics_text(s->file, "settings", s->settings_text);
    metrics_end(s->file);
    return ferror(s->file) ? ex_fail(AMP_ERR_WRITE, "%s: %s", s->set.out, strerror(errno)) : AMP_OK;
}

static double number_in(json line, const char *key) {
    char text[64];
    return json_find(line, key, text, sizeof text) ? strtod(text, NULL) : 0;
}

/* Takes a pending trial's result from its line.  Failures are tried again. */
static void read_record(search *s, json line) {
    char text[4 * PATH_MAX], lr[32], batch[32], mine_lr[32], mine_batch[32], precision[32];
    int64_t i;
    int result;
    if (!json_find(line, "settings", text, sizeof text) || strcmp(text, s->settings_text) != 0) return;
    if (!json_find(line, "precision", precision, sizeof precision) || !json_find(line, "lr", lr, sizeof lr) ||
        !json_find(line, "batch", batch, sizeof batch) || !json_find(line, "result", text, sizeof text)) return;
    for (result = 0; result < TRIAL_RESULTS && strcmp(text, result_names[result]) != 0;) result++;
    if (result == TRIAL_RESULTS || result == TRIAL_FAILED) return;
    for (i = 0; i < s->n; i++) {
        trial *t = &s->trials[i];
        trial_texts(t, mine_lr, mine_batch);
        if (t->known || strcmp(precision, amp_dtype_name(t->precision)) != 0 || strcmp(lr, mine_lr) != 0 ||
            strcmp(batch, mine_batch) != 0) continue;
        t->known = 1;
        t->result = (trial_result)result;
        json_find(line, "reason", t->reason, sizeof t->reason);
        t->steps = (int64_t)number_in(line, "steps");        t->skips = (int64_t)number_in(line, "skips");
        t->first = number_in(line, "first_loss");            t->training = number_in(line, "train_loss");
        t->validation = number_in(line, "validation_loss");  t->rate = number_in(line, "tokens_per_s");
        t->peak = number_in(line, "peak_mib");               t->seconds = number_in(line, "seconds");
        return;
    }
}

/* Opens the file of records to append to it.  A last line that was cut off is ended, and skipped. */
static amp_result open_records(search *s) {
    void *data;
    size_t bytes;
    const char *line, *end;
    char why[400];
    struct stat info;
    int torn;
    if (ex_folder_make(s->set.out) != AMP_OK) return flag_refuse("out", "%s", ex_because(why));
    s->file = fopen(s->set.out, s->set.again ? "w" : "a");
    if (s->file == NULL) return flag_refuse("out", "%s", strerror(errno));
    /* a device has no records */
    if (fstat(fileno(s->file), &info) == 0 && !S_ISREG(info.st_mode)) return AMP_OK;
    EX_TRY(amp_file_read_all(NULL, s->set.out, &data, &bytes));
    end = (const char *)data + bytes;
    torn = bytes > 0 && end[-1] != '\n';
    for (line = (const char *)data; line < end;) {
        const char *next = (const char *)memchr(line, '\n', (size_t)(end - line));
        if (next == NULL) break;
        read_record(s, json_open(line, (size_t)(next - line)));
        line = next + 1;
    }
    amp_file_free(NULL, data, bytes);
    if (torn) fputc('\n', s->file);
    return AMP_OK;
}

/* ==== One trial ================================================================================== */

typedef struct session {
    const search *search;
    trial *trial;
    amp_context *amp;
    gpt model;
    amp_loader *loader;
    amp_scaler *scaler;             /* NULL: none */
    amp_optimizer *optimizer;
    int at_floor;
} session;

static amp_result open_loader(const search *s, amp_context *amp, int64_t batch, int64_t first, int64_t last,
                              amp_loader **out) {
    amp_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = s->set.data;
    desc.format = AMP_TOKENS_BYTES;
    desc.batch = batch;
    desc.seq = s->set.seq;
    desc.first = first;
    desc.last = last;
    desc.seed = (uint64_t)s->set.seed;
    desc.shuffle = first == 0;
    desc.epochs = first == 0 ? 0 : 1;           /* validation: once, in order */
    desc.workers = first == 0 ? 0 : AMP_NO_WORKERS;
    return amp_loader_create(amp, out, &desc);
}

static amp_result open_session(session *r) {
    const settings *set = &r->search->set;
    amp_desc desc;
    amp_choice choice;
    amp_optimizer_desc adamw;
    gpt_config c;
    int n_fp8;
    memset(&desc, 0, sizeof desc);
    memset(&adamw, 0, sizeof adamw);
    memset(&c, 0, sizeof c);
    desc.dtype = r->trial->precision;
    desc.seed = (uint64_t)set->seed;
    desc.threads = (int32_t)set->threads;
    EX_TRY(ex_device_open(&r->amp, &desc, set->device));
    EX_TRY(amp_query_choice(r->amp, &choice));
    EX_TRY(open_loader(r->search, r->amp, r->trial->batch, 0, r->search->split, &r->loader));
    c.vocab = 256; c.positions = c.seq = set->seq;
    c.channels = set->channels; c.heads = set->heads; c.layers = set->layers;
    c.batch = r->trial->batch > 8 ? r->trial->batch : 8;        /* validation has 8 */
    c.activations = choice.dtype == AMP_TF32 ? AMP_F32 : choice.dtype == AMP_FP8 ? AMP_BF16 : choice.dtype;
    EX_TRY(gpt_create(&r->model, r->amp, &c));
    EX_TRY(model_fp8_layers(r->amp, r->model.params, r->model.n_params, "h.", c.layers, 0, &n_fp8));
    EX_TRY(gpt_init(&r->model, (uint64_t)set->seed));
    if (choice.scaler) EX_TRY(amp_scaler_create(r->amp, &r->scaler, NULL));
    adamw.params = r->model.params;
    adamw.n_params = r->model.n_params;
    adamw.lr = (float)r->trial->lr;
    adamw.beta2 = 0.99f;
    adamw.weight_decay = 0.1f;
    adamw.clip_norm = 1;
    return amp_optimizer_create(r->amp, &r->optimizer, &adamw);
}

static void close_session(session *r) {
    amp_optimizer_destroy(r->optimizer);
    amp_scaler_destroy(r->scaler);
    gpt_destroy(&r->model);
    amp_loader_destroy(r->loader);
    amp_close(r->amp);
}

static amp_result validate(session *r, double *loss) {
    amp_loader *loader;
    amp_batch batch;
    amp_result result;
    int64_t n = 0;
    *loss = 0;
    EX_TRY(open_loader(r->search, r->amp, 8, r->search->split, r->search->end, &loader));
    while (n < r->search->set.eval_batches && (result = amp_loader_next(loader, &batch)) == AMP_OK) {
        float one;
        result = gpt_forward_loss(&r->model, &batch, NULL, 0);
        if (result == AMP_OK) result = gpt_loss_read(&r->model, &one);
        if (result != AMP_OK) break;
        *loss += (double)one;
        n++;
    }
    amp_loader_destroy(loader);
    *loss /= (double)(n > 0 ? n : 1);
    return n > 0 ? AMP_OK : result;
}

static void take_outcomes(session *r) {
    amp_step_result o;
    while (amp_step_result_next(r->optimizer, &o)) {
        r->trial->skips = o.total_skips;
        r->at_floor = o.at_floor;
    }
}

/* Why training has diverged, or NULL.  recent: mean of the last losses read. */
static const char *divergence(const session *r, double recent) {
    if (!amp_is_finite_f64(&recent)) return "the loss is infinite or NaN";
    if (r->at_floor) return "the loss scale is at its lowest value, and steps still overflow";
    if (recent > r->trial->first) return "the loss is above that of the first step";
    return NULL;
}

/* Trains, reading the loss every tenth step.  *why: from divergence. */
static amp_result train(session *r, int64_t steps, const char **why) {
    trial *t = r->trial;
    double sum = 0, recent = 0, checked = 0, lr;
    amp_schedule schedule;
    int64_t step, look = steps / 4 > 10 ? steps / 4 : 10;       /* the first steps may be worse than none */
    *why = NULL;
    memset(&schedule, 0, sizeof schedule);
    schedule.lr = t->lr;
    schedule.min_lr = 0.1 * t->lr;
    schedule.steps = steps;
    schedule.warmup = steps / 10;
    for (step = 0; step < steps && *why == NULL && !ex_stop_requested; step++) {
        amp_batch batch;
        int read = step % 10 == 0 || step >= steps - 5;
        float loss;
        EX_TRY(amp_schedule_lr(&schedule, step, &lr));
        EX_TRY(amp_optimizer_set_lr(r->optimizer, (float)lr));
        EX_TRY(amp_loader_next(r->loader, &batch));
        EX_TRY(gpt_forward_loss(&r->model, &batch, amp_scaler_scale_ptr(r->scaler), 1));
        EX_TRY(gpt_backward(&r->model));
        EX_TRY(amp_step(r->optimizer, r->scaler));
        t->steps = step + 1;
        if (step == steps - 5) sum = checked = 0;
        take_outcomes(r);
        if (!read) continue;
        EX_TRY(gpt_loss_read(&r->model, &loss));
        if (step == 0) t->first = (double)loss;
        sum += (double)loss;
        checked++;
        recent = step >= steps - 5 ? sum / checked : (double)loss;
        if (step >= look || !amp_is_finite_f32(&loss) || r->at_floor) *why = divergence(r, recent);
    }
    t->training = recent;
    EX_TRY(amp_step_result_flush(r->optimizer));
    take_outcomes(r);
    return AMP_OK;
}

/* Trains and validates; a failure is the trial's result. */
static amp_result run_session(session *r) {
    const settings *set = &r->search->set;
    trial *t = r->trial;
    const char *why = NULL;
    double began = ex_seconds();
    int64_t per_step = t->batch * set->seq, steps = set->tokens > 0 ? set->tokens / per_step : set->steps;
    amp_memory_info memory;
    EX_TRY(train(r, steps > 2 ? steps : 2, &why));
    EX_TRY(amp_sync(r->amp));
    t->seconds = ex_seconds() - began;
    t->rate = (double)(t->steps * per_step) / t->seconds;
    if (why == NULL && !ex_stop_requested) {
        EX_TRY(validate(r, &t->validation));
        if (!amp_is_finite_f64(&t->validation)) why = "the validation loss is infinite or NaN";
    }
    t->result = why != NULL ? TRIAL_DIVERGED : TRIAL_DONE;
    if (why != NULL) snprintf(t->reason, sizeof t->reason, "%s after %lld steps", why, (long long)t->steps);
    EX_TRY(amp_memory(r->amp, &memory));
    t->peak = (double)memory.peak / 1048576;
    return AMP_OK;
}

static void run_trial(const search *s, trial *t) {
    session r;
    amp_result result;
    memset(&r, 0, sizeof r);
    r.search = s;
    r.trial = t;
    result = open_session(&r);
    if (result == AMP_OK) result = run_session(&r);
    else if (result != AMP_ERR_MEMORY) t->result = TRIAL_REFUSED;
    if (result != AMP_OK) {
        if (t->result != TRIAL_REFUSED) t->result = TRIAL_FAILED;
        snprintf(t->reason, sizeof t->reason, "%.199s", ex_error());
        ex_text[0] = 0;
    }
    close_session(&r);
}

/* ==== Reports ==================================================================================== */

static void print_trial(const search *s, int64_t i) {
    const trial *t = &s->trials[i];
    char rate[32];
    printf("trial %lld/%lld | %s | lr %.3g | batch %lld | ", (long long)i + 1, (long long)s->n,
           amp_dtype_name(t->precision), t->lr, (long long)t->batch);
    if (t->result != TRIAL_DONE) printf("%s: %s%s\n", result_names[t->result], t->reason, t->known ? " (known)" : "");
    else
        printf("validation %.4f | %s tok/s%s\n", t->validation, progress_grouped((int64_t)t->rate, rate, sizeof rate),
               t->known ? " (known)" : "");
}

static int compare_trials(const void *a, const void *b) {
    const trial *x = (const trial *)a, *y = (const trial *)b;
    if (x->result != y->result) return x->result < y->result ? -1 : 1;
    return x->validation < y->validation ? -1 : x->validation > y->validation;
}

/* Best first; 1 if there is a best. */
static int print_table(search *s, int64_t n) {
    const trial *best = s->trials;
    int64_t i;
    qsort(s->trials, (size_t)n, sizeof *s->trials, compare_trials);
    printf("\n  %-9s %9s %6s %11s %11s %10s %9s %8s\n", "precision", "lr", "batch", "valid. loss", "train loss",
           "tokens/s", "peak MiB", "skipped");
    for (i = 0; i < n; i++) {
        const trial *t = &s->trials[i];
        char rate[32];
        printf("  %-9s %9.3g %6lld ", amp_dtype_name(t->precision), t->lr, (long long)t->batch);
        if (t->result != TRIAL_DONE) { printf("%11s: %s\n", result_names[t->result], t->reason); continue; }
        printf("%11.4f %11.4f %10s %9.1f %8lld\n", t->validation, t->training,
               progress_grouped((int64_t)t->rate, rate, sizeof rate), t->peak, (long long)t->skips);
    }
    if (n == 0 || best->result != TRIAL_DONE) return 0;
    printf("\nbest: --precision %s --lr %.3g --batch %lld\n", amp_dtype_name(best->precision), best->lr,
           (long long)best->batch);
    return 1;
}

/* ==== main ======================================================================================= */

/* Finds the data's length, and checks that the device exists. */
static amp_result open_data(search *s) {
    amp_context *amp;
    amp_desc desc;
    amp_loader *loader;
    amp_loader_info info;
    amp_result result;
    char why[400];
    memset(&desc, 0, sizeof desc);
    if (ex_device_open(&amp, &desc, s->set.device) != AMP_OK) return flag_refuse("device", "%s", ex_because(why));
    result = open_loader(s, amp, 1, 0, 0, &loader);
    if (result == AMP_OK) {
        result = amp_loader_info_get(loader, &info);
        amp_loader_destroy(loader);
    }
    amp_close(amp);
    if (result != AMP_OK) return flag_refuse("data", "%s", ex_because(why));
    s->end = info.tokens;
    s->split = info.tokens - (int64_t)(s->set.validation * (double)info.tokens);
    if (s->end - s->split < 8 * s->set.seq + 1)
        return flag_refuse("validation",
                      "leaves %lld tokens, and validation takes at least %lld: use more data or a smaller --seq",
                      (long long)(s->end - s->split), (long long)(8 * s->set.seq + 1));
    return AMP_OK;
}

/* A path as a text that differs for every path and that a record restores: a byte that is not UTF-8, and the percent
   sign, as %xx. */
static void path_as_text(const char *path, char text[3 * PATH_MAX]) {
    int64_t left = (int64_t)strlen(path), n;
    uint32_t code;
    char *out = text;
    for (*out = 0; left > 0 && out - text < 3 * PATH_MAX - 4; path += n, left -= n) {
        n = utf8_read(path, left, &code);
        if (*path == '%' || (code == 0xfffd && n == 1)) out += snprintf(out, 4, "%%%02x", (unsigned char)*path);
        else out += snprintf(out, 5, "%.*s", (int)n, path);
    }
}

static amp_result open_search(search *s) {
    const settings *set = &s->set;
    char data[3 * PATH_MAX];
    if (set->channels % set->heads != 0)
        return flag_refuse("heads", "%lld heads do not divide %lld channels", (long long)set->heads,
                      (long long)set->channels);
    if (flag_was_given("steps") && set->tokens > 0) return flag_refuse("tokens", "replaces --steps: give one of them");
    EX_TRY(read_list("precisions", set->precisions, "a list of fp32, tf32, fp16, bf16, fp8", &s->precisions));
    EX_TRY(read_list("lrs", set->lrs, "a list of numbers above 0", &s->lrs));
    EX_TRY(read_list("batches", set->batches, "a list of whole numbers from 1 to 1000000", &s->batches));
    EX_TRY(open_data(s));
    EX_TRY(make_trials(s));
    path_as_text(set->data, data);
    snprintf(s->settings_text, sizeof s->settings_text,
             "steps=%lld tokens=%lld seed=%lld layers=%lld heads=%lld channels=%lld seq=%lld validation=%.6g "
             "eval-batches=%lld "
             "data=%s bytes=%lld device=%.20s",
             (long long)set->steps, (long long)set->tokens, (long long)set->seed, (long long)set->layers,
             (long long)set->heads, (long long)set->channels, (long long)set->seq, set->validation,
             (long long)set->eval_batches, data, (long long)s->end, set->device);
    return open_records(s);
}

int main(int argc, char **argv) {
    search s;
    int64_t i, run = 0, lost = 0;
    int found;
    amp_result result;
    ex_begin();
    memset(&s, 0, sizeof s);
    result = flag_read(argc, argv);
    if (result == AMP_OK) result = flag_parse_all(&s.set);
    if (result == AMP_OK && s.set.help) return flag_print_help(), 0;
    if (result == AMP_OK) result = open_search(&s);
    if (result != AMP_OK) return fprintf(stderr, "sweep: %s\n", ex_error()), 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    ex_stop_install();
    for (i = 0; i < s.n && !ex_stop_requested; i++) {
        if (!s.trials[i].known) run_trial(&s, &s.trials[i]);
        if (ex_stop_requested && !s.trials[i].known) break;        /* unfinished: no record */
        if (!s.trials[i].known && write_record(&s, &s.trials[i]) != AMP_OK) {
            fprintf(stderr, "sweep: %s\n", ex_error());
            lost++;
        }
        run += !s.trials[i].known;
        print_trial(&s, i);
    }
    found = print_table(&s, i);
    printf("%lld trials ran, and %lld were known before; the records are in %s%s\n", (long long)run,
           (long long)(i - run), s.set.out, ex_stop_requested ? "; run again to continue" : "");
    if (lost > 0) printf("%lld of them have no record: %s could not be written\n", (long long)lost, s.set.out);
    fclose(s.file);
    free(s.trials);
    return ex_stop_requested ? 130 : !found;
}
