/* llama_files.h - model files of Hugging Face's LlamaForCausalLM, read and written: safetensors with config.json beside
 * it. */
#ifndef EXAMPLES_LLAMA_FILES_H
#define EXAMPLES_LLAMA_FILES_H

#include "llama.h"
#include "model_folder.h"

static const config_only llama_config_only[] = {
    {"hidden_act", "\"silu\""}, {"attention_bias", "false"}, {"mlp_bias", "false"}, {"tie_word_embeddings", "false"},
    {"rope_scaling", "null"}, {"partial_rotary_factor", "1.0|1|null"}, {NULL, NULL}};
static const config_rules llama_config_rules = {
    "model_type vocab_size max_position_embeddings hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps rope_theta rope_parameters attention_dropout",
    "pretraining_tp", llama_config_only, "num_attention_heads rms_norm_eps rope_theta rope_parameters"};
static const struct { const char *key; size_t place; } llama_sizes[] = {
    {"vocab_size", offsetof(llama_config, vocab)}, {"max_position_embeddings", offsetof(llama_config, positions)},
    {"hidden_size", offsetof(llama_config, channels)}, {"intermediate_size", offsetof(llama_config, hidden)},
    {"num_hidden_layers", offsetof(llama_config, layers)}, {"num_attention_heads", offsetof(llama_config, heads)},
    {"num_key_value_heads", offsetof(llama_config, kv_heads)}};
enum { LLAMA_SIZES = sizeof llama_sizes / sizeof *llama_sizes };

/* The rotation's base, of transformers 4 and 5, and that nothing else is said about it. */
static inline amp_result llama_read_rope(const config_model *m, llama_config *c) {
    json rope, value;
    char name[128], text[64];
    double base;
    int more;
    EX_TRY(config_number(m, "rope_theta", 1, 1e30, &c->base));
    if (!config_get(m, "rope_parameters", &rope) || *rope.at == 'n') return AMP_OK;
    if (!json_take(&rope, '{')) return config_refuse(m, "rope_parameters", "must be an object");
    for (more = json_peek(&rope) == '"'; more && json_member(&rope, name, &value); more = json_take(&rope, ',')) {
        if (!json_text(value, text, sizeof text)) text[0] = 0;
        if (strcmp(name, "rope_theta") == 0) {
            if (!ex_number(text, 1, 1e30, &base))
                return config_refuse(m, "rope_parameters", "rope_theta must be a number from 1 to 1e30");
            if (config_get(m, "rope_theta", &value) && (base < c->base || base > c->base))
                return config_refuse(m, "rope_theta", "rope_parameters has another, %s", text);
            c->base = base;
        } else if (strcmp(text, "default") != 0 || ex_word_place("rope_type type", name) < 0)
            return config_refuse(m, "rope_parameters", "%s = %s is not supported", name, text);
    }
    return AMP_OK;
}

static inline amp_result llama_read_config(config_model *m, llama_config *c) {
    char type[64] = "llama";
    int64_t dim, i;
    json value;
    EX_TRY(config_word(m, "model_type", type));
    if (strcmp(type, "llama") != 0) return config_refuse(m, "model_type", "must be llama");
    for (i = 0; i < LLAMA_SIZES; i++) {
        int64_t *size = (int64_t *)(void *)((char *)c + llama_sizes[i].place);
        *size = i == LLAMA_SIZES - 1 ? c->heads : 0;
        if (*size > 0 && config_get(m, llama_sizes[i].key, &value) && *value.at == 'n') continue;   /* null: as many */
        EX_TRY(config_integer(m, llama_sizes[i].key, 1, INT32_MAX, size));
        if (*size == 0) return ex_fail(AMP_ERR_FORMAT, "%s: no %s", m->path, llama_sizes[i].key);
    }
    c->base = 10000; c->eps = 1e-6;             /* transformers' defaults */
    EX_TRY(config_number(m, "rms_norm_eps", 1e-37, 1e37, &c->eps));
    EX_TRY(llama_read_rope(m, c));
    dim = c->channels / c->heads;
    if (!config_get(m, "head_dim", &value) || *value.at != 'n')
        EX_TRY(config_integer(m, "head_dim", 1, INT32_MAX, &dim));
    if (c->channels != c->heads * dim || c->heads % c->kv_heads != 0 || dim % 2 != 0)
        return config_refuse(m, "num_attention_heads", "must divide hidden_size into even heads, a multiple of %lld",
                             (long long)c->kv_heads);
    return config_dropout(m, "attention_dropout");
}

