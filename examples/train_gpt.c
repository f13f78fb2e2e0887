/* train_gpt.c - trains a GPT-2 or a Llama in mixed precision, on any text, with amp.h alone.
 *
 *     gcc -O2 examples/train_gpt.c -o train_gpt -lm -lpthread
 *     ./train_gpt                       learns this project's own source, compares fp32, fp16 and bf16
 *     ./train_gpt --data book.txt --model d6 --steps 2000 --save out/book
 *     ./train_gpt --resume out/book     continues exactly where it stopped; --help lists every flag
 *
 * On an NVIDIA GPU, with the backend compiled by nvcc -O2 -std=c++17 -arch=native -c amp_cuda.cu:
 *
 *     gcc -DUSE_CUDA -O2 -c examples/train_gpt.c && nvcc train_gpt.o amp_cuda.o -o train_gpt -lcublasLt
 *
 * On several processes, each with its own batches and the sum of all gradients:
 *
 *     mpicc -DUSE_MPI -O2 examples/train_gpt.c -o train_gpt_mpi -lm -lpthread
 *     mpirun -np 2 ./train_gpt_mpi --batch 8
 *
 * Read it from the bottom: main, then train, then train_step.  Mixed precision is open_context, open_scaler and
 * open_optimizer, which set it up, model_tape_begin, the region, and micro_step, the rest of a step; the model is
 * gpt.h. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "flags.h"
#include "gpt_files.h"
#include "metrics.h"
#include "profile.h"
#include "progress.h"
#include "sample.h"
#include "tensorboard.h"
#include "token_files.h"
#include "peak.h"
#include <glob.h>
#if defined(USE_MPI)
#include "amp_mpi.h"
#endif

/* ==== Ranks: the processes that train together ===================================================
   Without MPI there is one.  Each holds the whole model and reads its own batches; amp_step sums every gradient and the
   overflow flag over all, so all make the same update.  Rank 0 writes files and prints. */

static amp_reducer ranks = {.world = 1};

#if defined(USE_MPI)
static void ranks_begin(int *argc, char ***argv) {
    static MPI_Comm all;
    MPI_Init(argc, argv);
    all = MPI_COMM_WORLD;
    ranks = amp_mpi(&all);
    if (ranks.rank > 0 && freopen("/dev/null", "w", stdout) == NULL) MPI_Abort(MPI_COMM_WORLD, 1);
}
/* A failed rank ends the others, which may wait for it. */
static void ranks_end(int code) {
    if (code == 0 || code == 130 || ranks.world == 1) MPI_Finalize();
    else MPI_Abort(MPI_COMM_WORLD, code);
}
static void ranks_wait(void) { MPI_Barrier(MPI_COMM_WORLD); }
#else
static void ranks_begin(int *argc, char ***argv) { (void)argc; (void)argv; }
static void ranks_end(int code) { (void)code; }
static void ranks_wait(void) { }
#endif

/* Combines one number over all ranks. */
static float ranks_combine(float x, amp_reduce_op op) {
    if (ranks.world > 1) ranks.reduce(ranks.user, &x, 1, AMP_F32, op, NULL);
    return x;
}

/* ==== Settings: one table drives parsing, checking and --help ==================================== */

typedef struct settings {
    amp_settings amp;               /* from flags, --config and --env */
    const char *data, *format, *out, *save, *resume, *init, *metrics, *config, *tensorboard;
    const char *tokenizer, *shuffle, *masters;
    const char *activations, *model, *schedule, *prompt, *autotune, *device, *fp8_blocks, *lowest;
    int64_t vocab, layers, heads, channels, seq, batch, steps, epochs, warmup, seed;
    int64_t allow_fallback, threads, static_scale, recompute, fused_loss, graph;
    int64_t save_interval, eval_interval, eval_batches, sample, top_k, compare, help, stop_after, profile;
    int64_t env, log_memory, debug;
    int64_t adaptive;               /* --precision adaptive */
    /* as .amp has them, with defaults; an interval 0: never */
    int64_t accumulation, log_interval, tensor_stats_interval;
    double validation, dropout, lr, min_lr, weight_decay, beta1, beta2, eps, temperature, timeout, error_budget;
} settings;

#define FIELD(name) offsetof(settings, name)
#define HUGE_COUNT 9e15

static const flag_row options[] = {
    {"Data", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"data", FLAG_TEXT, FIELD(data), "", 0, 0, NULL,
     "text or token file, or several by a pattern in quotes: \"data/*.bin\"; empty: this project's own text"},
    {"format", FLAG_CHOICE, FIELD(format), "auto", 0, 0, "auto llmc u16 bytes",
     "llm.c tokens, raw 16-bit tokens or bytes; auto: by content"},
    {"tokenizer", FLAG_PATHS, FIELD(tokenizer), "", 0, 0, NULL,
     "vocab.json merges.txt of a GPT-2: text becomes tokens in OUT/tokens.bin, and the sample becomes text"},
    {"vocab", FLAG_INTEGER, FIELD(vocab), "auto", 1, 1 << 24, "auto=0",
     "number of tokens; auto: the tokenizer's, 256 for bytes, else 50257"},
    {"validation", FLAG_NUMBER, FIELD(validation), "0.1", 1e-6, 0.9, NULL,
     "part of the data, at its end, kept for validation"},
    {"shuffle", FLAG_CHOICE, FIELD(shuffle), "on", 0, 0, "on off", "a new order of the sequences in each epoch"},
    {"workers", FLAG_SETTING, FIELD(amp), "2", 0, 0, "workers",
     "threads that read ahead; 0: read when a batch is needed"},
    {"prefetch", FLAG_SETTING, FIELD(amp), "2", 0, 0, "prefetch", "batches that the workers read ahead"},
    {"pin", FLAG_SETTING, FIELD(amp), "on", 0, 0, "pin", "batches in pinned host memory, if the device has it"},
    {"timeout", FLAG_NUMBER, FIELD(timeout), "60", 0.001, 1e6, NULL, "seconds to wait for a worker before failing"},

    {"Model", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"model", FLAG_CHOICE, FIELD(model), "small", 0, 0, 
     "small d6 gpt2 gpt2-medium gpt2-large gpt2-xl d12 d24 d36 d48 llama-s",
     "size of a GPT-2; llama-s: of a small Llama"},
    {"layers", FLAG_INTEGER, FIELD(layers), "model", 1, 1000, "model=0", "blocks"},
    {"heads", FLAG_INTEGER, FIELD(heads), "model", 1, 4096, "model=0", "attention heads; must divide the channels"},
    {"channels", FLAG_INTEGER, FIELD(channels), "model", 1, 65536, "model=0", "width"},
    {"seq", FLAG_INTEGER, FIELD(seq), "128", 1, 1 << 20, NULL, "tokens in a sequence"},
    {"dropout", FLAG_NUMBER, FIELD(dropout), "0", 0, 0.95, NULL, "on embedding and residual branches"},
    {"init", FLAG_TEXT, FIELD(init), "", 0, 0, NULL,
     "start from this model file: safetensors of a GPT-2 or Llama, with its config.json beside it, or llm.c's .bin"},

    {"Precision", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"config", FLAG_TEXT, FIELD(config), "", 0, 0, NULL,
     "a file of lines \"key = value\" with the keys of amp_settings, such as examples/max.conf; flags override it"},
    {"env", FLAG_SWITCH, FIELD(env), "off", 0, 0, NULL,
     "the same from the environment, AMP_DTYPE=bf16 and so on, which overrides the file"},
    {"precision", FLAG_SETTING, FIELD(amp), "auto", 0, 0, "dtype",
     "dtype of autocast: auto, fp32, tf32, fp16, bf16, fp8 (linear layers; what else there is in bf16); or adaptive: "
     "fp32, with linear layers as low as their measured errors allow (SAVE.layers.conf is what they came to)"},
    {"error-budget", FLAG_NUMBER, FIELD(error_budget), "auto", 0, 1e30, "auto=-1",
     "with adaptive: the relative error that a layer may have; 0: all stay in fp32; auto: 0.1, with fp8 0.25"},
    {"lowest", FLAG_CHOICE, FIELD(lowest), "auto", 0, 0, "auto bf16 fp16 fp8",
     "with adaptive: the lowest precision tried, fp8 by way of bf16; auto: the lowest with instructions of its own"},
    {"fp8-blocks", FLAG_CHOICE, FIELD(fp8_blocks), "inner", 0, 0, "inner all",
     "in fp8: inner: all blocks but the first and the last; all: these too"},
    {"fp8-scaling", FLAG_SETTING, FIELD(amp), "current", 0, 0, "fp8_scaling",
     "scales of fp8: current (one a tensor), block (1 x 128 and 128 x 128 values), mx (32 values), delayed (one a "
     "tensor, from the steps before)"},
    {"fp8-format", FLAG_SETTING, FIELD(amp), "hybrid", 0, 0, "fp8_format",
     "hybrid: E4M3 forward and E5M2 for gradients; e4m3: throughout"},
    {"autocast-dtype", FLAG_SETTING, FIELD(amp), "auto", 0, 0, "autocast_dtype",
     "dtype of regions only, if weights (O2, O3) are stored in another"},
    {"cast-outputs", FLAG_SETTING, FIELD(amp), "off", 0, 0, "cast_outputs",
     "logits: off: as autocast returns them; on: in the regions' dtype; fp32"},
    {"level", FLAG_SETTING, FIELD(amp), "O1", 0, 0, "level",
     "O0 fp32; O1 cast; O2 16-bit weights with fp32 masters; O3 16-bit weights"},
    {"policy", FLAG_SETTING, FIELD(amp), "fused", 0, 0, "policy", "table of autocast: fused, torch"},
    {"activations", FLAG_TEXT, FIELD(activations), "auto", 0, 0, NULL,
     "their storage: auto (as autocast returns them), fp32, fp16 or bf16, and single tensors, as in auto,stream=bf16: "
     "the residual stream (else fp32; the loss in fp32 is also printed), norm, attention, mlp, branch (added to the "
     "stream)"},
    {"allow-fallback", FLAG_SWITCH, FIELD(allow_fallback), "off", 0, 0, NULL,
     "use the nearest precision if this machine lacks the requested one"},
    {"device", FLAG_TEXT, FIELD(device), "auto", 0, 0, NULL,
     "cpu, cuda or cuda:1 and so on; auto: the first GPU, where this build and this machine have one"},
    {"threads", FLAG_INTEGER, FIELD(threads), "all", 1, 1024, "all=0", "CPU threads"},
    {"graph", FLAG_SWITCH, FIELD(graph), "off", 0, 0, NULL, "capture the step in a CUDA graph and launch that"},
    {"autotune", FLAG_SWITCH_TEXT, FIELD(autotune), "off", 0, 0, NULL,
     "a GPU times its ways to do each product once; --autotune=FILE keeps the results (no effect on the CPU)"},

    {"Loss scaler", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"scaler", FLAG_SETTING, FIELD(amp), "auto", 0, 0, "scaler", "auto: with fp16; on, off"},
    {"preset", FLAG_SETTING, FIELD(amp), "default", 0, 0, "scaler_preset",
     "rule and numbers of: torch, apex, megatron, deepspeed, deepspeed_fused, fairseq, metaseq, flax, keras"},
    {"init-scale", FLAG_SETTING, FIELD(amp), "default", 0, 0, "init_scale",
     "first scale; default: the preset's, here and below"},
    {"growth-factor", FLAG_SETTING, FIELD(amp), "default", 0, 0, "growth_factor", "above 1"},
    {"backoff-factor", FLAG_SETTING, FIELD(amp), "default", 0, 0, "backoff_factor", "below 1"},
    {"growth-interval", FLAG_SETTING, FIELD(amp), "default", 0, 0, "growth_interval",
     "clean steps before it grows, or none"},
    {"min-scale", FLAG_SETTING, FIELD(amp), "default", 0, 0, "min_scale", "floor, or none"},
    {"max-scale", FLAG_SETTING, FIELD(amp), "default", 0, 0, "max_scale", "ceiling, or none"},
    {"hysteresis", FLAG_SETTING, FIELD(amp), "default", 0, 0, "hysteresis", "overflows it takes to shrink"},
    {"tolerance", FLAG_SETTING, FIELD(amp), "default", 0, 0, "tolerance",
     "overflow rate that shrinks whatever the hysteresis"},
    {"static-scale", FLAG_SWITCH, FIELD(static_scale), "off", 0, 0, NULL, "the scale never changes"},
    {"nan-action", FLAG_SETTING, FIELD(amp), "skip", 0, 0, "nan_action",
     "on an anomaly that no scale cures: report, skip, stop, recover (go back, in a wider precision)"},
    {"batch-growth-interval", FLAG_SETTING, FIELD(amp), "off", 0, 0, "batch_growth_interval",
     "with recover: good steps until a batch halved for memory is doubled again"},

    {"Optimizer (AdamW)", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"batch", FLAG_INTEGER, FIELD(batch), "16", 1, 1 << 20, NULL, "sequences in a micro-batch"},
    {"accumulation", FLAG_SETTING, FIELD(amp), "1", 0, 0, "accumulation", "micro-batches in a step"},
    {"recompute", FLAG_SWITCH, FIELD(recompute), "off", 0, 0, NULL,
     "keep one block's activations, and run each block again in backward: less memory, more time, the same bits"},
    {"fused-loss", FLAG_SWITCH, FIELD(fused_loss), "off", 0, 0, NULL,
     "the head's product and the loss in one, by chunks of tokens: the logits are never stored whole"},
    {"steps", FLAG_INTEGER, FIELD(steps), "auto", 0, HUGE_COUNT, "auto=-1",
     "total optimizer steps; auto: 1200, or as many as --epochs needs"},
    {"stop-after", FLAG_INTEGER, FIELD(stop_after), "never", 1, HUGE_COUNT, "never=0",
     "save and stop after this many steps of this session; continue with --resume"},
    {"epochs", FLAG_INTEGER, FIELD(epochs), "any", 1, 1 << 30, "any=0", "stop after this many passes over the data"},
    {"lr", FLAG_NUMBER, FIELD(lr), "2e-3", 0, 100, NULL, "highest learning rate"},
    {"min-lr", FLAG_NUMBER, FIELD(min_lr), "auto", 0, 100, "auto=-1", "where cosine ends; auto: a tenth of --lr"},
    {"warmup", FLAG_INTEGER, FIELD(warmup), "40", 0, HUGE_COUNT, NULL, "steps of linear warmup"},
    {"schedule", FLAG_CHOICE, FIELD(schedule), "cosine", 0, 0, "cosine constant", "after the warmup"},
    {"weight-decay", FLAG_NUMBER, FIELD(weight_decay), "0.1", 0, 10, NULL, "on matrices only"},
    {"beta1", FLAG_NUMBER, FIELD(beta1), "0.9", 0, 0.999999, NULL, "decay of the first moment"},
    {"beta2", FLAG_NUMBER, FIELD(beta2), "0.99", 0, 0.999999, NULL, "decay of the second moment"},
    {"eps", FLAG_NUMBER, FIELD(eps), "1e-8", 0, 1, NULL, "added to the denominator"},
    {"masters", FLAG_CHOICE, FIELD(masters), "auto", 0, 0, "auto fp32 remainder none stochastic",
     "the part that 16-bit weights (O2, O3) round off: kept in 4 bytes, in 2 (bf16), lost, or rounded at random"},
    {"moments", FLAG_SETTING, FIELD(amp), "fp32", 0, 0, "moments",
     "storage of the optimizer's two moments: fp32, bf16, 8bit"},
    {"clip", FLAG_SETTING, FIELD(amp), "1", 0, 0, "clip_norm", "largest gradient norm, or none"},
    {"seed", FLAG_INTEGER, FIELD(seed), "1", 0, HUGE_COUNT, NULL, "of weights, data order, dropout and sample"},

    {"Files", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"out", FLAG_TEXT, FIELD(out), "out", 0, 0, NULL, "folder for all files without a path of their own"},
    {"save", FLAG_TEXT, FIELD(save), "", 0, 0, NULL,
     "writes NAME.safetensors and NAME.state; empty: OUT/model; none: nothing"},
    {"save-interval", FLAG_INTEGER, FIELD(save_interval), "end", 1, HUGE_COUNT, "end=0", "steps between checkpoints"},
    {"resume", FLAG_TEXT, FIELD(resume), "", 0, 0, NULL, "continues from NAME.state, with its original flags"},
    {"metrics", FLAG_TEXT, FIELD(metrics), "", 0, 0, NULL, "JSON lines; empty: OUT/metrics.jsonl; none: nothing"},
    {"tensorboard", FLAG_TEXT, FIELD(tensorboard), "", 0, 0, NULL, "folder for a TensorBoard event file; empty: none"},

    {"Reports", FLAG_HEADING, 0, NULL, 0, 0, NULL, NULL},
    {"eval-interval", FLAG_INTEGER, FIELD(eval_interval), "300", 1, HUGE_COUNT, "end=0", "steps between validations"},
    {"eval-batches", FLAG_INTEGER, FIELD(eval_batches), "64", 1, HUGE_COUNT, "all=0",
     "batches in a validation, at most"},
    {"log-interval", FLAG_SETTING, FIELD(amp), "10", 0, 0, "log_interval", "steps between metrics, or off"},
    {"log-memory", FLAG_SWITCH, FIELD(log_memory), "off", 0, 0, NULL, "a line on memory in use, at its interval"},
    {"memory-log-interval", FLAG_SETTING, FIELD(amp), "100", 0, 0, "memory_interval",
     "steps between readings of memory, also in the metrics; or off"},
    {"debug", FLAG_SWITCH, FIELD(debug), "off", 0, 0, NULL,
     "each operator's precision once, with the rule that chose it, and every 100 steps how gradients fit their format"},
    {"sample", FLAG_INTEGER, FIELD(sample), "400", 0, 1 << 20, NULL, "tokens the model writes at the end"},
    {"prompt", FLAG_TEXT, FIELD(prompt), "", 0, 0, NULL,
     "text that the sample continues (models of bytes, or with --tokenizer)"},
    {"temperature", FLAG_NUMBER, FIELD(temperature), "0.8", 0, 100, NULL,
     "of the sample; 0: always the likeliest token"},
    {"top-k", FLAG_INTEGER, FIELD(top_k), "all", 1, 1 << 24, "all=0", "sample from the likeliest k tokens"},
    {"compare", FLAG_INTEGER, FIELD(compare), "auto", 0, HUGE_COUNT, "auto=-1",
     "steps of the short runs in fp32, fp16 and bf16; auto: 50, 0 with --data, --init or --resume"},
    {"profile", FLAG_SWITCH, FIELD(profile), "off", 0, 0, NULL, "where the time goes: a table by operator at the end"},
    {"help", FLAG_SWITCH, FIELD(help), "off", 0, 0, NULL, "this text"},
};
enum { N_OPTIONS = (int)(sizeof options / sizeof *options) };
static flag_program flag_given = {.program = "train_gpt",
                              .summary = "trains a GPT-2 in mixed precision with amp.h",
                              .options = options,
                              .n = N_OPTIONS,
                              .ending = "Ctrl-C saves and stops, and so do kill and a closed terminal.  Exit codes: 0 "
                                        "done, 1 failed, 2 refused, 130 stopped by Ctrl-C."};
