/* training_report.h - what every trainer prints and records of its run. */
#ifndef EXAMPLE_TRAINING_REPORT_H
#define EXAMPLE_TRAINING_REPORT_H

#include "training_run.h"

static const char *const level_names[] = {"O0", "O1", "O2", "O3"};

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

#endif
