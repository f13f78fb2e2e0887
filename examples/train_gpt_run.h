/* train_gpt_run.h - a run of train_gpt: everything that training needs, opened from the settings; and its checkpoints.
 *
 * open_run calls one function for each part: read it from there. */
#ifndef TRAIN_GPT_RUN_H
#define TRAIN_GPT_RUN_H

#include "gpt_files.h"
#include "profile.h"
#include "tensorboard.h"
#include "token_files.h"
#include "train_gpt_flags.h"
#include "training_run.h"

typedef struct run {
    settings set;
    words_model tokenizer;               /* n 0: none */
    profile profile;
    char data[PATH_MAX], save[PATH_MAX], metrics_path[PATH_MAX];    /* save "": nothing */
    amp_context *amp;
    amp_choice choice;
    amp_loader_info info;           /* of the whole data */
    int64_t split;                  /* tokens before it are trained on */
    amp_loader *loader;
    gpt_file file;                  /* of --init, until its weights are read; of a checkpoint its config.json */
    gpt model;
    char described[400];            /* remarks on its config.json, or "" */
    amp_scaler *scaler;             /* NULL: none */
    amp_optimizer *optimizer;
    amp_graph *graph;               /* of a whole step; NULL: not captured */
    float *micro_losses, *host_losses;      /* of a step's micro-batches: on the device, and read back */
    int32_t *micro_tokens;          /* device, with --graph: their inputs and targets; else NULL */
    amp_monitor *monitor;           /* keeps the metrics of steps */
    metrics_line metrics;           /* other lines go through the monitor too */
    amp_tensor_stats *stats;            /* NULL: not wanted */
    amp_recovery *recovery;         /* NULL: not wanted */
    amp_adapt *adapt;               /* NULL: not wanted */
    json_buffer fp32_layers;        /* patterns of the layers that recovery set to fp32, one a line */
    board board;
    char anomaly[256];              /* why training stops, or "" */
    char note[300];                 /* to print after the step, or "" */
    int64_t epoch, index;           /* the current step's first batch; epoch -1: not read yet */
    int64_t start, step, steps;     /* start: where this session began */
    int64_t epoch_steps;            /* since the monitor's epoch began */
    float loss;                     /* of the last step whose loss was read */
    /* losses that the console shows once their step's record is there; by step modulo the array's length */
    struct { int64_t step; float loss; } shown[64];
    amp_step_result result;         /* the last one that arrived */
    int64_t results, applied;       /* arrived in this session; of them, those that changed the weights */
    int64_t peak;                   /* most bytes of memory in any epoch of the monitor's */
    double ranks_seconds, ranks_waited;     /* sums over ranks; what steps waited for them */
    int n_fp8;                      /* weights that compute in fp8 */
    double busy;                    /* seconds in training steps */
    double bigram, bigram_best;
} run;

static amp_result open_context(run *r) {
    const char *autotune = r->set.autotune;
    int to_file = strcmp(autotune, "off") != 0 && strcmp(autotune, "on") != 0;
    amp_desc desc;
    EX_TRY(training_open_context(&r->set.training, r->set.seed, to_file ? autotune : NULL, &r->amp));
    EX_TRY(amp_query(r->amp, &desc));
    if (r->set.graph && desc.backend->graph_begin == NULL)
        return flag_refuse("graph", "the %s backend has no graphs", desc.backend->name);
    return amp_query_choice(r->amp, &r->choice);
}

/* Concatenates the files of this project. */
static amp_result write_own_text(const char *path) {
    static const char *const sources[] = {"README.md",
                                          "examples/quickstart.c",
                                          "examples/scaler_only.c",
                                          "examples/gpt.h",
                                          "examples/train_gpt.c",
                                          "amp.h",
                                          NULL};
    char *all = NULL;
    size_t used = 0;
    amp_result result = AMP_OK;
    int i;
    if (access("amp.h", R_OK) != 0)
        return flag_refuse("data", "is not given, and amp.h is not in this folder: run the program in the project's "
                           "folder");
    for (i = 0; sources[i] != NULL && result == AMP_OK; i++) {
        void *data;
        size_t bytes;
        char *more;
        if (access(sources[i], R_OK) != 0) continue;
        result = amp_file_read_all(NULL, sources[i], &data, &bytes);
        if (result != AMP_OK) break;
        more = (char *)realloc(all, used + bytes + 1);
        if (more == NULL) result = ex_fail(AMP_ERR_MEMORY, "no memory for %s", sources[i]);
        else { all = more; memcpy(all + used, data, bytes); used += bytes; }
        amp_file_free(NULL, data, bytes);
    }
    if (result == AMP_OK) result = ex_file_write(path, all, used);
    free(all);
    return result;
}

