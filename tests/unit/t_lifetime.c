/* t_lifetime.c - tests the lifetime of parameters, regions, objects and contexts.  It tests parameters and their ids,
 * regions and the threads in which they are open, and objects and the context that created them.  It also checks that the
 * library never calls a function of the program while it holds a lock. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>

/* Locks that this thread holds. */
static __thread int locks_held;
static int counted_lock(pthread_mutex_t *m) { int r = pthread_mutex_lock(m); locks_held += r == 0; return r; }
static int counted_unlock(pthread_mutex_t *m) { locks_held--; return pthread_mutex_unlock(m); }
#define pthread_mutex_lock counted_lock
#define pthread_mutex_unlock counted_unlock
#define AMP_IMPLEMENTATION
#include "../amp.h"
#undef pthread_mutex_lock
#undef pthread_mutex_unlock
#include "test.h"
#include "alike.h"
#include "recording_backend.h"
#if !defined(_WIN32)
#  include <sys/wait.h>
#endif

static void sleep_ms(long ms) {
    struct timespec t;
    t.tv_sec = ms / 1000;
    t.tv_nsec = ms % 1000 * 1000000;
    nanosleep(&t, NULL);
}

static int says(const char *words) { return strstr(amp_last_error(), words) != NULL; }

/* ---- The host: memory, files, threads and a log that look at who calls them.  from_within: each of its callbacks uses the
 * library, as a host's may. */

static struct { int64_t calls, locked, live, wrong, lines; amp_context *from_within; char last[1024]; } host;
static __thread int in_callback;
static void (*visitor)(void);       /* what each callback does first, or NULL */

static void visited(void) {
    void (*visit)(void) = __atomic_load_n(&visitor, __ATOMIC_ACQUIRE);
    if (visit == NULL || in_callback || locks_held > 0) return;
    in_callback = 1;
    visit();
    in_callback = 0;
}
static void called(void) {
    amp_cache_info info;
    amp_memory_info memory;
    amp_context *amp = __atomic_load_n(&host.from_within, __ATOMIC_RELAXED);
    void *block = NULL;
    __atomic_add_fetch(&host.calls, 1, __ATOMIC_RELAXED);
    if (locks_held > 0) { __atomic_add_fetch(&host.locked, 1, __ATOMIC_RELAXED); return; }  /* it would hang */
    if (amp == NULL || in_callback) return;
    in_callback = 1;
    if (amp_mask_cache_info(amp, &info) != AMP_OK || amp_memory(amp, &memory) != AMP_OK || amp_alloc(amp, &block, 64) != AMP_OK)
        __atomic_add_fetch(&host.wrong, 1, __ATOMIC_RELAXED);
    amp_free(amp, block);
    in_callback = 0;
}

/* A callback; the device's table is none. */
static void entered(void) { visited(); called(); }

static void *host_alloc(void *user, size_t size, size_t align) {
    void *ptr;
    entered();
    ptr = ampi_os_alloc(user, size, align);
    if (ptr != NULL) __atomic_add_fetch(&host.live, (int64_t)size, __ATOMIC_RELAXED);
    return ptr;
}
static void host_free(void *user, void *ptr, size_t size) {
    entered();
    __atomic_sub_fetch(&host.live, (int64_t)size, __ATOMIC_RELAXED);
    ampi_os_free(user, ptr, size);
}
static int host_open(void *user, const char *path, int for_writing, intptr_t *file) { entered(); return ampi_os_open(user, path, for_writing, file); }
static int64_t host_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) { entered(); return ampi_os_read(user, file, buffer, bytes, offset); }
static int64_t host_write(void *user, intptr_t file, const void *buffer, size_t bytes, int64_t offset) { entered(); return ampi_os_write(user, file, buffer, bytes, offset); }
static int64_t host_size(void *user, intptr_t file) { entered(); return ampi_os_size(user, file); }
static int host_sync(void *user, intptr_t file) { entered(); return ampi_os_sync(user, file); }
static int host_close(void *user, intptr_t file) { entered(); return ampi_os_close(user, file); }
static int host_start(void *user, void **thread, void (*run)(void *arg), void *arg) { entered(); return ampi_os_thread_start(user, thread, run, arg); }
static int host_join(void *user, void *thread) { entered(); return ampi_os_thread_join(user, thread); }
static int host_detach(void *user, void *thread) { entered(); return ampi_os_thread_detach(user, thread); }
static int64_t host_clock(void *user) { entered(); return ampi_os_clock(user); }
static void host_log(void *user, amp_log_level level, int id, const char *text) {
    (void)user; (void)level; (void)id;
    static char writing;        /* any thread may log */
    entered();
    while (__atomic_test_and_set(&writing, __ATOMIC_ACQUIRE)) continue;
    snprintf(host.last + strlen(host.last), sizeof host.last - strlen(host.last), "%s\n", text);
    host.lines++;
    __atomic_clear(&writing, __ATOMIC_RELEASE);
}
static int host_reduce(void *user, void *data, int64_t count, amp_dtype dtype, amp_reduce_op op, void *stream) {
    (void)user; (void)data; (void)count; (void)dtype; (void)op; (void)stream;
    entered();
    return 0;
}

/* ---- A device whose every entry looks at who calls it; those of `failing` fail for good, and say so to the log */

static struct { int pack, copy, alloc; } failing;
static amp_host device_host;

static amp_result broken(const char *name) {
    char text[64];
    snprintf(text, sizeof text, "%s: the device is gone", name);
    device_host.log(device_host.user, AMP_LOG_ERROR, AMP_ERR_DEVICE, text);
    return device_host.fail(device_host.user, AMP_ERR_DEVICE, text);
}

#define VALUE(type, name, parameters, arguments) static type device_##name parameters { called(); return amp_cpu()->name arguments; }
#define NOTHING(name, parameters, arguments) static void device_##name parameters { called(); amp_cpu()->name arguments; }
static amp_result device_open(void **dev, const amp_host *h, const amp_backend_desc *d) { called(); device_host = *h; return amp_cpu()->open(dev, h, d); }
NOTHING(close, (void *dev), (dev))
VALUE(amp_result, describe, (void *dev, amp_device *out), (dev, out))
static amp_result device_alloc(void *dev, void **ptr, size_t bytes) { called(); return failing.alloc ? broken("alloc") : amp_cpu()->alloc(dev, ptr, bytes); }
NOTHING(free, (void *dev, void *ptr, size_t bytes), (dev, ptr, bytes))
VALUE(amp_result, alloc_pinned, (void *dev, void **ptr, size_t bytes), (dev, ptr, bytes))
NOTHING(free_pinned, (void *dev, void *ptr, size_t bytes), (dev, ptr, bytes))
static amp_result device_copy(void *dev, void *dst, const void *src, size_t bytes, amp_copy_kind kind, void *stream) {
    called();
    return failing.copy ? broken("copy") : amp_cpu()->copy(dev, dst, src, bytes, kind, stream);
}
VALUE(amp_result, fill, (void *dev, void *dst, int byte, size_t bytes, void *stream), (dev, dst, byte, bytes, stream))
VALUE(amp_result, memory_kind, (void *dev, const void *ptr, amp_memory_kind *out), (dev, ptr, out))
VALUE(amp_result, memory, (void *dev, amp_memory_info *out), (dev, out))
VALUE(amp_result, stream_create, (void *dev, void **stream), (dev, stream))
NOTHING(stream_destroy, (void *dev, void *stream), (dev, stream))
VALUE(amp_result, stream_sync, (void *dev, void *stream), (dev, stream))
VALUE(amp_result, event_create, (void *dev, void **event, int32_t timed), (dev, event, timed))
NOTHING(event_destroy, (void *dev, void *event), (dev, event))
VALUE(amp_result, event_record, (void *dev, void *event, void *stream), (dev, event, stream))
VALUE(amp_result, event_wait, (void *dev, void *event, void *stream), (dev, event, stream))
VALUE(amp_result, event_done, (void *dev, void *event, int32_t *done), (dev, event, done))
VALUE(amp_result, event_sync, (void *dev, void *event), (dev, event))
VALUE(amp_result, event_elapsed, (void *dev, void *from, void *to, double *seconds), (dev, from, to, seconds))
VALUE(amp_result, telemetry, (void *dev, amp_telemetry *out), (dev, out))
VALUE(amp_result, trim, (void *dev), (dev))
VALUE(size_t, gemm_pack_size, (void *dev, const amp_k_pack *args), (dev, args))
static amp_result device_gemm_pack(void *dev, const amp_k_pack *args, void *packed, void *stream) {
    called();
    return failing.pack ? broken("gemm_pack") : amp_cpu()->gemm_pack(dev, args, packed, stream);
}
#define KERNEL(name, type) VALUE(amp_result, name, (void *dev, const type *args, void *stream), (dev, args, stream))
RECORDED_KERNELS(KERNEL)

/* Graphs that only pretend: what is captured has run. */
static struct { int begun, made, ended; } graphs;
static amp_result device_graph_begin(void *dev, void *stream) { (void)dev; (void)stream; called(); graphs.begun++; return AMP_OK; }
static amp_result device_graph_end(void *dev, void *stream, void **graph) { (void)stream; called(); graphs.begun--; graphs.made++; *graph = dev; return AMP_OK; }
static amp_result device_graph_launch(void *dev, void *graph, void *stream) { (void)dev; (void)graph; (void)stream; called(); return AMP_OK; }
static void device_graph_destroy(void *dev, void *graph) { (void)dev; (void)graph; called(); graphs.ended++; }

