/* bench_curves.c - measures how costs grow with the size of the problem.  The curves are attention's memory over the
 * length, resuming over the position, the CPU cost of a step over the number of tensors, and the time of a step over the
 * threads.
 *
 *     cc -O2 tests/bench/bench_curves.c -o bench_curves -lm -lpthread
 *     ./bench_curves [--curve attention|resume|tensors|threads] */
#define AMP_IMPLEMENTATION
#include "bench.h"

/* ---- Attention: bytes that forward and backward take besides their operands, over T. */

static amp_tensor attention_part(float *qkv, int64_t seq, int64_t heads, int64_t dim, int64_t which) {
    amp_tensor t = amp_tensor4(qkv + which * heads * dim, AMP_F32, 1, seq, heads, dim);
    t.stride[0] = seq * 3 * heads * dim; t.stride[1] = 3 * heads * dim; t.stride[2] = dim; t.stride[3] = 1;
    return t;
}

static void attention_at(int64_t seq, int64_t threads) {
    enum { HEADS = 4, DIM = 64 };
    bench_counts counts;
    amp_context *amp = NULL;
    amp_desc desc;
    amp_attention_op op;
    size_t column = (size_t)(seq * HEADS) * sizeof(float);
    float *qkv = (float *)bench_memory(column * 3 * DIM), *d_qkv = (float *)bench_memory(column * 3 * DIM);
    float *o = (float *)bench_memory(column * DIM), *lse = (float *)bench_memory(column);
    double start, forward, backward;
    int64_t i, before;
    memset(&desc, 0, sizeof desc);
    memset(&op, 0, sizeof op);
    for (i = 0; i < seq * 3 * HEADS * DIM; i++) qkv[i] = (float)(i * 7919 % 1013) / 1013.0f - 0.5f;
    desc.dtype = AMP_F32;
    desc.threads = (int32_t)threads;
    bench_count_into(&desc, &counts);
    bench_need(amp_open(&amp, &desc), "amp_open");
    op.q = attention_part(qkv, seq, HEADS, DIM, 0);    op.dq = attention_part(d_qkv, seq, HEADS, DIM, 0);
    op.k = attention_part(qkv, seq, HEADS, DIM, 1);    op.dk = attention_part(d_qkv, seq, HEADS, DIM, 1);
    op.v = attention_part(qkv, seq, HEADS, DIM, 2);    op.dv = attention_part(d_qkv, seq, HEADS, DIM, 2);
    op.o = op.d_o = amp_tensor4(o, AMP_F32, 1, seq, HEADS, DIM);
    op.lse = lse;
    op.mask.kind = AMP_MASK_CAUSAL;
    before = counts.bytes;
    start = ex_seconds();
    bench_need(amp_attention(amp, &op), "amp_attention");
    forward = ex_seconds() - start;
    start = ex_seconds();
    bench_need(amp_attention_backward(amp, &op), "amp_attention_backward");
    backward = ex_seconds() - start;
    bench_begin("curve_attention", amp);
    metrics_integer(stdout, "seq", seq);
    metrics_integer(stdout, "heads", HEADS);
    metrics_integer(stdout, "dim", DIM);
    metrics_integer(stdout, "scratch_bytes", counts.peak - before);
    metrics_integer(stdout, "scores_bytes", 4 * HEADS * seq * seq);     /* what storing queries x keys would take */
    metrics_number(stdout, "forward_ms", 1e3 * forward);
    metrics_number(stdout, "backward_ms", 1e3 * backward);
    metrics_end(stdout);
    amp_close(amp);
    free(qkv); free(d_qkv); free(o); free(lse);
}

/* ---- Resuming: a source of 10^12 samples that costs nothing, from seek to the first batch. */

static int no_read(void *user, const amp_sample *sample, void *const *fields) {
    (void)user;
    memcpy(fields[0], &sample->sample, sizeof sample->sample);
    return 0;
}

