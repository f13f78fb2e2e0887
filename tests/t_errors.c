/* t_errors.c - what amp.h says when something is wrong, held against its own text: every result that a comment of the API half
 * promises ("Errors: 101, 103") is provoked, and the text names the function that was called and that alone; and every
 * function that writes a text works as snprintf does. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"

/* The API half of amp.h; "" where it is not in this folder. */
static char api[1 << 18];
static void read_api(void) {
    FILE *file = fopen("amp.h", "r");
    size_t n = file ? fread(api, 1, sizeof api - 1, file) : 0;
    char *end;
    if (file) fclose(file);
    api[n] = 0;
    end = strstr(api, "\n/* Stop here if you only want the API. */");
    if (end) *end = 0;
}

/* ---- Texts */

typedef size_t (*text_call)(const void *thing, char *text, size_t size);
#define TEXT(name, type) static size_t call_##name(const void *thing, char *text, size_t size) { return name((const type *)thing, text, size); }
TEXT(amp_machine_text, amp_machine) TEXT(amp_settings_text, amp_settings) TEXT(amp_status_text, amp_status) TEXT(amp_status_json, amp_status)
TEXT(amp_epoch_summary_text, amp_epoch_summary) TEXT(amp_numerics_text, amp_numerics_report) TEXT(amp_verify_text, amp_verify_report)
TEXT(amp_gradcheck_text, amp_gradcheck_report) TEXT(amp_advice_text, amp_advice) TEXT(amp_tune_text, amp_tune_report)

static union {
    amp_machine machine; amp_settings settings; amp_status status; amp_epoch_summary summary; amp_numerics_report numerics;
    amp_verify_report verify; amp_gradcheck_report gradcheck; amp_advice advice; amp_tune_report tune;
} thing;
static void no_more(void) {}
static void fill_machine(void) { CHECK_OK(amp_machine_probe(&thing.machine)); }
static void fill_status(void) {
    amp_context *amp;
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_OK(amp_status_get(amp, NULL, 0, &thing.status));
    amp_close(amp);
}
static void fill_summary(void) { thing.summary.mixed.epoch = thing.summary.full.epoch = 2; thing.summary.speedup = 1.5; }
static void fill_numerics(void) {
    static amp_numerics_row rows[2];
    rows[0].name = "fc.weight";                         /* the other is a range without a name */
    thing.numerics.rows = rows; thing.numerics.n_rows = 2;
}
static void fill_verify(void) { thing.verify.n_rows = AMP_VERIFY_ROWS; }
static void fill_tune(void) { thing.tune.n_rows = AMP_TUNE_ROWS; }
static void fill_gradcheck(void) { thing.gradcheck.passed = 1; snprintf(thing.gradcheck.worst, sizeof thing.gradcheck.worst, "x"); }
static void fill_advice(void) { thing.advice.batch = 8; }

#define ROW(name, fill) {#name, call_##name, fill}
static const struct { const char *name; text_call call; void (*fill)(void); } texts[] = {
    ROW(amp_machine_text, fill_machine), ROW(amp_settings_text, no_more), ROW(amp_status_text, fill_status), ROW(amp_status_json, fill_status),
    ROW(amp_epoch_summary_text, fill_summary), ROW(amp_numerics_text, fill_numerics), ROW(amp_verify_text, fill_verify),
    ROW(amp_gradcheck_text, fill_gradcheck), ROW(amp_advice_text, fill_advice), ROW(amp_tune_text, fill_tune)};
enum { TEXTS = sizeof texts / sizeof *texts, GUARD = 0x5a };

/* What a text function gives for one thing, at every size that may matter. */
static void measure(text_call call, const char *name) {
    static char whole[65536], cut[65536];
    size_t length = call(&thing, NULL, 0);
    size_t sizes[] = {1, 2, 3, length / 2, length, length + 1, length + 100};
    CHECK_EQ(call(&thing, NULL, 100), length);
    CHECK_MSG(length > 0 && length + 100 < sizeof whole, "%s: %zu", name, length);
    memset(whole, GUARD, sizeof whole);
    CHECK_EQ(call(&thing, whole, sizeof whole), length);
    CHECK_EQ(strlen(whole), length);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t kept = sizes[i] - 1 < length ? sizes[i] - 1 : length;
        memset(cut, GUARD, sizeof cut);
        CHECK_MSG(call(&thing, cut, sizes[i]) == length && strlen(cut) == kept && memcmp(cut, whole, kept) == 0 && cut[sizes[i]] == GUARD, "%s into %zu bytes", name, sizes[i]);
    }
    memset(cut, GUARD, sizeof cut);
    CHECK(call(&thing, cut, 0) == length && cut[0] == GUARD);
}

