/* t_lean.c - amp.h without its outer sections: training works, and settings that only those read are refused by name.
 * With AMP_NO_CARE or AMP_NO_WATCH on the command line, without that one alone (tests/compile.sh). */
#if !defined(AMP_NO_CARE) && !defined(AMP_NO_WATCH)
#  define AMP_NO_CARE
#  define AMP_NO_WATCH
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

TEST(trains_in_fp16) {
    amp_context *amp;
    amp_scaler *scaler;
    amp_optimizer *optimizer;
    amp_loader *loader;
    amp_step_result result;
    static float weight[IN], grad[IN], y[BATCH], first, loss;
    amp_param param = {.name = "weight", .weight = amp_tensor2(weight, AMP_F32, 1, IN), .grad = amp_tensor2(grad, AMP_F32, 1, IN)};
    amp_source source = {.read = read_sample, .samples = 1024, .n_fields = 2,
                         .fields = {{.dtype = AMP_F32, .count = IN}, {.dtype = AMP_F32, .count = 1}}};
    amp_loader_desc data = {.source = &source, .shuffle = 1, .batch = BATCH};
    amp_optimizer_desc adamw = {.params = &param, .n_params = 1, .lr = 0.1};
    amp_desc desc = {.dtype = AMP_F16};
    memset(weight, 0, sizeof weight);
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_param_register(amp, &param, 1));
    CHECK_OK(amp_loader_create(amp, &loader, &data));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &adamw));
    for (int step = 0; step < 200; step++) {
        amp_batch batch;
        CHECK_OK(amp_loader_next(loader, &batch));
        amp_tensor out = amp_tensor2(y, AMP_F32, BATCH, 1);
        amp_linear_op fc = {.x = amp_tensor2(batch.fields[0], AMP_F32, BATCH, IN), .y = out, .weight = &param, .dy = out};
        amp_mse_op mse = {.x = out, .dx = out, .target = amp_tensor2(batch.fields[1], AMP_F32, BATCH, 1),
                          .grad_scale = amp_scaler_scale_ptr(scaler), .loss = &loss};
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_OK(amp_linear(amp, &fc));
        CHECK_EQ(fc.plan.compute, AMP_F16);
        CHECK_OK(amp_mse(amp, &mse));
        CHECK_OK(amp_autocast_end(amp));
        CHECK_OK(amp_linear_backward(amp, &fc));
        CHECK_OK(amp_step(optimizer, scaler));
        if (step == 0) first = loss;
    }
    CHECK_OK(amp_sync(amp));
    CHECK_MSG(loss < first / 100, "loss from %g to %g", (double)first, (double)loss);
    CHECK(amp_step_result_next(optimizer, &result) && result.scale > 0);
    amp_optimizer_destroy(optimizer);
    amp_scaler_destroy(scaler);
    amp_loader_destroy(loader);
    amp_close(amp);
}

/* What each setting needs that may be left out: 0 nothing, 1 watch, 2 care, 3 both. */
static int needs(const char *key, const char *value) {
    static const char *const watch[] = {"log_interval", "memory_interval", "cleanup_interval", "tensor_stats_interval", "memory_warning", "max_skips"};
    static const char *const care[] = {"max_retries", "batch_growth_interval"};
    for (size_t i = 0; i < sizeof watch / sizeof *watch; i++) if (strcmp(key, watch[i]) == 0) return 1;
    for (size_t i = 0; i < sizeof care / sizeof *care; i++) if (strcmp(key, care[i]) == 0) return 2;
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
    (void)need;
    return NULL;
}

TEST(what_nothing_reads_is_refused) {
    static const char *const lines[][2] = {
        {"dtype", "bf16"}, {"clip_norm", "1"}, {"accumulation", "2"}, {"workers", "1"}, {"log_interval", "10"}, {"memory_interval", "off"},
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
    CHECK(refused >= 3);
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

/* A monitor that another file, which sees its declaration, could pass. */
TEST(a_monitor_is_refused) {
    amp_settings s;
    amp_context *amp;
    char monitor[8] = "monitor";
    if (left_out(1) == NULL) SKIP("monitors are there");
    memset(&s, 0, sizeof s);
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_ERR(amp_settings_apply(&s, amp, NULL, NULL, (amp_monitor *)(void *)monitor), AMP_ERR_UNSUPPORTED);
    CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(trains_in_fp16);
    RUN(what_nothing_reads_is_refused);
    RUN(fields_are_checked_too);
    RUN(the_text_says_what_is_left_out);
    RUN(a_monitor_is_refused);
    return TEST_END();
}
