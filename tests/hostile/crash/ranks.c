/* ranks.c - kills, blocks or stops one of four processes that train together, and checks that the others end and the run
 * resumes.
 *
 *     build/crash_ranks [--kills 10] [--seed 1] [--record FILE]
 *
 * Four example trainers connect over TCP, with a time limit of two seconds, and one of them is killed.  This is any rank at
 * a random time, which may be while they connect, or rank 0 at a call of its file layer (before it, after it, or with half
 * of a write done).  At every moment, the following must hold:
 *
 *   - The others end by themselves within the limit, and name the rank that was killed.
 *   - NAME.state is, byte for byte, a checkpoint of the uninterrupted run: the last one that was begun or the one before.
 *   - The ranks are resumed, killed again and resumed again.  They end with the uninterrupted run's checkpoint and weights,
 *     byte for byte, and each batch is made of the same samples.
 *
 * Other tests have a rank that hangs, and send SIGTERM and SIGUSR1 to one rank, which all must obey after the same step.
 * Another test resumes with fewer and more ranks, and counts the samples. */
#include "trainer.h"

enum {
    CONFIGS = 3, WORLD = 4, MOST_WORLD = 8, STEPS = 24, SAVE_EVERY = 3, SAVES = STEPS / SAVE_EVERY, SAMPLES = 64,
    GLOBAL_BATCH = 8, MOST_EPOCHS = 8, MOST_CALLS = 4096, LIMIT_MS = 2000, HANG_MS = 30000
};

/* 64 samples of 16 bytes to train on: 8 batches an epoch. */
static const char common_flags[] =
    "train_gpt --data %/text --out %/out --save %/model --steps 24 --save-interval 3 --layers 1 --heads 2 --channels 16 "
    "--seq 16 --log-interval 1 --eval-interval 9 --eval-batches 1 --sample 0 --dropout 0.1 --threads 1 --rank-timeout 2";

static const char *const config_flags[CONFIGS] = {
    "--precision fp32",
    "--precision fp16 --init-scale 67108864 --growth-interval 4 --accumulation 2",
    "--precision bf16 --level O2 --masters stochastic --moments bf16",
};

typedef enum moment { BEFORE_CALL, HALF_WRITE, AFTER_CALL, MOMENTS } moment;

/* Shared with the ranks. */
typedef struct board_of_run {
    int64_t calls, kill_call;       /* of rank 0's file layer; kill_call -1: none */
    int32_t kill_moment, reference; /* reference 1: the notes are taken, else they are compared with */
    int64_t states_opened, states_begun, states_done;   /* temporary files; renames */
    int64_t wrong_samples;
    int64_t batches[MOST_WORLD], last[MOST_WORLD];      /* that each rank has read; the number of the last, from 1 */
    int32_t seen[MOST_EPOCHS][SAMPLES];         /* how often a sample was read */
    int32_t batch_of[MOST_EPOCHS][SAMPLES];     /* of the reference, from 1 */
    uint64_t state[SAVES + 1], weights;         /* of the reference's files, by number from 1 */
} board_of_run;

static board_of_run *shared, references[CONFIGS];
static double reference_seconds[CONFIGS];
static char folder[1000];
static int own_rank;                /* in a rank */

static struct { int64_t kills, seed; const char *record; } flags = {10, 1, NULL};
static struct {
    int64_t kills, by_rank[WORLD], at_calls, at_random, resumed, from_start, last, before, finished_first, chains;
    double longest;                 /* from a death to the end of the last survivor */
} counts;

/* ---- In a rank */

static int about_to(int writes) {
    int chosen = shared->calls++ == shared->kill_call;
    if (chosen && (shared->kill_moment == BEFORE_CALL || (shared->kill_moment == HALF_WRITE && !writes)))
        kill(getpid(), SIGKILL);
    return chosen;
}
static void done_with(int chosen) {
    if (chosen && shared->kill_moment == AFTER_CALL) kill(getpid(), SIGKILL);
}
static int writes_model(const char *path) { return own_rank == 0 && strstr(path, "/model.") != NULL; }

