/* example.h - what every program here begins with: results and their text, the output, signals, folders, a device.
 *
 * ex_fail and ex_error: an error's text, amp.h's or the program's own; EX_TRY returns it.  ex_begin: first in main.
 * ex_device_open: a context on "cpu", "cuda:1" or "auto".  ex_stop_requested: after Ctrl-C.  ex_normal: random
 * numbers. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include "../amp.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#if defined(_WIN32)
#  include "on_windows.h"
#else
#  include <glob.h>
#  include <langinfo.h>
#  include <sys/ioctl.h>
#endif

/* Leaves the calling function with the first result that is not AMP_OK. */
#define EX_TRY(call) do { amp_result try_result = (call); if (try_result != AMP_OK) return try_result; } while (0)

static char ex_text[512];

/* Sets what ex_error returns, for failures that are not amp.h's. */
static inline amp_result ex_fail(amp_result result, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline amp_result ex_fail(amp_result result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(ex_text, sizeof ex_text, format, args);
    va_end(args);
    return result;
}

/* Why the last call failed. */
static inline const char *ex_error(void) { return ex_text[0] != 0 ? ex_text : amp_last_error(); }

/* A copy of the last error's text, to follow a flag's name. */
static inline const char *ex_because(char why[400]) {
    snprintf(why, 400, "%.399s", ex_error());
    return why;
}

/* Place of `text` in a list "a b c"; -1 if it is not there. */
static inline int ex_word_place(const char *words, const char *text) {
    size_t length = strlen(text);
    int place;
    for (place = 0; words != NULL; place++) {
        if (strncmp(words, text, length) == 0 && (words[length] == ' ' || words[length] == 0) && length > 0)
            return place;
        words = strchr(words, ' ');
        if (words != NULL) words++;
    }
    return -1;
}

/* ---- Numbers from a command line.  1 if the whole text is one from `lowest` to `highest`, which *out becomes. */

static inline int ex_integer(const char *text, int64_t lowest, int64_t highest, int64_t *out) {
    char *end;
    long long value;
    errno = 0;
    value = strtoll(text, &end, 10);
    if (end == text || *end != 0 || errno == ERANGE || value < lowest || value > highest) return 0;
    *out = value;
    return 1;
}
static inline int ex_number(const char *text, double lowest, double highest, double *out) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != 0 || !amp_is_finite_f64(&value) || value < lowest || value > highest) return 0;
    *out = value;
    return 1;
}

/* ---- Output, signals, folders */

static inline double ex_seconds(void) {
    amp_system s;
    amp_system_default(&s);
    return 1e-9 * (double)s.clock_ns(s.user);
}

/* Fails the program if its output was not written, as on a full disk. */
static inline void ex_check_output(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return;
    fprintf(stderr, "standard output could not be written\n");
    _exit(1);
}

#if !defined(_WIN32)
/* Opens closed standard descriptors on /dev/null, so that no file gets their numbers and the printed text; a limit on
   file sizes (ulimit -f) becomes a write error instead of a signal. */
static inline void ex_system_begin(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd < 3);
    if (fd >= 0) close(fd);
    signal(SIGXFSZ, SIG_IGN);
}

/* Handles the signals that ask a program to end: Ctrl-C, kill, and, unless nohup is used, a closed terminal. */
static inline void ex_on_ending_signals(void (*handler)(int), int flags) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action, before;
    int i;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = flags;
    for (i = 0; i < 3; i++)
        if (numbers[i] != SIGHUP || (sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN))
            sigaction(numbers[i], &action, NULL);
}

static inline int ex_folder_new(const char *path) { return mkdir(path, 0777); }
static inline void ex_host_name(char *name, size_t size) { (void)gethostname(name, size - 1); }
/* 1 unless no process has this number. */
static inline int ex_process_runs(long pid) { return kill((pid_t)pid, 0) == 0 || errno != ESRCH; }
static inline void ex_sleep(double seconds) {
    struct timespec nap;
    nap.tv_sec = (time_t)seconds;
    nap.tv_nsec = (long)((seconds - (double)nap.tv_sec) * 1e9);
    nanosleep(&nap, NULL);
}
/* Columns and rows of the terminal, or 0. */
static inline int ex_terminal(int *rows) {
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return *rows = 0;
    *rows = size.ws_row;
    return size.ws_col;
}
static inline int ex_terminal_is_utf8(void) { return strcmp(nl_langinfo(CODESET), "UTF-8") == 0; }
#endif

/* Called first in main. */
static inline void ex_begin(void) {
    ex_system_begin();
    atexit(ex_check_output);
}

/* The first signal asks the program to stop when it is ready; the second ends it at once.  Installed once there is
   something to save: before that, the first one ends it. */
static volatile sig_atomic_t ex_stop_requested;
static inline void ex_stop_on_signal(int signal_number) { (void)signal_number; ex_stop_requested = 1; }
static inline void ex_stop_install(void) { ex_on_ending_signals(ex_stop_on_signal, (int)SA_RESETHAND); }

