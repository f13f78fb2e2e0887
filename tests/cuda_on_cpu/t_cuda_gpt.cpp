/* t_cuda_gpt.cpp - the GPT-2 of examples/common.h, a small one, trained on the CUDA backend on the model GPU and on the
 * CPU backend from the same weights on the same tokens.
 *
 * Over 20 steps the two backends' losses differ by no more than the CPU's own differ between fp32 and the dtype that is
 * trained in.  In fp32, where there is no such difference, by no more than TF32 makes: that dtype differs from fp32 in
 * the rounding of operands alone. */
#include "test_cuda.h"
#include "../../examples/common.h"

enum { VOCAB = 53, CHANNELS = 64, LAYERS = 2, BATCH = 2, SEQ = 31, ROWS = BATCH * SEQ, STEPS = 20 };

/* Tokens of a step and, one further, their labels; a token follows from the one before but for one in five. */
static std::vector<int32_t> tokens_of(int step) {
    std::vector<int32_t> out;
    for (uint32_t b = 0, token = 0; b < BATCH; b++)
        for (uint32_t i = 0; i <= SEQ; i++) {
            uint32_t word = amp_random_u32(77, (uint64_t)(step * BATCH + (int)b) * (SEQ + 1) + i);
            token = i == 0 || word % 5 == 0 ? word / 8 % VOCAB : (token * 3 + 1) % VOCAB;
            out.push_back((int32_t)token);
        }
    return out;
}

struct way {
    const amp_backend *backend;
    amp_dtype dtype;
    int64_t heads;
    float dropout;
    int32_t recompute;
    int64_t layers = LAYERS;
    amp_dtype stream = AMP_F32;
};

struct gpt_training {
    amp_context *amp = NULL;
    amp_scaler *scaler = NULL;
    amp_optimizer *optimizer = NULL;
    gpt model;
    void *ids = NULL;

    gpt_training() { memset((void *)&model, 0, sizeof model); }
    gpt_training(const gpt_training &) = delete;
    gpt_training &operator=(const gpt_training &) = delete;
    ~gpt_training() {
        amp_optimizer_destroy(optimizer);
        amp_scaler_destroy(scaler);
        if (amp != NULL) gpt_destroy(&model), amp_free(amp, ids);
        amp_close(amp);
    }
    amp_result open(const way &w) {
        amp_desc d = {};
        amp_dtype storage = w.dtype == AMP_TF32 ? AMP_F32 : w.dtype;
        gpt_config config = {};
        config.vocab = VOCAB;
        config.positions = config.seq = SEQ;
        config.channels = CHANNELS;
        config.heads = w.heads;
        config.layers = w.layers;
        config.batch = BATCH;
        config.activations = storage;
        config.stored[GPT_STREAM] = w.stream;
        config.dropout = w.dropout;
        config.recompute = w.recompute;
        amp_optimizer_desc o = {};
        amp_scaler_desc s = {};
        d.backend = w.backend;
        d.dtype = w.dtype;
        d.allow_fallback = 1;
        d.threads = 1;
        d.seed = 5;
        TRY(amp_open(&amp, &d));
        TRY(gpt_create(&model, amp, &config));
        TRY(gpt_init(&model, 11));
        TRY(amp_alloc(amp, &ids, 2 * ROWS * 4));
        if (w.dtype == AMP_F16) TRY(amp_scaler_create(amp, &scaler, &s));
        o.params = model.params;
        o.n_params = model.n_params;
        o.lr = 5e-3f;
        o.weight_decay = 0.1f;
        o.clip_norm = 1;
        return amp_optimizer_create(amp, &optimizer, &o);
    }
    amp_result tokens(int step) {
        std::vector<int32_t> all = tokens_of(step), split;
        for (int shift = 0; shift < 2; shift++)
            for (int i = 0; i < ROWS; i++) split.push_back(all[(size_t)(i / SEQ * (SEQ + 1) + i % SEQ + shift)]);
        TRY(amp_copy(amp, ids, split.data(), 2 * ROWS * 4, AMP_COPY_TO_DEVICE));
        return amp_sync(amp);
    }
    amp_result forward() {
        const int32_t *inputs = (const int32_t *)ids;
        TRY(gpt_forward(&model, inputs, BATCH, SEQ));
        return gpt_loss(&model, inputs + ROWS, 1, scaler ? amp_scaler_scale_ptr(scaler) : NULL);
    }
    amp_result forward_backward() {
        amp_autocast_desc region = {};
        TRY(amp_autocast_begin(amp, &region));
        amp_result result = forward(), ended = amp_autocast_end(amp);
        TRY(result);
        TRY(ended);
        return gpt_backward(&model);
    }
    amp_result step(int number, float *loss) {
        TRY(tokens(number));
        TRY(forward_backward());
        TRY(gpt_loss_read(&model, loss));
        return amp_step(optimizer, scaler);
    }
};

