/* t_traps.c - tests the known traps of loss scaling and of weights in few bits, and lists the test of each trap.
 * The table also has the needs of C programs that adopt mixed precision.  Most tests are in other files, and this file has
 * those that no other file had.  tests/house.sh checks that every test named here exists and runs.  All of them also run
 * with an amp.h that is compiled with -Ofast, and linked so.
 *
 *   Rounding and formats
 *     NaN becomes 0 where random bits are added    t_traps.nan_survives_stochastic_rounding t_numbers.stochastic_special
 *       to it before it is cut                     t_optimizer.stochastic_rounding_of_special_weights
 *     NaN becomes 0 or infinite where a master     t_numbers.split_and_join t_optimizer.remainders_of_every_pattern
 *       is split, finite ones become infinite      t_optimizer.remainders_are_fp32_masters_bit_for_bit
 *     a saturating cast to fp8 hides infinity      t_traps.fp8_casts_keep_infinities_in_sight t_numbers.saturation
 *     a maximum that passes over NaN hides it      t_tensor_stats.infinities_and_nan t_attention.softmax_of_special_values
 *                                                  t_attention.seen_nan_spoils_its_rows_only
 *                                                  t_kernels.cross_entropy_special_rows t_traps.what_a_check_reports
 *     small updates are lost, or biased            t_traps.drift_of_20000_updates t_numbers.stochastic_unbiased
 *                                                  t_optimizer.stochastic_rounding_is_unbiased_where_nearest_stalls
 *     second moments in bf16 never shrink          t_optimizer.bf16_moments_follow_fp32_ones
 *     moments go through the weights' format       t_optimizer.sixteen_bit_gradients_and_masters
 *
 *   The scale
 *     it reaches 0 or infinity                     t_traps.no_step_at_an_unusable_scale t_scaler.presets_at_their_floor
 *                                                  t_scaler.guard_skips_where_torch_steps_with_nan
 *                                                  t_scaler.presets_at_their_ceiling
 *     its inverse is subnormal, which is 0 where   t_traps.no_step_at_an_unusable_scale t_scaler.settings_are_checked
 *       subnormal numbers are flushed              t_traps.the_largest_scale_is_exact
 *     alternating overflows are forgiven for ever  t_scaler.rate_rule_ends_livelock t_scaler.presets_behave_as_compared
 *     an overflow in the step that would grow it   t_traps.an_overflow_when_growth_is_due
 *     one with hysteresis left just before growth  t_scaler.hysteresis_is_refilled_on_growth
 *                                                  t_traps.an_overflow_when_growth_is_due
 *     an interval of n grows after n + 1 updates   t_scaler.presets_behave_as_compared t_scaler.presets_follow_their_rules
 *     ranks find different overflows               t_ranks.an_overflow_on_one_rank_skips_on_all
 *                                                  t_ranks.ranks_without_gradients_take_part
 *     gradients are unscaled twice                 t_scaler.every_cell_of_the_stage_table
 *
 *   Steps
 *     a skipped step counts, or corrects the bias  t_optimizer.a_skip_leaves_everything_bit_for_bit
 *                                                  t_optimizer.a_skip_leaves_no_trace
 *     it is not known whether a step was skipped   t_optimizer.outcomes_come_at_a_fixed_lag
 *     clipping sees scaled gradients               t_traps.clipping_sees_unscaled_gradients t_scaler.apply_and_rescale
 *                                                  t_scaler.check_finds_the_first_bad_range_and_the_norm
 *     squares of finite gradients overflow fp32    t_traps.what_a_check_reports
 *     no tensors, tensors without elements         t_traps.nothing_to_do_is_no_error t_traps.tensors_without_elements
 *                                                  t_scaler.every_cell_of_the_stage_table
 *     2^31 elements and more                       t_hostile.more_elements_than_32_bits_count
 *     a resumed run rounds with other numbers      t_optimizer.resume_is_bit_identical
 *                                                  t_optimizer.stochastic_rounding_takes_the_words_it_says
 *     a resumed run scales otherwise               t_scaler.save_and_load_at_every_point
 *
 *   Programs in C
 *      1 -Ofast folds isfinite and isnan           t_numbers.is_finite t_numbers.count_nonfinite t_numbers.flush_to_zero
 *      2 a gradient buffer is the momentum too     t_traps.momentum_in_the_gradient_buffer t_scaler.apply_and_rescale
 *      3 gradients are negated; there are none to  t_traps.a_negated_gradient t_traps.a_fused_update_without_gradients
 *        keep: the scaler takes any ranges         t_scaler.check_finds_the_first_bad_range_and_the_norm
 *      4 products in several threads at once       t_traps.products_in_several_threads t_gemm.four_host_threads
 *                                                  t_context.several_threads_share_a_context adopt.sh
 *      5 C += with any leading dimensions, and     t_traps.products_of_every_form t_gemm.shapes t_gemm.epilogues
 *        small ones at no cost                     t_gemm.dtype_mixes t_traps.small_products_start_no_threads adopt.sh
 *      6 nothing is aligned                        t_traps.slices_at_odd_places t_numbers.pairs t_gemm.shapes
 *                                                  t_scaler.unscale_kernel_is_torchs_bit_for_bit
 *      7 no -march: instructions chosen as it runs t_traps.instructions_are_chosen_at_run_time
 *      8 fp64, rounded to bf16 once                t_numbers.f64_golden t_scaler.apply_and_rescale
 *                                                  t_tensor_stats.counts t_traps.a_fused_update_without_gradients
 *      9 fp16 overflows in inputs and weights      t_traps.fp16_overflow_is_reported_by_name t_gemm.pack_counts_new_inf
 *                                                  t_tensor_stats.ranges t_verify.overflow
 *     10 losses are reported unscaled              t_operators.cross_entropy_seed_scales_the_gradient_only
 *                                                  t_traps.losses_are_never_scaled
 *     11 few lines to adopt it; in fp32, with the  adopt.sh t_traps.fp32_with_the_hosts_own_product
 *        host's own product, not a bit changes */
#define _POSIX_C_SOURCE 200809L
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "golden.h"
#include <pthread.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

static uint32_t bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static float of_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
static const uint32_t infinity = 0x7f800000;

/* Subnormal numbers are kept, or flushed to zero as a program linked with -Ofast finds them. */
static void flush_subnormals(int flush) {
#if defined(__SSE__)
    _mm_setcsr(flush ? _mm_getcsr() | 0x8040u : _mm_getcsr() & ~0x8040u);
#else
    (void)flush;
#endif
}

static amp_cpu_path best_path(void) {
    amp_machine machine;
    return amp_machine_probe(&machine) == AMP_OK ? machine.cpu.path : AMP_CPU_SCALAR;
}

static amp_context *open_context(amp_cpu_path path, int threads, amp_level level, amp_dtype dtype) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.cpu_path = path;
    d.threads = threads;
    d.level = level;
    d.dtype = dtype;
    d.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}
static amp_context *open_default(void) { return open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT, AMP_DTYPE_DEFAULT); }

static amp_scaler *make_scaler(amp_context *amp, amp_scaler_preset preset, float init, int32_t interval) {
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = preset;
    d.init_scale = init;
    d.growth_interval = interval;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    return s;
}

static amp_range range_of(const char *name, void *data, int64_t n, amp_dtype dtype) {
    amp_range r;
    memset(&r, 0, sizeof r);
    r.name = name; r.data = data; r.count = n; r.dtype = dtype;
    return r;
}
static amp_grad_set *make_set(amp_context *amp, const amp_range *ranges, int64_t n, double clip) {
    amp_grad_set *set = NULL;
    amp_grad_set_desc d;
    memset(&d, 0, sizeof d);
    d.ranges = ranges; d.n_ranges = n; d.clip_norm = clip;
    CHECK_OK(amp_grad_set_create(amp, &set, &d));
    return set;
}
static amp_grad_stats found_by(amp_scaler *s, amp_grad_set *set, amp_check_mode mode) {
    amp_grad_stats f;
    memset(&f, 0, sizeof f);
    CHECK_OK(amp_scaler_check(s, set, mode));
    CHECK_OK(amp_grad_set_stats(set, &f));
    return f;
}

static amp_param make_param(const char *name, void *w, amp_dtype weight, void *g, amp_dtype grad, int64_t n) {
    amp_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.weight = amp_tensor1(w, weight, n);
    p.grad = amp_tensor1(g, grad, n);
    return p;
}
static amp_optimizer *make_optimizer(amp_context *amp, amp_optimizer_kind kind, amp_param *params, int64_t n, double lr, double clip) {
    amp_optimizer *o = NULL;
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind; d.params = params; d.n_params = n; d.lr = lr; d.clip_norm = clip; d.result_lag = AMP_LAG_NONE;
    CHECK_OK(amp_optimizer_create(amp, &o, &d));
    return o;
}

/* ---- Rounding and formats */

