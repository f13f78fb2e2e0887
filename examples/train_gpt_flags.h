/* train_gpt_flags.h - the flags of train_gpt: their table, the checkpoint's, files' and environment's values, and what
 * contradicts what.  read_settings gives them all. */
#ifndef TRAIN_GPT_FLAGS_H
#define TRAIN_GPT_FLAGS_H

#include "gpt.h"
#include "training_checkpoint.h"

/* ==== Settings: tables drive parsing, checking and --help ======================================== */

typedef struct settings {
    training_settings training;
    const char *data, *format, *init, *tensorboard;
    const char *tokenizer, *shuffle, *masters;
    const char *activations, *model, *schedule, *prompt, *autotune, *fp8_blocks, *lowest;
    int64_t vocab, layers, heads, channels, seq, batch, steps, epochs, warmup, seed;
    int64_t recompute, fused_loss, graph;
    int64_t eval_interval, eval_batches, sample, top_k, help, profile;
    int64_t log_memory, debug;
    int64_t adaptive;               /* --precision adaptive */
    /* as .training.amp has them, with defaults; an interval 0: never */
    int64_t accumulation, log_interval, tensor_stats_interval;
    double validation, dropout, lr, min_lr, weight_decay, beta1, beta2, eps;
    double temperature, timeout, error_budget;
} settings;

#define FIELD(name) offsetof(settings, name)

