/* t_watch.c - tests status, profiler ranges and the monitor.  Records are compared with what was done, and JSON is read by
 * a strict parser.  Files are tested on a disk that fails at every write. */
#define _POSIX_C_SOURCE 200809L
#define AMP_IMPLEMENTATION
#include "../amp.h"
#define AMPT_TRAPS
#include "test.h"
#include <errno.h>
#include <math.h>
#include <time.h>
#include <unistd.h>
#include "comma.h"
#include "recording_backend.h"

/* ---- A strict JSON parser (RFC 8259).  Finds values by path: "memory.share". */

typedef struct json { const char *p; int bad; char path[256]; const char *wanted; char found[512]; int seen; } json;

static void json_blank(json *j) { while (*j->p == ' ' || *j->p == '\t') j->p++; }
static int json_take(json *j, char c) { if (*j->p != c) return 0; j->p++; return 1; }

static void json_string(json *j, char *out, size_t size) {
    size_t n = 0;
    if (!json_take(j, '"')) { j->bad = 1; return; }
    while (!j->bad && *j->p != '"') {
        unsigned char c = (unsigned char)*j->p++;
        unsigned code;
        int used = 0;
        if (c < 0x20) { j->bad = 1; return; }
        if (c == '\\') {
            c = (unsigned char)*j->p++;
            if (c == 'u') {
                if (sscanf(j->p, "%4x%n", &code, &used) != 1 || used != 4) { j->bad = 1; return; }
                j->p += 4;
                c = code < 0x80 ? (unsigned char)code : '?';
            } else if (c == 0 || !strchr("\"\\/bfnrt", c)) { j->bad = 1; return; }
        }
        if (n + 1 < size) out[n++] = (char)c;
    }
    j->p++;
    out[n] = 0;
}

static void json_value(json *j);

static void json_number(json *j) {
    const char *from = j->p;
    char *end;
    if (*j->p == '-') j->p++;
    if (*j->p == '0' && j->p[1] >= '0' && j->p[1] <= '9') j->bad = 1;
    if (*j->p < '0' || *j->p > '9') j->bad = 1;
    (void)strtod(from, &end);
    while (*j->p != 0 && strchr("0123456789.eE+-", *j->p)) j->p++;
    if (end != j->p || j->p == from || j->p[-1] == '.') j->bad = 1;
}

static void json_object(json *j) {
    size_t length = strlen(j->path);
    char key[128];
    j->p++;
    json_blank(j);
    if (json_take(j, '}')) return;
    do {
        json_blank(j);
        json_string(j, key, sizeof key);
        json_blank(j);
        if (!json_take(j, ':')) j->bad = 1;
        if (j->bad) return;
        snprintf(j->path + length, sizeof j->path - length, "%s%s", length ? "." : "", key);
        json_value(j);
        j->path[length] = 0;
        json_blank(j);
    } while (!j->bad && json_take(j, ','));
    if (!json_take(j, '}')) j->bad = 1;
}

static void json_value(json *j) {
    const char *from;
    char text[512];
    int word = 0, i;
    static const char *const words[] = {"true", "false", "null"};
    json_blank(j);
    from = j->p;
    text[0] = 0;
    for (i = 0; i < 3; i++) if (strncmp(j->p, words[i], strlen(words[i])) == 0) { j->p += strlen(words[i]); word = 1; break; }
    if (!word && *j->p == '{') json_object(j);
    else if (!word && *j->p == '"') json_string(j, text, sizeof text);
    else if (!word) json_number(j);
    if (j->bad || strcmp(j->path, j->wanted) != 0) return;
    j->seen++;
    if (*from == '"') snprintf(j->found, sizeof j->found, "%s", text);
    else snprintf(j->found, sizeof j->found, "%.*s", (int)(j->p - from), from);
}

/* The value at a path of a JSON object as text; NULL: not there (or twice), or no JSON. */
static const char *json_at(const char *text, const char *path) {
    static json j;
    if (text == NULL) return NULL;
    memset(&j, 0, sizeof j);
    j.p = text;
    j.wanted = path;
    if (*text != '{') return NULL;
    json_value(&j);
    return j.bad || *j.p != 0 || j.seen != 1 ? NULL : j.found;
}
static int json_is(const char *text, const char *path, const char *expected) {
    const char *found = json_at(text, path);
    if (found && strcmp(found, expected) == 0) return 1;
    printf("      %s is %s, expected %s in %.200s\n", path, found ? found : "not there", expected, text ? text : "(no line)");
    return 0;
}
static double json_double(const char *text, const char *path) {
    const char *found = json_at(text, path);
    return found ? atof(found) : -12345;
}

TEST(parser_is_strict) {
    CHECK(json_at("{\"a\": 1}", "a") && json_at("{\"a\": {\"b\": -1.5e-3}}", "a.b"));
    CHECK(!json_at("{\"a\": 01}", "a") && !json_at("{\"a\": 1,}", "a") && !json_at("{\"a\": nan}", "a"));
    CHECK(!json_at("{\"a\": \"\n\"}", "a") && !json_at("{\"a\": 1} ", "a") && !json_at("{\"a\": 1., \"b\": 1}", "b"));
}

/* ---- A system: memory that is counted, a clock that is set, a disk in memory that fails when asked */

enum { DISK = 1 << 20 };
static struct {
    long allocs, frees;
    int64_t now;
    char data[DISK + 1]; int64_t size;
    int open, opens, writes, syncs, closes;
    int fail_from, fail_to;         /* writes that fail, counted from 1 */
    long fail_alloc;                /* the n-th allocation from now on fails */
    int fail_open, fail_read, fail_size, fail_sync, fail_close;
    int shorter;                    /* bytes a write takes at most; 0: all */
    int interrupt;                  /* every other write is interrupted first */
    int mode;
} sys;

static void *sys_alloc(void *user, size_t size, size_t align) {
    void *p = NULL;
    (void)user;
    if (sys.fail_alloc > 0 && --sys.fail_alloc == 0) return NULL;
    sys.allocs++;
    return posix_memalign(&p, align < sizeof p ? sizeof p : align, size) == 0 ? p : NULL;
}
static void sys_free(void *user, void *ptr, size_t size) { (void)user; (void)size; sys.frees += ptr != NULL; free(ptr); }
static int64_t sys_clock(void *user) { (void)user; return sys.now; }
static int sys_open(void *user, const char *path, int for_writing, intptr_t *file) {
    (void)user; (void)path;
    if (sys.fail_open) return -EACCES;
    if (for_writing == 1) sys.size = 0;
    sys.mode = for_writing;
    sys.open++; sys.opens++;
    *file = 7;
    return 0;
}
static int64_t sys_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    int64_t n = sys.size - offset < (int64_t)bytes ? sys.size - offset : (int64_t)bytes;
    (void)user; (void)file;
    if (sys.fail_read) return -EIO;
    memcpy(buffer, sys.data + offset, (size_t)n);
    return n;
}
static int64_t sys_write(void *user, intptr_t file, const void *buffer, size_t bytes, int64_t offset) {
    (void)user;
    CHECK(file == 7 && sys.open == 1 && offset + (int64_t)bytes <= DISK);
    sys.writes++;
    if (sys.interrupt && sys.writes % 2) return -EINTR;
    if (sys.writes >= sys.fail_from && sys.writes <= sys.fail_to) return -ENOSPC;
    if (sys.shorter && bytes > (size_t)sys.shorter) bytes = (size_t)sys.shorter;
    CHECK_MSG(offset <= sys.size, "a hole at %lld", (long long)sys.size);
    memcpy(sys.data + offset, buffer, bytes);
    if (offset + (int64_t)bytes > sys.size) sys.size = offset + (int64_t)bytes;
    return (int64_t)bytes;
}
static int64_t sys_size(void *user, intptr_t file) { (void)user; (void)file; return sys.fail_size ? -EIO : sys.size; }
static int sys_sync(void *user, intptr_t file) { (void)user; (void)file; sys.syncs++; return sys.fail_sync; }
static int sys_close(void *user, intptr_t file) { (void)user; (void)file; sys.open--; sys.closes++; return sys.fail_close; }

static amp_system a_system(void) {
    amp_system s;
    memset(&s, 0, sizeof s);
    s.alloc = sys_alloc; s.free = sys_free; s.clock_ns = sys_clock;
    s.file_open = sys_open; s.file_read = sys_read; s.file_write = sys_write;
    s.file_size = sys_size; s.file_sync = sys_sync; s.file_close = sys_close;
    return s;
}

/* Line i of the disk; NULL beyond the last.  A line without its end is none. */
static const char *disk_line(int i) {
    static char line[70000];
    const char *from = sys.data, *end;
    sys.data[sys.size] = 0;
    for (;; from = end + 1) {
        end = (const char *)memchr(from, '\n', (size_t)(sys.data + sys.size - from));
        if (end == NULL) return NULL;
        if (i-- == 0) break;
    }
    snprintf(line, sizeof line, "%.*s", (int)(end - from), from);
    return line;
}
static int disk_lines(void) {
    int64_t i;
    int n = 0;
    for (i = 0; i < sys.size; i++) n += sys.data[i] == '\n';
    return n;
}

/* ---- A backend that counts what the monitor asks of it */