static const amp_backend *device(int host_visible) {
    static amp_backend tables[2];
    amp_backend *t = &tables[host_visible];
    *t = *amp_cpu();
    t->name = "watching";
    t->host_visible = host_visible;
#define ENTRY(name) t->name = device_##name;
    ENTRY(open) ENTRY(close) ENTRY(describe) ENTRY(alloc) ENTRY(free) ENTRY(alloc_pinned) ENTRY(free_pinned) ENTRY(copy) ENTRY(fill)
    ENTRY(memory_kind) ENTRY(memory) ENTRY(stream_create) ENTRY(stream_destroy) ENTRY(stream_sync) ENTRY(event_create) ENTRY(event_destroy)
    ENTRY(event_record) ENTRY(event_wait) ENTRY(event_done) ENTRY(event_sync) ENTRY(event_elapsed) ENTRY(telemetry) ENTRY(trim)
    ENTRY(gemm_pack_size) ENTRY(gemm_pack)
    if (!host_visible) { ENTRY(graph_begin) ENTRY(graph_end) ENTRY(graph_launch) ENTRY(graph_destroy) }
#define KERNEL_ENTRY(name, type) ENTRY(name)
    RECORDED_KERNELS(KERNEL_ENTRY)
    return t;
}

static amp_desc watched_desc(int host_visible) {
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = AMP_BF16; d.allow_fallback = 1;
    d.threads = 1;
    d.backend = device(host_visible);
    d.logger.write = host_log;
    d.system.alloc = host_alloc; d.system.free = host_free;
    d.system.file_open = host_open; d.system.file_read = host_read; d.system.file_write = host_write; d.system.file_size = host_size;
    d.system.file_sync = host_sync; d.system.file_close = host_close; d.system.clock_ns = host_clock;
    d.system.thread_start = host_start; d.system.thread_join = host_join; d.system.thread_detach = host_detach;
    d.reducer.reduce = host_reduce; d.reducer.calls = &alike; d.reducer.world = 2;
    memset(&host, 0, sizeof host);
    memset(&failing, 0, sizeof failing);
    memset(&graphs, 0, sizeof graphs);
    return d;
}

/* ---- A small training with one of each object */

enum { IN = 24, OUT = 12, ROWS = 6, LAYERS = 2 };
typedef struct net {
    amp_context *amp;
    amp_param p[LAYERS];
    float w[LAYERS][IN * OUT], g[LAYERS][IN * OUT], x[ROWS * IN], y[ROWS * OUT], dy[ROWS * OUT];
    amp_linear_op op;
    amp_optimizer *opt; amp_scaler *scaler; amp_grad_set *set; amp_monitor *monitor; amp_tensor_stats *numerics;
    amp_recovery *recovery; amp_loader *loader; amp_graph *graph;
    amp_mask_view view;
} net;
static const char *const layer_names[LAYERS] = {"first", "second"};
static char folder[] = "/tmp/t_lifetime_XXXXXX", log_file[64];

static int read_sample(void *user, const amp_sample *sample, void *const *fields) {
    (void)user;
    entered();
    for (int j = 0; j < 4; j++) ((int32_t *)fields[0])[j] = ((int32_t *)fields[1])[j] = (int32_t)sample->sample + j;
    return 0;
}

static void net_params(net *n) {
    for (int i = 0; i < LAYERS; i++) {
        for (int k = 0; k < IN * OUT; k++) n->w[i][k] = (float)((k * 37 + i * 11) % 64 - 32) / 64;
        n->p[i].name = layer_names[i];
        n->p[i].weight = amp_tensor2(n->w[i], AMP_F32, OUT, IN);
        n->p[i].grad = amp_tensor2(n->g[i], AMP_F32, OUT, IN);
    }
    for (int k = 0; k < ROWS * IN; k++) n->x[k] = (float)(k % 16 - 8) / 8;
}

static amp_result net_objects(net *n, int workers) {
    amp_optimizer_desc od;
    amp_grad_set_desc sd;
    amp_monitor_desc md;
    amp_tensor_stats_desc nd;
    amp_recovery_desc rd;
    amp_loader_desc ld;
    amp_source source;
    amp_mask mask;
    memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd); memset(&md, 0, sizeof md); memset(&nd, 0, sizeof nd);
    memset(&rd, 0, sizeof rd); memset(&ld, 0, sizeof ld); memset(&source, 0, sizeof source); memset(&mask, 0, sizeof mask);
    od.params = nd.params = rd.params = sd.params = n->p;
    od.n_params = nd.n_params = rd.n_params = sd.n_params = LAYERS;
    AMPI_TRY(amp_optimizer_create(n->amp, &n->opt, &od));
    AMPI_TRY(amp_scaler_create(n->amp, &n->scaler, NULL));
    AMPI_TRY(amp_grad_set_create(n->amp, &n->set, &sd));
    md.optimizer = rd.optimizer = n->opt; md.scaler = rd.scaler = nd.scaler = n->scaler;
    md.path = log_file; md.log_interval = 1;
    AMPI_TRY(amp_monitor_create(n->amp, &n->monitor, &md));
    AMPI_TRY(amp_tensor_stats_create(n->amp, &n->numerics, &nd));
    AMPI_TRY(amp_recovery_create(n->amp, &n->recovery, &rd));
    source.read = read_sample; source.samples = 64; source.n_fields = 2;
    source.fields[0].dtype = source.fields[1].dtype = AMP_I32;
    source.fields[0].count = source.fields[1].count = 4;
    ld.source = &source; ld.batch = 4; ld.workers = workers;
    AMPI_TRY(amp_loader_create(n->amp, &n->loader, &ld));
    mask.kind = AMP_MASK_CAUSAL;
    return amp_mask_get(n->amp, &mask, 1, 5, 5, AMP_U8, &n->view);
}

static amp_result net_open(net *n, const amp_desc *d, int workers) {
    memset(n, 0, sizeof *n);
    AMPI_TRY(amp_open(&n->amp, d));
    net_params(n);
    AMPI_TRY(amp_param_register(n->amp, n->p, LAYERS));
    return net_objects(n, workers);
}

static amp_result net_linear(net *n, amp_param *p) {
    memset(&n->op, 0, sizeof n->op);
    n->op.x = amp_tensor2(n->x, AMP_F32, ROWS, IN);
    n->op.weight = p;
    n->op.y = amp_tensor2(n->y, AMP_F32, ROWS, OUT);
    n->op.dy = amp_tensor2(n->dy, AMP_F32, ROWS, OUT);
    return amp_linear(n->amp, &n->op);
}

static amp_result net_step(net *n) {
    amp_batch batch;
    amp_step_info info;
    amp_step_record record;
    amp_recovery_event event;
    amp_tensor_stats_report report;
    memset(&info, 0, sizeof info);
    AMPI_TRY(amp_loader_next(n->loader, &batch));
    for (int k = 0; k < ROWS * OUT; k++) n->dy[k] = (float)(k % 5 - 2) / 4;
    AMPI_TRY(amp_autocast_begin(n->amp, NULL));
    for (int i = 0; i < LAYERS; i++) {
        AMPI_TRY(net_linear(n, &n->p[i]));
        AMPI_TRY(amp_linear_backward(n->amp, &n->op));
    }
    AMPI_TRY(amp_autocast_end(n->amp));
    AMPI_TRY(amp_tensor_stats_step(n->numerics, &report));
    AMPI_TRY(amp_step(n->opt, n->scaler));
    AMPI_TRY(amp_monitor_step(n->monitor, &info));
    while (amp_monitor_next(n->monitor, &record)) AMPI_TRY(amp_recovery_step(n->recovery, &record, &event));
    return AMP_OK;
}

static void net_destroy(net *n) {
    if (n->amp) amp_mask_release(n->amp, &n->view);
    amp_graph_destroy(n->graph);
    amp_loader_destroy(n->loader);
    amp_recovery_destroy(n->recovery);
    amp_tensor_stats_destroy(n->numerics);
    amp_monitor_destroy(n->monitor);
    amp_grad_set_destroy(n->set);
    amp_scaler_destroy(n->scaler);
    amp_optimizer_destroy(n->opt);
}

/* ---- The lock rule */

