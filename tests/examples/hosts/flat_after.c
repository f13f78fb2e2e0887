/* flat - a classifier whose parameters lie in one array and their gradients in another, with one fused RMSprop for all.
 *
 *     gcc -O2 flat.c -o flat -lopenblas -lm -lpthread && ./flat [seed [epochs]]
 *
 * It learns what a random network of its own kind answers, with one label in ten wrong. */
#define AMP_IMPLEMENTATION
#include "amp.h"
#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INPUTS  40
#define HIDDEN  64
#define CLASSES 8
#define BATCH   64
#define SAMPLES 2048
#define N_PARAMS (INPUTS * HIDDEN + HIDDEN + HIDDEN * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)

static float params[N_PARAMS], grads[N_PARAMS], squares[N_PARAMS];
static float x[SAMPLES * INPUTS];
static int   y[SAMPLES];
static float h1[BATCH * HIDDEN], h2[BATCH * HIDDEN], logits[BATCH * CLASSES];
static float d1[BATCH * HIDDEN], d2[BATCH * HIDDEN];
static amp_context *amp; static amp_scaler *scaler;

static void die(const char *what)
{
    fprintf(stderr, "flat: %s\n", what);
    exit(1);
}

static unsigned int state = 1;
static float frand(void)    /* in [-1, 1) */
{
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

/* C = op(A) op(B); op(A) is m x k, op(B) k x n. */
static void matmul(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const float *a, const float *b, float *c)
{
    int lda = ta == CblasNoTrans ? k : m, ldb = tb == CblasNoTrans ? n : k;

    if (amp && amp_gemm(amp, AMP_ROW_MAJOR, (amp_trans)ta, (amp_trans)tb, m, n, k, 1, a, lda, b, ldb, 0, c, n) == AMP_OK) return;
    cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1, a, lda, b, ldb, 0, c, n);
}

static void dense(const float *in, int n_in, int n_out, const float *w, float *out, int relu)
{
    const float *bias = w + n_in * n_out;
    int i;

    matmul(CblasNoTrans, CblasNoTrans, BATCH, n_out, n_in, in, w, out);
    for (i = 0; i < BATCH * n_out; i++) {
        out[i] += bias[i % n_out];
        if (relu && out[i] < 0) out[i] = 0;
    }
}

/* Gradients of a layer's weights and bias, and of its input (din may be NULL). */
static void dense_backward(const float *in, int n_in, int n_out, const float *w, const float *dout, float *dw, float *din)
{
    float *dbias = dw + n_in * n_out;
    int i;

    matmul(CblasTrans, CblasNoTrans, n_in, n_out, BATCH, in, dout, dw);
    if (amp_scaler_found(scaler, dw, AMP_F32, n_in * n_out)) return;    /* dout overflowed */
    for (i = 0; i < BATCH * n_out; i++) dbias[i % n_out] += dout[i];
    if (din == NULL) return;
    matmul(CblasNoTrans, CblasTrans, BATCH, n_in, n_out, dout, w, din);
    for (i = 0; i < BATCH * n_in; i++) if (in[i] <= 0) din[i] = 0;
}

static float *layer(float *array, int i)
{
    static const int at[3] = { 0, (INPUTS + 1) * HIDDEN, (INPUTS + 1 + HIDDEN + 1) * HIDDEN };
    return array + at[i];
}

static void forward(const float *in)
{
    dense(in, INPUTS, HIDDEN, layer(params, 0), h1, 1);
    dense(h1, HIDDEN, HIDDEN, layer(params, 1), h2, 1);
    dense(h2, HIDDEN, CLASSES, layer(params, 2), logits, 0);
}

/* Mean cross-entropy; logits become their gradient. */
static float softmax_loss(const int *labels)
{
    float loss = 0, scale = 1.0f / BATCH;
    int i, j;

    scale *= amp_scaler_scale(scaler);
    for (i = 0; i < BATCH; i++) {
        float *z = logits + i * CLASSES, max = z[0], sum = 0;
        for (j = 1; j < CLASSES; j++) if (z[j] > max) max = z[j];
        for (j = 0; j < CLASSES; j++) sum += z[j] = expf(z[j] - max);
        loss -= logf(z[labels[i]] / sum) / BATCH;
        for (j = 0; j < CLASSES; j++) z[j] = scale * (z[j] / sum - (j == labels[i]));
    }
    return loss;
}

static void backward(const float *in)
{
    memset(grads, 0, sizeof grads);
    dense_backward(h2, HIDDEN, CLASSES, layer(params, 2), logits, layer(grads, 2), d2);
    dense_backward(h1, HIDDEN, HIDDEN, layer(params, 1), d2, layer(grads, 1), d1);
    dense_backward(in, INPUTS, HIDDEN, layer(params, 0), d1, layer(grads, 0), NULL);
}

static void rmsprop(float rate)
{
    int i;
    int32_t apply;

    if (amp_scaler_unscale(scaler, &(amp_range){"grads", grads, N_PARAMS, AMP_F32}, 1, &apply) != AMP_OK) die(amp_last_error());
    if (!apply) return;
    for (i = 0; i < N_PARAMS; i++) {
        squares[i] = 0.95f * squares[i] + 0.05f * grads[i] * grads[i];
        params[i] -= rate * grads[i] / (sqrtf(squares[i]) + 1e-5f);
    }
}

static void init_params(void)
{
    int i;

    for (i = 0; i < N_PARAMS; i++) params[i] = 0.2f * frand();
}

static void make_samples(void)
{
    int i, j, best;

    init_params();
    for (i = 0; i < SAMPLES * INPUTS; i++) x[i] = 2 * frand();
    for (i = 0; i < SAMPLES; i++) {
        if (i % BATCH == 0) forward(x + i * INPUTS);
        for (j = 1, best = 0; j < CLASSES; j++)
            if (logits[i % BATCH * CLASSES + j] > logits[i % BATCH * CLASSES + best]) best = j;
        y[i] = frand() < 0.8f ? best : (best + 1) % CLASSES;
    }
}

int main(int argc, char **argv)
{
    int seed = argc > 1 ? atoi(argv[1]) : 1, epochs = argc > 2 ? atoi(argv[2]) : 8, epoch, i;

    if (epochs < 1) die("epochs must be 1 or more");
    if (amp_open_env(&amp, &scaler) != AMP_OK) die(amp_last_error());
    make_samples();
    state = (unsigned int)seed * 7919;
    init_params();
    for (epoch = 1; epoch <= epochs; epoch++) {
        float loss = 0;
        for (i = 0; i < SAMPLES; i += BATCH) {
            forward(x + i * INPUTS);
            loss += softmax_loss(y + i) / (SAMPLES / BATCH);
            backward(x + i * INPUTS);
            rmsprop(0.002f);
        }
        printf("epoch %d: loss %.6f\n", epoch, loss);
    }
    return 0;
}
