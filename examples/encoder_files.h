/* encoder_files.h - the weights of encoder.h's models: initialised, and read and written as safetensors with Hugging
 * Face's names, with or without the family's prefix, and config.json beside them. */
#ifndef EXAMPLES_ENCODER_FILES_H
#define EXAMPLES_ENCODER_FILES_H

#include "encoder.h"
#include "model_folder.h"

/* BERT's initialisation of one parameter: normal with deviation 0.02, biases 0, LayerNorm weights 1.  scratch: as many
   floats as it has elements. */
static inline amp_result encoder_init_param(encoder *e, int64_t i, uint64_t seed, float *scratch) {
    const amp_param *p = &e->params[i];
    int64_t k, count = amp_tensor_count(&p->weight);
    int norm = strstr(p->name, "LayerNorm.weight") != NULL;
    if (p->weight.ndim == 2) ex_normal(scratch, count, seed, (uint64_t)i + 1, 0.02f);
    else for (k = 0; k < count; k++) scratch[k] = norm ? 1.0f : 0.0f;
    return model_param_set(e->amp, e->optimizer, &e->params[i], scratch);
}

/* Room for the elements of the largest parameter, with the rows that a file has before them; the caller frees it. */
static inline float *encoder_scratch(const encoder *e) {
    int64_t i, count, largest = 0;
    float *scratch;
    for (i = 0; i < e->n_params; i++) if ((count = amp_tensor_count(&e->params[i].weight)) > largest) largest = count;
    largest += encoder_kinds[e->config.family].first * e->config.embedding;
    scratch = (float *)malloc((size_t)largest * sizeof *scratch);
    if (scratch == NULL) ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 4);
    return scratch;
}

static inline amp_result encoder_init(encoder *e, uint64_t seed) {
    float *scratch = encoder_scratch(e);
    amp_result result = scratch != NULL ? AMP_OK : AMP_ERR_MEMORY;
    int64_t i;
    for (i = 0; i < e->n_params && result == AMP_OK; i++) result = encoder_init_param(e, i, seed, scratch);
    free(scratch);
    return result;
}

typedef struct encoder_file {
    model_weights weights;
    config_model described;
    encoder_config config;          /* as the file says; classes 0: it has no head */
    int64_t *windows;               /* of config */
    char **labels;                  /* names of the classes */
    int64_t n_labels;
} encoder_file;

static inline void encoder_file_close(encoder_file *file) {
    int64_t i;
    for (i = 0; i < file->n_labels; i++) free(file->labels[i]);
    free(file->labels);
    weights_close(&file->weights);
    config_close(&file->described);
    free(file->windows);
    memset(file, 0, sizeof *file);
}

/* A parameter in the file: one tensor, or several whose rows follow each other.  skip: the tensor's rows before the
   parameter's. */
typedef struct encoder_piece { char name[96]; int64_t rows, cols, skip; } encoder_piece;

static inline int encoder_pieces(const amp_param *p) {
    return strstr(p->name, ".qkv.") != NULL ? 3 : strstr(p->name, ".kv_global.") != NULL ? 2 : 1;
}
static inline void encoder_piece_get(const encoder *e, const amp_param *p, int part, encoder_piece *out) {
    static const char *const names[2][3] = {{"query", "key", "value"}, {"key_global", "value_global", NULL}};
    const char *packed = strstr(p->name, ".qkv."), *other = strstr(p->name, ".kv_global."),
               *at = packed != NULL ? packed : other;
    if (at == NULL) snprintf(out->name, sizeof out->name, "%s", p->name);
    else snprintf(out->name, sizeof out->name, "%.*s.%s%s", (int)(at - p->name), p->name, names[packed == NULL][part],
                  strchr(at + 1, '.'));
    out->rows = p->weight.shape[0] / encoder_pieces(p);
    out->cols = p->weight.ndim == 2 ? p->weight.shape[1] : 0;
    out->skip = strstr(p->name, "position_embeddings") != NULL ? encoder_kinds[e->config.family].first : 0;
}

