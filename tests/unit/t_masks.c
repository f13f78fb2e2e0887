/* t_masks.c - tests the mask cache: the mask tensors of every kind, hits and misses, and eviction.  A mask tensor must give
 * attention and softmax the same bits as the mask's description. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"

enum { BATCH = 2, QUERIES = 5, KEYS = 7 };

static amp_context *amp;
static const int32_t lengths[BATCH] = {6, 3}, prefix[BATCH] = {4, 0};
static const int32_t documents[BATCH * KEYS] = {0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 2, 2, 2};
static uint8_t allowed[QUERIES * KEYS];

/* The definition of every kind, written down once more, key by key. */
static int seen(const amp_mask *m, int b, int i, int j) {
    int position = i + KEYS - QUERIES, distance = position > j ? position - j : j - position;
    int causal = j <= position, window = m->bidirectional ? distance < m->window : causal && distance < m->window;
    int ok = 1;
    if (m->kind == AMP_MASK_CAUSAL) ok = causal;
    if (m->kind == AMP_MASK_WINDOW) ok = window;
    if (m->kind == AMP_MASK_WINDOW_GLOBAL) ok = window || ((m->bidirectional || causal) && (j < m->global || position < m->global));
    if (m->kind == AMP_MASK_PREFIX) ok = causal || j < m->prefix[b];
    if (m->kind == AMP_MASK_ARBITRARY) ok = m->allowed[i * KEYS + j];
    if (m->lengths) ok = ok && j < m->lengths[b];
    if (m->documents) ok = ok && m->documents[b * KEYS + j] == m->documents[b * KEYS + position];
    return ok;
}

static int n_masks;
static amp_mask masks[32];

static void add_mask(amp_mask_kind kind, int bidirectional) {
    for (int extra = 0; extra < 4; extra++) {
        amp_mask *m = &masks[n_masks++];
        memset(m, 0, sizeof *m);
        m->kind = kind; m->bidirectional = bidirectional; m->window = 2; m->global = 1;
        m->prefix = prefix;
        m->allowed = kind == AMP_MASK_ARBITRARY ? allowed : NULL;
        m->lengths = extra & 1 ? lengths : NULL;
        m->documents = extra & 2 ? documents : NULL;
    }
}

static void make_masks(void) {
    for (int i = 0; i < QUERIES * KEYS; i++) allowed[i] = i * 7 % 5 > 1;
    add_mask(AMP_MASK_NONE, 0); add_mask(AMP_MASK_CAUSAL, 0); add_mask(AMP_MASK_WINDOW, 0); add_mask(AMP_MASK_WINDOW, 1);
    add_mask(AMP_MASK_WINDOW_GLOBAL, 0); add_mask(AMP_MASK_WINDOW_GLOBAL, 1); add_mask(AMP_MASK_PREFIX, 0); add_mask(AMP_MASK_ARBITRARY, 0);
}

TEST(every_kind_is_written_out) {
    for (int k = 0; k < n_masks; k++) {
        amp_mask_view view;
        CHECK_OK(amp_mask_get(amp, &masks[k], BATCH, QUERIES, KEYS, AMP_U8, &view));
        for (int b = 0; b < BATCH; b++)
            for (int i = 0; i < QUERIES; i++)
                for (int j = 0; j < KEYS; j++) {
                    int at = ((view.tensor.shape[0] > 1 ? b : 0) * QUERIES + i) * KEYS + j;
                    CHECK_MSG(((const uint8_t *)view.tensor.data)[at] == seen(&masks[k], b, i, j), "mask %d, [%d, %d, %d]", k, b, i, j);
                }
        amp_mask_release(amp, &view);
    }
}

TEST(additive_masks) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_F16, AMP_BF16};
    for (int d = 0; d < 3; d++) {
        amp_mask_view view;
        float row[KEYS];
        CHECK_OK(amp_mask_get(amp, &masks[4], BATCH, QUERIES, KEYS, dtypes[d], &view));
        CHECK_OK(amp_convert(row, AMP_F32, view.tensor.data, dtypes[d], KEYS, NULL, NULL));
        for (int j = 0; j < KEYS; j++) {
            uint32_t bits;
            memcpy(&bits, &row[j], 4);
            CHECK_EQ(bits, seen(&masks[4], 0, 0, j) ? 0 : 0xff800000u);
        }
        amp_mask_release(amp, &view);
    }
}

