/* t_cuda_operators.cpp - compares the bandwidth-bound operators of the CUDA backend with the CPU backend.  These are norms,
 * softmax, activations, losses, embeddings, dropout and addition.
 *
 * Where both sides do the same roundings, the bits must be equal.  Elsewhere, the bound follows from the operations: u =
 * 2^-24 for each rounding, the GPU's documented errors of ex2, rcp and rsqrt (2^-22, 2^-23, 2^-22), and (n - 1) u per sum
 * of n terms.  Each bound is computed from the inputs of the test.  The CPU may have no fused multiply-add, which rounds
 * once more. */
#include "test_cuda.h"

static const double u = 1.0 / 16777216;
static const double exp_error = 8 * u;          /* of exp on both sides, relative: 2^-22 and 1.03 ulp; 1.25 |x| u beside it */
static const double inf = HUGE_VAL;

typedef std::vector<double> doubles;

static doubles values_of(const std::string &data, amp_dtype dtype, size_t offset = 0, int64_t n = -1) {
    doubles out(n < 0 ? (data.size() - offset) / amp_dtype_size(dtype) : (size_t)n);
    for (size_t i = 0; i < out.size(); i++) out[i] = cuda_value(data.data() + offset, dtype, i);
    return out;
}

/* n numbers of a dtype, with some zeros and large ones among them. */
static std::string data_of(int64_t n, uint64_t seed, amp_dtype dtype, float size = 2) {
    std::vector<float> x = cuda_random(n, seed, -size, size);
    for (size_t i = 0; i < x.size(); i++) {
        uint32_t word = amp_random_u32(seed + 1000, i);
        if (word % 61 == 0) x[i] = 0;
        if (word % 67 == 1) x[i] *= 8;
    }
    return cuda_stored(x, dtype);
}

/* Storage of up to four operands. */
struct dtypes { amp_dtype a, b, c, d; };
static const dtypes mixes[] = {
    {AMP_F32, AMP_F32, AMP_F32, AMP_F32}, {AMP_F16, AMP_F16, AMP_F16, AMP_F16}, {AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16},
    {AMP_BF16, AMP_F32, AMP_F32, AMP_BF16}, {AMP_F32, AMP_BF16, AMP_F16, AMP_F32}, {AMP_F16, AMP_BF16, AMP_F16, AMP_F32},
};

/* The table of shapes, and rows that need each number of elements a thread, and more than a block holds. */
static const cuda_shape long_rows[] = {
    {2, 760, 0, 0, "24 a thread"},      {2, 5120, 0, 0, "several warps"},   {2, 8400, 0, 0, "32 of fp32 a thread"},
    {9, 13000, 0, 0, "32 a thread"},    {2, 16640, 0, 0, "two chunks"},     {30, 400, 0, 0, "16 a thread"},
    {3, 9001, 0, 0, "three odd chunks"}, {9, 6400, 0, 0, "shared sums of fp32"},
};
static std::vector<cuda_shape> shapes(bool wide) {
    std::vector<cuda_shape> all(cuda_shapes, cuda_shapes + sizeof cuda_shapes / sizeof *cuda_shapes);
    if (wide) all.insert(all.end(), long_rows, long_rows + sizeof long_rows / sizeof *long_rows);
    return all;
}
/* Every shape with every mix of dtypes; the long ones with three that differ in the width of their pieces or of a norm's
   weight. */
static void each(bool wide, const std::function<void(const cuda_shape &, const dtypes &)> &run) {
    for (const cuda_shape &shape : shapes(wide))
        for (size_t i = 0; i < sizeof mixes / sizeof *mixes; i++)
            if (shape.count() < 5000 || i == 0 || i == 2 || i == 5) run(shape, mixes[i]);
}
/* The far shape.  The model never uses an address twice, and has 256 GiB of them until it starts anew. */
static void far_away(const std::function<void(const cuda_shape &, const dtypes &)> &run) {
    CHECK(coc_faults() == 0);
    coc_reset();
    run(cuda_far_shape, mixes[2]);
}

/* While it lives the model has one GPU of so many multiprocessors and this compute capability. */
struct multiprocessors {
    explicit multiprocessors(int count, int capability = 90) { set(1, count, capability); }
    ~multiprocessors() { set(2, 4, 90); }
    static void set(int devices, int count, int capability) {
        CHECK(coc_faults() == 0);
        coc_reset();
        if (CUDA_IS_MODEL) coc_set_devices(devices, (size_t)1 << 30, count, capability);
    }
};

/* While it lives only the last blocks of a launch run, and a grid has as many as its work needs. */
struct last_blocks : multiprocessors {
    explicit last_blocks(int count = 1 << 23, unsigned blocks = 24) : multiprocessors(count) { coc_set_last_blocks(blocks); }
    ~last_blocks() { coc_set_last_blocks(0); }
};
/* The ends of long arrays. */
static void far_ends(const std::function<void(const cuda_shape &, const dtypes &)> &run) {
    for (const cuda_shape &shape : cuda_far_ends) {
        last_blocks last;
        run(shape, mixes[2]);
    }
}
static cuda_compare compare_at(const cuda_shape &shape, const cuda_work &work) {
    return shape.before ? cuda_once_on_both(work) : cuda_on_both(work);
}

/* The elements before the shape's own are the GPU's alone; kernels are given all of them. */
static int64_t before_of(const cuda_side &s, const cuda_shape &shape) { return s.gpu ? shape.before : 0; }
static int64_t count_of(const cuda_side &s, const cuda_shape &shape) { return before_of(s, shape) + shape.count(); }
static void *room_at(cuda_side &s, int64_t n, const cuda_shape &shape, amp_dtype dtype) {
    size_t size = amp_dtype_size(dtype);
    return s.room((size_t)(before_of(s, shape) + n) * size, (size_t)shape.offset * size);
}
static void *put_at(cuda_side &s, const std::string &data, const cuda_shape &shape, amp_dtype dtype) {
    size_t size = amp_dtype_size(dtype), before = (size_t)before_of(s, shape) * size;
    if (before == 0) return s.put(data.data(), data.size(), (size_t)shape.offset * size);
    char *all = (char *)room_at(s, (int64_t)(data.size() / size), shape, dtype);
    if (all) s.set(all + before, data.data(), data.size());
    return all;
}
static void get_at(cuda_side &s, std::string *out, const void *all, const cuda_shape &shape, amp_dtype dtype) {
    size_t size = amp_dtype_size(dtype);
    s.get(out, (const char *)all + (size_t)before_of(s, shape) * size, (size_t)shape.count() * size);
}
/* cuda_side's put_matrix and get_matrix, with one copy for all rows unless they lie far apart. */
static amp_mat mat_at(cuda_side &s, const std::string *data, const cuda_shape &shape, amp_dtype dtype) {
    size_t size = amp_dtype_size(dtype), row = (size_t)shape.cols * size, ld = (size_t)shape.ld() * size;
    if (shape.rows == 0 || ld > CUDA_SPARSE_FROM)
        return s.put_matrix(data ? data->data() : NULL, dtype, shape.rows, shape.cols, shape.ld(), (size_t)shape.offset * size);
    std::string all((size_t)(shape.rows - 1) * ld + row, '\xff');
    for (size_t i = 0; data && i < (size_t)shape.rows; i++) all.replace(i * ld, row, *data, i * row, row);
    return amp_mat{put_at(s, all, shape, dtype), dtype, 0, shape.rows, shape.cols, shape.ld()};
}
static void get_mat(cuda_side &s, std::string *out, const amp_mat &m) {
    size_t size = amp_dtype_size(m.dtype), row = (size_t)m.cols * size, ld = (size_t)m.ld * size;
    std::string all, between;
    if (m.rows == 0 || ld > CUDA_SPARSE_FROM) {
        s.get_matrix(out, m);
        return;
    }
    s.get(&all, m.data, (size_t)(m.rows - 1) * ld + row);
    for (size_t at = 0; at < all.size(); at += ld) {
        out->append(all, at, row);
        between.append(all, at + row, at + ld < all.size() ? ld - row : 0);
    }
    CHECK_MSG(between == std::string(between.size(), '\xff'), "written between the rows of a matrix");
}
static void ok(amp_result result) { CHECK_MSG(result == AMP_OK, "%s", cuda_error_text()); }

/* ---- Addition, dropout, activations: contiguous */

/* More than all threads of one multiprocessor read ahead at once. */
static const cuda_shape many_pieces = {1, 45001, 0, 0, "many pieces"};
static void each_and_many(const std::function<void(const cuda_shape &, const dtypes &)> &run) {
    each(false, run);
    {
        multiprocessors one(1);
        run(many_pieces, mixes[2]);
    }
    far_ends(run);
}

static void add(const cuda_shape &shape, const dtypes &t) {
    int64_t n = shape.count();
    std::string a = data_of(n, 1, t.a), b = data_of(n, 2, t.b);
    doubles in = values_of(b, t.b);
    for (int both = 0; both < 2; both++)
        compare_at(shape, [&](cuda_side &s, std::string *out) {
            amp_k_add k = {put_at(s, a, shape, t.a), both ? put_at(s, b, shape, t.b) : NULL, NULL, t.a, t.b, t.c, 0, 0.7f, -1.3f};
            k.n = count_of(s, shape);
            k.y = room_at(s, n, shape, t.c);
            ok(s.backend->add(s.dev, &k, NULL));
            get_at(s, out, k.y, shape, t.c);
        }).check_within(0, t.c, n, [&](int64_t i, double y) {
            return both ? 1.3 * u * fabs(in[(size_t)i]) + cuda_spacing(AMP_F32, y) + cuda_spacing(t.c, y) : 0;
        }, shape.name);
}
CUDA_TEST(add) { each_and_many(add); }

/* Views of four dimensions: parts, swapped dimensions, repeated ones, with gaps in y, which must stay.  The factors are
   powers of 2, so that both sides round once. */
struct view_case { int64_t shape[4], a[4], b[4], y[4]; };
CUDA_TEST(add_of_views) {
    const view_case cases[] = {
        {{2, 3, 4, 5}, {60, 20, 5, 1}, {60, 20, 5, 1}, {60, 20, 5, 1}}, {{1, 3, 7, 33}, {0, 231, 33, 1}, {0, 300, 40, 1}, {0, 1000, 80, 2}},
        {{2, 5, 3, 300}, {4500, 1, 1500, 5}, {0, 0, 0, 1}, {9000, 900, 300, 1}}, {{1, 1, 0, 9}, {9, 9, 9, 1}, {9, 9, 9, 1}, {9, 9, 9, 1}},
    };
    const int64_t room = 20000;
    for (const view_case &c : cases)
        for (const dtypes &t : mixes)
            for (int both = 0; both < 2; both++) {
                std::string a = data_of(room, 1, t.a), b = data_of(room, 2, t.b);
                cuda_on_both([&](cuda_side &s, std::string *out) {
                    amp_k_add_views k = {s.put(a.data(), a.size()), both ? s.put(b.data(), b.size()) : NULL, NULL, t.a, t.b, t.c, 0.5f, -2, 0, {}, {}, {}, {}};
                    k.y = s.room((size_t)room * amp_dtype_size(t.c));
                    for (int i = 0; i < 4; i++) { k.shape[i] = c.shape[i]; k.a_stride[i] = c.a[i]; k.b_stride[i] = c.b[i]; k.y_stride[i] = c.y[i]; }
                    ok(s.backend->add_views(s.dev, &k, NULL));
                    s.get(out, k.y, (size_t)room * amp_dtype_size(t.c));
                }).check_same_bits();
            }
}

struct drop_case { float p; uint64_t seed, offset; };

static std::string dropout(const cuda_shape &shape, const dtypes &t, const drop_case &c) {
    int64_t n = shape.count();
    std::string x = data_of(n, 3, t.a);
    cuda_compare both = compare_at(shape, [&](cuda_side &s, std::string *out) {
        amp_k_dropout k = {put_at(s, x, shape, t.a), room_at(s, n, shape, t.b), t.a, t.b, count_of(s, shape), c.p, c.seed, c.offset, NULL};
        if (!s.gpu) k.offset += (uint64_t)shape.before;
        ok(s.backend->dropout(s.dev, &k, NULL));
        get_at(s, out, k.y, shape, t.b);
    });
    both.check_same_bits();
    return both.actual;
}

CUDA_TEST(dropout) {
    const drop_case cases[] = {
        {0.1f, 1, 0}, {0.5f, 99, 1}, {0.9f, 7, ((uint64_t)1 << 34) + 2}, {0.3f, 7, 3}, {0, 1, 0}, {1e-9f, 3, 4}
    };
    each_and_many([&](const cuda_shape &shape, const dtypes &t) {
        for (const drop_case &c : cases) dropout(shape, t, c);
    });
}

/* An element whose number is p stays; p one step above drops it. */
CUDA_TEST(dropout_at_its_bound) {
    const cuda_shape shape = {1, 24, 0, 0, ""};
    for (size_t i = 0; i < 24; i += 5) {
        float number = amp_random_uniform(17, i);
        double kept = cuda_value(&dropout(shape, mixes[0], {number, 17, 0})[4 * i], AMP_F32, 0);
        double dropped = cuda_value(&dropout(shape, mixes[0], {number + 1.0f / 16777216, 17, 0})[4 * i], AMP_F32, 0);
        CHECK(kept != 0 && dropped == 0);
    }
}

static double sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }
/* Relative, of 1 / (1 + exp(-x)) on both sides: exp (and `off` |x| u of an argument that itself was rounded) as far as
   it moves the sum, then the sum and the quotient. */
static double sigmoid_error(double x, double off = 0) {
    return u * (6 + (1 - sigmoid(x)) * (8 + (1.25 + off) * fabs(x)));
}
static double gelu_argument(double x) { return x * (1.5957691216057308 + 0.07135481282740843 * x * x); }