static const flag_row model_flags[] = {
    {"Data", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"data", FLAG_TEXT, FIELD(data), "", 0, 0, NULL,
     "The text or token file to learn. A pattern in quotes, such as \"data/*.bin\", means several files. If empty, "
     "the program learns this project's own text."},
    {"format", FLAG_CHOICE, FIELD(format), "auto", 0, 0, "auto llmc u16 bytes",
     "The format of the data: llmc for llm.c token files, u16 for raw 16-bit tokens, or bytes. With auto, the "
     "content of the file decides."},
    {"tokenizer", FLAG_PATHS, FIELD(tokenizer), "", 0, 0, NULL,
     "The files vocab.json and merges.txt of a GPT-2. If empty, the tokenizer is that beside --init. With it, text "
     "becomes tokens, in OUT/tokens.bin, and the sample becomes text again."},
    {"vocab", FLAG_INTEGER, FIELD(vocab), "auto", 1, 1 << 24, "auto=0",
     "The number of tokens in the vocabulary. With auto, it is that of the tokenizer, 256 for bytes, or else 50257."},
    {"validation", FLAG_NUMBER, FIELD(validation), "0.1", 1e-6, 0.9, NULL,
     "The part of the data, at its end, that is kept for validation."},
    {"shuffle", FLAG_CHOICE, FIELD(shuffle), "on", 0, 0, "on off",
     "Whether each epoch has a new order of the sequences."},
    {"workers", FLAG_SETTING, FIELD(training.amp), "2", 0, 0, "workers",
     "The number of threads that read ahead. With 0, each batch is read when it is needed."},
    {"prefetch", FLAG_SETTING, FIELD(training.amp), "2", 0, 0, "prefetch",
     "The number of batches that the workers read ahead."},
    {"pin", FLAG_SETTING, FIELD(training.amp), "on", 0, 0, "pin",
     "Whether batches are in pinned CPU memory, on a device that has such memory."},
    {"timeout", FLAG_NUMBER, FIELD(timeout), "60", 0.001, 1e6, NULL,
     "The number of seconds to wait for a worker before the program fails."},

    {"Model", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"model", FLAG_CHOICE, FIELD(model), "small", 0, 0,
     "small d6 gpt2 gpt2-medium gpt2-large gpt2-xl d12 d24 d36 d48 llama-s",
     "The size of a GPT-2, or llama-s, a small Llama."},
    {"layers", FLAG_INTEGER, FIELD(layers), "model", 1, 1000, "model=0",
     "The number of blocks. With model, it is that of --model."},
    {"heads", FLAG_INTEGER, FIELD(heads), "model", 1, 4096, "model=0",
     "The number of attention heads, which must divide the channels. With model, it is that of --model."},
    {"channels", FLAG_INTEGER, FIELD(channels), "model", 1, 65536, "model=0",
     "The width. With model, it is that of --model."},
    {"seq", FLAG_INTEGER, FIELD(seq), "128", 1, 1 << 20, NULL, "The number of tokens in a sequence."},
    {"dropout", FLAG_NUMBER, FIELD(dropout), "0", 0, 0.95, NULL,
     "The dropout rate of the embedding and the residual branches."},
    {"init", FLAG_TEXT, FIELD(init), "", 0, 0, NULL,
     "Starts from the weights in this file: safetensors of a GPT-2 or a Llama, with its config.json beside it, or "
     "llm.c's .bin."},

    {"Precision", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"precision", FLAG_SETTING, FIELD(training.amp), "auto", 0, 0, "dtype",
     "The dtype of autocast: auto, fp32, tf32, fp16, bf16 or fp8. With fp8, linear layers compute in fp8 and all "
     "else in bf16. With adaptive, training begins in fp32, and each linear layer goes as low as its measured "
     "errors allow; NAME.layers.conf beside the model says how low."},
    {"error-budget", FLAG_NUMBER, FIELD(error_budget), "auto", 0, 1e30, "auto=-1",
     "With --precision adaptive, the relative error that a layer may have. With 0, all layers stay in fp32. With "
     "auto, it is 0.1, or 0.25 in fp8."},
    {"lowest", FLAG_CHOICE, FIELD(lowest), "auto", 0, 0, "auto bf16 fp16 fp8",
     "With --precision adaptive, the lowest precision to try; on the way to fp8, bf16 is tried. With auto, it is "
     "the lowest for which this machine has instructions."},
    {"fp8-blocks", FLAG_CHOICE, FIELD(fp8_blocks), "inner", 0, 0, "inner all",
     "The blocks that compute in fp8: inner are all but the first and the last, and all includes these."},
    {"fp8-scaling", FLAG_SETTING, FIELD(training.amp), "current", 0, 0, "fp8_scaling",
     "The scales of fp8: current has one per tensor, block has one per 1 x 128 and per 128 x 128 values, mx has one "
     "per 32 values, and delayed has one per tensor, from earlier steps."},
    {"fp8-format", FLAG_SETTING, FIELD(training.amp), "hybrid", 0, 0, "fp8_format",
     "The format of fp8: hybrid is E4M3 forward and E5M2 for gradients, and e4m3 is E4M3 for both."},
    {"autocast-dtype", FLAG_SETTING, FIELD(training.amp), "auto", 0, 0, "autocast_dtype",
     "The dtype of autocast regions, if weights (O2, O3) are stored in another dtype."},
    {"cast-outputs", FLAG_SETTING, FIELD(training.amp), "off", 0, 0, "cast_outputs",
     "The dtype of the logits: with off, as autocast returns them; with on, that of the regions; or fp32."},
    {"activations", FLAG_TEXT, FIELD(activations), "auto", 0, 0, NULL,
     "How activations are stored: auto (as autocast returns them), fp32, fp16 or bf16. Single tensors can have "
     "another dtype, as in auto,stream=bf16. They are stream, the residual stream, which is fp32 unless it is named "
     "here; norm; attention; mlp; and branch, which is added to the stream. If the stream is not fp32, the loss "
     "with an fp32 stream is also printed."},
    {"graph", FLAG_SWITCH, FIELD(graph), "off", 0, 0, NULL,
     "Captures the step in a CUDA graph, and launches the graph."},
    {"autotune", FLAG_SWITCH_TEXT, FIELD(autotune), "off", 0, 0, NULL,
     "Times the ways in which the GPU can compute each product once, and uses the fastest. With --autotune=FILE, "
     "the results are kept in FILE. This has no effect on the CPU."},
};
static const flag_row step_flags[] = {
    {"batch", FLAG_INTEGER, FIELD(batch), "16", 1, 1 << 20, NULL,
     "The number of sequences in a micro-batch of a rank. A resumed run takes its share of the batch of the "
     "checkpoint."},
    {"recompute", FLAG_SWITCH, FIELD(recompute), "off", 0, 0, NULL,
     "Keeps the activations of one block, and runs each block again in backward. This takes less memory and more "
     "time, and gives the same bits."},
    {"fused-loss", FLAG_SWITCH, FIELD(fused_loss), "off", 0, 0, NULL,
     "Computes the last product and the loss together, by chunks of tokens, so that the logits are never stored "
     "whole."},
    {"steps", FLAG_INTEGER, FIELD(steps), "auto", 0, HUGE_COUNT, "auto=-1",
     "The number of optimizer steps in total. With auto, it is 1200, or as many as --epochs needs."},
    {"epochs", FLAG_INTEGER, FIELD(epochs), "any", 1, 1 << 30, "any=0", "Stops after this many passes over the data."},
    {"lr", FLAG_NUMBER, FIELD(lr), "2e-3", 0, 100, NULL, "The highest learning rate."},
    {"min-lr", FLAG_NUMBER, FIELD(min_lr), "auto", 0, 100, "auto=-1",
     "The learning rate at the end of the cosine schedule. With auto, it is a tenth of --lr."},
    {"warmup", FLAG_INTEGER, FIELD(warmup), "40", 0, HUGE_COUNT, NULL,
     "The number of steps in which the learning rate rises linearly."},
    {"schedule", FLAG_CHOICE, FIELD(schedule), "cosine", 0, 0, "cosine constant",
     "The course of the learning rate after the warmup."},
    {"weight-decay", FLAG_NUMBER, FIELD(weight_decay), "0.1", 0, 10, NULL,
     "The weight decay, which applies to matrices only."},
    {"beta1", FLAG_NUMBER, FIELD(beta1), "0.9", 0, 0.999999, NULL, "The decay of the first moment."},
    {"beta2", FLAG_NUMBER, FIELD(beta2), "0.99", 0, 0.999999, NULL, "The decay of the second moment."},
    {"eps", FLAG_NUMBER, FIELD(eps), "1e-8", 0, 1, NULL, "The number that is added to the denominator."},
    {"masters", FLAG_CHOICE, FIELD(masters), "auto", 0, 0, "auto fp32 remainder none stochastic",
     "What becomes of the part that 16-bit weights (O2, O3) round off: fp32 keeps it in master weights of 4 bytes, "
     "remainder keeps it in 2 bytes (bf16), none loses it, and stochastic rounds at random."},
    {"seed", FLAG_INTEGER, FIELD(seed), "1", 0, HUGE_COUNT, NULL,
     "The seed of weights, data order, dropout and the sample."},

    {"Files", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"out", FLAG_TEXT, FIELD(training.out), "out", 0, 0, NULL,
     "OUT, the folder of all files whose path you do not give."},
};
static const flag_row report_flags[] = {
    {"tensorboard", FLAG_TEXT, FIELD(tensorboard), "", 0, 0, NULL,
     "The folder for a TensorBoard event file. If empty, none is written."},

    {"Anomalies", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"nan-action", FLAG_SETTING, FIELD(training.amp), "skip", 0, 0, "nan_action",
     "What to do after an anomaly that no loss scale cures: report, skip, stop, or recover, which goes back to an "
     "earlier step and continues in a wider precision."},
    {"batch-growth-interval", FLAG_SETTING, FIELD(training.amp), "off", 0, 0, "batch_growth_interval",
     "With --nan-action recover, a batch that was halved for want of memory is doubled again after this many good "
     "steps."},

    {"Reports", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"eval-interval", FLAG_INTEGER, FIELD(eval_interval), "300", 1, HUGE_COUNT, "end=0",
     "The number of steps between two validations."},
    {"eval-batches", FLAG_INTEGER, FIELD(eval_batches), "64", 1, HUGE_COUNT, "all=0",
     "The largest number of batches in a validation."},
    {"log-interval", FLAG_SETTING, FIELD(training.amp), "10", 0, 0, "log_interval",
     "The number of steps between two records in the metrics, or off."},
    {"log-memory", FLAG_SWITCH, FIELD(log_memory), "off", 0, 0, NULL,
     "Prints how much memory is in use, as often as --memory-log-interval says."},
    {"memory-log-interval", FLAG_SETTING, FIELD(training.amp), "100", 0, 0, "memory_interval",
     "The number of steps between two measurements of memory, which also go to the metrics, or off."},
    {"debug", FLAG_SWITCH, FIELD(debug), "off", 0, 0, NULL,
     "Prints the precision of each operator once, with the rule that chose it, and every 100 steps how well "
     "gradients fit their format."},
    {"sample", FLAG_INTEGER, FIELD(sample), "400", 0, 1 << 20, NULL,
     "The number of tokens that the model writes at the end."},
    {"prompt", FLAG_TEXT, FIELD(prompt), "", 0, 0, NULL,
     "The text that the sample continues. The model must be one of bytes, or --tokenizer must be given."},
    {"temperature", FLAG_NUMBER, FIELD(temperature), "0.8", 0, 100, NULL,
     "The temperature of the sample. With 0, the sample has the likeliest token each time."},
    {"top-k", FLAG_INTEGER, FIELD(top_k), "all", 1, 1 << 24, "all=0",
     "The sample chooses among this many of the likeliest tokens."},
    {"profile", FLAG_SWITCH, FIELD(profile), "off", 0, 0, NULL, "Prints a table of the time per operator at the end."},
    {"help", FLAG_SWITCH, FIELD(help), "off", 0, 0, NULL, "Prints this text."},
};
static flag_program flag_given = {
    .program = "train_gpt", .summary = "trains a GPT-2 or a Llama in mixed precision with amp.h",
    .parts = {{model_flags, FLAG_ROWS(model_flags), 0},
              {precision_flags, FLAG_ROWS(precision_flags), FIELD(training)},
              {optimizer_flags, FLAG_ROWS(optimizer_flags), FIELD(training)},
              {step_flags, FLAG_ROWS(step_flags), 0},
              {file_flags, FLAG_ROWS(file_flags), FIELD(training)},
              {report_flags, FLAG_ROWS(report_flags), 0},
              {scaler_flags, FLAG_ROWS(scaler_flags), FIELD(training.amp)},
              {rank_flags, FLAG_ROWS(rank_flags), FIELD(training.ranks)}},
    .ending = training_ending
};
/* Not taken over from a checkpoint: they belong to one session. */
static const char *const session_options[] = {"init",        "recompute",  "sample", "prompt", "temperature",
                                              "top-k",       "timeout",    "graph",  "profile", "autotune",
                                              "tensorboard", "fused-loss", "debug",  "log-memory", NULL};

