/* ranks.h - the processes that train together: which of them this is, how they meet, and when all of them stop.
 *
 * Each holds the whole model and reads its own batches; amp_step sums every gradient and the overflow flag over all, so
 * all make the same update.  Rank 0 writes files and prints.  With -DUSE_MPI, mpirun starts them.  Else each is told by
 * its environment what it is, by whatever launcher, or by hand:
 *
 *     RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./train_gpt &
 *     RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./train_gpt
 *
 * In place of RANK and WORLD_SIZE there may be what mpirun sets (OMPI_COMM_WORLD_RANK and _SIZE, PMI_RANK and _SIZE) or
 * srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS); the first of them counts.  In place of MASTER_ADDR and MASTER_PORT, a file
 * that all see.  Ranks on several machines also need the same secret: see amp_tcp.h.
 *
 * SIGTERM and SIGUSR1, which clusters send before they take a machine away, end the program with the code ranks_again:
 * all stop after the same step, rank 0 saves, and whoever started them starts them again. */
#ifndef EXAMPLE_RANKS_H
#define EXAMPLE_RANKS_H
#include "example.h"
#if defined(USE_MPI)
#include "amp_mpi.h"
#else
#include "amp_tcp.h"
#endif

enum { ranks_again = 75 };      /* EX_TEMPFAIL of sysexits.h */
static amp_reducer ranks = {.world = 1};

/* The number of this rank among those on its machine, as launchers tell it; 0 without. */
static inline int ranks_local(void) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"};
    int i;
    for (i = 0; i < 4; i++)
        if (getenv(names[i]) != NULL) return atoi(getenv(names[i]));
    return 0;
}

/* ---- Stopping */

static inline void ranks_stop_on_signal(int signal_number) { (void)signal_number; ex_stop_requested = 2; }

/* Ctrl-C and a closed terminal stop as in other examples.  The signals of clusters may come several times. */
static inline void ranks_stop_install(void) {
#if defined(_WIN32)
    ex_stop_install();
    signal(SIGTERM, ranks_stop_on_signal);
#else
    struct sigaction action;
    ex_stop_install();
    memset(&action, 0, sizeof action);
    action.sa_handler = ranks_stop_on_signal;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
#endif
}
static inline int ranks_exit_code(void) { return ex_stop_requested > 1 ? ranks_again : ex_stop_requested ? 130 : 0; }

/* ---- Combining and waiting */

static inline amp_result ranks_all_reduce(void *x, int64_t n, amp_dtype dtype, amp_reduce_op op) {
    const char *why = NULL;
    if (ranks.world == 1 || ranks.reduce(ranks.user, x, n, dtype, op, NULL) == 0) return AMP_OK;
    if (ranks.calls != NULL && ranks.calls->error != NULL) why = ranks.calls->error(ranks.user);
    return ex_fail(AMP_ERR_REDUCE, "AMP0503 reducer: %s", why != NULL ? why : "failed");
}

/* Combines one number over all ranks. */
static inline amp_result ranks_combine(float *x, amp_reduce_op op) { return ranks_all_reduce(x, 1, AMP_F32, op); }

/* Adds up n numbers of each rank. */
static inline amp_result ranks_sum(double *x, int64_t n) {
    return ranks_all_reduce(x, n, AMP_F64, AMP_REDUCE_SUM);
}

/* Returns once all ranks have come here. */
static inline amp_result ranks_wait(void) {
    float none = 0;
    return ranks_combine(&none, AMP_REDUCE_SUM);
}

/* *stop 1: some rank was asked to stop; then all are. */
static inline amp_result ranks_stop(int *stop) {
    float asked = (float)ex_stop_requested;
    EX_TRY(ranks_combine(&asked, AMP_REDUCE_MAX));
    if (asked > 0) ex_stop_requested = (int)asked;
    *stop = asked > 0;
    return AMP_OK;
}

/* Rank 0 alone prints. */
static inline amp_result ranks_silence(void) {
    if (ranks.rank == 0 || freopen("/dev/null", "w", stdout) != NULL) return AMP_OK;
    return ex_fail(AMP_ERR_OPEN, "/dev/null: %s", strerror(errno));
}

#if defined(USE_MPI)
/* ---- MPI */

static MPI_Comm ranks_all;
static inline amp_result ranks_begin(int *argc, char ***argv) {
    int threads;
    MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &threads);
    ranks_all = MPI_COMM_WORLD;
    ranks = amp_mpi(&ranks_all);
    return ranks_silence();
}
static inline amp_result ranks_join(const char *file, double seconds) {
    if (*file != 0)
        return ex_fail(AMP_ERR_CONFLICT, "--rank-file is for ranks without MPI, because MPI connects the ranks itself");
    amp_mpi_timeout_ms = (int)(seconds * 1000 + 0.5);
    return AMP_OK;
}
/* A failed rank ends the others, which may wait for it; a call that was given up leaves no other way. */
static inline void ranks_end(int code) {
    if (amp_mpi_why[0] == 0 && (code == 0 || ex_stop_requested || ranks.world == 1)) MPI_Finalize();
    else MPI_Abort(MPI_COMM_WORLD, code);
}

#else
/* ---- TCP */

