/* t_zeros.c - tests what 0 means in every number of every struct that a program fills.  A 0 is the default, is an error, or
 * is a value that the documentation describes.  The list of numbers is derived from the text of amp.h, and each number is
 * tried.
 *
 *     gcc -Itests tests/unit/t_zeros.c amp.o -o t_zeros -lm -lpthread && ./t_zeros      (from the project root) */
#define _POSIX_C_SOURCE 200809L
#include "../amp.h"
#include "test.h"
#include "golden.h"
#include <math.h>
#include <stddef.h>

static amp_context *amp;
static int warnings;
static void count_warnings(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)id; (void)text;
    warnings += level == AMP_LOG_WARNING;
}
static void open_context(void) {
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = AMP_F32; d.threads = 1; d.logger.write = count_warnings;
    CHECK_OK(amp_open(&amp, &d));
}

/* ---- What a call makes of a struct, as bytes that are compared */

static struct { unsigned char bytes[1 << 16]; size_t n; } seen;
static void add(const void *data, size_t bytes) {
    if (seen.n + bytes > sizeof seen.bytes) { CHECK(!"room"); return; }
    memcpy(seen.bytes + seen.n, data, bytes);
    seen.n += bytes;
}
static size_t at, width;                /* of the number that is tried: of a query's answer only that is compared */
static void add_field(const void *desc) { add((const char *)desc + at, width); }

static float numbers[12][64];
static amp_param params[2];
static void fill(void) {
    for (int i = 0; i < 12; i++) for (int j = 0; j < 64; j++) numbers[i][j] = (float)((i * 31 + j * 17) % 23 - 11) / 8;
    memset(params, 0, sizeof params);
    params[0].name = "fc.weight"; params[0].weight = amp_tensor2(numbers[8], AMP_F32, 4, 4); params[0].grad = amp_tensor2(numbers[9], AMP_F32, 4, 4);
    params[1].name = "fc.bias"; params[1].weight = amp_tensor1(numbers[10], AMP_F32, 4); params[1].grad = amp_tensor1(numbers[11], AMP_F32, 4);
}
static amp_tensor square(int i) { return amp_tensor2(numbers[i], AMP_F32, 4, 4); }
#define TRY(call) do { amp_result r_ = (call); if (r_ != AMP_OK) return r_; } while (0)
static const int32_t labels[4] = {0, 1, 2, 1};

static amp_result try_linear(void *d) {
    amp_linear_op *op = (amp_linear_op *)d;
    op->x = square(0); op->y = square(1); op->dy = square(2); op->dx = square(3); op->weight = &params[0];
    op->act = AMP_ACT_RELU;
    TRY(amp_linear(amp, op)); TRY(amp_linear_backward(amp, op));
    add(numbers[3], 64);
    return AMP_OK;
}
static amp_result try_matmul(void *d) {
    amp_matmul_op *op = (amp_matmul_op *)d;
    op->a = square(0); op->b = square(1); op->y = square(2); op->dy = square(3); op->da = square(4); op->db = square(5);
    TRY(amp_matmul(amp, op)); TRY(amp_matmul_backward(amp, op));
    add(numbers[2], 64); add(numbers[4], 64); add(numbers[5], 64);
    return AMP_OK;
}
static amp_result try_attention(void *d) {
    amp_attention_op *op = (amp_attention_op *)d;
    amp_tensor *t[8] = {&op->q, &op->k, &op->v, &op->o, &op->d_o, &op->dq, &op->dk, &op->dv};
    for (int i = 0; i < 8; i++) *t[i] = amp_tensor4(numbers[i], AMP_F32, 1, 4, 2, 4);
    op->lse = numbers[8];
    if (op->mask.kind == AMP_MASK_NONE) op->mask.kind = AMP_MASK_CAUSAL;
    TRY(amp_attention(amp, op)); TRY(amp_attention_backward(amp, op));
    for (int i = 3; i < 8; i++) if (i != 4) add(numbers[i], 128);
    return AMP_OK;
}
static amp_result try_rope(void *d) {
    amp_rope_op *op = (amp_rope_op *)d;
    op->q = amp_tensor4(numbers[0], AMP_F32, 1, 4, 2, 4);
    TRY(amp_rope(amp, op));
    add(numbers[0], 128);
    return AMP_OK;
}
static amp_result try_norm(void *d) {
    amp_norm_op *op = (amp_norm_op *)d;
    op->x = square(0); op->y = square(1); op->dy = square(2); op->dx = square(3); op->mean = numbers[4]; op->rstd = numbers[5];
    TRY(amp_layernorm(amp, op)); TRY(amp_layernorm_backward(amp, op));
    add(numbers[1], 64); add(numbers[3], 64);
    op->plan.compute = AMP_DTYPE_DEFAULT;
    TRY(amp_rmsnorm(amp, op)); TRY(amp_rmsnorm_backward(amp, op));
    add(numbers[1], 64); add(numbers[3], 64);
    return AMP_OK;
}
static amp_result try_softmax(void *d) {
    amp_softmax_op *op = (amp_softmax_op *)d;
    op->x = square(0); op->y = square(1); op->dy = square(2); op->dx = square(3);
    TRY(amp_softmax(amp, op)); TRY(amp_softmax_backward(amp, op));
    add(numbers[1], 64); add(numbers[3], 64);
    return AMP_OK;
}
static amp_result try_cross_entropy(void *d) {
    amp_cross_entropy_op *op = (amp_cross_entropy_op *)d;
    op->logits = square(0); op->dlogits = square(1); op->labels = labels; op->loss = numbers[2];
    TRY(amp_cross_entropy(amp, op));
    add(numbers[1], 64); add(numbers[2], 4);
    return AMP_OK;
}
static amp_result try_mse(void *d) {
    amp_mse_op *op = (amp_mse_op *)d;
    op->x = square(0); op->target = square(1); op->dx = square(2); op->loss = numbers[3];
    TRY(amp_mse(amp, op));
    add(numbers[2], 64); add(numbers[3], 4);
    return AMP_OK;
}
static amp_result try_linear_bias(void *d) {
    amp_linear_op *op = (amp_linear_op *)d;
    op->bias = &params[1];
    TRY(try_linear(d));
    add(numbers[11], 16);
    return AMP_OK;
}
static amp_result try_linear_cross_entropy(void *d) {
    amp_linear_cross_entropy_op *op = (amp_linear_cross_entropy_op *)d;
    op->x = square(0); op->dx = square(1); op->weight = &params[0]; op->labels = labels; op->loss = numbers[2];
    TRY(amp_linear_cross_entropy(amp, op));
    add(numbers[1], 64); add(numbers[9], 64); add(numbers[2], 4);
    return AMP_OK;
}
static amp_result try_embedding(void *d) {
    amp_embedding_op *op = (amp_embedding_op *)d;
    static amp_param positions;
    memset(&positions, 0, sizeof positions);
    positions.name = "positions"; positions.weight = square(0);
    op->ids = labels; op->table = &params[0]; op->positions = &positions; op->y = square(1);
    TRY(amp_embedding(amp, op));
    add(numbers[1], 64);
    return AMP_OK;
}
static amp_result try_dropout(void *d) {
    amp_dropout_op *op = (amp_dropout_op *)d;
    op->x = square(0); op->y = square(1);
    TRY(amp_dropout(amp, op));
    add(numbers[1], 64);
    return AMP_OK;
}
static amp_result mask_of(const amp_mask *mask, amp_mask_kind kind) {
    amp_softmax_op op;
    memset(&op, 0, sizeof op);
    op.mask = *mask;
    op.mask.kind = kind;
    op.x = amp_tensor4(numbers[0], AMP_F32, 1, 1, 4, 4); op.y = amp_tensor4(numbers[1], AMP_F32, 1, 1, 4, 4);
    TRY(amp_softmax(amp, &op));
    add(numbers[1], 64);
    return AMP_OK;
}
static amp_result try_window(void *d) { return mask_of((amp_mask *)d, AMP_MASK_WINDOW); }
static amp_result try_global(void *d) { ((amp_mask *)d)->window = 2; return mask_of((amp_mask *)d, AMP_MASK_WINDOW_GLOBAL); }
static amp_result try_bidirectional(void *d) { ((amp_mask *)d)->window = 2; return mask_of((amp_mask *)d, AMP_MASK_WINDOW); }
static amp_result try_ndim(void *d) {
    amp_tensor *t = (amp_tensor *)d, y = amp_tensor1(numbers[1], AMP_F32, 4);
    t->data = numbers[0]; t->dtype = AMP_F32; t->shape[0] = 4;
    TRY(amp_cast(amp, t, &y));
    add(numbers[1], 16);
    return AMP_OK;
}
static amp_result try_range(void *d) {
    amp_range *range = (amp_range *)d;
    amp_scaler *scaler;
    int32_t apply = -1;
    amp_result r;
    range->data = numbers[0]; range->dtype = AMP_F32;
    TRY(amp_scaler_create(amp, &scaler, NULL));
    r = amp_scaler_unscale(scaler, range, 1, &apply);
    amp_scaler_destroy(scaler);
    add(numbers[0], 256);
    return r;
}
static amp_result try_param(void *d) {
    amp_param *p = (amp_param *)d;
    amp_result r;
    p->name = "p"; p->weight = square(0); p->grad = square(1);
    r = amp_param_register(amp, p, 1);
    add_field(p);
    amp_param_forget(amp, p, 1);
    return r;
}
static amp_result try_convert(void *d) {
    amp_convert_desc *how = (amp_convert_desc *)d;
    static float big[64];
    uint16_t out[64];
    for (int i = 0; i < 64; i++) big[i] = i == 0 ? 1e30f : 0.1f * (float)i;
    TRY(amp_convert(out, AMP_F16, big, AMP_F32, 64, how, NULL));
    add(out, sizeof out);
    return AMP_OK;
}
static amp_result try_stochastic(void *d) { ((amp_convert_desc *)d)->rounding = AMP_ROUND_STOCHASTIC; return try_convert(d); }