/* How far two results may be apart before they are rounded to storage. */
static double activation_bound(amp_activation_kind kind, double x, double y) {
    switch (kind) {
        case AMP_ACT_GELU: return fabs(y) * (sigmoid_error(gelu_argument(x), 8) + 2 * u) + 1e-37 * fabs(x);
        case AMP_ACT_SILU: return fabs(y) * (sigmoid_error(x) + 2 * u) + 1e-37 * fabs(x);
        case AMP_ACT_GELU_ERF: return fabs(x) * 6 * u;          /* erf: 2 ulp and 1.16 ulp, halved; one sum each */
        case AMP_ACT_TANH: return fabs(y) * 8 * u;              /* 2 ulp each */
        default: return 0;
    }
}
static double slope_bound(amp_activation_kind kind, double x) {
    double s, inner, y = tanh(x), density = 0.3989422804014327 * exp(-x * x / 2);
    switch (kind) {
        case AMP_ACT_GELU:
            s = sigmoid(gelu_argument(x));
            inner = fabs(x) * (1.5957691216057308 + 0.21406443848222529 * x * x);
            return (sigmoid_error(gelu_argument(x), 8) * (1 + inner + inner * s) + 8 * u * (1 + inner)) * s + 1e-37 * (1 + inner);
        case AMP_ACT_SILU:
            s = sigmoid(x);
            return (sigmoid_error(x) * (1 + fabs(x) + fabs(x) * s) + 8 * u * (1 + fabs(x))) * s + 1e-37 * (1 + fabs(x));
        case AMP_ACT_GELU_ERF: return 8 * u + fabs(x) * density * (exp_error + (4 + 2 * x * x) * u);
        case AMP_ACT_TANH: return 16 * u * y * y + 2 * u;
        default: return 0;
    }
}

static void activation(const cuda_shape &shape, const dtypes &t) {
    int64_t n = shape.count();
    std::string x = data_of(n, 4, t.a, 4);
    doubles in = values_of(x, t.a);
    for (int kind = AMP_ACT_NONE; kind <= AMP_ACT_RELU; kind++) {
        amp_activation_kind act = (amp_activation_kind)kind;
        compare_at(shape, [&](cuda_side &s, std::string *out) {
            amp_k_activation k = {0, act, t.a, t.b, put_at(s, x, shape, t.a), room_at(s, n, shape, t.b), NULL, NULL, NULL, AMP_F32, 0};
            k.n = count_of(s, shape);
            ok(s.backend->activation(s.dev, &k, NULL));
            get_at(s, out, k.y, shape, t.b);
        }).check_within(0, t.b, n, [&](int64_t i, double y) {
            double bound = activation_bound(act, in[(size_t)i], y);
            return bound > 0 ? bound + cuda_spacing(t.b, y) : 0;
        }, shape.name);
    }
}
CUDA_TEST(activation) { each_and_many(activation); }

static void activation_back(const cuda_shape &shape, const dtypes &t) {
    int64_t n = shape.count();
    std::string x = data_of(n, 5, t.a, 3), y = cuda_stored(cuda_random(n, 6), t.b), dy = data_of(n, 7, t.b);
    doubles in = values_of(x, t.a), slopes = values_of(dy, t.b);
    for (int kind = AMP_ACT_NONE; kind <= AMP_ACT_RELU + 1; kind++) {       /* the last: tanh from y */
        int from_y = kind > AMP_ACT_RELU;
        amp_activation_kind act = from_y ? AMP_ACT_TANH : (amp_activation_kind)kind;
        compare_at(shape, [&](cuda_side &s, std::string *out) {
            amp_k_activation k = {0, act, t.a, t.b, put_at(s, x, shape, t.a), NULL, put_at(s, dy, shape, t.b), NULL, NULL, AMP_F32, 0};
            k.n = count_of(s, shape);
            k.dx = t.a == t.b ? const_cast<void *>(k.dy) : room_at(s, n, shape, t.a);       /* dx may be dy */
            if (from_y) k.y = put_at(s, y, shape, t.b);
            ok(s.backend->activation_backward(s.dev, &k, NULL));
            get_at(s, out, k.dx, shape, t.a);
        }).check_within(0, t.a, n, [&](int64_t i, double e) {
            size_t j = (size_t)i;
            double bound = (from_y ? 2 * u : slope_bound(act, in[j])) * fabs(slopes[j]);
            return bound > 0 ? bound + 2 * u * fabs(e) + cuda_spacing(t.a, e) : 0;
        }, shape.name);
    }
}
CUDA_TEST(activation_backward) { each_and_many(activation_back); }

/* The sum with the bias is rounded to fp32 once on both sides; the bounds are those of the sum. */
static void activation_biased(const cuda_shape &shape, const dtypes &t) {
    int64_t n = shape.count();
    std::string x = data_of(n, 4, t.a, 4), bias = data_of(shape.cols, 17, t.c, 2), dy = data_of(n, 7, t.b);
    doubles in = values_of(x, t.a), added = values_of(bias, t.c), slopes = values_of(dy, t.b);
    for (int64_t i = 0; i < n; i++) in[(size_t)i] = (double)((float)in[(size_t)i] + (float)added[(size_t)(i % shape.cols)]);
    for (int kind = AMP_ACT_GELU; kind <= AMP_ACT_RELU; kind++) {
        amp_activation_kind act = (amp_activation_kind)kind;
        cuda_compare c = compare_at(shape, [&](cuda_side &s, std::string *out) {
            const void *added_here = s.put(bias.data(), bias.size(), (size_t)shape.offset * amp_dtype_size(t.c));
            amp_k_activation k = {count_of(s, shape), act, t.a, t.b, put_at(s, x, shape, t.a), room_at(s, n, shape, t.b),
                                  put_at(s, dy, shape, t.b), room_at(s, n, shape, t.a), added_here, t.c, shape.cols};
            ok(s.backend->activation(s.dev, &k, NULL));
            get_at(s, out, k.y, shape, t.b);
            k.y = NULL;
            ok(s.backend->activation_backward(s.dev, &k, NULL));
            get_at(s, out, k.dx, shape, t.a);
        });
        size_t next = c.check_within(0, t.b, n, [&](int64_t i, double y) {
            double bound = activation_bound(act, in[(size_t)i], y);
            return bound > 0 ? bound + cuda_spacing(t.b, y) : 0;
        }, shape.name);
        c.check_within(next, t.a, n, [&](int64_t i, double e) {
            double bound = slope_bound(act, in[(size_t)i]) * fabs(slopes[(size_t)i]);
            return bound > 0 ? bound + 2 * u * fabs(e) + cuda_spacing(t.a, e) : 0;
        }, shape.name);
    }
}
CUDA_TEST(activation_with_bias) {
    each(false, activation_biased);
    far_ends(activation_biased);
}

/* What is not finite goes through as on the CPU. */
CUDA_TEST(activation_of_infinities) {
    std::vector<float> x = {(float)inf, (float)-inf, NAN, -0.0f, 1e30f, -1e30f, 88, -88, 104, -104, 1e-40f};
    for (int kind = AMP_ACT_NONE; kind <= AMP_ACT_RELU; kind++)
        for (int backward = 0; backward < 2; backward++) {
            cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) {
                amp_k_activation k = {(int64_t)x.size(), (amp_activation_kind)kind, AMP_F32, AMP_F32, s.put(x), NULL, NULL, NULL, NULL, AMP_F32, 0};
                k.y = k.dx = s.room(4 * x.size());
                k.dy = s.put(std::vector<float>(x.size(), 1.0f));
                if (backward) k.y = NULL;
                ok((backward ? s.backend->activation_backward : s.backend->activation)(s.dev, &k, NULL));
                s.get(out, backward ? k.dx : k.y, 4 * x.size());
            });
            both.check_within(0, AMP_F32, (int64_t)x.size(), [&](int64_t, double e) { return fabs(e) * 32 * u + 1e-35; });
            if (!backward || kind == AMP_ACT_NONE) continue;
            CHECK_EQ(cuda_value(both.actual.data(), AMP_F32, 0), kind == AMP_ACT_TANH ? 0.0 : 1.0);
            CHECK_EQ(cuda_value(both.actual.data(), AMP_F32, 1), 0.0);
        }
}

/* ---- SwiGLU: rows with gaps */

static void swiglu(const cuda_shape &shape, const dtypes &t) {
    int64_t n = shape.count();
    std::string gate = data_of(n, 8, t.a, 4), up = data_of(n, 9, t.b);
    doubles g = values_of(gate, t.a);
    cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_swiglu k = {};
        k.gate = mat_at(s, &gate, shape, t.a);
        k.up = mat_at(s, &up, shape, t.b);
        k.y = mat_at(s, NULL, shape, t.c);
        ok(s.backend->swiglu(s.dev, &k, NULL));
        get_mat(s, out, k.y);
    }).check_within(0, t.c, n, [&](int64_t i, double y) {
        return fabs(y) * (sigmoid_error(g[(size_t)i]) + 4 * u) + 1e-36 + cuda_spacing(t.c, y);
    }, shape.name);
}

CUDA_TEST(swiglu) {
    each(false, swiglu);
    far_away(swiglu);
}

/* Biases give the bits of sums that were made before. */
static void swiglu_biased(const cuda_shape &shape, const dtypes &t) {
    int64_t n = shape.count();
    std::string gate = data_of(n, 8, t.a, 4), bias = data_of(shape.cols, 18, t.c, 2), dy = data_of(n, 12, t.b);
    doubles g = values_of(gate, t.a), b = values_of(bias, t.c);
    std::vector<float> added((size_t)n);
    for (size_t i = 0; i < (size_t)n; i++) added[i] = (float)g[i] + (float)b[i % (size_t)shape.cols];
    std::string sum = cuda_stored(added, AMP_F32), sums[2];
    for (int biased = 0; biased < 2; biased++)
        for (int up_too = 0; up_too < 2; up_too++) {
            cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) {
                amp_k_swiglu k = {};
                k.gate = biased ? mat_at(s, &gate, shape, t.a) : mat_at(s, &sum, shape, AMP_F32);
                k.up = up_too ? k.gate : mat_at(s, &dy, shape, t.b);
                k.y = mat_at(s, NULL, shape, t.b);
                k.dy = mat_at(s, &dy, shape, t.b);
                k.dgate = mat_at(s, NULL, shape, t.d);
                k.dup = mat_at(s, NULL, shape, t.d);
                if (biased) k.gate_bias = put_at(s, bias, shape, t.c), k.gate_bias_dtype = t.c;
                if (biased && up_too) k.up_bias = k.gate_bias, k.up_bias_dtype = t.c;
                ok(s.backend->swiglu(s.dev, &k, NULL));
                ok(s.backend->swiglu_backward(s.dev, &k, NULL));
                get_mat(s, out, k.y);
                get_mat(s, out, k.dgate);
                get_mat(s, out, k.dup);
            });
            if (biased == 0) sums[up_too] = c.actual;
            else CHECK(c.actual == sums[up_too]);
        }
}
CUDA_TEST(swiglu_with_biases) { each(false, swiglu_biased); }

static void swiglu_back(const cuda_shape &shape, const dtypes &t) {
    int64_t n = shape.count();
    std::string gate = data_of(n, 10, t.a, 4), up = data_of(n, 11, t.b), dy = data_of(n, 12, t.c);
    doubles g = values_of(gate, t.a), v = values_of(up, t.b), d = values_of(dy, t.c);
    cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_swiglu k = {};
        k.gate = mat_at(s, &gate, shape, t.a);
        k.up = mat_at(s, &up, shape, t.b);
        k.dy = mat_at(s, &dy, shape, t.c);
        k.dgate = mat_at(s, NULL, shape, t.d);
        k.dup = mat_at(s, NULL, shape, t.a);
        ok(s.backend->swiglu_backward(s.dev, &k, NULL));
        get_mat(s, out, k.dgate);
        get_mat(s, out, k.dup);
    });
    size_t next = c.check_within(0, t.d, n, [&](int64_t i, double e) {
        size_t j = (size_t)i;
        return fabs(d[j] * v[j]) * (slope_bound(AMP_ACT_SILU, g[j]) + 1e-35) + 4 * u * fabs(e) + cuda_spacing(t.d, e);
    }, shape.name);
    c.check_within(next, t.a, n, [&](int64_t i, double e) {
        return fabs(e) * (sigmoid_error(g[(size_t)i]) + 4 * u) + 1e-36 + cuda_spacing(t.a, e);
    }, shape.name);
}

CUDA_TEST(swiglu_backward) {
    each(false, swiglu_back);
    far_away(swiglu_back);
}

/* ---- RoPE: rows of heads with gaps.  The model's exp2 and fused products are the CPU's, and so are all bits; a GPU's
   exp2 may differ in the last bit, and then a cosine or sine is the next fp32 number. */

struct rope_case { int64_t batch, positions, heads[2], dim, rotary, gap, offset; int adjacent, at; const char *name; };

static void rope(const rope_case &c, amp_dtype dtype, int backward) {
    std::vector<int32_t> at((size_t)(c.batch * c.positions));
    std::string x[2];
    for (size_t i = 0; i < at.size(); i++) at[i] = (int32_t)(i * 7919 % 65537) - 5;
    for (int i = 0; i < 2; i++) x[i] = data_of(c.batch * c.positions * c.heads[i] * c.dim, 30 + (uint64_t)i, dtype);
    cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_rope k = {};
        amp_mat m[2];
        k.batch = c.batch; k.positions = c.positions; k.rotary = c.rotary; k.offset = c.offset; k.dtype = dtype;
        k.adjacent = c.adjacent; k.backward = backward; k.step = -2 * log2(10000.0) / (double)(c.rotary ? c.rotary : 1);
        for (int i = 0; i < 2; i++) {
            int64_t ld = c.heads[i] * c.dim + c.gap;
            m[i] = s.put_matrix(x[i].data(), dtype, c.batch * c.positions, c.heads[i] * c.dim, ld);
            if (c.heads[i] == 0) continue;
            k.x[i] = m[i].data; k.heads[i] = c.heads[i];
            k.stride[i][0] = c.positions * ld; k.stride[i][1] = ld; k.stride[i][2] = c.dim;
        }
        if (c.at) k.at = s.put(at);
        k.at_stride = c.at == 2 ? c.positions : 0;
        ok(s.backend->rope(s.dev, &k, NULL));
        for (int i = 0; i < 2; i++) if (c.heads[i]) s.get_matrix(out, m[i]);
    });
    size_t next = 0;
    for (const std::string &from : x) {
        next = both.check_within(next, dtype, (int64_t)from.size() / amp_dtype_size(dtype), [&](int64_t i, double e) {
            int64_t j = i % c.dim, half = c.rotary / 2;
            if (j >= c.rotary) return 0.0;
            int64_t partner = c.adjacent ? i ^ 1 : j < half ? i + half : i - half;
            double sizes = fabs(cuda_value(&from[0], dtype, (size_t)i)) + fabs(cuda_value(&from[0], dtype, (size_t)partner));
            return 5 * u * sizes + cuda_spacing(dtype, e);
        }, c.name);
    }
    if (CUDA_IS_MODEL) both.check_same_bits();
}