static struct { int memory, done, syncs, created, untimed, destroyed, pushes, pops, depth; char names[256]; int64_t total; int cold; } asked;
static amp_result count_memory(void *dev, amp_memory_info *out) {
    amp_result r = amp_cpu()->memory(dev, out);
    asked.memory++;
    if (asked.total) out->device_total = asked.total;
    return r;
}
static amp_result count_done(void *dev, void *event, int32_t *done) {
    asked.done++;
    if (!asked.cold) return amp_cpu()->event_done(dev, event, done);
    *done = 0;
    return AMP_OK;
}
static amp_result count_sync(void *dev, void *event) { asked.syncs++; return amp_cpu()->event_sync(dev, event); }
static amp_result count_record(void *dev, void *event, void *stream) {
    (void)dev; (void)stream;
    memcpy(event, &sys.now, sizeof sys.now);            /* the device's clock is the test's, too */
    return AMP_OK;
}
static amp_result count_create(void *dev, void **event, int32_t timed) { asked.created++; asked.untimed += !timed; return amp_cpu()->event_create(dev, event, timed); }
static void count_destroy(void *dev, void *event) { asked.destroyed++; amp_cpu()->event_destroy(dev, event); }
static void count_push(void *dev, const char *name) {
    size_t n = strlen(asked.names);
    (void)dev;
    asked.pushes++;
    asked.depth++;
    snprintf(asked.names + n, sizeof asked.names - n, "%s ", name);
}
static void count_pop(void *dev) { (void)dev; asked.pops++; asked.depth--; }

/* host_visible 0: with events, as a device. */
static const amp_backend *counting_backend(int host_visible) {
    static amp_backend table;
    table = host_visible ? *amp_cpu() : *recording_backend();
    table.memory = count_memory;
    table.event_record = count_record; table.event_done = count_done; table.event_sync = count_sync;
    table.event_create = count_create; table.event_destroy = count_destroy;
    table.profile_push = count_push; table.profile_pop = count_pop;
    memset(&asked, 0, sizeof asked);
    return &table;
}

/* ---- A training: one parameter, whose gradient the test writes */

static struct { amp_log_level level; int id, count; char text[512]; int ids[64]; } logged;
static void keep_log(void *user, amp_log_level level, int id, const char *text) {
    (void)user;
    logged.level = level;
    logged.id = id;
    if (logged.count < 64) logged.ids[logged.count] = id;
    logged.count++;
    snprintf(logged.text, sizeof logged.text, "%s", text);
}
static int logs_of(int id) {
    int i, n = 0;
    for (i = 0; i < logged.count && i < 64; i++) n += logged.ids[i] == id;
    return n;
}

typedef struct training {
    amp_context *amp;
    amp_scaler *scaler;
    amp_optimizer *optimizer;
    amp_monitor *monitor;
    amp_param param;
    float weight[8], grad[8];
} training;

static int training_begin(training *t, const amp_backend *backend, const amp_scaler_desc *scaler, const amp_optimizer_desc *optimizer,
                          const amp_monitor_desc *monitor) {
    amp_desc d;
    amp_optimizer_desc o;
    amp_monitor_desc m;
    memset(t, 0, sizeof *t);
    memset(&d, 0, sizeof d);
    memset(&o, 0, sizeof o);
    memset(&m, 0, sizeof m);
    memset(&logged, 0, sizeof logged);
    memset(&sys, 0, sizeof sys);
    d.dtype = AMP_F16;
    d.allow_fallback = 1;
    d.backend = backend;
    d.system = a_system();
    d.threads = 1;
    d.logger.write = keep_log;
    CHECK_OK(amp_open(&t->amp, &d));
    t->param.name = "layer.weight";
    t->param.weight = amp_tensor1(t->weight, AMP_F32, 8);
    t->param.grad = amp_tensor1(t->grad, AMP_F32, 8);
    CHECK_OK(amp_param_register(t->amp, &t->param, 1));
    if (scaler) CHECK_OK(amp_scaler_create(t->amp, &t->scaler, scaler));
    if (optimizer) o = *optimizer;
    o.kind = AMP_SGD;
    o.params = &t->param;
    o.n_params = 1;
    CHECK_OK(amp_optimizer_create(t->amp, &t->optimizer, &o));
    if (monitor) m = *monitor;
    m.optimizer = t->optimizer;
    m.scaler = t->scaler;
    sys.now = 1000000000;
    CHECK_OK(amp_monitor_create(t->amp, &t->monitor, &m));
    return t->monitor != NULL;
}

static void training_end(training *t) {
    amp_monitor_destroy(t->monitor);
    amp_optimizer_destroy(t->optimizer);
    amp_scaler_destroy(t->scaler);
    amp_close(t->amp);
    CHECK_EQ(sys.allocs, sys.frees);
    CHECK_EQ(sys.open, 0);
}

/* A gradient, then amp_step.  value is what gradients hold, unscaled. */
static void training_grad(training *t, float value) {
    float scale = t->scaler ? amp_scaler_scale(t->scaler) : 1;
    int i;
    for (i = 0; i < 8; i++) t->grad[i] = value * scale;
    t->param.grad_live = 1;
    CHECK_OK(amp_step(t->optimizer, t->scaler));
}
static amp_result training_info(training *t, double loss, int64_t tokens) {
    amp_step_info info;
    memset(&info, 0, sizeof info);
    info.loss = loss;
    info.tokens = tokens;
    return amp_monitor_step(t->monitor, &info);
}
/* Infinity, where no compiler sees it coming. */
static volatile uint32_t infinity_bits = 0x7f800000u;
static volatile uint64_t infinity_bits64 = (uint64_t)0x7ff << 52;
static float infinite(void) { return ampi_f32_of_bits(infinity_bits); }
static double infinite64(void) { return ampi_f64_of_bits(infinity_bits64); }

/* ---- Status */

static const amp_scaler_desc *a_scaler(int interval) {
    static amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.init_scale = 1024;
    d.growth_interval = interval;
    return &d;
}

static void check_cut(size_t (*print)(const amp_status *, char *, size_t), const amp_status *status) {
    static char whole[20000], part[20000];
    size_t n = print(status, whole, sizeof whole), size;
    CHECK(n > 100 && n < sizeof whole && strlen(whole) == n);
    CHECK_EQ(print(status, NULL, 0), n);
    for (size = 0; size <= n + 2; size++) {
        memset(part, 'x', sizeof part);
        CHECK_EQ(print(status, part, size), n);
        if (size == 0) { CHECK(part[0] == 'x'); continue; }
        CHECK(strlen(part) == (size - 1 < n ? size - 1 : n) && memcmp(part, whole, strlen(part)) == 0);
        CHECK(part[strlen(part) + 1] == 'x');
    }
}

TEST(status_of_a_training) {
    static char text[20000];
    training t;
    amp_status s;
    amp_memory_info memory;
    int i;
    if (!training_begin(&t, counting_backend(1), a_scaler(3), NULL, NULL)) return;
    for (i = 0; i < 4; i++) training_grad(&t, 1);
    training_grad(&t, infinite());
    training_grad(&t, infinite());
    CHECK_OK(amp_status_get(t.amp, t.scaler, 0, &s));
    CHECK_OK(amp_memory(t.amp, &memory));
    CHECK_EQ(s.version, AMP_VERSION);
    CHECK(s.enabled == 1 && strcmp(s.backend, "cpu") == 0 && s.choice.dtype == AMP_F16 && s.choice.emulated == 1);
    CHECK(s.level == AMP_LEVEL_O1 && s.policy == AMP_POLICY_FUSED && s.mode == AMP_MODE_TRAINING);
    CHECK(s.has_scaler && s.scale == 512 && s.growth_tracker == 0 && s.growth_interval == 3 && !s.at_floor);
    CHECK(s.updates == 6 && s.skips == 2 && s.consecutive_skips == 2);
    CHECK(memcmp(&s.memory, &memory, sizeof memory) == 0 && memory.allocated > 0 && memory.device_total > 0);
    CHECK(s.memory_share == (double)memory.reserved / (double)memory.device_total && !s.memory_warned);
    CHECK(s.telemetry.temperature == -1 && s.telemetry.power == -1 && s.telemetry.memory_utilization == -1);
    CHECK(s.machine.cpu.cores > 0 && strcmp(s.machine.device.kind, "cpu") == 0);

    CHECK(amp_status_json(&s, text, sizeof text) < sizeof text);
    CHECK(json_is(text, "version", AMP_VERSION_TEXT) && json_is(text, "backend", "cpu") && json_is(text, "enabled", "true"));
    CHECK(json_is(text, "dtype", "fp16") && json_is(text, "reason", s.choice.reason) && json_is(text, "level", "O1"));
    CHECK(json_is(text, "scaler.scale", "512") && json_is(text, "scaler.skips", "2") && json_is(text, "scaler.tracker", "0"));
    CHECK(json_is(text, "scaler.at_floor", "false") && json_is(text, "scaler.growth_interval", "3"));
    CHECK(json_is(text, "temperature", "null") && json_is(text, "power", "null") && json_is(text, "memory_utilization", "null"));
    CHECK(json_is(text, "device.compute_capability", "null") && json_is(text, "device.kind", "cpu"));
    CHECK(json_double(text, "memory.peak") == (double)memory.peak && json_is(text, "memory.warned", "false"));
    CHECK(json_double(text, "cpu.cores") == s.machine.cpu.cores && json_is(text, "cast_cache.limit", "null"));
    CHECK(json_is(text, "mask_cache.entries", "0") && json_is(text, "policy", "fused") && json_is(text, "mode", "training"));
    amp_status_text(&s, text, sizeof text);
    CHECK(strstr(text, "scale 512, tracker 0 of 3; 2 of 6 updates skipped") && strstr(text, "temperature n/a, power n/a\nCPU  "));
    CHECK(strstr(text, "amp.h " AMP_VERSION_TEXT) && strstr(text, "fp16") && strstr(text, "peak "));
    check_cut(amp_status_text, &s);
    check_cut(amp_status_json, &s);
    training_end(&t);
}

