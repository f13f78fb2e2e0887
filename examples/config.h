/* config.h - config.json, as transformers writes it beside a model, read and written.
 *
 * Keys that change what the model computes are read, or refused by key and value; all others are kept, and written back
 * when the model is saved. */
#ifndef EXAMPLE_CONFIG_H
#define EXAMPLE_CONFIG_H

#include "example.h"
#include "safetensors.h"

typedef struct config_only { const char *key, *values; } config_only;   /* values: JSON, with '|' between them */

/* For one kind of model.  read: keys that its reader uses; kept: keys that change nothing; only: keys that must have
   these values, up to a NULL. */
typedef struct config_rules {
    const char *read, *kept;
    const config_only *only;
    const char *unseen;             /* those of `read` that the weights' shapes do not tell */
} config_rules;

/* For every kind.  The last lines are from old files: settings for generating text. */
static const char config_kept[] =
    "architectures transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash attn_implementation "
    "_attn_implementation _attn_implementation_autoset return_dict output_hidden_states output_attentions output_past "
    "use_cache "
    "torchscript use_bfloat16 gradient_checkpointing chunk_size_feed_forward initializer_range id2label label2id "
    "num_labels "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class vocab_file language "
    "finetuning_task task_specific_params prefix tie_encoder_decoder tf_legacy_loss summary_type summary_use_proj "
    "summary_activation summary_proj_to_labels summary_first_dropout summary_last_dropout "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty";
static const config_only config_only_of_all[] = {
    {"is_encoder_decoder", "false"}, {"add_cross_attention", "false"}, {"cross_attention_hidden_size", "null"},
    {"quantization_config", "null"}, {"auto_map", "null|{}"},          {"pruned_heads", "null|{}"},
    {"per_layer_config", "null|{}"}, {NULL, NULL},
};

typedef struct config_model {
    char path[PATH_MAX];            /* of its file */
    char *text;                     /* a JSON object; NULL: none */
    size_t bytes;
    int plain;                      /* 1: metadata of version 0.1.0, where every value is a string */
    char note[400];                 /* remarks for the user, or "" */
} config_model;

static inline void config_close(config_model *m) {
    free(m->text);
    memset(m, 0, sizeof *m);
}

/* The value of a key; 0: it is not there. */
static inline int config_get(const config_model *m, const char *key, json *value) {
    if (!json_value(json_open(m->text, m->bytes), key, value)) return 0;
    if (m->plain && value->end - value->at > 1) { value->at++; value->end--; }
    return 1;
}

