/* t_files.c - tests unusual files: pipes, devices, links, permissions, several writers at once, and limits on file size.
 * It also tests programs that closed their standard descriptors, and processes that fork. */
#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE 1         /* mkdtemp, setrlimit */
#endif
#include "../amp.h"
#include "test.h"
#include "file_holds.h"
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__has_feature)
#  if __has_feature(address_sanitizer)
#    define ADDRESS_SANITIZER
#  endif
#elif defined(__SANITIZE_ADDRESS__)
#  define ADDRESS_SANITIZER
#endif

static char folder[64];

static const char *in_folder(const char *name) {
    static char paths[8][160];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}
static int says(const char *text) { return strstr(amp_last_error(), text) != NULL; }
static void pause_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}
static int matches(const char *pattern) {
    glob_t found;
    int n = glob(in_folder(pattern), 0, NULL, &found) == 0 ? (int)found.gl_pathc : 0;
    globfree(&found);
    return n;
}
static void write_plain(const char *path, const void *data, size_t bytes) {
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(data, 1, bytes, f) == bytes);
    if (f != NULL) CHECK(fclose(f) == 0);
}
static int mode_of(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 ? (int)(info.st_mode & 07777) : -1;
}
/* Runs `what` in a child process; its exit status, or 1000 and the signal that ended it. */
static int in_child(int (*what)(void *arg), void *arg) {
    int status = -1;
    pid_t pid;
    fflush(stdout);
    pid = fork();
    if (pid == 0) { alarm(20); _exit(what(arg)); }
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return -1;
    return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* ---- Reading to the end */

enum { STREAM = 200000 };
static char stream_text[STREAM];
typedef struct writer { const char *path; size_t bytes; int delay_ms; } writer;

static void *write_stream(void *arg) {
    const writer *w = (const writer *)arg;
    size_t at = 0;
    int fd;
    pause_ms(w->delay_ms);
    fd = open(w->path, O_WRONLY);
    while (fd >= 0 && at < w->bytes) {
        size_t piece = w->bytes - at < 7777 ? w->bytes - at : 7777;
        ssize_t n = write(fd, stream_text + at, piece);
        if (n <= 0) break;
        at += (size_t)n;
        if (at < 40000) pause_ms(2);
    }
    if (fd >= 0) close(fd);
    return NULL;
}

/* Reads all of a FIFO that a thread writes. */
static void read_fifo(size_t bytes, int delay_ms) {
    const char *path = in_folder("fifo");
    writer w = {path, bytes, delay_ms};
    pthread_t thread;
    void *data = NULL;
    size_t got = 0;
    CHECK(mkfifo(path, 0600) == 0);
    CHECK(pthread_create(&thread, NULL, write_stream, &w) == 0);
    CHECK_OK(amp_file_read_all(NULL, path, &data, &got));
    CHECK_EQ(got, bytes);
    CHECK(got == bytes && data != NULL && memcmp(data, stream_text, bytes) == 0 && ((char *)data)[bytes] == 0);
    amp_file_free(NULL, data, got);
    pthread_join(thread, NULL);
    unlink(path);
}

TEST(streams_are_read_to_the_end) {
    int i;
    for (i = 0; i < STREAM; i++) stream_text[i] = (char)('a' + i % 23);
    read_fifo(STREAM, 0);
    read_fifo(100, 60);                 /* a writer that comes late */
    read_fifo(0, 20);                   /* and one with nothing to say */
}

/* What says that it has no bytes, and has some. */
TEST(files_without_a_size) {
    void *data;
    size_t bytes;
    if (access("/proc/self/status", R_OK) != 0) SKIP("no /proc");
    CHECK_OK(amp_file_read_all(NULL, "/proc/self/status", &data, &bytes));
    CHECK(bytes > 100 && strncmp((const char *)data, "Name:", 5) == 0);
    amp_file_free(NULL, data, bytes);
    CHECK_OK(amp_file_read_all(NULL, "/dev/null", &data, &bytes));
    CHECK_EQ(bytes, 0);
    amp_file_free(NULL, data, bytes);
}

/* Settings come through a pipe as a shell's <(...) gives it. */
static int settings_from_stdin(void *arg) {
    amp_settings settings, none;
    int ends[2];
    (void)arg;
    if (pipe(ends) != 0 || write(ends[1], "dtype = fp16\n", 13) != 13) return 2;
    close(ends[1]);
    if (dup2(ends[0], 0) != 0) return 3;
    memset(&settings, 0, sizeof settings);
    memset(&none, 0, sizeof none);
    if (amp_settings_read_file(&settings, NULL, "/dev/stdin") != AMP_OK) return 4;
    return memcmp(&settings, &none, sizeof none) == 0 ? 5 : 0;
}
TEST(settings_come_through_a_pipe) {
    if (access("/dev/stdin", F_OK) != 0) SKIP("no /dev/stdin");
    CHECK_EQ(in_child(settings_from_stdin, NULL), 0);
}

/* A file of `bytes` bytes that says it has `size`. */
static struct { amp_system posix; int64_t size, bytes; } said;
static int64_t said_size(void *user, intptr_t file) { (void)user; (void)file; return said.size; }
static int64_t said_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    int64_t i, n = said.bytes - offset < (int64_t)bytes ? said.bytes - offset : (int64_t)bytes;
    (void)user; (void)file;
    if (n > 5000) n = 5000;
    for (i = 0; i < n; i++) ((char *)buffer)[i] = (char)('a' + (offset + i) % 23);
    return n < 0 ? 0 : n;
}
TEST(the_size_is_a_hint) {
    static const int64_t sizes[] = {0, 1, 4095, 4096, 5000, 20000, -ESPIPE};
    amp_system s;
    void *data;
    size_t bytes, i, k, same;
    write_plain(in_folder("any"), "x", 1);
    memset(&s, 0, sizeof s);
    s.file_size = said_size;
    s.file_read = said_read;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (said.bytes = 0; said.bytes < 20100; said.bytes += 1 + said.bytes % 4095) {
            int cut = sizes[i] > said.bytes;
            said.size = sizes[i];
            CHECK_ERR(amp_file_read_all(&s, in_folder("any"), &data, &bytes), cut ? AMP_ERR_READ : AMP_OK);
            if (cut) { CHECK(says("ends early")); continue; }
            CHECK_EQ(bytes, said.bytes);
            for (k = same = 0; k < bytes; k++) same += ((char *)data)[k] == (char)('a' + k % 23);
            CHECK(same == bytes && ((char *)data)[bytes] == 0);
            amp_file_free(&s, data, bytes);
        }
    said.size = -EIO;
    CHECK_ERR(amp_file_read_all(&s, in_folder("any"), &data, &bytes), AMP_ERR_READ);
}