/* Caches that fill, overflow and empty; names, patterns and blocks whose arrays grow. */
static amp_result use_caches(net *n, int more) {
    char name[32];
    amp_tensor cast;
    amp_mask mask;
    amp_mask_view view;
    void *blocks[40];
    int32_t op;
    memset(&mask, 0, sizeof mask);
    mask.kind = AMP_MASK_WINDOW;
    for (int i = 0; i < 40; i++) {
        mask.window = i % 20 + 1;
        AMPI_TRY(amp_mask_get(n->amp, &mask, 1, 9, 9, i % 2 ? AMP_U8 : AMP_F32, &view));
        amp_mask_release(n->amp, &view);
        AMPI_TRY(amp_alloc(n->amp, &blocks[i], 100 + i));
        AMPI_TRY(amp_autocast_begin(n->amp, NULL));
        AMPI_TRY(amp_autocast_cast(n->amp, &n->p[i % LAYERS], i % 4 < 2 ? AMP_BF16 : AMP_F16, &cast));
        AMPI_TRY(net_linear(n, &n->p[i % LAYERS]));
        AMPI_TRY(amp_autocast_end(n->amp));
        if (i % 8 == 7) for (int k = 0; k < LAYERS; k++) amp_param_changed(&n->p[k]);
        if (!more) continue;
        snprintf(name, sizeof name, "op%d", i);
        AMPI_TRY(amp_operator_register(n->amp, name, AMP_CAST_LOWER, &op));
        AMPI_TRY(amp_layer_override(n->amp, name, AMP_F16));
    }
    for (int i = 0; i < 40; i++) amp_free(n->amp, blocks[i]);
    AMPI_TRY(amp_cleanup(n->amp, NULL));
    amp_mask_cache_drop(n->amp, AMP_MASK_WINDOW);
    amp_mask_cache_clear(n->amp);
    amp_cast_cache_clear(n->amp);
    return AMP_OK;
}

static void *use_caches_too(void *arg) {
    net *shared = (net *)arg;
    net own;
    memset(&own, 0, sizeof own);
    own.amp = shared->amp;
    for (int round = 0; round < 4; round++)
        for (int i = 0; i < 12; i++) {
            amp_tensor cast;
            amp_memory_info info;
            own.op.x = amp_tensor2(own.x, AMP_F32, ROWS, IN);
            own.op.weight = &shared->p[i % LAYERS];
            own.op.y = amp_tensor2(own.y, AMP_F32, ROWS, OUT);
            if (amp_autocast_begin(own.amp, NULL) != AMP_OK || amp_linear(own.amp, &own.op) != AMP_OK ||
                amp_autocast_cast(own.amp, &shared->p[i % LAYERS], AMP_F16, &cast) != AMP_OK || amp_memory(own.amp, &info) != AMP_OK ||
                amp_autocast_end(own.amp) != AMP_OK) return (void *)"failed";
        }
    return NULL;
}

TEST(nothing_of_the_hosts_runs_under_a_lock) {
    for (int variant = 0; variant < 8; variant++) {
        int host_visible = variant % 2, within = variant / 2 % 2, limited = variant / 4;
        amp_desc d = watched_desc(host_visible);
        pthread_t threads[4];
        net n;
        if (limited) { d.cache_limit = IN * OUT * 2 + 8; d.mask_limit = 400; }
        d.memory_efficient = limited;
        d.logger.level = AMP_LOG_DEBUG;
        CHECK_OK(net_open(&n, &d, 2));
        __atomic_store_n(&host.from_within, within ? n.amp : NULL, __ATOMIC_RELAXED);
        for (int i = 0; i < 5; i++) CHECK_OK(net_step(&n));
        CHECK_OK(use_caches(&n, 1));
        for (int i = 0; i < 4; i++) CHECK_EQ(pthread_create(&threads[i], NULL, use_caches_too, &n), 0);
        for (int i = 0; i < 4; i++) {
            void *failed = NULL;
            CHECK_EQ(pthread_join(threads[i], &failed), 0);
            CHECK(failed == NULL);
        }
        CHECK_OK(use_caches(&n, 0));
        amp_param_forget(n.amp, n.p, LAYERS);
        __atomic_store_n(&host.from_within, NULL, __ATOMIC_RELAXED);        /* closing */
        net_destroy(&n);
        amp_close(n.amp);
        CHECK(host.calls > 1000);
        CHECK_EQ(host.locked, 0);
        CHECK_EQ(host.wrong, 0);
        CHECK_EQ(host.live, 0);
    }
}

/* Runs in a separate process with the default logger, which gets the failure; 99: it hung. */
static int failure_of(int which, int host_visible) {
    int status;
    pid_t child;
    fflush(stdout);
    child = fork();
    if (child == 0) {
        amp_desc d = watched_desc(host_visible);
        amp_mask mask;
        amp_mask_view view;
        amp_tensor cast;
        amp_result r = AMP_OK;
        void *block = NULL;
        net n;
        alarm(60);
        if (freopen("/dev/null", "w", stderr) == NULL) _exit(98);
        memset(&mask, 0, sizeof mask);
        memset(&n, 0, sizeof n);
        d.logger.write = NULL;
        d.reducer.world = 1; d.reducer.reduce = NULL;
        if (amp_open(&n.amp, &d) != AMP_OK) _exit(97);
        net_params(&n);
        if (amp_param_register(n.amp, n.p, LAYERS) != AMP_OK || amp_autocast_begin(n.amp, NULL) != AMP_OK) _exit(96);
        failing.pack = which == 0; failing.copy = which == 1; failing.alloc = which > 1;
        for (int i = 0; i < 30 && (r == AMP_OK || r == AMP_ERR_DEVICE); i++)     /* beyond the log's ten repeats */
            switch (which) {
                case 0: case 2: r = net_linear(&n, &n.p[0]); break;
                case 1: case 3: r = amp_mask_get(n.amp, &mask, 1, 4, 4, AMP_U8, &view); break;
                case 4: r = amp_autocast_cast(n.amp, &n.p[0], AMP_F16, &cast); break;
                default: r = amp_alloc(n.amp, &block, 100); break;
            }
        if (!says("the device is gone")) _exit(95);
        memset(&failing, 0, sizeof failing);            /* nothing is left half made */
        if (net_linear(&n, &n.p[0]) != AMP_OK || amp_mask_get(n.amp, &mask, 1, 4, 4, AMP_U8, &view) != AMP_OK ||
            amp_autocast_cast(n.amp, &n.p[0], AMP_F16, &cast) != AMP_OK) _exit(94);
        amp_mask_release(n.amp, &view);
        (void)amp_autocast_end(n.amp);
        amp_close(n.amp);
        _exit(host.live != 0 ? 93 : r == AMP_ERR_DEVICE ? 0 : 92);
    }
    if (waitpid(child, &status, 0) != child) return 98;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

TEST(a_lasting_failure_of_the_device_is_an_error) {
    SKIP_ON_WINDOWS("fork");
    for (int which = 0; which < 6; which++)
        for (int host_visible = 0; host_visible < 2; host_visible++) CHECK_EQ(failure_of(which, host_visible), 0);
}

/* ---- Parameters and their contexts */

static amp_context *open_plain(amp_dtype dtype) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = dtype; d.allow_fallback = 1; d.threads = 1;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}

/* y = x w^T in the context's dtype, twice so that the second use is of a packed weight; the error to fp64. */
static double linear_error(amp_context *amp, net *n, amp_param *p) {
    double square = 0, error = 0;
    n->amp = amp;
    for (int i = 0; i < 3; i++) {
        if (amp_autocast_begin(amp, NULL) != AMP_OK) return 9;
        if (net_linear(n, p) != AMP_OK) { (void)amp_autocast_end(amp); return 9; }
        if (amp_autocast_end(amp) != AMP_OK) return 9;
    }
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUT; o++) {
            double exact = 0, got = (double)n->y[r * OUT + o];
            for (int k = 0; k < IN; k++) exact += (double)n->x[r * IN + k] * (double)((const float *)p->weight.data)[o * IN + k];
            square += exact * exact;
            error += (got - exact) * (got - exact);
        }
    return sqrt(error / square);
}

static net *two_params(void) {
    static net n;
    memset(&n, 0, sizeof n);
    net_params(&n);
    for (int k = 0; k < IN * OUT; k++) n.w[1][k] = -n.w[1][k];
    return &n;
}

/* The first context knows p and q, the second q alone: whoever registered last has it, and nobody computes with p's weights. */
TEST(a_parameter_of_two_contexts) {
    net *n = two_params();
    amp_context *a = open_plain(AMP_BF16), *b = open_plain(AMP_BF16);
    amp_param *p = &n->p[0], *q = &n->p[1];
    CHECK_OK(amp_param_register(a, n->p, 2));
    CHECK(linear_error(a, n, p) < 0.02);
    CHECK_OK(amp_param_register(b, q, 1));
    CHECK(linear_error(b, n, q) < 0.02);
    CHECK(linear_error(a, n, p) < 0.02);
    n->amp = a;
    CHECK_ERR(net_linear(n, q), AMP_ERR_STATE);
    CHECK(says("amp_linear:") && says("second") && says("another context") && says("amp_param_register"));
    CHECK_OK(amp_param_register(a, q, 1));          /* back */
    CHECK(linear_error(a, n, q) < 0.02);
    n->amp = b;
    CHECK_ERR(net_linear(n, q), AMP_ERR_STATE);
    amp_param_forget(b, q, 1);                      /* what b has of it: not a's */
    CHECK(q->id != 0 && linear_error(a, n, q) < 0.02);
    amp_param_forget(a, n->p, 2);
    CHECK(p->id == 0 && q->id == 0);
    CHECK(linear_error(a, n, q) < 0.02 && linear_error(b, n, q) < 0.02);    /* known to none: used everywhere, never cached */
    amp_close(a);
    amp_close(b);
}

#define REFUSED(call) do { CHECK_ERR(call, AMP_ERR_STATE); CHECK_MSG(says("parameter second is") || says("parameter second was copied"), "%s", amp_last_error()); } while (0)
#define REFUSED_AS_COPY(call) do { CHECK_ERR(call, AMP_ERR_STATE); CHECK_MSG(says("was copied or moved"), "%s", amp_last_error()); } while (0)

