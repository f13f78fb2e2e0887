/* t_cuda_training.cpp - runs whole training steps through amp.h on the CUDA backend, on the model GPU.  The numbers must be
 * those of the CPU backend within computed bounds.  The bits must be the same under every order of threads, blocks and
 * streams.  A steady step must not wait and not allocate.  When a call of CUDA fails, the program must be able to close
 * everything.
 *
 * The network is an embedding, LayerNorm, linear with GELU, linear, and cross-entropy.  It trains in fp16 with a loss scale
 * and AdamW. */
#include "test_cuda.h"
#include <algorithm>
#include <set>
#include <thread>
#include <unistd.h>

#define TRY(call) do { amp_result tried = (call); if (tried != AMP_OK) return tried; } while (0)

typedef std::vector<double> doubles;

enum { VOCAB = 37, CHANNELS = 40, HIDDEN = 72, BATCH = 3, SEQ = 8, ROWS = BATCH * SEQ, SAMPLES = 60 };
enum { TABLE, NORM_WEIGHT, NORM_BIAS, HIDDEN_WEIGHT, HIDDEN_BIAS, HEAD_WEIGHT, PARAMS };

/* ---- The host's side: memory that is counted, texts that are kept */

static long host_blocks, host_fail_alloc;
static int host_logs;

static void *counted_alloc(void *, size_t size, size_t align) {
    void *p = NULL;
    long left = __atomic_load_n(&host_fail_alloc, __ATOMIC_RELAXED);
    if (left > 0 && __atomic_sub_fetch(&host_fail_alloc, 1, __ATOMIC_RELAXED) == 0) return NULL;
    if (posix_memalign(&p, align < sizeof p ? sizeof p : align, size) != 0) return NULL;
    __atomic_add_fetch(&host_blocks, 1, __ATOMIC_RELAXED);
    return p;
}
static void counted_free(void *, void *p, size_t) {
    if (p != NULL) __atomic_sub_fetch(&host_blocks, 1, __ATOMIC_RELAXED);
    free(p);
}
static void count_log(void *, amp_log_level level, int, const char *) { host_logs += level == AMP_LOG_ERROR; }

static amp_desc settings(const amp_backend *backend, amp_level level) {
    amp_desc d = {};
    d.backend = backend;
    d.level = level;
    d.dtype = AMP_F16;
    d.allow_fallback = 1;
    d.threads = 1;
    d.system.alloc = counted_alloc;
    d.system.free = counted_free;
    d.logger.write = count_log;
    return d;
}