static int64_t endless_read(void *user, intptr_t file, void *buffer, size_t bytes, int64_t offset) {
    (void)user; (void)file; (void)buffer;
    return offset > INT64_MAX / 2 ? 0 : (int64_t)bytes;
}
TEST(a_stream_without_an_end) {
    amp_system s;
    void *data;
    size_t bytes;
    write_plain(in_folder("any"), "x", 1);
    memset(&s, 0, sizeof s);
    s.file_size = said_size;
    s.file_read = endless_read;
    said.size = -ESPIPE;
    CHECK_ERR(amp_file_read_all(&s, in_folder("any"), &data, &bytes), AMP_ERR_READ);
    CHECK(says("must be copied into a file"));
}

/* ---- What cannot be a data file is refused by name, and at once */

static amp_context *context(int threads) {
    amp_context *amp = NULL;
    amp_desc d;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    CHECK_OK(amp_open(&amp, &d));
    return amp;
}
static void tokens(const char *path) {
    static unsigned char bytes[20000];
    int i;
    for (i = 0; i < 20000; i++) bytes[i] = (unsigned char)(i % 251);
    write_plain(path, bytes, sizeof bytes);
}
static amp_result load(amp_context *amp, const char *path, amp_loader **loader) {
    amp_loader_desc d;
    memset(&d, 0, sizeof d);
    d.path = path;
    d.seq = 16;
    d.batch = 4;
    d.shuffle = 1;
    return amp_loader_create(amp, loader, &d);
}
TEST(data_files_are_regular_files) {
    amp_context *amp = context(1);
    amp_loader *loader;
    const char *fifo = in_folder("fifo.bin"), *array = fifo;
    amp_loader_desc d;
    CHECK(mkfifo(fifo, 0600) == 0);
    alarm(20);
    CHECK_ERR(load(amp, fifo, &loader), AMP_ERR_OPEN);
    CHECK(says("fifo.bin") && says("regular file"));
    CHECK_ERR(load(amp, in_folder("*.bin"), &loader), AMP_ERR_OPEN);
    CHECK(says("fifo.bin") && says("regular file"));
    memset(&d, 0, sizeof d);
    d.arrays = &array;
    d.n_arrays = 1;
    d.batch = 1;
    CHECK_ERR(amp_loader_create(amp, &loader, &d), AMP_ERR_OPEN);
    CHECK(says("fifo.bin") && says("regular file"));
    CHECK_ERR(load(amp, "/dev/zero", &loader), AMP_ERR_OPEN);
    CHECK(says("/dev/zero") && says("regular file"));
    CHECK_ERR(load(amp, folder, &loader), AMP_ERR_READ);
    CHECK(says(folder));
    if (access("/proc/self/status", R_OK) == 0) {       /* a regular file of size 0, says fstat */
        CHECK_ERR(load(amp, "/proc/self/status", &loader), AMP_ERR_OPEN);
        CHECK(says("/proc/self/status") && says("must be copied"));
    }
    write_plain(in_folder("none"), "", 0);
    CHECK_ERR(load(amp, in_folder("none"), &loader), AMP_ERR_RANGE);
    CHECK(says("none: 0 samples are less than one batch of 4"));
    tokens(in_folder("text"));
    CHECK_OK(load(amp, in_folder("text"), &loader));
    amp_loader_destroy(loader);
    alarm(0);
    unlink(fifo);
    amp_close(amp);
}

