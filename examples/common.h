/* common.h - code the examples share: a GPT-2 on amp.h's tape (gpt.h), its files, and the other parts of a training
 * program.  Of BERT and its family: encoder.h and encoder_files.h.
 *
 *     1 errors, flags, device        5 model files                    9 the tokenizer of BERT
 *     2 progress, metrics, profile   6 sampling
 *     3 JSON and safetensors         7 pictures in IDX files (MNIST)
 *     4 parameters, GPT-2 (gpt.h)    8 the tokenizer of GPT-2
 *
 * Nothing to compile: an example defines AMP_IMPLEMENTATION, includes amp.h and then this file. */
#ifndef EXAMPLES_COMMON_H
#define EXAMPLES_COMMON_H

#include "../amp.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ==== 1 Errors, flags, time, signals, device ===================================================== */

/* Leaves the calling function with the first result that is not AMP_OK. */
#define TRY(call) do { amp_result try_result = (call); if (try_result != AMP_OK) return try_result; } while (0)

static char example_text[512];

/* Sets what example_error returns, for failures that are not amp.h's. */
static inline amp_result example_fail(amp_result result, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline amp_result example_fail(amp_result result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(example_text, sizeof example_text, format, args);
    va_end(args);
    return result;
}

/* Why the last call failed. */
static inline const char *example_error(void) { return example_text[0] != 0 ? example_text : amp_last_error(); }

/* ---- Flags: one table of a program drives parsing, checking and --help */

typedef enum option_type { HEADING, TEXT, PATHS, CHOICE, INTEGER, NUMBER, SWITCH, SWITCH_TEXT, SETTING } option_type;

/* PATHS: two of them, kept as "first,second".  SWITCH_TEXT: a switch that may take a text, "--name=text".  SETTING: the
   key `words` of the amp_settings in the field, which says what is legal.
   words: what a CHOICE may be, or words with the numbers they stand for: "preset=0 none=-1". */
typedef struct option {
    const char *name;
    option_type type;
    size_t field;                   /* in settings: const char *, int64_t, double or amp_settings */
    const char *initial;
    double lowest, highest;
    const char *words, *help;
} option;

/* The flags of this program, which defines it with its table, its name and the texts of --help.  text: the values
   given on the command line or else in the program's other sources. */
enum { MOST_OPTIONS = 128 };
typedef struct program_flags {
    const char *program, *summary;
    const option *options;
    int n;
    const char *ending;             /* of --help */
    const char *text[MOST_OPTIONS];
    int on_command_line[MOST_OPTIONS];
    char pair[2 * PATH_MAX];        /* keeps the two paths of PATHS */
} program_flags;
static program_flags given;

static inline int option_index(const char *name) {
    int i;
    for (i = 0; i < given.n; i++)
        if (given.options[i].type != HEADING && strcmp(given.options[i].name, name) == 0) return i;
    return -1;
}
static inline int was_given(const char *name) { return given.on_command_line[option_index(name)]; }

/* Prints which of these flags were given without effect. */
static inline void print_without_effect(const char *const *names) {
    int i, n = 0;
    for (i = 0; names[i] != NULL; i++)
        if (was_given(names[i])) printf("%s--%s", n++ > 0 ? ", " : ", so no effect from ", names[i]);
}

/* Sets the error text "--name value: why". */
static inline amp_result refuse(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline amp_result refuse(const char *name, const char *format, ...) {
    char why[400];
    const char *text = given.text[option_index(name)];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return example_fail(AMP_ERR_RANGE, "--%s%s%.60s: %s", name, text ? " " : "", text ? text : "", why);
}

/* A copy of the last error's text, to follow a flag's name. */
static inline const char *because(char why[400]) {
    snprintf(why, 400, "%.399s", example_error());
    return why;
}

/* The number that `text` stands for in "auto=0 none=-1": 1 if it is one of the words. */
static inline int word_value(const char *words, const char *text, double *value) {
    size_t length = strlen(text);
    const char *at = words;
    while (at != NULL && *at != 0) {
        if (strncmp(at, text, length) == 0 && at[length] == '=') { *value = atof(at + length + 1); return 1; }
        at = strchr(at, ' ');
        if (at != NULL) at++;
    }
    return 0;
}

/* Place of `text` in a list "a b c"; -1 if it is not there. */
static inline int word_place(const char *words, const char *text) {
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

/* "0 to 9 or auto", what an INTEGER or NUMBER may be. */
static inline const char *legal_text(const option *o, char *text, size_t size) {
    int used = snprintf(text, size, "%.10g to %.10g", o->lowest, o->highest);
    const char *at = o->words;
    while (at != NULL && *at != 0) {
        used += snprintf(text + used, size - (size_t)used, " or %.*s", (int)strcspn(at, "="), at);
        at = strchr(at, ' ');
        if (at != NULL) at++;
    }
    return text;
}

static inline amp_result parse_number(const option *o, const char *text, double *value) {
    char *end = NULL, legal[128];
    double x;
    if (o->words != NULL && word_value(o->words, text, value)) return AMP_OK;
    errno = 0;
    x = o->type == INTEGER ? (double)strtoll(text, &end, 10) : strtod(text, &end);
    if (end == text || *end != 0 || !amp_is_finite_f64(&x) || (o->type == INTEGER && errno == ERANGE))
        return refuse(o->name, "is not a %s; must be %s", o->type == INTEGER ? "whole number" : "number",
                      legal_text(o, legal, sizeof legal));
    if (x < o->lowest || x > o->highest) return refuse(o->name, "must be %s", legal_text(o, legal, sizeof legal));
    *value = x;
    return AMP_OK;
}

static inline amp_result parse_option(int i, const char *text, void *set) {
    const option *o = &given.options[i];
    void *field = (char *)set + o->field;
    double value = 0;
    if (o->type == TEXT || o->type == PATHS || o->type == SWITCH_TEXT) memcpy(field, &text, sizeof text);
    if (o->type == CHOICE) {
        if (word_place(o->words, text) < 0) return refuse(o->name, "is not one of: %s", o->words);
        memcpy(field, &text, sizeof text);
    }
    if (o->type == SWITCH) *(int64_t *)field = strcmp(text, "on") == 0;
    if (o->type == SETTING && amp_settings_set((amp_settings *)field, o->words, text) != AMP_OK)
        return refuse(o->name, "%s", amp_last_error());
    if (o->type == INTEGER || o->type == NUMBER) {
        TRY(parse_number(o, text, &value));
        if (o->type == INTEGER) *(int64_t *)field = (int64_t)value;
        else *(double *)field = value;
    }
    return AMP_OK;
}

/* Letters to change, add or drop to turn a into b (Levenshtein). */
static inline int text_distance(const char *a, const char *b) {
    int row[64], i, j, n = (int)strlen(b);
    if (n > 60) return 99;
    for (j = 0; j <= n; j++) row[j] = j;
    for (i = 1; a[i - 1] != 0; i++) {
        int before = row[0];
        row[0] = i;
        for (j = 1; j <= n; j++) {
            int change = before + (a[i - 1] != b[j - 1]), least = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            before = row[j];
            row[j] = change < least ? change : least;
        }
    }
    return row[n];
}

static inline amp_result unknown_flag(const char *flag) {
    const char *closest = NULL;
    int i, best = strlen(flag) > 8 ? 4 : 3;
    for (i = 0; i < given.n; i++) {
        int distance = flag[0] != '-' || given.options[i].type == HEADING
                           ? 99
                           : text_distance(flag + strspn(flag, "-"), given.options[i].name);
        if (distance < best) { best = distance; closest = given.options[i].name; }
    }
    return example_fail(AMP_ERR_NAME, "unknown flag %.80s%s%s; --help lists all flags", flag,
                        closest ? ": did you mean --" : "", closest ? closest : "");
}

/* "--name value", "--name=value", "--name" for switches, "--name first second" for paths. */
static inline amp_result read_command_line(int argc, char **argv) {
    int i;
    for (i = 1; i < argc; i++) {
        char name[64];
        const char *equals = strchr(argv[i], '=');
        size_t length = equals != NULL ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        int at = -1;
        if (strncmp(argv[i], "--", 2) == 0 && length < sizeof name) {
            memcpy(name, argv[i] + 2, length - 2);
            name[length - 2] = 0;
            at = option_index(name);
        }
        if (strcmp(argv[i], "-h") == 0) at = option_index("help");
        if (at < 0) return unknown_flag(argv[i]);
        if (given.options[at].type == SWITCH || (given.options[at].type == SWITCH_TEXT && equals == NULL)) {
            if (equals != NULL) return example_fail(AMP_ERR_RANGE, "--%s takes no value", given.options[at].name);
            given.text[at] = "on";
        } else if (equals != NULL) given.text[at] = equals + 1;
        else if (given.options[at].type == PATHS) {
            if (i + 2 >= argc || strncmp(argv[i + 1], "--", 2) == 0 || strncmp(argv[i + 2], "--", 2) == 0)
                return example_fail(AMP_ERR_RANGE, "--%s takes two files; --help lists all flags",
                                    given.options[at].name);
            snprintf(given.pair, sizeof given.pair, "%.4000s,%.4000s", argv[i + 1], argv[i + 2]);
            given.text[at] = given.pair;
            i += 2;
        }
        else if (i + 1 < argc) given.text[at] = argv[++i];
        else
            return example_fail(AMP_ERR_RANGE, "--%s needs a value; --help lists all flags",
                                given.options[at].name);
        given.on_command_line[at] = 1;
    }
    return AMP_OK;
}

/* Writes all flags, as given or by default, into the program's settings. */
static inline amp_result parse_options(void *set) {
    int i;
    for (i = 0; i < given.n; i++)
        if (given.options[i].type != HEADING)
            TRY(parse_option(i, given.text[i] != NULL ? given.text[i] : given.options[i].initial, set));
    return AMP_OK;
}

static inline void print_help(void) {
    int i;
    printf("%s - %s\n\nusage: %s [--flag value ...]\n", given.program, given.summary, given.program);
    for (i = 0; i < given.n; i++) {
        const option *o = &given.options[i];
        char left[40], legal[128];
        if (o->type == HEADING) { printf("\n%s\n", o->name); continue; }
        snprintf(left, sizeof left, "--%s", o->name);
        printf("  %-18s %s\n", left, o->help);
        if (o->type == SWITCH) continue;
        printf("  %-18s   default %s", "", *o->initial != 0 ? o->initial : "empty");
        if (o->type == CHOICE) printf("; one of: %s", o->words);
        if (o->type == SETTING) printf("; in files: %s", o->words);
        if (o->type == INTEGER || o->type == NUMBER) printf("; %s", legal_text(o, legal, sizeof legal));
        printf("\n");
    }
    printf("\n%s\n", given.ending);
}

/* ---- Time, signals, folders, device */

static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Fails the program if its output was not written, as on a full disk. */
static inline void check_output(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return;
    fprintf(stderr, "standard output could not be written\n");
    _exit(1);
}

/* Called first in main.  Opens closed standard descriptors on /dev/null, so that no file gets their numbers and the
   printed text; a limit on file sizes (ulimit -f) becomes a write error instead of a signal. */
static inline void program_begin(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd < 3);
    if (fd >= 0) close(fd);
    signal(SIGXFSZ, SIG_IGN);
    atexit(check_output);
}

/* Handles the signals that ask a program to end: Ctrl-C, kill, and, unless nohup is used, a closed terminal. */
static inline void on_ending_signals(void (*handler)(int), int flags) {
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

/* The first signal asks the program to stop when it is ready; the second ends it at once.  Installed once there is
   something to save: before that, the first one ends it. */
static volatile sig_atomic_t stop_requested;
static inline void stop_on_signal(int signal_number) { (void)signal_number; stop_requested = 1; }
static inline void stop_install(void) { on_ending_signals(stop_on_signal, (int)SA_RESETHAND); }

/* Makes the folder of path, and those above it. */
static inline amp_result folder_make(const char *path) {
    char part[PATH_MAX];
    struct stat info;
    size_t i;
    if (strlen(path) >= sizeof part) return example_fail(AMP_ERR_OPEN, "%.60s...: the path is too long", path);
    for (i = 0; path[i] != 0; i++) {
        part[i] = path[i];
        part[i + 1] = 0;
        if (path[i] != '/' || i == 0) continue;
        part[i] = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return example_fail(AMP_ERR_OPEN, "%s: %s", part, strerror(errno));
        if (stat(part, &info) == 0 && !S_ISDIR(info.st_mode))
            return example_fail(AMP_ERR_OPEN, "%s: %s", part, strerror(ENOTDIR));
        part[i] = '/';
    }
    return AMP_OK;
}

/* 1 for "@HOST-" and 16 digits if HOST is this machine, and for "", as older versions wrote. */
static inline int made_here(const char *text) {
    char host[32] = "";
    size_t n;
    if (*text == 0) return 1;
    (void)gethostname(host, sizeof host - 1);
    n = strcspn(host, "/");
    return *text == '@' && strncmp(text + 1, host, n) == 0 && text[1 + n] == '-' &&
           strspn(text + 2 + n, "0123456789abcdef") == 16 && text[18 + n] == 0;
}

static inline int remove_if_unfinished(void *path, const char *name) {
    const char *slash = strrchr((const char *)path, '/'), *base = slash != NULL ? slash + 1 : (const char *)path;
    size_t n = strlen(base);
    char full[PATH_MAX], *end;
    long pid;
    if (strncmp(name, base, n) != 0 || strncmp(name + n, ".tmp", 4) != 0) return 0;
    pid = strtol(name + n + 4, &end, 10);
    if (pid <= 0 || !made_here(end) || kill((pid_t)pid, 0) == 0 || errno != ESRCH) return 0;
    if (snprintf(full, sizeof full, "%.*s%s", (int)(base - (const char *)path), (const char *)path, name) < PATH_MAX)
        unlink(full);
    return 0;
}

/* Removes PATH.tmpPID@HOST-RANDOM, left by a process killed in amp_file_write_atomic, if HOST is this machine and PID
   no longer runs. */
static inline void remove_unfinished(char *path) {
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    amp_system s;
    amp_system_default(&s);
    snprintf(folder, sizeof folder, "%.*s",
             slash == NULL   ? 1
             : slash == path ? 1
                             : (int)(slash - path),
             slash == NULL ? "." : path);
    (void)s.file_list(s.user, folder, remove_if_unfinished, path);
}

/* Opens a context on "cpu", "cuda" or "cuda:1" and so on; "auto": on the first GPU if this build and this machine have
   one.  A build has CUDA if it was compiled with -DUSE_CUDA and linked with amp_cuda.o. */
static inline amp_result device_open(amp_context **amp, amp_desc *desc, const char *device) {
    int any = strcmp(device, "auto") == 0;
    char *end = NULL;
    long index = 0;
    if (strncmp(device, "cuda:", 5) == 0) index = strtol(device + 5, &end, 10);
    if (end != NULL ? end == device + 5 || *end != 0 || index < 0 || index > INT_MAX
                    : !any && strcmp(device, "cuda") != 0 && strcmp(device, "cpu") != 0)
        return example_fail(AMP_ERR_NAME, "must be auto, cpu, cuda or cuda:1 and so on");
    if (strcmp(device, "cpu") == 0) return amp_open(amp, desc);
#if defined(USE_CUDA)
    desc->backend = amp_cuda();
    desc->device = (int32_t)index;
    if (amp_open(amp, desc) == AMP_OK) return AMP_OK;
    if (!any) return example_fail(AMP_ERR_DEVICE, "%s", amp_last_error());
    fprintf(stderr, "on the CPU, because no GPU can be used: %s\n", amp_last_error());
    desc->backend = NULL;
#else
    if (!any)
        return example_fail(AMP_ERR_NAME, "this build has only the CPU: compile with -DUSE_CUDA, link amp_cuda.o");
#endif
    return amp_open(amp, desc);
}

/* ==== 2 Progress line, metrics, profile ========================================================== */

/* On a terminal one line, redrawn; in a log file a plain line every `every` steps. */
typedef struct progress {
    int terminal, drawn;
    int64_t total, every;
} progress;

static inline void progress_open(progress *p, int64_t total) {
    memset(p, 0, sizeof *p);
    p->terminal = isatty(STDOUT_FILENO);
    p->total = total;
    p->every = total > 20 ? total / 20 : 1;
    if (!p->terminal) setvbuf(stdout, NULL, _IOLBF, 0);
}

/* Clears the line on the terminal, before something else is printed. */
static inline void progress_clear(progress *p) {
    if (p->drawn) printf("\r\033[K");
    p->drawn = 0;
}

static inline int progress_width(void) {
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 20) return 80;
    return size.ws_col;
}

/* Shows "[####....] text" for step of total; last 1: this was the last one. */
static inline void progress_show(progress *p, int64_t step, const char *text, int last) {
    enum { LONGEST = 30 };
    int columns = progress_width() - (int)strlen(text) - 4, length = columns < LONGEST ? columns : LONGEST, i;
    if (!p->terminal) {
        if (step % p->every == 0 || last) printf("%s\n", text);
        return;
    }
    printf("\r\033[K");
    if (length >= 5) {
        putchar('[');
        for (i = 0; i < length; i++) putchar(i * p->total < length * step ? '#' : '.');
        printf("] ");
    }
    printf("%.*s", progress_width() - 1, text);
    if (last) putchar('\n');
    p->drawn = !last;
    fflush(stdout);
}

/* "1:05" or "2:00:05". */
static inline void duration_text(double seconds, char *text, size_t size) {
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600) snprintf(text, size, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else snprintf(text, size, "%lld:%02lld", s / 60, s % 60);
}

/* 1234567 as "1,234,567". */
static inline const char *grouped(int64_t n, char *text, size_t size) {
    char digits[32];
    size_t length = (size_t)snprintf(digits, sizeof digits, "%lld", (long long)n), i, used = 0;
    for (i = 0; i < length && used + 2 < size; i++) {
        text[used++] = digits[i];
        if ((length - i) % 3 == 1 && i + 1 < length && digits[i] != '-') text[used++] = ',';
    }
    text[used] = 0;
    return text;
}

/* Length of the UTF-8 character at p, *code its number; invalid bytes have length 1 and code U+FFFD. */
static inline int64_t utf8_read(const char *p, int64_t left, uint32_t *code) {
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t c = (unsigned char)p[0];
    int n = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0, i;
    *code = 0xfffd;
    if (n == 0 || n > left) return 1;
    if (n > 1) c &= 0x7fu >> n;
    for (i = 1; i < n; i++) {
        if (((unsigned char)p[i] & 0xc0) != 0x80) return 1;
        c = c << 6 | ((unsigned char)p[i] & 0x3fu);
    }
    if (c < least[n] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return 1;
    *code = c;
    return n;
}

/* Metrics as JSON lines: metrics_begin, any number of values, metrics_end.  file NULL: nothing is written. */
static inline void json_write_text(FILE *file, const char *text) {
    int64_t left = (int64_t)strlen(text), n;
    uint32_t code;
    fputc('"', file);
    for (; left > 0; text += n, left -= n) {
        n = utf8_read(text, left, &code);
        if (code == '"' || code == '\\') fprintf(file, "\\%c", (int)code);
        else if (code < 0x20 || code == 0x7f || (code == 0xfffd && n == 1)) fprintf(file, "\\u%04x", (unsigned)code);
        else fwrite(text, 1, (size_t)n, file);
    }
    fputc('"', file);
}
static inline void metrics_begin(FILE *file, const char *event) {
    if (file != NULL) fprintf(file, "{\"event\": \"%s\"", event);
}
static inline void metrics_integer(FILE *file, const char *key, int64_t value) {
    if (file != NULL) fprintf(file, ", \"%s\": %lld", key, (long long)value);
}
static inline void metrics_number(FILE *file, const char *key, double value) {
    if (file == NULL) return;
    if (amp_is_finite_f64(&value)) fprintf(file, ", \"%s\": %.9g", key, value);
    else fprintf(file, ", \"%s\": null", key);      /* JSON has no infinity */
}
static inline void metrics_text(FILE *file, const char *key, const char *value) {
    if (file == NULL) return;
    fprintf(file, ", \"%s\": ", key);
    json_write_text(file, value);
}
static inline void metrics_end(FILE *file) {
    if (file == NULL) return;
    fprintf(file, "}\n");
    fflush(file);
}

/* Metrics through a monitor, a line at a time: made between metrics_begin(m->file, ...) and metrics_line_end. */
typedef struct metrics_line {
    FILE *file;                     /* the line in memory (open_memstream); NULL: no metrics */
    char *text;
    size_t bytes;
    int warned;                     /* 1: the user knows that metrics cannot be written */
} metrics_line;

/* A full disk is reported once, and training continues: the monitor keeps lines that it cannot write. */
static inline amp_result metrics_tolerate(metrics_line *m, amp_result result) {
    if (result != AMP_ERR_WRITE) return result;
    if (!m->warned) fprintf(stderr, "metrics are kept in memory until they can be written: %s\n", amp_last_error());
    m->warned = 1;
    return AMP_OK;
}
static inline void metrics_line_end(metrics_line *m, amp_monitor *monitor) {
    if (m->file == NULL) return;
    metrics_end(m->file);
    m->text[m->bytes - 1] = 0;
    (void)metrics_tolerate(m, amp_monitor_write(monitor, m->text));
    rewind(m->file);
}

/* ---- TensorBoard: scalars in an event file, which is a TFRecord file: each record is its length in 8 bytes, their
   checksum, the data, and their checksum, little endian; the data are protocol buffers of
   tensorflow/core/util/event.proto. */

enum { BOARD_TAG = 100, BOARD_RECORD = BOARD_TAG + 64 };

typedef struct board {
    FILE *file;                     /* NULL: closed, or failed */
    char path[PATH_MAX];
} board;

/* CRC-32C (Castagnoli), reflected. */
static inline uint32_t crc32c_add(uint32_t crc, const unsigned char *data, size_t n) {
    static uint32_t table[8][256];      /* of a byte followed by 0 to 7 zeros: eight bytes at a time */
    uint32_t i, k;
    for (i = 0; i < 256 && table[0][255] == 0; i++)
        for (table[0][i] = i, k = 0; k < 8; k++)
            table[0][i] = (table[0][i] >> 1) ^ (0x82f63b78u & (0u - (table[0][i] & 1u)));
    for (k = 1; k < 8 && table[7][255] == 0; k++)
        for (i = 0; i < 256; i++) table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
    for (crc = ~crc; n >= 8; n -= 8, data += 8)
        crc = table[7][(crc ^ data[0]) & 255] ^ table[6][(crc >> 8 ^ data[1]) & 255] ^
              table[5][(crc >> 16 ^ data[2]) & 255] ^ table[4][crc >> 24 ^ data[3]] ^ table[3][data[4]] ^
              table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
    for (; n > 0; n--, data++) crc = (crc >> 8) ^ table[0][(crc ^ *data) & 255];
    return ~crc;
}
static inline uint32_t crc32c(const unsigned char *data, size_t n) { return crc32c_add(0, data, n); }

/* Appends the low `bytes` bytes of value. */
static inline unsigned char *board_bytes(unsigned char *out, uint64_t value, int bytes) {
    for (; bytes > 0; bytes--, value >>= 8) *out++ = (unsigned char)value;
    return out;
}
/* The checksum of n bytes in records: rotated by 15 plus a constant, as data may hold checksums themselves. */
static inline unsigned char *board_checksum(unsigned char *out, const unsigned char *data, size_t n) {
    uint32_t crc = crc32c(data, n);
    return board_bytes(out, (uint32_t)((crc >> 15 | crc << 17) + 0xa282ead8u), 4);
}
/* A field of bytes; their length must be below 128. */
static inline unsigned char *board_field(unsigned char *out, int key, const void *data, size_t n) {
    out = board_bytes(out, (uint64_t)key | (uint64_t)n << 8, 2);
    memcpy(out, data, n);
    return out + n;
}

/* One record into out[BOARD_RECORD]; returns its bytes.  tag NULL: the record that begins a file. */
static inline size_t board_record(unsigned char *out, double seconds, int64_t step, const char *tag, float value) {
    unsigned char inner[BOARD_TAG + 16], outer[BOARD_TAG + 16], *at = out + 12, *end;
    uint64_t bits, rest = (uint64_t)step;
    uint32_t value_bits;
    memcpy(&bits, &seconds, sizeof bits);
    memcpy(&value_bits, &value, sizeof value_bits);
    at = board_bytes(board_bytes(at, 0x09, 1), bits, 8);                                    /* 1: wall_time */
    if (tag != NULL) {
        /* 2: step */
        for (at = board_bytes(at, 0x10, 1); rest > 127; rest >>= 7) *at++ = (unsigned char)(rest | 128);
        *at++ = (unsigned char)rest;
        /* value.1: tag */
        end = board_field(inner, 0x0a, tag, strlen(tag) < BOARD_TAG ? strlen(tag) : (size_t)BOARD_TAG);
        end = board_bytes(board_bytes(end, 0x15, 1), value_bits, 4);                        /* value.2: simple_value */
        end = board_field(outer, 0x0a, inner, (size_t)(end - inner));                       /* summary.1: value */
        at = board_field(at, 0x2a, outer, (size_t)(end - outer));                           /* 5: summary */
    } else at = board_field(at, 0x1a, "brain.Event:2", 13);                                 /* 3: file_version */
    board_bytes(out, (uint64_t)(at - out - 12), 8);
    board_checksum(out + 8, out, 8);
    at = board_checksum(at, out + 12, (size_t)(at - out - 12));
    return (size_t)(at - out);
}

/* A failure closes the file; training continues without it. */
static inline void board_write(board *b, double seconds, int64_t step, const char *tag, float value) {
    unsigned char record[BOARD_RECORD];
    size_t bytes = board_record(record, seconds, step, tag, value);
    if (b->file == NULL || (fwrite(record, 1, bytes, b->file) == bytes && fflush(b->file) == 0)) return;
    fprintf(stderr, "no more TensorBoard output: %s could not be written: %s\n", b->path, strerror(errno));
    fclose(b->file);
    b->file = NULL;
}

static inline double board_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A new file in this folder; each resumed run adds one. */
static inline amp_result board_open(board *b, const char *folder) {
    char host[64] = "";
    double now = board_now();
    b->file = NULL;
    if (gethostname(host, sizeof host - 1) != 0 || host[0] == 0) snprintf(host, sizeof host, "localhost");
    if (snprintf(b->path, sizeof b->path, "%s/events.out.tfevents.%010.0f.%s", folder, floor(now), host) >=
        (int)sizeof b->path)
        return example_fail(AMP_ERR_OPEN, "%.60s...: the path is too long", folder);
    TRY(folder_make(b->path));
    b->file = fopen(b->path, "ab");
    if (b->file == NULL) return example_fail(AMP_ERR_OPEN, "%s: %s", b->path, strerror(errno));
    board_write(b, now, 0, NULL, 0);
    return AMP_OK;
}

/* Does nothing if b is not open. */
static inline void board_scalar(board *b, int64_t step, const char *tag, double value) {
    if (b->file != NULL) board_write(b, board_now(), step, tag, (float)value);
}

static inline void board_close(board *b) {
    if (b->file != NULL) fclose(b->file);
    b->file = NULL;
}

/* Where the time of a training step goes.  pass 0: forward, 1: backward. */
enum { PROFILE_LOADER, PROFILE_EMBEDDING, PROFILE_NORM, PROFILE_LINEAR, PROFILE_ATTENTION, PROFILE_DROPOUT,
       PROFILE_HEAD, PROFILE_LOSS, PROFILE_RECOMPUTE, PROFILE_OPTIMIZER, PROFILE_ROWS };
typedef struct profile {
    double seconds[PROFILE_ROWS][2], all;
    int64_t steps;
} profile;

/* Adds the time since `began` to a row; waits for the device. */
static inline amp_result profile_add(profile *p, amp_context *amp, int row, int pass, double began) {
    TRY(amp_sync(amp));
    p->seconds[row][pass] += seconds_now() - began;
    return AMP_OK;
}

/* TRY(call), timed if there is a profile. */
#define TIMED(p, amp, row, pass, call) do { \
        double timed_began = (p) != NULL ? seconds_now() : 0; \
        TRY(call); \
        if ((p) != NULL) TRY(profile_add(p, amp, row, pass, timed_began)); \
    } while (0)

/* ==== 3 JSON and safetensors ===================================================================== */

/* A reader over JSON text.  After the first error `bad` stays 1 and every call does nothing. */
typedef struct json {
    const char *at, *end;
    int bad;
} json;

static inline json json_open(const void *text, size_t bytes) {
    json j;
    j.at = text != NULL ? (const char *)text : "";
    j.end = j.at + bytes;
    j.bad = 0;
    return j;
}

/* The next character that is no space, without taking it; 0 at the end. */
static inline int json_peek(json *j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\n' || *j->at == '\r' || *j->at == '\t')) j->at++;
    return j->bad || j->at == j->end ? 0 : (unsigned char)*j->at;
}

/* Takes c if it comes next. */
static inline int json_take(json *j, char c) {
    if (json_peek(j) != c || c == 0) return 0;
    j->at++;
    return 1;
}
static inline void json_need(json *j, char c) { if (!json_take(j, c)) j->bad = 1; }

/* The four digits of a \u escape. */
static inline uint32_t json_hex4(json *j) {
    uint32_t code = 0;
    int i;
    for (i = 0; i < 4 && !j->bad; i++) {
        int c = j->at < j->end ? *j->at++ : 0;
        if (c >= '0' && c <= '9') code = code * 16 + (uint32_t)(c - '0');
        else if (c >= 'a' && c <= 'f') code = code * 16 + (uint32_t)(c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') code = code * 16 + (uint32_t)(c - 'A' + 10);
        else j->bad = 1;
    }
    return code;
}

/* A character after "\u" as UTF-8; a pair of surrogates is one character, a lone one is an error. */
static inline int json_unicode(json *j, char utf8[4]) {
    uint32_t code = json_hex4(j), low;
    if (code >= 0xd800 && code < 0xdc00 && j->end - j->at >= 2 && j->at[0] == '\\' && j->at[1] == 'u') {
        j->at += 2;
        low = json_hex4(j);
        if (low < 0xdc00 || low >= 0xe000) j->bad = 1;
        code = 0x10000 + ((code & 0x3ff) << 10 | (low & 0x3ff));
    } else if (code >= 0xd800 && code < 0xe000) j->bad = 1;
    if (code < 0x80) { utf8[0] = (char)code; return 1; }
    if (code < 0x800) { utf8[0] = (char)(0xc0 | code >> 6); utf8[1] = (char)(0x80 | (code & 63)); return 2; }
    utf8[0] = (char)(code < 0x10000 ? 0xe0 | code >> 12 : 0xf0 | code >> 18);
    if (code < 0x10000) {
        utf8[1] = (char)(0x80 | (code >> 6 & 63));
        utf8[2] = (char)(0x80 | (code & 63));
        return 3;
    }
    utf8[1] = (char)(0x80 | (code >> 12 & 63));
    utf8[2] = (char)(0x80 | (code >> 6 & 63));
    utf8[3] = (char)(0x80 | (code & 63));
    return 4;
}

/* A string, unescaped and 0-terminated; one that does not fit is an error.  text NULL: skipped. */
static inline void json_string(json *j, char *text, size_t size) {
    size_t used = 0;
    json_need(j, '"');
    while (!j->bad) {
        char piece[4];
        int c = j->at < j->end ? (unsigned char)*j->at++ : 0, n = 1, i;
        if (c == '"') break;
        piece[0] = (char)c;
        if (c < 0x20) j->bad = 1;
        else if (c == '\\') {
            static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
            const char *found;
            c = j->at < j->end ? *j->at++ : 0;
            found = c != 0 ? strchr(names, c) : NULL;
            if (c == 'u') n = json_unicode(j, piece);
            else if (found != NULL) piece[0] = values[found - names];
            else j->bad = 1;
        }
        for (i = 0; i < n && !j->bad && text != NULL; i++) {
            if (used + 1 < size) text[used++] = piece[i];
            else j->bad = 1;
        }
    }
    if (text != NULL && size > 0) text[used] = 0;
}

/* An integer of at most 18 digits. */
static inline int64_t json_integer(json *j) {
    int64_t value = 0;
    int digits = 0, negative = json_take(j, '-');
    json_peek(j);
    for (; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++, digits++) {
        if (digits < 18) value = value * 10 + (*j->at - '0');
        else j->bad = 1;
    }
    if (digits == 0) j->bad = 1;
    return negative ? -value : value;
}

static inline void json_digits(json *j) {
    const char *from = j->at;
    while (j->at < j->end && *j->at >= '0' && *j->at <= '9') j->at++;
    if (j->at == from) j->bad = 1;
}
static inline void json_skip_number(json *j) {
    if (*j->at == '-') j->at++;
    if (j->at < j->end && *j->at == '0') j->at++;
    else json_digits(j);
    if (j->at < j->end && *j->at == '.') { j->at++; json_digits(j); }
    if (j->at == j->end || (*j->at != 'e' && *j->at != 'E')) return;
    j->at++;
    if (j->at < j->end && (*j->at == '+' || *j->at == '-')) j->at++;
    json_digits(j);
}
static inline void json_skip_level(json *j, int depth) {
    static const char *const words[] = {"true", "false", "null"};
    int first = json_peek(j), i;
    if (first == '"') json_string(j, NULL, 0);
    else if (first == '{' || first == '[') {
        char last = first == '{' ? '}' : ']';
        j->at++;
        if (depth == 0) j->bad = 1;
        if (json_take(j, last)) return;
        do {
            if (first == '{') { json_peek(j); json_string(j, NULL, 0); json_need(j, ':'); }
            json_skip_level(j, depth - 1);
        } while (json_take(j, ','));
        json_need(j, last);
    } else if (first == '-' || (first >= '0' && first <= '9')) json_skip_number(j);
    else {
        for (i = 0; i < 3; i++) {
            size_t n = strlen(words[i]);
            if ((size_t)(j->end - j->at) >= n && memcmp(j->at, words[i], n) == 0) { j->at += n; return; }
        }
        j->bad = 1;
    }
}

/* Skips any value, nested 100 levels deep at most. */
static inline void json_skip(json *j) { json_skip_level(j, 100); }

/* A member of an object: its name, "" for one that does not fit, and where its value is.  1 if there is one. */
static inline int json_member(json *j, char name[128], json *value) {
    json start = *j;
    json_string(j, name, 128);
    if (j->bad) { *j = start; name[0] = 0; json_string(j, NULL, 0); }
    json_need(j, ':');
    json_peek(j);
    *value = *j;
    json_skip(j);
    value->end = j->at;
    return !j->bad;
}

/* Where the value of `key` is in the object that starts at j.  1 if found. */
static inline int json_value(json j, const char *key, json *value) {
    char name[128];
    int more;
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more && json_member(&j, name, value); more = json_take(&j, ','))
        if (strcmp(name, key) == 0) return 1;
    return 0;
}

/* A value as text (strings unescaped, numbers as they stand).  1 if it fits. */
static inline int json_text(json value, char *text, size_t size) {
    size_t length = (size_t)(value.end - value.at);
    if (json_peek(&value) == '"') { json_string(&value, text, size); return !value.bad; }
    if (length >= size) return 0;
    memcpy(text, value.at, length);
    text[length] = 0;
    return 1;
}

/* The value of `key` in the object that starts at j, as text.  1 if found. */
static inline int json_find(json j, const char *key, char *text, size_t size) {
    json value;
    return json_value(j, key, &value) && json_text(value, text, size);
}

enum { ST_MAX_DIMS = 8 };

typedef struct st_tensor {
    char name[128];
    amp_dtype dtype;                /* 0: not supported, such as BOOL */
    int32_t ndim;
    int64_t shape[ST_MAX_DIMS];
    const unsigned char *data;      /* not aligned */
    int64_t count;
} st_tensor;

typedef struct st_file {
    st_tensor *tensors;
    int64_t n;
    json metadata;                  /* at the object "__metadata__", or empty */
} st_file;

static inline void st_close(st_file *file) {
    free(file->tensors);
    memset(file, 0, sizeof *file);
}

static inline const st_tensor *st_find(const st_file *file, const char *name) {
    int64_t i;
    for (i = 0; i < file->n; i++) if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
    return NULL;
}

/* Bytes per element of a safetensors dtype, 0 if unknown; *out: its amp_dtype, 0 if not supported. */
static inline int64_t st_dtype(const char *name, amp_dtype *out) {
    static const struct { const char *name; int64_t size; amp_dtype dtype; } known[] = {
        {"F32", 4, AMP_F32}, {"F16", 2, AMP_F16}, {"BF16", 2, AMP_BF16}, {"F64", 8, AMP_F64},
        {"BOOL", 1, AMP_DTYPE_DEFAULT}, {"U8", 1, AMP_DTYPE_DEFAULT}, {"I8", 1, AMP_DTYPE_DEFAULT},
        {"I16", 2, AMP_DTYPE_DEFAULT}, {"U16", 2, AMP_DTYPE_DEFAULT}, {"I32", 4, AMP_DTYPE_DEFAULT},
        {"U32", 4, AMP_DTYPE_DEFAULT}, {"I64", 8, AMP_DTYPE_DEFAULT}, {"U64", 8, AMP_DTYPE_DEFAULT},
        {"F8_E4M3", 1, AMP_DTYPE_DEFAULT}, {"F8_E5M2", 1, AMP_DTYPE_DEFAULT},
    };
    size_t i;
    *out = AMP_DTYPE_DEFAULT;
    for (i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, name) != 0) continue;
        *out = known[i].dtype;
        return known[i].size;
    }
    return 0;
}

