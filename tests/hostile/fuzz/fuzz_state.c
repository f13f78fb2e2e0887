/* fuzz_state.c - fuzzes the reader of state blobs, and the objects that are loaded from them.
 *
 * Each input is read unchanged, and once more with its checksums corrected.  A blob that is read must be written as the
 * same bytes, or, if no key needs the newer format, in the older one.  Its records, put into another state, must give the
 * same blob too.  A scaler, an optimizer, a loader, random numbers, histories of fp8 and an amp_adapt must load from it
 * completely or not at all, and must continue to work. */
#include "fuzz.h"

enum { STATE_HEADER = 40 };

/* Bytes of a key in the directory, by the blob's format. */
static size_t state_key_bytes(const uint8_t *blob) { return blob[8] == 2 ? 256 : 64; }

static void state_put32(uint8_t *p, uint32_t x) { for (int i = 0; i < 4; i++) p[i] = (uint8_t)(x >> (8 * i)); }
static uint64_t state_number(const uint8_t *p, int bytes) {
    uint64_t x = 0;
    while (bytes-- > 0) x = x << 8 | p[bytes];
    return x;
}
static size_t state_element(uint64_t dtype) { return dtype <= AMP_I64 ? amp_dtype_size((amp_dtype)dtype) : 0; }

/* Magic, version, length and checksums as a writer would have made them. */
static void state_repair(uint8_t *blob, size_t bytes) {
    size_t key = state_key_bytes(blob);
    uint64_t records = state_number(blob + 24, 8), most = (bytes - STATE_HEADER) / (key + 16), i;
    size_t at;
    if (records > most) records = most;
    at = STATE_HEADER + (size_t)records * (key + 16);
    for (i = 0; i < records; i++) {
        uint8_t *entry = blob + STATE_HEADER + i * (key + 16) + key;
        size_t size = state_element(state_number(entry, 4));
        uint64_t count = state_number(entry + 8, 8);
        if (size == 0 || count > (bytes - at) / size) break;
        state_put32(entry + 4, st_crc32c(blob + at, (size_t)count * size));
        at += (size_t)count * size;
    }
    memcpy(blob, "AMPSTATE", 8);
    state_put32(blob + 8, key == 64 ? 1 : 2);
    state_put32(blob + 12, AMP_VERSION);
    state_put32(blob + 16, (uint32_t)bytes);
    state_put32(blob + 20, 0);
    state_put32(blob + 24, (uint32_t)records);
    state_put32(blob + 28, 0);
    state_put32(blob + 32, st_crc32c(blob + STATE_HEADER, (size_t)records * (key + 16)));
    state_put32(blob + 36, st_crc32c(blob, 36));
}

static int state_same(const amp_state *a, const amp_state *b) {
    void *x = NULL, *y = NULL;
    size_t n = 0, m = 0;
    CLAIM(amp_state_encode(a, &x, &n) == AMP_OK && amp_state_encode(b, &y, &m) == AMP_OK);
    int same = n == m && memcmp(x, y, n) == 0;
    amp_file_free(NULL, x, n);
    amp_file_free(NULL, y, m);
    return same;
}

/* The blob once more, from the state, and from a copy of its records. */
static void state_round(const amp_state *state, const uint8_t *blob, size_t bytes) {
    void *data;
    size_t n = 0;
    amp_state *copy;
    size_t longest = 0;
    for (int64_t i = 0; amp_state_key(state, i) != NULL; i++)
        if (strlen(amp_state_key(state, i)) > longest) longest = strlen(amp_state_key(state, i));
    CLAIM(amp_state_encode(state, &data, &n) == AMP_OK);
    if (state_key_bytes(blob) == 256 && longest < 64) bytes = 0;           /* it is written in the older format */
    CLAIM(n == bytes || bytes == 0);
    if (n == bytes) CLAIM(memcmp((char *)data + STATE_HEADER, blob + STATE_HEADER, n - STATE_HEADER) == 0);
    if (n == bytes && state_number(blob + 12, 4) == AMP_VERSION) CLAIM(memcmp(data, blob, n) == 0);
    amp_file_free(NULL, data, n);
    CLAIM(amp_state_create(&copy, NULL) == AMP_OK);
    for (int64_t i = 0; amp_state_key(state, i) != NULL; i++) {
        const char *key = amp_state_key(state, i);
        amp_dtype dtype = AMP_DTYPE_DEFAULT;
        int64_t count = amp_state_count(state, key, &dtype);
        void *values = malloc((size_t)count * amp_dtype_size(dtype) + 1);
        CLAIM(count >= 0 && values != NULL && amp_state_get(state, key, dtype, values, count) == AMP_OK);
        CLAIM(amp_state_put(copy, key, dtype, values, count) == AMP_OK);
        free(values);
    }
    CLAIM(state_same(state, copy));
    amp_state_destroy(copy);
}