/* SAMPLES sequences of 16-bit tokens; each follows the one before by a rule that can be learnt. */
static const char *token_file() {
    static char path[256];
    uint16_t tokens[SAMPLES * SEQ + 1];
    if (path[0] != 0) return path;
    snprintf(path, sizeof path, "%s/amp_cuda_tokens_%ld", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
    for (uint32_t i = 0, token = 1; i < SAMPLES * SEQ + 1; i++) {
        token = i % 7 == 0 ? amp_random_u32(5, i) % VOCAB : (token * 5 + 3) % VOCAB;
        tokens[i] = (uint16_t)token;
    }
    CHECK_OK(amp_file_write_atomic(NULL, path, tokens, sizeof tokens));
    return path;
}

/* ---- The network */

struct network {
    amp_context *amp = NULL;
    amp_loader *loader = NULL;
    amp_optimizer *optimizer = NULL;
    amp_scaler *scaler = NULL;
    amp_param params[PARAMS];
    std::vector<void *> memory;
    amp_batch batch;
    int accumulation = 1;
    void *inputs = NULL, *targets = NULL;       /* where batches are copied to for a graph */
    amp_dropout_op dropout;
    amp_embedding_op embedding;
    amp_norm_op norm;
    amp_linear_op hidden, head;
    amp_cross_entropy_op loss;

    network() { memset((void *)params, 0, sizeof params); }
    network(const network &) = delete;
    network &operator=(const network &) = delete;
    ~network() {
        amp_optimizer_destroy(optimizer);
        amp_scaler_destroy(scaler);
        amp_loader_destroy(loader);
        for (void *p : memory) amp_free(amp, p);
        amp_close(amp);
    }

    amp_result room(void **p, int64_t bytes) {
        TRY(amp_alloc(amp, p, bytes));
        memory.push_back(*p);
        return AMP_OK;
    }
    amp_result tensor(amp_tensor *t, amp_dtype dtype, int64_t rows, int64_t cols) {
        void *p;
        TRY(room(&p, rows * cols * (int64_t)amp_dtype_size(dtype)));
        *t = cols == 1 ? amp_tensor1(p, dtype, rows) : amp_tensor2(p, dtype, rows, cols);
        return AMP_OK;
    }
    amp_result parameter(int index, const char *name, int64_t rows, int64_t cols, float low, float high) {
        amp_param *p = &params[index];
        amp_dtype dtype = amp_param_dtype(amp, index == NORM_WEIGHT || index == NORM_BIAS);
        std::string values = cuda_stored(cuda_random(rows * cols, (uint64_t)index + 1, low, high), dtype);
        p->name = name;
        TRY(tensor(&p->weight, dtype, rows, cols));
        TRY(tensor(&p->grad, index == HEAD_WEIGHT ? dtype : AMP_F32, rows, cols));
        TRY(amp_copy(amp, p->weight.data, values.data(), (int64_t)values.size(), AMP_COPY_TO_DEVICE));
        return amp_sync(amp);
    }
    amp_result parameters() {
        TRY(parameter(TABLE, "table", VOCAB, CHANNELS, -1, 1));
        TRY(parameter(NORM_WEIGHT, "norm.weight", CHANNELS, 1, 0.5f, 1.5f));
        TRY(parameter(NORM_BIAS, "norm.bias", CHANNELS, 1, -0.1f, 0.1f));
        TRY(parameter(HIDDEN_WEIGHT, "hidden.weight", HIDDEN, CHANNELS, -0.2f, 0.2f));
        TRY(parameter(HIDDEN_BIAS, "hidden.bias", HIDDEN, 1, -0.1f, 0.1f));
        TRY(parameter(HEAD_WEIGHT, "head.weight", VOCAB, HIDDEN, -0.2f, 0.2f));
        return amp_param_register(amp, params, PARAMS);
    }
    amp_result activations() {
        void *p;
        memset((void *)&embedding, 0, sizeof embedding);
        memset((void *)&norm, 0, sizeof norm);
        memset((void *)&hidden, 0, sizeof hidden);
        memset((void *)&head, 0, sizeof head);
        memset((void *)&loss, 0, sizeof loss);
        memset((void *)&dropout, 0, sizeof dropout);
        TRY(tensor(&embedding.y, AMP_F16, ROWS, CHANNELS));
        TRY(tensor(&norm.y, AMP_F16, ROWS, CHANNELS));
        TRY(tensor(&hidden.pre, AMP_F16, ROWS, HIDDEN));
        TRY(tensor(&hidden.y, AMP_F16, ROWS, HIDDEN));
        TRY(tensor(&head.y, AMP_F16, ROWS, VOCAB));
        TRY(tensor(&loss.dlogits, AMP_F16, ROWS, VOCAB));
        TRY(tensor(&head.dx, AMP_F16, ROWS, HIDDEN));
        TRY(tensor(&hidden.dx, AMP_F16, ROWS, CHANNELS));
        TRY(tensor(&norm.dx, AMP_F16, ROWS, CHANNELS));
        TRY(room(&p, ROWS * 4));
        norm.mean = (float *)p;
        TRY(room(&p, ROWS * 4));
        norm.rstd = (float *)p;
        TRY(room(&p, 4));
        loss.loss = (float *)p;
        embedding.table = &params[TABLE];
        norm.x = embedding.y, norm.weight = &params[NORM_WEIGHT], norm.bias = &params[NORM_BIAS];
        hidden.x = norm.y, hidden.weight = &params[HIDDEN_WEIGHT], hidden.bias = &params[HIDDEN_BIAS], hidden.act = AMP_ACT_GELU;
        head.x = hidden.y, head.weight = &params[HEAD_WEIGHT];
        loss.logits = head.y;
        head.dy = loss.dlogits, hidden.dy = head.dx, norm.dy = hidden.dx, embedding.dy = norm.dx;
        return AMP_OK;
    }
    amp_result open(const amp_desc &desc, int workers) {
        amp_loader_desc l = {};
        amp_scaler_desc s = {};
        amp_optimizer_desc o = {};
        TRY(amp_open(&amp, &desc));
        TRY(parameters());
        TRY(activations());
        l.path = token_file();
        l.format = AMP_TOKENS_U16;
        l.batch = BATCH;
        l.seq = SEQ;
        l.shuffle = 1;
        l.workers = workers;
        TRY(amp_loader_create(amp, &loader, &l));
        s.init_scale = 1024;
        s.growth_interval = 3;
        TRY(amp_scaler_create(amp, &scaler, &s));
        o.params = params;
        o.n_params = PARAMS;
        o.lr = 1e-2;
        o.weight_decay = 0.01;
        o.clip_norm = 1;
        o.accumulation = accumulation;
        TRY(amp_optimizer_create(amp, &optimizer, &o));
        return amp_sync(amp);
    }
    bool recompute = false;             /* LayerNorm and the hidden layer run again, over what was overwritten meanwhile */

    amp_result forward_backward() {
        TRY(amp_loader_next(loader, &batch));
        embedding.ids = batch.inputs;
        loss.labels = batch.targets;
        return compute();
    }
    /* Drops between the linears, in place, and takes batches from where a graph finds them. */
    amp_result for_graphs(float p) {
        dropout.x = dropout.y = hidden.y;
        dropout.dy = dropout.dx = head.dx;
        dropout.p = p;
        TRY(room(&inputs, ROWS * 4));
        TRY(room(&targets, ROWS * 4));
        embedding.ids = (const int32_t *)inputs;
        loss.labels = (const int32_t *)targets;
        return AMP_OK;
    }
    amp_result next_copied() {
        TRY(amp_loader_next(loader, &batch));
        TRY(amp_copy(amp, inputs, batch.inputs, ROWS * 4, AMP_COPY_ON_DEVICE));
        return amp_copy(amp, targets, batch.targets, ROWS * 4, AMP_COPY_ON_DEVICE);
    }
    amp_result evaluate() {
        amp_autocast_desc region = {};
        region.mode = AMP_MODE_INFERENCE;
        loss.dlogits.data = NULL;
        TRY(amp_autocast_begin(amp, &region));
        TRY(forward());
        loss.dlogits = head.dy;
        return amp_autocast_end(amp);
    }
    amp_result compute() {
        amp_autocast_desc region = {};
        loss.grad_scale = amp_scaler_scale_ptr(scaler);
        TRY(amp_autocast_begin(amp, &region));
        amp_result result = forward();
        amp_result ended = amp_autocast_end(amp);
        TRY(result);
        TRY(ended);
        if (recompute) TRY(forward_again());
        TRY(amp_linear_backward(amp, &head));
        if (dropout.p > 0) TRY(amp_dropout_backward(amp, &dropout));
        TRY(amp_linear_backward(amp, &hidden));
        TRY(amp_layernorm_backward(amp, &norm));
        return amp_embedding_backward(amp, &embedding);
    }
    amp_result forward() {
        TRY(amp_embedding(amp, &embedding));
        TRY(amp_layernorm(amp, &norm));
        TRY(amp_linear(amp, &hidden));
        if (dropout.p > 0) TRY(amp_dropout(amp, &dropout));
        TRY(amp_linear(amp, &head));
        return amp_cross_entropy(amp, &loss);
    }
    amp_result forward_again() {
        for (const amp_tensor *t : {&norm.y, &hidden.pre, &hidden.y})
            TRY(amp_fill(amp, t->data, 0xff, amp_tensor_count(t) * (int64_t)amp_dtype_size(t->dtype)));
        TRY(amp_fill(amp, norm.mean, 0xff, ROWS * 4));
        TRY(amp_fill(amp, norm.rstd, 0xff, ROWS * 4));
        TRY(amp_recompute_begin(amp));
        amp_result result = amp_layernorm(amp, &norm);
        if (result == AMP_OK) result = amp_linear(amp, &hidden);
        TRY(amp_recompute_end(amp));
        return result;
    }
    amp_result step(std::vector<amp_step_result> *outcomes) {
        TRY(amp_step(optimizer, scaler));
        for (amp_step_result o; amp_step_result_next(optimizer, &o);) outcomes->push_back(o);
        return AMP_OK;
    }

    /* What lies in device memory. */
    std::string bytes(const void *p, size_t size) {
        std::string out(size, 0);
        CHECK_OK(amp_copy(amp, &out[0], p, (int64_t)size, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
        return out;
    }
    std::string bytes(const amp_tensor &t) { return bytes(t.data, (size_t)amp_tensor_count(&t) * amp_dtype_size(t.dtype)); }
    doubles values(const void *p, amp_dtype dtype, int64_t n) {
        std::string raw = bytes(p, (size_t)n * amp_dtype_size(dtype));
        doubles out((size_t)n);
        for (size_t i = 0; i < out.size(); i++) out[i] = cuda_value(raw.data(), dtype, i);
        return out;
    }
    doubles values(const amp_tensor &t) { return values(t.data, t.dtype, amp_tensor_count(&t)); }
    /* A weight as a product in fp16 reads it. */
    doubles rounded(const amp_tensor &t) {
        doubles out = values(t);
        for (double &x : out) x = amp_f32_from_f16(amp_f16_from_f32((float)x, 0));
        return out;
    }
    std::string weights() {
        std::string all;
        for (const amp_param &p : params) {
            all += bytes(p.weight);
            if (p.master) all += bytes(p.master, (size_t)amp_tensor_count(&p.weight) * 4);
        }
        return all;
    }
};

/* ---- How far the GPU may be from the CPU.  Both start a step from the same weights; from there on every operation
   passes on what its inputs differ by, adds its own roundings (u = 2^-24 each, sums as in cuda_sum_bound; the GPU's
   exponential is within 16 u), and its result may round to a neighbouring number of its storage. */

static const double u = 1.0 / 16777216;

struct uncertain {
    doubles value, off;     /* the CPU's values; |the GPU's - the CPU's|: before the check the bound, then the difference */
    size_t cols;
    double v(size_t i, size_t j) const { return value[i * cols + j]; }
    double o(size_t i, size_t j) const { return off.empty() ? 0 : off[i * cols + j]; }
};

/* The differences of sum over k of a(i, k) b(k, j), n terms: those of the factors, and of the order of the sum. */
template <class A, class B> static double sum_off(size_t n, double added, A a, B b) {
    double passed = 0, magnitude = fabs(added);
    for (size_t k = 0; k < n; k++) {
        std::pair<double, double> x = a(k), y = b(k);           /* value, off */
        passed += fabs(x.first) * y.second + x.second * (fabs(y.first) + y.second);
        magnitude += (fabs(x.first) + x.second) * (fabs(y.first) + y.second);
    }
    return passed + cuda_sum_bound((int64_t)n + 2, magnitude);
}
static std::pair<double, double> at(const uncertain &x, size_t i, size_t j) { return {x.v(i, j), x.o(i, j)}; }
static std::pair<double, double> sure(double x) { return {x, 0}; }

static double sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }

/* gelu(x) = x s(t), t = x (c + d x^2), s the logistic function; its slope is s (1 + x (1 - s) t'), between -0.13 and
   1.13, and changes by at most 0.8 |dx| (at 0).  s has an error of 26 u on the two sides together. */
static double gelu_argument(double x) { return x * (1.5957691216057308 + 0.07135481282740843 * x * x); }
static double slope_of(double x) {
    double s = sigmoid(gelu_argument(x));
    return s * (1 + x * (1 - s) * (1.5957691216057308 + 0.21406443848222529 * x * x));
}
static double slope_error(double x) {
    double s = sigmoid(gelu_argument(x)), inner = fabs(x) * (1.5957691216057308 + 0.21406443848222529 * x * x);
    return 26 * u * s * (1 + inner) + 8 * u * (s + inner * s) + 1e-37 * (1 + inner);
}

struct expectation {
    network *cpu, *gpu;
    int step;
    uncertain embedded, normal, pre, hidden, logits, dlogits, dpre, dnormal, dembedded;
    doubles rstd, rstd_off, xhat, xhat_off;

    expectation(network *c, network *g, int number) : cpu(c), gpu(g), step(number) {
        CHECK(cpu->bytes(cpu->batch.inputs, ROWS * 4) == gpu->bytes(gpu->batch.inputs, ROWS * 4));
        CHECK(cpu->bytes(cpu->batch.targets, ROWS * 4) == gpu->bytes(gpu->batch.targets, ROWS * 4));
        forward();
        backward();
    }
    /* off: bounds before the rounding to storage, from now on the differences. */
    void settle(const char *what, uncertain *x, const doubles &theirs, amp_dtype dtype) {
        double worst = 0;
        CHECK(theirs.size() == x->value.size() && theirs.size() == x->off.size());
        for (size_t i = 0; i < theirs.size() && i < x->off.size(); i++) {
            double d = fabs(theirs[i] - x->value[i]), bound = x->off[i];
            if (bound > 0) bound += cuda_spacing(dtype, fabs(x->value[i]) + bound);
            CHECK_MSG(d <= bound, "%s, step %d, element %zu: %.9g, the CPU has %.9g, bound %.3g", what, step, i, theirs[i], x->value[i], bound);
            if (bound > 0) worst = fmax(worst, d / bound);
            x->off[i] = d;
        }
        ampt_figure(what, worst, 1);
    }
    void settle(const char *what, uncertain *x, const amp_tensor &theirs) { settle(what, x, gpu->values(theirs), theirs.dtype); }
    void get(uncertain *x, const amp_tensor &t) {
        x->value = cpu->values(t);
        x->off.assign(x->value.size(), 0.0);
        x->cols = (size_t)t.shape[1];
    }
    void forward() {
        doubles w1 = cpu->rounded(cpu->params[HIDDEN_WEIGHT].weight), b1 = cpu->values(cpu->params[HIDDEN_BIAS].weight);
        doubles w2 = cpu->rounded(cpu->params[HEAD_WEIGHT].weight);
        get(&embedded, cpu->embedding.y);
        settle("embedding", &embedded, gpu->embedding.y);      /* both round the same numbers once */
        get(&normal, cpu->norm.y);
        normalise();
        get(&pre, cpu->hidden.pre);
        get(&hidden, cpu->hidden.y);
        for (size_t i = 0; i < ROWS; i++)
            for (size_t j = 0; j < HIDDEN; j++) {
                double off = sum_off(CHANNELS, b1[j], [&](size_t k) { return at(normal, i, k); },
                                     [&](size_t k) { return sure(w1[j * CHANNELS + k]); });
                off += ldexp(fabs(b1[j]), -11);         /* a bias is rounded to the product's storage first */
                pre.off[i * HIDDEN + j] = off;
                /* the hardware's tanh, in a product's epilogue, is within 2^-11 */
                hidden.off[i * HIDDEN + j] = 1.13 * off + 28 * u * fabs(hidden.v(i, j)) + ldexp(fabs(pre.v(i, j)), -12) + 1e-37;
            }
        settle("hidden.pre", &pre, gpu->hidden.pre);
        settle("hidden", &hidden, gpu->hidden.y);
        get(&logits, cpu->head.y);
        for (size_t i = 0; i < ROWS; i++)
            for (size_t j = 0; j < VOCAB; j++)
                logits.off[i * VOCAB + j] = sum_off(HIDDEN, 0, [&](size_t k) { return at(hidden, i, k); },
                                                    [&](size_t k) { return sure(w2[j * HIDDEN + k]); });
        settle("logits", &logits, gpu->head.y);
        losses();
    }
    /* mean and rstd: two sums of the row each; y = (x - mean) rstd weight + bias. */
    void normalise() {
        doubles w = cpu->values(cpu->params[NORM_WEIGHT].weight), b = cpu->values(cpu->params[NORM_BIAS].weight);
        doubles mean = cpu->values(cpu->norm.mean, AMP_F32, ROWS), their_mean = gpu->values(gpu->norm.mean, AMP_F32, ROWS);
        doubles their_rstd = gpu->values(gpu->norm.rstd, AMP_F32, ROWS);
        rstd = cpu->values(cpu->norm.rstd, AMP_F32, ROWS);
        for (size_t i = 0; i < ROWS; i++) {
            double size = 0, mean_off, variance = 0, relative;
            for (size_t j = 0; j < CHANNELS; j++) {
                size += fabs(embedded.v(i, j));
                variance += pow(embedded.v(i, j) - mean[i], 2) / CHANNELS;
            }
            mean_off = cuda_sum_bound(CHANNELS, size) / CHANNELS + 4 * u * fabs(mean[i]);
            relative = (cuda_sum_bound(CHANNELS + 6, variance) + 2 * mean_off * mean_off) / (variance + 1e-5) + 10 * u;
            rstd_off.push_back(fabs(rstd[i] - their_rstd[i]));
            CHECK(fabs(mean[i] - their_mean[i]) <= mean_off && rstd_off[i] <= relative * rstd[i]);
            mean_off = fabs(mean[i] - their_mean[i]);
            for (size_t j = 0; j < CHANNELS; j++) {
                double far = fabs(embedded.v(i, j) - mean[i]), off = rstd[i] * (mean_off + 2 * u * far) + far * rstd_off[i];
                xhat.push_back((embedded.v(i, j) - mean[i]) * rstd[i]);
                xhat_off.push_back(off);
                normal.off[i * CHANNELS + j] = fabs(w[j]) * off + 6 * u * (far * rstd[i] * fabs(w[j]) + fabs(b[j]));
            }
        }
        settle("norm", &normal, gpu->norm.y);
    }
    /* A row's probabilities move by at most a factor exp(2 e) where its logits move by e, its loss by 2 e. */
    void losses() {
        doubles labels = cpu->values(cpu->batch.targets, AMP_I32, ROWS);
        double scale = (double)amp_scaler_scale(cpu->scaler) / ROWS, loss_off = 0, size = 0;
        get(&dlogits, cpu->loss.dlogits);
        for (size_t i = 0; i < ROWS; i++) {
            double max = -HUGE_VAL, sum = 0, e = 0, inherited = 0, relative, label = logits.v(i, (size_t)labels[i]);
            for (size_t j = 0; j < VOCAB; j++) max = fmax(max, logits.v(i, j)), e = fmax(e, logits.o(i, j));
            for (size_t j = 0; j < VOCAB; j++) {
                double p = exp(logits.v(i, j) - max);
                sum += p;
                inherited += p * (16 * u + 4 * u * (max - logits.v(i, j)));
            }
            relative = inherited / sum + cuda_sum_bound(VOCAB + 8, 1) + 8 * u;
            loss_off += 2 * e + relative + 8 * u * (fabs(log(sum)) + fabs(max) + fabs(label));
            size += fabs(log(sum) + max - label);
            for (size_t j = 0; j < VOCAB; j++) {
                double p = exp(logits.v(i, j) - max) / sum, own = 16 * u + 4 * u * (max - logits.v(i, j));
                double one = (double)j == labels[i] ? 1 : 0;
                dlogits.off[i * VOCAB + j] = scale * (p * (exp(2 * e) - 1 + (own + relative) * exp(2 * e)) + 4 * u * (p + one) + 1e-37);
            }
        }
        uncertain mean = {cpu->values(cpu->loss.loss, AMP_F32, 1), {(loss_off + cuda_sum_bound(ROWS + 2, size)) / ROWS}, 1};
        settle("loss", &mean, gpu->values(gpu->loss.loss, AMP_F32, 1), AMP_F32);
        settle("dlogits", &dlogits, gpu->loss.dlogits);
    }
    void gradient(int param, const std::function<double(size_t, size_t)> &off) {
        const amp_tensor &t = cpu->params[param].grad;
        uncertain x = {cpu->values(t), doubles(), (size_t)(t.ndim == 2 ? t.shape[1] : 1)};
        for (size_t i = 0; i < x.value.size(); i++) x.off.push_back(off(i / x.cols, i % x.cols));
        settle(cpu->params[param].name, &x, gpu->params[param].grad);
    }
    void backward() {
        doubles w1 = cpu->rounded(cpu->params[HIDDEN_WEIGHT].weight), w2 = cpu->rounded(cpu->params[HEAD_WEIGHT].weight);
        gradient(HEAD_WEIGHT, [&](size_t i, size_t j) {
            return sum_off(ROWS, 0, [&](size_t k) { return at(dlogits, k, i); }, [&](size_t k) { return at(hidden, k, j); });
        });
        get(&dpre, cpu->hidden.dy);                     /* overwritten: the gradient before the activation */
        for (size_t i = 0; i < ROWS; i++)
            for (size_t j = 0; j < HIDDEN; j++) {
                double x = pre.v(i, j), e = pre.o(i, j), slope = slope_of(x), d = 0, off;
                for (size_t k = 0; k < VOCAB; k++) d += dlogits.v(i, k) * w2[k * HIDDEN + j];
                off = sum_off(VOCAB, 0, [&](size_t k) { return at(dlogits, i, k); }, [&](size_t k) { return sure(w2[k * HIDDEN + j]); });
                off += cuda_spacing(AMP_F16, fabs(d) + off);
                d = fabs(d) + off;                      /* the CPU's own, rounded, is not kept */
                dpre.off[i * HIDDEN + j] = (fabs(slope) + 0.8 * e) * off + d * (0.8 * e + slope_error(x)) + 2 * u * d;
            }
        settle("hidden.dpre", &dpre, gpu->hidden.dy);
        gradient(HIDDEN_WEIGHT, [&](size_t i, size_t j) {
            return sum_off(ROWS, 0, [&](size_t k) { return at(dpre, k, i); }, [&](size_t k) { return at(normal, k, j); });
        });
        gradient(HIDDEN_BIAS, [&](size_t i, size_t) {
            return sum_off(ROWS, 0, [&](size_t k) { return at(dpre, k, i); }, [&](size_t) { return sure(1); });
        });
        get(&dnormal, cpu->hidden.dx);
        for (size_t i = 0; i < ROWS; i++)
            for (size_t j = 0; j < CHANNELS; j++)
                dnormal.off[i * CHANNELS + j] = sum_off(HIDDEN, 0, [&](size_t k) { return at(dpre, i, k); },
                                                        [&](size_t k) { return sure(w1[k * CHANNELS + j]); });
        settle("hidden.dx", &dnormal, gpu->hidden.dx);
        normalise_backward();
    }
    /* dx = rstd (g - mean(g) - h mean(g h)), g = weight dy, h = the normalised x. */
    void normalise_backward() {
        doubles w = cpu->values(cpu->params[NORM_WEIGHT].weight);
        doubles ids = cpu->values(cpu->batch.inputs, AMP_I32, ROWS);
        auto h = [&](size_t i, size_t j) { return std::pair<double, double>(xhat[i * CHANNELS + j], xhat_off[i * CHANNELS + j]); };
        get(&dembedded, cpu->norm.dx);
        for (size_t i = 0; i < ROWS; i++) {
            auto g = [&](size_t j) { return std::pair<double, double>(w[j] * dnormal.v(i, j), fabs(w[j]) * (dnormal.o(i, j) + 2 * u * fabs(dnormal.v(i, j)))); };
            double mean = 0, product = 0, mean_off = sum_off(CHANNELS, 0, g, [](size_t) { return sure(1); }) / CHANNELS;
            double product_off = sum_off(CHANNELS, 0, g, [&](size_t j) { return h(i, j); }) / CHANNELS;
            for (size_t j = 0; j < CHANNELS; j++) mean += g(j).first / CHANNELS, product += g(j).first * xhat[i * CHANNELS + j] / CHANNELS;
            for (size_t j = 0; j < CHANNELS; j++) {
                double hj = fabs(h(i, j).first), size = fabs(g(j).first) + fabs(mean) + hj * fabs(product);
                double off = g(j).second + mean_off + hj * product_off + h(i, j).second * (fabs(product) + product_off) + 8 * u * size;
                dembedded.off[i * CHANNELS + j] = rstd[i] * off + rstd_off[i] * (fabs(dembedded.v(i, j)) / rstd[i] + off);
            }
        }
        settle("norm.dx", &dembedded, gpu->norm.dx);
        gradient(NORM_WEIGHT, [&](size_t j, size_t) {
            return sum_off(ROWS, 0, [&](size_t k) { return at(dnormal, k, j); }, [&](size_t k) { return h(k, j); });
        });
        gradient(NORM_BIAS, [&](size_t j, size_t) {
            return sum_off(ROWS, 0, [&](size_t k) { return at(dnormal, k, j); }, [](size_t) { return sure(1); });
        });
        gradient(TABLE, [&](size_t i, size_t j) {
            return sum_off(ROWS, 0, [&](size_t k) { return at(dembedded, k, j); }, [&](size_t k) { return sure(ids[k] == (double)i); });
        });
    }
};

/* ---- Tests */

static int cpu_has_fma() {
    amp_machine machine;
    return amp_machine_probe(&machine) == AMP_OK && machine.cpu.path >= AMP_CPU_AVX2;
}

static void compare_outcomes(const std::vector<amp_step_result> &cpu, const std::vector<amp_step_result> &gpu) {
    CHECK_EQ(gpu.size(), cpu.size());
    for (size_t i = 0; i < gpu.size() && i < cpu.size(); i++) {
        const amp_step_result &a = cpu[i], &b = gpu[i];
        CHECK(a.step == b.step && a.applied == b.applied && a.scale == b.scale && a.lr == b.lr && a.total_skips == b.total_skips);
        CHECK((a.first_bad == NULL) == (b.first_bad == NULL) && (a.first_bad == NULL || strcmp(a.first_bad, b.first_bad) == 0));
        /* sums in fp64, rounded once; the coefficient is a quotient of it */
        if (a.applied) CHECK(fabsf(a.norm - b.norm) <= ldexpf(a.norm, -23) && fabsf(a.clip_coef - b.clip_coef) <= ldexpf(a.clip_coef, -22));
    }
}

/* The GPU gets the CPU's gradients before each step, so that the next one starts from the same weights. */
static void same_numbers(amp_level level) {
    network cpu, gpu;
    std::vector<amp_step_result> outcomes[2];
    double first = 0, last = 0;
    CHECK_OK(cpu.open(settings(amp_cpu(), level), AMP_NO_WORKERS));
    CHECK_OK(gpu.open(settings(amp_cuda(), level), AMP_NO_WORKERS));
    for (int i = 0; i < 8; i++) {
        CHECK_OK(cpu.forward_backward());
        CHECK_OK(gpu.forward_backward());
        expectation(&cpu, &gpu, i);
        last = cpu.values(cpu.loss.loss, AMP_F32, 1)[0];
        if (i == 0) first = last;
        for (int p = 0; p < PARAMS; p++) {
            std::string grad = cpu.bytes(cpu.params[p].grad);
            float bad = INFINITY;
            if (p == NORM_BIAS && i == 5) {
                memcpy(&grad[8], &bad, 4);
                CHECK_OK(amp_copy(cpu.amp, cpu.params[p].grad.data, grad.data(), (int64_t)grad.size(), AMP_COPY_TO_DEVICE));
            }
            CHECK_OK(amp_copy(gpu.amp, gpu.params[p].grad.data, grad.data(), (int64_t)grad.size(), AMP_COPY_TO_DEVICE));
            CHECK_OK(amp_sync(gpu.amp));
        }
        CHECK_OK(cpu.step(&outcomes[0]));
        CHECK_OK(gpu.step(&outcomes[1]));
        CHECK_MSG(cpu.weights() == gpu.weights(), "weights after step %d", i);
    }
    CHECK_OK(amp_step_result_flush(cpu.optimizer));
    CHECK_OK(amp_step_result_flush(gpu.optimizer));
    for (amp_step_result o; amp_step_result_next(cpu.optimizer, &o);) outcomes[0].push_back(o);
    for (amp_step_result o; amp_step_result_next(gpu.optimizer, &o);) outcomes[1].push_back(o);
    compare_outcomes(outcomes[0], outcomes[1]);
    CHECK(outcomes[1].size() == 8 && !outcomes[1][5].applied && strcmp(outcomes[1][5].first_bad, "norm.bias") == 0);
    CHECK_MSG(last < first - 0.2, "the loss went from %g to %g", first, last);
}
CUDA_TEST(same_numbers_as_the_cpu) {
    if (!cpu_has_fma()) SKIP("the CPU has no fused multiply-add, as the GPU does, to compare with");
    same_numbers(AMP_LEVEL_O1);
    same_numbers(AMP_LEVEL_O2);
}

/* Six steps, one of them with an overflow; the GPU runs late, early, and other streams first. */
CUDA_TEST(every_order) {
    std::string differs = coc_every_order([](std::string *results) {
        network gpu;
        std::vector<amp_step_result> outcomes;
        CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O2), 2));
        for (int i = 0; i < 6; i++) {
            CHECK_OK(gpu.forward_backward());
            results->append(gpu.bytes(gpu.loss.loss, 4));
            if (i == 3) CHECK_OK(amp_fill(gpu.amp, gpu.params[HEAD_WEIGHT].grad.data, 0x7e, 2));
            CHECK_OK(gpu.step(&outcomes));
        }
        results->append(gpu.weights());
        for (const amp_step_result &o : outcomes) {
            results->append((const char *)&o.norm, sizeof o.norm);
            results->append((const char *)&o.scale, sizeof o.scale);
        }
    });
    CHECK_MSG(differs.empty(), "%s", differs.c_str());
}