/* By the full name or without the prefix; older files call LayerNorm's weight and bias gamma and beta. */
static inline const st_tensor *encoder_file_find(const st_file *tensors, encoder_family family, const char *name) {
    const char *prefix = encoder_kinds[family].prefix, *last = strrchr(name, '.');
    size_t length = strlen(prefix);
    const st_tensor *t = st_find(tensors, name);
    char older[96];
    if (t == NULL && strncmp(name, prefix, length) == 0) t = st_find(tensors, name + length);
    if (t != NULL || last == NULL || strstr(name, "LayerNorm") == NULL || strstr(last, "gamma") || strstr(last, "beta"))
        return t;
    snprintf(older, sizeof older, "%.*s.%s", (int)(last - name), name, strcmp(last, ".weight") == 0 ? "gamma" : "beta");
    return encoder_file_find(tensors, family, older);
}

/* transformers' names of these models, and how their classes' names begin. */
typedef struct encoder_type { const char *name, *classes; encoder_family family; } encoder_type;
static const encoder_type encoder_types[] = {
    {"bert", "Bert", ENCODER_BERT},           {"roberta", "Roberta", ENCODER_ROBERTA},
    {"electra", "Electra", ENCODER_ELECTRA},  {"longformer", "Longformer", ENCODER_LONGFORMER},
    {"deberta-v2", "DebertaV2", ENCODER_DEBERTA},
    {"xlm-roberta", "XLMRoberta", ENCODER_ROBERTA}, {"camembert", "Camembert", ENCODER_ROBERTA},
};
enum { ENCODER_TYPES = (int)(sizeof encoder_types / sizeof *encoder_types) };

/* The type that config.json names; without one, by the prefix of the tensors' names. */
static inline amp_result encoder_type_of(const config_model *m, const st_file *tensors, const encoder_type **out) {
    char name[64] = "";
    json value;
    int64_t i;
    int k;
    EX_TRY(config_word(m, "model_type", name));
    for (k = 0; k < ENCODER_TYPES; k++)
        if (strcmp(name, encoder_types[k].name) == 0) {
            *out = &encoder_types[k];
            return AMP_OK;
        }
    if (config_get(m, "model_type", &value))
        return config_refuse(m, "model_type", "must be bert, roberta, xlm-roberta, camembert, electra, longformer or "
                             "deberta-v2");
    *out = encoder_types;
    for (k = 1; k < ENCODER_KINDS; k++)
        for (i = 0; i < tensors->n; i++)
            if (strncmp(tensors->tensors[i].name, encoder_kinds[k].prefix, strlen(encoder_kinds[k].prefix)) == 0)
                *out = &encoder_types[k];
    return AMP_OK;
}

static inline const st_tensor *encoder_file_body(const encoder_file *file, const char *name) {
    char full[96];
    snprintf(full, sizeof full, "%s%s", encoder_kinds[file->config.family].prefix, name);
    return encoder_file_find(&file->weights.tensors, file->config.family, full);
}

static const config_only encoder_config_only[] = {
    {"is_decoder", "false"},     {"position_embedding_type", "\"absolute\""},
    {"attention_mode", "\"longformer\""}, {"ignore_attention_mask", "false"}, {"autoregressive", "false"},
    {"problem_type", "null|\"single_label_classification\""},
    {"relative_attention", "true"}, {"share_att_key", "true"}, {"position_biased_input", "false"},
    {"norm_rel_ebd", "\"layer_norm\""}, {"conv_kernel_size", "0|null"}, {"pooler_hidden_act", "\"gelu\""},
    {NULL, NULL},
};
static const config_rules encoder_config_rules =
    {"model_type vocab_size max_position_embeddings type_vocab_size hidden_size num_hidden_layers num_attention_heads "
     "intermediate_size embedding_size hidden_act layer_norm_eps attention_window hidden_dropout_prob "
     "attention_probs_dropout_prob "
     "classifier_dropout position_buckets max_relative_positions pos_att_type attention_head_size "
     "pooler_hidden_size pooler_dropout cls_dropout",
     "legacy tie_word_embeddings onnx_export directionality pooler_fc_size pooler_num_attention_heads "
     "pooler_num_fc_layers pooler_size_per_head pooler_type",
     encoder_config_only,
     "num_attention_heads hidden_act layer_norm_eps attention_window position_buckets max_relative_positions"};

