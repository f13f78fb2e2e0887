/* attention_tests.h - compares attention on the CUDA backend with the CPU backend, for every mask, dtype and layout.
 * t_cuda_attention.cpp runs these tests on the kernels for every GPU, and t_cuda_hopper.cpp on those for Hopper.
 *
 * Both sides may differ from the exact result, which is computed here in fp64, by a bound that is computed beside it.  They
 * may differ from each other by twice that.  In the following, u = 2^-24, n is the unit roundoff of the compute dtype (0
 * for fp32), and all errors are relative to a probability p:
 *   - a score: (dim + 1) u |scale| sum |q k|;
 *   - exp(score - max): u |x| for the difference, and on the GPU 4 u + 1.25 |x| u for exp (2^-22, and the product with log2
 *     e), where |x| is at most twice the largest |score|.  The same, with two products, for each tile that may move max;
 *   - their sum: (keys) u, and the roundings to the compute dtype: n, or half its smallest number.
 * These bounds are first order, and are made safe by expm1. */
#include "test_cuda.h"

static void usual_devices() {
    if (!CUDA_IS_MODEL) return;
    if (cuda_wgmma()) coc_set_devices(2, (size_t)1 << 30, 4, 90, 90 + COC_LETTER_A);
    else coc_set_devices(2);
}

static const double u = 1.0 / 16777216;
typedef std::vector<double> doubles;

static void ok(amp_result result) { CHECK_MSG(result == AMP_OK, "%s", cuda_error_text()); }

/* ---- Cases */

struct attention_shape {
    int64_t batch, heads, queries, keys, dim;
    int layout;                     /* DENSE: arrays; GAPS: rows with gaps, odd starts; PACKED: [batch, position, 3, heads, dim] */
};
enum { DENSE, GAPS, PACKED, FAR };

struct mask_case {
    const char *name;
    amp_mask_kind kind;
    int bidirectional;
    int64_t window, global;
    int padding, documents;
    int own;                        /* ARBITRARY: 1 an own tensor for each batch item, 2 for each head; 4 blocks of zeros, ones, both */
};
static const mask_case mask_cases[] = {
    {"none", AMP_MASK_NONE, 0, 0, 0, 0, 0, 0},
    {"causal", AMP_MASK_CAUSAL, 0, 0, 0, 0, 0, 0},
    {"padding", AMP_MASK_NONE, 0, 0, 0, 1, 0, 0},
    {"documents", AMP_MASK_NONE, 0, 0, 0, 0, 1, 0},
    {"window", AMP_MASK_WINDOW, 0, 5, 0, 0, 0, 0},
    {"window, both ways, padding", AMP_MASK_WINDOW, 1, 9, 0, 1, 0, 0},
    {"window of all", AMP_MASK_WINDOW, 1, INT64_MAX, 0, 0, 0, 0},
    {"window and global", AMP_MASK_WINDOW_GLOBAL, 0, 4, 3, 0, 0, 0},
    {"window and global, both ways, documents", AMP_MASK_WINDOW_GLOBAL, 1, 3, 7, 0, 1, 0},
    {"prefix", AMP_MASK_PREFIX, 0, 0, 0, 0, 0, 0},
    {"causal, padding, documents", AMP_MASK_CAUSAL, 0, 0, 0, 1, 1, 0},
    {"arbitrary", AMP_MASK_ARBITRARY, 0, 0, 0, 0, 0, 0},
    {"arbitrary, own, padding", AMP_MASK_ARBITRARY, 0, 0, 0, 1, 0, 3},
    {"arbitrary per head, documents", AMP_MASK_ARBITRARY, 0, 0, 0, 0, 1, 2},
};

struct numbers { amp_dtype storage, compute; };
static const numbers all_numbers[] = {
    {AMP_F32, AMP_F32}, {AMP_F16, AMP_F16}, {AMP_BF16, AMP_BF16}, {AMP_F32, AMP_TF32}, {AMP_F16, AMP_F32}, {AMP_F32, AMP_BF16},
};

