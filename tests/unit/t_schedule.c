/* t_schedule.c - tests the learning-rate schedules.  They are compared with those of transformers and PyTorch, and with
 * values computed by hand at their corners.  Invalid schedules must return an error. */
#include "../amp.h"
#include "test.h"
#include "golden.h"
#include <float.h>

enum { WARMUP = 7, STEPS = 50, DECAY = 15 };
static const double LR = 3e-4, MIN = 2e-5;

static double rate(const amp_schedule *s, int64_t step) {
    double lr = -1;
    CHECK_OK(amp_schedule_lr(s, step, &lr));
    return lr;
}

/* A rate of a closed form takes at most 8 roundings of numbers up to LR; PyTorch's chains take as many at each step.
 * `steps`: how many agree, where after the end a peer's cosine rises again. */
static void compare(const char *name, amp_schedule s, int steps, int chain) {
    ampt_golden g = ampt_golden_open("schedules.bin");
    int64_t n;
    double *want = (double *)ampt_golden_read(&g, name, 2, &n), worst = 0;
    s.lr = LR;
    CHECK(n == 60);
    for (int step = 0; step < steps; step++) {
        double off = fabs(rate(&s, step) - want[step]) / (8 * DBL_EPSILON / 2 * LR * (chain ? step + 1 : 1));
        CHECK_MSG(off <= 1, "%s, step %d: %.17g, PyTorch has %.17g", name, step, rate(&s, step), want[step]);
        if (off > worst) worst = off;
    }
    for (int step = steps; step < n; step++) CHECK(rate(&s, step) == s.min_lr);
    printf("  %-18s %.2f of the bound\n", name, worst);
    free(want);
    free(g.data);
}

TEST(transformers) {
    static const struct { const char *name; amp_schedule_kind kind; } shapes[] = {
        {"linear", AMP_SCHEDULE_LINEAR}, {"cosine", AMP_SCHEDULE_COSINE}, {"1-sqrt", AMP_SCHEDULE_SQRT}};
    amp_schedule s = {.from_zero = 1, .warmup = WARMUP};
    s.kind = AMP_SCHEDULE_CONSTANT;
    compare("constant", s, 60, 0);
    s.kind = AMP_SCHEDULE_INVERSE_SQRT;
    compare("inverse_sqrt", s, 60, 0);
    s.timescale = 20;
    compare("inverse_sqrt_time", s, 60, 0);
    s.timescale = s.warmup = 0;
    compare("inverse_sqrt_cold", s, 60, 0);
    s.warmup = WARMUP;
    s.steps = STEPS;
    s.kind = AMP_SCHEDULE_LINEAR;
    compare("linear", s, 60, 0);
    s.kind = AMP_SCHEDULE_COSINE;
    compare("cosine", s, STEPS + 1, 0);
    s.min_lr = MIN;
    compare("cosine_min", s, STEPS + 1, 0);
    s.kind = AMP_SCHEDULE_LINEAR;
    compare("linear_min", s, 60, 0);
    s.kind = AMP_SCHEDULE_WSD;
    s.decay = DECAY;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        char name[40];
        s.decay_kind = shapes[i].kind;
        s.min_lr = 0;
        s.warmup = WARMUP;
        snprintf(name, sizeof name, "wsd_%s", shapes[i].name);
        compare(name, s, 60, 0);
        s.min_lr = MIN;                 /* which the warmup begins at */
        snprintf(name, sizeof name, "wsd_%s_min", shapes[i].name);
        compare(name, s, 60, 0);
        s.warmup = 0;
        snprintf(name, sizeof name, "wsd_%s_min_cold", shapes[i].name);
        compare(name, s, 60, 0);
    }
}

TEST(pytorch) {
    amp_schedule s = {.warmup = WARMUP, .steps = STEPS, .min_lr = MIN};
    compare("torch_cosine", s, STEPS + 1, 1);
    s.kind = AMP_SCHEDULE_LINEAR;
    compare("torch_linear", s, 60, 1);
}

