/* soak.c - trains for a long time while memory, files and workers fail, and compares the result with an undisturbed run.
 *
 *     build/soak [--minutes 0.2] [--seed 1] [--record FILE]
 *
 * The disturbed run is the example trainer, in a process with a memory limit.  Allocations fail while it opens, steps,
 * validates and saves.  Reads and writes fail, are cut short or are interrupted, and the disk is full for some time.
 * Workers are slow, and some miss their time limit.  The process is terminated, and killed, and resumed with other numbers
 * of threads and workers.  After each fault, the call must have returned the right result, the existing checkpoint must be
 * unchanged, and the same call must succeed when it is repeated.  The gradients of some steps are infinite in both runs, so
 * both skip the same steps.
 *
 * At the end, both runs must have the same loss in every step and the same checkpoint at every interval, bit for bit.  The
 * metrics must have a line for every step.  Within each process, the heap (to the block), descriptors and threads must be
 * the same at the last checkpoint as at the first, and resident memory must not have grown. */
#include "trainer.h"
#include <malloc.h>
#include <sys/resource.h>

enum {
    SAVE_EVERY = 50, EVAL_EVERY = 350, OVERFLOW_EVERY = 211, AHEAD = 400, MOST_STEPS = 4000000,
    LIMIT_MIB = 768, LOG_EVERY = 10, FULL_DISK_STEPS = 30, WARM_CHECKPOINTS = 3
};

static const char run_flags[] =
    "soak --data %/text --shuffle on --steps 1000000000 --schedule constant --lr 1e-3 --warmup 20 --layers 1 --heads 2 "
    "--channels 16 --seq 16 --batch 2 --accumulation 2 --dropout 0.1 --precision fp16 --level O2 --growth-interval 150 "
    "--eval-batches 2 --nan-action recover --log-interval 10 --memory-log-interval off --sample 0 --timeout 0.25";

/* ---- Faults */

typedef enum fault {
    NO_FAULT, ALLOC_OPEN, ALLOC_STEP, ALLOC_EVAL, ALLOC_SAVE, FILE_SAVE, FULL_DISK, READ_ERROR, SLOW_WORKER, STUCK_WORKER,
    TERMINATED, KILLED, FAULTS
} fault;
static const char *const fault_names[FAULTS] = {
    "none", "allocation while opening", "allocation in a step", "allocation in a validation", "allocation in a save",
    "file error in a save", "full disk", "read error", "slow worker", "worker beyond the timeout", "SIGTERM", "SIGKILL"};

/* What the processes share. */
typedef struct common_ground {
    int64_t step, twin_step, last_step;     /* done; last_step 0: not known yet */
    int32_t stop;                   /* the time is over */
    int64_t fired[FAULTS], tried[FAULTS], short_reads, results[600];
    int64_t skips, sessions, retries, unequal, checkpoints, lines;
    int64_t peak_rss, peak_bytes, heap_first, heap_last, worst_growth, worst_growth_steps;
    int64_t failures;
    char first_failure[600];
    float loss[MOST_STEPS], twin_loss[MOST_STEPS];
    uint64_t state[MOST_STEPS / SAVE_EVERY], twin_state[MOST_STEPS / SAVE_EVERY];
} common_ground;

static common_ground *shared;
static char folder[1000];
static struct { double minutes; int64_t seed; const char *record; } flags = {0.2, 1, NULL};

/* The armed fault of this process.  Calls count down to it, in any thread. */
static struct { fault kind; int64_t countdown; int error; int32_t fired; } armed;
static int64_t heap_bytes, heap_blocks, reads;
static int is_twin, undisturbed;    /* undisturbed 1: no fault and no short read */
static run *current;

static void failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void failed(const char *format, ...) {
    va_list args;
    if (__atomic_fetch_add(&shared->failures, 1, __ATOMIC_SEQ_CST) > 0) return;
    va_start(args, format);
    vsnprintf(shared->first_failure, sizeof shared->first_failure, format, args);
    va_end(args);
}