static amp_result open_and_query(amp_desc *desc, amp_desc *out) {
    amp_context *own;
    desc->dtype = AMP_F32; desc->logger.level = AMP_LOG_OFF;
    TRY(amp_open(&own, desc));
    CHECK_OK(amp_query(own, out));
    amp_close(own);
    return AMP_OK;
}
static amp_result try_open(void *d) {
    amp_desc out;
    TRY(open_and_query((amp_desc *)d, &out));
    add_field(&out);
    return AMP_OK;
}
static amp_result try_recipe(void *d) {
    amp_desc desc, out;
    memset(&desc, 0, sizeof desc);
    desc.fp8 = *(amp_fp8_recipe *)d;
    desc.fp8.scaling = AMP_FP8_DELAYED;
    TRY(open_and_query(&desc, &out));
    add_field(&out.fp8);
    return AMP_OK;
}
static int alone(void *user, void *data, int64_t n, amp_dtype dtype, amp_reduce_op op, void *stream) {
    (void)user; (void)data; (void)n; (void)dtype; (void)op; (void)stream;
    return 0;
}
static amp_result try_reducer(void *d) {
    amp_desc desc, out;
    memset(&desc, 0, sizeof desc);
    desc.reducer = *(amp_reducer *)d;
    desc.reducer.reduce = alone;
    TRY(open_and_query(&desc, &out));
    add_field(&out.reducer);
    return AMP_OK;
}
static amp_result try_rank(void *d) { ((amp_reducer *)d)->world = 2; return try_reducer(d); }
static amp_result try_region(void *d) {
    amp_autocast_desc out;
    TRY(amp_autocast_begin(amp, (amp_autocast_desc *)d));
    (void)amp_autocast_active(amp, &out);
    add_field(&out);
    return amp_autocast_end(amp);
}
static amp_result on_a_tape(const amp_tape_desc *desc, const amp_custom_op *custom, amp_value *out, amp_tape **kept) {
    amp_tensor x = square(0), y;
    amp_value v;
    amp_result r;
    TRY(amp_tape_create(amp, kept, desc));
    TRY(amp_tape_begin(*kept, NULL));
    v = amp_tape_input(*kept, &x);
    *out = custom != NULL ? amp_tape_custom(*kept, &v, 1, custom) : amp_tape_softmax(*kept, v, NULL);
    r = amp_tape_finish(*kept);
    if (r != AMP_OK) return r;
    TRY(amp_tape_tensor(*kept, *out, &y));
    add(&y.ndim, sizeof y.ndim); add(y.shape, sizeof y.shape);
    return AMP_OK;
}
static amp_result try_tape(void *d) {
    amp_tape *tape = NULL;
    amp_value v;
    amp_result r = on_a_tape((amp_tape_desc *)d, NULL, &v, &tape);
    amp_tape_destroy(tape);
    return r;
}
static amp_result ones(void *user, const amp_custom_call *call) {
    (void)user;
    for (int64_t i = 0; i < amp_tensor_count(&call->y); i++) ((float *)call->y.data)[i] = 1;
    return AMP_OK;
}
static amp_result try_custom(void *d) {
    amp_custom_op *op = (amp_custom_op *)d;
    amp_tape *tape = NULL;
    amp_value v;
    amp_result r;
    op->forward = ones;
    r = on_a_tape(NULL, op, &v, &tape);
    amp_tape_destroy(tape);
    return r;
}
static amp_result try_custom_shape(void *d) {
    amp_custom_op *op = (amp_custom_op *)d;
    op->ndim = 1;
    return try_custom(d);
}
static amp_result try_set(void *d) {
    amp_grad_set_desc *desc = (amp_grad_set_desc *)d;
    amp_grad_set *set;
    amp_scaler *scaler;
    amp_grad_stats stats;
    amp_result r;
    desc->params = params;
    if (desc->n_params == 0) desc->n_params = 2;
    params[0].grad_live = params[1].grad_live = 1;
    TRY(amp_grad_set_create(amp, &set, desc));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    r = amp_scaler_check(scaler, set, AMP_CHECK_READ);
    CHECK_OK(amp_grad_set_stats(set, &stats));
    add(&stats.norm, sizeof stats.norm); add(&stats.clip_coef, sizeof stats.clip_coef);
    amp_scaler_destroy(scaler); amp_grad_set_destroy(set);
    return r;
}
static amp_result try_scaler(void *d) {
    amp_scaler_desc out;
    amp_scaler *scaler;
    TRY(amp_scaler_create(amp, &scaler, (amp_scaler_desc *)d));
    CHECK_OK(amp_scaler_query(scaler, &out));
    add_field(&out);
    amp_scaler_destroy(scaler);
    return AMP_OK;
}
static amp_result try_tolerance(void *d) { ((amp_scaler_desc *)d)->hysteresis = 2; return try_scaler(d); }
/* Settings from a query; where the field is not kept there, the weights after a step. */
static amp_result stepped(amp_optimizer_desc *desc, amp_optimizer_desc *out) {
    amp_optimizer *o;
    amp_result r;
    desc->params = params;
    if (desc->n_params == 0) desc->n_params = 2;
    TRY(amp_optimizer_create(amp, &o, desc));
    CHECK_OK(amp_optimizer_query(o, out));
    params[0].grad_live = params[1].grad_live = 1;
    r = amp_step(o, NULL);
    add(numbers[8], 64); add(numbers[10], 16);
    amp_optimizer_destroy(o);
    return r;
}
static amp_result try_optimizer(void *d) {
    amp_optimizer_desc out;
    memset(&out, 0, sizeof out);
    TRY(stepped((amp_optimizer_desc *)d, &out));
    seen.n = 0;
    add_field(&out);
    return AMP_OK;
}
static amp_result try_sgd(void *d) { ((amp_optimizer_desc *)d)->kind = AMP_SGD; return try_optimizer(d); }
static amp_result try_outer(void *d) { ((amp_optimizer_desc *)d)->sync_every = 2; return try_optimizer(d); }
static amp_result try_nesterov(void *d) { ((amp_optimizer_desc *)d)->momentum = 0.5; return try_sgd(d); }
static amp_result try_gather(void *d) { ((amp_optimizer_desc *)d)->shard = AMP_SHARD_STATES; return try_optimizer(d); }
static amp_result try_group(void *d) {
    amp_optimizer_desc desc, out;
    memset(&desc, 0, sizeof desc);
    ((amp_param_group *)d)->match = "*";
    desc.groups = (amp_param_group *)d; desc.n_groups = 1; desc.lr = 0.5; desc.weight_decay = 0.25;
    return stepped(&desc, &out);
}
static amp_result rates(amp_schedule *s, amp_schedule_kind kind, int64_t warmup) {
    s->kind = kind;
    if (s->lr == 0 && at != offsetof(amp_schedule, lr)) s->lr = 1;
    if (s->warmup == 0) s->warmup = warmup;
    if (s->steps == 0 && at != offsetof(amp_schedule, steps)) s->steps = 50;
    for (int64_t step = 0; step < 60; step++) {
        double lr;
        TRY(amp_schedule_lr(s, step, &lr));
        add(&lr, sizeof lr);
    }
    return AMP_OK;
}
static amp_result try_schedule(void *d) { return rates((amp_schedule *)d, AMP_SCHEDULE_COSINE, 0); }
static amp_result try_warm(void *d) { return rates((amp_schedule *)d, AMP_SCHEDULE_COSINE, 7); }
static amp_result try_wsd(void *d) { return rates((amp_schedule *)d, AMP_SCHEDULE_WSD, 0); }
static amp_result try_root(void *d) { return rates((amp_schedule *)d, AMP_SCHEDULE_INVERSE_SQRT, 7); }

static int read_sample(void *user, const amp_sample *sample, void *const *fields) {
    (void)user;
    ((int32_t *)fields[0])[0] = (int32_t)sample->sample;
    return 0;
}
static amp_source own_source;
static amp_loader_desc loader_of(amp_source *source) {
    amp_loader_desc d;
    memset(&d, 0, sizeof d);
    source->read = read_sample;
    d.source = source; d.batch = 2; d.workers = AMP_NO_WORKERS;
    return d;
}
static amp_result batches(const amp_loader_desc *d, amp_loader_desc *out) {
    static amp_source source;               /* the loader's own ends with it */
    amp_loader *loader;
    amp_loader_info info;
    TRY(amp_loader_create(amp, &loader, d));
    CHECK_OK(amp_loader_query(loader, out));
    if (out->source != NULL) { source = *out->source; out->source = &source; }
    CHECK_OK(amp_loader_info_get(loader, &info));
    add(&info.samples, sizeof info.samples); add(&info.batches, sizeof info.batches);
    amp_loader_destroy(loader);
    return AMP_OK;
}
static amp_result try_source(void *d) {
    amp_source *source = (amp_source *)d;
    amp_loader_desc desc = loader_of(source), out;
    if (source->samples == 0 && at != offsetof(amp_source, samples)) source->samples = 8;
    if (source->n_fields == 0 && at != offsetof(amp_source, n_fields)) source->n_fields = 1;
    for (int i = 0; i < 2; i++) { source->fields[i].dtype = AMP_I32; source->fields[i].count = 1; }
    TRY(batches(&desc, &out));
    seen.n = 0;
    add((const char *)out.source + at, width);
    return AMP_OK;
}
static amp_result try_count(void *d) {
    amp_source source;
    amp_loader_desc desc, out;
    memset(&source, 0, sizeof source);
    desc = loader_of(&source);
    source.samples = 8; source.n_fields = 1;
    source.fields[0] = *(amp_field *)d;
    if (at != offsetof(amp_field, count)) source.fields[0].count = 1;
    source.fields[0].dtype = AMP_I32;
    return batches(&desc, &out);
}
static amp_result loads(amp_loader_desc *desc, int whole) {
    amp_loader_desc out;
    if (desc->path == NULL && desc->tensors == NULL) {
        memset(&own_source, 0, sizeof own_source);
        own_source.read = read_sample; own_source.samples = 8; own_source.n_fields = 1;
        own_source.fields[0].dtype = AMP_I32; own_source.fields[0].count = 1;
        desc->source = &own_source;
    }
    if (desc->batch == 0 && at != offsetof(amp_loader_desc, batch)) desc->batch = 2;
    TRY(batches(desc, &out));
    if (!whole) { seen.n = 0; add_field(&out); }
    return AMP_OK;
}
static amp_result try_loader(void *d) { return loads((amp_loader_desc *)d, 0); }
static amp_result try_last(void *d) { return loads((amp_loader_desc *)d, 1); }
static amp_result try_world(void *d) { ((amp_loader_desc *)d)->world = 2; return loads((amp_loader_desc *)d, 0); }
static amp_result try_path(void *d) {
    amp_loader_desc *desc = (amp_loader_desc *)d;
    desc->path = "LICENSE"; desc->format = AMP_TOKENS_BYTES;
    if (desc->seq == 0 && at != offsetof(amp_loader_desc, seq)) desc->seq = 4;
    return loads(desc, 0);
}
static amp_result try_tensors(void *d) {
    static amp_tensor tensors[2];
    tensors[0] = square(0); tensors[1] = square(1);
    ((amp_loader_desc *)d)->tensors = tensors;
    return loads((amp_loader_desc *)d, 0);
}
static amp_result try_ranks(void *d) {
    amp_ranks *ranks;
    TRY(amp_ranks_create(&ranks, (amp_ranks_desc *)d));
    amp_ranks_destroy(ranks);
    return AMP_OK;
}
static amp_result try_settings(void *d) {
    static char text[8192];
    TRY(amp_settings_check((amp_settings *)d));
    add(text, amp_settings_text((amp_settings *)d, text, sizeof text));
    return AMP_OK;
}
static amp_optimizer *own_optimizer(void) {
    amp_optimizer_desc desc;
    amp_optimizer *o = NULL;
    memset(&desc, 0, sizeof desc);
    desc.params = params; desc.n_params = 2;
    CHECK_OK(amp_optimizer_create(amp, &o, &desc));
    return o;
}
static amp_result try_monitor(void *d) {
    amp_monitor_desc *desc = (amp_monitor_desc *)d, out;
    amp_monitor *monitor;
    amp_result r;
    desc->optimizer = own_optimizer();
    r = amp_monitor_create(amp, &monitor, desc);
    if (r == AMP_OK) { CHECK_OK(amp_monitor_query(monitor, &out)); add_field(&out); amp_monitor_destroy(monitor); }
    amp_optimizer_destroy(desc->optimizer);
    return r;
}
static amp_result try_step_info(void *d) {
    amp_monitor_desc desc;
    amp_monitor *monitor;
    amp_step_record record;
    amp_result r;
    memset(&desc, 0, sizeof desc); memset(&record, 0, sizeof record);
    desc.optimizer = own_optimizer();
    CHECK_OK(amp_monitor_create(amp, &monitor, &desc));
    params[0].grad_live = params[1].grad_live = 1;
    CHECK_OK(amp_step(desc.optimizer, NULL));
    r = amp_monitor_step(monitor, (amp_step_info *)d);
    CHECK_OK(amp_monitor_flush(monitor));
    CHECK(amp_monitor_next(monitor, &record) == 1);
    add(&record.loss, sizeof record.loss); add(&record.tokens, sizeof record.tokens);
    amp_monitor_destroy(monitor);
    amp_optimizer_destroy(desc.optimizer);
    return r;
}
static amp_result try_stats(void *d) {
    amp_tensor_stats_desc *desc = (amp_tensor_stats_desc *)d;
    amp_tensor_stats *stats;
    amp_tensor_stats_report report;
    desc->params = params;
    if (desc->n_params == 0) desc->n_params = 2;
    TRY(amp_tensor_stats_create(amp, &stats, desc));
    for (int i = 0; i < 102; i++) { CHECK_OK(amp_tensor_stats_step(stats, &report)); add(&report.due, 4); add(&report.n_rows, 8); }
    amp_tensor_stats_destroy(stats);
    return AMP_OK;
}

