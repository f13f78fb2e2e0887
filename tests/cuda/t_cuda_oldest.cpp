/* t_cuda_oldest.cpp - tests the CUDA backend on the oldest GPU that its toolkit compiles for.
 *
 * Before CUDA 13 that is compute capability 7.0 (V100), and then 7.5.  `make test-ci` runs the tests on a model of CUDA 11.8
 * too, which lacks the functions that came later and declares others differently. */
#include "test_cuda.h"

enum { OLDEST = CUDART_VERSION >= 13000 ? 75 : 70, NEWER = 80 };

/* While it lives, the model has GPUs of this compute capability, and code for `image`. */
struct gpu_of {
    explicit gpu_of(int capability, int image = 0) { coc_set_devices(1, (size_t)1 << 28, 4, capability, image); }
    ~gpu_of() {
        cuda_test_end();
        coc_set_devices(2);
    }
};

/* ---- Precisions */

static std::string capability_text() { return OLDEST == 70 ? "compute capability 7.0" : "compute capability 7.5"; }

CUDA_TEST(chooses_fp16) {
    gpu_of oldest(OLDEST);
    amp_choice choice;
    amp_context *amp = cuda_context();
    CHECK_OK(amp_query_choice(amp, &choice));
    CHECK(choice.dtype == AMP_F16 && choice.scaler == 1 && choice.fell_back == 0);
    CHECK_MSG(strstr(choice.reason, (capability_text() + " has fp16 tensor cores but no bf16").c_str()), "%s", choice.reason);
    amp_close(amp);
    for (amp_dtype dtype : {AMP_BF16, AMP_TF32, AMP_FP8}) {
        amp_desc d = {};
        d.backend = amp_cuda();
        d.dtype = dtype;
        std::string name = std::string("dtype ") + amp_dtype_name(dtype);
        CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(amp_last_error(), name.c_str()) && strstr(amp_last_error(), capability_text().c_str()), "%s", amp_last_error());
        d.allow_fallback = 1;
        amp = cuda_context(&d);
        CHECK_OK(amp_query_choice(amp, &choice));
        CHECK(choice.dtype == AMP_F16 && choice.scaler == 1 && choice.fell_back == 1);
        amp_close(amp);
    }
}

/* ---- Kernels */

/* Small integers, whose sums are exact in fp16. */
static std::string integers(int64_t n, uint64_t seed) {
    std::vector<float> x = cuda_random(n, seed, -2.5f, 2.5f);
    for (float &v : x) v = roundf(v);
    return cuda_stored(x, AMP_F16);
}

/* By cuBLASLt, whose kernels for fp16 use the tensor cores of 7.0. */
CUDA_TEST(products_in_fp16) {
    gpu_of oldest(OLDEST);
    const int64_t m = 24, n = 16, k = 40;
    cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) {
        std::string a = integers(m * k, 1), b = integers(k * n, 2);
        amp_k_gemm g = {};
        g.m = m, g.n = n, g.k = k, g.batch = 1, g.alpha = 1;
        g.a = s.put(a.data(), a.size()), g.b = s.put(b.data(), b.size()), g.c = s.room((size_t)(2 * m * n));
        g.lda = k, g.ldb = g.ldc = n;
        g.a_dtype = g.b_dtype = g.c_dtype = g.compute = AMP_F16;
        coc_reset_counts();
        CHECK_OK(s.backend->gemm(s.dev, &g, NULL));
        s.get(out, g.c, (size_t)(2 * m * n));
        CHECK_EQ(coc_count().blas_matmuls, s.gpu ? 1 : 0);
    });
    c.check_same_bits();
}

/* On the fp32 units.  The results' errors are bounded by the roundings of fp16, which both backends have. */
CUDA_TEST(attention_without_tensor_cores) {
    gpu_of oldest(OLDEST);
    const int64_t heads = 2, rows = 37, dim = 16, n = heads * rows * dim;
    cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_attention a = {};
        void *in[4], *results[4];
        for (int i = 0; i < 4; i++) {
            std::string x = cuda_stored(cuda_random(n, (uint64_t)i), AMP_F16);
            in[i] = s.put(x.data(), x.size());
            results[i] = s.room((size_t)(2 * n));
        }
        a.batch = 1, a.heads = heads, a.queries = a.keys = rows, a.dim = dim;
        a.dtype = a.compute = AMP_F16, a.scale = 0.25f;
        a.q = in[0], a.k = in[1], a.v = in[2], a.d_o = in[3];
        a.o = results[0], a.dq = results[1], a.dk = results[2], a.dv = results[3];
        for (int64_t *stride : {a.q_stride, a.k_stride, a.v_stride, a.o_stride, a.do_stride, a.dq_stride, a.dk_stride, a.dv_stride})
            stride[0] = n, stride[1] = dim, stride[2] = rows * dim;
        a.lse = (float *)s.room((size_t)(heads * rows) * 4);
        a.mask.kind = AMP_MASK_CAUSAL;
        coc_reset_counts();
        CHECK_OK(s.backend->attention(s.dev, &a, NULL));
        CHECK_OK(s.backend->attention_backward(s.dev, &a, NULL));
        for (void *result : results) s.get(out, result, (size_t)(2 * n));
        CHECK_EQ(coc_count().mmas, 0);
        CHECK((coc_kernel_launches("ampc_attention") > 0) == s.gpu && coc_kernel_launches("ampc_flash") == 0);
    });
    size_t at = 0;
    for (const char *name : {"o", "dq", "dk", "dv"})
        at = c.check_within(at, AMP_F16, n, [](int64_t, double x) { return ldexp(1, -9) * (1 + fabs(x)); }, name);
}

