/* bench_shards.c - measures the memory of an optimizer's states on one of four ranks, whole and sharded, as the system
 * counts it.
 *
 *     make build/bench_shards && build/bench_shards > tests/bench/results/shards-CPU-DATE.json
 *
 * Four processes over TCP train 40 million fp32 parameters for three steps with AdamW.  They also train with SGD without
 * momentum, which shows the memory that is not states.  Both run with whole states and with .shard = AMP_SHARD_STATES.  The
 * figure is the resident bytes of rank 0 after the last step.  SGD also runs with buckets of 4 MiB and sharded states and
 * gradients.  There, the figure is the most that was resident during the last step. */
#define AMP_IMPLEMENTATION
#include "bench.h"
#include "../../examples/amp_tcp.h"
#include <sys/wait.h>

enum { WORLD = 4, TENSORS = 40, SIDE = 1000, EACH = SIDE * SIDE, ROWS = 4, STEPS = 3 };

/* "VmRSS:", now, or "VmHWM:", the most since forget_most. */
static double resident(const char *which) {
    char line[256];
    double kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, which, 6) == 0) kib = strtod(line + 6, NULL);
    if (f != NULL) fclose(f);
    return kib * 1024;
}

static void forget_most(void) {
    FILE *f = fopen("/proc/self/clear_refs", "w");
    if (f == NULL || fputs("5", f) < 0 || fclose(f) != 0) { fprintf(stderr, "/proc/self/clear_refs cannot be written\n"); exit(1); }
}

/* Forward and backward through all matrices, one after the other. */
static void run_layers(amp_context *amp, amp_param *params) {
    static float y[TENSORS + 1][ROWS * SIDE], dy[2][ROWS * SIDE];
    amp_linear_op layer = {0};
    int i;
    for (i = 0; i < ROWS * SIDE; i++) y[0][i] = dy[TENSORS % 2][i] = 1e-3f;
    for (i = 0; i < 2 * TENSORS; i++) {
        int l = i < TENSORS ? i : 2 * TENSORS - 1 - i;
        layer.weight = &params[l];
        layer.x = amp_tensor2(y[l], AMP_F32, ROWS, SIDE);
        layer.y = amp_tensor2(y[l + 1], AMP_F32, ROWS, SIDE);
        layer.dy = amp_tensor2(dy[(l + 1) % 2], AMP_F32, ROWS, SIDE);
        layer.dx = amp_tensor2(dy[l % 2], AMP_F32, ROWS, SIDE);
        bench_need(i < TENSORS ? amp_linear(amp, &layer) : amp_linear_backward(amp, &layer), "amp_linear");
    }
}

typedef struct way { amp_optimizer_kind kind; amp_shard shard; int64_t bucket_bytes; } way;
enum { AFTER, MOMENTS, MOST, FIGURES };

/* Trains as one rank; out: resident bytes after the last step, moments a parameter as amp_optimizer_bytes has them, and
   the most bytes resident during the last step. */
static void train(int rank, const char *file, way how, double out[FIGURES]) {
    static amp_param params[TENSORS];
    static char names[TENSORS][16];
    amp_tcp ranks;
    amp_tcp_desc tcp = {0};
    amp_desc settings = {0};
    amp_optimizer_desc desc = {0};
    amp_parameter_bytes bytes;
    amp_context *amp;
    amp_optimizer *optimizer;
    int i, step;
    float *memory = (float *)bench_memory(sizeof(float) * 2 * TENSORS * EACH);
    tcp.rank = rank; tcp.world = WORLD; tcp.file = file;
    if (amp_tcp_open(&ranks, &tcp) != AMP_OK) { fprintf(stderr, "%s\n", ranks.why); exit(1); }
    settings.reducer = amp_tcp_reducer(&ranks);
    settings.threads = 1;
    bench_need(amp_open(&amp, &settings), "amp_open");
    for (i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof names[i], "w%d", i);
        params[i].name = names[i];
        params[i].weight = amp_tensor2(memory + (size_t)i * EACH, AMP_F32, SIDE, SIDE);
        params[i].grad = amp_tensor2(memory + (size_t)(TENSORS + i) * EACH, AMP_F32, SIDE, SIDE);
    }
    memset(memory, 0, sizeof(float) * TENSORS * EACH);
    bench_need(amp_param_register(amp, params, TENSORS), "amp_param_register");
    desc.params = params; desc.n_params = TENSORS; desc.kind = how.kind; desc.lr = 1e-3; desc.shard = how.shard;
    desc.bucket_bytes = how.bucket_bytes;
    bench_need(amp_optimizer_create(amp, &optimizer, &desc), "amp_optimizer_create");
    for (step = 0; step < STEPS; step++) {
        if (step == STEPS - 1) forget_most();
        run_layers(amp, params);
        bench_need(amp_step(optimizer, NULL), "amp_step");
    }
    out[AFTER] = resident("VmRSS:");
    out[MOST] = resident("VmHWM:");
    bench_need(amp_optimizer_bytes(optimizer, &bytes), "amp_optimizer_bytes");
    out[MOMENTS] = bytes.moments;
    amp_optimizer_destroy(optimizer);
    amp_close(amp);
    amp_tcp_close(&ranks);
}