/* Sets the error text "file: key = value: why". */
static inline amp_result config_refuse(const config_model *m, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static inline amp_result config_refuse(const config_model *m, const char *key, const char *format, ...) {
    char why[300];
    json value = {"", "", 0};
    size_t n, shown;
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    config_get(m, key, &value);
    n = (size_t)(value.end - value.at);
    for (shown = 0; shown < n && shown < 60 && value.at[shown] >= ' '; shown++) { }
    return ex_fail(AMP_ERR_UNSUPPORTED, "%s: %s = %.*s%s: %s", m->path, key, (int)shown, value.at,
                        shown < n ? "..." : "", why);
}

/* Values stay unchanged if the key is missing.  Other types and values out of range are refused. */
static inline amp_result config_integer(const config_model *m, const char *key, int64_t lowest, int64_t highest,
                                        int64_t *out) {
    json value;
    int64_t number;
    if (!config_get(m, key, &value)) return AMP_OK;
    number = json_integer(&value);
    if (value.bad || value.at != value.end || number < lowest || number > highest)
        return config_refuse(m, key, "must be a whole number from %lld to %lld", (long long)lowest, (long long)highest);
    *out = number;
    return AMP_OK;
}
static inline amp_result config_number(const config_model *m, const char *key, double lowest, double highest,
                                       double *out) {
    json value;
    char text[64], *end = text;
    double number = 0;
    if (!config_get(m, key, &value)) return AMP_OK;
    if (value.at < value.end && *value.at != '"' && json_text(value, text, sizeof text)) number = strtod(text, &end);
    if (end == text || *end != 0 || !(number >= lowest && number <= highest))
        return config_refuse(m, key, "must be a number from %g to %g", lowest, highest);
    *out = number;
    return AMP_OK;
}
static inline amp_result config_switch(const config_model *m, const char *key, int32_t *out) {
    json value;
    char text[8] = "";
    if (!config_get(m, key, &value)) return AMP_OK;
    if (*value.at == '"' || !json_text(value, text, sizeof text) || ex_word_place("false true", text) < 0)
        return config_refuse(m, key, "must be true or false");
    *out = ex_word_place("false true", text);
    return AMP_OK;
}
static inline amp_result config_word(const config_model *m, const char *key, char text[64]) {
    json value;
    if (!config_get(m, key, &value)) return AMP_OK;
    if ((m->plain || *value.at == '"') && json_text(value, text, 64)) return AMP_OK;
    return config_refuse(m, key, "must be a string");
}

/* A number that must match the weights. */
static inline amp_result config_shape(const config_model *m, const char *key, int64_t weights) {
    int64_t number = weights;
    EX_TRY(config_integer(m, key, 1, INT32_MAX, &number));
    return number == weights ? AMP_OK : config_refuse(m, key, "the weights have %lld", (long long)weights);
}

/* transformers' names of the operators' activations; the first of each kind is written. */
typedef struct config_activation_name { const char *name; amp_activation_kind act; } config_activation_name;
static const config_activation_name config_activation_names[] = {
    {"gelu_new", AMP_ACT_GELU},         {"gelu", AMP_ACT_GELU_ERF},         {"relu", AMP_ACT_RELU},
    {"silu", AMP_ACT_SILU},             {"tanh", AMP_ACT_TANH},             {"swish", AMP_ACT_SILU},
    {"gelu_pytorch_tanh", AMP_ACT_GELU}, {"gelu_python_tanh", AMP_ACT_GELU}, {"gelu_fast", AMP_ACT_GELU},
    {"gelu_accurate", AMP_ACT_GELU},    {"gelu_python", AMP_ACT_GELU_ERF},
};
enum { CONFIG_ACTIVATIONS = (int)(sizeof config_activation_names / sizeof *config_activation_names) };

static inline const char *config_activation_text(amp_activation_kind act) {
    int i;
    for (i = 0; i < CONFIG_ACTIVATIONS; i++) if (config_activation_names[i].act == act)
        return config_activation_names[i].name;
    return "";
}
static inline amp_result config_activation(const config_model *m, const char *key, amp_activation_kind *out) {
    char text[64] = "", names[200] = "";
    json value;
    int i;
    if (!config_get(m, key, &value)) return AMP_OK;
    EX_TRY(config_word(m, key, text));
    for (i = 0; i < CONFIG_ACTIVATIONS; i++) {
        if (strcmp(text,
                   config_activation_names[i].name) == 0) { *out = config_activation_names[i].act; return AMP_OK; }
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i > 0 ? ", " : "",
                 config_activation_names[i].name);
    }
    return config_refuse(m, key, "must be one of %s", names);
}

static inline void config_note(config_model *m, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void config_note(config_model *m, const char *format, ...) {
    size_t used = strlen(m->note);
    va_list args;
    va_start(args, format);
    if ((size_t)vsnprintf(m->note + used, sizeof m->note - used, format, args) >= sizeof m->note - used)
        memcpy(m->note + sizeof m->note - 4, "...", 4);
    va_end(args);
    for (; m->note[used] != 0; used++) if ((unsigned char)m->note[used] < ' ') m->note[used] = '?';
}

/* Dropout belongs to a training run: the program sets it, and the file's values are kept. */
static inline amp_result config_dropout(config_model *m, const char *key) {
    json value;
    double p = 0;
    if (config_get(m, key, &value) && *value.at == 'n') return AMP_OK;      /* null: not set */
    EX_TRY(config_number(m, key, 0, 1, &p));
    if (p > 0)
        config_note(m, "%s%s %g",
                    strstr(m->note, "--dropout sets") != NULL ? ", "
                    : m->note[0] != 0                     ? "; --dropout sets dropout, not "
                                                          : "--dropout sets dropout, not ",
                    key, p);
    return AMP_OK;
}

/* 1: the key is in the table; *ok: so is its value. */
static inline int config_find_only(const config_only *only, const char *key, json value, int *ok) {
    size_t n = (size_t)(value.end - value.at);
    for (; only->key != NULL; only++) {
        const char *at = only->values;
        if (strcmp(only->key, key) != 0) continue;
        for (*ok = 0; at != NULL && !*ok; at = strchr(at, '|') != NULL ? strchr(at, '|') + 1 : NULL)
            *ok = strncmp(at, value.at, n) == 0 && (at[n] == 0 || at[n] == '|');
        return 1;
    }
    return 0;
}

enum { CONFIG_MOST_KEYS = 1000 };
typedef struct config_key { char name[128]; json value; } config_key;

static inline int config_by_key(const void *a, const void *b) {
    const config_key *x = (const config_key *)a, *y = (const config_key *)b;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : x->value.at < y->value.at ? -1 : 1;
}

/* Refuses an object that has a key twice.  A key of more than 127 bytes has the name "" and is not compared. */
static inline amp_result config_once(const config_model *m) {
    config_key *keys = (config_key *)malloc(CONFIG_MOST_KEYS * sizeof *keys);
    json j = json_open(m->text, m->bytes);
    int64_t n = 0, i;
    amp_result result = AMP_OK;
    int more;
    if (keys == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its keys", m->path);
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more && n < CONFIG_MOST_KEYS; more = json_take(&j, ',')) {
        if (!json_member(&j, keys[n].name, &keys[n].value)) break;
        n++;
    }
    if (more && n == CONFIG_MOST_KEYS)
        result = ex_fail(AMP_ERR_FORMAT, "%s: there are more than %d keys, so this is not the description of a model",
                         m->path, CONFIG_MOST_KEYS);
    qsort(keys, (size_t)n, sizeof *keys, config_by_key);
    for (i = 1; i < n && result == AMP_OK; i++) {
        int64_t length = keys[i].value.end - keys[i].value.at;
        if (keys[i].name[0] == 0 || strcmp(keys[i - 1].name, keys[i].name) != 0) continue;
        result = config_refuse(m, keys[i].name, "appears twice, the second time as %.*s: drop one",
                               (int)(length < 60 ? length : 60), keys[i].value.at);
    }
    free(keys);
    return result;
}

/* Checks that it is a JSON object with each key once, and no value of a model that is not supported. */
static inline amp_result config_check(config_model *m, const config_rules *rules) {
    json j = json_open(m->text, m->bytes), value;
    char key[128];
    int64_t line = 1;
    const char *at;
    int more, ok, unknown = 0;
    if (json_peek(&j) == '{') json_skip(&j);
    else j.bad = 1;
    if (j.bad || json_peek(&j) != 0 || j.at != j.end) {
        for (at = m->text; at < j.at; at++) line += *at == '\n';
        return ex_fail(AMP_ERR_FORMAT, "%s: line %lld: not a JSON object", m->path, (long long)line);
    }
    EX_TRY(config_once(m));
    j = json_open(m->text, m->bytes);
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more && json_member(&j, key, &value); more = json_take(&j, ',')) {
        if (config_find_only(config_only_of_all, key, value, &ok) || config_find_only(rules->only, key, value, &ok)) {
            if (!ok) return config_refuse(m, key, "this kind of model is not supported");
        } else if (ex_word_place(rules->read, key) < 0 && ex_word_place(rules->kept, key) < 0 &&
                   ex_word_place(config_kept, key) < 0)
            config_note(m, "%s%s",
                        unknown++ > 0 ? ", " : "unknown keys, kept: ", key[0] != 0 ? key : "a long key");
    }
    return AMP_OK;
}

