/* t_kernels.c - compares the bandwidth-bound CPU kernels with fp64 references, on every path of this CPU.
 *
 * The references are written here, and the bounds are derived.  U = 2^-24 is the relative error of one fp32 operation, and
 * each check counts the operations between input and output.  A sum of n terms in L lanes has an error of at most (n / L +
 * log2 L) U times the sum of magnitudes.  Exponentials, tanh and erf are documented to be within 2 ulp, which is 4 U.
 * Storing adds half an ulp of the storage format. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "golden.h"
#include "parallel.h"
#include "test.h"

static const double U = 1.0 / 16777216.0;
static const amp_dtype storages[] = {AMP_F32, AMP_F16, AMP_BF16};
enum { STORAGES = 3 };

/* ---- Numbers, tested by their bits because this program is also built with -Ofast */

static int is_nan(double x) {
    uint64_t b;
    memcpy(&b, &x, 8);
    return (b & ~((uint64_t)1 << 63)) > (uint64_t)0x7ff << 52;
}
static int is_inf(double x) {
    uint64_t b;
    memcpy(&b, &x, 8);
    return (b & ~((uint64_t)1 << 63)) == (uint64_t)0x7ff << 52;
}
static double make_nan(void) { return ampi_f64_of_bits((uint64_t)0x7ff8 << 48); }
static float float_nan(void) { return ampi_f32_of_bits(0x7fc00000u); }
static float float_inf(void) { return ampi_f32_of_bits(0x7f800000u); }

/* Half an ulp of a format, relative; and its absolute error near 0 (fp32 and bf16: subnormals may be flushed). */
static double unit(amp_dtype d) { return d == AMP_F16 ? 1.0 / 2048 : d == AMP_BF16 ? 1.0 / 256 : U; }
static double tiny(amp_dtype d) { return d == AMP_F16 ? ldexp(1.0, -25) : ldexp(1.0, -125); }

static int kernels_close_to(double got, double exact, double error, amp_dtype storage) {
    if (is_nan(exact)) return is_nan(got);
    if (is_inf(exact)) return is_inf(got) && (got > 0) == (exact > 0);
    if (is_nan(got) || is_inf(got)) return 0;
    return fabs(got - exact) <=
           error + (storage == AMP_F32 && error == 0 ? 0 : unit(storage)) * (fabs(exact) + error) + tiny(storage);
}

/* ---- Matrices of any storage type, with a gap of `gap` elements after each row */

typedef struct kernels_matrix { amp_dtype dtype; int64_t rows, cols, ld; size_t bytes; unsigned char *data, *before; } kernels_matrix;

static kernels_matrix kernels_make(amp_dtype dtype, int64_t rows, int64_t cols, int64_t gap) {
    kernels_matrix m;
    m.dtype = dtype; m.rows = rows; m.cols = cols; m.ld = cols + gap;
    m.bytes = (size_t)(rows * m.ld) * amp_dtype_size(dtype);
    m.data = (unsigned char *)malloc(m.bytes + 64);
    m.before = (unsigned char *)malloc(m.bytes + 64);
    memset(m.data, 0x35, m.bytes + 64);
    return m;
}
static void drop(kernels_matrix *m) { free(m->data); free(m->before); m->data = m->before = NULL; }

static double get(const kernels_matrix *m, int64_t row, int64_t col) {
    const unsigned char *p = m->data + (size_t)(row * m->ld + col) * amp_dtype_size(m->dtype);
    uint16_t h;
    float f;
    if (m->dtype == AMP_F32) { memcpy(&f, p, 4); return (double)f; }
    memcpy(&h, p, 2);
    return (double)(m->dtype == AMP_F16 ? amp_f32_from_f16(h) : amp_f32_from_bf16(h));
}
static void set(kernels_matrix *m, int64_t row, int64_t col, float value) {
    ampi_convert_fast(m->data + (size_t)(row * m->ld + col) * amp_dtype_size(m->dtype), m->dtype, &value, AMP_F32, 1,
                      AMP_CPU_SCALAR);
}
/* shift + scale u, u in [-1, 1), rounded to the storage type */
static void kernels_fill(kernels_matrix *m, uint32_t seed, uint32_t stream, float scale, float shift) {
    float *row = (float *)malloc((size_t)m->cols * 4 + 4);
    for (int64_t i = 0; i < m->rows; i++) {
        ampt_uniform(row, m->cols, seed, stream + 64 * (uint32_t)i, scale, shift);
        ampi_convert_fast(m->data + (size_t)(i * m->ld) * amp_dtype_size(m->dtype), m->dtype, row, AMP_F32, m->cols,
                          AMP_CPU_SCALAR);
    }
    free(row);
}
static amp_mat mat(const kernels_matrix *m) {
    amp_mat a;
    memset(&a, 0, sizeof a);
    a.data = m->data; a.dtype = m->dtype; a.rows = m->rows; a.cols = m->cols; a.ld = m->ld;
    return a;
}
static int same_bytes(const kernels_matrix *a, const kernels_matrix *b) {
    return a->bytes == b->bytes && memcmp(a->data, b->data, a->bytes) == 0;
}

/* ---- Devices */

static int alloc_fails;
static void *kernels_host_alloc(void *user, size_t size, size_t align) {
    (void)user;
    return alloc_fails ? NULL : ampi_os_alloc(NULL, size, align);
}
static void kernels_host_free(void *user, void *ptr, size_t size) { (void)user; (void)size; free(ptr); }

static ampi_cpu kernels_device(amp_cpu_path path, int threads) {
    ampi_cpu cpu;
    memset(&cpu, 0, sizeof cpu);
    cpu.host.alloc = kernels_host_alloc;
    cpu.host.free = kernels_host_free;
    cpu.host.parallel = ampt_parallel;
    cpu.threads = threads;
    cpu.path = path;
    return cpu;
}
static int paths(void) { return (int)ampi_cpu_best_path(); }
static int width(amp_cpu_path path) { return path >= AMP_CPU_NEON ? 4 : path >= AMP_CPU_AVX512 ? 16 : path == AMP_CPU_AVX2 ? 8 : 4; }

typedef amp_result (*kernel)(void *dev, const void *args, void *stream);
#define KERNEL(name, type)                                                                                             \
    static amp_result run_##name(void *dev, const void *args, void *stream) {                                          \
        return name(dev, (const type *)args, stream);                                                                  \
    }
KERNEL(ampi_cpu_cast, amp_k_cast)
KERNEL(ampi_cpu_norm, amp_k_norm)
KERNEL(ampi_cpu_norm_backward, amp_k_norm)
KERNEL(ampi_cpu_activation, amp_k_activation)
KERNEL(ampi_cpu_activation_backward, amp_k_activation)
KERNEL(ampi_cpu_swiglu, amp_k_swiglu)
KERNEL(ampi_cpu_swiglu_backward, amp_k_swiglu)
KERNEL(ampi_cpu_cross_entropy, amp_k_cross_entropy)
KERNEL(ampi_cpu_mse, amp_k_mse)
KERNEL(ampi_cpu_embedding, amp_k_embedding)
KERNEL(ampi_cpu_embedding_backward, amp_k_embedding)
KERNEL(ampi_cpu_dropout, amp_k_dropout)
KERNEL(ampi_cpu_rope, amp_k_rope)
KERNEL(ampi_cpu_add, amp_k_add)

/* Runs a kernel with 1, 2 and 3 threads from the same start: the outputs must have the same bits, and gaps between
   rows must stay as they were.  Leaves the outputs of the run with 1 thread. */
static void run_kernel(const char *name, kernel k, const void *args, amp_cpu_path path, kernels_matrix **out, int outs) {
    unsigned char *first[8];
    for (int o = 0; o < outs; o++) {
        memcpy(out[o]->before, out[o]->data, out[o]->bytes);
        first[o] = (unsigned char *)malloc(out[o]->bytes + 1);
    }
    for (int threads = 1; threads <= 3; threads++) {
        ampi_cpu cpu = kernels_device(path, threads);
        for (int o = 0; o < outs; o++) memcpy(out[o]->data, out[o]->before, out[o]->bytes);
        CHECK_OK(k(&cpu, args, NULL));
        for (int o = 0; o < outs; o++) {
            if (threads == 1) memcpy(first[o], out[o]->data, out[o]->bytes);
            else
                CHECK_MSG(memcmp(first[o], out[o]->data, out[o]->bytes) == 0, "%s: output %d, %d threads, path %d",
                          name, o, threads, (int)path);
        }
    }
    for (int o = 0; o < outs; o++) {
        size_t size = amp_dtype_size(out[o]->dtype), row = (size_t)out[o]->ld * size,
               used = (size_t)out[o]->cols * size;
        memcpy(out[o]->data, first[o], out[o]->bytes);
        for (int64_t i = 0; i < out[o]->rows; i++)
            CHECK_MSG(
                memcmp(out[o]->data + (size_t)i * row + used, out[o]->before + (size_t)i * row + used, row - used) == 0,
                "%s: gap after row %lld", name, (long long)i);
        free(first[o]);
    }
}
#define RUN_KERNEL(fn, args, path, out, outs) run_kernel(#fn, run_##fn, args, path, out, outs)
#define CHECK_CLOSE(got, exact, error, dtype, ...) \
    do { double got_ = (got), exact_ = (exact), error_ = (error); \
         if (!ampt_check(kernels_close_to(got_, exact_, error_, dtype), "close", __FILE__, __LINE__)) { \
             printf("      got %.9g, exact %.9g, error %.3g allowed %.3g: ", got_, exact_, fabs(got_ - exact_), \
                    error_ + unit(dtype) * fabs(exact_)); printf(__VA_ARGS__); printf("\n"); } } while (0)

static const int64_t lengths[] = {0, 13, 39, 1820, 50000};
enum { LENGTHS = 5 };

typedef struct shape { int64_t rows, cols; } shape;
static const shape kernels_shapes[] = {{0, 5}, {1, 1}, {5, 1}, {2, 16}, {3, 33}, {1000, 7}, {3, 1025}, {70, 769}};
enum { SHAPES = sizeof kernels_shapes / sizeof *kernels_shapes };

/* ---- Activations: value, slope and their bounds in fp64 */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double normal(double x) { return 0.5 * erfc(-x * 0.70710678118654752); }
static double density(double x) { return 0.39894228040143268 * exp(-0.5 * x * x); }
static double gelu_inner(double x) { return 1.5957691216057308 * (x + 0.044715 * x * x * x); }

static double act(amp_activation_kind kind, double x) {
    switch (kind) {
        case AMP_ACT_GELU: return x * sigmoid(gelu_inner(x));
        case AMP_ACT_GELU_ERF: return x * normal(x);
        case AMP_ACT_TANH: return tanh(x);
        case AMP_ACT_SILU: return x * sigmoid(x);
        case AMP_ACT_RELU: return x > 0 ? x : 0;
        default: return x;
    }
}
/* The vector exponential is 0 below exp(-87.3), just above the smallest normal number. */
static double flushed(void) { return exp(-87.3); }

/* sigmoid: exponential 4 U, sum and quotient 2 U; GELU's argument has 5 roundings; normal: erf 4 U, its argument 2 U */
static double normal_error(double x) {
    return U * (2 * fabs(2 * normal(x) - 1) + 2 * fabs(x) * density(x) + 2 * normal(x));
}
static double act_error(amp_activation_kind kind, double x) {
    double z = gelu_inner(x), s = sigmoid(z);
    switch (kind) {
        case AMP_ACT_GELU: return U * fabs(x) * (7 * s + 5 * fabs(z) * s * (1 - s)) + fabs(x) * flushed();
        case AMP_ACT_GELU_ERF: return fabs(x) * (normal_error(x) + U * normal(x));
        case AMP_ACT_TANH: return 4 * U * fabs(tanh(x));
        case AMP_ACT_SILU: return 7 * U * fabs(x) * sigmoid(x) + fabs(x) * flushed();
        default: return 0;
    }
}
static double slope(amp_activation_kind kind, double x) {
    double z = gelu_inner(x), s = kind == AMP_ACT_GELU ? sigmoid(z) : sigmoid(x);
    switch (kind) {
        case AMP_ACT_GELU: return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 3 * 0.044715 * x * x);
        case AMP_ACT_GELU_ERF: return normal(x) + x * density(x);
        case AMP_ACT_TANH: return 1 - tanh(x) * tanh(x);
        case AMP_ACT_SILU: return s * (1 + x * (1 - s));
        case AMP_ACT_RELU: return x > 0 ? 1 : 0;
        default: return 1;
    }
}
static double slope_error(amp_activation_kind kind, double x) {
    double z = gelu_inner(x), inner = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x);
    double s = kind == AMP_ACT_GELU ? sigmoid(z) : sigmoid(x);
    double es = U * (6 * s + (kind == AMP_ACT_GELU ? 5 * fabs(z) * s * (1 - s) : 0)) +
                flushed(); /* of s; 1 - s has es + U (1 - s) */
    switch (kind) {
        case AMP_ACT_GELU:
            return 2 * es + fabs(x * inner) * (es * (1 - s) + s * es + 8 * U * s * (1 - s)) +
                   2 * U * fabs(slope(kind, x));
        case AMP_ACT_GELU_ERF:
            return normal_error(x) + U * (8 + x * x) * fabs(x) * density(x) + fabs(x) * flushed() +
                   2 * U * fabs(slope(kind, x));
        case AMP_ACT_TANH: return 8 * U * tanh(x) * tanh(x) + 3 * U;
        case AMP_ACT_SILU:
            return es * fabs(1 + x * (1 - s)) + s * (fabs(x) * (es + 3 * U * (1 - s)) + 2 * U) +
                   U * fabs(slope(kind, x));
        default: return 0;
    }
}