static amp_dtype setting_dtype(const char *name) {
    amp_dtype dtype = AMP_DTYPE_DEFAULT;
    amp_dtype_parse(name, &dtype);
    return dtype;
}

/* --activations: a dtype for all (*all 0: auto) and name=dtype for single tensors (0: not named), comma-separated. */
static amp_result read_activations(const char *text, amp_dtype *all, amp_dtype stored[GPT_TENSORS]) {
    const char *end;
    int which, given_all = 0;
    *all = AMP_DTYPE_DEFAULT;
    memset(stored, 0, GPT_TENSORS * sizeof *stored);
    for (;; text = end + 1) {
        char item[64], *dtype = item, *equals;
        end = text + strcspn(text, ",");
        snprintf(item, sizeof item, "%.*s", (int)(end - text < 63 ? end - text : 63), text);
        if ((equals = strchr(item, '=')) != NULL) {
            *equals = 0;
            dtype = equals + 1;
            for (which = 0; which < GPT_TENSORS && strcmp(item, gpt_tensor_names[which]) != 0; which++) {}
            if (which == GPT_TENSORS)
                return flag_refuse("activations",
                              "\"%s\" is not a tensor; the tensors are stream, norm, attention, mlp and branch", item);
            if (stored[which] != AMP_DTYPE_DEFAULT) return flag_refuse("activations", "%s is named twice", item);
        } else if (given_all++)
            return flag_refuse("activations", "two dtypes for all tensors, of which \"%s\" is the second; for one "
                               "tensor write name=%s", item, item);
        if (ex_word_place(equals != NULL ? "fp32 fp16 bf16" : "auto fp32 fp16 bf16", dtype) < 0)
            return flag_refuse("activations", "\"%s\" is not one of: %sfp32 fp16 bf16", dtype,
                          equals != NULL ? "" : "auto ");
        if (equals == NULL) *all = setting_dtype(dtype);
        else stored[which] = setting_dtype(dtype);
        if (*end == 0) return AMP_OK;
    }
}

