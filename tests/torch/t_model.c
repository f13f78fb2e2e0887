/* t_model.c - compares whole models with PyTorch: GPT-2, Llama, and an encoder with padding.  GPT-2 is examples/gpt.h, as
 * Hugging Face defines it.  Llama is examples/llama.h, on the tape.  The bidirectional encoder is built here from the
 * operators.  The golden data comes from tests/torch/oracle/gpt2.py, llama.py, encoder.py and hf_configs.py. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "../examples/gpt_files.h"
#include "golden.h"
#define AMPT_TRAPS
#include "test.h"
#include "configs.h"

enum { SEEDS = 64, WHOLE = 8, MAX_PARAMS = 48 };    /* seeds of the 16-bit tests; seeds that are stored whole */
static const float LOSS_SCALE = 1024.0f;            /* of fp16, as in tests/torch/oracle/common.py */

/* ---- What both models look like to the tests */

typedef struct ampt_model {
    const char *title;
    amp_context *amp;
    amp_param *params;
    int64_t n_params;
    float *logits;                  /* fp32 copy */
    int64_t n_logits;
    float loss;
    float scale;                    /* gradients carry it */
    const char *(*layer_of)(const char *name, char *room);      /* tensors of one layer share the floor of the error */
    int (*is_transposed)(const struct ampt_model *model, int64_t i);    /* 1: the golden gradient is [in, out] */
    void (*prepare)(struct ampt_model *model, uint32_t seed);   /* parameters, inputs and targets of a seed */
    void (*run)(struct ampt_model *model);                      /* forward in a region, backward outside of it */
    void (*close)(struct ampt_model *model);
} ampt_model;

/* Logits, loss and gradients to compare with, in the layout of the golden file. */
typedef struct ampt_reference { float *exact[MAX_PARAMS + 1]; double loss; int64_t n; } ampt_reference;
typedef struct ampt_errors { double of[MAX_PARAMS + 2]; } ampt_errors;  /* parameters, logits, loss */

static void *room_for(int64_t bytes) {
    void *p = malloc((size_t)bytes);
    if (p == NULL) exit(2);
    return p;
}

static const char *tensor_name(const ampt_model *m, int64_t i) {
    return i < m->n_params ? m->params[i].name : i == m->n_params ? "logits" : "loss";
}
static int64_t tensor_count(const ampt_model *m, int64_t i) {
    return i < m->n_params ? amp_tensor_count(&m->params[i].grad) : m->n_logits;
}

/* Gradient i, or the logits, as the golden file has them, without the loss scale. */
static float *own_result(const ampt_model *m, int64_t i) {
    int64_t n = tensor_count(m, i);
    float *out = (float *)room_for(n * 4);
    const float *grad = i < m->n_params ? (const float *)m->params[i].grad.data : m->logits;
    if (i < m->n_params && m->is_transposed(m, i))
        gpt_transpose(out, grad, m->params[i].grad.shape[0], m->params[i].grad.shape[1]);
    else
        memcpy(out, grad, (size_t)n * sizeof *out);
    for (int64_t k = 0; k < n && i < m->n_params; k++) out[k] /= m->scale;      /* a power of two */
    return out;
}

static ampt_reference reference_of_model(const ampt_model *m) {
    ampt_reference r;
    r.n = m->n_params;
    for (int64_t i = 0; i <= m->n_params; i++) r.exact[i] = own_result(m, i);
    r.loss = (double)m->loss;
    return r;
}

static ampt_reference reference_of_golden(const ampt_model *m, const ampt_golden *golden, const char *name, int seed) {
    ampt_reference r;
    char record[128];
    int64_t n;
    r.n = m->n_params;
    for (int64_t i = 0; i <= m->n_params; i++) {
        snprintf(record, sizeof record, "%s/%d/%s", name, seed, tensor_name(m, i));
        r.exact[i] = (float *)ampt_golden_read(golden, record, 1, &n);
        CHECK_EQ(n, tensor_count(m, i));
    }
    snprintf(record, sizeof record, "%s/%d/loss", name, seed);
    r.loss = ampt_golden_number(golden, record);
    return r;
}

static void reference_free(ampt_reference *r) {
    for (int64_t i = 0; i <= r->n; i++) free(r->exact[i]);
}

static void measure(const ampt_model *m, const ampt_reference *r, ampt_errors *out) {
    char layers[MAX_PARAMS + 1][64], room[64];
    ampt_norms norms[MAX_PARAMS + 1];
    int64_t i, first[MAX_PARAMS + 1];           /* the layer's first tensor carries its norm */
    memset(norms, 0, sizeof norms);
    for (i = 0; i <= m->n_params; i++) {
        snprintf(layers[i], sizeof layers[i], "%s", i < m->n_params ? m->layer_of(m->params[i].name, room) : "logits");
        for (first[i] = 0; strcmp(layers[first[i]], layers[i]) != 0; first[i]++) {}
        ampt_norms_add(&norms[first[i]], r->exact[i], tensor_count(m, i));
    }
    for (i = 0; i <= m->n_params; i++) {
        float *got = own_result(m, i);
        out->of[i] = ampt_error(got, r->exact[i], tensor_count(m, i), &norms[first[i]]);
        free(got);
    }
    out->of[i] = ampt_has_nonfinite(&m->loss, 1) ? 1e30 : fabs((double)m->loss - r->loss) / fabs(r->loss);
}

/* One seed in fp32 against the golden file: no tensor, nor the loss, may be off by more than 1e-5. */
static void check_fp32(ampt_model *m, const ampt_golden *golden, const char *name, int seed, int path) {
    ampt_reference golden_results = reference_of_golden(m, golden, name, seed);
    ampt_errors e;
    char title[64];
    m->prepare(m, (uint32_t)seed);
    m->run(m);
    measure(m, &golden_results, &e);
    for (int64_t i = 0; i < m->n_params + 2; i++) {
        CHECK_MSG(e.of[i] <= 1e-5, "%s, seed %d, path %d: %s has a relative error of %.2e", name, seed, path,
                  tensor_name(m, i), e.of[i]);
        snprintf(title, sizeof title, "%s, fp32", m->title);
        ampt_figure(title, e.of[i], 1e-5);
    }
    reference_free(&golden_results);
}

/* All seeds in 16 bits: the RMS of the error over the seeds may be at most 1.2 times PyTorch's own.  The exact result
   is the fp32 model's, whose own error is less than 1e-6 (check_fp32), hundreds of times less than what is measured
   here.  The loss is left out: one number a seed is too few for a ratio of two root mean squares. */