/* The same of a file, or of a text that was one. */
static inline amp_result llama_open_config(config_model *m, const st_file *tensors, const char *path, llama_config *c) {
    EX_TRY(tensors != NULL ? config_open(m, tensors, path, &llama_config_rules) : config_check(m, &llama_config_rules));
    return llama_read_config(m, c);
}

/* How the names of a Llama's tensors begin, without "model.". */
#define LLAMA_ROOTS "layers. embed_tokens. norm. lm_head."

/* Names what the file has beside the model's weights, or refuses it. */
static inline amp_result llama_rest(const st_file *tensors, const llama *m, config_model *described) {
    unsigned char *known = (unsigned char *)calloc((size_t)tensors->n + 1, 1);
    int64_t i;
    amp_result result;
    if (known == NULL) return ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)tensors->n);
    for (i = 0; i < m->n_params; i++) weights_mark(tensors, st_find(tensors, m->params[i].name), known);
    result = weights_rest(tensors, known, "model.", LLAMA_ROOTS, described);
    free(known);
    return result;
}

/* Makes the model that a file holds, with its weights.  note: remarks for the user, or ""; NULL: not wanted. */
static inline amp_result llama_load(llama *m, amp_context *amp, const char *path, char note[400]) {
    config_model described = {"", NULL, 0, 0, ""};
    llama_config config;
    model_weights file;
    amp_result result;
    memset(m, 0, sizeof *m);
    EX_TRY(weights_open(&file, path));
    result = llama_open_config(&described, &file.tensors, file.path, &config);
    if (result == AMP_OK) result = llama_create(m, amp, config, 0);
    if (result == AMP_OK) result = llama_rest(&file.tensors, m, &described);
    if (result == AMP_OK) result = model_load_params(&file.tensors, amp, m->params, m->n_params);
    if (note != NULL) memcpy(note, described.note, sizeof described.note);
    if (result != AMP_OK) llama_free(m);
    config_close(&described);
    weights_close(&file);
    return result;
}

/* The config.json for transformers; source: the one that the model came with, or NULL. */
static inline void llama_config_text(const llama_config *c, const char *source, json_buffer *b) {
    config_own own[20];
    int n = 0, i;
    config_own_put(&own[n++], "architectures", CONFIG_SET, "[\"LlamaForCausalLM\"]");
    config_own_put(&own[n++], "dtype", CONFIG_REPLACE, "\"float32\"");
    config_own_put(&own[n++], "torch_dtype", CONFIG_REPLACE, "\"float32\"");
    config_own_put(&own[n++], "model_type", CONFIG_ADD, "\"llama\"");
    config_own_put(&own[n++], "hidden_act", CONFIG_ADD, "\"silu\"");
    config_own_put(&own[n++], "tie_word_embeddings", CONFIG_ADD, "false");
    for (i = 0; i < LLAMA_SIZES; i++)
        config_own_put(&own[n++], llama_sizes[i].key, CONFIG_ADD, "%lld",
                       (long long)*(const int64_t *)(const void *)((const char *)c + llama_sizes[i].place));
    config_own_put(&own[n++], "rms_norm_eps", CONFIG_ADD, "%.9g", c->eps);
    if (source == NULL) {
        config_own_put(&own[n++], "rope_theta", CONFIG_ADD, "%.17g", c->base);
        config_own_put(&own[n++], "bos_token_id", CONFIG_ADD, "null");
        config_own_put(&own[n++], "eos_token_id", CONFIG_ADD, "null");
    }
    config_merge(b, source, own, n);
}

/* Writes the weights, and the config.json to lie beside them unless its path is NULL. */
static inline amp_result llama_save(const llama *m, const char *path, const char *config_path) {
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    llama_config_text(&m->config, NULL, &b);
    result = model_save_params(path, m->amp, m->params, m->n_params, &b);
    if (result == AMP_OK && config_path != NULL) result = config_save(&b, config_path);
    free(b.text);
    return result;
}

#endif
