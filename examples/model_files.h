/* model_files.h - the parameters of any model that has Hugging Face's names and shapes, from and to safetensors. */
#ifndef EXAMPLE_MODEL_FILES_H
#define EXAMPLE_MODEL_FILES_H

#include "model.h"
#include "safetensors.h"

/* The result of a call of safetensors.h, bpe.h or wordpiece.h as amp.h's, whose numbers they share. */
static inline amp_result ex_st(int result) {
    return result == ST_OK ? AMP_OK : ex_fail((amp_result)result, "%s", st_error());
}

static inline amp_result model_check_floats(const st_tensor *t) {
    if (t->type != ST_OTHER) return AMP_OK;
    return ex_fail(AMP_ERR_DTYPE, "%s: only F32, F16, BF16 and F64 are read", t->name);
}

/* Sets all weights from a file: nothing, if one is missing or has another shape. */
static inline amp_result model_load_params(const st_file *file, amp_context *amp, amp_param *params, int64_t n) {
    int64_t i, largest = 0;
    float *values;
    amp_result result = AMP_OK;
    for (i = 0; i < n; i++) {
        const amp_tensor *w = &params[i].weight;
        const st_tensor *t = st_find(file, params[i].name);
        if (t == NULL) return ex_fail(AMP_ERR_NAME, "%s is not in the file", params[i].name);
        if (t->ndim != w->ndim || t->shape[0] != w->shape[0] || (t->ndim == 2 && t->shape[1] != w->shape[1]))
            return ex_fail(AMP_ERR_SHAPE, "%s: its shape is not the model's", params[i].name);
        EX_TRY(model_check_floats(t));
        if (t->count > largest) largest = t->count;
    }
    values = (float *)malloc((size_t)largest * sizeof *values);
    if (values == NULL) return ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 4);
    for (i = 0; i < n && result == AMP_OK; i++) {
        result = ex_st(st_floats(st_find(file, params[i].name), values));
        if (result == AMP_OK) result = model_param_set(amp, NULL, &params[i], values);
    }
    free(values);
    return result;
}

/* A writer's metadata: what other programs expect, a place for the checksum, `step` if it is not negative, and a
   copy of
   the model's config.json. */
static inline amp_result model_write_meta(st_writer *w, const json_buffer *config, int64_t step) {
    char text[32];
    st_write_text(w, "format", "pt");
    st_write_checksum(w);
    st_write_text(w, "producer", "amp.h " AMP_VERSION_TEXT);
    snprintf(text, sizeof text, "%lld", (long long)step);
    if (step >= 0) st_write_text(w, "step", text);
    if (config->failed) return ex_fail(AMP_ERR_MEMORY, "no memory for the file's header");
    st_write_text(w, "config", config->text);
    return AMP_OK;
}
/* Ends and writes the file, atomically, if all before it went well; closes the writer. */
static inline amp_result model_write_end(st_writer *w, const char *path, amp_result result) {
    if (result == AMP_OK) result = ex_st(st_write_end(w));
    if (result == AMP_OK) result = ex_file_write(path, w->file, w->bytes);
    st_write_close(w);
    return result;
}

/* Writes parameters as fp32 safetensors, with the description that from_pretrained needs. */
static inline amp_result model_save_params(const char *path, amp_context *amp, const amp_param *params, int64_t n,
                                           const json_buffer *config) {
    int64_t largest = 0, i;
    float *values = NULL;
    st_writer w;
    amp_result result;
    memset(&w, 0, sizeof w);
    result = model_write_meta(&w, config, -1);
    for (i = 0; i < n; i++) {
        st_write_tensor(&w, params[i].name, params[i].weight.ndim, params[i].weight.shape);
        if (amp_tensor_count(&params[i].weight) > largest) largest = amp_tensor_count(&params[i].weight);
    }
    if (result == AMP_OK) result = ex_st(st_write_begin(&w));
    if (result == AMP_OK) values = (float *)malloc((size_t)largest * sizeof *values);
    if (result == AMP_OK && values == NULL) result = ex_fail(AMP_ERR_MEMORY, "no memory to write %s", path);
    for (i = 0; i < n && result == AMP_OK; i++) {
        result = model_param_get(amp, &params[i], values);
        if (result == AMP_OK) st_write_floats(&w, values, amp_tensor_count(&params[i].weight));
    }
    free(values);
    return model_write_end(&w, path, result);
}

/* The key of a parameter's record: "weight.<name>". */
static inline amp_result model_state_key(char key[256], const amp_param *param) {
    if (snprintf(key, 256, "weight.%s", param->name) < 256) return AMP_OK;
    return ex_fail(AMP_ERR_NAME, "the name %.300s is too long for a checkpoint: at most 248 bytes", param->name);
}

/* The weights as records "weight.<name>", in their own dtype: bit for bit. */
static inline amp_result model_save_state(amp_context *amp, const amp_param *params, int64_t n, amp_state *state) {
    int64_t i;
    for (i = 0; i < n; i++) {
        const amp_tensor *w = &params[i].weight;
        int64_t count = amp_tensor_count(w), bytes = count * (int64_t)amp_dtype_size(w->dtype);
        char key[256];
        void *scratch = malloc((size_t)bytes);
        amp_result result = scratch != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)bytes);
        if (result == AMP_OK) result = model_state_key(key, &params[i]);
        if (result == AMP_OK) result = amp_copy(amp, scratch, w->data, bytes, AMP_COPY_TO_HOST);
        if (result == AMP_OK) result = amp_sync(amp);
        if (result == AMP_OK) result = amp_state_put(state, key, w->dtype, scratch, count);
        free(scratch);
        EX_TRY(result);
    }
    return AMP_OK;
}

/* Loads all of them, or none. */
static inline amp_result model_load_state(amp_context *amp, amp_param *params, int64_t n, const amp_state *state) {
    int64_t i, bytes, largest = 1;
    amp_result result = AMP_OK;
    amp_dtype dtype;
    char key[256];
    void *scratch;
    for (i = 0; i < n; i++) {
        const amp_tensor *w = &params[i].weight;
        EX_TRY(model_state_key(key, &params[i]));
        if (amp_state_count(state, key, &dtype) != amp_tensor_count(w) || dtype != w->dtype)
            return ex_fail(AMP_ERR_MISMATCH,
                                "the checkpoint has no record %s of %lld x %s: it is of another model", key,
                                (long long)amp_tensor_count(w), amp_dtype_name(w->dtype));
        bytes = amp_tensor_count(w) * (int64_t)amp_dtype_size(w->dtype);
        if (bytes > largest) largest = bytes;
    }
    scratch = malloc((size_t)largest);
    if (scratch == NULL) return ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest);
    for (i = 0; i < n && result == AMP_OK; i++) {
        const amp_tensor *w = &params[i].weight;
        int64_t count = amp_tensor_count(w);
        (void)model_state_key(key, &params[i]);
        result = amp_state_get(state, key, w->dtype, scratch, count);
        if (result == AMP_OK)
            result = amp_copy(amp, w->data, scratch, count * (int64_t)amp_dtype_size(w->dtype), AMP_COPY_TO_DEVICE);
        if (result == AMP_OK) result = amp_sync(amp);
        amp_param_changed(&params[i]);
    }
    free(scratch);
    return result;
}

#endif
