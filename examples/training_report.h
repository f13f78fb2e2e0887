/* training_report.h - what every trainer prints and records of its run. */
#ifndef EXAMPLE_TRAINING_REPORT_H
#define EXAMPLE_TRAINING_REPORT_H

#include "training_run.h"

/* What scales losses, a line of the report on a run; NULL: nothing does. */
static inline void training_print_scaler(const amp_scaler *scaler) {
    static const char *const presets[] = {"default", "torch",   "apex",    "megatron", "deepspeed", "deepspeed_fused",
                                          "fairseq", "metaseq", "flax",    "keras"};
    amp_scaler_desc desc;
    if (scaler == NULL || amp_scaler_query(scaler, &desc) != AMP_OK) {
        printf("  scaler      no");
        scaler_flags_without_effect();
        printf("\n");
        return;
    }
    printf("  scaler      yes: preset %s, first scale %g, ", presets[desc.preset], (double)desc.init_scale);
    if (desc.frozen) printf("static\n");
    else
        printf("times %g after %d clean steps, times %g after an overflow\n", desc.growth_factor,
               (int)desc.growth_interval, desc.backoff_factor);
}

/* What a run computes in.  n_fp8: its weights in fp8, in these blocks. */
static inline void training_print_precision(const amp_context *amp, const amp_scaler *scaler, int n_fp8,
                                            const char *blocks) {
    static const char *const levels[] = {"O0: fp32 throughout", "O1: fp32 weights, operators cast",
                                         "O2: 16-bit weights with fp32 masters", "O3: 16-bit weights, no masters"};
    amp_choice choice;
    amp_desc desc;
    if (amp_query_choice(amp, &choice) != AMP_OK || amp_query(amp, &desc) != AMP_OK) return;
    printf("  precision   %s: %s\n", amp_dtype_name(choice.dtype), choice.reason);
    if (choice.dtype == AMP_FP8)
        printf("  fp8         %d weights of the %s blocks; the others in bf16\n", n_fp8, blocks);
    training_print_scaler(scaler);
    printf("  level       %s\n", levels[desc.level - AMP_LEVEL_O0]);
}

/* Begins the record of a run with the same; the program adds its own values and ends it. */
static inline void training_metrics_run(FILE *metrics, const amp_context *amp, const amp_scaler *scaler) {
    static const char *const levels[] = {"O0", "O1", "O2", "O3"};
    amp_choice choice;
    amp_desc desc;
    metrics_begin(metrics, "run");
    metrics_text(metrics, "version", AMP_VERSION_TEXT);
    if (amp_query_choice(amp, &choice) != AMP_OK || amp_query(amp, &desc) != AMP_OK) return;
    metrics_text(metrics, "precision", amp_dtype_name(choice.dtype));
    metrics_text(metrics, "reason", choice.reason);
    metrics_text(metrics, "level", levels[desc.level - AMP_LEVEL_O0]);
    metrics_integer(metrics, "scaler", scaler != NULL);
}

/* Fails a run that changed nothing.  records: the session's steps; applied: those of them that changed the weights. */
static inline amp_result training_check_applied(int64_t records, int64_t applied) {
    if (records == 0 || applied > 0) return AMP_OK;
    return ex_fail(AMP_ERR_STATE, "no step was applied: all %lld were skipped, and the weights are unchanged",
                   (long long)records);
}

/* The last line of a run that was stopped.  save: as of training_open_files. */
static inline amp_result training_print_stopped(int64_t step, const char *save) {
    printf("stopped at step %lld", (long long)step);
    if (save[0] != 0) printf("; continue with --resume %s", save);
    printf("\n");
    return ranks_wait();            /* a launcher may end all as soon as one has ended */
}

/* Prints the last error and ends the ranks; returns the exit code. */
static inline int training_fail(int code) {
    if (ranks.world > 1) fprintf(stderr, "rank %d: ", (int)ranks.rank);
    fprintf(stderr, "%s: %s\n", flag_given.program, ex_error());
    ranks_end(code);
    return code;
}

#endif
