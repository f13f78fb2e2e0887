/* crash.c - kills the example trainer during training and while it writes checkpoints, and checks that the run resumes
 * correctly.
 *
 *     build/crash [--kills 10] [--seed 1] [--record FILE]
 *
 * Each run of the example trainer is a separate process, and is ended by SIGKILL.  This happens at a call of the file
 * layer (before it, after it, or with half of a write done; all such moments of a checkpoint in turn), or at a random time.
 * At every moment, the following must hold:
 *
 *   - NAME.state loads and is, byte for byte, a checkpoint of the uninterrupted run: the last one that was begun or the one
 *     before.  The same holds for NAME.safetensors, which is written after it.
 *   - The run is resumed with other numbers of threads and workers, killed again and resumed again.  It ends with the
 *     uninterrupted run's checkpoint, weights, scaler and loader included, byte for byte.  It has read the same batches,
 *     and has the same line of metrics for every step.
 *   - The temporary files of a killed save are removed. */
#include "trainer.h"

enum { CONFIGS = 3, STEPS = 24, SAVE_EVERY = 3, SAVES = STEPS / SAVE_EVERY, MOST_CALLS = 4096, MOST_BATCHES = 256 };

static const char common_flags[] =
    "train_gpt --data %/text --out %/out --save %/model --steps 24 --save-interval 3 --layers 1 --heads 2 --channels 16 "
    "--seq 16 --batch 2 --log-interval 1 --eval-interval 9 --eval-batches 1 --sample 0 --dropout 0.1";

/* fp16 with a scale that overflows, shrinks and grows; weights of 16 bits with random rounding; recomputing. */
static const char *const config_flags[CONFIGS] = {
    "--precision fp16 --init-scale 67108864 --growth-interval 4 --accumulation 2",
    "--precision bf16 --level O2 --masters stochastic --moments bf16",
    "--precision fp16 --level O2 --init-scale 16777216 --growth-interval 5 --recompute",
};

typedef enum moment { BEFORE_CALL, HALF_WRITE, AFTER_CALL, MOMENTS } moment;
typedef enum call_kind { OPEN, WRITE, SYNC, RENAME, CALL_KINDS } call_kind;
static const char *const moment_names[MOMENTS] = {"before", "half", "after"};
static const char *const kind_names[CALL_KINDS] = {"open", "write", "fsync", "rename"};

typedef struct call_note { call_kind kind; int32_t opened; } call_note;     /* opened: checkpoints begun, with this call */

/* open, write, fsync, rename of three files: NAME.state, NAME.safetensors, config.json. */
enum { CALLS_OF_CHECKPOINT = 12, MOMENTS_OF_CHECKPOINT = 2 * CALLS_OF_CHECKPOINT + 3 };

/* Shared with the runs. */
typedef struct board_of_run {
    int64_t calls, kill_call;       /* kill_call -1: none */
    call_kind killed_in;
    int32_t kill_moment, reference; /* reference 1: the notes are taken, else they are compared with */
    int64_t states_begun, states_done, weights_begun, weights_done;     /* renames */
    int64_t states_opened;          /* temporary files of checkpoints */
    int64_t wrong_batches, batches_read;
    call_note notes[MOST_CALLS];
    uint64_t batch[MOST_BATCHES];   /* of training, by number */
    uint64_t state[SAVES + 1], weights[SAVES + 1];      /* of the reference's files, by number from 1 */
} board_of_run;

static board_of_run *shared;
static board_of_run references[CONFIGS];
static char folder[1000], text_path[1100];

static struct {
    int64_t kills, seed;
    const char *record;
} flags = {10, 1, NULL};

static struct {
    int64_t kills, at_calls[CALL_KINDS][MOMENTS], at_random, resumed, from_start, last, before, litter;
    int64_t finished_first, chains;
} counts;

/* ---- In the process that is killed */

static int about_to(call_kind kind, int opens_state) {
    int64_t n = shared->calls++;
    shared->states_opened += opens_state;
    if (shared->reference && n < MOST_CALLS) {
        shared->notes[n].kind = kind;
        shared->notes[n].opened = (int32_t)shared->states_opened;
    }
    if (n == shared->kill_call) shared->killed_in = kind;
    if (n == shared->kill_call && shared->kill_moment == BEFORE_CALL) kill(getpid(), SIGKILL);
    return n == shared->kill_call;
}
static void done_with(int chosen) {
    if (chosen && shared->kill_moment == AFTER_CALL) kill(getpid(), SIGKILL);
}