/* A launcher's variables: rank, number of ranks, job, step and restart. */
typedef struct ranks_launcher { const char *rank, *world, *job, *step, *restart; } ranks_launcher;
static const ranks_launcher ranks_launchers[] = {
    {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", NULL, "TORCHELASTIC_RESTART_COUNT"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_ess_base_jobid", NULL, NULL},
    {"PMI_RANK", "PMI_SIZE", "PMI_JOBID", NULL, NULL},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"},
};
enum { ranks_n_launchers = 4, ranks_slurm = 3 };
static amp_tcp ranks_tcp;
static char ranks_job[64];

/* A whole number from `lowest` to `highest` in the environment. */
static inline amp_result ranks_number(const char *name, long lowest, long highest, int32_t *out) {
    const char *text = getenv(name);
    char *end;
    long value;
    if (text == NULL) return ex_fail(AMP_ERR_NAME, "%s is not set", name);
    value = strtol(text, &end, 10);
    if (end == text || *end != 0 || value < lowest || value > highest)
        return ex_fail(AMP_ERR_RANGE, "%s=%.40s, must be %ld to %ld", name, text, lowest, highest);
    *out = (int32_t)value;
    return AMP_OK;
}

/* A launcher that started more processes than `world` started some that `l` does not know of: each would train alone,
   and all would write the same files.  Fewer are a launcher's that started another, as srun does torchrun. */
static inline amp_result ranks_one_launcher(const ranks_launcher *l, int32_t world) {
    int i;
    for (i = 0; i < ranks_n_launchers; i++) {
        const char *text = getenv(ranks_launchers[i].world);
        if (text != NULL && strtol(text, NULL, 10) > world)
            return ex_fail(AMP_ERR_CONFLICT, "%s=%.40s, but %s=%d: unset %s and %s, or the variables of the other "
                           "launcher", ranks_launchers[i].world, text, l->world, (int)world, l->rank, l->world);
    }
    return AMP_OK;
}

/* Who this is: ranks.rank and ranks.world.  Comes before the flags are read. */
static inline amp_result ranks_begin(int *argc, char ***argv) {
    const ranks_launcher *l = NULL;
    const char *part[3];
    int32_t own = 0, all = 1;
    int i;
    (void)argc;
    (void)argv;
    for (i = 0; i < ranks_n_launchers && l == NULL; i++) {
        int rank = getenv(ranks_launchers[i].rank) != NULL, world = getenv(ranks_launchers[i].world) != NULL;
        if (i == ranks_slurm && !world) break;          /* in a batch script, not under srun */
        if (rank != world)
            return ex_fail(AMP_ERR_NAME, "%s is set, and %s is not",
                           rank ? ranks_launchers[i].rank : ranks_launchers[i].world,
                           rank ? ranks_launchers[i].world : ranks_launchers[i].rank);
        if (rank) l = &ranks_launchers[i];
    }
    if (l == NULL) return AMP_OK;
    EX_TRY(ranks_number(l->world, 1, 1024, &all));
    EX_TRY(ranks_number(l->rank, 0, all - 1, &own));
    EX_TRY(ranks_one_launcher(l, all));
    ranks.world = all;
    ranks.rank = own;
    part[0] = getenv(l->job);
    part[1] = l->step != NULL ? getenv(l->step) : NULL;
    part[2] = l->restart != NULL ? getenv(l->restart) : NULL;
    for (i = 0; i < 3; i++)
        snprintf(ranks_job + strlen(ranks_job), sizeof ranks_job - strlen(ranks_job), "%s%.30s", i > 0 ? "." : "",
                 part[i] != NULL ? part[i] : "");
    return ranks_silence();
}

/* Meets the others at MASTER_ADDR and MASTER_PORT, or through `file` if it is not "". */
static inline amp_result ranks_join(const char *file, double seconds) {
    amp_tcp_desc desc;
    if (ranks.world == 1) return AMP_OK;
    memset(&desc, 0, sizeof desc);
    desc.rank = ranks.rank;
    desc.world = ranks.world;
    desc.job = ranks_job;
    desc.timeout_ms = (int32_t)(seconds * 1000 + 0.5);
    if (*file != 0) desc.file = file;
    else {
        desc.address = getenv("MASTER_ADDR");
        if (desc.address == NULL || *desc.address == 0)
            return ex_fail(AMP_ERR_NAME, "this is one of %d ranks, and MASTER_ADDR is not set: set it and MASTER_PORT "
                           "to where rank 0 can listen, or give --rank-file", (int)ranks.world);
        EX_TRY(ranks_number("MASTER_PORT", 1, 65535, &desc.port));
    }
    if (amp_tcp_open(&ranks_tcp, &desc) != AMP_OK)
        return ex_fail(AMP_ERR_REDUCE, "AMP0503 %s", ranks_tcp.why);
    ranks = amp_tcp_reducer(&ranks_tcp);
    return AMP_OK;
}

/* A rank that failed by itself says why to the others, which may wait for it. */
static inline void ranks_end(int code) {
    if (code != 0 && !ex_stop_requested && ranks_tcp.peers != NULL)
        (void)amp_tcp_fail(&ranks_tcp, "rank %d failed: %.180s", (int)ranks.rank, ex_error());
    if (ranks_tcp.peers != NULL) amp_tcp_close(&ranks_tcp);
}
#endif
#endif
