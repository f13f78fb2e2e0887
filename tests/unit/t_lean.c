/* t_lean.c - tests amp.h without some of its parts: training must work, and calls that need a missing part must return an
 * error.  The error must name the missing part.  By default, the macros are those of the manual's smallest command, which
 * leaves out most of what the loss scaler does not need.  With other macros on the command line, only those parts are left
 * out (tests/compile.sh). */
#if !defined(LEAN)
#  define AMP_NO_OPERATORS
#  define AMP_NO_OPTIMIZERS
#  define AMP_NO_VECTOR
#  define AMP_NO_FP8
#endif
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"

enum { IN = 8, BATCH = 32 };

static int read_sample(void *user, const amp_sample *sample, void *const *fields) {
    float *x = (float *)fields[0], *y = (float *)fields[1];
    (void)user;
    *y = 0;
    for (int i = 0; i < IN; i++) {
        x[i] = amp_random_uniform(1, (uint64_t)(sample->sample * IN + i)) - 0.5f;
        *y += x[i] * (float)(i + 1);
    }
    return 0;
}

/* The forward and backward of a linear layer and the mean squared error: with amp.h's operators, or as a program's own. */
typedef struct step_of { amp_context *amp; amp_scaler *scaler; amp_param *param; const amp_batch *batch; float *y, *loss; } step_of;

#if defined(AMP_NO_OPERATORS)
static void forward_backward(const step_of *s) {
    const float *x = (const float *)s->batch->fields[0], *target = (const float *)s->batch->fields[1];
    float *w = (float *)s->param->weight.data, *grad = (float *)s->param->grad.data, scale = amp_scaler_scale(s->scaler);
    amp_plan plan;
    CHECK_OK(amp_autocast_begin(s->amp, NULL));
    amp_dtype inputs[2] = {AMP_F32, AMP_F32};
    CHECK_OK(amp_autocast_decide(s->amp, AMP_OP_LINEAR, NULL, inputs, 2, &plan));
    CHECK_EQ(plan.compute, AMP_F16);
    CHECK_OK(amp_autocast_end(s->amp));
    if (!amp_param_accumulate(s->param)) memset(grad, 0, IN * sizeof *grad);
    *s->loss = 0;
    for (int r = 0; r < BATCH; r++) {
        float d = -target[r];
        for (int i = 0; i < IN; i++) d += x[r * IN + i] * w[i];
        *s->loss += d * d / BATCH;
        for (int i = 0; i < IN; i++) grad[i] += scale * 2 * d * x[r * IN + i] / BATCH;
    }
}
#else
static void forward_backward(const step_of *s) {
    amp_tensor out = amp_tensor2(s->y, AMP_F32, BATCH, 1);
    amp_linear_op fc = {.x = amp_tensor2(s->batch->fields[0], AMP_F32, BATCH, IN), .y = out, .weight = s->param, .dy = out};
    amp_mse_op mse = {.x = out, .dx = out, .target = amp_tensor2(s->batch->fields[1], AMP_F32, BATCH, 1),
                      .grad_scale = amp_scaler_scale_ptr(s->scaler), .loss = s->loss};
    CHECK_OK(amp_autocast_begin(s->amp, NULL));
    CHECK_OK(amp_linear(s->amp, &fc));
    CHECK_EQ(fc.plan.compute, AMP_F16);
    CHECK_OK(amp_mse(s->amp, &mse));
    CHECK_OK(amp_autocast_end(s->amp));
    CHECK_OK(amp_linear_backward(s->amp, &fc));
}
#endif

/* The optimizer: amp.h's AdamW, or the program's own SGD after amp_scaler_unscale. */
#if defined(AMP_NO_OPTIMIZERS)
typedef struct { amp_scaler *scaler; amp_param *param; int applied; } optimizer_of;
static void optimizer_begin(optimizer_of *o, amp_context *amp, amp_scaler *scaler, amp_param *param) {
    (void)amp;
    *o = (optimizer_of){.scaler = scaler, .param = param};
}
static void optimizer_step(optimizer_of *o) {
    float *w = (float *)o->param->weight.data, *grad = (float *)o->param->grad.data;
    amp_range range = {.name = o->param->name, .data = grad, .count = IN, .dtype = AMP_F32};
    int32_t apply;
    CHECK_OK(amp_scaler_unscale(o->scaler, &range, 1, &apply));
    for (int i = 0; i < IN && apply; i++) w[i] -= grad[i];
    o->param->grad_live = 0;
    amp_param_changed(o->param);
    o->applied += apply;
}
static void optimizer_end(optimizer_of *o) { CHECK(o->applied > 0); }
static void optimizer_drop(const optimizer_of *o) { CHECK_EQ(o->applied, 0); }
#else
typedef struct { amp_scaler *scaler; amp_optimizer *adamw; } optimizer_of;
static void optimizer_begin(optimizer_of *o, amp_context *amp, amp_scaler *scaler, amp_param *param) {
    o->scaler = scaler;
    CHECK_OK(amp_optimizer_create(amp, &o->adamw, &(amp_optimizer_desc){.params = param, .n_params = 1, .lr = 0.1}));
}
static void optimizer_step(optimizer_of *o) { CHECK_OK(amp_step(o->adamw, o->scaler)); }
static void optimizer_end(optimizer_of *o) {
    amp_step_result result;
    CHECK(amp_step_result_next(o->adamw, &result) && result.scale > 0);
    amp_optimizer_destroy(o->adamw);
}
static void optimizer_drop(const optimizer_of *o) { amp_optimizer_destroy(o->adamw); }
#endif

