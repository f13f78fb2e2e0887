/* t_state.c - tests state blobs: every dtype and size, all kinds of damage, and failing memory and files. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#if !defined(_WIN32)
#  include <glob.h>
#endif

#ifndef AMPT_GOLDEN
#define AMPT_GOLDEN "tests/torch/golden"
#endif

static const amp_dtype dtypes[] = {AMP_F32, AMP_F64, AMP_F16, AMP_BF16, AMP_U8, AMP_U16, AMP_I32, AMP_I64};

/* A system that counts its memory and fails the n-th call of a kind. */
typedef struct state_faults {
    amp_system posix;
    int64_t live, calls, fail_alloc;
    int fail_open, fail_write, fail_sync, fail_rename, short_writes;
} state_faults;

static void *state_f_alloc(void *user, size_t size, size_t align) {
    state_faults *f = (state_faults *)user;
    void *ptr;
    if (size == 0 || ++f->calls == f->fail_alloc) return NULL;
    ptr = f->posix.alloc(NULL, size, align);
    if (ptr) f->live += (int64_t)size;
    return ptr;
}
static void state_f_free(void *user, void *ptr, size_t size) {
    state_faults *f = (state_faults *)user;
    f->live -= (int64_t)size;
    f->posix.free(NULL, ptr, size);
}
static int state_f_open(void *user, const char *path, int for_writing, intptr_t *file) {
    state_faults *f = (state_faults *)user;
    return f->fail_open ? -EACCES : f->posix.file_open(NULL, path, for_writing, file);
}
static int64_t f_write(void *user, intptr_t file, const void *data, size_t bytes, int64_t offset) {
    state_faults *f = (state_faults *)user;
    static int turn;
    if (f->fail_write && offset > 0) return -ENOSPC;
    if (f->short_writes && ++turn % 3 == 0) return -EINTR;
    if ((f->fail_write || f->short_writes) && bytes > 7) bytes = 7;
    return f->posix.file_write(NULL, file, data, bytes, offset);
}
static int f_sync(void *user, intptr_t file) {
    state_faults *f = (state_faults *)user;
    return f->fail_sync ? -EIO : f->posix.file_sync(NULL, file);
}
static int f_rename(void *user, const char *from, const char *to) {
    state_faults *f = (state_faults *)user;
    return f->fail_rename ? -EACCES : f->posix.file_rename(NULL, from, to);
}
static amp_system f_system(state_faults *f) {
    amp_system s;
    memset(f, 0, sizeof *f);
    memset(&s, 0, sizeof s);
    amp_system_default(&f->posix);
    s.user = f;
    s.alloc = state_f_alloc; s.free = state_f_free;
    s.file_open = state_f_open; s.file_write = f_write; s.file_sync = f_sync; s.file_rename = f_rename;
    return s;
}

static uint32_t random_next(uint32_t *seed) { *seed = *seed * 1664525u + 1013904223u; return *seed >> 8; }

/* The format that the small state takes: its longest key has the most bytes of that format. */
static int small_format = 1;
static size_t small_key(void) { return small_format == 1 ? 63 : 255; }

/* A small state with all dtypes, an empty record and a key of the greatest length. */
static amp_result fill(amp_state *state) {
    uint8_t values[72];
    char key[256];
    size_t i;
    for (i = 0; i < sizeof values; i++) values[i] = (uint8_t)(i * 37 + 11);
    for (i = 0; i < 8; i++) {
        amp_result r = amp_state_put(state, amp_dtype_name(dtypes[i]), dtypes[i], values, (int64_t)i + 1);
        if (r != AMP_OK) return r;
    }
    memset(key, 'k', small_key());
    key[small_key()] = 0;
    { amp_result r = amp_state_put(state, key, AMP_U8, values, 3); if (r != AMP_OK) return r; }
    return amp_state_put(state, "empty", AMP_F32, NULL, 0);
}

static amp_state *made(void) {
    amp_state *state = NULL;
    CHECK_OK(amp_state_create(&state, NULL));
    CHECK_OK(fill(state));
    return state;
}

