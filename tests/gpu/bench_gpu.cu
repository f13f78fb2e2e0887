/* bench_gpu.cu - times every memory-bound kernel of amp_cuda.cu, matrix products, attention, and plain copies.
 *
 *     bench_gpu [--rounds 9] [--ms 20] [--tiny] [--only TEXT] [--autotune] [--describe] [--list] [--turns]
 *
 * Prints one JSON object per line: first the device, then for each case the bytes that must move (each operand read once,
 * each result written once) and the median time of a launch.  A round is as many launches as fill --ms, between two events.
 * Launches use several sets of operands in turn, so that no operand is in the L2 cache.  The shapes are those of GPT-2 124M
 * with 64 sequences of 1024 tokens.
 *
 * --tiny selects the smallest sizes that take the same path, for the model GPU.  --describe prints only the line of the
 * device.  --list prints the names of all cases, with their groups.  With --turns, lines on the input say what to do next,
 * so that another program's rounds can take turns with these: "case NAME" prepares its operands, "round" times one round of
 * them, and "end" frees them.  Each is answered by one line.  A case that fails prints a line with the reason, and the next
 * one is tried.  The program then exits with 1.
 *
 * host_us is the CPU time of the call of a launch, with the GPU idle before.  mhz is the multiprocessors' clock right after
 * the last launch of a round.  peer_gpu.py times the same cases in PyTorch, under the same names. */
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <functional>
#include <map>
#include <math.h>
#include <stdlib.h>
#include <string>
#include <time.h>
#include <vector>
#include "amp.h"

#if defined(COC_CUDA_RUNTIME_H)                 /* the model GPU: the time of day */
void coc_set_modelled_clock(int modelled);
#else
static void coc_set_modelled_clock(int) {}
#endif

namespace {

typedef std::function<void(int)> launch;        /* once, on operands `set` */

/* rows x channels: activations; vocabulary: columns of the logits, classes of them in use; scores: heads x tokens^2 */
struct shapes { int64_t rows, channels, hidden, vocabulary, classes, logit_rows, heads, tokens, layers; };
const shapes gpt2 = {65536, 768, 3072, 50304, 50257, 16384, 96, 1024, 12};
const shapes tiny = {64, 64, 256, 512, 500, 12, 2, 32, 2};

struct settings { shapes s; int rounds; double ms; bool small, autotune, describe, list, turns; std::string only; };
settings given;
std::string asked, group;                       /* the case that --turns is at; the group of the cases under way */

/* What ends a case.  host_fail keeps the backend's own words. */
struct failure { std::string why; };
std::string last_text;

void need(bool ok, const char *what) {
    if (ok) return;
    std::string why = last_text.empty() ? cudaGetErrorString(cudaGetLastError()) : last_text;
    last_text.clear();
    throw failure{std::string(what) + ": " + why};
}
void need(cudaError_t error, const char *what) {
    if (error != cudaSuccess) throw failure{std::string(what) + ": " + cudaGetErrorString(error)};
}

/* ---- The device under test */

amp_result host_fail(void *, amp_result result, const char *text) {
    last_text = text;
    return result;
}
void host_log(void *, amp_log_level, int, const char *text) { fprintf(stderr, "bench_gpu: %s\n", text); }
void *host_alloc(void *, size_t size, size_t) { return malloc(size); }
void host_free(void *, void *p, size_t) { free(p); }

struct gpu {
    const amp_backend *b = amp_cuda();
    void *dev = NULL;
    cudaStream_t stream = NULL;
    cudaEvent_t from = NULL, to = NULL;
    unsigned long long *ticks = NULL;                   /* cycles and nanoseconds, in pinned memory */
    size_t l2 = 0;
    std::vector<std::pair<void *, size_t> > owned;      /* by the case under way */
    std::map<amp_dtype, void *> noise;                  /* random numbers that operands are filled from */

    void open() {
        static const amp_host host = {NULL, host_fail, host_log, host_alloc, host_free, NULL};
        amp_backend_desc d = {};
        need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
        need(cudaEventCreateWithFlags(&from, cudaEventDefault), "an event");
        need(cudaEventCreateWithFlags(&to, cudaEventDefault), "an event");
        need(cudaMallocHost((void **)&ticks, 2 * sizeof *ticks), "pinned memory");
        ticks[0] = 0, ticks[1] = 1;
        d.stream = stream;
        d.autotune = given.autotune;
        need(b->open(&dev, &host, &d) == AMP_OK, "amp_cuda");
    }
    void close() {
        release();
        for (const auto &numbers : noise) b->free(dev, numbers.second, noise_bytes());
        b->close(dev);
        need(cudaFreeHost(ticks), "pinned memory");
        need(cudaEventDestroy(from), "an event");
        need(cudaEventDestroy(to), "an event");
        need(cudaStreamDestroy(stream), "a stream");
    }
    void sync() { need(b->stream_sync(dev, NULL) == AMP_OK, "waiting for the GPU"); }
    void *room(int64_t bytes) {
        void *p = NULL;
        need(b->alloc(dev, &p, (size_t)bytes) == AMP_OK, "memory");
        owned.push_back(std::make_pair(p, (size_t)bytes));
        return p;
    }
    void release() {
        (void)b->stream_sync(dev, NULL);
        for (const auto &piece : owned) b->free(dev, piece.first, piece.second);
        owned.clear();
        if (given.turns) (void)b->trim(dev);        /* another program's operands need the memory */
    }
    template <class T> T *put(const std::vector<T> &values) {
        T *p = (T *)room((int64_t)(values.size() * sizeof(T)));
        need(b->copy(dev, p, values.data(), values.size() * sizeof(T), AMP_COPY_TO_DEVICE, NULL) == AMP_OK, "a copy");
        sync();
        return p;
    }
    static size_t noise_bytes() { return given.small ? 1 << 16 : 1 << 26; }