static void loader_settings(const run *r, int64_t batch, int64_t first, int64_t last, amp_loader_desc *desc) {
    memset(desc, 0, sizeof *desc);
    desc->path = r->data;
    desc->format = (amp_token_format)ex_word_place("auto llmc u16 bytes", r->set.format);
    desc->batch = batch;
    desc->seq = r->set.seq;
    desc->first = first;
    desc->last = last;
    desc->seed = (uint64_t)r->set.seed;
    desc->world = 1;                /* all of it on every rank */
}

/* Finds the data's format and length. */
static amp_result probe_data(run *r) {
    amp_loader_desc desc;
    amp_loader *probe;
    amp_result result;
    loader_settings(r, 1, 0, 0, &desc);
    desc.workers = 1;               /* so that --timeout also covers opening */
    desc.timeout_ms = (int32_t)(r->set.timeout * 1000 + 0.5);
    if (amp_loader_create(r->amp, &probe, &desc) != AMP_OK) return flag_refuse("data", "%s", amp_last_error());
    result = amp_loader_info_get(probe, &r->info);
    amp_loader_destroy(probe);
    return result;
}

/* Opens --tokenizer, or the tokenizer beside --resume or --init; without these, bytes are the tokens of a text.  A
   model of 256 tokens may come without one. */
static amp_result find_tokenizer(run *r) {
    const settings *set = &r->set;
    const char *comma = strchr(set->tokenizer, ','), *beside[2];
    char path[PATH_MAX], why[400];
    int i;
    if (*set->tokenizer != 0) {
        if (comma == NULL || comma[1] == 0)
            return flag_refuse("tokenizer", "takes two files, vocab.json and merges.txt");
        snprintf(path, sizeof path, "%.*s", (int)(comma - set->tokenizer < 4000 ? comma - set->tokenizer : 4000),
                 set->tokenizer);
        return words_open_file(&r->tokenizer, path, comma + 1, 0) == AMP_OK
                   ? AMP_OK : flag_refuse("tokenizer", "%s", ex_because(why));
    }
    beside[0] = set->training.resume; beside[1] = set->init;
    for (i = 0; i < 2; i++) {
        if (*beside[i] == 0) continue;
        EX_TRY(weights_path(beside[i], path));
        if (words_open(&r->tokenizer, path, 0) == AMP_OK) return AMP_OK;
        if (strstr(ex_error(), "has no tokenizer") == NULL)
            return flag_refuse(i ? "init" : "resume", "%s", ex_because(why));
        ex_text[0] = 0;             /* it may come without one */
    }
    if (*set->init != 0 || (set->vocab != 0 && set->vocab != 256)) return AMP_OK;
    return r->info.format == AMP_TOKENS_BYTES ? words_bytes(&r->tokenizer, 0) : AMP_OK;
}

/* Opens the tokenizer, and turns text data into a token file. */
static amp_result open_tokenizer(run *r) {
    char tokens[PATH_MAX], why[400];
    glob_t found;
    amp_result result = AMP_OK;
    EX_TRY(find_tokenizer(r));
    if (r->info.format != AMP_TOKENS_BYTES || r->tokenizer.n == 0 || words_are_bytes(&r->tokenizer)) return AMP_OK;
    snprintf(tokens, sizeof tokens, "%.4000s/tokens.bin", r->set.training.out);
    if (ranks.rank == 0) {
        char *file = r->data;
        int pattern = access(r->data, F_OK) != 0 && glob(r->data, 0, NULL, &found) == 0;
        result = ex_folder_make(tokens);
        ex_remove_unfinished(tokens);
        if (result == AMP_OK)
            result = token_files_write(&r->tokenizer, pattern ? found.gl_pathv : &file,
                                            pattern ? (int64_t)found.gl_pathc : 1, tokens);
        if (pattern) globfree(&found);
        if (result != AMP_OK) return flag_refuse("tokenizer", "%s", ex_because(why));
    }
    EX_TRY(ranks_wait());
    memcpy(r->data, tokens, sizeof r->data);
    r->set.format = "llmc";
    return probe_data(r);
}

