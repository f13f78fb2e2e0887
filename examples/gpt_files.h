/* gpt_files.h - model files of GPT-2 and Llama: safetensors as Hugging Face has them, read and written; llm.c's, read;
 * and the weights in a checkpoint. */
#ifndef EXAMPLE_GPT_FILES_H
#define EXAMPLE_GPT_FILES_H

#include "gpt.h"
#include "llama_files.h"

typedef struct gpt_file {
    model_weights weights;          /* of llm.c no tensors */
    void *data; size_t bytes;       /* of llm.c, or of a file that a program has in memory; else NULL */
    int llmc;                       /* 3: fp32, 5: bf16, 0: safetensors */
    int64_t padded_vocab;           /* llm.c: rows of wte in the file */
    config_model described;         /* text NULL for llm.c */
    gpt_config config;              /* vocab to layers and act to by_layer, as the file says */
} gpt_file;

static inline void gpt_file_close(gpt_file *file) {
    weights_close(&file->weights);
    amp_file_free(NULL, file->data, file->bytes);
    config_close(&file->described);
    memset(file, 0, sizeof *file);
}

/* By the full name, or without "transformer.", as in older files. */
static inline const st_tensor *gpt_file_find(const gpt_file *file, const char *name) {
    const st_tensor *t = st_find(&file->weights.tensors, name);
    return t != NULL ? t : st_find(&file->weights.tensors, name + strlen("transformer."));
}

static const config_only gpt_config_only[] = {{"tie_word_embeddings", "true"}, {NULL, NULL}};
static const config_rules gpt_config_rules =
    {"model_type vocab_size n_positions n_embd n_layer n_head n_inner max_position_embeddings hidden_size "
     "num_hidden_layers "
     "num_attention_heads activation_function layer_norm_epsilon scale_attn_weights scale_attn_by_inverse_layer_idx "
     "embd_pdrop "
     "resid_pdrop attn_pdrop",
     "n_ctx is_decoder problem_type hidden_dropout classifier_dropout "
     "reorder_and_upcast_attn", /* where PyTorch rounds: scores are fp32 here anyway */
     gpt_config_only,
     "n_head activation_function layer_norm_epsilon scale_attn_weights scale_attn_by_inverse_layer_idx"};

/* Reads what no shape tells, and checks the rest against the weights. */
static inline amp_result gpt_read_config(config_model *m, gpt_config *c) {
    char type[64] = "gpt2";
    int64_t inner = 4 * c->channels, heads;
    int32_t scaled = 1;
    double eps = 1e-5;
    json value;
    EX_TRY(config_word(m, "model_type", type));
    if (strcmp(type, "gpt2") != 0) return config_refuse(m, "model_type", "must be gpt2");
    EX_TRY(config_shape(m, "vocab_size", c->vocab));
    EX_TRY(config_shape(m, "n_positions", c->positions));
    EX_TRY(config_shape(m, "max_position_embeddings", c->positions));
    EX_TRY(config_shape(m, "n_embd", c->channels));
    EX_TRY(config_shape(m, "hidden_size", c->channels));
    EX_TRY(config_shape(m, "n_layer", c->layers));
    EX_TRY(config_shape(m, "num_hidden_layers", c->layers));
    if (config_get(m, "n_inner", &value) && *value.at != 'n') EX_TRY(config_shape(m, "n_inner", inner));
    c->heads = 12;                  /* transformers' default, like the others */
    EX_TRY(config_integer(m, "n_head", 1, INT32_MAX, &c->heads));
    heads = c->heads;
    EX_TRY(config_integer(m, "num_attention_heads", 1, INT32_MAX, &heads));
    if (heads != c->heads && config_get(m, "n_head", &value))
        return config_refuse(m, "num_attention_heads", "n_head is %lld", (long long)c->heads);
    c->heads = heads;
    if (c->channels % heads != 0)
        return config_refuse(m, config_get(m, "n_head", &value) ? "n_head" : "num_attention_heads",
                             "%lld heads do not divide %lld channels", (long long)heads, (long long)c->channels);
    c->act = AMP_ACT_GELU;
    EX_TRY(config_activation(m, "activation_function", &c->act));
    EX_TRY(config_number(m, "layer_norm_epsilon", 1e-37, 1e37, &eps));
    c->eps = (float)eps;
    EX_TRY(config_switch(m, "scale_attn_weights", &scaled));
    c->unscaled = !scaled;
    c->by_layer = 0;
    EX_TRY(config_switch(m, "scale_attn_by_inverse_layer_idx", &c->by_layer));
    EX_TRY(config_dropout(m, "embd_pdrop"));
    EX_TRY(config_dropout(m, "resid_pdrop"));
    return config_dropout(m, "attn_pdrop");
}

