/* train_classifier.c - fine-tunes an encoder (BERT) on labelled text in mixed precision, with amp.h alone.
 *
 *     gcc -O2 examples/train_classifier.c -o train_classifier -lm -lpthread
 *     ./train_classifier                made-up sentences, a small model with random weights: a few seconds
 *     ./train_classifier --data reviews.tsv --init bert-base-uncased/model.safetensors --precision bf16
 *     ./train_classifier --resume out/classifier/model       continues exactly where it stopped
 *     ./train_classifier --compat       BERT, RoBERTa, XLM-R, ELECTRA, DeBERTa and Longformer in every precision
 *
 * reviews.tsv has one text a line, "label<TAB>text"; labels are numbers or names.  The model's folder is as Hugging
 * Face writes it, with its tokenizer and config.json (model_folder.h).  On a GPU and on several processes: as
 * train_gpt.c.
 *
 * Read it from the bottom: main, then train, then train_batch.  Mixed precision is open_context, training_open_scaler
 * and open_optimizer, which set it up, model_tape_begin, the region, forward_loss, the gradient at its scale, and
 * train_batch, the rest of a step; the model is encoder.h. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "encoder_files.h"
#include "progress.h"
#include "training_report.h"

/* ==== Flags ====================================================================================== */

typedef struct settings {
    training_settings training;
    const char *data, *valid, *vocab, *init, *model;
    int64_t classes, cased, seq, layers, heads, hidden, intermediate;
    int64_t batch, epochs, seed, shuffle_off, compat, compat_scale, help;
    int64_t accumulation;           /* as .training.amp has it, with its default */
    double validation, dropout, lr, warmup, weight_decay;
} settings;

#define FIELD(name) offsetof(settings, name)

static const flag_row model_flags[] = {
    {"Data", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"data", FLAG_TEXT, FIELD(data), "", 0, 0, NULL,
     "Labelled text, one \"label<TAB>text\" per line. If empty, the program learns made-up sentences."},
    {"valid", FLAG_TEXT, FIELD(valid), "", 0, 0, NULL,
     "Labelled text to evaluate on. If empty, it is a part of --data."},
    {"validation", FLAG_NUMBER, FIELD(validation), "0.1", 1e-6, 0.9, NULL,
     "The part of the data, chosen at random, that is only evaluated on."},
    {"classes", FLAG_INTEGER, FIELD(classes), "auto", 2, 65536, "auto=0",
     "The number of labels. With auto, it is as many as the data has."},
    {"vocab", FLAG_TEXT, FIELD(vocab), "", 0, 0, NULL,
     "The tokenizer: a tokenizer.json, a vocab.txt of WordPiece, or a vocab.json with merges.txt beside it. With "
     "bytes, bytes are the tokens. If empty, it is the one beside --init, and bytes without --init. The made-up "
     "sentences have their own."},
    {"cased", FLAG_SWITCH, FIELD(cased), "off", 0, 0, NULL, "Says that the vocabulary has upper case and accents."},
    {"seq", FLAG_INTEGER, FIELD(seq), "128", 2, 1 << 20, NULL,
     "The largest number of tokens in a text, with [CLS] and [SEP]. Longer texts are cut."},

    {"Model", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"model", FLAG_CHOICE, FIELD(model), "tiny", 0, 0, "tiny mini small base large",
     "The size of a model with random weights."},
    {"layers", FLAG_INTEGER, FIELD(layers), "model", 1, 1000, "model=0",
     "The number of layers. With model, it is that of --model."},
    {"heads", FLAG_INTEGER, FIELD(heads), "model", 1, 4096, "model=0",
     "The number of attention heads, which must divide --hidden. With model, it is that of --model."},
    {"hidden", FLAG_INTEGER, FIELD(hidden), "model", 1, 65536, "model=0",
     "The width. With model, it is that of --model."},
    {"intermediate", FLAG_INTEGER, FIELD(intermediate), "model", 1, 1 << 20, "model=0",
     "The width inside the layers. With model, it is 4 times --hidden."},
    {"dropout", FLAG_NUMBER, FIELD(dropout), "0.1", 0, 0.95, NULL,
     "The dropout rate of embeddings, branches and the head."},
    {"init", FLAG_TEXT, FIELD(init), "", 0, 0, NULL,
     "Starts from the model in this folder, or this file with its config.json beside it: a BERT, RoBERTa, XLM-R, "
     "CamemBERT, ELECTRA, Longformer or DeBERTa v2 or v3."},

    {"Precision", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"precision", FLAG_SETTING, FIELD(training.amp), "auto", 0, 0, "dtype",
     "The dtype of autocast: auto, fp32, tf32, fp16, bf16 or fp8. With fp8, the linear layers of all blocks but the "
     "first and the last compute in fp8, and all else in bf16."},
    {"nan-action", FLAG_SETTING, FIELD(training.amp), "skip", 0, 0, "nan_action",
     "What to do after an anomaly that no loss scale cures: report, skip or stop."},
};
static const flag_row step_flags[] = {
    {"batch", FLAG_INTEGER, FIELD(batch), "16", 1, 1 << 20, NULL,
     "The number of texts in a micro-batch of a rank, which is padded to its longest text. A resumed run takes its "
     "share of the batch of the checkpoint."},
    {"epochs", FLAG_INTEGER, FIELD(epochs), "3", 0, 1 << 20, NULL,
     "The number of passes over the data. With 0, the program only evaluates the model and saves it."},
    {"lr", FLAG_NUMBER, FIELD(lr), "auto", 0, 100, "auto=-1",
     "The highest learning rate. With auto, it is 5e-5 with --init, or else 1e-3."},
    {"warmup", FLAG_NUMBER, FIELD(warmup), "0.1", 0, 1, NULL,
     "The part of the steps in which the learning rate rises. After it, the rate falls linearly to 0."},
    {"weight-decay", FLAG_NUMBER, FIELD(weight_decay), "0.01", 0, 10, NULL,
     "The weight decay, which applies to matrices only."},
    {"shuffle-off", FLAG_SWITCH, FIELD(shuffle_off), "off", 0, 0, NULL, "Keeps the order of the file in every epoch."},
    {"seed", FLAG_INTEGER, FIELD(seed), "1", 0, 9e15, NULL, "The seed of weights, data order and dropout."},

    {"Files", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"out", FLAG_TEXT, FIELD(training.out), "out", 0, 0, NULL,
     "OUT: all files whose path you do not give are in the folder OUT/classifier."},
};
static const flag_row report_flags[] = {
    {"Reports", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"log-interval", FLAG_SETTING, FIELD(training.amp), "10", 0, 0, "log_interval",
     "The number of steps between two records in the metrics, or off. Every epoch has a record."},
    {"compat", FLAG_SWITCH, FIELD(compat), "off", 0, 0, NULL,
     "Compares every precision with fp32 on two layers of each architecture, and trains nothing."},
    {"compat-scale", FLAG_INTEGER, FIELD(compat_scale), "1", 1, 64, NULL,
     "Divides the vocabularies and widths of the architectures of --compat by this number."},
    {"help", FLAG_SWITCH, FIELD(help), "off", 0, 0, NULL, "Prints this text."},
};
static flag_program flag_given = {
    .program = "train_classifier", .summary = "fine-tunes an encoder on labelled text in mixed precision with amp.h",
    .parts = {{model_flags, FLAG_ROWS(model_flags), 0},
              {precision_flags, FLAG_ROWS(precision_flags), FIELD(training)},
              {optimizer_flags, FLAG_ROWS(optimizer_flags), FIELD(training)},
              {step_flags, FLAG_ROWS(step_flags), 0},
              {file_flags, FLAG_ROWS(file_flags), FIELD(training)},
              {report_flags, FLAG_ROWS(report_flags), 0},
              {scaler_flags, FLAG_ROWS(scaler_flags), FIELD(training.amp)},
              {rank_flags, FLAG_ROWS(rank_flags), FIELD(training.ranks)}},
    .ending = training_ending
};
static const char *const session_options[] = {NULL};        /* it adds none to those of both trainers */

/* ==== Labelled text ============================================================================== */

typedef struct label_names {
    char **name;                    /* NULL entries: labels are numbers */
    int64_t n;
    int numbers;                    /* 1: every label so far is a number below 65536 */
} label_names;

typedef struct text_item { int64_t at, length, line; int32_t label; } text_item;

