/* t_cublas.cpp - tests that the model of cuBLASLt obeys the rules of cublas_rules.h and does what coc.h describes. */
#include "coc.h"
#include "cublas_rules.h"
#include <cublas_v2.h>

namespace {

bool has(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }
bool took_fault(const char *part) {
    std::string text = coc_take_faults();
    if (!has(text, part)) printf("      faults: '%s'\n", text.c_str());
    return has(text, part);
}

/* A handle, and that nothing is left at the end. */
struct library {
    cublasLtHandle_t handle = NULL;
    library() {
        coc_reset();
        coc_set_schedule(COC_LATE);
        CHECK_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
    }
    library(const library &) = delete;
    ~library() {
        coc_fail_blas(NULL, 0, 0);
        cublasLtDestroy(handle);
        coc_check_red_zones();
        std::string faults = coc_take_faults();
        CHECK_MSG(faults.empty(), "%s", faults.c_str());
        coc_alive left = coc_living();
        CHECK_EQ(left.blas_objects + left.allocations + left.streams + left.graphs + left.graph_execs, 0);
    }
};

/* What is the same on every GPU on the model's usual one; fp8 on each kind. */
TEST(rules) {
    for (int capability : {90, 80, 89, 100, 120}) {
        coc_reset();
        coc_set_devices(2, (size_t)1 << 30, 4, capability);
        cublasLtHandle_t handle = NULL;
        CHECK_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
        for (const blas_case &c : blas_cases) {
            if (capability != 90 && c.from == 0 && c.to == BLAS_NEWEST) continue;
            std::string found = blas_run(handle, c);
            CHECK_MSG(found.empty(), "%d: %s (%s): %s", capability, c.rule, c.source, found.c_str());
        }
        CHECK_EQ(cublasLtDestroy(handle), CUBLAS_STATUS_SUCCESS);
        CHECK(coc_take_faults().empty());
    }
    library lib;
    for (const blas_fact &f : blas_facts) {
        std::string found = f.holds(lib.handle);
        CHECK_MSG(found.empty(), "%s (%s): %s", f.rule, f.source, found.c_str());
    }
}

/* The model's fp8 products keep fewer bits with fast accumulation, where the GPU has it. */
TEST(fast_accumulation) {
    for (int capability : {89, 90, 100}) {
        std::vector<unsigned char> d[2];
        coc_reset();
        coc_set_devices(2, (size_t)1 << 30, 4, capability);
        cublasLtHandle_t handle = NULL;
        CHECK_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
        for (int fast = 0; fast < 2; fast++) {
            blas_product x;
            blas_fp8(&x, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F);
            x.k = 2048, x.fast = fast != 0;
            blas_asked a(handle, x);
            CHECK(a.count > 0 && a.multiply(handle, &a.found[0].algo, 0) == CUBLAS_STATUS_SUCCESS);
            d[fast] = a.result();
        }
        CHECK_EQ(cublasLtDestroy(handle), CUBLAS_STATUS_SUCCESS);
        CHECK(coc_take_faults().empty());
        CHECK_MSG((d[0] == d[1]) == (capability >= 100), "%d", capability);
    }
}

/* What `make gpu` needs of a product's numbers comes from sizes that any heuristic serves. */
TEST(facts_of_common_sizes) {
    library lib;
    coc_set_blas_least(16);
    for (auto holds : {blas_gelu_form, blas_tf32_rounding, blas_relu_nan}) {
        std::string found = holds(lib.handle);
        CHECK_MSG(found.empty(), "%s", found.c_str());
    }
}

/* Every algorithm, every type, epilogue and pair of transposes; in D's type the partial sums of ROUNDED have no bound. */
TEST(algorithms) {
    static const cublasLtEpilogue_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                                   CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADB};
    static const cudaDataType types[][2] = {{CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16F, CUDA_R_32F}, {CUDA_R_32F, CUDA_R_32F}};
    library lib;
    for (int id = 0; id < COC_BLAS_ALGORITHMS; id++)
        for (cublasLtEpilogue_t epilogue : epilogues)
            for (auto &t : types)
                for (int trans = 0; trans < 4; trans++) {
                    blas_product x;
                    blas_buffers b;
                    x.epilogue = epilogue, x.candidate = id, x.schemes = 7, x.k = 96;
                    x.trans[0] = (cublasOperation_t)(trans & 1), x.trans[1] = (cublasOperation_t)(trans >> 1);
                    blas_types(&x, t[0], t[1]);
                    CHECK(blas_make(x, &b) && blas_call_product(lib.handle, x, &b) == CUBLAS_STATUS_SUCCESS);
                    std::string found = id == COC_BLAS_ROUNDED && t[1] != CUDA_R_32F ? "" : blas_check(x, b);
                    CHECK_MSG(found.empty(), "algorithm %d, epilogue %d, %d: %s", id, (int)epilogue, trans, found.c_str());
                }
}