static void check_16bit(ampt_model *m, ampt_model *fp32, const ampt_golden *golden, const char *kind, int path) {
    double square[MAX_PARAMS + 1];
    memset(square, 0, sizeof square);
    for (int seed = 0; seed < SEEDS; seed++) {
        ampt_reference exact;
        ampt_errors e;
        char record[64];
        fp32->prepare(fp32, (uint32_t)seed);
        fp32->run(fp32);
        snprintf(record, sizeof record, "seeds/%d/loss", seed);
        CHECK(fabs((double)fp32->loss - ampt_golden_number(golden, record)) <= 1e-5 * (double)fp32->loss);
        exact = reference_of_model(fp32);
        m->prepare(m, (uint32_t)seed);
        m->run(m);
        measure(m, &exact, &e);
        for (int64_t i = 0; i <= m->n_params; i++) square[i] += e.of[i] * e.of[i];
        reference_free(&exact);
    }
    for (int64_t i = 0; i <= m->n_params; i++) {
        char record[128];
        double ratio;
        snprintf(record, sizeof record, "seeds/torch/%s/%s", kind, tensor_name(m, i));
        ratio = sqrt(square[i] / SEEDS) / ampt_golden_number(golden, record);
        CHECK_MSG(ratio <= 1.2, "path %d: %s has %.3f times PyTorch's RMS error", path, record, ratio);
        snprintf(record, sizeof record, "%s, %s", m->title, kind);
        ampt_figure(record, ratio, 1.2);
    }
}

/* The next backward overwrites the gradients. */
static void fresh_gradients(ampt_model *m) {
    for (int64_t i = 0; i < m->n_params; i++) m->params[i].grad_live = 0;
}

/* ---- Contexts */

static amp_cpu_path best_path(void) {
    amp_machine machine;
    return amp_machine_probe(&machine) == AMP_OK ? machine.cpu.path : AMP_CPU_SCALAR;
}

static amp_context *open_context(amp_dtype dtype, amp_policy policy, int threads, amp_cpu_path path) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    desc.policy = policy;
    desc.threads = threads;
    desc.cpu_path = path;
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}

static amp_context *open_level(amp_dtype dtype, amp_level level) {
    amp_context *amp = NULL;
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = dtype;
    desc.level = level;
    desc.threads = 1;
    CHECK_OK(amp_open(&amp, &desc));
    return amp;
}

/* fp32 numbers of any storage. */
static void to_float(float *out, const amp_tensor *t) {
    CHECK_OK(amp_convert(out, AMP_F32, t->data, t->dtype, amp_tensor_count(t), NULL, NULL));
}

/* ---- GPT-2 */

static const char *gpt_layer_of(const char *name, char *room) {
    const char *block = strstr(name, ".h.");
    if (block == NULL) return strstr(name, "ln_f") != NULL ? "ln_f" : "embedding";
    snprintf(room, 64, "%.*s", (int)strcspn(block + 3, "."), block + 3);
    return room;
}

typedef struct gpt_test {
    ampt_model as;
    gpt model;
    gpt_config config;
    int32_t *tokens, *targets;
    float *scale;
} gpt_test;

static int gpt_transposed(const ampt_model *m, int64_t i) {
    return i >= 2 && i < m->n_params - 2 && m->params[i].grad.ndim == 2;
}

/* The parameters of tests/torch/oracle/gpt2.py. */
static void gpt_fill(gpt *g, uint32_t seed) {
    for (int64_t i = 0; i < g->n_params; i++) {
        const amp_tensor *w = &g->params[i].weight;
        const char *name = g->params[i].name;
        int64_t n = amp_tensor_count(w);
        float *values = (float *)malloc((size_t)n * 2 * sizeof *values), *room = values + n;
        int norm_weight = strstr(name, ".ln_") != NULL && strstr(name, ".weight") != NULL;
        float scale = gpt_is_conv1d(g, i) ? sqrtf(3.0f / (float)w->shape[1]) : 0.25f;
        if (values == NULL) exit(2);
        ampt_uniform(room, n, seed, (uint32_t)i, scale, norm_weight ? 1.0f : 0.0f);
        if (gpt_is_conv1d(g, i)) gpt_transpose(values, room, w->shape[1], w->shape[0]);
        else memcpy(values, room, (size_t)n * sizeof *values);
        CHECK_OK(gpt_set(g, i, values));
        free(values);
    }
}

static void gpt_prepare(ampt_model *m, uint32_t seed) {
    gpt_test *t = (gpt_test *)m;
    int64_t n = t->config.batch * t->config.seq;
    gpt_fill(&t->model, seed);
    ampt_integers(t->tokens, n, seed, 1000, (int32_t)t->config.vocab);
    ampt_integers(t->targets, n, seed, 1001, (int32_t)t->config.vocab);
    fresh_gradients(m);
}

static void gpt_run(ampt_model *m) {
    gpt_test *t = (gpt_test *)m;
    const amp_batch batch = {.inputs = t->tokens, .targets = t->targets, .batch = t->config.batch, .seq = t->config.seq};
    CHECK_OK(gpt_forward(&t->model, t->tokens, t->config.batch, t->config.seq, 0));
    CHECK_OK(amp_tape_read(t->model.tape, t->model.logits, m->logits, m->n_logits));
    CHECK_OK(gpt_forward_loss(&t->model, &batch, t->scale, 1));
    CHECK_OK(gpt_backward(&t->model));
    CHECK_OK(gpt_loss_read(&t->model, &m->loss));
}

static void gpt_close(ampt_model *m) {
    gpt_test *t = (gpt_test *)m;
    gpt_destroy(&t->model);
    amp_free(m->amp, t->tokens); amp_free(m->amp, t->targets); amp_free(m->amp, t->scale);
    free(m->logits);
    free(t);
}

static ampt_model *gpt_open(amp_context *amp, amp_dtype activations, gpt_config config) {
    gpt_test *t = (gpt_test *)room_for(sizeof *t);
    ampt_model *m = &t->as;
    int64_t n = config.batch * config.seq;
    memset(t, 0, sizeof *t);
    t->config = config;
    t->config.activations = activations;
    CHECK_OK(gpt_create(&t->model, amp, &t->config));
    CHECK_OK(amp_alloc(amp, (void **)&t->tokens, n * 4));
    CHECK_OK(amp_alloc(amp, (void **)&t->targets, n * 4));
    CHECK_OK(amp_alloc(amp, (void **)&t->scale, 4));
    *t->scale = m->scale = activations == AMP_F16 ? LOSS_SCALE : 1.0f;
    m->amp = amp; m->params = t->model.params; m->n_params = t->model.n_params;
    m->logits = (float *)room_for(n * config.vocab * 4); m->n_logits = n * config.vocab;
    m->title = "GPT-2"; m->layer_of = gpt_layer_of; m->is_transposed = gpt_transposed;
    m->prepare = gpt_prepare; m->run = gpt_run; m->close = gpt_close;
    return m;
}

