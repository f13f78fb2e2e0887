/* t_linear_cross_entropy.c - tests the operator that computes logits and their loss together, in chunks of rows.  It is
 * compared with the two separate operators, and with PyTorch.
 *
 *     gcc -O2 -Itests tests/unit/t_linear_cross_entropy.c -o t_lce -lm -lpthread && ./t_lce      (from the project root) */
#if !defined(_GNU_SOURCE)
#  define _GNU_SOURCE
#endif
#define AMP_IMPLEMENTATION
#include "../amp.h"
#define AMPT_TRAPS
#include "test.h"
#include "golden.h"
#include <stdlib.h>

enum { ROWS = 13, IN = 24, OUT = 37, CLASSES = 33, IGNORE = -100, SEEDS = 64 };

static amp_context *amp;

/* ---- A loss and what it needs: the inputs, and what both ways make of them */

typedef struct head {
    int64_t rows, in, out;
    amp_dtype x_dtype, weight_dtype, grad_dtype;
    float *wide[3];                 /* x, weight, bias in fp32 */
    void *x, *weight, *bias, *logits, *dx, *dweight, *dbias;
    amp_param params[2];
    int32_t *labels;
    float *losses, loss;
    amp_dtype region, logits_dtype; /* region DEFAULT: none */
    int32_t saturate;
    amp_linear_cross_entropy_op op; /* its options serve both */
} head;

static void *room(int64_t elements) { return calloc((size_t)elements + 1, 4); }

static void *in_dtype(const float *wide, int64_t n, amp_dtype dtype) {
    void *data = room(n);
    amp_tensor from = amp_tensor1(wide, AMP_F32, n), to = amp_tensor1(data, dtype, n);
    CHECK_OK(amp_cast(amp, &from, &to));
    return data;
}
static float *widened(const void *data, amp_dtype dtype, int64_t n) {
    float *wide = (float *)room(n);
    amp_tensor from = amp_tensor1(data, dtype, n), to = amp_tensor1(wide, AMP_F32, n);
    CHECK_OK(amp_cast(amp, &from, &to));
    return wide;
}

static void head_params(head *h, int live) {
    memset(h->params, 0, sizeof h->params);
    h->params[0].name = "head";
    h->params[0].weight = amp_tensor2(h->weight, h->weight_dtype, h->out, h->in);
    h->params[0].grad = amp_tensor2(h->dweight, h->grad_dtype, h->out, h->in);
    h->params[1].name = "head.bias";
    h->params[1].weight = amp_tensor1(h->bias, h->weight_dtype, h->out);
    h->params[1].grad = amp_tensor1(h->dbias, h->grad_dtype, h->out);
    h->params[0].grad_live = h->params[1].grad_live = live;
}

