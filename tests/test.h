/* test.h - the test harness: TEST(name) { CHECK(condition); }, SKIP("reason"), and one closing line.
 *
 *     #include "test.h"
 *     TEST(adds) { CHECK(1 + 1 == 2); CHECK_EQ(1 + 1, 2); }
 *     int main(int argc, char **argv) { TEST_BEGIN(argc, argv); RUN(adds); return TEST_END(); }
 *
 * `program --filter TEXT` runs the tests whose name contains TEXT.  `--list` lists them.  `--stop` ends at the first check
 * that fails.  `--times` prints the CPU seconds of each test.  With AMPT_FIGURES=FILE, the measured errors are added to
 * FILE as JSON lines.  AMPT_LEAVE_OUT=ci leaves out the tests of RUN_CI, and AMPT_LEAVE_OUT=long those of RUN_LONG as well.
 * Under sanitizers, the tests of RUN_PLAIN are left out. */
#ifndef AMPT_TEST_H
#define AMPT_TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(_WIN32)
#  include "on_windows.h"
#endif

static struct {
    int passed, failed, skipped, failures, list, stop, times, leave_out, left_out;
    const char *filter, *name, *reason;
    void (*around)(void (*test)(void));     /* if not NULL, runs each test */
} ampt;

#define TEST(name) static void test_##name(void)
#define RUN(name) ampt_run(#name, test_##name)
#define RUN_LONG(name) ampt_run_unless(ampt.leave_out > 1, #name, test_##name)      /* not in `make quick` */
#define RUN_CI(name) ampt_run_unless(ampt.leave_out > 0, #name, test_##name)        /* in neither `make quick` nor `make test` */
#define RUN_PLAIN(name) ampt_run_unless(AMPT_SANITIZED, #name, test_##name)         /* not under sanitizers */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#  define AMPT_SANITIZED 1
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#    define AMPT_SANITIZED 1
#  endif
#endif
#ifndef AMPT_SANITIZED
#  define AMPT_SANITIZED 0
#endif
/* The next CPU path in a loop from AMP_CPU_SCALAR to the best; and the best of those that differ in more than products of
   bf16.  They need amp.h. */
#if defined(__aarch64__)
#  define AMPT_NEXT_PATH(path) ((path) == AMP_CPU_SCALAR ? AMP_CPU_NEON : (amp_cpu_path)((path) + 1))
#  define AMPT_WIDEST_PATH(best) ((best) > AMP_CPU_NEON ? AMP_CPU_NEON : (best))
#else
#  define AMPT_NEXT_PATH(path) ((amp_cpu_path)((path) + 1))
#  define AMPT_WIDEST_PATH(best) ((best) > AMP_CPU_AVX512 ? AMP_CPU_AVX512 : (best))
#endif
#define SKIP(why) do { ampt.reason = (why); return; } while (0)
#if defined(_WIN32)
#  define SKIP_ON_WINDOWS(why) SKIP("Windows has no " why)
#else
#  define SKIP_ON_WINDOWS(why) ((void)0)
#endif