static void round_trip_of_format(void) {
    amp_state *state = made(), *copy = NULL;
    void *data, *again;
    size_t bytes, bytes_again, i;
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    CHECK_OK(amp_state_decode(&copy, NULL, data, bytes));
    for (i = 0; i < 8; i++) {
        uint8_t a[72], b[72];
        amp_dtype dtype = AMP_DTYPE_DEFAULT;
        int64_t n = (int64_t)i + 1;
        size_t size = (size_t)n * amp_dtype_size(dtypes[i]);
        CHECK_EQ(amp_state_count(copy, amp_dtype_name(dtypes[i]), &dtype), n);
        CHECK_EQ(dtype, dtypes[i]);
        CHECK_OK(amp_state_get(state, amp_dtype_name(dtypes[i]), dtypes[i], a, n));
        CHECK_OK(amp_state_get(copy, amp_dtype_name(dtypes[i]), dtypes[i], b, n));
        CHECK(memcmp(a, b, size) == 0 && a[0] == 11 && a[size - 1] == (uint8_t)((size - 1) * 37 + 11));
        CHECK(strcmp(amp_state_key(copy, (int64_t)i), amp_dtype_name(dtypes[i])) == 0);
    }
    CHECK_EQ(((const uint8_t *)data)[8], small_format);
    CHECK_EQ(strlen(amp_state_key(copy, 8)), small_key());
    CHECK_EQ(amp_state_count(copy, amp_state_key(state, 8), NULL), 3);
    CHECK_EQ(amp_state_count(copy, "empty", NULL), 0);
    CHECK_OK(amp_state_get(copy, "empty", AMP_F32, NULL, 0));
    CHECK(amp_state_key(copy, 10) == NULL && amp_state_key(copy, -1) == NULL && amp_state_key(copy, 9) != NULL);
    CHECK_OK(amp_state_encode(copy, &again, &bytes_again));
    CHECK(bytes == bytes_again && memcmp(data, again, bytes) == 0);
    amp_file_free(NULL, data, bytes);
    amp_file_free(NULL, again, bytes_again);
    amp_state_destroy(state);
    amp_state_destroy(copy);
    amp_state_destroy(NULL);
}

TEST(replace) {
    amp_state *state = made();
    int64_t wide[5] = {1, 2, 3, 4, 5}, back[5] = {0, 0, 0, 0, 0};
    CHECK_OK(amp_state_put(state, "u8", AMP_I64, wide, 5));
    CHECK_EQ(amp_state_count(state, "u8", NULL), 5);
    CHECK_OK(amp_state_get(state, "u8", AMP_I64, back, 5));
    CHECK(memcmp(wide, back, sizeof wide) == 0);
    CHECK(amp_state_key(state, 10) == NULL && strcmp(amp_state_key(state, 4), "u8") == 0);
    CHECK_OK(amp_state_put(state, "u8", AMP_I64, NULL, 0));
    CHECK_EQ(amp_state_count(state, "u8", NULL), 0);
    amp_state_destroy(state);
}

TEST(many_records) {
    enum { N = 20000 };
    amp_state *state = NULL, *copy = NULL;
    char key[32];
    int32_t i, value;
    void *data;
    size_t bytes;
    CHECK_OK(amp_state_create(&state, NULL));
    for (i = 0; i < N; i++) {
        snprintf(key, sizeof key, "blocks.%d.weight", (int)i);
        CHECK_OK(amp_state_put(state, key, AMP_I32, &i, 1));
    }
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    CHECK_OK(amp_state_decode(&copy, NULL, data, bytes));
    for (i = 0; i < N; i++) {
        snprintf(key, sizeof key, "blocks.%d.weight", (int)i);
        value = -1;
        CHECK_OK(amp_state_get(copy, key, AMP_I32, &value, 1));
        CHECK_EQ(value, i);
    }
    amp_file_free(NULL, data, bytes);
    amp_state_destroy(state);
    amp_state_destroy(copy);
}