/* Makes the folder of path, and those above it. */
static inline amp_result ex_folder_make(const char *path) {
    char part[PATH_MAX];
    struct stat info;
    size_t i;
    if (strlen(path) >= sizeof part) return ex_fail(AMP_ERR_OPEN, "%.60s...: the path is too long", path);
    for (i = 0; path[i] != 0; i++) {
        part[i] = path[i];
        part[i + 1] = 0;
        if (path[i] != '/' || i == 0 || path[i - 1] == ':') continue;        /* "C:" is a volume */
        part[i] = 0;
        if (ex_folder_new(part) != 0 && errno != EEXIST)
            return ex_fail(AMP_ERR_OPEN, "%s: %s", part, strerror(errno));
        if (stat(part, &info) == 0 && !S_ISDIR(info.st_mode))
            return ex_fail(AMP_ERR_OPEN, "%s: %s", part, strerror(ENOTDIR));
        part[i] = '/';
    }
    return AMP_OK;
}

/* 1 for "@HOST-" and 16 digits if HOST is this machine, and for "", as older versions wrote. */
static inline int ex_made_here(const char *text) {
    char host[32] = "";
    size_t n;
    if (*text == 0) return 1;
    ex_host_name(host, sizeof host);
    n = strcspn(host, "/");
    return *text == '@' && strncmp(text + 1, host, n) == 0 && text[1 + n] == '-' &&
           strspn(text + 2 + n, "0123456789abcdef") == 16 && text[18 + n] == 0;
}

static inline int ex_remove_if_unfinished(void *path, const char *name) {
    const char *slash = strrchr((const char *)path, '/'), *base = slash != NULL ? slash + 1 : (const char *)path;
    size_t n = strlen(base);
    char full[PATH_MAX], *end;
    long pid;
    if (strncmp(name, base, n) != 0 || strncmp(name + n, ".tmp", 4) != 0) return 0;
    pid = strtol(name + n + 4, &end, 10);
    if (pid <= 0 || !ex_made_here(end) || ex_process_runs(pid)) return 0;
    if (snprintf(full, sizeof full, "%.*s%s", (int)(base - (const char *)path), (const char *)path, name) < PATH_MAX)
        unlink(full);
    return 0;
}

/* Removes PATH.tmpPID@HOST-RANDOM, left by a process killed in amp_file_write_atomic, if HOST is this machine and PID
   no longer runs. */
static inline void ex_remove_unfinished(const char *path) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    amp_system s;
    amp_system_default(&s);
    snprintf(folder, sizeof folder, "%.*s",
             slash == NULL   ? 1
             : slash == path ? 1
                             : (int)(slash - path),
             slash == NULL ? "." : path);
    (void)s.file_list(s.user, folder, ex_remove_if_unfinished, (void *)(uintptr_t)path);
}

/* Writes a whole file or, if that fails, none; before, removes what killed processes left of it. */
static inline amp_result ex_file_write(const char *path, const void *bytes, size_t size) {
    ex_remove_unfinished(path);
    return amp_file_write_atomic(NULL, path, bytes, size);
}

/* ---- The device, and random numbers */

/* Opens a context on "cpu", "cuda" or "cuda:1" and so on; "auto": on the first GPU if this build and this machine have
   one.  A build has CUDA if it was compiled with -DUSE_CUDA and linked with amp_cuda.o. */
static inline amp_result ex_device_open(amp_context **amp, amp_desc *desc, const char *device) {
    int any = strcmp(device, "auto") == 0;
    char *end = NULL;
    long index = 0;
    if (strncmp(device, "cuda:", 5) == 0) index = strtol(device + 5, &end, 10);
    if (end != NULL ? end == device + 5 || *end != 0 || index < 0 || index > INT_MAX
                    : !any && strcmp(device, "cuda") != 0 && strcmp(device, "cpu") != 0)
        return ex_fail(AMP_ERR_NAME, "must be auto, cpu, cuda or cuda:1 and so on");
    if (strcmp(device, "cpu") == 0) return amp_open(amp, desc);
#if defined(USE_CUDA)
    desc->backend = amp_cuda();
    desc->device = (int32_t)index;
    if (amp_open(amp, desc) == AMP_OK) return AMP_OK;
    if (!any) return ex_fail(AMP_ERR_DEVICE, "%s", amp_last_error());
    fprintf(stderr, "this runs on the CPU, because no GPU can be used: %s\n", amp_last_error());
    desc->backend = NULL;
#else
    if (!any)
        return ex_fail(AMP_ERR_NAME, "this build has the CPU only: compile with -DUSE_CUDA and link amp_cuda.o");
#endif
    return amp_open(amp, desc);
}

/* Independent standard normal numbers: Box & Muller 1958, from counter-based words, so reproducible. */
static inline void ex_normal(float *out, int64_t n, uint64_t seed, uint64_t stream, float deviation) {
    int64_t i;
    for (i = 0; i < n; i += 2) {
        uint32_t words[4];
        double radius, angle;
        amp_philox(seed, stream, (uint64_t)i / 2, words);
        radius = deviation * sqrt(-2 * log(((double)words[0] + 1) / 4294967296.0));
        angle = 6.28318530717958647692 * ((double)words[1] / 4294967296.0);
        out[i] = (float)(radius * cos(angle));
        if (i + 1 < n) out[i + 1] = (float)(radius * sin(angle));
    }
}

/* Index of the largest number. */
static inline int64_t ex_largest(const float *x, int64_t n) {
    int64_t i, best = 0;
    for (i = 1; i < n; i++) if (x[i] > x[best]) best = i;
    return best;
}

#endif