CUDA_TEST(rope) {
    static const rope_case cases[] = {
        {2, 5, {4, 2}, 64, 64, 0, 0, 0, 0, "grouped heads"},     {2, 5, {4, 2}, 64, 64, 0, 9, 1, 0, "neighbours"},
        {2, 3, {3, 3}, 80, 32, 8, 3, 0, 2, "part of a head"},    {2, 3, {3, 1}, 80, 40, 8, 0, 1, 1, "part, four wide"},
        {1, 7, {2, 1}, 6, 6, 1, 1000000, 0, 0, "one by one"},    {3, 2, {5, 0}, 10, 6, 3, 0, 1, 2, "q alone"},
        {1, 1, {40, 8}, 128, 128, 0, 4095, 0, 0, "one token"},   {2, 200, {3, 2}, 16, 16, 0, 0, 0, 0, "more than a block"},
        {0, 3, {2, 2}, 16, 16, 0, 0, 0, 0, "no sequence"},       {2, 3, {2, 2}, 0, 0, 0, 0, 0, 0, "no dimension"},
    };
    for (const rope_case &c : cases)
        for (int i = 0; i < 6; i++) rope(c, i % 3 == 0 ? AMP_F32 : i % 3 == 1 ? AMP_F16 : AMP_BF16, i / 3);
    multiprocessors one(1);                             /* a grid that goes round several times */
    rope({2, 300, {3, 2}, 64, 64, 0, 0, 0, 2, "few threads"}, AMP_F32, 0);
}

/* ---- Norms */

/* A row of `n` values with mean and 1 / standard deviation, and how far two computations of them may be apart. */
struct row_facts { double mean, rstd, mean_error, rstd_error; };
static row_facts facts_of(const double *x, int64_t n, int rms, double eps) {
    row_facts f = {0, 0, 0, 0};
    double magnitude = 0, variance = 0, error;
    for (int64_t i = 0; i < n; i++) {
        f.mean += x[i] / (double)n;
        magnitude += fabs(x[i]);
    }
    if (rms) f.mean = 0;
    else f.mean_error = cuda_sum_bound(n, magnitude) / (double)n + 4 * u * fabs(f.mean);
    for (int64_t i = 0; i < n; i++) variance += (x[i] - f.mean) * (x[i] - f.mean) / (double)n;
    error = cuda_sum_bound(n + 6, variance) + 2 * f.mean_error * f.mean_error;
    f.rstd = 1 / sqrt(variance + eps);
    f.rstd_error = f.rstd * (error / (variance + eps) + 10 * u);
    return f;
}

/* What a norm call is given; parts: 1 weight, 2 bias, 4 residual, 8 sum. */
struct norm_case { int rms, parts; };
static const norm_case norm_cases[] = {{0, 3}, {1, 1}, {0, 0}, {0, 15}, {1, 13}, {0, 5}, {0, 2}};

static void norm_forward(const cuda_shape &shape, const dtypes &t, const norm_case &c) {
    int64_t n = shape.count(), rows = shape.rows, cols = shape.cols;
    std::string x = data_of(n, 20, t.a), residual = data_of(n, 21, t.b);
    std::string weight = data_of(cols, 22, t.d), bias = data_of(cols, 23, t.d);
    doubles w = values_of(weight, t.d), b = values_of(bias, t.d);
    int stored = (c.parts & 12) == 12;
    amp_dtype sum_type = t.a == t.b ? t.b : t.c;
    cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_norm k = {};
        k.rms = c.rms;
        k.eps = 1e-5f;
        k.x = mat_at(s, &x, shape, t.a);
        if (c.parts & 4) k.residual = mat_at(s, &residual, shape, t.b);
        if (stored) k.sum = sum_type == t.b ? k.residual : mat_at(s, NULL, shape, sum_type);    /* sum may be residual */
        k.y = mat_at(s, NULL, shape, t.c);
        if (c.parts & 1) k.weight = s.put(weight.data(), weight.size());
        if (c.parts & 2) k.bias = s.put(bias.data(), bias.size());
        k.weight_dtype = t.d;
        k.mean = c.rms ? NULL : (float *)s.room((size_t)rows * 4);
        k.rstd = (float *)s.room((size_t)rows * 4);
        ok(s.backend->norm(s.dev, &k, NULL));
        if (stored) get_mat(s, out, k.sum);
        if (!c.rms) s.get(out, k.mean, (size_t)rows * 4);
        s.get(out, k.rstd, (size_t)rows * 4);
        get_mat(s, out, k.y);
    });
    doubles in = values_of(x, t.a), r = values_of(residual, t.b);
    for (size_t i = 0; i < in.size() && (c.parts & 4); i++) in[i] = (double)((float)in[i] + (float)r[i]);
    if (stored) in = values_of(both.expected, sum_type, 0, n);
    std::vector<row_facts> facts;
    for (int64_t i = 0; i < rows; i++) facts.push_back(facts_of(&in[(size_t)(i * cols)], cols, c.rms, 1e-5f));
    size_t at = stored ? both.check_within(0, sum_type, n, [](int64_t, double) { return 0; }, "sum") : 0;
    if (!c.rms) at = both.check_within(at, AMP_F32, rows, [&](int64_t i, double) { return facts[(size_t)i].mean_error; }, "mean");
    at = both.check_within(at, AMP_F32, rows, [&](int64_t i, double) { return facts[(size_t)i].rstd_error; }, "rstd");
    both.check_within(at, t.c, n, [&](int64_t i, double y) {
        const row_facts &f = facts[(size_t)(i / cols)];
        double far = fabs(in[(size_t)i] - f.mean), scale = c.parts & 1 ? fabs(w[(size_t)(i % cols)]) : 1;
        double shift = c.parts & 2 && !c.rms ? fabs(b[(size_t)(i % cols)]) : 0;
        double bound = scale * (f.rstd * (f.mean_error + 2 * u * far) + far * f.rstd_error);
        return bound + 6 * u * (far * f.rstd * scale + shift) + cuda_spacing(t.c, y);
    }, shape.name);
}

CUDA_TEST(norm) {
    each(true, [](const cuda_shape &shape, const dtypes &t) {
        for (const norm_case &c : norm_cases)
            if (shape.count() < 1000 || c.parts == 15 || (c.parts == 13 && shape.count() < 5000)) norm_forward(shape, t, c);
    });
    far_away([](const cuda_shape &shape, const dtypes &t) { norm_forward(shape, t, norm_cases[3]); });
}

/* parts: 1 weight, 2 gradients of weight and bias, 4 dsum, 8 they are added to what is there, 16 the sum of dx, on the GPU */
static const norm_case norm_back_cases[] = {{0, 3}, {1, 3}, {0, 31}, {1, 23}, {0, 4}, {0, 2}, {1, 10}, {0, 20}};

/* It sums dx before dx is rounded. */
static void check_dx_sum(cuda_side &s, const std::string &dx, const amp_k_gradient &sum, const cuda_shape &shape, const dtypes &t,
                         const doubles &before) {
    doubles x = values_of(dx, t.c), got;
    std::string bytes;
    s.get(&bytes, sum.data, (size_t)shape.cols * amp_dtype_size(t.d));
    got = values_of(bytes, t.d);
    for (size_t j = 0; j < (size_t)shape.cols; j++) {
        double exact = before[j], magnitude = fabs(before[j]), rounding = 0;
        for (size_t i = j; i < x.size(); i += (size_t)shape.cols) exact += x[i], magnitude += fabs(x[i]), rounding += cuda_spacing(t.c, x[i]);
        double bound = cuda_sum_bound(shape.rows + 2, magnitude) + rounding + cuda_spacing(t.d, exact);
        CHECK_MSG(fabs(got[j] - exact) <= bound, "%s: the sum of dx in column %d is %g, must be %g", shape.name, (int)j, got[j], exact);
    }
}

static void norm_back(const cuda_shape &shape, const dtypes &t, const norm_case &c) {
    int64_t n = shape.count(), rows = shape.rows, cols = shape.cols;
    std::string x = data_of(n, 24, t.a), dy = data_of(n, 25, t.b), dsum = data_of(n, 26, t.c), weight = data_of(cols, 27, t.d);
    std::string old = data_of(cols, 28, t.d);
    doubles in = values_of(x, t.a), d = values_of(dy, t.b), ds = values_of(dsum, t.c);
    doubles w = values_of(weight, t.d), before = values_of(old, t.d);
    std::vector<float> mean, rstd;
    amp_dtype low = t.c != AMP_F32 || c.parts == 3 ? AMP_DTYPE_DEFAULT : c.rms ? AMP_F16 : AMP_BF16;     /* a second output */
    for (int64_t i = 0; i < rows; i++) {
        row_facts f = facts_of(&in[(size_t)(i * cols)], cols, c.rms, 1e-5f);
        mean.push_back((float)f.mean);
        rstd.push_back((float)f.rstd);
    }
    cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_norm k = {};
        k.rms = c.rms;
        k.x = mat_at(s, &x, shape, t.a);
        k.dy = mat_at(s, &dy, shape, t.b);
        if (c.parts & 4) k.dsum = mat_at(s, &dsum, shape, t.c);
        k.dx = c.parts & 4 ? k.dsum : mat_at(s, NULL, shape, t.c);      /* dsum may be dx */
        if (c.parts & 1) k.weight = s.put(weight.data(), weight.size());
        k.weight_dtype = t.d;
        k.mean = c.rms ? NULL : s.put(mean);
        k.rstd = s.put(rstd);
        if (c.parts & 2) k.dweight.data = s.put(old.data(), old.size());
        if (c.parts & 2) k.dbias.data = s.put(old.data(), old.size());
        k.dweight.dtype = k.dbias.dtype = t.d;
        k.dweight.add = k.dbias.add = (c.parts & 8) != 0;
        if (low != AMP_DTYPE_DEFAULT) k.dx_low = mat_at(s, NULL, shape, low);
        if ((c.parts & 16) && s.backend->sums)
            k.dx_sum = amp_k_gradient{s.put(old.data(), old.size()), t.d, (c.parts & 8) != 0};
        ok(s.backend->norm_backward(s.dev, &k, NULL));
        get_mat(s, out, k.dx);
        if (k.dx_sum.data != NULL) check_dx_sum(s, *out, k.dx_sum, shape, t, c.parts & 8 ? before : doubles((size_t)cols));
        if (low != AMP_DTYPE_DEFAULT) {
            std::string got, rounded((size_t)n * 2, 0);
            get_mat(s, &got, k.dx_low);
            ok(amp_convert(&rounded[0], low, out->data(), AMP_F32, n, NULL, NULL));
            CHECK_MSG(got == rounded, "dx_low is not dx in %s: %s", amp_dtype_name(low), shape.name);
        }
        if (c.parts & 2) s.get(out, k.dweight.data, old.size());
        if (c.parts & 2) s.get(out, k.dbias.data, old.size());
    });
    doubles g_sum((size_t)rows), gh_sum((size_t)rows), w_sum((size_t)cols), b_sum((size_t)cols);
    auto h_of = [&](size_t i) { return (in[i] - (c.rms ? 0 : mean[i / (size_t)cols])) * rstd[i / (size_t)cols]; };
    auto g_of = [&](size_t i) { return d[i] * (c.parts & 1 ? w[i % (size_t)cols] : 1); };
    for (size_t i = 0; i < in.size(); i++) {
        g_sum[i / (size_t)cols] += fabs(g_of(i)) / (double)cols;
        gh_sum[i / (size_t)cols] += fabs(g_of(i) * h_of(i)) / (double)cols;
        w_sum[i % (size_t)cols] += fabs(d[i] * h_of(i));
        b_sum[i % (size_t)cols] += fabs(d[i]);
    }
    size_t at = both.check_within(0, t.c, n, [&](int64_t j, double e) {
        size_t i = (size_t)j, row = i / (size_t)cols;
        double h = fabs(h_of(i)), g = fabs(g_of(i)), gm = c.rms ? 0 : g_sum[row], ghm = gh_sum[row];
        double bound = cuda_sum_bound(cols + 4, gm) + h * cuda_sum_bound(cols + 4, ghm) + 4 * u * (g + gm + h * ghm);
        return rstd[row] * bound + (c.parts & 4 ? 2 * u * (fabs(ds[i]) + fabs(e)) : 0) + cuda_spacing(t.c, e);
    }, shape.name);
    for (int k = 0; k < 2 && (c.parts & 2); k++)
        at = both.check_within(at, t.d, cols, [&](int64_t j, double e) {
            double sum = k ? b_sum[(size_t)j] : w_sum[(size_t)j], was = c.parts & 8 ? fabs(before[(size_t)j]) : 0;
            if (k && c.rms) return 0.0;         /* RMSNorm has no bias: its gradient is left alone */
            return cuda_sum_bound(rows + 2, sum) + 2 * u * (was + sum) + cuda_spacing(t.d, e);
        }, k ? "dbias" : "dweight");
}

CUDA_TEST(norm_backward) {
    each(true, [](const cuda_shape &shape, const dtypes &t) {
        for (const norm_case &c : norm_back_cases)
            if (shape.count() < 1000 || c.parts == 31 || (c.parts == 23 && shape.count() < 5000)) norm_back(shape, t, c);
    });
    far_away([](const cuda_shape &shape, const dtypes &t) { norm_back(shape, t, norm_back_cases[2]); });
}
/* Every way once: what tools that slow a GPU down have time for. */
CUDA_TEST(norm_gradient_in_short) {
    for (const cuda_shape &shape : {cuda_shape{70, 24, 0, 0, "short rows"}, {9, 768, 0, 0, "rows of GPT-2"}, {2, 6144, 0, 0, "long rows"}})
        for (int mix : {0, 2}) norm_back(shape, mixes[mix], norm_back_cases[2]);
}
CUDA_TEST(norm_gradients_of_many_blocks) {
    multiprocessors many(40);   /* so many partial sums that each warp of the last kernel has one */
    norm_back({500, 24, 0, 0, "many blocks"}, mixes[2], norm_back_cases[2]);
}