static amp_k_activation activation_args(amp_activation_kind kind, const kernels_matrix *x, const kernels_matrix *y, const kernels_matrix *dy,
                                        const kernels_matrix *dx) {
    amp_k_activation a;
    memset(&a, 0, sizeof a);
    a.act = kind; a.x_dtype = x->dtype; a.y_dtype = y->dtype; a.n = x->rows * x->cols;
    a.x = x->data; a.y = y->data;
    if (dy) { a.dy = dy->data; a.dx = dx->data; }
    return a;
}

/* Forward and backward of one kind; tanh's backward starts from its stored y. */
static void check_activation(amp_activation_kind kind, int64_t n, amp_dtype x_dtype, amp_dtype y_dtype,
                             amp_cpu_path path) {
    kernels_matrix x = kernels_make(x_dtype, 1, n, 0), y = kernels_make(y_dtype, 1, n, 0), dy = kernels_make(y_dtype, 1, n, 0),
           dx = kernels_make(x_dtype, 1, n, 0);
    kernels_matrix *forward = &y, *backward = &dx;
    amp_k_activation a = activation_args(kind, &x, &y, &dy, &dx);
    kernels_fill(&x, 1, 0, 12, 0);
    kernels_fill(&dy, 1, 1, 2, 0);
    RUN_KERNEL(ampi_cpu_activation, &a, path, &forward, 1);
    RUN_KERNEL(ampi_cpu_activation_backward, &a, path, &backward, 1);
    for (int64_t i = 0; i < n; i++) {
        double v = get(&x, 0, i), d = get(&dy, 0, i), s = slope(kind, v), e = slope_error(kind, v);
        if (kind == AMP_ACT_TANH) { s = 1 - get(&y, 0, i) * get(&y, 0, i); e = 2 * U; }
        CHECK_CLOSE(get(&y, 0, i), act(kind, v), act_error(kind, v), y_dtype, "act %d of %g, path %d", (int)kind, v,
                    (int)path);
        CHECK_CLOSE(get(&dx, 0, i), d * s, fabs(d) * e + U * fabs(d * s), x_dtype, "slope %d of %g, path %d", (int)kind,
                    v, (int)path);
    }
    drop(&x); drop(&y); drop(&dy); drop(&dx);
}

TEST(activations) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int kind = AMP_ACT_NONE; kind <= AMP_ACT_RELU; kind++)
            for (int i = 0; i < SHAPES; i++) {
                int whole = i == SHAPES - 1;            /* the large shape with fewer dtypes, to save time */
                for (int in = 0; in < STORAGES; in++)
                    for (int out = 0; out < (whole ? 1 : STORAGES); out++)
                        check_activation((amp_activation_kind)kind, kernels_shapes[i].rows * kernels_shapes[i].cols, storages[in],
                                         whole ? storages[in] : storages[out], (amp_cpu_path)path);
            }
}

/* The functions that GEMM calls: in place, and tanh from its input. */
TEST(activation_rows) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int kind = AMP_ACT_NONE; kind <= AMP_ACT_RELU; kind++)
            for (int64_t n = 0; n < 70; n++) {
                const ampi_pointwise_vec *vec = AMPI_PICK(ampi_pointwise_kernels, (amp_cpu_path)path);
                float x[70], dy[70], y[70], dx[70], copy[70];
                ampt_uniform(x, n, 2, 0, 5, 0);
                ampt_uniform(dy, n, 2, 1, 5, 0);
                vec->activation((amp_activation_kind)kind, x, y, n);
                memcpy(copy, x, sizeof x);
                vec->activation((amp_activation_kind)kind, copy, copy, n);
                CHECK(memcmp(copy, y, (size_t)n * 4) == 0);
                vec->activation_backward((amp_activation_kind)kind, x, dy, dx, n);
                memcpy(copy, dy, sizeof dy);
                vec->activation_backward((amp_activation_kind)kind, x, copy, copy, n);
                CHECK(memcmp(copy, dx, (size_t)n * 4) == 0);
                for (int64_t i = 0; i < n; i++) {
                    double s = slope((amp_activation_kind)kind, (double)x[i]), d = (double)dy[i];
                    CHECK_CLOSE((double)dx[i], d * s,
                                fabs(d) * slope_error((amp_activation_kind)kind, (double)x[i]) + U * fabs(d * s),
                                AMP_F32, "kind %d x %g path %d", kind, (double)x[i], path);
                }
            }
}

TEST(activation_special_values) {
    float nan = float_nan(), inf = float_inf(), x[6], y[6], dy[6] = {1, 1, 1, 1, 1, 1}, dx[6];
    x[0] = nan; x[1] = -nan; x[2] = inf; x[3] = -inf; x[4] = 1e30f; x[5] = -1e30f;
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int kind = AMP_ACT_GELU; kind <= AMP_ACT_RELU; kind++) {
            const ampi_pointwise_vec *vec = AMPI_PICK(ampi_pointwise_kernels, (amp_cpu_path)path);
            double high = kind == AMP_ACT_TANH ? 1 : 1e30, low = kind == AMP_ACT_TANH ? -1 : 0,
                   s = kind == AMP_ACT_TANH ? 0 : 1;
            vec->activation((amp_activation_kind)kind, x, y, 6);
            vec->activation_backward((amp_activation_kind)kind, x, dy, dx, 6);
            CHECK_MSG(is_nan((double)y[0]) && is_nan((double)y[1]), "kind %d, path %d", kind, path);
            CHECK(kind == AMP_ACT_TANH ? y[2] == 1 : is_inf((double)y[2]) && y[2] > 0);
            if (kind == AMP_ACT_TANH) CHECK(y[3] == -1);
            else if (kind == AMP_ACT_RELU) CHECK(y[3] == 0);
            else CHECK(is_nan((double)y[3]));                   /* -inf times 0, as in PyTorch */
            CHECK_CLOSE((double)y[4], high, high * 7 * U, AMP_F32, "kind %d of 1e30", kind);
            CHECK_CLOSE((double)y[5], low, 0, AMP_F32, "kind %d of -1e30", kind);
            CHECK_CLOSE((double)dx[4], s, 8 * U, AMP_F32, "slope %d of 1e30", kind);
            CHECK_CLOSE((double)dx[5], 0, 0, AMP_F32, "slope %d of -1e30", kind);
            CHECK_CLOSE((double)dx[2], s, 0, AMP_F32, "slope %d of inf", kind);
            CHECK_CLOSE((double)dx[3], 0, 0, AMP_F32, "slope %d of -inf", kind);
            if (kind == AMP_ACT_RELU) CHECK(dx[0] == 1 && dx[1] == 1);
            else CHECK(is_nan((double)dx[0]) && is_nan((double)dx[1]));
        }
}

/* y over x, dx over dy, in every storage type; tanh and ReLU also after their x is gone. */
TEST(activation_in_place) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int kind = AMP_ACT_GELU; kind <= AMP_ACT_RELU; kind++)
            for (int d = 0; d < STORAGES; d++) {
                kernels_matrix x = kernels_make(storages[d], 1, 1500, 0), y = kernels_make(storages[d], 1, 1500, 0),
                       dy = kernels_make(storages[d], 1, 1500, 0);
                kernels_matrix dx = kernels_make(storages[d], 1, 1500, 0);
                ampi_cpu cpu = kernels_device((amp_cpu_path)path, 2);
                amp_k_activation a = activation_args((amp_activation_kind)kind, &x, &y, &dy, &dx);
                kernels_fill(&x, 3, 0, 4, 0);
                kernels_fill(&dy, 3, 1, 4, 0);
                CHECK_OK(ampi_cpu_activation(&cpu, &a, NULL));
                CHECK_OK(ampi_cpu_activation_backward(&cpu, &a, NULL));
                a.dx = dy.data;
                CHECK_OK(ampi_cpu_activation_backward(&cpu, &a, NULL));
                CHECK(same_bytes(&dx, &dy));
                a.y = x.data;
                CHECK_OK(ampi_cpu_activation(&cpu, &a, NULL));
                CHECK(same_bytes(&x, &y));
                if (kind == AMP_ACT_TANH || kind == AMP_ACT_RELU) {
                    kernels_fill(&dy, 3, 1, 4, 0);
                    CHECK_OK(ampi_cpu_activation_backward(&cpu, &a, NULL));
                    CHECK(same_bytes(&dx, &dy));
                }
                drop(&x); drop(&y); drop(&dy); drop(&dx);
            }
}

/* ---- SwiGLU: gate and up are halves of one buffer, so that rows have gaps */

static void check_swiglu(int64_t rows, int64_t cols, int64_t gap, amp_dtype in, amp_dtype out, amp_cpu_path path) {
    kernels_matrix both = kernels_make(in, rows, 2 * cols, 0), y = kernels_make(out, rows, cols, gap), dy = kernels_make(out, rows, cols, gap);
    kernels_matrix dgate = kernels_make(in, rows, cols, gap), dup = kernels_make(in, rows, cols, 2 * gap), gate = both, up = both;
    kernels_matrix *forward = &y, *backward[2];
    amp_k_swiglu a;
    gate.cols = up.cols = cols;
    up.data = both.data + (size_t)cols * amp_dtype_size(in);
    memset(&a, 0, sizeof a);
    a.gate = mat(&gate); a.up = mat(&up); a.y = mat(&y); a.dy = mat(&dy); a.dgate = mat(&dgate); a.dup = mat(&dup);
    backward[0] = &dgate; backward[1] = &dup;
    kernels_fill(&both, 4, 0, 6, 0);
    kernels_fill(&dy, 4, 1, 2, 0);
    RUN_KERNEL(ampi_cpu_swiglu, &a, path, &forward, 1);
    RUN_KERNEL(ampi_cpu_swiglu_backward, &a, path, backward, 2);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) {
            double g = get(&gate, i, j), u = get(&up, i, j), d = get(&dy, i, j), s = act(AMP_ACT_SILU, g),
                   t = slope(AMP_ACT_SILU, g);
            CHECK_CLOSE(get(&y, i, j), s * u, fabs(u) * (act_error(AMP_ACT_SILU, g) + U * fabs(s)), out, "y");
            CHECK_CLOSE(get(&dup, i, j), d * s, fabs(d) * (act_error(AMP_ACT_SILU, g) + 2 * U * fabs(s)), in, "dup");
            CHECK_CLOSE(get(&dgate, i, j), d * u * t, fabs(d * u) * (slope_error(AMP_ACT_SILU, g) + 3 * U * fabs(t)),
                        in, "dgate");
        }
    drop(&both); drop(&y); drop(&dy); drop(&dgate); drop(&dup);
}

TEST(swiglu) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int i = 0; i < SHAPES; i++)
            for (int in = 0; in < STORAGES; in++)
                for (int out = 0; out < STORAGES; out++)
                    check_swiglu(kernels_shapes[i].rows, kernels_shapes[i].cols, i % 2 ? 3 : 0, storages[in], storages[out],
                                 (amp_cpu_path)path);
}

/* A bias gives the bits of a sum that was made before: forward and backward of every kind, and of SwiGLU. */
static void check_biased(int64_t rows, int64_t cols, amp_dtype bias_dtype, amp_cpu_path path) {
    kernels_matrix x = kernels_make(AMP_F32, rows, cols, 0), up = kernels_make(AMP_F32, rows, cols, 0), bias = kernels_make(bias_dtype, 1, cols, 0);
    kernels_matrix sum = kernels_make(AMP_F32, rows, cols, 0), dy = kernels_make(AMP_F32, rows, cols, 0);
    kernels_matrix out[3], expected[3];
    ampi_cpu cpu = kernels_device(path, 2);
    amp_k_swiglu s;
    for (int i = 0; i < 3; i++) { out[i] = kernels_make(AMP_F32, rows, cols, 0); expected[i] = kernels_make(AMP_F32, rows, cols, 0); }
    kernels_fill(&x, 5, 0, 4, 0); kernels_fill(&up, 5, 1, 4, 0); kernels_fill(&bias, 5, 2, 4, 0); kernels_fill(&dy, 5, 3, 4, 0);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            ((float *)(void *)sum.data)[i * cols + j] = (float)get(&x, i, j) + (float)get(&bias, 0, j);
    for (int kind = AMP_ACT_GELU; kind <= AMP_ACT_RELU; kind++) {
        amp_k_activation a = activation_args((amp_activation_kind)kind, &sum, &expected[0], &dy, &expected[1]);
        CHECK_OK(ampi_cpu_activation(&cpu, &a, NULL));
        CHECK_OK(ampi_cpu_activation_backward(&cpu, &a, NULL));
        a.x = x.data; a.y = out[0].data; a.dx = out[1].data;
        a.bias = bias.data; a.bias_dtype = bias_dtype; a.cols = cols;
        CHECK_OK(ampi_cpu_activation(&cpu, &a, NULL));
        CHECK_OK(ampi_cpu_activation_backward(&cpu, &a, NULL));
        CHECK(same_bytes(&out[0], &expected[0]) && same_bytes(&out[1], &expected[1]));
    }
    memset(&s, 0, sizeof s);
    s.gate = mat(&sum); s.up = mat(&sum); s.y = mat(&expected[0]);
    s.dy = mat(&dy); s.dgate = mat(&expected[1]); s.dup = mat(&expected[2]);
    CHECK_OK(ampi_cpu_swiglu(&cpu, &s, NULL));
    CHECK_OK(ampi_cpu_swiglu_backward(&cpu, &s, NULL));
    s.gate = s.up = mat(&x); s.y = mat(&out[0]); s.dgate = mat(&out[1]); s.dup = mat(&out[2]);
    s.gate_bias = s.up_bias = bias.data; s.gate_bias_dtype = s.up_bias_dtype = bias_dtype;
    CHECK_OK(ampi_cpu_swiglu(&cpu, &s, NULL));
    CHECK_OK(ampi_cpu_swiglu_backward(&cpu, &s, NULL));
    for (int i = 0; i < 3; i++) { CHECK(same_bytes(&out[i], &expected[i])); drop(&out[i]); drop(&expected[i]); }
    drop(&x); drop(&up); drop(&bias); drop(&sum); drop(&dy);
}