/* The losses of `steps` steps, and behind them every weight. */
static std::vector<float> train(const way &w, int steps) {
    gpt_training t;
    std::vector<float> out((size_t)steps);
    amp_result result = t.open(w);
    for (int i = 0; i < steps && result == AMP_OK; i++) result = t.step(i, &out[(size_t)i]);
    for (int64_t i = 0; i < t.model.n_params && result == AMP_OK; i++) {
        size_t at = out.size();
        out.resize(at + (size_t)amp_tensor_count(&t.model.params[i].weight));
        result = gpt_get(&t.model, i, &out[at]);
    }
    CHECK_MSG(result == AMP_OK, "%s", example_error());
    return out;
}

/* The largest distance of two runs' losses. */
static double distance(const std::vector<float> &a, const std::vector<float> &b) {
    double most = 0;
    for (size_t i = 0; i < STEPS; i++) most = fmax(most, a[i] == a[i] && b[i] == b[i] ? fabs(a[i] - b[i]) : HUGE_VAL);
    return most;
}

/* One head has 64 dimensions, which the tensor cores take in 16 bits; of four heads the other kernels take care. */
CUDA_TEST(losses_of_the_cpu) {
    const struct { amp_dtype dtype, other; int64_t heads; } cases[] = {
        {AMP_F32, AMP_TF32, 4}, {AMP_BF16, AMP_F32, 1}, {AMP_F16, AMP_F32, 4},
    };
    for (auto &c : cases) {
        const char *name = amp_dtype_name(c.dtype);
        std::vector<float> cpu = train({amp_cpu(), c.dtype, c.heads, 0, 0}, STEPS), gpu = train({amp_cuda(), c.dtype, c.heads, 0, 0}, STEPS);
        double own = distance(cpu, train({amp_cpu(), c.other, c.heads, 0, 0}, STEPS)), apart = distance(cpu, gpu);
        CHECK_MSG(apart <= own, "%s: the backends' losses differ by %.3g, the CPU's own by %.3g", name, apart, own);
        CHECK_MSG(gpu[STEPS - 1] < gpu[0] - 0.5f, "%s: from %g to %g", name, gpu[0], gpu[STEPS - 1]);
    }
}

static std::string bytes_of(const std::vector<float> &x) { return std::string((const char *)x.data(), x.size() * sizeof(float)); }

/* The same bits under every order, and with activations that are computed a second time. */
CUDA_TEST(same_bits) {
    std::string last, different = coc_every_order([&](std::string *results) {
        *results = last = bytes_of(train({amp_cuda(), AMP_BF16, 1, 0.1f, 0}, 2));
    });
    CHECK_MSG(different.empty(), "%s", different.c_str());
    CHECK(bytes_of(train({amp_cuda(), AMP_BF16, 1, 0.1f, 1}, 2)) == last);
}

/* What the host does in a steady step: nothing is allocated, described to cuBLASLt or asked of its heuristic, and nothing
   waits; amp_step is as many calls for 76 tensors as for 28. */