/* The same of a Llama.  tensors NULL: m is its text already. */
static inline amp_result gpt_read_llama(config_model *m, const st_file *tensors, const char *path, gpt_config *c) {
    llama_config like;
    memset(&like, 0, sizeof like);
    EX_TRY(llama_open_config(m, tensors, path, &like));
    c->vocab = like.vocab; c->positions = like.positions; c->channels = like.channels; c->hidden = like.hidden;
    c->layers = like.layers; c->heads = like.heads; c->kv_heads = like.kv_heads;
    c->base = like.base; c->eps = (float)like.eps;
    c->act = AMP_ACT_GELU;          /* of nothing, as gpt_create has it */
    return AMP_OK;
}

static inline amp_result gpt_file_shape(gpt_file *file, const char *path) {
    const st_tensor *wte = gpt_file_find(file, "transformer.wte.weight"),
                    *wpe = gpt_file_find(file, "transformer.wpe.weight");
    gpt_config *c = &file->config;
    if (st_find(&file->weights.tensors, "model.embed_tokens.weight") != NULL)
        return gpt_read_llama(&file->described, &file->weights.tensors, path, c);
    if (wte == NULL || wpe == NULL || wte->ndim != 2 || wpe->ndim != 2 || wte->shape[1] != wpe->shape[1])
        return ex_fail(AMP_ERR_FORMAT,
                            "%s: not a GPT-2: wte.weight and wpe.weight are missing or do not match", path);
    c->vocab = wte->shape[0];
    c->positions = wpe->shape[0];
    c->channels = wte->shape[1];
    for (c->layers = 0; c->layers < 10000; c->layers++) {
        char name[64];
        snprintf(name, sizeof name, "transformer.h.%lld.ln_1.weight", (long long)c->layers);
        if (gpt_file_find(file, name) == NULL) break;
    }
    EX_TRY(config_open(&file->described, &file->weights.tensors, path, &gpt_config_rules));
    return gpt_read_config(&file->described, c);
}

