/* bigram.h - what a text's next token costs when only the one before is known: the entropy that a language model
   must be
 * below to have learned more than pairs. */
#ifndef EXAMPLE_BIGRAM_H
#define EXAMPLE_BIGRAM_H

#include "example.h"

/* Pairs of neighbours (a, b) as a << 32 | b. */
typedef struct bigram_pairs { uint64_t *key; int64_t n; } bigram_pairs;
enum { BIGRAM_MOST = 1 << 24 };

static inline amp_result bigram_collect(amp_context *amp, amp_loader *loader, int64_t most_batches, bigram_pairs *out) {
    amp_batch batch;
    int64_t capacity = 0, batches = 0;
    int32_t *host = NULL;
    amp_result result;
    out->key = NULL;
    out->n = 0;
    while ((result = amp_loader_next(loader, &batch)) == AMP_OK) {
        int64_t count = batch.batch * batch.seq, i;
        if (host == NULL) host = (int32_t *)malloc((size_t)count * 2 * sizeof *host);
        if (out->n + count > capacity) {
            uint64_t *more = (uint64_t *)realloc(out->key, (size_t)(capacity = capacity * 2 + count) * sizeof *more);
            if (more == NULL) { result = ex_fail(AMP_ERR_MEMORY, "no memory for bigrams"); break; }
            out->key = more;
        }
        if (host == NULL) { result = ex_fail(AMP_ERR_MEMORY, "no memory for bigrams"); break; }
        result = amp_copy(amp, host, batch.inputs, count * 4, AMP_COPY_TO_HOST);
        if (result == AMP_OK) result = amp_copy(amp, host + count, batch.targets, count * 4, AMP_COPY_TO_HOST);
        if (result == AMP_OK) result = amp_sync(amp);
        if (result != AMP_OK) break;
        for (i = 0; i < count; i++) out->key[out->n++] = (uint64_t)(uint32_t)host[i] << 32 | (uint32_t)host[count + i];
        if (++batches == most_batches || out->n >= BIGRAM_MOST) break;
    }
    free(host);
    return result == AMP_ERR_END ? AMP_OK : result;
}

static inline int bigram_compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Index of the first key that is not below `key`. */
static inline int64_t bigram_place(const bigram_pairs *p, uint64_t key) {
    int64_t low = 0, high = p->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (p->key[middle] < key) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Mean -log p(b | a) over `text`, of the bigram model counted on `counts` (sorted), interpolated with the unigrams
   after Witten & Bell 1991: p(b|a) = (c(a,b) + d(a) p(b)) / (c(a) + d(a)), d(a) distinct successors of a, and
   p(b) = (c(b) + 1) / (n + vocab).  exact 1: no interpolation, p(b|a) = c(a,b) / c(a). */
static inline amp_result bigram_entropy(const bigram_pairs *counts, const bigram_pairs *text, int64_t vocab,
                                        int exact, double *entropy) {
    double *single = (double *)calloc((size_t)vocab * 3, sizeof *single), *context, *distinct, sum = 0;
    int64_t i;
    if (single == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for bigrams");
    context = single + vocab;
    distinct = context + vocab;
    for (i = 0; i < counts->n; i++) {
        uint64_t key = counts->key[i];
        single[key & 0xffffffffu] += 1;
        context[key >> 32] += 1;
        if (i == 0 || counts->key[i - 1] != key) distinct[key >> 32] += 1;
    }
    for (i = 0; i < text->n; i++) {
        uint64_t key = text->key[i];
        double pair = (double)(bigram_place(counts, key + 1) - bigram_place(counts, key));
        double alone = (single[key & 0xffffffffu] + 1) / ((double)counts->n + (double)vocab);
        double c = context[key >> 32], d = exact ? 0 : distinct[key >> 32] > 0 ? distinct[key >> 32] : 1;
        sum -= log((pair + d * alone) / (c + d));
    }
    free(single);
    *entropy = sum / (double)(text->n > 0 ? text->n : 1);
    return AMP_OK;
}

#endif
