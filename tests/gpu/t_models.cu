/* t_models.cu - tests what the CUDA backend and its model on the CPU assume of the hardware, over all inputs.
 *
 * Conversions are compared with amp.h's on the CPU, which the model uses: every fp32 pattern to fp16, bf16 (one by one and
 * in pairs), TF32, e4m3 and e5m2, and every pattern of these back.  For approximate functions, the errors on the GPU
 * against fp64 are measured.  For tensor cores, the fragments of mma, ldmatrix and cp.async are tested.  For cuBLASLt, each
 * line of cublas_rules.h is confirmed or disproved.  With GPU_MODEL=1 in the environment, a sample of the patterns is
 * tested, for the model GPU. */
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>
#include "amp_cuda.cu"           /* its functions themselves are measured: this program is not linked with it */
#include "cublas_rules.h"
#include "../test.h"

/* ---- What feeds the tensor cores, for fragments.h */

#if AMPC_TENSOR_CORES
static __device__ void fragment_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16) {
    if (bf16) ampc_mma<true>(c, a, b);
    else ampc_mma<false>(c, a, b);
}
static __device__ void fragment_mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { ampc_mma_tf32(c, a, b); }
static __device__ void fragment_load(uint32_t (&r)[4], const void *row, bool transposed) {
    if (transposed) ampc_matrix_load_transposed(r, ampc_address_of(row));
    else ampc_matrix_load(r, ampc_address_of(row));
}
static __device__ void fragment_copy(void *shared, const void *from, bool there) {
    ampc_copy_async(shared, from, there);
    ampc_copy_commit();
    ampc_copy_wait<0>();
}
#else
static __device__ void fragment_mma(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2], bool) {}
static __device__ void fragment_mma_tf32(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]) {}
static __device__ void fragment_load(uint32_t (&)[4], const void *, bool) {}
static __device__ void fragment_copy(void *, const void *, bool) {}
#endif

/* Empty but in code for sm_90a, as the functions are that they call. */
static __device__ uint32_t fragment_number(const void *shared) { return ampc_shared_number(shared); }
static __device__ void fragment_gate_init(void *gate, unsigned count) { ampc_gate_init(gate, count); }
static __device__ void fragment_gates_ready() { ampc_gates_ready(); }
static __device__ void fragment_expect(void *gate, unsigned bytes) { ampc_gate_expect(gate, bytes); }
static __device__ void fragment_arrive(void *gate) { ampc_gate_arrive(gate); }
static __device__ void fragment_gate_wait(void *gate, unsigned parity) { ampc_gate_wait(gate, parity); }
static __device__ void fragment_bytes(void *to, const void *from, unsigned bytes, void *gate) {
    ampc_bytes_fetch(to, from, bytes, gate);
}
static __device__ void fragment_box(void *to, const void *map, void *gate, int c0, int c1, int c2, int c3) {
    ampc_box_fetch(to, (const ampc_tensor_map *)map, gate, c0, c1, c2, c3);
}
struct fragment_operands;
template <int N, bool ACROSS>
static __device__ void fragment_group(float (&c)[N / 8][4], const uint32_t (&a)[4], const fragment_operands &o);
#include "fragments.h"

template <int N, bool BF16, bool ACROSS>
static __device__ void fragment_group_of(float (&c)[N / 8][4], const uint32_t (&a)[4], const fragment_operands &o) {
    uint64_t right = ampc_descriptor(o.right, o.leading, 1024);
    ampc_group_fence();
    if (o.left) ampc_group_mma<N, BF16, ACROSS>(c, ampc_descriptor(o.left, 16, 1024), right, o.add);
    else ampc_group_mma<N, BF16, ACROSS>(c, a, right, o.add);
    ampc_group_commit();
    ampc_group_wait<0>();
}
template <int N, bool ACROSS>
static __device__ void fragment_group(float (&c)[N / 8][4], const uint32_t (&a)[4], const fragment_operands &o) {
    if (o.bf16) fragment_group_of<N, true, ACROSS>(c, a, o);
    else fragment_group_of<N, false, ACROSS>(c, a, o);
}

