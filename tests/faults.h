/* faults.h - a set of system functions whose n-th allocation, file call, thread or clock reading fails, once or from then
 * on.  It also counts the blocks, bytes, open files and threads that are in use.  It is for tests.  Include amp.h and
 * test.h first.
 *
 *     faults_arm(&fault, n, FAULT_ONCE); ... calls ...; faults_disarm(); faults_check_balance();
 *
 * desc.system = *faults_system() puts it into a context.  Memory is filled with garbage when it is allocated and when it is
 * freed.  A block must be freed with the size with which it was allocated, and no byte behind it may have been written. */
#ifndef AMPT_FAULTS_H
#define AMPT_FAULTS_H

#include <errno.h>
#include <pthread.h>

typedef enum fault_kind {
    FAULT_ALLOC, FAULT_OPEN, FAULT_READ, FAULT_WRITE, FAULT_SIZE, FAULT_SYNC, FAULT_CLOSE, FAULT_RENAME, FAULT_REMOVE,
    FAULT_LIST, FAULT_THREAD, FAULT_JOIN, FAULT_DETACH, FAULT_CLOCK, FAULT_LOCK,
    FAULT_KINDS
} fault_kind;

typedef enum fault_effect {
    FAULT_ERROR,                    /* the call only returns -value (allocations: NULL) */
    FAULT_LATE_ERROR,               /* the call does its work, or a part of it, and returns -value: close, sync, list */
    FAULT_SHORT,                    /* one byte is read or written */
    FAULT_ZERO,                     /* no byte is read or written: the end of a file, or a full disk */
    FAULT_TIME                      /* the clock shows `value` */
} fault_effect;

typedef enum fault_style {
    FAULT_ONCE,                     /* the n-th call alone */
    FAULT_FROM,                     /* it and all that follow, until a function of amp.h returns an error */
    FAULT_FOREVER,                  /* the same, but the program stops at the first error and closes everything */
    FAULT_STYLES
} fault_style;

typedef struct fault { const char *name; fault_kind kind; fault_effect effect; int64_t value; amp_result wanted[3]; } fault;

/* Interruptions end after some calls. */
enum { FAULT_INTERRUPTIONS = 40 };

static struct {
    amp_system posix;
    const fault *armed;
    int64_t at, last;               /* calls of its kind that fail: at, up to last */
    int64_t calls[FAULT_KINDS], fired;
    int64_t blocks, bytes, files, threads;
    int64_t damaged;                /* blocks that were freed with another size, or written beyond their end */
    int paused;                     /* 1: calls are neither counted nor failed */
} faults;

static void faults_arm(const fault *f, int64_t n, fault_style style) {
    int again = style != FAULT_ONCE;
    memset(faults.calls, 0, sizeof faults.calls);
    faults.fired = 0;
    faults.at = n;
    faults.last = !again ? n : f->value == EINTR && f->effect == FAULT_ERROR ? n + FAULT_INTERRUPTIONS : INT64_MAX;
    __atomic_store_n(&faults.armed, f, __ATOMIC_SEQ_CST);
}
static void faults_disarm(void) { __atomic_store_n(&faults.armed, (const fault *)NULL, __ATOMIC_SEQ_CST); }
static __attribute__((unused)) void faults_pause(int on) { __atomic_store_n(&faults.paused, on, __ATOMIC_SEQ_CST); }
static __attribute__((unused)) int64_t faults_fired(void) { return __atomic_load_n(&faults.fired, __ATOMIC_SEQ_CST); }

/* The fault that this call meets, or NULL. */
static const fault *faults_meet(fault_kind kind) {
    const fault *f = __atomic_load_n(&faults.armed, __ATOMIC_SEQ_CST);
    int64_t n;
    if (__atomic_load_n(&faults.paused, __ATOMIC_SEQ_CST)) return NULL;
    n = __atomic_add_fetch(&faults.calls[kind], 1, __ATOMIC_SEQ_CST);
    if (f == NULL || f->kind != kind || n < faults.at || n > faults.last) return NULL;
    __atomic_add_fetch(&faults.fired, 1, __ATOMIC_SEQ_CST);
    return f;
}
static void faults_count(int64_t *what, int64_t n) { __atomic_add_fetch(what, n, __ATOMIC_SEQ_CST); }