/* Texts of the file, then as tokens with [CLS] and [SEP]. */
typedef struct text_set {
    void *file;
    size_t bytes;
    text_item *items;
    int64_t n;
    int32_t *tokens;                /* where an encoded item's at and length point */
} text_set;

enum { MOST_LABELS = 65536 };

static void text_set_close(text_set *t) {
    amp_file_free(NULL, t->file, t->bytes);
    free(t->items); free(t->tokens);
    memset(t, 0, sizeof *t);
}
static void label_names_close(label_names *l) {
    int64_t i;
    for (i = 0; i < l->n; i++) free(l->name[i]);
    free(l->name);
    memset(l, 0, sizeof *l);
}

/* The number that a text is, or -1. */
static int64_t label_number(const char *text, int64_t n) {
    int64_t value = 0, i;
    for (i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9' || i > 5) return -1;
        value = value * 10 + (text[i] - '0');
    }
    return n > 0 && value < MOST_LABELS ? value : -1;
}

/* The index of a name, added if it is new and `add` is 1; -1: unknown, -2: no memory. */
static int64_t label_place(label_names *l, const char *text, int64_t n, int add) {
    int64_t i;
    char **more, *copy;
    for (i = 0; i < l->n; i++) if (strncmp(l->name[i], text, (size_t)n) == 0 && l->name[i][n] == 0) return i;
    if (!add) return -1;
    more = (char **)realloc(l->name, (size_t)(l->n + 1) * sizeof *more);
    if (more == NULL) return -2;
    l->name = more;
    copy = (char *)malloc((size_t)n + 1);
    if (copy == NULL) return -2;
    memcpy(copy, text, (size_t)n);
    copy[n] = 0;
    l->name[l->n] = copy;
    return l->n++;
}

/* One line "label<TAB>text" without its end. */
static amp_result read_line(text_set *t, label_names *l, const char *path, const char *line, int64_t n, int64_t number,
                            int add) {
    const char *tab = (const char *)memchr(line, '\t', (size_t)n);
    text_item *item = &t->items[t->n];
    int64_t length = tab != NULL ? tab - line : 0, place, i;
    uint32_t code;
    if (tab == NULL)
        return ex_fail(AMP_ERR_FORMAT, "%s: line %lld: there is no tab; a line must be a label, a tab and a text", path,
                            (long long)number);
    if (length == 0)
        return ex_fail(AMP_ERR_FORMAT, "%s: line %lld: there is no label before the tab", path, (long long)number);
    if (length > 200)
        return ex_fail(AMP_ERR_FORMAT, "%s: line %lld: the label has %lld bytes, and at most 200 are allowed", path,
                       (long long)number, (long long)length);
    if (memchr(line, 0, (size_t)length) != NULL)
        return ex_fail(AMP_ERR_FORMAT, "%s: line %lld: the label has a zero byte", path, (long long)number);
    for (i = 0; i < length; i += place) {
        place = utf8_read(line + i, length - i, &code);
        if (code == 0xfffd && place == 1)
            return ex_fail(AMP_ERR_FORMAT, "%s: line %lld: the label is not UTF-8", path, (long long)number);
    }
    place = label_place(l, line, length, add);
    if (place == -2) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for the labels", path);
    if (place < 0)
        return ex_fail(AMP_ERR_LABEL, "%s: line %lld: the label %.*s is not in --data", path, (long long)number,
                            (int)length, line);
    if (place >= MOST_LABELS)
        return ex_fail(AMP_ERR_LABEL, "%s: line %lld: there are more than %d labels", path, (long long)number,
                       MOST_LABELS);
    if (label_number(line, length) < 0) l->numbers = 0;
    item->label = (int32_t)place;
    item->line = number;
    item->at = tab + 1 - (const char *)t->file;
    item->length = line + n - tab - 1;
    t->n++;
    return AMP_OK;
}

