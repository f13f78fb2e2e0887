/* training_checkpoint.h - what every trainer's checkpoint keeps, and how a resumed run takes it over.
 *
 * NAME.state alone is the checkpoint: it also holds the weights and is replaced in one rename, so it is always whole.
 * NAME.safetensors, which programs write after it, has the same weights for other programs. */
#ifndef EXAMPLE_TRAINING_CHECKPOINT_H
#define EXAMPLE_TRAINING_CHECKPOINT_H

#include "model_files.h"
#include "training_flags.h"

/* A resumed run has the checkpoint's global batch, whatever the number of ranks: each takes its share.  *batch: a
   rank's micro-batch. */
static inline amp_result rank_flags_batch(const rank_settings *set, const amp_state *state, int64_t accumulation,
                                          int64_t *batch) {
    int64_t was[3], all, before, now;       /* train.batch: a rank's micro-batch, accumulation, ranks */
    if (amp_state_count(state, "train.batch", NULL) < 0) return AMP_OK;         /* of version 0.1.0 */
    EX_TRY(amp_state_get(state, "train.batch", AMP_I64, was, 3));
    all = was[0] * was[2];
    if (!flag_was_given("batch")) {
        if (all % ranks.world != 0)
            return flag_refuse("resume", "the micro-batch of all ranks in the checkpoint has %lld samples, which %d "
                               "ranks cannot share equally: start another number of ranks, or give --batch and "
                               "--change-batch",
                               (long long)all, (int)ranks.world);
        *batch = all / ranks.world;
    }
    before = all * was[1];
    now = *batch * accumulation * ranks.world;
    if (before == now || set->change_batch) return AMP_OK;
    return flag_refuse(flag_was_given("batch") ? "batch" : "accumulation", "%lld x %lld x %d ranks are %lld samples "
                       "per step, and the checkpoint was trained with %lld: drop the flag, or give --change-batch",
                       (long long)*batch, (long long)accumulation, (int)ranks.world, (long long)now,
                       (long long)before);
}

/* ---- Settings */