/* Every NaN with every word.  The plain way, which adds 16 random bits and cuts, makes 65535 of 65536 into 0. */
TEST(nan_survives_stochastic_rounding) {
    enum { N = 70000 };
    static const uint32_t nans[5] = {0x7fffffff, 0xffffffff, 0x7f800001, 0xff812345, 0x7fc00000};
    static float x[N];
    static uint16_t y[N];
    amp_convert_desc d;
    uint32_t r;
    int64_t i, zeros = 0, lost = 0;
    int k, half;
    for (r = 0; r < 65536; r++) {
        zeros += ((nans[0] + r) >> 16 & 0x7fff) == 0;
        for (k = 0; k < 5; k++) {
            float nan = of_bits(nans[k]);
            uint32_t word = r << 16 | r;
            lost += (amp_bf16_stochastic(nan, word, 0) & 0x7fff) <= 0x7f80 || (amp_f16_stochastic(nan, word, 0) & 0x7fff) <= 0x7c00;
            lost += (amp_bf16_stochastic(nan, word, 1) & 0x7fff) <= 0x7f80 || (amp_f16_stochastic(nan, word, 1) & 0x7fff) <= 0x7c00;
            lost += (amp_e4m3_stochastic(nan, word, 0) & 0x7f) != 0x7f || (amp_e5m2_stochastic(nan, word, 0) & 0x7f) <= 0x7c;
        }
    }
    CHECK_EQ(zeros, 65535);
    CHECK_EQ(lost, 0);
    memset(&d, 0, sizeof d);
    d.rounding = AMP_ROUND_STOCHASTIC;
    d.seed = 9;
    for (k = 0; k < 6; k++) for (half = 0; half < 2; half++) {
        uint16_t top = half ? 0x7c00 : 0x7f80;
        for (i = 0; i < N; i++) x[i] = of_bits(k < 5 ? nans[k] : infinity);
        CHECK_OK(amp_convert(y, half ? AMP_F16 : AMP_BF16, x, AMP_F32, N, &d, NULL));
        for (lost = 0, i = 0; i < N; i++) lost += k < 5 ? (y[i] & 0x7fff) <= top : y[i] != top;
        CHECK_EQ(lost, 0);
    }
}

/* Infinity and what becomes infinite are still to be seen behind a cast to fp8, which saturates only when it is told to;
   then they are to be seen before it, and NaN on both sides. */
