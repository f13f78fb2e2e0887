/* bench_loader.c - measures the loader: next() with a batch ready, tokens per second per worker, closing, allocations, and
 * resuming.
 *
 *     cc -O2 tests/bench/bench_loader.c -o bench_loader -lm -lpthread
 *     ./bench_loader --tokens 33554432 --seconds 2
 *
 * It reads a file of random 16-bit tokens, which it makes in the temporary folder and removes.  The file is in the page
 * cache, so the loader is measured and not the disk. */
#define AMP_IMPLEMENTATION
#include "bench.h"

static char token_path[PATH_MAX];
static amp_token_format token_format;
static bench_counts counts;

static void remove_file(void) { if (token_path[0] != 0) unlink(token_path); }

/* Random tokens, raw or behind llm.c's header. */
static void make_file(int64_t tokens, amp_token_format format) {
    enum { PIECE = 1 << 20 };
    const char *folder = getenv("TMPDIR");
    uint16_t *piece = (uint16_t *)bench_memory(PIECE * sizeof *piece);
    uint64_t state = 3;
    int32_t head[256] = {20240520, 1};
    FILE *file;
    int fd;
    snprintf(token_path, sizeof token_path, "%.4000s/amp_bench_XXXXXX", folder != NULL ? folder : "/tmp");
    fd = mkstemp(token_path);
    file = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (file == NULL) { fprintf(stderr, "%s: %s\n", token_path, strerror(errno)); exit(1); }
    token_format = format;
    head[2] = (int32_t)tokens;
    if (format == AMP_TOKENS_LLMC && fwrite(head, sizeof head, 1, file) != 1) { perror(token_path); exit(1); }
    while (tokens > 0) {
        int64_t n = tokens < PIECE ? tokens : PIECE, i;
        for (i = 0; i < n; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            piece[i] = (uint16_t)(state >> 48);
        }
        if (fwrite(piece, sizeof *piece, (size_t)n, file) != (size_t)n) { perror(token_path); exit(1); }
        tokens -= n;
    }
    if (fclose(file) != 0) { perror(token_path); exit(1); }
    free(piece);
}

static amp_loader_desc token_desc(int64_t batch, int64_t seq, int shuffle, int workers) {
    amp_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = token_path;
    desc.format = token_format;
    desc.batch = batch;
    desc.seq = seq;
    desc.shuffle = shuffle;
    desc.workers = workers;
    desc.seed = 1;
    return desc;
}

static amp_loader *open_loader(amp_context *amp, const amp_loader_desc *desc) {
    amp_loader *loader = NULL;
    bench_need(amp_loader_create(amp, &loader, desc), "amp_loader_create");
    return loader;
}

static int64_t ready_batches(const amp_loader *loader) {
    amp_loader_info info;
    memset(&info, 0, sizeof info);
    bench_need(amp_loader_info_get(loader, &info), "amp_loader_info_get");
    return info.ready;
}
static void wait_ready(const amp_loader *loader, int64_t batches) {
    while (ready_batches(loader) < batches) bench_sleep(2e-5);
}

/* ---- CPU of the consumer in next(), with a batch ready.  The clock's own cost is measured and taken off. */

static double clock_cost(void) {
    double best = 1;
    int i;
    for (i = 0; i < 1000; i++) {
        double start = bench_thread_seconds(), cost = bench_thread_seconds() - start;
        if (cost < best) best = cost;
    }
    return best;
}