/* vocabulary, positions, channels, heads, layers, batch, tokens: as in tests/torch/oracle/gpt2.py */
static const gpt_config GPT_ODD = {61, 13, 20, 4, 3, 3, 13, AMP_DTYPE_DEFAULT, {AMP_DTYPE_DEFAULT}, AMP_DTYPE_DEFAULT, 0, 0, 0, AMP_ACT_NONE, 0, 0, 0, 0, 0, 0},
                        GPT_SHORT = {61, 13, 20, 4, 3, 3, 7, AMP_DTYPE_DEFAULT, {AMP_DTYPE_DEFAULT}, AMP_DTYPE_DEFAULT, 0, 0, 0, AMP_ACT_NONE, 0, 0, 0, 0, 0, 0},
                        GPT_SEEDS = {31, 13, 12, 3, 2, 3, 7, AMP_DTYPE_DEFAULT, {AMP_DTYPE_DEFAULT}, AMP_DTYPE_DEFAULT, 0, 0, 0, AMP_ACT_NONE, 0, 0, 0, 0, 0, 0};

static void gpt_case(const ampt_golden *golden, const char *name, gpt_config config, int path, int seeds) {
    amp_context *amp = open_context(AMP_F32, AMP_POLICY_DEFAULT, 1, (amp_cpu_path)path);
    ampt_model *m = gpt_open(amp, AMP_F32, config);
    for (int seed = 0; seed < seeds; seed++) check_fp32(m, golden, name, seed, path);
    m->close(m);
    amp_close(amp);
}

TEST(gpt2_fp32) {
    ampt_golden golden = ampt_golden_open("gpt2.bin");
    for (int path = AMP_CPU_SCALAR; path <= (int)best_path(); path++) {
        gpt_case(&golden, "odd", GPT_ODD, path, 1);
        gpt_case(&golden, "short", GPT_SHORT, path, 1);
        gpt_case(&golden, "seeds", GPT_SEEDS, path, WHOLE);
    }
    free(golden.data);
}

/* A model by two contexts on every path of this CPU, beside the errors that the file says PyTorch makes. */
static void in_16bit(amp_dtype dtype, amp_policy policy, const char *file,
                     ampt_model *(*open)(amp_context *amp, amp_dtype dtype)) {
    ampt_golden golden = ampt_golden_open(file);
    for (int path = AMP_CPU_SCALAR; path <= (int)best_path(); path++) {
        amp_context *low = open_context(dtype, policy, 1, (amp_cpu_path)path);
        amp_context *full = open_context(AMP_F32, policy, 1, (amp_cpu_path)path);
        ampt_model *m = open(low, dtype), *fp32 = open(full, AMP_F32);
        check_16bit(m, fp32, &golden, amp_dtype_name(dtype), path);
        m->close(m);
        fp32->close(fp32);
        amp_close(low);
        amp_close(full);
    }
    free(golden.data);
}
static ampt_model *gpt_of_seeds(amp_context *amp, amp_dtype dtype) { return gpt_open(amp, dtype, GPT_SEEDS); }
TEST(gpt2_bf16) { in_16bit(AMP_BF16, AMP_POLICY_DEFAULT, "gpt2.bin", gpt_of_seeds); }
TEST(gpt2_fp16) { in_16bit(AMP_F16, AMP_POLICY_DEFAULT, "gpt2.bin", gpt_of_seeds); }

/* ---- Llama, on the tape */

typedef struct llama_case { llama_config config; int64_t batch; } llama_case;
typedef struct llama_test {
    ampt_model as;
    llama model;
    amp_tape *tape;
    llama_case is;
    int32_t *tokens, *targets;
    float *scale;
} llama_test;

static const char *llama_layer_of(const char *name, char *room) {
    const char *block = strstr(name, ".layers.");
    snprintf(room, 64, "%.*s", block == NULL ? 63 : (int)(block - name) + 8 + (int)strcspn(block + 8, "."), name);
    return room;
}
static int llama_transposed(const ampt_model *m, int64_t i) { (void)m; (void)i; return 0; }

/* The parameters of tests/torch/oracle/llama.py. */
static void llama_fill(llama *model, uint32_t seed) {
    for (int64_t i = 0; i < model->n_params; i++) {
        amp_param *p = &model->params[i];
        int64_t n = amp_tensor_count(&p->weight);
        float *values = (float *)room_for(n * 4);
        int norm = p->weight.ndim == 1, embed = i == 0;
        ampt_uniform(values, n, seed, (uint32_t)i, norm || embed ? 0.25f : sqrtf(3.0f / (float)p->weight.shape[1]), norm ? 1.0f : 0.0f);
        CHECK_OK(model_param_set(model->amp, NULL, p, values));
        free(values);
    }
}

static void llama_prepare(ampt_model *m, uint32_t seed) {
    llama_test *t = (llama_test *)m;
    int64_t n = t->is.batch * t->is.config.positions;
    llama_fill(&t->model, seed);
    ampt_integers(t->tokens, n, seed, 1000, (int32_t)t->is.config.vocab);
    ampt_integers(t->targets, n, seed, 1001, (int32_t)t->is.config.vocab);
    fresh_gradients(m);
}

static void llama_run(ampt_model *m) {
    llama_test *t = (llama_test *)m;
    amp_tensor ids = amp_tensor2(t->tokens, AMP_I32, t->is.batch, t->is.config.positions);
    amp_value logits, loss;
    CHECK_OK(amp_tape_begin(t->tape, NULL));
    logits = amp_tape_keep(t->tape, llama_logits(&t->model, t->tape, &ids));
    loss = amp_tape_cross_entropy(t->tape, logits, t->targets, NULL);
    CHECK_OK(amp_tape_backward(t->tape, loss, t->scale));
    CHECK_OK(amp_tape_read(t->tape, logits, m->logits, m->n_logits));
    CHECK_OK(amp_tape_read(t->tape, loss, &m->loss, 1));
}

static void llama_close(ampt_model *m) {
    llama_test *t = (llama_test *)m;
    amp_tape_destroy(t->tape);
    llama_free(&t->model);
    amp_free(m->amp, t->tokens); amp_free(m->amp, t->targets); amp_free(m->amp, t->scale);
    free(m->logits);
    free(t);
}

static ampt_model *llama_open(amp_context *amp, amp_dtype dtype, llama_case is) {
    llama_test *t = (llama_test *)room_for(sizeof *t);
    ampt_model *m = &t->as;
    int64_t n = is.batch * is.config.positions;
    memset(t, 0, sizeof *t);
    t->is = is;
    CHECK_OK(llama_create(&t->model, amp, is.config, 0));
    CHECK_OK(amp_tape_create(amp, &t->tape, NULL));
    CHECK_OK(amp_alloc(amp, (void **)&t->tokens, n * 4));
    CHECK_OK(amp_alloc(amp, (void **)&t->targets, n * 4));
    CHECK_OK(amp_alloc(amp, (void **)&t->scale, 4));
    *t->scale = m->scale = dtype == AMP_F16 ? LOSS_SCALE : 1.0f;
    m->amp = amp; m->params = t->model.params; m->n_params = t->model.n_params;
    m->n_logits = n * is.config.vocab; m->logits = (float *)room_for(m->n_logits * 4);
    m->title = "Llama"; m->layer_of = llama_layer_of; m->is_transposed = llama_transposed;
    m->prepare = llama_prepare; m->run = llama_run; m->close = llama_close;
    return m;
}

