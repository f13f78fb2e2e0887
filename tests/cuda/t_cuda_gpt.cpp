/* t_cuda_gpt.cpp - trains a small GPT-2 of examples/gpt.h on the CUDA backend on the model GPU and on the CPU backend.
 * Both begin with the same weights and read the same tokens.
 *
 * Over 20 steps, the losses of the two backends differ by no more than the CPU's own losses differ between fp32 and the
 * dtype of the training.  For fp32, where there is no such difference, the bound is the difference that TF32 makes.  That
 * dtype differs from fp32 only in the rounding of operands. */
#include "test_cuda.h"
#include "../../examples/encoder_files.h"
#include "../../examples/gpt_files.h"
#include "../handwritten_gpt.h"

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
        EX_TRY(amp_open(&amp, &d));
        EX_TRY(gpt_create(&model, amp, &config));
        EX_TRY(gpt_init(&model, 11));
        EX_TRY(amp_alloc(amp, &ids, 2 * ROWS * 4));
        if (w.dtype == AMP_F16) EX_TRY(amp_scaler_create(amp, &scaler, &s));
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
        EX_TRY(amp_copy(amp, ids, split.data(), 2 * ROWS * 4, AMP_COPY_TO_DEVICE));
        return amp_sync(amp);
    }
    amp_batch batch() const {
        amp_batch b = {};
        b.inputs = (const int32_t *)ids;
        b.targets = b.inputs + ROWS;
        b.batch = BATCH;
        b.seq = SEQ;
        return b;
    }
    amp_result forward_backward() {
        amp_batch b = batch();
        EX_TRY(gpt_forward_loss(&model, &b, amp_scaler_scale_ptr(scaler), 1));
        return gpt_backward(&model);
    }
    amp_result step(int number, float *loss) {
        EX_TRY(tokens(number));
        EX_TRY(forward_backward());
        EX_TRY(gpt_loss_read(&model, loss));
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
    CHECK_MSG(result == AMP_OK, "%s", ex_error());
    return out;
}

/* The largest distance of two runs' losses. */
static double distance(const std::vector<float> &a, const std::vector<float> &b) {
    double most = 0;
    for (size_t i = 0; i < STEPS; i++) most = fmax(most, a[i] == a[i] && b[i] == b[i] ? fabs(a[i] - b[i]) : HUGE_VAL);
    return most;
}

/* Whether the GPU has this dtype.  One of compute capability 7.0 is tested without bf16. */
static bool gpu_has(amp_dtype dtype) {
    int major = 0;
    CHECK_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    return major >= 8 || dtype != AMP_BF16;
}

/* One head has 64 dimensions, which the tensor cores take in 16 bits; of four heads the other kernels take care. */
CUDA_TEST(losses_of_the_cpu) {
    const struct { amp_dtype dtype, other; int64_t heads; } cases[] = {
        {AMP_F32, AMP_TF32, 4}, {AMP_BF16, AMP_F32, 1}, {AMP_F16, AMP_F32, 4},
    };
    for (auto &c : cases) {
        const char *name = amp_dtype_name(c.dtype);
        if (!gpu_has(c.dtype)) continue;
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
        if (!gpu_has(w.dtype)) continue;
        CHECK_OK(t.open(w));
        for (int i = 0; i < 2; i++) CHECK_OK(t.step(i, &loss));
        CHECK_OK(amp_sync(t.amp));
        coc_reset_counts();
        for (int i = 2; i < 5; i++) CHECK_OK(t.step(i, &loss));
        CHECK_OK(amp_sync(t.amp));
        CHECK_EQ(coc_kernel_launches("ampc_cast"), 0);
    }
}

/* Calls to CUDA of a steady step, of them launches and products, and the bits of its gradients. */
struct pass_counts { long calls, launches, matmuls; std::string gradients; };