TEST(activation_biases) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int i = 0; i < SHAPES - 1; i++)
            for (int d = 0; d < STORAGES; d++) check_biased(kernels_shapes[i].rows, kernels_shapes[i].cols, storages[d], (amp_cpu_path)path);
}

/* ---- LayerNorm and RMSNorm */

typedef struct norm_case { int rms, weight, bias, residual, sum, add, wanted; } norm_case;
static const norm_case norm_cases[] = {
    {0, 1, 1, 0, 0, 0, 3}, {0, 0, 0, 0, 0, 0, 0}, {0, 1, 1, 1, 1, 1, 3}, {0, 1, 0, 1, 0, 0, 1}, {0, 0, 1, 0, 0, 1, 2},
    {1, 1, 0, 0, 0, 0, 1}, {1, 1, 0, 1, 1, 1, 1}, {1, 0, 0, 0, 0, 0, 0}};
enum { NORM_CASES = sizeof norm_cases / sizeof *norm_cases };
static const float norm_eps = 1e-5f;

static double log2_of(int lanes) { return lanes == 16 ? 6 : lanes == 8 ? 5 : 4; }    /* with the four accumulators */

typedef struct norm_stats { double mean, rstd, mean_error, rstd_error; } norm_stats;

/* Statistics of a row in fp64, and how far the kernel's may be off: the mean by the error of its sum and one rounding;
   the variance by the error of its sum, three roundings per term and the square of the mean's error. */
static norm_stats row_stats(const double *s, int64_t n, int rms, amp_cpu_path path) {
    norm_stats r;
    double depth = (double)AMPI_MIN(n, 1024) / (4 * width(path)) + log2_of(width(path)), sum = 0, magnitude = 0,
           square = 0, v;
    for (int64_t j = 0; j < n; j++) { sum += s[j]; magnitude += fabs(s[j]); }
    r.mean = rms ? 0 : sum / (double)n;
    r.mean_error = rms ? 0 : U * (depth * magnitude / (double)n + fabs(r.mean));
    for (int64_t j = 0; j < n; j++) square += (s[j] - r.mean) * (s[j] - r.mean);
    square /= (double)n;
    r.rstd = 1 / sqrt(square + (double)norm_eps);
    v = ((depth + 3) * U * square + r.mean_error * r.mean_error) / (square + (double)norm_eps);
    r.rstd_error = v / 2 + v * v + U;                   /* relative */
    return r;
}

static void check_norm_forward(const norm_case *c, int64_t rows, int64_t cols, int64_t gap, amp_dtype xd, amp_dtype yd,
                               amp_dtype wd, amp_cpu_path path) {
    kernels_matrix x = kernels_make(xd, rows, cols, gap), residual = kernels_make(yd, rows, cols, 0), sum = kernels_make(xd, rows, cols, 2 * gap),
           y = kernels_make(yd, rows, cols, gap);
    kernels_matrix w = kernels_make(wd, 1, cols, 0), b = kernels_make(wd, 1, cols, 0), mean = kernels_make(AMP_F32, 1, rows, 0),
           rstd = kernels_make(AMP_F32, 1, rows, 0);
    kernels_matrix *out[4];
    double *s = (double *)malloc((size_t)cols * 8);
    amp_k_norm a;
    kernels_fill(&x, 5, 0, 2, 1.5f); kernels_fill(&residual, 5, 1, 1, 0); kernels_fill(&w, 5, 2, 0.5f, 1); kernels_fill(&b, 5, 3, 1, 0);
    memset(&a, 0, sizeof a);
    a.rms = c->rms; a.eps = norm_eps; a.x = mat(&x); a.y = mat(&y); a.weight_dtype = wd;
    if (c->residual) a.residual = mat(&residual);
    if (c->sum) a.sum = mat(&sum);
    if (c->weight) a.weight = w.data;
    if (c->bias) a.bias = b.data;
    a.mean = (float *)(void *)mean.data; a.rstd = (float *)(void *)rstd.data;
    out[0] = &y; out[1] = &sum; out[2] = &mean; out[3] = &rstd;
    RUN_KERNEL(ampi_cpu_norm, &a, path, out, 4);
    for (int64_t i = 0; i < rows; i++) {
        norm_stats t;
        for (int64_t j = 0; j < cols; j++) {
            double exact = get(&x, i, j) + (c->residual ? get(&residual, i, j) : 0);
            s[j] = c->sum ? get(&sum, i, j) : (double)(float)exact;
            CHECK_CLOSE(s[j], exact, c->residual ? U * fabs(exact) : 0, c->sum ? xd : AMP_F32, "sum");
        }
        t = row_stats(s, cols, c->rms, path);
        if (!c->rms) CHECK_CLOSE(get(&mean, 0, i), t.mean, t.mean_error, AMP_F32, "mean");
        CHECK_CLOSE(get(&rstd, 0, i), t.rstd, t.rstd * t.rstd_error, AMP_F32, "rstd");
        for (int64_t j = 0; j < cols; j++) {
            double h = (s[j] - t.mean) * t.rstd, weight = c->weight ? get(&w, 0, j) : 1,
                   bias = c->bias ? get(&b, 0, j) : 0;
            double h_error = t.rstd * t.mean_error * (1 + t.rstd_error) + fabs(h) * (2 * U + t.rstd_error);
            CHECK_CLOSE(get(&y, i, j), h * weight + bias,
                        fabs(weight) * h_error + U * (fabs(h * weight) + fabs(h * weight + bias)), yd,
                        "y (%lld, %lld) of %lld x %lld, path %d", (long long)i, (long long)j, (long long)rows,
                        (long long)cols, (int)path);
        }
    }
    free(s);
    drop(&x); drop(&residual); drop(&sum); drop(&y); drop(&w); drop(&b); drop(&mean); drop(&rstd);
}

/* dx = rstd (g - mean(g) - h mean(g h)) + dsum: 2 roundings in h, 1 in g, and the errors of two sums in single lanes */
static void check_norm_dx(const norm_case *c, const amp_k_norm *a, const kernels_matrix *m, int64_t i, amp_cpu_path path) {
    const kernels_matrix *x = &m[0], *dy = &m[1], *dsum = &m[2], *dx = &m[3], *w = &m[4];
    int64_t n = x->cols;
    double depth = (double)AMPI_MIN(n, 1024) / width(path) + log2_of(width(path)), r = (double)a->rstd[i],
           mean = c->rms ? 0 : (double)a->mean[i];
    double g_sum = 0, gh_sum = 0, g_size = 0, gh_size = 0;
    for (int64_t j = 0; j < n; j++) {
        double h = (get(x, i, j) - mean) * r, g = get(dy, i, j) * (c->weight ? get(w, 0, j) : 1);
        g_sum += g; gh_sum += g * h; g_size += fabs(g); gh_size += fabs(g * h);
    }
    g_sum /= (double)n; gh_sum /= (double)n; g_size /= (double)n; gh_size /= (double)n;
    if (c->rms) g_sum = g_size = 0;
    for (int64_t j = 0; j < n; j++) {
        double h = (get(x, i, j) - mean) * r, g = get(dy, i, j) * (c->weight ? get(w, 0, j) : 1),
               extra = c->sum ? get(dsum, i, j) : 0;
        double part = r * (g - g_sum - h * gh_sum),
               error = r * U *
                           ((depth + 3) * g_size + fabs(h) * (depth + 8) * gh_size + 3 * fabs(g) + 3 * fabs(g_sum) +
                            3 * fabs(h * gh_sum)) +
                       U * (fabs(part) + fabs(part + extra));
        CHECK_CLOSE(get(dx, i, j), part + extra, error, dx->dtype, "dx (%lld, %lld) of %lld columns, path %d",
                    (long long)i, (long long)j, (long long)n, (int)path);
    }
}

static void check_norm_backward(const norm_case *c, int64_t rows, int64_t cols, int64_t gap, amp_dtype xd, amp_dtype yd,
                                amp_dtype wd, amp_cpu_path path) {
    kernels_matrix m[5], dw = kernels_make(wd, 1, cols, 0), db = kernels_make(wd, 1, cols, 0), old_w = kernels_make(wd, 1, cols, 0),
                 old_b = kernels_make(wd, 1, cols, 0), *out[3];
    float *mean = (float *)malloc((size_t)rows * 4 + 4), *rstd = (float *)malloc((size_t)rows * 4 + 4);
    double adds = (double)(AMPI_MAX(16, (rows + 63) / 64) + 64), *s = (double *)malloc((size_t)cols * 8);
    amp_k_norm a;
    m[0] = kernels_make(xd, rows, cols, gap); m[1] = kernels_make(yd, rows, cols, gap); m[2] = kernels_make(xd, rows, cols, 0);
    m[3] = kernels_make(xd, rows, cols, gap); m[4] = kernels_make(wd, 1, cols, 0);
    kernels_fill(&m[0], 6, 0, 2, 1); kernels_fill(&m[1], 6, 1, 1, 0); kernels_fill(&m[2], 6, 2, 1, 0); kernels_fill(&m[4], 6, 3, 0.5f, 1);
    kernels_fill(&dw, 6, 4, 1, 0); kernels_fill(&db, 6, 5, 1, 0); kernels_fill(&old_w, 6, 4, 1, 0); kernels_fill(&old_b, 6, 5, 1, 0);
    for (int64_t i = 0; i < rows; i++) {
        norm_stats t;
        for (int64_t j = 0; j < cols; j++) s[j] = get(&m[0], i, j);
        t = row_stats(s, cols, c->rms, path);
        mean[i] = (float)t.mean; rstd[i] = (float)t.rstd;
    }
    memset(&a, 0, sizeof a);
    a.rms = c->rms;
    a.eps = norm_eps;
    a.x = mat(&m[0]);
    a.dy = mat(&m[1]);
    a.dx = mat(&m[3]);
    a.weight_dtype = a.dweight.dtype = a.dbias.dtype = wd;
    a.mean = c->rms ? NULL : mean; a.rstd = rstd; a.dweight.add = a.dbias.add = c->add;
    if (c->sum) a.dsum = mat(&m[2]);
    if (c->weight) a.weight = m[4].data;
    if (c->wanted & 1) a.dweight.data = dw.data;
    if (c->wanted & 2) a.dbias.data = db.data;
    out[0] = &m[3]; out[1] = &dw; out[2] = &db;
    RUN_KERNEL(ampi_cpu_norm_backward, &a, path, out, 3);
    for (int64_t i = 0; i < rows; i++) check_norm_dx(c, &a, m, i, path);
    for (int64_t j = 0; j < cols; j++) {
        double sum_w = 0, sum_b = 0, size_w = 0, size_b = 0, from_w = c->add ? get(&old_w, 0, j) : 0,
               from_b = c->add ? get(&old_b, 0, j) : 0;
        for (int64_t i = 0; i < rows; i++) {
            double h = (get(&m[0], i, j) - (c->rms ? 0 : (double)mean[i])) * (double)rstd[i], d = get(&m[1], i, j);
            sum_w += d * h; size_w += fabs(d * h); sum_b += d; size_b += fabs(d);
        }
        if (c->wanted & 1)
            CHECK_CLOSE(get(&dw, 0, j), from_w + sum_w, U * ((adds + 3) * size_w + fabs(from_w + sum_w)), wd,
                        "dweight");
        else CHECK(get(&dw, 0, j) == get(&old_w, 0, j));
        if (c->wanted & 2)
            CHECK_CLOSE(get(&db, 0, j), from_b + sum_b, U * (adds * size_b + fabs(from_b + sum_b)), wd, "dbias");
        else CHECK(get(&db, 0, j) == get(&old_b, 0, j));
    }
    free(mean); free(rstd); free(s);
    for (int k = 0; k < 5; k++) drop(&m[k]);
    drop(&dw); drop(&db); drop(&old_w); drop(&old_b);
}

/* x, y and weight in every storage type, not all 27 combinations: they are independent. */
static const amp_dtype norm_dtypes[][3] = {{AMP_F32, AMP_F32, AMP_F32},
                                           {AMP_F16, AMP_F16, AMP_F16},
                                           {AMP_BF16, AMP_BF16, AMP_BF16},
                                           {AMP_F32, AMP_BF16, AMP_F32},
                                           {AMP_BF16, AMP_F32, AMP_F16}};

TEST(norm_forward) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int i = 0; i < SHAPES; i++)
            for (int c = 0; c < NORM_CASES; c++)
                for (int d = 0; d < (i == SHAPES - 1 ? 2 : 5); d++)
                    check_norm_forward(&norm_cases[c], kernels_shapes[i].rows, kernels_shapes[i].cols, i % 2 ? 5 : 0, norm_dtypes[d][0],
                                       norm_dtypes[d][1], norm_dtypes[d][2], (amp_cpu_path)path);
}