static char *saved_options;             /* the texts of the resumed checkpoint */

/* Not taken over from a checkpoint: they belong to one session. */
static const char *const session_options[] = {"resume",      "init",   "threads",    "save",        "metrics",
                                              "recompute",   "out",    "compare",    "sample",      "prompt",
                                              "temperature", "top-k",  "stop-after", "help",        "timeout",
                                              "profile",     "device", "graph",      "autotune",    "config",
                                              "env",         "debug",  "log-memory", "tensorboard", "fused-loss",
                                              NULL};

/* PATH without ".state" or ".safetensors". */
static const char *without_suffix(const char *path) {
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
static amp_result read_saved_options(const amp_state *state) {
    int64_t n = amp_state_count(state, "train.options", NULL);
    char *line, *next;
    if (n < 0) return flag_refuse("resume", "is not a checkpoint of train_gpt");
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

/* The options that a resumed run needs, for read_saved_options. */
static void write_saved_options(json_buffer *b) {
    int i, k;
    for (i = 0; i < N_OPTIONS; i++) {
        int session = options[i].type == FLAG_HEADING || options[i].type == FLAG_SETTING || flag_given.text[i] == NULL;
        for (k = 0; session_options[k] != NULL && !session; k++)
            session = strcmp(options[i].name, session_options[k]) == 0;
        if (!session) json_add(b, "%s=%s\n", options[i].name, flag_given.text[i]);
    }
}

/* Flags that only a scaler reads. */
static const char *const scaler_options[] = {
    "preset",    "init-scale", "growth-factor", "backoff-factor", "growth-interval", "min-scale",
                                             "max-scale", "hysteresis", "tolerance",     "static-scale",   NULL};

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
                              "\"%s\" is not a tensor; there are stream, norm, attention, mlp and branch", item);
            if (stored[which] != AMP_DTYPE_DEFAULT) return flag_refuse("activations", "%s is there twice", item);
        } else if (given_all++)
            return flag_refuse("activations", "two dtypes for all: \"%s\" is the second; a tensor's own is name=%s",
                               item,
                          item);
        if (ex_word_place(equals != NULL ? "fp32 fp16 bf16" : "auto fp32 fp16 bf16", dtype) < 0)
            return flag_refuse("activations", "\"%s\" is not one of: %sfp32 fp16 bf16", dtype,
                          equals != NULL ? "" : "auto ");
        if (equals == NULL) *all = setting_dtype(dtype);
        else stored[which] = setting_dtype(dtype);
        if (*end == 0) return AMP_OK;
    }
}

/* Refuses values that are legal alone but not together. */
static amp_result check_settings(settings *set) {
    static const char *const sample_options[] = {"prompt", "temperature", "top-k", NULL};
    amp_dtype all, stored[GPT_TENSORS];
    int i;
    EX_TRY(read_activations(set->activations, &all, stored));
    if (*set->resume != 0 && *set->init != 0)
        return flag_refuse("init", "a resumed run already has weights: drop --init or --resume");
    if ((flag_was_given("error-budget") || flag_was_given("lowest")) && !set->adaptive)
        return flag_refuse(flag_was_given("lowest") ? "lowest" : "error-budget", "is for --precision adaptive");
    if (set->adaptive && set->graph)
        return flag_refuse("graph", "contradicts --precision adaptive, which looks into steps");
    if (set->adaptive && ranks.world > 1)
        return flag_refuse("precision",
                           "adaptive is for one process: train on one, and give all its layers by --config");
    if (set->graph && set->profile)
        return flag_refuse("graph", "contradicts --profile, which times every operator by itself");
    if (set->graph && set->tensor_stats_interval > 0)
        return flag_refuse("graph",
                           "contradicts --debug and tensor_stats_interval, which read gradients inside a step");
    if (ranks.world > 1) set->compare = 0;      /* the short runs are for one process */
    if (set->compare < 0) set->compare = *set->data != 0 || *set->init != 0 || *set->resume != 0 ? 0 : 50;
    if (flag_was_given("min-lr") && strcmp(set->schedule, "constant") == 0)
        return flag_refuse("min-lr", "contradicts --schedule constant, which keeps the rate");
    if (set->min_lr > set->lr) return flag_refuse("min-lr", "is above --lr");
    if (flag_was_given("save-interval") && strcmp(set->save, "none") == 0)
        return flag_refuse("save-interval", "contradicts --save none");
    if (flag_was_given("prefetch") && set->amp.workers == AMP_NO_WORKERS)
        return flag_refuse("prefetch", "contradicts --workers 0, which reads nothing ahead");
    if (flag_was_given("batch-growth-interval") && set->amp.batch_growth_interval > 0 &&
        set->amp.nan_action != AMP_NAN_RECOVER)
        return flag_refuse("batch-growth-interval", "is for --nan-action recover, which halves batches");
    for (i = 0; sample_options[i] != NULL; i++)
        if (flag_was_given(sample_options[i]) && set->sample == 0)
            return flag_refuse(sample_options[i], "contradicts --sample 0, which writes none");
    for (i = 0; scaler_options[i] != NULL; i++) {
        if (flag_was_given(scaler_options[i]) && set->amp.use_scaler == AMP_SCALER_USE_OFF)
            return flag_refuse(scaler_options[i], "contradicts --scaler off");
    }
    return AMP_OK;
}

