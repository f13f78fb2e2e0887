/* t_harness.cpp - tests the model GPU itself, with correct and broken kernels that are written for this test. */
#include "coc.h"
#include <cublasLt.h>
#include "amp.h"

static inline void fragment_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16) {
    coc_mma_m16n8k16(c, a, b, bf16);
}
static inline void fragment_mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { coc_mma_m16n8k8_tf32(c, a, b); }
static inline void fragment_load(uint32_t (&r)[4], const void *row, bool transposed) { coc_ldmatrix_x4(r, row, transposed); }
static inline void fragment_copy(void *shared, const void *from, bool there) {
    coc_copy_async(shared, from, 16, there ? 16 : 0);
    coc_copy_commit();
    coc_copy_wait(0);
}
static inline uint32_t fragment_number(const void *shared) { return coc_shared_number(shared); }
static inline void fragment_gate_init(void *gate, unsigned count) { coc_mbarrier_init(gate, count); }
static inline void fragment_gates_ready() { coc_mbarriers_ready(); }
static inline void fragment_expect(void *gate, unsigned bytes) { coc_mbarrier_arrive(gate, bytes); }
static inline void fragment_arrive(void *gate) { coc_mbarrier_arrive(gate, 0); }
static inline void fragment_gate_wait(void *gate, unsigned parity) { coc_mbarrier_wait(gate, parity); }
static inline void fragment_bytes(void *to, const void *from, unsigned bytes, void *gate) { coc_bulk_fetch(to, from, bytes, gate); }
static inline void fragment_box(void *to, const void *map, void *gate, int c0, int c1, int c2, int c3) {
    coc_tensor_fetch(to, map, gate, c0, c1, c2, c3);
}
/* Of a tile in shared memory; offsets in bytes. */
static inline uint64_t descriptor(const void *tile, unsigned leading = 16, unsigned stride = 1024) {
    return coc_shared_number(tile) >> 4 | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}
struct fragment_operands;
template <int N, bool ACROSS> void fragment_group(float (&c)[N / 8][4], const uint32_t (&a)[4], const fragment_operands &o);
#include "fragments.h"
template <int N, bool ACROSS> void fragment_group(float (&c)[N / 8][4], const uint32_t (&a)[4], const fragment_operands &o) {
    coc_wgmma_fence();
    coc_wgmma(&c[0][0], N, o.left ? NULL : a, o.left ? descriptor(o.left) : 0, descriptor(o.right, o.leading), ACROSS, o.bf16, o.add);
    coc_wgmma_commit();
    coc_wgmma_wait(0);
}
#include "../test.h"
#include <math.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
enum { UNDER_ASAN = 1 };
#else
enum { UNDER_ASAN = 0 };
#endif

namespace {

template <class T> struct same { typedef T type; };
template <class... P>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   typename same<P>::type... args) {
    void *pointers[sizeof...(P) + 1] = {(void *)&args...};
    return cudaLaunchKernel(kernel, grid, block, pointers, shared, stream);
}

