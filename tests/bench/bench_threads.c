/* bench_threads.c - runs one workload for some time on a number of threads, and measures calls per second and CPU time.
 *
 *     cc -O2 tests/bench/bench_threads.c -o bench_threads -lm -lpthread
 *     ./bench_threads --work product --size 112 --threads 2 --run 300
 *     ./bench_threads --work spin --on 20 --off 20       a neighbour: uses one core, here every other 20 ms
 *
 * tests/bench/threads.py compares it with the same program compiled, with -fopenmp, against an amp.h that used OpenMP.
 * Therefore it calls only functions that both have. */
#define AMP_IMPLEMENTATION
#include "bench.h"

enum { MLP_ROWS = 64, MLP_IN = 784, MLP_WIDE = 256, MLP_OUT = 10 };

typedef struct settings { int64_t threads, size, warmup_ms, run_ms, on_ms, off_ms; const char *work; } settings;

static amp_context *amp;

static void open_context(const settings *set, amp_dtype dtype) {
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    desc.allow_fallback = 1;
    desc.threads = (int32_t)set->threads;
    bench_need(amp_open(&amp, &desc), "amp_open");
}

static float *numbers(int64_t n) {
    float *x = (float *)bench_memory((size_t)n * sizeof *x);
    uint64_t state = 1;
    int64_t i;
    for (i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = ((float)(state >> 40) / 16777216.0f - 0.5f) * 0.0693f;
    }
    return x;
}

/* ---- A product of squares, in fp32 */

static amp_matmul_op product;

static void product_open(const settings *set) {
    int64_t n = set->size;
    open_context(set, AMP_F32);
    product.a = amp_tensor2(numbers(n * n), AMP_F32, n, n);
    product.b = amp_tensor2(numbers(n * n), AMP_F32, n, n);
    product.y = amp_tensor2(numbers(n * n), AMP_F32, n, n);
}
static amp_result product_call(void) { return amp_matmul(amp, &product); }

/* ---- Attention of one GPT-2 layer on `size` tokens, forward and backward, in fp32 */

static amp_attention_op attention;

static amp_tensor attention_tensor(int64_t seq) {
    enum { HEADS = 12, DIM = 64 };
    return amp_tensor4(numbers(seq * HEADS * DIM), AMP_F32, 1, HEADS, seq, DIM);
}
static void attention_open(const settings *set) {
    amp_tensor *const all[] = {&attention.q, &attention.k, &attention.v, &attention.o, &attention.d_o, &attention.dq,
                               &attention.dk, &attention.dv};
    size_t i;
    open_context(set, AMP_F32);
    for (i = 0; i < sizeof all / sizeof *all; i++) *all[i] = attention_tensor(set->size);
    attention.lse = numbers(12 * set->size);
    attention.mask.kind = AMP_MASK_CAUSAL;
}
static amp_result attention_call(void) {
    EX_TRY(amp_attention(amp, &attention));
    return amp_attention_backward(amp, &attention);
}

/* ---- A step of a GPT in bf16: forward, loss, backward, AdamW */

static gpt model;
static amp_optimizer *optimizer;
static int32_t *tokens;

static void optimizer_open(amp_param *params, int64_t n) {
    amp_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.params = params;
    desc.n_params = n;
    desc.lr = 1e-4;
    bench_need(amp_optimizer_create(amp, &optimizer, &desc), "amp_optimizer_create");
}

static void gpt_open(const settings *set, int64_t vocab, int64_t channels, int64_t heads, int64_t layers, int64_t batch, int64_t seq) {
    gpt_config config;
    int64_t i, k, count;
    open_context(set, AMP_BF16);
    memset(&config, 0, sizeof config);
    config.vocab = vocab;   config.positions = seq;  config.channels = channels; config.heads = heads;
    config.layers = layers; config.batch = batch;    config.seq = seq;           config.activations = AMP_BF16;
    bench_need(gpt_create(&model, amp, &config), "gpt_create");
    for (i = 0; i < model.n_params; i++) {
        amp_param *p = &model.params[i];
        float *random, *w = (float *)p->weight.data;
        count = amp_tensor_count(&p->weight);
        random = numbers(count);
        for (k = 0; k < count; k++) w[k] = p->weight.ndim == 2 ? random[k] : 1.0f;
        free(random);
    }
    optimizer_open(model.params, model.n_params);
    tokens = (int32_t *)bench_memory((size_t)(batch * seq + 1) * sizeof *tokens);
    for (i = 0; i <= batch * seq; i++) tokens[i] = (int32_t)(i * 7919 % 251);
}
static void small_open(const settings *set) { gpt_open(set, 256, 128, 4, 4, 4, 64); }
static void step_11m_open(const settings *set) { gpt_open(set, 256, 384, 6, 6, 4, 64); }
static void step_124m_open(const settings *set) { gpt_open(set, 50304, 768, 12, 12, 4, 64); }

