/* docs_names.h - the declarations that the code between the lines of README.md and the manual needs to compile. */
#include "amp.h"
#include <stdio.h>

static amp_context *amp;
static amp_scaler *scaler;
static amp_optimizer *optimizer, *opt;
static amp_model *model;
static amp_loader *loader;
static amp_state *state;
static amp_desc desc;
static amp_autocast_desc region;
static amp_scaler_desc scaling;
static amp_optimizer_desc adamw;
static amp_cross_entropy_op ce;
static amp_step_result result;
static amp_batch batch;
static amp_param weight, bias, params[8];
static amp_grad_set *set;
static amp_range ranges[8];
static int32_t apply;
static int32_t labels[8];
static float a[64], b[64], c[64], *A = a, *B = b, *C = c, loss, *gradients = a;
static double lr;
static amp_schedule schedule;
static int i;
static int64_t M = 8, N = 8, K = 8, n = 8, rows = 8, cols = 8, classes = 8, n_params = 8, count = 8;
static int step, steps = 1;
static amp_tensor x, y, dy, dx, dx1, dx2, logits;