/* Reads a file without its empty lines.  add 1: its labels are new. */
static amp_result text_set_read(text_set *t, label_names *l, const char *path, int add) {
    const char *at, *end;
    int64_t lines = 1, number;
    memset(t, 0, sizeof *t);
    EX_TRY(amp_file_read_all(NULL, path, &t->file, &t->bytes));
    at = (const char *)t->file;
    end = at + t->bytes;
    for (; at < end; at++) lines += *at == '\n';
    t->items = (text_item *)calloc((size_t)lines, sizeof *t->items);
    if (t->items == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for %lld lines", path, (long long)lines);
    at = (const char *)t->file;
    for (number = 1; at < end; number++) {
        const char *stop = (const char *)memchr(at, '\n', (size_t)(end - at));
        int64_t n = (stop != NULL ? stop : end) - at;
        const char *next = stop != NULL ? stop + 1 : end;
        if (n > 0 && at[n - 1] == '\r') n--;
        if (n > 0) EX_TRY(read_line(t, l, path, at, n, number, add));
        at = next;
    }
    return t->n > 0 ? AMP_OK : ex_fail(AMP_ERR_FORMAT, "%s: holds no text", path);
}

/* If all labels are numbers, they are the classes; names are numbered in order of appearance. */
static amp_result settle_labels(const settings *set, label_names *l, text_set *sets[2], int64_t *classes) {
    int64_t i, k, most = 0;
    for (k = 0; k < 2; k++)
        for (i = 0; i < sets[k]->n; i++) {
            text_item *item = &sets[k]->items[i];
            const char *name = l->name[item->label];
            if (l->numbers) item->label = (int32_t)label_number(name, (int64_t)strlen(name));
            if (item->label > most) most = item->label;
            if (set->classes > 0 && item->label >= set->classes)
                return flag_refuse("classes", "line %lld of %s has the label %.60s, which is class %d, counted from 0",
                              (long long)item->line, k == 0 ? "--data" : "--valid", name, (int)item->label);
        }
    if (l->n < 2 && set->classes == 0)
        return flag_refuse("data", "has only one label, %.60s: a classifier needs two or more", l->name[0]);
    *classes = set->classes > 0 ? set->classes : most + 1;
    if (*classes < 2) *classes = 2;
    if (l->numbers) label_names_close(l);
    return AMP_OK;
}

/* Every text becomes [CLS] tokens [SEP], or what the tokenizer has for them, at most seq long. */
static amp_result text_set_encode(text_set *t, words_model *w, int64_t seq) {
    int64_t i, used = 0, capacity = 0;
    for (i = 0; i < t->n; i++) {
        text_item *item = &t->items[i];
        const char *text = (const char *)t->file + item->at;
        int64_t n;
        if (used + seq > capacity) {
            int32_t *more =
                (int32_t *)realloc(t->tokens, (size_t)(capacity = 2 * capacity + seq + 4096) * sizeof *more);
            if (more == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the tokens");
            t->tokens = more;
        }
        n = words_encode(w, text, item->length, NULL, 0, seq, t->tokens + used, NULL);
        if (n < 0) return AMP_ERR_MEMORY;
        if (n == 0) t->tokens[used + n++] = w->pad;         /* an empty text, and a tokenizer that adds nothing */
        item->at = used;
        item->length = n;
        used += n;
    }
    return AMP_OK;
}

/* ==== Made-up sentences ========================================================================== */

static const char *const made_of[] = {
    "the film",  "the plot",  "this story", "the acting", "the music", "her second novel",
                                      "the ending", "that scene", "the whole cast", "the dialogue"};
static const char *const made_how[] = {
    "", "really ", "simply ", "rather ", "quite ", "never less than ", "at times ", "from start to end "};
static const char *const made_good[] = {
    "wonderful", "moving", "clever", "brilliant", "charming", "a delight", "superb", "funny"};
static const char *const made_bad[] = {
    "dreadful", "boring", "clumsy", "tedious", "shallow", "a waste of time", "awful", "lifeless"};
static const char *const made_end[] = {
    ".", ", I thought.", "!", ", they say.", " and I would see it again.", " but short."};
enum { MADE_TEXTS = 1200 };

#define COUNT(array) (sizeof array / sizeof *array)

/* Sentences like "the plot was not rather boring." with the label good or bad; "not" flips the label. */
static amp_result make_sentences(const char *path) {
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    int64_t i;
    for (i = 0; i < MADE_TEXTS; i++) {
        uint32_t r[4], word, turned, good;
        amp_philox(11, 0, (uint64_t)i, r);
        good = r[0] & 1;
        turned = (r[0] >> 1) % 4 == 0;
        word = (r[0] >> 8) % (uint32_t)COUNT(made_good);
        json_add(&b, "%s\t%s was %s%s%s%s\n", good != turned ? "good" : "bad", made_of[r[1] % COUNT(made_of)],
                 turned ? "not " : "", made_how[r[2] % COUNT(made_how)], good ? made_good[word] : made_bad[word],
                 made_end[r[3] % COUNT(made_end)]);
    }
    result = b.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the sentences")
                      : ex_file_write(path, b.text, b.used);
    free(b.text);
    return result;
}

/* Adds the words of these texts that the vocabulary lacks. */
static void make_words(json_buffer *b, const char *const *texts, size_t n) {
    char word[32], line[40];
    size_t i;
    for (i = 0; i < n; i++) {
        const char *at = texts[i];
        while (*at != 0) {
            size_t length = strchr(",.!", *at) != NULL ? 1 : strcspn(at, " ,.!");
            snprintf(word, sizeof word, "%.*s", (int)length, at);
            if (word[0] >= 'A' && word[0] <= 'Z') word[0] = (char)(word[0] + 32);
            snprintf(line, sizeof line, "\n%s\n", word);
            if (length > 0 && strstr(b->text, line) == NULL) json_add(b, "%s\n", word);
            at += length > 0 ? length : 1;
        }
    }
}

/* The vocabulary of these sentences. */
static amp_result make_vocabulary(const char *path) {
    static const char *const others[] = {"was", "not"};
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    json_add(&b, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n");
    if (!b.failed) {
        make_words(&b, made_of, COUNT(made_of)); make_words(&b, made_how, COUNT(made_how));
        make_words(&b, made_good, COUNT(made_good)); make_words(&b, made_bad, COUNT(made_bad));
        make_words(&b, made_end, COUNT(made_end)); make_words(&b, others, COUNT(others));
    }
    result = b.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the vocabulary")
                      : ex_file_write(path, b.text, b.used);
    free(b.text);
    return result;
}

/* ==== The run: everything that training needs, opened from the settings ========================== */

typedef struct run {
    settings set;
    char data[PATH_MAX], vocab[PATH_MAX], metrics_path[PATH_MAX];
    char save[PATH_MAX];            /* NAME of NAME.state and NAME.safetensors; "": nothing.  vocab "": bytes */
    amp_context *amp;
    amp_choice choice;
    label_names labels;             /* n 0: labels are numbers */
    text_set texts, valid;
    int64_t *order;                 /* of texts: without --valid, those to evaluate on come last */
    int64_t n_train, n_valid, classes;
    uint32_t crc;                   /* of the file of texts */
    words_model tokenizer;
    encoder_file file;              /* of --init; data NULL: none */
    encoder model;
    int n_fp8;                      /* weights that compute in fp8 */
    int fresh;                      /* parameters of the head that the file did not have */
    int other_labels;               /* 1: the data has labels that the file lacks */
    char described[400];            /* remarks on its config.json, or "" */
    amp_scaler *scaler;             /* NULL: none */
    amp_optimizer *optimizer;
    int32_t *host;                  /* a batch: lengths, labels, ids */
    int32_t *device;
    amp_monitor *monitor;           /* keeps the metrics of steps and epochs */
    metrics_line metrics;           /* other lines go through the monitor too; with --compat into the file itself */
    int64_t start, step, steps;     /* optimizer steps: where this session began; done; in all */
    int64_t epoch, first;           /* counted from 1; texts of it that were trained on, by all ranks together */
    int64_t micro;                  /* micro-batches since the last step */
    amp_step_info info;             /* of that step so far: its micro-batches may lie in two epochs */
    amp_step_record record;         /* the last one that arrived */
    int64_t records, applied;       /* arrived in this session; of them, those that changed the weights */
    int stop;                       /* 1: all ranks stop here */
    char anomaly[128];              /* why training stops, or "" */
    double valid_loss, accuracy;    /* of the last evaluation */
} run;

/* Refuses flags that are legal alone but not together. */
static amp_result check_flags(const settings *set) {
    static const char *const of_compat[] = {"compat",         "compat-scale", "level",   "policy",
                                            "allow-fallback", "device",       "threads", "out",
                                            "metrics",        "help",         NULL};
    int i, k;
    for (i = 0; i < flag_count() && set->compat; i++) {
        const char *name = flag_at(i)->name;
        for (k = 0; of_compat[k] != NULL && flag_given.on_command_line[i] && strcmp(of_compat[k], name) != 0; k++) {}
        if (flag_given.on_command_line[i] && of_compat[k] == NULL)
            return flag_refuse(name, "contradicts --compat, which has its own models and data");
    }
    if (set->compat && ranks.world > 1) return flag_refuse("compat", "works in one process only");
    if (flag_was_given("compat-scale") && !set->compat) return flag_refuse("compat-scale", "needs --compat");
    EX_TRY(training_flags_check(&set->training));
    if (set->training.amp.nan_action == AMP_NAN_RECOVER)
        return flag_refuse("nan-action", "recover, here or in settings, is for train_gpt, and this program does not "
                                         "have it");
    if (set->training.amp.memory_efficient || set->training.amp.tensor_stats_interval > 0)
        return ex_fail(AMP_ERR_CONFLICT, "%s is a setting of train_gpt, and not of this program",
                       set->training.amp.memory_efficient ? "memory_efficient" : "tensor_stats_interval");
    if (flag_was_given("validation") && *set->valid != 0)
        return flag_refuse("validation", "contradicts --valid, which names the texts to evaluate on");
    return AMP_OK;
}

/* All settings; *resumed: the checkpoint of --resume, or NULL. */
static amp_result read_settings(int argc, char **argv, settings *set, amp_state **resumed) {
    amp_optimizer_desc optimizer;
    amp_monitor_desc monitor;
    memset(set, 0, sizeof *set);
    *resumed = NULL;
    EX_TRY(flag_read(argc, argv));
    EX_TRY(resume_open(resumed));
    EX_TRY(flag_parse_all(set));
    EX_TRY(settings_read(set, &set->training, *resumed));
    EX_TRY(settings_fill(&set->training.amp, &optimizer, &monitor));
    set->accumulation = optimizer.accumulation;
    if (*resumed != NULL) EX_TRY(rank_flags_batch(&set->training.ranks, *resumed, set->accumulation, &set->batch));
    return check_flags(set);
}

static amp_result open_context(run *r) {
    EX_TRY(training_open_context(&r->set.training, r->set.seed, NULL, &r->amp));
    return amp_query_choice(r->amp, &r->choice);
}

/* --compat saves nothing, and its metrics are a file of their own. */
static amp_result open_files(run *r) {
    if (r->set.compat) r->set.training.save = "none";
    EX_TRY(training_open_files(&r->set.training, "/classifier", r->save, r->metrics_path));
    if (r->metrics_path[0] == 0) return AMP_OK;
    if (!r->set.compat) return metrics_line_open(&r->metrics);
    r->metrics.file = fopen(r->metrics_path, "w");
    return r->metrics.file != NULL ? AMP_OK : flag_refuse("metrics", "%s: %s", r->metrics_path, strerror(errno));
}

/* The order of an epoch: Fisher & Yates 1938. */
static void shuffle(int64_t *order, int64_t n, uint64_t seed, uint64_t epoch) {
    int64_t i;
    for (i = n - 1; i > 0; i--) {
        uint32_t words[4];
        int64_t other, kept = order[i];
        amp_philox(seed, epoch, (uint64_t)i, words);
        other = (int64_t)(((uint64_t)words[0] << 32 | words[1]) % (uint64_t)(i + 1));
        order[i] = order[other];
        order[other] = kept;
    }
}

static int compare_places(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* Reads texts and labels, and chooses those to evaluate on. */
static amp_result open_data(run *r) {
    const settings *set = &r->set;
    text_set *sets[2];
    char why[400];
    int64_t i;
    sets[0] = &r->texts; sets[1] = &r->valid;
    r->labels.numbers = 1;
    EX_TRY(training_data_path(&set->training, set->data, "/classifier/sentences.tsv", make_sentences, r->data));
    if (text_set_read(&r->texts, &r->labels, r->data, 1) != AMP_OK) return flag_refuse("data", "%s", ex_because(why));
    r->crc = st_crc32c((const unsigned char *)r->texts.file, r->texts.bytes);
    if (*set->valid != 0 && text_set_read(&r->valid, &r->labels, set->valid, r->labels.numbers) != AMP_OK)
        return flag_refuse("valid", "%s", ex_because(why));
    EX_TRY(settle_labels(set, &r->labels, sets, &r->classes));
    r->order = (int64_t *)malloc((size_t)r->texts.n * sizeof *r->order);
    if (r->order == NULL)
        return ex_fail(AMP_ERR_MEMORY, "no memory for the order of %lld texts", (long long)r->texts.n);
    for (i = 0; i < r->texts.n; i++) r->order[i] = i;
    shuffle(r->order, r->texts.n, (uint64_t)set->seed, 0);
    r->n_valid = r->valid.n;
    if (*set->valid == 0) r->n_valid = (int64_t)(set->validation * (double)r->texts.n + 0.5);
    if (r->n_valid < 1) r->n_valid = 1;
    r->n_train = *set->valid != 0 ? r->texts.n : r->texts.n - r->n_valid;
    if (set->shuffle_off && r->n_train > 0) qsort(r->order, (size_t)r->n_train, sizeof *r->order, compare_places);
    return r->n_train > 0 ? AMP_OK
                          : flag_refuse("data", "%lld texts are too few to train and to evaluate on",
                                        (long long)r->texts.n);
}

/* Opens --init, and the tokenizer: --vocab, or the one beside --init, or that of the made-up sentences, or bytes. */
static amp_result open_tokenizer(run *r) {
    const settings *set = &r->set;
    char why[400];
    int bytes = strcmp(set->vocab, "bytes") == 0, beside = *set->vocab == 0 && *set->init != 0;
    amp_result result;
    if (!bytes) snprintf(r->vocab, sizeof r->vocab, "%.4000s", set->vocab);
    if (!bytes && !beside && r->vocab[0] == 0 && *set->data == 0)
        EX_TRY(training_data_path(&set->training, "", "/classifier/vocab.txt", make_vocabulary, r->vocab));
    if (*set->init != 0 && encoder_file_open(&r->file, set->init) != AMP_OK)
        return flag_refuse("init", "%s", ex_because(why));
    if (!beside && r->vocab[0] == 0 && set->cased)
        return flag_refuse("cased", "needs a vocabulary, because bytes keep their case: drop it, or give --vocab");
    if (beside) {
        result = words_open(&r->tokenizer, r->file.weights.path, (int)set->cased);
        snprintf(r->vocab, sizeof r->vocab, "%.4000s", r->tokenizer.path);
    } else if (r->vocab[0] == 0) result = words_bytes(&r->tokenizer, 1);
    else result = words_open_file(&r->tokenizer, r->vocab, NULL, (int)set->cased);
    return result == AMP_OK ? AMP_OK : flag_refuse(beside ? "init" : "vocab", "%s%s", ex_because(why), beside &&
                                                   result == AMP_ERR_OPEN ? "; give --vocab" : "");
}

typedef struct model_size { const char *name; int64_t layers, heads, hidden; } model_size;
static const model_size model_sizes[] = {
    {"tiny", 2, 2, 64}, {"mini", 4, 4, 256}, {"small", 4, 8, 512}, {"base", 12, 12, 768}, {"large", 24, 16, 1024},
};

static const model_size *size_of(const settings *set) {
    const model_size *size = model_sizes;
    while (strcmp(size->name, set->model) != 0) size++;
    return size;
}

static amp_result shape_from_flags(const run *r, encoder_config *c) {
    const settings *set = &r->set;
    const model_size *size = size_of(set);
    c->layers = set->layers > 0 ? set->layers : size->layers;
    c->heads = set->heads > 0 ? set->heads : size->heads;
    c->hidden = set->hidden > 0 ? set->hidden : size->hidden;
    c->intermediate = set->intermediate > 0 ? set->intermediate : 4 * c->hidden;
    c->vocab = r->tokenizer.n;
    c->types = 2;
    c->positions = set->seq > 512 ? set->seq : 512;
    if (c->hidden % c->heads != 0)
        return flag_refuse(set->heads > 0 ? "heads" : "hidden", "%lld heads do not divide a width of %lld",
                      (long long)c->heads, (long long)c->hidden);
    return AMP_OK;
}

static amp_result check_shape(const settings *set, const encoder_config *file) {
    const model_size *size = size_of(set);
    const model_dimension dimensions[] = {{"layers", set->layers, size->layers, file->layers},
                                          {"heads", set->heads, size->heads, file->heads},
                                          {"hidden", set->hidden, size->hidden, file->hidden},
                                          {"intermediate", set->intermediate, 4 * size->hidden, file->intermediate}};
    return training_check_dimensions(dimensions, 4);
}

/* 1: the model's classes have names of their own. */
static int has_labels(const encoder_file *file) {
    char name[32];
    int64_t i;
    for (i = 0; i < file->n_labels; i++) {
        snprintf(name, sizeof name, "LABEL_%lld", (long long)i);
        if (strcmp(file->labels[i], name) != 0) return 1;
    }
    return 0;
}

/* Labels that the model of --init names get its numbers.  If it lacks one, its last layer cannot be used, as if it had
   another number of classes. */
static amp_result adopt_labels(run *r) {
    label_names theirs;
    text_set *sets[2];
    int64_t *place, i, k;
    theirs.name = r->file.labels; theirs.n = r->file.n_labels; theirs.numbers = 0;
    if (r->labels.n == 0 || r->file.config.classes == 0 || !has_labels(&r->file)) return AMP_OK;
    if (r->set.classes > 0 && r->set.classes != theirs.n) return AMP_OK;
    place = (int64_t *)malloc((size_t)r->labels.n * sizeof *place);
    if (place == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the labels");
    for (i = 0; i < r->labels.n && !r->other_labels; i++) {
        place[i] = label_place(&theirs, r->labels.name[i], (int64_t)strlen(r->labels.name[i]), 0);
        r->other_labels = place[i] < 0;
    }
    sets[0] = &r->texts; sets[1] = &r->valid;
    for (k = 0; k < 2 && !r->other_labels; k++)
        for (i = 0; i < sets[k]->n; i++) sets[k]->items[i].label = (int32_t)place[sets[k]->items[i].label];
    free(place);
    if (r->other_labels) { r->file.config.classes = 0; return AMP_OK; }
    label_names_close(&r->labels);
    r->labels = theirs;
    r->classes = theirs.n;
    r->file.labels = NULL; r->file.n_labels = 0;
    return AMP_OK;
}

static amp_result shape_from_file(run *r, encoder_config *c) {
    const settings *set = &r->set;
    char why[400];
    *c = r->file.config;
    if (words_check(&r->tokenizer, c->vocab) != AMP_OK)
        return flag_refuse(*set->vocab != 0 ? "vocab" : "init", "%s", ex_because(why));
    if (set->seq > c->positions - encoder_kinds[c->family].first)
        return flag_refuse("seq", "the model of --init has %lld positions",
                           (long long)(c->positions - encoder_kinds[c->family].first));
    EX_TRY(check_shape(set, c));
    EX_TRY(adopt_labels(r));
    /* its head knows more labels */
    if (r->labels.n == 0 && set->classes == 0 && c->classes > r->classes) r->classes = c->classes;
    return AMP_OK;
}

static amp_result open_model(run *r) {
    const settings *set = &r->set;
    encoder_config config;
    char why[400];
    amp_result result;
    memset(&config, 0, sizeof config);
    EX_TRY(*set->init != 0 ? shape_from_file(r, &config) : shape_from_flags(r, &config));
    config.classes = r->classes;
    config.batch = set->batch;
    config.seq = set->seq;
    config.dropout = (float)set->dropout;
    EX_TRY(model_activations(r->amp, &config.activations));
    result = encoder_create(&r->model, r->amp, &config);
    if (result == AMP_OK)
        result = model_fp8_layers(r->amp, r->model.params, r->model.n_params, "encoder.layer.", config.layers, 0,
                                  &r->n_fp8);
    return result == AMP_ERR_MEMORY ? flag_refuse(*set->init != 0 ? "batch" : "model", "%s", ex_because(why)) : result;
}

/* Sets weights through the optimizer, so that masters keep full precision; a checkpoint's masters are in its state.
   Then the classes' names, replacing the file's. */
static amp_result open_weights(run *r, const amp_state *resumed) {
    const settings *set = &r->set;
    char why[400];
    amp_result result;
    r->model.optimizer = r->optimizer;
    if (*set->init == 0) result = encoder_init(&r->model, (uint64_t)set->seed);
    else {
        result = encoder_file_load(&r->file, &r->model, (uint64_t)set->seed, &r->fresh);
        memcpy(r->described, r->file.described.note, sizeof r->described);
        encoder_file_close(&r->file);
        if (result != AMP_OK) return flag_refuse("init", "%s", ex_because(why));
    }
    EX_TRY(result);
    if (resumed != NULL) EX_TRY(model_load_state(r->amp, r->model.params, r->model.n_params, resumed));
    return r->labels.n > 0 ? encoder_name_labels(&r->model, (const char *const *)r->labels.name, r->labels.n) : AMP_OK;
}

static amp_result open_optimizer(run *r) {
    const settings *set = &r->set;
    amp_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.params = r->model.params;
    desc.n_params = r->model.n_params;
    desc.lr = (float)amp_explicit(set->lr);
    desc.weight_decay = set->weight_decay;
    desc.seed = (uint64_t)set->seed;
    return training_open_optimizer(&set->training, r->amp, &desc, &r->optimizer);
}

/* Texts in a micro-batch of all ranks; such batches in an epoch. */
static int64_t texts_at_once(const run *r) { return r->set.batch * ranks.world; }
static int64_t batches_of(const run *r, int64_t texts) { return (texts + texts_at_once(r) - 1) / texts_at_once(r); }

/* Where training goes on, and when it ends: what is left of this epoch and the later ones. */
static amp_result open_position(run *r, const amp_state *resumed) {
    const settings *set = &r->set;
    int64_t at[2] = {1, 0}, data[2], left, every = set->training.ranks.sync_every;
    if (resumed != NULL) {
        EX_TRY(amp_state_get(resumed, "train.data", AMP_I64, data, 2));
        if (data[0] != r->n_train || data[1] != (int64_t)r->crc)
            return flag_refuse("resume", "%s was trained on other data, or on another part of it",
                               set->training.resume);
        EX_TRY(amp_state_get(resumed, "train.step", AMP_I64, &r->step, 1));
        EX_TRY(amp_state_get(resumed, "train.position", AMP_I64, at, 2));
    }
    r->start = r->step;
    r->epoch = at[0]; r->first = at[1];
    left = batches_of(r, r->n_train - r->first) + (set->epochs - r->epoch) * batches_of(r, r->n_train);
    if (set->epochs == 0) left = 0;
    r->steps = r->step + (left > 0 ? left : 0) / set->accumulation;
    if (resumed == NULL && set->epochs > 0 && r->steps == 0)
        return flag_refuse("accumulation", "a step takes %lld micro-batches, but the training has %lld",
                           (long long)set->accumulation, (long long)left);
    if (every > 0 && batches_of(r, r->n_train) % (every * set->accumulation) != 0)
        return flag_refuse("sync-every", "an epoch of %lld micro-batches would end between two combinations",
                           (long long)batches_of(r, r->n_train));
    return AMP_OK;
}

static amp_result open_monitor(run *r) {
    amp_monitor_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.optimizer = r->optimizer;
    desc.scaler = r->scaler;
    desc.epoch = r->epoch;
    return training_open_monitor(&r->set.training, r->amp, &desc, r->metrics_path, &r->monitor);
}

/* Room for a batch on host and device. */
static amp_result open_batches(run *r) {
    int64_t n = r->set.batch * (2 + r->set.seq);
    void *memory = NULL;
    r->host = (int32_t *)malloc((size_t)n * sizeof *r->host);
    if (r->host == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for a batch");
    EX_TRY(amp_alloc(r->amp, &memory, n * (int64_t)sizeof *r->device));
    r->device = (int32_t *)memory;
    return AMP_OK;
}

static void close_run(run *r) {
    amp_monitor_destroy(r->monitor);
    metrics_line_close(&r->metrics);
    amp_optimizer_destroy(r->optimizer);
    amp_scaler_destroy(r->scaler);
    encoder_destroy(&r->model);
    encoder_file_close(&r->file);
    amp_free(r->amp, r->device);
    text_set_close(&r->texts);
    text_set_close(&r->valid);
    label_names_close(&r->labels);
    words_close(&r->tokenizer);
    free(r->order); free(r->host);
    amp_close(r->amp);
    memset(r, 0, sizeof *r);
}

static amp_result open_run(run *r, const amp_state *resumed) {
    if (r->set.lr < 0) r->set.lr = *r->set.init != 0 ? 5e-5 : 1e-3;
    EX_TRY(open_data(r));
    EX_TRY(open_position(r, resumed));
    EX_TRY(open_tokenizer(r));
    EX_TRY(open_model(r));
    EX_TRY(text_set_encode(&r->texts, &r->tokenizer, r->set.seq));
    EX_TRY(text_set_encode(&r->valid, &r->tokenizer, r->set.seq));
    EX_TRY(training_open_scaler(&r->set.training, r->amp, &r->scaler));
    EX_TRY(open_optimizer(r));
    EX_TRY(open_weights(r, resumed));
    if (resumed != NULL) EX_TRY(checkpoint_load(r->amp, r->optimizer, r->scaler, resumed));
    EX_TRY(open_monitor(r));
    return open_batches(r);
}

/* ==== Checkpoints ================================================================================ */

static amp_result put_training(void *user, amp_state *state) {
    run *r = (run *)user;
    const int64_t at[] = {r->epoch, r->first}, data[] = {r->n_train, (int64_t)r->crc};
    EX_TRY(checkpoint_put_run(&r->set.training, session_options, r->step, r->set.batch, r->set.accumulation, state));
    EX_TRY(amp_state_put(state, "train.position", AMP_I64, at, 2));
    EX_TRY(amp_state_put(state, "train.data", AMP_I64, data, 2));
    return checkpoint_put_model(r->amp, r->model.params, r->model.n_params, r->optimizer, r->scaler, state);
}

static amp_result save_state(run *r) {
    return checkpoint_save(&r->set.training, r->save, r->amp, put_training, r);
}

/* ==== Training =================================================================================== */

/* Texts first to first + n - 1 of an order (NULL: the file's) on the device, padded to the longest. */
static amp_result load_batch(run *r, const text_set *t, const int64_t *order, int64_t first, int64_t n,
                             encoder_input *in, const int32_t **labels) {
    int32_t *lengths = r->host, *classes = r->host + n, *ids = r->host + 2 * n;
    int64_t i, longest = 0;
    for (i = 0; i < n; i++) {
        const text_item *item = &t->items[order != NULL ? order[first + i] : first + i];
        lengths[i] = (int32_t)item->length;
        classes[i] = item->label;
        if (item->length > longest) longest = item->length;
    }
    for (i = 0; i < n; i++) {
        const text_item *item = &t->items[order != NULL ? order[first + i] : first + i];
        int64_t k;
        memcpy(ids + i * longest, t->tokens + item->at, (size_t)item->length * sizeof *ids);
        for (k = item->length; k < longest; k++) ids[i * longest + k] = r->tokenizer.pad;
    }
    EX_TRY(amp_copy(r->amp, r->device, r->host, n * (2 + longest) * (int64_t)sizeof *ids, AMP_COPY_TO_DEVICE));
    EX_TRY(amp_sync(r->amp));          /* the host's copy is used again */
    memset(in, 0, sizeof *in);
    in->lengths = r->device;
    in->ids = r->device + 2 * n;
    in->batch = n;
    in->seq = longest;
    *labels = r->device + n;
    return AMP_OK;
}

/* Logits and loss, on the tape, which opens the region; with backward the first half of a step. */
static amp_result forward_loss(run *r, const encoder_input *in, const int32_t *labels, int backward) {
    return encoder_forward(&r->model, in, labels, amp_scaler_scale_ptr(r->scaler), backward);
}

/* One micro-batch: forward in a region, backward from the loss scale, and amp_step, which with the last one of a step
   checks, clips, updates the weights and moves the scale. */
static amp_result train_batch(run *r, const encoder_input *in, const int32_t *labels, float *loss) {
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_FORWARD));
    EX_TRY(forward_loss(r, in, labels, 1));
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_BACKWARD));
    EX_TRY(encoder_backward(&r->model));
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_OPTIMIZER));
    EX_TRY(amp_step(r->optimizer, r->scaler));
    return encoder_loss_read(&r->model, loss);
}