static amp_result step_call(void) {
    amp_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.inputs = tokens; batch.targets = tokens + 1; batch.batch = model.config.batch; batch.seq = model.config.seq;
    EX_TRY(gpt_forward_loss(&model, &batch, NULL, 1));
    EX_TRY(gpt_backward(&model));
    return amp_step(optimizer, NULL);
}

/* ---- A step of a small MLP in fp32, on batches that a loader's worker makes meanwhile */

static struct { amp_param params[4]; amp_linear_op first, second; amp_cross_entropy_op loss; amp_loader *loader; } mlp;

static int mlp_read(void *user, const amp_sample *sample, void *const *fields) {
    const float *rows = (const float *)user;
    memcpy(fields[0], rows + sample->sample % 100 * MLP_IN, MLP_IN * sizeof *rows);
    *(int32_t *)fields[1] = (int32_t)(sample->sample % MLP_OUT);
    return 0;
}

static void mlp_param(int i, const char *name, int64_t rows, int64_t cols) {
    amp_param *p = &mlp.params[i];
    int64_t n = rows * (cols > 0 ? cols : 1);
    p->name = name;
    p->weight = cols > 0 ? amp_tensor2(numbers(n), AMP_F32, rows, cols) : amp_tensor1(numbers(n), AMP_F32, n);
    p->grad = cols > 0 ? amp_tensor2(numbers(n), AMP_F32, rows, cols) : amp_tensor1(numbers(n), AMP_F32, n);
}

static void mlp_open(const settings *set) {
    amp_source source;
    amp_loader_desc desc;
    open_context(set, AMP_F32);
    mlp_param(0, "first.weight", MLP_WIDE, MLP_IN);     mlp_param(1, "first.bias", MLP_WIDE, 0);
    mlp_param(2, "second.weight", MLP_OUT, MLP_WIDE);   mlp_param(3, "second.bias", MLP_OUT, 0);
    bench_need(amp_param_register(amp, mlp.params, 4), "amp_param_register");
    optimizer_open(mlp.params, 4);
    mlp.first.weight = &mlp.params[0];  mlp.first.bias = &mlp.params[1];    mlp.first.act = AMP_ACT_RELU;
    mlp.second.weight = &mlp.params[2]; mlp.second.bias = &mlp.params[3];
    mlp.first.y = mlp.second.x = amp_tensor2(numbers(MLP_ROWS * MLP_WIDE), AMP_F32, MLP_ROWS, MLP_WIDE);
    mlp.first.dy = mlp.second.dx = amp_tensor2(numbers(MLP_ROWS * MLP_WIDE), AMP_F32, MLP_ROWS, MLP_WIDE);
    mlp.second.y = mlp.second.dy = amp_tensor2(numbers(MLP_ROWS * MLP_OUT), AMP_F32, MLP_ROWS, MLP_OUT);
    mlp.loss.logits = mlp.loss.dlogits = mlp.second.y;
    mlp.loss.loss = numbers(1);
    memset(&source, 0, sizeof source);
    memset(&desc, 0, sizeof desc);
    source.read = mlp_read;
    source.user = numbers(100 * MLP_IN);
    source.samples = 1000000;
    source.n_fields = 2;
    source.fields[0].dtype = AMP_F32; source.fields[0].count = MLP_IN;
    source.fields[1].dtype = AMP_I32; source.fields[1].count = 1;
    desc.source = &source;
    desc.batch = MLP_ROWS;
    desc.shuffle = 1;
    desc.workers = 1;
    bench_need(amp_loader_create(amp, &mlp.loader, &desc), "amp_loader_create");
}
static amp_result mlp_call(void) {
    amp_batch batch;
    EX_TRY(amp_loader_next(mlp.loader, &batch));
    mlp.first.x = amp_tensor2((void *)(uintptr_t)batch.fields[0], AMP_F32, MLP_ROWS, MLP_IN);
    mlp.loss.labels = batch.targets;
    EX_TRY(amp_linear(amp, &mlp.first));
    EX_TRY(amp_linear(amp, &mlp.second));
    EX_TRY(amp_cross_entropy(amp, &mlp.loss));
    EX_TRY(amp_linear_backward(amp, &mlp.second));
    EX_TRY(amp_linear_backward(amp, &mlp.first));
    return amp_step(optimizer, NULL);
}