int __wrap_open(const char *path, int how, ...);
int __wrap_open(const char *path, int how, ...) {
    int chosen, file;
    if ((how & (O_WRONLY | O_RDWR)) == 0) return __real_open(path, how);
    chosen = about_to(OPEN, is_checkpoint(path, ".state.tmp"));
    file = __real_open(path, how, 0666);
    done_with(chosen);
    return file;
}

ssize_t __wrap_pwrite(int file, const void *data, size_t bytes, off_t offset);
ssize_t __wrap_pwrite(int file, const void *data, size_t bytes, off_t offset) {
    int chosen = about_to(WRITE, 0);
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
    int chosen = about_to(SYNC, 0), result = __real_fsync(file);
    done_with(chosen);
    return result;
}

int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) {
    int chosen = about_to(RENAME, 0), result, is_state = is_checkpoint(to, ".state"), is_weights = ends_with(to, ".safetensors");
    uint64_t hash = shared->reference ? hash_file(from) : 0;
    shared->states_begun += is_state;
    shared->weights_begun += is_weights;
    result = __real_rename(from, to);
    shared->states_done += is_state;
    shared->weights_done += is_weights;
    if (shared->reference && is_state && shared->states_done <= SAVES) shared->state[shared->states_done] = hash;
    if (shared->reference && is_weights && shared->weights_done <= SAVES) shared->weights[shared->weights_done] = hash;
    done_with(chosen);
    return result;
}

/* The training loader is the one without an end. */
amp_result __wrap_amp_loader_next(amp_loader *loader, amp_batch *out);
amp_result __wrap_amp_loader_next(amp_loader *loader, amp_batch *out) {
    amp_loader_desc desc;
    amp_loader_info info;
    amp_result result = __real_amp_loader_next(loader, out);
    int64_t n;
    uint64_t hash;
    if (result != AMP_OK || amp_loader_query(loader, &desc) != AMP_OK || desc.epochs != 0) return result;
    if (amp_loader_info_get(loader, &info) != AMP_OK) return result;
    n = out->epoch * info.batches + out->index;
    hash = hash_bytes(0, out->inputs, (size_t)(out->batch * out->seq) * sizeof *out->inputs);
    hash = hash_bytes(hash, out->targets, (size_t)(out->batch * out->seq) * sizeof *out->targets);
    shared->batches_read++;
    if (n >= MOST_BATCHES) shared->wrong_batches++;
    else if (shared->reference) shared->batch[n] = hash;
    else if (shared->batch[n] != hash) shared->wrong_batches++;
    return result;
}

/* ---- In the process that kills */

/* Starts a run; resume 1: from its checkpoint.  threads, workers 0 to keep the defaults. */
static pid_t run_start(int config, int resume, int64_t threads, int64_t workers) {
    char more[100];
    words w = {0};
    pid_t pid;
    fflush(stdout);
    pid = fork();
    if (pid < 0) { perror("fork"); exit(2); }
    if (pid > 0) return pid;
    snprintf(more, sizeof more, "--threads %lld --workers %lld", (long long)threads, (long long)workers);
    text_split(&w, folder, common_flags);
    text_split(&w, folder, config_flags[config]);
    text_split(&w, folder, more);
    if (resume) text_split(&w, folder, "--resume %/model");
    snprintf(more, sizeof more, "%.80s/log", folder);
    output_into(more);
    _exit(train_gpt_main(w.n, w.word));
}

static void path_of(const char *name, char *out, size_t size) { snprintf(out, size, "%s/%s", folder, name); }

/* Removes what is in the folder, but for the text. */
static void folder_clear(void) {
    char command[1200];
    snprintf(command, sizeof command, "cd '%s' && rm -rf out log model*", folder);
    if (system(command) != 0) { fprintf(stderr, "cannot clear %s\n", folder); exit(2); }
}

/* Files of a save that was cut short. */
static int64_t litter(void) {
    char pattern[1100];
    glob_t found;
    int64_t n = 0;
    path_of("model*.tmp*", pattern, sizeof pattern);
    if (glob(pattern, 0, NULL, &found) == 0) n = (int64_t)found.gl_pathc;
    globfree(&found);
    return n;
}

static void show_log(void) {
    char command[1200];
    snprintf(command, sizeof command, "tail -n 4 '%s/log'", folder);
    fflush(stdout);
    if (system(command) != 0) printf("no log\n");
}

/* The uninterrupted run, whose checkpoints, batches and metrics are what all others are compared with. */
static char *reference_metrics[CONFIGS];
static double reference_seconds[CONFIGS];

