/* t_determinism.c - tests every cell of the manual's table SAME BITS.  Every operator, and the code around it, must compute
 * the same bits in another process, with another number of threads, after a restart from a saved state, and on the CPU
 * paths for which the table says so.  Where the table says that paths differ, they must differ.  The same must hold in
 * every floating-point environment of the program: each rounding mode, subnormal numbers flushed to zero, and exceptions
 * that trap, with inputs that raise all of them.
 *
 * A trace is a hash of all that each operation writes in each step.  To make traces in other processes, this program runs
 * itself as `t_determinism --trace OUT THREADS FIRST LAST LOAD SAVE`, where LOAD and SAVE may be -. */
#define _GNU_SOURCE                 /* feenableexcept */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#if !defined(_WIN32)
#  include <sys/wait.h>
#else
#  include <process.h>
#endif
#include <unistd.h>

enum { STEPS = 5, RESTART = 3, MAX_OUTPUTS = 24, MAX_PARAMS = 8, PATHS = AMP_CPU_PATHS };
enum { ARENA = 16 << 20 };

/* ---- Inputs and outputs of one operation.  An input is a function of the step and of its place among the inputs. */

static char arena[ARENA] __attribute__((aligned(64)));
static size_t arena_used;
static struct { const void *data; size_t bytes; amp_dtype dtype; } outputs[MAX_OUTPUTS];
static amp_param params[MAX_PARAMS];
static int n_outputs, n_inputs, n_params, step;
static amp_context *amp;
static void *device;                /* of the backend, for kernels that no operator reaches alone */

static void *take(size_t bytes) {
    void *memory = arena + arena_used;
    arena_used += (bytes + 63) / 64 * 64;
    if (arena_used > ARENA) exit(2);
    memset(memory, 0, bytes);
    return memory;
}

static void watch(const void *data, size_t bytes) {
    if (n_outputs == MAX_OUTPUTS) exit(2);
    outputs[n_outputs].data = data;
    outputs[n_outputs].dtype = AMP_DTYPE_DEFAULT;
    outputs[n_outputs++].bytes = bytes;
}

static amp_tensor shaped(amp_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d) {
    amp_tensor t = amp_tensor4(arena, dtype, a, b, c, d);
    t.ndim = d ? 4 : c ? 3 : b ? 2 : 1;
    t.data = take((size_t)amp_tensor_count(&t) * amp_dtype_size(dtype));
    return t;
}