    /* n random numbers in [-1, 1): a block of them, again and again. */
    void *random(amp_dtype dtype, int64_t n) {
        size_t bytes = (size_t)n * amp_dtype_size(dtype), block = noise_bytes(), done = 0;
        char *p = (char *)room((int64_t)bytes);
        if (noise.count(dtype) == 0) fill_noise(dtype);
        for (; done < bytes; done += block)
            need(b->copy(dev, p + done, noise[dtype], std::min(block, bytes - done), AMP_COPY_ON_DEVICE, NULL) == AMP_OK,
                 "a copy");
        sync();
        return p;
    }
    void fill_noise(amp_dtype dtype) {
        size_t n = noise_bytes() / amp_dtype_size(dtype);
        std::vector<float> values(n);
        std::string stored(noise_bytes(), 0);
        void *numbers = NULL;
        for (size_t i = 0; i < n; i++) values[i] = 2.0f * amp_random_uniform(7, i) - 1.0f;
        need(amp_convert(&stored[0], dtype, values.data(), AMP_F32, (int64_t)n, NULL, NULL) == AMP_OK, "random numbers");
        need(b->alloc(dev, &numbers, noise_bytes()) == AMP_OK, "memory");
        noise[dtype] = numbers;
        need(b->copy(dev, numbers, stored.data(), stored.size(), AMP_COPY_TO_DEVICE, NULL) == AMP_OK, "a copy");
        sync();
    }
    /* 0, 1, ... limit - 1 in random order, with repetitions. */
    int32_t *ids(int64_t n, int64_t limit, uint64_t seed) {
        std::vector<int32_t> values((size_t)n);
        for (size_t i = 0; i < values.size(); i++) values[i] = (int32_t)(amp_random_u32(seed, i) % (uint64_t)limit);
        return put(values);
    }
    amp_mat matrix(int64_t rows, int64_t cols, amp_dtype dtype = AMP_BF16) {
        amp_mat m = {random(dtype, rows * cols), dtype, 0, rows, cols, cols};
        return m;
    }
    amp_mat result(int64_t rows, int64_t cols, amp_dtype dtype = AMP_BF16) {
        amp_mat m = {room(rows * cols * (int64_t)amp_dtype_size(dtype)), dtype, 0, rows, cols, cols};
        return m;
    }
};
gpu g;

/* ---- Timing */

bool wanted(const std::string &name) {
    if (given.list) printf("{\"event\": \"listed\", \"group\": \"%s\", \"case\": \"%s\"}\n", group.c_str(), name.c_str());
    if (given.list) return false;
    return given.turns ? name == asked : name.find(given.only) != std::string::npos;
}

/* Runs a case, or several; one that fails leaves a line, and the memory of its operands. */
bool failed;
void attempt(const std::string &name, const std::function<void()> &work) {
    std::string why;
    try { work(); } catch (const failure &f) { why = f.why; }
    if (why.empty()) return;
    for (char &c : why) if (c == '"' || c == '\\' || (unsigned char)c < ' ') c = ' ';
    printf("{\"event\": \"failed\", \"case\": \"%s\", \"why\": \"%s\"}\n", name.c_str(), why.c_str());
    fflush(stdout);
    failed = true;
    g.release();
}

/* So many sets that a launch finds nothing of its operands in the L2 cache: four times its size lie between. */
int sets_for(double bytes) {
    return given.small ? 2 : std::max(2, std::min(16, (int)(4 * (double)g.l2 / bytes) + 1));
}

/* The cycles of 50 microseconds. */
__global__ void __launch_bounds__(32) clock_kernel(unsigned long long *out) {
#if defined(__CUDA_ARCH__)
    unsigned long long begin, now;
    long long from = clock64();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin)::"memory");
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory"); while (now - begin < 50000);
    out[0] = (unsigned long long)(clock64() - from), out[1] = now - begin;
#else
    (void)out;
#endif
}
double mhz() { return 1e3 * (double)g.ticks[0] / (double)g.ticks[1]; }

double milliseconds(const launch &run, int count, int sets) {
    float ms = 0;
    need(cudaEventRecord(g.from, g.stream), "an event");
    for (int i = 0; i < count; i++) run(i % sets);
    need(cudaEventRecord(g.to, g.stream), "an event");
    void *args[] = {(void *)&g.ticks};
    need(cudaLaunchKernel(clock_kernel, dim3(1), dim3(1), args, 0, g.stream), "the clock");
    need(cudaStreamSynchronize(g.stream), "the launches");
    need(cudaEventElapsedTime(&ms, g.from, g.to), "an event");
    return (double)ms / count;
}

/* Microseconds of the CPU for a launch, of so few that the stream's queue has room for them. */
double host_microseconds(const launch &run, int sets) {
    timespec from, to;
    g.sync();
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < sets; i++) run(i);
    clock_gettime(CLOCK_MONOTONIC, &to);
    g.sync();
    return (1e6 * (double)(to.tv_sec - from.tv_sec) + 1e-3 * (double)(to.tv_nsec - from.tv_nsec)) / sets;
}

/* How many launches fill a round; loads the code and takes scratch memory. */
int launches_for(const launch &run, int sets) {
    (void)milliseconds(run, sets, sets);
    if (given.small) return sets;
    double first = milliseconds(run, 2 * sets, sets);
    int count = std::max(sets, std::min(2000, (int)(given.ms / std::max(first, 1e-3)) + 1));
    (void)milliseconds(run, count, sets);
    return count;
}

std::string next_line() {
    char text[256];
    if (fgets(text, sizeof text, stdin) == NULL) return "";
    std::string line(text);
    while (!line.empty() && line[line.size() - 1] == '\n') line.resize(line.size() - 1);
    return line;
}

/* Rounds one by one, as the input asks for them. */
void take_turns(const launch &run, int count, int sets) {
    while (next_line() == "round") {
        double ms = milliseconds(run, count, sets);
        printf("{\"event\": \"round\", \"ms\": %.6f, \"mhz\": %.0f}\n", ms, mhz());
        fflush(stdout);
    }
}

/* Times a case and prints its line; the operands are given back.  operations: of a matrix product. */
void report(const char *name, double bytes, int sets, const launch &run, double operations = 0) {
    std::vector<double> rounds;
    int count = launches_for(run, sets);
    double host = host_microseconds(run, sets);
    for (int i = 0; i < given.rounds && !given.turns; i++) rounds.push_back(milliseconds(run, count, sets));
    std::sort(rounds.begin(), rounds.end());
    printf("{\"event\": \"%s\", \"case\": \"%s\", \"bytes\": %.0f, \"launches\": %d, \"sets\": %d, \"operations\": %.0f, "
           "\"host_us\": %.2f", given.turns ? "ready" : "case", name, bytes, count, sets, operations, host);
    if (!given.turns)
        printf(", \"ms\": %.6f, \"best_ms\": %.6f, \"worst_ms\": %.6f, \"mhz\": %.0f", rounds[rounds.size() / 2],
               rounds.front(), rounds.back(), mhz());
    printf("}\n");
    fflush(stdout);
    if (given.turns) take_turns(run, count, sets);
    g.release();
}

/* A case whose operands are arguments of one kernel: make() puts a set of them on the GPU. */
template <class A>
void kernel_case(const char *name, double bytes, amp_result (*kernel)(void *, const A *, void *), const std::function<A()> &make,
                 double operations = 0) {
    if (!wanted(name)) return;
    attempt(name, [&] {
        std::vector<A> sets;
        for (int i = 0; i < sets_for(bytes); i++) sets.push_back(make());
        auto run = [&](int set) { need(kernel(g.dev, &sets[(size_t)set], NULL) == AMP_OK, name); };
        report(name, bytes, (int)sets.size(), run, operations);
    });
}