/* ---- What is loaded from it: all under the prefix "x". */

/* A linear layer of a context of its own, and its optimizer. */
typedef struct state_layer {
    amp_context *amp;
    amp_optimizer *optimizer;
    amp_param param;
    float weight[4], grad[4], x[4], y[4], dx[4], dy[4];
} state_layer;

enum { STATE_SCALER, STATE_OPTIMIZER, STATE_LOADER, STATE_RANDOM, STATE_FP8, STATE_ADAPT, STATE_KINDS };
typedef struct state_objects {
    amp_scaler *scaler;
    amp_optimizer *optimizer;
    amp_loader *loader;
    amp_param params[2];
    float weight[6], grad[6], grad16[4];
    uint16_t weight16[4];
    state_layer fp8, adapted;       /* in fp8 with delayed scaling; in fp32, with an amp_adapt that moves it to fp8 */
    amp_adapt *adapt;
    amp_state *fresh[STATE_KINDS];  /* what each object was made as */
} state_objects;
static state_objects objects;

static amp_result state_save_object(int kind, amp_state *state) {
    switch (kind) {
        case STATE_SCALER: return amp_scaler_save(objects.scaler, state, "x");
        case STATE_OPTIMIZER: return amp_optimizer_save(objects.optimizer, state, "x");
        case STATE_LOADER: return amp_loader_save(objects.loader, state, "x");
        case STATE_RANDOM: return amp_random_save(fuzz_context(), state, "x");
        case STATE_FP8: return amp_fp8_save(objects.fp8.amp, state, "x");
        default: return amp_adapt_save(objects.adapt, state, "x");
    }
}
static amp_result state_load_object(int kind, const amp_state *state) {
    switch (kind) {
        case STATE_SCALER: return amp_scaler_load(objects.scaler, state, "x");
        case STATE_OPTIMIZER: return amp_optimizer_load(objects.optimizer, state, "x");
        case STATE_LOADER: return amp_loader_load(objects.loader, state, "x");
        case STATE_RANDOM: return amp_random_load(fuzz_context(), state, "x");
        case STATE_FP8: return amp_fp8_load(objects.fp8.amp, state, "x");
        default: return amp_adapt_load(objects.adapt, state, "x");
    }
}
static amp_state *state_saved(int kind) {
    amp_state *state = NULL;
    CLAIM(amp_state_create(&state, NULL) == AMP_OK && state_save_object(kind, state) == AMP_OK);
    return state;
}

static void state_layer_make(state_layer *l, amp_dtype dtype) {
    amp_desc d;
    amp_optimizer_desc od;
    memset(&d, 0, sizeof d);
    memset(&od, 0, sizeof od);
    d.dtype = dtype;
    d.fp8.scaling = AMP_FP8_DELAYED; d.fp8.history = 2;
    d.logger.level = AMP_LOG_OFF;
    d.threads = 1;
    for (int i = 0; i < 4; i++) { l->weight[i] = (float)(i + 1); l->x[i] = l->dy[i] = (float)(1 - i); }
    l->param.name = "w";
    l->param.weight = amp_tensor2(l->weight, AMP_F32, 2, 2); l->param.grad = amp_tensor2(l->grad, AMP_F32, 2, 2);
    od.params = &l->param; od.n_params = 1;
    CLAIM(amp_open(&l->amp, &d) == AMP_OK && amp_param_register(l->amp, &l->param, 1) == AMP_OK);
    CLAIM(amp_optimizer_create(l->amp, &l->optimizer, &od) == AMP_OK);
}
static void state_layer_step(state_layer *l) {
    amp_linear_op op;
    memset(&op, 0, sizeof op);
    op.weight = &l->param;
    op.x = amp_tensor2(l->x, AMP_F32, 2, 2); op.y = amp_tensor2(l->y, AMP_F32, 2, 2);
    op.dx = amp_tensor2(l->dx, AMP_F32, 2, 2); op.dy = amp_tensor2(l->dy, AMP_F32, 2, 2);
    CLAIM(amp_autocast_begin(l->amp, NULL) == AMP_OK);
    fuzz_told(amp_linear(l->amp, &op));
    CLAIM(amp_autocast_end(l->amp) == AMP_OK);
    fuzz_told(amp_linear_backward(l->amp, &op));
    fuzz_told(amp_step(l->optimizer, NULL));
}

