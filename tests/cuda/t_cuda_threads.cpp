/* t_cuda_threads.cpp - tests several threads that use amp_cuda.cu at the same time.  They share a device's memory, plans,
 * graphs and sensors, or have contexts and ranks of their own on one GPU.  Another test loses the GPU.  Results must be
 * those of one thread alone.  `make test-ci` runs the same tests under ThreadSanitizer, which detects data that is accessed
 * without a lock. */
#include "test_cuda.h"
#include <atomic>
#include <thread>

#if defined(__SANITIZE_THREAD__)
extern "C" const char *__tsan_default_options();
const char *__tsan_default_options() { return "halt_on_error=1"; }
#endif

enum { THREADS = 3, ROUNDS = 6, ROWS = 600, COLS = 24, SUM_BYTES = COLS * 4, WIDE = ROWS * COLS, SIDE = 16 };

/* Runs work(i) on so many threads at a time. */
static void at_once(int n, const std::function<void(int)> &work) {
    std::vector<std::thread> threads;
    std::atomic<int> ready{0};
    for (int i = 0; i < n; i++)
        threads.emplace_back([&, i] {
            ready++;
            while (ready < n) std::this_thread::yield();
            work(i);
        });
    for (std::thread &t : threads) t.join();
}

/* One thread's work on a device that others use too, in a stream of its own: memory, sums with scratch memory, products of
   shapes that another thread has too. */
struct shared_work {
    cuda_side &gpu;
    const amp_backend *b = gpu.backend;
    void *stream = NULL;
    float *x = NULL, *y = NULL, *sum = NULL;
    amp_result result = AMP_OK;

    explicit shared_work(cuda_side &g) : gpu(g) {
        x = gpu.put(cuda_random(WIDE, 3));
        y = (float *)gpu.room(WIDE * 4);
        sum = (float *)gpu.room(SUM_BYTES);
        CHECK_EQ(b->stream_create(gpu.dev, &stream), AMP_OK);
    }
    void done(amp_result r) { if (result == AMP_OK) result = r; }
    void sums() {
        amp_k_column_sum k = {};
        k.x = {x, AMP_F32, 0, ROWS, COLS, COLS};
        k.out = sum, k.out_dtype = AMP_F32;
        done(b->column_sum(gpu.dev, &k, stream));
    }
    void product(int64_t m, amp_dtype stored = AMP_F32) {
        amp_k_gemm g = {};
        g.m = m, g.n = COLS, g.k = COLS, g.batch = 1, g.alpha = 1;
        g.a = x, g.b = x, g.c = y;
        g.lda = g.ldb = g.ldc = COLS;
        g.a_dtype = g.b_dtype = stored, g.c_dtype = AMP_F32, g.compute = AMP_BF16;
        done(b->gemm(gpu.dev, &g, stream));
    }
    void round(int number, int thread) {
        void *p = NULL, *event = NULL;
        int32_t over = 0;
        const size_t bytes = (size_t)(512 << (number + thread) % 4);
        amp_memory_info info;
        amp_telemetry sensors;
        done(b->alloc(gpu.dev, &p, bytes));
        done(b->fill(gpu.dev, p, 1, bytes, stream));
        sums();
        product(8 * (1 + (number + thread) % 4));
        done(b->event_create(gpu.dev, &event, 0));
        done(b->event_record(gpu.dev, event, stream));
        done(b->event_done(gpu.dev, event, &over));
        done(b->memory(gpu.dev, &info));
        (void)b->telemetry(gpu.dev, &sensors);          /* there may be none */
        done(b->event_sync(gpu.dev, event));
        b->event_destroy(gpu.dev, event);
        b->free(gpu.dev, p, bytes);
        if (number % 3 == 2) done(b->trim(gpu.dev));
    }
    void end(std::string *out) {
        product(32);
        done(b->stream_sync(gpu.dev, stream));
        CHECK_EQ(result, AMP_OK);
        gpu.get(out, sum, SUM_BYTES);
        gpu.get(out, y, 32 * COLS * 4);
        b->stream_destroy(gpu.dev, stream);
    }
};

/* Without measuring and with it. */
CUDA_TEST(one_device) {
    for (int32_t autotune = 0; autotune < 2; autotune++) {
        amp_backend_desc d = {};
        d.autotune = autotune;
        std::string right;
        {
            cuda_side alone(amp_cuda(), d);
            shared_work work(alone);
            for (int i = 0; i < ROUNDS; i++) work.round(i, 0);
            work.end(&right);
        }
        cuda_side gpu(amp_cuda(), d);
        std::vector<shared_work> all;
        for (int i = 0; i < THREADS; i++) all.emplace_back(gpu);
        at_once(THREADS, [&](int i) { for (int n = 0; n < ROUNDS; n++) all[(size_t)i].round(n, i); });
        for (shared_work &work : all) {
            std::string out;
            work.end(&out);
            CHECK(out == right);
        }
    }
}

/* Products that need nothing but their plan, which whoever comes first makes. */
CUDA_TEST(plans_of_all) {
    cuda_side gpu(amp_cuda());
    std::vector<shared_work> all;
    std::string right, out;
    for (int i = 0; i < THREADS; i++) all.emplace_back(gpu);
    at_once(THREADS, [&](int i) {
        for (int64_t m = 8; m <= 128; m += 8) all[(size_t)i].product(m, AMP_BF16);
    });
    for (shared_work &work : all) {
        work.sums();
        work.end(&out);
        if (right.empty()) right = out;
        CHECK(out == right);
        out.clear();
    }
}