TEST(refusals) {
    amp_state *state = made();
    char key[257];
    float value = 0, kept = 3;
    memset(key, 'x', 256);
    key[256] = 0;
    CHECK_ERR(amp_state_create(NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_state_put(NULL, "a", AMP_F32, &value, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_state_put(state, NULL, AMP_F32, &value, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_state_put(state, "a", AMP_F32, NULL, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_state_put(state, "", AMP_F32, &value, 1), AMP_ERR_RANGE);
    CHECK_ERR(amp_state_put(state, key, AMP_F32, &value, 1), AMP_ERR_RANGE);
    CHECK_ERR(amp_state_put(state, "a", AMP_F32, &value, -1), AMP_ERR_RANGE);
    CHECK_ERR(amp_state_put(state, "a", AMP_TF32, &value, 1), AMP_ERR_DTYPE);
    CHECK_ERR(amp_state_put(state, "a", AMP_E4M3, &value, 1), AMP_ERR_DTYPE);
    CHECK_ERR(amp_state_put(state, "a", AMP_DTYPE_DEFAULT, &value, 1), AMP_ERR_DTYPE);
    CHECK_ERR(amp_state_put(state, "a", AMP_F64, &value, INT64_MAX / 2), AMP_ERR_SIZE);
    CHECK_EQ(amp_state_count(state, "a", NULL), -1);
    CHECK_ERR(amp_state_get(state, "a", AMP_F32, &kept, 1), AMP_ERR_NAME);
    CHECK_ERR(amp_state_get(state, "fp32", AMP_F32, &kept, 2), AMP_ERR_MISMATCH);
    CHECK_ERR(amp_state_get(state, "fp32", AMP_I32, &kept, 1), AMP_ERR_MISMATCH);
    CHECK(strstr(amp_last_error(), "fp32") != NULL);
    CHECK(kept == 3);
    CHECK_ERR(amp_state_get(NULL, "fp32", AMP_F32, &kept, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_state_get(state, "fp32", AMP_F32, NULL, 1), AMP_ERR_NULL);
    CHECK_ERR(amp_state_encode(state, NULL, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_state_decode(NULL, NULL, key, 3), AMP_ERR_NULL);
    CHECK_ERR(amp_state_decode(&state, NULL, NULL, 3), AMP_ERR_NULL);
    CHECK_ERR(amp_state_save(state, NULL), AMP_ERR_NULL);
    CHECK_ERR(amp_state_load(&state, NULL, NULL), AMP_ERR_NULL);
    amp_state_destroy(state);
}

/* Decodes bytes that must be refused; gives the result. */
static amp_result refused(const uint8_t *data, size_t bytes) {
    amp_state *out = (amp_state *)(uintptr_t)8;
    uint8_t *exact = (uint8_t *)malloc(bytes ? bytes : 1);      /* so that a sanitizer sees a read beyond the end */
    amp_result result;
    memcpy(exact, data, bytes);
    result = amp_state_decode(&out, NULL, exact, bytes);
    CHECK(result != AMP_OK && out == (amp_state *)(uintptr_t)8);
    free(exact);
    return result;
}

static void every_flipped_bit_of_format(void) {
    amp_state *state = made();
    void *data;
    uint8_t *blob;
    size_t bytes, i;
    int bit;
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    blob = (uint8_t *)data;
    for (i = 0; i < bytes; i++)
        for (bit = 0; bit < 8; bit++) {
            amp_result result;
            blob[i] = (uint8_t)(blob[i] ^ 1 << bit);
            result = refused(blob, bytes);
            CHECK_EQ(result, i < 8                                                      ? AMP_ERR_FORMAT
                             : i >= 8 && i < 12 && !(i == 8 && bit == small_format - 1) ? AMP_ERR_NEWER
                                                                                        : AMP_ERR_CHECKSUM);
            blob[i] = (uint8_t)(blob[i] ^ 1 << bit);
        }
    amp_file_free(NULL, data, bytes);
    amp_state_destroy(state);
}

static void every_truncation_of_format(void) {
    amp_state *state = made();
    void *data;
    uint8_t *longer;
    size_t bytes, n;
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    for (n = 0; n < bytes; n++) CHECK_EQ(refused((const uint8_t *)data, n), AMP_ERR_TRUNCATED);
    longer = (uint8_t *)calloc(bytes + 8, 1);
    memcpy(longer, data, bytes);
    for (n = 1; n <= 8; n++) CHECK_EQ(refused(longer, bytes + n), AMP_ERR_CHECKSUM);
    free(longer);
    amp_file_free(NULL, data, bytes);
    amp_state_destroy(state);
}

/* Garbage behind a right magic, and headers and directories with right checksums but hostile numbers. */
static void garbage_of_format(void) {
    amp_state *state = made();
    ampi_crc crc;
    uint8_t junk[256], *blob, *copy;
    void *data;
    size_t bytes, entry = ampi_state_entry_bytes(small_format), directory = 10 * entry, i;
    uint32_t seed = 1;
    int round;
    ampi_crc_init(&crc, 1);
    for (round = 0; round < 10000; round++) {
        size_t n = random_next(&seed) % sizeof junk;
        for (i = 0; i < n; i++) junk[i] = (uint8_t)random_next(&seed);
        if (round % 2 && n >= 12) { memcpy(junk, "AMPSTATE\1\0\0\0", 12); junk[8] = (uint8_t)small_format; }
        if (round % 4 == 3 && n >= 40) ampi_store_le32(junk + 36, ampi_crc_add(&crc, 0, junk, 36));
        refused(junk, n);
    }
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    blob = (uint8_t *)data;
    copy = (uint8_t *)malloc(bytes);
    for (round = 0; round < 10000; round++) {
        amp_state *out = NULL;
        memcpy(copy, blob, bytes);
        if (round % 2)
            ampi_store_le64(copy + 16 + 8 * (round / 2 % 2),
                            round % 8 < 4 ? UINT64_C(0xffffffffffffffff) >> round % 63 : random_next(&seed));
        else
            ampi_store_le64(copy + 40 + random_next(&seed) % 10 * entry + entry - 8,
                            UINT64_C(0xffffffffffffffff) >> random_next(&seed) % 64);
        if (round % 3 == 0) copy[40 + random_next(&seed) % directory] = (uint8_t)random_next(&seed);
        ampi_store_le32(copy + 32, ampi_crc_add(&crc, 0, copy + 40, directory));
        ampi_store_le32(copy + 36, ampi_crc_add(&crc, 0, copy, 36));
        if (amp_state_decode(&out, NULL, copy, bytes) == AMP_OK) amp_state_destroy(out); /* a key may change, no harm */
    }
    free(copy);
    amp_file_free(NULL, data, bytes);
    amp_state_destroy(state);
}

/* Blobs whose checksums are right but that no writer makes. */
static void impossible_blobs_of_format(void) {
    static const char *const what[] = {"twice", "impossible", "impossible", "impossible",
                                       "impossible", "impossible", "impossible", "no record", "impossible"};
    amp_state *state = made();
    ampi_crc crc;
    uint8_t *copy;
    void *data;
    size_t bytes, key = ampi_state_key_bytes(small_format), directory = 10 * (key + 16);
    int kind;
    ampi_crc_init(&crc, 1);
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    copy = (uint8_t *)calloc(bytes + 1, 1);
    ((uint8_t *)data)[8] = 3;                                       /* the next format */
    CHECK_EQ(refused(data, bytes), AMP_ERR_NEWER);
    ((uint8_t *)data)[8] = (uint8_t)small_format;
    for (kind = 0; kind < 9; kind++) {
        uint8_t *entry = copy + 40 + key + 16;
        memcpy(copy, data, bytes);
        if (kind == 0) memcpy(entry, copy + 40, key);               /* a key that is there */
        if (kind == 1) entry[key - 1] = 1;                          /* something behind the end of the key */
        if (kind == 2) memset(entry, 'x', key);                     /* a key without end */
        if (kind == 3) memset(entry, 0, key);                       /* no key */
        if (kind == 4) ampi_store_le32(entry + key, AMP_TF32);
        if (kind == 5) ampi_store_le32(entry + key, 0xffffffffu);
        if (kind == 6) ampi_store_le64(entry + key + 8, UINT64_C(1) << 61); /* times 8 that is 0 */
        if (kind == 7) ampi_store_le64(copy + 16, bytes + 1);
        if (kind == 8) { ampi_store_le32(entry + key, AMP_F64); ampi_store_le64(entry + key + 8, (bytes - 40 - directory) / 2); }
        ampi_store_le32(copy + 32, ampi_crc_add(&crc, 0, copy + 40, directory));
        ampi_store_le32(copy + 36, ampi_crc_add(&crc, 0, copy, 36));
        CHECK_EQ(refused(copy, bytes + (kind == 7)), AMP_ERR_CHECKSUM);
        CHECK_MSG(strstr(amp_last_error(), what[kind]) != NULL, "%d: %s", kind, amp_last_error());
    }
    free(copy);
    amp_file_free(NULL, data, bytes);
    amp_state_destroy(state);
}

/* Both formats.  0.2 reads the first and refuses the second, from its version, as newer. */
static void in_both_formats(void (*test)(void)) {
    for (small_format = 1; small_format <= 2; small_format++) test();
    small_format = 1;
}
TEST(round_trip) { in_both_formats(round_trip_of_format); }
TEST(every_flipped_bit) { in_both_formats(every_flipped_bit_of_format); }
TEST(every_truncation) { in_both_formats(every_truncation_of_format); }
TEST(garbage) { in_both_formats(garbage_of_format); }
TEST(impossible_blobs) { in_both_formats(impossible_blobs_of_format); }

/* The checksum's two ways agree with each other and with the CRC catalogue. */
TEST(checksum) {
    ampi_crc fast, slow;
    uint8_t data[300];
    size_t i, j;
    ampi_crc_init(&fast, 1);
    ampi_crc_init(&slow, 0);
    CHECK_EQ(ampi_crc_add(&slow, 0, (const uint8_t *)"123456789", 9), 0xE3069283u);
    for (i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * i + 3);
    for (i = 0; i < sizeof data; i++)
        for (j = 0; j < 9; j++) {
            uint32_t whole = ampi_crc_add(&slow, 0, data + j % (i + 1), i - j % (i + 1));
            CHECK_EQ(ampi_crc_add(&fast, 0, data + j % (i + 1), i - j % (i + 1)), whole);
        }
    CHECK_EQ(ampi_crc_add(&slow, ampi_crc_add(&slow, 0, data, 13), data + 13, 100), ampi_crc_add(&slow, 0, data, 113));
}

TEST(version_1_is_read) {
    amp_state *state = NULL;
    float f[3];
    double d[2];
    uint16_t h[3], b[3], u[3];
    uint8_t bytes[256];
    int32_t i32[3];
    int64_t i64[3];
    uint32_t bits;
    int i;
    CHECK_OK(amp_state_load(&state, NULL, AMPT_GOLDEN "/state_v1.blob"));
    if (state == NULL) return;
    CHECK_OK(amp_state_get(state, "scaler.scale", AMP_F32, f, 3));
    memcpy(&bits, f + 1, 4);
    CHECK(f[0] == 65536.0f && bits == 0x80000000u);
    memcpy(&bits, f + 2, 4);
    CHECK_EQ(bits, 1);
    CHECK_OK(amp_state_get(state, "f64", AMP_F64, d, 2));
    CHECK(d[0] == 1.0 / 3.0 && d[1] == -1e300);
    CHECK_OK(amp_state_get(state, "f16", AMP_F16, h, 3));
    CHECK(h[0] == 0x3800 && h[1] == 0x7bff && h[2] == 0xc000);
    CHECK_OK(amp_state_get(state, "bf16", AMP_BF16, b, 3));
    CHECK(b[0] == 0x3f80 && b[1] == 0x7f80 && b[2] == 0xffc1);
    CHECK_OK(amp_state_get(state, "u8", AMP_U8, bytes, 256));
    for (i = 0; i < 256; i++) CHECK_EQ(bytes[i], i);
    CHECK_OK(amp_state_get(state, "u16", AMP_U16, u, 3));
    CHECK(u[0] == 0 && u[1] == 1 && u[2] == 65535);
    CHECK_OK(amp_state_get(state, "i32", AMP_I32, i32, 3));
    CHECK(i32[0] == INT32_MIN && i32[1] == INT32_MAX && i32[2] == -1);
    CHECK_OK(amp_state_get(state, "i64", AMP_I64, i64, 3));
    CHECK(i64[0] == INT64_MIN && i64[1] == INT64_MAX && i64[2] == INT64_C(0x0102030405060708));
    CHECK_EQ(amp_state_count(state, "empty", NULL), 0);
    CHECK(amp_state_key(state, 9) != NULL && strlen(amp_state_key(state, 9)) == 63 && amp_state_key(state, 10) == NULL);
    amp_state_destroy(state);
}

/* What is written today is what the version 1 oracle writes, but for the writer's version. */
TEST(version_1_is_written) {
    amp_state *state = NULL;
    void *data = NULL, *old = NULL;
    size_t bytes = 0, old_bytes = 0;
    CHECK_OK(amp_file_read_all(NULL, AMPT_GOLDEN "/state_v1.blob", &old, &old_bytes));
    CHECK_OK(amp_state_load(&state, NULL, AMPT_GOLDEN "/state_v1.blob"));
    if (state == NULL || old == NULL) return;
    CHECK_OK(amp_state_encode(state, &data, &bytes));
    CHECK(bytes == old_bytes && memcmp(data, old, 12) == 0 && memcmp((char *)data + 16, (char *)old + 16, 20) == 0
          && memcmp((char *)data + 40, (char *)old + 40, bytes - 40) == 0);
    amp_file_free(NULL, data, bytes);
    amp_file_free(NULL, old, old_bytes);
    amp_state_destroy(state);
}

/* create, fill (20 records more, so that tables grow), replace, save, load, with the n-th allocation failing. */
static amp_result whole_life(const amp_system *system, const char *path) {
    amp_state *state = NULL, *copy = NULL;
    amp_result result = amp_state_create(&state, system);
    char key[24];
    int32_t i;
    if (result == AMP_OK) result = fill(state);
    for (i = 0; i < 20 && result == AMP_OK; i++) {
        snprintf(key, sizeof key, "more.%d", (int)i);
        result = amp_state_put(state, key, AMP_I32, &i, 1);
    }
    if (result == AMP_OK) {
        int64_t old[8];
        result = amp_state_put(state, "i64", AMP_U8, key, 2);
        if (result != AMP_OK) CHECK_OK(amp_state_get(state, "i64", AMP_I64, old, 8));   /* the old one is still there */
    }
    if (result == AMP_OK) result = amp_state_save(state, path);
    if (result == AMP_OK) result = amp_state_load(&copy, system, path);
    if (result == AMP_OK) CHECK_EQ(amp_state_count(copy, "more.19", NULL), 1);
    amp_state_destroy(state);
    amp_state_destroy(copy);
    return result;
}

TEST(state_failing_memory) {
    state_faults f;
    amp_system system = f_system(&f);
    char path[64];
    int64_t n;
    snprintf(path, sizeof path, "/tmp/ampt_state_%ld", (long)getpid());
    for (n = 1; n < 1000; n++) {
        amp_result result;
        f.calls = 0;
        f.fail_alloc = n;
        result = whole_life(&system, path);
        CHECK_EQ(f.live, 0);
        if (result == AMP_OK) break;
        CHECK_EQ(result, AMP_ERR_MEMORY);
        CHECK(strncmp(amp_last_error(), "AMP0301", 7) == 0);
    }
    CHECK(n > 30 && n < 1000);
    remove(path);
}

/* Whatever fails while saving, the old file stays whole and nothing is left beside it. */
TEST(failing_files) {
    state_faults f;
    amp_system system = f_system(&f);
    amp_state *state = NULL, *back = NULL;
    char path[64], temporary[96];
    glob_t found;
    int32_t one = 1, two = 2, value = 0;
    int kind;
    snprintf(path, sizeof path, "/tmp/ampt_state_%ld", (long)getpid());
    snprintf(temporary, sizeof temporary, "%s.tmp*", path);
    CHECK_OK(amp_state_create(&state, &system));
    CHECK_OK(amp_state_put(state, "x", AMP_I32, &one, 1));
    CHECK_OK(amp_state_save(state, path));
    CHECK_OK(amp_state_put(state, "x", AMP_I32, &two, 1));
    for (kind = 0; kind < 4; kind++) {
        f.fail_open = kind == 0; f.fail_write = kind == 1; f.fail_sync = kind == 2; f.fail_rename = kind == 3;
        CHECK_ERR(amp_state_save(state, path), kind == 0 ? AMP_ERR_OPEN : AMP_ERR_WRITE);
        CHECK(strstr(amp_last_error(), path) != NULL);
        f.fail_open = f.fail_write = f.fail_sync = f.fail_rename = 0;
        CHECK_OK(amp_state_load(&back, &system, path));
        CHECK_OK(amp_state_get(back, "x", AMP_I32, &value, 1));
        CHECK_EQ(value, 1);
        amp_state_destroy(back);
        CHECK(glob(temporary, 0, NULL, &found) == GLOB_NOMATCH);
        globfree(&found);
    }
    f.short_writes = 1;                 /* and interruptions */
    CHECK_OK(amp_state_save(state, path));
    CHECK_OK(amp_state_load(&back, &system, path));
    CHECK_OK(amp_state_get(back, "x", AMP_I32, &value, 1));
    CHECK_EQ(value, 2);
    amp_state_destroy(back);
    amp_state_destroy(state);
    CHECK_EQ(f.live, 0);
    remove(path);
    CHECK_ERR(amp_state_load(&back, NULL, path), AMP_ERR_OPEN);
    CHECK_OK(amp_file_write_atomic(NULL, path, "{\"not\": \"a state\"}", 18));
    CHECK_ERR(amp_state_load(&back, NULL, path), AMP_ERR_FORMAT);
    CHECK(strstr(amp_last_error(), path) != NULL);
    remove(path);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(round_trip);
    RUN(replace);
    RUN(many_records);
    RUN(refusals);
    RUN(every_flipped_bit);
    RUN(every_truncation);
    RUN(garbage);
    RUN(impossible_blobs);
    RUN(checksum);
    RUN(version_1_is_read);
    RUN(version_1_is_written);
    RUN(state_failing_memory);
    RUN(failing_files);
    return TEST_END();
}