/* n values of device memory, released at the end. */
template <class T> struct array {
    T *data = nullptr;
    size_t n;
    explicit array(size_t count) : n(count) { CHECK_EQ(cudaMalloc(&data, n * sizeof(T)), cudaSuccess); }
    explicit array(const std::vector<T> &host) : array(host.size()) {
        CHECK_EQ(cudaMemcpy(data, host.data(), n * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    }
    array(const array &) = delete;
    ~array() { cudaFree(data); }
    std::vector<T> get() const {
        std::vector<T> host(n);
        CHECK_EQ(cudaMemcpy(host.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
        return host;
    }
    void zero() { CHECK_EQ(cudaMemset(data, 0, n * sizeof(T)), cudaSuccess); }
};
template <class T> void append(std::string *out, const std::vector<T> &v) {
    out->append((const char *)v.data(), v.size() * sizeof(T));
}

cudaStream_t new_stream() {
    cudaStream_t s = nullptr;
    CHECK_EQ(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    return s;
}
cudaEvent_t new_event(unsigned flags = cudaEventDisableTiming) {
    cudaEvent_t e = nullptr;
    CHECK_EQ(cudaEventCreateWithFlags(&e, flags), cudaSuccess);
    return e;
}
bool has(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }
/* One fault with this in its text has been seen, and is taken. */
bool took_fault(const char *part) {
    std::string text = coc_take_faults();
    if (!has(text, part)) printf("      faults: '%s'\n", text.c_str());
    return has(text, part);
}

void begin() {
    coc_reset();
    coc_set_order(COC_FORWARD);
    coc_set_schedule(COC_LATE);
    coc_set_patience(1);
}
void end() {
    coc_check_red_zones();
    std::string faults = coc_take_faults();
    CHECK_MSG(faults.empty(), "%s", faults.c_str());
    coc_alive left = coc_living();
    CHECK_EQ(left.allocations + left.pinned + left.streams + left.events + left.graphs + left.graph_execs + left.blas_objects, 0);
    CHECK_EQ(left.bytes, 0);
}
#define HARNESS_TEST(name) \
    void body_##name(); \
    TEST(name) { begin(); body_##name(); end(); } \
    void body_##name()

/* ---- Order of threads and blocks */

__global__ void k_sequence(int *out, int *next) {
    int block = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    int thread = (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    int threads = (int)(blockDim.x * blockDim.y * blockDim.z);
    out[block * threads + thread] = atomicAdd(&next[block], 1);
}
HARNESS_TEST(orders) {
    array<int> out(6 * 40), next(6);
    std::vector<int> results[COC_ORDERS];
    for (int order = 0; order < COC_ORDERS; order++) {
        coc_set_order((coc_order)order);
        next.zero();
        CHECK_EQ(launch(k_sequence, dim3(1, 2, 3), dim3(5, 4, 2), 0, 0, out.data, next.data), cudaSuccess);
        results[order] = out.get();
        for (int n : next.get()) CHECK_EQ(n, 40);
    }
    int moved = 0;
    for (int i = 0; i < 6 * 40; i++) {
        CHECK_EQ(results[COC_FORWARD][(size_t)i], i % 40);
        CHECK_EQ(results[COC_REVERSE][(size_t)i], 39 - i % 40);
        moved += results[COC_RANDOM][(size_t)i] != i % 40;
    }
    CHECK(moved > 120);
}

/* ---- Barriers: a reduction that is right, and without one of its barriers */

__global__ void k_block_sum(float *out, const float *x, int missing) {
    COC_SHARED(float, part, 256);
    unsigned t = threadIdx.x;
    part[t] = x[blockIdx.x * blockDim.x + t];
    if (!missing) __syncthreads();
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
        if (t < step) part[t] += part[t + step];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = part[0];
}
/* Sums of rows; with a barrier missing, a warp that is quick writes the next row's part before a slow one has read. */
__global__ void k_row_sums(float *out, const float *x, int rows, int missing) {
    COC_SHARED(float, part, 2);
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int row = 0; row < rows; row++) {
        float sum = x[row * 64 + (int)threadIdx.x];
        for (unsigned step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, (int)step);
        if (lane == 0) part[warp] = sum;
        __syncthreads();
        sum = part[0] + part[1];
        for (unsigned step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, (int)step);
        if (lane == 0) out[row * 2 + (int)warp] = sum;
        if (!missing) __syncthreads();
    }
}
HARNESS_TEST(quick_warp_shows) {
    std::vector<float> host(8 * 64);
    for (size_t i = 0; i < host.size(); i++) host[i] = amp_random_uniform(1, i);
    array<float> x(host), out(16);
    for (int missing = 0; missing < 2; missing++) {
        std::string difference = coc_every_order([&](std::string *results) {
            CHECK_EQ(launch(k_row_sums, 1, 64, 0, 0, out.data, x.data, 8, missing), cudaSuccess);
            append(results, out.get());
        });
        CHECK_MSG(missing == !difference.empty(), "%s", difference.c_str());
        if (missing) CHECK_MSG(has(difference, "one warp ahead"), "%s", difference.c_str());
    }
}
HARNESS_TEST(missing_barrier_shows) {
    std::vector<float> host(8 * 256);
    for (size_t i = 0; i < host.size(); i++) host[i] = amp_random_uniform(1, i);
    array<float> x(host), out(8);
    for (int missing = 0; missing < 2; missing++) {
        std::string difference = coc_every_order([&](std::string *results) {
            CHECK_EQ(launch(k_block_sum, 8, 256, 0, 0, out.data, x.data, missing), cudaSuccess);
            append(results, out.get());
        });
        if (missing) CHECK(!difference.empty());
        else CHECK_MSG(difference.empty(), "%s", difference.c_str());
    }
    launch(k_block_sum, 8, 256, 0, 0, out.data, x.data, 0);
    double sum = 0;
    for (int i = 0; i < 256; i++) sum += host[(size_t)i];
    CHECK(fabs(out.get()[0] - sum) < 256 * 256 * ldexp(1, -24));
}

__global__ void k_barrier_votes(int *out) {
    int t = (int)threadIdx.x;
    int count = __syncthreads_count(t % 3 == 0);
    int either = __syncthreads_or(t == 77), none = __syncthreads_or(0);
    int all = __syncthreads_and(1), most = __syncthreads_and(t != 5);
    if (t == 99) out[0] = count, out[1] = either, out[2] = none, out[3] = all, out[4] = most;
}
HARNESS_TEST(barriers_vote) {
    array<int> out(5);
    CHECK_EQ(launch(k_barrier_votes, 1, 100, 0, 0, out.data), cudaSuccess);
    std::vector<int> r = out.get();
    CHECK(r[0] == 34 && r[1] != 0 && r[2] == 0 && r[3] != 0 && r[4] == 0);
}

/* Threads that return count as arrived. */
__global__ void k_early_return(int *out) {
    if (threadIdx.x >= 40) return;
    int alone = __syncthreads_count(1);
    unsigned votes = __ballot_sync(~0u, 1);
    int absent = __shfl_sync(~0u, (int)threadIdx.x, 31);
    if (threadIdx.x == 39) out[0] = alone, out[1] = (int)votes, out[2] = absent;
}
HARNESS_TEST(returned_threads) {
    array<int> out(3);
    std::string difference = coc_every_order([&](std::string *results) {
        CHECK_EQ(launch(k_early_return, 1, 70, 0, 0, out.data), cudaSuccess);
        append(results, out.get());
    });
    CHECK_MSG(difference.empty(), "%s", difference.c_str());
    CHECK_EQ(out.get()[0], 40);
    CHECK_EQ(out.get()[1], 0xff);       /* lanes 0 to 7 of the second warp are left */
    CHECK_EQ(out.get()[2], -1);         /* what a lane that is gone gave is undefined: 0xFF bytes */
}

/* ---- Broken synchronisation is found and ends the kernel with an error that lasts */

__global__ void k_divergent_lines(int *out) {
    if (threadIdx.x < 16) __syncthreads();
    else __syncthreads();
    out[threadIdx.x] = 1;
}
__global__ void k_divergent_count(int *out) {
    __syncthreads();
    if (threadIdx.x == 3)
        while (out) __syncwarp(1u << 3 | 1u << 4);
    __syncthreads();
}
__global__ void k_deadlock(int *out) {
    if (threadIdx.x % 2) __syncthreads();
    else out[threadIdx.x] = __shfl_sync(~0u, 1, 0);
}
__global__ void k_not_in_mask(int *out) { out[threadIdx.x] = (int)__ballot_sync(0xfffffffeu, 1); }
__global__ void k_other_operation(int *out) {
    if (threadIdx.x == 7) out[7] = (int)__ballot_sync(~0u, 1);
    else out[threadIdx.x] = __shfl_sync(~0u, 1, 0);
}
__global__ void k_trap(int *out) {
    out[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 9) __trap();
}
void check_broken(void (*kernel)(int *), const char *text, cudaError_t error) {
    for (int order = 0; order < COC_ORDERS; order++) {
        int *out = nullptr;
        coc_set_order((coc_order)order);
        CHECK_EQ(cudaMalloc(&out, 4096), cudaSuccess);
        CHECK_EQ(launch(kernel, 3, 64, 0, 0, out), cudaSuccess);
        CHECK_EQ(cudaDeviceSynchronize(), error);
        CHECK(took_fault(text));
        CHECK_EQ(cudaGetLastError(), error);            /* it lasts */
        CHECK_EQ(launch(kernel, 3, 64, 0, 0, out), error);
        CHECK_EQ(cudaFree(out), error);
        CHECK_EQ(cudaDeviceReset(), cudaSuccess);
        CHECK_EQ(cudaGetLastError(), cudaSuccess);
    }
}
HARNESS_TEST(broken_synchronisation) {
    check_broken(k_divergent_lines, "divergent barrier", cudaErrorLaunchFailure);
    check_broken(k_divergent_count, "deadlock", cudaErrorLaunchTimeout);
    check_broken(k_deadlock, "deadlock", cudaErrorLaunchTimeout);
    check_broken(k_not_in_mask, "lane 0 is not in its mask", cudaErrorLaunchFailure);
    check_broken(k_other_operation, "meet in different operations", cudaErrorLaunchFailure);
    check_broken(k_trap, "__trap", cudaErrorLaunchFailure);
    array<int> out(64);                                 /* and all is well afterwards */
    CHECK_EQ(launch(k_sequence, 1, 64, 0, 0, out.data, out.data), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
}
HARNESS_TEST(fault_texts_name_kernel_and_thread) {
    array<int> out(64);
    launch(k_trap, 1, 64, 0, 0, out.data);
    cudaDeviceSynchronize();
    std::string text = coc_take_faults();
    CHECK_MSG(has(text, "kernel k_trap, block (0,0,0), thread (9,0,0)"), "%s", text.c_str());
    cudaDeviceReset();
}

/* ---- Warps */

enum { WARP_OPS = 4 };
__global__ void k_shuffles(int *out, int width) {
    int lane = (int)threadIdx.x % 32, value = 1000 + (int)threadIdx.x;
    int *mine = out + (blockIdx.x * blockDim.x + threadIdx.x) * WARP_OPS;
    mine[0] = __shfl_sync(~0u, value, lane * 7 + 3, width);
    mine[1] = __shfl_up_sync(~0u, value, 3, width);
    mine[2] = __shfl_down_sync(~0u, value, 5, width);
    mine[3] = (int)__shfl_xor_sync(~0u, (long long)value, 6, width);
}
HARNESS_TEST(shuffles) {
    for (int width = 1; width <= 32; width *= 2) {
        array<int> out(2 * 64 * WARP_OPS);
        std::string difference = coc_every_order([&](std::string *results) {
            CHECK_EQ(launch(k_shuffles, 2, 64, 0, 0, out.data, width), cudaSuccess);
            append(results, out.get());
        });
        CHECK_MSG(difference.empty(), "%s", difference.c_str());
        std::vector<int> r = out.get();
        for (int t = 0; t < 64; t++) {
            int lane = t % 32, first = lane / width * width, base = 1000 + t - lane, own = 1000 + t;
            const int *mine = &r[(size_t)(64 + t) * WARP_OPS];
            CHECK_EQ(mine[0], base + first + (lane * 7 + 3) % width);
            CHECK_EQ(mine[1], lane - first < 3 ? own : own - 3);
            CHECK_EQ(mine[2], lane - first + 5 >= width ? own : own + 5);
            CHECK_EQ(mine[3], (lane ^ 6) / width > lane / width ? own : base + (lane ^ 6));
        }
    }
}

__global__ void k_votes(unsigned *out) {
    unsigned lane = threadIdx.x % 32;
    unsigned odd = __ballot_sync(~0u, lane & 1), same = __match_any_sync(~0u, lane / 4);
    int any = __any_sync(~0u, lane == 9), all = __all_sync(~0u, lane < 32), not_all = __all_sync(~0u, lane != 9);
    unsigned sum = __reduce_add_sync(~0u, lane), low = __reduce_min_sync(~0u, lane + 3);
    unsigned high = __reduce_max_sync(~0u, lane);
    int least = __reduce_min_sync(~0u, -(int)lane);
    if (lane != 13) return;
    out[0] = odd, out[1] = same, out[2] = (unsigned)any, out[3] = (unsigned)all, out[4] = (unsigned)not_all;
    out[5] = sum, out[6] = low, out[7] = high, out[8] = (unsigned)least;
}
HARNESS_TEST(votes) {
    array<unsigned> out(9);
    launch(k_votes, 1, 32, 0, 0, out.data);
    std::vector<unsigned> r = out.get();
    CHECK_EQ(r[0], 0xaaaaaaaau);
    CHECK_EQ(r[1], 0xf000u);
    CHECK(r[2] && r[3] && !r[4]);
    CHECK(r[5] == 496 && r[6] == 3 && r[7] == 31 && (int)r[8] == -31);
}

/* The lower half goes through several exchanges while the upper half still holds the result of the first. */
__global__ void k_halves(int *out) {
    unsigned lane = threadIdx.x, mine = lane < 16 ? 0xffffu : 0xffff0000u;
    int first = __shfl_xor_sync(~0u, (int)lane, 1), sum = 0;
    for (int i = 0; i < (lane < 16 ? 5 : 2); i++) sum += __shfl_xor_sync(mine, (int)lane * 10 + i, 3);
    if (lane < 2) sum += (int)__popc(__ballot_sync(3u, 1));
    int last = __shfl_sync(~0u, sum, (int)(31 - lane));
    out[lane] = first * 1000000 + last;
}
HARNESS_TEST(parts_of_a_warp) {
    array<int> out(32);
    std::string difference = coc_every_order([&](std::string *results) {
        CHECK_EQ(launch(k_halves, 1, 32, 0, 0, out.data), cudaSuccess);
        append(results, out.get());
    });
    CHECK_MSG(difference.empty(), "%s", difference.c_str());
    std::vector<int> r = out.get(), sums(32);
    for (int lane = 0; lane < 32; lane++) {
        int n = lane < 16 ? 5 : 2;
        sums[(size_t)lane] = n * (lane ^ 3) * 10 + n * (n - 1) / 2 + (lane < 2 ? 2 : 0);
    }
    for (int lane = 0; lane < 32; lane++) CHECK_EQ(r[(size_t)lane], (lane ^ 1) * 1000000 + sums[(size_t)(31 - lane)]);
}

/* ---- Atomics, from blocks that run in parallel */

__global__ void k_atomics(int *i, unsigned *u, unsigned long long *l, float *f, double *d, int n) {
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(i, 1);
    atomicAdd(u, 2u);
    atomicAdd(l, 1ull << 33);
    atomicAdd(f, 1.0f);
    atomicAdd(d, 0.5);
    atomicMax(i + 1, x);
    atomicMin(i + 2, -x);
    atomicOr(u + 1, 1u << (x % 32));
    atomicAnd(u + 2, ~(1u << (x % 16)));
    atomicXor(u + 3, (unsigned)x);
    if (atomicInc(u + 4, (unsigned)n - 1) == (unsigned)n - 1) atomicExch(i + 3, 1);
    for (int old = i[4], seen; ; old = seen)            /* a maximum of pairs by compare and swap */
        if ((seen = atomicCAS(i + 4, old, old < x ? x : old)) == old) break;
    atomicMax(l + 1, (unsigned long long)x << 20);
    atomicSub(i + 5, 3);
}
HARNESS_TEST(atomics) {
    const int n = 64 * 96;
    array<int> i(6);
    array<unsigned> u(5);
    array<unsigned long long> l(2);
    array<float> f(1);
    array<double> d(1);
    i.zero(), u.zero(), l.zero(), f.zero(), d.zero();
    CHECK_EQ(cudaMemset(u.data + 2, 0xFF, 4), cudaSuccess);
    CHECK_EQ(launch(k_atomics, 64, 96, 0, 0, i.data, u.data, l.data, f.data, d.data, n), cudaSuccess);
    std::vector<int> ri = i.get();
    std::vector<unsigned> ru = u.get();
    CHECK(ri[0] == n && ri[1] == n - 1 && ri[2] == 1 - n && ri[3] == 1 && ri[4] == n - 1 && ri[5] == -3 * n);
    CHECK(ru[0] == 2u * n && ru[1] == ~0u && ru[2] == 0xffff0000u && ru[3] == 0 && ru[4] == 0);
    CHECK(l.get()[0] == (unsigned long long)n << 33 && l.get()[1] == (unsigned long long)(n - 1) << 20);
    CHECK(f.get()[0] == (float)n && d.get()[0] == n / 2.0);
}

/* The last block to finish sees what all others wrote. */
__global__ void k_last_block(int *out, int *parts, unsigned *done) {
    COC_SHARED(int, last, 1);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = (int)blockIdx.x + 1;
        __threadfence();
        last[0] = atomicAdd(done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last[0] || threadIdx.x) return;
    int sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++) sum += parts[b];
    out[0] = sum;
}
HARNESS_TEST(last_block) {
    array<int> out(1), parts(50);
    array<unsigned> done(1);
    std::string difference = coc_every_order([&](std::string *results) {
        done.zero();
        CHECK_EQ(launch(k_last_block, 50, 32, 0, 0, out.data, parts.data, done.data), cudaSuccess);
        append(results, out.get());
    });
    CHECK_MSG(difference.empty(), "%s", difference.c_str());
    CHECK_EQ(out.get()[0], 50 * 51 / 2);
}

/* ---- Shared memory */

template <int N> __global__ void k_shared(unsigned *out, int words) {
    COC_SHARED(unsigned, fixed, N);
    COC_SHARED(unsigned short, small, 3);
    unsigned *dynamic = (unsigned *)coc_dynamic_shared(), poison = 1;
    for (int i = 0; i < N; i++) poison = poison && fixed[i] == ~0u;
    for (int i = 0; i < words; i++) poison = poison && dynamic[i] == ~0u;
    poison = poison && small[2] == 0xffff && sizeof fixed == 4 * N;
    poison = poison && ((uintptr_t)dynamic & 127) == 0 && ((uintptr_t)fixed & 15) == 0;
    __syncthreads();
    fixed[threadIdx.x] = dynamic[threadIdx.x] = threadIdx.x;
    small[threadIdx.x % 3] = 5;
    __syncthreads();
    unsigned other = blockDim.x - 1 - threadIdx.x;
    out[blockIdx.x * blockDim.x + threadIdx.x] = poison && fixed[other] == other && dynamic[other] == other;
}
HARNESS_TEST(shared_memory_is_poisoned) {
    array<unsigned> out(7 * 32);
    for (int kernel = 0; kernel < 2; kernel++) {
        CHECK_EQ(launch(kernel ? k_shared<32> : k_shared<100>, 7, 32, 40 * 4, 0, out.data, 40), cudaSuccess);
        for (unsigned good : out.get()) CHECK_EQ(good, 1);
    }
}

__global__ void k_shared_overrun(int at) {
    volatile float *dynamic = (volatile float *)coc_dynamic_shared();
    dynamic[at] = 1;
}
__global__ void k_static_overrun(int at) {
    COC_SHARED(float, fixed, 8);
    COC_SHARED(float, next, 8);
    volatile float *p = fixed;          /* through a pointer, so that it is not the array's bounds that are seen */
    next[0] = 1;
    p[at] = 1;
}
__global__ void k_too_much_static(int) {
    COC_SHARED(float, a, 8 * 1024);
    COC_SHARED(float, b, 8 * 1024);
    a[0] = b[0] = 1;
}
HARNESS_TEST(shared_memory_overrun) {
    CHECK_EQ(launch(k_shared_overrun, 1, 1, 64, 0, 15), cudaSuccess);
    CHECK_EQ(launch(k_static_overrun, 1, 1, 0, 0, 7), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(launch(k_too_much_static, 1, 1, 0, 0, 0), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaErrorLaunchOutOfResources);
    CHECK(took_fault("static shared memory"));
    cudaDeviceReset();
    if (UNDER_ASAN) return;             /* seen when it happens: sanitizer_reports */
    for (int fixed = 0; fixed < 2; fixed++) {
        CHECK_EQ(launch(fixed ? k_static_overrun : k_shared_overrun, 1, 1, 64, 0, fixed ? 8 : 16), cudaSuccess);
        CHECK_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
        CHECK(took_fault("beyond its shared memory"));
        cudaDeviceReset();
    }
}

/* ---- cp.async */

__global__ void k_copy_async(float *out, const float *in, int wait) {
    float *stage = (float *)coc_dynamic_shared();
    unsigned t = threadIdx.x;
    coc_copy_async(stage + 4 * t, in + 4 * t, 16, 16);
    coc_copy_commit();
    coc_copy_async(stage + 256 + 4 * t, in + 256 + 4 * t, 16, 16);
    coc_copy_commit();
    coc_copy_wait(wait);
    __syncthreads();
    unsigned other = 63 - t;
    out[t] = stage[4 * other];
    out[64 + t] = stage[256 + 4 * other];
    __syncthreads();            /* before any thread lets its own copies land */
    coc_copy_wait(0);
}
HARNESS_TEST(async_copies_land_late) {
    std::vector<float> host(512);
    for (size_t i = 0; i < host.size(); i++) host[i] = (float)i;
    array<float> in(host), out(128);
    for (int wait = 0; wait < 3; wait++) {
        CHECK_EQ(launch(k_copy_async, 1, 64, 2048, 0, out.data, in.data, wait), cudaSuccess);
        std::vector<float> r = out.get();
        int missing = 0;
        for (size_t i = 0; i < 128; i++) {
            if (isnan(r[i])) missing++;
            else CHECK_EQ(r[i], (i < 64 ? 4 * (63 - i) : 256 + 4 * (127 - i)));
        }
        CHECK_EQ(missing, wait * 64);
    }
}

/* ---- Tensor cores */

HARNESS_TEST(tensor_core_fragments) {
    for (bool bf16 : {false, true}) {
        CHECK_MSG(fragment_products(bf16).empty(), "%s", fragment_products(bf16).c_str());
        CHECK_MSG(fragment_numbers(bf16).empty(), "%s", fragment_numbers(bf16).c_str());
        CHECK(fragment_error(bf16) <= 16.0 / (1 << 24));    /* 16 additions, each rounded */
    }
    for (bool transposed : {false, true}) CHECK_MSG(fragment_loads(transposed).empty(), "%s", fragment_loads(transposed).c_str());
    CHECK_MSG(fragment_copies().empty(), "%s", fragment_copies().c_str());
}
HARNESS_TEST(tensor_core_fragments_of_words) {
    CHECK(fragment_word_error(true, 0) == 0);
    for (uint64_t seed = 0; seed < 64; seed++) CHECK(fragment_word_error(false, seed) <= 8.0 / (1 << 24));
    CHECK_MSG(fragment_word_numbers().empty(), "%s", fragment_word_numbers().c_str());
}
HARNESS_TEST(words_need_tensor_cores_of_8_0) {
    coc_set_devices(1, (size_t)1 << 28, 4, 90, 75);
    CHECK(fragment_word_error(true, 0) == HUGE_VAL);
    CHECK(took_fault("mma.m16n8k8 in code that was compiled for sm_75"));
    cudaDeviceReset();
    coc_set_devices(2);
}
__global__ void k_ldmatrix_unaligned(uint32_t *out) {
    coc_ldmatrix_x4(out + 4 * threadIdx.x, coc_dynamic_shared() + 16 * threadIdx.x + 8, false);
}
HARNESS_TEST(unaligned_matrices) {
    array<uint32_t> out(128);
    CHECK_EQ(launch(k_ldmatrix_unaligned, 1, 32, 1024, 0, out.data), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaErrorMisalignedAddress);
    CHECK(took_fault("ldmatrix of a row"));
    cudaDeviceReset();
}

/* A product of copied tiles whose copies nobody waits for has nothing but NaN. */
__global__ void k_product_of_copies(float *out, const uint32_t *in, int wait) {
    unsigned char *tile = coc_dynamic_shared();
    uint32_t a[4], b[4];
    float c[4] = {0, 0, 0, 0};
    coc_copy_async(tile + 16 * threadIdx.x, in + 4 * threadIdx.x, 16, 16);
    coc_copy_commit();
    if (wait) coc_copy_wait(0);
    __syncthreads();
    coc_ldmatrix_x4(a, tile + 16 * threadIdx.x, false);
    coc_ldmatrix_x4(b, tile + 16 * threadIdx.x, true);
    coc_mma_m16n8k16(c, a, b, true);
    for (unsigned i = 0; i < 4; i++) out[4 * threadIdx.x + i] = c[i];
    __syncthreads();
    coc_copy_wait(0);
}
HARNESS_TEST(missing_copy_wait_shows) {
    array<uint32_t> in(std::vector<uint32_t>(128, 0x3f803f80u));
    array<float> out(128);
    for (int wait = 0; wait < 2; wait++) {
        CHECK_EQ(launch(k_product_of_copies, 1, 32, 512, 0, out.data, in.data, wait), cudaSuccess);
        for (float x : out.get()) CHECK(wait ? x == 16.0f : isnan(x));
    }
}

/* ---- Compute capability 9.0 */

/* The model of a GPU that code for sm_90a runs on, while it exists. */
struct hopper {
    hopper() { coc_set_devices(2, (size_t)1 << 24, 4, 90, 90 + COC_LETTER_A); }
    ~hopper() {
        coc_set_shared_base(1024);
        coc_set_order(COC_FORWARD);
        coc_set_devices(2);
    }
};
HARNESS_TEST(warpgroup_fragments) {
    hopper gpu;
    for (unsigned base : {1024u, 3072u, 1024u + 128u})
        for (int order = 0; order < COC_ORDERS; order++) {
            coc_set_shared_base(base);
            coc_set_order((coc_order)order);
            for (std::string (*test)() : {fragment_phases, fragment_boxes}) CHECK_MSG(test().empty(), "%s", test().c_str());
            std::string wrong = base == 1024 || order == 0 ? fragment_groups() : "";
            CHECK_MSG(wrong.empty(), "%s", wrong.c_str());
        }
}

/* Each misuse of these instructions, by a block of `threads`, of which each runs `run`.  Thread 0 has made two gates, of one
   and of two arrivals, which are usable. */
struct misuse_place {
    unsigned char *tile;        /* 32 KiB at a multiple of 1024, unless dynamic shared memory does not start at one */
    void *gate, *gate_of_two;
    const unsigned char *in;    /* device memory */
    const fragment_map *map, *far_map, *flat_map, *no_map;      /* of another device; of three dimensions; not encoded */
    unsigned t;
};
struct misuse {
    const char *text;           /* of its fault */
    unsigned threads;
    void (*run)(const misuse_place &p);
};
float *misuse_sums() {          /* of a thread: addresses that stay, for products without a wait */
    static float sums[512][65];
    return sums[threadIdx.x];
}
uint32_t *misuse_words() {
    static uint32_t words[512][4];
    return words[threadIdx.x];
}
/* A product of 64 columns, without fence and commit. */
void misuse_product(const misuse_place &p, uint64_t b = 0) {
    coc_wgmma(misuse_sums(), 64, NULL, descriptor(p.tile), b ? b : descriptor(p.tile + 8192), false, true, false);
}
void misuse_fenced_product(const misuse_place &p, uint64_t b = 0) {
    coc_wgmma_fence();
    misuse_product(p, b);
}
const std::vector<misuse> &misuses_of_gates() {
    static const std::vector<misuse> all = {
        {"mbarrier.init at", 32, [](const misuse_place &p) { coc_mbarrier_init(p.tile + 4, 1); }},
        {"mbarrier.init outside shared memory", 32, [](const misuse_place &) { alignas(8) char local[8]; coc_mbarrier_init(local, 1); }},
        {"mbarrier.init with a count of 0", 32, [](const misuse_place &p) { coc_mbarrier_init(p.tile, 0); }},
        {"mbarrier.init of an mbarrier that exists", 32, [](const misuse_place &p) { coc_mbarrier_init(p.gate, 1); }},
        {"mbarrier.arrive: ", 32, [](const misuse_place &p) { coc_mbarrier_arrive(p.tile, 0); }},
        {"is no mbarrier that was initialised", 32, [](const misuse_place &p) { coc_mbarrier_wait(p.tile, 1); }},
        {"the mbarrier was overwritten", 32, [](const misuse_place &p) { memset(p.gate, 0, 8); coc_mbarrier_arrive(p.gate, 0); }},
        {"but a barrier of the block did not follow", 1, [](const misuse_place &p) {
             coc_mbarrier_init(p.tile, 1);
             coc_mbarriers_ready();
             coc_mbarrier_arrive(p.tile, 0);
         }},
        {"but fence.mbarrier_init did not follow", 1, [](const misuse_place &p) {
             coc_mbarrier_init(p.tile, 1);
             __syncthreads();
             coc_mbarrier_wait(p.tile, 1);
         }},
        {"more arrivals in a phase than the count of 1", 2, [](const misuse_place &p) { coc_mbarrier_arrive(p.gate, 64); }},
        {"completes more bytes than its mbarrier expects", 1, [](const misuse_place &p) {
             coc_bulk_fetch(p.tile, p.in, 64, p.gate_of_two);
             coc_mbarrier_arrive(p.gate_of_two, 48);
             coc_mbarrier_wait(p.gate_of_two, 0);
         }},
        {"the block ends, and an mbarrier expects 64 more bytes", 1, [](const misuse_place &p) { coc_mbarrier_arrive(p.gate, 64); }},
        {"expects 1048576 bytes", 1, [](const misuse_place &p) { coc_mbarrier_arrive(p.gate, 1 << 20); }},
        {"for parity 2", 1, [](const misuse_place &p) { coc_mbarrier_wait(p.gate, 2); }},
        {"waits for phase 0, and phase 1 has completed", 2, [](const misuse_place &p) {
             if (p.t == 1) return coc_mbarrier_wait(p.gate, 0);     /* it goes first: the barrier of the block ended with it */
             for (int i = 0; i < 2; i++) coc_mbarrier_arrive(p.gate, 0);
         }},
        {"waits for phase 1, and phase 2 has completed", 1, [](const misuse_place &p) {
             coc_mbarrier_arrive(p.gate, 0);
             coc_mbarrier_wait(p.gate, 0);
             for (int i = 0; i < 2; i++) coc_mbarrier_arrive(p.gate, 0);
             coc_mbarrier_wait(p.gate, 1);
         }},
        {"deadlock: 0 of 1 threads have returned, no other can go on: thread 0 in mbarrier.try_wait", 1,
         [](const misuse_place &p) { coc_mbarrier_wait(p.gate, 0); }},
    };
    return all;
}
const std::vector<misuse> &misuses_of_copies() {
    static const std::vector<misuse> all = {
        {"the block ends, and a bulk copy is under way", 1, [](const misuse_place &p) {
             coc_mbarrier_arrive(p.gate, 64);
             coc_bulk_fetch(p.tile, p.in, 64, p.gate);
         }},
        {"cp.async.bulk of 64 bytes", 1, [](const misuse_place &p) { coc_bulk_fetch(p.tile, p.in + 8, 64, p.gate); }},
        {"cp.async.bulk of 72 bytes", 1, [](const misuse_place &p) { coc_bulk_fetch(p.tile, p.in, 72, p.gate); }},
        {"cp.async.bulk of 64 bytes to", 1, [](const misuse_place &p) { coc_bulk_fetch((void *)p.in, p.in, 64, p.gate); }},
        {"into bytes of a copy that is under way", 1, [](const misuse_place &p) {
             coc_mbarrier_arrive(p.gate_of_two, 128);
             for (int i = 0; i < 2; i++) coc_bulk_fetch(p.tile + 48 * i, p.in, 64, p.gate_of_two);
         }},
        {"cp.async.bulk over an mbarrier", 1, [](const misuse_place &p) { coc_bulk_fetch(p.gate, p.in, 16, p.gate); }},
        {"cp.async.bulk: ", 1, [](const misuse_place &p) { coc_bulk_fetch(p.tile, p.in, 16, p.tile + 64); }},
        {"illegal address", 1, [](const misuse_place &p) {
             coc_mbarrier_arrive(p.gate, 64);
             coc_bulk_fetch(p.tile, p.in + (1 << 20), 64, p.gate);
             coc_mbarrier_wait(p.gate, 0);
         }},
        {"which is not a multiple of 1024", 1, [](const misuse_place &p) { coc_tensor_fetch(p.tile + 128, p.map, p.gate, 0, 0, 0, 0); }},
        {"cp.async.bulk.tensor: a tensor map at", 1, [](const misuse_place &p) {
             coc_tensor_fetch(p.tile, (const char *)p.map + 8, p.gate, 0, 0, 0, 0);
         }},
        {"no tensor map was encoded there", 1, [](const misuse_place &p) { coc_tensor_fetch(p.tile, p.no_map, p.gate, 0, 0, 0, 0); }},
        {"the tensor map is of device 1, not of device 0", 1, [](const misuse_place &p) { coc_tensor_fetch(p.tile, p.far_map, p.gate, 0, 0, 0, 0); }},
        {"of 4 dimensions: the map has 3", 1, [](const misuse_place &p) { coc_tensor_fetch(p.tile, p.flat_map, p.gate, 0, 0, 0, 0); }},
        {"cp.async.bulk.tensor of 8192 bytes to", 1, [](const misuse_place &p) {
             coc_tensor_fetch(p.tile + (32 << 10), p.map, p.gate, 0, 0, 0, 0);
         }},
        {"into bytes that a wgmma reads, which is under way", 128, [](const misuse_place &p) {
             misuse_fenced_product(p);
             coc_wgmma_commit();
             if (p.t == 0) coc_bulk_fetch(p.tile + 8192 + 8176, p.in, 16, p.gate);
             coc_wgmma_wait(0);
         }},
        {"wgmma reads bytes of a copy that is under way", 128, [](const misuse_place &p) {
             if (p.t == 0) coc_mbarrier_arrive(p.gate, 16), coc_bulk_fetch(p.tile + 8192, p.in, 16, p.gate);
             __syncthreads();
             misuse_fenced_product(p);
             coc_wgmma_commit();
             coc_wgmma_wait(0);
             coc_mbarrier_wait(p.gate, 0);
         }},
    };
    return all;
}
const std::vector<misuse> &misuses_of_products() {
    static const std::vector<misuse> all = {
        {"without a wgmma.fence since the last commit or wait", 128, [](const misuse_place &p) { misuse_product(p); }},
        {"without a wgmma.fence since", 128, [](const misuse_place &p) {
             misuse_fenced_product(p);
             coc_wgmma_commit();
             misuse_product(p);
         }},
        {"without a wgmma.fence", 128, [](const misuse_place &p) {
             coc_wgmma_fence();
             coc_wgmma_wait(0);
             misuse_product(p);
         }},
        {"accumulators were changed while it was under way", 128, [](const misuse_place &p) {
             misuse_fenced_product(p);
             coc_wgmma_commit();
             misuse_sums()[31] += 1;
             coc_wgmma_wait(0);
         }},
        {"accumulators were changed", 128, [](const misuse_place &p) {
             misuse_fenced_product(p);
             misuse_sums()[0] = 0;
             misuse_product(p);
         }},
        {"registers of a were changed while it was under way", 128, [](const misuse_place &p) {
             coc_wgmma_fence();
             coc_wgmma(misuse_sums(), 64, misuse_words(), 0, descriptor(p.tile), false, true, false);
             misuse_words()[3]++;
             coc_wgmma_commit();
             coc_wgmma_wait(0);
         }},
        {"accumulators of another shape", 128, [](const misuse_place &p) {
             misuse_fenced_product(p);
             coc_wgmma(misuse_sums() + 31, 64, NULL, descriptor(p.tile), descriptor(p.tile), false, true, false);
         }},
        {"the warps of a warpgroup give different operands", 128, [](const misuse_place &p) {
             misuse_fenced_product(p, descriptor(p.tile + (p.t < 96 ? 8192 : 16384)));
             coc_wgmma_commit();
             coc_wgmma_wait(0);
         }},
        {"commit different numbers of products", 128, [](const misuse_place &p) {
             misuse_fenced_product(p);
             if (p.t < 64) misuse_product(p);
             coc_wgmma_commit();
             coc_wgmma_wait(0);
         }},
        {"returned before its wgmma were waited for", 128, [](const misuse_place &p) {
             misuse_fenced_product(p);
             coc_wgmma_commit();
             coc_wgmma_wait(1);
         }},
        {"returned before its wgmma were waited for", 128, [](const misuse_place &p) {
             misuse_fenced_product(p);
             coc_wgmma_wait(0);
         }},
        {"in wgmma.wait_group", 128, [](const misuse_place &p) {
             if (p.t >= 96) return;
             misuse_fenced_product(p);
             coc_wgmma_commit();
             coc_wgmma_wait(0);
         }},
        {"wgmma.fence without all lanes of the warp", 128, [](const misuse_place &p) { if (p.t % 32 < 16) coc_wgmma_fence(); }},
        {"the lanes of a warp give different operands", 128, [](const misuse_place &p) {
             misuse_fenced_product(p, descriptor(p.tile + (p.t % 32 < 31 ? 8192 : 16384)));
             coc_wgmma_commit();
             coc_wgmma_wait(0);
         }},
        {"a block of 192 threads lacks some of this warpgroup", 192, [](const misuse_place &p) { if (p.t >= 128) coc_wgmma_fence(); }},
        {"wgmma.mma_async of 4 columns", 128, [](const misuse_place &p) {
             coc_wgmma_fence();
             coc_wgmma(misuse_sums(), 4, NULL, descriptor(p.tile), descriptor(p.tile), false, true, false);
         }},
        {"outside shared memory", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile) - 64); }},
        {"outside shared memory", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile + (28 << 10))); }},
        {"without a swizzle of 128 bytes", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile) & ~(3ull << 62)); }},
        {"without a swizzle of 128 bytes", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile) | 3ull << 62); }},
        {"with a base offset or reserved bits", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile) | 1ull << 49); }},
        {"with a base offset or reserved bits", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile) | 1ull << 46); }},
        {"a swizzled tile starts at a multiple of 1024", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile + 128)); }},
        {"a swizzled tile starts at a multiple of 1024", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile + 112)); }},
        {"with offsets of 16 and 512 bytes", 128, [](const misuse_place &p) { misuse_fenced_product(p, descriptor(p.tile, 16, 512)); }},
        {"with offsets of 16 and 1024 bytes", 128, [](const misuse_place &p) {
             coc_wgmma_fence();
             coc_wgmma(misuse_sums(), 128, NULL, descriptor(p.tile), descriptor(p.tile), true, true, false);
         }},
    };
    return all;
}
const std::vector<misuse> &misuses_of_warps() {
    static const std::vector<misuse> all = {
        {"setmaxnreg to 16, which is no multiple of 8 from 24 to 256", 128, [](const misuse_place &) { coc_setmaxnreg(16, false); }},
        {"setmaxnreg to 250", 128, [](const misuse_place &) { coc_setmaxnreg(250, true); }},
        {"the warps of a warpgroup ask for different numbers", 384, [](const misuse_place &p) { coc_setmaxnreg(p.t < 32 ? 40 : 48, false); }},
        {"setmaxnreg.inc to 160 registers: the warp has 168", 384, [](const misuse_place &) { coc_setmaxnreg(160, true); }},
        {"setmaxnreg.dec to 176 registers: the warp has 168", 384, [](const misuse_place &) { coc_setmaxnreg(176, false); }},
        {"in setmaxnreg.inc", 384, [](const misuse_place &p) { coc_setmaxnreg(p.t < 128 ? 40 : 240, p.t >= 128); }},
        {"setmaxnreg: the lanes of a warp give different operands", 128, [](const misuse_place &p) { coc_setmaxnreg(p.t % 32 ? 40 : 48, false); }},
        {"bar.sync 0: barriers 1 to 15", 64, [](const misuse_place &) { coc_named_barrier(0, 64, true); }},
        {"bar.arrive 16: barriers 1 to 15", 64, [](const misuse_place &) { coc_named_barrier(16, 64, false); }},
        {"bar.sync 1 of 60 threads in a block of 64", 64, [](const misuse_place &) { coc_named_barrier(1, 60, true); }},
        {"bar.sync 1 of 96 threads in a block of 64", 64, [](const misuse_place &) { coc_named_barrier(1, 96, true); }},
        {"bar.sync 1 of 64 threads meets one of 96", 96, [](const misuse_place &p) { coc_named_barrier(1, p.t < 32 ? 96 : 64, true); }},
        {"bar.sync without all lanes of the warp", 64, [](const misuse_place &p) { if (p.t % 32 != 0) coc_named_barrier(1, 64, true); }},
        {"in bar.sync", 64, [](const misuse_place &p) { coc_named_barrier(1 + (int)p.t / 32, 64, true); }},
    };
    return all;
}

