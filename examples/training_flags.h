/* training_flags.h - flags that trainers share: the loss scaler's and those of ranks.
 *
 * A program has both tables beside its own in flag_program.parts, with the fields `amp` and `ranks` of its settings. */
#ifndef EXAMPLE_TRAINING_FLAGS_H
#define EXAMPLE_TRAINING_FLAGS_H

#include "flags.h"
#include "ranks.h"

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

#endif
