/* t_common.c - tests the TensorBoard event files of examples/tensorboard.h, and invalid files and calls of
 * examples/safetensors.h. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "../examples/tensorboard.h"
#include "test.h"

static void to_hex(const unsigned char *data, size_t n, char *hex) {
    size_t i;
    for (i = 0; i < n; i++) snprintf(hex + 2 * i, 3, "%02x", data[i]);
}

static void check_record(double seconds, int64_t step, const char *tag, float value, const char *expected) {
    unsigned char record[BOARD_RECORD];
    char hex[2 * BOARD_RECORD + 1] = "";
    size_t n = board_record(record, seconds, step, tag, value);
    CHECK(n <= sizeof record);
    to_hex(record, n, hex);
    CHECK_MSG(strcmp(hex, expected) == 0, "%s, expected %s", hex, expected);
}

/* The check value of the catalogue of CRCs (CRC-32/ISCSI), and RFC 3720 B.4's of 32 zeros. */
TEST(checksum) {
    const unsigned char zeros[32] = {0};
    CHECK_EQ(st_crc32c((const unsigned char *)"123456789", 9), 0xe3069283u);
    CHECK_EQ(st_crc32c(zeros, 32), 0x8a9136aau);
    CHECK_EQ(st_crc32c(zeros, 0), 0);
}

/* Bytes of TensorBoard 2.21's own writer for the same events. */
TEST(records) {
    char tag[200];
    unsigned char record[BOARD_RECORD];
    check_record(1700000000.25, 0, NULL, 0, "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9");
    check_record(1700000001.5, 300, "loss", 2.75f,
                 "1b000000000000001a0d9e130900006040fc54d94110ac022a0d0a0b0a046c6f73731500003040b6e842aa");
    memset(tag, 'x', sizeof tag - 1);
    tag[sizeof tag - 1] = 0;
    CHECK(board_record(record, 1, INT64_MAX, tag, 1) <= BOARD_RECORD);      /* a long tag is cut */
    CHECK(board_record(record, 1, -1, tag, 1) <= BOARD_RECORD);
}

TEST(files) {
    char folder[64], command[128];
    unsigned char data[512], expected[BOARD_RECORD];
    size_t n, head;
    FILE *file;
    board b;
    snprintf(folder, sizeof folder, "/tmp/t_common_%ld/board", (long)getpid());
    CHECK_OK(board_open(&b, folder));
    CHECK(strstr(b.path, "/events.out.tfevents.1") != NULL);
    board_scalar(&b, 7, "loss", 1.5);
    board_close(&b);
    board_scalar(&b, 8, "loss", 1.5);                   /* closed: nothing happens */
    file = fopen(b.path, "rb");
    CHECK(file != NULL);
    n = file ? fread(data, 1, sizeof data, file) : 0;
    if (file) fclose(file);
    head = board_record(expected, 0, 0, NULL, 0);
    CHECK_EQ(n, head + board_record(expected, 0, 7, "loss", 1.5f));
    CHECK(memcmp(data + head + 12 + 9, expected + 12 + 9, n - head - 12 - 9 - 4) == 0);     /* all behind the time */
    snprintf(command, sizeof command, "rm -r /tmp/t_common_%ld", (long)getpid());
    CHECK_EQ(system(command), 0);
    CHECK_ERR(board_open(&b, "/dev/null/board"), AMP_ERR_OPEN);
    CHECK_MSG(strstr(ex_error(), "/dev/null") != NULL, "%s", ex_error());
    CHECK(b.file == NULL);
}

/* A disk that is full ends the file, not the program. */
TEST(full_disk) {
    board b;
    memset(&b, 0, sizeof b);
    snprintf(b.path, sizeof b.path, "/dev/full");
    b.file = fopen(b.path, "ab");
    if (b.file == NULL) SKIP("no /dev/full");
    CHECK(freopen("/dev/null", "w", stderr) != NULL);
    board_scalar(&b, 1, "loss", 2);
    CHECK(b.file == NULL);
    board_scalar(&b, 2, "loss", 2);
    board_close(&b);
}

/* ---- safetensors.h */

#define ST_F32(shape, begin, end) "{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

/* A file of this header and `bytes` bytes of data. */
static int open_header(st_file *file, const char *header, size_t bytes) {
    static unsigned char whole[1024];
    size_t n = strlen(header);
    CHECK(8 + n + bytes <= sizeof whole);
    memset(whole, 0, sizeof whole);
    whole[0] = (unsigned char)n;
    whole[1] = (unsigned char)(n >> 8);
    memcpy(whole + 8, header, n);
    return st_open(file, whole, 8 + n + bytes);
}