/* Opens the data and finds where the validation part begins. */
static amp_result open_data(run *r) {
    const settings *set = &r->set;
    int64_t validation, per_batch = set->batch * set->seq * ranks.world;
    EX_TRY(training_data_path(&set->training, set->data, "/corpus.txt", write_own_text, r->data));
    EX_TRY(probe_data(r));
    EX_TRY(open_tokenizer(r));
    validation = (int64_t)(set->validation * (double)r->info.tokens);
    if (validation < set->seq + 1) validation = set->seq + 1;
    r->split = r->info.tokens - validation;
    if (r->split < per_batch + 1)
        return flag_refuse("data",
                      "%lld tokens are too few for %lld sequences of %lld tokens and a validation part: "
                      "use a smaller --batch or --seq",
                      (long long)r->info.tokens, (long long)(set->batch * ranks.world), (long long)set->seq);
    return AMP_OK;
}

/* The model's shape: from the checkpoint, from the file of --init, or from the flags. */
typedef struct model_size { const char *name; int64_t layers, heads, channels, positions, llama; } model_size;
static const model_size model_sizes[] = {
    {"small", 4, 4, 128, 0, 0},
    {"d6", 6, 6, 384, 1024, 0},
    {"gpt2", 12, 12, 768, 1024, 0},
    {"gpt2-medium", 24, 16, 1024, 1024, 0},
    {"gpt2-large", 36, 20, 1280, 1024, 0},
    {"gpt2-xl", 48, 25, 1600, 1024, 0},
    {"d12", 12, 12, 768, 1024, 0},
    {"d24", 24, 16, 1024, 1024, 0},
    {"d36", 36, 20, 1280, 1024, 0},
    {"d48", 48, 25, 1600, 1024, 0},
    {"llama-s", 4, 4, 128, 1024, 1},
};

static const model_size *size_of(const settings *set) {
    const model_size *size = model_sizes;
    while (strcmp(size->name, set->model) != 0) size++;
    return size;
}

static amp_result shape_from_flags(const run *r, gpt_config *c) {
    const settings *set = &r->set;
    const model_size *size = size_of(set);
    c->layers = set->layers > 0 ? set->layers : size->layers;
    c->heads = set->heads > 0 ? set->heads : size->heads;
    c->channels = set->channels > 0 ? set->channels : size->channels;
    c->positions = size->positions > set->seq ? size->positions : set->seq;
    c->vocab = set->vocab > 0                       ? set->vocab
               : r->tokenizer.n > 0                 ? r->tokenizer.n
               : r->info.format == AMP_TOKENS_BYTES ? 256
                                                    : 50257;
    if (size->llama) {              /* heads in pairs, SwiGLU as wide as makes its three matrices GPT-2's two */
        c->kv_heads = c->heads % 2 == 0 ? c->heads / 2 : c->heads;
        c->hidden = (c->channels * 8 / 3 + 7) / 8 * 8;
        c->base = 10000;
        if (c->channels % (2 * c->heads) != 0)
            return flag_refuse(set->heads > 0 ? "heads" : "channels",
                               "%lld heads do not divide %lld channels evenly by two",
                          (long long)c->heads, (long long)c->channels);
    }
    if (c->channels % c->heads != 0)
        return flag_refuse(set->heads > 0 ? "heads" : "channels", "%lld heads do not divide %lld channels",
                      (long long)c->heads, (long long)c->channels);
    return AMP_OK;
}

enum { SHAPE_NUMBERS = 5 };
static amp_result shape_from_state(const amp_state *state, gpt_config *c) {
    int64_t shape[SHAPE_NUMBERS];
    EX_TRY(amp_state_get(state, "train.shape", AMP_I64, shape, SHAPE_NUMBERS));
    c->vocab = shape[0]; c->positions = shape[1]; c->channels = shape[2]; c->heads = shape[3]; c->layers = shape[4];
    return AMP_OK;
}