/* ---- Measuring */

static const struct { const char *name; void (*open)(const settings *set); amp_result (*call)(void); } works[] = {
    {"product", product_open, product_call},     {"attention", attention_open, attention_call},
    {"step_small", small_open, step_call},       {"step_11m", step_11m_open, step_call},
    {"step_124m", step_124m_open, step_call},    {"mlp", mlp_open, mlp_call},
};

static double process_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Calls until `seconds` are over: how many, and in how long. */
static int64_t calls_for(amp_result (*call)(void), double seconds, double *wall) {
    double start = ex_seconds();
    int64_t n = 0;
    do {
        bench_need(call(), "call");
        n++;
        *wall = ex_seconds() - start;
    } while (*wall < seconds);
    return n;
}

static void measure(const settings *set, amp_result (*call)(void)) {
    double wall, cpu;
    int64_t calls;
    bench_need(call(), "first call");
    calls_for(call, 1e-3 * (double)set->warmup_ms, &wall);
    cpu = process_seconds();
    calls = calls_for(call, 1e-3 * (double)set->run_ms, &wall);
    cpu = process_seconds() - cpu;
    bench_begin("threads", amp);
    metrics_text(stdout, "work", set->work);
    metrics_integer(stdout, "calls", calls);
    metrics_number(stdout, "us_per_call", 1e6 * wall / (double)calls);
    metrics_number(stdout, "cpu_us_per_call", 1e6 * cpu / (double)calls);
    metrics_end(stdout);
}

/* A program that computes for on_ms, then sleeps for off_ms, until the one that started it ends. */
static void spin(const settings *set) {
    pid_t parent = getppid();
    while (getppid() == parent) {
        double end = ex_seconds() + 1e-3 * (double)set->on_ms;
        while (ex_seconds() < end) { }
        if (set->off_ms > 0) bench_sleep(1e-3 * (double)set->off_ms);
    }
}

int main(int argc, char **argv) {
    settings set = {2, 128, 50, 300, 20, 0, "product"};
    const bench_flag flags[] = {
        {"work", NULL, &set.work, "product, attention, step_small, step_11m, step_124m, mlp; spin: a neighbour"},
        {"size", &set.size, NULL, "rows of the product's squares, tokens of attention"},
        {"threads", &set.threads, NULL, "threads; 0: all cores"},
        {"warmup", &set.warmup_ms, NULL, "milliseconds before those that count"},
        {"run", &set.run_ms, NULL, "milliseconds that count"},
        {"on", &set.on_ms, NULL, "spin: milliseconds of work ..."},
        {"off", &set.off_ms, NULL, "... and of sleep after each"},
    };
    size_t i;
    bench_flags(argc, argv, flags, (int)(sizeof flags / sizeof *flags));
    if (strcmp(set.work, "spin") == 0) { spin(&set); return 0; }
    for (i = 0; i < sizeof works / sizeof *works; i++) {
        if (strcmp(set.work, works[i].name) != 0) continue;
        works[i].open(&set);
        measure(&set, works[i].call);
        amp_loader_destroy(mlp.loader);
        amp_optimizer_destroy(optimizer);
        amp_close(amp);
        return 0;
    }
    bench_usage(argv[0], flags, (int)(sizeof flags / sizeof *flags));
    return 2;
}