/* ---- Graphs, of the backend and of the program, whose capture uses scratch memory */

static cudaError_t instantiate(cudaGraphExec_t *exec, cudaGraph_t graph) {
#if CUDART_VERSION >= 12000
    return cudaGraphInstantiate(exec, graph, 0);
#else
    return cudaGraphInstantiate(exec, graph, NULL, NULL, 0);
#endif
}

CUDA_TEST(graphs) {
    gpu_of oldest(OLDEST);
    const int64_t rows = 300, cols = 40;
    for (int own = 0; own < 2; own++) {
        cuda_side s(amp_cuda());
        amp_k_column_sum k = {};
        void *stream = NULL, *graph = NULL;
        cudaGraph_t captured = NULL;
        cudaGraphExec_t exec = NULL;
        std::string out;
        k.x = amp_mat{s.put(std::vector<float>((size_t)(rows * cols), 2)), AMP_F32, 0, rows, cols, cols};
        k.out = (float *)s.room((size_t)cols * 4), k.out_dtype = AMP_F32;
        CHECK_OK(s.backend->stream_create(s.dev, &stream));
        if (own) CHECK_EQ(cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        else CHECK_OK(s.backend->graph_begin(s.dev, stream));
        CHECK_OK(s.backend->column_sum(s.dev, &k, stream));
        if (own) {
            CHECK_EQ(cudaStreamEndCapture((cudaStream_t)stream, &captured), cudaSuccess);
            CHECK(instantiate(&exec, captured) == cudaSuccess && cudaGraphDestroy(captured) == cudaSuccess);
            CHECK_EQ(cudaGraphLaunch(exec, (cudaStream_t)stream), cudaSuccess);
        } else {
            CHECK_OK(s.backend->graph_end(s.dev, stream, &graph));
            CHECK_OK(s.backend->graph_launch(s.dev, graph, stream));
        }
        CHECK_OK(s.backend->stream_sync(s.dev, stream));
        s.get(&out, k.out, (size_t)cols * 4);
        CHECK(((const float *)out.data())[0] == 600 && ((const float *)out.data())[cols - 1] == 600);
        if (own) CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
        else s.backend->graph_destroy(s.dev, graph);
        s.backend->stream_destroy(s.dev, stream);
    }
}

/* ---- What cannot run */

static std::string said, logged;
static amp_result note_fail(void *, amp_result result, const char *text) {
    said = text;
    return result;
}
static void note_log(void *, amp_log_level level, int, const char *text) {
    if (level <= AMP_LOG_WARNING) logged += text;
}

/* Opens the backend on such a GPU.  What it says is in `said` and `logged`. */
static amp_result open_on(int capability, int image, int wgmma = 0) {
    const amp_host host = {NULL, note_fail, note_log, cuda_host_alloc, cuda_host_free, NULL};
    gpu_of kind(capability, image);
    amp_backend_desc d = {};
    void *dev = NULL;
    d.wgmma = wgmma;
    said.clear(), logged.clear();
    amp_result result = amp_cuda()->open(&dev, &host, &d);
    CHECK_EQ(dev != NULL, result == AMP_OK);
    if (dev != NULL) amp_cuda()->close(dev);
    return result;
}

CUDA_TEST(other_gpus_are_named) {
    const std::string arch = OLDEST == 70 ? "-arch=sm_70" : "-arch=sm_75";
    CHECK_EQ(open_on(OLDEST, OLDEST), AMP_OK);
    CHECK_MSG(said.empty() && logged.empty(), "%s%s", said.c_str(), logged.c_str());
    /* code for a newer GPU, code for an older one, and a GPU that is too old */
    CHECK_EQ(open_on(OLDEST, NEWER), AMP_ERR_DEVICE);
    CHECK_MSG(said.find("cudaErrorNoKernelImageForDevice") != std::string::npos && said.find(arch) != std::string::npos, "%s", said.c_str());
    CHECK_EQ(open_on(NEWER, OLDEST), AMP_OK);
    CHECK_MSG(logged.find("attention runs without tensor cores") != std::string::npos && logged.find("-arch=sm_80") != std::string::npos,
              "%s", logged.c_str());
    CHECK_EQ(open_on(OLDEST == 70 ? 61 : 70, 0), AMP_ERR_UNSUPPORTED);
    const char *least = OLDEST == 70 ? "compute capability 6.1; 7.0 (Volta) or later is needed"
                                     : "compute capability 7.0; 7.5 (Turing) or later is needed, as CUDA 13";
    CHECK_MSG(said.find(least) != std::string::npos, "%s", said.c_str());
}

/* CUDA 11 has no sm_90a, and no function of the driver that makes tensor maps. */
CUDA_TEST(wgmma_needs_cuda_12) {
    CHECK_EQ(open_on(90, 90 + COC_LETTER_A, 1), AMP_OK);
    CHECK_MSG(logged.empty() == (CUDART_VERSION >= 12000), "%s", logged.c_str());
    CHECK_MSG(logged.empty() || logged.find("attention on model uses mma.sync: compile amp_cuda.cu with CUDA 12 or later") != std::string::npos,
              "%s", logged.c_str());
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(chooses_fp16);
    RUN(products_in_fp16);
    RUN(attention_without_tensor_cores);
    RUN(graphs);
    RUN(other_gpus_are_named);
    RUN(wgmma_needs_cuda_12);
    return TEST_END();
}
