/* training_flags.h - flags that trainers share: of precision, the optimizer, files, the loss scaler and ranks.
 *
 * A program's settings hold a training_settings, and its flag_program.parts have these tables among its own: fields of
 * scaler_flags are those of .amp, fields of rank_flags those of .ranks. */
#ifndef EXAMPLE_TRAINING_FLAGS_H
#define EXAMPLE_TRAINING_FLAGS_H

#include "flags.h"
#include "ranks.h"

typedef struct rank_settings {
    const char *file, *shard, *wire, *sync_wire;
    int64_t sync_every, overlap_param_gather, deterministic, bucket_mb, change_batch, nccl;
    double timeout, outer_lr, outer_momentum;
} rank_settings;

typedef struct training_settings {
    amp_settings amp;               /* from flags, --config and --env */
    rank_settings ranks;
    const char *config, *device, *out, *save, *resume, *metrics;
    int64_t env, allow_fallback, save_interval, stop_after;
} training_settings;

#define TRAINING_FIELD(name) offsetof(training_settings, name)
#define HUGE_COUNT 9e15

/* ---- Precision, the optimizer and files.  A program has more of each: of precision and files before these, under its
   heading, and of the optimizer after them. */

static const flag_row precision_flags[] = {
    {"level", FLAG_SETTING, TRAINING_FIELD(amp), "O1", 0, 0, "level",
     "O0 computes in fp32, O1 casts the operands of operators, O2 has 16-bit weights with fp32 master weights, and "
     "O3 has 16-bit weights without master weights."},
    {"policy", FLAG_SETTING, TRAINING_FIELD(amp), "fused", 0, 0, "policy", "The table of autocast: fused or torch."},
    {"config", FLAG_TEXT, TRAINING_FIELD(config), "", 0, 0, NULL,
     "A file of lines \"key = value\" with the keys of amp_settings, such as examples/max.conf. Flags override it."},
    {"env", FLAG_SWITCH, TRAINING_FIELD(env), "off", 0, 0, NULL,
     "Reads the same settings from environment variables such as AMP_DTYPE=bf16, which override the file."},
    {"allow-fallback", FLAG_SWITCH, TRAINING_FIELD(allow_fallback), "off", 0, 0, NULL,
     "Uses the nearest precision if this machine lacks the requested one."},
    {"device", FLAG_TEXT, TRAINING_FIELD(device), "auto", 0, 0, NULL, flag_device_help},
    {"threads", FLAG_SETTING, TRAINING_FIELD(amp), "all", 0, 0, "threads",
     "The number of CPU threads, from 1 to 1024."},
};
static const flag_row optimizer_flags[] = {
    {"Optimizer (AdamW)", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"moments", FLAG_SETTING, TRAINING_FIELD(amp), "fp32", 0, 0, "moments",
     "How the two moments of the optimizer are stored: fp32, bf16 or 8bit."},
    {"clip", FLAG_SETTING, TRAINING_FIELD(amp), "1", 0, 0, "clip_norm", "The largest gradient norm, or none."},
    {"accumulation", FLAG_SETTING, TRAINING_FIELD(amp), "1", 0, 0, "accumulation",
     "The number of micro-batches per step."},
};
static const flag_row file_flags[] = {
    {"save", FLAG_TEXT, TRAINING_FIELD(save), "", 0, 0, NULL,
     "Saves NAME.safetensors, NAME.state and the tokenizer as NAME.tokenizer.json and its like. If empty, NAME is "
     "model in the folder of --out, and the tokenizer is tokenizer.json. With none, nothing is saved."},
    {"save-interval", FLAG_INTEGER, TRAINING_FIELD(save_interval), "end", 1, HUGE_COUNT, "end=0",
     "The number of steps between two checkpoints."},
    {"resume", FLAG_TEXT, TRAINING_FIELD(resume), "", 0, 0, NULL,
     "Continues from NAME.state, with the flags that the run was started with."},
    {"stop-after", FLAG_INTEGER, TRAINING_FIELD(stop_after), "never", 1, HUGE_COUNT, "never=0",
     "Saves and stops after this many steps of this session. Continue with --resume."},
    {"metrics", FLAG_TEXT, TRAINING_FIELD(metrics), "", 0, 0, NULL,
     "The file for metrics, as JSON lines. If empty, it is metrics.jsonl in the folder of --out. With none, no "
     "metrics are written."},
};