/* What another process holds a lease on (Samba, a server of NFS) is given back first: that is waited for. */
#if defined(__linux__)
enum { SET_LEASE = 1024 };          /* F_SETLEASE, which <fcntl.h> keeps for _GNU_SOURCE */
static int ready[2];
static int holds_a_lease(void *arg) {
    sigset_t asked;
    int number, fd = open((const char *)arg, O_RDWR);
    sigemptyset(&asked);
    sigaddset(&asked, SIGIO);
    sigprocmask(SIG_BLOCK, &asked, NULL);
    if (fd < 0 || fcntl(fd, SET_LEASE, F_WRLCK) != 0) { if (write(ready[1], "n", 1) != 1) return 2; return 1; }
    if (write(ready[1], "y", 1) != 1 || sigwait(&asked, &number) != 0) return 3;
    pause_ms(50);
    return fcntl(fd, SET_LEASE, F_UNLCK) == 0 ? 0 : 4;
}
TEST(leased_files) {
    const char *path = in_folder("leased");
    char answer = 0;
    int status = -1, held;
    pid_t pid;
    write_plain(path, "leased", 6);
    CHECK(pipe(ready) == 0);
    fflush(stdout);
    pid = fork();
    if (pid == 0) { alarm(20); _exit(holds_a_lease((void *)(uintptr_t)path)); }
    CHECK(read(ready[0], &answer, 1) == 1);
    held = answer == 'y';
    CHECK(holds(path, "leased"));
    CHECK(waitpid(pid, &status, 0) == pid && (!held || (WIFEXITED(status) && WEXITSTATUS(status) == 0)));
    close(ready[0]);
    close(ready[1]);
    unlink(path);
    if (!held) SKIP("no leases on files here");
}
#else
TEST(leased_files) { SKIP("leases are Linux's"); }
#endif

/* ---- Descriptors */

static int opens_above_2(void *arg) {
    amp_system s;
    intptr_t file[4];
    int mode;
    amp_system_default(&s);
    for (mode = 0; mode < 3; mode++) close(mode);
    for (mode = 2; mode >= 0; mode--) {
        if (s.file_open(NULL, (const char *)arg, mode, &file[mode]) != 0) return 10;
        if (file[mode] < 3) return 11;
        if ((fcntl((int)file[mode], F_GETFD) & FD_CLOEXEC) == 0) return 12;
    }
    for (mode = 0; mode < 3; mode++) if (fcntl(mode, F_GETFD) != -1) return 13;
    return amp_file_write_atomic(NULL, (const char *)arg, "x", 1) == AMP_OK ? 0 : 14;
}
TEST(standard_descriptors_are_left_alone) { CHECK_EQ(in_child(opens_above_2, (void *)(uintptr_t)in_folder("plain")), 0); }

/* ---- Replacing a file */

