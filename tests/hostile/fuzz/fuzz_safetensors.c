/* fuzz_safetensors.c - fuzzes the readers of safetensors files, and of models in them and in llm.c's files.
 *
 * A file that was read and can be written is written and read again.  Names, shapes and numbers must be the same, and from
 * then on the bytes too.  This holds for any fp32 file, and for models with Hugging Face's names. */
#include "fuzz.h"

static const char *const safetensors_path = "/nonexistent/input";

static int safetensors_is_writable(const st_file *file) {
    for (int64_t i = 0; i < file->n; i++) {
        const st_tensor *t = &file->tensors[i];
        if (t->type != ST_F32 || t->ndim < 1 || t->ndim > 2 || (t->ndim == 2 && t->shape[1] < 1)) return 0;
    }
    return 1;
}

/* The file as st_writer makes it. */
static unsigned char *safetensors_write(const st_file *file, size_t *bytes) {
    unsigned char *out;
    st_writer w;
    memset(&w, 0, sizeof w);
    st_write_text(&w, "format", "pt");
    for (int64_t i = 0; i < file->n; i++) st_write_tensor(&w, file->tensors[i].name, file->tensors[i].ndim, file->tensors[i].shape);
    if (st_write_begin(&w) != ST_OK) { st_write_close(&w); return NULL; }
    for (int64_t i = 0; i < file->n; i++) {
        float *values = (float *)malloc((size_t)file->tensors[i].count * 4 + 1);
        CLAIM(values != NULL && st_floats(&file->tensors[i], values) == ST_OK);
        st_write_floats(&w, values, file->tensors[i].count);
        free(values);
    }
    CLAIM(st_write_end(&w) == ST_OK);
    out = w.file;
    *bytes = w.bytes;
    w.file = NULL;
    st_write_close(&w);
    return out;
}

static void safetensors_same(const st_file *a, const st_file *b) {
    CLAIM(a->n == b->n);
    for (int64_t i = 0; i < a->n && i < b->n; i++) {
        const st_tensor *x = &a->tensors[i], *y = &b->tensors[i];
        CLAIM(strcmp(x->name, y->name) == 0 && x->ndim == y->ndim && x->count == y->count && y->type == ST_F32);
        CLAIM(memcmp(x->shape, y->shape, sizeof x->shape) == 0 && memcmp(x->data, y->data, (size_t)x->count * 4) == 0);
    }
}

static void safetensors_round(const st_file *file) {
    size_t bytes = 0, bytes_again = 0;
    unsigned char *first = safetensors_write(file, &bytes), *second;
    st_file again;
    if (first == NULL) return;
    CLAIM(st_open(&again, first, bytes) == AMP_OK);
    safetensors_same(file, &again);
    second = safetensors_write(&again, &bytes_again);
    CLAIM(second != NULL && bytes_again == bytes && memcmp(first, second, bytes) == 0);
    st_close(&again);
    free(first);
    free(second);
}

/* Every number is read; what lies outside of the file would be seen. */
static void safetensors_tensors(const void *data, size_t size) {
    st_file file;
    char text[64];
    amp_result result = ex_st(st_open(&file, data, size));
    fuzz_told(result);
    if (result != AMP_OK) return;
    for (int64_t i = 0; i < file.n; i++) {
        const st_tensor *t = &file.tensors[i];
        int64_t count = 1;
        float *values = (float *)malloc((size_t)t->count * sizeof *values + 1);
        for (int32_t k = 0; k < t->ndim; k++) count *= t->shape[k];
        CLAIM(count == t->count && st_find(&file, t->name) == t);
        if (values != NULL) fuzz_told(ex_st(st_floats(t, values)));
        free(values);
    }
    if (file.metadata.at != NULL) (void)json_find(file.metadata, "format", text, sizeof text);
    if (safetensors_is_writable(&file)) safetensors_round(&file);
    st_close(&file);
}

/* ---- Models of a size that is quickly made. */

static unsigned char *model_write(gpt *g, size_t *bytes) {
    unsigned char *out;
    st_writer w;
    memset(&w, 0, sizeof w);
    CLAIM(gpt_write(g, 0, &w) == AMP_OK && st_write_end(&w) == ST_OK);
    out = w.file;
    *bytes = w.bytes;
    w.file = NULL;
    st_write_close(&w);
    return out;
}

/* The model once more, from what was written of it. */
static void model_round(gpt *g, size_t bytes, unsigned char *first) {
    gpt_file file;
    size_t bytes_again = 0;
    unsigned char *second;
    memset(&file, 0, sizeof file);
    file.data = first;
    file.bytes = bytes;
    CLAIM(gpt_file_parse(&file, safetensors_path) == AMP_OK && file.config.heads == g->config.heads);
    CLAIM(gpt_file_load(&file, g) == AMP_OK);
    second = model_write(g, &bytes_again);
    CLAIM(second != NULL && bytes == bytes_again && memcmp(first, second, bytes) == 0);
    free(second);
    config_close(&file.described);
    st_close(&file.weights.tensors);
}

static void model_load(gpt_file *file) {
    gpt_config config = file->config;
    size_t bytes;
    gpt g;
    if (config.channels > 16 || config.hidden > 32 || config.layers > 2 || config.vocab > 64 || config.positions > 64) return;
    config.batch = config.seq = 1;
    amp_result result = gpt_create(&g, fuzz_context(), &config);
    fuzz_told(result);
    if (result != AMP_OK) return;
    result = gpt_file_load(file, &g);
    fuzz_told(result);
    unsigned char *first = result == AMP_OK ? model_write(&g, &bytes) : NULL;
    if (first != NULL) model_round(&g, bytes, first);
    free(first);
    gpt_destroy(&g);
}

static void encoder_open(void *data, size_t size) {
    encoder_file file;
    encoder e;
    int fresh;
    amp_result result;
    memset(&file, 0, sizeof file);
    result = ex_st(st_open(&file.weights.tensors, data, size));
    if (result == AMP_OK) result = encoder_file_shape(&file, safetensors_path);
    fuzz_told(result);
    encoder_config c = file.config;
    if (result == AMP_OK && c.hidden <= 16 && c.embedding <= 16 && c.intermediate <= 32 && c.layers <= 2 && c.vocab <= 64 &&
        c.positions <= 64 && c.types <= 4 && c.classes <= 8) {
        c.batch = c.seq = 1;
        if (c.classes == 0) c.classes = 2;
        result = encoder_create(&e, fuzz_context(), &c);
        fuzz_told(result);
        if (result == AMP_OK) { fuzz_told(encoder_file_load(&file, &e, 1, &fresh)); encoder_destroy(&e); }
    }
    encoder_file_close(&file);
}

/* A right checksum, where there is one: a wrong one would hide all that comes after. */
static void safetensors_seal(unsigned char *file, size_t size) {
    uint64_t header = 0;
    for (int i = 7; i >= 0 && size >= 8; i--) header = header << 8 | file[i];
    if (size >= 8 && header <= size - 8) st_seal(file, size, 8 + (size_t)header);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    unsigned char *copy = (unsigned char *)fuzz_copy(data, size);
    gpt_file file;
    if (copy == NULL) return 0;
    safetensors_seal(copy, size);
    ex_text[0] = 0;
    safetensors_tensors(copy, size);
    memset(&file, 0, sizeof file);
    file.data = copy;
    file.bytes = size;
    amp_result result = gpt_file_parse(&file, safetensors_path);
    fuzz_told(result);
    if (result == AMP_OK) model_load(&file);
    config_close(&file.described);
    st_close(&file.weights.tensors);
    encoder_open(copy, size);
    free(copy);
    return 0;
}