/* The settings of a checkpoint are a file of settings. */
static amp_result read_saved_settings(settings *set, const amp_state *state) {
    int64_t n = amp_state_count(state, "train.settings", NULL);
    char *text = n > 0 ? (char *)malloc((size_t)n) : NULL;
    amp_result result;
    if (n <= 0) return AMP_OK;
    if (text == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the checkpoint's settings");
    result = amp_state_get(state, "train.settings", AMP_U8, text, n);
    if (result == AMP_OK) result = amp_settings_read_text(&set->amp, set->resume, text, (size_t)n);
    free(text);
    set->amp.debug = 0;             /* per session, like the loader's settings */
    set->amp.workers = set->amp.prefetch = set->amp.disable_pinned = 0;
    return result;
}

/* Completes set->amp, which has defaults and flags: the checkpoint, --config, --env, then the flags again. */
static amp_result read_amp_settings(settings *set, const amp_state *resumed) {
    amp_optimizer_desc optimizer;
    amp_monitor_desc monitor;
    int i;
    if (resumed != NULL) EX_TRY(read_saved_settings(set, resumed));
    if (*set->config != 0 && amp_settings_read_file(&set->amp, NULL, set->config) != AMP_OK)
        return flag_refuse("config", "%s", amp_last_error());
    if (set->env && amp_settings_read_env(&set->amp) != AMP_OK) return flag_refuse("env", "%s", amp_last_error());
    for (i = 0; i < N_OPTIONS; i++)
        if (options[i].type == FLAG_SETTING && flag_given.on_command_line[i]) EX_TRY(flag_parse(i, flag_given.text[i],
                                                                                                set));
    if (set->debug) set->amp.debug = 1;
    if (set->static_scale) set->amp.scaler.frozen = 1;
    if (set->adaptive && strcmp(set->lowest, "fp16") == 0 && set->amp.use_scaler == AMP_SCALER_USE_DEFAULT)
        set->amp.use_scaler = AMP_SCALER_USE_ON;
    if (flag_was_given("autotune"))
        set->amp.autotune = strcmp(set->autotune, "off") == 0 ? AMP_AUTOTUNE_OFF : AMP_AUTOTUNE_ON;
    if (set->amp.memory_efficient) set->recompute = 1;
    if (set->amp.mode == AMP_MODE_INFERENCE)
        return ex_fail(AMP_ERR_RANGE, "mode = inference: this program trains");
    memset(&optimizer, 0, sizeof optimizer);
    memset(&monitor, 0, sizeof monitor);
    if (amp_settings_fill(&set->amp, NULL, NULL, NULL, &optimizer, &monitor) != AMP_OK)
        return ex_fail(AMP_ERR_CONFLICT, "the settings contradict each other: %s", amp_last_error());
    set->accumulation = optimizer.accumulation;
    set->log_interval = monitor.log_interval > 0 ? monitor.log_interval : 0;
    set->tensor_stats_interval = set->amp.tensor_stats_interval > 0 ? set->amp.tensor_stats_interval : 0;
    if (set->amp.debug && set->amp.tensor_stats_interval == 0) set->tensor_stats_interval = 100;
    return AMP_OK;
}

/* All settings; *resumed: the checkpoint of --resume, or NULL. */
static amp_result read_settings(int argc, char **argv, settings *set, amp_state **resumed) {
    int resume = flag_index("resume"), precision = flag_index("precision");
    char path[PATH_MAX];
    memset(set, 0, sizeof *set);
    *resumed = NULL;
    EX_TRY(flag_read(argc, argv));
    if (flag_given.text[resume] != NULL && *flag_given.text[resume] != 0) {
        flag_given.text[resume] = without_suffix(flag_given.text[resume]);
        snprintf(path, sizeof path, "%.4000s.state", flag_given.text[resume]);
        if (amp_state_load(resumed, NULL, path) != AMP_OK) return flag_refuse("resume", "%s", amp_last_error());
        EX_TRY(read_saved_options(*resumed));
        set->adaptive = flag_given.text[precision] == NULL && amp_state_count(*resumed, "adapt.adapt", NULL) > 0;
    }
    if (flag_given.text[precision] != NULL && strcmp(flag_given.text[precision], "adaptive") == 0) {
        set->adaptive = 1;
        flag_given.text[precision] = "fp32";
    }
    EX_TRY(flag_parse_all(set));
    EX_TRY(read_amp_settings(set, *resumed));
    return check_settings(set);
}

/* ==== The run: everything that training needs, opened from the settings ========================== */

typedef struct run {
    settings set;
    bpe tokenizer;            /* n 0: none */
    profile profile;
    char data[PATH_MAX], save[PATH_MAX], metrics_path[PATH_MAX];    /* save "": nothing */
    amp_context *amp;
    amp_choice choice;
    amp_level level;
    amp_loader_info info;           /* of the whole data */
    int64_t split;                  /* tokens before it are trained on */
    amp_loader *loader;
    gpt_file file;                  /* of --init, until its weights are read; of a checkpoint its config.json */
    gpt model;
    char described[400];            /* remarks on its config.json, or "" */
    amp_scaler *scaler;             /* NULL: none */
    amp_optimizer *optimizer;
    amp_graph *graph;               /* of a whole step; NULL: not captured */
    float *micro_losses, *host_losses;      /* of a step's micro-batches: on the device, and read back */
    int32_t *micro_tokens;          /* device, with --graph: their inputs and targets; else NULL */
    amp_monitor *monitor;           /* keeps the metrics of steps */
    metrics_line metrics;           /* other lines go through the monitor too */
    amp_tensor_stats *stats;            /* NULL: not wanted */
    amp_recovery *recovery;         /* NULL: not wanted */
    amp_adapt *adapt;               /* NULL: not wanted */
    json_buffer fp32_layers;        /* patterns of the layers that recovery set to fp32, one a line */
    board board;
    char anomaly[256];              /* why training stops, or "" */
    char note[300];                 /* to print after the step, or "" */
    int64_t epoch, index;           /* the current step's first batch; epoch -1: not read yet */
    int64_t start, step, steps;     /* start: where this session began */
    int64_t epoch_steps;            /* since the monitor's epoch began */
    float losses[64];               /* of the last steps, by step % 64 */
    amp_step_result result;             /* the last one that arrived */
    int64_t results;                /* arrived in this session */
    int64_t peak;                   /* most bytes of memory in any epoch of the monitor's */
    int n_fp8;                      /* weights that compute in fp8 */
    double busy;                    /* seconds in training steps */
    double bigram, bigram_best;
} run;

static amp_result open_context(run *r) {
    const settings *set = &r->set;
    amp_desc desc;
    char why[400];
    amp_result result;
    memset(&desc, 0, sizeof desc);
    EX_TRY(amp_settings_fill(&set->amp, NULL, &desc, NULL, NULL, NULL));
    desc.allow_fallback = (int32_t)set->allow_fallback;
    desc.threads = (int32_t)set->threads;
    if (strcmp(set->autotune, "off") != 0 && strcmp(set->autotune, "on") != 0) desc.autotune_file = set->autotune;
    desc.seed = (uint64_t)set->seed;            /* the same on all ranks, whose weights must stay equal */
    desc.reducer = ranks;
    result = ex_device_open(&r->amp, &desc, set->device);
    if (result == AMP_ERR_NAME || result == AMP_ERR_DEVICE) return flag_refuse("device", "%s", ex_because(why));
    if (result == AMP_ERR_UNSUPPORTED) return flag_refuse("precision", "%s", ex_because(why));
    EX_TRY(result);
    EX_TRY(amp_query(r->amp, &desc));
    if (set->graph && desc.backend->graph_begin == NULL)
        return flag_refuse("graph", "the %s backend has none", desc.backend->name);
    EX_TRY(amp_query_choice(r->amp, &r->choice));
    r->level = desc.level;
    return AMP_OK;
}

/* Concatenates the files of this project. */
static amp_result write_own_text(const char *path) {
    static const char *const sources[] = {"README.md",
                                          "examples/quickstart.c",
                                          "examples/scaler_only.c",
                                          "examples/gpt.h",
                                          "examples/train_gpt.c",
                                          "amp.h",
                                          NULL};
    char *all = NULL;
    size_t used = 0;
    amp_result result = AMP_OK;
    int i;
    if (access("amp.h", R_OK) != 0)
        return flag_refuse("data", "was not given, and amp.h is not in this folder: run from the project's folder");
    for (i = 0; sources[i] != NULL && result == AMP_OK; i++) {
        void *data;
        size_t bytes;
        char *more;
        if (access(sources[i], R_OK) != 0) continue;
        result = amp_file_read_all(NULL, sources[i], &data, &bytes);
        if (result != AMP_OK) break;
        more = (char *)realloc(all, used + bytes + 1);
        if (more == NULL) result = ex_fail(AMP_ERR_MEMORY, "no memory for %s", sources[i]);
        else { all = more; memcpy(all + used, data, bytes); used += bytes; }
        amp_file_free(NULL, data, bytes);
    }
    if (result == AMP_OK) result = amp_file_write_atomic(NULL, path, all, used);
    free(all);
    return result;
}

static void loader_settings(const run *r, int64_t batch, int64_t first, int64_t last, amp_loader_desc *desc) {
    memset(desc, 0, sizeof *desc);
    desc->path = r->data;
    desc->format = (amp_token_format)ex_word_place("auto llmc u16 bytes", r->set.format);
    desc->batch = batch;
    desc->seq = r->set.seq;
    desc->first = first;
    desc->last = last;
    desc->seed = (uint64_t)r->set.seed;
    desc->world = 1;                /* all of it on every rank */
}

/* Finds the data's format and length. */
static amp_result probe_data(run *r) {
    amp_loader_desc desc;
    amp_loader *probe;
    amp_result result;
    loader_settings(r, 1, 0, 0, &desc);
    desc.workers = 1;               /* so that --timeout also covers opening */
    desc.timeout_ms = (int32_t)(r->set.timeout * 1000 + 0.5);
    if (amp_loader_create(r->amp, &probe, &desc) != AMP_OK) return flag_refuse("data", "%s", amp_last_error());
    result = amp_loader_info_get(probe, &r->info);
    amp_loader_destroy(probe);
    return result;
}

/* Opens --tokenizer, and turns text data into a token file. */
static amp_result open_tokenizer(run *r) {
    const char *comma = strchr(r->set.tokenizer, ',');
    char vocab[PATH_MAX], tokens[PATH_MAX], why[400];
    glob_t found;
    amp_result result = AMP_OK;
    if (comma == NULL || comma[1] == 0) return flag_refuse("tokenizer", "takes two files, vocab.json and merges.txt");
    snprintf(vocab, sizeof vocab, "%.*s", (int)(comma - r->set.tokenizer < 4000 ? comma - r->set.tokenizer : 4000),
             r->set.tokenizer);
    if (ex_st(bpe_open(&r->tokenizer, vocab, comma + 1)) != AMP_OK)
        return flag_refuse("tokenizer", "%s", ex_because(why));
    if (r->info.format != AMP_TOKENS_BYTES) return AMP_OK;
    snprintf(tokens, sizeof tokens, "%.4000s/tokens.bin", r->set.out);
    if (ranks.rank == 0) {
        char *file = r->data;
        int pattern = access(r->data, F_OK) != 0 && glob(r->data, 0, NULL, &found) == 0;
        result = ex_folder_make(tokens);
        ex_remove_unfinished(tokens);
        if (result == AMP_OK)
            result = token_files_write(&r->tokenizer, pattern ? found.gl_pathv : &file,
                                            pattern ? (int64_t)found.gl_pathc : 1, tokens);
        if (pattern) globfree(&found);
        if (result != AMP_OK) return flag_refuse("tokenizer", "%s", ex_because(why));
    }
    ranks_wait();
    memcpy(r->data, tokens, sizeof r->data);
    r->set.format = "llmc";
    return probe_data(r);
}

/* Opens the data and finds where the validation part begins. */
static amp_result open_data(run *r) {
    const settings *set = &r->set;
    int64_t validation, per_batch = set->batch * set->seq * ranks.world;
    if (*set->data != 0) snprintf(r->data, sizeof r->data, "%.4000s", set->data);
    else {
        snprintf(r->data, sizeof r->data, "%.4000s/corpus.txt", set->out);
        EX_TRY(ex_folder_make(r->data));
        if (ranks.rank == 0 && (*set->resume == 0 || access(r->data, R_OK) != 0)) EX_TRY(write_own_text(r->data));
        ranks_wait();
    }
    EX_TRY(probe_data(r));
    if (*set->tokenizer != 0) EX_TRY(open_tokenizer(r));
    validation = (int64_t)(set->validation * (double)r->info.tokens);
    if (validation < set->seq + 1) validation = set->seq + 1;
    r->split = r->info.tokens - validation;
    if (r->split < per_batch + 1)
        return flag_refuse("data",
                      "%lld tokens are too few for %lld sequences of %lld tokens and a validation part: "
                      "use a smaller --batch or --seq",
                      (long long)r->info.tokens, (long long)(set->batch * ranks.world), (long long)set->seq);
    return AMP_OK;
}

/* The model's shape: from the checkpoint, from the file of --init, or from the flags. */
typedef struct model_size { const char *name; int64_t layers, heads, channels, positions, llama; } model_size;
static const model_size model_sizes[] = {
    {"small", 4, 4, 128, 0, 0},
    {"d6", 6, 6, 384, 1024, 0},
    {"gpt2", 12, 12, 768, 1024, 0},
    {"gpt2-medium", 24, 16, 1024, 1024, 0},
    {"gpt2-large", 36, 20, 1280, 1024, 0},
    {"gpt2-xl", 48, 25, 1600, 1024, 0},
    {"d12", 12, 12, 768, 1024, 0},
    {"d24", 24, 16, 1024, 1024, 0},
    {"d36", 36, 20, 1280, 1024, 0},
    {"d48", 48, 25, 1600, 1024, 0},
    {"llama-s", 4, 4, 128, 1024, 1},
};

static amp_result shape_from_flags(const run *r, gpt_config *c) {
    const settings *set = &r->set;
    const model_size *size = model_sizes;
    while (strcmp(size->name, set->model) != 0) size++;
    c->layers = set->layers > 0 ? set->layers : size->layers;
    c->heads = set->heads > 0 ? set->heads : size->heads;
    c->channels = set->channels > 0 ? set->channels : size->channels;
    c->positions = size->positions > set->seq ? size->positions : set->seq;
    c->vocab = set->vocab > 0                       ? set->vocab
               : r->tokenizer.n > 0                 ? r->tokenizer.n
               : r->info.format == AMP_TOKENS_BYTES ? 256
                                                    : 50257;
    if (size->llama) {              /* heads in pairs, SwiGLU as wide as makes its three matrices GPT-2's two */
        c->kv_heads = c->heads % 2 == 0 ? c->heads / 2 : c->heads;
        c->hidden = (c->channels * 8 / 3 + 7) / 8 * 8;
        c->base = 10000;
        if (c->channels % (2 * c->heads) != 0)
            return flag_refuse(set->heads > 0 ? "heads" : "channels",
                               "%lld heads do not divide %lld channels evenly by two",
                          (long long)c->heads, (long long)c->channels);
    }
    if (c->channels % c->heads != 0)
        return flag_refuse(set->heads > 0 ? "heads" : "channels", "%lld heads do not divide %lld channels",
                      (long long)c->heads, (long long)c->channels);
    return AMP_OK;
}

enum { SHAPE_NUMBERS = 5 };
static amp_result shape_from_state(const amp_state *state, gpt_config *c) {
    int64_t shape[SHAPE_NUMBERS];
    EX_TRY(amp_state_get(state, "train.shape", AMP_I64, shape, SHAPE_NUMBERS));
    c->vocab = shape[0]; c->positions = shape[1]; c->channels = shape[2]; c->heads = shape[3]; c->layers = shape[4];
    return AMP_OK;
}

/* Reads what the shape does not tell.  Checkpoints of version 0.1.0 have GPT-2's own settings. */
static amp_result config_from_state(const run *r, const amp_state *state, gpt_config *c, config_model *described) {
    int64_t n = amp_state_count(state, "train.config", NULL);
    char type[16] = "";
    if (n <= 0) return AMP_OK;
    snprintf(described->path, sizeof described->path, "%.4000s.state", r->set.resume);
    described->text = (char *)calloc((size_t)n + 1, 1);
    if (described->text == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the checkpoint's config.json");
    described->bytes = (size_t)n;
    EX_TRY(amp_state_get(state, "train.config", AMP_U8, described->text, n));
    if (json_find(json_open(described->text, described->bytes), "model_type", type, sizeof type) &&
        strcmp(type, "llama") == 0)
        return gpt_read_llama(described, NULL, NULL, c);
    EX_TRY(config_check(described, &gpt_config_rules));
    return gpt_read_config(described, c);
}

/* Refuses a file whose model contradicts the flags given. */
static amp_result check_shape(const run *r, const gpt_config *file) {
    static const char *const names[] = {"layers", "heads", "channels", "vocab"};
    const settings *set = &r->set;
    const model_size *size = model_sizes;
    int i;
    while (strcmp(size->name, set->model) != 0) size++;
    for (i = 0; i < 4; i++) {
        const int64_t flags[] = {set->layers, set->heads, set->channels, set->vocab};
        const int64_t sizes[] = {size->layers, size->heads, size->channels, 0};
        const int64_t theirs[] = {file->layers, file->heads, file->channels, file->vocab};
        int64_t wanted = flag_was_given(names[i]) ? flags[i] : flag_was_given("model") ? sizes[i] : 0;
        if (flag_was_given("model") && size->llama != (file->kv_heads > 0))
            return flag_refuse("model", "the file's model is a %s", file->kv_heads > 0 ? "Llama" : "GPT-2");
        if (wanted > 0 && wanted != theirs[i])
            return flag_refuse(flag_was_given(names[i]) ? names[i] : "model", "the file's model has %s %lld", names[i],
                          (long long)theirs[i]);
    }
    return AMP_OK;
}

/* Refuses what is GPT-2's alone. */
static amp_result check_llama(const settings *set) {
    amp_dtype all, stored[GPT_TENSORS];
    int i;
    memset(stored, 0, sizeof stored);
    if (set->dropout > 0) return flag_refuse("dropout", "a Llama has none");
    if (set->profile) return flag_refuse("profile", "counts a GPT-2's operations and bytes, and this is a Llama");
    EX_TRY(read_activations(set->activations, &all, stored));
    for (i = 0; i < GPT_TENSORS; i++)
        if (i != GPT_STREAM && stored[i] != AMP_DTYPE_DEFAULT)
            return flag_refuse("activations", "a Llama's stream alone can have a dtype of its own");
    return AMP_OK;
}

static amp_result choose_fp8_layers(run *r) {
    const gpt *g = &r->model;
    return model_fp8_layers(r->amp, g->params, g->n_params, g->config.kv_heads > 0 ? "layers." : "h.", g->config.layers,
                      strcmp(r->set.fp8_blocks, "all") == 0, &r->n_fp8);
}

/* Sets the storage dtypes of activations and logits in the model's config.  auto: as autocast returns them. */
static amp_result storage_dtypes(const run *r, gpt_config *c) {
    EX_TRY(read_activations(r->set.activations, &c->activations, c->stored));
    if (c->activations == AMP_DTYPE_DEFAULT) {
        EX_TRY(amp_autocast_begin(r->amp, NULL));
        c->activations = amp_autocast_result(r->amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32);
        EX_TRY(amp_autocast_end(r->amp));
        if (c->activations == AMP_TF32) c->activations = AMP_F32;
    }
    c->logits = amp_autocast_output(r->amp, c->activations);
    return AMP_OK;
}

static amp_result open_model(run *r, const amp_state *resumed) {
    const settings *set = &r->set;
    gpt_config config;
    int from_file = *set->init != 0;
    char why[400];
    amp_result result = AMP_OK;
    memset(&config, 0, sizeof config);
    if (resumed != NULL) {
        EX_TRY(shape_from_state(resumed, &config));
        result = config_from_state(r, resumed, &config, &r->file.described);
    } else if (from_file) {
        if (gpt_file_open(&r->file, set->init) != AMP_OK) return flag_refuse("init", "%s", ex_because(why));
        config = r->file.config;
        snprintf(r->described, sizeof r->described, "%s", r->file.described.note);
    } else EX_TRY(shape_from_flags(r, &config));
    if (result == AMP_OK && (resumed != NULL || from_file)) result = check_shape(r, &config);
    if (result == AMP_OK && config.kv_heads > 0) result = check_llama(set);
    if (result == AMP_OK && r->tokenizer.n > config.vocab)
        result = flag_refuse("tokenizer", "has tokens up to %lld, the model only %lld", (long long)r->tokenizer.n - 1,
                        (long long)config.vocab);
    config.batch = set->batch;
    config.seq = set->seq;
    config.dropout = (float)set->dropout;
    config.recompute = (int32_t)set->recompute;
    config.fused_loss = (int32_t)set->fused_loss;
    if (result == AMP_OK) result = storage_dtypes(r, &config);
    if (result == AMP_OK && *set->prompt != 0 && r->tokenizer.n == 0 && config.vocab != 256)
        result = flag_refuse("prompt", "the model's tokens are not text: give --tokenizer");
    if (result == AMP_OK && config.seq > config.positions)
        result = flag_refuse("seq", "this model has %lld positions", (long long)config.positions);
    if (result == AMP_OK) result = gpt_create(&r->model, r->amp, &config);
    if (result == AMP_OK && r->choice.dtype == AMP_FP8) result = choose_fp8_layers(r);
    if (result == AMP_ERR_MEMORY) result = flag_refuse("model", "%s", ex_because(why));
    if (result == AMP_OK && resumed != NULL) result = config_take(&r->model.json, &r->file.described);
    return result;
}

/* Sets weights through the optimizer, so that masters keep full precision; a checkpoint's masters are in its state. */
static amp_result open_weights(run *r, const amp_state *resumed) {
    amp_result result;
    r->model.optimizer = r->optimizer;
    if (resumed != NULL) return gpt_load_state(&r->model, resumed);
    if (*r->set.init == 0) return gpt_init(&r->model, (uint64_t)r->set.seed);
    result = gpt_file_load(&r->file, &r->model);
    gpt_file_close(&r->file);
    return result;
}

static amp_result open_scaler(run *r) {
    amp_scaler_desc desc;
    memset(&desc, 0, sizeof desc);
    EX_TRY(amp_settings_fill(&r->set.amp, r->amp, NULL, &desc, NULL, NULL));
    if (desc.disable) return AMP_OK;
    if (amp_scaler_create(r->amp, &r->scaler, &desc) == AMP_OK) return AMP_OK;
    return ex_fail(AMP_ERR_RANGE, "the scaler's flags: %s", amp_last_error());
}

static float or_zero(double value) { return value > 0 ? (float)value : AMP_EXPLICIT_ZERO; }

static amp_result open_optimizer(run *r) {
    const settings *set = &r->set;
    amp_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    EX_TRY(amp_settings_fill(&set->amp, r->amp, NULL, NULL, &desc, NULL));
    desc.params = r->model.params;
    desc.n_params = r->model.n_params;
    desc.lr = (float)set->lr;
    desc.beta1 = or_zero(set->beta1);
    desc.beta2 = or_zero(set->beta2);
    desc.eps = or_zero(set->eps);
    desc.weight_decay = (float)set->weight_decay;
    desc.master = (amp_master_kind)ex_word_place(options[flag_index("masters")].words, set->masters);
    desc.seed = (uint64_t)set->seed;
    if (amp_optimizer_create(r->amp, &r->optimizer, &desc) == AMP_OK) return AMP_OK;
    return ex_fail(AMP_ERR_RANGE, "the optimizer's flags: %s", amp_last_error());
}

static amp_result open_loader(run *r) {
    const settings *set = &r->set;
    amp_loader_desc desc;
    amp_loader_info info;
    int64_t by_epochs;
    loader_settings(r, set->batch, 0, r->split, &desc);
    desc.world = 0;                 /* of the context: each rank its part */
    desc.shuffle = strcmp(set->shuffle, "on") == 0;
    EX_TRY(amp_settings_fill_loader(&set->amp, &desc));
    desc.timeout_ms = (int32_t)(set->timeout * 1000 + 0.5);
    desc.epochs = set->epochs;
    desc.vocab = (int32_t)r->model.config.vocab;
    if (amp_loader_create(r->amp, &r->loader, &desc) != AMP_OK) return flag_refuse("data", "%s", amp_last_error());
    EX_TRY(amp_loader_info_get(r->loader, &info));
    r->steps = set->steps >= 0 ? set->steps : set->epochs > 0 ? INT64_MAX : 1200;
    by_epochs = set->epochs * info.batches / set->accumulation;
    if (set->epochs > 0 && by_epochs < r->steps) r->steps = by_epochs;
    return AMP_OK;
}

/* A step's own buffers on the device. */
static amp_result open_step(run *r) {
    int64_t n = r->set.accumulation;
    void *memory;
    r->host_losses = (float *)malloc((size_t)n * sizeof(float));
    if (r->host_losses == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the losses");
    EX_TRY(amp_alloc(r->amp, &memory, n * (int64_t)sizeof(float)));
    r->micro_losses = (float *)memory;
    if (!r->set.graph) return AMP_OK;
    EX_TRY(amp_alloc(r->amp, &memory, n * 2 * r->set.batch * r->set.seq * (int64_t)sizeof(int32_t)));
    r->micro_tokens = (int32_t *)memory;
    return AMP_OK;
}

/* config.json beside the model.  1: the model is model.safetensors, and transformers' from_pretrained(folder) opens the
   two. */
static int config_path(const run *r, char *path, size_t size) {
    const char *slash = strrchr(r->save, '/');
    snprintf(path, size, "%.*sconfig.json", slash != NULL ? (int)(slash - r->save) + 1 : 0, r->save);
    return strcmp(slash != NULL ? slash + 1 : r->save, "model") == 0;
}

/* Removes the remains of a run killed while saving. */
static void clean_folder(const run *r) {
    static const char *const ends[] = {".state", ".safetensors"};
    char path[PATH_MAX + 16];
    int i;
    for (i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s%s", r->save, ends[i]);
        ex_remove_unfinished(path);
    }
    (void)config_path(r, path, sizeof path);
    ex_remove_unfinished(path);
}

/* Opens the files that a run writes, so that it fails at its start rather than at its end. */
static amp_result open_files(run *r) {
    const settings *set = &r->set;
    const char *save = *set->save != 0 ? set->save : set->resume;
    char why[400];
    if (ranks.rank > 0) return AMP_OK;
    if (strcmp(save, "none") == 0) r->save[0] = 0;
    else if (*save != 0) snprintf(r->save, sizeof r->save, "%.4000s", without_suffix(save));
    else snprintf(r->save, sizeof r->save, "%.4000s/model", set->out);
    if (r->save[0] != 0 && ex_folder_make(r->save) != AMP_OK) return flag_refuse("save", "%s", ex_because(why));
    if (r->save[0] != 0) clean_folder(r);
    if (strcmp(set->metrics, "none") == 0) return AMP_OK;
    if (*set->metrics != 0) snprintf(r->metrics_path, sizeof r->metrics_path, "%.4000s", set->metrics);
    else snprintf(r->metrics_path, sizeof r->metrics_path, "%.4000s/metrics.jsonl", set->out);
    if (ex_folder_make(r->metrics_path) != AMP_OK) return flag_refuse("metrics", "%s", ex_because(why));
    r->metrics.file = open_memstream(&r->metrics.text, &r->metrics.bytes);
    return r->metrics.file != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for metrics");
}

/* --precision adaptive. */
static amp_result open_adapt(run *r) {
    static const amp_dtype ladders[][3] = {
        {AMP_F32}, {AMP_BF16, AMP_F32}, {AMP_F16, AMP_F32}, {AMP_FP8, AMP_BF16, AMP_F32}};
    int lowest = ex_word_place(options[flag_index("lowest")].words, r->set.lowest);
    amp_adapt_desc desc;
    if (!r->set.adaptive) return AMP_OK;
    memset(&desc, 0, sizeof desc);
    desc.params = r->model.params;
    desc.n_params = r->model.n_params;
    desc.scaler = r->scaler;
    if (lowest > 0) { desc.ladder = ladders[lowest]; desc.n_ladder = lowest == 3 ? 3 : 2; }
    desc.budget = r->set.error_budget < 0 ? 0 : r->set.error_budget > 0 ? r->set.error_budget : AMP_EXPLICIT_ZERO;
    if (amp_adapt_create(r->amp, &r->adapt, &desc) == AMP_OK) return AMP_OK;
    return flag_refuse("precision", "adaptive: %s", amp_last_error());
}

/* Once after each step; decisions go to the metrics. */
static amp_result adapt_step(run *r) {
    amp_adapt_record record;
    char line[512];
    if (r->adapt == NULL) return AMP_OK;
    EX_TRY(amp_adapt_step(r->adapt));
    while (amp_adapt_next(r->adapt, &record)) {
        if (r->metrics.file == NULL) continue;
        (void)amp_adapt_json(&record, line, sizeof line);
        EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_write(r->monitor, line)));
    }
    return AMP_OK;
}

/* How each layer that ran ended. */
static amp_result record_layers(run *r) {
    amp_adapt_record record;
    char line[512];
    int64_t i;
    for (i = 0; r->metrics.file != NULL && amp_adapt_layer(r->adapt, i, &record) == AMP_OK; i++) {
        if (!(record.multiply_adds > 0)) continue;
        (void)amp_adapt_json(&record, line, sizeof line);
        EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_write(r->monitor, line)));
    }
    return AMP_OK;
}