/* A mask's arrays.  Some sequences have no length, some rows see nothing. */
struct mask_data {
    mask_case kind;
    attention_shape shape;
    std::vector<int32_t> prefix, lengths, documents;
    std::vector<uint8_t> allowed;
    mask_data(const mask_case &m, const attention_shape &s, uint64_t seed) : kind(m), shape(s) {
        auto random = [&](size_t i, int64_t n) { return (int32_t)(amp_random_u32(seed, i) % (uint64_t)n); };
        for (int64_t b = 0; b < s.batch; b++) {
            prefix.push_back(random((size_t)b, s.keys + 2));
            lengths.push_back(b % 3 == 1 ? 0 : random((size_t)b + 100, s.keys + 2));
        }
        for (size_t j = 0; j < (size_t)(s.batch * s.keys); j++)
            documents.push_back(random(j + 1000, 9) || j == 0 ? (j ? documents.back() : 4) : random(j + 9000, 3));
        allowed.resize((size_t)(s.batch * s.heads * s.queries * s.keys));
        for (size_t i = 0; i < allowed.size(); i++) allowed[i] = i >= (size_t)s.keys && random(i + 20000, 3) == 0;
        for (size_t i = 0; (m.own & 4) && i < allowed.size(); i++) {
            size_t block = i / (size_t)s.keys / 32 % 5 + i % (size_t)s.keys / 64;
            if (block % 3 != 2) allowed[i] = block % 3 != 0;
        }
    }
    int64_t head_stride() const { return kind.own & 2 ? shape.queries * shape.keys : 0; }
    int64_t batch_stride() const { return kind.own & 1 ? shape.queries * shape.keys * (kind.own & 2 ? shape.heads : 1) : 0; }
    amp_mask on(cuda_side &s) const {
        amp_mask m = {};
        m.kind = kind.kind, m.bidirectional = kind.bidirectional, m.window = kind.window, m.global = kind.global;
        if (m.kind == AMP_MASK_PREFIX) m.prefix = s.put(prefix);
        if (m.kind == AMP_MASK_ARBITRARY) m.allowed = s.put(allowed);
        if (kind.padding) m.lengths = s.put(lengths);
        if (kind.documents) m.documents = s.put(documents);
        m.allowed_batch_stride = batch_stride();
        m.allowed_head_stride = head_stride();
        return m;
    }
    /* Straight from the words of amp_mask. */
    bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
        int64_t p = i + shape.keys - shape.queries, distance = p > j ? p - j : j - p;
        bool causal = j <= p, seen = true;
        switch (kind.kind) {
            case AMP_MASK_CAUSAL: seen = causal; break;
            case AMP_MASK_WINDOW: seen = distance < kind.window && (causal || kind.bidirectional); break;
            case AMP_MASK_WINDOW_GLOBAL:
                seen = distance < kind.window || j < kind.global || (p >= 0 && p < kind.global);
                seen = seen && (causal || kind.bidirectional);
                break;
            case AMP_MASK_PREFIX: seen = causal || j < prefix[(size_t)b]; break;
            case AMP_MASK_ARBITRARY: seen = allowed[(size_t)(b * batch_stride() + h * head_stride() + i * shape.keys + j)]; break;
            default: break;
        }
        if (kind.padding && j >= lengths[(size_t)b]) return false;
        if (!kind.documents) return seen;
        const int32_t *of = documents.data() + b * shape.keys;
        return seen && p >= 0 && of[j] == of[p];
    }
};

/* ---- The eight tensors: values as dense [batch, position, head, dim], and where they lie in one array */

enum { Q, K, V, O, D_O, DQ, DK, DV, TENSORS };
static bool over_keys(int t) { return t == K || t == V || t == DK || t == DV; }

struct view { int64_t at, rows, stride[3]; };
struct arrangement {
    view views[TENSORS];
    int64_t count = 0;
    explicit arrangement(const attention_shape &s) {
        for (int t = 0; t < TENSORS; t++) {
            view &v = views[t];
            int packed = t == K || t == DK ? 1 : t == V || t == DV ? 2 : 0;
            v.rows = over_keys(t) ? s.keys : s.queries;
            v.stride[2] = s.dim + (s.layout == GAPS ? t % 3 : 0);
            v.stride[1] = s.heads * v.stride[2] + (s.layout == GAPS ? 3 + t : 0);
            if (s.layout == PACKED && t != O && t != D_O) v.stride[1] *= 3;
            if (s.layout == FAR) v.stride[1] = ((int64_t)1 << 30) + 8 * s.heads * s.dim;
            v.stride[0] = v.rows * v.stride[1];
            if (s.layout == FAR) v.at = t * s.heads * s.dim;
            else if (s.layout == PACKED && packed) v.at = views[t - packed].at + packed * s.heads * s.dim;
            else v.at = count + (s.layout == GAPS ? 1 + t % 2 : 0);
            int64_t end = v.at + (s.layout == PACKED && packed ? 0 : s.batch * v.stride[0]);
            count = end > count ? end : count;
        }
    }
};

/* Calls run(element of the array, element of the dense values) for each start of dim values. */
static void each_row(const attention_shape &s, const view &v, const std::function<void(int64_t, int64_t)> &run) {
    for (int64_t b = 0; b < s.batch; b++)
        for (int64_t i = 0; i < v.rows; i++)
            for (int64_t h = 0; h < s.heads; h++)
                run(v.at + b * v.stride[0] + i * v.stride[1] + h * v.stride[2], ((b * v.rows + i) * s.heads + h) * s.dim);
}

struct problem {
    attention_shape shape;
    numbers type;
    mask_data mask;
    arrangement where;
    float scale;
    bool backward = true;
    std::string in[TENSORS];        /* q, k, v, do */
    problem(const attention_shape &s, const mask_case &m, const numbers &t, uint64_t seed)
        : shape(s), type(t), mask(m, s, seed), where(s), scale((float)(seed % 5 == 4 ? -0.7 : 1 / sqrt((double)s.dim))) {
        for (int i = 0; i < TENSORS; i++)
            if (i < O || i == D_O) in[i] = cuda_stored(cuda_random(count(i), seed + (uint64_t)i, -2, 2), t.storage);
    }
    int64_t count(int t) const { return shape.batch * where.views[t].rows * shape.heads * shape.dim; }
    int64_t rows() const { return shape.batch * shape.heads * shape.queries; }
    size_t size() const { return amp_dtype_size(type.storage); }
    size_t at(int t, int64_t b, int64_t h, int64_t i) const {
        return (size_t)(((b * where.views[t].rows + i) * shape.heads + h) * shape.dim);
    }
    /* Makes a row of an operand `value`; poison: to what is not finite, or not in fp16. */
    void set(int t, int64_t b, int64_t h, int64_t i, float value) {
        for (int64_t d = 0; d < shape.dim; d++)
            in[t].replace((at(t, b, h, i) + (size_t)d) * size(), size(), cuda_stored({value}, type.storage));
    }
    void poison(int t, int64_t b, int64_t h, int64_t i, int64_t which) {
        const float bad[] = {NAN, HUGE_VALF, -HUGE_VALF, 1e30f};
        set(t, b, h, i, bad[which % 4]);
    }
    /* Runs both directions, or forward alone, and appends o, dq, dk, dv and lse. */
    void run(cuda_side &s, std::string *out) const;
};

