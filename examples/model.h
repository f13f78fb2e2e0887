/* model.h - a model's parameters in two allocations, their values from and to the host, and a pass on a tape. */
#ifndef EXAMPLE_MODEL_H
#define EXAMPLE_MODEL_H

#include "example.h"

/* One big allocation handed out in pieces; with base NULL, only counted. */
typedef struct model_arena { char *base; int64_t used; } model_arena;
static inline void *model_arena_take(model_arena *a, int64_t count, amp_dtype dtype) {
    char *piece = a->base != NULL ? a->base + a->used : NULL;
    a->used += (count * (int64_t)amp_dtype_size(dtype) + 255) / 256 * 256;
    return piece;
}
/* Elements of a tensor that has no memory yet. */
static inline int64_t model_shape_count(const amp_tensor *t) {
    return t->ndim == 2 ? t->shape[0] * t->shape[1] : t->shape[0];
}
/* Sets a parameter's name, and shape: a weight [rows, cols], or a vector if cols is 0.  norm 1: of a norm. */
static inline void model_param_describe(amp_context *amp, amp_param *p, const char *name, int64_t rows, int64_t cols,
                                  int norm) {
    amp_dtype dtype = amp_param_dtype(amp, norm);
    p->name = name;
    p->weight = cols > 0 ? amp_tensor2(NULL, dtype, rows, cols) : amp_tensor1(NULL, dtype, rows);
    p->grad = p->weight;
    p->grad.dtype = AMP_F32;
}

/* The storage dtype of activations: that which a linear layer returns under autocast. */
static inline amp_result model_activations(amp_context *amp, amp_dtype *out) {
    EX_TRY(amp_autocast_begin(amp, NULL));
    *out = amp_autocast_result(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32);
    EX_TRY(amp_autocast_end(amp));
    if (*out == AMP_TF32) *out = AMP_F32;
    return AMP_OK;
}

/* Which weights compute in fp8, if the context does: as users of fp8 do, embeddings, head, first and last block stay in
   bf16; with `all` only embeddings and head.  block: what stands before a block's number in names.  *n_fp8: how many
   compute in it. */
static inline amp_result model_fp8_layers(amp_context *amp, const amp_param *params, int64_t n, const char *block,
                                    int64_t blocks, int all, int *n_fp8) {
    amp_desc desc;
    int64_t i;
    *n_fp8 = 0;
    memset(&desc, 0, sizeof desc);
    EX_TRY(amp_query(amp, &desc));
    for (i = 0; i < n; i++) {
        const char *at = strstr(params[i].name, block);
        int64_t number = at ? strtoll(at + strlen(block), NULL, 10) : 0;
        int inside = at && (all || (number > 0 && number < blocks - 1)), fp8 = desc.autocast_dtype == AMP_FP8;
        if (params[i].weight.ndim != 2) continue;
        *n_fp8 += fp8 && inside;
        if (!inside)
            EX_TRY(amp_layer_override(amp, params[i].name, fp8 ? AMP_BF16 : AMP_DTYPE_DEFAULT));
    }
    return AMP_OK;
}

static inline void model_params_place(amp_param *params, int64_t n, model_arena *weights, model_arena *grads) {
    int64_t i;
    for (i = 0; i < n; i++) {
        amp_param *p = &params[i];
        p->weight.data = model_arena_take(weights, model_shape_count(&p->weight), p->weight.dtype);
        p->grad.data = model_arena_take(grads, model_shape_count(&p->grad), p->grad.dtype);
    }
}

/* Fails if training takes more memory than there is. */
static inline amp_result model_memory_check(amp_context *amp, int64_t weights, int64_t grads, int64_t activations,
                                      const char *advice) {
    amp_machine machine;
    double need, have;
    memset(&machine, 0, sizeof machine);
    EX_TRY(amp_query_machine(amp, &machine));
    need = (double)weights + 3.0 * (double)grads + (double)activations;     /* AdamW keeps two moments */
    have = (double)(machine.device.memory > 0 ? machine.device.memory : machine.cpu.memory);
    if (have > 0 && need > have)
        return ex_fail(AMP_ERR_MEMORY, "training this model takes about %.1f GB, and the device has %.1f GB: "
                            "use a smaller model, batch or sequence%s", need * 1e-9, have * 1e-9, advice);
    return AMP_OK;
}

/* Allocates the counted memory, and restarts the arena in it. */
static inline amp_result model_arena_allocate(amp_context *amp, model_arena *a) {
    void *base = NULL;
    EX_TRY(amp_alloc(amp, &base, a->used));
    a->base = (char *)base;
    a->used = 0;
    return AMP_OK;
}
/* A model's parameters, in two allocations: one of weights, one of gradients. */
typedef struct model_params {
    amp_context *amp;
    amp_param *at; int64_t n, count;        /* count: elements */
    char (*names)[80];
    void *weights, *grads;
    int64_t weights_bytes, grads_bytes;
} model_params;

