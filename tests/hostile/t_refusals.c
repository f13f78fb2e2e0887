/* t_refusals.c - calls every operator, forward and backward, with one invalid argument at a time.  The call must return the
 * right result and name the field, and no byte of any buffer may change.  The same call must work when the argument is
 * corrected.  The other functions are called with NULL or 0 where a value is required.  Every operator is also run with a
 * failing kernel: it must return the kernel's error, and the next call must work. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "recording_backend.h"
#include <stddef.h>

/* All buffers of all operators, so that one comparison sees a write to any of them. */
enum { BUFFERS = 24, ROOM = 256 };
static float room[BUFFERS][ROOM], kept[BUFFERS][ROOM];
static const int32_t ids[8] = {0, 1, 2, 1, 0, 2, 1, 0};
static const int32_t prefix[2] = {1, 2};
static amp_context *amp;

static void fill_room(void) {
    for (int i = 0; i < BUFFERS * ROOM; i++) room[i / ROOM][i % ROOM] = (float)((i * 37 + 11) % 101) / 50.0f - 1.0f;
}

/* ---- What an operator has */

typedef enum kind { TENSOR, OPTIONAL, PARAM, OPTIONAL_PARAM, POINTER, OPTIONAL_POINTER } kind;
/* calls: which of them look at it. */
enum { BOTH, BACKWARD, FORWARD };
typedef struct field { const char *name; size_t at; kind kind; int calls; } field;

typedef amp_result (*operator_call)(amp_context *, void *);
typedef struct operator_case {
    const char *name;
    size_t size;
    operator_call forward, backward;        /* backward NULL: there is none */
    void (*make)(void *op);
    field fields[14];
} operator_case;

#define CALL(name, type) static amp_result call_##name(amp_context *c, void *op) { return name(c, (type *)op); }
CALL(amp_linear, amp_linear_op) CALL(amp_linear_backward, amp_linear_op)
CALL(amp_matmul, amp_matmul_op) CALL(amp_matmul_backward, amp_matmul_op)
CALL(amp_attention, amp_attention_op) CALL(amp_attention_backward, amp_attention_op)
CALL(amp_layernorm, amp_norm_op) CALL(amp_layernorm_backward, amp_norm_op)
CALL(amp_rmsnorm, amp_norm_op) CALL(amp_rmsnorm_backward, amp_norm_op)
CALL(amp_softmax, amp_softmax_op) CALL(amp_softmax_backward, amp_softmax_op)
CALL(amp_activation, amp_activation_op) CALL(amp_activation_backward, amp_activation_op)
CALL(amp_swiglu, amp_swiglu_op) CALL(amp_swiglu_backward, amp_swiglu_op)
CALL(amp_cross_entropy, amp_cross_entropy_op)
CALL(amp_mse, amp_mse_op)
CALL(amp_linear_cross_entropy, amp_linear_cross_entropy_op)
CALL(amp_embedding, amp_embedding_op) CALL(amp_embedding_backward, amp_embedding_op)
CALL(amp_dropout, amp_dropout_op) CALL(amp_dropout_backward, amp_dropout_op)
CALL(amp_rope, amp_rope_op) CALL(amp_rope_backward, amp_rope_op)

static amp_tensor rows(int buffer, int64_t n, int64_t cols) { return amp_tensor2(room[buffer], AMP_F32, n, cols); }
static amp_param params[3];
static amp_param *param(int which, int buffer, int64_t n, int64_t cols) {
    amp_param *p = &params[which];
    memset(p, 0, sizeof *p);
    p->name = which ? "bias" : "weight";
    p->weight = cols ? rows(buffer, n, cols) : amp_tensor1(room[buffer], AMP_F32, n);
    p->grad = cols ? rows(buffer + 1, n, cols) : amp_tensor1(room[buffer + 1], AMP_F32, n);
    return p;
}

static void make_linear(void *memory) {
    amp_linear_op *op = (amp_linear_op *)memory;
    op->x = rows(0, 6, 3); op->y = rows(1, 6, 5); op->pre = rows(2, 6, 5);
    op->weight = param(0, 3, 5, 3); op->bias = param(1, 5, 5, 0);
    op->act = AMP_ACT_GELU; op->x_act = AMP_ACT_GELU;
    op->dy = rows(7, 6, 5); op->dx = rows(8, 6, 3); op->x_pre = rows(9, 6, 3); op->dx_bias = param(2, 10, 3, 0);
}
static void make_matmul(void *memory) {
    amp_matmul_op *op = (amp_matmul_op *)memory;
    op->a = amp_tensor3(room[0], AMP_F32, 2, 4, 3); op->b = amp_tensor3(room[1], AMP_F32, 2, 3, 5);
    op->y = amp_tensor3(room[2], AMP_F32, 2, 4, 5); op->dy = amp_tensor3(room[3], AMP_F32, 2, 4, 5);
    op->da = amp_tensor3(room[4], AMP_F32, 2, 4, 3); op->db = amp_tensor3(room[5], AMP_F32, 2, 3, 5);
}
/* Both operands transposed. */
static void make_matmul_tt(void *memory) {
    amp_matmul_op *op = (amp_matmul_op *)memory;
    make_matmul(memory);
    op->a = amp_tensor3(room[0], AMP_F32, 2, 3, 4); op->b = amp_tensor3(room[1], AMP_F32, 2, 5, 3);
    op->da = amp_tensor3(room[4], AMP_F32, 2, 3, 4); op->db = amp_tensor3(room[5], AMP_F32, 2, 5, 3);
    op->trans_a = op->trans_b = 1;
}
static amp_tensor heads(int buffer, int64_t positions) { return amp_tensor4(room[buffer], AMP_F32, 2, positions, 2, 4); }
static void make_attention(void *memory) {
    amp_attention_op *op = (amp_attention_op *)memory;
    op->q = heads(0, 3); op->k = heads(1, 5); op->v = heads(2, 5); op->o = heads(3, 3);
    op->lse = room[4];
    op->mask.kind = AMP_MASK_PREFIX; op->mask.prefix = prefix;
    op->d_o = heads(5, 3); op->dq = heads(6, 3); op->dk = heads(7, 5); op->dv = heads(8, 5);
    op->qkv_bias = param(0, 9, 24, 0);
}
static void make_rms(void *memory) {
    amp_norm_op *op = (amp_norm_op *)memory;
    op->x = rows(0, 4, 6); op->residual = rows(1, 4, 6); op->sum = rows(2, 4, 6); op->y = rows(3, 4, 6);
    op->weight = param(0, 4, 6, 0);
    op->rstd = room[8]; op->dy = rows(10, 4, 6); op->dsum = rows(11, 4, 6); op->dx = rows(12, 4, 6);
    op->dx_low = amp_tensor2(room[13], AMP_BF16, 4, 6); op->dx_bias = param(2, 14, 6, 0);
}
static void make_norm(void *memory) {
    amp_norm_op *op = (amp_norm_op *)memory;
    make_rms(memory);
    op->bias = param(1, 6, 6, 0);
    op->mean = room[9];
}
static void make_softmax(void *memory) {
    amp_softmax_op *op = (amp_softmax_op *)memory;
    op->x = amp_tensor4(room[0], AMP_F32, 2, 2, 3, 5); op->y = amp_tensor4(room[1], AMP_F32, 2, 2, 3, 5);
    op->mask.kind = AMP_MASK_PREFIX; op->mask.prefix = prefix;
    op->dy = amp_tensor4(room[2], AMP_F32, 2, 2, 3, 5); op->dx = amp_tensor4(room[3], AMP_F32, 2, 2, 3, 5);
}
static void make_activation(void *memory) {
    amp_activation_op *op = (amp_activation_op *)memory;
    op->x = rows(0, 4, 6); op->y = rows(1, 4, 6); op->bias = param(1, 2, 6, 0); op->act = AMP_ACT_GELU;
    op->dy = rows(4, 4, 6); op->dx = rows(5, 4, 6);
}
static void make_swiglu(void *memory) {
    amp_swiglu_op *op = (amp_swiglu_op *)memory;
    op->gate = rows(0, 4, 6); op->up = rows(1, 4, 6); op->y = rows(2, 4, 6);
    op->gate_bias = param(0, 3, 6, 0); op->up_bias = param(1, 5, 6, 0);
    op->dy = rows(7, 4, 6); op->dgate = rows(8, 4, 6); op->dup = rows(9, 4, 6);
}
static void make_cross_entropy(void *memory) {
    amp_cross_entropy_op *op = (amp_cross_entropy_op *)memory;
    op->logits = rows(0, 4, 6); op->dlogits = rows(1, 4, 6); op->labels = ids; op->loss = room[2]; op->losses = room[3];
    op->label_smoothing = 0.1f; op->factor = 2; op->ignore_index = 7;
}
static void make_mse(void *memory) {
    amp_mse_op *op = (amp_mse_op *)memory;
    op->x = rows(0, 4, 6); op->target = rows(1, 4, 6); op->dx = rows(2, 4, 6); op->loss = room[3]; op->factor = 2;
}
static void make_linear_cross_entropy(void *memory) {
    amp_linear_cross_entropy_op *op = (amp_linear_cross_entropy_op *)memory;
    op->x = rows(0, 4, 6); op->dx = rows(1, 4, 6); op->weight = param(0, 2, 5, 6); op->bias = param(1, 4, 5, 0);
    op->labels = ids; op->loss = room[6]; op->losses = room[7]; op->chunk = 3;
    op->label_smoothing = 0.1f; op->factor = 2; op->ignore_index = 7;
}
static void make_embedding(void *memory) {
    amp_embedding_op *op = (amp_embedding_op *)memory;
    op->ids = ids; op->seq = 4; op->y = rows(4, 8, 6); op->dy = rows(5, 8, 6);
    op->table = param(0, 0, 3, 6); op->positions = param(1, 2, 4, 6);
}
static void make_dropout(void *memory) {
    amp_dropout_op *op = (amp_dropout_op *)memory;
    op->x = rows(0, 4, 6); op->y = rows(1, 4, 6); op->p = 0.25f; op->dy = rows(2, 4, 6); op->dx = rows(3, 4, 6);
}
static void make_rope(void *memory) {
    amp_rope_op *op = (amp_rope_op *)memory;
    op->q = heads(0, 3); op->k = heads(1, 3); op->dq = heads(2, 3); op->dk = heads(3, 3);
    op->positions = amp_tensor2(ids, AMP_I32, 2, 3);
}

#define AT(type, member) #member, offsetof(type, member)
#define NORM_FIELDS \
    {AT(amp_norm_op, x), TENSOR, BOTH}, {AT(amp_norm_op, residual), OPTIONAL, BOTH}, {AT(amp_norm_op, sum), TENSOR, BOTH}, {AT(amp_norm_op, y), TENSOR, BOTH}, \
    {AT(amp_norm_op, weight), OPTIONAL_PARAM, BOTH}, {AT(amp_norm_op, rstd), POINTER, BOTH}, \
    {AT(amp_norm_op, dy), TENSOR, BACKWARD}, {AT(amp_norm_op, dsum), OPTIONAL, BACKWARD}, {AT(amp_norm_op, dx), TENSOR, BACKWARD}, \
    {AT(amp_norm_op, dx_low), OPTIONAL, BACKWARD}, {AT(amp_norm_op, dx_bias), OPTIONAL_PARAM, BACKWARD}