/* Between two combinations each rank has weights of its own, which are saved but not evaluated. */
static amp_result check_sync(const settings *set) {
    if (set->training.ranks.sync_every > 0 && set->eval_interval % set->training.ranks.sync_every != 0)
        return flag_refuse("eval-interval", "is not a multiple of --sync-every");
    if (set->training.ranks.sync_every > 0 && set->training.amp.nan_action == AMP_NAN_RECOVER)
        return flag_refuse("sync-every", "contradicts --nan-action recover, because each rank would go back alone");
    return AMP_OK;
}

/* Refuses values that are legal alone but not together. */
static amp_result check_settings(settings *set) {
    static const char *const sample_options[] = {"prompt", "temperature", "top-k", NULL};
    amp_dtype all, stored[GPT_TENSORS];
    int i;
    EX_TRY(read_activations(set->activations, &all, stored));
    EX_TRY(training_flags_check(&set->training));
    EX_TRY(check_sync(set));
    if ((flag_was_given("error-budget") || flag_was_given("lowest")) && !set->adaptive)
        return flag_refuse(flag_was_given("lowest") ? "lowest" : "error-budget", "is for --precision adaptive");
    if (set->adaptive && set->graph)
        return flag_refuse("graph", "contradicts --precision adaptive, which reads values inside a step");
    if (set->graph && set->profile)
        return flag_refuse("graph", "contradicts --profile, which times every operator by itself");
    if (set->graph && set->tensor_stats_interval > 0)
        return flag_refuse("graph",
                           "contradicts --debug and tensor_stats_interval, which read gradients inside a step");
    if (flag_was_given("min-lr") && strcmp(set->schedule, "constant") == 0)
        return flag_refuse("min-lr", "contradicts --schedule constant, which keeps the rate");
    if (set->min_lr > set->lr) return flag_refuse("min-lr", "is above --lr");
    if (flag_was_given("prefetch") && set->training.amp.workers == AMP_NO_WORKERS)
        return flag_refuse("prefetch", "contradicts --workers 0, which reads nothing ahead");
    if (flag_was_given("batch-growth-interval") && set->training.amp.batch_growth_interval > 0 &&
        set->training.amp.nan_action != AMP_NAN_RECOVER)
        return flag_refuse("batch-growth-interval", "is for --nan-action recover, which halves batches");
    for (i = 0; sample_options[i] != NULL; i++)
        if (flag_was_given(sample_options[i]) && set->sample == 0)
            return flag_refuse(sample_options[i], "contradicts --sample 0, which writes no sample");
    return AMP_OK;
}