/* What Python's safetensors accepts and refuses. */
TEST(headers) {
    static const struct { const char *header; int bytes; const char *why; } cases[] = {
        {"{}", 0, NULL},
        {"{}   ", 0, NULL},
        {"{\"w\":" ST_F32("[]", 0, 4) "}", 4, NULL},                                        /* a scalar */
        {"{\"w\":" ST_F32("[5,0]", 0, 0) "}", 0, NULL},
        {"{\"a\":" ST_F32("[1]", 0, 4) ",\"z\":" ST_F32("[7,0]", 4, 4) ",\"b\":" ST_F32("[1]", 4, 8) "}", 8, NULL},
        {"{\"b\":" ST_F32("[1]", 4, 8) ",\"a\":" ST_F32("[1]", 0, 4) "}", 8, NULL},
        {"{\"__metadata__\":null,\"w\":" ST_F32("[1]", 0, 4) "}", 4, NULL},
        {"{\"w\":" ST_F32("[1]", 0, 4) ",\"__metadata__\":{\"format\":\"pt\"}}", 4, NULL},
        {"{\"w\":{\"dtype\":\"F4\",\"shape\":[6],\"data_offsets\":[0,3]}}", 3, NULL},
        {"{\"w\":{\"dtype\":\"F4\",\"shape\":[5],\"data_offsets\":[0,3]}}", 3, "w: bytes 0 to 3"},
        {"{\"w\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "w: unknown dtype f32"},
        {"{}", 4, "the data after the header 4"},
        {"{\"w\":" ST_F32("[1]", 0, 4) "}", 8, "the data after the header 8"},
        {"{\"a\":" ST_F32("[1]", 0, 4) ",\"b\":" ST_F32("[1]", 8, 12) "}", 12, "b: it begins at byte 8"},
        {"{\"b\":" ST_F32("[1]", 8, 12) "}", 12, "b: it begins at byte 8"},
        {"{\"a\":" ST_F32("[2]", 0, 8) ",\"b\":" ST_F32("[1]", 4, 8) "}", 8, "b: it begins at byte 4"},
        {"{\"a\":" ST_F32("[1]", 0, 4) ",\"a\":" ST_F32("[1]", 4, 8) "}", 8, "a: is in the file twice"},
        {"{\"w\":" ST_F32("[9223372036854775807,9]", 0, 4) "}", 4, "w: not a safetensors entry"},
        {"{\"w\":" ST_F32("[99999999999999999,99999999999999999]", 0, 4) "}", 4, "w: the shape does not fit"},
        {"{\"w\":" ST_F32("[1,1,1,1,1,1,1,1,1]", 0, 4) "}", 4, "w: it has 9 dimensions"},
        {"{\"w\":" ST_F32("[01]", 0, 4) "}", 4, "w: not a safetensors entry"},
        {"{\"w\":" ST_F32("[1,]", 0, 4) "}", 4, "w: not a safetensors entry"},
        {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"shape\":[3],\"data_offsets\":[0,24]}}", 24, "w: not a safetensors entry"},
        {"{\"w\":" ST_F32("[1]", 0, 4) ",}", 4, "not valid JSON"},
        {"{}x", 0, "not valid JSON"},
        {"{\"w\\u0000x\":" ST_F32("[1]", 0, 4) "}", 4, "w...: the name has more"},
        {"{\"\xfc\":" ST_F32("[1]", 0, 4) "}", 4, "not UTF-8"},
        {"{\"__metadata__\":{\"step\":3},\"w\":" ST_F32("[1]", 0, 4) "}", 4, "the value of step is no text"},
        {"{\"__metadata__\":5,\"w\":" ST_F32("[1]", 0, 4) "}", 4, "__metadata__ is not an object"},
        {"{\"__metadata__\":{\"a\":\"b\"},\"__metadata__\":{},\"w\":" ST_F32("[1]", 0, 4) "}", 4, "__metadata__ is in the file twice"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        st_file file;
        st_text[0] = 0;
        int result = open_header(&file, cases[i].header, (size_t)cases[i].bytes);
        CHECK_MSG((result == ST_OK) == (cases[i].why == NULL), "%s: %s", cases[i].header, result == ST_OK ? "accepted" : st_error());
        if (cases[i].why != NULL) CHECK_MSG(strstr(st_error(), cases[i].why) != NULL, "%s, expected %s", st_error(), cases[i].why);
        st_close(&file);
        st_close(&file);
    }
}

/* A number that cannot be, a pointer that was forgotten, a tensor that is not there. */
TEST(reading_wrongly) {
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\n";
    char *text = NULL;
    size_t bytes = 1;
    float values[1];
    st_file file;
    CHECK_EQ(st_open(&file, NULL, 100), ST_ERR_NULL);
    CHECK_EQ(st_open(&file, pointer, (size_t)-1), ST_ERR_SIZE);
    CHECK(st_open(&file, pointer, sizeof pointer) == ST_ERR_FORMAT && strstr(st_error(), "Git LFS") != NULL);
    CHECK(st_open(&file, "", 0) == ST_ERR_TRUNCATED && file.n == 0);
    CHECK(st_find(&file, "w") == NULL && strstr(st_error(), "w: no tensor") != NULL);
    CHECK_EQ(st_floats(st_find(&file, "w"), values), ST_ERR_NULL);
    CHECK_EQ(st_read_file(NULL, &text, &bytes), ST_ERR_NULL);
    CHECK(text == NULL && bytes == 0);
    CHECK_EQ(st_read_file("/", &text, &bytes), ST_ERR_READ);
    CHECK_EQ(st_read_file("/dev/null", &text, &bytes), ST_OK);
    CHECK(text != NULL && bytes == 0 && *text == 0);
    free(text);
}

/* Many tensors are read in no time, each is found, and nothing else. */
TEST(many_tensors) {
    enum { MANY = 20000 };
    const int64_t shape[1] = {1};
    const float value = 3;
    char name[32];
    st_writer w;
    st_file file;
    memset(&w, 0, sizeof w);
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "%d.w", i * 7919 % MANY);
        CHECK_EQ(st_write_tensor(&w, name, 1, shape), ST_OK);
    }
    CHECK_EQ(st_write_begin(&w), ST_OK);
    for (int i = 0; i < MANY; i++) CHECK_EQ(st_write_floats(&w, &value, 1), ST_OK);
    CHECK_EQ(st_write_end(&w), ST_OK);
    CHECK_EQ(st_open(&file, w.file, w.bytes), ST_OK);
    CHECK_EQ(file.n, MANY);
    for (int i = 0; i < MANY; i++) {
        const st_tensor *t;
        snprintf(name, sizeof name, "%d.w", i);
        t = st_find(&file, name);
        CHECK(t != NULL && strcmp(t->name, name) == 0);
    }
    CHECK(st_find(&file, "20000.w") == NULL && st_find(&file, "") == NULL && st_find(&file, "~") == NULL);
    st_close(&file);
    st_write_close(&w);
}