struct misuse_maps { fragment_map own, far, flat, none; };
__global__ void k_misuse(const unsigned char *in, misuse_maps maps, int part, int which) {
    const std::vector<misuse> &all = part == 0 ? misuses_of_gates() : part == 1 ? misuses_of_copies()
                                   : part == 2 ? misuses_of_products() : misuses_of_warps();
    unsigned char *room = coc_dynamic_shared();
    misuse_place p = {room, room + (32 << 10), room + (32 << 10) + 8, in, &maps.own, &maps.far, &maps.flat, &maps.none, threadIdx.x};
    if (threadIdx.x == 0) {
        coc_mbarrier_init(p.gate, 1);
        coc_mbarrier_init(p.gate_of_two, 2);
        coc_mbarriers_ready();
    }
    __syncthreads();
    all[(size_t)which].run(p);
}

bool encode_tensor(fragment_map *map, void *data, unsigned rank) {
    const uint64_t size[4] = {64, 64, 1, 1}, stride[3] = {128, 8192, 8192};
    const unsigned box[4] = {64, 64, 1, 1}, step[4] = {1, 1, 1, 1};
    cudaDriverEntryPointQueryResult found;
    void *encode = NULL;
    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, 0, &found), cudaSuccess);
    return encode && ((fragment_encoder)encode)(map, 9, rank, data, size, stride, box, step, 0, 3, 2, 0) == 0;
}
HARNESS_TEST(misuses_of_warpgroups) {
    const std::vector<misuse> *parts[] = {&misuses_of_gates(), &misuses_of_copies(), &misuses_of_products(), &misuses_of_warps()};
    hopper gpu;
    for (int part = 0; part < 4; part++)
        for (int which = 0; which < (int)parts[part]->size(); which++) {
            const misuse &m = (*parts[part])[(size_t)which];
            if (UNDER_ASAN && has(m.text, "illegal address")) continue;         /* it reports this itself */
            misuse_maps maps = {};
            unsigned char *data = NULL, *far = NULL;
            CHECK(cudaSetDevice(1) == cudaSuccess && cudaMalloc(&far, 8192) == cudaSuccess && cudaSetDevice(0) == cudaSuccess);
            CHECK_EQ(cudaMalloc(&data, 8192), cudaSuccess);
            CHECK(encode_tensor(&maps.own, data, 4) && encode_tensor(&maps.far, far, 4) && encode_tensor(&maps.flat, data, 3));
            CHECK_EQ(launch(k_misuse, 1, m.threads, (32 << 10) + 16, 0, (const unsigned char *)data, maps, part, which), cudaSuccess);
            CHECK_MSG(cudaDeviceSynchronize() != cudaSuccess, "no error: %s", m.text);
            CHECK_MSG(took_fault(m.text), "%s, %d %d", m.text, part, which);
            coc_reset();
        }
}

