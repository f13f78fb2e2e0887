/* t_differential_tape.c - compares random graphs of up to 60 nodes on the tape with PyTorch, and runs them with a failing
 * allocator.
 *
 *     t_differential_tape                    100 graphs under an allocator whose n-th call fails, for every n
 *     t_differential_tape --graphs 2000      the same with 2000 graphs
 *     t_differential_tape --dump FIRST N     prints graphs FIRST to FIRST + N - 1 with their gradients
 *
 * tests/torch/differential/tape.py runs the last form, builds each graph again in torch.autograd, and compares.  A graph is
 * a list of operators on matrices of ROWS rows and 8 or 12 columns.  Both sides read it from the same numbers. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "faults.h"

enum { ROWS = 6, NODES = 60, SEEDS = 16, DTYPES = 3, CLASSES = 5, WIDTHS = 2 };
static const int64_t widths[WIDTHS] = {8, 12};

/* ---- A graph */

/* In the order of tape.py. */
typedef enum op_kind {
    OP_LINEAR, OP_LAYERNORM, OP_RMSNORM, OP_ADD, OP_SCALE, OP_ACTIVATION, OP_SOFTMAX, OP_SWIGLU, OP_TURN, OP_HALVES, OP_SCORES,
    OP_ATTENTION, OP_EMBEDDING, OP_GATE, OP_KINDS
} op_kind;
/* a, b: values; w, v: parameters (-1: none); n: an activation, a width or a number of sixteenths. */
typedef struct op { int32_t kind, a, b, w, v, n; } op;
/* loss: 0 mse, 1 cross-entropy of a linear layer, 2 the two in one, 3 a weighted sum of mse and 2; of the last value. */
typedef struct graph { int32_t n, loss; op ops[NODES]; int32_t width[NODES + 1]; } graph;

/* Parameters: weights [out, in] by widths, then vectors, then a table and a head for each width. */
enum { VECTORS = 4, PARAMS = WIDTHS * WIDTHS + WIDTHS * VECTORS + 2 * WIDTHS };
static int weight_of(int in, int out) { return out * WIDTHS + in; }
static int vector_of(int width, int i) { return WIDTHS * WIDTHS + width * VECTORS + i; }
static int table_of(int width) { return WIDTHS * WIDTHS + WIDTHS * VECTORS + width; }
static int head_of(int width) { return table_of(width) + WIDTHS; }
static void shape_of(int p, int64_t shape[2]) {
    shape[1] = 0;
    if (p < WIDTHS * WIDTHS) { shape[0] = widths[p / WIDTHS]; shape[1] = widths[p % WIDTHS]; }
    else if (p < table_of(0)) shape[0] = widths[(p - WIDTHS * WIDTHS) / VECTORS];
    else if (p < head_of(0)) { shape[0] = CLASSES; shape[1] = widths[p - table_of(0)]; }
    else { shape[0] = CLASSES; shape[1] = widths[p - head_of(0)]; }
}

static uint64_t stream, drawn;
static int32_t draw(int32_t n) { return (int32_t)(amp_random_u32(stream, drawn++) % (uint32_t)n); }
/* A value of this width, mostly a late one; there is one. */
static int32_t draw_value(const graph *g, int32_t n, int32_t width) {
    int32_t i = draw(3) ? n : draw(n + 1), k;
    for (k = 0; k <= n; k++, i = i ? i - 1 : n) if (g->width[i] == width) return i;
    return 0;
}
static graph make_graph(int64_t number) {
    graph g;
    memset(&g, 0, sizeof g);
    stream = UINT64_C(0x7461706500000000) + (uint64_t)number;
    drawn = 0;
    g.n = 3 + draw(NODES - 5);
    for (int32_t i = 0; i < g.n; i++) {
        op *o = &g.ops[i];
        int32_t x = draw(3) ? i : draw(i + 1), width = g.width[x], to = width;
        o->kind = draw(OP_KINDS);
        o->a = x;
        o->b = draw_value(&g, i, width);
        o->w = vector_of(width, draw(VECTORS));
        o->v = draw(3) ? vector_of(width, draw(VECTORS)) : -1;
        if (o->v == o->w) o->v = -1;        /* a norm's weight and bias have each its gradient */
        if (o->kind == OP_LINEAR) {
            to = draw(3) ? width : draw(WIDTHS);
            o->w = weight_of(width, to);
            o->v = draw(3) ? vector_of(to, draw(VECTORS)) : -1;
            o->n = draw(2) ? 0 : (int32_t[]){AMP_ACT_GELU, AMP_ACT_GELU_ERF, AMP_ACT_RELU}[draw(3)];
        }
        if (o->kind == OP_SCALE) o->n = 4 + draw(16);
        if (o->kind == OP_ACTIVATION) o->n = 1 + draw(5);
        if (o->kind == OP_EMBEDDING) { to = draw(WIDTHS); o->w = table_of(to); }
        g.width[i + 1] = to;
    }
    g.loss = draw(4);
    return g;
}