static void set_stride(int64_t (&to)[3], const view &v) { for (int i = 0; i < 3; i++) to[i] = v.stride[i]; }

/* The array with q, k, v and do in it. */
static char *put_all(cuda_side &s, const problem &p) {
    size_t size = p.size(), bytes = (size_t)p.where.count * size, row = (size_t)p.shape.dim * size;
    char *base = (char *)s.room(bytes);
    std::string all(bytes < CUDA_SPARSE_FROM ? bytes : 0, '\xff');
    for (int t = 0; t < TENSORS; t++)
        if (!p.in[t].empty()) each_row(p.shape, p.where.views[t], [&](int64_t at, int64_t from) {
            if (all.empty()) s.set(base + (size_t)at * size, &p.in[t][(size_t)from * size], row);
            else all.replace((size_t)at * size, row, p.in[t], (size_t)from * size, row);
        });
    if (!all.empty()) s.set(base, all.data(), bytes);
    return base;
}

/* Appends the results.  What lies between them must be as it was. */
static void get_all(cuda_side &s, const problem &p, const char *base, std::string *out) {
    size_t size = p.size(), bytes = (size_t)p.where.count * size, row = (size_t)p.shape.dim * size;
    const int results[] = {O, DQ, DK, DV};
    std::string all, dense[TENSORS];
    if (bytes < CUDA_SPARSE_FROM) s.get(&all, base, bytes);
    for (int t = 0; t < TENSORS; t++) {
        dense[t].resize((size_t)p.count(t) * size);
        each_row(p.shape, p.where.views[t], [&](int64_t at, int64_t to) {
            if (bytes >= CUDA_SPARSE_FROM) s.read(&dense[t][(size_t)to * size], base + (size_t)at * size, row);
            else dense[t].replace((size_t)to * size, row, all, (size_t)at * size, row);
        });
        if (!all.empty()) each_row(p.shape, p.where.views[t], [&](int64_t at, int64_t) {     /* heads may share a row */
            all.replace((size_t)at * size, row, row, '\xff');
        });
        if (!p.in[t].empty()) CHECK_MSG(dense[t] == p.in[t], "an operand was written");
    }
    CHECK_MSG(all == std::string(all.size(), '\xff'), "written between the rows of a tensor");
    for (int t : results) *out += dense[t];
}

/* The sums of a result over batch and positions are those of the stored numbers in fp64, added to `before`. */
static void check_sums(const problem &p, const std::string &results, size_t at, int t, const std::string &before,
                       const std::string &got, size_t first) {
    size_t columns = (size_t)(p.shape.heads * p.shape.dim);
    for (size_t c = 0; c < columns; c++) {
        double was = ((const float *)before.data())[first + c], sum = was, magnitude = fabs(was), result = ((const float *)got.data())[first + c];
        size_t n = (size_t)p.count(t) / columns;
        for (size_t i = 0; i < n; i++) {
            double x = cuda_value(results.data() + at, p.type.storage, i * columns + c);
            sum += x, magnitude += fabs(x);
        }
        bool good = sum - sum == 0 ? fabs(result - sum) <= ((double)n + 4) * u * magnitude : !(result - result == 0);
        CHECK_MSG(good, "the sum of tensor %d over column %d is %g, must be %g: %s, %d queries, %d keys, %d dims", t, (int)c, result, sum,
                  p.mask.kind.name, (int)p.shape.queries, (int)p.shape.keys, (int)p.shape.dim);
    }
}

void problem::run(cuda_side &s, std::string *out) const {
    amp_k_attention a = {};
    char *base = put_all(s, *this);
    const view *v = where.views;
    auto at = [&](int t) { return base + (size_t)v[t].at * size(); };
    a.batch = shape.batch, a.heads = shape.heads, a.queries = shape.queries, a.keys = shape.keys, a.dim = shape.dim;
    a.dtype = type.storage, a.compute = type.compute, a.scale = scale;
    a.q = at(Q), a.k = at(K), a.v = at(V), a.o = at(O), a.d_o = at(D_O), a.dq = at(DQ), a.dk = at(DK), a.dv = at(DV);
    set_stride(a.q_stride, v[Q]), set_stride(a.k_stride, v[K]), set_stride(a.v_stride, v[V]), set_stride(a.o_stride, v[O]);
    set_stride(a.do_stride, v[D_O]), set_stride(a.dq_stride, v[DQ]), set_stride(a.dk_stride, v[DK]), set_stride(a.dv_stride, v[DV]);
    a.lse = (float *)s.room((size_t)rows() * 4);
    a.mask = mask.on(s);
    std::vector<float> before((size_t)(3 * shape.heads * shape.dim), 0.5f);
    bool adjacent = shape.heads == 1 || where.views[DQ].stride[2] + where.views[DK].stride[2] + where.views[DV].stride[2] == 3 * shape.dim;
    float *sums = s.backend->sums && adjacent && shape.layout != DENSE ? s.put(before) : NULL;
    for (int i = 0; i < 3 && sums != NULL; i++) a.sums[i] = amp_k_gradient{sums + i * shape.heads * shape.dim, AMP_F32, 1};
    ok(s.backend->attention(s.dev, &a, NULL));
    if (backward) ok(s.backend->attention_backward(s.dev, &a, NULL));
    size_t results = out->size();
    get_all(s, *this, base, out);
    if (sums != NULL && backward) {
        std::string got, was((const char *)before.data(), before.size() * 4);
        s.get(&got, sums, was.size());
        const int each[] = {DQ, DK, DV};
        results += (size_t)count(O) * size();
        for (int i = 0; i < 3; i++) {
            check_sums(*this, *out, results, each[i], was, got, (size_t)(i * shape.heads * shape.dim));
            results += (size_t)count(each[i]) * size();
        }
    }
    s.get(out, a.lse, (size_t)rows() * 4);
}

