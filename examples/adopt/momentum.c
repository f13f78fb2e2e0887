/* momentum.c - one buffer for gradient and momentum, as many C programs have it, under a loss scaler.
 *
 *     gcc -O2 examples/adopt/momentum.c -o momentum -lm -lpthread && ./momentum [steps]
 *
 * The backward pass adds to the momentum of earlier steps, so the buffer carries the scale S: the update divides
 * the learning rate by S and multiplies the weight decay by it, a skipped step restores the buffer, and when S
 * changes, the buffer is rescaled.  S is a power of two: weights are bit for bit the same as without it.  The scale
 * starts so high that the first steps overflow, and grows every 20 steps until they do again. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HIDDEN = 16, POINTS = 32, WEIGHTS = 3 * HIDDEN + 1 };
#define CHECK(call) do { if ((call) != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); exit(1); } } while (0)

typedef struct network { float w[WEIGHTS], update[WEIGHTS]; } network;

/* Beyond fp16's range numbers are infinite, as a kernel with 16-bit activations would make them. */
static float in_range(float x) { return fabsf(x) > 65504 ? copysignf(INFINITY, x) : x; }

/* Fits y = sin(3 x).  Adds the gradient of scale * error to n->update and returns the error. */
static float backward(network *n, float scale) {
    float error = 0, *w = n->w, *u = n->update;
    for (int p = 0; p < POINTS; p++) {
        float x = 2.0f * (float)p / (POINTS - 1) - 1, hidden[HIDDEN], y = w[3 * HIDDEN], d;
        for (int i = 0; i < HIDDEN; i++) y += w[2 * HIDDEN + i] * (hidden[i] = tanhf(w[i] * x + w[HIDDEN + i]));
        error += (y - sinf(3 * x)) * (y - sinf(3 * x)) / POINTS;
        d = in_range(scale * (2 * (y - sinf(3 * x)) / POINTS));
        u[3 * HIDDEN] += d;
        for (int i = 0; i < HIDDEN; i++) {
            float di = d * w[2 * HIDDEN + i] * (1 - hidden[i] * hidden[i]);
            u[2 * HIDDEN + i] += d * hidden[i];
            u[HIDDEN + i] += di;
            u[i] += di * x;
        }
    }
    return error;
}

static void update(network *n, float rate, float decay, float momentum) {
    for (int i = 0; i < WEIGHTS; i++) {
        n->update[i] += decay * n->w[i];
        n->w[i] -= rate * n->update[i];
        n->update[i] *= momentum;
    }
}

static void begin(network *n) {
    memset(n, 0, sizeof *n);
    for (int i = 0; i < WEIGHTS; i++) n->w[i] = 2 * amp_random_uniform(1, (uint64_t)i) - 1;
}

int main(int argc, char **argv) {
    static network plain, scaled;
    amp_context *amp;
    amp_scaler *scaler;
    amp_grad_set *set;
    amp_range range = {.name = "update", .data = scaled.update, .count = WEIGHTS, .dtype = AMP_F32};
    amp_grad_set_desc ranges = {.ranges = &range, .n_ranges = 1};
    amp_scaler_desc desc = {.init_scale = 16777216, .growth_interval = 20};        /* 2^24: too high */
    int steps = argc > 1 ? atoi(argv[1]) : 300, skipped = 0;
    float error = 0;
    if (steps < 1) return fprintf(stderr, "steps: \"%s\" must be a number of 1 or more\n", argv[1]), 2;
    CHECK(amp_open(&amp, NULL));
    CHECK(amp_scaler_create(amp, &scaler, &desc));
    CHECK(amp_grad_set_create(amp, &set, &ranges));
    begin(&plain);
    begin(&scaled);
    for (int step = 0; step < steps;) {
        float scale = amp_scaler_scale(scaler);
        amp_grad_stats found;
        CHECK(amp_grad_set_save(set));
        error = backward(&scaled, scale);
        CHECK(amp_scaler_check(scaler, set, AMP_CHECK_READ));
        CHECK(amp_grad_set_stats(set, &found));
        if (found.found_inf) {
            CHECK(amp_grad_set_restore(set));
            skipped++;
        } else {
            update(&scaled, 0.05f / scale, 1e-4f * scale, 0.9f);
            backward(&plain, 1);
            update(&plain, 0.05f, 1e-4f, 0.9f);
            step++;
        }
        CHECK(amp_scaler_update(scaler));
        CHECK(amp_scaler_rescale(scaler, set, 0));
        if (found.found_inf)
            printf("step %3d: infinite at element %lld of %s, scale 2^%.0f -> 2^%.0f\n", step,
                   (long long)found.first_bad_element, found.first_bad, (double)log2f(scale),
                   (double)log2f(amp_scaler_scale(scaler)));
    }
    printf("%d steps, %d skipped, error %.6f; weights %s without a scale\n", steps, skipped, (double)error,
           memcmp(plain.w, scaled.w, sizeof plain.w) == 0 ? "bit for bit those" : "differ from those");
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
    amp_close(amp);
    return fflush(stdout) != 0 || ferror(stdout);       /* the disk is full */
}