/* Dynamic shared memory of just 48 KiB, beside the kernel's own; and sums that only large GPUs can hold there. */
CUDA_TEST(norm_backward_shared_memory) {
    for (int mix : {0, 2}) norm_back({2, 6144, 0, 0, "48 KiB"}, mixes[mix], norm_back_cases[2]);
    for (int capability : {75, 86, 80}) {
        multiprocessors smaller(4, capability);
        norm_back({9, 13000, 0, 0, "sums of 128 KiB"}, mixes[2], norm_back_cases[2]);
    }
    multiprocessors smaller(4, 75);
    norm_back({2, 9208, 0, 0, "sums of 72 KiB"}, mixes[2], norm_back_cases[2]);
}

/* A row's reduction finds the next row on its way: by cp.async, each number read once; long rows, into the L2 cache. */
CUDA_TEST(norm_backward_keeps_memory_busy) {
    if (!CUDA_IS_MODEL) return;
    for (const cuda_shape &shape : {cuda_shape{40, 3000, 0, 0, "24 a thread"}, {40, 2048, 0, 0, "16 a thread"}, {40, 5120, 0, 0, "two groups"}}) {
        coc_reset_counts();
        norm_back(shape, mixes[2], norm_back_cases[4]);
        coc_counts work = coc_count();
        CHECK(work.barriers > 0 && work.busy_barriers * 10 > work.barriers * 7);
        CHECK_EQ(work.async_bytes, coc_kernel_launches("ampc_norm_gradient_rows") * shape.count() * 4);
    }
    for (const cuda_shape &shape : {cuda_shape{9, 13000, 0, 0, "32 a thread"}, {6, 16640, 0, 0, "two chunks"}}) {
        coc_reset_counts();
        norm_back(shape, mixes[0], norm_back_cases[1]);
        long lines = (shape.count() * 4 + 127) / 128 * 2;       /* of x and dy */
        CHECK(coc_count().prefetches >= coc_kernel_launches("ampc_norm_gradient_wide") * lines);
        CHECK(coc_kernel_launches("ampc_norm_gradient_wide") > 0);
    }
}

/* ---- Softmax */

/* Masks of a table of cases; `set` fills in what a kind needs. */
struct mask_case { amp_mask_kind kind; int bidirectional; int64_t window, global; int extras; const char *name; };
enum { LENGTHS = 1, DOCUMENTS = 2 };
static const mask_case mask_cases[] = {
    {AMP_MASK_NONE, 0, 0, 0, 0, "none"},                            {AMP_MASK_NONE, 0, 0, 0, LENGTHS, "lengths"},
    {AMP_MASK_CAUSAL, 0, 0, 0, 0, "causal"},                        {AMP_MASK_CAUSAL, 0, 0, 0, LENGTHS | DOCUMENTS, "causal, all"},
    {AMP_MASK_WINDOW, 0, 3, 0, 0, "window"},                        {AMP_MASK_WINDOW, 1, 5, 0, LENGTHS, "window both ways"},
    {AMP_MASK_WINDOW, 0, INT64_MAX, 0, 0, "endless window"},        {AMP_MASK_WINDOW, 1, INT64_MAX, 0, 0, "endless both ways"},
    {AMP_MASK_WINDOW_GLOBAL, 0, 2, 3, DOCUMENTS, "global"},
    {AMP_MASK_WINDOW_GLOBAL, 1, 4, 2, 0, "global both ways"},       {AMP_MASK_PREFIX, 0, 0, 0, LENGTHS, "prefix"},
    {AMP_MASK_ARBITRARY, 0, 0, 0, 0, "arbitrary"},                  {AMP_MASK_ARBITRARY, 0, 0, 0, LENGTHS | DOCUMENTS, "arbitrary, all"},
    {AMP_MASK_NONE, 0, 0, 0, DOCUMENTS, "documents"},
};
struct softmax_shape { int64_t batch, heads, queries, keys; };

static void put_mask(cuda_side &s, const mask_case &c, const softmax_shape &f, amp_mask *m) {
    std::vector<int32_t> prefix, lengths, documents;
    std::vector<uint8_t> allowed;
    m->kind = c.kind;
    m->bidirectional = c.bidirectional;
    m->window = c.window;
    m->global = c.global;
    for (int64_t b = 0; b < f.batch; b++) {
        prefix.push_back((int32_t)(f.keys / 2 + b));
        lengths.push_back((int32_t)(f.keys - 1 - 2 * b));
        for (int64_t j = 0; j < f.keys; j++) documents.push_back((int32_t)(j / 5 + b));
    }
    for (int64_t i = 0; i < f.batch * f.heads * f.queries * f.keys; i++)
        allowed.push_back(i / f.keys % 4 != 1 && amp_random_u32(5, (uint64_t)i) % 3 != 0);
    if (c.kind == AMP_MASK_PREFIX) m->prefix = s.put(prefix);
    if (c.extras & LENGTHS) m->lengths = s.put(lengths);
    if (c.extras & DOCUMENTS) m->documents = s.put(documents);
    if (c.kind != AMP_MASK_ARBITRARY) return;
    m->allowed = s.put(allowed, 1);
    m->allowed_head_stride = f.queries * f.keys;
    m->allowed_batch_stride = f.heads * f.queries * f.keys;
}

/* The bound of y = exp(s - max) / sum is relative: the exponential's own, and what the sum inherits of all. */
static void softmax_check(const cuda_compare &both, const doubles &x, double scale, int64_t keys, amp_dtype dtype, const char *name) {
    doubles relative(x.size());
    for (size_t row = 0; row * (size_t)keys < x.size(); row++) {
        double max = -inf, sum = 0, inherited = 0;
        doubles y = values_of(both.expected, dtype, row * (size_t)keys * amp_dtype_size(dtype), keys);
        for (size_t j = 0; j < (size_t)keys; j++)
            if (y[j] > 0) max = fmax(max, scale * x[row * (size_t)keys + j]);
        for (size_t j = 0; j < (size_t)keys; j++) {
            double below = max - scale * x[row * (size_t)keys + j];
            relative[row * (size_t)keys + j] = exp_error + 4 * u * fabs(below);
            if (y[j] <= 0) continue;
            sum += exp(-below);
            inherited += exp(-below) * (exp_error + 4 * u * fabs(below));
        }
        for (size_t j = 0; j < (size_t)keys; j++) relative[row * (size_t)keys + j] += inherited / sum + cuda_sum_bound(keys, 1) + 8 * u;
    }
    both.check_within(0, dtype, (int64_t)x.size(), [&](int64_t i, double y) {
        return y == 0 ? 1e-37 + (dtype == AMP_F16 ? ldexp(1, -25) : 0) : y * relative[(size_t)i] + cuda_spacing(dtype, y);
    }, name);
}

/* before: batches that only the GPU has, ahead of the others. */
static void softmax_forward(const softmax_shape &f, const dtypes &t, const mask_case &c, int64_t offset, int64_t before = 0) {
    int64_t n = f.batch * f.heads * f.queries * f.keys;
    const cuda_shape flat = {1, n, 0, offset, c.name, before * f.heads * f.queries * f.keys};
    std::string x = data_of(n, 30, t.a, 6);
    cuda_compare both = compare_at(flat, [&](cuda_side &s, std::string *out) {
        amp_k_softmax k = {};
        k.batch = f.batch + (s.gpu ? before : 0); k.heads = f.heads; k.queries = f.queries; k.keys = f.keys;
        k.x = put_at(s, x, flat, t.a);
        k.y = t.a == t.b ? const_cast<void *>(k.x) : room_at(s, n, flat, t.b);
        k.x_dtype = t.a;
        k.y_dtype = t.b;
        k.scale = 0.37f;
        put_mask(s, c, f, &k.mask);
        ok(s.backend->softmax(s.dev, &k, NULL));
        get_at(s, out, k.y, flat, t.b);
    });
    softmax_check(both, values_of(x, t.a), 0.37f, f.keys, t.b, c.name);
}

CUDA_TEST(softmax) {
    for (const mask_case &c : mask_cases)
        for (const dtypes &t : mixes)
            for (const softmax_shape &f : {softmax_shape{2, 2, 7, 19}, {1, 2, 5, 40}, {2, 1, 9, 6}, {1, 1, 1, 1}})
                softmax_forward(f, t, c, 0);
}
CUDA_TEST(softmax_shapes) {
    each(true, [](const cuda_shape &shape, const dtypes &t) {
        if (shape.pad == 0) softmax_forward({1, 1, shape.rows, shape.cols}, t, mask_cases[shape.rows % 2 ? 0 : 2], shape.offset);
    });
}

/* Rows with NaN or +inf become NaN as far as the mask lets them see; hidden ones do not matter; rows of -inf are zeros. */
CUDA_TEST(softmax_of_infinities) {
    const float bad[] = {NAN, (float)inf, (float)-inf};
    for (float value : bad)
        for (int64_t at : {0, 3, 15})
            for (int all = 0; all < 2; all++) {
                std::vector<float> x = cuda_random(16 * 16, 31, -2, 2);
                for (size_t i = 0; i < 16; i++)
                    for (size_t j = 0; j < 16; j++)
                        if (all || j == (size_t)at) x[i * 16 + j] = value;
                cuda_on_both([&](cuda_side &s, std::string *out) {
                    amp_k_softmax k = {};
                    k.batch = k.heads = 1; k.queries = k.keys = 16;
                    k.x = s.put(x);
                    k.y = s.room(1024);
                    k.x_dtype = k.y_dtype = AMP_F32;
                    k.scale = 1;
                    k.mask.kind = AMP_MASK_CAUSAL;
                    ok(s.backend->softmax(s.dev, &k, NULL));
                    s.get(out, k.y, 1024);
                }).check_within(0, AMP_F32, 256, [](int64_t, double y) { return y * 64 * u; });
            }
}

static void softmax_back(int64_t rows, int64_t keys, const dtypes &t, int64_t offset, int64_t before = 0) {
    int64_t n = rows * keys;
    const cuda_shape flat = {1, n, 0, offset, "", before * keys};
    std::vector<float> p = cuda_random(n, 32, 0, 2 / (float)keys);
    std::vector<float> slopes = cuda_random(n, 33);
    for (size_t i = 0; i < p.size(); i += 5) {
        p[i] = 0;
        if (i % 2) slopes[i] = (float)inf;      /* a probability of 0 contributes 0 */
    }
    std::string y = cuda_stored(p, t.b), dy = cuda_stored(slopes, t.b);
    doubles yv = values_of(y, t.b), d = values_of(dy, t.b), sums((size_t)rows), magnitudes((size_t)rows);
    for (size_t i = 0; i < yv.size(); i++) {
        if (yv[i] == 0) continue;
        sums[i / (size_t)keys] += yv[i] * d[i];
        magnitudes[i / (size_t)keys] += fabs(yv[i] * d[i]);
    }
    compare_at(flat, [&](cuda_side &s, std::string *out) {
        amp_k_softmax k = {};
        k.batch = rows + (s.gpu ? before : 0); k.heads = 1; k.queries = 1; k.keys = keys;
        k.y = put_at(s, y, flat, t.b);
        k.dy = put_at(s, dy, flat, t.b);
        k.dx = t.a == t.b ? const_cast<void *>(k.dy) : room_at(s, n, flat, t.a);
        k.x_dtype = t.a;
        k.y_dtype = t.b;
        k.scale = 0.37f;
        ok(s.backend->softmax_backward(s.dev, &k, NULL));
        get_at(s, out, k.dx, flat, t.a);
    }).check_within(0, t.a, n, [&](int64_t j, double e) {
        size_t i = (size_t)j, row = i / (size_t)keys;
        if (yv[i] == 0) return 0.0;
        double bound = cuda_sum_bound(keys + 1, magnitudes[row]) + 2 * u * (fabs(d[i]) + fabs(sums[row]));
        return 0.37 * yv[i] * bound + 6 * u * fabs(e) + cuda_spacing(t.a, e);
    });
}

/* What a mask hides is not read, but for the rest of a piece of 8: y and dy there are NaN.  The CPU's answer comes from
   zeros. */
static void softmax_back_masked(const softmax_shape &f, const mask_case &c, amp_dtype t) {
    int64_t n = f.batch * f.heads * f.queries * f.keys;
    std::vector<float> p = cuda_random(n, 34, 0, 2 / (float)f.keys), slopes = cuda_random(n, 35), hidden[2] = {p, slopes};
    for (int64_t i = 0; i < n; i++) {
        int64_t query = i / f.keys % f.queries, key = i % f.keys;
        if (key <= query + f.keys - f.queries) continue;
        p[(size_t)i] = slopes[(size_t)i] = 0;
        hidden[0][(size_t)i] = hidden[1][(size_t)i] = key / 8 * 8 > query + f.keys - f.queries ? NAN : 0.0f;
    }
    std::string y[2] = {cuda_stored(p, t), cuda_stored(hidden[0], t)}, dy[2] = {cuda_stored(slopes, t), cuda_stored(hidden[1], t)};
    cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_softmax k = {};
        k.batch = f.batch; k.heads = f.heads; k.queries = f.queries; k.keys = f.keys;
        k.y = s.put(y[s.gpu].data(), y[s.gpu].size());
        k.dy = s.put(dy[s.gpu].data(), dy[s.gpu].size());
        k.dx = s.room((size_t)n * amp_dtype_size(t));
        k.x_dtype = k.y_dtype = t;
        k.scale = 0.5f;
        put_mask(s, c, f, &k.mask);
        ok(s.backend->softmax_backward(s.dev, &k, NULL));
        s.get(out, k.dx, (size_t)n * amp_dtype_size(t));
    }).check_within(0, t, n, [&](int64_t, double e) {       /* of sums of keys terms, each below 2 / keys */
        return 2 / (double)f.keys * (cuda_sum_bound(f.keys + 1, 2) + 8 * u) + cuda_spacing(t, e);
    }, c.name);
}