static const operator_case cases[] = {
    {"linear", sizeof(amp_linear_op), call_amp_linear, call_amp_linear_backward, make_linear,
     {{AT(amp_linear_op, x), TENSOR, BOTH}, {AT(amp_linear_op, y), TENSOR, BOTH}, {AT(amp_linear_op, pre), OPTIONAL, BOTH},
      {AT(amp_linear_op, weight), PARAM, BOTH}, {AT(amp_linear_op, bias), OPTIONAL_PARAM, BOTH}, {AT(amp_linear_op, dy), TENSOR, BACKWARD},
      {AT(amp_linear_op, dx), TENSOR, BACKWARD}, {AT(amp_linear_op, x_pre), TENSOR, BACKWARD}, {AT(amp_linear_op, dx_bias), OPTIONAL_PARAM, BACKWARD}}},
    {"matmul", sizeof(amp_matmul_op), call_amp_matmul, call_amp_matmul_backward, make_matmul,
     {{AT(amp_matmul_op, a), TENSOR, BOTH}, {AT(amp_matmul_op, b), TENSOR, BOTH}, {AT(amp_matmul_op, y), TENSOR, FORWARD},
      {AT(amp_matmul_op, dy), TENSOR, BACKWARD}, {AT(amp_matmul_op, da), OPTIONAL, BACKWARD},
      {AT(amp_matmul_op, db), OPTIONAL, BACKWARD}}},
    {"matmul transposed", sizeof(amp_matmul_op), call_amp_matmul, call_amp_matmul_backward, make_matmul_tt,
     {{AT(amp_matmul_op, a), TENSOR, BOTH}, {AT(amp_matmul_op, b), TENSOR, BOTH}, {AT(amp_matmul_op, y), TENSOR, FORWARD},
      {AT(amp_matmul_op, dy), TENSOR, BACKWARD}, {AT(amp_matmul_op, da), OPTIONAL, BACKWARD},
      {AT(amp_matmul_op, db), OPTIONAL, BACKWARD}}},
    {"attention", sizeof(amp_attention_op), call_amp_attention, call_amp_attention_backward, make_attention,
     {{AT(amp_attention_op, q), TENSOR, BOTH}, {AT(amp_attention_op, k), TENSOR, BOTH}, {AT(amp_attention_op, v), TENSOR, BOTH}, {AT(amp_attention_op, o), TENSOR, BOTH},
      {AT(amp_attention_op, lse), POINTER, BOTH}, {"prefix", offsetof(amp_attention_op, mask) + offsetof(amp_mask, prefix), POINTER, BOTH},
      {AT(amp_attention_op, d_o), TENSOR, BACKWARD}, {AT(amp_attention_op, dq), TENSOR, BACKWARD}, {AT(amp_attention_op, dk), TENSOR, BACKWARD}, {AT(amp_attention_op, dv), TENSOR, BACKWARD},
      {AT(amp_attention_op, qkv_bias), OPTIONAL_PARAM, BACKWARD}}},
    {"layernorm", sizeof(amp_norm_op), call_amp_layernorm, call_amp_layernorm_backward, make_norm,
     {NORM_FIELDS, {AT(amp_norm_op, bias), OPTIONAL_PARAM, BOTH}, {AT(amp_norm_op, mean), POINTER, BOTH}}},
    {"rmsnorm", sizeof(amp_norm_op), call_amp_rmsnorm, call_amp_rmsnorm_backward, make_rms, {NORM_FIELDS}},
    {"softmax", sizeof(amp_softmax_op), call_amp_softmax, call_amp_softmax_backward, make_softmax,
     {{AT(amp_softmax_op, x), TENSOR, BOTH}, {AT(amp_softmax_op, y), TENSOR, BOTH}, {"prefix", offsetof(amp_softmax_op, mask) + offsetof(amp_mask, prefix), POINTER, BOTH},
      {AT(amp_softmax_op, dy), TENSOR, BACKWARD}, {AT(amp_softmax_op, dx), TENSOR, BACKWARD}}},
    {"activation", sizeof(amp_activation_op), call_amp_activation, call_amp_activation_backward, make_activation,
     {{AT(amp_activation_op, x), TENSOR, BOTH}, {AT(amp_activation_op, y), TENSOR, BOTH}, {AT(amp_activation_op, bias), OPTIONAL_PARAM, BOTH},
      {AT(amp_activation_op, dy), TENSOR, BACKWARD}, {AT(amp_activation_op, dx), TENSOR, BACKWARD}}},
    {"swiglu", sizeof(amp_swiglu_op), call_amp_swiglu, call_amp_swiglu_backward, make_swiglu,
     {{AT(amp_swiglu_op, gate), TENSOR, BOTH}, {AT(amp_swiglu_op, up), TENSOR, BOTH}, {AT(amp_swiglu_op, y), TENSOR, BOTH},
      {AT(amp_swiglu_op, gate_bias), OPTIONAL_PARAM, BOTH}, {AT(amp_swiglu_op, up_bias), OPTIONAL_PARAM, BOTH}, {AT(amp_swiglu_op, dy), TENSOR, BACKWARD},
      {AT(amp_swiglu_op, dgate), TENSOR, BACKWARD}, {AT(amp_swiglu_op, dup), TENSOR, BACKWARD}}},
    {"cross_entropy", sizeof(amp_cross_entropy_op), call_amp_cross_entropy, NULL, make_cross_entropy,
     {{AT(amp_cross_entropy_op, logits), TENSOR, BOTH}, {AT(amp_cross_entropy_op, dlogits), OPTIONAL, BOTH}, {AT(amp_cross_entropy_op, labels), POINTER, BOTH},
      {AT(amp_cross_entropy_op, loss), POINTER, BOTH}, {AT(amp_cross_entropy_op, losses), OPTIONAL_POINTER, BOTH},
      {AT(amp_cross_entropy_op, grad_scale), OPTIONAL_POINTER, BOTH}}},
    {"mse", sizeof(amp_mse_op), call_amp_mse, NULL, make_mse,
     {{AT(amp_mse_op, x), TENSOR, BOTH}, {AT(amp_mse_op, target), TENSOR, BOTH}, {AT(amp_mse_op, dx), OPTIONAL, BOTH}, {AT(amp_mse_op, loss), POINTER, BOTH},
      {AT(amp_mse_op, grad_scale), OPTIONAL_POINTER, BOTH}}},
    {"embedding", sizeof(amp_embedding_op), call_amp_embedding, call_amp_embedding_backward, make_embedding,
     {{AT(amp_embedding_op, ids), POINTER, BOTH}, {AT(amp_embedding_op, table), PARAM, BOTH}, {AT(amp_embedding_op, positions), OPTIONAL_PARAM, BOTH},
      {AT(amp_embedding_op, y), TENSOR, BOTH}, {AT(amp_embedding_op, dy), TENSOR, BACKWARD}}},
    {"dropout", sizeof(amp_dropout_op), call_amp_dropout, call_amp_dropout_backward, make_dropout,
     {{AT(amp_dropout_op, x), TENSOR, FORWARD}, {AT(amp_dropout_op, y), TENSOR, FORWARD}, {AT(amp_dropout_op, dy), TENSOR, BACKWARD}, {AT(amp_dropout_op, dx), TENSOR, BACKWARD}}},
    {"rope", sizeof(amp_rope_op), call_amp_rope, call_amp_rope_backward, make_rope,
     {{AT(amp_rope_op, q), TENSOR, BOTH}, {AT(amp_rope_op, k), OPTIONAL, BOTH}, {AT(amp_rope_op, positions), OPTIONAL, BOTH},
      {AT(amp_rope_op, dq), TENSOR, BACKWARD}, {AT(amp_rope_op, dk), TENSOR, BACKWARD}}},
    {"linear_cross_entropy", sizeof(amp_linear_cross_entropy_op), call_amp_linear_cross_entropy, NULL, make_linear_cross_entropy,
     {{AT(amp_linear_cross_entropy_op, x), TENSOR, BOTH}, {AT(amp_linear_cross_entropy_op, dx), OPTIONAL, BOTH},
      {AT(amp_linear_cross_entropy_op, weight), PARAM, BOTH}, {AT(amp_linear_cross_entropy_op, bias), OPTIONAL_PARAM, BOTH},
      {AT(amp_linear_cross_entropy_op, labels), POINTER, BOTH}, {AT(amp_linear_cross_entropy_op, loss), POINTER, BOTH},
      {AT(amp_linear_cross_entropy_op, losses), OPTIONAL_POINTER, BOTH}, {AT(amp_linear_cross_entropy_op, grad_scale), OPTIONAL_POINTER, BOTH}}},
};
enum { CASES = sizeof cases / sizeof *cases };

static union { amp_linear_op linear; amp_attention_op attention; amp_norm_op norm; double align; char bytes[2048]; } memory;

static void make(const operator_case *c) {
    memset(&memory, 0, sizeof memory);
    memset(params, 0, sizeof params);
    c->make(&memory);
}

/* ---- Spoiling */

enum { MISSING, FP64, RANK_0, NEGATIVE, BYTE_OFF, HALF_OFF, WIDER, STRIDED, SPOILS };
static const char *const spoil_names[] = {"missing", "fp64", "of no dimension", "of negative size", "one byte off its alignment",
                                          "two bytes off its alignment", "one column too wide", "strided"};

/* The pointer, so many bytes further; AMP_OK: there is none. */
static amp_result shift_pointer(void *at, int bytes) {
    char *data;
    memcpy(&data, at, sizeof data);
    if (data == NULL) return AMP_OK;
    data += bytes;
    memcpy(at, &data, sizeof data);
    return AMP_ERR_RANGE;
}

/* The result that must come back; AMP_OK: this field cannot be spoiled so. */
static amp_result spoil_tensor(amp_tensor *t, int how, int optional) {
    int last = t->ndim - 1;
    switch (how) {
        case MISSING: if (optional) return AMP_OK; t->data = NULL; return AMP_ERR_NULL;
        case FP64: t->dtype = AMP_F64; return AMP_ERR_DTYPE;
        case RANK_0: t->ndim = 0; return AMP_ERR_SHAPE;
        case NEGATIVE: t->shape[0] = -1; return AMP_ERR_SHAPE;
        case BYTE_OFF: case HALF_OFF:
            return how == HALF_OFF && amp_dtype_size(t->dtype) == 2 ? AMP_OK : shift_pointer(&t->data, how == BYTE_OFF ? 1 : 2);
        case WIDER: t->shape[last]++; return AMP_ERR_SHAPE;
        default:
            for (int i = last, stride = 2; i >= 0; stride *= (int)t->shape[i--]) t->stride[i] = stride;
            return AMP_ERR_SHAPE;
    }
}

static amp_result spoil(const field *f, int how) {
    char *at = (char *)&memory + f->at;
    amp_param *p;
    if (f->kind == TENSOR || f->kind == OPTIONAL) return spoil_tensor((amp_tensor *)(void *)at, how, f->kind == OPTIONAL);
    if ((f->kind == OPTIONAL_POINTER || f->kind == POINTER) && (how == BYTE_OFF || how == HALF_OFF))
        return shift_pointer(at, how == BYTE_OFF ? 1 : 2);
    if (f->kind == OPTIONAL_POINTER) return AMP_OK;
    memcpy(&p, at, sizeof p);
    if (how == MISSING) {
        if (f->kind == OPTIONAL_PARAM) return AMP_OK;
        memset(at, 0, sizeof p);
        return AMP_ERR_NULL;
    }
    return f->kind == POINTER ? AMP_OK : spoil_tensor(&p->weight, how, 0);
}

/* The text of a call that failed names it. */
static void named(const operator_case *c, operator_call call, amp_result result) {
    char name[64], *space;
    snprintf(name, sizeof name, "amp_%s", c->name);
    if ((space = strchr(name, ' ')) != NULL) *space = 0;
    if (call == c->backward) strcat(name, "_backward");
    ampt_named(name, (int)result, amp_last_error(), __FILE__, __LINE__);
}

/* A spoiled call, refused by name without a trace. */
static void refuses(const operator_case *c, const field *f, int how, operator_call call) {
    amp_result expected, result;
    make(c);
    if (call == c->backward) CHECK_OK(c->forward(amp, &memory));
    expected = spoil(f, how);
    if (expected == AMP_OK) return;
    memcpy(kept, room, sizeof kept);
    result = call(amp, &memory);
    /* backward need not read what forward did, and then does not look at where it is */
    if ((how == BYTE_OFF || how == HALF_OFF) && call == c->backward && f->calls == BOTH && result == AMP_OK) return;
    named(c, call, result);
    CHECK_MSG(result == expected, "%s%s, .%s %s: returned %d, expected %d: %s", c->name, call == c->backward ? " backward" : "", f->name,
              spoil_names[how], (int)result, (int)expected, amp_last_error());
    CHECK_MSG(how >= WIDER || strstr(amp_last_error(), f->name) != NULL, "%s: .%s %s: %s", c->name, f->name, spoil_names[how], amp_last_error());
    CHECK_MSG(memcmp(kept, room, sizeof kept) == 0, "%s: .%s %s: something was written", c->name, f->name, spoil_names[how]);
}

TEST(every_argument_spoiled) {
    fill_room();
    for (int i = 0; i < CASES; i++) {
        const operator_case *c = &cases[i];
        for (const field *f = c->fields; f->name != NULL; f++)
            for (int how = 0; how < SPOILS; how++) {
                if (f->calls != BACKWARD) refuses(c, f, how, c->forward);
                if (f->calls != FORWARD && c->backward != NULL) refuses(c, f, how, c->backward);
            }
        make(c);
        CHECK_OK(c->forward(amp, &memory));
        if (c->backward != NULL) CHECK_OK(c->backward(amp, &memory));
    }
}

/* Memory off its elements' alignment, where no operator takes it. */
TEST(misaligned_elsewhere) {
    static const amp_dtype dtypes[] = {AMP_F32, AMP_F16, AMP_BF16};
    char *off = (char *)room[5] + 1;
    const int32_t *lengths = (const int32_t *)(const void *)off;
    amp_range range;
    amp_grad_set_desc set;
    amp_grad_set *made = NULL;
    amp_scaler *scaler = NULL;
    amp_optimizer_desc od;
    amp_optimizer *optimizer = NULL;
    amp_mask mask;
    amp_mask_view view;
    amp_param p;
    int32_t apply;
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    for (int i = 0; i < 3; i++)
        for (int gradient = 0; gradient < 2; gradient++) {
            memset(&p, 0, sizeof p); memset(&od, 0, sizeof od);
            p.name = "crooked"; p.weight = amp_tensor1(room[1], dtypes[i], 8); p.grad = amp_tensor1(room[2], dtypes[i], 8);
            if (gradient) p.grad.data = off;
            else p.weight.data = off;
            CHECK_ERR(amp_param_register(amp, &p, 1), AMP_ERR_RANGE);
            CHECK(strstr(amp_last_error(), "crooked is at 0x") != NULL);
            od.params = &p; od.n_params = 1; od.master = AMP_MASTER_NONE;
            CHECK_ERR(amp_optimizer_create(amp, &optimizer, &od), AMP_ERR_RANGE);
            memset(&range, 0, sizeof range); memset(&set, 0, sizeof set);
            range.name = "crooked"; range.data = off; range.count = 8; range.dtype = dtypes[i];
            set.ranges = &range; set.n_ranges = 1;
            CHECK_ERR(amp_grad_set_create(amp, &made, &set), AMP_ERR_RANGE);
            CHECK_ERR(amp_scaler_unscale(scaler, &range, 1, &apply), AMP_ERR_RANGE);
        }
    for (int i = 0; i < 3; i++) {
        memset(&mask, 0, sizeof mask);
        mask.kind = AMP_MASK_PREFIX; mask.prefix = prefix;
        if (i == 0) mask.prefix = lengths;
        if (i == 1) mask.lengths = lengths;
        if (i == 2) mask.documents = lengths;
        CHECK_ERR(amp_mask_get(amp, &mask, 2, 4, 4, AMP_F32, &view), AMP_ERR_RANGE);
    }
    for (int i = 0; i < 3; i++) {
        float *a = room[0], *b = room[1], *c = room[2];
        double *x = (double *)(void *)room[0];
        if (i == 0) memcpy(&a, &off, sizeof a);
        if (i == 1) memcpy(&b, &off, sizeof b);
        if (i == 2) memcpy(&c, &off, sizeof c);
        CHECK_ERR(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, 1, a, 2, b, 2, 0, c, 2), AMP_ERR_RANGE);
        off += 3;                               /* at a multiple of 4, not of 8 */
        CHECK_ERR(amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, x, 1, x + 8, 1, 0, (double *)(void *)off, 1), AMP_ERR_RANGE);
        off -= 3;
    }
    amp_scaler_destroy(scaler);
}

