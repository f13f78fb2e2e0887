/* t_context.c - tests the base functions, the machine, and the context.  Every result code is provoked once.  Other tests
 * cover choices and their reasons, settings, memory accounting, the log, parameters and threads. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "test.h"
#if !defined(_WIN32)
#  include <fnmatch.h>
#  include <glob.h>
#endif

static amp_context *context_open_with(amp_desc *desc) {
    amp_context *amp = NULL;
    CHECK_OK(amp_open(&amp, desc));
    return amp;
}

static int context_says(const char *text) {
    if (strstr(amp_last_error(), text) != NULL) return 1;
    printf("      last error: %s\n", amp_last_error());
    return 0;
}

/* ---- results */

TEST(results_have_texts_and_hints) {
    CHECK(strcmp(amp_result_text(AMP_OK), "success") == 0);
    CHECK(strcmp(amp_result_text((amp_result)9999), "unknown result") == 0);
#define HAS_HINT(name, number, text, hint) CHECK(strlen(amp_result_text(name)) > 0); CHECK(name == AMP_OK || strlen(amp_result_hint(name)) > 0);
    AMP_RESULTS(HAS_HINT)
}

/* The numbers are for ever: this list only grows. */
TEST(result_numbers_never_change) {
    static const int numbers[] = {0, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 201, 202, 203, 204, 205, 206, 207, 301, 302,
                                  401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 501, 502, 503};
    static const int now[] = {
#define NUMBER(name, number, text, hint) (int)name,
        AMP_RESULTS(NUMBER)
    };
    CHECK(sizeof now >= sizeof numbers);
    CHECK(memcmp(now, numbers, sizeof numbers) == 0);
}

TEST(last_error_names_field_value_and_mend) {
    amp_desc desc;
    amp_context *amp = (amp_context *)&desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = -3;
    CHECK_ERR(amp_open(&amp, &desc), AMP_ERR_RANGE);
    CHECK(amp == NULL);
    CHECK(context_says("AMP0102 amp_open: .threads = -3, must be 1 to 1024"));
}

/* The hint says what to do where the text does not. */
TEST(hint_where_the_text_does_not_say_what_to_do) {
    amp_state *state = NULL;
    char text[300];
    CHECK_ERR(amp_state_load(&state, NULL, "build/none"), AMP_ERR_OPEN);
    snprintf(text, sizeof text, "AMP0401 amp_state_load: build/none: %s; %s", strerror(ENOENT), amp_result_hint(AMP_ERR_OPEN));
    CHECK(strcmp(amp_last_error(), text) == 0);
    CHECK_ERR(amp_state_load(&state, NULL, NULL), AMP_ERR_NULL);
    CHECK(strcmp(amp_last_error(), "AMP0101 amp_state_load: path is NULL: pass the file's name") == 0);
}

/* A NULL is refused by the name of what is NULL, with what belongs there. */
TEST(null_is_refused_by_name) {
    amp_context *amp = context_open_with(NULL);
    amp_optimizer *optimizer = NULL;
    amp_recovery *recovery = NULL;
    amp_recovery_desc desc;
    memset(&desc, 0, sizeof desc);
    CHECK_ERR(amp_optimizer_create(NULL, &optimizer, NULL), AMP_ERR_NULL);
    CHECK(context_says("amp_optimizer_create: amp is NULL: pass the context that amp_open made"));
    CHECK_ERR(amp_optimizer_create(amp, NULL, NULL), AMP_ERR_NULL);
    CHECK(context_says("out is NULL: pass the address of the variable that takes the result"));
    CHECK_ERR(amp_optimizer_create(amp, &optimizer, NULL), AMP_ERR_NULL);
    CHECK(context_says("desc is NULL: pass the address of an amp_optimizer_desc"));
    CHECK_ERR(amp_recovery_create(amp, &recovery, &desc), AMP_ERR_NULL);
    CHECK(context_says(".params is NULL: set it to an array of .n_params parameters"));
    amp_close(amp);
}

/* What other languages call, with what their structs were made from. */
TEST(a_stale_header_is_an_error) {
    const amp_header none = {AMP_ABI, NULL}, packed = {AMP_ABI + 8, "packed.c"}, pair[] = {{AMP_ABI, "good.c"}, {AMP_ABI - 8, NULL}};
    amp_context *amp;
    CHECK_OK(amp_open_abi(&amp, NULL, &none, 1));
    amp_close(amp);
    CHECK_EQ(amp_open_abi(&amp, NULL, &packed, 1), AMP_ERR_VERSION);
    CHECK(amp == NULL);
    CHECK_MSG(strstr(amp_last_error(), "AMP0105 amp_open: packed.c was compiled against this version, but struct sizes differ: compiled with other flags or "
                     "packing; ") != NULL, "%s", amp_last_error());
    CHECK_EQ(amp_open_abi(&amp, NULL, pair, 2), AMP_ERR_VERSION);
    CHECK(strstr(amp_last_error(), "AMP0105 amp_open: a file was compiled against this version, but") != NULL);
    CHECK_OK(amp_open_abi(&amp, NULL, pair, 1));
    amp_close(amp);
    CHECK_EQ(amp_open_abi(&amp, NULL, NULL, 1), AMP_ERR_NULL);
    CHECK_EQ(amp_open_abi(&amp, NULL, pair, 0), AMP_ERR_NULL);
}

/* ---- machine */

static amp_machine machine_with(const char *kind, int major, int minor, int fp16, int bf16, int tf32) {
    amp_machine m;
    memset(&m, 0, sizeof m);
    snprintf(m.device.kind, sizeof m.device.kind, "%s", kind);
    snprintf(m.device.name, sizeof m.device.name, "test device");
    m.device.cc_major = major; m.device.cc_minor = minor;
    m.device.fp16 = fp16; m.device.bf16 = bf16; m.device.tf32 = tf32;
    return m;
}

TEST(choice_follows_the_device) {
    static const struct { const char *kind; int major, minor, fp16, bf16; amp_dtype dtype; int scaler; } rows[] = {
        {"cuda", 9, 0, 1, 1, AMP_BF16, 0}, {"cuda", 8, 6, 1, 1, AMP_BF16, 0}, {"cuda", 8, 0, 1, 1, AMP_BF16, 0},
        {"cuda", 7, 5, 1, 0, AMP_F16, 1}, {"cuda", 7, 0, 1, 0, AMP_F16, 1}, {"cuda", 6, 1, 0, 0, AMP_F32, 0},
        {"cpu", 0, 0, 0, 1, AMP_F32, 0}, {"cpu", 0, 0, 0, 0, AMP_F32, 0}};      /* no rate is known */
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_machine m = machine_with(rows[i].kind, rows[i].major, rows[i].minor, rows[i].fp16, rows[i].bf16, 0);
        amp_choice choice;
        CHECK_OK(amp_choose(&m, AMP_DTYPE_DEFAULT, 0, &choice));
        CHECK_EQ(choice.dtype, rows[i].dtype);
        CHECK_EQ(choice.scaler, rows[i].scaler);
        CHECK(strlen(choice.reason) > 10);
    }
}