TEST(fp8_casts_keep_infinities_in_sight) {
    static const uint32_t bad[4] = {0x7f800000, 0xff800000, 0x7fc00000, 0x49742400};     /* inf, -inf, NaN, 10^6 */
    static const amp_dtype formats[2] = {AMP_E4M3, AMP_E5M2};
    amp_context *amp = open_default();
    amp_scaler *s = make_scaler(amp, AMP_SCALER_DEFAULT, 1, 0);
    float g[40], back[40];
    uint8_t low[40];
    amp_range before = range_of("before", g, 40, AMP_F32), after = range_of("after", back, 40, AMP_F32);
    amp_grad_set *set = make_set(amp, &before, 1, 0), *behind = make_set(amp, &after, 1, 0);
    amp_convert_desc d;
    int format, kind, saturate, i;
    memset(&d, 0, sizeof d);
    for (format = 0; format < 2; format++) for (kind = 0; kind < 4; kind++) for (saturate = 0; saturate < 2; saturate++) {
        int64_t new_inf = -1, first = -1;
        int hidden = saturate && kind != 2;
        for (i = 0; i < 40; i++) g[i] = 0.5f;
        g[33] = of_bits(bad[kind]);
        d.saturate = saturate;
        CHECK_OK(amp_convert(low, formats[format], g, AMP_F32, 40, &d, &new_inf));
        CHECK_OK(amp_convert(back, AMP_F32, low, formats[format], 40, NULL, NULL));
        CHECK_EQ(new_inf, kind == 3 && !saturate);
        CHECK_EQ(amp_count_nonfinite(low, formats[format], 40, &first), !hidden);
        CHECK_EQ(first, hidden ? -1 : 33);
        CHECK_EQ(found_by(s, behind, AMP_CHECK_READ).found_inf, !hidden);
        CHECK_EQ(found_by(s, set, AMP_CHECK_READ).found_inf, kind != 3);
        CHECK_OK(amp_scaler_update(s));
        CHECK_OK(amp_scaler_set_scale(s, 1));
    }
    amp_grad_set_destroy(set);
    amp_grad_set_destroy(behind);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* ---- Drift: a weight of 1 and 20000 equal updates, in each storage

   The columns of the reference: what the exact sum, bf16 rounded to nearest, rounded stochastically, with a bf16 term of
   what was lost (Kahan's), bf16 with 16 bits of remainder, and fp32 come to; with as many decimals as it gives. */
enum { DRIFTS = 5, UPDATES = 20000, WALKS = 67, STORAGES = 4 };
static const struct { double d, exact, nearest, stochastic, kahan, remainder, fp32; int places[4]; } drifts[DRIFTS] = {
    {1e-2, 201, 4.0, 194, 198.3, 200.97, 200.97, {1, 1, 2, 2}},
    {1e-3, 21, 1.0, 20.9, 20.76, 21.000, 21.000, {1, 2, 3, 3}},
    {1e-4, 3, 1.0, 2.83, 2.997, 2.999, 2.999, {1, 3, 3, 3}},
    {1e-5, 1.2, 1.0, 1.203, 1.004, 1.2003, 1.2003, {1, 3, 4, 4}},
    {1e-6, 1.02, 1.0, 1.008, 1.0005, 1.0191, 1.0191, {1, 4, 4, 4}}};
static const amp_master_kind storages[STORAGES] = {AMP_MASTER_NONE, AMP_MASTER_STOCHASTIC, AMP_MASTER_REMAINDER, AMP_MASTER_F32};
static const char *const storage_names[STORAGES] = {"nearest", "stochastic", "remainder", "fp32"};

/* Whether x, written with so many decimals, is what the reference gives. */
static int is_written(double x, double reference, int places) { return fabs(x - reference) <= 0.5 * pow(10, -places) + 1e-12; }

typedef struct drift {
    amp_optimizer *o;
    amp_param p[STORAGES * DRIFTS];
    char names[STORAGES * DRIFTS][16];
    uint16_t w[STORAGES * DRIFTS][WALKS];
    float g[DRIFTS][WALKS];
    double variance[DRIFTS];        /* at most that of a sum of stochastic roundings */
} drift;

static void drift_start(drift *x, amp_context *amp) {
    amp_param_group groups[STORAGES];
    amp_optimizer_desc d;
    char match[STORAGES][16];
    int i, k;
    memset(x, 0, sizeof *x);
    memset(groups, 0, sizeof groups);
    memset(&d, 0, sizeof d);
    for (i = 0; i < STORAGES * DRIFTS; i++) {
        snprintf(x->names[i], sizeof x->names[i], "%s.%d", storage_names[i / DRIFTS], i % DRIFTS);
        for (k = 0; k < WALKS; k++) { x->w[i][k] = amp_bf16_from_f32(1, 0); x->g[i % DRIFTS][k] = -(float)drifts[i % DRIFTS].d; }
        x->p[i] = make_param(x->names[i], x->w[i], AMP_BF16, x->g[i % DRIFTS], AMP_F32, WALKS);
    }
    for (i = 0; i < STORAGES; i++) {
        snprintf(match[i], sizeof match[i], "%s.*", storage_names[i]);
        groups[i].match = match[i];
        groups[i].master = storages[i];
    }
    d.kind = AMP_SGD; d.params = x->p; d.n_params = STORAGES * DRIFTS; d.lr = 1; d.groups = groups; d.n_groups = STORAGES; d.seed = 1;
    CHECK_OK(amp_optimizer_create(amp, &x->o, &d));
}

/* The distance of bf16 numbers at x. */
static double bf16_step(double x) { int e; (void)frexp(x, &e); return ldexp(1, e - 8); }

/* A number d / u of the way between neighbours u apart is rounded with variance d (u - d), or less where d is more than a
   step; u is that at the largest of the walks. */
static void drift_run(drift *x) {
    int step, i, k;
    for (step = 0; step < UPDATES; step++) {
        for (i = 0; i < STORAGES * DRIFTS; i++) x->p[i].grad_live = 1;
        for (i = 0; i < DRIFTS; i++) {
            double largest = 1, u, d = drifts[i].d;
            for (k = 0; k < WALKS; k++) largest = fmax(largest, (double)amp_f32_from_bf16(x->w[DRIFTS + i][k]));
            u = bf16_step(largest + d);
            x->variance[i] += d < u / 2 ? d * (u - d) : u * u / 4;
        }
        CHECK_OK(amp_step(x->o, NULL));
    }
}

/* The mean of n walks is off by more than 5 s / sqrt(n) once in two million seeds, one of them by more than 4 s once in
   16000; the reference is one. */
static void drift_check_stochastic(const drift *x, int i, int path) {
    double sum = 0, s = sqrt(x->variance[i]), exact = drifts[i].exact, rounded = 0.5 * pow(10, i == 0 ? 0 : i == 1 ? -1 : i == 2 ? -2 : -3);
    int k;
    for (k = 0; k < WALKS; k++) sum += (double)amp_f32_from_bf16(x->w[DRIFTS + i][k]);
    CHECK_MSG(fabs(sum / WALKS - exact) <= 5 * s / sqrt(WALKS),
              "path %d, d %g: mean %g, must be %g within %g", path, drifts[i].d, sum / WALKS, exact, 5 * s / sqrt(WALKS));
    CHECK_MSG(fabs(drifts[i].stochastic - exact) <= 4 * s + rounded,
              "path %d, d %g: reference %g, %g allowed", path, drifts[i].d, drifts[i].stochastic, 4 * s);
    CHECK_MSG(fabs(sum / WALKS - exact) < fabs(drifts[i].nearest - exact) / 2, "path %d, d %g: no better than to nearest", path, drifts[i].d);
}

static void drift_check(const drift *x, amp_state *state, int path) {
    float master[2][WALKS];
    char key[32];
    int i, k, storage;
    for (i = 0; i < DRIFTS; i++) {
        double nearest = (double)amp_f32_from_bf16(x->w[i][0]);
        CHECK(is_written(1 + UPDATES * drifts[i].d, drifts[i].exact, 4));
        CHECK_MSG(is_written(nearest, drifts[i].nearest, drifts[i].places[0]), "path %d, d %g: nearest %g", path, drifts[i].d, nearest);
        drift_check_stochastic(x, i, path);
        for (storage = 0; storage < 2; storage++) {
            snprintf(key, sizeof key, "o.master.%d", (2 + storage) * DRIFTS + i);
            CHECK_OK(amp_state_get(state, key, AMP_F32, master[storage], WALKS));
        }
        CHECK_MSG(is_written((double)master[0][0], drifts[i].remainder, drifts[i].places[2]),
                  "path %d, d %g: remainder %.6f", path, drifts[i].d, (double)master[0][0]);
        CHECK_MSG(is_written((double)master[1][0], drifts[i].fp32, drifts[i].places[3]),
                  "path %d, d %g: fp32 %.6f", path, drifts[i].d, (double)master[1][0]);
        CHECK(memcmp(master[0], master[1], sizeof master[0]) == 0);
        for (k = 1; k < WALKS; k++) CHECK(x->w[i][k] == x->w[i][0] && bits(master[0][k]) == bits(master[0][0]));
    }
}

/* Kahan's sum is no storage of the library's; its roundings are. */
static double kahan(float d) {
    float w = 1, lost = 0;
    int step;
    for (step = 0; step < UPDATES; step++) {
        float before = w;
        lost = amp_f32_from_bf16(amp_bf16_from_f32(lost + d, 0));
        w = amp_f32_from_bf16(amp_bf16_from_f32(w + lost, 0));
        lost = amp_f32_from_bf16(amp_bf16_from_f32(lost + (before - w), 0));
    }
    return (double)w + (double)lost;
}

TEST(drift_of_20000_updates) {
    static drift x;
    int path, i;
    for (path = AMP_CPU_SCALAR; path <= (int)best_path(); path = AMPT_NEXT_PATH(path)) {
        amp_context *amp = open_context((amp_cpu_path)path, 1, AMP_LEVEL_O2, AMP_DTYPE_DEFAULT);
        amp_state *state = NULL;
        drift_start(&x, amp);
        drift_run(&x);
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_optimizer_save(x.o, state, "o"));
        drift_check(&x, state, path);
        amp_state_destroy(state);
        amp_optimizer_destroy(x.o);
        amp_close(amp);
    }
    for (i = 0; i < DRIFTS; i++)
        CHECK_MSG(is_written(kahan((float)drifts[i].d), drifts[i].kahan, drifts[i].places[1]),
                  "d %g: Kahan %.6f", drifts[i].d, kahan((float)drifts[i].d));
}

/* ---- The scale */

static amp_scaler *scaler_at(amp_context *amp, amp_scaler_preset preset, float init, double growth, double backoff) {
    amp_scaler *s = NULL;
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = preset; d.init_scale = init; d.growth_factor = growth; d.backoff_factor = backoff; d.growth_interval = 1;
    CHECK_OK(amp_scaler_create(amp, &s, &d));
    return s;
}

/* Steps with a gradient of 1 while the scale is `scale`: a guarded one may not move the weight, nor count as applied. */
static void check_unusable(amp_context *amp, amp_scaler *s, uint32_t scale, int flush) {
    float w = 3, g = 1;
    amp_param p = make_param("w", &w, AMP_F32, &g, AMP_F32, 1);
    amp_optimizer *o = make_optimizer(amp, AMP_SGD, &p, 1, 1, 0);
    amp_k_scaler state;
    amp_step_result out;
    CHECK_OK(amp_scaler_get(s, &state));
    CHECK_MSG(bits(state.scale) == scale, "scale %08x, must be %08x, flush %d", bits(state.scale), scale, flush);
    p.grad_live = 1;
    CHECK_OK(amp_optimizer_step(o, s));
    CHECK_EQ(amp_step_result_next(o, &out), 1);
    CHECK_MSG(w == 3 && out.applied == 0, "scale %08x, flush %d: w = %g", scale, flush, (double)w);
    CHECK(out.first_bad == NULL);
    CHECK_OK(amp_scaler_update(s));
    amp_optimizer_destroy(o);
}

/* 2^127, infinity, a subnormal number and 0, whether the program flushes subnormal numbers or not: the inverses of the first
   and third are not normal, those of the others are 0 and infinity, and gradients of 0 look as sound as any. */
TEST(no_step_at_an_unusable_scale) {
    static const amp_scaler_preset open_above[4] = {AMP_SCALER_MEGATRON, AMP_SCALER_DEEPSPEED, AMP_SCALER_DEEPSPEED_FUSED, AMP_SCALER_FAIRSEQ};
    amp_context *amp = open_default();
    float g = 1;
    amp_range range = range_of("g", &g, 1, AMP_F32);
    amp_grad_set *set = make_set(amp, &range, 1, 0);
    int flush, i;
    for (flush = 0; flush < 2; flush++) {
        amp_scaler *s;
        flush_subnormals(flush);
        for (i = 0; i < 8; i++) {
            s = scaler_at(amp, open_above[i % 4], ldexpf(1, 126), i < 4 ? 2 : 4, 0.5);
            if (open_above[i % 4] == AMP_SCALER_DEEPSPEED_FUSED) { (void)found_by(s, set, AMP_CHECK_READ); CHECK_OK(amp_scaler_update(s)); }
            (void)found_by(s, set, AMP_CHECK_READ);
            CHECK_OK(amp_scaler_update(s));
            check_unusable(amp, s, i < 4 ? 0x7f000000 : infinity, flush);
            amp_scaler_destroy(s);
        }
        for (i = 0; i < 2; i++) {
            s = scaler_at(amp, AMP_SCALER_APEX, 1, 2, i ? 1e-50 : ldexp(1, -130));
            g = of_bits(infinity);
            (void)found_by(s, set, AMP_CHECK_READ);
            CHECK_OK(amp_scaler_update(s));
            g = 1;
            check_unusable(amp, s, i ? 0 : 1u << 19, flush);
            amp_scaler_destroy(s);
        }
    }
    flush_subnormals(0);
    amp_grad_set_destroy(set);
    amp_close(amp);
}

/* At the default's ceiling of 2^126 the inverse is normal: gradients come back bit for bit, flushed or not. */
TEST(the_largest_scale_is_exact) {
    amp_context *amp = open_default();
    float g[41];
    amp_range range = range_of("g", g, 41, AMP_F32);
    amp_grad_set *set = make_set(amp, &range, 1, 0);
    int flush, n, i;
    for (flush = 0; flush < 2; flush++) {
        amp_scaler *s = make_scaler(amp, AMP_SCALER_DEFAULT, 1, 1);
        flush_subnormals(flush);
        for (i = 0; i < 41; i++) g[i] = 1;
        for (n = 0; n < 200; n++) { (void)found_by(s, set, AMP_CHECK_READ); CHECK_OK(amp_scaler_update(s)); }
        CHECK(amp_scaler_scale(s) == ldexpf(1, 126));
        for (i = 0; i < 41; i++) g[i] = ldexpf(1 + (float)i / 64, 126 - 3 * i);
        CHECK_EQ(found_by(s, set, AMP_CHECK_UNSCALE).found_inf, 0);
        for (i = 0; i < 41; i++) CHECK_MSG(g[i] == ldexpf(1 + (float)i / 64, -3 * i), "%d: %g", i, (double)g[i]);
        amp_scaler_destroy(s);
    }
    flush_subnormals(0);
    amp_grad_set_destroy(set);
    amp_close(amp);
}

/* Three clean updates of four, then an overflow: the scale does not grow, and the count starts again. */
TEST(an_overflow_when_growth_is_due) {
    static const struct { float scale; int clean; } want[10] = {
        {512, 4}, {512, 4}, {512, 4}, {1024, 4}, {1024, 4}, {512, 5}, {512, 4}, {512, 2}, {512, 5}, {512, 4}};
    amp_context *amp = open_default();
    float g;
    amp_range range = range_of("g", &g, 1, AMP_F32);
    amp_grad_set *set = make_set(amp, &range, 1, 0);
    int preset, n;
    for (preset = AMP_SCALER_DEFAULT; preset <= AMP_SCALER_KERAS; preset++) {
        amp_scaler *s = make_scaler(amp, (amp_scaler_preset)preset, 1024, 4);
        amp_k_scaler state;
        float before;
        for (n = 0; n < 4; n++) {
            g = n < 3 ? 1 : of_bits(infinity);
            CHECK_EQ(found_by(s, set, AMP_CHECK_READ).found_inf, n == 3);
            CHECK_OK(amp_scaler_update(s));
        }
        CHECK_OK(amp_scaler_get(s, &state));
        CHECK_MSG(state.scale == want[preset].scale && state.growth_tracker == 0,
                  "preset %d: scale %g, tracker %d", preset, (double)state.scale, state.growth_tracker);
        for (before = state.scale, g = 1, n = 0; amp_scaler_scale(s) == before && n < 10; n++) {
            (void)found_by(s, set, AMP_CHECK_READ);
            CHECK_OK(amp_scaler_update(s));
        }
        CHECK_MSG(n == want[preset].clean && amp_scaler_scale(s) == 2 * before, "preset %d grows after %d", preset, n);
        amp_scaler_destroy(s);
    }
    amp_grad_set_destroy(set);
    amp_close(amp);
}

/* ---- Steps */

/* Ten steps with clipping, in fp32, from gradients times a scale that is a power of two: the same bits at every scale. */
TEST(clipping_sees_unscaled_gradients) {
    enum { N = 77 };
    static float w[3][N], g[3][N];
    static const float scales[3] = {1, 32768, 1048576};
    amp_context *amp = open_default();
    amp_step_result out[3];
    amp_param p[3];
    amp_optimizer *o[3];
    amp_scaler *s[3];
    int k, step, i;
    for (k = 0; k < 3; k++) {
        ampt_uniform(w[k], N, 3, 0, 1, 0);
        p[k] = make_param("w", w[k], AMP_F32, g[k], AMP_F32, N);
        o[k] = make_optimizer(amp, AMP_ADAMW, &p[k], 1, 0.01, 0.5);
        s[k] = make_scaler(amp, AMP_SCALER_DEFAULT, scales[k], 0);
    }
    for (step = 0; step < 10; step++)
        for (k = 0; k < 3; k++) {
            ampt_uniform(g[k], N, 4, (uint32_t)step, step % 2 ? 1.0f : 0.01f, 0);
            for (i = 0; i < N; i++) g[k][i] *= scales[k];
            p[k].grad_live = 1;
            CHECK_OK(amp_step(o[k], s[k]));
            CHECK_EQ(amp_step_result_next(o[k], &out[k]), 1);
            CHECK(out[k].applied && bits(out[k].norm) == bits(out[0].norm) && bits(out[k].clip_coef) == bits(out[0].clip_coef));
            CHECK(step % 2 ? out[k].clip_coef < 1 : out[k].clip_coef == 1);
            CHECK(memcmp(w[k], w[0], sizeof w[0]) == 0);
        }
    for (k = 0; k < 3; k++) { amp_optimizer_destroy(o[k]); amp_scaler_destroy(s[k]); }
    amp_close(amp);
}

/* Finite gradients whose squares fp32 cannot hold are no overflow, and have a norm; NaN and infinity are one, and have none. */
TEST(what_a_check_reports) {
    static const float sizes[4] = {1e20f, 1e30f, 3e38f, 1e-30f};
    amp_context *amp = open_default();
    amp_scaler *s = make_scaler(amp, AMP_SCALER_DEFAULT, 65536, 0);
    float g[23];
    uint16_t h[23];
    amp_range ranges[2];
    amp_grad_set *set;
    int k, i;
    ranges[0] = range_of("g", g, 23, AMP_F32);
    ranges[1] = range_of("h", h, 23, AMP_BF16);
    set = make_set(amp, ranges, 2, 1);
    for (k = 0; k < 4; k++) {
        double sum = 0, norm;
        amp_grad_stats f;
        for (i = 0; i < 23; i++) {
            g[i] = sizes[k];
            h[i] = amp_bf16_from_f32(-sizes[k], 1);
            sum += (double)g[i] * (double)g[i] + (double)amp_f32_from_bf16(h[i]) * (double)amp_f32_from_bf16(h[i]);
        }
        norm = sqrt(sum) / 65536;
        f = found_by(s, set, AMP_CHECK_READ);
        /* 46 squares and sums in fp64, and one rounding to fp32 */
        CHECK_MSG(f.found_inf == 0 && fabs((double)f.norm - norm) <= norm * (ldexp(1, -24) + 100 * ldexp(1, -53)),
                  "%g: norm %g, must be %g", (double)sizes[k], (double)f.norm, norm);
        CHECK(k == 3 ? f.clip_coef == 1 : fabs((double)f.clip_coef * norm - 1) <= 4 * ldexp(1, -24));
        CHECK_EQ(amp_grad_set_device(set)->skip, 0);
        CHECK_OK(amp_scaler_update(s));
    }
    for (k = 0; k < 4; k++) {
        amp_grad_stats f;
        g[7] = k == 0 ? of_bits(infinity) : k == 1 ? of_bits(0x7fc00000) : 1;
        h[11] = k == 2 ? 0xff80 : k == 3 ? 0xffff : 0;
        f = found_by(s, set, AMP_CHECK_READ);
        CHECK(f.found_inf == 1 && f.first_bad_index == k / 2 && strcmp(f.first_bad, k < 2 ? "g" : "h") == 0 && !amp_is_finite_f32(&f.norm));
        CHECK_EQ(amp_grad_set_device(set)->skip, 1);
        CHECK_OK(amp_scaler_update(s));
    }
    amp_grad_set_destroy(set);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* An optimizer without parameters, one whose parameters are frozen, and one none of which has a gradient in this step. */
TEST(nothing_to_do_is_no_error) {
    amp_context *amp = open_default();
    amp_scaler *s = make_scaler(amp, AMP_SCALER_DEFAULT, 4, 1);
    float w[3] = {1, 2, 3}, g[3] = {4, 4, 4};
    amp_param p = make_param("w", w, AMP_F32, g, AMP_F32, 3);
    int kind, step;
    for (kind = 0; kind < 3; kind++) {
        amp_optimizer *o = NULL;
        amp_optimizer_desc d;
        amp_state *state = NULL;
        amp_step_result out;
        amp_grad_stats f;
        memset(&d, 0, sizeof d);
        d.params = &p; d.n_params = kind > 0; d.result_lag = AMP_LAG_NONE; d.clip_norm = 1;
        p.grad.data = kind == 1 ? NULL : g;
        CHECK_OK(amp_optimizer_create(amp, &o, &d));
        for (step = 1; step <= 3; step++) {
            float scale = amp_scaler_scale(s);
            p.grad_live = 0;
            CHECK_OK(amp_step(o, s));
            CHECK(amp_scaler_scale(s) == 2 * scale);
            CHECK_EQ(amp_step_result_next(o, &out), 1);
            CHECK(out.applied == 0 && out.applied_steps == 0 && out.total_skips == step && out.norm == 0 && out.clip_coef == 1 && out.first_bad == NULL);
        }
        CHECK_OK(amp_grad_set_stats(amp_optimizer_grad_set(o), &f));
        CHECK(f.found_inf == 0 && f.first_bad_index == -1);
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_optimizer_save(o, state, "o"));
        CHECK_OK(amp_optimizer_load(o, state, "o"));
        CHECK_OK(amp_optimizer_rebuild_masters(o));
        CHECK(w[0] == 1 && w[1] == 2 && w[2] == 3);
        amp_state_destroy(state);
        amp_optimizer_destroy(o);
    }
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* Tensors of no elements beside one of some, in every storage: a step is what it is without them. */
static void step_with_empty(amp_master_kind master, amp_dtype weight, int empties, uint16_t *w, float *w32) {
    enum { N = 21 };
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 2, AMP_LEVEL_O2, AMP_DTYPE_DEFAULT);
    amp_scaler *s = make_scaler(amp, AMP_SCALER_DEFAULT, 256, 0);
    float g[N], none;
    amp_param p[3];
    amp_optimizer *o = NULL;
    amp_optimizer_desc d;
    amp_state *state = NULL;
    int step, i;
    ampt_uniform(w32, N, 5, 0, 1, 0);
    CHECK_OK(amp_convert(w, AMP_BF16, w32, AMP_F32, N, NULL, NULL));
    p[0] = make_param("none", &none, weight, &none, AMP_F32, 0);
    p[1] = make_param("some", weight == AMP_F32 ? (void *)w32 : (void *)w, weight, g, AMP_F32, N);
    p[2] = make_param("rows of none", &none, weight, &none, AMP_F32, 0);
    p[2].weight = amp_tensor2(&none, weight, 5, 0);
    p[2].grad = amp_tensor2(&none, AMP_F32, 5, 0);
    memset(&d, 0, sizeof d);
    d.params = empties ? p : p + 1; d.n_params = empties ? 3 : 1; d.lr = 0.01; d.master = master; d.clip_norm = 1;
    CHECK_OK(amp_optimizer_create(amp, &o, &d));
    CHECK_OK(amp_state_create(&state, NULL));
    for (step = 0; step < 4; step++) {
        ampt_uniform(g, N, 6, (uint32_t)step, 256, 0);
        for (i = 0; i < 3; i++) p[i].grad_live = 1;
        CHECK_OK(amp_step(o, s));
        CHECK_OK(amp_optimizer_save(o, state, "o"));
        CHECK_OK(amp_optimizer_load(o, state, "o"));
        if (step == 1) CHECK_OK(amp_optimizer_rebuild_masters(o));
    }
    amp_state_destroy(state);
    amp_optimizer_destroy(o);
    amp_scaler_destroy(s);
    amp_close(amp);
}

TEST(tensors_without_elements) {
    static const amp_master_kind masters[4] = {AMP_MASTER_DEFAULT, AMP_MASTER_F32, AMP_MASTER_REMAINDER, AMP_MASTER_NONE};
    amp_context *amp = open_default();
    uint16_t w[2][21];
    float w32[2][21], none = 0;
    amp_tensor empty = amp_tensor2(&none, AMP_F32, 0, 7);
    int64_t first = 5;
    int k;
    for (k = 0; k < 4; k++) {
        amp_dtype weight = k ? AMP_BF16 : AMP_F32;
        step_with_empty(masters[k], weight, 0, w[0], w32[0]);
        step_with_empty(masters[k], weight, 1, w[1], w32[1]);
        CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0 && memcmp(w32[0], w32[1], sizeof w32[0]) == 0);
    }
    CHECK_OK(amp_add(amp, &empty, &empty, &empty));
    CHECK_OK(amp_cast(amp, &empty, &empty));
    CHECK_EQ(amp_count_nonfinite(&none, AMP_F32, 0, &first), 0);
    CHECK_EQ(first, -1);
    amp_close(amp);
}