static char *read_text(const char *path) {
    void *data;
    size_t bytes;
    char *text;
    if (amp_file_read_all(NULL, path, &data, &bytes) != AMP_OK) return NULL;
    text = (char *)calloc(bytes + 1, 1);
    if (text != NULL) memcpy(text, data, bytes);
    amp_file_free(NULL, data, bytes);
    return text;
}

static void reference_run(int config) {
    char path[1100];
    double began = ex_seconds();
    int status;
    folder_clear();
    memset(shared, 0, sizeof *shared);
    shared->reference = 1;
    shared->kill_call = -1;
    waitpid(run_start(config, 0, 2, 2), &status, 0);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the uninterrupted run ended with status %d", status);
    if (ampt.failures > 0) show_log();
    reference_seconds[config] = ex_seconds() - began;
    CHECK_EQ(shared->states_done, SAVES);
    CHECK_EQ(shared->weights_done, SAVES);
    CHECK_EQ(shared->states_opened, SAVES);
    references[config] = *shared;
    path_of("out/metrics.jsonl", path, sizeof path);
    reference_metrics[config] = read_text(path);
    CHECK(reference_metrics[config] != NULL);
}

/* Number of the reference's file with these bytes, 0 for no file, -1 for none of them. */
static int64_t number_of(const char *name, const uint64_t *hashes) {
    char path[1100];
    uint64_t hash;
    int64_t i;
    path_of(name, path, sizeof path);
    hash = hash_file(path);
    if (hash == 0) return access(path, F_OK) == 0 ? -1 : 0;
    for (i = 1; i <= SAVES; i++) if (hashes[i] == hash) return i;
    return -1;
}

/* The same file, opened as a program would. */
static void check_it_loads(int64_t number) {
    char path[1100];
    amp_state *state = NULL;
    int64_t step = -1;
    path_of("model.state", path, sizeof path);
    CHECK_OK(amp_state_load(&state, NULL, path));
    if (state == NULL) return;
    CHECK_OK(amp_state_get(state, "train.step", AMP_I64, &step, 1));
    CHECK_EQ(step, number * SAVE_EVERY);
    amp_state_destroy(state);
}

/* Numbers of the files that are there; 0: none. */
typedef struct files_found { int64_t state, weights; } files_found;

/* was: what the killed process had begun with.  Returns what is there now. */
static files_found check_files(int config, files_found was) {
    const board_of_run *ref = &references[config];
    int64_t begun = was.state + shared->states_begun, done = was.state + shared->states_done;
    int64_t weights_begun = shared->weights_begun > 0 ? was.state + shared->weights_begun : was.weights;
    int64_t weights_done = shared->weights_done > 0 ? was.state + shared->weights_done : was.weights;
    files_found now;
    now.state = number_of("model.state", ref->state);
    now.weights = number_of("model.safetensors", ref->weights);
    CHECK_MSG(now.state == done || now.state == begun, "the checkpoint is number %lld: %lld were begun, %lld done",
              (long long)now.state, (long long)begun, (long long)done);
    CHECK_MSG(now.weights == weights_done || now.weights == weights_begun, "the weights are of checkpoint %lld: %lld were begun, %lld done",
              (long long)now.weights, (long long)weights_begun, (long long)weights_done);
    if (now.state > 0) check_it_loads(now.state);
    counts.from_start += now.state == 0;
    counts.last += now.state > 0 && now.state == was.state + shared->states_opened;
    counts.before += now.state > 0 && now.state < was.state + shared->states_opened;
    counts.litter += litter();
    CHECK_EQ(shared->wrong_batches, 0);
    return now;
}

/* The value of a key in a line of metrics, as text up to the comma or brace. */
static int value_of(const char *line, const char *key, char *out, size_t size) {
    char quoted[64];
    const char *at, *end = strchr(line, '\n');
    size_t n;
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    at = strstr(line, quoted);
    *out = 0;
    if (at == NULL || (end != NULL && at > end)) return 0;
    at += strlen(quoted);
    n = strcspn(at, ",}\n");
    snprintf(out, size, "%.*s", (int)n, at);
    return 1;
}

/* The first whole line of step n at or behind `from`, or NULL.  One that was cut by a kill ends without its brace. */
static const char *line_of_step(const char *from, int64_t n) {
    char value[32];
    const char *end;
    for (; from != NULL && (end = strchr(from, '\n')) != NULL; from = end + 1)
        if (end > from && end[-1] == '}' && strncmp(from, "{\"event\": \"step\"", 16) == 0 &&
            value_of(from, "step", value, sizeof value) && atoll(value) == n) return from;
    return NULL;
}

