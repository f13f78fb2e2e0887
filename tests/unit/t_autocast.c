/* t_autocast.c - tests which dtype operators compute in.  It compares them with PyTorch's tables, and tests regions,
 * threads, overrides, plans, and the cast cache.  The golden data comes from tests/torch/oracle/autocast.py. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "golden.h"
#define AMPT_TRAPS
#include "test.h"
#include "trace.h"
#include <pthread.h>

static amp_context *open_context(amp_dtype dtype, amp_level level, const amp_backend *backend) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    desc.level = level;
    desc.backend = backend;
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}

/* A region of this dtype and policy, everything else inherited. */
static void begin(amp_context *amp, amp_dtype dtype, amp_policy policy) {
    amp_autocast_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    desc.policy = policy;
    CHECK_OK(amp_autocast_begin(amp, &desc));
}
static void begin_island(amp_context *amp) {
    amp_autocast_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.disable = 1;
    CHECK_OK(amp_autocast_begin(amp, &desc));
}
static void end(amp_context *amp) { CHECK_OK(amp_autocast_end(amp)); }

/* What linear computes in now with fp32 operands. */
static amp_dtype linear_now(const amp_context *amp) {
    return amp_autocast_compute(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32);
}

static amp_plan decide(const amp_context *amp, int32_t op, const char *layer, amp_dtype a, amp_dtype b) {
    amp_dtype inputs[2];
    amp_plan plan;
    inputs[0] = a; inputs[1] = b;
    memset(&plan, 0, sizeof plan);
    CHECK_OK(amp_autocast_decide(amp, op, layer, inputs, b ? 2 : 1, &plan));
    return plan;
}

/* ---- The tables */

typedef struct table_case {
    char device[8], op[24], region[8], result[8];
    amp_dtype inputs[2];
    int32_t n, differs;
} table_case;

/* "cuda linear fp32,fp32 bf16 bf16"; 0 at the end. */
static int table_next(FILE *f, table_case *c) {
    char line[128], inputs[32], differs[16] = "", *comma;
    if (fgets(line, sizeof line, f) == NULL) return 0;
    memset(c, 0, sizeof *c);
    CHECK(sscanf(line, "%7s %23s %31s %7s %7s %15s", c->device, c->op, inputs, c->region, c->result, differs) >= 5);
    c->differs = strcmp(differs, "differs") == 0;
    comma = strchr(inputs, ',');
    if (comma != NULL) { *comma = 0; CHECK_OK(amp_dtype_parse(comma + 1, &c->inputs[1])); }
    CHECK_OK(amp_dtype_parse(inputs, &c->inputs[0]));
    c->n = comma != NULL ? 2 : 1;
    return 1;
}

static FILE *table_open(void) {
    FILE *f = fopen(AMPT_GOLDEN "/autocast.txt", "r");
    if (f == NULL) { printf("no %s/autocast.txt (run from the project root)\n", AMPT_GOLDEN); exit(2); }
    return f;
}

static amp_context *open_with_user_ops(void) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    register_user_ops(amp);
    return amp;
}

/* Checks one line; expected: the result in PyTorch's words, or as FUSED has it. */
static void check_case(amp_context *amp, const table_case *c, amp_policy policy, const char *expected) {
    amp_dtype region = AMP_DTYPE_DEFAULT;
    int inside = strcmp(c->region, "none") != 0;
    int32_t op = op_number(c->op);
    amp_plan plan;
    memset(&plan, 0, sizeof plan);
    if (inside) CHECK_OK(amp_dtype_parse(c->region, &region));
    if (inside) begin(amp, region, policy);
    if (strcmp(expected, "error") == 0) {
        if (op == AMP_OP_USER + 4 && inside)
            CHECK_ERR(amp_autocast_decide(amp, op, NULL, c->inputs, c->n, &plan), AMP_ERR_UNSUPPORTED);
    } else {
        CHECK_OK(amp_autocast_decide(amp, op, NULL, c->inputs, c->n, &plan));
        CHECK_MSG(strcmp(amp_dtype_name(plan.result), expected) == 0, "%s %s %s %s,%s in %s: %s, PyTorch has %s",
                  policy == AMP_POLICY_TORCH ? "TORCH" : "FUSED", c->device, c->op, amp_dtype_name(c->inputs[0]),
                  amp_dtype_name(c->inputs[1]), c->region, amp_dtype_name(plan.result), expected);
        CHECK_EQ(plan.rule, inside ? AMP_BY_REGION : AMP_BY_STORAGE);
        CHECK_EQ(amp_autocast_result(amp, op, NULL, c->inputs[0], c->inputs[1]), plan.result);
        CHECK_EQ(amp_autocast_compute(amp, op, NULL, c->inputs[0], c->inputs[1]), plan.compute);
        if (policy == AMP_POLICY_TORCH) CHECK_EQ(plan.compute, plan.result);
    }
    if (inside) end(amp);
}

/* Every line of PyTorch's CUDA table, and of its CPU table where the two agree. */
TEST(torch_policy_is_pytorchs) {
    amp_context *amp = open_with_user_ops();
    FILE *f = table_open();
    table_case c;
    int checked = 0, differ = 0;
    while (table_next(f, &c)) {
        if (c.differs) { CHECK(strcmp(c.device, "cpu") == 0); differ++; continue; }
        check_case(amp, &c, AMP_POLICY_TORCH, c.result);
        checked++;
    }
    CHECK_MSG(checked > 1000 && differ > 0 && differ < 50, "%d lines checked, %d differ", checked, differ);
    fclose(f);
    amp_close(amp);
}

/* FUSED is the same table, but norms and softmax return what they were given, computed in fp32. */
TEST(fused_policy_stores_16_bits) {
    amp_context *amp = open_with_user_ops();
    FILE *f = table_open();
    table_case c;
    while (table_next(f, &c)) {
        int32_t op = op_number(c.op);
        int stores = op == AMP_OP_LAYERNORM || op == AMP_OP_RMSNORM || op == AMP_OP_SOFTMAX;
        if (c.differs) continue;
        check_case(amp, &c, AMP_POLICY_FUSED, stores ? amp_dtype_name(c.inputs[0]) : c.result);
        if (stores && strcmp(c.region, "none") != 0 && c.inputs[0] != AMP_F64) {
            begin(amp, AMP_BF16, AMP_POLICY_FUSED);
            CHECK_EQ(decide(amp, op, NULL, c.inputs[0], AMP_DTYPE_DEFAULT).compute, AMP_F32);
            end(amp);
        }
    }
    fclose(f);
    amp_close(amp);
}

/* fp64 and integers are ignored: they neither decide nor change. */
TEST(fp64_and_integers_are_ignored) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_dtype three[3] = {AMP_I64, AMP_F32, AMP_I32};
    amp_plan plan;
    memset(&plan, 0, sizeof plan);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_LINEAR, NULL, AMP_F64, AMP_F64), AMP_F64);
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, NULL, AMP_F64, AMP_F64), AMP_F64);
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F64), AMP_F64);      /* beside one that could be cast */
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_SOFTMAX, NULL, AMP_F16, AMP_F64), AMP_F64);
    CHECK_OK(amp_autocast_decide(amp, AMP_OP_LINEAR, NULL, three, 3, &plan));
    CHECK_EQ(plan.result, AMP_BF16);
    CHECK_OK(amp_autocast_decide(amp, AMP_OP_ADD, NULL, three, 3, &plan));
    CHECK_EQ(plan.result, AMP_F32);
    end(amp);
    amp_close(amp);
}

/* ---- Regions */