CUDA_TEST(softmax_backward_masked) {
    for (amp_dtype t : {AMP_F32, AMP_BF16})
        for (const softmax_shape &f : {softmax_shape{2, 2, 7, 19}, {1, 1, 40, 40}, {1, 3, 9, 6}, {1, 1, 5, 520}, {1, 1, 2, 9000}})
            softmax_back_masked(f, mask_cases[2], t);
}

CUDA_TEST(softmax_backward) {
    each(true, [](const cuda_shape &shape, const dtypes &t) {
        if (shape.pad == 0) softmax_back(shape.rows, shape.cols, t, shape.offset);
    });
}

CUDA_TEST(softmax_far_away) {
    last_blocks last;
    softmax_forward({1, 2, 4, 512}, mixes[2], mask_cases[2], 0, (int64_t)1 << 20);
    softmax_back(5, 512, mixes[2], 0, (int64_t)1 << 23);
}

/* ---- Cross-entropy */

struct loss_case { int sum; float smoothing; int scaled, in_place, losses, gradient; int64_t padding; };
static const loss_case loss_cases[] = {
    {0, 0, 1, 1, 1, 1, 0}, {1, 0.1f, 0, 0, 0, 1, 2}, {0, 0.3f, 1, 1, 1, 1, 1}, {1, 0, 1, 0, 1, 0, 0}, {0, 1, 0, 0, 0, 1, 0},
};

/* Row by row: its probabilities, its loss, and how far two computations may be apart. */
struct logit_facts { doubles p, p_error; double loss, loss_error; };
static logit_facts logits_of(const double *x, int64_t classes, int64_t label, double smoothing) {
    logit_facts f;
    double max = -inf, sum = 0, inherited = 0, mean = 0, magnitude = 0, relative, log_sum;
    for (int64_t j = 0; j < classes; j++) max = fmax(max, x[j]);
    for (int64_t j = 0; j < classes; j++) {
        double e = exp(x[j] - max), error = exp_error + 4 * u * (max - x[j]);
        sum += e;
        inherited += e * error;
        mean += x[j] / (double)classes;
        magnitude += fabs(x[j]);
        f.p.push_back(e);
        f.p_error.push_back(e * error);
    }
    relative = inherited / sum + cuda_sum_bound(classes + 8, 1) + 8 * u;
    for (size_t j = 0; j < f.p.size(); j++) {
        f.p[j] /= sum;
        f.p_error[j] = f.p_error[j] / sum + f.p[j] * relative + 1e-37;
    }
    log_sum = log(sum);
    f.loss = (1 - smoothing) * (log_sum + max - x[label]) + smoothing * (log_sum + max - mean);
    f.loss_error = relative + 8 * u * (fabs(log_sum) + fabs(max) + fabs(x[label]) + smoothing * fabs(mean));
    f.loss_error += smoothing * cuda_sum_bound(classes + 2, magnitude) / (double)classes;
    return f;
}

static void cross_entropy(const cuda_shape &shape, const dtypes &t, const loss_case &c) {
    const cuda_shape to = {shape.rows, shape.cols, shape.rows == 3 ? shape.pad + 1 : shape.pad, shape.offset, ""};
    int64_t n = shape.count(), rows = shape.rows, cols = shape.cols, counted = 0;
    int64_t classes = cols > c.padding ? cols - c.padding : cols;
    amp_dtype dt = c.in_place ? t.a : t.b;
    std::string x = data_of(n, 40, t.a, 5);
    doubles in = values_of(x, t.a);
    std::vector<int32_t> labels;
    std::vector<float> grad_scale(1, 1024);
    int32_t ignore = classes > 5 ? 3 : -7;      /* a class, or none */
    for (int64_t i = 0; i < rows; i++) {
        labels.push_back(i % 4 == 2 ? ignore : (int32_t)(amp_random_u32(41, (uint64_t)i) % (uint64_t)classes));
        counted += labels.back() != ignore;
    }
    cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_cross_entropy k = {};
        k.logits = mat_at(s, &x, shape, t.a);
        if (c.gradient) k.dlogits = c.in_place ? k.logits : mat_at(s, NULL, to, dt);
        k.classes = classes;
        k.labels = s.put(labels);
        k.ignore_index = ignore;
        k.sum = c.sum;
        k.smoothing = c.smoothing;
        k.factor = 0.5f;
        k.grad_scale = c.scaled ? s.put(grad_scale) : NULL;
        k.loss = (float *)s.room(4);
        k.losses = c.losses ? (float *)s.room((size_t)rows * 4) : NULL;
        k.bad_label = s.put(std::vector<int32_t>(1, 0));
        ok(s.backend->cross_entropy(s.dev, &k, NULL));
        s.get(out, k.bad_label, 4);
        s.get(out, k.loss, 4);
        if (c.losses) s.get(out, k.losses, (size_t)rows * 4);
        if (c.gradient) get_mat(s, out, k.dlogits);
    });
    double scale = 0.5 * (c.scaled ? 1024 : 1) / (c.sum || counted < 1 ? 1 : (double)counted), total = 0, total_error = 0;
    std::vector<logit_facts> facts((size_t)rows);
    for (size_t i = 0; i < (size_t)rows; i++) {
        if (labels[i] == ignore) continue;
        facts[i] = logits_of(&in[i * (size_t)cols], classes, labels[i], c.smoothing);
        total += fabs(facts[i].loss);
        total_error += facts[i].loss_error;
    }
    double share = c.sum || counted < 1 ? 1 : (double)counted;
    size_t at = both.check_within(0, AMP_I32, 1, [](int64_t, double) { return 0; }, "bad_label");
    at = both.check_within(at, AMP_F32, 1, [&](int64_t, double) { return (total_error + 4 * u * total) / share; }, "loss");
    if (c.losses) at = both.check_within(at, AMP_F32, rows, [&](int64_t i, double) { return facts[(size_t)i].loss_error; }, "losses");
    if (c.gradient)
        both.check_within(at, dt, n, [&](int64_t i, double e) {
            size_t row = (size_t)(i / cols), j = (size_t)(i % cols);
            if (labels[row] == ignore || (int64_t)j >= classes) return 0.0;
            double one = (int64_t)j == labels[row] ? 1 : 0;
            return scale * (facts[row].p_error[j] + 4 * u * (facts[row].p[j] + c.smoothing / (double)classes + one)) + cuda_spacing(dt, e);
        }, shape.name);
}

CUDA_TEST(cross_entropy) {
    each(false, [](const cuda_shape &shape, const dtypes &t) {
        for (const loss_case &c : loss_cases)
            if (shape.count() < 500 || c.sum == 0) cross_entropy(shape, t, c);
    });
    far_away([](const cuda_shape &shape, const dtypes &t) { cross_entropy(shape, t, loss_cases[2]); });
}

/* Rows beyond shared memory are read twice. */
CUDA_TEST(cross_entropy_long_rows) {
    cross_entropy({2, 60000, 0, 0, "beyond shared memory"}, mixes[0], loss_cases[0]);
    cross_entropy({2, 50304, 0, 0, "a vocabulary"}, mixes[2], loss_cases[2]);
    cross_entropy({3, 50257, 0, 0, "an odd vocabulary"}, mixes[2], loss_cases[0]);
    cross_entropy({2, 60001, 0, 1, "odd and read twice"}, mixes[0], loss_cases[2]);
    cross_entropy({1, 12288, 0, 0, "48 KiB of fp32"}, mixes[0], loss_cases[0]);
    cross_entropy({1, 24576, 0, 0, "48 KiB of bf16"}, mixes[2], loss_cases[0]);
}

/* A label out of range: the first is reported, an earlier report stays, nothing else is written. */
CUDA_TEST(cross_entropy_bad_label) {
    std::string x = data_of(60, 42, AMP_F32);
    for (int32_t wrong : {12, -1, 1 << 30})
        cuda_on_both([&](cuda_side &s, std::string *out) {
            amp_k_cross_entropy k = {};
            k.logits = s.put_matrix(x.data(), AMP_F32, 5, 12, 12);
            k.dlogits = k.logits;
            k.classes = 12;
            k.labels = s.put(std::vector<int32_t>{1, 11, wrong, 12, 3});
            k.ignore_index = -100;
            k.factor = 1;
            k.loss = (float *)s.room(4);
            k.bad_label = s.put(std::vector<int32_t>(1, 0));
            ok(s.backend->cross_entropy(s.dev, &k, NULL));
            s.get(out, k.bad_label, 4);
            s.get(out, k.loss, 4);
            get_mat(s, out, k.dlogits);
            CHECK_EQ(*(const int32_t *)out->data(), 3);
        }).check_same_bits();
}

/* Many rows, of which one thread looks at several that are wrong. */
CUDA_TEST(cross_entropy_first_bad_label) {
    std::vector<float> x = cuda_random(2100 * 3, 44);
    std::vector<int32_t> labels(2100, 1);
    for (size_t row : {700, 1724, 1030, 2054}) labels[row] = 3;
    cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_cross_entropy k = {};
        k.logits = s.put_matrix(x.data(), AMP_F32, 1, 6300, 6300);
        k.logits.rows = 2100;
        k.logits.cols = k.logits.ld = k.classes = 3;
        k.labels = s.put(labels);
        k.ignore_index = -100;
        k.loss = (float *)s.room(4);
        k.bad_label = s.put(std::vector<int32_t>(1, 0));
        ok(s.backend->cross_entropy(s.dev, &k, NULL));
        s.get(out, k.bad_label, 4);
        CHECK_EQ(*(const int32_t *)out->data(), 701);
    }).check_same_bits();
}

/* What is not finite, and rows of nothing but -inf, give NaN as on the CPU, and only in their row. */
CUDA_TEST(cross_entropy_of_infinities) {
    const float bad[] = {NAN, (float)inf, (float)-inf};
    for (float value : bad)
        for (int all = 0; all < 2; all++) {
            std::vector<float> x = cuda_random(3 * 40, 43, -2, 2);
            for (size_t j = 0; j < 40; j++)
                if (all || j == 17) x[40 + j] = value;
            cuda_on_both([&](cuda_side &s, std::string *out) {
                amp_k_cross_entropy k = {};
                k.logits = s.put_matrix(x.data(), AMP_F32, 3, 40, 40);
                k.dlogits = s.put_matrix(NULL, AMP_F32, 3, 40, 40);
                k.classes = 40;
                k.labels = s.put(std::vector<int32_t>{1, 2, 3});
                k.ignore_index = -100;
                k.factor = 1;
                k.loss = (float *)s.room(4);
                k.losses = (float *)s.room(12);
                k.bad_label = s.put(std::vector<int32_t>(1, 0));
                ok(s.backend->cross_entropy(s.dev, &k, NULL));
                s.get(out, k.loss, 4);
                s.get(out, k.losses, 12);
                get_mat(s, out, k.dlogits);
            }).check_within(0, AMP_F32, 124, [](int64_t, double e) { return 64 * u * (1 + fabs(e)); });
        }
}

/* ---- Mean squared error */

static void mse(const cuda_shape &shape, const dtypes &t, int sum) {
    int64_t n = shape.count();
    std::string x = data_of(n, 50, t.a), target = data_of(n, 51, t.b);
    doubles a = values_of(x, t.a), b = values_of(target, t.b);
    double total = 0, share = sum || n < 1 ? 1 : (double)n;
    for (size_t i = 0; i < a.size(); i++) total += (a[i] - b[i]) * (a[i] - b[i]);
    cuda_compare both = compare_at(shape, [&](cuda_side &s, std::string *out) {
        amp_k_mse k = {};
        k.x = put_at(s, x, shape, t.a); k.x_dtype = t.a;
        k.target = put_at(s, target, shape, t.b); k.target_dtype = t.b;
        k.dx = room_at(s, n, shape, t.a);
        k.n = count_of(s, shape);
        k.sum = sum;
        k.factor = 0.25f;
        k.grad_scale = sum ? s.put(std::vector<float>(1, 512)) : NULL;
        k.loss = (float *)s.room(4);
        ok(s.backend->mse(s.dev, &k, NULL));
        s.get(out, k.loss, 4);
        get_at(s, out, k.dx, shape, t.a);
    });
    /* fp32 within 512 terms on the CPU and within 8 on the GPU, fp64 beyond */
    size_t at = both.check_within(0, AMP_F32, 1, [&](int64_t, double e) {
        return (cuda_sum_bound(512, total) + 6 * u * total) / share + cuda_spacing(AMP_F32, e);
    }, "loss");
    both.check_within(at, t.a, n, [](int64_t, double) { return 0; }, "dx");
}

CUDA_TEST(mse) {
    each(false, [](const cuda_shape &shape, const dtypes &t) {
        for (int sum = 0; sum < 2; sum++) mse(shape, t, sum);
    });
    mse({1, 70001, 0, 0, "three stretches"}, mixes[2], 0);
    far_ends([](const cuda_shape &shape, const dtypes &t) { mse(shape, t, 1); });
}

/* ---- Embedding */

static std::vector<int32_t> ids_of(int64_t n, int64_t vocabulary, int hot) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = amp_random_u32(60, (uint64_t)i);
        int64_t any = (int64_t)(amp_random_u32(61, (uint64_t)i) % (uint64_t)vocabulary);
        ids.push_back((int32_t)(hot == 2 || (hot && word % 3) ? vocabulary / 2 : any));
    }
    return ids;
}

static void embedding_forward(const cuda_shape &shape, const dtypes &t, int with_positions) {
    const int64_t vocabulary = 11, seq = 4;
    cuda_shape table = {vocabulary, shape.cols, shape.pad, shape.offset, ""}, places = {seq, shape.cols, shape.pad, 0, ""};
    std::string rows = data_of(vocabulary * shape.cols, 62, t.a), positions = data_of(seq * shape.cols, 63, t.b);
    std::vector<int32_t> ids = ids_of(shape.rows, vocabulary, 0);
    cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_embedding k = {};
        k.ids = s.put(ids);
        k.n = shape.rows;
        k.seq = seq;
        k.table = mat_at(s, &rows, table, t.a);
        if (with_positions) k.positions = mat_at(s, &positions, places, t.b);
        k.y = mat_at(s, NULL, shape, t.c);
        k.bad_id = s.put(std::vector<int32_t>(1, 0));
        ok(s.backend->embedding(s.dev, &k, NULL));
        get_mat(s, out, k.y);
        s.get(out, k.bad_id, 4);
    }).check_same_bits();
}

