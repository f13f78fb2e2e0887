/* training_flags.h - flags that trainers share: the loss scaler's and those of ranks; the settings of --config, --env
 * and a checkpoint; and what a checkpoint keeps of the command line.
 *
 * A program adds the two tables to its own (flag_program.shared), with the fields `amp` and `ranks` of its settings. */
#ifndef EXAMPLE_TRAINING_FLAGS_H
#define EXAMPLE_TRAINING_FLAGS_H

#include "flags.h"
#include "ranks.h"
#include "safetensors.h"

/* ---- The loss scaler */

static const flag_row scaler_flags[] = {
    {"Loss scaler", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"scaler", FLAG_SETTING, 0, "auto", 0, 0, "scaler", "auto: with fp16; on, off"},
    {"preset", FLAG_SETTING, 0, "default", 0, 0, "scaler_preset",
     "rule and numbers of: torch, apex, megatron, deepspeed, deepspeed_fused, fairseq, metaseq, flax, keras"},
    {"init-scale", FLAG_SETTING, 0, "default", 0, 0, "init_scale",
     "first scale; default: the preset's, here and below"},
    {"growth-factor", FLAG_SETTING, 0, "default", 0, 0, "growth_factor", "above 1"},
    {"backoff-factor", FLAG_SETTING, 0, "default", 0, 0, "backoff_factor", "below 1"},
    {"growth-interval", FLAG_SETTING, 0, "default", 0, 0, "growth_interval", "clean steps before it grows, or none"},
    {"min-scale", FLAG_SETTING, 0, "default", 0, 0, "min_scale", "floor, or none"},
    {"max-scale", FLAG_SETTING, 0, "default", 0, 0, "max_scale", "ceiling, or none"},
    {"hysteresis", FLAG_SETTING, 0, "default", 0, 0, "hysteresis", "overflows it takes to shrink"},
    {"tolerance", FLAG_SETTING, 0, "default", 0, 0, "tolerance",
     "overflow rate that shrinks whatever the hysteresis"},
    {"static-scale", FLAG_SETTING_SWITCH, 0, "off", 0, 0, "frozen", "the scale never changes"},
};
enum { N_SCALER_FLAGS = (int)(sizeof scaler_flags / sizeof *scaler_flags), FIRST_OF_SCALER = 2 };

/* Prints which of them were given, where there is no scaler. */
static inline void scaler_flags_without_effect(void) {
    int i, n = 0;
    for (i = FIRST_OF_SCALER; i < N_SCALER_FLAGS; i++)
        if (flag_was_given(scaler_flags[i].name))
            printf("%s--%s", n++ > 0 ? ", " : ", so no effect from ", scaler_flags[i].name);
}
static inline amp_result scaler_flags_check(const amp_settings *amp) {
    int i;
    for (i = FIRST_OF_SCALER; i < N_SCALER_FLAGS && amp->use_scaler == AMP_SCALER_USE_OFF; i++)
        if (flag_was_given(scaler_flags[i].name))
            return flag_refuse(scaler_flags[i].name, "contradicts --scaler off");
    return AMP_OK;
}

/* ---- Ranks */

typedef struct rank_settings {
    const char *file, *shard, *wire, *sync_wire;
    int64_t sync_every, overlap_param_gather, deterministic, bucket_mb, change_batch, nccl;
    double timeout, outer_lr, outer_momentum;
} rank_settings;