static void resume_at(amp_context *amp, int64_t position, int64_t rounds) {
    amp_source source;
    amp_loader_desc desc;
    amp_loader *loader = NULL;
    double *times = (double *)bench_memory((size_t)rounds * sizeof *times);
    int64_t i;
    memset(&source, 0, sizeof source);
    memset(&desc, 0, sizeof desc);
    source.read = no_read;
    source.samples = 1000000000000;
    source.n_fields = 1;
    source.fields[0].dtype = AMP_I64;
    source.fields[0].count = 1;
    desc.source = &source;
    desc.batch = 8;
    desc.shuffle = 1;
    bench_need(amp_loader_create(amp, &loader, &desc), "amp_loader_create");
    for (i = 0; i < rounds; i++) {
        amp_batch batch;
        double start = ex_seconds();
        bench_need(amp_loader_seek(loader, 0, position), "amp_loader_seek");
        bench_need(amp_loader_next(loader, &batch), "amp_loader_next");
        times[i] = ex_seconds() - start;
        bench_need(amp_loader_seek(loader, 0, i), "amp_loader_seek");
    }
    bench_begin("curve_resume", amp);
    metrics_integer(stdout, "position", position);
    metrics_number(stdout, "first_batch_us", 1e6 * bench_median(times, rounds));
    metrics_end(stdout);
    amp_loader_destroy(loader);
    free(times);
}

/* ---- The optimizer step over the number of tensors, each of 16 elements, so that the host's work shows. */

static void tensors_at(amp_context *amp, int64_t n, int64_t rounds) {
    enum { COUNT = 16 };
    amp_param *params = (amp_param *)bench_memory((size_t)n * sizeof *params);
    char (*names)[32] = (char (*)[32])bench_memory((size_t)n * sizeof *names);
    float *values = (float *)bench_memory((size_t)n * 2 * COUNT * sizeof *values);
    double *times = (double *)bench_memory((size_t)rounds * sizeof *times);
    amp_optimizer_desc od;
    amp_optimizer *optimizer = NULL;
    int64_t i;
    memset(params, 0, (size_t)n * sizeof *params);
    memset(&od, 0, sizeof od);
    for (i = 0; i < n * 2 * COUNT; i++) values[i] = (float)(i % 17) * 0.01f;
    for (i = 0; i < n; i++) {
        snprintf(names[i], sizeof *names, "p%lld", (long long)i);
        params[i].name = names[i];
        params[i].weight = amp_tensor1(values + i * 2 * COUNT, AMP_F32, COUNT);
        params[i].grad = amp_tensor1(values + (i * 2 + 1) * COUNT, AMP_F32, COUNT);
    }
    bench_need(amp_param_register(amp, params, n), "amp_param_register");
    od.params = params; od.n_params = n; od.lr = 1e-4;
    bench_need(amp_optimizer_create(amp, &optimizer, &od), "amp_optimizer_create");
    for (i = -3; i < rounds; i++) {
        double start;
        int64_t k;
        for (k = 0; k < n; k++) amp_param_accumulate(&params[k]);      /* every gradient is there */
        start = ex_seconds();
        bench_need(amp_step(optimizer, NULL), "amp_step");
        if (i >= 0) times[i] = ex_seconds() - start;
    }
    bench_begin("curve_tensors", amp);
    metrics_integer(stdout, "tensors", n);
    metrics_integer(stdout, "elements_each", COUNT);
    metrics_number(stdout, "step_us", 1e6 * bench_median(times, rounds));
    metrics_number(stdout, "ns_per_tensor", 1e9 * bench_median(times, rounds) / (double)n);
    metrics_end(stdout);
    amp_optimizer_destroy(optimizer);
    amp_param_forget(amp, params, n);
    free(params); free(names); free(values); free(times);
}

/* ---- A training step over the threads: 6 layers, 6 heads, 384 channels, bytes; batch 4 of 64 tokens. */

