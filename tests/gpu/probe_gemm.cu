/* probe_gemm.cu - prints which algorithms cuBLASLt's heuristic names for the products of a GPT-2 step, and times them.
 *
 *     probe_gemm [--tiny]
 *
 * The heuristic is asked for algorithms whose partial sums are fp32 ("fp32 sums", as amp_cuda.cu asks) and of any kind
 * ("any sums"), with 32 MiB and with 1 MiB of workspace, and for further candidates of the first kind.  Products without
 * an epilogue are also computed by cublasGemmEx, which PyTorch calls for them ("GemmEx").  All ways of a product are timed
 * in turn, round by round, on random numbers, so that a change of the clock affects all alike.  The first way is timed on
 * constant numbers too, which draw less power.  Prints JSON lines: first the device, then for each product each way that
 * the heuristic names first, and the fastest of all, with the version of cuBLASLt, the algorithm's configuration, the median
 * time and the clock after the last round.  --tiny selects the smallest sizes, for the model GPU.
 *
 * This program has never run on a GPU. */
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <vector>

#if defined(COC_CUDA_RUNTIME_H)                 /* the model GPU: the time of day, and no configurations */
void coc_set_modelled_clock(int modelled);
enum { IS_MODEL = 1 };
#else
#include <cublas_v2.h>
static void coc_set_modelled_clock(int) {}
enum { IS_MODEL = 0 };
cublasHandle_t gemm_ex_handle;
#endif

namespace {

enum { CANDIDATES = 16, WORKSPACE = 32 << 20 };
int64_t rows = 65536, c = 768, h = 3072, vocabulary = 50304;
int rounds = 7;
cudaStream_t stream;
cublasLtHandle_t handle;
cudaEvent_t from, to;
char *workspace, *bias;
unsigned long long *ticks;

/* c[m, n] of op(a) op(b), row-major: cuBLASLt, which is column-major, gets b as its first operand. */
struct product { const char *name; int64_t m, n, k; bool ta, tb; int epilogue; bool fp32; };
struct operands { char *a, *b, *c, *aux; };
/* constant: on operands of one value; gemm_ex: without an algorithm */
struct way { std::string name; cublasLtMatmulAlgo_t algo; std::vector<double> ms; bool constant, gemm_ex; };

void need(int status, const char *what) {
    if (status == 0) return;
    printf("{\"event\": \"failed\", \"case\": \"%s\", \"why\": \"status %d\"}\n", what, status);
    exit(1);
}

__global__ void __launch_bounds__(256) fill_kernel(uint16_t *p, int64_t n, int constant) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 0x9e3779b9u;
        x = (x ^ x >> 15) * 0x85ebca6bu;
        x ^= x >> 13;
        p[i] = constant ? 0x3f80u : (uint16_t)((x & 0x8000u) | 0x3e00u | (x >> 16 & 0x1ffu));  /* 1; or 1/8 to 2, of either sign */
    }
}
__global__ void __launch_bounds__(32) clock_kernel(unsigned long long *out) {
#if defined(__CUDA_ARCH__)
    unsigned long long begin, now;
    long long cycles = clock64();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin)::"memory");
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory"); while (now - begin < 50000);
    out[0] = (unsigned long long)(clock64() - cycles), out[1] = now - begin;
#else
    (void)out;
#endif
}

char *numbers(int64_t bytes, int constant) {
    void *p = NULL;
    int64_t n = bytes / 2;
    void *args[] = {&p, &n, &constant};
    need(cudaMalloc(&p, (size_t)bytes), "memory");
    need(cudaLaunchKernel(fill_kernel, dim3(IS_MODEL ? 1 : 1024), dim3(256), args, 0, stream), "numbers");
    return (char *)p;
}

/* A product's description and its matrices as cuBLASLt takes them. */
struct described {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, out;