TEST(status_of_little) {
    static char text[20000];
    training t;
    amp_status s;
    if (!training_begin(&t, counting_backend(1), NULL, NULL, NULL)) return;
    CHECK_OK(amp_status_get(t.amp, NULL, 0, &s));
    CHECK(!s.has_scaler && s.scale == 1 && s.growth_tracker == 0 && s.updates == 0);
    asked.total = s.memory.reserved * 2;
    CHECK_OK(amp_status_get(t.amp, NULL, 0.49, &s));
    CHECK(s.memory_warned && s.memory_share == 0.5);
    CHECK_OK(amp_status_get(t.amp, NULL, 0.51, &s));
    CHECK(!s.memory_warned);
    asked.total = s.memory.reserved;
    CHECK_OK(amp_status_get(t.amp, NULL, 1, &s));               /* never */
    CHECK(!s.memory_warned && s.memory_share == 1);
    s.memory.device_total = 0;
    s.memory_share = -1;
    snprintf(s.choice.reason, sizeof s.choice.reason, "a \"b\" \\ \n \x01 \xc3\xa9 \xff \xe2\x82");
    amp_status_json(&s, text, sizeof text);
    CHECK(json_is(text, "scaler", "null") && json_is(text, "memory.device_total", "null") && json_is(text, "memory.share", "null"));
    CHECK(json_is(text, "reason", "a \"b\" \\ \n \x01 \xc3\xa9 ? ??"));
    CHECK(strstr(text, "\\u000a \\u0001 \xc3\xa9 \\ufffd \\ufffd\\ufffd\"") != NULL);
    amp_status_text(&s, text, sizeof text);
    CHECK(strstr(text, "scaler   n/a") && strstr(text, "the device's n/a, share n/a"));
    s.has_scaler = 1;
    s.scale = infinite();
    amp_status_json(&s, text, sizeof text);
    CHECK(json_is(text, "scaler.scale", "null"));
    training_end(&t);
}

TEST(status_refuses) {
    training t;
    amp_status s, before;
    double nan = ampi_f64_of_bits((uint64_t)0x7ff8 << 48);
    if (!training_begin(&t, counting_backend(1), NULL, NULL, NULL)) return;
    memset(&s, 7, sizeof s);
    before = s;
    CHECK_ERR(amp_status_get(NULL, NULL, 0, &s), AMP_ERR_NULL);
    CHECK_ERR(amp_status_get(t.amp, NULL, 0, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_status_get(t.amp, NULL, -0.1, &s), AMP_ERR_RANGE);
    CHECK_ERR(amp_status_get(t.amp, NULL, 1.5, &s), AMP_ERR_RANGE);
    CHECK_ERR(amp_status_get(t.amp, NULL, nan, &s), AMP_ERR_RANGE);
    CHECK(strstr(amp_last_error(), "memory_warning") != NULL);
    CHECK(memcmp(&s, &before, sizeof s) == 0);
    CHECK_EQ(amp_status_text(NULL, NULL, 0), 0);
    CHECK_EQ(amp_status_json(NULL, NULL, 0), 0);
    training_end(&t);
}

/* JSON has points where the locale has commas. */
TEST(locale) {
    static char text[20000];
    amp_status s;
    if (!comma_begin()) SKIP(NO_COMMA);
    memset(&s, 0, sizeof s);
    s.memory_share = 0.25;
    amp_status_json(&s, text, sizeof text);
    comma_end();
    CHECK(json_is(text, "memory.share", "0.25"));
}

static void moment(double *wall, double *cpu) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *wall = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    *cpu = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Utilization lies between what was measured inside and around the two calls. */
TEST(cpu_telemetry) {
    amp_desc d;
    amp_context *amp;
    amp_status s;
    int threads, busy;
    volatile double x = 1;
    memset(&d, 0, sizeof d);
    for (threads = 1; threads <= 2; threads++)
        for (busy = 0; busy < 2; busy++) {
            double wall[4], cpu[4], low, high;
            struct timespec rest = {0, 30000000};
            d.threads = threads;
            CHECK_OK(amp_open(&amp, &d));
            CHECK_OK(amp_query(amp, &d));
            moment(&wall[0], &cpu[0]);
            CHECK_OK(amp_status_get(amp, NULL, 0, &s));
            moment(&wall[1], &cpu[1]);
            if (busy) do { x = x * 1.0000001; moment(&wall[2], &cpu[2]); } while (cpu[2] - cpu[1] < 0.03);
            else nanosleep(&rest, NULL);
            moment(&wall[2], &cpu[2]);
            CHECK_OK(amp_status_get(amp, NULL, 0, &s));
            moment(&wall[3], &cpu[3]);
            low = (cpu[2] - cpu[1]) / (wall[3] - wall[0]) / d.threads;
            high = (cpu[3] - cpu[0]) / (wall[2] - wall[1]) / d.threads;
            CHECK_MSG((double)s.telemetry.utilization >= (low < 1 ? low : 1) * (1 - 1e-6) && (double)s.telemetry.utilization <= high * (1 + 1e-6),
                      "%g is not in %g to %g", (double)s.telemetry.utilization, low, high);
            CHECK(s.telemetry.utilization <= 1 && s.telemetry.temperature == -1 && s.telemetry.power == -1);
            amp_close(amp);
            memset(&d, 0, sizeof d);
        }
}

TEST(ranges) {
    training t;
    amp_desc d;
    amp_context *amp;
    if (!training_begin(&t, counting_backend(1), NULL, NULL, NULL)) return;
    amp_profile_push(t.amp, "a");
    amp_profile_push(t.amp, "b");
    amp_profile_pop(t.amp);
    amp_profile_pop(t.amp);
    CHECK(strcmp(asked.names, "a b ") == 0 && asked.pops == 2);
    asked.names[0] = 0;
    CHECK_OK(amp_monitor_phase(t.monitor, AMP_PHASE_DATA));
    CHECK_OK(amp_monitor_phase(t.monitor, AMP_PHASE_FORWARD));
    CHECK_OK(amp_monitor_phase(t.monitor, AMP_PHASE_OTHER));
    CHECK_EQ(asked.depth, 0);
    CHECK_OK(amp_monitor_phase(t.monitor, AMP_PHASE_OPTIMIZER));
    training_grad(&t, 1);
    CHECK_OK(training_info(&t, 1, 1));
    CHECK(strcmp(asked.names, "data forward optimizer ") == 0 && asked.depth == 0);
    CHECK_OK(amp_monitor_phase(t.monitor, AMP_PHASE_DATA));
    training_end(&t);
    CHECK_EQ(asked.depth, 0);
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_open(&amp, &d));
    amp_profile_push(amp, "a");
    amp_profile_pop(amp);
    amp_profile_push(NULL, "a");
    amp_profile_push(amp, NULL);
    amp_profile_pop(NULL);
    amp_close(amp);
}

/* ---- The growth tracker in outcomes */

/* A copy of a state without one record. */
static amp_state *state_without(const amp_state *from, const char *leave) {
    static char room[100000];
    amp_state *to = NULL;
    int64_t i, n;
    CHECK_OK(amp_state_create(&to, NULL));
    for (i = 0; amp_state_key(from, i) != NULL; i++) {
        const char *key = amp_state_key(from, i);
        amp_dtype dtype;
        if (strcmp(key, leave) == 0) continue;
        n = amp_state_count(from, key, &dtype);
        CHECK(n * (int64_t)amp_dtype_size(dtype) <= (int64_t)sizeof room);
        CHECK_OK(amp_state_get(from, key, dtype, room, n));
        CHECK_OK(amp_state_put(to, key, dtype, room, n));
    }
    return to;
}

TEST(tracker) {
    static const int bad[12] = {0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0}, expected[12] = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 1};
    training t;
    amp_step_result o;
    amp_state *state, *old;
    int i, n = 0, without;
    if (!training_begin(&t, NULL, a_scaler(3), NULL, NULL)) return;
    for (i = 0; i < 10; i++) {
        training_grad(&t, bad[i] ? infinite() : 1);
        while (amp_step_result_next(t.optimizer, &o)) { CHECK_EQ(o.growth_tracker, expected[n]); CHECK_EQ(o.applied, !bad[n]); n++; }
    }
    CHECK_EQ(n, 8);
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(amp_optimizer_save(t.optimizer, state, "o"));
    CHECK_OK(amp_scaler_save(t.scaler, state, "s"));
    old = state_without(state, "o.trackers");           /* as versions wrote it that had none */
    for (without = 0; without < 2; without++) {
        CHECK_OK(amp_optimizer_load(t.optimizer, without ? old : state, "o"));
        CHECK_OK(amp_scaler_load(t.scaler, state, "s"));
        for (i = 10, n = 8; i < 12; i++) training_grad(&t, bad[i] ? infinite() : 1);
        CHECK_OK(amp_step_result_flush(t.optimizer));
        while (amp_step_result_next(t.optimizer, &o)) {
            CHECK_EQ(o.growth_tracker, without && n < 10 ? 0 : expected[n]);
            CHECK_EQ(o.step, n + 1);
            n++;
        }
        CHECK_EQ(n, 12);
    }
    amp_state_destroy(state);
    amp_state_destroy(old);
    training_end(&t);
    if (!training_begin(&t, NULL, NULL, NULL, NULL)) return;
    training_grad(&t, 1);
    CHECK_OK(amp_step_result_flush(t.optimizer));
    CHECK(amp_step_result_next(t.optimizer, &o) && o.growth_tracker == 0 && o.scale == 1);
    training_end(&t);
}

