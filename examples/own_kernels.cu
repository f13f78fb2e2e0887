// own_kernels.cu - a host's CUDA kernels and stream; amp.h gives the loss scaler, the check of gradients, and a graph.
//
//     printf '#define AMP_IMPLEMENTATION\n#include "amp.h"\n' > amp.c && gcc -O2 -c amp.c
//     nvcc -O2 -std=c++17 -I. examples/own_kernels.cu amp_cuda.cu amp.o -o own_kernels -lcublasLt && ./own_kernels
//
// Fits a linear function whose gradients the host's kernel keeps in the range of fp16: above 65504 they are infinite.
// The scale begins too high; amp.h finds what overflowed, on the device, the host's update looks at it there and
// changes nothing, and the scale falls.  After the first step everything is one CUDA graph, and nothing waits.
#include "../amp.h"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

constexpr int rows = 512, columns = 64, steps = 40;

static void check(amp_result result) {
    if (result == AMP_OK) return;
    std::fprintf(stderr, "%s\n", amp_last_error());
    std::exit(1);
}
static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
}

// ---- The host's kernels

// e = x w - y, a thread a row
__global__ void errors(float *e, const float *x, const float *w, const float *y) {
    int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= rows) return;
    float sum = -y[i];
    for (int j = 0; j < columns; j++) sum += x[i * columns + j] * w[j];
    e[i] = sum;
}
// The gradient of the mean of e^2 times the scale, which lies on the device; a thread a column
__global__ void gradient(float *g, const float *x, const float *e, const float *scale) {
    int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (j >= columns) return;
    float sum = 0;
    for (int i = 0; i < rows; i++) sum += x[i * columns + j] * (*scale * 2 * e[i] / rows);
    g[j] = sum > 65504.0f || sum < -65504.0f ? sum * INFINITY : sum;
}
// SGD: unscaled by what amp.h found, and nothing after an overflow
__global__ void update(float *w, const float *g, const amp_k_grad_stats *found, float rate) {
    int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (j < columns && !found->skip) w[j] -= rate * found->multiplier * g[j];
}

// kernel<<<n / 64, 64, 0, stream>>>(...) as a function
template <typename... P, typename... A>
static void launch(void (*kernel)(P...), int n, cudaStream_t stream, A... given) {
    auto call = [&](P... arguments) {
        void *pointers[] = {static_cast<void *>(&arguments)...};
        check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(n + 63) / 64), dim3(64), pointers, 0, stream));
    };
    call(given...);
}

static float *on_device(const std::vector<float> &values) {
    void *p = nullptr;
    check(cudaMalloc(&p, values.size() * sizeof(float)));
    check(cudaMemcpy(p, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));
    return static_cast<float *>(p);
}

int main() {
    std::vector<float> x(rows * columns), y(rows), zeros(rows), e(rows);
    for (int i = 0; i < rows * columns; i++) x[size_t(i)] = amp_random_uniform(1, uint64_t(i)) - 0.5f;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) y[size_t(i)] += x[size_t(i * columns + j)] * float(j % 7 - 3);
    cudaStream_t stream;
    check(cudaStreamCreate(&stream));
    float *dx = on_device(x), *dy = on_device(y), *de = on_device(zeros);
    float *dw = on_device(std::vector<float>(columns)), *dg = on_device(std::vector<float>(columns));

    amp_desc desc = {};
    desc.backend = amp_cuda();
    desc.stream = stream;                               // everything of amp.h's is ordered with the host's kernels
    amp_context *amp;
    check(amp_open(&amp, &desc));
    amp_scaler_desc scaling = {};
    scaling.init_scale = 16777216;                      // 2^24: much too high
    amp_scaler *scaler;
    check(amp_scaler_create(amp, &scaler, &scaling));
    amp_range range = {"gradient", dg, columns, AMP_F32};
    amp_grad_set_desc ranges = {};
    ranges.ranges = &range; ranges.n_ranges = 1;
    amp_grad_set *set;
    check(amp_grad_set_create(amp, &set, &ranges));

    auto step = [&] {
        launch(errors, rows, stream, de, dx, dw, dy);
        launch(gradient, columns, stream, dg, dx, de, amp_scaler_scale_ptr(scaler));
        check(amp_scaler_check(scaler, set, AMP_CHECK_READ));
        launch(update, columns, stream, dw, dg, amp_grad_set_device(set), 2.0f);
        check(amp_scaler_update(scaler));
    };
    step();                                             // once as it is, so that all a graph needs is there
    amp_graph *graph;
    check(amp_graph_begin(amp));
    step();
    check(amp_graph_end(amp, &graph));
    for (int i = 1; i <= steps; i++) {
        check(amp_graph_launch(graph));
        if (i != 1 && i % 20 != 0) continue;
        double sum = 0;
        check(cudaMemcpyAsync(e.data(), de, rows * sizeof(float), cudaMemcpyDeviceToHost, stream));
        check(cudaStreamSynchronize(stream));
        for (float one : e) sum += double(one) * double(one) / rows;
        std::printf("step %2d: error %.6f, scale 2^%.0f\n", i, sum, std::log2(double(amp_scaler_scale(scaler))));
    }
    amp_graph_destroy(graph);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
    for (float *p : {dx, dy, de, dw, dg}) check(cudaFree(p));
    check(cudaStreamDestroy(stream));
    return std::fflush(stdout) != 0 || std::ferror(stdout);
}
