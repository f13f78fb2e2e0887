/* bench_moments.c - compares AdamW steps with moments in fp32, bf16 and 8 bits: time, and bytes per parameter.
 *
 *     cc -O2 tests/bench/bench_moments.c -o bench_moments -lm -lpthread
 *     ./bench_moments [--n 4194304] [--repeats 15] [--threads 1]
 *
 * Each has one fp32 parameter.  The three take turns, so that a busy machine slows all of them alike.  moments.py compares
 * the results with bitsandbytes. */
#define AMP_IMPLEMENTATION
#include "bench.h"

enum { KINDS = 3 };

int main(int argc, char **argv) {
    static const amp_dtype kinds[KINDS] = {AMP_F32, AMP_BF16, AMP_MOMENTS_8BIT};
    static const char *const names[KINDS] = {"fp32", "bf16", "8bit"};
    int64_t n = 4194304, repeats = 15, threads = 1, i;
    const bench_flag flags[] = {{"n", &n, NULL, "elements"}, {"repeats", &repeats, NULL, "steps of each"},
                                {"threads", &threads, NULL, "of the CPU"}};
    amp_optimizer *optimizers[KINDS];
    amp_parameter_bytes bytes[KINDS];
    amp_param params[KINDS];
    amp_context *amp = NULL;
    amp_desc desc;
    double *times[KINDS], start;
    int k;
    bench_flags(argc, argv, flags, (int)(sizeof flags / sizeof *flags));
    memset(&desc, 0, sizeof desc);
    memset(params, 0, sizeof params);
    desc.dtype = AMP_F32;
    desc.threads = (int32_t)threads;
    bench_need(amp_open(&amp, &desc), "amp_open");
    for (k = 0; k < KINDS; k++) {
        float *w = (float *)bench_memory((size_t)n * 4), *g = (float *)bench_memory((size_t)n * 4);
        amp_optimizer_desc d;
        for (i = 0; i < n; i++) {
            w[i] = amp_random_uniform(1, (uint64_t)i) - 0.5f;
            g[i] = 0.01f * (amp_random_uniform(2, (uint64_t)i) - 0.5f);
        }
        params[k].name = names[k];
        params[k].weight = amp_tensor1(w, AMP_F32, n);
        params[k].grad = amp_tensor1(g, AMP_F32, n);
        memset(&d, 0, sizeof d);
        d.params = &params[k]; d.n_params = 1; d.lr = 1e-3; d.weight_decay = 0.1; d.moments = kinds[k];
        bench_need(amp_optimizer_create(amp, &optimizers[k], &d), "amp_optimizer_create");
        bench_need(amp_optimizer_bytes(optimizers[k], &bytes[k]), "amp_optimizer_bytes");
        times[k] = (double *)bench_memory((size_t)repeats * sizeof(double));
    }
    for (i = -2; i < repeats; i++)
        for (k = 0; k < KINDS; k++) {
            params[k].grad_live = 1;
            start = ex_seconds();
            bench_need(amp_optimizer_step(optimizers[k], NULL), "amp_optimizer_step");
            if (i >= 0) times[k][i] = ex_seconds() - start;
        }
    for (k = 0; k < KINDS; k++) {
        double median = bench_quantile(times[k], repeats, 0.5);       /* sorts */
        printf("{\"who\": \"amp.h\", \"moments\": \"%s\", \"n\": %lld, \"threads\": %lld, \"ms\": %.4f, \"least_ms\": %.4f, "
               "\"moment_bytes\": %.5f}\n", names[k], (long long)n, (long long)threads,
               1e3 * median, 1e3 * times[k][0], bytes[k].moments);
    }
    for (k = 0; k < KINDS; k++) amp_optimizer_destroy(optimizers[k]);
    amp_close(amp);
    return 0;
}