/* ---- Records */

static amp_step_record no_record;

static amp_monitor_desc a_monitor(int64_t log_interval) {
    amp_monitor_desc d;
    memset(&d, 0, sizeof d);
    d.path = "metrics.jsonl";
    d.log_interval = log_interval;
    return d;
}

static void pass(double seconds) { sys.now += (int64_t)(seconds * 1e9 + 0.5); }

/* One step of known times: data 1, forward 2, backward 4, optimizer 8 units of 1/64 s, per micro-batch but the optimizer's. */
static void timed_step(training *t, int micro, float value, double loss) {
    int i;
    for (i = 0; i < micro; i++) {
        CHECK_OK(amp_monitor_phase(t->monitor, AMP_PHASE_DATA));
        pass(1.0 / 64);
        CHECK_OK(amp_monitor_phase(t->monitor, AMP_PHASE_FORWARD));
        pass(2.0 / 64);
        CHECK_OK(amp_monitor_phase(t->monitor, AMP_PHASE_BACKWARD));
        pass(4.0 / 64);
        if (i + 1 < micro) training_grad(t, value);
    }
    CHECK_OK(amp_monitor_phase(t->monitor, AMP_PHASE_OPTIMIZER));
    training_grad(t, value);
    pass(8.0 / 64);
    CHECK_OK(training_info(t, loss, 60 * micro));
}

/* Every field, on a backend that is the host, and on one with events. */
TEST(records) {
    int host_visible, i, n;
    for (host_visible = 0; host_visible < 2; host_visible++) {
        amp_monitor_desc d = a_monitor(1);
        amp_optimizer_desc od;
        training t;
        amp_step_record r = no_record;
        memset(&od, 0, sizeof od);
        od.clip_norm = 1;
        d.memory_interval = 3;
        if (!training_begin(&t, counting_backend(host_visible), a_scaler(4), &od, &d)) return;
        pass(100);                                      /* before the first phase: nobody's */
        for (i = 0, n = 0; i < 10; i++) {
            timed_step(&t, 1, i == 5 ? infinite() : 2, 10 - i);
            while (amp_monitor_next(t.monitor, &r)) {
                const amp_step_result *o = &r.result;
                CHECK_EQ(o->step, n + 1);
                CHECK(r.epoch == 0 && r.loss == 10 - n && r.tokens == 60 && r.dtype == AMP_F16);
                CHECK(o->applied == (n != 5) && o->growth_tracker == (n < 4 ? n : n == 5 ? 1 : n == 4 ? 0 : n - 6));
                CHECK(o->scale == (n < 4 ? 1024 : n < 6 ? 2048 : 1024));
                CHECK(r.anomaly == AMP_ANOMALY_NONE && r.action == AMP_NAN_DEFAULT);
                CHECK_EQ(r.has_memory, n % 3 == 2);
                CHECK(!r.has_memory || (r.memory.allocated > 0 && (r.memory.reserved > 0) == host_visible && r.memory.peak > 0));
                CHECK(r.phase_seconds[AMP_PHASE_DATA] == 1.0 / 64 && r.phase_seconds[AMP_PHASE_FORWARD] == 2.0 / 64);
                CHECK(r.phase_seconds[AMP_PHASE_BACKWARD] == 4.0 / 64 && r.phase_seconds[AMP_PHASE_OPTIMIZER] == 8.0 / 64);
                CHECK(r.phase_seconds[AMP_PHASE_OTHER] == 0 && r.seconds == 15.0 / 64 && r.tokens_per_second == 256);
                n++;
            }
            CHECK_EQ(n, i < 2 ? 0 : i - 1);
        }
        CHECK_EQ(disk_lines(), 8);
        CHECK_EQ(asked.memory, 3);
        amp_monitor_destroy(t.monitor);                 /* brings the last two */
        t.monitor = NULL;
        CHECK_EQ(disk_lines(), 10);
        for (i = 0; i < 10; i++) {
            const char *line = disk_line(i);
            char number[32];
            snprintf(number, sizeof number, "%d", i + 1);
            CHECK(json_is(line, "event", "step") && json_is(line, "step", number) && json_is(line, "epoch", "0"));
            snprintf(number, sizeof number, "%d", 10 - i);
            CHECK(json_is(line, "loss", number) && json_is(line, "dtype", "fp16") && json_is(line, "lr", "0.001"));
            CHECK(json_is(line, "skipped", i == 5 ? "1" : "0") && json_is(line, "skips", i < 5 ? "0" : "1"));
            if (i == 5) CHECK(json_is(line, "norm", "null") && json_is(line, "first_bad", "layer.weight"));
            else CHECK(fabs(json_double(line, "norm") - 2 * sqrt(8.0)) < 1e-6 && !json_at(line, "first_bad"));
            CHECK(json_double(line, "scale") == (i < 4 ? 1024 : i < 6 ? 2048 : 1024));
            CHECK(json_double(line, "tracker") == (i < 4 ? i : i == 5 ? 1 : i == 4 ? 0 : i - 6));
            CHECK((json_at(line, "allocated") != NULL) == (i % 3 == 2) && (json_at(line, "peak") != NULL) == (i % 3 == 2));
            CHECK((json_at(line, "reserved") != NULL) == (i % 3 == 2) && !json_at(line, "anomaly"));
            CHECK(json_is(line, "tokens_per_s", "256") && json_is(line, "seconds", "0.234375") && json_is(line, "data_s", "0.015625") &&
                  json_is(line, "forward_s", "0.03125") && json_is(line, "backward_s", "0.0625") && json_is(line, "optimizer_s", "0.125"));
        }
        training_end(&t);
        CHECK_EQ(asked.created, asked.destroyed);
        CHECK_EQ(asked.untimed, AMP_STEP_RESULTS);      /* the optimizer's; the monitor's carry times */
    }
}

/* Phases of micro-batches add up; without phases all time is OTHER. */
TEST(phases_add_up) {
    amp_optimizer_desc od;
    training t;
    amp_step_record r = no_record;
    int i;
    memset(&od, 0, sizeof od);
    od.accumulation = 3;
    od.result_lag = AMP_LAG_NONE;
    if (!training_begin(&t, NULL, NULL, &od, NULL)) return;
    timed_step(&t, 3, 1, 1);
    CHECK(amp_monitor_next(t.monitor, &r) == 1 && r.result.step == 1 && r.tokens == 180);
    CHECK(r.phase_seconds[AMP_PHASE_DATA] == 3.0 / 64 && r.phase_seconds[AMP_PHASE_FORWARD] == 6.0 / 64);
    CHECK(r.phase_seconds[AMP_PHASE_BACKWARD] == 12.0 / 64 && r.phase_seconds[AMP_PHASE_OPTIMIZER] == 8.0 / 64);
    CHECK(r.seconds == 29.0 / 64);
    CHECK_EQ(amp_monitor_next(t.monitor, &r), 0);
    for (i = 0; i < 3; i++) training_grad(&t, 1);
    pass(0.5);
    CHECK_OK(training_info(&t, 1, 100));
    CHECK(amp_monitor_next(t.monitor, &r) == 1 && r.seconds == 0.5 && r.phase_seconds[AMP_PHASE_OTHER] == 0.5 && r.tokens_per_second == 200);
    training_end(&t);
    if (!training_begin(&t, NULL, NULL, NULL, NULL)) return;
    pass(0.25);                                         /* no phase at all: from the beginning */
    training_grad(&t, 1);
    CHECK_OK(training_info(&t, 1, 100));
    CHECK_OK(amp_monitor_flush(t.monitor));
    CHECK(amp_monitor_next(t.monitor, &r) == 1 && r.seconds == 0.25);
    training_end(&t);
}

/* What is written: by interval, and always where something went wrong.  A loss that was not read is left out. */
TEST(intervals) {
    static const int64_t intervals[] = {5, AMP_INTERVAL_OFF};
    int k, i;
    for (k = 0; k < 2; k++) {
        amp_monitor_desc d = a_monitor(intervals[k]);
        amp_step_info info;
        training t;
        if (!training_begin(&t, NULL, a_scaler(100), NULL, &d)) return;
        memset(&info, 0, sizeof info);
        info.no_loss = 1;
        for (i = 1; i <= 12; i++) {
            training_grad(&t, i == 7 ? infinite() : 1);
            CHECK_OK(i == 5 ? amp_monitor_step(t.monitor, &info) : training_info(&t, i == 9 ? infinite64() : i, 1));
        }
        amp_monitor_destroy(t.monitor);
        t.monitor = NULL;
        CHECK_EQ(disk_lines(), k == 0 ? 4 : 2);
        CHECK(json_is(disk_line(1 - k), "step", "7") && json_is(disk_line(2 - k), "step", "9"));
        CHECK(json_is(disk_line(2 - k), "loss", "null") && json_is(disk_line(2 - k), "anomaly", "loss"));
        if (k == 0) CHECK(json_is(disk_line(0), "step", "5") && !json_at(disk_line(0), "loss") && json_is(disk_line(3), "step", "10"));
        training_end(&t);
    }
}

/* In the steady state nothing is allocated; the device is asked for its memory at the interval only, and waited for by
   nobody but amp_monitor_next, once its event is not done. */
