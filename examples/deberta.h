/* deberta.h - the attention of DeBERTa v2 and v3 on amp.h's tape, for encoder.h: beside content against content, the
 * query's content against the key's distance, and the key's content against the query's.  Distances have a table of
 * rows, of which far ones share some: log buckets.
 *
 * No operator gathers scores by distance.  Instead the table is read by distance, -seq to seq - 1, and a row's scores
 * against these, [seq, 2 seq], become those against keys, [seq, seq]: in memory, row i + 1 begins one element earlier
 * than a row of 2 seq - 1 would. */
#ifndef EXAMPLES_DEBERTA_H
#define EXAMPLES_DEBERTA_H

#include "model.h"

/* Rows of the table: 2 span.  buckets: position_buckets, 0: a row for each distance; most: max_relative_positions. */
typedef struct deberta_distances { int64_t buckets, most; } deberta_distances;
/* What the table's rows are projected to. */
enum { DEBERTA_KEY, DEBERTA_QUERY, DEBERTA_SIDES };

static inline int64_t deberta_span(const deberta_distances *d) { return d->buckets > 0 ? d->buckets : d->most; }

static inline int deberta_is_valid(const deberta_distances *d) {
    return d->buckets >= 0 && d->buckets <= 1 << 20 && d->most >= 0 && d->most <= 1 << 20 &&
           (d->buckets == 0 || (d->buckets >= 4 && (d->most == 0 || d->most > d->buckets / 2 + 1)));
}

/* The row of query i and key j, distance i - j.  In fp32, as transformers. */
static inline int32_t deberta_row(const deberta_distances *d, int64_t distance) {
    int64_t span = deberta_span(d), middle = d->buckets / 2, far = distance < 0 ? -distance : distance, row = distance;
    if (d->buckets > 0 && far > middle) {
        float most = logf((float)((double)(d->most - 1) / (double)middle)), at = logf((float)far / (float)middle);
        row = (int64_t)ceilf(at / most * (float)(middle - 1)) + middle;
        if (distance < 0) row = -row;
    }
    row += span;
    return (int32_t)(row < 0 ? 0 : row >= 2 * span ? 2 * span - 1 : row);
}

/* Rows of the distances seq to 1 - seq, then of -seq to seq - 1, in memory of the backend. */
static inline amp_result deberta_rows(amp_context *amp, const deberta_distances *d, int64_t seq, int32_t **out) {
    int64_t n = 2 * seq, i;
    int32_t *host = (int32_t *)malloc((size_t)(2 * n) * sizeof *host);
    void *memory = NULL;
    amp_result result = host != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for the distances");
    for (i = 0; i < n && host != NULL; i++) {
        host[i] = deberta_row(d, seq - i);
        host[n + i] = deberta_row(d, i - seq);
    }
    if (result == AMP_OK) result = amp_alloc(amp, &memory, 2 * n * (int64_t)sizeof *host);
    if (result == AMP_OK) result = amp_copy(amp, memory, host, 2 * n * (int64_t)sizeof *host, AMP_COPY_TO_DEVICE);
    if (result == AMP_OK) result = amp_sync(amp);
    free(host);
    *out = (int32_t *)memory;
    return result;
}

/* The table and its norm, after the embeddings' norm. */
static inline void deberta_describe(model_params *own, const char *prefix, const deberta_distances *d, int64_t C) {
    model_params_add(own, 0, 2 * deberta_span(d), C, "%sencoder.rel_embeddings.weight", prefix)->embedding = 1;
    model_params_add(own, 1, C, 0, "%sencoder.LayerNorm.weight", prefix);
    model_params_add(own, 1, C, 0, "%sencoder.LayerNorm.bias", prefix);
}

/* The normed rows [2 seq, channels] for both terms.  rows: deberta_rows' for `most` positions; norm: weight, bias. */
static inline void deberta_tables(amp_tape *tape, int32_t *rows, int64_t most, int64_t seq, amp_param *table,
                                  amp_param *norm, float eps, amp_value out[DEBERTA_SIDES]) {
    int side;
    for (side = 0; side < DEBERTA_SIDES; side++) {
        amp_tensor ids = amp_tensor1(rows + side * 2 * most + most - seq, AMP_I32, 2 * seq);
        out[side] = amp_tape_layernorm(tape, amp_tape_embedding(tape, &ids, table, NULL), norm, norm + 1, eps);
    }
}