/* Longformer's windows: one for each layer, or one for all.  windows: space for one of each layer. */
static inline amp_result encoder_read_windows(const config_model *m, encoder_config *c, int64_t *windows) {
    json value;
    int64_t layer = 0, number;
    int list;
    for (layer = 0; layer < c->layers; layer++) windows[layer] = 256;
    c->windows = windows;
    c->window = 256;
    if (!config_get(m, "attention_window", &value)) return AMP_OK;
    list = json_take(&value, '[');
    for (layer = 0; layer < c->layers && (layer == 0 || (list && json_take(&value, ','))); layer++) {
        number = json_integer(&value);
        if (value.bad || number < 2 || number % 2 != 0 || number / 2 > ENCODER_WINDOW) break;
        windows[layer] = number / 2;
    }
    if (list ? layer != c->layers || !json_take(&value, ']') : layer != 1 || value.at != value.end)
        return config_refuse(m, "attention_window",
                             "must be an even number from 2, or a list of them, one for each of the %lld layers",
                             (long long)c->layers);
    for (; layer < c->layers; layer++) windows[layer] = windows[0];
    c->window = windows[0];
    return AMP_OK;
}

/* DeBERTa's distances, and that its attention is the one of deberta.h: where the file says nothing it is not.
   c->distances.most: half the rows of its table. */
static inline amp_result encoder_read_distances(config_model *m, encoder_config *c) {
    static const char *const needed[] = {"relative_attention", "share_att_key", "position_biased_input", "norm_rel_ebd",
                                         "pos_att_type"};
    int64_t rows = c->distances.most, most = -1, i;
    char terms[64] = "";
    json value;
    for (i = 0; i < 5; i++)
        if (!config_get(m, needed[i], &value))
            return ex_fail(AMP_ERR_UNSUPPORTED, "%s: no %s: this kind of model is not supported", m->path,
                                needed[i]);
    snprintf(terms, sizeof terms, "%.*s", (int)(value.end - value.at), value.at);
    if (strstr(terms, "c2p") == NULL || strstr(terms, "p2c") == NULL)
        return config_refuse(m, "pos_att_type", "must have both c2p and p2c");
    c->positions = 512;
    EX_TRY(config_integer(m, "max_position_embeddings", 1, INT32_MAX, &c->positions));
    EX_TRY(config_integer(m, "max_relative_positions", -1, 1 << 20, &most));
    c->distances.most = most < 1 ? c->positions : most;
    c->distances.buckets = -1;
    EX_TRY(config_integer(m, "position_buckets", -1, 1 << 20, &c->distances.buckets));
    if (c->distances.buckets < 0) c->distances.buckets = 0;
    if (c->distances.buckets > 0 && (c->distances.buckets < 4 || c->distances.most <= c->distances.buckets / 2 + 1))
        return config_refuse(m, "position_buckets", "must be 4 or more, and half of it less than %lld distances",
                             (long long)c->distances.most - 1);
    if (deberta_span(&c->distances) != rows)
        return config_refuse(m, c->distances.buckets > 0 ? "position_buckets" : "max_relative_positions",
                             "the weights have %lld", (long long)rows);
    EX_TRY(config_shape(m, "pooler_hidden_size", c->hidden));
    EX_TRY(config_shape(m, "attention_head_size", c->hidden / c->heads));
    EX_TRY(config_dropout(m, "pooler_dropout"));
    return config_dropout(m, "cls_dropout");
}