TEST(texts_as_snprintf) {
    for (int i = 0; i < TEXTS; i++) {
        char text[8] = "before";
        CHECK_MSG(texts[i].call(NULL, NULL, 0) == 0, "%s(NULL, NULL, 0)", texts[i].name);
        CHECK_MSG(texts[i].call(NULL, text, sizeof text) == 0 && text[0] == 0, "%s(NULL, text)", texts[i].name);
        memset(&thing, 0, sizeof thing);
        measure(texts[i].call, texts[i].name);          /* all zero: nothing was ever written into it */
        texts[i].fill();
        measure(texts[i].call, texts[i].name);
    }
}

TEST(no_text_function_is_forgotten) {
    const char *at = api;
    int seen = 0;
    if (!*api) SKIP("amp.h is not in this folder");
    while ((at = strstr(at, "\nAMP_API size_t amp_")) != NULL) {
        char name[64];
        int known = 0;
        sscanf(at += 16, "%63[a-z0-9_]", name);
        if (memchr(at, ';', strcspn(at, "\n")) && !strstr(name, "_text") && !strstr(name, "_json")) continue;
        for (int i = 0; i < TEXTS; i++) known |= !strcmp(texts[i].name, name);
        CHECK_MSG(known, "%s", name);
        seen++;
    }
    CHECK_EQ(seen, TEXTS);
}

/* ---- Texts that do not contradict themselves */

#define SAYS(call, result, text) do { CHECK_ERR(call, result); CHECK_MSG(strstr(amp_last_error(), text) != NULL, "%s", amp_last_error()); } while (0)
#define NEVER(text) CHECK_MSG(strstr(amp_last_error(), text) == NULL, "%s", amp_last_error())

static int read_nothing(void *user, const amp_sample *sample, void *const *fields) { (void)user; (void)sample; memset(fields[0], 0, 4); return 0; }

TEST(advice_that_fits) {
    static const int32_t ids[2] = {0, 9};
    static float table[6], y[4];
    amp_context *amp;
    amp_loader *loader = NULL;
    amp_loader_desc d;
    amp_source source;
    amp_param p;
    amp_embedding_op op;
    CHECK_OK(amp_open(&amp, NULL));
    memset(&d, 0, sizeof d); memset(&source, 0, sizeof source); memset(&p, 0, sizeof p); memset(&op, 0, sizeof op);
    source.read = read_nothing; source.samples = 3; source.n_fields = 1; source.fields[0].dtype = AMP_I32; source.fields[0].count = 1;
    d.source = &source;
    SAYS(amp_loader_create(amp, &loader, &d), AMP_ERR_RANGE, ".batch = 0, must be 1");       /* it has no default */
    NEVER("0 is the default");
    d.batch = 4;
    SAYS(amp_loader_create(amp, &loader, &d), AMP_ERR_RANGE, "3 samples are less than one batch of 4");
    NEVER("rank");
    d.world = 2; d.batch = 2;
    SAYS(amp_loader_create(amp, &loader, &d), AMP_ERR_RANGE, "one batch of 2 on each rank");
    p.name = "table"; p.weight = amp_tensor2(table, AMP_F32, 3, 2);
    op.ids = ids; op.table = &p; op.y = amp_tensor2(y, AMP_F32, 2, 2);
    SAYS(amp_embedding(amp, &op), AMP_ERR_LABEL, ".ids[1] = 9, must be 0 to 2");            /* no word about labels */
    NEVER("label"); NEVER("classes");
    amp_close(amp);
}

/* ---- A device of which every call fails when it is told to */

static amp_backend device;
static int broken;
static amp_result broken_now(void) { return broken ? AMP_ERR_DEVICE : AMP_OK; }
static amp_result device_copy(void *dev, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream) {
    return broken ? AMP_ERR_DEVICE : amp_cpu()->copy(dev, dst, src, bytes, kind, stream);
}
static amp_result device_fill(void *dev, void *dst, int byte, size_t bytes, void *stream) { return broken ? AMP_ERR_DEVICE : amp_cpu()->fill(dev, dst, byte, bytes, stream); }
static amp_result device_describe(void *dev, amp_device *out) { return broken ? AMP_ERR_DEVICE : amp_cpu()->describe(dev, out); }
static amp_result device_place(void *dev, const void *ptr, amp_place *out) { (void)dev; (void)ptr; *out = AMP_PLACE_DEVICE; return broken_now(); }
static amp_result device_memory(void *dev, amp_memory_info *out) { return broken ? AMP_ERR_DEVICE : amp_cpu()->memory(dev, out); }
static amp_result device_sync(void *dev, void *stream) { (void)dev; (void)stream; return broken_now(); }
static amp_result device_event(void *dev, void *event, void *stream) { (void)dev; (void)event; (void)stream; return broken_now(); }
static amp_result device_trim(void *dev) { (void)dev; return broken_now(); }

