/* t_errors.c - what amp.h says when something is wrong, held against its own text: every result that a comment of the API half
 * promises ("Errors: 101, 103") is provoked, and the text names the function that was called and that alone; and every
 * function that writes a text works as snprintf does. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#include <ctype.h>

/* The API half of amp.h; "" where it is not in this folder. */
static char api[1 << 18];
static void read_api(void) {
    FILE *file = fopen("amp.h", "r");
    size_t n = file ? fread(api, 1, sizeof api - 1, file) : 0;
    char *end;
    if (file) fclose(file);
    api[n] = 0;
    end = strstr(api, "\n/* Stop here if you only want the API. */");
    if (end) *end = 0;
}

/* ---- Texts */

typedef size_t (*text_call)(const void *thing, char *text, size_t size);
#define TEXT(name, type) static size_t call_##name(const void *thing, char *text, size_t size) { return name((const type *)thing, text, size); }
TEXT(amp_machine_text, amp_machine) TEXT(amp_settings_text, amp_settings) TEXT(amp_status_text, amp_status) TEXT(amp_status_json, amp_status)
TEXT(amp_epoch_summary_text, amp_epoch_summary) TEXT(amp_numerics_text, amp_numerics_report) TEXT(amp_verify_text, amp_verify_report)
TEXT(amp_gradcheck_text, amp_gradcheck_report) TEXT(amp_advice_text, amp_advice) TEXT(amp_tune_text, amp_tune_report)

static union {
    amp_machine machine; amp_settings settings; amp_status status; amp_epoch_summary summary; amp_numerics_report numerics;
    amp_verify_report verify; amp_gradcheck_report gradcheck; amp_advice advice; amp_tune_report tune;
} thing;
static void no_more(void) {}
static void fill_machine(void) { CHECK_OK(amp_machine_probe(&thing.machine)); }
static void fill_status(void) {
    amp_context *amp;
    CHECK_OK(amp_open(&amp, NULL));
    CHECK_OK(amp_status_get(amp, NULL, 0, &thing.status));
    amp_close(amp);
}
static void fill_summary(void) { thing.summary.mixed.epoch = thing.summary.full.epoch = 2; thing.summary.speedup = 1.5; }
static void fill_numerics(void) {
    static amp_numerics_row rows[2];
    rows[0].name = "fc.weight";                         /* the other is a range without a name */
    thing.numerics.rows = rows; thing.numerics.n_rows = 2;
}
static void fill_verify(void) { thing.verify.n_rows = AMP_VERIFY_ROWS; }
static void fill_tune(void) { thing.tune.n_rows = AMP_TUNE_ROWS; }
static void fill_gradcheck(void) { thing.gradcheck.passed = 1; snprintf(thing.gradcheck.worst, sizeof thing.gradcheck.worst, "x"); }
static void fill_advice(void) { thing.advice.batch = 8; }

#define ROW(name, fill) {#name, call_##name, fill}
static const struct { const char *name; text_call call; void (*fill)(void); } texts[] = {
    ROW(amp_machine_text, fill_machine), ROW(amp_settings_text, no_more), ROW(amp_status_text, fill_status), ROW(amp_status_json, fill_status),
    ROW(amp_epoch_summary_text, fill_summary), ROW(amp_numerics_text, fill_numerics), ROW(amp_verify_text, fill_verify),
    ROW(amp_gradcheck_text, fill_gradcheck), ROW(amp_advice_text, fill_advice), ROW(amp_tune_text, fill_tune)};
enum { TEXTS = sizeof texts / sizeof *texts, GUARD = 0x5a };

/* What a text function gives for one thing, at every size that may matter. */
static void measure(text_call call, const char *name) {
    static char whole[65536], cut[65536];
    size_t length = call(&thing, NULL, 0);
    size_t sizes[] = {1, 2, 3, length / 2, length, length + 1, length + 100};
    CHECK_EQ(call(&thing, NULL, 100), length);
    CHECK_MSG(length > 0 && length + 100 < sizeof whole, "%s: %zu", name, length);
    memset(whole, GUARD, sizeof whole);
    CHECK_EQ(call(&thing, whole, sizeof whole), length);
    CHECK_EQ(strlen(whole), length);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t kept = sizes[i] - 1 < length ? sizes[i] - 1 : length;
        memset(cut, GUARD, sizeof cut);
        CHECK_MSG(call(&thing, cut, sizes[i]) == length && strlen(cut) == kept && memcmp(cut, whole, kept) == 0 && cut[sizes[i]] == GUARD, "%s into %zu bytes", name, sizes[i]);
    }
    memset(cut, GUARD, sizeof cut);
    CHECK(call(&thing, cut, 0) == length && cut[0] == GUARD);
}

TEST(texts_as_snprintf) {
    for (int i = 0; i < TEXTS; i++) {
        char text[8] = "before";
        CHECK_MSG(texts[i].call(NULL, NULL, 0) == 0, "%s(NULL, NULL, 0)", texts[i].name);
        CHECK_MSG(texts[i].call(NULL, text, sizeof text) == 0 && text[0] == 0, "%s(NULL, text)", texts[i].name);
        memset(&thing, 0, sizeof thing);
        measure(texts[i].call, texts[i].name);          /* all zero: nothing was ever written into it */
        texts[i].fill();
        measure(texts[i].call, texts[i].name);
    }
}

TEST(no_text_function_is_forgotten) {
    const char *at = api;
    int seen = 0;
    if (!*api) SKIP("amp.h is not in this folder");
    while ((at = strstr(at, "\nAMP_API size_t amp_")) != NULL) {
        char name[64];
        int known = 0;
        sscanf(at += 16, "%63[a-z0-9_]", name);
        if (memchr(at, ';', strcspn(at, "\n")) && !strstr(name, "_text") && !strstr(name, "_json")) continue;
        for (int i = 0; i < TEXTS; i++) known |= !strcmp(texts[i].name, name);
        CHECK_MSG(known, "%s", name);
        seen++;
    }
    CHECK_EQ(seen, TEXTS);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    read_api();
    RUN(texts_as_snprintf);
    RUN(no_text_function_is_forgotten);
    return TEST_END();
}