/* Masks that differ in one number only. */
TEST(another_description_another_mask) {
    amp_mask m;
    amp_mask_view first, other;
    int i;
    memset(&m, 0, sizeof m);
    m.kind = AMP_MASK_WINDOW_GLOBAL;
    m.window = 2;
    m.global = 1;
    amp_mask_cache_clear(amp);
    CHECK_OK(amp_mask_get(amp, &m, 1, QUERIES, KEYS, AMP_U8, &first));
    for (i = 0; i < 7; i++) {
        amp_mask n = m;
        int64_t queries = QUERIES, keys = KEYS;
        if (i == 0) n.kind = AMP_MASK_WINDOW;
        if (i == 1) n.bidirectional = 1;
        if (i == 2) n.window = 3;
        if (i == 3) n.global = 2;
        if (i == 4) queries--;
        if (i == 5) keys--;
        CHECK_OK(amp_mask_get(amp, &n, 1, queries, keys, i == 6 ? AMP_F32 : AMP_U8, &other));
        CHECK_MSG(other.tensor.data != first.tensor.data, "case %d", i);
        CHECK_EQ(other.tensor.shape[2], queries);
        amp_mask_release(amp, &other);
    }
    amp_mask_release(amp, &first);
    amp_mask_cache_clear(amp);
}

TEST(same_description_same_mask) {
    amp_cache_info before, after;
    amp_mask_view a, b, c;
    int32_t other[BATCH] = {6, 3};
    amp_mask m = masks[5];                                  /* causal with lengths */
    amp_mask_cache_clear(amp);
    CHECK_OK(amp_mask_cache_info(amp, &before));
    CHECK_EQ(before.entries, 0);
    CHECK_OK(amp_mask_get(amp, &m, BATCH, QUERIES, KEYS, AMP_U8, &a));
    m.lengths = other;                                      /* equal contents elsewhere: the same mask */
    CHECK_OK(amp_mask_get(amp, &m, BATCH, QUERIES, KEYS, AMP_U8, &b));
    CHECK(a.tensor.data == b.tensor.data);
    other[1] = 4;                                           /* other contents at the same address: another mask */
    CHECK_OK(amp_mask_get(amp, &m, BATCH, QUERIES, KEYS, AMP_U8, &c));
    CHECK(a.tensor.data != c.tensor.data);
    CHECK_OK(amp_mask_cache_info(amp, &after));
    CHECK_EQ(after.hits - before.hits, 1);
    CHECK_EQ(after.misses - before.misses, 2);
    CHECK_EQ(after.bytes, 2 * BATCH * QUERIES * KEYS);
    amp_mask_release(amp, &a); amp_mask_release(amp, &b); amp_mask_release(amp, &c);
    amp_mask_cache_drop(amp, AMP_MASK_WINDOW);
    amp_mask_cache_info(amp, &after);
    CHECK_EQ(after.entries, 2);
    amp_mask_cache_drop(amp, AMP_MASK_CAUSAL);
    amp_mask_cache_info(amp, &after);
    CHECK_EQ(after.entries, 0);
    CHECK_EQ(after.bytes, 0);
}

TEST(the_limit_evicts_the_least_recently_used) {
    amp_desc desc;
    amp_context *small;
    amp_mask m;
    amp_mask_view held, view;
    amp_cache_info info;
    const void *first;
    memset(&desc, 0, sizeof desc);
    memset(&m, 0, sizeof m);
    desc.mask_limit = 3 * 16;
    CHECK_OK(amp_open(&small, &desc));
    m.kind = AMP_MASK_WINDOW;
    m.window = 1;
    CHECK_OK(amp_mask_get(small, &m, 1, 4, 4, AMP_U8, &held));
    first = held.tensor.data;
    for (m.window = 2; m.window <= 4; m.window++) {
        CHECK_OK(amp_mask_get(small, &m, 1, 4, 4, AMP_U8, &view));
        amp_mask_release(small, &view);
    }
    amp_mask_cache_info(small, &info);
    CHECK_EQ(info.entries, 3);
    CHECK_EQ(info.evictions, 1);
    m.window = 1;                                           /* held all the time, so still there */
    CHECK_OK(amp_mask_get(small, &m, 1, 4, 4, AMP_U8, &view));
    CHECK(view.tensor.data == first);
    m.window = 2;                                           /* the oldest of the others is gone */
    amp_mask_release(small, &view); amp_mask_release(small, &held);
    CHECK_OK(amp_mask_get(small, &m, 1, 4, 4, AMP_U8, &view));
    amp_mask_cache_info(small, &info);
    CHECK_EQ(info.misses, 5);
    amp_mask_release(small, &view);
    amp_close(small);
}