/* ---- Copies: what everything else is measured by */

/* Reads everything; `out` is written only if the sum has a value that it does not have. */
__global__ void __launch_bounds__(256) read_kernel(const uint4 *p, int64_t n, uint32_t *out) {
    uint32_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint4 x = p[i];
        sum |= x.x & x.y & x.z & x.w;
    }
    if (sum == 0x12345678u) *out = sum;
}

void copy_case(const char *name, int64_t bytes) {
    if (!wanted(name)) return;
    int sets = sets_for((double)bytes);
    std::vector<void *> from, to;
    for (int i = 0; i < sets; i++) {
        from.push_back(g.random(AMP_F32, bytes / 8));
        to.push_back(g.room(bytes / 2));
    }
    report(name, (double)bytes, sets, [&](int set) {
        size_t i = (size_t)set;
        need(cudaMemcpyAsync(to[i], from[i], (size_t)bytes / 2, cudaMemcpyDeviceToDevice, g.stream), "a copy");
    });
}

void read_case(const char *name, int64_t bytes, int multiprocessors) {
    if (!wanted(name)) return;
    int sets = sets_for((double)bytes);
    std::vector<const uint4 *> from;
    uint32_t *out = (uint32_t *)g.room(4);
    for (int i = 0; i < sets; i++) from.push_back((const uint4 *)g.random(AMP_F32, bytes / 4));
    report(name, (double)bytes, sets, [&](int set) {
        int64_t n = bytes / 16;
        void *args[] = {(void *)&from[(size_t)set], (void *)&n, (void *)&out};
        need(cudaLaunchKernel(read_kernel, dim3((unsigned)multiprocessors * 8), dim3(256), args, 0, g.stream), "a read");
    });
}

/* ---- Casts */

void cast_case(const char *name, amp_dtype to, amp_dtype from, amp_rounding rounding = AMP_ROUND_DEFAULT) {
    int64_t n = given.s.rows * given.s.channels;
    double bytes = (double)n * (double)(amp_dtype_size(to) + amp_dtype_size(from));
    kernel_case<amp_k_cast>(name, bytes, g.b->cast, [=] {
        amp_k_cast a = {};
        a.n = n, a.src_dtype = from, a.dst_dtype = to, a.how.rounding = rounding;
        a.src = g.random(from, n);
        a.dst = g.room(n * (int64_t)amp_dtype_size(to));
        return a;
    });
}

void casts() {
    cast_case("cast fp32 to bf16", AMP_BF16, AMP_F32);
    cast_case("cast fp32 to fp16", AMP_F16, AMP_F32);
    cast_case("cast bf16 to fp32", AMP_F32, AMP_BF16);
    cast_case("cast fp32 to e4m3", AMP_E4M3, AMP_F32);
    cast_case("cast fp32 to bf16, stochastic", AMP_BF16, AMP_F32, AMP_ROUND_STOCHASTIC);
    /* token ids come as u16 */
    int64_t n = given.s.rows * given.s.channels;
    kernel_case<amp_k_cast>("widen ids", 6.0 * (double)n, g.b->cast, [=] {
        amp_k_cast a = {};
        a.n = n, a.src_dtype = AMP_U16, a.dst_dtype = AMP_I32, a.src = g.random(AMP_BF16, n), a.dst = g.room(4 * n);
        return a;
    });
}

/* ---- Multi-tensor kernels over the parameters of GPT-2 */

std::vector<int64_t> parameter_sizes() {
    int64_t c = given.s.channels;
    std::vector<int64_t> n = {given.s.vocabulary * c, given.s.tokens * c};
    for (int64_t i = 0; i < given.s.layers; i++)
        for (int64_t size : {c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c}) n.push_back(size);
    n.push_back(c);
    n.push_back(c);
    return n;
}
double parameters() {
    double sum = 0;
    for (int64_t n : parameter_sizes()) sum += (double)n;
    return sum;
}

/* master NONE: the weight is all there is; moments: storage of m and v */
struct optimizer_layout { amp_dtype weight, grad; amp_master_kind master; bool m, v; amp_dtype moments; };

/* Bytes of one step per parameter: the gradient is read, everything else read and written, but weights below an fp32 master
   only written. */
double step_bytes(const optimizer_layout &p) {
    double weight = (double)amp_dtype_size(p.weight), moment = (double)amp_dtype_size(p.moments);
    double master = p.master == AMP_MASTER_F32 ? 4 : p.master == AMP_MASTER_REMAINDER ? 2 : 0;
    return (double)amp_dtype_size(p.grad) + (p.master == AMP_MASTER_F32 ? 1 : 2) * weight + 2 * master +
           2 * moment * ((p.m ? 1 : 0) + (p.v ? 1 : 0));
}

struct parameter_table { const amp_k_tensor *rows; int64_t count; amp_k_grad_stats *found; float *factors; amp_k_inspected *inspected; };
amp_k_tensor put_parameter(const optimizer_layout &layout, int64_t n) {
    amp_k_tensor t = {};
    int64_t moment_bytes = n * (int64_t)amp_dtype_size(layout.moments);
    t.weight_dtype = layout.weight, t.grad_dtype = layout.grad, t.count = n, t.live = 1, t.lr_scale = 1;
    t.master_kind = layout.master, t.moment_dtype = layout.moments;
    t.grad = g.random(layout.grad, n);
    if (layout.m) t.weight = g.random(layout.weight, n), t.m = g.random(layout.moments, n);
    if (layout.m) t.steps = g.put(std::vector<amp_k_steps>(1));
    if (layout.master == AMP_MASTER_F32) t.master = g.random(AMP_F32, n);
    if (layout.master == AMP_MASTER_REMAINDER) t.master = g.random(AMP_BF16, n);        /* any 16 bits */
    if (layout.v) t.v = g.room(moment_bytes), need(g.b->fill(g.dev, t.v, 0, (size_t)moment_bytes, NULL) == AMP_OK, "zeros");
    return t;
}
parameter_table put_parameters(const optimizer_layout &layout) {
    std::vector<amp_k_tensor> rows;
    std::vector<amp_k_grad_stats> found(1, amp_k_grad_stats());
    for (int64_t n : parameter_sizes()) rows.push_back(put_parameter(layout, n));
    found[0].multiplier = found[0].factor = found[0].clip_coef = 1;
    found[0].attempts = found[0].step = 1, found[0].first_bad = -1;
    found[0].lr = 1e-4;
    parameter_table p = {g.put(rows), (int64_t)rows.size(), g.put(found), g.put(std::vector<float>{2.0f, 0.5f}),
                         g.put(std::vector<amp_k_inspected>(rows.size()))};
    return p;
}