/* Which layers are in what; beside the model, as a file for --config. */
static amp_result report_adapt(run *r) {
    size_t bytes = amp_adapt_text(r->adapt, NULL, 0);
    char path[PATH_MAX + 16], *text = bytes > 0 ? (char *)malloc(bytes + 1) : NULL;
    amp_result result = AMP_OK;
    if (r->adapt == NULL) return AMP_OK;
    if (text == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the layers' precision");
    (void)metrics_tolerate(&r->metrics, record_layers(r));
    (void)amp_adapt_text(r->adapt, text, bytes + 1);
    snprintf(path, sizeof path, "%s.layers.conf", r->save);
    printf("%s", text);
    if (r->save[0] != 0) result = amp_file_write_atomic(NULL, path, text, bytes);
    if (r->save[0] != 0 && result == AMP_OK) printf("saved %s\n", path);
    free(text);
    return result;
}

static int recovery_save(void *user, amp_state *state) {
    return (int)amp_state_put(state, "train.step", AMP_I64, &((run *)user)->step, 1);
}
static int recovery_load(void *user, const amp_state *state) {
    return (int)amp_state_get(state, "train.step", AMP_I64, &((run *)user)->step, 1);
}

static amp_result open_recovery(run *r) {
    amp_recovery_desc desc;
    if (r->set.amp.nan_action != AMP_NAN_RECOVER) return AMP_OK;
    memset(&desc, 0, sizeof desc);
    desc.params = r->model.params;
    desc.n_params = r->model.n_params;
    desc.optimizer = r->optimizer;
    desc.scaler = r->scaler;
    desc.loader = r->loader;
    desc.max_retries = r->set.amp.max_retries;
    desc.batch_growth_interval = r->set.amp.batch_growth_interval;
    desc.save = recovery_save;
    desc.load = recovery_load;
    desc.user = r;
    return amp_recovery_create(r->amp, &r->recovery, &desc);
}

/* Opens what watches training: metrics, statistics of tensors, and recovery. */
static amp_result open_watch(run *r) {
    const settings *set = &r->set;
    amp_monitor_desc monitor;
    amp_tensor_stats_desc stats;
    memset(&monitor, 0, sizeof monitor);
    EX_TRY(amp_settings_fill(&set->amp, r->amp, NULL, NULL, NULL, &monitor));
    if (r->metrics.file != NULL) monitor.path = r->metrics_path;
    monitor.append = *set->resume != 0;
    monitor.epoch = set->eval_interval > 0 ? r->start / set->eval_interval : 0;
    monitor.optimizer = r->optimizer;
    monitor.scaler = r->scaler;
    if (amp_monitor_create(r->amp, &r->monitor, &monitor) != AMP_OK)
        return flag_refuse("metrics", "%s", amp_last_error());
    if (*set->tensorboard != 0 && ranks.rank == 0 && board_open(&r->board, set->tensorboard) != AMP_OK) {
        char why[400];
        return flag_refuse("tensorboard", "%s", ex_because(why));
    }
    memset(&stats, 0, sizeof stats);
    stats.params = r->model.params;
    stats.n_params = r->model.n_params;
    stats.scaler = r->scaler;
    stats.interval = set->tensor_stats_interval;
    if (set->tensor_stats_interval > 0) EX_TRY(amp_tensor_stats_create(r->amp, &r->stats, &stats));
    return open_recovery(r);
}

/* Keeps a layer in fp32, also after a resume. */
static amp_result keep_fp32_layer(run *r, const char *pattern) {
    json_add(&r->fp32_layers, "%s\n", pattern);
    return r->fp32_layers.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the name of a layer") : AMP_OK;
}
static amp_result load_fp32_layers(run *r, const amp_state *state) {
    int64_t n = amp_state_count(state, "train.fp32_layers", NULL);
    char *text = n > 0 ? (char *)calloc((size_t)n + 1, 1) : NULL, *line;
    amp_result result;
    if (n <= 0) return AMP_OK;
    if (text == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the checkpoint's layers");
    result = amp_state_get(state, "train.fp32_layers", AMP_U8, text, n);
    for (line = strtok(text, "\n"); line != NULL && result == AMP_OK; line = strtok(NULL, "\n")) {
        result = amp_layer_override(r->amp, line, AMP_F32);
        if (result == AMP_OK) result = keep_fp32_layer(r, line);
    }
    free(text);
    return result;
}

/* The second half of a checkpoint; gpt_load_state was the first. */
static amp_result load_state(run *r, const amp_state *state) {
    EX_TRY(amp_state_get(state, "train.step", AMP_I64, &r->step, 1));
    EX_TRY(load_fp32_layers(r, state));
    if (amp_loader_load(r->loader, state, "loader") != AMP_OK)
        return flag_refuse("resume", "%s was trained on other data or another split: %s", r->set.resume,
                           amp_last_error());
    EX_TRY(amp_optimizer_load(r->optimizer, state, "optimizer"));
    if (r->scaler != NULL && amp_state_count(state, "scaler.scale", NULL) > 0)
        EX_TRY(amp_scaler_load(r->scaler, state, "scaler"));
    if (amp_state_count(state, "amp.fp8", NULL) > 0 && amp_fp8_load(r->amp, state, "amp") != AMP_OK)
        return flag_refuse("resume", "%s", amp_last_error());
    if (r->adapt != NULL && amp_state_count(state, "adapt.adapt", NULL) > 0)
        EX_TRY(amp_adapt_load(r->adapt, state, "adapt"));
    return amp_random_load(r->amp, state, "random");
}

static void close_run(run *r) {
    amp_graph_destroy(r->graph);
    amp_adapt_destroy(r->adapt);
    amp_monitor_destroy(r->monitor);
    amp_tensor_stats_destroy(r->stats);
    amp_recovery_destroy(r->recovery);
    board_close(&r->board);
    if (r->metrics.file != NULL) fclose(r->metrics.file);
    free(r->metrics.text);
    free(r->fp32_layers.text);
    free(r->host_losses);
    amp_free(r->amp, r->micro_losses);
    amp_free(r->amp, r->micro_tokens);
    if (r->optimizer != NULL) amp_optimizer_destroy(r->optimizer);
    if (r->scaler != NULL) amp_scaler_destroy(r->scaler);
    gpt_destroy(&r->model);
    gpt_file_close(&r->file);
    if (r->loader != NULL) amp_loader_destroy(r->loader);
    bpe_close(&r->tokenizer);
    amp_close(r->amp);
    memset(r, 0, sizeof *r);
}

static amp_result open_run(run *r, const settings *set, const amp_state *resumed) {
    memset(r, 0, sizeof *r);
    r->set = *set;
    EX_TRY(open_context(r));
    EX_TRY(open_data(r));
    EX_TRY(open_files(r));
    EX_TRY(open_model(r, resumed));
    EX_TRY(open_scaler(r));
    EX_TRY(open_optimizer(r));
    EX_TRY(open_weights(r, resumed));
    EX_TRY(open_loader(r));
    EX_TRY(open_step(r));
    EX_TRY(open_adapt(r));
    if (resumed != NULL) EX_TRY(load_state(r, resumed));
    r->start = r->step;
    EX_TRY(open_watch(r));
    if (resumed == NULL || r->recovery == NULL || amp_state_count(resumed, "train.recovery", NULL) < 0) return AMP_OK;
    return amp_recovery_load(r->recovery, resumed, "train");
}

/* ==== Checkpoints ================================================================================
   NAME.state alone is the checkpoint: it also holds the weights and is replaced in one rename, so it is always whole.
   NAME.safetensors, written after it, has the same weights for other programs. */

/* The loader's settings are left out: they belong to a session, as session_options do, and change no result. */
static amp_result put_settings(const run *r, amp_state *state) {
    char text[8192];
    amp_settings kept = r->set.amp;
    size_t bytes;
    kept.workers = kept.prefetch = kept.disable_pinned = 0;
    bytes = amp_settings_text(&kept, text, sizeof text);
    if (bytes >= sizeof text) return ex_fail(AMP_ERR_SIZE, "the settings are too long");
    return amp_state_put(state, "train.settings", AMP_U8, text, (int64_t)bytes);
}

static amp_result put_config(const run *r, amp_state *state) {
    json_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    gpt_config_text(&r->model, &b);
    result = b.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the model's config.json")
                      : amp_state_put(state, "train.config", AMP_U8, b.text, (int64_t)b.used);
    free(b.text);
    return result;
}

static amp_result put_training(run *r, amp_state *state) {
    const gpt_config *c = &r->model.config;
    int64_t shape[SHAPE_NUMBERS];
    json_buffer saved = {NULL, 0, 0, 0};
    amp_result result;
    shape[0] = c->vocab; shape[1] = c->positions; shape[2] = c->channels; shape[3] = c->heads; shape[4] = c->layers;
    write_saved_options(&saved);
    result = saved.failed ? ex_fail(AMP_ERR_MEMORY, "no memory for the options")
                          : amp_state_put(state, "train.options", AMP_U8, saved.used > 0 ? saved.text : "",
                                          (int64_t)saved.used);
    free(saved.text);
    EX_TRY(result);
    EX_TRY(put_settings(r, state));
    if (r->fp32_layers.used > 0)
        EX_TRY(amp_state_put(state, "train.fp32_layers", AMP_U8, r->fp32_layers.text, (int64_t)r->fp32_layers.used));
    EX_TRY(amp_state_put(state, "train.shape", AMP_I64, shape, SHAPE_NUMBERS));
    EX_TRY(put_config(r, state));
    EX_TRY(amp_state_put(state, "train.step", AMP_I64, &r->step, 1));
    if (r->recovery != NULL) EX_TRY(amp_recovery_save(r->recovery, state, "train"));
    EX_TRY(gpt_save_state(&r->model, state));
    EX_TRY(amp_optimizer_save(r->optimizer, state, "optimizer"));
    if (r->scaler != NULL) EX_TRY(amp_scaler_save(r->scaler, state, "scaler"));
    if (r->adapt != NULL) EX_TRY(amp_adapt_save(r->adapt, state, "adapt"));
    EX_TRY(amp_loader_save(r->loader, state, "loader"));
    EX_TRY(amp_fp8_save(r->amp, state, "amp"));
    return amp_random_save(r->amp, state, "random");
}

/* The weights for other programs. */
static amp_result save_weights(run *r) {
    char path[PATH_MAX + 16];
    if (r->save[0] == 0) return AMP_OK;
    snprintf(path, sizeof path, "%s.safetensors", r->save);
    EX_TRY(gpt_save_safetensors(&r->model, path, r->step));
    return config_path(r, path, sizeof path) ? gpt_save_config(&r->model, path) : AMP_OK;
}

static amp_result save_run(run *r) {
    char path[PATH_MAX + 16];
    amp_state *state;
    amp_result result;
    if (r->save[0] == 0) return AMP_OK;
    EX_TRY(amp_state_create(&state, NULL));
    result = put_training(r, state);
    snprintf(path, sizeof path, "%s.state", r->save);
    if (result == AMP_OK) result = amp_state_save(state, path);
    amp_state_destroy(state);
    return result == AMP_OK ? save_weights(r) : result;
}

/* 1: NAME.safetensors or its config.json is missing, or the former is damaged or of another step: the run was killed
   between two files. */
static int weights_are_old(const run *r) {
    char path[PATH_MAX + 16], step[32] = "";
    gpt_file file;
    if (r->save[0] == 0) return 0;
    snprintf(path, sizeof path, "%s.safetensors", r->save);
    if (gpt_file_open(&file, path) != AMP_OK) return 1;
    if (file.tensors.metadata.at != NULL) json_find(file.tensors.metadata, "step", step, sizeof step);
    gpt_file_close(&file);
    return atoll(step) != r->step || (config_path(r, path, sizeof path) && access(path, R_OK) != 0);
}

/* ==== Validation and the bigram entropy ========================================================== */

/* The loader of the validation part: every sample once, in order. */
static amp_result open_validation(run *r, amp_loader **out) {
    amp_loader_desc desc;
    int64_t samples = (r->info.tokens - r->split - 1) / r->set.seq;
    loader_settings(r, samples < r->set.batch ? samples : r->set.batch, r->split, r->info.tokens, &desc);
    desc.epochs = 1;
    desc.workers = AMP_NO_WORKERS;
    desc.vocab = (int32_t)r->model.config.vocab;
    return amp_loader_create(r->amp, out, &desc);
}

/* The mean loss over the validation text, in nats per token. */
static amp_result evaluate(run *r, double *loss) {
    amp_loader *loader;
    amp_batch batch;
    amp_result result;
    int64_t n = 0;
    *loss = 0;
    EX_TRY(open_validation(r, &loader));
    while ((result = amp_loader_next(loader, &batch)) == AMP_OK) {
        float one;
        result = gpt_forward_loss(&r->model, &batch, NULL, 0);
        if (result == AMP_OK) result = gpt_loss_read(&r->model, &one);
        if (result != AMP_OK) break;
        *loss += (double)one;
        if (++n == r->set.eval_batches || ex_stop_requested) break;
    }
    amp_loader_destroy(loader);
    *loss /= (double)(n > 0 ? n : 1);
    return result == AMP_ERR_END ? AMP_OK : result;
}

/* Pairs of neighbours (a, b) as a << 32 | b. */
typedef struct pairs { uint64_t *key; int64_t n; } pairs;
enum { MOST_PAIRS = 1 << 24 };

static amp_result collect_pairs(run *r, amp_loader *loader, int64_t most_batches, pairs *out) {
    amp_batch batch;
    int64_t capacity = 0, batches = 0;
    int32_t *host = NULL;
    amp_result result;
    out->key = NULL;
    out->n = 0;
    while ((result = amp_loader_next(loader, &batch)) == AMP_OK) {
        int64_t count = batch.batch * batch.seq, i;
        if (host == NULL) host = (int32_t *)malloc((size_t)count * 2 * sizeof *host);
        if (out->n + count > capacity) {
            uint64_t *more = (uint64_t *)realloc(out->key, (size_t)(capacity = capacity * 2 + count) * sizeof *more);
            if (more == NULL) { result = ex_fail(AMP_ERR_MEMORY, "no memory for bigrams"); break; }
            out->key = more;
        }
        if (host == NULL) { result = ex_fail(AMP_ERR_MEMORY, "no memory for bigrams"); break; }
        result = amp_copy(r->amp, host, batch.inputs, count * 4, AMP_COPY_TO_HOST);
        if (result == AMP_OK) result = amp_copy(r->amp, host + count, batch.targets, count * 4, AMP_COPY_TO_HOST);
        if (result == AMP_OK) result = amp_sync(r->amp);
        if (result != AMP_OK) break;
        for (i = 0; i < count; i++) out->key[out->n++] = (uint64_t)(uint32_t)host[i] << 32 | (uint32_t)host[count + i];
        if (++batches == most_batches || out->n >= MOST_PAIRS) break;
    }
    free(host);
    return result == AMP_ERR_END ? AMP_OK : result;
}

static int compare_keys(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Index of the first key that is not below `key`. */
static int64_t lower_bound(const pairs *p, uint64_t key) {
    int64_t low = 0, high = p->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (p->key[middle] < key) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Mean -log p(b | a) over `text`, of the bigram model counted on `counts` (sorted), interpolated with the unigrams
   after Witten & Bell 1991: p(b|a) = (c(a,b) + d(a) p(b)) / (c(a) + d(a)), d(a) distinct successors of a, and
   p(b) = (c(b) + 1) / (n + vocab).  exact 1: no interpolation, p(b|a) = c(a,b) / c(a). */
static amp_result bigram_entropy(const pairs *counts, const pairs *text, int64_t vocab, int exact, double *entropy) {
    double *single = (double *)calloc((size_t)vocab * 3, sizeof *single), *context, *distinct, sum = 0;
    int64_t i;
    if (single == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for bigrams");
    context = single + vocab;
    distinct = context + vocab;
    for (i = 0; i < counts->n; i++) {
        uint64_t key = counts->key[i];
        single[key & 0xffffffffu] += 1;
        context[key >> 32] += 1;
        if (i == 0 || counts->key[i - 1] != key) distinct[key >> 32] += 1;
    }
    for (i = 0; i < text->n; i++) {
        uint64_t key = text->key[i];
        double pair = (double)(lower_bound(counts, key + 1) - lower_bound(counts, key));
        double alone = (single[key & 0xffffffffu] + 1) / ((double)counts->n + (double)vocab);
        double c = context[key >> 32], d = exact ? 0 : distinct[key >> 32] > 0 ? distinct[key >> 32] : 1;
        sum -= log((pair + d * alone) / (c + d));
    }
    free(single);
    *entropy = sum / (double)(text->n > 0 ? text->n : 1);
    return AMP_OK;
}

/* r->bigram and r->bigram_best, over exactly the tokens that evaluate predicts. */
static amp_result measure_bigrams(run *r) {
    pairs train = {NULL, 0}, text = {NULL, 0};
    amp_loader_desc desc;
    amp_loader *loader;
    amp_result result;
    char why[400];
    loader_settings(r, 1, 0, r->split, &desc);
    desc.epochs = 1;
    desc.workers = AMP_NO_WORKERS;
    desc.vocab = (int32_t)r->model.config.vocab;
    EX_TRY(amp_loader_create(r->amp, &loader, &desc));
    result = collect_pairs(r, loader, 0, &train);
    amp_loader_destroy(loader);
    if (result == AMP_ERR_LABEL) result = flag_refuse("vocab", "%s", ex_because(why));
    if (result == AMP_OK) result = open_validation(r, &loader);
    if (result == AMP_OK) {
        result = collect_pairs(r, loader, r->set.eval_batches, &text);
        amp_loader_destroy(loader);
    }
    if (result == AMP_OK) {
        qsort(train.key, (size_t)train.n, sizeof *train.key, compare_keys);
        qsort(text.key, (size_t)text.n, sizeof *text.key, compare_keys);
        result = bigram_entropy(&train, &text, r->model.config.vocab, 0, &r->bigram);
    }
    if (result == AMP_OK) result = bigram_entropy(&text, &text, r->model.config.vocab, 1, &r->bigram_best);
    free(train.key);
    free(text.key);
    return result;
}

/* ==== Training =================================================================================== */

/* How gradients and weights fit their format, at an interval. */
static amp_result look_at_numbers(run *r) {
    amp_tensor_stats_report report;
    EX_TRY(amp_tensor_stats_step(r->stats, &report));
    if (!report.due) return AMP_OK;
    snprintf(r->note, sizeof r->note, "step %lld: %s", (long long)(r->step + 1), report.text);
    metrics_begin(r->metrics.file, "tensor_stats");
    metrics_integer(r->metrics.file, "step", r->step + 1);
    metrics_text(r->metrics.file, "text", report.text);
    if (report.first_bad != NULL) metrics_text(r->metrics.file, "first_bad", report.first_bad);
    if (report.worst != NULL) metrics_text(r->metrics.file, "worst", report.worst);
    metrics_line_end(&r->metrics, r->monitor);
    return AMP_OK;
}

/* Where the time of training goes; validation and the sample are not counted. */
static profile *profile_of(run *r) { return r->set.profile ? &r->profile : NULL; }

/* One micro-batch: forward in a region, backward from the loss scale, and amp_step, which with the last one of a step
   checks, clips, updates the weights and moves the scale. */
static amp_result micro_step(run *r, int64_t micro, const amp_batch *batch) {
    profile *p = profile_of(r);
    EX_TRY(amp_tape_time(r->model.tape, p != NULL));
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_FORWARD));
    EX_TRY(gpt_forward_loss(&r->model, batch, amp_scaler_scale_ptr(r->scaler), 1));
    if (p != NULL) profile_tape(p, r->model.tape, 0, r->model.head->name);
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_BACKWARD));
    EX_TRY(gpt_backward(&r->model));
    if (p != NULL) profile_tape(p, r->model.tape, 1, r->model.head->name);
    EX_TRY(amp_copy(r->amp, r->micro_losses + micro, r->model.loss_value, (int64_t)sizeof(float), AMP_COPY_ON_DEVICE));
    if (r->stats != NULL && micro + 1 == r->set.accumulation) EX_TRY(look_at_numbers(r));
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_OPTIMIZER));
    TIMED(p, r->amp, PROFILE_OPTIMIZER, 0, amp_step(r->optimizer, r->scaler));
    return AMP_OK;
}