CUDA_TEST(recomputing_has_the_same_bits) {
    for (amp_level level : {AMP_LEVEL_O1, AMP_LEVEL_O2}) {
        std::string results[2];
        for (int again = 0; again < 2; again++) {
            network gpu;
            std::vector<amp_step_result> outcomes;
            CHECK_OK(gpu.open(settings(amp_cuda(), level), AMP_NO_WORKERS));
            gpu.recompute = again;
            for (int i = 0; i < 4; i++) {
                CHECK_OK(gpu.forward_backward());
                results[again] += gpu.bytes(gpu.loss.loss, 4);
                for (const amp_param &p : gpu.params) results[again] += gpu.bytes(p.grad);
                CHECK_OK(gpu.step(&outcomes));
            }
            results[again] += gpu.weights();
        }
        CHECK(results[0] == results[1]);
    }
}

/* With a GPU that keeps up, whole steps with data, loss and outcomes neither wait nor allocate. */
CUDA_TEST(steady_step_does_not_wait) {
    for (int workers : {AMP_NO_WORKERS, 2}) {
        network gpu;
        std::vector<amp_step_result> outcomes;
        CHECK_OK(gpu.open(settings(amp_cuda(), workers == 2 ? AMP_LEVEL_O1 : AMP_LEVEL_O2), workers));
        coc_set_patience(0);
        for (int i = 0; i < 12; i++) {
            if (i == 4) coc_reset_counts();
            CHECK_OK(gpu.forward_backward());
            CHECK_OK(gpu.step(&outcomes));
        }
        coc_set_patience(1);
        if (!CUDA_IS_MODEL) continue;
        coc_counts c = coc_count();
        CHECK_MSG(c.synchronising == 0, "%s", coc_synchronising_calls().c_str());
        CHECK_EQ(c.allocations, 0);
        CHECK_EQ(c.frees, 0);
        if (workers < 0) CHECK_EQ(c.copies, 2 * 8);         /* a batch and an outcome; with workers one may be ahead */
        CHECK_EQ(outcomes.size(), 10);
    }
}

/* ---- The optimizer writes the 16-bit copies of fp32 weights */

static int64_t weight_casts() { return coc_kernel_launches("ampc_f16, float>") + coc_kernel_launches("ampc_bf16, float>"); }

static std::string cast_of(network &n, const amp_param &p, amp_dtype dtype) {
    std::string wide = n.bytes(p.weight), low((size_t)amp_tensor_count(&p.weight) * 2, 0);
    CHECK_OK(amp_convert(&low[0], dtype, wide.data(), AMP_F32, amp_tensor_count(&p.weight), NULL, NULL));
    return low;
}
/* The copy that products read is the weight's, and nothing was cast for this look. */
static void check_copies(network &n, const char *when) {
    amp_cache_info before, after;
    CHECK_OK(amp_cast_cache_info(n.amp, &before));
    for (int i : {HIDDEN_WEIGHT, HIDDEN_BIAS, HEAD_WEIGHT}) {
        amp_tensor copy;
        CHECK_OK(amp_autocast_cast(n.amp, &n.params[i], AMP_F16, &copy));
        CHECK_MSG(n.bytes(copy) == cast_of(n, n.params[i], AMP_F16), "%s: parameter %d", when, i);
    }
    CHECK_OK(amp_cast_cache_info(n.amp, &after));
    CHECK_MSG(after.misses == before.misses, "%s: %lld casts", when, (long long)(after.misses - before.misses));
}

/* A steady step at O1 casts no weight, and the copies are what casts would make, after skipped steps too. */
CUDA_TEST(steady_step_casts_no_weight) {
    network gpu;
    std::vector<amp_step_result> outcomes;
    float bad = INFINITY, good = 0.125f;
    amp_cache_info info;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
    for (int i = 0; i < 12; i++) {
        if (i == 1) coc_reset_counts();         /* the first step measures products too */
        if (i == 6 || i == 7) {                 /* the host writes a weight: step 6 is skipped */
            CHECK_OK(amp_copy(gpu.amp, gpu.params[HEAD_WEIGHT].weight.data, i == 6 ? &bad : &good, 4, AMP_COPY_TO_DEVICE));
            CHECK_OK(amp_sync(gpu.amp));
            amp_param_changed(&gpu.params[HEAD_WEIGHT]);
        }
        if (i == 9) amp_cast_cache_clear(gpu.amp);
        CHECK_OK(gpu.forward_backward());
        CHECK_OK(gpu.step(&outcomes));
        if (CUDA_IS_MODEL && i > 0) CHECK_EQ(weight_casts(), i < 6 ? 0 : i == 6 ? 1 : i < 9 ? 2 : 5);
        check_copies(gpu, i == 6 ? "a skipped step" : "a step");
    }
    CHECK_OK(amp_step_result_flush(gpu.optimizer));
    CHECK_OK(amp_cast_cache_info(gpu.amp, &info));
    CHECK_EQ(info.misses, 3 + 2 + 3);              /* two weights and the bias that is added to 16-bit rows */
    CHECK_EQ(info.new_inf, 0);                  /* infinity stays infinity */
}

/* With and without copies the same bits: all optimizers, moments in fp32 and bf16, micro-batches, fp16 and bf16. */
CUDA_TEST(copies_change_no_bits) {
    for (int variant = 0; variant < 6; variant++) {
        amp_optimizer_kind kind = variant > 3 ? AMP_LION : variant & 1 ? AMP_SGD : AMP_ADAMW;
        std::string weights[2];
        for (int cached = 0; cached < 2; cached++) {
            network gpu;
            std::vector<amp_step_result> outcomes;
            amp_desc d = settings(amp_cuda(), AMP_LEVEL_O1);
            amp_optimizer_desc o = {};
            d.disable_cache = !cached;
            gpu.accumulation = 1 + (variant == 3);
            CHECK_OK(gpu.open(d, AMP_NO_WORKERS));
            amp_optimizer_destroy(gpu.optimizer);
            o.params = gpu.params, o.n_params = PARAMS;
            o.kind = kind;
            o.lr = 1e-2, o.momentum = kind == AMP_SGD ? 0.9 : 0, o.accumulation = gpu.accumulation;
            o.moments = variant & 2 || variant == 5 ? AMP_BF16 : AMP_F32;
            CHECK_OK(amp_optimizer_create(gpu.amp, &gpu.optimizer, &o));
            for (int i = 0; i < 6; i++) {
                CHECK_OK(gpu.forward_backward());
                CHECK_OK(gpu.step(&outcomes));
                if (cached && i % gpu.accumulation == 0) check_copies(gpu, "a step");
            }
            weights[cached] = gpu.weights();
        }
        CHECK_MSG(weights[0] == weights[1], "variant %d", variant);
    }
}

/* A copy follows its weight while it is used, is counted where it becomes infinite, and is nobody else's affair: a frozen
   parameter, one without a gradient in this step, one in another context, one in two dtypes. */
CUDA_TEST(copies_that_are_used) {
    enum { USED, ONCE, FROZEN, IDLE, TWICE, ALL, N = 24 };
    static const char *const names[ALL] = {"used", "once", "frozen", "idle", "twice"};
    network other, gpu;                         /* networks for what they give back */
    CHECK_OK(amp_open(&gpu.amp, std::vector<amp_desc>(1, settings(amp_cuda(), AMP_LEVEL_O1)).data()));
    CHECK_OK(other.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
    CHECK_OK(other.forward_backward());
    std::vector<float> weights(N, 65000), gradients(N, -100);
    amp_param params[ALL];
    amp_optimizer *optimizer;
    amp_optimizer_desc o = {};
    amp_cache_info info;
    memset((void *)params, 0, sizeof params);
    for (int i = 0; i < ALL; i++) {
        params[i].name = names[i];
        CHECK_OK(gpu.tensor(&params[i].weight, AMP_F32, N, 1));
        if (i != FROZEN) CHECK_OK(gpu.tensor(&params[i].grad, AMP_F32, N, 1));
        CHECK_OK(amp_copy(gpu.amp, params[i].weight.data, weights.data(), N * 4, AMP_COPY_TO_DEVICE));
        if (i != FROZEN) CHECK_OK(amp_copy(gpu.amp, params[i].grad.data, gradients.data(), N * 4, AMP_COPY_TO_DEVICE));
    }
    CHECK_OK(amp_param_register(gpu.amp, params, ALL));
    o.params = params, o.n_params = ALL;
    o.kind = AMP_SGD, o.lr = 1;
    CHECK_OK(amp_optimizer_create(gpu.amp, &optimizer, &o));
    for (int step = 0; step < 8; step++) {
        amp_tensor copy, half;
        for (int i = 0; i < ALL; i++) {
            if (i == ONCE && step > 0) continue;
            CHECK_OK(amp_autocast_cast(gpu.amp, &params[i], AMP_BF16, &copy));
            CHECK(gpu.bytes(copy) == cast_of(gpu, params[i], AMP_BF16));
            if (i != TWICE) continue;
            CHECK_OK(amp_autocast_cast(gpu.amp, &params[i], AMP_F16, &half));       /* the one used last is written along */
            CHECK(gpu.bytes(half) == cast_of(gpu, params[i], AMP_F16));
        }
        for (int i = 0; i < ALL; i++)
            if (i != FROZEN && (i != IDLE || step == 0)) (void)amp_param_accumulate(&params[i]);
        coc_reset_counts();
        CHECK_OK(amp_optimizer_step(optimizer, NULL));
        if (CUDA_IS_MODEL) CHECK_EQ(weight_casts(), 0);
        CHECK_OK(amp_cast_cache_info(gpu.amp, &info));
        CHECK_EQ(info.misses, 6 + step);                        /* each parameter once, and TWICE's other copy */
        /* 65000 + 100 (step + 1) is beyond fp16's range from the sixth step on, in one copy */
        CHECK_EQ(info.new_inf, step < 5 ? 0 : (step - 4) * N);
    }
    amp_optimizer_destroy(optimizer);
    std::vector<amp_step_result> outcomes;
    CHECK_OK(other.step(&outcomes));
    check_copies(other, "another context's step");
}

/* A graph steps the parameters that had a gradient when it was captured, whatever steps outside it had. */
CUDA_TEST(graphs_keep_what_they_step) {
    enum { N = 24 };
    std::string weights[2];
    for (int captured = 0; captured < 2; captured++) {
        network gpu;                            /* for what it gives back */
        amp_optimizer *optimizer;
        amp_optimizer_desc o = {};
        amp_graph *graph[2] = {NULL, NULL};
        amp_param params[2];
        std::vector<float> ones(N, 1);
        CHECK_OK(amp_open(&gpu.amp, std::vector<amp_desc>(1, settings(amp_cuda(), AMP_LEVEL_O1)).data()));
        memset((void *)params, 0, sizeof params);
        for (int i = 0; i < 2; i++) {
            params[i].name = i ? "sometimes" : "always";
            CHECK_OK(gpu.tensor(&params[i].weight, AMP_F32, N, 1));
            CHECK_OK(gpu.tensor(&params[i].grad, AMP_F32, N, 1));
            for (void *p : {params[i].weight.data, params[i].grad.data}) CHECK_OK(amp_copy(gpu.amp, p, ones.data(), N * 4, AMP_COPY_TO_DEVICE));
        }
        CHECK_OK(amp_param_register(gpu.amp, params, 2));
        o.params = params, o.n_params = 2, o.kind = AMP_SGD, o.lr = 0.125, o.momentum = 0.5;
        CHECK_OK(amp_optimizer_create(gpu.amp, &optimizer, &o));
        auto step = [&](int both) {
            for (int i = 0; i <= both; i++) (void)amp_param_accumulate(&params[i]);
            CHECK_OK(amp_step(optimizer, NULL));
        };
        step(1);
        for (int both = 0; both < 2 && captured; both++) {
            CHECK_OK(amp_graph_begin(gpu.amp));
            step(both);
            CHECK_OK(amp_graph_end(gpu.amp, &graph[both]));
        }
        for (int both : {1, 0, 1, 1, 0}) {
            if (captured) CHECK_OK(amp_graph_launch(graph[both]));
            else step(both);
            step(0);
        }
        CHECK_OK(amp_sync(gpu.amp));
        weights[captured] = gpu.bytes(params[0].weight) + gpu.bytes(params[1].weight);
        for (amp_graph *g : graph) amp_graph_destroy(g);
        amp_optimizer_destroy(optimizer);
    }
    CHECK(weights[0] == weights[1]);
}

/* A captured step casts nothing either once one has run before it; what the host changes between launches, or by its own
   work inside the graph, is cast before the launch. */
static std::string copies_in_graph(bool captured, bool own_work) {
    network gpu;
    amp_graph *graph = NULL;
    float other = 0.25f;
    void *value;
    std::string result;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
    CHECK_OK(gpu.for_graphs(0));
    CHECK_OK(gpu.room(&value, 4));
    CHECK_OK(amp_copy(gpu.amp, value, &other, 4, AMP_COPY_TO_DEVICE));
    const amp_param *head = &gpu.params[HEAD_WEIGHT];
    auto step = [&] {
        CHECK_OK(gpu.compute());
        CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
        if (!own_work) return;
        CHECK_OK(amp_copy(gpu.amp, (char *)head->weight.data + 8, value, 4, AMP_COPY_ON_DEVICE));
        amp_param_changed(&gpu.params[HEAD_WEIGHT]);
    };
    for (int i = 0; i < 10; i++) {
        CHECK_OK(gpu.next_copied());
        if (i == 5) {
            CHECK_OK(amp_copy(gpu.amp, gpu.params[HIDDEN_WEIGHT].weight.data, value, 4, AMP_COPY_ON_DEVICE));
            amp_param_changed(&gpu.params[HIDDEN_WEIGHT]);
        }
        if (i == 7) amp_cast_cache_clear(gpu.amp);
        if (i == 1 || i == 8) CHECK_OK(gpu.evaluate());         /* casts what is out of date */
        if (captured && i == 1) {
            CHECK_OK(amp_graph_begin(gpu.amp));
            step();
            CHECK_OK(amp_graph_end(gpu.amp, &graph));
        }
        CHECK_OK(amp_sync(gpu.amp));
        coc_reset_counts();
        if (graph != NULL) CHECK_OK(amp_graph_launch(graph));
        else step();
        for (amp_step_result o; amp_step_result_next(gpu.optimizer, &o);) {}
        CHECK_OK(amp_sync(gpu.amp));
        if (CUDA_IS_MODEL && graph != NULL && i > 1)
            CHECK_MSG(weight_casts() == own_work + (i == 5) + (i == 7 ? 3 - own_work : 0) - (i == 8 && own_work),
                      "launch %d: %lld casts", i, (long long)weight_casts());
        if (!own_work) check_copies(gpu, "a launch");
        result += gpu.bytes(gpu.loss.loss, 4);
    }
    result += gpu.weights();
    amp_graph_destroy(graph);
    return result;
}
CUDA_TEST(captured_step_casts_no_weight) {
    for (bool own_work : {false, true})
        CHECK_MSG(copies_in_graph(true, own_work) == copies_in_graph(false, own_work), "own work %d", (int)own_work);
}

/* With a GPU that is late a step waits once, for the outcome of two steps before, and makes nothing newer run: the loss in
   device memory stays that step's. */
CUDA_TEST(late_step_waits_for_two_before) {
    if (!CUDA_IS_MODEL) SKIP("a GPU runs its work when it likes");
    std::vector<double> losses;
    for (int late = 0; late < 2; late++) {
        network gpu;
        std::vector<amp_step_result> outcomes;
        CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O2), AMP_NO_WORKERS));
        coc_set_schedule(COC_LATE);
        coc_set_hidden(!late);
        for (size_t i = 0; i < 10; i++) {
            coc_reset_counts();
            CHECK_OK(gpu.forward_backward());
            if (!late) losses.push_back(gpu.values(gpu.loss.loss, AMP_F32, 1)[0]);
            CHECK_OK(gpu.step(&outcomes));
            if (!late || i < 4) continue;
            CHECK_MSG(coc_count().synchronising <= 1, "%s", coc_synchronising_calls().c_str());
            CHECK_EQ(outcomes.size(), i - 1);
            CHECK_MSG((double)*gpu.loss.loss == losses[i - 2], "step %zu of %zu has run", (size_t)(std::find(losses.begin(),
                      losses.end(), (double)*gpu.loss.loss) - losses.begin()), i);
        }
        coc_set_hidden(1);
    }
    CHECK(std::set<double>(losses.begin(), losses.end()).size() == losses.size());
}

