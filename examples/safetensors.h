/* safetensors.h - a reader and a writer of safetensors, Hugging Face's format of model files, in C.
 *
 * Stands alone: copy it into any program; libc is all it needs, and C99 or C++11.  Nothing in a file is trusted: a
 * damaged or hostile one gives an error.
 *
 *     st_file file;                                    bytes, size: the whole file, read or mapped
 *     if (st_open(&file, bytes, size) != ST_OK) puts(st_error());
 *     const st_tensor *t = st_find(&file, "wte.weight");
 *     float *values = malloc(t->count * sizeof(float));
 *     st_floats(t, values);                            from F32, F16, BF16 or F64
 *     st_close(&file);
 *
 *     st_writer w = {0};
 *     st_write_text(&w, "format", "pt");               metadata, if any, first
 *     st_write_tensor(&w, "w", 2, shape);              then every tensor's name and shape, of fp32
 *     st_write_begin(&w);
 *     st_write_floats(&w, values, count);              then their elements in the same order
 *     if (st_write_end(&w) == ST_OK) fwrite(w.file, 1, w.bytes, out);
 *     st_write_close(&w);
 *
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
    ST_OK = 0, ST_ERR_DTYPE = 104, ST_ERR_SIZE = 109, ST_ERR_MEMORY = 301, ST_ERR_OPEN = 401, ST_ERR_READ = 402,
    ST_ERR_FORMAT = 404, ST_ERR_TRUNCATED = 405, ST_ERR_CHECKSUM = 406
};

static char st_text[512];

/* Why the last call failed. */
static inline const char *st_error(void) { return st_text; }

static inline int st_fail(int result, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
static inline int st_fail(int result, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(st_text, sizeof st_text, format, args);
    va_end(args);
    return result;
}

/* A whole file, to be freed, with a 0 after it. */
static inline int st_read_file(const char *path, char **text, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    size_t capacity = 0, n = 1;
    int result = ST_OK;
    *text = NULL;
    *bytes = 0;
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

/* A text that grows. */
typedef struct json_buffer { char *text; size_t used, capacity; int failed; } json_buffer;
static inline void json_put(json_buffer *b, const char *piece, size_t n) {
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
static inline void json_add(json_buffer *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void json_add(json_buffer *b, const char *format, ...) {
    char piece[512];
    va_list args;
    size_t n;
    va_start(args, format);
    n = (size_t)vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    if (n >= sizeof piece) b->failed = 1;
    else json_put(b, piece, n);
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

/* Bytes per element of a safetensors dtype, 0 if unknown; *out: its type. */
static inline int64_t st_dtype(const char *name, st_type *out) {
    static const struct { const char *name; int64_t size; st_type type; } known[] = {
        {"F32", 4, ST_F32}, {"F16", 2, ST_F16}, {"BF16", 2, ST_BF16}, {"F64", 8, ST_F64}, {"BOOL", 1, ST_OTHER},
        {"U8", 1, ST_OTHER}, {"I8", 1, ST_OTHER}, {"I16", 2, ST_OTHER}, {"U16", 2, ST_OTHER}, {"I32", 4, ST_OTHER},
        {"U32", 4, ST_OTHER}, {"I64", 8, ST_OTHER}, {"U64", 8, ST_OTHER}, {"F8_E4M3", 1, ST_OTHER},
        {"F8_E5M2", 1, ST_OTHER},
    };
    size_t i;
    *out = ST_OTHER;
    for (i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, name) != 0) continue;
        *out = known[i].type;
        return known[i].size;
    }
    return 0;
}

/* One header entry: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}. */
static inline int st_read_entry(json *j, st_tensor *t, const unsigned char *data, int64_t bytes) {
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
                    return st_fail(ST_ERR_FORMAT, "%s: more than %d dimensions", t->name, ST_MAX_DIMS);
                t->shape[t->ndim++] = json_integer(j);
                if (!json_take(j, ',')) break;
            }
            json_need(j, ']');
        } else json_skip(j);
        if (!json_take(j, ',')) break;
    }
    json_need(j, '}');
    size = st_dtype(dtype, &t->type);
    if (j->bad || !have_shape || size == 0) return st_fail(ST_ERR_FORMAT, "%s: not a safetensors entry", t->name);
    for (i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0 || (t->shape[i] > 0 && count > bytes / t->shape[i]))
            return st_fail(ST_ERR_FORMAT, "%s: the shape does not fit into the file", t->name);
        count *= t->shape[i];
    }
    if (begin < 0 || end < begin || end > bytes || (end - begin) / size != count || (end - begin) % size != 0)
        return st_fail(ST_ERR_TRUNCATED, "%s: bytes %lld to %lld of %lld do not hold %lld elements of %s",
                            t->name, (long long)begin, (long long)end, (long long)bytes, (long long)count, dtype);
    t->count = count;
    t->data = data + begin;
    t->bytes = (size_t)(end - begin);
    return ST_OK;
}

