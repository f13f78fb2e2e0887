/* trainer.h - runs the example trainer in a separate process, for the programs that kill it or make its calls fail.
 *
 * The programs are linked with --wrap for the C library's calls in TRAINER_WRAPS (rules.mk).  Therefore the trainer runs
 * unchanged, and every call of its file layer passes through here first.  Data that must outlive a killed process is kept
 * in memory shared with it. */
#ifndef TRAINER_H
#define TRAINER_H

#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE 1         /* MAP_ANONYMOUS, wait */
#endif
#define main train_gpt_main
#include "../../../examples/train_gpt.c"
#undef main
#include "../../test.h"
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>

int __real_open(const char *path, int flags, ...);
ssize_t __real_pwrite(int file, const void *data, size_t bytes, off_t offset);
int __real_fsync(int file);
int __real_rename(const char *from, const char *to);
amp_result __real_amp_loader_next(amp_loader *loader, amp_batch *out);

/* Zeroed memory that a forked process shares. */
static void *shared_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) { perror("mmap"); exit(2); }
    return memory;
}

static uint32_t random_bits(uint64_t *seed) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*seed >> 32);
}
static int64_t random_below(uint64_t *seed, int64_t n) { return (int64_t)(random_bits(seed) % (uint64_t)n); }

/* FNV-1a, 64 bits.  With h = 0, a new hash begins. */
static uint64_t hash_bytes(uint64_t h, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    size_t i;
    if (h == 0) h = UINT64_C(0xcbf29ce484222325);
    for (i = 0; i < bytes; i++) h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h;
}
/* The hash of a whole file, or 0 if there is none. */
static uint64_t hash_file(const char *path) {
    void *data;
    size_t bytes;
    uint64_t h;
    if (access(path, F_OK) != 0 || amp_file_read_all(NULL, path, &data, &bytes) != AMP_OK) return 0;
    h = hash_bytes(0, data, bytes);
    amp_file_free(NULL, data, bytes);
    return h;
}

static int ends_with(const char *text, const char *end) {
    size_t n = strlen(text), k = strlen(end);
    return n >= k && strcmp(text + n - k, end) == 0;
}
/* NAME.state, or with end ".state.tmp" the file that becomes it; not the one that a run writes before its first step, to
   prove that it can be saved. */
static inline int is_checkpoint(const char *path, const char *end) {
    return strstr(path, end) != NULL && strstr(path, ".trial") == NULL;
}

/* ---- The arguments of a run: words, of which those that begin with % stand for a folder's path. */

enum { MOST_WORDS = 64, WORD_BYTES = 1200 };
typedef struct words { int n; char *word[MOST_WORDS + 1]; } words;

static void words_add(words *w, const char *folder, const char *text) {
    const char *percent = strchr(text, '%');
    if (w->n == MOST_WORDS) { fprintf(stderr, "too many arguments\n"); exit(2); }
    w->word[w->n] = (char *)malloc(WORD_BYTES);
    if (w->word[w->n] == NULL) { perror("malloc"); exit(2); }
    if (percent == NULL) snprintf(w->word[w->n], WORD_BYTES, "%s", text);
    else snprintf(w->word[w->n], WORD_BYTES, "%.*s%s%s", (int)(percent - text), text, folder, percent + 1);
    w->word[++w->n] = NULL;
}
static void text_split(words *w, const char *folder, const char *text) {
    char copy[2000], *at;
    snprintf(copy, sizeof copy, "%s", text);
    for (at = strtok(copy, " "); at != NULL; at = strtok(NULL, " ")) words_add(w, folder, at);
}

/* Appends everything that is printed to this file. */
static void output_into(const char *path) {
    int file = __real_open(path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (file < 0 || dup2(file, 1) < 0 || dup2(file, 2) < 0) _exit(3);
    close(file);
}

/* ---- The machine and the build, for the record */

static void machine_name(char *out, size_t size) {
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[400], *colon;
    snprintf(out, size, "?");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, "model name", 10) == 0 && (colon = strchr(line, ':')) != NULL) {
            snprintf(out, size, "%.*s", (int)strcspn(colon + 2, "\n\""), colon + 2);
            break;
        }
    if (f != NULL) fclose(f);
}
static void record_head(FILE *f, const char *what, const char *command) {
    char cpu[200];
    machine_name(cpu, sizeof cpu);
    fprintf(f, "{\"record\": \"%s\", \"command\": \"%s\",\n \"version\": \"%s\", \"compiler\": \"%s\", \"cpu\": \"%s\",\n", what, command,
            AMP_VERSION_TEXT,
#if defined(__clang__)
            __VERSION__,
#else
            "gcc " __VERSION__,
#endif
            cpu);
}

#endif