/* Reads what no shape tells, and checks the rest against the weights. */
static inline amp_result encoder_read_config(config_model *m, encoder_config *c, int64_t *windows) {
    int64_t pad = 1, types = 0;
    int deberta = c->family == ENCODER_DEBERTA;
    double eps = deberta ? 1e-7 : 1e-12;        /* transformers' default, like the others */
    EX_TRY(config_shape(m, "vocab_size", c->vocab));
    if (!deberta) EX_TRY(config_shape(m, "max_position_embeddings", c->positions));
    if (!deberta) EX_TRY(config_shape(m, "type_vocab_size", c->types));
    else EX_TRY(config_integer(m, "type_vocab_size", 0, 0, &types));
    EX_TRY(config_shape(m, "hidden_size", c->hidden));
    EX_TRY(config_shape(m, "num_hidden_layers", c->layers));
    EX_TRY(config_shape(m, "intermediate_size", c->intermediate));
    if (c->family == ENCODER_ELECTRA || deberta) EX_TRY(config_shape(m, "embedding_size", c->embedding));
    c->heads = c->family == ENCODER_ELECTRA ? 4 : deberta ? 24 : 12;
    EX_TRY(config_integer(m, "num_attention_heads", 1, INT32_MAX, &c->heads));
    if (c->hidden % c->heads != 0)
        return config_refuse(m, "num_attention_heads", "%lld heads do not divide a width of %lld", (long long)c->heads,
                             (long long)c->hidden);
    c->act = AMP_ACT_GELU_ERF;
    EX_TRY(config_activation(m, "hidden_act", &c->act));
    EX_TRY(config_number(m, "layer_norm_eps", 1e-37, 1e37, &eps));
    c->eps = (float)eps;
    if (encoder_kinds[c->family].first > 0) EX_TRY(config_integer(m, "pad_token_id", 0, INT32_MAX, &pad));
    if (pad != encoder_kinds[c->family].first - 1 && encoder_kinds[c->family].first > 0)
        return config_refuse(m, "pad_token_id", "must be 1: positions are counted from the number after it");
    if (c->family == ENCODER_LONGFORMER) EX_TRY(encoder_read_windows(m, c, windows));
    if (deberta) EX_TRY(encoder_read_distances(m, c));
    EX_TRY(config_dropout(m, "hidden_dropout_prob"));
    EX_TRY(config_dropout(m, "attention_probs_dropout_prob"));
    return config_dropout(m, "classifier_dropout");
}

/* How many classes "id2label" of a config.json names; 0: none. */
static inline int64_t config_count_labels(const char *text, size_t bytes) {
    json labels, value;
    char key[128];
    int64_t n = 0;
    int more;
    if (!json_value(json_open(text, bytes), "id2label", &labels) || !json_take(&labels, '{')) return 0;
    for (more = json_peek(&labels) == '"'; more && json_member(&labels, key, &value); more = json_take(&labels, ','))
        n++;
    return n;
}