/* As in tests/torch/oracle/llama.py. */
static const llama_case LLAMA_ODD = {{61, 13, 30, 41, 3, 3, 1, 10000, 1e-5}, 3}, LLAMA_SEEDS = {{31, 7, 24, 20, 2, 4, 2, 500, 1e-5}, 3};

TEST(llama_fp32) {
    ampt_golden golden = ampt_golden_open("llama.bin");
    for (int path = AMP_CPU_SCALAR; path <= (int)best_path(); path++)
        for (int which = 0; which < 2; which++) {
            amp_context *amp = open_context(AMP_F32, AMP_POLICY_DEFAULT, 1, (amp_cpu_path)path);
            ampt_model *m = llama_open(amp, AMP_F32, which ? LLAMA_SEEDS : LLAMA_ODD);
            for (int seed = 0; seed < (which ? WHOLE : 1); seed++) check_fp32(m, &golden, which ? "seeds" : "odd", seed, path);
            m->close(m);
            amp_close(amp);
        }
    free(golden.data);
}

static ampt_model *llama_of_seeds(amp_context *amp, amp_dtype dtype) { return llama_open(amp, dtype, LLAMA_SEEDS); }
TEST(llama_bf16) { in_16bit(AMP_BF16, AMP_POLICY_DEFAULT, "llama.bin", llama_of_seeds); }
TEST(llama_fp16) { in_16bit(AMP_F16, AMP_POLICY_DEFAULT, "llama.bin", llama_of_seeds); }

/* ---- Models whose config.json is not the usual one: tests/torch/oracle/hf_configs.py */

/* The weights of seed 3 beside a config.json, opened as --init opens them. */
static void open_described(gpt *g, amp_context *amp, json config) {
    gpt_config c = GPT_SEEDS;
    gpt_file file;
    c.layers = 3; c.batch = 2;
    CHECK_OK(gpt_create(g, amp, &c));
    gpt_fill(g, 3);
    CHECK_OK(gpt_save_safetensors(g, ampt_in_folder("model.safetensors"), 0));
    gpt_destroy(g);
    ampt_forget_origin();
    ampt_put("config.json", config.at, (size_t)(config.end - config.at));
    CHECK_OK(gpt_file_open(&file, ampt_in_folder("model.safetensors")));
    CHECK_MSG(file.described.note[0] == 0, "%s", file.described.note);
    c = file.config;
    c.batch = 2; c.seq = 7;
    CHECK_OK(gpt_create(g, amp, &c));
    CHECK_OK(gpt_file_load(&file, g));
    gpt_file_close(&file);
}

/* Saved and opened again it is the same model, by config.json and by what the weights' file says itself. */
static void save_described(const gpt *g, json config) {
    gpt_file file;
    gpt_config c = g->config;
    void *text;
    size_t bytes;
    CHECK_OK(gpt_save_safetensors((gpt *)g, ampt_in_folder("model.safetensors"), 0));
    CHECK_OK(gpt_save_config(g, ampt_in_folder("config.json")));
    CHECK_OK(amp_file_read_all(NULL, ampt_in_folder("config.json"), &text, &bytes));
    CHECK(ampt_has_members(config, (char *)text, bytes));
    amp_file_free(NULL, text, bytes);
    for (int alone = 0; alone < 2; alone++) {
        if (alone) remove(ampt_in_folder("config.json"));
        CHECK_OK(gpt_file_open(&file, ampt_in_folder("model.safetensors")));
        CHECK(file.config.act == c.act && file.config.eps == c.eps && file.config.unscaled == c.unscaled && file.config.by_layer == c.by_layer);
        CHECK(file.config.heads == c.heads && file.config.vocab == c.vocab && file.config.positions == c.positions);
        gpt_file_close(&file);
    }
}

TEST(gpt2_configs) {
    ampt_configs configs = ampt_configs_open();
    ampt_golden golden = ampt_golden_open("hf_configs.bin");
    json all = json_open(configs.data, configs.bytes), config;
    char name[128];
    int cases = 0;
    json_need(&all, '{');
    for (int more = 1; more && json_member(&all, name, &config); more = json_take(&all, ',')) {
        amp_context *amp;
        int32_t tokens[14], targets[14];
        const amp_batch batch = {.inputs = tokens, .targets = targets, .batch = 2, .seq = 7};
        float loss, logits[14 * 31];
        gpt g;
        if (strncmp(name, "gpt2/", 5) != 0) continue;
        amp = open_context(AMP_F32, AMP_POLICY_DEFAULT, 1, AMP_CPU_DEFAULT);
        open_described(&g, amp, config);
        ampt_integers(tokens, 14, 3, 1000, 31);
        ampt_integers(targets, 14, 3, 1001, 31);
        for (int recompute = 0; recompute < 2; recompute++) {
            CHECK_OK(gpt_forward(&g, tokens, 2, 7, 0));
            CHECK_OK(amp_tape_read(g.tape, g.logits, logits, 14 * 31));
            ampt_check_logits(&golden, name, logits, 14 * 31);
            CHECK_OK(gpt_forward_loss(&g, &batch, NULL, 1));
            CHECK_OK(gpt_backward(&g));
            CHECK_OK(gpt_loss_read(&g, &loss));
            ampt_check_numbers(&golden, name, g.params, g.n_params, (double)loss);
            for (int64_t i = 0; i < g.n_params; i++) g.params[i].grad_live = 0;
            g.config.recompute = 1;
            CHECK_OK(gpt_reshape(&g, 2, AMP_F32));
        }
        save_described(&g, config);
        gpt_destroy(&g);
        amp_close(amp);
        cases++;
    }
    CHECK_EQ(cases, 17);
    ampt_folder_remove();
    free(golden.data);
    amp_file_free(NULL, configs.data, configs.bytes);
}

/* ---- The encoder of tests/torch/oracle/encoder.py.  Policy TORCH, and every output has the dtype that PyTorch returns:
   norms and the residual stream fp32, linear layers and attention the region's. */

enum { ENC_MAX_LAYERS = 2, ENC_MAX_PARAMS = 4 + 12 * ENC_MAX_LAYERS + 2, ENC_MAX_BUFFERS = 128 };

