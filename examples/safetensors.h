/* safetensors.h - a reader and a writer of safetensors, Hugging Face's format of model files, in C.
 *
 * Stands alone: copy it into any program; libc is all it needs, and C99 or C++11.  Nothing in a file is trusted: a
 * damaged or hostile one gives an error.
 *
 *     if (st_read_file("model.safetensors", &text, &size) != ST_OK) puts(st_error());      or map it
 *     if (st_open(&file, text, size) != ST_OK) puts(st_error());                           text must stay
 *     const st_tensor *t = st_find(&file, "wte.weight");                                   NULL: there is none
 *     float *values = malloc(t->count * sizeof(float));
 *     if (st_floats(t, values) != ST_OK) puts(st_error());                                 from F32, F16, BF16 or F64
 *     st_close(&file);
 *     free(text);
 *
 *     st_writer w = {0};                               a failure is kept: st_write_begin and st_write_end return it
 *     st_write_text(&w, "format", "pt");               metadata, if any, first
 *     st_write_tensor(&w, "w", 2, shape);              then every tensor's name and shape, of fp32
 *     st_write_begin(&w);
 *     st_write_floats(&w, values, count);              then their elements in the same order
 *     if (st_write_file(&w, "copy.safetensors") != ST_OK) puts(st_error());
 *     st_write_close(&w);
 *
 * Files may be read in several threads at once; st_error's text is one for each source file that includes this.
 * What it is built from can be used too: UTF-8 (utf8_), a reader of JSON and a text that grows (json_), CRC-32C. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Results; their numbers are those of amp.h's. */
enum {
    ST_OK = 0, ST_ERR_NULL = 101, ST_ERR_SHAPE = 103, ST_ERR_DTYPE = 104, ST_ERR_STATE = 106, ST_ERR_NAME = 107,
    ST_ERR_SIZE = 109, ST_ERR_MEMORY = 301, ST_ERR_OPEN = 401, ST_ERR_READ = 402, ST_ERR_WRITE = 403,
    ST_ERR_FORMAT = 404, ST_ERR_TRUNCATED = 405, ST_ERR_CHECKSUM = 406
};

static char st_text[512];

/* Why the last call failed. */
static inline const char *st_error(void) { return st_text; }

#if defined(__GNUC__)
static inline int st_fail(int result, const char *format, ...) __attribute__((format(printf, 2, 3)));
#endif
static inline int st_fail(int result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(st_text, sizeof st_text, format, args);
    va_end(args);
    return result;
}

/* A whole file, to be freed, with a 0 after it. */
static inline int st_read_file(const char *path, char **text, size_t *bytes) {
    FILE *file;
    size_t capacity = 0, n = 1;
    int result = ST_OK;
    *text = NULL;
    *bytes = 0;
    if (path == NULL) return st_fail(ST_ERR_NULL, "st_read_file: path is NULL");
    file = fopen(path, "rb");
    if (file == NULL) return st_fail(ST_ERR_OPEN, "%.300s: %s", path, strerror(errno));
    while (n > 0 && result == ST_OK) {
        char *more = (char *)realloc(*text, (capacity = capacity * 2 + 65536) + 1);
        if (more == NULL) { result = st_fail(ST_ERR_MEMORY, "%.300s: no memory", path); break; }
        *text = more;
        n = fread(*text + *bytes, 1, capacity - *bytes, file);
        *bytes += n;
        if (ferror(file)) result = st_fail(ST_ERR_READ, "%.300s: %s", path, strerror(errno));
    }
    fclose(file);
    if (result == ST_OK) (*text)[*bytes] = 0;
    else { free(*text); *text = NULL; }
    return result;
}

/* ==== UTF-8 ====================================================================================== */

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

/* 1 if all of the text is UTF-8. */
static inline int utf8_valid(const char *text, size_t bytes) {
    int64_t left = (int64_t)bytes, n;
    uint32_t code;
    for (; left > 0; text += n, left -= n) {
        n = utf8_read(text, left, &code);
        if (code == 0xfffd && n == 1) return 0;
    }
    return 1;
}