TEST(nothing_there) {
    for (int i = 0; i < CASES; i++) {
        const operator_case *c = &cases[i];
        for (int b = 0; b < 2; b++) {
            operator_call call = b ? c->backward : c->forward;
            if (call == NULL) continue;
            make(c);
            CHECK_ERR(call(NULL, &memory), AMP_ERR_NULL);
            CHECK_ERR(call(amp, NULL), AMP_ERR_NULL);
            named(c, call, AMP_ERR_NULL);
            if (!b) continue;
            CHECK_ERR(call(amp, &memory), AMP_ERR_STATE);       /* forward has not run */
            named(c, call, AMP_ERR_STATE);
        }
    }
}

#define REFUSED(call, result, text) do { CHECK_ERR(call, result); CHECK_MSG(strstr(amp_last_error(), text) != NULL, "%s", amp_last_error()); } while (0)

/* A struct that nobody set to 0 before filling it, with what a stack holds: refused before any of it is followed. */
TEST(structs_that_were_not_zeroed) {
    static const unsigned char left[] = {0xa5, 0xff, 0x7f, 0x01};
    static unsigned char made[sizeof memory];
    union { amp_desc open; amp_autocast_desc region; amp_scaler_desc scaler; amp_optimizer_desc optimizer; amp_grad_set_desc set; amp_monitor_desc monitor; } desc;
    amp_context *other = NULL;
    amp_scaler *scaler = NULL;
    amp_optimizer *optimizer = NULL;
    amp_grad_set *set = NULL;
    amp_monitor *monitor = NULL;
    amp_param p;
    fill_room();
    for (size_t b = 0; b < sizeof left; b++) {
        for (int i = 0; i < CASES; i++) {
            const operator_case *c = &cases[i];
            make(c);
            memcpy(made, &memory, c->size);
            memset(&memory, left[b], c->size);
            for (const field *f = c->fields; f->name != NULL; f++) {
                size_t size = f->kind == TENSOR ? sizeof(amp_tensor) : f->kind == PARAM || f->kind == POINTER ? sizeof(void *) : 0;
                memcpy((unsigned char *)&memory + f->at, made + f->at, size);
            }
            REFUSED(c->forward(amp, &memory), AMP_ERR_RANGE, "set the struct to 0");
            if (c->backward != NULL) REFUSED(c->backward(amp, &memory), AMP_ERR_RANGE, "set the struct to 0");
        }
        memset(&p, left[b], sizeof p);
        p.name = "new"; p.weight = p.grad = rows(0, 2, 2);
        p.grad.data = NULL;
        REFUSED(amp_param_register(amp, &p, 1), AMP_ERR_RANGE, "set the struct to 0");
        memset(&desc, left[b], sizeof desc);
        CHECK_ERR(amp_open(&other, &desc.open), AMP_ERR_RANGE);
        CHECK_ERR(amp_autocast_begin(amp, &desc.region), AMP_ERR_RANGE);
        CHECK_ERR(amp_scaler_create(amp, &scaler, &desc.scaler), AMP_ERR_RANGE);
        desc.optimizer.params = params; desc.optimizer.n_params = 1;
        CHECK_ERR(amp_optimizer_create(amp, &optimizer, &desc.optimizer), AMP_ERR_RANGE);
        desc.set.params = params; desc.set.n_params = 1;
        CHECK(amp_grad_set_create(amp, &set, &desc.set) != AMP_OK);
        CHECK_ERR(amp_monitor_create(amp, &monitor, &desc.monitor), AMP_ERR_RANGE);
    }
    for (int i = 0; i < CASES; i++) {           /* a struct that was used holds a plan, and is used again */
        make(&cases[i]);
        CHECK_OK(cases[i].forward(amp, &memory));
        CHECK_OK(cases[i].forward(amp, &memory));
    }
}

/* ---- Numbers and enums */

TEST(numbers_out_of_range) {
    amp_linear_op *linear = &memory.linear;
    amp_norm_op *norm = &memory.norm;
    amp_softmax_op *softmax = (amp_softmax_op *)(void *)&memory;
    amp_activation_op *activation = (amp_activation_op *)(void *)&memory;
    amp_cross_entropy_op *ce = (amp_cross_entropy_op *)(void *)&memory;
    amp_mse_op *mse = (amp_mse_op *)(void *)&memory;
    amp_embedding_op *embedding = (amp_embedding_op *)(void *)&memory;
    amp_dropout_op *dropout = (amp_dropout_op *)(void *)&memory;
    amp_rope_op *rope = (amp_rope_op *)(void *)&memory;
    amp_attention_op *attention = &memory.attention;
    make(&cases[0]); linear->act = AMP_ACT_TANH; REFUSED(amp_linear(amp, linear), AMP_ERR_RANGE, ".act");
    make(&cases[0]); linear->x_act = AMP_ACT_SILU; REFUSED(amp_linear(amp, linear), AMP_ERR_RANGE, ".x_act");
    make(&cases[0]); linear->x.shape[0] = 5; REFUSED(amp_linear(amp, linear), AMP_ERR_SHAPE, ".x has 5 rows");
    make(&cases[3]); attention->mask.kind = (amp_mask_kind)9; REFUSED(amp_attention(amp, attention), AMP_ERR_RANGE, ".mask.kind");
    make(&cases[3]); attention->mask.kind = AMP_MASK_ARBITRARY; REFUSED(amp_attention(amp, attention), AMP_ERR_NULL, ".mask.allowed");
    make(&cases[3]); attention->k.dtype = AMP_BF16; REFUSED(amp_attention(amp, attention), AMP_ERR_DTYPE, ".k is bf16");
    make(&cases[3]); attention->k.ndim = 3; REFUSED(amp_attention(amp, attention), AMP_ERR_SHAPE, ".q and .k");
    make(&cases[4]); norm->eps = -1; REFUSED(amp_layernorm(amp, norm), AMP_ERR_RANGE, ".eps");
    make(&cases[4]); REFUSED(amp_rmsnorm(amp, norm), AMP_ERR_CONFLICT, ".bias");
    make(&cases[4]); params[1].weight.dtype = AMP_BF16; REFUSED(amp_layernorm(amp, norm), AMP_ERR_DTYPE, ".bias");
    make(&cases[6]); softmax->y.ndim = 3; REFUSED(amp_softmax(amp, softmax), AMP_ERR_SHAPE, "");
    make(&cases[7]); activation->act = AMP_ACT_NONE; REFUSED(amp_activation(amp, activation), AMP_ERR_RANGE, ".act = 0");
    make(&cases[7]); activation->act = (amp_activation_kind)9; REFUSED(amp_activation(amp, activation), AMP_ERR_RANGE, ".act = 9");
    make(&cases[9]); ce->classes = -1; REFUSED(amp_cross_entropy(amp, ce), AMP_ERR_RANGE, ".classes");
    make(&cases[9]); ce->classes = 7; REFUSED(amp_cross_entropy(amp, ce), AMP_ERR_RANGE, ".classes");
    make(&cases[9]); ce->label_smoothing = 1.5f; REFUSED(amp_cross_entropy(amp, ce), AMP_ERR_RANGE, ".label_smoothing");
    make(&cases[9]); ce->label_smoothing = -0.5f; REFUSED(amp_cross_entropy(amp, ce), AMP_ERR_RANGE, ".label_smoothing");
    make(&cases[9]); ce->reduction = (amp_reduction)3; REFUSED(amp_cross_entropy(amp, ce), AMP_ERR_RANGE, ".reduction");
    make(&cases[9]); ce->reduction = (amp_reduction)-1; REFUSED(amp_cross_entropy(amp, ce), AMP_ERR_RANGE, ".reduction");
    make(&cases[10]); mse->reduction = (amp_reduction)3; REFUSED(amp_mse(amp, mse), AMP_ERR_RANGE, ".reduction");
    make(&cases[10]); mse->reduction = (amp_reduction)-1; REFUSED(amp_mse(amp, mse), AMP_ERR_RANGE, ".reduction");
    make(&cases[11]); embedding->seq = -1; REFUSED(amp_embedding(amp, embedding), AMP_ERR_RANGE, ".seq");
    make(&cases[11]); params[1].weight.shape[0] = 3; REFUSED(amp_embedding(amp, embedding), AMP_ERR_SHAPE, ".positions");
    make(&cases[12]); dropout->p = 1; REFUSED(amp_dropout(amp, dropout), AMP_ERR_RANGE, ".p = 1");
    make(&cases[12]); dropout->p = -0.5f; REFUSED(amp_dropout(amp, dropout), AMP_ERR_RANGE, ".p");
    make(&cases[13]); rope->base = 0.5f; REFUSED(amp_rope(amp, rope), AMP_ERR_RANGE, ".base = 0.5");
    make(&cases[13]); rope->rotary = 3; REFUSED(amp_rope(amp, rope), AMP_ERR_RANGE, ".rotary = 3");
    make(&cases[13]); rope->rotary = 6; REFUSED(amp_rope(amp, rope), AMP_ERR_RANGE, ".rotary = 6, must be even, at most 4");
    make(&cases[13]); rope->rotary = -2; REFUSED(amp_rope(amp, rope), AMP_ERR_RANGE, ".rotary = -2");
    make(&cases[13]); rope->offset = -1; REFUSED(amp_rope(amp, rope), AMP_ERR_RANGE, ".offset = -1");
    make(&cases[13]); rope->offset = (int64_t)1 << 31; REFUSED(amp_rope(amp, rope), AMP_ERR_RANGE, ".offset = 2147483648");
    make(&cases[13]); rope->pairing = (amp_rope_pairing)3; REFUSED(amp_rope(amp, rope), AMP_ERR_RANGE, ".pairing = 3");
    make(&cases[13]); rope->pairing = (amp_rope_pairing)-1; REFUSED(amp_rope(amp, rope), AMP_ERR_RANGE, ".pairing = -1");
}

/* ---- NaN: every number of a desc, of an op and among the arguments is refused (but for the torch preset's scale, which is
 * PyTorch's).  The table is held against amp.h's own text. */

static amp_param own_param;
static amp_optimizer *own_optimizer;
static amp_grad_set *own_set;
static amp_scaler *own_scaler;
static float own_data[4][16];

static amp_result try_set(void *d) {
    amp_grad_set *out;
    amp_grad_set_desc *desc = (amp_grad_set_desc *)d;
    desc->params = &own_param; desc->n_params = 1;
    amp_result r = amp_grad_set_create(amp, &out, desc);
    amp_grad_set_destroy(out);
    return r;
}
static amp_result try_scaler(void *d) {
    amp_scaler *out;
    amp_result r = amp_scaler_create(amp, &out, (amp_scaler_desc *)d);
    amp_scaler_destroy(out);
    return r;
}
static amp_result try_torch(void *d) { ((amp_scaler_desc *)d)->preset = AMP_SCALER_TORCH; return try_scaler(d); }
static amp_result try_optimizer(void *d) {
    amp_optimizer *out;
    amp_optimizer_desc *desc = (amp_optimizer_desc *)d;
    desc->params = &own_param; desc->n_params = 1;
    amp_result r = amp_optimizer_create(amp, &out, desc);
    amp_optimizer_destroy(out);
    return r;
}
static amp_result try_sgd(void *d) { ((amp_optimizer_desc *)d)->kind = AMP_SGD; return try_optimizer(d); }
static amp_result try_outer(void *d) { ((amp_optimizer_desc *)d)->sync_every = 2; return try_optimizer(d); }
static amp_result try_group(void *d) {
    amp_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    ((amp_param_group *)d)->match = "*";
    desc.groups = (amp_param_group *)d; desc.n_groups = 1;
    return try_optimizer(&desc);
}
static amp_result try_settings(void *d) { return amp_settings_check((amp_settings *)d); }
static amp_result try_monitor(void *d) { amp_monitor *out; ((amp_monitor_desc *)d)->optimizer = own_optimizer; return amp_monitor_create(amp, &out, (amp_monitor_desc *)d); }
static int no_step(void *user, amp_context *context) { (void)user; (void)context; return 0; }
static amp_result try_adapt(void *d) {
    amp_adapt *out = NULL;
    amp_adapt_desc *desc = (amp_adapt_desc *)d;
    desc->params = &own_param; desc->n_params = 1;
    return amp_adapt_create(amp, &out, desc);
}
static amp_result try_verify(void *d) {
    static amp_verify_report out;
    amp_verify_desc *desc = (amp_verify_desc *)d;
    desc->step = no_step; desc->params = &own_param; desc->n_params = 1;
    return amp_verify(amp, desc, &out);
}
static amp_result try_gemm(float alpha, float beta) {
    return amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 2, 2, 2, alpha, own_data[0], 2, own_data[1], 2, beta, own_data[2], 2);
}
static float single(const void *d) { float x; memcpy(&x, d, sizeof x); return x; }
static double twice(const void *d) { double x; memcpy(&x, d, sizeof x); return x; }
static amp_result try_alpha(void *d) { return try_gemm(single(d), 0); }
static amp_result try_beta(void *d) { return try_gemm(1, single(d)); }
static amp_result try_gemm_f64(double alpha, double beta) {
    double a = 1, b = 2, c = 3;
    return amp_gemm_f64(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, alpha, &a, 1, &b, 1, beta, &c, 1);
}
static amp_result try_wide_alpha(void *d) { return try_gemm_f64(twice(d), 0); }
static amp_result try_wide_beta(void *d) { return try_gemm_f64(1, twice(d)); }
static amp_result try_lr(void *d) { return amp_optimizer_set_lr(own_optimizer, twice(d)); }
static amp_result try_clip(void *d) { return amp_optimizer_set_clip(own_optimizer, twice(d)); }
static amp_result try_scale(void *d) { return amp_scaler_set_scale(own_scaler, single(d)); }
static amp_result try_rescale(void *d) { return amp_scaler_rescale(own_scaler, own_set, single(d)); }
static amp_result try_growth(void *d) { return amp_scaler_set_rule(own_scaler, twice(d), 0, 0); }
static amp_result try_backoff(void *d) { return amp_scaler_set_rule(own_scaler, 0, twice(d), 0); }
static amp_result try_status(void *d) { static amp_status out; return amp_status_get(amp, NULL, twice(d), &out); }