    described(const product &p, const operands &o) {
        cublasOperation_t first = p.tb ? CUBLAS_OP_T : CUBLAS_OP_N, second = p.ta ? CUBLAS_OP_T : CUBLAS_OP_N;
        int64_t ld = p.n;
        need(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a description");
        set(CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
        set(CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, &p.epilogue, sizeof p.epilogue);
        if (p.epilogue != CUBLASLT_EPILOGUE_DEFAULT && p.epilogue != CUBLASLT_EPILOGUE_DGELU)
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
        if (p.epilogue & 128) {                 /* those with an array beside the result */
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld, sizeof ld);
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &o.aux, sizeof o.aux);
        }
        a = layout(CUDA_R_16BF, p.tb ? p.k : p.n, p.tb ? p.n : p.k);
        b = layout(CUDA_R_16BF, p.ta ? p.m : p.k, p.ta ? p.k : p.m);
        out = layout(p.fp32 ? CUDA_R_32F : CUDA_R_16BF, p.n, p.m);
    }
    ~described() {
        for (cublasLtMatrixLayout_t one : {a, b, out}) (void)cublasLtMatrixLayoutDestroy(one);
        (void)cublasLtMatmulDescDestroy(desc);
    }
    void set(cublasLtMatmulDescAttributes_t what, const void *value, size_t bytes) {
        need(cublasLtMatmulDescSetAttribute(desc, what, value, bytes), "an attribute");
    }
    static cublasLtMatrixLayout_t layout(cudaDataType type, int64_t height, int64_t width) {
        cublasLtMatrixLayout_t made;
        need(cublasLtMatrixLayoutCreate(&made, type, (uint64_t)height, (uint64_t)width, height), "a layout");
        return made;
    }
};

/* What the heuristic names, at most `most`. */
std::vector<cublasLtMatmulAlgo_t> ask(const described &d, uint32_t sums, uint64_t bytes, int most) {
    cublasLtMatmulPreference_t wish;
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    std::vector<cublasLtMatmulAlgo_t> named;
    int n = 0;
    need(cublasLtMatmulPreferenceCreate(&wish), "a preference");
    need(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes), "a preference");
    need(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums), "a preference");
    if (cublasLtMatmulAlgoGetHeuristic(handle, d.desc, d.a, d.b, d.out, d.out, wish, most, found, &n) != CUBLAS_STATUS_SUCCESS) n = 0;
    for (int i = 0; i < n; i++) named.push_back(found[i].algo);
    need(cublasLtMatmulPreferenceDestroy(wish), "a preference");
    return named;
}

std::vector<way> ways_of(const product &p, const described &d) {
    std::vector<way> ways;
    for (uint32_t sums : {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_MASK})
        for (uint64_t mebibytes : {32, 1})
            for (const auto &algo : ask(d, sums, mebibytes << 20, 1))
                ways.push_back({std::string(sums == CUBLASLT_REDUCTION_SCHEME_MASK ? "any" : "fp32") + " sums, " +
                                std::to_string(mebibytes) + " MiB", algo, {}, false, false});
    if (!ways.empty()) ways.push_back({ways[0].name + ", constant numbers", ways[0].algo, {}, true, false});
    if (!IS_MODEL && p.epilogue == CUBLASLT_EPILOGUE_DEFAULT) ways.push_back({"GemmEx", {}, {}, false, true});
    int i = 0;
    for (const auto &algo : ask(d, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, WORKSPACE, CANDIDATES))
        if (i++ > 0) ways.push_back({"candidate " + std::to_string(i - 1), algo, {}, false, false});
    return ways;
}

/* Algorithm, tile, stages, split k, reduction, swizzle, custom option and cluster; nothing on the model. */
std::string config(const cublasLtMatmulAlgo_t &algo) {
    std::string text;
#if !defined(COC_CUDA_RUNTIME_H)
    const cublasLtMatmulAlgoConfigAttributes_t all[] = {
        CUBLASLT_ALGO_CONFIG_ID, CUBLASLT_ALGO_CONFIG_TILE_ID, CUBLASLT_ALGO_CONFIG_STAGES_ID, CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
        CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION};
    size_t written;
    for (auto one : all) {
        uint32_t value = 0;
        (void)cublasLtMatmulAlgoConfigGetAttribute(&algo, one, &value, sizeof value, &written);
        text += std::to_string(value) + " ";
    }
    uint16_t cluster = 0;
    (void)cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster, sizeof cluster, &written);
    text += std::to_string(cluster);