static int quick;

/* ---- The GPU */

static amp_result host_fail(void *, amp_result result, const char *text) { printf("  %s\n", text); return result; }
static void host_log(void *, amp_log_level, int, const char *) {}
static void *host_alloc(void *, size_t size, size_t align) {
    void *p = NULL;
    return posix_memalign(&p, align < sizeof p ? sizeof p : align, size) == 0 ? p : NULL;
}
static void host_free(void *, void *p, size_t) { free(p); }

struct device {
    const amp_backend *b = amp_cuda();
    void *dev = NULL;
    device() {
        static const amp_host host = {NULL, host_fail, host_log, host_alloc, host_free, NULL};
        amp_backend_desc d = {};
        CHECK(b->open(&dev, &host, &d) == AMP_OK);
    }
    ~device() { if (dev) b->close(dev); }
    device(const device &) = delete;
    device &operator=(const device &) = delete;
    void *room(size_t bytes) {
        void *p = NULL;
        CHECK(b->alloc(dev, &p, bytes) == AMP_OK);
        return p;
    }
    void cast(void *dst, amp_dtype to, const void *src, amp_dtype from, int64_t n) {
        amp_k_cast a = {};
        a.dst = dst, a.src = src, a.dst_dtype = to, a.src_dtype = from, a.n = n;
        CHECK(b->cast(dev, &a, NULL) == AMP_OK);
    }
    /* The same through the kernels that round two numbers at a time: dst = 1 src. */
    void add(void *dst, amp_dtype to, const void *src, int64_t n) {
        amp_k_add a = {};
        a.y = dst, a.a = src, a.y_dtype = to, a.a_dtype = AMP_F32, a.n = n, a.alpha = 1;
        CHECK(b->add(dev, &a, NULL) == AMP_OK);
    }
    void copy(void *dst, const void *src, size_t bytes, amp_copy_kind kind) {
        CHECK(b->copy(dev, dst, src, bytes, kind, NULL) == AMP_OK && b->stream_sync(dev, NULL) == AMP_OK);
    }
};

/* ---- Conversions */

/* Casts n patterns of `from` on both sides and compares the bits. */
struct comparison {
    device gpu;
    size_t most;
    void *source, *result;
    std::vector<unsigned char> mine, theirs;
    explicit comparison(size_t n) : most(4 * n), source(gpu.room(most)), result(gpu.room(most)), mine(most), theirs(most) {}
    ~comparison() { gpu.b->free(gpu.dev, source, most), gpu.b->free(gpu.dev, result, most); }
    void upload(const void *patterns, size_t bytes) { gpu.copy(source, patterns, bytes, AMP_COPY_TO_DEVICE); }
    void compare(amp_dtype to, amp_dtype from, const void *patterns, int64_t n) {
        size_t size = amp_dtype_size(to), bytes = (size_t)n * size;
        gpu.cast(result, to, source, from, n);
        gpu.copy(theirs.data(), result, bytes, AMP_COPY_TO_HOST);
        cast_here(to, from, patterns, n);
        if (memcmp(mine.data(), theirs.data(), bytes) == 0) return;
        size_t at = 0;
        while (mine[at] == theirs[at]) at++;
        CHECK_MSG(0, "%s to %s: pattern %zu of %lld", amp_dtype_name(from), amp_dtype_name(to), at / size, (long long)n);
    }
    /* mine = patterns, cast by all threads of the CPU. */
    void cast_here(amp_dtype to, amp_dtype from, const void *patterns, int64_t n) {
        const int64_t piece = 1 << 16;
        size_t wide = amp_dtype_size(from), size = amp_dtype_size(to);
#pragma omp parallel for
        for (int64_t i = 0; i < n; i += piece)
            (void)amp_convert(mine.data() + (size_t)i * size, to, (const char *)patterns + (size_t)i * wide, from,
                              n - i < piece ? n - i : piece, NULL, NULL);
    }
    /* What compare() just found right, against the pairs' bits: those of NaN are free. */
    void compare_pairs(amp_dtype to, int64_t n) {
        const uint16_t *a = (const uint16_t *)mine.data(), *b = (const uint16_t *)theirs.data();
        uint16_t infinity = to == AMP_F16 ? 0x7c00 : 0x7f80;
        int64_t wrong = 0;
        gpu.add(result, to, source, n);
        gpu.copy(theirs.data(), result, (size_t)n * 2, AMP_COPY_TO_HOST);
#pragma omp parallel for reduction(+ : wrong)
        for (int64_t i = 0; i < n; i++)
            wrong += a[i] != b[i] && ((a[i] & 0x7fff) <= infinity || (b[i] & 0x7fff) <= infinity);
        CHECK_MSG(wrong == 0, "fp32 to %s in pairs: %lld of %lld", amp_dtype_name(to), (long long)wrong, (long long)n);
    }
};