/* ---- Programs in C: gradients and momentum of their own */

enum { WEIGHTS = 53 };

/* Gradients of a step: anything, but an infinity now and then. */
static void fresh_gradient(float *g, int step, float factor) {
    int i;
    ampt_uniform(g, WEIGHTS, 21, (uint32_t)step, 0.01f, 0.002f);
    for (i = 0; i < WEIGHTS; i++) g[i] *= factor;
    if (step % 7 == 4) g[step % WEIGHTS] = of_bits(infinity);
}
static int overflows(int step) { return step % 7 == 4; }

/* The host's buffer is b = 0.9 b + S g: nobody sets it to 0, the inverse scale goes into the learning rate, a skipped step
   gives back what it was, and a new scale multiplies it.  Scales are powers of two, so the run without a scale has the
   same bits. */
TEST(momentum_in_the_gradient_buffer) {
    amp_context *amp = open_default();
    amp_scaler *s = make_scaler(amp, AMP_SCALER_DEFAULT, 1024, 3);
    float w[WEIGHTS] = {0}, b[WEIGHTS] = {0}, plain_w[WEIGHTS] = {0}, plain_b[WEIGHTS] = {0}, g[WEIGHTS], kept[WEIGHTS];
    amp_range range = range_of("b", b, WEIGHTS, AMP_F32);
    amp_grad_set *set = make_set(amp, &range, 1, 0);
    const amp_k_grad_stats *f = amp_grad_set_device(set);
    int step, i, scales = 0;
    for (step = 0; step < 60; step++) {
        float scale = amp_scaler_scale(s);
        fresh_gradient(g, step, scale);
        memcpy(kept, b, sizeof b);
        for (i = 0; i < WEIGHTS; i++) b[i] = 0.9f * b[i] + g[i];
        CHECK_OK(amp_scaler_check(s, set, AMP_CHECK_READ));
        CHECK_EQ(f->skip, overflows(step));
        if (f->skip) memcpy(b, kept, sizeof b);
        else for (i = 0; i < WEIGHTS; i++) w[i] -= 0.1f * (f->multiplier * b[i]);
        CHECK_OK(amp_scaler_update(s));
        CHECK_OK(amp_scaler_rescale(s, set, 0));
        scales += amp_scaler_scale(s) != scale;
        fresh_gradient(g, step, 1);
        if (overflows(step)) continue;
        for (i = 0; i < WEIGHTS; i++) plain_b[i] = 0.9f * plain_b[i] + g[i];
        for (i = 0; i < WEIGHTS; i++) plain_w[i] -= 0.1f * plain_b[i];
        CHECK_MSG(memcmp(w, plain_w, sizeof w) == 0, "step %d", step);
        for (i = 0; i < WEIGHTS; i++) CHECK(b[i] == plain_b[i] * amp_scaler_scale(s));
    }
    CHECK(scales > 15);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* A host that keeps delta = -gradient, and steps along it. */
TEST(a_negated_gradient) {
    int kind;
    for (kind = AMP_ADAMW; kind <= AMP_LION; kind++) {
        amp_context *amp = open_default();
        float w[2][WEIGHTS] = {{0}}, g[2][WEIGHTS];
        amp_param p[2];
        amp_optimizer *o[2];
        amp_scaler *s[2];
        int k, step, i;
        for (k = 0; k < 2; k++) {
            amp_optimizer_desc d;
            memset(&d, 0, sizeof d);
            p[k] = make_param("w", w[k], AMP_F32, g[k], AMP_F32, WEIGHTS);
            d.kind = (amp_optimizer_kind)kind; d.params = &p[k]; d.n_params = 1; d.lr = 0.01; d.clip_norm = 0.05; d.maximize = k;
            CHECK_OK(amp_optimizer_create(amp, &o[k], &d));
            s[k] = make_scaler(amp, AMP_SCALER_DEFAULT, 1024, 3);
        }
        for (step = 0; step < 30; step++) {
            for (k = 0; k < 2; k++) {
                fresh_gradient(g[k], step, amp_scaler_scale(s[k]));
                for (i = 0; k && i < WEIGHTS; i++) g[k][i] = of_bits(bits(g[k][i]) ^ 0x80000000u);
                p[k].grad_live = 1;
                CHECK_OK(amp_step(o[k], s[k]));
            }
            for (i = 0; i < WEIGHTS; i++) CHECK_MSG(w[0][i] == w[1][i], "kind %d, step %d: %g and %g", kind, step, (double)w[0][i], (double)w[1][i]);
            CHECK(amp_scaler_scale(s[0]) == amp_scaler_scale(s[1]));
        }
        CHECK(w[0][0] != 0);
        for (k = 0; k < 2; k++) { amp_optimizer_destroy(o[k]); amp_scaler_destroy(s[k]); }
        amp_close(amp);
    }
}

/* A host without weight gradients: what is checked are the deltas of its layers, in formats of their own, and w += rate *
   delta * x happens in one go.  Against the same without a scale. */
typedef struct fused_host { float w[3][4][5]; float d32[4]; uint16_t d16[4]; double d64[4]; } fused_host;
static void fused_deltas(fused_host *h, int step, float scale) {
    float d[12];
    int i;
    ampt_uniform(d, 12, 23, (uint32_t)step, 0.5f, 0);
    for (i = 0; i < 4; i++) {
        h->d32[i] = d[i] * scale;
        h->d16[i] = amp_bf16_from_f32(d[4 + i] * scale, 0);
        h->d64[i] = (double)d[8 + i] * (double)scale;
    }
    if (overflows(step)) h->d64[step % 4] = (double)of_bits(infinity);
}
static void fused_update(fused_host *h, int step, float multiplier) {
    float x[5];
    int layer, i, j;
    ampt_uniform(x, 5, 24, (uint32_t)step, 1, 0);
    for (layer = 0; layer < 3; layer++) for (i = 0; i < 4; i++) {
        float delta = layer == 0 ? h->d32[i] : layer == 1 ? amp_f32_from_bf16(h->d16[i]) : (float)h->d64[i];
        for (j = 0; j < 5; j++) h->w[layer][i][j] += 0.125f * ((delta * multiplier) * x[j]);
    }
}

TEST(a_fused_update_without_gradients) {
    amp_context *amp = open_default();
    amp_scaler *s = make_scaler(amp, AMP_SCALER_DEFAULT, 4096, 2);
    fused_host h, plain;
    amp_range ranges[3];
    amp_grad_set *set;
    int step, skips = 0;
    memset(&h, 0, sizeof h);
    memset(&plain, 0, sizeof plain);
    ranges[0] = range_of("d32", h.d32, 4, AMP_F32);
    ranges[1] = range_of("d16", h.d16, 4, AMP_BF16);
    ranges[2] = range_of("d64", h.d64, 4, AMP_F64);
    set = make_set(amp, ranges, 3, 0);
    for (step = 0; step < 40; step++) {
        amp_grad_stats f;
        fused_deltas(&h, step, amp_scaler_scale(s));
        f = found_by(s, set, AMP_CHECK_READ);
        CHECK(f.found_inf == overflows(step) && (f.first_bad == NULL || strcmp(f.first_bad, "d64") == 0));
        if (!amp_grad_set_device(set)->skip) {
            fused_update(&h, step, amp_grad_set_device(set)->multiplier);
            fused_deltas(&plain, step, 1);
            fused_update(&plain, step, 1);
        } else skips++;
        CHECK_OK(amp_scaler_update(s));
        CHECK_MSG(memcmp(h.w, plain.w, sizeof h.w) == 0, "step %d", step);
    }
    CHECK_EQ(skips, 6);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* ---- Programs in C: products */

/* Threads of this process, or 0 where the system does not tell. */
static int threads_now(void) {
#if defined(_WIN32)                 /* under wine, /proc also lists wine's threads */
    FILE *f = NULL;
#else
    FILE *f = fopen("/proc/self/status", "r");
#endif
    char line[256];
    int n = 0;
    while (f != NULL && fgets(line, sizeof line, f)) if (sscanf(line, "Threads: %d", &n) == 1) break;
    if (f != NULL) fclose(f);
    return n;
}

TEST(small_products_start_no_threads) {
    static float a[200 * 200], c[200 * 200];
    static const int sizes[6][3] = {{1, 1, 1}, {1, 9, 1}, {7, 1, 5}, {4, 4, 1}, {8, 8, 8}, {64, 64, 64}};
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 2, AMP_LEVEL_DEFAULT, AMP_DTYPE_DEFAULT);
    amp_machine machine;
    int k, before = threads_now();
    for (k = 0; k < 6; k++)
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, sizes[k][0], sizes[k][1], sizes[k][2], 1,
                          a, sizes[k][2], a, sizes[k][1], 1, c, sizes[k][1]));
    CHECK_EQ(threads_now(), before);
    CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 200, 200, 200, 1, a, 200, a, 200, 1, c, 200));
    CHECK_OK(amp_machine_probe(&machine));
    CHECK(before == 0 || machine.cpu.cores < 2 || threads_now() > before);      /* what a large one does */
    amp_close(amp);
}

