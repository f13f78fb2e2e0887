/* t_system.c - tests the operating system's calls below amp_system: names in UTF-8 and long ones, replacing files that are
 * open or held, offsets beyond 4 GiB, folders, threads and the clock.  Names and locks that only Windows refuses are tested
 * there.
 *
 *     gcc -O2 -Itests tests/unit/t_system.c -o t_system -lm -lpthread && ./t_system      (from the project root) */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include "file_holds.h"
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64] = "/tmp/amp_system_XXXXXX";
static amp_system sys;

static int says(const char *text) {
    if (strstr(amp_last_error(), text) != NULL) return 1;
    printf("      last error: %s\n", amp_last_error());
    return 0;
}

typedef struct names { int n, found; const char *wanted; } names;
static int count_name(void *arg, const char *name) {
    names *all = (names *)arg;
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) return 0;
    all->n++;
    all->found += strcmp(name, all->wanted) == 0;
    return 0;
}

static const char *const foreign[] = {"gr\xc3\xbc\xc3\x9f" "e.bin", "\xe6\x96\x87\xe4\xbb\xb6", "\xf0\x9f\x99\x82.state", "a b'c"};

TEST(names_are_utf8) {
    char path[256];
    int i;
    for (i = 0; i < 4; i++) {
        names all = {0, 0, NULL};
        snprintf(path, sizeof path, "%s/%s", folder, foreign[i]);
        CHECK_OK(amp_file_write_atomic(NULL, path, foreign[i], strlen(foreign[i])));
        CHECK(holds(path, foreign[i]));
        all.wanted = foreign[i];
        CHECK_EQ(sys.file_list(sys.user, folder, count_name, &all), 0);
        CHECK(all.n == 1 && all.found == 1);
        CHECK_EQ(sys.file_remove(sys.user, path), 0);
        CHECK(!holds(path, foreign[i]));
    }
}

/* Windows' own limit is 260 characters with the folders. */
TEST(paths_may_be_long) {
    char path[1000], longer[1200];
    size_t n = (size_t)snprintf(path, sizeof path, "%s/", folder);
    FILE *made;
    memset(path + n, 'x', 225 - n);
    snprintf(path + 225, sizeof path - 225, ".state");
    CHECK_OK(amp_file_write_atomic(NULL, path, "long", 4));         /* the temporary file beside it has a longer name */
    CHECK(holds(path, "long"));
    CHECK_EQ(sys.file_remove(sys.user, path), 0);
    memset(path + n, 'y', 300);
    path[n + 300] = 0;
    CHECK_ERR(amp_file_write_atomic(NULL, path, "long", 4), AMP_ERR_OPEN);      /* a component of 300 fits nowhere */
    snprintf(longer, sizeof longer, "%s/none", path);
    made = fopen(longer, "rb");
    CHECK(made == NULL && sys.file_remove(sys.user, longer) < 0);
}

TEST(an_open_file_is_replaced_or_stays) {
    char path[256], text[8] = "";
    const char *wanted = "old";
    intptr_t file;
    snprintf(path, sizeof path, "%s/open", folder);
    CHECK_OK(amp_file_write_atomic(NULL, path, "old", 3));
    CHECK_EQ(sys.file_open(sys.user, path, 0, &file), 0);
    if (amp_file_write_atomic(NULL, path, "newer", 5) == AMP_OK) wanted = "newer";
    else CHECK(says("another program holds the file open"));                    /* Windows before 10 */
    CHECK_EQ(sys.file_read(sys.user, file, text, sizeof text, 0), 3);           /* who has it open reads the old one */
    CHECK(memcmp(text, "old", 3) == 0);
    CHECK_EQ(sys.file_close(sys.user, file), 0);
    CHECK(holds(path, wanted));
    CHECK_EQ(sys.file_remove(sys.user, path), 0);
}

TEST(offsets_have_64_bits) {
    static const int64_t far_away = ((int64_t)5 << 30) + 3;
    char path[256], text[8] = "";
    intptr_t file;
    snprintf(path, sizeof path, "%s/sparse", folder);
    CHECK_EQ(sys.file_open(sys.user, path, 2, &file), 0);
    CHECK_EQ(sys.file_write(sys.user, file, "end", 3, far_away), 3);
    CHECK_EQ(sys.file_size(sys.user, file), far_away + 3);
    CHECK_EQ(sys.file_read(sys.user, file, text, sizeof text, far_away), 3);
    CHECK(memcmp(text, "end", 3) == 0);
    CHECK_EQ(sys.file_read(sys.user, file, text, sizeof text, far_away + 3), 0);
    CHECK_EQ(sys.file_read(sys.user, file, text, 1, 7), 1);
    CHECK_EQ(text[0], 0);
    CHECK_EQ(sys.file_close(sys.user, file), 0);
    CHECK_EQ(sys.file_remove(sys.user, path), 0);
}

/* Lines keep their ends, and a byte of 26 is no end of the file. */
TEST(bytes_stay) {
    char path[256];
    snprintf(path, sizeof path, "%s/bytes", folder);
    CHECK_OK(amp_file_write_atomic(NULL, path, "a\nb\r\nc\x1a" "d\n", 9));
    CHECK(holds(path, "a\nb\r\nc\x1a" "d\n"));
    CHECK_EQ(sys.file_remove(sys.user, path), 0);
}