/* A character as UTF-8: 1 to 4 bytes into out[4]; returns how many. */
static inline int utf8_write(uint32_t code, char *out) {
    int n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4, i;
    static const unsigned char marks[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 63));
    out[0] = (char)(marks[n] | code);
    return n;
}

/* ==== JSON ======================================================================================= */

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
    return utf8_write(code, utf8);
}

/* A string, unescaped and 0-terminated; one that does not fit or holds a 0 is an error.  text NULL: skipped. */
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
            if (used + 1 < size && piece[i] != 0) text[used++] = piece[i];
            else j->bad = 1;
        }
    }
    if (text != NULL && size > 0) text[used] = 0;
}

/* An integer of at most 18 digits. */
static inline int64_t json_integer(json *j) {
    int64_t value = 0;
    int digits = 0, negative = json_take(j, '-'), zero = j->at < j->end && *j->at == '0';
    for (; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++, digits++) {
        if (digits < 18) value = value * 10 + (*j->at - '0');
        else j->bad = 1;
    }
    if (digits == 0 || (zero && digits > 1)) j->bad = 1;
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

/* A text that grows. */
typedef struct json_buffer { char *text; size_t used, capacity; int failed; } json_buffer;
/* Makes room for n more bytes and a 0.  1 if there is. */
static inline int json_room(json_buffer *b, size_t n) {
    if (!b->failed && b->used + n + 1 > b->capacity) {
        char *more = (char *)realloc(b->text, (b->capacity + n) * 2 + 1024);
        if (more == NULL) b->failed = 1;
        else { b->text = more; b->capacity = (b->capacity + n) * 2 + 1024; }
    }
    return !b->failed;
}
static inline void json_put(json_buffer *b, const char *piece, size_t n) {
    if (!json_room(b, n)) return;
    memcpy(b->text + b->used, piece, n);
    b->used += n;
    b->text[b->used] = 0;
}
#if defined(__GNUC__)
static inline void json_add(json_buffer *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
#endif
static inline void json_add(json_buffer *b, const char *format, ...) {
    va_list args;
    int n;
    va_start(args, format);
    n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n < 0) b->failed = 1;
    if (n < 0 || !json_room(b, (size_t)n)) return;
    va_start(args, format);
    vsnprintf(b->text + b->used, (size_t)n + 1, format, args);
    va_end(args);
    b->used += (size_t)n;
}

/* The characters of a JSON string; bytes that are no UTF-8 become U+FFFD. */
static inline void json_add_escaped(json_buffer *b, const char *text) {
    int64_t left = (int64_t)strlen(text), n;
    uint32_t code;
    for (; left > 0; text += n, left -= n) {
        n = utf8_read(text, left, &code);
        if (code == '"' || code == '\\') json_add(b, "\\%c", (int)code);
        else if (code < 0x20 || code == 0x7f) json_add(b, "\\u%04x", (unsigned)code);
        else if (code == 0xfffd) json_put(b, "\xef\xbf\xbd", 3);
        else json_put(b, text, (size_t)n);
    }
}

/* ==== The reader ================================================================================= */

/* CRC-32C (Castagnoli), reflected. */
static inline uint32_t st_crc32c_add(uint32_t crc, const unsigned char *data, size_t n) {
    uint32_t table[8][256];             /* of a byte followed by 0 to 7 zeros: eight bytes at a time */
    uint32_t i, k;
    for (i = 0; i < 256; i++)
        for (table[0][i] = i, k = 0; k < 8; k++)
            table[0][i] = (table[0][i] >> 1) ^ (0x82f63b78u & (0u - (table[0][i] & 1u)));
    for (k = 1; k < 8; k++)
        for (i = 0; i < 256; i++) table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
    for (crc = ~crc; n >= 8; n -= 8, data += 8)
        crc = table[7][(crc ^ data[0]) & 255] ^ table[6][(crc >> 8 ^ data[1]) & 255] ^
              table[5][(crc >> 16 ^ data[2]) & 255] ^ table[4][crc >> 24 ^ data[3]] ^ table[3][data[4]] ^
              table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
    for (; n > 0; n--, data++) crc = (crc >> 8) ^ table[0][(crc ^ *data) & 255];
    return ~crc;
}
static inline uint32_t st_crc32c(const unsigned char *data, size_t n) { return st_crc32c_add(0, data, n); }

typedef enum st_type { ST_OTHER, ST_F32, ST_F16, ST_BF16, ST_F64 } st_type;
enum { ST_MAX_DIMS = 8 };

typedef struct st_tensor {
    char name[128];
    st_type type;                   /* ST_OTHER: not read as numbers, such as BOOL */
    int32_t ndim;
    int64_t shape[ST_MAX_DIMS];
    const unsigned char *data;      /* not aligned */
    int64_t count;
    size_t bytes;
} st_tensor;

typedef struct st_file {
    st_tensor *tensors;             /* by name */
    int64_t n;
    json metadata;                  /* at the object "__metadata__", or empty */
} st_file;

static inline void st_close(st_file *file) {
    free(file->tensors);
    memset(file, 0, sizeof *file);
}

/* NULL: there is none of this name. */
static inline const st_tensor *st_find(const st_file *file, const char *name) {
    int64_t low = 0, high = file->n;
    while (low < high && name != NULL) {
        int64_t middle = (low + high) / 2;
        int order = strcmp(file->tensors[middle].name, name);
        if (order == 0) return &file->tensors[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    st_fail(ST_ERR_NAME, "%.200s: no tensor has this name", name != NULL ? name : "NULL");
    return NULL;
}

/* Bits per element of a safetensors dtype, 0 if unknown; *out: its type. */
static inline int64_t st_dtype(const char *name, st_type *out) {
    static const struct { const char *name; int64_t bits; st_type type; } known[] = {
        {"F32", 32, ST_F32}, {"F16", 16, ST_F16}, {"BF16", 16, ST_BF16}, {"F64", 64, ST_F64}, {"BOOL", 8, ST_OTHER},
        {"U8", 8, ST_OTHER}, {"I8", 8, ST_OTHER}, {"I16", 16, ST_OTHER}, {"U16", 16, ST_OTHER}, {"I32", 32, ST_OTHER},
        {"U32", 32, ST_OTHER}, {"I64", 64, ST_OTHER}, {"U64", 64, ST_OTHER}, {"C64", 64, ST_OTHER},
        {"F8_E4M3", 8, ST_OTHER}, {"F8_E5M2", 8, ST_OTHER}, {"F8_E8M0", 8, ST_OTHER}, {"F8_E4M3FNUZ", 8, ST_OTHER},
        {"F8_E5M2FNUZ", 8, ST_OTHER}, {"F6_E2M3", 6, ST_OTHER}, {"F6_E3M2", 6, ST_OTHER}, {"F4", 4, ST_OTHER},
    };
    size_t i;
    *out = ST_OTHER;
    for (i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, name) != 0) continue;
        *out = known[i].type;
        return known[i].bits;
    }
    return 0;
}

/* The elements of a shape; -1: a dimension is negative, or they are more than `most`. */
static inline int64_t st_count(int ndim, const int64_t *shape, int64_t most) {
    int64_t count = 1;
    int i, empty = 0;
    for (i = 0; i < ndim; i++) {
        if (shape[i] < 0) return -1;
        empty |= shape[i] == 0;
    }
    if (empty) return 0;
    for (i = 0; i < ndim; count *= shape[i++]) if (count > most / shape[i]) return -1;
    return count;
}

/* What a header entry says, and how often. */
typedef struct st_entry { char dtype[32]; int64_t begin, end; int dtypes, shapes, places; } st_entry;

static inline void st_read_shape(json *j, st_tensor *t) {
    int more;
    json_need(j, '[');
    for (more = json_peek(j) != ']'; more && !j->bad; more = json_take(j, ',')) {
        int64_t size = json_integer(j);
        if (t->ndim < ST_MAX_DIMS) t->shape[t->ndim] = size;
        t->ndim++;
    }
    json_need(j, ']');
}

/* {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, each once. */
static inline int st_read_members(json *j, st_tensor *t, st_entry *e) {
    char key[128];
    json value;
    int more;
    json_need(j, '{');
    for (more = json_peek(j) == '"'; more && json_member(j, key, &value); more = json_take(j, ',')) {
        if (strcmp(key, "dtype") == 0) { json_string(&value, e->dtype, sizeof e->dtype); e->dtypes++; }
        else if (strcmp(key, "shape") == 0) { st_read_shape(&value, t); e->shapes++; }
        else if (strcmp(key, "data_offsets") == 0) {
            json_need(&value, '['); e->begin = json_integer(&value); json_need(&value, ',');
            e->end = json_integer(&value); json_need(&value, ']');
            e->places++;
        }
        j->bad |= value.bad;
    }
    json_need(j, '}');
    return !j->bad && e->dtypes == 1 && e->shapes == 1 && e->places == 1;
}

/* One header entry. */
static inline int st_read_entry(json *j, st_tensor *t, const unsigned char *data, int64_t bytes) {
    st_entry e;
    int64_t bits;
    memset(&e, 0, sizeof e);
    if (!st_read_members(j, t, &e)) return st_fail(ST_ERR_FORMAT, "%s: not a safetensors entry", t->name);
    bits = st_dtype(e.dtype, &t->type);
    if (bits == 0) return st_fail(ST_ERR_FORMAT, "%s: unknown dtype %s", t->name, e.dtype);
    if (t->ndim > ST_MAX_DIMS)
        return st_fail(ST_ERR_FORMAT, "%s: it has %d dimensions, and at most %d are read", t->name, (int)t->ndim,
                       ST_MAX_DIMS);
    t->count = st_count(t->ndim, t->shape, 2 * bytes);
    if (t->count < 0) return st_fail(ST_ERR_FORMAT, "%s: the shape does not fit into the file", t->name);
    if (e.begin < 0 || e.end < e.begin || e.end > bytes || (e.end - e.begin) * 8 != t->count * bits)
        return st_fail(ST_ERR_TRUNCATED, "%s: bytes %lld to %lld of %lld do not hold %lld elements of %s",
                       t->name, (long long)e.begin, (long long)e.end, (long long)bytes, (long long)t->count, e.dtype);
    t->data = data + e.begin;
    t->bytes = (size_t)(e.end - e.begin);
    return ST_OK;
}

/* {"format": "pt", ...}: texts alone; null is none. */
static inline int st_read_metadata(st_file *file, json *j) {
    char key[128];
    json value, start = *j;
    int more;
    if (file->metadata.at != NULL) return st_fail(ST_ERR_FORMAT, "__metadata__ is in the file twice");
    if (json_peek(j) != '{') {
        json_skip(j);
        if (!j->bad && j->at - start.at >= 4 && memcmp(j->at - 4, "null", 4) == 0) return ST_OK;
        return st_fail(ST_ERR_FORMAT, "__metadata__ is not an object of texts");
    }
    file->metadata = *j;
    json_need(j, '{');
    for (more = json_peek(j) == '"'; more && json_member(j, key, &value); more = json_take(j, ','))
        if (*value.at != '"') return st_fail(ST_ERR_FORMAT, "__metadata__: the value of %s is no text", key);
    json_need(j, '}');
    file->metadata.end = j->at;
    return ST_OK;
}

static inline int st_read_header(st_file *file, json *j, const unsigned char *data, int64_t bytes) {
    int64_t capacity = 0;
    int result, more;
    json_need(j, '{');
    for (more = json_peek(j) == '"'; more && !j->bad; more = json_take(j, ',')) {
        st_tensor t;
        json start = *j;
        memset(&t, 0, sizeof t);
        json_string(j, t.name, sizeof t.name);
        if (j->bad) {
            *j = start;
            json_string(j, NULL, 0);
            if (!j->bad)
                return st_fail(ST_ERR_FORMAT, "%s...: the name has more than %d bytes, or a zero byte", t.name,
                               (int)sizeof t.name - 1);
        }
        json_need(j, ':');
        json_peek(j);
        if (j->bad) break;
        if (strcmp(t.name, "__metadata__") == 0) {
            result = st_read_metadata(file, j);
            if (result != ST_OK) return result;
            continue;
        }
        result = st_read_entry(j, &t, data, bytes);
        if (result != ST_OK) return result;
        if (file->n == capacity) {
            st_tensor *grown =
                (st_tensor *)realloc(file->tensors, (size_t)(capacity = capacity * 2 + 64) * sizeof *grown);
            if (grown == NULL) return st_fail(ST_ERR_MEMORY, "no memory for the tensor table");
            file->tensors = grown;
        }
        file->tensors[file->n++] = t;
    }
    json_need(j, '}');
    json_peek(j);
    if (j->bad || j->at != j->end) return st_fail(ST_ERR_FORMAT, "the safetensors header is not valid JSON");
    return ST_OK;
}

static inline int st_by_place(const void *a, const void *b) {
    const st_tensor *x = (const st_tensor *)a, *y = (const st_tensor *)b;
    if (x->data != y->data) return x->data > y->data ? 1 : -1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}
static inline int st_by_name(const void *a, const void *b) {
    return strcmp(((const st_tensor *)a)->name, ((const st_tensor *)b)->name);
}

/* Every byte of the data belongs to one tensor, as the format demands, and no name is there twice.  Leaves them by
   name. */
static inline int st_check_tensors(st_file *file, const unsigned char *data, int64_t bytes) {
    int64_t at = 0, i;
    if (file->n > 1) qsort(file->tensors, (size_t)file->n, sizeof *file->tensors, st_by_place);
    for (i = 0; i < file->n; at += (int64_t)file->tensors[i++].bytes)
        if (file->tensors[i].data != data + at)
            return st_fail(ST_ERR_FORMAT, "%s: it begins at byte %lld of the data, and the one before it ends at %lld",
                           file->tensors[i].name, (long long)(file->tensors[i].data - data), (long long)at);
    if (at != bytes)
        return st_fail(ST_ERR_FORMAT, "the tensors have %lld bytes, and the data after the header %lld", (long long)at,
                       (long long)bytes);
    if (file->n > 1) qsort(file->tensors, (size_t)file->n, sizeof *file->tensors, st_by_name);
    for (i = 1; i < file->n; i++)
        if (st_by_name(&file->tensors[i - 1], &file->tensors[i]) == 0)
            return st_fail(ST_ERR_FORMAT, "%s: is in the file twice", file->tensors[i].name);
    return ST_OK;
}

/* The checksum of st_writer: the CRC-32C of the whole file with zeros for the checksum's eight digits, which are in
   the metadata as "crc32c":"89abcdef".  Other programs' files have none. */
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
    uint32_t crc = st_crc32c(file, (size_t)(digits - file));
    crc = st_crc32c_add(crc, (const unsigned char *)"00000000", ST_DIGITS);
    crc = st_crc32c_add(crc, digits + ST_DIGITS, bytes - (size_t)(digits - file) - ST_DIGITS);
    snprintf(text, ST_DIGITS + 1, "%08x", crc);
}
static inline int st_verify(const unsigned char *file, size_t bytes, size_t header) {
    const unsigned char *digits = st_digits(file, header);
    char text[ST_DIGITS + 1];
    if (digits == NULL) return ST_OK;
    st_checksum(file, bytes, digits, text);
    if (memcmp(digits, text, ST_DIGITS) == 0) return ST_OK;
    return st_fail(ST_ERR_CHECKSUM,
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

/* The bits of fp16 as those of fp32. */
static inline uint32_t st_half(uint32_t half) {
    uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ffu;
    if (exponent == 31) return sign | 0x7f800000u | fraction << 13;
    if (exponent > 0) return sign | (exponent + 112) << 23 | fraction << 13;
    if (fraction == 0) return sign;
    for (exponent = 113; (fraction & 0x400u) == 0; exponent--) fraction <<= 1;      /* subnormal */
    return sign | exponent << 23 | (fraction & 0x3ffu) << 13;
}

/* Reads a safetensors file from memory, which must stay.  Nothing in it is trusted: a damaged or
   hostile file gives an error.  Format: 8 bytes header length, a JSON header, the data. */
static inline int st_open(st_file *file, const void *bytes, size_t size) {
    const unsigned char *data = (const unsigned char *)bytes;
    uint64_t header = 0;
    int result;
    json j;
    int i;
    memset(file, 0, sizeof *file);
    if (bytes == NULL) return st_fail(ST_ERR_NULL, "st_open: bytes is NULL");
    if (size > (size_t)-1 / 1024) return st_fail(ST_ERR_SIZE, "st_open: the size is %zu: did the read fail?", size);
    if (size < 8)
        return st_fail(ST_ERR_TRUNCATED, "a safetensors file has at least 8 bytes, and this one has %zu", size);
    for (i = 7; i >= 0; i--) header = header << 8 | data[i];
    if (header > size - 8)
        return st_fail(ST_ERR_FORMAT, "not a safetensors file (PyTorch's .bin and Git LFS's pointers are not), or one "
                                      "that ends in its header");
    result = st_verify(data, size, 8 + (size_t)header);
    if (result != ST_OK) return result;
    if (!utf8_valid((const char *)data + 8, (size_t)header))
        return st_fail(ST_ERR_FORMAT, "the safetensors header is not UTF-8");
    j = json_open(data + 8, (size_t)header);
    data += 8 + header;
    result = st_read_header(file, &j, data, (int64_t)(size - 8 - header));
    if (result == ST_OK) result = st_check_tensors(file, data, (int64_t)(size - 8 - header));
    if (result != ST_OK) st_close(file);
    return result;
}

/* All elements of a floating-point tensor as fp32; F64 is rounded. */
static inline int st_floats(const st_tensor *t, float *out) {
    int64_t i;
    const unsigned char *p;
    if (t == NULL || (out == NULL && t->count > 0))
        return st_fail(ST_ERR_NULL, t == NULL ? "st_floats: the tensor is NULL: st_find found none"
                                              : "st_floats: out is NULL");
    p = t->data;
    if (t->type == ST_OTHER) return st_fail(ST_ERR_DTYPE, "%s: only F32, F16, BF16 and F64 are read", t->name);
    for (i = 0; i < t->count; i++) {
        if (t->type == ST_F64) {
            uint64_t bits = 0;
            double wide;
            int k;
            for (k = 7; k >= 0; k--) bits = bits << 8 | p[8 * i + k];
            memcpy(&wide, &bits, sizeof wide);
            out[i] = (float)wide;
        } else {
            uint32_t bits = t->type == ST_F32 ? (uint32_t)p[4 * i] | (uint32_t)p[4 * i + 1] << 8 |
                                                    (uint32_t)p[4 * i + 2] << 16 | (uint32_t)p[4 * i + 3] << 24
                                              : (uint32_t)p[2 * i] | (uint32_t)p[2 * i + 1] << 8;
            if (t->type == ST_BF16) bits <<= 16;
            if (t->type == ST_F16) bits = st_half(bits);
            memcpy(&out[i], &bits, sizeof bits);
        }
    }
    return ST_OK;
}

/* ==== The writer ================================================================================= */

typedef struct st_writer {
    json_buffer header;
    int64_t offset, written;        /* bytes of the tensors, named so far and written so far */
    int in_meta, tensors, result;   /* result: of the first call that failed */
    char wrong[sizeof st_text];     /* why it failed */
    unsigned char *file;            /* from st_write_begin on; whole after st_write_end */
    size_t bytes;
} st_writer;

static inline void st_write_close(st_writer *w) {
    free(w->header.text);
    free(w->file);
    memset(w, 0, sizeof *w);
}

/* The first failure stays: every call after it returns it. */
static inline int st_write_fail(st_writer *w, int result) {
    if (w->result == ST_OK) memcpy(w->wrong, st_text, sizeof w->wrong);
    if (w->result == ST_OK) w->result = result;
    return st_fail(w->result, "%s", w->wrong);
}

/* A text in the file's metadata; all of them before the first tensor. */
static inline int st_write_text(st_writer *w, const char *key, const char *value) {
    static const char start[] = "{\"__metadata__\":";
    json there;
    if (key == NULL || value == NULL)
        return st_write_fail(w, st_fail(ST_ERR_NULL, "st_write_text: key or value is NULL"));
    if (w->tensors > 0 || w->file != NULL)
        return st_write_fail(w, st_fail(ST_ERR_STATE, "st_write_text: %.100s comes after a tensor, and texts must "
                                                      "come first", key));
    if (w->in_meta && !w->header.failed &&
        json_value(json_open(w->header.text + sizeof start - 1, w->header.used - sizeof start + 1), key, &there))
        return st_write_fail(w, st_fail(ST_ERR_NAME, "st_write_text: %.100s is named twice", key));
    json_add(&w->header, "%s\"", w->in_meta ? "," : "{\"__metadata__\":{");
    w->in_meta = 1;
    json_add_escaped(&w->header, key);
    json_add(&w->header, "\":\"");
    json_add_escaped(&w->header, value);
    json_add(&w->header, "\"");
    return w->result == ST_OK ? ST_OK : st_write_fail(w, w->result);
}
/* The file gets a checksum, which st_open verifies. */
static inline int st_write_checksum(st_writer *w) { return st_write_text(w, "crc32c", "00000000"); }

/* The name and shape of the next tensor, which is fp32. */
static inline int st_write_tensor(st_writer *w, const char *name, int ndim, const int64_t *shape) {
    const int64_t most = INT64_MAX / 64 - w->offset;
    int64_t count;
    int i;
    if (name == NULL || (shape == NULL && ndim > 0))
        return st_write_fail(w, st_fail(ST_ERR_NULL, "st_write_tensor: name or shape is NULL"));
    if (w->file != NULL)
        return st_write_fail(w, st_fail(ST_ERR_STATE, "st_write_tensor: %.100s comes after st_write_begin", name));
    if (!utf8_valid(name, strlen(name)))
        return st_write_fail(w, st_fail(ST_ERR_NAME, "st_write_tensor: the name %.100s is not UTF-8", name));
    count = ndim < 0 || ndim > ST_MAX_DIMS ? -1 : st_count(ndim, shape, most);
    if (count < 0)
        return st_write_fail(w, st_fail(ST_ERR_SHAPE, "st_write_tensor: %.100s: more than %d dimensions, a negative "
                                                      "one, or too many elements", name, ST_MAX_DIMS));
    json_add(&w->header, "%s\"", w->in_meta ? "}," : w->tensors > 0 ? "," : "{");
    w->in_meta = 0;
    w->tensors++;
    json_add_escaped(&w->header, name);
    json_add(&w->header, "\":{\"dtype\":\"F32\",\"shape\":[");
    for (i = 0; i < ndim; i++) json_add(&w->header, "%s%lld", i > 0 ? "," : "", (long long)shape[i]);
    json_add(&w->header, "],\"data_offsets\":[%lld,%lld]}", (long long)w->offset, (long long)(w->offset + 4 * count));
    w->offset += 4 * count;
    return w->result == ST_OK ? ST_OK : st_write_fail(w, w->result);
}

/* Reads the header that was written, so that st_open will: no name twice, none too long. */
static inline int st_write_check(const st_writer *w) {
    const unsigned char *data = w->file + 8 + w->header.used;
    json j = json_open(w->header.text, w->header.used);
    st_file file;
    int result;
    memset(&file, 0, sizeof file);
    result = st_read_header(&file, &j, data, w->offset);
    if (result == ST_OK) result = st_check_tensors(&file, data, w->offset);
    st_close(&file);
    return result;
}

/* Allocates the file; the elements of all tensors follow. */
static inline int st_write_begin(st_writer *w) {
    int i, result;
    if (w->file != NULL) return st_write_fail(w, st_fail(ST_ERR_STATE, "st_write_begin: called twice"));
    if (w->result != ST_OK) return st_write_fail(w, w->result);
    json_add(&w->header, "%s}", w->in_meta ? "}" : w->tensors > 0 ? "" : "{");
    while (!w->header.failed && w->header.used % 8 != 0) json_add(&w->header, " ");     /* the data starts aligned */
    w->bytes = 8 + w->header.used + (size_t)w->offset;
    if (!w->header.failed) w->file = (unsigned char *)malloc(w->bytes);
    if (w->file == NULL) return st_write_fail(w, st_fail(ST_ERR_MEMORY, "no memory for a file of %zu bytes", w->bytes));
    for (i = 0; i < 8; i++) w->file[i] = (unsigned char)((uint64_t)w->header.used >> (8 * i));
    memcpy(w->file + 8, w->header.text, w->header.used);
    result = st_write_check(w);
    return result == ST_OK ? ST_OK : st_write_fail(w, result);
}

/* The next n elements. */
static inline int st_write_floats(st_writer *w, const float *values, int64_t n) {
    unsigned char *out;
    int64_t i;
    if (w->file == NULL) return st_write_fail(w, st_fail(ST_ERR_STATE, "st_write_floats: before st_write_begin"));
    if (n < 0 || n > (w->offset - w->written) / 4)
        return st_write_fail(w, st_fail(ST_ERR_SIZE, "st_write_floats: %lld elements, but the named tensors lack %lld",
                                        (long long)n, (long long)((w->offset - w->written) / 4)));
    if (values == NULL && n > 0) return st_write_fail(w, st_fail(ST_ERR_NULL, "st_write_floats: values is NULL"));
    out = w->file + 8 + w->header.used + w->written;
    for (i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        out[4 * i] = (unsigned char)bits;              out[4 * i + 1] = (unsigned char)(bits >> 8);
        out[4 * i + 2] = (unsigned char)(bits >> 16);  out[4 * i + 3] = (unsigned char)(bits >> 24);
    }
    w->written += 4 * n;
    return w->result == ST_OK ? ST_OK : st_write_fail(w, w->result);
}

/* w->file is complete. */
static inline int st_write_end(st_writer *w) {
    if (w->file == NULL) return st_write_fail(w, st_fail(ST_ERR_STATE, "st_write_end: before st_write_begin"));
    if (w->written != w->offset)
        return st_write_fail(w, st_fail(ST_ERR_SIZE, "%lld bytes of tensors were written, and %lld named",
                                        (long long)w->written, (long long)w->offset));
    if (w->result != ST_OK) return st_write_fail(w, w->result);
    st_seal(w->file, w->bytes, 8 + w->header.used);
    return ST_OK;
}

/* st_write_end, and the file at `path`.  What a crash or a full disk leaves of it, st_open refuses. */
static inline int st_write_file(st_writer *w, const char *path) {
    FILE *file;
    int result = st_write_end(w);
    if (result != ST_OK) return result;
    if (path == NULL) return st_fail(ST_ERR_NULL, "st_write_file: path is NULL");
    file = fopen(path, "wb");
    if (file == NULL) return st_fail(ST_ERR_OPEN, "%.300s: %s", path, strerror(errno));
    if (fwrite(w->file, 1, w->bytes, file) != w->bytes || fflush(file) != 0)
        result = st_fail(ST_ERR_WRITE, "%.300s: %s", path, strerror(errno));
    if (fclose(file) != 0 && result == ST_OK) result = st_fail(ST_ERR_WRITE, "%.300s: %s", path, strerror(errno));
    return result;
}

#endif