/* Looks at the temporary file while it is written. */
static struct { amp_system posix; int mode, temporaries, taken; char name[160], victim[160]; } seen;
static int64_t seen_write(void *user, intptr_t file, const void *data, size_t bytes, int64_t offset) {
    glob_t found;
    (void)user;
    seen.temporaries = 0;
    if (glob(in_folder("kept.tmp*"), 0, NULL, &found) == 0) {
        seen.temporaries = (int)found.gl_pathc;
        seen.mode = mode_of(found.gl_pathv[0]);
        snprintf(seen.name, sizeof seen.name, "%s", found.gl_pathv[0]);
    }
    globfree(&found);
    return seen.posix.file_write(NULL, file, data, bytes, offset);
}
static int seen_open(void *user, const char *path, int for_writing, intptr_t *file) {
    (void)user;
    if (for_writing && seen.taken > 0) {            /* somebody has that name already, and others may write to it */
        seen.taken--;
        if (symlink(seen.victim, path) != 0) return -errno;
    }
    return seen.posix.file_open(NULL, path, for_writing, file);
}
static amp_system seen_system(void) {
    amp_system s;
    memset(&seen, 0, sizeof seen);
    memset(&s, 0, sizeof s);
    snprintf(seen.victim, sizeof seen.victim, "%s", in_folder("victim"));
    amp_system_default(&seen.posix);
    s.file_write = seen_write;
    s.file_open = seen_open;
    return s;
}

TEST(a_replaced_file_keeps_its_mode) {
    static const int modes[] = {0600, 0640, 0644, 0664, 0400, 0666, 0755};
    const char *path = in_folder("kept");
    amp_system s = seen_system();
    mode_t mask = umask(022);
    size_t i;
    for (i = 0; i < sizeof modes / sizeof *modes; i++) {
        write_plain(path, "old", 3);
        CHECK(chmod(path, (mode_t)modes[i]) == 0);
        CHECK_OK(amp_file_write_atomic(&s, path, "new", 3));
        CHECK_MSG(mode_of(path) == modes[i], "0%o became 0%o", (unsigned)modes[i], (unsigned)mode_of(path));
        CHECK(seen.temporaries == 1 && (seen.mode & ~modes[i]) == 0);           /* at no time more open */
        CHECK(holds(path, "new"));
        unlink(path);
    }
    CHECK_OK(amp_file_write_atomic(&s, path, "new", 3));
    CHECK_EQ(mode_of(path), 0644);                  /* a new file: as the process makes them */
    umask(mask);
    unlink(path);
}

TEST(a_replaced_file_keeps_its_owner) {
    const char *path = in_folder("kept");
    struct stat info;
    if (geteuid() != 0) SKIP("only root gives files away");
    write_plain(path, "old", 3);
    CHECK(chmod(path, 0640) == 0 && chown(path, 12345, 54321) == 0);
    CHECK_OK(amp_file_write_atomic(NULL, path, "new", 3));
    CHECK(stat(path, &info) == 0 && info.st_uid == 12345 && info.st_gid == 54321 && (info.st_mode & 0777) == 0640);
    unlink(path);
}

/* A group that the process is not in cannot be kept: the group it becomes gets what all others had. */
static int as_another_user(void *arg) {
    const char *path = (const char *)arg;
    struct stat info;
    if (chmod(folder, 0777) != 0 || setgid(23456) != 0 || setuid(23456) != 0) return 2;
    if (amp_file_write_atomic(NULL, path, "new", 3) != AMP_OK) return 3;
    if (stat(path, &info) != 0 || info.st_uid != 23456) return 4;
    return (info.st_mode & 0777) == 0600 ? 0 : 5;
}
TEST(what_cannot_be_kept_is_not_given_to_others) {
    const char *path = in_folder("kept");
    if (geteuid() != 0) SKIP("only root becomes another user");
    write_plain(path, "old", 3);
    CHECK(chmod(path, 0660) == 0 && chown(path, 12345, 54321) == 0);
    CHECK_EQ(in_child(as_another_user, (void *)(uintptr_t)path), 0);
    CHECK(chmod(folder, 0700) == 0);
    unlink(path);
}

TEST(a_symbolic_link_is_replaced) {
    const char *path = in_folder("kept"), *victim = in_folder("victim");
    struct stat info;
    write_plain(victim, "victim", 6);
    CHECK(chmod(victim, 0600) == 0 && symlink(victim, path) == 0);
    CHECK_OK(amp_file_write_atomic(NULL, path, "new", 3));
    CHECK(lstat(path, &info) == 0 && S_ISREG(info.st_mode) && (info.st_mode & 0777) == 0600);
    CHECK(holds(victim, "victim") && holds(path, "new"));
    unlink(path);
}