/* What code for other GPUs lacks. */
__global__ void k_instruction(int which) {
    if (which == 0) coc_mbarriers_ready();
    if (which == 1) coc_named_barrier(1, 128, true);
    if (which == 2) coc_wgmma_fence();
    if (which == 3) coc_setmaxnreg(40, false);
}
HARNESS_TEST(warpgroups_need_the_letter) {
    for (int image : {80, 90, 90 + COC_LETTER_A})
        for (int which = 0; which < 4; which++) {
            coc_set_devices(1, 1 << 20, 4, 90, image);
            bool works = image > 90 || (image == 90 && which < 2);
            CHECK_EQ(launch(k_instruction, 1, 128, 0, 0, which), cudaSuccess);
            CHECK_EQ(cudaDeviceSynchronize(), works ? cudaSuccess : cudaErrorIllegalInstruction);
            if (!works) CHECK(took_fault(image == 80 ? "compiled for sm_80, which has none" : "compiled for sm_90, which has none; sm_90a has"));
            coc_reset();
        }
    for (int capability : {90, 100}) {          /* code for sm_90a runs on nothing else */
        coc_set_devices(1, 1 << 20, 4, capability, 90 + COC_LETTER_A);
        CHECK_EQ(launch(k_instruction, 1, 128, 0, 0, 0), capability == 90 ? cudaSuccess : cudaErrorNoKernelImageForDevice);
        CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    coc_set_devices(2);
}

/* Bulk copies land when no thread can go on: the oldest first, or the youngest, or all at once when they are started. */
__global__ void k_two_copies(uint32_t *out, const uint32_t *in) {
    unsigned char *room = coc_dynamic_shared();
    volatile uint32_t *tile = (volatile uint32_t *)room;
    for (unsigned i = 0; i < 32; i++) tile[i] = 0;          /* may not be read while a copy is under way */
    for (int i = 0; i < 2; i++) coc_mbarrier_init(room + 128 + 8 * i, 1);
    coc_mbarriers_ready();
    __syncthreads();
    for (unsigned i = 0; i < 2; i++) {
        coc_mbarrier_arrive(room + 128 + 8 * i, 64);
        coc_bulk_fetch(room + 64 * i, in + 16 * i, 64, room + 128 + 8 * i);
    }
    for (unsigned i = 0; i < 2; i++) out[i] = tile[16 * i + 15];
    coc_mbarrier_wait(room + 136, 0);
    for (unsigned i = 0; i < 2; i++) out[2 + i] = tile[16 * i + 15];
    coc_mbarrier_wait(room + 128, 0);
    out[4] = tile[15];
}
HARNESS_TEST(bulk_copies_land_in_every_order) {
    hopper gpu;
    std::vector<uint32_t> numbers(32), right[] = {{~0u, ~0u, 16, 32, 16}, {~0u, ~0u, ~0u, 32, 16}, {16, 32, 16, 32, 16}};
    for (uint32_t i = 0; i < 32; i++) numbers[i] = i + 1;
    array<uint32_t> in(numbers), out(5);
    int as_oldest = 0, as_youngest = 0;
    for (int order = 0; order < COC_ORDERS; order++)
        for (uint64_t seed = 0; seed < (order == COC_RANDOM ? 16u : 1u); seed++) {
            coc_set_order((coc_order)order, seed);
            CHECK_EQ(launch(k_two_copies, 1, 1, 144, 0, out.data, (const uint32_t *)in.data), cudaSuccess);
            std::vector<uint32_t> found = out.get();
            if (order != COC_RANDOM) CHECK(found == right[order == COC_FORWARD ? 0 : order == COC_REVERSE ? 1 : 2]);
            else as_oldest += found == right[0], as_youngest += found == right[1];
        }
    CHECK(as_oldest + as_youngest == 16 && as_oldest > 0 && as_youngest > 0);
}

/* A tile that is overwritten while a product reads it: the product sees the old numbers in one order and the new in another. */
__global__ void k_overwritten_tile(float *out, uint16_t number) {
    uint16_t *tile = (uint16_t *)coc_dynamic_shared();
    float c[32];
    for (unsigned i = threadIdx.x; i < 4096; i += 128) tile[i] = 0x3f80;
    __syncthreads();
    coc_wgmma_fence();
    coc_wgmma(c, 64, NULL, descriptor(tile), descriptor(tile), false, true, false);
    coc_wgmma_commit();
    for (int i = 0; i < 32; i++)
        if (c[i] == c[i]) c[i] = 0;             /* a fault: it is NaN */
    __syncthreads();
    if (threadIdx.x == 0) tile[0] = number;     /* row 0, depth 0, of both operands */
    __syncthreads();
    coc_wgmma_wait(0);
    if (threadIdx.x == 0) out[0] = c[0], out[1] = c[1];
}
HARNESS_TEST(overwritten_operands_show) {
    hopper gpu;
    array<float> out(2);
    int early = 0, late = 0;
    for (int order = 0; order < COC_ORDERS; order++)
        for (uint64_t seed = 0; seed < (order == COC_RANDOM ? 16u : 1u); seed++) {
            coc_set_order((coc_order)order, seed);
            CHECK_EQ(launch(k_overwritten_tile, 1, 128, 8192, 0, out.data, (uint16_t)0x4000), cudaSuccess);
            std::vector<float> found = out.get();
            bool is_early = found == std::vector<float>{16, 16}, is_late = found == std::vector<float>{19, 17};
            CHECK(is_early || is_late);
            if (order == COC_RANDOM) early += is_early, late += is_late;
            else CHECK_EQ(is_early, order == COC_REVERSE);
        }
    CHECK(early > 0 && late > 0);
}

/* As attention does it: a warpgroup fetches tiles, and two others compute o += (own tile^T) tile for each.  All is in order. */
enum { PIPELINE_TILES = 5, PIPELINE_BYTES = 4 * 8192 + 128 };
struct pipeline_room { unsigned char *own, *tiles, *gates; };   /* gates: own, full and empty of two stages */
__device__ void pipeline_fetch(const pipeline_room &room, const fragment_map *map) {
    coc_setmaxnreg(40, false);
    if (threadIdx.x != 256) return;
    coc_mbarrier_arrive(room.gates, 2 * 8192);
    for (int i = 0; i < 2; i++) coc_tensor_fetch(room.own + 8192 * i, map, room.gates, 0, 64 * i, 0, 0);
    for (int j = 0; j < PIPELINE_TILES; j++) {
        unsigned char *full = room.gates + 8 + 16 * (j % 2);
        coc_mbarrier_wait(full + 8, (unsigned)j / 2 % 2 ^ 1);
        coc_mbarrier_arrive(full, 8192);
        coc_tensor_fetch(room.tiles + 8192 * (j % 2), map, full, 0, 64 * (j + 2), 0, 0);
    }
}
__device__ void pipeline_weigh(float (&o)[32], const uint32_t (&p)[16], const unsigned char *tile, bool add) {
    coc_wgmma_fence();
    for (int k = 0; k < 4; k++) coc_wgmma(o, 64, p + 4 * k, 0, descriptor(tile + 2048 * k), true, true, add || k > 0);
    coc_wgmma_commit();
}
__device__ void pipeline_compute(const pipeline_room &room, float *out, int *errors) {
    int group = (int)threadIdx.x / 128;
    const unsigned char *own = room.own + 8192 * group;
    float s[32], o[32];
    uint32_t p[2][16];
    coc_setmaxnreg(232, true);
    coc_mbarrier_wait(room.gates, 0);
    for (int j = 0; j < PIPELINE_TILES; j++) {
        unsigned char *full = room.gates + 8 + 16 * (j % 2), *tile = room.tiles + 8192 * (j % 2);
        coc_mbarrier_wait(full, (unsigned)j / 2 % 2);
        coc_wgmma_fence();
        for (int k = 0; k < 4; k++) coc_wgmma(s, 64, NULL, descriptor(own + 32 * k), descriptor(tile + 32 * k), false, true, k > 0);
        coc_wgmma_commit();
        if (j > 0) pipeline_weigh(o, p[(j - 1) % 2], room.tiles + 8192 * ((j - 1) % 2), j > 1);
        coc_wgmma_wait(j > 0);
        for (int i = 0; i < 16; i++)
            p[j % 2][i] = (uint32_t)amp_bf16_from_f32(s[2 * i], 0) | (uint32_t)amp_bf16_from_f32(s[2 * i + 1], 0) << 16;
        if (j == 0) continue;
        if (o[0] == o[0]) atomicAdd(errors, 1);         /* not there before it was waited for */
        coc_wgmma_wait(0);
        if (threadIdx.x % 128 == 0) coc_mbarrier_arrive(room.gates + 16 + 16 * ((j - 1) % 2), 0);
    }
    pipeline_weigh(o, p[(PIPELINE_TILES - 1) % 2], room.tiles + 8192 * ((PIPELINE_TILES - 1) % 2), true);
    coc_wgmma_wait(0);
    coc_named_barrier(1 + group, 128, true);
    for (int i = 0; i < 32; i++) out[threadIdx.x * 32 + (unsigned)i] = o[i];
}
__global__ void k_pipeline(float *out, int *errors, const fragment_map map) {
    unsigned char *room = coc_dynamic_shared(), *gates = room + 4 * 8192;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 5; i++) coc_mbarrier_init(gates + 8 * i, i > 0 && i % 2 == 0 ? 2 : 1);
        coc_mbarriers_ready();
    }
    __syncthreads();
    if (threadIdx.x >= 256) pipeline_fetch({room, room + 2 * 8192, gates}, &map);
    else pipeline_compute({room, room + 2 * 8192, gates}, out, errors);
}
/* The numbers of the tiles are -1, 0 and 1, so that every sum is exact. */
std::vector<float> pipeline_right(const std::vector<float> &x, unsigned rows) {
    std::vector<float> right(128 * 64);
    for (unsigned row = 0; row < 128; row++)
        for (unsigned other = 128; other < rows; other++) {
            float s = 0;
            for (unsigned k = 0; k < 64; k++) s += x[row * 64 + k] * x[other * 64 + k];
            for (unsigned c = 0; c < 64; c++) right[row * 64 + c] += s * x[other * 64 + c];
        }
    return right;
}
void check_pipeline(const std::vector<uint16_t> &numbers, const std::vector<float> &right) {
    fragment_map map = {};
    array<uint16_t> data(numbers);
    array<float> out(256 * 32);
    array<int> errors(std::vector<int>{0});
    const uint64_t size[4] = {64, numbers.size() / 64, 1, 1}, stride[3] = {128, 128, 128};
    int wrong = 0;
    CHECK(fragment_encode(&map, data.data, size, stride));
    CHECK_EQ(launch(k_pipeline, 1, 384, PIPELINE_BYTES, 0, out.data, errors.data, map), cudaSuccess);
    std::vector<float> found = out.get();
    for (unsigned i = 0; i < 128 * 64; i++) {
        fragment_place at = fragment_group_c(i / 64 % 64, i % 64);
        wrong += found[(i / 64 / 64 * 128 + at.lane) * 32 + at.at] != right[i];
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(errors.get()[0], 0);
}
HARNESS_TEST(warpgroups_work_together) {
    const unsigned rows = 64 * (PIPELINE_TILES + 2);
    std::vector<float> x(rows * 64), right;
    std::vector<uint16_t> numbers(rows * 64);
    hopper gpu;
    for (unsigned i = 0; i < rows * 64; i++) x[i] = (float)((int)((i / 64 * 13 + i % 64 * 7 + i / 64 * (i % 64) % 5) % 3) - 1);
    for (unsigned i = 0; i < rows * 64; i++) numbers[i] = amp_bf16_from_f32(x[i], 0);
    right = pipeline_right(x, rows);
    for (int order = 0; order < COC_ORDERS; order++)
        for (uint64_t seed = 0; seed < (order == COC_RANDOM ? 8u : 1u); seed++) {
            coc_set_order((coc_order)order, seed);
            coc_reset_counts();
            check_pipeline(numbers, right);
            CHECK_EQ(coc_count().wgmmas, 2 * PIPELINE_TILES * 8);
            CHECK_EQ(coc_count().bulk_bytes, (PIPELINE_TILES + 2) * 8192);
        }
}

/* Warps hand a number on: bar.arrive of one side, bar.sync of the other, many times. */
__global__ void k_turns(int *out) {
    volatile int *at = (volatile int *)coc_dynamic_shared();
    int warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 0) *at = 0;
    __syncthreads();
    if (warp == 1) coc_named_barrier(1, 64, false);             /* the first turn is warp 0's */
    for (int turn = 0; turn < 4; turn++) {
        coc_named_barrier(1 + warp, 64, true);
        if (threadIdx.x % 32 == 0) out[*at] = warp, *at = *at + 1;
        coc_named_barrier(2 - warp, 64, false);
    }
}
HARNESS_TEST(named_barriers_take_turns) {
    hopper gpu;
    array<int> out(8);
    for (int order = 0; order < COC_ORDERS; order++) {
        coc_set_order((coc_order)order);
        CHECK_EQ(launch(k_turns, 1, 64, 4, 0, out.data), cudaSuccess);
        CHECK((out.get() == std::vector<int>{0, 1, 0, 1, 0, 1, 0, 1}));
    }
}