/* The labels' names, {"0": "bad", "1": "good"}: each class once.  names: space for n. */
static inline amp_result config_read_labels(const config_model *m, char **names, int64_t n) {
    json labels, value, number;
    char key[128];
    int64_t i;
    int more;
    if (!json_value(json_open(m->text, m->bytes), "id2label", &labels)) return AMP_OK;
    if (!json_take(&labels, '{')) return *labels.at == 'n' ? AMP_OK : config_refuse(m, "id2label", "must be an object");
    for (more = json_peek(&labels) == '"'; more && json_member(&labels, key, &value); more = json_take(&labels, ',')) {
        number = json_open(key, strlen(key));
        i = json_integer(&number);
        if (number.bad || number.at != number.end || i < 0 || i >= n || names[i] != NULL || *value.at != '"')
            return config_refuse(m, "id2label", "must name each class from \"0\" to \"%lld\" once",
                                 (long long)n - 1);
        names[i] = (char *)malloc((size_t)(value.end - value.at));
        if (names[i] == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its labels", m->path);
        (void)json_text(value, names[i], (size_t)(value.end - value.at));
    }
    return AMP_OK;
}

static inline amp_result encoder_file_shape(encoder_file *file, const char *path) {
    encoder_config *c = &file->config;
    const encoder_type *type = encoder_types;
    const st_tensor *words, *positions, *types, *down, *out;
    char name[96];
    int deberta;
    EX_TRY(config_open(&file->described, &file->weights.tensors, path, &encoder_config_rules));
    EX_TRY(encoder_type_of(&file->described, &file->weights.tensors, &type));
    c->family = type->family;
    words = encoder_file_body(file, "embeddings.word_embeddings.weight");
    deberta = c->family == ENCODER_DEBERTA;
    positions = encoder_file_body(file, deberta ? "encoder.rel_embeddings.weight"
                                                : "embeddings.position_embeddings.weight");
    types = deberta ? words : encoder_file_body(file, "embeddings.token_type_embeddings.weight");
    down = encoder_file_body(file, "encoder.layer.0.output.dense.weight");
    if (words == NULL || positions == NULL || types == NULL || down == NULL || words->ndim != 2 ||
        positions->ndim != 2 || types->ndim != 2 || down->ndim != 2)
        return ex_fail(AMP_ERR_FORMAT, "%s: not an encoder like BERT: embeddings or the first layer are missing",
                            path);
    c->vocab = words->shape[0]; c->positions = positions->shape[0]; c->types = deberta ? 0 : types->shape[0];
    c->distances.most = positions->shape[0] / 2;
    c->embedding = words->shape[1]; c->hidden = down->shape[0]; c->intermediate = down->shape[1];
    for (c->layers = 1; c->layers < 10000; c->layers++) {
        snprintf(name, sizeof name, "encoder.layer.%lld.output.dense.weight", (long long)c->layers);
        if (encoder_file_body(file, name) == NULL) break;
    }
    snprintf(name, sizeof name, "%s.weight", encoder_kinds[c->family].out);
    out = st_find(&file->weights.tensors, name);
    c->classes = out != NULL && out->ndim == 2 ? out->shape[0] : 0;
    file->windows = (int64_t *)calloc((size_t)c->layers, sizeof *file->windows);
    file->n_labels = config_count_labels(file->described.text, file->described.bytes);
    file->labels = (char **)calloc((size_t)file->n_labels + 1, sizeof *file->labels);
    if (file->windows == NULL || file->labels == NULL)
        return ex_fail(AMP_ERR_MEMORY, "%s: no memory for its windows and labels", path);
    EX_TRY(encoder_read_config(&file->described, c, file->windows));
    if (c->classes > 0 && file->n_labels > 0 && file->n_labels != c->classes)
        return config_refuse(&file->described, "id2label", "names %lld classes, the weights have %lld",
                             (long long)file->n_labels, (long long)c->classes);
    return config_read_labels(&file->described, file->labels, file->n_labels);
}

/* Opens a model's folder, or one file, and reads its shape.  Nothing in it is trusted. */
static inline amp_result encoder_file_open(encoder_file *file, const char *path) {
    amp_result result;
    memset(file, 0, sizeof *file);
    EX_TRY(weights_open(&file->weights, path));
    result = encoder_file_shape(file, file->weights.path);
    if (result != AMP_OK) encoder_file_close(file);
    return result;
}

/* Checks that the pieces of parameter i exist with their shapes and supported dtypes. */
static inline amp_result encoder_file_check(const encoder_file *file, encoder *e, int64_t i) {
    const amp_param *p = &e->params[i];
    encoder_piece piece;
    int part;
    for (part = 0; part < encoder_pieces(p); part++) {
        const st_tensor *t;
        encoder_piece_get(e, p, part, &piece);
        t = encoder_file_find(&file->weights.tensors, e->config.family, piece.name);
        if (t == NULL) return ex_fail(AMP_ERR_NAME, "%s is not in the file", piece.name);
        if (t->ndim != p->weight.ndim || t->shape[0] != piece.rows + piece.skip ||
            (t->ndim == 2 && t->shape[1] != piece.cols))
            return ex_fail(AMP_ERR_SHAPE, "%s: its shape is not the model's", piece.name);
        EX_TRY(model_check_floats(t));
    }
    return AMP_OK;
}

/* The elements of parameter i.  values, scratch: see encoder_scratch. */
static inline amp_result encoder_file_param(const encoder_file *file, encoder *e, int64_t i, float *values,
                                            float *scratch) {
    const amp_param *p = &e->params[i];
    encoder_piece piece;
    int part;
    EX_TRY(encoder_file_check(file, e, i));
    for (part = 0; part < encoder_pieces(p); part++) {
        const st_tensor *t;
        int64_t width, skipped;
        encoder_piece_get(e, p, part, &piece);
        t = encoder_file_find(&file->weights.tensors, e->config.family, piece.name);
        width = piece.cols > 0 ? piece.cols : 1;
        skipped = piece.skip * width;
        EX_TRY(ex_st(st_floats(t, scratch)));
        memcpy(values + part * piece.rows * width, scratch + skipped, (size_t)(piece.rows * width) * sizeof *values);
    }
    return AMP_OK;
}

/* 1: parameter i belongs to a head that the file lacks, or has for another number of classes. */
static inline int encoder_file_lacks(const encoder_file *file, const encoder *e, int64_t i) {
    int64_t head = e->n_params - ENCODER_HEAD;
    return i >= head && (encoder_file_find(&file->weights.tensors, e->config.family, e->params[i].name) == NULL ||
                         (i >= head + 2 && file->config.classes != e->config.classes));
}

/* Names what the file has beside the model's weights, or refuses it.  DeBERTa's files may have a table of positions
   that it does not add. */
static inline amp_result encoder_file_rest(encoder_file *file, const encoder *e) {
    const st_file *tensors = &file->weights.tensors;
    encoder_family family = e->config.family;
    unsigned char *known = (unsigned char *)calloc((size_t)tensors->n + 1, 1);
    encoder_piece piece;
    int64_t i;
    int part;
    amp_result result;
    if (known == NULL) return ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)tensors->n);
    for (i = 0; i < e->n_params; i++)
        for (part = 0; part < encoder_pieces(&e->params[i]); part++) {
            encoder_piece_get(e, &e->params[i], part, &piece);
            weights_mark(tensors, encoder_file_find(tensors, family, piece.name), known);
        }
    if (family == ENCODER_DEBERTA)
        weights_mark(tensors, encoder_file_body(file, "embeddings.position_embeddings.weight"), known);
    result = weights_rest(tensors, known, encoder_kinds[family].prefix, "embeddings. embeddings_project. encoder.",
                          &file->described);
    free(known);
    return result;
}

