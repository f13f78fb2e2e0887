/* profile.h - where the time of a GPT-2's training step goes: measured by operator, and what the machine's own speed
 * would take for the operations and bytes. */
#ifndef EXAMPLE_PROFILE_H
#define EXAMPLE_PROFILE_H

#include "gpt.h"
#include "metrics.h"
#include "peak.h"

/* Where the time of a training step goes.  pass 0: forward, 1: backward. */
enum { PROFILE_LOADER, PROFILE_EMBEDDING, PROFILE_NORM, PROFILE_LINEAR, PROFILE_ATTENTION, PROFILE_DROPOUT,
       PROFILE_HEAD, PROFILE_LOSS, PROFILE_RECOMPUTE, PROFILE_OPTIMIZER, PROFILE_ROWS };
typedef struct profile {
    double seconds[PROFILE_ROWS][2], all;
    int64_t steps;
} profile;

/* Adds the time since `began` to a row; waits for the device. */
static inline amp_result profile_add(profile *p, amp_context *amp, int row, int pass, double began) {
    EX_TRY(amp_sync(amp));
    p->seconds[row][pass] += ex_seconds() - began;
    return AMP_OK;
}

/* Adds the times of the tape's last forward (pass 0) or backward (pass 1).  head: the name of the head's weight. */
static inline void profile_tape(profile *p, const amp_tape *tape, int pass, const char *head) {
    static const struct { const char *op; int row; } rows[] = {
        {"embedding", PROFILE_EMBEDDING}, {"linear", PROFILE_LINEAR}, {"activation", PROFILE_LINEAR},
        {"attention", PROFILE_ATTENTION}, {"dropout", PROFILE_DROPOUT}, {"linear_cross_entropy", PROFILE_HEAD},
        {"cross_entropy", PROFILE_LOSS}, {NULL, PROFILE_NORM}};
    amp_tape_node_info node;
    int64_t i;
    int k, row;
    for (i = 0; amp_tape_node(tape, i, &node) == AMP_OK; i++) {
        for (k = 0; rows[k].op != NULL && strcmp(rows[k].op, node.op) != 0; k++) {}
        row = rows[k].row;
        if (row == PROFILE_LINEAR && node.layer != NULL && strcmp(node.layer, head) == 0) row = PROFILE_HEAD;
        p->seconds[row][pass] += node.seconds[pass];
        if (pass == 1) p->seconds[PROFILE_RECOMPUTE][1] += node.seconds[2];
    }
}

/* A row's floating-point operations in one forward pass of batch x seq tokens; backward takes twice as many in linear
   layers, and 2.5 times in attention, which computes its scores again. */
static inline double gpt_flops(const gpt *g, int row) {
    const gpt_config *c = &g->config;
    double rows = (double)(c->batch * c->seq), C = (double)c->channels, T = (double)c->seq;
    if (row == PROFILE_LINEAR) return 2 * rows * 12 * C * C * (double)c->layers;
    if (row == PROFILE_HEAD) return 2 * rows * C * (double)c->vocab;
    if (row == PROFILE_ATTENTION) return 4 * rows * (T + 1) / 2 * C * (double)c->layers;    /* causal: half the pairs */
    return 0;
}

/* The least bytes that a row's calls move in a pass (0: forward, 1: backward): each tensor read once by each call that
   needs it, and written once.  The optimizer's are those of amp_step, from amp_optimizer_bytes. */
typedef struct gpt_traffic { double bytes, calls; } gpt_traffic;

/* What the head's product of the last pass computed in. */
static inline amp_dtype gpt_compute(const gpt *g) {
    amp_tape_node_info node;
    int64_t i;
    for (i = 0; amp_tape_node(g->tape, i, &node) == AMP_OK; i++)
        if (strncmp(node.op, "linear", 6) == 0 && node.layer == g->head->name) return node.compute;
    return AMP_F32;
}