static inline int32_t gpt_file_i32(const unsigned char *p) {
    return (int32_t)((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
}

/* llm.c: 256 int32 (magic, version, positions, vocab, layers, heads, channels, padded vocab), then the tensors. */
enum { GPT_LLMC_MAGIC = 20240326, GPT_LLMC_HEADER = 1024 };
static inline amp_result gpt_file_llmc(gpt_file *file, const char *path) {
    const unsigned char *p = (const unsigned char *)file->data;
    gpt_config *c = &file->config;
    double count;
    if (file->bytes < GPT_LLMC_HEADER)
        return ex_fail(AMP_ERR_TRUNCATED, "%s: the llm.c model file ends in its header", path);
    file->llmc = gpt_file_i32(p + 4);
    if (file->llmc != 3 && file->llmc != 5)
        return ex_fail(AMP_ERR_FORMAT, "%s: llm.c model version %d, must be 3 (fp32) or 5 (bf16)",
                            path, file->llmc);
    c->positions = gpt_file_i32(p + 8);
    c->vocab = gpt_file_i32(p + 12);
    c->layers = gpt_file_i32(p + 16);
    c->heads = gpt_file_i32(p + 20);
    c->channels = gpt_file_i32(p + 24);
    c->act = AMP_ACT_GELU;
    c->eps = 1e-5f;
    file->padded_vocab = gpt_file_i32(p + 28);
    if (c->positions < 1 || c->vocab < 1 || c->layers < 1 || c->layers > 10000 || c->heads < 1 || c->channels < 1 ||
        file->padded_vocab < c->vocab)
        return ex_fail(AMP_ERR_FORMAT, "%s: the header of the llm.c model file has impossible sizes", path);
    count = (double)c->channels * ((double)file->padded_vocab + (double)c->positions + 2 +
                                   (double)c->layers * (12 * (double)c->channels + 13));
    if ((double)(file->bytes - GPT_LLMC_HEADER) < count * (file->llmc == 3 ? 4 : 2))
        return ex_fail(AMP_ERR_TRUNCATED, "%s: %zu bytes are too few for the model of its header", path,
                            file->bytes);
    return AMP_OK;
}

/* The shape of the model whose file is file->data.  Nothing in the file is trusted. */
static inline amp_result gpt_file_parse(gpt_file *file, const char *path) {
    if (file->bytes >= 4 && gpt_file_i32((const unsigned char *)file->data) == GPT_LLMC_MAGIC)
        return gpt_file_llmc(file, path);
    EX_TRY(ex_st(st_open(&file->weights.tensors, file->data, file->bytes)));
    return gpt_file_shape(file, path);
}

/* 1: the file begins as llm.c's do. */
static inline int gpt_file_is_llmc(const char *path) {
    unsigned char head[4];
    FILE *in = fopen(path, "rb");
    size_t n = in != NULL ? fread(head, 1, sizeof head, in) : 0;
    if (in != NULL) fclose(in);
    return n == sizeof head && gpt_file_i32(head) == GPT_LLMC_MAGIC;
}

/* Opens a model's folder, or one file, and reads its shape. */
static inline amp_result gpt_file_open(gpt_file *file, const char *path) {
    amp_result result;
    memset(file, 0, sizeof *file);
    if (gpt_file_is_llmc(path)) {
        result = amp_file_read_all(NULL, path, &file->data, &file->bytes);
        if (result == AMP_OK) result = gpt_file_parse(file, path);
    } else {
        result = weights_open(&file->weights, path);
        if (result == AMP_OK) result = gpt_file_shape(file, file->weights.path);
    }
    if (result != AMP_OK) gpt_file_close(file);
    return result;
}

static inline void gpt_transpose(float *out, const float *in, int64_t rows, int64_t cols) {
    int64_t i, j;
    for (i = 0; i < rows; i++) for (j = 0; j < cols; j++) out[j * rows + i] = in[i * cols + j];
}

/* Finds parameter i in a safetensors file, with the model's shape and a supported dtype. */
static inline amp_result gpt_file_check(const gpt_file *file, const gpt *g, int64_t i, const st_tensor **out) {
    const amp_param *p = &g->params[i];
    const st_tensor *t = gpt_file_find(file, p->name);
    int conv1d = gpt_is_conv1d(g, i);
    int64_t rows = p->weight.shape[0], cols = p->weight.ndim == 2 ? p->weight.shape[1] : 1;
    if (t == NULL) return ex_fail(AMP_ERR_NAME, "%s is not in the file", p->name);
    if (t->ndim != p->weight.ndim || t->shape[0] != (conv1d ? cols : rows) ||
        (t->ndim == 2 && t->shape[1] != (conv1d ? rows : cols)))
        return ex_fail(AMP_ERR_SHAPE, "%s: its shape is not the model's", p->name);
    *out = t;
    return model_check_floats(t);
}
/* Its elements, as [out, in].  scratch: as large as values. */
static inline amp_result gpt_file_tensor(const gpt_file *file, const gpt *g, int64_t i, float *values, float *scratch) {
    const amp_param *p = &g->params[i];
    const st_tensor *t = NULL;
    int conv1d = gpt_is_conv1d(g, i);
    EX_TRY(gpt_file_check(file, g, i, &t));
    EX_TRY(ex_st(st_floats(t, conv1d ? scratch : values)));
    if (conv1d) gpt_transpose(values, scratch, p->weight.shape[1], p->weight.shape[0]);
    return AMP_OK;
}

/* Where parameter i begins in an llm.c file, in elements: tensors of one kind are stored together for all layers. */
static inline int64_t gpt_file_llmc_offset(const gpt_file *file, const gpt *g, int64_t i) {
    int64_t C = g->config.channels, L = g->config.layers, offset = 0, part = (i - 2) % GPT_PARTS,
            layer = (i - 2) / GPT_PARTS, k;
    if (i == 0) return 0;
    offset = file->padded_vocab * C;
    if (i == 1) return offset;
    offset += g->config.positions * C;
    if (i >= g->n_params - 2) part = GPT_PARTS, layer = 0;
    for (k = 0; k < part; k++)
        offset += L * gpt_parts[k].rows * C * (gpt_parts[k].cols > 0 ? gpt_parts[k].cols * C : 1);
    if (part == GPT_PARTS) return offset + (i == g->n_params - 1 ? C : 0);
    return offset + layer * amp_tensor_count(&g->params[i].weight);
}

/* Refuses a file whose output weights are not the embedding. */
static inline amp_result gpt_file_check_tied(const gpt_file *file) {
    const st_tensor *head = st_find(&file->weights.tensors, "lm_head.weight"),
                    *wte = gpt_file_find(file, "transformer.wte.weight");
    if (head == NULL || wte == NULL) return AMP_OK;
    if (head->type == wte->type && head->bytes == wte->bytes && memcmp(head->data, wte->data, wte->bytes) == 0)
        return AMP_OK;
    return ex_fail(AMP_ERR_UNSUPPORTED, "lm_head.weight differs from wte.weight: this model ties them");
}

/* Names what the file has beside the model's weights, or refuses it. */
static inline amp_result gpt_file_rest(gpt_file *file, const gpt *g) {
    const st_file *tensors = &file->weights.tensors;
    int is_llama = file->config.kv_heads > 0;
    unsigned char *known = (unsigned char *)calloc((size_t)tensors->n + 1, 1);
    int64_t i;
    amp_result result;
    if (known == NULL) return ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)tensors->n);
    for (i = 0; i < g->n_params; i++) weights_mark(tensors, gpt_file_find(file, g->params[i].name), known);
    if (!is_llama) weights_mark(tensors, st_find(tensors, "lm_head.weight"), known);       /* equal to wte */
    result = weights_rest(tensors, known, is_llama ? "model." : "transformer.",
                          is_llama ? LLAMA_ROOTS : "h. wte. wpe. ln_f. lm_head.", &file->described);
    free(known);
    return result;
}