/* A case over the gradients of all parameters: run(table, turn), turn counting the launches on that table. */
typedef std::function<void(const parameter_table &, int)> table_launch;
void gradients_case(const char *name, amp_dtype grad, double bytes, const table_launch &run) {
    if (!wanted(name)) return;
    attempt(name, [&] {
        std::vector<parameter_table> tables((size_t)sets_for(bytes));
        std::vector<int> turn(tables.size());
        for (auto &table : tables) table = put_parameters({AMP_F32, grad, AMP_MASTER_NONE, false, false, AMP_F32});
        report(name, bytes, (int)tables.size(), [&](int set) { run(tables[(size_t)set], turn[(size_t)set]++); });
    });
}

amp_result check(const parameter_table &p, const float *multiply) {
    amp_k_check a = {};
    a.table = p.rows, a.tensors = p.count, a.found = p.found, a.multiply = multiply;
    return g.b->check(g.dev, &a, NULL);
}
amp_result scale(const parameter_table &p, const float *factor) {
    amp_k_scale_ranges a = {p.rows, p.count, factor};
    return g.b->scale_ranges(g.dev, &a, NULL);
}
amp_result rule(amp_rule_kind kind, const parameter_table &p, double clip_norm) {
    amp_k_rule a = {};
    a.kind = kind, a.found = p.found, a.step_rule.divisor = 1, a.step_rule.clip_norm = clip_norm;
    return g.b->rule(g.dev, &a, NULL);
}

/* factors 2 and 0.5 in turn: the gradients stay as large as they are */
void check_case(const char *name, amp_dtype grad, bool multiply) {
    double bytes = parameters() * (double)amp_dtype_size(grad) * (multiply ? 2 : 1);
    gradients_case(name, grad, bytes, [=](const parameter_table &p, int turn) {
        need(check(p, multiply ? p.factors + (turn & 1) : NULL) == AMP_OK, name);
    });
}

void inspect_case(const char *name, amp_dtype grad) {
    gradients_case(name, grad, parameters() * (double)amp_dtype_size(grad), [=](const parameter_table &p, int) {
        amp_k_inspect a = {p.rows, p.count, AMP_F16, 0, p.inspected};
        need(g.b->inspect(g.dev, &a, NULL) == AMP_OK, name);
    });
}

/* The norm, then the gradients times the coefficient, which is below 1 each time: a limit that falls with the norm. */
void clip_norm_case(const char *name) {
    double norm = sqrt(parameters() / 3);                       /* of numbers spread evenly over [-1, 1) */
    gradients_case(name, AMP_F32, 12 * parameters(), [=](const parameter_table &p, int turn) {
        double limit = norm * pow(0.999, turn + 1);
        need(rule(AMP_RULE_BEGIN, p, limit) == AMP_OK && check(p, NULL) == AMP_OK && rule(AMP_RULE_CHECKED, p, limit) == AMP_OK &&
             scale(p, &p.found->clip_coef) == AMP_OK, name);
    });
}

void scaler_case(const char *name) {
    kernel_case<amp_k_rule>(name, (double)sizeof(amp_k_scaler), g.b->rule, [] {
        amp_k_rule a = {};
        amp_k_scaler s = {};
        s.scale = 65536, s.inv_scale = 1.0f / 65536, s.growth_interval = 2000, s.hysteresis_left = 1;
        a.kind = AMP_RULE_UPDATE, a.scaler = g.put(std::vector<amp_k_scaler>(1, s));
        a.scaler_rule.growth_factor = 2, a.scaler_rule.backoff_factor = 0.5, a.scaler_rule.max_scale = 1 << 24;
        a.scaler_rule.growth_interval = 2000, a.scaler_rule.hysteresis = 1;
        return a;
    });
}

void adamw_case(const char *name, optimizer_layout layout) {
    kernel_case<amp_k_adamw>(name, step_bytes(layout) * parameters(), g.b->adamw, [=] {
        amp_k_adamw a = {};
        parameter_table p = put_parameters(layout);
        a.table = p.rows, a.tensors = p.count, a.found = p.found;
        a.beta1 = 0.9, a.beta2 = 0.999, a.eps = 1e-8, a.seed = 1;
        return a;
    });
}

void gradients() {
    check_case("unscale fp32", AMP_F32, true);
    check_case("unscale bf16", AMP_BF16, true);
    check_case("unscale fp16", AMP_F16, true);
    check_case("norm fp32", AMP_F32, false);
    check_case("norm bf16", AMP_BF16, false);
    check_case("norm fp16", AMP_F16, false);
    inspect_case("inspect fp32", AMP_F32);
    inspect_case("inspect bf16", AMP_BF16);
    gradients_case("clip fp32", AMP_F32, 8 * parameters(), [](const parameter_table &p, int turn) {
        need(scale(p, p.factors + (turn & 1)) == AMP_OK, "clip fp32");
    });
    clip_norm_case("clip_grad_norm fp32");
    scaler_case("scaler update");
}

void optimizers() {
    const amp_dtype bf16 = AMP_BF16, fp32 = AMP_F32;
    adamw_case("AdamW fp32", {fp32, fp32, AMP_MASTER_NONE, true, true, fp32});
    adamw_case("AdamW bf16, fp32 masters", {bf16, bf16, AMP_MASTER_F32, true, true, fp32});
    adamw_case("AdamW fp16, fp32 masters", {AMP_F16, AMP_F16, AMP_MASTER_F32, true, true, fp32});
    adamw_case("AdamW bf16, remainders", {bf16, bf16, AMP_MASTER_REMAINDER, true, true, fp32});
    adamw_case("AdamW bf16, stochastic", {bf16, bf16, AMP_MASTER_STOCHASTIC, true, true, fp32});
    adamw_case("AdamW bf16, masters, bf16 moments", {bf16, bf16, AMP_MASTER_F32, true, true, bf16});
    adamw_case("AdamW bf16, bf16 moments", {bf16, bf16, AMP_MASTER_NONE, true, true, bf16});
    const optimizer_layout momentum = {fp32, fp32, AMP_MASTER_NONE, true, false, fp32};
    kernel_case<amp_k_sgd>("SGD fp32, momentum", step_bytes(momentum) * parameters(), g.b->sgd, [=] {
        amp_k_sgd a = {};
        parameter_table p = put_parameters(momentum);
        a.table = p.rows, a.tensors = p.count, a.found = p.found, a.momentum = 0.9;
        return a;
    });
}

/* ---- Normalisation */

/* stream: the residual stream is fp32, as in a GPT-2 step: forward it and the sum are, backward the gradient that comes from
   it and the one that goes into it, with a copy of the latter in dtype. */
struct norm_shape { bool rms, residual; int64_t rows, cols; amp_dtype dtype; bool stream; };