static void step_with(int64_t threads, const char *precision, int64_t rounds) {
    amp_desc desc;
    gpt_config config;
    amp_context *amp = NULL;
    gpt g;
    amp_optimizer_desc od;
    amp_optimizer *optimizer = NULL;
    int32_t ids[4 * 64 + 1];
    double *times = (double *)bench_memory((size_t)rounds * sizeof *times);
    amp_batch batch;
    int64_t i;
    memset(&desc, 0, sizeof desc); memset(&config, 0, sizeof config); memset(&od, 0, sizeof od);
    memset(&batch, 0, sizeof batch);
    batch.inputs = ids; batch.targets = ids + 1; batch.batch = 4; batch.seq = 64;
    for (i = 0; i < 4 * 64 + 1; i++) ids[i] = (int32_t)(i * 7919 % 251);
    desc.dtype = bench_dtype(precision);
    desc.allow_fallback = 1;
    desc.threads = (int32_t)threads;
    bench_need(amp_open(&amp, &desc), "amp_open");
    config.vocab = 256; config.positions = 1024; config.channels = 384; config.heads = 6; config.layers = 6;
    config.batch = 4; config.seq = 64;
    config.activations = desc.dtype;
    bench_need(gpt_create(&g, amp, &config), "gpt_create");
    bench_need(gpt_init(&g, 1), "gpt_init");
    od.params = g.params; od.n_params = g.n_params; od.lr = 1e-4;
    bench_need(amp_optimizer_create(amp, &optimizer, &od), "amp_optimizer_create");
    for (i = -2; i < rounds; i++) {
        double start = ex_seconds();
        bench_need(gpt_forward_loss(&g, &batch, NULL, 1), "gpt_forward_loss");
        bench_need(gpt_backward(&g), "gpt_backward");
        bench_need(amp_step(optimizer, NULL), "amp_step");
        if (i >= 0) times[i] = ex_seconds() - start;
    }
    bench_begin("curve_threads", amp);
    metrics_text(stdout, "precision", precision);
    metrics_number(stdout, "step_ms", 1e3 * bench_median(times, rounds));
    metrics_end(stdout);
    amp_optimizer_destroy(optimizer);
    gpt_destroy(&g);
    amp_close(amp);
    free(times);
}

int main(int argc, char **argv) {
    int64_t rounds = 20, threads = 0, longest = 8192, most = 10000, i;
    const char *curve = "all";
    amp_machine machine;
    amp_context *amp = NULL;
    const bench_flag flags[] = {
        {"curve", NULL, &curve, "attention, resume, tensors, threads or all"},
        {"rounds", &rounds, NULL, "per point"},
        {"threads", &threads, NULL, "most threads; 0: all cores"},
        {"longest", &longest, NULL, "largest T of the attention curve"},
        {"most", &most, NULL, "largest number of tensors"},
    };
    bench_flags(argc, argv, flags, (int)(sizeof flags / sizeof *flags));
    if (rounds < 1) bench_usage(argv[0], flags, (int)(sizeof flags / sizeof *flags));
    bench_need(amp_machine_probe(&machine), "amp_machine_probe");
    if (threads < 1) threads = machine.cpu.cores;
    bench_need(amp_open(&amp, NULL), "amp_open");
#define WANTED(name) (strcmp(curve, "all") == 0 || strcmp(curve, name) == 0)
    if (WANTED("attention")) for (i = 128; i <= longest; i *= 2) attention_at(i, threads);
    if (WANTED("resume")) for (i = 1; i <= 100000000000; i *= 100) resume_at(amp, i, rounds);
    if (WANTED("tensors")) for (i = 1; i <= most; i *= 10) tensors_at(amp, i, rounds);
    for (i = 1; i <= threads && WANTED("threads"); i++) {
        step_with(i, "fp32", rounds);
        step_with(i, "bf16", rounds);
    }
    amp_close(amp);
    return 0;
}