TEST(norm_backward) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int i = 0; i < SHAPES; i++)
            for (int c = 0; c < NORM_CASES; c++)
                for (int d = 0; d < (i == SHAPES - 1 ? 2 : 5); d++)
                    check_norm_backward(&norm_cases[c], kernels_shapes[i].rows, kernels_shapes[i].cols, i % 2 ? 5 : 0,
                                        norm_dtypes[d][0], norm_dtypes[d][1], norm_dtypes[d][2], (amp_cpu_path)path);
}

/* sum over x, sum over residual, dsum over dx; constant rows; NaN stays in its row. */
TEST(norm_in_place_and_special_rows) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int d = 0; d < STORAGES; d++) {
            kernels_matrix x = kernels_make(storages[d], 4, 100, 0), residual = kernels_make(storages[d], 4, 100, 0),
                   sum = kernels_make(storages[d], 4, 100, 0);
            kernels_matrix y = kernels_make(storages[d], 4, 100, 0), y2 = kernels_make(storages[d], 4, 100, 0),
                   dx = kernels_make(storages[d], 4, 100, 0);
            ampi_cpu cpu = kernels_device((amp_cpu_path)path, 1);
            float mean[4], rstd[4];
            amp_k_norm a;
            memset(&a, 0, sizeof a);
            kernels_fill(&x, 7, 0, 1, 0); kernels_fill(&residual, 7, 1, 1, 0);
            for (int j = 0; j < 100; j++) { set(&x, 1, j, 3); set(&residual, 1, j, 0.25f); }
            set(&x, 2, 50, float_nan());
            set(&x, 3, 7, float_inf());
            a.x = mat(&x);
            a.residual = mat(&residual);
            a.sum = mat(&sum);
            a.y = mat(&y);
            a.eps = norm_eps;
            a.mean = mean;
            a.rstd = rstd;
            CHECK_OK(ampi_cpu_norm(&cpu, &a, NULL));
            for (int j = 0; j < 100; j++) {
                CHECK(get(&y, 1, j) == 0);
                CHECK(is_nan(get(&y, 2, j)) && is_nan(get(&y, 3, j)) && !is_nan(get(&y, 0, j)));
            }
            CHECK(mean[1] == 3.25f);
            for (int which = 0; which < 2; which++) {
                a.sum = which ? mat(&residual) : mat(&x);
                a.y = mat(&y2);
                CHECK_OK(ampi_cpu_norm(&cpu, &a, NULL));
                CHECK(same_bytes(&y, &y2) && same_bytes(&sum, which ? &residual : &x));
                kernels_fill(&x, 7, 0, 1, 0);
                for (int j = 0; j < 100; j++) set(&x, 1, j, 3);
                set(&x, 2, 50, float_nan());
                set(&x, 3, 7, float_inf());
            }
            a.x = mat(&sum); a.dy = mat(&y); a.dsum = mat(&residual); a.dx = mat(&dx);
            CHECK_OK(ampi_cpu_norm_backward(&cpu, &a, NULL));
            a.dx = mat(&residual);
            CHECK_OK(ampi_cpu_norm_backward(&cpu, &a, NULL));
            CHECK(same_bytes(&dx, &residual));
            drop(&x); drop(&residual); drop(&sum); drop(&y); drop(&y2); drop(&dx);
        }
}

/* ---- Cross-entropy */

typedef struct entropy_case { float smoothing, factor, seed; int sum, ignore_every, padding; } entropy_case;
static const entropy_case entropy_cases[] = {
    {0, 1, 1, 0, 0, 0}, {0.1f, 1, 1, 0, 3, 0}, {0.1f, 0.5f, 1024, 1, 2, 5}, {1, 1, 1, 0, 0, 1}, {0, 2, 1, 1, 1, 2}};
enum { ENTROPY_CASES = sizeof entropy_cases / sizeof *entropy_cases, IGNORE = -100 };

static void make_labels(int32_t *labels, int64_t rows, int64_t classes, int ignore_every) {
    ampt_integers(labels, rows, 8, 9, (int32_t)classes);
    for (int64_t i = 0; ignore_every && i < rows; i += ignore_every) labels[i] = IGNORE;
}

/* Loss and gradient of one row, from an fp64 softmax.  Errors: x - max is rounded (U |x - max|, an error of the
   exponent), the exponential makes 4 U, the sum its depth; the gradient adds 4 roundings. */
static double check_entropy_row(const entropy_case *c, const kernels_matrix *x, const kernels_matrix *g, int64_t i, int64_t classes,
                                int32_t label, double scale, double *loss_error, amp_cpu_path path) {
    double max = get(x, i, 0), sum = 0, mean = 0, mean_size = 0, lse, sum_error = 0, loss, s = (double)c->smoothing;
    double depth = (double)AMPI_MIN(classes, 1024) / width(path) + log2_of(width(path));
    for (int64_t j = 0; j < classes; j++) max = AMPI_MAX(max, get(x, i, j));
    for (int64_t j = 0; j < classes; j++) {
        double e = exp(get(x, i, j) - max);
        sum += e; sum_error += e * U * (max - get(x, i, j) + 4);
        mean += get(x, i, j) / (double)classes; mean_size += fabs(get(x, i, j)) / (double)classes;
    }
    sum_error = sum_error / sum + depth * U;
    lse = max + log(sum);
    loss = (1 - s) * (lse - get(x, i, label)) + s * (lse - mean);
    *loss_error = sum_error * (1 + sum_error) + s * depth * U * mean_size;
    for (int64_t j = 0; j < classes; j++) {
        double p = exp(get(x, i, j) - lse), t = (1 - s) * (j == label) + s / (double)classes;
        CHECK_CLOSE(get(g, i, j), scale * (p - t),
                    fabs(scale) * (p * (U * (max - get(x, i, j) + 8) + sum_error) + 3 * U * t), g->dtype,
                    "gradient (%lld, %lld), label %d", (long long)i, (long long)j, (int)label);
    }
    return loss;
}

static void check_entropy(const entropy_case *c, int64_t rows, int64_t classes, int64_t gap, amp_dtype xd, amp_dtype gd,
                          amp_cpu_path path) {
    int64_t cols = classes + c->padding, counted = 0;
    kernels_matrix x = kernels_make(xd, rows, cols, gap), g = kernels_make(gd, rows, cols, gap), losses = kernels_make(AMP_F32, 1, rows, 0),
           loss = kernels_make(AMP_F32, 1, 1, 0), *out[3];
    int32_t *labels = (int32_t *)malloc((size_t)rows * 4 + 4), bad = 77;
    double total = 0, total_error = 0, scale;
    amp_k_cross_entropy a;
    make_labels(labels, rows, classes, c->ignore_every);
    for (int64_t i = 0; i < rows; i++) counted += labels[i] != IGNORE;
    kernels_fill(&x, 8, 0, 9, 0.5f);
    memset(&a, 0, sizeof a);
    a.logits = mat(&x);
    a.dlogits = mat(&g);
    a.classes = classes;
    a.labels = labels;
    a.ignore_index = IGNORE;
    a.sum = c->sum;
    a.smoothing = c->smoothing; a.factor = c->factor; a.grad_scale = c->seed == 1 ? NULL : &c->seed;
    a.losses = (float *)(void *)losses.data; a.loss = (float *)(void *)loss.data; a.bad_label = &bad;
    out[0] = &g; out[1] = &losses; out[2] = &loss;
    RUN_KERNEL(ampi_cpu_cross_entropy, &a, path, out, 3);
    CHECK_EQ(bad, 0);
    scale = (double)c->factor * (double)c->seed / (c->sum ? 1 : (double)AMPI_MAX(counted, 1));
    for (int64_t i = 0; i < rows; i++) {
        double row = 0, error = 0;
        int ignored = labels[i] == IGNORE;
        if (!ignored) row = check_entropy_row(c, &x, &g, i, classes, labels[i], scale, &error, path);
        CHECK_CLOSE(get(&losses, 0, i), row, error, AMP_F32, "loss of row %lld, path %d", (long long)i, (int)path);
        total += row; total_error += error;
        for (int64_t j = ignored ? 0 : classes; j < cols; j++) CHECK(get(&g, i, j) == 0);
    }
    if (!c->sum) {
        total = counted ? total / (double)counted : make_nan();
        total_error /= (double)AMPI_MAX(counted, 1);
    }
    CHECK_CLOSE(get(&loss, 0, 0), total, total_error, AMP_F32, "loss, path %d", (int)path);
    a.dlogits.data = NULL;                              /* the loss alone has the same bits */
    out[0] = &losses; out[1] = &loss;
    total = get(&loss, 0, 0);
    RUN_KERNEL(ampi_cpu_cross_entropy, &a, path, out, 2);
    CHECK(is_nan(total) ? is_nan(get(&loss, 0, 0)) : get(&loss, 0, 0) == total);
    if (xd == gd && gap == 0) {                         /* in place */
        a.dlogits = a.logits;
        out[0] = &x;
        RUN_KERNEL(ampi_cpu_cross_entropy, &a, path, out, 1);
        CHECK(same_bytes(&x, &g));
    }
    free(labels);
    drop(&x); drop(&g); drop(&losses); drop(&loss);
}

TEST(cross_entropy) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int i = 0; i < SHAPES; i++)
            for (int c = 0; c < ENTROPY_CASES; c++)
                for (int in = 0; in < STORAGES; in++)
                    for (int out = 0; out < STORAGES; out++)
                        if (i < SHAPES - 1 || in == out)
                            check_entropy(&entropy_cases[c], kernels_shapes[i].rows, kernels_shapes[i].cols, i % 2 ? 3 : 0,
                                          storages[in], storages[out], (amp_cpu_path)path);
}

/* A label out of range is found before anything is written; ignore_index may be a class. */
TEST(cross_entropy_labels) {
    kernels_matrix x = kernels_make(AMP_F32, 4, 6, 0), g = kernels_make(AMP_F32, 4, 6, 0);
    ampi_cpu cpu = kernels_device((amp_cpu_path)paths(), 1);
    int32_t labels[4] = {1, 0, 4, 2}, bad = 0;
    float loss = 42, losses[4] = {42, 42, 42, 42};
    amp_k_cross_entropy a;
    memset(&a, 0, sizeof a);
    kernels_fill(&x, 9, 0, 1, 0);
    a.logits = mat(&x); a.dlogits = mat(&g); a.classes = 5; a.labels = labels; a.ignore_index = IGNORE; a.factor = 1;
    a.losses = losses; a.loss = &loss; a.bad_label = &bad;
    memcpy(g.before, g.data, g.bytes);
    for (int k = 0; k < 3; k++) {
        labels[2] = k == 0 ? 5 : k == 1 ? -1 : -100;
        CHECK_OK(ampi_cpu_cross_entropy(&cpu, &a, NULL));
        CHECK_EQ(bad, k == 2 ? 0 : 3);
        if (k < 2) CHECK(memcmp(g.before, g.data, g.bytes) == 0 && loss == 42 && losses[0] == 42);
    }
    CHECK(losses[2] == 0 && losses[0] > 0);
    labels[2] = 4;
    a.ignore_index = 0;
    CHECK_OK(ampi_cpu_cross_entropy(&cpu, &a, NULL));
    CHECK(bad == 0 && losses[1] == 0 && losses[2] > 0);
    drop(&x); drop(&g);
}

/* As PyTorch: NaN and +inf make the row NaN; a label at -inf gives loss inf and a finite gradient; an ignored row is 0. */
TEST(cross_entropy_special_rows) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path)) {
        kernels_matrix x = kernels_make(AMP_F32, 6, 40, 0), g = kernels_make(AMP_F32, 6, 40, 0);
        ampi_cpu cpu = kernels_device((amp_cpu_path)path, 2);
        int32_t labels[6] = {1, 2, 3, 4, IGNORE, 38}, bad = 0;
        float loss = 0, losses[6];
        amp_k_cross_entropy a;
        memset(&a, 0, sizeof a);
        kernels_fill(&x, 10, 0, 1, 0);
        set(&x, 0, 39, float_nan());
        set(&x, 1, 7, float_inf());
        set(&x, 2, 3, -float_inf());
        for (int j = 0; j < 40; j++) { set(&x, 3, j, -float_inf()); set(&x, 4, j, float_nan()); }
        set(&x, 5, 0, -float_inf());
        a.logits = mat(&x);
        a.dlogits = mat(&g);
        a.classes = 40;
        a.labels = labels;
        a.ignore_index = IGNORE;
        a.factor = 1;
        a.sum = 1;
        a.losses = losses; a.loss = &loss; a.bad_label = &bad;
        CHECK_OK(ampi_cpu_cross_entropy(&cpu, &a, NULL));
        CHECK(is_nan((double)losses[0]) && is_nan((double)losses[1]) && is_nan((double)losses[3]) &&
              is_nan((double)loss));
        CHECK(is_inf((double)losses[2]) && losses[2] > 0 && losses[4] == 0 && !is_inf((double)losses[5]) &&
              !is_nan((double)losses[5]));
        for (int j = 0; j < 40; j++) {
            CHECK(is_nan(get(&g, 0, j)) && is_nan(get(&g, 1, j)) && is_nan(get(&g, 3, j)) && get(&g, 4, j) == 0);
            CHECK(!is_nan(get(&g, 2, j)) && !is_nan(get(&g, 5, j)));
        }
        CHECK(get(&g, 2, 3) == -1 && get(&g, 5, 0) == 0);
        drop(&x); drop(&g);
    }
}