/* Reports the first failures of a test and goes on. */
#define CHECK(condition) ampt_check((condition) ? 1 : 0, #condition, __FILE__, __LINE__)
/* A CHECK that also prints what is wrong: CHECK_MSG(x == 3, "x = %d", x). */
#define CHECK_MSG(condition, ...) \
    do { if (!ampt_check((condition) ? 1 : 0, #condition, __FILE__, __LINE__) && ampt.failures <= 10) { printf("      "); printf(__VA_ARGS__); printf("\n"); } } while (0)
#define CHECK_EQ(a, b) \
    do { long long ampt_a = (long long)(a), ampt_b = (long long)(b); \
         if (!ampt_check(ampt_a == ampt_b, #a " == " #b, __FILE__, __LINE__) && ampt.failures <= 10) printf("      %lld, expected %lld\n", ampt_a, ampt_b); } while (0)
/* A call that must succeed, or fail with this result and a text that names the function called; needs amp.h. */
#define CHECK_OK(call) \
    do { int ampt_r = (int)(call); if (!ampt_check(ampt_r == 0, #call, __FILE__, __LINE__) && ampt.failures <= 10) printf("      %s\n", amp_last_error()); } while (0)
#define CHECK_ERR(call, result) \
    do { int ampt_r = (int)(call); if (!ampt_check(ampt_r == (int)(result), #call " == " #result, __FILE__, __LINE__) && ampt.failures <= 10) \
         printf("      returned %d\n", ampt_r); else ampt_named(#call, ampt_r, amp_last_error(), __FILE__, __LINE__); } while (0)

static __attribute__((unused)) int ampt_check(int ok, const char *what, const char *file, int line) {
    if (ok) return 1;
    if (++ampt.failures <= 10) printf("  %s:%d: %s: failed: %s\n", file, line, ampt.name, what);
    if (ampt.stop) { printf("FAIL %s (stopped)\n", ampt.name); exit(1); }
    return 0;
}

/* 1 if the line is not yet in `seen`, which has room for 1024 lines. */
static __attribute__((unused)) int ampt_new(const char *line) {
    static char seen[1024][52];
    static int n;
    if (n == 1024) return 0;
    for (int i = 0; i < n; i++) if (!strcmp(seen[i], line)) return 0;
    snprintf(seen[n++], sizeof seen[0], "%s", line);
    return 1;
}
/* Adds "NAME RESULT" to the file AMPT_ERRORS, once for each error that any thread provoked.  tests/errors.sh compares the
 * file with the errors that amp.h documents. */
static __attribute__((unused)) void ampt_provoked(const char *name, int result) {
    static volatile int lock;
    const char *path = getenv("AMPT_ERRORS");
    char line[52];
    FILE *file = NULL;
    if (path == NULL) return;
    snprintf(line, sizeof line, "%.40s %d\n", name, result);
    while (__sync_lock_test_and_set(&lock, 1)) {}
    if (ampt_new(line) && (file = fopen(path, "a")) != NULL) { fputs(line, file); fclose(file); }
    __sync_lock_release(&lock);
}
/* The name in an error text "AMP0102 amp_open: ...". */
static __attribute__((unused)) void ampt_provoked_text(const char *text) {
    char name[48];
    int result;
    if (sscanf(text, "AMP%d %40[a-z0-9_]:", &result, name) == 2) ampt_provoked(name, result);
}
/* Whether an error's text says itself what to do; amp.h puts its result's hint behind those that do not. */
static __attribute__((unused)) int ampt_says_what_to_do(const char *text) {
    static const char *const verbs[] = {" must ", " call ", " set ", " use ", " pass ", " give ", " create ", " load "};
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++) if (strstr(text, verbs[i]) != NULL) return 1;
    return 0;
}
static __attribute__((unused)) void ampt_named(const char *call, int result, const char *text, const char *file, int line) {
    char start[80];
    size_t n = strspn(call, "abcdefghijklmnopqrstuvwxyz0123456789_");
    if (strncmp(call, "amp_", 4) != 0 || result <= 0) return;
    snprintf(start, sizeof start, "AMP%04d %.*s: ", result, (int)n, call);
    if (!ampt_check(strncmp(text, start, strlen(start)) == 0, call, file, line)) printf("      the text is of another call: %s\n", text);
    else ampt_provoked_text(text);
}

/* Writes a measured error and its bound to the file of AMPT_FIGURES. */
static __attribute__((unused)) void ampt_figure(const char *name, double value, double bound) {
    const char *path = getenv("AMPT_FIGURES");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file == NULL) return;
    fprintf(file, "{\"figure\": \"%s\", \"value\": %.4g, \"bound\": %.4g}\n", name, value, bound);
    fclose(file);
}

static __attribute__((unused)) void ampt_run(const char *name, void (*test)(void)) {
    clock_t begun;
    if (ampt.list) { printf("%s\n", name); return; }
    if (ampt.filter && !strstr(name, ampt.filter)) return;
    ampt.name = name; ampt.failures = 0; ampt.reason = NULL;
    begun = clock();
    if (ampt.around) ampt.around(test);
    else test();
    if (ampt.times) printf("%8.3f %s\n", (double)(clock() - begun) / CLOCKS_PER_SEC, name);
    if (ampt.failures) { ampt.failed++; printf("FAIL %s (%d checks)\n", name, ampt.failures); }
    else if (ampt.reason) { ampt.skipped++; printf("skip %s: %s\n", name, ampt.reason); }
    else ampt.passed++;
    fflush(stdout);
}

static __attribute__((unused)) void ampt_run_unless(int left_out, const char *name, void (*test)(void)) {
    if (left_out) ampt.left_out++;
    else ampt_run(name, test);
}

static __attribute__((unused)) void ampt_traps(void) {
#if defined(__x86_64__)
    if ((__builtin_ia32_stmxcsr() & 0x8040) == 0) __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() & ~0x680u);
#endif
}
static __attribute__((unused)) void ampt_begin(int argc, char **argv) {
    const char *leave_out = getenv("AMPT_LEAVE_OUT");
    if (leave_out) ampt.leave_out = !strcmp(leave_out, "long") ? 2 : 1;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--list")) ampt.list = 1;
        if (!strcmp(argv[i], "--stop")) ampt.stop = 1;
        if (!strcmp(argv[i], "--times")) ampt.times = 1;
        if (!strcmp(argv[i], "--filter") && i + 1 < argc) ampt.filter = argv[++i];
    }
}
#define TEST_END() ampt_end()

static __attribute__((unused)) int ampt_end(void) {
    if (ampt.left_out) printf("%d tests left out that are long, or count\n", ampt.left_out);
    if (ampt.filter && !ampt.list && ampt.passed + ampt.failed + ampt.skipped == 0) {
        printf("FAIL --filter %s: no test that runs here has this in its name\n", ampt.filter);
        ampt.failed++;
    }
    if (!ampt.list) printf("%d passed, %d failed, %d skipped\n", ampt.passed, ampt.failed, ampt.skipped);
    return ampt.failed != 0;
}

#endif

/* A file that defines AMPT_TRAPS runs with traps for invalid operations, divisions by zero and overflows. */
#undef TEST_BEGIN
#if defined(AMPT_TRAPS)
#  undef AMPT_TRAPS
#  define TEST_BEGIN(argc, argv) (ampt_traps(), ampt_begin(argc, argv))
#else
#  define TEST_BEGIN(argc, argv) ampt_begin(argc, argv)
#endif
