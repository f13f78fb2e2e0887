/* mnist.h - labelled pictures in the format of MNIST and its relatives: 0, 0, type (8: bytes), dimensions, sizes as
 * big-endian int32, data.  mnist_find: Fashion-MNIST from a folder, or made-up pictures. */
#ifndef EXAMPLE_MNIST_H
#define EXAMPLE_MNIST_H

#include "example.h"

typedef struct mnist_idx {
    unsigned char *data;            /* count items of `size` bytes */
    int64_t count, size;
} mnist_idx;

static inline void mnist_idx_close(mnist_idx *file) {
    free(file->data);
    memset(file, 0, sizeof *file);
}

/* A stream of the file's content; ".gz" goes through gzip. */
static inline FILE *mnist_idx_stream(const char *path, int *piped) {
    char command[PATH_MAX + 32];
    size_t length = strlen(path);
    *piped = length > 3 && strcmp(path + length - 3, ".gz") == 0;
    if (!*piped) return fopen(path, "rb");
    if (access(path, R_OK) != 0 || strchr(path, '\'') != NULL || length >= PATH_MAX) return NULL;
    snprintf(command, sizeof command, "gzip -dc '%s'", path);
    return popen(command, "r");
}

/* Reads the bytes that the header promises, allocating memory only as they arrive: the header may be wrong. */
static inline amp_result mnist_idx_items(mnist_idx *file, FILE *stream, const char *path) {
    size_t wanted = (size_t)(file->count * file->size), capacity = 0, used = 0, n = 1;
    while (used < wanted && n > 0) {
        unsigned char *more;
        capacity = capacity * 2 + ((size_t)1 << 16) < wanted ? capacity * 2 + ((size_t)1 << 16) : wanted;
        more = (unsigned char *)realloc(file->data, capacity);
        if (more == NULL) return ex_fail(AMP_ERR_MEMORY, "%s: no memory", path);
        file->data = more;
        n = fread(file->data + used, 1, capacity - used, stream);
        used += n;
    }
    return used == wanted ? AMP_OK
        : ex_fail(AMP_ERR_TRUNCATED, "%s: the file ends before its %lld items", path, (long long)file->count);
}

static inline amp_result mnist_idx_read(mnist_idx *file, FILE *stream, const char *path) {
    unsigned char header[16];
    int64_t dims, i;
    if (fread(header, 1, 4, stream) != 4 || header[0] != 0 || header[1] != 0 || header[2] != 8 || header[3] < 1 ||
        header[3] > 3)
        return ex_fail(AMP_ERR_FORMAT, "%s: not an IDX file of bytes", path);
    dims = header[3];
    if (fread(header, 4, (size_t)dims, stream) != (size_t)dims)
        return ex_fail(AMP_ERR_TRUNCATED, "%s: ends in its header", path);
    file->size = 1;
    for (i = 0; i < dims; i++) {
        int64_t n = (int64_t)header[4 * i] << 24 | header[4 * i + 1] << 16 | header[4 * i + 2] << 8 | header[4 * i + 3];
        if (n < 1 || (i > 0 && n > 65536))
            return ex_fail(AMP_ERR_FORMAT, "%s: a dimension of %lld is outside its range", path, (long long)n);
        if (i == 0) file->count = n;
        else file->size *= n;
    }
    if (file->count > ((int64_t)1 << 33) / file->size) return ex_fail(AMP_ERR_SIZE, "%s: too large", path);
    return mnist_idx_items(file, stream, path);
}

/* Reads an IDX file of bytes, also compressed by gzip. */
static inline amp_result mnist_idx_open(mnist_idx *file, const char *path) {
    int piped;
    FILE *stream = mnist_idx_stream(path, &piped);
    amp_result result;
    memset(file, 0, sizeof *file);
    if (stream == NULL) return ex_fail(AMP_ERR_OPEN, "%s: %s", path, strerror(errno));
    result = mnist_idx_read(file, stream, path);
    if (piped) pclose(stream);
    else fclose(stream);
    if (result != AMP_OK) mnist_idx_close(file);
    return result;
}