CUDA_TEST(embedding) {
    each(false, [](const cuda_shape &shape, const dtypes &t) {
        for (int with_positions = 0; with_positions < 2; with_positions++) embedding_forward(shape, t, with_positions);
    });
    far_away([](const cuda_shape &shape, const dtypes &t) { embedding_forward(shape, t, 1); });
}

/* The rows with an id out of range are left alone, the others written; the first is reported, and stays reported. */
CUDA_TEST(embedding_bad_id) {
    std::vector<float> table = cuda_random(5 * 8, 64);
    cuda_side s(amp_cuda());
    amp_k_embedding k = {};
    std::string y;
    k.ids = s.put(std::vector<int32_t>{4, 0, -1, 2, 5});
    k.n = k.seq = 5;
    k.table = s.put_matrix(table.data(), AMP_F32, 5, 8, 8);
    k.y = s.put_matrix(NULL, AMP_F32, 5, 8, 8);
    k.bad_id = s.put(std::vector<int32_t>(1, 0));
    ok(s.backend->embedding(s.dev, &k, NULL));
    s.get(&y, k.bad_id, 4);
    get_mat(s, &y, k.y);
    CHECK_EQ(*(const int32_t *)y.data(), 3);
    for (size_t i = 0; i < 40; i++) {
        size_t id = (size_t[]){4, 0, 9, 2, 9}[i / 8];
        if (id < 9) CHECK(memcmp(&y[4 + 4 * i], &table[id * 8 + i % 8], 4) == 0);
        else CHECK(memcmp(&y[4 + 4 * i], "\xff\xff\xff\xff", 4) == 0);
    }
    k.ids = s.put(std::vector<int32_t>{1, 1, 1, 1, 1});
    ok(s.backend->embedding(s.dev, &k, NULL));
    y.clear();
    s.get(&y, k.bad_id, 4);
    CHECK_EQ(*(const int32_t *)y.data(), 3);
}

/* A report of several calls: the earliest row that one of them found. */
CUDA_TEST(reports_of_several_calls) {
    const std::vector<int32_t> bad_rows[] = {{4, 2}, {3}, {4}, {1}, {0, 3}};
    const int32_t reported[] = {3, 3, 3, 2, 1};
    std::vector<float> x = cuda_random(5 * 8, 65);
    cuda_side s(amp_cuda());
    amp_k_embedding e = {};
    amp_k_cross_entropy c = {};
    e.n = e.seq = 5;
    e.table = c.logits = s.put_matrix(x.data(), AMP_F32, 5, 8, 8);
    e.y = s.put_matrix(NULL, AMP_F32, 5, 8, 8);
    e.bad_id = s.put(std::vector<int32_t>(1, 0));
    c.classes = 8, c.ignore_index = -100, c.factor = 1;
    c.loss = (float *)s.room(4);
    c.bad_label = s.put(std::vector<int32_t>(1, 0));
    for (size_t i = 0; i < 5; i++) {
        std::vector<int32_t> ids(5, 1);
        std::string found;
        for (int32_t row : bad_rows[i]) ids[(size_t)row] = 8;
        e.ids = c.labels = s.put(ids);
        ok(s.backend->embedding(s.dev, &e, NULL));
        ok(s.backend->cross_entropy(s.dev, &c, NULL));
        s.get(&found, e.bad_id, 4);
        s.get(&found, c.bad_label, 4);
        CHECK_EQ(((const int32_t *)found.data())[0], reported[i]);
        CHECK_EQ(((const int32_t *)found.data())[1], reported[i]);
    }
}

/* ---- Linear and cross-entropy in one, through a context */

struct fused_head {
    enum { ROWS = 70, IN = 24, OUT = 101, CHUNK = 16 };
    amp_context *amp;
    amp_param weight = {}, bias = {};
    amp_linear_cross_entropy_op op = {};
    std::vector<void *> memory;
    amp_dtype grad_dtype;
    void *room(size_t bytes, const void *from = NULL) {
        void *p = NULL;
        CHECK_OK(amp_alloc(amp, &p, (int64_t)bytes));
        CHECK_OK(from ? amp_copy(amp, p, from, (int64_t)bytes, AMP_COPY_TO_DEVICE) : amp_fill(amp, p, 1, (int64_t)bytes));
        memory.push_back(p);
        return p;
    }
    fused_head(amp_context *context, amp_dtype grad) : amp(context), grad_dtype(grad) {
        std::vector<float> x = cuda_random(ROWS * IN, 71), w = cuda_random(OUT * IN, 72), b = cuda_random(OUT, 73);
        std::vector<int32_t> labels(ROWS);
        for (int i = 0; i < ROWS; i++) labels[(size_t)i] = i % 5 == 0 ? -100 : i * 37 % OUT;
        weight.name = "head", bias.name = "head.bias";
        weight.weight = amp_tensor2(room(OUT * IN * 4, w.data()), AMP_F32, OUT, IN);
        weight.grad = amp_tensor2(room(OUT * IN * 4), grad, OUT, IN);
        bias.weight = amp_tensor1(room(OUT * 4, b.data()), AMP_F32, OUT);
        bias.grad = amp_tensor1(room(OUT * 4), grad, OUT);
        op.weight = &weight, op.bias = &bias;
        op.x = amp_tensor2(room(ROWS * IN * 4, x.data()), AMP_F32, ROWS, IN);
        op.dx = amp_tensor2(room(ROWS * IN * 4), AMP_F32, ROWS, IN);
        op.labels = (const int32_t *)room(ROWS * 4, labels.data());
        op.loss = (float *)room(4), op.losses = (float *)room(ROWS * 4);
        op.label_smoothing = 0.1f, op.chunk = CHUNK;
    }
    ~fused_head() { for (void *p : memory) amp_free(amp, p); }
    void label(int row, int32_t value) {
        CHECK_OK(amp_copy(amp, (void *)(uintptr_t)(op.labels + row), &value, 4, AMP_COPY_TO_DEVICE));
        CHECK_OK(amp_sync(amp));
    }
    std::vector<float> get(const void *from, int64_t n, amp_dtype dtype) {
        std::vector<char> raw((size_t)n * 4);
        std::vector<float> out((size_t)n);
        CHECK_OK(amp_copy(amp, raw.data(), from, n * (int64_t)amp_dtype_size(dtype), AMP_COPY_TO_HOST));
        (void)amp_sync(amp);
        CHECK_OK(amp_convert(out.data(), AMP_F32, raw.data(), dtype, n, NULL, NULL));
        return out;
    }
    void run(amp_dtype region) {
        amp_autocast_desc r = {};
        r.dtype = region;
        CHECK_OK(amp_autocast_begin(amp, &r));
        CHECK_OK(amp_linear_cross_entropy(amp, &op));
        CHECK_OK(amp_autocast_end(amp));
    }
    std::vector<std::vector<float>> results() {
        return {get(op.loss, 1, AMP_F32), get(op.losses, ROWS, AMP_F32), get(op.dx.data, ROWS * IN, AMP_F32),
                get(weight.grad.data, OUT * IN, grad_dtype), get(bias.grad.data, OUT, grad_dtype)};
    }
};
static double fused_apart(const std::vector<float> &a, const std::vector<float> &b) {
    double off = 0, own = 0;
    for (size_t i = 0; i < a.size(); i++) off += pow((double)a[i] - (double)b[i], 2), own += pow((double)b[i], 2);
    return sqrt(off / own);
}

/* The CPU's results, a kernel for each chunk, the loss at the end, and no more memory than the chunks need. */
CUDA_TEST(linear_cross_entropy) {
    for (amp_dtype region : {AMP_F32, AMP_BF16})
        for (amp_dtype grad : {AMP_F32, AMP_BF16}) {
            amp_context *cpu = NULL, *gpu = cuda_context();
            CHECK_OK(amp_open(&cpu, NULL));
            {
                fused_head want(cpu, grad), got(gpu, grad);
                int chunks = (fused_head::ROWS + fused_head::CHUNK - 1) / fused_head::CHUNK;
                double bound = (region == AMP_BF16 || grad == AMP_BF16 ? 2.0 / 256 : 1e-5);
                amp_memory_info before, after;
                CHECK_OK(amp_memory(gpu, &before));
                for (int batch = 0; batch < 2; batch++) {               /* the second one adds */
                    coc_reset_counts();
                    want.run(region), got.run(region);
                    CHECK_EQ(coc_kernel_launches("ampc_cross_entropy_rows"), chunks);
                    CHECK_EQ(coc_kernel_launches("ampc_loss_total"), 1);
                }
                CHECK_OK(amp_memory(gpu, &after));
                CHECK_EQ(after.allocated, before.allocated);
                CHECK(after.peak - before.allocated <=
                      fused_head::CHUNK * 112 * 6 + (grad == AMP_F32 ? 0 : fused_head::OUT * (fused_head::IN + 1) * 4) + 1280);
                auto a = got.results(), b = want.results();
                for (size_t i = 0; i < a.size(); i++)
                    CHECK_MSG(fused_apart(a[i], b[i]) <= bound, "result %d in %s, gradients in %s: %g", (int)i, amp_dtype_name(region),
                              amp_dtype_name(grad), fused_apart(a[i], b[i]));
            }
            amp_close(gpu), amp_close(cpu);
        }
}

/* A label out of range is known on the device alone: the loss stays, and gradients are NaN, so that no step follows. */
CUDA_TEST(linear_cross_entropy_bad_label) {
    amp_context *gpu = cuda_context();
    {
        fused_head h(gpu, AMP_F32);
        std::vector<float> loss = h.get(h.op.loss, 1, AMP_F32);
        h.label(fused_head::ROWS - 1, fused_head::OUT);
        h.run(AMP_F32);
        CHECK_ERR(amp_sync(gpu), AMP_ERR_LABEL);
        auto found = h.results();
        CHECK(found[0][0] == loss[0] && found[1][3] == found[1][4]);
        for (int i = 2; i < 5; i++)
            for (float value : found[(size_t)i]) CHECK(value != value);
    }
    amp_close(gpu);
}

/* In a graph: its launches read the labels that are there then. */
CUDA_TEST(linear_cross_entropy_in_a_graph) {
    amp_context *gpu = cuda_context();
    {
        fused_head h(gpu, AMP_F32);
        amp_graph *graph = NULL;
        h.run(AMP_BF16);
        h.weight.grad_live = h.bias.grad_live = 0;
        CHECK_OK(amp_graph_begin(gpu));
        h.run(AMP_BF16);
        CHECK_OK(amp_graph_end(gpu, &graph));
        /* What is taken after the capture, of every size that the arena has, is not the graph's. */
        std::vector<void *> others(80);
        auto bytes = [](size_t i) { return (int64_t)(8 + i % 8) << (5 + i / 8); };
        for (size_t i = 0; i < others.size(); i++) {
            CHECK_OK(amp_alloc(gpu, &others[i], bytes(i)));
            CHECK_OK(amp_fill(gpu, others[i], 0x5a, bytes(i)));
        }
        CHECK_OK(amp_graph_launch(graph));
        for (size_t i = 0; i < others.size(); i++) {
            std::string held((size_t)bytes(i), 0);
            CHECK_OK(amp_copy(gpu, &held[0], others[i], bytes(i), AMP_COPY_TO_HOST));
            CHECK_OK(amp_sync(gpu));
            CHECK_MSG(held.find_first_not_of((char)0x5a) == std::string::npos, "%zu bytes", held.size());
            amp_free(gpu, others[i]);
        }
        for (int i = 0; i < 2; i++) {
            h.label(3, 5 + i), h.label(60, i ? -100 : 7);
            CHECK_OK(amp_graph_launch(graph));
            auto launched = h.results();
            h.weight.grad_live = h.bias.grad_live = 0;
            h.run(AMP_BF16);
            CHECK(launched == h.results());
        }
        amp_graph_destroy(graph);
    }
    amp_close(gpu);
}

struct embedding_case { int64_t n, cols, vocabulary, seq; int hot, add, parts; };       /* parts: 1 table, 2 positions */
static const embedding_case embedding_cases[] = {
    {1, 8, 3, 1, 0, 0, 3},      {0, 8, 3, 1, 0, 0, 3},      {37, 7, 5, 10, 0, 1, 3},        {130, 40, 300, 65, 0, 0, 3},
    {700, 264, 70, 100, 1, 1, 3}, {1500, 8, 70000, 1500, 1, 0, 1}, {2600, 8, 4, 7, 2, 1, 3}, {5000, 8, 2000, 512, 1, 0, 3},
    {33, 16, 5, 10, 0, 0, 2},   {6000, 4, 3, 100, 2, 0, 1},    {34000, 1, 300, 100, 0, 0, 1},
};