/* What the driver refuses, one argument at a time; and the driver itself. */
struct tensor_arguments {
    alignas(64) char map[192];
    size_t map_at = 0, address_at = 256;
    int type = 9, interleave = 0, swizzle = 3, promotion = 2, fill = 0;
    unsigned rank = 4, box[5] = {64, 64, 1, 1, 1}, step[5] = {1, 1, 1, 1, 1};
    uint64_t size[5] = {64, 100, 3, 2, 1}, stride[4] = {128, 12800, 38400, 76800};
    int encode(fragment_encoder function) {
        return function(map + map_at, type, rank, (void *)address_at, size, stride, box, step, interleave, swizzle, promotion, fill);
    }
};
HARNESS_TEST(tensor_maps_are_checked) {
    typedef tensor_arguments &args;
    void (*const refused[])(args) = {
        [](args a) { a.map_at = 32; }, [](args a) { a.address_at = 264; }, [](args a) { a.address_at = 0; }, [](args a) { a.type = 16; },
        [](args a) { a.type = -1; }, [](args a) { a.rank = 0; }, [](args a) { a.rank = 6; }, [](args a) { a.size[1] = 0; },
        [](args a) { a.size[0] = ((uint64_t)1 << 32) + 1; }, [](args a) { a.stride[0] = 136; }, [](args a) { a.stride[2] = 8; },
        [](args a) { a.stride[1] = (uint64_t)1 << 40; }, [](args a) { a.box[1] = 0; }, [](args a) { a.box[1] = 257; },
        [](args a) { a.box[0] = 72; }, [](args a) { a.box[0] = 60; }, [](args a) { a.step[3] = 0; }, [](args a) { a.step[1] = 9; },
        [](args a) { a.interleave = 3; }, [](args a) { a.interleave = 2; }, [](args a) { a.swizzle = 7; }, [](args a) { a.swizzle = 2; },
        [](args a) { a.promotion = 4; }, [](args a) { a.fill = 2; }, [](args a) { a.rank = 2, a.interleave = 1; },
    };
    void (*const taken[])(args) = {
        [](args) {}, [](args a) { a.type = 6; }, [](args a) { a.size[0] = (uint64_t)1 << 32; }, [](args a) { a.box[1] = 256; },
        [](args a) { a.rank = 5; }, [](args a) { a.rank = 1; }, [](args a) { a.box[0] = 8; }, [](args a) { a.box[0] = 256, a.swizzle = 0; },
        [](args a) { a.stride[1] = 16; }, [](args a) { a.stride[1] = ((uint64_t)1 << 40) - 16; },
    };
    cudaDriverEntryPointQueryResult found;
    void *function = NULL;
    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, 0, &found), cudaSuccess);
    CHECK(found == cudaDriverEntryPointSuccess && function != NULL);
    fragment_encoder encode = (fragment_encoder)function;
    int i = 0;
    for (auto change : refused) {
        tensor_arguments a;
        change(a);
        CHECK_MSG(a.encode(encode) == 1, "refusal %d", i);
        i++;
    }
    for (auto change : taken) {
        tensor_arguments a;
        change(a);
        CHECK_EQ(a.encode(encode), 0);
    }
    tensor_arguments plain;
    coc_fail("cuTensorMapEncodeTiled", 1, cudaErrorUnknown);
    CHECK(plain.encode(encode) == 1 && plain.encode(encode) == 0 && cudaGetLastError() == cudaSuccess);
    plain.step[1] = 2;                          /* which a GPU can, and the model cannot */
    CHECK(plain.encode(encode) == 0 && took_fault("the model has no such map"));
    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 11080, 0, &found), cudaSuccess);
    CHECK(found == cudaDriverEntryPointVersionNotSufficent && function == NULL);
    coc_set_driver(11080);
    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, 0, &found), cudaSuccess);
    CHECK(found == cudaDriverEntryPointSymbolNotFound && function == NULL);
    CHECK(cudaDriverGetVersion(&i) == cudaSuccess && i == 11080);
}

/* ---- Conversions to 8 bits: what the PTX ISA says of NaN, signs, ties and what is too large. */

__global__ void k_fp8(uint16_t *out, const float *in, int e5m2) {
    out[threadIdx.x] = coc_cvt_fp8x2(in[2 * threadIdx.x], in[2 * threadIdx.x + 1], e5m2);
}
struct fp8_case { float x; int bits; };
void check_fp8(const std::vector<fp8_case> &cases, int e5m2) {
    std::vector<float> x;
    for (const fp8_case &c : cases) x.push_back(c.x);
    array<float> in(x);
    array<uint16_t> out(x.size() / 2);
    CHECK_EQ(launch(k_fp8, 1, (unsigned)x.size() / 2, 0, 0, out.data, in.data, e5m2), cudaSuccess);
    std::vector<uint16_t> got = out.get();
    for (size_t i = 0; i < x.size(); i++)       /* the first of two becomes the upper half */
        CHECK_MSG((got[i / 2] >> (i % 2 ? 0 : 8) & 255) == cases[i].bits, "%g: %02x", (double)x[i], got[i / 2] >> (i % 2 ? 0 : 8) & 255);
}
HARNESS_TEST(fp8_pairs) {
    check_fp8({
        {0, 0}, {-0.0f, 0x80}, {1, 0x38}, {-1, 0xb8}, {NAN, 0x7f}, {-NAN, 0x7f}, {INFINITY, 0x7e}, {-INFINITY, 0xfe}, {448, 0x7e},
        {-1e30f, 0xfe}, {432, 0x7e}, {416, 0x7d}, {400, 0x7c}, {0x1p-9f, 1}, {0x1p-10f, 0}, {0x1.8p-10f, 1}, {-0x1p-10f, 0x80},
        {0x1.8p-9f, 2}, {0x1p-6f, 8}, {0x1.fp-7f, 8}, {1.0625f, 0x38}, {1.1875f, 0x3a}, {1e-40f, 0}, {1.9999f, 0x40},
    }, 0);
    check_fp8({
        {0, 0}, {-0.0f, 0x80}, {1, 0x3c}, {-1, 0xbc}, {NAN, 0x7f}, {-NAN, 0x7f}, {INFINITY, 0x7b}, {-INFINITY, 0xfb}, {57344, 0x7b},
        {-1e30f, 0xfb}, {53248, 0x7a}, {61440, 0x7b}, {0x1p-16f, 1}, {0x1p-17f, 0}, {0x1.8p-17f, 1}, {0x1.8p-16f, 2}, {0x1p-14f, 4},
        {0x1.fp-15f, 4}, {1.125f, 0x3c}, {1.375f, 0x3e},
    }, 1);
    coc_set_devices(1, 1 << 20, 4, 90, 80);
    array<uint16_t> none(1);
    array<float> one(2);
    CHECK_EQ(launch(k_fp8, 1, 1, 0, 0, none.data, one.data, 0), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaErrorIllegalInstruction);
    CHECK(took_fault("cvt to fp8 in code that was compiled for sm_80"));
    cudaDeviceReset();
    coc_set_devices(2);
}

/* ---- Vectors, hints, numbers */

__global__ void k_vectors(float4 *out, const float4 *in) {
    float4 v = __ldcs(&in[threadIdx.x]);
    __stcs(&out[threadIdx.x], make_float4(v.w, v.z, v.y, v.x));
}
__global__ void k_misaligned(uint4 *out, const char *in) { out[0] = __ldg((const uint4 *)(in + 4)); }
HARNESS_TEST(vectors) {
    CHECK(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(uint2) == 8 && alignof(float2) == 8);
    CHECK(sizeof(float3) == 12 && alignof(float3) == 4 && sizeof(ushort4) == 8 && alignof(uchar4) == 4);
    array<float4> in(std::vector<float4>(5, make_float4(1, 2, 3, 4))), out(5);
    CHECK_EQ(launch(k_vectors, 1, 5, 0, 0, out.data, in.data), cudaSuccess);
    for (float4 v : out.get()) CHECK(v.x == 4 && v.y == 3 && v.z == 2 && v.w == 1);
    CHECK_EQ(launch(k_misaligned, 1, 1, 0, 0, (uint4 *)out.data, (const char *)in.data), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaErrorMisalignedAddress);
    CHECK(took_fault("__ldg of 16 bytes"));
    cudaDeviceReset();
}
HARNESS_TEST(numbers) {
    CHECK_EQ(__brev(1u), 0x80000000u);
    CHECK_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x7531), 0x77553311u);
    CHECK_EQ(__byte_perm(0x00000080u, 0, 0x8888), 0xffffffffu);
    CHECK_EQ(__funnelshift_r(0x11111111u, 0x22222222u, 4), 0x21111111u);
    CHECK_EQ(__funnelshift_l(0x80000000u, 1u, 1), 3u);
    CHECK_EQ(__umulhi(0x80000000u, 6u), 3u);
    CHECK_EQ(__umul64hi(1ull << 63, 6), 3);
    CHECK(__clz(0) == 32 && __clz(1) == 31 && __ffs(8) == 4 && __ffs(0) == 0 && __popcll(~0ull) == 64);
    CHECK_EQ(__float_as_uint(-2.0f), 0xc0000000u);
    CHECK(__uint_as_float(0x3f800000u) == 1 && rsqrtf(4.0f) == 0.5f && __saturatef(-1) == 0 && __saturatef(NAN) == 0);
    CHECK(min(3, -4) == -4 && max(2.0f, 5.0f) == 5 && min(7u, 9u) == 7 && max(1LL << 40, 3LL) == 1LL << 40);
    CHECK(__float2int_rn(2.5f) == 2 && __float2int_rn(3.5f) == 4 && __float2int_rz(-2.9f) == -2);
}

/* amp.h's conversions in device code: every fp16, bf16 and fp8 pattern there and back, and rounding. */
__global__ void k_conversions(unsigned *wrong) {
    uint32_t bits = blockIdx.x * blockDim.x + threadIdx.x;
    float h = amp_f32_from_f16((uint16_t)bits), b = amp_f32_from_bf16((uint16_t)bits);
    float e4 = amp_f32_from_e4m3((uint8_t)bits), e5 = amp_f32_from_e5m2((uint8_t)bits);
    if (h == h && amp_f16_from_f32(h, 0) != bits) atomicAdd(&wrong[0], 1u);
    if (b == b && amp_bf16_from_f32(b, 0) != bits) atomicAdd(&wrong[1], 1u);
    if (e4 == e4 && amp_e4m3_from_f32(e4, 0) != (bits & 255)) atomicAdd(&wrong[2], 1u);
    if (e5 == e5 && amp_e5m2_from_f32(e5, 0) != (bits & 255)) atomicAdd(&wrong[3], 1u);
    uint16_t even = amp_bf16_from_f32(ampi_f32_of_bits(bits << 16 | 0x8000u), 0);   /* a tie goes to the even one */
    if (b == b && (bits & 0x7f80) != 0x7f80 && even != (uint16_t)(bits + (bits & 1))) atomicAdd(&wrong[4], 1u);
}
HARNESS_TEST(conversions) {
    array<unsigned> wrong(5);
    wrong.zero();
    CHECK_EQ(launch(k_conversions, 128, 512, 0, 0, wrong.data), cudaSuccess);
    for (unsigned n : wrong.get()) CHECK_EQ(n, 0);
}

/* ---- Launches */

__global__ void k_nothing(int) {}
HARNESS_TEST(launch_checks) {
    const cudaError_t bad = cudaErrorInvalidConfiguration;
    struct { dim3 grid, block; size_t shared; cudaError_t expected; } cases[] = {
        {1, 1024, 0, cudaSuccess},      {1, 1025, 0, bad},              {0, 32, 0, bad},
        {1, 0, 0, bad},                 {1, dim3(32, 32, 2), 0, bad},   {1, dim3(1, 1, 65), 0, bad},
        {dim3(1, 65536), 1, 0, bad},    {dim3(1, 1, 65536), 1, 0, bad}, {dim3(0x80000000u), 1, 0, bad},
        {1, 1, 48 * 1024, cudaSuccess}, {1, 1, 48 * 1024 + 1, cudaErrorInvalidValue},
    };
    for (auto &c : cases) {
        CHECK_EQ(launch(k_nothing, c.grid, c.block, c.shared, 0, 0), c.expected);
        CHECK_EQ(cudaGetLastError(), c.expected);
        CHECK_EQ(cudaGetLastError(), cudaSuccess);
    }
    const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CHECK_EQ(cudaFuncSetAttribute(k_nothing, most, 227 * 1024 + 1), cudaErrorInvalidValue);
    CHECK_EQ(cudaFuncSetAttribute(k_nothing, most, 227 * 1024), cudaSuccess);
    CHECK_EQ(launch(k_nothing, 1, 1, 227 * 1024, 0, 0), cudaSuccess);
    CHECK_EQ(launch(k_nothing, 1, 1, 227 * 1024 + 1, 0, 0), cudaErrorInvalidValue);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(cudaFuncSetAttribute(k_nothing, most, 100 * 1024), cudaSuccess);       /* less, while others may launch it */
    CHECK(coc_take_faults().find("another thread") != std::string::npos);
    int blocks = 0;
    CHECK_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, k_nothing, 256, 40 * 1024), cudaSuccess);
    CHECK_EQ(blocks, 5);
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
    CHECK_EQ(launch(k_nothing, 1, 1, 48 * 1024 + 1, 0, 0), cudaErrorInvalidValue);
}