amp_k_norm norm_operands(const norm_shape &s) {
    amp_k_norm a = {};
    a.rms = s.rms, a.eps = 1e-5f, a.weight_dtype = AMP_F32;
    a.x = g.matrix(s.rows, s.cols, s.dtype), a.y = g.result(s.rows, s.cols, s.dtype);
    amp_dtype stream = s.stream ? AMP_F32 : s.dtype;
    if (s.residual) a.residual = g.matrix(s.rows, s.cols, stream), a.sum = g.result(s.rows, s.cols, stream);
    a.weight = g.random(AMP_F32, s.cols);
    if (!s.rms) a.bias = g.random(AMP_F32, s.cols);
    a.mean = s.rms ? NULL : (float *)g.random(AMP_F32, s.rows);
    a.rstd = (float *)g.random(AMP_F32, s.rows);
    return a;
}
amp_k_norm norm_gradient_operands(norm_shape s) {
    bool residual = s.residual;
    s.residual = false;
    amp_k_norm a = norm_operands(s);
    amp_dtype stream = s.stream ? AMP_F32 : s.dtype;
    a.dy = g.matrix(s.rows, s.cols, s.dtype), a.dx = g.result(s.rows, s.cols, stream);
    if (residual) a.dsum = g.matrix(s.rows, s.cols, stream);
    if (s.stream) a.x = g.matrix(s.rows, s.cols, stream), a.dx_low = g.result(s.rows, s.cols, s.dtype);
    a.dweight.data = g.room(4 * s.cols), a.dweight.dtype = AMP_F32;
    if (!s.rms) a.dbias.data = g.room(4 * s.cols), a.dbias.dtype = AMP_F32;
    return a;
}

/* x, y (and the residual and the sum) once each; backward x, dy, dx (and the gradient from the residual stream); mean and
   1 / deviation of each row */
void norm_case(const std::string &name, const norm_shape &s, bool backward) {
    double operands = (backward ? 3 : 2) + (s.residual ? (backward ? 1 : 2) : 0), size = (double)amp_dtype_size(s.dtype);
    double element = s.stream ? 8 + 2 * size + (backward ? 4 : 0) : operands * size;
    double bytes = (double)s.rows * (element * (double)s.cols + (s.rms ? 4 : 8));
    kernel_case<amp_k_norm>(name.c_str(), bytes, backward ? g.b->norm_backward : g.b->norm,
                            [=] { return backward ? norm_gradient_operands(s) : norm_operands(s); });
}
void norms_of(int64_t rows, int64_t cols, amp_dtype dtype, const std::string &suffix) {
    const norm_shape layer = {false, false, rows, cols, dtype, false}, rms = {true, false, rows, cols, dtype, false};
    const norm_shape both = {false, true, rows, cols, dtype, false};
    for (const char *backward : {"", " backward"}) {
        norm_case(std::string("layernorm") + backward + suffix, layer, *backward != 0);
        norm_case(std::string("rmsnorm") + backward + suffix, rms, *backward != 0);
        norm_case(std::string("residual + layernorm") + backward + suffix, both, *backward != 0);
    }
}

/* Rows of the width that deep models have. */
void wide_stream_norms(int64_t rows, int64_t cols) {
    for (bool backward : {false, true})
        norm_case(backward ? "residual + layernorm backward, fp32 stream, wide" : "residual + layernorm, fp32 stream, wide",
                  {false, true, rows, cols, AMP_BF16, true}, backward);
}

void norms() {
    int64_t rows = given.s.rows, cols = given.s.channels, wide = given.small ? 256 : 4096;
    for (bool backward : {false, true})
        norm_case(backward ? "residual + layernorm backward, fp32 stream" : "residual + layernorm, fp32 stream",
                  {false, true, rows, cols, AMP_BF16, true}, backward);
    wide_stream_norms(rows * cols / wide, wide);
    norms_of(rows, cols, AMP_BF16, "");
    norms_of(rows * cols / wide, wide, AMP_BF16, ", wide");
    for (bool backward : {false, true})
        norm_case(backward ? "layernorm backward, fp32" : "layernorm, fp32", {false, false, rows, cols, AMP_F32, false}, backward);
}

/* ---- Softmax of attention scores.  Under a causal mask only half of what comes in must be read; all results are written. */

struct softmax_shape { bool causal, backward; int64_t heads, tokens; amp_dtype dtype; };

void softmax_case(const std::string &name, const softmax_shape &s) {
    int64_t n = s.heads * s.tokens * s.tokens;
    double size = (double)amp_dtype_size(s.dtype), read = s.causal ? 0.5 + 0.5 / (double)s.tokens : 1;
    double bytes = (double)n * size * (1 + (s.backward ? 2 : 1) * read);
    kernel_case<amp_k_softmax>(name.c_str(), bytes, s.backward ? g.b->softmax_backward : g.b->softmax, [=] {
        amp_k_softmax a = {};
        a.batch = 1, a.heads = s.heads, a.queries = a.keys = s.tokens, a.scale = 0.125f;
        a.x_dtype = a.y_dtype = s.dtype;
        if (s.causal) a.mask.kind = AMP_MASK_CAUSAL;
        void *result = g.room(n * (int64_t)amp_dtype_size(s.dtype));
        if (!s.backward) a.x = g.random(s.dtype, n), a.y = result;
        if (s.backward) a.y = g.random(s.dtype, n), a.dy = g.random(s.dtype, n), a.dx = result;
        return a;
    });
}

void softmaxes() {
    int64_t heads = given.s.heads, tokens = given.s.tokens, many = given.small ? 64 : 4096;
    int64_t few_heads = std::max((int64_t)1, heads * tokens * tokens / (many * many));
    for (bool backward : {false, true})
        for (bool causal : {false, true}) {
            std::string name = std::string("softmax") + (backward ? " backward" : "") + (causal ? ", causal" : "");
            softmax_case(name, {causal, backward, heads, tokens, AMP_BF16});
            softmax_case(name + ", many keys", {causal, backward, few_heads, many, AMP_BF16});
        }
    softmax_case("softmax, fp32", {false, false, heads, tokens, AMP_F32});
}

/* ---- Pointwise operators */

void activation_case(const char *name, amp_activation_kind act, bool backward, bool bias = false, amp_dtype dtype = AMP_BF16) {
    int64_t n = given.s.rows * given.s.hidden, bytes = n * (int64_t)amp_dtype_size(dtype);
    auto kernel = backward ? g.b->activation_backward : g.b->activation;
    kernel_case<amp_k_activation>(name, (double)bytes * (backward ? 3 : 2), kernel, [=] {
        amp_k_activation a = {};
        a.act = act, a.x_dtype = a.y_dtype = dtype, a.n = n, a.x = g.random(dtype, n);
        if (backward) a.dy = g.random(dtype, n), a.dx = g.room(bytes);
        else a.y = g.room(bytes);
        a.cols = given.s.hidden, a.bias_dtype = dtype, a.bias = bias ? g.random(dtype, a.cols) : NULL;
        return a;
    });
}

