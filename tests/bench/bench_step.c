/* bench_step.c - times a whole training step of GPT-2: forward, loss, backward, and AdamW without clipping.
 *
 *     cc -O2 tests/bench/bench_step.c -o bench_step -lm -lpthread
 *     ./bench_step --model 124m --batch 4 --seq 64 --precision bf16 --threads 2 --steps 10 --warmup 2 --recompute 0
 *
 * Weights and tokens are random.  As in nanoGPT and llm.c, the vocabulary of the 124M model is padded from 50257 to 50304,
 * so that every program of the comparison multiplies the same matrices.  The printed line has the medians of the step and
 * of its three parts. */
#define AMP_IMPLEMENTATION
#include "bench.h"
#include "../../examples/peak.h"

typedef struct bench_model { const char *name; int64_t vocab, tokens, positions, channels, heads, layers; } bench_model;
static const bench_model bench_models[] = {
    {"124m", 50304, 50257, 1024, 768, 12, 12},
    {"30m", 50304, 50257, 1024, 384, 6, 6},
    {"11m", 256, 256, 1024, 384, 6, 6},         /* bytes */
    {"tiny", 256, 256, 1024, 64, 2, 2},         /* to try the program out */
};
enum { MODELS = sizeof bench_models / sizeof *bench_models, BATCHES = 8 };

typedef struct run {
    const bench_model *model;
    int64_t batch, seq, threads, steps, warmup, path, recompute;
    const char *model_name, *precision;
    amp_context *amp;
    gpt gpt;
    amp_optimizer *optimizer;
    amp_scaler *scaler;
    int32_t *tokens;                /* [BATCHES, batch * seq + 1] */
} run;

/* The measured seconds of each step: forward with loss, backward, optimizer, all. */
enum { FORWARD, BACKWARD, UPDATE, STEP, PARTS };
typedef struct times { double *of[PARTS]; } times;

static void open_context(run *r) {
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = bench_dtype(r->precision);
    desc.allow_fallback = 1;
    desc.threads = (int32_t)r->threads;
    desc.cpu_path = (amp_cpu_path)r->path;
    bench_need(amp_open(&r->amp, &desc), "amp_open");
}

/* Random weights of GPT-2's deviation, but uniform: the step's time does not depend on it, and it is made fast. */
static void set_weights(run *r) {
    uint64_t state = 1;
    int64_t i, k;
    for (i = 0; i < r->gpt.n_params; i++) {
        amp_param *p = &r->gpt.params[i];
        float *w = (float *)p->weight.data;     /* level O1 on the CPU: fp32 that the host can write */
        int64_t count = amp_tensor_count(&p->weight);
        int is_scale = strstr(p->name, "ln_") != NULL && strstr(p->name, ".weight") != NULL;
        for (k = 0; k < count; k++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            if (p->weight.ndim == 2) w[k] = ((float)(state >> 40) / 16777216.0f - 0.5f) * 0.0693f;
            else w[k] = is_scale ? 1.0f : 0.0f;
        }
        amp_param_changed(p);
    }
}

static void create_model(run *r) {
    gpt_config config;
    amp_optimizer_desc od;
    amp_dtype dtype = bench_dtype(r->precision);
    memset(&config, 0, sizeof config);
    memset(&od, 0, sizeof od);
    config.vocab = r->model->vocab;       config.positions = r->model->positions;
    config.channels = r->model->channels; config.heads = r->model->heads;
    config.layers = r->model->layers;     config.batch = r->batch;
    config.seq = r->seq;                  config.activations = dtype == AMP_TF32 ? AMP_F32 : dtype;
    config.recompute = (int32_t)r->recompute;
    bench_need(gpt_create(&r->gpt, r->amp, &config), "gpt_create");
    set_weights(r);
    od.params = r->gpt.params; od.n_params = r->gpt.n_params;
    od.lr = 1e-4; od.weight_decay = 0.1;
    bench_need(amp_optimizer_create(r->amp, &r->optimizer, &od), "amp_optimizer_create");
    if (dtype == AMP_F16) bench_need(amp_scaler_create(r->amp, &r->scaler, NULL), "amp_scaler_create");
}

static void create_tokens(run *r) {
    int64_t n = BATCHES * (r->batch * r->seq + 1), i;
    uint64_t state = 7;
    r->tokens = (int32_t *)bench_memory((size_t)n * sizeof *r->tokens);
    for (i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        r->tokens[i] = (int32_t)((state >> 33) % (uint64_t)r->model->tokens);
    }
}

/* One step.  at[0..PARTS-1]: the seconds it took. */
static amp_result step(run *r, int64_t number, double at[PARTS]) {
    const int32_t *tokens = r->tokens + number % BATCHES * (r->batch * r->seq + 1);
    double start = ex_seconds(), forward, backward;
    amp_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.inputs = tokens; batch.targets = tokens + 1; batch.batch = r->batch; batch.seq = r->seq;
    EX_TRY(gpt_forward_loss(&r->gpt, &batch, amp_scaler_scale_ptr(r->scaler), 1));
    forward = ex_seconds();
    EX_TRY(gpt_backward(&r->gpt));
    backward = ex_seconds();
    EX_TRY(amp_step(r->optimizer, r->scaler));
    EX_TRY(amp_sync(r->amp));
    at[STEP] = ex_seconds() - start;
    at[FORWARD] = forward - start;
    at[BACKWARD] = backward - forward;
    at[UPDATE] = at[STEP] - at[FORWARD] - at[BACKWARD];
    return AMP_OK;
}