/* Cores of this kind, with or without the instructions that a hypervisor may hide. */
static amp_machine machine_of(const char *vendor, int family, int model, int stepping, int avx512, int dot, int tiles) {
    amp_machine m;
    memset(&m, 0, sizeof m);
    snprintf(m.cpu.vendor, sizeof m.cpu.vendor, "%s", vendor);
    m.cpu.family = family; m.cpu.model = model; m.cpu.stepping = stepping;
    m.cpu.avx2 = 1; m.cpu.avx512 = avx512; m.cpu.avx512_bf16 = dot; m.cpu.amx_bf16 = tiles;
    ampi_rates_fill(&m);
    m.cpu.path = ampi_fastest_path(&m);
    ampi_cpu_as_device(&m.cpu, &m.device);
    return m;
}

#define AMD "AuthenticAMD"
#define INTEL "GenuineIntel"
/* Kernel, choice and reason for every kind of cores, also where the system hides instructions that they have. */
TEST(cores_of_the_table) {
    static const struct {
        const char *name, *vendor;
        int family, model, stepping, avx512, dot, tiles;
        amp_cpu_path path; amp_dtype dtype; const char *says;
    } rows[] = {
        {"Zen or Zen 2", AMD, 0x17, 0x31, 0, 0, 0, 0, AMP_CPU_AVX2, AMP_F32, "0.97 times its products (AVX2)"},
        {"Zen 3", AMD, 0x19, 0x01, 1, 0, 0, 0, AMP_CPU_AVX2, AMP_F32, "0.97 times its products (AVX2)"},
        {"Zen 3", AMD, 0x19, 0x50, 0, 0, 0, 0, AMP_CPU_AVX2, AMP_F32, "0.97 times its products (AVX2)"},
        {"Zen 4", AMD, 0x19, 0x11, 1, 1, 1, 0, AMP_CPU_AVX512_BF16, AMP_BF16, "1.9 times fp32's products here (AVX-512 BF16)"},
        {"Zen 4", AMD, 0x19, 0xa0, 1, 1, 1, 0, AMP_CPU_AVX512_BF16, AMP_BF16, "1.9 times"},
        {"Zen 4", AMD, 0x19, 0x61, 2, 1, 0, 0, AMP_CPU_AVX512, AMP_F32, "0.97 times its products (AVX-512)"},
        {"Zen 5", AMD, 0x1a, 0x02, 1, 1, 1, 0, AMP_CPU_AVX512_BF16, AMP_BF16, "1.9 times"},
        {"Haswell", INTEL, 6, 0x3f, 2, 0, 0, 0, AMP_CPU_AVX2, AMP_F32, "AVX2"},
        {"Skylake-X", INTEL, 6, 0x55, 4, 1, 0, 0, AMP_CPU_AVX512, AMP_F32, "AVX-512"},
        {"Cascade Lake", INTEL, 6, 0x55, 7, 1, 0, 0, AMP_CPU_AVX512, AMP_F32, "AVX-512"},
        {"Cooper Lake", INTEL, 6, 0x55, 11, 1, 1, 0, AMP_CPU_AVX512_BF16, AMP_BF16, "1.5 times"},
        {"Ice Lake", INTEL, 6, 0x6a, 6, 1, 0, 0, AMP_CPU_AVX512, AMP_F32, "AVX-512"},
        {"Sapphire Rapids", INTEL, 6, 0x8f, 8, 1, 1, 1, AMP_CPU_AMX, AMP_BF16, "4 times fp32's products here (AMX and AVX-512)"},
        {"Sapphire Rapids", INTEL, 6, 0x8f, 8, 1, 1, 0, AMP_CPU_AVX512, AMP_F32, "0.97 times its products (AVX-512)"},
        {"Emerald Rapids", INTEL, 6, 0xcf, 2, 1, 1, 1, AMP_CPU_AMX, AMP_BF16, "4 times"},
        {"Emerald Rapids", INTEL, 6, 0xcf, 2, 1, 1, 0, AMP_CPU_AVX512, AMP_F32, "0.97 times"},
        {"Granite Rapids", INTEL, 6, 0xad, 1, 1, 1, 1, AMP_CPU_AMX, AMP_BF16, "4 times"},
        {"Granite Rapids", INTEL, 6, 0xad, 1, 1, 1, 0, AMP_CPU_AVX512, AMP_F32, "0.97 times"},
        {"Alder Lake (hybrid)", INTEL, 6, 0x97, 2, 0, 0, 0, AMP_CPU_AVX2, AMP_F32, "AVX2"},
        {"Sierra Forest", INTEL, 6, 0xaf, 3, 0, 0, 0, AMP_CPU_AVX2, AMP_F32, "AVX2"},
        /* not in the table: careful */
        {"", INTEL, 6, 0xff, 0, 1, 1, 0, AMP_CPU_AVX512, AMP_F32, "0.97 times"},
        {"", INTEL, 6, 0xff, 0, 1, 1, 1, AMP_CPU_AMX, AMP_BF16, "2 times"},
        {"", AMD, 0x1b, 0x00, 0, 1, 1, 0, AMP_CPU_AVX512, AMP_F32, "0.97 times"},
        {"", "HygonGenuine", 0x18, 0x00, 0, 0, 0, 0, AMP_CPU_AVX2, AMP_F32, "AVX2"},
        {"", "", 0, 0, 0, 1, 1, 0, AMP_CPU_AVX512, AMP_F32, "0.97 times"}};
    const int n = (int)(sizeof rows / sizeof *rows);
    for (int i = 0; i < n; i++) {
        amp_machine m = machine_of(rows[i].vendor, rows[i].family, rows[i].model, rows[i].stepping, rows[i].avx512,
                                   rows[i].dot, rows[i].tiles);
        amp_choice choice;
        CHECK_OK(amp_choose(&m, AMP_DTYPE_DEFAULT, 0, &choice));
        CHECK_MSG(strcmp(m.cores, rows[i].name) == 0 && m.cpu.path == rows[i].path && choice.dtype == rows[i].dtype,
                  "row %d, %s: %s, path %d, %s", i, rows[i].name, m.cores, (int)m.cpu.path, amp_dtype_name(choice.dtype));
        CHECK_MSG(strstr(choice.reason, rows[i].says) != NULL, "row %d: %s", i, choice.reason);
        CHECK(choice.dtype == AMP_F32 ? choice.rate == 1 : choice.rate > 1);
        CHECK(choice.emulated == 0 && choice.fell_back == 0);
    }
    for (int i = 0; i < AMPI_CPU_KINDS; i++) {      /* each with bf16 instructions is one of those above */
        const ampi_cpu_kind *row = &ampi_cpu_kinds[i];
        int k = 0;
        CHECK(row->first <= row->last && (row->dot > 0 || row->tiles <= 0));
        while (k < n && strcmp(rows[k].name, row->name) != 0) k++;
        CHECK_MSG(k < n || !(row->dot > 0) || row->family == 0x41, "%s has no row in the test", row->name);
    }
}