typedef struct deberta_shape { int64_t batch, seq, heads, dim; } deberta_shape;

/* d 0: three dimensions. */
static inline amp_value deberta_as(amp_tape *tape, amp_value x, int64_t a, int64_t b, int64_t c, int64_t d) {
    int64_t shape[4];
    shape[0] = a; shape[1] = b; shape[2] = c; shape[3] = d;
    return amp_tape_reshape(tape, x, shape, d > 0 ? 4 : 3);
}
/* [batch, seq, channels] as [batch heads, seq, dim]. */
static inline amp_value deberta_heads(amp_tape *tape, amp_value x, const deberta_shape *s) {
    x = amp_tape_transpose(tape, deberta_as(tape, x, s->batch, s->seq, s->heads, s->dim), 1, 2);
    return deberta_as(tape, x, s->batch * s->heads, s->seq, s->dim, 0);
}
/* [rows, channels] as [heads, rows, dim]. */
static inline amp_value deberta_rows_by_head(amp_tape *tape, amp_value x, int64_t rows, const deberta_shape *s) {
    return amp_tape_transpose(tape, deberta_as(tape, x, rows, s->heads, s->dim, 0), 0, 1);
}

/* Scores [batch heads, seq, seq]: row i, column j is x's row i times the table's row j - i + seq. */
static inline amp_value deberta_term(amp_tape *tape, amp_value x, amp_value table, const deberta_shape *s,
                                     float scale) {
    int64_t n = 2 * s->seq;
    amp_value a = deberta_rows_by_head(tape, x, s->batch * s->seq, s);
    amp_value b = deberta_rows_by_head(tape, table, n, s);
    amp_value y = deberta_as(tape, amp_tape_matmul(tape, a, b, 0, 1, scale), s->heads, s->batch, s->seq * n, 0);
    y = amp_tape_transpose(tape, amp_tape_split(tape, y, 2, s->seq, s->seq * (n - 1)), 0, 1);
    return amp_tape_split(tape, deberta_as(tape, y, s->batch * s->heads, s->seq, n - 1, 0), 2, 0, s->seq);
}

/* x [batch, seq, channels] through attention, its branch's last layer not included.  p: query, key and value, weight
   and bias each.  lengths: as in encoder_input. */
static inline amp_value deberta_attention(amp_tape *tape, amp_value x, amp_param *p,
                                          const amp_value tables[DEBERTA_SIDES], const deberta_shape *s,
                                          const int32_t *lengths) {
    float scale = (float)(1 / sqrt(3.0 * (double)s->dim));          /* of a sum of three */
    amp_value q = amp_tape_linear(tape, x, p, p + 1, AMP_ACT_NONE);
    amp_value k = amp_tape_linear(tape, x, p + 2, p + 3, AMP_ACT_NONE);
    amp_value v = deberta_heads(tape, amp_tape_linear(tape, x, p + 4, p + 5, AMP_ACT_NONE), s);
    amp_value keys = amp_tape_linear(tape, tables[DEBERTA_KEY], p + 2, p + 3, AMP_ACT_NONE);
    amp_value queries = amp_tape_linear(tape, tables[DEBERTA_QUERY], p, p + 1, AMP_ACT_NONE);
    amp_value to_key = deberta_term(tape, q, keys, s, scale), to_query = deberta_term(tape, k, queries, s, scale), y;
    amp_softmax_op seen;
    memset(&seen, 0, sizeof seen);
    seen.mask.lengths = lengths;
    y = deberta_heads(tape, q, s);
    y = amp_tape_matmul(tape, y, deberta_heads(tape, k, s), 0, 1, scale);
    y = amp_tape_add(tape, y, to_key);
    y = amp_tape_add(tape, y, amp_tape_transpose(tape, to_query, 1, 2));
    y = amp_tape_softmax(tape, deberta_as(tape, y, s->batch, s->heads, s->seq, s->seq), &seen);
    y = amp_tape_matmul(tape, deberta_as(tape, y, s->batch * s->heads, s->seq, s->seq, 0), v, 0, 0, 1);
    y = amp_tape_transpose(tape, deberta_as(tape, y, s->batch, s->heads, s->seq, s->dim), 1, 2);
    return deberta_as(tape, y, s->batch, s->seq, s->heads * s->dim, 0);
}

#endif