static void arm(fault kind, int64_t countdown, int error) {
    armed.error = error;
    armed.fired = 0;
    __atomic_store_n(&armed.countdown, countdown, __ATOMIC_SEQ_CST);
    __atomic_store_n(&armed.kind, kind, __ATOMIC_SEQ_CST);
    shared->tried[kind]++;
}
/* 1: it happened. */
static int disarm(void) {
    fault kind = __atomic_exchange_n(&armed.kind, NO_FAULT, __ATOMIC_SEQ_CST);
    int fired = (int)__atomic_load_n(&armed.fired, __ATOMIC_SEQ_CST);
    if (fired) shared->fired[kind]++;
    return fired;
}
static int now(int is_kind) {
    if (!is_kind || __atomic_sub_fetch(&armed.countdown, 1, __ATOMIC_SEQ_CST) != 0) return 0;
    __atomic_store_n(&armed.fired, 1, __ATOMIC_SEQ_CST);
    return 1;
}
static fault armed_kind(void) { return __atomic_load_n(&armed.kind, __ATOMIC_SEQ_CST); }
static int allocation_fails(void) {
    fault kind = armed_kind();
    return now(kind == ALLOC_OPEN || kind == ALLOC_STEP || kind == ALLOC_EVAL || kind == ALLOC_SAVE);
}

/* ---- The calls that pass through here */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *ptr, size_t bytes);
int __real_posix_memalign(void **out, size_t align, size_t bytes);
void __real_free(void *ptr);
ssize_t __real_pread(int file, void *data, size_t bytes, off_t offset);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
amp_result __real_amp_step(amp_optimizer *optimizer, amp_scaler *scaler);
amp_result __real_amp_loader_create(amp_context *amp, amp_loader **out, const amp_loader_desc *desc);
amp_result __wrap_amp_loader_create(amp_context *amp, amp_loader **out, const amp_loader_desc *desc);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *ptr, size_t bytes);
int __wrap_posix_memalign(void **out, size_t align, size_t bytes);
void __wrap_free(void *ptr);
ssize_t __wrap_pread(int file, void *data, size_t bytes, off_t offset);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg);
amp_result __wrap_amp_step(amp_optimizer *optimizer, amp_scaler *scaler);
int __wrap_open(const char *path, int how, ...);
ssize_t __wrap_pwrite(int file, const void *data, size_t bytes, off_t offset);
int __wrap_fsync(int file);
int __wrap_rename(const char *from, const char *to);

static void *counted(void *ptr) {
    if (ptr == NULL) return NULL;
    __atomic_add_fetch(&heap_bytes, (int64_t)malloc_usable_size(ptr), __ATOMIC_RELAXED);
    __atomic_add_fetch(&heap_blocks, 1, __ATOMIC_RELAXED);
    return ptr;
}
static void uncount(void *ptr) {
    if (ptr == NULL) return;
    __atomic_sub_fetch(&heap_bytes, (int64_t)malloc_usable_size(ptr), __ATOMIC_RELAXED);
    __atomic_sub_fetch(&heap_blocks, 1, __ATOMIC_RELAXED);
}
void *__wrap_malloc(size_t bytes) { return allocation_fails() ? NULL : counted(__real_malloc(bytes)); }
void *__wrap_calloc(size_t n, size_t bytes) { return allocation_fails() ? NULL : counted(__real_calloc(n, bytes)); }
void *__wrap_realloc(void *ptr, size_t bytes) {
    int64_t before = ptr != NULL ? (int64_t)malloc_usable_size(ptr) : 0;
    void *moved = allocation_fails() ? NULL : __real_realloc(ptr, bytes);
    if (moved == NULL) return NULL;
    __atomic_add_fetch(&heap_bytes, (int64_t)malloc_usable_size(moved) - before, __ATOMIC_RELAXED);
    __atomic_add_fetch(&heap_blocks, ptr == NULL, __ATOMIC_RELAXED);
    return moved;
}
int __wrap_posix_memalign(void **out, size_t align, size_t bytes) {
    int error = allocation_fails() ? ENOMEM : __real_posix_memalign(out, align, bytes);
    if (error == 0) counted(*out);
    return error;
}
void __wrap_free(void *ptr) { uncount(ptr); __real_free(ptr); }

/* 1: this call of the file layer fails. */
static int file_fails(void) {
    if (!now(armed_kind() == FILE_SAVE)) return 0;
    errno = armed.error;
    return 1;
}
int __wrap_open(const char *path, int how, ...) {
    if ((how & (O_WRONLY | O_RDWR)) == 0) return __real_open(path, how);
    return file_fails() ? -1 : __real_open(path, how, 0666);
}
ssize_t __wrap_pwrite(int file, const void *data, size_t bytes, off_t offset) {
    if (armed_kind() == FULL_DISK) {                    /* a part still fits, then nothing does */
        armed.fired = 1;
        if (armed.countdown-- > 0 && bytes > 1) return __real_pwrite(file, data, bytes / 2, offset);
        errno = ENOSPC;
        return -1;
    }
    return file_fails() ? -1 : __real_pwrite(file, data, bytes, offset);
}
int __wrap_fsync(int file) { return file_fails() ? -1 : __real_fsync(file); }
int __wrap_rename(const char *from, const char *to) { return file_fails() ? -1 : __real_rename(from, to); }