/* ---- The same with a monitor */

struct watched : network {
    amp_monitor *monitor = NULL;
    std::string path;
    std::vector<amp_step_record> records;

    watched() {
        path = token_file();
        path += ".jsonl";
    }
    ~watched() {
        amp_monitor_destroy(monitor);
        unlink(path.c_str());
    }
    amp_result watch(int64_t memory_interval) {
        amp_monitor_desc d = {};
        d.path = path.c_str();
        d.optimizer = optimizer;
        d.scaler = scaler;
        d.log_interval = 1;
        d.memory_interval = memory_interval;
        return amp_monitor_create(amp, &monitor, &d);
    }
    /* Forward and backward stand in one call here. */
    amp_result watched_step(bool overflow) {
        amp_step_info info = {};
        info.no_loss = 1;
        info.tokens = ROWS;
        TRY(amp_monitor_phase(monitor, AMP_PHASE_DATA));
        TRY(amp_loader_next(loader, &batch));
        embedding.ids = batch.inputs;
        loss.labels = batch.targets;
        TRY(amp_monitor_phase(monitor, AMP_PHASE_FORWARD));
        TRY(compute());
        if (overflow) TRY(amp_fill(amp, params[HEAD_WEIGHT].grad.data, 0xff, 4));
        TRY(amp_monitor_phase(monitor, AMP_PHASE_OPTIMIZER));
        TRY(amp_step(optimizer, scaler));
        TRY(amp_monitor_step(monitor, &info));
        for (amp_step_record r; amp_monitor_next(monitor, &r);) records.push_back(r);
        return AMP_OK;
    }
    std::vector<std::string> lines() {
        std::vector<std::string> out;
        void *data;
        size_t bytes;
        CHECK_OK(amp_file_read_all(NULL, path.c_str(), &data, &bytes));
        std::string all((char *)data, bytes);
        amp_file_free(NULL, data, bytes);
        for (size_t from = 0, end; (end = all.find('\n', from)) != std::string::npos; from = end + 1) out.push_back(all.substr(from, end - from));
        return out;
    }
};

static std::string field(const std::string &line, const char *key) {
    std::string name = std::string("\"") + key + "\": ";
    size_t at = line.find(name);
    return at == std::string::npos ? "" : line.substr(at + name.size(), line.find_first_of(",}", at) - at - name.size());
}

/* The records are the CPU backend's; times are the GPU's own. */
CUDA_TEST(records_are_the_cpus) {
    watched side[2];
    coc_set_modelled_clock(1);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(side[i].open(settings(i ? amp_cuda() : amp_cpu(), AMP_LEVEL_O2), AMP_NO_WORKERS));
        CHECK_OK(side[i].watch(4));
        for (int step = 0; step < 9; step++) CHECK_OK(side[i].watched_step(step == 4));
        CHECK_EQ(side[i].records.size(), 7);
        CHECK_OK(amp_monitor_epoch(side[i].monitor, NULL));
        for (amp_step_record r; amp_monitor_next(side[i].monitor, &r);) side[i].records.push_back(r);
        CHECK_EQ(side[i].lines().size(), 10);
    }
    for (size_t n = 0; n < 9 && n < side[0].records.size() && n < side[1].records.size(); n++) {
        const amp_step_record &a = side[0].records[n], &b = side[1].records[n];
        CHECK(a.result.step == b.result.step && a.result.applied == b.result.applied && a.result.applied == (n != 4));
        CHECK(a.result.scale == b.result.scale && a.result.growth_tracker == b.result.growth_tracker && a.result.lr == b.result.lr);
        CHECK(a.dtype == b.dtype && a.anomaly == b.anomaly && a.has_memory == b.has_memory && a.has_memory == (n % 4 == 3));
        CHECK(b.phase_seconds[AMP_PHASE_FORWARD] > 0 && b.phase_seconds[AMP_PHASE_OPTIMIZER] > 0 && b.phase_seconds[AMP_PHASE_OTHER] < b.seconds / 10);
        if (CUDA_IS_MODEL && n > 1) CHECK_MSG(fabs(b.seconds / side[1].records[1].seconds - 1) < 1e-3, "%g s", b.seconds);     /* the same work */
        if (b.has_memory) CHECK(b.memory.allocated > 0 && b.memory.reserved >= b.memory.allocated && b.memory.device_total > 0);
    }
    for (size_t n = 0; n < 10; n++)
        for (const char *key : {"event", "step", "epoch", "scale", "tracker", "skipped", "skips", "anomalies", "dtype", "lr", "first_bad"})
            CHECK_MSG(field(side[0].lines()[n], key) == field(side[1].lines()[n], key), "%s: %s and %s", key, side[0].lines()[n].c_str(),
                      side[1].lines()[n].c_str());
    CHECK(field(side[1].lines()[4], "first_bad") == "\"head.weight\"" && field(side[1].lines()[9], "event") == "\"epoch\"");
    coc_set_modelled_clock(0);
}

/* A monitor makes no step wait that would not wait without it, and allocates nothing. */
CUDA_TEST(monitor_does_not_wait) {
    for (int late = 0; late < 2; late++) {
        watched gpu;
        CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O2), AMP_NO_WORKERS));
        CHECK_OK(gpu.watch(5));
        if (late) coc_set_schedule(COC_LATE);
        else coc_set_patience(0);
        long blocks = 0;
        for (int i = 0; i < 24; i++) {
            if (i == 4) blocks = host_blocks;
            coc_reset_counts();
            CHECK_OK(gpu.watched_step(false));
            if (i < 4 || !CUDA_IS_MODEL) continue;
            CHECK_MSG(coc_count().synchronising <= late, "%s", coc_synchronising_calls().c_str());
            CHECK_EQ(coc_count().allocations + coc_count().frees, 0);
            CHECK_EQ(coc_calls("cudaMemGetInfo"), 0);
            CHECK_EQ(gpu.records.size(), i - 1);
            CHECK_EQ(host_blocks, blocks);
        }
        coc_set_patience(1);
        CHECK_EQ(gpu.lines().size(), 22);
    }
}

/* Steps of a graph have the records of the same steps without one, and no wait; phases inside a capture are nobody's. */
CUDA_TEST(records_of_a_graph) {
    std::vector<amp_step_record> records[2];
    for (int captured = 0; captured < 2; captured++) {
        watched gpu;
        amp_graph *graph = NULL;
        CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
        CHECK_OK(gpu.for_graphs(0.25f));
        CHECK_OK(gpu.watch(3));
        coc_set_patience(0);
        for (int i = 0; i < 10; i++) {
            bool capture = captured && i == 1, launch = captured && i > 0;
            amp_step_info info = {};
            info.no_loss = 1;
            CHECK_OK(amp_monitor_phase(gpu.monitor, AMP_PHASE_DATA));
            CHECK_OK(gpu.next_copied());
            if (i == 3) coc_reset_counts();
            if (capture) CHECK_OK(amp_graph_begin(gpu.amp));
            if (capture || !launch) {
                CHECK_OK(amp_monitor_phase(gpu.monitor, AMP_PHASE_FORWARD));
                CHECK_OK(gpu.compute());
                CHECK_OK(amp_monitor_phase(gpu.monitor, AMP_PHASE_OPTIMIZER));
                CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
            }
            if (capture) CHECK_ERR(amp_monitor_step(gpu.monitor, &info), AMP_ERR_STATE);
            if (capture) CHECK_OK(amp_graph_end(gpu.amp, &graph));
            if (launch) CHECK_OK(amp_monitor_phase(gpu.monitor, AMP_PHASE_FORWARD));
            if (launch) CHECK_OK(amp_graph_launch(graph));
            CHECK_OK(amp_monitor_step(gpu.monitor, &info));
            for (amp_step_record r; amp_monitor_next(gpu.monitor, &r);) records[captured].push_back(r);
        }
        coc_set_patience(1);
        if (CUDA_IS_MODEL) CHECK_MSG(coc_count().synchronising == 0, "%s", coc_synchronising_calls().c_str());
        amp_graph_destroy(graph);
    }
    CHECK(records[0].size() == 8 && records[1].size() == 8);
    for (size_t n = 0; n < 8 && n < records[1].size(); n++) {
        const amp_step_record &a = records[0][n], &b = records[1][n];
        CHECK(a.result.step == b.result.step && a.result.norm == b.result.norm && a.result.scale == b.result.scale);
        CHECK(a.result.growth_tracker == b.result.growth_tracker && a.result.lr == b.result.lr && b.seconds > 0);
    }
}

CUDA_TEST(status_of_the_gpu) {
    network gpu;
    amp_status s;
    char text[8192];
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O2), AMP_NO_WORKERS));
    CHECK_OK(gpu.forward_backward());
    CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
    CHECK_OK(amp_status_get(gpu.amp, gpu.scaler, 0, &s));
    CHECK(strcmp(s.backend, "cuda") == 0 && strcmp(s.machine.device.kind, "cuda") == 0 && s.choice.dtype == AMP_F16 && s.level == AMP_LEVEL_O2);
    CHECK(s.has_scaler && s.scale == 1024 && s.growth_tracker == 1 && s.updates == 1 && s.skips == 0);
    CHECK(s.memory.allocated > 0 && s.memory.reserved >= s.memory.allocated && s.memory.peak >= s.memory.allocated);
    CHECK(s.memory_share == (double)s.memory.reserved / (double)s.memory.device_total && s.memory_share > 0 && s.memory_share < 1);
    CHECK(amp_status_json(&s, text, sizeof text) < sizeof text);
    snprintf(text + 7000, 100, "\"compute_capability\": %d.%d", s.machine.device.cc_major, s.machine.device.cc_minor);
    if (s.machine.device.cc_minor == 0) text[7000 + strlen(text + 7000) - 2] = 0;
    CHECK(strlen(text) < 7000 && strstr(text, text + 7000) != NULL && field(text, "kind") == "\"cuda\"");
    CHECK(amp_status_text(&s, text, sizeof text) < sizeof text && strstr(text, "backend cuda") && strstr(text, "compute capability"));
    CHECK_OK(amp_graph_begin(gpu.amp));
    CHECK_ERR(amp_status_get(gpu.amp, gpu.scaler, 0, &s), AMP_ERR_STATE);
    amp_graph *graph = NULL;
    CHECK_OK(amp_graph_end(gpu.amp, &graph));
    amp_graph_destroy(graph);
}

/* A call of CUDA's that fails is told of, and leaves nothing behind. */
CUDA_TEST(monitor_calls_may_fail) {
    if (!CUDA_IS_MODEL) SKIP("a GPU's calls do not fail when asked");
    for (const char *function : {"cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery", "cudaEventElapsedTime"}) {
        int pending = 0, told = 0;
        for (int n = 1; !pending && n < 400; n += n < 12 ? 1 : 7) {
            amp_result result = AMP_OK;
            {
                watched gpu;
                CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O2), AMP_NO_WORKERS));
                coc_fail(function, n, cudaErrorUnknown);
                result = gpu.watch(2);
                for (int i = 0; i < 4 && result == AMP_OK; i++) result = gpu.watched_step(false);
                if (result == AMP_OK) result = amp_monitor_epoch(gpu.monitor, NULL);
                pending = coc_fail_pending();
                coc_fail_clear();
                CHECK_MSG(result == AMP_OK || (result == AMP_ERR_DEVICE && strstr(amp_last_error(), function)), "call %d of %s: %s", n, function, amp_last_error());
                told += result != AMP_OK;
            }
            CHECK_EQ(host_blocks, 0);
            coc_fail_clear();
        }
        CHECK_MSG(pending && told > 0, "%s: %d failures were told of", function, told);
    }
}