typedef struct product { int order, ta, tb, m, n, k, slack; float alpha, beta; } product;
static float a_room[8192], b_room[8192], c_room[8192], c_before[8192];

static int64_t lead(const product *p, int trans, int rows, int cols) {
    int64_t need = (p->order == AMP_ROW_MAJOR) != trans ? cols : rows;
    return (need > 0 ? need : 1) + p->slack;
}
static int64_t place(const product *p, int trans, int64_t ld, int i, int j) {
    return (p->order == AMP_ROW_MAJOR) != trans ? i * ld + j : j * ld + i;
}

/* C += op(A) op(B) off any alignment and with gaps between rows, against fp64; sums of k products in fp32 are off by at
   most gamma(k) times the sum of their magnitudes (Higham 2002, 3.1), and alpha, beta and the last sum round three times. */
static void check_product(amp_context *amp, const product *p) {
    int64_t lda = lead(p, p->ta, p->m, p->k), ldb = lead(p, p->tb, p->k, p->n), ldc = lead(p, 0, p->m, p->n), touched = 0, wrong = 0, x;
    const float *a = a_room + 1, *b = b_room + 3;
    float *c = c_room + 1;
    int i, j, q;
    memcpy(c_room, c_before, sizeof c_room);
    CHECK_OK(amp_gemm(amp, (amp_order)p->order, p->ta ? AMP_TRANS : AMP_NO_TRANS, p->tb ? AMP_TRANS : AMP_NO_TRANS,
                      p->m, p->n, p->k, p->alpha, a, lda, b, ldb, p->beta, c, ldc));
    for (i = 0; i < p->m; i++) for (j = 0; j < p->n; j++) {
        int64_t at = place(p, 0, ldc, i, j);
        double sum = 0, magnitude = 0, nu = (p->k + 3) * ldexp(1, -24), gamma = nu / (1 - nu);
        double before = (double)p->beta * (double)c_before[1 + at];
        for (q = 0; q < p->k; q++) {
            double term = (double)a[place(p, p->ta, lda, i, q)] * (double)b[place(p, p->tb, ldb, q, j)];
            sum += (double)p->alpha * term;
            magnitude += fabs((double)p->alpha * term);
        }
        wrong += !(fabs((double)c[at] - (sum + before)) <= gamma * (magnitude + fabs(before)));
    }
    for (x = 0; x < 8192; x++) touched += bits(c_room[x]) != bits(c_before[x]);
    CHECK_MSG(wrong == 0 && touched <= p->m * p->n,
              "order %d, trans %d%d, %d x %d x %d, beta %g: %d wrong, %d touched", p->order, p->ta, p->tb, p->m, p->n, p->k, (double)p->beta, (int)wrong, (int)touched);
}