CUDA_TEST(steady_step) {
    if (!CUDA_IS_MODEL) SKIP("counts calls, which only the model can");
    long step_calls[2], launches[2];
    for (int deep = 0; deep < 2; deep++) {
        gpt_training t;
        float loss;
        CHECK_OK(t.open({amp_cuda(), AMP_F16, 1, 0.1f, 0, deep ? 6 : 2}));
        CHECK_EQ(t.model.n_params, deep ? 76 : 28);
        for (int i = 0; i < 3; i++) CHECK_OK(t.step(i, &loss));
        coc_reset_counts();
        CHECK_OK(t.forward_backward());
        CHECK(coc_count().blas_matmuls > 0);
        coc_counts before = coc_count();
        CHECK_OK(amp_step(t.optimizer, t.scaler));
        coc_counts after = coc_count();
        CHECK_MSG(after.synchronising == 0, "%s", coc_synchronising_calls().c_str());
        CHECK_EQ(after.allocations, 0);
        CHECK_EQ(after.frees, 0);
        CHECK_EQ(after.blas_objects, 0);
        CHECK_EQ(after.blas_heuristics, 0);
        step_calls[deep] = after.calls - before.calls;
        launches[deep] = after.launches - before.launches;
    }
    CHECK_MSG(step_calls[0] == step_calls[1] && launches[0] == launches[1], "amp_step: %ld calls and %ld launches, then %ld and %ld",
              step_calls[0], launches[0], step_calls[1], launches[1]);
}

/* A steady step casts nothing: the optimizer writes the weights' copies, whoever writes the gradient of a branch writes it for
   the products that follow, and a 16-bit stream is there already. */
CUDA_TEST(steady_step_casts_nothing) {
    if (!CUDA_IS_MODEL) SKIP("counts launches, which only the model can");
    const way ways[] = {{amp_cuda(), AMP_BF16, 1, 0, 0}, {amp_cuda(), AMP_F16, 4, 0.1f, 0}, {amp_cuda(), AMP_BF16, 1, 0, 1},
                        {amp_cuda(), AMP_BF16, 1, 0, 0, LAYERS, AMP_BF16}, {amp_cuda(), AMP_F16, 1, 0.1f, 1, LAYERS, AMP_F16}};
    for (const way &w : ways) {
        gpt_training t;
        float loss;
        CHECK_OK(t.open(w));
        for (int i = 0; i < 2; i++) CHECK_OK(t.step(i, &loss));
        CHECK_OK(amp_sync(t.amp));
        coc_reset_counts();
        for (int i = 2; i < 5; i++) CHECK_OK(t.step(i, &loss));
        CHECK_OK(amp_sync(t.amp));
        CHECK_EQ(coc_kernel_launches("ampc_cast"), 0);
    }
}

/* A 16-bit residual stream trains as an fp32 one does: over 20 steps the losses differ by less than those of fp32 and bf16. */
CUDA_TEST(stream_in_16_bits) {
    std::vector<float> wide = train({amp_cuda(), AMP_BF16, 1, 0, 0}, STEPS), low = train({amp_cuda(), AMP_BF16, 1, 0, 0, LAYERS, AMP_BF16}, STEPS);
    std::vector<float> cpu = train({amp_cpu(), AMP_BF16, 1, 0, 0, LAYERS, AMP_BF16}, STEPS);
    double own = distance(wide, train({amp_cpu(), AMP_F32, 1, 0, 0}, STEPS));
    CHECK_MSG(distance(low, wide) > 0 && distance(low, wide) <= 2 * own, "%.3g from an fp32 stream, bf16 %.3g from fp32", distance(low, wide), own);
    CHECK_MSG(distance(low, cpu) <= 2 * own, "%.3g from the CPU's", distance(low, cpu));
    CHECK(low[STEPS - 1] < low[0] - 0.5f);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(losses_of_the_cpu);
    RUN(same_bits);
    RUN(steady_step);
    RUN(steady_step_casts_nothing);
    RUN(stream_in_16_bits);
    return TEST_END();
}