/* A step for amp_verify and its kin: y = x w, and its loss. */
static int steps;
static amp_value record_step(void *user, amp_tape *tape) {
    amp_tensor x = square(0), target = square(1);
    amp_value y;
    (void)user;
    steps++;
    y = amp_tape_linear(tape, amp_tape_input(tape, &x), &params[0], NULL, AMP_ACT_NONE);
    return amp_tape_mse(tape, y, amp_tape_input(tape, &target), AMP_REDUCTION_MEAN);
}
static int plain_step(void *user, amp_context *context) { (void)user; (void)context; steps++; return 0; }
static const amp_dtype just_tf32[] = {AMP_F16}, just_f32[] = {AMP_F32};
static amp_result try_verify(void *d) {
    static amp_verify_report out;
    amp_verify_desc *desc = (amp_verify_desc *)d;
    CHECK_OK(amp_param_register(amp, params, 2));
    desc->record = record_step; desc->params = params; desc->n_params = 1;
    desc->dtypes = just_tf32; desc->n_dtypes = 1;
    amp_result r = amp_verify(amp, desc, &out);
    if (r == AMP_OK) { add(&out.rows[0].gradient_bound, 8); add(&out.rows[0].output_bound, 8); }
    amp_param_forget(amp, params, 2);
    return r;
}
static amp_result try_gradcheck(void *d) {
    amp_gradcheck_desc *desc = (amp_gradcheck_desc *)d;
    static amp_range in, grad;
    amp_gradcheck_report out;
    amp_result r;
    CHECK_OK(amp_param_register(amp, params, 2));
    in.data = numbers[8]; grad.data = numbers[9]; in.count = grad.count = 16; in.dtype = grad.dtype = AMP_F32; in.name = grad.name = "w";
    desc->record = record_step; desc->inputs = &in; desc->input_grads = &grad; desc->n_inputs = 1;
    r = amp_gradcheck(amp, desc, &out);
    if (r == AMP_OK) { add(&out.error, 8); add(&out.found, 8); }
    amp_param_forget(amp, params, 2);
    return r;
}
static amp_result try_advise(void *d) {
    static amp_advice out;
    memset(&out, 0, sizeof out);
    TRY(amp_advise(amp, (amp_advise_desc *)d, &out));
    add(&out, sizeof out);
    return AMP_OK;
}
static amp_result try_tune(void *d) {
    static amp_tune_report out;
    amp_tune_desc *desc = (amp_tune_desc *)d;
    memset(&out, 0, sizeof out);
    desc->step = plain_step; desc->dtypes = just_f32; desc->n_dtypes = 1;
    steps = 0;
    TRY(amp_tune(amp, desc, &out));
    add(&steps, sizeof steps); add(&out.rows[0].batch, 8); add(&out.n_rows, 8);
    return AMP_OK;
}
static amp_result try_adapt(void *d) {
    static const amp_dtype ladder[] = {AMP_F16, AMP_F32};
    amp_adapt_desc *desc = (amp_adapt_desc *)d, out;
    amp_adapt *adapt;
    amp_result r;
    CHECK_OK(amp_param_register(amp, params, 2));
    desc->params = params;
    if (desc->n_params == 0) desc->n_params = 2;
    desc->ladder = ladder; desc->n_ladder = 2;
    r = amp_adapt_create(amp, &adapt, desc);
    if (r == AMP_OK) { CHECK_OK(amp_adapt_query(adapt, &out)); add_field(&out); amp_adapt_destroy(adapt); }
    amp_param_forget(amp, params, 2);
    return r;
}
static amp_result try_recovery(void *d) {
    amp_recovery_desc *desc = (amp_recovery_desc *)d;
    amp_recovery *recovery = NULL;
    amp_result r;
    desc->params = params;
    if (desc->n_params == 0) desc->n_params = 2;
    desc->optimizer = own_optimizer();
    r = amp_recovery_create(amp, &recovery, desc);
    amp_recovery_destroy(recovery);
    amp_optimizer_destroy(desc->optimizer);
    return r;
}

/* ---- The table */

/* What 0 is.  DEFAULT: it stands for `value`, and where `zero` is given that constant says 0.  AUTO: it stands for a
 * default that the library computes.  REFUSED: it must be given; where `zero` is given that constant says 0.  OFF: none,
 * no limit, not known.  VALUE: 0 itself, as switches have it; COUNT: of an array; MADE: written by the library. */
enum means { DEFAULT, AUTO, REFUSED, OFF, VALUE, COUNT, RESERVED, MADE };
static const char *const mean_names[] = {"DEFAULT", "AUTO", "REFUSED", "OFF", "VALUE", "COUNT", "RESERVED", "MADE"};

/* says: words of the struct's text that document it; "" where the name does (a switch, a size).  other: another legal
 * number, which changes what is seen; 0: none is tried. */