TEST(steady_state) {
    int host_visible, i, n;
    for (host_visible = 0; host_visible < 2; host_visible++) {
        amp_monitor_desc d = a_monitor(1);
        training t;
        amp_step_record r = no_record;
        long allocs = 0;
        int created = 0, syncs = 0;
        d.memory_interval = 10;
        if (!training_begin(&t, counting_backend(host_visible), a_scaler(1000), NULL, &d)) return;
        for (i = 1; i <= 200; i++) {
            if (i == 5) { allocs = sys.allocs; created = asked.created; }
            timed_step(&t, 1, 1, 1);
            CHECK_EQ(asked.memory, i / 10);
            while (amp_monitor_next(t.monitor, &r)) CHECK(r.seconds == 15.0 / 64);
        }
        CHECK_EQ(sys.allocs, allocs);
        CHECK_EQ(asked.created, created);
        CHECK_OK(amp_monitor_epoch(t.monitor, NULL));
        CHECK_EQ(asked.memory, 20);
        asked.cold = 1;                                 /* a device that is late */
        for (i = 0, n = 0; i < 20; i++) {
            syncs = asked.syncs;
            timed_step(&t, 1, 1, 1);
            CHECK_EQ(asked.syncs, syncs);
            while (amp_monitor_next(t.monitor, &r)) { n++; CHECK(r.seconds == 15.0 / 64); }
        }
        CHECK_EQ(n, 2 + 18);                            /* the last two of the epoch come first */
        asked.cold = 0;
        CHECK_OK(amp_monitor_flush(t.monitor));
        training_end(&t);
    }
}

/* Nobody takes records, and the device is late by as much as can be: every step has its line, and the last 64 records stay. */
TEST(nobody_takes_records) {
    int cold, i;
    for (cold = 0; cold < 2; cold++) {
        amp_monitor_desc d = a_monitor(1);
        amp_optimizer_desc od;
        training t;
        amp_step_record r = no_record;
        memset(&od, 0, sizeof od);
        od.result_lag = 63;
        if (!training_begin(&t, counting_backend(0), NULL, &od, &d)) return;
        for (i = 0; i < 300; i++) {
            asked.cold = cold && i >= 50;               /* by then the ring of moments has turned */
            timed_step(&t, 1, 1, i);
        }
        CHECK_EQ(disk_lines(), 300 - 63);
        for (i = 0; i < 64; i++) CHECK(amp_monitor_next(t.monitor, &r) && r.result.step == 300 - 63 - 64 + 1 + i && r.loss == r.result.step - 1 && r.seconds == 15.0 / 64);
        CHECK_EQ(amp_monitor_next(t.monitor, &r), 0);
        CHECK_OK(amp_monitor_flush(t.monitor));
        CHECK_EQ(disk_lines(), 300);
        for (i = 0; i < 300; i++) CHECK(json_double(disk_line(i), "step") == i + 1 && json_double(disk_line(i), "loss") == i && json_is(disk_line(i), "seconds", "0.234375"));
        training_end(&t);
    }
}

/* amp_cleanup at its interval, and settings that reach a running monitor. */
static int trims;
static amp_result count_trim(void *dev) { trims++; return amp_cpu()->trim(dev); }

TEST(settings_reach_it) {
    amp_monitor_desc d = a_monitor(AMP_INTERVAL_OFF);
    amp_settings settings;
    amp_backend table;
    amp_context *amp;
    training t;
    int i;
    table = *counting_backend(1);
    table.trim = count_trim;
    trims = 0;
    d.cleanup_interval = 4;
    d.memory_interval = AMP_INTERVAL_OFF;
    if (!training_begin(&t, &table, a_scaler(100), NULL, &d)) return;
    for (i = 1; i <= 13; i++) {
        training_grad(&t, 1);
        CHECK_OK(training_info(&t, 1, 1));
        CHECK_EQ(trims, i / 4);
    }
    CHECK_EQ(asked.memory, 0);
    memset(&settings, 0, sizeof settings);
    CHECK_OK(amp_settings_set(&settings, "dtype", "fp16"));
    CHECK_OK(amp_settings_set(&settings, "log_interval", "1"));
    CHECK_OK(amp_settings_set(&settings, "memory_interval", "2"));
    CHECK_OK(amp_settings_set(&settings, "memory_warning", "0.5"));
    CHECK_OK(amp_settings_set(&settings, "nan_action", "stop"));
    CHECK_OK(amp_settings_set(&settings, "max_skips", "7"));
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_ERR(amp_settings_apply(&settings, amp, NULL, NULL, t.monitor), AMP_ERR_CONFLICT);
    amp_close(amp);
    CHECK_OK(amp_settings_apply(&settings, t.amp, t.scaler, t.optimizer, t.monitor));
    CHECK_OK(amp_monitor_query(t.monitor, &d));
    CHECK(d.log_interval == 1 && d.memory_interval == 2 && d.cleanup_interval == AMP_INTERVAL_OFF && d.memory_warning == 0.5);
    CHECK(d.nan_action == AMP_NAN_STOP && d.max_skips == 7 && strcmp(d.path, "metrics.jsonl") == 0);
    for (i = 14; i <= 21; i++) {
        training_grad(&t, 1);
        CHECK_OK(training_info(&t, 1, 1));
    }
    CHECK_OK(amp_monitor_flush(t.monitor));
    CHECK(trims == 3 && asked.memory == 4);
    CHECK_EQ(disk_lines(), 2 + 8);                      /* the two that were not due yet, too */
    training_end(&t);
}

/* ---- Trouble */

TEST(anomaly) {
    amp_scaler_desc frozen, floor;
    amp_optimizer_desc apply;
    amp_monitor_desc d;
    amp_step_record r = no_record;
    training t;
    int kind, action, i;
    memset(&apply, 0, sizeof apply);
    apply.result_lag = AMP_LAG_NONE;
    apply.apply_nonfinite = 1;
    frozen = *a_scaler(10);
    frozen.frozen = 1;
    floor = *a_scaler(10);
    floor.min_scale = 1024;
    for (action = AMP_NAN_DEFAULT; action <= AMP_NAN_RECOVER; action++)
        for (kind = 0; kind < 6; kind++) {              /* loss; no scaler; the same applied; frozen; floor; skips */
            static const amp_anomaly expected[] = {AMP_ANOMALY_LOSS, AMP_ANOMALY_GRADIENTS, AMP_ANOMALY_GRADIENTS, AMP_ANOMALY_GRADIENTS,
                                                   AMP_ANOMALY_FLOOR, AMP_ANOMALY_SKIPS};
            static const char *const names[] = {"loss", "gradients", "gradients", "gradients", "floor", "skips"};
            const amp_scaler_desc *scaler = kind == 1 || kind == 2 ? NULL : kind == 3 ? &frozen : kind == 4 ? &floor : a_scaler(10);
            d = a_monitor(AMP_INTERVAL_OFF);
            d.nan_action = (amp_nan_action)action;
            d.max_skips = 3;
            apply.apply_nonfinite = kind == 2;
            if (!training_begin(&t, NULL, scaler, &apply, &d)) return;
            training_grad(&t, 1);
            CHECK_OK(training_info(&t, 1, 1));
            CHECK(amp_monitor_next(t.monitor, &r) && r.anomaly == AMP_ANOMALY_NONE);
            for (i = 0; i < (kind == 5 ? 3 : 1); i++) {
                training_grad(&t, kind == 0 ? 1 : infinite());
                CHECK_OK(training_info(&t, kind == 0 ? infinite64() : 1, 1));
                CHECK(amp_monitor_next(t.monitor, &r));
                if (kind == 5) CHECK_EQ(r.anomaly, i < 2 ? AMP_ANOMALY_NONE : AMP_ANOMALY_SKIPS);
            }
            CHECK_EQ(r.anomaly, expected[kind]);
            CHECK_EQ(r.action, action == AMP_NAN_DEFAULT ? (int)AMP_NAN_SKIP : action);
            CHECK_EQ(r.result.applied, kind == 0 || kind == 2);
            CHECK_EQ(logs_of(1212), 1);
            CHECK(json_is(disk_line(disk_lines() - 1), "anomaly", names[kind]));
            CHECK((json_at(disk_line(disk_lines() - 1), "first_bad") != NULL) == (kind != 0));
            training_end(&t);
        }
}

/* The warning comes once per crossing. */
TEST(memory_warning) {
    amp_monitor_desc d = a_monitor(AMP_INTERVAL_OFF);
    training t;
    amp_memory_info memory;
    int i;
    d.memory_interval = 1;
    d.memory_warning = 0.8;
    if (!training_begin(&t, counting_backend(1), NULL, NULL, &d)) return;
    CHECK_OK(amp_memory(t.amp, &memory));
    for (i = 0; i < 30; i++) {
        asked.total = i / 5 % 2 ? memory.reserved : memory.reserved * 2;
        training_grad(&t, 1);
        CHECK_OK(training_info(&t, 1, 1));
        CHECK_EQ(logs_of(1211), (i / 5 + 1) / 2);
    }
    training_end(&t);
}

/* ---- Epochs */