TEST(regions_nest) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_autocast_desc now;
    CHECK_EQ(amp_autocast_active(amp, NULL), 0);
    CHECK_EQ(linear_now(amp), AMP_F32);
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, NULL, AMP_F16, AMP_F16), AMP_F16);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(linear_now(amp), AMP_BF16);
    begin(amp, AMP_F16, AMP_POLICY_TORCH);
    CHECK_EQ(linear_now(amp), AMP_F16);
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_LAYERNORM, NULL, AMP_F16, AMP_F16), AMP_F32);
    begin(amp, AMP_TF32, AMP_POLICY_DEFAULT);
    CHECK_EQ(linear_now(amp), AMP_TF32);
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32), AMP_F32);    /* its storage */
    CHECK_EQ(amp_autocast_active(amp, &now), 1);
    CHECK_EQ(now.dtype, AMP_TF32);
    CHECK_EQ(now.policy, AMP_POLICY_TORCH);         /* inherited from the enclosing region */
    CHECK_EQ(now.mode, AMP_MODE_TRAINING);
    begin_island(amp);
    CHECK_EQ(linear_now(amp), AMP_F32);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, NULL, AMP_F16, AMP_F16).rule, AMP_BY_STORAGE);
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, NULL, AMP_F16, AMP_F16), AMP_F16);
    CHECK_EQ(amp_autocast_active(amp, NULL), 0);
    begin(amp, AMP_BF16, AMP_POLICY_DEFAULT);       /* a region in an island is a region */
    CHECK_EQ(linear_now(amp), AMP_BF16);
    CHECK_EQ(amp_autocast_active(amp, NULL), 1);
    end(amp);
    end(amp);
    CHECK_EQ(linear_now(amp), AMP_TF32);
    end(amp);
    CHECK_EQ(linear_now(amp), AMP_F16);
    end(amp);
    CHECK_EQ(linear_now(amp), AMP_BF16);
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_LAYERNORM, NULL, AMP_F16, AMP_F16), AMP_F16);  /* FUSED again */
    end(amp);
    CHECK_EQ(linear_now(amp), AMP_F32);
    CHECK_EQ(amp_autocast_active(amp, NULL), 0);
    amp_close(amp);
}

/* PyTorch forgets the outer state when one context manager object is entered twice; a stack does not. */
TEST(the_same_desc_may_be_entered_again) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_autocast_desc desc;
    memset(&desc, 0, sizeof desc);
    CHECK_OK(amp_autocast_begin(amp, &desc));
    CHECK_OK(amp_autocast_begin(amp, &desc));
    end(amp);
    CHECK_EQ(linear_now(amp), AMP_BF16);
    end(amp);
    CHECK_EQ(linear_now(amp), AMP_F32);
    amp_close(amp);
}

/* A region without settings goes on with those around it; an island hands them on. */
TEST(dtype_and_cache_are_inherited) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_autocast_desc desc, now;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_F16;
    desc.disable_cache = 1;
    CHECK_OK(amp_autocast_begin(amp, &desc));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(linear_now(amp), AMP_F16);
    begin_island(amp);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(linear_now(amp), AMP_F16);
    CHECK_EQ(amp_autocast_active(amp, &now), 1);
    CHECK_EQ(now.disable_cache, 1);
    begin(amp, AMP_TF32, AMP_POLICY_DEFAULT);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(linear_now(amp), AMP_TF32);
    for (int i = 0; i < 6; i++) end(amp);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(linear_now(amp), AMP_BF16);
    CHECK_EQ(amp_autocast_active(amp, &now), 1);
    CHECK_EQ(now.disable_cache, 0);
    end(amp);
    amp_close(amp);
}

TEST(mode_is_inherited) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_autocast_desc desc, now;
    memset(&desc, 0, sizeof desc);
    desc.mode = AMP_MODE_INFERENCE;
    CHECK_OK(amp_autocast_begin(amp, &desc));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_active(amp, &now), 1);
    CHECK_EQ(now.mode, AMP_MODE_INFERENCE);
    CHECK_EQ(decide(amp, AMP_OP_DROPOUT, NULL, AMP_F32, AMP_DTYPE_DEFAULT).mode, AMP_MODE_INFERENCE);
    end(amp);
    end(amp);
    CHECK_EQ(decide(amp, AMP_OP_DROPOUT, NULL, AMP_F32, AMP_DTYPE_DEFAULT).mode, AMP_MODE_TRAINING);
    amp_close(amp);
}

TEST(two_contexts_keep_apart) {
    amp_context *a = open_context(AMP_BF16, AMP_LEVEL_O1, NULL), *b = open_context(AMP_F16, AMP_LEVEL_O1, NULL);
    CHECK_OK(amp_autocast_begin(a, NULL));
    CHECK_EQ(amp_autocast_active(b, NULL), 0);
    CHECK_EQ(linear_now(b), AMP_F32);
    CHECK_ERR(amp_autocast_end(b), AMP_ERR_STATE);
    CHECK_EQ(linear_now(a), AMP_BF16);              /* still open */
    CHECK_OK(amp_autocast_begin(b, NULL));
    CHECK_EQ(linear_now(a), AMP_BF16);
    CHECK_EQ(linear_now(b), AMP_F16);
    CHECK_ERR(amp_autocast_end(a), AMP_ERR_STATE);  /* the innermost is b's */
    end(b);
    end(a);
    CHECK_ERR(amp_autocast_end(a), AMP_ERR_STATE);
    amp_close(a);
    amp_close(b);
}

TEST(bad_regions_are_refused) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_autocast_desc desc;
    amp_plan plan;
    int depth = 0;
    CHECK_ERR(amp_autocast_end(amp), AMP_ERR_STATE);
    CHECK_ERR(amp_autocast_begin(NULL, NULL), AMP_ERR_NULL);
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_U8;
    CHECK_ERR(amp_autocast_begin(amp, &desc), AMP_ERR_DTYPE);
    desc.dtype = AMP_E4M3;
    CHECK_ERR(amp_autocast_begin(amp, &desc), AMP_ERR_UNSUPPORTED);
    desc.dtype = AMP_DTYPE_DEFAULT;
    desc.policy = (amp_policy)3;
    CHECK_ERR(amp_autocast_begin(amp, &desc), AMP_ERR_RANGE);
    desc.policy = AMP_POLICY_DEFAULT;
    desc.mode = (amp_mode)-1;
    CHECK_ERR(amp_autocast_begin(amp, &desc), AMP_ERR_RANGE);
    CHECK_EQ(amp_autocast_active(amp, NULL), 0);
    while (depth < 100 && amp_autocast_begin(amp, NULL) == AMP_OK) depth++;
    CHECK_EQ(depth, 32);
    CHECK_ERR(amp_autocast_begin(amp, NULL), AMP_ERR_STATE);
    while (depth-- > 0) end(amp);
    CHECK_ERR(amp_autocast_end(amp), AMP_ERR_STATE);
    CHECK_ERR(amp_autocast_decide(amp, 99, NULL, NULL, 0, &plan), AMP_ERR_NAME);
    CHECK_ERR(amp_autocast_decide(amp, AMP_OP_USER, NULL, NULL, 0, &plan), AMP_ERR_NAME);
    CHECK_ERR(amp_autocast_decide(amp, AMP_OP_NONE, NULL, NULL, 0, &plan), AMP_ERR_NAME);
    CHECK_ERR(amp_autocast_decide(NULL, AMP_OP_LINEAR, NULL, NULL, 0, &plan), AMP_ERR_NULL);
    CHECK_ERR(amp_autocast_decide(amp, AMP_OP_LINEAR, NULL, NULL, 1, &plan), AMP_ERR_NULL);
    CHECK_EQ(amp_autocast_compute(amp, 99, NULL, AMP_F32, AMP_F32), AMP_DTYPE_DEFAULT);
    CHECK_EQ(amp_autocast_result(amp, 99, NULL, AMP_F32, AMP_F32), AMP_DTYPE_DEFAULT);
    amp_close(amp);
}