static const struct row {
    const char *type, *name; size_t at, bytes;
    enum means means; double value, zero, other;
    const char *says;
    amp_result (*call)(void *);
} rows[] = {
#define R(type, name, means, value, zero, other, says, call) \
    {#type, #name, offsetof(type, name), sizeof(((type *)0)->name), means, value, zero, other, says, call}
#define Z ((double)AMP_EXPLICIT_ZERO)
    R(amp_tensor, ndim, REFUSED, 0, 0, 1, "", try_ndim), R(amp_tensor, shape, VALUE, 0, 0, 0, "", NULL),
    R(amp_tensor, stride, OFF, 0, 0, 0, "all zero means contiguous", NULL),
    R(amp_range, count, VALUE, 0, 0, 4, "elements", try_range),
    R(amp_param, id, MADE, 0, 0, 0, "from amp_param_register", NULL), R(amp_param, version, MADE, 0, 0, 0, "of the weight's value", NULL),
    R(amp_param, last_used, MADE, 0, 0, 0, "the last forward", NULL), R(amp_param, grad_live, VALUE, 0, 0, 0, "0: the next backward overwrites grad", NULL),
    R(amp_param, embedding, VALUE, 0, 0, 1, "1: a table of embeddings", try_param),
    R(amp_param, context, MADE, 0, 0, 0, "serial number", NULL), R(amp_param, by_hand, MADE, 0, 0, 0, "amp_param_accumulate since", NULL),
    R(amp_param, began, MADE, 0, 0, 0, "when a backward began it", NULL), R(amp_param, scale, MADE, 0, 0, 0, "under which loss scale", NULL),
    R(amp_param, writer, MADE, 0, 0, 0, "on which thread", NULL), R(amp_param, added, MADE, 0, 0, 0, "last let your kernel add to it", NULL),
    R(amp_param, taken, MADE, 0, 0, 0, "how often your code", NULL),
    R(amp_mask, bidirectional, VALUE, 0, 0, 1, "1 = not causal", try_bidirectional), R(amp_mask, window, REFUSED, 0, 0, 2, "1 or more", try_window),
    R(amp_mask, global, VALUE, 0, 0, 2, "0 or more", try_global),
    R(amp_mask, allowed_batch_stride, OFF, 0, 0, 0, "0: one mask for all sequences", NULL),
    R(amp_mask, allowed_head_stride, OFF, 0, 0, 0, "0: one mask for all heads", NULL),
    R(amp_reducer, rank, VALUE, 0, 0, 1, "rank, world", try_rank), R(amp_reducer, world, DEFAULT, 1, 0, 2, "world 0: 1", try_reducer),
    R(amp_reducer, on_host, VALUE, 0, 0, 1, "0: the device's, 1: the CPU's", try_reducer), R(amp_reducer, one_thread, VALUE, 0, 0, 1, "1: calls come from", try_reducer),
    R(amp_fp8_recipe, margin, VALUE, 0, 0, 3, "0 to 16", try_recipe), R(amp_fp8_recipe, history, DEFAULT, 1024, 0, 7, "default 1024", try_recipe),
    R(amp_desc, reserved, RESERVED, 0, 0, 0, "", try_open), R(amp_desc, allow_fallback, VALUE, 0, 0, 1, "0: refuse it", try_open),
    R(amp_desc, disable_cache, VALUE, 0, 0, 1, "1: no cast cache", try_open), R(amp_desc, disable, VALUE, 0, 0, 1, "until amp_set_enabled", try_open),
    R(amp_desc, allow_tf32, VALUE, 0, 0, 0, "1: compute F32 products in TF32", try_open), R(amp_desc, memory_efficient, VALUE, 0, 0, 1, "1: empty the cast cache", try_open),
    R(amp_desc, cache_limit, OFF, 0, 0, 4096, "0: no limit", try_open), R(amp_desc, mask_limit, OFF, 0, 0, 4096, "0: no limit", try_open),
    R(amp_desc, device, VALUE, 0, 0, 0, "device index", try_open), R(amp_desc, wgmma, VALUE, 0, 0, 1, "1: attention by wgmma", try_open),
    R(amp_desc, threads, AUTO, 0, 0, 1, "default: cores", try_open),
    R(amp_desc, seed, VALUE, 0, 0, 5, "of dropout", try_open), R(amp_desc, reduce_on_device, VALUE, 0, 0, 0, "1: device memory goes over NCCL", try_open),
    R(amp_desc, reduce_timeout_ms, DEFAULT, 60000, 0, 5, "default 60000", try_open), R(amp_desc, pin_threads, VALUE, 0, 0, 1, "1: bind each thread", try_open),
    R(amp_desc, gemm_always, VALUE, 0, 0, 1, "1: amp_gemm outside any region", try_open), R(amp_desc, saturate_inputs, VALUE, 0, 0, 1, "1: in every region", try_open),
    R(amp_autocast_desc, disable, VALUE, 0, 0, 1, "1: an island", try_region), R(amp_autocast_desc, disable_cache, VALUE, 0, 0, 1, "1: no cast cache", try_region),
    R(amp_autocast_desc, saturate_inputs, VALUE, 0, 0, 1, "1, nested regions included", try_region),
    R(amp_linear_op, dy_before_act, VALUE, 0, 0, 1, "1: dy is already", try_linear), R(amp_linear_op, dy_summed, VALUE, 0, 0, 1, "1: what wrote dy", try_linear_bias),
    R(amp_matmul_op, trans_a, VALUE, 0, 0, 1, "", try_matmul), R(amp_matmul_op, trans_b, VALUE, 0, 0, 1, "", try_matmul),
    R(amp_matmul_op, alpha, DEFAULT, 1, Z, 2, "default 1; AMP_EXPLICIT_ZERO: 0", try_matmul), R(amp_matmul_op, reserved, RESERVED, 0, 0, 0, "", try_matmul),
    R(amp_attention_op, scale, DEFAULT, 0.5, Z, 2, "default 1 / sqrt(dim); AMP_EXPLICIT_ZERO: 0", try_attention), R(amp_attention_op, reserved, RESERVED, 0, 0, 0, "", try_attention),
    R(amp_rope_op, base, DEFAULT, 10000, 0, 100, "1 or more; default 10000", try_rope), R(amp_rope_op, rotary, DEFAULT, 4, 0, 2, "default all", try_rope),
    R(amp_rope_op, offset, VALUE, 0, 0, 3, "0 to 2^31 - 1", try_rope),
    R(amp_norm_op, eps, DEFAULT, 1e-5, Z, 0.5, "default 1e-5; AMP_EXPLICIT_ZERO: 0", try_norm), R(amp_norm_op, reserved, RESERVED, 0, 0, 0, "", try_norm),
    R(amp_softmax_op, scale, DEFAULT, 1, Z, 2, "default 1; AMP_EXPLICIT_ZERO: 0", try_softmax), R(amp_softmax_op, reserved, RESERVED, 0, 0, 0, "", try_softmax),
    R(amp_activation_op, reserved, RESERVED, 0, 0, 0, "", NULL),
    R(amp_cross_entropy_op, classes, DEFAULT, 4, 0, 3, "default cols", try_cross_entropy),
    R(amp_cross_entropy_op, ignore_index, DEFAULT, -100, AMP_IGNORE_ZERO, 1, "default -100, as in PyTorch; AMP_IGNORE_ZERO: 0", try_cross_entropy),
    R(amp_cross_entropy_op, label_smoothing, VALUE, 0, 0, 0.5, "0 to 1; default 0", try_cross_entropy),
    R(amp_cross_entropy_op, factor, DEFAULT, 1, Z, 0.5, "default 1; AMP_EXPLICIT_ZERO: 0", try_cross_entropy),
    R(amp_mse_op, factor, DEFAULT, 1, Z, 0.5, "as in amp_cross_entropy_op", try_mse),
    R(amp_linear_cross_entropy_op, classes, DEFAULT, 4, 0, 3, "the rest is as in amp_cross_entropy_op", try_linear_cross_entropy),
    R(amp_linear_cross_entropy_op, ignore_index, DEFAULT, -100, AMP_IGNORE_ZERO, 1, "the rest is as in amp_cross_entropy_op", try_linear_cross_entropy),
    R(amp_linear_cross_entropy_op, label_smoothing, VALUE, 0, 0, 0.5, "the rest is as in amp_cross_entropy_op", try_linear_cross_entropy),
    R(amp_linear_cross_entropy_op, factor, DEFAULT, 1, Z, 0.5, "the rest is as in amp_cross_entropy_op", try_linear_cross_entropy),
    R(amp_linear_cross_entropy_op, chunk, AUTO, 0, 0, 0, "default: what 64 MiB hold", try_linear_cross_entropy), R(amp_linear_cross_entropy_op, reserved, RESERVED, 0, 0, 0, "", try_linear_cross_entropy),
    R(amp_embedding_op, seq, DEFAULT, 4, 0, 2, "default all", try_embedding),
    R(amp_dropout_op, p, VALUE, 0, 0, 0.5, "0 to less than 1", try_dropout), R(amp_dropout_op, reserved, RESERVED, 0, 0, 0, "", try_dropout),
    R(amp_tape_desc, memory_budget, OFF, 0, 0, 0, "0: any", try_tape),
    R(amp_custom_op, op, OFF, 0, 0, 0, "0: nothing is decided", try_custom), R(amp_custom_op, shape, VALUE, 0, 0, 0, "", try_custom_shape),
    R(amp_custom_op, ndim, AUTO, 0, 0, 0, "ndim 0: as the first input", try_custom), R(amp_custom_op, reserved, RESERVED, 0, 0, 0, "", NULL),
    R(amp_grad_set_desc, n_params, COUNT, 0, 0, 1, "", try_set), R(amp_grad_set_desc, n_ranges, COUNT, 0, 0, 0, "", try_set),
    R(amp_grad_set_desc, sharded, VALUE, 0, 0, 0, "1: ranks hold different elements", try_set), R(amp_grad_set_desc, reserved, RESERVED, 0, 0, 0, "", try_set),
    R(amp_grad_set_desc, clip_norm, OFF, 0, 0, 1e-6, "0: no clipping", try_set),
    R(amp_scaler_desc, reserved, RESERVED, 0, 0, 0, "", try_scaler), R(amp_scaler_desc, disable, VALUE, 0, 0, 1, "the scale stays 1", try_scaler),
    R(amp_scaler_desc, frozen, VALUE, 0, 0, 1, "1: a static scale", try_scaler), R(amp_scaler_desc, init_scale, DEFAULT, 65536, 0, 1024, "DEFAULT 2^16 2 1/2 2000 1 2^126 1", try_scaler),
    R(amp_scaler_desc, growth_factor, DEFAULT, 2, 0, 3, "DEFAULT 2^16 2 1/2 2000 1 2^126 1", try_scaler), R(amp_scaler_desc, backoff_factor, DEFAULT, 0.5, 0, 0.25, "DEFAULT 2^16 2 1/2 2000 1 2^126 1", try_scaler),
    R(amp_scaler_desc, growth_interval, DEFAULT, 2000, 0, 7, "DEFAULT 2^16 2 1/2 2000 1 2^126 1", try_scaler), R(amp_scaler_desc, hysteresis, DEFAULT, 1, 0, 3, "DEFAULT 2^16 2 1/2 2000 1 2^126 1", try_scaler),
    R(amp_scaler_desc, min_scale, DEFAULT, 1, 0, 2, "DEFAULT 2^16 2 1/2 2000 1 2^126 1", try_scaler), R(amp_scaler_desc, max_scale, DEFAULT, 8.507059173023462e37, 0, 1e6, "DEFAULT 2^16 2 1/2 2000 1 2^126 1", try_scaler),
    R(amp_scaler_desc, tolerance, DEFAULT, 0.25, Z, 0.5, "AMP_EXPLICIT_ZERO: none", try_tolerance), R(amp_scaler_desc, skip_warning, DEFAULT, 50, 0, 7, "default 50, -1: never", try_scaler),
    R(amp_param_group, lr_scale, DEFAULT, 1, Z, 2, "default 1; AMP_EXPLICIT_ZERO: 0", try_group), R(amp_param_group, weight_decay, AUTO, 0, Z, 0.5, "default the optimizer's, AMP_EXPLICIT_ZERO: none", try_group),
    R(amp_optimizer_desc, reserved, RESERVED, 0, 0, 0, "", try_optimizer), R(amp_optimizer_desc, accumulation, DEFAULT, 1, 0, 2, "default 1", try_optimizer),
    R(amp_optimizer_desc, n_params, COUNT, 0, 0, 1, "", try_optimizer), R(amp_optimizer_desc, n_groups, COUNT, 0, 0, 0, "", try_optimizer),
    R(amp_optimizer_desc, lr, DEFAULT, 1e-3, Z, 0.5, "AMP_EXPLICIT_ZERO is a 0 for lr, the betas and eps", try_optimizer), R(amp_optimizer_desc, beta1, DEFAULT, 0.9, Z, 0.5, "defaults 1e-3, 0.9, 0.999, 1e-8, 0", try_optimizer),
    R(amp_optimizer_desc, beta2, DEFAULT, 0.999, Z, 0.5, "defaults 1e-3, 0.9, 0.999, 1e-8, 0", try_optimizer), R(amp_optimizer_desc, eps, DEFAULT, 1e-8, Z, 0.5, "defaults 1e-3, 0.9, 0.999, 1e-8, 0", try_optimizer),
    R(amp_optimizer_desc, weight_decay, VALUE, 0, 0, 0.5, "defaults 1e-3, 0.9, 0.999, 1e-8, 0", try_optimizer), R(amp_optimizer_desc, momentum, VALUE, 0, 0, 0.5, "as in torch.optim.SGD", try_sgd),
    R(amp_optimizer_desc, dampening, VALUE, 0, 0, 0.5, "as in torch.optim.SGD", try_sgd), R(amp_optimizer_desc, clip_norm, OFF, 0, 0, 0.5, "0: no clipping", try_optimizer),
    R(amp_optimizer_desc, nesterov, VALUE, 0, 0, 1, "", try_nesterov), R(amp_optimizer_desc, maximize, VALUE, 0, 0, 1, "", try_optimizer),
    R(amp_optimizer_desc, decay_vectors, VALUE, 0, 0, 1, "1: weight decay on one-dimensional", try_optimizer), R(amp_optimizer_desc, clip_each, VALUE, 0, 0, 1, "1: also clip the running sum", try_optimizer),
    R(amp_optimizer_desc, result_lag, DEFAULT, 2, AMP_LAG_NONE, 7, "AMP_LAG_NONE; default 2", try_optimizer), R(amp_optimizer_desc, apply_nonfinite, VALUE, 0, 0, 1, "1: without a scaler", try_optimizer),
    R(amp_optimizer_desc, sharded, VALUE, 0, 0, 1, "as in amp_grad_set_desc", try_optimizer), R(amp_optimizer_desc, deterministic, VALUE, 0, 0, 1, "1: the same bits", try_optimizer),
    R(amp_optimizer_desc, no_overlap, VALUE, 0, 0, 1, "1: gradients are summed in the step", try_optimizer), R(amp_optimizer_desc, overlap_param_gather, VALUE, 0, 0, 1, "1: weights of .shard", try_gather),
    R(amp_optimizer_desc, bucket_bytes, DEFAULT, 26214400, 0, 64, "default 25 MiB", try_optimizer), R(amp_optimizer_desc, seed, VALUE, 0, 0, 5, "a function of seed", try_optimizer),
    R(amp_optimizer_desc, sync_every, OFF, 0, 0, 3, "Above 0: loose coupling", try_optimizer), R(amp_optimizer_desc, outer_lr, DEFAULT, 0.7, Z, 0.5, "outer_lr 0: 0.7", try_outer),
    R(amp_optimizer_desc, outer_momentum, DEFAULT, 0.9, Z, 0.5, "outer_momentum 0: 0.9", try_outer),
    R(amp_schedule, from_zero, VALUE, 0, 0, 1, "1: warmup is lr step / warmup", try_warm), R(amp_schedule, lr, REFUSED, 0, Z, 1, "above 0, at most 1e30, or AMP_EXPLICIT_ZERO", try_schedule),
    R(amp_schedule, min_lr, VALUE, 0, 0, 0.5, "from .steps on", try_schedule), R(amp_schedule, warmup, VALUE, 0, 0, 5, "steps that rise linearly", try_schedule),
    R(amp_schedule, steps, REFUSED, 0, 0, 20, "may be 0", try_schedule), R(amp_schedule, decay, DEFAULT, 10, 0, 5, "default a fifth of .steps", try_wsd),
    R(amp_schedule, timescale, DEFAULT, 7, 0, 3, "default warmup, or 10000", try_root), R(amp_schedule, reserved, RESERVED, 0, 0, 0, "", try_schedule),
    R(amp_field, reserved, RESERVED, 0, 0, 0, "", try_count), R(amp_field, count, REFUSED, 0, 0, 1, "`count` values", try_count),
    R(amp_source, samples, REFUSED, 0, 0, 8, "", try_source), R(amp_source, n_fields, REFUSED, 0, 0, 1, "", try_source), R(amp_source, reserved, RESERVED, 0, 0, 0, "", try_source),
    R(amp_source, hash, OFF, 0, 0, 0, "may stay 0", try_source),
    R(amp_loader_desc, n_arrays, COUNT, 0, 0, 0, "1 to AMP_MAX_FIELDS", NULL), R(amp_loader_desc, n_tensors, REFUSED, 0, 0, 2, "1 to AMP_MAX_FIELDS", try_tensors),
    R(amp_loader_desc, shuffle, VALUE, 0, 0, 1, "1: a new order each epoch", try_loader), R(amp_loader_desc, reserved, RESERVED, 0, 0, 0, "", try_loader),
    R(amp_loader_desc, batch, REFUSED, 0, 0, 2, "1 or more", try_loader), R(amp_loader_desc, seq, REFUSED, 0, 0, 4, "path: 1 or more", try_path),
    R(amp_loader_desc, first, VALUE, 0, 0, 2, "range of tokens", try_last), R(amp_loader_desc, last, DEFAULT, 8, 0, 4, "default all", try_last), R(amp_loader_desc, seed, VALUE, 0, 0, 3, "a function of seed and epoch", try_loader),
    R(amp_loader_desc, epochs, OFF, 0, 0, 2, "default endless", try_loader), R(amp_loader_desc, workers, DEFAULT, 2, AMP_NO_WORKERS, 1, "AMP_NO_WORKERS", try_loader),
    R(amp_loader_desc, prefetch, DEFAULT, 2, 0, 3, "default 2 each", try_loader), R(amp_loader_desc, timeout_ms, DEFAULT, 60000, 0, 1000, "default 60000", try_loader),
    R(amp_loader_desc, rank, VALUE, 0, 0, 1, "of this process", try_world), R(amp_loader_desc, world, DEFAULT, 1, 0, 2, "world 0: those of the context's reducer", try_loader),
    R(amp_loader_desc, vocab, OFF, 0, 0, 256, "default unchecked", try_path), R(amp_loader_desc, disable_pinned, VALUE, 0, 0, 1, "1: pageable host memory", try_loader),
    R(amp_loader_desc, cache_mb, DEFAULT, 1024, AMP_NO_CACHE, 7, "default 1024; AMP_NO_CACHE: 0", try_path),
    R(amp_ranks_desc, world, REFUSED, 0, 0, 2, "1 to 1024", try_ranks), R(amp_ranks_desc, timeout_ms, AUTO, 0, 0, 0, "default 60000", NULL),
    R(amp_settings, disable, VALUE, 0, 0, 1, "\"enabled\" .disable true", try_settings), R(amp_settings, memory_efficient, VALUE, 0, 0, 1, "\"memory_efficient\" false", try_settings),
    R(amp_settings, disable_cache, VALUE, 0, 0, 1, "\"cache\" .disable_cache true", try_settings), R(amp_settings, saturate_inputs, VALUE, 0, 0, 1, "\"saturate_inputs\" false", try_settings),
    R(amp_settings, threads, AUTO, 0, 0, 1, "\"threads\" all", NULL), R(amp_settings, allow_tf32, VALUE, 0, 0, 1, "\"tf32\" .allow_tf32 false", try_settings), R(amp_settings, clip_norm, OFF, 0, 0, 0.5, "\"clip_norm\" none above 0", try_settings),
    R(amp_settings, accumulation, DEFAULT, 1, 0, 2, "\"accumulation\" 1", try_settings), R(amp_settings, max_skips, DEFAULT, 25, 0, 7, "\"max_skips\" 25", try_settings),
    R(amp_settings, max_retries, DEFAULT, 3, AMP_NO_RETRIES, 2, "\"max_retries\" 3", try_settings), R(amp_settings, workers, DEFAULT, 2, AMP_NO_WORKERS, 1, "\"workers\", \"prefetch\" 2", try_settings),
    R(amp_settings, prefetch, DEFAULT, 2, 0, 3, "\"workers\", \"prefetch\" 2", try_settings), R(amp_settings, disable_pinned, VALUE, 0, 0, 1, "\"pin\" .disable_pinned true", try_settings),
    R(amp_settings, debug, VALUE, 0, 0, 1, "\"debug\" false", try_settings), R(amp_settings, log_interval, DEFAULT, 100, AMP_INTERVAL_OFF, 7, "\"log_interval\" 100", try_settings),
    R(amp_settings, memory_interval, DEFAULT, 100, AMP_INTERVAL_OFF, 7, "\"memory_interval\" 100", try_settings), R(amp_settings, cleanup_interval, DEFAULT, AMP_INTERVAL_OFF, 0, 7, "\"cleanup_interval\" off", try_settings),
    R(amp_settings, tensor_stats_interval, DEFAULT, AMP_INTERVAL_OFF, 0, 7, "\"tensor_stats_interval\" off", try_settings), R(amp_settings, batch_growth_interval, DEFAULT, AMP_INTERVAL_OFF, 0, 7, "\"batch_growth_interval\" off", try_settings),
    R(amp_settings, memory_warning, DEFAULT, 0.9, 0, 0.5, "\"memory_warning\" 0.9", try_settings),
    R(amp_monitor_desc, append, VALUE, 0, 0, 1, "append 0: a new file", try_monitor), R(amp_monitor_desc, max_skips, DEFAULT, 25, 0, 7, "as in amp_settings", try_monitor),
    R(amp_monitor_desc, log_interval, DEFAULT, 100, AMP_INTERVAL_OFF, 7, "as in amp_settings", try_monitor), R(amp_monitor_desc, memory_interval, DEFAULT, 100, AMP_INTERVAL_OFF, 7, "as in amp_settings", try_monitor),
    R(amp_monitor_desc, cleanup_interval, DEFAULT, AMP_INTERVAL_OFF, 0, 7, "as in amp_settings", try_monitor), R(amp_monitor_desc, memory_warning, DEFAULT, 0.9, 0, 0.5, "as in amp_settings", try_monitor),
    R(amp_monitor_desc, reserved, RESERVED, 0, 0, 0, "", try_monitor), R(amp_monitor_desc, epoch, VALUE, 0, 0, 3, "number of the first epoch", try_monitor),
    R(amp_step_info, loss, VALUE, 0, 0, 0.5, "", try_step_info), R(amp_step_info, no_loss, VALUE, 0, 0, 0, "1: the loss was not read", try_step_info), R(amp_step_info, reserved, RESERVED, 0, 0, 0, "", NULL),
    R(amp_step_info, tokens, VALUE, 0, 0, 3, "of all micro-batches", try_step_info),
    R(amp_tensor_stats_desc, n_params, COUNT, 0, 0, 1, "", try_stats), R(amp_tensor_stats_desc, n_ranges, COUNT, 0, 0, 0, "", try_stats), R(amp_tensor_stats_desc, reserved, RESERVED, 0, 0, 0, "", try_stats),
    R(amp_tensor_stats_desc, interval, DEFAULT, 100, 0, 7, "default 100", try_stats),
    R(amp_verify_desc, n_params, COUNT, 0, 0, 0, "", NULL), R(amp_verify_desc, n_outputs, COUNT, 0, 0, 0, "", NULL), R(amp_verify_desc, n_dtypes, COUNT, 0, 0, 0, "", NULL),
    R(amp_verify_desc, allowance, DEFAULT, 8, 0, 2, "default 8", try_verify),
    R(amp_gradcheck_desc, n_inputs, COUNT, 0, 0, 0, "", NULL), R(amp_gradcheck_desc, n_outputs, COUNT, 0, 0, 0, "", NULL), R(amp_gradcheck_desc, directions, DEFAULT, 8, 0, 40, "default 8", try_gradcheck),
    R(amp_gradcheck_desc, seed, VALUE, 0, 0, 5, "", try_gradcheck),
    R(amp_advise_desc, batch, OFF, 0, 0, 0, "Each may be 0", try_advise), R(amp_advise_desc, n_losses, COUNT, 0, 0, 0, "", NULL),
    R(amp_tune_desc, n_dtypes, COUNT, 0, 0, 0, "", NULL), R(amp_tune_desc, batch, DEFAULT, 1, 0, 3, "batch (default 1)", try_tune), R(amp_tune_desc, max_batch, DEFAULT, 1, 0, 0, "max_batch (default batch)", try_tune),
    R(amp_tune_desc, iterations, DEFAULT, 10, 0, 4, "timed steps, default 10", try_tune), R(amp_tune_desc, warmup, DEFAULT, 3, AMP_NO_WARMUP, 1, "default 3 (AMP_NO_WARMUP: none)", try_tune),
    R(amp_adapt_desc, n_params, COUNT, 0, 0, 0, "", NULL), R(amp_adapt_desc, n_ladder, COUNT, 0, 0, 0, "", NULL), R(amp_adapt_desc, budget, DEFAULT, 0.1, Z, 0.5, "AMP_EXPLICIT_ZERO: nothing moves", try_adapt),
    R(amp_adapt_desc, hysteresis, DEFAULT, 0.5, 0, 0.25, "up to 1; default 0.5", try_adapt), R(amp_adapt_desc, interval, DEFAULT, 20, 0, 7, "steps; default 20", try_adapt),
    R(amp_adapt_desc, checks, DEFAULT, 3, 0, 7, "default 3", try_adapt), R(amp_adapt_desc, changes, AUTO, 0, 0, 0, "default a third of them", try_adapt),
    R(amp_adapt_desc, rows, DEFAULT, 8, 0, 7, "default 8", try_adapt), R(amp_adapt_desc, reserved, RESERVED, 0, 0, 0, "", try_adapt),
    R(amp_recovery_desc, n_params, COUNT, 0, 0, 0, "", NULL), R(amp_recovery_desc, interval, AUTO, 0, 0, 0, "default 100", try_recovery),
    R(amp_recovery_desc, batch_growth_interval, OFF, 0, 0, 0, "default off", try_recovery), R(amp_recovery_desc, max_retries, AUTO, 0, 0, 0, "default 3; AMP_NO_RETRIES: none", try_recovery),
    R(amp_recovery_desc, reserved, RESERVED, 0, 0, 0, "", try_recovery),
    R(amp_convert_desc, rounding, VALUE, 0, 0, 1, "an amp_rounding", try_convert), R(amp_convert_desc, saturate, VALUE, 0, 0, 1, "1: overflow and infinity become", try_convert),
    R(amp_convert_desc, seed, VALUE, 0, 0, 5, "stochastic: element i uses", try_stochastic), R(amp_convert_desc, offset, VALUE, 0, 0, 5, "stochastic: element i uses", try_stochastic)};
enum { ROWS = sizeof rows / sizeof *rows };

/* Structs that the library fills.  Those behind Backends, in >>kernels, are for kernels and backends. */
static const char *const made[] = {
    "amp_memory_info", "amp_cache_info", "amp_telemetry", "amp_plan", "amp_fp8_stats", "amp_tape_node_info", "amp_custom_call", "amp_grad_stats", "amp_parameter_bytes",
    "amp_step_result", "amp_sample", "amp_batch", "amp_loader_info", "amp_cpu_info", "amp_device", "amp_rates", "amp_machine", "amp_choice", "amp_mask_view", "amp_status",
    "amp_step_record", "amp_epoch_record", "amp_epoch_summary", "amp_tensor_stats_row", "amp_tensor_stats_report", "amp_verify_row", "amp_verify_report",
    "amp_gradcheck_report", "amp_advice", "amp_tune_row", "amp_tune_report", "amp_adapt_record", "amp_recovery_event"};
static int is_made(const char *type) {
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) if (!strcmp(made[i], type)) return 1;
    return 0;
}
static const struct row *row_of(const char *type, const char *name) {
    for (int i = 0; i < ROWS; i++) if (!strcmp(rows[i].type, type) && !strcmp(rows[i].name, name)) return &rows[i];
    return NULL;
}