/* call NULL: the operator of this type, forward and backward.  A function's argument lies at 0. */
#define OF(type, member, wide, call) {#type, #member, offsetof(type, member), wide, call}
static const struct number { const char *type, *member; size_t at; int wide; amp_result (*call)(void *); } numbers_of[] = {
    OF(amp_matmul_op, alpha, 0, NULL), OF(amp_attention_op, scale, 0, NULL), OF(amp_norm_op, eps, 0, NULL), OF(amp_softmax_op, scale, 0, NULL),
    OF(amp_cross_entropy_op, label_smoothing, 0, NULL), OF(amp_cross_entropy_op, factor, 0, NULL), OF(amp_mse_op, factor, 0, NULL),
    OF(amp_dropout_op, p, 0, NULL), OF(amp_rope_op, base, 0, NULL),
    OF(amp_linear_cross_entropy_op, label_smoothing, 0, NULL), OF(amp_linear_cross_entropy_op, factor, 0, NULL),
    OF(amp_grad_set_desc, clip_norm, 1, try_set),
    OF(amp_scaler_desc, init_scale, 0, try_scaler), OF(amp_scaler_desc, growth_factor, 1, try_scaler), OF(amp_scaler_desc, backoff_factor, 1, try_scaler),
    OF(amp_scaler_desc, min_scale, 0, try_scaler), OF(amp_scaler_desc, max_scale, 0, try_scaler), OF(amp_scaler_desc, tolerance, 1, try_scaler),
    OF(amp_scaler_desc, min_scale, 0, try_torch), OF(amp_scaler_desc, max_scale, 0, try_torch),
    OF(amp_param_group, lr_scale, 1, try_group), OF(amp_param_group, weight_decay, 1, try_group),
    OF(amp_optimizer_desc, lr, 1, try_optimizer), OF(amp_optimizer_desc, beta1, 1, try_optimizer), OF(amp_optimizer_desc, beta2, 1, try_optimizer),
    OF(amp_optimizer_desc, eps, 1, try_optimizer), OF(amp_optimizer_desc, weight_decay, 1, try_optimizer),
    OF(amp_optimizer_desc, momentum, 1, try_sgd), OF(amp_optimizer_desc, dampening, 1, try_sgd), OF(amp_optimizer_desc, clip_norm, 1, try_optimizer),
    OF(amp_optimizer_desc, outer_lr, 1, try_outer), OF(amp_optimizer_desc, outer_momentum, 1, try_outer),
    OF(amp_settings, clip_norm, 1, try_settings), OF(amp_settings, memory_warning, 1, try_settings),
    OF(amp_settings, scaler.init_scale, 0, try_settings), OF(amp_settings, scaler.growth_factor, 1, try_settings),
    OF(amp_settings, scaler.backoff_factor, 1, try_settings), OF(amp_settings, scaler.min_scale, 0, try_settings),
    OF(amp_settings, scaler.max_scale, 0, try_settings), OF(amp_settings, scaler.tolerance, 1, try_settings),
    OF(amp_monitor_desc, memory_warning, 1, try_monitor), OF(amp_verify_desc, allowance, 1, try_verify),
    OF(amp_adapt_desc, budget, 1, try_adapt), OF(amp_adapt_desc, hysteresis, 1, try_adapt),
    {"amp_gemm", "alpha", 0, 0, try_alpha}, {"amp_gemm", "beta", 0, 0, try_beta},
    {"amp_gemm_f64", "alpha", 0, 1, try_wide_alpha}, {"amp_gemm_f64", "beta", 0, 1, try_wide_beta},
    {"amp_optimizer_set_lr", "lr", 0, 1, try_lr}, {"amp_optimizer_set_clip", "clip_norm", 0, 1, try_clip},
    {"amp_scaler_set_scale", "scale", 0, 0, try_scale}, {"amp_scaler_rescale", "old_scale", 0, 0, try_rescale},
    {"amp_scaler_set_rule", "growth_factor", 0, 1, try_growth}, {"amp_scaler_set_rule", "backoff_factor", 0, 1, try_backoff},
    {"amp_status_get", "memory_warning", 0, 1, try_status}};
enum { NUMBERS = sizeof numbers_of / sizeof *numbers_of };

/* NaN of either sign, by its bits: -Ofast knows none. */
static void spoil_number(void *desc, const struct number *n, int negative) {
    uint32_t narrow = 0x7fc00000u | (uint32_t)negative << 31;
    uint64_t wide = (uint64_t)(0x7ff80000u | (uint32_t)negative << 31) << 32;
    if (n->wide) memcpy((char *)desc + n->at, &wide, sizeof wide);
    else memcpy((char *)desc + n->at, &narrow, sizeof narrow);
}

static void refuses_nan(const struct number *n, amp_result result, const char *call) {
    const char *dot = strrchr(n->member, '.');
    CHECK_MSG(result == AMP_ERR_RANGE || result == AMP_ERR_SCALE, "%s: %s.%s = NaN gives %d", call, n->type, n->member, (int)result);
    CHECK_MSG(strstr(amp_last_error(), dot ? dot + 1 : n->member) != NULL && (n->call != NULL || strstr(amp_last_error(), call) != NULL),
              "%s.%s: %s", n->type, n->member, amp_last_error());
}

static void own_objects(void) {
    amp_optimizer_desc od;
    amp_grad_set_desc sd;
    memset(&own_param, 0, sizeof own_param); memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd);
    own_param.name = "w"; own_param.weight = amp_tensor1(own_data[0], AMP_F32, 4); own_param.grad = amp_tensor1(own_data[1], AMP_F32, 4);
    od.params = sd.params = &own_param; od.n_params = sd.n_params = 1;
    CHECK_OK(amp_optimizer_create(amp, &own_optimizer, &od)); CHECK_OK(amp_grad_set_create(amp, &own_set, &sd)); CHECK_OK(amp_scaler_create(amp, &own_scaler, NULL));
}
static void destroy_own(void) { amp_scaler_destroy(own_scaler); amp_grad_set_destroy(own_set); amp_optimizer_destroy(own_optimizer); }

TEST(not_a_number) {
    static union { amp_optimizer_desc optimizer; amp_settings settings; char bytes[1024]; double align; } desc;
    own_objects();
    for (int i = 0; i < NUMBERS; i++)
        for (int negative = 0; negative < 2; negative++) {
            const struct number *n = &numbers_of[i];
            memset(&desc, 0, sizeof desc);
            spoil_number(&desc, n, negative);
            if (n->call != NULL) { refuses_nan(n, n->call(&desc), n->type); continue; }
            for (int c = 0; c < CASES; c++) {           /* its operators */
                char name[40], *at;
                snprintf(name, sizeof name, "amp_%s", cases[c].name);
                if ((at = strchr(name, ' ')) != NULL) *at = 0;
                if (!strcmp(n->type, "amp_norm_op") ? strstr(name, "norm") == NULL
                                                    : strncmp(n->type, name, strlen(name)) != 0 || strcmp(n->type + strlen(name), "_op") != 0) continue;
                make(&cases[c]);
                spoil_number(&memory, n, negative);
                refuses_nan(n, cases[c].forward(amp, &memory), name);
                if (cases[c].backward == NULL) continue;
                make(&cases[c]);
                CHECK_OK(cases[c].forward(amp, &memory));
                spoil_number(&memory, n, negative);
                refuses_nan(n, cases[c].backward(amp, &memory), name);
            }
        }
    destroy_own();
}

static int is_in_the_table(const char *type, const char *name) {
    for (int i = 0; i < NUMBERS; i++) if (!strcmp(numbers_of[i].type, type) && !strcmp(numbers_of[i].member, name)) return 1;
    return 0;
}

/* Every "float x, y;" of a desc, an op, a group or the settings, and every float argument of a function that can refuse it. */
TEST(no_number_is_forgotten) {
    static const char *const kinds[] = {"_desc", "_op", "amp_param_group", "amp_settings"};
    FILE *file = fopen("amp.h", "r");
    char line[512], type[64] = "", function[64] = "";
    int seen = 0;
    if (file == NULL) SKIP("amp.h is not in this folder");
    while (fgets(line, sizeof line, file) != NULL && strncmp(line, "/* Stop here", 12) != 0) {
        char *at, name[64];
        if (sscanf(line, "typedef struct %63s {", name) == 1 || sscanf(line, "struct %63s {", name) == 1) {
            type[0] = 0;
            for (int i = 0; i < 4; i++) if (strstr(name, kinds[i]) != NULL) snprintf(type, sizeof type, "%s", name);
        }
        if (line[0] == '}') type[0] = 0;
        if (type[0] != 0 && (!strncmp(line, "    float ", 10) || !strncmp(line, "    double ", 11)))
            for (at = strtok(strchr(line + 4, ' '), ",;"); at != NULL && strchr(at, '/') == NULL && at[0] != '\n'; at = strtok(NULL, ",;")) {
                if (sscanf(at, " %63[a-z0-9_]", name) != 1) continue;           /* a pointer is no number */
                CHECK_MSG(is_in_the_table(type, name), "%s.%s", type, name);
                seen++;
            }
        if ((at = strstr(line, "AMP_API amp_result amp_")) == line) sscanf(line + 19, "%63[a-z0-9_]", function);
        else if (line[0] != ' ') function[0] = 0;
        for (at = line; function[0] != 0 && type[0] == 0 && (at = strpbrk(at, "(,")) != NULL;) {
            if (sscanf(++at, " float %63[a-z0-9_]", name) != 1 && sscanf(at, " double %63[a-z0-9_]", name) != 1) continue;
            CHECK_MSG(is_in_the_table(function, name), "%s(%s)", function, name);
            seen++;
        }
        if (strchr(line, ';') != NULL) function[0] = 0;
    }
    fclose(file);
    CHECK_MSG(seen >= 38, "%d numbers seen", seen);
}

/* A typed -1 is a value, not AMP_EXPLICIT_ZERO, and is refused. */
TEST(minus_one_is_no_zero) {
    own_objects();
    for (int i = 0; i < NUMBERS; i++) {
        const struct number *n = &numbers_of[i];
        union { amp_optimizer_desc optimizer; amp_settings settings; char bytes[1024]; double align; } desc;
        float narrow = -1;
        double wide = -1;
        if (n->call == NULL || n->call == try_alpha || n->call == try_beta || n->call == try_wide_alpha || n->call == try_wide_beta) continue;
        if (strstr(n->member, "min_scale") || strstr(n->member, "max_scale") || n->call == try_torch) continue;       /* AMP_NO_FLOOR, AMP_NO_CEILING */
        if (n->call == try_lr || n->call == try_clip || n->call == try_scale || n->call == try_rescale || n->call == try_growth || n->call == try_backoff) continue;
        memset(&desc, 0, sizeof desc);
        if (n->wide) memcpy((char *)&desc + n->at, &wide, sizeof wide);
        else memcpy((char *)&desc + n->at, &narrow, sizeof narrow);
        CHECK_MSG(n->call(&desc) != AMP_OK, "%s.%s = -1 is accepted", n->type, n->member);
    }
    for (int i = 0; i < NUMBERS; i++) {                 /* and AMP_EXPLICIT_ZERO is taken where its comment says so */
        static const char *const zeros[] = {"amp_scaler_desc.tolerance", "amp_settings.scaler.tolerance", "amp_param_group.lr_scale", "amp_param_group.weight_decay",
                                            "amp_optimizer_desc.lr", "amp_optimizer_desc.beta1", "amp_optimizer_desc.beta2", "amp_optimizer_desc.eps",
                                            "amp_optimizer_desc.outer_lr", "amp_optimizer_desc.outer_momentum"};
        const struct number *n = &numbers_of[i];
        union { amp_optimizer_desc optimizer; amp_settings settings; char bytes[1024]; double align; } desc;
        char name[96];
        double wide = (double)AMP_EXPLICIT_ZERO;
        int taken = 0;
        if (!n->wide || n->call == NULL || n->at == 0) continue;
        snprintf(name, sizeof name, "%s.%s", n->type, n->member);
        for (size_t z = 0; z < sizeof zeros / sizeof *zeros; z++) taken |= !strcmp(name, zeros[z]);
        if (n->call == try_verify || n->call == try_monitor || n->call == try_adapt) continue;
        memset(&desc, 0, sizeof desc);
        memcpy((char *)&desc + n->at, &wide, sizeof wide);
        if (taken) CHECK_MSG(n->call(&desc) == AMP_OK, "%s = AMP_EXPLICIT_ZERO: %s", name, amp_last_error());
        else CHECK_MSG(n->call(&desc) != AMP_OK, "%s = AMP_EXPLICIT_ZERO is accepted", name);
    }
    destroy_own();
}

/* ---- Outputs that lie where another operand does */

