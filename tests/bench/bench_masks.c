/* bench_masks.c - measures how much time the mask cache saves.  It compares softmax over scores with a mask tensor from the
 * cache, with the mask made again each time, and attention that reads the mask from its description.
 *
 *     cc -O2 tests/bench/bench_masks.c -o bench_masks -lm -lpthread
 *     ./bench_masks --longest 2048 --rounds 20
 *
 * It prints one line per kind of mask and length.  The line has the microseconds of getting the mask (cached and cleared),
 * of the softmax with it, and of the softmax and the attention with the description alone.  It also has the bytes that the
 * mask takes. */
#define AMP_IMPLEMENTATION
#include "bench.h"

enum { BATCH = 2, HEADS = 4, DIM = 64 };

typedef struct bench {
    amp_context *amp;
    int64_t seq, rounds;
    float *scores, *probabilities, *qkv, *out, *lse;
    int32_t lengths[BATCH], prefix[BATCH], *documents;
} bench;

static void create(bench *b, int64_t longest) {
    int64_t scores = BATCH * HEADS * longest * longest, rows = BATCH * longest, i;
    b->scores = (float *)bench_memory((size_t)scores * sizeof(float));
    b->probabilities = (float *)bench_memory((size_t)scores * sizeof(float));
    b->qkv = (float *)bench_memory((size_t)(rows * 3 * HEADS * DIM) * sizeof(float));
    b->out = (float *)bench_memory((size_t)(rows * HEADS * DIM) * sizeof(float));
    b->lse = (float *)bench_memory((size_t)(rows * HEADS) * sizeof(float));
    b->documents = (int32_t *)bench_memory((size_t)rows * sizeof(int32_t));
    for (i = 0; i < scores; i++) b->scores[i] = (float)(i * 7919 % 1009) / 1009.0f;
    for (i = 0; i < rows * 3 * HEADS * DIM; i++) b->qkv[i] = (float)(i * 7919 % 1013) / 1013.0f - 0.5f;
}
static void destroy(bench *b) {
    free(b->scores); free(b->probabilities); free(b->qkv); free(b->out); free(b->lse); free(b->documents);
}

/* The masks that are measured. */
static const char *const mask_names[] = {"causal", "window", "window_global", "padding", "document", "prefix"};
enum { MASKS = sizeof mask_names / sizeof *mask_names };

static amp_mask describe(bench *b, int kind) {
    amp_mask mask;
    int64_t i;
    memset(&mask, 0, sizeof mask);
    for (i = 0; i < BATCH; i++) {
        b->lengths[i] = (int32_t)(b->seq - b->seq / 4 * i);
        b->prefix[i] = (int32_t)(b->seq / 8 * (i + 1));
    }
    for (i = 0; i < BATCH * b->seq; i++) b->documents[i] = (int32_t)(i / (b->seq / 4));
    switch (kind) {
        case 0: mask.kind = AMP_MASK_CAUSAL; break;
        case 1: mask.kind = AMP_MASK_WINDOW; mask.window = b->seq / 8; break;
        case 2: mask.kind = AMP_MASK_WINDOW_GLOBAL; mask.window = b->seq / 8; mask.global = 16; break;
        case 3: mask.lengths = b->lengths; break;
        case 4: mask.kind = AMP_MASK_CAUSAL; mask.documents = b->documents; break;
        default: mask.kind = AMP_MASK_PREFIX; mask.prefix = b->prefix; break;
    }
    return mask;
}

static void softmax(bench *b, const amp_mask *mask) {
    amp_softmax_op op;
    memset(&op, 0, sizeof op);
    op.x = amp_tensor4(b->scores, AMP_F32, BATCH, HEADS, b->seq, b->seq);
    op.y = amp_tensor4(b->probabilities, AMP_F32, BATCH, HEADS, b->seq, b->seq);
    op.mask = *mask;
    bench_need(amp_softmax(b->amp, &op), "amp_softmax");
}

static amp_tensor part(const bench *b, int64_t which) {
    amp_tensor t = amp_tensor4(b->qkv + which * HEADS * DIM, AMP_F32, BATCH, b->seq, HEADS, DIM);
    t.stride[0] = b->seq * 3 * HEADS * DIM; t.stride[1] = 3 * HEADS * DIM; t.stride[2] = DIM; t.stride[3] = 1;
    return t;
}
static void attention(bench *b, const amp_mask *mask) {
    amp_attention_op op;
    memset(&op, 0, sizeof op);
    op.q = part(b, 0); op.k = part(b, 1); op.v = part(b, 2);
    op.o = amp_tensor4(b->out, AMP_F32, BATCH, b->seq, HEADS, DIM);
    op.lse = b->lse;
    op.mask = *mask;
    bench_need(amp_attention(b->amp, &op), "amp_attention");
}

