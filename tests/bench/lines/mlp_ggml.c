/* mlp_ggml.c - the task of examples/mlp.c with ggml, in fp32, because its training has no 16-bit products and no clipping. */
#include "ggml.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-opt.h"
#include <stdlib.h>

enum { ROWS = 6000, IN = 8, HIDDEN = 64, CLASSES = 4, BATCH = 100, EPOCHS = 30 };

static struct ggml_opt_optimizer_params rate(void *user) {
    struct ggml_opt_optimizer_params p = ggml_opt_get_default_optimizer_params(user);
    p.adamw.alpha = 3e-3f;
    return p;
}

static struct ggml_tensor *parameter(struct ggml_context *ctx, int64_t in, int64_t out) {
    struct ggml_tensor *t = in > 0 ? ggml_new_tensor_2d(ctx, GGML_TYPE_F32, in, out) : ggml_new_tensor_1d(ctx, GGML_TYPE_F32, out);
    ggml_set_param(t);
    return t;
}

static void fill(struct ggml_tensor *t, float width) {
    float *values = (float *)malloc(ggml_nbytes(t));
    for (int64_t i = 0; i < ggml_nelements(t); i++) values[i] = width * (2 * (float)rand() / (float)RAND_MAX - 1);
    ggml_backend_tensor_set(t, values, 0, ggml_nbytes(t));
    free(values);
}

int main(void) {
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_sched_t sched = ggml_backend_sched_new(&backend, NULL, 1, GGML_DEFAULT_GRAPH_SIZE, false, true);
    struct ggml_init_params fixed = {16 * ggml_tensor_overhead(), NULL, true};
    struct ggml_init_params graphs = {GGML_DEFAULT_GRAPH_SIZE * ggml_tensor_overhead() + 3 * ggml_graph_overhead(), NULL, true};
    struct ggml_context *weights = ggml_init(fixed), *compute = ggml_init(graphs);
    ggml_opt_dataset_t data = ggml_opt_dataset_init(GGML_TYPE_F32, GGML_TYPE_F32, IN, CLASSES, ROWS, 1);
    float *x = ggml_get_data_f32(ggml_opt_dataset_data(data)), *y = ggml_get_data_f32(ggml_opt_dataset_labels(data));
    for (int i = 0; i < ROWS * IN; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    for (int i = 0; i < ROWS; i++) {
        const float *row = x + i * IN;
        for (int k = 0; k < CLASSES; k++) y[i * CLASSES + k] = k == (row[0] * row[1] > 0) + 2 * (row[2] > row[3]);
    }
    struct ggml_tensor *in = ggml_new_tensor_2d(weights, GGML_TYPE_F32, IN, BATCH);
    struct ggml_tensor *w1 = parameter(weights, IN, HIDDEN), *b1 = parameter(weights, 0, HIDDEN);
    struct ggml_tensor *w2 = parameter(weights, HIDDEN, CLASSES), *b2 = parameter(weights, 0, CLASSES);
    ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(weights, backend);
    fill(w1, 0.6f); fill(b1, 0); fill(w2, 0.2f); fill(b2, 0);
    struct ggml_tensor *h = ggml_relu(compute, ggml_add(compute, ggml_mul_mat(compute, w1, in), b1));
    struct ggml_tensor *out = ggml_add(compute, ggml_mul_mat(compute, w2, h), b2);
    ggml_set_input(in);
    ggml_set_output(out);
    ggml_opt_fit(sched, compute, in, out, data, GGML_OPT_LOSS_TYPE_CROSS_ENTROPY, GGML_OPT_OPTIMIZER_TYPE_ADAMW, rate, EPOCHS,
                 BATCH, 1.0f / 6, false);
    ggml_opt_dataset_free(data);
    ggml_backend_buffer_free(memory);
    ggml_backend_sched_free(sched);
    ggml_backend_free(backend);
    ggml_free(weights);
    ggml_free(compute);
    return 0;
}