/* Number i of a sequence: the finaliser of SplitMix64. */
static uint64_t number(uint64_t sequence, uint64_t i) {
    uint64_t x = sequence * UINT64_C(0xbf58476d1ce4e5b9) + (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Uniform in [-2, 2), from a place in a store of such numbers on. */
enum { STORE = 1 << 16 };
static struct { float f32[STORE]; uint16_t f16[STORE], bf16[STORE]; } store;

static void fill(void *data, amp_dtype dtype, int64_t n, uint64_t sequence) {
    const char *from = dtype == AMP_F32 ? (const char *)store.f32 : dtype == AMP_F16 ? (const char *)store.f16 : (const char *)store.bf16;
    size_t size = amp_dtype_size(dtype), place = number(sequence, 0) % STORE;
    for (size_t at = 0, piece, left = (size_t)n; left > 0; at += piece, left -= piece, place = 0) {
        piece = left < STORE - place ? left : STORE - place;
        memcpy((char *)data + at * size, from + place * size, piece * size);
    }
}

/* special 1: infinities, NaN, zeros, subnormal and huge numbers among them, in one half few, in the other many. */
static void make_store(int special) {
    static const uint32_t specials[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7fa00001, 0, 0x80000000, 1, 0x80000001, 0x007fffff, 0x00400000,
                                  0x33000000, 0x38000001, 0x7f7fffff, 0xff7fffff, 0x477ff000, 0x5f000000, 0x00800000, 0x20000000};
    for (int i = 0; i < STORE; i++) {
        uint64_t bits = number(2, (uint64_t)i);
        store.f32[i] = (float)(number(1, (uint64_t)i) >> 40) * (1.0f / 4194304) - 2;
        if (special && bits % (i < STORE / 2 ? 499 : 3) == 0) memcpy(&store.f32[i], &specials[(bits >> 32) % 18], 4);
    }
    CHECK_OK(amp_convert(store.f16, AMP_F16, store.f32, AMP_F32, STORE, NULL, NULL));
    CHECK_OK(amp_convert(store.bf16, AMP_BF16, store.f32, AMP_F32, STORE, NULL, NULL));
}

static amp_tensor input(amp_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d) {
    amp_tensor t = shaped(dtype, a, b, c, d);
    fill(t.data, dtype, amp_tensor_count(&t), (uint64_t)(1000 * step + n_inputs++));
    return t;
}

static amp_tensor output(amp_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d) {
    amp_tensor t = shaped(dtype, a, b, c, d);
    watch(t.data, (size_t)amp_tensor_count(&t) * amp_dtype_size(dtype));
    outputs[n_outputs - 1].dtype = dtype;
    return t;
}

static float *output_f32(int64_t n) { return (float *)output(AMP_F32, n, 0, 0, 0).data; }

static int32_t *integers(int64_t n, int32_t below) {
    int32_t *x = (int32_t *)take((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = (int32_t)(number((uint64_t)step, (uint64_t)i) % (uint64_t)below);
    return x;
}

/* A weight whose gradient is an output. */
static amp_param *weight(amp_dtype dtype, int64_t rows, int64_t cols) {
    amp_param *p = &params[n_params++];
    if (n_params > MAX_PARAMS) exit(2);
    memset(p, 0, sizeof *p);
    p->weight = input(dtype, rows, cols, 0, 0);
    p->grad = output(dtype, rows, cols, 0, 0);
    return p;
}

/* ---- The operations, forward and backward, in a storage and a compute dtype */

typedef struct kind { amp_dtype storage, compute; } kind;

/* Of the operators' casts and of those that only the CPU's own table reaches. */
static void do_cast(kind k) {
    static const amp_dtype to[] = {AMP_F32, AMP_F16, AMP_BF16, AMP_TF32, AMP_E4M3, AMP_E5M2};
    amp_tensor x = input(k.storage, 33011, 0, 0, 0);
    for (int i = 0; i < 6; i++)
        for (int how = 0; how < (i == 0 || i == 3 ? 1 : 2); how++) {
            amp_k_cast args;
            memset(&args, 0, sizeof args);
            args.src = x.data; args.src_dtype = k.storage;
            args.n = how ? 3011 : 33011;
            args.dst = output(to[i], args.n, 0, 0, 0).data; args.dst_dtype = to[i];
            args.how.rounding = how ? AMP_ROUND_STOCHASTIC : AMP_ROUND_DEFAULT;
            CHECK_OK(amp_cpu()->cast(device, &args, NULL));
        }
}

static void do_masks(kind k) {
    amp_mask mask;
    memset(&mask, 0, sizeof mask);
    mask.kind = AMP_MASK_WINDOW_GLOBAL; mask.window = 9; mask.global = 2;
    mask.lengths = integers(3, 70);
    for (int i = 0; i < 2; i++) {
        amp_mask_view view;
        size_t bytes;
        CHECK_OK(amp_mask_get(amp, &mask, 3, 65, 70, i ? AMP_U8 : k.storage, &view));
        bytes = (size_t)amp_tensor_count(&view.tensor) * amp_dtype_size(view.tensor.dtype);
        memcpy(output(view.tensor.dtype, amp_tensor_count(&view.tensor), 0, 0, 0).data, view.tensor.data, bytes);
        amp_mask_release(amp, &view);
    }
}

static void do_dropout(kind k) {
    amp_dropout_op op;
    memset(&op, 0, sizeof op);
    op.p = 0.3f;
    op.x = input(k.storage, 36021, 0, 0, 0); op.y = output(k.storage, 36021, 0, 0, 0);
    op.dy = input(k.storage, 36021, 0, 0, 0); op.dx = output(k.storage, 36021, 0, 0, 0);
    CHECK_OK(amp_dropout(amp, &op));
    CHECK_OK(amp_dropout_backward(amp, &op));
}

static void do_rope(kind k) {
    for (int adjacent = 0; adjacent < 2; adjacent++) {
        amp_rope_op op;
        memset(&op, 0, sizeof op);
        op.pairing = adjacent ? AMP_ROPE_ADJACENT : AMP_ROPE_HALVES; op.rotary = adjacent ? 34 : 0; op.offset = 1000;
        op.q = amp_tensor4(output(k.storage, 2, 70, 3, 46).data, k.storage, 2, 70, 3, 46);
        op.k = amp_tensor4(output(k.storage, 2, 70, 1, 46).data, k.storage, 2, 70, 1, 46);
        memcpy(op.q.data, input(k.storage, 2, 70, 3, 46).data, 2 * 70 * 3 * 46 * amp_dtype_size(k.storage));
        memcpy(op.k.data, input(k.storage, 2, 70, 1, 46).data, 2 * 70 * 46 * amp_dtype_size(k.storage));
        CHECK_OK(amp_rope(amp, &op));
        op.dq = op.q; op.dk = op.k;
        if (adjacent) { op.offset = 7; CHECK_OK(amp_rope_backward(amp, &op)); }
    }
}

static void do_add(kind k) {
    amp_tensor a = input(AMP_F32, 36013, 0, 0, 0), b = input(k.storage, 36013, 0, 0, 0), y = output(k.storage, 36013, 0, 0, 0);
    CHECK_OK(amp_add(amp, &a, &b, &y));
}

static void do_embedding(kind k) {
    amp_embedding_op op;
    memset(&op, 0, sizeof op);
    op.table = weight(k.storage, 101, 66); op.positions = weight(k.storage, 50, 66);
    op.ids = integers(500, 101); op.seq = 50;
    op.y = output(k.storage, 500, 66, 0, 0); op.dy = input(k.storage, 500, 66, 0, 0);
    CHECK_OK(amp_embedding(amp, &op));
    for (int i = 0; i < 2; i++) CHECK_OK(amp_embedding_backward(amp, &op));
}

static void do_linear(kind k) {
    amp_linear_op op;
    memset(&op, 0, sizeof op);
    op.weight = weight(k.storage, 151, 97); op.bias = weight(k.storage, 151, 0);
    op.act = AMP_ACT_GELU;
    op.x = input(k.storage, 69, 97, 0, 0);
    op.y = output(k.storage, 69, 151, 0, 0); op.pre = output(k.storage, 69, 151, 0, 0);
    op.dy = input(k.storage, 69, 151, 0, 0); op.dx = output(k.storage, 69, 97, 0, 0);
    CHECK_OK(amp_linear(amp, &op));
    for (int i = 0; i < 2; i++) CHECK_OK(amp_linear_backward(amp, &op));
}

/* Without bias and activation: the product alone. */
static void do_matmul(kind k) {
    amp_matmul_op op;
    memset(&op, 0, sizeof op);
    op.alpha = 0.7f;
    op.a = input(k.storage, 3, 50, 70, 0); op.b = input(k.storage, 3, 70, 61, 0); op.y = output(k.storage, 3, 50, 61, 0);
    op.dy = input(k.storage, 3, 50, 61, 0); op.da = output(k.storage, 3, 50, 70, 0); op.db = output(k.storage, 3, 70, 61, 0);
    CHECK_OK(amp_matmul(amp, &op));
    CHECK_OK(amp_matmul_backward(amp, &op));
}

static void do_gemm(kind k) {
    const float *a = (const float *)input(AMP_F32, 140, 310, 0, 0).data, *b = (const float *)input(AMP_F32, 310, 99, 0, 0).data;
    float *c = output_f32(140 * 99);
    (void)k;
    for (int i = 0; i < 2; i++) CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 140, 99, 310, 1, a, 310, b, 99, 0.5f, c, 99));
}

/* Several heads, and one with more queries than a thread takes at a time. */
static void do_attention(kind k) {
    static const int64_t shapes[2][4] = {{2, 65, 3, 40}, {1, 300, 1, 16}};
    for (int i = 0; i < 2; i++) {
        const int64_t b = shapes[i][0], n = shapes[i][1], h = shapes[i][2], d = shapes[i][3];
        amp_attention_op op;
        memset(&op, 0, sizeof op);
        op.mask.kind = AMP_MASK_CAUSAL;
        op.q = input(k.storage, b, n, h, d); op.k = input(k.storage, b, n, h, d); op.v = input(k.storage, b, n, h, d);
        op.o = output(k.storage, b, n, h, d); op.lse = output_f32(b * h * n);
        op.d_o = input(k.storage, b, n, h, d);
        op.dq = output(k.storage, b, n, h, d); op.dk = output(k.storage, b, n, h, d); op.dv = output(k.storage, b, n, h, d);
        CHECK_OK(amp_attention(amp, &op));
        CHECK_OK(amp_attention_backward(amp, &op));
    }
}

static void do_norm(kind k, int rms) {
    amp_norm_op op;
    memset(&op, 0, sizeof op);
    op.weight = weight(AMP_F32, 97, 0); op.bias = rms ? NULL : weight(AMP_F32, 97, 0);
    op.x = input(k.storage, 300, 97, 0, 0); op.residual = input(k.storage, 300, 97, 0, 0);
    op.sum = output(k.storage, 300, 97, 0, 0); op.y = output(k.storage, 300, 97, 0, 0);
    op.mean = output_f32(300); op.rstd = output_f32(300);
    op.dy = input(k.storage, 300, 97, 0, 0); op.dsum = input(k.storage, 300, 97, 0, 0); op.dx = output(k.storage, 300, 97, 0, 0);
    CHECK_OK(rms ? amp_rmsnorm(amp, &op) : amp_layernorm(amp, &op));
    CHECK_OK(rms ? amp_rmsnorm_backward(amp, &op) : amp_layernorm_backward(amp, &op));
}
static void do_layernorm(kind k) { do_norm(k, 0); }
static void do_rmsnorm(kind k) { do_norm(k, 1); }

static void do_softmax(kind k) {
    amp_softmax_op op;
    memset(&op, 0, sizeof op);
    op.mask.kind = AMP_MASK_CAUSAL;
    op.scale = 0.3f;
    op.x = input(k.storage, 2, 3, 65, 65); op.y = output(k.storage, 2, 3, 65, 65);
    op.dy = input(k.storage, 2, 3, 65, 65); op.dx = output(k.storage, 2, 3, 65, 65);
    CHECK_OK(amp_softmax(amp, &op));
    CHECK_OK(amp_softmax_backward(amp, &op));
}

static void do_activation(kind k) {
    for (int act = AMP_ACT_GELU; act <= (int)AMP_ACT_RELU; act++) {
        amp_activation_op op;
        memset(&op, 0, sizeof op);
        op.act = (amp_activation_kind)act;
        op.bias = weight(AMP_F32, 97, 0);
        op.x = input(k.storage, 181, 97, 0, 0); op.y = output(k.storage, 181, 97, 0, 0);
        op.dy = input(k.storage, 181, 97, 0, 0); op.dx = output(k.storage, 181, 97, 0, 0);
        CHECK_OK(amp_activation(amp, &op));
        CHECK_OK(amp_activation_backward(amp, &op));
    }
}

static void do_swiglu(kind k) {
    amp_swiglu_op op;
    memset(&op, 0, sizeof op);
    op.gate = input(k.storage, 200, 97, 0, 0); op.up = input(k.storage, 200, 97, 0, 0); op.y = output(k.storage, 200, 97, 0, 0);
    op.dy = input(k.storage, 200, 97, 0, 0); op.dgate = output(k.storage, 200, 97, 0, 0); op.dup = output(k.storage, 200, 97, 0, 0);
    CHECK_OK(amp_swiglu(amp, &op));
    CHECK_OK(amp_swiglu_backward(amp, &op));
}

static void do_cross_entropy(kind k) {
    amp_cross_entropy_op op;
    memset(&op, 0, sizeof op);
    op.logits = input(k.storage, 130, 401, 0, 0); op.dlogits = output(k.storage, 130, 401, 0, 0);
    op.labels = integers(130, 401); op.label_smoothing = 0.1f;
    op.loss = output_f32(1); op.losses = output_f32(130);
    CHECK_OK(amp_cross_entropy(amp, &op));
}

/* In three chunks of rows. */
static void do_linear_cross_entropy(kind k) {
    amp_linear_cross_entropy_op op;
    memset(&op, 0, sizeof op);
    op.weight = weight(k.storage, 401, 64); op.bias = weight(k.storage, 401, 0);
    op.x = input(k.storage, 150, 64, 0, 0); op.dx = output(k.storage, 150, 64, 0, 0);
    op.labels = integers(150, 401); op.chunk = 64;
    op.loss = output_f32(1);
    CHECK_OK(amp_linear_cross_entropy(amp, &op));
}

static void do_mse(kind k) {
    amp_mse_op op;
    memset(&op, 0, sizeof op);
    op.x = input(k.storage, 36003, 0, 0, 0); op.target = input(k.storage, 36003, 0, 0, 0); op.dx = output(k.storage, 36003, 0, 0, 0);
    op.loss = output_f32(1);
    CHECK_OK(amp_mse(amp, &op));
}

/* ---- What lives through all steps, and is saved */

enum { KEPT = 6, KEPT_COUNT = 20011, HIDDEN = 96, WIDTH = 64, CLASSES = 33, BATCH = 12 };

static const amp_dtype kept_dtypes[KEPT] = {AMP_F32, AMP_BF16, AMP_BF16, AMP_F16, AMP_BF16, AMP_F32};
static const amp_param_group kept_groups[4] = {{"remainder", 0, 0, AMP_MASTER_REMAINDER, AMP_DTYPE_DEFAULT},
                                         {"stochastic", 0, 0, AMP_MASTER_STOCHASTIC, AMP_BF16},
                                         {"none", 0, 0, AMP_MASTER_NONE, AMP_DTYPE_DEFAULT},
                                         {"8-bit", 0, 0, AMP_MASTER_DEFAULT, AMP_MOMENTS_8BIT}};
static const char *const kept_names[KEPT] = {"fp32", "master", "remainder", "stochastic", "none", "8-bit"};

typedef struct stepped { amp_optimizer *opt; amp_param p[KEPT]; char memory[2][KEPT][4 * KEPT_COUNT]; } stepped;
static stepped adamw, sgd, lion;
static struct { amp_scaler *scaler; amp_grad_set *set; float grad[1001]; } scaling;
static struct {
    amp_scaler *scaler; amp_optimizer *opt; amp_loader *loader;
    amp_param p[5];
    float w[5][HIDDEN * WIDTH], g[5][HIDDEN * WIDTH];
} model;

static void stepped_open(stepped *s, amp_optimizer_kind which) {
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    memset(s, 0, sizeof *s);
    for (int i = 0; i < KEPT; i++) {
        s->p[i].name = kept_names[i];
        s->p[i].weight = amp_tensor2(s->memory[0][i], kept_dtypes[i], KEPT_COUNT, 1);
        s->p[i].grad = amp_tensor2(s->memory[1][i], kept_dtypes[i], KEPT_COUNT, 1);
        fill(s->memory[0][i], kept_dtypes[i], KEPT_COUNT, (uint64_t)(50 + i));
    }
    d.kind = which;
    d.params = s->p; d.n_params = KEPT;
    d.groups = kept_groups; d.n_groups = 4;
    d.lr = 0.01; d.weight_decay = 0.1; d.seed = 9;
    if (which == AMP_SGD) d.momentum = 0.9;
    CHECK_OK(amp_optimizer_create(amp, &s->opt, &d));
}

static void stepped_run(stepped *s) {
    for (int i = 0; i < KEPT; i++) {
        fill(s->memory[1][i], kept_dtypes[i], KEPT_COUNT, (uint64_t)(1000 * step + i));
        s->p[i].grad_live = 1;
        watch(s->memory[0][i], (size_t)KEPT_COUNT * amp_dtype_size(kept_dtypes[i]));
    }
    CHECK_OK(amp_optimizer_step(s->opt, NULL));
}
static void do_adamw(kind k) { (void)k; stepped_run(&adamw); }
static void do_sgd(kind k) { (void)k; stepped_run(&sgd); }
static void do_lion(kind k) { (void)k; stepped_run(&lion); }

static void do_clip(kind k) {
    amp_range r;
    amp_grad_set_desc d;
    amp_grad_set *set = NULL;
    amp_scaler *scaler = NULL;
    amp_grad_stats found;
    memset(&r, 0, sizeof r); memset(&d, 0, sizeof d);
    r.count = 36021; r.dtype = k.storage;
    r.data = input(k.storage, r.count, 0, 0, 0).data;
    watch(r.data, (size_t)r.count * amp_dtype_size(k.storage));
    d.ranges = &r; d.n_ranges = 1; d.clip_norm = 1;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    CHECK_OK(amp_scaler_check(scaler, set, AMP_CHECK_UNSCALE));
    CHECK_OK(amp_grad_set_stats(set, &found));
    CHECK_OK(amp_grad_set_apply(set));
    memcpy(output_f32(4), &amp_grad_set_device(set)->sum_sq, sizeof(double));
    memcpy(output_f32(1), &found.norm, sizeof found.norm);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(scaler);
}

static void scaling_open(void) {
    amp_range r;
    amp_grad_set_desc d;
    amp_scaler_desc sd;
    memset(&r, 0, sizeof r); memset(&d, 0, sizeof d); memset(&sd, 0, sizeof sd);
    r.data = scaling.grad; r.count = 1001; r.dtype = AMP_F32;
    d.ranges = &r; d.n_ranges = 1;
    sd.growth_interval = 2; sd.growth_factor = 1.7; sd.backoff_factor = 0.3;
    CHECK_OK(amp_grad_set_create(amp, &scaling.set, &d));
    CHECK_OK(amp_scaler_create(amp, &scaling.scaler, &sd));
}

static void do_scaler(kind k) {
    amp_k_scaler s;
    (void)k;
    fill(scaling.grad, AMP_F32, 1001, (uint64_t)step);
    if (step % 3 == 1) scaling.grad[step * 100] = (float)-HUGE_VAL;
    CHECK_OK(amp_scaler_check(scaling.scaler, scaling.set, AMP_CHECK_UNSCALE));
    CHECK_OK(amp_scaler_update(scaling.scaler));
    CHECK_OK(amp_scaler_get(scaling.scaler, &s));
    memcpy(output_f32(sizeof s / 4 + 1), &s, sizeof s);
    watch(scaling.grad, sizeof scaling.grad);
}

/* What the host has set: rounding, traps, and on x86 whether subnormal numbers are flushed. */
static uint32_t environment(void) {
    uint32_t set = (uint32_t)fegetround();
#if defined(__x86_64__)
    set = __builtin_ia32_stmxcsr() & 0xffc0;
#endif
#if defined(__GLIBC__)
    set |= (uint32_t)fegetexcept() << 16;
#endif
    return set;
}
static uint32_t opened_in;          /* the environment that the loader's threads have */
static int read_sample(void *user, const amp_sample *sample, void *const *fields) {
    (void)user;
    if (environment() != opened_in) return 1;
    fill(fields[0], AMP_F32, WIDTH, (uint64_t)sample->sample);
    *(int32_t *)fields[1] = (int32_t)(sample->random % CLASSES);
    return 0;
}

/* A batch of a shuffled source; it stays until the next. */
static amp_batch batch;
static void do_loader(kind k) {
    (void)k;
    CHECK_OK(amp_loader_next(model.loader, &batch));
    watch(batch.fields[0], (size_t)batch.batch * WIDTH * sizeof(float));
    watch(batch.fields[1], (size_t)batch.batch * sizeof(int32_t));
}

/* Two linear layers with dropout and a norm between them, trained in fp16 by every second of these steps. */
static void do_training(kind k) {
    amp_linear_op one, two;
    amp_dropout_op drop;
    amp_norm_op norm;
    amp_cross_entropy_op ce;
    memset(&one, 0, sizeof one); memset(&two, 0, sizeof two); memset(&drop, 0, sizeof drop); memset(&norm, 0, sizeof norm);
    memset(&ce, 0, sizeof ce);
    (void)k;
    one.x = amp_tensor2(batch.fields[0], AMP_F32, BATCH, WIDTH); one.weight = &model.p[0]; one.bias = &model.p[1];
    one.act = AMP_ACT_GELU; one.y = output(AMP_F32, BATCH, HIDDEN, 0, 0); one.pre = shaped(AMP_F32, BATCH, HIDDEN, 0, 0);
    drop.x = one.y; drop.y = shaped(AMP_F32, BATCH, HIDDEN, 0, 0); drop.p = 0.2f;
    norm.x = drop.y; norm.weight = &model.p[2]; norm.y = shaped(AMP_F32, BATCH, HIDDEN, 0, 0);
    norm.mean = (float *)take(BATCH * 4); norm.rstd = (float *)take(BATCH * 4);
    two.x = norm.y; two.weight = &model.p[3]; two.bias = &model.p[4]; two.y = output(AMP_F32, BATCH, CLASSES, 0, 0);
    ce.logits = ce.dlogits = two.y; ce.labels = (const int32_t *)batch.fields[1]; ce.loss = output_f32(1);
    ce.grad_scale = amp_scaler_scale_ptr(model.scaler);
    CHECK_OK(amp_linear(amp, &one)); CHECK_OK(amp_dropout(amp, &drop)); CHECK_OK(amp_layernorm(amp, &norm));
    CHECK_OK(amp_linear(amp, &two)); CHECK_OK(amp_cross_entropy(amp, &ce));
    two.dy = ce.dlogits; two.dx = shaped(AMP_F32, BATCH, HIDDEN, 0, 0);
    norm.dy = two.dx; norm.dx = shaped(AMP_F32, BATCH, HIDDEN, 0, 0);
    drop.dy = drop.dx = one.dy = norm.dx;
    CHECK_OK(amp_linear_backward(amp, &two)); CHECK_OK(amp_layernorm_backward(amp, &norm));
    CHECK_OK(amp_dropout_backward(amp, &drop)); CHECK_OK(amp_linear_backward(amp, &one));
    CHECK_OK(amp_step(model.opt, model.scaler));
    watch(model.w, sizeof model.w);
    watch(model.g, sizeof model.g);
}

static void model_open(int workers) {
    static const char *const names[5] = {"one.weight", "one.bias", "norm.weight", "two.weight", "two.bias"};
    static const int64_t rows[5] = {HIDDEN, HIDDEN, HIDDEN, CLASSES, CLASSES}, cols[5] = {WIDTH, 0, 0, HIDDEN, 0};
    amp_optimizer_desc od;
    amp_scaler_desc sd;
    amp_loader_desc ld;
    amp_source source;
    memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd); memset(&ld, 0, sizeof ld); memset(&source, 0, sizeof source);
    memset(&model, 0, sizeof model);
    opened_in = environment();
    for (int i = 0; i < 5; i++) {
        model.p[i].name = names[i];
        model.p[i].weight = cols[i] ? amp_tensor2(model.w[i], AMP_F32, rows[i], cols[i]) : amp_tensor1(model.w[i], AMP_F32, rows[i]);
        model.p[i].grad = model.p[i].weight;
        model.p[i].grad.data = model.g[i];
        fill(model.w[i], AMP_F32, rows[i] * (cols[i] ? cols[i] : 1), (uint64_t)(70 + i));
    }
    CHECK_OK(amp_param_register(amp, model.p, 5));
    od.params = model.p; od.n_params = 5; od.lr = 0.01; od.clip_norm = 1; od.accumulation = 2;
    sd.growth_interval = 2; sd.init_scale = 16384;
    source.read = read_sample; source.samples = 100; source.n_fields = 2;
    source.fields[0].dtype = AMP_F32; source.fields[0].count = WIDTH;
    source.fields[1].dtype = AMP_I32; source.fields[1].count = 1;
    ld.source = &source; ld.batch = BATCH; ld.shuffle = 1; ld.seed = 4;
    ld.workers = workers == 1 ? AMP_NO_WORKERS : workers;
    CHECK_OK(amp_optimizer_create(amp, &model.opt, &od));
    CHECK_OK(amp_scaler_create(amp, &model.scaler, &sd));
    CHECK_OK(amp_loader_create(amp, &model.loader, &ld));
}

static void put_weights(amp_state *state, const char *name, int i, void *data, amp_dtype dtype, int64_t n, int load) {
    char key[32];
    snprintf(key, sizeof key, "%s.%d", name, i);
    CHECK_OK(load ? amp_state_get(state, key, dtype, data, n) : amp_state_put(state, key, dtype, data, n));
}

/* Everything to a state, or back. */
static void all_weights(amp_state *state, int load) {
    for (int i = 0; i < KEPT; i++) {
        put_weights(state, "adamw", i, adamw.memory[0][i], kept_dtypes[i], KEPT_COUNT, load);
        put_weights(state, "sgd", i, sgd.memory[0][i], kept_dtypes[i], KEPT_COUNT, load);
        put_weights(state, "lion", i, lion.memory[0][i], kept_dtypes[i], KEPT_COUNT, load);
    }
    for (int i = 0; i < 5; i++) put_weights(state, "model", i, model.w[i], AMP_F32, amp_tensor_count(&model.p[i].weight), load);
}

static amp_state *saved(void) {
    amp_state *state = NULL;
    CHECK_OK(amp_state_create(&state, NULL));
    all_weights(state, 0);
    CHECK_OK(amp_optimizer_save(adamw.opt, state, "adamw"));
    CHECK_OK(amp_optimizer_save(sgd.opt, state, "sgd"));
    CHECK_OK(amp_optimizer_save(lion.opt, state, "lion"));
    CHECK_OK(amp_optimizer_save(model.opt, state, "model"));
    CHECK_OK(amp_scaler_save(scaling.scaler, state, "scaling"));
    CHECK_OK(amp_scaler_save(model.scaler, state, "model"));
    CHECK_OK(amp_loader_save(model.loader, state, "model"));
    CHECK_OK(amp_random_save(amp, state, "model"));
    return state;
}

static void loaded(const char *path) {
    amp_state *state = NULL;
    CHECK_OK(amp_state_load(&state, NULL, path));
    if (state == NULL) return;
    all_weights(state, 1);
    CHECK_OK(amp_optimizer_load(adamw.opt, state, "adamw"));
    CHECK_OK(amp_optimizer_load(sgd.opt, state, "sgd"));
    CHECK_OK(amp_optimizer_load(lion.opt, state, "lion"));
    CHECK_OK(amp_optimizer_load(model.opt, state, "model"));
    CHECK_OK(amp_scaler_load(scaling.scaler, state, "scaling"));
    CHECK_OK(amp_scaler_load(model.scaler, state, "model"));
    CHECK_OK(amp_loader_load(model.loader, state, "model"));
    CHECK_OK(amp_random_load(amp, state, "model"));
    amp_state_destroy(state);
}

/* The bytes of a checkpoint. */
static void do_state(kind k) {
    amp_state *state = saved();
    void *data = NULL;
    size_t bytes = 0;
    (void)k;
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    memcpy(take(bytes), data, bytes);
    watch(arena + arena_used - (bytes + 63) / 64 * 64, bytes);
    amp_file_free(NULL, data, bytes);
    amp_state_destroy(state);
}

/* ---- The table.  Row i of the manual is row i here, and the operations below name their row. */

enum { CELLS = 5, ROWS = 6 };
static const char *const table[1 + ROWS][CELLS] = {
    {"what", "runs", "threads", "restarts", "CPU paths that agree"},
    {"casts, random numbers, dropout, masks", "yes", "yes", "yes", "all"},
    {"embedding, RoPE, add, scaler, loaders", "yes", "yes", "yes", "all"},
    {"activations, SwiGLU, optimizers", "yes", "yes", "yes", "AVX2 and up"},
    {"norms, softmax, attention, losses", "yes", "yes", "yes", "AVX-512 and up"},
    {"gradient norms, other products", "yes", "yes", "yes", "AVX-512 and up"},
    {"products in bf16 and fp8", "yes", "yes", "yes", "none"},
};
/* The first of the paths that agree. */
static const int first_alike[1 + ROWS] = {0, AMP_CPU_SCALAR, AMP_CPU_SCALAR, AMP_CPU_AVX2, AMP_CPU_AVX512, AMP_CPU_AVX512, PATHS};

enum { MAX_KINDS = 4 };
typedef struct operation { const char *name; int row; void (*run)(kind k); kind kinds[MAX_KINDS]; } operation;
#define F32 {AMP_F32, AMP_F32}
#define TF32 {AMP_F32, AMP_TF32}
#define F16 {AMP_F16, AMP_F16}
#define BF16 {AMP_BF16, AMP_BF16}
#define MIXED {AMP_F32, AMP_BF16}
#define FP8 {AMP_F32, AMP_FP8}
static const operation operations[] = {
    {"cast", 1, do_cast, {F32, F16, BF16}},
    {"masks", 1, do_masks, {F32, BF16}},
    {"dropout", 1, do_dropout, {F32, F16, BF16}},
    {"embedding", 2, do_embedding, {F32, F16, BF16}},
    {"rope", 2, do_rope, {F32, F16, BF16}},
    {"add", 2, do_add, {F32, F16, BF16}},
    {"scaler", 2, do_scaler, {F32}},
    {"loader", 2, do_loader, {F32}},
    {"activation", 3, do_activation, {F32, F16, BF16}},
    {"swiglu", 3, do_swiglu, {F32, F16, BF16}},
    {"adamw", 3, do_adamw, {F32}},
    {"sgd", 3, do_sgd, {F32}},
    {"lion", 3, do_lion, {F32}},
    {"layernorm", 4, do_layernorm, {F32, F16, BF16}},
    {"rmsnorm", 4, do_rmsnorm, {F32, F16, BF16}},
    {"softmax", 4, do_softmax, {F32, F16, BF16}},
    {"attention", 4, do_attention, {F32, F16, BF16}},
    {"cross entropy", 4, do_cross_entropy, {F32, F16, BF16}},
    {"mse", 4, do_mse, {F32, F16, BF16}},
    {"clip", 5, do_clip, {F32, F16, BF16}},
    {"linear", 5, do_linear, {F32, TF32, F16}},
    {"linear cross entropy", 5, do_linear_cross_entropy, {F32, F16}},
    {"matmul", 5, do_matmul, {F32, TF32, F16}},
    {"gemm", 5, do_gemm, {F32, TF32, {AMP_F32, AMP_F16}}},
    {"training", 5, do_training, {{AMP_F32, AMP_F16}}},
    {"state", 5, do_state, {F32}},
    {"linear", 6, do_linear, {BF16, MIXED, FP8}},
    {"linear cross entropy", 6, do_linear_cross_entropy, {BF16, MIXED}},
    {"matmul", 6, do_matmul, {BF16, MIXED}},
    {"gemm", 6, do_gemm, {MIXED}},
};
enum { N_OPERATIONS = sizeof operations / sizeof operations[0] };

/* ---- Traces */

typedef struct trace { uint64_t hash[STEPS][N_OPERATIONS][MAX_KINDS]; } trace;

/* The sign and payload of a NaN are no result: they follow the order of operands that the compiler chose. */
static void one_nan(void *data, amp_dtype dtype, size_t bytes) {
    for (size_t i = 0; dtype == AMP_F32 && i < bytes / 4; i++)
        if ((((uint32_t *)data)[i] & 0x7fffffff) > 0x7f800000) ((uint32_t *)data)[i] = 0x7fc00000;
    for (size_t i = 0; (dtype == AMP_F16 || dtype == AMP_BF16) && i < bytes / 2; i++)
        if ((((uint16_t *)data)[i] & 0x7fff) > (dtype == AMP_F16 ? 0x7c00 : 0x7f80)) ((uint16_t *)data)[i] = 0x7fff;
}

static uint64_t hash_outputs(void) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);      /* FNV-1a over words of 8 bytes */
    for (int i = 0; i < n_outputs; i++) one_nan((void *)(uintptr_t)outputs[i].data, outputs[i].dtype, outputs[i].bytes);
    for (int i = 0; i < n_outputs; i++) {
        const char *p = (const char *)outputs[i].data;
        for (size_t left = outputs[i].bytes; left > 0;) {
            uint64_t word = 0;
            size_t n = left < 8 ? left : 8;
            memcpy(&word, p, n);
            h = (h ^ word) * UINT64_C(0x100000001b3);
            h ^= h >> 29;
            p += n; left -= n;
        }
    }
    return h;
}

