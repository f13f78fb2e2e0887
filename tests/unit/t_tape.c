/* t_tape.c - tests models and the tape, which must give the same bits as calls written by hand, in every precision. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "../examples/gpt.h"
#include "handwritten_gpt.h"
#include <fenv.h>
#include <pthread.h>
#include "test.h"

enum { ROWS = 24, IN = 20, HIDDEN = 32, OUT = 10 };

static amp_context *amp;
static amp_model *model;
static amp_tape *tape;
static amp_param *w1, *b1, *w2, *b2, *w3, *b3;
static float inputs[ROWS * IN];
static int32_t labels[ROWS];

static amp_logger logger;               /* of contexts that are opened here; default: amp.h's */
static void open_context(amp_dtype dtype, amp_level level) {
    amp_desc desc = {.dtype = dtype, .level = level, .threads = 2, .logger = logger};
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_tape_create(amp, &tape, NULL));
    for (int i = 0; i < ROWS * IN; i++) inputs[i] = amp_random_uniform(1, (uint64_t)i) - 0.5f;
    for (int i = 0; i < ROWS; i++) labels[i] = (int32_t)(amp_random_u32(2, (uint64_t)i) % OUT);
}
static void close_context(void) {
    amp_tape_destroy(tape);
    amp_model_destroy(model);
    tape = NULL;
    model = NULL;
    amp_close(amp);
}
static void make_mlp(void) {
    amp_param *params;
    int64_t n;
    CHECK_OK(amp_model_create(amp, &model, 7, 0));
    w1 = amp_model_param(model, "fc1.weight", HIDDEN, IN, AMP_INIT_KAIMING_UNIFORM, 0);
    b1 = amp_model_param(model, "fc1.bias", HIDDEN, 0, AMP_INIT_NORMAL, 0.1);
    w2 = amp_model_param(model, "fc2.weight", HIDDEN, HIDDEN, AMP_INIT_XAVIER_NORMAL, 0);
    b2 = amp_model_param(model, "fc2.bias", HIDDEN, 0, AMP_INIT_UNIFORM, 0.1);
    w3 = amp_model_param(model, "fc3.weight", OUT, HIDDEN, AMP_INIT_XAVIER_UNIFORM, 0);
    b3 = amp_model_param(model, "fc3.bias", OUT, 0, AMP_INIT_ZEROS, 0);
    CHECK_OK(amp_model_params(model, &params, &n));
    CHECK_EQ(n, 6);
    CHECK(params == w1);
}

/* The gradients of the model so far, which start over. */
static void take_gradients(float *out) {
    amp_param *params;
    int64_t n;
    CHECK_OK(amp_model_params(model, &params, &n));
    for (int64_t i = 0; i < n; out += amp_tensor_count(&params[i++].weight)) {
        memcpy(out, params[i].grad.data, (size_t)amp_tensor_count(&params[i].weight) * 4);
        params[i].grad_live = 0;
    }
}
static amp_value mlp_loss(amp_activation_kind act) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_value h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, act);
    h = amp_tape_linear(tape, h, w2, b2, act);
    return amp_tape_cross_entropy(tape, amp_tape_linear(tape, h, w3, b3, AMP_ACT_NONE), labels, NULL);
}

/* The same by hand; act's backward in the next layer, as examples do. */
static float mlp_by_hand(amp_activation_kind act, const float *scale) {
    static float buffers[10][ROWS * HIDDEN], loss;
    amp_dtype dtype;
    amp_linear_op l1 = {.weight = w1, .bias = b1, .act = act, .dy_before_act = 1}, l2 = l1, l3 = {.weight = w3, .bias = b3};
    amp_cross_entropy_op ce = {.labels = labels, .loss = &loss, .grad_scale = scale};
    CHECK_OK(amp_autocast_begin(amp, NULL));
    dtype = amp_autocast_result(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32);
    l2.weight = w2; l2.bias = b2;
    l1.x = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    l1.y = l2.x = amp_tensor2(buffers[0], dtype, ROWS, HIDDEN);
    l2.y = l3.x = amp_tensor2(buffers[1], dtype, ROWS, HIDDEN);
    l3.y = l3.dy = ce.logits = ce.dlogits = amp_tensor2(buffers[2], dtype, ROWS, OUT);
    l3.dx = l2.dy = amp_tensor2(buffers[3], dtype, ROWS, HIDDEN);
    l2.dx = l1.dy = amp_tensor2(buffers[4], dtype, ROWS, HIDDEN);
    if (act == AMP_ACT_GELU) {
        l1.pre = l2.x_pre = amp_tensor2(buffers[5], dtype, ROWS, HIDDEN);
        l2.pre = l3.x_pre = amp_tensor2(buffers[6], dtype, ROWS, HIDDEN);
    }
    l2.x_act = l3.x_act = act;
    CHECK_OK(amp_linear(amp, &l1)); CHECK_OK(amp_linear(amp, &l2)); CHECK_OK(amp_linear(amp, &l3));
    CHECK_OK(amp_cross_entropy(amp, &ce));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_linear_backward(amp, &l3)); CHECK_OK(amp_linear_backward(amp, &l2)); CHECK_OK(amp_linear_backward(amp, &l1));
    return loss;
}

TEST(mlp_has_the_bits_of_hand_written_calls) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16, AMP_F16};
    static const amp_activation_kind acts[] = {AMP_ACT_RELU, AMP_ACT_GELU};
    static float by_hand[4096], taped[4096];
    float scale = 64;
    for (int i = 0; i < 6; i++) {
        float loss, value;
        amp_value v;
        open_context(dtypes[i / 2], AMP_LEVEL_O1);
        make_mlp();
        loss = mlp_by_hand(acts[i % 2], &scale);
        take_gradients(by_hand);
        for (int step = 0; step < 3; step++) {
            CHECK_OK(amp_tape_begin(tape, NULL));
            v = mlp_loss(acts[i % 2]);
            CHECK_OK(amp_tape_backward(tape, v, &scale));
            CHECK_OK(amp_tape_read(tape, v, &value, 1));
            CHECK(memcmp(&value, &loss, 4) == 0);
            take_gradients(taped);
            CHECK(memcmp(taped, by_hand, sizeof taped) == 0);
        }
        close_context();
    }
}

TEST(micro_steps_add_up_as_by_hand) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16, AMP_F16};
    static float by_hand[4096], taped[4096], one[4096];
    float scale = 32;
    for (int i = 0; i < 3; i++) {
        open_context(dtypes[i], AMP_LEVEL_O1);
        make_mlp();
        for (int step = 0; step < 5; step++) {      /* 0: by hand; 1: one micro-step only */
            for (int micro = 0; micro < (step == 1 ? 1 : 2); micro++) {
                labels[0] = micro;
                if (step == 0) { (void)mlp_by_hand(AMP_ACT_GELU, &scale); continue; }
                CHECK_OK(amp_tape_begin(tape, NULL));
                CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_GELU), &scale));
            }
            take_gradients(step == 0 ? by_hand : step == 1 ? one : taped);
            if (step > 1) CHECK(memcmp(taped, by_hand, sizeof taped) == 0);
        }
        CHECK(memcmp(one, by_hand, sizeof one) != 0);
        close_context();
    }
}

/* Its scales depend on the steps before, so each way has a context of its own. */
TEST(fp8_has_the_bits_of_hand_written_calls) {
    static float gradients[2][3][4096], bf16[4096];
    float scale = 16, losses[2][3];
    for (int way = 0; way < 3; way++) {
        open_context(way < 2 ? AMP_FP8 : AMP_BF16, AMP_LEVEL_O1);
        make_mlp();
        for (int step = 0; step < (way < 2 ? 3 : 1); step++) {
            for (int i = 0; i < ROWS; i++) labels[i] = (i + step) % OUT;
            if (way == 0) losses[0][step] = mlp_by_hand(AMP_ACT_GELU, &scale);
            else {
                amp_value v;
                CHECK_OK(amp_tape_begin(tape, NULL));
                v = mlp_loss(AMP_ACT_GELU);
                CHECK_OK(amp_tape_backward(tape, v, &scale));
                if (way == 1) CHECK_OK(amp_tape_read(tape, v, &losses[1][step], 1));
            }
            take_gradients(way < 2 ? gradients[way][step] : bf16);
        }
        close_context();
    }
    CHECK(memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
    CHECK(memcmp(gradients[0], gradients[1], sizeof gradients[0]) == 0);
    CHECK(memcmp(gradients[0][0], bf16, sizeof bf16) != 0);
}

TEST(two_tapes_take_turns) {
    static const amp_activation_kind acts[] = {AMP_ACT_RELU, AMP_ACT_GELU};
    static float by_hand[2][4096], taped[4096];
    amp_tape *tapes[2];
    amp_value values[2] = {0, 0};
    float losses[2], loss, scale = 8;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    tapes[0] = tape;
    CHECK_OK(amp_tape_create(amp, &tapes[1], NULL));
    for (int i = 0; i < 2; i++) { losses[i] = mlp_by_hand(acts[i], &scale); take_gradients(by_hand[i]); }
    for (int step = 0; step < 6; step++) {
        tape = tapes[step % 2];
        CHECK_OK(amp_tape_begin(tape, NULL));
        values[step % 2] = mlp_loss(acts[step % 2]);
        CHECK_OK(amp_tape_backward(tape, values[step % 2], &scale));
        take_gradients(taped);
        CHECK(memcmp(taped, by_hand[step % 2], sizeof taped) == 0);
        for (int i = 0; i < 2 && step > 0; i++) {
            CHECK_OK(amp_tape_read(tapes[i], values[i], &loss, 1));
            CHECK(memcmp(&loss, &losses[i], 4) == 0);
            CHECK_ERR(amp_tape_read(tapes[1 - i], values[i], &loss, 1), AMP_ERR_RANGE);
        }
    }
    /* one inside the other: both are refused, and the next steps work */
    CHECK_OK(amp_tape_begin(tapes[0], NULL));
    CHECK_OK(amp_tape_begin(tapes[1], NULL));
    CHECK_ERR(amp_tape_finish(tapes[0]), AMP_ERR_STATE);
    CHECK_ERR(amp_tape_finish(tapes[1]), AMP_ERR_STATE);
    CHECK(!amp_autocast_active(amp, NULL));
    for (int i = 0; i < 2; i++) {
        tape = tapes[i];
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, mlp_loss(acts[i]), &scale));
    }
    amp_tape_destroy(tapes[1]);
    tape = tapes[0];
    close_context();
}

TEST(a_mlp_trains) {
    amp_optimizer *optimizer;
    amp_optimizer_desc desc = {.lr = 0.01};
    float first = 0, last = 0;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    CHECK_OK(amp_model_params(model, &desc.params, &desc.n_params));
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &desc));
    for (int step = 0; step < 60; step++) {
        amp_value loss;
        CHECK_OK(amp_tape_begin(tape, NULL));
        loss = mlp_loss(AMP_ACT_GELU);
        CHECK_OK(amp_tape_backward(tape, loss, NULL));
        CHECK_OK(amp_step(optimizer, NULL));
        CHECK_OK(amp_tape_read(tape, loss, step ? &last : &first, 1));
    }
    CHECK_MSG(first > 2 && last < 0.5f * first, "%g to %g", (double)first, (double)last);
    amp_optimizer_destroy(optimizer);
    close_context();
}

/* A value used twice gets the sum of both gradients; a sum of losses has each. */
TEST(values_used_twice) {
    static float a[ROWS * HIDDEN], b[ROWS * HIDDEN], sum[ROWS * HIDDEN];
    float scale = 1;
    amp_tensor batch, gradient;
    amp_value v, h, loss;
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    for (int i = 0; i < ROWS * HIDDEN; i++) a[i] = amp_random_uniform(9, (uint64_t)i) - 0.5f;
    for (int which = 0; which < 3; which++) {
        batch = amp_tensor2(a, AMP_F32, ROWS, HIDDEN);
        CHECK_OK(amp_tape_begin(tape, NULL));
        v = amp_tape_variable(tape, &batch);
        h = amp_tape_linear(tape, v, w2, b2, AMP_ACT_RELU);
        if (which == 2) h = amp_tape_add(tape, h, v);
        loss = amp_tape_cross_entropy(tape, amp_tape_linear(tape, which == 1 ? v : h, w3, b3, AMP_ACT_NONE), labels, NULL);
        CHECK_OK(amp_tape_backward(tape, loss, &scale));
        CHECK_OK(amp_tape_gradient(tape, v, &gradient));
        memcpy(which == 0 ? b : sum, gradient.data, sizeof b);
    }
    CHECK(memcmp(b, sum, sizeof b) != 0);
    CHECK_OK(amp_tape_begin(tape, NULL));
    v = amp_tape_variable(tape, &batch);
    loss = amp_tape_cross_entropy(tape, amp_tape_linear(tape, v, w3, b3, AMP_ACT_NONE), labels, NULL);
    loss = amp_tape_add(tape, loss, loss);
    CHECK_OK(amp_tape_backward(tape, loss, &scale));
    CHECK_OK(amp_tape_gradient(tape, v, &gradient));
    memcpy(sum, gradient.data, sizeof sum);
    CHECK_OK(amp_tape_begin(tape, NULL));
    v = amp_tape_variable(tape, &batch);
    loss = amp_tape_cross_entropy(tape, amp_tape_linear(tape, v, w3, b3, AMP_ACT_NONE), labels, NULL);
    CHECK_OK(amp_tape_backward(tape, loss, &scale));
    CHECK_OK(amp_tape_gradient(tape, v, &gradient));
    for (int i = 0; i < ROWS * HIDDEN; i++) CHECK(sum[i] == 2 * ((float *)gradient.data)[i]);
    close_context();
}

/* Three parts of a gradient in bf16: their sum in fp32, the later ones first, is rounded once. */
TEST(parts_of_a_gradient_are_rounded_once) {
    static const float alpha[3] = {0.99f, 0.37f, 0.0111f};
    uint16_t x[ROWS * IN] = {0}, zeros[ROWS * IN];
    float y[ROWS * IN], part[3][ROWS * IN], once[ROWS * IN], twice[ROWS * IN], got[ROWS * IN];
    int differ = 0;
    amp_tensor batch = amp_tensor2(x, AMP_BF16, ROWS, IN), target = amp_tensor2(zeros, AMP_BF16, ROWS, IN), gradient;
    amp_value v, sum, loss;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    memset(zeros, 0, sizeof zeros);
    CHECK_OK(amp_convert(x, AMP_BF16, inputs, AMP_F32, ROWS * IN, NULL, NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    v = amp_tape_variable(tape, &batch);
    sum = amp_tape_scale(tape, v, alpha[0]);
    sum = amp_tape_add(tape, sum, amp_tape_scale(tape, v, alpha[1]));
    sum = amp_tape_keep(tape, amp_tape_add(tape, sum, amp_tape_scale(tape, v, alpha[2])));
    loss = amp_tape_mse(tape, sum, amp_tape_input(tape, &target), AMP_REDUCTION_SUM);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK_OK(amp_tape_read(tape, sum, y, ROWS * IN));
    CHECK_OK(amp_tape_gradient(tape, v, &gradient));
    CHECK_OK(amp_convert(got, AMP_F32, gradient.data, gradient.dtype, ROWS * IN, NULL, NULL));
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < ROWS * IN; i++) part[k][i] = amp_f32_from_bf16(amp_bf16_from_f32(alpha[k] * (2 * y[i]), 0));
    for (int i = 0; i < ROWS * IN; i++) {
        float late = part[2][i] + part[1][i];
        once[i] = amp_f32_from_bf16(amp_bf16_from_f32(late + part[0][i], 0));
        twice[i] = amp_f32_from_bf16(amp_bf16_from_f32(amp_f32_from_bf16(amp_bf16_from_f32(late, 0)) + part[0][i], 0));
        CHECK(got[i] == once[i]);
        differ += once[i] != twice[i];
    }
    CHECK_MSG(differ > 10, "%d", differ);
    close_context();
}

/* ---- The GPT of examples/ beside the same written by hand, with its parameters: the same bits */

enum { GPT_BATCH = 2, GPT_SEQ = 24, GPT_VOCAB = 61 };
static int32_t gpt_ids[GPT_BATCH * GPT_SEQ], gpt_next[GPT_BATCH * GPT_SEQ];
static const amp_batch gpt_batch = {.inputs = gpt_ids, .targets = gpt_next, .batch = GPT_BATCH, .seq = GPT_SEQ};

static gpt_config gpt_small(amp_dtype dtype) {
    gpt_config config = {.vocab = GPT_VOCAB, .positions = 32, .channels = 32, .heads = 4, .layers = 3, .batch = GPT_BATCH,
                         .seq = GPT_SEQ, .activations = dtype};
    for (int i = 0; i < GPT_BATCH * GPT_SEQ; i++) {
        gpt_ids[i] = (int32_t)(amp_random_u32(4, (uint64_t)i) % GPT_VOCAB);
        gpt_next[i] = (int32_t)(amp_random_u32(5, (uint64_t)i) % GPT_VOCAB);
    }
    return config;
}
static void gpt_open(gpt *g, hand_gpt *hand, amp_dtype dtype, gpt_config config, int threads) {
    amp_desc desc = {.dtype = dtype, .threads = threads, .seed = 3};
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(gpt_create(g, amp, &config));
    CHECK_OK(gpt_init(g, 1));
    CHECK_OK(hand_create(hand, g));
}
static void gpt_close(gpt *g, hand_gpt *hand) {
    hand_destroy(hand);
    gpt_destroy(g);
    amp_close(amp);
}
static void gpt_fresh(const gpt *g) {
    for (int64_t i = 0; i < g->n_params; i++) g->params[i].grad_live = 0;
}

/* Returns the bytes of the tape's memory. */
static int64_t gpt_compare(const char *what, amp_dtype dtype, gpt_config config, int threads) {
    amp_memory_info before, after;
    amp_state *random = NULL;
    hand_gpt hand;
    gpt g;
    float by_hand, taped;
    int64_t bytes;
    char *grads;
    gpt_open(&g, &hand, dtype, config, threads);
    CHECK_OK(amp_state_create(&random, NULL));
    CHECK_OK(amp_random_save(amp, random, "r"));
    for (int again = 0; again < 2; again++) {       /* the second time weights are cached, as in the tape's steps */
        gpt_fresh(&g);
        CHECK_OK(amp_random_load(amp, random, "r"));
        CHECK_OK(hand_forward_loss(&hand, &gpt_batch, NULL, 1));
        CHECK_OK(hand_backward(&hand));
    }
    CHECK_OK(hand_loss_read(&hand, &by_hand));
    grads = (char *)malloc((size_t)g.own.grads_bytes);
    memcpy(grads, g.own.grads, (size_t)g.own.grads_bytes);
    for (int step = 0; step < 3; step++) {
        gpt_fresh(&g);
        memset(g.own.grads, 0, (size_t)g.own.grads_bytes);
        CHECK_OK(amp_random_load(amp, random, "r"));
        CHECK_OK(amp_memory(amp, &before));
        CHECK_OK(gpt_forward_loss(&g, &gpt_batch, NULL, 1));
        CHECK_OK(gpt_backward(&g));
        CHECK_OK(amp_memory(amp, &after));
        CHECK_OK(gpt_loss_read(&g, &taped));
        CHECK_MSG(memcmp(&taped, &by_hand, 4) == 0, "%s, %s: loss %.9g, by hand %.9g", amp_dtype_name(dtype), what, (double)taped, (double)by_hand);
        for (int64_t i = 0; i < g.n_params; i++) {
            const amp_tensor *grad = &g.params[i].grad;
            CHECK_MSG(memcmp(grad->data, grads + ((char *)grad->data - (char *)g.own.grads), (size_t)amp_tensor_count(grad) * 4) == 0,
                      "%s, %s: %s differs", amp_dtype_name(dtype), what, g.params[i].name);
        }
        CHECK_EQ(after.allocated - before.allocated, step > 0 ? 0 : g.memory_bytes);
    }
    CHECK_MSG(g.memory_bytes <= hand.memory_bytes, "%s, %s: %lld bytes, by hand %lld", amp_dtype_name(dtype), what,
              (long long)g.memory_bytes, (long long)hand.memory_bytes);
    bytes = g.memory_bytes;
    free(grads);
    amp_state_destroy(random);
    gpt_close(&g, &hand);
    return bytes;
}

TEST(gpt_has_the_bits_of_the_hand_written_one) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16, AMP_F16};
    for (int i = 0; i < 3; i++) {
        const gpt_config plain = gpt_small(dtypes[i]);
        gpt_config c = plain;
        int64_t whole = gpt_compare("plain", dtypes[i], c, 2), less;
        c.recompute = 1;
        less = gpt_compare("recompute", dtypes[i], c, 1);
        CHECK_MSG(less < whole * 3 / 4, "%lld bytes, recomputing %lld", (long long)whole, (long long)less);
        c.dropout = 0.1f;
        (void)gpt_compare("recompute and dropout", dtypes[i], c, 1);
        c.recompute = 0;
        (void)gpt_compare("dropout", dtypes[i], c, 1);
        c = plain; c.fused_loss = 1;
        (void)gpt_compare("fused loss", dtypes[i], c, 1);
        c = plain; c.act = AMP_ACT_SILU; c.by_layer = c.unscaled = 1; c.logits = AMP_F32;
        (void)gpt_compare("silu, other scales, fp32 logits", dtypes[i], c, 1);
        c = plain; c.stored[GPT_STREAM] = dtypes[i]; c.stored[GPT_MLP] = AMP_F32;
        (void)gpt_compare("low stream, fp32 inside the MLP", dtypes[i], c, 1);
        c = plain; c.stored[GPT_NORM] = c.stored[GPT_ATTENTION] = AMP_F32; c.dropout = 0.1f;
        (void)gpt_compare("fp32 norms and attention", dtypes[i], c, 1);
    }
}