/* Every use of a parameter that is another context's is refused by its name. */
static void check_refused(amp_context *amp, net *n, amp_param *q) {
    amp_linear_op lin;
    amp_norm_op norm;
    amp_activation_op act;
    amp_swiglu_op glu;
    amp_embedding_op emb;
    amp_optimizer_desc od;
    amp_grad_set_desc sd;
    amp_tensor_stats_desc nd;
    amp_optimizer *opt = NULL;
    amp_grad_set *set = NULL;
    amp_tensor_stats *numerics = NULL;
    amp_tensor cast;
    amp_param vector = *q;
    static float wide[IN * OUT], stat[ROWS];
    static int32_t ids[ROWS];
    memset(&lin, 0, sizeof lin); memset(&norm, 0, sizeof norm); memset(&act, 0, sizeof act); memset(&glu, 0, sizeof glu);
    memset(&emb, 0, sizeof emb); memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd); memset(&nd, 0, sizeof nd);
    vector.weight = amp_tensor1(wide, AMP_F32, IN); vector.grad = amp_tensor1(n->g[0], AMP_F32, IN);
    lin.x = norm.x = norm.y = act.x = act.y = glu.gate = glu.up = amp_tensor2(n->x, AMP_F32, ROWS, IN);
    norm.y = act.y = glu.y = emb.y = amp_tensor2(wide, AMP_F32, ROWS, IN);
    lin.y = amp_tensor2(n->y, AMP_F32, ROWS, OUT);
    lin.weight = emb.table = q;
    norm.rstd = norm.mean = stat; emb.ids = ids;
    norm.weight = act.bias = glu.up_bias = &vector;
    act.act = AMP_ACT_RELU;
    od.params = sd.params = nd.params = q;
    od.n_params = sd.n_params = nd.n_params = 1;
    REFUSED(amp_linear(amp, &lin)); REFUSED(amp_linear_backward(amp, &lin));
    REFUSED(amp_embedding(amp, &emb)); REFUSED(amp_embedding_backward(amp, &emb));
    REFUSED(amp_layernorm(amp, &norm)); REFUSED(amp_layernorm_backward(amp, &norm));
    REFUSED(amp_rmsnorm(amp, &norm)); REFUSED(amp_rmsnorm_backward(amp, &norm));
    REFUSED(amp_activation(amp, &act)); REFUSED(amp_activation_backward(amp, &act));
    REFUSED(amp_swiglu(amp, &glu)); REFUSED(amp_swiglu_backward(amp, &glu));
    REFUSED(amp_autocast_cast(amp, q, AMP_BF16, &cast));
    REFUSED(amp_optimizer_create(amp, &opt, &od));
    REFUSED(amp_grad_set_create(amp, &set, &sd));
    REFUSED(amp_tensor_stats_create(amp, &numerics, &nd));
}

TEST(a_parameter_of_a_closed_context) {
    net *n = two_params();
    amp_context *a = open_plain(AMP_BF16), *b;
    amp_param *q = &n->p[1];
    CHECK_OK(amp_param_register(a, n->p, 2));
    amp_close(a);
    b = open_plain(AMP_BF16);
    check_refused(b, n, q);
    CHECK_OK(amp_param_register(b, n->p, 2));
    CHECK(linear_error(b, n, q) < 0.02 && linear_error(b, n, &n->p[0]) < 0.02);
    a = open_plain(AMP_BF16);
    check_refused(a, n, q);
    amp_close(a);
    amp_close(b);
}

/* A set or optimizer whose parameter went to another context steps no more. */
TEST(a_parameter_that_left_its_optimizer) {
    net *n = two_params();
    amp_context *a = open_plain(AMP_BF16), *b = open_plain(AMP_BF16);
    amp_optimizer_desc od;
    amp_grad_set_desc sd;
    amp_optimizer *opt = NULL;
    amp_grad_set *set = NULL;
    amp_scaler *scaler = NULL, *others = NULL;
    memset(&od, 0, sizeof od); memset(&sd, 0, sizeof sd);
    od.params = sd.params = n->p; od.n_params = sd.n_params = 2;
    CHECK_OK(amp_param_register(a, n->p, 2));
    CHECK_OK(amp_optimizer_create(a, &opt, &od));
    CHECK_OK(amp_grad_set_create(a, &set, &sd));
    CHECK_OK(amp_scaler_create(a, &scaler, NULL));
    CHECK_OK(amp_scaler_create(b, &others, NULL));
    CHECK_OK(amp_step(opt, scaler));
    CHECK_ERR(amp_step(opt, others), AMP_ERR_CONFLICT);         /* nor with a scaler of another's */
    CHECK_ERR(amp_optimizer_step(opt, others), AMP_ERR_CONFLICT);
    CHECK_ERR(amp_scaler_check(others, set, AMP_CHECK_READ), AMP_ERR_CONFLICT);
    CHECK_ERR(amp_scaler_rescale(others, set, 0), AMP_ERR_CONFLICT);
    CHECK_OK(amp_param_register(b, &n->p[1], 1));
    REFUSED(amp_step(opt, scaler));
    REFUSED(amp_optimizer_step(opt, NULL));
    REFUSED(amp_scaler_check(scaler, set, AMP_CHECK_UNSCALE));
    REFUSED(amp_scaler_rescale(scaler, set, 0));
    amp_scaler_destroy(scaler); amp_scaler_destroy(others); amp_grad_set_destroy(set); amp_optimizer_destroy(opt);
    amp_close(a);
    amp_close(b);
}

/* A copy has the id of what it was copied from, and another place. */
TEST(copies_and_moves_of_a_parameter) {
    net *n = two_params();
    amp_context *a = open_plain(AMP_BF16);
    amp_param copy, moved;
    float other[IN * OUT];
    CHECK_OK(amp_param_register(a, n->p, 2));
    CHECK(linear_error(a, n, &n->p[1]) < 0.02);
    copy = n->p[1];
    for (int k = 0; k < IN * OUT; k++) other[k] = (float)(k % 7);
    copy.weight.data = other;
    n->amp = a;
    REFUSED_AS_COPY(net_linear(n, &copy));
    CHECK_ERR(amp_param_register(a, &copy, 1), AMP_ERR_NAME);       /* its name is taken */
    CHECK(says("second is already registered") && says("amp_param_forget"));
    CHECK_ERR(amp_param_register(a, &n->p[1], 1), AMP_ERR_NAME);    /* and so is the original */
    copy.name = "copy";
    CHECK_OK(amp_param_register(a, &copy, 1));
    CHECK(copy.id != n->p[1].id && copy.master == NULL);
    CHECK(linear_error(a, n, &copy) < 0.02 && linear_error(a, n, &n->p[1]) < 0.02);
    moved = copy;
    n->amp = a;
    REFUSED_AS_COPY(net_linear(n, &moved));
    amp_param_forget(a, &copy, 1);
    moved.id = 0;
    CHECK_OK(amp_param_register(a, &moved, 1));
    CHECK(linear_error(a, n, &moved) < 0.02);
    memset(&moved, 0, sizeof moved);                /* memory that begins anew without amp_param_forget */
    moved.name = "anew"; moved.weight = n->p[0].weight;
    CHECK_OK(amp_param_register(a, &moved, 1));
    CHECK(linear_error(a, n, &moved) < 0.02);
    amp_close(a);
}

/* Contexts that open and close in several threads at once, each with a first parameter. */
enum { OPENERS = 8, OPENINGS = 50 };
static uint64_t ids[OPENERS][OPENINGS][2];
static void *open_and_close(void *arg) {
    uint64_t (*mine)[2] = (uint64_t (*)[2])arg;
    for (int i = 0; i < OPENINGS; i++) {
        float w[4] = {1, 2, 3, 4};
        amp_context *amp = NULL;
        amp_desc d;
        amp_param p;
        memset(&d, 0, sizeof d); memset(&p, 0, sizeof p);
        d.threads = 1;
        p.name = "w"; p.weight = amp_tensor2(w, AMP_F32, 2, 2);
        if (amp_open(&amp, &d) != AMP_OK || amp_param_register(amp, &p, 1) != AMP_OK) return (void *)"failed";
        mine[i][0] = p.id;
        mine[i][1] = p.context;
        amp_close(amp);
    }
    return NULL;
}
static int by_number(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}
TEST(no_two_contexts_share_an_id) {
    pthread_t threads[OPENERS];
    static uint64_t all[2 * OPENERS * OPENINGS];
    size_t n = sizeof all / sizeof all[0];
    for (int i = 0; i < OPENERS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, open_and_close, ids[i]), 0);
    for (int i = 0; i < OPENERS; i++) {
        void *failed = NULL;
        CHECK_EQ(pthread_join(threads[i], &failed), 0);
        CHECK(failed == NULL);
    }
    memcpy(all, ids, sizeof all);
    qsort(all, n, sizeof all[0], by_number);
    for (size_t i = 1; i < n; i++) CHECK(all[i] != all[i - 1] && all[0] != 0);
}

/* ---- Regions */

static int region_dtype(amp_context *amp) {
    amp_autocast_desc d;
    return amp_autocast_active(amp, &d) ? (int)d.dtype : -1;
}
static amp_result begin_in(amp_context *amp, amp_dtype dtype, amp_mode mode) {
    amp_autocast_desc d;
    memset(&d, 0, sizeof d);
    d.dtype = dtype; d.mode = mode;
    return amp_autocast_begin(amp, &d);
}