/* The largest logit in the first of several chunks. */
TEST(cross_entropy_large_logits) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path)) {
        kernels_matrix x = kernels_make(AMP_F32, 1, 2100, 0), g = kernels_make(AMP_F32, 1, 2100, 0);
        ampi_cpu cpu = kernels_device((amp_cpu_path)path, 1);
        int32_t label = 2000, bad = 0;
        float loss = 0;
        amp_k_cross_entropy a;
        memset(&a, 0, sizeof a);
        kernels_fill(&x, 10, 0, 1, 0);
        set(&x, 0, 5, 200);
        set(&x, 0, 2000, -200);
        a.logits = mat(&x);
        a.dlogits = mat(&g);
        a.classes = 2100;
        a.labels = &label;
        a.ignore_index = IGNORE;
        a.factor = 1;
        a.loss = &loss; a.bad_label = &bad;
        CHECK_OK(ampi_cpu_cross_entropy(&cpu, &a, NULL));
        CHECK(loss == 400 && get(&g, 0, 5) == 1 && get(&g, 0, 2000) == -1);
        drop(&x); drop(&g);
    }
}

/* ---- Mean squared error, addition, casts, dropout */

TEST(mse) {
    static const int64_t sizes[] = {0, 1, 5, 33, 7000, 100003};
    static const float seed = 512;
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int k = 0; k < 6; k++)
            for (int in = 0; in < STORAGES; in++)
                for (int sum = 0; sum < 2; sum++) {
                    int64_t n = sizes[k];
                    kernels_matrix x = kernels_make(storages[in], 1, n, 0), target = kernels_make(storages[(in + sum) % STORAGES], 1, n, 0),
                           dx = kernels_make(storages[in], 1, n, 0);
                    kernels_matrix loss = kernels_make(AMP_F32, 1, 1, 0), *out[2];
                    double exact = 0, scale, divisor = sum ? 1 : (double)AMPI_MAX(n, 1),
                           depth = 512.0 / width((amp_cpu_path)path) + 8;
                    amp_k_mse a;
                    memset(&a, 0, sizeof a);
                    kernels_fill(&x, 11, 0, 3, 0); kernels_fill(&target, 11, 1, 3, 0);
                    a.x = x.data;
                    a.target = target.data;
                    a.dx = dx.data;
                    a.x_dtype = x.dtype;
                    a.target_dtype = target.dtype;
                    a.n = n;
                    a.sum = sum;
                    a.factor = 0.5f;
                    a.grad_scale = sum ? &seed : NULL;
                    a.loss = (float *)(void *)loss.data;
                    out[0] = &dx; out[1] = &loss;
                    RUN_KERNEL(ampi_cpu_mse, &a, (amp_cpu_path)path, out, 2);
                    scale = 2 * 0.5 * (sum ? 512 : 1) / divisor;
                    for (int64_t i = 0; i < n; i++) {
                        double d = get(&x, 0, i) - get(&target, 0, i);
                        exact += d * d;
                        CHECK_CLOSE(get(&dx, 0, i), scale * d, 3 * U * fabs(scale * d), dx.dtype, "dx %lld of %lld",
                                    (long long)i, (long long)n);
                    }
                    exact = n == 0 && !sum ? make_nan() : exact / divisor;
                    CHECK_CLOSE(get(&loss, 0, 0), exact, (depth + 3) * U * exact, AMP_F32, "loss of %lld, path %d",
                                (long long)n, path);
                    a.dx = x.data;
                    out[0] = &x;
                    RUN_KERNEL(ampi_cpu_mse, &a, (amp_cpu_path)path, out, 2);
                    CHECK(same_bytes(&x, &dx));
                    drop(&x); drop(&target); drop(&dx); drop(&loss);
                }
}

TEST(add) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int k = 0; k < 27; k++)
            for (int l = 0; l < LENGTHS; l++) {
                int64_t n = lengths[l];
                kernels_matrix a = kernels_make(storages[k % 3], 1, n, 0), b = kernels_make(storages[k / 3 % 3], 1, n, 0),
                       y = kernels_make(storages[k / 9], 1, n, 0), *out = &y;
                amp_k_add p;
                memset(&p, 0, sizeof p);
                kernels_fill(&a, 12, 0, 2, 0); kernels_fill(&b, 12, 1, 2, 0);
                p.a = a.data;
                p.b = k % 2 ? NULL : b.data;
                p.y = y.data;
                p.a_dtype = a.dtype;
                p.b_dtype = b.dtype;
                p.y_dtype = y.dtype;
                p.n = n; p.alpha = n % 2 ? 1.0f : 0.3f; p.beta = n % 2 ? 1.0f : -1.7f;
                RUN_KERNEL(ampi_cpu_add, &p, (amp_cpu_path)path, &out, 1);
                for (int64_t i = 0; i < n; i++) {
                    double first = (double)p.alpha * get(&a, 0, i), second = p.b ? (double)p.beta * get(&b, 0, i) : 0;
                    CHECK_CLOSE(get(&y, 0, i), first + second, 2 * U * (fabs(first) + fabs(second)), y.dtype,
                                "element %lld", (long long)i);
                }
                drop(&a); drop(&b); drop(&y);
            }
}

/* What amp_convert does, at any number of threads, and the count is added to what is there. */
TEST(cast) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int rounding = AMP_ROUND_DEFAULT; rounding <= AMP_ROUND_STOCHASTIC; rounding++)
            for (int l = 0; l < LENGTHS; l++) {
                int64_t n = lengths[l];
                kernels_matrix x = kernels_make(AMP_F32, 1, n, 0), y = kernels_make(AMP_F16, 1, n, 0), expected = kernels_make(AMP_F16, 1, n, 0),
                       *out = &y;
                int64_t count = 0, found = 0;
                amp_k_cast a;
                memset(&a, 0, sizeof a);
                kernels_fill(&x, 13, 0, 70000, 0);
                a.dst = y.data;
                a.src = x.data;
                a.dst_dtype = AMP_F16;
                a.src_dtype = AMP_F32;
                a.n = n;
                a.new_inf = &found;
                a.how.rounding = (amp_rounding)rounding; a.how.seed = 3; a.how.offset = 5;
                RUN_KERNEL(ampi_cpu_cast, &a, (amp_cpu_path)path, &out, 1);
                CHECK_OK(amp_convert(expected.data, AMP_F16, x.data, AMP_F32, n, &a.how, &count));
                CHECK(same_bytes(&y, &expected));
                CHECK_EQ(found, 3 * count);
                a.new_inf = NULL;
                RUN_KERNEL(ampi_cpu_cast, &a, (amp_cpu_path)path, &out, 1);
                CHECK(same_bytes(&y, &expected));
                drop(&x); drop(&y); drop(&expected);
            }
}

/* Two rates are a uniform number that occurs, and the next fp32 above it: the element is kept, and dropped.
   Bit for bit: element i is kept if amp_random_uniform(seed, offset + i) >= p, and then multiplied by fp32(1 / (1 - p)). */
TEST(dropout) {
    enum { RATES = 6 };
    float rates[RATES] = {0, 0.1f, 0.5f, 0.999f, 0, 0};
    uint64_t seed = 99, offset = ((uint64_t)1 << 34) - 7, small = 0;
    while (amp_random_uniform(seed, offset + small) > 0.3f) small++;    /* where fp32 is finer than 2^-24 */
    rates[4] = amp_random_uniform(seed, offset + small);
    rates[5] = rates[4] * (1 + 0x1p-23f);
    CHECK(small < 39 && rates[5] > rates[4] && rates[5] < rates[4] + 0x1p-24f);
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int k = 0; k < RATES * STORAGES; k++)
            for (int l = 0; l < LENGTHS; l++) {
                int64_t n = lengths[l];
                kernels_matrix x = kernels_make(storages[k % STORAGES], 1, n, 0), y = kernels_make(storages[k % 2 * (k % STORAGES)], 1, n, 0),
                       one = kernels_make(y.dtype, 1, 1, 0), *out = &y;
                float p = rates[k / STORAGES], scale = 1 / (1 - p);
                amp_k_dropout a;
                memset(&a, 0, sizeof a);
                kernels_fill(&x, 14, 0, 2, 3);
                a.x = x.data; a.y = y.data; a.x_dtype = x.dtype; a.y_dtype = y.dtype; a.n = n; a.p = p; a.seed = seed;
                a.offset = offset;
                RUN_KERNEL(ampi_cpu_dropout, &a, (amp_cpu_path)path, &out, 1);
                for (int64_t i = 0; i < n; i++) {
                    int kept = amp_random_uniform(a.seed, a.offset + (uint64_t)i) >= p;
                    set(&one, 0, 0, kept ? (float)get(&x, 0, i) * scale : 0);
                    CHECK(get(&y, 0, i) == get(&one, 0, 0));
                }
                if (x.dtype == y.dtype) {
                    a.y = x.data;
                    out = &x;
                    RUN_KERNEL(ampi_cpu_dropout, &a, (amp_cpu_path)path, &out, 1);
                    CHECK(same_bytes(&x, &y));
                }
                drop(&x); drop(&y); drop(&one);
            }
}

/* ---- RoPE */

enum { R_BATCH = 2, R_POSITIONS = 5 };
typedef struct rope_case {
    int64_t heads[2], dim, rotary, offset;
    double base;
    int adjacent, at;                   /* at: how many sequences have positions of their own */
} rope_case;

static kernels_matrix rope_matrix(const rope_case *c, int which, amp_dtype d) {
    kernels_matrix m = kernels_make(d, R_BATCH * R_POSITIONS, c->heads[which] * c->dim, 3);
    kernels_fill(&m, 15, (uint32_t)which, 2, 0);
    return m;
}
static amp_k_rope rope_args(const rope_case *c, const kernels_matrix *q, const kernels_matrix *k, const int32_t *at) {
    amp_k_rope a;
    memset(&a, 0, sizeof a);
    a.batch = R_BATCH; a.positions = R_POSITIONS; a.rotary = c->rotary; a.offset = c->offset; a.adjacent = c->adjacent;
    a.step = -2 * log2(c->base) / (double)AMPI_MAX(c->rotary, 1);
    a.x[0] = q->data; a.x[1] = c->heads[1] ? k->data : NULL; a.dtype = q->dtype;
    for (int i = 0; i < 2; i++) {
        a.heads[i] = c->heads[i];
        a.stride[i][0] = R_POSITIONS * (i ? k : q)->ld; a.stride[i][1] = (i ? k : q)->ld; a.stride[i][2] = c->dim;
    }
    a.at = c->at ? at : NULL;
    a.at_stride = c->at == 2 ? R_POSITIONS : 0;
    return a;
}

/* Half an ulp each for cosine and sine, which the angle's own error moves by 2^-50 of it; two products and a sum. */
static void check_rope(const rope_case *c, const amp_k_rope *a, const kernels_matrix *in, const kernels_matrix *out, int path) {
    for (int64_t row = 0; row < out->rows; row++)
        for (int64_t col = 0; col < out->cols; col++) {
            int64_t p = row % R_POSITIONS, i = col % c->dim, pair = c->adjacent ? i / 2 : i % AMPI_MAX(c->rotary / 2, 1);
            int second = c->adjacent ? (int)(i % 2) : i >= c->rotary / 2;
            int64_t other = col + (c->adjacent ? 1 : c->rotary / 2) * (second ? -1 : 1);
            long double at = (long double)(c->offset + (a->at ? a->at[row / R_POSITIONS * a->at_stride + p] : p)), turn;
            double x = get(in, row, col), y, from, to;
            if (i >= c->rotary) { CHECK(get(out, row, col) == x); continue; }
            turn = at * powl((long double)c->base, -2.0L * (long double)pair / (long double)c->rotary);
            y = get(in, row, other) * (a->backward == second ? -1 : 1);
            from = x * (double)cosl(turn); to = y * (double)sinl(turn);
            CHECK_CLOSE(get(out, row, col), from + to,
                        3 * U * (fabs(from) + fabs(to)) + (fabs(x) + fabs(y)) * (ldexp(fabs((double)turn), -50) + 1e-10),
                        out->dtype, "row %lld, column %lld, path %d", (long long)row, (long long)col, path);
        }
}

/* Both pairings, parts of a head, grouped heads, q alone, positions shared or each sequence's own, negative ones too, and as
   far as 2^31; every path has the same bits, and backward turns back. */