/* One header entry: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}. */
static inline amp_result st_read_entry(json *j, st_tensor *t, const unsigned char *data, int64_t bytes) {
    char key[32], dtype[32] = "";
    int64_t begin = -1, end = -1, size, count = 1, i;
    int have_shape = 0;
    json_need(j, '{');
    while (!j->bad && json_peek(j) == '"') {
        json_string(j, key, sizeof key);
        json_need(j, ':');
        if (strcmp(key, "dtype") == 0) json_string(j, dtype, sizeof dtype);
        else if (strcmp(key, "data_offsets") == 0) {
            json_need(j, '['); begin = json_integer(j); json_need(j, ','); end = json_integer(j); json_need(j, ']');
        } else if (strcmp(key, "shape") == 0) {
            json_need(j, '[');
            have_shape = 1;
            while (!j->bad && json_peek(j) != ']') {
                if (t->ndim == ST_MAX_DIMS)
                    return example_fail(AMP_ERR_FORMAT, "%s: more than %d dimensions", t->name, ST_MAX_DIMS);
                t->shape[t->ndim++] = json_integer(j);
                if (!json_take(j, ',')) break;
            }
            json_need(j, ']');
        } else json_skip(j);
        if (!json_take(j, ',')) break;
    }
    json_need(j, '}');
    size = st_dtype(dtype, &t->dtype);
    if (j->bad || !have_shape || size == 0) return example_fail(AMP_ERR_FORMAT, "%s: not a safetensors entry", t->name);
    for (i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0 || (t->shape[i] > 0 && count > bytes / t->shape[i]))
            return example_fail(AMP_ERR_FORMAT, "%s: the shape does not fit into the file", t->name);
        count *= t->shape[i];
    }
    if (begin < 0 || end < begin || end > bytes || (end - begin) / size != count || (end - begin) % size != 0)
        return example_fail(AMP_ERR_TRUNCATED, "%s: bytes %lld to %lld of %lld do not hold %lld elements of %s",
                            t->name, (long long)begin, (long long)end, (long long)bytes, (long long)count, dtype);
    t->count = count;
    t->data = data + begin;
    return AMP_OK;
}

static inline amp_result st_read_header(st_file *file, json *j, const unsigned char *data, int64_t bytes) {
    int64_t capacity = 0;
    json_need(j, '{');
    while (!j->bad && json_peek(j) == '"') {
        st_tensor t;
        memset(&t, 0, sizeof t);
        json_string(j, t.name, sizeof t.name);
        json_need(j, ':');
        if (strcmp(t.name, "__metadata__") == 0) {
            json_peek(j);
            file->metadata = *j;
            json_skip(j);
        } else {
            if (j->bad) break;
            if (st_find(file, t.name) != NULL)
                return example_fail(AMP_ERR_FORMAT, "%s: is in the file twice", t.name);
            TRY(st_read_entry(j, &t, data, bytes));
            if (file->n == capacity) {
                st_tensor *more =
                    (st_tensor *)realloc(file->tensors, (size_t)(capacity = capacity * 2 + 64) * sizeof *more);
                if (more == NULL) return example_fail(AMP_ERR_MEMORY, "no memory for the tensor table");
                file->tensors = more;
            }
            file->tensors[file->n++] = t;
        }
        if (!json_take(j, ',')) break;
    }
    json_need(j, '}');
    if (j->bad || json_peek(j) != 0) return example_fail(AMP_ERR_FORMAT, "the safetensors header is not valid JSON");
    return AMP_OK;
}

/* Our own checksum: the CRC-32C of the whole file with zeros for the checksum's eight digits, which are in the metadata
   as "crc32c":"89abcdef".  Other programs' files have none. */
#define ST_CHECKSUM "\"crc32c\":\""
enum { ST_DIGITS = 8 };

/* The digits in a file with `header` bytes before its data, or NULL. */
static inline const unsigned char *st_digits(const unsigned char *file, size_t header) {
    const size_t n = sizeof ST_CHECKSUM - 1;
    size_t i;
    for (i = 8; i + n + ST_DIGITS < header; i++)
        if (file[i] == '"' && memcmp(file + i, ST_CHECKSUM, n) == 0 && file[i + n + ST_DIGITS] == '"')
            return file + i + n;
    return NULL;
}
static inline void st_checksum(const unsigned char *file, size_t bytes, const unsigned char *digits,
                               char text[ST_DIGITS + 1]) {
    uint32_t crc = crc32c(file, (size_t)(digits - file));
    crc = crc32c_add(crc, (const unsigned char *)"00000000", ST_DIGITS);
    crc = crc32c_add(crc, digits + ST_DIGITS, bytes - (size_t)(digits - file) - ST_DIGITS);
    snprintf(text, ST_DIGITS + 1, "%08x", crc);
}
static inline amp_result st_verify(const unsigned char *file, size_t bytes, size_t header) {
    const unsigned char *digits = st_digits(file, header);
    char text[ST_DIGITS + 1];
    if (digits == NULL) return AMP_OK;
    st_checksum(file, bytes, digits, text);
    if (memcmp(digits, text, ST_DIGITS) == 0) return AMP_OK;
    return example_fail(AMP_ERR_CHECKSUM,
                        "the safetensors file has checksum %.*s, but its bytes give %s: it is damaged, use another "
                        "copy (a program that changes the file must drop crc32c from its metadata)",
                        ST_DIGITS, (const char *)digits, text);
}
/* Sets the checksum of a complete file. */
static inline void st_seal(unsigned char *file, size_t bytes, size_t header) {
    const unsigned char *digits = st_digits(file, header);
    char text[ST_DIGITS + 1];
    if (digits == NULL) return;
    st_checksum(file, bytes, digits, text);
    memcpy(file + (digits - file), text, ST_DIGITS);
}

/* Reads a safetensors file from memory, which must stay.  Nothing in it is trusted: a damaged or
   hostile file gives an error.  Format: 8 bytes header length, a JSON header, the data. */
static inline amp_result st_open(st_file *file, const void *bytes, size_t size) {
    const unsigned char *data = (const unsigned char *)bytes;
    uint64_t header = 0;
    amp_result result;
    json j;
    int i;
    memset(file, 0, sizeof *file);
    if (size < 8) return example_fail(AMP_ERR_TRUNCATED, "a safetensors file has at least 8 bytes, this one %zu", size);
    for (i = 7; i >= 0; i--) header = header << 8 | data[i];
    if (header > size - 8)
        return example_fail(AMP_ERR_FORMAT, "not a safetensors file, or one that ends in its header");
    TRY(st_verify(data, size, 8 + (size_t)header));
    j = json_open(data + 8, (size_t)header);
    result = st_read_header(file, &j, data + 8 + header, (int64_t)(size - 8 - header));
    if (result != AMP_OK) st_close(file);
    return result;
}

static inline amp_result st_check_floats(const st_tensor *t) {
    if (t->dtype != AMP_DTYPE_DEFAULT) return AMP_OK;
    return example_fail(AMP_ERR_DTYPE, "%s: only F32, F16, BF16 and F64 are read", t->name);
}
/* All elements as fp32.  Errors: AMP_ERR_DTYPE for a dtype that is not floating. */
static inline amp_result st_floats(const st_tensor *t, float *out) {
    TRY(st_check_floats(t));
    return amp_convert(out, AMP_F32, t->data, t->dtype, t->count, NULL, NULL);
}

/* ---- config.json, as transformers writes it beside a model.  Keys that change what the model computes are read, or
   refused by key and value; all others are kept, and written back when the model is saved. */

typedef struct config_only { const char *key, *values; } config_only;   /* values: JSON, with '|' between them */

/* For one kind of model.  read: keys that its reader uses; kept: keys that change nothing; only: keys that must have
   these values, up to a NULL. */
typedef struct config_rules {
    const char *read, *kept;
    const config_only *only;
    const char *unseen;             /* those of `read` that the weights' shapes do not tell */
} config_rules;