/* Seconds that this machine needs for a step at least: see peak.h. */
static double step_floor(run *r) {
    amp_parameter_bytes bytes;
    gpt_traffic t;
    peak_machine machine;
    amp_desc desc;
    double floor = 0;
    int row, pass;
    memset(&desc, 0, sizeof desc);
    bench_need(amp_query(r->amp, &desc), "amp_query");
    bench_need(amp_optimizer_bytes(r->optimizer, &bytes), "amp_optimizer_bytes");
    machine = peak_measure(desc.cpu_path, bench_dtype(r->precision), desc.threads);
    for (row = 0; row < PROFILE_ROWS; row++)
        for (pass = 0; pass < 2; pass++) {
            double flops = gpt_flops(&r->gpt, row) * (pass == 0 ? 1 : row == PROFILE_ATTENTION ? 2.5 : 2);
            t = gpt_bytes(&r->gpt, row, pass, gpt_compute(&r->gpt));
            floor += peak_floor(&machine, flops, t.bytes, t.calls);
        }
    t = profile_optimizer(&bytes);
    return floor + peak_floor(&machine, 0, t.bytes, t.calls);
}

static void report(run *r, times *t, float loss) {
    static const char *const names[PARTS] = {"forward_ms", "backward_ms", "update_ms", "median_ms"};
    double median = bench_median(t->of[STEP], r->steps), floor = r->recompute ? 0 : step_floor(r);
    amp_choice choice;
    amp_memory_info memory;
    int part;
    memset(&choice, 0, sizeof choice);
    memset(&memory, 0, sizeof memory);
    amp_query_choice(r->amp, &choice);
    amp_memory(r->amp, &memory);
    bench_begin("step", r->amp);
    metrics_text(stdout, "model", r->model->name);
    metrics_integer(stdout, "parameters", r->gpt.own.count);
    metrics_integer(stdout, "batch", r->batch);
    metrics_integer(stdout, "seq", r->seq);
    metrics_text(stdout, "precision", r->precision);
    metrics_integer(stdout, "emulated", choice.emulated);
    metrics_integer(stdout, "recompute", r->recompute);
    metrics_integer(stdout, "steps", r->steps);
    metrics_integer(stdout, "warmup", r->warmup);
    for (part = 0; part < PARTS; part++) metrics_number(stdout, names[part], 1e3 * bench_median(t->of[part], r->steps));
    metrics_number(stdout, "best_ms", 1e3 * bench_quantile(t->of[STEP], r->steps, 0));
    metrics_number(stdout, "p75_ms", 1e3 * bench_quantile(t->of[STEP], r->steps, 0.75));
    metrics_number(stdout, "tokens_per_s", (double)(r->batch * r->seq) / median);
    if (floor > 0) {
        metrics_number(stdout, "floor_ms", 1e3 * floor);
        metrics_number(stdout, "of_floor", floor / median);
    }
    metrics_integer(stdout, "memory_bytes", memory.peak);
    metrics_integer(stdout, "activation_bytes", r->gpt.memory_bytes);
    metrics_number(stdout, "loss", (double)loss);
    metrics_end(stdout);
}

int main(int argc, char **argv) {
    run r;
    times t;
    double at[PARTS];
    float loss = 0;
    int64_t i;
    int part;
    memset(&r, 0, sizeof r);
    r.batch = 4; r.seq = 64; r.threads = 2; r.steps = 10; r.warmup = 2;
    r.model_name = "124m"; r.precision = "bf16";
    {
        const bench_flag flags[] = {
            {"model", NULL, &r.model_name, "124m, 30m, 11m or tiny"},
            {"batch", &r.batch, NULL, "sequences per step"},
            {"seq", &r.seq, NULL, "tokens per sequence, at most 1024"},
            {"precision", NULL, &r.precision, "fp32, tf32, fp16 or bf16"},
            {"threads", &r.threads, NULL, "threads; 0: all cores"},
            {"steps", &r.steps, NULL, "steps that count"},
            {"warmup", &r.warmup, NULL, "steps before them"},
            {"recompute", &r.recompute, NULL, "1: one block's activations, each block's forward again in backward"},
            {"path", &r.path, NULL, "amp_cpu_path: 0 best, 1 scalar, 2 AVX2, 3 AVX-512"},
        };
        const int n = (int)(sizeof flags / sizeof *flags);
        bench_flags(argc, argv, flags, n);
        for (i = 0; i < MODELS; i++) if (strcmp(r.model_name, bench_models[i].name) == 0) r.model = &bench_models[i];
        if (r.model == NULL || r.steps < 1 || r.warmup < 0) bench_usage(argv[0], flags, n);
    }
    open_context(&r);
    create_model(&r);
    create_tokens(&r);
    for (part = 0; part < PARTS; part++) t.of[part] = (double *)bench_memory((size_t)r.steps * sizeof(double));
    for (i = -r.warmup; i < r.steps; i++) {
        bench_need(step(&r, i + r.warmup, at), "step");
        for (part = 0; part < PARTS && i >= 0; part++) t.of[part][i] = at[part];
    }
    bench_need(gpt_loss_read(&r.gpt, &loss), "loss");
    report(&r, &t, loss);
    for (part = 0; part < PARTS; part++) free(t.of[part]);
    free(r.tokens);
    amp_optimizer_destroy(r.optimizer);
    amp_scaler_destroy(r.scaler);
    gpt_destroy(&r.gpt);
    amp_close(r.amp);
    return 0;
}