/* compute: gpt_compute's. */
static inline gpt_traffic gpt_bytes(const gpt *g, int row, int pass, amp_dtype compute) {
    const gpt_config *c = &g->config;
    double rows = (double)(c->batch * c->seq), C = (double)c->channels, n = rows * C, L = (double)c->layers;
    double V = (double)c->vocab;
    double stream = (double)amp_dtype_size(gpt_dtype(c, GPT_STREAM));
    double branch = (double)amp_dtype_size(gpt_dtype(c, GPT_BRANCH));
    double norm = (double)amp_dtype_size(gpt_dtype(c, GPT_NORM)), mlp = (double)amp_dtype_size(gpt_dtype(c, GPT_MLP));
    double heads = (double)amp_dtype_size(gpt_dtype(c, GPT_ATTENTION));
    double logits = (double)amp_dtype_size(gpt_dtype(c, GPT_LOGITS));
    double grad = (double)amp_dtype_size(g->params[0].grad.dtype);
    double stored = (double)amp_dtype_size(g->params[0].weight.dtype);
    double weight = (double)amp_dtype_size(compute);     /* as products read it */
    double low = stream == 4 && weight == 2 ? 2 : stream;               /* of the branches' gradients */
    gpt_traffic t = {0, 0};
    switch (row) {
        case PROFILE_EMBEDDING:                 /* a row of the table that occurs again is read and written once */
            t.calls = 1;
            t.bytes = n * stream + (rows < V ? rows : V) * C * (pass ? 2 * grad : stored);
            break;
        case PROFILE_NORM:                      /* all but the first add a branch to the stream */
            t.calls = 2 * L + 1;
            t.bytes = pass ? n * ((2 * L + 1) * (norm + 2 * stream) + 2 * L * (stream + (low < stream ? low : 0)))
                           : n * ((2 * L + 1) * (stream + norm) + 2 * L * (branch + stream));
            break;
        case PROFILE_LINEAR:
            t.calls = 4 * L;
            t.bytes = pass ? L * (n * (4 * norm + 5 * heads + 16 * mlp + 2 * low) + 12 * C * C * (weight + grad))
                           : L * (n * (2 * norm + 4 * heads + 12 * mlp + 2 * branch) + 12 * C * C * weight);
            break;
        case PROFILE_ATTENTION: t.calls = L; t.bytes = L * n * heads * (pass ? 8 : 4); break;
        case PROFILE_DROPOUT:
            t.calls = c->dropout > 0 ? 2 * L + 1 : 0;
            t.bytes = t.calls * 2 * n * branch;
            break;
        case PROFILE_HEAD:
            t.calls = 1;
            t.bytes = n * norm * (pass ? 2 : 1) + V * C * (weight + (pass ? grad : 0)) + rows * V * logits;
            break;
        case PROFILE_LOSS: t.calls = pass ? 0 : 1; t.bytes = pass ? 0 : 2 * rows * V * logits; break;
        default: break;
    }
    return t;
}
static inline gpt_traffic profile_optimizer(const amp_parameter_bytes *b) {
    gpt_traffic t;
    t.calls = 1;
    t.bytes = (double)b->parameters * (b->gradient + 2 * (b->weight + b->master + b->moments));
    return t;
}

/* ---- The table */

/* What it is of. */
typedef struct profile_run {
    const profile *profile;
    const gpt *model;
    const amp_optimizer *optimizer;
    amp_dtype dtype;
    int64_t accumulation;
    metrics_line *metrics; amp_monitor *monitor;
} profile_run;

/* GFLOP/s of amp_gemm on 1024 x 1024 matrices in the run's precision: the best of five. */
static inline amp_result profile_gemm(const profile_run *r, double *rate) {
    enum { SIZE = 1024 };
    const int64_t bytes = (int64_t)SIZE * SIZE * (int64_t)sizeof(float);
    void *data = NULL;
    float *host = (float *)malloc((size_t)bytes * 2);
    amp_result result = host != NULL ? AMP_OK : ex_fail(AMP_ERR_MEMORY, "no memory for the peak");
    int i;
    *rate = 0;
    if (result == AMP_OK) ex_normal(host, 2 * SIZE * SIZE, 1, 1, 1.0f);
    if (result == AMP_OK) result = amp_alloc(r->model->amp, &data, 3 * bytes);
    if (result == AMP_OK) result = amp_copy(r->model->amp, data, host, 2 * bytes, AMP_COPY_TO_DEVICE);
    for (i = 0; i < 6 && result == AMP_OK; i++) {       /* the first is a warm-up */
        float *a = (float *)data, *b = a + SIZE * SIZE, *c = b + SIZE * SIZE;
        double began, seconds;
        amp_sync(r->model->amp);
        began = ex_seconds();
        EX_TRY(amp_autocast_begin(r->model->amp, NULL));
        result = amp_gemm(r->model->amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, SIZE, SIZE, SIZE, 1, a, SIZE, b,
                          SIZE, 0,
                          c, SIZE);
        EX_TRY(amp_autocast_end(r->model->amp));
        if (result == AMP_OK) result = amp_sync(r->model->amp);
        seconds = ex_seconds() - began;
        if (i > 0 && 2e-9 * SIZE * SIZE * SIZE / seconds > *rate) *rate = 2e-9 * SIZE * SIZE * SIZE / seconds;
    }
    amp_free(r->model->amp, data);
    free(host);
    return result;
}

/* This CPU's peak and copies in the run's precision; rate 0 on a device. */
static inline amp_result profile_machine(const profile_run *r, peak_machine *machine) {
    amp_desc desc;
    EX_TRY(amp_query(r->model->amp, &desc));
    *machine = peak_measure(desc.backend->host_visible ? desc.cpu_path : AMP_CPU_SCALAR, r->dtype, desc.threads);
    return AMP_OK;
}

/* One row of the table, of all steps.  flops: of forward and backward, 0 for none; floor: seconds, 0: unknown. */
typedef struct profile_row { const char *name; double seconds[2], flops[2], floor; } profile_row;

