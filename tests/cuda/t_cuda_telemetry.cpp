/* t_cuda_telemetry.cpp - tests the sensors of the GPU through the backend's table, with a model of the driver's library.
 * It also tests a profiler's ranges, and the entries of the cast cache in the log of decisions. */
#include "test_cuda.h"
#include <dlfcn.h>
#include <unistd.h>

/* As coc_nvml.c has it. */
struct coc_nvml {
    int fail_init, fail_utilization, fail_temperature, fail_temperature_before, fail_power, open, misused;
};

/* The model library lies beside this program.  Once it is loaded, its name finds it wherever it lies. */
struct nvml_loaded {
    void *library = NULL;
    coc_nvml *state = NULL;
    nvml_loaded() {
        char path[4096];
        ssize_t n = readlink("/proc/self/exe", path, sizeof path - 16);
        if (n <= 0) return;
        path[n] = 0;
        strcpy(strrchr(path, '/') + 1, "coc_nvml.so");
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        CHECK_MSG(library != NULL, "%s", dlerror());
        state = library ? (coc_nvml *)dlsym(library, "coc_nvml") : NULL;
        CHECK(state != NULL);
    }
    ~nvml_loaded() { if (library) dlclose(library); }
};

static amp_telemetry telemetry_of(int device) {
    const amp_backend *b = amp_cuda();
    const amp_telemetry unset = {7, 7, 7, 7};
    amp_telemetry t = unset;
    amp_backend_desc d = {};
    void *dev = NULL;
    d.device = device;
    CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
    if (dev == NULL) return t;
    CHECK_EQ(b->telemetry(dev, &t), AMP_OK);
    b->close(dev);
    return t;
}

static void check_telemetry(const amp_telemetry &t, float utilization, float memory, float temperature, float power) {
    CHECK_MSG(t.utilization == utilization && t.memory_utilization == memory && t.temperature == temperature && t.power == power,
              "%g %g %g %g", t.utilization, t.memory_utilization, t.temperature, t.power);
}

static bool has_driver() {
    void *real = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (real != NULL) dlclose(real);
    return real != NULL;
}

TEST(without_the_drivers_library) {
    if (has_driver()) SKIP("the driver's library is here");
    check_telemetry(telemetry_of(0), -1, -1, -1, -1);
}

/* On a GPU: what its sensors say is what such a machine can have. */
TEST(a_real_gpu) {
    if (CUDA_IS_MODEL || !has_driver()) SKIP("no GPU here");
    amp_telemetry t = telemetry_of(0);
    CHECK_MSG(t.utilization == -1 || (t.utilization >= 0 && t.utilization <= 1), "%g", t.utilization);
    CHECK_MSG(t.memory_utilization == -1 || (t.memory_utilization >= 0 && t.memory_utilization <= 1), "%g", t.memory_utilization);
    CHECK_MSG(t.temperature > 0 && t.temperature < 120, "%g degrees C", t.temperature);
    CHECK_MSG(t.power > 0 && t.power < 3000, "%g W", t.power);
}

static void note_line(void *lines, amp_log_level, int id, const char *text) {
    if (id == AMP_LOG_DECISION) *(std::string *)lines += std::string(text) + "\n";
}

/* On a GPU a weight is cast at its first use, and found at the next. */
CUDA_TEST(decisions) {
    std::string lines;
    amp_desc desc = {};
    desc.dtype = AMP_BF16;
    desc.logger.write = note_line;
    desc.logger.user = &lines;
    desc.logger.level = AMP_LOG_DEBUG;
    amp_context *amp = cuda_context(&desc);
    void *memory = NULL;
    CHECK_OK(amp_alloc(amp, &memory, 3 * 64 * 4));
    CHECK_OK(amp_fill(amp, memory, 0, 3 * 64 * 4));
    float *at = (float *)memory;
    amp_param weight = {};
    weight.name = "fc.weight";
    weight.weight = amp_tensor2(at, AMP_F32, 8, 8);
    CHECK_OK(amp_param_register(amp, &weight, 1));
    amp_linear_op op = {};
    op.weight = &weight;
    op.x = amp_tensor2(at + 64, AMP_F32, 8, 8);
    op.y = amp_tensor2(at + 128, AMP_F32, 8, 8);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    for (int i = 0; i < 3; i++) CHECK_OK(amp_linear(amp, &op));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_sync(amp));
    CHECK_MSG(lines == "linear fc.weight (fp32, fp32): computes in bf16, returns bf16, by region; cast cache: miss\n"
                       "linear fc.weight (fp32, fp32): computes in bf16, returns bf16, by region; cast cache: hit\n", "%s", lines.c_str());
    amp_param_forget(amp, &weight, 1);
    amp_free(amp, memory);
    amp_close(amp);
}