/* What a call reads and writes, by field; "weight.grad" is a parameter's.  may_be: "output=input" where the two may be one. */
static const struct { const char *name; int backward; const char *reads, *writes, *may_be; } roles[] = {
    {"linear", 0, "x weight bias", "y pre", ""},
    {"linear", 1, "x weight pre x_pre dx_bias", "dy dx weight.grad bias.grad dx_bias.grad", ""},
    {"matmul", 0, "a b", "y", ""}, {"matmul", 1, "a b dy", "da db", ""},
    {"matmul transposed", 0, "a b", "y", ""}, {"matmul transposed", 1, "a b dy", "da db", ""},
    {"attention", 0, "q k v prefix", "o lse", ""}, {"attention", 1, "q k v o lse prefix d_o qkv_bias", "dq dk dv qkv_bias.grad", ""},
    {"layernorm", 0, "x residual weight bias", "sum y mean rstd", "sum=x sum=residual"},
    {"layernorm", 1, "sum mean rstd weight dy dsum dx_bias", "dx weight.grad bias.grad dx_bias.grad", "dx=dsum"},
    {"rmsnorm", 0, "x residual weight", "sum y rstd", "sum=x sum=residual"},
    {"rmsnorm", 1, "sum rstd weight dy dsum dx_bias", "dx weight.grad dx_bias.grad", "dx=dsum"},
    {"softmax", 0, "x prefix", "y", "y=x"}, {"softmax", 1, "y prefix dy", "dx", "dx=dy"},
    {"activation", 0, "x bias", "y", "y=x"}, {"activation", 1, "x bias dy", "dx bias.grad", "dx=dy"},
    {"swiglu", 0, "gate up gate_bias up_bias", "y", ""},
    {"swiglu", 1, "gate up gate_bias up_bias dy", "dgate dup gate_bias.grad up_bias.grad", ""},
    {"cross_entropy", 0, "logits labels grad_scale", "dlogits loss losses", "dlogits=logits"},
    {"mse", 0, "x target grad_scale", "dx loss", "dx=x"},
    {"embedding", 0, "ids table positions", "y", ""}, {"embedding", 1, "ids dy", "table.grad positions.grad", ""},
    {"dropout", 0, "x", "y", "y=x"}, {"dropout", 1, "dy", "dx", "dx=dy"},
    {"rope", 0, "positions", "q k", ""}, {"rope", 1, "positions", "dq dk", ""},
    {"linear_cross_entropy", 0, "x weight bias labels grad_scale", "dx weight.grad bias.grad loss losses", "dx=x"}};
enum { ROLES = sizeof roles / sizeof *roles };

/* Where the address of a field's memory stands in the op. */
static void *place_of(const operator_case *c, const char *name) {
    size_t length = strcspn(name, ".");
    for (const field *f = c->fields; f->name != NULL; f++) {
        char *at = (char *)&memory + f->at;
        amp_param *p;
        if (strlen(f->name) != length || strncmp(f->name, name, length) != 0) continue;
        if (f->kind == TENSOR || f->kind == OPTIONAL) return &((amp_tensor *)(void *)at)->data;
        if (f->kind == POINTER || f->kind == OPTIONAL_POINTER) return at;
        memcpy(&p, at, sizeof p);
        return name[length] == '.' ? &p->grad.data : &p->weight.data;
    }
    printf("      no field %s in %s\n", name, c->name);
    exit(1);
}
static char *address_of(const operator_case *c, const char *name) { char *data; memcpy(&data, place_of(c, name), sizeof data); return data; }

/* Words of a list, one after the other. */
static const char *next_word(const char **list, char word[24]) {
    size_t n;
    *list += strspn(*list, " ");
    n = strcspn(*list, " ");
    if (n == 0) return NULL;
    snprintf(word, 24, "%.*s", (int)n, *list);
    *list += n;
    return word;
}
static int is_listed(const char *list, const char *a, const char *b) {
    char word[24], wanted[48];
    snprintf(wanted, sizeof wanted, "%s=%s", a, b);
    while (next_word(&list, word)) if (!strcmp(word, wanted)) return 1;
    return 0;
}

/* An op whose grad_scale is there, with its forward done where a backward follows; always the same random numbers. */
static amp_state *numbers;
static void prepare(const operator_case *c, int backward) {
    static const float one = 1;
    make(c);
    if (!strcmp(c->name, "cross_entropy")) ((amp_cross_entropy_op *)(void *)&memory)->grad_scale = &one;
    if (!strcmp(c->name, "mse")) ((amp_mse_op *)(void *)&memory)->grad_scale = &one;
    if (!strcmp(c->name, "linear_cross_entropy")) ((amp_linear_cross_entropy_op *)(void *)&memory)->grad_scale = &one;
    fill_room();
    CHECK_OK(amp_random_load(amp, numbers, "start"));
    if (backward) CHECK_OK(c->forward(amp, &memory));
}

/* The output at the other's address, `shift` bytes further: refused without a trace; or allowed, with the same values. */
static void overlaps(const operator_case *c, int role, const char *output, const char *other, int shift) {
    operator_call call = roles[role].backward ? c->backward : c->forward;
    const char *data;
    int allowed = shift == 0 && is_listed(roles[role].may_be, output, other);
    static float apart[64];
    prepare(c, roles[role].backward);
    if (allowed) {
        CHECK_OK(call(amp, &memory));
        memcpy(apart, address_of(c, output), sizeof apart);
        prepare(c, roles[role].backward);
    }
    data = address_of(c, other) + shift;
    memcpy(place_of(c, output), &data, sizeof data);
    memcpy(kept, room, sizeof kept);
    if (allowed) {
        CHECK_OK(call(amp, &memory));
        CHECK_MSG(memcmp(data, apart, 24 * sizeof(float)) == 0, "%s: %s over %s gives other values", c->name, output, other);
        return;
    }
    CHECK_MSG(call(amp, &memory) == AMP_ERR_CONFLICT, "%s%s: %s over %s + %d bytes was accepted", c->name, roles[role].backward ? " backward" : "",
              output, other, shift);
    named(c, call, AMP_ERR_CONFLICT);
    CHECK_MSG(memcmp(kept, room, sizeof kept) == 0, "%s: %s over %s: something was written", c->name, output, other);
}

TEST(outputs_that_overlap) {
    int with_backward = 0, covered = 0;
    CHECK_OK(amp_state_create(&numbers, NULL));
    CHECK_OK(amp_random_save(amp, numbers, "start"));
    for (int r = 0; r < ROLES; r++) {
        const operator_case *c = cases;
        const char *outputs = roles[r].writes, *others;
        char output[24], other[24];
        while (strcmp(c->name, roles[r].name) != 0) c++;
        while (next_word(&outputs, output)) {
            for (int list = 0; list < 2; list++) {
                others = list ? roles[r].writes : roles[r].reads;
                while (next_word(&others, other)) {
                    if (!strcmp(output, other)) continue;
                    overlaps(c, r, output, other, 0);
                    if (strcmp(output, "loss") && strcmp(other, "grad_scale") && strcmp(other, "loss")) overlaps(c, r, output, other, 4);
                }
            }
        }
        covered++;
    }
    for (int i = 0; i < CASES; i++) with_backward += cases[i].backward != NULL;
    CHECK_EQ(covered, CASES + with_backward);           /* every call has its line */
    amp_state_destroy(numbers);
}

/* In place needs elements of one size: a 16-bit output over an fp32 input moves under it. */
TEST(in_place_in_another_size) {
    amp_tensor wide = rows(0, 4, 6), narrow = amp_tensor2(room[0], AMP_BF16, 4, 6), b = rows(1, 4, 6);
    amp_softmax_op softmax;
    amp_activation_op act;
    amp_dropout_op drop;
    amp_cross_entropy_op ce;
    fill_room();
    memset(&softmax, 0, sizeof softmax); memset(&act, 0, sizeof act); memset(&drop, 0, sizeof drop); memset(&ce, 0, sizeof ce);
    softmax.x = act.x = drop.x = ce.logits = wide;
    softmax.y = act.y = drop.y = ce.dlogits = narrow;
    act.act = AMP_ACT_RELU; drop.p = 0.5f; ce.labels = ids; ce.loss = room[5];
    REFUSED(amp_softmax(amp, &softmax), AMP_ERR_CONFLICT, ".y");
    REFUSED(amp_activation(amp, &act), AMP_ERR_CONFLICT, ".y");
    REFUSED(amp_dropout(amp, &drop), AMP_ERR_CONFLICT, ".y");
    REFUSED(amp_cross_entropy(amp, &ce), AMP_ERR_CONFLICT, ".dlogits");
    REFUSED(amp_add(amp, &wide, &b, &narrow), AMP_ERR_CONFLICT, ".y");
    REFUSED(amp_cast(amp, &wide, &narrow), AMP_ERR_CONFLICT, ".dst");
}

/* Each head of an odd dimension has an element without a partner; k and its gradient go together; other shapes and dtypes. */
TEST(rope_arguments) {
    amp_rope_op *op = (amp_rope_op *)(void *)&memory;
    fill_room();
    make(&cases[13]); op->q.shape[3] = op->k.shape[3] = 3; REFUSED(amp_rope(amp, op), AMP_ERR_SHAPE, ".q: dim is 3, must be even");
    make(&cases[13]); op->q.ndim = 3; REFUSED(amp_rope(amp, op), AMP_ERR_SHAPE, ".q must be [batch, positions, heads, dim]");
    make(&cases[13]); op->k = op->q; REFUSED(amp_rope(amp, op), AMP_ERR_CONFLICT, ".q and .k share memory");
    make(&cases[13]); op->k.shape[1] = 2; REFUSED(amp_rope(amp, op), AMP_ERR_SHAPE, ".k is [2, 2, 2, 4] fp32, must be [2, 3, 2, 4]");
    make(&cases[13]); op->k.dtype = AMP_BF16; REFUSED(amp_rope(amp, op), AMP_ERR_DTYPE, ".k is bf16, must be fp32 like .q");
    make(&cases[13]); op->k.stride[0] = 12; op->k.stride[1] = 4; op->k.stride[3] = 1;    /* one head shown as two, for attention */
    REFUSED(amp_rope(amp, op), AMP_ERR_SHAPE, ".k: elements overlap");
    make(&cases[13]); op->positions.shape[1] = 2; REFUSED(amp_rope(amp, op), AMP_ERR_SHAPE, "must be [3] or [2, 3]");
    make(&cases[13]); op->positions.shape[0] = 1; REFUSED(amp_rope(amp, op), AMP_ERR_SHAPE, "must be [3] or [2, 3]");
    make(&cases[13]); op->positions.dtype = AMP_I64; REFUSED(amp_rope(amp, op), AMP_ERR_DTYPE, ".positions is i64, must be i32");
    make(&cases[13]); CHECK_OK(amp_rope(amp, op));
    op->k.data = NULL; REFUSED(amp_rope_backward(amp, op), AMP_ERR_NULL, ".k has no data, but .dk does");
    op->dk.data = NULL; CHECK_OK(amp_rope_backward(amp, op));
    make(&cases[13]); CHECK_OK(amp_rope(amp, op));
    op->dk.shape[2] = 1; REFUSED(amp_rope_backward(amp, op), AMP_ERR_SHAPE, ".dk is [2, 3, 1, 4] fp32");
    op->dk.shape[2] = 2; op->dq.dtype = AMP_F16; REFUSED(amp_rope_backward(amp, op), AMP_ERR_DTYPE, ".dq is fp16");
}

/* Functions that take no op struct. */
TEST(overlap_without_an_op) {
    static char bytes[4096];
    float *a = (float *)(void *)bytes, *b = a + 64, *c = a + 128;
    amp_tensor x = rows(0, 4, 6), y = rows(1, 4, 6), z = rows(0, 4, 6);
    amp_param p;
    amp_grad_set *set;
    amp_grad_set_desc sd;
    amp_optimizer *opt;
    amp_optimizer_desc od;
    z.data = room[0] + 1;
    fill_room();
    CHECK_OK(amp_add(amp, &x, &y, &x));
    CHECK_OK(amp_add(amp, &y, &x, &x));
    REFUSED(amp_add(amp, &x, &y, &z), AMP_ERR_CONFLICT, ".y and .a");
    REFUSED(amp_add(amp, &y, &x, &z), AMP_ERR_CONFLICT, ".y and .b");
    CHECK_OK(amp_cast(amp, &x, &x));
    REFUSED(amp_cast(amp, &x, &z), AMP_ERR_CONFLICT, ".dst and .src");
    /* Matrices of 3 x 4 in rows of 8: side by side they are apart, one column further they are not. */
#define GEMM(to) amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 3, 4, 4, 1, a, 8, b, 4, 0, to, 8)
#define GEMM_COL(to) amp_gemm(amp, AMP_COL_MAJOR, AMP_NO_TRANS, AMP_TRANS, 4, 3, 4, 1, b, 4, a, 8, 0, to, 8)
    CHECK_OK(GEMM(c)); CHECK_OK(GEMM(a + 4));
    REFUSED(GEMM(a), AMP_ERR_CONFLICT, "c and a"); REFUSED(GEMM(a + 3), AMP_ERR_CONFLICT, "c and a"); REFUSED(GEMM(b + 15), AMP_ERR_CONFLICT, "c and b");
    CHECK_OK(GEMM(b + 16));
    CHECK_OK(GEMM_COL(c)); REFUSED(GEMM_COL(a), AMP_ERR_CONFLICT, "c and b");
    CHECK_OK(amp_copy(amp, bytes, bytes, 64, AMP_COPY_DEFAULT));
    CHECK_OK(amp_copy(amp, bytes, bytes + 64, 64, AMP_COPY_DEFAULT));
    REFUSED(amp_copy(amp, bytes, bytes + 63, 64, AMP_COPY_DEFAULT), AMP_ERR_CONFLICT, "dst and src");
    REFUSED(amp_copy(amp, bytes + 63, bytes, 64, AMP_COPY_DEFAULT), AMP_ERR_CONFLICT, "dst and src");
    CHECK_OK(amp_convert(a, AMP_BF16, a, AMP_F16, 8, NULL, NULL));
    CHECK_OK(amp_convert(a, AMP_BF16, a + 8, AMP_F32, 8, NULL, NULL));
    CHECK_OK(amp_convert(a, AMP_F32, a + 8, AMP_F32, 8, NULL, NULL));
    REFUSED(amp_convert(a, AMP_F32, a + 7, AMP_F32, 8, NULL, NULL), AMP_ERR_CONFLICT, "dst and src");
    REFUSED(amp_convert(a, AMP_BF16, a, AMP_F32, 8, NULL, NULL), AMP_ERR_CONFLICT, "dst and src");
    REFUSED(amp_convert(a, AMP_F32, a, AMP_BF16, 8, NULL, NULL), AMP_ERR_CONFLICT, "dst and src");
    /* A parameter whose gradient is its weight, or lies partly in it. */
    for (int shift = 0; shift < 24; shift += 23) {
        memset(&p, 0, sizeof p); memset(&sd, 0, sizeof sd); memset(&od, 0, sizeof od);
        p.name = "w"; p.weight = rows(0, 4, 6); p.grad = rows(0, 4, 6);
        p.grad.data = room[0] + shift;
        sd.params = od.params = &p; sd.n_params = od.n_params = 1;
        REFUSED(amp_param_register(amp, &p, 1), AMP_ERR_CONFLICT, "w: ");
        REFUSED(amp_grad_set_create(amp, &set, &sd), AMP_ERR_CONFLICT, "w: ");
        REFUSED(amp_optimizer_create(amp, &opt, &od), AMP_ERR_CONFLICT, "w: ");
    }
}

