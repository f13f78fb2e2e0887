/* t_errors.c - provokes every error that a comment of amp.h documents, and checks the error text.  The comments are those
 * of the API half ("Errors: AMP_ERR_SHAPE").  The text must name the function that was called, and no other function.
 * Every function that writes a text must work as snprintf does. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "alike.h"

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
TEXT(amp_epoch_summary_text, amp_epoch_summary) TEXT(amp_tensor_stats_text, amp_tensor_stats_report) TEXT(amp_verify_text, amp_verify_report)
TEXT(amp_gradcheck_text, amp_gradcheck_report) TEXT(amp_advice_text, amp_advice) TEXT(amp_tune_text, amp_tune_report) TEXT(amp_adapt_json, amp_adapt_record)

/* Of objects. */
static amp_tape *tape;
static amp_adapt *adapt;
static size_t call_amp_tape_text(const void *none, char *text, size_t size) { (void)none; return amp_tape_text(tape, text, size); }
static size_t call_amp_adapt_text(const void *none, char *text, size_t size) { (void)none; return amp_adapt_text(adapt, text, size); }

static union {
    amp_machine machine; amp_settings settings; amp_status status; amp_epoch_summary summary; amp_tensor_stats_report numerics;
    amp_verify_report verify; amp_gradcheck_report gradcheck; amp_advice advice; amp_tune_report tune; amp_adapt_record record;
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
    static amp_tensor_stats_row rows[2];
    rows[0].name = "fc.weight";                         /* the other is a range without a name */
    thing.numerics.rows = rows; thing.numerics.n_rows = 2;
}
static void fill_verify(void) { thing.verify.n_rows = AMP_VERIFY_ROWS; }
static void fill_tune(void) { thing.tune.n_rows = AMP_TUNE_ROWS; }
static void fill_gradcheck(void) { thing.gradcheck.passed = 1; snprintf(thing.gradcheck.worst, sizeof thing.gradcheck.worst, "x"); }
static void fill_advice(void) { thing.advice.batch = 8; }
static void fill_record(void) { snprintf(thing.record.layer, sizeof thing.record.layer, "fc"); }

#define ROW(name, fill) {#name, call_##name, fill}
static const struct { const char *name; text_call call; void (*fill)(void); } texts[] = {
    ROW(amp_machine_text, fill_machine), ROW(amp_settings_text, no_more), ROW(amp_status_text, fill_status), ROW(amp_status_json, fill_status),
    ROW(amp_epoch_summary_text, fill_summary), ROW(amp_tensor_stats_text, fill_numerics), ROW(amp_verify_text, fill_verify),
    ROW(amp_gradcheck_text, fill_gradcheck), ROW(amp_advice_text, fill_advice), ROW(amp_tune_text, fill_tune),
    ROW(amp_adapt_json, fill_record)};
static const char *const texts_of_objects[] = {"amp_tape_text", "amp_adapt_text"};
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