#if defined(COC_H)
TEST(values) {
    nvml_loaded nvml;
    if (nvml.state == NULL) return;
    coc_reset();
    check_telemetry(telemetry_of(1), 0.87f, 0.31f, 64, 512.25f);
    CHECK_EQ(nvml.state->open, 0);          /* what was opened is closed with the context */
    /* NVML has only the second GPU; the first one's address is not there, whatever number NVML gives it. */
    check_telemetry(telemetry_of(0), -1, -1, -1, -1);
    CHECK_EQ(nvml.state->open, 0);
    CHECK_EQ(nvml.state->misused, 0);
}

TEST(each_may_fail) {
    nvml_loaded nvml;
    if (nvml.state == NULL) return;
    coc_reset();
    nvml.state->fail_utilization = 1;
    check_telemetry(telemetry_of(1), -1, -1, 64, 512.25f);
    nvml.state->fail_utilization = 0;
    nvml.state->fail_temperature = 1;
    check_telemetry(telemetry_of(1), 0.87f, 0.31f, 65, 512.25f);
    nvml.state->fail_temperature_before = 1;
    check_telemetry(telemetry_of(1), 0.87f, 0.31f, -1, 512.25f);
    nvml.state->fail_temperature = nvml.state->fail_temperature_before = 0;
    nvml.state->fail_power = 1;
    check_telemetry(telemetry_of(1), 0.87f, 0.31f, 64, -1);
    nvml.state->fail_power = 0;
    nvml.state->fail_init = 1;
    check_telemetry(telemetry_of(1), -1, -1, -1, -1);
    nvml.state->fail_init = 0;
    coc_fail("cudaDeviceGetPCIBusId", 1, cudaErrorInvalidDevice);
    check_telemetry(telemetry_of(1), -1, -1, -1, -1);
    CHECK_EQ(coc_fail_pending(), 0);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK_EQ(nvml.state->open, 0);
    CHECK_EQ(nvml.state->misused, 0);
}

/* The library is asked for once, and a question costs no call of CUDA that waits. */
TEST(asked_again_and_again) {
    nvml_loaded nvml;
    if (nvml.state == NULL) return;
    coc_reset();
    amp_desc desc = {};
    desc.device = 1;
    amp_context *amp = cuda_context(&desc);
    const amp_backend *b = amp_cuda();
    void *dev = NULL;
    amp_backend_desc d = {};
    d.device = 1;
    CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
    coc_reset_counts();
    for (int i = 0; i < 5; i++) {
        amp_telemetry t;
        CHECK_EQ(b->telemetry(dev, &t), AMP_OK);
        check_telemetry(t, 0.87f, 0.31f, 64, 512.25f);
    }
    CHECK_EQ(nvml.state->open, 1);
    CHECK_EQ(coc_count().synchronising, 0);
    CHECK_EQ(coc_calls("cudaDeviceGetPCIBusId"), 1);
    b->close(dev);
    amp_close(amp);
    CHECK_EQ(nvml.state->open, 0);
}

TEST(ranges) {
    const amp_backend *b = amp_cuda();
    void *dev = NULL;
    amp_backend_desc d = {};
    coc_reset();
#if defined(AMP_NVTX)
    CHECK_EQ(b->open(&dev, cuda_host(), &d), AMP_OK);
    b->profile_push(dev, "step");
    b->profile_push(dev, "forward");
    b->profile_pop(dev);
    b->profile_pop(dev);
    b->profile_pop(dev);                      /* one too many does no harm */
    b->close(dev);
    CHECK_MSG(coc_ranges() == "step{forward{}}", "%s", coc_ranges().c_str());
#else
    (void)dev; (void)d;
    CHECK(b->profile_push == NULL && b->profile_pop == NULL);
#endif
    coc_reset();
}
#endif

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(without_the_drivers_library);
    RUN(a_real_gpu);
    RUN(decisions);
#if defined(COC_H)
    RUN(values);
    RUN(each_may_fail);
    RUN(asked_again_and_again);
    RUN(ranges);
#endif
    return TEST_END();
}