/* Loads all weights of a file with the model's shape, or none. */
static inline amp_result gpt_file_load(gpt_file *file, gpt *g) {
    int64_t i, count, largest = 0;
    const st_tensor *t;
    float *values, *scratch;
    amp_result result = AMP_OK;
    if (file->llmc == 0 && file->config.kv_heads == 0) EX_TRY(gpt_file_check_tied(file));
    if (file->config.vocab != g->config.vocab || file->config.positions != g->config.positions ||
        file->config.channels != g->config.channels || file->config.layers != g->config.layers ||
        file->config.hidden != g->config.hidden || file->config.kv_heads != g->config.kv_heads)
        return ex_fail(AMP_ERR_SHAPE,
                            "the file holds another model: %lld tokens, %lld positions, %lld channels, %lld layers",
                            (long long)file->config.vocab, (long long)file->config.positions,
                            (long long)file->config.channels, (long long)file->config.layers);
    if (file->config.heads != g->config.heads || file->config.act != g->config.act ||
        file->config.eps < g->config.eps || file->config.eps > g->config.eps ||
        file->config.unscaled != g->config.unscaled || file->config.by_layer != g->config.by_layer)
        return ex_fail(AMP_ERR_MISMATCH,
                            "the file's model has other heads, or another activation, epsilon or attention scale");
    for (i = 0; i < g->n_params && file->llmc == 0; i++) EX_TRY(gpt_file_check(file, g, i, &t));
    if (file->llmc == 0) EX_TRY(gpt_file_rest(file, g));
    for (i = 0; i < g->n_params; i++) if ((count = amp_tensor_count(&g->params[i].weight)) > largest) largest = count;
    values = (float *)malloc((size_t)largest * 2 * sizeof *values);
    if (values == NULL) return ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 8);
    scratch = values + largest;
    for (i = 0; i < g->n_params && result == AMP_OK; i++) {
        if (file->llmc == 0) result = gpt_file_tensor(file, g, i, values, scratch);
        else {
            amp_dtype dtype = file->llmc == 3 ? AMP_F32 : AMP_BF16;
            int64_t offset = GPT_LLMC_HEADER + gpt_file_llmc_offset(file, g, i) * (int64_t)amp_dtype_size(dtype);
            result = amp_convert(values, AMP_F32, (char *)file->data + offset, dtype,
                                 amp_tensor_count(&g->params[i].weight), NULL, NULL);
        }
        if (result == AMP_OK) result = gpt_set(g, i, values);
    }
    free(values);
    return result == AMP_OK ? config_take(&g->json, &file->described) : result;
}