/* A rank's part of `texts` texts of which all ranks make a micro-batch, and its loss's weight, with which the mean over
   ranks is that over texts.  Where there are fewer texts than ranks, some have the same one. */
typedef struct share { int64_t first, n; float weight; } share;
static share share_of(int64_t texts) {
    int64_t world = ranks.world, rank = ranks.rank, rest = texts % world;
    share s;
    s.n = texts / world + (rank < rest);
    s.first = rank * (texts / world) + (rank < rest ? rank : rest);
    s.weight = (float)((double)(world * s.n) / (double)texts);
    if (texts >= world) return s;
    s.first = rank % texts;
    s.n = 1;
    s.weight = (float)((double)world / (double)(texts * ((world - s.first + texts - 1) / texts)));
    return s;
}

/* Mean loss and accuracy over the texts to evaluate on, in the training's precision; each text on one rank. */
static amp_result evaluate(run *r) {
    const text_set *t = r->valid.n > 0 ? &r->valid : &r->texts;
    const int64_t *order = r->valid.n > 0 ? NULL : r->order + r->n_train;
    int64_t first, right = 0, i, classes = r->classes, batch = r->set.batch;
    float *logits = (float *)malloc((size_t)(batch * classes) * sizeof *logits);
    double sums[2] = {0, 0};
    amp_result result = logits != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for logits");
    for (first = ranks.rank * batch; first < r->n_valid && result == AMP_OK; first += texts_at_once(r)) {
        int64_t n = r->n_valid - first < batch ? r->n_valid - first : batch;
        encoder_input in;
        const int32_t *labels;
        float loss = 0;
        result = load_batch(r, t, order, first, n, &in, &labels);
        if (result == AMP_OK) result = forward_loss(r, &in, labels, 0);
        if (result == AMP_OK) result = encoder_loss_read(&r->model, &loss);
        if (result == AMP_OK) result = amp_tape_read(r->model.tape, r->model.logits, logits, n * classes);
        for (i = 0; i < n; i++) right += ex_largest(logits + i * classes, classes) == r->host[n + i];
        sums[0] += (double)loss * (double)n;
    }
    free(logits);
    EX_TRY(result);
    sums[1] = (double)right;
    EX_TRY(ranks_sum(sums, 2));
    r->valid_loss = sums[0] / (double)r->n_valid;
    r->accuracy = sums[1] / (double)r->n_valid;
    return AMP_OK;
}