/* ---- The exact results of a head in fp64, with the bound of either side.  See the head of this file. */

static double unit(amp_dtype d) { return d == AMP_F16 || d == AMP_TF32 ? 1.0 / 2048 : d == AMP_BF16 ? 1.0 / 256 : u; }
static double tiny(amp_dtype d) { return d == AMP_F16 ? ldexp(1, -25) : ldexp(1, -125); }

struct exact {
    const problem &p;
    const attention_shape &s;
    const double narrow, small;
    doubles in[TENSORS], value[TENSORS], bound[TENSORS], lse_bound;
    explicit exact(const problem &problem_)
        : p(problem_), s(p.shape), narrow(p.type.compute == AMP_F32 ? 0 : unit(p.type.compute)), small(tiny(p.type.compute)),
          lse_bound((size_t)p.rows()) {
        for (int t = 0; t < TENSORS; t++) {
            for (size_t i = 0; i < (size_t)p.count(t) && !p.in[t].empty(); i++)
                in[t].push_back(rounded(cuda_value(p.in[t].data(), p.type.storage, i)));
            value[t].resize((size_t)p.count(t));
            bound[t].resize((size_t)p.count(t));
        }
        for (int64_t b = 0; b < s.batch; b++)
            for (int64_t h = 0; h < s.heads; h++)
                for (int64_t i = 0; i < s.queries; i++) row(b, h, i);
        for (int t : {DQ, DK, DV})
            for (size_t i = 0; i < bound[t].size(); i++) bound[t][i] = stored(value[t][i], bound[t][i]);
    }
    double rounded(double x) const {
        float f = (float)x;
        switch (p.type.compute) {
            case AMP_TF32: return amp_tf32_from_f32(f, 0);
            case AMP_F16: return amp_f32_from_f16(amp_f16_from_f32(f, 0));
            case AMP_BF16: return amp_f32_from_bf16(amp_bf16_from_f32(f, 0));
            default: return f;
        }
    }
    double stored(double x, double error) const { return error + unit(p.type.storage) * (fabs(x) + error) + tiny(p.type.storage); }
    double dot(const double *x, const double *y, double *magnitude) const {
        double sum = *magnitude = 0;
        for (int64_t d = 0; d < s.dim; d++) sum += x[d] * y[d], *magnitude += fabs(x[d] * y[d]);
        return sum;
    }
    void row(int64_t b, int64_t h, int64_t i);
    void slopes(int64_t b, int64_t h, int64_t i, const doubles &probability, const doubles &error, const std::vector<int64_t> &keys);
};

void exact::row(int64_t b, int64_t h, int64_t i) {
    double max = -HUGE_VAL, sum = 0, worst = 0, reach = 0, magnitude, tiles = (double)(s.keys / 64 + 1), n = (double)s.keys;
    std::vector<int64_t> keys;
    doubles score, e, back;
    size_t q = p.at(Q, b, h, i);
    for (int64_t j = 0; j < s.keys; j++) {
        if (!p.mask.sees(b, h, i, j)) continue;
        keys.push_back(j);
        score.push_back(p.scale * dot(in[Q].data() + q, in[K].data() + p.at(K, b, h, j), &magnitude));
        e.push_back((double)(s.dim + 1) * u * fabs(p.scale) * magnitude);
        max = fmax(max, score.back());
        reach = fmax(reach, fabs(score.back()) + e.back());
    }
    for (size_t k = 0; k < keys.size(); k++) {
        back.push_back(e[k]);
        e[k] = expm1(e[k] + (4.5 * reach + 4) * u + tiles * (4.5 * reach + 6) * u);
        worst = fmax(worst, e[k]);
        sum += score[k] = exp(score[k] - max);
    }
    worst += n * u;
    double lse_error = keys.empty() ? 0 : worst + 4 * u * (reach + log(sum) + 1);
    lse_bound[(size_t)((b * s.heads + h) * s.queries + i)] = lse_error;
    for (size_t k = 0; k < keys.size(); k++) {
        double probability = score[k] /= sum, error = (1 + e[k]) * (1 + worst) * (1 + narrow) * (1 + (n + tiles + 4) * u) - 1;
        back[k] = expm1(back[k] + lse_error + 4 * u * (2 * reach + log(n) + 3));
        for (size_t d = 0, v = p.at(V, b, h, keys[k]); d < (size_t)s.dim; d++) {
            value[O][q + d] += probability * in[V][v + d];
            bound[O][q + d] += fabs(in[V][v + d]) * (probability * error + small);
        }
    }
    for (size_t d = q; d < q + (size_t)s.dim && !keys.empty(); d++) bound[O][d] = stored(value[O][d], bound[O][d]);
    slopes(b, h, i, score, back, keys);
}

