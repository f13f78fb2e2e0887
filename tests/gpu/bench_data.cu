/* bench_data.cu - measures the loader and the mask cache on a GPU.
 *
 *     bench_data loader [--tiny]      copies to the device from pinned and from pageable memory; batches of the loader with
 *                                     and without .disable_pinned, alone and beside a step; the time of amp_loader_next
 *     bench_data masks [--tiny]       softmax over scores under a mask from the cache: its hits and bytes in steps that are
 *                                     called and in a captured one, and the time with the mask made again
 *
 * Prints one JSON object per line: first the device, then the measurements.  peer_data.py measures the same in PyTorch.
 * --tiny selects the smallest sizes, for the model GPU. */
#include <cuda_runtime.h>
#include <algorithm>
#include <functional>
#include <stdlib.h>
#include <string>
#include <time.h>
#include <unistd.h>
#include <vector>
#include "amp.h"

#if defined(COC_CUDA_RUNTIME_H)                 /* the model GPU: the time of day */
void coc_set_modelled_clock(int modelled);
#else
static void coc_set_modelled_clock(int) {}
#endif

namespace {

bool small;
amp_context *amp;
cudaStream_t stream;

void need(bool ok, const char *what) {
    if (ok) return;
    std::string why = amp_last_error();
    for (char &c : why) if (c == '"' || c == '\\' || (unsigned char)c < ' ') c = ' ';
    printf("{\"event\": \"failed\", \"case\": \"%s\", \"why\": \"%s\"}\n", what, why.c_str());
    exit(1);
}

double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
void sync() { need(amp_sync(amp) == AMP_OK, "waiting for the GPU"); }

double median(std::vector<double> values, double at = 0.5) {
    std::sort(values.begin(), values.end());
    return values[std::min(values.size() - 1, (size_t)((double)values.size() * at))];
}

/* Seconds of a call, the GPU's work included: the median of some rounds of `count`. */
double timed(int count, const std::function<void()> &call) {
    std::vector<double> rounds;
    call();
    for (int round = 0; round < (small ? 1 : 5); round++) {
        sync();
        double begin = seconds();
        for (int i = 0; i < count; i++) call();
        sync();
        rounds.push_back((seconds() - begin) / count);
    }
    return median(rounds);
}

void *on_device(int64_t bytes) {
    void *p = NULL;
    need(amp_alloc(amp, &p, bytes) == AMP_OK, "memory");
    return p;
}

/* ---- Copies */

void copies() {
    const int64_t bytes = small ? 1 << 16 : 64 << 20;
    void *pinned = NULL, *pageable = malloc((size_t)bytes), *to = on_device(bytes);
    need(pageable != NULL && cudaMallocHost(&pinned, (size_t)bytes) == cudaSuccess, "host memory");
    memset(pinned, 1, (size_t)bytes);
    memset(pageable, 1, (size_t)bytes);
    for (void *from : {pinned, pageable}) {
        double each = timed(4, [=] { need(amp_copy(amp, to, from, bytes, AMP_COPY_TO_DEVICE) == AMP_OK, "a copy"); });
        printf("{\"event\": \"copy\", \"from\": \"%s\", \"bytes\": %lld, \"gb_per_s\": %.3f}\n",
               from == pinned ? "pinned" : "pageable", (long long)bytes, 1e-9 * (double)bytes / each);
    }
    need(cudaFreeHost(pinned) == cudaSuccess, "host memory");
    free(pageable);
    amp_free(amp, to);
}

/* ---- A step: products that take as long as asked for */

struct step {
    int64_t n = small ? 64 : 2048;
    float *a = (float *)on_device(4 * n * n), *b = (float *)on_device(4 * n * n), *c = (float *)on_device(4 * n * n);
    int products = 1;
    ~step() { amp_free(amp, a), amp_free(amp, b), amp_free(amp, c); }
    void run() const {
        for (int i = 0; i < products; i++)
            need(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, n, n, n, 1, a, n, b, n, 0, c, n) == AMP_OK, "a product");
    }
    void last(double least) {
        products = 1;
        double one = timed(2, [this] { run(); });
        products = small ? 1 : std::max(1, (int)(least / one) + 1);
    }
};