/* Arguments are converted to the kernel's types and copied at the call. */
struct pair_of { int a; float b; };
__global__ void k_arguments(double *out, long long wide, float narrow, pair_of both, const int *p) {
    out[0] = (double)wide, out[1] = narrow, out[2] = both.a, out[3] = both.b, out[4] = p == nullptr;
}
HARNESS_TEST(arguments_are_copied) {
    array<double> out(5);
    cudaStream_t s = new_stream();
    long long wide = 1LL << 40;
    pair_of both = {7, 2.5f};
    CHECK_EQ(launch(k_arguments, 1, 1, 0, s, out.data, wide, 3, both, nullptr), cudaSuccess);
    wide = 0, both.a = 0;
    CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
    std::vector<double> r = out.get();
    CHECK(r[0] == (double)(1LL << 40) && r[1] == 3 && r[2] == 7 && r[3] == 2.5 && r[4] == 1);
    cudaStreamDestroy(s);
}

/* ---- Memory */

__global__ void k_write(unsigned char *p, long long at, int value) {
    ((volatile unsigned char *)p)[at] = (unsigned char)value;
}
__global__ void k_write_through(unsigned char **p, int value) { ((volatile unsigned char *)*p)[0] = (unsigned char)value; }
HARNESS_TEST(fresh_memory_is_poisoned) {
    array<unsigned> a(1000);
    for (unsigned v : a.get()) CHECK_EQ(v, ~0u);
    unsigned *pinned = nullptr;
    CHECK_EQ(cudaHostAlloc(&pinned, 400, cudaHostAllocDefault), cudaSuccess);
    for (int i = 0; i < 100; i++) CHECK_EQ(pinned[i], ~0u);
    CHECK_EQ(cudaFreeHost(pinned), cudaSuccess);
    void *none = &a;
    CHECK_EQ(cudaMalloc(&none, 0), cudaSuccess);
    CHECK(none == nullptr && cudaFree(nullptr) == cudaSuccess);
    CHECK_EQ((uintptr_t)a.data & 255, 0);
}
HARNESS_TEST(red_zones) {
    if (UNDER_ASAN) SKIP("AddressSanitizer sees the overrun itself: sanitizer_reports");
    for (long long at : {-1LL, 100LL, 300LL}) {
        array<unsigned char> a(100);
        CHECK_EQ(launch(k_write, 1, 1, 0, 0, a.data, at, 0), cudaSuccess);
        CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
        CHECK(took_fault("kernel k_write: device memory overrun at byte"));
        coc_check_red_zones();
        CHECK_EQ(coc_faults(), 0);          /* one overrun, one fault */
    }
    unsigned char *pinned = nullptr;
    CHECK_EQ(cudaHostAlloc(&pinned, 100, 0), cudaSuccess);
    pinned[100] = 0;
    CHECK_EQ(cudaFreeHost(pinned), cudaSuccess);
    CHECK(took_fault("pinned memory of 100 bytes overrun"));
}
HARNESS_TEST(released_memory) {
    unsigned char *a = nullptr;
    CHECK_EQ(cudaMalloc(&a, 100), cudaSuccess);
    CHECK_EQ(cudaFree(a + 1), cudaErrorInvalidValue);
    CHECK_EQ(cudaFree(a), cudaSuccess);
    CHECK_EQ(cudaFree(a), cudaErrorInvalidValue);
    CHECK(took_fault("released twice"));
    char host[4] = {};
    CHECK_EQ(cudaFree(host), cudaErrorInvalidValue);
    CHECK_EQ(coc_faults(), 0);
    CHECK_EQ(cudaMemcpy(a, host, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    if (UNDER_ASAN) return;
    CHECK_EQ(launch(k_write, 1, 1, 0, 0, a, 0, 1), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    CHECK(took_fault("released memory"));
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
}
HARNESS_TEST(copies_are_checked) {
    array<char> a(100), b(100);
    char host[200] = {};
    char *pinned = nullptr;
    CHECK_EQ(cudaMallocHost(&pinned, 50), cudaSuccess);
    const cudaError_t good = cudaSuccess, bad = cudaErrorInvalidValue;
    struct { void *dst; const void *src; size_t n; cudaMemcpyKind kind; cudaError_t expected; } cases[] = {
        {a.data, host, 100, cudaMemcpyHostToDevice, good},
        {a.data, host, 101, cudaMemcpyHostToDevice, bad},
        {a.data + 50, host, 51, cudaMemcpyHostToDevice, bad},
        {a.data + 100, host, 0, cudaMemcpyHostToDevice, good},
        {host, a.data, 101, cudaMemcpyDefault, bad},
        {host, a.data, 100, cudaMemcpyHostToDevice, bad},
        {a.data, host, 4, cudaMemcpyDeviceToHost, bad},
        {a.data, host, 4, cudaMemcpyHostToHost, bad},
        {b.data, a.data, 100, cudaMemcpyDeviceToDevice, good},
        {b.data, a.data, 100, cudaMemcpyHostToDevice, bad},
        {pinned, a.data, 51, cudaMemcpyDeviceToHost, bad},
        {pinned, a.data, 50, cudaMemcpyDefault, good},
        {a.data, nullptr, 4, cudaMemcpyHostToDevice, bad},
        {a.data, host, 4, (cudaMemcpyKind)7, cudaErrorInvalidMemcpyDirection},
    };
    for (auto &c : cases) {
        CHECK_EQ(cudaMemcpy(c.dst, c.src, c.n, c.kind), c.expected);
        CHECK_EQ(cudaMemcpyAsync(c.dst, c.src, c.n, c.kind, 0), c.expected);
    }
    CHECK_EQ(cudaMemset(a.data, 0, 101), cudaErrorInvalidValue);
    CHECK_EQ(cudaMemset(host, 0, 4), cudaErrorInvalidValue);
    CHECK_EQ(cudaFreeHost(pinned), cudaSuccess);
}
HARNESS_TEST(pointer_attributes) {
    array<char> a(100);
    char host[4], *pinned = nullptr;
    cudaPointerAttributes p;
    CHECK_EQ(cudaMallocHost(&pinned, 50), cudaSuccess);
    CHECK_EQ(cudaPointerGetAttributes(&p, a.data + 7), cudaSuccess);
    CHECK(p.type == cudaMemoryTypeDevice && p.device == 0);
    CHECK_EQ(cudaPointerGetAttributes(&p, pinned + 7), cudaSuccess);
    CHECK(p.type == cudaMemoryTypeHost && p.hostPointer == pinned + 7);
    CHECK_EQ(cudaPointerGetAttributes(&p, host), cudaSuccess);
    CHECK(p.type == cudaMemoryTypeUnregistered && !p.devicePointer);
    cudaFreeHost(pinned);
}

__attribute__((noinline)) unsigned char touch(volatile unsigned char *p) { p[0] = 3; return p[0]; }
HARNESS_TEST(host_access_is_seen) {
    array<unsigned char> a(10000);
    CHECK_EQ(touch(a.data + 5000), 3);
    CHECK(took_fault("the host touches device memory"));
    a.zero();
    CHECK_EQ(touch(a.data), 3);                 /* hidden again by the call */
    CHECK(took_fault("byte 0 of 10000"));
    coc_set_hidden(0);
    CHECK_EQ(touch(a.data), 3);
    CHECK_EQ(coc_faults(), 0);
    coc_set_hidden(1);
}
HARNESS_TEST(host_pointers_are_seen) {
    unsigned char host[8] = {}, *pinned = nullptr;
    CHECK_EQ(cudaMallocHost(&pinned, 8), cudaSuccess);
    CHECK_EQ(launch(k_write, 1, 1, 0, 0, pinned, 7, 5), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(pinned[7], 5);
    cudaFreeHost(pinned);
    CHECK_EQ(launch(k_write, 1, 1, 0, 0, host, 0, 1), cudaErrorIllegalAddress);
    CHECK(took_fault("is not memory of device 0"));
    cudaDeviceReset();
}
HARNESS_TEST(null_is_an_illegal_address) {
    if (UNDER_ASAN) SKIP("AddressSanitizer ends the program");
    CHECK_EQ(launch(k_write, 40, 64, 0, 0, nullptr, 8, 1), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    CHECK(took_fault("illegal address"));
    cudaDeviceReset();
    array<unsigned char> a(1);
    CHECK_EQ(launch(k_write, 40, 64, 0, 0, a.data, 0, 1), cudaSuccess);
    CHECK_EQ(a.get()[0], 1);
}
HARNESS_TEST(memory_has_an_end) {
    coc_set_devices(1, 1 << 20);
    size_t left = 0, total = 0;
    void *a = nullptr, *b = nullptr;
    CHECK_EQ(cudaMalloc(&a, 1 << 19), cudaSuccess);
    CHECK_EQ(cudaMalloc(&b, (1 << 19) + 1), cudaErrorMemoryAllocation);
    CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    CHECK(b == nullptr && cudaMemGetInfo(&left, &total) == cudaSuccess && left == 1 << 19 && total == 1 << 20);
    CHECK_EQ(cudaFree(a), cudaSuccess);
    CHECK_EQ(cudaMalloc(&b, 1 << 20), cudaSuccess);
    CHECK_EQ(cudaFree(b), cudaSuccess);
    coc_set_devices(2);
}
HARNESS_TEST(far_addresses) {
    size_t bytes = ((size_t)1 << 35) + 10;
    unsigned char *far = (unsigned char *)coc_sparse_alloc(bytes), last = 0;
    CHECK(far != nullptr);
    CHECK_EQ(launch(k_write, 1, 1, 0, 0, far, (long long)bytes - 1, 77), cudaSuccess);
    CHECK_EQ(cudaMemcpy(&last, far + bytes - 1, 1, cudaMemcpyDeviceToHost), cudaSuccess);
    CHECK_EQ(last, 77);
    CHECK_EQ(cudaFree(far), cudaSuccess);
}

__global__ void k_mark_block(int *marks) { marks[blockIdx.x] = 1; }
HARNESS_TEST(last_blocks) {
    std::vector<int> marks(10);
    int *on = nullptr;
    CHECK_EQ(cudaMalloc(&on, 40), cudaSuccess);
    for (unsigned last : {3u, 10u, 99u, 0u}) {
        coc_set_last_blocks(last);
        CHECK_EQ(cudaMemset(on, 0, 40), cudaSuccess);
        CHECK_EQ(launch(k_mark_block, 10, 1, 0, 0, on), cudaSuccess);
        CHECK_EQ(cudaMemcpy(marks.data(), on, 40, cudaMemcpyDeviceToHost), cudaSuccess);
        for (unsigned i = 0; i < 10; i++) CHECK_EQ(marks[i], i >= (last == 3 ? 7u : 0u));
    }
    CHECK_EQ(cudaFree(on), cudaSuccess);
}

/* ---- Streams: work runs late, so what is not waited for is missing */

__global__ void k_add(int *p, int n) { atomicAdd(p, n); }
__global__ void k_copy(int *out, const int *in) { *out = *in; }

HARNESS_TEST(work_is_deferred) {
    array<int> a(1);
    int *pinned = nullptr;
    cudaStream_t s = new_stream();
    CHECK_EQ(cudaMallocHost(&pinned, 8), cudaSuccess);
    pinned[0] = 1, pinned[1] = 0;
    CHECK_EQ(cudaMemcpyAsync(a.data, pinned, 4, cudaMemcpyHostToDevice, s), cudaSuccess);
    CHECK_EQ(launch(k_add, 1, 1, 0, s, a.data, 10), cudaSuccess);
    CHECK_EQ(cudaMemcpyAsync(pinned + 1, a.data, 4, cudaMemcpyDeviceToHost, s), cudaSuccess);
    pinned[0] = 5;                              /* the copy has not read it yet */
    CHECK_EQ(pinned[1], 0);
    CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
    CHECK_EQ(pinned[1], 15);
    coc_set_schedule(COC_EAGER);
    CHECK_EQ(launch(k_add, 1, 1, 0, s, a.data, 10), cudaSuccess);
    CHECK_EQ(cudaMemcpyAsync(pinned + 1, a.data, 4, cudaMemcpyDeviceToHost, s), cudaSuccess);
    CHECK_EQ(pinned[1], 25);
    cudaFreeHost(pinned);
    cudaStreamDestroy(s);
}

/* A producer and a consumer in two streams. */
int pass_on(bool waits, coc_schedule schedule) {
    array<int> a(1), b(1);
    cudaStream_t producer = new_stream(), consumer = new_stream();
    cudaEvent_t ready = new_event();
    a.zero(), b.zero();
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    coc_set_schedule(schedule);
    launch(k_add, 1, 1, 0, producer, a.data, 7);
    cudaEventRecord(ready, producer);
    if (waits) CHECK_EQ(cudaStreamWaitEvent(consumer, ready, 0), cudaSuccess);
    launch(k_copy, 1, 1, 0, consumer, b.data, a.data);
    launch(k_add, 1, 1, 0, producer, a.data, 100);      /* after the record: not waited for */
    CHECK_EQ(cudaStreamSynchronize(consumer), cudaSuccess);
    int seen = b.get()[0];
    cudaDeviceSynchronize();
    CHECK_EQ(a.get()[0], 107);
    cudaEventDestroy(ready);
    cudaStreamDestroy(producer);
    cudaStreamDestroy(consumer);
    return seen;
}
HARNESS_TEST(missing_wait_shows) {
    CHECK_EQ(pass_on(true, COC_LATE), 7);
    CHECK_EQ(pass_on(true, COC_EAGER), 7);
    CHECK_EQ(pass_on(false, COC_LATE), 0);
    CHECK_EQ(pass_on(false, COC_OTHERS_FIRST), 107);
    CHECK_EQ(pass_on(false, COC_EAGER), 7);             /* which is why EAGER alone proves nothing */
}

/* A buffer written again while another stream may still read it. */
int overwrite(bool waits, coc_schedule schedule) {
    array<int> a(1), b(1);
    cudaStream_t reader = new_stream(), writer = new_stream();
    cudaEvent_t read = new_event();
    a.zero();
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    coc_set_schedule(schedule);
    launch(k_copy, 1, 1, 0, reader, b.data, a.data);
    cudaEventRecord(read, reader);
    if (waits) cudaStreamWaitEvent(writer, read, 0);
    launch(k_add, 1, 1, 0, writer, a.data, 50);
    cudaStreamSynchronize(reader);
    int seen = b.get()[0];
    cudaDeviceSynchronize();
    cudaEventDestroy(read);
    cudaStreamDestroy(reader);
    cudaStreamDestroy(writer);
    return seen;
}
HARNESS_TEST(overwriting_shows) {
    CHECK_EQ(overwrite(true, COC_LATE), 0);
    CHECK_EQ(overwrite(true, COC_OTHERS_FIRST), 0);
    CHECK_EQ(overwrite(false, COC_LATE), 0);
    CHECK_EQ(overwrite(false, COC_OTHERS_FIRST), 50);
}

HARNESS_TEST(legacy_stream) {
    array<int> a(1), b(1);
    cudaStream_t blocking = nullptr, free_running = new_stream();
    CHECK_EQ(cudaStreamCreate(&blocking), cudaSuccess);
    a.zero(), b.zero();
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    launch(k_add, 1, 1, 0, blocking, a.data, 1);
    launch(k_add, 1, 1, 0, free_running, b.data, 1);
    launch(k_add, 1, 1, 0, 0, a.data, 10);              /* after `blocking`, not after `free_running` */
    CHECK_EQ(cudaStreamSynchronize(0), cudaSuccess);
    CHECK_EQ(a.get()[0], 11);
    CHECK_EQ(b.get()[0], 0);
    CHECK_EQ(cudaStreamSynchronize(free_running), cudaSuccess);
    CHECK_EQ(b.get()[0], 1);
    CHECK_EQ(cudaMemset(a.data, 0, 4), cudaSuccess);
    launch(k_add, 1, 1, 0, blocking, a.data, 1);        /* after the legacy stream */
    CHECK_EQ(cudaStreamSynchronize(blocking), cudaSuccess);
    CHECK_EQ(a.get()[0], 1);
    cudaStreamDestroy(blocking);
    cudaStreamDestroy(free_running);
}

HARNESS_TEST(destroyed_streams_finish) {
    array<int> a(1);
    cudaStream_t s = new_stream();
    cudaEvent_t e = new_event();
    a.zero();
    cudaDeviceSynchronize();
    launch(k_add, 1, 1, 0, s, a.data, 3);
    cudaEventRecord(e, s);
    CHECK_EQ(cudaStreamDestroy(s), cudaSuccess);
    CHECK_EQ(launch(k_add, 1, 1, 0, s, a.data, 3), cudaErrorInvalidResourceHandle);
    CHECK_EQ(a.get()[0], 0);
    CHECK_EQ(cudaEventSynchronize(e), cudaSuccess);
    CHECK_EQ(a.get()[0], 3);
    cudaEventDestroy(e);
}

/* A new stream with the handle of a destroyed one has nothing to do with the work that the other left. */
HARNESS_TEST(handles_are_used_again) {
    array<int> a(1), b(1);
    cudaStream_t s = new_stream(), other;
    cudaEvent_t e = new_event();
    a.zero(), b.zero();
    cudaDeviceSynchronize();
    launch(k_add, 1, 1, 0, s, a.data, 3);
    cudaEventRecord(e, s);
    CHECK_EQ(cudaStreamDestroy(s), cudaSuccess);
    other = new_stream();
    CHECK(other == s);
    launch(k_add, 1, 1, 0, other, b.data, 5);
    CHECK_EQ(cudaStreamSynchronize(other), cudaSuccess);
    CHECK(a.get()[0] == 0 && b.get()[0] == 5);
    CHECK_EQ(cudaEventSynchronize(e), cudaSuccess);
    CHECK_EQ(a.get()[0], 3);
    CHECK_EQ(cudaStreamDestroy(other), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(other), cudaErrorInvalidResourceHandle);
    cudaEventDestroy(e);
}

HARNESS_TEST(stream_ordered_memory) {
    int *a = nullptr;
    cudaStream_t s = new_stream();
    CHECK_EQ(cudaMallocAsync(&a, 400, s), cudaSuccess);
    CHECK_EQ(cudaMemsetAsync(a, 0, 400, s), cudaSuccess);
    launch(k_add, 1, 1, 0, s, a, 3);
    CHECK_EQ(cudaFreeAsync(a, s), cudaSuccess);
    CHECK_EQ(cudaFreeAsync(a, s), cudaErrorInvalidValue);
    CHECK(took_fault("released twice"));
    CHECK_EQ(coc_living().allocations, 1);
    CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
    CHECK_EQ(coc_living().allocations, 0);
    cudaStreamDestroy(s);
}

/* Freed on one stream while another still copies into it. */
HARNESS_TEST(released_under_a_copy) {
    char *a = nullptr, *pinned = nullptr;
    cudaStream_t s = new_stream(), t = new_stream();
    cudaMallocHost(&pinned, 64);
    CHECK_EQ(cudaMallocAsync(&a, 64, s), cudaSuccess);
    CHECK_EQ(cudaMemcpyAsync(a, pinned, 64, cudaMemcpyHostToDevice, t), cudaSuccess);
    CHECK_EQ(cudaFreeAsync(a, s), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(t), cudaErrorIllegalAddress);
    CHECK(took_fault("a copy runs after its memory was released"));
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
    CHECK_EQ(cudaFreeHost(pinned), cudaSuccess);
}

void count_up(void *user) { ++*(int *)user; }
HARNESS_TEST(host_functions) {
    cudaStream_t s = new_stream();
    int called = 0;
    CHECK_EQ(cudaLaunchHostFunc(s, count_up, &called), cudaSuccess);
    CHECK_EQ(called, 0);
    CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
    CHECK_EQ(called, 1);
    cudaStreamDestroy(s);
}

/* ---- Events */

HARNESS_TEST(events) {
    array<int> a(1);
    cudaStream_t s = new_stream();
    cudaEvent_t first = new_event(cudaEventDefault), last = new_event(cudaEventDefault), plain = new_event();
    float ms = -1;
    CHECK_EQ(cudaEventQuery(first), cudaSuccess);       /* never recorded */
    CHECK_EQ(cudaStreamWaitEvent(s, first, 0), cudaSuccess);
    CHECK_EQ(cudaEventElapsedTime(&ms, first, last), cudaErrorInvalidResourceHandle);
    cudaEventRecord(first, s);
    for (int i = 0; i < 3; i++) launch(k_add, 20, 64, 0, s, a.data, 1);
    cudaEventRecord(last, s);
    cudaEventRecord(plain, s);
    CHECK_EQ(cudaEventElapsedTime(&ms, first, last), cudaErrorNotReady);
    CHECK_EQ(cudaEventQuery(last), cudaErrorNotReady);
    CHECK_EQ(cudaEventQuery(last), cudaSuccess);        /* patience: the second time it is done */
    CHECK_EQ(cudaEventQuery(first), cudaSuccess);
    CHECK_EQ(cudaEventElapsedTime(&ms, first, last), cudaSuccess);
    CHECK(ms > 0 && ms < 10000);
    CHECK_EQ(cudaStreamQuery(s), cudaErrorNotReady);
    CHECK_EQ(cudaStreamQuery(s), cudaSuccess);
    CHECK_EQ(cudaEventElapsedTime(&ms, first, plain), cudaErrorInvalidResourceHandle);
    coc_set_patience(0);
    cudaEventRecord(last, s);
    CHECK_EQ(cudaEventQuery(last), cudaSuccess);
    for (cudaEvent_t e : {first, last, plain}) CHECK_EQ(cudaEventDestroy(e), cudaSuccess);
    CHECK_EQ(cudaEventRecord(first, s), cudaErrorInvalidResourceHandle);
    cudaStreamDestroy(s);
}

/* ---- Graphs */

HARNESS_TEST(graphs_repeat_with_their_arguments) {
    array<int> a(2);
    int *pinned = nullptr;
    cudaStream_t s = new_stream();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cudaStreamCaptureStatus status;
    size_t nodes = 0;
    cudaMallocHost(&pinned, 8);
    pinned[0] = 4;
    a.zero();
    cudaDeviceSynchronize();
    CHECK_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    CHECK(cudaStreamIsCapturing(s, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive);
    int amount = 3;
    CHECK_EQ(launch(k_add, 1, 1, 0, s, a.data, amount), cudaSuccess);
    amount = 1000;
    CHECK_EQ(cudaMemcpyAsync(a.data + 1, pinned, 4, cudaMemcpyHostToDevice, s), cudaSuccess);
    CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaSuccess);
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess && nodes == 2);
    CHECK_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    cudaStreamSynchronize(s);
    CHECK_EQ(a.get()[0], 0);                    /* capturing runs nothing */
    for (int i = 1; i <= 3; i++) {
        pinned[0] = 10 * i;                     /* memory is read anew, arguments are not */
        CHECK_EQ(cudaGraphLaunch(exec, s), cudaSuccess);
        CHECK_EQ(a.get()[0], 3 * (i - 1));
        cudaStreamSynchronize(s);
        CHECK(a.get()[0] == 3 * i && a.get()[1] == 10 * i);
    }
    CHECK_EQ(coc_kernel_launches("k_add"), 3);
    CHECK_EQ(cudaGraphLaunch(exec, s), cudaSuccess);
    CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);      /* what was launched still runs */
    cudaStreamSynchronize(s);
    CHECK_EQ(a.get()[0], 12);
    CHECK_EQ(cudaGraphLaunch(exec, s), cudaErrorInvalidValue);
    cudaFreeHost(pinned);
    cudaStreamDestroy(s);
}

/* Two branches that pass a number on through the same memory: the one that is taken first in each step leaves it to the
   other.  A schedule that ends one branch before it begins the other does not show that. */
HARNESS_TEST(branches_go_step_by_step) {
    array<int> a(3);
    cudaStream_t s = new_stream(), t = new_stream();
    cudaEvent_t forked = new_event(), joined = new_event();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    int sums[COC_SCHEDULES];
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    cudaEventRecord(forked, s), cudaStreamWaitEvent(t, forked, 0);
    launch(k_add, 1, 1, 0, s, a.data, 1), launch(k_copy, 1, 1, 0, s, a.data + 1, a.data);
    launch(k_add, 1, 1, 0, t, a.data, 10), launch(k_copy, 1, 1, 0, t, a.data + 2, a.data);
    cudaEventRecord(joined, t), cudaStreamWaitEvent(s, joined, 0);
    CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (int i = 0; i < COC_SCHEDULES; i++) {
        coc_set_schedule((coc_schedule)i);
        a.zero();
        CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
        CHECK(cudaGraphLaunch(exec, s) == cudaSuccess && cudaStreamSynchronize(s) == cudaSuccess);
        sums[i] = 100 * a.get()[1] + a.get()[2];
    }
    CHECK_EQ(sums[COC_EAGER], 111);
    CHECK_EQ(sums[COC_LATE], 1110);
    CHECK_EQ(sums[COC_OTHERS_FIRST], 1111);
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
    cudaEventDestroy(forked), cudaEventDestroy(joined);
    cudaStreamDestroy(s), cudaStreamDestroy(t);
}

/* A fork into a second stream and back; without the way back the capture is refused. */
HARNESS_TEST(captures_fork_and_join) {
    array<int> a(2);
    cudaStream_t s = new_stream(), t = new_stream();
    cudaEvent_t fork = new_event(), join = new_event();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    for (int joins = 0; joins < 2; joins++) {
        a.zero();
        cudaDeviceSynchronize();
        CHECK_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
        launch(k_add, 1, 1, 0, s, a.data, 1);
        CHECK_EQ(cudaEventRecord(fork, s), cudaSuccess);
        CHECK_EQ(cudaStreamWaitEvent(t, fork, 0), cudaSuccess);
        launch(k_copy, 1, 1, 0, t, a.data + 1, a.data);
        CHECK_EQ(cudaEventRecord(join, t), cudaSuccess);
        CHECK_EQ(cudaStreamEndCapture(t, &graph), cudaErrorStreamCaptureUnmatched);
        if (joins) {                            /* that ended the capture: once more */
            CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
            CHECK_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
            launch(k_add, 1, 1, 0, s, a.data, 1);
            cudaEventRecord(fork, s);
            cudaStreamWaitEvent(t, fork, 0);
            launch(k_copy, 1, 1, 0, t, a.data + 1, a.data);
            cudaEventRecord(join, t);
            CHECK_EQ(cudaEventQuery(join), cudaErrorStreamCaptureUnsupported);
            CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
            CHECK_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
            launch(k_add, 1, 1, 0, s, a.data, 1);
            cudaEventRecord(fork, s);
            cudaStreamWaitEvent(t, fork, 0);
            launch(k_copy, 1, 1, 0, t, a.data + 1, a.data);
            cudaEventRecord(join, t);
            CHECK_EQ(cudaStreamWaitEvent(s, join, 0), cudaSuccess);
            launch(k_add, 1, 1, 0, s, a.data, 20);
            CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaSuccess);
        } else {
            CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureInvalidated);
            CHECK_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
            cudaEventRecord(fork, s);
            cudaStreamWaitEvent(t, fork, 0);
            launch(k_add, 1, 1, 0, t, a.data, 1);
            CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureUnjoined);
        }
    }
    CHECK_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_EQ(cudaGraphLaunch(exec, t), cudaSuccess);
    cudaStreamSynchronize(t);
    CHECK(a.get()[0] == 21 && a.get()[1] == 1);
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
    cudaEventDestroy(fork), cudaEventDestroy(join);
    cudaStreamDestroy(s), cudaStreamDestroy(t);
    for (int i = 0; i < 4; i++) cudaGetLastError();
}