/* ---- On the tape */

static amp_context *amp;
static amp_model *model;
static amp_tape *tape;
static amp_param *params;
static uint16_t input_low[ROWS * 8], target_low[ROWS * 12];
static float input[ROWS * 8], target[ROWS * 12];
static int32_t ids[ROWS], labels[ROWS];
static amp_tensor in_dtype(float *full, uint16_t *low, amp_dtype dtype, int64_t cols) {
    return amp_tensor2(dtype == AMP_F32 ? (void *)full : (void *)low, dtype, ROWS, cols);
}

static amp_value record_op(const op *o, const amp_value *v, const graph *g) {
    amp_attention_op causal;
    amp_tensor of_ids = amp_tensor1(ids, AMP_I32, ROWS);
    amp_param *w = &params[o->w], *b = o->v < 0 ? NULL : &params[o->v];
    amp_value x = v[o->a], y = v[o->b];
    int64_t cols = widths[g->width[o->a]], flat[2] = {ROWS, 0}, turned[2] = {0, ROWS}, one[3] = {1, ROWS, 0};
    flat[1] = turned[0] = one[2] = cols;
    memset(&causal, 0, sizeof causal);
    causal.mask.kind = AMP_MASK_CAUSAL;
    switch ((op_kind)o->kind) {
        case OP_LINEAR: return amp_tape_linear(tape, x, w, b, (amp_activation_kind)o->n);
        case OP_LAYERNORM: return amp_tape_layernorm(tape, x, w, b, 0);
        case OP_RMSNORM: return amp_tape_rmsnorm(tape, x, w, 0);
        case OP_ADD: return amp_tape_add(tape, x, y);
        case OP_SCALE: return amp_tape_scale(tape, x, (float)o->n / 16);
        case OP_ACTIVATION: return amp_tape_activation(tape, x, b, (amp_activation_kind)o->n);
        case OP_SOFTMAX: return amp_tape_softmax(tape, x, NULL);
        case OP_SWIGLU: return amp_tape_swiglu(tape, x, y);
        case OP_TURN: return amp_tape_reshape(tape, amp_tape_transpose(tape, x, 0, 1), flat, 2);
        case OP_HALVES:
            y = amp_tape_split(tape, x, 1, 0, cols / 2);
            x = amp_tape_split(tape, x, 1, cols / 2, cols / 2);
            return amp_tape_concat(tape, x, amp_tape_swiglu(tape, y, x), 1);
        case OP_SCORES:
            y = amp_tape_softmax(tape, amp_tape_matmul(tape, x, y, 0, 1, 0.25f), NULL);
            return amp_tape_matmul(tape, y, x, 0, 0, 0);
        case OP_ATTENTION:
            x = amp_tape_reshape(tape, x, one, 3);
            y = amp_tape_reshape(tape, y, one, 3);
            return amp_tape_reshape(tape, amp_tape_attention(tape, x, y, x, 2, &causal), flat, 2);
        case OP_EMBEDDING: return amp_tape_embedding(tape, &of_ids, w, NULL);
        case OP_GATE:                   /* the mean of rows times each */
            y = amp_tape_reshape(tape, amp_tape_mean(tape, y), (int64_t[]){1, cols}, 2);
            x = amp_tape_matmul(tape, x, y, 0, 1, 0);
            return amp_tape_matmul(tape, x, y, 0, 0, 0);
        default: return 0;
    }
}
/* *first: the input, a variable. */
static amp_value record(const graph *g, amp_dtype dtype, amp_value *first) {
    amp_value v[NODES + 1], other = 0, loss;
    int32_t width = g->width[g->n];
    amp_tensor x = in_dtype(input, input_low, dtype, 8), t = in_dtype(target, target_low, dtype, widths[width]);
    amp_param *head = &params[head_of(width)];
    amp_tape_store(tape, dtype);
    v[0] = *first = amp_tape_variable(tape, &x);
    for (int32_t i = 0; i < g->n; i++) v[i + 1] = record_op(&g->ops[i], v, g);
    if (g->loss == 0 || g->loss == 3) other = amp_tape_mse(tape, v[g->n], amp_tape_input(tape, &t), AMP_REDUCTION_MEAN);
    if (g->loss == 0) return other;
    if (g->loss == 1)
        return amp_tape_cross_entropy(tape, amp_tape_linear(tape, v[g->n], head, NULL, AMP_ACT_NONE), labels, NULL);
    loss = amp_tape_linear_cross_entropy(tape, v[g->n], head, NULL, labels, NULL);
    return g->loss == 2 ? loss : amp_tape_add(tape, loss, amp_tape_scale(tape, other, 0.5f));
}