/* Work that is still queued when its memory is freed keeps it to itself: a new loader's first batch comes after it. */
CUDA_TEST(first_batch_waits_for_its_memory) {
    std::string differs = coc_every_order([](std::string *results) {
        amp_context *amp = cuda_context();
        amp_loader *loader = NULL;
        amp_loader_desc l = {};
        amp_batch batch;
        void *block, *kept;
        std::vector<unsigned char> seen;
        CHECK_OK(amp_alloc(amp, &kept, 16384));
        for (int64_t bytes = 512; bytes <= 16384; bytes += 512) {       /* of whatever size the loader's is */
            CHECK_OK(amp_alloc(amp, &block, bytes));
            CHECK_OK(amp_fill(amp, block, 7, bytes));
            CHECK_OK(amp_copy(amp, kept, block, bytes, AMP_COPY_ON_DEVICE));
            amp_free(amp, block);
        }
        l.path = token_file();
        l.format = AMP_TOKENS_U16;
        l.batch = 4;
        l.seq = SEQ;
        l.workers = AMP_NO_WORKERS;
        CHECK_OK(amp_loader_create(amp, &loader, &l));
        CHECK_OK(amp_loader_next(loader, &batch));
        results->resize(4 * SEQ * 4);
        CHECK_OK(amp_copy(amp, &(*results)[0], batch.inputs, (int64_t)results->size(), AMP_COPY_TO_HOST));
        seen.resize(16384);
        CHECK_OK(amp_copy(amp, seen.data(), kept, 16384, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
        CHECK(seen == std::vector<unsigned char>(16384, 7));
        for (size_t i = 0; i < results->size(); i += 4) CHECK((*results)[i] < VOCAB && (*results)[i + 1] == 0);
        amp_loader_destroy(loader);
        amp_free(amp, kept);
        amp_close(amp);
    });
    CHECK_MSG(differs.empty(), "%s", differs.c_str());
}

/* Another stream of the host's reads what amp.h's writes, and the other way round. */
CUDA_TEST(events_of_the_host) {
    std::string differs = coc_every_order([](std::string *results) {
        amp_context *amp = cuda_context();
        cudaStream_t other;
        cudaEvent_t event;
        void *a, *b;
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDefault) == cudaSuccess);
        CHECK_OK(amp_alloc(amp, &a, 4096));
        CHECK_OK(amp_alloc(amp, &b, 4096));
        CHECK_OK(amp_fill(amp, b, 0, 4096));
        CHECK_OK(amp_fill(amp, a, 3, 4096));
        CHECK_OK(amp_event_record(amp, event));
        CHECK(cudaStreamWaitEvent(other, event, 0) == cudaSuccess);
        CHECK(cudaMemcpyAsync(b, a, 4096, cudaMemcpyDeviceToDevice, other) == cudaSuccess);
        CHECK(cudaEventRecord(event, other) == cudaSuccess);
        CHECK_OK(amp_event_wait(amp, event));
        CHECK_OK(amp_fill(amp, a, 4, 4096));
        results->resize(4096);
        CHECK_OK(amp_copy(amp, &(*results)[0], b, 4096, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
        CHECK(*results == std::string(4096, 3));
        CHECK_ERR(amp_event_record(amp, NULL), AMP_ERR_NULL);
        CHECK_ERR(amp_event_wait(NULL, event), AMP_ERR_NULL);
        amp_free(amp, a);
        amp_free(amp, b);
        CHECK(cudaStreamSynchronize(other) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess);
        CHECK(cudaEventDestroy(event) == cudaSuccess);
        amp_close(amp);
    });
    CHECK_MSG(differs.empty(), "%s", differs.c_str());
}

static int gpus_here() {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

/* Contexts on two GPUs, taking turns. */
CUDA_TEST(two_devices) {
    if (gpus_here() < 2) SKIP("needs two GPUs");
    std::string weights[2];
    network gpus[2];
    std::vector<amp_step_result> outcomes[2];
    int current = -1;
    for (int i = 0; i < 2; i++) {
        amp_desc d = settings(amp_cuda(), AMP_LEVEL_O2);
        d.device = i;
        CHECK_OK(gpus[i].open(d, 1));
    }
    for (int step = 0; step < 4; step++)
        for (int i = 0; i < 2; i++) {
            CHECK_OK(gpus[i].forward_backward());
            CHECK_OK(gpus[i].step(&outcomes[i]));
        }
    for (int i = 0; i < 2; i++) weights[i] = gpus[i].weights();
    CHECK(weights[0] == weights[1]);
    CHECK(cudaGetDevice(&current) == cudaSuccess && current == 0);
}

/* The host's stream and device memory: every block is its own, comes with the stream that uses it, and goes back. */
static long pool_blocks, pool_wrong;
static int pool_device;         /* the second GPU, or the only one */
static void *pool_alloc(void *user, size_t bytes, int32_t device, void *stream) {
    void *p = NULL;
    int current = -1;
    pool_wrong += stream != user || device != pool_device || cudaGetDevice(&current) != cudaSuccess ||
                  current != pool_device;
    pool_blocks++;
    return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}
static void pool_free(void *user, void *ptr, size_t, int32_t device, void *stream) {
    pool_wrong += stream != user || device != pool_device;
    pool_blocks--;
    CHECK(cudaFree(ptr) == cudaSuccess);
}
CUDA_TEST(stream_and_memory_of_the_host) {
    std::string weights[2];
    pool_device = gpus_here() > 1;
    for (int own = 0; own < 2; own++) {
        cudaStream_t stream = NULL;
        amp_desc d = settings(amp_cuda(), AMP_LEVEL_O2);
        std::vector<amp_step_result> outcomes;
        d.device = pool_device;
        CHECK(cudaSetDevice(pool_device) == cudaSuccess && cudaStreamCreate(&stream) == cudaSuccess && cudaSetDevice(0) == cudaSuccess);
        if (own) {
            d.stream = d.memory.user = stream;
            d.memory.alloc = pool_alloc;
            d.memory.free = pool_free;
        }
        pool_blocks = pool_wrong = 0;
        {
            network gpu;
            CHECK_OK(gpu.open(d, AMP_NO_WORKERS));
            CHECK_EQ(pool_blocks > 10, own);
            if (CUDA_IS_MODEL) CHECK_EQ(pool_blocks == coc_living().allocations, own);
            for (int i = 0; i < 3; i++) {
                CHECK_OK(gpu.forward_backward());
                CHECK_OK(gpu.step(&outcomes));
            }
            if (own) CHECK(cudaStreamSynchronize(stream) == cudaSuccess);       /* all work is there */
            weights[own] = gpu.weights();
        }
        CHECK(pool_blocks == 0 && pool_wrong == 0);
        CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    }
    CHECK(weights[0] == weights[1]);
}
CUDA_TEST(memory_of_the_host_is_a_pair) {
    amp_desc d = settings(amp_cuda(), AMP_LEVEL_O1);
    amp_context *amp = NULL;
    d.memory.alloc = pool_alloc;
    CHECK_ERR(amp_open(&amp, &d), AMP_ERR_CONFLICT);
    CHECK(strstr(amp_last_error(), ".memory.free") != NULL);
}

/* ---- Failures */

struct run_result {
    amp_result result;
    std::string text;
    size_t outcomes;
    int later_failed, closing;          /* closing: what is to fail had not failed when the run was over */
};

/* Opens, takes three steps, and closes. */
static run_result small_run() {
    run_result r = {AMP_OK, "", 0, 0, 0};
    network gpu;
    std::vector<amp_step_result> outcomes;
    r.result = gpu.open(settings(amp_cuda(), AMP_LEVEL_O2), AMP_NO_WORKERS);
    for (int i = 0; i < 3 && r.result == AMP_OK; i++) {
        r.result = gpu.forward_backward();
        if (r.result == AMP_OK) r.result = gpu.step(&outcomes);
    }
    if (r.result == AMP_OK) r.result = amp_sync(gpu.amp);
    if (r.result != AMP_OK) r.text = amp_last_error();
    r.outcomes = outcomes.size();
    r.closing = coc_fail_pending();
    if (gpu.amp != NULL && !gpu.memory.empty()) r.later_failed = amp_fill(gpu.amp, gpu.memory[0], 0, 1) != AMP_OK;
    return r;
}

static void nothing_left(const char *function, int n) {
    coc_alive left = coc_living();
    CHECK_MSG(left.allocations + left.pinned + left.streams + left.events + left.graphs + left.graph_execs == 0,
              "after call %d of %s: %ld blocks, %ld pinned, %ld streams, %ld events", n, function, left.allocations,
              left.pinned, left.streams, left.events);
    CHECK_MSG(host_blocks == 0, "after call %d of %s: %ld blocks of host memory", n, function, host_blocks);
    CHECK_MSG(coc_faults() == 0, "%s", coc_fault_text().c_str());
    host_blocks = 0;
    coc_fail_clear();
    coc_reset();
}

/* Sanitizers are slow: with them fewer calls fail. */
#if defined(__SANITIZE_ADDRESS__)
enum { FAILURE_STEP = 4 };
#else
enum { FAILURE_STEP = 1 };
#endif

/* One multiprocessor, for small grids, while it lives. */
struct small_machine {
    small_machine() { coc_set_devices(1, (size_t)1 << 28, 1); }
    ~small_machine() { coc_set_devices(2); }
};

static const char *const failing[] = {
    "cudaGetDeviceCount", "cudaGetDevice", "cudaGetDeviceProperties", "cudaFuncGetAttributes", "cudaStreamCreateWithFlags",
    "cudaMalloc", "cudaHostAlloc", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventCreateWithFlags", "cudaEventRecord",
    "cudaStreamWaitEvent", "cudaEventQuery", "cudaEventSynchronize", "cudaLaunchKernel", "cudaStreamSynchronize"};

/* Every call of every function, failing once: the error comes back with its name and the call's (amp_step_result_next says
   no more than that there is no outcome), and nothing is lost. */
CUDA_TEST(every_call_may_fail) {
    small_machine machine;
    for (const char *function : failing) {
        int calls = 0, pending = 0;
        for (int n = 1; !pending && n < 2000; n += n < 6 ? FAILURE_STEP : 37 * FAILURE_STEP) {
            coc_fail(function, n, cudaErrorUnknown);
            run_result r = small_run();
            pending = coc_fail_pending();
            calls += !pending;
            if (r.result == AMP_OK)
                CHECK_MSG(r.closing || r.outcomes == 0, "call %d of %s failed unnoticed", n, function);
            else
                CHECK_MSG(r.result == AMP_ERR_DEVICE && r.text.find("cudaErrorUnknown") != std::string::npos &&
                          r.text.find(function) != std::string::npos, "call %d of %s: result %d, %s", n, function, (int)r.result, r.text.c_str());
            nothing_left(function, n);
        }
        CHECK_MSG(calls > 0, "%s is never called", function);
    }
}

/* The device is lost at some call: named once, and from then on every call says so; host memory comes back. */
CUDA_TEST(lost_device) {
    small_machine machine;
    for (const char *function : {"cudaMalloc", "cudaMemcpyAsync", "cudaEventRecord", "cudaLaunchKernel", "cudaStreamSynchronize"})
        for (int n = 3; n < 60; n += 19) {
            host_logs = 0;
            coc_fail(function, n, cudaErrorIllegalAddress, 1);
            run_result r = small_run();
            if (!coc_fail_pending() && !r.closing) {
                CHECK_MSG(r.result == AMP_ERR_DEVICE && r.later_failed, "call %d of %s", n, function);
                CHECK_MSG(r.text.find("cudaErrorIllegalAddress") != std::string::npos, "call %d of %s: %s", n, function, r.text.c_str());
                CHECK_MSG(host_logs == 1, "call %d of %s: logged %d times", n, function, host_logs);
                CHECK_MSG(host_blocks == 0, "after call %d of %s: %ld blocks of host memory", n, function, host_blocks);
            }
            host_blocks = 0;
            (void)coc_take_faults();
            coc_fail_clear();
            coc_reset();
        }
}

/* The same at the first weight cast and at the first mask, which hold a place in their caches meanwhile: told by the default
   logger, or by a host's that has another thread call the context, and no call hangs. */
struct told {
    amp_context *amp = NULL;
    int errors = 0;
    static void write(void *user, amp_log_level level, int, const char *) {
        told *me = (told *)user;
        if (level != AMP_LOG_ERROR) return;
        me->errors++;
        std::thread([me] {
            amp_cache_info info;
            amp_memory_info memory;
            void *p = NULL;
            CHECK_OK(amp_mask_cache_info(me->amp, &info));
            CHECK_OK(amp_memory(me->amp, &memory));
            CHECK_EQ(amp_cast_cache_info(me->amp, &info), AMP_ERR_DEVICE);
            CHECK_EQ(amp_alloc(me->amp, &p, 1 << 20), AMP_ERR_DEVICE);
        }).join();
    }
};

static void lose_at_first_use(bool cast, int call, bool own_logger) {
    amp_desc d = settings(amp_cuda(), AMP_LEVEL_O1);
    amp_param p = {};
    amp_mask mask = {};
    amp_mask_view view = {};
    amp_tensor copy;
    told log;
    void *weight = NULL;
    auto use = [&](bool it) {
        return it ? amp_autocast_cast(log.amp, &p, AMP_F16, &copy) : amp_mask_get(log.amp, &mask, 1, 4, 4, AMP_U8, &view);
    };
    d.logger.write = own_logger ? log.write : NULL;
    d.logger.user = own_logger ? &log : NULL;
    log.amp = cuda_context(&d);
    CHECK_OK(amp_alloc(log.amp, &weight, 64 * 4));
    CHECK_OK(amp_fill(log.amp, weight, 0, 64 * 4));
    p.name = "weight";
    p.weight = amp_tensor2(weight, AMP_F32, 8, 8);
    mask.kind = AMP_MASK_CAUSAL;
    CHECK_OK(amp_param_register(log.amp, &p, 1));
    CHECK_OK(amp_autocast_begin(log.amp, NULL));
    coc_fail(NULL, call, cudaErrorIllegalAddress, 1);
    CHECK_ERR(use(cast), AMP_ERR_DEVICE);
    CHECK_MSG(strstr(amp_last_error(), "cudaErrorIllegalAddress"), "%s", amp_last_error());
    for (int i = 0; i < 12; i++) CHECK_ERR(use(i % 2), AMP_ERR_DEVICE);
    std::thread([&] { CHECK_ERR(use(!cast), AMP_ERR_DEVICE); }).join();
    CHECK_EQ(log.errors, own_logger ? 1 : 0);
    CHECK_OK(amp_autocast_end(log.amp));
    amp_close(log.amp);
    CHECK_EQ(host_blocks, 0);
    coc_fail_clear();
    coc_reset();
}

CUDA_TEST(lost_at_the_first_cast) {
    if (!CUDA_IS_MODEL) SKIP("calls that fail");
    FILE *text = tmpfile();
    std::string said(4096, 0);
    int before = dup(2);
    alarm(300);
    for (int which = 0; which < 12; which++) {
        CHECK(text != NULL && dup2(fileno(text), 2) == 2);
        lose_at_first_use(which % 2, 1 + which / 4, which / 2 % 2);
        CHECK_EQ(dup2(before, 2), 2);
    }
    alarm(0);
    close(before);
    rewind(text);
    said.resize(fread(&said[0], 1, said.size(), text));
    fclose(text);
    CHECK_MSG(said.find("amp error 501: amp_cuda: ") != std::string::npos && said.find("cudaErrorIllegalAddress") != std::string::npos, "%s", said.c_str());
}

/* The GPU's memory and the host's run out. */
CUDA_TEST(out_of_memory) {
    small_machine machine;
    int failed = 0;
    for (int n = 1; n < 100; n += 3) {
        coc_fail("cudaMalloc", n, cudaErrorMemoryAllocation);
        run_result r = small_run();         /* the arena tries once more, which here succeeds */
        CHECK_MSG(r.result == AMP_OK, "%s", r.text.c_str());
        int pending = coc_fail_pending();
        nothing_left("cudaMalloc", n);
        if (pending) break;
    }
    for (long n = 1; n < 2000; n += n < 10 ? FAILURE_STEP : 29 * FAILURE_STEP) {
        host_fail_alloc = n;
        run_result r = small_run();
        bool pending = host_fail_alloc > 0;
        host_fail_alloc = 0;
        CHECK_MSG(r.result == (pending ? AMP_OK : AMP_ERR_MEMORY), "allocation %ld: result %d, %s", n, (int)r.result, r.text.c_str());
        nothing_left("alloc", (int)n);
        if (pending) break;
        failed++;
    }
    CHECK(failed > 3);
}

/* ---- Graphs */

enum { GRAPH_STEPS = 20, GRAPH_BAD_STEP = 9 };

/* Twenty steps with another learning rate each, dropout, an infinite weight in the tenth, and growths of the scale every
   three clean steps, while two threads read ahead.  captured: from the second step on by launching. */
static std::string graph_run(amp_level level, int accumulation, bool captured, int steps = GRAPH_STEPS) {
    network gpu;
    std::string result;
    std::vector<amp_step_result> outcomes;
    amp_graph *graph = NULL;
    const int64_t OTHER_BYTES = HIDDEN * CHANNELS * 2;
    void *others[4];
    uint16_t good = 0x3c00, bad = 0x7c00;
    float good_wide = 1, bad_wide = INFINITY;
    gpu.accumulation = accumulation;
    CHECK_OK(gpu.open(settings(amp_cuda(), level), 2));
    CHECK_OK(gpu.for_graphs(0.25f));
    const amp_tensor &head = gpu.params[HEAD_WEIGHT].weight;
    bool narrow = head.dtype == AMP_F16;
    auto micro_batches = [&] {
        for (int i = 0; i < accumulation; i++) {
            CHECK_OK(gpu.compute());
            CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
        }
    };
    for (int i = 0; i < steps; i++) {
        CHECK_OK(amp_optimizer_set_lr(gpu.optimizer, 1e-2 / (1 + i)));
        if (i == GRAPH_BAD_STEP || i == GRAPH_BAD_STEP + 1) {
            bool poison = i == GRAPH_BAD_STEP;
            const void *value = narrow ? (const void *)(poison ? &bad : &good) : (const void *)(poison ? &bad_wide : &good_wide);
            CHECK_OK(amp_copy(gpu.amp, head.data, value, narrow ? 2 : 4, AMP_COPY_TO_DEVICE));
            CHECK_OK(amp_sync(gpu.amp));
            amp_param_changed(&gpu.params[HEAD_WEIGHT]);
        }
        CHECK_OK(gpu.next_copied());        /* the micro-batches of a step are the same here */
        if (i == 1) CHECK_OK(gpu.evaluate());           /* leaves casts that are valid, which the graph must not rely on */
        if (i == 3) {                                   /* nor does the memory of its own casts become another's */
            amp_cast_cache_clear(gpu.amp);
            for (void *&p : others) {
                CHECK_OK(gpu.room(&p, OTHER_BYTES));
                CHECK_OK(amp_fill(gpu.amp, p, 0x5a, OTHER_BYTES));
            }
        }
        if (captured && i == 1) {
            CHECK_OK(amp_graph_begin(gpu.amp));
            micro_batches();
            CHECK_OK(amp_graph_end(gpu.amp, &graph));
        }
        if (graph != NULL) CHECK_OK(amp_graph_launch(graph));
        else micro_batches();
        for (amp_step_result o; amp_step_result_next(gpu.optimizer, &o);) outcomes.push_back(o);
        result += gpu.bytes(gpu.loss.loss, 4);
    }
    for (void *p : others) CHECK(gpu.bytes(p, (size_t)OTHER_BYTES) == std::string((size_t)OTHER_BYTES, 0x5a));
    CHECK_OK(amp_step_result_flush(gpu.optimizer));
    for (amp_step_result o; amp_step_result_next(gpu.optimizer, &o);) outcomes.push_back(o);
    int skipped = 0, grown = 0;
    CHECK_EQ(outcomes.size(), steps);
    for (size_t i = 0; i < outcomes.size(); i++) {
        const amp_step_result &o = outcomes[i];
        skipped += !o.applied;
        grown += i > 0 && o.scale > outcomes[i - 1].scale;
        CHECK(o.step == (int64_t)i + 1);
        CHECK(fabs(o.lr - 1e-2 / (double)(i + 1)) == 0);
        result.append((const char *)&o.norm, sizeof o.norm).append((const char *)&o.scale, sizeof o.scale);
    }
    if (steps == GRAPH_STEPS) CHECK(skipped == 1 && !outcomes[GRAPH_BAD_STEP].applied && grown >= 3);
    result += gpu.weights();
    amp_state *state = NULL;
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_random_save(gpu.amp, state, "r"));
    int64_t random[2] = {0, 0};
    CHECK_OK(amp_state_get(state, "r.random", AMP_I64, random, 2));
    CHECK_EQ(random[1], (int64_t)steps * accumulation * ROWS * HIDDEN);
    amp_state_destroy(state);
    amp_graph_destroy(graph);
    return result;
}

/* A launched graph leaves the bits of the calls that were captured, in every order of threads too. */
CUDA_TEST(graph_is_the_step) {
    small_machine machine;
    for (amp_level level : {AMP_LEVEL_O1, AMP_LEVEL_O2}) {
        int accumulation = level == AMP_LEVEL_O1 ? 1 : 2;
        std::string expected = graph_run(level, accumulation, false);
        CHECK_MSG(graph_run(level, accumulation, true) == expected, "level %d: other bits than without a graph", (int)level);
    }
    std::string differs = coc_every_order([](std::string *results) { *results = graph_run(AMP_LEVEL_O1, 1, true, 5); });
    CHECK_MSG(differs.empty(), "%s", differs.c_str());
}

/* A launch waits for nothing, allocates nothing, and is a handful of calls. */
CUDA_TEST(graph_launch_is_cheap) {
    network gpu;
    amp_graph *graph = NULL;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), 2));
    CHECK_OK(gpu.for_graphs(0.25f));
    if (CUDA_IS_MODEL) CHECK_EQ(coc_count().timed_events, 0);   /* nothing is timed */
    coc_set_patience(0);
    for (int i = 0; i < 12; i++) {
        CHECK_OK(gpu.next_copied());
        if (i == 1) CHECK_OK(amp_graph_begin(gpu.amp));
        if (i <= 1) {
            CHECK_OK(gpu.compute());
            CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
        }
        if (i == 1) CHECK_OK(amp_graph_end(gpu.amp, &graph));
        if (i >= 1) CHECK_OK(amp_graph_launch(graph));
        for (amp_step_result o; amp_step_result_next(gpu.optimizer, &o);) {}
        if (i == 3) coc_reset_counts();
    }
    coc_set_patience(1);
    if (CUDA_IS_MODEL) {
        coc_counts c = coc_count();
        CHECK_MSG(c.synchronising == 0, "%s", coc_synchronising_calls().c_str());
        CHECK_EQ(c.allocations, 0);
        CHECK_EQ(c.graph_launches, 8);
        CHECK(c.launches <= 8 * 2);         /* the numbers' rule, and the tokens' widening */
    }
    amp_graph_destroy(graph);
}