typedef struct enc_config { int64_t vocab, seq, channels, heads, hidden, layers, classes, batch; } enc_config;

typedef struct enc_layer_ops {
    amp_linear_op qkv, proj, fc1, fc2;
    amp_attention_op attention;
    amp_norm_op ln1, ln2;
} enc_layer_ops;

typedef struct enc_model {
    ampt_model as;
    enc_config config;
    amp_context *amp;
    amp_param params[ENC_MAX_PARAMS];
    char names[ENC_MAX_PARAMS][48];
    int64_t n_params, rows;
    void *buffers[ENC_MAX_BUFFERS];
    int n_buffers;
    amp_embedding_op embedding;
    amp_norm_op ln;
    enc_layer_ops layers[ENC_MAX_LAYERS];
    amp_linear_op head;
    amp_cross_entropy_op loss;
    amp_tensor d_stream, d_branch, d_inner;     /* gradients, fp32 [rows, C]: of the stream, a branch, inside of it */
    int32_t *ids, *labels, *lengths;
    float *scale;
} enc_model;

static void *enc_room(enc_model *e, int64_t bytes) {
    void *p = NULL;
    CHECK(e->n_buffers < ENC_MAX_BUFFERS);
    CHECK_OK(amp_alloc(e->amp, &p, bytes));
    e->buffers[e->n_buffers++] = p;
    return p;
}

static amp_tensor enc_matrix(enc_model *e, amp_dtype dtype, int64_t rows, int64_t cols) {
    return amp_tensor2(enc_room(e, rows * cols * (int64_t)amp_dtype_size(dtype)), dtype, rows, cols);
}

/* cols 0: a vector. */
static amp_param *enc_param(enc_model *e, const char *name, int layer, int64_t rows, int64_t cols) {
    amp_param *p = &e->params[e->n_params];
    char *text = e->names[e->n_params++];
    if (layer >= 0) snprintf(text, sizeof e->names[0], "layers.%d.%s", layer, name);
    else snprintf(text, sizeof e->names[0], "%s", name);
    memset(p, 0, sizeof *p);
    p->name = text;
    p->weight = enc_matrix(e, AMP_F32, rows, cols ? cols : 1);
    p->grad = enc_matrix(e, AMP_F32, rows, cols ? cols : 1);
    if (cols == 0) p->weight.ndim = p->grad.ndim = 1;
    return p;
}

/* Makes the op's parameters and its output, of the dtype that autocast names. */
static void enc_linear(enc_model *e, amp_linear_op *op, const char *name, int layer, amp_tensor x, int64_t out) {
    char text[32];
    amp_dtype dtype = amp_autocast_result(e->amp, AMP_OP_LINEAR, NULL, x.dtype, AMP_F32);
    memset(op, 0, sizeof *op);
    snprintf(text, sizeof text, "%s.weight", name);
    op->weight = enc_param(e, text, layer, out, x.shape[1]);
    snprintf(text, sizeof text, "%s.bias", name);
    op->bias = enc_param(e, text, layer, out, 0);
    op->x = x;
    op->y = enc_matrix(e, dtype, e->rows, out);
}

/* y = LayerNorm(x + residual); residual.data NULL: of x. */
static void enc_norm(enc_model *e, amp_norm_op *op, const char *name, int layer, amp_tensor x, amp_tensor residual) {
    char text[32];
    int64_t c = e->config.channels;
    amp_dtype dtype = amp_autocast_result(e->amp, AMP_OP_LAYERNORM, NULL, AMP_F32, AMP_F32);
    memset(op, 0, sizeof *op);
    snprintf(text, sizeof text, "%s.weight", name);
    op->weight = enc_param(e, text, layer, c, 0);
    snprintf(text, sizeof text, "%s.bias", name);
    op->bias = enc_param(e, text, layer, c, 0);
    op->x = x;
    op->residual = residual;
    if (residual.data != NULL) op->sum = enc_matrix(e, AMP_F32, e->rows, c);
    op->y = enc_matrix(e, dtype, e->rows, c);
    op->mean = (float *)enc_room(e, e->rows * 4);
    op->rstd = (float *)enc_room(e, e->rows * 4);
}

/* Part 0 (q), 1 (k) or 2 (v) of a packed [batch, seq, 3, heads, dim]. */
static amp_tensor enc_part(const enc_model *e, amp_tensor qkv, int part) {
    const enc_config *c = &e->config;
    int64_t dim = c->channels / c->heads;
    amp_tensor t = amp_tensor4((char *)qkv.data + part * c->channels * (int64_t)amp_dtype_size(qkv.dtype), qkv.dtype,
                               c->batch, c->seq, c->heads, dim);
    t.stride[0] = c->seq * 3 * c->channels; t.stride[1] = 3 * c->channels; t.stride[2] = dim; t.stride[3] = 1;
    return t;
}

static void enc_attention(enc_model *e, amp_attention_op *op, amp_tensor qkv) {
    const enc_config *c = &e->config;
    amp_dtype dtype = amp_autocast_result(e->amp, AMP_OP_ATTENTION, NULL, qkv.dtype, qkv.dtype);
    amp_tensor o = enc_matrix(e, dtype, e->rows, c->channels), d_o = enc_matrix(e, dtype, e->rows, c->channels);
    amp_tensor d_qkv = enc_matrix(e, dtype, e->rows, 3 * c->channels);
    int64_t dim = c->channels / c->heads;
    memset(op, 0, sizeof *op);
    op->q = enc_part(e, qkv, 0); op->dq = enc_part(e, d_qkv, 0);
    op->k = enc_part(e, qkv, 1); op->dk = enc_part(e, d_qkv, 1);
    op->v = enc_part(e, qkv, 2); op->dv = enc_part(e, d_qkv, 2);
    op->o = amp_tensor4(o.data, dtype, c->batch, c->seq, c->heads, dim);
    op->d_o = amp_tensor4(d_o.data, dtype, c->batch, c->seq, c->heads, dim);
    op->lse = (float *)enc_room(e, e->rows * c->heads * 4);
    op->mask.lengths = e->lengths;
}