void exact::slopes(int64_t b, int64_t h, int64_t i, const doubles &probability, const doubles &error, const std::vector<int64_t> &keys) {
    size_t q = p.at(Q, b, h, i);
    const double *d_o = in[D_O].data() + q;
    double magnitude, n = (double)(s.queries > s.keys ? s.queries : s.keys) + 4, scale = p.scale;
    double delta = dot(d_o, value[O].data() + q, &magnitude), delta_error = (double)s.dim * u * magnitude;
    for (size_t d = 0; d < (size_t)s.dim; d++) delta_error += fabs(d_o[d]) * bound[O][q + d] * (1 + (double)s.dim * u);
    for (size_t k = 0; k < keys.size(); k++) {
        size_t key = p.at(K, b, h, keys[k]);
        double pk = probability[k], dp = dot(d_o, in[V].data() + key, &magnitude), ds = pk * (dp - delta);
        double ds_error = (double)s.dim * u * magnitude + delta_error, p_error = pk * error[k];
        ds_error = (pk + p_error) * (ds_error + 2 * u * (fabs(dp - delta) + ds_error)) + p_error * fabs(dp - delta);
        ds_error += (narrow + n * u) * (fabs(ds) + ds_error) + small;
        p_error += (narrow + n * u) * (pk + p_error) + small;
        for (size_t d = 0; d < (size_t)s.dim; d++) {
            value[DQ][q + d] += scale * ds * in[K][key + d];
            bound[DQ][q + d] += fabs(scale * in[K][key + d]) * ds_error;
            value[DK][key + d] += scale * ds * in[Q][q + d];
            bound[DK][key + d] += fabs(scale * in[Q][q + d]) * ds_error;
            value[DV][key + d] += pk * d_o[d];
            bound[DV][key + d] += fabs(d_o[d]) * p_error;
        }
    }
}

/* ---- Comparing */

static void check_problem(const problem &p) {
    exact e(p);
    char what[200];
    size_t at = 0;
    const char *names[] = {"o", "dq", "dk", "dv"};
    const int results[] = {O, DQ, DK, DV};
    cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) { p.run(s, out); });
    for (int k = 0; k < 4; k++) {
        snprintf(what, sizeof what, "%s: %s, %d queries, %d keys, %d dims, layout %d, %s/%s", names[k], p.mask.kind.name,
                 (int)p.shape.queries, (int)p.shape.keys, (int)p.shape.dim, p.shape.layout, amp_dtype_name(p.type.storage),
                 amp_dtype_name(p.type.compute));
        at = c.check_within(at, p.type.storage, p.count(results[k]), [&](int64_t i, double) { return 2 * e.bound[results[k]][(size_t)i]; }, what);
    }
    snprintf(what + 3, sizeof what - 3, " is lse");
    c.check_within(at, AMP_F32, p.rows(), [&](int64_t i, double) { return 2 * e.lse_bound[(size_t)i]; }, what);
}

static const attention_shape small_shapes[] = {
    {1, 1, 1, 1, 1, DENSE},     {2, 3, 1, 70, 5, GAPS},     {1, 2, 70, 1, 32, DENSE},   {2, 2, 33, 33, 16, PACKED},
    {2, 1, 20, 41, 7, GAPS},    {5, 3, 21, 10, 9, GAPS},
};
static const attention_shape large_shapes[] = {
    {1, 1, 65, 65, 64, PACKED}, {1, 2, 67, 131, 80, GAPS},  {1, 1, 130, 66, 128, DENSE}, {1, 1, 20, 30, 150, GAPS},
};
static const size_t masks = sizeof mask_cases / sizeof *mask_cases, types = sizeof all_numbers / sizeof *all_numbers;

CUDA_TEST(every_shape_and_mask) {
    uint64_t turn = 0;
    for (const attention_shape &shape : small_shapes)
        for (size_t m = 0; m < masks; m++, turn++) check_problem(problem(shape, mask_cases[m], all_numbers[turn % types], 100 + turn));
}
CUDA_TEST(several_tiles) {
    uint64_t turn = 0;
    for (const attention_shape &shape : large_shapes)
        for (size_t m = turn % 3; m < masks; m += 3, turn++) check_problem(problem(shape, mask_cases[m], all_numbers[turn % types], 300 + turn));
}
CUDA_TEST(every_dtype) {
    for (size_t t = 0; t < types; t++) check_problem(problem({1, 2, 40, 40, 24, GAPS}, mask_cases[1], all_numbers[t], 400 + t));
}

/* Nobody to look, nothing to see, no sequence, no column. */
CUDA_TEST(empty) {
    const attention_shape shapes[] = {{0, 2, 5, 5, 8, DENSE}, {2, 2, 5, 0, 8, DENSE}, {2, 2, 0, 5, 8, DENSE}, {1, 2, 5, 5, 0, DENSE}};
    for (const attention_shape &shape : shapes)
        for (size_t m = 0; m < 2; m++) check_problem(problem(shape, mask_cases[m], all_numbers[m], 500));
}

/* What nobody sees, and queries that see nothing, may hold anything. */
static void poison_hidden(problem &p) {
    for (int64_t b = 0; b < p.shape.batch; b++)
        for (int64_t h = 0; h < p.shape.heads; h++) {
            std::vector<bool> seen((size_t)p.shape.keys);
            for (int64_t i = 0; i < p.shape.queries; i++) {
                bool any = false;
                for (int64_t j = 0; j < p.shape.keys; j++)
                    if (p.mask.sees(b, h, i, j)) any = seen[(size_t)j] = true;
                if (!any) p.poison(Q, b, h, i, i), p.poison(D_O, b, h, i, i + 1);
            }
            for (int64_t j = 0; j < p.shape.keys; j++)
                if (!seen[(size_t)j]) p.poison(K, b, h, j, j), p.poison(V, b, h, j, j + 1);
        }
}
CUDA_TEST(hidden_infinities) {
    const attention_shape shapes[] = {{2, 2, 20, 41, 9, GAPS}, {2, 1, 70, 67, 70, DENSE}};
    for (const attention_shape &shape : shapes)
        for (size_t m = 1; m < masks; m++)
            for (const numbers &type : {all_numbers[m % types], {AMP_F32, AMP_F16}}) {
                problem p(shape, mask_cases[m], type, 700 + m);
                if (shape.dim > 20 && !p.mask.kind.padding) continue;
                poison_hidden(p);
                check_problem(p);
            }
}