TEST(level_o0_reports_and_does_nothing) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O0, NULL);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_active(amp, NULL), 0);
    CHECK_EQ(linear_now(amp), AMP_F32);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32).rule, AMP_BY_LEVEL);
    end(amp);
    amp_close(amp);
}

TEST(set_dtype_changes_regions_to_come) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_set_dtype(amp, AMP_F16));
    CHECK_EQ(linear_now(amp), AMP_BF16);            /* this one began before */
    end(amp);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(linear_now(amp), AMP_F16);
    end(amp);
    CHECK_ERR(amp_set_dtype(amp, AMP_E5M2), AMP_ERR_UNSUPPORTED);
    CHECK_ERR(amp_set_dtype(amp, AMP_I32), AMP_ERR_DTYPE);
    amp_close(amp);
}

/* ---- Threads */

enum { THREADS = 16, ROUNDS = 50 };

typedef struct visitor { amp_context *amp; pthread_barrier_t *all; int index, wrong; } visitor;

/* Regions of its own, of another dtype than the main thread's, at another depth than its neighbours': all threads
   are inside of theirs when they look. */
static void *visit(void *arg) {
    static const amp_dtype dtypes[3] = {AMP_F16, AMP_TF32, AMP_F32};
    visitor *v = (visitor *)arg;
    amp_dtype mine = dtypes[v->index % 3];
    amp_autocast_desc desc;
    memset(&desc, 0, sizeof desc);
    v->wrong += amp_autocast_active(v->amp, NULL) != 0 || linear_now(v->amp) != AMP_F32;
    v->wrong += amp_autocast_end(v->amp) != AMP_ERR_STATE;
    for (int round = 0; round < ROUNDS; round++) {
        int depth = 1 + (v->index + round) % 31;
        for (int i = 0; i < depth; i++) {
            desc.dtype = i % 2 ? AMP_BF16 : mine;
            v->wrong += amp_autocast_begin(v->amp, &desc) != AMP_OK;
        }
        pthread_barrier_wait(v->all);
        for (int i = depth - 1; i >= 0; i--) {
            v->wrong += linear_now(v->amp) != (i % 2 ? AMP_BF16 : mine);
            v->wrong += amp_autocast_end(v->amp) != AMP_OK;
        }
        pthread_barrier_wait(v->all);
    }
    v->wrong += amp_autocast_active(v->amp, NULL) != 0;
    return NULL;
}

TEST(a_thread_starts_outside) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    pthread_t threads[THREADS];
    visitor visitors[THREADS];
    pthread_barrier_t all;
    CHECK_OK(amp_autocast_begin(amp, NULL));
    if (pthread_barrier_init(&all, NULL, THREADS) != 0) exit(2);
    for (int i = 0; i < THREADS; i++) {
        visitors[i].amp = amp; visitors[i].all = &all; visitors[i].index = i; visitors[i].wrong = 0;
        if (pthread_create(&threads[i], NULL, visit, &visitors[i]) != 0) exit(2);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(visitors[i].wrong, 0);
    }
    pthread_barrier_destroy(&all);
    CHECK_EQ(linear_now(amp), AMP_BF16);
    end(amp);
    amp_close(amp);
}

/* ---- Overrides */

TEST(layers_are_overridden_by_pattern) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    CHECK_OK(amp_layer_override(amp, "blocks.0.*", AMP_F32));
    CHECK_OK(amp_layer_override(amp, "*.head", AMP_F16));
    CHECK_OK(amp_layer_override(amp, "blocks.?.mlp", AMP_TF32));
    CHECK_EQ(amp_autocast_compute(amp, AMP_OP_LINEAR, "x.head", AMP_F32, AMP_F32), AMP_F32);   /* no region */
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.0.attn", AMP_F32, AMP_F32).compute, AMP_F32);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.0.attn", AMP_F32, AMP_F32).rule, AMP_BY_LAYER);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.10.attn", AMP_F32, AMP_F32).compute, AMP_BF16);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.10.attn", AMP_F32, AMP_F32).rule, AMP_BY_REGION);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.0.head", AMP_F32, AMP_F32).compute, AMP_F16);   /* the last wins */
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.0.mlp", AMP_F32, AMP_F32).compute, AMP_TF32);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.10.mlp", AMP_F32, AMP_F32).compute, AMP_BF16);  /* ? is one */
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "head", AMP_F32, AMP_F32).compute, AMP_BF16);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32).compute, AMP_BF16);
    CHECK_EQ(decide(amp, AMP_OP_LAYERNORM, "x.head", AMP_F32, AMP_F32).compute, AMP_F32);        /* norms stay fp32 */
    CHECK_OK(amp_layer_override(amp, "blocks.0.*", AMP_BF16));      /* given again: the last one now */
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.0.head", AMP_F32, AMP_F32).compute, AMP_BF16);
    CHECK_OK(amp_layer_override(amp, "blocks.0.*", AMP_DTYPE_DEFAULT));
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.0.head", AMP_F32, AMP_F32).compute, AMP_F16);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "blocks.0.attn", AMP_F32, AMP_F32).rule, AMP_BY_REGION);
    begin_island(amp);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, "x.head", AMP_F32, AMP_F32).compute, AMP_F32);
    end(amp);
    end(amp);
    CHECK_ERR(amp_layer_override(amp, NULL, AMP_F32), AMP_ERR_NULL);
    CHECK_ERR(amp_layer_override(amp, "x", AMP_I32), AMP_ERR_DTYPE);
    CHECK_ERR(amp_layer_override(amp, "x", AMP_E4M3), AMP_ERR_UNSUPPORTED);
    amp_close(amp);
}

TEST(operators_are_overridden) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_dtype input = AMP_F32;
    amp_plan plan;
    CHECK_OK(amp_operator_override(amp, AMP_OP_SOFTMAX, AMP_CAST_LOWER));
    CHECK_OK(amp_operator_override(amp, AMP_OP_MATMUL, AMP_CAST_FP32));
    CHECK_OK(amp_operator_override(amp, AMP_OP_MSE, AMP_CAST_BANNED));
    CHECK_OK(amp_autocast_decide(amp, AMP_OP_MSE, NULL, &input, 1, &plan));        /* banned in regions only */
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(decide(amp, AMP_OP_SOFTMAX, NULL, AMP_F32, AMP_F32).compute, AMP_BF16);
    CHECK_EQ(decide(amp, AMP_OP_SOFTMAX, NULL, AMP_F32, AMP_F32).rule, AMP_BY_OPERATOR);
    CHECK_EQ(decide(amp, AMP_OP_MATMUL, NULL, AMP_BF16, AMP_BF16).result, AMP_F32);
    CHECK_EQ(decide(amp, AMP_OP_LINEAR, NULL, AMP_F32, AMP_F32).compute, AMP_BF16);
    CHECK_ERR(amp_autocast_decide(amp, AMP_OP_MSE, NULL, &input, 1, &plan), AMP_ERR_UNSUPPORTED);
    CHECK_EQ(amp_autocast_result(amp, AMP_OP_MSE, NULL, AMP_F32, AMP_F32), AMP_DTYPE_DEFAULT);
    begin_island(amp);
    CHECK_OK(amp_autocast_decide(amp, AMP_OP_MSE, NULL, &input, 1, &plan));
    end(amp);
    CHECK_OK(amp_operator_override(amp, AMP_OP_SOFTMAX, AMP_CAST_DEFAULT));
    CHECK_EQ(decide(amp, AMP_OP_SOFTMAX, NULL, AMP_F32, AMP_F32).compute, AMP_F32);
    CHECK_EQ(decide(amp, AMP_OP_SOFTMAX, NULL, AMP_F32, AMP_F32).rule, AMP_BY_REGION);
    end(amp);
    CHECK_ERR(amp_operator_override(amp, AMP_OP_LINEAR, (amp_cast_policy)7), AMP_ERR_RANGE);
    CHECK_ERR(amp_operator_override(amp, 99, AMP_CAST_FP32), AMP_ERR_NAME);
    amp_close(amp);
}

