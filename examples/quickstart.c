/* quickstart.c - the shortest complete use of amp.h: a classifier for Fashion-MNIST in mixed precision.
 *
 *     gcc -O2 -fopenmp examples/quickstart.c -o quickstart -lm -lpthread && ./quickstart [folder of the IDX files]
 *
 * The files are those of Debian's package dataset-fashion-mnist; without them it learns synthetic pictures. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "common.h"
enum { PIXELS = 784, HIDDEN = 256, CLASSES = 10, BATCH = 100, EPOCHS = 8 };
#define CHECK(call) do { if ((call) != AMP_OK) { fprintf(stderr, "%s\n", example_error()); exit(1); } } while (0)
static amp_context *amp;
static amp_param params[4];
static amp_linear_op first, second;     /* hidden = relu(x W1^T + b1), logits = hidden W2^T + b2 */
static amp_cross_entropy_op loss;

static float *zeros(int64_t n) {
    void *p;
    CHECK(amp_alloc(amp, &p, n * (int64_t)sizeof(float)));
    CHECK(amp_fill(amp, p, 0, n * (int64_t)sizeof(float)));
    return (float *)p;
}

/* A parameter and its gradient: a matrix, or a vector if cols is 0. */
static void make_param(amp_param *p, const char *name, int64_t rows, int64_t cols) {
    int64_t n = cols > 0 ? rows * cols : rows;
    p->name = name;
    p->weight = cols > 0 ? amp_tensor2(zeros(n), AMP_F32, rows, cols) : amp_tensor1(zeros(n), AMP_F32, n);
    p->grad = cols > 0 ? amp_tensor2(zeros(n), AMP_F32, rows, cols) : amp_tensor1(zeros(n), AMP_F32, n);
    if (cols > 0) random_normal((float *)p->weight.data, n, 1, (uint64_t)cols, (float)sqrt(2.0 / (double)cols));
}

/* Buffers for a batch, and the ops that connect them. */
static void make_network(void) {
    amp_tensor hidden = amp_tensor2(zeros(BATCH * HIDDEN), AMP_F32, BATCH, HIDDEN);
    make_param(&params[0], "first.weight", HIDDEN, PIXELS);   make_param(&params[1], "first.bias", HIDDEN, 0);
    make_param(&params[2], "second.weight", CLASSES, HIDDEN); make_param(&params[3], "second.bias", CLASSES, 0);
    CHECK(amp_param_register(amp, params, 4));
    first.weight = &params[0];  first.bias = &params[1];  first.y = hidden;  first.act = AMP_ACT_RELU;
    second.weight = &params[2]; second.bias = &params[3]; second.x = hidden;
    second.y = second.dy = amp_tensor2(zeros(BATCH * CLASSES), AMP_F32, BATCH, CLASSES);
    second.dx = first.dy = amp_tensor2(zeros(BATCH * HIDDEN), AMP_F32, BATCH, HIDDEN);
    loss.logits = second.y;
    loss.loss = zeros(1);
}

/* The loss of pictures i to i + BATCH; with training the logits become their gradient. */
static void forward(const pictures *data, int64_t i, int training, const float *seed) {
    first.x = amp_tensor2(data->x + i * PIXELS, AMP_F32, BATCH, PIXELS);
    loss.labels = data->y + i;
    loss.seed = seed;
    loss.dlogits = second.y;
    if (!training) loss.dlogits.data = NULL;
    CHECK(amp_autocast_begin(amp, NULL));
    CHECK(amp_linear(amp, &first));
    CHECK(amp_linear(amp, &second));
    CHECK(amp_cross_entropy(amp, &loss));
    CHECK(amp_autocast_end(amp));
}

static double accuracy(const pictures *data) {
    int64_t right = 0, n = data->n / BATCH * BATCH;
    for (int64_t i = 0; i < n; i += BATCH) {
        forward(data, i, 0, NULL);
        for (int row = 0; row < BATCH; row++)
            right += largest_of((float *)second.y.data + row * CLASSES, CLASSES) == data->y[i + row];
    }
    return (double)right / (double)n;
}

int main(int argc, char **argv) {
    const char *folder = argc > 1 ? argv[1] : "/usr/share/datasets/fashion-mnist";
    pictures train, test;
    amp_scaler *scaler; amp_scaler_desc scaler_desc = {0};
    amp_optimizer *adamw; amp_optimizer_desc desc = {0};
    amp_choice choice;
    if (pictures_read(&train, folder, "train") != AMP_OK || pictures_read(&test, folder, "t10k") != AMP_OK) {
        printf("%s\nlearning SYNTHETIC pictures instead\n", example_error());
        CHECK(pictures_synthetic(&train, 20000, PIXELS, CLASSES, 1));
        CHECK(pictures_synthetic(&test, 5000, PIXELS, CLASSES, 2));
    }
    CHECK(amp_open(&amp, NULL));
    CHECK(amp_query_choice(amp, &choice));
    printf("%s: %s\n", amp_dtype_name(choice.dtype), choice.reason);
    make_network();
    scaler_desc.disable = !choice.scaler;           /* only fp16 needs one */
    desc.params = params; desc.n_params = 4; desc.lr = 1e-3f; desc.weight_decay = 0.01f;
    CHECK(amp_scaler_create(amp, &scaler, &scaler_desc));
    CHECK(amp_optimizer_create(amp, &adamw, &desc));
    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        for (int64_t i = 0; i + BATCH <= train.n; i += BATCH) {
            forward(&train, i, 1, amp_scaler_seed(scaler));
            CHECK(amp_linear_backward(amp, &second));
            CHECK(amp_linear_backward(amp, &first));
            CHECK(amp_step(adamw, scaler));         /* check, AdamW, new scale */
        }
        printf("epoch %d: loss %.4f, test accuracy %.2f%%\n", epoch, (double)*loss.loss, 100 * accuracy(&test));
    }
    return 0;
}