/* Every step has a line, and however often it was trained, each of its lines says what the uninterrupted run's says. */
static void check_metrics(int config) {
    static const char *const keys[] = {"epoch", "loss", "norm", "scale", "tracker", "skipped", "skips", "lr", "dtype"};
    char path[1100], *mine, a[64], b[64];
    int64_t step;
    size_t k;
    path_of("out/metrics.jsonl", path, sizeof path);
    mine = read_text(path);
    CHECK(mine != NULL);
    for (step = 1; step <= STEPS && mine != NULL; step++) {
        const char *theirs = line_of_step(reference_metrics[config], step), *line = line_of_step(mine, step);
        CHECK_MSG(theirs != NULL && line != NULL, "step %lld has no line", (long long)step);
        for (; theirs != NULL && line != NULL; line = line_of_step(line + 1, step))
            for (k = 0; k < sizeof keys / sizeof *keys; k++) {
                int there = value_of(theirs, keys[k], a, sizeof a);
                CHECK_MSG(value_of(line, keys[k], b, sizeof b) == there && strcmp(a, b) == 0, "step %lld: %s is %s, not %s",
                          (long long)step, keys[k], b, a);
            }
    }
    free(mine);
}

/* The end of a chain of runs. */
static void check_end(int config, int status) {
    const board_of_run *ref = &references[config];
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the last run ended with status %d", status);
    CHECK_EQ(number_of("model.state", ref->state), SAVES);
    CHECK_EQ(number_of("model.safetensors", ref->weights), SAVES);
    CHECK_EQ(shared->wrong_batches, 0);
    CHECK_MSG(litter() == 0, "%lld files of killed saves are left", (long long)litter());
    check_metrics(config);
}

/* When the run is to be killed. */
typedef struct blow { int at_call; int64_t call; moment when; double delay; } blow;

/* Waits a random time, and kills; a run that ended before is not killed.  Returns its status. */
static int strike(pid_t pid, const blow *b) {
    struct timespec wait;
    int status;
    if (!b->at_call) {
        wait.tv_sec = (time_t)b->delay;
        wait.tv_nsec = (long)((b->delay - (double)wait.tv_sec) * 1e9);
        nanosleep(&wait, NULL);
        kill(pid, SIGKILL);
    }
    waitpid(pid, &status, 0);
    return status;
}

/* Moment k of the second checkpoint: its calls from the opening of NAME.state's temporary file to the last rename, before
   and after each, and in the middle of writes.  Neighbours in k are apart in the checkpoint. */
static blow targeted(int config, int64_t k) {
    const board_of_run *ref = &references[config];
    int64_t first = 0, place = (2 + 4 * (k + k / MOMENTS_OF_CHECKPOINT)) % MOMENTS_OF_CHECKPOINT, i, m;
    blow b;
    memset(&b, 0, sizeof b);
    b.at_call = 1;
    while (first < ref->calls && ref->notes[first].opened < 2) first++;
    for (i = first; i < first + CALLS_OF_CHECKPOINT; i++)
        for (m = 0; m < MOMENTS; m++) {
            if (m == HALF_WRITE && ref->notes[i].kind != WRITE) continue;
            if (place-- != 0) continue;
            b.call = i;
            b.when = (moment)m;
        }
    return b;
}

/* The blows of a chain: the first of every other chain is targeted, all others are random. */
static blow next_blow(int config, int64_t k, int first, uint64_t *seed) {
    blow b;
    memset(&b, 0, sizeof b);
    if (first && k % 2 == 0) return targeted(config, k / 2);
    if (random_below(seed, 4) == 0) {
        b.at_call = 1;
        b.call = random_below(seed, references[config].calls);
        b.when = (moment)random_below(seed, MOMENTS);
    } else b.delay = reference_seconds[config] * (double)random_bits(seed) / 4294967296.0;
    return b;
}

static void count_kill(const blow *b) {
    counts.kills++;
    if (b->at_call) counts.at_calls[shared->killed_in][b->when]++;
    else counts.at_random++;
}