static const amp_dtype narrow[] = {AMP_F16, AMP_BF16, AMP_TF32, AMP_E4M3, AMP_E5M2};

TEST(fp32_to_narrower) {
    const uint64_t all = (uint64_t)1 << 32, step = quick ? 4099 : 1, count = all / step, piece = quick ? 1 << 18 : 1 << 26;
    comparison c(piece);
    std::vector<uint32_t> patterns(piece);
    for (uint64_t first = 0; first < count && !ampt.failures; first += piece) {
        int64_t n = (int64_t)(count - first < piece ? count - first : piece);
#pragma omp parallel for
        for (int64_t i = 0; i < n; i++) patterns[(size_t)i] = (uint32_t)((first + (uint64_t)i) * step);
        c.upload(patterns.data(), (size_t)n * 4);
        for (amp_dtype to : narrow) {
            c.compare(to, AMP_F32, patterns.data(), n);
            if (to == AMP_F16 || to == AMP_BF16) c.compare_pairs(to, n);
        }
    }
}

TEST(narrower_to_fp32) {
    for (amp_dtype from : narrow) {
        if (from == AMP_TF32) continue;         /* its patterns are fp32's */
        size_t size = amp_dtype_size(from);
        int64_t n = size == 1 ? 1 << 8 : 1 << 16;
        std::vector<unsigned char> patterns((size_t)n * size);
        for (int64_t i = 0; i < n; i++) memcpy(&patterns[(size_t)i * size], &i, size);  /* little-endian */
        comparison c((size_t)n);
        c.upload(patterns.data(), patterns.size());
        c.compare(AMP_F32, from, patterns.data(), n);
    }
}

/* ---- 2^x and 1/x as the kernels take them from the hardware */

enum function { EX2, RCP };

/* The largest relative error, as the bits of a float, over the patterns first, first + step, ... whose result is a normal
   number; wrong: how many results below 2^-126 are neither 0 nor right. */
__global__ void __launch_bounds__(256) error_kernel(function f, uint32_t step, uint64_t count, unsigned *worst, unsigned *wrong) {
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (uint64_t)gridDim.x * blockDim.x) {
        float x = ampi_f32_of_bits((uint32_t)i * step);
        double right = f == EX2 ? exp2((double)x) : 1 / (double)x, size = fabs(right), off;
        float y = f == EX2 ? ampc_exp2(x) : ampc_reciprocal(x);
        uint32_t magnitude = ampi_bits_f32(x) & 0x7fffffffu;
        if (magnitude >= 0x7f800000u || (f == RCP && magnitude < 0x00800000u) || size > 3.4028234e38) continue;
        off = fabs((double)y - right);
        if (size >= 1.1754943508222875e-38) atomicMax(worst, ampi_bits_f32((float)(off / size)));
        else if (y != 0.0f && off > 1.4012984643248171e-45) atomicAdd(wrong, 1u);
    }
}