TEST(trains_in_fp16) {
    amp_context *amp;
    amp_scaler *scaler;
    amp_loader *loader;
    optimizer_of optimizer;
    static float weight[IN], grad[IN], y[BATCH], first, loss;
    amp_param param = {.name = "weight", .weight = amp_tensor2(weight, AMP_F32, 1, IN), .grad = amp_tensor2(grad, AMP_F32, 1, IN)};
    amp_source source = {.read = read_sample, .samples = 1024, .n_fields = 2,
                         .fields = {{.dtype = AMP_F32, .count = IN}, {.dtype = AMP_F32, .count = 1}}};
    amp_loader_desc data = {.source = &source, .shuffle = 1, .batch = BATCH};
    amp_desc desc = {.dtype = AMP_F16};
    memset(weight, 0, sizeof weight);
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_param_register(amp, &param, 1));
    CHECK_OK(amp_loader_create(amp, &loader, &data));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    optimizer_begin(&optimizer, amp, scaler, &param);
    for (int step = 0; step < 200; step++) {
        amp_batch batch;
        CHECK_OK(amp_loader_next(loader, &batch));
        forward_backward(&(step_of){amp, scaler, &param, &batch, y, &loss});
        optimizer_step(&optimizer);
        if (step == 0) first = loss;
    }
    CHECK_OK(amp_sync(amp));
    CHECK_MSG(loss < first / 100, "loss from %g to %g", (double)first, (double)loss);
    optimizer_end(&optimizer);
    amp_scaler_destroy(scaler);
    amp_loader_destroy(loader);
    amp_close(amp);
}

#if defined(AMP_NO_RANKS)
static int no_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    (void)user; (void)data; (void)count; (void)dtype; (void)op; (void)stream;
    return 0;
}
#endif

/* What each setting needs that may be left out: the sum of 1 watch, 2 care, 4 optimizers. */
static int needs(const char *key, const char *value) {
    static const char *const watch[] = {"log_interval", "memory_interval", "cleanup_interval", "tensor_stats_interval", "memory_warning", "max_skips"};
    static const char *const care[] = {"max_retries", "batch_growth_interval"};
    static const char *const optimizers[] = {"clip_norm", "accumulation", "moments"};
    for (size_t i = 0; i < sizeof watch / sizeof *watch; i++) if (strcmp(key, watch[i]) == 0) return 1;
    for (size_t i = 0; i < sizeof care / sizeof *care; i++) if (strcmp(key, care[i]) == 0) return 2;
    for (size_t i = 0; i < sizeof optimizers / sizeof *optimizers; i++) if (strcmp(key, optimizers[i]) == 0) return 4;
    if (strcmp(key, "nan_action") == 0 && strcmp(value, "report") == 0) return 4;
    if (strcmp(key, "nan_action") == 0) return strcmp(value, "recover") == 0 ? 3 : strcmp(value, "stop") == 0;
    return 0;
}
static const char *left_out(int need) {
#if defined(AMP_NO_CARE)
    if (need & 2) return "AMP_NO_CARE";
#endif
#if defined(AMP_NO_WATCH)
    if (need & 1) return "AMP_NO_WATCH";
#endif
#if defined(AMP_NO_OPTIMIZERS)
    if (need & 4) return "AMP_NO_OPTIMIZERS";
#endif
    (void)need;
    return NULL;
}