/* For every kind.  The last lines are from old files: settings for generating text. */
static const char config_kept[] =
    "architectures transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash attn_implementation "
    "_attn_implementation _attn_implementation_autoset return_dict output_hidden_states output_attentions output_past "
    "use_cache "
    "torchscript use_bfloat16 gradient_checkpointing chunk_size_feed_forward initializer_range id2label label2id "
    "num_labels "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class vocab_file language "
    "finetuning_task task_specific_params prefix tie_encoder_decoder tf_legacy_loss summary_type summary_use_proj "
    "summary_activation summary_proj_to_labels summary_first_dropout summary_last_dropout "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty";
static const config_only config_only_of_all[] = {
    {"is_encoder_decoder", "false"}, {"add_cross_attention", "false"}, {"cross_attention_hidden_size", "null"},
    {"quantization_config", "null"}, {"auto_map", "null|{}"},          {"pruned_heads", "null|{}"},
    {"per_layer_config", "null|{}"}, {NULL, NULL},
};

typedef struct model_config {
    char path[PATH_MAX];            /* of its file */
    char *text;                     /* a JSON object; NULL: none */
    size_t bytes;
    int plain;                      /* 1: metadata of version 0.1.0, where every value is a string */
    char note[400];                 /* remarks for the user, or "" */
} model_config;

static inline void config_close(model_config *m) {
    free(m->text);
    memset(m, 0, sizeof *m);
}

/* The value of a key; 0: it is not there. */
static inline int config_get(const model_config *m, const char *key, json *value) {
    if (!json_value(json_open(m->text, m->bytes), key, value)) return 0;
    if (m->plain && value->end - value->at > 1) { value->at++; value->end--; }
    return 1;
}

/* Sets the error text "file: key = value: why". */
static inline amp_result config_refuse(const model_config *m, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static inline amp_result config_refuse(const model_config *m, const char *key, const char *format, ...) {
    char why[300];
    json value = {"", "", 0};
    size_t n, shown;
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    config_get(m, key, &value);
    n = (size_t)(value.end - value.at);
    for (shown = 0; shown < n && shown < 60 && value.at[shown] >= ' '; shown++) { }
    return example_fail(AMP_ERR_UNSUPPORTED, "%s: %s = %.*s%s: %s", m->path, key, (int)shown, value.at,
                        shown < n ? "..." : "", why);
}

/* Values stay unchanged if the key is missing.  Other types and values out of range are refused. */
static inline amp_result config_integer(const model_config *m, const char *key, int64_t lowest, int64_t highest,
                                        int64_t *out) {
    json value;
    int64_t number;
    if (!config_get(m, key, &value)) return AMP_OK;
    number = json_integer(&value);
    if (value.bad || value.at != value.end || number < lowest || number > highest)
        return config_refuse(m, key, "must be a whole number from %lld to %lld", (long long)lowest, (long long)highest);
    *out = number;
    return AMP_OK;
}
static inline amp_result config_number(const model_config *m, const char *key, double lowest, double highest,
                                       double *out) {
    json value;
    char text[64], *end = text;
    double number = 0;
    if (!config_get(m, key, &value)) return AMP_OK;
    if (value.at < value.end && *value.at != '"' && json_text(value, text, sizeof text)) number = strtod(text, &end);
    if (end == text || *end != 0 || !(number >= lowest && number <= highest))
        return config_refuse(m, key, "must be a number from %g to %g", lowest, highest);
    *out = number;
    return AMP_OK;
}
static inline amp_result config_switch(const model_config *m, const char *key, int32_t *out) {
    json value;
    char text[8] = "";
    if (!config_get(m, key, &value)) return AMP_OK;
    if (*value.at == '"' || !json_text(value, text, sizeof text) || word_place("false true", text) < 0)
        return config_refuse(m, key, "must be true or false");
    *out = word_place("false true", text);
    return AMP_OK;
}
static inline amp_result config_word(const model_config *m, const char *key, char text[64]) {
    json value;
    if (!config_get(m, key, &value)) return AMP_OK;
    if ((m->plain || *value.at == '"') && json_text(value, text, 64)) return AMP_OK;
    return config_refuse(m, key, "must be a string");
}

/* A number that must match the weights. */
static inline amp_result config_shape(const model_config *m, const char *key, int64_t weights) {
    int64_t number = weights;
    TRY(config_integer(m, key, 1, INT32_MAX, &number));
    return number == weights ? AMP_OK : config_refuse(m, key, "the weights have %lld", (long long)weights);
}

/* transformers' names of the operators' activations; the first of each kind is written. */
typedef struct activation_name { const char *name; amp_activation_kind act; } activation_name;
static const activation_name activation_names[] = {
    {"gelu_new", AMP_ACT_GELU},         {"gelu", AMP_ACT_GELU_ERF},         {"relu", AMP_ACT_RELU},
    {"silu", AMP_ACT_SILU},             {"tanh", AMP_ACT_TANH},             {"swish", AMP_ACT_SILU},
    {"gelu_pytorch_tanh", AMP_ACT_GELU}, {"gelu_python_tanh", AMP_ACT_GELU}, {"gelu_fast", AMP_ACT_GELU},
    {"gelu_accurate", AMP_ACT_GELU},    {"gelu_python", AMP_ACT_GELU_ERF},
};
enum { ACTIVATION_NAMES = (int)(sizeof activation_names / sizeof *activation_names) };

static inline const char *activation_text(amp_activation_kind act) {
    int i;
    for (i = 0; i < ACTIVATION_NAMES; i++) if (activation_names[i].act == act) return activation_names[i].name;
    return "";
}
static inline amp_result config_activation(const model_config *m, const char *key, amp_activation_kind *out) {
    char text[64] = "", names[200] = "";
    json value;
    int i;
    if (!config_get(m, key, &value)) return AMP_OK;
    TRY(config_word(m, key, text));
    for (i = 0; i < ACTIVATION_NAMES; i++) {
        if (strcmp(text, activation_names[i].name) == 0) { *out = activation_names[i].act; return AMP_OK; }
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i > 0 ? ", " : "",
                 activation_names[i].name);
    }
    return config_refuse(m, key, "must be one of %s", names);
}

/* 1: fused into a linear layer, forward and backward; the others are a step of their own. */
static inline int activation_is_fused(amp_activation_kind act) { return act != AMP_ACT_SILU && act != AMP_ACT_TANH; }

static inline void config_note(model_config *m, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void config_note(model_config *m, const char *format, ...) {
    size_t used = strlen(m->note);
    va_list args;
    va_start(args, format);
    if ((size_t)vsnprintf(m->note + used, sizeof m->note - used, format, args) >= sizeof m->note - used)
        memcpy(m->note + sizeof m->note - 4, "...", 4);
    va_end(args);
    for (; m->note[used] != 0; used++) if ((unsigned char)m->note[used] < ' ') m->note[used] = '?';
}

/* Dropout belongs to a training run: the program sets it, and the file's values are kept. */
static inline amp_result config_dropout(model_config *m, const char *key) {
    json value;
    double p = 0;
    if (config_get(m, key, &value) && *value.at == 'n') return AMP_OK;      /* null: not set */
    TRY(config_number(m, key, 0, 1, &p));
    if (p > 0)
        config_note(m, "%s%s %g",
                    strstr(m->note, "--dropout sets") != NULL ? ", "
                    : m->note[0] != 0                     ? "; --dropout sets dropout, not "
                                                          : "--dropout sets dropout, not ",
                    key, p);
    return AMP_OK;
}

/* 1: the key is in the table; *ok: so is its value. */
static inline int config_find_only(const config_only *only, const char *key, json value, int *ok) {
    size_t n = (size_t)(value.end - value.at);
    for (; only->key != NULL; only++) {
        const char *at = only->values;
        if (strcmp(only->key, key) != 0) continue;
        for (*ok = 0; at != NULL && !*ok; at = strchr(at, '|') != NULL ? strchr(at, '|') + 1 : NULL)
            *ok = strncmp(at, value.at, n) == 0 && (at[n] == 0 || at[n] == '|');
        return 1;
    }
    return 0;
}

/* Checks that it is a JSON object with each key once, and no value of a model that is not supported. */
static inline amp_result config_check(model_config *m, const config_rules *rules) {
    enum { MOST_KEYS = 1000 };
    json j = json_open(m->text, m->bytes), value, first;
    char key[128];
    int64_t line = 1, keys = 0;
    const char *at;
    int more, ok, unknown = 0;
    if (json_peek(&j) == '{') json_skip(&j);
    else j.bad = 1;
    if (j.bad || json_peek(&j) != 0 || j.at != j.end) {
        for (at = m->text; at < j.at; at++) line += *at == '\n';
        return example_fail(AMP_ERR_FORMAT, "%s: line %lld: not a JSON object", m->path, (long long)line);
    }
    j = json_open(m->text, m->bytes);
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more && json_member(&j, key, &value); more = json_take(&j, ',')) {
        if (++keys > MOST_KEYS)
            return example_fail(AMP_ERR_FORMAT, "%s: more than %d keys: not of a model", m->path, MOST_KEYS);
        if (key[0] != 0 && config_get(m, key, &first) && first.at != value.at)
            return config_refuse(m, key, "is there twice, the second time as %.*s: drop one",
                                 (int)(value.end - value.at < 60 ? value.end - value.at : 60), value.at);
        if (config_find_only(config_only_of_all, key, value, &ok) || config_find_only(rules->only, key, value, &ok)) {
            if (!ok) return config_refuse(m, key, "this kind of model is not supported");
        } else if (word_place(rules->read, key) < 0 && word_place(rules->kept, key) < 0 &&
                   word_place(config_kept, key) < 0)
            config_note(m, "%s%s",
                        unknown++ > 0 ? ", " : "unknown keys, kept: ", key[0] != 0 ? key : "a long key");
    }
    return AMP_OK;
}

/* Refuses two descriptions that differ in a key that is read. */
static inline amp_result config_agree(const model_config *m, const model_config *other, const config_rules *rules) {
    const char *at = rules->read;
    while (*at != 0) {
        char key[64], a[64] = "", b[64] = "", *a_end, *b_end;
        int n = (int)strcspn(at, " ");
        json mine, theirs;
        snprintf(key, sizeof key, "%.*s", n, at);
        at += n + (at[n] == ' ');
        if (!config_get(other, key, &theirs)) continue;
        if (!config_get(m, key, &mine)) {
            if (word_place(rules->unseen, key) < 0) continue;
            return example_fail(AMP_ERR_UNSUPPORTED,
                                "%s: no %s: %s was saved with %.*s: put that back, or delete this file", m->path, key,
                                other->path, (int)(theirs.end - theirs.at < 60 ? theirs.end - theirs.at : 60),
                                theirs.at);
        }
        if (!json_text(mine, a, sizeof a) || !json_text(theirs, b, sizeof b) || strcmp(a, b) == 0) continue;
        if (strtod(a, &a_end) == strtod(b, &b_end) && *a_end == 0 && *b_end == 0) continue;
        return config_refuse(m, key, "%s was saved with %s = %s: put that back, or delete this file", other->path, key,
                             b);
    }
    return AMP_OK;
}

/* The description of the model in one of our files: a copy of config.json, or version 0.1.0's metadata.  text NULL:
   none. */
static inline amp_result config_of_file(model_config *m, const st_file *tensors, const char *path) {
    json value = tensors->metadata;
    int inside;
    memset(m, 0, sizeof *m);
    snprintf(m->path, sizeof m->path, "%s", path);
    if (value.at == NULL) return AMP_OK;
    inside = json_value(tensors->metadata, "config", &value);
    if (!inside && !json_value(tensors->metadata, "n_head", &value) &&
        !json_value(tensors->metadata, "num_attention_heads", &value))
        return AMP_OK;
    m->plain = !inside;
    if (!inside) {
        value = tensors->metadata;
        json_skip(&value);
        value.end = value.at;
        value.at = tensors->metadata.at;
    }
    m->text = (char *)malloc((size_t)(value.end - value.at) + 1);
    if (m->text == NULL) return example_fail(AMP_ERR_MEMORY, "%s: no memory for its metadata", path);
    if (!json_text(value, m->text, (size_t)(value.end - value.at) + 1)) m->text[0] = 0;
    m->bytes = strlen(m->text);
    return AMP_OK;
}

/* config.json itself. */
static inline amp_result config_read(model_config *m, const char *path) {
    void *data;
    memset(m, 0, sizeof *m);
    snprintf(m->path, sizeof m->path, "%s", path);
    TRY(amp_file_read_all(NULL, path, &data, &m->bytes));
    m->text = (char *)malloc(m->bytes + 1);
    if (m->text != NULL) memcpy(m->text, data, m->bytes);
    amp_file_free(NULL, data, m->bytes);
    return m->text != NULL ? AMP_OK : example_fail(AMP_ERR_MEMORY, "%s: no memory", path);
}

/* The description of the model in the file `path`.  model.safetensors uses the config.json beside it; a file with
   another name does so only if it has no description. */
static inline amp_result config_open(model_config *m, const st_file *tensors, const char *path,
                                     const config_rules *rules) {
    char beside[PATH_MAX];
    const char *slash = strrchr(path, '/');
    int named = strcmp(slash != NULL ? slash + 1 : path, "model.safetensors") == 0;
    model_config own;
    amp_result result;
    snprintf(beside, sizeof beside, "%.*sconfig.json", slash != NULL ? (int)(slash - path) + 1 : 0, path);
    memset(m, 0, sizeof *m);
    TRY(config_of_file(&own, tensors, path));
    if (access(beside, F_OK) != 0 || (own.text != NULL && !named)) {
        *m = own;
        if (m->text == NULL)
            return example_fail(
                AMP_ERR_OPEN,
                "%s: no config.json beside it, which says what kind of model it is: put the model's there", path);
        return m->plain ? AMP_OK : config_check(m, rules);
    }
    result = config_read(m, beside);
    if (result == AMP_OK) result = config_check(m, rules);
    if (result == AMP_OK) result = config_agree(m, &own, rules);
    config_close(&own);
    if (result != AMP_OK) config_close(m);
    return result;
}

/* ==== 4 Parameters, and GPT-2 =================================================================== */

/* One big allocation handed out in pieces; with base NULL, only counted. */
typedef struct arena { char *base; int64_t used; } arena;
static inline void *arena_take(arena *a, int64_t count, amp_dtype dtype) {
    char *piece = a->base != NULL ? a->base + a->used : NULL;
    a->used += (count * (int64_t)amp_dtype_size(dtype) + 255) / 256 * 256;
    return piece;
}
/* Elements of a tensor that has no memory yet. */
static inline int64_t shape_count(const amp_tensor *t) {
    return t->ndim == 2 ? t->shape[0] * t->shape[1] : t->shape[0];
}
/* Sets a parameter's name, and shape: a weight [rows, cols], or a vector if cols is 0.  norm 1: of a norm. */
static inline void param_describe(amp_context *amp, amp_param *p, const char *name, int64_t rows, int64_t cols,
                                  int norm) {
    amp_dtype dtype = amp_param_dtype(amp, norm);
    p->name = name;
    p->weight = cols > 0 ? amp_tensor2(NULL, dtype, rows, cols) : amp_tensor1(NULL, dtype, rows);
    p->grad = p->weight;
    p->grad.dtype = AMP_F32;
}

/* Which weights compute in fp8, if the context does: as users of fp8 do, embeddings, head, first and last block stay in
   bf16; with `all` only embeddings and head.  block: what stands before a block's number in names.  *n_fp8: how many
   compute in it. */
static inline amp_result fp8_layers(amp_context *amp, const amp_param *params, int64_t n, const char *block,
                                    int64_t blocks, int all, int *n_fp8) {
    amp_desc desc;
    int64_t i;
    *n_fp8 = 0;
    memset(&desc, 0, sizeof desc);
    TRY(amp_query(amp, &desc));
    for (i = 0; i < n; i++) {
        const char *at = strstr(params[i].name, block);
        int64_t number = at ? strtoll(at + strlen(block), NULL, 10) : 0;
        int inside = at && (all || (number > 0 && number < blocks - 1)), fp8 = desc.autocast_dtype == AMP_FP8;
        if (params[i].weight.ndim != 2) continue;
        *n_fp8 += fp8 && inside;
        if (!inside)
            TRY(amp_layer_override(amp, params[i].name, fp8 ? AMP_BF16 : AMP_DTYPE_DEFAULT));
    }
    return AMP_OK;
}

static inline void params_place(amp_param *params, int64_t n, arena *weights, arena *grads) {
    int64_t i;
    for (i = 0; i < n; i++) {
        amp_param *p = &params[i];
        p->weight.data = arena_take(weights, shape_count(&p->weight), p->weight.dtype);
        p->grad.data = arena_take(grads, shape_count(&p->grad), p->grad.dtype);
    }
}

/* Fails if training takes more memory than there is. */
static inline amp_result memory_check(amp_context *amp, int64_t weights, int64_t grads, int64_t activations,
                                      const char *advice) {
    amp_machine machine;
    double need, have;
    memset(&machine, 0, sizeof machine);
    TRY(amp_query_machine(amp, &machine));
    need = (double)weights + 3.0 * (double)grads + (double)activations;     /* AdamW keeps two moments */
    have = (double)(machine.device.memory > 0 ? machine.device.memory : machine.cpu.memory);
    if (have > 0 && need > have)
        return example_fail(AMP_ERR_MEMORY, "training this model takes about %.1f GB, the device has %.1f GB: "
                            "use a smaller model, batch or sequence%s", need * 1e-9, have * 1e-9, advice);
    return AMP_OK;
}

/* Allocates the counted memory, and restarts the arena in it. */
static inline amp_result arena_allocate(amp_context *amp, arena *a) {
    void *base = NULL;
    TRY(amp_alloc(amp, &base, a->used));
    a->base = (char *)base;
    a->used = 0;
    return AMP_OK;
}
/* A model's parameters, in two allocations: one of weights, one of gradients. */
typedef struct parameters {
    amp_context *amp;
    amp_param *at; int64_t n, count;        /* count: elements */
    char (*names)[80];
    void *weights, *grads;
    int64_t weights_bytes, grads_bytes;
} parameters;