static amp_result open_device(void **dev, const amp_host *host, const amp_backend_desc *desc) {
    amp_result r = amp_cpu()->open(dev, host, desc);
    device = *dev;
    return r;
}

/* 0: this CPU lacks the path. */
static int open_all(int path, int threads) {
    static amp_backend backend;
    amp_desc d;
    memset(&d, 0, sizeof d);
    backend = *amp_cpu();
    backend.open = open_device;
    d.backend = &backend;
    d.dtype = AMP_BF16; d.allow_fallback = 1;
    d.cpu_path = (amp_cpu_path)path; d.threads = threads;
    d.seed = 5;
    d.logger.level = AMP_LOG_ERROR;     /* what special inputs bring is no news */
    if (amp_open(&amp, &d) != AMP_OK) return 0;
    stepped_open(&adamw, AMP_ADAMW);
    stepped_open(&sgd, AMP_SGD);
    stepped_open(&lion, AMP_LION);
    scaling_open();
    model_open(threads);
    return 1;
}

static void close_all(void) {
    amp_loader_destroy(model.loader);
    amp_optimizer_destroy(model.opt);
    amp_scaler_destroy(model.scaler);
    amp_optimizer_destroy(adamw.opt);
    amp_optimizer_destroy(sgd.opt);
    amp_optimizer_destroy(lion.opt);
    amp_grad_set_destroy(scaling.set);
    amp_scaler_destroy(scaling.scaler);
    amp_close(amp);
}