/* A key that is not finite spoils what the CPU backend says: the rows that see it. */
CUDA_TEST(seen_infinities) {
    for (int t : {Q, K, V, D_O})
        for (int kind = 0; kind < 3; kind++)
            for (size_t m = 0; m < 2; m++) {
                problem p({1, 1, 30, 30, 8, DENSE}, mask_cases[m], all_numbers[kind], 800);
                p.poison(t, 0, 0, 21, kind);
                check_problem(p);
            }
}

/* Scores of -inf only: a row like one that sees nothing. */
CUDA_TEST(lowest_scores) {
    for (size_t m = 0; m < 2; m++) {
        problem p({1, 1, 12, 12, 8, DENSE}, mask_cases[m], all_numbers[m], 805);
        for (int64_t i = 0; i < 12; i++) p.set(Q, 0, 0, i, 1), p.set(K, 0, 0, i, -HUGE_VALF);
        check_problem(p);
    }
}

/* A weight that underflows to 0 makes NaN of an infinity where nothing is hidden, and nothing where a mask hides. */
CUDA_TEST(weights_of_zero) {
    for (size_t m = 0; m < 2; m++) {
        problem p({1, 1, 30, 30, 8, DENSE}, mask_cases[m], all_numbers[0], 810);
        for (int64_t i = 0; i < 30; i++) p.set(Q, 0, 0, i, 20), p.set(K, 0, 0, i, i == 7 ? -20.0f : 0);
        p.set(V, 0, 0, 7, HUGE_VALF);
        cuda_compare c = cuda_on_both([&](cuda_side &s, std::string *out) { p.run(s, out); });
        for (size_t i = 0; i < 30 * 8; i++) {
            double mine = cuda_value(c.actual.data(), AMP_F32, i), cpu = cuda_value(c.expected.data(), AMP_F32, i);
            CHECK((mine != mine) == (cpu != cpu) && (cpu != cpu) == (m == 0));
        }
    }
}

/* Rounding the operands first changes no bit: that is what computing in a dtype means. */
CUDA_TEST(operands_are_rounded) {
    for (amp_dtype compute : {AMP_TF32, AMP_F16, AMP_BF16}) {
        problem p({1, 1, 33, 40, 12, DENSE}, mask_cases[1], {AMP_F32, compute}, 820), first = p;
        exact e(p);
        for (int t : {Q, K, V, D_O}) {
            first.in[t] = cuda_stored(std::vector<float>(e.in[t].begin(), e.in[t].end()), AMP_F32);
            CHECK(first.in[t] != p.in[t]);
        }
        cuda_side s(amp_cuda());
        std::string raw, rounded;
        p.run(s, &raw);
        first.run(s, &rounded);
        CHECK(raw == rounded);
    }
}

/* With every value 1, o is the sum of the rounded weights over that of the exact ones: 1 to fp32 accuracy, visibly not
   1 in bf16; with every do 1, dv is a sum of rounded probabilities: each key's, here of one query, is a bf16 number. */
CUDA_TEST(weights_are_rounded) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        problem p({1, 1, 1, 70, 8, DENSE}, mask_cases[0], {AMP_F32, bf16 ? AMP_BF16 : AMP_F32}, 830);
        for (int64_t j = 0; j < 70; j++) p.set(V, 0, 0, j, 1);
        p.set(D_O, 0, 0, 0, 1);
        cuda_side s(amp_cuda());
        std::string out;
        double rest = 0;
        p.run(s, &out);
        double off = fabs(cuda_value(out.data(), AMP_F32, 0) - 1);
        CHECK_MSG(bf16 ? off > 80 * u && off <= 1.0 / 256 + 80 * u : off <= 80 * u, "%g", off);
        for (size_t j = 0; j < 70; j++) {
            float dv = (float)cuda_value(out.data(), AMP_F32, 8 + 8 + 70 * 8 + 8 * j);
            rest += fabs(dv - amp_f32_from_bf16(amp_bf16_from_f32(dv, 0)));
        }
        CHECK_MSG((rest == 0) == (bf16 == 1), "%g", rest);
    }
}

/* Positions lie 2^30 elements apart.  The model never uses an address twice, and has 256 GiB of them until it starts anew. */
CUDA_TEST(far_away) {
    for (size_t m = 0; m < 2; m++) {
        coc_reset();
        check_problem(problem({1, 2, 3, 4, 20, FAR}, mask_cases[m], all_numbers[2], 600 + m));
    }
}

/* ---- The tensor cores' kernels: every mask they know, lengths around the sizes of their tiles, all rows of a tile. */

static const attention_shape flash_shapes[] = {
    {1, 1, 1, 1, 64, DENSE}, {1, 2, 63, 63, 128, PACKED}, {2, 1, 64, 64, 64, PACKED}, {1, 1, 65, 65, 128, PACKED},
    {2, 1, 130, 130, 64, PACKED}, {1, 1, 70, 200, 64, DENSE}, {1, 1, 200, 70, 128, DENSE},
};

/* A problem with these kernels, and no other. */
static void check_on_tensor_cores(problem p) {
    long before = CUDA_IS_MODEL ? coc_kernel_launches("ampc_flash") : 0;
    p.scale = fabsf(p.scale);
    check_problem(p);
    if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_flash") - before, coc_orders * (p.mask.kind.kind == AMP_MASK_ARBITRARY ? 5 : 3));
}

CUDA_TEST(tensor_cores) {
    uint64_t turn = 0;
    for (const attention_shape &shape : flash_shapes)
        for (size_t m = 0; m < masks; m++) {
            if (shape.queries > 100 && (m + turn) % 2) continue;
            if (turn++ % 2 && AMPT_SANITIZED) continue;         /* the same memory under other masks */
            check_on_tensor_cores(problem(shape, mask_cases[m], all_numbers[1 + turn % 2], 900 + turn));
        }
}