TEST(products_of_every_form) {
    static const int sizes[10][3] = {{1, 1, 1}, {1, 7, 1}, {5, 1, 1}, {3, 4, 1}, {1, 9, 5},
                                     {17, 1, 33}, {13, 11, 7}, {1, 1, 64}, {33, 17, 0}, {37, 21, 70}};
    static const float betas[3] = {1, 0, -0.5f};
    int path, form, size, beta;
    ampt_uniform(a_room, 8192, 31, 0, 1, 0);
    ampt_uniform(b_room, 8192, 31, 1, 1, 0);
    ampt_uniform(c_before, 8192, 31, 2, 1, 3);                        /* never 0 */
    for (path = AMP_CPU_SCALAR; path <= (int)best_path(); path = AMPT_NEXT_PATH(path)) {
        amp_context *amp = open_context((amp_cpu_path)path, 2, AMP_LEVEL_DEFAULT, AMP_F32);
        for (form = 0; form < 8; form++) for (size = 0; size < 10; size++) for (beta = 0; beta < 3; beta++) {
            product p;
            p.order = form & 4 ? AMP_COL_MAJOR : AMP_ROW_MAJOR; p.ta = form & 1; p.tb = form >> 1 & 1;
            p.m = sizes[size][0]; p.n = sizes[size][1]; p.k = sizes[size][2];
            p.slack = (form + size) % 4; p.alpha = size % 2 ? 1 : -0.75f; p.beta = betas[beta];
            check_product(amp, &p);
        }
        amp_close(amp);
    }
}

/* Six threads, each with products and a region of its own, on one context: the bits of one thread alone. */
typedef struct caller {
    pthread_t thread;
    amp_context *amp;
    amp_dtype dtype;
    int m, n, k, same;
    float a[2048], b[2048], c[2048], want[2048];
} caller;
static int call_product(caller *t, float *c) {
    amp_autocast_desc region;
    int bad;
    memset(&region, 0, sizeof region);
    region.dtype = t->dtype;
    bad = amp_autocast_begin(t->amp, &region) != AMP_OK;
    bad |= amp_gemm(t->amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, t->m, t->n, t->k, 1, t->a, t->k, t->b, t->k, 0, c, t->n) != AMP_OK;
    return bad | (amp_autocast_end(t->amp) != AMP_OK);
}
static void *call_products(void *arg) {
    caller *t = (caller *)arg;
    int round;
    for (round = 0; round < 200; round++)
        if (call_product(t, t->c) || memcmp(t->c, t->want, sizeof(float) * (size_t)(t->m * t->n)) != 0) return NULL;
    t->same = 1;
    return NULL;
}
TEST(products_in_several_threads) {
    static const amp_dtype dtypes[3] = {AMP_F32, AMP_BF16, AMP_F16};
    static caller callers[6];
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 2, AMP_LEVEL_DEFAULT, AMP_BF16);
    int i;
    memset(callers, 0, sizeof callers);
    for (i = 0; i < 6; i++) {
        caller *t = &callers[i];
        t->amp = amp; t->dtype = dtypes[i % 3]; t->m = 1 + 7 * i; t->n = 3 + 8 * i; t->k = 1 + 9 * i;
        ampt_uniform(t->a, 2048, 33, (uint32_t)i, 1, 0);
        ampt_uniform(t->b, 2048, 34, (uint32_t)i, 1, 0);
        CHECK_EQ(call_product(t, t->want), 0);
        t->dtype = AMP_F32;                                           /* a region's dtype counts: other bits without it */
        CHECK_EQ(call_product(t, t->c), 0);
        t->dtype = dtypes[i % 3];
        CHECK_EQ(memcmp(t->c, t->want, sizeof t->c) != 0, i % 3 != 0);
    }
    for (i = 0; i < 6; i++) CHECK_EQ(pthread_create(&callers[i].thread, NULL, call_products, &callers[i]), 0);
    for (i = 0; i < 6; i++) pthread_join(callers[i].thread, NULL);
    for (i = 0; i < 6; i++) CHECK_MSG(callers[i].same, "thread %d", i);
    amp_close(amp);
}

/* ---- Programs in C: slices, instructions, overflow, losses */

/* Arrays that begin `shift` elements after a cache line does. */
enum { ROWS = 6, COLS = 37, PIECE = 2048, LARGEST = COLS * COLS };
typedef struct slices { amp_dtype dtype; int shift, used; float room[24][PIECE]; float loss; } slices;
static char *begin_of(slices *s, int i) {
    char *x = (char *)s->room[i];
    return x + (64 - (uintptr_t)x % 64) % 64 + s->shift * (int)amp_dtype_size(s->dtype);
}
static void *slice(slices *s, int stream, int64_t n) {
    static float numbers[LARGEST];
    char *at = begin_of(s, s->used++);
    ampt_uniform(numbers, n, 41, (uint32_t)stream, 1, 0);
    CHECK_OK(amp_convert(at, s->dtype, numbers, AMP_F32, n, NULL, NULL));
    return at;
}
static amp_tensor matrix(slices *s, int stream, int64_t rows, int64_t cols) {
    return amp_tensor2(slice(s, stream, rows * cols), s->dtype, rows, cols);
}
static amp_param parameter(slices *s, const char *name, int stream, int64_t rows, int64_t cols) {
    amp_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.weight = rows ? matrix(s, stream, rows, cols) : amp_tensor1(slice(s, stream, cols), s->dtype, cols);
    p.grad = rows ? matrix(s, stream + 1, rows, cols) : amp_tensor1(slice(s, stream + 1, cols), s->dtype, cols);
    p.grad_live = 0;
    return p;
}