/* ---- Views of one buffer that share no element, as models have them */

/* Attention over a packed [batch, seq, 3, heads, dim], its gradients packed too: bit for bit that of tensors of their own. */
static amp_tensor part(float *data, int64_t seq, int which) {
    amp_tensor t = amp_tensor4(data + which * 8, AMP_F32, 2, seq, 2, 4);
    t.stride[0] = seq * 24; t.stride[1] = 24; t.stride[2] = 4; t.stride[3] = 1;
    return t;
}
static void unpack(float *to, const float *from, int which) {
    for (int i = 0; i < 10; i++) memcpy(to + i * 8, from + i * 24 + which * 8, 8 * sizeof(float));
}
TEST(packed_views_are_apart) {
    amp_attention_op packed, plain;
    float got[80];
    fill_room();
    memset(&packed, 0, sizeof packed); memset(&plain, 0, sizeof plain);
    packed.q = part(room[0], 5, 0); packed.k = part(room[0], 5, 1); packed.v = part(room[0], 5, 2);
    packed.dq = part(room[1], 5, 0); packed.dk = part(room[1], 5, 1); packed.dv = part(room[1], 5, 2);
    for (int i = 0; i < 3; i++) unpack(room[2 + i], room[0], i);
    plain.q = heads(2, 5); plain.k = heads(3, 5); plain.v = heads(4, 5);
    plain.dq = heads(5, 5); plain.dk = heads(6, 5); plain.dv = heads(7, 5);
    packed.o = heads(8, 5); plain.o = heads(9, 5);
    packed.d_o = plain.d_o = heads(10, 5);
    packed.lse = room[11]; plain.lse = room[12];
    CHECK_OK(amp_attention(amp, &packed)); CHECK_OK(amp_attention_backward(amp, &packed));
    CHECK_OK(amp_attention(amp, &plain)); CHECK_OK(amp_attention_backward(amp, &plain));
    CHECK(memcmp(room[8], room[9], 80 * sizeof(float)) == 0);
    for (int i = 0; i < 3; i++) { unpack(got, room[1], i); CHECK(memcmp(got, room[5 + i], sizeof got) == 0); }
    packed.o = part(room[0], 5, 2);                     /* the output over the values ... */
    REFUSED(amp_attention(amp, &packed), AMP_ERR_CONFLICT, ".o and .v");
    packed.o = part(room[0], 5, 2);
    packed.o.data = room[0] + 12;                       /* ... or over half of the keys and half of the values */
    REFUSED(amp_attention(amp, &packed), AMP_ERR_CONFLICT, ".o and .");
    packed.o = heads(8, 5);
    packed.dk.data = room[1] + 4;
    REFUSED(amp_attention_backward(amp, &packed), AMP_ERR_CONFLICT, ".dk");
}

/* Column `first` of the 24 columns of a wide buffer. */
static amp_tensor wide(int buffer, int first, int64_t cols) {
    amp_tensor t = amp_tensor2(room[buffer] + first, AMP_F32, 4, cols);
    t.stride[0] = 24; t.stride[1] = 1;
    return t;
}
TEST(halves_of_a_buffer_are_apart) {
    amp_swiglu_op s;
    amp_linear_op l;
    amp_norm_op n;
    amp_matmul_op m;
    amp_cross_entropy_op ce;
    fill_room();
    memset(&s, 0, sizeof s);
    s.gate = wide(0, 0, 6); s.up = wide(0, 6, 6); s.y = wide(0, 12, 6); s.dy = wide(0, 18, 6); s.dgate = wide(1, 0, 6); s.dup = wide(1, 6, 6);
    CHECK_OK(amp_swiglu(amp, &s)); CHECK_OK(amp_swiglu_backward(amp, &s));
    s.y = wide(0, 11, 6); REFUSED(amp_swiglu(amp, &s), AMP_ERR_CONFLICT, ".y and .up");
    s.y = wide(0, 12, 6); s.dup = wide(1, 5, 6); REFUSED(amp_swiglu_backward(amp, &s), AMP_ERR_CONFLICT, ".dgate and .dup");
    memset(&l, 0, sizeof l); memset(params, 0, sizeof params);
    l.x = wide(0, 0, 3); l.y = wide(0, 3, 5); l.weight = param(0, 2, 5, 3); l.dy = wide(0, 3, 5); l.dx = wide(0, 8, 3);
    CHECK_OK(amp_linear(amp, &l)); CHECK_OK(amp_linear_backward(amp, &l));
    l.y = wide(0, 2, 5); REFUSED(amp_linear(amp, &l), AMP_ERR_CONFLICT, ".y and .x");
    memset(&n, 0, sizeof n);
    n.x = wide(0, 0, 6); n.y = wide(0, 6, 6); n.dy = wide(0, 6, 6); n.dx = wide(0, 12, 6); n.rstd = room[3]; n.mean = room[4];
    CHECK_OK(amp_layernorm(amp, &n)); CHECK_OK(amp_layernorm_backward(amp, &n));
    n.y = wide(0, 5, 6); REFUSED(amp_layernorm(amp, &n), AMP_ERR_CONFLICT, ".y and .x");
    memset(&ce, 0, sizeof ce);
    ce.logits = wide(0, 0, 6); ce.dlogits = wide(0, 6, 6); ce.labels = ids; ce.loss = room[3];
    CHECK_OK(amp_cross_entropy(amp, &ce));
    ce.dlogits = wide(0, 1, 6); REFUSED(amp_cross_entropy(amp, &ce), AMP_ERR_CONFLICT, ".dlogits and .logits");
    memset(&m, 0, sizeof m);                            /* a[0] y[0] a[1] y[1] */
    m.a = amp_tensor3(room[0], AMP_F32, 2, 2, 2); m.b = amp_tensor3(room[1], AMP_F32, 2, 2, 2); m.y = amp_tensor3(room[0] + 4, AMP_F32, 2, 2, 2);
    m.a.stride[0] = m.y.stride[0] = 8; m.a.stride[1] = m.y.stride[1] = 2; m.a.stride[2] = m.y.stride[2] = 1;
    CHECK_OK(amp_matmul(amp, &m));
    m.y.data = room[0] + 3; REFUSED(amp_matmul(amp, &m), AMP_ERR_CONFLICT, ".y and .a");
}

/* Random views of one buffer: refused exactly where two of them share an element. */
static uint32_t rolls;
static int64_t roll(int64_t n) { return (int64_t)(amp_random_u32(7, rolls++) % (uint32_t)n); }
static amp_tensor random_view(float *data, int64_t positions) {
    amp_tensor t = amp_tensor4(data + roll(40), AMP_F32, 2, positions, 2, 1 + 2);
    int64_t order = roll(3), step = 3 + roll(3);
    t.stride[3] = 1;
    if (order == 0) { t.stride[2] = step; t.stride[1] = 2 * step + roll(4); t.stride[0] = positions * t.stride[1] + roll(5); }
    else if (order == 1) { t.stride[1] = step; t.stride[2] = positions * step + roll(4); t.stride[0] = 2 * t.stride[2] + roll(5); }
    else { t.stride[0] = step; t.stride[1] = 2 * step + roll(4); t.stride[2] = positions * t.stride[1] + roll(5); }
    return t;
}
static void mark(const amp_tensor *t, const float *data, unsigned char *bits, int bit) {
    int64_t base = (const float *)t->data - data;
    for (int64_t i = 0; i < t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]; i++) {
        int64_t d = t->shape[3], h = t->shape[2], p = t->shape[1];
        bits[base + i % d * t->stride[3] + i / d % h * t->stride[2] + i / d / h % p * t->stride[1] + i / d / h / p * t->stride[0]] |= (unsigned char)(1 << bit);
    }
}
TEST(random_views_are_refused_exactly_where_they_share) {
    static float data[1024], lse[64];
    int refused = 0, wrong = 0, N = 20000;
    for (int n = 0; n < N; n++) {
        unsigned char bits[1024];
        amp_attention_op op;
        int share = 0;
        memset(&op, 0, sizeof op); memset(bits, 0, sizeof bits);
        op.q = random_view(data, 3); op.o = random_view(data + roll(300), 3);
        op.k = random_view(data + 512, 3); op.v = random_view(data + 512, 3);   /* inputs may share */
        op.lse = lse;
        mark(&op.q, data, bits, 0); mark(&op.k, data, bits, 0); mark(&op.v, data, bits, 0); mark(&op.o, data, bits, 1);
        for (int i = 0; i < 1024; i++) share |= bits[i] == 3;
        refused += share;
        wrong += amp_attention(amp, &op) != (share ? AMP_ERR_CONFLICT : AMP_OK);
    }
    CHECK_MSG(wrong == 0, "%d of %d decided wrongly", wrong, N);
    CHECK_MSG(refused > N / 10 && refused < N * 9 / 10, "%d of %d share", refused, N);
}

/* Strides that reach into one another in an input: all its elements are even ones, the output's odd. */
TEST(tangled_views) {
    static float data[8192], lse[4096];
    amp_attention_op op;
    memset(&op, 0, sizeof op);
    op.q = amp_tensor4(data, AMP_F32, 12, 12, 12, 1); op.o = op.q; op.o.data = data + 1;
    op.q.stride[0] = 14; op.q.stride[1] = 22; op.q.stride[2] = 26; op.q.stride[3] = 1;
    op.o.stride[0] = 288; op.o.stride[1] = 24; op.o.stride[2] = 2; op.o.stride[3] = 1;
    op.k = op.v = op.q;
    op.lse = lse;
    CHECK_OK(amp_attention(amp, &op));
    op.o.data = data + 682;                             /* 11 (14 + 22 + 26) */
    REFUSED(amp_attention(amp, &op), AMP_ERR_CONFLICT, ".o and .q");
}

/* What 110 is promised for beyond that: an activation whose backward needs what y has overwritten. */
TEST(activations_in_place) {
    static const struct { amp_activation_kind act; int bias; amp_result result; } kinds[] = {
        {AMP_ACT_GELU, 0, AMP_ERR_CONFLICT}, {AMP_ACT_GELU_ERF, 0, AMP_ERR_CONFLICT}, {AMP_ACT_SILU, 0, AMP_ERR_CONFLICT},
        {AMP_ACT_TANH, 0, AMP_OK}, {AMP_ACT_RELU, 0, AMP_OK},
        {AMP_ACT_GELU, 1, AMP_ERR_CONFLICT}, {AMP_ACT_GELU_ERF, 1, AMP_ERR_CONFLICT}, {AMP_ACT_SILU, 1, AMP_ERR_CONFLICT},
        {AMP_ACT_TANH, 1, AMP_OK}, {AMP_ACT_RELU, 1, AMP_ERR_CONFLICT}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        amp_activation_op op, apart;
        amp_autocast_desc region;
        memset(&op, 0, sizeof op); memset(&region, 0, sizeof region); memset(params, 0, sizeof params);
        fill_room();
        op.x = rows(0, 4, 6); op.y = rows(1, 4, 6); op.dy = rows(2, 4, 6); op.dx = rows(3, 4, 6);
        op.act = kinds[i].act;
        if (kinds[i].bias) op.bias = param(1, 5, 6, 0);
        apart = op;
        CHECK_OK(amp_activation(amp, &apart)); CHECK_OK(amp_activation_backward(amp, &apart));
        op.y = op.x; op.dx = rows(4, 4, 6);
        CHECK_OK(amp_activation(amp, &op));
        CHECK_MSG(amp_activation_backward(amp, &op) == kinds[i].result, "act %d, bias %d: %s", (int)op.act, kinds[i].bias, amp_last_error());
        if (kinds[i].result == AMP_OK) CHECK(memcmp(room[3], room[4], 24 * sizeof(float)) == 0);
        else CHECK_MSG(strstr(amp_last_error(), "amp_activation_backward: .y") != NULL, "%s", amp_last_error());
        fill_room();
        region.mode = AMP_MODE_INFERENCE;               /* no backward: every activation may be in place */
        region.disable = 1;
        CHECK_OK(amp_autocast_begin(amp, &region)); CHECK_OK(amp_activation(amp, &op)); CHECK_OK(amp_autocast_end(amp));
        CHECK(memcmp(room[0], room[1], sizeof(float)) != 0);
    }
}