/* In front of a block are its size and the allocator's pointer, and behind it are 16 known bytes. */
typedef struct fault_block { size_t size; void *start; } fault_block;
enum { FAULT_TAIL = 16, FAULT_TAIL_BYTE = 0xc3 };

static void *faults_alloc(void *user, size_t size, size_t align) {
    size_t front = align > sizeof(fault_block) ? align : sizeof(fault_block);
    char *start = faults_meet(FAULT_ALLOC) != NULL ? NULL : (char *)faults.posix.alloc(NULL, front + size + FAULT_TAIL, align < 16 ? 16 : align);
    fault_block block;
    (void)user;
    if (size == 0 || align == 0 || (align & (align - 1)) != 0 || align > 4096) faults_count(&faults.damaged, 1);
    if (start == NULL) return NULL;
    block.size = size;
    block.start = start;
    memcpy(start + front - sizeof block, &block, sizeof block);
    memset(start + front, 0xa5, size);
    memset(start + front + size, FAULT_TAIL_BYTE, FAULT_TAIL);
    faults_count(&faults.blocks, 1);
    faults_count(&faults.bytes, (int64_t)size);
    return start + front;
}

static void faults_free(void *user, void *ptr, size_t size) {
    fault_block block;
    size_t i;
    (void)user;
    memcpy(&block, (char *)ptr - sizeof block, sizeof block);
    if (block.size != size) faults_count(&faults.damaged, 1);
    for (i = 0; i < FAULT_TAIL; i++)
        if (((unsigned char *)ptr)[block.size + i] != FAULT_TAIL_BYTE) { faults_count(&faults.damaged, 1); break; }
    memset(ptr, 0x5a, block.size);
    faults_count(&faults.blocks, -1);
    faults_count(&faults.bytes, -(int64_t)block.size);
    faults.posix.free(NULL, block.start, 0);
}

/* ---- Files */

static int faults_open(void *user, const char *path, int for_writing, intptr_t *file) {
    const fault *f = faults_meet(FAULT_OPEN);
    int error = f != NULL ? -(int)f->value : faults.posix.file_open(NULL, path, for_writing, file);
    (void)user;
    if (error == 0) faults_count(&faults.files, 1);
    return error;
}
static int64_t faults_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    const fault *f = faults_meet(FAULT_READ);
    (void)user;
    if (f != NULL && f->effect == FAULT_ERROR) return -f->value;
    if (f != NULL) bytes = f->effect == FAULT_ZERO ? 0 : 1;
    return bytes == 0 ? 0 : faults.posix.file_read(NULL, file, buffer, bytes, offset);
}
static int64_t faults_write(void *user, intptr_t file, const void *buffer, size_t bytes, int64_t offset) {
    const fault *f = faults_meet(FAULT_WRITE);
    (void)user;
    if (f != NULL && f->effect == FAULT_ERROR) return -f->value;
    if (f != NULL) bytes = f->effect == FAULT_ZERO ? 0 : 1;
    return bytes == 0 ? 0 : faults.posix.file_write(NULL, file, buffer, bytes, offset);
}
static int64_t faults_size(void *user, intptr_t file) {
    const fault *f = faults_meet(FAULT_SIZE);
    (void)user;
    return f != NULL ? -f->value : faults.posix.file_size(NULL, file);
}
static int faults_sync(void *user, intptr_t file) {
    const fault *f = faults_meet(FAULT_SYNC);
    int error = f != NULL && f->effect == FAULT_ERROR ? 0 : faults.posix.file_sync(NULL, file);
    (void)user;
    return f != NULL ? -(int)f->value : error;
}
/* The descriptor is closed even if close returns an error: close(2). */
static int faults_close(void *user, intptr_t file) {
    const fault *f = faults_meet(FAULT_CLOSE);
    int error = faults.posix.file_close(NULL, file);
    (void)user;
    faults_count(&faults.files, -1);
    return f != NULL ? -(int)f->value : error;
}
static int faults_rename(void *user, const char *from, const char *to) {
    const fault *f = faults_meet(FAULT_RENAME);
    (void)user;
    return f != NULL ? -(int)f->value : faults.posix.file_rename(NULL, from, to);
}
static int faults_remove(void *user, const char *path) {
    const fault *f = faults_meet(FAULT_REMOVE);
    (void)user;
    return f != NULL ? -(int)f->value : faults.posix.file_remove(NULL, path);
}