static inline void profile_print_row(const profile_run *r, const profile_row *row) {
    double steps = (double)r->profile->steps, both = row->seconds[0] + row->seconds[1], rate;
    printf("  %-16s %10.3f %10.3f %7.1f%%", row->name, 1e3 * row->seconds[0] / steps, 1e3 * row->seconds[1] / steps,
           100 * both / r->profile->all);
    metrics_begin(r->metrics->file, "profile");
    metrics_text(r->metrics->file, "operator", row->name);
    metrics_number(r->metrics->file, "forward_ms", 1e3 * row->seconds[0] / steps);
    metrics_number(r->metrics->file, "backward_ms", 1e3 * row->seconds[1] / steps);
    metrics_number(r->metrics->file, "share", both / r->profile->all);
    if (row->flops[0] > 0 && row->seconds[0] > 0 && row->seconds[1] > 0) {
        rate = 1e-9 * (row->flops[0] + row->flops[1]) / both;
        printf(" %10.1f %10.1f", 1e-9 * row->flops[0] / row->seconds[0], 1e-9 * row->flops[1] / row->seconds[1]);
        metrics_number(r->metrics->file, "gflops", rate);
    } else if (row->floor > 0) printf(" %10s %10s", "", "");
    if (row->floor > 0) {
        printf(" %10.3f %7.1f%%", 1e3 * row->floor / steps, 100 * row->floor / both);
        metrics_number(r->metrics->file, "floor_ms", 1e3 * row->floor / steps);
        metrics_number(r->metrics->file, "of_floor", row->floor / both);
    }
    metrics_line_end(r->metrics, r->monitor);
    printf("\n");
}

/* A row's operations and floor, of all steps. */
static inline amp_result profile_work(const profile_run *r, const peak_machine *machine, int row, profile_row *out) {
    double times = (double)r->profile->steps * (double)r->accumulation;
    amp_parameter_bytes bytes;
    int pass;
    EX_TRY(amp_optimizer_bytes(r->optimizer, &bytes));
    for (pass = 0; pass < 2; pass++) {
        double flops = gpt_flops(r->model, row) * (pass == 0 ? 1 : row == PROFILE_ATTENTION ? 2.5 : 2);
        gpt_traffic t = gpt_bytes(r->model, row, pass, gpt_compute(r->model));
        out->seconds[pass] = r->profile->seconds[row][pass];
        out->flops[pass] = flops * times;
        out->floor += times * peak_floor(machine, flops, t.bytes, t.calls);
    }
    if (row == PROFILE_OPTIMIZER) {
        gpt_traffic t = profile_optimizer(&bytes);
        out->floor = (double)r->profile->steps * peak_floor(machine, 0, t.bytes, t.calls);
    }
    return AMP_OK;
}

static inline amp_result profile_print(const profile_run *r) {
    static const char *const names[PROFILE_ROWS] = {"loader",  "embedding", "layernorm",     "linear",   "attention",
                                                    "dropout", "lm_head",   "cross-entropy", "recompute", "optimizer"};
    profile_row rest, furthest;
    double gemm, lost = 0;
    peak_machine machine;
    int i;
    memset(&rest, 0, sizeof rest);
    memset(&furthest, 0, sizeof furthest);
    rest.name = "other";
    rest.seconds[0] = r->profile->all;
    EX_TRY(profile_machine(r, &machine));
    EX_TRY(profile_gemm(r, &gemm));
    printf("\nProfile: %lld steps of %.3f ms%s\n", (long long)r->profile->steps,
           1e3 * r->profile->all / (double)r->profile->steps, r->profile->steps > 1 ? ", without the first" : "");
    printf("  %-16s %10s %10s %8s %10s %10s %10s %8s\n", "operator", "forward ms", "backward", "of step",
           "GFLOP/s", "backward", "floor ms", "share");
    for (i = 0; i < PROFILE_ROWS; i++) {
        profile_row row;
        double both = r->profile->seconds[i][0] + r->profile->seconds[i][1];
        rest.seconds[0] -= both;
        if ((i == PROFILE_DROPOUT &&
             r->model->config.dropout <= 0) || (i == PROFILE_RECOMPUTE && !r->model->config.recompute) ||
            (i == PROFILE_LOSS && r->model->config.fused_loss))           /* its time is the head's */
            continue;
        memset(&row, 0, sizeof row);
        row.name = names[i];
        EX_TRY(profile_work(r, &machine, i, &row));
        profile_print_row(r, &row);
        if (row.floor > 0 && both - row.floor > lost) { lost = both - row.floor; furthest = row; }
    }
    profile_print_row(r, &rest);
    if (furthest.name != NULL)
        printf("  furthest from its floor: %s, %.3f ms per step above it\n", furthest.name,
               1e3 * lost / (double)r->profile->steps);
    if (machine.rate > 0)
        printf("  floor: the %.1f GFLOP/s of %s, nothing else done, then a copy of as many bytes, on %d threads;\n"
               "         what is still in a cache can be faster\n", machine.rate, machine.loop.name, machine.threads);
    printf("  amp_gemm reached %.1f GFLOP/s here on 1024 x 1024 x 1024 in %s\n"
           "  linear: with bias and GELU; cross-entropy: with its gradient; optimizer: check, clipping and update\n",
           gemm, amp_dtype_name(r->dtype));
    return AMP_OK;
}

#endif