TEST(written_out_and_described_give_the_same_bits) {
    static float q[BATCH * QUERIES * 2 * 4], k[BATCH * KEYS * 2 * 4], v[BATCH * KEYS * 2 * 4], o[2][BATCH * QUERIES * 2 * 4], lse[BATCH * QUERIES * 2];
    static float x[BATCH * 2 * QUERIES * KEYS], y[2][BATCH * 2 * QUERIES * KEYS];
    for (int i = 0; i < BATCH * KEYS * 8; i++) { k[i] = (float)(i % 13) - 6; v[i] = (float)(i % 7); if (i < BATCH * QUERIES * 8) q[i] = (float)(i % 11) / 8; }
    for (int i = 0; i < BATCH * 2 * QUERIES * KEYS; i++) x[i] = (float)(i % 17) / 4;
    for (int n = 0; n < n_masks; n++) {
        amp_mask_view view;
        CHECK_OK(amp_mask_get(amp, &masks[n], BATCH, QUERIES, KEYS, AMP_U8, &view));
        for (int written = 0; written < 2; written++) {
            amp_attention_op at;
            amp_softmax_op so;
            memset(&at, 0, sizeof at);
            memset(&so, 0, sizeof so);
            at.q = amp_tensor4(q, AMP_F32, BATCH, QUERIES, 2, 4);
            at.k = amp_tensor4(k, AMP_F32, BATCH, KEYS, 2, 4);
            at.v = amp_tensor4(v, AMP_F32, BATCH, KEYS, 2, 4);
            at.o = amp_tensor4(o[written], AMP_F32, BATCH, QUERIES, 2, 4);
            at.lse = lse;
            at.mask = so.mask = written ? view.mask : masks[n];
            CHECK_OK(amp_attention(amp, &at));
            so.x = amp_tensor4(x, AMP_F32, BATCH, 2, QUERIES, KEYS);
            so.y = amp_tensor4(y[written], AMP_F32, BATCH, 2, QUERIES, KEYS);
            CHECK_OK(amp_softmax(amp, &so));
        }
        CHECK_MSG(memcmp(o[0], o[1], sizeof o[0]) == 0, "attention, mask %d", n);
        CHECK_MSG(memcmp(y[0], y[1], sizeof y[0]) == 0, "softmax, mask %d", n);
        amp_mask_release(amp, &view);
    }
}

TEST(refusals) {
    amp_mask_view view;
    amp_mask m;
    memset(&m, 0, sizeof m);
    CHECK_ERR(amp_mask_get(amp, NULL, 1, 1, 1, AMP_U8, &view), AMP_ERR_NULL);
    CHECK_ERR(amp_mask_get(amp, &m, 0, 1, 1, AMP_U8, &view), AMP_ERR_RANGE);
    CHECK_ERR(amp_mask_get(amp, &m, 1, 1, 1, AMP_I64, &view), AMP_ERR_DTYPE);
    m.kind = AMP_MASK_WINDOW;
    CHECK_ERR(amp_mask_get(amp, &m, 1, 1, 1, AMP_U8, &view), AMP_ERR_RANGE);
    m.kind = AMP_MASK_ARBITRARY;
    CHECK_ERR(amp_mask_get(amp, &m, 1, 1, 1, AMP_U8, &view), AMP_ERR_NULL);
    m.allowed = allowed; m.allowed_head_stride = 1;
    CHECK_ERR(amp_mask_get(amp, &m, 1, 1, 1, AMP_U8, &view), AMP_ERR_UNSUPPORTED);
    memset(&m, 0, sizeof m);
    CHECK_ERR(amp_mask_get(amp, &m, (int64_t)1 << 40, (int64_t)1 << 40, 1, AMP_U8, &view), AMP_ERR_SIZE);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    make_masks();
    if (amp_open(&amp, NULL) != AMP_OK) { printf("%s\n", amp_last_error()); return 1; }
    RUN(every_kind_is_written_out); RUN(additive_masks); RUN(another_description_another_mask); RUN(same_description_same_mask);
    RUN(the_limit_evicts_the_least_recently_used); RUN(written_out_and_described_give_the_same_bits); RUN(refusals);
    amp_close(amp);
    return TEST_END();
}