static bool says(const char *text) { return strstr(amp_last_error(), text) != NULL; }

/* What a graph refuses, by name; and after a failed capture training goes on as if there had been none. */
CUDA_TEST(graph_refusals) {
    network gpu, plain;
    amp_graph *graph = NULL;
    std::vector<amp_step_result> outcomes;
    auto step = [&](network *n) {
        CHECK_OK(n->compute());
        CHECK_OK(amp_step(n->optimizer, n->scaler));
    };
    for (network *n : {&gpu, &plain}) {
        CHECK_OK(n->open(settings(amp_cuda(), AMP_LEVEL_O1), 0));
        CHECK_OK(n->for_graphs(0.25f));
        CHECK_OK(n->next_copied());
        step(n);
    }
    CHECK_ERR(amp_graph_begin(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_graph_end(gpu.amp, &graph), AMP_ERR_STATE);
    CHECK_ERR(amp_graph_end(gpu.amp, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_graph_launch(NULL), AMP_ERR_NULL);
    amp_graph_destroy(NULL);

    CHECK_OK(amp_graph_begin(gpu.amp));                         /* waits */
    CHECK_ERR(amp_graph_begin(gpu.amp), AMP_ERR_STATE);
    CHECK_ERR(amp_sync(gpu.amp), AMP_ERR_STATE);
    CHECK(says("amp_graph_end"));
    amp_k_scaler scaler;
    amp_range nothing = {"nothing", nullptr, 0, AMP_F32};
    int32_t apply = 1;
    CHECK_ERR(amp_scaler_get(gpu.scaler, &scaler), AMP_ERR_STATE);
    CHECK_ERR(amp_scaler_unscale(gpu.scaler, &nothing, 1, &apply), AMP_ERR_STATE);
    step(&gpu);
    CHECK_ERR(amp_step_result_flush(gpu.optimizer), AMP_ERR_STATE);
    CHECK_OK(gpu.compute());                                    /* a backward without its step */
    CHECK_ERR(amp_graph_end(gpu.amp, &graph), AMP_ERR_STATE);
    CHECK(graph == NULL && says("whole steps"));

    CHECK_OK(amp_graph_begin(gpu.amp));                         /* two steps */
    step(&gpu);
    CHECK_OK(gpu.compute());
    CHECK_ERR(amp_step(gpu.optimizer, gpu.scaler), AMP_ERR_STATE);
    CHECK_ERR(amp_graph_end(gpu.amp, &graph), AMP_ERR_STATE);

    CHECK_OK(gpu.compute());                                    /* in the middle of a cycle */
    CHECK_ERR(amp_graph_begin(gpu.amp), AMP_ERR_STATE);
    CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
    step(&plain);

    CHECK_OK(amp_graph_begin(gpu.amp));                         /* a call of CUDA's fails */
    step(&gpu);
    std::thread([&] {
        CHECK_ERR(amp_graph_end(gpu.amp, &graph), AMP_ERR_STATE);
        CHECK(says("another thread"));
    }).join();
    if (CUDA_IS_MODEL) {
        coc_fail("cudaGraphInstantiate", 1, cudaErrorMemoryAllocation);
        CHECK_ERR(amp_graph_end(gpu.amp, &graph), AMP_ERR_MEMORY);
        coc_fail_clear();
    } else CHECK_OK(amp_graph_end(gpu.amp, &graph));
    amp_graph_destroy(graph);
    step(&gpu);
    step(&plain);
    CHECK(gpu.weights() == plain.weights());

    CHECK_OK(amp_graph_begin(gpu.amp));                         /* a switch of precision */
    step(&gpu);
    CHECK_OK(amp_graph_end(gpu.amp, &graph));
    CHECK_OK(amp_graph_launch(graph));
    CHECK_OK(amp_set_dtype(gpu.amp, AMP_F32));
    CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
    CHECK(says("capture"));
    amp_graph_destroy(graph);
    CHECK_OK(amp_graph_begin(gpu.amp));
    step(&gpu);
    CHECK_OK(amp_graph_end(gpu.amp, &graph));
    CHECK_OK(amp_graph_launch(graph));
    CHECK_OK(amp_scaler_set_rule(gpu.scaler, 4, 0, 0));
    CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
    amp_graph_destroy(graph);
    step(&gpu);
    CHECK_OK(amp_sync(gpu.amp));

    /* A check whose update is not in the graph: each launch would unscale once more what the step outside unscales too. */
    float one = 4096, *g = NULL;
    void *room = NULL;
    amp_range range;
    amp_grad_set_desc desc;
    amp_grad_set *set = NULL;
    CHECK_OK(amp_alloc(gpu.amp, &room, sizeof one));
    g = (float *)room;
    CHECK_OK(amp_copy(gpu.amp, g, &one, sizeof one, AMP_COPY_TO_DEVICE));
    CHECK_OK(amp_scaler_set_scale(gpu.scaler, 4));
    memset((void *)&range, 0, sizeof range);
    memset((void *)&desc, 0, sizeof desc);
    range.data = g; range.count = 1; range.dtype = AMP_F32;
    desc.ranges = &range; desc.n_ranges = 1;
    CHECK_OK(amp_grad_set_create(gpu.amp, &set, &desc));
    CHECK_OK(amp_graph_begin(gpu.amp));
    CHECK_OK(amp_scaler_check(gpu.scaler, set, AMP_CHECK_UNSCALE));
    CHECK_ERR(amp_graph_end(gpu.amp, &graph), AMP_ERR_STATE);
    CHECK(graph == NULL && says("amp_scaler_update"));
    CHECK_ERR(amp_scaler_update(gpu.scaler), AMP_ERR_NO_CHECK); /* nothing was done */
    amp_grad_set *gone = NULL;                                       /* and a set that is gone before the end */
    CHECK_OK(amp_grad_set_create(gpu.amp, &gone, &desc));
    CHECK_OK(amp_graph_begin(gpu.amp));
    CHECK_OK(amp_scaler_check(gpu.scaler, gone, AMP_CHECK_UNSCALE));
    amp_grad_set_destroy(gone);
    (void)amp_graph_end(gpu.amp, &graph);
    amp_graph_destroy(graph);
    CHECK_OK(amp_graph_begin(gpu.amp));
    CHECK_OK(amp_scaler_check(gpu.scaler, set, AMP_CHECK_UNSCALE));
    CHECK_OK(amp_scaler_update(gpu.scaler));
    CHECK_OK(amp_graph_end(gpu.amp, &graph));
    CHECK_OK(amp_graph_launch(graph));
    CHECK_OK(amp_copy(gpu.amp, &one, g, sizeof one, AMP_COPY_TO_HOST));
    CHECK_OK(amp_sync(gpu.amp));
    CHECK(one == 1024);
    CHECK_OK(amp_scaler_check(gpu.scaler, set, AMP_CHECK_UNSCALE));
    CHECK_ERR(amp_graph_launch(graph), AMP_ERR_STATE);          /* checked already */
    CHECK_OK(amp_scaler_update(gpu.scaler));
    CHECK_OK(amp_graph_launch(graph));
    CHECK_OK(amp_copy(gpu.amp, &one, g, sizeof one, AMP_COPY_TO_HOST));
    CHECK_OK(amp_sync(gpu.amp));
    CHECK(one == 64);
    amp_graph_destroy(graph);
    amp_grad_set_destroy(set);
    amp_free(gpu.amp, room);

    amp_context *cpu = NULL;
    CHECK_OK(amp_open(&cpu, NULL));
    CHECK_ERR(amp_graph_begin(cpu), AMP_ERR_UNSUPPORTED);
    CHECK(says("cpu"));
    amp_close(cpu);
}

/* ---- What goes wrong for good in a captured step: it is named, nothing hangs, and what can go on does */

static long blocks_left = -1;           /* blocks that can still be made; -1: any number */
static void *scarce_alloc(void *, size_t bytes, int32_t, void *) {
    void *p = NULL;
    if (blocks_left == 0) return NULL;
    if (blocks_left > 0) blocks_left--;
    return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}
static void scarce_free(void *, void *p, size_t, int32_t, void *) { CHECK(cudaFree(p) == cudaSuccess); }

static amp_result whole_step(network *n) {
    TRY(n->compute());
    return amp_step(n->optimizer, n->scaler);
}
static void open_for_graphs(network *n, const amp_desc &d) {
    CHECK_OK(n->open(d, AMP_NO_WORKERS));
    CHECK_OK(n->for_graphs(0.25f));
    CHECK_OK(n->next_copied());
    CHECK_OK(whole_step(n));
}

/* The memory ends at each block that the capture takes.  The capture fails, and the training goes on. */
CUDA_TEST(no_memory_in_a_captured_step) {
    small_machine machine;
    amp_desc d = settings(amp_cuda(), AMP_LEVEL_O1);
    d.memory.alloc = scarce_alloc, d.memory.free = scarce_free;
    std::string expected;
    bool enough = false;
    alarm(600);
    for (long left = -1; left < 60 && !enough; left++) {
        network gpu;
        amp_graph *graph = NULL;
        open_for_graphs(&gpu, d);
        if (left >= 0) {
            CHECK_OK(amp_graph_begin(gpu.amp));
            blocks_left = left;
            amp_result result = whole_step(&gpu);
            blocks_left = -1;
            enough = result == AMP_OK;
            if (!enough) {
                CHECK_MSG(result == AMP_ERR_MEMORY && says("amp_cuda: ") && says("bytes for"), "%ld left: %d, %s", left, (int)result, amp_last_error());
                CHECK_MSG((amp_graph_end(gpu.amp, &graph) == AMP_OK) == (graph != NULL), "%ld left", left);     /* of what was captured */
            } else CHECK_OK(amp_graph_end(gpu.amp, &graph));
            amp_graph_destroy(graph);
        }
        CHECK_OK(whole_step(&gpu));
        CHECK_OK(amp_sync(gpu.amp));
        if (left < 0) expected = gpu.weights();
        CHECK_MSG(gpu.weights() == expected, "%ld blocks left: other weights than without a capture", left);
        CHECK_MSG(!enough || left > 2, "the capture takes %ld blocks", left);
    }
    alarm(0);
    CHECK(enough);
}

/* The GPU is lost while a step is captured, when the capture ends, and when the graph is launched. */
CUDA_TEST(lost_in_a_captured_step) {
    if (!CUDA_IS_MODEL) SKIP("calls that fail");
    small_machine machine;
    static const struct { const char *function; int n; } cases[] = {
        {"cudaLaunchKernel", 1}, {"cudaLaunchKernel", 12}, {"cudaMemcpyAsync", 1}, {"cudaStreamEndCapture", 1},
        {"cudaGraphInstantiate", 1}, {"cudaGraphLaunch", 1}};
    alarm(600);
    for (const auto &x : cases) {
        host_logs = 0;
        {
            network gpu;
            amp_graph *graph = NULL;
            open_for_graphs(&gpu, settings(amp_cuda(), AMP_LEVEL_O1));
            CHECK_OK(amp_graph_begin(gpu.amp));
            coc_fail(x.function, x.n, cudaErrorIllegalAddress, 1);
            amp_result result = whole_step(&gpu);
            std::string said = result == AMP_OK ? "" : amp_last_error();
            amp_result ended = amp_graph_end(gpu.amp, &graph);
            if (result == AMP_OK) result = ended, said = ended == AMP_OK ? "" : amp_last_error();
            CHECK((ended == AMP_OK) == (graph != NULL));
            if (result == AMP_OK) result = amp_graph_launch(graph), said = amp_last_error();
            CHECK_MSG(!coc_fail_pending(), "%s is not called %d times", x.function, x.n);
            CHECK_MSG(result == AMP_ERR_DEVICE && said.find("cudaErrorIllegalAddress") != std::string::npos &&
                      said.find(x.function) != std::string::npos, "call %d of %s: %d, %s", x.n, x.function, (int)result, said.c_str());
            CHECK_ERR(whole_step(&gpu), AMP_ERR_DEVICE);
            CHECK_EQ(amp_sync(gpu.amp), AMP_ERR_DEVICE);
            CHECK(says("failed earlier with cudaErrorIllegalAddress"));
            amp_graph_destroy(graph);
        }
        CHECK_MSG(host_logs == 1 && host_blocks == 0, "%s: %d logs, %ld blocks of host memory", x.function, host_logs, host_blocks);
        (void)coc_take_faults();
        coc_fail_clear();
        coc_reset();
    }
    alarm(0);
}

/* The program destroys the context's stream.  CUDA promises nothing then; the model and most drivers know the handle no
   longer, and each call says so. */
CUDA_TEST(destroyed_stream) {
    if (!CUDA_IS_MODEL) SKIP("undefined on a GPU");
    cudaStream_t stream = NULL;
    amp_desc d = settings(amp_cuda(), AMP_LEVEL_O1);
    alarm(600);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    d.stream = stream;
    {
        network gpu;
        amp_graph *graph = NULL;
        float x = 0;
        open_for_graphs(&gpu, d);
        CHECK_OK(amp_sync(gpu.amp));
        CHECK(cudaStreamDestroy(stream) == cudaSuccess);
        CHECK_ERR(whole_step(&gpu), AMP_ERR_DEVICE);
        CHECK_MSG(says("cudaErrorInvalidResourceHandle"), "%s", amp_last_error());
        CHECK_EQ(amp_sync(gpu.amp), AMP_ERR_DEVICE);
        CHECK_MSG(says("cudaErrorInvalidResourceHandle"), "%s", amp_last_error());
        CHECK_ERR(amp_copy(gpu.amp, &x, gpu.loss.loss, sizeof x, AMP_COPY_TO_HOST), AMP_ERR_DEVICE);
        CHECK_ERR(amp_graph_begin(gpu.amp), AMP_ERR_DEVICE);
        CHECK_MSG(says("cudaErrorInvalidResourceHandle"), "%s", amp_last_error());
        CHECK_ERR(amp_graph_end(gpu.amp, &graph), AMP_ERR_STATE);
    }
    alarm(0);
}

/* The host gives up between amp_graph_begin and amp_graph_end, and starts again in another context. */
CUDA_TEST(graph_given_up) {
    void *p = NULL;
    for (int round = 0; round < 2; round++) {
        network n;
        CHECK_OK(n.open(settings(amp_cuda(), AMP_LEVEL_O1), 0));
        CHECK_OK(n.for_graphs(0.25f));
        CHECK_OK(n.next_copied());
        CHECK_OK(n.compute());
        CHECK_OK(amp_step(n.optimizer, n.scaler));
        CHECK_OK(amp_graph_begin(n.amp));
        if (round > 0) CHECK_OK(n.compute());
        amp_close(n.amp);                       /* ahead of what was made from it */
        n.amp = NULL, n.memory.clear();
        CHECK(cudaMalloc(&p, 64) == cudaSuccess && cudaFree(p) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess);
    }
}

/* A weight becomes NaN in step 13.  The snapshot of step 11 comes back, in bf16, and from there on the run is that of a twin
   that switched at 11.  The step is in a graph, which is out of date then and captured anew. */
struct guarded {
    network n;
    amp_monitor *monitor = NULL;
    amp_recovery *recovery = NULL;
    amp_graph *graph = NULL;
    std::vector<amp_recovery_event> events;

    ~guarded() {
        amp_graph_destroy(graph);
        amp_recovery_destroy(recovery);
        amp_monitor_destroy(monitor);
    }
    void open(bool recover) {
        amp_monitor_desc m = {};
        amp_recovery_desc r = {};
        amp_desc d = settings(amp_cuda(), AMP_LEVEL_O1);
        CHECK_OK(n.open(d, 1));
        CHECK_OK(n.for_graphs(0.25f));
        m.optimizer = n.optimizer, m.scaler = n.scaler, m.nan_action = AMP_NAN_RECOVER;
        CHECK_OK(amp_monitor_create(n.amp, &monitor, &m));
        r.params = n.params, r.n_params = PARAMS, r.optimizer = n.optimizer, r.scaler = n.scaler, r.loader = n.loader, r.interval = 3;
        if (recover) CHECK_OK(amp_recovery_create(n.amp, &recovery, &r));
    }
    void work() {
        CHECK_OK(n.compute());
        CHECK_OK(amp_step(n.optimizer, n.scaler));
    }
    /* One step: as usual at first, then as a graph. */
    void step(int number) {
        amp_step_info info = {};
        float loss;
        CHECK_OK(n.next_copied());
        if (graph == NULL) {
            work();
            if (number % 3 == 2) {
                CHECK_OK(amp_graph_begin(n.amp));
                work();
                CHECK_OK(amp_graph_end(n.amp, &graph));
            }
        } else CHECK_OK(amp_graph_launch(graph));
        CHECK_OK(amp_copy(n.amp, &loss, n.loss.loss, 4, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(n.amp));
        info.loss = (double)loss;
        CHECK_OK(amp_monitor_step(monitor, &info));
    }
    void train(int from, int to, int bad) {
        amp_step_record record;
        amp_recovery_event event;
        for (int k = from; k < to; k++) {
            if (k == bad) {
                CHECK_OK(amp_fill(n.amp, n.params[HEAD_WEIGHT].weight.data, 0xff, 64));
                amp_param_changed(&n.params[HEAD_WEIGHT]);
                bad = -1;
            }
            step(k);
            while (amp_monitor_next(monitor, &record)) {
                if (recovery == NULL) continue;
                CHECK_OK(amp_recovery_step(recovery, &record, &event));
                if (event.action == AMP_RECOVERY_NONE) continue;
                events.push_back(event);
                CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
                amp_graph_destroy(graph);
                graph = NULL;
                k = (int)event.step - 1;
            }
        }
    }
};

CUDA_TEST(recovers_with_graphs) {
    guarded w, twin;
    amp_settings s = {};
    w.open(true);
    w.train(0, 18, 12);
    CHECK_EQ(w.events.size(), 1);
    CHECK(w.events[0].action == AMP_RECOVERY_RESTORED && w.events[0].mitigation == AMP_MITIGATE_DTYPE && w.events[0].dtype == AMP_BF16);
    CHECK_MSG(w.events[0].step == 11, "%s", w.events[0].text);
    twin.open(false);
    twin.train(0, 11, -1);
    amp_graph_destroy(twin.graph);
    twin.graph = NULL;
    s.dtype = AMP_BF16;
    s.clip_norm = 1;
    CHECK_OK(amp_settings_apply(&s, twin.n.amp, twin.n.scaler, twin.n.optimizer, NULL));
    twin.train(11, 18, -1);
    CHECK(w.n.weights() == twin.n.weights());
}

/* ---- Numerics, verify, placement and gradient check in device memory */

static int verify_step(void *user, amp_context *) { return ((network *)user)->compute(); }
static int verify_whole_step(void *user, amp_context *) {
    network *n = (network *)user;
    amp_result r = n->compute();
    return r != AMP_OK ? r : amp_step(n->optimizer, n->scaler);
}

static std::string train_and_verify(bool verify, bool whole) {
    network gpu;
    std::vector<amp_step_result> outcomes;
    std::string all;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
    CHECK_OK(gpu.for_graphs(0.1f));
    for (int i = 0; i < 6; i++) {
        CHECK_OK(gpu.next_copied());
        CHECK_OK(gpu.compute());
        all += gpu.bytes(gpu.loss.loss, 4);
        if (verify && (i == 2 || i == 4)) {
            amp_range outputs[2] = {{"logits", gpu.head.y.data, ROWS * VOCAB, AMP_F16}, {"loss", gpu.loss.loss, 1, AMP_F32}};
            amp_verify_desc d = {};
            amp_verify_report r = {};
            char text[2000];
            d.step = whole ? verify_whole_step : verify_step;
            d.user = &gpu;
            d.params = gpu.params; d.n_params = PARAMS;
            d.outputs = outputs; d.n_outputs = 2;
            d.optimizer = gpu.optimizer;
            d.scaler = gpu.scaler;
            CHECK_OK(amp_verify(gpu.amp, &d, &r));
            amp_verify_text(&r, text, sizeof text);
            CHECK_EQ(r.n_rows, 4);
            for (int k = 0; k < 4; k++) CHECK_MSG(r.rows[k].verdict == AMP_VERDICT_PASS && r.rows[k].gradient_error > 0, "%s", text);
        }
        for (const amp_param &p : gpu.params) all += gpu.bytes(p.grad);
        CHECK_OK(gpu.step(&outcomes));
        all += gpu.weights();
    }
    for (const amp_step_result &o : outcomes) {
        all.append((const char *)&o.norm, sizeof o.norm);
        all.append((const char *)&o.step, sizeof o.step);
    }
    return all;
}
CUDA_TEST(verified_training_goes_on) {
    std::string plain = train_and_verify(false, false);
    CHECK(train_and_verify(true, false) == plain);
    CHECK(train_and_verify(true, true) == plain);
}

/* A captured step stays right when amp_verify ran since; while one is captured nothing waits, and so nothing is looked at. */
static std::string launch_and_verify(bool verify) {
    network gpu;
    amp_graph *graph = NULL;
    amp_tensor_stats *m = NULL;
    amp_tensor_stats_desc nd = {};
    amp_tensor_stats_report looked;
    amp_verify_desc d = {};
    amp_verify_report r = {};
    std::string all;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
    CHECK_OK(gpu.for_graphs(0.25f));
    CHECK_OK(gpu.next_copied());
    CHECK_EQ(verify_whole_step(&gpu, NULL), AMP_OK);
    d.step = verify_step;
    d.user = &gpu;
    d.params = gpu.params; d.n_params = PARAMS;
    d.optimizer = gpu.optimizer;
    d.scaler = gpu.scaler;
    nd.params = gpu.params; nd.n_params = PARAMS;
    CHECK_OK(amp_tensor_stats_create(gpu.amp, &m, &nd));
    CHECK_OK(amp_graph_begin(gpu.amp));
    CHECK_EQ(verify_whole_step(&gpu, NULL), AMP_OK);
    CHECK_ERR(amp_verify(gpu.amp, &d, &r), AMP_ERR_STATE);
    CHECK_ERR(amp_tensor_stats_step(m, &looked), AMP_ERR_STATE);
    CHECK_OK(amp_graph_end(gpu.amp, &graph));
    for (int i = 0; i < 4; i++) {
        CHECK_OK(gpu.next_copied());
        if (verify && i == 2) CHECK_OK(amp_verify(gpu.amp, &d, &r));
        CHECK_OK(amp_graph_launch(graph));
        all += gpu.weights();
    }
    amp_tensor_stats_destroy(m);
    amp_graph_destroy(graph);
    return all;
}
CUDA_TEST(verify_beside_a_graph) { CHECK(launch_and_verify(true) == launch_and_verify(false)); }

CUDA_TEST(numerics_of_the_device) {
    network gpu;
    amp_tensor_stats *m = NULL;
    amp_tensor_stats_desc d = {};
    amp_tensor_stats_report r;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
    CHECK_OK(gpu.forward_backward());
    d.params = gpu.params; d.n_params = PARAMS;
    d.scaler = gpu.scaler;
    CHECK_OK(amp_tensor_stats_create(gpu.amp, &m, &d));
    CHECK_OK(amp_tensor_stats_step(m, &r));
    CHECK(r.due && r.n_rows == 2 * PARAMS && r.recommendation == AMP_RECOMMEND_NONE && r.first_bad == NULL);
    for (int p = 0; p < PARAMS && p < r.n_rows; p++) {
        double largest = 0, squares = 0;
        for (double x : gpu.values(gpu.params[p].grad)) { largest = std::max(largest, fabs(x)); squares += x * x; }
        double norm = sqrt(squares) / (double)amp_scaler_scale(gpu.scaler), n = (double)r.rows[p].count;
        CHECK_MSG(fabs(r.rows[p].norm - norm) <= n * 0x1p-53 * norm && norm > 0, "%s: %.17g, %.17g", r.rows[p].name, r.rows[p].norm, norm);
        CHECK_MSG((double)r.rows[p].largest == largest && largest > 0, "%s: %g, %g", r.rows[p].name, (double)r.rows[p].largest, largest);
    }
    CHECK_OK(amp_fill(gpu.amp, gpu.params[HIDDEN_BIAS].grad.data, 0xff, 4));
    for (int i = 0; i < 99; i++) CHECK_OK(amp_tensor_stats_step(m, &r));
    CHECK(r.first_bad == NULL && !r.due);
    CHECK_OK(amp_tensor_stats_step(m, &r));
    CHECK(r.due && r.first_bad != NULL && strcmp(r.first_bad, "hidden.bias") == 0 && r.rows[HIDDEN_BIAS].nan == 1);
    amp_tensor_stats_destroy(m);
}

CUDA_TEST(placement) {
    network gpu;
    float pageable[4] = {0, 0, 0, 0};
    void *pinned = NULL, *elsewhere = NULL;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
    CHECK_EQ(cudaMallocHost(&pinned, 64), cudaSuccess);
    amp_range ranges[3] = {{"w", gpu.params[0].weight.data, 4, AMP_F32}, {"pinned", pinned, 4, AMP_F32}, {"batch", pageable, 4, AMP_F32}};
    CHECK_OK(amp_verify_placement(gpu.amp, ranges, 2));
    CHECK_ERR(amp_verify_placement(gpu.amp, ranges, 3), AMP_ERR_DEVICE);
    CHECK(says("batch, number 2, is in pageable host memory"));
    if (gpus_here() > 1) {
        CHECK(cudaSetDevice(1) == cudaSuccess && cudaMalloc(&elsewhere, 64) == cudaSuccess);
        CHECK(cudaSetDevice(0) == cudaSuccess);
        ranges[1].data = elsewhere;
        CHECK_ERR(amp_verify_placement(gpu.amp, ranges, 3), AMP_ERR_DEVICE);
        CHECK(says("pinned, number 1, is in memory of another device"));
        CHECK_EQ(cudaFree(elsewhere), cudaSuccess);
    }
    CHECK_EQ(cudaFreeHost(pinned), cudaSuccess);
}

static int softmax_forward(void *user, amp_context *amp) { return amp_softmax(amp, (amp_softmax_op *)user); }
static int softmax_backward(void *user, amp_context *amp) { return amp_softmax_backward(amp, (amp_softmax_op *)user); }
CUDA_TEST(gradcheck_of_the_device) {
    network gpu;
    amp_softmax_op op = {};
    std::vector<float> x = cuda_random(ROWS * VOCAB, 3, -2, 2);
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), AMP_NO_WORKERS));
    CHECK_OK(gpu.tensor(&op.x, AMP_F32, ROWS, VOCAB));
    CHECK_OK(gpu.tensor(&op.dx, AMP_F32, ROWS, VOCAB));
    CHECK_OK(gpu.tensor(&op.y, AMP_F32, ROWS, VOCAB));
    CHECK_OK(gpu.tensor(&op.dy, AMP_F32, ROWS, VOCAB));
    CHECK_OK(amp_copy(gpu.amp, op.x.data, x.data(), ROWS * VOCAB * 4, AMP_COPY_TO_DEVICE));
    CHECK_OK(amp_sync(gpu.amp));
    amp_range in = {"x", op.x.data, ROWS * VOCAB, AMP_F32}, din = in, out = in, dout = in;
    din.data = op.dx.data; out.data = op.y.data; dout.data = op.dy.data;
    for (int wrong = 0; wrong < 2; wrong++) {
        amp_gradcheck_desc d = {};
        amp_gradcheck_report r = {};
        d.forward = softmax_forward;
        d.backward = wrong ? softmax_forward : softmax_backward;
        d.user = &op;
        d.inputs = &in; d.input_grads = wrong ? &dout : &din; d.n_inputs = 1;
        d.outputs = &out; d.output_grads = wrong ? &din : &dout; d.n_outputs = 1;
        d.dtype = AMP_F32;
        d.directions = 2;
        CHECK_OK(amp_gradcheck(gpu.amp, &d, &r));
        CHECK_MSG(r.passed == !wrong, "error %g, bound %g", r.error, r.bound);
        CHECK(gpu.bytes(op.x.data, x.size() * 4) == std::string((const char *)x.data(), x.size() * 4));
    }
}