void swiglu_case(const char *name, bool backward) {
    int64_t rows = given.s.rows, cols = given.s.hidden * 2 / 3;
    auto kernel = backward ? g.b->swiglu_backward : g.b->swiglu;
    kernel_case<amp_k_swiglu>(name, (double)(rows * cols) * (backward ? 10 : 6), kernel, [=] {
        amp_k_swiglu a = {};
        a.gate = g.matrix(rows, cols), a.up = g.matrix(rows, cols);
        if (!backward) a.y = g.result(rows, cols);
        if (backward) a.dy = g.matrix(rows, cols), a.dgate = g.result(rows, cols), a.dup = g.result(rows, cols);
        return a;
    });
}

void pointwise() {
    int64_t n = given.s.rows * given.s.channels;
    activation_case("GELU", AMP_ACT_GELU, false);
    activation_case("GELU + bias", AMP_ACT_GELU, false, true);
    activation_case("GELU, fp32", AMP_ACT_GELU, false, false, AMP_F32);
    activation_case("GELU backward", AMP_ACT_GELU, true);
    activation_case("SiLU", AMP_ACT_SILU, false);
    activation_case("ReLU", AMP_ACT_RELU, false);
    swiglu_case("SwiGLU", false);
    swiglu_case("SwiGLU backward", true);
    kernel_case<amp_k_dropout>("dropout", 4.0 * (double)n, g.b->dropout, [=] {
        amp_k_dropout a = {};
        a.x_dtype = a.y_dtype = AMP_BF16, a.n = n, a.p = 0.1f, a.seed = 1;
        a.x = g.random(AMP_BF16, n), a.y = g.room(2 * n);
        return a;
    });
    kernel_case<amp_k_add>("residual add", 6.0 * (double)n, g.b->add, [=] {
        amp_k_add a = {};
        a.a_dtype = a.b_dtype = a.y_dtype = AMP_BF16, a.n = n, a.alpha = a.beta = 1;
        a.a = g.random(AMP_BF16, n), a.b = g.random(AMP_BF16, n), a.y = g.room(2 * n);
        return a;
    });
    kernel_case<amp_k_column_sum>("bias gradient", 2.0 * (double)n, g.b->column_sum, [=] {
        amp_k_column_sum a = {};
        a.x = g.matrix(given.s.rows, given.s.channels), a.out = g.room(4 * given.s.channels), a.out_dtype = AMP_F32;
        return a;
    });
}

/* ---- Losses and embeddings */

/* Not in place, which moves the same bytes: the logits stay random. */
void cross_entropy_case(const char *name, amp_dtype dtype) {
    int64_t rows = given.s.logit_rows, cols = given.s.vocabulary;
    double bytes = 2.0 * (double)(rows * cols) * (double)amp_dtype_size(dtype);
    kernel_case<amp_k_cross_entropy>(name, bytes, g.b->cross_entropy, [=] {
        amp_k_cross_entropy a = {};
        a.logits = g.matrix(rows, cols, dtype), a.dlogits = g.result(rows, cols, dtype), a.classes = given.s.classes;
        a.labels = g.ids(rows, given.s.classes, 3), a.ignore_index = -100, a.factor = 1;
        a.losses = (float *)g.room(4 * rows), a.loss = (float *)g.room(4), a.bad_label = g.put(std::vector<int32_t>(1));
        return a;
    });
}

void embedding_case(const char *name) {
    int64_t rows = given.s.rows, cols = given.s.channels;
    kernel_case<amp_k_embedding>(name, 4.0 * (double)(rows * cols), g.b->embedding, [=] {
        amp_k_embedding a = {};
        a.n = rows, a.seq = given.s.tokens, a.bad_id = g.put(std::vector<int32_t>(1));
        a.ids = g.ids(rows, given.s.classes, 5);
        a.table = g.matrix(given.s.vocabulary, cols), a.positions = g.matrix(given.s.tokens, cols);
        a.y = g.result(rows, cols);
        return a;
    });
}

/* The whole gradient of the table is written, in bf16; or, as with weights shared with the classifier, added to fp32: then
   only rows that an id names are read and written, classes (1 - exp(-rows / classes)) of them on average. */
void embedding_gradient_case(const char *name, bool add, bool one_id) {
    int64_t rows = given.s.rows, cols = given.s.channels;
    double classes = (double)given.s.classes, named = one_id ? 1 : classes * -expm1(-(double)rows / classes);
    double bytes = (double)cols * (2 * (double)rows + (add ? 8 * named : 2 * (double)given.s.vocabulary));
    kernel_case<amp_k_embedding>(name, bytes, g.b->embedding_backward, [=] {
        amp_k_embedding a = {};
        a.n = rows, a.seq = given.s.tokens, a.bad_id = g.put(std::vector<int32_t>(1));
        a.ids = g.ids(rows, one_id ? 1 : given.s.classes, 5), a.dy = g.matrix(rows, cols);
        a.dtable = g.matrix(given.s.vocabulary, cols, add ? AMP_F32 : AMP_BF16), a.add_table = add;
        return a;
    });
}

void losses() {
    int64_t n = given.s.rows * given.s.channels;
    cross_entropy_case("cross-entropy bf16", AMP_BF16);
    cross_entropy_case("cross-entropy fp32", AMP_F32);
    kernel_case<amp_k_mse>("mean squared error", 6.0 * (double)n, g.b->mse, [=] {
        amp_k_mse a = {};
        a.x_dtype = a.target_dtype = AMP_BF16, a.n = n, a.factor = 1, a.loss = (float *)g.room(4);
        a.x = g.random(AMP_BF16, n), a.target = g.random(AMP_BF16, n), a.dx = g.room(2 * n);
        return a;
    });
}
void embeddings() {
    embedding_case("embedding");
    embedding_gradient_case("embedding backward", false, false);
    embedding_gradient_case("embedding backward, one id", false, true);
    embedding_gradient_case("embedding backward, added", true, false);
}

/* ---- Matrix products: those of GPT-2's blocks and classifier, and some others.  2 m n k operations each. */

enum product_kind { PLAIN, BIAS, BIAS_GELU, GELU_BACKWARD, GELU_BACKWARD_SUMS, WEIGHT_GRADIENT, WEIGHT_GRADIENT_ALONE };

/* c[m, n] of op(a) op(b); WEIGHT_GRADIENT adds to fp32, with the bias's gradient beside it (ALONE: without), and
   GELU_BACKWARD_SUMS has that of the layer before. */