static inline void parameters_free(parameters *p) {
    if (p->amp != NULL) {
        amp_param_forget(p->amp, p->at, p->n);
        amp_free(p->amp, p->weights);
        amp_free(p->amp, p->grads);
    }
    free(p->at); free(p->names);
    memset(p, 0, sizeof *p);
}
/* Room for `most` of them. */
static inline amp_result parameters_open(parameters *p, amp_context *amp, int64_t most) {
    memset(p, 0, sizeof *p);
    p->at = (amp_param *)calloc((size_t)most, sizeof *p->at);
    p->names = (char (*)[80])calloc((size_t)most, sizeof *p->names);
    p->amp = amp;
    if (p->at != NULL && p->names != NULL) return AMP_OK;
    parameters_free(p);
    return example_fail(AMP_ERR_MEMORY, "no memory for the model's tables");
}
static inline amp_param *parameters_add(parameters *p, int norm, int64_t rows, int64_t cols, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
static inline amp_param *parameters_add(parameters *p, int norm, int64_t rows, int64_t cols, const char *format, ...) {
    amp_param *param = &p->at[p->n];
    va_list args;
    va_start(args, format);
    vsnprintf(p->names[p->n], sizeof *p->names, format, args);
    va_end(args);
    param_describe(p->amp, param, p->names[p->n++], rows, cols, norm);
    p->count += shape_count(&param->weight);
    return param;
}
/* activations: bytes that training takes besides; advice: to those who have too little memory. */
static inline amp_result parameters_check(const parameters *p, int64_t activations, const char *advice) {
    return memory_check(p->amp, p->weights_bytes, p->grads_bytes, activations, advice);
}
static inline amp_result parameters_allocate(parameters *p) {
    arena weights = {NULL, 0}, grads = {NULL, 0};
    amp_result result;
    params_place(p->at, p->n, &weights, &grads);
    p->weights_bytes = weights.used; p->grads_bytes = grads.used;
    TRY(parameters_check(p, 0, ""));
    result = arena_allocate(p->amp, &weights);
    if (result == AMP_OK) result = arena_allocate(p->amp, &grads);
    p->weights = weights.base; p->grads = grads.base;
    TRY(result);
    params_place(p->at, p->n, &weights, &grads);
    return amp_param_register(p->amp, p->at, p->n);
}

/* Sets a parameter's weight from fp32 on the host, through its optimizer if there is one; or reads it. */
static inline amp_result param_set(amp_context *amp, amp_optimizer *optimizer, amp_param *param, const float *values) {
    amp_tensor *w = &param->weight;
    int64_t count = amp_tensor_count(w), bytes = count * (int64_t)amp_dtype_size(w->dtype);
    void *scratch;
    amp_result result;
    if (optimizer != NULL) return amp_optimizer_set_weight(optimizer, param, values);
    scratch = malloc((size_t)bytes);
    result = scratch != NULL ? AMP_OK : example_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)bytes);
    if (result == AMP_OK) result = amp_convert(scratch, w->dtype, values, AMP_F32, count, NULL, NULL);
    if (result == AMP_OK) result = amp_copy(amp, w->data, scratch, bytes, AMP_COPY_TO_DEVICE);
    if (result == AMP_OK) result = amp_sync(amp);
    free(scratch);
    amp_param_changed(param);
    return result;
}
static inline amp_result param_get(amp_context *amp, const amp_param *param, float *values) {
    const amp_tensor *w = &param->weight;
    int64_t count = amp_tensor_count(w), bytes = count * (int64_t)amp_dtype_size(w->dtype);
    void *scratch = malloc((size_t)bytes);
    amp_result result = scratch != NULL ? AMP_OK : example_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)bytes);
    if (result == AMP_OK) result = amp_copy(amp, scratch, w->data, bytes, AMP_COPY_TO_HOST);
    if (result == AMP_OK) result = amp_sync(amp);
    if (result == AMP_OK) result = amp_convert(values, AMP_F32, scratch, w->dtype, count, NULL, NULL);
    free(scratch);
    return result;
}
/* Independent standard normal numbers: Box & Muller 1958, from counter-based words, so reproducible. */
static inline void random_normal(float *out, int64_t n, uint64_t seed, uint64_t stream, float deviation) {
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

/* ---- A pass on a tape, in a region of its own */

static inline amp_result tape_begin(amp_tape *tape, int backward) {
    amp_autocast_desc region;
    memset(&region, 0, sizeof region);
    region.mode = backward ? AMP_MODE_TRAINING : AMP_MODE_INFERENCE;
    return amp_tape_begin(tape, &region);
}
/* Runs what was recorded: with backward its first half, from *grad_scale.  *value: where the loss lies. */
static inline amp_result tape_forward(amp_tape *tape, amp_value loss, const float *grad_scale, int backward,
                                      float **value) {
    amp_tensor there;
    TRY(backward ? amp_tape_forward(tape, loss, grad_scale) : amp_tape_finish(tape));
    TRY(amp_tape_tensor(tape, loss, &there));
    *value = (float *)there.data;
    return AMP_OK;
}

/* Adds the times of the tape's last forward (pass 0) or backward (pass 1).  head: the name of the head's weight. */
static inline void tape_profile(profile *p, const amp_tape *tape, int pass, const char *head) {
    static const struct { const char *op; int row; } rows[] = {
        {"embedding", PROFILE_EMBEDDING}, {"linear", PROFILE_LINEAR}, {"activation", PROFILE_LINEAR},
        {"attention", PROFILE_ATTENTION}, {"dropout", PROFILE_DROPOUT}, {"linear_cross_entropy", PROFILE_HEAD},
        {"cross_entropy", PROFILE_LOSS}, {NULL, PROFILE_NORM}};
    amp_tape_node_info node;
    int64_t i;
    int k, row;
    for (i = 0; amp_tape_node(tape, i, &node) == AMP_OK; i++) {
        for (k = 0; rows[k].op != NULL && strcmp(rows[k].op, node.op) != 0; k++) {}
        row = rows[k].row;
        if (row == PROFILE_LINEAR && node.layer != NULL && strcmp(node.layer, head) == 0) row = PROFILE_HEAD;
        p->seconds[row][pass] += node.seconds[pass];
        if (pass == 1) p->seconds[PROFILE_RECOMPUTE][1] += node.seconds[2];
    }
}

#include "llama.h"

/* A Llama as a gpt: below, after gpt.h. */
struct gpt;
struct gpt_config;
static inline int gpt_llama_is_valid(const struct gpt_config *c);
static inline void gpt_llama_describe(struct gpt *g);
static inline amp_value gpt_llama_body(struct gpt *g, const int32_t *ids, int64_t batch, int64_t seq);

#include "gpt.h"

static inline llama_config gpt_as_llama(const gpt_config *c) {
    llama_config like;
    like.vocab = c->vocab; like.positions = c->positions; like.channels = c->channels; like.hidden = c->hidden;
    like.layers = c->layers; like.heads = c->heads; like.kv_heads = c->kv_heads;
    like.base = c->base; like.eps = (double)c->eps;
    return like;
}
static inline int gpt_llama_is_valid(const struct gpt_config *c) {
    llama_config like = gpt_as_llama(c);
    return llama_is_valid(&like);
}
static inline void gpt_llama_describe(struct gpt *g) {
    int64_t shape[2], i;
    char name[80];
    g->as_llama.config = gpt_as_llama(&g->config);
    g->as_llama.amp = g->amp;
    for (i = 0; i < llama_count(&g->as_llama.config); i++) {
        llama_describe(&g->as_llama.config, i, name, shape);
        parameters_add(&g->own, shape[1] == 0, shape[0], shape[1], "%s", name)->embedding = i == 0;
    }
    g->as_llama.params = g->own.at; g->as_llama.n_params = g->own.n;
}
static inline amp_value gpt_llama_body(struct gpt *g, const int32_t *ids, int64_t batch, int64_t seq) {
    amp_tensor tokens = amp_tensor2((void *)(uintptr_t)ids, AMP_I32, batch, seq);
    g->as_llama.stream = gpt_dtype(&g->config, GPT_STREAM);
    g->as_llama.inner = g->config.activations;
    g->as_llama.recompute = g->config.recompute;
    return llama_body(&g->as_llama, g->tape, &tokens);
}

static const char *const gpt_tensor_names[GPT_TENSORS] = {"stream", "norm", "attention", "mlp", "branch"};

/* 1 for Hugging Face's Conv1D weights: the matrices of GPT-2's blocks. */
static inline int gpt_is_conv1d(const gpt *g, int64_t i) {
    return g->config.kv_heads == 0 && i >= 2 && i < g->n_params - 2 && g->params[i].weight.ndim == 2;
}

static inline amp_result gpt_set(gpt *g, int64_t i, const float *values) {
    return param_set(g->amp, g->optimizer, &g->params[i], values);
}
static inline amp_result gpt_get(gpt *g, int64_t i, float *values) { return param_get(g->amp, &g->params[i], values); }

/* GPT-2's initialisation: normal with deviation 0.02, the projections into the residual stream divided by
   sqrt(2 layers), biases 0, LayerNorm weights 1. */
static inline amp_result gpt_init(gpt *g, uint64_t seed) {
    int64_t i, k, count, largest = 0;
    float *values;
    amp_result result = AMP_OK;
    for (i = 0; i < g->n_params; i++) if ((count = amp_tensor_count(&g->params[i].weight)) > largest) largest = count;
    values = (float *)malloc((size_t)largest * sizeof *values);
    if (values == NULL) return example_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 4);
    for (i = 0; i < g->n_params && result == AMP_OK; i++) {
        const char *name = g->params[i].name;
        count = amp_tensor_count(&g->params[i].weight);
        if (g->params[i].weight.ndim == 2) {
            double deviation = strstr(name, "c_proj") != NULL ? 0.02 / sqrt(2.0 * (double)g->config.layers) : 0.02;
            random_normal(values, count, seed, (uint64_t)i + 1, (float)deviation);
        } else {
            int norm = strstr(name, "ln_") != NULL || strstr(name, "norm") != NULL;
            float value = norm && strstr(name, ".weight") != NULL ? 1.0f : 0.0f;
            for (k = 0; k < count; k++) values[k] = value;
        }
        result = gpt_set(g, i, values);
    }
    free(values);
    return result;
}

/* A row's floating-point operations in one forward pass of batch x seq tokens; backward takes twice as many in linear
   layers, and 2.5 times in attention, which computes its scores again. */
static inline double gpt_flops(const gpt *g, int row) {
    const gpt_config *c = &g->config;
    double rows = (double)(c->batch * c->seq), C = (double)c->channels, T = (double)c->seq;
    if (row == PROFILE_LINEAR) return 2 * rows * 12 * C * C * (double)c->layers;
    if (row == PROFILE_HEAD) return 2 * rows * C * (double)c->vocab;
    if (row == PROFILE_ATTENTION) return 4 * rows * (T + 1) / 2 * C * (double)c->layers;    /* causal: half the pairs */
    return 0;
}

/* The least bytes that a row's calls move in a pass (0: forward, 1: backward): each tensor read once by each call that
   needs it, and written once.  The optimizer's are those of amp_step, from amp_optimizer_bytes. */
typedef struct gpt_traffic { double bytes, calls; } gpt_traffic;

/* What the head's product of the last pass computed in. */
static inline amp_dtype gpt_compute(const gpt *g) {
    amp_tape_node_info node;
    int64_t i;
    for (i = 0; amp_tape_node(g->tape, i, &node) == AMP_OK; i++)
        if (strncmp(node.op, "linear", 6) == 0 && node.layer == g->head->name) return node.compute;
    return AMP_F32;
}

/* compute: gpt_compute's. */
static inline gpt_traffic gpt_bytes(const gpt *g, int row, int pass, amp_dtype compute) {
    const gpt_config *c = &g->config;
    double rows = (double)(c->batch * c->seq), C = (double)c->channels, n = rows * C, L = (double)c->layers;
    double V = (double)c->vocab;
    double stream = (double)amp_dtype_size(gpt_dtype(c, GPT_STREAM));
    double branch = (double)amp_dtype_size(gpt_dtype(c, GPT_BRANCH));
    double norm = (double)amp_dtype_size(gpt_dtype(c, GPT_NORM)), mlp = (double)amp_dtype_size(gpt_dtype(c, GPT_MLP));
    double heads = (double)amp_dtype_size(gpt_dtype(c, GPT_ATTENTION));
    double logits = (double)amp_dtype_size(gpt_dtype(c, GPT_LOGITS));
    double grad = (double)amp_dtype_size(g->params[0].grad.dtype);
    double stored = (double)amp_dtype_size(g->params[0].weight.dtype);
    double weight = (double)amp_dtype_size(compute);     /* as products read it */
    double low = stream == 4 && weight == 2 ? 2 : stream;               /* of the branches' gradients */
    gpt_traffic t = {0, 0};
    switch (row) {
        case PROFILE_EMBEDDING:                 /* a row of the table that occurs again is read and written once */
            t.calls = 1;
            t.bytes = n * stream + (rows < V ? rows : V) * C * (pass ? 2 * grad : stored);
            break;
        case PROFILE_NORM:                      /* all but the first add a branch to the stream */
            t.calls = 2 * L + 1;
            t.bytes = pass ? n * ((2 * L + 1) * (norm + 2 * stream) + 2 * L * (stream + (low < stream ? low : 0)))
                           : n * ((2 * L + 1) * (stream + norm) + 2 * L * (branch + stream));
            break;
        case PROFILE_LINEAR:
            t.calls = 4 * L;
            t.bytes = pass ? L * (n * (4 * norm + 5 * heads + 16 * mlp + 2 * low) + 12 * C * C * (weight + grad))
                           : L * (n * (2 * norm + 4 * heads + 12 * mlp + 2 * branch) + 12 * C * C * weight);
            break;
        case PROFILE_ATTENTION: t.calls = L; t.bytes = L * n * heads * (pass ? 8 : 4); break;
        case PROFILE_DROPOUT:
            t.calls = c->dropout > 0 ? 2 * L + 1 : 0;
            t.bytes = t.calls * 2 * n * branch;
            break;
        case PROFILE_HEAD:
            t.calls = 1;
            t.bytes = n * norm * (pass ? 2 : 1) + V * C * (weight + (pass ? grad : 0)) + rows * V * logits;
            break;
        case PROFILE_LOSS: t.calls = pass ? 0 : 1; t.bytes = pass ? 0 : 2 * rows * V * logits; break;
        default: break;
    }
    return t;
}
static inline gpt_traffic optimizer_traffic(const amp_parameter_bytes *b) {
    gpt_traffic t;
    t.calls = 1;
    t.bytes = (double)b->parameters * (b->gradient + 2 * (b->weight + b->master + b->moments));
    return t;
}

/* ==== 5 Model files ==============================================================================
   Reads safetensors as Hugging Face writes them, and llm.c's model files; writes safetensors. */

typedef struct gpt_file {
    void *data;
    size_t bytes;
    st_file tensors;                /* n is 0 for llm.c */
    int llmc;                       /* 3: fp32, 5: bf16, 0: safetensors */
    int64_t padded_vocab;           /* llm.c: rows of wte in the file */
    model_config described;         /* text NULL for llm.c */
    gpt_config config;              /* vocab to layers and act to by_layer, as the file says */
} gpt_file;

static inline void gpt_file_close(gpt_file *file) {
    st_close(&file->tensors);
    config_close(&file->described);
    amp_file_free(NULL, file->data, file->bytes);
    memset(file, 0, sizeof *file);
}

/* By the full name, or without "transformer.", as in older files. */
static inline const st_tensor *gpt_file_find(const gpt_file *file, const char *name) {
    const st_tensor *t = st_find(&file->tensors, name);
    return t != NULL ? t : st_find(&file->tensors, name + strlen("transformer."));
}

static const config_only gpt_config_only[] = {{"tie_word_embeddings", "true"}, {NULL, NULL}};
static const config_rules gpt_config_rules =
    {"model_type vocab_size n_positions n_embd n_layer n_head n_inner max_position_embeddings hidden_size "
     "num_hidden_layers "
     "num_attention_heads activation_function layer_norm_epsilon scale_attn_weights scale_attn_by_inverse_layer_idx "
     "embd_pdrop "
     "resid_pdrop attn_pdrop",
     "n_ctx is_decoder problem_type hidden_dropout classifier_dropout "
     "reorder_and_upcast_attn", /* where PyTorch rounds: scores are fp32 here anyway */
     gpt_config_only,
     "n_head activation_function layer_norm_epsilon scale_attn_weights scale_attn_by_inverse_layer_idx"};

/* Reads what no shape tells, and checks the rest against the weights. */
static inline amp_result gpt_read_config(model_config *m, gpt_config *c) {
    char type[64] = "gpt2";
    int64_t inner = 4 * c->channels, heads;
    int32_t scaled = 1;
    double eps = 1e-5;
    json value;
    TRY(config_word(m, "model_type", type));
    if (strcmp(type, "gpt2") != 0) return config_refuse(m, "model_type", "must be gpt2");
    TRY(config_shape(m, "vocab_size", c->vocab));
    TRY(config_shape(m, "n_positions", c->positions));
    TRY(config_shape(m, "max_position_embeddings", c->positions));
    TRY(config_shape(m, "n_embd", c->channels));
    TRY(config_shape(m, "hidden_size", c->channels));
    TRY(config_shape(m, "n_layer", c->layers));
    TRY(config_shape(m, "num_hidden_layers", c->layers));
    if (config_get(m, "n_inner", &value) && *value.at != 'n') TRY(config_shape(m, "n_inner", inner));
    c->heads = 12;                  /* transformers' default, like the others */
    TRY(config_integer(m, "n_head", 1, INT32_MAX, &c->heads));
    heads = c->heads;
    TRY(config_integer(m, "num_attention_heads", 1, INT32_MAX, &heads));
    if (heads != c->heads && config_get(m, "n_head", &value))
        return config_refuse(m, "num_attention_heads", "n_head is %lld", (long long)c->heads);
    c->heads = heads;
    if (c->channels % heads != 0)
        return config_refuse(m, config_get(m, "n_head", &value) ? "n_head" : "num_attention_heads",
                             "%lld heads do not divide %lld channels", (long long)heads, (long long)c->channels);
    c->act = AMP_ACT_GELU;
    TRY(config_activation(m, "activation_function", &c->act));
    TRY(config_number(m, "layer_norm_epsilon", 1e-37, 1e37, &eps));
    c->eps = (float)eps;
    TRY(config_switch(m, "scale_attn_weights", &scaled));
    c->unscaled = !scaled;
    c->by_layer = 0;
    TRY(config_switch(m, "scale_attn_by_inverse_layer_idx", &c->by_layer));
    TRY(config_dropout(m, "embd_pdrop"));
    TRY(config_dropout(m, "resid_pdrop"));
    return config_dropout(m, "attn_pdrop");
}

/* In llama_files.h. */
static inline amp_result llama_open_config(model_config *m, const st_file *tensors, const char *path, llama_config *c);

/* The same of a Llama.  tensors NULL: m is its text already. */
static inline amp_result gpt_read_llama(model_config *m, const st_file *tensors, const char *path, gpt_config *c) {
    llama_config like;
    memset(&like, 0, sizeof like);
    TRY(llama_open_config(m, tensors, path, &like));
    c->vocab = like.vocab; c->positions = like.positions; c->channels = like.channels; c->hidden = like.hidden;
    c->layers = like.layers; c->heads = like.heads; c->kv_heads = like.kv_heads;
    c->base = like.base; c->eps = (float)like.eps;
    c->act = AMP_ACT_GELU;          /* of nothing, as gpt_create has it */
    return AMP_OK;
}

static inline amp_result gpt_file_shape(gpt_file *file, const char *path) {
    const st_tensor *wte = gpt_file_find(file, "transformer.wte.weight"),
                    *wpe = gpt_file_find(file, "transformer.wpe.weight");
    gpt_config *c = &file->config;
    if (st_find(&file->tensors, "model.embed_tokens.weight") != NULL)
        return gpt_read_llama(&file->described, &file->tensors, path, c);
    if (wte == NULL || wpe == NULL || wte->ndim != 2 || wpe->ndim != 2 || wte->shape[1] != wpe->shape[1])
        return example_fail(AMP_ERR_FORMAT,
                            "%s: not a GPT-2: wte.weight and wpe.weight are missing or do not match", path);
    c->vocab = wte->shape[0];
    c->positions = wpe->shape[0];
    c->channels = wte->shape[1];
    for (c->layers = 0; c->layers < 10000; c->layers++) {
        char name[64];
        snprintf(name, sizeof name, "transformer.h.%lld.ln_1.weight", (long long)c->layers);
        if (gpt_file_find(file, name) == NULL) break;
    }
    TRY(config_open(&file->described, &file->tensors, path, &gpt_config_rules));
    return gpt_read_config(&file->described, c);
}