/* What waits or allocates is refused during a capture, and ends it. */
HARNESS_TEST(captures_refuse) {
    cudaStream_t s = new_stream(), other = new_stream(), blocking = nullptr;
    cudaEvent_t outside = new_event();
    cudaGraph_t graph = nullptr;
    array<int> a(1);
    cudaStreamCreate(&blocking);
    cudaEventRecord(outside, other);
    for (int what = 0; what < 8; what++) {
        cudaStream_t mine = what == 7 ? blocking : s;
        void *p = nullptr;
        cudaError_t error = cudaSuccess, expected = cudaErrorStreamCaptureUnsupported;
        CHECK_EQ(cudaStreamBeginCapture(mine, cudaStreamCaptureModeGlobal), cudaSuccess);
        switch (what) {
            case 0: error = cudaStreamSynchronize(s); break;
            case 1: error = cudaDeviceSynchronize(); break;
            case 2: error = cudaMalloc(&p, 4); break;
            case 3: error = cudaHostAlloc(&p, 4, 0); break;
            case 4: error = cudaStreamQuery(s); break;
            case 5: error = cudaFree(a.data); break;
            case 6: error = cudaStreamWaitEvent(s, outside, 0), expected = cudaErrorStreamCaptureIsolation; break;
            default: error = launch(k_add, 1, 1, 0, 0, a.data, 1), expected = cudaErrorStreamCaptureImplicit; break;
        }
        CHECK_EQ(error, expected);
        CHECK_EQ(launch(k_add, 1, 1, 0, mine, a.data, 1), cudaErrorStreamCaptureInvalidated);
        CHECK_EQ(cudaStreamEndCapture(mine, &graph), cudaErrorStreamCaptureInvalidated);
        CHECK(graph == nullptr);
    }
    CHECK_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed), cudaErrorStreamCaptureUnsupported);
    CHECK_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    void *p = nullptr;
    CHECK_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    CHECK_EQ(cudaMalloc(&p, 4), cudaSuccess);           /* allowed to this thread now */
    CHECK_EQ(cudaFree(p), cudaSuccess);
    CHECK_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    unsigned long long id = 0, later = 0;
    cudaStreamCaptureStatus status;
    CHECK_EQ(cudaStreamGetCaptureInfo(s, &status, &id), cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusActive && id != 0);
    CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed);
    CHECK(cudaStreamGetCaptureInfo(s, &status, &later) == cudaSuccess && later != id);
    CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    cudaEventDestroy(outside);
    for (cudaStream_t each : {s, other, blocking}) cudaStreamDestroy(each);
    cudaGetLastError();
}