static pass_counts count_pass(gpt_training *t, hand_gpt *hand) {
    amp_batch b = t->batch();
    const float *scale = amp_scaler_scale_ptr(t->scaler);
    pass_counts out = {};
    for (int i = 0; i < 3; i++) {
        for (int64_t k = 0; k < t->model.n_params; k++) t->model.params[k].grad_live = 0;
        CHECK_OK(amp_sync(t->amp));
        coc_reset_counts();
        if (hand != NULL) {
            CHECK_OK(hand_forward_loss(hand, &b, scale, 1));
            CHECK_OK(hand_backward(hand));
        } else {
            CHECK_OK(gpt_forward_loss(&t->model, &b, scale, 1));
            CHECK_OK(gpt_backward(&t->model));
        }
        coc_counts counts = coc_count();
        out.calls = counts.calls; out.launches = counts.launches; out.matmuls = counts.blas_matmuls;
    }
    CHECK_EQ(coc_count().allocations, 0);
    CHECK_EQ(coc_count().synchronising, 0);
    for (int64_t k = 0; k < t->model.n_params; k++) {
        const amp_tensor *g = &t->model.params[k].grad;
        size_t bytes = (size_t)amp_tensor_count(g) * 4;
        std::string one(bytes, 0);
        CHECK_OK(amp_copy(t->amp, &one[0], g->data, (int64_t)bytes, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(t->amp));
        out.gradients += one;
    }
    return out;
}

/* The tape's step has the bits of the hand-written one, no more launches and products, and no more memory. */
CUDA_TEST(tape_is_as_lean_as_by_hand) {
    if (!CUDA_IS_MODEL) SKIP("counts launches, which only the model can");
    const way ways[] = {{amp_cuda(), AMP_F32, 4, 0, 0}, {amp_cuda(), AMP_BF16, 1, 0, 0}, {amp_cuda(), AMP_F16, 1, 0, 0},
                        {amp_cuda(), AMP_BF16, 1, 0, 1, 3}, {amp_cuda(), AMP_F16, 4, 0, 1, 3}};
    for (const way &w : ways) {
        gpt_training t;
        hand_gpt hand;
        CHECK_OK(t.open(w));
        CHECK_OK(t.tokens(0));
        CHECK_OK(hand_create(&hand, &t.model));
        pass_counts by_hand = count_pass(&t, &hand), tape = count_pass(&t, NULL);
        CHECK_MSG(tape.gradients == by_hand.gradients, "%s, recompute %d: other gradients", amp_dtype_name(w.dtype), w.recompute);
        CHECK_MSG(tape.launches <= by_hand.launches && tape.matmuls <= by_hand.matmuls && tape.calls <= by_hand.calls,
                  "%s, recompute %d: %ld calls, %ld launches, %ld products; by hand %ld, %ld, %ld", amp_dtype_name(w.dtype), w.recompute,
                  tape.calls, tape.launches, tape.matmuls, by_hand.calls, by_hand.launches, by_hand.matmuls);
        CHECK_MSG(t.model.memory_bytes <= hand.memory_bytes, "%s, recompute %d: %lld bytes, by hand %lld", amp_dtype_name(w.dtype),
                  w.recompute, (long long)t.model.memory_bytes, (long long)hand.memory_bytes);
        hand_destroy(&hand);
    }
}

/* The gradients of a block's four biases take two launches more than a backward without them.  One adds up what attention's
   kernels have summed for q, k and v.  The other is of the MLP's first layer: with gradients in fp32 its sum is left to its
   product for dW, whose library here has no epilogue for it.  The sums of the two branches are among those of the norms.
   GPUs before 8.0 have attention without tensor cores, which leaves q, k and v to a launch each. */
CUDA_TEST(biases_cost_two_launches) {
    if (!CUDA_IS_MODEL) SKIP("counts launches, which only the model can");
    const int layers = 3, with_sums = COC_CAPABILITY >= 80 ? layers : 0;
    for (amp_dtype dtype : {AMP_BF16, AMP_F16, AMP_F32}) {
        gpt_training t;
        float loss;
        CHECK_OK(t.open({amp_cuda(), dtype, 1, 0, 0, 3}));
        for (int i = 0; i < 2; i++) CHECK_OK(t.step(i, &loss));
        coc_reset_counts();
        CHECK_OK(t.forward_backward());
        CHECK_OK(amp_sync(t.amp));
        CHECK_EQ(coc_kernel_launches("ampc_column"), layers + 3 * (layers - with_sums));
        CHECK_EQ(coc_kernel_launches("ampc_norm_gradient_rows"), 2 * layers + 1);
        CHECK_EQ(coc_kernel_launches("ampc_add_runs"), 2 * layers + 1 + with_sums);
    }
}

/* A captured step, launched again and again, trains as steps that are called. */
CUDA_TEST(tape_in_a_graph) {
    std::vector<float> called = train({amp_cuda(), AMP_F16, 1, 0.1f, 0}, 5);
    gpt_training t;
    amp_graph *graph = NULL;
    std::vector<float> losses;
    float loss;
    CHECK_OK(t.open({amp_cuda(), AMP_F16, 1, 0.1f, 0}));
    for (int i = 0; i < 5; i++) {
        CHECK_OK(t.tokens(i));
        if (i == 1) {
            CHECK_OK(amp_graph_begin(t.amp));
            CHECK_OK(t.forward_backward());
            CHECK_OK(amp_step(t.optimizer, t.scaler));
            CHECK_OK(amp_graph_end(t.amp, &graph));
        }
        if (i == 0) {
            CHECK_OK(t.forward_backward());
            CHECK_OK(amp_step(t.optimizer, t.scaler));
        } else CHECK_OK(amp_graph_launch(graph));
        CHECK_OK(gpt_loss_read(&t.model, &loss));
        losses.push_back(loss);
    }
    CHECK(memcmp(losses.data(), called.data(), 5 * sizeof(float)) == 0);
    amp_graph_destroy(graph);
}

/* A BERT in the precisions of a trained one: its stream, which is what the norms write, stays fp32. */
struct encoder_training {
    amp_context *amp = NULL;
    amp_optimizer *optimizer = NULL;
    encoder model;
    int32_t *ids = NULL;

    encoder_training() { memset((void *)&model, 0, sizeof model); }
    encoder_training(const encoder_training &) = delete;
    encoder_training &operator=(const encoder_training &) = delete;
    ~encoder_training() {
        amp_optimizer_destroy(optimizer);
        if (amp != NULL) encoder_destroy(&model), amp_free(amp, ids);
        amp_close(amp);
    }
    amp_result open(const amp_backend *backend, amp_dtype dtype, float dropout) {
        amp_desc d = {};
        encoder_config config = {};
        amp_optimizer_desc o = {};
        std::vector<int32_t> tokens;
        for (uint32_t i = 0; i < ROWS + BATCH; i++) tokens.push_back((int32_t)(amp_random_u32(78, i) % 2));
        d.backend = backend;
        d.dtype = dtype;
        d.threads = 1;
        d.seed = 5;
        config.vocab = config.positions = VOCAB;
        config.seq = SEQ;
        config.types = config.heads = config.classes = config.batch = BATCH;
        config.layers = LAYERS;
        config.hidden = CHANNELS;
        config.intermediate = 4 * CHANNELS;
        config.activations = dtype;
        config.dropout = dropout;
        EX_TRY(amp_open(&amp, &d));
        EX_TRY(encoder_create(&model, amp, &config));
        EX_TRY(encoder_init(&model, 11));
        EX_TRY(amp_alloc(amp, (void **)&ids, (ROWS + BATCH) * 4));
        EX_TRY(amp_copy(amp, ids, tokens.data(), (ROWS + BATCH) * 4, AMP_COPY_TO_DEVICE));
        o.params = model.params;
        o.n_params = model.n_params;
        o.lr = 1e-3f;
        return amp_optimizer_create(amp, &optimizer, &o);
    }
    amp_result step(float *loss) {
        const encoder_input in = {ids, NULL, NULL, BATCH, SEQ, 0};
        EX_TRY(encoder_forward(&model, &in, ids + ROWS, NULL, 1));
        EX_TRY(encoder_backward(&model));
        EX_TRY(amp_copy(amp, loss, model.loss_value, 4, AMP_COPY_TO_HOST));
        EX_TRY(amp_step(optimizer, NULL));
        return amp_sync(amp);
    }
};

/* No gradient is cast, and no weight.  What is left are the inputs in fp32, the norms' y: of qkv and fc, in forward and for the
   weight's gradient. */
CUDA_TEST(encoder_step_casts_no_gradient) {
    for (amp_dtype dtype : {AMP_BF16, AMP_F16})
        for (float dropout : {0.0f, 0.1f}) {
            encoder_training t;
            float loss[4];
            if (!gpu_has(dtype)) continue;
            CHECK_OK(t.open(amp_cuda(), dtype, dropout));
            for (int i = 0; i < 3; i++) CHECK_OK(t.step(&loss[i]));
            if (CUDA_IS_MODEL) coc_reset_counts();
            CHECK_OK(t.step(&loss[3]));
            if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_cast"), 4 * LAYERS);
            CHECK_MSG(dropout > 0 || loss[3] < loss[0], "%s: from %g to %g", amp_dtype_name(dtype), loss[0], loss[3]);
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

/* A GAN's round in a graph: amp_optimizer_zero_grad is captured with it, and what the generator's backward leaves of the
 * discriminator's gradients must be dropped before the end.  Launched three times, the bits of four rounds that are called. */
struct two_networks {
    amp_context *amp = cuda_context();
    amp_model *g = NULL, *d = NULL;
    amp_param *wg, *wd;
    amp_optimizer *og = NULL, *od = NULL;
    amp_scaler *scalers[2] = {NULL, NULL};
    amp_tape *tape = NULL;
    amp_tensor z, real;
    int32_t *labels;                                    /* 8 zeros and 8 ones */

    void open() {
        int64_t shape[2] = {8, 16};
        int32_t values[16] = {0};
        amp_optimizer_desc o = {};
        amp_scaler_desc s = {};
        void *memory;
        s.init_scale = 1024;
        o.kind = AMP_SGD; o.lr = 0.5;
        CHECK_OK(amp_model_create(amp, &g, 1, 0));
        CHECK_OK(amp_model_create(amp, &d, 2, 0));
        wg = amp_model_param(g, "g", 16, 16, AMP_INIT_NORMAL, 0.3);
        wd = amp_model_param(d, "d", 2, 16, AMP_INIT_NORMAL, 0.3);
        CHECK_OK(amp_model_params(g, &o.params, &o.n_params));
        CHECK_OK(amp_optimizer_create(amp, &og, &o));
        CHECK_OK(amp_model_params(d, &o.params, &o.n_params));
        CHECK_OK(amp_optimizer_create(amp, &od, &o));
        for (amp_scaler *&scaler : scalers) CHECK_OK(amp_scaler_create(amp, &scaler, &s));
        CHECK_OK(amp_tape_create(amp, &tape, NULL));
        CHECK_OK(amp_alloc(amp, &memory, sizeof values));
        labels = (int32_t *)memory;
        for (int i = 8; i < 16; i++) values[i] = 1;
        CHECK_OK(amp_copy(amp, labels, values, sizeof values, AMP_COPY_TO_DEVICE));
        for (amp_tensor *t : {&z, &real}) {
            float numbers[8 * 16];
            CHECK_OK(amp_tensor_create(amp, t, AMP_F32, shape, 2));
            for (int i = 0; i < 8 * 16; i++) numbers[i] = amp_random_uniform(t == &z, (uint64_t)i) - 0.5f;
            CHECK_OK(amp_copy(amp, t->data, numbers, sizeof numbers, AMP_COPY_TO_DEVICE));
        }
        CHECK_OK(amp_sync(amp));
    }
    amp_value judged(amp_value x, int truth) {
        return amp_tape_cross_entropy(tape, amp_tape_linear(tape, x, wd, NULL, AMP_ACT_NONE), labels + 8 * truth, NULL);
    }
    amp_result backward(int generator) {
        const float *scale = amp_scaler_scale_ptr(scalers[generator]);
        CHECK_OK(amp_tape_begin(tape, NULL));
        if (!generator) return amp_tape_backward(tape, judged(amp_tape_input(tape, &real), 1), scale);
        return amp_tape_backward(tape, judged(amp_tape_linear(tape, amp_tape_input(tape, &z), wg, NULL, AMP_ACT_NONE), 1), scale);
    }
    void round(int drops) {
        CHECK_OK(backward(0));
        CHECK_OK(amp_step(od, scalers[0]));
        CHECK_OK(backward(1));
        CHECK_OK(amp_step(og, scalers[1]));
        if (drops) CHECK_OK(amp_optimizer_zero_grad(od));
    }
    std::string weights() {
        std::string out(16 * 18 * 4, 0);
        CHECK_OK(amp_copy(amp, &out[0], wg->weight.data, 16 * 16 * 4, AMP_COPY_TO_HOST));
        CHECK_OK(amp_copy(amp, &out[16 * 16 * 4], wd->weight.data, 2 * 16 * 4, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
        return out;
    }
    ~two_networks() {
        amp_optimizer_destroy(og); amp_optimizer_destroy(od);
        amp_scaler_destroy(scalers[0]); amp_scaler_destroy(scalers[1]);
        amp_tape_destroy(tape);
        amp_model_destroy(g); amp_model_destroy(d);
        amp_close(amp);
    }
};
CUDA_TEST(two_networks_in_a_graph) {
    two_networks called, captured;
    amp_graph *graph = NULL;
    called.open();
    captured.open();
    for (int i = 0; i < 4; i++) called.round(1);
    captured.round(0);
    CHECK_ERR(captured.backward(0), AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "d: backward adds to its gradient") != NULL);
    CHECK_ERR(amp_graph_begin(captured.amp), AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "amp_optimizer_zero_grad") != NULL);
    CHECK_OK(amp_optimizer_zero_grad(captured.od));
    CHECK_OK(amp_graph_begin(captured.amp));            /* without the drop no graph */
    captured.round(0);
    CHECK_ERR(amp_graph_end(captured.amp, &graph), AMP_ERR_STATE);
    CHECK(graph == NULL && strstr(amp_last_error(), "amp_optimizer_zero_grad") != NULL);
    CHECK_OK(amp_graph_begin(captured.amp));
    captured.round(1);
    CHECK_OK(amp_graph_end(captured.amp, &graph));
    for (int i = 1; i < 4; i++) CHECK_OK(amp_graph_launch(graph));
    CHECK(captured.weights() == called.weights());
    CHECK_OK(captured.backward(1));                     /* what a call leaves is no launch's to take */
    CHECK_ERR(amp_graph_launch(graph), AMP_ERR_STATE);
    CHECK_OK(amp_model_zero_grad(captured.g));
    CHECK_OK(amp_model_zero_grad(captured.d));
    CHECK_OK(amp_graph_launch(graph));
    called.round(1);
    CHECK(captured.weights() == called.weights());
    amp_graph_destroy(graph);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN_CI(losses_of_the_cpu);
    RUN(same_bits);
    RUN_PLAIN(steady_step);
    RUN_PLAIN(steady_step_casts_nothing);
    RUN_PLAIN(tape_is_as_lean_as_by_hand);
    RUN_PLAIN(biases_cost_two_launches);
    RUN(tape_in_a_graph);
    RUN(two_networks_in_a_graph);
    RUN_PLAIN(encoder_step_casts_no_gradient);
    RUN_CI(stream_in_16_bits);
    return TEST_END();
}