/* What amp_gemm computes in now: 1 + 2^-12 is a number of fp32, not of bf16. */
static amp_dtype gemm_now(amp_context *amp) {
    const float x = 1 + 0x1p-12f, y = 1;
    float z = 0;
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, &x, 1, &y, 1, 0, &z, 1));
    return z > 1 ? AMP_F32 : AMP_BF16;
}

/* amp_gemm remembers what it decided. */
TEST(gemm_decides_anew) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_DEFAULT, NULL), *other = open_context(AMP_F32, AMP_LEVEL_DEFAULT, NULL), *always;
    const float x = 1;
    float z;
    amp_desc desc;
    int i;
    begin(amp, AMP_DTYPE_DEFAULT, AMP_POLICY_DEFAULT);
    for (i = 0; i < 2; i++) {
        CHECK_EQ(gemm_now(amp), AMP_BF16);
        CHECK_EQ(gemm_now(other), AMP_F32);
    }
    begin_island(amp);
    CHECK_EQ(gemm_now(amp), AMP_F32);
    end(amp);
    CHECK_EQ(gemm_now(amp), AMP_BF16);
    CHECK_OK(amp_operator_override(amp, AMP_OP_GEMM, AMP_CAST_FP32));
    CHECK_EQ(gemm_now(amp), AMP_F32);
    CHECK_OK(amp_operator_override(amp, AMP_OP_GEMM, AMP_CAST_BANNED));
    CHECK_ERR(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, &x, 1, &x, 1, 0, &z, 1), AMP_ERR_UNSUPPORTED);
    CHECK_OK(amp_operator_override(amp, AMP_OP_GEMM, AMP_CAST_DEFAULT));
    CHECK_EQ(gemm_now(amp), AMP_BF16);
    CHECK_OK(amp_recompute_begin(amp));
    CHECK_ERR(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, &x, 1, &x, 1, 0, &z, 1), AMP_ERR_STATE);
    CHECK_OK(amp_recompute_end(amp));
    CHECK_EQ(gemm_now(amp), AMP_BF16);
    end(amp);
    CHECK_EQ(gemm_now(amp), AMP_F32);
    amp_close(other);
    amp_close(amp);
    memset(&desc, 0, sizeof desc);
    desc.gemm_always = 1;
    for (i = 0; i < 4; i++) {           /* perhaps where the last one was */
        desc.dtype = i % 2 ? AMP_BF16 : AMP_F32;
        CHECK_OK(amp_open(&always, &desc));
        CHECK_EQ(gemm_now(always), desc.dtype);
        CHECK_OK(amp_set_dtype(always, AMP_BF16));
        CHECK_EQ(gemm_now(always), AMP_BF16);
        CHECK_OK(amp_set_enabled(always, 0));
        CHECK_EQ(gemm_now(always), AMP_F32);
        CHECK_OK(amp_set_enabled(always, 1));
        CHECK_EQ(gemm_now(always), AMP_BF16);
        amp_close(always);
    }
}

TEST(users_add_operators) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL), *other = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_plan plan;
    int32_t op = 0, i;
    CHECK_OK(amp_operator_register(amp, "fused_rope", AMP_CAST_PROMOTE, &op));
    CHECK_EQ(op, AMP_OP_USER);
    CHECK_ERR(amp_operator_register(amp, "fused_rope", AMP_CAST_LOWER, &op), AMP_ERR_NAME);
    CHECK_ERR(amp_operator_register(amp, "linear", AMP_CAST_LOWER, &op), AMP_ERR_NAME);
    CHECK_ERR(amp_operator_register(amp, NULL, AMP_CAST_LOWER, &op), AMP_ERR_NULL);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(decide(amp, AMP_OP_USER, NULL, AMP_BF16, AMP_BF16).compute, AMP_BF16);
    CHECK_EQ(decide(amp, AMP_OP_USER, NULL, AMP_BF16, AMP_F32).compute, AMP_F32);
    CHECK_EQ(decide(amp, AMP_OP_USER, NULL, AMP_F16, AMP_BF16).compute, AMP_F32);   /* PyTorch refuses this mixture */
    end(amp);
    CHECK_ERR(amp_autocast_decide(other, AMP_OP_USER, NULL, NULL, 0, &plan), AMP_ERR_NAME);
    for (i = 1; i < 100; i++) {
        char name[32];
        snprintf(name, sizeof name, "op_%d", i);
        CHECK_OK(amp_operator_register(amp, name, i % 2 ? AMP_CAST_FP32 : AMP_CAST_LOWER, &op));
        CHECK_EQ(op, AMP_OP_USER + i);
    }
    CHECK_OK(amp_autocast_begin(amp, NULL));
    for (i = 1; i < 100; i++)
        CHECK_EQ(decide(amp, AMP_OP_USER + i, NULL, AMP_F32, AMP_F32).compute, i % 2 ? AMP_F32 : AMP_BF16);
    end(amp);
    amp_close(amp);
    amp_close(other);
}

/* ---- Plans: forward records, backward obeys */

enum { ROWS = 5, IN = 19, OUT = 7 };

/* x [ROWS, IN], w [OUT, IN], dy [ROWS, OUT] as in tests/torch/oracle/autocast.py, everything stored in fp32. */
typedef struct product {
    float x[ROWS * IN], w[OUT * IN], dy[ROWS * OUT], y[ROWS * OUT], dx[ROWS * IN], dw[OUT * IN];
} product;

static void product_fill(product *p) {
    memset(p, 0, sizeof *p);
    ampt_uniform(p->x, ROWS * IN, 77, 0, 1, 0);
    ampt_uniform(p->w, OUT * IN, 77, 1, 1, 0);
    ampt_uniform(p->dy, ROWS * OUT, 77, 2, 1, 0);
}

/* |got - golden| / |golden| */
static double off_by(const ampt_golden *g, const char *record, const float *got, int64_t n) {
    int64_t count;
    double *exact = (double *)ampt_golden_read(g, record, 2, &count), off = 0, own = 0;
    CHECK_EQ(count, n);
    for (int64_t i = 0; i < n; i++) {
        off += ((double)got[i] - exact[i]) * ((double)got[i] - exact[i]);
        own += exact[i] * exact[i];
    }
    free(exact);
    return ampt_has_nonfinite(got, n) ? 1e30 : sqrt(off / own);
}

/* The result is the one of this compute dtype, and of no other: rounding the operands otherwise moves it by at least
   a tenth of the coarser unit roundoff, 5e-5 for fp16, where fp32 arithmetic is good for 1e-5. */
static void check_computed_in(const ampt_golden *g, amp_dtype dtype, const char *what, const float *got, int64_t n) {
    static const amp_dtype all[4] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
    for (int i = 0; i < 4; i++) {
        char record[32];
        double off;
        if (all[i] == AMP_TF32 && dtype == AMP_F16) continue;       /* the same significand: almost the same numbers */
        if (all[i] == AMP_F16 && dtype == AMP_TF32) continue;
        snprintf(record, sizeof record, "%s/%s", amp_dtype_name(all[i]), what);
        off = off_by(g, record, got, n);
        CHECK_MSG(all[i] == dtype ? off <= 1e-5 : off > 4e-5, "computed in %s: differs from %s by %.2e",
                  amp_dtype_name(dtype), record, off);
    }
}