/* A linear layer's own activations: what went into GELU may not be what came out. */
TEST(what_went_into_gelu_is_gone) {
    amp_linear_op *op = &memory.linear;
    for (int exact = 0; exact < 2; exact++) {
        make(&cases[0]); fill_room();
        op->x_act = exact ? AMP_ACT_GELU_ERF : AMP_ACT_GELU;
        CHECK_OK(amp_linear(amp, op));
        op->x_pre = op->x;
        REFUSED(amp_linear_backward(amp, op), AMP_ERR_CONFLICT, ".x_pre");
        op->x_act = AMP_ACT_RELU;                       /* which keeps its sign */
        CHECK_OK(amp_linear_backward(amp, op));
        make(&cases[0]);
        op->act = AMP_ACT_RELU; op->pre.data = NULL; op->x_act = AMP_ACT_NONE;
        CHECK_OK(amp_linear(amp, op));
        op->dy = op->y;                                 /* the gradient has taken the place of the signs */
        REFUSED(amp_linear_backward(amp, op), AMP_ERR_CONFLICT, ".dy and .y");
    }
}

TEST(ids_out_of_range) {
    static const int32_t bad[8] = {0, 1, 3, 1, 0, 2, 1, 0}, negative[8] = {0, -1};
    amp_embedding_op *embedding = (amp_embedding_op *)(void *)&memory;
    make(&cases[11]);
    CHECK_OK(amp_embedding(amp, embedding));
    embedding->ids = bad;
    REFUSED(amp_embedding_backward(amp, embedding), AMP_ERR_LABEL, ".ids[2] = 3");
    REFUSED(amp_embedding(amp, embedding), AMP_ERR_LABEL, ".ids[2] = 3");
    embedding->ids = negative;
    REFUSED(amp_embedding(amp, embedding), AMP_ERR_LABEL, ".ids[1] = -1");
}