static void *backward_elsewhere(void *loss) {
    CHECK_ERR(amp_tape_backward(tape, *(amp_value *)loss, NULL), AMP_ERR_STATE);
    return NULL;
}

/* ---- In halves, without running, timed, and stored otherwise */

TEST(forward_and_backward_apart) {
    enum { N = HIDDEN * IN + HIDDEN * HIDDEN + OUT * HIDDEN + 2 * HIDDEN + OUT };
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN), t;
    float whole[N], halves[N], losses[2];
    amp_autocast_desc fp32 = {.dtype = AMP_F32};
    pthread_t thread;
    amp_value loss, x, h;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = mlp_loss(AMP_ACT_GELU);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK_OK(amp_tape_read(tape, loss, &losses[0], 1));
    take_gradients(whole);
    for (int step = 0; step < 2; step++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        loss = mlp_loss(AMP_ACT_GELU);
        CHECK_OK(amp_tape_forward(tape, loss, NULL));
        CHECK(!amp_autocast_active(amp, NULL));
        CHECK_OK(amp_tape_read(tape, loss, &losses[1], 1));
        CHECK(losses[0] == losses[1] && w1->grad_live == 0 && w3->grad_live == 0);
        if (step) CHECK_OK(amp_autocast_begin(amp, &fp32));     /* backward obeys the forward's plan */
        CHECK_OK(amp_tape_backward(tape, loss, NULL));
        if (step) CHECK_OK(amp_autocast_end(amp));
        take_gradients(halves);
        CHECK(memcmp(whole, halves, sizeof whole) == 0);
        CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_STATE);
    }
    CHECK_OK(amp_tape_begin(tape, NULL));
    x = amp_tape_variable(tape, &batch);
    h = amp_tape_linear(tape, x, w1, b1, AMP_ACT_NONE);
    loss = amp_tape_cross_entropy(tape, amp_tape_linear(tape, h, w3, b3, AMP_ACT_NONE), labels, NULL);
    CHECK_OK(amp_tape_forward(tape, loss, NULL));
    CHECK_ERR(amp_tape_gradient(tape, x, &t), AMP_ERR_STATE);           /* not yet */
    CHECK_EQ(amp_tape_input(tape, &batch), 0);
    CHECK_ERR(amp_tape_forward(tape, loss, NULL), AMP_ERR_STATE);
    CHECK_ERR(amp_tape_finish(tape), AMP_ERR_STATE);
    CHECK_ERR(amp_tape_backward(tape, h, NULL), AMP_ERR_RANGE);
    CHECK(pthread_create(&thread, NULL, backward_elsewhere, &loss) == 0 && pthread_join(thread, NULL) == 0);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK_OK(amp_tape_gradient(tape, x, &t));
    take_gradients(halves);
    /* a step given up in the middle */
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_forward(tape, mlp_loss(AMP_ACT_GELU), NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_GELU), NULL));
    take_gradients(halves);
    CHECK(memcmp(whole, halves, sizeof whole) == 0);
    /* whose fused loss has added to gradients already: they count no more */
    for (int given_up = 0; given_up < 3; given_up++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
        loss = amp_tape_linear_cross_entropy(tape, h, w3, b3, labels, NULL);
        CHECK_OK(amp_tape_forward(tape, loss, NULL));
    }
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    take_gradients(whole);
    CHECK_OK(amp_tape_begin(tape, NULL));
    h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
    CHECK_OK(amp_tape_backward(tape, amp_tape_linear_cross_entropy(tape, h, w3, b3, labels, NULL), NULL));
    take_gradients(halves);
    CHECK(memcmp(whole, halves, sizeof whole) == 0);
    CHECK_ERR(amp_tape_forward(NULL, loss, NULL), AMP_ERR_NULL);
    close_context();
}

static char logged[4096];
static void keep_log(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level;
    snprintf(logged + strlen(logged), sizeof logged - strlen(logged), "%d %s\n", id, text);
}

/* A fused loss has added to gradients when its step is given up: they are not live, or, as sums of several steps, named. */
TEST(a_step_given_up_leaves_no_gradient) {
    amp_desc desc = {.dtype = AMP_F32, .threads = 1};
    desc.logger.write = keep_log;
    CHECK_OK(amp_open(&amp, &desc));
    make_mlp();
    for (int which = 0; which < 6; which++) {           /* bits: begin or destroy; nothing, a sum, or a model that is gone before */
        amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
        CHECK_OK(amp_tape_create(amp, &tape, NULL));
        logged[0] = 0;
        for (int step = which / 2 == 1 ? 0 : 1; step < 2; step++) {
            amp_value h, loss;
            CHECK_OK(amp_tape_begin(tape, NULL));
            h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
            loss = amp_tape_linear_cross_entropy(tape, h, w3, NULL, labels, NULL);
            if (step == 0) CHECK_OK(amp_tape_backward(tape, loss, NULL));
            else CHECK_OK(amp_tape_forward(tape, loss, NULL));
        }
        CHECK(w3->grad_live == 1 && logged[0] == 0);
        if (which == 5) { amp_model_destroy(model); model = NULL; }
        if (which & 1) amp_tape_destroy(tape);
        else {
            CHECK_OK(amp_tape_begin(tape, NULL));
            CHECK_OK(amp_tape_finish(tape));
            amp_tape_destroy(tape);
        }
        CHECK_MSG((strstr(logged, "1091") != NULL) == (which / 2 == 1), "%d: %s", which, logged);
        CHECK(which / 2 != 1 || strstr(logged, which & 1 ? "amp_tape_destroy: " : "amp_tape_begin: ") != NULL);
        if (which == 5) break;
        CHECK_EQ(w3->grad_live, which / 2 == 1);
        w1->grad_live = b1->grad_live = w3->grad_live = 0;
    }
    tape = NULL;
    amp_close(amp);
}

TEST(a_plan_tells_the_memory) {
    amp_memory_info before, after;
    int64_t bytes[3] = {0, 0, 0};
    amp_value loss;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    CHECK_OK(amp_memory(amp, &before));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        loss = mlp_loss(AMP_ACT_GELU);
        CHECK_OK(amp_tape_plan(tape, i == 1 ? 0 : loss, &bytes[i]));
        CHECK(!amp_autocast_active(amp, NULL));
        CHECK_ERR(amp_tape_read(tape, loss, &(float){0}, 1), AMP_ERR_STATE);
    }
    CHECK_OK(amp_memory(amp, &after));
    CHECK(after.allocated == before.allocated && w1->grad_live == 0);
    CHECK(bytes[1] > 0 && bytes[1] < bytes[0] && bytes[2] == bytes[0]);
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_GELU), NULL));
    CHECK_OK(amp_memory(amp, &after));
    CHECK(after.allocated - before.allocated >= bytes[0] && after.allocated - before.allocated - after.cast_cache + before.cast_cache < 2 * bytes[0]);
    CHECK_ERR(amp_tape_plan(tape, 0, &bytes[0]), AMP_ERR_STATE);
    CHECK_ERR(amp_tape_plan(tape, 0, NULL), AMP_ERR_NULL);
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_ERR(amp_tape_plan(tape, 77, &bytes[0]), AMP_ERR_RANGE);
    close_context();
}

TEST(times_of_every_call) {
    char text[4000];
    amp_tape_node_info node;
    int64_t i, timed = 0;
    amp_value h;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    for (int on = 0; on < 3; on++) {
        CHECK_OK(amp_tape_time(tape, on == 1));
        CHECK_OK(amp_tape_begin(tape, NULL));
        amp_tape_checkpoint_begin(tape);
        h = amp_tape_linear(tape, amp_tape_input(tape, &(amp_tensor){.data = inputs, .dtype = AMP_F32, .ndim = 2, .shape = {ROWS, IN}}), w1, b1, AMP_ACT_GELU);
        h = amp_tape_linear(tape, h, w2, b2, AMP_ACT_GELU);
        amp_tape_checkpoint_end(tape);
        h = amp_tape_cross_entropy(tape, amp_tape_linear(tape, h, w3, b3, AMP_ACT_NONE), labels, NULL);
        CHECK_OK(amp_tape_backward(tape, h, NULL));
        for (i = 0; amp_tape_node(tape, i, &node) == AMP_OK; i++) {
            CHECK(node.seconds[0] >= 0 && node.seconds[1] >= 0);
            CHECK((node.seconds[0] > 0) == (on == 1 && i > 0) && (node.seconds[1] > 0) == (on == 1 && strcmp(node.op, "linear") == 0));
            timed += node.seconds[2] > 0;
        }
        CHECK_EQ(i, 5);
        CHECK_EQ(timed, on > 0);       /* the second leaves the checkpoint: it is not computed again */
        CHECK_ERR(amp_tape_node(tape, i, &node), AMP_ERR_RANGE);
        CHECK_ERR(amp_tape_node(tape, -1, &node), AMP_ERR_RANGE);
        CHECK_OK(amp_tape_node(tape, 3, &node));
        CHECK(strcmp(node.op, "linear") == 0 && strcmp(node.layer, "fc3.weight") == 0 && node.compute == AMP_BF16);
        CHECK(amp_tape_text(tape, text, sizeof text) < sizeof text);
        CHECK((strstr(text, " ms") != NULL) == (on == 1));
        CHECK(amp_tape_dot(tape, text, sizeof text) < sizeof text);
        CHECK((strstr(text, " ms\"") != NULL) == (on == 1));
    }
    CHECK_ERR(amp_tape_time(NULL, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_node(NULL, 0, &node), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_node(tape, 0, NULL), AMP_ERR_NULL);
    close_context();
}

/* Every kind that amp_tape_store is for, in every dtype, and back; attention, views and losses keep theirs. */
TEST(results_are_stored_as_told) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_F16, AMP_BF16, AMP_DTYPE_DEFAULT};
    amp_tensor batch = amp_tensor3(inputs, AMP_F32, 3, 8, IN), t;
    int32_t words[6] = {0, 1, 2, 3, 4, 5};
    amp_tensor ids = amp_tensor2(words, AMP_I32, 2, 3);
    amp_value v[14], loss;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    for (int d = 0; d < 4; d++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        amp_tape_store(tape, dtypes[d]);
        v[0] = amp_tape_linear(tape, amp_tape_variable(tape, &batch), w1, b1, AMP_ACT_GELU);
        v[1] = amp_tape_layernorm(tape, v[0], NULL, NULL, 0);
        v[2] = amp_tape_rmsnorm(tape, v[1], NULL, 0);
        v[3] = amp_tape_swiglu(tape, v[1], v[2]);
        v[4] = amp_tape_activation(tape, v[3], b1, AMP_ACT_SILU);
        v[5] = amp_tape_dropout(tape, v[4], 0.1f);
        v[6] = amp_tape_scale(tape, v[5], 2);
        v[7] = amp_tape_add(tape, v[6], v[0]);
        v[8] = amp_tape_matmul(tape, v[7], amp_tape_reshape(tape, v[0], (const int64_t[]){3, 8, HIDDEN}, 3), 0, 1, 0);
        v[9] = amp_tape_embedding(tape, &ids, w2, NULL);
        v[10] = amp_tape_attention(tape, v[0], v[0], v[0], 4, NULL);
        v[11] = amp_tape_mean(tape, amp_tape_matmul(tape, v[8], v[10], 0, 0, 0));
        loss = amp_tape_cross_entropy(tape, amp_tape_linear(tape, v[11], w3, b3, AMP_ACT_NONE), labels, NULL);
        loss = amp_tape_add(tape, loss, amp_tape_scale(tape, amp_tape_mse(tape, v[9], amp_tape_scale(tape, v[9], 0.5f), AMP_REDUCTION_MEAN), 0.1f));
        for (int i = 0; i < 12 && d < 3; i++) {
            CHECK_OK(amp_tape_tensor(tape, v[i], &t));
            CHECK_MSG(t.dtype == dtypes[d], "value %d is %s, must be %s", i, amp_dtype_name(t.dtype), amp_dtype_name(dtypes[d]));
        }
        CHECK_OK(amp_tape_tensor(tape, loss, &t));
        CHECK_EQ(t.dtype, AMP_F32);
        if (d == 3) { CHECK_OK(amp_tape_tensor(tape, v[0], &t)); CHECK_EQ(t.dtype, AMP_BF16); }
        CHECK_OK(amp_tape_backward(tape, loss, NULL));
        for (int i = 0; i < HIDDEN * IN; i++) CHECK(amp_is_finite_f32((float *)w1->grad.data + i));
    }
    CHECK_OK(amp_tape_begin(tape, NULL));
    amp_tape_store(tape, AMP_I32);
    CHECK_ERR(amp_tape_finish(tape), AMP_ERR_DTYPE);
    close_context();
}

/* Weights go into a state and back, to another level too; of another model they are refused, and nothing is changed. */
static amp_model *saved_model(amp_level level, int wide) {
    amp_desc desc = {.dtype = AMP_BF16, .level = level, .threads = 1};
    amp_model *m;
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_model_create(amp, &m, 7, 0));
    (void)amp_model_param(m, "fc.weight", 6, wide ? 6 : 5, AMP_INIT_NORMAL, 1);
    (void)amp_model_param(m, "ln.weight", 6, 0, AMP_INIT_NORM_WEIGHT, 0);
    return m;
}
TEST(models_save_and_load) {
    float first[30], other[30];
    amp_optimizer *optimizer;
    amp_optimizer_desc desc = {.lr = 0.1};
    amp_state *state, *again;
    amp_model *m = saved_model(AMP_LEVEL_O1, 0);
    amp_param *w = amp_model_find(m, "fc.weight");
    int64_t elements;
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_model_save(m, state, "m"));
    memcpy(first, w->weight.data, sizeof first);
    CHECK(amp_model_find(m, "none") == NULL);
    CHECK_EQ(amp_model_bytes(m, &elements), 36 * 8);
    CHECK_EQ(elements, 36);
    CHECK_OK(amp_model_freeze(m, "fc.*", 1));
    CHECK(w->grad.data == NULL);
    CHECK_OK(amp_model_freeze(m, "fc.*", 0));
    CHECK(w->grad.data != NULL);
    CHECK_ERR(amp_model_freeze(m, "x*", 1), AMP_ERR_NAME);
    CHECK_ERR(amp_model_freeze(m, "fc_weight", 1), AMP_ERR_NAME);
    CHECK_MSG(strstr(amp_last_error(), "the nearest is fc.weight") != NULL, "%s", amp_last_error());
    CHECK_ERR(amp_model_load(m, state, "n"), AMP_ERR_NAME);
    memset(w->weight.data, 0, sizeof first);
    CHECK_OK(amp_model_load(m, state, "m"));
    CHECK(memcmp(first, w->weight.data, sizeof first) == 0);
    amp_model_destroy(m);
    amp_close(amp);
    /* level O2: the optimizer's masters start with all the bits of the weights, and are loaded */
    m = saved_model(AMP_LEVEL_O2, 0);
    w = amp_model_find(m, "fc.weight");
    CHECK_EQ(w->weight.dtype, AMP_BF16);
    CHECK_EQ(amp_model_find(m, "ln.weight")->weight.dtype, AMP_F32);
    CHECK_OK(amp_model_params(m, &desc.params, &desc.n_params));
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &desc));
    CHECK(w->master != NULL && memcmp(w->master, first, sizeof first) == 0);
    memset(w->master, 0, sizeof first);
    CHECK_OK(amp_model_load(m, state, "m"));
    CHECK(memcmp(w->master, first, sizeof first) == 0);
    memcpy(other, w->weight.data, 60);
    amp_optimizer_destroy(optimizer);
    CHECK_OK(amp_model_load(m, state, "m"));
    CHECK(memcmp(other, w->weight.data, 60) == 0);
    amp_model_destroy(m);
    amp_close(amp);
    /* and so do remainders, which are saved too */
    m = saved_model(AMP_LEVEL_O2, 0);
    CHECK_OK(amp_model_params(m, &desc.params, &desc.n_params));
    desc.master = AMP_MASTER_REMAINDER;
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &desc));
    for (int round = 0; round < 2; round++) {
        CHECK_OK(amp_state_create(&again, NULL));
        CHECK_OK(amp_model_save(m, again, "m"));
        CHECK_OK(amp_state_get(again, "m.weight.0", AMP_F32, other, 30));
        CHECK(memcmp(other, first, sizeof first) == 0);
        CHECK_OK(amp_model_load(m, again, "m"));
        amp_state_destroy(again);
    }
    amp_optimizer_destroy(optimizer);
    amp_model_destroy(m);
    amp_close(amp);
    /* a state that was put together by hand: names without weights */
    CHECK_OK(amp_state_create(&again, NULL));
    {
        char names[256];
        amp_dtype dtype;
        int64_t n = amp_state_count(state, "m.model_names", &dtype);
        CHECK_OK(amp_state_get(state, "m.model_names", AMP_U8, names, n));
        CHECK_OK(amp_state_put(again, "m.model_names", AMP_U8, names, n));
        m = saved_model(AMP_LEVEL_O1, 0);
        CHECK_ERR(amp_model_load(m, again, "m"), AMP_ERR_MISMATCH);
        CHECK(strstr(amp_last_error(), "m.weight.0 has no weight fc.weight") != NULL);
        amp_model_destroy(m);
        amp_close(amp);
    }
    amp_state_destroy(again);
    m = saved_model(AMP_LEVEL_O1, 1);
    memcpy(other, amp_model_find(m, "fc.weight")->weight.data, sizeof other);
    CHECK_ERR(amp_model_load(m, state, "m"), AMP_ERR_MISMATCH);
    CHECK_MSG(strstr(amp_last_error(), "fc.weight 6 5") && strstr(amp_last_error(), "fc.weight 6 6"), "%s", amp_last_error());
    CHECK(memcmp(other, amp_model_find(m, "fc.weight")->weight.data, sizeof other) == 0);
    amp_model_destroy(m);
    amp_close(amp);
    amp_state_destroy(state);
}

/* Mean and deviation of each distribution, as torch's, and the same bits everywhere: a checksum. */
TEST(initialisers) {
    static const struct { amp_init init; double value, deviation, largest; } rows[] = {
        {AMP_INIT_NORMAL, 0.02, 0.02, 0.2}, {AMP_INIT_TRUNCATED_NORMAL, 1, 0.8796, 2}, {AMP_INIT_UNIFORM, 0.5, 0.288675, 0.5},
        {AMP_INIT_XAVIER_UNIFORM, 0, 0.0645497, 0.111804}, {AMP_INIT_XAVIER_NORMAL, 2, 0.129099, 1},
        {AMP_INIT_KAIMING_UNIFORM, 0, 0.0790569, 0.136931}, {AMP_INIT_KAIMING_NORMAL, 1, 0.0559017, 1}, {AMP_INIT_CONSTANT, -3, 0, 3}};
    uint64_t sum = 0;
    amp_desc desc = {.dtype = AMP_F32, .threads = 1};
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_model_create(amp, &model, 11, 0));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char name[8];
        double mean = 0, squares = 0;
        int64_t n = 160 * 320;
        const float *w;
        snprintf(name, sizeof name, "w%d", (int)i);
        w = (const float *)amp_model_param(model, name, 160, 320, rows[i].init, rows[i].value)->weight.data;
        for (int64_t k = 0; k < n; k++) {
            uint32_t bits;
            mean += (double)w[k] / (double)n;
            memcpy(&bits, w + k, 4);
            sum = (sum ^ bits) * UINT64_C(0x9e3779b97f4a7c15);
            CHECK(fabs((double)w[k]) <= rows[i].largest * 1.000001);
        }
        for (int64_t k = 0; k < n; k++) squares += ((double)w[k] - mean) * ((double)w[k] - mean) / (double)n;
        if (rows[i].init == AMP_INIT_CONSTANT) { CHECK(mean + 3 < 1e-9 && mean + 3 > -1e-9); continue; }
        CHECK_MSG(fabs(mean) < 4 * rows[i].deviation / sqrt((double)n), "%d: mean %g", (int)rows[i].init, mean);
        CHECK_MSG(fabs(sqrt(squares) / rows[i].deviation - 1) < 0.015, "%d: deviation %g", (int)rows[i].init, sqrt(squares));
    }
    CHECK_MSG(sum == UINT64_C(0xf2ba3c19d6f0008f), "checksum 0x%llx", (unsigned long long)sum);
    amp_model_destroy(model);
    model = NULL;
    amp_close(amp);
}

/* ---- Refusals.  Each by name; nothing runs, nothing leaks, and the next step works. */

static amp_result linear_of(int64_t cols, amp_param *w) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, 4, cols);
    amp_value h;
    CHECK_OK(amp_tape_begin(tape, NULL));
    h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w, NULL, AMP_ACT_NONE);
    h = amp_tape_add(tape, h, h);
    return amp_tape_backward(tape, amp_tape_cross_entropy(tape, h, labels, NULL), NULL);
}
static amp_value plain_loss(amp_value *h) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    *h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
    return amp_tape_cross_entropy(tape, *h, labels, NULL);
}
static void *record_elsewhere(void *arg) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, 4, 4);
    (void)arg;
    CHECK_EQ(amp_tape_input(tape, &batch), 0);
    CHECK(strstr(amp_last_error(), "another thread") != NULL);
    return NULL;
}
static void *destroy_elsewhere(void *arg) {
    amp_tape_destroy(tape);
    return arg;
}