static void embedding_back(const embedding_case &c, const dtypes &t, int64_t pad, int64_t offset) {
    const int64_t places = c.seq + 3;           /* rows beyond seq have no gradient */
    cuda_shape dense = {c.n, c.cols, pad, offset, ""}, table = {c.vocabulary, c.cols, pad, offset, ""};
    cuda_shape spots = {places, c.cols, pad, 0, ""};
    std::string dy = data_of(c.n * c.cols, 65, t.a), old_table = data_of(c.vocabulary * c.cols, 66, t.b);
    std::string old_places = data_of(places * c.cols, 67, t.c);
    std::vector<int32_t> ids = ids_of(c.n, c.vocabulary, c.hot);
    doubles d = values_of(dy, t.a), sums[2] = {doubles((size_t)(c.vocabulary * c.cols)), doubles((size_t)(places * c.cols))};
    std::vector<int64_t> counts[2] = {std::vector<int64_t>((size_t)c.vocabulary), std::vector<int64_t>((size_t)places)};
    for (size_t i = 0; i < (size_t)c.n; i++) {
        size_t to[2] = {(size_t)ids[i], i % (size_t)c.seq};
        for (int k = 0; k < 2; k++) {
            counts[k][to[k]]++;
            for (size_t j = 0; j < (size_t)c.cols; j++) sums[k][to[k] * (size_t)c.cols + j] += fabs(d[i * (size_t)c.cols + j]);
        }
    }
    cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_embedding k = {};
        k.ids = s.put(ids);
        k.n = c.n;
        k.seq = c.seq;
        k.dy = mat_at(s, &dy, dense, t.a);
        if (c.parts & 1) k.dtable = mat_at(s, &old_table, table, t.b);
        if (c.parts & 2) k.dpositions = mat_at(s, &old_places, spots, t.c);
        k.add_table = k.add_positions = c.add;
        k.bad_id = s.put(std::vector<int32_t>(1, 0));
        ok(s.backend->embedding_backward(s.dev, &k, NULL));
        if (c.parts & 1) get_mat(s, out, k.dtable);
        if (c.parts & 2) get_mat(s, out, k.dpositions);
    });
    size_t at = 0;
    for (int k = 0; k < 2; k++) {
        if (!(c.parts & (k + 1))) continue;
        amp_dtype dtype = k ? t.c : t.b;
        doubles old = values_of(k ? old_places : old_table, dtype);
        at = both.check_within(at, dtype, (k ? places : c.vocabulary) * c.cols, [&](int64_t i, double e) {
            int64_t count = counts[k][(size_t)(i / c.cols)];
            double sum = sums[k][(size_t)i], was = c.add ? fabs(old[(size_t)i]) : 0;
            if (count == 0) return 0.0;
            return cuda_sum_bound(count, sum) + (c.add ? 2 * u * (sum + was) : 0) + (count > 1 || c.add ? cuda_spacing(dtype, e) : 0);
        }, k ? "dpositions" : "dtable");
    }
}

CUDA_TEST(embedding_backward) {
    for (const embedding_case &c : embedding_cases)
        for (const dtypes &t : mixes)
            if (c.n < 200 || t.a == AMP_BF16) embedding_back(c, t, c.n % 2 ? 0 : 8, 0);
    embedding_back(embedding_cases[3], mixes[2], 3, 1);
    far_away([](const cuda_shape &shape, const dtypes &t) { embedding_back({3, shape.cols, 3, 3, 0, 1, 3}, t, shape.pad, 0); });
}

/* The error of a long sum does not grow with its terms: a chain has at most 128 (the table's stretches), of whose roundings
   each number meets half, and 8 more after it; a rounding's error is uniform within one unit of u. */
CUDA_TEST(long_sums) {
    const double bound = sqrt((128 / 2 + 8) / 3.0) * u;
    for (int64_t rows : {1000, 60000}) {
        const int64_t cols = 8;
        std::vector<float> x = cuda_random(rows * cols, 64, -1, 1);
        std::vector<int32_t> ids((size_t)rows);
        doubles halves(2 * cols), whole(cols);
        double squares = 0;
        std::string out;
        cuda_side s(amp_cuda());
        for (int64_t i = 0; i < rows * cols; i++) {
            double v = (double)x[(size_t)i];
            ids[(size_t)(i / cols)] = (int32_t)(i / cols % 2);
            halves[(size_t)(i / cols % 2 * cols + i % cols)] += v;
            whole[(size_t)(i % cols)] += v;
            squares += v * v;
        }
        amp_k_embedding k = {};
        k.ids = s.put(ids);
        k.n = rows;
        k.seq = 2;
        k.dy = s.put_matrix(x.data(), AMP_F32, rows, cols, cols);
        k.dtable = s.put_matrix(x.data(), AMP_F32, 2, cols, cols);
        k.bad_id = s.put(std::vector<int32_t>(1, 0));
        ok(s.backend->embedding_backward(s.dev, &k, NULL));
        amp_k_column_sum c = {k.dy, s.put_matrix(x.data(), AMP_F32, 1, cols, cols).data, AMP_F32, 0};
        ok(s.backend->column_sum(s.dev, &c, NULL));
        struct { const char *name; const void *got; const doubles *exact; } sums[] = {
            {"columns", c.out, &whole}, {"table", k.dtable.data, &halves}};
        for (auto &sum : sums) {
            std::string got;
            double off = 0, own = 0;
            s.get(&got, sum.got, sum.exact->size() * 4);
            doubles y = values_of(got, AMP_F32);
            for (size_t i = 0; i < y.size(); i++) {
                off += (y[i] - (*sum.exact)[i]) * (y[i] - (*sum.exact)[i]);
                own += (*sum.exact)[i] * (*sum.exact)[i];
            }
            CHECK_MSG(sqrt(off / fmax(own, squares)) <= bound, "%s of %lld: %.2f u, of %.2f at most", sum.name, (long long)rows,
                      sqrt(off / fmax(own, squares)) / u, bound / u);
        }
    }
}

/* An id out of range: nothing but the report is written. */
CUDA_TEST(embedding_backward_bad_id) {
    std::string dy = data_of(5 * 8, 68, AMP_F32), old = data_of(4 * 8, 69, AMP_F32);
    cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_embedding k = {};
        k.ids = s.put(std::vector<int32_t>{3, 0, 2, 4, -1});
        k.n = k.seq = 5;
        k.dy = s.put_matrix(dy.data(), AMP_F32, 5, 8, 8);
        k.dtable = s.put_matrix(old.data(), AMP_F32, 4, 8, 8);
        k.dpositions = s.put_matrix(old.data(), AMP_F32, 4, 8, 8);
        k.bad_id = s.put(std::vector<int32_t>(1, 0));
        ok(s.backend->embedding_backward(s.dev, &k, NULL));
        get_mat(s, out, k.dtable);
        get_mat(s, out, k.dpositions);
        s.get(out, k.bad_id, 4);
    }).check_same_bits();
}

/* ---- Casts and multi-tensor kernels, which t_cuda_runtime compares, at the end of long arrays */

static std::string any_bits(int64_t n, uint64_t seed, amp_dtype dtype) {
    std::string bits((size_t)n * amp_dtype_size(dtype), 0);
    for (size_t i = 0; i < bits.size(); i++) bits[i] = (char)(amp_random_u32(seed, i) >> 24);
    return bits;
}

static void cast(const cuda_shape &shape, amp_dtype from, amp_dtype to, amp_rounding rounding) {
    std::string x = any_bits(shape.count(), 70, from);
    cuda_compare c = compare_at(shape, [&](cuda_side &s, std::string *out) {
        amp_k_cast k = {};
        k.dst = room_at(s, shape.count(), shape, to);
        k.src = put_at(s, x, shape, from);
        k.dst_dtype = to; k.src_dtype = from;
        k.n = count_of(s, shape);
        k.how.rounding = rounding;
        k.how.seed = 42;
        k.how.offset = (uint64_t)(3 + shape.before - before_of(s, shape));
        k.new_inf = s.put(std::vector<int64_t>(1, 5));
        ok(s.backend->cast(s.dev, &k, NULL));
        get_at(s, out, k.dst, shape, to);
        s.get(out, k.new_inf, 8);
    });
    CHECK_MSG(c.actual == c.expected, "%s to %s, rounding %d, %s", amp_dtype_name(from), amp_dtype_name(to), (int)rounding, shape.name);
}

CUDA_TEST(casts_far_away) {
    const amp_dtype floats[] = {AMP_F32, AMP_F64, AMP_F16, AMP_BF16, AMP_TF32, AMP_E4M3, AMP_E5M2};
    for (amp_dtype from : floats)
        for (amp_dtype to : floats) {
            last_blocks last;
            if (from != to) cast(cuda_far_ends[from == AMP_BF16 || to == AMP_F16], from, to, AMP_ROUND_DEFAULT);
        }
    for (const cuda_shape &shape : cuda_far_ends) {
        last_blocks last;
        cast(shape, AMP_F32, AMP_BF16, AMP_ROUND_STOCHASTIC);
        cast(shape, AMP_BF16, AMP_E4M3, AMP_ROUND_STOCHASTIC);
        cast(shape, AMP_U16, AMP_I32, AMP_ROUND_DEFAULT);
    }
}

static amp_k_grad_stats a_found() {
    amp_k_grad_stats f = {};
    f.first_bad = -1;
    f.multiplier = 0.37f;
    f.factor = 0.126f;
    f.lr = 1e-3;
    f.step = 3;
    return f;
}

/* 512 blocks share all chunks of 8192 elements; the last of them gets this end.  The others leave partial results of
   `left` bytes: 0 adds nothing to the sum, and as the number of a row 0x7f.. is beyond all. */
static void check_far(amp_dtype dtype, int64_t offset, int bad) {
    const cuda_shape shape = {5, 1024, 0, offset, "", ((int64_t)1 << 32) + 511 * 8192};
    std::string g = data_of(shape.count(), 71, dtype);
    double squares = 0;
    last_blocks last(4, 1);
    for (double x : values_of(g, dtype)) squares += x * x;
    if (bad) g.replace(4000 * amp_dtype_size(dtype), amp_dtype_size(dtype), cuda_stored(std::vector<float>(1, (float)inf), dtype));
    cuda_compare c = cuda_once_on_both([&](cuda_side &s, std::string *out) {
        std::vector<amp_k_tensor> rows(2);
        rows[1].grad = put_at(s, g, shape, dtype);
        rows[1].grad_dtype = dtype;
        rows[1].count = count_of(s, shape);
        rows[1].live = 1;
        amp_k_grad_stats *found = s.put(std::vector<amp_k_grad_stats>(1, a_found()));
        amp_k_check k = {s.put(rows), 2, &found->factor, found};
        ok(s.backend->check(s.dev, &k, NULL));
        get_at(s, out, rows[1].grad, shape, dtype);
        if (bad) s.get(out, &found->found_inf, 4), s.get(out, &found->first_bad, 4);
        else s.get(out, &found->sum_sq, 8);
    }, bad ? 0x7f : 0);
    size_t at = c.check_within(0, dtype, shape.count(), [](int64_t, double) { return 0; }, "gradient");
    if (bad) CHECK(c.actual.substr(at) == c.expected.substr(at));
    else c.check_within(at, AMP_F64, 1, [&](int64_t, double) { return squares * (double)shape.count() * ldexp(1, -24); }, "sum_sq");
}
CUDA_TEST(check_far_away) {
    for (int bad = 0; bad < 2; bad++) {
        check_far(AMP_BF16, bad, bad);
        check_far(AMP_F32, 1 - bad, bad);
    }
}

/* A grid with a block for each chunk of the far ends. */
static int one_chunk_each(int per_sm) { return (int)((cuda_far_ends[0].before / 8192 + per_sm) / per_sm); }

CUDA_TEST(scale_far_away) {
    for (const cuda_shape &shape : cuda_far_ends)
        for (amp_dtype dtype : {AMP_F32, AMP_BF16, AMP_F64}) {
            last_blocks last(one_chunk_each(4), 8);
            std::string g = data_of(shape.count(), 72, dtype);
            cuda_once_on_both([&](cuda_side &s, std::string *out) {
                amp_k_tensor row = {};
                row.grad = put_at(s, g, shape, dtype);
                row.grad_dtype = dtype;
                row.count = count_of(s, shape);
                row.live = 1;
                amp_k_grad_stats *found = s.put(std::vector<amp_k_grad_stats>(1, a_found()));
                amp_k_scale_ranges k = {s.put(std::vector<amp_k_tensor>(1, row)), 1, &found->factor};
                ok(s.backend->scale_ranges(s.dev, &k, NULL));
                get_at(s, out, row.grad, shape, dtype);
            }).check_same_bits();
        }
}

/* What storing STOCHASTIC makes of fp32 weights, by their numbers in the tensor. */
static std::string rounded_by_number(const std::string &w, uint64_t seed, int64_t before) {
    std::string out(w.size() / 2, 0);
    for (size_t i = 0; i < w.size() / 4; i++) {
        uint16_t bits = amp_bf16_stochastic((float)cuda_value(w.data(), AMP_F32, i), amp_random_u32(seed, (uint64_t)before + i), 0);
        memcpy(&out[2 * i], &bits, 2);
    }
    return out;
}

/* The CPU's random words would be those of its own few elements: it leaves fp32, which the test rounds. */
static void optimizer_far(const cuda_shape &shape, amp_optimizer_kind which, amp_master_kind kind, amp_cpu_path path) {
    int64_t n = shape.count();
    std::string w = data_of(n, 73, AMP_BF16), g = data_of(n, 74, AMP_BF16), rest = any_bits(n, 75, AMP_U16);
    std::string m = data_of(n, 76, AMP_F32), v = cuda_stored(cuda_random(n, 77, 0, 1), AMP_F32), wide;
    for (double x : values_of(w, AMP_BF16)) wide += cuda_stored(std::vector<float>(1, (float)x), AMP_F32);
    last_blocks last(one_chunk_each(3), 8);
    cuda_once_on_both([&](cuda_side &s, std::string *out) {
        amp_k_grad_stats *found = s.put(std::vector<amp_k_grad_stats>(1, a_found()));
        bool stand_in = kind == AMP_MASTER_STOCHASTIC && !s.gpu;
        amp_k_tensor row = {};
        row.weight = put_at(s, w, shape, AMP_BF16);
        row.grad = put_at(s, g, shape, AMP_BF16);
        row.m = put_at(s, m, shape, AMP_F32);
        if (which == AMP_ADAMW) row.v = put_at(s, v, shape, AMP_F32);
        if (kind == AMP_MASTER_F32 || stand_in) row.master = put_at(s, wide, shape, AMP_F32);
        if (kind == AMP_MASTER_REMAINDER) row.master = put_at(s, rest, shape, AMP_U16);
        row.weight_dtype = row.grad_dtype = AMP_BF16;
        row.moment_dtype = AMP_F32;
        row.master_kind = stand_in ? AMP_MASTER_F32 : kind;
        row.count = count_of(s, shape);
        row.lr_scale = row.live = 1;
        row.weight_decay = 0.1;
        row.steps = s.put(std::vector<amp_k_steps>(1, amp_k_steps{3, 0.9 * 0.9 * 0.9, 0.999 * 0.999 * 0.999}));
        const amp_k_tensor *table = s.put(std::vector<amp_k_tensor>(1, row));
        amp_k_adamw a = {table, 1, found, 0.9, 0.999, 1e-8, 7, 0, 0, NULL, NULL};
        amp_k_sgd b = {table, 1, found, 0.9, 0.1, 7, 0, 0, NULL, NULL};
        amp_k_lion c = {table, 1, found, 0.9, 0.99, 7, 0, 0, NULL, NULL};
        ok(which == AMP_ADAMW ? s.backend->adamw(s.dev, &a, NULL) : which == AMP_SGD ? s.backend->sgd(s.dev, &b, NULL)
                                                                                      : s.backend->lion(s.dev, &c, NULL));
        get_at(s, out, row.m, shape, AMP_F32);
        if (which == AMP_ADAMW) get_at(s, out, row.v, shape, AMP_F32);
        if (kind == AMP_MASTER_REMAINDER) get_at(s, out, row.master, shape, AMP_U16);
        if (kind == AMP_MASTER_F32) get_at(s, out, row.master, shape, AMP_F32);
        if (stand_in) {
            std::string updated;
            get_at(s, &updated, row.master, shape, AMP_F32);
            *out += rounded_by_number(updated, ampi_row_seed(7, a_found().step, 0), shape.before);
        } else {
            get_at(s, out, row.weight, shape, AMP_BF16);
        }
    }, 0, path).check_same_bits();
}
CUDA_TEST(optimizers_far_away) {
    amp_machine machine;
    if (amp_machine_probe(&machine) != AMP_OK || machine.cpu.path < AMP_CPU_AVX2)
        SKIP("the CPU has no fused multiply-add, as the GPU does, to compare with");
    for (const cuda_shape &shape : cuda_far_ends)
        for (amp_optimizer_kind which : {AMP_ADAMW, AMP_SGD, AMP_LION})
            for (amp_master_kind kind : {AMP_MASTER_F32, AMP_MASTER_REMAINDER, AMP_MASTER_STOCHASTIC})
                optimizer_far(shape, which, kind, machine.cpu.path);
}