int __wrap_open(const char *path, int how, ...);
int __wrap_open(const char *path, int how, ...) {
    int chosen, file;
    if ((how & (O_WRONLY | O_RDWR)) == 0) return __real_open(path, how);
    if (!writes_model(path)) return __real_open(path, how, 0666);
    shared->states_opened += is_checkpoint(path, ".state.tmp");
    chosen = about_to(0);
    file = __real_open(path, how, 0666);
    done_with(chosen);
    return file;
}

ssize_t __wrap_pwrite(int file, const void *data, size_t bytes, off_t offset);
ssize_t __wrap_pwrite(int file, const void *data, size_t bytes, off_t offset) {
    int chosen = own_rank == 0 && about_to(1);
    ssize_t n;
    if (chosen && shared->kill_moment == HALF_WRITE) {
        (void)__real_pwrite(file, data, bytes / 2, offset);
        kill(getpid(), SIGKILL);
    }
    n = __real_pwrite(file, data, bytes, offset);
    done_with(chosen);
    return n;
}

int __wrap_fsync(int file);
int __wrap_fsync(int file) {
    int chosen = own_rank == 0 && about_to(0), result = __real_fsync(file);
    done_with(chosen);
    return result;
}

int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) {
    int chosen, result, is_state = is_checkpoint(to, ".state");
    uint64_t hash = shared->reference ? hash_file(from) : 0;
    if (!writes_model(to)) return __real_rename(from, to);
    chosen = about_to(0);
    shared->states_begun += is_state;
    result = __real_rename(from, to);
    shared->states_done += is_state;
    if (shared->reference && is_state && shared->states_done <= SAVES) shared->state[shared->states_done] = hash;
    if (shared->reference && ends_with(to, ".safetensors")) shared->weights = hash;
    done_with(chosen);
    return result;
}

/* The number that a sample's text begins with. */
static int64_t number_of_sample(const int32_t *tokens) {
    int64_t n = 0;
    int i;
    for (i = 0; i < 8; i++) n = n * 10 + tokens[i] - '0';
    return n;
}

/* The training loader is the one without an end. */
amp_result __wrap_amp_loader_next(amp_loader *loader, amp_batch *out);
amp_result __wrap_amp_loader_next(amp_loader *loader, amp_batch *out) {
    amp_loader_desc desc;
    amp_result result = __real_amp_loader_next(loader, out);
    int64_t row, sample;
    if (result != AMP_OK || amp_loader_query(loader, &desc) != AMP_OK || desc.epochs != 0) return result;
    for (row = 0; row < out->batch; row++) {
        sample = number_of_sample(out->inputs + row * out->seq);
        if (out->epoch >= MOST_EPOCHS || sample < 0 || sample >= SAMPLES) {
            __atomic_add_fetch(&shared->wrong_samples, 1, __ATOMIC_SEQ_CST);
            continue;
        }
        __atomic_add_fetch(&shared->seen[out->epoch][sample], 1, __ATOMIC_SEQ_CST);
        if (shared->reference) shared->batch_of[out->epoch][sample] = (int32_t)out->index + 1;
        else if (shared->batch_of[out->epoch][sample] != (int32_t)out->index + 1)
            __atomic_add_fetch(&shared->wrong_samples, 1, __ATOMIC_SEQ_CST);
    }
    shared->batches[own_rank]++;
    shared->last[own_rank] = out->epoch * (SAMPLES / GLOBAL_BATCH) + out->index + 1;
    return result;
}

/* ---- Runs of several ranks */

typedef struct group {
    int world, config, resume;
    char more[200];                 /* flags */
    pid_t pid[MOST_WORLD];
    int status[MOST_WORLD], ended[MOST_WORLD];
} group;

static void path_of(const char *name, char *out, size_t size) { snprintf(out, size, "%s/%s", folder, name); }

