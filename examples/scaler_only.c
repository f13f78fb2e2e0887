/* scaler_only.c - your kernels, your arrays, your optimizer: amp.h provides only the loss scaler.
 *
 *     gcc -O2 examples/scaler_only.c -o scaler_only -lm -lpthread && ./scaler_only [steps]
 *
 * Fits y = sin(3 x) with a small tanh network written in plain loops, whose gradients are rounded to fp16, as a GPU
 * kernel would store them: anything above 65504 is infinite, anything below 3e-8 is lost.  The scale starts too high:
 * steps overflow and are skipped until it fits.  Later it grows, overflows once in a while, and falls back.  Built with
 * -DUSE_CUDA and amp_cuda.o, scaler and checked gradients are on the GPU, as with your own kernels there. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HIDDEN = 32, POINTS = 64, WEIGHTS = 3 * HIDDEN + 1 };
#define CHECK(call) do { if ((call) != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); return 1; } } while (0)

/* Our own model: w holds input weights, input biases, output weights and the output bias. */
static float w[WEIGHTS], gradient[WEIGHTS], velocity[WEIGHTS];

static float to_fp16_and_back(float x) { return amp_f32_from_f16(amp_f16_from_f32(x, 0)); }

/* Returns the mean squared error and leaves d(scale * error)/dw in gradient, every product rounded to fp16. */
static float forward_backward(float scale) {
    float error = 0;
    memset(gradient, 0, sizeof gradient);
    for (int p = 0; p < POINTS; p++) {
        float x = 2.0f * (float)p / (POINTS - 1) - 1, hidden[HIDDEN], y = w[3 * HIDDEN], d;
        for (int i = 0; i < HIDDEN; i++) {
            hidden[i] = tanhf(w[i] * x + w[HIDDEN + i]);
            y += w[2 * HIDDEN + i] * hidden[i];
        }
        error += (y - sinf(3 * x)) * (y - sinf(3 * x)) / POINTS;
        d = to_fp16_and_back(scale * 2 * (y - sinf(3 * x)) / POINTS);   /* the backward pass starts from the scale */
        gradient[3 * HIDDEN] += d;
        for (int i = 0; i < HIDDEN; i++) {
            float di = to_fp16_and_back(d * w[2 * HIDDEN + i] * (1 - hidden[i] * hidden[i]));
            gradient[2 * HIDDEN + i] += to_fp16_and_back(d * hidden[i]);
            gradient[HIDDEN + i] += di;
            gradient[i] += to_fp16_and_back(di * x);
        }
    }
    return error;
}

/* Our own optimizer: SGD with momentum. */
static void step(float lr) {
    for (int i = 0; i < WEIGHTS; i++) {
        velocity[i] = 0.9f * velocity[i] + gradient[i];
        w[i] -= lr * velocity[i];
    }
}

int main(int argc, char **argv) {
    amp_context *amp;
    amp_scaler *scaler;
    amp_grad_set *set;
    amp_scaler_desc desc = {0};
    amp_range range = {"gradient", NULL, WEIGHTS, AMP_F32};             /* any number of your own arrays */
    amp_grad_set_desc ranges = {0};
    amp_desc settings = {0};
    char *end = "";
    long steps = argc > 1 ? strtol(argv[1], &end, 10) : 2000;
    int skipped = 0;
    if (steps < 1 || steps > 1000000000 || *end != 0)
        return fprintf(stderr, "steps: \"%s\" must be a number from 1 to 1000000000\n", argv[1]), 2;

    desc.init_scale = 16777216;             /* 2^24: much too high */
    desc.growth_interval = 200;             /* clean steps until it doubles; the default is 2000 */
    ranges.ranges = &range;
    ranges.n_ranges = 1;
#if defined(USE_CUDA)
    settings.backend = amp_cuda();
#endif
    CHECK(amp_open(&amp, &settings));
    CHECK(amp_alloc(amp, &range.data, (int64_t)sizeof gradient));       /* in the backend's memory */
    CHECK(amp_scaler_create(amp, &scaler, &desc));
    CHECK(amp_grad_set_create(amp, &set, &ranges));
    for (int i = 0; i < WEIGHTS; i++) w[i] = 2 * amp_random_uniform(1, (uint64_t)i) - 1;
    for (int i = 2 * HIDDEN; i < WEIGHTS; i++) w[i] *= 0.2f;

    for (int i = 1; i <= steps; i++) {
        float scale = amp_scaler_scale(scaler), error = forward_backward(scale);
        amp_grad_stats found;
        CHECK(amp_copy(amp, range.data, gradient, (int64_t)sizeof gradient, AMP_COPY_TO_DEVICE));
        CHECK(amp_scaler_check(scaler, set, AMP_CHECK_UNSCALE)); /* divides by the scale, looks for inf and NaN */
        CHECK(amp_copy(amp, gradient, range.data, (int64_t)sizeof gradient, AMP_COPY_TO_HOST));
        CHECK(amp_grad_set_stats(set, &found));                      /* waits for the device */
        if (!found.found_inf) step(0.02f);
        CHECK(amp_scaler_update(scaler));                               /* halves, counts, or doubles */
        skipped += found.found_inf;
        if (amp_scaler_scale(scaler) != scale)
            printf("step %4d: %s, scale %g -> %g\n", i, found.found_inf ? "overflow, skipped" : "clean for a while",
                   (double)scale, (double)amp_scaler_scale(scaler));
        if (i % 500 == 0)
            printf("step %4d: error %.6f, gradient norm %.6f, %d skipped\n", i, (double)error, (double)found.norm,
                   skipped);
    }
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_free(amp, range.data);
    amp_close(amp);
    return fflush(stdout) != 0 || ferror(stdout);       /* the disk is full */
}