TEST(rope) {
    static const rope_case rope_cases[] = {
        {{3, 1}, 12, 12, 0, 10000, 0, 0}, {{3, 1}, 12, 12, 7, 10000, 1, 0}, {{2, 2}, 64, 64, 3, 500000, 0, 2},
        {{2, 2}, 64, 64, 0, 10000, 1, 1}, {{4, 0}, 80, 32, 100, 10000, 0, 0}, {{4, 0}, 80, 34, 100, 10000, 1, 2},
        {{1, 1}, 2, 2, 0, 1, 0, 1}, {{1, 3}, 600, 600, 5, 10000, 1, 0}, {{5, 5}, 6, 4, 1 << 20, 10000, 0, 0},
        {{2, 1}, 128, 128, INT32_MAX, 10000, 0, 2}, {{2, 1}, 0, 0, 0, 10000, 0, 0}, {{0, 2}, 16, 16, 1 << 24, 1e30, 1, 1},
    };
    static const int32_t at[R_BATCH * R_POSITIONS] = {0, 0, 9, 12345, 2, INT32_MAX, INT32_MIN, 5, -3, 1 << 24};
    for (int k = 0; k < (int)(sizeof rope_cases / sizeof *rope_cases); k++)
        for (int s = 0; s < STORAGES; s++) {
            const rope_case *c = &rope_cases[k];
            kernels_matrix in[2] = {rope_matrix(c, 0, storages[s]), rope_matrix(c, 1, storages[s])}, first[2];
            for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path)) {
                kernels_matrix q = rope_matrix(c, 0, storages[s]), key = rope_matrix(c, 1, storages[s]), *out[2];
                amp_k_rope a = rope_args(c, &q, &key, at);
                out[0] = &q; out[1] = &key;
                RUN_KERNEL(ampi_cpu_rope, &a, (amp_cpu_path)path, out, 2);
                check_rope(c, &a, &in[0], &q, path); check_rope(c, &a, &in[1], &key, path);
                if (path == 1) {
                    first[0] = kernels_make(q.dtype, q.rows, q.cols, 3); first[1] = kernels_make(q.dtype, key.rows, key.cols, 3);
                    memcpy(first[0].data, q.data, q.bytes); memcpy(first[1].data, key.data, key.bytes);
                }
                CHECK_MSG(same_bytes(&q, &first[0]) && same_bytes(&key, &first[1]), "case %d, path %d: other bits", k, path);
                a.backward = 1;
                RUN_KERNEL(ampi_cpu_rope, &a, (amp_cpu_path)path, out, 2);
                check_rope(c, &a, &first[0], &q, path); check_rope(c, &a, &first[1], &key, path);
                drop(&q); drop(&key);
            }
            drop(&in[0]); drop(&in[1]); drop(&first[0]); drop(&first[1]);
        }
}

/* What is not finite stays in its pair; unturned elements keep their bits, also those of a signalling NaN. */
TEST(rope_of_infinities) {
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int s = 0; s < STORAGES; s++)
            for (int adjacent = 0; adjacent < 2; adjacent++) {
                rope_case c = {{1, 0}, 24, 20, 1, 10000, adjacent, 0};
                kernels_matrix q = rope_matrix(&c, 0, storages[s]), *out = &q;
                amp_k_rope a = rope_args(&c, &q, &q, NULL);
                set(&q, 0, 2, float_inf()); set(&q, 1, 2, float_nan());
                memset(q.data + 22 * amp_dtype_size(q.dtype), 0xff, 2 * amp_dtype_size(q.dtype));
                q.data[22 * amp_dtype_size(q.dtype) + (s ? 0 : 2)] = 0xa5;
                RUN_KERNEL(ampi_cpu_rope, &a, (amp_cpu_path)path, &out, 1);
                CHECK(memcmp(q.data + 20 * amp_dtype_size(q.dtype), q.before + 20 * amp_dtype_size(q.dtype),
                             4 * amp_dtype_size(q.dtype)) == 0);
                for (int64_t i = 0; i < 20; i++) {
                    int turned = i == 2 || i == (adjacent ? 3 : 12);
                    CHECK(is_inf(get(&q, 0, i)) == turned && is_nan(get(&q, 1, i)) == turned && !is_nan(get(&q, 0, i)));
                }
                drop(&q);
            }
}

/* ---- Embedding */

static void check_embedding(int64_t n, int64_t seq, int64_t vocab, int64_t cols, int64_t gap, int with_positions,
                            int add, amp_dtype td, amp_dtype yd, amp_cpu_path path) {
    kernels_matrix table = kernels_make(td, vocab, cols, gap), positions = kernels_make(td, seq + 2, cols, 0), y = kernels_make(yd, n, cols, gap),
           dy = kernels_make(yd, n, cols, 0);
    kernels_matrix dtable = kernels_make(td, vocab, cols, gap), dpositions = kernels_make(td, seq + 2, cols, 0), old = kernels_make(td, vocab, cols, 0),
           old_p = kernels_make(td, seq + 2, cols, 0);
    kernels_matrix *forward = &y, *backward[2];
    int32_t *ids = (int32_t *)malloc((size_t)n * 4 + 4), bad = 77;
    amp_k_embedding a;
    memset(&a, 0, sizeof a);
    ampt_integers(ids, n, 15, 9, (int32_t)vocab);
    kernels_fill(&table, 15, 0, 1, 0); kernels_fill(&positions, 15, 1, 1, 0); kernels_fill(&dy, 15, 2, 1, 0);
    kernels_fill(&dtable, 15, 3, 1, 0); kernels_fill(&old, 15, 3, 1, 0); kernels_fill(&dpositions, 15, 4, 1, 0); kernels_fill(&old_p, 15, 4, 1, 0);
    a.ids = ids;
    a.n = n;
    a.seq = seq;
    a.table = mat(&table);
    a.y = mat(&y);
    a.dy = mat(&dy);
    a.dtable = mat(&dtable);
    a.bad_id = &bad;
    if (with_positions) { a.positions = mat(&positions); a.dpositions = mat(&dpositions); }
    a.add_table = a.add_positions = add;
    backward[0] = &dtable; backward[1] = &dpositions;
    RUN_KERNEL(ampi_cpu_embedding, &a, path, &forward, 1);
    RUN_KERNEL(ampi_cpu_embedding_backward, &a, path, backward, 2);
    CHECK_EQ(bad, 0);
    for (int64_t j = 0; j < cols; j++) {
        for (int64_t i = 0; i < n; i++) {
            double exact = get(&table, ids[i], j) + (with_positions ? get(&positions, i % seq, j) : 0);
            CHECK_CLOSE(get(&y, i, j), exact, with_positions ? U * fabs(exact) : 0, yd, "y");
        }
        for (int64_t v = 0; v < vocab; v++) {           /* one rounding per addition */
            double sum = 0, size = 0, count = 0, from = add ? get(&old, v, j) : 0;
            for (int64_t i = 0; i < n; i++)
                if (ids[i] == v) {
                    sum += get(&dy, i, j);
                    size += fabs(get(&dy, i, j));
                    count++;
                }
            CHECK_CLOSE(get(&dtable, v, j), from + sum, U * (count * size + fabs(from + sum)), td, "dtable row %lld",
                        (long long)v);
        }
        for (int64_t p = 0; p < seq + 2; p++) {
            double sum = 0, size = 0, count = 0, from = add || !with_positions ? get(&old_p, p, j) : 0;
            for (int64_t i = p; with_positions && p < seq && i < n; i += seq) {
                sum += get(&dy, i, j);
                size += fabs(get(&dy, i, j));
                count++;
            }
            CHECK_CLOSE(get(&dpositions, p, j), from + sum, U * (count * size + fabs(from + sum)), td,
                        "dpositions row %lld", (long long)p);
        }
    }
    free(ids);
    drop(&table); drop(&positions); drop(&y); drop(&dy); drop(&dtable); drop(&dpositions); drop(&old); drop(&old_p);
}

TEST(embedding) {
    static const int64_t cases[][4] = {{0, 1, 3, 5}, {1, 1, 1, 1}, {12, 4, 5, 7}, {100, 50, 3, 33}, {96, 32, 61, 520}};
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int k = 0; k < 5; k++)
            for (int d = 0; d < STORAGES * STORAGES; d += k == 4 ? 4 : 1)
                for (int flags = 0; flags < 4; flags++)
                    check_embedding(cases[k][0], cases[k][1], cases[k][2], cases[k][3], k % 2 ? 3 : 0, flags & 1,
                                    flags >> 1, storages[d / STORAGES], storages[d % STORAGES], (amp_cpu_path)path);
}

TEST(embedding_ids) {
    kernels_matrix table = kernels_make(AMP_F32, 4, 8, 0), y = kernels_make(AMP_F32, 3, 8, 0), dtable = kernels_make(AMP_F32, 4, 8, 0);
    ampi_cpu cpu = kernels_device((amp_cpu_path)paths(), 1);
    int32_t ids[3] = {0, 3, 4}, bad = 0;
    amp_k_embedding a;
    memset(&a, 0, sizeof a);
    kernels_fill(&table, 16, 0, 1, 0);
    a.ids = ids;
    a.n = 3;
    a.seq = 3;
    a.table = mat(&table);
    a.y = mat(&y);
    a.dy = mat(&y);
    a.dtable = mat(&dtable);
    a.bad_id = &bad;
    memcpy(y.before, y.data, y.bytes);
    memcpy(dtable.before, dtable.data, dtable.bytes);
    for (int k = 0; k < 2; k++) {
        ids[2] = k ? -1 : 4;
        bad = 0;
        CHECK_OK(ampi_cpu_embedding(&cpu, &a, NULL));
        CHECK_EQ(bad, 3);
        bad = 0;
        CHECK_OK(ampi_cpu_embedding_backward(&cpu, &a, NULL));
        CHECK_EQ(bad, 3);
    }
    CHECK(memcmp(y.before, y.data, y.bytes) == 0 && memcmp(dtable.before, dtable.data, dtable.bytes) == 0);
    drop(&table); drop(&y); drop(&dtable);
}

/* ---- No memory: an error by number, and nothing written */

TEST(no_memory) {
    kernels_matrix x = kernels_make(AMP_F16, 4, 8, 0), y = kernels_make(AMP_F16, 4, 8, 0), table = kernels_make(AMP_F32, 9, 8, 0);
    ampi_cpu cpu = kernels_device((amp_cpu_path)paths(), 2);
    int32_t labels[4] = {1, 2, 3, 4}, bad = 0;
    int64_t found = 0;
    float loss = 42, mean[4] = {0}, rstd[4] = {1, 1, 1, 1};
    amp_k_norm n; amp_k_cross_entropy c; amp_k_mse m; amp_k_embedding e; amp_k_cast k; amp_k_rope r;
    memset(&n, 0, sizeof n);
    memset(&c, 0, sizeof c);
    memset(&m, 0, sizeof m);
    memset(&e, 0, sizeof e);
    memset(&k, 0, sizeof k);
    memset(&r, 0, sizeof r);
    r.batch = 1; r.positions = 4; r.rotary = 8; r.heads[0] = 1; r.stride[0][1] = 8; r.x[0] = y.data; r.dtype = AMP_F16;
    kernels_fill(&x, 17, 0, 1, 0);
    n.x = n.dy = mat(&x); n.y = n.dx = mat(&y); n.mean = mean; n.rstd = rstd;
    c.logits = mat(&x); c.dlogits = mat(&y); c.classes = 8; c.labels = labels; c.loss = &loss; c.bad_label = &bad;
    m.x = m.target = x.data; m.dx = y.data; m.x_dtype = m.target_dtype = AMP_F16; m.n = 32; m.loss = &loss;
    e.ids = labels; e.n = 4; e.seq = 4; e.dy = mat(&x); e.dtable = mat(&table); e.bad_id = &bad;
    k.dst = y.data; k.src = x.data; k.dst_dtype = k.src_dtype = AMP_F16; k.n = 32; k.new_inf = &found;
    memcpy(y.before, y.data, y.bytes);
    memcpy(table.before, table.data, table.bytes);
    alloc_fails = 1;
    CHECK_ERR(ampi_cpu_norm(&cpu, &n, NULL), AMP_ERR_MEMORY);
    CHECK_ERR(ampi_cpu_norm_backward(&cpu, &n, NULL), AMP_ERR_MEMORY);
    CHECK_ERR(ampi_cpu_cross_entropy(&cpu, &c, NULL), AMP_ERR_MEMORY);
    CHECK_ERR(ampi_cpu_mse(&cpu, &m, NULL), AMP_ERR_MEMORY);
    CHECK_ERR(ampi_cpu_embedding_backward(&cpu, &e, NULL), AMP_ERR_MEMORY);
    CHECK_ERR(ampi_cpu_cast(&cpu, &k, NULL), AMP_ERR_MEMORY);
    CHECK_ERR(ampi_cpu_rope(&cpu, &r, NULL), AMP_ERR_MEMORY);
    alloc_fails = 0;
    CHECK(memcmp(y.before, y.data, y.bytes) == 0 && memcmp(table.before, table.data, table.bytes) == 0 && loss == 42);
    drop(&x); drop(&y); drop(&table);
}

/* ---- PyTorch's results (tests/torch/oracle/kernels.py): fp32 within a relative norm of 1e-5 of its fp64 run, 16-bit storage
   with an RMS error over the seeds of at most 1.2 times PyTorch's own */

enum { G_ROWS = 6, G_COLS = 37, G_VOCABULARY = 11, G_SEQUENCE = 3, G_SEEDS = 16, G_OUTPUTS = 4 };

/* What an operator reads and writes; the names are those of its records. */
typedef struct golden_run {
    kernels_matrix x, dy, up, weight, bias, table, positions, out[G_OUTPUTS];
    const char *names[G_OUTPUTS];
    int32_t labels[G_ROWS], ids[G_ROWS], bad;
    float mean[G_ROWS], rstd[G_ROWS], loss;
} golden_run;

/* Numbers rounded to `rounded` and stored in `storage`. */
static kernels_matrix golden_input(amp_dtype rounded, amp_dtype storage, int64_t rows, int64_t cols, uint32_t seed,
                           uint32_t stream, float scale, float shift) {
    kernels_matrix first = kernels_make(rounded, 1, rows * cols, 0), m = kernels_make(storage, rows, cols, 0);
    kernels_fill(&first, seed, stream, scale, shift);
    ampi_convert_fast(m.data, storage, first.data, rounded, rows * cols, AMP_CPU_SCALAR);
    drop(&first);
    return m;
}