static amp_result open_graphs(amp_dtype dtype, int faulty) {
    amp_desc desc;
    char name[16];
    int64_t n = 0, shape[2];
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    desc.threads = 1;
    if (faulty) desc.system = *faults_system();
    CHECK_OK(amp_open(&amp, &desc));
    CHECK_OK(amp_tape_create(amp, &tape, NULL));
    CHECK_OK(amp_model_create(amp, &model, 1, PARAMS));
    for (int p = 0; p < PARAMS; p++) {
        shape_of(p, shape);
        snprintf(name, sizeof name, "p%d", p);
        (void)amp_model_param(model, name, shape[0], shape[1], AMP_INIT_ZEROS, 0);
    }
    return amp_model_params(model, &params, &n);
}
static void close_graphs(void) {
    amp_tape_destroy(tape);
    amp_model_destroy(model);
    amp_close(amp);
}

/* Numbers of a seed, which the dtype can hold. */
static void fill(float *x, int64_t n, uint64_t seed, uint64_t of, float size, float shift, amp_dtype dtype, uint16_t *low) {
    uint16_t rounded[256];
    for (int64_t i = 0; i < n; i++) x[i] = shift + size * (2 * amp_random_uniform(seed, of * 1000 + (uint64_t)i) - 1);
    if (dtype == AMP_F32) return;
    CHECK_OK(amp_convert(rounded, dtype, x, AMP_F32, n, NULL, NULL));
    CHECK_OK(amp_convert(x, AMP_F32, rounded, dtype, n, NULL, NULL));
    if (low != NULL) memcpy(low, rounded, (size_t)n * 2);
}
static void fill_all(int64_t number, int seed, amp_dtype dtype) {
    uint64_t at = (uint64_t)(number * SEEDS + seed) + UINT64_C(0x6772617068000000);
    for (int p = 0; p < PARAMS; p++) {
        int matrix = params[p].weight.ndim == 2;
        fill((float *)params[p].weight.data, amp_tensor_count(&params[p].weight), at, (uint64_t)p, matrix ? 0.6f : 0.4f, matrix ? 0 : 0.8f, dtype, NULL);
        amp_param_changed(&params[p]);
        params[p].grad_live = 0;
        memset(params[p].grad.data, 0, (size_t)amp_tensor_count(&params[p].grad) * 4);
    }
    fill(input, ROWS * 8, at, PARAMS, 1, 0, dtype, input_low);
    fill(target, ROWS * 12, at, PARAMS + 1, 1, 0, dtype, target_low);
    for (int i = 0; i < ROWS; i++) {
        ids[i] = (int32_t)(amp_random_u32((uint64_t)number, (uint64_t)i) % CLASSES);
        labels[i] = (int32_t)(amp_random_u32((uint64_t)number, 100 + (uint64_t)i) % CLASSES);
    }
}

/* ---- For PyTorch: the graph; by dtype and seed the numbers, the loss and the gradients of input and parameters */

static const amp_dtype dtypes[DTYPES] = {AMP_F32, AMP_F16, AMP_BF16};
static const float scales[DTYPES] = {1, 1024, 1};   /* fp16's gradients would underflow */

static void put(const void *data, size_t bytes) { if (fwrite(data, 1, bytes, stdout) != bytes) exit(2); }
static void dump_run(const graph *g, int d) {
    float x_grad[ROWS * 8], value = 0;
    amp_value first, loss;
    amp_tensor t;
    CHECK_OK(amp_tape_begin(tape, NULL));
    loss = record(g, dtypes[d], &first);
    CHECK_OK(amp_tape_backward(tape, loss, &scales[d]));
    CHECK_OK(amp_tape_read(tape, loss, &value, 1));
    memset(x_grad, 0, sizeof x_grad);
    if (amp_tape_gradient(tape, first, &t) == AMP_OK) CHECK_OK(amp_convert(x_grad, AMP_F32, t.data, t.dtype, ROWS * 8, NULL, NULL));
    put(input, sizeof input);
    put(target, sizeof target);
    for (int p = 0; p < PARAMS; p++) put(params[p].weight.data, (size_t)amp_tensor_count(&params[p].weight) * 4);
    put(&value, 4);
    put(x_grad, sizeof x_grad);
    for (int p = 0; p < PARAMS; p++) put(params[p].grad.data, (size_t)amp_tensor_count(&params[p].grad) * 4);
}
static int dump(int64_t first, int64_t n) {
    for (int d = 0; d < DTYPES; d++) {
        CHECK_OK(open_graphs(dtypes[d], 0));
        for (int64_t i = first; i < first + n; i++) {
            graph g = make_graph(i);
            fill_all(i, 0, dtypes[d]);
            put(&g.n, 4); put(&g.loss, 4);
            put(g.ops, (size_t)g.n * sizeof *g.ops);
            put(ids, sizeof ids); put(labels, sizeof labels);
            for (int s = 0; s < SEEDS; s++) { fill_all(i, s, dtypes[d]); dump_run(&g, d); }
        }
        close_graphs();
    }
    return ampt.failures > 0;
}