/* Closing ends what is open: nothing is inherited, and nothing locks the thread out. */
TEST(closing_inside_a_region) {
    amp_context *outer;
    amp_desc d = watched_desc(1);
    CHECK_OK(amp_open(&outer, &d));
    CHECK_OK(begin_in(outer, AMP_F16, AMP_MODE_DEFAULT));
    for (int i = 0; i < 80; i++) {
        amp_context *amp = NULL;
        amp_plan plan;
        amp_dtype in = AMP_F32;
        host.last[0] = 0;
        CHECK_OK(amp_open(&amp, &d));
        CHECK_EQ(region_dtype(amp), -1);
        CHECK_OK(amp_autocast_decide(amp, AMP_OP_LINEAR, NULL, &in, 1, &plan));
        CHECK(plan.mode == AMP_MODE_TRAINING && plan.compute == AMP_F32);
        CHECK_ERR(amp_autocast_end(amp), AMP_ERR_STATE);
        for (int k = 0; k < 1 + i % 3; k++) CHECK_OK(k == 2 ? amp_recompute_begin(amp) : begin_in(amp, AMP_BF16, AMP_MODE_INFERENCE));
        amp_close(amp);
        CHECK_MSG(strstr(host.last, i % 3 ? "open regions have ended" : "open regions have ended: 1 on this thread, 0 on other threads") != NULL, "%s", host.last);
        CHECK_EQ(region_dtype(outer), (int)AMP_F16);
    }
    CHECK_OK(amp_autocast_end(outer));
    CHECK_ERR(amp_autocast_end(outer), AMP_ERR_STATE);
    amp_close(outer);
    CHECK_EQ(host.live, 0);
}

/* A thread that ends in a region ends the region. */
static void *leave_regions(void *arg) {
    amp_context **contexts = (amp_context **)arg;
    for (int i = 0; i < 5; i++)
        if (begin_in(contexts[i % 2], AMP_BF16, AMP_MODE_DEFAULT) != AMP_OK) return (void *)"failed";
    return NULL;
}
TEST(a_thread_that_ends_in_a_region) {
    amp_desc d = watched_desc(1);
    amp_context *contexts[2];
    net n;
    amp_cache_info info;
    amp_tensor cast;
    d.memory_efficient = 1;
    memset(&n, 0, sizeof n);
    for (int i = 0; i < 2; i++) CHECK_OK(amp_open(&contexts[i], &d));
    n.amp = contexts[0];
    net_params(&n);
    CHECK_OK(amp_param_register(n.amp, n.p, LAYERS));
    for (int i = 0; i < 8; i++) {
        pthread_t thread;
        void *failed = NULL;
        CHECK_EQ(pthread_create(&thread, NULL, leave_regions, contexts), 0);
        CHECK_EQ(pthread_join(thread, &failed), 0);
        CHECK(failed == NULL);
        CHECK_OK(begin_in(n.amp, AMP_BF16, AMP_MODE_DEFAULT));
        CHECK_OK(amp_autocast_cast(n.amp, &n.p[0], AMP_BF16, &cast));
        CHECK_OK(amp_autocast_end(n.amp));
        CHECK_OK(amp_cast_cache_info(n.amp, &info));
        CHECK_EQ(info.entries, 0);              /* the last region has closed */
    }
    host.last[0] = 0;
    for (int i = 0; i < 2; i++) amp_close(contexts[i]);
    CHECK_MSG(host.last[0] == 0, "%s", host.last);
    CHECK_EQ(host.live, 0);
}

/* Contexts that are closed while another thread has regions of them open. */
typedef struct closed_elsewhere { amp_context *amp; int turn, wrong; amp_context *own; } closed_elsewhere;
static void pass(closed_elsewhere *c, int turn) { __atomic_store_n(&c->turn, turn, __ATOMIC_RELEASE); }
static void wait_for(closed_elsewhere *c, int turn) { while (__atomic_load_n(&c->turn, __ATOMIC_ACQUIRE) != turn) sleep_ms(1); }
static void *open_regions(void *arg) {
    closed_elsewhere *c = (closed_elsewhere *)arg;
    for (int round = 0; round < 50; round++) {
        wait_for(c, 2 * round);
        for (int k = 0; k < 1 + round % 3; k++) c->wrong += begin_in(c->amp, AMP_F16, AMP_MODE_INFERENCE) != AMP_OK;
        pass(c, 2 * round + 1);                 /* closed meanwhile */
        wait_for(c, 2 * round + 2);
        if (round % 4 == 0) c->wrong += region_dtype(c->own) != -1 || amp_autocast_end(c->own) != AMP_ERR_STATE;
        if (round % 4 == 1) c->wrong += begin_in(c->own, AMP_BF16, AMP_MODE_DEFAULT) != AMP_OK || region_dtype(c->own) != (int)AMP_BF16 ||
                                        amp_autocast_end(c->own) != AMP_OK;
        pass(c, 2 * round + 2 == 100 ? 200 : 2 * round + 2);
    }
    c->wrong += begin_in(c->own, AMP_BF16, AMP_MODE_DEFAULT) != AMP_OK || amp_autocast_end(c->own) != AMP_OK;
    return NULL;
}
TEST(closing_while_another_thread_has_regions_open) {
    amp_desc d = watched_desc(1);
    closed_elsewhere c;
    pthread_t thread;
    amp_context *amp = NULL;
    memset(&c, 0, sizeof c);
    CHECK_OK(amp_open(&c.own, &d));
    CHECK_OK(amp_open(&c.amp, &d));
    CHECK_EQ(pthread_create(&thread, NULL, open_regions, &c), 0);
    for (int round = 0; round < 50; round++) {
        wait_for(&c, 2 * round + 1);
        host.last[0] = 0;
        amp = c.amp;
        CHECK_OK(amp_open(&c.amp, &d));
        amp_close(amp);
        CHECK_MSG(strstr(host.last, "on other threads") != NULL, "%s", host.last);
        CHECK_EQ(region_dtype(c.amp), -1);
        pass(&c, 2 * round + 2);
    }
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(c.wrong, 0);
    amp_close(c.amp);
    amp_close(c.own);
    CHECK_EQ(host.live, 0);
}

/* ---- Objects and their context */

#define CLOSED(call) do { CHECK_ERR(call, AMP_ERR_STATE); CHECK_MSG(says("was closed"), "%s", amp_last_error()); } while (0)
static void check_calls_are_errors(net *n) {
    amp_state *state = NULL;
    amp_grad_stats found; amp_scaler_desc sd; amp_k_scaler k; amp_optimizer_desc od; amp_parameter_bytes bytes; amp_step_result outcome;
    amp_batch batch; amp_loader_info info; amp_loader_desc ld; amp_step_info step; amp_step_record record; amp_epoch_record epoch;
    amp_epoch_summary summary; amp_monitor_desc md; amp_tensor_stats_report report; amp_recovery_event event;
    memset(&step, 0, sizeof step); memset(&record, 0, sizeof record);
    CHECK_OK(amp_state_create(&state, NULL));
    CLOSED(amp_grad_set_stats(n->set, &found)); CLOSED(amp_grad_set_apply(n->set));
    CHECK(amp_grad_set_device(n->set) == NULL);
    CLOSED(amp_grad_set_stats(amp_optimizer_grad_set(n->opt), &found));
    CLOSED(amp_scaler_query(n->scaler, &sd)); CLOSED(amp_scaler_get(n->scaler, &k)); CLOSED(amp_scaler_set_scale(n->scaler, 2));
    CLOSED(amp_scaler_set_rule(n->scaler, 2, 0.5, 9)); CLOSED(amp_scaler_check(n->scaler, n->set, AMP_CHECK_READ)); CLOSED(amp_scaler_update(n->scaler));
    CLOSED(amp_scaler_rescale(n->scaler, n->set, 0)); CLOSED(amp_scaler_save(n->scaler, state, "s")); CLOSED(amp_scaler_load(n->scaler, state, "s"));
    CHECK(amp_scaler_scale_ptr(n->scaler) == NULL && amp_scaler_device(n->scaler) == NULL && amp_scaler_scale(n->scaler) == 1);
    CLOSED(amp_optimizer_query(n->opt, &od)); CLOSED(amp_optimizer_set_lr(n->opt, 1)); CLOSED(amp_optimizer_set_clip(n->opt, 1));
    CLOSED(amp_optimizer_set_accumulation(n->opt, 2)); CLOSED(amp_optimizer_rebuild_masters(n->opt)); CLOSED(amp_optimizer_bytes(n->opt, &bytes));
    CLOSED(amp_optimizer_step(n->opt, NULL)); CLOSED(amp_step(n->opt, n->scaler)); CLOSED(amp_step_result_flush(n->opt));
    CHECK_EQ(amp_step_result_next(n->opt, &outcome), 0);
    CLOSED(amp_optimizer_save(n->opt, state, "o")); CLOSED(amp_optimizer_load(n->opt, state, "o"));
    if (n->graph) CLOSED(amp_graph_launch(n->graph));
    CLOSED(amp_loader_next(n->loader, &batch)); CLOSED(amp_loader_seek(n->loader, 0, 0)); CLOSED(amp_loader_info_get(n->loader, &info));
    CLOSED(amp_loader_query(n->loader, &ld)); CLOSED(amp_loader_save(n->loader, state, "l")); CLOSED(amp_loader_load(n->loader, state, "l"));
    amp_loader_stop(n->loader);
    CLOSED(amp_monitor_phase(n->monitor, AMP_PHASE_DATA)); CLOSED(amp_monitor_step(n->monitor, &step)); CLOSED(amp_monitor_flush(n->monitor));
    CLOSED(amp_monitor_write(n->monitor, "{}")); CLOSED(amp_monitor_epoch(n->monitor, &epoch)); CLOSED(amp_monitor_summary(n->monitor, &summary));
    CLOSED(amp_monitor_query(n->monitor, &md));
    CHECK_EQ(amp_monitor_next(n->monitor, &record), 0);
    CLOSED(amp_tensor_stats_step(n->numerics, &report));
    CLOSED(amp_recovery_step(n->recovery, &record, &event)); CLOSED(amp_recovery_memory(n->recovery, &event));
    amp_state_destroy(state);
}

