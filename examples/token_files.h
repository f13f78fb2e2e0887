/* token_files.h - texts as one llm.c token file, by a model's tokenizer. */
#ifndef EXAMPLE_TOKEN_FILES_H
#define EXAMPLE_TOKEN_FILES_H

#include "model_folder.h"

enum { TOKEN_FILES_HEADER = 1024 };

/* The tokens of a file, after <|endoftext|> if the vocabulary has it, or what its rows begin and end with. */
static inline amp_result token_files_add(words_model *t, const char *path, unsigned width, json_buffer *out) {
    int32_t end_of_text = words_find(t, "<|endoftext|>"), *ids;
    void *text;
    size_t bytes;
    int64_t n, room, i;
    amp_result result = AMP_OK;
    EX_TRY(amp_file_read_all(NULL, path, &text, &bytes));
    room = 3 * (int64_t)bytes + WORDS_PARTS + 1;
    ids = (int32_t *)malloc((size_t)room * sizeof *ids);
    if (ids == NULL) result = ex_fail(AMP_ERR_MEMORY, "%s: no memory for its tokens", path);
    else {
        n = words_encode(t, (const char *)text, (int64_t)bytes, NULL, 0, room - 1, ids + 1, NULL);
        ids[0] = end_of_text;
        for (i = end_of_text < 0; i <= n; i++) {                    /* little-endian */
            uint32_t id = (uint32_t)ids[i];
            char four[4];
            unsigned k;
            for (k = 0; k < 4; k++) four[k] = (char)(id >> (8 * k));
            json_put(out, four, width);
        }
        if (n < 0) result = AMP_ERR_MEMORY;
        else if (n == room - 1) result = ex_fail(AMP_ERR_SIZE, "%s: has more than three tokens a byte", path);
        else if (out->failed) result = ex_fail(AMP_ERR_MEMORY, "%s: no memory for its tokens", path);
    }
    free(ids);
    amp_file_free(NULL, text, bytes);
    return result;
}

/* Writes the tokens of the n texts of `paths` as one llm.c token file, in 16 bits each, or 32 for a larger
   vocabulary. */
static inline amp_result token_files_write(words_model *t, char *const *paths, int64_t n, const char *out) {
    const unsigned width = t->n <= 65536 ? 2 : 4;
    uint32_t header[3] = {20240520, 1, 0};
    json_buffer b = {NULL, 0, 0, 0};
    int64_t i, k, count;
    amp_result result = AMP_OK;
    if (width == 4) { header[0] = 20240801; header[1] = 7; }
    for (i = 0; i < TOKEN_FILES_HEADER; i++) json_put(&b, "", 1);
    for (i = 0; i < n && result == AMP_OK; i++) result = token_files_add(t, paths[i], width, &b);
    count = (int64_t)(b.used - TOKEN_FILES_HEADER) / width;
    if (result == AMP_OK && count > INT32_MAX)
        result = ex_fail(AMP_ERR_SIZE, "%lld tokens are more than a token file holds", (long long)count);
    header[2] = (uint32_t)count;
    if (result == AMP_OK) {
        for (i = 0; i < 3; i++) for (k = 0; k < 4; k++) b.text[4 * i + k] = (char)(header[i] >> (8 * k));
        result = ex_file_write(out, b.text, b.used);
    }
    free(b.text);
    return result;
}

#endif
