/* t_debug_log.c - tests the log of decisions.  It must have each decision once, with the rule that decided it and whether
 * the cast cache had the result. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <unistd.h>
#include <pthread.h>

enum { LINES = 8192 };
typedef struct told { char lines[LINES][256]; int n; amp_log_level level; } told;
static told *heard;
static pthread_mutex_t heard_lock = PTHREAD_MUTEX_INITIALIZER;

static void hear(void *user, amp_log_level level, int id, const char *text) {
    told *t = (told *)user;
    pthread_mutex_lock(&heard_lock);
    CHECK_EQ(id, AMP_LOG_DECISION);
    CHECK_EQ(level, AMP_LOG_DEBUG);
    if (t->n < LINES) snprintf(t->lines[t->n], sizeof t->lines[0], "%s", text);
    t->n++;
    pthread_mutex_unlock(&heard_lock);
}

static amp_context *open_context(amp_dtype dtype, amp_level level, amp_log_level details) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(heard, 0, sizeof *heard);
    desc.dtype = dtype;
    desc.level = level;
    desc.threads = 1;
    desc.logger.write = hear;
    desc.logger.user = heard;
    desc.logger.level = details;
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}

/* The lines so far are exactly these; they are forgotten. */
static void check_lines(const char *const *expected, int n) {
    int i;
    CHECK_EQ(heard->n, n);
    for (i = 0; i < n && i < heard->n; i++)
        CHECK_MSG(strcmp(heard->lines[i], expected[i]) == 0, "\"%s\", expected \"%s\"", heard->lines[i], expected[i]);
    memset(heard, 0, sizeof *heard);
}
#define CHECK_LINES(lines) check_lines(lines, (int)(sizeof lines / sizeof *lines))

/* Two layers over rows of 8: linear, layernorm, linear. */
typedef struct model {
    amp_param params[4];            /* fc.weight, norm.weight, norm.bias, out.weight */
    float weights[3][64], grads[4][64], x[32], hidden[32], normed[32], y[32], dx[32], mean[4], rstd[4];
    amp_linear_op fc, out;
    amp_norm_op norm;
} model;

static void model_open(model *m, amp_context *amp) {
    static const char *const names[4] = {"fc.weight", "norm.weight", "norm.bias", "out.weight"};
    int i;
    memset(m, 0, sizeof *m);
    for (i = 0; i < 64; i++) m->weights[0][i] = m->weights[1][i] = m->weights[2][i] = 0.5f - (float)(i % 7);
    for (i = 0; i < 32; i++) m->x[i] = (float)(i % 5) - 2;
    for (i = 0; i < 4; i++) {
        int matrix = i == 0 || i == 3;
        m->params[i].name = names[i];
        m->params[i].weight = matrix ? amp_tensor2(m->weights[i == 3 ? 2 : 0], AMP_F32, 8, 8) : amp_tensor1(m->weights[1] + 8 * i, AMP_F32, 8);
        m->params[i].grad = matrix ? amp_tensor2(m->grads[i], AMP_F32, 8, 8) : amp_tensor1(m->grads[i], AMP_F32, 8);
    }
    CHECK_OK(amp_param_register(amp, m->params, 4));
    m->fc.weight = &m->params[0];
    m->fc.x = amp_tensor2(m->x, AMP_F32, 4, 8);
    m->fc.y = amp_tensor2(m->hidden, AMP_F32, 4, 8);
    m->norm.weight = &m->params[1];
    m->norm.bias = &m->params[2];
    m->norm.x = amp_tensor2(m->hidden, AMP_F32, 4, 8);
    m->norm.y = amp_tensor2(m->normed, AMP_F32, 4, 8);
    m->norm.mean = m->mean;
    m->norm.rstd = m->rstd;
    m->out.weight = &m->params[3];
    m->out.x = amp_tensor2(m->normed, AMP_F32, 4, 8);
    m->out.y = amp_tensor2(m->y, AMP_F32, 4, 8);
}

static void model_forward(model *m, amp_context *amp, const amp_autocast_desc *region) {
    CHECK_OK(amp_autocast_begin(amp, region));
    CHECK_OK(amp_linear(amp, &m->fc));
    CHECK_OK(amp_layernorm(amp, &m->norm));
    CHECK_OK(amp_linear(amp, &m->out));
    CHECK_OK(amp_autocast_end(amp));
}