enum wrong_call {
    WRONG_NONE, WRONG_TEXT_LATE, WRONG_TEXT_TWICE, WRONG_TEXT_NULL, WRONG_NAME_NULL, WRONG_NAME_TWICE, WRONG_NAME_LONG,
    WRONG_NAME_LATIN, WRONG_NAME_META, WRONG_DIMS, WRONG_NEGATIVE, WRONG_PRODUCT, WRONG_SHAPE_NULL, WRONG_FLOATS_EARLY,
    WRONG_BEGIN_TWICE, WRONG_TENSOR_LATE, WRONG_MORE, WRONG_LESS, WRONG_MINUS, WRONG_VALUES_NULL, WRONG_END_EARLY, WRONG_CALLS
};

/* A file of one tensor of 6 elements written with one wrong call, whose result nobody looks at; returns st_write_end's. */
static int write_wrongly(st_writer *w, enum wrong_call wrong) {
    const int64_t shape[2] = {2, 3}, minus[2] = {-2, -3}, huge[2] = {INT64_MAX / 2, 3};
    const float values[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    char longer[200];
    memset(w, 0, sizeof *w);
    memset(longer, 'n', sizeof longer);
    longer[sizeof longer - 1] = 0;
    st_write_text(w, "format", wrong == WRONG_TEXT_NULL ? NULL : "pt");
    if (wrong == WRONG_TEXT_TWICE) st_write_text(w, "format", "np");
    if (wrong == WRONG_FLOATS_EARLY) st_write_floats(w, values, 6);
    if (wrong == WRONG_END_EARLY) return st_write_end(w);
    st_write_tensor(w, wrong == WRONG_NAME_NULL ? NULL : wrong == WRONG_NAME_LONG ? longer : wrong == WRONG_NAME_LATIN ? "gr\xf6\xdf" "e" :
                    wrong == WRONG_NAME_META ? "__metadata__" : "w", wrong == WRONG_DIMS ? 9 : 2,
                    wrong == WRONG_SHAPE_NULL ? NULL : wrong == WRONG_NEGATIVE ? minus : wrong == WRONG_PRODUCT ? huge : shape);
    if (wrong == WRONG_NAME_TWICE) st_write_tensor(w, "w", 0, NULL);
    if (wrong == WRONG_TEXT_LATE) st_write_text(w, "late", "x");
    st_write_begin(w);
    if (wrong == WRONG_BEGIN_TWICE) st_write_begin(w);
    if (wrong == WRONG_TENSOR_LATE) st_write_tensor(w, "late", 0, NULL);
    st_write_floats(w, wrong == WRONG_VALUES_NULL ? NULL : values, wrong == WRONG_LESS ? 5 : 6);
    if (wrong == WRONG_MORE) st_write_floats(w, values, 1);
    if (wrong == WRONG_MINUS) st_write_floats(w, values, -1);
    return st_write_end(w);
}

/* No wrong call gives a file that is called complete; the first one is named, whatever comes after it. */
TEST(writing_wrongly) {
    static const char *const named[WRONG_CALLS] = {
        "", "late comes after a tensor", "format is named twice", "key or value is NULL", "name or shape is NULL", "w: is in the file twice",
        "nnn...: the name has more", "is not UTF-8", "__metadata__ is in the file twice", "more than 8 dimensions", "a negative one", "too many elements",
        "name or shape is NULL", "before st_write_begin", "called twice", "late comes after st_write_begin", "1 elements, but the named tensors lack 0",
        "20 bytes of tensors were written, and 24 named", "-1 elements", "values is NULL", "before st_write_begin",
    };
    for (int wrong = WRONG_NONE; wrong < WRONG_CALLS; wrong++) {
        st_writer w;
        st_file file;
        int result = write_wrongly(&w, (enum wrong_call)wrong);
        CHECK_MSG((result == ST_OK) == (wrong == WRONG_NONE) && (result == ST_OK || strstr(st_error(), named[wrong]) != NULL),
                  "%s, expected %s", result == ST_OK ? "accepted" : st_error(), named[wrong]);
        if (result == ST_OK) {
            CHECK_EQ(st_open(&file, w.file, w.bytes), ST_OK);
            st_close(&file);
        }
        st_write_close(&w);
        st_write_close(&w);
    }
}

/* Names and texts with everything that JSON escapes come back; so does a file, and a full disk is an error. */
TEST(files_of_tensors) {
    static const char *const names[] = {"", "a\"b\\c", "tab\tline\n\x01", "gr\xc3\xb6\xc3\x9f" "e", "\xf0\x9f\x98\x80", "\xef\xbf\xbd", "\x7f"};
    enum { NAMES = sizeof names / sizeof *names };
    char path[64], text[64], *bytes = NULL, *again = NULL;
    size_t size = 0, size_again = 0;
    st_writer w;
    st_file file;
    snprintf(path, sizeof path, "/tmp/t_common_%ld", (long)getpid());
    memset(&w, 0, sizeof w);
    st_write_text(&w, "a \"text\"", "line\n\\");
    for (int i = 0; i < NAMES; i++) st_write_tensor(&w, names[i], 0, NULL);
    CHECK_EQ(st_write_begin(&w), ST_OK);
    for (int i = 0; i < NAMES; i++) { float value = (float)i; st_write_floats(&w, &value, 1); }
    CHECK_EQ(st_write_file(&w, path), ST_OK);
    CHECK_EQ(st_write_file(&w, NULL), ST_ERR_NULL);
    CHECK_EQ(st_write_file(&w, "/nonexistent/w"), ST_ERR_OPEN);
    if (access("/dev/full", W_OK) == 0) CHECK_EQ(st_write_file(&w, "/dev/full"), ST_ERR_WRITE);
    CHECK_EQ(st_read_file(path, &bytes, &size), ST_OK);
    CHECK_EQ(st_open(&file, bytes, size), ST_OK);
    CHECK(json_find(file.metadata, "a \"text\"", text, sizeof text) && strcmp(text, "line\n\\") == 0);
    for (int i = 0; i < NAMES; i++) {
        const st_tensor *t = st_find(&file, names[i]);
        float value = -1;
        CHECK(t != NULL && st_floats(t, &value) == ST_OK && (int)value == i);
    }
    st_close(&file);
    CHECK_EQ(st_write_file(&w, path), ST_OK);           /* over the file that was read */
    CHECK_EQ(st_read_file(path, &again, &size_again), ST_OK);
    CHECK(size == size_again && memcmp(bytes, again, size) == 0);
    for (size_t n = 0; n < size; n++) CHECK(st_open(&file, bytes, n) != ST_OK);       /* what a crash leaves */
    free(bytes); free(again);
    st_write_close(&w);
    remove(path);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(checksum);
    RUN(records);
    RUN(files);
    RUN(full_disk);
    RUN(headers);
    RUN(reading_wrongly);
    RUN(many_tensors);
    RUN(writing_wrongly);
    RUN(files_of_tensors);
    return TEST_END();
}