TEST(gemm_arguments) {
    float a[6] = {1, 2, 3, 4, 5, 6}, b[6] = {1, 2, 3, 4, 5, 6}, c[4] = {9, 9, 9, 9};
    const int no = AMP_NO_TRANS, row = AMP_ROW_MAJOR, col = AMP_COL_MAJOR;
    static const struct { int order, ta, tb, m, n, k, lda, ldb, ldc; amp_result result; const char *text; } bad[] = {
        {100, 111, 111, 2, 2, 3, 3, 2, 2, AMP_ERR_RANGE, "order = 100"}, {103, 111, 111, 2, 2, 3, 3, 2, 2, AMP_ERR_RANGE, "order = 103"},
        {101, 110, 111, 2, 2, 3, 3, 2, 2, AMP_ERR_RANGE, "trans_a = 110"}, {101, 114, 111, 2, 2, 3, 3, 2, 2, AMP_ERR_RANGE, "trans_a = 114"},
        {101, 111, 110, 2, 2, 3, 3, 2, 2, AMP_ERR_RANGE, "trans_b = 110"}, {101, 111, 114, 2, 2, 3, 3, 2, 2, AMP_ERR_RANGE, "trans_b = 114"},
        {101, 111, 111, -1, 2, 3, 3, 2, 2, AMP_ERR_RANGE, "m = -1"}, {101, 111, 111, 2, -1, 3, 3, 2, 2, AMP_ERR_RANGE, "n = -1"},
        {101, 111, 111, 2, 2, -1, 3, 2, 2, AMP_ERR_RANGE, "k = -1"}, {101, 111, 111, 2, 2, 3, 2, 2, 2, AMP_ERR_RANGE, "lda = 2"},
        {101, 111, 111, 2, 2, 3, 3, 1, 2, AMP_ERR_RANGE, "ldb = 1"}, {101, 111, 111, 2, 2, 3, 3, 2, 1, AMP_ERR_RANGE, "ldc = 1"},
        {102, 111, 111, 2, 2, 3, 1, 3, 2, AMP_ERR_RANGE, "lda = 1"}, {102, 112, 112, 2, 2, 3, 2, 2, 2, AMP_ERR_RANGE, "lda = 2"},
        {101, 112, 113, 2, 2, 3, 1, 3, 2, AMP_ERR_RANGE, "lda = 1"}, {101, 112, 113, 2, 2, 3, 2, 2, 2, AMP_ERR_RANGE, "ldb = 2"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        REFUSED(amp_gemm(amp, (amp_order)bad[i].order, (amp_trans)bad[i].ta, (amp_trans)bad[i].tb, bad[i].m, bad[i].n, bad[i].k, 1, a, bad[i].lda,
                         b, bad[i].ldb, 0, c, bad[i].ldc), bad[i].result, bad[i].text);
    CHECK_ERR(amp_gemm(NULL, (amp_order)row, (amp_trans)no, (amp_trans)no, 2, 2, 3, 1, a, 3, b, 2, 0, c, 2), AMP_ERR_NULL);
    CHECK_ERR(amp_gemm(amp, (amp_order)row, (amp_trans)no, (amp_trans)no, 2, 2, 3, 1, NULL, 3, b, 2, 0, c, 2), AMP_ERR_NULL);
    CHECK_ERR(amp_gemm(amp, (amp_order)row, (amp_trans)no, (amp_trans)no, 2, 2, 3, 1, a, 3, NULL, 2, 0, c, 2), AMP_ERR_NULL);
    CHECK_ERR(amp_gemm(amp, (amp_order)row, (amp_trans)no, (amp_trans)no, 2, 2, 3, 1, a, 3, b, 2, 0, NULL, 2), AMP_ERR_NULL);
    CHECK(c[0] == 9 && c[1] == 9 && c[2] == 9 && c[3] == 9);
    CHECK_OK(amp_gemm(amp, (amp_order)col, (amp_trans)no, (amp_trans)no, 2, 0, 3, 1, a, 2, b, 3, 0, c, 2));
    CHECK(c[0] == 9);
    CHECK_OK(amp_gemm(amp, (amp_order)row, (amp_trans)no, (amp_trans)no, 2, 2, 0, 1, NULL, 1, NULL, 2, 0.5f, c, 2));      /* no k: C = beta C */
    CHECK(c[0] == 4.5f && c[3] == 4.5f);
}

TEST(add_and_cast_arguments) {
    amp_tensor a = rows(0, 4, 6), b = rows(1, 4, 6), y = rows(2, 4, 6), longer = rows(2, 4, 7);
    amp_tensor f64 = amp_tensor2(room[3], AMP_F64, 4, 6), strided = a;
    strided.stride[0] = 12; strided.stride[1] = 1;
    CHECK_ERR(amp_add(NULL, &a, &b, &y), AMP_ERR_NULL);
    CHECK_ERR(amp_add(amp, NULL, &b, &y), AMP_ERR_NULL);
    CHECK_ERR(amp_add(amp, &a, NULL, &y), AMP_ERR_NULL);
    CHECK_ERR(amp_add(amp, &a, &b, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_add(amp, &f64, &b, &y), AMP_ERR_DTYPE);
    CHECK_ERR(amp_add(amp, &a, &strided, &y), AMP_ERR_SHAPE);
    CHECK_ERR(amp_add(amp, &a, &b, &longer), AMP_ERR_SHAPE);
    CHECK_ERR(amp_cast(NULL, &a, &y), AMP_ERR_NULL);
    CHECK_ERR(amp_cast(amp, NULL, &y), AMP_ERR_NULL);
    CHECK_ERR(amp_cast(amp, &a, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_cast(amp, &strided, &y), AMP_ERR_SHAPE);
    CHECK_ERR(amp_cast(amp, &a, &longer), AMP_ERR_SHAPE);
}

/* ---- Every other function: nothing where something must be */

#define NULLS(call) CHECK_ERR(call, AMP_ERR_NULL)

TEST(nothing_for_base_and_state) {
    amp_state *state = NULL, *other = (amp_state *)&memory;
    void *data = NULL;
    size_t bytes = 0;
    double value = 1;
    amp_dtype dtype;
    char far[5000];
    memset(far, 'x', sizeof far - 1);
    far[sizeof far - 1] = 0;
    NULLS(amp_file_write_atomic(NULL, NULL, "x", 1));
    NULLS(amp_file_write_atomic(NULL, "x", NULL, 1));
    CHECK_ERR(amp_file_write_atomic(NULL, far, "x", 1), AMP_ERR_OPEN);
    NULLS(amp_file_read_all(NULL, NULL, &data, &bytes));
    NULLS(amp_file_read_all(NULL, "x", NULL, &bytes));
    NULLS(amp_file_read_all(NULL, "x", &data, NULL));
    NULLS(amp_dtype_parse(NULL, &dtype));
    NULLS(amp_dtype_parse("fp32", NULL));
    CHECK_ERR(amp_dtype_parse("fp33", &dtype), AMP_ERR_NAME);
    CHECK(strcmp(amp_dtype_name((amp_dtype)-1), "?") == 0 && strcmp(amp_dtype_name((amp_dtype)99), "?") == 0);
    CHECK(amp_tensor_count(NULL) == 0);
    NULLS(amp_state_create(NULL, NULL));
    CHECK_OK(amp_state_create(&state, NULL));
    NULLS(amp_state_put(NULL, "a", AMP_F64, &value, 1));
    NULLS(amp_state_put(state, NULL, AMP_F64, &value, 1));
    NULLS(amp_state_put(state, "a", AMP_F64, NULL, 1));
    CHECK_OK(amp_state_put(state, "a", AMP_F64, &value, 1));
    NULLS(amp_state_get(NULL, "a", AMP_F64, &value, 1));
    NULLS(amp_state_get(state, NULL, AMP_F64, &value, 1));
    NULLS(amp_state_get(state, "a", AMP_F64, NULL, 1));
    CHECK(amp_state_count(NULL, "a", NULL) == -1 && amp_state_count(state, NULL, NULL) == -1 && amp_state_count(state, "a", NULL) == 1);
    CHECK(amp_state_key(NULL, 0) == NULL && amp_state_key(state, -1) == NULL && amp_state_key(state, 1) == NULL);
    NULLS(amp_state_encode(NULL, &data, &bytes));
    NULLS(amp_state_encode(state, NULL, &bytes));
    NULLS(amp_state_encode(state, &data, NULL));
    NULLS(amp_state_decode(NULL, NULL, "x", 1));
    NULLS(amp_state_decode(&other, NULL, NULL, 1));
    NULLS(amp_state_save(NULL, "x"));
    NULLS(amp_state_save(state, NULL));
    NULLS(amp_state_load(NULL, NULL, "x"));
    NULLS(amp_state_load(&other, NULL, NULL));
    amp_state_destroy(state);
    amp_state_destroy(NULL);
    NULLS(amp_machine_probe(NULL));
}

TEST(nothing_for_a_context) {
    amp_tensor t = rows(0, 4, 6), out;
    amp_memory_info info;
    amp_desc desc;
    amp_machine machine;
    amp_choice choice;
    amp_mask mask = {0, AMP_MASK_NONE, 0, 0, NULL, NULL, NULL, NULL, 0, 0};
    amp_mask_view view;
    amp_cache_info cache;
    amp_plan plan;
    amp_param *p = param(0, 0, 4, 6);
    amp_state *state;
    void *ptr;
    int32_t op;
    char far[200];
    memset(far, 'x', sizeof far - 1);
    far[sizeof far - 1] = 0;
    CHECK_OK(amp_state_create(&state, NULL));
    NULLS(amp_open(NULL, NULL));
    NULLS(amp_query(NULL, &desc)); NULLS(amp_query(amp, NULL));
    NULLS(amp_query_machine(NULL, &machine)); NULLS(amp_query_machine(amp, NULL));
    NULLS(amp_query_choice(NULL, &choice)); NULLS(amp_query_choice(amp, NULL));
    CHECK_OK(amp_query_machine(amp, &machine));
    NULLS(amp_choose(NULL, AMP_F32, 0, &choice)); NULLS(amp_choose(&machine, AMP_F32, 0, NULL));
    NULLS(amp_set_dtype(NULL, AMP_F32)); NULLS(amp_set_enabled(NULL, 1));
    NULLS(amp_alloc(NULL, &ptr, 8)); NULLS(amp_alloc(amp, NULL, 8));
    amp_free(NULL, room); amp_free(amp, NULL); amp_close(NULL);
    NULLS(amp_copy(NULL, room[0], room[1], 8, AMP_COPY_DEFAULT)); NULLS(amp_copy(amp, NULL, room[1], 8, AMP_COPY_DEFAULT));
    NULLS(amp_copy(amp, room[0], NULL, 8, AMP_COPY_DEFAULT));
    CHECK_ERR(amp_copy(amp, room[0], room[1], -1, AMP_COPY_DEFAULT), AMP_ERR_RANGE);
    NULLS(amp_fill(NULL, room[0], 0, 8)); NULLS(amp_fill(amp, NULL, 0, 8));
    CHECK_ERR(amp_fill(amp, room[0], 0, -1), AMP_ERR_RANGE);
    NULLS(amp_sync(NULL));
    NULLS(amp_event_record(NULL, room)); NULLS(amp_event_record(amp, NULL)); CHECK_OK(amp_event_record(amp, room));
    NULLS(amp_event_wait(NULL, room)); NULLS(amp_event_wait(amp, NULL)); CHECK_OK(amp_event_wait(amp, room));
    NULLS(amp_memory(NULL, &info)); NULLS(amp_memory(amp, NULL));
    amp_memory_reset_peak(NULL);
    NULLS(amp_cleanup(NULL, NULL)); CHECK_OK(amp_cleanup(amp, NULL));
    NULLS(amp_param_register(NULL, p, 1)); NULLS(amp_param_register(amp, NULL, 1));
    CHECK_ERR(amp_param_register(amp, p, -1), AMP_ERR_RANGE);
    amp_param_forget(NULL, p, 1); amp_param_forget(amp, NULL, 1);
    amp_param_changed(NULL);
    CHECK(amp_param_accumulate(NULL) == 0 && amp_param_dtype(NULL, 0) == AMP_F32);
    NULLS(amp_mask_get(NULL, &mask, 1, 1, 1, AMP_U8, &view)); NULLS(amp_mask_get(amp, NULL, 1, 1, 1, AMP_U8, &view));
    NULLS(amp_mask_get(amp, &mask, 1, 1, 1, AMP_U8, NULL));
    CHECK_ERR(amp_mask_get(amp, &mask, 1, 0, 1, AMP_U8, &view), AMP_ERR_RANGE);
    CHECK_ERR(amp_mask_get(amp, &mask, 1, 1, 0, AMP_U8, &view), AMP_ERR_RANGE);
    CHECK_ERR(amp_mask_get(amp, &mask, 4, INT64_MAX / 4, 8, AMP_U8, &view), AMP_ERR_SIZE);
    amp_mask_release(NULL, &view); amp_mask_release(amp, NULL); memset(&view, 0, sizeof view); amp_mask_release(amp, &view);
    NULLS(amp_mask_cache_info(NULL, &cache)); NULLS(amp_mask_cache_info(amp, NULL));
    amp_mask_cache_clear(NULL);
    NULLS(amp_autocast_begin(NULL, NULL)); NULLS(amp_recompute_begin(NULL));
    CHECK(amp_autocast_active(NULL, NULL) == 0);
    NULLS(amp_autocast_decide(NULL, AMP_OP_LINEAR, NULL, NULL, 0, &plan)); NULLS(amp_autocast_decide(amp, AMP_OP_LINEAR, NULL, NULL, 0, NULL));
    NULLS(amp_autocast_decide(amp, AMP_OP_LINEAR, NULL, NULL, 1, &plan));
    NULLS(amp_operator_register(NULL, "mine", AMP_CAST_FP32, &op)); NULLS(amp_operator_register(amp, NULL, AMP_CAST_FP32, &op));
    NULLS(amp_operator_register(amp, "mine", AMP_CAST_FP32, NULL));
    CHECK_ERR(amp_operator_register(amp, "mine", AMP_CAST_DEFAULT, &op), AMP_ERR_RANGE);
    CHECK_ERR(amp_operator_register(amp, "mine", (amp_cast_policy)-1, &op), AMP_ERR_RANGE);
    CHECK_ERR(amp_operator_register(amp, far, AMP_CAST_FP32, &op), AMP_ERR_RANGE);
    NULLS(amp_operator_override(NULL, AMP_OP_LINEAR, AMP_CAST_FP32));
    CHECK_ERR(amp_operator_override(amp, AMP_OP_NONE, AMP_CAST_FP32), AMP_ERR_NAME);
    NULLS(amp_layer_override(NULL, "x", AMP_F32)); NULLS(amp_layer_override(amp, NULL, AMP_F32));
    CHECK_ERR(amp_layer_override(amp, far, AMP_F32), AMP_ERR_RANGE);
    NULLS(amp_autocast_cast(NULL, p, AMP_BF16, &out)); NULLS(amp_autocast_cast(amp, NULL, AMP_BF16, &out)); NULLS(amp_autocast_cast(amp, p, AMP_BF16, NULL));
    CHECK_ERR(amp_autocast_cast(amp, p, AMP_BF16, &out), AMP_ERR_STATE);
    p->name = NULL;
    CHECK_ERR(amp_autocast_cast(amp, p, AMP_BF16, &out), AMP_ERR_STATE);
    NULLS(amp_cast_cache_info(NULL, &cache)); NULLS(amp_cast_cache_info(amp, NULL));
    amp_cast_cache_clear(NULL);
    NULLS(amp_random_save(NULL, state, "x")); NULLS(amp_random_save(amp, NULL, "x")); NULLS(amp_random_save(amp, state, NULL));
    NULLS(amp_random_load(NULL, state, "x")); NULLS(amp_random_load(amp, NULL, "x")); NULLS(amp_random_load(amp, state, NULL));
    NULLS(amp_graph_begin(NULL));
    CHECK_ERR(amp_graph_begin(amp), AMP_ERR_UNSUPPORTED);
    NULLS(amp_graph_launch(NULL));
    amp_graph_destroy(NULL);
    amp_state_destroy(state);
    CHECK(t.data == room[0]);
}

static int no_thread(void *user, void **thread, void (*run)(void *), void *arg) { (void)user; (void)run; (void)arg; (void)thread; return -1; }

TEST(settings_of_a_context_that_contradict) {
    amp_context *other = NULL;
    amp_linear_op *op = &memory.linear;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.system.thread_start = no_thread;
    REFUSED(amp_open(&other, &desc), AMP_ERR_CONFLICT, "must be set together");
    memset(&desc, 0, sizeof desc);
    desc.cpu_path = (amp_cpu_path)9;
    CHECK_ERR(amp_open(&other, &desc), AMP_ERR_RANGE);
    memset(&desc, 0, sizeof desc);
    desc.level = AMP_LEVEL_O0;
    CHECK_OK(amp_open(&other, &desc));
    REFUSED(amp_set_dtype(other, AMP_BF16), AMP_ERR_CONFLICT, "level O0");
    CHECK_OK(amp_set_dtype(other, AMP_F32));
    amp_close(other);
    make(&cases[0]);
    op->x = amp_tensor3(room[0], AMP_F32, 2, 3, 3);
    op->x.stride[0] = 12; op->x.stride[1] = 3; op->x.stride[2] = 1;
    REFUSED(amp_linear(amp, op), AMP_ERR_SHAPE, "not evenly strided");
}

TEST(nothing_for_a_step) {
    const float one = 1;
    amp_grad_set_desc set_desc;
    amp_optimizer_desc desc;
    amp_grad_set *set;
    amp_scaler *scaler;
    amp_optimizer *o;
    amp_scaler_desc query;
    amp_grad_stats found;
    amp_parameter_bytes bytes;
    amp_step_result outcome;
    amp_state *state, *joined;
    int32_t apply;
    memset(&set_desc, 0, sizeof set_desc);
    memset(&desc, 0, sizeof desc);
    desc.params = set_desc.params = param(0, 0, 4, 6);
    desc.n_params = set_desc.n_params = 1;
    CHECK_OK(amp_state_create(&state, NULL));
    NULLS(amp_grad_set_create(NULL, &set, &set_desc)); NULLS(amp_grad_set_create(amp, NULL, &set_desc)); NULLS(amp_grad_set_create(amp, &set, NULL));
    set_desc.n_params = -1;
    CHECK_ERR(amp_grad_set_create(amp, &set, &set_desc), AMP_ERR_RANGE);
    set_desc.n_params = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &set_desc));
    NULLS(amp_grad_set_stats(NULL, &found)); NULLS(amp_grad_set_stats(set, NULL));
    CHECK(amp_grad_set_device(NULL) == NULL);
    NULLS(amp_grad_set_apply(NULL)); NULLS(amp_grad_set_save(NULL)); NULLS(amp_grad_set_restore(NULL));
    NULLS(amp_scaler_create(NULL, &scaler, NULL)); NULLS(amp_scaler_create(amp, NULL, NULL));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    NULLS(amp_scaler_query(NULL, &query)); NULLS(amp_scaler_query(scaler, NULL));
    CHECK(amp_scaler_device(NULL) == NULL && amp_scaler_scale_ptr(NULL) == NULL && amp_scaler_scale(NULL) == 1);
    NULLS(amp_scaler_get(NULL, NULL)); NULLS(amp_scaler_get(scaler, NULL));
    NULLS(amp_scaler_set_scale(NULL, 1)); NULLS(amp_scaler_set_rule(NULL, 2, 0.5, 1));
    NULLS(amp_scaler_check(scaler, NULL, AMP_CHECK_READ));
    NULLS(amp_scaler_unscale(NULL, NULL, 1, NULL)); NULLS(amp_scaler_unscale(scaler, NULL, 1, &apply));
    NULLS(amp_scaler_rescale(scaler, NULL, 1));
    NULLS(amp_scaler_save(NULL, state, "x")); NULLS(amp_scaler_save(scaler, NULL, "x")); NULLS(amp_scaler_save(scaler, state, NULL));
    NULLS(amp_scaler_load(NULL, state, "x")); NULLS(amp_scaler_load(scaler, NULL, "x")); NULLS(amp_scaler_load(scaler, state, NULL));
    NULLS(amp_optimizer_create(NULL, &o, &desc)); NULLS(amp_optimizer_create(amp, NULL, &desc)); NULLS(amp_optimizer_create(amp, &o, NULL));
    CHECK_OK(amp_optimizer_create(amp, &o, &desc));
    NULLS(amp_optimizer_query(NULL, &desc)); NULLS(amp_optimizer_query(o, NULL));
    CHECK(amp_optimizer_grad_set(NULL) == NULL);
    NULLS(amp_optimizer_set_lr(NULL, 1)); NULLS(amp_optimizer_set_clip(NULL, 1)); NULLS(amp_optimizer_set_accumulation(NULL, 1)); NULLS(amp_optimizer_zero_grad(NULL));
    NULLS(amp_optimizer_rebuild_masters(NULL));
    NULLS(amp_optimizer_set_weight(NULL, desc.params, &one)); NULLS(amp_optimizer_set_weight(o, NULL, &one));
    NULLS(amp_optimizer_set_weight(o, desc.params, NULL));
    NULLS(amp_params_broadcast(NULL, desc.params, 1)); NULLS(amp_params_broadcast(amp, NULL, 1));
    CHECK_ERR(amp_params_broadcast(amp, desc.params, -1), AMP_ERR_RANGE);
    NULLS(amp_optimizer_bytes(NULL, &bytes)); NULLS(amp_optimizer_bytes(o, NULL));
    NULLS(amp_optimizer_step(NULL, scaler)); NULLS(amp_step(NULL, scaler));
    CHECK(amp_step_result_next(NULL, &outcome) == 0 && amp_step_result_next(o, NULL) == 0 && amp_step_result_next(o, &outcome) == 0);
    NULLS(amp_step_result_flush(NULL));
    NULLS(amp_optimizer_save(NULL, state, "x")); NULLS(amp_optimizer_save(o, NULL, "x")); NULLS(amp_optimizer_save(o, state, NULL));
    NULLS(amp_state_save_ranks(NULL, state, "x")); NULLS(amp_state_save_ranks(amp, NULL, "x")); NULLS(amp_state_save_ranks(amp, state, NULL));
    CHECK_ERR(amp_state_load_ranks(NULL, &joined, "/no/such/file"), AMP_ERR_OPEN); NULLS(amp_state_load_ranks(amp, NULL, "x")); NULLS(amp_state_load_ranks(amp, &joined, NULL));
    NULLS(amp_optimizer_load(NULL, state, "x")); NULLS(amp_optimizer_load(o, NULL, "x")); NULLS(amp_optimizer_load(o, state, NULL));
    amp_optimizer_destroy(o); amp_optimizer_destroy(NULL);
    amp_scaler_destroy(scaler); amp_scaler_destroy(NULL);
    amp_grad_set_destroy(set); amp_grad_set_destroy(NULL);
    amp_state_destroy(state);
}

/* ---- Kernels that fail */

/* The n-th kernel of this call fails, for every n: the error comes through, and the call works the next time. */
static void fails(const operator_case *c, operator_call call) {
    for (int n = 1, more = 1; more; n++) {
        int before = recording.calls;
        amp_result result;
        make(c);
        if (call == c->backward) CHECK_OK(c->forward(amp, &memory));
        before = recording.calls;
        recording.fail_at = n;
        result = call(amp, &memory);
        more = recording.fail_at == 0;
        recording.fail_at = 0;
        CHECK_MSG(result == (more ? AMP_ERR_DEVICE : AMP_OK), "%s, kernel %d of its call: %d", c->name, n, (int)result);
        CHECK(recording.calls > before);
        if (more && call == c->forward && c->backward != NULL)
            CHECK_ERR(c->backward(amp, &memory), AMP_ERR_STATE);        /* a forward that failed has not run */
    }
}

TEST(failing_kernels_come_through) {
    amp_context *own = amp;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.backend = recording_backend();
    CHECK_OK(amp_open(&amp, &desc));
    fill_room();
    for (int i = 0; i < CASES; i++) {
        fails(&cases[i], cases[i].forward);
        if (cases[i].backward != NULL) fails(&cases[i], cases[i].backward);
    }
    amp_close(amp);
    amp = own;
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    if (amp_open(&amp, NULL) != AMP_OK) { printf("%s\n", amp_last_error()); return 1; }
    RUN(every_argument_spoiled);
    RUN(misaligned_elsewhere);
    RUN(nothing_there);
    RUN(structs_that_were_not_zeroed);
    RUN(numbers_out_of_range);
    RUN(not_a_number);
    RUN(no_number_is_forgotten);
    RUN(minus_one_is_no_zero);
    RUN(outputs_that_overlap);
    RUN(in_place_in_another_size); RUN(rope_arguments);
    RUN(overlap_without_an_op);
    RUN(packed_views_are_apart);
    RUN(halves_of_a_buffer_are_apart);
    RUN(random_views_are_refused_exactly_where_they_share);
    RUN(tangled_views);
    RUN(activations_in_place);
    RUN(what_went_into_gelu_is_gone);
    RUN(ids_out_of_range);
    RUN(gemm_arguments);
    RUN(add_and_cast_arguments);
    RUN(nothing_for_base_and_state);
    RUN(nothing_for_a_context);
    RUN(settings_of_a_context_that_contradict);
    RUN(nothing_for_a_step);
    RUN(failing_kernels_come_through);
    amp_close(amp);
    return TEST_END();
}