/* Every operator with operands that do not fit: the text names the operator, its layer where it has one, and both shapes. */
enum { M_LINEAR_BIAS, M_NORM, M_ADD, M_MATMUL, M_ATTENTION_FLAT, M_ATTENTION_KEYS, M_ATTENTION_DTYPE, M_ROPE, M_POSITIONS, M_IDS, M_IDS_SHAPE,
       M_LOSS_WEIGHT, M_TARGET, M_SPLIT, M_TRANSPOSE, M_MEAN, M_RESHAPE, M_CHECKPOINT, M_KEEP, MISFITS };
static void record_misfit(int which) {
    static int32_t ids[6] = {0};
    static const int64_t shape[AMP_MAX_DIMS + 1] = {1, 1, 1};
    static uint16_t halves[24];
    amp_tensor two = amp_tensor2(inputs, AMP_F32, 6, 4), three = amp_tensor3(inputs, AMP_F32, 1, 6, 4), longer = amp_tensor3(inputs, AMP_F32, 2, 6, 4),
               vector = amp_tensor1(inputs, AMP_F32, 4), half = amp_tensor3(halves, AMP_F16, 1, 6, 4), id = amp_tensor2(ids, AMP_I32, 2, 3);
    amp_value x = amp_tape_input(tape, &two), q = amp_tape_input(tape, &three), batch = amp_tape_input(tape, &longer);
    switch (which) {
        case M_LINEAR_BIAS: x = amp_tape_linear(tape, x, amp_model_find(model, "square"), b1, AMP_ACT_NONE); break;
        case M_NORM: amp_tape_layer(tape, "ln"); x = amp_tape_layernorm(tape, x, b1, NULL, 0); break;
        case M_ADD: x = amp_tape_add(tape, x, q); break;
        case M_MATMUL: x = amp_tape_matmul(tape, x, x, 0, 0, 0); break;
        case M_ATTENTION_FLAT: x = amp_tape_attention(tape, x, x, x, 2, NULL); break;
        case M_ATTENTION_KEYS: x = amp_tape_attention(tape, q, batch, batch, 2, NULL); break;
        case M_ATTENTION_DTYPE: x = amp_tape_attention(tape, q, amp_tape_input(tape, &half), q, 2, NULL); break;
        case M_ROPE: x = amp_tape_rope(tape, q, 4, NULL); break;
        case M_POSITIONS: x = amp_tape_embedding(tape, &id, amp_model_find(model, "square"), amp_model_find(model, "short")); break;
        case M_IDS: x = amp_tape_embedding(tape, &two, amp_model_find(model, "square"), NULL); break;
        case M_IDS_SHAPE: id.stride[0] = 4; id.stride[1] = 1; x = amp_tape_embedding(tape, &id, amp_model_find(model, "square"), NULL); break;
        case M_LOSS_WEIGHT: x = amp_tape_linear_cross_entropy(tape, x, w1, NULL, labels, NULL); break;
        case M_TARGET: x = amp_tape_mse(tape, x, q, AMP_REDUCTION_SUM); break;
        case M_SPLIT: x = amp_tape_split(tape, x, 1, 2, 3); break;
        case M_TRANSPOSE: x = amp_tape_transpose(tape, x, 0, 2); break;
        case M_MEAN: x = amp_tape_mean(tape, amp_tape_input(tape, &vector)); break;
        case M_RESHAPE: x = amp_tape_reshape(tape, x, shape, AMP_MAX_DIMS + 1); break;
        case M_CHECKPOINT: amp_tape_checkpoint_begin(tape); amp_tape_checkpoint_begin(tape); x = 0; break;
        default: x = amp_tape_keep(tape, x + 100);
    }
    CHECK_EQ(x, 0);
}
TEST(operands_that_do_not_fit) {
    static const struct { amp_result result; const char *text[3]; } rows[MISFITS] = {
        [M_LINEAR_BIAS] = {AMP_ERR_SHAPE, {"amp_tape_linear: square", "[4, 4]", "[32]"}},
        [M_NORM] = {AMP_ERR_SHAPE, {"amp_tape_layernorm: ", "[6, 4]", "[32]"}},
        [M_ADD] = {AMP_ERR_SHAPE, {"amp_tape_add", "[6, 4]", "[1, 6, 4]"}},
        [M_MATMUL] = {AMP_ERR_SHAPE, {"amp_tape_matmul", "[6, 4]", "b"}},
        [M_ATTENTION_FLAT] = {AMP_ERR_SHAPE, {"amp_tape_attention", "q must be", "heads"}},
        [M_ATTENTION_KEYS] = {AMP_ERR_SHAPE, {"amp_tape_attention", "[1, 6, 4]", "[2, 6, 4]"}},
        [M_ATTENTION_DTYPE] = {AMP_ERR_DTYPE, {"amp_tape_attention", "one dtype", ""}},
        [M_ROPE] = {AMP_ERR_SHAPE, {"amp_tape_rope", "dim even", ""}},
        [M_POSITIONS] = {AMP_ERR_SHAPE, {"amp_tape_embedding: square", "[2, 3, 4]", "[2, 4]"}},
        [M_IDS] = {AMP_ERR_DTYPE, {"amp_tape_embedding", "fp32", "i32"}},
        [M_IDS_SHAPE] = {AMP_ERR_SHAPE, {"amp_tape_embedding", "contiguous", ""}},
        [M_LOSS_WEIGHT] = {AMP_ERR_SHAPE, {"amp_tape_linear_cross_entropy: fc1.weight", "[6, 4]", "[32, 20]"}},
        [M_TARGET] = {AMP_ERR_SHAPE, {"amp_tape_mse", "[6, 4]", "[1, 6, 4]"}},
        [M_SPLIT] = {AMP_ERR_SHAPE, {"amp_tape_split", "3 elements from 2 on of dimension 1", "[6, 4]"}},
        [M_TRANSPOSE] = {AMP_ERR_RANGE, {"amp_tape_transpose", "dimensions", ""}},
        [M_MEAN] = {AMP_ERR_SHAPE, {"amp_tape_mean", "rows", ""}},
        [M_RESHAPE] = {AMP_ERR_RANGE, {"amp_tape_reshape", "ndim = ", ""}},
        [M_CHECKPOINT] = {AMP_ERR_STATE, {"amp_tape_checkpoint_begin", "is open", ""}},
        [M_KEEP] = {AMP_ERR_RANGE, {"amp_tape_keep", "another tape", ""}}};
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    (void)amp_model_param(model, "square", 4, 4, AMP_INIT_ONES, 0);
    (void)amp_model_param(model, "short", 2, 4, AMP_INIT_ONES, 0);
    for (int i = 0; i < MISFITS; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        record_misfit(i);
        CHECK_EQ(amp_tape_finish(tape), rows[i].result);
        for (int k = 0; k < 3; k++)
            CHECK_MSG(strstr(amp_last_error(), rows[i].text[k]) != NULL, "%d: %s, without %s", i, amp_last_error(), rows[i].text[k]);
    }
    close_context();
}

TEST(refusals) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN), t;
    amp_autocast_desc inference = {.mode = AMP_MODE_INFERENCE};
    amp_memory_info before, after;
    amp_value h, old, loss;
    amp_param frozen;
    pthread_t thread;
    float value;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    /* shapes: layer, operator and both shapes in the text, which backward has */
    CHECK_ERR(linear_of(IN - 1, w1), AMP_ERR_SHAPE);
    CHECK_MSG(strstr(amp_last_error(), "amp_tape_linear: fc1.weight: x is [4, 19] fp32") && strstr(amp_last_error(), "[32, 20]"), "%s", amp_last_error());
    CHECK_ERR(linear_of(IN, NULL), AMP_ERR_NULL);
    CHECK_OK(linear_of(IN, w1));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, plain_loss(&h), NULL));
    }
    CHECK_OK(amp_memory(amp, &before));
    /* the order of calls */
    CHECK_ERR(amp_tape_backward(tape, 1, NULL), AMP_ERR_STATE);
    CHECK_ERR(amp_tape_finish(tape), AMP_ERR_STATE);
    CHECK_EQ(amp_tape_input(tape, &batch), 0);
    CHECK(strstr(amp_last_error(), "amp_tape_begin") != NULL);
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_ERR(amp_tape_begin(tape, NULL), AMP_ERR_STATE);
    loss = plain_loss(&old);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_STATE);      /* twice */
    CHECK_ERR(amp_tape_gradient(tape, old, &t), AMP_ERR_STATE);
    CHECK_ERR(amp_tape_gradient(tape, 0, &t), AMP_ERR_RANGE);
    CHECK_ERR(amp_tape_read(tape, old, &value, 1), AMP_ERR_STATE);       /* its memory has gone to its gradient */
    CHECK_ERR(amp_tape_read(tape, loss, &value, 2), AMP_ERR_SHAPE);
    CHECK_ERR(amp_tape_read(tape, 5, &value, 1), AMP_ERR_RANGE);
    CHECK_ERR(amp_tape_tensor(tape, 5, &t), AMP_ERR_RANGE);
    /* a value of an earlier step, as an operand and as the loss */
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_EQ(amp_tape_add(tape, plain_loss(&h), old), 0);
    CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_RANGE);
    CHECK_MSG(strstr(amp_last_error(), "amp_tape_add: operand 2 is a value of another tape or of an earlier step") != NULL, "%s", amp_last_error());
    CHECK_OK(amp_tape_begin(tape, NULL));
    (void)plain_loss(&h);
    CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_RANGE);
    CHECK_OK(amp_tape_begin(tape, NULL));
    (void)plain_loss(&h);
    CHECK_ERR(amp_tape_backward(tape, h, NULL), AMP_ERR_SHAPE);         /* no loss */
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = plain_loss(&h);
    (void)amp_tape_linear(tape, loss, w1, NULL, AMP_ACT_NONE);
    CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_UNSUPPORTED);
    /* what no parameter reaches, and inference */
    frozen = *w1;
    frozen.id = 0;
    frozen.grad.data = NULL;
    CHECK_ERR(linear_of(IN, &frozen), AMP_ERR_CONFLICT);
    CHECK_OK(amp_tape_begin(tape, &inference));
    loss = plain_loss(&h);
    CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_STATE);
    /* regions and checkpoints that stay open */
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = plain_loss(&h);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_STATE);
    CHECK(!amp_autocast_active(amp, NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    amp_tape_checkpoint_begin(tape);
    (void)amp_tape_input(tape, &batch);
    CHECK_ERR(amp_tape_finish(tape), AMP_ERR_STATE);
    /* another thread */
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK(pthread_create(&thread, NULL, record_elsewhere, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK_ERR(amp_tape_backward(tape, plain_loss(&h), NULL), AMP_ERR_STATE);
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_backward(tape, plain_loss(&h), NULL));
    CHECK_OK(amp_memory(amp, &after));
    CHECK_EQ(after.allocated, before.allocated);
    /* destroyed inside its region, with another inside; another context's stays, and so does what another thread began */
    {
        amp_context *elsewhere;
        amp_autocast_desc fp16 = {.dtype = AMP_F16};
        CHECK_OK(amp_open(&elsewhere, NULL));
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_OK(amp_autocast_begin(elsewhere, &fp16));
        amp_tape_destroy(tape);
        CHECK(!amp_autocast_active(amp, NULL));
        CHECK(amp_autocast_active(elsewhere, NULL));
        CHECK_OK(amp_autocast_end(elsewhere));
        amp_close(elsewhere);
        CHECK_OK(amp_tape_create(amp, &tape, NULL));
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK(pthread_create(&thread, NULL, destroy_elsewhere, NULL) == 0 && pthread_join(thread, NULL) == 0);
        CHECK_OK(amp_autocast_end(amp));
    }
    tape = NULL;
    CHECK_ERR(amp_tape_begin(tape, NULL), AMP_ERR_NULL);
    CHECK_EQ(amp_tape_input(tape, &batch), 0);
    close_context();
}

TEST(models_refuse) {
    amp_param *params;
    amp_tensor t;
    int64_t n, shape[2] = {2, -1};
    open_context(AMP_F32, AMP_LEVEL_O1);
    CHECK_ERR(amp_model_create(amp, &model, 0, -1), AMP_ERR_RANGE);
    for (int i = 0; i < 6; i++) {
        static const amp_result results[] = {AMP_ERR_RANGE, AMP_ERR_NAME, AMP_ERR_SIZE, AMP_ERR_RANGE, AMP_ERR_RANGE,
                                             AMP_ERR_SIZE};
        CHECK_OK(amp_model_create(amp, &model, 0, 1));
        if (i == 0) CHECK(amp_model_param(model, "w", 0, 3, AMP_INIT_ONES, 0) == NULL);
        if (i == 1) CHECK(amp_model_param(model, "", 1, 3, AMP_INIT_ONES, 0) == NULL);
        if (i == 2) { CHECK(amp_model_param(model, "w", 1, 3, AMP_INIT_ONES, 0) != NULL); CHECK(amp_model_param(model, "v", 1, 3, AMP_INIT_ONES, 0) == NULL); }
        if (i == 3) CHECK(amp_model_param(model, "w", 1, 3, (amp_init)99, 0) == NULL);
        if (i == 4) CHECK(amp_model_param(model, "w", 1, 3, AMP_INIT_NORMAL, -1) == NULL);
        if (i == 5) CHECK(amp_model_param(model, "w", 4, INT64_C(1) << 62, AMP_INIT_ONES, 0) == NULL);
        CHECK(amp_model_param(model, "later", 1, 3, AMP_INIT_ONES, 0) == NULL);
        CHECK_ERR(amp_model_params(model, &params, &n), results[i]);
        CHECK(strstr(amp_last_error(), "amp_model_param: ") != NULL);
        amp_model_destroy(model);
    }
    model = NULL;
    CHECK_ERR(amp_tensor_create(amp, &t, AMP_F32, shape, 2), AMP_ERR_SHAPE);
    CHECK_ERR(amp_tensor_create(amp, &t, AMP_F32, shape, 5), AMP_ERR_RANGE);
    CHECK_ERR(amp_tensor_create(amp, &t, (amp_dtype)99, shape, 1), AMP_ERR_DTYPE);
    CHECK_OK(amp_tensor_create(amp, &t, AMP_DTYPE_DEFAULT, shape, 1));
    amp_free(amp, t.data);
    close_context();
}

TEST(nothing_given) {
    const int64_t shape[1] = {1};
    amp_param *params;
    amp_tensor t;
    amp_state *state;
    float number;
    int64_t n;
    open_context(AMP_F32, AMP_LEVEL_O1);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_model_create(amp, &model, 0, 0));
    CHECK_ERR(amp_model_create(NULL, &model, 0, 0), AMP_ERR_NULL);
    CHECK_ERR(amp_model_create(amp, NULL, 0, 0), AMP_ERR_NULL);
    CHECK_ERR(amp_model_params(NULL, &params, &n), AMP_ERR_NULL);
    CHECK_ERR(amp_model_freeze(NULL, "*", 1), AMP_ERR_NULL);
    CHECK_ERR(amp_model_freeze(model, NULL, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_model_save(NULL, state, "m"), AMP_ERR_NULL);
    CHECK_ERR(amp_model_save(model, NULL, "m"), AMP_ERR_NULL);
    CHECK_ERR(amp_model_load(NULL, state, "m"), AMP_ERR_NULL);
    CHECK_ERR(amp_tensor_create(NULL, &t, AMP_F32, shape, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_tensor_create(amp, NULL, AMP_F32, shape, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_create(NULL, &tape, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_create(amp, NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_create(amp, &(amp_tape *){NULL}, &(amp_tape_desc){.memory_budget = -1}), AMP_ERR_RANGE);
    CHECK_ERR(amp_tape_backward(NULL, 1, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_finish(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_tensor(NULL, 1, &t), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_gradient(NULL, 1, &t), AMP_ERR_NULL);
    CHECK_ERR(amp_tape_read(NULL, 1, &number, 1), AMP_ERR_NULL);
    amp_state_destroy(state);
    close_context();
}

/* ---- An operator of the host's own: y = a b + c, and w times that with a weight */

typedef struct own { int forwards, backwards, fail, nulls; amp_param *weight; amp_dtype compute, inside; amp_tensor y; } own;

static float own_get(const amp_tensor *t, int64_t i) {
    float value;
    CHECK_OK(amp_convert(&value, AMP_F32, (const char *)t->data + i * (int64_t)amp_dtype_size(t->dtype), t->dtype, 1, NULL, NULL));
    return value;
}
static void own_put(const amp_tensor *t, int64_t i, float value) {
    CHECK_OK(amp_convert((char *)t->data + i * (int64_t)amp_dtype_size(t->dtype), t->dtype, &value, AMP_F32, 1, NULL, NULL));
}
static float own_weight(const own *o) { return o->weight ? *(const float *)o->weight->weight.data : 1; }
static amp_result own_failure(const own *o, const amp_custom_call *call) {
    void *p;
    amp_value nothing = amp_tape_input(tape, NULL);
    CHECK_EQ(nothing, 0);
    if (o->fail == 1) return amp_alloc(call->amp, &p, -1);
    if (o->fail == 2) return (amp_result)7777;
    if (o->fail == 3) return amp_autocast_begin(call->amp, NULL);
    if (o->fail == 4) return amp_autocast_end(call->amp);
    if (o->fail == 5) return amp_tape_begin(tape, NULL);
    if (o->fail == 6) amp_tape_destroy(tape);
    return AMP_OK;
}
static amp_result own_forward(void *user, const amp_custom_call *call) {
    own *o = (own *)user;
    o->forwards++;
    o->compute = call->plan.compute;
    o->inside = amp_autocast_compute(call->amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32);
    o->y = call->y;
    if (o->fail > 0) return own_failure(o, call);
    for (int64_t i = 0; i < amp_tensor_count(&call->y); i++)
        own_put(&call->y, i, own_weight(o) * (own_get(&call->x[0], i) * own_get(&call->x[1], i) + (call->x[2].data ? own_get(&call->x[2], i) : 0)));
    return AMP_OK;
}
static amp_result own_backward(void *user, const amp_custom_call *call) {
    own *o = (own *)user;
    float sum = 0;
    o->backwards++;
    if (o->fail < 0) { own failing = *o; failing.fail = -o->fail; return own_failure(&failing, call); }
    o->nulls = (call->dx[0].data == NULL) + 2 * (call->dx[1].data == NULL) + 4 * (call->dx[2].data == NULL);
    for (int64_t i = 0; i < amp_tensor_count(&call->y); i++) {
        float dy = own_get(&call->dy, i) * own_weight(o);
        sum += own_get(&call->dy, i) * own_get(&call->y, i) / own_weight(o);
        if (call->dx[0].data) own_put(&call->dx[0], i, dy * own_get(&call->x[1], i));
        if (call->dx[1].data) own_put(&call->dx[1], i, dy * own_get(&call->x[0], i));
        if (call->dx[2].data) own_put(&call->dx[2], i, dy);
    }
    if (o->weight != NULL) *(float *)o->weight->grad.data = sum + (amp_param_accumulate(o->weight) ? *(float *)o->weight->grad.data : 0);
    return AMP_OK;
}
static amp_value own_call(own *o, amp_value a, amp_value b, amp_value c, int32_t op) {
    amp_custom_op call = {.op = op, .weight = o->weight, .forward = own_forward, .backward = own_backward, .user = o};
    amp_value in[3];
    in[0] = a; in[1] = b; in[2] = c;
    return amp_tape_custom(tape, in, c ? 3 : 2, &call);
}
static own plain_own;
static amp_value own_loss(own *o, int32_t op) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_value x = amp_tape_input(tape, &batch), h = amp_tape_linear(tape, x, w1, b1, AMP_ACT_NONE);
    return amp_tape_cross_entropy(tape, own_call(o, h, h, 0, op), labels, NULL);
}

static amp_result own_refused(amp_custom_op call, int32_t n) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_value in[4], y;
    CHECK_OK(amp_tape_begin(tape, NULL));
    in[0] = in[1] = in[2] = in[3] = amp_tape_input(tape, &batch);
    y = amp_tape_custom(tape, in, n, &call);
    CHECK_EQ(y, 0);
    return amp_tape_finish(tape);
}

TEST(operators_of_the_host) {
    static const struct { int fail; amp_result result; const char *text; } failures[] = {
        {1, AMP_ERR_RANGE, "amp_alloc"}, {2, AMP_ERR_SOURCE, "returned 7777"}, {3, AMP_ERR_STATE, "still open"},
        {4, AMP_ERR_STATE, "did not open this region"}, {5, AMP_ERR_STATE, "is running"}};
    amp_autocast_desc inference = {.mode = AMP_MODE_INFERENCE};
    amp_memory_info before, after;
    amp_value loss;
    float *gradients, value, again;
    int32_t op;
    own o = {.forwards = 0};
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    gradients = (float *)calloc(16384, 4);
    CHECK_OK(amp_operator_register(amp, "own", AMP_CAST_LOWER, &op));
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_backward(tape, own_loss(&o, op), NULL));
    CHECK(o.forwards == 1 && o.backwards == 1 && o.compute == AMP_BF16 && o.inside == AMP_BF16 && o.y.dtype == AMP_BF16 && o.nulls == 4);
    take_gradients(gradients);
    CHECK(gradients[0] < 0 || gradients[0] > 0);
    /* in an island, and in evaluation */
    inference.disable = 1;
    CHECK_OK(amp_tape_begin(tape, &inference));
    loss = own_loss(&o, op);
    CHECK_OK(amp_tape_finish(tape));
    CHECK(o.forwards == 2 && o.backwards == 1 && o.compute == AMP_F32 && o.inside == AMP_F32 && o.y.dtype == AMP_F32);
    CHECK_OK(amp_tape_read(tape, loss, &value, 1));
    /* a checkpoint computes it again, with the same bits */
    o.weight = b3;
    *(float *)b3->weight.data = 1.5f;
    for (int checkpoint = 0; checkpoint < 2; checkpoint++) {
        amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
        amp_value h;
        o.forwards = 0;
        CHECK_OK(amp_tape_begin(tape, NULL));
        h = amp_tape_input(tape, &batch);
        if (checkpoint) amp_tape_checkpoint_begin(tape);
        h = amp_tape_linear(tape, h, w1, b1, AMP_ACT_GELU);
        h = own_call(&o, h, h, h, op);
        h = amp_tape_linear(tape, h, w2, b2, AMP_ACT_RELU);
        if (checkpoint) amp_tape_checkpoint_end(tape);
        loss = amp_tape_cross_entropy(tape, amp_tape_linear(tape, h, w3, NULL, AMP_ACT_NONE), labels, NULL);
        CHECK_OK(amp_tape_backward(tape, loss, NULL));
        CHECK_OK(amp_tape_read(tape, loss, checkpoint ? &again : &value, 1));
        CHECK_EQ(o.forwards, 1 + checkpoint);
        CHECK(b3->grad_live && *(float *)b3->grad.data != 0);
        take_gradients(gradients + 8192 * checkpoint);
    }
    CHECK_EQ(memcmp(&value, &again, 4), 0);
    CHECK_EQ(memcmp(gradients, gradients + 8192, 8192 * 4), 0);
    /* callbacks that fail: their text, nothing leaks, the next step works */
    o.weight = NULL;
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_backward(tape, own_loss(&o, op), NULL));
    CHECK_OK(amp_memory(amp, &before));
    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++)
        for (int sign = -1; sign <= 1; sign += 2) {
            o.fail = sign * failures[i].fail;
            CHECK_OK(amp_tape_begin(tape, NULL));
            CHECK_ERR(amp_tape_backward(tape, own_loss(&o, op), NULL), failures[i].result);
            CHECK_MSG(strstr(amp_last_error(), failures[i].text) && strstr(amp_last_error(), sign > 0 ? "amp_tape_custom: forward" : "amp_tape_custom: backward"), "%s", amp_last_error());
            CHECK(!amp_autocast_active(amp, NULL));
        }
    o.fail = 6;                     /* destroys the tape: refused with a warning */
    CHECK_OK(amp_tape_begin(tape, NULL));
    (void)own_loss(&o, op);
    CHECK_OK(amp_tape_finish(tape));
    o.fail = 0;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, own_loss(&o, op), NULL));
    }
    CHECK_OK(amp_memory(amp, &after));
    CHECK_EQ(after.allocated, before.allocated);
    /* what is refused while recording */
    CHECK_ERR(own_refused((amp_custom_op){.backward = own_backward}, 1), AMP_ERR_NULL);
    CHECK_ERR(own_refused((amp_custom_op){.forward = own_forward}, 0), AMP_ERR_RANGE);
    CHECK_ERR(own_refused((amp_custom_op){.forward = own_forward}, 4), AMP_ERR_RANGE);
    CHECK_ERR(own_refused((amp_custom_op){.forward = own_forward, .ndim = 5}, 1), AMP_ERR_RANGE);
    CHECK_ERR(own_refused((amp_custom_op){.forward = own_forward, .ndim = 1, .shape = {-1}}, 1), AMP_ERR_SHAPE);
    CHECK_ERR(own_refused((amp_custom_op){.forward = own_forward, .dtype = AMP_I32}, 1), AMP_ERR_DTYPE);
    CHECK_ERR(own_refused((amp_custom_op){.forward = own_forward, .op = 9999, .layer = "mine"}, 1), AMP_ERR_NAME);
    /* without a backward nothing is reached through it */
    {
        amp_custom_op call = {.ndim = 2, .shape = {ROWS, HIDDEN}, .dtype = AMP_F32, .forward = own_forward, .user = &o};
        amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
        amp_value in[2];
        CHECK_OK(amp_tape_begin(tape, NULL));
        in[0] = amp_tape_input(tape, &batch);
        in[0] = in[1] = amp_tape_linear(tape, in[0], w1, b1, AMP_ACT_NONE);
        loss = amp_tape_cross_entropy(tape, amp_tape_custom(tape, in, 2, &call), labels, NULL);
        CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_CONFLICT);
    }
    free(gradients);
    close_context();
}