/* The next batch; with --graph copied to where the graph reads it. */
static amp_result next_batch(run *r, int64_t micro, amp_batch *batch) {
    profile *p = profile_of(r);
    int64_t n = r->set.batch * r->set.seq, bytes = n * (int64_t)sizeof(int32_t);
    int32_t *tokens;
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_DATA));
    TIMED(p, r->amp, PROFILE_LOADER, 0, amp_loader_next(r->loader, batch));
    if (micro == 0) { r->epoch = batch->epoch; r->index = batch->index; }
    if (r->micro_tokens == NULL) return AMP_OK;
    tokens = r->micro_tokens + 2 * n * micro;
    EX_TRY(amp_copy(r->amp, tokens, batch->inputs, bytes, AMP_COPY_ON_DEVICE));
    EX_TRY(amp_copy(r->amp, tokens + n, batch->targets, bytes, AMP_COPY_ON_DEVICE));
    batch->inputs = tokens;
    batch->targets = tokens + n;
    return AMP_OK;
}

/* The first step of a session runs as it is, so that everything a graph needs is there; the second is captured. */
static amp_result graph_step(run *r) {
    int64_t micro, n = r->set.accumulation;
    amp_batch batch;
    for (micro = 0; micro < n; micro++) EX_TRY(next_batch(r, micro, &batch));
    if (r->graph == NULL) {
        EX_TRY(amp_graph_begin(r->amp));
        for (micro = 0; micro < n; micro++) {
            batch.inputs = r->micro_tokens + 2 * micro * r->set.batch * r->set.seq;
            batch.targets = batch.inputs + r->set.batch * r->set.seq;
            EX_TRY(micro_step(r, micro, &batch));
        }
        EX_TRY(amp_graph_end(r->amp, &r->graph));
    }
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_OTHER));
    return amp_graph_launch(r->graph);
}