/* fp32 numbers of the host become masters, or weights and remainders, on the device. */
CUDA_TEST(weights_are_set_from_fp32) {
    for (amp_master_kind kind : {AMP_MASTER_F32, AMP_MASTER_REMAINDER}) {
        network gpu;
        amp_optimizer_desc d = {};
        amp_optimizer *o = NULL;
        amp_state *state = NULL;
        std::vector<float> values = cuda_random(VOCAB * CHANNELS, 9, -1, 1), masters(values.size());
        amp_desc settings_of = settings(amp_cuda(), AMP_LEVEL_O2);
        settings_of.dtype = AMP_BF16;
        CHECK_OK(gpu.open(settings_of, AMP_NO_WORKERS));
        d.params = &gpu.params[TABLE];
        d.n_params = 1;
        d.master = kind;
        amp_optimizer_destroy(gpu.optimizer);
        gpu.optimizer = NULL;
        CHECK_OK(amp_optimizer_create(gpu.amp, &o, &d));
        CHECK_OK(amp_optimizer_set_weight(o, &gpu.params[TABLE], values.data()));
        CHECK_OK(amp_state_create(&state, NULL));
        CHECK_OK(amp_optimizer_save(o, state, "o"));
        CHECK_OK(amp_state_get(state, "o.master.0", AMP_F32, masters.data(), (int64_t)masters.size()));
        CHECK(masters == values);
        std::string weight = gpu.bytes(gpu.params[TABLE].weight);
        for (size_t i = 0; i < values.size(); i++) {
            uint16_t rest, stored;
            memcpy(&stored, weight.data() + 2 * i, 2);
            CHECK_EQ(stored, kind == AMP_MASTER_F32 ? amp_bf16_from_f32(values[i], 0) : amp_bf16_split(values[i], &rest));
        }
        amp_state_destroy(state);
        amp_optimizer_destroy(o);
    }
}

/* ---- 8-bit moments move between the backends: the CPU's state goes on here with its bits, and the other way */

struct moved_optimizer {
    enum { N = 1283, STEPS = 3 };
    amp_context *amp = NULL;
    amp_param param;
    amp_optimizer *o = NULL;
    int step = 0;