/* The next micro-batch of all ranks, and this rank's share of it.  Adds to the step's loss and tokens. */
static amp_result train_micro(run *r) {
    int64_t left = r->n_train - r->first, texts = left < texts_at_once(r) ? left : texts_at_once(r), i;
    share own = share_of(texts);
    encoder_input in;
    const int32_t *labels;
    float loss;
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_DATA));
    EX_TRY(load_batch(r, &r->texts, r->order, r->first + own.first, own.n, &in, &labels));
    in.weight = own.weight;
    for (i = 0; i < texts; i++) r->info.tokens += r->texts.items[r->order[r->first + i]].length;
    EX_TRY(train_batch(r, &in, labels, &loss));
    r->info.loss += (double)loss / (double)(r->set.accumulation * ranks.world);
    r->first += texts;
    r->micro++;
    return AMP_OK;
}

/* r->stop 1: as training_stop decides, or with --nan-action stop after an anomaly on any rank, of which ranks with
   --sync-every tell each other when they combine. */
static amp_result decide_stop(run *r) {
    const training_settings *set = &r->set.training;
    double anomaly = r->anomaly[0] != 0;
    EX_TRY(training_stop(set, r->start, r->step, r->steps, &r->stop));
    if (set->amp.nan_action != AMP_NAN_STOP || !training_ranks_alike(set, r->step)) return AMP_OK;
    EX_TRY(ranks_sum(&anomaly, 1));
    if (anomaly > 0 && r->anomaly[0] == 0)
        snprintf(r->anomaly, sizeof r->anomaly, "stopped because of an anomaly on another rank");
    r->stop |= anomaly > 0;
    return AMP_OK;
}