static void golden_begin(golden_run *r, uint32_t seed, amp_dtype rounded, amp_dtype storage) {
    memset(r, 0, sizeof *r);
    r->x = golden_input(rounded, storage, G_ROWS, G_COLS, seed, 0, 6, 0);
    r->dy = golden_input(rounded, storage, G_ROWS, G_COLS, seed, 1, 2, 0);
    r->up = golden_input(rounded, storage, G_ROWS, G_COLS, seed, 2, 3, 0);
    r->weight = golden_input(rounded, storage, 1, G_COLS, seed, 3, 0.5f, 1);
    r->bias = golden_input(rounded, storage, 1, G_COLS, seed, 4, 1, 0);
    r->table = golden_input(rounded, storage, G_VOCABULARY, G_COLS, seed, 5, 1, 0);
    r->positions = golden_input(rounded, storage, G_SEQUENCE, G_COLS, seed, 6, 1, 0);
    ampt_integers(r->labels, G_ROWS, seed, 9, G_COLS);
    ampt_integers(r->ids, G_ROWS, seed, 10, G_VOCABULARY);
    for (int i = 0; i < G_ROWS; i += 3) r->labels[i] = IGNORE;
}
static void golden_end(golden_run *r) {
    for (int i = 0; i < G_OUTPUTS; i++) if (r->names[i]) drop(&r->out[i]);
    drop(&r->x); drop(&r->dy); drop(&r->up); drop(&r->weight); drop(&r->bias); drop(&r->table); drop(&r->positions);
}
static kernels_matrix *golden_output(golden_run *r, int i, const char *name, amp_dtype storage, int64_t rows, int64_t cols) {
    r->names[i] = name;
    r->out[i] = kernels_make(storage, rows, cols, 0);
    return &r->out[i];
}

static void golden_activation(golden_run *r, ampi_cpu *cpu, amp_dtype d, amp_activation_kind kind) {
    kernels_matrix *y = golden_output(r, 0, "y", d, G_ROWS, G_COLS), *dx = golden_output(r, 1, "dx", d, G_ROWS, G_COLS);
    amp_k_activation a = activation_args(kind, &r->x, y, &r->dy, dx);
    CHECK_OK(ampi_cpu_activation(cpu, &a, NULL));
    CHECK_OK(ampi_cpu_activation_backward(cpu, &a, NULL));
}

static void golden_swiglu(golden_run *r, ampi_cpu *cpu, amp_dtype d) {
    amp_k_swiglu a;
    memset(&a, 0, sizeof a);
    a.gate = mat(&r->x); a.up = mat(&r->up); a.dy = mat(&r->dy);
    a.y = mat(golden_output(r, 0, "y", d, G_ROWS, G_COLS));
    a.dgate = mat(golden_output(r, 1, "dx", d, G_ROWS, G_COLS));
    a.dup = mat(golden_output(r, 2, "dup", d, G_ROWS, G_COLS));
    CHECK_OK(ampi_cpu_swiglu(cpu, &a, NULL));
    CHECK_OK(ampi_cpu_swiglu_backward(cpu, &a, NULL));
}

static void golden_norm(golden_run *r, ampi_cpu *cpu, amp_dtype d, int rms) {
    amp_k_norm a;
    memset(&a, 0, sizeof a);
    a.rms = rms; a.eps = norm_eps; a.x = mat(&r->x); a.dy = mat(&r->dy);
    a.weight = r->weight.data; a.bias = rms ? NULL : r->bias.data; a.weight_dtype = a.dweight.dtype = a.dbias.dtype = d;
    a.mean = r->mean; a.rstd = r->rstd;
    a.y = mat(golden_output(r, 0, "y", d, G_ROWS, G_COLS));
    a.dx = mat(golden_output(r, 1, "dx", d, G_ROWS, G_COLS));
    a.dweight.data = golden_output(r, 2, "dweight", d, 1, G_COLS)->data;
    if (!rms) a.dbias.data = golden_output(r, 3, "dbias", d, 1, G_COLS)->data;
    CHECK_OK(ampi_cpu_norm(cpu, &a, NULL));
    CHECK_OK(ampi_cpu_norm_backward(cpu, &a, NULL));
}

static void golden_entropy(golden_run *r, ampi_cpu *cpu, amp_dtype d, float smoothing, int sum) {
    amp_k_cross_entropy a;
    memset(&a, 0, sizeof a);
    a.logits = mat(&r->x); a.classes = G_COLS; a.labels = r->labels; a.ignore_index = IGNORE; a.sum = sum;
    a.smoothing = smoothing; a.factor = 1; a.bad_label = &r->bad;
    a.loss = (float *)(void *)golden_output(r, 0, "y", AMP_F32, 1, 1)->data;
    a.dlogits = mat(golden_output(r, 1, "dx", d, G_ROWS, G_COLS));
    CHECK_OK(ampi_cpu_cross_entropy(cpu, &a, NULL));
}

static void golden_mse(golden_run *r, ampi_cpu *cpu, amp_dtype d, int sum) {
    amp_k_mse a;
    memset(&a, 0, sizeof a);
    a.x = r->x.data;
    a.target = r->up.data;
    a.x_dtype = a.target_dtype = d;
    a.n = G_ROWS * G_COLS;
    a.sum = sum;
    a.factor = 1;
    a.loss = (float *)(void *)golden_output(r, 0, "y", AMP_F32, 1, 1)->data;
    a.dx = golden_output(r, 1, "dx", d, G_ROWS, G_COLS)->data;
    CHECK_OK(ampi_cpu_mse(cpu, &a, NULL));
}

static void golden_embedding(golden_run *r, ampi_cpu *cpu, amp_dtype d) {
    amp_k_embedding a;
    memset(&a, 0, sizeof a);
    a.ids = r->ids;
    a.n = G_ROWS;
    a.seq = G_SEQUENCE;
    a.table = mat(&r->table);
    a.positions = mat(&r->positions);
    a.dy = mat(&r->dy);
    a.y = mat(golden_output(r, 0, "y", d, G_ROWS, G_COLS)); a.bad_id = &r->bad;
    a.dtable = mat(golden_output(r, 1, "dtable", d, G_VOCABULARY, G_COLS));
    a.dpositions = mat(golden_output(r, 2, "dpositions", d, G_SEQUENCE, G_COLS));
    CHECK_OK(ampi_cpu_embedding(cpu, &a, NULL));
    CHECK_OK(ampi_cpu_embedding_backward(cpu, &a, NULL));
}

/* In place, on copies of x and dy: three heads of 12, the last column is not theirs. */
static void golden_rope(golden_run *r, ampi_cpu *cpu, amp_dtype d, int adjacent) {
    static const int32_t at[G_ROWS] = {0, 1, 2, 17, 40, 5};
    amp_k_rope a;
    memset(&a, 0, sizeof a);
    a.batch = 1; a.positions = G_ROWS; a.rotary = adjacent ? 8 : 12; a.heads[0] = 3; a.stride[0][1] = G_COLS;
    a.stride[0][2] = 12; a.dtype = d; a.adjacent = adjacent; a.step = -2 * log2(10000.0) / (double)a.rotary; a.at = at;
    for (a.backward = 0; a.backward < 2; a.backward++) {
        kernels_matrix *m = golden_output(r, a.backward, a.backward ? "dx" : "y", d, G_ROWS, G_COLS);
        memcpy(m->data, a.backward ? r->dy.data : r->x.data, m->bytes);
        a.x[0] = m->data;
        CHECK_OK(ampi_cpu_rope(cpu, &a, NULL));
    }
}

static const char *const golden_names[] = {"gelu",
                                           "gelu_erf",
                                           "tanh",
                                           "silu",
                                           "relu",
                                           "swiglu",
                                           "layernorm",
                                           "rmsnorm",
                                           "entropy_mean",
                                           "entropy_smooth",
                                           "entropy_smooth_sum",
                                           "mse_mean",
                                           "mse_sum",
                                           "embedding",
                                           "rope_llama",
                                           "rope_gptj"};
enum { GOLDEN_OPS = sizeof golden_names / sizeof *golden_names };

static void golden_operator(golden_run *r, int op, uint32_t seed, amp_dtype rounded, amp_dtype storage,
                            amp_cpu_path path) {
    ampi_cpu cpu = kernels_device(path, 1);
    golden_begin(r, seed, rounded, storage);
    switch (op) {
        case 5: golden_swiglu(r, &cpu, storage); break;
        case 6: case 7: golden_norm(r, &cpu, storage, op == 7); break;
        case 8: case 9: case 10: golden_entropy(r, &cpu, storage, op == 8 ? 0 : 0.1f, op == 10); break;
        case 11: case 12: golden_mse(r, &cpu, storage, op == 12); break;
        case 13: golden_embedding(r, &cpu, storage); break;
        case 14: case 15: golden_rope(r, &cpu, storage, op == 15); break;
        default: golden_activation(r, &cpu, storage, (amp_activation_kind)(AMP_ACT_GELU + op)); break;
    }
}

/* |got - exact| / |exact|; the exact values are those of an array, or of a matrix */
static double relative_norm(const kernels_matrix *got, const float *exact, const kernels_matrix *reference) {
    double off = 0, own = 0;
    for (int64_t i = 0; i < got->rows * got->cols; i++) {
        double e = exact ? (double)exact[i] : get(reference, i / got->cols, i % got->cols),
               d = get(got, i / got->cols, i % got->cols) - e;
        off += d * d;
        own += e * e;
    }
    return is_nan(off) || is_inf(off) ? 1e300 : sqrt(off / (own > 0 ? own : 1));
}

TEST(golden_fp32) {
    ampt_golden file = ampt_golden_open("kernels.bin");
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int op = 0; op < GOLDEN_OPS; op++) {
            golden_run r;
            golden_operator(&r, op, 0, AMP_F32, AMP_F32, (amp_cpu_path)path);
            for (int i = 0; i < G_OUTPUTS && r.names[i]; i++) {
                char name[80];
                int64_t n = 0;
                float *exact;
                double error;
                snprintf(name, sizeof name, "%s/%s", golden_names[op], r.names[i]);
                exact = (float *)ampt_golden_read(&file, name, 1, &n);
                CHECK_EQ(n, r.out[i].rows * r.out[i].cols);
                error = relative_norm(&r.out[i], exact, NULL);
                CHECK_MSG(error <= 1e-5, "%s: %.3g, path %d", name, error, path);
                free(exact);
            }
            golden_end(&r);
        }
    free(file.data);
}

/* The exact result is that of fp32 storage on the same rounded inputs: it is 10^4 times closer than what is measured. */
TEST(golden_16bit) {
    ampt_golden file = ampt_golden_open("kernels.bin");
    for (int path = 1; path <= paths(); path = AMPT_NEXT_PATH(path))
        for (int k = 1; k < STORAGES; k++)
            for (int op = 0; op < GOLDEN_OPS; op++) {
                double square[G_OUTPUTS] = {0};
                const char *names[G_OUTPUTS] = {NULL};
                for (uint32_t seed = 0; seed < G_SEEDS; seed++) {
                    golden_run r, exact;
                    golden_operator(&r, op, seed, storages[k], storages[k], (amp_cpu_path)path);
                    golden_operator(&exact, op, seed, storages[k], AMP_F32, (amp_cpu_path)path);
                    for (int i = 0; i < G_OUTPUTS && r.names[i]; i++) {
                        double e = relative_norm(&r.out[i], NULL, &exact.out[i]);
                        square[i] += e * e;
                        names[i] = r.names[i];
                    }
                    golden_end(&r);
                    golden_end(&exact);
                }
                for (int i = 0; i < G_OUTPUTS && names[i]; i++) {
                    char name[80];
                    double ours = sqrt(square[i] / G_SEEDS), theirs;
                    snprintf(name, sizeof name, "%s/torch/%s/%s", amp_dtype_name(storages[k]), golden_names[op],
                             names[i]);
                    theirs = ampt_golden_number(&file, name);
                    CHECK_MSG(ours <= 1.2 * theirs, "%s: %.3g, PyTorch %.3g, path %d", name, ours, theirs, path);
                    snprintf(name, sizeof name, "norms, losses, activations, %s", amp_dtype_name(storages[k]));
                    if (theirs > 0) ampt_figure(name, ours / theirs, 1.2);
                }
            }
    free(file.data);
}

/* ---- Long sums beside PyTorch's (tests/torch/oracle/sums.py): the error in units of 2^-24 may not grow with the number of terms.
   A sum in fp32 whose every number has passed r roundings of partial sums that are as large as half of the last one has an
   error of about sqrt(r / 3) units: each rounding's is uniform within one unit of what it rounds. */

enum { L_COLS = 16 };

static double rounded_sum(double r) { return sqrt(r / 3); }

static double sum_error(const kernels_matrix *got, const double *exact, double squares) {
    double off = 0, own = 0;
    for (int64_t i = 0; i < got->rows * got->cols; i++) {
        double d = get(got, i / got->cols, i % got->cols) - exact[i];
        off += d * d;
        own += exact[i] * exact[i];
    }
    return is_nan(off) ? 1e300 : sqrt(off / (own > squares ? own : squares)) / U;
}

static void check_sum(const ampt_golden *file, const char *name, const kernels_matrix *got, const double *exact, double squares,
                      double bound, amp_cpu_path path) {
    double error = sum_error(got, exact, squares), theirs = ampt_golden_number(file, name);
    CHECK_MSG(error <= bound, "%s: %.2f units, of %.2f at most, path %d", name, error, bound, (int)path);
    if (path > AMP_CPU_SCALAR || strncmp(name, "softmax", 7) != 0)      /* without FMA the exponential itself is worse */
        CHECK_MSG(error <= 1.2 * theirs, "%s: %.2f units, PyTorch %.2f, path %d", name, error, theirs, (int)path);
    if ((int)path == paths()) ampt_figure("long sums, fp32", error / theirs, 1.2);
}