/* ---- amp.h's text */

/* Adds text with every run of white space as one space. */
static void squeeze(char *to, size_t size, const char *text) {
    size_t n = strlen(to);
    for (; *text != 0 && n + 2 < size; text++) {
        if (strchr(" \n\t", *text) == NULL) to[n++] = *text;
        else if (n > 0 && to[n - 1] != ' ') to[n++] = ' ';
    }
    to[n] = 0;
}
/* Without comments. */
static void strip(char *text) {
    char *open, *close;
    while ((open = strstr(text, "/*")) != NULL && (close = strstr(open, "*/")) != NULL) memmove(open, close + 2, strlen(close + 2) + 1);
}
static int is_number(const char *type) {
    static const char *const numeric[] = {"float", "double", "int", "size_t", "int32_t", "int64_t", "uint32_t", "uint64_t"};
    for (size_t i = 0; i < sizeof numeric / sizeof *numeric; i++) if (!strcmp(numeric[i], type)) return 1;
    return 0;
}

static char kinds[ROWS][32];            /* of each row, the type as declared */
static int met[ROWS];

/* The struct's members, each of which is in the table.  said: its text, and the comment in front. */
static void read_struct(const char *type, char *body, const char *said) {
    char *save = NULL;
    strip(body);
    for (char *line = strtok_r(strchr(body, '{') + 1, ";}", &save); line != NULL; line = strtok_r(NULL, ";}", &save)) {
        char number[32] = "", *part, *inner = NULL;
        if (sscanf(line, " %31[a-z0-9_]", number) != 1 || !is_number(number) || strchr(line, '(') != NULL) continue;
        for (part = strtok_r(strstr(line, number) + strlen(number), ",", &inner); part != NULL; part = strtok_r(NULL, ",", &inner)) {
            char name[64];
            const struct row *row;
            if (sscanf(part, " %63[a-z0-9_]", name) != 1) continue;         /* a pointer is no number */
            row = row_of(type, name);
            CHECK_MSG(row != NULL, "%s.%s is not in the table of tests/unit/t_zeros.c: what is 0 in it?", type, name);
            if (row == NULL) continue;
            met[row - rows]++;
            snprintf(kinds[row - rows], sizeof kinds[0], "%s", number);
            CHECK_MSG(strstr(said, row->says) != NULL, "%s.%s: amp.h does not say \"%s\"", type, name, row->says);
            CHECK_MSG(row->says[0] != 0 || row->means == VALUE || row->means == COUNT || row->means == RESERVED || row->means == REFUSED,
                      "%s.%s: what 0 means is not documented", type, name);
        }
    }
}

