/* tensorboard.h - scalars for TensorBoard in an event file: board_open, board_scalar, board_close.
 *
 * The file is a TFRecord file: each record is its length in 8 bytes, their checksum, the data, and their checksum,
 * little endian; the data are protocol buffers of tensorflow/core/util/event.proto. */
#ifndef EXAMPLE_TENSORBOARD_H
#define EXAMPLE_TENSORBOARD_H

#include "example.h"
#include "safetensors.h"      /* the checksum */

enum { BOARD_TAG = 100, BOARD_RECORD = BOARD_TAG + 64 };

typedef struct board {
    FILE *file;                     /* NULL: closed, or failed */
    char path[PATH_MAX];
} board;

/* Appends the low `bytes` bytes of value. */
static inline unsigned char *board_bytes(unsigned char *out, uint64_t value, int bytes) {
    for (; bytes > 0; bytes--, value >>= 8) *out++ = (unsigned char)value;
    return out;
}
/* The checksum of n bytes in records: rotated by 15 plus a constant, as data may hold checksums themselves. */
static inline unsigned char *board_checksum(unsigned char *out, const unsigned char *data, size_t n) {
    uint32_t crc = st_crc32c(data, n);
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
    ex_host_name(host, sizeof host);
    if (host[0] == 0) snprintf(host, sizeof host, "localhost");
    if (snprintf(b->path, sizeof b->path, "%s/events.out.tfevents.%010.0f.%s", folder, floor(now), host) >=
        (int)sizeof b->path)
        return ex_fail(AMP_ERR_OPEN, "%.60s...: the path is too long", folder);
    EX_TRY(ex_folder_make(b->path));
    b->file = fopen(b->path, "ab");
    if (b->file == NULL) return ex_fail(AMP_ERR_OPEN, "%s: %s", b->path, strerror(errno));
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

#endif