/* x: the stream that comes in.  Returns the one that goes out. */
static amp_tensor enc_layer(enc_model *e, int i, amp_tensor x) {
    enc_layer_ops *l = &e->layers[i];
    int64_t c = e->config.channels;
    amp_tensor o;
    enc_linear(e, &l->qkv, "qkv", i, x, 3 * c);
    enc_attention(e, &l->attention, l->qkv.y);
    o = amp_tensor2(l->attention.o.data, l->attention.o.dtype, e->rows, c);
    enc_linear(e, &l->proj, "proj", i, o, c);
    enc_norm(e, &l->ln1, "ln1", i, l->proj.y, x);
    enc_linear(e, &l->fc1, "fc1", i, l->ln1.y, e->config.hidden);
    l->fc1.act = AMP_ACT_GELU_ERF;
    l->fc1.pre = enc_matrix(e, l->fc1.y.dtype, e->rows, e->config.hidden);
    enc_linear(e, &l->fc2, "fc2", i, l->fc1.y, c);
    enc_norm(e, &l->ln2, "ln2", i, l->fc2.y, l->ln1.y);
    /* backward, along the same way: see enc_backward */
    l->ln2.dy = e->d_stream;  l->ln2.dx = e->d_branch;
    l->fc2.dy = e->d_branch;  l->fc2.dx = l->fc1.dy = enc_matrix(e, l->fc1.y.dtype, e->rows, e->config.hidden);
    l->fc1.dx = e->d_inner;
    l->ln1.dy = e->d_stream;  l->ln1.dx = e->d_branch;
    l->proj.dy = e->d_branch; l->proj.dx = amp_tensor2(l->attention.d_o.data, o.dtype, e->rows, c);
    l->qkv.dy = amp_tensor2(l->attention.dq.data, l->attention.dq.dtype, e->rows, 3 * c);
    l->qkv.dx = e->d_inner;
    return l->ln2.y;
}

/* Parameters are made in the order of the Python module's. */
static void enc_build(enc_model *e) {
    const enc_config *c = &e->config;
    amp_tensor x, none, sum;
    memset(&none, 0, sizeof none);
    e->d_stream = enc_matrix(e, AMP_F32, e->rows, c->channels);
    e->d_branch = enc_matrix(e, AMP_F32, e->rows, c->channels);
    e->d_inner = enc_matrix(e, AMP_F32, e->rows, c->channels);
    e->embedding.table = enc_param(e, "token.weight", -1, c->vocab, c->channels);
    e->embedding.positions = enc_param(e, "position.weight", -1, c->seq, c->channels);
    sum = enc_matrix(e, amp_autocast_result(e->amp, AMP_OP_EMBEDDING, NULL, AMP_F32, AMP_I32), e->rows, c->channels);
    e->embedding.ids = e->ids; e->embedding.seq = c->seq; e->embedding.y = sum; e->embedding.dy = e->d_branch;
    enc_norm(e, &e->ln, "ln", -1, sum, none);
    e->ln.dy = e->d_stream; e->ln.dx = e->d_branch;
    x = e->ln.y;
    for (int i = 0; i < (int)c->layers; i++) x = enc_layer(e, i, x);
    enc_linear(e, &e->head, "head", -1, x, c->classes);
    e->head.dx = e->d_stream;
    e->head.dy = e->loss.dlogits = enc_matrix(e, e->head.y.dtype, e->rows, c->classes);
    e->loss.logits = e->head.y; e->loss.labels = e->labels; e->loss.grad_scale = e->scale;
}

static void enc_forward(enc_model *e) {
    amp_context *amp = e->amp;
    CHECK_OK(amp_embedding(amp, &e->embedding));
    CHECK_OK(amp_layernorm(amp, &e->ln));
    for (int i = 0; i < (int)e->config.layers; i++) {
        enc_layer_ops *l = &e->layers[i];
        CHECK_OK(amp_linear(amp, &l->qkv));
        CHECK_OK(amp_attention(amp, &l->attention));
        CHECK_OK(amp_linear(amp, &l->proj));
        CHECK_OK(amp_layernorm(amp, &l->ln1));
        CHECK_OK(amp_linear(amp, &l->fc1));
        CHECK_OK(amp_linear(amp, &l->fc2));
        CHECK_OK(amp_layernorm(amp, &l->ln2));
    }
    CHECK_OK(amp_linear(amp, &e->head));
    CHECK_OK(amp_cross_entropy(amp, &e->loss));
}

/* d_stream comes in as the gradient of a layer's output and leaves as that of its input. */
static void enc_backward(enc_model *e) {
    amp_context *amp = e->amp;
    CHECK_OK(amp_linear_backward(amp, &e->head));
    for (int i = (int)e->config.layers - 1; i >= 0; i--) {
        enc_layer_ops *l = &e->layers[i];
        CHECK_OK(amp_layernorm_backward(amp, &l->ln2));
        CHECK_OK(amp_linear_backward(amp, &l->fc2));
        CHECK_OK(amp_linear_backward(amp, &l->fc1));
        CHECK_OK(amp_add(amp, &e->d_branch, &e->d_inner, &e->d_stream));
        CHECK_OK(amp_layernorm_backward(amp, &l->ln1));
        CHECK_OK(amp_linear_backward(amp, &l->proj));
        CHECK_OK(amp_attention_backward(amp, &l->attention));
        CHECK_OK(amp_linear_backward(amp, &l->qkv));
        CHECK_OK(amp_add(amp, &e->d_branch, &e->d_inner, &e->d_stream));
    }
    CHECK_OK(amp_layernorm_backward(amp, &e->ln));
    CHECK_OK(amp_embedding_backward(amp, &e->embedding));
}

static void enc_run(ampt_model *m) {
    enc_model *e = (enc_model *)m;
    CHECK_OK(amp_autocast_begin(m->amp, NULL));
    enc_forward(e);
    CHECK_OK(amp_autocast_end(m->amp));
    enc_backward(e);
    CHECK_OK(amp_sync(m->amp));
    to_float(m->logits, &e->head.y);
    m->loss = *e->loss.loss;
}

static void enc_fill(enc_model *e, uint32_t seed) {
    for (int64_t i = 0; i < e->n_params; i++) {
        const amp_param *p = &e->params[i];
        int table = strncmp(p->name, "token", 5) == 0 || strncmp(p->name, "position", 8) == 0;
        int norm_weight = p->weight.ndim == 1 && strstr(p->name, ".weight") != NULL;
        float scale = p->weight.ndim == 2 && !table ? sqrtf(3.0f / (float)p->weight.shape[1]) : 0.25f;
        ampt_uniform((float *)p->weight.data, amp_tensor_count(&p->weight), seed, (uint32_t)i, scale,
                     norm_weight ? 1.0f : 0.0f);
        amp_param_changed(&e->params[i]);
    }
}

static void enc_data(enc_model *e, uint32_t seed) {
    int64_t seq = e->config.seq;
    ampt_integers(e->ids, e->rows, seed, 1000, (int32_t)e->config.vocab);
    ampt_integers(e->labels, e->rows, seed, 1001, (int32_t)e->config.classes);
    ampt_integers(e->lengths, e->config.batch, seed, 1002, (int32_t)seq);
    for (int64_t b = 0; b < e->config.batch; b++) {
        e->lengths[b] = b == 0 ? (int32_t)seq : e->lengths[b] + 1;
        for (int64_t t = e->lengths[b]; t < seq; t++) e->labels[b * seq + t] = -100;
    }
}