/* Seconds of amp_mask_get and of the softmax with what it gives; cleared 1: the cache is emptied before. */
static void with_tensor(bench *b, const amp_mask *mask, int cleared, double *get, double *all, int64_t *bytes) {
    amp_mask_view view;
    amp_cache_info info;
    double start;
    memset(&info, 0, sizeof info);
    if (cleared) amp_mask_cache_clear(b->amp);
    start = ex_seconds();
    bench_need(amp_mask_get(b->amp, mask, BATCH, b->seq, b->seq, AMP_U8, &view), "amp_mask_get");
    *get = ex_seconds() - start;
    softmax(b, &view.mask);
    *all = ex_seconds() - start;
    bench_need(amp_mask_cache_info(b->amp, &info), "amp_mask_cache_info");
    *bytes = info.bytes;
    amp_mask_release(b->amp, &view);
}

static void measure(bench *b, int kind) {
    enum { GET_CACHED, ALL_CACHED, GET_CLEARED, ALL_CLEARED, SOFTMAX, ATTENTION, KINDS };
    static const char *const names[KINDS] = {"get_cached_us", "softmax_cached_us", "get_cleared_us",
                                             "softmax_cleared_us", "softmax_described_us", "attention_described_us"};
    amp_mask mask = describe(b, kind);
    double *times[KINDS];
    int64_t i, bytes = 0;
    int k;
    for (k = 0; k < KINDS; k++) times[k] = (double *)bench_memory((size_t)b->rounds * sizeof(double));
    for (i = -1; i < b->rounds; i++) {      /* round -1 warms up */
        int64_t at = i < 0 ? 0 : i;
        double start;
        with_tensor(b, &mask, 1, &times[GET_CLEARED][at], &times[ALL_CLEARED][at], &bytes);
        with_tensor(b, &mask, 0, &times[GET_CACHED][at], &times[ALL_CACHED][at], &bytes);
        start = ex_seconds();
        softmax(b, &mask);
        times[SOFTMAX][at] = ex_seconds() - start;
        start = ex_seconds();
        attention(b, &mask);
        times[ATTENTION][at] = ex_seconds() - start;
    }
    bench_begin("masks", b->amp);
    metrics_text(stdout, "mask", mask_names[kind]);
    metrics_integer(stdout, "batch", BATCH);
    metrics_integer(stdout, "heads", HEADS);
    metrics_integer(stdout, "dim", DIM);
    metrics_integer(stdout, "seq", b->seq);
    metrics_integer(stdout, "mask_bytes", bytes);
    for (k = 0; k < KINDS; k++) metrics_number(stdout, names[k], 1e6 * bench_median(times[k], b->rounds));
    metrics_number(stdout, "cache_saves",
                   1 - bench_median(times[ALL_CACHED], b->rounds) / bench_median(times[ALL_CLEARED], b->rounds));
    metrics_end(stdout);
    amp_mask_cache_clear(b->amp);
    for (k = 0; k < KINDS; k++) free(times[k]);
}

int main(int argc, char **argv) {
    bench b;
    amp_desc desc;
    int64_t longest = 2048, threads = 2;
    int kind;
    memset(&b, 0, sizeof b);
    memset(&desc, 0, sizeof desc);
    b.rounds = 20;
    {
        const bench_flag flags[] = {
            {"longest", &longest, NULL, "largest length; measured are 256, 512, ... up to it"},
            {"rounds", &b.rounds, NULL, "per case"},
            {"threads", &threads, NULL, "threads; 0: all cores"},
        };
        bench_flags(argc, argv, flags, 3);
        if (longest < 256 || b.rounds < 1) bench_usage(argv[0], flags, 3);
    }
    desc.dtype = AMP_F32;
    desc.threads = (int32_t)threads;
    bench_need(amp_open(&b.amp, &desc), "amp_open");
    create(&b, longest);
    for (b.seq = 256; b.seq <= longest; b.seq *= 2) for (kind = 0; kind < MASKS; kind++) measure(&b, kind);
    destroy(&b);
    amp_close(b.amp);
    return 0;
}