#else
    (void)algo;
#endif
    return text;
}

/* The product as PyTorch asks for it where it has no epilogue. */
int gemm_ex(const product &p, const operands &o) {
#if !defined(COC_CUDA_RUNTIME_H)
    const float one = 1, zero = 0;
    return (int)cublasGemmEx(gemm_ex_handle, p.tb ? CUBLAS_OP_T : CUBLAS_OP_N, p.ta ? CUBLAS_OP_T : CUBLAS_OP_N, (int)p.n, (int)p.m,
                             (int)p.k, &one, o.b, CUDA_R_16BF, (int)(p.tb ? p.k : p.n), o.a, CUDA_R_16BF, (int)(p.ta ? p.m : p.k),
                             &zero, o.c, p.fp32 ? CUDA_R_32F : CUDA_R_16BF, (int)p.n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
#else
    (void)p, (void)o;
    return 1;
#endif
}
int run(const product &p, const described &d, const operands &o, const way &w) {
    const float one = 1, zero = 0;
    if (w.gemm_ex) return gemm_ex(p, o);
    return (int)cublasLtMatmul(handle, d.desc, &one, o.b, d.a, o.a, d.b, &zero, o.c, d.out, o.c, d.out, &w.algo, workspace, WORKSPACE,
                               stream);
}

double milliseconds(const product &p, const described &d, const operands &o, const way &w, int runs) {
    float ms = 0;
    need(cudaEventRecord(from, stream), "an event");
    for (int i = 0; i < runs; i++)
        if (run(p, d, o, w) != 0) return 1e9;
    need(cudaEventRecord(to, stream), "an event");
    need(cudaEventSynchronize(to), "the products");
    need(cudaEventElapsedTime(&ms, from, to), "an event");
    return (double)ms / runs;
}

void tell(const product &p, const way &w, bool best) {
    double ms = w.ms[w.ms.size() / 2];
    printf("{\"event\": \"product\", \"case\": \"%s\", \"way\": \"%s\", \"best\": %d, \"config\": \"%s\", \"ms\": %.4f, \"tflop_per_s\": "
           "%.1f, \"mhz\": %.0f, \"cublas\": \"%zu\"}\n", p.name, w.name.c_str(), best, w.gemm_ex ? "" : config(w.algo).c_str(), ms,
           2e-9 * (double)p.m * (double)p.n * (double)p.k / ms, 1e3 * (double)ticks[0] / (double)ticks[1], cublasLtGetVersion());
}

void probe(const product &p, const operands &o, const operands &constant) {
    described d(p, o);
    std::vector<way> ways = ways_of(p, d);
    if (ways.empty()) { printf("{\"event\": \"product\", \"case\": \"%s\", \"way\": \"none\"}\n", p.name); return; }
    int runs = IS_MODEL ? 1 : std::max(2, (int)(3e-3 * 6e14 / (2.0 * (double)p.m * (double)p.n * (double)p.k)));
    for (int round = -1; round < rounds; round++)           /* the first is not kept */
        for (way &w : ways) {
            double ms = milliseconds(p, d, w.constant ? constant : o, w, runs);
            if (round >= 0) w.ms.push_back(ms);
        }
    void *args[] = {&ticks};
    need(cudaLaunchKernel(clock_kernel, dim3(1), dim3(1), args, 0, stream), "the clock");
    need(cudaStreamSynchronize(stream), "the clock");
    size_t best = 0, middle = ways[0].ms.size() / 2;
    for (way &w : ways) std::sort(w.ms.begin(), w.ms.end());
    for (size_t i = 0; i < ways.size(); i++) if (!ways[i].constant && ways[i].ms[middle] < ways[best].ms[middle]) best = i;
    for (size_t i = 0; i < ways.size(); i++)
        if (i == best || ways[i].name.compare(0, 9, "candidate") != 0) tell(p, ways[i], i == best);
    fflush(stdout);
}

void every_product() {
    const int plain = CUBLASLT_EPILOGUE_DEFAULT, biased = CUBLASLT_EPILOGUE_BIAS;
    const product all[] = {
        {"qkv", rows, 3 * c, c, false, true, biased, false},
        {"projection", rows, c, c, false, true, biased, false},
        {"fc, GELU_AUX_BIAS", rows, h, c, false, true, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, false},
        {"fc, BIAS", rows, h, c, false, true, biased, false},
        {"MLP projection", rows, c, h, false, true, biased, false},
        {"classifier", rows, vocabulary, c, false, true, plain, false},
        {"dX through DGELU", rows, h, c, false, false, CUBLASLT_EPILOGUE_DGELU, false},
        {"dX through DGELU_BGRAD", rows, h, c, false, false, CUBLASLT_EPILOGUE_DGELU_BGRAD, false},
        {"dX fc", rows, c, h, false, false, plain, false},
        {"dX projection", rows, c, c, false, false, plain, false},
        {"dX qkv", rows, c, 3 * c, false, false, plain, false},
        {"dX classifier", rows, c, vocabulary, false, false, plain, false},
        {"dW fc", h, c, rows, true, false, plain, true},
        {"dW fc, BGRADB", h, c, rows, true, false, CUBLASLT_EPILOGUE_BGRADB, true},
        {"dW qkv", 3 * c, c, rows, true, false, plain, true},
        {"dW qkv, BGRADB", 3 * c, c, rows, true, false, CUBLASLT_EPILOGUE_BGRADB, true},
        {"dW projection", c, c, rows, true, false, plain, true},
        {"dW MLP projection", c, h, rows, true, false, plain, true},
        {"dW classifier", vocabulary, c, rows, true, false, plain, true}};
    int64_t logits = 2 * rows * vocabulary, hidden = 2 * rows * h;
    operands o = {numbers(logits, 0), numbers(hidden, 0), numbers(logits, 0), numbers(hidden, 0)};
    operands constant = {numbers(logits, 1), numbers(hidden, 1), o.c, o.aux};
    for (const product &p : all) probe(p, o, constant);
    for (char *one : {o.a, o.b, o.c, o.aux, constant.a, constant.b}) need(cudaFree(one), "memory");
}

} /* namespace */

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "--tiny")) rows = 64, c = 32, h = 64, vocabulary = 128, rounds = 1;
    coc_set_modelled_clock(0);
    need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    need(cublasLtCreate(&handle), "cuBLASLt");
    need(cudaEventCreateWithFlags(&from, cudaEventDefault), "an event");
    need(cudaEventCreateWithFlags(&to, cudaEventDefault), "an event");
    need(cudaMallocHost((void **)&ticks, 2 * sizeof *ticks), "pinned memory");
    ticks[0] = 0, ticks[1] = 1;
    workspace = numbers(WORKSPACE, 0);
    bias = numbers(1 << 20, 0);
#if !defined(COC_CUDA_RUNTIME_H)
    need(cublasCreate(&gemm_ex_handle), "cuBLAS");
    need(cublasSetStream(gemm_ex_handle, stream), "cuBLAS");
    need(cublasSetWorkspace(gemm_ex_handle, workspace, WORKSPACE), "cuBLAS");
#endif
    printf("{\"event\": \"device\", \"cublas\": \"%zu\"}\n", cublasLtGetVersion());
    every_product();
#if !defined(COC_CUDA_RUNTIME_H)
    need(cublasDestroy(gemm_ex_handle), "cuBLAS");
#endif
    need(cudaFree(workspace), "memory");
    need(cudaFree(bias), "memory");
    need(cudaFreeHost(ticks), "pinned memory");
    need(cublasLtDestroy(handle), "cuBLASLt");
    need(cudaEventDestroy(from), "an event");
    need(cudaEventDestroy(to), "an event");
    return cudaStreamDestroy(stream) != cudaSuccess;
}