static int read_header(void) {
    static char comment[16384], body[16384], said[40960];
    char line[256], type[64] = "";
    int in_comment = 0, structs = 0;
    FILE *file = fopen("amp.h", "r");
    if (file == NULL) return 0;
    while (fgets(line, sizeof line, file) != NULL && strncmp(line, "/* ---- Backends.  A ", 20) != 0) {
        if (type[0] == 0 && (sscanf(line, "typedef struct %63[a-z0-9_] {", type) == 1 || sscanf(line, "struct %63[a-z0-9_] {", type) == 1)) {
            if (strchr(line, '{') == NULL) { type[0] = 0; comment[0] = 0; continue; }
            body[0] = 0;
        }
        if (type[0] != 0) {
            strncat(body, line, sizeof body - strlen(body) - 1);
            if (line[0] != '}' && (strchr(line, '}') == NULL || strstr(line, "typedef struct") != line)) continue;
            said[0] = 0;
            squeeze(said, sizeof said, comment); squeeze(said, sizeof said, body);
            structs++;
            if (strncmp(type, "amp_", 4) == 0 && !is_made(type)) read_struct(type, body, said);
            type[0] = comment[0] = 0;
            continue;
        }
        if (!strncmp(line, "/*", 2)) { in_comment = 1; comment[0] = 0; }
        if (in_comment) strncat(comment, line, sizeof comment - strlen(comment) - 1);
        else if (line[0] != '\n' && strncmp(line, "typedef struct", 14) != 0) comment[0] = 0;
        if (strstr(line, "*/") != NULL) in_comment = 0;
    }
    fclose(file);
    return structs;
}

TEST(every_number_is_in_the_table) {
    int structs = read_header();
    if (structs == 0) SKIP("amp.h is not in this folder");
    CHECK_MSG(structs >= 75, "%d structs", structs);
    for (int i = 0; i < ROWS; i++) CHECK_MSG(met[i] == 1, "%s.%s stands %d times in amp.h", rows[i].type, rows[i].name, met[i]);
    CHECK(ROWS >= 190);
}

/* ---- Each number, tried */

static amp_result outcome(const struct row *row, double value, unsigned char *out, size_t *n) {
    static union { amp_settings settings; amp_optimizer_desc optimizer; amp_attention_op attention; char bytes[4096]; double align; } desc;
    const char *kind = kinds[row - rows];
    float f = (float)value;
    int64_t i64 = (int64_t)value;
    int32_t i32 = (int32_t)value;
    amp_result r;
    memset(&desc, 0, sizeof desc);
    fill();
    at = row->at; width = row->bytes;
    if (!strcmp(kind, "double")) memcpy(desc.bytes + at, &value, sizeof value);
    else if (!strcmp(kind, "float")) memcpy(desc.bytes + at, &f, sizeof f);
    else if (strstr(kind, "64") != NULL) memcpy(desc.bytes + at, &i64, sizeof i64);
    else memcpy(desc.bytes + at, &i32, sizeof i32);
    seen.n = 0;
    r = row->call(&desc);
    memcpy(out, seen.bytes, seen.n);
    *n = seen.n;
    return r;
}

static void try_row(const struct row *row) {
    static unsigned char zero[1 << 16], other[1 << 16];
    size_t n[2];
    amp_result r = outcome(row, 0, zero, &n[0]);
    const char *what = mean_names[row->means];
    if (row->means == REFUSED) CHECK_MSG(r != AMP_OK && strstr(amp_last_error(), row->name) != NULL, "%s.%s = 0 gives %d, %s", row->type, row->name, (int)r, amp_last_error());
    else CHECK_MSG(r == AMP_OK, "%s.%s = 0 (%s): %s", row->type, row->name, what, amp_last_error());
    if (row->means == DEFAULT) {
        r = outcome(row, row->value, other, &n[1]);
        CHECK_MSG(r == AMP_OK && n[0] == n[1] && n[0] > 0 && memcmp(zero, other, n[0]) == 0, "%s.%s: 0 is not %g (%s)", row->type, row->name, row->value, r ? amp_last_error() : "");
    }
    if (row->other != 0) {
        r = outcome(row, row->other, other, &n[1]);
        CHECK_MSG(r == AMP_OK, "%s.%s = %g: %s", row->type, row->name, row->other, amp_last_error());
        if (row->means != REFUSED && row->means != COUNT)
            CHECK_MSG(n[0] != n[1] || memcmp(zero, other, n[0]) != 0, "%s.%s: %g makes no difference", row->type, row->name, row->other);
    }
    if (row->zero != 0) {
        r = outcome(row, row->zero, other, &n[1]);
        CHECK_MSG(r == AMP_OK && (n[0] != n[1] || memcmp(zero, other, n[0]) != 0), "%s.%s = %g says 0: %d", row->type, row->name, row->zero, (int)r);
    } else if (row->bytes == 8 || row->bytes == 4) {            /* nothing says 0 where 0 is a value, or makes no sense */
        const char *kind = kinds[row - rows];
        if (strcmp(kind, "float") != 0 && strcmp(kind, "double") != 0) return;
        if (!strcmp(row->type, "amp_step_info")) return;        /* a loss may be any number */
        r = outcome(row, Z, other, &n[1]);
        CHECK_MSG(r != AMP_OK, "%s.%s = AMP_EXPLICIT_ZERO is taken", row->type, row->name);
    }
}

TEST(zero_is_what_the_table_says) {
    if (kinds[0][0] == 0) SKIP("amp.h is not in this folder");
    open_context();
    for (int i = 0; i < ROWS; i++) if (rows[i].call != NULL && kinds[i][0] != 0) try_row(&rows[i]);
    amp_close(amp);
}

/* ---- What AMP_EXPLICIT_ZERO and its kin give */

TEST(explicit_zero_of_computed_values) {
    double none = amp_explicit(0.0), tiny = amp_explicit(1e-46);
    float narrow = (float)amp_explicit(0.0), smallest = (float)amp_explicit(1.4012984643e-45);
    CHECK(none == (double)AMP_EXPLICIT_ZERO && narrow == AMP_EXPLICIT_ZERO);
    CHECK(amp_explicit(-0.0) == none && tiny == none && amp_explicit(-7e-46) == none);
    CHECK(smallest != 0 && smallest != AMP_EXPLICIT_ZERO && amp_explicit(-1e-45) == -1e-45);
    CHECK(amp_explicit(0.1) == 0.1 && amp_explicit(-3) == -3 && amp_explicit((double)0.1f) == (double)0.1f && amp_explicit(HUGE_VAL) == HUGE_VAL);
    CHECK(amp_explicit(NAN) != amp_explicit(NAN));
}