static void linear_bind(amp_linear_op *op, amp_param *weight, product *p) {
    memset(op, 0, sizeof *op);
    memset(weight, 0, sizeof *weight);
    weight->name = "layer.weight";
    weight->weight = amp_tensor2(p->w, AMP_F32, OUT, IN);
    weight->grad = amp_tensor2(p->dw, AMP_F32, OUT, IN);
    op->weight = weight;
    op->x = amp_tensor2(p->x, AMP_F32, ROWS, IN);
    op->y = amp_tensor2(p->y, AMP_F32, ROWS, OUT);
    op->dy = amp_tensor2(p->dy, AMP_F32, ROWS, OUT);
    op->dx = amp_tensor2(p->dx, AMP_F32, ROWS, IN);
}

/* Where backward runs: outside, in a region of another dtype, in an island, at level of the same region. */
static void run_backward(amp_context *amp, amp_linear_op *op, int where, amp_dtype other) {
    if (where == 1) begin(amp, other, AMP_POLICY_DEFAULT);
    if (where == 2) begin_island(amp);
    op->weight->grad_live = 0;
    CHECK_OK(amp_linear_backward(amp, op));
    if (where > 0) end(amp);
}

TEST(backward_obeys_the_plan) {
    static const amp_dtype all[4] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
    ampt_golden g = ampt_golden_open("autocast.bin");
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_param weight;
    amp_linear_op op;
    product p;
    product_fill(&p);
    linear_bind(&op, &weight, &p);
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_STATE);        /* forward has not run */
    for (int d = 0; d < 4; d++) {
        begin(amp, all[d], AMP_POLICY_DEFAULT);
        CHECK_OK(amp_linear(amp, &op));
        end(amp);
        CHECK_EQ(op.plan.compute, all[d]);
        check_computed_in(&g, all[d], "y", p.y, ROWS * OUT);
        for (int where = 0; where < 3; where++) {
            memset(p.dx, 0, sizeof p.dx);
            memset(p.dw, 0, sizeof p.dw);
            run_backward(amp, &op, where, d == 3 ? AMP_F32 : AMP_BF16);
            check_computed_in(&g, all[d], "dx", p.dx, ROWS * IN);
            check_computed_in(&g, all[d], "dw", p.dw, OUT * IN);
        }
    }
    CHECK_OK(amp_linear(amp, &op));                 /* outside: the operands' own dtype, wherever backward runs */
    run_backward(amp, &op, 1, AMP_BF16);
    check_computed_in(&g, AMP_F32, "y", p.y, ROWS * OUT);
    check_computed_in(&g, AMP_F32, "dx", p.dx, ROWS * IN);
    amp_close(amp);
    free(g.data);
}

/* The weight's name, or op.layer, is what layer overrides match. */
TEST(operators_obey_layer_overrides) {
    ampt_golden g = ampt_golden_open("autocast.bin");
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_param weight;
    amp_linear_op op;
    product p;
    product_fill(&p);
    linear_bind(&op, &weight, &p);
    CHECK_OK(amp_layer_override(amp, "layer.*", AMP_F32));
    CHECK_OK(amp_layer_override(amp, "half", AMP_F16));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_linear(amp, &op));
    check_computed_in(&g, AMP_F32, "y", p.y, ROWS * OUT);
    op.layer = "half";
    CHECK_OK(amp_linear(amp, &op));
    check_computed_in(&g, AMP_F16, "y", p.y, ROWS * OUT);
    op.layer = "other";
    CHECK_OK(amp_linear(amp, &op));
    check_computed_in(&g, AMP_BF16, "y", p.y, ROWS * OUT);
    end(amp);
    amp_close(amp);
    free(g.data);
}

/* y = x w^T as a host's sgemm call. */
static void sgemm(amp_context *amp, product *p) {
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, ROWS, OUT, IN, 1, p->x, IN, p->w, IN, 0, p->y, OUT));
}

/* matmul, and the BLAS-shaped entry that a host's sgemm becomes. */
TEST(matrix_products_obey_regions) {
    static const amp_dtype all[4] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
    ampt_golden g = ampt_golden_open("autocast.bin");
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_matmul_op op;
    product p;
    product_fill(&p);
    memset(&op, 0, sizeof op);
    op.a = amp_tensor2(p.x, AMP_F32, ROWS, IN);     op.da = amp_tensor2(p.dx, AMP_F32, ROWS, IN);
    op.b = amp_tensor2(p.w, AMP_F32, OUT, IN);      op.db = amp_tensor2(p.dw, AMP_F32, OUT, IN);
    op.y = amp_tensor2(p.y, AMP_F32, ROWS, OUT);    op.dy = amp_tensor2(p.dy, AMP_F32, ROWS, OUT);
    op.trans_b = 1;
    for (int d = 0; d < 4; d++) {
        begin(amp, all[d], AMP_POLICY_DEFAULT);
        CHECK_OK(amp_matmul(amp, &op));
        end(amp);
        check_computed_in(&g, all[d], "y", p.y, ROWS * OUT);
        CHECK_OK(amp_matmul_backward(amp, &op));
        check_computed_in(&g, all[d], "dx", p.dx, ROWS * IN);
        check_computed_in(&g, all[d], "dw", p.dw, OUT * IN);
        memset(p.y, 0, sizeof p.y);
        begin(amp, all[d], AMP_POLICY_DEFAULT);
        sgemm(amp, &p);
        end(amp);
        check_computed_in(&g, all[d], "y", p.y, ROWS * OUT);
    }
    sgemm(amp, &p);
    check_computed_in(&g, AMP_F32, "y", p.y, ROWS * OUT);
    amp_close(amp);
    free(g.data);
}

/* Norms, softmax and activations compute in fp32 in a 16-bit region, under both policies. */
TEST(pointwise_operators_stay_fp32) {
    ampt_golden g = ampt_golden_open("autocast.bin");
    for (int policy = AMP_POLICY_FUSED; policy <= AMP_POLICY_TORCH; policy++) {
        amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
        amp_softmax_op softmax;
        amp_norm_op norm;
        amp_activation_op gelu;
        float mean[ROWS], rstd[ROWS], y[ROWS * IN];
        product p;
        product_fill(&p);
        memset(&softmax, 0, sizeof softmax);
        memset(&norm, 0, sizeof norm);
        memset(&gelu, 0, sizeof gelu);
        softmax.x = norm.x = gelu.x = amp_tensor2(p.x, AMP_F32, ROWS, IN);
        softmax.y = norm.y = gelu.y = amp_tensor2(y, AMP_F32, ROWS, IN);
        norm.mean = mean; norm.rstd = rstd;
        gelu.act = AMP_ACT_GELU;
        begin(amp, AMP_BF16, (amp_policy)policy);
        CHECK_OK(amp_softmax(amp, &softmax));
        CHECK(off_by(&g, "softmax", y, ROWS * IN) <= 1e-5);
        CHECK_OK(amp_layernorm(amp, &norm));
        CHECK(off_by(&g, "layernorm", y, ROWS * IN) <= 1e-5);
        CHECK_OK(amp_activation(amp, &gelu));
        CHECK(off_by(&g, "gelu", y, ROWS * IN) <= 1e-5);
        end(amp);
        amp_close(amp);
    }
    free(g.data);
}