static const char *enc_layer_of(const char *name, char *room) {
    if (strncmp(name, "layers.", 7) == 0) { snprintf(room, 64, "%.8s", name); return room; }
    if (strncmp(name, "token", 5) == 0 || strncmp(name, "position", 8) == 0) return "embedding";
    snprintf(room, 64, "%.*s", (int)strcspn(name, "."), name);
    return room;
}
static int enc_transposed(const ampt_model *m, int64_t i) { (void)m; (void)i; return 0; }

static void enc_prepare(ampt_model *m, uint32_t seed) {
    enc_fill((enc_model *)m, seed);
    enc_data((enc_model *)m, seed);
    fresh_gradients(m);
}

static void enc_close(ampt_model *m) {
    enc_model *e = (enc_model *)m;
    amp_param_forget(e->amp, e->params, e->n_params);
    for (int i = 0; i < e->n_buffers; i++) amp_free(e->amp, e->buffers[i]);
    free(m->logits);
    free(e);
}

static ampt_model *enc_open(amp_context *amp, enc_config config) {
    enc_model *e = (enc_model *)room_for(sizeof *e);
    ampt_model *m = &e->as;
    amp_autocast_desc region;
    memset(e, 0, sizeof *e);
    e->config = config; e->amp = amp; e->rows = config.batch * config.seq;
    e->ids = (int32_t *)enc_room(e, e->rows * 4);
    e->labels = (int32_t *)enc_room(e, e->rows * 4);
    e->lengths = (int32_t *)enc_room(e, config.batch * 4);
    e->scale = (float *)enc_room(e, 4);
    e->loss.loss = (float *)enc_room(e, 4);
    memset(&region, 0, sizeof region);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    CHECK_EQ(amp_autocast_active(amp, &region), 1);
    enc_build(e);
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_param_register(amp, e->params, e->n_params));
    *e->scale = m->scale = region.dtype == AMP_F16 ? LOSS_SCALE : 1.0f;
    m->amp = amp; m->params = e->params; m->n_params = e->n_params;
    m->logits = (float *)room_for(e->rows * config.classes * 4); m->n_logits = e->rows * config.classes;
    m->title = "encoder"; m->layer_of = enc_layer_of; m->is_transposed = enc_transposed;
    m->prepare = enc_prepare; m->run = enc_run; m->close = enc_close;
    return m;
}

/* vocabulary, tokens, channels, heads, hidden, layers, classes, batch: as in tests/torch/oracle/encoder.py */
static const enc_config ENC_ODD = {53, 11, 20, 4, 44, 2, 7, 3}, ENC_ONE = {53, 1, 20, 4, 44, 2, 7, 2},
                            ENC_SEEDS = {29, 7, 12, 3, 26, 2, 5, 4};

static void enc_case(const ampt_golden *golden, const char *name, enc_config config, int path, int seeds) {
    amp_context *amp = open_context(AMP_F32, AMP_POLICY_TORCH, 1, (amp_cpu_path)path);
    ampt_model *m = enc_open(amp, config);
    for (int seed = 0; seed < seeds; seed++) check_fp32(m, golden, name, seed, path);
    m->close(m);
    amp_close(amp);
}

TEST(encoder_fp32) {
    ampt_golden golden = ampt_golden_open("encoder.bin");
    for (int path = AMP_CPU_SCALAR; path <= (int)best_path(); path++) {
        enc_case(&golden, "odd", ENC_ODD, path, 1);
        enc_case(&golden, "one", ENC_ONE, path, 1);
        enc_case(&golden, "seeds", ENC_SEEDS, path, WHOLE);
    }
    free(golden.data);
}

static ampt_model *enc_of_seeds(amp_context *amp, amp_dtype dtype) { (void)dtype; return enc_open(amp, ENC_SEEDS); }
TEST(encoder_bf16) { in_16bit(AMP_BF16, AMP_POLICY_TORCH, "encoder.bin", enc_of_seeds); }
TEST(encoder_fp16) { in_16bit(AMP_F16, AMP_POLICY_TORCH, "encoder.bin", enc_of_seeds); }

/* ---- Properties that need no golden data */

/* Logits, loss and gradients in one array; the caller frees it. */
static float *everything(const ampt_model *m, int64_t *count) {
    int64_t n = m->n_logits + 1, at;
    float *out;
    for (int64_t i = 0; i < m->n_params; i++) n += amp_tensor_count(&m->params[i].grad);
    out = (float *)malloc((size_t)n * sizeof *out);
    if (out == NULL) exit(2);
    memcpy(out, m->logits, (size_t)m->n_logits * sizeof *out);
    out[m->n_logits] = m->loss;
    at = m->n_logits + 1;
    for (int64_t i = 0; i < m->n_params; i++) {
        int64_t k = amp_tensor_count(&m->params[i].grad);
        memcpy(out + at, m->params[i].grad.data, (size_t)k * sizeof *out);
        at += k;
    }
    *count = n;
    return out;
}

/* A GPT-2 of odd sizes, run once. */
static const gpt_config GPT_LARGER = {509, 67, 72, 4, 2, 3, 67, AMP_DTYPE_DEFAULT, {AMP_DTYPE_DEFAULT}, AMP_DTYPE_DEFAULT, 0, 0, 0, AMP_ACT_NONE, 0, 0, 0, 0, 0, 0};

static float *run_once(amp_dtype dtype, int64_t *count) {
    amp_context *amp = open_context(dtype, AMP_POLICY_DEFAULT, 0, AMP_CPU_DEFAULT);
    ampt_model *m = gpt_open(amp, dtype == AMP_TF32 ? AMP_F32 : dtype, GPT_LARGER);
    float *out;
    m->prepare(m, 5);
    m->run(m);
    out = everything(m, count);
    m->close(m);
    amp_close(amp);
    return out;
}

/* |a - factor b| / |factor b| */
static double distance(const float *a, const float *b, double factor, int64_t n) {
    double off = 0, own = 0;
    for (int64_t i = 0; i < n; i++) {
        double exact = factor * (double)b[i];
        off += ((double)a[i] - exact) * ((double)a[i] - exact);
        own += exact * exact;
    }
    return sqrt(off / own);
}

/* Each precision computes what its name says: the distance of the logits to fp32 lies between a quarter of its unit
   roundoff and 30 times that (the model is about 20 roundings deep).  TF32 has fp16's significand in its operands. */
TEST(precisions_differ) {
    static const struct { amp_dtype dtype; double unit; } kinds[3] = {
        {AMP_TF32, 0x1p-11}, {AMP_F16, 0x1p-11}, {AMP_BF16, 0x1p-8}
    };
    int64_t n = 0, logits = 3 * 67 * 509;
    float *exact = run_once(AMP_F32, &n);
    for (int k = 0; k < 3; k++) {
        float *x = run_once(kinds[k].dtype, &n);
        double off = distance(x, exact, 1, logits);
        CHECK_MSG(off > 0.25 * kinds[k].unit && off < 30 * kinds[k].unit, "%s: logits differ from fp32 by %.2e",
                  amp_dtype_name(kinds[k].dtype), off);
        free(x);
    }
    free(exact);
}