/* All amp_settings, and what this program has of them in fields of its own. */
static amp_result read_amp_settings(settings *set, const amp_state *resumed) {
    amp_settings *amp = &set->training.amp;
    amp_optimizer_desc optimizer;
    amp_monitor_desc monitor;
    EX_TRY(settings_read(set, &set->training, resumed));
    if (set->debug) amp->debug = 1;
    if (set->adaptive && strcmp(set->lowest, "fp16") == 0 && amp->use_scaler == AMP_SCALER_USE_DEFAULT)
        amp->use_scaler = AMP_SCALER_USE_ON;
    if (flag_was_given("autotune"))
        amp->autotune = strcmp(set->autotune, "off") == 0 ? AMP_AUTOTUNE_OFF : AMP_AUTOTUNE_ON;
    if (amp->memory_efficient) set->recompute = 1;
    EX_TRY(settings_fill(amp, &optimizer, &monitor));
    set->accumulation = optimizer.accumulation;
    set->log_interval = monitor.log_interval > 0 ? monitor.log_interval : 0;
    set->tensor_stats_interval = amp->tensor_stats_interval > 0 ? amp->tensor_stats_interval : 0;
    if (amp->debug && amp->tensor_stats_interval == 0) set->tensor_stats_interval = 100;
    return AMP_OK;
}

/* All settings; *resumed: the checkpoint of --resume, or NULL. */
static amp_result read_settings(int argc, char **argv, settings *set, amp_state **resumed) {
    int precision = flag_index("precision");
    memset(set, 0, sizeof *set);
    *resumed = NULL;
    EX_TRY(flag_read(argc, argv));
    EX_TRY(resume_open(resumed));
    set->adaptive = *resumed != NULL && flag_given.text[precision] == NULL &&
                    amp_state_count(*resumed, "adapt.adapt", NULL) > 0;
    if (flag_given.text[precision] != NULL && strcmp(flag_given.text[precision], "adaptive") == 0) {
        set->adaptive = 1;
        flag_given.text[precision] = "fp32";
    }
    EX_TRY(flag_parse_all(set));
    EX_TRY(read_amp_settings(set, *resumed));
    if (*resumed != NULL) EX_TRY(rank_flags_batch(&set->training.ranks, *resumed, set->accumulation, &set->batch));
    return check_settings(set);
}

#endif