void product_case(const char *name, amp_dtype dtype, int64_t m, int64_t n, int64_t k, const char *layout, product_kind kind = PLAIN) {
    amp_dtype compute = dtype, c_dtype = kind >= WEIGHT_GRADIENT || dtype == AMP_TF32 ? AMP_F32 : dtype;
    if (dtype == AMP_TF32) dtype = AMP_F32;
    double size = (double)amp_dtype_size(dtype), out = (double)amp_dtype_size(c_dtype), results = kind >= BIAS_GELU ? 2 : 1;
    double bytes = size * (double)((m + n) * k) + results * out * (double)(m * n);
    kernel_case<amp_k_gemm>(name, bytes, g.b->gemm, [=] {
        amp_k_gemm a = {};
        a.m = m, a.n = n, a.k = k, a.batch = 1, a.alpha = 1, a.compute = compute;
        a.trans_a = layout[0] == 'T', a.trans_b = layout[1] == 'T';
        a.lda = a.trans_a ? m : k, a.ldb = a.trans_b ? k : n, a.ldc = n;
        a.a = g.random(dtype, m * k), a.b = g.random(dtype, k * n), a.c = g.random(c_dtype, m * n);
        a.a_dtype = a.b_dtype = dtype, a.c_dtype = c_dtype;
        if (kind == BIAS || kind == BIAS_GELU) a.bias = g.random(c_dtype, n), a.bias_dtype = c_dtype;
        if (kind == BIAS_GELU || kind == GELU_BACKWARD || kind == GELU_BACKWARD_SUMS)
            a.act = AMP_ACT_GELU, a.pre = g.random(c_dtype, m * n), a.pre_dtype = c_dtype, a.ld_pre = n;
        a.backward = kind == GELU_BACKWARD || kind == GELU_BACKWARD_SUMS;
        if (kind == GELU_BACKWARD_SUMS) a.column_sum = amp_k_gradient{g.random(c_dtype, n), c_dtype, 0};
        if (kind >= WEIGHT_GRADIENT) a.beta = 1;
        if (kind == WEIGHT_GRADIENT) a.row_sum = amp_k_gradient{g.random(AMP_F32, m), AMP_F32, 1};
        return a;
    }, 2.0 * (double)m * (double)n * (double)k);
}

void products_in(const std::string &p, amp_dtype dtype) {
    int64_t c = given.s.channels, h = given.s.hidden, few = dtype == AMP_F32 ? given.s.rows / 4 : given.s.rows;   /* they are slow */
    product_case((p + ", linear").c_str(), dtype, few, h, c, "NT", BIAS);
    product_case((p + ", NN").c_str(), dtype, few, c, h, "NN");
    product_case((p + ", TN").c_str(), dtype, h, c, few, "TN");
    product_case((p + ", linear GELU").c_str(), dtype, few, h, c, "NT", BIAS_GELU);
}

/* A product in fp8 by scales of tensors, with the rounding of both operands.  a has E4M3, or E5M2 as a gradient has. */
void fp8_product_case(const char *name, int64_t m, int64_t n, int64_t k, const char *layout, bool gradient) {
    static amp_k_fp8 how[2][2];
    amp_k_fp8 *mine = how[gradient];
    for (int i = 0; i < 2; i++) mine[i].dtype = gradient && i == 0 ? AMP_E5M2 : AMP_E4M3, mine[i].scaling = AMP_FP8_CURRENT;
    kernel_case<amp_k_gemm>(name, 2.0 * (double)((m + n) * k + m * n), g.b->gemm, [=] {
        amp_k_gemm a = {};
        a.m = m, a.n = n, a.k = k, a.batch = 1, a.alpha = 1, a.compute = AMP_FP8;
        a.trans_a = layout[0] == 'T', a.trans_b = layout[1] == 'T';
        a.lda = a.trans_a ? m : k, a.ldb = a.trans_b ? k : n, a.ldc = n;
        a.a = g.random(AMP_BF16, m * k), a.b = g.random(AMP_BF16, k * n), a.c = g.random(AMP_BF16, m * n);
        a.a_dtype = a.b_dtype = a.c_dtype = AMP_BF16, a.fp8[0] = &mine[0], a.fp8[1] = &mine[1];
        return a;
    }, 2.0 * (double)m * (double)n * (double)k);
}
void fp8_products() {
    int64_t rows = given.s.rows, c = given.s.channels, h = given.s.hidden;
    fp8_product_case("product fp8, linear", rows, h, c, "NT", false);
    fp8_product_case("product fp8, NN", rows, c, h, "NN", true);
    fp8_product_case("product fp8, TN", h, c, rows, "TN", true);
}

/* The step's own first: the time may not be enough for all. */
void products() {
    int64_t rows = given.s.rows, c = given.s.channels, h = given.s.hidden, square = given.small ? 64 : 8192;
    products_in("product bf16", AMP_BF16);
    product_case("product bf16, qkv", AMP_BF16, rows, 3 * c, c, "NT", BIAS);
    product_case("product bf16, projection", AMP_BF16, rows, c, c, "NT", BIAS);
    product_case("product bf16, MLP projection", AMP_BF16, rows, c, h, "NT", BIAS);
    product_case("product bf16, classifier", AMP_BF16, given.s.logit_rows, given.s.vocabulary, c, "NT");
    product_case("product bf16, classifier dX", AMP_BF16, given.s.logit_rows, c, given.s.vocabulary, "NN");
    product_case("product bf16, classifier dW", AMP_BF16, given.s.vocabulary, c, given.s.logit_rows, "TN", WEIGHT_GRADIENT_ALONE);
    product_case("product bf16, qkv dX", AMP_BF16, rows, c, 3 * c, "NN");
    product_case("product bf16, qkv dW", AMP_BF16, 3 * c, c, rows, "TN", WEIGHT_GRADIENT);
    product_case("product bf16, projection dX", AMP_BF16, rows, c, c, "NN");
    product_case("product bf16, projection dW", AMP_BF16, c, c, rows, "TN", WEIGHT_GRADIENT);
    product_case("product bf16, MLP projection dW", AMP_BF16, c, h, rows, "TN", WEIGHT_GRADIENT);
    product_case("product bf16, GELU backward", AMP_BF16, rows, h, c, "NN", GELU_BACKWARD);
    product_case("product bf16, GELU backward, sums", AMP_BF16, rows, h, c, "NN", GELU_BACKWARD_SUMS);
    product_case("product bf16, weight gradient", AMP_BF16, h, c, rows, "TN", WEIGHT_GRADIENT);
    product_case("product bf16, square", AMP_BF16, square, square, square, "NN");
    product_case("product bf16, few rows", AMP_BF16, given.s.tokens, h, c, "NT", BIAS);
    fp8_products();
    products_in("product fp16", AMP_F16);
    products_in("product tf32", AMP_TF32);
    products_in("product fp32", AMP_F32);
    product_case("product bf16, odd sizes", AMP_BF16, given.s.tokens * 2 + 1, h + 3, c + 1, "NT");
}