static void measure(amp_optimizer_kind kind, amp_shard shard, int64_t bucket_bytes, double out[FIGURES]) {
    way how = {kind, shard, bucket_bytes};
    char file[64];
    pid_t child[WORLD];
    int r, status, pipes[2], bad = pipe(pipes);
    snprintf(file, sizeof file, "/tmp/amp_shards_%ld", (long)getpid());
    for (r = 0; r < WORLD && !bad; r++) {
        child[r] = fork();
        if (child[r] == 0) {
            double mine[FIGURES];
            train(r, file, how, mine);
            exit(r == 0 && write(pipes[1], mine, sizeof mine) != (ssize_t)sizeof mine);
        }
        bad |= child[r] < 0;
    }
    while (r-- > 0)
        if (child[r] > 0) bad |= waitpid(child[r], &status, 0) < 0 || status != 0;
    if (bad || read(pipes[0], out, FIGURES * sizeof *out) != FIGURES * (ssize_t)sizeof *out) { fprintf(stderr, "a rank failed\n"); exit(1); }
    close(pipes[0]);
    close(pipes[1]);
}

int main(void) {
    double sgd[FIGURES], adamw[FIGURES], sgd_sharded[FIGURES], adamw_sharded[FIGURES], states[FIGURES], gradients[FIGURES], all = (double)TENSORS * EACH, rest;
    measure(AMP_SGD, AMP_SHARD_NONE, 0, sgd);
    measure(AMP_ADAMW, AMP_SHARD_NONE, 0, adamw);
    measure(AMP_SGD, AMP_SHARD_STATES, 0, sgd_sharded);
    measure(AMP_ADAMW, AMP_SHARD_STATES, 0, adamw_sharded);
    measure(AMP_SGD, AMP_SHARD_STATES, 4 << 20, states);
    measure(AMP_SGD, AMP_SHARD_GRADIENTS, 4 << 20, gradients);
    printf("{\"command\": \"build/bench_shards\", \"ranks\": %d, \"parameters\": %.0f, \"resident_bytes\": {\"sgd\": %.0f, \"adamw\": %.0f, "
           "\"sgd_sharded\": %.0f, \"adamw_sharded\": %.0f},\n \"states_bytes_a_parameter\": {\"whole\": %.3f, \"sharded\": %.3f}, "
           "\"amp_optimizer_bytes\": {\"whole\": %.3f, \"sharded\": %.3f}, \"share\": %.4f,\n", WORLD, all, sgd[AFTER], adamw[AFTER],
           sgd_sharded[AFTER], adamw_sharded[AFTER], (adamw[AFTER] - sgd[AFTER]) / all, (adamw_sharded[AFTER] - sgd_sharded[AFTER]) / all,
           adamw[MOMENTS], adamw_sharded[MOMENTS], (adamw_sharded[AFTER] - sgd_sharded[AFTER]) / (adamw[AFTER] - sgd[AFTER]));
    rest = sgd[AFTER] - 4 * all;        /* weights, and the program */
    printf(" \"most_resident_bytes_during_a_step\": {\"sgd\": %.0f, \"sharded_states\": %.0f, \"sharded_gradients\": %.0f}, "
           "\"gradient_bytes_a_parameter\": {\"whole\": %.3f, \"sharded_states\": %.3f, \"sharded_gradients\": %.3f}}\n",
           sgd[MOST], states[MOST], gradients[MOST], (sgd[MOST] - rest) / all, (states[MOST] - rest) / all, (gradients[MOST] - rest) / all);
    return 0;
}