/* ---- Finite differences, in fp32: every operator between a variable and an mse loss */

enum { DB = 2, DT = 3, DC = 8, DN = DB * DT * DC };
typedef amp_value (*layer_of)(amp_value x);
static amp_param *dw, *dv;
static int32_t few_ids[DB * DT] = {1, 0, 3, 3, 2, 1};
static amp_value of_linear(amp_value x) { return amp_tape_linear(tape, x, dw, dv, AMP_ACT_GELU_ERF); }
static amp_value of_two_linears(amp_value x) { return amp_tape_linear(tape, amp_tape_linear(tape, x, dw, dv, AMP_ACT_GELU), dw, dv, AMP_ACT_NONE); }
static amp_value of_relu_and_stream(amp_value x) {
    amp_value h = amp_tape_linear(tape, x, dw, dv, AMP_ACT_GELU);
    return amp_tape_add(tape, amp_tape_add(tape, h, x), amp_tape_scale(tape, h, -0.5f));
}
static amp_value of_layernorm(amp_value x) { return amp_tape_add(tape, amp_tape_layernorm(tape, x, dv, dv + 1, 0), x); }
static amp_value of_rmsnorm(amp_value x) {
    amp_value s = amp_tape_add(tape, amp_tape_linear(tape, x, dw, NULL, AMP_ACT_NONE), x);
    return amp_tape_add(tape, amp_tape_rmsnorm(tape, s, dv, 0), s);
}
static amp_value of_softmax(amp_value x) { return amp_tape_softmax(tape, x, NULL); }
static amp_value of_activation(amp_value x) { return amp_tape_activation(tape, amp_tape_activation(tape, x, dv, AMP_ACT_SILU), NULL, AMP_ACT_TANH); }
static amp_value of_swiglu(amp_value x) { return amp_tape_swiglu(tape, x, amp_tape_linear(tape, x, dw, NULL, AMP_ACT_NONE)); }
static amp_value of_attention(amp_value x) {
    amp_attention_op causal = {.mask = {.kind = AMP_MASK_CAUSAL}};
    amp_value h = amp_tape_linear(tape, x, dw, dv, AMP_ACT_NONE);
    return amp_tape_attention(tape, amp_tape_rope(tape, x, 4, NULL), amp_tape_split(tape, h, 2, 0, 4), amp_tape_split(tape, h, 2, 4, 4), 4, &causal);
}
static amp_value of_matmul(amp_value x) {
    amp_value s = amp_tape_matmul(tape, x, x, 0, 1, 0.5f);
    return amp_tape_matmul(tape, s, amp_tape_transpose(tape, amp_tape_transpose(tape, x, 1, 2), 2, 1), 1, 0, 0);
}
static amp_value of_views(amp_value x) {
    static const int64_t shape[2] = {2 * DT, DB * DC};
    amp_value both = amp_tape_concat(tape, x, amp_tape_scale(tape, x, 3), 1);
    amp_value middle = amp_tape_split(tape, both, 1, 1, DT), half = amp_tape_split(tape, both, 2, 0, DC / 2);
    middle = amp_tape_add(tape, middle, amp_tape_concat(tape, amp_tape_split(tape, half, 1, 0, DT), amp_tape_split(tape, half, 1, DT, DT), 2));
    return amp_tape_reshape(tape, amp_tape_concat(tape, middle, x, 0), shape, 2);
}
/* Halves that are used twice, and halves that a sum takes. */
static amp_value of_halves(amp_value x) {
    amp_value h = amp_tape_linear(tape, x, dw, dv, AMP_ACT_NONE), l = amp_tape_split(tape, h, 2, 0, DC / 2), r = amp_tape_split(tape, h, 2, DC / 2, DC / 2);
    amp_value gated = amp_tape_swiglu(tape, l, r);
    h = amp_tape_concat(tape, amp_tape_add(tape, gated, l), r, 2);
    l = amp_tape_split(tape, h, 1, 0, 2);
    return amp_tape_concat(tape, amp_tape_add(tape, l, l), amp_tape_split(tape, h, 1, 2, 1), 1);
}
static amp_value of_middle(amp_value x) {
    amp_value part = amp_tape_split(tape, x, 1, 1, 2), sum = amp_tape_linear(tape, part, dw, dv, AMP_ACT_GELU);
    sum = amp_tape_add(tape, sum, amp_tape_layernorm(tape, part, dv, NULL, 0));
    sum = amp_tape_add(tape, sum, amp_tape_rmsnorm(tape, amp_tape_split(tape, x, 1, 0, 2), dv, 0));
    return amp_tape_add(tape, sum, amp_tape_swiglu(tape, part, amp_tape_split(tape, x, 1, 0, 2)));
}
static amp_value of_mean(amp_value x) { return amp_tape_mean(tape, amp_tape_linear(tape, x, dw, dv, AMP_ACT_NONE)); }
static amp_value of_embedding(amp_value x) {
    amp_tensor ids = amp_tensor2(few_ids, AMP_I32, DB, DT);
    return amp_tape_matmul(tape, amp_tape_add(tape, amp_tape_embedding(tape, &ids, dw, NULL), x), x, 0, 1, 0);
}
static amp_value of_custom(amp_value x) {
    amp_value h = amp_tape_linear(tape, x, dw, dv, AMP_ACT_NONE), part = amp_tape_split(tape, h, 2, 0, DC / 2);
    h = own_call(&plain_own, x, h, h, 0);
    part = own_call(&plain_own, part, amp_tape_split(tape, h, 2, DC / 2, DC / 2), 0, 0);
    return amp_tape_concat(tape, h, part, 2);
}

/* The loss with x; backward too, and the gradient of x to *out. */
static double loss_at(layer_of layer, const float *x, float *out) {
    static float zeros[4 * DN];
    amp_tensor batch = amp_tensor3(x, AMP_F32, DB, DT, DC), y, gradient;
    amp_value v, h, loss;
    float value = 0;
    CHECK_OK(amp_tape_begin(tape, NULL));
    v = amp_tape_variable(tape, &batch);
    h = layer(v);
    y = batch;
    CHECK_OK(amp_tape_tensor(tape, h, &y));
    y.data = zeros;
    memset(y.stride, 0, sizeof y.stride);
    loss = amp_tape_scale(tape, amp_tape_mse(tape, h, amp_tape_input(tape, &y), AMP_REDUCTION_SUM), 0.5f);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK_OK(amp_tape_read(tape, loss, &value, 1));
    CHECK_OK(amp_tape_gradient(tape, v, &gradient));
    if (out != NULL) memcpy(out, gradient.data, DN * 4);
    return (double)value;
}

TEST(finite_differences) {
    static const struct { const char *name; layer_of layer; } rows[] = {
        {"linear", of_linear}, {"two linears", of_two_linears}, {"stream", of_relu_and_stream}, {"layernorm", of_layernorm},
        {"rmsnorm", of_rmsnorm}, {"softmax", of_softmax}, {"activation", of_activation}, {"swiglu", of_swiglu},
        {"attention", of_attention}, {"views", of_views}, {"matmul", of_matmul}, {"mean", of_mean}, {"embedding", of_embedding}, {"custom", of_custom},
        {"middle", of_middle}, {"halves", of_halves}};
    float x[DN], moved[DN], gradient[DN];
    open_context(AMP_F32, AMP_LEVEL_O1);
    CHECK_OK(amp_model_create(amp, &model, 5, 0));
    dw = amp_model_param(model, "w", DC, DC, AMP_INIT_NORMAL, 0.5);
    dv = amp_model_param(model, "v", DC, 0, AMP_INIT_UNIFORM, 1);
    (void)amp_model_param(model, "u", DC, 0, AMP_INIT_UNIFORM, 1);
    for (int i = 0; i < DN; i++) x[i] = 2 * amp_random_uniform(8, (uint64_t)i) - 1;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        (void)loss_at(rows[r].layer, x, gradient);
        for (int direction = 0; direction < 4; direction++) {
            double expected = 0, step = 1.0 / 256, measured;
            for (int i = 0; i < DN; i++) {
                double d = amp_random_u32(20 + (uint64_t)direction, (uint64_t)i) & 1 ? step : -step;
                expected += (double)gradient[i] * d;
                moved[i] = x[i] + (float)d;
            }
            measured = loss_at(rows[r].layer, moved, NULL);
            for (int i = 0; i < DN; i++) moved[i] = 2 * x[i] - moved[i];
            measured = (measured - loss_at(rows[r].layer, moved, NULL)) / 2;
            CHECK_MSG(fabs(measured - expected) < 2e-3 * fabs(expected) + 2e-5 * (1 + fabs(loss_at(rows[r].layer, x, NULL))),
                      "%s: %g, by differences %g", rows[r].name, expected, measured);
        }
    }
    close_context();
}

/* ---- What one step leaves to the next */

/* fc1 and fc3 alone; the loss is alpha times the first plus the plain one of fc3. */
static amp_value two_losses(float first, float second) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_value h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE), loss;
    loss = amp_tape_scale(tape, amp_tape_scale(tape, amp_tape_cross_entropy(tape, h, labels, NULL), first), second);
    h = amp_tape_linear(tape, h, w3, b3, AMP_ACT_NONE);
    return amp_tape_add(tape, loss, amp_tape_cross_entropy(tape, h, labels, NULL));
}
TEST(a_loss_of_weight_0_has_no_gradient) {
    static float plain[4096], taped[4096];
    static const float pairs[3][2] = {{0, 1}, {1, 0}, {1e-30f, 1e-30f}};
    amp_value h, loss;
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    CHECK_OK(amp_tape_begin(tape, NULL));
    h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
    h = amp_tape_linear(tape, h, w3, b3, AMP_ACT_NONE);
    CHECK_OK(amp_tape_backward(tape, amp_tape_cross_entropy(tape, h, labels, NULL), NULL));
    take_gradients(plain);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, two_losses(pairs[i][0], pairs[i][1]), NULL));
        take_gradients(taped);
        CHECK(memcmp(taped, plain, sizeof taped) == 0);
    }
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = two_losses(1, 1);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    take_gradients(taped);
    CHECK(memcmp(taped, plain, sizeof taped) != 0);
    close_context();
}

TEST(freezing_is_seen_by_the_next_step) {
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    for (int step = 0; step < 3; step++) {
        CHECK_OK(amp_model_freeze(model, "fc1.*", step != 1));
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_GELU), NULL));
        CHECK_EQ(w1->grad_live, step == 1);
        CHECK_EQ(b1->grad_live, step == 1);
        CHECK_EQ(w2->grad_live, 1);
        w1->grad_live = b1->grad_live = w2->grad_live = 0;
    }
    close_context();
}

/* A step that fails half way leaves no gradients of its own, and no values of the step before. */
TEST(a_failed_step_leaves_nothing) {
    static float good[4096], taped[4096];
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_value x, loss = 0;
    float value;
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    for (int step = 0; step < 3; step++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        x = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
        x = amp_tape_linear(tape, x, w3, b3, AMP_ACT_NONE);
        loss = amp_tape_cross_entropy(tape, x, labels, NULL);
        if (step == 1) {
            void *data = w1->grad.data;
            w1->grad.data = inputs;     /* found when fc3's gradients are there */
            CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_CONFLICT);
            w1->grad.data = data;
            CHECK_EQ(w3->grad_live, 0);
            CHECK_EQ(w1->grad_live, 0);
            CHECK_ERR(amp_tape_read(tape, loss, &value, 1), AMP_ERR_STATE);
            continue;
        }
        CHECK_OK(amp_tape_backward(tape, loss, NULL));
        CHECK_OK(amp_tape_read(tape, loss, &value, 1));
        take_gradients(step ? taped : good);
    }
    CHECK(memcmp(good, taped, sizeof good) == 0);
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = mlp_loss(AMP_ACT_RELU);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = mlp_loss(AMP_ACT_RELU);
    amp_tape_checkpoint_begin(tape);
    CHECK_ERR(amp_tape_backward(tape, loss, NULL), AMP_ERR_STATE);
    CHECK_ERR(amp_tape_read(tape, loss, &value, 1), AMP_ERR_STATE);
    close_context();
}

/* A captured graph has the addresses of the tape's memory: when that is given back, it cannot be launched. */
static amp_result graph_begin(void *dev, void *stream) { (void)dev; (void)stream; return AMP_OK; }
static amp_result graph_end(void *dev, void *stream, void **graph) { (void)stream; *graph = dev; return AMP_OK; }
static amp_result graph_launch(void *dev, void *graph, void *stream) { (void)dev; (void)graph; (void)stream; return AMP_OK; }
static void graph_destroy(void *dev, void *graph) { (void)dev; (void)graph; }
TEST(a_graph_ends_with_the_memory_of_its_tape) {
    static float many[64 * ROWS * IN], gradients[4096];
    amp_backend device = *amp_cpu();
    amp_desc desc = {.dtype = AMP_F32, .threads = 1, .backend = &device};
    amp_graph *graph;
    amp_state *state;
    CHECK_OK(amp_state_create(&state, NULL));
    device.graph_begin = graph_begin;   device.graph_end = graph_end;
    device.graph_launch = graph_launch; device.graph_destroy = graph_destroy;
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_tape_create(amp, &tape, NULL));
    make_mlp();
    for (int larger = 0; larger < 2; larger++) {
        for (int step = 0; step < 2; step++) {
            if (step == 1) CHECK_OK(amp_graph_begin(amp));
            CHECK_OK(amp_tape_begin(tape, NULL));
            CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_GELU), NULL));
            take_gradients(gradients);
        }
        CHECK_ERR(amp_model_save(model, state, "m"), AMP_ERR_STATE);        /* it waits */
        CHECK_ERR(amp_model_load(model, state, "m"), AMP_ERR_STATE);
        CHECK_OK(amp_graph_end(amp, &graph));
        CHECK_OK(amp_graph_launch(graph));
        if (larger == 0) {
            amp_tensor batch = amp_tensor2(many, AMP_F32, 64 * ROWS, IN);
            CHECK_OK(amp_tape_begin(tape, NULL));
            (void)amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
            CHECK_OK(amp_tape_finish(tape));
        } else { amp_tape_destroy(tape); tape = NULL; }
        CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
        amp_graph_destroy(graph);
    }
    amp_state_destroy(state);
    close_context();
}

/* In a checkpoint: a sum that a norm computes which the loss does not reach, and a view that nobody takes. */
static void stretch_run(int checkpoint, float *gradients, float *view) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_value x, s, u, part, loss;
    CHECK_OK(amp_tape_begin(tape, NULL));
    x = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
    if (checkpoint) amp_tape_checkpoint_begin(tape);
    s = amp_tape_add(tape, amp_tape_linear(tape, x, w2, b2, AMP_ACT_NONE), x);
    (void)amp_tape_layernorm(tape, s, NULL, NULL, 0);
    u = amp_tape_activation(tape, s, NULL, AMP_ACT_GELU);
    part = amp_tape_split(tape, u, 0, 0, 1);
    u = amp_tape_linear(tape, u, w2, NULL, AMP_ACT_NONE);
    if (checkpoint) amp_tape_checkpoint_end(tape);
    loss = amp_tape_cross_entropy(tape, amp_tape_linear(tape, u, w3, b3, AMP_ACT_NONE), labels, NULL);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK_OK(amp_tape_read(tape, part, view, HIDDEN));
    take_gradients(gradients);
}
TEST(checkpoints_compute_what_unused_values_share) {
    static float gradients[2][4096], view[2][HIDDEN];
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    for (int i = 0; i < 2; i++) stretch_run(i, gradients[i], view[i]);
    CHECK(memcmp(gradients[0], gradients[1], sizeof gradients[0]) == 0);
    CHECK(memcmp(view[0], view[1], sizeof view[0]) == 0);
    close_context();
}

/* ---- Random graphs: plain, with checkpoints and with every value kept they have the same bits */

enum { GR = 6, GC = 8, G_NODES = 16, G_PARAMS = 12 };
typedef enum graph_way { G_PLAIN, G_CHECKPOINTS, G_KEPT, G_KEPT_CHECKPOINTS, G_WAYS } graph_way;
enum { G_GRADIENTS = 1 + GR * GC + 4 * GC * GC + 8 * GC };
static uint64_t graph_seed, graph_drawn;
static float graph_input[GR * GC];
static int graph_smooth;            /* 1: without RELU */
static int64_t draw(int64_t n) { return (int64_t)(amp_random_u32(graph_seed, graph_drawn++) % (uint32_t)n); }