static void check_approximation(function f, const char *name, double bound) {
    const uint32_t step = quick ? 65537 * 3 : 1;
    uint64_t count = ((uint64_t)1 << 32) / step;
    unsigned *found = NULL, host[2] = {0, 0};
    unsigned *wrong;
    CHECK(cudaMalloc((void **)&found, sizeof host) == cudaSuccess);
    CHECK(cudaMemcpy(found, host, sizeof host, cudaMemcpyHostToDevice) == cudaSuccess);
    wrong = found + 1;
    void *args[] = {&f, (void *)&step, &count, &found, &wrong};
    CHECK(cudaLaunchKernel(error_kernel, dim3(quick ? 4 : 4096), dim3(256), args, 0, (cudaStream_t)0) == cudaSuccess);
    CHECK(cudaMemcpy(host, found, sizeof host, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(cudaFree(found) == cudaSuccess);
    float worst = ampi_f32_of_bits(host[0]);
    ampt_figure(name, (double)worst, bound);
    CHECK_MSG((double)worst <= bound, "%s: relative error 2^%.2f", name, log2((double)worst));
    CHECK_EQ(host[1], 0);
}

TEST(ex2_approx) { check_approximation(EX2, "ex2.approx", ldexp(1, -22)); }
TEST(rcp_approx) { check_approximation(RCP, "rcp.approx", ldexp(1, -23)); }

/* ---- Tensor cores */

static void fragment_report(const char *what, const char *source, const std::string &found) {
    printf("%s: tensor cores: %s (PTX ISA, %s)%s%s\n", found.empty() ? "confirmed" : "struck", what, source, found.empty() ? "" : ": ",
           found.c_str());
    CHECK_MSG(found.empty(), "%s: %s", what, found.c_str());
}
TEST(tensor_cores) {
    const char *mma = "Matrix Fragments for mma.m16n8k16";
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0) == cudaSuccess);
    if (prop.major < 8) SKIP("mma.m16n8k16 needs compute capability 8.0");
    for (bool bf16 : {false, true}) {
        fragment_report(bf16 ? "bf16 products" : "fp16 products", mma, fragment_products(bf16));
        fragment_report(bf16 ? "every bf16 number" : "every fp16 number", mma, fragment_numbers(bf16));
        double error = fragment_error(bf16), bound = 17 * ldexp(1, -23);    /* 16 additions, each cut off */
        ampt_figure(bf16 ? "mma bf16, over magnitudes" : "mma fp16, over magnitudes", error, bound);
        CHECK_MSG(error <= bound, "%g", error);
    }
    const char *words = "Matrix Fragments for mma.m16n8k8";
    fragment_report("TF32 products", words, fragment_word_error(true, 0) == 0 ? "" : "a number is another one");
    fragment_report("every TF32 number", words, fragment_word_numbers());
    double error = 0, bound = 9 * ldexp(1, -23);                    /* 8 additions, each cut off */
    for (uint64_t seed = 0; seed < 64; seed++) error = fmax(error, fragment_word_error(false, seed));
    ampt_figure("mma TF32, over magnitudes", error, bound);
    CHECK_MSG(error <= bound, "%g", error);
    fragment_report("ldmatrix", "ldmatrix", fragment_loads(false));
    fragment_report("ldmatrix.trans", "ldmatrix", fragment_loads(true));
    fragment_report("cp.async with zeros", "cp.async", fragment_copies());
}

#if defined(__CUDACC__)
static void for_sm_90a() {}
#else
void coc_set_devices(int count, size_t memory, int multiprocessors, int capability, int image);     /* of the model's coc.h */
static void for_sm_90a() { coc_set_devices(1, (size_t)1 << 30, 4, 90, 90 + 256); }
#endif
/* Each needs the ones before it. */
TEST(warpgroups) {
    for_sm_90a();
    device gpu;
    if (!((ampc_device *)gpu.dev)->has.warpgroups) SKIP("needs compute capability 9.0 and code for sm_90a");
    fragment_report("phases of mbarriers, cp.async.bulk", "mbarrier", fragment_phases());
    fragment_report("boxes of tensor maps, swizzled, zeros outside", "cp.async.bulk.tensor", fragment_boxes());
    fragment_report("products of warpgroups", "wgmma.mma_async", fragment_groups());
}