/* Refuses two descriptions that differ in a key that is read. */
static inline amp_result config_agree(const config_model *m, const config_model *other, const config_rules *rules) {
    const char *at = rules->read;
    while (*at != 0) {
        char key[64], a[64] = "", b[64] = "", *a_end, *b_end;
        int n = (int)strcspn(at, " ");
        json mine, theirs;
        snprintf(key, sizeof key, "%.*s", n, at);
        at += n + (at[n] == ' ');
        if (!config_get(other, key, &theirs)) continue;
        if (!config_get(m, key, &mine)) {
            if (ex_word_place(rules->unseen, key) < 0) continue;
            return ex_fail(AMP_ERR_UNSUPPORTED,
                                "%s: no %s: %s was saved with %.*s: put that back, or delete this file", m->path, key,
                                other->path, (int)(theirs.end - theirs.at < 60 ? theirs.end - theirs.at : 60),
                                theirs.at);
        }
        if (!json_text(mine, a, sizeof a) || !json_text(theirs, b, sizeof b) || strcmp(a, b) == 0) continue;
        if (strtod(a, &a_end) == strtod(b, &b_end) && *a_end == 0 && *b_end == 0) continue;
        return config_refuse(m, key, "%s was saved with %s = %s: put that back, or delete this file", other->path, key,
                             b);
    }
    return AMP_OK;
}

/* The description of the model in one of our files: a copy of config.json, or version 0.1.0's metadata.  text NULL:
   none. */
static inline amp_result config_of_file(config_model *m, const st_file *tensors, const char *path) {
    json value = tensors->metadata;
    int inside;
    memset(m, 0, sizeof *m);
    snprintf(m->path, sizeof m->path, "%s", path);
    if (value.at == NULL) return AMP_OK;
    inside = json_value(tensors->metadata, "config", &value);
    if (!inside && !json_value(tensors->metadata, "n_head", &value) &&
        !json_value(tensors->metadata, "num_attention_heads", &value))
        return AMP_OK;
    m->plain = !inside;
    if (!inside) {
        value = tensors->metadata;
        json_skip(&value);
        value.end = value.at;
        value.at = tensors->metadata.at;
    }
    m->text = (char *)malloc((size_t)(value.end - value.at) + 1);
    if (m->text == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its metadata", path);
    if (!json_text(value, m->text, (size_t)(value.end - value.at) + 1)) m->text[0] = 0;
    m->bytes = strlen(m->text);
    return AMP_OK;
}

/* config.json itself. */
static inline amp_result config_read(config_model *m, const char *path) {
    void *data;
    memset(m, 0, sizeof *m);
    snprintf(m->path, sizeof m->path, "%s", path);
    EX_TRY(amp_file_read_all(NULL, path, &data, &m->bytes));
    m->text = (char *)malloc(m->bytes + 1);
    if (m->text != NULL) memcpy(m->text, data, m->bytes);
    amp_file_free(NULL, data, m->bytes);
    return m->text != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "%s: no memory", path);
}