/* The settings of a checkpoint are a file of settings. */
static inline amp_result settings_of_state(amp_settings *amp, const amp_state *state) {
    int64_t n = amp_state_count(state, "train.settings", NULL);
    char *text = n > 0 ? (char *)malloc((size_t)n) : NULL;
    amp_result result;
    if (n <= 0) return AMP_OK;
    if (text == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the checkpoint's settings");
    result = amp_state_get(state, "train.settings", AMP_U8, text, n);
    if (result == AMP_OK) result = amp_settings_read_text(amp, "the checkpoint", text, (size_t)n);
    free(text);
    amp->debug = amp->threads = 0;  /* per session, like the loader's settings */
    amp->workers = amp->prefetch = amp->disable_pinned = 0;
    return result;
}

/* Completes set->amp, which has defaults and flags: the checkpoint (NULL: none), --config, --env, then the flags
   again.  all: the program's settings. */
static inline amp_result settings_read(void *all, training_settings *set, const amp_state *resumed) {
    amp_settings *amp = &set->amp;
    int i;
    if (resumed != NULL) EX_TRY(settings_of_state(amp, resumed));
    if (*set->config != 0 && amp_settings_read_file(amp, NULL, set->config) != AMP_OK)
        return flag_refuse("config", "%s", amp_last_error());
    if (set->env && amp_settings_read_env(amp) != AMP_OK) return flag_refuse("env", "%s", amp_last_error());
    for (i = 0; i < flag_count(); i++)
        if (flag_given.on_command_line[i] && flag_is_setting(flag_at(i)))
            EX_TRY(flag_parse(i, flag_given.text[i], all));
    if (amp->mode == AMP_MODE_INFERENCE) return ex_fail(AMP_ERR_RANGE, "mode = inference: this program trains");
    return AMP_OK;
}

/* What an optimizer and a monitor have of the settings, with defaults. */
static inline amp_result settings_fill(const amp_settings *amp, amp_optimizer_desc *optimizer,
                                       amp_monitor_desc *monitor) {
    memset(optimizer, 0, sizeof *optimizer);
    memset(monitor, 0, sizeof *monitor);
    if (amp_settings_fill(amp, NULL, NULL, NULL, optimizer, monitor) == AMP_OK) return AMP_OK;
    return ex_fail(AMP_ERR_CONFLICT, "the settings contradict each other: %s", amp_last_error());
}

/* The loader's settings and the threads are left out: they belong to a session, and change no result. */
static inline amp_result settings_put(const amp_settings *amp, amp_state *state) {
    char text[8192];
    amp_settings kept = *amp;
    size_t bytes;
    kept.threads = kept.workers = kept.prefetch = kept.disable_pinned = 0;
    bytes = amp_settings_text(&kept, text, sizeof text);
    if (bytes >= sizeof text) return ex_fail(AMP_ERR_SIZE, "the settings are too long");
    return amp_state_put(state, "train.settings", AMP_U8, text, (int64_t)bytes);
}

/* ---- The command line in a checkpoint.  NAME.state has its options, but for those that belong to one session. */

static char *saved_options;             /* the texts of the resumed checkpoint */

/* PATH without ".state" or ".safetensors". */
static inline const char *without_suffix(const char *path) {
    static char copies[2][PATH_MAX];
    static int next;
    static const char *const suffixes[] = {".state", ".safetensors"};
    size_t length = strlen(path), i;
    char *copy = copies[next++ & 1];
    snprintf(copy, PATH_MAX, "%s", path);
    for (i = 0; i < 2; i++) {
        size_t n = strlen(suffixes[i]);
        if (length > n && length < PATH_MAX && strcmp(path + length - n, suffixes[i]) == 0) copy[length - n] = 0;
    }
    return copy;
}

/* Takes from a checkpoint the options not on the command line.  Their format: "name=value\n". */
static inline amp_result saved_options_read(const amp_state *state) {
    int64_t n = amp_state_count(state, "train.options", NULL), named = amp_state_count(state, "train.program", NULL);
    char *line, *next, program[64] = "train_gpt";       /* which alone did not name itself in version 0.1.0 */
    if (named > 0 && named < (int64_t)sizeof program) {
        EX_TRY(amp_state_get(state, "train.program", AMP_U8, program, named));
        program[named] = 0;
    }
    if (n < 0 || strcmp(program, flag_given.program) != 0)
        return flag_refuse("resume", "is not a checkpoint of %s", flag_given.program);
    saved_options = (char *)calloc((size_t)n + 1, 1);
    if (saved_options == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the checkpoint's options");
    EX_TRY(amp_state_get(state, "train.options", AMP_U8, saved_options, n));
    for (line = saved_options; *line != 0; line = next) {
        char *end = strchr(line, '\n'), *equals = strchr(line, '=');
        int at;
        next = end != NULL ? end + 1 : line + strlen(line);
        if (end != NULL) *end = 0;
        if (equals == NULL) continue;
        *equals = 0;
        at = flag_index(line);
        if (at >= 0 && flag_given.text[at] == NULL) flag_given.text[at] = equals + 1;
    }
    return AMP_OK;
}

/* The options that a resumed run needs.  session: the program's own that it does not, up to a NULL. */
static inline amp_result saved_options_put(amp_state *state, const char *const *session) {
    static const char *const always[] = {"config", "env",     "device",     "threads", "out",       "save",
                                         "resume", "metrics", "stop-after", "help",    "rank-file", "rank-timeout",
                                         "change-batch", "nccl", NULL};
    const char *const *of_session[2];
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    int i, k, list;
    of_session[0] = session; of_session[1] = always;
    for (i = 0; i < flag_count(); i++) {
        const flag_row *o = flag_at(i);
        int left = o->type == FLAG_HEADING || flag_is_setting(o) || flag_given.text[i] == NULL;
        for (list = 0; list < 2; list++)
            for (k = 0; of_session[list][k] != NULL && !left; k++) left = strcmp(o->name, of_session[list][k]) == 0;
        if (!left) json_add(&b, "%s=%s\n", o->name, flag_given.text[i]);
    }
    result = b.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the options")
                      : amp_state_put(state, "train.options", AMP_U8, b.used > 0 ? b.text : "", (int64_t)b.used);
    free(b.text);
    EX_TRY(result);
    return amp_state_put(state, "train.program", AMP_U8, flag_given.program, (int64_t)strlen(flag_given.program));
}

/* ---- Saving */

/* What a checkpoint has of the run.  session: as in saved_options_put.  batch: a rank's micro-batch. */
static inline amp_result checkpoint_put_run(const training_settings *set, const char *const *session, int64_t step,
                                            int64_t batch, int64_t accumulation, amp_state *state) {
    const int64_t batches[] = {batch, accumulation, ranks.world};
    EX_TRY(saved_options_put(state, session));
    EX_TRY(settings_put(&set->amp, state));
    EX_TRY(amp_state_put(state, "train.step", AMP_I64, &step, 1));
    return amp_state_put(state, "train.batch", AMP_I64, batches, 3);
}

/* What a checkpoint has of the model and of mixed precision; model_load_state and checkpoint_load are its other side.
   scaler may be NULL. */
static inline amp_result checkpoint_put_model(amp_context *amp, const amp_param *params, int64_t n,
                                              const amp_optimizer *optimizer, const amp_scaler *scaler,
                                              amp_state *state) {
    EX_TRY(model_save_state(amp, params, n, state));
    EX_TRY(amp_optimizer_save(optimizer, state, "optimizer"));
    if (scaler != NULL) EX_TRY(amp_scaler_save(scaler, state, "scaler"));
    EX_TRY(amp_fp8_save(amp, state, "amp"));
    return amp_random_save(amp, state, "random");
}

/* The program's function that puts all of a run into a state. */
typedef amp_result (*checkpoint_put)(void *run, amp_state *state);

/* Writes NAME.state; save: NAME, or "" for nothing. */
static inline amp_result checkpoint_save(const training_settings *set, const char *save, amp_context *amp,
                                         checkpoint_put put, void *run) {
    char path[PATH_MAX + 16];
    amp_state *state;
    amp_result result;
    if (save[0] == 0) return AMP_OK;
    snprintf(path, sizeof path, "%s.state", save);
    EX_TRY(amp_state_create(&state, NULL));
    result = (*put)(run, state);
    if (result == AMP_OK)
        result = rank_flags_own_states(&set->ranks) ? amp_state_save_ranks(amp, state, path)
                                                    : amp_state_save(state, path);
    amp_state_destroy(state);
    return result;
}

/* Writes a checkpoint beside the one to come, and removes it: what cannot be saved, for want of memory, disk space or
   permission, is known before the first step instead of after the last. */
static inline amp_result checkpoint_try(const char *save, checkpoint_put put, void *run) {
    char path[PATH_MAX + 32], why[400];
    amp_state *state;
    amp_result result;
    if (save[0] == 0) return AMP_OK;
    EX_TRY(amp_state_create(&state, NULL));
    result = (*put)(run, state);
    snprintf(path, sizeof path, "%s.trial%d.state", save, (int)ranks.rank);
    ex_remove_unfinished(path);         /* of a run that was killed here */
    if (result == AMP_OK && (result = amp_state_save(state, path)) != AMP_OK)
        (void)ex_fail(result, "this run could not be saved, so it does not begin: %s", ex_because(why));
    (void)remove(path);
    amp_state_destroy(state);
    return result;
}

/* ---- Resuming */

/* What checkpoint_put_model saved, but for the weights. */
static inline amp_result checkpoint_load(amp_context *amp, amp_optimizer *optimizer, amp_scaler *scaler,
                                         const amp_state *state) {
    EX_TRY(amp_optimizer_load(optimizer, state, "optimizer"));
    if (scaler != NULL && amp_state_count(state, "scaler.scale", NULL) > 0)
        EX_TRY(amp_scaler_load(scaler, state, "scaler"));
    if (amp_state_count(state, "amp.fp8", NULL) > 0 && amp_fp8_load(amp, state, "amp") != AMP_OK)
        return flag_refuse("resume", "%s", amp_last_error());
    return amp_random_load(amp, state, "random");
}

static int resume_of_ranks;             /* 1: each rank has saved its own */
static inline void resume_path(char *path, size_t size) {
    snprintf(path, size, "%.4000s.state", flag_given.text[flag_index("resume")]);
}

/* The checkpoint of --resume, and its options; *resumed NULL: none is given. */
static inline amp_result resume_open(amp_state **resumed) {
    int resume = flag_index("resume");
    char path[PATH_MAX];
    *resumed = NULL;
    if (flag_given.text[resume] == NULL || *flag_given.text[resume] == 0) return AMP_OK;
    flag_given.text[resume] = without_suffix(flag_given.text[resume]);
    resume_path(path, sizeof path);
    if (amp_state_load(resumed, NULL, path) != AMP_OK) return flag_refuse("resume", "%s", amp_last_error());
    resume_of_ranks = amp_state_count(*resumed, "ranks.index", NULL) > 0;
    if (resume_of_ranks) {
        amp_state_destroy(*resumed);
        *resumed = NULL;
        if (amp_state_load_ranks(NULL, resumed, path) != AMP_OK)
            return flag_refuse("resume", "%s", amp_last_error());
    }
    return saved_options_read(*resumed);
}

/* With --sync-every each rank goes on from its own state; *own NULL: from rank 0's, which after a combination will do
   for other ranks. */
static inline amp_result resume_own(const rank_settings *set, const amp_context *amp, const amp_state *resumed,
                                    amp_state **own) {
    char path[PATH_MAX];
    int64_t was[3], step;
    *own = NULL;
    if (resumed == NULL || !resume_of_ranks || set->sync_every == 0) return AMP_OK;
    EX_TRY(amp_state_get(resumed, "train.batch", AMP_I64, was, 3));
    EX_TRY(amp_state_get(resumed, "train.step", AMP_I64, &step, 1));
    if (was[2] != ranks.world && step % set->sync_every != 0)
        return flag_refuse("resume", "%lld ranks saved it at step %lld, between two combinations, and this run has %d: "
                           "start %lld ranks, or save at a multiple of --sync-every %lld to start another number",
                           (long long)was[2], (long long)step, (int)ranks.world, (long long)was[2],
                           (long long)set->sync_every);
    if (was[2] != ranks.world) return AMP_OK;
    resume_path(path, sizeof path);
    return amp_state_load_ranks(amp, own, path) == AMP_OK ? AMP_OK : flag_refuse("resume", "%s", amp_last_error());
}

#endif