/* ---- Attention: causal, bf16, q, k and v as parts of one array.  4 T^2 / 2 D operations a head, backward 2.5 times as many. */

void attention_case(const char *name, int64_t batch, int64_t tokens, int64_t heads, int64_t dim, bool backward) {
    double n = (double)(batch * tokens * heads * dim), operations = 2 * n * (double)tokens * (backward ? 2.5 : 1);
    kernel_case<amp_k_attention>(name, n * (backward ? 16 : 8), backward ? g.b->attention_backward : g.b->attention, [=] {
        amp_k_attention a = {};
        int64_t width = heads * dim, packed[3] = {tokens * 3 * width, 3 * width, dim}, dense[3] = {tokens * width, width, dim};
        auto put = [](int64_t (&to)[3], const int64_t (&from)[3]) { std::copy(from, from + 3, to); };
        auto part = [=](const void *whole, int64_t i) { return (char *)whole + 2 * i * width; };
        void *qkv = g.random(AMP_BF16, 3 * batch * tokens * width);
        a.batch = batch, a.heads = heads, a.queries = a.keys = tokens, a.dim = dim;
        a.dtype = a.compute = AMP_BF16, a.scale = 1 / sqrtf((float)dim), a.mask.kind = AMP_MASK_CAUSAL;
        a.q = part(qkv, 0), a.k = part(qkv, 1), a.v = part(qkv, 2), a.o = g.room(2 * batch * tokens * width);
        put(a.q_stride, packed), put(a.k_stride, packed), put(a.v_stride, packed), put(a.o_stride, dense);
        a.lse = (float *)g.room(4 * batch * heads * tokens);
        if (!backward) return a;
        need(g.b->attention(g.dev, &a, NULL) == AMP_OK, "the forward pass");
        void *dqkv = g.room(6 * batch * tokens * width);
        a.d_o = g.random(AMP_BF16, batch * tokens * width), put(a.do_stride, dense);
        a.dq = part(dqkv, 0), a.dk = part(dqkv, 1), a.dv = part(dqkv, 2);
        put(a.dq_stride, packed), put(a.dk_stride, packed), put(a.dv_stride, packed);
        return a;
    }, operations);
}

/* 16384 tokens of 2048 channels, and GPT-2's. */
void attentions() {
    int64_t all = given.small ? 128 : 16384, channels = given.small ? 128 : 2048, gpt2_heads = given.s.channels / 64;
    for (int backward = 0; backward < 2; backward++) {
        std::string name = backward ? "attention backward " : "attention ";
        for (int64_t dim : {64, 128})
            for (int64_t tokens : {1024, 4096}) {
                std::string full = name + "D=" + std::to_string(dim) + " T=" + std::to_string(tokens);
                int64_t length = given.small ? tokens / 32 : tokens;
                attention_case(full.c_str(), all / length, length, channels / dim, dim, backward != 0);
            }
        attention_case((name + "GPT-2").c_str(), given.s.rows / given.s.tokens, given.s.tokens, gpt2_heads, 64, backward != 0);
    }
}

/* ---- Main */

void describe(const amp_device &d) {
    cudaDeviceProp prop;
    int driver = 0, runtime = 0;
    need(cudaGetDeviceProperties(&prop, 0), "the device");
    need(cudaDriverGetVersion(&driver), "the driver");
    need(cudaRuntimeGetVersion(&runtime), "the runtime");
    g.l2 = (size_t)prop.l2CacheSize;
    printf("{\"event\": \"device\", \"name\": \"%s\", \"cc\": \"%d.%d\", \"multiprocessors\": %d, \"l2_bytes\": %zu, "
           "\"memory_bytes\": %lld, \"driver\": \"%d.%d\", \"runtime\": \"%d.%d\", \"cublas\": \"%zu\", \"rounds\": %d, "
           "\"ms\": %g}\n",
           d.name, d.cc_major, d.cc_minor, d.multiprocessors, g.l2, (long long)d.memory, driver / 1000, driver % 1000 / 10,
           runtime / 1000, runtime % 1000 / 10, cublasLtGetVersion(), given.rounds, given.ms);
    fflush(stdout);
}

void options(int argc, char **argv) {
    given.s = gpt2, given.rounds = 9, given.ms = 20, given.small = given.autotune = given.describe = given.list = given.turns = false;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!strcmp(argv[i], "--tiny")) given.small = true, given.s = tiny;
        else if (!strcmp(argv[i], "--describe")) given.describe = true;
        else if (!strcmp(argv[i], "--autotune")) given.autotune = true;
        else if (!strcmp(argv[i], "--list")) given.list = true;
        else if (!strcmp(argv[i], "--turns")) given.turns = true;
        else if (!strcmp(argv[i], "--rounds") && more) given.rounds = std::max(1, atoi(argv[++i]));
        else if (!strcmp(argv[i], "--ms") && more) given.ms = atof(argv[++i]);
        else if (!strcmp(argv[i], "--only") && more) given.only = argv[++i];
        else fprintf(stderr, "bench_gpu: %s is not known\n", argv[i]), exit(2);
    }
}

void copies(int multiprocessors) {
    copy_case("copy 0.4 GB", given.small ? 1 << 16 : 400 << 20);
    copy_case("copy 4 GB", given.small ? 1 << 17 : (int64_t)4 << 30);
    read_case("read 0.5 GB", given.small ? 1 << 16 : 500 << 20, multiprocessors);
}

void every_case(int multiprocessors) {
    const std::pair<const char *, std::function<void()> > groups[] = {
        {"copies", [=] { copies(multiprocessors); }}, {"attention", attentions}, {"products", products}, {"norms", norms},
        {"losses", losses}, {"optimizers", optimizers}, {"gradients", gradients}, {"softmaxes", softmaxes},
        {"pointwise", pointwise}, {"embeddings", embeddings}, {"casts", casts}};
    for (const auto &one : groups) {
        group = one.first;
        attempt(group, one.second);
    }
}

/* Until the input ends; a case that fails, or that there is none of, has said so. */
void turns(int multiprocessors) {
    for (std::string line; !(line = next_line()).empty();) {
        if (line.compare(0, 5, "case ") == 0) asked = line.substr(5), every_case(multiprocessors);
        printf("{\"event\": \"end\"}\n");
        fflush(stdout);
    }
}

} /* namespace */

int main(int argc, char **argv) {
    amp_device d;
    options(argc, argv);
    coc_set_modelled_clock(0);
    try {
        g.open();
        need(g.b->describe(g.dev, &d) == AMP_OK, "the device");
        describe(d);
    } catch (const failure &f) {
        fprintf(stderr, "bench_gpu: %s\n", f.why.c_str());
        return 1;
    }
    if (given.turns) turns(d.multiprocessors);
    else if (!given.describe) every_case(d.multiprocessors);
    g.close();
    return failed;
}
