/* before.c - a training program in plain fp32, as one finds them: its own matrix product, layers, loss and AdamW.
 *
 *     gcc -O3 -march=native -fopenmp before.c -o before -lm && ./before [seed [steps]]
 *
 * A perceptron of three layers learns digits drawn from a 5 x 7 font: shifted, stretched, turned, and under noise.
 * before.c has nothing of amp.h; after.c is the same program in mixed precision; `diff before.c after.c` is what that
 * took. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SIDE = 28, PIXELS = SIDE * SIDE, HIDDEN = 512, CLASSES = 10, LAYERS = 3 };
enum { BATCH = 128, TRAIN = 16384, TEST = 2048 };

/* ==== Random numbers: xorshift64* (Vigna 2016) =================================================== */

static uint64_t random_state;
static double uniform(void) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (double)(random_state * 2685821657736338717u >> 11) / 9007199254740992.0;
}
static double normal(void) { return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform()); }

/* ==== Data ======================================================================================= */

/* Seven rows of five bits for each digit. */
static const unsigned char font[CLASSES][7] = {
    {14, 17, 19, 21, 25, 17, 14}, {4, 12, 4, 4, 4, 4, 14},     {14, 17, 1, 2, 4, 8, 31},    {31, 2, 4, 2, 1, 17, 14},
    {2, 6, 10, 18, 31, 2, 2},     {31, 16, 30, 1, 1, 17, 14},  {6, 8, 16, 30, 17, 17, 14},  {31, 1, 2, 4, 8, 8, 8},
    {14, 17, 17, 14, 17, 17, 14}, {14, 17, 17, 15, 1, 2, 12},
};

static double font_dot(int digit, int x, int y) {
    return x >= 0 && x < 5 && y >= 0 && y < 7 ? font[digit][y] >> (4 - x) & 1 : 0;
}

/* The digit at random place, size and angle, interpolated between the dots. */
static void draw(int digit, float *picture) {
    double angle = 0.3 * (2 * uniform() - 1), size = 2.2 + 1.1 * uniform(), narrow = 0.7 + 0.4 * uniform();
    double left = SIDE / 2 + 4 * (2 * uniform() - 1), top = SIDE / 2 + 3 * (2 * uniform() - 1);
    int i;
    for (i = 0; i < PIXELS; i++) {
        double x = i % SIDE - left, y = i / SIDE - top;
        double u = (cos(angle) * x + sin(angle) * y) / (size * narrow) + 2;
        double v = (cos(angle) * y - sin(angle) * x) / size + 3;
        int x0 = (int)floor(u), y0 = (int)floor(v);
        double fx = u - x0, fy = v - y0;
        double upper = (1 - fx) * font_dot(digit, x0, y0) + fx * font_dot(digit, x0 + 1, y0);
        double lower = (1 - fx) * font_dot(digit, x0, y0 + 1) + fx * font_dot(digit, x0 + 1, y0 + 1);
        picture[i] = (float)((1 - fy) * upper + fy * lower - 0.2 + 0.25 * (2 * uniform() - 1));
    }
}

static float train_x[TRAIN * PIXELS], test_x[TEST * PIXELS];
static int train_y[TRAIN], test_y[TEST];

static void draw_all(float *x, int *y, int n) {
    int i;
    for (i = 0; i < n; i++) draw(y[i] = i % CLASSES, x + i * PIXELS);
}

/* ==== The network ================================================================================ */

