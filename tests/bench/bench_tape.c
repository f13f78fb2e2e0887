/* bench_tape.c - measures the CPU time that the tape adds per node, for tapes of many lengths.
 *
 *     cc -O2 tests/bench/bench_tape.c -o bench_tape -lm -lpthread
 *     ./bench_tape [--rounds 60]
 *
 * Steps of a tape are compared with the same calls written by hand.  The tape is a chain of linear layers, norms,
 * activations and multiples of one row, so that the arithmetic takes little of the time.  By hand, the op structs are in an
 * array, are filled before each call and read again in backward, as those of a tape are.  Each buffer is allocated by
 * amp_alloc, and two gradient buffers take turns.  All lengths and both ways take turns.  Times are the CPU time of the
 * thread (CLOCK_THREAD_CPUTIME_ID), so that other programs do not count.  They are medians, in nanoseconds per node. */
#define AMP_IMPLEMENTATION
#include "bench.h"

enum { COLS = 8, LENGTHS = 4, LONGEST = 10000 };
typedef union op_of { amp_linear_op linear; amp_norm_op norm; amp_activation_op activation; } op_of;

static amp_context *amp;
static amp_param weight, bias;
static float input[COLS], *values[LONGEST], *gradients[2], (*kept)[2];
static op_of *ops;

static double thread_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}
static amp_tensor row_of(float *data) { return amp_tensor2(data, AMP_F32, 1, COLS); }

/* Times of recording and of the rest; the sum over a step by hand in out[0]. */
static void by_tape(amp_tape *tape, int64_t n, double out[2]) {
    amp_tensor x = row_of(input);
    amp_value v, first;
    double began = thread_now(), recorded;
    int64_t i;
    bench_need(amp_tape_begin(tape, NULL), "amp_tape_begin");
    v = first = amp_tape_variable(tape, &x);
    for (i = 1; i + 1 < n; i++)
        switch (i % 4) {
            case 0: v = amp_tape_linear(tape, v, &weight, &bias, AMP_ACT_NONE); break;
            case 1: v = amp_tape_layernorm(tape, v, &bias, NULL, 0); break;
            case 2: v = amp_tape_activation(tape, v, NULL, AMP_ACT_GELU); break;
            default: v = amp_tape_scale(tape, v, 0.5f);
        }
    v = amp_tape_mse(tape, v, first, AMP_REDUCTION_MEAN);
    recorded = thread_now();
    bench_need(amp_tape_backward(tape, v, NULL), "amp_tape_backward");
    out[0] = recorded - began;
    out[1] = thread_now() - recorded;
}

/* y = x / 2, as the tape does it. */
static amp_result half(const float *x, float *y) {
    amp_k_add k;
    memset(&k, 0, sizeof k);
    k.n = COLS;
    k.a = x; k.y = y;
    k.a_dtype = k.b_dtype = k.y_dtype = AMP_F32;
    k.alpha = 0.5f; k.beta = 1;
    return amp->backend->add(amp->dev, &k, amp->desc.stream);
}

static double by_hand(int64_t n) {
    double began = thread_now();
    amp_mse_op loss;
    float lost;
    int64_t i;
    bench_need(amp_autocast_begin(amp, NULL), "amp_autocast_begin");
    memcpy(values[0], input, sizeof input);
    for (i = 1; i + 1 < n; i++) {
        op_of *op = &ops[i];
        if (i % 4 != 3) memset(op, 0, sizeof *op);
        switch (i % 4) {
            case 0:
                op->linear.weight = &weight; op->linear.bias = &bias;
                op->linear.x = row_of(values[i - 1]); op->linear.y = row_of(values[i]);
                bench_need(amp_linear(amp, &op->linear), "amp_linear");
                break;
            case 1:
                op->norm.weight = &bias; op->norm.mean = &kept[i][0]; op->norm.rstd = &kept[i][1];
                op->norm.x = row_of(values[i - 1]); op->norm.y = row_of(values[i]);
                bench_need(amp_layernorm(amp, &op->norm), "amp_layernorm");
                break;
            case 2:
                op->activation.act = AMP_ACT_GELU;
                op->activation.x = row_of(values[i - 1]); op->activation.y = row_of(values[i]);
                bench_need(amp_activation(amp, &op->activation), "amp_activation");
                break;
            default: bench_need(half(values[i - 1], values[i]), "add");
        }
    }
    memset(&loss, 0, sizeof loss);
    loss.x = row_of(values[n - 2]); loss.target = row_of(input);
    loss.dx = row_of(gradients[n & 1]); loss.loss = &lost;
    bench_need(amp_mse(amp, &loss), "amp_mse");
    bench_need(amp_autocast_end(amp), "amp_autocast_end");
    for (i = n - 2; i > 0; i--) {
        op_of *op = &ops[i];
        switch (i % 4) {
            case 0:
                op->linear.dy = row_of(gradients[i & 1]); op->linear.dx = row_of(gradients[(i - 1) & 1]);
                bench_need(amp_linear_backward(amp, &op->linear), "amp_linear_backward");
                break;
            case 1:
                op->norm.dy = row_of(gradients[i & 1]); op->norm.dx = row_of(gradients[(i - 1) & 1]);
                bench_need(amp_layernorm_backward(amp, &op->norm), "amp_layernorm_backward");
                break;
            case 2:
                op->activation.dy = row_of(gradients[i & 1]); op->activation.dx = row_of(gradients[(i - 1) & 1]);
                bench_need(amp_activation_backward(amp, &op->activation), "amp_activation_backward");
                break;
            default: bench_need(half(gradients[i & 1], gradients[(i - 1) & 1]), "add");
        }
    }
    return thread_now() - began;
}