TEST(texts_of_objects_as_snprintf) {
    amp_context *amp;
    amp_model *model;
    amp_tensor x;
    amp_desc open;
    amp_adapt_desc desc;
    amp_value y;
    float data[6] = {0};
    memset(&open, 0, sizeof open);
    memset(&desc, 0, sizeof desc);
    open.dtype = AMP_F32;
    CHECK(call_amp_tape_text(NULL, NULL, 0) == 0 && call_amp_adapt_text(NULL, NULL, 0) == 0);
    CHECK_OK(amp_open(&amp, &open));
    CHECK_OK(amp_model_create(amp, &model, 1, 0));
    amp_model_param(model, "fc", 4, 3, AMP_INIT_ONES, 0);
    CHECK_OK(amp_model_params(model, &desc.params, &desc.n_params));
    CHECK_OK(amp_adapt_create(amp, &adapt, &desc));
    CHECK_OK(amp_tape_create(amp, &tape, NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    x = amp_tensor2(data, AMP_F32, 2, 3);
    y = amp_tape_linear(tape, amp_tape_input(tape, &x), amp_model_find(model, "fc"), NULL, AMP_ACT_NONE);
    CHECK(y != 0);
    measure(call_amp_tape_text, "amp_tape_text");
    measure(call_amp_adapt_text, "amp_adapt_text");
    CHECK_OK(amp_tape_finish(tape));
    amp_close(amp);
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
        for (int i = 0; i < 2; i++) known |= !strcmp(texts_of_objects[i], name);
        CHECK_MSG(known, "%s", name);
        seen++;
    }
    CHECK_EQ(seen, TEXTS + 2);
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
static amp_result device_place(void *dev, const void *ptr, amp_memory_kind *out) { (void)dev; (void)ptr; *out = AMP_MEMORY_DEVICE; return broken_now(); }
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
    amp_grad_set *set;
    amp_grad_set_desc sd;
    amp_scaler *scaler;
    amp_optimizer *optimizer;
    amp_optimizer_desc od;
    amp_tensor_stats *numerics;
    amp_tensor_stats_desc nd;
    amp_tensor_stats_report report;
    amp_recovery *recovery = NULL;
    amp_recovery_desc rd;
    amp_recovery_event event;
    amp_grad_stats found;
    amp_k_scaler state;
    amp_memory_info memory;
    amp_status status;
    amp_range range;
    void *room;
    int stamp;
    device = *amp_cpu();
    device.name = "broken"; device.host_visible = 0;
    device.copy = device_copy; device.fill = device_fill; device.describe = device_describe; device.memory_kind = device_place;
    device.memory = device_memory; device.stream_sync = device_sync; device.event_record = device.event_wait = device_event; device.trim = device_trim;
    memset(&desc, 0, sizeof desc); memset(&p, 0, sizeof p); memset(&sd, 0, sizeof sd); memset(&od, 0, sizeof od); memset(&nd, 0, sizeof nd);
    memset(&rd, 0, sizeof rd); memset(&range, 0, sizeof range);
    desc.backend = &device;
    BREAKS(amp_open(&amp, &desc));
    CHECK_OK(amp_open(&amp, &desc));
    p.name = "w"; p.weight = amp_tensor1(data[0], AMP_F32, 8); p.grad = amp_tensor1(data[1], AMP_F32, 8);
    sd.params = od.params = nd.params = rd.params = &p; sd.n_params = od.n_params = nd.n_params = rd.n_params = 1;
    CHECK_OK(amp_param_register(amp, &p, 1));
    CHECK_OK(amp_grad_set_create(amp, &set, &sd)); CHECK_OK(amp_scaler_create(amp, &scaler, NULL)); CHECK_OK(amp_optimizer_create(amp, &optimizer, &od));
    CHECK_OK(amp_tensor_stats_create(amp, &numerics, &nd));
    CHECK_OK(amp_alloc(amp, &room, 64));
    rd.optimizer = optimizer; range.data = data[0]; range.count = 8; range.dtype = AMP_F32;
    BREAKS(amp_copy(amp, room, data[0], 16, AMP_COPY_TO_DEVICE));
    BREAKS(amp_fill(amp, room, 0, 16));
    BREAKS(amp_event_record(amp, &stamp));
    BREAKS(amp_event_wait(amp, &stamp));
    BREAKS(amp_memory(amp, &memory));
    BREAKS(amp_cleanup(amp, NULL));
    BREAKS(amp_status_get(amp, scaler, 0, &status));
    BREAKS(amp_grad_set_stats(set, &found));
    BREAKS(amp_scaler_get(scaler, &state));
    BREAKS(amp_verify_placement(amp, &range, 1));
    BREAKS(amp_tensor_stats_step(numerics, &report));
    BREAKS(amp_recovery_create(amp, &recovery, &rd));
    CHECK_OK(amp_recovery_create(amp, &recovery, &rd));
    BREAKS(amp_recovery_memory(recovery, &event));
    amp_recovery_destroy(recovery); amp_tensor_stats_destroy(numerics); amp_optimizer_destroy(optimizer); amp_scaler_destroy(scaler); amp_grad_set_destroy(set);
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
    amp_tensor_stats *numerics;
    amp_tensor_stats_desc nd;
    amp_tensor_stats_report report;
    amp_graph *graph = NULL;
    amp_mask mask;
    amp_mask_view view;
    amp_state *state;
    device = *amp_cpu();
    device.name = "graphs"; device.host_visible = 0;
    device.copy = device_copy; device.memory_kind = device_place; device.stream_sync = device_sync;
    device.graph_begin = device_graph_begin; device.graph_end = device_graph_end; device.graph_launch = device_graph_launch;
    device.graph_destroy = device_graph_destroy;
    memset(&desc, 0, sizeof desc); memset(&p, 0, sizeof p); memset(&nd, 0, sizeof nd); memset(&mask, 0, sizeof mask);
    desc.backend = &device;
    CHECK_OK(amp_open(&amp, &desc));
    p.name = "w"; p.weight = amp_tensor1(data[0], AMP_F32, 8); p.grad = amp_tensor1(data[1], AMP_F32, 8);
    nd.params = &p; nd.n_params = 1;
    CHECK_OK(amp_tensor_stats_create(amp, &numerics, &nd));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_ERR(amp_random_load(amp, state, "none"), AMP_ERR_NAME);
    CHECK_ERR(amp_random_save(amp, state, ""), AMP_ERR_RANGE);
    CHECK_ERR(amp_random_save(amp, state, "a-prefix-that-is-longer-than-forty-bytes-is"), AMP_ERR_RANGE);
    CHECK_ERR(amp_random_load(amp, state, ""), AMP_ERR_RANGE);
    CHECK_ERR(amp_random_load(amp, state, "a-prefix-that-is-longer-than-forty-bytes-is"), AMP_ERR_RANGE);
    CHECK_OK(amp_random_save(amp, state, "r"));
    CHECK_ERR(amp_graph_end(amp, &graph), AMP_ERR_STATE);
    CHECK_ERR(amp_graph_end(NULL, &graph), AMP_ERR_NULL);
    BREAKS(amp_graph_begin(amp));
    CHECK_OK(amp_graph_begin(amp));
    CHECK_ERR(amp_graph_begin(amp), AMP_ERR_STATE);
    CHECK_ERR(amp_cleanup(amp, NULL), AMP_ERR_STATE);
    CHECK_ERR(amp_status_get(amp, NULL, 0, &status), AMP_ERR_STATE);
    CHECK_ERR(amp_tensor_stats_step(numerics, &report), AMP_ERR_STATE);
    mask.kind = AMP_MASK_CAUSAL;
    CHECK_ERR(amp_mask_get(amp, &mask, 1, 4, 4, AMP_U8, &view), AMP_ERR_STATE);
    CHECK_ERR(amp_random_load(amp, state, "r"), AMP_ERR_STATE);
    CHECK_OK(amp_graph_end(amp, &graph));
    BREAKS(amp_graph_launch(graph));
    amp_graph_destroy(graph);
    amp_state_destroy(state); amp_tensor_stats_destroy(numerics);
    amp_close(amp);
}

/* ---- A training on that device, each call of which is refused or fails in turn */

static amp_result device_event_done(void *dev, void *event, int32_t *done) { (void)dev; (void)event; *done = 1; return broken_now(); }
static amp_result device_event_create(void *dev, void **event, int32_t timed) { return broken ? AMP_ERR_DEVICE : amp_cpu()->event_create(dev, event, timed); }

static amp_system posix;
static int starved;
static void *scarce(void *user, size_t size, size_t align) { return starved ? NULL : posix.alloc(user, size, align); }
#define STARVES(call) do { (void)amp_dtype_parse("?", NULL); starved = 1; CHECK_ERR(call, AMP_ERR_MEMORY); starved = 0; } while (0)

/* Of two parameters the second is frozen and has no memory. */
static struct training {
    float data[2][8], x[8], dx[8], y[8], dy[8];
    amp_context *amp;
    amp_param p[2];
    amp_optimizer *optimizer;
    amp_optimizer_desc od;
    amp_scaler *scaler;
    amp_monitor *monitor;
    amp_monitor_desc md;
    amp_recovery *recovery;
    amp_recovery_desc rd;
} tr;

static void open_training(void) {
    amp_desc desc;
    memset(&tr, 0, sizeof tr); memset(&desc, 0, sizeof desc);
    device = *amp_cpu();
    device.name = "breakable"; device.host_visible = 0;
    device.copy = device_copy; device.fill = device_fill; device.memory = device_memory; device.memory_kind = device_place;
    device.stream_sync = device_sync; device.event_create = device_event_create; device.event_record = device_event; device.event_done = device_event_done;
    device.graph_begin = device_graph_begin; device.graph_end = device_graph_end; device.graph_launch = device_graph_launch;
    device.graph_destroy = device_graph_destroy;
    amp_system_default(&posix);
    desc.system = posix; desc.system.alloc = scarce;
    desc.backend = &device; desc.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&tr.amp, &desc));
    tr.p[0].name = "w"; tr.p[0].weight = amp_tensor1(tr.data[0], AMP_F32, 8); tr.p[0].grad = amp_tensor1(tr.data[1], AMP_F32, 8);
    tr.p[1].name = "frozen";
    CHECK_OK(amp_param_register(tr.amp, tr.p, 1));
    tr.od.params = tr.p; tr.od.n_params = 2;
    CHECK_OK(amp_optimizer_create(tr.amp, &tr.optimizer, &tr.od));
    CHECK_OK(amp_scaler_create(tr.amp, &tr.scaler, NULL));
    tr.md.optimizer = tr.optimizer;
    tr.rd.optimizer = tr.optimizer; tr.rd.params = tr.p; tr.rd.n_params = 1;
    CHECK_OK(amp_recovery_create(tr.amp, &tr.recovery, &tr.rd));
}
static void close_training(void) {
    amp_recovery_destroy(tr.recovery); amp_monitor_destroy(tr.monitor); amp_scaler_destroy(tr.scaler); amp_optimizer_destroy(tr.optimizer);
    amp_close(tr.amp);
}