static const int width[LAYERS + 1] = {PIXELS, HIDDEN, HIDDEN, CLASSES};
enum { PARAMETERS = (PIXELS + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * CLASSES };
static float parameters[PARAMETERS], gradients[PARAMETERS], first_moment[PARAMETERS], second_moment[PARAMETERS];
static float *weight[LAYERS], *weight_gradient[LAYERS];             /* [in, out], and behind it the bias [out] */
static float value[LAYERS + 1][BATCH * PIXELS], gradient[LAYERS + 1][BATCH * PIXELS];

/* c = op(a) op(b), row by row; op(a) is m x k, op(b) k x n, and ta or tb says that it is stored transposed. */
static void matmul(int ta, int tb, int m, int n, int k, const float *a, const float *b, float *c) {
    int i;
#pragma omp parallel for
    for (i = 0; i < m; i++) {
        int j, p;
        for (j = 0; j < n; j++) c[i * n + j] = 0;
        for (p = 0; p < k; p++) {
            float x = ta ? a[p * m + i] : a[i * k + p];
            if (tb) for (j = 0; j < n; j++) c[i * n + j] += x * b[j * k + p];
            else for (j = 0; j < n; j++) c[i * n + j] += x * b[p * n + j];
        }
    }
}

static void place_parameters(void) {
    int layer, i, at = 0;
    for (layer = 0; layer < LAYERS; layer++) {
        weight[layer] = parameters + at;
        weight_gradient[layer] = gradients + at;
        for (i = 0; i < width[layer] * width[layer + 1]; i++)
            weight[layer][i] = (float)(normal() * sqrt(2.0 / width[layer]));
        at += (width[layer] + 1) * width[layer + 1];
    }
}

/* value[LAYERS] = the logits of a batch. */
static void forward(const float *x) {
    int layer, i;
    memcpy(value[0], x, sizeof(float) * BATCH * PIXELS);
    for (layer = 0; layer < LAYERS; layer++) {
        int in = width[layer], out = width[layer + 1];
        const float *bias = weight[layer] + in * out;
        float *y = value[layer + 1];
        matmul(0, 0, BATCH, out, in, value[layer], weight[layer], y);
        for (i = 0; i < BATCH * out; i++) {
            y[i] += bias[i % out];
            if (layer < LAYERS - 1 && y[i] < 0) y[i] = 0;
        }
    }
}

/* The mean cross-entropy of the batch; right counts its hits, and gradient[LAYERS] becomes that of the logits. */
static double loss_of(const int *labels, int *right) {
    double loss = 0;
    int i, j;
    for (i = 0; i < BATCH; i++) {
        const float *logits = value[LAYERS] + i * CLASSES;
        float *d = gradient[LAYERS] + i * CLASSES;
        double sum = 0;
        int best = 0;
        for (j = 1; j < CLASSES; j++) if (logits[j] > logits[best]) best = j;
        for (j = 0; j < CLASSES; j++) sum += exp(logits[j] - logits[best]);
        for (j = 0; j < CLASSES; j++)
            d[j] = (float)((exp(logits[j] - logits[best]) / sum - (j == labels[i])) / BATCH);
        loss += (log(sum) + logits[best] - logits[labels[i]]) / BATCH;
        *right += best == labels[i];
    }
    return loss;
}

/* All of `gradients`, from gradient[LAYERS]. */
static void backward(void) {
    int layer, i;
    for (layer = LAYERS - 1; layer >= 0; layer--) {
        int in = width[layer], out = width[layer + 1];
        float *bias = weight_gradient[layer] + in * out, *dy = gradient[layer + 1];
        matmul(1, 0, in, out, BATCH, value[layer], dy, weight_gradient[layer]);
        memset(bias, 0, sizeof *bias * (size_t)out);
        for (i = 0; i < BATCH * out; i++) bias[i % out] += dy[i];
        if (layer == 0) break;
        matmul(0, 1, BATCH, in, out, dy, weight[layer], gradient[layer]);
        for (i = 0; i < BATCH * in; i++) if (value[layer][i] <= 0) gradient[layer][i] = 0;
    }
}

/* AdamW (Loshchilov & Hutter 2019). */
static void adamw(float lr) {
    const float beta1 = 0.9f, beta2 = 0.99f, decay = 0.01f;
    static int t;
    float bias1, bias2;
    int i;
    t++;
    bias1 = 1 - powf(beta1, (float)t);
    bias2 = 1 - powf(beta2, (float)t);
#pragma omp parallel for
    for (i = 0; i < PARAMETERS; i++) {
        float g = gradients[i];
        first_moment[i] = beta1 * first_moment[i] + (1 - beta1) * g;
        second_moment[i] = beta2 * second_moment[i] + (1 - beta2) * g * g;
        parameters[i] -= lr * (first_moment[i] / bias1 / (sqrtf(second_moment[i] / bias2) + 1e-8f) +
                               decay * parameters[i]);
    }
}

/* ==== Training =================================================================================== */

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv) {
    int seed = argc > 1 ? atoi(argv[1]) : 1, steps = argc > 2 ? atoi(argv[2]) : 200, step, at, right = 0;
    double loss = 0, began;
    random_state = 12345;                               /* every seed has the same data */
    draw_all(train_x, train_y, TRAIN);
    draw_all(test_x, test_y, TEST);
    random_state = 88172645463325252u + (uint64_t)seed * 1000003;
    place_parameters();
    began = seconds();
    for (step = 1; step <= steps; step++) {
        at = (int)(uniform() * (TRAIN / BATCH)) * BATCH;
        forward(train_x + at * PIXELS);
        loss = loss_of(train_y + at, &right);
        backward();
        adamw(1e-3f);
        if (step % 50 == 0) printf("step %d: loss %.4f\n", step, loss);
    }
    printf("trained in %.2f s\n", seconds() - began);
    for (at = 0, loss = 0, right = 0; at < TEST; at += BATCH) {
        forward(test_x + at * PIXELS);
        loss += loss_of(test_y + at, &right) * BATCH / TEST;
    }
    printf("test loss %.5f, accuracy %.2f%%\n", loss, 100.0 * right / TEST);
    return fflush(stdout) != 0 || ferror(stdout);
}
