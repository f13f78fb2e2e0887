/* fuzz_state.c - state blobs, and the objects that are loaded from them.
 *
 * Each input is read as it is, and once more with its checksums put right.  A blob that is read is written as the same
 * bytes, and its records, put into another state, give them too.  A scaler, an optimizer, a loader and random numbers
 * load from it entirely or not at all, and go on. */
#include "fuzz.h"

enum { STATE_HEADER = 40, STATE_ENTRY = 80 };

static void state_put32(uint8_t *p, uint32_t x) { for (int i = 0; i < 4; i++) p[i] = (uint8_t)(x >> (8 * i)); }
static uint64_t state_number(const uint8_t *p, int bytes) {
    uint64_t x = 0;
    while (bytes-- > 0) x = x << 8 | p[bytes];
    return x;
}
static size_t state_element(uint64_t dtype) { return dtype <= AMP_I64 ? amp_dtype_size((amp_dtype)dtype) : 0; }

/* Magic, version, length and checksums as a writer would have made them. */
static void state_repair(uint8_t *blob, size_t bytes) {
    uint64_t records = state_number(blob + 24, 8), most = (bytes - STATE_HEADER) / STATE_ENTRY, i;
    size_t at;
    if (records > most) records = most;
    at = STATE_HEADER + (size_t)records * STATE_ENTRY;
    for (i = 0; i < records; i++) {
        uint8_t *entry = blob + STATE_HEADER + i * STATE_ENTRY;
        size_t size = state_element(state_number(entry + 64, 4));
        uint64_t count = state_number(entry + 72, 8);
        if (size == 0 || count > (bytes - at) / size) break;
        state_put32(entry + 68, crc32c(blob + at, (size_t)count * size));
        at += (size_t)count * size;
    }
    memcpy(blob, "AMPSTATE", 8);
    state_put32(blob + 8, 1);
    state_put32(blob + 12, AMP_VERSION);
    state_put32(blob + 16, (uint32_t)bytes);
    state_put32(blob + 20, 0);
    state_put32(blob + 24, (uint32_t)records);
    state_put32(blob + 28, 0);
    state_put32(blob + 32, crc32c(blob + STATE_HEADER, (size_t)records * STATE_ENTRY));
    state_put32(blob + 36, crc32c(blob, 36));
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
    CLAIM(amp_state_encode(state, &data, &n) == AMP_OK && n == bytes);
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

typedef struct state_objects {
    amp_scaler *scaler;
    amp_optimizer *optimizer;
    amp_loader *loader;
    amp_param params[2];
    float weight[6], grad[6], grad16[4];
    uint16_t weight16[4];
    amp_state *fresh[4];            /* what each object was made as */
} state_objects;
static state_objects objects;

static int state_sample(void *user, const amp_sample *sample, void *const *fields) {
    (void)user;
    *(int32_t *)fields[0] = (int32_t)sample->sample;
    return 0;
}

static amp_result state_save_object(int kind, amp_state *state) {
    return kind == 0 ? amp_scaler_save(objects.scaler, state, "x") : kind == 1 ? amp_optimizer_save(objects.optimizer, state, "x")
         : kind == 2 ? amp_loader_save(objects.loader, state, "x") : amp_random_save(fuzz_context(), state, "x");
}
static amp_result state_load_object(int kind, const amp_state *state) {
    return kind == 0 ? amp_scaler_load(objects.scaler, state, "x") : kind == 1 ? amp_optimizer_load(objects.optimizer, state, "x")
         : kind == 2 ? amp_loader_load(objects.loader, state, "x") : amp_random_load(fuzz_context(), state, "x");
}
static amp_state *state_saved(int kind) {
    amp_state *state = NULL;
    CLAIM(amp_state_create(&state, NULL) == AMP_OK && state_save_object(kind, state) == AMP_OK);
    return state;
}

/* An optimizer in the middle of a cycle, with an fp32 parameter and one of bf16 with its remainder. */
static void state_make_objects(void) {
    amp_context *amp = fuzz_context();
    amp_optimizer_desc od;
    amp_loader_desc ld;
    amp_source source;
    amp_param *p = objects.params;
    if (objects.scaler != NULL) return;
    memset(&od, 0, sizeof od);
    memset(&ld, 0, sizeof ld);
    memset(&source, 0, sizeof source);
    p[0].name = "a"; p[0].weight = amp_tensor2(objects.weight, AMP_F32, 2, 3); p[0].grad = amp_tensor2(objects.grad, AMP_F32, 2, 3);
    p[1].name = "b"; p[1].weight = amp_tensor1(objects.weight16, AMP_BF16, 4); p[1].grad = amp_tensor1(objects.grad16, AMP_F32, 4);
    od.params = p; od.n_params = 2; od.accumulation = 2; od.master = AMP_MASTER_REMAINDER; od.clip_norm = 1;
    source.read = state_sample; source.samples = 10; source.n_fields = 1;
    source.fields[0].dtype = AMP_I32; source.fields[0].count = 1;
    ld.source = &source; ld.batch = 2; ld.shuffle = 1; ld.workers = AMP_NO_WORKERS;
    CLAIM(amp_param_register(amp, p, 2) == AMP_OK && amp_scaler_create(amp, &objects.scaler, NULL) == AMP_OK);
    CLAIM(amp_optimizer_create(amp, &objects.optimizer, &od) == AMP_OK && amp_loader_create(amp, &objects.loader, &ld) == AMP_OK);
    for (int kind = 0; kind < 4; kind++) objects.fresh[kind] = state_saved(kind);
}

/* A few steps from whatever was loaded. */
static void state_go_on(int kind) {
    amp_step_result outcome;
    amp_batch batch;
    for (int i = 0; i < 5 && kind < 2; i++) {
        for (int k = 0; k < 2; k++) { (void)amp_param_accumulate(&objects.params[k]); objects.grad[i] = objects.grad16[i % 4] = (float)i; }
        fuzz_told(amp_step(objects.optimizer, objects.scaler));
        while (amp_step_result_next(objects.optimizer, &outcome)) CLAIM(outcome.first_bad == NULL || strlen(outcome.first_bad) == 1);
    }
    if (kind == 2) fuzz_told(amp_loader_next(objects.loader, &batch));
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
    for (int k = 0; k < 4 && result == AMP_OK; k++) CLAIM(state_load_object(k, objects.fresh[k]) == AMP_OK);
    amp_state_destroy(before);
    amp_state_destroy(after);
}

static void state_load_objects(const amp_state *state) {
    static const char *const records[] = {"x.scale", "x.step", "x.loader", "x.random"};
    state_make_objects();
    for (int kind = 0; kind < 4; kind++) if (amp_state_count(state, records[kind], NULL) >= 0) state_load_kind(kind, state);
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