/* Tiles that are seen through global positions or by bits alone, or not at all. */
CUDA_TEST(tensor_cores_and_tiles) {
    const mask_case cases[] = {
        {"window 20, 70 global", AMP_MASK_WINDOW_GLOBAL, 0, 20, 70, 0, 0, 0},
        {"window 9, 40 global, padding", AMP_MASK_WINDOW_GLOBAL, 0, 9, 40, 1, 0, 0},
        {"window 20, 70 global, both ways", AMP_MASK_WINDOW_GLOBAL, 1, 20, 70, 0, 0, 0},
        {"window 5, 33 global, both ways, documents", AMP_MASK_WINDOW_GLOBAL, 1, 5, 33, 0, 1, 0},
        {"blocks", AMP_MASK_ARBITRARY, 0, 0, 0, 0, 0, 4},
        {"blocks, own, padding, documents", AMP_MASK_ARBITRARY, 0, 0, 0, 1, 1, 7},
    };
    const attention_shape shapes[] = {
        {1, 1, 300, 300, 64, PACKED}, {2, 2, 90, 260, 40, DENSE}, {1, 1, 260, 150, 128, DENSE}, {1, 1, 70, 100, 64, DENSE},
    };
    uint64_t turn = 0;
    for (const mask_case &m : cases)
        for (const attention_shape &shape : shapes) {
            if (turn++ / 4 % 2 && (AMPT_SANITIZED || shape.queries == 300)) continue;
            check_on_tensor_cores(problem(shape, m, all_numbers[1 + turn % 2], 1000 + turn));
        }
}

/* Heads of other sizes are filled up with zeros: in shared memory where rows are multiples of 16 aligned bytes, else in copies,
   which are made and taken back by one launch each. */
CUDA_TEST(tensor_cores_and_head_sizes) {
    uint64_t turn = 0;
    for (int64_t dim : {8, 16, 24, 40, 56, 72, 80, 96, 104, 120}) {
        turn++;
        attention_shape shape = {1, 2, 66, turn % 2 ? 66 : 70, dim, turn % 2 ? PACKED : DENSE};
        check_on_tensor_cores(problem(shape, mask_cases[turn % 4], all_numbers[1 + turn % 2], 1100 + turn));
    }
    if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_copy_heads"), 0);
    long before = CUDA_IS_MODEL ? coc_kernel_launches("ampc_flash") : 0;
    check_problem(problem({1, 1, 20, 20, 136, DENSE}, mask_cases[1], all_numbers[2], 1150));
    if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_flash"), before);
}

CUDA_TEST(tensor_cores_and_any_head_size) {
    const int arrangements[] = {GAPS, PACKED, DENSE};
    uint64_t turn = 0;
    for (int64_t dim : {20, 33, 50, 100})
        for (size_t m = turn % 2; m < masks; m += 2, turn++) {
            long before = CUDA_IS_MODEL ? coc_kernel_launches("ampc_copy_heads") : 0;
            attention_shape shape = {2, 2, 35, turn % 3 == 1 ? 35 : 70, dim, arrangements[turn % 3]};
            check_on_tensor_cores(problem(shape, mask_cases[m], all_numbers[1 + turn % 2], 1200 + turn));
            if (CUDA_IS_MODEL) CHECK_EQ(coc_kernel_launches("ampc_copy_heads") - before, coc_orders * 4);
        }
    for (int64_t dim : {1, 7, 64, 127})
        check_on_tensor_cores(problem({1, 1, 20, 20, dim, GAPS}, mask_cases[1], all_numbers[1 + dim % 2], 1250));
}

/* A token that is decoded sees all keys: they are not copied for it. */
CUDA_TEST(few_queries_copy_no_keys) {
    if (!CUDA_IS_MODEL) return;
    for (int64_t dim : {50, 64})
        for (int64_t queries : {1, 15, 16}) {
            long copies = coc_kernel_launches("ampc_copy_heads"), rows = coc_kernel_launches("ampc_flash_rows");
            check_problem(problem({1, 2, queries, 70, dim, DENSE}, mask_cases[0], all_numbers[2], 1300));
            CHECK_EQ(coc_kernel_launches("ampc_copy_heads") > copies, dim == 50 && queries == 16);
            CHECK_EQ(coc_kernel_launches("ampc_flash_rows") > rows, dim == 64 || queries == 16);
        }
}

/* What a run reads by cp.async, loads from shared memory and multiplies. */
static coc_counts work_of(const problem &p) {
    cuda_side s(amp_cuda());
    std::string out;
    coc_counts before = coc_count(), after;
    p.run(s, &out);
    after = coc_count();
    after.mmas -= before.mmas, after.ldmatrices -= before.ldmatrices, after.async_bytes -= before.async_bytes;
    after.wgmmas -= before.wgmmas, after.bulk_bytes -= before.bulk_bytes;
    return after;
}

/* A build without -arch is translated for newer GPUs, and its kernels for tensor cores are empty: others do their work. */
CUDA_TEST(tensor_cores_of_an_older_image) {
    static const struct { int cc, image; bool flash; } cases[] = {{90, 75, false}, {80, 75, false}, {75, 75, false}, {90, 80, true}};
    for (const auto &c : cases) {
        coc_set_devices(1, (size_t)1 << 28, 4, c.cc, c.image);
        problem p(flash_shapes[1], mask_cases[1], all_numbers[1], 77);
        p.scale = fabsf(p.scale);
        check_problem(p);
        CHECK_EQ(coc_kernel_launches("ampc_flash") > 0, c.flash);
    }
    usual_devices();
}

