/* gpt_block_ggml.c - the block of examples/gpt.h with ggml, for training.  It has no cache of keys and values, which ggml's
 * own examples have, and no dropout, which ggml lacks. */
#include "ggml.h"
#include <math.h>

typedef struct layer { struct ggml_tensor *ln_1[2], *attn[2], *proj[2], *ln_2[2], *fc[2], *out[2]; } layer;

static struct ggml_tensor *linear(struct ggml_context *c, struct ggml_tensor *x, struct ggml_tensor *const w[2]) {
    return ggml_add(c, ggml_mul_mat(c, w[0], x), w[1]);
}
static struct ggml_tensor *norm(struct ggml_context *c, struct ggml_tensor *x, struct ggml_tensor *const w[2]) {
    return ggml_add(c, ggml_mul(c, ggml_norm(c, x, 1e-5f), w[0]), w[1]);
}
/* Third `part` of qkv [3 channels, seq, batch] as [dim, seq, heads, batch]. */
static struct ggml_tensor *part(struct ggml_context *c, struct ggml_tensor *qkv, int64_t i, int64_t heads) {
    int64_t channels = qkv->ne[0] / 3, dim = channels / heads;
    struct ggml_tensor *x = ggml_view_4d(c, qkv, dim, heads, qkv->ne[1], qkv->ne[2], (size_t)dim * sizeof(float), qkv->nb[1],
                                         qkv->nb[2], (size_t)(i * channels) * sizeof(float));
    return ggml_permute(c, x, 0, 2, 1, 3);
}
struct ggml_tensor *block(struct ggml_context *c, struct ggml_tensor *x, const layer *l, int64_t heads) {
    struct ggml_tensor *qkv = linear(c, norm(c, x, l->ln_1), l->attn), *q = part(c, qkv, 0, heads), *scores, *y;
    scores = ggml_mul_mat(c, ggml_cont(c, part(c, qkv, 1, heads)), ggml_cont(c, q));
    scores = ggml_diag_mask_inf(c, ggml_scale(c, scores, 1 / sqrtf((float)q->ne[0])), 0);
    y = ggml_mul_mat(c, ggml_cont(c, ggml_transpose(c, part(c, qkv, 2, heads))), ggml_soft_max(c, scores));
    y = ggml_cont_3d(c, ggml_permute(c, y, 0, 2, 1, 3), x->ne[0], x->ne[1], x->ne[2]);
    x = ggml_add(c, x, linear(c, y, l->proj));
    return ggml_add(c, x, linear(c, ggml_gelu(c, linear(c, norm(c, x, l->ln_2), l->fc)), l->out));
}