/* Reads what the shape does not tell.  Checkpoints of version 0.1.0 have GPT-2's own settings. */
static amp_result config_from_state(const run *r, const amp_state *state, gpt_config *c, config_model *described) {
    int64_t n = amp_state_count(state, "train.config", NULL);
    char type[16] = "";
    if (n <= 0) return AMP_OK;
    snprintf(described->path, sizeof described->path, "%.4000s.state", r->set.training.resume);
    described->text = (char *)calloc((size_t)n + 1, 1);
    if (described->text == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the checkpoint's config.json");
    described->bytes = (size_t)n;
    EX_TRY(amp_state_get(state, "train.config", AMP_U8, described->text, n));
    if (json_find(json_open(described->text, described->bytes), "model_type", type, sizeof type) &&
        strcmp(type, "llama") == 0)
        return gpt_read_llama(described, NULL, NULL, c);
    EX_TRY(config_check(described, &gpt_config_rules));
    return gpt_read_config(described, c);
}

static amp_result check_shape(const settings *set, const gpt_config *file) {
    const model_size *size = size_of(set);
    const model_dimension dimensions[] = {{"layers", set->layers, size->layers, file->layers},
                                          {"heads", set->heads, size->heads, file->heads},
                                          {"channels", set->channels, size->channels, file->channels},
                                          {"vocab", set->vocab, 0, file->vocab}};
    if (flag_was_given("model") && size->llama != (file->kv_heads > 0))
        return flag_refuse("model", "the model in the file is a %s", file->kv_heads > 0 ? "Llama" : "GPT-2");
    return training_check_dimensions(dimensions, 4);
}

/* Refuses what is GPT-2's alone. */
static amp_result check_llama(const settings *set) {
    amp_dtype all, stored[GPT_TENSORS];
    int i;
    memset(stored, 0, sizeof stored);
    if (set->dropout > 0) return flag_refuse("dropout", "a Llama has no dropout");
    if (set->profile) return flag_refuse("profile", "counts a GPT-2's operations and bytes, and this is a Llama");
    EX_TRY(read_activations(set->activations, &all, stored));
    for (i = 0; i < GPT_TENSORS; i++)
        if (i != GPT_STREAM && stored[i] != AMP_DTYPE_DEFAULT)
            return flag_refuse("activations", "only the stream of a Llama can have its own dtype");
    return AMP_OK;
}

static amp_result choose_fp8_layers(run *r) {
    const gpt *g = &r->model;
    return model_fp8_layers(r->amp, g->params, g->n_params, g->config.kv_heads > 0 ? "layers." : "h.", g->config.layers,
                      strcmp(r->set.fp8_blocks, "all") == 0, &r->n_fp8);
}

/* Sets the storage dtypes of activations and logits in the model's config.  auto: as autocast returns them. */
static amp_result storage_dtypes(const run *r, gpt_config *c) {
    EX_TRY(read_activations(r->set.activations, &c->activations, c->stored));
    if (c->activations == AMP_DTYPE_DEFAULT) EX_TRY(model_activations(r->amp, &c->activations));
    c->logits = amp_autocast_output(r->amp, c->activations);
    return AMP_OK;
}

static amp_result open_model(run *r, const amp_state *resumed) {
    const settings *set = &r->set;
    gpt_config config;
    int from_file = *set->init != 0;
    char why[400];
    amp_result result = AMP_OK;
    memset(&config, 0, sizeof config);
    if (resumed != NULL) {
        EX_TRY(shape_from_state(resumed, &config));
        result = config_from_state(r, resumed, &config, &r->file.described);
    } else if (from_file) {
        if (gpt_file_open(&r->file, set->init) != AMP_OK) return flag_refuse("init", "%s", ex_because(why));
        config = r->file.config;
    } else EX_TRY(shape_from_flags(r, &config));
    if (result == AMP_OK && (resumed != NULL || from_file)) result = check_shape(set, &config);
    if (result == AMP_OK && config.kv_heads > 0) result = check_llama(set);
    if (result == AMP_OK && words_check(&r->tokenizer, config.vocab) != AMP_OK)
        result = flag_refuse("tokenizer", "%s", ex_because(why));
    if (result == AMP_OK && from_file && resumed == NULL && r->tokenizer.n == 0 && config.vocab != 256 &&
        r->info.format == AMP_TOKENS_BYTES && (config.vocab > 256 || set->vocab == 0))      /* --vocab 26: bytes */
        result = flag_refuse("init", "the folder has no tokenizer: give --tokenizer, or data that is tokens already");
    config.batch = set->batch;
    config.seq = set->seq;
    config.dropout = (float)set->dropout;
    config.recompute = (int32_t)set->recompute;
    config.fused_loss = (int32_t)set->fused_loss;
    if (result == AMP_OK) result = storage_dtypes(r, &config);
    if (result == AMP_OK && *set->prompt != 0 && r->tokenizer.n == 0 && config.vocab != 256)
        result = flag_refuse("prompt", "the model's tokens are not text: give --tokenizer");
    if (result == AMP_OK && config.seq > config.positions)
        result = flag_refuse("seq", "this model has %lld positions", (long long)config.positions);
    if (result == AMP_OK) result = gpt_create(&r->model, r->amp, &config);
    if (result == AMP_OK && r->choice.dtype == AMP_FP8) result = choose_fp8_layers(r);
    if (result == AMP_ERR_MEMORY) result = flag_refuse("model", "%s", ex_because(why));
    if (result == AMP_OK && resumed != NULL) result = config_take(&r->model.json, &r->file.described);
    return result;
}

/* Sets weights through the optimizer, so that masters keep full precision; a checkpoint's masters are in its state. */
static amp_result open_weights(run *r, const amp_state *resumed) {
    amp_result result;
    r->model.optimizer = r->optimizer;
    if (resumed != NULL) return model_load_state(r->amp, r->model.params, r->model.n_params, resumed);
    if (*r->set.init == 0) return gpt_init(&r->model, (uint64_t)r->set.seed);
    result = gpt_file_load(&r->file, &r->model);
    memcpy(r->described, r->file.described.note, sizeof r->described);
    gpt_file_close(&r->file);
    return result;
}

static amp_result open_optimizer(run *r) {
    const settings *set = &r->set;
    amp_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.params = r->model.params;
    desc.n_params = r->model.n_params;
    desc.lr = (float)set->lr;
    desc.beta1 = (float)amp_explicit(set->beta1);
    desc.beta2 = (float)amp_explicit(set->beta2);
    desc.eps = (float)amp_explicit(set->eps);
    desc.weight_decay = (float)set->weight_decay;
    desc.master = (amp_master_kind)flag_choice_place("masters", set->masters);
    desc.seed = (uint64_t)set->seed;
    return training_open_optimizer(&set->training, r->amp, &desc, &r->optimizer);
}

static void training_data(const run *r, amp_loader_desc *desc) {
    loader_settings(r, r->set.batch, 0, r->split, desc);
    desc->world = 0;                /* of the context: each rank its part */
    desc->shuffle = strcmp(r->set.shuffle, "on") == 0;
    desc->epochs = r->set.epochs;
    desc->vocab = (int32_t)r->model.config.vocab;
}
static amp_result open_loader(run *r) {
    const settings *set = &r->set;
    amp_loader_desc desc;
    amp_loader_info info;
    int64_t by_epochs;
    training_data(r, &desc);
    EX_TRY(amp_settings_fill_loader(&set->training.amp, &desc));
    desc.timeout_ms = (int32_t)(set->timeout * 1000 + 0.5);
    if (amp_loader_create(r->amp, &r->loader, &desc) != AMP_OK) return flag_refuse("data", "%s", amp_last_error());
    EX_TRY(amp_loader_info_get(r->loader, &info));
    r->steps = set->steps >= 0 ? set->steps : set->epochs > 0 ? INT64_MAX : 1200;
    by_epochs = set->epochs * info.batches / set->accumulation;
    if (set->epochs > 0 && by_epochs < r->steps) r->steps = by_epochs;
    if (set->training.ranks.sync_every > 0 && r->steps % set->training.ranks.sync_every != 0)
        return flag_refuse("sync-every", "%lld steps would end between two combinations", (long long)r->steps);
    return AMP_OK;
}

/* A step's own buffers on the device. */
static amp_result open_step(run *r) {
    int64_t n = r->set.accumulation;
    void *memory;
    r->host_losses = (float *)malloc((size_t)n * sizeof(float));
    if (r->host_losses == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the losses");
    EX_TRY(amp_alloc(r->amp, &memory, n * (int64_t)sizeof(float)));
    r->micro_losses = (float *)memory;
    if (!r->set.graph) return AMP_OK;
    EX_TRY(amp_alloc(r->amp, &memory, n * 2 * r->set.batch * r->set.seq * (int64_t)sizeof(int32_t)));
    r->micro_tokens = (int32_t *)memory;
    return AMP_OK;
}

static amp_result open_files(run *r) {
    EX_TRY(training_open_files(&r->set.training, "", r->save, r->metrics_path));
    return r->metrics_path[0] != 0 ? metrics_line_open(&r->metrics) : AMP_OK;
}

/* --precision adaptive. */
static amp_result open_adapt(run *r) {
    static const amp_dtype ladders[][3] = {
        {AMP_F32}, {AMP_BF16, AMP_F32}, {AMP_F16, AMP_F32}, {AMP_FP8, AMP_BF16, AMP_F32}};
    int lowest = flag_choice_place("lowest", r->set.lowest);
    amp_adapt_desc desc;
    if (!r->set.adaptive) return AMP_OK;
    memset(&desc, 0, sizeof desc);
    desc.params = r->model.params;
    desc.n_params = r->model.n_params;
    desc.scaler = r->scaler;
    if (lowest > 0) { desc.ladder = ladders[lowest]; desc.n_ladder = lowest == 3 ? 3 : 2; }
    desc.budget = r->set.error_budget < 0 ? 0 : amp_explicit(r->set.error_budget);
    if (amp_adapt_create(r->amp, &r->adapt, &desc) == AMP_OK) return AMP_OK;
    return flag_refuse("precision", "adaptive: %s", amp_last_error());
}

/* Once after each step; decisions go to the metrics. */
static amp_result adapt_step(run *r) {
    amp_adapt_record record;
    char line[512];
    if (r->adapt == NULL) return AMP_OK;
    EX_TRY(amp_adapt_step(r->adapt));
    while (amp_adapt_next(r->adapt, &record)) {
        if (r->metrics.file == NULL) continue;
        (void)amp_adapt_json(&record, line, sizeof line);
        EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_write(r->monitor, line)));
    }
    return AMP_OK;
}

