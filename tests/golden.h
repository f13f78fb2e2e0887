/* golden.h - reads the golden files that tests/torch/oracle/common.py writes, and makes the same random numbers.  It also
 * measures errors in the same way.  It is for test programs only: a damaged file ends the program. */
#ifndef AMPT_GOLDEN_H
#define AMPT_GOLDEN_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef AMPT_GOLDEN
#define AMPT_GOLDEN "tests/torch/golden"
#endif

/* ---- Random numbers: Philox4x32-10, written separately from the library's, so that the two check each other */

static __attribute__((unused)) void ampt_philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t c1 = c[1], c3 = c[3];
        c[0] = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c[3] = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* Word i of a stream: word i % 4 of block i / 4; key (seed, 0), counter (block, 0, stream, 0). */
static __attribute__((unused)) uint32_t ampt_word(uint32_t seed, uint32_t stream, int64_t i) {
    uint32_t c[4];
    c[0] = (uint32_t)(i / 4); c[1] = 0; c[2] = stream; c[3] = 0;
    ampt_philox(c, seed, 0);
    return c[i % 4];
}

/* shift + scale u with u a multiple of 2^-23 in [-1, 1). */
static __attribute__((unused)) void ampt_uniform(float *out, int64_t n, uint32_t seed, uint32_t stream,
                                                float scale, float shift) {
    for (int64_t i = 0; i < n; i++) {
        float u = ((float)(ampt_word(seed, stream, i) >> 8) - 8388608.0f) * (1.0f / 8388608.0f);
        volatile float product = scale * u;
        out[i] = shift + product;       /* volatile: two roundings, never one fused multiply-add */
    }
}

/* Integers from 0 to below - 1. */
static __attribute__((unused)) void ampt_integers(int32_t *out, int64_t n, uint32_t seed, uint32_t stream,
                                                 int32_t below) {
    for (int64_t i = 0; i < n; i++)
        out[i] = (int32_t)(((uint64_t)ampt_word(seed, stream, i) * (uint64_t)below) >> 32);
}

/* ---- Golden files: "AMPTGOLD", record count u32, then {name length u32, name, type u32, count u64, values};
   types 1 fp32, 2 fp64, 3 int32. */

typedef struct ampt_golden { unsigned char *data; size_t bytes; const char *file; } ampt_golden;

static __attribute__((unused)) ampt_golden ampt_golden_open(const char *file) {
    ampt_golden g;
    char path[512];
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", AMPT_GOLDEN, file);
    f = fopen(path, "rb");
    g.file = file; g.bytes = 0;
    g.data = (unsigned char *)malloc(1 << 22);
    if (f && g.data) { g.bytes = fread(g.data, 1, 1 << 22, f); fclose(f); }
    if (g.bytes < 12 || memcmp(g.data, "AMPTGOLD", 8)) {
        printf("%s: missing or damaged (run from the project root)\n", path);
        exit(2);
    }
    return g;
}

/* The values of a record, copied to aligned memory that the caller frees.  Without the record, the program ends. */
static __attribute__((unused)) void *ampt_golden_read(const ampt_golden *g, const char *name, uint32_t type,
                                                     int64_t *count) {
    size_t at = 12;
    while (at + 16 < g->bytes) {
        uint32_t length, kind; uint64_t n; size_t bytes;
        memcpy(&length, g->data + at, 4);
        memcpy(&kind, g->data + at + 4 + length, 4);
        memcpy(&n, g->data + at + 8 + length, 8);
        bytes = (size_t)n * (kind == 2 ? 8 : 4);
        if (kind == type && length == strlen(name) && !memcmp(g->data + at + 4, name, length)) {
            void *copy = malloc(bytes + 1);
            if (copy) memcpy(copy, g->data + at + 16 + length, bytes);
            *count = (int64_t)n;
            return copy;
        }
        at += 16 + length + bytes;
    }
    printf("%s: no record %s\n", g->file, name);
    exit(2);
}

static __attribute__((unused)) double ampt_golden_number(const ampt_golden *g, const char *name) {
    int64_t n;
    double *p = (double *)ampt_golden_read(g, name, 2, &n), value = p[0];
    free(p);
    return value;
}

/* ---- The error measure: |got - exact| / max(|exact|, floor), floor = sqrt(elements / elements of the layer) times
   the layer's gradient norm, so that tensors whose exact gradient is zero stay measurable. */

typedef struct ampt_norms { double square, count; } ampt_norms;        /* of one layer: add all its tensors first */

static __attribute__((unused)) void ampt_norms_add(ampt_norms *layer, const float *exact, int64_t n) {
    for (int64_t i = 0; i < n; i++) layer->square += (double)exact[i] * (double)exact[i];
    layer->count += (double)n;
}

/* 1 if an element is infinite or NaN.  It reads the bits, so it is also right under -Ofast. */
static __attribute__((unused)) int ampt_has_nonfinite(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        if ((bits & 0x7f800000u) == 0x7f800000u) return 1;
    }
    return 0;
}

/* 1e30 if an element is not finite. */
static __attribute__((unused)) double ampt_error(const float *got, const float *exact, int64_t n,
                                                 const ampt_norms *layer) {
    double off = 0, own = 0, floor_square = layer->square * (double)n / layer->count;
    if (ampt_has_nonfinite(got, n)) return 1e30;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)got[i] - (double)exact[i];
        off += d * d;
        own += (double)exact[i] * (double)exact[i];
    }
    if (own < floor_square) own = floor_square;
    return own > 0 ? sqrt(off / own) : sqrt(off);
}

#endif