#define RANK_FIELD(name) offsetof(rank_settings, name)
static const flag_row rank_flags[] = {
    {"Ranks: processes that train together", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"sync-every", FLAG_INTEGER, RANK_FIELD(sync_every), "off", 1, 1 << 30, "off=0",
     "ranks train alone for so many steps, then combine their changes (DiLoCo): for slow networks; off: every step"},
    {"outer-lr", FLAG_NUMBER, RANK_FIELD(outer_lr), "0.7", 0, 100, NULL,
     "of --sync-every: learning rate of the combination"},
    {"outer-momentum", FLAG_NUMBER, RANK_FIELD(outer_momentum), "0.9", 0, 0.999, NULL,
     "of --sync-every: its Nesterov momentum; for short runs lower: 0.9 is of some ten combinations"},
    {"sync-wire", FLAG_CHOICE, RANK_FIELD(sync_wire), "fp32", 0, 0, "fp32 bf16",
     "of --sync-every: what changes are sent in"},
    {"shard", FLAG_CHOICE, RANK_FIELD(shard), "none", 0, 0, "none states gradients",
     "states: each rank keeps masters and moments of its part of the weights; gradients: their gradients too, on the "
     "CPU (ZeRO stages 1 and 2)"},
    {"overlap-param-gather", FLAG_SWITCH, RANK_FIELD(overlap_param_gather), "off", 0, 0, NULL,
     "with --shard, on the CPU: weights are gathered while the next forward runs"},
    {"deterministic", FLAG_SWITCH, RANK_FIELD(deterministic), "off", 0, 0, NULL,
     "ranks sum gradients in their order, in fp32: the same bits with any --shard"},
    {"wire", FLAG_CHOICE, RANK_FIELD(wire), "fp32", 0, 0, "fp32 bf16", "gradients between ranks"},
    {"bucket-mb", FLAG_INTEGER, RANK_FIELD(bucket_mb), "25", 1, 1 << 20, NULL,
     "megabytes of gradients that ranks sum at a time, while backward runs"},
    {"change-batch", FLAG_SWITCH, RANK_FIELD(change_batch), "off", 0, 0, NULL,
     "with --resume: let micro-batch x accumulation x ranks differ from the checkpoint's, which is refused else"},
    {"rank-file", FLAG_TEXT, RANK_FIELD(file), "", 0, 0, NULL,
     "a file through which they meet, seen by all, instead of the variables MASTER_ADDR and MASTER_PORT"},
    {"rank-timeout", FLAG_NUMBER, RANK_FIELD(timeout), "60", 0.001, 1e6, NULL,
     "seconds to wait for a rank before all fail; longer than a checkpoint takes"},
    {"nccl", FLAG_SWITCH, RANK_FIELD(nccl), "off", 0, 0, NULL,
     "gradients go from GPU to GPU, over libnccl.so.2, and --device cuda is the GPU of LOCAL_RANK; off: over the host"},
};
enum { N_RANK_FLAGS = (int)(sizeof rank_flags / sizeof *rank_flags) };

static inline amp_result rank_flags_check(const rank_settings *set, const char *resume) {
    static const char *const outer[] = {"outer-lr", "outer-momentum", "sync-wire"};
    int i;
    for (i = 0; i < 3 && set->sync_every == 0; i++)
        if (flag_was_given(outer[i])) return flag_refuse(outer[i], "is for --sync-every");
    if (set->overlap_param_gather && strcmp(set->shard, "none") == 0)
        return flag_refuse("overlap-param-gather", "is for --shard states or gradients");
    if (set->change_batch && *resume == 0) return flag_refuse("change-batch", "is for --resume");
    return AMP_OK;
}

/* Opens a context of these ranks; a refusal names the flag. */
static inline amp_result rank_flags_open(const rank_settings *set, amp_desc *desc, const char *device,
                                         amp_context **amp) {
    char why[400], gpu[24];
    amp_result result;
    desc->reducer = ranks;
    if (set->nccl) {
        desc->reduce_on_device = 1;
        desc->reduce_timeout_ms = (int32_t)(set->timeout * 1000 + 0.5);
        snprintf(gpu, sizeof gpu, "cuda:%d", ranks_local());
        if (strcmp(device, "cuda") == 0) device = gpu;
    }
    result = ex_device_open(amp, desc, device);
    if (result == AMP_ERR_NAME || result == AMP_ERR_DEVICE) return flag_refuse("device", "%s", ex_because(why));
    return result == AMP_ERR_UNSUPPORTED ? flag_refuse("precision", "%s", ex_because(why)) : result;
}