/* The same numbers as sums of columns, of gradients of positions, of a table, and of a norm's bias. */
static void sums_of_rows(const ampt_golden *file, int64_t rows, int positive, amp_cpu_path path) {
    static const char *const names[] = {"columns", "positions", "table", "norm"};
    kernels_matrix x = kernels_make(AMP_F32, rows, L_COLS, 0), dx = kernels_make(AMP_F32, rows, L_COLS, 0), out[4];
    float *x32 = (float *)(void *)x.data, *stats = (float *)calloc((size_t)rows, 4);
    int32_t *ids = (int32_t *)malloc((size_t)rows * 4), bad = 0;
    double exact[2 * L_COLS] = {0}, whole[L_COLS], squares = 0;
    double eights = rounded_sum(3 + AMPI_SUM_ROWS / 8 / 2 + 2), norm = rounded_sum(AMPI_NORM_ROWS / 2 + 3 + 64 / 8 / 2 + 3);
    ampi_cpu cpu = kernels_device(path, 1);
    amp_k_column_sum c; amp_k_embedding p, t; amp_k_norm n;
    ampt_uniform(x32, rows * L_COLS, (uint32_t)rows, 0, positive ? 0.5f : 1, positive ? 0.5f : 0);
    for (int64_t i = 0; i < rows; i++) {
        ids[i] = (int32_t)(i % 2);
        for (int64_t j = 0; j < L_COLS; j++) {
            double v = (double)x32[i * L_COLS + j];
            exact[i % 2 * L_COLS + j] += v;
            squares += v * v;
        }
    }
    for (int j = 0; j < L_COLS; j++) whole[j] = exact[j] + exact[L_COLS + j];
    for (int i = 0; i < 4; i++) out[i] = kernels_make(AMP_F32, i == 1 || i == 2 ? 2 : 1, L_COLS, 0);
    memset(&c, 0, sizeof c); memset(&p, 0, sizeof p); memset(&n, 0, sizeof n);
    c.x = mat(&x); c.out = out[0].data; c.out_dtype = AMP_F32;
    p.ids = ids; p.n = rows; p.seq = 2; p.dy = mat(&x); p.bad_id = &bad;
    t = p;
    p.dpositions = mat(&out[1]);
    t.dtable = mat(&out[2]); t.seq = rows;
    n.x = n.dy = mat(&x); n.dx = mat(&dx); n.mean = n.rstd = stats; n.dbias.data = out[3].data; n.dbias.dtype = AMP_F32;
    CHECK_OK(ampi_cpu_column_sum(&cpu, &c, NULL));
    CHECK_OK(ampi_cpu_embedding_backward(&cpu, &p, NULL));
    CHECK_OK(ampi_cpu_embedding_backward(&cpu, &t, NULL));
    CHECK_OK(ampi_cpu_norm_backward(&cpu, &n, NULL));
    for (int i = 0; i < 4; i++) {
        char name[40];
        snprintf(name, sizeof name, "%s/%lld%s", names[i], (long long)rows, positive ? "+" : "");
        check_sum(file, name, &out[i], i == 1 || i == 2 ? exact : whole, squares, i == 3 ? norm : eights, path);
        drop(&out[i]);
    }
    drop(&x); drop(&dx); free(stats); free(ids);
}

static amp_k_gemm product_args(const kernels_matrix *a, const kernels_matrix *b, const kernels_matrix *y, int64_t k, int trans_b) {
    amp_k_gemm g;
    memset(&g, 0, sizeof g);
    g.m = y->rows; g.n = y->cols; g.k = k; g.batch = 1; g.alpha = 1; g.trans_b = trans_b;
    g.a = a->data; g.b = b->data; g.c = y->data; g.lda = a->ld; g.ldb = b->ld; g.ldc = y->ld;
    g.a_dtype = g.b_dtype = g.c_dtype = g.compute = AMP_F32;
    return g;
}

/* Rows of so many numbers: their products with a vector from either side, and their softmax. */
static void sums_along_rows(const ampt_golden *file, int64_t n, amp_cpu_path path) {
    kernels_matrix x = kernels_make(AMP_F32, L_COLS, n, 0), xt = kernels_make(AMP_F32, n, L_COLS, 0), w = kernels_make(AMP_F32, n, 1, 0), y = kernels_make(AMP_F32, L_COLS, n, 0);
    kernels_matrix column = kernels_make(AMP_F32, L_COLS, 1, 0), row = kernels_make(AMP_F32, 1, L_COLS, 0), wt = w;
    float *x32 = (float *)(void *)x.data, *w32 = (float *)(void *)w.data;
    double *exact = (double *)malloc((size_t)(L_COLS * n) * 8), sums[L_COLS] = {0}, squares = 0;
    ampi_cpu cpu = kernels_device(path, 1);
    amp_k_gemm g;
    amp_k_softmax s;
    char name[40];
    ampt_uniform(x32, L_COLS * n, (uint32_t)n, 0, 1, 0);
    ampt_uniform(w32, n, (uint32_t)n, 1, 1, 0);
    for (int64_t i = 0; i < L_COLS; i++) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++) {
            double v = (double)x32[i * n + j] * (double)w32[j];
            memcpy(xt.data + 4 * (j * L_COLS + i), &x32[i * n + j], 4);
            sums[i] += v;
            squares += v * v;
            sum += exact[i * n + j] = exp((double)x32[i * n + j]);
        }
        for (int64_t j = 0; j < n; j++) exact[i * n + j] /= sum;
    }
    wt.rows = 1; wt.cols = wt.ld = n;
    g = product_args(&x, &w, &column, n, 0);
    CHECK_OK(ampi_cpu_gemm(&cpu, &g, NULL));
    g = product_args(&wt, &xt, &row, n, 0);
    CHECK_OK(ampi_cpu_gemm(&cpu, &g, NULL));
    memset(&s, 0, sizeof s);
    s.batch = s.heads = 1; s.queries = L_COLS; s.keys = n; s.scale = 1; s.x_dtype = s.y_dtype = AMP_F32; s.x = x.data; s.y = y.data;
    CHECK_OK(ampi_cpu_softmax(&cpu, &s, NULL));
    snprintf(name, sizeof name, "matrix_times_column/%lld", (long long)n);      /* a lane has 1 / width of the terms */
    check_sum(file, name, &column, sums, squares, rounded_sum(AMPI_GEMV_DOT / width(path) / 2 + 8), path);
    snprintf(name, sizeof name, "row_times_matrix/%lld", (long long)n);         /* and so has a product of two numbers of one rounding */
    check_sum(file, name, &row, sums, squares, rounded_sum(AMPI_GEMV_BLOCK / 2 + 3), path);
    snprintf(name, sizeof name, "softmax/%lld", (long long)n);  /* exponential and scaling, and a sum of positive numbers in chunks */
    check_sum(file, name, &y, exact, 0, 2 + rounded_sum(AMPI_ROW_CHUNK / width(path) / 3), path);
    drop(&x); drop(&xt); drop(&w); drop(&y); drop(&column); drop(&row); free(exact);
}

/* Products: chains of at most 192 terms, three to a block of k, and blocks one after the other. */
static void sums_of_products(const ampt_golden *file, int64_t k, amp_cpu_path path) {
    kernels_matrix a = kernels_make(AMP_F32, 64, k, 0), b = kernels_make(AMP_F32, k, 64, 0), c = kernels_make(AMP_F32, 64, 64, 0);
    float *a32 = (float *)(void *)a.data, *b32 = (float *)(void *)b.data;
    double exact[64 * 64] = {0}, squares = 0;
    ampi_cpu cpu = kernels_device(path, 1);
    amp_k_gemm g = product_args(&a, &b, &c, k, 0);
    char name[40];
    ampt_uniform(a32, 64 * k, (uint32_t)k, 0, 1, 0);
    ampt_uniform(b32, 64 * k, (uint32_t)k, 1, 1, 0);
    for (int64_t i = 0; i < 64; i++)
        for (int64_t p = 0; p < k; p++)
            for (int64_t j = 0; j < 64; j++) {
                double v = (double)a32[i * k + p] * (double)b32[p * 64 + j];
                exact[i * 64 + j] += v;
                squares += v * v;
            }
    CHECK_OK(ampi_cpu_gemm(&cpu, &g, NULL));
    snprintf(name, sizeof name, "product/%lld", (long long)k);
    check_sum(file, name, &c, exact, squares, rounded_sum((192 + 3 + (double)k / 256) / 2 + 1), path);
    drop(&a); drop(&b); drop(&c);
}

/* 64 queries over n keys: o; or n queries over 64 keys: the gradient of the values, a sum over the queries. */
static void sums_of_attention(const ampt_golden *file, int64_t n, int backward, amp_cpu_path path) {
    enum { DIM = 64 };
    static const int order[] = {0, 2, 3, 1};
    int64_t queries = backward ? n : DIM, keys = backward ? DIM : n;
    kernels_matrix in[4], out[4];           /* q, k, v, do; o, dq, dk, dv */
    double *p = (double *)malloc((size_t)keys * 8), exact[DIM * DIM] = {0}, bound = 0;
    float *lse = (float *)malloc((size_t)queries * 4);
    ampi_cpu cpu = kernels_device(path, 1);
    amp_k_attention a;
    char name[40];
    for (int i = 0; i < 4; i++) {
        in[i] = kernels_make(AMP_F32, i == 0 || i == 3 ? queries : keys, DIM, 0);
        out[i] = kernels_make(AMP_F32, i < 2 ? queries : keys, DIM, 0);
        ampt_uniform((float *)(void *)in[i].data, in[i].rows * DIM, (uint32_t)n, (uint32_t)(backward ? order[i] : i), 1, 0);
    }
    for (int64_t i = 0; i < queries; i++) {
        double sum = 0;
        for (int64_t j = 0; j < keys; j++) {
            double score = 0;
            for (int64_t d = 0; d < DIM; d++) score += get(&in[0], i, d) * get(&in[1], j, d);
            sum += p[j] = exp(score / 8);
        }
        for (int64_t j = 0; j < keys; j++)
            for (int64_t d = 0; d < DIM; d++)
                exact[(backward ? j : i) * DIM + d] += p[j] / sum * (backward ? get(&in[3], i, d) : get(&in[2], j, d));
    }
    memset(&a, 0, sizeof a);
    a.batch = a.heads = 1; a.queries = queries; a.keys = keys; a.dim = DIM; a.scale = 0.125f; a.dtype = a.compute = AMP_F32; a.lse = lse;
    a.q = in[0].data; a.k = in[1].data; a.v = in[2].data; a.d_o = in[3].data;
    a.o = out[0].data; a.dq = out[1].data; a.dk = out[2].data; a.dv = out[3].data;
    a.q_stride[1] = a.k_stride[1] = a.v_stride[1] = a.o_stride[1] = a.do_stride[1] = a.dq_stride[1] = a.dk_stride[1] = a.dv_stride[1] = DIM;
    CHECK_OK(ampi_cpu_attention(&cpu, &a, NULL));
    if (backward) CHECK_OK(ampi_cpu_attention_backward(&cpu, &a, NULL));
    /* within a tile, the tiles of 1024, and those one after the other; scores and exponentials beside it, 4 units */
    bound = 4 + rounded_sum((double)(backward ? 32 + 32 : 64 + 16) / 2 + (double)n / 1024 / 2);
    snprintf(name, sizeof name, "attention_%s/%lld", backward ? "queries" : "keys", (long long)n);
    check_sum(file, name, &out[backward ? 3 : 0], exact, 0, bound, path);
    for (int i = 0; i < 4; i++) { drop(&in[i]); drop(&out[i]); }
    free(p); free(lse);
}

TEST(long_sums) {
    static const int64_t rows[] = {1000, 10000, 400000}, depths[] = {256, 512, 1024, 4096};
    ampt_golden file = ampt_golden_open("sums.bin");
    for (int path = 1; path <= (int)AMPT_WIDEST_PATH(ampi_cpu_best_path()); path = AMPT_NEXT_PATH(path)) {     /* those above differ in bf16 alone */
        for (int i = 0; i < 3; i++) {
            sums_of_rows(&file, rows[i], 0, (amp_cpu_path)path);
            sums_of_rows(&file, rows[i], 1, (amp_cpu_path)path);
            sums_along_rows(&file, rows[i], (amp_cpu_path)path);
        }
        for (int i = 0; i < 4; i++) sums_of_products(&file, depths[i], (amp_cpu_path)path);
        for (int i = 0; i < 4; i++) sums_of_attention(&file, i / 2 ? 16384 : 1024, i % 2, (amp_cpu_path)path);
    }
    free(file.data);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(activations);
    RUN(activation_rows);
    RUN(activation_special_values);
    RUN(activation_in_place);
    RUN(swiglu); RUN(activation_biases);
    RUN(norm_forward);
    RUN(norm_backward);
    RUN(norm_in_place_and_special_rows);
    RUN(cross_entropy);
    RUN(cross_entropy_labels);
    RUN(cross_entropy_special_rows);
    RUN(cross_entropy_large_logits);
    RUN(mse);
    RUN(add);
    RUN(cast);
    RUN(dropout); RUN(rope); RUN(rope_of_infinities);
    RUN(embedding);
    RUN(embedding_ids);
    RUN(no_memory);
    RUN(golden_fp32);
    RUN(golden_16bit);
    if (!AMPT_SANITIZED) RUN_LONG(long_sums);
    return TEST_END();
}