/* Arm's cores, whose rates come from published throughputs. */
TEST(cores_of_arm64) {
    static const struct { const char *name, *vendor; int family, model, bf16; amp_cpu_path path; const char *says; } rows[] = {
        {"Neoverse N1", "Arm", 0x41, 0xd0c, 0, AMP_CPU_NEON, "0.97 times its products (NEON)"},
        {"Neoverse V1", "Arm", 0x41, 0xd40, 1, AMP_CPU_NEON_BF16, "1.5 times fp32's products here (NEON BF16)"},
        {"Neoverse V1", "Arm", 0x41, 0xd40, 0, AMP_CPU_NEON, "0.97 times"},
        {"Neoverse N2", "Arm", 0x41, 0xd49, 1, AMP_CPU_NEON_BF16, "1.5 times"},
        {"Neoverse V2", "Arm", 0x41, 0xd4f, 1, AMP_CPU_NEON_BF16, "1.5 times"},
        {"Apple", "Apple", 0x61, 0, 1, AMP_CPU_NEON, "0.97 times"},
        {"Apple M1", "Apple", 0x61, 0x23, 0, AMP_CPU_NEON, "0.97 times"},
        {"Apple M2", "Apple", 0x61, 0x33, 1, AMP_CPU_NEON, "0.97 times"},
        {"", "Arm", 0x41, 0xd03, 0, AMP_CPU_NEON, "0.97 times"},
        {"", "", 0x51, 1, 1, AMP_CPU_NEON, "0.97 times"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        amp_machine m;
        amp_choice choice;
        char text[2048];
        memset(&m, 0, sizeof m);
        snprintf(m.cpu.vendor, sizeof m.cpu.vendor, "%s", rows[i].vendor);
        m.cpu.family = rows[i].family; m.cpu.model = rows[i].model;
        m.cpu.neon = 1; m.cpu.neon_bf16 = rows[i].bf16;
        ampi_rates_fill(&m);
        m.cpu.path = ampi_fastest_path(&m);
        ampi_cpu_as_device(&m.cpu, &m.device);
        CHECK_OK(amp_choose(&m, AMP_DTYPE_DEFAULT, 0, &choice));
        CHECK_MSG(strcmp(m.cores, rows[i].name) == 0 && m.cpu.path == rows[i].path, "row %d: %s, path %d", (int)i, m.cores, (int)m.cpu.path);
        CHECK_EQ(choice.dtype, rows[i].path == AMP_CPU_NEON_BF16 ? AMP_BF16 : AMP_F32);
        CHECK_MSG(strstr(choice.reason, rows[i].says) != NULL, "row %d: %s", (int)i, choice.reason);
        CHECK(m.rates[AMP_CPU_AVX2].bf16 == 0 && amp_machine_text(&m, text, sizeof text) < sizeof text);
        CHECK_MSG(strstr(text, rows[i].bf16 ? "neon yes, neon_bf16 yes, neon_fp16 no" : "neon yes, neon_bf16 no") != NULL, "%s", text);
    }
}

/* The path in use decides.  One that multiplies slower than fp32 says so when it is asked for. */
TEST(choice_counts_the_path) {
    amp_machine m = machine_of(INTEL, 6, 0xcf, 2, 1, 1, 1);
    amp_choice choice;
    for (int path = AMP_CPU_SCALAR; path < AMP_CPU_PATHS; path++) {
        m.cpu.path = (amp_cpu_path)path;
        ampi_cpu_as_device(&m.cpu, &m.device);
        CHECK_OK(amp_choose(&m, AMP_DTYPE_DEFAULT, 0, &choice));
        CHECK(choice.dtype == (path == AMP_CPU_AMX ? AMP_BF16 : AMP_F32));
        CHECK_OK(amp_choose(&m, AMP_BF16, 0, &choice));
        CHECK(choice.dtype == AMP_BF16 && choice.emulated == !ampi_path_has_bf16((amp_cpu_path)path));
        if (path == AMP_CPU_AVX512_BF16)
            CHECK_MSG(strstr(choice.reason, "0.5 times fp32's products: fp32 is faster"), "%s", choice.reason);
        CHECK_OK(amp_choose(&m, AMP_F16, 0, &choice));
        CHECK(choice.emulated && choice.scaler && strstr(choice.reason, "fp32 needs no loss scaler") != NULL);
        CHECK(strlen(choice.reason) < sizeof choice.reason - 1);
    }
}

TEST(choice_refuses_or_falls_back_by_name) {
    amp_machine volta = machine_with("cuda", 7, 0, 1, 0, 0), cpu = machine_with("cpu", 0, 0, 0, 0, 0);
    amp_choice choice;
    CHECK_ERR(amp_choose(&volta, AMP_BF16, 0, &choice), AMP_ERR_UNSUPPORTED);
    CHECK(context_says("dtype bf16") && context_says("7.0"));
    CHECK_OK(amp_choose(&volta, AMP_BF16, 1, &choice));
    CHECK_EQ(choice.dtype, AMP_F16);
    CHECK_EQ(choice.fell_back, 1);
    CHECK_ERR(amp_choose(&cpu, AMP_E4M3, 0, &choice), AMP_ERR_UNSUPPORTED);
    CHECK(context_says("fp8"));
    CHECK_ERR(amp_choose(&cpu, AMP_I32, 0, &choice), AMP_ERR_DTYPE);
    CHECK_OK(amp_choose(&cpu, AMP_F16, 0, &choice));
    CHECK_EQ(choice.emulated, 1);
    CHECK(strstr(choice.reason, "emulated") != NULL);
    CHECK_ERR(amp_choose(NULL, AMP_F32, 0, &choice), AMP_ERR_NULL);
}

TEST(machine_is_described) {
    amp_machine m;
    char text[2048], small[8];
    CHECK_OK(amp_machine_probe(&m));
    CHECK(m.cpu.cores >= 1);
    CHECK(m.cpu.memory > 0);
    CHECK(m.cpu.path >= AMP_CPU_SCALAR);
    CHECK(strcmp(m.device.kind, "cpu") == 0);
    CHECK(amp_machine_text(&m, text, sizeof text) == strlen(text));
    CHECK(strstr(text, m.cpu.name) != NULL);
    CHECK(amp_machine_text(&m, small, sizeof small) > sizeof small && strlen(small) == 7);
}

/* ---- context */

/* What /sys/devices/system/cpu/cpu0/cache says, in a folder of the test's. */
static void cache_index(const char *tree, int index, const char *level, const char *type, const char *size) {
    const char *names[] = {"level", "type", "size"}, *lines[] = {level, type, size};
    char path[100];
    int i;
    snprintf(path, sizeof path, "%s/index%d", tree, index);
    CHECK(mkdir(path, 0700) == 0);
    for (i = 0; i < 3; i++) {
        FILE *f;
        snprintf(path, sizeof path, "%s/index%d/%s", tree, index, names[i]);
        f = lines[i] != NULL ? fopen(path, "w") : NULL;
        if (f != NULL) { fprintf(f, "%s\n", lines[i]); fclose(f); }
    }
}
TEST(caches_are_those_that_linux_lists) {
    SKIP_ON_WINDOWS("/proc and /sys");
    char tree[] = "/tmp/amp_caches_XXXXXX", command[64];
    amp_cpu_info cpu;
    memset(&cpu, 0, sizeof cpu);
    if (mkdtemp(tree) == NULL) SKIP("no temporary folder");
    cpu.l1d = 1; cpu.l2 = 2; cpu.l3 = 3;
    ampi_probe_caches(&cpu, tree);                          /* no list: what sysconf says stays */
    CHECK(cpu.l1d == 1 && cpu.l2 == 2 && cpu.l3 == 3);
    cache_index(tree, 0, "1", "Data", "48K");
    cache_index(tree, 1, "1", "Instruction", "32K");
    cache_index(tree, 2, "2", "Unified", "1280K");
    cache_index(tree, 3, "3", "Unified", "36M");
    cache_index(tree, 4, "4", "Unified", "128M");
    ampi_probe_caches(&cpu, tree);
    CHECK(cpu.l1d == 48 << 10 && cpu.l2 == 1280 << 10 && cpu.l3 == 36 << 20);
    cache_index(tree, 5, "3", "Unified", NULL);             /* lines that are not there, or nonsense */
    cache_index(tree, 6, "3", "Unified", "-4K");
    cache_index(tree, 7, "x", "Unified", "4K");
    cache_index(tree, 8, NULL, NULL, "4K");
    cache_index(tree, 9, "3", "Unified", "99999999999999999999K");
    ampi_probe_caches(&cpu, tree);
    CHECK(cpu.l1d == 48 << 10 && cpu.l2 == 1280 << 10 && cpu.l3 == 36 << 20);
    snprintf(command, sizeof command, "rm -rf '%s'", tree);
    CHECK(system(command) == 0);
}

/* Writes text to TREE/NAME, in a folder that is made if need be. */
static void cgroup_file(const char *tree, const char *name, const char *text) {
    char path[200];
    FILE *f;
    snprintf(path, sizeof path, "mkdir -p \"$(dirname '%s/%s')\"", tree, name);
    CHECK(system(path) == 0);
    snprintf(path, sizeof path, "%s/%s", tree, name);
    f = fopen(path, "w");
    CHECK(f != NULL);
    if (f != NULL) { fputs(text, f); fclose(f); }
}
static int32_t quota_of(const char *tree, const char *list) {
    char path[100];
    cgroup_file(tree, "list", list);
    snprintf(path, sizeof path, "%s/list", tree);
    return ampi_quota_cores(path, tree);
}
/* ---- names that match a pattern */

static void match_as_fnmatch(const char *pattern, const char *name) {
    int wanted = fnmatch(pattern, name, FNM_PERIOD) == 0;
    CHECK_MSG(ampi_matches(pattern, name) == wanted, "\"%s\" and \"%s\": must be %d", pattern, name, wanted);
}

/* The patterns are sequences of pieces, and the names of characters, all up to a length and at random beyond it. */
TEST(names_match_as_by_fnmatch) {
    SKIP_ON_WINDOWS("fnmatch");
    static const char *const pieces[] = {"a", "b", ".", "*", "?", "[ab]", "[!a]", "[^b]", "[a-c]", "[]a]", "[!]]", "[a-]", "\\*",
                                         "\\a", "[[:digit:]]", "[[:alpha:]_]", "[[.-.]a]", "[[=a=]]", "[\\]]", "[", "]", "-", "[c-a]"};
    static const char *const names[] = {"", "a", "b", "*", ".", "]", "-", "[", "\\", "7", "_", "\xc3", "[a", "A"};
    enum { PIECES = sizeof pieces / sizeof *pieces, NAMES = sizeof names / sizeof *names };
    char pattern[128], name[64];
    uint32_t i, j, k, hits = 0;
    for (i = 0; i < PIECES * PIECES; i++)
        for (j = 0; j < NAMES * NAMES; j++) {
            snprintf(pattern, sizeof pattern, "%s%s", pieces[i / PIECES], pieces[i % PIECES]);
            snprintf(name, sizeof name, "%s%s", names[j / NAMES], names[j % NAMES]);
            match_as_fnmatch(pattern, name);
        }
    for (i = 0; i < 200000; i++) {
        pattern[0] = name[0] = 0;
        for (k = amp_random_u32(1, 3 * i) % 8; k > 0; k--) strcat(pattern, pieces[amp_random_u32(2, 16 * i + k) % PIECES]);
        for (k = amp_random_u32(1, 3 * i + 1) % 9; k > 0; k--) strcat(name, names[amp_random_u32(3, 16 * i + k) % 5]);
        match_as_fnmatch(pattern, name);
        hits += ampi_matches(pattern, name) != 0;
    }
    CHECK_MSG(hits > 2000, "%u hits", hits);
}
/* Each "*" more would multiply the time of a search that tries all. */
TEST(patterns_of_many_stars_take_no_time) {
    char pattern[201], name[2001];
    int i;
    memset(name, 'a', 2000);
    name[2000] = 0;
    for (i = 0; i < 200; i++) pattern[i] = "*a"[i % 2];
    pattern[199] = 'b';
    pattern[200] = 0;
    CHECK(!ampi_matches(pattern, name));
    pattern[199] = 'a';
    CHECK(ampi_matches(pattern, name));
}

TEST(cpu_quotas_limit_the_cores) {
    SKIP_ON_WINDOWS("/proc and /sys");
    char tree[] = "/tmp/amp_quota_XXXXXX", command[64], long_list[6000];
    if (mkdtemp(tree) == NULL) SKIP("no temporary folder");
    CHECK_EQ(ampi_quota_cores("/nowhere/list", tree), 0);
    cgroup_file(tree, "cpu.max", "max 100000\n");
    cgroup_file(tree, "a/cpu.max", "250000 100000\n");
    cgroup_file(tree, "a/b/cpu.max", "400000 100000\n");
    cgroup_file(tree, "a/b/c/cpu.max", "100000 100000\n");
    cgroup_file(tree, "d/cpu.max", "1 100000\n");
    CHECK_EQ(quota_of(tree, "0::/\n"), 0);
    CHECK_EQ(quota_of(tree, "0::/a\n"), 3);                  /* rounded up */
    CHECK_EQ(quota_of(tree, "0::/a/b\n"), 3);                /* the folder's above is smaller */
    CHECK_EQ(quota_of(tree, "0::/a/b/c\n"), 1);
    CHECK_EQ(quota_of(tree, "0::/a/gone/gone\n"), 3);        /* a path that this mount does not have */
    CHECK_EQ(quota_of(tree, "5:memory:/d\n0::/a"), 3);
    CHECK_EQ(quota_of(tree, "0::/d\n"), 1);
    cgroup_file(tree, "cpu/cpu.cfs_quota_us", "-1\n");       /* version 1 */
    cgroup_file(tree, "cpu/cpu.cfs_period_us", "100000\n");
    cgroup_file(tree, "cpu/e/cpu.cfs_quota_us", "150000\n");
    cgroup_file(tree, "cpu/e/cpu.cfs_period_us", "50000\n");
    cgroup_file(tree, "cpu/f/cpu.cfs_quota_us", "150000\n");
    CHECK_EQ(quota_of(tree, "1:cpu:/\n0::/\n"), 0);
    CHECK_EQ(quota_of(tree, "1:cpu,cpuacct:/e\n0::/\n"), 3);
    CHECK_EQ(quota_of(tree, "1:cpuacct,cpu:/e/g\n0::/\n"), 3);
    CHECK_EQ(quota_of(tree, "1:cpuset:/e\n2:cpuacct:/e,cpu,\n"), 0);
    CHECK_EQ(quota_of(tree, "1:cpu:/f\n"), 0);               /* no period */
    CHECK_EQ(quota_of(tree, "0::/d\n1:cpu:/e\n"), 1);
    CHECK_EQ(quota_of(tree, ""), 0);                         /* nonsense */
    CHECK_EQ(quota_of(tree, "\n\n:\n::\n:::\n0:\n0::\n0::a\n"), 0);
    memset(long_list, '/', sizeof long_list - 1);
    long_list[sizeof long_list - 1] = 0;
    memcpy(long_list, "0::", 3);
    CHECK_EQ(quota_of(tree, long_list), 0);
    snprintf(command, sizeof command, "rm -rf '%s'", tree);
    CHECK(system(command) == 0);
    CHECK_EQ(ampi_quota("max 100000"), 0);   CHECK_EQ(ampi_quota("-1 100000"), 0);  CHECK_EQ(ampi_quota(""), 0);
    CHECK_EQ(ampi_quota("100000"), 0);       CHECK_EQ(ampi_quota("100000 0"), 0);   CHECK_EQ(ampi_quota("x 100000"), 0);
    CHECK_EQ(ampi_quota("100000 100000"), 1); CHECK_EQ(ampi_quota("100001 100000"), 2);
    CHECK_EQ(ampi_quota("99999999999999999999 1"), INT32_MAX);
    CHECK_EQ(ampi_quota("100000 -5"), 0);
}

TEST(defaults_are_filled_in) {
    amp_context *amp = context_open_with(NULL);
    amp_desc d;
    amp_choice choice;
    CHECK_OK(amp_query(amp, &d));
    CHECK(d.dtype != AMP_DTYPE_DEFAULT && d.level == AMP_LEVEL_O1 && d.policy == AMP_POLICY_FUSED && d.mode == AMP_MODE_TRAINING);
    CHECK(d.threads >= 1 && d.backend == amp_cpu() && d.cpu_path != AMP_CPU_DEFAULT);
    CHECK_OK(amp_query_choice(amp, &choice));
    CHECK_EQ(choice.dtype, d.dtype);
    amp_close(amp);
    amp_close(NULL);
}

TEST(levels_decide_storage) {
    static const struct { amp_level level; amp_dtype weight, norm; } rows[] = {
        {AMP_LEVEL_O0, AMP_F32, AMP_F32}, {AMP_LEVEL_O1, AMP_F32, AMP_F32},
        {AMP_LEVEL_O2, AMP_BF16, AMP_F32}, {AMP_LEVEL_O3, AMP_BF16, AMP_BF16}};
    for (size_t i = 0; i < 4; i++) {
        amp_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.level = rows[i].level; desc.dtype = AMP_BF16;
        amp_context *amp = context_open_with(&desc);
        CHECK_EQ(amp_param_dtype(amp, 0), rows[i].weight);
        CHECK_EQ(amp_param_dtype(amp, 1), rows[i].norm);
        amp_close(amp);
    }
}

TEST(switching_the_dtype) {
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_BF16;
    amp_context *amp = context_open_with(&desc);
    CHECK_OK(amp_set_dtype(amp, AMP_F16));
    CHECK_ERR(amp_set_dtype(amp, AMP_E5M2), AMP_ERR_UNSUPPORTED);
    amp_query(amp, &desc);
    CHECK_EQ(desc.dtype, AMP_F16);
    amp_close(amp);
    memset(&desc, 0, sizeof desc);
    desc.dtype = AMP_BF16; desc.level = AMP_LEVEL_O2;
    amp = context_open_with(&desc);
    CHECK_ERR(amp_set_dtype(amp, AMP_F16), AMP_ERR_CONFLICT);
    CHECK(context_says("O1"));
    amp_close(amp);
}

static void *device_alloc(void *user, size_t bytes, int32_t device, void *stream) {
    (void)user; (void)bytes; (void)device; (void)stream;
    return NULL;
}
static void device_free(void *user, void *ptr, size_t bytes, int32_t device, void *stream) {
    (void)user; (void)ptr; (void)bytes; (void)device; (void)stream;
}

TEST(settings_out_of_range) {
    amp_context *amp;
    amp_backend other = *amp_cpu();
#define REFUSED(field, value, result) \
    do { amp_desc d; memset(&d, 0, sizeof d); d.field = value; CHECK_ERR(amp_open(&amp, &d), result); CHECK(context_says("." #field)); } while (0)
    REFUSED(threads, 1025, AMP_ERR_RANGE);
    REFUSED(device, -1, AMP_ERR_RANGE);
    REFUSED(level, (amp_level)9, AMP_ERR_RANGE);
    REFUSED(policy, (amp_policy)3, AMP_ERR_RANGE);
    REFUSED(mode, (amp_mode)3, AMP_ERR_RANGE);
    REFUSED(autotune, (amp_autotune)3, AMP_ERR_RANGE);
    REFUSED(cache_limit, -1, AMP_ERR_RANGE);
    REFUSED(reducer.rank, 1, AMP_ERR_RANGE);
#undef REFUSED
    {
        amp_desc d;
        memset(&d, 0, sizeof d);
        d.system.free = ampi_os_free;
        CHECK_ERR(amp_open(&amp, &d), AMP_ERR_CONFLICT);
        memset(&d, 0, sizeof d);
        d.memory.alloc = device_alloc;
        CHECK_ERR(amp_open(&amp, &d), AMP_ERR_CONFLICT);
        d.memory.free = device_free;
        CHECK_ERR(amp_open(&amp, &d), AMP_ERR_CONFLICT);
        CHECK(context_says("set .system"));
        memset(&d, 0, sizeof d);
        d.reducer.world = 2;
        CHECK_ERR(amp_open(&amp, &d), AMP_ERR_NULL);
        memset(&d, 0, sizeof d);
        other.abi++;
        d.backend = &other;
        CHECK_ERR(amp_open(&amp, &d), AMP_ERR_BACKEND);
        memset(&d, 0, sizeof d);
        d.dtype = AMP_E4M3;
        CHECK_ERR(amp_open(&amp, &d), AMP_ERR_UNSUPPORTED);
    }
    CHECK_ERR(amp_open(NULL, NULL), AMP_ERR_NULL);
}

/* ---- memory */

static struct { int64_t live, calls; } heap;
static void *heap_alloc(void *user, size_t size, size_t align) {
    (void)user;
    heap.calls++;
    heap.live += (int64_t)size;
    return ampi_os_alloc(NULL, size, align);
}
static void heap_free(void *user, void *ptr, size_t size) { (void)user; heap.live -= (int64_t)size; free(ptr); }

static amp_desc heap_desc(void) {
    amp_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(&heap, 0, sizeof heap);
    desc.system.alloc = heap_alloc;
    desc.system.free = heap_free;
    return desc;
}

TEST(memory_is_accounted_and_returned) {
    amp_desc desc = heap_desc();
    amp_context *amp = context_open_with(&desc);
    amp_memory_info before, during, after;
    void *blocks[200], *none = &desc;
    amp_memory(amp, &before);
    for (int i = 0; i < 200; i++) CHECK_OK(amp_alloc(amp, &blocks[i], 1000 + i));
    amp_memory(amp, &during);
    CHECK_EQ(during.allocated - before.allocated, 200 * 1000 + 199 * 100);
    for (int i = 0; i < 200; i += 2) amp_free(amp, blocks[i]);
    for (int i = 1; i < 200; i += 2) amp_free(amp, blocks[i]);
    amp_memory(amp, &after);
    CHECK_EQ(after.allocated, before.allocated);
    CHECK(after.peak >= during.allocated);
    amp_memory_reset_peak(amp);
    amp_memory(amp, &after);
    CHECK(after.peak < during.allocated);
    CHECK_OK(amp_alloc(amp, &none, 0));
    CHECK(none == NULL);
    CHECK_ERR(amp_alloc(amp, &none, -1), AMP_ERR_RANGE);
    amp_free(amp, &desc);                       /* not ours: ignored */
    CHECK_OK(amp_alloc(amp, &none, 64));        /* left to amp_close */
    amp_close(amp);
    CHECK_EQ(heap.live, 0);
}

/* ---- log */

static struct { int calls, level, id; char text[256]; } context_logged;
static void logger_write(void *user, amp_log_level level, int id, const char *text) {
    (void)user;
    context_logged.calls++;
    context_logged.level = (int)level;
    context_logged.id = id;
    snprintf(context_logged.text, sizeof context_logged.text, "%s", text);
}

TEST(a_fallback_is_logged_with_its_reason) {
    amp_desc desc;
    amp_context *amp;
    memset(&desc, 0, sizeof desc);
    memset(&context_logged, 0, sizeof context_logged);
    desc.logger.write = logger_write;
    desc.dtype = AMP_E4M3;
    desc.allow_fallback = 1;
    amp = context_open_with(&desc);
    CHECK_EQ(context_logged.calls, 1);
    CHECK_EQ(context_logged.level, AMP_LOG_WARNING);
    CHECK(strstr(context_logged.text, "fp8") != NULL);
    amp_close(amp);
    desc.logger.level = AMP_LOG_OFF;
    amp = context_open_with(&desc);
    CHECK_EQ(context_logged.calls, 1);
    amp_close(amp);
}

/* A state says by which kernels and in which dtype it was trained.  Another context goes on by them if it can, or says so. */
static amp_result saved_and_loaded(amp_desc from, amp_desc to, const int32_t *kernels, amp_cpu_path *path) {
    enum { N = 4 };
    float w[N] = {1, 2, 3, 4}, g[N] = {0};
    amp_param p = {.name = "w"};
    amp_optimizer_desc od = {.params = &p, .n_params = 1};
    amp_context *amp;
    amp_optimizer *opt;
    amp_machine machine;
    amp_state *state;
    amp_result result;
    int32_t said[2] = {-1, -1};
    p.weight = amp_tensor1(w, AMP_F32, N); p.grad = amp_tensor1(g, AMP_F32, N);
    CHECK_OK(amp_state_create(&state, NULL));
    for (int load = 0; load < 2; load++) {
        amp = context_open_with(load ? &to : &from);
        CHECK_OK(amp_param_register(amp, &p, 1));
        CHECK_OK(amp_optimizer_create(amp, &opt, &od));
        memset(&context_logged, 0, sizeof context_logged);
        if (!load) {
            CHECK_OK(amp_optimizer_save(opt, state, "o"));
            CHECK_OK(amp_state_get(state, "o.kernels", AMP_I32, said, 2));
            CHECK(said[0] == (int)from.cpu_path && said[1] == (int)from.dtype);
            if (kernels != NULL) CHECK_OK(amp_state_put(state, "o.kernels", AMP_I32, kernels, 2));
        } else {
            result = amp_optimizer_load(opt, state, "o");
            CHECK_OK(amp_query_machine(amp, &machine));
            *path = machine.cpu.path;
        }
        amp_optimizer_destroy(opt);
        amp_param_forget(amp, &p, 1);
        amp_close(amp);
    }
    amp_state_destroy(state);
    return result;
}
TEST(a_state_goes_on_by_its_kernels) {
    amp_desc scalar = {.cpu_path = AMP_CPU_SCALAR, .dtype = AMP_F32}, bf16 = {.cpu_path = AMP_CPU_SCALAR, .dtype = AMP_BF16};
    amp_desc any = {.dtype = AMP_F32}, automatic = {0}, own = {.dtype = AMP_F32};
    amp_machine machine;
    amp_cpu_path path;
    int32_t missing[2] = {AMP_CPU_AMX, AMP_BF16};
    CHECK_OK(amp_machine_probe(&machine));
    scalar.logger.write = bf16.logger.write = any.logger.write = automatic.logger.write = own.logger.write = logger_write;
    own.cpu_path = machine.cpu.path;
    CHECK_OK(saved_and_loaded(scalar, any, NULL, &path));
    CHECK(path == AMP_CPU_SCALAR);
    if (machine.cpu.path != AMP_CPU_SCALAR)                 /* narrower kernels are slower */
        CHECK_MSG(context_logged.calls == 1 && context_logged.id == 1113 && strstr(context_logged.text, ".cpu_path") != NULL, "%s", context_logged.text);
    if (machine.cpu.path != AMP_CPU_SCALAR) {
        CHECK_OK(saved_and_loaded(scalar, own, NULL, &path));
        CHECK(path == machine.cpu.path && context_logged.id == 1115 && strstr(context_logged.text, "saved by the kernels of scalar") != NULL);
    }
    automatic.cpu_path = AMP_CPU_SCALAR;
    {                                                       /* auto is fp32 */
        CHECK_OK(saved_and_loaded(bf16, automatic, NULL, &path));
        CHECK(strstr(context_logged.text, "regions computed in bf16; they compute in fp32 here") != NULL);
    }
    any.dtype = AMP_BF16;
    if (!machine.cpu.amx_bf16) {
        CHECK_OK(saved_and_loaded(bf16, any, missing, &path));
        CHECK(path == machine.cpu.path && strstr(context_logged.text, "AMX") != NULL);
    }
    for (int i = 0; i < 4; i++) {
        int32_t wrong[2] = {i == 0 ? -1 : i == 1 ? AMP_CPU_PATHS : AMP_CPU_AVX2, i == 2 ? AMP_I32 : i == 3 ? -5 : AMP_F32};
        CHECK_ERR(saved_and_loaded(scalar, any, wrong, &path), AMP_ERR_RANGE);
        CHECK(path == machine.cpu.path);
    }
}

/* Paths and names may hold anything; errors, log lines and texts stay one line of UTF-8, without what commands a terminal. */
static int is_plain(const char *text) {
    const unsigned char *p = (const unsigned char *)text;
    for (; *p != 0; p++) if (*p < 0x20 || *p == 0x7f || (*p == 0xc2 && p[1] < 0xa0) || *p == 0xff) return 0;
    return 1;
}
TEST(errors_and_log_lines_are_one_line) {
    static const char path[] = "/no/\xc3\xbc\n\x1b[31m\t\x7f\xc2\x9b" "1m\xff\xe2\x82\xac\xe2\x82/.bin";
    amp_desc desc;
    amp_context *amp;
    amp_state *state;
    amp_linear_op op;
    amp_param p;
    amp_tape *tape;
    amp_model *model;
    float w[6] = {1}, x[6] = {70000.0f}, y[4];
    char long_path[700], text[4096];
    int i;
    memset(&desc, 0, sizeof desc); memset(&context_logged, 0, sizeof context_logged); memset(&op, 0, sizeof op); memset(&p, 0, sizeof p);
    CHECK_ERR(amp_state_load(&state, NULL, path), AMP_ERR_OPEN);
    CHECK(is_plain(amp_last_error()));
    CHECK(strstr(amp_last_error(), "/no/\xc3\xbc\?\?[31m\?\?\?\?1m?\xe2\x82\xac?") != NULL);
    for (i = 0; i < 2; i++) {                       /* whatever character the cut goes through */
        memset(long_path, 'a', sizeof long_path);
        for (int k = i; k + 2 < (int)sizeof long_path; k += 2) memcpy(long_path + k, "\xc3\xbc", 2);
        long_path[sizeof long_path - 1] = 0;
        CHECK_ERR(amp_state_load(&state, NULL, long_path), AMP_ERR_OPEN);
        for (const unsigned char *at = (const unsigned char *)amp_last_error(); *at != 0; at += at[0] == 0xc3 ? 2 : 1)
            CHECK(at[0] < 0x80 || (at[0] == 0xc3 && at[1] == 0xbc));
    }
    desc.logger.write = logger_write;
    desc.logger.level = AMP_LOG_DEBUG;
    desc.dtype = AMP_F16;
    amp = context_open_with(&desc);
    CHECK_OK(amp_autocast_begin(amp, NULL));
    op.layer = path;
    p.name = path; p.weight = amp_tensor2(w, AMP_F32, 2, 3);
    op.x = amp_tensor2(x, AMP_F32, 2, 3); op.y = amp_tensor2(y, AMP_F32, 2, 2); op.weight = &p;
    CHECK_OK(amp_linear(amp, &op));
    CHECK(strstr(context_logged.text, "1m?\xe2\x82\xac?") != NULL && is_plain(context_logged.text));
    CHECK_OK(amp_autocast_end(amp));
    CHECK_OK(amp_model_create(amp, &model, 1, 0));
    CHECK(amp_model_param(model, path, 2, 3, AMP_INIT_ONES, 0) != NULL);
    CHECK_OK(amp_tape_create(amp, &tape, NULL));
    CHECK_OK(amp_tape_begin(tape, NULL));
    (void)amp_tape_linear(tape, amp_tape_input(tape, &op.x), amp_model_find(model, path), NULL, AMP_ACT_NONE);
    (void)amp_tape_text(tape, text, sizeof text);
    CHECK(strstr(text, "1m?\xe2\x82\xac?") != NULL);
    for (i = 0; text[i] != 0; i++) if (text[i] == '\n') text[i] = ' ';
    CHECK(is_plain(text));
    CHECK_OK(amp_tape_finish(tape));
    amp_tape_destroy(tape);
    amp_model_destroy(model);
    amp_close(amp);
}

/* ---- parameters */

TEST(parameters) {
    amp_context *amp = context_open_with(NULL);
    static float w[6], g[6];
    amp_param p[2];
    memset(p, 0, sizeof p);
    p[0].name = "a"; p[0].weight = amp_tensor2(w, AMP_F32, 2, 3); p[0].grad = amp_tensor2(g, AMP_F32, 2, 3);
    p[1].name = "a"; p[1].weight = amp_tensor1(w, AMP_F32, 6);
    CHECK_ERR(amp_param_register(amp, p, 2), AMP_ERR_NAME);
    CHECK_EQ(p[0].id, 0);
    p[1].name = "b";
    CHECK_OK(amp_param_register(amp, p, 2));
    CHECK(p[0].id != 0 && p[1].id != 0 && p[0].id != p[1].id);
    CHECK_ERR(amp_param_register(amp, p, 1), AMP_ERR_NAME);
    CHECK_EQ(amp_param_accumulate(&p[0]), 0);
    CHECK_EQ(amp_param_accumulate(&p[0]), 1);
    uint64_t version = p[0].version;
    amp_param_changed(&p[0]);
    CHECK_EQ(p[0].version, version + 1);
    amp_param_forget(amp, p, 2);
    CHECK_EQ(p[0].id, 0);
    p[0].grad = amp_tensor1(g, AMP_F32, 5);
    CHECK_ERR(amp_param_register(amp, p, 1), AMP_ERR_SHAPE);
    p[0].grad = amp_tensor2(g, AMP_BF16, 2, 3);
    CHECK_ERR(amp_param_register(amp, p, 1), AMP_ERR_DTYPE);
    p[0].name = NULL;
    CHECK_ERR(amp_param_register(amp, p, 1), AMP_ERR_NULL);
    amp_close(amp);
}

TEST(tensor_counts) {
    float x[1] = {0};
    amp_tensor t = amp_tensor4(x, AMP_F32, 2, 3, 4, 5);
    CHECK_EQ(amp_tensor_count(&t), 120);
    t.shape[1] = 0;
    CHECK_EQ(amp_tensor_count(&t), 0);
    t.shape[1] = -1;
    CHECK_EQ(amp_tensor_count(&t), -1);
    t = amp_tensor2(x, AMP_F32, (int64_t)1 << 40, (int64_t)1 << 40);
    CHECK_EQ(amp_tensor_count(&t), -1);
    memset(&t, 0, sizeof t);
    CHECK_EQ(amp_tensor_count(&t), 0);
}

TEST(context_patterns) {
    CHECK(ampi_match("blocks.0.*", "blocks.0.attn.weight"));
    CHECK(!ampi_match("blocks.0.*", "blocks.10.attn.weight"));
    CHECK(ampi_match("*.bias", "a.b.bias") && !ampi_match("*.bias", "a.bias.weight"));
    CHECK(ampi_match("h.?.ln*", "h.3.ln_1.weight") && !ampi_match("h.?.ln*", "h.12.ln_1.weight"));
    CHECK(ampi_match("*", "") && ampi_match("", "") && !ampi_match("", "x") && ampi_match("a*b*c", "a__b__b__c"));
}

/* ---- files */

TEST(files) {
    char path[] = "/tmp/amp_test_XXXXXX", pipe[64], rest[96];
    struct stat info;
    glob_t found;
    void *data;
    size_t bytes;
    int fd = mkstemp(path);
    if (fd < 0) SKIP("no temporary folder");
    close(fd);
    CHECK_OK(amp_file_write_atomic(NULL, path, "hello", 5));
    CHECK_OK(amp_file_read_all(NULL, path, &data, &bytes));
    CHECK(bytes == 5 && strcmp((char *)data, "hello") == 0);
    amp_file_free(NULL, data, bytes);
    CHECK_ERR(amp_file_write_atomic(NULL, "/nonexistent/x", "y", 1), AMP_ERR_OPEN);
    CHECK(context_says("/nonexistent/x"));
    CHECK_ERR(amp_file_read_all(NULL, "/nonexistent", &data, &bytes), AMP_ERR_OPEN);
    CHECK_ERR(amp_file_read_all(NULL, "/tmp", &data, &bytes), AMP_ERR_READ);

#if !defined(_WIN32)
    /* A pipe is not replaced, and nothing is left beside it. */
    snprintf(pipe, sizeof pipe, "%s.pipe", path);
    snprintf(rest, sizeof rest, "%s.tmp*", pipe);
    CHECK(mkfifo(pipe, 0600) == 0);
    CHECK_ERR(amp_file_write_atomic(NULL, pipe, "y", 1), AMP_ERR_WRITE);
    CHECK(lstat(pipe, &info) == 0 && S_ISFIFO(info.st_mode) && glob(rest, 0, NULL, &found) == GLOB_NOMATCH);
    globfree(&found);
    unlink(pipe);
#else
    (void)pipe; (void)rest; (void)info; (void)found;
#endif
    unlink(path);
}

/* ---- threads */

static void *worker(void *arg) {
    amp_context *amp = (amp_context *)arg;
    float a[64], b[64], c[64];
    for (int i = 0; i < 64; i++) a[i] = b[i] = (float)i;
    for (int i = 0; i < 200; i++) {
        void *ptr;
        CHECK_OK(amp_alloc(amp, &ptr, 100 + i));
        CHECK_OK(amp_autocast_begin(amp, NULL));
        CHECK_OK(amp_gemm(amp, AMP_ROW_MAJOR, AMP_NO_TRANS, AMP_TRANS, 8, 8, 8, 1, a, 8, b, 8, 0, c, 8));
        CHECK_OK(amp_autocast_end(amp));
        amp_free(amp, ptr);
        CHECK_ERR(amp_autocast_end(amp), AMP_ERR_STATE);
    }
    return NULL;
}

/* The CPU has nothing to tune; a path is the context's own copy. */
TEST(autotune_on_the_cpu) {
    char path[] = "/no such folder/plans";
    amp_desc d, now;
    amp_context *amp;
    memset(&d, 0, sizeof d);
    d.autotune = AMP_AUTOTUNE_ON;
    d.autotune_file = path;
    CHECK_OK(amp_open(&amp, &d));
    path[1] = 'N';
    CHECK_OK(amp_query(amp, &now));
    CHECK(now.autotune == AMP_AUTOTUNE_ON && strcmp(now.autotune_file, "/no such folder/plans") == 0);
    amp_close(amp);
    memset(&d, 0, sizeof d);
    CHECK_OK(amp_open(&amp, &d));
    CHECK_OK(amp_query(amp, &now));
    CHECK(now.autotune == AMP_AUTOTUNE_OFF && now.autotune_file == NULL);
    amp_close(amp);
}

TEST(several_threads_share_a_context) {
    amp_context *amp = context_open_with(NULL);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, worker, amp);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    amp_close(amp);
}

int main(int argc, char **argv) {
    TEST_BEGIN(argc, argv);
    RUN(results_have_texts_and_hints); RUN(result_numbers_never_change); RUN(last_error_names_field_value_and_mend);
    RUN(hint_where_the_text_does_not_say_what_to_do);
    RUN(null_is_refused_by_name);
    RUN(a_stale_header_is_an_error); RUN(choice_follows_the_device); RUN(cores_of_the_table); RUN(cores_of_arm64); RUN(choice_counts_the_path);
    RUN(choice_refuses_or_falls_back_by_name);
    RUN(machine_is_described); RUN(caches_are_those_that_linux_lists); RUN(cpu_quotas_limit_the_cores); RUN(names_match_as_by_fnmatch); RUN(patterns_of_many_stars_take_no_time);
    RUN(defaults_are_filled_in); RUN(levels_decide_storage); RUN(switching_the_dtype);
    RUN(settings_out_of_range); RUN(memory_is_accounted_and_returned);
    RUN(a_fallback_is_logged_with_its_reason); RUN(a_state_goes_on_by_its_kernels);
    RUN(errors_and_log_lines_are_one_line); RUN(parameters); RUN(tensor_counts); RUN(context_patterns); RUN(files); RUN(autotune_on_the_cpu);
    RUN(several_threads_share_a_context);
    return TEST_END();
}