/* ---- cuBLASLt.  A rule that is struck tells what the model has to learn; what runs must be right, and what amp_cuda.cu
   relies on must hold. */

static const char *program;

static int capability;

/* The first case from `index` on that speaks of this GPU. */
static int next_case(int index) {
    while (index < BLAS_CASES && (capability < blas_cases[index].from || capability > blas_cases[index].to)) index++;
    return index;
}

/* Cases from `index` on in this process, a line each: the number, and what was found.  Ends behind one that may leave a
   GPU that does not work. */
static int run_cases(int index) {
    cublasLtHandle_t handle = NULL;
    if (cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS) return 1;
    for (bool more = true; more && (index = next_case(index)) < BLAS_CASES; index++) {
        std::string found = blas_run(handle, blas_cases[index]);
        printf("%d %s\n", index, found.c_str());
        fflush(stdout);
        more = !blas_cases[index].alone && found.find("the device") == std::string::npos;
    }
    return cublasLtDestroy(handle) != CUBLAS_STATUS_SUCCESS;
}

static void report(const char *rule, const char *source, const std::string &found, bool failed) {
    printf("%s: cuBLASLt: %s (%s)%s%s\n", found.empty() ? "confirmed" : "struck", rule, source, found.empty() ? "" : ": ", found.c_str());
    CHECK_MSG(!failed && (!quick || found.empty()), "%s: %s", rule, found.c_str());
}

static void report_case(int index, const std::string &found) {
    const blas_case &c = blas_cases[index];
    report(c.rule, c.source, found, c.runs && !found.empty() && found.compare(0, 7, "CUBLAS_") != 0);
}

/* Runs cases from `index` on in a process of their own, of which the library may make an end; which is next. */
static int report_cases(int index) {
    std::string command = "'" + std::string(program) + "' --rules " + std::to_string(index);
    FILE *child = popen(command.c_str(), "r");
    char text[512];
    while (child != NULL && fgets(text, sizeof text, child)) {
        const char *found = strchr(text, ' ');
        if (found == NULL) continue;
        index = atoi(text);
        report_case(index++, std::string(found + 1, strcspn(found + 1, "\n")));
    }
    if (child != NULL && pclose(child) == 0) return index;
    if ((index = next_case(index)) < BLAS_CASES) report_case(index++, "it ends its process");
    return index;
}

TEST(cublas_rules) {
    cublasLtHandle_t handle = NULL;
    CHECK(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    printf("cuBLASLt %zu\n", cublasLtGetVersion());
    for (int i = next_case(0); i < BLAS_CASES; i = next_case(i)) i = report_cases(i);
    for (const blas_fact &f : blas_facts) {
        std::string found = f.holds(handle);
        report(f.rule, f.source, found, f.needed && !found.empty());
    }
    CHECK(cublasLtDestroy(handle) == CUBLAS_STATUS_SUCCESS);
}

int main(int argc, char **argv) {
    int devices = 0;
    program = argv[0];
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 1) return puts("t_models: no GPU"), 1;
    capability = blas_capability();
    blas_rounds_first = !(getenv("GPU_MODEL") != NULL && !strcmp(getenv("GPU_MODEL"), "1"));
    if (argc == 3 && !strcmp(argv[1], "--rules")) return run_cases(atoi(argv[2]));
    setvbuf(stdout, NULL, _IOLBF, 0);
    TEST_BEGIN(argc, argv);
    quick = getenv("GPU_MODEL") != NULL && !strcmp(getenv("GPU_MODEL"), "1");
    RUN(fp32_to_narrower);
    RUN(narrower_to_fp32);
    RUN(ex2_approx);
    RUN(rcp_approx);
    RUN(tensor_cores);
    RUN(warpgroups);
    RUN(cublas_rules);
    return TEST_END();
}