/* Labelled pictures: x [n, pixels] from -0.5 to 0.5, y [n]. */
typedef struct mnist {
    float *x;
    int32_t *y;
    int64_t n, pixels;
} mnist;

static inline void mnist_free(mnist *p) {
    free(p->x);
    free(p->y);
    memset(p, 0, sizeof *p);
}

static inline amp_result mnist_alloc(mnist *p, int64_t n, int64_t pixels) {
    p->n = n;
    p->pixels = pixels;
    p->x = (float *)malloc((size_t)(n * pixels) * sizeof *p->x);
    p->y = (int32_t *)malloc((size_t)n * sizeof *p->y);
    return p->x != NULL && p->y != NULL ? AMP_OK
                                        : ex_fail(AMP_ERR_MEMORY, "no memory for %lld pictures", (long long)n);
}

/* Reads <folder>/<set>-images-idx3-ubyte and <set>-labels-idx1-ubyte, each also with ".gz". */
static inline amp_result mnist_read(mnist *p, const char *folder, const char *set) {
    static const char *const kinds[] = {"images-idx3", "labels-idx1"};
    mnist_idx files[2];
    amp_result result = AMP_OK;
    int64_t i;
    int k;
    memset(p, 0, sizeof *p);
    memset(files, 0, sizeof files);
    for (k = 0; k < 2 && result == AMP_OK; k++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%.4000s/%s-%s-ubyte", folder, set, kinds[k]);
        if (access(path, R_OK) != 0) snprintf(path, sizeof path, "%.4000s/%s-%s-ubyte.gz", folder, set, kinds[k]);
        result = mnist_idx_open(&files[k], path);
    }
    if (result == AMP_OK && (files[1].size != 1 || files[1].count != files[0].count))
        result = ex_fail(AMP_ERR_FORMAT, "%s: the numbers of %s labels and images differ", folder, set);
    if (result == AMP_OK) result = mnist_alloc(p, files[0].count, files[0].size);
    if (result == AMP_OK) {
        for (i = 0; i < p->n * p->pixels; i++) p->x[i] = (float)files[0].data[i] / 255 - 0.5f;
        for (i = 0; i < p->n; i++) p->y[i] = files[1].data[i];
    }
    mnist_idx_close(&files[0]);
    mnist_idx_close(&files[1]);
    if (result != AMP_OK) mnist_free(p);
    return result;
}

/* n pictures of `classes` random patterns under noise; `set` chooses the noise, all sets share the patterns. */
static inline amp_result mnist_synthetic(mnist *p, int64_t n, int64_t pixels, int64_t classes, uint64_t set) {
    float *patterns = (float *)malloc((size_t)(classes * pixels) * sizeof *patterns);
    amp_result result = mnist_alloc(p, n, pixels);
    int64_t i;
    if (patterns == NULL && result == AMP_OK) result = ex_fail(AMP_ERR_MEMORY, "no memory for patterns");
    if (result == AMP_OK) {
        ex_normal(patterns, classes * pixels, 7, 0, 0.1f);
        ex_normal(p->x, n * pixels, 7, set, 1.0f);
        for (i = 0; i < n; i++) p->y[i] = (int32_t)(i % classes);
        for (i = 0; i < n * pixels; i++) p->x[i] += patterns[p->y[i / pixels] * pixels + i % pixels];
    }
    free(patterns);
    return result;
}

/* Fashion-MNIST from a folder; where it is not there, synthetic pictures of its size, and says so. */
static inline amp_result mnist_find(mnist *train, mnist *test, const char *folder) {
    if (mnist_read(train, folder, "train") == AMP_OK && mnist_read(test, folder, "t10k") == AMP_OK) return AMP_OK;
    printf("%s\nlearning SYNTHETIC pictures instead\n", ex_error());
    EX_TRY(mnist_synthetic(train, 20000, 784, 10, 1));
    return mnist_synthetic(test, 5000, 784, 10, 2);
}

#endif