/* The description of the model in the file `path`.  model.safetensors uses the config.json beside it; a file with
   another name does so only if it has no description. */
static inline amp_result config_open(config_model *m, const st_file *tensors, const char *path,
                                     const config_rules *rules) {
    char beside[PATH_MAX];
    const char *slash = strrchr(path, '/');
    int named = strcmp(slash != NULL ? slash + 1 : path, "model.safetensors") == 0;
    config_model own;
    amp_result result;
    snprintf(beside, sizeof beside, "%.*sconfig.json", slash != NULL ? (int)(slash - path) + 1 : 0, path);
    memset(m, 0, sizeof *m);
    EX_TRY(config_of_file(&own, tensors, path));
    if (access(beside, F_OK) != 0 || (own.text != NULL && !named)) {
        *m = own;
        if (m->text == NULL)
            return ex_fail(
                AMP_ERR_OPEN,
                "%s: no config.json beside it, which says what kind of model it is: put the model's there", path);
        return m->plain ? AMP_OK : config_check(m, rules);
    }
    result = config_read(m, beside);
    if (result == AMP_OK) result = config_check(m, rules);
    if (result == AMP_OK) result = config_agree(m, &own, rules);
    config_close(&own);
    if (result != AMP_OK) config_close(m);
    return result;
}

/* The model keeps the text, to write it back; metadata of version 0.1.0 adds nothing to the model. */
static inline amp_result config_take(char **json_of_model, const config_model *m) {
    free(*json_of_model);
    *json_of_model = NULL;
    if (m->text == NULL || m->plain) return AMP_OK;
    *json_of_model = (char *)malloc(m->bytes + 1);
    if (*json_of_model == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the text of config.json");
    memcpy(*json_of_model, m->text, m->bytes);
    (*json_of_model)[m->bytes] = 0;
    return AMP_OK;
}

typedef enum config_how {
    CONFIG_ADD = 0,                 /* if the key is missing */
    CONFIG_SET = 1,                 /* always */
    CONFIG_REPLACE = 2              /* if the key exists */
} config_how;
typedef struct config_own { const char *key; char value[64]; config_how how; const char *longer; } config_own;

static inline void config_add(json_buffer *b, const char *key, const char *value, size_t n) {
    json_add(b, "%s\n  \"", b->used > 1 ? "," : "");
    json_put(b, key, strlen(key));
    json_add(b, "\": ");
    json_put(b, value, n);
}

/* The object `source` (NULL: an empty one) with our own values in it; the others stay unchanged. */
static inline void config_merge(json_buffer *b, const char *source, const config_own *own, int n) {
    json j = json_open(source != NULL ? source : "{}", source != NULL ? strlen(source) : 2), value;
    char key[128];
    int more, i;
    json_add(b, "{");
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more; more = json_take(&j, ',')) {
        const char *from, *mine = NULL;
        json_peek(&j);
        from = j.at;
        if (!json_member(&j, key, &value)) break;
        for (i = 0; i < n; i++)
            if (own[i].how != CONFIG_ADD && strcmp(own[i].key, key) == 0)
                mine = own[i].longer != NULL ? own[i].longer : own[i].value;
        json_add(b, "%s\n  ", b->used > 1 ? "," : "");
        json_put(b, from, (size_t)((mine != NULL ? value.at : value.end) - from));
        if (mine != NULL) json_put(b, mine, strlen(mine));
    }
    for (i = 0; i < n; i++) {
        const char *mine = own[i].longer != NULL ? own[i].longer : own[i].value;
        if (own[i].how != CONFIG_REPLACE &&
            (source == NULL || !json_value(json_open(source, strlen(source)), own[i].key, &value)))
            config_add(b, own[i].key, mine, strlen(mine));
    }
    json_add(b, "\n}\n");
}

static inline amp_result config_save(const json_buffer *b, const char *path) {
    return b->failed ? ex_fail(AMP_ERR_MEMORY, "no memory for %s", path)
                     : ex_file_write(path, b->text, b->used);
}

static inline void config_own_put(config_own *own, const char *key, config_how how, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static inline void config_own_put(config_own *own, const char *key, config_how how, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(own->value, sizeof own->value, format, args);
    va_end(args);
    own->key = key;
    own->how = how;
    own->longer = NULL;
}

#endif