/* One more value, [GR, GC], of those there are. */
static amp_value graph_node(const amp_value *v, int64_t n) {
    static const int64_t flat[2] = {GR, GC}, other[2] = {GC, GR};
    static const amp_activation_kind of_linears[] = {AMP_ACT_NONE, AMP_ACT_NONE, AMP_ACT_GELU, AMP_ACT_GELU_ERF, AMP_ACT_RELU};
    amp_value x = v[draw(3) ? n - 1 : draw(n)], y = v[draw(n)];
    amp_param *w = dw + draw(4), *b = dw + 5 + draw(7);
    int64_t act = draw(5), none = draw(4) == 0;
    if (graph_smooth && act == 4) act = 3;
    switch (draw(13)) {
        case 0: case 1: return amp_tape_linear(tape, x, w, none ? NULL : b, of_linears[act]);
        case 2: return amp_tape_layernorm(tape, x, b, none ? NULL : dw + 4, 0);
        case 3: return amp_tape_rmsnorm(tape, x, b, 0);
        case 4: case 5: return amp_tape_add(tape, x, y);
        case 6: return amp_tape_activation(tape, x, none ? b : NULL, graph_smooth && act + 1 == AMP_ACT_RELU ? AMP_ACT_SILU : (amp_activation_kind)(act + 1));
        case 7: return amp_tape_softmax(tape, x, NULL);
        case 8: return amp_tape_swiglu(tape, x, y);
        case 9: return amp_tape_scale(tape, x, 0.5f);
        case 10: return amp_tape_reshape(tape, amp_tape_transpose(tape, x, 0, 1), flat, 2);
        case 11:
            y = amp_tape_split(tape, x, 1, 0, GC / 2);
            x = amp_tape_split(tape, x, 1, GC / 2, GC / 2);
            if (none) y = amp_tape_swiglu(tape, y, x);
            return act < 2 ? amp_tape_concat(tape, amp_tape_add(tape, x, y), y, 1) : amp_tape_concat(tape, x, y, 1);
        default: return amp_tape_reshape(tape, amp_tape_reshape(tape, x, other, 2), flat, 2);
    }
}
/* Parameters as they were told of, and their gradients at that time. */
static struct { amp_param *params[64]; float gradients[64][HIDDEN * HIDDEN]; int n; amp_result fails; } told;
static amp_result tell(void *user, amp_param *p) {
    CHECK(user == &told && p->grad_live);
    told.params[told.n] = p;
    memcpy(told.gradients[told.n++], p->grad.data, (size_t)amp_tensor_count(&p->grad) * 4);
    return told.fails;
}
static int times_told(const amp_param *p) {
    int times = 0;
    for (int i = 0; i < told.n; i++) times += told.params[i] == p;
    return times;
}
/* Each once, with the gradient that it has in the end. */
static void check_told(amp_param *params, int64_t n) {
    for (int64_t i = 0; i < n; i++) CHECK_MSG(times_told(&params[i]) == params[i].grad_live, "%s", params[i].name);
    for (int i = 0; i < told.n; i++)
        CHECK_MSG(memcmp(told.gradients[i], told.params[i]->grad.data, (size_t)amp_tensor_count(&told.params[i]->grad) * 4) == 0, "%s", told.params[i]->name);
}

static amp_value graph_record(graph_way way, amp_value *v, int64_t *n_values) {
    static float zeros[GR * GC];
    amp_tensor batch = amp_tensor2(graph_input, AMP_F32, GR, GC), target = amp_tensor2(zeros, AMP_F32, GR, GC), t;
    int64_t n = 0, nodes, open = 0, from;
    graph_drawn = 0;
    nodes = 3 + draw(G_NODES - 2);
    CHECK_OK(amp_tape_begin(tape, NULL));
    v[n++] = amp_tape_variable(tape, &batch);
    while (n <= nodes) {
        if (draw(4) == 0) {
            int checkpoints = way == G_CHECKPOINTS || way == G_KEPT_CHECKPOINTS;
            if (checkpoints && open) amp_tape_checkpoint_end(tape);
            open = !open;
            if (checkpoints && open) amp_tape_checkpoint_begin(tape);
        }
        v[n] = graph_node(v, n);
        n++;
    }
    if (open && (way == G_CHECKPOINTS || way == G_KEPT_CHECKPOINTS)) amp_tape_checkpoint_end(tape);
    for (int64_t i = 1; i < n && way >= G_KEPT; i++) (void)amp_tape_keep(tape, v[i]);
    from = draw(3) ? n - 1 : n - 2;
    CHECK_OK(amp_tape_tensor(tape, v[from], &t));
    target.dtype = t.dtype;
    *n_values = n;
    return amp_tape_mse(tape, v[from], amp_tape_input(tape, &target), AMP_REDUCTION_SUM);
}
static void graph_run(graph_way way, float *gradients, float *values, int64_t *n_values) {
    amp_value v[G_NODES + 2], loss;
    amp_tensor t;
    int64_t n;
    amp_result r;
    loss = graph_record(way, v, &n);
    told.n = 0;
    r = amp_tape_backward(tape, loss, NULL);
    CHECK_MSG(r == AMP_OK, "graph %d, way %d: %s", (int)graph_seed, (int)way, amp_last_error());
    if (r != AMP_OK) return;
    check_told(dw, G_PARAMS);
    CHECK_OK(amp_tape_read(tape, loss, gradients++, 1));
    memset(gradients, 0, GR * GC * 4);
    if (amp_tape_gradient(tape, v[0], &t) == AMP_OK) memcpy(gradients, t.data, GR * GC * amp_dtype_size(t.dtype));
    gradients += GR * GC;
    for (int i = 0; i < G_PARAMS; i++) {
        int64_t count = amp_tensor_count(&dw[i].weight);
        memset(gradients, 0, (size_t)count * 4);
        if (dw[i].grad_live) memcpy(gradients, dw[i].grad.data, (size_t)count * 4);
        dw[i].grad_live = 0;
        gradients += count;
    }
    for (int64_t i = 1; i < n; i++, values += GR * GC) {
        memset(values, 0, GR * GC * 4);
        CHECK_OK(amp_tape_tensor(tape, v[i], &t));
        n_values[i] = t.data != NULL;
        if (t.data) CHECK_OK(amp_tape_read(tape, v[i], values, GR * GC));
    }
    *n_values = n;
}

static void graph_start(void) {
    for (int i = 0; i < GR * GC; i++) graph_input[i] = 2 * amp_random_uniform(31, (uint64_t)i) - 1;
}
static void graph_parameters(void) {
    amp_tape_desc desc = {.grad_ready = tell, .user = &told};
    char name[8];
    CHECK_OK(amp_tape_create(amp, &tape, &desc));
    CHECK_OK(amp_model_create(amp, &model, 5, 0));
    for (int i = 0; i < G_PARAMS; i++) {
        amp_param *p;
        snprintf(name, sizeof name, "p%d", i);
        p = amp_model_param(model, name, GC, i < 4 ? GC : 0, AMP_INIT_UNIFORM, 0.7);
        if (i == 0) dw = p;
    }
}

/* In fp32, along a direction: what all ways of computing a gradient get wrong, no comparison of theirs shows. */
TEST(random_graphs_by_finite_differences) {
    static float gradients[G_GRADIENTS], moved[G_GRADIENTS], values[(G_NODES + 1) * GR * GC];
    int64_t there[G_NODES + 2];
    amp_desc desc = {.dtype = AMP_F32, .threads = 1};
    CHECK_OK(amp_open(&amp, &desc));
    graph_parameters();
    graph_smooth = 1;
    for (int64_t trial = 0; trial < 4000; trial++) {
        double expected = 0, measured[2], step = 1.0 / 512;
        graph_seed = (uint64_t)(5000 + trial);
        graph_start();
        graph_run(G_PLAIN, gradients, values, there);
        for (int side = 0; side < 2; side++) {
            graph_start();
            for (int i = 0; i < GR * GC; i++) {
                double d = amp_random_u32(40, (uint64_t)i) & 1 ? step : -step;
                expected += side ? 0 : (double)gradients[1 + i] * d;
                graph_input[i] += (float)(side ? -d : d);
            }
            graph_run(G_PLAIN, moved, values, there);
            measured[side] = (double)moved[0];
        }
        measured[0] = (measured[0] - measured[1]) / 2;
        CHECK_MSG(fabs(measured[0] - expected) < 1e-2 * fabs(expected) + 1e-5 * fabs((double)gradients[0]), "graph %d: %g, by differences %g",
                  (int)graph_seed, expected, measured[0]);
    }
    graph_smooth = 0;
    close_context();
}

static int64_t same_graphs = 3000;      /* of each precision; --full: 50,000 in all */

TEST(random_graphs_have_the_same_bits_in_every_way) {
    static float gradients[G_WAYS][G_GRADIENTS], values[G_WAYS][G_NODES + 1][GR * GC];
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16, AMP_F16};
    int64_t there[G_WAYS][G_NODES + 2], compared = 0;
    graph_start();
    for (int d = 0; d < 3; d++) {
        amp_desc desc = {.dtype = dtypes[d], .threads = 1};
        CHECK_OK(amp_open(&amp, &desc));
        graph_parameters();
        for (int64_t trial = 0; trial < same_graphs; trial++) {
            graph_seed = (uint64_t)(1000 + trial);
            CHECK_OK(amp_model_freeze(model, "p*", 0));
            if (trial % 3 == 1) CHECK_OK(amp_model_freeze(model, "p0", 1));
            if (trial % 3 == 1) CHECK_OK(amp_model_freeze(model, "p5", 1));
            for (int way = 0; way < G_WAYS; way++) {
                graph_run((graph_way)way, gradients[way], values[way][0], there[way]);
                CHECK_MSG(memcmp(gradients[way], gradients[0], sizeof gradients[0]) == 0, "graph %d in %s, way %d: gradients",
                          (int)graph_seed, amp_dtype_name(dtypes[d]), way);
            }
            for (int64_t i = 1; i < there[0][0]; i++)
                for (int way = 0; way < G_WAYS; way++) {
                    compared += there[way][i];
                    CHECK(way < G_KEPT || there[way][i]);
                    CHECK_MSG(!there[way][i] || memcmp(values[way][i - 1], values[G_KEPT][i - 1], sizeof values[0][0]) == 0,
                              "graph %d in %s, way %d: value %d", (int)graph_seed, amp_dtype_name(dtypes[d]), way, (int)i);
                }
        }
        close_context();
    }
    CHECK(compared > 1000);
}

/* ---- Gradients that are told of when they are final */

static amp_result fail_told(void *user, amp_param *p) { (void)user; (void)p; return amp_tape_begin(tape, NULL); }
static amp_result strange_told(void *user, amp_param *p) { (void)user; (void)p; return (amp_result)77; }
static amp_result open_told(void *user, amp_param *p) { (void)user; (void)p; return amp_autocast_begin(amp, NULL); }

/* which: bits: w2 twice, w2 in a checkpoint, a fused loss, b1 frozen. */
static void told_step(int which, amp_result expected) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_value h, loss;
    CHECK_OK(amp_model_freeze(model, "fc1.bias", which >> 3 & 1));
    told.n = 0;
    CHECK_OK(amp_tape_begin(tape, NULL));
    h = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_GELU);
    if (which & 2) amp_tape_checkpoint_begin(tape);
    h = amp_tape_linear(tape, h, w2, b2, AMP_ACT_RELU);
    if (which & 1) h = amp_tape_linear(tape, h, w2, NULL, AMP_ACT_GELU);
    if (which & 2) amp_tape_checkpoint_end(tape);
    if (which & 4) loss = amp_tape_linear_cross_entropy(tape, h, w3, b3, labels, NULL);
    else loss = amp_tape_cross_entropy(tape, amp_tape_linear(tape, h, w3, b3, AMP_ACT_NONE), labels, NULL);
    CHECK_EQ(amp_tape_backward(tape, loss, NULL), expected);
}
static void told_tape(amp_result (*grad_ready)(void *user, amp_param *param)) {
    amp_tape_desc desc = {.grad_ready = grad_ready, .user = &told};
    amp_tape_destroy(tape);
    CHECK_OK(amp_tape_create(amp, &tape, &desc));
}
TEST(gradients_are_told_when_they_are_final) {
    amp_param *params;
    int64_t n;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    CHECK_OK(amp_model_params(model, &params, &n));
    told_tape(tell);
    for (int which = 0; which < 16; which++)
        for (int micro = 0; micro < 2; micro++) {       /* the second adds to the first, and tells anew */
            amp_param *order[] = {w3, b3, w2, b2, w1, b1};
            if (which & 1) { order[2] = b2; order[3] = w2; }    /* ... or with w2: see below */
            told_step(which, AMP_OK);
            CHECK_EQ(told.n, which & 8 ? 5 : 6);
            check_told(params, n);
            for (int i = 0; i < told.n; i++)
                CHECK_MSG(told.params[i] == order[i] || ((which & 1) && (i == 2 || i == 3)), "%d: %d is %s", which, i, told.params[i]->name);
            if (micro) for (int64_t i = 0; i < n; i++) params[i].grad_live = 0;
        }
    /* what fails in it ends the step, and the next one is whole */
    told.fails = AMP_ERR_SOURCE;
    told_step(0, AMP_ERR_SOURCE);
    CHECK(strstr(amp_last_error(), "amp_tape_backward: fc3.weight: grad_ready returned") != NULL && told.n == 1 && !w3->grad_live && !w1->grad_live);
    told.fails = AMP_OK;
    told_step(0, AMP_OK);
    check_told(params, n);
    told_tape(strange_told);
    told_step(0, AMP_ERR_SOURCE);
    CHECK(strstr(amp_last_error(), "grad_ready returned 77") != NULL);
    told_tape(open_told);
    told_step(0, AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "a region is still open") != NULL && !amp_autocast_active(amp, NULL));
    told_tape(fail_told);
    told_step(0, AMP_ERR_STATE);
    CHECK(strstr(amp_last_error(), "its callback must not begin a step") != NULL);
    close_context();
}

/* ---- Budgets: the tape chooses what to compute again; the bits stay */

enum { DEEP = 6, DEEP_C = 16, DEEP_B = 2, DEEP_T = 12, DEEP_ROW = 12, DEEP_PARAMS = 4 + DEEP * DEEP_ROW, DEEP_FLOATS = 32768 };
static int32_t deep_ids[DEEP_B * DEEP_T];
static amp_param *deep_params;
static int64_t deep_n;
static float deep_p;                /* of dropout */
static int deep_checkpoint;         /* 1: the first block is one by hand */
static void deep_open(const amp_desc *desc) {
    static const char *const names[DEEP_ROW] = {"ln1.weight", "ln1.bias", "qkv.weight", "qkv.bias", "proj.weight", "proj.bias", "ln2.weight", "ln2.bias", "up.weight", "up.bias", "down.weight", "down.bias"};
    static const int64_t sizes[DEEP_ROW][2] = {{1, 0}, {1, 0}, {3, 1}, {3, 0}, {1, 1}, {1, 0}, {1, 0}, {1, 0}, {4, 1}, {4, 0}, {1, 4}, {1, 0}};
    char name[32];
    CHECK_OK(amp_open(&amp, desc));
    CHECK_OK(amp_model_create(amp, &model, 3, 0));
    (void)amp_model_param(model, "ids", OUT, DEEP_C, AMP_INIT_NORMAL, 0.5);
    (void)amp_model_param(model, "ln.weight", DEEP_C, 0, AMP_INIT_NORM_WEIGHT, 0);
    (void)amp_model_param(model, "ln.bias", DEEP_C, 0, AMP_INIT_NORM_BIAS, 0);
    (void)amp_model_param(model, "head.weight", OUT, DEEP_C, AMP_INIT_NORMAL, 0.2);
    for (int i = 0; i < DEEP; i++)
        for (int k = 0; k < DEEP_ROW; k++) {
            snprintf(name, sizeof name, "b%d.%s", i, names[k]);
            (void)amp_model_param(model, name, DEEP_C * sizes[k][0], DEEP_C * sizes[k][1], strncmp(names[k], "ln", 2) != 0 ? AMP_INIT_NORMAL : strstr(names[k], "weight") ? AMP_INIT_NORM_WEIGHT : AMP_INIT_NORM_BIAS, strncmp(names[k], "ln", 2) ? 0.2 : 0);
        }
    CHECK_OK(amp_model_params(model, &deep_params, &deep_n));
    for (int i = 0; i < DEEP_B * DEEP_T; i++) deep_ids[i] = (int32_t)(amp_random_u32(8, (uint64_t)i) % OUT);
}
static amp_value deep_loss(void) {
    amp_attention_op causal = {.mask = {.kind = AMP_MASK_CAUSAL}};
    amp_tensor ids = amp_tensor2(deep_ids, AMP_I32, DEEP_B, DEEP_T);
    amp_param *p = deep_params;
    amp_value x = amp_tape_embedding(tape, &ids, p, NULL), h, q, k, v;
    for (int i = 0; i < DEEP; i++) {
        p = deep_params + 4 + i * DEEP_ROW;
        if (deep_checkpoint && i == 0) amp_tape_checkpoint_begin(tape);
        h = amp_tape_linear(tape, amp_tape_layernorm(tape, x, p, p + 1, 0), p + 2, p + 3, AMP_ACT_NONE);
        q = amp_tape_split(tape, h, 2, 0, DEEP_C);
        k = amp_tape_split(tape, h, 2, DEEP_C, DEEP_C);
        v = amp_tape_split(tape, h, 2, 2 * DEEP_C, DEEP_C);
        h = amp_tape_linear(tape, amp_tape_attention(tape, q, k, v, 4, &causal), p + 4, p + 5, AMP_ACT_NONE);
        if (deep_p > 0) h = amp_tape_dropout(tape, h, deep_p);
        x = amp_tape_add(tape, x, h);
        h = amp_tape_linear(tape, amp_tape_layernorm(tape, x, p + 6, p + 7, 0), p + 8, p + 9, AMP_ACT_GELU);
        x = amp_tape_add(tape, x, amp_tape_linear(tape, h, p + 10, p + 11, AMP_ACT_NONE));
        if (deep_checkpoint && i == 0) amp_tape_checkpoint_end(tape);
    }
    p = deep_params;
    x = amp_tape_layernorm(tape, x, p + 1, p + 2, 0);
    return amp_tape_linear_cross_entropy(tape, x, p + 3, NULL, deep_ids, NULL);
}
static void deep_tape(int64_t budget) {
    amp_tape_desc desc = {.memory_budget = budget};
    amp_tape_destroy(tape);
    CHECK_OK(amp_tape_create(amp, &tape, &desc));
}
/* `micro` micro-steps; their gradients.  Returns the bytes that the tape took, by the context's count. */
static int64_t deep_step(int micro, float *out, amp_result expected) {
    amp_memory_info before, after;
    amp_result r = AMP_OK;
    CHECK_OK(amp_memory(amp, &before));
    for (int i = 0; i < micro && r == AMP_OK; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        r = amp_tape_backward(tape, deep_loss(), NULL);
    }
    CHECK_EQ(r, expected);
    CHECK_OK(amp_memory(amp, &after));
    for (int64_t i = 0; i < deep_n; out += amp_tensor_count(&deep_params[i++].weight)) {
        memcpy(out, deep_params[i].grad.data, (size_t)amp_tensor_count(&deep_params[i].weight) * 4);
        deep_params[i].grad_live = 0;
    }
    return after.allocated - after.cast_cache - before.allocated + before.cast_cache;
}
static int64_t deep_plan(void) {
    int64_t bytes = 0;
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_plan(tape, deep_loss(), &bytes));
    return bytes;
}
static int64_t least_of(const char *text) {
    const char *at = strstr(text, "at least ");
    CHECK_MSG(at != NULL && strstr(text, ".memory_budget = ") != NULL, "%s", text);
    return at ? atoll(at + 9) : 0;
}

TEST(budgets_hold_with_the_same_bits) {
    static const struct { amp_dtype dtype; amp_level level; float p; int checkpoint, micro; } rows[] = {
        {AMP_F32, AMP_LEVEL_O1, 0, 0, 1}, {AMP_BF16, AMP_LEVEL_O1, 0.25f, 0, 2}, {AMP_F16, AMP_LEVEL_O2, 0, 1, 1},
        {AMP_FP8, AMP_LEVEL_O1, 0.25f, 1, 2}, {AMP_F32, AMP_LEVEL_O0, 0.25f, 1, 1}, {AMP_BF16, AMP_LEVEL_O3, 0, 0, 1}};
    static float plain[DEEP_FLOATS], other[DEEP_FLOATS];
    static char texts[2][40000];
    int32_t by_hand[400];
    for (size_t row = 0; row < sizeof rows / sizeof *rows; row++) {
        amp_desc desc = {.dtype = rows[row].dtype, .level = rows[row].level, .threads = 1, .seed = 4};
        amp_state *random;
        int64_t full, least, taken, before = INT64_MAX, again = 0;
        deep_p = rows[row].p;
        deep_checkpoint = rows[row].checkpoint;
        deep_open(&desc);
        CHECK_OK(amp_state_create(&random, NULL));
        CHECK_OK(amp_random_save(amp, random, "r"));
        deep_tape(0);
        full = deep_plan();
        (void)deep_step(rows[row].micro, plain, AMP_OK);
        deep_tape(1);
        CHECK_OK(amp_random_load(amp, random, "r"));
        CHECK_EQ(deep_step(1, other, AMP_ERR_MEMORY), 0);
        least = least_of(amp_last_error());
        CHECK_MSG(least < full * 2 / 3, "least %lld of %lld", (long long)least, (long long)full);
        deep_tape(least - 1);
        (void)deep_step(1, other, AMP_ERR_MEMORY);
        for (int64_t eighth = 8; eighth >= 0; eighth--) {
            int64_t budget = least + (full - least) * eighth / 8, n = 0;
            amp_tape_node_info node;
            deep_tape(budget);
            CHECK(deep_plan() <= budget);
            CHECK_OK(amp_random_load(amp, random, "r"));
            taken = deep_step(rows[row].micro, other, AMP_OK);
            CHECK_MSG(taken <= budget, "%lld bytes of a budget of %lld", (long long)taken, (long long)budget);
            CHECK_MSG(memcmp(plain, other, sizeof plain) == 0, "row %d, budget %lld of %lld", (int)row, (long long)budget, (long long)full);
            (void)amp_tape_text(tape, texts[0], sizeof texts[0]);
            for (int64_t i = 0; amp_tape_node(tape, i, &node) == AMP_OK; i++) {
                n += node.stretch > 0;
                if (eighth == 8) by_hand[i] = node.stretch;
                else CHECK_MSG(by_hand[i] == 0 || node.stretch == by_hand[i], "node %d", (int)i);      /* checkpoints stay */
            }
            CHECK((strstr(texts[0], "computed again in stretch") != NULL) == (n > 0));
            CHECK(eighth < 8 || n == 0 || deep_checkpoint);
            CHECK(eighth > 0 || n > 0);
            if (eighth == 7) again = n;
            CHECK_MSG(eighth > 0 || n > 8 * again || deep_checkpoint, "%lld nodes again, %lld with the most", (long long)n, (long long)again);
            before = taken < before ? taken : before;
            /* a second tape, and a second step, have the same, and take no more memory */
            CHECK_EQ(deep_step(1, other, AMP_OK), 0);
            deep_tape(budget);
            CHECK_OK(amp_random_load(amp, random, "r"));
            (void)deep_step(rows[row].micro, other, AMP_OK);
            (void)amp_tape_text(tape, texts[1], sizeof texts[1]);
            CHECK(strcmp(texts[0], texts[1]) == 0 && memcmp(plain, other, sizeof plain) == 0);
        }
        CHECK(before <= least);
        /* evaluation needs less, and has no stretches to choose */
        CHECK_OK(amp_tape_begin(tape, NULL));
        (void)deep_loss();
        CHECK_OK(amp_tape_finish(tape));
        (void)amp_tape_text(tape, texts[0], sizeof texts[0]);
        CHECK(strstr(texts[0], "computed again") == NULL);
        deep_tape(1);
        CHECK_OK(amp_tape_begin(tape, NULL));
        (void)deep_loss();
        CHECK_ERR(amp_tape_finish(tape), AMP_ERR_MEMORY);
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_ERR(amp_tape_plan(tape, deep_loss(), &full), AMP_ERR_MEMORY);
        amp_state_destroy(random);
        close_context();
    }
    deep_p = 0;
    deep_checkpoint = 0;
}