static void take_records(run *r) {
    while (amp_monitor_next(r->monitor, &r->record)) {
        r->records++;
        r->applied += r->record.result.applied;
        training_note_anomaly(&r->record, r->anomaly, sizeof r->anomaly);
    }
}

/* A step is done: its record and, at its interval, a checkpoint.  With --sync-every the loss is this rank's. */
static amp_result end_step(run *r, progress *bar) {
    char text[200];
    r->step++;
    r->micro = 0;
    if (r->set.training.ranks.sync_every == 0) EX_TRY(ranks_sum(&r->info.loss, 1));
    else r->info.loss *= ranks.world;
    EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_step(r->monitor, &r->info)));
    take_records(r);
    if (bar->terminal) {
        snprintf(text, sizeof text, "epoch %lld | step %lld/%lld | loss %.4f | scale %g", (long long)r->epoch,
                 (long long)r->step, (long long)r->steps, r->info.loss, (double)r->record.result.scale);
        progress_show(bar, (r->epoch - 1) * r->n_train + r->first, text, 0);
    }
    memset(&r->info, 0, sizeof r->info);
    if (r->set.training.save_interval > 0 && r->step % r->set.training.save_interval == 0 && r->step < r->steps) {
        EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_flush(r->monitor)));
        take_records(r);
        EX_TRY(save_state(r));
    }
    return AMP_OK;
}

/* What is left of an epoch, or less if training is to stop; *steps: done in it. */
static amp_result train_epoch(run *r, progress *bar, int64_t *steps) {
    const settings *set = &r->set;
    int64_t begun = r->step;
    amp_schedule schedule;
    double lr;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = AMP_SCHEDULE_LINEAR;
    schedule.lr = amp_explicit(set->lr);
    schedule.steps = r->steps;
    schedule.warmup = (int64_t)(set->warmup * (double)r->steps);
    while (r->first < r->n_train && r->step < r->steps) {
        if (r->micro == 0) EX_TRY(decide_stop(r));
        if (r->stop) break;
        EX_TRY(amp_schedule_lr(&schedule, r->step, &lr));
        EX_TRY(amp_optimizer_set_lr(r->optimizer, (float)lr));
        EX_TRY(train_micro(r));
        if (r->micro == set->accumulation) EX_TRY(end_step(r, bar));
    }
    *steps = r->step - begun;
    return AMP_OK;
}

static void report_epoch(run *r, const amp_epoch_record *e, double evaluation) {
    char rate[32];
    printf("epoch %lld: loss %.4f | validation loss %.4f, accuracy %.2f%% | %.2f s, %s tokens/s | skipped %lld",
           (long long)r->epoch, e->loss, r->valid_loss, 100 * r->accuracy, e->seconds,
           progress_grouped((int64_t)e->tokens_per_second, rate, sizeof rate), (long long)r->record.result.total_skips);
    if (e->anomalies > 0) printf(" | anomalies in %lld of %lld steps", (long long)e->anomalies, (long long)e->steps);
    printf("\n");
    metrics_begin(r->metrics.file, "evaluation");
    metrics_integer(r->metrics.file, "epoch", r->epoch);
    metrics_text(r->metrics.file, "precision", amp_dtype_name(r->choice.dtype));
    metrics_number(r->metrics.file, "loss", e->loss);
    metrics_number(r->metrics.file, "validation_loss", r->valid_loss);
    metrics_number(r->metrics.file, "accuracy", r->accuracy);
    metrics_number(r->metrics.file, "seconds", e->seconds);
    metrics_number(r->metrics.file, "evaluation_seconds", evaluation);
    metrics_integer(r->metrics.file, "skipped", r->record.result.total_skips);
    metrics_number(r->metrics.file, "scale", r->scaler != NULL ? (double)amp_scaler_scale(r->scaler) : 1);
    metrics_line_end(&r->metrics, r->monitor);
}

static amp_result report_start(run *r) {
    EX_TRY(evaluate(r));
    printf("before training: validation loss %.4f, accuracy %.2f%%\n", r->valid_loss, 100 * r->accuracy);
    metrics_begin(r->metrics.file, "start");
    metrics_number(r->metrics.file, "validation_loss", r->valid_loss);
    metrics_number(r->metrics.file, "accuracy", r->accuracy);
    metrics_line_end(&r->metrics, r->monitor);
    return AMP_OK;
}

/* Keeps evaluation out of the epochs' times: it comes between two of the monitor's epochs. */
static amp_result end_epoch(run *r, int64_t steps, progress *bar) {
    amp_epoch_record record;
    double began;
    memset(&record, 0, sizeof record);
    if (steps > 0) EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_epoch(r->monitor, &record)));
    take_records(r);
    if (r->stop) return AMP_OK;
    began = ex_seconds();
    EX_TRY(evaluate(r));
    progress_clear(bar);
    report_epoch(r, &record, ex_seconds() - began);
    return AMP_OK;
}