static const char training_ending[] =
    "Ctrl-C saves and stops, and so do kill and a closed terminal.\n"
    "Exit codes: 0 done, 1 failed, 2 refused, 75 stopped by SIGTERM or SIGUSR1, to be started again with\n"
    "--resume, 130 stopped by Ctrl-C.";

/* ---- The loss scaler */

static const flag_row scaler_flags[] = {
    {"Loss scaler", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"scaler", FLAG_SETTING, 0, "auto", 0, 0, "scaler",
     "Whether there is a loss scaler: on, off, or auto, which has one with fp16."},
    {"preset", FLAG_SETTING, 0, "default", 0, 0, "scaler_preset",
     "Whose rule and numbers the loss scaler has: torch, apex, megatron, deepspeed, deepspeed_fused, fairseq, "
     "metaseq, flax, keras, or amp.h's own by default."},
    {"init-scale", FLAG_SETTING, 0, "default", 0, 0, "init_scale",
     "The first loss scale. Here and in the flags below, default means that of the preset."},
    {"growth-factor", FLAG_SETTING, 0, "default", 0, 0, "growth_factor",
     "The loss scale grows by this factor, which is above 1."},
    {"backoff-factor", FLAG_SETTING, 0, "default", 0, 0, "backoff_factor",
     "The loss scale shrinks by this factor, which is below 1."},
    {"growth-interval", FLAG_SETTING, 0, "default", 0, 0, "growth_interval",
     "The number of clean steps before the loss scale grows, or none."},
    {"min-scale", FLAG_SETTING, 0, "default", 0, 0, "min_scale", "The lowest loss scale, or none."},
    {"max-scale", FLAG_SETTING, 0, "default", 0, 0, "max_scale", "The highest loss scale, or none."},
    {"hysteresis", FLAG_SETTING, 0, "default", 0, 0, "hysteresis",
     "The number of overflows after which the loss scale shrinks."},
    {"tolerance", FLAG_SETTING, 0, "default", 0, 0, "tolerance",
     "The rate of overflows at which the loss scale shrinks, whatever the hysteresis."},
    {"static-scale", FLAG_SETTING_SWITCH, 0, "off", 0, 0, "frozen", "Keeps the first loss scale unchanged."},
};
enum { N_SCALER_FLAGS = FLAG_ROWS(scaler_flags), FIRST_OF_SCALER = 2 };

/* Prints which of them were given, where there is no scaler. */
static inline void scaler_flags_without_effect(void) {
    int i, n = 0;
    for (i = FIRST_OF_SCALER; i < N_SCALER_FLAGS; i++)
        if (flag_was_given(scaler_flags[i].name))
            printf("%s--%s", n++ > 0 ? ", " : ", so these flags have no effect: ", scaler_flags[i].name);
}
static inline amp_result scaler_flags_check(const amp_settings *amp) {
    int i;
    for (i = FIRST_OF_SCALER; i < N_SCALER_FLAGS && amp->use_scaler == AMP_SCALER_USE_OFF; i++)
        if (flag_was_given(scaler_flags[i].name))
            return flag_refuse(scaler_flags[i].name, "contradicts --scaler off");
    return AMP_OK;
}

/* ---- Ranks */