static void set_number(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* A port that nobody listens on now. */
static int32_t free_port(void) {
    const char *why = NULL;
    int fd = amp_tcp_listen("127.0.0.1", 0, &why);
    amp_tcp_place place;
    amp_tcp_end(fd, 0, &place);
    close(fd);
    return place.port;
}

static void rank_main(const group *g, int rank, int32_t port, int by_file) {
    char log[32], path[1100];
    words w = {0};
    own_rank = rank;
    set_number("RANK", rank);
    set_number("WORLD_SIZE", g->world);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", (int)port);
    text_split(&w, folder, common_flags);
    text_split(&w, folder, config_flags[g->config]);
    if (by_file) text_split(&w, folder, "--rank-file %/meeting");
    if (g->resume) text_split(&w, folder, "--resume %/model");
    text_split(&w, folder, g->more);
    snprintf(log, sizeof log, "log.%d", rank);
    path_of(log, path, sizeof path);
    unlink(path);
    output_into(path);
    _exit(train_gpt_main(w.n, w.word));
}

/* Every other group meets through a file. */
static void group_start(group *g) {
    static int n;
    int32_t port = free_port();
    int rank, by_file = n++ & 1;
    fflush(stdout);
    for (rank = 0; rank < g->world; rank++) {
        g->ended[rank] = 0;
        g->pid[rank] = fork();
        if (g->pid[rank] < 0) { perror("fork"); exit(2); }
        if (g->pid[rank] == 0) rank_main(g, rank, port, by_file);
    }
}

static void pause_ms(double ms) {
    struct timespec wait;
    wait.tv_sec = (time_t)(ms * 1e-3);
    wait.tv_nsec = (long)((ms * 1e-3 - (double)wait.tv_sec) * 1e9);
    nanosleep(&wait, NULL);
}

/* Waits until all ranks have ended but `without` (-1: none); 0: they hang, and are killed. */
static int group_wait(group *g, int without) {
    double began = ex_seconds();
    int rank, left = 1;
    while (left > 0 && ex_seconds() - began < HANG_MS * 1e-3) {
        for (rank = 0, left = 0; rank < g->world; rank++) {
            if (rank == without || g->ended[rank]) continue;
            if (waitpid(g->pid[rank], &g->status[rank], WNOHANG) == g->pid[rank]) g->ended[rank] = 1;
            else left++;
        }
        if (left > 0) pause_ms(1);
    }
    for (rank = 0; rank < g->world; rank++)
        if (!g->ended[rank] && rank != without) { kill(g->pid[rank], SIGKILL); waitpid(g->pid[rank], NULL, 0); }
    return left == 0;
}

static int exit_code(const group *g, int rank) {
    return WIFEXITED(g->status[rank]) ? WEXITSTATUS(g->status[rank]) : 1000 + WTERMSIG(g->status[rank]);
}

static void show_logs(const group *g) {
    char command[1300];
    int rank;
    fflush(stdout);
    for (rank = 0; rank < g->world; rank++) {
        snprintf(command, sizeof command, "echo 'rank %d, status %d:'; tail -n 3 '%s/log.%d'", rank, g->status[rank],
                 folder, rank);
        if (system(command) != 0) printf("no log\n");
    }
}

/* 1: the log of a rank has this text. */
static int log_says(int rank, const char *text) {
    char name[32], path[1100];
    void *data;
    size_t bytes, n = strlen(text), i;
    int found = 0;
    snprintf(name, sizeof name, "log.%d", rank);
    path_of(name, path, sizeof path);
    if (amp_file_read_all(NULL, path, &data, &bytes) != AMP_OK) return 0;
    for (i = 0; i + n <= bytes && !found; i++) found = memcmp((const char *)data + i, text, n) == 0;
    amp_file_free(NULL, data, bytes);
    return found;
}

static void folder_clear(void) {
    char command[1200];
    snprintf(command, sizeof command, "cd '%s' && rm -rf out meeting* model*", folder);
    if (system(command) != 0) { fprintf(stderr, "cannot clear %s\n", folder); exit(2); }
}

/* A new board, with the reference's notes. */
static void board_clear(int config) {
    memset(shared, 0, sizeof *shared);
    memcpy(shared->batch_of, references[config].batch_of, sizeof shared->batch_of);
    shared->kill_call = -1;
}

static void reference_run(int config) {
    group g = {WORLD, config, 0, "--batch 2", {0}, {0}, {0}};
    double began = ex_seconds();
    int rank;
    folder_clear();
    board_clear(config);
    shared->reference = 1;
    group_start(&g);
    CHECK(group_wait(&g, -1));
    reference_seconds[config] = ex_seconds() - began;
    for (rank = 0; rank < WORLD; rank++) CHECK_EQ(exit_code(&g, rank), 0);
    CHECK_EQ(shared->states_done, SAVES);
    CHECK_EQ(shared->wrong_samples, 0);
    if (ampt.failures > 0) show_logs(&g);
    references[config] = *shared;
}
TEST(uninterrupted_runs) {
    int config;
    for (config = 0; config < CONFIGS; config++) reference_run(config);
}

/* Number of the reference's checkpoint that is there; 0: none; -1: another file. */
static int64_t checkpoint(int config) {
    char path[1100];
    uint64_t hash;
    int64_t i;
    path_of("model.state", path, sizeof path);
    hash = hash_file(path);
    if (hash == 0) return access(path, F_OK) == 0 ? -1 : 0;
    for (i = 1; i <= SAVES; i++) if (references[config].state[i] == hash) return i;
    return -1;
}

static void check_end(const group *g) {
    char path[1100];
    int rank;
    for (rank = 0; rank < g->world; rank++) CHECK_EQ(exit_code(g, rank), 0);
    CHECK_EQ(checkpoint(g->config), SAVES);
    path_of("model.safetensors", path, sizeof path);
    CHECK(hash_file(path) == references[g->config].weights);
    CHECK_EQ(shared->wrong_samples, 0);
}

/* ---- Kills */

/* When, and which rank.  With at_call rank 0 at a call of its own. */
typedef struct blow { int rank, at_call; int64_t call; moment when; double delay; } blow;

static blow next_blow(int config, uint64_t *seed) {
    blow b;
    memset(&b, 0, sizeof b);
    b.rank = (int)random_below(seed, WORLD);
    b.at_call = b.rank == 0 && random_below(seed, 2) == 0;
    b.call = random_below(seed, references[config].calls);
    b.when = (moment)random_below(seed, MOMENTS);
    b.delay = 1000 * reference_seconds[config] * (double)random_bits(seed) / 4294967296.0;
    return b;
}

/* Kills, and waits for the victim's end; 0: it had ended before. */
static int strike(group *g, const blow *b) {
    int rank = b->rank;
    if (!b->at_call) {
        pause_ms(b->delay);
        kill(g->pid[rank], SIGKILL);
    }
    waitpid(g->pid[rank], &g->status[rank], 0);
    g->ended[rank] = 1;
    return WIFSIGNALED(g->status[rank]);
}

/* A survivor says who died, unless its own training was done; found: the checkpoint it began with. */
static void check_survivors(const group *g, int64_t found, int dead, double seconds) {
    int64_t batches = STEPS * (g->config == 1 ? 2 : 1);
    char text[32];
    int rank;
    snprintf(text, sizeof text, "rank %d ", dead);
    CHECK_MSG(seconds * 1000 < LIMIT_MS + 500, "the others ended %.2f s after rank %d", seconds, dead);
    if (seconds > counts.longest) counts.longest = seconds;
    for (rank = 0; rank < g->world; rank++) {
        if (rank == dead) continue;
        if (exit_code(g, rank) == 0 && (shared->last[rank] == batches || found == SAVES)) continue;
        CHECK_MSG(exit_code(g, rank) == 1 || exit_code(g, rank) == 2, "rank %d ended with %d", rank, exit_code(g, rank));
        CHECK_MSG(log_says(rank, "AMP0503") && log_says(rank, text), "rank %d does not name rank %d", rank, dead);
    }
}

/* was: the checkpoint that the run began with.  Returns the one that is there now. */
static int64_t check_checkpoint(int config, int64_t was) {
    int64_t now = checkpoint(config), begun = was + shared->states_begun, done = was + shared->states_done;
    CHECK_MSG(now == begun || now == done, "the checkpoint is number %lld: %lld were begun, %lld done", (long long)now,
              (long long)begun, (long long)done);
    counts.from_start += now == 0;
    counts.last += now > 0 && now == was + shared->states_opened;
    counts.before += now > 0 && now < was + shared->states_opened;
    CHECK_EQ(shared->wrong_samples, 0);
    return now;
}

static group next_group(int config, int64_t found) {
    group g;
    memset(&g, 0, sizeof g);
    g.world = WORLD;
    g.config = config;
    g.resume = found > 0;
    if (!g.resume) snprintf(g.more, sizeof g.more, "--batch 2");
    board_clear(config);
    counts.resumed += g.resume;
    return g;
}

/* A run from the start of which one to three ranks are killed, each time resumed, until it ends. */
static void chain(int64_t k, uint64_t *seed) {
    int config = (int)(k % CONFIGS), killed = 0, most = 1 + (int)random_below(seed, 3);
    int64_t found = 0;
    double died;
    group g;
    folder_clear();
    counts.chains++;
    while (killed < most && counts.kills < flags.kills && ampt.failures == 0) {
        blow b = next_blow(config, seed);
        g = next_group(config, found);
        if (b.at_call) shared->kill_call = b.call;
        shared->kill_moment = (int32_t)b.when;
        group_start(&g);
        if (!strike(&g, &b)) {
            CHECK(group_wait(&g, -1));
            counts.finished_first++;
            check_end(&g);
            break;
        }
        died = ex_seconds();
        CHECK_MSG(group_wait(&g, b.rank), "ranks hang after the death of rank %d", b.rank);
        check_survivors(&g, found, b.rank, ex_seconds() - died);
        found = check_checkpoint(config, found);
        killed++;
        counts.kills++;
        counts.by_rank[b.rank]++;
        *(b.at_call ? &counts.at_calls : &counts.at_random) += 1;
    }
    if (ampt.failures == 0 && checkpoint(config) < SAVES) {
        g = next_group(config, found);
        group_start(&g);
        CHECK(group_wait(&g, -1));
        check_end(&g);
    }
    if (ampt.failures > 0) { printf("chain %lld, kill %lld\n", (long long)k, (long long)counts.kills); show_logs(&g); }
}

TEST(killed_ranks_go_on) {
    uint64_t seed = (uint64_t)flags.seed;
    int64_t k;
    for (k = 0; counts.kills < flags.kills && ampt.failures == 0 && k < 100 * flags.kills; k++) chain(k, &seed);
    CHECK_EQ(counts.kills, flags.kills);
    CHECK(counts.resumed > 0 && counts.last > 0 && (counts.before > 0 || flags.kills < 50));
}

/* ---- A rank that hangs, and one that is asked to stop */

/* Waits until a rank has read some batches. */
static void wait_for_batches(const group *g, int rank, int64_t n) {
    double began = ex_seconds();
    while (__atomic_load_n(&shared->batches[rank], __ATOMIC_SEQ_CST) < n && ex_seconds() - began < HANG_MS * 1e-3)
        pause_ms(1);
    CHECK_MSG(shared->batches[rank] >= n, "rank %d of %d reads nothing", rank, g->world);
}

TEST(a_rank_hangs) {
    double stopped;
    int rank;
    for (rank = 0; rank < WORLD; rank += 3) {
        group g = next_group(0, 0);
        folder_clear();
        group_start(&g);
        wait_for_batches(&g, rank, 2 + rank);
        kill(g.pid[rank], SIGSTOP);
        stopped = ex_seconds();
        CHECK(group_wait(&g, rank));
        check_survivors(&g, 0, rank, ex_seconds() - stopped);
        kill(g.pid[rank], SIGKILL);
        waitpid(g.pid[rank], NULL, 0);
        if (ampt.failures > 0) show_logs(&g);
    }
}

/* All stop after the same step, with the code to be started again; that run is the uninterrupted one. */
TEST(a_signal_stops_all) {
    static const int signals[] = {SIGTERM, SIGUSR1, SIGINT};
    int i, rank;
    for (i = 0; i < 3; i++) {
        group g = next_group(i, 0);
        folder_clear();
        group_start(&g);
        wait_for_batches(&g, 3 - i, 3 + i);
        kill(g.pid[3 - i], signals[i]);
        if (i < 2) kill(g.pid[3 - i], signals[i]);      /* clusters send it more than once */
        CHECK(group_wait(&g, -1));
        for (rank = 0; rank < WORLD; rank++) {
            CHECK_EQ(exit_code(&g, rank), i < 2 ? ranks_again : 130);
            CHECK_EQ(shared->batches[rank], shared->batches[0]);
        }
        CHECK(shared->batches[0] > 0 && shared->batches[0] < STEPS);
        CHECK(log_says(0, "stopped at step"));
        if (ampt.failures > 0) show_logs(&g);
        g = next_group(i, 1);
        group_start(&g);
        CHECK(group_wait(&g, -1));
        check_end(&g);
        if (ampt.failures > 0) show_logs(&g);
    }
}

/* ---- Fewer and more ranks */

/* Goes on with so many ranks. */
static group go_on(int world, int resume, const char *more) {
    group g;
    memset(&g, 0, sizeof g);
    g.world = world;
    g.resume = resume;
    snprintf(g.more, sizeof g.more, "%s", more);
    group_start(&g);
    CHECK(group_wait(&g, -1));
    return g;
}
static void expect_all(const group *g, int code, const char *text) {
    int rank;
    for (rank = 0; rank < g->world; rank++) {
        CHECK_EQ(exit_code(g, rank), code);
        if (text != NULL) CHECK_MSG(log_says(rank, text), "rank %d does not say \"%s\"", rank, text);
    }
    if (ampt.failures > 0) show_logs(g);
}

/* The same batches of 8 samples, whatever the number of ranks; three epochs, in each of which every sample is read
   once.  Another global batch is refused, unless it is asked for. */
TEST(fewer_and_more_ranks) {
    group g;
    int epoch, sample;
    if (references[0].weights == 0) reference_run(0);       /* whose batches are compared with */
    folder_clear();
    board_clear(0);
    g = go_on(4, 0, "--batch 2 --stop-after 5");
    expect_all(&g, 0, NULL);
    g = go_on(2, 1, "--stop-after 6");
    expect_all(&g, 0, NULL);
    g = go_on(3, 1, "");
    expect_all(&g, 2, "the micro-batch of all ranks in the checkpoint has 8 samples, which 3 ranks cannot share equally");
    g = go_on(1, 1, "--stop-after 4");
    expect_all(&g, 0, NULL);
    g = go_on(2, 1, "--batch 2");
    expect_all(&g, 2, "2 x 1 x 2 ranks are 4 samples per step, and the checkpoint was trained with 8");
    g = go_on(2, 1, "--accumulation 2");
    expect_all(&g, 2, "4 x 2 x 2 ranks are 16 samples per step, and the checkpoint was trained with 8");
    g = go_on(8, 1, "");
    expect_all(&g, 0, NULL);
    CHECK_EQ(shared->wrong_samples, 0);
    for (epoch = 0; epoch < 3; epoch++)
        for (sample = 0; sample < SAMPLES; sample++)
            CHECK_MSG(shared->seen[epoch][sample] == 1, "epoch %d, sample %d was read %d times", epoch, sample,
                      (int)shared->seen[epoch][sample]);
    CHECK(log_says(0, "step 24: validation loss"));
}

/* Asked for, another global batch goes on where the old one stopped: each sample of the epoch is still read once. */
TEST(another_global_batch) {
    group g;
    int sample;
    folder_clear();
    board_clear(0);
    g = go_on(4, 0, "--batch 2 --stop-after 4");
    expect_all(&g, 0, NULL);
    g = go_on(2, 1, "--batch 2 --change-batch --steps 12");         /* 32 samples in 4 steps of 8, 32 in 8 of 4 */
    expect_all(&g, 0, NULL);
    for (sample = 0; sample < SAMPLES; sample++)
        CHECK_MSG(shared->seen[0][sample] == 1, "sample %d was read %d times", sample, (int)shared->seen[0][sample]);
    folder_clear();
    board_clear(0);
    g = go_on(4, 0, "--batch 2 --stop-after 3");
    g = go_on(1, 1, "--batch 16 --change-batch --stop-after 1");    /* 24 samples: one and a half of the new batches */
    expect_all(&g, 2, "24 sequences of the epoch were read, which is not a whole number of batches of 16");
}

/* ---- */

static void write_record(double seconds) {
    FILE *f = fopen(flags.record, "w");
    char command[100];
    if (f == NULL) { perror(flags.record); return; }
    snprintf(command, sizeof command, "make crash-ranks KILLS=%lld SEED=%lld", (long long)flags.kills, (long long)flags.seed);
    record_head(f, "crash_ranks", command);
    fprintf(f, " \"ranks\": %d, \"limit_seconds\": %.1f, \"kills\": %lld, \"chains_of_runs\": %lld,\n", WORLD,
            LIMIT_MS * 1e-3, (long long)counts.kills, (long long)counts.chains);
    fprintf(f, " \"kills_of_rank\": [%lld, %lld, %lld, %lld], \"at_random_times\": %lld, \"at_calls_of_a_checkpoint\": %lld,\n",
            (long long)counts.by_rank[0], (long long)counts.by_rank[1], (long long)counts.by_rank[2],
            (long long)counts.by_rank[3], (long long)counts.at_random, (long long)counts.at_calls);
    fprintf(f, " \"longest_seconds_to_the_last_end\": %.3f, \"hangs\": 0,\n", counts.longest);
    fprintf(f, " \"checkpoint_found\": {\"last\": %lld, \"the_one_before_that_was_being_written\": %lld, \"none_yet\": %lld, \"damaged\": 0},\n",
            (long long)counts.last, (long long)counts.before, (long long)counts.from_start);
    fprintf(f, " \"resumed\": %lld, \"ended_before_the_kill\": %lld, \"configurations\": %d, \"steps\": %d, \"seconds\": %.0f, \"failed\": %d}\n",
            (long long)counts.resumed, (long long)counts.finished_first, CONFIGS, STEPS, seconds, ampt.failed);
    fclose(f);
}

static void read_flags(int argc, char **argv) {
    int i;
    for (i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--kills") == 0) flags.kills = atoll(argv[i + 1]);
        if (strcmp(argv[i], "--seed") == 0) flags.seed = atoll(argv[i + 1]);
        if (strcmp(argv[i], "--record") == 0) flags.record = argv[i + 1];
    }
}

/* Samples of 16 bytes: a number and a word; a tenth more is for validation. */
static void write_text(void) {
    static const char *const parts[] = {"the cat ", "sat on a", " mat and", " ran in ", "the fog."};
    char path[1100];
    uint64_t seed = 7;
    FILE *f;
    int i;
    path_of("text", path, sizeof path);
    f = fopen(path, "w");
    if (f == NULL) { perror(path); exit(2); }
    for (i = 0; i < SAMPLES + 8; i++) fprintf(f, "%08d%s", i, parts[random_below(&seed, 5)]);
    fclose(f);
}

int main(int argc, char **argv) {
    const char *tmp = getenv("TMPDIR");
    double began = ex_seconds();
    char command[1200];
    int failed;
    TEST_BEGIN(argc, argv);
    read_flags(argc, argv);
    snprintf(folder, sizeof folder, "%.900s/amp_ranks_XXXXXX", tmp ? tmp : "/tmp");
    if (mkdtemp(folder) == NULL) { perror(folder); return 2; }
    write_text();
    shared = (board_of_run *)shared_memory(sizeof *shared);
    RUN(uninterrupted_runs);
    RUN(killed_ranks_go_on);
    RUN(a_rank_hangs);
    RUN(a_signal_stops_all);
    RUN(fewer_and_more_ranks);
    RUN(another_global_batch);
    printf("%lld kills (%lld at random times), %lld runs resumed, the last survivor ended after %.3f s at most, %.0f s\n",
           (long long)counts.kills, (long long)counts.at_random, (long long)counts.resumed, counts.longest,
           ex_seconds() - began);
    if (flags.record != NULL) write_record(ex_seconds() - began);
    failed = TEST_END();
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) != 0 || failed;
}