/* The mean over a step's micro-batches.  Waits for the device.  Takes no memory: a completed step must not be repeated
   because its loss could not be read. */
static amp_result read_loss(run *r, float *loss) {
    int64_t micro, n = r->set.accumulation;
    double sum = 0;
    EX_TRY(amp_copy(r->amp, r->host_losses, r->micro_losses, n * (int64_t)sizeof(float), AMP_COPY_TO_HOST));
    EX_TRY(amp_sync(r->amp));
    for (micro = 0; micro < n; micro++) sum += (double)r->host_losses[micro];
    *loss = (float)(sum / (double)n);
    return AMP_OK;
}

/* One optimizer step.  loss: its mean over the micro-batches, or NULL; log 1: also over the ranks, and for the
   metrics. */
static amp_result train_step(run *r, float lr, float *loss, int log) {
    int64_t micro;
    double began = ex_seconds();
    amp_batch batch;
    amp_step_info info;
    r->epoch = -1;
    EX_TRY(amp_optimizer_set_lr(r->optimizer, lr));
    if (r->set.graph && r->step > r->start) EX_TRY(graph_step(r));
    else
        for (micro = 0; micro < r->set.accumulation; micro++) {
            EX_TRY(next_batch(r, micro, &batch));
            EX_TRY(micro_step(r, micro, &batch));
        }
    if (loss != NULL) EX_TRY(read_loss(r, loss));
    if (log) *loss = ranks_combine(*loss, AMP_REDUCE_SUM) / (float)ranks.world;
    memset(&info, 0, sizeof info);
    info.loss = log ? (double)*loss : 0;
    info.no_loss = !log;
    info.tokens = r->set.batch * r->set.seq * r->set.accumulation * ranks.world;
    EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_step(r->monitor, &info)));
    EX_TRY(adapt_step(r));
    r->profile.all += ex_seconds() - began;
    r->profile.steps++;
    return AMP_OK;
}

static double tokens_per_second(const run *r) {
    double tokens = (double)(r->step - r->start) * (double)(r->set.batch * r->set.seq * r->set.accumulation) *
                    ranks.world;
    return r->busy > 0 ? tokens / r->busy : 0;
}

static void print_note(run *r, progress *bar) {
    if (r->note[0] == 0) return;
    progress_clear(bar);
    printf("%s\n", r->note);
    r->note[0] = 0;
}

static void print_memory(progress *bar, const amp_step_record *record) {
    const amp_memory_info *m = &record->memory;
    progress_clear(bar);
    printf("step %lld: memory %.1f MiB, %.1f MiB reserved, %.1f MiB at most; optimizer %.1f, cast cache %.1f\n",
           (long long)record->result.step, (double)m->allocated / 1048576, (double)m->reserved / 1048576,
           (double)m->peak / 1048576, (double)m->optimizer / 1048576, (double)m->cast_cache / 1048576);
}

static void board_record_of(run *r, const amp_step_record *record) {
    int64_t step = record->result.step;
    if (amp_is_finite_f64(&record->loss)) board_scalar(&r->board, step, "train/loss", record->loss);
    if (record->has_memory)
        board_scalar(&r->board, step, "memory/allocated_mib", (double)record->memory.allocated / 1048576);
    if (r->set.log_interval == 0 || step % r->set.log_interval != 0) return;
    board_scalar(&r->board, step, "train/lr", record->result.lr);
    board_scalar(&r->board, step, "train/norm", (double)record->result.norm);
    board_scalar(&r->board, step, "train/scale", (double)record->result.scale);
    board_scalar(&r->board, step, "train/tokens_per_s", record->tokens_per_second);
}

/* Reports a recovery on the screen and in the metrics. */
static void report_event(run *r, progress *bar, const amp_recovery_event *event) {
    progress_clear(bar);
    printf("%s\n", event->text);
    metrics_begin(r->metrics.file, "recovery");
    metrics_integer(r->metrics.file, "step", r->step);
    metrics_text(r->metrics.file, "dtype", amp_dtype_name(event->dtype));
    metrics_text(r->metrics.file, "text", event->text);
    metrics_line_end(&r->metrics, r->monitor);
    if (event->action == AMP_RECOVERY_STOP) snprintf(r->anomaly, sizeof r->anomaly, "%s", event->text);
}

/* Keeps a recovery's changes in the run's settings, and so in checkpoints: its dtype and, as nothing is scaled without
   fp16, no --scaler on. */
static amp_result keep_cure(run *r, const amp_recovery_event *event) {
    if (event->mitigation == AMP_MITIGATE_LAYERS) return keep_fp32_layer(r, event->layer);
    if (event->mitigation != AMP_MITIGATE_DTYPE) return AMP_OK;
    r->set.amp.dtype = event->dtype;
    if (r->set.amp.use_scaler == AMP_SCALER_USE_ON) r->set.amp.use_scaler = AMP_SCALER_USE_AUTO;
    return AMP_OK;
}

/* Changes the micro-batch's size and the number per step from batch `index` of r->epoch on; the library has already
   changed its accumulation. */
static amp_result change_batch(run *r, int64_t batch, int64_t accumulation, int64_t index) {
    static char text[24];
    r->set.batch = batch;
    r->set.accumulation = accumulation;
    r->set.amp.accumulation = (int32_t)accumulation;
    r->index = index;
    snprintf(text, sizeof text, "%lld", (long long)batch);
    flag_given.text[flag_index("batch")] = text;       /* for the checkpoint */
    amp_graph_destroy(r->graph);
    free(r->host_losses);
    amp_free(r->amp, r->micro_losses);
    amp_free(r->amp, r->micro_tokens);
    amp_loader_destroy(r->loader);
    r->graph = NULL; r->micro_losses = r->host_losses = NULL; r->micro_tokens = NULL; r->loader = NULL;
    EX_TRY(gpt_reshape(&r->model, batch, r->model.config.activations));
    EX_TRY(open_step(r));
    EX_TRY(open_loader(r));
    EX_TRY(amp_loader_seek(r->loader, r->epoch, index));
    return amp_recovery_batch(r->recovery, r->loader);      /* its snapshots are of the old batches */
}

/* Halves the micro-batch and repeats the step that ran out of memory from its first one. */
static amp_result halve_batch(run *r) {
    if (r->epoch < 0) return ex_fail(AMP_ERR_MEMORY, "no memory to read a batch");
    if (r->set.batch % 2 != 0)
        return ex_fail(AMP_ERR_MEMORY, "no memory for a micro-batch of %lld sequences", (long long)r->set.batch);
    return change_batch(r, r->set.batch / 2, r->set.accumulation * 2, r->index * 2);
}

/* Handles a step or a batch that ran out of memory: repeats it after a cleanup, or in smaller micro-batches.  There may
   be no loader. */
static amp_result answer_memory(run *r, progress *bar) {
    amp_result result = AMP_ERR_MEMORY;
    amp_recovery_event event;
    int tries;
    for (tries = 0; tries < 3 && result == AMP_ERR_MEMORY; tries++) {
        EX_TRY(amp_recovery_memory(r->recovery, &event));
        report_event(r, bar, &event);
        if (event.action == AMP_RECOVERY_STOP) return AMP_OK;
        if (event.action == AMP_RECOVERY_HALVE_BATCH) result = halve_batch(r);
        else if (r->loader == NULL) result = change_batch(r, r->set.batch, r->set.accumulation, r->index);
        else return r->epoch >= 0 ? amp_loader_seek(r->loader, r->epoch, r->index) : AMP_OK;
        if (r->loader != NULL) break;
    }
    return result;
}

/* Doubles the micro-batch again, from the next step on. */
static amp_result double_batch(run *r, progress *bar) {
    amp_loader_info info;
    amp_result result;
    EX_TRY(amp_loader_info_get(r->loader, &info));
    r->epoch = info.epoch;
    result = change_batch(r, r->set.batch * 2, r->set.accumulation / 2, info.index / 2);
    return result == AMP_ERR_MEMORY ? answer_memory(r, bar) : result;
}

/* Applies --nan-action to a record.  Another precision also changes the storage of activations. */
static amp_result answer_trouble(run *r, progress *bar, const amp_step_record *record) {
    amp_recovery_event event;
    gpt_config now = r->model.config;
    if (r->anomaly[0] != 0) return AMP_OK;
    if (r->recovery == NULL) {
        if (record->action == AMP_NAN_STOP)
            snprintf(r->anomaly, sizeof r->anomaly, "stopped by --nan-action stop after an anomaly at step %lld",
                     (long long)record->result.step);
        return AMP_OK;
    }
    EX_TRY(amp_recovery_step(r->recovery, record, &event));
    if (event.action == AMP_RECOVERY_NONE) return AMP_OK;
    report_event(r, bar, &event);
    if (event.action == AMP_RECOVERY_DOUBLE_BATCH) return double_batch(r, bar);
    EX_TRY(keep_cure(r, &event));
    amp_graph_destroy(r->graph);
    r->graph = NULL;
    EX_TRY(amp_query_choice(r->amp, &r->choice));
    if (event.mitigation == AMP_MITIGATE_DTYPE) EX_TRY(choose_fp8_layers(r));
    EX_TRY(storage_dtypes(r, &now));
    if (now.activations == r->model.config.activations && now.logits == r->model.config.logits) return AMP_OK;
    r->model.config.logits = now.logits;
    return gpt_reshape(&r->model, r->set.batch, now.activations);
}

/* Records arrive two steps late, in order, one per step.  This is where a program waits for a slow GPU. */
static amp_result take_records(run *r, progress *bar) {
    amp_step_record record;
    while (amp_monitor_next(r->monitor, &record)) {
        r->result = record.result;
        r->results++;
        board_record_of(r, &record);
        if (r->set.log_memory && record.has_memory) print_memory(bar, &record);
        EX_TRY(answer_trouble(r, bar, &record));
    }
    return AMP_OK;
}

/* Keeps validation out of the training's times: it comes between two of the monitor's epochs. */
static amp_result end_epoch(run *r) {
    amp_epoch_record record;
    if (r->epoch_steps == 0) return AMP_OK;
    r->epoch_steps = 0;
    memset(&record, 0, sizeof record);
    EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_epoch(r->monitor, &record)));
    if (record.peak > r->peak) r->peak = record.peak;
    return AMP_OK;
}

static void show_progress(run *r, progress *bar, float loss, int last) {
    char text[200], rate[32], eta[32];
    double done = (double)(r->step - r->start);
    progress_duration(done > 0 ? (double)(r->steps - r->step) * r->busy / done : 0, eta, sizeof eta);
    snprintf(text, sizeof text, "step %lld/%lld | loss %.4f | norm %.3f | scale %g | %s tok/s | ETA %s",
             (long long)r->step, (long long)r->steps, (double)loss, (double)r->result.norm,
             r->results > 0 ? (double)r->result.scale : 1.0,
             progress_grouped((int64_t)tokens_per_second(r), rate, sizeof rate), eta);
    progress_show(bar, r->step, text, last);
}

static amp_result report_validation(run *r, progress *bar, double *loss) {
    EX_TRY(end_epoch(r));
    EX_TRY(evaluate(r, loss));
    progress_clear(bar);
    printf("step %lld: validation loss %.4f\n", (long long)r->step, *loss);
    metrics_begin(r->metrics.file, "validation");
    metrics_integer(r->metrics.file, "step", r->step);
    metrics_number(r->metrics.file, "loss", *loss);
    metrics_number(r->metrics.file, "bigram", r->bigram);
    metrics_line_end(&r->metrics, r->monitor);
    board_scalar(&r->board, r->step, "validation/loss", *loss);
    return AMP_OK;
}

static amp_result report_save(run *r, progress *bar) {
    if (r->save[0] == 0) return AMP_OK;
    EX_TRY(save_run(r));
    progress_clear(bar);
    printf("step %lld: saved %s.safetensors and %s.state\n", (long long)r->step, r->save, r->save);
    return AMP_OK;
}

/* A checkpoint during training.  Takes pending records first: their lines must be in the metrics, as a resumed run
   writes only later ones, and steps that a recovery undoes are not saved. */
static amp_result save_between(run *r, progress *bar) {
    int64_t step = r->step;
    EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_flush(r->monitor)));
    EX_TRY(take_records(r, bar));
    return r->step == step ? report_save(r, bar) : AMP_OK;
}

/* 1: stopped by Ctrl-C on any rank, or by --stop-after before the end. */
static int stopped(const run *r) {
    if (ranks_combine((float)ex_stop_requested, AMP_REDUCE_MAX) > 0) ex_stop_requested = 1;
    return ex_stop_requested || (r->set.stop_after > 0 &&
                                 r->step - r->start >= r->set.stop_after && r->step < r->steps);
}

/* A run that is shorter than its warmup ends within it. */
static amp_schedule schedule_of(const run *r) {
    const settings *set = &r->set;
    amp_schedule s;
    memset(&s, 0, sizeof s);
    s.kind = strcmp(set->schedule, "constant") == 0 ? AMP_SCHEDULE_CONSTANT : AMP_SCHEDULE_COSINE;
    s.lr = set->lr > 0 ? set->lr : AMP_EXPLICIT_ZERO;
    if (s.kind == AMP_SCHEDULE_COSINE) s.min_lr = set->min_lr >= 0 ? set->min_lr : 0.1 * set->lr;
    s.warmup = set->warmup;
    s.steps = r->steps > set->warmup ? r->steps : set->warmup;
    return s;
}