static const char *running = "";
static void on_trap(int signal) {
    (void)signal;
    fprintf(stderr, "t_determinism: a trap in %s\n", running);
    _exit(9);
}

static void run_steps(int first, int last, trace *t) {
    uint32_t set = environment();
    for (step = first; step < last; step++)
        for (int o = 0; o < N_OPERATIONS; o++)
            for (int k = 0; k < MAX_KINDS && operations[o].kinds[k].storage != AMP_DTYPE_DEFAULT; k++) {
                amp_autocast_desc region;
                memset(&region, 0, sizeof region);
                region.dtype = operations[o].kinds[k].compute;
                arena_used = 0;
                n_outputs = n_inputs = n_params = 0;
                CHECK_OK(amp_autocast_begin(amp, &region));
                running = operations[o].name;
                operations[o].run(operations[o].kinds[k]);
                CHECK_OK(amp_autocast_end(amp));
                CHECK_MSG(environment() == set, "%s leaves the environment %x, found %x", running, environment(), set);
                t->hash[step][o][k] = hash_outputs();
            }
}

/* The steps from first on, up to last, in this process. */
static int run_here(int path, int threads, int first, int last, trace *t) {
    memset(t, 0, sizeof *t);
    if (!open_all(path, threads)) return 0;
    run_steps(first, last, t);
    close_all();
    return 1;
}