/* ---- The loader */

amp_batch next_of(amp_loader *loader) {
    amp_batch batch;
    need(amp_loader_next(loader, &batch) == AMP_OK, "amp_loader_next");
    return batch;
}

/* Wide rows from host memory: what counts is the bus. */
void batches(bool pinned) {
    const int64_t samples = small ? 16 : 1024, width = small ? 64 : 32768, batch = small ? 4 : 256;
    std::vector<int32_t> rows((size_t)(samples * width), 1);
    amp_tensor data = amp_tensor2(rows.data(), AMP_I32, samples, width);
    amp_loader_desc desc;
    amp_loader *loader = NULL;
    step work;
    memset(&desc, 0, sizeof desc);
    desc.tensors = &data, desc.n_tensors = 1, desc.batch = batch, desc.workers = 4, desc.prefetch = 4;
    desc.disable_pinned = !pinned;
    need(amp_loader_create(amp, &loader, &desc) == AMP_OK, "amp_loader_create");
    int count = small ? 2 : 40;
    double load = timed(count, [=] { (void)next_of(loader); });
    work.last(2 * load);
    double compute = timed(count / 2, [&] { work.run(); });
    double both = timed(count / 2, [&] { (void)next_of(loader), work.run(); });
    printf("{\"event\": \"batches\", \"pinned\": %d, \"bytes\": %lld, \"gb_per_s\": %.3f, \"batch_ms\": %.4f, \"step_ms\": %.4f, "
           "\"both_ms\": %.4f, \"hidden\": %.4f}\n", pinned, (long long)(4 * batch * width), 1e-9 * (double)(4 * batch * width) / load,
           1e3 * load, 1e3 * compute, 1e3 * both, std::min(1.0, std::max(0.0, (load + compute - both) / load)));
    fflush(stdout);
    amp_loader_destroy(loader);
}

/* Random 16-bit tokens in a file, which is removed at once where the system allows it to be read on. */
std::string token_file(int64_t tokens) {
    const char *folder = getenv("TMPDIR");
    std::string path = std::string(folder ? folder : "/tmp") + "/amp_tokens_XXXXXX";
    std::vector<uint16_t> values((size_t)tokens);
    for (size_t i = 0; i < values.size(); i++) values[i] = (uint16_t)amp_random_u32(3, i);
    int file = mkstemp(&path[0]);
    need(file >= 0 && write(file, values.data(), values.size() * 2) == (ssize_t)(values.size() * 2), "a file of tokens");
    close(file);
    return path;
}

/* Microseconds of amp_loader_next in a training whose GPU is always busy. */
void next_times(const std::string &path, int workers) {
    amp_loader_desc desc;
    amp_loader_info info;
    amp_loader *loader = NULL;
    std::vector<double> times;
    step work;
    memset(&desc, 0, sizeof desc);
    memset(&info, 0, sizeof info);
    desc.path = path.c_str(), desc.format = AMP_TOKENS_U16, desc.seq = small ? 16 : 1024, desc.batch = small ? 2 : 64;
    desc.workers = workers == 0 ? AMP_NO_WORKERS : workers, desc.shuffle = 1, desc.seed = 1;
    need(amp_loader_create(amp, &loader, &desc) == AMP_OK, "amp_loader_create");
    work.last(2e-3);
    for (int i = 0; i < (small ? 5 : 220); i++) {
        work.run();
        double begin = seconds();
        (void)next_of(loader);
        if (i >= (small ? 0 : 20)) times.push_back(1e6 * (seconds() - begin));
        sync();
    }
    need(amp_loader_info_get(loader, &info) == AMP_OK, "amp_loader_info_get");
    printf("{\"event\": \"next\", \"workers\": %d, \"median_us\": %.2f, \"p99_us\": %.2f, \"waits\": %lld, \"calls\": %zu}\n", workers,
           median(times), median(times, 0.99), (long long)info.waits, times.size());
    fflush(stdout);
    amp_loader_destroy(loader);
}