TEST(epochs) {
    amp_monitor_desc d = a_monitor(AMP_INTERVAL_OFF);
    training t;
    amp_epoch_record e;
    amp_epoch_summary s;
    amp_step_record r = no_record;
    amp_memory_info before, memory;
    void *block;
    char text[2000], cut[2000];
    int epoch, i;
    size_t size, n;
    d.epoch = 3;
    if (!training_begin(&t, NULL, a_scaler(1000), NULL, &d)) return;
    CHECK_ERR(amp_monitor_epoch(t.monitor, &e), AMP_ERR_STATE);
    CHECK_OK(amp_monitor_summary(t.monitor, &s));
    CHECK(s.mixed.epoch == 0 && s.full.epoch == 0 && s.speedup == 0 && s.memory_ratio == 0);
    for (epoch = 0; epoch < 4; epoch++) {               /* two in fp16, two in fp32 of twice the time and more memory */
        CHECK_OK(amp_set_dtype(t.amp, epoch < 2 ? AMP_F16 : AMP_F32));
        for (i = 0; i < 5; i++) {
            if (i == 1) {
                CHECK_OK(amp_memory(t.amp, &before));
                CHECK_OK(amp_alloc(t.amp, &block, epoch < 2 ? 1 << 16 : 1 << 17));
                amp_free(t.amp, block);
            }
            timed_step(&t, epoch < 2 ? 1 : 2, i == 2 && epoch == 1 ? infinite() : 1, i == 3 && epoch == 0 ? infinite64() : epoch + i);
            if (epoch >= 2) pass(1.0 / 64);             /* 15 units; 22 + 8 - 7 + ... = 30 with OTHER's, but the last's, which is nobody's */
        }
        pass(1000);                                     /* validation */
        CHECK_OK(amp_monitor_epoch(t.monitor, &e));
        CHECK(e.epoch == 3 + epoch && e.steps == 5 && e.skipped == (epoch == 1) && e.anomalies == (epoch == 0));
        CHECK(fabs(e.loss - (epoch == 0 ? 7.0 / 4 : epoch + 2)) < 1e-15);
        CHECK(e.mixed == (epoch < 2) && e.dtype == (epoch < 2 ? AMP_F16 : AMP_F32));
        CHECK(e.phase_seconds[AMP_PHASE_DATA] == (epoch < 2 ? 5 : 10) / 64.0 && e.phase_seconds[AMP_PHASE_OPTIMIZER] == 40 / 64.0);
        CHECK(e.seconds == (epoch < 2 ? 75 : 110 + 4) / 64.0);
        CHECK(e.tokens_per_second == (epoch < 2 ? 300 : 600) / e.seconds);
        CHECK_EQ(e.peak, before.reserved + (epoch < 2 ? 1 << 16 : 1 << 17));
        CHECK_OK(amp_memory(t.amp, &memory));
        CHECK_EQ(memory.peak, memory.reserved);         /* begun anew */
        for (i = 0; amp_monitor_next(t.monitor, &r); i++) CHECK(r.epoch == 3 + epoch);
        CHECK_EQ(i, 5);
        CHECK_ERR(amp_monitor_epoch(t.monitor, &e), AMP_ERR_STATE);
        n = (size_t)disk_lines() - 1;
        CHECK(json_is(disk_line((int)n), "event", "epoch") && json_double(disk_line((int)n), "epoch") == 3 + epoch);
        CHECK(json_is(disk_line((int)n), "steps", "5") && json_is(disk_line((int)n), "skipped", epoch == 1 ? "1" : "0"));
        CHECK(json_is(disk_line((int)n), "anomalies", epoch == 0 ? "1" : "0") && json_is(disk_line((int)n), "dtype", epoch < 2 ? "fp16" : "fp32"));
        CHECK(json_double(disk_line((int)n), "seconds") == (epoch < 2 ? 75 : 114) / 64.0);
        CHECK(json_at(disk_line((int)n), "peak") && json_at(disk_line((int)n), "loss") && json_at(disk_line((int)n), "forward_s"));
        CHECK_EQ(sys.syncs, epoch + 1);
        pass(500);                                      /* until the next epoch's first phase */
    }
    CHECK_OK(amp_monitor_summary(t.monitor, &s));
    CHECK(s.mixed.epoch == 2 && s.full.epoch == 2 && s.mixed.steps == 10 && s.mixed.skipped == 1 && s.full.skipped == 0);
    CHECK(s.mixed.mixed == 1 && s.full.mixed == 0 && s.mixed.dtype == AMP_F16 && s.full.dtype == AMP_F32);
    CHECK(s.mixed.seconds == 75 / 64.0 && s.full.seconds == 114 / 64.0 && fabs(s.speedup - 114.0 / 75) < 1e-15);
    CHECK(fabs(s.mixed.loss - (7.0 / 4 + 3) / 2) < 1e-15 && s.full.loss == 4.5);
    CHECK(fabs(s.loss_difference - (s.mixed.loss - 4.5)) < 1e-15);
    CHECK(s.memory_ratio == (double)(before.reserved + (1 << 16)) / (double)(before.reserved + (1 << 17)));
    n = amp_epoch_summary_text(&s, text, sizeof text);
    CHECK(n == strlen(text) && strstr(text, "fp16 beside fp32: 1.52 times as fast per step") && strstr(text, "loss -2.1250"));
    for (size = 1; size <= n + 1; size++) {
        CHECK_EQ(amp_epoch_summary_text(&s, cut, size), n);
        CHECK(strlen(cut) == size - 1 && memcmp(cut, text, size - 1) == 0);
    }
    s.full.epoch = 0;
    amp_epoch_summary_text(&s, text, sizeof text);
    CHECK(strstr(text, "none") && !strstr(text, "beside"));
    training_end(&t);
}

/* Losses that were never finite: no mean, and nothing in JSON but null. */
TEST(epoch_without_loss) {
    amp_monitor_desc d = a_monitor(AMP_INTERVAL_OFF);
    training t;
    amp_epoch_record e;
    amp_epoch_summary s;
    char text[1000];
    if (!training_begin(&t, NULL, NULL, NULL, &d)) return;
    training_grad(&t, 1);
    CHECK_OK(training_info(&t, infinite64(), 1));
    CHECK_OK(amp_monitor_epoch(t.monitor, &e));
    CHECK(!amp_is_finite_f64(&e.loss));
    CHECK(json_is(disk_line(disk_lines() - 1), "loss", "null"));
    CHECK_OK(amp_monitor_summary(t.monitor, &s));
    amp_epoch_summary_text(&s, text, sizeof text);
    CHECK(strstr(text, "n/a") != NULL);
    training_end(&t);
}

/* ---- Files */

/* What a training of n steps, an epoch and a line of the host's writes. */
static void write_all(training *t, int steps, int *failed) {
    amp_result r;
    int i;
    for (i = 0; i < steps; i++) {
        training_grad(t, 1);
        r = training_info(t, i, 1);
        CHECK(r == AMP_OK || r == AMP_ERR_WRITE);
        if (r == AMP_ERR_WRITE) {
            (*failed)++;
            CHECK(strstr(amp_last_error(), "metrics.jsonl") && strstr(amp_last_error(), "are kept"));
        }
        if (i == steps / 2) {
            r = amp_monitor_write(t->monitor, "{\"event\": \"mine\"}");
            CHECK(r == AMP_OK || r == AMP_ERR_WRITE);
            r = amp_monitor_epoch(t->monitor, NULL);
            CHECK(r == AMP_OK || r == AMP_ERR_WRITE);
        }
    }
}

/* Fails at every write in turn, for one call or for some, with whole and with short writes, which cut lines anywhere. */
TEST(disk_that_fails) {
    static char whole[100000];
    int64_t whole_size = 0;
    int shorter, run, at, writes = 0;
    for (shorter = 0; shorter <= 50; shorter += 25)
        for (run = 0; run <= 5; run += run ? 4 : 1)
            for (at = 1; at <= (run == 0 ? 1 : writes); at++) {
                amp_monitor_desc d = a_monitor(1);
                training t;
                int failed = 0;
                if (!training_begin(&t, NULL, NULL, NULL, &d)) return;
                sys.shorter = shorter;
                sys.interrupt = run == 0 && shorter == 25;
                sys.fail_from = run == 0 ? 0 : at;
                sys.fail_to = run == 0 ? 0 : at + run - 1;
                write_all(&t, 12, &failed);
                amp_monitor_destroy(t.monitor);
                t.monitor = NULL;
                if (run == 0) { writes = sys.writes; CHECK_EQ(failed, 0); }
                if (run == 0 && shorter == 0) { whole_size = sys.size; memcpy(whole, sys.data, (size_t)sys.size); CHECK_EQ(disk_lines(), 14); }
                if (sys.writes > sys.fail_to)           /* the last attempt was none that fails */
                    CHECK_MSG(sys.size == whole_size && memcmp(sys.data, whole, (size_t)whole_size) == 0, "failing at %d for %d, %d bytes at once: %lld "
                              "bytes, expected %lld", at, run, shorter, (long long)sys.size, (long long)whole_size);
                else CHECK(sys.size <= whole_size && memcmp(sys.data, whole, (size_t)sys.size) == 0);   /* full to the end */
                training_end(&t);
            }
}

/* A disk that stays full: the first lines stay, 256 KiB are kept, and what then is in the file is whole lines, each once. */
TEST(disk_that_stays_full) {
    static char line[60001];
    amp_monitor_desc d = a_monitor(AMP_INTERVAL_OFF);
    training t;
    int i;
    if (!training_begin(&t, NULL, NULL, NULL, &d)) return;
    CHECK_OK(amp_monitor_write(t.monitor, "{\"n\": 0}"));
    sys.fail_from = sys.writes + 1;
    sys.fail_to = 1 << 30;
    for (i = 1; i <= 6; i++) {
        memset(line, ' ', sizeof line - 1);
        memcpy(line, "{\"n\":", 5);
        line[6] = (char)('0' + i);
        line[sizeof line - 2] = '}';
        CHECK_ERR(amp_monitor_write(t.monitor, line), AMP_ERR_WRITE);
    }
    CHECK(strstr(amp_last_error(), "240004 bytes are kept, 2 lines were lost") != NULL);
    CHECK_EQ(logs_of(1213), 1);
    CHECK_ERR(amp_monitor_flush(t.monitor), AMP_ERR_WRITE);
    for (i = 0; i < 5; i++) {                           /* training goes on; each step says it once */
        int before = sys.writes;
        training_grad(&t, 1);
        CHECK_ERR(training_info(&t, 1, 1), AMP_ERR_WRITE);
        CHECK_EQ(sys.writes, before + 1);
    }
    sys.fail_to = 0;
    CHECK_OK(amp_monitor_flush(t.monitor));
    CHECK_EQ(disk_lines(), 5);
    for (i = 0; i < 5; i++) CHECK(json_double(disk_line(i), "n") == i);
    sys.fail_from = sys.writes + 1;
    sys.fail_to = 1 << 30;
    CHECK_ERR(amp_monitor_write(t.monitor, "{}"), AMP_ERR_WRITE);
    amp_monitor_destroy(t.monitor);
    t.monitor = NULL;
    CHECK_EQ(logged.id, AMP_ERR_WRITE);
    CHECK_EQ(disk_lines(), 5);
    training_end(&t);
}