static char self[4096], out[64], state_file[64], folder[] = "/tmp/t_determinism_XXXXXX";

/* The same in a separate process, from the state that another left, leaving one. */
static void run_there(int threads, int first, int last, const char *load, const char *save, trace *t) {
    char number[3][16];
    FILE *file;
    int status = -1;
    pid_t child;
    snprintf(number[0], sizeof number[0], "%d", threads);
    snprintf(number[1], sizeof number[1], "%d", first);
    snprintf(number[2], sizeof number[2], "%d", last);
    fflush(stdout);
#if defined(_WIN32)
    child = 1;
    status = (int)_spawnl(_P_WAIT, self, "t_determinism", "--trace", out, number[0], number[1], number[2], load ? load : "-",
                          save ? save : "-", (char *)NULL);
    CHECK(child > 0 && status == 0);
#else
    child = fork();
    if (child == 0) {
        execl(self, self, "--trace", out, number[0], number[1], number[2], load ? load : "-", save ? save : "-", (char *)NULL);
        _exit(3);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
#endif
    memset(t, 0, sizeof *t);
    file = fopen(out, "rb");
    CHECK(file != NULL && fread(t, sizeof *t, 1, file) == 1);
    if (file != NULL) fclose(file);
    unlink(out);
}

static int trace_main(char **argv) {
    static trace t;
    FILE *file;
    if (!open_all(AMP_CPU_DEFAULT, atoi(argv[3]))) return 3;
    if (strcmp(argv[6], "-")) loaded(argv[6]);
    run_steps(atoi(argv[4]), atoi(argv[5]), &t);
    if (strcmp(argv[7], "-")) {
        amp_state *state = saved();
        CHECK_OK(amp_state_save(state, argv[7]));
        amp_state_destroy(state);
    }
    close_all();
    file = fopen(argv[2], "wb");
    CHECK(file != NULL && fwrite(&t, sizeof t, 1, file) == 1 && fclose(file) == 0);
    return ampt.failures != 0;
}

static void check_same(const trace *a, const trace *b, int first, int last, const char *what) {
    for (step = first; step < last; step++)
        for (int o = 0; o < N_OPERATIONS; o++)
            for (int k = 0; k < MAX_KINDS; k++)
                CHECK_MSG(a->hash[step][o][k] == b->hash[step][o][k], "%s in %s differs %s, step %d", operations[o].name,
                          amp_dtype_name(operations[o].kinds[k].compute), what, step);
}

/* ---- The cells */

static trace reference, other, of_path[PATHS];

/* Cells are two spaces or more apart. */
static int cells_of(const char *line, char cells[CELLS][64]) {
    int n = 0;
    while (n < CELLS && *(line += strspn(line, " ")) != 0) {
        size_t length = strcspn(line, "\n");
        const char *gap = strstr(line, "  ");
        if (gap != NULL && (size_t)(gap - line) < length) length = (size_t)(gap - line);
        if (length == 0 || length >= 64) break;
        memcpy(cells[n], line, length);
        cells[n++][length] = 0;
        line += length;
    }
    return n;
}

TEST(the_manual_has_this_table) {
    FILE *file = fopen("amp.h", "r");
    char line[256], cells[CELLS][64];
    int row = -1;
    CHECK(file != NULL);
    if (file == NULL) return;
    while (row <= ROWS && fgets(line, sizeof line, file) != NULL) {
        int n = cells_of(line, cells);
        if (row < 0 && (n != CELLS || strcmp(cells[0], table[0][0]) || strcmp(cells[1], table[0][1]))) continue;
        if (++row > ROWS) { CHECK_MSG(n < CELLS, "one row more: %s", line); break; }
        CHECK_MSG(n == CELLS, "row %d has %d cells: %s", row, n, line);
        for (int i = 0; i < n; i++) CHECK_MSG(!strcmp(cells[i], table[row][i]), "row %d: \"%s\" here is \"%s\"", row, cells[i], table[row][i]);
    }
    fclose(file);
    CHECK_EQ(row, 1 + ROWS);
}

TEST(every_run) {
    run_there(2, 0, STEPS, NULL, NULL, &other);
    check_same(&reference, &other, 0, STEPS, "in another process");
}

TEST(any_threads) {
    static const int threads[4] = {1, 3, 8, 40};
    for (int i = 0; i < 4; i++) {
        CHECK(run_here(AMP_CPU_DEFAULT, threads[i], 0, RESTART, &other));
        check_same(&reference, &other, 0, RESTART, "with other threads");
    }
}

TEST(after_a_restart) {
    run_there(3, 0, RESTART, NULL, state_file, &other);
    check_same(&reference, &other, 0, RESTART, "before the restart");
    run_there(1, RESTART, STEPS, state_file, NULL, &other);
    check_same(&reference, &other, RESTART, STEPS, "after a restart");
    unlink(state_file);
}

static int row_is_same(int row, int path_a, int path_b) {
    int same = 1;
    for (int o = 0; o < N_OPERATIONS; o++)
        if (operations[o].row == row) same = same && !memcmp(of_path[path_a].hash[0][o], of_path[path_b].hash[0][o], sizeof of_path[0].hash[0][o]);
    return same;
}

/* Each path for itself is as good as the best with any number of threads, and agrees with whom the table names. */
TEST(paths_that_agree) {
    int has[PATHS] = {0}, pairs = 0;
    for (int path = AMP_CPU_SCALAR; path < PATHS; path++) {
        has[path] = run_here(path, 1, 0, 1, &of_path[path]);
        if (!has[path]) continue;
        CHECK(run_here(path, 3, 0, 1, &other));
        check_same(&of_path[path], &other, 0, 1, "with three threads");
    }
    CHECK(has[AMP_CPU_SCALAR]);
    for (int a = AMP_CPU_SCALAR; a < PATHS; a++)
        for (int b = a + 1; b < PATHS; b++)
            for (int row = 1; row <= ROWS && has[a] && has[b]; row++, pairs++)
                CHECK_MSG(row_is_same(row, a, b) == (a >= first_alike[row]), "%s: paths %d and %d, the table says %s", table[row][0], a, b, table[row][4]);
    if (pairs == 0) SKIP("one CPU path here");
}

static void one_environment(int path, const trace *expected, const char *what) {
    for (int threads = 1; threads <= 3; threads += 2) {
        CHECK(run_here(path, threads, 0, 1, &other));
        check_same(expected, &other, 0, 1, what);
    }
}

static void each_path(int special, void (*set)(int), int arg, const char *what) {
    make_store(special);
    for (int path = AMP_CPU_SCALAR; path < PATHS; path++) {
        if (!run_here(path, 1, 0, 1, &of_path[path])) continue;
        set(arg);
        one_environment(path, &of_path[path], what);
        fesetenv(FE_DFL_ENV);
    }
    make_store(0);
}

static void set_rounding(int mode) { fesetround(mode); }
TEST(any_rounding) {
    each_path(0, set_rounding, FE_UPWARD, "rounding upward");
    each_path(1, set_rounding, FE_TOWARDZERO, "rounding toward zero");
}

#if defined(__x86_64__)
static void set_flush(int bits) { __builtin_ia32_ldmxcsr(0x1f80u | (unsigned)bits); }
TEST(flushed_or_not) { each_path(1, set_flush, 0x8040, "with subnormal numbers flushed"); }
#else
TEST(flushed_or_not) { SKIP("x86 only"); }
#endif

#if defined(__GLIBC__)
static void set_traps(int which) {
    signal(SIGFPE, on_trap);
    feclearexcept(FE_ALL_EXCEPT);
    CHECK(feenableexcept(which) >= 0);
}
TEST(with_traps) {
    each_path(1, set_traps, FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW, "with traps");
    each_path(1, set_traps, FE_ALL_EXCEPT, "with all traps");
}

/* A pool of the host's whose threads trap, and which finds the traps set whenever it is called; so do logger and allocator. */
static int called[3];
static uint32_t hosts_own;
static void expect_traps(int what) {
    called[what]++;
    CHECK_MSG(environment() == hosts_own, "callback %d finds %x, must find %x", what, environment(), hosts_own);
}
typedef struct pooled { void (*run)(void *arg, int32_t i); void *arg; int32_t i; } pooled;
static void *pool_thread(void *arg) {
    const pooled *p = (const pooled *)arg;
    CHECK(environment() == hosts_own);
    p->run(p->arg, p->i);
    CHECK(environment() == hosts_own);
    return NULL;
}
static void pool_parallel(void *user, int32_t n, void (*run)(void *arg, int32_t i), void *arg) {
    pooled part[8];
    pthread_t threads[8];
    (void)user;
    expect_traps(0);
    for (int32_t i = 1; i < n; i++) {
        part[i].run = run; part[i].arg = arg; part[i].i = i;
        CHECK_EQ(pthread_create(&threads[i], NULL, pool_thread, &part[i]), 0);
    }
    run(arg, 0);
    for (int32_t i = 1; i < n; i++) pthread_join(threads[i], NULL);
}
static void *trap_alloc(void *user, size_t size, size_t align) {
    void *memory = NULL;
    (void)user;
    if (called[1] >= 0) expect_traps(1);
    return posix_memalign(&memory, align < 8 ? 8 : align, size) == 0 ? memory : NULL;
}
static void trap_free(void *user, void *memory, size_t size) { (void)user; (void)size; free(memory); }
static void trap_log(void *user, amp_log_level level, int id, const char *text) { (void)user; (void)level; (void)id; (void)text; expect_traps(2); }

TEST(callbacks_find_the_hosts_environment) {
    enum { N = 192 };
    static float a[N * N], c[2][N * N];
    amp_desc d;
    make_store(1);
    fill(a, AMP_F32, N * N, 3);
    memset(&d, 0, sizeof d);
    d.threads = 3; d.gemm_always = 1; d.dtype = AMP_F32; d.parallel.parallel = pool_parallel;
    d.system.alloc = trap_alloc; d.system.free = trap_free;
    d.logger.write = trap_log; d.logger.level = AMP_LOG_DEBUG;
    memset(called, 0, sizeof called);
    for (int trapping = 1; trapping >= 0; trapping--) {
        if (trapping) { set_traps(FE_ALL_EXCEPT); hosts_own = environment(); }
        else { d.parallel.parallel = NULL; memset(&d.logger, 0, sizeof d.logger); called[1] = -1; }
        CHECK_OK(amp_open(&amp, &d));
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, 16, N, N, 1, a, N, a, N, 0, c[trapping], N));     /* a thin one */
        for (int i = 0; i < 8; i++)
            CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, N, N, N, 1, a, N, a, N, 0, c[trapping], N));
        if (trapping) {
            amp_autocast_desc region;
            memset(&region, 0, sizeof region);
            region.dtype = AMP_F16;
            CHECK_OK(amp_autocast_begin(amp, &region));
            CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, N, N, N, 1, a, N, a, N, 0, c[0], N));
            CHECK_OK(amp_autocast_end(amp));
            CHECK(called[0] > 0 && called[1] > 0 && called[2] > 0);
        }
        amp_close(amp);
        fesetenv(FE_DFL_ENV);
    }
    for (int i = 0; i < 2; i++) one_nan(c[i], AMP_F32, sizeof c[i]);
    CHECK(!memcmp(c[0], c[1], sizeof c[0]));
    make_store(0);
}