static inline int st_read_header(st_file *file, json *j, const unsigned char *data, int64_t bytes) {
    int64_t capacity = 0;
    int result;
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
                return st_fail(ST_ERR_FORMAT, "%s: is in the file twice", t.name);
            result = st_read_entry(j, &t, data, bytes);
            if (result != ST_OK) return result;
            if (file->n == capacity) {
                st_tensor *more =
                    (st_tensor *)realloc(file->tensors, (size_t)(capacity = capacity * 2 + 64) * sizeof *more);
                if (more == NULL) return st_fail(ST_ERR_MEMORY, "no memory for the tensor table");
                file->tensors = more;
            }
            file->tensors[file->n++] = t;
        }
        if (!json_take(j, ',')) break;
    }
    json_need(j, '}');
    if (j->bad || json_peek(j) != 0) return st_fail(ST_ERR_FORMAT, "the safetensors header is not valid JSON");
    return ST_OK;
}

/* The checksum of st_writer: the CRC-32C of the whole file with zeros for the checksum's eight digits, which are in
   the metadata
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
    if (size < 8) return st_fail(ST_ERR_TRUNCATED, "a safetensors file has at least 8 bytes, this one %zu", size);
    for (i = 7; i >= 0; i--) header = header << 8 | data[i];
    if (header > size - 8)
        return st_fail(ST_ERR_FORMAT, "not a safetensors file, or one that ends in its header");
    result = st_verify(data, size, 8 + (size_t)header);
    if (result != ST_OK) return result;
    j = json_open(data + 8, (size_t)header);
    result = st_read_header(file, &j, data + 8 + header, (int64_t)(size - 8 - header));
    if (result != ST_OK) st_close(file);
    return result;
}

/* All elements of a floating-point tensor as fp32; F64 is rounded. */
static inline int st_floats(const st_tensor *t, float *out) {
    int64_t i;
    const unsigned char *p = t->data;
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
    int in_meta, tensors;
    unsigned char *file;            /* from st_write_begin on; whole after st_write_end */
    size_t bytes;
} st_writer;

static inline void st_write_close(st_writer *w) {
    free(w->header.text);
    free(w->file);
    memset(w, 0, sizeof *w);
}

/* A text in the file's metadata; all of them before the first tensor. */
static inline void st_write_text(st_writer *w, const char *key, const char *value) {
    json_add(&w->header, "%s\"", w->in_meta ? "," : "{\"__metadata__\":{");
    w->in_meta = 1;
    json_add_escaped(&w->header, key);
    json_add(&w->header, "\":\"");
    json_add_escaped(&w->header, value);
    json_add(&w->header, "\"");
}
/* The file gets a checksum, which st_open verifies. */
static inline void st_write_checksum(st_writer *w) { st_write_text(w, "crc32c", "00000000"); }

/* The name and shape of the next tensor, which is fp32. */
static inline void st_write_tensor(st_writer *w, const char *name, int ndim, const int64_t *shape) {
    int64_t count = 1;
    int i;
    json_add(&w->header, "%s\"", w->in_meta ? "}," : w->tensors > 0 ? "," : "{");
    w->in_meta = 0;
    w->tensors++;
    json_add_escaped(&w->header, name);
    json_add(&w->header, "\":{\"dtype\":\"F32\",\"shape\":[");
    for (i = 0; i < ndim; count *= shape[i++]) json_add(&w->header, "%s%lld", i > 0 ? "," : "", (long long)shape[i]);
    json_add(&w->header, "],\"data_offsets\":[%lld,%lld]}", (long long)w->offset, (long long)(w->offset + 4 * count));
    w->offset += 4 * count;
}

/* Allocates the file; the elements of all tensors follow. */
static inline int st_write_begin(st_writer *w) {
    int i;
    json_add(&w->header, "%s}", w->in_meta ? "}" : w->tensors > 0 ? "" : "{");
    while (!w->header.failed && w->header.used % 8 != 0) json_add(&w->header, " ");     /* the data starts aligned */
    w->bytes = 8 + w->header.used + (size_t)w->offset;
    if (!w->header.failed) w->file = (unsigned char *)malloc(w->bytes);
    if (w->file == NULL) return st_fail(ST_ERR_MEMORY, "no memory for a file of %zu bytes", w->bytes);
    for (i = 0; i < 8; i++) w->file[i] = (unsigned char)((uint64_t)w->header.used >> (8 * i));
    memcpy(w->file + 8, w->header.text, w->header.used);
    return ST_OK;
}

/* The next n elements. */
static inline void st_write_floats(st_writer *w, const float *values, int64_t n) {
    unsigned char *out = w->file + 8 + w->header.used + w->written;
    int64_t i;
    if (w->written + 4 * n > w->offset) n = (w->offset - w->written) / 4;       /* st_write_end tells */
    for (i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        out[4 * i] = (unsigned char)bits;              out[4 * i + 1] = (unsigned char)(bits >> 8);
        out[4 * i + 2] = (unsigned char)(bits >> 16);  out[4 * i + 3] = (unsigned char)(bits >> 24);
    }
    w->written += 4 * n;
}

/* w->file is complete. */
static inline int st_write_end(st_writer *w) {
    if (w->written != w->offset)
        return st_fail(ST_ERR_SIZE, "%lld bytes of tensors were written, and %lld named", (long long)w->written,
                       (long long)w->offset);
    st_seal(w->file, w->bytes, 8 + w->header.used);
    return ST_OK;
}

#endif