TEST(inference_keeps_nothing_for_a_backward) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    amp_autocast_desc desc;
    amp_param weight;
    amp_linear_op op;
    amp_dropout_op drop;
    product p;
    float y[ROWS * IN], dx[ROWS * IN];
    product_fill(&p);
    linear_bind(&op, &weight, &p);
    memset(&drop, 0, sizeof drop);
    drop.x = amp_tensor2(p.x, AMP_F32, ROWS, IN);
    drop.y = amp_tensor2(y, AMP_F32, ROWS, IN);
    drop.p = 0.5f;
    memset(&desc, 0, sizeof desc);
    desc.mode = AMP_MODE_INFERENCE;
    CHECK_OK(amp_autocast_begin(amp, &desc));
    CHECK_OK(amp_linear(amp, &op));
    CHECK_OK(amp_dropout(amp, &drop));
    end(amp);
    CHECK(memcmp(y, p.x, sizeof y) == 0);
    CHECK_ERR(amp_linear_backward(amp, &op), AMP_ERR_STATE);
    CHECK_OK(amp_dropout(amp, &drop));
    CHECK(memcmp(y, p.x, sizeof y) != 0);
    drop.dy = drop.x;                               /* the same mask again, also where nothing would be dropped */
    drop.dx = amp_tensor2(dx, AMP_F32, ROWS, IN);
    CHECK_OK(amp_autocast_begin(amp, &desc));
    CHECK_OK(amp_dropout_backward(amp, &drop));
    end(amp);
    CHECK(memcmp(y, dx, sizeof y) == 0);
    amp_close(amp);
}

/* ---- The cast cache, seen by a backend whose packed weights are plain casts that are counted */

static struct { int packs, packed_gemms, gemms; } counted;

static size_t counting_pack_size(void *dev, const amp_k_pack *args) {
    (void)dev;
    return (size_t)(args->k * args->n) * (args->compute == AMP_TF32 ? 4 : amp_dtype_size(args->compute));
}
static amp_result counting_pack(void *dev, const amp_k_pack *args, void *packed, void *stream) {
    (void)dev; (void)stream;
    counted.packs++;
    return amp_convert(packed, args->compute, args->b, args->b_dtype, args->k * args->n, NULL, args->new_inf);
}
static amp_result counting_gemm(void *dev, const amp_k_gemm *args, void *stream) {
    amp_k_gemm plain = *args;
    counted.gemms++;
    if (args->packed_b != NULL) {
        counted.packed_gemms++;
        plain.b = args->packed_b;
        plain.b_dtype = args->compute == AMP_TF32 ? AMP_F32 : args->compute;
        plain.packed_b = NULL;
    }
    return amp_cpu()->gemm(dev, &plain, stream);
}

/* A context with that backend and a registered weight of a linear op. */
typedef struct cache_test {
    amp_backend backend;
    amp_context *amp;
    amp_param weight;
    amp_linear_op op;
    product p;
} cache_test;

static void cache_open(cache_test *t, int disable_cache) {
    amp_desc desc;
    t->backend = *amp_cpu();
    t->backend.gemm_pack_size = counting_pack_size;
    t->backend.gemm_pack = counting_pack;
    t->backend.gemm = counting_gemm;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_BF16;
    desc.backend = &t->backend;
    desc.disable_cache = disable_cache;
    CHECK_OK(amp_open(&t->amp, &desc));
    product_fill(&t->p);
    linear_bind(&t->op, &t->weight, &t->p);
    CHECK_OK(amp_param_register(t->amp, &t->weight, 1));
    memset(&counted, 0, sizeof counted);
}
static void cache_close(cache_test *t) {
    amp_param_forget(t->amp, &t->weight, 1);
    amp_close(t->amp);
}
static void use(cache_test *t) { CHECK_OK(amp_linear(t->amp, &t->op)); }
static amp_cache_info cache_info(const amp_context *amp) {
    amp_cache_info info;
    memset(&info, 0, sizeof info);
    CHECK_OK(amp_cast_cache_info(amp, &info));
    return info;
}

/* The rows of PyTorch's own count of casts: twice in a region 1, inner region 1, an island in between 1, no gradient
   wanted 1, cache off none kept.  Where PyTorch casts again (two regions: 2, frozen weight: 2) this cache does not. */
TEST(cache_counts) {
    ampt_golden g = ampt_golden_open("autocast.bin");
    cache_test t;
    cache_open(&t, 0);
    CHECK_OK(amp_autocast_begin(t.amp, NULL));
    use(&t); use(&t);
    CHECK_EQ(counted.packs, 1);
    CHECK_EQ(counted.packed_gemms, 2);
    check_computed_in(&g, AMP_BF16, "y", t.p.y, ROWS * OUT);
    CHECK_OK(amp_autocast_begin(t.amp, NULL));
    use(&t);
    end(t.amp);
    use(&t);
    begin_island(t.amp);
    use(&t);                                        /* fp32: no cast */
    end(t.amp);
    use(&t);
    end(t.amp);
    CHECK_EQ(counted.packs, 1);
    CHECK_EQ(counted.packed_gemms, 5);
    CHECK_OK(amp_autocast_begin(t.amp, NULL));      /* another region, and a frozen weight */
    memset(&t.weight.grad, 0, sizeof t.weight.grad);
    use(&t);
    end(t.amp);
    CHECK_EQ(counted.packs, 1);
    CHECK_EQ(cache_info(t.amp).misses, 1);
    CHECK_EQ(cache_info(t.amp).hits, 5);
    CHECK_EQ(cache_info(t.amp).entries, 1);
    CHECK(cache_info(t.amp).bytes >= IN * OUT * 2);
    amp_cast_cache_clear(t.amp);
    CHECK_EQ(cache_info(t.amp).entries, 0);
    CHECK_EQ(cache_info(t.amp).bytes, 0);
    cache_close(&t);
    free(g.data);
}

/* The CPU's own kernels cast while they multiply: a copy is made when a weight is used again before it changes. */
TEST(cpu_packs_for_the_second_use) {
    cache_test t;
    float first[ROWS * OUT];
    int i;
    cache_open(&t, 0);
    t.backend = *amp_cpu();
    CHECK_OK(amp_autocast_begin(t.amp, NULL));
    for (i = 0; i < 4; i++) {
        use(&t);
        if (i == 0) memcpy(first, t.p.y, sizeof first);
        CHECK(memcmp(first, t.p.y, sizeof first) == 0);
        CHECK_EQ(cache_info(t.amp).entries, i > 0);
        CHECK_EQ(cache_info(t.amp).misses, i > 0);
        CHECK_EQ(cache_info(t.amp).hits, i > 1 ? i - 1 : 0);
    }
    CHECK_OK(amp_linear_backward(t.amp, &t.op));
    CHECK_EQ(cache_info(t.amp).entries, 1);
    CHECK_OK(amp_linear_backward(t.amp, &t.op));
    CHECK_EQ(cache_info(t.amp).entries, 2);
    amp_param_changed(&t.weight);
    use(&t);                                        /* the first use of the new value */
    CHECK_EQ(cache_info(t.amp).misses, 2);
    use(&t);
    CHECK_EQ(cache_info(t.amp).misses, 3);
    end(t.amp);
    cache_close(&t);
}

/* dtype is part of the key: PyTorch returns the outer region's copy here. */
TEST(cache_knows_dtypes_and_uses) {
    ampt_golden g = ampt_golden_open("autocast.bin");
    cache_test t;
    cache_open(&t, 0);
    CHECK_OK(amp_autocast_begin(t.amp, NULL));
    use(&t);
    begin(t.amp, AMP_F16, AMP_POLICY_DEFAULT);
    use(&t);
    check_computed_in(&g, AMP_F16, "y", t.p.y, ROWS * OUT);
    end(t.amp);
    use(&t);
    check_computed_in(&g, AMP_BF16, "y", t.p.y, ROWS * OUT);
    end(t.amp);
    CHECK_EQ(counted.packs, 2);
    CHECK_OK(amp_linear_backward(t.amp, &t.op));    /* packed the other way round for dx */
    CHECK_EQ(counted.packs, 3);
    check_computed_in(&g, AMP_BF16, "dx", t.p.dx, ROWS * IN);
    CHECK_EQ(cache_info(t.amp).entries, 3);
    CHECK_OK(amp_set_dtype(t.amp, AMP_F16));
    CHECK_EQ(cache_info(t.amp).entries, 0);
    amp_param_forget(t.amp, &t.weight, 1);
    CHECK_OK(amp_autocast_begin(t.amp, NULL));
    use(&t);                                        /* not registered: not cached, and still right */
    end(t.amp);
    CHECK_EQ(counted.packs, 3);
    CHECK_EQ(cache_info(t.amp).entries, 0);
    check_computed_in(&g, AMP_F16, "y", t.p.y, ROWS * OUT);
    cache_close(&t);
    free(g.data);
}

