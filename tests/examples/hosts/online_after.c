/* online - a small neural network library in one file, and a program that uses it.
 *
 *     gcc -O2 online.c -o online -lm -lpthread && ./online [seed [epochs]]
 *
 * Numbers are double.  Training is stochastic gradient descent, sample by sample, and changes the weights at once. */
#define AMP_IMPLEMENTATION
#include "amp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The library */

typedef struct mlp {
    int layers, size[8];        /* the inputs are layer 0 */
    int neurons, weights;       /* in all */
    double *weight[8];          /* of layer l: size[l] rows of size[l - 1], then size[l] biases */
    double *output[8], *delta[8];
} mlp;

static amp_context *amp;
static amp_scaler *scaler;
static unsigned int mlp_state = 1;
static double mlp_random(void)          /* in [-1, 1) */
{
    mlp_state = mlp_state * 1664525u + 1013904223u;
    return (double)(mlp_state >> 8) / 8388608.0 - 1.0;
}

static mlp *mlp_new(int layers, const int *size)
{
    mlp *n = calloc(1, sizeof *n);
    double *next;
    int l, i;

    if (n == NULL) return NULL;
    n->layers = layers;
    for (l = 0; l < layers; l++) {
        n->size[l] = size[l];
        n->neurons += size[l];
        if (l > 0) n->weights += size[l] * (size[l - 1] + 1);
    }
    next = calloc((size_t)(n->weights + 2 * n->neurons), sizeof *next);
    if (next == NULL) { free(n); return NULL; }
    for (l = 1, n->weight[1] = next; l < layers; l++) {
        n->weight[l] = next;
        next += size[l] * (size[l - 1] + 1);
        for (i = 0; i < size[l] * size[l - 1]; i++) n->weight[l][i] = mlp_random() * sqrt(2.0 / size[l - 1]);
    }
    for (l = 0; l < layers; l++) { n->output[l] = next; next += size[l]; }
    for (l = 0; l < layers; l++) { n->delta[l] = next; next += size[l]; }
    return n;
}

static void mlp_free(mlp *n)
{
    free(n->weight[1]);
    free(n);
}

/* y = W x, or W^T x; W has so many rows and columns. */
static void mlp_product(int transposed, int rows, int cols, const double *w, const double *x, double *y)
{
    int i, j;

    if (amp && amp_gemm_f64(amp, AMP_ROW_MAJOR, transposed ? AMP_TRANS : AMP_NO_TRANS, AMP_NO_TRANS, transposed ? cols : rows, 1,
                            transposed ? rows : cols, 1, w, cols, x, 1, 0, y, 1) == AMP_OK) return;
    for (i = 0; i < (transposed ? cols : rows); i++) y[i] = 0;
    for (i = 0; i < rows; i++)
        for (j = 0; j < cols; j++)
            if (transposed) y[j] += w[i * cols + j] * x[i];
            else y[i] += w[i * cols + j] * x[j];
}

static const double *mlp_run(mlp *n, const double *inputs)
{
    int l, i;

    memcpy(n->output[0], inputs, (size_t)n->size[0] * sizeof *inputs);
    for (l = 1; l < n->layers; l++) {
        const double *bias = n->weight[l] + n->size[l] * n->size[l - 1];
        mlp_product(0, n->size[l], n->size[l - 1], n->weight[l], n->output[l - 1], n->output[l]);
        for (i = 0; i < n->size[l]; i++) {
            n->output[l][i] += bias[i];
            if (l < n->layers - 1) n->output[l][i] = tanh(n->output[l][i]);
        }
    }
    return n->output[n->layers - 1];
}

/* One step from one sample; returns its squared error. */
static double mlp_train(mlp *n, const double *inputs, const double *target, double rate)
{
    double error = 0;
    int last = n->layers - 1, l, i, j;

    const double scale = amp_scaler_scale(scaler);
    mlp_run(n, inputs);
    for (i = 0; i < n->size[last]; i++) {
        n->delta[last][i] = target[i] - n->output[last][i];
        error += n->delta[last][i] * n->delta[last][i];
        n->delta[last][i] *= scale;
    }
    for (l = last - 1; l > 0; l--) {
        mlp_product(1, n->size[l + 1], n->size[l], n->weight[l + 1], n->delta[l + 1], n->delta[l]);
        for (i = 0; i < n->size[l]; i++) n->delta[l][i] *= 1 - n->output[l][i] * n->output[l][i];
    }
    i = amp_scaler_found(scaler, n->delta[0], AMP_F64, n->neurons);
    if (amp_scaler_update_with(scaler, 0) != AMP_OK || i) return error;
    rate /= scale;
    for (l = 1; l <= last; l++) {
        double *w = n->weight[l], *bias = w + n->size[l] * n->size[l - 1];
        for (i = 0; i < n->size[l]; i++) {
            for (j = 0; j < n->size[l - 1]; j++) *w++ += rate * n->delta[l][i] * n->output[l - 1][j];
            bias[i] += rate * n->delta[l][i];
        }
    }
    return error;
}

/* ---- The program: a function of eight variables, with noise */

enum { INPUTS = 8, OUTPUTS = 2, SAMPLES = 1000 };

int main(int argc, char **argv)
{
    static const int size[4] = { INPUTS, 32, 32, OUTPUTS };
    static double x[SAMPLES][INPUTS], y[SAMPLES][OUTPUTS];
    int seed = argc > 1 ? atoi(argv[1]) : 1, epochs = argc > 2 ? atoi(argv[2]) : 12, epoch, i, j;
    mlp *n;

    if (amp_open_env(&amp, &scaler) != AMP_OK) return fprintf(stderr, "online: %s\n", amp_last_error()), 1;
    for (i = 0; i < SAMPLES; i++) {
        for (j = 0; j < INPUTS; j++) x[i][j] = mlp_random();
        y[i][0] = sin(3 * x[i][0]) + x[i][1] * x[i][2] + 0.5 * mlp_random();
        y[i][1] = cos(2 * x[i][3] + x[i][4]) - x[i][5] + 0.5 * mlp_random();
    }
    mlp_state = (unsigned int)seed * 7919;
    n = mlp_new(4, size);
    if (n == NULL) return fprintf(stderr, "online: out of memory\n"), 1;
    for (epoch = 1; epoch <= epochs; epoch++) {
        double error = 0;
        for (i = 0; i < SAMPLES; i++) error += mlp_train(n, x[i], y[i], 0.01) / SAMPLES;
        printf("epoch %d: loss %.6f\n", epoch, error);
    }
    mlp_free(n);
    return 0;
}