static int copy_forward(void *user, amp_context *amp) { (void)user; (void)amp; memcpy(tr.y, tr.x, sizeof tr.y); return 0; }
static int copy_backward(void *user, amp_context *amp) { (void)user; (void)amp; memcpy(tr.dx, tr.dy, sizeof tr.dx); return 0; }
static amp_range row_of(float *data) {
    amp_range range;
    memset(&range, 0, sizeof range);
    range.name = "row"; range.data = data; range.count = 8; range.dtype = AMP_F32;
    return range;
}
static amp_step_record bad_step(void) {
    amp_step_record record;
    memset(&record, 0, sizeof record);
    record.result.step = 1;
    record.anomaly = AMP_ANOMALY_LOSS; record.action = AMP_NAN_RECOVER;
    return record;
}

TEST(a_device_that_breaks_in_training) {
    amp_advice advice;
    amp_settings settings;
    amp_gradcheck_desc gd;
    amp_gradcheck_report checked;
    amp_verify_desc vd;
    amp_verify_report verified;
    amp_range x, dx, y, dy;
    amp_mask mask;
    amp_mask_view view;
    amp_step_info info;
    amp_step_record record = bad_step();
    amp_recovery_event event;
    memset(&settings, 0, sizeof settings); memset(&gd, 0, sizeof gd); memset(&vd, 0, sizeof vd); memset(&mask, 0, sizeof mask); memset(&info, 0, sizeof info);
    open_training();
    x = row_of(tr.x); dx = row_of(tr.dx); y = row_of(tr.y); dy = row_of(tr.dy);
    gd.forward = copy_forward; gd.backward = copy_backward;
    gd.inputs = &x; gd.input_grads = &dx; gd.outputs = &y; gd.output_grads = &dy; gd.n_inputs = gd.n_outputs = 1;
    vd.step = copy_forward; vd.outputs = &y; vd.n_outputs = 1; vd.params = tr.p; vd.n_params = 1;
    mask.kind = AMP_MASK_CAUSAL;
    BREAKS(amp_advise(tr.amp, NULL, &advice));
    BREAKS(amp_gradcheck(tr.amp, &gd, &checked));
    BREAKS(amp_verify(tr.amp, &vd, &verified));
    BREAKS(amp_mask_get(tr.amp, &mask, 1, 4, 4, AMP_U8, &view));
    BREAKS(amp_settings_apply(&settings, tr.amp, tr.scaler, NULL, NULL));
    BREAKS(amp_optimizer_set_weight(tr.optimizer, &tr.p[0], tr.x));
    BREAKS(amp_recovery_batch(tr.recovery, NULL));
    BREAKS(amp_recovery_step(tr.recovery, &record, &event));
    BREAKS(amp_monitor_create(tr.amp, &tr.monitor, &tr.md));
    CHECK_OK(amp_monitor_create(tr.amp, &tr.monitor, &tr.md));
    BREAKS(amp_monitor_phase(tr.monitor, AMP_PHASE_FORWARD));
    (void)amp_param_accumulate(&tr.p[0]);
    CHECK_OK(amp_step(tr.optimizer, NULL));
    BREAKS(amp_monitor_step(tr.monitor, &info));
    BREAKS(amp_monitor_epoch(tr.monitor, NULL));
    close_training();
}