/* A changed weight is seen after amp_param_changed, and after an optimizer's step without it. */
TEST(cache_follows_the_weight) {
    cache_test t;
    amp_optimizer *optimizer = NULL;
    amp_optimizer_desc desc;
    float before, after;
    cache_open(&t, 0);
    CHECK_OK(amp_autocast_begin(t.amp, NULL));
    use(&t);
    before = t.p.y[0];
    for (int i = 0; i < OUT * IN; i++) t.p.w[i] *= 2;
    use(&t);
    CHECK(t.p.y[0] == before);                      /* nobody said so: the copy is the old one, as documented */
    amp_param_changed(&t.weight);
    use(&t);
    CHECK(t.p.y[0] == 2 * before);
    CHECK_EQ(counted.packs, 2);
    CHECK_EQ(cache_info(t.amp).entries, 1);         /* the stale copy is gone */
    end(t.amp);
    memset(&desc, 0, sizeof desc);
    desc.kind = AMP_SGD; desc.params = &t.weight; desc.n_params = 1; desc.lr = 0.5f;
    CHECK_OK(amp_optimizer_create(t.amp, &optimizer, &desc));
    CHECK_OK(amp_linear_backward(t.amp, &t.op));
    CHECK_OK(amp_optimizer_step(optimizer, NULL));
    CHECK_OK(amp_autocast_begin(t.amp, NULL));
    use(&t);
    after = t.p.y[0];
    amp_param_changed(&t.weight);
    use(&t);
    end(t.amp);
    CHECK(after != 2 * before && after == t.p.y[0]);
    amp_optimizer_destroy(optimizer);
    cache_close(&t);
}

TEST(cache_can_be_off) {
    ampt_golden g = ampt_golden_open("autocast.bin");
    amp_autocast_desc desc;
    cache_test t;
    memset(&desc, 0, sizeof desc);
    desc.disable_cache = 1;
    for (int by_context = 0; by_context < 2; by_context++) {
        cache_open(&t, by_context);
        CHECK_OK(amp_autocast_begin(t.amp, by_context ? NULL : &desc));
        use(&t); use(&t);
        check_computed_in(&g, AMP_BF16, "y", t.p.y, ROWS * OUT);
        end(t.amp);
        CHECK_EQ(counted.packed_gemms, 0);
        CHECK_EQ(cache_info(t.amp).entries + cache_info(t.amp).hits + cache_info(t.amp).misses, 0);
        cache_close(&t);
    }
    free(g.data);
}

/* With a limit that holds one of three copies, the least recently used one makes room. */
TEST(cache_limit) {
    amp_backend backend = *amp_cpu();
    amp_context *amp = NULL;
    amp_param weights[3];
    amp_linear_op ops[3];
    amp_desc desc;
    product p;
    static const char *const names[3] = {"a", "b", "c"};
    backend.gemm_pack_size = counting_pack_size;
    backend.gemm_pack = counting_pack;
    backend.gemm = counting_gemm;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_BF16; desc.backend = &backend; desc.cache_limit = 2 * IN * OUT * 2 + 64;
    CHECK_OK(amp_open(&amp, &desc));
    product_fill(&p);
    for (int i = 0; i < 3; i++) {
        linear_bind(&ops[i], &weights[i], &p);
        weights[i].name = names[i];
    }
    CHECK_OK(amp_param_register(amp, weights, 3));
    memset(&counted, 0, sizeof counted);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_linear(amp, &ops[0]));
    CHECK_OK(amp_linear(amp, &ops[1]));
    CHECK_OK(amp_linear(amp, &ops[0]));
    CHECK_EQ(counted.packs, 2);
    CHECK_EQ(cache_info(amp).evictions, 0);
    CHECK_OK(amp_linear(amp, &ops[2]));             /* b goes */
    CHECK_OK(amp_linear(amp, &ops[0]));
    CHECK_EQ(counted.packs, 3);
    CHECK_EQ(cache_info(amp).evictions, 1);
    CHECK_OK(amp_linear(amp, &ops[1]));
    CHECK_EQ(counted.packs, 4);
    CHECK(cache_info(amp).bytes <= desc.cache_limit);
    CHECK_EQ(cache_info(amp).limit, desc.cache_limit);
    end(amp);
    amp_param_forget(amp, weights, 3);
    CHECK_EQ(cache_info(amp).entries, 0);
    amp_close(amp);
}

/* A weight used n times: PyTorch adds its n gradients in 16 bits when the cast is cached, and loses the small ones;
   here every contribution is added in fp32.  1 + 64 * 2^-9 = 1.125. */
TEST(shared_weights_add_in_fp32) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    float w = 1, dw = 0, x = 1, y = 0, dy = 1;
    amp_param weight;
    amp_linear_op op;
    memset(&weight, 0, sizeof weight);
    memset(&op, 0, sizeof op);
    weight.name = "w";
    weight.weight = amp_tensor2(&w, AMP_F32, 1, 1);
    weight.grad = amp_tensor2(&dw, AMP_F32, 1, 1);
    op.weight = &weight;
    op.x = amp_tensor2(&x, AMP_F32, 1, 1);
    op.y = amp_tensor2(&y, AMP_F32, 1, 1);
    op.dy = amp_tensor2(&dy, AMP_F32, 1, 1);
    CHECK_OK(amp_param_register(amp, &weight, 1));
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_linear(amp, &op));
    end(amp);
    for (int i = 0; i <= 64; i++) {
        dy = i == 0 ? 1.0f : 1.0f / 512;
        CHECK_OK(amp_linear_backward(amp, &op));
    }
    CHECK(dw == 1.125f);
    amp_param_forget(amp, &weight, 1);
    amp_close(amp);
}

/* ---- Casts for the host's own kernels */

TEST(host_kernels_get_casts) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    float w[4] = {1.0f, 1.00390625f, 1e6f, -70000.0f}, back[4];
    amp_tensor low, again, half, same;
    amp_param weight;
    memset(&weight, 0, sizeof weight);
    weight.name = "w";
    weight.weight = amp_tensor2(w, AMP_F32, 2, 2);
    CHECK_OK(amp_param_register(amp, &weight, 1));
    CHECK_OK(amp_autocast_cast(amp, &weight, AMP_F32, &same));
    CHECK(same.data == w && same.dtype == AMP_F32);
    CHECK_EQ(cache_info(amp).entries, 0);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_OK(amp_autocast_cast(amp, &weight, AMP_BF16, &low));
    CHECK_OK(amp_autocast_cast(amp, &weight, AMP_BF16, &again));
    CHECK(low.data != w && low.data == again.data && low.dtype == AMP_BF16 && low.ndim == 2 && low.shape[1] == 2);
    CHECK_EQ(cache_info(amp).misses, 1);
    CHECK_EQ(cache_info(amp).hits, 1);
    CHECK_EQ(cache_info(amp).new_inf, 0);
    CHECK_OK(amp_convert(back, AMP_F32, low.data, AMP_BF16, 4, NULL, NULL));
    CHECK(back[0] == 1.0f && back[1] == 1.0f && back[2] == 999424.0f && back[3] == -70144.0f);
    CHECK_OK(amp_autocast_cast(amp, &weight, AMP_F16, &half));
    CHECK(half.dtype == AMP_F16 && half.data != low.data);
    CHECK_EQ(cache_info(amp).new_inf, 2);
    CHECK_EQ(cache_info(amp).entries, 2);
    w[0] = 3.0f;
    amp_param_changed(&weight);
    CHECK_OK(amp_autocast_cast(amp, &weight, AMP_BF16, &low));
    CHECK_OK(amp_convert(back, AMP_F32, low.data, AMP_BF16, 4, NULL, NULL));
    CHECK(back[0] == 3.0f);
    CHECK_EQ(cache_info(amp).misses, 3);
    end(amp);
    CHECK_ERR(amp_autocast_cast(amp, &weight, AMP_I32, &low), AMP_ERR_DTYPE);
    CHECK_ERR(amp_autocast_cast(amp, NULL, AMP_BF16, &low), AMP_ERR_NULL);
    CHECK_ERR(amp_autocast_cast(amp, &weight, AMP_BF16, NULL), AMP_ERR_NULL);
    amp_param_forget(amp, &weight, 1);
    CHECK_EQ(cache_info(amp).entries, 0);
    amp_close(amp);
}