static void measure_next(amp_context *amp, int64_t batch, int64_t seq, int64_t rounds) {
    amp_loader_desc desc = token_desc(batch, seq, 1, 2);
    amp_loader *loader = open_loader(amp, &desc);
    double *times = (double *)bench_memory((size_t)rounds * sizeof *times), cost = clock_cost();
    int64_t i, before = 0;
    for (i = -20; i < rounds; i++) {
        amp_batch got;
        double start;
        wait_ready(loader, 1);
        if (i == 0) before = counts.allocations;
        start = bench_thread_seconds();
        bench_need(amp_loader_next(loader, &got), "amp_loader_next");
        if (i >= 0) times[i] = bench_thread_seconds() - start - cost;
    }
    bench_begin("loader_next", amp);
    metrics_integer(stdout, "batch", batch);
    metrics_integer(stdout, "seq", seq);
    metrics_integer(stdout, "workers", desc.workers);
    metrics_integer(stdout, "calls", rounds);
    metrics_number(stdout, "cpu_us_median", 1e6 * bench_median(times, rounds));
    metrics_number(stdout, "cpu_us_p99", 1e6 * bench_quantile(times, rounds, 0.99));
    metrics_number(stdout, "allocations_per_batch", (double)(counts.allocations - before) / (double)rounds);
    metrics_end(stdout);
    free(times);
    amp_loader_destroy(loader);
}

/* ---- Tokens per second: the consumer takes batches and does nothing with them. */

static void measure_rate(amp_context *amp, int64_t batch, int64_t seq, int shuffle, int workers, double seconds) {
    amp_loader_desc desc = token_desc(batch, seq, shuffle, workers);
    amp_loader *loader = open_loader(amp, &desc);
    double start = 0, end, rate;
    int64_t taken = -8;                     /* the first batches start the workers up */
    do {
        amp_batch got;
        bench_need(amp_loader_next(loader, &got), "amp_loader_next");
        if (++taken == 0) start = ex_seconds();
        end = ex_seconds();
    } while (taken <= 0 || end - start < seconds);
    rate = (double)(taken * batch * seq) / (end - start);
    bench_begin("loader_rate", amp);
    metrics_integer(stdout, "batch", batch);
    metrics_integer(stdout, "seq", seq);
    metrics_integer(stdout, "shuffle", shuffle);
    metrics_text(stdout, "format", token_format == AMP_TOKENS_LLMC ? "llm.c" : "u16");
    metrics_integer(stdout, "workers", workers);
    metrics_number(stdout, "tokens_per_s", rate);
    metrics_number(stdout, "tokens_per_s_per_worker", workers > 0 ? rate / workers : rate);
    metrics_end(stdout);
    amp_loader_destroy(loader);
}

/* ---- Closing: when all is read ahead, in the middle of reading, and while the operating system holds a read. */

static amp_system posix_files;
static int hold_reads;              /* 1: a read takes a quarter of a second */
static int64_t held_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    (void)user;
    if (__atomic_load_n(&hold_reads, __ATOMIC_RELAXED)) bench_sleep(0.25);
    return posix_files.file_read(posix_files.user, file, buffer, bytes, offset);
}

static void measure_close(amp_context *amp, const char *when, int64_t rounds) {
    double *times = (double *)bench_memory((size_t)rounds * sizeof *times);
    int64_t i;
    for (i = 0; i < rounds; i++) {
        amp_loader_desc desc = token_desc(64, 1024, 1, 2);
        amp_loader *loader = open_loader(amp, &desc);
        double start;
        if (strcmp(when, "all_read") == 0) wait_ready(loader, 2);
        else if (strcmp(when, "reading") == 0) bench_sleep(2e-3);
        else {
            amp_batch batch;
            bench_need(amp_loader_next(loader, &batch), "amp_loader_next");
            __atomic_store_n(&hold_reads, 1, __ATOMIC_RELAXED);
            bench_need(amp_loader_seek(loader, 1, 0), "amp_loader_seek");
            bench_sleep(5e-3);
        }
        start = ex_seconds();
        amp_loader_destroy(loader);
        times[i] = ex_seconds() - start;
        __atomic_store_n(&hold_reads, 0, __ATOMIC_RELAXED);
    }
    bench_begin("loader_close", amp);
    metrics_text(stdout, "when", when);
    metrics_integer(stdout, "closes", rounds);
    metrics_number(stdout, "ms_median", 1e3 * bench_median(times, rounds));
    metrics_number(stdout, "ms_worst", 1e3 * bench_quantile(times, rounds, 1));
    metrics_end(stdout);
    free(times);
}

/* ---- Resuming: from seek to the first batch, by position. */

