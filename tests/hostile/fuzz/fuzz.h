/* fuzz.h - what the fuzzers share: the macro CLAIM, a file layer over memory, and a context on it.
 *
 * A fuzzer is one function, LLVMFuzzerTestOneInput(data, size).  It gives the bytes to the code that parses them, and
 * states with CLAIM what must be true for every input.  libFuzzer brings its own main (tests/hostile/fuzz/rules.mk).
 * tests/hostile/t_fuzz.c runs the same functions over the seeds, and over changes of them, with any compiler. */
#ifndef AMPT_FUZZ_H
#define AMPT_FUZZ_H

#ifndef AMP_IMPLEMENTATION
#define AMP_IMPLEMENTATION
#endif
#include "../../../amp.h"
#include "../../../examples/bpe.h"
#include "../../../examples/encoder_files.h"
#include "../../../examples/gpt_files.h"
#include "../../../examples/mnist.h"
#include "../../../examples/wordpiece.h"
#include "../../test.h"

/* A condition that no input may break. */
#ifdef AMPT_REPLAY
#define CLAIM(condition) CHECK(condition)
#else
#define CLAIM(condition) ((condition) ? (void)0 : fuzz_broken(#condition, __FILE__, __LINE__))
static void fuzz_broken(const char *what, const char *file, int line) {
    fprintf(stderr, "%s:%d: not true: %s (last error: %s)\n", file, line, what, ex_error());
    abort();
}
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ---- One file, "input", in memory.  Reads may come in pieces, be interrupted, or find the file cut. */
typedef struct fuzz_disk {
    const uint8_t *data;
    int64_t bytes;
    int32_t pieces, interrupted;    /* 1: reads give at most 7 bytes; every third one -EINTR */
    int32_t open, calls;
} fuzz_disk;
static fuzz_disk fuzz_file;

static int fuzz_open(void *user, const char *path, int for_writing, intptr_t *file) {
    (void)user;
    if (strcmp(path, "input") != 0) return -ENOENT;
    if (for_writing != 0) return -EACCES;
    fuzz_file.open++;
    *file = 1;
    return 0;
}
static int64_t fuzz_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    int64_t n = (int64_t)bytes;
    (void)user; (void)file;
    if (fuzz_file.interrupted && ++fuzz_file.calls % 3 == 0) return -EINTR;
    if (offset >= fuzz_file.bytes) return 0;
    if (n > fuzz_file.bytes - offset) n = fuzz_file.bytes - offset;
    if (fuzz_file.pieces && n > 7) n = 7;
    memcpy(buffer, fuzz_file.data + offset, (size_t)n);
    return n;
}
static int64_t fuzz_size(void *user, intptr_t file) { (void)user; (void)file; return fuzz_file.bytes; }
static int fuzz_close(void *user, intptr_t file) { (void)user; (void)file; fuzz_file.open--; return 0; }

static amp_system fuzz_system(void) {
    amp_system system;
    memset(&system, 0, sizeof system);
    system.file_open = fuzz_open; system.file_read = fuzz_read;
    system.file_size = fuzz_size; system.file_close = fuzz_close;
    return system;
}

/* One context for all inputs, which reads files from memory and prints nothing. */
static amp_context *fuzz_context(void) {
    static amp_context *amp;
    amp_desc desc;
    if (amp != NULL) return amp;
    memset(&desc, 0, sizeof desc);
    desc.system = fuzz_system();
    desc.logger.level = AMP_LOG_OFF;
    desc.threads = 1;
    CLAIM(amp_open(&amp, &desc) == AMP_OK);
    return amp;
}

/* A copy with exactly these bytes, so that a read behind the end is detected. */
static void *fuzz_copy(const void *data, size_t bytes) {
    void *copy = malloc(bytes > 0 ? bytes : 1);
    if (copy != NULL && bytes > 0) memcpy(copy, data, bytes);
    return copy;
}

/* A failure must have a reason. */
static void fuzz_told(amp_result result) {
    CLAIM(result == AMP_OK || (strcmp(amp_result_text(result), "unknown result") != 0 && ex_error()[0] != 0));
}

#endif