/* The config.json that transformers' from_pretrained needs beside model.safetensors. */
static inline void gpt_config_text(const gpt *g, json_buffer *b) {
    const gpt_config *c = &g->config;
    config_own own[20];
    int n = 0;
    if (c->kv_heads > 0) {
        llama_config_text(&g->as_llama.config, g->json, b);
        return;
    }
    config_own_put(&own[n++], "architectures", CONFIG_SET, "[\"GPT2LMHeadModel\"]");
    config_own_put(&own[n++], "dtype", CONFIG_REPLACE, "\"float32\"");
    config_own_put(&own[n++], "torch_dtype", CONFIG_REPLACE, "\"float32\"");
    config_own_put(&own[n++], "model_type", CONFIG_ADD, "\"gpt2\"");
    config_own_put(&own[n++], "activation_function", CONFIG_ADD, "\"%s\"", config_activation_text(c->act));
    config_own_put(&own[n++], "layer_norm_epsilon", CONFIG_ADD, "%g", (double)c->eps);
    config_own_put(&own[n++], "scale_attn_weights", CONFIG_ADD, c->unscaled ? "false" : "true");
    config_own_put(&own[n++], "scale_attn_by_inverse_layer_idx", CONFIG_ADD, c->by_layer ? "true" : "false");
    config_own_put(&own[n++], "vocab_size", CONFIG_ADD, "%lld", (long long)c->vocab);
    config_own_put(&own[n++], "n_positions", CONFIG_ADD, "%lld", (long long)c->positions);
    config_own_put(&own[n++], "n_embd", CONFIG_ADD, "%lld", (long long)c->channels);
    config_own_put(&own[n++], "n_layer", CONFIG_ADD, "%lld", (long long)c->layers);
    config_own_put(&own[n++], "n_head", CONFIG_ADD, "%lld", (long long)c->heads);
    config_own_put(&own[n++], "tie_word_embeddings", CONFIG_ADD, "true");
    if (g->json == NULL) config_own_put(&own[n++], "bos_token_id", CONFIG_ADD, "null");
    if (g->json == NULL) config_own_put(&own[n++], "eos_token_id", CONFIG_ADD, "null");
    config_merge(b, g->json, own, n);
}

/* The whole file up to st_write_end: the description, names and shapes, and then the elements. */
static inline amp_result gpt_write(gpt *g, int64_t step, st_writer *w) {
    json_buffer config = {NULL, 0, 0, 0};
    int64_t i, largest = 0, count;
    float *values, *scratch;
    amp_result result;
    gpt_config_text(g, &config);
    result = model_write_meta(w, &config, step);
    free(config.text);
    EX_TRY(result);
    for (i = 0; i < g->n_params; i++) {
        const amp_tensor *t = &g->params[i].weight;
        int conv1d = gpt_is_conv1d(g, i);
        int64_t turned[2];
        turned[0] = t->shape[1]; turned[1] = t->shape[0];
        st_write_tensor(w, g->params[i].name, t->ndim, conv1d ? turned : t->shape);
        if ((count = amp_tensor_count(t)) > largest) largest = count;
    }
    EX_TRY(ex_st(st_write_begin(w)));
    values = (float *)malloc((size_t)largest * 2 * sizeof *values);
    result = values != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 8);
    scratch = values + largest;
    for (i = 0; i < g->n_params && result == AMP_OK; i++) {
        const amp_tensor *t = &g->params[i].weight;
        int conv1d = gpt_is_conv1d(g, i);
        result = gpt_get(g, i, conv1d ? scratch : values);
        if (result == AMP_OK && conv1d) gpt_transpose(values, scratch, t->shape[0], t->shape[1]);
        if (result == AMP_OK) st_write_floats(w, values, amp_tensor_count(t));
    }
    free(values);
    return result;
}

/* Writes the weights as fp32 safetensors with Hugging Face's names, atomically. */
static inline amp_result gpt_save_safetensors(gpt *g, const char *path, int64_t step) {
    st_writer w;
    memset(&w, 0, sizeof w);
    return model_write_end(&w, path, gpt_write(g, step, &w));
}

static inline amp_result gpt_save_config(const gpt *g, const char *path) {
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    gpt_config_text(g, &b);
    result = config_save(&b, path);
    free(b.text);
    return result;
}

#endif