/* What an optimizer of these ranks has of them. */
static inline void rank_flags_fill(const rank_settings *set, amp_optimizer_desc *desc) {
    desc->sync_every = (int32_t)set->sync_every;
    if (set->sync_every > 0) {
        desc->outer_lr = amp_explicit(set->outer_lr);
        desc->outer_momentum = amp_explicit(set->outer_momentum);
        desc->sync_wire = strcmp(set->sync_wire, "bf16") == 0 ? AMP_BF16 : AMP_F32;
    }
    desc->shard = strcmp(set->shard, "states") == 0      ? AMP_SHARD_STATES
                  : strcmp(set->shard, "gradients") == 0 ? AMP_SHARD_GRADIENTS
                                                         : AMP_SHARD_NONE;
    desc->overlap_param_gather = (int32_t)set->overlap_param_gather;
    desc->wire = strcmp(set->wire, "bf16") == 0 ? AMP_BF16 : AMP_F32;
    desc->deterministic = (int32_t)set->deterministic;
    desc->bucket_bytes = set->bucket_mb << 20;
}

/* 1: each rank saves its own state: its part, or what it has between two combinations. */
static inline int rank_flags_own_states(const rank_settings *set) {
    return ranks.world > 1 && (strcmp(set->shard, "none") != 0 || set->sync_every > 0);
}

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
            return flag_refuse("resume", "the checkpoint's %lld samples in a micro-batch of all ranks do not divide "
                               "by %d ranks: start as many as divide them, or give --batch and --change-batch",
                               (long long)all, (int)ranks.world);
        *batch = all / ranks.world;
    }
    before = all * was[1];
    now = *batch * accumulation * ranks.world;
    if (before == now || set->change_batch) return AMP_OK;
    return flag_refuse(flag_was_given("batch") ? "batch" : "accumulation", "%lld x %lld x %d ranks are %lld samples "
                       "in a step, the checkpoint was trained with %lld: drop it, or give --change-batch",
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

/* Completes set's `amp`, which has defaults and flags: the checkpoint (NULL: none), --config, --env, then the flags
   again. */
static inline amp_result settings_read(void *set, amp_settings *amp, const char *config, int64_t env,
                                       const amp_state *resumed) {
    int i;
    if (resumed != NULL) EX_TRY(settings_of_state(amp, resumed));
    if (*config != 0 && amp_settings_read_file(amp, NULL, config) != AMP_OK)
        return flag_refuse("config", "%s", amp_last_error());
    if (env && amp_settings_read_env(amp) != AMP_OK) return flag_refuse("env", "%s", amp_last_error());
    for (i = 0; i < flag_count(); i++)
        if (flag_given.on_command_line[i] && flag_is_setting(flag_at(i)))
            EX_TRY(flag_parse(i, flag_given.text[i], set));
    if (amp->mode == AMP_MODE_INFERENCE) return ex_fail(AMP_ERR_RANGE, "mode = inference: this program trains");
    return AMP_OK;
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

/* The options that a resumed run needs.  session: names of those that it does not, up to a NULL. */
static inline amp_result saved_options_put(amp_state *state, const char *const *session) {
    static const char *const always[] = {"rank-file", "rank-timeout", "change-batch", "nccl", NULL};
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

/* Writes a checkpoint beside the one to come, and removes it: what cannot be saved, for want of memory, disk space or
   permission, is known before the first step instead of after the last. */
static inline amp_result checkpoint_try(const amp_state *state, const char *save) {
    char path[PATH_MAX + 32], why[400];
    amp_result result;
    snprintf(path, sizeof path, "%s.trial%d.state", save, (int)ranks.rank);
    ex_remove_unfinished(path);         /* of a run that was killed here */
    result = amp_state_save(state, path);
    (void)remove(path);
    return result == AMP_OK ? AMP_OK
                            : ex_fail(result, "this run could not be saved, so it does not begin: %s", ex_because(why));
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
        return flag_refuse("resume", "%lld ranks have saved it at step %lld, between two combinations, and this is one "
                           "of %d: start %lld, and save at a multiple of --sync-every %lld for others",
                           (long long)was[2], (long long)step, (int)ranks.world, (long long)was[2],
                           (long long)set->sync_every);
    if (was[2] != ranks.world) return AMP_OK;
    resume_path(path, sizeof path);
    return amp_state_load_ranks(amp, own, path) == AMP_OK ? AMP_OK : flag_refuse("resume", "%s", amp_last_error());
}

#endif