/* How each layer that ran ended. */
static amp_result record_layers(run *r) {
    amp_adapt_record record;
    char line[512];
    int64_t i;
    for (i = 0; r->metrics.file != NULL && amp_adapt_layer(r->adapt, i, &record) == AMP_OK; i++) {
        if (!(record.multiply_adds > 0)) continue;
        (void)amp_adapt_json(&record, line, sizeof line);
        EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_write(r->monitor, line)));
    }
    return AMP_OK;
}

/* Which layers are in what; beside the model, as a file for --config. */
static amp_result report_adapt(run *r) {
    size_t bytes = amp_adapt_text(r->adapt, NULL, 0);
    char path[PATH_MAX + 16], *text = bytes > 0 ? (char *)malloc(bytes + 1) : NULL;
    amp_result result = AMP_OK;
    int saves = r->save[0] != 0 && ranks.rank == 0;
    if (r->adapt == NULL) return AMP_OK;
    if (text == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the layers' precision");
    (void)metrics_tolerate(&r->metrics, record_layers(r));
    (void)amp_adapt_text(r->adapt, text, bytes + 1);
    snprintf(path, sizeof path, "%s.layers.conf", r->save);
    printf("%s", text);
    if (saves) result = ex_file_write(path, text, bytes);
    if (saves && result == AMP_OK) printf("saved %s\n", path);
    free(text);
    return result;
}

static int recovery_save(void *user, amp_state *state) {
    return (int)amp_state_put(state, "train.step", AMP_I64, &((run *)user)->step, 1);
}
static int recovery_load(void *user, const amp_state *state) {
    return (int)amp_state_get(state, "train.step", AMP_I64, &((run *)user)->step, 1);
}

static amp_result open_recovery(run *r) {
    amp_recovery_desc desc;
    if (r->set.training.amp.nan_action != AMP_NAN_RECOVER) return AMP_OK;
    memset(&desc, 0, sizeof desc);
    desc.params = r->model.params;
    desc.n_params = r->model.n_params;
    desc.optimizer = r->optimizer;
    desc.scaler = r->scaler;
    desc.loader = r->loader;
    desc.max_retries = r->set.training.amp.max_retries;
    desc.batch_growth_interval = r->set.training.amp.batch_growth_interval;
    desc.save = recovery_save;
    desc.load = recovery_load;
    desc.user = r;
    return amp_recovery_create(r->amp, &r->recovery, &desc);
}

/* Opens what watches training: metrics, statistics of tensors, and recovery. */
static amp_result open_watch(run *r) {
    const settings *set = &r->set;
    amp_monitor_desc monitor;
    amp_tensor_stats_desc stats;
    memset(&monitor, 0, sizeof monitor);
    monitor.epoch = set->eval_interval > 0 ? r->start / set->eval_interval : 0;
    monitor.optimizer = r->optimizer;
    monitor.scaler = r->scaler;
    EX_TRY(training_open_monitor(&set->training, r->amp, &monitor, r->metrics_path, &r->monitor));
    if (*set->tensorboard != 0 && ranks.rank == 0 && board_open(&r->board, set->tensorboard) != AMP_OK) {
        char why[400];
        return flag_refuse("tensorboard", "%s", ex_because(why));
    }
    memset(&stats, 0, sizeof stats);
    stats.params = r->model.params;
    stats.n_params = r->model.n_params;
    stats.scaler = r->scaler;
    stats.interval = set->tensor_stats_interval;
    if (set->tensor_stats_interval > 0) EX_TRY(amp_tensor_stats_create(r->amp, &r->stats, &stats));
    return open_recovery(r);
}

/* Keeps a layer in fp32, also after a resume. */
static amp_result keep_fp32_layer(run *r, const char *pattern) {
    json_add(&r->fp32_layers, "%s\n", pattern);
    return r->fp32_layers.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the name of a layer") : AMP_OK;
}
static amp_result load_fp32_layers(run *r, const amp_state *state) {
    int64_t n = amp_state_count(state, "train.fp32_layers", NULL);
    char *text = n > 0 ? (char *)calloc((size_t)n + 1, 1) : NULL, *line;
    amp_result result;
    if (n <= 0) return AMP_OK;
    if (text == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the checkpoint's layers");
    result = amp_state_get(state, "train.fp32_layers", AMP_U8, text, n);
    for (line = strtok(text, "\n"); line != NULL && result == AMP_OK; line = strtok(NULL, "\n")) {
        result = amp_layer_override(r->amp, line, AMP_F32);
        if (result == AMP_OK) result = keep_fp32_layer(r, line);
    }
    free(text);
    return result;
}

/* Where the data goes on.  After --change-batch the position is that of a loader with the old batches. */
static amp_result load_position(run *r, const amp_state *state) {
    int64_t was[3], old, now = r->set.batch * ranks.world, read;
    amp_loader_desc desc;
    amp_loader_info info, own;
    amp_loader *loader = r->loader;
    amp_result result;
    if (amp_state_count(state, "train.batch", NULL) < 0) old = now;
    else {
        EX_TRY(amp_state_get(state, "train.batch", AMP_I64, was, 3));
        old = was[0] * was[2];
    }
    training_data(r, &desc);
    desc.batch = old;
    desc.world = 1;
    if (old != now) EX_TRY(amp_loader_create(r->amp, &loader, &desc));
    result = amp_loader_load(loader, state, "loader");
    if (result == AMP_OK) result = amp_loader_info_get(loader, &info);
    if (result != AMP_OK)
        result = flag_refuse("resume", "%s was trained on other data or another split: %s", r->set.training.resume,
                             amp_last_error());
    if (loader == r->loader) return result;
    amp_loader_destroy(loader);
    EX_TRY(result);
    read = info.index * old;
    if (read % now != 0)
        return flag_refuse("change-batch", "%lld sequences of the epoch were read, which is not a whole number of "
                           "batches of %lld", (long long)read, (long long)now);
    EX_TRY(amp_loader_info_get(r->loader, &own));
    return read / now < own.batches ? amp_loader_seek(r->loader, info.epoch, read / now)
                                    : amp_loader_seek(r->loader, info.epoch + 1, 0);
}

/* The second half of a checkpoint; model_load_state was the first. */
static amp_result load_state(run *r, const amp_state *state) {
    EX_TRY(amp_state_get(state, "train.step", AMP_I64, &r->step, 1));
    EX_TRY(load_fp32_layers(r, state));
    EX_TRY(load_position(r, state));
    EX_TRY(checkpoint_load(r->amp, r->optimizer, r->scaler, state));
    return r->adapt != NULL && amp_state_count(state, "adapt.adapt", NULL) > 0
               ? amp_adapt_load(r->adapt, state, "adapt") : AMP_OK;
}

static void close_run(run *r) {
    amp_graph_destroy(r->graph);
    amp_adapt_destroy(r->adapt);
    amp_monitor_destroy(r->monitor);
    amp_tensor_stats_destroy(r->stats);
    amp_recovery_destroy(r->recovery);
    board_close(&r->board);
    metrics_line_close(&r->metrics);
    free(r->fp32_layers.text);
    free(r->host_losses);
    amp_free(r->amp, r->micro_losses);
    amp_free(r->amp, r->micro_tokens);
    amp_optimizer_destroy(r->optimizer);
    amp_scaler_destroy(r->scaler);
    gpt_destroy(&r->model);
    gpt_file_close(&r->file);
    amp_loader_destroy(r->loader);
    words_close(&r->tokenizer);
    amp_close(r->amp);
    memset(r, 0, sizeof *r);
}

/* All but the context. */
static amp_result open_training(run *r, const amp_state *resumed) {
    EX_TRY(open_data(r));
    EX_TRY(open_files(r));
    EX_TRY(open_model(r, resumed));
    EX_TRY(training_open_scaler(&r->set.training, r->amp, &r->scaler));
    EX_TRY(open_optimizer(r));
    EX_TRY(open_weights(r, resumed));
    EX_TRY(open_loader(r));
    EX_TRY(open_step(r));
    EX_TRY(open_adapt(r));
    if (resumed != NULL) EX_TRY(load_state(r, resumed));
    r->start = r->step;
    EX_TRY(open_watch(r));
    if (resumed == NULL || r->recovery == NULL || amp_state_count(resumed, "train.recovery", NULL) < 0) return AMP_OK;
    return amp_recovery_load(r->recovery, resumed, "train");
}

static amp_result open_run(run *r, const settings *set, const amp_state *resumed) {
    amp_state *own;
    amp_result result;
    memset(r, 0, sizeof *r);
    r->set = *set;
    EX_TRY(open_context(r));
    EX_TRY(resume_own(&set->training.ranks, r->amp, resumed, &own));
    result = open_training(r, own != NULL ? own : resumed);
    amp_state_destroy(own);
    return result;
}

/* ==== Checkpoints ================================================================================ */

static amp_result put_config(const run *r, amp_state *state) {
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    gpt_config_text(&r->model, &b);
    result = b.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the model's config.json")
                      : amp_state_put(state, "train.config", AMP_U8, b.text, (int64_t)b.used);
    free(b.text);
    return result;
}

static amp_result put_training(void *user, amp_state *state) {
    run *r = (run *)user;
    const gpt_config *c = &r->model.config;
    int64_t shape[SHAPE_NUMBERS];
    shape[0] = c->vocab; shape[1] = c->positions; shape[2] = c->channels; shape[3] = c->heads; shape[4] = c->layers;
    EX_TRY(checkpoint_put_run(&r->set.training, session_options, r->step, r->set.batch, r->set.accumulation, state));
    if (r->fp32_layers.used > 0)
        EX_TRY(amp_state_put(state, "train.fp32_layers", AMP_U8, r->fp32_layers.text, (int64_t)r->fp32_layers.used));
    EX_TRY(amp_state_put(state, "train.shape", AMP_I64, shape, SHAPE_NUMBERS));
    EX_TRY(put_config(r, state));
    if (r->recovery != NULL) EX_TRY(amp_recovery_save(r->recovery, state, "train"));
    if (r->adapt != NULL) EX_TRY(amp_adapt_save(r->adapt, state, "adapt"));
    EX_TRY(amp_loader_save(r->loader, state, "loader"));
    return checkpoint_put_model(r->amp, r->model.params, r->model.n_params, r->optimizer, r->scaler, state);
}

/* The weights for other programs. */
static amp_result save_weights(run *r) {
    char path[PATH_MAX + 16];
    if (r->save[0] == 0 || ranks.rank > 0) return AMP_OK;
    snprintf(path, sizeof path, "%s.safetensors", r->save);
    EX_TRY(gpt_save_safetensors(&r->model, path, r->step));
    EX_TRY(words_save(&r->tokenizer, path));
    return training_beside(r->save, "config.json", path, sizeof path) ? gpt_save_config(&r->model, path) : AMP_OK;
}

static amp_result save_run(run *r) {
    EX_TRY(checkpoint_save(&r->set.training, r->save, r->amp, put_training, r));
    return save_weights(r);
}

/* 1: NAME.safetensors or its config.json is missing, or the former is damaged or of another step: the run was killed
   between two files. */
static int weights_are_old(const run *r) {
    char path[PATH_MAX + 16], step[32] = "";
    gpt_file file;
    if (r->save[0] == 0) return 0;
    snprintf(path, sizeof path, "%s.safetensors", r->save);
    if (gpt_file_open(&file, path) != AMP_OK) { ex_text[0] = 0; return 1; }
    if (file.weights.tensors.metadata.at != NULL) json_find(file.weights.tensors.metadata, "step", step, sizeof step);
    gpt_file_close(&file);
    return atoll(step) != r->step ||
           (training_beside(r->save, "config.json", path, sizeof path) && access(path, R_OK) != 0);
}

#endif