TEST(what_nothing_reads_is_refused) {
    static const char *const lines[][2] = {
        {"dtype", "bf16"}, {"clip_norm", "1"}, {"accumulation", "2"}, {"moments", "bf16"}, {"workers", "1"}, {"log_interval", "10"}, {"memory_interval", "off"},
        {"cleanup_interval", "5"}, {"tensor_stats_interval", "100"}, {"memory_warning", "0.5"}, {"max_skips", "3"}, {"max_retries", "0"},
        {"batch_growth_interval", "100"}, {"nan_action", "report"}, {"nan_action", "skip"}, {"nan_action", "stop"}, {"nan_action", "recover"}};
    int refused = 0;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        const char *macro = left_out(needs(lines[i][0], lines[i][1]));
        char line[64];
        amp_settings s, zero;
        memset(&s, 0, sizeof s);
        zero = s;
        snprintf(line, sizeof line, "%s = %s\n", lines[i][0], lines[i][1]);
        if (macro == NULL) {
            CHECK_OK(amp_settings_set(&s, lines[i][0], lines[i][1]));
            CHECK_OK(amp_settings_check(&s));
            continue;
        }
        refused++;
        CHECK_ERR(amp_settings_set(&s, lines[i][0], lines[i][1]), AMP_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(amp_last_error(), macro) && strstr(amp_last_error(), lines[i][0]) && strstr(amp_last_error(), lines[i][1]), "%s", amp_last_error());
        CHECK_ERR(amp_settings_read_text(&s, "lean", line, strlen(line)), AMP_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(amp_last_error(), "lean: line 1") != NULL, "%s", amp_last_error());
        CHECK(memcmp(&s, &zero, sizeof s) == 0);
        CHECK_OK(amp_settings_set(&s, lines[i][0], "default"));
    }
#if defined(AMP_NO_CARE) || defined(AMP_NO_WATCH)
    CHECK(refused >= 3);
#else
    CHECK(refused == 0);
#endif
}

/* A field that the program filled itself. */
TEST(fields_are_checked_too) {
    static const char *const keys[] = {"log_interval", "max_retries", "nan_action"};
    for (int i = 0; i < 3; i++) {
        const char *macro = left_out(needs(keys[i], "recover"));
        amp_desc desc = {.threads = 1};
        amp_settings s;
        memset(&s, 0, sizeof s);
        if (i == 0) s.log_interval = 7;
        if (i == 1) s.max_retries = 5;
        if (i == 2) s.nan_action = AMP_NAN_RECOVER;
        if (macro == NULL) { CHECK_OK(amp_settings_check(&s)); continue; }
        CHECK_ERR(amp_settings_check(&s), AMP_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(amp_last_error(), macro) && strstr(amp_last_error(), keys[i]), "%s", amp_last_error());
        CHECK_ERR(amp_settings_fill(&s, NULL, &desc, NULL, NULL, NULL), AMP_ERR_UNSUPPORTED);
    }
}

/* The text of all settings says what is not read, and can itself be read. */
TEST(the_text_says_what_is_left_out) {
    char text[4096], line[64];
    amp_settings s, again;
    memset(&s, 0, sizeof s);
    memset(&again, 0, sizeof again);
    CHECK_OK(amp_settings_set(&s, "dtype", "bf16"));
    CHECK(amp_settings_text(&s, text, sizeof text) < sizeof text);
    for (int i = 0; i < 4; i++) {
        static const char *const keys[] = {"log_interval", "max_retries", "nan_action", "dtype"};
        const char *macro = left_out(needs(keys[i], "skip"));
        snprintf(line, sizeof line, "%s%s = ", macro ? "\n# " : "\n", keys[i]);
        const char *at = strstr(text, line);
        CHECK_MSG(at != NULL, "%s is not in the text", line);
        if (at != NULL && macro != NULL) CHECK_MSG(strstr(at, macro) && strstr(at, macro) < strchr(at + 1, '\n'), "%s", at);
    }
    CHECK_OK(amp_settings_read_text(&again, "text", text, strlen(text)));
    CHECK_EQ(again.dtype, AMP_BF16);
    CHECK_EQ(again.log_interval, left_out(1) ? 0 : 100);
}

/* An object that another file, which sees its declaration, could pass. */
TEST(objects_of_missing_parts_are_refused) {
    amp_settings s;
    amp_context *amp;
    char monitor[8] = "monitor";
    if (left_out(1) == NULL) SKIP("monitors are there");
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, NULL, (amp_monitor *)(void *)monitor), AMP_ERR_UNSUPPORTED);
#if defined(AMP_NO_OPTIMIZERS)
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, (amp_optimizer *)(void *)monitor, NULL), AMP_ERR_UNSUPPORTED);
    CHECK(strstr(amp_last_error(), "AMP_NO_OPTIMIZERS") != NULL);