    moved_optimizer(const amp_backend *backend, amp_optimizer_kind kind, amp_dtype weight, amp_dtype moments) {
        amp_desc settings_of = settings(backend, AMP_LEVEL_O2);
        amp_optimizer_desc d = {};
        std::string values = cuda_stored(cuda_random(N, 3), weight);
        memset((void *)&param, 0, sizeof param);
        settings_of.dtype = AMP_BF16;
        CHECK_OK(amp_open(&amp, &settings_of));
        param.name = "w";
        for (amp_tensor *t : {&param.weight, &param.grad}) {
            void *p = NULL;
            CHECK_OK(amp_alloc(amp, &p, N * (int64_t)amp_dtype_size(weight)));
            *t = amp_tensor1(p, weight, N);
        }
        put(param.weight, values);
        CHECK_OK(amp_param_register(amp, &param, 1));
        d.kind = kind, d.params = &param, d.n_params = 1, d.moments = moments, d.lr = 0.01, d.decay_vectors = 1;
        if (kind == AMP_SGD) d.momentum = 0.9;
        else d.weight_decay = 0.1;
        CHECK_OK(amp_optimizer_create(amp, &o, &d));
    }
    moved_optimizer(const moved_optimizer &) = delete;
    ~moved_optimizer() {
        amp_optimizer_destroy(o);
        amp_free(amp, param.weight.data);
        amp_free(amp, param.grad.data);
        amp_close(amp);
    }
    void put(const amp_tensor &t, const std::string &bytes) {
        CHECK_OK(amp_copy(amp, t.data, bytes.data(), (int64_t)bytes.size(), AMP_COPY_TO_DEVICE));
        CHECK_OK(amp_sync(amp));
    }
    std::string weights() const {
        std::string out((size_t)N * amp_dtype_size(param.weight.dtype), 0);
        CHECK_OK(amp_copy(amp, &out[0], param.weight.data, (int64_t)out.size(), AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
        return out;
    }
    void steps() {
        for (int i = 0; i < STEPS; i++) {
            put(param.grad, cuda_stored(cuda_random(N, (uint64_t)(100 + step++), -3, 2), param.grad.dtype));
            param.grad_live = 1;
            CHECK_OK(amp_step(o, NULL));
        }
    }
    /* All that is saved, as a file, but for the kernels' names. */
    std::string saved(amp_state **state) const {
        std::string path = std::string(token_file()) + ".state", out;
        void *data = NULL;
        size_t bytes = 0;
        CHECK_OK(amp_state_create(state, NULL));
        const int32_t any[2] = {0, AMP_F32};        /* whose kernels these were is all that differs */
        CHECK_OK(amp_optimizer_save(o, *state, "o"));
        CHECK_OK(amp_state_put(*state, "o.kernels", AMP_I32, any, 2));
        CHECK_OK(amp_state_save(*state, path.c_str()));
        CHECK_OK(amp_file_read_all(NULL, path.c_str(), &data, &bytes));
        out.assign((const char *)data, bytes);
        amp_file_free(NULL, data, bytes);
        remove(path.c_str());
        return out;
    }
    std::string goes_on(const std::string &from, const amp_state *state) {
        put(param.weight, from);
        CHECK_OK(amp_optimizer_load(o, state, "o"));
        step = STEPS;
        steps();
        return weights();
    }
};

CUDA_TEST(eight_bit_states_change_the_backend) {
    static const amp_backend *const backends[] = {amp_cpu(), amp_cuda()};
    for (amp_optimizer_kind kind : {AMP_ADAMW, AMP_SGD, AMP_LION})
        for (amp_dtype weight : {AMP_F32, AMP_BF16})
            for (int from = 0; from < 2; from++)
                for (int how = 0; how < (kind == AMP_ADAMW ? 3 : 1); how++) {   /* 8 bits to themselves, to fp32 and from fp32 */
                    amp_dtype before = how < 2 ? AMP_MOMENTS_8BIT : AMP_F32, behind = how == 1 ? AMP_F32 : AMP_MOMENTS_8BIT;
                    moved_optimizer source(backends[from], kind, weight, before);
                    source.steps();
                    std::string at = source.weights(), right, ends[2];
                    amp_state *state = NULL, *end[2] = {};
                    CHECK(!source.saved(&state).empty());
                    for (int to = 0; to < 2; to++) {
                        moved_optimizer other(backends[to], kind, weight, behind);
                        std::string found = other.goes_on(at, state);
                        if (to == 0) right = found;
                        CHECK_MSG(found == right && found != at, "optimizer %d, %s, from %d, way %d", (int)kind, amp_dtype_name(weight), from, how);
                        ends[to] = other.saved(&end[to]);
                        amp_state_destroy(end[to]);
                    }
                    CHECK_MSG(ends[0] == ends[1], "states of optimizer %d, %s, from %d, way %d", (int)kind, amp_dtype_name(weight), from, how);
                    source.steps();
                    if (how == 0) CHECK(source.weights() == right);
                    amp_state_destroy(state);
                }
}

/* Each change between two steps puts captured graphs out of date; captured again, they are the step under the new
 * settings.  A graph that lives keeps its copies, whatever cleans up. */
CUDA_TEST(graph_after_settings_change) {
    static const char *const changes[] = {
        "dtype=bf16\n", "dtype=fp16\n", "dtype=fp16\nenabled=off\n", "dtype=fp16\n", "dtype=fp32\ntf32=on\n", "dtype=bf16\nfallback=fp16\n",
        "dtype=bf16\nmemory_efficient=on\n", "dtype=bf16\ncache=off\n", "dtype=bf16\nscaler=on\nclip_norm=0.5\n",
        "dtype=bf16\nscaler=on\ngrowth_interval=2\n", "dtype=fp16\nmode=inference\n", "dtype=fp16\nmode=training\nnan_action=report\n"};
    network gpu, plain;
    amp_graph *graph = NULL;
    int64_t freed = 0;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), 0));
    CHECK_OK(plain.open(settings(amp_cuda(), AMP_LEVEL_O1), 0));
    CHECK_OK(amp_operator_override(gpu.amp, AMP_OP_MATMUL, AMP_CAST_FP32));
    for (network *n : {&gpu, &plain}) {
        CHECK_OK(n->for_graphs(0));
        CHECK_OK(n->next_copied());
        CHECK_OK(n->compute());
        CHECK_OK(amp_step(n->optimizer, n->scaler));
    }
    CHECK_OK(amp_graph_begin(gpu.amp));
    CHECK_OK(gpu.compute());
    CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
    CHECK_ERR(amp_cleanup(gpu.amp, NULL), AMP_ERR_STATE);
    CHECK_OK(amp_graph_end(gpu.amp, &graph));
    for (const char *lines : changes) {
        amp_settings s;
        memset((void *)&s, 0, sizeof s);
        CHECK_OK(amp_settings_read_text(&s, "t", lines, strlen(lines)));
        for (network *n : {&gpu, &plain}) CHECK_OK(amp_settings_apply(&s, n->amp, n->scaler, n->optimizer, NULL));
        CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
        amp_graph_destroy(graph);
        if (s.mode == AMP_MODE_INFERENCE) {
            CHECK_OK(amp_graph_begin(gpu.amp));
            CHECK_OK(amp_graph_end(gpu.amp, &graph));
            continue;
        }
        for (network *n : {&gpu, &plain}) {
            CHECK_OK(n->next_copied());
            CHECK_OK(n->compute());
            CHECK_OK(amp_step(n->optimizer, n->scaler));
        }
        CHECK_OK(amp_graph_begin(gpu.amp));
        CHECK_OK(gpu.compute());
        CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
        CHECK_OK(amp_graph_end(gpu.amp, &graph));
        for (int i = 0; i < 3; i++) {
            CHECK_OK(gpu.next_copied());
            CHECK_OK(amp_graph_launch(graph));
            CHECK_OK(amp_cleanup(gpu.amp, &freed));
            CHECK_OK(plain.next_copied());
            CHECK_OK(plain.compute());
            CHECK_OK(amp_step(plain.optimizer, plain.scaler));
        }
        CHECK_MSG(gpu.weights() == plain.weights(), "%s", lines);
    }
    CHECK_OK(amp_optimizer_set_clip(gpu.optimizer, 0.125));
    CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
    amp_graph_destroy(graph);
    amp_memory_info before, after;
    CHECK_OK(amp_memory(gpu.amp, &before));
    CHECK_OK(amp_cleanup(gpu.amp, &freed));
    CHECK_OK(amp_memory(gpu.amp, &after));
    CHECK(freed > 0 && before.reserved - after.reserved == freed);
    CHECK_OK(gpu.compute());
    CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
    CHECK_OK(amp_sync(gpu.amp));
}

/* Gradients of parameters come in other steps, and of one only after the optimizer was created: weights and counts, in
 * steps and in launches, which are refused once the parameter has come. */
static std::string late_run(const amp_backend *backend, amp_optimizer_kind kind, bool graphs) {
    enum { SETS = 3, N = 300 };
    static const char *const names[SETS] = {"a", "late", "c"};
    amp_context *amp = NULL;
    amp_desc d = settings(backend, AMP_LEVEL_O1);
    amp_param p[SETS] = {};
    void *grads[SETS];
    amp_optimizer_desc od = {};
    amp_optimizer *o = NULL;
    amp_graph *graph = NULL;
    std::vector<float> x(N);
    std::string out;
    CHECK_OK(amp_open(&amp, &d));
    for (int i = 0; i < SETS; i++) {
        void *weight = NULL;
        for (int k = 0; k < N; k++) x[(size_t)k] = amp_random_uniform(5, (uint64_t)(i * N + k)) - 0.5f;
        CHECK_OK(amp_alloc(amp, &weight, 4 * N));
        CHECK_OK(amp_alloc(amp, &grads[i], 4 * N));
        CHECK_OK(amp_copy(amp, weight, x.data(), 4 * N, AMP_COPY_TO_DEVICE));
        CHECK_OK(amp_sync(amp));
        p[i].name = names[i];
        p[i].weight = amp_tensor1(weight, AMP_F32, N);
        if (i != 1) p[i].grad = amp_tensor1(grads[i], AMP_F32, N);
    }
    CHECK_OK(amp_param_register(amp, p, SETS));
    od.params = p, od.n_params = SETS, od.kind = kind, od.lr = 0.01, od.weight_decay = 0.1;
    if (kind == AMP_SGD) od.momentum = 0.9, od.dampening = 0.25;
    CHECK_OK(amp_optimizer_create(amp, &o, &od));
    for (int step = 0; step < 10; step++) {
        bool launched = graphs && (step == 2 || step >= 7);
        if (step == 4) p[1].grad = amp_tensor1(grads[1], AMP_F32, N);
        for (int i = 0; i < SETS; i++) {
            for (int k = 0; k < N; k++) x[(size_t)k] = amp_random_uniform((uint64_t)(step + 6), (uint64_t)(i * N + k)) - 0.5f;
            CHECK_OK(amp_copy(amp, grads[i], x.data(), 4 * N, AMP_COPY_TO_DEVICE));
            CHECK_OK(amp_sync(amp));
        }
        if (graphs && (step == 2 || step == 7)) CHECK_OK(amp_graph_begin(amp));
        for (int i = 0; i < SETS && (!launched || graph == NULL); i++)
            if (p[i].grad.data != NULL && (i != 2 || step % 2 == 1 || step >= 6)) (void)amp_param_accumulate(&p[i]);
        if (!launched || graph == NULL) CHECK_OK(amp_step(o, NULL));
        if (graphs && (step == 2 || step == 7)) CHECK_OK(amp_graph_end(amp, &graph));
        if (launched) CHECK_OK(amp_graph_launch(graph));
        if (graphs && step == 4) {
            CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
            amp_graph_destroy(graph);
            graph = NULL;
        }
    }
    CHECK_OK(amp_sync(amp));
    for (int i = 0; i < SETS; i++) {
        CHECK_OK(amp_copy(amp, x.data(), p[i].weight.data, 4 * N, AMP_COPY_TO_HOST));
        CHECK_OK(amp_sync(amp));
        out.append((const char *)x.data(), 4 * N);
    }
    amp_state *state = NULL;
    int64_t counts[SETS] = {0, 0, 0};
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(o, state, "o"));
    if (kind == AMP_LION) CHECK_EQ(amp_state_count(state, "o.counts", NULL), -1);
    else CHECK_OK(amp_state_get(state, "o.counts", AMP_I64, counts, SETS));
    CHECK(kind == AMP_LION || (counts[0] == 10 && counts[1] == 6 && counts[2] == 7));
    amp_state_destroy(state);
    amp_graph_destroy(graph);
    amp_optimizer_destroy(o);
    amp_close(amp);
    return out;
}
CUDA_TEST(steps_of_each_parameter) {
    amp_machine machine;
    for (amp_optimizer_kind kind : {AMP_ADAMW, AMP_SGD, AMP_LION}) {
        std::string eager = late_run(amp_cuda(), kind, false);
        CHECK_MSG(late_run(amp_cuda(), kind, true) == eager, "kind %d: a graph has other bits", (int)kind);
        if (amp_machine_probe(&machine) == AMP_OK && machine.cpu.path >= AMP_CPU_AVX2)
            CHECK_MSG(late_run(amp_cpu(), kind, false) == eager, "kind %d: the CPU has other bits", (int)kind);
    }
}

/* The seed of the random numbers is built into a graph, the offset is not; and what changes in the middle of a capture is
 * in a part of the graph only. */
CUDA_TEST(graph_and_what_is_loaded) {
    network gpu;
    amp_graph *graph = NULL;
    amp_state *state = NULL;
    amp_context *other = NULL;
    amp_desc seeded = settings(amp_cuda(), AMP_LEVEL_O1);
    seeded.seed = 77;
    CHECK_OK(gpu.open(settings(amp_cuda(), AMP_LEVEL_O1), 0));
    CHECK_OK(gpu.for_graphs(0));
    CHECK_OK(gpu.next_copied());
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_random_save(gpu.amp, state, "own"));
    CHECK_OK(amp_open(&other, &seeded));
    CHECK_OK(amp_random_save(other, state, "other"));
    amp_close(other);
    for (int round = 0; round < 5; round++) {
        CHECK_OK(amp_graph_begin(gpu.amp));
        CHECK_OK(gpu.compute());
        CHECK_ERR(amp_random_load(gpu.amp, state, "own"), AMP_ERR_STATE);
        CHECK(says("being captured"));
        if (round == 2) CHECK_OK(amp_layer_override(gpu.amp, "no layer", AMP_F32));
        if (round == 3) CHECK_OK(amp_set_enabled(gpu.amp, 1));
        CHECK_OK(amp_step(gpu.optimizer, gpu.scaler));
        CHECK_OK(amp_graph_end(gpu.amp, &graph));
        if (round == 2 || round == 3) CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
        else CHECK_OK(amp_graph_launch(graph));
        if (round == 0) {
            CHECK_OK(amp_random_load(gpu.amp, state, "own"));
            CHECK_OK(amp_graph_launch(graph));
        }
        CHECK_OK(amp_random_load(gpu.amp, state, "other"));
        if (round == 0 || round == 2 || round == 3) CHECK_ERR(amp_graph_launch(graph), AMP_ERR_GRAPH);
        else CHECK_OK(amp_graph_launch(graph));                 /* that seed was in effect already */
        CHECK(round != 0 || says("seed"));
        amp_graph_destroy(graph);
    }
    amp_state_destroy(state);
    CHECK_OK(amp_sync(gpu.amp));
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(graph_and_what_is_loaded);
    RUN(steps_of_each_parameter);
    RUN(verified_training_goes_on);
    RUN(verify_beside_a_graph);
    RUN(numerics_of_the_device);
    RUN(placement);
    RUN(gradcheck_of_the_device);
    RUN(weights_are_set_from_fp32);
    RUN_CI(eight_bit_states_change_the_backend);
    RUN(same_numbers_as_the_cpu);
    RUN(every_order);
    RUN(recomputing_has_the_same_bits);
    RUN_PLAIN(steady_step_does_not_wait);
    RUN_PLAIN(steady_step_casts_no_weight);
    RUN_CI(copies_change_no_bits);
    RUN(copies_that_are_used);
    RUN(graphs_keep_what_they_step);
    RUN_PLAIN(captured_step_casts_no_weight);
    RUN(late_step_waits_for_two_before);
    RUN(records_are_the_cpus);
    RUN(monitor_does_not_wait);
    RUN(records_of_a_graph);
    RUN(status_of_the_gpu);
    RUN_CI(monitor_calls_may_fail);
    RUN(first_batch_waits_for_its_memory);
    RUN(events_of_the_host);
    RUN(two_devices);
    RUN(stream_and_memory_of_the_host);
    RUN(memory_of_the_host_is_a_pair);
    RUN(graph_is_the_step);
    RUN(graph_launch_is_cheap);
    RUN(graph_refusals);
    RUN(no_memory_in_a_captured_step);
    RUN(lost_in_a_captured_step);
    RUN(destroyed_stream);
    RUN(graph_given_up);
    RUN_CI(graph_after_settings_change);
    RUN(recovers_with_graphs);
    RUN(every_call_may_fail);
    RUN(lost_device);
    RUN(lost_at_the_first_cast);
    RUN(out_of_memory);
    unlink(token_file());
    return TEST_END();
}