TEST(random_graphs_fit_their_budgets) {
    static float gradients[2][G_GRADIENTS], values[(G_NODES + 1) * GR * GC];
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16, AMP_F16};
    int64_t there[G_NODES + 2], chosen = 0;
    graph_start();
    for (int d = 0; d < 3; d++) {
        amp_desc desc = {.dtype = dtypes[d], .threads = 1};
        CHECK_OK(amp_open(&amp, &desc));
        graph_parameters();
        for (int64_t trial = 0; trial < 100; trial++) {
            graph_way way = trial % 3 == 2 ? G_CHECKPOINTS : G_PLAIN;
            amp_value v[G_NODES + 2];
            int64_t n, full = 0, least, bytes = 0;
            graph_seed = (uint64_t)(9000 + trial);
            told_tape(tell);
            CHECK_OK(amp_tape_plan(tape, graph_record(way, v, &n), &full));
            graph_run(way, gradients[0], values, there);
            deep_tape(1);
            CHECK_ERR(amp_tape_backward(tape, graph_record(way, v, &n), NULL), AMP_ERR_MEMORY);
            least = least_of(amp_last_error());
            for (int64_t budget = least; budget <= full; budget += (full - least) / 3 + 256) {
                amp_tape_desc td = {.memory_budget = budget, .grad_ready = tell, .user = &told};
                amp_tape_destroy(tape);
                CHECK_OK(amp_tape_create(amp, &tape, &td));
                CHECK_OK(amp_tape_plan(tape, graph_record(way, v, &n), &bytes));
                CHECK(bytes <= budget);
                graph_run(way, gradients[1], values, there);
                CHECK_MSG(memcmp(gradients[0], gradients[1], sizeof gradients[0]) == 0, "graph %d in %s, %lld of %lld bytes", (int)graph_seed,
                          amp_dtype_name(dtypes[d]), (long long)budget, (long long)full);
                chosen += bytes < full;
            }
        }
        close_context();
    }
    CHECK(chosen > 100);
}

/* ---- One function that records, for amp_verify, amp_gradcheck and amp_tune, and nothing else */

enum { RECORD_WELL, RECORD_WRONG_GRADIENT, RECORD_OVERFLOW, RECORD_MISFIT, RECORD_NO_LOSS, RECORD_NO_PARAMS };
static int record_prepared;
static amp_result wrong_forward(void *user, const amp_custom_call *call) {
    (void)user;
    return amp_copy(call->amp, call->y.data, call->x[0].data, amp_tensor_count(&call->x[0]) * (int64_t)amp_dtype_size(call->y.dtype), AMP_COPY_ON_DEVICE);
}
static amp_result wrong_backward(void *user, const amp_custom_call *call) {
    (void)user;
    for (int64_t i = 0; i < amp_tensor_count(&call->dy); i++) own_put(&call->dx[0], i, 1.25f * own_get(&call->dy, i));
    return AMP_OK;
}
static amp_value record_mlp(void *user, amp_tape *t) {
    int how = *(int *)user;
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_custom_op wrong = {.forward = wrong_forward, .backward = wrong_backward};
    amp_value h = amp_tape_input(t, &batch);
    if (how == RECORD_NO_PARAMS) return amp_tape_mse(t, amp_tape_variable(t, &batch), h, AMP_REDUCTION_MEAN);
    h = amp_tape_linear(t, h, w1, b1, AMP_ACT_GELU);
    if (how == RECORD_WRONG_GRADIENT) h = amp_tape_custom(t, &h, 1, &wrong);
    h = amp_tape_dropout(t, amp_tape_linear(t, h, how == RECORD_MISFIT ? w3 : w2, b2, AMP_ACT_GELU), 0.25f);
    if (how == RECORD_OVERFLOW) h = amp_tape_scale(t, amp_tape_scale(t, h, 1e5f), 1e-5f);
    if (how == RECORD_NO_LOSS) return h;
    return amp_tape_linear_cross_entropy(t, h, w3, b3, labels, NULL);
}
static int record_prepare(void *user, amp_context *a, int64_t batch) {
    (void)a;
    CHECK(*(int *)user == RECORD_WELL);
    record_prepared += (int)batch;
    return 0;
}
static int record_step(void *user, amp_context *a) { (void)user; (void)a; return 0; }
TEST(one_function_is_verified_checked_and_tuned) {
    static float weights[3][HIDDEN * HIDDEN];
    static amp_verify_report verified;
    static amp_tune_report tuned;
    amp_gradcheck_report checked;
    const amp_dtype dtypes[] = {AMP_BF16, AMP_F16};
    int how = RECORD_WELL;
    amp_verify_desc v = {.record = record_mlp, .user = &how};
    amp_verify_desc all = {.record = NULL};
    amp_gradcheck_desc g = {.record = record_mlp, .user = &how};
    amp_tune_desc t = {.record = record_mlp, .user = &how, .iterations = 2, .warmup = 1, .verify = &all, .prepare = record_prepare, .batch = 2};
    amp_model *second;
    amp_param *others, *kept;
    int64_t blocks[2];
    amp_memory_info memory;
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    memcpy(weights[0], w2->weight.data, sizeof weights[0]);
    for (int i = 0; i < HIDDEN * HIDDEN; i++) weights[1][i] = ((float *)w2->grad.data)[i] = (float)i;
    w2->grad_live = 1;                                              /* a sum that goes on afterwards */
    CHECK_OK(amp_memory(amp, &memory));
    blocks[0] = memory.allocated - memory.cast_cache;
    CHECK_OK(amp_verify(amp, &v, &verified));
    CHECK(verified.n_rows >= 1);
    for (int64_t i = 0; i < verified.n_rows; i++)
        CHECK_MSG(verified.rows[i].verdict == AMP_VERDICT_PASS && verified.rows[i].output_error > 0 && verified.rows[i].gradient_error > 0 &&
                  strcmp(verified.rows[i].worst_output, "loss") == 0, "%s: %s", amp_dtype_name(verified.rows[i].dtype), verified.rows[i].advice);
    memcpy(weights[2], w2->weight.data, sizeof weights[2]);
    CHECK(memcmp(weights[0], weights[2], sizeof weights[0]) == 0 && w2->grad_live == 1 && !w1->grad_live);
    CHECK(memcmp(weights[1], w2->grad.data, sizeof weights[1]) == 0);
    w2->grad_live = 0;
    CHECK_OK(amp_gradcheck(amp, &g, &checked));
    CHECK_MSG(checked.passed && checked.detectable < 0.2 && checked.worst[0] != 0, "%s: %g %g", checked.worst, checked.found, checked.expected);
    CHECK(memcmp(weights[0], w2->weight.data, sizeof weights[0]) == 0 && !w2->grad_live);
    CHECK_OK(amp_tune(amp, &t, &tuned));
    /* fp32, and what else this machine computes in */
    CHECK(tuned.n_rows >= 1 && tuned.best >= 0 && tuned.rows[0].seconds > 0 && record_prepared >= tuned.n_rows && !w2->grad_live);
    t.verify = NULL;
    CHECK_OK(amp_tune(amp, &t, &tuned));
    CHECK(tuned.best >= 0 && !w2->grad_live && !b1->grad_live);
    CHECK_OK(amp_memory(amp, &memory));
    blocks[1] = memory.allocated - memory.cast_cache;
    CHECK_EQ(blocks[1], blocks[0]);
    /* what is wrong is found, by name */
    how = RECORD_WRONG_GRADIENT;
    CHECK_OK(amp_gradcheck(amp, &g, &checked));
    CHECK_MSG(!checked.passed && strncmp(checked.worst, "fc1", 3) == 0, "%s", checked.worst);
    how = RECORD_OVERFLOW;
    v.dtypes = dtypes;
    v.n_dtypes = 2;
    CHECK_OK(amp_verify(amp, &v, &verified));
    CHECK(verified.rows[0].verdict == AMP_VERDICT_PASS && verified.rows[1].verdict == AMP_VERDICT_NONFINITE);
    how = RECORD_MISFIT;
    CHECK_ERR(amp_verify(amp, &v, &verified), AMP_ERR_SHAPE);
    CHECK_MSG(strstr(amp_last_error(), "amp_verify: ") != NULL && strstr(amp_last_error(), "fc3.weight") != NULL, "%s", amp_last_error());
    CHECK_ERR(amp_gradcheck(amp, &g, &checked), AMP_ERR_SHAPE);
    how = RECORD_NO_LOSS;
    CHECK_ERR(amp_verify(amp, &v, &verified), AMP_ERR_SHAPE);
    CHECK_ERR(amp_gradcheck(amp, &g, &checked), AMP_ERR_SHAPE);
    how = RECORD_NO_PARAMS;
    CHECK_ERR(amp_verify(amp, &v, &verified), AMP_ERR_NULL);
    CHECK_MSG(strstr(amp_last_error(), ".record") != NULL, "%s", amp_last_error());
    /* parameters of two models are named by the caller */
    how = RECORD_WELL;
    CHECK_OK(amp_model_create(amp, &second, 1, 0));
    others = amp_model_param(second, "second.bias", HIDDEN, 0, AMP_INIT_ZEROS, 0);
    kept = b1;
    b1 = others;
    CHECK_ERR(amp_verify(amp, &v, &verified), AMP_ERR_CONFLICT);
    b1 = kept;
    CHECK_MSG(strstr(amp_last_error(), "second.bias") != NULL, "%s", amp_last_error());
    v.step = record_step;
    CHECK_ERR(amp_verify(amp, &v, &verified), AMP_ERR_CONFLICT);
    t.step = v.step; g.forward = v.step;
    CHECK_ERR(amp_tune(amp, &t, &tuned), AMP_ERR_CONFLICT);
    CHECK_ERR(amp_gradcheck(amp, &g, &checked), AMP_ERR_CONFLICT);
    g.forward = NULL; g.n_outputs = 1;
    CHECK_ERR(amp_gradcheck(amp, &g, &checked), AMP_ERR_CONFLICT);
    amp_model_destroy(second);
    CHECK_OK(amp_memory(amp, &memory));
    CHECK_EQ(memory.allocated - memory.cast_cache, blocks[0]);
    close_context();
}

/* ---- Random programs: calls in any order, on any tape, from any thread, with values of others and of earlier steps.  Each
   ends in a result, nothing stays open or allocated, and then a step has the bits that it always had. */

enum { P_TAPES = 3, P_VALUES = 24, P_OLD = 32, P_CALLS = 60 };
static struct {
    amp_tape *tapes[P_TAPES];
    amp_value values[P_TAPES][P_VALUES], loss[P_TAPES], old[P_OLD];
    int64_t n[P_TAPES], n_old, results[2], runs;
} prog;
static amp_value any_value(int at) {
    if (draw(80) == 0) return draw(3) ? prog.old[draw(P_OLD)] : (amp_value)draw(1000);
    if (draw(120) == 0) at = (int)draw(P_TAPES);
    return prog.n[at] > 0 ? prog.values[at][draw(prog.n[at])] : 0;
}
static amp_result program_result(amp_result r) {
    CHECK_MSG(r == AMP_OK || (strcmp(amp_result_text(r), "unknown result") != 0 && amp_last_error()[0] != 0), "%d: %s", (int)r, amp_last_error());
    prog.results[r != AMP_OK]++;
    return r;
}
static void program_record(int at) {
    static float zeros[GR * GC];
    amp_tensor batch = amp_tensor2(graph_input, AMP_F32, GR, GC), target = amp_tensor2(zeros, AMP_F32, GR, GC), like;
    amp_value v[P_VALUES], made;
    int64_t n = prog.n[at];
    for (int64_t i = 0; i < n; i++) v[i] = draw(60) ? prog.values[at][i] : any_value(at);
    if (n == 0 || draw(12) == 0) made = draw(2) ? amp_tape_variable(tape, &batch) : amp_tape_input(tape, &batch);
    else if (draw(12) == 0) made = amp_tape_concat(tape, any_value(at), any_value(at), (int32_t)draw(3));
    else made = graph_node(v, n);
    if (made != 0 && n < P_VALUES) prog.values[at][prog.n[at]++] = made;
    if (n > 0 && amp_tape_tensor(tape, v[n - 1], &like) == AMP_OK) target.dtype = like.dtype;
    if (n > 0 && draw(3) == 0) prog.loss[at] = amp_tape_mse(tape, v[n - 1], amp_tape_input(tape, &target), AMP_REDUCTION_MEAN);
    prog.old[prog.n_old++ % P_OLD] = made;
}
static void program_call(int at) {
    static char text[512];
    amp_autocast_desc region = {.mode = draw(6) == 0 ? AMP_MODE_INFERENCE : AMP_MODE_DEFAULT, .dtype = draw(2) ? AMP_F32 : AMP_BF16};
    amp_tape_desc desc = {.memory_budget = draw(2) ? 0 : 256 * (1 + draw(40)), .grad_ready = draw(2) ? tell : NULL, .user = &told};
    amp_tape_node_info info;
    amp_value loss = draw(8) ? prog.loss[at] : any_value(at);
    amp_tensor t;
    int64_t bytes;
    tape = prog.tapes[at];
    told.n = 0;
    if (tape == NULL && draw(10)) {
        program_result(amp_tape_create(amp, &prog.tapes[at], &desc));
        tape = prog.tapes[at];
    }
    if (prog.n[at] == 0 && draw(10) && program_result(amp_tape_begin(tape, draw(2) ? &region : NULL)) == AMP_OK) prog.loss[at] = 0;
    switch (draw(30)) {
        case 0:
            if (tape != NULL) amp_tape_destroy(tape);
            prog.tapes[at] = NULL;
            prog.n[at] = 0;
            break;
        case 1:
            if (program_result(amp_tape_begin(tape, draw(2) ? &region : NULL)) == AMP_OK) prog.n[at] = 0, prog.loss[at] = 0;
            break;
        case 5: (void)amp_tape_keep(tape, any_value(at)); break;
        case 6:
            amp_tape_checkpoint_begin(tape);
            if (draw(8)) { (void)amp_tape_activation(tape, any_value(at), NULL, AMP_ACT_GELU); amp_tape_checkpoint_end(tape); }
            break;
        case 7: if (draw(8) == 0) amp_tape_checkpoint_end(tape); break;
        case 2: case 3:
            prog.runs += program_result(amp_tape_backward(tape, loss, NULL)) == AMP_OK;
            if (draw(4)) prog.n[at] = 0;            /* and perhaps twice */
            break;
        case 11: (void)program_result(amp_tape_forward(tape, loss, NULL)); break;
        case 12: if (draw(3) == 0) (void)program_result(amp_tape_finish(tape)); break;
        case 13: if (draw(3) == 0) (void)program_result(amp_tape_plan(tape, draw(3) ? loss : 0, &bytes)); break;
        case 14:
            (void)program_result(amp_tape_tensor(tape, any_value(at), &t));
            (void)program_result(amp_tape_gradient(tape, any_value(at), &t));
            break;
        case 15:
            (void)amp_tape_text(tape, text, sizeof text);
            (void)amp_tape_dot(tape, text, sizeof text);
            if (tape != NULL) (void)program_result(amp_tape_node(tape, draw(30), &info));
            break;
        case 16: if (draw(4) == 0) (void)program_result(draw(2) ? amp_autocast_begin(amp, &region) : amp_autocast_end(amp)); break;
        case 17: amp_tape_store(tape, (amp_dtype)draw(8)); break;
        case 18: if (tape != NULL) (void)program_result(amp_tape_time(tape, (int32_t)draw(2))); break;
        case 19: (void)program_result(amp_model_freeze(model, draw(2) ? "p0" : "p*", (int32_t)(draw(4) == 0))); break;
        default: for (int i = 0; i < 3; i++) program_record(at);
    }
}
static void *program_elsewhere(void *at) { program_call(*(int *)at); return NULL; }

TEST(random_programs) {
    static float first[G_GRADIENTS], after[G_GRADIENTS], values[(G_NODES + 1) * GR * GC];
    int64_t there[G_NODES + 2];
    amp_memory_info memory;
    int64_t bytes[2] = {0, 0};
    amp_desc desc = {.dtype = AMP_BF16, .threads = 1, .logger.level = AMP_LOG_OFF};
    CHECK_OK(amp_open(&amp, &desc));
    graph_parameters();
    amp_tape_destroy(tape);
    for (int64_t program = 0; program < 3000; program++) {
        if (program % 100 == 0) {               /* the step that all programs leave as it was */
            graph_seed = 1003;
            graph_start();
            CHECK_OK(amp_model_freeze(model, "p*", 0));
            tape = NULL;
            told_tape(tell);
            graph_run(G_PLAIN, program ? after : first, values, there);
            amp_tape_destroy(tape);
            CHECK_MSG(!program || memcmp(first, after, sizeof first) == 0, "after program %d", (int)program);
            CHECK_OK(amp_memory(amp, &memory));
            bytes[program > 0] = memory.allocated - memory.cast_cache;
            CHECK_EQ(bytes[program > 0], bytes[0]);
        }
        memset(prog.tapes, 0, sizeof prog.tapes);
        memset(prog.n, 0, sizeof prog.n);
        graph_seed = (uint64_t)(70000 + program);
        graph_drawn = 0;
        for (int i = 0; i < P_CALLS; i++) {
            int at = (int)(draw(4) ? 0 : draw(P_TAPES));
            pthread_t thread;
            if (draw(50)) program_call(at);
            else CHECK(pthread_create(&thread, NULL, program_elsewhere, &at) == 0 && pthread_join(thread, NULL) == 0);
        }
        for (int i = 0; i < P_TAPES; i++) amp_tape_destroy(prog.tapes[i]);
        for (int i = 0; i < P_CALLS && amp_autocast_active(amp, NULL); i++) CHECK_OK(amp_autocast_end(amp));
        CHECK(!amp_autocast_active(amp, NULL));
        for (int i = 0; i < G_PARAMS; i++) dw[i].grad_live = 0;
    }
    CHECK_MSG(prog.runs > 500 && prog.results[0] > 5000 && prog.results[1] > 5000, "%d backwards, %d calls that worked, %d that failed",
              (int)prog.runs, (int)prog.results[0], (int)prog.results[1]);
    tape = NULL;
    close_context();
}

/* ---- Edges */


enum { AB = 2, AT = 5, AH = 4, AG = 2, AD = 4 };
/* Masks per head go with their heads where several share one of k and v: as with a copy of k and v for each. */
TEST(grouped_heads_have_their_own_masks) {
    static float q[AB * AT * AH * AD], k[AB * AT * AG * AD], each[AB * AT * AH * AD], zeros[AB * AT * AH * AD];
    static float grouped[AB * AT * AH * AD], output[AB * AT * AH * AD];
    static uint8_t allowed[AB * AH * AT * AT];
    amp_tensor query = amp_tensor3(q, AMP_F32, AB, AT, AH * AD), key = amp_tensor3(k, AMP_F32, AB, AT, AG * AD), out;
    amp_tensor copies = amp_tensor3(each, AMP_F32, AB, AT, AH * AD), zero = amp_tensor3(zeros, AMP_F32, AB, AT, AH * AD);
    amp_attention_op options = {.mask = {.kind = AMP_MASK_ARBITRARY, .allowed = allowed,
                                         .allowed_batch_stride = AH * AT * AT, .allowed_head_stride = AT * AT}};
    open_context(AMP_F32, AMP_LEVEL_O1);
    for (int i = 0; i < AB * AT * AH * AD; i++) q[i] = amp_random_uniform(21, (uint64_t)i) - 0.5f;
    for (int i = 0; i < AB * AT * AG * AD; i++) k[i] = amp_random_uniform(22, (uint64_t)i) - 0.5f;
    for (int i = 0; i < AB * AT * AH * AD; i++) each[i] = k[i / (AH * AD) * AG * AD + i / AD % AH / (AH / AG) * AD + i % AD];
    for (int i = 0; i < AB * AH * AT * AT; i++) allowed[i] = (uint8_t)(amp_random_u32(23, (uint64_t)i) & 1);
    for (int which = 0; which < 2; which++) {
        amp_value x, other, y;
        CHECK_OK(amp_tape_begin(tape, NULL));
        x = amp_tape_variable(tape, &query);
        other = amp_tape_input(tape, which ? &copies : &key);
        y = amp_tape_keep(tape, amp_tape_attention(tape, x, other, other, AH, &options));
        CHECK_OK(amp_tape_backward(tape, amp_tape_mse(tape, y, amp_tape_input(tape, &zero), AMP_REDUCTION_SUM), NULL));
        CHECK_OK(amp_tape_tensor(tape, y, &out));
        if (which) CHECK(memcmp(output, out.data, sizeof output) == 0);
        memcpy(output, out.data, sizeof output);
        CHECK_OK(amp_tape_gradient(tape, x, &out));
        if (which) CHECK(memcmp(grouped, out.data, sizeof grouped) == 0);
        memcpy(grouped, out.data, sizeof grouped);
    }
    close_context();
}