/* A weight of a loss that is annealed from 0: its gradients are zeros, as in PyTorch, and its loss is what it was. */
TEST(losses_of_weight_0) {
    float loss[2];
    open_context();
    for (int k = 0; k < 2; k++) {
        amp_cross_entropy_op ce;
        amp_mse_op mse;
        amp_linear_cross_entropy_op both;
        memset(&ce, 0, sizeof ce); memset(&mse, 0, sizeof mse); memset(&both, 0, sizeof both);
        ce.factor = mse.factor = both.factor = (float)amp_explicit(k);
        fill(); CHECK_OK(try_cross_entropy(&ce));
        for (int i = 0; i < 16; i++) CHECK(k ? numbers[1][i] != 0 : numbers[1][i] == 0);
        loss[k] = numbers[2][0];
        fill(); CHECK_OK(try_mse(&mse));
        for (int i = 0; i < 16; i++) CHECK((numbers[2][i] == 0) == (k == 0 || numbers[0][i] == numbers[1][i]));
        fill(); CHECK_OK(try_linear_cross_entropy(&both));
        for (int i = 0; i < 16; i++) CHECK(k || (numbers[1][i] == 0 && numbers[9][i] == 0));
        CHECK(params[0].grad_live == 1);
    }
    CHECK(loss[0] == loss[1]);
    amp_close(amp);
}

/* On the tape: by .factor, by amp_tape_scale, and of two losses; a head that only a loss of weight 0 reaches has zeros. */
TEST(losses_of_weight_0_on_the_tape) {
    amp_tape *tape;
    open_context();
    CHECK_OK(amp_tape_create(amp, &tape, NULL));
    for (int way = 0; way < 4; way++) {
        amp_tensor x = square(0), target = square(1);
        amp_value v, loss, first;
        amp_cross_entropy_op weight;
        amp_linear_cross_entropy_op whole;
        memset(&weight, 0, sizeof weight); memset(&whole, 0, sizeof whole);
        weight.factor = whole.factor = AMP_EXPLICIT_ZERO;
        fill();
        for (int i = 0; i < 4; i++) numbers[11][i] = 7;
        CHECK_OK(amp_tape_begin(tape, NULL));
        v = amp_tape_linear(tape, amp_tape_input(tape, &x), &params[0], NULL, AMP_ACT_NONE);
        first = amp_tape_mse(tape, v, amp_tape_input(tape, &target), AMP_REDUCTION_MEAN);
        v = amp_tape_activation(tape, amp_tape_input(tape, &x), &params[1], AMP_ACT_TANH);
        loss = way == 3 ? amp_tape_linear_cross_entropy(tape, v, &params[0], NULL, labels, &whole)
                        : amp_tape_cross_entropy(tape, v, labels, way == 0 ? &weight : NULL);
        if (way == 1) loss = amp_tape_scale(tape, loss, 0);
        if (way == 2) loss = amp_tape_scale(tape, loss, AMP_EXPLICIT_ZERO);
        CHECK_OK(amp_tape_backward(tape, amp_tape_add(tape, first, loss), NULL));
        for (int i = 0; i < 4; i++) CHECK_MSG(numbers[11][i] == 0, "way %d: %g", way, (double)numbers[11][i]);
        CHECK(params[1].grad_live == 1 && params[0].grad_live == 1 && numbers[9][0] != 0);
    }
    amp_tape_destroy(tape);
    amp_close(amp);
}

/* Scales of 0 weigh evenly what the mask shows, an alpha of 0 gives zeros, and no gradient passes back; an eps of 0 adds none. */
TEST(scales_of_0) {
    static const amp_cpu_path paths[] = {AMP_CPU_SCALAR, AMP_CPU_DEFAULT};
    for (int path = 0; path < 2; path++) {
        amp_desc d;
        amp_attention_op attention;
        amp_softmax_op softmax;
        amp_matmul_op matmul;
        amp_norm_op norm;
        memset(&d, 0, sizeof d); memset(&attention, 0, sizeof attention); memset(&softmax, 0, sizeof softmax); memset(&matmul, 0, sizeof matmul);
        memset(&norm, 0, sizeof norm);
        d.dtype = AMP_F32; d.threads = 1; d.cpu_path = paths[path];
        CHECK_OK(amp_open(&amp, &d));
        attention.scale = softmax.scale = matmul.alpha = norm.eps = AMP_EXPLICIT_ZERO;
        fill(); CHECK_OK(try_attention(&attention));        /* causal: query i is the mean of values 0 to i */
        for (int i = 0; i < 4; i++) {
            double sum = 0;
            for (int j = 0; j <= i; j++) sum += (double)numbers[2][8 * j];
            CHECK(fabs(sum / (i + 1) - (double)numbers[3][8 * i]) < 1e-6);
        }
        for (int i = 0; i < 32; i++) CHECK(numbers[5][i] == 0 && numbers[6][i] == 0);
        fill(); CHECK_OK(try_softmax(&softmax));
        for (int i = 0; i < 16; i++) CHECK(fabsf(numbers[1][i] - 0.25f) < 1e-7f && numbers[3][i] == 0);
        fill(); CHECK_OK(try_matmul(&matmul));
        for (int i = 0; i < 16; i++) CHECK(numbers[2][i] == 0 && numbers[4][i] == 0 && numbers[5][i] == 0);
        fill(); CHECK_OK(try_norm(&norm));                  /* RMSNorm came last */
        for (int i = 0; i < 4; i++) {
            double sum = 0;
            for (int j = 0; j < 4; j++) sum += (double)numbers[0][4 * i + j] * (double)numbers[0][4 * i + j] / 4;
            CHECK(fabs((double)numbers[5][i] * sqrt(sum) - 1) < 1e-6);
        }
        amp_close(amp);
    }
}

/* torch.nn.CrossEntropyLoss(ignore_index=0): rows of label 0 do not count. */
TEST(label_0_is_ignored) {
    static const int32_t own[4] = {0, 1, 2, 0};
    static const int32_t spellings[3] = {AMP_IGNORE_ZERO, 0, -100};
    open_context();
    for (int k = 0; k < 3; k++) {
        amp_cross_entropy_op ce;
        double want = 0, rows_counted = 0;
        memset(&ce, 0, sizeof ce);
        fill();
        ce.logits = square(0); ce.dlogits = square(1); ce.labels = own; ce.loss = numbers[2]; ce.ignore_index = spellings[k];
        CHECK_OK(amp_cross_entropy(amp, &ce));
        for (int i = 0; i < 4; i++) {
            double sum = 0;
            if (own[i] == 0 && k == 0) { for (int j = 0; j < 4; j++) CHECK(numbers[1][4 * i + j] == 0); continue; }
            for (int j = 0; j < 4; j++) sum += exp((double)numbers[0][4 * i + j]);
            want += log(sum) - (double)numbers[0][4 * i + own[i]];
            rows_counted++;
        }
        CHECK_MSG(fabs((double)numbers[2][0] - want / rows_counted) < 1e-6, "%d: %g, not %g", k, (double)numbers[2][0], want / rows_counted);
    }
    amp_close(amp);
}

/* Two groups, decay and no decay, as transformers' trainer makes them: AdamW of lr 0.1 and weight_decay 0.5, zero gradients. */
TEST(a_group_without_decay) {
    amp_param_group group;
    amp_optimizer_desc desc;
    amp_optimizer *o;
    open_context();
    fill();
    memset(&group, 0, sizeof group); memset(&desc, 0, sizeof desc);
    params[1].weight = square(10); params[1].grad = square(11);
    for (int i = 0; i < 16; i++) { numbers[8][i] = numbers[10][i] = 1; numbers[9][i] = numbers[11][i] = 0; }
    group.match = "fc.bias"; group.weight_decay = AMP_EXPLICIT_ZERO;
    desc.params = params; desc.n_params = 2; desc.groups = &group; desc.n_groups = 1; desc.lr = 0.1; desc.weight_decay = 0.5;
    CHECK_OK(amp_optimizer_create(amp, &o, &desc));
    params[0].grad_live = params[1].grad_live = 1;
    CHECK_OK(amp_step(o, NULL));
    for (int i = 0; i < 16; i++) CHECK(numbers[8][i] == 0.95f && numbers[10][i] == 1);
    amp_optimizer_destroy(o);
    amp_close(amp);
}

/* Arguments of functions where 0 is the default. */
TEST(arguments) {
    amp_model *model;
    amp_tape *tape;
    open_context();
    fill();
    CHECK_OK(amp_model_create(amp, &model, 1, 0));
    for (int init = AMP_INIT_CONSTANT; init <= AMP_INIT_KAIMING_NORMAL; init++) {
        char name[20];
        snprintf(name, sizeof name, "w%d", init);
        const amp_param *p = amp_model_param(model, name, 4, 4, (amp_init)init, AMP_EXPLICIT_ZERO);
        CHECK_MSG(p != NULL, "%s", amp_last_error());
        for (int i = 0; p != NULL && i < 16; i++) CHECK(((const float *)p->weight.data)[i] == 0);
        name[0] = 'v';
        p = amp_model_param(model, name, 4, 4, (amp_init)init, 0);
        CHECK(p != NULL && (((const float *)p->weight.data)[0] == 0) == (init == AMP_INIT_CONSTANT));
    }
    CHECK_OK(amp_tape_create(amp, &tape, NULL));
    for (int k = 0; k < 2; k++) {
        amp_tensor a = square(0), b = square(1);
        amp_value in, y[3];
        float out[16];
        CHECK_OK(amp_tape_begin(tape, NULL));
        in = amp_tape_input(tape, &a);
        y[0] = amp_tape_keep(tape, amp_tape_matmul(tape, in, amp_tape_input(tape, &b), 0, 0, k ? AMP_EXPLICIT_ZERO : 0));
        y[1] = amp_tape_keep(tape, amp_tape_layernorm(tape, in, NULL, NULL, k ? AMP_EXPLICIT_ZERO : 0));
        y[2] = amp_tape_keep(tape, amp_tape_rmsnorm(tape, in, NULL, k ? AMP_EXPLICIT_ZERO : 0));
        CHECK_OK(amp_tape_finish(tape));
        CHECK_OK(amp_tape_read(tape, y[0], out, 16));
        for (int i = 0; i < 16; i++) CHECK(k == 0 || out[i] == 0);
        CHECK(k == 1 || out[0] != 0);
        for (int i = 1; i < 3; i++) {       /* the mean of squares of a row is 1, or with eps just below */
            double sum = 0;
            CHECK_OK(amp_tape_read(tape, y[i], out, 16));
            for (int j = 0; j < 4; j++) sum += (double)out[j] * (double)out[j] / 4;
            CHECK_MSG((fabs(sum - 1) < 1e-6) == k && fabs(sum - 1) < 1e-4, "%d %d: %.9g", i, k, sum);
        }
    }
    amp_tape_destroy(tape);
    amp_model_destroy(model);
    amp_close(amp);
}

/* A key of a settings file with the value 0: refused, or 0 is what the text then says. */
TEST(settings_of_0) {
    static char text[8192], line[256];
    static amp_settings none, s;
    int taken = 0, refused = 0;
    CHECK(amp_settings_text(&none, text, sizeof text) < sizeof text);
    for (char *at_line = text; *at_line != 0; at_line += strcspn(at_line, "\n") + 1) {
        char key[64], got[8192];
        if (sscanf(at_line, at_line[0] == '#' ? "# %63[a-z0-9_] =" : "%63[a-z0-9_] =", key) != 1) continue;
        memset(&s, 0, sizeof s);
        if (amp_settings_set(&s, key, "0") != AMP_OK) { refused++; continue; }
        taken++;
        CHECK_OK(amp_settings_check(&s));
        CHECK(amp_settings_text(&s, got, sizeof got) < sizeof got);
        snprintf(line, sizeof line, "%s = ", key);
        const char *value = strstr(got, line);
        CHECK_MSG(value != NULL, "%s is not in the text", key);
        if (value == NULL) continue;
        value += strlen(line);
        CHECK_MSG(value[0] == '0' || !strncmp(value, "false", 5) || !strncmp(value, "off", 3), "%s = 0 is %.12s", key, value);
    }
    CHECK_MSG(taken >= 10 && refused >= 20, "%d taken, %d refused", taken, refused);
}