/* ---- Inspect: integers, so all the same */

/* Any bits, most with exponents from 1/2^30 to 2^20; those of fp64 too, which would lie outside of all formats. */
static std::string spread_bits(int64_t n, uint64_t seed, amp_dtype dtype) {
    std::string bits = any_bits(n, seed, dtype);
    for (size_t i = 0; i < (size_t)n; i++) {
        uint32_t word = amp_random_u32(seed + 9, i), e = 127 - 30 + word % 50;
        uint64_t b;
        if (dtype == AMP_F64 && word % 16 != 0) {
            memcpy(&b, &bits[8 * i], 8);
            b = (b & ~((uint64_t)0x7ff << 52)) | (uint64_t)(e + 896) << 52;
            memcpy(&bits[8 * i], &b, 8);
        }
        if (dtype == AMP_F32 && word % 4 != 0) {
            uint32_t f;
            memcpy(&f, &bits[4 * i], 4);
            f = word % 7 == 0 ? 0 : (f & 0x807fffffu) | e << 23;
            memcpy(&bits[4 * i], &f, 4);
        }
    }
    return bits;
}

static void inspect_rows(const std::vector<std::string> &data, const std::vector<amp_dtype> &dtypes, amp_dtype format) {
    cuda_on_both([&](cuda_side &s, std::string *out) {
        std::vector<amp_k_tensor> rows(data.size());
        for (size_t i = 0; i < data.size(); i++) {
            size_t size = amp_dtype_size(dtypes[i]);
            memset((void *)&rows[i], 0, sizeof rows[i]);
            rows[i].grad = s.put(data[i].data(), data[i].size(), i % 5 == 1 ? size : 0);
            rows[i].grad_dtype = dtypes[i];
            rows[i].count = (int64_t)(data[i].size() / size);
            rows[i].live = i % 4 != 3;
        }
        amp_k_inspect k = {};
        k.table = s.put(rows);
        k.tensors = (int64_t)rows.size();
        k.dtype = format;
        k.out = (amp_k_inspected *)s.room(rows.size() * sizeof(amp_k_inspected));
        ok(s.backend->inspect(s.dev, &k, NULL));
        s.get(out, k.out, rows.size() * sizeof(amp_k_inspected));
    }).check_same_bits();
}
CUDA_TEST(inspect) {
    static const amp_dtype storages[] = {AMP_F32, AMP_F16, AMP_BF16, AMP_F64};
    static const int64_t sizes[] = {1, 0, 7, 8, 333, 4096, 8192, 8193, 20000, 70001};
    std::string patterns(2 * 65536, 0);         /* all of 16 bits */
    for (size_t i = 0; i < 65536; i++) {
        uint16_t b = (uint16_t)i;
        memcpy(&patterns[2 * i], &b, 2);
    }
    for (amp_dtype format : {AMP_F16, AMP_BF16, AMP_E4M3, AMP_E5M2}) {
        std::vector<std::string> data;
        std::vector<amp_dtype> dtypes;
        for (size_t i = 0; i < 40; i++) {
            dtypes.push_back(storages[i % 4]);
            data.push_back(i % 9 == 8 ? data_of(5000, i, dtypes[i]) : spread_bits(sizes[(i * 3 + i / 10) % 10], i, dtypes[i]));
        }
        inspect_rows(data, dtypes, format);
        inspect_rows({patterns, patterns}, {AMP_F16, AMP_BF16}, format);
    }
    inspect_rows({}, {}, AMP_F16);
}
CUDA_TEST(inspect_far_away) {
    for (const cuda_shape &shape : cuda_far_ends)
        for (amp_dtype dtype : {AMP_F32, AMP_BF16, AMP_F64}) {
            last_blocks last(one_chunk_each(4), 8);
            std::string g = spread_bits(shape.count(), 74, dtype);
            cuda_once_on_both([&](cuda_side &s, std::string *out) {
                amp_k_tensor row = {};
                row.grad = put_at(s, g, shape, dtype);
                row.grad_dtype = dtype;
                row.count = count_of(s, shape);
                row.live = 1;
                amp_k_inspect k = {};
                k.table = s.put(std::vector<amp_k_tensor>(1, row));
                k.tensors = 1;
                k.dtype = AMP_F16;
                k.out = (amp_k_inspected *)s.room(sizeof(amp_k_inspected));
                ok(s.backend->inspect(s.dev, &k, NULL));
                s.get(out, k.out, sizeof(amp_k_inspected));
            }).check_same_bits();
        }
}

/* ---- Factors, scales and eps of 0, as AMP_EXPLICIT_ZERO gives them */

CUDA_TEST(numbers_of_0) {
    const int64_t rows = 6, cols = 40, n = rows * cols;
    const cuda_shape shape = {rows, cols, 0, 0, ""};
    std::string x = data_of(n, 90, AMP_F32), y = data_of(n, 91, AMP_F32);
    cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) {
        amp_k_cross_entropy ce = {};
        ce.logits = mat_at(s, &x, shape, AMP_F32);
        ce.dlogits = mat_at(s, NULL, shape, AMP_F32);
        ce.classes = cols;
        ce.labels = s.put(ids_of(rows, cols, 0));
        ce.ignore_index = 0;
        ce.loss = (float *)s.room(4);
        ce.bad_label = s.put(std::vector<int32_t>(1, 0));
        ok(s.backend->cross_entropy(s.dev, &ce, NULL));
        amp_k_mse mse = {};
        mse.x = ce.logits.data; mse.x_dtype = mse.target_dtype = AMP_F32;
        mse.target = s.put(y.data(), y.size());
        mse.dx = s.room((size_t)n * 4);
        mse.n = n;
        mse.loss = (float *)s.room(4);
        ok(s.backend->mse(s.dev, &mse, NULL));
        amp_k_softmax sm = {};
        sm.batch = sm.heads = 1; sm.queries = rows; sm.keys = cols;
        sm.x = ce.logits.data; sm.y = s.room((size_t)n * 4);
        sm.x_dtype = sm.y_dtype = AMP_F32;
        sm.mask.kind = AMP_MASK_CAUSAL;
        ok(s.backend->softmax(s.dev, &sm, NULL));
        sm.dy = mse.target; sm.dx = s.room((size_t)n * 4);
        ok(s.backend->softmax_backward(s.dev, &sm, NULL));
        amp_k_norm norm = {};
        norm.x = ce.logits; norm.y = mat_at(s, NULL, shape, AMP_F32);
        norm.mean = (float *)s.room((size_t)rows * 4); norm.rstd = (float *)s.room((size_t)rows * 4);
        ok(s.backend->norm(s.dev, &norm, NULL));
        get_mat(s, out, ce.dlogits);
        s.get(out, mse.dx, (size_t)n * 4);
        s.get(out, sm.dx, (size_t)n * 4);
        s.get(out, ce.loss, 4); s.get(out, mse.loss, 4);
        s.get(out, sm.y, (size_t)n * 4);
        get_mat(s, out, norm.y);
    });
    auto none = [](int64_t, double) { return 0.0; };
    auto near = [](int64_t, double e) { return 64 * u * (fabs(e) + 1); };
    size_t at = both.check_within(0, AMP_F32, n, none, "dlogits");
    at = both.check_within(at, AMP_F32, n, none, "dx of mse");
    at = both.check_within(at, AMP_F32, n, none, "dx of softmax");
    for (size_t i = 0; i < at / 4; i++) CHECK(cuda_value(both.actual.data(), AMP_F32, i) == 0);
    at = both.check_within(at, AMP_F32, 2 + n, near, "losses and softmax");
    CHECK(fabs(cuda_value(&both.actual[at], AMP_F32, -(size_t)n) - 1.0 / (double)(cols - rows + 1)) < 8 * u);   /* the first row sees 35 */
    both.check_within(at, AMP_F32, n, near, "norm");
}

/* ---- The number of multiprocessors, and with it the grid, changes no bit of these */

static void on_a_grid(cuda_side &s, std::string *out) {
    const int64_t rows = 300, cols = 40, n = rows * cols;
    const cuda_shape shape = {rows, cols, 0, 0, ""};
    std::string x = data_of(n, 80, AMP_BF16), y = data_of(n, 81, AMP_BF16);
    amp_k_cross_entropy ce = {};
    ce.logits = mat_at(s, &x, shape, AMP_BF16);
    ce.dlogits = mat_at(s, NULL, shape, AMP_BF16);
    ce.classes = cols;
    ce.labels = s.put(ids_of(rows, cols, 0));
    ce.ignore_index = -100;
    ce.factor = 1;
    ce.loss = (float *)s.room(4);
    ce.bad_label = s.put(std::vector<int32_t>(1, 0));
    ok(s.backend->cross_entropy(s.dev, &ce, NULL));
    amp_k_mse mse = {};
    mse.x = ce.logits.data; mse.x_dtype = mse.target_dtype = AMP_BF16;
    mse.target = s.put(y.data(), y.size());
    mse.n = n;
    mse.factor = 1;
    mse.loss = (float *)s.room(4);
    ok(s.backend->mse(s.dev, &mse, NULL));
    amp_k_softmax sm = {};
    sm.batch = sm.heads = 1; sm.queries = rows; sm.keys = cols;
    sm.x = ce.logits.data;
    sm.y = s.room((size_t)n * 2);
    sm.x_dtype = sm.y_dtype = AMP_BF16;
    sm.scale = 1;
    ok(s.backend->softmax(s.dev, &sm, NULL));
    amp_k_column_sum sum = {ce.logits, s.room((size_t)cols * 4), AMP_F32, 0};
    ok(s.backend->column_sum(s.dev, &sum, NULL));
    amp_k_embedding e = {};
    e.ids = s.put(ids_of(rows, 7, 1));
    e.n = e.seq = rows;
    e.dy = ce.logits;
    e.dtable = s.put_matrix(NULL, AMP_F32, 7, cols, cols);
    e.bad_id = ce.bad_label;
    ok(s.backend->embedding_backward(s.dev, &e, NULL));
    s.get(out, ce.loss, 4);
    get_mat(s, out, ce.dlogits);
    s.get(out, mse.loss, 4);
    s.get(out, sm.y, (size_t)n * 2);
    s.get(out, sum.out, (size_t)cols * 4);
    get_mat(s, out, e.dtable);
}

CUDA_TEST(grids) {
    std::string results[2];
    for (int i = 0; i < 2; i++) {
        multiprocessors some(i ? 132 : 1);
        cuda_side s(amp_cuda());
        on_a_grid(s, &results[i]);
    }
    CHECK(results[0] == results[1] && !results[0].empty());
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(add);
    RUN(add_of_views);
    RUN(dropout);
    RUN(dropout_at_its_bound);
    RUN(activation);
    RUN(activation_backward); RUN(activation_with_bias);
    RUN(activation_of_infinities);
    RUN(swiglu);
    RUN(swiglu_backward); RUN(swiglu_with_biases); RUN(rope);
    RUN(norm);
    RUN_CI(norm_backward); RUN(norm_gradient_in_short); RUN(norm_gradients_of_many_blocks); RUN(norm_backward_shared_memory); RUN(norm_backward_keeps_memory_busy);
    RUN(softmax);
    RUN(softmax_shapes);
    RUN(softmax_of_infinities);
    RUN(softmax_backward_masked);
    RUN(softmax_backward); RUN(softmax_far_away);
    RUN(cross_entropy);
    RUN(cross_entropy_long_rows);
    RUN(cross_entropy_bad_label);
    RUN(cross_entropy_first_bad_label);
    RUN(cross_entropy_of_infinities);
    RUN(linear_cross_entropy);
    RUN(linear_cross_entropy_bad_label);
    RUN(linear_cross_entropy_in_a_graph);
    RUN(mse);
    RUN(embedding);
    RUN(embedding_bad_id); RUN(reports_of_several_calls);
    RUN(embedding_backward);
    RUN(embedding_backward_bad_id);
    RUN(long_sums);
    RUN(casts_far_away); RUN(check_far_away);
    RUN(scale_far_away);
    RUN(inspect); RUN(inspect_far_away);
    RUN(optimizers_far_away);
    RUN(numbers_of_0);
    RUN(grids);
    return TEST_END();
}