/* ---- Under an allocator that fails: the right error, nothing kept, and the next step is whole */

static int64_t graphs = 100;
static float wanted[16384], got[16384];
static void take(float *out) {
    for (int p = 0; p < PARAMS; p++) {
        int64_t n = amp_tensor_count(&params[p].grad);
        memset(out, 0, (size_t)n * 4);
        if (params[p].grad_live) memcpy(out, params[p].grad.data, (size_t)n * 4);
        params[p].grad_live = 0;
        out += n;
    }
}
static amp_result step(const graph *g, amp_dtype dtype) {
    amp_value first;
    amp_result r = amp_tape_begin(tape, NULL);
    return r != AMP_OK ? r : amp_tape_backward(tape, record(g, dtype, &first), NULL);
}
TEST(random_graphs_under_a_failing_allocator) {
    static const fault no_memory = {"alloc", FAULT_ALLOC, FAULT_ERROR, 0, {AMP_ERR_MEMORY}};
    int64_t failures = 0;
    for (int64_t i = 0; i < graphs; i++) {
        amp_dtype dtype = dtypes[i % DTYPES];
        amp_tape_desc desc = {0, NULL, NULL};
        graph g = make_graph(i);
        int64_t bytes = 0, n;
        amp_value first;
        CHECK_OK(open_graphs(dtype, 1));
        fill_all(i, 0, dtype);
        CHECK_OK(amp_tape_begin(tape, NULL));
        CHECK_OK(amp_tape_plan(tape, record(&g, dtype, &first), &bytes));
        CHECK_OK(step(&g, dtype));
        take(wanted);
        if (i % 2) desc.memory_budget = bytes - bytes / 64;     /* tight: what is computed again is chosen under failure too */
        amp_tape_destroy(tape);
        CHECK_OK(amp_tape_create(amp, &tape, &desc));
        if (i % 2 && step(&g, dtype) != AMP_OK) {
            desc.memory_budget = 0;
            amp_tape_destroy(tape);
            CHECK_OK(amp_tape_create(amp, &tape, &desc));
        } else if (i % 2) {
            take(got);
            CHECK_MSG(memcmp(wanted, got, sizeof wanted) == 0, "graph %d with a budget", (int)i);
        }
        for (n = 1; n < 1000; n++) {
            amp_result r;
            amp_tape_destroy(tape);                 /* a tape without memory of its own yet */
            CHECK_OK(amp_tape_create(amp, &tape, &desc));
            faults_arm(&no_memory, n, n % 2 ? FAULT_ONCE : FAULT_FROM);
            r = step(&g, dtype);
            faults_disarm();
            if (r == AMP_OK) { take(got); break; }
            failures++;
            CHECK_MSG(r == AMP_ERR_MEMORY && strstr(amp_last_error(), "amp_tape_") != NULL && !amp_autocast_active(amp, NULL), "graph %d, %s", (int)i, amp_last_error());
            for (int p = 0; p < PARAMS; p++) CHECK(!params[p].grad_live);
            CHECK_OK(step(&g, dtype));
            take(got);
            CHECK_MSG(memcmp(wanted, got, sizeof wanted) == 0, "graph %d after failure %d", (int)i, (int)n);
        }
        CHECK_MSG(n < 1000 && memcmp(wanted, got, sizeof wanted) == 0, "graph %d", (int)i);
        close_graphs();
        CHECK(faults_balanced());
    }
    CHECK(failures > 3 * graphs);
    printf("counted tape.allocations_failed %lld\n", (long long)failures);
}

int main(int argc, char **argv) {
    if (argc > 3 && !strcmp(argv[1], "--dump")) return dump(atoll(argv[2]), atoll(argv[3]));
    if (argc > 2 && !strcmp(argv[1], "--graphs")) { graphs = atoll(argv[2]); argc = 1; }
    TEST_BEGIN(argc, argv);
    RUN(random_graphs_under_a_failing_allocator);
    return TEST_END();
}