/* Random inputs as PyTorch's are made, rounded to x_dtype, in which all is stored. */
static head head_of(int64_t rows, int64_t in, int64_t out, uint32_t seed, amp_dtype rounded, amp_dtype x_dtype,
                    amp_dtype weight_dtype, amp_dtype grad_dtype) {
    head h;
    int64_t sizes[3] = {rows * in, out * in, out}, i;
    const float scales[3] = {2.0f, 1.0f, 0.5f};
    memset(&h, 0, sizeof h);
    h.rows = rows; h.in = in; h.out = out;
    h.x_dtype = x_dtype; h.weight_dtype = weight_dtype; h.grad_dtype = grad_dtype;
    for (i = 0; i < 3; i++) {
        void *low;
        h.wide[i] = (float *)room(sizes[i]);
        ampt_uniform(h.wide[i], sizes[i], seed, (uint32_t)i, scales[i], 0);
        low = in_dtype(h.wide[i], sizes[i], rounded);
        free(h.wide[i]);
        h.wide[i] = widened(low, rounded, sizes[i]);
        free(low);
    }
    h.x = in_dtype(h.wide[0], sizes[0], x_dtype);
    h.weight = in_dtype(h.wide[1], sizes[1], weight_dtype);
    h.bias = in_dtype(h.wide[2], sizes[2], weight_dtype);
    h.labels = (int32_t *)room(rows);
    ampt_integers(h.labels, rows, seed, 3, (int32_t)(out < CLASSES ? out : CLASSES));
    for (i = 0; i < rows; i += 4) h.labels[i] = IGNORE;
    h.losses = (float *)room(rows);
    h.logits = room(rows * out); h.dx = room(rows * in);
    h.dweight = room(out * in); h.dbias = room(out);
    return h;
}
static void head_free(head *h) {
    void *all[] = {h->wide[0], h->wide[1], h->wide[2], h->x, h->weight, h->bias, h->labels, h->losses, h->logits,
                   h->dx, h->dweight, h->dbias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void region_begin(const head *h) {
    amp_autocast_desc region;
    memset(&region, 0, sizeof region);
    region.dtype = h->region;
    region.saturate_inputs = h->saturate;
    if (h->region != AMP_DTYPE_DEFAULT) CHECK_OK(amp_autocast_begin(amp, &region));
}
static void region_end(const head *h) {
    if (h->region != AMP_DTYPE_DEFAULT) CHECK_OK(amp_autocast_end(amp));
}

static void head_two(head *h) {
    amp_linear_op l;
    amp_cross_entropy_op ce;
    memset(&l, 0, sizeof l);
    l.x = amp_tensor2(h->x, h->x_dtype, h->rows, h->in);
    l.dx = amp_tensor2(h->dx, h->x_dtype, h->rows, h->in);
    l.y = l.dy = amp_tensor2(h->logits, h->logits_dtype ? h->logits_dtype : AMP_F32, h->rows, h->out);
    l.weight = &h->params[0]; l.bias = &h->params[1];
    memset(&ce, 0, sizeof ce);
    ce.logits = ce.dlogits = l.y;
    ce.labels = h->labels; ce.classes = h->op.classes; ce.ignore_index = h->op.ignore_index;
    ce.reduction = h->op.reduction; ce.label_smoothing = h->op.label_smoothing; ce.factor = h->op.factor;
    ce.grad_scale = h->op.grad_scale; ce.loss = &h->loss; ce.losses = h->losses;
    region_begin(h);
    CHECK_OK(amp_linear(amp, &l));
    CHECK_OK(amp_cross_entropy(amp, &ce));
    region_end(h);
    CHECK_OK(amp_linear_backward(amp, &l));
}

static void head_bind(head *h) {
    h->op.x = amp_tensor2(h->x, h->x_dtype, h->rows, h->in);
    h->op.dx = amp_tensor2(h->dx, h->x_dtype, h->rows, h->in);
    h->op.weight = &h->params[0]; h->op.bias = &h->params[1];
    h->op.labels = h->labels;
    h->op.loss = &h->loss; h->op.losses = h->losses;
    h->op.logits = h->logits_dtype;
}
static void head_one(head *h) {
    head_bind(h);
    region_begin(h);
    CHECK_OK(amp_linear_cross_entropy(amp, &h->op));
    region_end(h);
}

/* |a - b| / |b| */
static double apart(const float *a, const float *b, int64_t n) {
    double off = 0, own = 0;
    for (int64_t i = 0; i < n; i++) {
        off += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        own += (double)b[i] * (double)b[i];
    }
    return own > 0 ? sqrt(off / own) : sqrt(off);
}
static double apart_in(const void *a, const void *b, amp_dtype dtype, int64_t n) {
    float *x = widened(a, dtype, n), *y = widened(b, dtype, n);
    double d = ampt_has_nonfinite(x, n) || ampt_has_nonfinite(y, n) ? 1e30 : apart(x, y, n);
    free(x); free(y);
    return d;
}

/* ---- Against the two operators.  The sums are the same but for their order, in fp32; the logits' gradient and each
   result are rounded to their dtypes, and a number on the edge between two may fall to either. */

static double rounding(amp_dtype dtype) {
    return dtype == AMP_BF16 ? 1.0 / 256 : dtype == AMP_F16 ? 1.0 / 2048 : 1.0 / 1048576;
}

static void same_as_two(head h, int64_t chunk, int live, const char *what) {
    head two = h;
    double widest = rounding(h.region != AMP_DTYPE_DEFAULT ? h.region : AMP_F32), own;
    int64_t sizes[2] = {h.out * h.in, h.out};
    void *one[2];
    /* what is added to is the same for both */
    for (int i = 0; i < 2; i++) {
        int64_t n = sizes[i];
        float *before = (float *)room(n);
        void *low;
        ampt_uniform(before, n, 7, (uint32_t)(8 + i), 0.01f, 0);
        low = in_dtype(before, n, h.grad_dtype);
        one[i] = i ? h.dbias : h.dweight;
        memcpy(one[i], low, (size_t)n * amp_dtype_size(h.grad_dtype));
        if (i) two.dbias = low;
        else two.dweight = low;
        free(before);
    }
    two.dx = room(h.rows * h.in); two.losses = (float *)room(h.rows);
    head_params(&h, live);
    head_params(&two, live);
    h.op.chunk = chunk;
    head_two(&two);
    head_one(&h);
    CHECK_EQ(h.params[0].grad_live, 1);
    CHECK_EQ(h.params[1].grad_live, 1);
    own = widest + rounding(h.grad_dtype);
    CHECK_MSG(fabs((double)h.loss - (double)two.loss) <= 1e-6 * fabs((double)two.loss), "%s: loss %.9g, %.9g", what,
              (double)h.loss, (double)two.loss);
    CHECK_MSG(apart(h.losses, two.losses, h.rows) <= 1e-6, "%s: losses", what);
    CHECK_MSG(apart_in(h.dx, two.dx, h.x_dtype, h.rows * h.in) <= widest + rounding(h.x_dtype), "%s: dx", what);
    CHECK_MSG(apart_in(h.dweight, two.dweight, h.grad_dtype, sizes[0]) <= own, "%s: dweight", what);
    CHECK_MSG(apart_in(h.dbias, two.dbias, h.grad_dtype, sizes[1]) <= own, "%s: dbias", what);
    if (chunk >= h.rows && (h.region == AMP_DTYPE_DEFAULT || h.region == AMP_F32)) {       /* one chunk: the same calls */
        CHECK_MSG(memcmp(h.dx, two.dx, (size_t)(h.rows * h.in) * amp_dtype_size(h.x_dtype)) == 0, "%s: dx, bits", what);
        CHECK_MSG(memcmp(h.dweight, two.dweight, (size_t)sizes[0] * amp_dtype_size(h.grad_dtype)) == 0, "%s: dweight, bits", what);
        CHECK_MSG(h.loss == two.loss, "%s: loss, bits", what);
    }
    free(two.dx); free(two.losses); free(two.dweight); free(two.dbias);
}

TEST(as_the_two_operators) {
    static const int64_t shapes[][3] = {{ROWS, IN, OUT}, {1, 1, 2}, {70, 33, 129}, {129, 64, 512}};
    static const amp_dtype dtypes[] = {AMP_F32, AMP_BF16, AMP_F16};
    static const float seed_scale = 64;
    for (int s = 0; s < 4; s++)
        for (int k = 0; k < 3; k++)
            for (int mixed = 0; mixed < 3; mixed++) {           /* what is stored in 16 bits: nothing, x, all */
                amp_dtype low = dtypes[k];
                int64_t rows = shapes[s][0], chunks[] = {0, 1, 5, 64, rows, rows + 9};
                for (int c = 0; c < 6; c++) {
                    head h = head_of(rows, shapes[s][1], shapes[s][2], 5, AMP_F32, mixed ? low : AMP_F32,
                                     mixed > 1 ? low : AMP_F32, mixed > 1 ? low : AMP_F32);
                    char what[120];
                    h.region = low;
                    h.op.label_smoothing = c % 2 ? 0.1f : 0;
                    h.op.reduction = c % 3 == 1 ? AMP_REDUCTION_SUM : AMP_REDUCTION_MEAN;
                    h.op.classes = c > 2 && shapes[s][2] > CLASSES ? CLASSES : 0;
                    h.op.factor = c == 4 ? 0.5f : 0;
                    h.op.grad_scale = c > 1 ? &seed_scale : NULL;
                    h.logits_dtype = c == 5 ? low : AMP_DTYPE_DEFAULT;
                    if (rows == 1) h.labels[0] = 1;
                    snprintf(what, sizeof what, "%s, %d stored so, [%d %d %d], chunk %d", amp_dtype_name(low), mixed,
                             (int)rows, (int)shapes[s][1], (int)shapes[s][2], (int)chunks[c]);
                    same_as_two(h, chunks[c], c & 1, what);
                    head_free(&h);
                }
            }
}

/* Without a region, and without what may be left out. */
TEST(parts_may_be_left_out) {
    head h = head_of(ROWS, IN, OUT, 1, AMP_F32, AMP_F32, AMP_F32, AMP_F32), whole = h;
    void *dx = h.dx, *dweight = room(OUT * IN);
    float loss;
    same_as_two(h, 4, 0, "no region");
    head_params(&whole, 0);
    whole.op.chunk = 4;
    head_one(&whole);
    head_params(&h, 0);
    head_bind(&h);
    loss = whole.loss;
    memcpy(dweight, h.dweight, OUT * IN * sizeof(float));
    h.op.chunk = 4;
    h.op.losses = NULL; h.op.dx.data = NULL;            /* a weight's gradient alone */
    memset(h.dweight, 7, OUT * IN * sizeof(float));
    CHECK_OK(amp_linear_cross_entropy(amp, &h.op));
    CHECK(h.loss == loss);
    CHECK(memcmp(h.dweight, dweight, OUT * IN * sizeof(float)) == 0);
    h.op.dx = amp_tensor2(h.x, AMP_F32, ROWS, IN);      /* dx in the place of x, of frozen weights */
    h.params[0].grad.data = h.params[1].grad.data = NULL;
    h.params[0].grad_live = h.params[1].grad_live = 0;
    memset(dweight, 7, OUT * IN * sizeof(float)); memcpy(h.dweight, dweight, OUT * IN * sizeof(float));
    CHECK_OK(amp_linear_cross_entropy(amp, &h.op));
    CHECK(memcmp(h.x, dx, ROWS * IN * sizeof(float)) == 0);
    CHECK(memcmp(h.dweight, dweight, OUT * IN * sizeof(float)) == 0);
    CHECK_EQ(h.params[0].grad_live, 0);
    free(dweight);
    head_free(&h);
}

/* ---- Against PyTorch */

static const char *const cases[] = {"mean", "smooth", "sum", "classes"}, *const outputs[] = {"loss", "dx", "dweight", "dbias"};

static void golden_case(head *h, int i) {
    h->op.label_smoothing = i == 1 || i == 2 ? 0.1f : 0;
    h->op.reduction = i == 2 ? AMP_REDUCTION_SUM : AMP_REDUCTION_DEFAULT;
    h->op.classes = i == 3 ? CLASSES : 0;
    head_params(h, 0);
    head_one(h);
}
static float *golden_output(const head *h, int output, int64_t *n) {
    const void *data = output == 0 ? (const void *)&h->loss : output == 1 ? h->dx : output == 2 ? h->dweight : h->dbias;
    amp_dtype dtype = output == 0 ? AMP_F32 : output == 1 ? h->x_dtype : h->grad_dtype;
    *n = output == 0 ? 1 : output == 1 ? ROWS * IN : output == 2 ? OUT * IN : OUT;
    return widened(data, dtype, *n);
}

TEST(golden_fp32) {
    static const int64_t chunks[] = {0, 1, 5, 13};
    ampt_golden file = ampt_golden_open("linear_cross_entropy.bin");
    for (int c = 0; c < 4; c++)
        for (int i = 0; i < 4; i++) {
            head h = head_of(ROWS, IN, OUT, 0, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
            h.op.chunk = chunks[c];
            golden_case(&h, i);
            for (int o = 0; o < 4; o++) {
                char name[40];
                int64_t n, m;
                float *exact, *got = golden_output(&h, o, &n);
                double error;
                snprintf(name, sizeof name, "%s/%s", cases[i], outputs[o]);
                exact = (float *)ampt_golden_read(&file, name, 1, &m);
                CHECK_EQ(n, m);
                error = apart(got, exact, n);
                CHECK_MSG(error <= 1e-6, "%s: %.3g, chunk %d", name, error, (int)chunks[c]);
                free(exact); free(got);
            }
            head_free(&h);
        }
    free(file.data);
}

/* The exact result is that of fp32 on the same rounded inputs. */
TEST(golden_16bit) {
    static const amp_dtype dtypes[] = {AMP_BF16, AMP_F16};
    ampt_golden file = ampt_golden_open("linear_cross_entropy.bin");
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 4; i++) {
            double square[4] = {0};
            for (uint32_t seed = 0; seed < SEEDS; seed++) {
                head h = head_of(ROWS, IN, OUT, seed, dtypes[k], dtypes[k], dtypes[k], dtypes[k]);
                head exact = head_of(ROWS, IN, OUT, seed, dtypes[k], AMP_F32, AMP_F32, AMP_F32);
                h.region = dtypes[k];
                h.op.chunk = 5;
                golden_case(&h, i);
                golden_case(&exact, i);
                for (int o = 0; o < 4; o++) {
                    int64_t n;
                    float *got = golden_output(&h, o, &n), *want = golden_output(&exact, o, &n);
                    double error = ampt_has_nonfinite(got, n) ? 1e30 : apart(got, want, n);
                    square[o] += error * error;
                    free(got); free(want);
                }
                head_free(&h); head_free(&exact);
            }
            for (int o = 0; o < 4; o++) {
                char name[60];
                double rms = sqrt(square[o] / SEEDS), torch;
                snprintf(name, sizeof name, "%s/torch/%s/%s", amp_dtype_name(dtypes[k]), cases[i], outputs[o]);
                torch = ampt_golden_number(&file, name);
                CHECK_MSG(rms <= 1.2 * torch, "%s: %.3g, PyTorch %.3g", name, rms, torch);
                snprintf(name, sizeof name, "linear_cross_entropy/%s/%s/%s", amp_dtype_name(dtypes[k]), cases[i], outputs[o]);
                ampt_figure(name, rms, 1.2 * torch);
            }
        }
    free(file.data);
}

/* ---- Gradients */

/* GPT-2's head is its table of embeddings: the loss writes that gradient, the embedding adds to it, and so does the
   next batch. */
TEST(the_weight_may_be_an_embedding) {
    head h = head_of(ROWS, IN, OUT, 3, AMP_F32, AMP_F32, AMP_F32, AMP_F32), two = h;
    int32_t ids[ROWS];
    amp_embedding_op e;
    ampt_integers(ids, ROWS, 3, 9, OUT);
    two.dweight = room(OUT * IN); two.dx = room(ROWS * IN);
    memset(h.dweight, 0x7f, OUT * IN * sizeof(float));          /* what nobody zeroed */
    head_params(&h, 0);
    head_params(&two, 0);
    h.op.chunk = 5;
    for (int batch = 0; batch < 2; batch++)
        for (int way = 0; way < 2; way++) {
            head *at = way ? &h : &two;
            if (way) head_one(at);
            else head_two(at);
            memset(&e, 0, sizeof e);
            e.table = &at->params[0]; e.ids = ids;
            e.y = e.dy = amp_tensor2(at->dx, AMP_F32, ROWS, IN);
            e.plan.compute = AMP_F32; e.plan.mode = AMP_MODE_TRAINING;
            CHECK_OK(amp_embedding_backward(amp, &e));
        }
    CHECK(apart(h.dweight, two.dweight, OUT * IN) <= 1e-6);
    CHECK(ampt_has_nonfinite((float *)h.dweight, OUT * IN) == 0);
    free(two.dweight); free(two.dx);
    head_free(&h);
}

/* 16-bit gradients are rounded once, whatever the number of chunks: sums that 16 bits could not hold on the way are
   right. */
TEST(sums_over_chunks_are_fp32) {
    enum { MANY = 600 };
    head h = head_of(MANY, 4, 8, 2, AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16),
         wide = head_of(MANY, 4, 8, 2, AMP_BF16, AMP_F32, AMP_F32, AMP_F32);
    h.op.chunk = 1;
    h.op.reduction = wide.op.reduction = AMP_REDUCTION_SUM;
    for (int i = 0; i < MANY; i++) h.labels[i] = wide.labels[i] = 3;
    head_params(&h, 0);
    head_params(&wide, 0);
    head_one(&h);
    head_one(&wide);
    for (int i = 0; i < 2; i++) {
        int64_t n = i ? 8 : 32;
        float *got = widened(i ? h.dbias : h.dweight, AMP_BF16, n);
        CHECK_MSG(apart(got, (float *)(i ? wide.dbias : wide.dweight), n) <= 1.0 / 256, "%g",
                  apart(got, (float *)(i ? wide.dbias : wide.dweight), n));
        free(got);
    }
    head_free(&h); head_free(&wide);
}

TEST(the_seed_scales_gradients_only) {
    head h = head_of(ROWS, IN, OUT, 4, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    float seed = 1, loss, *dx = (float *)room(ROWS * IN), infinite = 3e38f;
    h.op.chunk = 5; h.op.grad_scale = &seed;
    head_params(&h, 0);
    head_one(&h);
    loss = h.loss;
    memcpy(dx, h.dx, ROWS * IN * sizeof *dx);
    seed = 1024;
    head_params(&h, 0);
    head_one(&h);
    CHECK(h.loss == loss);
    for (int i = 0; i < ROWS * IN; i++) CHECK(((float *)h.dx)[i] == 1024 * dx[i]);
    seed = infinite; h.op.reduction = AMP_REDUCTION_SUM;        /* a scale that is too high shows */
    h.region = AMP_F16;
    head_params(&h, 0);
    head_one(&h);
    CHECK(ampt_has_nonfinite((float *)h.dweight, OUT * IN));
    CHECK(h.loss > 0 && h.loss < 1000);
    free(dx);
    head_free(&h);
}

/* ---- Labels */

TEST(ignored_labels) {
    head h = head_of(ROWS, IN, OUT, 6, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    for (int i = 0; i < 8; i++) h.labels[i] = IGNORE;           /* of the first two chunks all */
    same_as_two(h, 4, 0, "two chunks ignored");
    for (int i = 0; i < ROWS; i++) h.labels[i] = 7;
    h.op.ignore_index = 7;
    for (int i = 0; i < 2; i++) {                               /* a mean over nothing */
        uint32_t bits;
        h.op.chunk = i ? 4 : 0;
        memset(h.dweight, 0x41, OUT * IN * sizeof(float));
        head_params(&h, 0);
        head_one(&h);
        memcpy(&bits, &h.loss, sizeof bits);
        CHECK((bits & 0x7fffffffu) > 0x7f800000u);
        for (int j = 0; j < OUT * IN; j++) CHECK(((float *)h.dweight)[j] == 0);
        for (int j = 0; j < ROWS * IN; j++) CHECK(((float *)h.dx)[j] == 0);
    }
    head_free(&h);
}

TEST(a_label_out_of_range_writes_nothing) {
    static const int32_t bad[] = {OUT, -1, 2000000000};
    head h = head_of(ROWS, IN, OUT, 6, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    char *dweight = (char *)room(OUT * IN), *dx = (char *)room(ROWS * IN);
    memset(h.dweight, 5, OUT * IN * 4); memset(dweight, 5, OUT * IN * 4);
    memset(h.dx, 6, ROWS * IN * 4); memset(dx, 6, ROWS * IN * 4);
    for (int i = 0; i < 3; i++)
        for (int live = 0; live < 2; live++) {
            h.labels[ROWS - 1] = bad[i];                        /* in the last chunk */
            h.loss = h.losses[0] = 5;
            head_params(&h, live);
            head_bind(&h);
            h.op.chunk = 4;
            CHECK_ERR(amp_linear_cross_entropy(amp, &h.op), AMP_ERR_LABEL);
            CHECK(strstr(amp_last_error(), ".labels[12]") != NULL);
            CHECK(memcmp(dweight, h.dweight, OUT * IN * 4) == 0 && memcmp(dx, h.dx, ROWS * IN * 4) == 0);
            CHECK(h.loss == 5 && h.losses[0] == 5);
            CHECK_EQ(h.params[0].grad_live, live);
            CHECK_EQ(h.op.plan.compute, AMP_DTYPE_DEFAULT);
        }
    free(dweight); free(dx);
    head_free(&h);
}

/* ---- Regions */

TEST(inference_takes_the_loss_alone) {
    head h = head_of(ROWS, IN, OUT, 6, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    amp_autocast_desc region;
    float loss;
    head_params(&h, 0);
    h.op.chunk = 4;
    head_one(&h);
    loss = h.loss;
    memset(&region, 0, sizeof region);
    region.mode = AMP_MODE_INFERENCE; region.disable = 1;
    memset(h.dweight, 5, OUT * IN * 4); memset(h.dx, 5, ROWS * IN * 4);
    head_params(&h, 0);
    h.loss = 0;
    CHECK_OK(amp_autocast_begin(amp, &region));
    CHECK_OK(amp_linear_cross_entropy(amp, &h.op));
    CHECK_OK(amp_autocast_end(amp));
    CHECK(h.loss == loss);
    CHECK_EQ(((char *)h.dweight)[9], 5);
    CHECK_EQ(((char *)h.dx)[9], 5);
    CHECK_EQ(h.params[0].grad_live, 0);
    head_free(&h);
}

TEST(decisions) {
    head h = head_of(ROWS, IN, OUT, 6, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    h.region = AMP_BF16;
    head_params(&h, 0);
    head_one(&h);
    CHECK_EQ(h.op.plan.compute, AMP_BF16);
    CHECK_EQ(h.op.plan.result, AMP_F32);
    CHECK_OK(amp_layer_override(amp, "head", AMP_F32));         /* the weight's name */
    head_one(&h);
    CHECK_EQ(h.op.plan.compute, AMP_F32);
    CHECK_EQ(h.op.plan.rule, AMP_BY_LAYER);
    CHECK_OK(amp_layer_override(amp, "head", AMP_DTYPE_DEFAULT));
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_LINEAR_CROSS_ENTROPY, NULL, AMP_BF16, AMP_BF16), AMP_F32);
    head_free(&h);
}

/* Inputs beyond fp16 are cut as in amp_linear. */
TEST(inputs_may_saturate) {
    head h = head_of(ROWS, IN, OUT, 6, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    ((float *)h.x)[5 * IN + 3] = 1e9f;
    ((float *)h.weight)[4 * IN + 5] = -2e9f;
    h.region = AMP_F16; h.saturate = 1;
    same_as_two(h, 4, 0, "saturating");
    head_free(&h);
}

/* ---- Memory */

TEST(the_logits_are_never_whole) {
    enum { MANY = 2048, VOCABULARY = 3000, CHUNK = 64 };
    head h = head_of(MANY, 8, VOCABULARY, 6, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    amp_memory_info before, after;
    int64_t taken;
    head_params(&h, 0);
    h.op.chunk = CHUNK;
    head_one(&h);                                               /* kernels have their scratch memory now */
    CHECK_OK(amp_memory(amp, &before));
    amp_memory_reset_peak(amp);
    head_one(&h);
    CHECK_OK(amp_memory(amp, &after));
    taken = after.peak - before.reserved;
    CHECK_MSG(taken <= (int64_t)(CHUNK * (VOCABULARY + 16) + 2 * MANY) * 4, "%lld bytes", (long long)taken);
    CHECK_EQ(after.allocated, before.allocated);
    h.op.chunk = 0;                                             /* 64 MiB hold all of it */
    amp_memory_reset_peak(amp);
    head_one(&h);
    CHECK_OK(amp_memory(amp, &after));
    taken = after.peak - before.reserved;
    CHECK_MSG(taken <= (64 << 20) + 100000 && taken > 20 << 20, "%lld bytes", (long long)taken);
    head_free(&h);
}

/* Two chunks of the default size: with a weight of zeros every loss is the logarithm of the vocabulary. */
TEST(default_chunks) {
    enum { MANY = 200, VOCABULARY = 1 << 17 };
    head h = head_of(MANY, 1, VOCABULARY, 6, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    amp_memory_info before, after;
    head_params(&h, 0);
    memset(h.weight, 0, VOCABULARY * 4);
    amp_param_changed(&h.params[0]);
    memset(h.bias, 0, VOCABULARY * 4);
    amp_param_changed(&h.params[1]);
    CHECK_OK(amp_memory(amp, &before));
    amp_memory_reset_peak(amp);
    h.op.chunk = 0;
    head_one(&h);
    CHECK_OK(amp_memory(amp, &after));
    CHECK_MSG(after.peak - before.reserved <= (64 << 20) + 8 * VOCABULARY * 4, "%lld bytes", (long long)(after.peak - before.reserved));
    CHECK_MSG(fabs((double)*h.op.loss - log((double)VOCABULARY)) < 1e-5, "%g", (double)*h.op.loss);
    head_free(&h);
}

/* ---- Refusals */

TEST(refusals) {
    head h = head_of(ROWS, IN, OUT, 6, AMP_F32, AMP_F32, AMP_F32, AMP_F32);
    amp_linear_cross_entropy_op good;
    head_params(&h, 0);
    head_bind(&h);
    good = h.op;
#define REFUSED(change, result) do { h.op = good; change; CHECK_ERR(amp_linear_cross_entropy(amp, &h.op), result); } while (0)
    REFUSED(h.op.weight = NULL, AMP_ERR_NULL);
    REFUSED(h.op.labels = NULL, AMP_ERR_NULL);
    REFUSED(h.op.loss = NULL, AMP_ERR_NULL);
    REFUSED(h.op.chunk = -1, AMP_ERR_RANGE);
    REFUSED(h.op.classes = OUT + 1, AMP_ERR_RANGE);
    REFUSED(h.op.label_smoothing = 2, AMP_ERR_RANGE);
    REFUSED(h.op.plan.compute = (amp_dtype)77, AMP_ERR_RANGE);
    REFUSED(h.op.logits = AMP_I32, AMP_ERR_DTYPE);
    REFUSED(h.op.x.dtype = AMP_I32, AMP_ERR_DTYPE);
    REFUSED(h.op.x.shape[1] = IN - 1, AMP_ERR_SHAPE);
    REFUSED(h.op.dx.shape[0] = ROWS - 1, AMP_ERR_SHAPE);
    REFUSED(h.op.bias = h.op.weight, AMP_ERR_SHAPE);
    REFUSED(h.op.dx.data = h.weight, AMP_ERR_CONFLICT);
    REFUSED(h.op.dx.data = h.dweight, AMP_ERR_CONFLICT);
    REFUSED(h.op.dx.data = (float *)h.x + 1, AMP_ERR_CONFLICT);
    REFUSED(h.op.losses = (float *)h.labels, AMP_ERR_CONFLICT);
#undef REFUSED
    h.op = good;
    CHECK_OK(amp_linear_cross_entropy(amp, &h.op));
    CHECK_OK(amp_recompute_begin(amp));                         /* would add its gradients again */
    CHECK_ERR(amp_linear_cross_entropy(amp, &h.op), AMP_ERR_STATE);
    CHECK_OK(amp_recompute_end(amp));
    head_free(&h);
}

/* Memory that is not there leaves everything as it was, whichever piece of it. */
static int64_t allowed;
static void *stingy(void *user, size_t bytes, size_t align) {
    void *p = NULL;
    (void)user;
    if (allowed-- <= 0 || posix_memalign(&p, align < sizeof p ? sizeof p : align, bytes) != 0) return NULL;
    return p;
}
static void stingy_free(void *user, void *p, size_t bytes) { (void)bytes; (void)user; free(p); }

TEST(no_memory) {
    head h = head_of(150, 64, 300, 6, AMP_F32, AMP_F32, AMP_F32, AMP_BF16);
    char *before = (char *)room(300 * 64);
    amp_context *outer = amp;
    int failures = 0, done = 0;
    memset(h.dweight, 5, 300 * 64 * 2); memset(before, 5, 300 * 64 * 2);
    h.region = AMP_BF16; h.op.chunk = 40;
    for (int n = 0; n < 40 && !done; n++) {
        amp_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.threads = 1;
        desc.system.alloc = stingy; desc.system.free = stingy_free;
        allowed = 1000000;
        CHECK_OK(amp_open(&amp, &desc));
        head_params(&h, 1);
        head_bind(&h);
        region_begin(&h);
        allowed = n;
        done = amp_linear_cross_entropy(amp, &h.op) == AMP_OK;
        allowed = 1000000;
        if (!done) {
            failures++;
            CHECK(strncmp(amp_last_error(), "AMP0301 amp_linear_cross_entropy", 32) == 0);
            CHECK_MSG(memcmp(before, h.dweight, 300 * 64 * 2) == 0, "allocation %d", n);
        }
        region_end(&h);
        amp_close(amp);
    }
    CHECK(done && failures >= 3);
    amp = outer;
    free(before);
    head_free(&h);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    CHECK_OK(amp_open(&amp, NULL));
    RUN(as_the_two_operators);
    RUN(parts_may_be_left_out);
    RUN(golden_fp32);
    RUN(golden_16bit);
    RUN(the_weight_may_be_an_embedding);
    RUN(sums_over_chunks_are_fp32);
    RUN(the_seed_scales_gradients_only);
    RUN(ignored_labels);
    RUN(a_label_out_of_range_writes_nothing);
    RUN(inference_takes_the_loss_alone);
    RUN(decisions);
    RUN(inputs_may_saturate);
    RUN(the_logits_are_never_whole);
    RUN(default_chunks);
    RUN(refusals);
    RUN(no_memory);
    amp_close(amp);
    return TEST_END();
}