/* Trains up to r->steps, the end of the data, an anomaly, or Ctrl-C. */
static amp_result train_steps(run *r, progress *bar, int quiet) {
    const settings *set = &r->set;
    amp_schedule schedule = schedule_of(r);
    double shown = 0, loss_at_eval, lr;
    float loss = 0;
    amp_result result = AMP_OK;
    while (r->step < r->steps && r->anomaly[0] == 0 && !stopped(r)) {
        int64_t next = r->step + 1;
        double began = ex_seconds();
        int log = (set->log_interval > 0 && next % set->log_interval == 0) || next == r->steps;
        int show = log || (bar->terminal && began - shown > 1);
        if (r->step == r->start + 1) memset(&r->profile, 0, sizeof r->profile);     /* the first step is a warm-up */
        EX_TRY(amp_schedule_lr(&schedule, r->step, &lr));
        result = train_step(r, (float)lr, show ? &loss : NULL, log);
        if (result == AMP_ERR_MEMORY && r->recovery != NULL && ranks.world == 1) {
            EX_TRY(answer_memory(r, bar));
            result = AMP_OK;
            continue;
        }
        if (result != AMP_OK) break;
        if (show) r->losses[next % 64] = loss;
        r->step = next;
        r->epoch_steps++;
        print_note(r, bar);
        EX_TRY(take_records(r, bar));
        r->busy += ex_seconds() - began;
        if (show) { show_progress(r, bar, loss, next == r->steps && !quiet); shown = ex_seconds(); }
        if (quiet || next == r->steps || r->step != next) continue;
        if (set->eval_interval > 0 && next % set->eval_interval == 0) EX_TRY(report_validation(r, bar, &loss_at_eval));
        if (set->save_interval > 0 && next % set->save_interval == 0) EX_TRY(save_between(r, bar));
    }
    return result == AMP_ERR_END ? AMP_OK : result;
}

/* Trains as train_steps does.  The last records arrive after it: if they ask for recovery, r->step becomes the
   snapshot's, and the undone steps are trained again.  quiet 1: only the bar. */
static amp_result train(run *r, progress *bar, int quiet) {
    amp_result result;
    int64_t last;
    do {
        result = train_steps(r, bar, quiet);
        last = r->step;
        progress_clear(bar);
        EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_flush(r->monitor)));
        EX_TRY(take_records(r, bar));
    } while (result == AMP_OK && r->step < last);
    EX_TRY(end_epoch(r));
    return result;
}

/* ==== Reports ==================================================================================== */

static void print_machine(const run *r) {
    amp_machine machine;
    char text[4096];
    if (amp_query_machine(r->amp, &machine) != AMP_OK) return;
    amp_machine_text(&machine, text, sizeof text);
    printf("Machine\n%s\n", text);
}

static const char *const level_names[] = {"O0", "O1", "O2", "O3"};

static void print_scaler(const run *r) {
    static const char *const presets[] = {"default", "torch",   "apex",    "megatron", "deepspeed", "deepspeed_fused",
                                          "fairseq", "metaseq", "flax",    "keras"};
    amp_scaler_desc desc;
    if (r->scaler == NULL || amp_scaler_query(r->scaler, &desc) != AMP_OK) {
        printf("  scaler      no");
        flag_print_without_effect(scaler_options);
        printf("\n");
        return;
    }
    printf("  scaler      yes: preset %s, first scale %g, ", presets[desc.preset], (double)desc.init_scale);
    if (desc.frozen) printf("static\n");
    else
        printf("times %g after %d clean steps, times %g after an overflow\n", desc.growth_factor,
               (int)desc.growth_interval, desc.backoff_factor);
}

static void print_run(const run *r) {
    static const char *const levels[] = {"O0: fp32 throughout", "O1: fp32 weights, operators cast",
                                         "O2: 16-bit weights with fp32 masters", "O3: 16-bit weights, no masters"};
    const gpt_config *c = &r->model.config;
    const settings *set = &r->set;
    amp_parameter_bytes bytes;
    char a[32], b[32], d[32];
    int i;
    int64_t per_step = set->batch * set->seq * set->accumulation * ranks.world;
    printf("Run\n  precision   %s: %s\n", amp_dtype_name(r->choice.dtype), r->choice.reason);
    if (r->choice.dtype == AMP_FP8)
        printf("  fp8         %d weights of the %s blocks; the others in bf16\n", r->n_fp8, set->fp8_blocks);
    print_scaler(r);
    printf("  level       %s\n", levels[r->level - AMP_LEVEL_O0]);
    printf("  storage     weights %s, activations %s, ", amp_dtype_name(r->model.params[0].weight.dtype),
           amp_dtype_name(c->activations));
    for (i = GPT_NORM; i < GPT_TENSORS; i++)
        if (c->stored[i] != AMP_DTYPE_DEFAULT && c->stored[i] != c->activations)
            printf("%s %s, ", gpt_tensor_names[i], amp_dtype_name(c->stored[i]));
    if (gpt_dtype(c, GPT_STREAM) != AMP_F32)
        printf("residual stream %s, gradients fp32\n", amp_dtype_name(gpt_dtype(c, GPT_STREAM)));
    else printf("residual stream and gradients fp32\n");
    printf("  activations %.1f MiB with %sgradients%s\n", (double)r->model.memory_bytes / 1048576,
           c->fused_loss ? "" : "logits and ",
           c->recompute ? ": one block's, and each block runs again in backward" : "");
    if (amp_optimizer_bytes(r->optimizer, &bytes) == AMP_OK)
        printf("  parameters  %.4g bytes each: weight %.4g, gradient %.4g, master %.4g, moments %.4g\n", bytes.total,
               bytes.weight, bytes.gradient, bytes.master, bytes.moments);
    printf("  model       %s, %lld layers, %lld heads, %lld channels, %lld tokens: %s parameters\n",
           c->kv_heads > 0 ? "Llama" : "GPT-2", (long long)c->layers, (long long)c->heads, (long long)c->channels,
           (long long)c->vocab,
           progress_grouped(r->model.own.count, a, sizeof a));
    if (r->described[0] != 0) printf("  config.json %s\n", r->described);
    if (ranks.world > 1) printf("  ranks       %d\n", (int)ranks.world);
    if (r->tokenizer.n > 0)
        printf("  tokenizer   %s: %s tokens\n", set->tokenizer, progress_grouped(r->tokenizer.n, a, sizeof a));
    printf("  data        %s: %s tokens, %s to train on, %s to validate\n", r->data,
           progress_grouped(r->info.tokens, a, sizeof a), progress_grouped(r->split, b, sizeof b),
           progress_grouped(r->info.tokens - r->split, d, sizeof d));
    printf("  steps       %s of %lld x %lld x %lld tokens: %.1f epochs\n", progress_grouped(r->steps, a, sizeof a),
           (long long)set->accumulation, (long long)set->batch, (long long)set->seq,
           (double)r->steps * (double)per_step / (double)r->split);
    printf("  files       %s%s%s%s\n", r->save[0] ? r->save : "no checkpoint", r->save[0] ? ".safetensors, .state" : "",
           r->metrics.file ? ", " : "", r->metrics_path);
    printf("  bigrams     %.4f nats on the validation text, counted on the training text (Witten-Bell);\n"
           "              %.4f if counted on the validation text itself\n\n", r->bigram, r->bigram_best);
}

static void metrics_run(run *r) {
    metrics_begin(r->metrics.file, "run");
    metrics_text(r->metrics.file, "version", AMP_VERSION_TEXT);
    metrics_text(r->metrics.file, "precision", amp_dtype_name(r->choice.dtype));
    metrics_text(r->metrics.file, "reason", r->choice.reason);
    metrics_text(r->metrics.file, "level", level_names[r->level - AMP_LEVEL_O0]);
    metrics_integer(r->metrics.file, "scaler", r->scaler != NULL);
    metrics_integer(r->metrics.file, "parameters", r->model.own.count);
    metrics_integer(r->metrics.file, "activation_bytes", r->model.memory_bytes);
    metrics_text(r->metrics.file, "data", r->data);
    metrics_integer(r->metrics.file, "tokens", r->info.tokens);
    metrics_integer(r->metrics.file, "step", r->start);
    metrics_integer(r->metrics.file, "steps", r->steps);
    metrics_number(r->metrics.file, "bigram", r->bigram);
    metrics_number(r->metrics.file, "bigram_best", r->bigram_best);
    metrics_line_end(&r->metrics, r->monitor);
}

static void print_result(const run *r, double loss) {
    amp_memory_info memory;
    printf("\nResult\n  validation  %.4f nats per token\n  bigrams     %.4f nats: the model is %s\n", loss, r->bigram,
           loss < r->bigram ? "better: it has learned more than pairs" : "not better yet: train longer");
    if (amp_memory(r->amp, &memory) == AMP_OK)
        printf("  memory      %.1f MiB at most, %.1f MiB of it for the optimizer\n",
               (double)(memory.peak > r->peak ? memory.peak : r->peak) / 1048576,
               (double)memory.optimizer / 1048576);
    printf("  skipped     %lld of %lld steps\n", (long long)r->result.total_skips, (long long)r->step);
}

/* The effect of a 16-bit residual stream on the loss: the same weights and text with an fp32 one. */
static amp_result print_stream(run *r, double loss) {
    gpt_config *c = &r->model.config;
    amp_dtype stream = gpt_dtype(c, GPT_STREAM);
    double wide;
    if (stream == AMP_F32) return AMP_OK;
    amp_graph_destroy(r->graph);                /* it uses memory that is about to be freed */
    r->graph = NULL;
    c->stored[GPT_STREAM] = AMP_F32;
    EX_TRY(gpt_reshape(&r->model, c->batch, c->activations));
    EX_TRY(evaluate(r, &wide));
    c->stored[GPT_STREAM] = stream;
    printf("  stream      in fp32 the same weights have %.6f, in %s %.6f: a difference of %+.6f\n", wide,
           amp_dtype_name(stream), loss, loss - wide);
    metrics_begin(r->metrics.file, "stream");
    metrics_text(r->metrics.file, "dtype", amp_dtype_name(stream));
    metrics_number(r->metrics.file, "loss", loss);
    metrics_number(r->metrics.file, "loss_fp32", wide);
    metrics_line_end(&r->metrics, r->monitor);
    return gpt_reshape(&r->model, c->batch, c->activations);
}

/* Length of the UTF-8 character at text: 1 to 4, or 0 if there is none, or a control character. */
static int utf8_length(const char *text) {
    unsigned char c = (unsigned char)text[0];
    int n = c >= 0xf0 && c < 0xf5 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1, i;
    if (c == '\n' || c == '\t' || (c >= 0x20 && c < 0x7f)) return 1;
    if (n == 1 || c >= 0xf5) return 0;
    for (i = 1; i < n; i++) if (((unsigned char)text[i] & 0xc0) != 0x80) return 0;
    return n;
}

static void print_text(run *r, const char *text) {
    int64_t i;
    for (i = 0; text[i] != 0; i += utf8_length(text + i) > 1 ? utf8_length(text + i) : 1)
        if (utf8_length(text + i) > 0) printf("%.*s", utf8_length(text + i), text + i);
        else putchar('?');
    metrics_begin(r->metrics.file, "sample");
    metrics_text(r->metrics.file, "text", text);
    metrics_line_end(&r->metrics, r->monitor);
}

/* 1: the model's tokens are bytes. */
static int has_bytes(const run *r) { return r->tokenizer.n == 0 && r->model.config.vocab == 256; }

/* The tokens as text; NULL if they are not text, or without memory.  Zeros become spaces. */
static char *tokens_text(const run *r, const int32_t *tokens, int64_t n) {
    int64_t i, k, length, bytes = 0, used = 0;
    char *text;
    if (r->tokenizer.n == 0 && !has_bytes(r)) return NULL;
    for (i = 0; i < n; bytes += length, i++)
        if (has_bytes(r)) length = 1;
        else bpe_text(&r->tokenizer, tokens[i], &length);
    text = (char *)malloc((size_t)bytes + 1);
    for (i = 0; i < n && text != NULL; i++) {
        char byte = (char)tokens[i];
        const char *piece = &byte;
        length = 1;
        if (!has_bytes(r)) piece = bpe_text(&r->tokenizer, tokens[i], &length);
        for (k = 0; k < length; k++) text[used++] = piece[k] != 0 ? piece[k] : ' ';
    }
    if (text != NULL) text[used] = 0;
    return text;
}

/* The sample's first tokens: the prompt, or the separator of texts.  tokens: space for the prompt's bytes, at least
   1. */
static amp_result prompt_tokens(run *r, int32_t *tokens, int64_t *n) {
    const char *prompt = *r->set.prompt != 0 ? r->set.prompt : "\n";
    int64_t i, bytes = (int64_t)strlen(prompt);
    uint16_t *encoded;
    amp_result result;
    *n = 1;
    tokens[0] = (int32_t)r->model.config.vocab - 1;
    if (has_bytes(r)) for (i = 0, *n = bytes; i < bytes; i++) tokens[i] = (unsigned char)prompt[i];
    if (r->tokenizer.n == 0) return AMP_OK;
    if (*r->set.prompt == 0 && r->tokenizer.end_of_text >= 0) { tokens[0] = r->tokenizer.end_of_text; return AMP_OK; }
    encoded = (uint16_t *)malloc((size_t)bytes * sizeof *encoded);
    if (encoded == NULL) return ex_fail(AMP_ERR_MEMORY, "no memory for the prompt");
    result = ex_st(bpe_encode(&r->tokenizer, prompt, bytes, encoded, n));
    for (i = 0; i < *n && result == AMP_OK; i++) tokens[i] = encoded[i];
    free(encoded);
    return result;
}

/* Prints what the model writes: text, or the numbers of tokens. */
static amp_result print_sample(run *r) {
    const settings *set = &r->set;
    int64_t n = 0, i;
    int32_t *tokens = (int32_t *)malloc((strlen(set->prompt) + 1 + (size_t)set->sample) * sizeof *tokens);
    sampler how;
    amp_result result = tokens != NULL ? prompt_tokens(r, tokens, &n)
                                       : ex_fail(AMP_ERR_MEMORY, "no memory for the sample");
    how.temperature = set->temperature;
    how.top_k = set->top_k;
    how.seed = (uint64_t)set->seed;
    if (result == AMP_OK) result = gpt_sample(&r->model, &how, tokens, n, n + set->sample);
    if (result == AMP_OK && !ex_stop_requested) {
        char *text = tokens_text(r, tokens, n + set->sample);
        printf("\nSample (temperature %g)\n", set->temperature);
        if (text != NULL) print_text(r, text);
        else for (i = 0; i < n + set->sample; i++) printf("%d ", (int)tokens[i]);
        printf("\n");
        free(text);
    }
    free(tokens);
    return result;
}

/* ==== Where the time goes ======================================================================== */