/* Without zeroing anything: the first backward of a cycle overwrites what was there, a second one adds to it. */
TEST(backward_adds) {
    amp_context *amp = open_context(AMP_F32, AMP_POLICY_TORCH, 0, AMP_CPU_DEFAULT);
    ampt_model *m = enc_open(amp, ENC_ODD);
    float *first, *again, *twice;
    int64_t n, k, at;
    m->prepare(m, 1);
    for (int64_t i = 0; i < m->n_params; i++)
        memset(m->params[i].grad.data, 0xff, (size_t)tensor_count(m, i) * 4);       /* NaN */
    m->run(m);
    first = everything(m, &n);
    CHECK(!ampt_has_nonfinite(first, n));
    m->run(m);
    twice = everything(m, &k);
    at = m->n_logits + 1;
    for (int64_t i = 0; i < m->n_params; at += tensor_count(m, i++))
        CHECK_MSG(distance(twice + at, first + at, 2, tensor_count(m, i)) <= 1e-5, "%s", m->params[i].name);
    fresh_gradients(m);
    m->run(m);
    again = everything(m, &k);
    CHECK(memcmp(first, again, (size_t)n * sizeof *first) == 0);
    free(first); free(again); free(twice);
    m->close(m);
    amp_close(amp);
}

/* What padding hides cannot reach the result: other tokens behind the lengths change neither the loss nor any
   gradient, the embedding rows of those tokens included, which get none. */
TEST(padding_is_invisible) {
    amp_context *amp = open_context(AMP_BF16, AMP_POLICY_TORCH, 0, AMP_CPU_DEFAULT);
    ampt_model *m = enc_open(amp, ENC_ODD);
    enc_model *e = (enc_model *)m;
    float *before, *after;
    int64_t n, k, changed = 0;
    m->prepare(m, 2);
    m->run(m);
    before = everything(m, &n);
    for (int64_t i = 0; i < e->rows; i++)
        if (e->labels[i] == -100) { e->ids[i] = (e->ids[i] + 1) % (int32_t)e->config.vocab; changed++; }
    CHECK(changed > 0);
    fresh_gradients(m);
    m->run(m);
    after = everything(m, &k);
    CHECK(memcmp(before + m->n_logits, after + m->n_logits, (size_t)(n - m->n_logits) * sizeof *before) == 0);
    CHECK(memcmp(before, after, (size_t)m->n_logits * sizeof *before) != 0);     /* their own logits do change */
    free(before); free(after);
    m->close(m);
    amp_close(amp);
}

/* Ten steps on one batch, with a scaler: the loss falls by more than half. */
static void check_training(amp_dtype dtype, amp_level level) {
    amp_context *amp = open_level(dtype, level);
    ampt_model *m = gpt_open(amp, dtype == AMP_TF32 || level == AMP_LEVEL_O0 ? AMP_F32 : dtype, GPT_ODD);
    gpt_test *t = (gpt_test *)m;
    amp_scaler *scaler = NULL;
    amp_optimizer *optimizer = NULL;
    amp_optimizer_desc desc;
    float first = 0;
    m->prepare(m, 3);
    memset(&desc, 0, sizeof desc);
    desc.params = m->params; desc.n_params = m->n_params;
    desc.lr = 0.02f; desc.clip_norm = 1.0f;
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    CHECK_OK(amp_optimizer_create(amp, &optimizer, &desc));
    for (int step = 0; step < 10; step++) {
        *t->scale = *amp_scaler_scale_ptr(scaler);
        m->run(m);
        CHECK_OK(amp_step(optimizer, scaler));
        if (step == 0) first = m->loss;
    }
    CHECK_MSG(m->loss < 0.5f * first, "%s, level O%d: loss %.3f after %.3f", amp_dtype_name(dtype), (int)level - 1,
              (double)m->loss, (double)first);
    amp_optimizer_destroy(optimizer);
    amp_scaler_destroy(scaler);
    m->close(m);
    amp_close(amp);
}

TEST(training_reduces_the_loss) {
    static const amp_dtype dtypes[4] = {AMP_F32, AMP_TF32, AMP_F16, AMP_BF16};
    for (int d = 0; d < 4; d++) check_training(dtypes[d], AMP_LEVEL_O1);
    for (int d = 2; d < 4; d++) check_training(dtypes[d], AMP_LEVEL_O2);
    check_training(AMP_BF16, AMP_LEVEL_O0);
    check_training(AMP_BF16, AMP_LEVEL_O3);
}

/* What a level stores: O0 and O1 fp32 weights, O2 and O3 16-bit weights but fp32 norms; and O0 in bf16 is fp32. */
TEST(levels) {
    static const amp_level levels[4] = {AMP_LEVEL_O0, AMP_LEVEL_O1, AMP_LEVEL_O2, AMP_LEVEL_O3};
    amp_context *amp;
    ampt_model *m;
    float *exact, *o0;
    int64_t n, k;
    for (int l = 0; l < 4; l++) {
        amp = open_level(AMP_BF16, levels[l]);
        CHECK_EQ(amp_param_dtype(amp, 0), l < 2 ? AMP_F32 : AMP_BF16);
        CHECK_EQ(amp_param_dtype(amp, 1), l < 3 ? AMP_F32 : AMP_BF16);
        amp_close(amp);
    }
    amp = open_level(AMP_F32, AMP_LEVEL_O1);
    m = gpt_open(amp, AMP_F32, GPT_ODD);
    m->prepare(m, 4); m->run(m);
    exact = everything(m, &n);
    m->close(m); amp_close(amp);
    amp = open_level(AMP_BF16, AMP_LEVEL_O0);
    m = gpt_open(amp, AMP_F32, GPT_ODD);
    m->prepare(m, 4); m->run(m);
    o0 = everything(m, &k);
    m->close(m); amp_close(amp);
    CHECK(n == k && memcmp(exact, o0, (size_t)n * sizeof *exact) == 0);
    free(exact); free(o0);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(gpt2_fp32);
    RUN(gpt2_bf16);
    RUN(gpt2_fp16);
    RUN(gpt2_configs);
    RUN(llama_fp32); RUN(llama_bf16); RUN(llama_fp16);
    RUN(encoder_fp32);
    RUN(encoder_bf16);
    RUN(encoder_fp16);
    RUN(precisions_differ);
    RUN(backward_adds);
    RUN(padding_is_invisible);
    RUN(training_reduces_the_loss);
    RUN(levels);
    return TEST_END();
}