static inline int32_t bytes_i32(const unsigned char *p) {
    return (int32_t)((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
}

/* llm.c: 256 int32 (magic, version, positions, vocab, layers, heads, channels, padded vocab), then the tensors. */
enum { LLMC_MODEL_MAGIC = 20240326, LLMC_HEADER = 1024 };
static inline amp_result gpt_file_llmc(gpt_file *file, const char *path) {
    const unsigned char *p = (const unsigned char *)file->data;
    gpt_config *c = &file->config;
    double count;
    if (file->bytes < LLMC_HEADER)
        return example_fail(AMP_ERR_TRUNCATED, "%s: the llm.c model file ends in its header", path);
    file->llmc = bytes_i32(p + 4);
    if (file->llmc != 3 && file->llmc != 5)
        return example_fail(AMP_ERR_FORMAT, "%s: llm.c model version %d, must be 3 (fp32) or 5 (bf16)",
                            path, file->llmc);
    c->positions = bytes_i32(p + 8);
    c->vocab = bytes_i32(p + 12);
    c->layers = bytes_i32(p + 16);
    c->heads = bytes_i32(p + 20);
    c->channels = bytes_i32(p + 24);
    c->act = AMP_ACT_GELU;
    c->eps = 1e-5f;
    file->padded_vocab = bytes_i32(p + 28);
    if (c->positions < 1 || c->vocab < 1 || c->layers < 1 || c->layers > 10000 || c->heads < 1 || c->channels < 1 ||
        file->padded_vocab < c->vocab)
        return example_fail(AMP_ERR_FORMAT, "%s: the header of the llm.c model file makes no sense", path);
    count = (double)c->channels * ((double)file->padded_vocab + (double)c->positions + 2 +
                                   (double)c->layers * (12 * (double)c->channels + 13));
    if ((double)(file->bytes - LLMC_HEADER) < count * (file->llmc == 3 ? 4 : 2))
        return example_fail(AMP_ERR_TRUNCATED, "%s: %zu bytes are too few for the model of its header", path,
                            file->bytes);
    return AMP_OK;
}

/* The shape of the model whose file is file->data.  Nothing in the file is trusted. */
static inline amp_result gpt_file_parse(gpt_file *file, const char *path) {
    if (file->bytes >= 4 && bytes_i32((const unsigned char *)file->data) == LLMC_MODEL_MAGIC)
        return gpt_file_llmc(file, path);
    TRY(st_open(&file->tensors, file->data, file->bytes));
    return gpt_file_shape(file, path);
}

/* Opens a model file and reads its shape. */
static inline amp_result gpt_file_open(gpt_file *file, const char *path) {
    amp_result result;
    memset(file, 0, sizeof *file);
    TRY(amp_file_read_all(NULL, path, &file->data, &file->bytes));
    result = gpt_file_parse(file, path);
    if (result != AMP_OK) gpt_file_close(file);
    return result;
}

static inline void transpose(float *out, const float *in, int64_t rows, int64_t cols) {
    int64_t i, j;
    for (i = 0; i < rows; i++) for (j = 0; j < cols; j++) out[j * rows + i] = in[i * cols + j];
}

/* Finds parameter i in a safetensors file, with the model's shape and a supported dtype. */
static inline amp_result gpt_file_check(const gpt_file *file, const gpt *g, int64_t i, const st_tensor **out) {
    const amp_param *p = &g->params[i];
    const st_tensor *t = gpt_file_find(file, p->name);
    int conv1d = gpt_is_conv1d(g, i);
    int64_t rows = p->weight.shape[0], cols = p->weight.ndim == 2 ? p->weight.shape[1] : 1;
    if (t == NULL) return example_fail(AMP_ERR_NAME, "%s is not in the file", p->name);
    if (t->ndim != p->weight.ndim || t->shape[0] != (conv1d ? cols : rows) ||
        (t->ndim == 2 && t->shape[1] != (conv1d ? rows : cols)))
        return example_fail(AMP_ERR_SHAPE, "%s: its shape is not the model's", p->name);
    *out = t;
    return st_check_floats(t);
}
/* Its elements, as [out, in].  scratch: as large as values. */
static inline amp_result gpt_file_tensor(const gpt_file *file, const gpt *g, int64_t i, float *values, float *scratch) {
    const amp_param *p = &g->params[i];
    const st_tensor *t = NULL;
    int conv1d = gpt_is_conv1d(g, i);
    TRY(gpt_file_check(file, g, i, &t));
    TRY(st_floats(t, conv1d ? scratch : values));
    if (conv1d) transpose(values, scratch, p->weight.shape[1], p->weight.shape[0]);
    return AMP_OK;
}

/* Where parameter i begins in an llm.c file, in elements: tensors of one kind are stored together for all layers. */
static inline int64_t gpt_file_llmc_offset(const gpt_file *file, const gpt *g, int64_t i) {
    int64_t C = g->config.channels, L = g->config.layers, offset = 0, part = (i - 2) % GPT_PARTS,
            layer = (i - 2) / GPT_PARTS, k;
    if (i == 0) return 0;
    offset = file->padded_vocab * C;
    if (i == 1) return offset;
    offset += g->config.positions * C;
    if (i >= g->n_params - 2) part = GPT_PARTS, layer = 0;
    for (k = 0; k < part; k++)
        offset += L * gpt_parts[k].rows * C * (gpt_parts[k].cols > 0 ? gpt_parts[k].cols * C : 1);
    if (part == GPT_PARTS) return offset + (i == g->n_params - 1 ? C : 0);
    return offset + layer * amp_tensor_count(&g->params[i].weight);
}

/* Refuses a file whose output weights are not the embedding. */
static inline amp_result gpt_file_check_tied(const gpt_file *file) {
    const st_tensor *head = st_find(&file->tensors, "lm_head.weight"),
                    *wte = gpt_file_find(file, "transformer.wte.weight");
    if (head == NULL || wte == NULL) return AMP_OK;
    if (head->dtype == wte->dtype && head->count == wte->count &&
        memcmp(head->data, wte->data, (size_t)wte->count * amp_dtype_size(wte->dtype)) == 0) return AMP_OK;
    return example_fail(AMP_ERR_UNSUPPORTED, "lm_head.weight differs from wte.weight: this model ties them");
}

/* The model keeps the text, to write it back; metadata of version 0.1.0 adds nothing to the model. */
static inline amp_result config_take(char **json_of_model, const model_config *m) {
    free(*json_of_model);
    *json_of_model = NULL;
    if (m->text == NULL || m->plain) return AMP_OK;
    *json_of_model = (char *)malloc(m->bytes + 1);
    if (*json_of_model == NULL) return example_fail(AMP_ERR_MEMORY, "no memory for the text of config.json");
    memcpy(*json_of_model, m->text, m->bytes);
    (*json_of_model)[m->bytes] = 0;
    return AMP_OK;
}

/* Loads all weights of a file with the model's shape, or none. */
static inline amp_result gpt_file_load(const gpt_file *file, gpt *g) {
    int64_t i, count, largest = 0;
    const st_tensor *t;
    float *values, *scratch;
    amp_result result = AMP_OK;
    if (file->llmc == 0 && file->config.kv_heads == 0) TRY(gpt_file_check_tied(file));
    if (file->config.vocab != g->config.vocab || file->config.positions != g->config.positions ||
        file->config.channels != g->config.channels || file->config.layers != g->config.layers ||
        file->config.hidden != g->config.hidden || file->config.kv_heads != g->config.kv_heads)
        return example_fail(AMP_ERR_SHAPE,
                            "the file holds another model: %lld tokens, %lld positions, %lld channels, %lld layers",
                            (long long)file->config.vocab, (long long)file->config.positions,
                            (long long)file->config.channels, (long long)file->config.layers);
    if (file->config.heads != g->config.heads || file->config.act != g->config.act ||
        file->config.eps < g->config.eps || file->config.eps > g->config.eps ||
        file->config.unscaled != g->config.unscaled || file->config.by_layer != g->config.by_layer)
        return example_fail(AMP_ERR_MISMATCH,
                            "the file's model has other heads, or another activation, epsilon or attention scale");
    for (i = 0; i < g->n_params && file->llmc == 0; i++) TRY(gpt_file_check(file, g, i, &t));
    for (i = 0; i < g->n_params; i++) if ((count = amp_tensor_count(&g->params[i].weight)) > largest) largest = count;
    values = (float *)malloc((size_t)largest * 2 * sizeof *values);
    if (values == NULL) return example_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 8);
    scratch = values + largest;
    for (i = 0; i < g->n_params && result == AMP_OK; i++) {
        if (file->llmc == 0) result = gpt_file_tensor(file, g, i, values, scratch);
        else {
            amp_dtype dtype = file->llmc == 3 ? AMP_F32 : AMP_BF16;
            int64_t offset = LLMC_HEADER + gpt_file_llmc_offset(file, g, i) * (int64_t)amp_dtype_size(dtype);
            result = amp_convert(values, AMP_F32, (char *)file->data + offset, dtype,
                                 amp_tensor_count(&g->params[i].weight), NULL, NULL);
        }
        if (result == AMP_OK) result = gpt_set(g, i, values);
    }
    free(values);
    return result == AMP_OK ? config_take(&g->json, &file->described) : result;
}

/* A text that grows. */
typedef struct text_buffer { char *text; size_t used, capacity; int failed; } text_buffer;
static inline void text_put(text_buffer *b, const char *piece, size_t n) {
    if (b->used + n + 1 > b->capacity) {
        char *more = (char *)realloc(b->text, (b->capacity + n) * 2 + 1024);
        if (more == NULL) b->failed = 1;
        else { b->text = more; b->capacity = (b->capacity + n) * 2 + 1024; }
    }
    if (b->failed) return;
    memcpy(b->text + b->used, piece, n);
    b->used += n;
    b->text[b->used] = 0;
}
static inline void text_add(text_buffer *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void text_add(text_buffer *b, const char *format, ...) {
    char piece[512];
    va_list args;
    size_t n;
    va_start(args, format);
    n = (size_t)vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    if (n >= sizeof piece) b->failed = 1;
    else text_put(b, piece, n);
}

/* The characters of a JSON string. */
static inline void text_add_escaped(text_buffer *b, const char *text) {
    for (; *text != 0; text++) {
        unsigned char c = (unsigned char)*text;
        if (c < 0x20) text_add(b, "\\u%04x", c);
        else text_add(b, "%s%c", c == '"' || c == '\\' ? "\\" : "", c);
    }
}

/* Values of our own for a config.json, as JSON. */
typedef enum config_how {
    CONFIG_ADD = 0,                 /* if the key is missing */
    CONFIG_SET = 1,                 /* always */
    CONFIG_REPLACE = 2              /* if the key exists */
} config_how;
typedef struct config_own { const char *key; char value[64]; config_how how; const char *longer; } config_own;

static inline void config_add(text_buffer *b, const char *key, const char *value, size_t n) {
    text_add(b, "%s\n  \"", b->used > 1 ? "," : "");
    text_put(b, key, strlen(key));
    text_add(b, "\": ");
    text_put(b, value, n);
}

/* The object `source` (NULL: an empty one) with our own values in it; the others stay unchanged. */
static inline void config_merge(text_buffer *b, const char *source, const config_own *own, int n) {
    json j = json_open(source != NULL ? source : "{}", source != NULL ? strlen(source) : 2), value;
    char key[128];
    int more, i;
    text_add(b, "{");
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more; more = json_take(&j, ',')) {
        const char *from, *mine = NULL;
        json_peek(&j);
        from = j.at;
        if (!json_member(&j, key, &value)) break;
        for (i = 0; i < n; i++)
            if (own[i].how != CONFIG_ADD && strcmp(own[i].key, key) == 0)
                mine = own[i].longer != NULL ? own[i].longer : own[i].value;
        text_add(b, "%s\n  ", b->used > 1 ? "," : "");
        text_put(b, from, (size_t)((mine != NULL ? value.at : value.end) - from));
        if (mine != NULL) text_put(b, mine, strlen(mine));
    }
    for (i = 0; i < n; i++) {
        const char *mine = own[i].longer != NULL ? own[i].longer : own[i].value;
        if (own[i].how != CONFIG_REPLACE &&
            (source == NULL || !json_value(json_open(source, strlen(source)), own[i].key, &value)))
            config_add(b, own[i].key, mine, strlen(mine));
    }
    text_add(b, "\n}\n");
}

static inline amp_result config_save(const text_buffer *b, const char *path) {
    return b->failed ? example_fail(AMP_ERR_MEMORY, "no memory for %s", path)
                     : amp_file_write_atomic(NULL, path, b->text, b->used);
}

/* An entry of a safetensors header: fp32 [rows, cols] or, with cols 0, [rows]; *offset moves on. */
static inline void st_add_entry(text_buffer *b, const char *name, int64_t rows, int64_t cols, int64_t *offset) {
    int64_t end = *offset + rows * (cols > 0 ? cols : 1) * 4;
    text_add(b, ",\"%s\":{\"dtype\":\"F32\",\"shape\":[%lld", name, (long long)rows);
    if (cols > 0) text_add(b, ",%lld", (long long)cols);
    text_add(b, "],\"data_offsets\":[%lld,%lld]}", (long long)*offset, (long long)end);
    *offset = end;
}
static inline amp_result st_end_header(text_buffer *b) {
    text_add(b, "}");
    while (!b->failed && b->used % 8 != 0) text_add(b, " ");        /* the data starts aligned */
    return b->failed ? example_fail(AMP_ERR_MEMORY, "no memory for the file's header") : AMP_OK;
}

static inline void config_own_put(config_own *own, const char *key, config_how how, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static inline void config_own_put(config_own *own, const char *key, config_how how, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(own->value, sizeof own->value, format, args);
    va_end(args);
    own->key = key;
    own->how = how;
    own->longer = NULL;
}

static inline void llama_config_text(const llama_config *c, const char *source, text_buffer *b);

/* The config.json that transformers' from_pretrained needs beside model.safetensors. */
static inline void gpt_config_text(const gpt *g, text_buffer *b) {
    const gpt_config *c = &g->config;
    config_own own[20];
    int n = 0;
    if (c->kv_heads > 0) {
        llama_config_text(&g->as_llama.config, g->json, b);
        return;
    }
    config_own_put(&own[n++], "architectures", CONFIG_SET, "[\"GPT2LMHeadModel\"]");
    config_own_put(&own[n++], "dtype", CONFIG_REPLACE, "\"float32\"");
    config_own_put(&own[n++], "torch_dtype", CONFIG_REPLACE, "\"float32\"");
    config_own_put(&own[n++], "model_type", CONFIG_ADD, "\"gpt2\"");
    config_own_put(&own[n++], "activation_function", CONFIG_ADD, "\"%s\"", activation_text(c->act));
    config_own_put(&own[n++], "layer_norm_epsilon", CONFIG_ADD, "%g", (double)c->eps);
    config_own_put(&own[n++], "scale_attn_weights", CONFIG_ADD, c->unscaled ? "false" : "true");
    config_own_put(&own[n++], "scale_attn_by_inverse_layer_idx", CONFIG_ADD, c->by_layer ? "true" : "false");
    config_own_put(&own[n++], "vocab_size", CONFIG_ADD, "%lld", (long long)c->vocab);
    config_own_put(&own[n++], "n_positions", CONFIG_ADD, "%lld", (long long)c->positions);
    config_own_put(&own[n++], "n_embd", CONFIG_ADD, "%lld", (long long)c->channels);
    config_own_put(&own[n++], "n_layer", CONFIG_ADD, "%lld", (long long)c->layers);
    config_own_put(&own[n++], "n_head", CONFIG_ADD, "%lld", (long long)c->heads);
    config_own_put(&own[n++], "tie_word_embeddings", CONFIG_ADD, "true");
    if (g->json == NULL) config_own_put(&own[n++], "bos_token_id", CONFIG_ADD, "null");
    if (g->json == NULL) config_own_put(&own[n++], "eos_token_id", CONFIG_ADD, "null");
    config_merge(b, g->json, own, n);
}

/* A file's metadata: what other programs expect, `more`, and a copy of its config.json. */
static inline amp_result st_begin_header(text_buffer *b, const text_buffer *config, const char *more) {
    text_add(b,
             "{\"__metadata__\":{\"format\":\"pt\"," ST_CHECKSUM "00000000\",\"producer\":\"amp.h %s\",%s\"config\":\"",
             AMP_VERSION_TEXT, more);
    if (config->failed) return example_fail(AMP_ERR_MEMORY, "no memory for the file's header");
    text_add_escaped(b, config->text);
    text_add(b, "\"}");
    return AMP_OK;
}

static inline amp_result gpt_header_text(const gpt *g, int64_t step, text_buffer *b) {
    text_buffer config = {NULL, 0, 0, 0};
    char more[64];
    int64_t i, offset = 0;
    amp_result result;
    snprintf(more, sizeof more, "\"step\":\"%lld\",", (long long)step);
    gpt_config_text(g, &config);
    result = st_begin_header(b, &config, more);
    free(config.text);
    TRY(result);
    for (i = 0; i < g->n_params; i++) {
        const amp_tensor *w = &g->params[i].weight;
        int conv1d = gpt_is_conv1d(g, i);
        st_add_entry(b, g->params[i].name, w->shape[conv1d ? 1 : 0], w->ndim == 1 ? 0 : w->shape[conv1d ? 0 : 1],
                     &offset);
    }
    return st_end_header(b);
}

/* Stores fp32 numbers in little-endian order. */
static inline void floats_to_bytes(unsigned char *out, const float *in, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &in[i], sizeof bits);
        out[4 * i] = (unsigned char)bits;              out[4 * i + 1] = (unsigned char)(bits >> 8);
        out[4 * i + 2] = (unsigned char)(bits >> 16);  out[4 * i + 3] = (unsigned char)(bits >> 24);
    }
}

/* Writes a header at the beginning of a file; returns the data's place. */
static inline unsigned char *st_put_header(const text_buffer *header, unsigned char *file) {
    int i;
    for (i = 0; i < 8; i++) file[i] = (unsigned char)((uint64_t)header->used >> (8 * i));
    memcpy(file + 8, header->text, header->used);
    return file + 8 + header->used;
}

static inline amp_result gpt_fill_file(gpt *g, const text_buffer *header, unsigned char *file) {
    int64_t i, largest = 0, count;
    unsigned char *out = st_put_header(header, file);
    float *values, *scratch;
    amp_result result = AMP_OK;
    for (i = 0; i < g->n_params; i++) if ((count = amp_tensor_count(&g->params[i].weight)) > largest) largest = count;
    values = (float *)malloc((size_t)largest * 2 * sizeof *values);
    if (values == NULL) return example_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 8);
    scratch = values + largest;
    for (i = 0; i < g->n_params && result == AMP_OK; i++) {
        const amp_tensor *w = &g->params[i].weight;
        int conv1d = gpt_is_conv1d(g, i);
        result = gpt_get(g, i, conv1d ? scratch : values);
        if (conv1d) transpose(values, scratch, w->shape[0], w->shape[1]);
        count = amp_tensor_count(w);
        floats_to_bytes(out, values, count);
        out += count * 4;
    }
    free(values);
    return result;
}

/* Writes the weights as fp32 safetensors with Hugging Face's names, atomically. */
static inline amp_result gpt_save_safetensors(gpt *g, const char *path, int64_t step) {
    text_buffer header = {NULL, 0, 0, 0};
    unsigned char *file = NULL;
    size_t bytes = 0;
    amp_result result = gpt_header_text(g, step, &header);
    if (result == AMP_OK) {
        bytes = 8 + header.used + (size_t)g->own.count * 4;
        file = (unsigned char *)malloc(bytes);
        if (file == NULL) result = example_fail(AMP_ERR_MEMORY, "%zu bytes for %s", bytes, path);
    }
    if (result == AMP_OK) result = gpt_fill_file(g, &header, file);
    if (result == AMP_OK) st_seal(file, bytes, 8 + header.used);
    if (result == AMP_OK) result = amp_file_write_atomic(NULL, path, file, bytes);
    free(header.text);
    free(file);
    return result;
}

static inline amp_result gpt_save_config(const gpt *g, const char *path) {
    text_buffer b = {NULL, 0, 0, 0};
    amp_result result;
    gpt_config_text(g, &b);
    result = config_save(&b, path);
    free(b.text);
    return result;
}

/* The weights as records "weight.<name>", in their own dtype: bit for bit. */
static inline amp_result gpt_save_state(gpt *g, amp_state *state) {
    int64_t i;
    for (i = 0; i < g->n_params; i++) {
        const amp_tensor *w = &g->params[i].weight;
        int64_t count = amp_tensor_count(w), bytes = count * (int64_t)amp_dtype_size(w->dtype);
        char key[80 + 8];
        void *scratch = malloc((size_t)bytes);
        amp_result result = scratch != NULL ? AMP_OK : example_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)bytes);
        snprintf(key, sizeof key, "weight.%s", g->params[i].name);
        if (result == AMP_OK) result = amp_copy(g->amp, scratch, w->data, bytes, AMP_COPY_TO_HOST);
        if (result == AMP_OK) result = amp_sync(g->amp);
        if (result == AMP_OK) result = amp_state_put(state, key, w->dtype, scratch, count);
        free(scratch);
        TRY(result);
    }
    return AMP_OK;
}

/* Loads all of them, or none. */
static inline amp_result gpt_load_state(gpt *g, const amp_state *state) {
    int64_t i, bytes, largest = 1;
    amp_result result = AMP_OK;
    amp_dtype dtype;
    char key[80 + 8];
    void *scratch;
    for (i = 0; i < g->n_params; i++) {
        const amp_tensor *w = &g->params[i].weight;
        snprintf(key, sizeof key, "weight.%s", g->params[i].name);
        if (amp_state_count(state, key, &dtype) != amp_tensor_count(w) || dtype != w->dtype)
            return example_fail(AMP_ERR_MISMATCH,
                                "the checkpoint has no record %s of %lld x %s: it is of another model", key,
                                (long long)amp_tensor_count(w), amp_dtype_name(w->dtype));
        bytes = amp_tensor_count(w) * (int64_t)amp_dtype_size(w->dtype);
        if (bytes > largest) largest = bytes;
    }
    scratch = malloc((size_t)largest);
    if (scratch == NULL) return example_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest);
    for (i = 0; i < g->n_params && result == AMP_OK; i++) {
        const amp_tensor *w = &g->params[i].weight;
        int64_t count = amp_tensor_count(w);
        snprintf(key, sizeof key, "weight.%s", g->params[i].name);
        result = amp_state_get(state, key, w->dtype, scratch, count);
        if (result == AMP_OK)
            result = amp_copy(g->amp, w->data, scratch, count * (int64_t)amp_dtype_size(w->dtype), AMP_COPY_TO_DEVICE);
        if (result == AMP_OK) result = amp_sync(g->amp);
        amp_param_changed(&g->params[i]);
    }
    free(scratch);
    return result;
}

/* ---- Any model whose parameters have the names, shapes and order of Hugging Face's */

/* Sets all weights from a file: nothing, if one is missing or has another shape. */
static inline amp_result st_load_params(const st_file *file, amp_context *amp, amp_param *params, int64_t n) {
    int64_t i, largest = 0;
    float *values;
    amp_result result = AMP_OK;
    for (i = 0; i < n; i++) {
        const amp_tensor *w = &params[i].weight;
        const st_tensor *t = st_find(file, params[i].name);
        if (t == NULL) return example_fail(AMP_ERR_NAME, "%s is not in the file", params[i].name);
        if (t->ndim != w->ndim || t->shape[0] != w->shape[0] || (t->ndim == 2 && t->shape[1] != w->shape[1]))
            return example_fail(AMP_ERR_SHAPE, "%s: its shape is not the model's", params[i].name);
        TRY(st_check_floats(t));
        if (t->count > largest) largest = t->count;
    }
    values = (float *)malloc((size_t)largest * sizeof *values);
    if (values == NULL) return example_fail(AMP_ERR_MEMORY, "%lld bytes", (long long)largest * 4);
    for (i = 0; i < n && result == AMP_OK; i++) {
        result = st_floats(st_find(file, params[i].name), values);
        if (result == AMP_OK) result = param_set(amp, NULL, &params[i], values);
    }
    free(values);
    return result;
}

/* Writes them as fp32 safetensors, with the description that from_pretrained needs, atomically. */
static inline amp_result st_save_params(const char *path, amp_context *amp, const amp_param *params, int64_t n,
                                        const text_buffer *config) {
    text_buffer header = {NULL, 0, 0, 0};
    unsigned char *file = NULL, *out;
    int64_t offset = 0, largest = 0, i;
    float *values = NULL;
    size_t bytes = 0;
    amp_result result = st_begin_header(&header, config, "");
    for (i = 0; i < n; i++) {
        const amp_tensor *w = &params[i].weight;
        st_add_entry(&header, params[i].name, w->shape[0], w->ndim == 1 ? 0 : w->shape[1], &offset);
        if (amp_tensor_count(w) > largest) largest = amp_tensor_count(w);
    }
    if (result == AMP_OK) result = st_end_header(&header);
    if (result == AMP_OK) {
        bytes = 8 + header.used + (size_t)offset;
        file = (unsigned char *)malloc(bytes);
        values = (float *)malloc((size_t)largest * sizeof *values);
        if (file == NULL || values == NULL) result = example_fail(AMP_ERR_MEMORY, "%zu bytes for %s", bytes, path);
    }
    out = result == AMP_OK ? st_put_header(&header, file) : NULL;
    for (i = 0; i < n && result == AMP_OK; i++) {
        result = param_get(amp, &params[i], values);
        floats_to_bytes(out, values, amp_tensor_count(&params[i].weight));
        out += 4 * amp_tensor_count(&params[i].weight);
    }
    if (result == AMP_OK) st_seal(file, bytes, 8 + header.used);
    if (result == AMP_OK) result = amp_file_write_atomic(NULL, path, file, bytes);
    free(header.text);
    free(values);
    free(file);
    return result;
}

#include "llama_files.h"

/* ==== 6 Sampling ================================================================================= */

/* How the next token is drawn.  temperature 0: the most likely one; top_k 0: from all tokens. */
typedef struct sampler {
    double temperature;
    int64_t top_k;
    uint64_t seed;
} sampler;

