/* t_cuda_inputs.cpp - tests saturate_inputs on the CUDA backend, on the model GPU.  In every operator, the operands of
 * products must be cut to the range in which their cast is finite, as if the program had cut them.  As many must be counted
 * as on the CPU, with the same names. */
#include "test_cuda.h"

enum { ROWS = 5, IN = 24, OUT = 7 };
static const float inf = HUGE_VALF;

struct log_of { int warnings; char last[512]; };
static void keep_log(void *user, amp_log_level level, int id, const char *text) {
    log_of *log = (log_of *)user;
    log->warnings += level == AMP_LOG_WARNING && id == 1011;
    snprintf(log->last, sizeof log->last, "%s", text);
}

/* A context, and memory of its own. */
struct side {
    amp_context *amp = NULL;
    log_of log = {};
    std::vector<void *> memory;
    side(const amp_backend *backend, bool saturate, amp_dtype dtype = AMP_F16) {
        amp_desc d = {};
        d.backend = backend;
        d.dtype = dtype;
        d.threads = 1;
        d.allow_fallback = 1;
        d.gemm_always = 1;
        d.saturate_inputs = saturate;
        d.logger.write = keep_log;
        d.logger.user = &log;
        CHECK_OK(amp_open(&amp, &d));
    }
    side(const side &) = delete;
    side &operator=(const side &) = delete;
    ~side() {
        for (void *p : memory) amp_free(amp, p);
        amp_close(amp);
    }
    void *put(const std::string &bytes) {
        void *p = NULL;
        CHECK_OK(amp_alloc(amp, &p, (int64_t)bytes.size()));
        memory.push_back(p);
        CHECK_OK(amp_copy(amp, p, bytes.data(), (int64_t)bytes.size(), AMP_COPY_TO_DEVICE));
        CHECK_OK(amp_sync(amp));
        return p;
    }
    void get(std::string *out, const void *p, size_t bytes) {
        size_t at = out->size();
        out->resize(at + bytes);
        CHECK_OK(amp_copy(amp, &(*out)[at], p, (int64_t)bytes, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
    }
    bool counted(int64_t n, const char *where) {
        amp_status status;
        CHECK_OK(amp_status_get(amp, NULL, 0, &status));
        if (status.new_inf == n && strcmp(status.new_inf_in, where) == 0) return true;
        printf("counted %lld in \"%s\", must be %lld in \"%s\"\n", (long long)status.new_inf, status.new_inf_in, (long long)n, where);
        return false;
    }
};

/* n numbers; those at these places are `big`, and where they were cut before: what is left of them. */
static std::string numbers(int64_t n, uint64_t seed, amp_dtype dtype, const std::vector<size_t> &at = {}, float big = 0) {
    std::vector<float> x = cuda_random(n, seed, -2, 2);
    for (size_t i : at) x[i] = big;
    return cuda_stored(x, dtype);
}
static float cut(bool before, float big, amp_dtype dtype) {
    return !before ? big : copysignf(dtype == AMP_BF16 ? 65280.0f : 65504.0f, big);
}

/* A linear layer, forward and backward.  before: what is too large was cut by hand; dy: a gradient. */
static void linear(side &s, bool before, float dy, std::string *out) {
    amp_param weight = {};
    amp_linear_op op = {};
    std::string x = numbers(ROWS * IN, 1, AMP_F32, {5, 30}, cut(before, 1e7f, AMP_F32)), w = numbers(OUT * IN, 2, AMP_F32, {6}, cut(before, -7e4f, AMP_F32));
    float special[2] = {65519, inf};            /* rounds to 65504; was so before any cast */
    memcpy(&x[4 * 8], special, sizeof special);
    weight.name = "fc.weight";
    weight.weight = amp_tensor2(s.put(w), AMP_F32, OUT, IN);
    weight.grad = amp_tensor2(s.put(w), AMP_F32, OUT, IN);
    CHECK_OK(amp_param_register(s.amp, &weight, 1));
    op.weight = &weight;
    op.x = amp_tensor2(s.put(x), AMP_F32, ROWS, IN);
    op.dx = amp_tensor2(s.put(x), AMP_F32, ROWS, IN);
    op.y = amp_tensor2(s.put(numbers(ROWS * OUT, 3, AMP_F32)), AMP_F32, ROWS, OUT);
    op.dy = amp_tensor2(s.put(numbers(ROWS * OUT, 4, AMP_F32, {2}, dy)), AMP_F32, ROWS, OUT);
    CHECK_OK(amp_autocast_begin(s.amp, NULL));
    CHECK_OK(amp_linear(s.amp, &op));
    CHECK_OK(amp_autocast_end(s.amp));
    CHECK_OK(amp_linear_backward(s.amp, &op));
    s.get(out, op.y.data, ROWS * OUT * 4);
    s.get(out, op.dx.data, ROWS * IN * 4);
    s.get(out, weight.grad.data, OUT * IN * 4);
    amp_param_forget(s.amp, &weight, 1);
}

/* A batched product of parts of larger matrices, and its gradients; launches: from a graph, so many times. */
static void matmul(side &s, bool before, amp_dtype dtype, std::string *out, int launches = 0) {
    amp_matmul_op op = {};
    amp_graph *graph = NULL;
    float big = cut(before, 1e9f, dtype);
    op.a = amp_tensor3(s.put(numbers(3 * 4 * 16, 5, dtype, {17, 70}, big)), dtype, 3, 4, 8);
    op.a.stride[0] = 64; op.a.stride[1] = 16; op.a.stride[2] = 1;
    op.b = amp_tensor3(s.put(numbers(3 * 8 * 5, 6, dtype, {50, 51, 52}, big)), dtype, 3, 8, 5);
    op.y = amp_tensor3(s.put(numbers(60, 7, AMP_F32)), AMP_F32, 3, 4, 5);
    op.dy = amp_tensor3(s.put(numbers(60, 8, AMP_F32)), AMP_F32, 3, 4, 5);
    op.da = amp_tensor3(s.put(numbers(96, 9, AMP_F32)), AMP_F32, 3, 4, 8);
    op.db = amp_tensor3(s.put(numbers(120, 10, AMP_F32)), AMP_F32, 3, 8, 5);
    op.layer = "scores";
    if (launches) CHECK_OK(amp_graph_begin(s.amp));
    CHECK_OK(amp_autocast_begin(s.amp, NULL));
    CHECK_OK(amp_matmul(s.amp, &op));
    CHECK_OK(amp_autocast_end(s.amp));
    CHECK_OK(amp_matmul_backward(s.amp, &op));
    if (launches) CHECK_OK(amp_graph_end(s.amp, &graph));
    for (int i = 0; i < launches; i++) CHECK_OK(amp_graph_launch(graph));
    s.get(out, op.y.data, 60 * 4);
    s.get(out, op.da.data, 96 * 4);
    s.get(out, op.db.data, 120 * 4);
    amp_graph_destroy(graph);
}

/* Heads side by side in one buffer, as qkv has them. */
static void attention(side &s, bool before, amp_dtype dtype, std::string *out) {
    enum { BATCH = 2, SEQ = 3, HEADS = 2, DIM = 8, ALL = BATCH * SEQ * HEADS * DIM };
    amp_attention_op a = {};
    size_t size = amp_dtype_size(dtype);
    char *qkv = (char *)s.put(numbers(3 * ALL, 11, dtype, {6, 100}, cut(before, 1e6f, dtype)));
    a.q = amp_tensor4(qkv, dtype, BATCH, SEQ, HEADS, DIM);
    a.q.stride[0] = 3 * SEQ * HEADS * DIM; a.q.stride[1] = 3 * HEADS * DIM; a.q.stride[2] = DIM; a.q.stride[3] = 1;
    a.k = a.v = a.q;
    a.k.data = qkv + HEADS * DIM * size; a.v.data = qkv + 2 * HEADS * DIM * size;
    a.o = amp_tensor4(s.put(numbers(ALL, 12, dtype)), dtype, BATCH, SEQ, HEADS, DIM);
    a.d_o = a.dq = a.dk = a.dv = a.o;
    a.d_o.data = s.put(numbers(ALL, 13, dtype));
    a.dq.data = s.put(numbers(ALL, 14, dtype)); a.dk.data = s.put(numbers(ALL, 15, dtype)); a.dv.data = s.put(numbers(ALL, 16, dtype));
    a.lse = (float *)s.put(numbers(BATCH * SEQ * HEADS, 17, AMP_F32));
    CHECK_OK(amp_autocast_begin(s.amp, NULL));
    CHECK_OK(amp_attention(s.amp, &a));
    CHECK_OK(amp_autocast_end(s.amp));
    CHECK_OK(amp_attention_backward(s.amp, &a));
    for (const void *p : {a.o.data, a.dq.data, a.dk.data, a.dv.data}) s.get(out, p, ALL * size);
}

static void gemm(side &s, bool before, std::string *out) {
    float big = cut(before, -1e5f, AMP_F32);
    float *a = (float *)s.put(numbers(20 * 40, 18, AMP_F32, {8, 17}, big));     /* 17 lies between the rows */
    float *b = (float *)s.put(numbers(20 * 40, 19, AMP_F32, {47}, big)), *c = (float *)s.put(numbers(20 * 40, 20, AMP_F32));
    for (amp_order order : {AMP_ROW_MAJOR, AMP_COL_MAJOR})
        for (amp_trans tb : {AMP_NO_TRANS, AMP_TRANS}) {
            CHECK_OK(amp_gemm(s.amp, order, AMP_NO_TRANS, tb, 9, 9, 9, 0.5f, a, 40, b, 40, 0, c, 40));
            s.get(out, c, 20 * 40 * 4);
        }
}

struct work {
    const char *name, *where;
    int64_t count;                  /* of what is cut */
    std::function<void(side &, bool before, std::string *out)> run;
};
static const std::vector<work> &works() {
    static const std::vector<work> all = {
        {"linear", "amp_linear_backward: weight of fc.weight", 6, [](side &s, bool before, std::string *out) { linear(s, before, 1, out); }},
        {"matmul", "amp_matmul_backward: a of scores", 10, [](side &s, bool before, std::string *out) { matmul(s, before, AMP_F32, out); }},
        {"matmul of bf16", "amp_matmul_backward: a of scores", 10, [](side &s, bool before, std::string *out) { matmul(s, before, AMP_BF16, out); }},
        {"attention", "amp_attention_backward: q", 4, [](side &s, bool before, std::string *out) { attention(s, before, AMP_F32, out); }},
        {"attention in bf16", "amp_attention_backward: q", 4, [](side &s, bool before, std::string *out) { attention(s, before, AMP_BF16, out); }},
        {"gemm", "amp_gemm: a", 8, [](side &s, bool before, std::string *out) { gemm(s, before, out); }},
    };
    return all;
}

/* The bits of a program that cuts what it feeds, under every order; counted and named as on the CPU. */
CUDA_TEST(operands_are_cut) {
    for (const work &w : works()) {
        std::string by_hand, on_cpu;
        cuda_compare c = {};
        side cpu(amp_cpu(), true);
        w.run(cpu, false, &on_cpu);
        CHECK_MSG(cpu.counted(w.count, w.where), "%s on the CPU", w.name);
        c.orders = coc_every_order([&](std::string *results) {
            side gpu(amp_cuda(), true);
            w.run(gpu, false, results);
            CHECK_MSG(gpu.counted(w.count, w.where), "%s", w.name);
            CHECK_EQ(gpu.log.warnings, 1);
            CHECK(strstr(gpu.log.last, "cut by saturate_inputs") && strstr(gpu.log.last, "range of fp16"));
            if (by_hand.empty()) by_hand = *results;
        });
        c.check_orders();
        side plain(amp_cuda(), false);
        std::string expected;
        w.run(plain, true, &expected);
        CHECK_MSG(expected == by_hand, "%s: not what cut operands give", w.name);
        CHECK(plain.counted(0, "") && plain.log.warnings == 0);
    }
}

CUDA_TEST(graphs_cut_at_every_launch) {
    side gpu(amp_cuda(), true), again(amp_cuda(), true);
    std::string recorded, direct;
    matmul(gpu, false, AMP_F32, &recorded, 3);
    CHECK(gpu.counted(3 * 10, "amp_matmul_backward: a of scores"));
    matmul(again, false, AMP_F32, &direct);
    CHECK(recorded == direct);
}

/* An infinity that was there before the cast is seen, and so is a gradient that overflows. */
CUDA_TEST(infinities_and_gradients_stay) {
    side gpu(amp_cuda(), true), plain(amp_cuda(), false);
    std::string cut_all, none;
    linear(gpu, false, 1e6f, &cut_all);
    linear(plain, false, 1e6f, &none);
    const float *y = (const float *)(const void *)cut_all.data(), *dx = y + ROWS * OUT;
    CHECK_EQ(amp_count_nonfinite(y, AMP_F32, ROWS * OUT, NULL), OUT);
    CHECK_EQ(amp_count_nonfinite((const float *)(const void *)none.data(), AMP_F32, ROWS * OUT, NULL), 2 * OUT + ROWS - 2);      /* of x two rows, of weight one */
    CHECK_EQ(amp_count_nonfinite(dx, AMP_F32, ROWS * IN, NULL), IN);
    CHECK(gpu.counted(6, "amp_linear_backward: weight of fc.weight") && plain.counted(0, ""));
}

/* The region, the setting, and a backend that cannot. */
CUDA_TEST(settings_reach_the_gpu) {
    amp_autocast_desc region = {};
    amp_settings settings = {};
    amp_backend other = *amp_cuda();
    amp_desc d = {};
    amp_context *amp = NULL;
    std::string out;
    side gpu(amp_cuda(), false);
    region.saturate_inputs = 1;
    CHECK_OK(amp_autocast_begin(gpu.amp, &region));
    gemm(gpu, false, &out);
    CHECK_OK(amp_autocast_end(gpu.amp));
    CHECK(gpu.counted(8, "amp_gemm: a"));
    CHECK_OK(amp_settings_set(&settings, "dtype", "fp16"));
    CHECK_OK(amp_settings_set(&settings, "saturate_inputs", "true"));
    CHECK_OK(amp_settings_apply(&settings, gpu.amp, NULL, NULL, NULL));
    gemm(gpu, false, &out);
    CHECK(gpu.counted(16, "amp_gemm: a"));
    other.saturates = 0;
    d.backend = &other;
    d.dtype = AMP_F16;
    d.saturate_inputs = 1;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
}

/* ---- Adaptive precision: evidence is gathered on the device, and is that of the CPU backend */

static void adapt_on(const amp_backend *backend, bool overflow, amp_adapt_record *out, int *moves) {
    enum { N = 40, IN = 64, OUT = 48 };
    std::vector<float> x(N * IN), w(OUT * IN), dy(N * OUT);
    float *on_device[6];
    const size_t sizes[6] = {x.size(), w.size(), dy.size(), dy.size(), x.size(), w.size()};
    amp_desc desc = {};
    amp_context *amp = NULL;
    amp_param p = {};
    amp_adapt_desc d = {};
    amp_adapt *adapt = NULL;
    amp_dtype ladder[2] = {AMP_F16, AMP_F32};
    for (size_t i = 0; i < x.size(); i++) x[i] = (2 * amp_random_uniform(1, i) - 1) * (overflow ? 1e6f : 1.0f);
    for (size_t i = 0; i < w.size(); i++) w[i] = 2 * amp_random_uniform(2, i) - 1;
    for (size_t i = 0; i < dy.size(); i++) dy[i] = 2 * amp_random_uniform(3, i) - 1;
    desc.backend = backend; desc.dtype = AMP_F32; desc.threads = 1;
    desc.logger.level = AMP_LOG_ERROR;
    CHECK_OK(amp_open(&amp, &desc));
    for (int i = 0; i < 6; i++) {
        void *memory;
        CHECK_OK(amp_alloc(amp, &memory, (int64_t)(sizes[i] * sizeof(float))));
        on_device[i] = (float *)memory;
    }
    CHECK_OK(amp_copy(amp, on_device[0], x.data(), (int64_t)(x.size() * 4), AMP_COPY_TO_DEVICE));
    CHECK_OK(amp_copy(amp, on_device[1], w.data(), (int64_t)(w.size() * 4), AMP_COPY_TO_DEVICE));
    CHECK_OK(amp_copy(amp, on_device[2], dy.data(), (int64_t)(dy.size() * 4), AMP_COPY_TO_DEVICE));
    CHECK_OK(amp_sync(amp));
    p.name = "w";
    p.weight = amp_tensor2(on_device[1], AMP_F32, OUT, IN); p.grad = amp_tensor2(on_device[5], AMP_F32, OUT, IN);
    CHECK_OK(amp_param_register(amp, &p, 1));
    d.params = &p; d.n_params = 1; d.interval = 2; d.checks = 1;
    d.ladder = ladder; d.n_ladder = 2;
    CHECK_OK(amp_adapt_create(amp, &adapt, &d));
    *moves = 0;
    for (int step = 0; step < 8; step++) {
        amp_linear_op op = {};
        op.x = amp_tensor2(on_device[0], AMP_F32, N, IN); op.y = amp_tensor2(on_device[3], AMP_F32, N, OUT); op.weight = &p;
        op.dy = amp_tensor2(on_device[2], AMP_F32, N, OUT); op.dx = amp_tensor2(on_device[4], AMP_F32, N, IN);
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_OK(amp_linear(amp, &op));
        CHECK_OK(amp_autocast_end(amp));
        CHECK_OK(amp_linear_backward(amp, &op));
        CHECK_OK(amp_adapt_step(adapt));
        amp_adapt_record record;
        while (amp_adapt_next(adapt, &record)) ++*moves;
    }
    CHECK_OK(amp_adapt_layer(adapt, 0, out));
    amp_adapt_destroy(adapt);
    for (int i = 0; i < 6; i++) amp_free(amp, on_device[i]);
    amp_close(amp);
}

CUDA_TEST(adaptive_precision_on_the_device) {
    for (int overflow = 0; overflow < 2; overflow++) {
        amp_adapt_record cpu, gpu;
        int moves[2];
        adapt_on(amp_cpu(), overflow, &cpu, &moves[0]);
        adapt_on(amp_cuda(), overflow, &gpu, &moves[1]);
        CHECK_EQ(moves[0], !overflow);
        CHECK_EQ(moves[1], !overflow);
        CHECK(gpu.to == cpu.to && gpu.to == (overflow ? AMP_F32 : AMP_F16));
        /* the same rows, rounded alike: only the order of sums differs */
        CHECK_MSG(gpu.output_error >= 0.9 * cpu.output_error && gpu.output_error <= 1.1 * cpu.output_error, "%g, on the CPU %g",
                  gpu.output_error, cpu.output_error);
        CHECK_MSG(gpu.gradient_error >= 0.9 * cpu.gradient_error && gpu.gradient_error <= 1.1 * cpu.gradient_error,
                  "%g, on the CPU %g", gpu.gradient_error, cpu.gradient_error);
        CHECK(gpu.underflow <= cpu.underflow && gpu.underflow >= cpu.underflow);
        CHECK(gpu.overflow <= cpu.overflow && gpu.overflow >= cpu.overflow && (gpu.overflow > 0.5) == overflow);
    }
}

/* Refused as the optimizer is made, by name. */
TEST(what_only_the_cpu_shards) {
    side s(amp_cuda(), false);
    amp_param p = {};
    amp_optimizer_desc d = {};
    amp_optimizer *o = NULL;
    void *weight, *grad;
    CHECK_OK(amp_alloc(s.amp, &weight, 64));
    CHECK_OK(amp_alloc(s.amp, &grad, 64));
    p.name = "w";
    p.weight = amp_tensor1(weight, AMP_F32, 16);
    p.grad = amp_tensor1(grad, AMP_F32, 16);
    d.params = &p;
    d.n_params = 1;
    d.shard = AMP_SHARD_GRADIENTS;
    CHECK_ERR(amp_optimizer_create(s.amp, &o, &d), AMP_ERR_UNSUPPORTED);
    CHECK(strstr(amp_last_error(), "keeps memory of gradients; use AMP_SHARD_STATES") != NULL);
    d.shard = AMP_SHARD_STATES;
    d.overlap_param_gather = 1;
    CHECK_ERR(amp_optimizer_create(s.amp, &o, &d), AMP_ERR_UNSUPPORTED);
    CHECK(strstr(amp_last_error(), ".overlap_param_gather: the") != NULL);
    amp_free(s.amp, weight);
    amp_free(s.amp, grad);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(operands_are_cut); RUN(graphs_cut_at_every_launch); RUN(infinities_and_gradients_stay); RUN(settings_reach_the_gpu);
    RUN(adaptive_precision_on_the_device); RUN(what_only_the_cpu_shards);
    return TEST_END();
}