static int lines_of(const char *path) {
    FILE *file = fopen(path, "r");
    int c, n = 0;
    while (file != NULL && (c = getc(file)) != EOF) n += c == '\n';
    if (file != NULL) fclose(file);
    return n;
}

/* Whatever lives is stopped and named; the monitor writes what it has; the host's own arrays are not touched. */
TEST(closing_with_live_objects) {
    static const char *const kinds[] = {"optimizer of first", "scaler of default", "set of first", "tensor stats of", "recovery of first",
                                        "loader of a callback", "masks of amp_mask_get"};
    for (int variant = 0; variant < 8; variant++) {
        int host_visible = variant % 2, captured = !host_visible && variant / 2 % 2, workers = variant / 4 ? 2 : AMP_NO_WORKERS;
        amp_desc d = watched_desc(host_visible);
        net *n = (net *)malloc(sizeof *n), husk;
        amp_step_info info;
        CHECK_OK(net_open(n, &d, workers));
        for (int i = 0; i < 3; i++) CHECK_OK(net_step(n));
        memset(&info, 0, sizeof info);
        (void)amp_param_accumulate(&n->p[0]);   /* an outcome under way that names a parameter */
        n->g[0][0] = HUGE_VALF;
        CHECK_OK(amp_step(n->opt, n->scaler));
        CHECK_OK(amp_monitor_step(n->monitor, &info));
        if (!host_visible) {
            CHECK_OK(amp_graph_begin(n->amp));
            CHECK_OK(amp_optimizer_step(n->opt, n->scaler));
            CHECK_OK(amp_scaler_update(n->scaler));
            if (!captured) CHECK_OK(amp_graph_end(n->amp, &n->graph));
        }
        CHECK_OK(begin_in(n->amp, AMP_BF16, AMP_MODE_DEFAULT));
        CHECK_OK(net_linear(n, &n->p[0]));
        host.last[0] = 0;
        husk = *n;
        memset(n, 0xdd, sizeof *n);             /* the parameters, and all else of the host's, are gone first */
        free(n);
        amp_close(husk.amp);
        for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) CHECK_MSG(strstr(host.last, kinds[i]) != NULL, "%s: %s", kinds[i], host.last);
        CHECK(strstr(host.last, log_file) != NULL && strstr(host.last, "open regions have ended") != NULL);
        if (!host_visible) CHECK(strstr(host.last, "graph") != NULL && graphs.begun == 0 && graphs.made == graphs.ended);
        CHECK(captured || lines_of(log_file) >= 4);
        host.last[0] = 0;
        check_calls_are_errors(&husk);
        CHECK(host.live > 0);
        net_destroy(&husk);
        CHECK_EQ(host.live, 0);
        CHECK_MSG(host.last[0] == 0, "%s", host.last);
    }
}

/* Objects that others refer to may go first. */
TEST(destroyed_in_any_order) {
    for (int order = 0; order < 24; order++) {
        amp_desc d = watched_desc(order % 2);
        amp_step_info info;
        amp_step_record record;
        amp_recovery_event event;
        amp_tensor_stats_report report;
        net n;
        memset(&info, 0, sizeof info); memset(&record, 0, sizeof record);
        CHECK_OK(net_open(&n, &d, AMP_NO_WORKERS));
        for (int i = 0; i < 2; i++) CHECK_OK(net_step(&n));
        for (int i = 0; i < 4; i++) {
            int which = (order >> i) % 4;       /* not each of them each time */
            if (which == 0 && n.opt) {
                amp_optimizer_destroy(n.opt);
                n.opt = NULL;
                if (n.monitor) {
                    CHECK_ERR(amp_monitor_step(n.monitor, &info), AMP_ERR_STATE);
                    CHECK(says("optimizer that this refers to was destroyed"));
                    CHECK_EQ(amp_monitor_next(n.monitor, &record), 0);
                    CHECK_ERR(amp_monitor_flush(n.monitor), AMP_ERR_STATE);
                }
                CHECK_ERR(amp_recovery_step(n.recovery, &record, &event), AMP_ERR_STATE);
            }
            if (which == 1 && n.scaler) {
                amp_scaler_destroy(n.scaler);
                n.scaler = NULL;
                CHECK_ERR(amp_tensor_stats_step(n.numerics, &report), AMP_ERR_STATE);
                CHECK_ERR(amp_recovery_memory(n.recovery, &event), AMP_ERR_STATE);
            }
            if (which == 2 && n.monitor) { amp_monitor_destroy(n.monitor); n.monitor = NULL; }
            if (which == 3 && n.loader) { amp_loader_destroy(n.loader); n.loader = NULL; }
        }
        if (order % 3 == 0) amp_mask_release(n.amp, &n.view);
        if (order % 5 == 0) { amp_context *amp = n.amp; amp_close(amp); net_destroy(&n); }
        else { amp_context *amp = n.amp; net_destroy(&n); amp_close(amp); }
        CHECK_EQ(host.live, 0);
    }
}

/* ---- Ending things from within callbacks: all calls in all places.  Each place makes every call, and goes on. */

static struct {
    net n;
    amp_model *model; amp_tape *tape; amp_adapt *adapt; amp_state *state; amp_ranks *ranks;
    amp_param *w; amp_optimizer *own;   /* of the tape's model */
    int64_t wrong; int order;
    char first[600], places[2048];      /* the first thing that went wrong; where callbacks said they were */
    int32_t labels[ROWS];
} site;

/* One refusal, which is named; *place: from where it says it was called. */
static void stayed(const char *function, char place[64]) {
    char begin[80];
    const char *at;
    snprintf(begin, sizeof begin, " %s: called from within ", function);
    at = strstr(amp_last_error(), begin);
    if (at != NULL) {
        snprintf(place, 64, "%.*s", (int)strcspn(at + strlen(begin), ","), at + strlen(begin));
        ampi_error_text[0] = 0;
        return;
    }
    if (__atomic_fetch_add(&site.wrong, 1, __ATOMIC_RELAXED) == 0)
        snprintf(site.first, sizeof site.first, "%s in %s: %s", function, place, amp_last_error());
}
#define STAYS(function, object) do { function(object); stayed(#function, place); } while (0)
static void end_everything(void) {
    static char noting;         /* workers visit too */
    char place[64] = "?", line[70], had[sizeof ampi_error_text];
    amp_state *young = NULL;
    memcpy(had, ampi_error_text, sizeof had);
    ampi_error_text[0] = 0;
    STAYS(amp_close, site.n.amp); STAYS(amp_loader_destroy, site.n.loader); STAYS(amp_recovery_destroy, site.n.recovery);
    STAYS(amp_tensor_stats_destroy, site.n.numerics); STAYS(amp_monitor_destroy, site.n.monitor);
    STAYS(amp_grad_set_destroy, site.n.set); STAYS(amp_scaler_destroy, site.n.scaler); STAYS(amp_optimizer_destroy, site.n.opt);
    STAYS(amp_tape_destroy, site.tape); STAYS(amp_model_destroy, site.model); STAYS(amp_adapt_destroy, site.adapt);
    STAYS(amp_state_destroy, site.state); STAYS(amp_ranks_destroy, site.ranks); STAYS(amp_optimizer_destroy, site.own);
    if (amp_autocast_end(site.n.amp) != AMP_ERR_STATE || amp_recompute_end(site.n.amp) != AMP_ERR_STATE) stayed("amp_autocast_end", place);
    ampi_error_text[0] = 0;
    if (amp_state_create(&young, &site.n.amp->system) != AMP_OK) stayed("amp_state_create", place);
    amp_state_destroy(young);   /* what is its own it may */
    if (ampi_error_text[0] != 0) stayed("young", place);
    snprintf(line, sizeof line, "%.60s\n", place);
    while (__atomic_test_and_set(&noting, __ATOMIC_ACQUIRE)) continue;
    if (strstr(site.places, line) == NULL) strncat(site.places, line, sizeof site.places - strlen(site.places) - 1);
    __atomic_clear(&noting, __ATOMIC_RELEASE);
    memcpy(ampi_error_text, had, sizeof had);
}

