/* conv - a convolutional network of layers, each with its weights, outputs, deltas and updates.  A layer's updates are its
 * gradient and its momentum in one: backward adds to what is left of the step before.
 *
 *     gcc -Ofast conv.c -o conv -lopenblas -lm -lpthread && ./conv [seed [steps]]
 *
 * It learns which of four strokes crosses a noisy picture. */
#define AMP_IMPLEMENTATION
#include "amp.h"
#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { CONVOLUTIONAL, CONNECTED, SOFTMAX } LAYER_TYPE;

typedef struct layer {
    LAYER_TYPE type;
    int h, w, c;                /* of the input */
    int out_h, out_w, n;        /* of the output; n: channels */
    int size, stride;
    int inputs, outputs, nweights, nbiases;
    float *weights, *weight_updates;
    float *biases, *bias_updates;
    float *output, *delta;
} layer;

typedef struct network {
    int n, batch;
    layer layers[8];
    float *input, *truth, *workspace;
    float learning_rate, momentum, decay, loss;
} network;

static void error(const char *s)
{
    fprintf(stderr, "conv: %s\n", s);
    exit(1);
}

static amp_context *amp; static amp_scaler *scaler; static amp_grad_set *updates;
static void check(amp_result r) { if (r != AMP_OK) error(amp_last_error()); }

static float *make_floats(int n)
{
    float *x = calloc((size_t)n, sizeof *x);
    if (!x) error("out of memory");
    return x;
}

static unsigned int seed = 1;
static float rand_uniform(float low, float high)
{
    seed = seed * 1664525u + 1013904223u;
    return low + (high - low) * (float)(seed >> 8) / 16777216.0f;
}

/* ---- Linear algebra */

static void gemm(int TA, int TB, int M, int N, int K, float *A, int lda, float *B, int ldb, float BETA, float *C, int ldc)
{
    if (amp && amp_gemm(amp, AMP_ROW_MAJOR, TA ? AMP_TRANS : AMP_NO_TRANS, TB ? AMP_TRANS : AMP_NO_TRANS,
                        M, N, K, 1, A, lda, B, ldb, BETA, C, ldc) == AMP_OK) return;
    cblas_sgemm(CblasRowMajor, TA ? CblasTrans : CblasNoTrans, TB ? CblasTrans : CblasNoTrans,
                M, N, K, 1, A, lda, B, ldb, BETA, C, ldc);
}

static void axpy_cpu(int n, float a, float *x, float *y)
{
    int i;
    for (i = 0; i < n; ++i) y[i] += a * x[i];
}

static void scal_cpu(int n, float a, float *x)
{
    int i;
    for (i = 0; i < n; ++i) x[i] *= a;
}

static void im2col_cpu(layer l, float *im, float *col)
{
    int c, i, j, y, x;
    for (c = 0; c < l.c; ++c)
        for (i = 0; i < l.size; ++i)
            for (j = 0; j < l.size; ++j)
                for (y = 0; y < l.out_h; ++y)
                    for (x = 0; x < l.out_w; ++x)
                        *col++ = im[(c * l.h + y * l.stride + i) * l.w + x * l.stride + j];
}

static void col2im_cpu(layer l, float *col, float *im)
{
    int c, i, j, y, x;
    for (c = 0; c < l.c; ++c)
        for (i = 0; i < l.size; ++i)
            for (j = 0; j < l.size; ++j)
                for (y = 0; y < l.out_h; ++y)
                    for (x = 0; x < l.out_w; ++x)
                        im[(c * l.h + y * l.stride + i) * l.w + x * l.stride + j] += *col++;
}

/* ---- Layers */

static layer make_layer(LAYER_TYPE type, int batch, int h, int w, int c, int n, int size, int stride)
{
    layer l = {0};
    int i;

    l.type = type;
    l.h = h; l.w = w; l.c = c; l.n = n; l.size = size; l.stride = stride;
    l.out_h = l.out_w = 1;
    if (type == CONVOLUTIONAL) {
        l.out_h = (h - size) / stride + 1;
        l.out_w = (w - size) / stride + 1;
    }
    l.inputs = h * w * c;
    l.outputs = l.out_h * l.out_w * n;
    l.output = make_floats(batch * l.outputs);
    l.delta = make_floats(batch * l.outputs);
    if (type == SOFTMAX) return l;
    l.nweights = n * (type == CONVOLUTIONAL ? c * size * size : l.inputs);
    l.nbiases = n;
    l.weights = make_floats(l.nweights);
    l.weight_updates = make_floats(l.nweights);
    l.biases = make_floats(n);
    l.bias_updates = make_floats(n);
    for (i = 0; i < l.nweights; ++i) l.weights[i] = sqrtf(6.0f * (float)n / (float)l.nweights) * rand_uniform(-1, 1);
    return l;
}