typedef struct fault_list { const fault *f; int (*each)(void *, const char *); void *arg; int names; } fault_list;
static int faults_each(void *arg, const char *name) {
    fault_list *list = (fault_list *)arg;
    if (list->f != NULL && list->names++ == 2) return 1;        /* "." and ".." are two of them */
    return list->each(list->arg, name);
}
static int faults_list(void *user, const char *folder, int (*each)(void *arg, const char *name), void *arg) {
    fault_list list;
    int result;
    (void)user;
    list.f = faults_meet(FAULT_LIST);
    list.each = each; list.arg = arg; list.names = 0;
    if (list.f != NULL && list.f->effect == FAULT_ERROR) return -(int)list.f->value;
    result = faults.posix.file_list(NULL, folder, faults_each, &list);
    return list.f != NULL ? -(int)list.f->value : result;
}

/* ---- Threads and time */

static int faults_thread_start(void *user, void **thread, void (*run)(void *arg), void *arg) {
    const fault *f = faults_meet(FAULT_THREAD);
    int error = f != NULL ? -(int)f->value : faults.posix.thread_start(NULL, thread, run, arg);
    (void)user;
    if (error == 0) faults_count(&faults.threads, 1);
    return error;
}
static int faults_thread_join(void *user, void *thread) {
    const fault *f = faults_meet(FAULT_JOIN);
    int error = faults.posix.thread_join(NULL, thread);
    (void)user;
    faults_count(&faults.threads, -1);
    return f != NULL ? -(int)f->value : error;
}
static int faults_thread_detach(void *user, void *thread) {
    const fault *f = faults_meet(FAULT_DETACH);
    int error = faults.posix.thread_detach(NULL, thread);
    (void)user;
    faults_count(&faults.threads, -1);
    return f != NULL ? -(int)f->value : error;
}
static int64_t faults_clock(void *user) {
    const fault *f = faults_meet(FAULT_CLOCK);
    (void)user;
    return f == NULL ? faults.posix.clock_ns(NULL) : f->effect == FAULT_TIME ? f->value : faults.posix.clock_ns(NULL) + f->value;
}

/* Locks are not in the table of system functions.  Therefore functions of the same names replace the C library's. */
#if defined(__GLIBC__)
#include <dlfcn.h>
static void *faults_real(const char *name) {
    void *next = (void *)-1, *real;                 /* RTLD_NEXT, which <dlfcn.h> keeps for _GNU_SOURCE */
    real = dlsym(next, name);
    if (real == NULL) { printf("no %s\n", name); exit(1); }
    return real;
}
int pthread_mutex_init(pthread_mutex_t *lock, const pthread_mutexattr_t *attributes) {
    static int (*real)(pthread_mutex_t *, const pthread_mutexattr_t *);
    void *found = real == NULL ? faults_real("pthread_mutex_init") : NULL;
    if (found != NULL) memcpy(&real, &found, sizeof real);
    return faults_meet(FAULT_LOCK) != NULL ? EAGAIN : real(lock, attributes);
}
int pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes) {
    static int (*real)(pthread_cond_t *, const pthread_condattr_t *);
    void *found = real == NULL ? faults_real("pthread_cond_init") : NULL;
    if (found != NULL) memcpy(&real, &found, sizeof real);
    return faults_meet(FAULT_LOCK) != NULL ? EAGAIN : real(cond, attributes);
}
#endif

static const amp_system *faults_system(void) {
    static amp_system s;
    if (s.alloc != NULL) return &s;         /* workers may be using it */
    amp_system_default(&faults.posix);
    memset(&s, 0, sizeof s);
    s.alloc = faults_alloc;               s.free = faults_free;
    s.file_open = faults_open;            s.file_read = faults_read;
    s.file_write = faults_write;          s.file_size = faults_size;
    s.file_sync = faults_sync;            s.file_close = faults_close;
    s.file_rename = faults_rename;        s.file_remove = faults_remove;
    s.file_list = faults_list;            s.thread_start = faults_thread_start;
    s.thread_join = faults_thread_join;   s.thread_detach = faults_thread_detach;
    s.clock_ns = faults_clock;
    return &s;
}

/* ---- What may happen.  `wanted` has the results that a failing call may return.  If there are none, no call may fail. */

