/* training_run.h - what every trainer opens from its settings: the context, its files, the loss scaler, the optimizer
 * and the monitor; and when it stops. */
#ifndef EXAMPLE_TRAINING_RUN_H
#define EXAMPLE_TRAINING_RUN_H

#include "metrics.h"
#include "training_checkpoint.h"

/* The context of these ranks.  autotune_file: where a GPU keeps what it has timed, or NULL. */
static inline amp_result training_open_context(const training_settings *set, int64_t seed, const char *autotune_file,
                                               amp_context **amp) {
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    EX_TRY(amp_settings_fill(&set->amp, NULL, &desc, NULL, NULL, NULL));
    desc.allow_fallback = (int32_t)set->allow_fallback;
    desc.autotune_file = autotune_file;
    desc.seed = (uint64_t)seed;                 /* the same on all ranks, whose weights must stay equal */
    return rank_flags_open(&set->ranks, &desc, set->device, amp);
}

/* ---- Files */

/* The path of a file beside `save`.  1: the model is model.safetensors, and transformers' from_pretrained(folder) reads
   that file. */
static inline int training_beside(const char *save, const char *name, char *path, size_t size) {
    const char *slash = strrchr(save, '/');
    snprintf(path, size, "%.*s%s", slash != NULL ? (int)(slash - save) + 1 : 0, save, name);
    return strcmp(slash != NULL ? slash + 1 : save, "model") == 0;
}

/* Removes the remains of a run killed while saving. */
static inline void training_clean_folder(const char *save) {
    static const char *const ends[] = {".state", ".safetensors"}, *const beside[] = {"config.json", "vocab.txt"};
    char path[PATH_MAX + 16];
    int i;
    for (i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s%s", save, ends[i]);
        ex_remove_unfinished(path);
        (void)training_beside(save, beside[i], path, sizeof path);
        ex_remove_unfinished(path);
    }
}

/* Where a run saves (NAME of NAME.state and NAME.safetensors) and writes its metrics; "": nothing.  Makes their
   folders, so that a run fails at its start rather than at its end.  inner: a folder below --out, as "/classifier", or
   "". */
static inline amp_result training_open_files(const training_settings *set, const char *inner, char save[PATH_MAX],
                                             char metrics[PATH_MAX]) {
    const char *name = *set->save != 0 ? set->save : set->resume;
    char why[400];
    save[0] = metrics[0] = 0;
    if (ranks.rank > 0 && !rank_flags_own_states(&set->ranks)) return AMP_OK;
    if (*name == 0) snprintf(save, PATH_MAX, "%.4000s%s/model", set->out, inner);
    else if (strcmp(name, "none") != 0) snprintf(save, PATH_MAX, "%.4000s", without_suffix(name));
    if (save[0] != 0 && ex_folder_make(save) != AMP_OK) return flag_refuse("save", "%s", ex_because(why));
    if (ranks.rank > 0) return AMP_OK;
    if (save[0] != 0) training_clean_folder(save);
    if (*set->metrics == 0) snprintf(metrics, PATH_MAX, "%.4000s%s/metrics.jsonl", set->out, inner);
    else if (strcmp(set->metrics, "none") != 0) snprintf(metrics, PATH_MAX, "%.4000s", set->metrics);
    return ex_folder_make(metrics) == AMP_OK ? AMP_OK : flag_refuse("metrics", "%s", ex_because(why));
}

/* The path of a program's data.  given: that of a flag; if it is "", the file `name` below --out, which `make` writes
   unless a resumed run finds it. */
static inline amp_result training_data_path(const training_settings *set, const char *given, const char *name,
                                            amp_result (*make)(const char *path), char path[PATH_MAX]) {
    if (*given != 0) { snprintf(path, PATH_MAX, "%.4000s", given); return AMP_OK; }
    snprintf(path, PATH_MAX, "%.4000s%s", set->out, name);
    EX_TRY(ex_folder_make(path));
    if (ranks.rank == 0 && (*set->resume == 0 || access(path, R_OK) != 0)) EX_TRY((*make)(path));
    return ranks_wait();
}

/* ---- The loss scaler, the optimizer and the monitor */

/* *scaler NULL: none, as nothing is scaled without fp16. */
static inline amp_result training_open_scaler(const training_settings *set, amp_context *amp, amp_scaler **scaler) {
    amp_scaler_desc desc;
    memset(&desc, 0, sizeof desc);
    EX_TRY(amp_settings_fill(&set->amp, amp, NULL, &desc, NULL, NULL));
    if (desc.disable || amp_scaler_create(amp, scaler, &desc) == AMP_OK) return AMP_OK;
    return ex_fail(AMP_ERR_RANGE, "the scaler's flags: %s", amp_last_error());
}

/* own: the parameters, the seed, the learning rate and what else the program sets itself. */
static inline amp_result training_open_optimizer(const training_settings *set, amp_context *amp,
                                                 const amp_optimizer_desc *own, amp_optimizer **optimizer) {
    amp_optimizer_desc desc = *own;
    EX_TRY(amp_settings_fill(&set->amp, amp, NULL, NULL, &desc, NULL));
    rank_flags_fill(&set->ranks, &desc);
    if (amp_optimizer_create(amp, optimizer, &desc) == AMP_OK) return AMP_OK;
    return ex_fail(AMP_ERR_RANGE, "the optimizer's flags: %s", amp_last_error());
}

/* own: the optimizer, the scaler and the epoch.  metrics: the path, or "". */
static inline amp_result training_open_monitor(const training_settings *set, amp_context *amp,
                                               const amp_monitor_desc *own, const char *metrics,
                                               amp_monitor **monitor) {
    amp_monitor_desc desc = *own;
    EX_TRY(amp_settings_fill(&set->amp, amp, NULL, NULL, NULL, &desc));
    if (*metrics != 0) desc.path = metrics;
    desc.append = *set->resume != 0;
    if (amp_monitor_create(amp, monitor, &desc) == AMP_OK) return AMP_OK;
    return flag_refuse("metrics", "%s", amp_last_error());
}

/* ---- Stopping */

/* 1: the ranks have the same weights after this step; between two combinations of --sync-every they do not. */
static inline int training_ranks_alike(const training_settings *set, int64_t step) {
    return set->ranks.sync_every == 0 || step % set->ranks.sync_every == 0;
}

/* *stop 1: stopped by --stop-after before the end, or by a signal to any rank, of which ranks with --sync-every tell
   each other when they combine.  start: the session's first step. */
static inline amp_result training_stop(const training_settings *set, int64_t start, int64_t step, int64_t steps,
                                       int *stop) {
    *stop = 0;
    if (training_ranks_alike(set, step)) EX_TRY(ranks_stop(stop));
    *stop |= set->stop_after > 0 && step - start >= set->stop_after && step < steps;
    return AMP_OK;
}

/* Keeps in `anomaly`, unless it has one, that --nan-action stop ends the training after this step. */
static inline void training_note_anomaly(const amp_step_record *record, char *anomaly, size_t size) {
    if (record->action == AMP_NAN_STOP && anomaly[0] == 0)
        snprintf(anomaly, size, "stopped by --nan-action stop after an anomaly at step %lld",
                 (long long)record->result.step);
}

#endif