static void forward_layer(layer l, network *net, float *input)
{
    int b, i, k = l.nweights / (l.n ? l.n : 1), m = l.out_h * l.out_w;

    if (l.type == CONNECTED) gemm(0, 1, net->batch, l.n, k, input, k, l.weights, k, 0, l.output, l.n);
    else for (b = 0; b < net->batch; ++b) {
        im2col_cpu(l, input + b * l.inputs, net->workspace);
        gemm(0, 0, l.n, m, k, l.weights, k, net->workspace, m, 0, l.output + b * l.outputs, m);
    }
    for (i = 0; i < net->batch * l.outputs; ++i) {
        l.output[i] += l.biases[i / m % l.n];
        if (l.type == CONVOLUTIONAL && l.output[i] < 0) l.output[i] *= 0.1f;
    }
}

/* Deltas are those of the outputs, and point downhill. */
static void backward_layer(layer l, network *net, float *input, float *delta)
{
    int b, i, k = l.nweights / l.n, m = l.out_h * l.out_w;

    if (amp_scaler_found(scaler, l.delta, AMP_F32, net->batch * l.outputs)) return;
    for (i = 0; i < net->batch * l.outputs; ++i) {
        if (l.type == CONVOLUTIONAL && l.output[i] < 0) l.delta[i] *= 0.1f;
        l.bias_updates[i / m % l.n] += l.delta[i];
    }
    if (l.type == CONNECTED) {
        gemm(1, 0, l.n, k, net->batch, l.delta, l.n, input, k, 1, l.weight_updates, k);
        gemm(0, 0, net->batch, k, l.n, l.delta, l.n, l.weights, k, 0, delta, k);
        return;
    }
    for (b = 0; b < net->batch; ++b) {
        im2col_cpu(l, input + b * l.inputs, net->workspace);
        gemm(0, 1, l.n, k, m, l.delta + b * l.outputs, m, net->workspace, m, 1, l.weight_updates, k);
        if (!delta) continue;
        gemm(1, 0, k, m, l.n, l.weights, k, l.delta + b * l.outputs, m, 0, net->workspace, m);
        if (amp_scaler_found(scaler, net->workspace, AMP_F32, k * m)) return;
        memset(delta + b * l.inputs, 0, (size_t)l.inputs * sizeof *delta);
        col2im_cpu(l, net->workspace, delta + b * l.inputs);
    }
}

static void update_layer(layer l, float learning_rate, float momentum, float decay)
{
    axpy_cpu(l.nbiases, learning_rate, l.bias_updates, l.biases);
    scal_cpu(l.nbiases, momentum, l.bias_updates);

    axpy_cpu(l.nweights, -decay, l.weights, l.weight_updates);
    axpy_cpu(l.nweights, learning_rate, l.weight_updates, l.weights);
    scal_cpu(l.nweights, momentum, l.weight_updates);
}

static float forward_softmax(layer l, network *net, float *input)
{
    float loss = 0, sum, max;
    int b, i;

    for (b = 0; b < net->batch; ++b, input += l.n) {
        float *output = l.output + b * l.n, *delta = l.delta + b * l.n, *truth = net->truth + b * l.n;
        for (i = 1, max = input[0]; i < l.n; ++i) if (input[i] > max) max = input[i];
        for (i = 0, sum = 0; i < l.n; ++i) sum += output[i] = expf(input[i] - max);
        for (i = 0; i < l.n; ++i) {
            output[i] /= sum;
            delta[i] = (truth[i] - output[i]) / (float)net->batch;
            if (truth[i] > 0) loss -= logf(output[i]) / (float)net->batch;
        }
    }
    return loss;
}

/* ---- The network */