static inline int compare_floats_falling(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Draws from softmax(logits / temperature), restricted to the top_k largest; u is uniform in [0, 1). */
static inline int32_t sample_token(const sampler *s, float *logits, float *scratch, int64_t vocab, double u) {
    float best = logits[0], least = -3.4e38f;
    double total = 0, sum = 0;
    int64_t i, at = 0;
    for (i = 1; i < vocab; i++) if (logits[i] > best) { best = logits[i]; at = i; }
    if (s->temperature <= 0) return (int32_t)at;
    if (s->top_k > 0 && s->top_k < vocab) {
        memcpy(scratch, logits, (size_t)vocab * sizeof *scratch);
        qsort(scratch, (size_t)vocab, sizeof *scratch, compare_floats_falling);
        least = scratch[s->top_k - 1];
    }
    for (i = 0; i < vocab; i++) {
        double weight = logits[i] < least ? 0 : exp((double)(logits[i] - best) / s->temperature);
        scratch[i] = (float)weight;
        total += (double)scratch[i];
    }
    for (i = 0; i < vocab; i++) {
        sum += (double)scratch[i];
        if (scratch[i] > 0 && sum > u * total) return (int32_t)i;
    }
    return (int32_t)at;
}

/* The logits of ids [batch, seq], or with last 1 of the last token of each sequence: g->logits, for amp_tape_read. */
static inline amp_result gpt_forward(gpt *g, const int32_t *ids, int64_t batch, int64_t seq, int last) {
    amp_value x;
    TRY(tape_begin(g->tape, 0));
    x = g->config.kv_heads > 0 ? gpt_llama_body(g, ids, batch, seq) : gpt_body(g, ids, batch, seq);
    gpt_head(g, last ? amp_tape_split(g->tape, x, 1, seq - 1, 1) : x);
    return amp_tape_finish(g->tape);
}

/* The logits after `tokens`, from the last config.seq of them, on the host. */
static inline amp_result gpt_next_logits(gpt *g, const int32_t *tokens, int64_t n, int32_t *ids, float *logits) {
    int64_t seq = n < g->config.seq ? n : g->config.seq;
    TRY(amp_copy(g->amp, ids, tokens + n - seq, seq * (int64_t)sizeof *ids, AMP_COPY_TO_DEVICE));
    TRY(gpt_forward(g, ids, 1, seq, 1));
    return amp_tape_read(g->tape, g->logits, logits, g->config.vocab);
}

/* Continues tokens[0..n-1] up to `wanted` tokens.  Random numbers: Philox stream 0 of the sampler's seed. */
static inline amp_result gpt_sample(gpt *g, const sampler *s, int32_t *tokens, int64_t n, int64_t wanted) {
    float *logits = (float *)malloc((size_t)g->config.vocab * 2 * sizeof *logits);
    void *ids = NULL;
    amp_result result = logits != NULL ? AMP_OK : example_fail(AMP_ERR_MEMORY, "no memory for logits");
    if (result == AMP_OK) result = amp_alloc(g->amp, &ids, g->config.seq * (int64_t)sizeof(int32_t));
    for (; n < wanted && result == AMP_OK && !stop_requested; n++) {
        result = gpt_next_logits(g, tokens, n, (int32_t *)ids, logits);
        if (result != AMP_OK) break;
        tokens[n] = sample_token(s, logits, logits + g->config.vocab, g->config.vocab,
                                 (double)amp_random_uniform(s->seed, (uint64_t)n));
    }
    amp_free(g->amp, ids);
    free(logits);
    return result;
}

/* ==== 7 Pictures ================================================================================
   The format of MNIST and its relatives: 0, 0, type (8: bytes), dimensions, sizes as big-endian int32, data. */

typedef struct idx_file {
    unsigned char *data;            /* count items of `size` bytes */
    int64_t count, size;
} idx_file;

static inline void idx_close(idx_file *file) {
    free(file->data);
    memset(file, 0, sizeof *file);
}

/* A stream of the file's content; ".gz" goes through gzip. */
static inline FILE *idx_stream(const char *path, int *piped) {
    char command[PATH_MAX + 32];
    size_t length = strlen(path);
    *piped = length > 3 && strcmp(path + length - 3, ".gz") == 0;
    if (!*piped) return fopen(path, "rb");
    if (access(path, R_OK) != 0 || strchr(path, '\'') != NULL || length >= PATH_MAX) return NULL;
    snprintf(command, sizeof command, "gzip -dc '%s'", path);
    return popen(command, "r");
}

/* Reads the bytes that the header promises, allocating memory only as they arrive: the header may be wrong. */
static inline amp_result idx_items(idx_file *file, FILE *stream, const char *path) {
    size_t wanted = (size_t)(file->count * file->size), capacity = 0, used = 0, n = 1;
    while (used < wanted && n > 0) {
        unsigned char *more;
        capacity = capacity * 2 + ((size_t)1 << 16) < wanted ? capacity * 2 + ((size_t)1 << 16) : wanted;
        more = (unsigned char *)realloc(file->data, capacity);
        if (more == NULL) return example_fail(AMP_ERR_MEMORY, "%s: no memory", path);
        file->data = more;
        n = fread(file->data + used, 1, capacity - used, stream);
        used += n;
    }
    return used == wanted ? AMP_OK
        : example_fail(AMP_ERR_TRUNCATED, "%s: ends before its %lld items", path, (long long)file->count);
}

static inline amp_result idx_read(idx_file *file, FILE *stream, const char *path) {
    unsigned char header[16];
    int64_t dims, i;
    if (fread(header, 1, 4, stream) != 4 || header[0] != 0 || header[1] != 0 || header[2] != 8 || header[3] < 1 ||
        header[3] > 3)
        return example_fail(AMP_ERR_FORMAT, "%s: not an IDX file of bytes", path);
    dims = header[3];
    if (fread(header, 4, (size_t)dims, stream) != (size_t)dims)
        return example_fail(AMP_ERR_TRUNCATED, "%s: ends in its header", path);
    file->size = 1;
    for (i = 0; i < dims; i++) {
        int64_t n = (int64_t)header[4 * i] << 24 | header[4 * i + 1] << 16 | header[4 * i + 2] << 8 | header[4 * i + 3];
        if (n < 1 || (i > 0 && n > 65536))
            return example_fail(AMP_ERR_FORMAT, "%s: a dimension of %lld", path, (long long)n);
        if (i == 0) file->count = n;
        else file->size *= n;
    }
    if (file->count > ((int64_t)1 << 33) / file->size) return example_fail(AMP_ERR_SIZE, "%s: too large", path);
    return idx_items(file, stream, path);
}

/* Reads an IDX file of bytes, also compressed by gzip. */
static inline amp_result idx_open(idx_file *file, const char *path) {
    int piped;
    FILE *stream = idx_stream(path, &piped);
    amp_result result;
    memset(file, 0, sizeof *file);
    if (stream == NULL) return example_fail(AMP_ERR_OPEN, "%s: %s", path, strerror(errno));
    result = idx_read(file, stream, path);
    if (piped) pclose(stream);
    else fclose(stream);
    if (result != AMP_OK) idx_close(file);
    return result;
}

/* Index of the largest number. */
static inline int64_t largest_of(const float *x, int64_t n) {
    int64_t i, best = 0;
    for (i = 1; i < n; i++) if (x[i] > x[best]) best = i;
    return best;
}

/* Labelled pictures: x [n, pixels] from -0.5 to 0.5, y [n]. */
typedef struct pictures {
    float *x;
    int32_t *y;
    int64_t n, pixels;
} pictures;

static inline void pictures_free(pictures *p) {
    free(p->x);
    free(p->y);
    memset(p, 0, sizeof *p);
}

static inline amp_result pictures_alloc(pictures *p, int64_t n, int64_t pixels) {
    p->n = n;
    p->pixels = pixels;
    p->x = (float *)malloc((size_t)(n * pixels) * sizeof *p->x);
    p->y = (int32_t *)malloc((size_t)n * sizeof *p->y);
    return p->x != NULL && p->y != NULL ? AMP_OK
                                        : example_fail(AMP_ERR_MEMORY, "no memory for %lld pictures", (long long)n);
}

/* Reads <folder>/<set>-images-idx3-ubyte and <set>-labels-idx1-ubyte, each also with ".gz". */
static inline amp_result pictures_read(pictures *p, const char *folder, const char *set) {
    static const char *const kinds[] = {"images-idx3", "labels-idx1"};
    idx_file files[2];
    amp_result result = AMP_OK;
    int64_t i;
    int k;
    memset(p, 0, sizeof *p);
    memset(files, 0, sizeof files);
    for (k = 0; k < 2 && result == AMP_OK; k++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%.4000s/%s-%s-ubyte", folder, set, kinds[k]);
        if (access(path, R_OK) != 0) snprintf(path, sizeof path, "%.4000s/%s-%s-ubyte.gz", folder, set, kinds[k]);
        result = idx_open(&files[k], path);
    }
    if (result == AMP_OK && (files[1].size != 1 || files[1].count != files[0].count))
        result = example_fail(AMP_ERR_FORMAT, "%s: the numbers of %s labels and images differ", folder, set);
    if (result == AMP_OK) result = pictures_alloc(p, files[0].count, files[0].size);
    if (result == AMP_OK) {
        for (i = 0; i < p->n * p->pixels; i++) p->x[i] = (float)files[0].data[i] / 255 - 0.5f;
        for (i = 0; i < p->n; i++) p->y[i] = files[1].data[i];
    }
    idx_close(&files[0]);
    idx_close(&files[1]);
    if (result != AMP_OK) pictures_free(p);
    return result;
}

/* n pictures of `classes` random patterns under noise; `set` chooses the noise, all sets share the patterns. */
static inline amp_result pictures_synthetic(pictures *p, int64_t n, int64_t pixels, int64_t classes, uint64_t set) {
    float *patterns = (float *)malloc((size_t)(classes * pixels) * sizeof *patterns);
    amp_result result = pictures_alloc(p, n, pixels);
    int64_t i;
    if (patterns == NULL && result == AMP_OK) result = example_fail(AMP_ERR_MEMORY, "no memory for patterns");
    if (result == AMP_OK) {
        random_normal(patterns, classes * pixels, 7, 0, 0.1f);
        random_normal(p->x, n * pixels, 7, set, 1.0f);
        for (i = 0; i < n; i++) p->y[i] = (int32_t)(i % classes);
        for (i = 0; i < n * pixels; i++) p->x[i] += patterns[p->y[i / pixels] * pixels + i % pixels];
    }
    free(patterns);
    return result;
}

/* Fashion-MNIST from a folder; where it is not there, synthetic pictures of its size, and says so. */
static inline amp_result pictures_find(pictures *train, pictures *test, const char *folder) {
    if (pictures_read(train, folder, "train") == AMP_OK && pictures_read(test, folder, "t10k") == AMP_OK) return AMP_OK;
    printf("%s\nlearning SYNTHETIC pictures instead\n", example_error());
    TRY(pictures_synthetic(train, 20000, 784, 10, 1));
    return pictures_synthetic(test, 5000, 784, 10, 2);
}

/* ==== 8 The tokenizer of GPT-2 ===================================================================
   Byte-level byte pair encoding (Radford et al. 2019), from the files vocab.json and merges.txt that Hugging Face
   keeps beside a model: the text is split into words, and in each word the pair of neighbours with the lowest rank
   is merged until no pair has one.  Bytes that are not UTF-8 count as symbols, so every text is restored exactly. */

enum { TOKENIZER_MOST = 65536, TOKENIZER_SLOTS = 1 << 18, TOKENIZER_ALPHABET = 256 + 68, TOKENIZER_LONGEST = 8192 };

typedef struct token_span { int64_t at; int32_t length; } token_span;       /* length -1: no such token */
typedef struct token_merge { int32_t left, right, rank, result; } token_merge;  /* result -1: an empty slot */
typedef struct token_candidate { int64_t at; token_merge merge; } token_candidate;

/* A word while it is merged: symbols as a list, and a heap of the pairs that have a rank. */
typedef struct token_word {
    int64_t *next, *before;
    int32_t *id;                    /* -1: merged into the symbol before it */
    token_candidate *heap;
    int64_t capacity, n_heap;
} token_word;

typedef struct tokenizer {
    int64_t n;                      /* highest token + 1 */
    int32_t end_of_text;            /* "<|endoftext|>", or -1 */
    char *text;                     /* of all tokens, without gaps */
    token_span *tokens;             /* TOKENIZER_MOST */
    int32_t *by_text;               /* hash table of TOKENIZER_SLOTS tokens, -1: empty */
    token_merge *merges;            /* hash table */
    uint64_t merge_slots;
    int32_t byte_token[256];
    int32_t byte_of[TOKENIZER_ALPHABET];
    token_word word;
} tokenizer;

static inline void tokenizer_close(tokenizer *t) {
    free(t->text); free(t->tokens); free(t->by_text); free(t->merges);
    free(t->word.next); free(t->word.before); free(t->word.id); free(t->word.heap);
    memset(t, 0, sizeof *t);
}

/* GPT-2 writes each byte as a character: printable ones as themselves, the others as U+0100, U+0101 ... */
static inline void tokenizer_alphabet(tokenizer *t) {
    int byte, next = 256, i;
    for (i = 0; i < TOKENIZER_ALPHABET; i++) t->byte_of[i] = -1;
    for (byte = 0; byte < 256; byte++) {
        int printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        t->byte_of[printable ? byte : next++] = byte;
    }
}

/* Turns GPT-2's writing of bytes into the bytes, in place.  -1: a character stands for no byte. */
static inline int64_t tokenizer_bytes(const tokenizer *t, const char *in, int64_t n, char *out) {
    int64_t i, used = 0;
    uint32_t code;
    for (i = 0; i < n;) {
        i += utf8_read(in + i, n - i, &code);
        if (code >= TOKENIZER_ALPHABET || t->byte_of[code] < 0) return -1;
        out[used++] = (char)t->byte_of[code];
    }
    return used;
}

/* The slot of a text: that of its token, or the empty one where it would go (FNV-1a, linear probing). */
static inline int64_t tokenizer_slot(const tokenizer *t, const char *bytes, int64_t n) {
    uint64_t hash = 0xcbf29ce484222325u;
    int64_t i, slot;
    for (i = 0; i < n; i++) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    for (slot = (int64_t)(hash % TOKENIZER_SLOTS); t->by_text[slot] >= 0; slot = (slot + 1) % TOKENIZER_SLOTS) {
        const token_span *span = &t->tokens[t->by_text[slot]];
        if (span->length == n && memcmp(t->text + span->at, bytes, (size_t)n) == 0) break;
    }
    return slot;
}
static inline int32_t tokenizer_find(const tokenizer *t, const char *bytes, int64_t n) {
    return t->by_text[tokenizer_slot(t, bytes, n)];
}

/* {"!": 0, "\u0120t": 256, ...}; added tokens may hold characters outside the alphabet and are only decoded. */
static inline const char *tokenizer_entry(tokenizer *t, json *j, char *key, int64_t *used) {
    int64_t id, length, slot;
    json_string(j, key, TOKENIZER_LONGEST);
    if (j->bad) return "not a string, or one that is too long";
    json_need(j, ':');
    id = json_integer(j);
    if (j->bad) return "a token must be followed by ':' and its number";
    if (id < 0 || id >= TOKENIZER_MOST) return "the number of a token must be 0 to 65535";
    if (t->tokens[id].length >= 0) return "two tokens have this number";
    length = tokenizer_bytes(t, key, (int64_t)strlen(key), t->text + *used);
    if (length == 0) return "a token is empty";
    if (length < 0) memcpy(t->text + *used, key, (size_t)(length = (int64_t)strlen(key)));
    else {
        slot = tokenizer_slot(t, t->text + *used, length);
        if (t->by_text[slot] >= 0) return "a token is there twice";
        t->by_text[slot] = (int32_t)id;
    }
    t->tokens[id].at = *used;
    t->tokens[id].length = (int32_t)length;
    *used += length;
    if (id >= t->n) t->n = id + 1;
    return NULL;
}

static inline amp_result tokenizer_vocab(tokenizer *t, const char *path, const char *text, size_t bytes) {
    char *key = (char *)malloc(TOKENIZER_LONGEST);
    const char *wrong = NULL;
    json j = json_open(text, bytes);
    int64_t used = 0, i;
    int more;
    t->text = (char *)malloc(bytes + 1);        /* a token is never longer than its text in the file */
    t->tokens = (token_span *)malloc(TOKENIZER_MOST * sizeof *t->tokens);
    t->by_text = (int32_t *)malloc(TOKENIZER_SLOTS * sizeof *t->by_text);
    if (key == NULL || t->text == NULL || t->tokens == NULL || t->by_text == NULL) {
        free(key);
        return example_fail(AMP_ERR_MEMORY, "%s: no memory for the vocabulary", path);
    }
    memset(t->tokens, 0xff, TOKENIZER_MOST * sizeof *t->tokens);       /* -1: no token, no slot in use */
    memset(t->by_text, 0xff, TOKENIZER_SLOTS * sizeof *t->by_text);
    json_need(&j, '{');
    for (more = json_peek(&j) == '"'; more && wrong == NULL; more = wrong == NULL && json_take(&j, ','))
        wrong = tokenizer_entry(t, &j, key, &used);
    if (wrong == NULL) json_need(&j, '}');
    if (wrong == NULL && (j.bad || json_peek(&j) != 0 || j.at != j.end))
        wrong = "not a JSON object of tokens and numbers";
    free(key);
    if (wrong != NULL)
        return example_fail(AMP_ERR_FORMAT, "%s: byte %lld: %s", path, (long long)(j.at - text), wrong);
    for (i = 0; i < 256; i++) {
        char byte = (char)i;
        t->byte_token[i] = tokenizer_find(t, &byte, 1);
        if (t->byte_token[i] < 0)
            return example_fail(AMP_ERR_FORMAT, "%s: no token for byte %lld: not a byte-level vocabulary", path,
                                (long long)i);
    }
    t->end_of_text = tokenizer_find(t, "<|endoftext|>", 13);
    return AMP_OK;
}

/* The merge of two tokens, or the empty slot where it would go. */
static inline token_merge *tokenizer_merge(const tokenizer *t, int32_t left, int32_t right) {
    uint64_t key = (uint64_t)left << 32 | (uint32_t)right, slot = (key * 0x9e3779b97f4a7c15u) >> 20;
    for (;; slot++) {
        token_merge *m = &t->merges[slot & (t->merge_slots - 1)];
        if (m->result < 0 || (m->left == left && m->right == right)) return m;
    }
}

/* One line "left right", without its end. */
static inline const char *tokenizer_merge_line(tokenizer *t, const char *line, int64_t n, int32_t rank, char *scratch) {
    const char *space = (const char *)memchr(line, ' ', (size_t)n);
    int64_t first, second;
    token_merge *m;
    if (space == NULL || memchr(space + 1, ' ', (size_t)(line + n - space - 1)) != NULL || n > TOKENIZER_LONGEST)
        return "must be two tokens with one space between them";
    first = tokenizer_bytes(t, line, space - line, scratch);
    second = first > 0 ? tokenizer_bytes(t, space + 1, line + n - space - 1, scratch + first) : 0;
    if (first < 1 || second < 1) return "must be two tokens in GPT-2's writing of bytes";
    m = tokenizer_merge(t, tokenizer_find(t, scratch, first), tokenizer_find(t, scratch + first, second));
    if (m->result >= 0) return "this merge is there twice";
    m->left = tokenizer_find(t, scratch, first);
    m->right = tokenizer_find(t, scratch + first, second);
    m->rank = rank;
    if (m->left < 0 || m->right < 0) return "merges a token that is not in the vocabulary";
    m->result = tokenizer_find(t, scratch, first + second);
    return m->result < 0 ? "the merged token is not in the vocabulary" : NULL;
}

static inline amp_result tokenizer_merges(tokenizer *t, const char *path, const char *text, size_t bytes) {
    char *scratch = (char *)malloc(TOKENIZER_LONGEST);
    const char *at = text, *end = text + bytes, *wrong = NULL;
    int64_t line, i;
    int32_t rank = 0;
    uint64_t lines = 1;
    for (i = 0; i < (int64_t)bytes; i++) lines += text[i] == '\n';
    for (t->merge_slots = 16; t->merge_slots < 2 * lines;) t->merge_slots *= 2;
    t->merges = (token_merge *)malloc((size_t)t->merge_slots * sizeof *t->merges);
    if (scratch == NULL || t->merges == NULL) {
        free(scratch);
        return example_fail(AMP_ERR_MEMORY, "%s: no memory for the merges", path);
    }
    for (i = 0; i < (int64_t)t->merge_slots; i++) t->merges[i].result = -1;
    for (line = 1; at < end && wrong == NULL; line++) {
        const char *stop = (const char *)memchr(at, '\n', (size_t)(end - at));
        int64_t n = (stop != NULL ? stop : end) - at;
        if (n > 0 && at[n - 1] == '\r') n--;
        if (n > 0 && !(line == 1 && n > 8 && memcmp(at, "#version", 8) == 0))
            wrong = tokenizer_merge_line(t, at, n, rank++, scratch);
        if (wrong == NULL) at = stop != NULL ? stop + 1 : end;
    }
    free(scratch);
    return wrong == NULL ? AMP_OK
                         : example_fail(AMP_ERR_FORMAT, "%s: line %lld: %s", path, (long long)line - 1, wrong);
}

/* Opens both files.  Nothing in them is trusted. */
static inline amp_result tokenizer_open(tokenizer *t, const char *vocab, const char *merges) {
    void *text = NULL;
    size_t bytes = 0;
    amp_result result;
    memset(t, 0, sizeof *t);
    tokenizer_alphabet(t);
    TRY(amp_file_read_all(NULL, vocab, &text, &bytes));
    result = tokenizer_vocab(t, vocab, (const char *)text, bytes);
    amp_file_free(NULL, text, bytes);
    if (result == AMP_OK) result = amp_file_read_all(NULL, merges, &text, &bytes);
    if (result == AMP_OK) {
        result = tokenizer_merges(t, merges, (const char *)text, bytes);
        amp_file_free(NULL, text, bytes);
    }
    if (result != AMP_OK) tokenizer_close(t);
    return result;
}

/* The text of a token; NULL if there is none. */
static inline const char *tokenizer_text(const tokenizer *t, int64_t token, int64_t *length) {
    *length = 0;
    if (token < 0 || token >= t->n || t->tokens[token].length < 0) return NULL;
    *length = t->tokens[token].length;
    return t->text + t->tokens[token].at;
}

/* ---- Words */

enum { CLASS_OTHER = 0, CLASS_LETTER = 1, CLASS_NUMBER = 2, CLASS_SPACE = 3 };

/* Unicode's categories L and N and its white space: first character * 4 + class of every run.  Characters that were
   not assigned in Unicode 14 take the class of those before them.  Made by
   tests/torch/oracle/tokenizer.py --classes. */
static const uint32_t token_classes[] = {
    0, 39, 56, 131, 132, 194, 232, 261, 364, 389, 492, 535, 536, 643, 644, 681, 684, 714, 720, 725, 728, 742, 745,
    748, 754, 764, 769, 860, 865, 988, 993, 2824, 2841, 2888, 2945, 2964, 2993, 2996, 3001, 3004, 3521, 3540, 3545,
    3576, 3581, 3600, 3609, 3612, 3617, 4056, 4061, 4616, 4649, 5480, 5505, 5668, 5953, 6092, 6273, 6444, 6530, 6568,
    6585, 6592, 6597, 6992, 6997, 7000, 7061, 7068, 7097, 7106, 7145, 7156, 7165, 7168, 7233, 7236, 7241, 7360, 7477,
    7832, 7877, 7938, 7977, 8108, 8145, 8152, 8169, 8180, 8193, 8280, 8297, 8300, 8337, 8340, 8353, 8356, 8449, 8548,
    8577, 8736, 8741, 8768, 8833, 9000, 9233, 9448, 9461, 9464, 9537, 9540, 9569, 9608, 9626, 9664, 9669, 9732, 9749,
    9968, 9973, 9976, 10041, 10076, 10097, 10120, 10138, 10177, 10184, 10194, 10216, 10225, 10228, 10261, 10480,
    10597, 10650, 10688, 10697, 10708, 10773, 10992, 10997, 11000, 11073, 11144, 11162, 11200, 11237, 11240, 11285,
    11504, 11509, 11512, 11633, 11656, 11674, 11712, 11717, 11722, 11784, 11789, 12024, 12097, 12124, 12186, 12236,
    12309, 12528, 12533, 12536, 12641, 12680, 12698, 12764, 12770, 12796, 12801, 12804, 12821, 13040, 13045, 13048,
    13173, 13192, 13210, 13253, 13312, 13329, 13548, 13557, 13560, 13625, 13628, 13649, 13660, 13666, 13693, 13704,
    13722, 13796, 13801, 13828, 13845, 14120, 14234, 14280, 14341, 14532, 14537, 14544, 14593, 14620, 14658, 14696,
    14853, 15044, 15049, 15056, 15093, 15136, 15170, 15217, 15364, 15490, 15568, 15617, 15812, 15905, 15924, 16385,
    16556, 16637, 16642, 16680, 16705, 16728, 16745, 16760, 16773, 16776, 16789, 16796, 16825, 16836, 16853, 16904,
    16953, 16956, 16962, 17000, 17025, 17388, 17393, 19828, 19878, 19969, 20032, 20097, 20480, 20485, 22964, 22973,
    23043, 23045, 23148, 23169, 23468, 23482, 23493, 23624, 23677, 23752, 23809, 23880, 23937, 24008, 24065, 24272,
    24413, 24416, 24433, 24436, 24450, 24576, 24642, 24705, 25108, 25117, 25252, 25257, 25728, 25882, 25921, 26434,
    26488, 26625, 26716, 26753, 26964, 27138, 27264, 27293, 27296, 27669, 27856, 27925, 27970, 28008, 28173, 28292,
    28345, 28354, 28393, 28568, 28673, 28816, 28930, 28981, 28994, 29033, 29176, 29185, 29440, 29605, 29620, 29625,
    29648, 29653, 29660, 29673, 30464, 30721, 32500, 32505, 32508, 32521, 32564, 32577, 32628, 32641, 32692, 32713,
    32756, 32771, 32812, 32931, 32936, 32959, 32960, 33151, 33152, 33218, 33221, 33234, 33256, 33277, 33282, 33320,
    33345, 33408, 33801, 33804, 33821, 33824, 33833, 33872, 33877, 33880, 33893, 33912, 33937, 33940, 33945, 33948,
    33953, 33956, 33961, 33976, 33981, 34024, 34033, 34048, 34069, 34088, 34105, 34108, 34114, 34317, 34326, 34344,
    37250, 37488, 37802, 37888, 40410, 40528, 45057, 45972, 45997, 46012, 46025, 46052, 46070, 46072, 46081, 46528,
    46593, 46976, 47293, 47296, 49155, 49156, 49173, 49182, 49184, 49286, 49320, 49349, 49368, 49378, 49389, 49396,
    49413, 49764, 49781, 49792, 49797, 50156, 50161, 50752, 50762, 50776, 50817, 50944, 51137, 51200, 51330, 51368,
    51490, 51520, 51526, 51584, 51714, 51752, 51910, 51968, 53249, 79616, 79873, 168512, 168769, 168952, 168961,
    170036, 170049, 170114, 170153, 170428, 170493, 170616, 170625, 170906, 170944, 171101, 171136, 171145, 171556,
    171565, 172040, 172045, 172056, 172061, 172076, 172081, 172172, 172226, 172248, 172289, 172496, 172553, 172752,
    172866, 172928, 173001, 173024, 173037, 173040, 173045, 173052, 173058, 173097, 173208, 173249, 173340, 173441,
    173568, 173585, 173772, 173885, 173890, 173944, 173953, 173972, 173977, 174018, 174057, 174244, 174337, 174348,
    174353, 174384, 174402, 174448, 174465, 174556, 174569, 174572, 174585, 174784, 174789, 174792, 174805, 174812,
    174821, 174840, 174849, 174852, 174857, 174968, 174977, 175020, 175049, 175060, 175109, 175468, 175473, 175528,
    175553, 176012, 176066, 176129, 229376, 254977, 257144, 257149, 257188, 257193, 257736, 257869, 259320, 259393,
    259900, 260033, 260080, 260545, 261116, 261186, 261224, 261253, 261356, 261381, 261484, 261529, 262016, 262145,
    263168, 263198, 263388, 263426, 263652, 263722, 263728, 264705, 265088, 265094, 265217, 265346, 265397, 265478,
    265481, 265514, 265537, 265688, 265729, 265852, 265857, 266048, 266054, 266241, 266882, 266945, 267708, 267713,
    270684, 270690, 270721, 270812, 270822, 270849, 271006, 271233, 271342, 271361, 271450, 271484, 271489, 271612,
    271873, 272114, 272121, 272130, 272385, 272388, 272449, 272608, 272642, 272704, 272769, 272886, 272892, 272897,
    273014, 273153, 273184, 273189, 273300, 273326, 273344, 273409, 273636, 273665, 273762, 273793, 273890, 273921,
    274020, 274086, 274433, 275434, 275457, 275600, 275650, 276993, 277164, 277185, 277622, 277661, 277784, 277830,
    277844, 277953, 278024, 278209, 278294, 278401, 278528, 278541, 278752, 278858, 278976, 278981, 278988, 278997,
    279036, 279053, 279232, 279361, 279490, 279552, 279565, 279708, 279770, 279808, 279825, 279828, 279837, 280012,
    280025, 280064, 280077, 280268, 280325, 280340, 280386, 280425, 280428, 280433, 280436, 280454, 280577, 280752,
    281089, 281252, 281281, 281468, 281538, 281600, 281621, 281836, 281845, 281848, 281921, 281948, 281973, 281992,
    282625, 282836, 282909, 282924, 282946, 282984, 283005, 283328, 283409, 283416, 283421, 283458, 284161, 284348,
    284513, 284528, 284673, 284864, 284945, 284994, 285056, 285185, 285356, 285409, 285412, 285442, 285697, 285812,
    285890, 285936, 285953, 286896, 287361, 287618, 287741, 287936, 287997, 288000, 288005, 288008, 288066, 288385,
    288580, 288645, 288648, 288653, 288656, 288769, 288772, 288813, 288972, 289001, 289004, 289089, 289092, 289137,
    289320, 289397, 289400, 289473, 291004, 291073, 291076, 291138, 291264, 291273, 291400, 291841, 292036, 292121,
    292124, 292162, 292225, 292392, 292449, 292482, 293761, 293836, 294593, 294658, 294740, 294913, 299010, 299456,
    299521, 311236, 311297, 315584, 331777, 371074, 371128, 371137, 371458, 371521, 371648, 371713, 371904, 371969,
    371984, 372034, 372109, 375298, 375388, 375809, 376124, 376129, 376132, 376397, 376712, 376717, 376720, 376833,
    455280, 478082, 478208, 478594, 479233, 482052, 482057, 482156, 482161, 482284, 482289, 482388, 482393, 482516,
    482521, 482620, 482625, 482748, 482753, 482852, 482857, 482980, 482985, 483084, 483089, 483130, 483328, 490497,
    491520, 492545, 492736, 492765, 492802, 492857, 492860, 494145, 494264, 494337, 494512, 494530, 494588, 499585,
    500510, 500544, 500737, 501008, 501037, 501058, 501112, 504262, 504496, 504502, 504512, 504518, 505016, 505022,
    505857, 506816, 508930, 508980, 520130, 524289, 3670020,
};

static inline int token_class(uint32_t code) {
    size_t low = 0, high = sizeof token_classes / sizeof *token_classes;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (token_classes[middle] >> 2 <= code) low = middle;
        else high = middle;
    }
    return (int)(token_classes[low] & 3);
}