/* Loads the weights of a file with the model's shape.  A head that the file lacks, or has for another number of
   classes, is initialised; *fresh: how many of its parameters. */
static inline amp_result encoder_file_load(encoder_file *file, encoder *e, uint64_t seed, int *fresh) {
    float *values = encoder_scratch(e), *scratch = encoder_scratch(e);
    int64_t i;
    amp_result result = values != NULL && scratch != NULL ? AMP_OK : AMP_ERR_MEMORY;
    *fresh = 0;
    for (i = 0; i < e->n_params && result == AMP_OK; i++)
        if (!encoder_file_lacks(file, e, i)) result = encoder_file_check(file, e, i);
    if (result == AMP_OK) result = encoder_file_rest(file, e);
    for (i = 0; i < e->n_params && result == AMP_OK; i++) {
        int missing = encoder_file_lacks(file, e, i);
        *fresh += missing;
        if (missing) result = encoder_init_param(e, i, seed, values);
        else {
            result = encoder_file_param(file, e, i, values, scratch);
            if (result == AMP_OK) result = model_param_set(e->amp, e->optimizer, &e->params[i], values);
        }
    }
    free(values);
    free(scratch);
    return result == AMP_OK ? config_take(&e->json, &file->described) : result;
}

/* {"0": "bad", "1": "good"}, or the other way round; classes without a name are LABEL_2 and so on. */
static inline void encoder_labels_text(json_buffer *b, const char *const *names, int64_t n, int64_t classes,
                                       int inverse) {
    int64_t i;
    for (i = 0; i < classes; i++) {
        json_add(b, "%s", i > 0 ? ", \"" : "{\"");
        if (!inverse) json_add(b, "%lld\": \"", (long long)i);
        if (i < n) json_add_escaped(b, names[i]);
        else json_add(b, "LABEL_%lld", (long long)i);
        if (inverse) json_add(b, "\": %lld", (long long)i);
        else json_add(b, "\"");
    }
    json_add(b, "}");
}