/* What the heuristic offers: all, and without what the preference excludes. */
TEST(candidates) {
    library lib;
    struct { uint32_t schemes; size_t workspace, offset; int k; std::vector<int> ids; } cases[] = {
        {7, 1 << 20, 0, 48, {0, 1, 2, 3, 4}}, {2, 1 << 20, 0, 48, {0, 1, 3, 4}}, {1, 1 << 20, 0, 48, {0, 3, 4}},
        {7, 0, 0, 48, {0, 3, 4}}, {7, 1 << 20, 4, 48, {3, 4}}, {7, 1 << 20, 2, 48, {4}}, {7, 1 << 20, 8, 48, {3, 4}},
        {7, 2 * 40 * 24 * 2, 0, 48, {0, 2, 3, 4}},
    };
    for (auto &c : cases) {
        blas_product x;
        x.schemes = c.schemes, x.workspace = c.workspace, x.offset[BLAS_B] = c.offset, x.k = c.k;
        blas_asked a(lib.handle, x);
        std::vector<int> ids;
        for (int i = 0; i < a.count; i++) {
            int32_t id = -1;
            CHECK_EQ(cublasLtMatmulAlgoConfigGetAttribute(&a.found[i].algo, CUBLASLT_ALGO_CONFIG_ID, &id, 4, NULL), CUBLAS_STATUS_SUCCESS);
            CHECK(a.found[i].state == CUBLAS_STATUS_SUCCESS && a.found[i].workspaceSize <= c.workspace);
            ids.push_back(id);
        }
        CHECK(ids == c.ids);
    }
    blas_product odd;                           /* leading dimensions count as pointers do */
    odd.ld_more[BLAS_A] = 1;
    blas_asked a(lib.handle, odd);
    CHECK_EQ(a.count, 1);
    uint32_t align = 0;
    CHECK_EQ(cublasLtMatmulAlgoCapGetAttribute(&a.found[0].algo, CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES, &align, 4, NULL),
             CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(align, 2);
    blas_set(&a.s, a.o.preference, CUBLASLT_MATMUL_PREF_SEARCH_MODE, (uint32_t)CUBLASLT_SEARCH_LIMITED_BY_ALGO_ID);
    CHECK_EQ(cublasLtMatmulAlgoGetHeuristic(lib.handle, a.o.desc, a.o.layout[0], a.o.layout[1], a.o.layout[2], a.o.layout[3],
                                            a.o.preference, 1, a.found, &a.count), CUBLAS_STATUS_NOT_SUPPORTED);
}

/* ---- In a stream's order */

cudaStream_t new_stream() {
    cudaStream_t s = NULL;
    CHECK_EQ(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    return s;
}

TEST(products_wait_in_their_stream) {
    library lib;
    blas_product x;
    blas_asked a(lib.handle, x);
    cudaStream_t s = new_stream();
    std::vector<unsigned char> before = a.result();
    CHECK_EQ(cudaMemsetAsync(a.b.base[BLAS_A], 0, a.b.host[BLAS_A].size(), s), cudaSuccess);
    CHECK_EQ(a.multiply(lib.handle, &a.found[0].algo, s), CUBLAS_STATUS_SUCCESS);
    CHECK(a.result() == before);                /* the stream is not waited for by another */
    cublasLtMatmulDescDestroy(a.o.desc);        /* its arguments were copied */
    a.o.desc = NULL;
    CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
    for (unsigned char byte : a.result()) CHECK_EQ(byte, 0);
    cudaStreamDestroy(s);
}

TEST(graphs_keep_alpha_and_read_device_scalars) {
    library lib;
    for (int on_device = 0; on_device < 2; on_device++) {
        blas_product x;
        x.value = 1, x.k = 16, x.in_place = false;
        blas_types(&x, CUDA_R_32F, CUDA_R_32F);
        x.pointer_mode = on_device ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
        blas_buffers b;
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        cudaStream_t s = new_stream();
        float twice = 2, d = 0;
        CHECK(blas_make(x, &b));
        CHECK_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaSuccess);
        CHECK_EQ(blas_call_product(lib.handle, x, &b, s), CUBLAS_STATUS_SUCCESS);
        CHECK_EQ(cudaStreamEndCapture(s, &graph), cudaSuccess);
        CHECK_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        x.alpha = 2;
        CHECK_EQ(cudaMemcpy(b.scalars, &twice, 4, cudaMemcpyHostToDevice), cudaSuccess);
        coc_reset_counts();
        for (int i = 0; i < 3; i++) CHECK_EQ(cudaGraphLaunch(exec, s), cudaSuccess);
        CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
        CHECK_EQ(coc_kernel_launches("cublasLt"), 3);
        CHECK_EQ(coc_count().blas_matmuls, 0);
        CHECK_EQ(cudaMemcpy(&d, b.base[BLAS_D], 4, cudaMemcpyDeviceToHost), cudaSuccess);
        CHECK_EQ((int)d, on_device ? 32 : 16);
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
        cudaStreamDestroy(s);
    }
}

/* ---- Memory */

/* A product whose matrix `which` ends one element after its memory: found when it is called, and the device is lost. */
TEST(bounds) {
    for (int which = 0; which < BLAS_BUFFERS; which++) {
        library lib;
        blas_product x;
        blas_buffers b;
        x.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS, x.beta = 1, x.in_place = false;
        if (which == BLAS_WORKSPACE) x.candidate = 1;
        CHECK(blas_make(x, &b));
        size_t bytes = which == BLAS_WORKSPACE ? 2 * 40 * 24 * 4 : b.host[which].size();
        CHECK_EQ(cudaFree(b.base[which]), cudaSuccess);
        CHECK_EQ(cudaMalloc((void **)&b.base[which], bytes - 2), cudaSuccess);
        CHECK_EQ(blas_call_product(lib.handle, x, &b), CUBLAS_STATUS_EXECUTION_FAILED);
        CHECK(took_fault("are not in memory of device 0"));
        CHECK_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
        CHECK_EQ(blas_call_product(lib.handle, x, &b), CUBLAS_STATUS_EXECUTION_FAILED);
        CHECK_EQ(cudaDeviceReset(), cudaSuccess);
        for (unsigned char *&p : b.base) p = NULL;
        b.scalars = NULL;
    }
}

TEST(released_memory) {
    library lib;
    blas_product x;
    blas_buffers b;
    cudaStream_t s = new_stream();
    CHECK(blas_make(x, &b));
    CHECK_EQ(blas_call_product(lib.handle, x, &b, s), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(cudaFreeAsync(b.base[BLAS_A], 0), cudaSuccess);    /* of another stream: before the product runs */
    CHECK_EQ(cudaStreamSynchronize(0), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(s), cudaErrorIllegalAddress);
    CHECK(took_fault("when it runs"));
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
    for (unsigned char *&p : b.base) p = NULL;
    b.scalars = NULL;
}

TEST(outputs_over_inputs) {
    library lib;
    blas_product x;
    blas_asked a(lib.handle, x);
    x.n = x.k = x.m;
    blas_asked square(lib.handle, x);
    CHECK_EQ(cudaFree(square.b.base[BLAS_D]), cudaSuccess);
    square.b.base[BLAS_D] = square.b.base[BLAS_A];
    CHECK_EQ(square.multiply(lib.handle, &square.found[0].algo, 0), CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK(took_fault("D overlaps A"));
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
    for (blas_asked *all : {&a, &square}) {
        for (unsigned char *&p : all->b.base) p = NULL;
        all->b.scalars = NULL;
    }
}

/* Its contents are lost where an algorithm uses it, and stay where it does not. */
TEST(workspace_is_overwritten) {
    library lib;
    for (int candidate = 0; candidate < 2; candidate++) {
        blas_product x;
        blas_buffers b;
        unsigned char byte = 1;
        x.candidate = candidate;
        CHECK(blas_make(x, &b) && cudaMemset(b.base[BLAS_WORKSPACE], 7, 256) == cudaSuccess);
        CHECK_EQ(blas_call_product(lib.handle, x, &b), CUBLAS_STATUS_SUCCESS);
        CHECK_EQ(cudaMemcpy(&byte, b.base[BLAS_WORKSPACE], 1, cudaMemcpyDeviceToHost), cudaSuccess);
        CHECK_EQ(byte, candidate ? 0xFF : 7);
    }
}

/* Two streams may use one workspace only one after the other. */
TEST(shared_workspace) {
    for (int ordered = 0; ordered < 3; ordered++) {
        library lib;
        blas_product x;
        cudaStream_t s = new_stream(), t = new_stream(), between = new_stream();
        cudaEvent_t first = NULL, second = NULL;
        CHECK(cudaEventCreate(&first) == cudaSuccess && cudaEventCreate(&second) == cudaSuccess);
        {
            blas_asked a(lib.handle, x), b(lib.handle, x);
            cudaFree(b.b.base[BLAS_WORKSPACE]);
            b.b.base[BLAS_WORKSPACE] = a.b.base[BLAS_WORKSPACE];
            CHECK_EQ(a.multiply(lib.handle, &a.found[1].algo, s), CUBLAS_STATUS_SUCCESS);
            CHECK_EQ(cudaEventRecord(first, s), cudaSuccess);
            CHECK(cudaStreamWaitEvent(between, first) == cudaSuccess && cudaEventRecord(second, between) == cudaSuccess);
            if (ordered == 1) CHECK_EQ(cudaStreamWaitEvent(t, second), cudaSuccess);
            if (ordered == 2) CHECK_EQ(cudaStreamSynchronize(s), cudaSuccess);
            CHECK_EQ(b.multiply(lib.handle, &b.found[1].algo, t), CUBLAS_STATUS_SUCCESS);
            if (ordered == 0) CHECK(took_fault("its scratch memory is in use in another stream"));
            CHECK_EQ(b.multiply(lib.handle, &b.found[0].algo, s), CUBLAS_STATUS_SUCCESS);  /* needs none */
            CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
            b.b.base[BLAS_WORKSPACE] = NULL;
        }
        cudaEventDestroy(first), cudaEventDestroy(second);
        cudaStreamDestroy(s), cudaStreamDestroy(t), cudaStreamDestroy(between);
    }
}

/* ---- Counts, failures, knobs */

TEST(counts) {
    library lib;
    coc_reset_counts();
    {
        blas_asked a(lib.handle, blas_product());
        CHECK_EQ(coc_count().blas_objects, 6);
        CHECK_EQ(coc_living().blas_objects, 7);
        CHECK_EQ(coc_count().blas_heuristics, 1);
        CHECK_EQ(a.multiply(lib.handle, &a.found[0].algo, 0), CUBLAS_STATUS_SUCCESS);
        CHECK_EQ(a.multiply(lib.handle, NULL, 0), CUBLAS_STATUS_SUCCESS);
        CHECK(coc_count().blas_matmuls == 2 && coc_count().blas_heuristics == 2 && coc_count().launches == 0);
        CHECK(coc_calls("cublasLtMatmul") == 2 && coc_kernel_launches("cublasLt wide") == 2);
        CHECK_EQ(coc_count().synchronising, 8);         /* of blas_make: copies */
    }
    CHECK_EQ(coc_living().blas_objects, 1);
    coc_reset_counts();
    cublasLtHandle_t second = NULL;
    CHECK(cublasLtCreate(&second) == CUBLAS_STATUS_SUCCESS && coc_count().synchronising == 0);
    CHECK(cublasLtDestroy(second) == CUBLAS_STATUS_SUCCESS && coc_count().synchronising == 1);
    CHECK(has(coc_synchronising_calls(), "cublasLtDestroy 1"));
}

TEST(failures_on_demand) {
    library lib;
    blas_asked a(lib.handle, blas_product());
    coc_fail_blas("cublasLtMatmul", 2, CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK_EQ(a.multiply(lib.handle, &a.found[0].algo, 0), CUBLAS_STATUS_SUCCESS);
    CHECK(coc_fail_blas_pending());
    CHECK_EQ(a.multiply(lib.handle, &a.found[0].algo, 0), CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK(!coc_fail_blas_pending() && coc_count().blas_matmuls == 1);
    CHECK_EQ(a.multiply(lib.handle, &a.found[0].algo, 0), CUBLAS_STATUS_SUCCESS);
    coc_fail_blas(NULL, 1, CUBLAS_STATUS_ALLOC_FAILED);
    cublasLtMatrixLayout_t layout = NULL;
    CHECK_EQ(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 1, 1, 1), CUBLAS_STATUS_ALLOC_FAILED);
    CHECK(layout == NULL);
    CHECK_EQ(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 1, 1, 1), CUBLAS_STATUS_SUCCESS);
    coc_fail_blas(NULL, 1, CUBLAS_STATUS_INTERNAL_ERROR);
    CHECK(cublasLtMatrixLayoutDestroy(layout) == CUBLAS_STATUS_SUCCESS && coc_fail_blas_pending());
    coc_fail_blas(NULL, 0, 0);
    CHECK(!strcmp(cublasLtGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED"));
    CHECK(!strcmp(cublasLtGetStatusString(CUBLAS_STATUS_ALLOC_FAILED), "the resource allocation failed"));
}

TEST(a_wrong_algorithm) {
    library lib;
    coc_set_blas_wrong(COC_BLAS_SPLIT);
    CHECK(has(blas_ones(lib.handle), "result 1 for k = 48 gives 32"));
    coc_set_blas_wrong(COC_BLAS_ALGORITHMS);
    CHECK(blas_ones(lib.handle).empty());
}

float microseconds(cublasLtHandle_t handle, const blas_asked &a, int candidate) {
    cudaEvent_t from = NULL, to = NULL;
    float ms = 0;
    CHECK(cudaEventCreate(&from) == cudaSuccess && cudaEventCreate(&to) == cudaSuccess);
    CHECK_EQ(cudaEventRecord(from, 0), cudaSuccess);
    CHECK_EQ(a.multiply(handle, &a.found[candidate].algo, 0), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(cudaEventRecord(to, 0), cudaSuccess);
    CHECK_EQ(cudaEventSynchronize(to), cudaSuccess);
    CHECK_EQ(cudaEventElapsedTime(&ms, from, to), cudaSuccess);
    cudaEventDestroy(from), cudaEventDestroy(to);
    return roundf(ms * 1e3f * 64) / 64;
}

TEST(modelled_times) {
    static const float expected[] = {10, 12, 13, 15, 30};
    library lib;
    blas_product x;
    x.schemes = 7;
    blas_asked plain(lib.handle, x);
    x.epilogue = CUBLASLT_EPILOGUE_GELU;
    blas_asked fused(lib.handle, x);
    coc_set_modelled_clock(1);
    for (int i = 0; i < COC_BLAS_ALGORITHMS; i++) CHECK(microseconds(lib.handle, plain, i) == expected[i]);
    coc_set_blas_time(COC_BLAS_NARROW, 4);
    coc_set_blas_epilogue_time(2.5);
    CHECK(microseconds(lib.handle, plain, 3) == 4 && microseconds(lib.handle, fused, 3) == 6.5f);
    coc_reset();
    CHECK_EQ(cublasLtCreate(&lib.handle), CUBLAS_STATUS_SUCCESS);
    for (blas_asked *a : {&plain, &fused}) {
        for (unsigned char *&p : a->b.base) p = NULL;
        a->b.scalars = NULL;
        a->o.desc = NULL, a->o.preference = NULL;
        for (cublasLtMatrixLayout_t &l : a->o.layout) l = NULL;
    }
}

TEST(versions) {
    library lib;
    blas_asked a(lib.handle, blas_product());
    cublasLtMatmulHeuristicResult_t r;
    CHECK(cublasLtGetVersion() == 130100 && a.check(lib.handle, &a.found[0].algo, &r) == CUBLAS_STATUS_SUCCESS);
    coc_set_blas_version(130200);
    CHECK(cublasLtGetVersion() == 130200 && a.check(lib.handle, &a.found[0].algo, &r) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK_EQ(a.multiply(lib.handle, &a.found[0].algo, 0), CUBLAS_STATUS_INVALID_VALUE);
    blas_asked again(lib.handle, blas_product());
    CHECK_EQ(again.multiply(lib.handle, &again.found[0].algo, 0), CUBLAS_STATUS_SUCCESS);
}

TEST(handles) {
    library lib;
    cublasHandle_t blas = NULL;
    CHECK_EQ(cublasCreate(&blas), CUBLAS_STATUS_SUCCESS);
    {
        blas_asked a((cublasLtHandle_t)blas, blas_product());
        CHECK_EQ(a.multiply((cublasLtHandle_t)blas, &a.found[0].algo, 0), CUBLAS_STATUS_SUCCESS);
        cudaSetDevice(1);
        CHECK_EQ(a.multiply((cublasLtHandle_t)blas, &a.found[0].algo, 0), CUBLAS_STATUS_INVALID_VALUE);
        CHECK(took_fault("a handle of device 0 while device 1 is current"));
        cudaSetDevice(0);
    }
    CHECK_EQ(cublasDestroy(blas), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ(cublasLtDestroy((cublasLtHandle_t)blas), CUBLAS_STATUS_INVALID_VALUE);
    coc_fail("cudaMalloc", 1, cudaErrorECCUncorrectable, 1);
    void *p = NULL;
    CHECK(cudaMalloc(&p, 4) == cudaErrorECCUncorrectable && cublasCreate(&blas) == CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK_EQ(cudaDeviceReset(), cudaSuccess);
}

TEST(descriptors_that_are_gone) {
    library lib;
    cublasLtMatrixLayoutOpaque_t never = {};
    int32_t order = 0;
    CHECK_EQ(cublasLtMatrixLayoutSetAttribute(&never, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, 4), CUBLAS_STATUS_INVALID_VALUE);
    CHECK_EQ(cublasLtMatrixLayoutDestroy(&never), CUBLAS_STATUS_INVALID_VALUE);
    CHECK(took_fault("not a descriptor that is alive"));
}

} // namespace

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(rules);
    RUN(facts_of_common_sizes);
    RUN(algorithms);
    RUN(candidates);
    RUN(products_wait_in_their_stream);
    RUN(graphs_keep_alpha_and_read_device_scalars);
    RUN(bounds);
    RUN(released_memory);
    RUN(outputs_over_inputs);
    RUN(workspace_is_overwritten);
    RUN(shared_workspace);
    RUN(counts);
    RUN(failures_on_demand);
    RUN(a_wrong_algorithm);
    RUN(modelled_times);
    RUN(versions);
    RUN(handles);
    RUN(descriptors_that_are_gone);
    RUN(fast_accumulation);
    return TEST_END();
}