/* A run from the start that is killed one to three times, each time resumed otherwise, until it ends. */
static void chain(int64_t k, uint64_t *seed) {
    int config = (int)(k / 2 % CONFIGS), killed = 0, most = 1 + (int)random_below(seed, 3), status;
    files_found found = {0, 0};
    folder_clear();
    counts.chains++;
    for (;;) {
        const board_of_run *ref = &references[config];
        blow b = next_blow(config, k, killed == 0, seed);
        int64_t threads = 1 + random_below(seed, 3), workers = random_below(seed, 4);
        memset(shared, 0, sizeof *shared);
        memcpy(shared->batch, ref->batch, sizeof shared->batch);
        shared->kill_call = killed < most && b.at_call ? b.call : -1;
        shared->kill_moment = (int32_t)b.when;
        b.delay = killed < most ? b.delay : 0;
        if (killed == most || counts.kills == flags.kills) break;
        counts.resumed += found.state > 0;
        status = strike(run_start(config, found.state > 0, threads, workers), &b);
        if (!WIFSIGNALED(status)) { counts.finished_first++; check_end(config, status); return; }
        killed++;
        count_kill(&b);
        found = check_files(config, found);
        if (ampt.failures > 0) { printf("chain %lld, kill %d at %s\n", (long long)k, killed, b.at_call ? "a call" : "a time"); show_log(); return; }
    }
    shared->kill_call = -1;
    counts.resumed += found.state > 0;
    waitpid(run_start(config, found.state > 0, 1 + random_below(seed, 3), random_below(seed, 4)), &status, 0);
    check_end(config, status);
    if (ampt.failures > 0) show_log();
}

TEST(uninterrupted_runs) {
    int config;
    for (config = 0; config < CONFIGS; config++) reference_run(config);
}

TEST(killed_runs_go_on) {
    uint64_t seed = (uint64_t)flags.seed;
    int64_t k;
    for (k = 0; counts.kills < flags.kills && ampt.failures == 0 && k < 100 * flags.kills; k++) chain(k, &seed);
    CHECK_EQ(counts.kills, flags.kills);
    CHECK(counts.resumed > 0 && counts.last > 0 && counts.before > 0);
}

static void write_record(double seconds) {
    FILE *f = fopen(flags.record, "w");
    int kind, m, bit = 0;
    if (f == NULL) { perror(flags.record); return; }
    record_head(f, "crash", "make crash");
    fprintf(f, " \"seed\": %lld, \"kills\": %lld, \"chains_of_runs\": %lld, \"at_random_times\": %lld,\n \"at_calls\": {",
            (long long)flags.seed, (long long)counts.kills, (long long)counts.chains, (long long)counts.at_random);
    for (kind = 0; kind < CALL_KINDS; kind++)
        for (m = 0; m < MOMENTS; m++)
            if (counts.at_calls[kind][m] > 0)
                fprintf(f, "%s\"%s %s\": %lld", bit++ ? ", " : "", moment_names[m], kind_names[kind], (long long)counts.at_calls[kind][m]);
    fprintf(f, "},\n \"checkpoint_found\": {\"last\": %lld, \"the_one_before_that_was_being_written\": %lld, \"none_yet\": %lld, \"damaged\": 0},\n",
            (long long)counts.last, (long long)counts.before, (long long)counts.from_start);
    fprintf(f, " \"resumed\": %lld, \"files_left_by_killed_saves\": %lld, \"left_at_the_end\": 0, \"ended_before_the_kill\": %lld,\n",
            (long long)counts.resumed, (long long)counts.litter, (long long)counts.finished_first);
    fprintf(f, " \"configurations\": %d, \"steps\": %d, \"seconds\": %.0f, \"failed\": %d}\n", CONFIGS, STEPS, seconds, ampt.failed);
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

/* A text that a model can learn something from. */
static void write_text(void) {
    static const char *const parts[] = {"the ", "cat ", "sat ", "on ", "a ", "mat. ", "dog ", "ran ", "in ", "fog. "};
    FILE *f = fopen(text_path, "w");
    uint64_t seed = 7;
    int i;
    if (f == NULL) { perror(text_path); exit(2); }
    for (i = 0; i < 1000; i++) fputs(parts[random_below(&seed, 10)], f);
    fclose(f);
}

int main(int argc, char **argv) {
    const char *tmp = getenv("TMPDIR");
    double began = ex_seconds();
    char command[1200];
    int failed;
    TEST_BEGIN(argc, argv);
    read_flags(argc, argv);
    snprintf(folder, sizeof folder, "%.900s/amp_crash_XXXXXX", tmp ? tmp : "/tmp");
    if (mkdtemp(folder) == NULL) { perror(folder); return 2; }
    path_of("text", text_path, sizeof text_path);
    write_text();
    shared = (board_of_run *)shared_memory(sizeof *shared);
    RUN(uninterrupted_runs);
    RUN(killed_runs_go_on);
    printf("%lld kills (%lld at random times), %lld runs resumed, %.0f s\n", (long long)counts.kills, (long long)counts.at_random,
           (long long)counts.resumed, ex_seconds() - began);
    if (flags.record != NULL) write_record(ex_seconds() - began);
    failed = TEST_END();
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) != 0 || failed;
}
