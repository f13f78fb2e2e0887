/* fuzz_tokens.c - fuzzes the loader on token files: llm.c's, .npy, u16 and bytes.
 *
 * The first four bytes say how the rest is read: format, flags, batch and sequence.  Each token that is delivered must be
 * the token of the file at its place, and below the vocabulary.  A file that is cut while it is open must give an error
 * where it ends.  After a seek, the next batch must be the same as before. */
#include "fuzz.h"

enum { TOKENS_SHUFFLE = 1, TOKENS_VOCAB = 2, TOKENS_PIECES = 4, TOKENS_INTERRUPTED = 8, TOKENS_CUT = 16, TOKENS_LAST = 96, TOKENS_CACHE = 128 };

/* Element i of the last `count` elements of `size` bytes, little-endian. */
static int64_t tokens_in_file(int64_t count, int64_t size, int64_t i) {
    const uint8_t *at = fuzz_file.data + fuzz_file.bytes - (count - i) * size;
    uint64_t value = 0;
    for (int64_t k = size - 1; k >= 0; k--) value = value << 8 | at[k];
    return (int64_t)value;
}

/* The rows of an unshuffled batch are the file's, for one of the sizes that an element may have. */
static int tokens_are_right(const amp_loader_info *info, const amp_batch *b) {
    for (int64_t size = 1; size <= 8; size *= 2) {
        int64_t wrong = info->tokens * size > fuzz_file.bytes;
        for (int64_t row = 0; row < b->valid && wrong == 0; row++)
            for (int64_t k = 0; k < b->seq && wrong == 0; k++) {
                int64_t i = ((b->index * b->batch) + row) * b->seq + k;
                wrong = b->inputs[row * b->seq + k] != tokens_in_file(info->tokens, size, i) ||
                        b->targets[row * b->seq + k] != tokens_in_file(info->tokens, size, i + 1);
            }
        if (wrong == 0) return 1;
    }
    return 0;
}

static void tokens_check(const amp_loader_desc *d, const amp_loader_info *info, const amp_batch *b) {
    int64_t most = d->vocab > 0 ? d->vocab : INT32_MAX;
    CLAIM(b->valid >= 0 && b->valid <= b->batch && b->batch <= d->batch && b->seq == d->seq);
    for (int64_t i = 0; i < b->batch * b->seq; i++) {
        int padding = i >= b->valid * b->seq;
        CLAIM(b->inputs[i] >= 0 && b->inputs[i] <= most && (d->vocab == 0 || b->inputs[i] < d->vocab));
        CLAIM(padding ? b->targets[i] == -100 : b->targets[i] >= 0 && (d->vocab == 0 || b->targets[i] < d->vocab));
    }
    if (!d->shuffle && b->batch == d->batch) CLAIM(tokens_are_right(info, b));
}

/* The first batch once more, after others were taken. */
static void tokens_seek(amp_loader *l, const int32_t *first, int64_t count) {
    amp_batch b;
    CLAIM(amp_loader_seek(l, 0, 0) == AMP_OK);
    if (amp_loader_next(l, &b) == AMP_OK) CLAIM(memcmp(b.inputs, first, (size_t)count * sizeof *first) == 0);
}

static void tokens_read(amp_loader *l, const amp_loader_desc *d, int cut) {
    amp_loader_info info;
    amp_batch b;
    int32_t *first = NULL;
    int64_t count = 0, batch;
    CLAIM(amp_loader_info_get(l, &info) == AMP_OK);
    CLAIM(info.tokens >= 0 && (cut || info.tokens <= fuzz_file.bytes));
    CLAIM(info.samples > 0 && info.batches > 0);
    for (batch = 0; batch < 6; batch++) {
        amp_result result = amp_loader_next(l, &b);
        fuzz_told(result);
        CLAIM(result == AMP_OK || result == AMP_ERR_END || result == AMP_ERR_LABEL || (cut && result == AMP_ERR_TRUNCATED));
        if (result != AMP_OK) break;
        if (!cut) tokens_check(d, &info, &b);
        if (batch > 0) continue;
        count = b.batch * b.seq;
        first = (int32_t *)fuzz_copy(b.inputs, (size_t)count * sizeof *first);
    }
    if (first != NULL && !cut) tokens_seek(l, first, count);
    free(first);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    amp_loader_desc d;
    amp_loader *l = NULL;
    amp_result result;
    uint8_t *file;
    int flags;
    if (size < 4) return 0;
    flags = data[1];
    memset(&d, 0, sizeof d);
    d.path = "input";
    d.format = (amp_token_format)(data[0] % 5);
    d.shuffle = flags & TOKENS_SHUFFLE;
    d.vocab = flags & TOKENS_VOCAB ? 200 : 0;
    d.last_batch = (amp_last_batch)((flags & TOKENS_LAST) >> 5);
    d.cache_mb = flags & TOKENS_CACHE ? 1 : 1024;
    d.batch = 1 + data[2] % 9;
    d.seq = 1 + data[3] % 33;
    d.epochs = 2;
    d.workers = AMP_NO_WORKERS;
    file = (uint8_t *)fuzz_copy(data + 4, size - 4);
    if (file == NULL) return 0;
    memset(&fuzz_file, 0, sizeof fuzz_file);
    fuzz_file.data = file;
    fuzz_file.bytes = (int64_t)size - 4;
    fuzz_file.pieces = flags & TOKENS_PIECES;
    fuzz_file.interrupted = flags & TOKENS_INTERRUPTED;
    result = amp_loader_create(fuzz_context(), &l, &d);
    fuzz_told(result);
    CLAIM((result == AMP_OK) == (l != NULL));
    CLAIM(result == AMP_OK || strstr(amp_last_error(), "input") != NULL || result == AMP_ERR_RANGE);
    if (flags & TOKENS_CUT) fuzz_file.bytes /= 2;
    if (l != NULL) tokens_read(l, &d, flags & TOKENS_CUT);
    amp_loader_destroy(l);
    CLAIM(fuzz_file.open == 0);
    free(file);
    return 0;
}