static inline void model_params_free(model_params *p) {
    if (p->amp != NULL) {
        amp_param_forget(p->amp, p->at, p->n);
        amp_free(p->amp, p->weights);
        amp_free(p->amp, p->grads);
    }
    free(p->at); free(p->names);
    memset(p, 0, sizeof *p);
}
/* Room for `most` of them. */
static inline amp_result model_params_open(model_params *p, amp_context *amp, int64_t most) {
    memset(p, 0, sizeof *p);
    p->at = (amp_param *)calloc((size_t)most, sizeof *p->at);
    p->names = (char (*)[80])calloc((size_t)most, sizeof *p->names);
    p->amp = amp;
    if (p->at != NULL && p->names != NULL) return AMP_OK;
    model_params_free(p);
    return ex_fail(AMP_ERR_MEMORY, "no memory for the model's tables");
}
static inline amp_param *model_params_add(model_params *p, int norm, int64_t rows, int64_t cols, const char *format,
                                          ...)
    __attribute__((format(printf, 5, 6)));
static inline amp_param *model_params_add(model_params *p, int norm, int64_t rows, int64_t cols, const char *format,
                                          ...) {
    amp_param *param = &p->at[p->n];
    va_list args;
    va_start(args, format);
    vsnprintf(p->names[p->n], sizeof *p->names, format, args);
    va_end(args);
    model_param_describe(p->amp, param, p->names[p->n++], rows, cols, norm);
    p->count += model_shape_count(&param->weight);
    return param;
}
/* activations: bytes that training takes besides; advice: to those who have too little memory. */
static inline amp_result model_params_check(const model_params *p, int64_t activations, const char *advice) {
    return model_memory_check(p->amp, p->weights_bytes, p->grads_bytes, activations, advice);
}
static inline amp_result model_params_allocate(model_params *p) {
    model_arena weights = {NULL, 0}, grads = {NULL, 0};
    amp_result result;
    model_params_place(p->at, p->n, &weights, &grads);
    p->weights_bytes = weights.used; p->grads_bytes = grads.used;
    EX_TRY(model_params_check(p, 0, ""));
    result = model_arena_allocate(p->amp, &weights);
    if (result == AMP_OK) result = model_arena_allocate(p->amp, &grads);
    p->weights = weights.base; p->grads = grads.base;
    EX_TRY(result);
    model_params_place(p->at, p->n, &weights, &grads);
    return amp_param_register(p->amp, p->at, p->n);
}

/* Sets a parameter's weight from fp32 on the host, through its optimizer if there is one; or reads it. */
static inline amp_result model_param_set(amp_context *amp, amp_optimizer *optimizer, amp_param *param,
                                         const float *values) {
    amp_tensor *w = &param->weight;
    int64_t count = amp_tensor_count(w), bytes = count * (int64_t)amp_dtype_size(w->dtype);
    void *scratch;
    amp_result result;
    if (optimizer != NULL) return amp_optimizer_set_weight(optimizer, param, values);
    scratch = malloc((size_t)bytes);
    result = scratch != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)bytes);
    if (result == AMP_OK) result = amp_convert(scratch, w->dtype, values, AMP_F32, count, NULL, NULL);
    if (result == AMP_OK) result = amp_copy(amp, w->data, scratch, bytes, AMP_COPY_TO_DEVICE);
    if (result == AMP_OK) result = amp_sync(amp);
    free(scratch);
    amp_param_changed(param);
    return result;
}
static inline amp_result model_param_get(amp_context *amp, const amp_param *param, float *values) {
    const amp_tensor *w = &param->weight;
    int64_t count = amp_tensor_count(w), bytes = count * (int64_t)amp_dtype_size(w->dtype);
    void *scratch = malloc((size_t)bytes);
    amp_result result = scratch != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)bytes);
    if (result == AMP_OK) result = amp_copy(amp, scratch, w->data, bytes, AMP_COPY_TO_HOST);
    if (result == AMP_OK) result = amp_sync(amp);
    if (result == AMP_OK) result = amp_convert(values, AMP_F32, scratch, w->dtype, count, NULL, NULL);
    free(scratch);
    return result;
}

/* ---- A pass on a tape, in a region of its own */

static inline amp_result model_tape_begin(amp_tape *tape, int backward) {
    amp_autocast_desc region;
    memset(&region, 0, sizeof region);
    region.mode = backward ? AMP_MODE_TRAINING : AMP_MODE_INFERENCE;
    return amp_tape_begin(tape, &region);
}
/* Runs what was recorded: with backward its first half, from *grad_scale.  *value: where the loss lies. */
static inline amp_result model_tape_forward(amp_tape *tape, amp_value loss, const float *grad_scale, int backward,
                                      float **value) {
    amp_tensor there;
    EX_TRY(backward ? amp_tape_forward(tape, loss, grad_scale) : amp_tape_finish(tape));
    EX_TRY(amp_tape_tensor(tape, loss, &there));
    *value = (float *)there.data;
    return AMP_OK;
}

/* 1: fused into a linear layer, forward and backward; the others are a step of their own. */
static inline int model_is_fused(amp_activation_kind act) { return act != AMP_ACT_SILU && act != AMP_ACT_TANH; }

#endif