/* No name that can be known beforehand is written through. */
TEST(temporary_names_are_nobody_elses) {
    const char *path = in_folder("kept"), *victim = in_folder("victim");
    char guess[200], first[160];
    amp_system s = seen_system();
    write_plain(victim, "victim", 6);
    snprintf(guess, sizeof guess, "%s.tmp%ld", path, (long)getpid());
    CHECK(symlink(victim, guess) == 0);
    CHECK_OK(amp_file_write_atomic(NULL, path, "new", 3));
    CHECK(holds(victim, "victim") && holds(path, "new"));
    unlink(guess);

    CHECK_OK(amp_file_write_atomic(&s, path, "one", 3));
    snprintf(first, sizeof first, "%s", seen.name);
    CHECK(strncmp(first, guess, strlen(guess)) == 0 && first[strlen(guess)] == '@');       /* PATH.tmpPID@HOST-RANDOM */
    CHECK_OK(amp_file_write_atomic(&s, path, "two", 3));
    CHECK(strcmp(first, seen.name) != 0);

    seen.taken = 3;                                 /* three of them are taken */
    CHECK_OK(amp_file_write_atomic(&s, path, "three", 5));
    CHECK(seen.taken == 0 && holds(victim, "victim") && holds(path, "three"));
    CHECK_EQ(matches("kept.tmp*"), 3);              /* those of the others stay */
    seen.taken = 1000000;                           /* all are: it ends */
    CHECK_ERR(amp_file_write_atomic(&s, path, "four", 4), AMP_ERR_OPEN);
    CHECK(holds(victim, "victim") && holds(path, "three"));
    {
        glob_t found;
        size_t i;
        CHECK(glob(in_folder("kept.tmp*"), 0, NULL, &found) == 0);
        for (i = 0; i < found.gl_pathc; i++) unlink(found.gl_pathv[i]);
        globfree(&found);
    }
    unlink(path);
}