/* The config.json that transformers' from_pretrained needs beside model.safetensors.  names: of n classes; n 0: those
   that the model came with, if their number matches. */
static inline void encoder_config_text(const encoder *e, const char *const *names, int64_t n, json_buffer *b) {
    const encoder_config *c = &e->config;
    const encoder_type *type = &encoder_types[c->family];       /* the first ones are in the families' order */
    json_buffer labels = {NULL, 0, 0, 0}, numbers = {NULL, 0, 0, 0}, windows = {NULL, 0, 0, 0};
    size_t bytes = e->json != NULL ? strlen(e->json) : 0;
    int kept = n == 0 && config_count_labels(e->json, bytes) == c->classes;
    config_own own[32];
    char name[64];
    int64_t layer;
    int k = 0, i;
    if (json_find(json_open(e->json, bytes), "model_type", name, sizeof name))
        for (i = 0; i < ENCODER_TYPES; i++) if (strcmp(name, encoder_types[i].name) == 0) type = &encoder_types[i];
    config_own_put(&own[k++], "architectures", CONFIG_SET, "[\"%sForSequenceClassification\"]", type->classes);
    config_own_put(&own[k++], "dtype", CONFIG_REPLACE, "\"float32\"");
    config_own_put(&own[k++], "torch_dtype", CONFIG_REPLACE, "\"float32\"");
    config_own_put(&own[k++], "model_type", CONFIG_ADD, "\"%s\"", type->name);
    config_own_put(&own[k++], "hidden_act", CONFIG_ADD, "\"%s\"", config_activation_text(c->act));
    config_own_put(&own[k++], "layer_norm_eps", CONFIG_ADD, "%g", (double)c->eps);
    config_own_put(&own[k++], "pad_token_id", CONFIG_ADD, "%d", encoder_kinds[c->family].first > 0);
    config_own_put(&own[k++], "vocab_size", CONFIG_ADD, "%lld", (long long)c->vocab);
    config_own_put(&own[k++], "max_position_embeddings", CONFIG_ADD, "%lld", (long long)c->positions);
    config_own_put(&own[k++], "type_vocab_size", CONFIG_ADD, "%lld", (long long)c->types);
    config_own_put(&own[k++], "hidden_size", CONFIG_ADD, "%lld", (long long)c->hidden);
    config_own_put(&own[k++], "num_hidden_layers", CONFIG_ADD, "%lld", (long long)c->layers);
    config_own_put(&own[k++], "num_attention_heads", CONFIG_ADD, "%lld", (long long)c->heads);
    config_own_put(&own[k++], "intermediate_size", CONFIG_ADD, "%lld", (long long)c->intermediate);
    if (c->family == ENCODER_ELECTRA)
        config_own_put(&own[k++], "embedding_size", CONFIG_ADD, "%lld", (long long)c->embedding);
    if (c->family == ENCODER_LONGFORMER) {
        for (layer = 0; layer < c->layers; layer++)
            json_add(&windows, "%s%lld", layer > 0 ? ", " : "[", (long long)e->windows[layer] * 2);
        json_add(&windows, "]");
        config_own_put(&own[k], "attention_window", CONFIG_SET, "%s", "");
        own[k++].longer = windows.text;
    }
    if (c->family == ENCODER_DEBERTA) {
        config_own_put(&own[k++], "relative_attention", CONFIG_ADD, "true");
        config_own_put(&own[k++], "share_att_key", CONFIG_ADD, "true");
        config_own_put(&own[k++], "position_biased_input", CONFIG_ADD, "false");
        config_own_put(&own[k++], "norm_rel_ebd", CONFIG_ADD, "\"layer_norm\"");
        config_own_put(&own[k++], "pos_att_type", CONFIG_ADD, "[\"p2c\", \"c2p\"]");
        config_own_put(&own[k++], "max_relative_positions", CONFIG_ADD, "%lld", (long long)c->distances.most);
        config_own_put(&own[k++], "position_buckets", CONFIG_ADD, "%lld",
                       (long long)(c->distances.buckets > 0 ? c->distances.buckets : -1));
    }
    if (!kept) {
        encoder_labels_text(&labels, names, n, c->classes, 0);
        encoder_labels_text(&numbers, names, n, c->classes, 1);
        config_own_put(&own[k], "id2label", CONFIG_SET, "%s", "");
        own[k++].longer = labels.text;
        config_own_put(&own[k], "label2id", CONFIG_SET, "%s", "");
        own[k++].longer = numbers.text;
    }
    config_own_put(&own[k++], "num_labels", CONFIG_REPLACE, "%lld", (long long)c->classes);
    config_merge(b, e->json, own, k);
    if (labels.failed || numbers.failed || windows.failed) b->failed = 1;
    free(labels.text); free(numbers.text); free(windows.text);
}