static network make_network(int batch)
{
    network net = {0};
    int i, largest = 0;
    amp_range ranges[16];
    amp_grad_set_desc desc = {.ranges = ranges};

    check(amp_open_env(&amp, &scaler));
    net.n = 4;
    net.batch = batch;
    net.learning_rate = 0.01f;
    net.momentum = 0.9f;
    net.decay = 0.0005f;
    net.layers[0] = make_layer(CONVOLUTIONAL, batch, 12, 12, 1, 8, 3, 1);
    net.layers[1] = make_layer(CONVOLUTIONAL, batch, 10, 10, 8, 16, 3, 2);
    net.layers[2] = make_layer(CONNECTED, batch, 4, 4, 16, 4, 1, 1);
    net.layers[3] = make_layer(SOFTMAX, batch, 1, 1, 4, 4, 1, 1);
    for (i = 0; i < net.n; ++i) {
        layer l = net.layers[i];
        int columns = l.out_h * l.out_w * l.c * l.size * l.size;
        if (columns > largest) largest = columns;
        ranges[desc.n_ranges++] = (amp_range){"weights", l.weight_updates, l.nweights, AMP_F32};
        ranges[desc.n_ranges++] = (amp_range){"biases", l.bias_updates, l.nbiases, AMP_F32};
    }
    if (amp) check(amp_grad_set_create(amp, &updates, &desc));
    net.input = make_floats(batch * net.layers[0].inputs);
    net.truth = make_floats(batch * net.layers[3].n);
    net.workspace = make_floats(largest);
    return net;
}

static void forward_network(network *net)
{
    float *input = net->input;
    int i;

    for (i = 0; i < net->n; ++i) {
        if (net->layers[i].type == SOFTMAX) net->loss = forward_softmax(net->layers[i], net, input);
        else forward_layer(net->layers[i], net, input);
        input = net->layers[i].output;
    }
}

static void backward_network(network *net)
{
    int i;

    scal_cpu(net->batch * net->layers[net->n - 1].outputs, amp_scaler_scale(scaler), net->layers[net->n - 1].delta);
    memcpy(net->layers[net->n - 2].delta, net->layers[net->n - 1].delta,
           (size_t)(net->batch * net->layers[net->n - 1].outputs) * sizeof(float));
    for (i = net->n - 2; i > 0; --i)
        backward_layer(net->layers[i], net, net->layers[i - 1].output, net->layers[i - 1].delta);
    backward_layer(net->layers[0], net, net->input, NULL);
}

static void update_network(network *net)
{
    float scale = amp_scaler_scale(scaler);
    int i;

    for (i = 0; i < net->n; ++i)
        if (net->layers[i].type != SOFTMAX)
            update_layer(net->layers[i], net->learning_rate / scale, net->momentum, net->decay * scale);
}

static float train_network(network *net)
{
    if (updates) check(amp_grad_set_save(updates));
    forward_network(net);
    backward_network(net);
    for (int i = 0; i < net->n; ++i) amp_scaler_found(scaler, net->layers[i].weight_updates, AMP_F32, net->layers[i].nweights);
    if (amp_scaler_found(scaler, NULL, AMP_F32, 0)) check(amp_grad_set_restore(updates));
    else update_network(net);
    check(amp_scaler_update_with(scaler, 0));
    check(amp_scaler_rescale(scaler, updates, 0));
    return net->loss;
}

static void free_network(network *net)
{
    int i;

    for (i = 0; i < net->n; ++i) {
        layer l = net->layers[i];
        free(l.weights); free(l.weight_updates); free(l.biases); free(l.bias_updates); free(l.output); free(l.delta);
    }
    free(net->input); free(net->truth); free(net->workspace);
}

/* ---- Data: 12 x 12 pixels, a line of one of four directions, and noise */

static void next_batch(network *net)
{
    static const int dx[4] = { 1, 0, 1, 1 }, dy[4] = { 0, 1, 1, -1 };
    int b, i;

    memset(net->truth, 0, (size_t)(net->batch * 4) * sizeof(float));
    for (b = 0; b < net->batch; ++b) {
        float *pixels = net->input + b * 144;
        int kind = (int)rand_uniform(0, 4), x = (int)rand_uniform(3, 9), y = (int)rand_uniform(3, 9);
        for (i = 0; i < 144; ++i) pixels[i] = rand_uniform(-1, 1);
        for (i = -3; i < 3; ++i) pixels[(y + i * dy[kind]) * 12 + x + i * dx[kind]] += 0.9f;
        net->truth[b * 4 + kind] = 1;
    }
}

int main(int argc, char **argv)
{
    int steps = argc > 2 ? atoi(argv[2]) : 400, step;
    float loss = 0;
    network net;

    if (steps < 1) error("steps must be 1 or more");
    seed = argc > 1 ? (unsigned int)atoi(argv[1]) * 7919 : 7919;
    net = make_network(16);
    for (step = 1; step <= steps; ++step) {
        next_batch(&net);
        loss += train_network(&net);
        if (step % 100) continue;
        printf("step %d: loss %.6f\n", step, loss / 100);
        loss = 0;
    }
    free_network(&net);
    return 0;
}