/* Some reads are always short, or interrupted. */
ssize_t __wrap_pread(int file, void *data, size_t bytes, off_t offset) {
    int64_t n = __atomic_add_fetch(&reads, 1, __ATOMIC_RELAXED);
    fault kind = armed_kind();
    struct timespec wait = {0, 3000000};
    if (undisturbed) return __real_pread(file, data, bytes, offset);
    if (now(kind == READ_ERROR)) { errno = EIO; return -1; }
    if (now(kind == STUCK_WORKER)) wait.tv_nsec = 600000000;
    else if (kind == SLOW_WORKER) armed.fired = 1;
    else wait.tv_nsec = 0;
    if (wait.tv_nsec > 0) nanosleep(&wait, NULL);
    if (n % 7 == 0) { __atomic_add_fetch(&shared->short_reads, 1, __ATOMIC_RELAXED); errno = EINTR; return -1; }
    if (n % 5 == 0 && bytes > 1) { __atomic_add_fetch(&shared->short_reads, 1, __ATOMIC_RELAXED); bytes = bytes / 2; }
    return __real_pread(file, data, bytes, offset);
}
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg) {
    return allocation_fails() ? EAGAIN : __real_pthread_create(thread, attr, start, arg);
}
/* A cache that holds a third of the text, so that samples are read from their file all the time. */
amp_result __wrap_amp_loader_create(amp_context *amp, amp_loader **out, const amp_loader_desc *desc) {
    amp_loader_desc d = *desc;
    d.cache_mb = 1;
    return __real_amp_loader_create(amp, out, &d);
}

/* Some steps' gradients overflow, in both runs. */
amp_result __wrap_amp_step(amp_optimizer *optimizer, amp_scaler *scaler) {
    if ((current->step + 1) % OVERFLOW_EVERY == 0) {
        const amp_tensor *grad = &current->model.params[(current->step + 1) / OVERFLOW_EVERY % current->model.n_params].grad;
        ((float *)grad->data)[0] = INFINITY;
    }
    return __real_amp_step(optimizer, scaler);
}

/* ---- What a process holds */

static int64_t entries_of(const char *pattern) {
    glob_t found;
    int64_t n = 0;
    if (glob(pattern, 0, NULL, &found) == 0) n = (int64_t)found.gl_pathc;
    globfree(&found);
    return n;
}
static int64_t resident_bytes(void) {
    FILE *f = fopen("/proc/self/statm", "r");
    long long size = 0, resident = 0;
    if (f == NULL) return 0;
    if (fscanf(f, "%lld %lld", &size, &resident) != 2) resident = 0;
    fclose(f);
    return (int64_t)resident * (int64_t)sysconf(_SC_PAGESIZE);
}
typedef struct holdings { int64_t step, bytes, blocks, allocated, files, threads, rss; } holdings;
static holdings holdings_now(const run *r) {
    amp_memory_info memory;
    holdings h;
    memset(&memory, 0, sizeof memory);
    if (amp_memory(r->amp, &memory) != AMP_OK) failed("memory: %s", ex_error());
    h.step = r->step;
    h.allocated = memory.allocated;
    h.bytes = heap_bytes; h.blocks = heap_blocks;
    h.files = entries_of("/proc/self/fd/*");
    h.threads = entries_of("/proc/self/task/*");
    h.rss = resident_bytes();
    if (h.rss > shared->peak_rss) shared->peak_rss = h.rss;
    if (h.bytes > shared->peak_bytes) shared->peak_bytes = h.bytes;
    return h;
}

/* The allocator gives a block up to 32 bytes more than was asked for.
   A leak of one allocation a step would be 64 bytes a step at least; the loader's cache of 1 MiB fills by and
   by, and two heap tops of 128 KiB may be in the way. */
static void compare_holdings(const holdings *first, const holdings *last) {
    int64_t growth = last->rss - first->rss, steps = last->step - first->step;
    if (last->blocks != first->blocks || last->allocated != first->allocated || labs(last->bytes - first->bytes) > 32 * first->blocks)
        failed("heap: %lld bytes in %lld blocks at step %lld, %lld in %lld at step %lld", (long long)first->bytes,
               (long long)first->blocks, (long long)first->step, (long long)last->bytes, (long long)last->blocks, (long long)last->step);
    if (last->files != first->files || last->threads != first->threads)
        failed("%lld descriptors and %lld threads became %lld and %lld", (long long)first->files, (long long)first->threads,
               (long long)last->files, (long long)last->threads);
    if (growth > 64 * steps + (1 << 20) + 2 * 131072)
        failed("%lld bytes resident became %lld in %lld steps", (long long)first->rss, (long long)last->rss, (long long)steps);
    if (growth > shared->worst_growth) { shared->worst_growth = growth; shared->worst_growth_steps = steps; }
    shared->heap_first = first->bytes;
    shared->heap_last = last->bytes;
}