/* Without the cache every cast is made anew, so a weight that changed is seen although nobody touched it. */
TEST(host_casts_without_the_cache) {
    amp_context *amp = open_context(AMP_BF16, AMP_LEVEL_O1, NULL);
    float w[2] = {1, 2}, back[2];
    amp_autocast_desc desc;
    amp_tensor low;
    amp_param weight;
    memset(&weight, 0, sizeof weight);
    memset(&desc, 0, sizeof desc);
    desc.disable_cache = 1;
    weight.name = "w";
    weight.weight = amp_tensor1(w, AMP_F32, 2);
    CHECK_OK(amp_param_register(amp, &weight, 1));
    CHECK_OK(amp_autocast_begin(amp, &desc));
    CHECK_OK(amp_autocast_cast(amp, &weight, AMP_BF16, &low));
    w[1] = 5;
    CHECK_OK(amp_autocast_cast(amp, &weight, AMP_BF16, &low));
    CHECK_OK(amp_convert(back, AMP_F32, low.data, AMP_BF16, 2, NULL, NULL));
    CHECK(back[0] == 1 && back[1] == 5);
    end(amp);
    amp_param_forget(amp, &weight, 1);
    amp_close(amp);
}

/* ---- Patterns of layers that match nothing: one warning, once that can be known, with the nearest parameter's name */

static char warned[8][300];
static int n_warned;
static void keep_warnings(void *user, amp_log_level level, int id, const char *text) {
    (void)user;
    if (level == AMP_LOG_WARNING && id == 1108) snprintf(warned[n_warned++ % 8], sizeof warned[0], "%s", text);
}
static amp_context *open_told(const char *layers) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_BF16; desc.threads = 1; desc.layers = layers; desc.logger.write = keep_warnings;
    n_warned = 0;
    memset(warned, 0, sizeof warned);
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}
static void run_layers(amp_context *amp, const char *layer, const char *other) {
    CHECK_OK(amp_autocast_begin(amp, NULL));
    (void)decide(amp, AMP_OP_LINEAR, layer, AMP_F32, AMP_F32);
    begin_island(amp);
    end(amp);
    if (other != NULL) (void)decide(amp, AMP_OP_ATTENTION, other, AMP_F32, AMP_F32);
    end(amp);
}

TEST(layers_that_match_nothing) {
    static float w[2][4];
    static amp_settings s;
    amp_param p[2];
    amp_context *amp;
    memset(p, 0, sizeof p);
    for (int i = 0; i < 2; i++) p[i].weight = amp_tensor2(w[i], AMP_F32, 2, 2);
    p[0].name = "h.0.fc.weight"; p[1].name = "head.weight";
    for (int way = 0; way < 3; way++) {     /* by the desc before parameters are there, by the call after, by settings while it runs */
        amp = open_told(way == 0 ? "h.0.fc.wieght fp32, head.* fp32" : NULL);
        CHECK_OK(amp_param_register(amp, p, 2));
        if (way == 1) { CHECK_OK(amp_layer_override(amp, "h.0.fc.wieght", AMP_F32)); CHECK_OK(amp_layer_override(amp, "head.*", AMP_F32)); }
        if (way == 2) {
            run_layers(amp, "h.0.fc.weight", NULL);
            memset(&s, 0, sizeof s);
            CHECK_OK(amp_settings_set(&s, "layers", "h.0.fc.wieght fp32, head.* fp32"));
            CHECK_OK(amp_settings_apply(&s, amp, NULL, NULL, NULL));
        }
        CHECK_OK(amp_autocast_begin(amp, NULL));    /* nothing ran in it */
        end(amp);
        CHECK_EQ(n_warned, 0);
        run_layers(amp, "h.0.fc.weight", NULL);
        CHECK_EQ(n_warned, 1);
        CHECK_MSG(strstr(warned[0], "\"h.0.fc.wieght\"; the nearest parameter is h.0.fc.weight") != NULL, "%s", warned[0]);
        run_layers(amp, "h.0.fc.weight", NULL);
        amp_close(amp);
        CHECK_EQ(n_warned, 1);
    }
    amp = open_told("attn* fp32, * bf16, *.weight fp32, none tf32");       /* .layer of an operator; rules behind others */
    CHECK_OK(amp_param_register(amp, p, 2));
    CHECK_OK(amp_layer_override(amp, "none", AMP_DTYPE_DEFAULT));
    run_layers(amp, "h.0.fc.weight", "attn.0");
    run_layers(amp, "h.0.fc.weight", NULL);
    amp_param_forget(amp, p, 2);
    amp_close(amp);
    CHECK_EQ(n_warned, 0);
    amp = open_told("nothing fp32");        /* no parameters: when it closes */
    run_layers(amp, "h.0.fc.weight", NULL);
    CHECK_EQ(n_warned, 0);
    amp_close(amp);
    CHECK(n_warned == 1 && strstr(warned[0], "no parameter is registered") != NULL);
    amp = open_told("nothing fp32");        /* no region: when it closes, and the parameters may be gone by then */
    CHECK_OK(amp_param_register(amp, p, 2));
    amp_param_forget(amp, p, 2);
    amp_close(amp);
    CHECK(n_warned == 1 && strstr(warned[0], "the nearest parameter is h") != NULL);
    amp = open_told("nothing fp32");        /* a context that nothing used */
    amp_close(amp);
    CHECK_EQ(n_warned, 0);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(layers_that_match_nothing);
    RUN(torch_policy_is_pytorchs);
    RUN(fused_policy_stores_16_bits);
    RUN(fp64_and_integers_are_ignored);
    RUN(regions_nest);
    RUN(the_same_desc_may_be_entered_again);
    RUN(dtype_and_cache_are_inherited);
    RUN(mode_is_inherited);
    RUN(two_contexts_keep_apart);
    RUN(bad_regions_are_refused);
    RUN(level_o0_reports_and_does_nothing);
    RUN(set_dtype_changes_regions_to_come);
    RUN(a_thread_starts_outside);
    RUN(layers_are_overridden_by_pattern);
    RUN(operators_are_overridden);
    RUN(gemm_decides_anew);
    RUN(users_add_operators);
    RUN(backward_obeys_the_plan);
    RUN(operators_obey_layer_overrides);
    RUN(matrix_products_obey_regions);
    RUN(pointwise_operators_stay_fp32);
    RUN(inference_keeps_nothing_for_a_backward);
    RUN(cache_counts);
    RUN(cpu_packs_for_the_second_use);
    RUN(cache_knows_dtypes_and_uses);
    RUN(cache_follows_the_weight);
    RUN(cache_can_be_off);
    RUN(cache_limit);
    RUN(shared_weights_add_in_fp32);
    RUN(host_kernels_get_casts);
    RUN(host_casts_without_the_cache);
    return TEST_END();
}