#endif
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    amp_close(amp);
}

TEST(what_is_left_out_is_refused_by_name) {
    amp_machine machine;
    amp_choice choice;
    amp_context *amp = NULL;
    (void)amp;
    CHECK_OK(amp_machine_probe(&machine));
#if defined(AMP_NO_FP8)
    CHECK_ERR(amp_choose(&machine, AMP_FP8, 0, &choice), AMP_ERR_UNSUPPORTED);
    CHECK(strstr(amp_last_error(), "AMP_NO_FP8") != NULL);
    CHECK_ERR(amp_open(&amp, &(amp_desc){.dtype = AMP_FP8}), AMP_ERR_UNSUPPORTED);
#else
    CHECK_OK(amp_choose(&machine, AMP_FP8, 0, &choice));
#endif
#if defined(AMP_NO_RANKS)
    CHECK_ERR(amp_open(&amp, &(amp_desc){.reducer = {.reduce = no_reduce, .world = 2}}), AMP_ERR_UNSUPPORTED);
    CHECK(strstr(amp_last_error(), "AMP_NO_RANKS") != NULL);
#endif
#if defined(AMP_NO_RANKS) && !defined(AMP_NO_OPTIMIZERS)
    static float w[IN], g[IN];
    amp_param p = {.name = "w", .weight = amp_tensor1(w, AMP_F32, IN), .grad = amp_tensor1(g, AMP_F32, IN)};
    amp_optimizer_desc loose = {.params = &p, .n_params = 1, .lr = 0.1, .sync_every = 4};
    amp_optimizer *optimizer;
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_OK(amp_param_register(amp, &p, 1));
    CHECK_ERR(amp_optimizer_create(amp, &optimizer, &loose), AMP_ERR_UNSUPPORTED);
    CHECK(strstr(amp_last_error(), "AMP_NO_RANKS") != NULL);
    amp_close(amp);
#endif
#if defined(AMP_NO_VECTOR)
    CHECK_EQ(machine.cpu.path, AMP_CPU_SCALAR);
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_OK(amp_query_machine(amp, &machine));
    CHECK_EQ(machine.cpu.path, AMP_CPU_SCALAR);
    amp_close(amp);
#endif
}

/* A checkpoint of everything, loaded into new objects. */
TEST(checkpoints_work) {
    static float w[IN], g[IN], back[IN];
    amp_param p = {.name = "w", .weight = amp_tensor1(w, AMP_F32, IN), .grad = amp_tensor1(g, AMP_F32, IN)};
    amp_context *amp;
    amp_scaler *scaler;
    optimizer_of optimizer;
    amp_state *state, *read;
    void *data;
    size_t bytes;
    float scale;
    CHECK_OK(amp_open(&amp, &(amp_desc){.dtype = AMP_F16}));
    CHECK_OK(amp_param_register(amp, &p, 1));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    optimizer_begin(&optimizer, amp, scaler, &p);
    for (int i = 0; i < IN; i++) g[i] = i == 3 ? HUGE_VALF : 1;
    (void)amp_param_accumulate(&p);
    optimizer_step(&optimizer);                     /* skipped, and the scale is halved */
    scale = amp_scaler_scale(scaler);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_state_put(state, "w", AMP_F32, w, IN));
#if !defined(AMP_NO_OPTIMIZERS)
    CHECK_OK(amp_optimizer_save(optimizer.adamw, state, "o"));
#endif
    CHECK_OK(amp_scaler_save(scaler, state, "s"));
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    CHECK_OK(amp_state_decode(&read, NULL, data, bytes));
    CHECK_OK(amp_scaler_set_scale(scaler, 4));
    CHECK_OK(amp_state_get(read, "w", AMP_F32, back, IN));
#if !defined(AMP_NO_OPTIMIZERS)
    CHECK_OK(amp_optimizer_load(optimizer.adamw, read, "o"));
#endif
    CHECK_OK(amp_scaler_load(scaler, read, "s"));
    CHECK(amp_scaler_scale(scaler) == scale && scale == 32768 && memcmp(back, w, sizeof w) == 0);
    amp_file_free(NULL, data, bytes);
    amp_state_destroy(read);
    amp_state_destroy(state);
    optimizer_drop(&optimizer);
    amp_scaler_destroy(scaler);
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(trains_in_fp16);
    RUN(checkpoints_work);
    RUN(what_is_left_out_is_refused_by_name);
    RUN(what_nothing_reads_is_refused);
    RUN(fields_are_checked_too);
    RUN(the_text_says_what_is_left_out);
    RUN(objects_of_missing_parts_are_refused);
    return TEST_END();
}