TEST(a_host_without_memory) {
    amp_state *state;
    amp_state *none;
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    amp_tune_desc td;
    amp_tune_report tuned;
    amp_system host;
    amp_tensor cast;
    void *blob;
    size_t bytes;
    memset(&td, 0, sizeof td);
    open_training();
    host = posix; host.alloc = scarce;
    CHECK_OK(amp_state_create(&state, &host));
    STARVES(amp_recovery_save(tr.recovery, state, "r"));
    STARVES(amp_state_encode(state, &blob, &bytes));
    STARVES(amp_autocast_cast(tr.amp, &tr.p[0], AMP_BF16, &cast));
    CHECK_OK(amp_autocast_cast(tr.amp, &tr.p[0], AMP_BF16, &cast));
    STARVES(amp_state_create(&none, &host));
    STARVES(amp_optimizer_create(tr.amp, &optimizer, &tr.od));
    STARVES(amp_optimizer_set_weight(tr.optimizer, &tr.p[0], tr.x));
    STARVES(amp_grad_set_save(amp_optimizer_grad_set(tr.optimizer)));
    STARVES(amp_scaler_create(tr.amp, &scaler, NULL));
    STARVES(amp_monitor_create(tr.amp, &tr.monitor, &tr.md));
    STARVES(amp_recovery_batch(tr.recovery, NULL));
    STARVES(amp_graph_begin(tr.amp));
    td.step = copy_forward; td.batch = 1;
    STARVES(amp_tune(tr.amp, &td, &tuned));
    amp_state_destroy(state);
    close_training();
}