/* A small network forward and backward, and a step; everything it works on is a slice. */
static void run_slices(slices *s, amp_context *amp) {
    amp_tensor x = matrix(s, 1, ROWS, COLS), y = matrix(s, 2, ROWS, COLS), z = matrix(s, 3, ROWS, COLS), dz = matrix(s, 4, ROWS, COLS);
    amp_tensor dy = matrix(s, 5, ROWS, COLS), dx = matrix(s, 6, ROWS, COLS), h = matrix(s, 7, ROWS, COLS);
    amp_param p[4];
    float mean[ROWS], rstd[ROWS];
    static const int32_t labels[ROWS] = {0, 36, 5, 17, 2, 30};
    amp_norm_op norm;
    amp_linear_op linear;
    amp_activation_op gelu;
    amp_cross_entropy_op ce;
    amp_optimizer *o;
    p[0] = parameter(s, "gain", 10, 0, COLS); p[1] = parameter(s, "shift", 12, 0, COLS);
    p[2] = parameter(s, "w", 14, COLS, COLS); p[3] = parameter(s, "b", 16, 0, COLS);
    memset(&norm, 0, sizeof norm); memset(&linear, 0, sizeof linear); memset(&gelu, 0, sizeof gelu); memset(&ce, 0, sizeof ce);
    norm.x = x; norm.y = y; norm.weight = &p[0]; norm.bias = &p[1]; norm.mean = mean; norm.rstd = rstd; norm.dy = dy; norm.dx = dx;
    linear.x = y; linear.y = h; linear.weight = &p[2]; linear.bias = &p[3]; linear.dy = dz; linear.dx = dy;
    gelu.x = h; gelu.y = z; gelu.act = AMP_ACT_GELU; gelu.dy = dz; gelu.dx = dz;
    ce.logits = z; ce.dlogits = dz; ce.labels = labels; ce.loss = &s->loss;
    CHECK_OK(amp_layernorm(amp, &norm));
    CHECK_OK(amp_linear(amp, &linear));
    CHECK_OK(amp_activation(amp, &gelu));
    CHECK_OK(amp_cross_entropy(amp, &ce));
    CHECK_OK(amp_activation_backward(amp, &gelu));
    CHECK_OK(amp_linear_backward(amp, &linear));
    CHECK_OK(amp_layernorm_backward(amp, &norm));
    o = make_optimizer(amp, AMP_ADAMW, p, 4, 0.01, 1);
    CHECK_OK(amp_step(o, NULL));
    amp_optimizer_destroy(o);
}

/* What else takes tensors: attention on packed q, k, v, softmax, RMSNorm, dropout, sums and copies. */
static void run_more_slices(slices *s, amp_context *amp) {
    enum { T = 9, H = 2, D = 12 };
    int64_t shape[4] = {1, T, H, D}, stride[4] = {T * 3 * H * D, 3 * H * D, D, 1};
    char *qkv = (char *)slice(s, 51, T * 3 * H * D);
    int64_t size = (int64_t)amp_dtype_size(s->dtype);
    amp_tensor x = matrix(s, 52, ROWS, COLS), y = matrix(s, 53, ROWS, COLS);
    amp_attention_op att;
    amp_softmax_op soft;
    amp_norm_op norm;
    amp_dropout_op drop;
    float lse[H * T], rstd[ROWS];
    int i;
    memset(&att, 0, sizeof att); memset(&soft, 0, sizeof soft); memset(&norm, 0, sizeof norm); memset(&drop, 0, sizeof drop);
    att.q = amp_tensor1(qkv, s->dtype, 1);
    att.q.ndim = 4;
    for (i = 0; i < 4; i++) { att.q.shape[i] = shape[i]; att.q.stride[i] = stride[i]; }
    att.k = att.v = att.q;
    att.k.data = qkv + size * H * D; att.v.data = qkv + size * 2 * H * D;
    att.o = att.q;
    att.o.data = slice(s, 54, T * H * D);
    att.o.stride[0] = T * H * D; att.o.stride[1] = H * D;
    att.lse = lse;
    att.mask.kind = AMP_MASK_CAUSAL;
    CHECK_OK(amp_attention(amp, &att));
    soft.x = x; soft.y = x; norm.x = x; norm.y = y; norm.rstd = rstd; drop.x = y; drop.y = y; drop.p = 0.25f;
    CHECK_OK(amp_softmax(amp, &soft));
    CHECK_OK(amp_rmsnorm(amp, &norm));
    CHECK_OK(amp_dropout(amp, &drop));
    CHECK_OK(amp_add(amp, &x, &y, &x));
    CHECK_OK(amp_cast(amp, &x, &y));
}

TEST(slices_at_odd_places) {
    static const amp_dtype dtypes[3] = {AMP_F32, AMP_BF16, AMP_F16};
    static slices straight, odd;
    int path, dtype, shift, i;
    for (path = AMP_CPU_SCALAR; path <= (int)best_path(); path = AMPT_NEXT_PATH(path))
    for (dtype = 0; dtype < 3; dtype++) for (shift = 0; shift < 8; shift += shift < 3 ? 1 : 4) {
        slices *s = shift ? &odd : &straight;
        amp_context *amp = open_context((amp_cpu_path)path, 1, AMP_LEVEL_DEFAULT, AMP_DTYPE_DEFAULT);
        memset(s, 0, sizeof *s);
        s->dtype = dtypes[dtype];
        s->shift = shift;
        run_slices(s, amp);
        run_more_slices(s, amp);
        amp_close(amp);
        for (i = 0; i < s->used; i++)
            CHECK_MSG(memcmp(begin_of(&straight, i), begin_of(s, i), LARGEST * amp_dtype_size(s->dtype)) == 0,
                      "path %d, %s, %d elements off: slice %d differs",
                      path, amp_dtype_name(s->dtype), shift, i);
        CHECK(bits(straight.loss) == bits(s->loss));
    }
}

/* Built without -march, as here, it finds what the CPU has: the system tells the same. */
TEST(instructions_are_chosen_at_run_time) {
#if defined(__x86_64__) && !defined(__AVX2__)
    FILE *f = fopen("/proc/cpuinfo", "r");
    static char line[16384];
    amp_cpu_path best = best_path(), path;
    int avx2 = 0, avx512 = 0;
    amp_context *amp = NULL;
    amp_desc d;
    while (f != NULL && fgets(line, sizeof line, f)) {
        if (strncmp(line, "flags", 5) != 0) continue;
        avx2 = strstr(line, " avx2") && strstr(line, " fma") && strstr(line, " f16c");
        avx512 = avx2 && strstr(line, " avx512f") && strstr(line, " avx512bw") && strstr(line, " avx512dq") && strstr(line, " avx512vl");
        break;
    }
    if (f == NULL) SKIP("no /proc/cpuinfo");
    fclose(f);
    CHECK_EQ(best >= AMP_CPU_AVX2, avx2);
    CHECK_EQ(best >= AMP_CPU_AVX512, avx512);
    memset(&d, 0, sizeof d);
    for (path = AMP_CPU_DEFAULT; path <= AMP_CPU_AMX; path = (amp_cpu_path)(path + 1)) {
        d.cpu_path = path;
        CHECK_ERR(amp_open(&amp, &d), path <= best ? AMP_OK : AMP_ERR_UNSUPPORTED);
        if (path > best) continue;
        CHECK_OK(amp_query(amp, &d));
        CHECK_EQ(d.cpu_path, path == AMP_CPU_DEFAULT ? best : path);
        amp_close(amp);
        memset(&d, 0, sizeof d);
    }
#else
    SKIP("another CPU, or -march");
#endif
}

/* A weight and an activation (as batch norms make them) beyond 65504: the cast counts, the report says which. */
TEST(fp16_overflow_is_reported_by_name) {
    amp_context *amp = open_context(AMP_CPU_DEFAULT, 1, AMP_LEVEL_DEFAULT, AMP_F16);
    float w[12], x[12], y[9], fine[2] = {1, 2};
    amp_param p = make_param("fc.weight", w, AMP_F32, w, AMP_F32, 12);
    amp_range ranges[9];
    amp_tensor_stats *numerics = NULL;
    amp_tensor_stats_desc d;
    amp_tensor_stats_report r;
    amp_cache_info cache;
    amp_linear_op op;
    int which, i;
    p.weight = amp_tensor2(w, AMP_F32, 3, 4);
    p.grad.data = NULL;
    memset(&d, 0, sizeof d);
    memset(&op, 0, sizeof op);
    ranges[0] = range_of("bn.out", x, 12, AMP_F32);
    for (i = 1; i < 9; i++) ranges[i] = range_of("fine", fine, 2, AMP_F32);
    d.params = &p; d.n_params = 1; d.ranges = ranges; d.n_ranges = 9; d.dtype = AMP_F16; d.interval = 1;
    CHECK_OK(amp_param_register(amp, &p, 1));
    CHECK_OK(amp_tensor_stats_create(amp, &numerics, &d));
    op.x = amp_tensor2(x, AMP_F32, 3, 4); op.y = amp_tensor2(y, AMP_F32, 3, 3); op.weight = &p;
    for (which = 0; which < 3; which++) {
        uint16_t low[12];
        int64_t new_inf = 0, first = -1;
        for (i = 0; i < 12; i++) w[i] = x[i] = 0.5f;
        if (which == 1) w[7] = 70000;
        if (which == 2) x[5] = -80000;
        amp_param_changed(&p);
        CHECK_OK(amp_autocast_begin(amp, NULL));
        for (i = 0; i < 3; i++) CHECK_OK(amp_linear(amp, &op));       /* the second use makes a copy */
        CHECK_OK(amp_cast_cache_info(amp, &cache));
        CHECK_OK(amp_autocast_end(amp));
        CHECK_EQ(cache.new_inf, which >= 1);
        CHECK_EQ(amp_count_nonfinite(y, AMP_F32, 9, NULL) > 0, which > 0);
        CHECK_OK(amp_tensor_stats_step(numerics, &r));
        CHECK(r.recommendation == (which ? AMP_RECOMMEND_LAYER_FP32 : AMP_RECOMMEND_NONE));
        CHECK(which == 0 || (r.worst != NULL && strcmp(r.worst, which == 1 ? "fc.weight" : "bn.out") == 0));
        CHECK_OK(amp_convert(low, AMP_F16, x, AMP_F32, 12, NULL, &new_inf));
        CHECK_EQ(new_inf, which == 2);
        CHECK_EQ(amp_count_nonfinite(low, AMP_F16, 12, &first), which == 2);
        CHECK_EQ(first, which == 2 ? 5 : -1);
    }
    amp_tensor_stats_destroy(numerics);
    amp_close(amp);
}