TEST(each_decision_once) {
    static const char *const first[] = {
        "linear fc.weight (fp32, fp32): computes in bf16, returns bf16, by region; cast cache: miss",
        "layernorm norm.weight (fp32): computes in fp32, returns fp32, by region",
        "linear out.weight (fp32, fp32): computes in bf16, returns bf16, by region; cast cache: miss"};
    static const char *const second[] = {
        "linear fc.weight (fp32, fp32): computes in bf16, returns bf16, by region; cast cache: hit",
        "linear out.weight (fp32, fp32): computes in bf16, returns bf16, by region; cast cache: hit"};
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_DEFAULT, AMP_LOG_DEBUG);
    model m;
    int i;
    model_open(&m, amp);
    model_forward(&m, amp, NULL);
    CHECK_LINES(first);
    model_forward(&m, amp, NULL);                       /* kernels pack a weight that comes a second time */
    CHECK_EQ(heard->n, 0);
    model_forward(&m, amp, NULL);
    CHECK_LINES(second);
    for (i = 0; i < 5; i++) {
        amp_param_changed(&m.params[0]);                  /* a miss again: that has been told */
        model_forward(&m, amp, NULL);
    }
    CHECK_EQ(heard->n, 0);
    amp_param_forget(amp, m.params, 4);
    amp_close(amp);
}

TEST(another_decision_is_told) {
    static const char *const fp32[] = {
        "linear fc.weight (fp32, fp32): computes in fp32, returns fp32, by storage",
        "layernorm norm.weight (fp32): computes in fp32, returns fp32, by storage",
        "linear out.weight (fp32, fp32): computes in fp32, returns fp32, by storage"};
    static const char *const by_layer[] = {
        "linear fc.weight (fp32, fp32): computes in fp32, returns fp32, by layer",
        "layernorm norm.weight (fp32): computes in fp32, returns fp32, by region",
        "linear out.weight (fp32, fp32): computes in bf16, returns bf16, by region"};
    static const char *const by_operator[] = {
        "linear fc.weight (fp32, fp32): computes in fp32, returns fp32, by operator",
        "linear out.weight (fp32, fp32): computes in fp32, returns fp32, by operator"};
    static const char *const fp16[] = {"linear out.weight (fp32, fp32): computes in fp16, returns fp16, by region"};
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_DEFAULT, AMP_LOG_DEBUG);
    amp_autocast_desc island, uncached;
    model m;
    memset(&island, 0, sizeof island);
    island.disable = 1;
    memset(&uncached, 0, sizeof uncached);
    uncached.disable_cache = 1;
    model_open(&m, amp);
    model_forward(&m, amp, &island);
    CHECK_LINES(fp32);
    CHECK_OK(amp_layer_override(amp, "fc*", AMP_F32));
    model_forward(&m, amp, &uncached);
    CHECK_LINES(by_layer);
    CHECK_OK(amp_operator_override(amp, AMP_OP_LINEAR, AMP_CAST_FP32));
    model_forward(&m, amp, &uncached);
    CHECK_LINES(by_operator);
    CHECK_OK(amp_operator_override(amp, AMP_OP_LINEAR, AMP_CAST_DEFAULT));
    CHECK_OK(amp_set_dtype(amp, AMP_F16));
    model_forward(&m, amp, &uncached);
    CHECK_LINES(fp16);
    amp_param_forget(amp, m.params, 4);
    amp_close(amp);
}

TEST(levels_and_own_operators) {
    static const char *const o0[] = {"matmul (fp32, fp32): computes in fp32, returns fp32, by level"};
    static const char *const own[] = {
        "conv stem (fp32, i32, fp32): computes in bf16, returns bf16, by region",
        "conv (fp32): computes in bf16, returns bf16, by region",
        "gemm (fp32, fp32): computes in bf16, returns bf16, by region"};
    const amp_dtype three[3] = {AMP_F32, AMP_I32, AMP_F32};
    const float a[4] = {1, 2, 3, 4};
    float c[4];
    amp_context *amp = open_context(AMP_F32, AMP_LEVEL_O0, AMP_LOG_DEBUG);
    amp_plan plan;
    int32_t conv = 0;
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_MATMUL, NULL, AMP_F32, AMP_F32), AMP_F32);
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_MATMUL, NULL, AMP_F32, AMP_F32), AMP_F32);
    CHECK_OK(amp_autocast_end(amp));
    CHECK_LINES(o0);
    amp_close(amp);
    amp = open_context(AMP_BF16, AMP_LEVEL_DEFAULT, AMP_LOG_DEBUG);
    CHECK_OK(amp_operator_register(amp, "conv", AMP_CAST_LOWER, &conv));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_autocast_decide(amp, conv, "stem", three, 3, &plan));
    CHECK_EQ(amp_autocast_compute(amp, conv, NULL, AMP_F32, AMP_DTYPE_DEFAULT), AMP_BF16);
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, 1, a, 2, a, 2, 0, c, 2));
    CHECK_ERR(amp_autocast_decide(amp, 99, "stem", three, 3, &plan), AMP_ERR_NAME);     /* no decision: no line */
    CHECK_OK(amp_autocast_end(amp));
    CHECK_LINES(own);
    amp_close(amp);
}