/* GFLOP/s of amp_gemm on 1024 x 1024 matrices in the run's precision: the best of five. */
static amp_result measure_gemm(run *r, double *rate) {
    enum { SIZE = 1024 };
    const int64_t bytes = (int64_t)SIZE * SIZE * (int64_t)sizeof(float);
    void *data = NULL;
    float *host = (float *)malloc((size_t)bytes * 2);
    amp_result result = host != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for the peak");
    int i;
    *rate = 0;
    if (result == AMP_OK) ex_normal(host, 2 * SIZE * SIZE, 1, 1, 1.0f);
    if (result == AMP_OK) result = amp_alloc(r->amp, &data, 3 * bytes);
    if (result == AMP_OK) result = amp_copy(r->amp, data, host, 2 * bytes, AMP_COPY_TO_DEVICE);
    for (i = 0; i < 6 && result == AMP_OK; i++) {       /* the first is a warm-up */
        float *a = (float *)data, *b = a + SIZE * SIZE, *c = b + SIZE * SIZE;
        double began, seconds;
        amp_sync(r->amp);
        began = ex_seconds();
        EX_TRY(amp_autocast_begin(r->amp, NULL));
        result = amp_gemm(r->amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, SIZE, SIZE, SIZE, 1, a, SIZE, b, SIZE, 0,
                          c, SIZE);
        EX_TRY(amp_autocast_end(r->amp));
        if (result == AMP_OK) result = amp_sync(r->amp);
        seconds = ex_seconds() - began;
        if (i > 0 && 2e-9 * SIZE * SIZE * SIZE / seconds > *rate) *rate = 2e-9 * SIZE * SIZE * SIZE / seconds;
    }
    amp_free(r->amp, data);
    free(host);
    return result;
}

/* This CPU's peak and copies in the run's precision; rate 0 on a device. */
static amp_result measure_machine(run *r, peak_machine *machine) {
    amp_desc desc;
    EX_TRY(amp_query(r->amp, &desc));
    *machine = peak_measure(desc.backend->host_visible ? desc.cpu_path : AMP_CPU_SCALAR, r->choice.dtype, desc.threads);
    return AMP_OK;
}

/* One row of the table, of all steps.  flops: of forward and backward, 0 for none; floor: seconds, 0: unknown. */
typedef struct profile_row { const char *name; double seconds[2], flops[2], floor; } profile_row;

static void print_profile_row(run *r, const profile_row *row) {
    double steps = (double)r->profile.steps, both = row->seconds[0] + row->seconds[1], rate;
    printf("  %-16s %10.3f %10.3f %7.1f%%", row->name, 1e3 * row->seconds[0] / steps, 1e3 * row->seconds[1] / steps,
           100 * both / r->profile.all);
    metrics_begin(r->metrics.file, "profile");
    metrics_text(r->metrics.file, "operator", row->name);
    metrics_number(r->metrics.file, "forward_ms", 1e3 * row->seconds[0] / steps);
    metrics_number(r->metrics.file, "backward_ms", 1e3 * row->seconds[1] / steps);
    metrics_number(r->metrics.file, "share", both / r->profile.all);
    if (row->flops[0] > 0 && row->seconds[0] > 0 && row->seconds[1] > 0) {
        rate = 1e-9 * (row->flops[0] + row->flops[1]) / both;
        printf(" %10.1f %10.1f", 1e-9 * row->flops[0] / row->seconds[0], 1e-9 * row->flops[1] / row->seconds[1]);
        metrics_number(r->metrics.file, "gflops", rate);
    } else if (row->floor > 0) printf(" %10s %10s", "", "");
    if (row->floor > 0) {
        printf(" %10.3f %7.1f%%", 1e3 * row->floor / steps, 100 * row->floor / both);
        metrics_number(r->metrics.file, "floor_ms", 1e3 * row->floor / steps);
        metrics_number(r->metrics.file, "of_floor", row->floor / both);
    }
    metrics_line_end(&r->metrics, r->monitor);
    printf("\n");
}

/* A row's operations and floor, of all steps. */
static amp_result profile_work(run *r, const peak_machine *machine, int row, profile_row *out) {
    double times = (double)r->profile.steps * (double)r->set.accumulation;
    amp_parameter_bytes bytes;
    int pass;
    EX_TRY(amp_optimizer_bytes(r->optimizer, &bytes));
    for (pass = 0; pass < 2; pass++) {
        double flops = gpt_flops(&r->model, row) * (pass == 0 ? 1 : row == PROFILE_ATTENTION ? 2.5 : 2);
        gpt_traffic t = gpt_bytes(&r->model, row, pass, gpt_compute(&r->model));
        out->seconds[pass] = r->profile.seconds[row][pass];
        out->flops[pass] = flops * times;
        out->floor += times * peak_floor(machine, flops, t.bytes, t.calls);
    }
    if (row == PROFILE_OPTIMIZER) {
        gpt_traffic t = optimizer_traffic(&bytes);
        out->floor = (double)r->profile.steps * peak_floor(machine, 0, t.bytes, t.calls);
    }
    return AMP_OK;
}

static amp_result print_profile(run *r) {
    static const char *const names[PROFILE_ROWS] = {"loader",  "embedding", "layernorm",     "linear",   "attention",
                                                    "dropout", "lm_head",   "cross-entropy", "recompute", "optimizer"};
    profile_row rest, furthest;
    double gemm, lost = 0;
    peak_machine machine;
    int i;
    memset(&rest, 0, sizeof rest);
    memset(&furthest, 0, sizeof furthest);
    rest.name = "other";
    rest.seconds[0] = r->profile.all;
    EX_TRY(measure_machine(r, &machine));
    EX_TRY(measure_gemm(r, &gemm));
    printf("\nProfile: %lld steps of %.3f ms%s\n", (long long)r->profile.steps,
           1e3 * r->profile.all / (double)r->profile.steps, r->profile.steps > 1 ? ", without the first" : "");
    printf("  %-16s %10s %10s %8s %10s %10s %10s %8s\n", "operator", "forward ms", "backward", "of step",
           "GFLOP/s", "backward", "floor ms", "share");
    for (i = 0; i < PROFILE_ROWS; i++) {
        profile_row row;
        double both = r->profile.seconds[i][0] + r->profile.seconds[i][1];
        rest.seconds[0] -= both;
        if ((i == PROFILE_DROPOUT && r->set.dropout <= 0) || (i == PROFILE_RECOMPUTE && !r->set.recompute) ||
            (i == PROFILE_LOSS && r->set.fused_loss))           /* its time is the head's */
            continue;
        memset(&row, 0, sizeof row);
        row.name = names[i];
        EX_TRY(profile_work(r, &machine, i, &row));
        print_profile_row(r, &row);
        if (row.floor > 0 && both - row.floor > lost) { lost = both - row.floor; furthest = row; }
    }
    print_profile_row(r, &rest);
    if (furthest.name != NULL)
        printf("  furthest from its floor: %s, %.3f ms a step above it\n", furthest.name,
               1e3 * lost / (double)r->profile.steps);
    if (machine.rate > 0)
        printf("  floor: the %.1f GFLOP/s of %s, nothing else done, then a copy of as many bytes, on %d threads;\n"
               "         what is still in a cache can be faster\n", machine.rate, machine.loop.name, machine.threads);
    printf("  amp_gemm reached %.1f GFLOP/s here on 1024 x 1024 x 1024 in %s\n"
           "  linear: with bias and GELU; cross-entropy: with its gradient; optimizer: check, clipping and update\n",
           gemm, amp_dtype_name(r->choice.dtype));
    return AMP_OK;
}

/* ==== The short runs side by side ================================================================ */

typedef struct short_run {
    const char *precision;
    double rate, peak, training, validation;
    int64_t skips;
    int32_t emulated, scaler;
} short_run;

/* The same model and the same batches in another precision; the learning rate stays after a short warmup. */
static amp_result do_short_run(const settings *set, const char *precision, short_run *out) {
    settings mine = *set;
    amp_memory_info memory;
    progress bar;
    run r;
    int64_t i, n = 0;
    amp_result result;
    EX_TRY(amp_settings_set(&mine.amp, "dtype", precision));
    if (mine.amp.dtype == AMP_F32 ? mine.amp.level >= AMP_LEVEL_O2 : mine.amp.level == AMP_LEVEL_O0)
        mine.amp.level = AMP_LEVEL_O1;
    mine.amp.debug = 0;
    mine.tensor_stats_interval = mine.log_memory = mine.adaptive = 0;
    mine.save = mine.metrics = "none";
    mine.resume = mine.tensorboard = "";
    mine.steps = set->compare;
    mine.epochs = mine.stop_after = mine.profile = 0;
    mine.schedule = "constant";
    mine.masters = "auto";          /* to suit each precision */
    mine.warmup = set->compare / 5;
    mine.log_interval = 1;
    memset(out, 0, sizeof *out);
    result = open_run(&r, &mine, NULL);
    progress_open(&bar, r.steps);
    bar.every = INT64_MAX;          /* nothing in a log file */
    if (result == AMP_OK) result = train(&r, &bar, 1);
    if (result == AMP_OK) result = evaluate(&r, &out->validation);
    if (result == AMP_OK) result = amp_memory(r.amp, &memory);
    if (result == AMP_OK) {
        for (i = r.step > 10 ? r.step - 9 : 1; i <= r.step; i++, n++) out->training += (double)r.losses[i % 64];
        out->training /= (double)(n > 0 ? n : 1);
        out->precision = precision;
        out->rate = tokens_per_second(&r);
        out->peak = (double)(memory.peak > r.peak ? memory.peak : r.peak) / 1048576;
        out->skips = r.result.total_skips;
        out->emulated = r.choice.emulated;
        out->scaler = r.scaler != NULL;
    }
    close_run(&r);
    return result;
}

/* The precisions in turn, and with a 16-bit residual stream also an fp32 one in the run's precision. */
static amp_result compare_precisions(const settings *set, amp_dtype precision, FILE *metrics) {
    const char *names[] = {"fp32", "fp16", "bf16", amp_dtype_name(precision)};
    amp_dtype all, stored[GPT_TENSORS];
    double trained = 0;
    int i, n;
    EX_TRY(read_activations(set->activations, &all, stored));
    n = stored[GPT_STREAM] == AMP_F16 || stored[GPT_STREAM] == AMP_BF16 ? 4 : 3;
    printf("\nThe first %lld steps in each precision\n", (long long)set->compare);
    printf("  %-26s %10s %10s %12s %12s %8s\n", "precision", "tokens/s", "peak MiB", "train loss", "valid. loss",
           "skipped");
    for (i = 0; i < n && !ex_stop_requested; i++) {
        short_run s;
        settings mine = *set;
        char label[64], rate[32], wide[128];
        snprintf(wide, sizeof wide, "%s", set->activations);
        if (i == 3) memcpy(strstr(wide, "stream=") + strlen("stream="), "fp32", 4);
        mine.activations = wide;
        EX_TRY(do_short_run(&mine, names[i], &s));
        if (ex_stop_requested) break;
        if (i < 3 && strcmp(names[i], names[3]) == 0) trained = s.validation;
        snprintf(label, sizeof label, "%s%s%s%s", s.precision, s.scaler ? ", scaler" : "",
                 s.emulated ? ", emulated" : "", i == 3 ? ", fp32 stream" : "");
        printf("  %-26s %10s %10.1f %12.4f %12.4f %8lld\n", label, progress_grouped((int64_t)s.rate, rate, sizeof rate),
               s.peak, s.training, s.validation, (long long)s.skips);
        metrics_begin(metrics, "compare");
        metrics_text(metrics, "precision", s.precision);
        metrics_integer(metrics, "steps", set->compare);
        metrics_number(metrics, "tokens_per_s", s.rate);
        metrics_number(metrics, "peak_mib", s.peak);
        metrics_number(metrics, "train_loss", s.training);
        metrics_number(metrics, "validation_loss", s.validation);
        metrics_integer(metrics, "skips", s.skips);
        metrics_integer(metrics, "emulated", s.emulated);
        metrics_end(metrics);
        if (i == 3 && trained > 0)
            printf("  stream in %s instead of fp32: %+.4f nats of validation loss\n",
                   amp_dtype_name(stored[GPT_STREAM]), trained - s.validation);
    }
    return AMP_OK;
}

/* ==== main ======================================================================================= */

static int fail(int code) {
    if (ranks.world > 1) fprintf(stderr, "rank %d: ", (int)ranks.rank);
    fprintf(stderr, "train_gpt: %s\n", ex_error());
    ranks_end(code);
    return code;
}

/* Trains, saves, validates and samples. */
static amp_result main_run(run *r) {
    progress bar;
    double loss;
    int64_t start = r->step;
    int stop;
    print_machine(r);
    print_run(r);
    metrics_run(r);
    progress_open(&bar, r->steps);
    if (r->set.log_interval > 0)
        bar.every = (bar.every + r->set.log_interval - 1) / r->set.log_interval * r->set.log_interval;
    EX_TRY(train(r, &bar, 0));
    stop = stopped(r);
    if (r->step > start || stop || *r->set.resume == 0) EX_TRY(report_save(r, &bar));
    else if (*r->set.resume != 0 && weights_are_old(r)) EX_TRY(save_weights(r));
    if (r->set.profile && r->profile.steps > 0) EX_TRY(print_profile(r));
    if (r->anomaly[0] != 0) return ex_fail(AMP_ERR_STATE, "%s", r->anomaly);
    if (stop) {
        printf("stopped at step %lld", (long long)r->step);
        if (r->save[0] != 0) printf("; continue with --resume %s", r->save);
        printf("\n");
        return AMP_OK;
    }
    EX_TRY(report_validation(r, &bar, &loss));
    print_result(r, loss);
    EX_TRY(report_adapt(r));
    EX_TRY(print_stream(r, loss));
    return r->set.sample > 0 ? print_sample(r) : AMP_OK;
}

int main(int argc, char **argv) {
    settings set;
    amp_state *resumed = NULL;
    run r;
    FILE *metrics = NULL;
    char data[PATH_MAX], path[PATH_MAX];
    amp_dtype precision;
    amp_result result;
    ex_begin();
    ranks_begin(&argc, &argv);
    if (read_settings(argc, argv, &set, &resumed) != AMP_OK) return fail(2);
    if (set.help) return flag_print_help(), ranks_end(0), 0;
    result = open_run(&r, &set, resumed);
    amp_state_destroy(resumed);
    if (result == AMP_OK && ranks.rank == 0) result = measure_bigrams(&r);
    if (result != AMP_OK) { close_run(&r); return fail(2); }
    ex_stop_install();
    result = main_run(&r);
    snprintf(path, sizeof path, "%s", r.metrics_path);
    snprintf(data, sizeof data, "%s", r.data);
    set.data = data;                /* the short runs read the same file */
    set.format = r.set.format;
    if (r.tokenizer.n > 0) set.vocab = r.model.config.vocab;
    set.tokenizer = "";
    precision = r.choice.dtype;
    close_run(&r);                  /* frees its memory for the short runs */
    if (result == AMP_OK && set.compare > 0 && !set.stop_after && !ex_stop_requested) {
        if (path[0] != 0) metrics = fopen(path, "a");
        result = compare_precisions(&set, precision, metrics);
    }
    if (metrics != NULL) fclose(metrics);
    free(saved_options);
    if (result != AMP_OK) return fail(1);
    ranks_end(0);
    return ex_stop_requested ? 130 : 0;
}
