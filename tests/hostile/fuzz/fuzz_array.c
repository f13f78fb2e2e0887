/* fuzz_array.c - fuzzes the loader on .npy arrays, and the reader of IDX files.
 *
 * The first byte says how the rest is read.  Each row that is delivered must be the row of the file at its place. */
#include "fuzz.h"

enum { ARRAY_SHUFFLE = 1, ARRAY_PIECES = 2, ARRAY_CUT = 4, ARRAY_PAD = 8, ARRAY_TWICE = 16 };

static void array_check(const amp_loader_info *info, const amp_batch *b, int flags) {
    for (int32_t f = 0; f < info->n_fields; f++) {
        size_t row = (size_t)info->fields[f].count * amp_dtype_size(info->fields[f].dtype), total = row * (size_t)info->samples;
        const uint8_t *rows = (const uint8_t *)b->fields[f], *file = fuzz_file.data + fuzz_file.bytes - total;
        CLAIM(row > 0 && (int64_t)total <= fuzz_file.bytes);
        if (!(flags & ARRAY_SHUFFLE))
            CLAIM(memcmp(rows, file + (size_t)(b->index * 3) * row, (size_t)b->valid * row) == 0);
        for (size_t i = (size_t)b->valid * row; i < (size_t)b->batch * row; i++) CLAIM(rows[i] == 0);
        if (f > 0) CLAIM(memcmp(rows, b->fields[0], (size_t)b->batch * row) == 0);
    }
}

static void array_read(amp_loader *l, int flags) {
    amp_loader_info info;
    amp_batch b;
    CLAIM(amp_loader_info_get(l, &info) == AMP_OK);
    for (int batch = 0; batch < 5; batch++) {
        amp_result result = amp_loader_next(l, &b);
        fuzz_told(result);
        CLAIM(result == AMP_OK || result == AMP_ERR_END || ((flags & ARRAY_CUT) && result == AMP_ERR_TRUNCATED));
        if (result != AMP_OK) return;
        if (!(flags & ARRAY_CUT)) array_check(&info, &b, flags);
    }
}

static void array_idx(const uint8_t *file, size_t bytes) {
    mnist_idx idx;
    FILE *stream = bytes >= 4 && file[0] == 0 ? fmemopen((void *)(uintptr_t)file, bytes, "rb") : NULL;
    if (stream == NULL) return;
    memset(&idx, 0, sizeof idx);
    amp_result result = mnist_idx_read(&idx, stream, "input");
    fuzz_told(result);
    if (result == AMP_OK) CLAIM(idx.count > 0 && idx.size > 0 && (size_t)(idx.count * idx.size) <= bytes);
    if (result == AMP_OK) {
        size_t header = 4 + 4 * (size_t)file[3];
        CLAIM(memcmp(idx.data, file + header, (size_t)(idx.count * idx.size)) == 0);
    }
    mnist_idx_close(&idx);
    fclose(stream);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const paths[] = {"input", "input"};
    amp_loader_desc d;
    amp_loader *l = NULL;
    amp_result result;
    uint8_t *file;
    int flags;
    if (size < 1) return 0;
    flags = data[0];
    file = (uint8_t *)fuzz_copy(data + 1, size - 1);
    if (file == NULL) return 0;
    memset(&fuzz_file, 0, sizeof fuzz_file);
    fuzz_file.data = file;
    fuzz_file.bytes = (int64_t)size - 1;
    fuzz_file.pieces = flags & ARRAY_PIECES;
    memset(&d, 0, sizeof d);
    d.arrays = paths;
    d.n_arrays = flags & ARRAY_TWICE ? 2 : 1;
    d.shuffle = flags & ARRAY_SHUFFLE;
    d.last_batch = flags & ARRAY_PAD ? AMP_LAST_PAD : AMP_LAST_PARTIAL;
    d.batch = 3;
    d.epochs = 1;
    d.workers = AMP_NO_WORKERS;
    result = amp_loader_create(fuzz_context(), &l, &d);
    fuzz_told(result);
    CLAIM((result == AMP_OK) == (l != NULL));
    if (flags & ARRAY_CUT) fuzz_file.bytes /= 2;
    if (l != NULL) array_read(l, flags);
    amp_loader_destroy(l);
    CLAIM(fuzz_file.open == 0);
    array_idx(file, size - 1);
    free(file);
    return 0;
}