/* Losses do not know of the scale; the gradients that start from it are the scale times the others. */
TEST(losses_are_never_scaled) {
    amp_context *amp = open_default();
    amp_scaler *s = make_scaler(amp, AMP_SCALER_DEFAULT, 8192, 0);
    static const int32_t labels[4] = {2, 0, 1, 2};
    float x[12], target[12], d[2][12], loss[2][2], losses[2][4];
    int k, i;
    ampt_uniform(x, 12, 51, 0, 2, 0);
    ampt_uniform(target, 12, 51, 1, 2, 0);
    for (k = 0; k < 2; k++) {
        amp_cross_entropy_op ce;
        memset(&ce, 0, sizeof ce);
        ce.logits = amp_tensor2(x, AMP_F32, 4, 3); ce.dlogits = amp_tensor2(d[k], AMP_F32, 4, 3);
        ce.labels = labels; ce.grad_scale = amp_scaler_scale_ptr(k ? s : NULL); ce.loss = &loss[k][0]; ce.losses = losses[k];
        CHECK_OK(amp_cross_entropy(amp, &ce));
        if (k) for (i = 0; i < 12; i++) CHECK(d[1][i] == 8192 * d[0][i] && d[1][i] != 0);
    }
    for (k = 0; k < 2; k++) {
        amp_mse_op mse;
        memset(&mse, 0, sizeof mse);
        mse.x = amp_tensor1(x, AMP_F32, 12); mse.target = amp_tensor1(target, AMP_F32, 12); mse.dx = amp_tensor1(d[k], AMP_F32, 12);
        mse.grad_scale = amp_scaler_scale_ptr(k ? s : NULL); mse.loss = &loss[k][1];
        CHECK_OK(amp_mse(amp, &mse));
        if (k) for (i = 0; i < 12; i++) CHECK(d[1][i] == 8192 * d[0][i] && d[1][i] != 0);
    }
    CHECK(memcmp(loss[0], loss[1], sizeof loss[0]) == 0 && memcmp(losses[0], losses[1], sizeof losses[0]) == 0);
    amp_scaler_destroy(s);
    amp_close(amp);
}

/* ---- Programs in C: nothing changes in fp32 when the host's own product is plugged in */

enum { IN = 11, HIDDEN = 19, OUT = 5, BATCH = 8, ALL = IN * HIDDEN + HIDDEN * OUT };
typedef struct host {
    amp_context *amp;
    float w[ALL], g[ALL], v[ALL], x[BATCH * IN], h[BATCH * HIDDEN], y[BATCH * OUT], dy[BATCH * OUT], dh[BATCH * HIDDEN];
} host;

/* The host's: c = op(a) op(b), sums in an order of its own. */
static void host_product(int ta, int tb, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
                         float *c, int64_t ldc) {
    int64_t i, j, q;
    for (i = 0; i < m; i++) for (j = 0; j < n; j++) {
        volatile float sum = 0;                                       /* in this order under every flag */
        for (q = k - 1; q >= 0; q--) sum = sum + (ta ? a[q * lda + i] : a[i * lda + q]) * (tb ? b[j * ldb + q] : b[q * ldb + j]);
        c[i * ldc + j] = sum;
    }
}
static int plugged_in;
static amp_result host_gemm(void *dev, const amp_k_gemm *g, void *stream) {
    (void)dev; (void)stream;
    plugged_in++;
    if (g->compute != AMP_F32 || g->alpha != 1 || g->beta != 0 || g->batch != 1) return AMP_ERR_UNSUPPORTED;
    host_product(g->trans_a, g->trans_b, g->m, g->n, g->k, (const float *)g->a, g->lda, (const float *)g->b, g->ldb, (float *)g->c, g->ldc);
    return AMP_OK;
}

/* The one place that adopting amp.h changes. */
static void host_matmul(host *t, int ta, int tb, int m, int n, int k, const float *a, const float *b, float *c) {
    int lda = ta ? m : k, ldb = tb ? k : n;
    if (t->amp == NULL) { host_product(ta, tb, m, n, k, a, lda, b, ldb, c, n); return; }
    CHECK_OK(amp_autocast_begin(t->amp, NULL));
    CHECK_OK(amp_gemm(t->amp, AMP_ROW_MAJOR, ta ? AMP_TRANS : AMP_NO_TRANS, tb ? AMP_TRANS : AMP_NO_TRANS, m, n, k, 1, a, lda, b, ldb, 0, c, n));
    CHECK_OK(amp_autocast_end(t->amp));
}

/* Half the squared error of a step, and `scale` times its gradients in t->g. */
static float host_backward(host *t, int step, float scale) {
    float *w2 = t->w + IN * HIDDEN, loss = 0;
    int i;
    ampt_uniform(t->x, BATCH * IN, 61, (uint32_t)step, 1, 0);
    host_matmul(t, 0, 0, BATCH, HIDDEN, IN, t->x, t->w, t->h);
    for (i = 0; i < BATCH * HIDDEN; i++) if (!(t->h[i] > 0)) t->h[i] = 0;
    host_matmul(t, 0, 0, BATCH, OUT, HIDDEN, t->h, w2, t->y);
    for (i = 0; i < BATCH * OUT; i++) {
        float off = t->y[i] - t->x[i % IN];
        loss += 0.5f * off * off;
        t->dy[i] = off * scale;
    }
    host_matmul(t, 1, 0, HIDDEN, OUT, BATCH, t->h, t->dy, t->g + IN * HIDDEN);
    host_matmul(t, 0, 1, BATCH, HIDDEN, OUT, t->dy, w2, t->dh);
    for (i = 0; i < BATCH * HIDDEN; i++) if (!(t->h[i] > 0)) t->dh[i] = 0;
    host_matmul(t, 1, 0, IN, HIDDEN, BATCH, t->x, t->dh, t->g);
    return loss;
}
static void host_step(host *t) {
    int i;
    for (i = 0; i < ALL; i++) { t->v[i] = 0.5f * t->v[i] + t->g[i]; t->w[i] -= 0.0078125f * t->v[i]; }
}

TEST(fp32_with_the_hosts_own_product) {
    static host before, after;
    amp_backend table = *amp_cpu();
    amp_desc d;
    amp_scaler *s;
    amp_range range = range_of("g", after.g, ALL, AMP_F32);
    amp_grad_set *set;
    float first = 0, loss[2] = {0, 0};
    int step;
    memset(&d, 0, sizeof d);
    table.gemm = host_gemm;
    d.backend = &table; d.dtype = AMP_F32; d.logger.level = AMP_LOG_OFF;
    CHECK_OK(amp_open(&after.amp, &d));
    s = make_scaler(after.amp, AMP_SCALER_DEFAULT, 1024, 4);
    set = make_set(after.amp, &range, 1, 0);
    ampt_uniform(before.w, ALL, 62, 0, 0.3f, 0);
    memcpy(after.w, before.w, sizeof before.w);
    plugged_in = 0;
    for (step = 0; step < 40; step++) {
        loss[0] = host_backward(&before, step, 1);
        host_step(&before);
        loss[1] = host_backward(&after, step, amp_scaler_scale(s));
        CHECK_EQ(found_by(s, set, AMP_CHECK_UNSCALE).found_inf, 0);
        host_step(&after);
        CHECK_OK(amp_scaler_update(s));
        CHECK_MSG(bits(loss[0]) == bits(loss[1]) && memcmp(before.w, after.w, sizeof before.w) == 0,
                  "step %d: loss %g and %g", step, (double)loss[0], (double)loss[1]);
        if (step == 0) first = loss[0];
    }
    CHECK_EQ(plugged_in, 40 * 5);
    CHECK(loss[0] < first && amp_scaler_scale(s) == 1024 * 1024);
    amp_grad_set_destroy(set);
    amp_scaler_destroy(s);
    amp_close(after.amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    flush_subnormals(0);            /* as linking with -Ofast sets it; tests that are about it set it themselves */
    RUN(small_products_start_no_threads);
    RUN(nan_survives_stochastic_rounding);
    RUN(fp8_casts_keep_infinities_in_sight);
    RUN(drift_of_20000_updates);
    RUN(no_step_at_an_unusable_scale);
    RUN(the_largest_scale_is_exact);
    RUN(an_overflow_when_growth_is_due);
    RUN(clipping_sees_unscaled_gradients);
    RUN(what_a_check_reports);
    RUN(nothing_to_do_is_no_error);
    RUN(tensors_without_elements);
    RUN(momentum_in_the_gradient_buffer);
    RUN(a_negated_gradient);
    RUN(a_fused_update_without_gradients);
    RUN(products_of_every_form);
    RUN(products_in_several_threads);
    RUN(slices_at_odd_places);
    RUN(instructions_are_chosen_at_run_time);
    RUN(fp16_overflow_is_reported_by_name);
    RUN(losses_are_never_scaled);
    RUN(fp32_with_the_hosts_own_product);
    return TEST_END();
}
