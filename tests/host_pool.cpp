// host_pool.cpp - tests a program's own thread pool behind amp_desc.parallel: std::thread, and OpenMP if the compiler has
// it.  The bits must be the same as with the threads of amp.h.
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <cstdio>
#include <thread>
#include <vector>

static void std_threads(void *calls, int32_t n, void (*run)(void *, int32_t), void *arg) {
    std::vector<std::thread> threads;
    ++*static_cast<int *>(calls);
    for (int32_t i = 1; i < n; i++) threads.emplace_back(run, arg, i);
    run(arg, 0);
    for (std::thread &thread : threads) thread.join();
}

static void openmp_threads(void *calls, int32_t n, void (*run)(void *, int32_t), void *arg) {
    ++*static_cast<int *>(calls);
#if defined(_OPENMP)
    #pragma omp parallel for num_threads(n) schedule(static, 1)
#endif
    for (int32_t i = 0; i < n; i++) run(arg, i);
}

enum { SIZE = 192 };
static std::vector<float> product(const amp_parallel &parallel) {
    std::vector<float> a(SIZE * SIZE), c(SIZE * SIZE);
    for (int i = 0; i < SIZE * SIZE; i++) a[static_cast<size_t>(i)] = amp_random_uniform(1, static_cast<uint64_t>(i)) - 0.5f;
    amp_desc desc{};
    desc.threads = 3;
    desc.gemm_always = 1;
    desc.parallel = parallel;
    amp_context *amp = nullptr;
    if (amp_open(&amp, &desc) != AMP_OK ||
        amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, SIZE, SIZE, SIZE, 1, a.data(), SIZE, a.data(), SIZE, 0, c.data(), SIZE) != AMP_OK)
        std::puts(amp_last_error());
    amp_close(amp);
    return c;
}

int main() {
    int calls[2] = {0, 0};
    const std::vector<float> want = product(amp_parallel{});
    const bool same = product(amp_parallel{&calls[0], std_threads}) == want && product(amp_parallel{&calls[1], openmp_threads}) == want;
    const bool called = calls[0] > 0 && calls[1] > 0;
    if (!same || !called) std::printf("%s; %d and %d calls of the host's pools\n", same ? "the same bits" : "other bits", calls[0], calls[1]);
    return !(same && called);
}