static amp_result site_forward(void *user, const amp_custom_call *c) {
    (void)user;
    entered();
    if (visitor != NULL && (amp_step(site.own, NULL) != AMP_ERR_STATE || !says("within a tape that runs"))) site.wrong++;
    return amp_add(c->amp, &c->x[0], &c->x[0], &c->y);
}
static amp_result site_backward(void *user, const amp_custom_call *c) {
    (void)user;
    entered();
    if (visitor != NULL && (amp_optimizer_step(site.own, NULL) != AMP_ERR_STATE || !says("within a tape that runs"))) site.wrong++;
    return amp_add(c->amp, &c->dy, &c->dy, &c->dx[0]);
}
static amp_result site_ready(void *user, amp_param *p) {
    (void)user;
    entered();
    return p == site.w ? AMP_OK : AMP_ERR_RANGE;
}
static int site_save(void *user, amp_state *state) { (void)user; entered(); return (int)amp_state_put(state, "own", AMP_I32, site.labels, 1); }
static int site_load(void *user, const amp_state *state) { (void)user; entered(); return (int)amp_state_get(state, "own", AMP_I32, site.labels, 1); }
static void site_policy(void *user, amp_recovery_event *event) { (void)user; (void)event; entered(); }
static int site_prepare(void *user, amp_context *amp, int64_t batch) { (void)user; (void)amp; (void)batch; entered(); return 0; }
static int site_step(void *user, amp_context *amp) {
    (void)user; (void)amp;
    entered();
    if (net_linear(&site.n, &site.n.p[0]) != AMP_OK) return 1;
    return (int)amp_linear_backward(amp, &site.n.op);
}
static void site_parallel(void *user, int32_t n, void (*run)(void *arg, int32_t i), void *arg) {
    (void)user;
    entered();
    for (int32_t i = 0; i < n; i++) run(arg, i);
}
static amp_value site_record(void *user, amp_tape *tape) {
    static const amp_custom_op op = {.forward = site_forward, .backward = site_backward};
    amp_tensor x = amp_tensor2(site.n.x, AMP_F32, ROWS, IN);
    amp_value h;
    if (user == NULL) entered();
    h = amp_tape_linear(tape, amp_tape_input(tape, &x), site.w, NULL, AMP_ACT_NONE);
    h = amp_tape_custom(tape, &h, 1, &op);
    return amp_tape_cross_entropy(tape, h, site.labels, NULL);
}

static void site_open(int order) {
    static const amp_dtype ladder[] = {AMP_FP8, AMP_BF16};
    amp_desc d = watched_desc(1);
    amp_tape_desc td;
    amp_recovery_desc rd;
    amp_adapt_desc ad;
    amp_optimizer_desc od;
    amp_ranks_desc ranks;
    memset(&site, 0, sizeof site); memset(&td, 0, sizeof td); memset(&rd, 0, sizeof rd); memset(&ad, 0, sizeof ad);
    memset(&od, 0, sizeof od); memset(&ranks, 0, sizeof ranks);
    d.threads = 2;
    d.parallel.parallel = site_parallel;
    CHECK_OK(net_open(&site.n, &d, order ? 2 : AMP_NO_WORKERS));
    amp_recovery_destroy(site.n.recovery);
    rd.params = site.n.p; rd.n_params = LAYERS; rd.optimizer = site.n.opt; rd.scaler = site.n.scaler; rd.interval = 1;
    rd.policy = site_policy; rd.save = site_save; rd.load = site_load;
    CHECK_OK(amp_recovery_create(site.n.amp, &site.n.recovery, &rd));
    CHECK_OK(amp_model_create(site.n.amp, &site.model, 1, 0));
    site.w = amp_model_param(site.model, "own", OUT, IN, AMP_INIT_NORMAL, 0.1);
    CHECK_OK(amp_model_params(site.model, &od.params, &od.n_params));
    CHECK_OK(amp_optimizer_create(site.n.amp, &site.own, &od));
    td.grad_ready = site_ready;
    CHECK_OK(amp_tape_create(site.n.amp, &site.tape, &td));
    ad.params = od.params; ad.n_params = od.n_params; ad.ladder = ladder; ad.n_ladder = 2;
    CHECK_OK(amp_adapt_create(site.n.amp, &site.adapt, &ad));
    CHECK_OK(amp_state_create(&site.state, &d.system));
    ranks.world = 2;
    CHECK_OK(amp_ranks_create(&site.ranks, &ranks));
}
static void site_close(void) {
    amp_context *amp = site.n.amp;
    amp_tape_destroy(site.tape);
    amp_adapt_destroy(site.adapt);
    amp_optimizer_destroy(site.own);
    amp_model_destroy(site.model);
    amp_ranks_destroy(site.ranks);
    amp_state_destroy(site.state);
    net_destroy(&site.n);
    amp_close(amp);
    CHECK_EQ(host.live, 0);
}

/* A step on the tape, by its two halves. */
static void site_tape_step(void) {
    amp_value loss;
    CHECK_OK(amp_tape_begin(site.tape, NULL));
    loss = site_record((void *)"quiet", site.tape);
    CHECK_OK(amp_tape_backward(site.tape, loss, NULL));
    CHECK_OK(amp_step(site.own, NULL));
    CHECK_EQ(amp_autocast_active(site.n.amp, NULL), 0);
}
static void site_use(void) {
    static float big[96 * 96], product[96 * 96];
    static amp_verify_report verified;
    static amp_tune_report tuned;
    char path[80];
    amp_verify_desc v;
    amp_tune_desc t;
    amp_step_record r;
    amp_recovery_event event;
    amp_state *back = NULL;
    memset(&v, 0, sizeof v); memset(&t, 0, sizeof t); memset(&r, 0, sizeof r);
    site_tape_step();
    for (int i = 0; i < 3; i++) CHECK_OK(net_step(&site.n));
    CHECK_OK(amp_gemm(site.n.amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_NO_TRANS, 96, 96, 96, 1, big, 96, big, 96, 0, product, 96));
    v.step = site_step; v.params = site.n.p; v.n_params = LAYERS;
    CHECK_OK(amp_verify(site.n.amp, &v, &verified));
    memset(&v, 0, sizeof v);
    v.record = site_record;
    CHECK_OK(amp_verify(site.n.amp, &v, &verified));
    t.step = site_step; t.prepare = site_prepare; t.iterations = 1; t.warmup = 1;
    CHECK_OK(amp_tune(site.n.amp, &t, &tuned));
    r.anomaly = AMP_ANOMALY_LOSS; r.action = AMP_NAN_RECOVER; r.result.applied = 1; r.result.step = 99;
    CHECK_OK(amp_recovery_step(site.n.recovery, &r, &event));
    snprintf(path, sizeof path, "%s/site.state", folder);
    CHECK_OK(amp_optimizer_save(site.n.opt, site.state, "optimizer"));
    CHECK_OK(amp_state_save(site.state, path));
    CHECK_OK(amp_state_load(&back, &site.state->system, path));
    remove(path);
    amp_state_destroy(back);
    CHECK_OK(amp_loader_seek(site.n.loader, 0, 0));
    site_tape_step();
}

TEST(nothing_is_ended_from_within) {
    static const char *const places[] = {"the allocator", "the clock", "the logger", "the reducer", ".parallel", "file_open", "file_read",
        "file_write", "file_size", "file_sync", "file_close", "a custom operator's forward", "a custom operator's backward", "grad_ready",
        "the loader's read", "a step or pass of the desc", ".record", ".prepare", "the recovery's save", "the recovery's load",
        "the recovery's policy"};
    for (int workers = 0; workers < 2; workers++) {
        site_open(workers);
        __atomic_store_n(&visitor, end_everything, __ATOMIC_RELEASE);
        site_use();
        ampi_log(site.n.amp, AMP_LOG_WARNING, 1, "a line");
        __atomic_store_n(&visitor, NULL, __ATOMIC_RELEASE);
        CHECK_MSG(site.wrong == 0, "%d wrong, the first: %s", (int)site.wrong, site.first);
        for (size_t i = 0; i < sizeof places / sizeof *places; i++)
            CHECK_MSG(strstr(site.places, places[i]) != NULL, "nobody called from %s, but from\n%s", places[i], site.places);
        CHECK_MSG(strstr(host.last, "amp_close: called from within ") != NULL, "%s", host.last);
        site_use();             /* all of it still works */
        site_close();
    }
}

/* ---- A batch from within read, and other ways to wait for oneself */