static const fault all_faults[] = {
    {"alloc",         FAULT_ALLOC,  FAULT_ERROR, ENOMEM, {AMP_ERR_MEMORY}},
    {"open EMFILE",   FAULT_OPEN,   FAULT_ERROR, EMFILE, {AMP_ERR_OPEN}},
    {"open EACCES",   FAULT_OPEN,   FAULT_ERROR, EACCES, {AMP_ERR_OPEN}},
    {"open EINTR",    FAULT_OPEN,   FAULT_ERROR, EINTR,  {AMP_OK}},
    {"read EIO",      FAULT_READ,   FAULT_ERROR, EIO,    {AMP_ERR_READ}},
    {"read EINTR",    FAULT_READ,   FAULT_ERROR, EINTR,  {AMP_OK}},
    {"read short",    FAULT_READ,   FAULT_SHORT, 0,      {AMP_OK}},
    {"read end",      FAULT_READ,   FAULT_ZERO,  0,      {AMP_ERR_READ, AMP_ERR_TRUNCATED, AMP_ERR_FORMAT}},
    {"size EIO",      FAULT_SIZE,   FAULT_ERROR, EIO,    {AMP_ERR_READ}},
    {"write ENOSPC",  FAULT_WRITE,  FAULT_ERROR, ENOSPC, {AMP_ERR_WRITE}},
    {"write EIO",     FAULT_WRITE,  FAULT_ERROR, EIO,    {AMP_ERR_WRITE}},
    {"write EINTR",   FAULT_WRITE,  FAULT_ERROR, EINTR,  {AMP_OK}},
    {"write short",   FAULT_WRITE,  FAULT_SHORT, 0,      {AMP_OK}},
    {"write nothing", FAULT_WRITE,  FAULT_ZERO,  0,      {AMP_ERR_WRITE}},
    {"sync EIO",      FAULT_SYNC,   FAULT_ERROR, EIO,    {AMP_ERR_WRITE}},
    {"sync ENOSPC",   FAULT_SYNC,   FAULT_LATE_ERROR, ENOSPC, {AMP_ERR_WRITE}},
    {"sync EINTR",    FAULT_SYNC,   FAULT_ERROR, EINTR,  {AMP_OK}},
    {"close ENOSPC",  FAULT_CLOSE,  FAULT_LATE_ERROR, ENOSPC, {AMP_ERR_WRITE}},
    {"close EINTR",   FAULT_CLOSE,  FAULT_LATE_ERROR, EINTR, {AMP_OK}},
    {"rename EACCES", FAULT_RENAME, FAULT_ERROR, EACCES, {AMP_ERR_WRITE}},
    {"remove EIO",    FAULT_REMOVE, FAULT_ERROR, EIO,    {AMP_OK}},
    {"list EACCES",   FAULT_LIST,   FAULT_ERROR, EACCES, {AMP_ERR_OPEN}},
    {"list half",     FAULT_LIST,   FAULT_LATE_ERROR, EIO, {AMP_ERR_OPEN}},
    {"thread EAGAIN", FAULT_THREAD, FAULT_ERROR, EAGAIN, {AMP_ERR_THREAD}},
    {"join EINVAL",   FAULT_JOIN,   FAULT_LATE_ERROR, EINVAL, {AMP_OK}},
    {"lock EAGAIN",   FAULT_LOCK,   FAULT_ERROR, EAGAIN, {AMP_ERR_THREAD}},
    {"clock 0",       FAULT_CLOCK,  FAULT_TIME,  0,      {AMP_OK}},
    {"clock -1",      FAULT_CLOCK,  FAULT_TIME,  -1,     {AMP_OK}},
    {"clock back",    FAULT_CLOCK,  FAULT_LATE_ERROR, -3600 * (int64_t)1000000000, {AMP_OK}},
    {"clock ahead",   FAULT_CLOCK,  FAULT_LATE_ERROR, 31536000 * (int64_t)1000000000, {AMP_OK}},
};
enum { ALL_FAULTS = sizeof all_faults / sizeof *all_faults };

static __attribute__((unused)) int fault_wants(const fault *f, amp_result r) {
    int i;
    for (i = 0; i < 3; i++)
        if (f->wanted[i] == r && r != AMP_OK) return 1;
    return 0;
}

/* Checks that everything has been freed and closed. */
static int faults_balanced(void) {
    return faults.blocks == 0 && faults.bytes == 0 && faults.files == 0 && faults.threads == 0 && faults.damaged == 0;
}
static __attribute__((unused)) void faults_forget(void) { faults.blocks = faults.bytes = faults.files = faults.threads = faults.damaged = 0; }

#endif
