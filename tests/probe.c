/* probe.c - tests the operator that probe.txt adds to amp.h: autocast, the log, overrides and recomputing must work with
 * it.  The rows that probe.txt adds to the tables are enough for this. */
#define AMP_IMPLEMENTATION
#include "amp.h"
#include "test.h"

static char said[2048];
static void hear(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level;
    if (id == AMP_LOG_DECISION) snprintf(said + strlen(said), sizeof said - strlen(said), "%s\n", text);
}

static const float in[4] = {1.00390625f, -3, 0.5f, 1.0009765625f};     /* the first is no number of bf16, the last of neither */
static float x[4], y[4], dy[4], dx[4];
static amp_probe_op op;

/* What the probe makes of `in` when it computes in this dtype. */
static int is_in(const float *out, amp_dtype dtype) {
    for (int i = 0; i < 4; i++) {
        float rounded = dtype == AMP_BF16 ? amp_f32_from_bf16(amp_bf16_from_f32(in[i], 0)) : in[i];
        if (out[i] != 2 * rounded) return 0;
    }
    return 1;
}
/* One forward; its result was computed in this dtype. */
static int forward_in(amp_context *amp, amp_dtype dtype) {
    memset(y, 0, sizeof y);
    CHECK_OK(amp_probe(amp, &op));
    CHECK_EQ(op.plan.compute, dtype);
    return is_in(y, dtype);
}

TEST(probe) {
    amp_context *amp;
    amp_desc desc = {.dtype = AMP_BF16, .threads = 1, .logger = {.write = hear, .level = AMP_LOG_DEBUG}};
    amp_plan forward;
    CHECK_OK(amp_open(&amp, &desc));
    memcpy(x, in, sizeof x);
    memcpy(dy, in, sizeof dy);
    op.layer = "block.0";
    op.x = amp_tensor2(x, AMP_F32, 2, 2); op.y = amp_tensor2(y, AMP_F32, 2, 2);
    op.dy = amp_tensor2(dy, AMP_F32, 2, 2); op.dx = amp_tensor2(dx, AMP_F32, 2, 2);
    CHECK_ERR(amp_probe_backward(amp, &op), AMP_ERR_STATE);
    CHECK(forward_in(amp, AMP_F32));                /* no region */
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK(forward_in(amp, AMP_BF16));
    CHECK_MSG(strstr(said, "probe") && strstr(said, "block.0") && strstr(said, "bf16"), "the log says %s", said);
    forward = op.plan;
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_probe_backward(amp, &op));         /* as the forward computed, outside its region */
    CHECK(is_in(dx, AMP_BF16));
    CHECK_OK(amp_recompute_begin(amp));             /* the recorded plan, whatever the region */
    CHECK(forward_in(amp, AMP_BF16));
    CHECK(memcmp(&op.plan, &forward, sizeof forward) == 0);
    CHECK_OK(amp_recompute_end(amp));

    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_operator_override(amp, AMP_OP_PROBE, AMP_CAST_FP32));
    CHECK(forward_in(amp, AMP_F32));
    CHECK_EQ(op.plan.rule, AMP_BY_OPERATOR);
    CHECK_OK(amp_operator_override(amp, AMP_OP_PROBE, AMP_CAST_DEFAULT));
    CHECK(forward_in(amp, AMP_BF16));
    CHECK_OK(amp_layer_override(amp, "block.*", AMP_F32));
    CHECK(forward_in(amp, AMP_F32));
    CHECK_EQ(op.plan.rule, AMP_BY_LAYER);
    op.y.shape[1] = 1;
    CHECK_ERR(amp_probe(amp, &op), AMP_ERR_SHAPE);
    op.y = amp_tensor2(x + 1, AMP_F32, 2, 1); op.x.shape[1] = 1;
    CHECK_ERR(amp_probe(amp, &op), AMP_ERR_CONFLICT);  /* y over x */
    CHECK_OK(amp_autocast_end(amp));
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(probe);
    return TEST_END();
}