/* A thread captures and launches graphs with scratch memory of theirs while another computes and frees. */
CUDA_TEST(captures_beside_work) {
    cuda_side gpu(amp_cuda());
    shared_work one(gpu), other(gpu);
    std::string right, out;
    one.round(0, 0), other.round(0, 1);
    at_once(2, [&](int i) {
        for (int n = 0; n < ROUNDS; n++) {
            void *graph = NULL;
            if (i) { other.round(n, 1); continue; }
            one.done(gpu.backend->graph_begin(gpu.dev, one.stream));
            one.sums();
            one.product(32);
            one.done(gpu.backend->graph_end(gpu.dev, one.stream, &graph));
            one.done(gpu.backend->graph_launch(gpu.dev, graph, one.stream));
            one.done(gpu.backend->stream_sync(gpu.dev, one.stream));
            gpu.backend->graph_destroy(gpu.dev, graph);
        }
    });
    one.end(&out);
    other.end(&right);
    CHECK(out == right);
}

/* Contexts that are opened, used and closed at the same time on one GPU: each trains as if it were alone. */
static std::string train(const amp_backend *backend, amp_ranks *ranks = NULL, int rank = 0) {
    std::vector<float> numbers = cuda_random(SIDE * SIDE, 5);
    std::string out(SIDE * SIDE * 4, 0);
    amp_desc d = {};
    amp_context *amp = NULL;
    amp_optimizer *optimizer = NULL;
    amp_optimizer_desc o = {};
    amp_param p = {};
    amp_linear_op op = {};
    float *memory = NULL;
    d.backend = backend;
    d.dtype = AMP_BF16;
    d.threads = 1;
    if (ranks) CHECK_OK(amp_ranks_reducer(ranks, rank, &d.reducer));
    if (amp_open(&amp, &d) != AMP_OK || amp_alloc(amp, (void **)&memory, 6 * SIDE * SIDE * 4) != AMP_OK) return amp_last_error();
    for (int i = 0; i < 6; i++)
        CHECK_OK(amp_copy(amp, memory + i * SIDE * SIDE, numbers.data(), SIDE * SIDE * 4, AMP_COPY_TO_DEVICE));
    auto matrix = [&](int i) { return amp_tensor2(memory + i * SIDE * SIDE, AMP_F32, SIDE, SIDE); };
    p.name = "w", p.weight = matrix(0), p.grad = matrix(1);
    o.params = &p, o.n_params = 1, o.lr = 0.01f;
    op.weight = &p, op.x = matrix(2), op.y = matrix(3), op.dy = matrix(4), op.dx = matrix(5);
    CHECK_OK(amp_param_register(amp, &p, 1));
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &o));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_OK(amp_linear(amp, &op));
        CHECK_OK(amp_autocast_end(amp));
        CHECK_OK(amp_linear_backward(amp, &op));
        CHECK_OK(amp_step(optimizer, NULL));
    }
    CHECK_OK(amp_copy(amp, &out[0], memory, out.size(), AMP_COPY_TO_HOST));
    CHECK_OK(amp_sync(amp));
    amp_optimizer_destroy(optimizer);
    amp_param_forget(amp, &p, 1);
    amp_free(amp, memory);
    amp_close(amp);
    return out;
}
CUDA_TEST(contexts_on_one_gpu) {
    const std::string right = train(amp_cuda());
    std::string out[THREADS];
    at_once(THREADS, [&](int i) { out[i] = train(amp_cuda()); });
    for (const std::string &weights : out) CHECK(weights == right);
}

/* Ranks of one process, whose gradients go through the host: with the same data, halves of twice the gradient. */
CUDA_TEST(ranks_on_one_gpu) {
    const std::string right = train(amp_cuda());
    std::string out[2];
    amp_ranks *ranks = NULL;
    amp_ranks_desc d = {};
    d.world = 2;
    CHECK_OK(amp_ranks_create(&ranks, &d));
    at_once(2, [&](int i) { out[i] = train(amp_cuda(), ranks, i); });
    for (const std::string &weights : out) CHECK(weights == right);
    amp_ranks_destroy(ranks);
}

/* Every thread is told of a GPU that is lost, and the log once. */
static std::atomic<int> told;
CUDA_TEST(lost_for_all) {
    amp_backend_desc d = {};
    amp_host host = *cuda_host();
    std::atomic<int> failed{0};
    void *dev = NULL, *streams[THREADS];
    host.fail = [](void *, amp_result result, const char *) { return result; };
    host.log = [](void *, amp_log_level level, int, const char *) { told += level == AMP_LOG_ERROR; };
    told = 0;
    CHECK_EQ(amp_cuda()->open(&dev, &host, &d), AMP_OK);
    for (void *&stream : streams) CHECK_EQ(amp_cuda()->stream_create(dev, &stream), AMP_OK);
    coc_fail(NULL, 1, cudaErrorIllegalAddress, 1);
    at_once(THREADS, [&](int i) {
        for (int n = 0; n < ROUNDS; n++) failed += amp_cuda()->stream_sync(dev, streams[i]) == AMP_ERR_DEVICE;
    });
    CHECK_EQ(failed, THREADS * ROUNDS);
    CHECK_EQ(told, 1);
    for (void *stream : streams) amp_cuda()->stream_destroy(dev, stream);
    amp_cuda()->close(dev);
    coc_fail_clear();
    coc_reset();
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(one_device);
    RUN(plans_of_all);
    RUN(captures_beside_work);
    RUN(contexts_on_one_gpu);
    RUN(ranks_on_one_gpu);
    RUN(lost_for_all);
    return TEST_END();
}