/* Whoever calls CUDA with a lock of amp_cuda.cu's held is named. */
HARNESS_TEST(locks_are_seen) {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    int count = 0;
    cublasLtHandle_t handle = nullptr;
    CHECK_EQ(coc_mutex_lock(&mutex), 0);
    CHECK_EQ(coc_locks_held(), 1);
    std::thread other([] { CHECK_EQ(coc_locks_held(), 0); });
    other.join();
    CHECK_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    CHECK(coc_take_faults().find("cudaGetDeviceCount is called with a lock held") != std::string::npos);
    CHECK_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
    CHECK(coc_take_faults().find("cublasLtCreate is called with a lock held") != std::string::npos);
    CHECK_EQ(coc_mutex_unlock(&mutex), 0);
    CHECK_EQ(coc_locks_held(), 0);
    CHECK_EQ(cublasLtDestroy(handle), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(coc_faults(), 0);
}

/* A capturing stream is destroyed: nothing can end the capture any more, and the thread that began it stays in it, so that
   unsafe calls go on being refused (CUDA Runtime API, cudaThreadExchangeStreamCaptureMode: "an ongoing capture sequence"). */
HARNESS_TEST(capture_outlives_its_stream) {
    cudaStream_t s = new_stream(), other = new_stream();
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    cudaGraph_t graph = nullptr;
    void *p = nullptr;
    CHECK_EQ(cudaStreamBeginCapture(s, mode), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(s), cudaSuccess);
    CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaErrorInvalidResourceHandle);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(cudaMalloc(&p, 4), cudaErrorStreamCaptureUnsupported);
        CHECK_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
    }
    std::thread([&] { CHECK_EQ(cudaMalloc(&p, 4), cudaSuccess); }).join();     /* THREAD_LOCAL: nobody else's affair */
    mode = cudaStreamCaptureModeRelaxed;
    CHECK_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    CHECK_EQ(cudaFree(p), cudaSuccess);
    CHECK_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(other), cudaSuccess);
    cudaDeviceReset();
}

/* ---- Counts and failures */

HARNESS_TEST(counts) {
    array<int> a(4);
    char pageable[16] = {};
    int *pinned = nullptr;
    cudaStream_t s = new_stream();
    cudaMallocHost(&pinned, 16);
    cudaDeviceSynchronize();
    coc_reset_counts();
    for (int i = 0; i < 3; i++) launch(k_add, 2, 32, 0, s, a.data, 1);
    cudaMemsetAsync(a.data, 0, 4, s);
    cudaMemcpyAsync(pinned, a.data, 16, cudaMemcpyDeviceToHost, s);
    coc_counts c = coc_count();
    CHECK(c.launches == 3 && c.fills == 1 && c.copies == 1 && c.calls == 5);
    CHECK(c.synchronising == 0 && c.allocations == 0);
    CHECK_EQ(coc_kernel_launches("k_add"), 3);
    cudaMemcpyAsync(pageable, a.data, 16, cudaMemcpyDeviceToHost, s);       /* may wait: it counts */
    cudaStreamSynchronize(s);
    CHECK_EQ(coc_count().synchronising, 2);
    CHECK(has(coc_synchronising_calls(), "cudaMemcpyAsync 1"));
    CHECK(has(coc_synchronising_calls(), "cudaStreamSynchronize 1"));
    CHECK(coc_calls("cudaMemcpyAsync") == 2 && coc_calls("cudaMalloc") == 0);
    cudaFreeHost(pinned);
    CHECK_EQ(coc_count().frees, 1);
    cudaStreamDestroy(s);
}

HARNESS_TEST(failures_on_demand) {
    void *p = nullptr;
    int device = -1;
    coc_fail("cudaMalloc", 2, cudaErrorMemoryAllocation);
    CHECK_EQ(cudaMalloc(&p, 4), cudaSuccess);
    CHECK_EQ(cudaFree(p), cudaSuccess);
    CHECK(coc_fail_pending());
    CHECK_EQ(cudaMalloc(&p, 4), cudaErrorMemoryAllocation);
    CHECK(!coc_fail_pending() && cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK_EQ(coc_living().allocations, 0);
    coc_fail(nullptr, 1, cudaErrorUnknown);
    CHECK_EQ(cudaGetDevice(&device), cudaErrorUnknown);
    CHECK_EQ(cudaGetDevice(&device), cudaSuccess);
    cudaGetLastError();
    coc_fail("cudaLaunchKernel", 1, cudaErrorECCUncorrectable, 1);
    CHECK_EQ(launch(k_nothing, 1, 1, 0, 0, 0), cudaErrorECCUncorrectable);
    CHECK_EQ(cudaMalloc(&p, 4), cudaErrorECCUncorrectable);
    CHECK_EQ(cudaGetLastError(), cudaErrorECCUncorrectable);
    CHECK_EQ(cudaGetLastError(), cudaErrorECCUncorrectable);
    CHECK_EQ(cudaSetDevice(1), cudaSuccess);            /* the other device is well */
    CHECK_EQ(cudaMalloc(&p, 4), cudaSuccess);
    CHECK_EQ(cudaFree(p), cudaSuccess);
    cudaSetDevice(0);
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
    CHECK_EQ(cudaMalloc(&p, 4), cudaSuccess);
    CHECK_EQ(cudaFree(p), cudaSuccess);
    CHECK(!strcmp(cudaGetErrorName(cudaErrorIllegalAddress), "cudaErrorIllegalAddress"));
    CHECK(!strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory"));
}

/* ---- Devices and host threads */

HARNESS_TEST(devices) {
    int count = 0, value = 0;
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceCount(&count) == cudaSuccess && count == 2);
    CHECK_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
    CHECK(cudaGetDeviceProperties(&prop, 1) == cudaSuccess && prop.major == 9 && prop.multiProcessorCount == 4);
    CHECK(!strcmp(prop.name, "model") && prop.sharedMemPerBlockOptin == 227 * 1024);
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess && value == 4);
    array<unsigned char> a(16);
    cudaStream_t s = new_stream();
    cudaEvent_t e = new_event();
    cudaSetDevice(1);
    cudaStream_t t = new_stream();
    unsigned char *b = nullptr;
    CHECK_EQ(cudaMalloc(&b, 16), cudaSuccess);
    CHECK_EQ(launch(k_write, 1, 1, 0, s, a.data, 0, 1), cudaErrorInvalidResourceHandle);   /* a stream of device 0 */
    CHECK_EQ(cudaEventRecord(e, t), cudaErrorInvalidResourceHandle);
    CHECK_EQ(cudaMemcpy(b, a.data, 16, cudaMemcpyDeviceToDevice), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(launch(k_write, 1, 1, 0, t, b, 0, 1), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(t), cudaSuccess);
    CHECK_EQ(cudaFree(b), cudaSuccess);
    CHECK_EQ(launch(k_write, 1, 1, 0, t, a.data, 0, 1), cudaErrorIllegalAddress);           /* memory of device 0 */
    CHECK(took_fault("is not memory of device 1"));
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
    cudaSetDevice(0);
    CHECK_EQ(launch(k_write, 1, 1, 0, s, a.data, 0, 9), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
    CHECK_EQ(a.get()[0], 9);
    cudaEventDestroy(e);
    cudaStreamDestroy(s);
    coc_set_devices(0);
    CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0);
    coc_set_devices(2);
}
HARNESS_TEST(other_devices_are_out_of_reach) {
    if (UNDER_ASAN) SKIP("AddressSanitizer ends the program");
    array<unsigned char> a(16);
    cudaSetDevice(1);
    unsigned char **table = nullptr;
    CHECK_EQ(cudaMalloc(&table, sizeof *table), cudaSuccess);
    CHECK_EQ(cudaMemcpy(table, &a.data, sizeof a.data, cudaMemcpyHostToDevice), cudaSuccess);
    CHECK_EQ(launch(k_write_through, 1, 1, 0, 0, table, 1), cudaSuccess);      /* device 0's memory, behind a pointer */
    CHECK_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    CHECK(took_fault("bytes of device 0"));
    cudaDeviceReset();
    cudaSetDevice(0);
}
HARNESS_TEST(host_threads) {
    std::vector<std::thread> threads;
    array<int> sum(1);
    sum.zero();
    cudaDeviceSynchronize();
    for (int t = 0; t < 3; t++)
        threads.emplace_back([&, t] {
            cudaStream_t s = nullptr;
            int device = -1;
            if (cudaGetDevice(&device) != cudaSuccess || device != 0) return;
            if (cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) != cudaSuccess) return;
            for (int i = 0; i < 20; i++) {
                launch(k_add, 3, 32, 0, s, sum.data, t + 1);
                cudaStreamSynchronize(s);
            }
            cudaStreamDestroy(s);
        });
    for (std::thread &t : threads) t.join();
    CHECK_EQ(sum.get()[0], 20 * 96 * 6);
}

/* ---- What AddressSanitizer and UndefinedBehaviorSanitizer report: each in a program of its own */

void crash(const std::string &what) {
    begin();
    unsigned char *a = nullptr;
    cudaMalloc(&a, 100);
    if (what == "dynamic shared memory") launch(k_shared_overrun, 1, 1, 64, 0, 16);
    if (what == "static shared memory") launch(k_static_overrun, 1, 1, 0, 0, 8);
    if (what == "beyond device memory") launch(k_write, 1, 1, 0, 0, a, 100, 1);
    if (what == "before device memory") launch(k_write, 1, 1, 0, 0, a, -1, 1);
    if (what == "released memory") cudaFree(a), launch(k_write, 1, 1, 0, 0, a, 0, 1);
    cudaDeviceSynchronize();
}
std::string output_of(const char *what) {
    int ends[2];
    std::string text;
    char buffer[4096];
    fflush(stdout);
    if (pipe(ends) != 0) return "";
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1), dup2(ends[1], 2), close(ends[0]);
        execl("/proc/self/exe", "t_harness", "--crash", what, (char *)nullptr);
        _exit(127);
    }
    close(ends[1]);
    for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, (size_t)n);
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "" : text;
}
HARNESS_TEST(sanitizer_reports) {
    if (!UNDER_ASAN) SKIP("not built with AddressSanitizer");
    CHECK_EQ(output_of("nothing").size(), 0);
    for (const char *what : {"dynamic shared memory", "static shared memory", "beyond device memory",
                             "before device memory", "released memory"}) {
        std::string text = output_of(what);
        CHECK_MSG(has(text, "AddressSanitizer: use-after-poison"), "%s: '%.300s'", what, text.c_str());
    }
}

} // namespace

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--crash")) return crash(argv[2]), 0;
    TEST_BEGIN(argc, argv);
    coc_orders = 5;
    RUN(orders);
    RUN(missing_barrier_shows);
    RUN(quick_warp_shows);
    RUN(barriers_vote);
    RUN(returned_threads);
    RUN(broken_synchronisation);
    RUN(fault_texts_name_kernel_and_thread);
    RUN(shuffles);
    RUN(votes);
    RUN(parts_of_a_warp);
    RUN(atomics);
    RUN(last_block);
    RUN(shared_memory_is_poisoned);
    RUN(shared_memory_overrun);
    RUN(async_copies_land_late);
    RUN(tensor_core_fragments); RUN(tensor_core_fragments_of_words); RUN(words_need_tensor_cores_of_8_0);
    RUN(unaligned_matrices);
    RUN(missing_copy_wait_shows);
    RUN(warpgroup_fragments);
    RUN(misuses_of_warpgroups);
    RUN(warpgroups_need_the_letter);
    RUN(bulk_copies_land_in_every_order);
    RUN(overwritten_operands_show);
    RUN(warpgroups_work_together);
    RUN(named_barriers_take_turns);
    RUN(tensor_maps_are_checked);
    RUN(fp8_pairs);
    RUN(vectors);
    RUN(numbers);
    RUN(conversions);
    RUN(launch_checks);
    RUN(arguments_are_copied);
    RUN(fresh_memory_is_poisoned);
    RUN(red_zones);
    RUN(released_memory);
    RUN(copies_are_checked);
    RUN(pointer_attributes);
    RUN(host_access_is_seen);
    RUN(host_pointers_are_seen);
    RUN(null_is_an_illegal_address);
    RUN(memory_has_an_end);
    RUN(far_addresses);
    RUN(last_blocks);
    RUN(work_is_deferred);
    RUN(missing_wait_shows);
    RUN(overwriting_shows);
    RUN(legacy_stream);
    RUN(destroyed_streams_finish);
    RUN(handles_are_used_again);
    RUN(stream_ordered_memory);
    RUN(released_under_a_copy);
    RUN(host_functions);
    RUN(events);
    RUN(graphs_repeat_with_their_arguments);
    RUN(branches_go_step_by_step);
    RUN(captures_fork_and_join);
    RUN(captures_refuse);
    RUN(locks_are_seen);
    RUN(capture_outlives_its_stream);
    RUN(counts);
    RUN(failures_on_demand);
    RUN(devices);
    RUN(other_devices_are_out_of_reach);
    RUN(host_threads);
    RUN(sanitizer_reports);
    return TEST_END();
}