static void next_order(run *r, int64_t epoch) {
    if (!r->set.shuffle_off) shuffle(r->order, r->n_train, (uint64_t)r->set.seed, (uint64_t)epoch);
}

static amp_result train(run *r) {
    progress bar;
    int64_t epoch, steps;
    EX_TRY(report_start(r));
    progress_open(&bar, r->set.epochs * r->n_train);
    for (epoch = 1; epoch < r->epoch; epoch++) next_order(r, epoch);
    for (; r->epoch <= r->set.epochs && !r->stop; r->epoch++, r->first = 0) {
        next_order(r, r->epoch);
        EX_TRY(train_epoch(r, &bar, &steps));
        EX_TRY(end_epoch(r, steps, &bar));
        if (r->stop || r->epoch == r->set.epochs) break;
    }
    if (!r->stop) EX_TRY(decide_stop(r));
    progress_clear(&bar);
    return AMP_OK;
}

/* ==== Reports and files ========================================================================== */

static void print_run(const run *r) {
    const encoder_config *c = &r->model.config;
    const settings *set = &r->set;
    char a[32], b[32];
    int64_t i;
    if (*set->data == 0) printf("No --data: learning MADE-UP sentences, kept in %s.\n", r->data);
    if (*set->init == 0) printf("No --init: the weights are RANDOM.\n");
    training_print_precision(r->amp, r->scaler, r->n_fp8, "inner");
    printf("  storage     weights %s, activations %s, the stream between layers fp32\n",
           amp_dtype_name(r->model.params[0].weight.dtype), amp_dtype_name(c->activations));
    printf("  model       %s, %lld layers, %lld heads, width %lld, %s tokens: %s parameters%s%s\n",
           encoder_kinds[c->family].name, (long long)c->layers, (long long)c->heads, (long long)c->hidden,
           progress_grouped(c->vocab, a, sizeof a), progress_grouped(r->model.own.count, b, sizeof b),
           *set->init != 0 ? ", from " : ", random", set->init);
    if (r->described[0] != 0) printf("  config.json %s\n", r->described);
    if (r->fresh > 0 && r->other_labels)
        printf("  head        the last layer initialised: the data's labels are not all among the model's\n");
    else if (r->fresh > 0)
        printf("  head        %s initialised: the file has no layer for %lld classes\n",
               r->fresh > 2 ? "both layers" : "the last layer", (long long)r->classes);
    printf("  tokens      %s%s%s\n", words_kind_name(&r->tokenizer), r->vocab[0] != 0 ? " of " : "", r->vocab);
    printf("  data        %s: %s texts to train on, %s to evaluate on%s%s, %lld classes", r->data,
           progress_grouped(r->n_train, a, sizeof a), progress_grouped(r->n_valid, b,
                                                                       sizeof b), *set->valid != 0 ? " from " : "",
           set->valid, (long long)r->classes);
    for (i = 0; i < r->labels.n && i < 8; i++) printf("%s%s", i == 0 ? ": " : ", ", r->labels.name[i]);
    printf("%s\n  steps       %lld of %lld x %lld texts, learning rate %g\n", r->labels.n > 8 ? ", ..." : "",
           (long long)r->steps, (long long)set->accumulation, (long long)texts_at_once(r), set->lr);
    if (ranks.world > 1) printf("  ranks       %d\n", (int)ranks.world);
    if (r->start > 0) printf("  resumed     %s, after step %lld\n", set->training.resume, (long long)r->start);
}

static void metrics_run(run *r) {
    training_metrics_run(r->metrics.file, r->amp, r->scaler);
    metrics_text(r->metrics.file, "weights", *r->set.init != 0 ? r->set.init : "random");
    metrics_integer(r->metrics.file, "head_initialised", r->fresh);
    metrics_integer(r->metrics.file, "parameters", r->model.own.count);
    metrics_text(r->metrics.file, "data", r->data);
    metrics_integer(r->metrics.file, "texts", r->n_train);
    metrics_integer(r->metrics.file, "classes", r->classes);
    metrics_line_end(&r->metrics, r->monitor);
}

/* The weights for other programs, and what transformers' from_pretrained needs beside model.safetensors. */
static amp_result save_weights(run *r) {
    char path[PATH_MAX + 16];
    if (r->save[0] == 0 || ranks.rank > 0) return AMP_OK;
    snprintf(path, sizeof path, "%s.safetensors", r->save);
    EX_TRY(encoder_save(&r->model, path));
    printf("saved %s and %s.state\n", path, r->save);
    EX_TRY(words_save(&r->tokenizer, path));
    return training_beside(r->save, "config.json", path, sizeof path) ? encoder_save_config(&r->model, path) : AMP_OK;
}

/* ==== The architectures in every precision ======================================================= */

typedef struct architecture {
    const char *name;
    encoder_family family;
    int64_t vocab, positions, types, heads, hidden, intermediate, embedding, window, batch, seq;
    const char *note;
} architecture;

/* As in the config.json of bert-base-uncased, roberta-base, xlm-roberta-base, electra-small-discriminator,
   deberta-v3-base and longformer-base-4096, with two layers. */
static const architecture architectures[] = {
    {"BERT", ENCODER_BERT, 30522, 512, 2, 12, 768, 3072, 768, 0, 2, 48, ""},
    {"RoBERTa", ENCODER_ROBERTA, 50265, 514, 1, 12, 768, 3072, 768, 0, 2, 48, "positions start at 2"},
    {"XLM-R", ENCODER_ROBERTA, 250002, 514, 1, 12, 768, 3072, 768, 0, 2, 48, "positions start at 2"},
    {"ELECTRA", ENCODER_ELECTRA, 30522, 512, 2, 4, 256, 1024, 128, 0, 2, 48, "embeddings of width 128 are projected"},
    {"DeBERTa", ENCODER_DEBERTA, 128100, 512, 0, 12, 768, 3072, 768, 0, 2, 48,
     "attention by distance too, 256 buckets for distances up to 512"},
    {"Longformer", ENCODER_LONGFORMER, 50265, 4098, 1, 12, 768, 3072, 768, 256, 1, 576,
     "256 keys on each side; the first token sees all, by its own query, key and value layers"},
};

typedef struct compat {
    amp_context *amp;
    encoder model;
    encoder_input input;
    int32_t *memory;                /* device: lengths, labels and ids */
    const int32_t *labels;
    float *logits;                  /* device: in fp32, whatever they are stored in */
    amp_scaler *scaler;
    FILE *metrics;
} compat;

static void compat_close(compat *c) {
    encoder_destroy(&c->model);
    amp_free(c->amp, c->memory);
    amp_free(c->amp, c->logits);
    c->memory = NULL; c->logits = NULL;
}

/* Random tokens, the last sequence a third shorter, and labels. */
static amp_result compat_data(compat *c, const encoder_config *config) {
    int64_t n = config->batch * (2 + config->seq), i;
    int32_t *host = (int32_t *)malloc((size_t)n * sizeof *host);
    void *memory = NULL;
    amp_result result =
        host != NULL ? amp_alloc(c->amp, &memory, n * 4) : ex_fail(AMP_ERR_MEMORY, "no memory for a batch");
    c->memory = (int32_t *)memory;
    for (i = 0; i < n && result == AMP_OK; i++) {
        uint32_t words[4];
        amp_philox(21, 0, (uint64_t)i, words);
        host[i] = (int32_t)(words[0] % (uint32_t)config->vocab);
        if (i < config->batch) host[i] = (int32_t)(i + 1 < config->batch ? config->seq : config->seq - config->seq / 3);
        else if (i < 2 * config->batch) host[i] = (int32_t)(i % config->classes);
    }
    if (result == AMP_OK) result = amp_copy(c->amp, memory, host, n * 4, AMP_COPY_TO_DEVICE);
    if (result == AMP_OK) result = amp_sync(c->amp);
    free(host);
    memset(&c->input, 0, sizeof c->input);
    c->input.lengths = c->memory;
    c->input.ids = c->memory + 2 * config->batch;
    c->input.batch = config->batch;
    c->input.seq = config->seq;
    c->labels = c->memory + config->batch;
    return result;
}