static void measure_resume(amp_context *amp, int64_t epoch, double part, int64_t rounds) {
    amp_loader_desc desc = token_desc(4, 64, 1, 2);
    amp_loader *loader = open_loader(amp, &desc);
    double *seek = (double *)bench_memory((size_t)rounds * sizeof *seek);
    double *first = (double *)bench_memory((size_t)rounds * sizeof *first);
    amp_loader_info info;
    int64_t i, index;
    bench_need(amp_loader_info_get(loader, &info), "amp_loader_info_get");
    index = (int64_t)(part * (double)(info.batches - 1));
    for (i = 0; i < rounds; i++) {
        amp_batch got;
        double start;
        bench_need(amp_loader_seek(loader, i % 2, 0), "amp_loader_seek");
        bench_need(amp_loader_next(loader, &got), "amp_loader_next");
        start = ex_seconds();
        bench_need(amp_loader_seek(loader, epoch, index), "amp_loader_seek");
        seek[i] = ex_seconds() - start;
        bench_need(amp_loader_next(loader, &got), "amp_loader_next");
        first[i] = ex_seconds() - start;
    }
    bench_begin("loader_resume", amp);
    metrics_integer(stdout, "epoch", epoch);
    metrics_integer(stdout, "index", index);
    metrics_integer(stdout, "position", epoch * info.batches + index);
    metrics_number(stdout, "seek_us", 1e6 * bench_median(seek, rounds));
    metrics_number(stdout, "first_batch_us", 1e6 * bench_median(first, rounds));
    metrics_end(stdout);
    free(seek);
    free(first);
    amp_loader_destroy(loader);
}

int main(int argc, char **argv) {
    int64_t tokens = (int64_t)1 << 25, seconds = 2, rounds = 2000, repeats = 1, i, seq;
    int shuffle;
    amp_context *amp = NULL;
    amp_desc desc;
    const bench_flag flags[] = {
        {"tokens", &tokens, NULL, "in the file"},
        {"seconds", &seconds, NULL, "for each rate"},
        {"calls", &rounds, NULL, "of next() that are timed"},
        {"repeats", &repeats, NULL, "of the rates"},
    };
    memset(&desc, 0, sizeof desc);
    bench_flags(argc, argv, flags, (int)(sizeof flags / sizeof *flags));
    if (tokens < 1 << 20 || rounds < 1) bench_usage(argv[0], flags, (int)(sizeof flags / sizeof *flags));
    bench_count_into(&desc, &counts);
    amp_system_default(&posix_files);
    desc.system.file_read = held_read;
    bench_need(amp_open(&amp, &desc), "amp_open");
    atexit(remove_file);
    make_file(tokens, AMP_TOKENS_LLMC);
    for (seq = 64; seq <= 128; seq *= 2)
        for (shuffle = 0; shuffle < 2; shuffle++) measure_rate(amp, 32768 / seq, seq, shuffle, 1, (double)seconds);
    remove_file();
    make_file(tokens, AMP_TOKENS_U16);
    measure_next(amp, 4, 64, rounds);
    measure_next(amp, 32, 1024, rounds);
    for (i = 0; i < repeats; i++) {
        for (seq = 64; seq <= 128; seq *= 2)
            for (shuffle = 0; shuffle < 2; shuffle++) measure_rate(amp, 32768 / seq, seq, shuffle, 1, (double)seconds);
        measure_rate(amp, 32, 1024, 0, 1, (double)seconds);
        measure_rate(amp, 32, 1024, 1, 1, (double)seconds);
        measure_rate(amp, 32, 1024, 1, 2, (double)seconds);
        measure_rate(amp, 32, 1024, 1, AMP_NO_WORKERS, (double)seconds);
    }
    measure_close(amp, "all_read", 20);
    measure_close(amp, "reading", 20);
    measure_close(amp, "read_held", 5);
    for (i = 0; i <= 1000000000; i = i == 0 ? 1 : i * 1000) measure_resume(amp, i, i == 0 ? 0 : 0.7, 50);
    amp_close(amp);
    bench_sleep(0.5);               /* reads that were held return, and free what they use */
    return 0;
}