/* Defaults, ends and the largest numbers. */
TEST(corners) {
    amp_schedule cosine = {.lr = 1, .min_lr = 0.125, .warmup = 10, .steps = 100}, wsd = {.kind = AMP_SCHEDULE_WSD, .lr = 1, .steps = 100};
    amp_schedule constant = {.kind = AMP_SCHEDULE_CONSTANT, .lr = 1, .steps = 3}, root = {.kind = AMP_SCHEDULE_INVERSE_SQRT, .lr = 1};
    CHECK(rate(&cosine, 0) == 0.1 && rate(&cosine, 9) == 1 && rate(&cosine, 10) == 1);
    CHECK(fabs(rate(&cosine, 55) - 0.5625) < 1e-15);
    root.lr = AMP_EXPLICIT_ZERO;
    CHECK(rate(&root, 0) == 0 && rate(&root, 100) == 0);
    root.lr = 1;
    CHECK(rate(&cosine, 100) == 0.125 && rate(&cosine, INT64_MAX) == 0.125);
    cosine.from_zero = 1;
    CHECK(rate(&cosine, 0) == 0 && rate(&cosine, 5) == 0.5 && rate(&cosine, 10) == 1);
    cosine.steps = cosine.warmup = 4;
    CHECK(rate(&cosine, 3) == 0.75 && rate(&cosine, 4) == 0.125);
    CHECK(rate(&wsd, 0) == 1 && rate(&wsd, 80) == 1 && rate(&wsd, 81) < 1 && rate(&wsd, 100) == 0);
    CHECK(fabs(rate(&wsd, 90) - 0.5) < 1e-15);          /* half a cosine over the last fifth */
    wsd.warmup = 4; wsd.min_lr = 0.5; wsd.from_zero = 1;
    CHECK(rate(&wsd, 0) == 0.5 && rate(&wsd, 2) == 0.75 && rate(&wsd, 4) == 1);
    wsd.from_zero = 0;
    CHECK(rate(&wsd, 0) == 0.25 && rate(&wsd, 3) == 1);
    wsd.warmup = 0; wsd.min_lr = 0;
    wsd.steps = 1;
    CHECK(rate(&wsd, 0) == 1 && rate(&wsd, 1) == 0);
    CHECK(rate(&constant, 0) == 1 && rate(&constant, INT64_MAX) == 1);
    root.min_lr = 0.25;
    CHECK(rate(&root, 30000) == 0.5 && rate(&root, 150001) == 0.25 && rate(&root, INT64_MAX) == 0.25);
    root.warmup = INT64_MAX;
    CHECK(rate(&root, INT64_MAX - 1) == 1);
}

static int refuses(amp_schedule s, int64_t step, amp_result result, const char *text) {
    double lr = 42;
    CHECK_ERR(amp_schedule_lr(&s, step, &lr), result);
    CHECK_MSG(strstr(amp_last_error(), text) != NULL, "\"%s\" lacks \"%s\"", amp_last_error(), text);
    return lr == 42;
}

TEST(refusals) {
    double lr;
    amp_schedule s = {.lr = 1, .warmup = 10, .steps = 100}, bad = s;
    CHECK_ERR(amp_schedule_lr(NULL, 0, &lr), AMP_ERR_NULL);
    CHECK_ERR(amp_schedule_lr(&s, 0, NULL), AMP_ERR_NULL);
    CHECK(refuses(s, -1, AMP_ERR_RANGE, "step = -1"));
    bad.lr = 0;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".lr = 0"));
    bad.lr = -1;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".lr = -1"));
    memset(&bad.lr, 0xff, sizeof bad.lr);
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".lr = "));
    bad = s; bad.min_lr = 2;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".min_lr = 2"));
    bad.min_lr = -1;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".min_lr = -1"));
    bad = s; bad.warmup = 101;
    CHECK(refuses(bad, 0, AMP_ERR_CONFLICT, ".warmup = 101"));
    bad.warmup = -1;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".warmup = -1"));
    bad = s; bad.steps = 0; bad.warmup = 0;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".steps = 0, must be 1 or more with COSINE"));
    bad = s; bad.kind = (amp_schedule_kind)7;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".kind = 7"));
    bad = s; bad.from_zero = 2;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".from_zero = 2"));
    bad = s; bad.decay = 5;
    CHECK(refuses(bad, 0, AMP_ERR_CONFLICT, ".decay is given, and COSINE does not read it"));
    bad.decay = -5;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".decay = -5"));
    bad = s; bad.decay_kind = AMP_SCHEDULE_LINEAR;
    CHECK(refuses(bad, 0, AMP_ERR_CONFLICT, ".decay_kind is given"));
    bad = s; bad.timescale = 5;
    CHECK(refuses(bad, 0, AMP_ERR_CONFLICT, ".timescale is given"));
    bad = s; bad.kind = AMP_SCHEDULE_CONSTANT; bad.min_lr = 0.5;
    CHECK(refuses(bad, 0, AMP_ERR_CONFLICT, ".min_lr is given, and CONSTANT"));
    bad = s; bad.kind = AMP_SCHEDULE_WSD; bad.decay = 91;
    CHECK(refuses(bad, 0, AMP_ERR_CONFLICT, ".warmup = 10 and .decay = 91"));
    bad.decay = INT64_MAX;
    CHECK(refuses(bad, 0, AMP_ERR_CONFLICT, ".decay = 9223372036854775807"));
    bad.decay = 5; bad.decay_kind = AMP_SCHEDULE_INVERSE_SQRT;
    CHECK(refuses(bad, 0, AMP_ERR_RANGE, ".decay_kind = 5, must be AMP_SCHEDULE_LINEAR, AMP_SCHEDULE_COSINE or AMP_SCHEDULE_SQRT"));
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(transformers); RUN(pytorch); RUN(corners); RUN(refusals);
    return TEST_END();
}