/* Content number n is n bytes of a letter: what is read is one of them, whole. */
enum { WRITERS = 3, PROCESSES = 3, WRITES = 40 };
static char shared_path[160];
static void *write_often(void *arg) {
    char text[20000];
    int i, number = *(int *)arg, failed = 0;
    for (i = 0; i < WRITES; i++) {
        int letter = (number * WRITES + i) % 20;
        memset(text, 'a' + letter, sizeof text);
        if (amp_file_write_atomic(NULL, shared_path, text, (size_t)(1000 * (1 + letter))) != AMP_OK) failed++;
    }
    *(int *)arg = failed;
    return NULL;
}
static int write_in_threads(void *arg) {
    pthread_t threads[WRITERS];
    int i, number[WRITERS], failed = 0;
    for (i = 0; i < WRITERS; i++) {
        number[i] = *(int *)arg * WRITERS + i;
        if (pthread_create(&threads[i], NULL, write_often, &number[i]) != 0) return 2;
    }
    for (i = 0; i < WRITERS; i++) { pthread_join(threads[i], NULL); failed += number[i]; }
    return failed > 0;
}
static int whole_content(void) {
    void *data;
    size_t bytes, i;
    int whole;
    if (amp_file_read_all(NULL, shared_path, &data, &bytes) != AMP_OK) return 0;
    whole = bytes >= 1000 && bytes % 1000 == 0;
    for (i = 0; i < bytes && whole; i++) whole = ((char *)data)[i] == (char)('a' + bytes / 1000 - 1);
    amp_file_free(NULL, data, bytes);
    return whole;
}
TEST(many_writers_of_one_file) {
    pid_t pids[PROCESSES];
    int i, status, running = PROCESSES;
    snprintf(shared_path, sizeof shared_path, "%s", in_folder("shared"));
    i = 0;
    CHECK_OK(amp_file_write_atomic(NULL, shared_path, memset(stream_text, 'a', 1000), 1000));
    fflush(stdout);
    for (i = 0; i < PROCESSES; i++) {
        pids[i] = fork();
        if (pids[i] == 0) { alarm(60); _exit(write_in_threads(&i)); }
    }
    while (running > 0) {
        pid_t ended = waitpid(-1, &status, WNOHANG);
        CHECK(whole_content());
        if (ended == 0) continue;
        running--;
        CHECK(ended > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(whole_content());
    CHECK_EQ(matches("shared*"), 1);
    unlink(shared_path);
}

/* ---- The limit on the size of files */

static int write_over_limit(void *arg) {
    const char *path = (const char *)arg;
    static char big[300000];
    struct rlimit limit = {100000, 100000};
    struct sigaction before;
    sigset_t mask, pending;
    int host_blocks;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    for (host_blocks = 0; host_blocks < 3; host_blocks++) {
        if (host_blocks > 0) {                      /* the host holds it back itself; then one is waiting for it */
            sigemptyset(&mask);
            sigaddset(&mask, SIGXFSZ);
            sigprocmask(SIG_BLOCK, &mask, NULL);
            if (host_blocks == 2) raise(SIGXFSZ);
        }
        if (amp_file_write_atomic(NULL, path, big, sizeof big) != AMP_ERR_WRITE) return 3;
        if (!says("limit on file sizes")) return 4;
        sigpending(&pending);
        if (sigismember(&pending, SIGXFSZ) != (host_blocks == 2)) return 5;
        sigprocmask(SIG_BLOCK, NULL, &mask);
        if (sigismember(&mask, SIGXFSZ) != (host_blocks > 0)) return 6;
        sigaction(SIGXFSZ, NULL, &before);
        if (before.sa_handler != SIG_DFL) return 7;
    }
    return 0;
}
TEST(the_limit_on_file_sizes_is_a_full_disk) {
    const char *path = in_folder("limited");
    write_plain(path, "old", 3);
    CHECK_EQ(in_child(write_over_limit, (void *)(uintptr_t)path), 0);
    CHECK(holds(path, "old"));
    CHECK_EQ(matches("limited*"), 1);
    unlink(path);
}

/* ---- fork: a child has none of the parent's threads */

static amp_loader *forked;
static int child_destroys(void *arg) {
    amp_loader *own = NULL;
    amp_loader_info info;
    amp_batch batch;
    if (amp_loader_next(forked, &batch) != AMP_ERR_STATE || !says("fork")) return 2;
    if (amp_loader_info_get(forked, &info) != AMP_ERR_STATE || amp_loader_seek(forked, 0, 0) != AMP_ERR_STATE) return 3;
    amp_loader_stop(forked);
    amp_loader_destroy(forked);
    if (load((amp_context *)arg, in_folder("text"), &own) != AMP_OK || amp_loader_next(own, &batch) != AMP_OK) return 4;
    amp_loader_destroy(own);
    amp_close((amp_context *)arg);
    return 0;
}
TEST(a_child_destroys_a_loader) {
    amp_context *amp;
    amp_batch batch;
    int i;
#if defined(ADDRESS_SANITIZER)
    SKIP("a worker may hold a lock of AddressSanitizer's allocator, which the child waits for");
#endif
    amp = context(1);
    tokens(in_folder("text"));
    CHECK_OK(load(amp, in_folder("text"), &forked));
    for (i = 0; i < 20; i++) {                      /* wherever the workers are */
        CHECK_EQ(in_child(child_destroys, amp), 0);
        CHECK_OK(amp_loader_next(forked, &batch));
    }
    amp_loader_destroy(forked);
    amp_close(amp);
}

int main(int argc, char **argv) {
    char *made;
    TEST_BEGIN(argc, argv);
    snprintf(folder, sizeof folder, "/tmp/ampt_files_XXXXXX");
    made = mkdtemp(folder);
    if (made == NULL) { perror(folder); return 1; }
    RUN(streams_are_read_to_the_end);
    RUN(files_without_a_size);
    RUN(settings_come_through_a_pipe);
    RUN(the_size_is_a_hint);
    RUN(a_stream_without_an_end);
    RUN(data_files_are_regular_files);
    RUN(leased_files);
    RUN(standard_descriptors_are_left_alone);
    RUN(a_replaced_file_keeps_its_mode);
    RUN(a_replaced_file_keeps_its_owner);
    RUN(what_cannot_be_kept_is_not_given_to_others);
    RUN(a_symbolic_link_is_replaced);
    RUN(temporary_names_are_nobody_elses);
    RUN(many_writers_of_one_file);
    RUN(the_limit_on_file_sizes_is_a_full_disk);
   
    RUN(a_child_destroys_a_loader);
    {
        char command[100];
        snprintf(command, sizeof command, "rm -rf '%s'", folder);
        if (system(command) != 0) return 1;
    }
    return TEST_END();
}