TEST(errors_are_named) {
    char path[256];
    intptr_t file;
    void *data;
    size_t bytes;
    names all = {0, 0, ""};
    CHECK_EQ(sys.file_open(sys.user, folder, 0, &file), 0);         /* a folder opens, and has no size */
    CHECK_EQ(sys.file_size(sys.user, file), -EISDIR);
    CHECK_EQ(sys.file_close(sys.user, file), 0);
    CHECK_EQ(sys.file_open(sys.user, folder, 1, &file), -EISDIR);
    snprintf(path, sizeof path, "%s/none/none", folder);
    CHECK_EQ(sys.file_open(sys.user, path, 0, &file), -ENOENT);
    CHECK_EQ(sys.file_remove(sys.user, path), -ENOENT);
    CHECK_EQ(sys.file_list(sys.user, path, count_name, &all), -ENOENT);
    snprintf(path, sizeof path, "%s/*?", folder);                   /* a pattern is no name on Windows, and no file here */
    CHECK_EQ(sys.file_open(sys.user, path, 0, &file), -ENOENT);
    snprintf(path, sizeof path, "%s/twice", folder);
    CHECK_EQ(sys.file_open(sys.user, path, 3, &file), 0);
    CHECK_EQ(sys.file_close(sys.user, file), 0);
    CHECK_EQ(sys.file_open(sys.user, path, 3, &file), -EEXIST);
    CHECK_EQ(sys.file_remove(sys.user, path), 0);
    CHECK_ERR(amp_file_read_all(NULL, folder, &data, &bytes), AMP_ERR_READ);
}

static void note(void *arg) { *(int *)arg = 7; }
TEST(threads_and_clock) {
    void *thread;
    int value = 0, i;
    int64_t now, last = sys.clock_ns(sys.user);
    CHECK_EQ(sys.thread_start(sys.user, &thread, note, &value), 0);
    CHECK_EQ(sys.thread_join(sys.user, thread), 0);
    CHECK_EQ(value, 7);
    for (i = 0; i < 1000; i++, last = now) CHECK((now = sys.clock_ns(sys.user)) >= last);
    for (i = 12; i >= 0; i--) {
        void *memory = sys.alloc(sys.user, 100, (size_t)1 << i);
        CHECK(memory != NULL && (uintptr_t)memory % ((size_t)1 << i) == 0);
        sys.free(sys.user, memory, 100);
    }
}

#if defined(_WIN32)
TEST(a_file_that_is_held_stays) {
    char path[256];
    names all = {0, 0, "held"};
    HANDLE held;
    void *data;
    size_t bytes;
    snprintf(path, sizeof path, "%s/held", folder);
    CHECK_OK(amp_file_write_atomic(NULL, path, "old", 3));
    held = CreateFileA(path, GENERIC_READ, 0, NULL, OPEN_EXISTING, 0, NULL);
    CHECK(held != INVALID_HANDLE_VALUE);
    CHECK_ERR(amp_file_read_all(NULL, path, &data, &bytes), AMP_ERR_OPEN);
    CHECK(says("another program holds the file open"));
    CHECK_ERR(amp_file_write_atomic(NULL, path, "new", 3), AMP_ERR_WRITE);
    CHECK(says("held"));
    CloseHandle(held);
    CHECK(holds(path, "old"));
    CHECK_EQ(sys.file_list(sys.user, folder, count_name, &all), 0);
    CHECK(all.n == 1 && all.found == 1);                            /* no temporary file stays */
    CHECK_EQ(sys.file_remove(sys.user, path), 0);
}

TEST(names_that_windows_does_not_have) {
    char path[256];
    snprintf(path, sizeof path, "%s/\xff\xfe", folder);
    CHECK_ERR(amp_file_write_atomic(NULL, path, "x", 1), AMP_ERR_OPEN);
    CHECK(says("the name is not UTF-8"));
    snprintf(path, sizeof path, "%s/a|b", folder);
    CHECK_ERR(amp_file_write_atomic(NULL, path, "x", 1), AMP_ERR_OPEN);
    CHECK(says("Windows allows no such name"));
}

static void end_here(void *arg) { *(int *)arg = 1; ExitThread(0); }
TEST(a_thread_may_end_itself) {
    void *thread;
    int value = 0;
    CHECK_EQ(sys.thread_start(sys.user, &thread, end_here, &value), 0);
    CHECK_EQ(sys.thread_join(sys.user, thread), 0);
    CHECK_EQ(value, 1);
}
#endif

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    amp_system_default(&sys);
    if (!ampt.list && mkdtemp(folder) == NULL) return 2;
    RUN(names_are_utf8); RUN(paths_may_be_long); RUN(an_open_file_is_replaced_or_stays); RUN(offsets_have_64_bits); RUN(bytes_stay);
    RUN(errors_are_named); RUN(threads_and_clock);
#if defined(_WIN32)
    RUN(a_file_that_is_held_stays); RUN(names_that_windows_does_not_have); RUN(a_thread_may_end_itself);
#endif
    rmdir(folder);
    return TEST_END();
}