/* Names the model's classes. */
static inline amp_result encoder_name_labels(encoder *e, const char *const *names, int64_t n) {
    json_buffer b = {NULL, 0, 0, 0};
    encoder_config_text(e, names, n, &b);
    if (b.failed) {
        free(b.text);
        return ex_fail(AMP_ERR_MEMORY, "no memory for the names of %lld classes", (long long)n);
    }
    free(e->json);
    e->json = b.text;
    return AMP_OK;
}

/* Writes the weights as fp32 safetensors with Hugging Face's names, atomically.  Rows that no token reads are 0. */
static inline amp_result encoder_save(encoder *e, const char *path) {
    json_buffer config = {NULL, 0, 0, 0};
    int64_t i, k, skipped = encoder_kinds[e->config.family].first * e->config.embedding;
    float *values = encoder_scratch(e);
    st_writer w;
    amp_result result;
    memset(&w, 0, sizeof w);
    encoder_config_text(e, NULL, 0, &config);
    result = model_write_meta(&w, &config, -1);
    free(config.text);
    for (i = 0; i < e->n_params; i++)
        for (k = 0; k < encoder_pieces(&e->params[i]); k++) {
            encoder_piece piece;
            int64_t shape[2];
            encoder_piece_get(e, &e->params[i], (int)k, &piece);
            shape[0] = piece.rows + piece.skip; shape[1] = piece.cols;
            st_write_tensor(&w, piece.name, piece.cols > 0 ? 2 : 1, shape);
        }
    if (result == AMP_OK) result = ex_st(st_write_begin(&w));
    if (result == AMP_OK && values == NULL) result = ex_fail(AMP_ERR_MEMORY, "no memory to write %s", path);
    for (i = 0; i < e->n_params && result == AMP_OK; i++) {
        int64_t skip = strstr(e->params[i].name, "position_embeddings") != NULL ? skipped : 0;
        for (k = 0; k < skip; k++) values[k] = 0;
        result = model_param_get(e->amp, &e->params[i], values + skip);
        if (result == AMP_OK) st_write_floats(&w, values, amp_tensor_count(&e->params[i].weight) + skip);
    }
    free(values);
    return model_write_end(&w, path, result);
}

static inline amp_result encoder_save_config(const encoder *e, const char *path) {
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    encoder_config_text(e, NULL, 0, &b);
    result = config_save(&b, path);
    free(b.text);
    return result;
}

#endif