TEST(middle_parts_and_empty_batches) {
    amp_linear_cross_entropy_op fused = {.reduction = AMP_REDUCTION_SUM};
    amp_tensor all = amp_tensor3(inputs, AMP_F32, 2, 4, IN), none = amp_tensor2(inputs, AMP_F32, 0, IN);
    amp_tensor huge = amp_tensor2(inputs, AMP_F32, INT64_C(1) << 27, INT64_C(1) << 30), scores;
    amp_value x, loss;
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    scores = amp_tensor3(inputs, AMP_F32, 2, 4, OUT);
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = amp_tape_cross_entropy(tape, amp_tape_split(tape, amp_tape_variable(tape, &scores), 1, 1, 2), labels, NULL);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    x = amp_tape_split(tape, amp_tape_variable(tape, &all), 1, 1, 2);
    CHECK_OK(amp_tape_backward(tape, amp_tape_linear_cross_entropy(tape, x, w1, NULL, labels, &fused), NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    x = amp_tape_linear(tape, amp_tape_linear(tape, amp_tape_input(tape, &none), w1, b1, AMP_ACT_GELU), w2, b2, AMP_ACT_NONE);
    CHECK_OK(amp_tape_backward(tape, amp_tape_cross_entropy(tape, x, labels, NULL), NULL));
    /* more bytes together than an address has */
    CHECK_OK(amp_tape_begin(tape, NULL));
    x = amp_tape_input(tape, &huge);
    for (int i = 2; i < 20; i++) (void)amp_tape_scale(tape, x, (float)i);
    CHECK_ERR(amp_tape_finish(tape), AMP_ERR_SIZE);
    close_context();
}

/* The host's rounding changes neither weights nor gradients. */
TEST(rounding_stays_outside) {
    static float by_nearest[4096], taped[4096], weights[2][HIDDEN * IN];
    for (int i = 0; i < 2; i++) {
        amp_value loss;
        amp_tensor batch = amp_tensor3(inputs, AMP_F32, ROWS / 3, 3, IN);
        fesetround(i ? FE_UPWARD : FE_TONEAREST);
        open_context(AMP_F32, AMP_LEVEL_O1);
        make_mlp();
        memcpy(weights[i], w1->weight.data, sizeof weights[i]);
        CHECK_OK(amp_tape_begin(tape, NULL));
        loss = amp_tape_linear(tape, amp_tape_mean(tape, amp_tape_input(tape, &batch)), w1, b1, AMP_ACT_RELU);
        loss = amp_tape_cross_entropy(tape, loss, labels, &(amp_cross_entropy_op){.factor = 0.3f});
        CHECK_OK(amp_tape_backward(tape, amp_tape_scale(tape, amp_tape_scale(tape, loss, 0.1f), 0.7f), NULL));
        take_gradients(i ? taped : by_nearest);
        close_context();
        fesetround(FE_TONEAREST);
    }
    CHECK(memcmp(weights[0], weights[1], sizeof *weights) == 0);
    CHECK(memcmp(taped, by_nearest, sizeof taped) == 0);
}

/* The graph's text outlives models, and a tape its context; neither reads what is gone. */
TEST(text_after_the_end) {
    char text[2000];
    amp_value h;
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_backward(tape, plain_loss(&h), NULL));
    CHECK(amp_tape_text(tape, text, sizeof text) == strlen(text) && strstr(text, "linear fc1.weight [24, 32]") != NULL);
    amp_model_destroy(model);
    model = NULL;
    CHECK(amp_tape_text(tape, text, sizeof text) > 0 && strstr(text, "linear [24, 32]") != NULL);
    amp_close(amp);
    CHECK(amp_tape_text(tape, text, sizeof text) > 0 && strcmp(text, "0 values, 0 calls of backward, 0 bytes\n") == 0);
    CHECK(amp_tape_dot(tape, text, sizeof text) > 0 && strstr(text, "n0") == NULL);
    amp_tape_destroy(tape);
}

/* One optimizer at a time; weights loaded before it are said to have lost bits, unless they lose none. */
TEST(models_and_their_optimizers) {
    for (int level = AMP_LEVEL_O1; level <= AMP_LEVEL_O2; level++) {
        amp_desc desc = {.dtype = AMP_BF16, .level = (amp_level)level, .threads = 1};
        amp_optimizer *first, *second;
        amp_optimizer_desc od = {.lr = 0.1};
        amp_state *state;
        void *master;
        logged[0] = 0;
        desc.logger.write = keep_log;
        CHECK_OK(amp_open(&amp, &desc));
        make_mlp();
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_model_save(model, state, "m"));
        CHECK_OK(amp_model_load(model, state, "m"));
        CHECK_OK(amp_model_params(model, &od.params, &od.n_params));
        CHECK_OK(amp_optimizer_create(amp, &first, &od));
        CHECK_MSG((strstr(logged, "1049 amp_optimizer_create: 6 16-bit weights") != NULL) == (level == AMP_LEVEL_O2), "%s", logged);
        master = w1->master;
        CHECK_ERR(amp_optimizer_create(amp, &second, &od), AMP_ERR_CONFLICT);
        CHECK(strstr(amp_last_error(), "fc1.weight") != NULL && second == NULL && w1->master == master);
        logged[0] = 0;
        CHECK_OK(amp_model_load(model, state, "m"));
        amp_optimizer_destroy(first);
        CHECK_OK(amp_optimizer_create(amp, &second, &od));
        CHECK_MSG(logged[0] == 0, "%s", logged);
        amp_optimizer_destroy(second);
        amp_state_destroy(state);
        amp_model_destroy(model);
        model = NULL;
        amp_close(amp);
    }
}

/* Objects of different kinds do not overwrite one another's records. */
TEST(one_prefix_for_all) {
    static const amp_dtype ladder[] = {AMP_BF16, AMP_F32};
    amp_optimizer_desc od = {.lr = 0.1};
    amp_adapt_desc ad = {.ladder = ladder, .n_ladder = 2};
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    amp_adapt *adapt;
    amp_state *state;
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    CHECK_OK(amp_model_params(model, &od.params, &od.n_params));
    ad.params = od.params; ad.n_params = od.n_params;
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &od));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    CHECK_OK(amp_adapt_create(amp, &adapt, &ad));
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_model_save(model, state, "x"));
    CHECK_OK(amp_optimizer_save(optimizer, state, "x"));
    CHECK_OK(amp_scaler_save(scaler, state, "x"));
    CHECK_OK(amp_adapt_save(adapt, state, "x"));
    CHECK_OK(amp_random_save(amp, state, "x"));
    CHECK_OK(amp_fp8_save(amp, state, "x"));
    CHECK_OK(amp_model_load(model, state, "x"));
    CHECK_OK(amp_optimizer_load(optimizer, state, "x"));
    CHECK_OK(amp_scaler_load(scaler, state, "x"));
    CHECK_OK(amp_adapt_load(adapt, state, "x"));
    CHECK_OK(amp_random_load(amp, state, "x"));
    CHECK_OK(amp_fp8_load(amp, state, "x"));
    amp_state_destroy(state);
    amp_adapt_destroy(adapt);
    amp_scaler_destroy(scaler);
    amp_optimizer_destroy(optimizer);
    close_context();
}

/* What is the tape's is not given to its losses; the scale is given once; no step comes between the halves. */
TEST(scales_and_halves) {
    amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
    amp_optimizer_desc od = {.lr = 0.1};
    amp_optimizer *optimizer;
    static float by_one[4096], by_two[4096];
    float scale = 64, other = 1, loss[2];
    amp_cross_entropy_op options[] = {{.grad_scale = &scale}, {.loss = loss}};
    amp_linear_cross_entropy_op fused[] = {{.grad_scale = &scale}, {.loss = loss}};
    amp_value v;
    open_context(AMP_F32, AMP_LEVEL_O1);
    make_mlp();
    for (int i = 0; i < 4; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        v = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
        v = i < 2 ? amp_tape_cross_entropy(tape, v, labels, &options[i])
                  : amp_tape_linear_cross_entropy(tape, v, w3, b3, labels, &fused[i - 2]);
        CHECK(v == 0);
        CHECK_ERR(amp_tape_backward(tape, v, NULL), AMP_ERR_CONFLICT);
        CHECK_MSG(strstr(amp_last_error(), "amp_tape_backward") && strstr(amp_last_error(), "options"), "%s", amp_last_error());
    }
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_GELU), &scale));
    take_gradients(by_one);
    CHECK_OK(amp_model_params(model, &od.params, &od.n_params));
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &od));
    CHECK_OK(amp_tape_begin(tape, NULL));
    v = mlp_loss(AMP_ACT_GELU);
    CHECK_OK(amp_tape_forward(tape, v, &scale));
    CHECK_ERR(amp_step(optimizer, NULL), AMP_ERR_STATE);
    CHECK_ERR(amp_tape_backward(tape, v, &other), AMP_ERR_CONFLICT);
    CHECK_OK(amp_tape_backward(tape, v, &scale));
    take_gradients(by_two);
    CHECK(memcmp(by_one, by_two, sizeof by_one) == 0);
    CHECK_OK(amp_step(optimizer, NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_ERR(amp_tape_backward(tape, 0, NULL), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "loss is 0, no value") != NULL);
    amp_optimizer_destroy(optimizer);
    close_context();
}

/* Models go before what uses them: they stay, with a word. */
TEST(models_destroyed_too_early) {
    for (int which = 0; which < 4; which++) {
        static const char *const users[] = {"an optimizer", "a tape's step", "a tape's step", "an amp_adapt"};
        static const amp_dtype ladder[] = {AMP_BF16, AMP_F32};
        amp_desc desc = {.dtype = AMP_F32, .threads = 1, .logger.write = keep_log};
        amp_optimizer_desc od = {.lr = 0.1};
        amp_adapt_desc ad = {.ladder = ladder, .n_ladder = 2};
        amp_adapt_record record;
        amp_optimizer *optimizer = NULL;
        amp_adapt *adapt = NULL;
        amp_value v = 0;
        CHECK_OK(amp_open(&amp, &desc));
        CHECK_OK(amp_tape_create(amp, &tape, NULL));
        make_mlp();
        CHECK_OK(amp_model_params(model, &od.params, &od.n_params));
        if (which == 0) CHECK_OK(amp_optimizer_create(amp, &optimizer, &od));
        if (which == 3) {
            ad.params = od.params; ad.n_params = od.n_params;
            CHECK_OK(amp_adapt_create(amp, &adapt, &ad));
        }
        CHECK_OK(amp_tape_begin(tape, NULL));
        v = mlp_loss(AMP_ACT_GELU);
        if (which != 1) CHECK_OK(amp_tape_forward(tape, v, NULL));
        if (which == 0 || which == 3) CHECK_OK(amp_tape_backward(tape, v, NULL));
        logged[0] = 0;
        amp_model_destroy(model);
        CHECK_MSG(strstr(logged, "1106 amp_model_destroy: ") && strstr(logged, users[which]), "%d: %s", which, logged);
        if (which == 0) CHECK_OK(amp_step(optimizer, NULL));
        if (which == 1 || which == 2) CHECK_OK(amp_tape_backward(tape, v, NULL));
        if (which == 3) CHECK_OK(amp_adapt_layer(adapt, 0, &record));
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_GELU), NULL));
        amp_optimizer_destroy(optimizer);
        amp_adapt_destroy(adapt);
        amp_tape_destroy(tape);
        logged[0] = 0;
        amp_close(amp);
        CHECK_MSG(logged[0] == 0, "%d: %s", which, logged);
    }
    model = NULL; tape = NULL;
}

/* A parameter that comes after the optimizer, and what a model and a tensor cannot hold. */
TEST(late_and_impossible_parameters) {
    amp_desc desc = {.dtype = AMP_F32, .threads = 1, .logger.write = keep_log};
    amp_optimizer_desc od = {.lr = 0.1};
    amp_optimizer *optimizer;
    amp_tensor t = {0}, batch = amp_tensor3(inputs, AMP_F32, 2, 3, 4);
    int64_t shape[1] = {4};
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_tape_create(amp, &tape, NULL));
    make_mlp();
    CHECK_OK(amp_model_params(model, &od.params, &od.n_params));
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &od));
    logged[0] = 0;
    CHECK(amp_model_param(model, "late", 3, 3, AMP_INIT_ZEROS, 0) != NULL);
    CHECK_MSG(strstr(logged, "1105 amp_model_param: late is added after amp_optimizer_create") != NULL, "%s", logged);
    CHECK_ERR(amp_model_freeze(model, "late", 7), AMP_ERR_RANGE);
    CHECK(amp_model_param(model, "vast", 3, 3, AMP_INIT_CONSTANT, 1e300) == NULL);
    CHECK_ERR(amp_model_params(model, &od.params, &od.n_params), AMP_ERR_RANGE);
    CHECK_ERR(amp_tensor_create(amp, &t, AMP_FP8, shape, 1), AMP_ERR_DTYPE);
    CHECK_ERR(amp_tensor_create(amp, &t, AMP_TF32, shape, 1), AMP_ERR_DTYPE);
    CHECK(t.data == NULL);
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK(amp_tape_rope(tape, amp_tape_input(tape, &batch), INT64_MAX, NULL) == 0);
    CHECK_ERR(amp_tape_finish(tape), AMP_ERR_SHAPE);
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK(amp_tape_split(tape, amp_tape_input(tape, &batch), 1, INT64_MAX, 1) == 0);
    CHECK_ERR(amp_tape_finish(tape), AMP_ERR_SHAPE);
    amp_optimizer_destroy(optimizer);
    close_context();
}

/* ---- The life of a gradient: two networks, two optimizers, one loss through both (a GAN) */

enum { GAN_ROWS = 8, GAN_Z = 3, GAN_X = 4 };
static struct {
    amp_model *g, *d;
    amp_param *wg, *wd;
    amp_optimizer *og, *od;
    float z[GAN_ROWS * GAN_Z], real[GAN_ROWS * GAN_X], fake[GAN_ROWS * GAN_X];
    int32_t zeros[GAN_ROWS], ones[GAN_ROWS];
} gan;

static void gan_open(int32_t accumulation) {
    amp_optimizer_desc o = {.kind = AMP_SGD, .lr = 0.5, .result_lag = AMP_LAG_NONE};
    open_context(AMP_F32, AMP_LEVEL_O1);
    memset(&gan, 0, sizeof gan);
    CHECK_OK(amp_model_create(amp, &gan.g, 1, 0));
    CHECK_OK(amp_model_create(amp, &gan.d, 2, 0));
    gan.wg = amp_model_param(gan.g, "g", GAN_X, GAN_Z, AMP_INIT_NORMAL, 0.7);
    gan.wd = amp_model_param(gan.d, "d", 2, GAN_X, AMP_INIT_NORMAL, 0.7);
    CHECK_OK(amp_model_params(gan.g, &o.params, &o.n_params));
    CHECK_OK(amp_optimizer_create(amp, &gan.og, &o));
    CHECK_OK(amp_model_params(gan.d, &o.params, &o.n_params));
    o.accumulation = accumulation;
    CHECK_OK(amp_optimizer_create(amp, &gan.od, &o));
    for (int i = 0; i < GAN_ROWS * GAN_Z; i++) gan.z[i] = sinf(1.7f * (float)i);
    for (int i = 0; i < GAN_ROWS * GAN_X; i++) gan.real[i] = cosf(0.9f * (float)i);
    for (int i = 0; i < GAN_ROWS; i++) gan.ones[i] = 1;
}
static void gan_close(void) {
    amp_optimizer_destroy(gan.og);
    amp_optimizer_destroy(gan.od);
    amp_model_destroy(gan.g);
    amp_model_destroy(gan.d);
    close_context();
}
static amp_value gan_loss(const float *x, const int32_t *truth) {
    amp_tensor in = amp_tensor2(x, AMP_F32, GAN_ROWS, GAN_X);
    return amp_tape_cross_entropy(tape, amp_tape_linear(tape, amp_tape_input(tape, &in), gan.wd, NULL, AMP_ACT_NONE), truth, NULL);
}
/* The discriminator's backward, from real rows and from what the generator makes; and the generator's, through both. */
static amp_result gan_discriminator(const float *scale) {
    amp_autocast_desc inference = {.mode = AMP_MODE_INFERENCE};
    amp_tensor z = amp_tensor2(gan.z, AMP_F32, GAN_ROWS, GAN_Z);
    amp_value y, a, b;
    CHECK_OK(amp_tape_begin(tape, &inference));
    y = amp_tape_linear(tape, amp_tape_input(tape, &z), gan.wg, NULL, AMP_ACT_NONE);
    CHECK_OK(amp_tape_finish(tape));
    CHECK_OK(amp_tape_read(tape, y, gan.fake, GAN_ROWS * GAN_X));
    CHECK_OK(amp_tape_begin(tape, NULL));
    a = gan_loss(gan.real, gan.ones);
    b = gan_loss(gan.fake, gan.zeros);
    return amp_tape_backward(tape, amp_tape_add(tape, a, b), scale);
}
static amp_result gan_generator(const float *scale) {
    amp_tensor z = amp_tensor2(gan.z, AMP_F32, GAN_ROWS, GAN_Z);
    amp_value y;
    CHECK_OK(amp_tape_begin(tape, NULL));
    y = amp_tape_linear(tape, amp_tape_input(tape, &z), gan.wg, NULL, AMP_ACT_NONE);
    y = amp_tape_linear(tape, y, gan.wd, NULL, AMP_ACT_NONE);
    return amp_tape_backward(tape, amp_tape_cross_entropy(tape, y, gan.ones, NULL), scale);
}
static int says(const char *a, const char *b) { return strstr(amp_last_error(), a) != NULL && strstr(amp_last_error(), b) != NULL; }

/* Three rounds from the same weights give PyTorch's numbers (2.15, in fp64: SGD, optD.zero_grad() before each backward of the
   discriminator), with each of the three ways to keep the generator's loss out of the discriminator. */
TEST(a_gan_trains_as_in_pytorch) {
    static const double d[] = {-1.62262132681437, -0.12265144631171866, 0.2507285956283992, -0.39844409525745156,
                               -0.2845912403856299, 0.3673877084117187, -0.7413643776283994, 0.6338687762374516};
    static const double g[] = {0.1902978029311869, 1.4583032048788316, 0.4543108844848645, 0.48235246542714405, -1.0182056375792952, 0.30283760590468506,
                               -0.17198418762424228, 0.9163832359471041, -0.9772516625226388, 0.41113278918635654, -0.4195317106151294, -0.25666698440489477};
    static const double norms[] = {0.5120229908573606, 0.5155913216577875, 0.4455453472543164};
    amp_step_result result;
    for (int way = 0; way < 3; way++) {
        gan_open(1);
        for (int round = 0; round < 3; round++) {
            if (way == 0) CHECK_OK(amp_optimizer_zero_grad(gan.od));
            if (way == 1) CHECK_OK(amp_model_zero_grad(gan.d));
            CHECK(!gan.wd->grad_live);
            CHECK_OK(gan_discriminator(NULL));
            CHECK_OK(amp_step(gan.od, NULL));
            CHECK(amp_step_result_next(gan.od, &result) && fabs((double)result.norm - norms[round]) < 1e-6);
            if (way == 2) CHECK_OK(amp_model_freeze(gan.d, "*", 1));
            CHECK_OK(gan_generator(NULL));
            CHECK_OK(amp_step(gan.og, NULL));
            if (way == 2) CHECK_OK(amp_model_freeze(gan.d, "*", 0));
        }
        for (int i = 0; i < 2 * GAN_X; i++) CHECK(fabs((double)((float *)gan.wd->weight.data)[i] - d[i]) < 1e-6);
        for (int i = 0; i < GAN_X * GAN_Z; i++) CHECK(fabs((double)((float *)gan.wg->weight.data)[i] - g[i]) < 1e-6);
        gan_close();
    }
}