void loader() {
    copies();
    for (bool pinned : {true, false}) batches(pinned);
    std::string path = token_file(small ? 4096 : 16 << 20);
    for (int workers : {0, 1, 4}) next_times(path, workers);
    unlink(path.c_str());
}

/* ---- Masks: several documents in each sequence, in a softmax over scores of the program's own */

struct masked {
    int64_t batch = small ? 2 : 8, heads = small ? 2 : 12, tokens = small ? 32 : 1024, bytes = 2 * batch * heads * tokens * tokens;
    std::vector<int32_t> documents;
    void *x = on_device(bytes), *y = on_device(bytes);
    masked() : documents((size_t)(batch * tokens)) {
        for (int64_t i = 0; i < batch * tokens; i++) documents[(size_t)i] = (int32_t)(i % tokens / (tokens / 4));
    }
    ~masked() { amp_free(amp, x), amp_free(amp, y); }
    void run() const {
        amp_mask mask;
        amp_mask_view view;
        amp_softmax_op op;
        memset(&mask, 0, sizeof mask);
        memset(&op, 0, sizeof op);
        mask.kind = AMP_MASK_CAUSAL, mask.documents = documents.data();
        need(amp_mask_get(amp, &mask, batch, tokens, tokens, AMP_U8, &view) == AMP_OK, "amp_mask_get");
        op.x = amp_tensor4(x, AMP_BF16, batch, heads, tokens, tokens), op.y = amp_tensor4(y, AMP_BF16, batch, heads, tokens, tokens);
        op.mask = view.mask;
        need(amp_softmax(amp, &op) == AMP_OK, "amp_softmax");
        amp_mask_release(amp, &view);
    }
};

void told(const char *way, double each, const amp_cache_info &before) {
    amp_cache_info now;
    memset(&now, 0, sizeof now);
    need(amp_mask_cache_info(amp, &now) == AMP_OK, "amp_mask_cache_info");
    printf("{\"event\": \"masks\", \"way\": \"%s\", \"us\": %.2f, \"hits\": %lld, \"misses\": %lld, \"entries\": %lld, \"bytes\": %lld}\n",
           way, 1e6 * each, (long long)(now.hits - before.hits), (long long)(now.misses - before.misses), (long long)now.entries,
           (long long)now.bytes);
    fflush(stdout);
}

/* In a captured step the mask is taken from the cache once, at the capture; its launches read it without asking. */
void masks() {
    masked work;
    amp_cache_info before;
    amp_graph *graph = NULL;
    int count = small ? 2 : 20;
    auto begin = [&] { need(amp_mask_cache_info(amp, &before) == AMP_OK, "amp_mask_cache_info"); };
    begin();
    double each = timed(count, [&] { amp_mask_cache_clear(amp), work.run(); });
    told("made anew", each, before);
    begin();
    each = timed(count, [&] { work.run(); });
    told("cached", each, before);
    begin();
    need(amp_graph_begin(amp) == AMP_OK, "amp_graph_begin");
    work.run();
    need(amp_graph_end(amp, &graph) == AMP_OK, "amp_graph_end");
    told("at the capture", 0, before);
    begin();
    each = timed(count, [&] { need(amp_graph_launch(graph) == AMP_OK, "amp_graph_launch"); });
    told("captured", each, before);
    amp_mask_cache_clear(amp);                  /* what a graph reads stays */
    told("captured, the cache cleared", 0, before);
    amp_graph_destroy(graph);
}

} /* namespace */

int main(int argc, char **argv) {
    std::string what = argc > 1 ? argv[1] : "";
    amp_desc desc;
    small = argc > 2 && !strcmp(argv[2], "--tiny");
    if (what != "loader" && what != "masks") return fprintf(stderr, "bench_data loader or masks, then --tiny\n"), 2;
    coc_set_modelled_clock(0);
    memset(&desc, 0, sizeof desc);
    need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess, "a stream");
    desc.backend = amp_cuda(), desc.stream = stream, desc.dtype = AMP_BF16;
    need(amp_open(&amp, &desc) == AMP_OK, "amp_open");
    if (what == "loader") loader();
    else masks();
    amp_close(amp);
    return cudaStreamDestroy(stream) != cudaSuccess;
}
