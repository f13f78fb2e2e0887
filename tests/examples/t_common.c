/* t_common.c - the event files that examples/tensorboard.h writes for TensorBoard. */
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

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(checksum);
    RUN(records);
    RUN(files);
    RUN(full_disk);
    return TEST_END();
}