/* Appending after a crash: the torn line gets its end, and nothing of what was there changes.  Also on a real disk. */
TEST(append) {
    static const char *const torn[] = {"", "{\"a\": 1}\n", "{\"a\": 1}\n{\"b", "{"};
    char path[256];
    int i, real;
    for (i = 0; i < 4; i++)
        for (real = 0; real < 2; real++) {
            amp_desc cd;
            amp_optimizer_desc od;
            amp_monitor_desc d = a_monitor(1);
            training t;
            void *data;
            size_t bytes, before = strlen(torn[i]), gap = before > 0 && torn[i][before - 1] != '\n';
            memset(&sys, 0, sizeof sys);
            memset(&t, 0, sizeof t);
            memset(&cd, 0, sizeof cd);
            memset(&od, 0, sizeof od);
            snprintf(path, sizeof path, "%s/amp_watch_%ld.jsonl", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (long)getpid());
            if (!real) { cd.system = a_system(); memcpy(sys.data, torn[i], before); sys.size = (int64_t)before; }
            else if (i > 0) CHECK_OK(amp_file_write_atomic(NULL, path, torn[i], before));
            CHECK_OK(amp_open(&t.amp, &cd));
            t.param.name = "w";
            t.param.weight = amp_tensor1(t.weight, AMP_F32, 8);
            t.param.grad = amp_tensor1(t.grad, AMP_F32, 8);
            CHECK_OK(amp_param_register(t.amp, &t.param, 1));
            od.params = &t.param; od.n_params = 1;
            CHECK_OK(amp_optimizer_create(t.amp, &t.optimizer, &od));
            d.append = 1;
            d.path = path;
            d.optimizer = t.optimizer;
            CHECK_OK(amp_monitor_create(t.amp, &t.monitor, &d));
            CHECK_OK(amp_monitor_query(t.monitor, &d));
            CHECK(d.path != path && strcmp(d.path, path) == 0 && d.append == 1 && d.log_interval == 1 && d.memory_interval == 100 &&
                  d.cleanup_interval == AMP_INTERVAL_OFF && d.memory_warning == 0.9 && d.nan_action == AMP_NAN_SKIP && d.max_skips == 25);
            CHECK_OK(amp_monitor_write(t.monitor, "{\"mine\": [1, {}]}"));
            amp_monitor_destroy(t.monitor);
            d.append = 0;
            d.path = path;
            if (!real) { data = sys.data; bytes = (size_t)sys.size; CHECK_EQ(sys.mode, 2); }
            else CHECK_OK(amp_file_read_all(NULL, path, &data, &bytes));
            CHECK(bytes == before + gap + 18 && memcmp(data, torn[i], before) == 0);
            if (bytes == before + gap + 18) CHECK(memcmp((char *)data + before, gap ? "\n{\"mine\": [1, {}]}\n" : "{\"mine\": [1, {}]}\n", gap + 18) == 0);
            if (real) {
                amp_file_free(NULL, data, bytes);
                CHECK_OK(amp_monitor_create(t.amp, &t.monitor, &d));          /* not appending: a new file */
                amp_monitor_destroy(t.monitor);
                CHECK_OK(amp_file_read_all(NULL, path, &data, &bytes));
                CHECK_EQ(bytes, 0);
                amp_file_free(NULL, data, bytes);
                unlink(path);
            }
            amp_optimizer_destroy(t.optimizer);
            amp_close(t.amp);
        }
}