/* ---- WHAT DIFFERS FROM PYTORCH'S DEFAULTS, at the end of amp.h's API: each number under AMP.H is the default of the field
 * that the last column names, and with what that column says amp.h gives PyTorch's numbers (golden data of defaults.py) */

static int is_default(const char *name, double value) {
    for (int i = 0; i < ROWS; i++)
        if (!strcmp(rows[i].name, name) && ((rows[i].means == DEFAULT && rows[i].value == value) || ((rows[i].means == VALUE || rows[i].means == OFF) && value == 0))) return 1;
    return 0;
}
TEST(numbers_of_the_table_of_defaults) {
    enum { OURS = 57, THEIRS = 85 };
    char line[256], name[64];
    int inside = 0, lines = 0, numbers_seen = 0;
    FILE *file = fopen("amp.h", "r");
    if (file == NULL) SKIP("amp.h is not in this folder");
    while (fgets(line, sizeof line, file) != NULL && strncmp(line, "   WHEN SOMETHING IS WRONG", 26) != 0) {
        char *end;
        double value;
        if (!strncmp(line, "   WHAT DIFFERS FROM PYTORCH'S DEFAULTS\n", 40)) inside = 1;
        if (!inside || strlen(line) <= THEIRS) continue;
        lines++;
        if (sscanf(line + THEIRS, ".%63[a-z_] =", name) != 1 || !strcmp(name, "preset")) continue;
        value = strtod(line + OURS, &end);
        if (end == line + OURS || value != value) continue;
        numbers_seen++;
        CHECK_MSG(is_default(name, value), "the table says that .%s is %g", name, value);
    }
    fclose(file);
    CHECK_MSG(lines >= 25 && numbers_seen >= 6, "%d lines, %d numbers", lines, numbers_seen);
}

static ampt_golden golden;
static void *record(const char *name, uint32_t type, int64_t want) {
    int64_t n;
    void *p = ampt_golden_read(&golden, name, type, &n);
    CHECK_MSG(n == want, "%s has %lld numbers", name, (long long)n);
    return p;
}
static void same(const float *got, const char *name, int64_t n) {
    float *want = (float *)record(name, 1, n);
    for (int64_t i = 0; i < n; i++)
        CHECK_MSG(fabs((double)got[i] - (double)want[i]) <= 2e-6 * (1 + fabs((double)want[i])), "%s[%lld] = %.9g, PyTorch has %.9g", name, (long long)i, (double)got[i], (double)want[i]);
    free(want);
}
static void copy_record(void *to, const char *name, uint32_t type, int64_t n) {
    void *from = record(name, type, n);
    memcpy(to, from, (size_t)n * 4);
    free(from);
}

static void three_steps(amp_optimizer_desc *desc, const char *w, const char *b) {
    static float weights[2][12], slopes[2][12], given[2][12];
    amp_param p[2];
    amp_optimizer *o;
    memset(p, 0, sizeof p);
    copy_record(weights[0], "w", 1, 12); copy_record(weights[1], "b", 1, 4); copy_record(given[0], "dw", 1, 12); copy_record(given[1], "db", 1, 4);
    for (int i = 0; i < 2; i++) {
        p[i].name = i ? "b" : "w";
        p[i].weight = i ? amp_tensor1(weights[i], AMP_F32, 4) : amp_tensor2(weights[i], AMP_F32, 3, 4);
        p[i].grad = p[i].weight; p[i].grad.data = slopes[i];
    }
    desc->params = p; desc->n_params = 2;
    CHECK_OK(amp_optimizer_create(amp, &o, desc));
    for (int step = 1; step <= 3; step++) {
        for (int i = 0; i < 24; i++) slopes[i / 12][i % 12] = given[i / 12][i % 12] * (float)step;
        p[0].grad_live = p[1].grad_live = 1;
        CHECK_OK(amp_step(o, NULL));
    }
    same(weights[0], w, 12); same(weights[1], b, 4);
    amp_optimizer_destroy(o);
}
TEST(pytorchs_optimizers) {
    amp_optimizer_desc desc;
    golden = ampt_golden_open("defaults.bin");
    open_context();
    memset(&desc, 0, sizeof desc);
    desc.weight_decay = 0.01; desc.decay_vectors = 1;
    three_steps(&desc, "adamw/w", "adamw/b");
    memset(&desc, 0, sizeof desc);
    desc.kind = AMP_SGD; desc.momentum = 0.9;
    three_steps(&desc, "sgd/w", "sgd/b");
    amp_close(amp);
    free(golden.data);
}

TEST(pytorchs_operators) {
    static float logits[12], y[12], small[8], mean[2], q[8], k[16], v[16], o[8], lse[2], loss;
    static int32_t own[4];
    amp_cross_entropy_op ce;
    amp_norm_op norm;
    amp_activation_op gelu;
    amp_attention_op attention;
    golden = ampt_golden_open("defaults.bin");
    open_context();
    memset(&ce, 0, sizeof ce); memset(&norm, 0, sizeof norm); memset(&gelu, 0, sizeof gelu); memset(&attention, 0, sizeof attention);
    copy_record(logits, "logits", 1, 12); copy_record(own, "labels", 3, 4);
    ce.logits = amp_tensor2(logits, AMP_F32, 4, 3); ce.labels = own; ce.loss = &loss;
    CHECK_OK(amp_cross_entropy(amp, &ce));
    same(&loss, "cross_entropy", 1);
    ce.ignore_index = AMP_IGNORE_ZERO;
    CHECK_OK(amp_cross_entropy(amp, &ce));
    same(&loss, "ignore_0", 1);
    gelu.x = ce.logits; gelu.y = amp_tensor2(y, AMP_F32, 4, 3); gelu.act = AMP_ACT_GELU_ERF;
    CHECK_OK(amp_activation(amp, &gelu));
    same(y, "gelu", 12);
    copy_record(small, "small", 1, 8);
    norm.x = amp_tensor2(small, AMP_F32, 2, 4); norm.y = amp_tensor2(y, AMP_F32, 2, 4); norm.mean = mean; norm.rstd = lse;
    CHECK_OK(amp_layernorm(amp, &norm));
    same(y, "layernorm", 8);
    norm.eps = 1.1920929e-7f;
    CHECK_OK(amp_rmsnorm(amp, &norm));
    same(y, "rmsnorm", 8);
    copy_record(q, "q", 1, 8); copy_record(k, "k", 1, 16); copy_record(v, "v", 1, 16);
    attention.q = amp_tensor4(q, AMP_F32, 1, 2, 1, 4); attention.o = amp_tensor4(o, AMP_F32, 1, 2, 1, 4); attention.lse = lse;
    attention.k = amp_tensor4(k, AMP_F32, 1, 2, 1, 4); attention.v = amp_tensor4(v, AMP_F32, 1, 2, 1, 4);       /* as many keys as queries */
    attention.mask.kind = AMP_MASK_CAUSAL;
    CHECK_OK(amp_attention(amp, &attention));
    same(o, "causal", 8);
    amp_close(amp);
    free(golden.data);
}

/* The scaler after twenty overflows; a gradient of infinity without one; batches of 10 samples; where Linear begins. */
TEST(pytorchs_steps_batches_and_weights) {
    amp_scaler_desc scaling;
    amp_optimizer_desc desc;
    amp_loader_desc loading;
    amp_loader_info info;
    for (int torch = 0; torch < 2; torch++) {
        amp_scaler *scaler;
        amp_optimizer *o;
        amp_loader *loader;
        amp_model *model;
        amp_param *p;
        float scale, bound[2], most = 0;
        int32_t stepped, batch_count;
        static const float samples[10];
        amp_tensor tensor = amp_tensor1(samples, AMP_F32, 10);
        golden = ampt_golden_open("defaults.bin");
        open_context();
        fill();
        memset(&scaling, 0, sizeof scaling); memset(&desc, 0, sizeof desc); memset(&loading, 0, sizeof loading);
        scaling.preset = torch ? AMP_SCALER_TORCH : AMP_SCALER_DEFAULT;
        desc.apply_nonfinite = torch;
        CHECK_OK(amp_scaler_create(amp, &scaler, &scaling));
        for (int i = 0; i < 20; i++) CHECK_OK(amp_scaler_update_with(scaler, 1));
        scale = amp_scaler_scale(scaler);
        if (torch) same(&scale, "scale", 1);
        else CHECK(scale == 1);
        amp_scaler_destroy(scaler);
        desc.params = params; desc.n_params = 2; desc.kind = AMP_SGD;
        numbers[9][0] = (float)HUGE_VAL;
        params[0].grad_live = 1; params[1].grad_live = 1;
        CHECK_OK(amp_optimizer_create(amp, &o, &desc));
        CHECK_OK(amp_step(o, NULL));
        amp_optimizer_destroy(o);
        copy_record(&stepped, "stepped", 3, 1);
        CHECK(ampt_has_nonfinite(numbers[8], 1) == (torch ? stepped : 0));
        loading.tensors = &tensor; loading.n_tensors = 1; loading.batch = 4; loading.epochs = 1;
        loading.last_batch = torch ? AMP_LAST_PARTIAL : AMP_LAST_DEFAULT;
        CHECK_OK(amp_loader_create(amp, &loader, &loading));
        CHECK_OK(amp_loader_info_get(loader, &info));
        copy_record(&batch_count, "batches", 3, 1);
        CHECK(info.batches == (torch ? batch_count : 2));
        amp_loader_destroy(loader);
        CHECK_OK(amp_model_create(amp, &model, 1, 0));
        p = amp_model_param(model, "linear", 512, 64, AMP_INIT_KAIMING_UNIFORM, torch ? 0.57735027 : 0);
        CHECK(p != NULL);
        for (int i = 0; p != NULL && i < 512 * 64; i++) most = fmaxf(most, fabsf(((const float *)p->weight.data)[i]));
        copy_record(bound, "bound", 1, 2);
        CHECK((fabsf(most - bound[0]) < 0.001f) == torch);
        amp_model_destroy(model);
        amp_close(amp);
        free(golden.data);
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(numbers_of_the_table_of_defaults); RUN(pytorchs_optimizers); RUN(pytorchs_operators); RUN(pytorchs_steps_batches_and_weights);
    RUN(every_number_is_in_the_table); RUN(zero_is_what_the_table_says);
    RUN(explicit_zero_of_computed_values); RUN(losses_of_weight_0); RUN(losses_of_weight_0_on_the_tape); RUN(scales_of_0); RUN(label_0_is_ignored);
    RUN(a_group_without_decay); RUN(arguments); RUN(settings_of_0);
    return TEST_END();
}
