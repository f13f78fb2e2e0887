/* quickstart.c - the shortest complete use of amp.h: a classifier for Fashion-MNIST in mixed precision.
 *
 *     gcc -O2 examples/quickstart.c -o quickstart -lm -lpthread && ./quickstart [folder of the IDX files]
 *
 * Built with -DUSE_CUDA and amp_cuda.o it runs on the GPU: everything but the reports is in device memory.
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

/* Device memory for n values of 4 bytes: a copy of host memory, or zeros. */
static void *on_device(const void *host, int64_t n) {
    void *p;
    CHECK(amp_alloc(amp, &p, 4 * n));
    CHECK(host ? amp_copy(amp, p, host, 4 * n, AMP_COPY_TO_DEVICE) : amp_fill(amp, p, 0, 4 * n));
    CHECK(amp_sync(amp));
    return p;
}
static float *zeros(int64_t n) { return (float *)on_device(NULL, n); }
static void to_host(void *host, const void *device, int64_t n) {
    CHECK(amp_copy(amp, host, device, 4 * n, AMP_COPY_TO_HOST));
    CHECK(amp_sync(amp));
}

/* A parameter and its gradient: a matrix, or a vector if cols is 0. */
static void make_param(amp_param *p, const char *name, int64_t rows, int64_t cols) {
    static float start[HIDDEN * PIXELS];
    int64_t n = cols > 0 ? rows * cols : rows;
    memset(start, 0, sizeof start);
    if (cols > 0) random_normal(start, n, 1, (uint64_t)cols, (float)sqrt(2.0 / (double)cols));
    p->name = name;
    p->weight =
        cols > 0 ? amp_tensor2(on_device(start, n), AMP_F32, rows, cols) : amp_tensor1(on_device(start, n), AMP_F32, n);
    p->grad = cols > 0 ? amp_tensor2(zeros(n), AMP_F32, rows, cols) : amp_tensor1(zeros(n), AMP_F32, n);
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

/* Pictures and labels in device memory. */
typedef struct device_pictures { float *x; int32_t *y; } device_pictures;
static device_pictures upload(const pictures *p) {
    device_pictures d;
    d.x = (float *)on_device(p->x, p->n * PIXELS);
    d.y = (int32_t *)on_device(p->y, p->n);
    return d;
}

/* The loss of pictures i to i + BATCH; with training the logits become their gradient. */
static void forward(const device_pictures *data, int64_t i, int training, const float *grad_scale) {
    first.x = amp_tensor2(data->x + i * PIXELS, AMP_F32, BATCH, PIXELS);
    loss.labels = data->y + i;
    loss.grad_scale = grad_scale;
    loss.dlogits = second.y;
    if (!training) loss.dlogits.data = NULL;
    CHECK(amp_autocast_begin(amp, NULL));
    CHECK(amp_linear(amp, &first));
    CHECK(amp_linear(amp, &second));
    CHECK(amp_cross_entropy(amp, &loss));
    CHECK(amp_autocast_end(amp));
}

static double accuracy(const pictures *data, const device_pictures *there) {
    int64_t right = 0, n = data->n / BATCH * BATCH;
    float logits[BATCH * CLASSES];
    for (int64_t i = 0; i < n; i += BATCH) {
        forward(there, i, 0, NULL);
        to_host(logits, second.y.data, BATCH * CLASSES);
        for (int row = 0; row < BATCH; row++) right += largest_of(logits + row * CLASSES, CLASSES) == data->y[i + row];
    }
    return (double)right / (double)n;
}

int main(int argc, char **argv) {
    const char *folder = argc > 1 ? argv[1] : "/usr/share/datasets/fashion-mnist";
    pictures train, test;
    amp_scaler *scaler; amp_scaler_desc scaler_desc = {0};
    amp_optimizer *adamw; amp_optimizer_desc desc = {0};
    amp_choice choice; amp_desc settings = {0};
    device_pictures train_there, test_there;
    float value;
    program_begin();
    if (pictures_read(&train, folder, "train") != AMP_OK || pictures_read(&test, folder, "t10k") != AMP_OK) {
        printf("%s\nlearning SYNTHETIC pictures instead\n", example_error());
        CHECK(pictures_synthetic(&train, 20000, PIXELS, CLASSES, 1));
        CHECK(pictures_synthetic(&test, 5000, PIXELS, CLASSES, 2));
    }
    CHECK(device_open(&amp, &settings, "auto"));
    CHECK(amp_query_choice(amp, &choice));
    printf("%s: %s\n", amp_dtype_name(choice.dtype), choice.reason);
    make_network();
    train_there = upload(&train); test_there = upload(&test);
    scaler_desc.disable = !choice.scaler;           /* only fp16 needs a scaler */
    desc.params = params; desc.n_params = 4; desc.lr = 1e-3f; desc.weight_decay = 0.01f;
    CHECK(amp_scaler_create(amp, &scaler, &scaler_desc));
    CHECK(amp_optimizer_create(amp, &adamw, &desc));
    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        for (int64_t i = 0; i + BATCH <= train.n; i += BATCH) {
            forward(&train_there, i, 1, amp_scaler_scale_ptr(scaler));
            CHECK(amp_linear_backward(amp, &second));
            CHECK(amp_linear_backward(amp, &first));
            CHECK(amp_step(adamw, scaler));         /* check, AdamW, new scale */
        }
        to_host(&value, loss.loss, 1);
        printf("epoch %d: loss %.4f, test accuracy %.2f%%\n", epoch, (double)value, 100 * accuracy(&test, &test_there));
    }
    return 0;
}