static amp_loader *own_loader;
static int64_t refused_within;
static int read_itself(void *user, const amp_sample *sample, void *const *fields) {
    amp_batch batch;
    (void)user;
    ((int32_t *)fields[0])[0] = (int32_t)sample->sample;
    while (__atomic_load_n(&own_loader, __ATOMIC_ACQUIRE) == NULL) sleep_ms(1);
    if (amp_loader_next(own_loader, &batch) == AMP_ERR_STATE && says("amp_loader_next: called from within this loader's own read") &&
        amp_loader_seek(own_loader, 0, 1) == AMP_ERR_STATE)
        __atomic_add_fetch(&refused_within, 1, __ATOMIC_RELAXED);
    amp_loader_destroy(own_loader);
    return 0;
}
TEST(a_loader_called_from_its_own_read) {
    for (int workers = 0; workers < 2; workers++) {
        amp_desc d = watched_desc(1);
        amp_context *amp = NULL;
        amp_loader_desc ld;
        amp_loader *l = NULL;
        amp_source source;
        amp_batch batch;
        memset(&ld, 0, sizeof ld); memset(&source, 0, sizeof source);
        source.read = read_itself; source.samples = 64; source.n_fields = 1;
        source.fields[0].dtype = AMP_I32; source.fields[0].count = 1;
        ld.source = &source; ld.batch = 4; ld.workers = workers ? 2 : AMP_NO_WORKERS;
        own_loader = NULL; refused_within = 0;
        CHECK_OK(amp_open(&amp, &d));
        CHECK_OK(amp_loader_create(amp, &l, &ld));
        __atomic_store_n(&own_loader, l, __ATOMIC_RELEASE);
        for (int i = 0; i < 3; i++) CHECK_OK(amp_loader_next(l, &batch));
        CHECK(__atomic_load_n(&refused_within, __ATOMIC_RELAXED) >= 12);
        amp_loader_destroy(l);
        amp_close(amp);
        CHECK_EQ(host.live, 0);
    }
}

/* ---- What longjmp leaves, like an exception: the call that it left is forgotten, and so are its regions */

static jmp_buf out_of_it;
static amp_result leaves(void *user, const amp_custom_call *c) {
    (void)user;
    (void)amp_autocast_begin(c->amp, NULL);
    longjmp(out_of_it, 1);
}
TEST(a_callback_that_was_left) {
    static const amp_custom_op op = {.forward = leaves, .backward = site_backward};
    for (int goes_on = 0; goes_on < 2; goes_on++) {
        volatile int left = 0;
        amp_tensor x;
        amp_value h;
        site_open(0);
        if (setjmp(out_of_it) == 0) {
            CHECK_OK(amp_tape_begin(site.tape, NULL));
            x = amp_tensor2(site.n.x, AMP_F32, ROWS, IN);
            h = amp_tape_linear(site.tape, amp_tape_input(site.tape, &x), site.w, NULL, AMP_ACT_NONE);
            h = amp_tape_custom(site.tape, &h, 1, &op);
            (void)amp_tape_backward(site.tape, amp_tape_cross_entropy(site.tape, h, site.labels, NULL), NULL);
        } else left = 1;
        CHECK_MSG(left == 1, "%s", amp_last_error());
        if (goes_on) { site_tape_step(); CHECK_EQ(ampi_thread.regions, 0); }
        site_close();
        CHECK_EQ(ampi_thread.n_out, 0);
    }
}

/* A thread waits for a batch while the context closes: it is told, and goes on getting errors. */
static int gate;
static int read_behind_gate(void *user, const amp_sample *sample, void *const *fields) {
    (void)user; (void)sample;
    ((int32_t *)fields[0])[0] = 1;
    while (__atomic_load_n(&gate, __ATOMIC_ACQUIRE)) sleep_ms(1);
    return 0;
}
static void *take_batches(void *arg) {
    amp_loader *l = (amp_loader *)arg;
    amp_batch batch;
    amp_loader_info info;
    for (int i = 0; i < 200; i++) {
        amp_result r = amp_loader_next(l, &batch);
        if (r != AMP_OK && r != AMP_ERR_STATE) return (void *)"failed";
        r = amp_loader_info_get(l, &info);
        if (r != AMP_OK && r != AMP_ERR_STATE) return (void *)"failed";
        sleep_ms(1);
    }
    return NULL;
}
/* What the manual says of the stack: a thread with 96 KiB creates, trains, saves and loads. */
static void *train_on_a_small_stack(void *arg) {
    static float x[64 * 96];
    static int32_t labels[64];
    amp_context *own;
    amp_model *m;
    amp_tape *t;
    amp_optimizer *o;
    amp_scaler *scaler;
    amp_state *s;
    amp_desc d;
    amp_optimizer_desc od;
    amp_tensor in = amp_tensor2(x, AMP_F32, 64, 96);
    int i;
    memset(&d, 0, sizeof d); memset(&od, 0, sizeof od);
    d.dtype = AMP_F16; d.allow_fallback = 1;
    for (i = 0; i < 64 * 96; i++) x[i] = (float)(i % 13) - 6;
    CHECK_OK(amp_open(&own, &d));
    CHECK_OK(amp_model_create(own, &m, 1, 0));
    amp_param *w1 = amp_model_param(m, "up", 256, 96, AMP_INIT_NORMAL, 0.05), *w2 = amp_model_param(m, "qkv", 96, 256, AMP_INIT_NORMAL, 0.05),
              *gain = amp_model_param(m, "norm", 96, 0, AMP_INIT_ONES, 0), *head = amp_model_param(m, "head", 10, 32, AMP_INIT_NORMAL, 0.05);
    CHECK_OK(amp_tape_create(own, &t, NULL));
    CHECK_OK(amp_model_params(m, &od.params, &od.n_params));
    od.moments = AMP_MOMENTS_8BIT; od.clip_norm = 1;
    CHECK_OK(amp_optimizer_create(own, &o, &od));
    CHECK_OK(amp_scaler_create(own, &scaler, NULL));
    for (i = 0; i < 2; i++) {
        CHECK_OK(amp_tape_begin(t, NULL));
        amp_value h = amp_tape_linear(t, amp_tape_input(t, &in), w1, NULL, AMP_ACT_GELU);
        h = amp_tape_rmsnorm(t, amp_tape_linear(t, h, w2, NULL, AMP_ACT_NONE), gain, 0);
        h = amp_tape_linear(t, amp_tape_split(t, h, 1, 0, 32), head, NULL, AMP_ACT_NONE);
        CHECK_OK(amp_tape_backward(t, amp_tape_cross_entropy(t, h, labels, NULL), amp_scaler_scale_ptr(scaler)));
        CHECK_OK(amp_step(o, scaler));
    }
    CHECK_OK(amp_state_create(&s, NULL));
    CHECK_OK(amp_model_save(m, s, "m"));
    CHECK_OK(amp_optimizer_save(o, s, "o"));
    CHECK_OK(amp_state_save(s, (const char *)arg));
    amp_state_destroy(s);
    CHECK_OK(amp_state_load(&s, NULL, (const char *)arg));
    CHECK_OK(amp_optimizer_load(o, s, "o"));
    amp_state_destroy(s);
    amp_scaler_destroy(scaler); amp_optimizer_destroy(o); amp_tape_destroy(t); amp_model_destroy(m);
    amp_close(own);
    return NULL;
}
TEST(a_thread_with_96_kib_of_stack) {
    char path[64];
    pthread_attr_t small;
    pthread_t thread;
    snprintf(path, sizeof path, "/tmp/amp_stack_%ld", (long)getpid());
    CHECK(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 96 * 1024) == 0);
    CHECK(pthread_create(&thread, &small, train_on_a_small_stack, path) == 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&small);
    remove(path);
}

TEST(closing_while_a_thread_takes_batches) {
    for (int round = 0; round < 4; round++) {
        amp_desc d = watched_desc(round % 2);
        amp_context *amp = NULL;
        amp_loader_desc ld;
        amp_source source;
        amp_loader *l = NULL;
        pthread_t thread;
        void *failed = NULL;
        memset(&ld, 0, sizeof ld); memset(&source, 0, sizeof source);
        source.read = read_behind_gate; source.samples = 64; source.n_fields = 1;
        source.fields[0].dtype = AMP_I32; source.fields[0].count = 1;
        ld.source = &source; ld.batch = 4; ld.workers = round < 2 ? 2 : AMP_NO_WORKERS;
        CHECK_OK(amp_open(&amp, &d));
        CHECK_OK(amp_loader_create(amp, &l, &ld));
        CHECK_EQ(pthread_create(&thread, NULL, take_batches, l), 0);
        sleep_ms(20);
        __atomic_store_n(&gate, round / 2 == 0, __ATOMIC_RELEASE);
        sleep_ms(20);
        __atomic_store_n(&gate, 0, __ATOMIC_RELEASE);
        amp_close(amp);
        CHECK_EQ(pthread_join(thread, &failed), 0);
        CHECK(failed == NULL);
        amp_loader_destroy(l);
        CHECK_EQ(host.live, 0);
    }
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    (void)recording_backend;
    if (!ampt.list && mkdtemp(folder) == NULL) return 2;
    snprintf(log_file, sizeof log_file, "%s/log.jsonl", folder);
    RUN(nothing_of_the_hosts_runs_under_a_lock);
    RUN(a_lasting_failure_of_the_device_is_an_error);
    RUN(a_parameter_of_two_contexts);
    RUN(a_parameter_of_a_closed_context);
    RUN(a_parameter_that_left_its_optimizer);
    RUN(copies_and_moves_of_a_parameter);
    RUN(no_two_contexts_share_an_id);
    RUN(closing_inside_a_region);
    RUN(a_thread_that_ends_in_a_region);
    RUN(closing_while_another_thread_has_regions_open);
    RUN(closing_with_live_objects);
    RUN(destroyed_in_any_order);
    RUN(closing_while_a_thread_takes_batches);
    RUN(nothing_is_ended_from_within);
    RUN(a_loader_called_from_its_own_read);
    RUN(a_callback_that_was_left);
    RUN_PLAIN(a_thread_with_96_kib_of_stack);
    if (!ampt.list) { remove(log_file); rmdir(folder); }
    return TEST_END();
}
