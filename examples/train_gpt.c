/* train_gpt.c - trains a GPT-2 or a Llama in mixed precision, on any text, with amp.h alone.
 *
 *     gcc -O2 examples/train_gpt.c -o train_gpt -lm -lpthread
 *     ./train_gpt                       learns this project's own source
 *     ./train_gpt --data book.txt --model d6 --steps 2000 --save out/book
 *     ./train_gpt --resume out/book     continues exactly where it stopped; --help lists every flag
 *
 * On an NVIDIA GPU, with the backend compiled by nvcc -O2 -std=c++17 -arch=native -c amp_cuda.cu:
 *
 *     gcc -DUSE_CUDA -O2 -c examples/train_gpt.c && nvcc train_gpt.o amp_cuda.o -o train_gpt -lcublasLt
 *
 * On several processes, each with its own batches and the sum of all gradients (ranks.h):
 *
 *     mpicc -DUSE_MPI -O2 examples/train_gpt.c -o train_gpt_mpi -lm -lpthread
 *     mpirun -np 2 ./train_gpt_mpi --batch 8
 *     for i in 0 1; do RANK=$i WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./train_gpt --batch 8 & done; wait
 *
 * Read it from the bottom: main, then train, then train_step.  Mixed precision is open_context, training_open_scaler
 * and open_optimizer, which set it up, model_tape_begin, the region, and micro_step, the rest of a step; the model is
 * gpt.h. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "bigram.h"
#include "progress.h"
#include "sample.h"
#include "train_gpt_run.h"
#include "training_report.h"

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

/* r->bigram and r->bigram_best, over exactly the tokens that evaluate predicts. */
static amp_result measure_bigrams(run *r) {
    bigram_pairs train = {NULL, 0}, text = {NULL, 0};
    amp_loader_desc desc;
    amp_loader *loader;
    amp_result result;
    char why[400];
    loader_settings(r, 1, 0, r->split, &desc);
    desc.epochs = 1;
    desc.workers = AMP_NO_WORKERS;
    desc.vocab = (int32_t)r->model.config.vocab;
    EX_TRY(amp_loader_create(r->amp, &loader, &desc));
    result = bigram_collect(r->amp, loader, 0, &train);
    amp_loader_destroy(loader);
    if (result == AMP_ERR_LABEL) result = flag_refuse("vocab", "%s", ex_because(why));
    if (result == AMP_OK) result = open_validation(r, &loader);
    if (result == AMP_OK) {
        result = bigram_collect(r->amp, loader, r->set.eval_batches, &text);
        amp_loader_destroy(loader);
    }
    if (result == AMP_OK) {
        qsort(train.key, (size_t)train.n, sizeof *train.key, bigram_compare);
        qsort(text.key, (size_t)text.n, sizeof *text.key, bigram_compare);
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
    double began;
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
    began = ex_seconds();
    EX_TRY(amp_step(r->optimizer, r->scaler));
    return p != NULL ? profile_add(p, r->amp, PROFILE_OPTIMIZER, 0, began) : AMP_OK;
}

/* The next batch; with --graph copied to where the graph reads it. */
static amp_result next_batch(run *r, int64_t micro, amp_batch *batch) {
    profile *p = profile_of(r);
    int64_t n = r->set.batch * r->set.seq, bytes = n * (int64_t)sizeof(int32_t);
    int32_t *tokens;
    double began;
    EX_TRY(amp_monitor_phase(r->monitor, AMP_PHASE_DATA));
    began = ex_seconds();
    EX_TRY(amp_loader_next(r->loader, batch));
    if (p != NULL) EX_TRY(profile_add(p, r->amp, PROFILE_LOADER, 0, began));
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
    if (log) EX_TRY(ranks_combine(loss, AMP_REDUCE_SUM));
    if (log) *loss /= (float)ranks.world;
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
    r->set.training.amp.dtype = event->dtype;
    if (r->set.training.amp.use_scaler == AMP_SCALER_USE_ON) r->set.training.amp.use_scaler = AMP_SCALER_USE_AUTO;
    return AMP_OK;
}

/* Changes the micro-batch's size and the number per step from batch `index` of r->epoch on; the library has already
   changed its accumulation. */
static amp_result change_batch(run *r, int64_t batch, int64_t accumulation, int64_t index) {
    r->set.batch = batch;
    r->set.accumulation = accumulation;
    r->set.training.amp.accumulation = (int32_t)accumulation;
    r->index = index;
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
        training_note_anomaly(record, r->anomaly, sizeof r->anomaly);
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

/* How much of the sums over ranks backward hid, in percent. */
static double hidden_share(double seconds, double waited) { return 100 * (1 - fmin(waited / seconds, 1)); }

/* Keeps a loss until the record of its step is there. */
static void keep_loss(run *r, int64_t step) {
    int64_t slot = step % (int64_t)(sizeof r->shown / sizeof r->shown[0]);
    r->shown[slot].step = step;
    r->shown[slot].loss = r->loss;
}

/* Shows a step whose loss was read: loss, norm and scale are that step's own. */
static void show_step(run *r, progress *bar, const amp_step_result *result) {
    char text[320], norm[32] = "not finite", rate[32], eta[32], sums[32] = "";
    double done = (double)(r->step - r->start);
    int64_t slot = result->step % (int64_t)(sizeof r->shown / sizeof r->shown[0]);
    if (r->shown[slot].step != result->step) return;
    r->shown[slot].step = 0;
    progress_duration(done > 0 ? (double)(r->steps - r->step) * r->busy / done : 0, eta, sizeof eta);
    if (result->ranks_seconds > 0)
        snprintf(sums, sizeof sums, " | sums %.0f%% hidden",
                 hidden_share(result->ranks_seconds, result->ranks_waited));
    if (amp_is_finite_f32(&result->norm)) snprintf(norm, sizeof norm, "%.3f", (double)result->norm);
    snprintf(text, sizeof text, "step %lld/%lld | loss %.4f | norm %s | scale %g%s | %s tok/s%s | ETA %s",
             (long long)result->step, (long long)r->steps, (double)r->shown[slot].loss, norm, (double)result->scale,
             result->applied ? "" : " | skipped",
             progress_grouped((int64_t)tokens_per_second(r), rate, sizeof rate), sums, eta);
    progress_show(bar, result->step, text, result->step == r->steps);
}

/* Records arrive two steps late, in order, one per step.  This is where a program waits for a slow GPU. */
static amp_result take_records(run *r, progress *bar) {
    amp_step_record record;
    while (amp_monitor_next(r->monitor, &record)) {
        r->result = record.result;
        r->results++;
        r->applied += record.result.applied;
        show_step(r, bar, &record.result);
        r->ranks_seconds += record.result.ranks_seconds;
        r->ranks_waited += record.result.ranks_waited;
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

/* Takes the records of the last steps too.  If they ask for recovery, r->step becomes the snapshot's. */
static amp_result take_all_records(run *r, progress *bar) {
    EX_TRY(metrics_tolerate(&r->metrics, amp_monitor_flush(r->monitor)));
    return take_records(r, bar);
}

/* A checkpoint during training.  Takes pending records first: their lines must be in the metrics, as a resumed run
   writes only later ones, and steps that a recovery undoes are not saved. */
static amp_result save_between(run *r, progress *bar) {
    int64_t step = r->step;
    EX_TRY(take_all_records(r, bar));
    return r->step == step ? report_save(r, bar) : AMP_OK;
}

static amp_result stopped(const run *r, int *stop) {
    return training_stop(&r->set.training, r->start, r->step, r->steps, stop);
}

/* A run that is shorter than its warmup ends within it. */
static amp_schedule schedule_of(const run *r) {
    const settings *set = &r->set;
    amp_schedule s;
    memset(&s, 0, sizeof s);
    s.kind = strcmp(set->schedule, "constant") == 0 ? AMP_SCHEDULE_CONSTANT : AMP_SCHEDULE_COSINE;
    s.lr = amp_explicit(set->lr);
    if (s.kind == AMP_SCHEDULE_COSINE) s.min_lr = set->min_lr >= 0 ? set->min_lr : 0.1 * set->lr;
    s.warmup = set->warmup;
    s.steps = r->steps > set->warmup ? r->steps : set->warmup;
    return s;
}

/* Trains up to r->steps, the end of the data, an anomaly, or Ctrl-C. */
static amp_result train_steps(run *r, progress *bar) {
    const settings *set = &r->set;
    amp_schedule schedule = schedule_of(r);
    double shown = 0, loss_at_eval, lr;
    amp_result result = AMP_OK;
    int stop = 0;
    while (r->step < r->steps && r->anomaly[0] == 0) {
        int64_t next = r->step + 1;
        double began = ex_seconds();
        int log = (set->log_interval > 0 && next % set->log_interval == 0) || next == r->steps;
        int show = log || (bar->terminal && began - shown > 1);
        EX_TRY(stopped(r, &stop));
        if (stop) break;
        if (r->step == r->start + 1) memset(&r->profile, 0, sizeof r->profile);     /* the first step is a warm-up */
        EX_TRY(amp_schedule_lr(&schedule, r->step, &lr));
        result = train_step(r, (float)lr, show ? &r->loss : NULL, log);
        if (result == AMP_ERR_MEMORY && r->recovery != NULL && ranks.world == 1) {
            EX_TRY(answer_memory(r, bar));
            result = AMP_OK;
            continue;
        }
        if (result != AMP_OK) break;
        if (show) { keep_loss(r, next); shown = ex_seconds(); }
        r->step = next;
        r->epoch_steps++;
        print_note(r, bar);
        EX_TRY(take_records(r, bar));
        r->busy += ex_seconds() - began;
        if (next == r->steps || r->step != next) continue;
        if (set->eval_interval > 0 && next % set->eval_interval == 0) {
            EX_TRY(take_all_records(r, bar));
            if (r->step == next) EX_TRY(report_validation(r, bar, &loss_at_eval));
        }
        if (set->training.save_interval > 0 && next % set->training.save_interval == 0) EX_TRY(save_between(r, bar));
    }
    return result == AMP_ERR_END ? AMP_OK : result;
}

/* Trains as train_steps does.  The last records arrive after it: if they ask for recovery, r->step becomes the
   snapshot's, and the undone steps are trained again. */
static amp_result train(run *r, progress *bar) {
    amp_result result;
    int64_t last;
    do {
        result = train_steps(r, bar);
        last = r->step;
        EX_TRY(take_all_records(r, bar));
        progress_clear(bar);
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

static void print_run(const run *r) {
    const gpt_config *c = &r->model.config;
    const settings *set = &r->set;
    amp_parameter_bytes bytes;
    char a[32], b[32], d[32];
    int i;
    int64_t per_step = set->batch * set->seq * set->accumulation * ranks.world;
    printf("Run\n");
    training_print_precision(r->amp, r->scaler, r->n_fp8, set->fp8_blocks);
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
        printf("  tokenizer   %s: %s tokens\n", r->tokenizer.path, progress_grouped(r->tokenizer.n, a, sizeof a));
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
    training_metrics_run(r->metrics.file, r->amp, r->scaler);
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
    if (r->ranks_seconds > 0)
        printf("  ranks       %.3f s of sums and gathers, %.0f%% of it hidden behind backward and forward\n",
               r->ranks_seconds, hidden_share(r->ranks_seconds, r->ranks_waited));
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

/* Prints what the model writes: text, or the numbers of tokens. */
static amp_result print_sample(run *r) {
    const settings *set = &r->set;
    int64_t n = 0, i, vocab = r->model.config.vocab;
    int32_t *tokens = (int32_t *)malloc((strlen(set->prompt) + WORDS_PARTS + (size_t)set->sample) * sizeof *tokens);
    sampler how;
    amp_result result = tokens != NULL ? sample_prompt(&r->tokenizer, vocab, set->prompt, tokens, &n)
                                       : ex_fail(AMP_ERR_MEMORY, "no memory for the sample");
    how.temperature = set->temperature;
    how.top_k = set->top_k;
    how.seed = (uint64_t)set->seed;
    if (result == AMP_OK) result = gpt_sample(&r->model, &how, tokens, n, n + set->sample);
    if (result == AMP_OK && !ex_stop_requested) {
        char *text = sample_text(&r->tokenizer, vocab, tokens, n + set->sample);
        printf("\nSample (temperature %g)\n", set->temperature);
        if (text == NULL) for (i = 0; i < n + set->sample; i++) printf("%d ", (int)tokens[i]);
        else {
            sample_print(text);
            metrics_begin(r->metrics.file, "sample");
            metrics_text(r->metrics.file, "text", text);
            metrics_line_end(&r->metrics, r->monitor);
        }
        printf("\n");
        free(text);
    }
    free(tokens);
    return result;
}

static amp_result print_profile(run *r) {
    profile_run p;
    p.profile = &r->profile;
    p.model = &r->model;
    p.optimizer = r->optimizer;
    p.dtype = r->choice.dtype;
    p.accumulation = r->set.accumulation;
    p.metrics = &r->metrics;
    p.monitor = r->monitor;
    return profile_print(&p);
}

/* ==== main ======================================================================================= */

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
    EX_TRY(checkpoint_try(r->save, put_training, r));
    EX_TRY(train(r, &bar));
    EX_TRY(stopped(r, &stop));
    if (r->step > start || stop || *r->set.training.resume == 0) EX_TRY(report_save(r, &bar));
    else if (*r->set.training.resume != 0 && weights_are_old(r)) EX_TRY(save_weights(r));
    if (r->set.profile && r->profile.steps > 0) EX_TRY(print_profile(r));
    if (r->anomaly[0] != 0) return ex_fail(AMP_ERR_STATE, "%s", r->anomaly);
    if (stop) return training_print_stopped(r->step, r->save);
    EX_TRY(report_validation(r, &bar, &loss));
    print_result(r, loss);
    EX_TRY(training_check_applied(r->results, r->applied));
    EX_TRY(report_adapt(r));
    EX_TRY(print_stream(r, loss));
    return r->set.sample > 0 ? print_sample(r) : AMP_OK;
}

int main(int argc, char **argv) {
    settings set;
    amp_state *resumed = NULL;
    run r;
    amp_result result;
    ex_begin();
    if (ranks_begin(&argc, &argv) != AMP_OK || read_settings(argc, argv, &set, &resumed) != AMP_OK)
        return training_fail(2);
    if (set.help) return flag_print_help(), ranks_end(0), 0;
    if (ranks_join(set.training.ranks.file, set.training.ranks.timeout) != AMP_OK) return training_fail(2);
    result = open_run(&r, &set, resumed);
    amp_state_destroy(resumed);
    if (result == AMP_OK && ranks.rank == 0) result = measure_bigrams(&r);
    if (result != AMP_OK) { close_run(&r); return training_fail(2); }
    ranks_stop_install();
    result = main_run(&r);
    close_run(&r);
    free(saved_options);
    if (result != AMP_OK) return training_fail(1);
    ranks_end(0);
    return ranks_exit_code();
}