int main(int argc, char **argv) {
    static const int64_t lengths[LENGTHS] = {100, 1000, 3200, LONGEST};
    static float w[COLS * COLS], dw[COLS * COLS], b[COLS], db[COLS];
    amp_desc desc;
    amp_tape *tapes[LENGTHS];
    double *times[LENGTHS][3], step[2];
    int64_t rounds = 60, i, r;
    const bench_flag flags[] = {{"rounds", &rounds, NULL, "steps of each"}};
    int k;
    bench_flags(argc, argv, flags, 1);
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_F32; desc.threads = 1;
    bench_need(amp_open(&amp, &desc), "amp_open");
    for (i = 0; i < COLS * COLS; i++) w[i] = amp_random_uniform(1, (uint64_t)i) - 0.5f;
    for (i = 0; i < COLS; i++) { b[i] = 0.5f; input[i] = amp_random_uniform(2, (uint64_t)i) - 0.5f; }
    weight.name = "weight"; weight.weight = amp_tensor2(w, AMP_F32, COLS, COLS); weight.grad = amp_tensor2(dw, AMP_F32, COLS, COLS);
    bias.name = "bias"; bias.weight = amp_tensor1(b, AMP_F32, COLS); bias.grad = amp_tensor1(db, AMP_F32, COLS);
    bench_need(amp_param_register(amp, &weight, 1), "amp_param_register");
    bench_need(amp_param_register(amp, &bias, 1), "amp_param_register");
    ops = (op_of *)bench_memory(LONGEST * sizeof *ops);
    for (i = 0; i < LONGEST; i++) bench_need(amp_alloc(amp, (void **)&values[i], sizeof input), "amp_alloc");
    for (i = 0; i < 2; i++) bench_need(amp_alloc(amp, (void **)&gradients[i], sizeof input), "amp_alloc");
    kept = (float (*)[2])bench_memory(LONGEST * sizeof *kept);
    for (k = 0; k < LENGTHS; k++) {
        bench_need(amp_tape_create(amp, &tapes[k], NULL), "amp_tape_create");
        for (i = 0; i < 3; i++) times[k][i] = (double *)bench_memory((size_t)rounds * sizeof(double));
    }
    for (r = -3; r < rounds; r++)
        for (k = 0; k < LENGTHS; k++) {
            double hand = by_hand(lengths[k]), n = (double)lengths[k];
            by_tape(tapes[k], lengths[k], step);
            weight.grad_live = bias.grad_live = 0;
            if (r < 0) continue;
            times[k][0][r] = hand / n;
            times[k][1][r] = step[0] / n;
            times[k][2][r] = (step[0] + step[1] - hand) / n;
        }
    for (k = 0; k < LENGTHS; k++)
        printf("{\"event\": \"tape\", \"nodes\": %lld, \"by_hand_ns\": %.1f, \"record_ns\": %.1f, \"overhead_ns\": %.1f}\n",
               (long long)lengths[k], bench_quantile(times[k][0], rounds, 0.5), bench_quantile(times[k][1], rounds, 0.5),
               bench_quantile(times[k][2], rounds, 0.5));
    for (k = 0; k < LENGTHS; k++) amp_tape_destroy(tapes[k]);
    for (i = 0; i < LONGEST; i++) amp_free(amp, values[i]);
    for (i = 0; i < 2; i++) amp_free(amp, gradients[i]);
    amp_close(amp);
    return 0;
}