/* End of the run of characters of one class that starts at `at`; *last: where its last character starts. */
static inline int64_t token_run(const char *text, int64_t n, int64_t at, int class_wanted, int64_t *last) {
    uint32_t code;
    while (at < n) {
        int64_t length = utf8_read(text + at, n - at, &code);
        if (token_class(code) != class_wanted) break;
        *last = at;
        at += length;
    }
    return at;
}

/* Length of the word that text begins with, by GPT-2's rule:
   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static inline int64_t token_word_length(const char *text, int64_t n) {
    static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    int64_t first, end, last = 0;
    uint32_t code;
    size_t i;
    int kind;
    for (i = 0; i < sizeof endings / sizeof *endings && text[0] == '\''; i++) {
        int64_t length = (int64_t)strlen(endings[i]);
        if (length <= n && memcmp(text, endings[i], (size_t)length) == 0) return length;
    }
    first = text[0] == ' ' && n > 1;
    utf8_read(text + first, n - first, &code);
    kind = token_class(code);
    if (kind != CLASS_SPACE) return token_run(text, n, first, kind, &last);
    end = token_run(text, n, 0, CLASS_SPACE, &last);
    return end < n && last > 0 ? last : end;    /* the last space of several belongs to the next word */
}

/* ---- Merging */

static inline amp_result token_word_reserve(token_word *w, int64_t n) {
    int64_t capacity = 2 * n + 64;
    if (n <= w->capacity) return AMP_OK;
    free(w->next); free(w->before); free(w->id); free(w->heap);
    w->next = (int64_t *)malloc((size_t)capacity * sizeof *w->next);
    w->before = (int64_t *)malloc((size_t)capacity * sizeof *w->before);
    w->id = (int32_t *)malloc((size_t)capacity * sizeof *w->id);
    w->heap = (token_candidate *)malloc((size_t)capacity * 3 * sizeof *w->heap);   /* a merge makes at most two pairs */
    w->capacity = w->next != NULL && w->before != NULL && w->id != NULL && w->heap != NULL ? capacity : 0;
    return w->capacity > 0 ? AMP_OK : example_fail(AMP_ERR_MEMORY, "no memory for a word of %lld bytes", (long long)n);
}

/* The lower rank goes first, then the place further left. */
static inline int token_before(const token_candidate *a, const token_candidate *b) {
    return a->merge.rank != b->merge.rank ? a->merge.rank < b->merge.rank : a->at < b->at;
}

static inline void token_push(const tokenizer *t, token_word *w, int64_t at) {
    token_candidate c;
    int64_t i = w->n_heap, parent;
    if (at < 0 || w->next[at] < 0) return;
    c.at = at;
    c.merge = *tokenizer_merge(t, w->id[at], w->id[w->next[at]]);
    if (c.merge.result < 0) return;
    for (w->n_heap++; i > 0; i = parent) {
        parent = (i - 1) / 2;
        if (!token_before(&c, &w->heap[parent])) break;
        w->heap[i] = w->heap[parent];
    }
    w->heap[i] = c;
}

static inline token_candidate token_pop(token_word *w) {
    token_candidate top = w->heap[0], moved = w->heap[--w->n_heap];
    int64_t i = 0, child;
    for (; (child = 2 * i + 1) < w->n_heap; i = child) {
        if (child + 1 < w->n_heap && token_before(&w->heap[child + 1], &w->heap[child])) child++;
        if (!token_before(&w->heap[child], &moved)) break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = moved;
    return top;
}

/* The tokens of one word, at most n; returns how many. */
static inline int64_t token_merge_word(const tokenizer *t, token_word *w, const char *text, int64_t n, uint16_t *out) {
    int64_t i, used = 0;
    w->n_heap = 0;
    for (i = 0; i < n; i++) {
        w->id[i] = t->byte_token[(unsigned char)text[i]];
        w->before[i] = i - 1;
        w->next[i] = i + 1 < n ? i + 1 : -1;
    }
    for (i = 0; i < n; i++) token_push(t, w, i);
    while (w->n_heap > 0) {
        token_candidate c = token_pop(w);
        int64_t right = w->id[c.at] == c.merge.left ? w->next[c.at] : -1;
        if (right < 0 || w->id[right] != c.merge.right) continue;   /* merged differently since */
        w->id[c.at] = c.merge.result;
        w->id[right] = -1;
        w->next[c.at] = w->next[right];
        if (w->next[right] >= 0) w->before[w->next[right]] = c.at;
        token_push(t, w, w->before[c.at]);
        token_push(t, w, c.at);
    }
    for (i = 0; i >= 0 && i < n; i = w->next[i]) out[used++] = (uint16_t)w->id[i];
    return used;
}

/* The tokens of a text; out holds n.  "<|endoftext|>" becomes its own token, as in transformers. */
static inline amp_result tokenizer_encode(tokenizer *t, const char *text, int64_t n, uint16_t *out, int64_t *count) {
    static const char mark[] = "<|endoftext|>";
    int64_t at = 0, used = 0, length;
    while (at < n) {
        const char *stop = t->end_of_text >= 0 ? (const char *)memchr(text + at, '<', (size_t)(n - at)) : NULL;
        int64_t end;
        while (stop != NULL && (text + n - stop < 13 || memcmp(stop, mark, 13) != 0))
            stop = (const char *)memchr(stop + 1, '<', (size_t)(text + n - stop - 1));
        for (end = stop != NULL ? stop - text : n; at < end; at += length) {
            length = token_word_length(text + at, end - at);
            TRY(token_word_reserve(&t->word, length));
            used += token_merge_word(t, &t->word, text + at, length, out + used);
        }
        if (stop != NULL) { out[used++] = (uint16_t)t->end_of_text; at += 13; }
    }
    *count = used;
    return AMP_OK;
}

/* Writes the tokens of the n texts of `paths` as one llm.c token file, each after <|endoftext|> if the vocabulary has
   it. */
static inline amp_result tokenizer_encode_files(tokenizer *t, char *const *paths, int64_t n, const char *out) {
    unsigned char *file = NULL;
    int64_t used = 0, i, k, count;
    amp_result result = AMP_OK;
    for (i = 0; i < n && result == AMP_OK; i++) {
        void *text;
        size_t bytes;
        unsigned char *more;
        result = amp_file_read_all(NULL, paths[i], &text, &bytes);
        if (result != AMP_OK) break;
        more = (unsigned char *)realloc(file, 1024 + 2 * ((size_t)used + bytes + 1));
        if (more == NULL) result = example_fail(AMP_ERR_MEMORY, "%s: no memory for its tokens", paths[i]);
        else {
            uint16_t *tokens = (uint16_t *)(void *)((file = more) + 1024);
            if (t->end_of_text >= 0) tokens[used++] = (uint16_t)t->end_of_text;
            result = tokenizer_encode(t, (const char *)text, (int64_t)bytes, tokens + used, &count);
            if (result == AMP_OK) used += count;
        }
        amp_file_free(NULL, text, bytes);
    }
    if (result == AMP_OK && used > INT32_MAX)
        result = example_fail(AMP_ERR_SIZE, "%lld tokens are more than a token file holds", (long long)used);
    if (result == AMP_OK && file != NULL) {
        const uint32_t header[3] = {20240520, 1, (uint32_t)used};
        memset(file, 0, 1024);
        for (i = 0; i < 3; i++) for (k = 0; k < 4; k++) file[4 * i + k] = (unsigned char)(header[i] >> (8 * k));
        for (i = 0; i < used; i++) {                                /* little-endian */
            uint16_t token;
            memcpy(&token, file + 1024 + 2 * i, 2);
            file[1024 + 2 * i] = (unsigned char)token;
            file[1025 + 2 * i] = (unsigned char)(token >> 8);
        }
        result = amp_file_write_atomic(NULL, out, file, 1024 + 2 * (size_t)used);
    }
    free(file);
    return result;
}

/* ==== 9 The tokenizer of BERT ===================================================================
   WordPiece (Devlin et al. 2019) from a vocab.txt with one token a line: text is cleaned, lower-cased without accents
   unless the vocabulary is cased, split at spaces, at punctuation and around ideographs, and each word is cut from the
   left into the longest known pieces, with "##" before all but the first; a word that cannot be cut, or has more than
   100 characters, is [UNK].  As BertTokenizer, except that CJK compatibility ideographs stay unchanged and "[SEP]" in a
   text is three tokens like any other.  Without a vocabulary, bytes are the tokens. */

enum { WORDPIECE_LONGEST = 100, WORDPIECE_BYTES = 4 };      /* characters of a word; the token of byte 0 */

typedef struct wordpiece {
    int64_t n;                      /* tokens */
    int32_t pad, unknown, begin, end;           /* [PAD], [UNK], [CLS], [SEP] */
    int cased;
    char *text;                     /* of the file; NULL: bytes */
    size_t text_bytes;
    token_span *tokens;
    int32_t *slots;                 /* hash table, -1: empty */
    uint64_t n_slots;
    int64_t longest;                /* bytes of the longest token */
} wordpiece;

static inline void wordpiece_close(wordpiece *w) {
    amp_file_free(NULL, w->text, w->text_bytes);
    free(w->tokens); free(w->slots);
    memset(w, 0, sizeof *w);
}

/* Bytes as tokens, after [PAD], [UNK], [CLS] and [SEP]. */
static inline void wordpiece_bytes(wordpiece *w) {
    memset(w, 0, sizeof *w);
    w->n = WORDPIECE_BYTES + 256;
    w->unknown = 1; w->begin = 2; w->end = 3;
}

/* The slot of `prefix` and `bytes` together: that of their token, or the empty one where it would go. */
static inline uint64_t wordpiece_slot(const wordpiece *w, const char *prefix, const char *bytes, int64_t n) {
    uint64_t hash = 0xcbf29ce484222325u, slot;
    int64_t i, before = (int64_t)strlen(prefix);
    for (i = 0; i < before + n; i++)
        hash = (hash ^ (unsigned char)(i < before ? prefix[i] : bytes[i - before])) * 0x100000001b3u;
    for (slot = hash & (w->n_slots - 1); w->slots[slot] >= 0; slot = (slot + 1) & (w->n_slots - 1)) {
        const token_span *span = &w->tokens[w->slots[slot]];
        if (span->length == before + n && memcmp(w->text + span->at, prefix, (size_t)before) == 0 &&
            memcmp(w->text + span->at + before, bytes, (size_t)n) == 0) break;
    }
    return slot;
}
static inline int32_t wordpiece_find(const wordpiece *w, const char *prefix, const char *bytes, int64_t n) {
    return w->slots[wordpiece_slot(w, prefix, bytes, n)];
}

/* One token a line; of equal lines the last one counts, as in transformers. */
static inline amp_result wordpiece_lines(wordpiece *w, const char *path) {
    int64_t at = 0, bytes = (int64_t)w->text_bytes, lines = 1, i;
    for (i = 0; i < bytes; i++) lines += w->text[i] == '\n';
    if (lines > (int64_t)1 << 24) return example_fail(AMP_ERR_SIZE, "%s: more than 2^24 lines", path);
    for (w->n_slots = 16; (int64_t)w->n_slots < 2 * lines;) w->n_slots *= 2;
    w->tokens = (token_span *)malloc((size_t)lines * sizeof *w->tokens);
    w->slots = (int32_t *)malloc((size_t)w->n_slots * sizeof *w->slots);
    if (w->tokens == NULL || w->slots == NULL)
        return example_fail(AMP_ERR_MEMORY, "%s: no memory for the vocabulary", path);
    for (i = 0; i < (int64_t)w->n_slots; i++) w->slots[i] = -1;
    while (at < bytes) {
        const char *stop = (const char *)memchr(w->text + at, '\n', (size_t)(bytes - at));
        int64_t next = stop != NULL ? stop - w->text + 1 : bytes, end = stop != NULL ? next - 1 : bytes;
        token_span *span = &w->tokens[w->n];
        if (end > at && w->text[end - 1] == '\r') end--;
        if (end - at > TOKENIZER_LONGEST)
            return example_fail(AMP_ERR_FORMAT, "%s: line %lld: a token of %lld bytes", path, (long long)w->n + 1,
                                (long long)(end - at));
        span->at = at;
        span->length = (int32_t)(end - at);
        if (end - at > w->longest) w->longest = end - at;
        w->slots[wordpiece_slot(w, "", w->text + at, end - at)] = (int32_t)w->n;
        w->n++;
        at = next;
    }
    return AMP_OK;
}

/* Reads a vocab.txt whose text is w->text.  Nothing in it is trusted. */
static inline amp_result wordpiece_parse(wordpiece *w, const char *path) {
    static const char *const names[] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]"};
    int32_t *special[4];
    int i;
    special[0] = &w->pad; special[1] = &w->unknown; special[2] = &w->begin; special[3] = &w->end;
    TRY(wordpiece_lines(w, path));
    for (i = 0; i < 4; i++) {
        *special[i] = wordpiece_find(w, "", names[i], 5);
        if (*special[i] < 0)
            return example_fail(AMP_ERR_FORMAT, "%s: no line is %s: not a vocab.txt like BERT's", path, names[i]);
    }
    return AMP_OK;
}

/* Opens a vocab.txt. */
static inline amp_result wordpiece_open(wordpiece *w, const char *path, int cased) {
    void *text = NULL;
    amp_result result;
    memset(w, 0, sizeof *w);
    TRY(amp_file_read_all(NULL, path, &text, &w->text_bytes));
    w->text = (char *)text;
    w->cased = cased;
    result = wordpiece_parse(w, path);
    if (result != AMP_OK) wordpiece_close(w);
    return result;
}

/* ---- Characters */

enum {
    PIECE_OTHER = 0,
    PIECE_MARK = 1,
    PIECE_DROPPED = 2,
    PIECE_SPACE = 3,
    PIECE_PUNCTUATION = 4,
    PIECE_IDEOGRAPH = 5
};

/* Made by tests/torch/oracle/wordpiece.py --tables from what the tokenizers library does with each character: letters
   that U+00C0, U+1E00 and U+1F00 (there 'a' is alpha) and those after them become, runs of other characters (first,
   2 count + step - 1, difference), characters that become two, and the first character * 8 + class of every run. */
static const char piece_latin[] =
    "aaaaaa.ceeeeiiii.nooooo..uuuuy..aaaaaa.ceeeeiiii.nooooo..uuuuy.yaaaaaaccccccccdd..eeeeeeeeeegggggggghh..iiiiiiii"
    "i...jjkk.llllll....nnnnnn...oooooo..rrrrrrsssssssstttt..uuuuuuuuuuuuwwyyyzzzzzz................................."
    "oo.............uu............................aaiioouuuuuuuuuu.aaaa....ggkkoooo..j...gg..nnaa....aaaaeeeeiiiioooo"
    "rrrruuuusstt..hh......aaeeooooooooyy............................";
static const char piece_extended[] =
    "aabbbbbbccddddddddddeeeeeeeeeeffgghhhhhhhhhhiiiikkkkkkllllllllmmmmmmnnnnnnnnoooooooopppprrrrrrrrsssssssssstttttt"
    "ttuuuuuuuuuuvvvvwwwwwwwwwwxxxxyyzzzzzzhtwy......aaaaaaaaaaaaaaaaaaaaaaaaeeeeeeeeeeeeeeeeiiiioooooooooooooooooooo"
    "oooouuuuuuuuuuuuuuyyyyyyyy......";
static const char piece_greek[] =
    "aaaaaaaaaaaaaaaaeeeeee..eeeeee..ggggggggggggggggiiiiiiiiiiiiiiiioooooo..oooooo..uuuuuuuu.u.u.u.uyyyyyyyyyyyyyyyy"
    "aaeeggiioouuyy..aaaaaaaaaaaaaaaaggggggggggggggggyyyyyyyyyyyyyyyyaaaaa.aaaaaaa.i...ggg.ggeeggg...iiii..iiiiii...."
    "uuuuqquuuuuuq.....yyy.yyooyyy...";