static int no_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    (void)user; (void)data; (void)count; (void)dtype; (void)op; (void)stream;
    return 1;
}

TEST(a_training_that_is_refused) {
    static float half[8];               /* as fp16: zeros */
    amp_graph *graph;
    amp_settings settings;
    amp_gradcheck_desc gd;
    amp_gradcheck_report checked;
    amp_range x, dx, y, dy;
    amp_state *state;
    amp_step_record record = bad_step();
    amp_recovery_event event;
    amp_optimizer *second = NULL;
    amp_optimizer_desc od;
    amp_scaler *torch;
    amp_scaler_desc sd;
    amp_param p;
    amp_context *ranks;
    amp_desc desc;
    memset(&settings, 0, sizeof settings); memset(&gd, 0, sizeof gd); memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd);
    memset(&p, 0, sizeof p); memset(&desc, 0, sizeof desc);
    open_training();
    x = row_of(tr.x); dx = row_of(tr.dx); y = row_of(tr.y); dy = row_of(tr.dy);
    gd.forward = copy_forward; gd.backward = copy_backward;
    gd.inputs = &x; gd.input_grads = &dx; gd.outputs = &y; gd.output_grads = &dy; gd.n_inputs = gd.n_outputs = 1;
    CHECK_ERR(amp_optimizer_set_weight(tr.optimizer, &tr.p[1], tr.x), AMP_ERR_SHAPE);
    settings.scaler.max_scale = 1.7014118e38f;          /* 2^127, whose inverse is subnormal */
    CHECK_ERR(amp_settings_check(&settings), AMP_ERR_SCALE);
    CHECK_ERR(amp_settings_apply(&settings, tr.amp, tr.scaler, NULL, NULL), AMP_ERR_SCALE);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_ERR(amp_recovery_save(tr.recovery, state, "a prefix of more than fifty-six bytes, which no key has room for"), AMP_ERR_RANGE);
    amp_state_destroy(state);

    CHECK_OK(amp_graph_begin(tr.amp));
    CHECK_ERR(amp_gradcheck(tr.amp, &gd, &checked), AMP_ERR_STATE);
    CHECK_ERR(amp_optimizer_set_weight(tr.optimizer, &tr.p[0], tr.x), AMP_ERR_STATE);
    CHECK_ERR(amp_recovery_step(tr.recovery, &record, &event), AMP_ERR_STATE);
    CHECK_OK(amp_optimizer_step(tr.optimizer, NULL));
    SAYS(amp_optimizer_step(tr.optimizer, NULL), AMP_ERR_STATE, "steps twice");
    CHECK_OK(amp_graph_end(tr.amp, &graph));
    CHECK_OK(amp_set_dtype(tr.amp, AMP_BF16));
    CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
    amp_graph_destroy(graph);

    p = tr.p[0]; p.id = 0; p.grad = amp_tensor1(tr.data[1], AMP_F32, 7);
    od.params = &p; od.n_params = 1;
    CHECK_ERR(amp_optimizer_create(tr.amp, &second, &od), AMP_ERR_SHAPE);
    p.weight = amp_tensor1(half, AMP_F16, 8); p.grad = amp_tensor1(half + 4, AMP_F16, 8);
    sd.preset = AMP_SCALER_TORCH;
    CHECK_OK(amp_scaler_create(tr.amp, &torch, &sd));
    CHECK_OK(amp_optimizer_create(tr.amp, &second, &od));
    (void)amp_param_accumulate(&p);
    CHECK_ERR(amp_optimizer_step(second, torch), AMP_ERR_GRAD_16BIT);
    amp_optimizer_destroy(second); amp_scaler_destroy(torch);
    close_training();

    desc.reducer.reduce = no_reduce; desc.reducer.calls = &alike; desc.reducer.world = 2;
    CHECK_OK(amp_open(&ranks, &desc));
    CHECK_OK(amp_optimizer_create(ranks, &second, &od));
    (void)amp_param_accumulate(&p);
    CHECK_ERR(amp_optimizer_step(second, NULL), AMP_ERR_REDUCE);
    amp_optimizer_destroy(second);
    amp_close(ranks);
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
    RUN(texts_as_snprintf); RUN(texts_of_objects_as_snprintf);
    RUN(no_text_function_is_forgotten);
    RUN(advice_that_fits);
    RUN(a_broken_device);
    RUN(a_call_during_capture);
    RUN(a_device_that_breaks_in_training);
    RUN(a_host_without_memory);
    RUN(a_training_that_is_refused);
    RUN(settings_and_blobs);
    return TEST_END();
}
