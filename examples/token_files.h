/* token_files.h - texts as one llm.c token file, by the tokenizer of GPT-2. */
#ifndef EXAMPLE_TOKEN_FILES_H
#define EXAMPLE_TOKEN_FILES_H

#include "bpe.h"
#include "model_files.h"

/* Writes the tokens of the n texts of `paths` as one llm.c token file, each after <|endoftext|> if the vocabulary has
   it. */
static inline amp_result token_files_write(bpe *t, char *const *paths, int64_t n, const char *out) {
    unsigned char *file = NULL;
    int64_t used = 0, i, k, count;
    amp_result result = AMP_OK;
    for (i = 0; i < n && result == AMP_OK; i++) {
        void *text;
        size_t bytes;
        unsigned char *more;
        result = amp_file_read_all(NULL, paths[i], &text, &bytes);
        if (result != AMP_OK) break;
        more = (unsigned char *)realloc(file, 1024 + 2 * ((size_t)used + bytes + 1));
        if (more == NULL) result = ex_fail(AMP_ERR_MEMORY, "%s: no memory for its tokens", paths[i]);
        else {
            uint16_t *tokens = (uint16_t *)(void *)((file = more) + 1024);
            if (t->end_of_text >= 0) tokens[used++] = (uint16_t)t->end_of_text;
            result = ex_st(bpe_encode(t, (const char *)text, (int64_t)bytes, tokens + used, &count));
            if (result == AMP_OK) used += count;
        }
        amp_file_free(NULL, text, bytes);
    }
    if (result == AMP_OK && used > INT32_MAX)
        result = ex_fail(AMP_ERR_SIZE, "%lld tokens are more than a token file holds", (long long)used);
    if (result == AMP_OK && file != NULL) {
        const uint32_t header[3] = {20240520, 1, (uint32_t)used};
        memset(file, 0, 1024);
        for (i = 0; i < 3; i++) for (k = 0; k < 4; k++) file[4 * i + k] = (unsigned char)(header[i] >> (8 * k));
        for (i = 0; i < used; i++) {                                /* little-endian */
            uint16_t token;
            memcpy(&token, file + 1024 + 2 * i, 2);
            file[1024 + 2 * i] = (unsigned char)token;
            file[1025 + 2 * i] = (unsigned char)(token >> 8);
        }
        result = ex_file_write(out, file, 1024 + 2 * (size_t)used);
    }
    free(file);
    return result;
}

#endif