TEST(lines_of_the_host) {
    static const char *const good[] = {"{}", " {\"a\" : [ ] }\t", "{\"a\": [1, -0, 0.5, 1e9, -2.5E-3, true, false, null, \"\"]}",
                                       "{\"\\u00e9\\n\\\"\": {\"b\": {\"c\": [[[]]]}}}", "{\"\xc3\xa9\": \"\xf0\x9f\x98\x80\"}"};
    static const char *const bad[] = {"", " ", "1", "[]", "null", "{", "}", "{}{}", "{} x", "{\"a\"}", "{\"a\": }", "{\"a\": 1,}", "{,}",
                                      "{\"a\": 01}", "{\"a\": +1}", "{\"a\": .5}", "{\"a\": 1.}", "{\"a\": 1e}", "{\"a\": nan}", "{\"a\": NaN}",
                                      "{\"a\": inf}", "{\"a\": True}", "{a: 1}", "{'a': 1}", "{\"a\": \"\n\"}", "{\n}", "{}\n", "{\"a\": \"\\x\"}",
                                      "{\"a\": \"\\u12g4\"}", "{\"a\": \"b}", "{\"a\": [1 2]}", "{\"a\": [1}", "{\"a\": 1 \"b\": 2}",
                                      "{\"a\": \"\xff\"}", "{\"a\": \"\xc0\x80\"}", "{\"a\": \"\xed\xa0\x80\"}", "{\"a\": \"\xf4\x90\x80\x80\"}",
                                      "{\"a\": \"\xe0\x9f\xbf\"}", "{\"a\": \"\xc3\"}", "{\"a\": \"\\", "{\"a\": 1e+}", "{\"a\": -}", "{\"a\": \"\x01\"}"};
    static char deep[1000], line[70000 * 4];
    amp_monitor_desc d = a_monitor(1);
    training t;
    size_t i;
    if (!training_begin(&t, NULL, NULL, NULL, &d)) return;
    for (i = 0; i < sizeof good / sizeof good[0]; i++) {
        CHECK_OK(amp_monitor_write(t.monitor, good[i]));
        CHECK(strcmp(disk_line((int)i), good[i]) == 0);
    }
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK_MSG(amp_monitor_write(t.monitor, bad[i]) == AMP_ERR_RANGE, "taken: %s", bad[i]);
    for (i = 60; i <= 400; i += 340) {                  /* a stack has an end */
        memset(deep, 0, sizeof deep);
        memcpy(deep, "{\"a\":", 5);
        memset(deep + 5, '[', i);
        memset(deep + 5 + i, ']', i);
        deep[5 + 2 * i] = '}';
        CHECK_ERR(amp_monitor_write(t.monitor, deep), i == 60 ? AMP_OK : AMP_ERR_RANGE);
    }
    memset(line, ' ', sizeof line - 1);
    line[0] = '{';
    line[sizeof line - 2] = '}';
    CHECK_ERR(amp_monitor_write(t.monitor, line), AMP_ERR_RANGE);
    CHECK_ERR(amp_monitor_write(t.monitor, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_monitor_write(NULL, "{}"), AMP_ERR_NULL);
    CHECK_EQ(disk_lines(), sizeof good / sizeof good[0] + 1);
    training_end(&t);
    if (!training_begin(&t, NULL, NULL, NULL, NULL)) return;        /* no file: checked all the same */
    CHECK_OK(amp_monitor_write(t.monitor, "{}"));
    CHECK_ERR(amp_monitor_write(t.monitor, "x"), AMP_ERR_RANGE);
    CHECK_EQ(sys.opens, 0);
    training_end(&t);
}

/* ---- An optimizer that is set back has records of what it does again, and none twice */

TEST(set_back) {
    int saved_at, again, i, n;
    for (saved_at = 1; saved_at <= 9; saved_at++)
        for (again = 1; again <= 6; again++) {
            amp_monitor_desc d = a_monitor(1);
            amp_state *state;
            amp_step_record r = no_record;
            training t;
            int expected = 0;
            if (!training_begin(&t, NULL, NULL, NULL, &d)) return;
            CHECK_OK(amp_state_create(&state, NULL));
            for (i = 1, n = 0; i <= 9; i++) {
                training_grad(&t, 1);
                CHECK_OK(training_info(&t, i, 1));
                if (i == saved_at) CHECK_OK(amp_optimizer_save(t.optimizer, state, "o"));
                while (amp_monitor_next(t.monitor, &r)) { n++; CHECK(r.loss == n && r.result.step == n); }
            }
            CHECK_EQ(n, 7);
            CHECK_OK(amp_optimizer_load(t.optimizer, state, "o"));
            for (i = 1; i <= again; i++) {
                training_grad(&t, 1);
                CHECK_OK(training_info(&t, 100 + i, 1));
            }
            CHECK_OK(amp_monitor_flush(t.monitor));
            /* Steps 8 and 9 have outcomes only where they were saved with it. */
            for (i = 8; i <= saved_at; i++) {
                CHECK(amp_monitor_next(t.monitor, &r) && r.loss == i && r.result.step == i);
                expected++;
            }
            for (i = 1; i <= again; i++) CHECK(amp_monitor_next(t.monitor, &r) && r.loss == 100 + i && r.result.step == saved_at + i);
            CHECK_EQ(amp_monitor_next(t.monitor, &r), 0);
            CHECK_EQ(disk_lines(), 7 + expected + again);
            amp_state_destroy(state);
            training_end(&t);
        }
}

/* Memory ends anywhere in a monitor's life: refused or told of, and nothing is lost. */
TEST(memory_ends) {
    int n, i, refused = 0, told = 0, pending = 0;
    for (n = 1; !pending; n++) {
        amp_monitor_desc d = a_monitor(1);
        amp_monitor *monitor;
        amp_step_info info;
        training t;
        amp_result r;
        if (!training_begin(&t, counting_backend(0), NULL, NULL, NULL)) return;
        d.optimizer = t.optimizer;
        asked.cold = 1;
        sys.fail_alloc = n;
        r = amp_monitor_create(t.amp, &monitor, &d);
        refused += r != AMP_OK;
        CHECK(r == (monitor ? AMP_OK : AMP_ERR_MEMORY));
        for (i = 0; i < 200 && r == AMP_OK; i++) r = amp_monitor_phase(monitor, AMP_PHASE_FORWARD);
        pending = sys.fail_alloc > 0;
        if (monitor != NULL && !pending) {
            told++;
            CHECK(r == AMP_ERR_MEMORY && i > 60);
            training_grad(&t, 1);
            memset(&info, 0, sizeof info);
            CHECK_OK(amp_monitor_step(monitor, &info));
        }
        if (pending) CHECK_OK(r);
        amp_monitor_destroy(monitor);
        if (monitor != NULL && !pending) CHECK_EQ(disk_lines(), 1);
        training_end(&t);
    }
    CHECK(refused > 3 && told > 3);
}

/* The real thing: a device without room. */
TEST(full_device) {
    amp_desc d;
    amp_optimizer_desc od;
    amp_monitor_desc md = a_monitor(1);
    training t;
    FILE *full = fopen("/dev/full", "w");
    if (full == NULL) SKIP("no /dev/full");
    fclose(full);
    memset(&t, 0, sizeof t);
    memset(&d, 0, sizeof d);
    memset(&od, 0, sizeof od);
    d.logger.write = keep_log;
    CHECK_OK(amp_open(&t.amp, &d));
    t.param.name = "w";
    t.param.weight = amp_tensor1(t.weight, AMP_F32, 8);
    t.param.grad = amp_tensor1(t.grad, AMP_F32, 8);
    od.params = &t.param;
    od.n_params = 1;
    CHECK_OK(amp_param_register(t.amp, &t.param, 1));
    CHECK_OK(amp_optimizer_create(t.amp, &t.optimizer, &od));
    md.path = "/dev/full";
    md.optimizer = t.optimizer;
    CHECK_OK(amp_monitor_create(t.amp, &t.monitor, &md));
    CHECK_ERR(amp_monitor_write(t.monitor, "{}"), AMP_ERR_WRITE);
    CHECK(strstr(amp_last_error(), "/dev/full at offset 0: No space left on device; 3 bytes are kept") != NULL);
    memset(&logged, 0, sizeof logged);
    amp_monitor_destroy(t.monitor);
    CHECK_EQ(logs_of(AMP_ERR_WRITE), 1);
    amp_optimizer_destroy(t.optimizer);
    amp_close(t.amp);
}

/* ---- Refusals */

TEST(refusals) {
    training t;
    amp_monitor *other = (amp_monitor *)&t;
    amp_monitor_desc d, good;
    amp_step_info info;
    amp_step_record r = no_record;
    amp_context *amp;
    amp_scaler *scaler;
    double nan = ampi_f64_of_bits((uint64_t)0x7ff8 << 48);
    if (!training_begin(&t, NULL, a_scaler(10), NULL, NULL)) return;
    memset(&info, 0, sizeof info);
    memset(&good, 0, sizeof good);
    good.optimizer = t.optimizer;
    good.path = "metrics.jsonl";
    CHECK_ERR(amp_monitor_create(NULL, &other, &good), AMP_ERR_NULL);
    CHECK(other == NULL);
    CHECK_ERR(amp_monitor_create(t.amp, NULL, &good), AMP_ERR_NULL);
    CHECK_ERR(amp_monitor_create(t.amp, &other, NULL), AMP_ERR_NULL);
#define REFUSED(field, value, result) do { d = good; d.field = value; CHECK_ERR(amp_monitor_create(t.amp, &other, &d), result); CHECK(other == NULL); \
                                           CHECK(strstr(amp_last_error(), #field) != NULL); } while (0)
    REFUSED(optimizer, NULL, AMP_ERR_NULL);
    REFUSED(log_interval, -2, AMP_ERR_RANGE);
    REFUSED(memory_interval, -5, AMP_ERR_RANGE);
    REFUSED(cleanup_interval, -3, AMP_ERR_RANGE);
    REFUSED(memory_warning, -0.5, AMP_ERR_RANGE);
    REFUSED(memory_warning, 1.01, AMP_ERR_RANGE);
    REFUSED(memory_warning, nan, AMP_ERR_RANGE);
    REFUSED(nan_action, (amp_nan_action)5, AMP_ERR_RANGE);
    REFUSED(nan_action, (amp_nan_action)-1, AMP_ERR_RANGE);
    REFUSED(max_skips, -1, AMP_ERR_RANGE);
    REFUSED(epoch, -1, AMP_ERR_RANGE);
    REFUSED(path, "", AMP_ERR_RANGE);
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_OK(amp_scaler_create(amp, &scaler, NULL));
    REFUSED(scaler, scaler, AMP_ERR_CONFLICT);
    CHECK_ERR(amp_monitor_create(amp, &other, &good), AMP_ERR_CONFLICT);
    amp_scaler_destroy(scaler);
    amp_close(amp);
    CHECK_EQ(sys.opens, 0);
    sys.fail_open = 1;
    CHECK_ERR(amp_monitor_create(t.amp, &other, &good), AMP_ERR_OPEN);
    CHECK(strstr(amp_last_error(), "metrics.jsonl: Permission denied") != NULL);
    sys.fail_open = 0;
    good.append = 1;
    sys.fail_size = 1;
    CHECK_ERR(amp_monitor_create(t.amp, &other, &good), AMP_ERR_READ);
    sys.fail_size = 0;
    sys.fail_read = 1;
    strcpy(sys.data, "{");
    sys.size = 1;
    CHECK_ERR(amp_monitor_create(t.amp, &other, &good), AMP_ERR_READ);
    sys.fail_read = 0;
    sys.fail_from = sys.fail_to = sys.writes + 1;
    CHECK_ERR(amp_monitor_create(t.amp, &other, &good), AMP_ERR_WRITE);
    CHECK(other == NULL && sys.open == 0);

    CHECK_ERR(amp_monitor_phase(NULL, AMP_PHASE_DATA), AMP_ERR_NULL);
    CHECK_ERR(amp_monitor_phase(t.monitor, (amp_phase)5), AMP_ERR_RANGE);
    CHECK_ERR(amp_monitor_phase(t.monitor, (amp_phase)-1), AMP_ERR_RANGE);
    CHECK_ERR(amp_monitor_step(NULL, &info), AMP_ERR_NULL);
    CHECK_ERR(amp_monitor_step(t.monitor, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_monitor_step(t.monitor, &info), AMP_ERR_STATE);
    training_grad(&t, 1);
    CHECK_OK(amp_monitor_step(t.monitor, &info));
    CHECK_ERR(amp_monitor_step(t.monitor, &info), AMP_ERR_STATE);
    CHECK_EQ(amp_monitor_next(NULL, &r), 0);
    CHECK_EQ(amp_monitor_next(t.monitor, NULL), 0);
    CHECK_ERR(amp_monitor_flush(NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_monitor_epoch(NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_monitor_summary(NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_monitor_query(NULL, NULL), AMP_ERR_NULL);
    CHECK_EQ(amp_epoch_summary_text(NULL, NULL, 0), 0);
    amp_monitor_destroy(NULL);
    training_end(&t);
}

/* A file that cannot be synced or closed is told of; one that has no sync is not. */
TEST(sync_and_close) {
    amp_monitor_desc d = a_monitor(1);
    training t;
    if (!training_begin(&t, NULL, NULL, NULL, &d)) return;
    training_grad(&t, 1);
    CHECK_OK(training_info(&t, 1, 1));
    sys.fail_sync = -EIO;
    CHECK_ERR(amp_monitor_epoch(t.monitor, NULL), AMP_ERR_WRITE);
    training_grad(&t, 1);
    CHECK_OK(training_info(&t, 1, 1));
    sys.fail_sync = -EINVAL;
    CHECK_OK(amp_monitor_epoch(t.monitor, NULL));
    CHECK_EQ(disk_lines(), 4);
    sys.fail_close = -EIO;
    training_end(&t);
    CHECK(logged.id == 1214 && logged.count == 1);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(parser_is_strict);
    RUN(status_of_a_training);
    RUN(status_of_little);
    RUN(status_refuses);
    RUN(locale);
    RUN(cpu_telemetry);
    RUN(ranges);
    RUN(tracker);
    RUN(records);
    RUN(phases_add_up);
    RUN(intervals);
    RUN(steady_state);
    RUN(nobody_takes_records);
    RUN(settings_reach_it);
    RUN(anomaly);
    RUN(memory_warning);
    RUN(epochs);
    RUN(epoch_without_loss);
    RUN(disk_that_fails);
    RUN(disk_that_stays_full);
    RUN(append);
    RUN(lines_of_the_host);
    RUN(set_back);
    RUN(memory_ends);
    RUN(full_device);
    RUN(refusals);
    RUN(sync_and_close);
    return TEST_END();
}