/* An optimizer in the middle of a cycle, with an fp32 parameter and one of bf16 with its remainder. */
static void state_make_objects(void) {
    amp_context *amp = fuzz_context();
    amp_optimizer_desc od;
    amp_loader_desc ld;
    amp_adapt_desc ad;
    static const amp_dtype ladder[2] = {AMP_FP8, AMP_F32};
    static int32_t rows[10];
    amp_tensor tensor = amp_tensor1(rows, AMP_I32, 10);
    amp_param *p = objects.params;
    if (objects.scaler != NULL) return;
    memset(&od, 0, sizeof od);
    memset(&ld, 0, sizeof ld);
    memset(&ad, 0, sizeof ad);
    p[0].name = "a"; p[0].weight = amp_tensor2(objects.weight, AMP_F32, 2, 3); p[0].grad = amp_tensor2(objects.grad, AMP_F32, 2, 3);
    p[1].name = "b"; p[1].weight = amp_tensor1(objects.weight16, AMP_BF16, 4); p[1].grad = amp_tensor1(objects.grad16, AMP_F32, 4);
    od.params = p; od.n_params = 2; od.accumulation = 2; od.master = AMP_MASTER_REMAINDER; od.clip_norm = 1;
    ld.tensors = &tensor; ld.n_tensors = 1; ld.batch = 2; ld.shuffle = 1; ld.workers = AMP_NO_WORKERS;
    CLAIM(amp_param_register(amp, p, 2) == AMP_OK && amp_scaler_create(amp, &objects.scaler, NULL) == AMP_OK);
    CLAIM(amp_optimizer_create(amp, &objects.optimizer, &od) == AMP_OK && amp_loader_create(amp, &objects.loader, &ld) == AMP_OK);
    state_layer_make(&objects.fp8, AMP_FP8);
    state_layer_make(&objects.adapted, AMP_F32);
    ad.params = &objects.adapted.param; ad.n_params = 1; ad.ladder = ladder; ad.n_ladder = 2; ad.interval = 2; ad.checks = 1;
    CLAIM(amp_adapt_create(objects.adapted.amp, &objects.adapt, &ad) == AMP_OK);
    state_layer_step(&objects.fp8);
    for (int kind = 0; kind < STATE_KINDS; kind++) objects.fresh[kind] = state_saved(kind);
}

/* A few steps from whatever was loaded. */
static void state_go_on(int kind) {
    amp_step_result outcome;
    amp_batch batch;
    for (int i = 0; i < 5 && kind <= STATE_OPTIMIZER; i++) {
        for (int k = 0; k < 2; k++) { (void)amp_param_accumulate(&objects.params[k]); objects.grad[i] = objects.grad16[i % 4] = (float)i; }
        fuzz_told(amp_step(objects.optimizer, objects.scaler));
        while (amp_step_result_next(objects.optimizer, &outcome)) CLAIM(outcome.first_bad == NULL || strlen(outcome.first_bad) == 1);
    }
    if (kind == STATE_LOADER) fuzz_told(amp_loader_next(objects.loader, &batch));
    for (int i = 0; i < 3 && kind == STATE_FP8; i++) state_layer_step(&objects.fp8);
    for (int i = 0; i < 4 && kind == STATE_ADAPT; i++) {
        state_layer_step(&objects.adapted);
        fuzz_told(amp_adapt_step(objects.adapt));
    }
}

static void state_load_kind(int kind, const amp_state *state) {
    amp_state *before = state_saved(kind), *after;
    amp_result result = state_load_object(kind, state);
    fuzz_told(result);
    after = state_saved(kind);
    if (result != AMP_OK) CLAIM(state_same(before, after));
    else {
        CLAIM(state_load_object(kind, after) == AMP_OK);
        amp_state *again = state_saved(kind);
        CLAIM(state_same(after, again));
        amp_state_destroy(again);
        state_go_on(kind);
    }
    for (int k = 0; k < STATE_KINDS && result == AMP_OK; k++) CLAIM(state_load_object(k, objects.fresh[k]) == AMP_OK);
    amp_state_destroy(before);
    amp_state_destroy(after);
}

static void state_load_objects(const amp_state *state) {
    static const char *const records[] = {"x.scale", "x.step", "x.loader", "x.random", "x.fp8", "x.adapt"};
    state_make_objects();
    for (int kind = 0; kind < STATE_KINDS; kind++)
        if (amp_state_count(state, records[kind], NULL) >= 0) state_load_kind(kind, state);
}

static void state_decode(const uint8_t *blob, size_t bytes) {
    amp_state *state = NULL;
    amp_result result = amp_state_decode(&state, NULL, blob, bytes);
    fuzz_told(result);
    CLAIM((result == AMP_OK) == (state != NULL));
    if (state == NULL) return;
    state_round(state, blob, bytes);
    state_load_objects(state);
    amp_state_destroy(state);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t *copy = (uint8_t *)fuzz_copy(data, size);
    if (copy == NULL) return 0;
    state_decode(copy, size);
    if (size >= STATE_HEADER) {
        state_repair(copy, size);
        state_decode(copy, size);
    }
    free(copy);
    return 0;
}