static const int32_t piece_folds[] = {
    198, 2, 32, 208, 2, 32, 216, 2, 32, 222, 2, 32, 272, 2, 1, 294, 2, 1, 306, 2, 1, 319, 5, 1, 330, 2, 1, 338, 2, 1,
    358, 2, 1, 385, 2, 210, 386, 5, 1, 390, 2, 206, 391, 2, 1, 393, 4, 205, 395, 2, 1, 398, 2, 79, 399, 2, 202, 400,
    2, 203, 401, 2, 1, 403, 2, 205, 404, 2, 207, 406, 2, 211, 407, 2, 209, 408, 2, 1, 412, 2, 211, 413, 2, 213, 415,
    2, 214, 418, 5, 1, 422, 2, 218, 423, 2, 1, 425, 2, 218, 428, 2, 1, 430, 2, 218, 433, 4, 217, 435, 5, 1, 439, 2,
    219, 440, 2, 1, 444, 2, 1, 452, 2, 2, 453, 2, 1, 455, 2, 2, 456, 2, 1, 458, 2, 2, 459, 2, 1, 482, 2, -252, 483, 2,
    -253, 484, 2, 1, 494, 2, 164, 495, 2, 163, 497, 2, 2, 498, 2, 1, 502, 2, -97, 503, 2, -56, 508, 2, -278, 509, 2,
    -279, 510, 2, -262, 511, 2, -263, 540, 2, 1, 544, 2, -130, 546, 5, 1, 570, 2, 10795, 571, 2, 1, 573, 2, -163, 574,
    2, 10792, 577, 2, 1, 579, 2, -195, 580, 2, 69, 581, 2, 71, 582, 11, 1, 880, 5, 1, 884, 2, -187, 886, 2, 1, 894, 2,
    -835, 895, 2, 116, 901, 2, -733, 902, 2, 43, 903, 2, -720, 904, 2, 45, 905, 2, 46, 906, 2, 47, 908, 2, 51, 910, 2,
    55, 911, 2, 58, 912, 2, 41, 913, 34, 32, 931, 14, 32, 938, 2, 15, 939, 2, 26, 940, 2, 5, 941, 2, 8, 942, 2, 9,
    943, 2, 10, 944, 2, 21, 970, 2, -17, 971, 2, -6, 972, 2, -13, 973, 2, -8, 974, 2, -5, 975, 2, 8, 979, 2, -1, 980,
    2, -2, 984, 25, 1, 1012, 2, -60, 1015, 2, 1, 1017, 2, -7, 1018, 2, 1, 1021, 6, -130, 1024, 2, 53, 1025, 2, 52,
    1026, 2, 80, 1027, 2, 48, 1028, 6, 80, 1031, 2, 79, 1032, 8, 80, 1036, 2, 46, 1037, 2, 43, 1038, 2, 53, 1039, 2,
    80, 1040, 18, 32, 1049, 2, 31, 1050, 44, 32, 1081, 2, -1, 1104, 2, -27, 1105, 2, -28, 1107, 2, -32, 1111, 2, -1,
    1116, 2, -34, 1117, 2, -37, 1118, 2, -27, 1120, 23, 1, 1142, 2, -1, 1143, 2, -2, 1144, 11, 1, 1162, 55, 1, 1216,
    2, 15, 1217, 2, -139, 1218, 2, -140, 1219, 13, 1, 1232, 2, -160, 1233, 2, -161, 1234, 2, -162, 1235, 2, -163,
    1236, 2, 1, 1238, 2, -161, 1239, 2, -162, 1240, 2, 1, 1242, 2, -1, 1243, 2, -2, 1244, 2, -166, 1245, 4, -167,
    1247, 2, -168, 1248, 2, 1, 1250, 2, -170, 1251, 2, -171, 1252, 2, -172, 1253, 2, -173, 1254, 2, -168, 1255, 2,
    -169, 1256, 2, 1, 1258, 2, -1, 1259, 2, -2, 1260, 2, -159, 1261, 2, -160, 1262, 2, -171, 1263, 2, -172, 1264, 2,
    -173, 1265, 2, -174, 1266, 2, -175, 1267, 2, -176, 1268, 2, -173, 1269, 2, -174, 1270, 2, 1, 1272, 2, -173, 1273,
    2, -174, 1274, 55, 1, 1329, 76, 48, 1570, 2, 5, 1571, 2, 4, 1572, 2, 36, 1573, 2, 2, 1574, 2, 36, 1728, 2, 21,
    1730, 2, -1, 1747, 2, -1, 2345, 2, -1, 2353, 2, -1, 2356, 2, -1, 2392, 6, -67, 2395, 2, -63, 2396, 4, -59, 2398,
    2, -51, 2399, 2, -48, 2524, 4, -59, 2527, 2, -48, 2611, 2, -1, 2614, 2, 2, 2649, 4, -67, 2651, 2, -63, 2654, 2,
    -51, 2888, 2, -1, 2908, 4, -59, 3264, 2, 21, 3271, 4, 14, 3274, 2, -8, 3546, 2, -1, 3907, 2, -1, 3917, 2, -1,
    3922, 2, -1, 3927, 2, -1, 3932, 2, -1, 3945, 2, -41, 4134, 2, -1, 4256, 76, 7264, 4295, 2, 7264, 4301, 2, 7264,
    5024, 160, 38864, 5104, 12, 8, 6971, 2, -6, 6973, 2, -8, 6979, 2, -14, 7312, 86, -3008, 7357, 6, -3008, 7835, 2,
    -7452, 7838, 2, -7615, 7930, 7, 1, 8129, 2, -7961, 8141, 2, -14, 8142, 2, -15, 8143, 2, -16, 8157, 2, 33, 8158, 2,
    32, 8159, 2, 31, 8173, 2, -8005, 8174, 2, -8006, 8175, 2, -8079, 8189, 2, -8009, 8192, 4, 2, 8486, 2, -7517, 8490,
    2, -8383, 8491, 2, -8394, 8498, 2, 28, 8544, 32, 16, 8579, 2, 1, 8602, 2, -10, 8603, 2, -9, 8622, 2, -26, 8653, 2,
    3, 8654, 2, 6, 8655, 2, 3, 8708, 2, -1, 8713, 2, -1, 8716, 2, -1, 8740, 5, -1, 8769, 2, -5, 8772, 2, -1, 8775, 2,
    -2, 8777, 2, -1, 8800, 2, -8739, 8802, 2, -1, 8813, 2, -32, 8814, 2, -8754, 8815, 2, -8753, 8816, 4, -12, 8820, 4,
    -2, 8824, 4, -2, 8832, 4, -6, 8836, 4, -2, 8840, 4, -2, 8876, 2, -10, 8877, 4, -5, 8879, 2, -4, 8928, 4, -100,
    8930, 4, -81, 8938, 8, -56, 9001, 4, 3295, 9398, 52, 26, 10972, 2, 1, 11264, 96, 48, 11360, 2, 1, 11362, 2,
    -10743, 11363, 2, -3814, 11364, 2, -10727, 11367, 7, 1, 11373, 2, -10780, 11374, 2, -10749, 11375, 2, -10783,
    11376, 2, -10782, 11378, 2, 1, 11381, 2, 1, 11390, 4, -10815, 11392, 101, 1, 11499, 5, 1, 11506, 2, 1, 12364, 25,
    -1, 12389, 7, -1, 12400, 2, -1, 12401, 2, -2, 12403, 2, -1, 12404, 2, -2, 12406, 2, -1, 12407, 2, -2, 12409, 2,
    -1, 12410, 2, -2, 12412, 2, -1, 12413, 2, -2, 12436, 2, -78, 12446, 2, -1, 12460, 25, -1, 12485, 7, -1, 12496, 2,
    -1, 12497, 2, -2, 12499, 2, -1, 12500, 2, -2, 12502, 2, -1, 12503, 2, -2, 12505, 2, -1, 12506, 2, -2, 12508, 2,
    -1, 12509, 2, -2, 12532, 2, -78, 12535, 8, -8, 12542, 2, -1, 42560, 47, 1, 42624, 29, 1, 42786, 15, 1, 42802, 63,
    1, 42873, 5, 1, 42877, 2, -35332, 42878, 11, 1, 42891, 2, 1, 42893, 2, -42280, 42896, 5, 1, 42902, 21, 1, 42922,
    2, -42308, 42923, 2, -42319, 42924, 2, -42315, 42925, 2, -42305, 42926, 2, -42308, 42928, 2, -42258, 42929, 2,
    -42282, 42930, 2, -42261, 42931, 2, 928, 42932, 17, 1, 42948, 2, -48, 42949, 2, -42307, 42950, 2, -35384, 42951,
    5, 1, 42960, 2, 1, 42966, 5, 1, 42997, 2, 1, 64285, 2, -62788, 64287, 2, -62765, 64298, 2, -62785, 64299, 2,
    -62786, 64300, 2, -62787, 64301, 2, -62788, 64302, 2, -62814, 64303, 2, -62815, 64304, 14, -62816, 64312, 10,
    -62816, 64318, 5, -62816, 64321, 5, -62816, 64324, 5, -62816, 64327, 8, -62816, 64331, 2, -62838, 64332, 2,
    -62843, 64333, 2, -62834, 64334, 2, -62826, 65313, 52, 32, 66560, 80, 40, 66736, 72, 40, 66928, 22, 39, 66940, 30,
    39, 66956, 14, 39, 66964, 4, 39, 68736, 102, 64, 69786, 5, -1, 69803, 2, -6, 70843, 2, -2, 71840, 64, 32, 93760,
    64, 32, 125184, 68, 34,
};
static const int32_t piece_pairs[] = {
    2507, 2503, 2494, 2508, 2503, 2519, 2891, 2887, 2878, 2892, 2887, 2903, 2964, 2962, 3031, 3018, 3014, 3006, 3019,
    3015, 3006, 3020, 3014, 3031, 3275, 3266, 3285, 3402, 3398, 3390, 3403, 3399, 3390, 3404, 3398, 3415, 3548, 3545,
    3535, 3549, 3545, 3535, 3550, 3545, 3551, 6918, 6917, 6965, 6920, 6919, 6965, 6922, 6921, 6965, 6924, 6923, 6965,
    6926, 6925, 6965, 6930, 6929, 6965, 6976, 6974, 6965, 6977, 6975, 6965, 70475, 70471, 70462, 70476, 70471, 70487,
    70844, 70841, 70832, 70846, 70841, 70845, 71098, 71096, 71087, 71099, 71097, 71087, 119134, 119127, 119141,
    119135, 119128, 119141, 119227, 119225, 119141, 119228, 119226, 119141,
};
static const uint32_t piece_classes[] = {
    2, 75, 90, 107, 114, 259, 268, 384, 468, 520, 732, 776, 988, 1018, 1283, 1292, 1296, 1340, 1344, 1372, 1376, 1386,
    1392, 1460, 1472, 1500, 1504, 1532, 1536, 6145, 7040, 7156, 7160, 7228, 7232, 9241, 9280, 10964, 11008, 11340,
    11368, 11401, 11764, 11769, 11780, 11785, 11804, 11809, 11828, 11833, 11904, 12188, 12290, 12336, 12364, 12376,
    12388, 12400, 12417, 12508, 12514, 12520, 12532, 12544, 12889, 13056, 13140, 13168, 13185, 13192, 13988, 13992,
    14001, 14058, 14064, 14073, 14120, 14137, 14152, 14161, 14192, 14340, 14458, 14464, 14473, 14480, 14721, 14952,
    15665, 15752, 16217, 16288, 16316, 16336, 16561, 16592, 16601, 16672, 16681, 16704, 16713, 16772, 16896, 17097,
    17140, 17152, 18201, 18456, 18897, 18904, 18913, 18920, 18953, 19016, 19049, 19056, 19081, 19136, 19217, 19236,
    19248, 19332, 19336, 19465, 19472, 19937, 19944, 19977, 20024, 20073, 20080, 20241, 20272, 20489, 20504, 20961,
    20976, 21001, 21192, 21377, 21392, 21417, 21424, 21513, 21528, 21985, 21992, 22025, 22088, 22121, 22144, 22289,
    22320, 22404, 22408, 22537, 22544, 23009, 23016, 23033, 23040, 23049, 23096, 23145, 23208, 23217, 23224, 23313,
    23344, 23569, 23576, 24065, 24072, 24169, 24192, 24577, 24584, 25073, 25096, 25137, 25280, 25361, 25392, 25609,
    25616, 26081, 26088, 26105, 26112, 26161, 26168, 26209, 26280, 26385, 26416, 26633, 26640, 27145, 27184, 27241,
    27248, 27409, 27440, 28241, 28280, 28305, 28352, 28580, 28680, 29065, 29072, 29089, 29176, 29241, 29308, 29312,
    29396, 29704, 30089, 30096, 30113, 30160, 30169, 30184, 30273, 30336, 30756, 30872, 30884, 30888, 30913, 30928,
    31145, 31152, 31161, 31168, 31177, 31188, 31216, 31625, 31736, 31745, 31788, 31793, 31808, 31849, 32240, 32305,
    32312, 32388, 32424, 32460, 32768, 33129, 33160, 33169, 33216, 33225, 33240, 33257, 33272, 33364, 33408, 33473,
    33488, 33521, 33544, 33673, 33704, 33809, 33816, 33833, 33848, 33897, 33904, 34025, 34032, 34780, 34784, 39657,
    39684, 39752, 40964, 40968, 45932, 45944, 46083, 46088, 46300, 46336, 46940, 46960, 47249, 47272, 47505, 47532,
    47616, 47761, 47872, 48017, 48128, 48545, 48560, 48569, 48624, 48689, 48696, 48713, 48804, 48824, 48836, 48856,
    48873, 48896, 49156, 49241, 49266, 49272, 50505, 50512, 51457, 51480, 51513, 51528, 51601, 51608, 51657, 51712,
    51748, 51760, 53433, 53448, 53465, 53492, 53504, 53937, 53944, 53953, 54024, 54033, 54040, 54057, 54120, 54169,
    54272, 54532, 54584, 54596, 54657, 54768, 55297, 55328, 55713, 55720, 55729, 55768, 55777, 55784, 55825, 55832,
    56020, 56072, 56153, 56224, 56321, 56336, 56593, 56624, 56641, 56656, 56665, 56688, 57137, 57144, 57153, 57168,
    57193, 57200, 57209, 57232, 57316, 57344, 57697, 57760, 57777, 57820, 57856, 58356, 58368, 58884, 59009, 59036,
    59041, 59144, 59153, 59208, 59241, 59248, 59297, 59304, 59329, 59344, 60929, 61360, 61409, 61440, 65539, 65626,
    65668, 65859, 65874, 65915, 65924, 66080, 66092, 66192, 66204, 66299, 66306, 66432, 66540, 66552, 66668, 66688,
    67201, 67304, 67337, 67344, 67369, 67584, 71748, 71776, 72012, 72024, 80708, 80816, 81452, 81464, 81716, 81792,
    85020, 85192, 85700, 85728, 85988, 86000, 92025, 92048, 92108, 92136, 92148, 92160, 93060, 93177, 93184, 93953,
    94212, 94584, 94596, 94744, 98307, 98316, 98336, 98372, 98448, 98468, 98560, 98641, 98672, 98692, 98696, 98796,
    98800, 99529, 99544, 99588, 99592, 100316, 100320, 106501, 159232, 159749, 327680, 337908, 337920, 340076, 340096,
    340857, 340864, 340892, 340897, 340980, 340984, 341233, 341248, 341889, 341908, 342016, 344081, 344088, 344113,
    344120, 344153, 344160, 344361, 344376, 344996, 345088, 345633, 345640, 345716, 345728, 345857, 346000, 346052,
    346072, 346084, 346088, 346417, 346484, 346496, 346681, 346768, 346876, 346880, 347137, 347160, 347545, 347552,
    347569, 347600, 347617, 347624, 347660, 347768, 347892, 347904, 347945, 347952, 348489, 348536, 348553, 348568,
    348585, 348672, 348697, 348704, 348769, 348776, 348900, 348928, 349153, 349160, 349569, 349576, 349585, 349608,
    349625, 349640, 349681, 349696, 349705, 349712, 349940, 349952, 350049, 350064, 350084, 350096, 350129, 350216,
    352041, 352048, 352065, 352072, 352092, 352096, 352105, 352128, 458754, 509957, 514048, 514289, 514296, 518644,
    518656, 520193, 520324, 520449, 520580, 520976, 520988, 520992, 521028, 521032, 521044, 521088, 522234, 522252,
    522272, 522284, 522328, 522340, 522368, 522452, 522464, 522492, 522504, 522716, 522736, 522748, 522752, 522972,
    522976, 522988, 522992, 523004, 523056, 524234, 524256, 524266, 524288, 526340, 526392, 528361, 529408, 530177,
    530184, 531377, 531456, 531708, 531712, 532100, 532104, 535420, 535424, 541372, 541376, 542972, 542976, 543228,
    543744, 544777, 544896, 545217, 545280, 545412, 545536, 545788, 545792, 546601, 546648, 546692, 546816, 547276,
    547328, 548044, 548168, 557065, 557072, 557505, 557628, 557712, 558073, 558096, 558489, 558520, 558537, 558556,
    558570, 558580, 558608, 559105, 559128, 559417, 559456, 559465, 559536, 559620, 559648, 560025, 560036, 560048,
    560129, 560144, 560561, 560632, 560684, 560721, 560748, 560752, 560860, 560864, 560876, 560904, 561529, 561552,
    561569, 561576, 561585, 561604, 561648, 562508, 562560, 562937, 562944, 562969, 563072, 563201, 563216, 563681,
    563688, 563713, 563720, 564017, 565248, 566681, 566728, 566737, 566744, 566777, 566792, 566801, 566816, 566836,
    566840, 568721, 568768, 568801, 568816, 568825, 568844, 569024, 569057, 569344, 569753, 569816, 569833, 569840,
    569849, 569868, 569888, 570713, 570720, 570729, 570736, 570753, 570800, 570809, 570816, 571625, 571648, 571665,
    571696, 571705, 571776, 571876, 571896, 598916, 599040, 742260, 742272, 743297, 743340, 743424, 743809, 743868,
    743904, 743972, 743976, 752761, 752792, 910569, 910588, 910594, 948224, 953145, 953168, 953242, 953305, 953368,
    953385, 953440, 953681, 953712, 954897, 954920, 970753, 971192, 971225, 971624, 971689, 971696, 971809, 971816,
    971836, 971993, 980992, 1001089, 1001472, 1048581, 1425664, 1427717, 1471872, 1556485, 1572864, 7340042, 7342081,
    7864322,
};

static inline int piece_class(uint32_t code) {
    size_t low = 0, high = sizeof piece_classes / sizeof *piece_classes;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (piece_classes[middle] >> 3 <= code) low = middle;
        else high = middle;
    }
    return (int)(piece_classes[low] & 7);
}

/* 1 and *out if the character's letter in the string is not '.'. */
static inline int piece_letter(const char *letters, uint32_t first, uint32_t base, uint32_t code, uint32_t *out) {
    if (code < first || code >= first + (uint32_t)strlen(letters) || letters[code - first] == '.') return 0;
    *out = base + (uint32_t)(letters[code - first] - 'a');
    return 1;
}

/* A character in lower case and without accents: 1 to 3 characters.  Hangul syllables become their letters (Unicode,
   3.12: (lead * 21 + vowel) * 28 + tail). */
static inline int piece_fold(uint32_t code, uint32_t out[3]) {
    const int32_t c = (int32_t)code, *run, *pair;
    size_t low = 0, high = sizeof piece_folds / sizeof *piece_folds / 3;
    out[0] = code >= 'A' && code <= 'Z' ? code + 32 : code;
    if (code < 0x80 || piece_letter(piece_latin, 0xc0, 'a', code, out) ||
        piece_letter(piece_extended, 0x1e00, 'a', code, out) || piece_letter(piece_greek, 0x1f00, 0x3b1, code, out))
        return 1;
    if (code >= 0xac00 && code < 0xd7a4) {
        out[0] = 0x1100 + (code - 0xac00) / 588;
        out[1] = 0x1161 + (code - 0xac00) / 28 % 21;
        out[2] = 0x11a7 + (code - 0xac00) % 28;
        return out[2] > 0x11a7 ? 3 : 2;
    }
    for (pair = piece_pairs; pair < piece_pairs + sizeof piece_pairs / sizeof *piece_pairs; pair += 3)
        if (pair[0] == c) { out[0] = (uint32_t)pair[1]; out[1] = (uint32_t)pair[2]; return 2; }
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (piece_folds[3 * middle] <= c) low = middle;
        else high = middle;
    }
    run = piece_folds + 3 * low;
    if (c >= run[0] && (c - run[0]) % (1 + (run[1] & 1)) == 0 && (c - run[0]) / (1 + (run[1] & 1)) < run[1] / 2)
        out[0] = (uint32_t)(c + run[2]);
    return 1;
}

static inline int utf8_write(uint32_t code, char *out) {
    int n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4, i;
    static const unsigned char marks[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 63));
    out[0] = (char)(marks[n] | code);
    return n;
}

/* ---- Words into pieces */

/* The word being read, and where its tokens go. */
typedef struct piece_word {
    char text[4 * WORDPIECE_LONGEST];
    int64_t bytes, characters;
    int32_t *out;
    int64_t used, most;
} piece_word;

static inline void piece_emit(piece_word *word, int32_t token) {
    if (word->used < word->most) word->out[word->used] = token;
    if (word->used < word->most) word->used++;
}

/* Cuts the word, and begins another. */
static inline void piece_end_word(const wordpiece *w, piece_word *word) {
    int64_t at = 0, before = word->used, length, n = word->bytes;
    int whole = word->characters <= WORDPIECE_LONGEST;
    while (at < n && whole) {
        int32_t found = -1;
        for (length = n - at < w->longest ? n - at : w->longest; length > 0; length--) {
            found = wordpiece_find(w, at > 0 ? "##" : "", word->text + at, length);
            if (found >= 0) break;
        }
        if (found < 0) whole = 0;
        else piece_emit(word, found);
        at += length;
    }
    if (!whole) {
        word->used = before;
        piece_emit(word, w->unknown);
    }
    word->bytes = word->characters = 0;
}

static inline void piece_add(const wordpiece *w, piece_word *word, uint32_t code) {
    int alone = piece_class(code);
    alone = alone == PIECE_PUNCTUATION || alone == PIECE_IDEOGRAPH;
    if (alone) piece_end_word(w, word);
    if (word->characters++ < WORDPIECE_LONGEST) word->bytes += utf8_write(code, word->text + word->bytes);
    if (alone) piece_end_word(w, word);
}

/* The first `most` tokens of a text, without [CLS] and [SEP]; returns how many. */
static inline int64_t wordpiece_encode(const wordpiece *w, const char *text, int64_t n, int32_t *out, int64_t most) {
    piece_word word;
    int64_t at, length;
    word.bytes = word.characters = word.used = 0;
    word.out = out;
    word.most = most;
    if (w->text == NULL) for (at = 0; at < n; at++) piece_emit(&word, WORDPIECE_BYTES + (unsigned char)text[at]);
    for (at = 0; w->text != NULL && at < n && word.used < most; at += length) {
        uint32_t code, folded[3];
        int kind, count, i;
        length = utf8_read(text + at, n - at, &code);
        kind = piece_class(code);
        if (kind == PIECE_SPACE) piece_end_word(w, &word);
        if (kind == PIECE_SPACE || kind == PIECE_DROPPED || (kind == PIECE_MARK && !w->cased)) continue;
        folded[0] = code;
        count = w->cased ? 1 : piece_fold(code, folded);
        for (i = 0; i < count; i++) piece_add(w, &word, folded[i]);
    }
    if (word.bytes > 0) piece_end_word(w, &word);
    return word.used;
}

#endif