/* ---- A run, disturbed or not */

typedef struct session {
    run r;
    progress bar;
    amp_state *random;              /* the random state before a step */
    uint64_t seed;
    int64_t full_until;             /* the disk is full until this step */
    int64_t read_until;             /* a read that failed ahead of its batch is seen by this step */
    double stuck_until;             /* and a worker that is stuck, by this time */
    int64_t quiet;                  /* checkpoints since the process began */
    holdings first;
    char path[1100];                /* of the checkpoint */
} session;

static int64_t pick(session *s, int64_t n) { return random_below(&s->seed, n); }

/* 1: result is OK, or the armed fault fired and it is one of these.  Anything else is a failure. */
static int as_expected(amp_result result, int fired, amp_result a, amp_result b, const char *where) {
    if (result >= 0 && result < 600) shared->results[result]++;
    if (result == AMP_OK) return 1;
    if (!fired || (result != a && result != b)) failed("%s: %s", where, ex_error());
    return 0;
}

static const char *name_of(const char *name) {
    static char path[1100];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* The step has failed: what it had accumulated is dropped, and its batches and random numbers come again. */
static void take_back(session *s, amp_result why) {
    run *r = &s->r;
    amp_result result = AMP_OK;
    shared->retries++;
    if (why == AMP_ERR_MEMORY) result = answer_memory(r, &s->bar);
    else {
        result = amp_optimizer_set_accumulation(r->optimizer, (int32_t)r->set.accumulation);
        if (result == AMP_OK && r->epoch >= 0) result = amp_loader_seek(r->loader, r->epoch, r->index);
    }
    while (result == AMP_ERR_TIMEOUT && ex_seconds() < s->stuck_until) result = amp_loader_seek(r->loader, r->epoch, r->index);
    if (result == AMP_OK) result = amp_random_load(r->amp, s->random, "step");
    if (result != AMP_OK) failed("after a failed step: %s", ex_error());
}

static void note_loss(const run *r, float loss) {
    float *all = is_twin ? shared->twin_loss : shared->loss;
    uint32_t now_bits, then_bits;
    if (r->step >= MOST_STEPS) return;
    memcpy(&now_bits, &loss, 4);
    memcpy(&then_bits, &all[r->step], 4);
    if (then_bits != 0 && then_bits != now_bits) shared->unequal++;
    all[r->step] = loss;
}

/* A step may fail by its own fault, and by what a worker met while it read ahead. */
static int step_may_fail(const session *s, amp_result result, fault kind, int fired) {
    return (result == AMP_ERR_MEMORY && kind == ALLOC_STEP && fired) || (result == AMP_ERR_READ && s->r.step <= s->read_until) ||
           (result == AMP_ERR_TIMEOUT && ex_seconds() < s->stuck_until);
}

/* One step, with its fault; where that makes it fail, the same once more. */
static void soak_step(session *s, fault kind) {
    run *r = &s->r;
    float loss = 0;
    double lr = 0;
    amp_schedule schedule = schedule_of(r);
    amp_result result;
    int fired, tries;
    int64_t freed;
    ex_text[0] = 0;
    if (amp_schedule_lr(&schedule, r->step, &lr) != AMP_OK) failed("schedule: %s", ex_error());
    if (amp_random_save(r->amp, s->random, "step") != AMP_OK) failed("random numbers: %s", ex_error());
    if (kind == ALLOC_STEP) (void)amp_cleanup(r->amp, &freed);     /* so that there is something to allocate */
    if (kind != NO_FAULT) arm(kind, 1 + pick(s, kind == ALLOC_STEP ? 30 : 4), EIO);
    result = train_step(r, (float)lr, &loss, 1);
    fired = kind != NO_FAULT && disarm();
    if (fired && kind == READ_ERROR) s->read_until = r->step + 16;
    if (fired && kind == STUCK_WORKER) s->stuck_until = ex_seconds() + 30;
    for (tries = 0; result != AMP_OK && tries < 16 && step_may_fail(s, result, kind, fired && tries == 0); tries++) {
        if (result < 600) shared->results[result]++;
        take_back(s, result);
        result = train_step(r, (float)lr, &loss, 1);
    }
    if (result != AMP_OK) failed("step %lld, fault \"%s\": %s", (long long)r->step + 1, fault_names[kind], ex_error());
    r->step++;
    note_loss(r, loss);
    if (take_records(r, &s->bar) != AMP_OK) failed("records: %s", ex_error());
    if (r->anomaly[0] != 0) failed("%s", r->anomaly);
}

/* Files of a save that was cut short. */
static int64_t litter(const session *s) {
    char pattern[1200];
    snprintf(pattern, sizeof pattern, "%.*s*.tmp*", (int)(strlen(s->path) - strlen("state")), s->path);
    return entries_of(pattern);
}

/* A save with its fault: where it fails, the checkpoint is the one that was there, and the next save is right. */
static void soak_save(session *s, fault kind) {
    static const int errors[] = {ENOSPC, EIO, EACCES, EMFILE, EROFS, EDQUOT};
    run *r = &s->r;
    uint64_t before = hash_file(s->path), *states = is_twin ? shared->twin_state : shared->state, hash;
    amp_result result;
    int fired;
    if (metrics_tolerate(&r->metrics, amp_monitor_flush(r->monitor)) != AMP_OK || take_records(r, &s->bar) != AMP_OK) failed("records: %s", ex_error());
    if (kind != NO_FAULT) arm(kind, 1 + pick(s, kind == ALLOC_SAVE ? 150 : 10), errors[pick(s, 6)]);
    result = save_run(r);
    fired = (kind != NO_FAULT && disarm()) || armed_kind() == FULL_DISK;
    if (!as_expected(result, fired, kind == ALLOC_SAVE ? AMP_ERR_MEMORY : AMP_ERR_WRITE, AMP_ERR_OPEN, "save")) {
        uint64_t between = hash_file(s->path);
        if (litter(s) > 0) failed("a save that failed left a temporary file");
        if (armed_kind() == FULL_DISK && between != before) failed("the full disk changed the checkpoint");
        if (armed_kind() == FULL_DISK) return;
        (void)as_expected(save_run(r), 0, AMP_OK, AMP_OK, "the save once more");
        if (between != before && between != hash_file(s->path)) failed("a save that failed left another checkpoint");
    }
    hash = hash_file(s->path);
    if (r->step < MOST_STEPS) {
        uint64_t *place = &states[r->step / SAVE_EVERY];
        if (*place != 0 && *place != hash) shared->unequal++;
        *place = hash;
    }
}

static void soak_validation(session *s, fault kind) {
    double loss, again;
    amp_result result;
    int fired;
    if (kind != NO_FAULT) arm(kind, 1 + pick(s, 40), 0);
    result = evaluate(&s->r, &loss);
    fired = kind != NO_FAULT && disarm();
    if (!as_expected(result, fired, AMP_ERR_MEMORY, AMP_ERR_THREAD, "validation"))
        (void)as_expected(evaluate(&s->r, &loss), 0, AMP_OK, AMP_OK, "the validation once more");
    (void)as_expected(evaluate(&s->r, &again), 0, AMP_OK, AMP_OK, "the validation again");
    if (memcmp(&loss, &again, sizeof loss) != 0) failed("two validations of a model: %.17g and %.17g", loss, again);
}

/* The fault of a step: one in ten has one. */
static fault next_fault(session *s) {
    static const fault kinds[] = {ALLOC_STEP, READ_ERROR, SLOW_WORKER, ALLOC_STEP, READ_ERROR, STUCK_WORKER};
    int64_t n;
    if (is_twin || armed_kind() == FULL_DISK || pick(s, 10) != 0) return NO_FAULT;
    n = pick(s, 60);
    return n == 0 ? STUCK_WORKER : kinds[n % 5];
}

static void checkpoint(session *s) {
    static const fault kinds[] = {NO_FAULT, ALLOC_SAVE, FILE_SAVE, FILE_SAVE, ALLOC_SAVE};
    fault kind = is_twin || armed_kind() == FULL_DISK ? NO_FAULT : kinds[pick(s, 5)];
    holdings h;
    int64_t freed;
    soak_save(s, kind);
    if (armed_kind() == FULL_DISK) return;
    shared->checkpoints += !is_twin;
    if (is_twin || s->quiet++ < WARM_CHECKPOINTS) return;
    amp_recovery_destroy(s->r.recovery);        /* pools, and one snapshot or two, are no leaks */
    s->r.recovery = NULL;
    if (open_recovery(&s->r) != AMP_OK || amp_cleanup(s->r.amp, &freed) != AMP_OK) failed("cleanup: %s", ex_error());
    h = holdings_now(&s->r);
    if (s->quiet == WARM_CHECKPOINTS + 1) s->first = h;
    compare_holdings(&s->first, &h);
}

/* The disk fills up now and then, and is emptied after some steps. */
static void fill_disk(session *s) {
    if (is_twin) return;
    if (armed_kind() == FULL_DISK && s->r.step >= s->full_until) {
        (void)disarm();
        if (amp_monitor_flush(s->r.monitor) != AMP_OK) failed("metrics after the full disk: %s", ex_error());
    } else if (armed_kind() == NO_FAULT && pick(s, 700) == 0) {
        arm(FULL_DISK, pick(s, 3), ENOSPC);
        s->full_until = s->r.step + 1 + pick(s, FULL_DISK_STEPS);
    }
}

static int time_to_end(const session *s) {
    if (is_twin) return __atomic_load_n(&shared->last_step, __ATOMIC_SEQ_CST) > 0 && s->r.step >= shared->last_step;
    return shared->stop || shared->failures > 0 || s->r.step >= MOST_STEPS - 1;
}

static void soak_loop(session *s) {
    while (!time_to_end(s) && !ex_stop_requested) {
        if (is_twin)
            while (s->r.step > shared->step + AHEAD && shared->last_step == 0) usleep(10000);
        fill_disk(s);
        soak_step(s, armed_kind() == FULL_DISK ? NO_FAULT : next_fault(s));
        __atomic_store_n(is_twin ? &shared->twin_step : &shared->step, s->r.step, __ATOMIC_SEQ_CST);
        if (s->r.step % EVAL_EVERY == 0) soak_validation(s, is_twin || armed_kind() == FULL_DISK ? NO_FAULT : ALLOC_EVAL);
        if (s->r.step % SAVE_EVERY == 0) checkpoint(s);
    }
    if (armed_kind() == FULL_DISK) (void)disarm();
    if (amp_monitor_flush(s->r.monitor) != AMP_OK || take_records(&s->r, &s->bar) != AMP_OK) failed("records: %s", ex_error());
    if (save_run(&s->r) != AMP_OK) failed("the last save: %s", ex_error());
    if (!is_twin) shared->skips = s->r.result.total_skips;
    if (!ex_stop_requested && !is_twin) __atomic_store_n(&shared->last_step, s->r.step, __ATOMIC_SEQ_CST);
}

/* Opens the run; the first time with allocations and threads failing. */
static int soak_open(session *s, int argc, char **argv) {
    settings set;
    amp_state *resumed = NULL;
    int attempt, fired;
    amp_result result;
    for (attempt = is_twin ? 3 : 0; attempt < 4; attempt++) {
        memset(flag_given.text, 0, sizeof flag_given.text);
        memset(flag_given.on_command_line, 0, sizeof flag_given.on_command_line);
        free(saved_options);
        saved_options = NULL;
        if (attempt < 3) arm(ALLOC_OPEN, 1 + pick(s, 250), 0);
        result = read_settings(argc, argv, &set, &resumed);
        if (result == AMP_OK) result = open_run(&s->r, &set, resumed);
        fired = attempt < 3 && disarm();
        amp_state_destroy(resumed);
        resumed = NULL;
        if (result == AMP_OK) return 1;
        if (!fired) failed("opening: %s", ex_error());
        close_run(&s->r);
    }
    return 0;
}

static void limit_memory(void) {
    struct rlimit limit = {(rlim_t)LIMIT_MIB << 20, (rlim_t)LIMIT_MIB << 20};
    if (setrlimit(RLIMIT_AS, &limit) != 0) failed("setrlimit: %s", strerror(errno));
}

/* A process: the twin from the start, or the disturbed run, from its checkpoint where there is one. */
static int soak_process(int resume, uint64_t seed) {
    static session s;
    words w = {0};
    char text[200];
    s.seed = seed;
    undisturbed = is_twin;
    if (!is_twin) limit_memory();
    output_into(name_of(is_twin ? "twin.log" : "log"));
    snprintf(s.path, sizeof s.path, "%s", name_of(is_twin ? "twin.state" : "model.state"));
    text_split(&w, folder, run_flags);
    text_split(&w, folder, is_twin ? "--out %/twin_out --save %/twin --metrics none" : "--out %/out --save %/model");
    snprintf(text, sizeof text, "--threads %d --workers %d", is_twin ? 1 : 1 + (int)pick(&s, 2), is_twin ? 1 : 1 + (int)pick(&s, 3));
    text_split(&w, folder, text);
    if (resume) text_split(&w, folder, "--resume %/model");
    ex_stop_install();
    current = &s.r;
    if (amp_state_create(&s.random, NULL) != AMP_OK || !soak_open(&s, w.n, w.word)) return 1;
    progress_open(&s.bar, s.r.steps);
    soak_loop(&s);
    close_run(&s.r);
    amp_state_destroy(s.random);
    return ex_stop_requested ? 130 : 0;
}

/* ---- The process that watches */

static pid_t soak_start(int twin, int resume, uint64_t seed) {
    pid_t pid;
    fflush(stdout);
    pid = fork();
    if (pid < 0) { perror("fork"); exit(2); }
    if (pid > 0) return pid;
    is_twin = twin;
    _exit(soak_process(resume, seed));
}

/* Waits until the process ends, or for some seconds; 1: it has ended. */
static int wait_for(pid_t pid, double seconds, int *status) {
    double until = ex_seconds() + seconds;
    while (waitpid(pid, status, WNOHANG) == 0) {
        if (ex_seconds() > until) return 0;
        usleep(20000);
    }
    return 1;
}

/* One process after the other, terminated or killed at random times, until the time is over. */
static void disturb(double until, uint64_t *seed) {
    for (;;) {
        double span = 2 + flags.minutes * 60 / 25 * (double)random_bits(seed) / 2147483648.0, left = until - ex_seconds();
        fault how = random_below(seed, 3) == 0 ? TERMINATED : KILLED;
        pid_t pid = soak_start(0, access(name_of("model.state"), F_OK) == 0, random_bits(seed));
        int status = 0, last = left <= span;
        shared->sessions++;
        if (wait_for(pid, last ? left : span, &status)) {
            failed("a process ended by itself with status %d at step %lld", status, (long long)shared->step);
            return;
        }
        if (last) __atomic_store_n(&shared->stop, 1, __ATOMIC_SEQ_CST);
        else kill(pid, how == KILLED ? SIGKILL : SIGTERM);
        if (!last) { shared->tried[how]++; shared->fired[how]++; }
        waitpid(pid, &status, 0);
        if (!last && how == TERMINATED && !(WIFEXITED(status) && WEXITSTATUS(status) == 130)) failed("SIGTERM ended it with status %d", status);
        if (last && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) failed("the last process ended with status %d", status);
        if (last || shared->failures > 0) return;
    }
}

TEST(disturbed_training_goes_on) {
    uint64_t seed = (uint64_t)flags.seed;
    double until = ex_seconds() + 60 * flags.minutes;
    pid_t twin = soak_start(1, 0, 1);
    int status = 0;
    disturb(until, &seed);
    if (shared->failures > 0) kill(twin, SIGKILL);
    waitpid(twin, &status, 0);
    CHECK_MSG(shared->failures == 0, "%lld, first: %s", (long long)shared->failures, shared->first_failure);
    CHECK_MSG(shared->failures > 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "the twin ended with status %d", status);
}

TEST(the_same_bits_as_its_twin) {
    int64_t i, unequal = 0, states = 0, compared = 0;
    for (i = 1; i <= shared->last_step; i++) unequal += memcmp(&shared->loss[i], &shared->twin_loss[i], 4) != 0;
    CHECK_MSG(unequal == 0, "%lld of %lld losses differ", (long long)unequal, (long long)shared->last_step);
    for (i = 1; i <= shared->last_step / SAVE_EVERY; i++) {
        if (shared->state[i] == 0) continue;            /* the disk was full */
        compared++;
        states += shared->state[i] != shared->twin_state[i];
    }
    CHECK_MSG(states == 0, "%lld of %lld checkpoints differ", (long long)states, (long long)compared);
    CHECK(shared->last_step > 0 && (compared > 0 || shared->last_step < 2 * SAVE_EVERY));
    CHECK_EQ(shared->unequal, 0);
    CHECK_EQ(shared->step, shared->last_step);
}

/* Every step that is to have a line of metrics has a whole one. */
TEST(no_line_is_missing) {
    char *seen = (char *)calloc((size_t)shared->last_step + 1, 1), line[4096];
    FILE *f = fopen(name_of("out/metrics.jsonl"), "r");
    int64_t i, missing = 0;
    CHECK(f != NULL && seen != NULL);
    while (f != NULL && seen != NULL && fgets(line, sizeof line, f) != NULL) {
        const char *at = strstr(line, "\"step\": ");
        int64_t step = at != NULL ? atoll(at + 8) : 0;
        if (strncmp(line, "{\"event\": \"step\"", 16) != 0 || !ends_with(line, "}\n")) continue;
        shared->lines++;
        if (step >= 1 && step <= shared->last_step) seen[step] = 1;
    }
    for (i = LOG_EVERY; i <= shared->last_step && seen != NULL; i += LOG_EVERY) missing += !seen[i];
    CHECK_MSG(missing == 0, "%lld of %lld", (long long)missing, (long long)shared->last_step / LOG_EVERY);
    if (f != NULL) fclose(f);
    free(seen);
}

TEST(every_fault_happened) {
    int kind;
    for (kind = ALLOC_OPEN; kind < FAULTS; kind++)
        CHECK_MSG(shared->fired[kind] > 0 || flags.minutes < 1, "%s never did", fault_names[kind]);
    CHECK_MSG(shared->skips >= shared->last_step / OVERFLOW_EVERY, "%lld of %lld steps were skipped", (long long)shared->skips,
              (long long)shared->last_step);
}

static void write_record(double seconds) {
    FILE *f = fopen(flags.record, "w");
    int i, more = 0;
    if (f == NULL) { perror(flags.record); return; }
    record_head(f, "soak", "make soak");
    fprintf(f, " \"seed\": %lld, \"minutes\": %g, \"seconds\": %.0f, \"processes\": %lld, \"limit_mib\": %d,\n \"steps\": %lld, \"checkpoints\": %lld, \"faults\": {",
            (long long)flags.seed, flags.minutes, seconds, (long long)shared->sessions, LIMIT_MIB, (long long)shared->last_step, (long long)shared->checkpoints);
    for (i = ALLOC_OPEN; i < FAULTS; i++) fprintf(f, "%s\"%s\": %lld", i > ALLOC_OPEN ? ", " : "", fault_names[i], (long long)shared->fired[i]);
    fprintf(f, "},\n \"short_or_interrupted_reads\": %lld, \"skipped_steps\": %lld, \"steps_done_again_after_a_fault\": %lld,\n \"results\": {",
            (long long)shared->short_reads, (long long)shared->skips, (long long)shared->retries);
    for (i = 1; i < 600; i++)
        if (shared->results[i] > 0) fprintf(f, "%s\"AMP%04d\": %lld", more++ ? ", " : "", i, (long long)shared->results[i]);
    fprintf(f, "},\n \"losses_equal_to_the_twin\": %s, \"checkpoints_equal_to_the_twin\": %s, \"metric_lines_missing\": %s,\n",
            ampt.failed ? "\"see failed\"" : "true", ampt.failed ? "\"see failed\"" : "true", ampt.failed ? "\"see failed\"" : "0");
    fprintf(f, " \"heap_bytes_first\": %lld, \"heap_bytes_last\": %lld, \"resident_bytes_peak\": %lld, \"resident_growth_worst\": {\"bytes\": %lld, \"steps\": %lld},\n",
            (long long)shared->heap_first, (long long)shared->heap_last, (long long)shared->peak_rss, (long long)shared->worst_growth, (long long)shared->worst_growth_steps);
    fprintf(f, " \"failed\": %d}\n", ampt.failed);
    fclose(f);
}

static void write_text(void) {
    FILE *f = fopen(name_of("text"), "w");
    uint64_t seed = 7;
    int i;
    if (f == NULL) { perror(folder); exit(2); }
    for (i = 0; i < 3 << 20; i++) fputc(97 + (int)random_below(&seed, 4) + (i % 7 == 0 ? 8 : 0), f);
    fclose(f);
}

int main(int argc, char **argv) {
    const char *tmp = getenv("TMPDIR");
    double began = ex_seconds();
    char command[1200];
    int i, code;
    TEST_BEGIN(argc, argv);
    for (i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--minutes") == 0) flags.minutes = atof(argv[i + 1]);
        if (strcmp(argv[i], "--seed") == 0) flags.seed = atoll(argv[i + 1]);
        if (strcmp(argv[i], "--record") == 0) flags.record = argv[i + 1];
    }
    snprintf(folder, sizeof folder, "%.900s/amp_soak_XXXXXX", tmp ? tmp : "/tmp");
    if (mkdtemp(folder) == NULL) { perror(folder); return 2; }
    write_text();
    shared = (common_ground *)shared_memory(sizeof *shared);
    RUN(disturbed_training_goes_on);
    RUN(the_same_bits_as_its_twin);
    RUN(no_line_is_missing);
    RUN(every_fault_happened);
    for (i = ALLOC_OPEN; i < FAULTS; i++) printf("%lld of %lld %s, ", (long long)shared->fired[i], (long long)shared->tried[i], fault_names[i]);
    printf("%lld steps in %lld processes\n", (long long)shared->last_step, (long long)shared->sessions);
    if (flags.record != NULL) write_record(ex_seconds() - began);
    if (ampt.failed) {
        snprintf(command, sizeof command, "tail -n 5 '%s/log'", folder);
        fflush(stdout);
        if (system(command) != 0) printf("no log\n");
    }
    code = TEST_END();
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) != 0 || code;
}