/* Flags that were raised before a call stay so, with traps and without. */
TEST(flags_stay) {
    float x = 1e30f, y;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = AMP_F32;
    CHECK_OK(amp_open(&amp, &d));
    for (int traps = 0; traps < 2; traps++) {
        feclearexcept(FE_ALL_EXCEPT);
        feraiseexcept(FE_DIVBYZERO);
        if (traps) CHECK(feenableexcept(FE_OVERFLOW | FE_INVALID) >= 0);
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, 1, 1, 1, 1, &x, 1, &x, 1, 0, &y, 1));
        CHECK(isinf(y) && fetestexcept(FE_DIVBYZERO));
        fesetenv(FE_DFL_ENV);
    }
    amp_close(amp);
}
#else
TEST(with_traps) { SKIP("no feenableexcept here"); }
TEST(callbacks_find_the_hosts_environment) { SKIP("no feenableexcept here"); }
TEST(flags_stay) { SKIP("no feenableexcept here"); }
#endif

int main(int argc, char **argv) {
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0) snprintf(self, sizeof self, "%s", argv[0]);
    ampt.name = "main";
    make_store(0);
    if (argc == 8 && !strcmp(argv[1], "--trace")) return trace_main(argv);
    TEST_BEGIN(argc, argv);
    if (!ampt.list && (mkdtemp(folder) == NULL || !run_here(AMP_CPU_DEFAULT, 2, 0, STEPS, &reference))) return 2;
    snprintf(out, sizeof out, "%s/trace", folder);
    snprintf(state_file, sizeof state_file, "%s/state", folder);
    RUN(the_manual_has_this_table); RUN(every_run); RUN(any_threads); RUN(after_a_restart); RUN(paths_that_agree);
    RUN(any_rounding); RUN(flushed_or_not); RUN(with_traps); RUN(callbacks_find_the_hosts_environment); RUN(flags_stay);
    rmdir(folder);
    return TEST_END();
}