/* What kernels may ask of shared memory is settled when the device is opened: a launch is one call of the driver's. */
CUDA_TEST(shared_memory_is_allowed_at_open) {
    std::string out;
    problem p(flash_shapes[1], mask_cases[1], all_numbers[1], 78);
    p.scale = fabsf(p.scale);
    cuda_side gpu(amp_cuda());
    coc_reset_counts();
    p.run(gpu, &out);
    CHECK(coc_kernel_launches("ampc_flash") == 3);
    CHECK_EQ(coc_calls("cudaFuncGetAttributes") + coc_calls("cudaFuncSetAttribute"), 0);
}

/* What nobody sees may hold anything; what only some see spoils just their rows: with NaN and infinities in keys, values
   and queries, hidden from some of a tile, the same numbers are NaN as on the CPU. */
CUDA_TEST(tensor_cores_and_infinities) {
    for (size_t m : {(size_t)1, (size_t)4, (size_t)7, (size_t)8, (size_t)10, (size_t)11})
        for (int t : {Q, K, V, D_O}) {
            problem p({1, 1, 70, 70, m % 2 ? 48 : 64, PACKED}, mask_cases[m], all_numbers[1 + m % 2], 951);
            p.scale = 0.125f;
            p.poison(t, 0, 0, 40, t < V ? (int64_t)m % 3 : (int64_t)m + t);
            check_problem(p);
        }
    for (int bf16 = 0; bf16 < 2; bf16++) {                  /* weights that underflow to 0 */
        problem p({1, 1, 66, 66, 64, DENSE}, mask_cases[1], all_numbers[1 + bf16], 953);
        p.scale = 1;
        for (int64_t i = 0; i < 66; i++) p.set(Q, 0, 0, i, 3), p.set(K, 0, 0, i, i == 7 ? -3.0f : 0);
        for (int t : {V, K}) p.poison(t, 0, 0, 7, t == V ? 1 : 2);
        check_problem(p);
    }
    problem none({1, 1, 66, 66, 128, DENSE}, mask_cases[0], all_numbers[2], 952);
    none.scale = 0.1f;
    for (int t : {Q, K, V}) none.poison(t, 0, 0, 30 + t, t);
    check_problem(none);
}

/* A scale of 0 attends evenly to what the mask shows, and passes nothing to q and k. */
CUDA_TEST(scale_of_0) {
    for (size_t m = 0; m < masks; m++) {
        problem p(flash_shapes[m % 3 + 1], mask_cases[m], all_numbers[m % 3], 1300 + m);
        p.scale = 0;
        check_problem(p);
    }
}

/* Scores whose distance in powers of 2 fp32 does not tell apart: the largest has all the weight, and is not lost. */
CUDA_TEST(tensor_cores_and_large_scores) {
    const struct { float query, best, others; } cases[] = {
        {60000, 60000, 30000}, {60000, -30000, -60000}, {60000, 60000, 59000}, {-50000, -60000, 60000}, {300, 60000, 1000},
    };
    uint64_t turn = 0;
    for (const auto &c : cases)
        for (int64_t dim : {64, 128})
            for (int bf16 = 0; bf16 < 2; bf16++) {
                problem p({1, 1, 70, 140, dim, DENSE}, mask_cases[turn % 2], all_numbers[1 + bf16], 1400 + turn);
                size_t values = (size_t)p.count(O), at = 0;
                turn++;
                p.scale = 0.125f;
                for (int64_t i = 0; i < 70; i++) p.set(Q, 0, 0, i, c.query);
                for (int64_t j = 0; j < 140; j++) p.set(K, 0, 0, j, j == 65 ? c.best : c.others);
                cuda_compare both = cuda_on_both([&](cuda_side &s, std::string *out) { p.run(s, out); });
                auto near = [&](int64_t, double value) { return 2 * cuda_spacing(p.type.storage, value); };
                at = both.check_within(at, p.type.storage, (int64_t)values, near, "o");
                for (int t : {DQ, DK})          /* ds is 0 but for the rounding of o, of which delta is computed */
                    at = both.check_within(at, p.type.storage, p.count(t), [&](int64_t, double) { return 0.5 * 60000; }, "ds");
                at = both.check_within(at, p.type.storage, p.count(DV), [&](int64_t, double value) {
                    return 70 * ldexp(1, -20) + 4 * cuda_spacing(p.type.storage, value); }, "dv");
                /* tensor cores cut off each sum of 8 products or more */
                both.check_within(at, AMP_F32, p.rows(), [&](int64_t, double value) {
                    return fabs(value) * (ldexp(1, -21) + (CUDA_IS_MODEL ? 0 : ldexp((double)dim / 8, -23))); }, "lse");
            }
}

static void attention_tests() {
    RUN(every_shape_and_mask);
    RUN_CI(several_tiles);
    RUN(every_dtype);
    RUN(empty);
    RUN(hidden_infinities);
    RUN(seen_infinities);
    RUN(lowest_scores);
    RUN(weights_of_zero);
    RUN(operands_are_rounded);
    RUN(weights_are_rounded);
    RUN(far_away);
    RUN_CI(tensor_cores);
    RUN_CI(tensor_cores_and_tiles);
    RUN(tensor_cores_and_head_sizes);
    RUN_CI(tensor_cores_and_any_head_size); RUN(few_queries_copy_no_keys);
    RUN_CI(tensor_cores_and_large_scores); RUN(scale_of_0);
    RUN(tensor_cores_of_an_older_image);
    RUN(shared_memory_is_allowed_at_open);
    RUN(tensor_cores_and_infinities);
}