static amp_result compat_open(compat *c, const architecture *a, int64_t scale) {
    encoder_config config;
    void *memory = NULL;
    memset(&config, 0, sizeof config);
    config.family = a->family;
    config.heads = a->heads / scale > 0 ? a->heads / scale : 1;
    config.hidden = a->hidden / a->heads * config.heads;
    config.intermediate = a->intermediate / a->heads * config.heads;
    config.embedding = a->embedding == a->hidden ? config.hidden : config.hidden / 2;
    config.vocab = a->vocab / scale; config.positions = a->positions; config.types = a->types; config.layers = 2;
    config.window = a->window / scale; config.classes = 3; config.batch = a->batch;
    config.seq = a->seq / scale > 4 ? a->seq / scale : 4;
    config.eps = a->family == ENCODER_BERT || a->family == ENCODER_ELECTRA ? 1e-12f : 1e-5f;
    if (a->family == ENCODER_DEBERTA) { config.distances.buckets = 256 / scale; config.eps = 1e-7f; }
    EX_TRY(encoder_create(&c->model, c->amp, &config));
    EX_TRY(encoder_init(&c->model, 31));
    EX_TRY(compat_data(c, &config));
    EX_TRY(amp_alloc(c->amp, &memory, config.batch * config.classes * (int64_t)sizeof *c->logits));
    c->logits = (float *)memory;
    return AMP_OK;
}

/* Forward and backward in the context's dtype. */
static amp_result compat_run(compat *c) {
    amp_context *amp = c->amp;
    encoder *e = &c->model;
    amp_tensor logits = amp_tensor2(c->logits, AMP_F32, e->config.batch, e->config.classes), stored;
    EX_TRY(model_activations(amp, &e->config.activations));
    EX_TRY(encoder_forward(e, &c->input, c->labels, amp_scaler_scale_ptr(c->scaler), 1));
    EX_TRY(amp_tape_tensor(e->tape, e->logits, &stored));
    EX_TRY(amp_cast(amp, &stored, &logits));
    return encoder_backward(e);
}

/* The same as an amp_step_function. */
static int compat_step(void *user, amp_context *amp) {
    (void)amp;
    return (int)compat_run((compat *)user);
}

/* One line of the table, and of the metrics; returns 1 if the precision passed. */
static int compat_print(compat *c, const architecture *a, const amp_verify_row *row) {
    static const char *const words[] = {"", "ok", "TOO FAR OFF", "NOT FINITE", "FAILED"};
    const char *values = row->first_bad[0] != 0               ? row->first_bad
                         : row->verdict == AMP_VERDICT_FAILED ? row->advice
                                                              : "finite";
    printf("%-11s %-9s %9.1e %9.1e %9.1e %9.1e  %-8s  %s\n", a->name, amp_dtype_name(row->dtype), row->output_error,
           row->output_bound, row->gradient_error, row->gradient_bound, values, words[row->verdict]);
    metrics_begin(c->metrics, "compat");
    metrics_text(c->metrics, "architecture", a->name);
    metrics_text(c->metrics, "precision", amp_dtype_name(row->dtype));
    metrics_integer(c->metrics, "vocab", c->model.config.vocab);
    metrics_integer(c->metrics, "hidden", c->model.config.hidden);
    metrics_number(c->metrics, "logits_error", row->output_error);
    metrics_number(c->metrics, "logits_bound", row->output_bound);
    metrics_number(c->metrics, "gradient_error", row->gradient_error);
    metrics_number(c->metrics, "gradient_bound", row->gradient_bound);
    metrics_text(c->metrics, "worst_gradient", row->worst_gradient);
    metrics_text(c->metrics, "first_bad", row->first_bad);
    metrics_number(c->metrics, "seconds", row->seconds);
    metrics_text(c->metrics, "verdict", words[row->verdict]);
    metrics_text(c->metrics, "advice", row->advice);
    metrics_end(c->metrics);
    return row->verdict == AMP_VERDICT_PASS;
}

/* All precisions of one architecture; *failed: how many are too far from fp32. */
static amp_result compat_architecture(compat *c, const architecture *a, int64_t scale, int *failed) {
    static const amp_dtype dtypes[] = {AMP_TF32, AMP_F16, AMP_BF16};
    amp_verify_desc desc;
    amp_verify_report report;
    amp_range logits;
    int64_t i;
    EX_TRY(compat_open(c, a, scale));
    memset(&desc, 0, sizeof desc);
    memset(&logits, 0, sizeof logits);
    logits.name = "logits"; logits.data = c->logits; logits.dtype = AMP_F32;
    logits.count = c->model.config.batch * c->model.config.classes;
    desc.step = compat_step; desc.user = c;
    desc.params = c->model.params; desc.n_params = c->model.n_params;
    desc.outputs = &logits; desc.n_outputs = 1;
    desc.scaler = c->scaler;
    desc.dtypes = dtypes; desc.n_dtypes = (int64_t)COUNT(dtypes);
    EX_TRY(amp_verify(c->amp, &desc, &report));
    printf("%-11s %-9s %9s %9s %9s %9s  %-8s  ok\n", a->name, "fp32", "reference", "", "", "", "finite");
    for (i = 0; i < report.n_rows; i++) *failed += !compat_print(c, a, &report.rows[i]);
    fflush(stdout);
    return AMP_OK;
}

static amp_result run_compat(run *r, int *failed) {
    compat c;
    size_t i;
    double began = ex_seconds();
    amp_result result;
    amp_memory_info memory;
    memset(&c, 0, sizeof c);
    c.amp = r->amp;
    c.metrics = r->metrics.file;
    result = amp_scaler_create(r->amp, &c.scaler, NULL);
    printf("Two layers of each architecture with random weights, one batch forward and backward, against fp32\n"
           "%-11s %-9s %9s %9s %9s %9s  %-8s  %s\n",
           "", "precision", "logits", "at most", "gradients", "at most", "values", "verdict");
    for (i = 0; i < COUNT(architectures) && result == AMP_OK && !ex_stop_requested; i++) {
        result = compat_architecture(&c, &architectures[i], r->set.compat_scale, failed);
        compat_close(&c);
    }
    amp_scaler_destroy(c.scaler);
    EX_TRY(result);
    printf("errors are relative norms; of gradients, the worst tensor's, relative to its layer; at most: 8 times the\n"
           "effect of rounding only the weights, see amp_verify; values: finite, or the first tensor that is not\n");
    for (i = 0; i < COUNT(architectures); i++)
        if (*architectures[i].note != 0) printf("%s: %s\n", architectures[i].name, architectures[i].note);
    if (amp_memory(r->amp, &memory) == AMP_OK)
        printf("%.1f s, %.1f GiB of device memory at most\n", ex_seconds() - began, (double)memory.peak / 1073741824);
    return AMP_OK;
}

/* ==== main ======================================================================================= */

/* Trains and saves. */
static amp_result main_run(run *r) {
    print_run(r);
    metrics_run(r);
    EX_TRY(checkpoint_try(r->save, put_training, r));
    EX_TRY(train(r));
    EX_TRY(save_state(r));
    EX_TRY(save_weights(r));
    if (r->anomaly[0] != 0) return ex_fail(AMP_ERR_STATE, "%s", r->anomaly);
    EX_TRY(training_check_applied(r->records, r->applied));
    return r->stop ? training_print_stopped(r->step, r->save) : AMP_OK;
}

int main(int argc, char **argv) {
    settings set;
    amp_state *resumed = NULL, *own = NULL;
    run r;
    amp_result result;
    int failed = 0;
    ex_begin();
    if (ranks_begin(&argc, &argv) != AMP_OK || read_settings(argc, argv, &set, &resumed) != AMP_OK)
        return training_fail(2);
    if (set.help) return flag_print_help(), ranks_end(0), 0;
    if (ranks_join(set.training.ranks.file, set.training.ranks.timeout) != AMP_OK) return training_fail(2);
    memset(&r, 0, sizeof r);
    r.set = set;
    result = open_context(&r);
    if (result == AMP_OK) result = resume_own(&set.training.ranks, r.amp, resumed, &own);
    if (result == AMP_OK) result = open_files(&r);
    if (result == AMP_OK && !set.compat) result = open_run(&r, own != NULL ? own : resumed);
    amp_state_destroy(own);
    amp_state_destroy(resumed);
    if (result != AMP_OK) { training_fail(2); close_run(&r); return 2; }
    ranks_stop_install();
    result = set.compat ? run_compat(&r, &failed) : main_run(&r);
    if (result != AMP_OK) { training_fail(1); close_run(&r); return 1; }
    close_run(&r);
    free(saved_options);
    ranks_end(0);
    return ex_stop_requested ? ranks_exit_code() : failed > 0;
}