TEST(only_when_asked) {
    static const amp_log_level levels[] = {AMP_LOG_DEFAULT, AMP_LOG_OFF, AMP_LOG_ERROR, AMP_LOG_WARNING, AMP_LOG_INFO};
    size_t i;
    for (i = 0; i < sizeof levels / sizeof *levels; i++) {
        amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_DEFAULT, levels[i]);
        model m;
        model_open(&m, amp);
        model_forward(&m, amp, NULL);
        CHECK_EQ(heard->n, 0);
        amp_param_forget(amp, m.params, 4);
        amp_close(amp);
    }
}

/* The memory is bounded: after 4096 decisions one line says so. */
TEST(bounded) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_DEFAULT, AMP_LOG_DEBUG);
    char layer[32];
    int i, pass;
    for (pass = 0; pass < 2; pass++)
        for (i = 0; i < 5000; i++) {
            snprintf(layer, sizeof layer, "layer.%d", i);
            CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, layer, AMP_F32, AMP_F32), AMP_F32);
        }
    CHECK_EQ(heard->n, 4097);
    CHECK(strcmp(heard->lines[4095], "linear layer.4095 (fp32, fp32): computes in fp32, returns fp32, by storage") == 0);
    CHECK(strcmp(heard->lines[4096], "further decisions are not logged") == 0);
    amp_close(amp);
}

static void *decide_all(void *amp) {
    char layer[32];
    int i;
    for (i = 0; i < 1000; i++) {
        snprintf(layer, sizeof layer, "layer.%d", i);
        (void)amp_autocast_compute((const amp_context *)amp, AMP_OP_LINEAR, layer, AMP_F32, AMP_F32);
    }
    return NULL;
}

TEST(threads) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_DEFAULT, AMP_LOG_DEBUG);
    pthread_t threads[4];
    int i;
    for (i = 0; i < 4; i++) CHECK_EQ(pthread_create(&threads[i], NULL, decide_all, amp), 0);
    for (i = 0; i < 4; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(heard->n, 1000);
    amp_close(amp);
}

/* What a context of the built-in logger writes to stderr while `layers` decisions are made. */
static int built_in_lines(int layers) {
    char path[] = "/tmp/t_debug_log_XXXXXX", line[256], layer[32];
    int file = mkstemp(path), saved = dup(2), i, lines = 0;
    amp_context *amp = NULL;
    amp_desc desc;
    FILE *written;
    memset(&desc, 0, sizeof desc);
    desc.logger.level = AMP_LOG_DEBUG;
    CHECK(file >= 0 && saved >= 0 && dup2(file, 2) >= 0);
    CHECK_OK(amp_open(&amp, &desc));
    for (i = 0; i < layers; i++) {
        snprintf(layer, sizeof layer, "layer.%d", i);
        (void)amp_autocast_compute(amp, AMP_OP_LINEAR, layer, AMP_F32, AMP_F32);
    }
    amp_close(amp);
    fflush(stderr);
    CHECK(dup2(saved, 2) >= 0);
    close(saved);
    close(file);
    written = fopen(path, "r");
    CHECK(written != NULL);
    while (written != NULL && fgets(line, sizeof line, written) != NULL) {
        snprintf(layer, sizeof layer, " layer.%d (", lines++);
        CHECK_MSG(strncmp(line, "amp debug 1080: linear", 22) == 0 && strstr(line, layer) != NULL, "%s", line);
    }
    if (written != NULL) fclose(written);
    remove(path);
    return lines;
}

/* The built-in logger repeats a warning ten times; decisions share an id and are all different. */
TEST(built_in_logger) { CHECK_EQ(built_in_lines(25), 25); }

int main(int argc, char **argv) {
    heard = (told *)malloc(sizeof *heard);
    if (heard == NULL) return 2;
    TEST_BEGIN(argc, argv);
    RUN(each_decision_once);
    RUN(another_decision_is_told);
    RUN(levels_and_own_operators);
    RUN(only_when_asked);
    RUN(bounded);
    RUN(threads);
    RUN(built_in_logger);
    free(heard);
    return TEST_END();
}