static amp_result failing(int wanted, amp_result result) { broken = wanted; return result; }
#define BREAKS(call) do { (void)amp_dtype_parse("?", NULL); broken = 1; CHECK_ERR(call, AMP_ERR_DEVICE); (void)failing(0, AMP_OK); } while (0)

TEST(a_broken_device) {
    static float data[2][8];
    amp_desc desc;
    amp_context *amp = NULL;
    amp_param p;
    amp_set *set;
    amp_set_desc sd;
    amp_scaler *scaler;
    amp_optimizer *optimizer;
    amp_optimizer_desc od;
    amp_numerics *numerics;
    amp_numerics_desc nd;
    amp_numerics_report report;
    amp_recovery *recovery = NULL;
    amp_recovery_desc rd;
    amp_recovery_event event;
    amp_found found;
    amp_k_scaler state;
    amp_memory_info memory;
    amp_status status;
    amp_range range;
    void *room;
    int stamp;
    device = *amp_cpu();
    device.name = "broken"; device.host_visible = 0;
    device.copy = device_copy; device.fill = device_fill; device.describe = device_describe; device.place = device_place;
    device.memory = device_memory; device.stream_sync = device_sync; device.event_record = device.event_wait = device_event; device.trim = device_trim;
    memset(&desc, 0, sizeof desc); memset(&p, 0, sizeof p); memset(&sd, 0, sizeof sd); memset(&od, 0, sizeof od); memset(&nd, 0, sizeof nd);
    memset(&rd, 0, sizeof rd); memset(&range, 0, sizeof range);
    desc.backend = &device;
    BREAKS(amp_open(&amp, &desc));
    CHECK_OK(amp_open(&amp, &desc));
    p.name = "w"; p.weight = amp_tensor1(data[0], AMP_F32, 8); p.grad = amp_tensor1(data[1], AMP_F32, 8);
    sd.params = od.params = nd.params = rd.params = &p; sd.n_params = od.n_params = nd.n_params = rd.n_params = 1;
    CHECK_OK(amp_param_register(amp, &p, 1));
    CHECK_OK(amp_set_create(amp, &set, &sd)); CHECK_OK(amp_scaler_create(amp, &scaler, NULL)); CHECK_OK(amp_optimizer_create(amp, &optimizer, &od));
    CHECK_OK(amp_numerics_create(amp, &numerics, &nd));
    CHECK_OK(amp_alloc(amp, &room, 64));
    rd.optimizer = optimizer; range.data = data[0]; range.count = 8; range.dtype = AMP_F32;
    BREAKS(amp_copy(amp, room, data[0], 16, AMP_COPY_TO_DEVICE));
    BREAKS(amp_fill(amp, room, 0, 16));
    BREAKS(amp_event_record(amp, &stamp));
    BREAKS(amp_event_wait(amp, &stamp));
    BREAKS(amp_memory(amp, &memory));
    BREAKS(amp_cleanup(amp, NULL));
    BREAKS(amp_status_get(amp, scaler, 0, &status));
    BREAKS(amp_set_found(set, &found));
    BREAKS(amp_scaler_get(scaler, &state));
    BREAKS(amp_verify_placement(amp, &range, 1));
    BREAKS(amp_numerics_step(numerics, &report));
    BREAKS(amp_recovery_create(amp, &recovery, &rd));
    CHECK_OK(amp_recovery_create(amp, &recovery, &rd));
    BREAKS(amp_recovery_memory(recovery, &event));
    amp_recovery_destroy(recovery); amp_numerics_destroy(numerics); amp_optimizer_destroy(optimizer); amp_scaler_destroy(scaler); amp_set_destroy(set);
    amp_free(amp, room);
    amp_close(amp);
}

/* ---- What is refused while a graph is captured */

static amp_result device_graph_begin(void *dev, void *stream) { (void)dev; (void)stream; return broken_now(); }
static amp_result device_graph_end(void *dev, void *stream, void **graph) { (void)dev; (void)stream; *graph = &device; return broken_now(); }
static amp_result device_graph_launch(void *dev, void *graph, void *stream) { (void)dev; (void)graph; (void)stream; return broken_now(); }
static void device_graph_destroy(void *dev, void *graph) { (void)dev; (void)graph; }

