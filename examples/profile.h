/* profile.h - where the time of a GPT-2's training step goes: measured by operator, and what the machine's own speed
 * would take for the operations and bytes. */
#ifndef EXAMPLE_PROFILE_H
#define EXAMPLE_PROFILE_H

#include "gpt.h"

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

/* EX_TRY(call), timed if there is a profile. */
#define TIMED(p, amp, row, pass, call) do { \
        double timed_began = (p) != NULL ? ex_seconds() : 0; \
        EX_TRY(call); \
        if ((p) != NULL) EX_TRY(profile_add(p, amp, row, pass, timed_began)); \
    } while (0)

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
static inline gpt_traffic optimizer_traffic(const amp_parameter_bytes *b) {
    gpt_traffic t;
    t.calls = 1;
    t.bytes = (double)b->parameters * (b->gradient + 2 * (b->weight + b->master + b->moments));
    return t;
}

#endif