/* Without any of the three the discriminator's next backward is refused, before it runs, and the ways out are named. */
TEST(what_another_step_left_is_not_added_to) {
    float kept[2 * GAN_X];
    static float dx[GAN_ROWS * GAN_X];
    gan_open(1);
    CHECK_OK(gan_discriminator(NULL));
    CHECK_OK(amp_step(gan.od, NULL));
    CHECK_OK(gan_generator(NULL));
    CHECK_OK(gan_generator(NULL));                                  /* no step in between: it adds, as in PyTorch */
    CHECK_OK(amp_step(gan.og, NULL));
    CHECK(gan.wd->grad_live && !gan.wg->grad_live);
    memcpy(kept, gan.wd->grad.data, sizeof kept);
    CHECK_ERR(gan_discriminator(NULL), AMP_ERR_STATE);
    CHECK_MSG(says("amp_tape_backward: d: ", "an optimizer without this parameter stepped") && says("_zero_grad", "amp_model_freeze") && says("d: ", ".accumulation"),
              "%s", amp_last_error());
    CHECK_ERR(gan_generator(NULL), AMP_ERR_STATE);                  /* through d too; g's own gradient stays as it was */
    CHECK(gan.wd->grad_live && !gan.wg->grad_live && memcmp(kept, gan.wd->grad.data, sizeof kept) == 0);
    /* by hand */
    amp_linear_op l = {.x = amp_tensor2(gan.real, AMP_F32, GAN_ROWS, GAN_X), .y = amp_tensor2(gan.fake, AMP_F32, GAN_ROWS, 2), .weight = gan.wd,
                       .dy = amp_tensor2(gan.fake, AMP_F32, GAN_ROWS, 2), .dx = amp_tensor2(dx, AMP_F32, GAN_ROWS, GAN_X)};
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_linear(amp, &l));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_ERR(amp_linear_backward(amp, &l), AMP_ERR_STATE);
    CHECK_MSG(says("amp_linear_backward: d: ", "amp_model_zero_grad"), "%s", amp_last_error());
    CHECK(memcmp(kept, gan.wd->grad.data, sizeof kept) == 0);
    /* your own kernels cannot be refused; their step is, until the gradient is dropped */
    CHECK_EQ(amp_param_accumulate(gan.wd), 1);
    CHECK_ERR(amp_step(gan.od, NULL), AMP_ERR_STATE);
    CHECK_MSG(says("amp_step: d: ", "amp_param_accumulate"), "%s", amp_last_error());
    CHECK_OK(amp_optimizer_zero_grad(gan.od));
    CHECK_EQ(amp_param_accumulate(gan.wd), 0);
    CHECK_EQ(amp_param_accumulate(gan.wd), 1);
    CHECK_OK(amp_step(gan.od, NULL));
    CHECK_OK(gan_discriminator(NULL));
    CHECK_OK(amp_step(gan.od, NULL));
    gan_close();
}

static amp_result add_to_weight(void *user, const amp_custom_call *call) {
    (void)call;
    (void)amp_param_accumulate((amp_param *)user);
    return AMP_OK;
}
static amp_result leave_y(void *user, const amp_custom_call *call) { (void)user; (void)call; return AMP_OK; }

/* What passes: sums that an optimizer wants, one backward for two optimizers, gradients that nobody takes, and after
   grad_live = 0.  What does not: a gradient that the host's own optimizer takes, and a custom operator's. */
TEST(sums_that_are_meant_pass) {
    amp_optimizer *halves[2];
    amp_optimizer_desc o = {.kind = AMP_SGD, .lr = 0.1, .n_params = 3};
    amp_scaler *scaler;
    gan_open(2);
    for (int i = 0; i < 4; i++) {                                   /* two micro-batches per step of the discriminator */
        if (i % 2 == 0) CHECK_OK(amp_model_zero_grad(gan.d));
        CHECK_OK(gan_discriminator(NULL));
        CHECK_OK(amp_step(gan.od, NULL));
        CHECK_OK(gan_generator(NULL));
        CHECK_OK(amp_step(gan.og, NULL));
    }
    CHECK_OK(amp_optimizer_set_accumulation(gan.od, 1));
    CHECK_OK(gan_generator(NULL));
    CHECK_OK(amp_step(gan.og, NULL));
    gan.wd->grad_live = 0;                                          /* the fourth way */
    CHECK_OK(gan_discriminator(NULL));
    gan_close();
    open_context(AMP_BF16, AMP_LEVEL_O1);
    make_mlp();
    for (int which = 0; which < 2; which++) {
        o.params = which ? w2 + 1 : w1;
        CHECK_OK(amp_optimizer_create(amp, &halves[which], &o));
    }
    for (int i = 0; i < 4; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_RELU), NULL));
        CHECK_OK(amp_step(halves[i & 1], NULL));
        CHECK_OK(amp_step(halves[!(i & 1)], NULL));
    }
    amp_optimizer_destroy(halves[1]);                               /* the other half is in no optimizer now */
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_RELU), amp_scaler_scale_ptr(scaler)));
        CHECK_OK(amp_step(halves[0], scaler));
    }
    amp_scaler_destroy(scaler);
    for (int i = 0; i < 2; i++) {                                   /* but b3 in the host's */
        b3->grad_live = 0;
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_backward(tape, mlp_loss(AMP_ACT_RELU), NULL));
        CHECK_OK(amp_step(halves[0], NULL));
    }
    CHECK_OK(amp_tape_begin(tape, NULL));
    CHECK_ERR(amp_tape_backward(tape, mlp_loss(AMP_ACT_RELU), NULL), AMP_ERR_STATE);
    CHECK_MSG(says("fc3.bias: ", "_zero_grad"), "%s", amp_last_error());
    /* what a custom operator adds to is its .weight */
    CHECK_OK(amp_optimizer_create(amp, &halves[1], &o));
    CHECK_OK(amp_model_zero_grad(model));
    for (int i = 0; i < 3; i++) {
        amp_custom_op adder = {.weight = w2, .forward = leave_y, .backward = add_to_weight, .user = w2};
        amp_tensor batch = amp_tensor2(inputs, AMP_F32, ROWS, IN);
        amp_value x;
        if (i == 2) CHECK_OK(amp_step(halves[1], NULL));
        CHECK_OK(amp_tape_begin(tape, NULL));
        x = amp_tape_linear(tape, amp_tape_input(tape, &batch), w1, b1, AMP_ACT_NONE);
        x = amp_tape_mse(tape, amp_tape_custom(tape, &x, 1, &adder), x, AMP_REDUCTION_MEAN);
        w1->grad_live = b1->grad_live = 0;
        if (i < 2) CHECK_OK(amp_tape_backward(tape, x, NULL));
        else CHECK_ERR(amp_tape_backward(tape, x, NULL), AMP_ERR_STATE);
        CHECK_MSG(i < 2 || says("fc2.weight: ", "_zero_grad"), "%s", amp_last_error());
    }
    amp_optimizer_destroy(halves[1]);
    amp_optimizer_destroy(halves[0]);
    close_context();
}

/* A gradient under one loss scale is not added to one under another. */
TEST(loss_scales_are_not_mixed) {
    amp_scaler_desc one = {.init_scale = 8}, still = {.init_scale = 8, .frozen = 1}, off = {.disable = 1};
    amp_scaler *a, *b, *frozen, *disabled;
    static const float weights[2] = {0.5f, 2};
    gan_open(4);
    CHECK_OK(amp_scaler_create(amp, &a, &one));
    CHECK_OK(amp_scaler_create(amp, &b, &one));
    CHECK_OK(amp_scaler_create(amp, &frozen, &still));
    CHECK_OK(amp_scaler_create(amp, &disabled, &off));
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(a)));
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(a)));           /* the same scale */
    CHECK_ERR(gan_discriminator(amp_scaler_scale_ptr(b)), AMP_ERR_STATE);
    CHECK_MSG(says("amp_tape_backward: d: ", "another loss scale") && says("_zero_grad", "amp_model_freeze") && says("d: ", ".accumulation"), "%s", amp_last_error());
    CHECK_ERR(gan_discriminator(NULL), AMP_ERR_STATE);              /* unscaled */
    CHECK_OK(gan_discriminator(weights));                           /* a factor of the host's own may be anything */
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(a)));
    CHECK_OK(amp_scaler_update_with(a, 1));
    CHECK_ERR(gan_discriminator(amp_scaler_scale_ptr(a)), AMP_ERR_STATE);
    CHECK_OK(amp_scaler_rescale(a, amp_optimizer_grad_set(gan.od), 0));     /* now it carries the new one */
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(a)));
    CHECK_OK(amp_scaler_set_scale(a, 32));
    CHECK_ERR(gan_discriminator(amp_scaler_scale_ptr(a)), AMP_ERR_STATE);
    CHECK_OK(amp_optimizer_zero_grad(gan.od));
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(a)));
    CHECK_OK(amp_optimizer_zero_grad(gan.od));
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(frozen)));
    CHECK_OK(amp_scaler_update_with(frozen, 1));                    /* its scale stays */
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(frozen)));
    CHECK_OK(amp_optimizer_zero_grad(gan.od));
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(disabled)));
    CHECK_OK(amp_scaler_update_with(disabled, 0));
    CHECK_OK(gan_discriminator(NULL));                              /* both are 1 */
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(disabled)));
    amp_scaler_destroy(b);
    amp_scaler_destroy(a);
    CHECK_OK(amp_optimizer_zero_grad(gan.od));
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(frozen)));
    amp_scaler_destroy(frozen);
    amp_scaler_destroy(disabled);
    gan_close();
}

/* By hand the scale is that of this thread's last loss; of two losses before one backward it is not known which. */
static amp_result one_layer(amp_param *w, const float *const *scales, int losses) {
    float y[2][GAN_ROWS * 2], loss;
    amp_linear_op l = {.x = amp_tensor2(gan.real, AMP_F32, GAN_ROWS, GAN_X), .weight = w};
    CHECK_OK(amp_autocast_begin(amp, NULL));
    for (int i = 0; i < losses; i++) {
        amp_cross_entropy_op ce = {.labels = gan.ones, .loss = &loss, .grad_scale = scales[i]};
        l.y = l.dy = ce.logits = ce.dlogits = amp_tensor2(y[i], AMP_F32, GAN_ROWS, 2);
        CHECK_OK(amp_linear(amp, &l));
        CHECK_OK(amp_cross_entropy(amp, &ce));
    }
    CHECK_OK(amp_autocast_end(amp));
    return amp_linear_backward(amp, &l);
}
TEST(loss_scales_by_hand) {
    amp_scaler *a, *b;
    const float *scales[2];
    gan_open(1);
    CHECK_OK(amp_scaler_create(amp, &a, NULL));
    CHECK_OK(amp_scaler_create(amp, &b, NULL));
    scales[0] = amp_scaler_scale_ptr(a);
    scales[1] = amp_scaler_scale_ptr(b);
    CHECK_OK(one_layer(gan.wd, scales, 1));
    CHECK_OK(one_layer(gan.wd, scales, 1));
    CHECK_ERR(one_layer(gan.wd, scales + 1, 1), AMP_ERR_STATE);
    CHECK_MSG(says("amp_linear_backward: d: ", "another loss scale"), "%s", amp_last_error());
    CHECK_OK(amp_scaler_update_with(a, 0));
    CHECK_ERR(one_layer(gan.wd, scales, 1), AMP_ERR_STATE);
    CHECK_OK(amp_optimizer_zero_grad(gan.od));
    CHECK_OK(one_layer(gan.wd, scales, 2));
    CHECK_OK(one_layer(gan.wd, scales, 1));
    CHECK_OK(one_layer(gan.wd, scales + 1, 1));
    amp_scaler_destroy(a);
    amp_scaler_destroy(b);
    gan_close();
}

/* A step divides by the scale that its gradients carry.  With another scaler, and after its update, as in amp_step for each
   of two optimizers, it is refused; where the program may have multiplied or divided, it is a warning. */
static int scales_warned;
static void scales_log(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level;
    if (id == 1116 && strstr(text, "amp_step: d: ") != NULL) scales_warned++;
}
TEST(steps_divide_by_the_right_scale) {
    amp_scaler *a, *b;
    const float *scale;
    float before[GAN_X * 2];
    logger.write = scales_log;
    gan_open(1);
    logger.write = NULL;
    CHECK_OK(amp_scaler_create(amp, &a, NULL));
    CHECK_OK(amp_scaler_create(amp, &b, NULL));
    scale = amp_scaler_scale_ptr(a);
    memcpy(before, gan.wd->weight.data, sizeof before);
    CHECK_OK(one_layer(gan.wd, &scale, 1));
    CHECK_ERR(amp_step(gan.od, b), AMP_ERR_STATE);
    CHECK_ERR(amp_scaler_check(b, amp_optimizer_grad_set(gan.od), AMP_CHECK_READ), AMP_ERR_STATE);
    CHECK_OK(amp_scaler_update_with(a, 0));                         /* as amp_step of another optimizer does */
    CHECK_ERR(amp_step(gan.od, a), AMP_ERR_STATE);
    CHECK_MSG(says("amp_step: d: ", "amp_scaler_update is called once"), "%s", amp_last_error());
    CHECK_ERR(amp_scaler_check(a, amp_optimizer_grad_set(gan.od), AMP_CHECK_READ), AMP_ERR_STATE);
    CHECK(memcmp(before, gan.wd->weight.data, sizeof before) == 0);
    CHECK_OK(amp_optimizer_zero_grad(gan.od));
    CHECK_OK(one_layer(gan.wd, &scale, 1));
    CHECK_OK(amp_scaler_check(a, amp_optimizer_grad_set(gan.od), AMP_CHECK_READ));
    CHECK_OK(amp_step(gan.od, a));
    CHECK(memcmp(before, gan.wd->weight.data, sizeof before) != 0);
    scale = NULL;
    CHECK_EQ(scales_warned, 0);
    CHECK_OK(one_layer(gan.wd, &scale, 1));
    CHECK_OK(amp_step(gan.od, a));                                  /* the program may have multiplied dlogits */
    CHECK_EQ(scales_warned, 1);
    scale = amp_scaler_scale_ptr(a);
    CHECK_OK(one_layer(gan.wd, &scale, 1));
    CHECK_OK(amp_step(gan.od, NULL));                               /* ... or divided gradients */
    CHECK_EQ(scales_warned, 1);                                     /* once per context */
    amp_scaler_destroy(a);
    amp_scaler_destroy(b);
    gan_close();
}

/* zero_grad in the middle of a cycle: what it has gathered is gone, and a whole cycle follows. */
TEST(zero_grad_begins_a_cycle) {
    float weights[2][2 * GAN_X];
    amp_step_result result;
    amp_value loss;
    for (int way = 0; way < 3; way++) {
        gan_open(3);
        if (way > 0) {
            for (int i = 0; i < 2; i++) { CHECK_OK(gan_discriminator(NULL)); CHECK_OK(amp_step(gan.od, NULL)); }
            CHECK_OK(way == 1 ? amp_optimizer_zero_grad(gan.od) : amp_model_zero_grad(gan.d));
        }
        for (int i = 0; i < 3; i++) {
            CHECK(amp_step_result_next(gan.od, &result) == 0);
            CHECK_OK(gan_discriminator(NULL));
            CHECK_OK(amp_step(gan.od, NULL));
        }
        CHECK(amp_step_result_next(gan.od, &result) == 1 && result.applied_steps == 1);
        memcpy(weights[way > 0], gan.wd->weight.data, sizeof *weights);
        CHECK(memcmp(weights[0], weights[way > 0], sizeof *weights) == 0);
        /* without a backward it rests */
        CHECK_OK(amp_optimizer_set_accumulation(gan.od, 1));
        CHECK_OK(gan_discriminator(NULL));
        CHECK_OK(amp_optimizer_zero_grad(gan.od));
        CHECK_OK(amp_step(gan.od, NULL));
        CHECK(memcmp(weights[0], gan.wd->weight.data, sizeof *weights) == 0);
        gan_close();
    }
    gan_open(1);
    CHECK_ERR(amp_optimizer_zero_grad(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_model_zero_grad(NULL), AMP_ERR_NULL);
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = gan_loss(gan.real, gan.ones);
    CHECK_OK(amp_optimizer_zero_grad(gan.od));                      /* PyTorch's order: forward, zero_grad, backward */
    CHECK_OK(amp_tape_forward(tape, loss, NULL));
    CHECK_ERR(amp_optimizer_zero_grad(gan.od), AMP_ERR_STATE);      /* a fused loss may have added already */
    CHECK_ERR(amp_model_zero_grad(gan.g), AMP_ERR_STATE);
    CHECK_OK(amp_tape_backward(tape, loss, NULL));
    CHECK(gan.wd->grad_live);
    gan_close();
}

/* amp_verify and amp_gradcheck between two backwards leave everything as it was: what may be added to, and what may not. */
static amp_value record_gan(void *user, amp_tape *t) {
    amp_tensor in = amp_tensor2(gan.real, AMP_F32, GAN_ROWS, GAN_X);
    (void)user;
    return amp_tape_cross_entropy(t, amp_tape_linear(t, amp_tape_input(t, &in), gan.wd, NULL, AMP_ACT_NONE), gan.ones, NULL);
}
TEST(trials_leave_the_life_of_a_gradient) {
    const amp_dtype dtypes[] = {AMP_BF16};
    amp_scaler_desc eight = {.init_scale = 8};
    amp_verify_report report;
    amp_scaler *scaler;
    gan_open(3);
    CHECK_OK(amp_scaler_create(amp, &scaler, &eight));
    amp_verify_desc v = {.record = record_gan, .dtypes = dtypes, .n_dtypes = 1, .scaler = scaler};
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(scaler)));
    CHECK_OK(amp_step(gan.od, scaler));
    CHECK_OK(amp_verify(amp, &v, &report));
    CHECK_OK(gan_discriminator(amp_scaler_scale_ptr(scaler)));      /* the cycle goes on */
    CHECK_OK(amp_optimizer_set_accumulation(gan.od, 1));
    CHECK_OK(gan_generator(NULL));
    CHECK_OK(amp_step(gan.og, NULL));
    v.scaler = NULL;
    CHECK_OK(amp_verify(amp, &v, &report));
    CHECK_ERR(gan_discriminator(NULL), AMP_ERR_STATE);
    CHECK_MSG(says("d: ", "stepped"), "%s", amp_last_error());
    amp_scaler_destroy(scaler);
    gan_close();
}

/* Another thread trains a network of its own in this context, between two backwards that add up: its steps do not matter. */
static void *train_alone(void *arg) {
    amp_param *w = (amp_param *)arg;
    const float *scale = NULL;
    int64_t failed = 0;
    for (int i = 0; i < 4; i++) {
        failed += one_layer(w, &scale, 1) != AMP_OK;
        if (i % 2) failed += amp_step(gan.og, NULL) != AMP_OK;
    }
    return failed == 0 ? arg : NULL;
}
TEST(threads_step_beside_each_other) {
    amp_param *second;
    amp_optimizer_desc o = {.kind = AMP_SGD, .lr = 1e-3, .n_params = 1};
    const float *scale = NULL;
    pthread_t thread;
    void *trained = NULL;
    gan_open(1);
    amp_optimizer_destroy(gan.og);
    o.params = second = amp_model_param(gan.g, "second", 2, GAN_X, AMP_INIT_NORMAL, 0.7);
    CHECK_OK(amp_optimizer_create(amp, &gan.og, &o));
    CHECK_OK(one_layer(gan.wd, &scale, 1));
    CHECK(pthread_create(&thread, NULL, train_alone, second) == 0);
    pthread_join(thread, &trained);
    CHECK(trained == second);
    CHECK_OK(one_layer(gan.wd, &scale, 1));
    CHECK(train_alone(second) == second);                           /* this thread's do */
    CHECK_ERR(one_layer(gan.wd, &scale, 1), AMP_ERR_STATE);
    gan_close();
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    for (int i = 1; i < argc; i++) if (!strcmp(argv[i], "--full")) same_graphs = 16667;
    RUN(one_prefix_for_all); RUN(scales_and_halves); RUN(models_destroyed_too_early); RUN(late_and_impossible_parameters);
    RUN(mlp_has_the_bits_of_hand_written_calls);
    RUN(micro_steps_add_up_as_by_hand);
    RUN(fp8_has_the_bits_of_hand_written_calls);
    RUN(two_tapes_take_turns);
    RUN(a_mlp_trains);
    RUN(values_used_twice);
    RUN(parts_of_a_gradient_are_rounded_once);
    RUN(operands_that_do_not_fit);
    RUN(refusals);
    RUN(models_refuse); RUN(nothing_given);
    RUN(finite_differences);
    RUN(operators_of_the_host);
    RUN(a_loss_of_weight_0_has_no_gradient);
    RUN(freezing_is_seen_by_the_next_step);
    RUN(a_failed_step_leaves_nothing);
    RUN(a_graph_ends_with_the_memory_of_its_tape);
    RUN(checkpoints_compute_what_unused_values_share);
    RUN(random_graphs_by_finite_differences);
    RUN(random_graphs_have_the_same_bits_in_every_way);
    RUN(gradients_are_told_when_they_are_final);
    RUN(budgets_hold_with_the_same_bits);
    RUN(random_graphs_fit_their_budgets);
    RUN(random_programs);
    RUN(one_function_is_verified_checked_and_tuned);
    RUN(models_save_and_load);
    RUN(initialisers);
    RUN(grouped_heads_have_their_own_masks);
    RUN(middle_parts_and_empty_batches);
    RUN(rounding_stays_outside);
    RUN(text_after_the_end);
    RUN(models_and_their_optimizers);
    RUN(gpt_has_the_bits_of_the_hand_written_one);
    RUN(forward_and_backward_apart);
    RUN(a_step_given_up_leaves_no_gradient);
    RUN(a_plan_tells_the_memory);
    RUN(times_of_every_call);
    RUN(results_are_stored_as_told);
    RUN(a_gan_trains_as_in_pytorch);
    RUN(what_another_step_left_is_not_added_to);
    RUN(sums_that_are_meant_pass);
    RUN(loss_scales_are_not_mixed);
    RUN(loss_scales_by_hand);
    RUN(steps_divide_by_the_right_scale);
    RUN(zero_grad_begins_a_cycle);
    RUN(trials_leave_the_life_of_a_gradient);
    RUN(threads_step_beside_each_other);
    return TEST_END();
}
