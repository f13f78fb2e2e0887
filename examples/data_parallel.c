/* data_parallel.c - several ranks train one model: your kernels, each rank on its share of the data.
 *
 *     gcc -O2 examples/data_parallel.c -o data_parallel -lm -lpthread && ./data_parallel [ranks]
 *
 * Ranks are threads of this program, each with a context and a copy of the model; amp_step averages their gradients.
 * With MPI they are processes, and nothing else changes:
 *
 *     mpicc -DUSE_MPI -O2 examples/data_parallel.c -o data_parallel -lm -lpthread && mpirun -np 2 ./data_parallel */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(USE_MPI)
#include "amp_mpi.h"
#endif

enum { HIDDEN = 32, POINTS = 64, WEIGHTS = 3 * HIDDEN + 1, STEPS = 1500, MOST_RANKS = 16 };
#define CHECK(call) do { if ((call) != AMP_OK) { fprintf(stderr, "%s\n", amp_last_error()); return 1; } } while (0)

/* Our own model, a tanh network that fits sin(3 x), on every world-th point from `first`.  Returns the mean squared
   error there, and adds its gradient. */
static float forward_backward(const float *w, float *gradient, int first, int world) {
    float error = 0, share = (float)world / POINTS;
    for (int p = first; p < POINTS; p += world) {
        float x = 2.0f * (float)p / (POINTS - 1) - 1, hidden[HIDDEN], y = w[3 * HIDDEN], d;
        for (int i = 0; i < HIDDEN; i++) {
            hidden[i] = tanhf(w[i] * x + w[HIDDEN + i]);
            y += w[2 * HIDDEN + i] * hidden[i];
        }
        d = 2 * (y - sinf(3 * x)) * share;
        error += (y - sinf(3 * x)) * (y - sinf(3 * x)) * share;
        gradient[3 * HIDDEN] += d;
        for (int i = 0; i < HIDDEN; i++) {
            float di = d * w[2 * HIDDEN + i] * (1 - hidden[i] * hidden[i]);
            gradient[2 * HIDDEN + i] += d * hidden[i];
            gradient[HIDDEN + i] += di;
            gradient[i] += di * x;
        }
    }
    return error;
}

typedef struct work { amp_reducer reducer; float w[WEIGHTS], error; int failed; pthread_t thread; } work;

static int train(work *r) {
    float gradient[WEIGHTS];
    amp_context *amp;
    amp_optimizer *optimizer;
    amp_desc settings = {0};
    amp_param p = {0};
    amp_optimizer_desc adamw = {0};
    settings.reducer = r->reducer;          /* all there is to say about ranks */
    settings.threads = 1;
    CHECK(amp_open(&amp, &settings));
    for (int i = 0; i < WEIGHTS; i++) r->w[i] = 2 * amp_random_uniform(1, (uint64_t)i) - 1;     /* the same on all */
    p.name = "w";
    p.weight = amp_tensor1(r->w, AMP_F32, WEIGHTS);
    p.grad = amp_tensor1(gradient, AMP_F32, WEIGHTS);
    adamw.params = &p;
    adamw.n_params = 1;
    adamw.lr = 0.01f;
    CHECK(amp_param_register(amp, &p, 1));
    CHECK(amp_optimizer_create(amp, &optimizer, &adamw));
    for (int step = 0; step < STEPS; step++) {
        if (!amp_param_accumulate(&p)) memset(gradient, 0, sizeof gradient);
        r->error = forward_backward(r->w, gradient, r->reducer.rank, r->reducer.world);
        CHECK(amp_step(optimizer, NULL));
    }
    printf("rank %d of %d: error on its points %.6f\n", (int)r->reducer.rank, (int)r->reducer.world, (double)r->error);
    amp_optimizer_destroy(optimizer);
    amp_close(amp);
    return 0;
}

#if defined(USE_MPI)
int main(int argc, char **argv) {
    static work mine;
    MPI_Comm comm;
    MPI_Init(&argc, &argv);
    comm = MPI_COMM_WORLD;
    mine.reducer = amp_mpi(&comm);
    if (train(&mine)) MPI_Abort(comm, 1);   /* the others may wait for this one */
    MPI_Finalize();
    return fflush(stdout) != 0 || ferror(stdout);
}
#else
static void *thread(void *arg) {
    work *r = (work *)arg;
    r->failed = train(r);
    return NULL;
}

int main(int argc, char **argv) {
    static work all[MOST_RANKS];
    amp_ranks *ranks;
    amp_ranks_desc desc = {0};
    char *end = "";
    long world = argc > 1 ? strtol(argv[1], &end, 10) : 2;
    int failed = 0;
    if (world < 1 || world > MOST_RANKS || *end != 0)
        return fprintf(stderr, "ranks: \"%s\" must be 1 to %d\n", argv[1], MOST_RANKS), 2;
    desc.world = (int32_t)world;
    CHECK(amp_ranks_create(&ranks, &desc));
    for (int i = 0; i < desc.world; i++) {
        CHECK(amp_ranks_reducer(ranks, i, &all[i].reducer));
        if (pthread_create(&all[i].thread, NULL, thread, &all[i])) return fprintf(stderr, "no thread\n"), 1;
    }
    for (int i = 0; i < desc.world; i++) pthread_join(all[i].thread, NULL);
    for (int i = 0; i < desc.world; i++) failed |= all[i].failed || memcmp(all[0].w, all[i].w, sizeof all[0].w) != 0;
    amp_ranks_destroy(ranks);
    puts(failed ? "failed" : "all ranks hold the same weights");
    return fflush(stdout) != 0 || ferror(stdout) || failed;
}
#endif