#define RANK_FIELD(name) offsetof(rank_settings, name)
static const flag_row rank_flags[] = {
    {"Ranks: processes that train together", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"sync-every", FLAG_INTEGER, RANK_FIELD(sync_every), "off", 1, 1 << 30, "off=0",
     "The number of steps that ranks train alone before they combine their changes (DiLoCo), for slow networks. "
     "With off, they combine their gradients in every step."},
    {"outer-lr", FLAG_NUMBER, RANK_FIELD(outer_lr), "0.7", 0, 100, NULL,
     "With --sync-every, the learning rate of the combination."},
    {"outer-momentum", FLAG_NUMBER, RANK_FIELD(outer_momentum), "0.9", 0, 0.999, NULL,
     "With --sync-every, the Nesterov momentum of the combination. 0.9 averages over some ten combinations, so "
     "short runs need less."},
    {"sync-wire", FLAG_CHOICE, RANK_FIELD(sync_wire), "fp32", 0, 0, "fp32 bf16",
     "With --sync-every, the dtype in which changes are sent."},
    {"shard", FLAG_CHOICE, RANK_FIELD(shard), "none", 0, 0, "none states gradients",
     "With states, each rank keeps the master weights and moments of its part of the weights. With gradients, on "
     "the CPU, it keeps the gradients of that part too. (These are ZeRO stages 1 and 2.)"},
    {"overlap-param-gather", FLAG_SWITCH, RANK_FIELD(overlap_param_gather), "off", 0, 0, NULL,
     "With --shard, on the CPU, gathers weights while the next forward runs."},
    {"deterministic", FLAG_SWITCH, RANK_FIELD(deterministic), "off", 0, 0, NULL,
     "Sums gradients in the order of the ranks and in fp32, which gives the same bits with any --shard."},
    {"wire", FLAG_CHOICE, RANK_FIELD(wire), "fp32", 0, 0, "fp32 bf16",
     "The dtype in which gradients are sent between ranks."},
    {"bucket-mb", FLAG_INTEGER, RANK_FIELD(bucket_mb), "25", 1, 1 << 20, NULL,
     "The megabytes of gradients that ranks sum at a time, while backward runs."},
    {"change-batch", FLAG_SWITCH, RANK_FIELD(change_batch), "off", 0, 0, NULL,
     "With --resume, lets micro-batch x accumulation x ranks differ from the checkpoint's. Without this flag, such "
     "a run is refused."},
    {"rank-file", FLAG_TEXT, RANK_FIELD(file), "", 0, 0, NULL,
     "A file that all ranks can read and write, through which they meet. It replaces the variables MASTER_ADDR and "
     "MASTER_PORT."},
    {"rank-timeout", FLAG_NUMBER, RANK_FIELD(timeout), "60", 0.001, 1e6, NULL,
     "The number of seconds to wait for a rank before all ranks fail. It must be more than a checkpoint takes."},
    {"nccl", FLAG_SWITCH, RANK_FIELD(nccl), "off", 0, 0, NULL,
     "Sends gradients from GPU to GPU with libnccl.so.2, and lets --device cuda mean the GPU of LOCAL_RANK. Without "
     "this flag, gradients pass through CPU memory."},
};

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

/* ---- All of them */

/* Refuses values that are legal alone but not together.  The program has a flag --init. */
static inline amp_result training_flags_check(const training_settings *set) {
    EX_TRY(rank_flags_check(&set->ranks, set->resume));
    EX_TRY(scaler_flags_check(&set->amp));
    if (*set->resume != 0 && flag_was_given("init"))
        return flag_refuse("init", "a resumed run already has weights: drop --init or --resume");
    if (flag_was_given("save-interval") && strcmp(set->save, "none") == 0)
        return flag_refuse("save-interval", "contradicts --save none");
    return AMP_OK;
}

/* A size of the model: the value of its flag, that which --model stands for, and that of a file. */
typedef struct model_dimension { const char *flag; int64_t given, of_model, of_file; } model_dimension;

/* Refuses a file whose model contradicts the flags given. */
static inline amp_result training_check_dimensions(const model_dimension *d, int n) {
    int i;
    for (i = 0; i < n; i++) {
        int given = flag_was_given(d[i].flag);
        int64_t wanted = given ? d[i].given : flag_was_given("model") ? d[i].of_model : 0;
        if (wanted > 0 && wanted != d[i].of_file)
            return flag_refuse(given ? d[i].flag : "model", "the model in the file has %s = %lld", d[i].flag,
                               (long long)d[i].of_file);
    }
    return AMP_OK;
}

#endif
