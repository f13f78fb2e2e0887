/* bench_shards.c - what an optimizer's states take on one of four ranks, whole and sharded, as the system counts it.
 *
 *     make build/bench_shards && build/bench_shards > tests/bench/results/shards-CPU-DATE.json
 *
 * Four processes over TCP train 40 million fp32 parameters for two steps, with AdamW and, for what is not states, with SGD
 * without momentum; both whole and with .shard = AMP_SHARD_STATES.  Resident bytes of rank 0 after the last step. */
#define AMP_IMPLEMENTATION
#include "bench.h"
#include "../../examples/amp_tcp.h"
#include <sys/wait.h>

enum { WORLD = 4, TENSORS = 16, EACH = 2500000, STEPS = 2 };

static double resident(void) {
    char line[256];
    double kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, "VmRSS:", 6) == 0) kib = strtod(line + 6, NULL);
    if (f != NULL) fclose(f);
    return kib * 1024;
}

/* Trains as one rank; out: resident bytes, and moments a parameter as amp_optimizer_bytes has them. */
static void train(int rank, const char *file, amp_optimizer_kind kind, amp_shard shard, double out[2]) {
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
        params[i].weight = amp_tensor1(memory + (size_t)i * EACH, AMP_F32, EACH);
        params[i].grad = amp_tensor1(memory + (size_t)(TENSORS + i) * EACH, AMP_F32, EACH);
    }
    memset(memory, 0, sizeof(float) * TENSORS * EACH);
    bench_need(amp_param_register(amp, params, TENSORS), "amp_param_register");
    desc.params = params; desc.n_params = TENSORS; desc.kind = kind; desc.lr = 1e-3; desc.shard = shard;
    bench_need(amp_optimizer_create(amp, &optimizer, &desc), "amp_optimizer_create");
    for (step = 0; step < STEPS; step++) {
        for (i = 0; i < TENSORS * EACH; i++) memory[(size_t)TENSORS * EACH + (size_t)i] = 1e-3f;
        for (i = 0; i < TENSORS; i++) params[i].grad_live = 1;
        bench_need(amp_step(optimizer, NULL), "amp_step");
    }
    out[0] = resident();
    bench_need(amp_optimizer_bytes(optimizer, &bytes), "amp_optimizer_bytes");
    out[1] = bytes.moments;
    amp_optimizer_destroy(optimizer);
    amp_close(amp);
    amp_tcp_close(&ranks);
}

static void measure(amp_optimizer_kind kind, amp_shard shard, double out[2]) {
    char file[64];
    pid_t child[WORLD];
    int r, status, pipes[2], bad = pipe(pipes);
    snprintf(file, sizeof file, "/tmp/amp_shards_%ld", (long)getpid());
    for (r = 0; r < WORLD && !bad; r++) {
        child[r] = fork();
        if (child[r] == 0) {
            double mine[2];
            train(r, file, kind, shard, mine);
            exit(r == 0 && write(pipes[1], mine, sizeof mine) != (ssize_t)sizeof mine);
        }
        bad |= child[r] < 0;
    }
    while (r-- > 0)
        if (child[r] > 0) bad |= waitpid(child[r], &status, 0) < 0 || status != 0;
    if (bad || read(pipes[0], out, 2 * sizeof *out) != 2 * (ssize_t)sizeof *out) { fprintf(stderr, "a rank failed\n"); exit(1); }
    close(pipes[0]);
    close(pipes[1]);
}

int main(void) {
    double sgd[2], adamw[2], sgd_sharded[2], adamw_sharded[2], all = (double)TENSORS * EACH;
    measure(AMP_SGD, AMP_SHARD_NONE, sgd);
    measure(AMP_ADAMW, AMP_SHARD_NONE, adamw);
    measure(AMP_SGD, AMP_SHARD_STATES, sgd_sharded);
    measure(AMP_ADAMW, AMP_SHARD_STATES, adamw_sharded);
    printf("{\"command\": \"build/bench_shards\", \"ranks\": %d, \"parameters\": %.0f, \"resident_bytes\": {\"sgd\": %.0f, \"adamw\": %.0f, "
           "\"sgd_sharded\": %.0f, \"adamw_sharded\": %.0f},\n \"states_bytes_a_parameter\": {\"whole\": %.3f, \"sharded\": %.3f}, "
           "\"amp_optimizer_bytes\": {\"whole\": %.3f, \"sharded\": %.3f}, \"share\": %.4f}\n", WORLD, all, sgd[0], adamw[0], sgd_sharded[0],
           adamw_sharded[0], (adamw[0] - sgd[0]) / all, (adamw_sharded[0] - sgd_sharded[0]) / all, adamw[1], adamw_sharded[1],
           (adamw_sharded[0] - sgd_sharded[0]) / (adamw[0] - sgd[0]));
    return 0;
}