TEST(a_call_during_capture) {
    static float data[2][8];
    static amp_status status;
    amp_desc desc;
    amp_context *amp = NULL;
    amp_param p;
    amp_numerics *numerics;
    amp_numerics_desc nd;
    amp_numerics_report report;
    amp_graph *graph = NULL;
    amp_mask mask;
    amp_mask_view view;
    amp_state *state;
    device = *amp_cpu();
    device.name = "graphs"; device.host_visible = 0;
    device.copy = device_copy; device.place = device_place; device.stream_sync = device_sync;
    device.graph_begin = device_graph_begin; device.graph_end = device_graph_end; device.graph_launch = device_graph_launch;
    device.graph_destroy = device_graph_destroy;
    memset(&desc, 0, sizeof desc); memset(&p, 0, sizeof p); memset(&nd, 0, sizeof nd); memset(&mask, 0, sizeof mask);
    desc.backend = &device;
    CHECK_OK(amp_open(&amp, &desc));
    p.name = "w"; p.weight = amp_tensor1(data[0], AMP_F32, 8); p.grad = amp_tensor1(data[1], AMP_F32, 8);
    nd.params = &p; nd.n_params = 1;
    CHECK_OK(amp_numerics_create(amp, &numerics, &nd));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_ERR(amp_random_load(amp, state, "none"), AMP_ERR_NAME);
    CHECK_ERR(amp_random_save(amp, state, "a prefix of more than fifty-six bytes, which no key has room for"), AMP_ERR_RANGE);
    CHECK_OK(amp_random_save(amp, state, "r"));
    CHECK_ERR(amp_graph_end(amp, &graph), AMP_ERR_STATE);
    BREAKS(amp_graph_begin(amp));
    CHECK_OK(amp_graph_begin(amp));
    CHECK_ERR(amp_graph_begin(amp), AMP_ERR_STATE);
    CHECK_ERR(amp_cleanup(amp, NULL), AMP_ERR_STATE);
    CHECK_ERR(amp_status_get(amp, NULL, 0, &status), AMP_ERR_STATE);
    CHECK_ERR(amp_numerics_step(numerics, &report), AMP_ERR_STATE);
    mask.kind = AMP_MASK_CAUSAL;
    CHECK_ERR(amp_mask_get(amp, &mask, 1, 4, 4, AMP_U8, &view), AMP_ERR_STATE);
    CHECK_ERR(amp_random_load(amp, state, "r"), AMP_ERR_STATE);
    CHECK_OK(amp_graph_end(amp, &graph));
    BREAKS(amp_graph_launch(graph));
    amp_graph_destroy(graph);
    amp_state_destroy(state); amp_numerics_destroy(numerics);
    amp_close(amp);
}

/* ---- Settings and blobs that are none */

TEST(settings_and_blobs) {
    amp_settings s;
    amp_scaler_desc scaler;
    amp_state *state, *other;
    void *blob;
    size_t bytes;
    memset(&s, 0, sizeof s);
    CHECK_ERR(amp_settings_read_text(&s, "text", "dtype\n", 6), AMP_ERR_FORMAT);
    CHECK_ERR(amp_settings_read_text(&s, "text", "debug = on\ndebug = off\n", 23), AMP_ERR_CONFLICT);
    s.level = AMP_LEVEL_O0; s.dtype = AMP_BF16;
    CHECK_ERR(amp_settings_check(&s), AMP_ERR_CONFLICT);
    memset(&s, 0, sizeof s);
    s.accumulation = -1;
    CHECK_ERR(amp_settings_fill(&s, NULL, NULL, &scaler, NULL, NULL), AMP_ERR_RANGE);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_state_encode(state, &blob, &bytes));
    ((char *)blob)[0] ^= 1;
    CHECK_ERR(amp_state_decode(&other, NULL, blob, bytes), AMP_ERR_FORMAT);
    ((char *)blob)[0] ^= 1;
    CHECK_ERR(amp_state_decode(&other, NULL, blob, 4), AMP_ERR_TRUNCATED);
    ((char *)blob)[8] = 99;
    CHECK_ERR(amp_state_decode(&other, NULL, blob, bytes), AMP_ERR_NEWER);
    amp_file_free(NULL, blob, bytes);
    amp_state_destroy(state);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    read_api();
    RUN(texts_as_snprintf);
    RUN(no_text_function_is_forgotten);
    RUN(advice_that_fits);
    RUN(a_broken_device);
    RUN(a_call_during_capture);
    RUN(settings_and_blobs);
    return TEST_END();
}
